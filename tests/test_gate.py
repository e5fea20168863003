"""gdn.gate: the formula at its extremes, its gradients, and its torch operator."""

import doctest

import pytest
import torch

import gdn
import gdn.ops.gate
from gdn import reference

HV = 3


def logits(dtype: torch.dtype, *lead: int) -> list[torch.Tensor]:
    """a, b [*lead, HV], A_log, dt_bias [HV]."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(*lead, HV), (*lead, HV), (HV,), (HV,)]
    return [torch.randn(s, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def law(a, b, A_log, dt_bias=None):
    a, b, A_log = a.double(), b.double(), A_log.double()
    return reference.gate(a, A_log, None if dt_bias is None else dt_bias.double()), torch.sigmoid(b)


def agrees(x: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    """Every element within a relative tolerance: a sum over tokens must not hide a small element."""
    return torch.allclose(x.double(), wanted.double(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("lead", [(), (0,), (7,), (2, 5), (2, 3, 4)])
def test_values_and_gradients(lead, with_bias):
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        x = logits(dtype, *lead)[: 4 if with_bias else 3]
        exact = [y.detach().double().requires_grad_() for y in x]
        outputs, wanted = gdn.gate(*x), law(*exact)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for y, z in zip(outputs, wanted, strict=True):
            assert y.dtype == wide and agrees(y, z, min(tolerance, 1e-6))
        dy = [torch.rand_like(y) for y in outputs]
        got = torch.autograd.grad(outputs, x, dy)
        wanted_grads = torch.autograd.grad(wanted, exact, [d.double() for d in dy])
        for leaf, y, z in zip(x, got, wanted_grads, strict=True):
            # dy > 0, so dA_log and ddt_bias sum terms of one sign
            assert y.dtype == leaf.dtype and agrees(y, z, tolerance)
            assert not y.numel() or not z.count_nonzero() or not agrees(y * (1 + 3 * tolerance), z, tolerance)
        assert not outputs[0].numel() or not agrees(outputs[0].flip(-1), wanted[0], tolerance)


@pytest.mark.parametrize("A_log", [-10.0, 0.0, 5.0])
def test_extremes(A_log):
    """No overflow, and no loss where softplus is tiny, from a narrow g or a wide one."""
    a = torch.tensor([-100.0, -20.0, 0.0, 20.0, 100.0])[:, None].requires_grad_()
    b = torch.tensor([-50.0, -5.0, 0.0, 5.0, 50.0])[:, None].requires_grad_()
    A = torch.tensor([A_log]).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (a, b, A)]
    outputs, wanted = gdn.gate(a, b, A), law(*exact)
    grads = torch.autograd.grad([y.sum() for y in outputs], (a, b, A))
    wanted_grads = torch.autograd.grad(wanted[0].sum(), (exact[0], exact[2]))
    s = torch.sigmoid(exact[1]) * torch.sigmoid(-exact[1])
    for y, z in zip((*outputs, *grads), (*wanted, wanted_grads[0], s, wanted_grads[1]), strict=True):
        assert bool(torch.isfinite(y).all())
        # below 1e-38 fp32 has fewer bits
        assert torch.allclose(y.double(), z, rtol=1e-6, atol=1e-44)
    naive = -torch.exp(A) * torch.log(1 + torch.exp(a))
    assert not torch.allclose(naive.double(), wanted[0], rtol=1e-6, atol=1e-44)


def test_no_decay():
    a, b, A_log, dt_bias = logits(torch.float32, 2, 5)
    with torch.no_grad():
        A_log[1] = -torch.inf
    g, beta = gdn.gate(a, b, A_log, dt_bias)
    assert bool((g[..., 1] == 0).all()) and bool((g[..., 0] < 0).all())
    da, _, dA_log, ddt_bias = torch.autograd.grad((g.sum(), beta.sum()), (a, b, A_log, dt_bias))
    assert bool(torch.isfinite(da).all()) and dA_log[1] == 0 and ddt_bias[1] == 0 and dA_log[0] != 0


def test_a_token_without_gradient_spoils_no_sum():
    a, b, A_log, dt_bias = (x.detach() for x in logits(torch.float32, 4))
    a[1], a[2] = torch.nan, torch.inf
    x = [y.requires_grad_() for y in (a, A_log, dt_bias)]
    g, _ = gdn.gate(x[0], b, *x[1:])
    assert bool(g[1].isnan().all()) and bool((g[2] == -torch.inf).all())
    weight = torch.tensor([1.0, 0.0, 0.0, 1.0])[:, None].expand(4, HV)
    for y in torch.autograd.grad(g, x, weight):
        assert bool(torch.isfinite(y).all()) and y.count_nonzero() > 0


def test_sums_are_not_narrow():
    """A bf16 sum over 4096 tokens would stall at 256 terms."""
    a = torch.zeros(4096, 1, dtype=torch.bfloat16)
    A_log, dt_bias = (torch.zeros(1, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    g, _ = gdn.gate(a, a, A_log, dt_bias)
    dA_log, ddt_bias = torch.autograd.grad(g.sum(), (A_log, dt_bias))
    assert abs(ddt_bias.item() / (-0.5 * 4096) - 1) < 2**-8
    assert abs(dA_log.item() / (-0.6931472 * 4096) - 1) < 2**-8


def test_gradcheck():
    x = logits(torch.float64, 2, 3)
    assert torch.autograd.gradcheck(gdn.gate, x)
    assert torch.autograd.gradcheck(lambda a, A_log: gdn.gate(a, x[1].detach(), A_log)[0], (x[0], x[2]))


@pytest.mark.parametrize("with_bias", [True, False])
def test_operator(with_bias):
    a, b, A_log, dt_bias = logits(torch.float32, 2, 5)
    args = (a, b, A_log, dt_bias if with_bias else None, None)
    torch.library.opcheck(torch.ops.gdn.gate.default, args)
    dy = torch.randn(2, 5, HV)
    plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
    torch.library.opcheck(torch.ops.gdn.gate_backward.default, (*plain[:4], dy, dy, None))
    strided = torch.randn(2, 5, 2 * HV).split(HV, -1)
    torch.library.opcheck(torch.ops.gdn.gate.default, (*strided, *plain[2:]))


def test_compile():
    compiled = torch.compile(lambda *x: gdn.gate(*x), fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (5, 9, 17):
        x = logits(torch.float32, 2, T)
        for y, z in zip(compiled(*x), gdn.gate(*x), strict=True):
            assert torch.equal(y, z)
        got, wanted = (torch.autograd.grad(f(*x)[0].sum(), (x[0], *x[2:])) for f in (compiled, gdn.gate))
        assert all(torch.equal(y, z) for y, z in zip(got, wanted, strict=True))


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
        (NotImplementedError, "triton", lambda: gdn.gate(a, b, A_log, backend="triton")),
    ]:
        with pytest.raises(error, match=words):
            call()


def test_example():
    assert doctest.testmod(gdn.ops.gate).failed == 0
