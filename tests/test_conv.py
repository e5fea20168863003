"""Test the causal convolution against the reference: both layouts, packed, on a pool, three windows."""

import doctest
from itertools import pairwise

import pytest
import torch

import gdn
import gdn.ops.conv
from gdn.reference.layer import causal_conv1d as law

D = 6
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
FINEST = {"eager": torch.float64, "triton": torch.float32}  # the widest dtype that a backend computes in
LADDER = [0, 0, 1, 3, 6, 6, 10, 27, 80, 80]


pytestmark = pytest.mark.usefixtures("strict_poison")


def relative_error(x, expected):
    """Return the relative RMS error, or infinity if the result holds NaN."""
    x, expected = x.cpu(), expected.cpu()
    error = (
        (x.double() - expected).norm() / expected.norm().clamp(min=1e-30)
        if expected.numel()
        else torch.zeros(())
    )
    return float("inf") if error.isnan() else float(error)


def inputs(B, T, W, N, dtype=torch.float64, layout="channels", D=D, device="cpu"):
    x = torch.randn(B, T, D, dtype=torch.float64)
    if layout == "time":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    tensors = (x, torch.randn(D, W), torch.randn(D), torch.randn(N, D, W - 1))
    return [t.to(device, dtype).requires_grad_() for t in tensors]


def agrees(tensors, tolerance, activation="silu", cu_seqlens=None, **options):
    """Assert that y, the final state and every gradient agree with the reference in fp64 on the CPU."""
    x, weight, bias, state = tensors
    given = {"activation": activation, "cu_seqlens": None if cu_seqlens is None else cu_seqlens.to(x.device)}
    out = gdn.causal_conv1d(x, weight, bias, initial_state=state, output_final_state=True, **given, **options)
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]
    expected = law(*exact[:3], initial_state=exact[3], activation=activation, cu_seqlens=cu_seqlens)
    assert out[0].dtype == out[1].dtype == x.dtype and out[0].is_contiguous()
    seeds = [torch.randn_like(t) for t in out]
    got = torch.autograd.grad(out, tensors, seeds)
    # add zero times the inputs, since a reference of no tokens has no autograd graph
    total = sum((w * s.cpu().double()).sum() for w, s in zip(expected, seeds, strict=True)) + sum(
        0 * t.sum() for t in exact
    )
    ref = torch.autograd.grad(total, exact)
    assert all(g.dtype == t.dtype for g, t in zip(got, tensors, strict=True))
    errors = [
        relative_error(a.detach(), b.detach()) for a, b in zip((*out, *got), (*expected, *ref), strict=True)
    ]
    return max(errors) <= tolerance


@pytest.mark.parametrize("layout", ["channels", "time"])
@pytest.mark.parametrize(
    "W", [pytest.param(W, marks=[pytest.mark.interpret] * (W in (1, 4))) for W in (1, 2, 3, 4, 8, 11)]
)
def test_reference(backend, device, W, layout):
    dtype = FINEST[backend]
    options = {"dtype": dtype, "layout": layout, "device": device}
    good = {"tolerance": TOLERANCE[dtype], "backend": backend}
    for T in (1, 2, 3, 7, 40):
        assert agrees(inputs(2, T, W, 2, **options), **good)
    assert agrees(inputs(2, 40, W, 2, **options), activation=None, **good)
    assert agrees(inputs(1, 85, W, 9, **options), cu_seqlens=torch.tensor(LADDER), **good)
    nothing = torch.tensor([0, 0, 0], dtype=torch.int32)
    assert agrees(inputs(1, 3, W, 2, **options), cu_seqlens=nothing, **good)


@pytest.mark.parametrize("layout", ["channels", "time"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dtypes_and_blocks(backend, device, dtype, layout, monkeypatch):
    """Results agree in blocks far smaller than the problem, and in one block."""
    if dtype == torch.float64 and backend != "eager":
        pytest.skip("fp64 is eager's")
    good = {"tolerance": TOLERANCE[dtype], "backend": backend}
    for block in (1 << 17, 60):
        monkeypatch.setattr("gdn.backends.eager.conv.BLOCK", block)
        monkeypatch.setattr("gdn.backends.eager.conv.STRIP", 4)
        assert agrees(inputs(3, 50, 4, 3, dtype, layout, device=device), **good)
        offsets = torch.tensor(LADDER)
        x = inputs(1, 80, 4, 9, dtype, layout, device=device)
        assert agrees(x, cu_seqlens=offsets, cu_seqlens_cpu=offsets, **good)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_blocks_of_many_channels(dtype):
    """Loads of 16 bytes, several programs per sequence and several sequences per program agree."""
    good = {"tolerance": TOLERANCE[dtype], "backend": "triton"}
    assert agrees(inputs(2, 700, 4, 2, dtype, D=1088, device="cuda"), **good)
    lengths = torch.randint(0, 40, (64,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths]).cumsum(0)
    x = inputs(1, int(offsets[-1]) + 9, 4, 64, dtype, D=520, device="cuda")
    assert agrees(x, cu_seqlens=offsets, **good)


@pytest.mark.gpu
def test_reruns_are_bit_identical_and_other_sizes_compile_nothing(monkeypatch):
    triton = pytest.importorskip("triton")

    def run(B, T, D, lengths=None):
        x, weight, bias, state = inputs(B, T, 4, B if lengths is None else len(lengths), D=D, device="cuda")
        tensors = [t.detach().bfloat16().requires_grad_() for t in (x, weight, bias, state)]
        cu = None if lengths is None else torch.tensor([0, *lengths], device="cuda").cumsum(0)
        out = gdn.causal_conv1d(
            *tensors[:3], initial_state=tensors[3], activation="silu", cu_seqlens=cu, output_final_state=True,
            backend="triton",
        )  # fmt: skip
        return [*out, *torch.autograd.grad(out, tensors, [torch.ones_like(t) for t in out])]

    sizes = [(2, 300, 1024), (1, 300, 1024, (100, 0, 180))]
    for size in sizes:
        torch.manual_seed(1)
        first = run(*size)
        for _ in range(20):
            torch.manual_seed(1)
            assert all(torch.equal(a, b) for a, b in zip(first, run(*size), strict=True))
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["fn"].name)
    )
    for size in [(1, 1, 2048), (5, 1111, 4096), (1, 17, 1536, (1, 16)), (1, 900, 3072, (5,) * 100)]:
        run(*size)
    assert not compiled


@pytest.mark.interpret
def test_gate_fails_wrong_answers(backend, device):
    x, weight, bias, state = (t.detach() for t in inputs(1, 20, 4, 2, FINEST[backend], device=device))
    cu = torch.tensor([0, 9, 20], device=device)
    exact = [t.cpu().double() for t in (x, weight, bias, state)]
    expected, final = law(*exact[:3], initial_state=exact[3], cu_seqlens=cu.cpu(), activation="silu")
    options = {"initial_state": state, "cu_seqlens": cu, "activation": "silu", "backend": backend}
    good = TOLERANCE[FINEST[backend]]
    y, kept = gdn.causal_conv1d(x, weight, bias, output_final_state=True, **options)
    assert relative_error(y, expected) < good and relative_error(kept, final) < good
    wrong = (
        torch.zeros_like(y),
        gdn.causal_conv1d(x, weight.flip(1), bias, **options)[0],
        gdn.causal_conv1d(x, weight, bias, **options | {"initial_state": None})[0],
        gdn.causal_conv1d(x, weight, bias, **options | {"initial_state": state.flip(0)})[0],
        gdn.causal_conv1d(x, weight, bias, **options | {"initial_state": state[:1], "cu_seqlens": None})[0],
        gdn.causal_conv1d(x, weight, bias, **options | {"activation": None})[0],
    )
    assert all(relative_error(other, expected) > 1e-2 for other in wrong)
    assert relative_error(kept.flip(2), final) > 1e-2 and relative_error(y * float("nan"), expected) == float(
        "inf"
    )


@pytest.mark.interpret
def test_nothing_leaks_between_sequences_or_from_the_tail(backend, device):
    x = inputs(1, 20, 4, 2, torch.float32, device=device)[0].detach()
    x[:, 8:12], x[:, 16:] = float("nan"), float("inf")
    x.requires_grad_()
    weight = torch.randn(D, 4, device=device, requires_grad=True)
    cu = torch.tensor([0, 8, 12, 16], device=device)
    y, final = gdn.causal_conv1d(
        x, weight, cu_seqlens=cu, output_final_state=True, activation="silu", backend=backend
    )
    assert y[:, :8].isfinite().all() and y[:, 8:12].isnan().all() and y[:, 12:16].isfinite().all()
    assert not y[:, 16:].any() and final[[0, 2]].isfinite().all()
    (dx,) = torch.autograd.grad(y[:, :16].nan_to_num(0).sum() + y[:, 16:].sum(), x)
    assert dx[:, :8].isfinite().all() and dx[:, 12:16].isfinite().all() and not dx[:, 16:].any()
    y, _ = gdn.causal_conv1d(x[:, 12:], weight, cu_seqlens=cu[:1].new_tensor([0, 4]), backend=backend)
    assert torch.autograd.grad(y.sum(), weight)[0].isfinite().all()


@pytest.mark.interpret
def test_empty_and_unused(backend, device):
    weight = torch.randn(D, 4, device=device)
    for shape in ((2, 0, D), (0, 5, D)):
        x = torch.randn(shape, device=device, requires_grad=True)
        state = torch.randn(shape[0], D, 3, device=device, requires_grad=True)
        y, final = gdn.causal_conv1d(x, weight, initial_state=state, output_final_state=True, backend=backend)
        assert y.shape == x.shape and torch.equal(final, state)
        assert torch.equal(torch.autograd.grad(final.sum(), state)[0], torch.ones_like(state))
    cu = torch.tensor([0], device=device)
    y, final = gdn.causal_conv1d(torch.randn(1, 4, D, device=device), weight, cu_seqlens=cu, backend=backend)
    assert final is None and not y.any()


# D is a multiple of the CPU's vector size: PyTorch's kernels round the remainder differently
WIDE = 64


@pytest.mark.interpret
def test_cut_in_two_and_reruns(backend, device):
    x, weight, bias, _ = (
        t.detach() for t in inputs(2, 30, 4, 2, torch.float32, D=WIDE, device=device)
    )  # fmt: skip
    options = {"activation": "silu", "output_final_state": True, "backend": backend}
    whole, final = gdn.causal_conv1d(x, weight, bias, **options)
    for cut in (1, 2, 29):
        a, state = gdn.causal_conv1d(x[:, :cut], weight, bias, **options)
        b, last = gdn.causal_conv1d(x[:, cut:], weight, bias, initial_state=state, **options)
        assert torch.equal(torch.cat([a, b], 1), whole) and torch.equal(last, final)


def pool(slots, L, dtype=torch.float64, device="cpu"):
    """Return a pool whose slots are further apart than they are large, with NaN between them."""
    pages = torch.full((slots, D * L + 5), float("nan"), dtype=dtype, device=device)
    state = pages[:, : D * L].view(slots, D, L)
    return state.copy_(torch.randn(slots, D, L))


@pytest.mark.interpret
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("null_slot", [None, 0])
@pytest.mark.parametrize("L", [3, 5])
def test_pool(backend, device, L, null_slot, index_dtype):
    lengths, dtype = [0, 2, 7, 4, 1, 9, 5, 3], FINEST[backend]
    slots = torch.tensor([5, 2, 6, -1, 0, 8, 1, 99], dtype=index_dtype, device=device)
    has_state = torch.tensor([True, True, False, True, True, False, True, True], device=device)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    x, weight, bias, _ = (t.detach() for t in inputs(1, 33, 4, 0, dtype, device=device))
    state = pool(9, L, dtype, device)
    state[6] = float("nan")
    before = state.clone()
    y, none = gdn.causal_conv1d(
        x, weight, bias, activation="silu", cu_seqlens=cu, state=state, state_index=slots,
        has_initial_state=has_state, null_slot=null_slot, backend=backend,
    )  # fmt: skip
    assert none is None and not y[:, 31:].any()
    touched = set()
    for n, (a, b) in enumerate(pairwise(cu.tolist())):
        slot = int(slots[n])
        if not (0 if null_slot is None else 1) <= slot < 9:
            assert not y[:, a:b].any()
            continue
        held = before[slot] if has_state[n] else torch.zeros(D, L, dtype=dtype, device=device)
        exact = [t.cpu().double() for t in (x[:, a:b], weight, bias, held[None, :, L - 3 :])]
        expected, _ = law(*exact[:3], initial_state=exact[3], activation="silu")
        assert relative_error(y[:, a:b], expected) < TOLERANCE[dtype]
        if b > a:
            touched.add(slot)
            assert torch.equal(state[slot], torch.cat([held, x[0, a:b].t()], 1)[:, -L:])
    rest = [s for s in range(9) if s not in touched]
    assert torch.equal(state[rest].nan_to_num(7), before[rest].nan_to_num(7)) and touched


@pytest.mark.interpret
def test_pool_dense_narrow_and_all_invalid(backend, device):
    x, weight, _, _ = (t.detach() for t in inputs(3, 2, 4, 0, torch.float32, device=device))
    state = pool(4, 3, torch.bfloat16, device)
    before, index = state.clone(), torch.tensor([3, 7, 0], device=device)
    y, _ = gdn.causal_conv1d(x, weight, state=state, state_index=index, backend=backend)
    held = before[[3, 0]].cpu()
    expected, _ = law(x[[0, 2]].cpu(), weight.cpu(), initial_state=held)
    assert relative_error(y[[0, 2]], expected) < 1e-6 and not y[1].any()
    assert torch.equal(
        state[[3, 0]], torch.cat([before[[3, 0]], x[[0, 2]].transpose(1, 2).bfloat16()], 2)[:, :, 2:]
    )
    assert torch.equal(state[[1, 2]], before[[1, 2]])
    before, index = state.clone(), torch.full((3,), -1, device=device)
    y, _ = gdn.causal_conv1d(x, weight, state=state, state_index=index, backend=backend)
    assert not y.any() and torch.equal(state, before)


def packets(num_rows, num_steps, T, dtype):
    """Yield the packets of a stream, with the number of tokens of each that are kept."""
    for step in range(num_steps):
        yield torch.randn(num_rows, T, D, dtype=dtype), torch.randint(1, T + 1, (num_rows,)), step


@pytest.mark.interpret
@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("protocol", ["window", "ring", "accepted"])
def test_update(backend, device, protocol, W, T):
    """A stream of packets, some tokens of which may be rejected, equals one convolution."""
    slots, dtype = torch.tensor([4, -1, 2, 0, 9]), FINEST[backend]
    rows = [0, 2, 3]
    weight, bias = torch.randn(D, W, dtype=dtype), torch.randn(D, dtype=dtype)
    state = pool(7, W - 1 + T - 1, dtype, device)  # the smallest window that allows rejected tokens
    before, L = state.clone(), state.shape[2]
    ring, kept = torch.tensor([3, -9, 100, -5, 0]), torch.ones(5, dtype=torch.int32)
    history = []
    for r in rows:
        columns = range(L - W + 1, L) if protocol == "window" else range(W - 1)
        if protocol == "ring":
            columns = [(int(ring[r]) - W + 1 + i) % L for i in range(W - 1)]
        history.append(before[slots[r]][:, list(columns)].t().cpu())
    for x, accepted, step in packets(5, 4, T, dtype):
        place = {"ring": {"ring_pos": ring}, "accepted": {"num_accepted": kept}, "window": {}}[protocol]
        options = {name: t.to(device) for name, t in ({"state_index": slots} | place).items()}
        taps = (weight.to(device), bias.to(device))
        y = gdn.causal_conv1d_update(
            x.to(device), state, *taps, activation="silu", backend=backend, **options
        )
        assert not y[[1, 4]].any()
        accepted = torch.full((5,), T) if protocol == "window" else accepted
        for i, r in enumerate(rows):
            line = torch.cat([history[i], x[r]])[None]
            expected, _ = law(line.double(), weight.double(), bias.double(), activation="silu")
            assert relative_error(y[r], expected[0, -T:]) < TOLERANCE[dtype], (step, r)
            history[i] = line[0, : line.shape[1] - T + int(accepted[r])]
        ring, kept = ring + accepted, accepted.int()
    rest = [1, 3, 5, 6]
    assert torch.equal(state[rest], before[rest])
    # with one tap and one token a window has no columns
    assert W + T == 2 or not torch.equal(state[4], before[4])


@pytest.mark.interpret
def test_update_keeps_what_it_documents(backend, device):
    shapes = ((1, 2, D), (1, D, 8), (D, 4))
    x, state, weight = (torch.randn(shape, device=device) for shape in shapes)
    ring, front, long = state.clone(), state.clone(), state.clone()

    def update(state, **place):
        place = {name: torch.tensor([n], device=device) for name, n in place.items()}
        return gdn.causal_conv1d_update(x, state, weight, backend=backend, **place)

    update(ring, ring_pos=7)
    assert torch.equal(ring[:, :, [7, 0]], x.transpose(1, 2)) and torch.equal(
        ring[:, :, 1:7], state[:, :, 1:7]
    )
    update(front, num_accepted=2)
    assert torch.equal(front[:, :, :2], state[:, :, 2:4]) and torch.equal(front[:, :, 2:4], x.transpose(1, 2))
    assert torch.equal(front[:, :, 4:], state[:, :, 4:])
    update(long)
    assert torch.equal(long, torch.cat([state[:, :, 2:], x.transpose(1, 2)], 2))
    for garbage in (-(2**31), 2**31 - 1):
        clamped = 1 if garbage < 0 else 6
        outputs = [update(state.clone(), num_accepted=n) for n in (garbage, clamped)]
        assert torch.equal(*outputs)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_packet_equals_steps_and_prefill(backend, device, dtype):
    x, weight, bias, _ = (t.detach() for t in inputs(3, 5, 4, 3, dtype, D=WIDE, device=device))
    packet, steps, prefill, again = (torch.ones(4, WIDE, 3, dtype=dtype, device=device) for _ in range(4))
    out = torch.empty(3, 10, WIDE, dtype=dtype, device=device)[:, ::2]
    options = {"activation": "silu", "backend": backend}
    y = gdn.causal_conv1d_update(x, packet, weight, bias, out=out, **options)
    singles = [gdn.causal_conv1d_update(t, steps, weight, bias, **options) for t in x.unbind(1)]
    whole, _ = gdn.causal_conv1d(x, weight, bias, state=prefill, **options)
    assert y is out and torch.equal(y, torch.stack(singles, 1)) and torch.equal(y, whole)
    assert torch.equal(packet, steps) and torch.equal(packet, prefill)
    gdn.causal_conv1d_update(x, again, weight, bias, out=x, **options)
    assert torch.equal(x, y)


@pytest.mark.interpret
@pytest.mark.parametrize("sizes", [(128, 128, 128), (2, 3, 1)])
def test_gradients_of_parts(backend, device, sizes, monkeypatch):
    """Parts of y have the bits of y, and so have their gradients; whole strips of channels are not copied."""
    x, weight, bias, state = inputs(1, 6, 2, 2, torch.float32, D=sum(sizes), device=device)
    options = {"activation": "silu", "backend": backend, "cu_seqlens": torch.tensor([0, 4, 6], device=device)}
    options |= {"initial_state": state, "output_final_state": True}
    parts, final = gdn.ops.conv.convolve_and_split(sizes, x, weight, bias, **options)
    seeds = [torch.randn_like(y) for y in (*parts, final)]
    whole = gdn.causal_conv1d(x, weight, bias, **options)
    leaves = (x, weight, bias, state)
    expected = torch.autograd.grad(whole, leaves, [torch.cat(seeds[:3], -1), seeds[3]])
    if backend == "triton" and sizes[0] == 128:
        # tensors of their own
        assert all(x.is_contiguous() for x in parts)
        monkeypatch.setattr(torch, "cat", None)
    found = torch.autograd.grad([*parts, final], leaves, seeds)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(parts, whole[0].split(sizes, -1), strict=True))


def test_gradcheck():
    x, weight, bias, state = inputs(1, 7, 3, 3)
    cu = torch.tensor([0, 1, 1, 6])

    def call(*tensors):
        return gdn.causal_conv1d(
            *tensors[:3], initial_state=tensors[3], activation="silu", cu_seqlens=cu, output_final_state=True
        )

    assert torch.autograd.gradcheck(call, (x, weight, bias, state))


def test_operators(backend, device):
    """The operators have right schemas, fakes, autograd and mutations, and one graph for every length."""
    x, weight, bias, state = inputs(1, 12, 4, 2, torch.float32, device=device)
    cu, of = torch.tensor([0, 5, 12], device=device), gdn.ops.conv
    torch.library.opcheck(of.conv_operator, (x, weight, bias, state, cu, None, "silu", True, backend))
    torch.library.opcheck(of.conv_operator, (x, weight, None, None, None, cu.cpu(), None, False, backend))
    x, weight, slots = x.detach(), weight.detach(), torch.tensor([1, 0], device=device)
    pools, has = torch.randn(2, 3, D, 4, device=device), torch.tensor([True, False], device=device)
    args = (x, weight, None, pools[0].clone(), slots, has, cu, None, "silu", None, backend)
    torch.library.opcheck(of.pool_operator, args)
    packet, out = torch.randn(2, 2, D, device=device), torch.empty(2, 2, D, device=device)
    args = (packet, pools[1].clone(), weight, None, slots, None, None, out, "silu", 0, backend)
    torch.library.opcheck(of.update_operator, args)


def test_compile(backend, device):
    def step(x, weight, state, window, ring):
        y, final = gdn.causal_conv1d(
            x, weight, activation="silu", initial_state=state, output_final_state=True, backend=backend
        )
        with torch.no_grad():
            z = gdn.causal_conv1d_update(y.detach(), window, weight.detach(), ring_pos=ring, backend=backend)
        return y.sum() + final.sum() + z.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (5, 9, 3):
        x, weight, _, state = inputs(2, T, 4, 2, torch.float32, device=device)
        windows, ring = torch.ones(2, 2, D, 12, device=device), torch.tensor([1, 2], device=device)
        results = [
            f(x, weight, state, w, ring) for f, w in zip((step, compiled), windows.unbind(), strict=True)
        ]
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
        (NotImplementedError, "no backend supports this call", {"backend": "hopper"}),
    ],
)
def test_update_refusals(error, name, options):
    with pytest.raises(error, match=rf"^{name}: "):
        gdn.causal_conv1d_update(**{"x": X, "state": POOL, "weight": WEIGHT} | options)


def test_examples():
    assert doctest.testmod(gdn.ops.conv).failed == 0
