"""Test prefill, the gate and replay with a decay per key channel, on every backend."""

import pytest
import torch
from kit import api
from kit.serving import TOLERANCE, error, find_wrong_state, inputs, moved, pool_of
from torch._subclasses.fake_tensor import FakeTensorMode

import gdn
from gdn.backends import triton
from gdn.problem.stages import parse_gate

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


def gate_inputs(dtype, *lead, K=K, device="cpu"):
    """Return a, b, A_log and dt_bias; a is a view of rows of a projection, whose rows are wider."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((*lead, HV * K + 16), (*lead, HV), (HV,), (HV, K))
    x = [torch.randn(s, generator=rng).to(device, dtype) for s in shapes]
    return [x[0][..., : HV * K].unflatten(-1, (HV, K)), *x[1:]]


def run_gate(backend, given, dy, lower_bound):
    """Return g and beta and all gradients; without a backend in fp64, by the reference."""
    given = [None if x is None else x.detach() for x in given]
    if backend is None:
        given = [None if x is None else x.cpu().double() for x in given]
    leaves = [x.requires_grad_() for x in given if x is not None]
    if backend is None:
        a, b, A_log, dt_bias = given
        outputs = (gdn.reference.gate(a, A_log, dt_bias, lower_bound, is_per_channel=True), b.sigmoid())
    else:
        outputs = gdn.gate(*given, lower_bound=lower_bound, backend=backend)
    return *outputs, *torch.autograd.grad(
        outputs, leaves, [y.to(x) for x, y in zip(outputs, dy, strict=True)]
    )


def check_gate(backend, given, lower_bound, tolerance):
    """Compare every element with the reference, and with dy > 0 the sums, whose terms have one sign."""
    dy = [torch.rand(given[0].shape), torch.rand(given[1].shape)]
    found, expected = (run_gate(name, given, dy, lower_bound) for name in (backend, None))
    narrow = torch.finfo(given[0].dtype).eps
    for i, (x, ref) in enumerate(zip(found, expected, strict=True)):
        rtol = tolerance if i < 2 else max(narrow, tolerance)
        # the terms of dA_log of the bounded form have both signs
        atol = rtol * float(ref.abs().sum()) / 4 if lower_bound is not None and i == 4 else 0
        torch.testing.assert_close(x.cpu().double(), ref, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "lead, channels, dtype, bound",
    [
        pytest.param((2, 5), K, BF16, -5.0, marks=pytest.mark.interpret),
        pytest.param((3,), 37, F32, None, marks=pytest.mark.interpret),
        ((), 200, F32, -40.0),
        ((0,), K, F32, None),
        ((2, 3, 4), 160, BF16, None),
    ],
)
def test_gate(backend, device, lead, channels, dtype, bound):
    """Logits of any leading axes, of rows of a projection, with and without their parameters."""
    given = gate_inputs(dtype, *lead, K=channels, device=device)
    check_gate(backend, given, bound, 4e-6)
    if bound is None:
        check_gate(backend, [*given[:3], None], bound, 4e-6)
    else:
        check_gate(backend, [*given[:2], None, None], bound, 4e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_gate_of_extreme_logits(backend, device, bound):
    """Values and gradients of unused and of saturated logits are finite; NaN without a gradient is none."""
    a, b, A_log, dt_bias = gate_inputs(F32, 4, device=device)
    a = a.clone()
    a[0], a[1] = NAN, torch.tensor([torch.inf, -torch.inf], device=device)[:, None]
    a[2], A_log[1] = torch.tensor([1e38, -1e38], device=device)[:, None], 100.0 if bound else -torch.inf
    dy = [
        torch.tensor([0.0, 0.0 if bound is None else 1.0, 1.0, 1.0])[:, None].expand(4, HV) for _ in range(2)
    ]
    dy[0] = dy[0][..., None].expand(4, HV, K)
    g, beta, da, db, dA_log, ddt_bias = run_gate(
        backend, (a, b, A_log, dt_bias), [y.to(device) for y in dy], bound
    )
    assert bool(g[0].isnan().all()) and bool(g[1:].le(0).all() and beta.isfinite().all())
    assert not da[0].any() and bool(da[3, 0].ne(0).all())
    for x in (da, db, dA_log, ddt_bias):
        assert bool(x.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_gate_of_many_tokens(bound):
    """Several blocks per program, several strips of channels; reruns give the same bits."""
    for lead, channels in (((2, 5000), 128), ((700,), 200)):
        given = gate_inputs(F32, *lead, K=channels, device="cuda")
        check_gate("triton", given, bound, 4e-6)
        dy = [torch.rand(x.shape, device="cuda") for x in given[:2]]
        first = run_gate("triton", given, dy, bound)
        for _ in range(10):
            again = run_gate("triton", given, dy, bound)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_only_named_calls_run_unmeasured_kernels_on_a_gpu():
    """No test on a GPU has passed them: the backend of such a call is `eager`, unless it names another."""
    with FakeTensorMode():
        a, b = torch.empty(2, HV, K, device="cuda"), torch.empty(2, HV, device="cuda")
        for name, reason in ((None, "by name"), ("triton", None)):
            found = triton.refuses(parse_gate(a, b, None, None, -5.0, name))
            assert (found is None) if reason is None else (reason in found)
        assert triton.refuses(parse_gate(b, b, b[0], None, None, None)) is None
