"""Check which elements of A_inv and of the factors in HBM the TMA boxes of the Hopper forward move."""

import pytest
import torch
from conftest import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit.gluon_simulator import Descriptor

from gdn.backends.hopper.descriptors import describe_factors, describe_inverse_rows, inverse_tile
from gdn.backends.hopper.factors import (
    BOX_LINES,
    BOX_ROWS,
    CHUNK_DECAY,
    LINE,
    NUM_ROWS,
    WELL_CONDITIONED,
    C,
)


@pytest.mark.parametrize("has_zeros", [False, True])
def test_rows_of_an_inverse(has_zeros):
    """Store and load tiles by their boxes: every element in HBM is used, and zero blocks load as zeros."""
    tiles = torch.randn(3, 2, 64, 64).tril().bfloat16()
    held = torch.full((3, 2, *inverse_tile(has_zeros)), float("nan"), dtype=torch.bfloat16)
    boxes = [None if x is None else Descriptor(x.base, x.block_shape) for x in describe_inverse_rows(held)]
    assert [x is None for x in boxes] == [False, False, has_zeros, has_zeros]
    boxes = [x for x in boxes if x is not None]
    rows = 64 // len(boxes)
    for i, tile in enumerate(tiles.flatten(0, 1)):
        for n, box in enumerate(boxes):
            # NaN right of the diagonal's block, as shared memory may hold anything there
            piece = tile[n * rows : (n + 1) * rows].clone()
            if not has_zeros:
                piece[:, (n + 1) * rows :] = float("nan")
            place, part = box.both([i, 0, 0], piece[None])
            place.copy_(part)
    assert not held.isnan().any()
    assert held.numel() == 6 * 64 * (64 if has_zeros else 40)
    for i, tile in enumerate(tiles.flatten(0, 1)):
        for n, box in enumerate(boxes):
            piece = torch.zeros(1, rows, 64, dtype=torch.bfloat16)
            place, part = box.both([i, 0, 0], piece)
            part.copy_(place)
            assert torch.equal(piece[0], tile[n * rows : (n + 1) * rows])


def test_boxes_of_factors():
    """Load both boxes of a chunk: the first is whole, the second ends with the line of the scalars."""
    rows = torch.arange(float(6 * NUM_ROWS.value * C.value)).view(3, 2, NUM_ROWS.value, C.value)
    x = describe_factors(rows)
    box = Descriptor(x.base, x.block_shape)
    lines = BOX_LINES.value
    for i, tile in enumerate(rows.flatten(0, 1)):
        first, _ = box.both([i, 0, 0], torch.zeros(1, lines, LINE.value))
        assert torch.equal(first.flatten(), tile[: BOX_ROWS.value].flatten())
        second, _ = box.both([i, lines, 0], torch.zeros(1, lines, LINE.value))
        assert second.numel() == 5 * LINE.value
        assert torch.equal(second.flatten(), tile[BOX_ROWS.value :].flatten()[: 5 * LINE.value])
    scalars = (CHUNK_DECAY.value * C.value, WELL_CONDITIONED.value)
    begin = BOX_ROWS.value * C.value
    assert all(begin <= place < begin + 5 * LINE.value for place in scalars)
    # TMA needs addresses and strides of 16 bytes; boxes of 1 KiB fill the rows of a stage
    assert lines * LINE.value == BOX_ROWS.value * C.value == 256
