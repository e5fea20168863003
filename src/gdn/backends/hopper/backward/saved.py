"""Prepare the saved tensors for the TMA loads of the backward.

At K = V = 64 A_inv has two forms of the same size: fp32 of Triton's forward, split bf16 of Hopper's. In
shared memory hi and lo of [64, 64] fill exactly the fp32 tile, so a kernel has one buffer for either. The
dtype of the TMA descriptor selects the form when a kernel is compiled.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gdn import settings
from gdn.backends.backend import Saved
from gdn.backends.hopper.descriptors import make_descriptor, state_layout
from gdn.backends.hopper.scans import STRIP
from gdn.backends.triton.launch.launches import ALIGNMENT
from gdn.backends.triton.rule.describe import operand_dtype
from gdn.problem import CHUNK, Problem


def describe_inverse(A_inv: Tensor) -> Any:
    """Return the TMA descriptor that loads A_inv of a chunk and head, both parts of split bf16 at once."""
    num_rows = A_inv.shape[2:-1].numel()
    return make_descriptor(A_inv.view(-1, CHUNK), (num_rows, CHUNK), state_layout(A_inv))


def inverse_dtype(saved: Saved) -> torch.dtype:
    """Return the dtype of A_inv: each form has its own binaries of the backward."""
    assert saved.A_inv is not None
    return saved.A_inv.dtype


def saved_forms(p: Problem, saved: Saved) -> list[Saved]:
    """Return the saved tensors with a placeholder of A_inv in each form that problems of the kind may have.

    The last is the form of `triton`, which may run the forward of a smaller problem if no backend is named.
    """
    if p.K != STRIP or settings.backend(p.backend) is not None:
        return [saved]
    forms = ((2, CHUNK, CHUNK), p.q.dtype), ((CHUNK, CHUNK), torch.float32)
    return [replace(saved, A_inv=p.q.new_empty((1, 1, *tile), dtype=dtype)) for tile, dtype in forms]


def can_load(p: Problem, saved: Saved) -> bool:
    """Return True if TMA can load A_inv and the states: hooks on saved tensors may return any strides."""
    dtype = operand_dtype(p)
    pairs = (saved.A_inv, p.q.dtype if saved.has_split_inverse else dtype), (saved.S_in, dtype)
    return all(
        x is not None and x.dtype == expected and x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
        for x, expected in pairs
    )
