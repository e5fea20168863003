"""Test prefill, the gate and replay with a decay per key channel, on every backend."""

import pytest
import torch
from kit import api
from kit.serving import TOLERANCE, error, find_wrong_state, inputs, moved, pool_of

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN = float("nan")
HV, K, V = 2, 16, 24
LENGTHS = (66, 0, 3, 2)
SLOTS = {
    "in place": {"null_slot": 0},
    "to other slots": {"out_state_index": torch.tensor([6, 7, 1, 2])},
    "of new sequences": {"has_initial_state": torch.tensor([True, False, False, True])},
    "snapshots": {
        "snapshot_pos": torch.tensor([65, 0, 2, 3]), "snapshot_index": torch.tensor([1, 2, 3, 6]),
        "checkpoint_every": 64, "checkpoint_offsets": torch.tensor([0, 1, 1, 1]),
    },
}  # fmt: skip


def prompts(name, dtype, pool, lengths=LENGTHS, HV=HV, D=K, **options):
    """Return a packed prefill with a reset of one channel, raw logits where there is a bound."""
    total, v_first = sum(lengths) + 2, pool == F32
    raw = "lower_bound" in options
    sizes = {"H": HV // 2, "HV": HV, "K": D, "V": D}
    x = inputs(1, total, **sizes, dtype=dtype, raw=raw, is_per_channel=True) | options
    if raw:
        x["a"] = x["a"].to(dtype)
    else:
        x["g"][:, 1, :, 3] = -1e6
    x |= SLOTS[name] | {
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "state": pool_of(9, HV=HV, K=D, V=D, dtype=pool, v_first=v_first),
        "state_index": torch.tensor([5, 3, 4, 8]),
    }
    if name == "snapshots":
        x["checkpoints"] = torch.full((3, *x["state"].shape[1:]), NAN)
    return x | {"state_v_first": v_first}


def check_prefill(backend, device, x, tolerance):
    expected = api.reference.prefill(**x)
    y = moved(x, device)
    out = torch.full_like(y["v"], NAN)
    assert api.prefill(**y, out=out, backend=backend) is out
    assert error(out, expected.o) <= tolerance
    assert find_wrong_state(y["state"], expected.state, x["state"], tolerance) is None
    if "checkpoints" in x:
        assert find_wrong_state(y["checkpoints"], expected.extra, x["checkpoints"], tolerance) is None


PREFILLS = [
    ("in place", BF16, BF16, {"lower_bound": -5.0}),
    ("to other slots", F32, F32, {}),
    ("snapshots", F32, F32, {"lower_bound": -40.0}),
    ("of new sequences", F16, F16, {}),
    ("snapshots", BF16, BF16, {}),
]


@pytest.mark.parametrize(
    "name, dtype, pool, options",
    [pytest.param(*x, marks=[pytest.mark.interpret] if i < 3 else []) for i, x in enumerate(PREFILLS)],
)
def test_prefill(backend, device, poison, name, dtype, pool, options):
    x = prompts(name, dtype, pool, **options)
    check_prefill(backend, device, x, max(TOLERANCE[dtype], TOLERANCE[pool]))
