"""Causal convolution: the law in both memory layouts, packed, on a pool; three ways to keep a window."""

import doctest
from itertools import pairwise

import pytest
import torch

import gdn
import gdn.ops.conv
from gdn.reference.layer import causal_conv1d as law

D = 6
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
LADDER = [0, 0, 1, 3, 6, 6, 10, 27, 80, 80]


pytestmark = pytest.mark.usefixtures("strict_poison")


def differs(x, wanted):
    """Relative RMS error; infinite for NaN."""
    error = (
        (x.double() - wanted).norm() / wanted.norm().clamp(min=1e-30) if wanted.numel() else torch.zeros(())
    )
    return float("inf") if error.isnan() else float(error)


def inputs(B, T, W, N, dtype=torch.float64, layout="channels", D=D):
    x = torch.randn(B, T, D, dtype=torch.float64)
    if layout == "time":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    tensors = (x, torch.randn(D, W), torch.randn(D), torch.randn(N, D, W - 1))
    return [t.to(dtype).requires_grad_() for t in tensors]


def agrees(tensors, tolerance, activation="silu", cu_seqlens=None, real=None, **options):
    """y, final state and every gradient against the law in fp64."""
    x, weight, bias, state = tensors
    options |= {"activation": activation, "cu_seqlens": cu_seqlens}
    out = gdn.causal_conv1d(x, weight, bias, initial_state=state, output_final_state=True, **options)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    options.pop("cu_seqlens_cpu", None)
    wanted = law(*exact[:3], initial_state=exact[3], **options)
    assert out[0].dtype == out[1].dtype == x.dtype and out[0].is_contiguous()
    seeds = [torch.randn_like(t) for t in out]
    got = torch.autograd.grad(out, tensors, seeds)
    # zero times the inputs: a law of no tokens has no graph
    total = sum((w * s.double()).sum() for w, s in zip(wanted, seeds, strict=True)) + sum(
        0 * t.sum() for t in exact
    )
    ref = torch.autograd.grad(total, exact)
    assert all(g.dtype == t.dtype for g, t in zip(got, tensors, strict=True))
    errors = [differs(a.detach(), b.detach()) for a, b in zip((*out, *got), (*wanted, *ref), strict=True)]
    return max(errors) <= tolerance


@pytest.mark.parametrize("layout", ["channels", "time"])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 8])
def test_law(W, layout):
    for T in (1, 2, 3, 7, 40):
        assert agrees(inputs(2, T, W, 2, layout=layout), 1e-12)
    assert agrees(inputs(2, 40, W, 2, layout=layout), 1e-12, activation=None)
    assert agrees(inputs(1, 85, W, 9, layout=layout), 1e-12, cu_seqlens=torch.tensor(LADDER))
    assert agrees(
        inputs(1, 3, W, 2, layout=layout), 1e-12, cu_seqlens=torch.tensor([0, 0, 0], dtype=torch.int32)
    )


@pytest.mark.parametrize("layout", ["channels", "time"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dtypes_and_blocks(dtype, layout, monkeypatch):
    """In blocks far smaller than the problem, and in one."""
    for block in (1 << 17, 60):
        monkeypatch.setattr("gdn.backends.eager.conv.BLOCK", block)
        monkeypatch.setattr("gdn.backends.eager.conv.STRIP", 4)
        assert agrees(inputs(3, 50, 4, 3, dtype, layout), TOLERANCE[dtype])
        offsets = torch.tensor(LADDER)
        assert agrees(
            inputs(1, 80, 4, 9, dtype, layout), TOLERANCE[dtype], cu_seqlens=offsets, cu_seqlens_cpu=offsets
        )


def test_gate_fails_wrong_answers():
    x, weight, bias, state = (t.detach() for t in inputs(1, 20, 4, 2))
    cu = torch.tensor([0, 9, 20])
    wanted, final = law(x, weight, bias, initial_state=state, cu_seqlens=cu, activation="silu")
    y, kept = gdn.causal_conv1d(
        x, weight, bias, initial_state=state, cu_seqlens=cu, activation="silu", output_final_state=True
    )
    assert differs(y, wanted) < 1e-12 and differs(kept, final) < 1e-12
    wrong = (
        torch.zeros_like(y),
        gdn.causal_conv1d(x, weight.flip(1), bias, initial_state=state, cu_seqlens=cu, activation="silu")[0],
        gdn.causal_conv1d(x, weight, bias, cu_seqlens=cu, activation="silu")[0],
        gdn.causal_conv1d(x, weight, bias, initial_state=state.flip(0), cu_seqlens=cu, activation="silu")[0],
        gdn.causal_conv1d(x, weight, bias, initial_state=state[:1], activation="silu")[0],
        gdn.causal_conv1d(x, weight, bias, initial_state=state, cu_seqlens=cu)[0],
    )
    assert all(differs(other, wanted) > 1e-2 for other in wrong)
    assert differs(kept.flip(2), final) > 1e-2 and differs(y * float("nan"), wanted) == float("inf")


def test_nothing_leaks_between_sequences_or_from_the_tail():
    x = inputs(1, 20, 4, 2, torch.float32)[0].detach()
    x[:, 8:12], x[:, 16:] = float("nan"), float("inf")
    x.requires_grad_()
    weight = torch.randn(D, 4, requires_grad=True)
    cu = torch.tensor([0, 8, 12, 16])
    y, final = gdn.causal_conv1d(x, weight, cu_seqlens=cu, output_final_state=True, activation="silu")
    assert y[:, :8].isfinite().all() and y[:, 8:12].isnan().all() and y[:, 12:16].isfinite().all()
    assert not y[:, 16:].any() and final[[0, 2]].isfinite().all()
    (dx,) = torch.autograd.grad(y[:, :16].nan_to_num(0).sum() + y[:, 16:].sum(), x)
    assert dx[:, :8].isfinite().all() and dx[:, 12:16].isfinite().all() and not dx[:, 16:].any()
    y, _ = gdn.causal_conv1d(x[:, 12:], weight, cu_seqlens=torch.tensor([0, 4]))
    assert torch.autograd.grad(y.sum(), weight)[0].isfinite().all()


def test_empty_and_unused():
    for shape in ((2, 0, D), (0, 5, D)):
        x = torch.randn(shape, requires_grad=True)
        state = torch.randn(shape[0], D, 3, requires_grad=True)
        y, final = gdn.causal_conv1d(x, torch.randn(D, 4), initial_state=state, output_final_state=True)
        assert y.shape == x.shape and torch.equal(final, state)
        assert torch.equal(torch.autograd.grad(final.sum(), state)[0], torch.ones_like(state))
    y, final = gdn.causal_conv1d(torch.randn(1, 4, D), torch.randn(D, 4), cu_seqlens=torch.tensor([0]))
    assert final is None and not y.any()


# bits are compared where D is a multiple of the CPU's vectors: torch's kernels round a remainder differently
WIDE = 64


def test_cut_in_two_and_reruns():
    x, weight, bias, _ = (t.detach() for t in inputs(2, 30, 4, 2, torch.float32, D=WIDE))
    whole, final = gdn.causal_conv1d(x, weight, bias, activation="silu", output_final_state=True)
    for cut in (1, 2, 29):
        a, state = gdn.causal_conv1d(x[:, :cut], weight, bias, activation="silu", output_final_state=True)
        b, last = gdn.causal_conv1d(
            x[:, cut:], weight, bias, activation="silu", initial_state=state, output_final_state=True
        )
        assert torch.equal(torch.cat([a, b], 1), whole) and torch.equal(last, final)


def pool(slots, L, dtype=torch.float64):
    """A pool with a slot pitch wider than a slot, full of NaN between the slots."""
    pages = torch.full((slots, D * L + 5), float("nan"), dtype=dtype)
    state = pages[:, : D * L].view(slots, D, L)
    return state.copy_(torch.randn(slots, D, L))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("null_slot", [None, 0])
@pytest.mark.parametrize("L", [3, 5])
def test_pool(L, null_slot, index_dtype):
    lengths = [0, 2, 7, 4, 1, 9, 5, 3]
    slots = torch.tensor([5, 2, 6, -1, 0, 8, 1, 99], dtype=index_dtype)
    has_state = torch.tensor([True, True, False, True, True, False, True, True])
    cu = torch.tensor([0, *lengths]).cumsum(0)
    x, weight, bias, _ = (t.detach() for t in inputs(1, 33, 4, 0))
    state = pool(9, L)
    state[6] = float("nan")
    before = state.clone()
    y, none = gdn.causal_conv1d(
        x, weight, bias, activation="silu", cu_seqlens=cu, state=state, state_index=slots,
        has_initial_state=has_state, null_slot=null_slot,
    )  # fmt: skip
    assert none is None and not y[:, 31:].any()
    touched = set()
    for n, (a, b) in enumerate(pairwise(cu.tolist())):
        slot = int(slots[n])
        if not (0 if null_slot is None else 1) <= slot < 9:
            assert not y[:, a:b].any()
            continue
        held = before[slot] if has_state[n] else torch.zeros(D, L, dtype=torch.float64)
        wanted, _ = law(x[:, a:b], weight, bias, initial_state=held[None, :, L - 3 :], activation="silu")
        assert differs(y[:, a:b], wanted) < 1e-12
        if b > a:
            touched.add(slot)
            assert torch.equal(state[slot], torch.cat([held, x[0, a:b].t()], 1)[:, -L:])
    rest = [s for s in range(9) if s not in touched]
    assert torch.equal(state[rest].nan_to_num(7), before[rest].nan_to_num(7)) and touched


def test_pool_dense_narrow_and_all_invalid():
    x, weight, _, _ = (t.detach() for t in inputs(3, 2, 4, 0, torch.float32))
    state = pool(4, 3, torch.bfloat16)
    before, index = state.clone(), torch.tensor([3, 7, 0])
    y, _ = gdn.causal_conv1d(x, weight, state=state, state_index=index)
    wanted, _ = law(x[[0, 2]], weight, initial_state=before[[3, 0]])
    assert differs(y[[0, 2]], wanted) < 1e-6 and not y[1].any()
    assert torch.equal(
        state[[3, 0]], torch.cat([before[[3, 0]], x[[0, 2]].transpose(1, 2).bfloat16()], 2)[:, :, 2:]
    )
    assert torch.equal(state[[1, 2]], before[[1, 2]])
    before = state.clone()
    y, _ = gdn.causal_conv1d(x, weight, state=state, state_index=torch.full((3,), -1))
    assert not y.any() and torch.equal(state, before)


def packets(num_rows, num_steps, T):
    """A stream of packets with the number of tokens of each that are kept."""
    for step in range(num_steps):
        yield torch.randn(num_rows, T, D, dtype=torch.float64), torch.randint(1, T + 1, (num_rows,)), step


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("protocol", ["window", "ring", "accepted"])
def test_update(protocol, W, T):
    """A stream of packets, of which a part is kept where the protocol allows it, equals one convolution."""
    slots = torch.tensor([4, -1, 2, 0, 9])
    rows = [0, 2, 3]
    weight, bias = torch.randn(D, W, dtype=torch.float64), torch.randn(D, dtype=torch.float64)
    state = pool(7, W - 1 + T - 1)  # the least that lets tokens be rejected
    before, L = state.clone(), state.shape[2]
    ring, kept = torch.tensor([3, -9, 100, -5, 0]), torch.ones(5, dtype=torch.int32)
    history = []
    for r in rows:
        columns = range(L - W + 1, L) if protocol == "window" else range(W - 1)
        if protocol == "ring":
            columns = [(int(ring[r]) - W + 1 + i) % L for i in range(W - 1)]
        history.append(before[slots[r]][:, list(columns)].t())
    for x, accepted, step in packets(5, 4, T):
        options = {"ring": {"ring_pos": ring}, "accepted": {"num_accepted": kept}, "window": {}}[protocol]
        y = gdn.causal_conv1d_update(x, state, weight, bias, activation="silu", state_index=slots, **options)
        assert not y[[1, 4]].any()
        accepted = torch.full((5,), T) if protocol == "window" else accepted
        for i, r in enumerate(rows):
            line = torch.cat([history[i], x[r]])[None]
            wanted, _ = law(line, weight, bias, activation="silu")
            assert differs(y[r], wanted[0, -T:]) < 1e-12, (step, r)
            history[i] = line[0, : line.shape[1] - T + int(accepted[r])]
        ring, kept = ring + accepted, accepted.int()
    rest = [1, 3, 5, 6]
    assert torch.equal(state[rest], before[rest])
    # one tap and one token: no columns at all
    assert W + T == 2 or not torch.equal(state[4], before[4])


def test_update_keeps_what_it_documents():
    x, state, weight = torch.randn(1, 2, D), torch.randn(1, D, 8), torch.randn(D, 4)
    ring, front = state.clone(), state.clone()
    gdn.causal_conv1d_update(x, ring, weight, ring_pos=torch.tensor([7]))
    assert torch.equal(ring[:, :, [7, 0]], x.transpose(1, 2)) and torch.equal(
        ring[:, :, 1:7], state[:, :, 1:7]
    )
    gdn.causal_conv1d_update(x, front, weight, num_accepted=torch.tensor([2]))
    assert torch.equal(front[:, :, :2], state[:, :, 2:4]) and torch.equal(front[:, :, 2:4], x.transpose(1, 2))
    assert torch.equal(front[:, :, 4:], state[:, :, 4:])
    for garbage in (-(2**31), 2**31 - 1):
        clamped = torch.tensor([1 if garbage < 0 else 6])
        outputs = [
            gdn.causal_conv1d_update(x, state.clone(), weight, num_accepted=n)
            for n in (torch.tensor([garbage], dtype=torch.int32), clamped)
        ]
        assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_packet_equals_steps_and_prefill(dtype):
    x, weight, bias, _ = (t.detach() for t in inputs(3, 5, 4, 3, dtype, D=WIDE))
    packet, steps, prefill, again = (torch.ones(4, WIDE, 3, dtype=dtype) for _ in range(4))
    out = torch.empty(3, 10, WIDE, dtype=dtype)[:, ::2]
    y = gdn.causal_conv1d_update(x, packet, weight, bias, activation="silu", out=out)
    singles = [gdn.causal_conv1d_update(t, steps, weight, bias, activation="silu") for t in x.unbind(1)]
    whole, _ = gdn.causal_conv1d(x, weight, bias, activation="silu", state=prefill)
    assert y is out and torch.equal(y, torch.stack(singles, 1)) and torch.equal(y, whole)
    assert torch.equal(packet, steps) and torch.equal(packet, prefill)
    gdn.causal_conv1d_update(x, again, weight, bias, activation="silu", out=x)
    assert torch.equal(x, y)


def test_gradcheck():
    x, weight, bias, state = inputs(1, 7, 3, 3)
    cu = torch.tensor([0, 1, 1, 6])

    def call(*tensors):
        return gdn.causal_conv1d(
            *tensors[:3], initial_state=tensors[3], activation="silu", cu_seqlens=cu, output_final_state=True
        )

    assert torch.autograd.gradcheck(call, (x, weight, bias, state))


def test_operators():
    """The torch operators: schemas, fakes, autograd, mutation; and one compiled graph for every length."""
    x, weight, bias, state = inputs(1, 12, 4, 2, torch.float32)
    cu = torch.tensor([0, 5, 12])
    torch.library.opcheck(gdn.ops.conv.conv_operator, (x, weight, bias, state, cu, None, "silu", True, None))
    torch.library.opcheck(gdn.ops.conv.conv_operator, (x, weight, None, None, None, cu, None, False, "eager"))
    x, weight, slots = x.detach(), weight.detach(), torch.tensor([1, 0])
    pools = (torch.randn(3, D, 4), torch.randn(3, D, 4))
    args = (x, weight, None, pools[0], slots, torch.tensor([True, False]), cu, None, "silu", None, None)
    torch.library.opcheck(gdn.ops.conv.pool_operator, args)
    out = torch.empty(2, 2, D)
    args = (torch.randn(2, 2, D), pools[1], weight, None, slots, None, None, out, "silu", 0, None)
    torch.library.opcheck(gdn.ops.conv.update_operator, args)


def test_compile():
    def step(x, weight, state, window):
        y, final = gdn.causal_conv1d(
            x, weight, activation="silu", initial_state=state, output_final_state=True
        )
        with torch.no_grad():
            z = gdn.causal_conv1d_update(y.detach(), window, weight.detach(), ring_pos=torch.tensor([1, 2]))
        return y.sum() + final.sum() + z.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (5, 9, 3):
        x, weight, _, state = inputs(2, T, 4, 2, torch.float32)
        windows = (torch.ones(2, D, 12), torch.ones(2, D, 12))
        results = [f(x, weight, state, w) for f, w in zip((step, compiled), windows, strict=True)]
        grads = [torch.autograd.grad(r, (x, weight, state)) for r in results]
        assert torch.equal(*results) and torch.equal(*windows)
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


X, WEIGHT, POOL = torch.zeros(2, 5, D), torch.zeros(D, 4), torch.zeros(3, D, 3)
ROWS = torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (TypeError, "x", {"x": X.long()}),
        (TypeError, "weight", {"weight": None}),
        (ValueError, "weight", {"weight": torch.zeros(D + 1, 4)}),
        (ValueError, "weight", {"weight": torch.zeros(D, 0)}),
        (ValueError, "bias", {"bias": torch.zeros(D + 1)}),
        (ValueError, "activation", {"activation": "gelu"}),
        (TypeError, "activation", {"activation": 1}),
        (TypeError, "output_final_state", {"output_final_state": 1}),
        (ValueError, "initial_state", {"initial_state": torch.zeros(2, D, 4)}),
        (ValueError, "x", {"cu_seqlens": torch.tensor([0, 5])}),
        (ValueError, "cu_seqlens", {"x": X[:1], "cu_seqlens": torch.tensor([1, 5])}),
        (ValueError, "cu_seqlens", {"x": X[:1], "cu_seqlens": torch.tensor([0, 4, 3])}),
        (ValueError, "cu_seqlens", {"x": X[:1], "cu_seqlens": torch.tensor([0, 6])}),
        (ValueError, "cu_seqlens_cpu", {"cu_seqlens_cpu": torch.tensor([0, 5])}),
        (ValueError, "state_index", {"state_index": ROWS}),
        (ValueError, "null_slot", {"null_slot": 0}),
        (ValueError, "null_slot", {"state": POOL, "null_slot": 1}),
        (ValueError, "state", {"state": POOL[:, :, :2]}),
        (ValueError, "state_index", {"state": POOL, "state_index": ROWS[:1]}),
        (TypeError, "state_index", {"state": POOL, "state_index": ROWS.float()}),
        (TypeError, "has_initial_state", {"state": POOL, "has_initial_state": ROWS}),
        (ValueError, "initial_state", {"state": POOL, "initial_state": torch.zeros(2, D, 3)}),
        (ValueError, "output_final_state", {"state": POOL, "output_final_state": True}),
        (ValueError, "weight", {"state": POOL, "weight": torch.zeros(D, 4, requires_grad=True)}),
        (ValueError, "backend", {"backend": "abacus"}),
        (TypeError, "backend", {"backend": 3}),
    ],
)
def test_refusals(error, name, options):
    before = POOL.clone()
    with pytest.raises(error, match=rf"^{name}: expected .*, got "):
        gdn.causal_conv1d(**{"x": X, "weight": WEIGHT} | options)
    assert torch.equal(POOL, before)


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (ValueError, "x", {"x": X[0, 0]}),
        (ValueError, "state", {"state": POOL[:, :, :2]}),
        (ValueError, "state", {"num_accepted": ROWS}),
        (ValueError, "num_accepted", {"num_accepted": ROWS, "ring_pos": ROWS}),
        (ValueError, "ring_pos", {"ring_pos": ROWS[:1]}),
        (ValueError, "out", {"out": X[:, :1]}),
        (ValueError, "out", {"out": X.double()}),
        (ValueError, "x", {"x": X.clone().requires_grad_()}),
        (NotImplementedError, "no backend takes this problem", {"backend": "hopper"}),
    ],
)
def test_update_refusals(error, name, options):
    with pytest.raises(error, match=rf"^{name}: "):
        gdn.causal_conv1d_update(**{"x": X, "state": POOL, "weight": WEIGHT} | options)


def test_examples():
    assert doctest.testmod(gdn.ops.conv).failed == 0
