"""Test gdn.gate: the formula at extreme inputs, its gradients, and its torch operator."""

import doctest

import pytest
import torch

import gdn
import gdn.ops.gate
from gdn import reference

HV = 3


def logits(dtype: torch.dtype, *lead: int, device: str = "cpu") -> list[torch.Tensor]:
    """Return a and b [*lead, HV], A_log and dt_bias [HV]."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(*lead, HV), (*lead, HV), (HV,), (HV,)]
    tensors = [torch.randn(s, generator=rng, dtype=torch.float64).to(device, dtype) for s in shapes]
    return [x.requires_grad_() for x in tensors]


def exact_leaf(x: torch.Tensor) -> torch.Tensor:
    """Return a leaf with the same numbers in fp64 on the CPU, for the reference."""
    return x.detach().cpu().double().requires_grad_()


def reference_gate(a, b, A_log, dt_bias=None):
    return reference.gate(a, A_log, dt_bias), torch.sigmoid(b)


def agrees(x: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Return True if every element is within a relative tolerance, so that no sum hides a small one."""
    return torch.allclose(x.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=0)


TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.mark.interpret
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("lead", [(), (0,), (7,), (2, 5), (2, 3, 4)])
def test_values_and_gradients(backend, device, lead, with_bias):
    for dtype, tolerance in TOLERANCE.items():
        if dtype == torch.float64 and backend != "eager":
            continue
        x = logits(dtype, *lead, device=device)[: 4 if with_bias else 3]
        exact = [exact_leaf(y) for y in x]
        outputs, expected = gdn.gate(*x, backend=backend), reference_gate(*exact)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for y, z in zip(outputs, expected, strict=True):
            assert y.dtype == wide and agrees(y, z, min(tolerance, 1e-6))
        dy = [torch.rand_like(y) for y in outputs]
        got = torch.autograd.grad(outputs, x, dy)
        wanted_grads = torch.autograd.grad(expected, exact, [d.cpu().double() for d in dy])
        for leaf, y, z in zip(x, got, wanted_grads, strict=True):
            # with dy > 0, dA_log and ddt_bias sum terms of one sign
            assert y.dtype == leaf.dtype and agrees(y, z, tolerance)
            assert not y.numel() or not z.count_nonzero() or not agrees(y * (1 + 3 * tolerance), z, tolerance)
        assert not outputs[0].numel() or not agrees(outputs[0].flip(-1), expected[0], tolerance)


@pytest.mark.gpu
def test_many_tokens_and_heads():
    """Several blocks per program and several strips of heads agree, and repeat their bits."""
    rng = torch.Generator().manual_seed(0)
    for lead, heads in (((3, 5000), 32), ((2000,), 200)):
        shapes = [(*lead, heads), (*lead, heads), (heads,), (heads,)]
        x = [torch.randn(s, generator=rng).cuda().requires_grad_() for s in shapes]
        exact = [exact_leaf(y) for y in x]
        outputs, expected = gdn.gate(*x, backend="triton"), reference_gate(*exact)
        dy = [torch.rand_like(y) for y in outputs]
        got = torch.autograd.grad(outputs, x, dy, retain_graph=True)
        wanted_grads = torch.autograd.grad(expected, exact, [d.cpu().double() for d in dy])
        for y, z in zip((*outputs, *got), (*expected, *wanted_grads), strict=True):
            assert agrees(y, z, 2e-6)
        for _ in range(20):
            again = torch.autograd.grad(outputs, x, dy, retain_graph=True)
            assert all(torch.equal(y, z) for y, z in zip(got, again, strict=True))


@pytest.mark.gpu
def test_other_sizes_compile_nothing(monkeypatch):
    triton = pytest.importorskip("triton")
    compiled = []

    def run(*shape):
        x = [torch.randn(s, device="cuda", requires_grad=True) for s in (shape, shape, shape[-1:])]
        outputs = gdn.gate(*x, backend="triton")
        torch.autograd.grad(outputs, x, [torch.ones_like(y) for y in outputs])

    run(2, 70, 32)
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["fn"].name)
    )
    for shape in ((1, 1, 32), (5, 7000, 32), (40000, 32)):
        run(*shape)
    assert not compiled


@pytest.mark.interpret
@pytest.mark.parametrize("A_log", [-10.0, 0.0, 5.0])
def test_extremes(backend, device, A_log):
    """Nothing overflows, and a tiny softplus keeps its precision, for fp32 and 16-bit g."""
    a = torch.tensor([-100.0, -20.0, 0.0, 20.0, 100.0], device=device)[:, None].requires_grad_()
    b = torch.tensor([-50.0, -5.0, 0.0, 5.0, 50.0], device=device)[:, None].requires_grad_()
    A = torch.tensor([A_log], device=device).requires_grad_()
    exact = [exact_leaf(x) for x in (a, b, A)]
    outputs, expected = gdn.gate(a, b, A, backend=backend), reference_gate(*exact)
    grads = torch.autograd.grad([y.sum() for y in outputs], (a, b, A))
    wanted_grads = torch.autograd.grad(expected[0].sum(), (exact[0], exact[2]))
    s = torch.sigmoid(exact[1]) * torch.sigmoid(-exact[1])
    for y, z in zip((*outputs, *grads), (*expected, wanted_grads[0], s, wanted_grads[1]), strict=True):
        assert bool(torch.isfinite(y).all())
        # numbers below 1e-38 are subnormal and have fewer bits
        assert torch.allclose(y.cpu().double(), z, rtol=1e-6, atol=1e-44)
    naive = -torch.exp(A) * torch.log(1 + torch.exp(a))
    assert not torch.allclose(naive.cpu().double(), expected[0], rtol=1e-6, atol=1e-44)


@pytest.mark.interpret
def test_no_decay(backend, device):
    a, b, A_log, dt_bias = logits(torch.float32, 2, 5, device=device)
    with torch.no_grad():
        A_log[1] = -torch.inf
    g, beta = gdn.gate(a, b, A_log, dt_bias, backend=backend)
    assert bool((g[..., 1] == 0).all()) and bool((g[..., 0] < 0).all())
    da, _, dA_log, ddt_bias = torch.autograd.grad((g.sum(), beta.sum()), (a, b, A_log, dt_bias))
    assert bool(torch.isfinite(da).all()) and dA_log[1] == 0 and ddt_bias[1] == 0 and dA_log[0] != 0


@pytest.mark.interpret
def test_a_token_without_gradient_spoils_no_sum(backend, device):
    a, b, A_log, dt_bias = (x.detach() for x in logits(torch.float32, 4, device=device))
    a[1], a[2] = torch.nan, torch.inf
    x = [y.requires_grad_() for y in (a, A_log, dt_bias)]
    g, _ = gdn.gate(x[0], b, *x[1:], backend=backend)
    assert bool(g[1].isnan().all()) and bool((g[2] == -torch.inf).all())
    weight = torch.tensor([1.0, 0.0, 0.0, 1.0], device=device)[:, None].expand(4, HV)
    for y in torch.autograd.grad(g, x, weight):
        assert bool(torch.isfinite(y).all()) and y.count_nonzero() > 0


@pytest.mark.interpret
def test_sums_are_not_narrow(backend, device):
    """Gradients sum in fp32; a bf16 sum over 4096 tokens would stop growing after 256 terms."""
    a = torch.zeros(4096, 1, dtype=torch.bfloat16, device=device)
    A_log, dt_bias = (
        torch.zeros(1, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2)
    )
    g, _ = gdn.gate(a, a, A_log, dt_bias, backend=backend)
    dA_log, ddt_bias = torch.autograd.grad(g.sum(), (A_log, dt_bias))
    assert abs(ddt_bias.item() / (-0.5 * 4096) - 1) < 2**-8
    assert abs(dA_log.item() / (-0.6931472 * 4096) - 1) < 2**-8


def test_gradcheck():
    x = logits(torch.float64, 2, 3)
    assert torch.autograd.gradcheck(gdn.gate, x)
    assert torch.autograd.gradcheck(lambda a, A_log: gdn.gate(a, x[1].detach(), A_log)[0], (x[0], x[2]))


@pytest.mark.parametrize("with_bias", [True, False])
def test_operator(backend, device, with_bias):
    a, b, A_log, dt_bias = logits(torch.float32, 2, 5, device=device)
    args = (a, b, A_log, dt_bias if with_bias else None, backend)
    torch.library.opcheck(torch.ops.gdn.gate.default, args)
    dy = torch.randn(2, 5, HV, device=device)
    plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
    torch.library.opcheck(torch.ops.gdn.gate_backward.default, (*plain[:4], dy, dy, backend))
    strided = torch.randn(2, 5, 2 * HV, device=device).split(HV, -1)
    torch.library.opcheck(torch.ops.gdn.gate.default, (*strided, *plain[2:]))


def test_compile(backend, device):
    def gate(*x):
        return gdn.gate(*x, backend=backend)

    compiled = torch.compile(gate, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (5, 9, 17):
        x = logits(torch.float32, 2, T, device=device)
        for y, z in zip(compiled(*x), gate(*x), strict=True):
            assert torch.equal(y, z)
        got, expected = (torch.autograd.grad(f(*x)[0].sum(), (x[0], *x[2:])) for f in (compiled, gate))
        assert all(torch.equal(y, z) for y, z in zip(got, expected, strict=True))


def test_the_door():
    a, b, A_log, dt_bias = (x.detach() for x in logits(torch.float32, 2, 5))
    for error, words, call in [
        (TypeError, "a: expected a tensor, got float", lambda: gdn.gate(1.0, b, A_log)),
        (TypeError, "A_log: expected a tensor of float16", lambda: gdn.gate(a, b, A_log.long())),
        (ValueError, r"b: expected shape \[2, 5, 3\]", lambda: gdn.gate(a, b[:1], A_log)),
        (ValueError, r"A_log: expected shape \[HV=3\], got \[2\]", lambda: gdn.gate(a, b, A_log[:2])),
        (ValueError, r"dt_bias: expected shape \[HV=3\]", lambda: gdn.gate(a, b, A_log, dt_bias[None])),
        (ValueError, "b: expected device cpu", lambda: gdn.gate(a, b.to("meta"), A_log)),
        (ValueError, "a: expected shape", lambda: gdn.gate(a[0, 0, 0], b[0, 0, 0], A_log)),
        (NotImplementedError, "hopper", lambda: gdn.gate(a, b, A_log, backend="hopper")),
    ]:
        with pytest.raises(error, match=words):
            call()


def test_example():
    assert doctest.testmod(gdn.ops.gate).failed == 0
