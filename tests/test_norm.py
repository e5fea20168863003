"""The gated RMS norm: the formula, its gradients, strides, the torch operator, the Transformers modules."""

import doctest
import importlib

import pytest
import torch

import gdn
import gdn.ops.norm
from gdn.reference.layer import rms_norm_gated as law

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


pytestmark = pytest.mark.usefixtures("strict_poison")


def differs(x, wanted):
    """Relative RMS error; infinite for NaN."""
    x, wanted = x.detach().double(), wanted.detach()
    error = (x - wanted).norm() / wanted.norm().clamp(min=1e-30) if wanted.numel() else torch.zeros(())
    return float("inf") if error.isnan() else float(error)


def inputs(*shape, dtype=torch.float64, is_slice=False):
    """x, z (a slice of a wider projection), weight."""
    x, z = torch.randn(shape), torch.randn(shape)
    if is_slice:
        z = torch.cat([z.flatten(-2), z.new_zeros(*shape[:-2], 3)], -1)[..., :-3].unflatten(-1, shape[-2:])
    return [t.to(dtype).requires_grad_() for t in (x, z, torch.randn(shape[-1]))]


@pytest.mark.parametrize("activation", ["silu", "sigmoid", None])
@pytest.mark.parametrize("given", ["xzw", "xz", "xw", "x"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_law(dtype, given, activation, monkeypatch):
    for block, shape in ((1 << 17, (3, 5, 4, 24)), (300, (3, 5, 4, 24)), (1, (7, 6)), (1, (6,)), (1, (0, 4))):
        monkeypatch.setattr("gdn.backends.eager.norm.BLOCK", block)
        tensors = inputs(*shape, dtype=dtype, is_slice=len(shape) == 4)
        chosen = [t if letter in given else None for letter, t in zip("xzw", tensors, strict=True)]
        exact = [None if t is None else t.detach().double().requires_grad_() for t in chosen]
        y, wanted = gdn.rms_norm_gated(*chosen, activation=activation), law(*exact, activation=activation)
        assert y.dtype == dtype and y.is_contiguous() and differs(y, wanted) <= TOLERANCE[dtype]
        seed = torch.randn_like(y)
        leaves = [t for t in chosen if t is not None], [t for t in exact if t is not None]
        got = torch.autograd.grad(y, leaves[0], seed)
        ref = torch.autograd.grad(wanted, leaves[1], seed.double())
        for leaf, a, b in zip(leaves[0], got, ref, strict=True):
            assert a.dtype == leaf.dtype and differs(a, b) <= 2 * TOLERANCE[dtype]


def test_gate_fails_wrong_answers():
    x, z, weight = (t.detach() for t in inputs(4, 3, 8))
    wanted = law(x, z, weight)
    assert differs(gdn.rms_norm_gated(x, z, weight), wanted) < 1e-13
    calls = ((x, z, weight.flip(0)), (x, z.flip(0), weight), (x, None, weight), (x, z, None))
    assert all(differs(gdn.rms_norm_gated(*call), wanted) > 1e-2 for call in calls)
    assert differs(gdn.rms_norm_gated(x, z, weight, activation="sigmoid"), wanted) > 1e-2
    assert differs(gdn.rms_norm_gated(x, z, weight, eps=0.1), wanted) > 1e-2
    assert differs(torch.full_like(x, float("nan")), wanted) == float("inf")


def test_zero_rows_and_eps():
    """A row of zeros stays zero with finite gradients; eps counts."""
    x = torch.zeros(2, 8, requires_grad=True)
    y = gdn.rms_norm_gated(x, torch.randn(2, 8), eps=1e-12)
    assert not y.any() and torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_operator():
    x, z, weight = inputs(2, 3, 8, dtype=torch.float32)
    assert torch.autograd.gradcheck(gdn.rms_norm_gated, inputs(2, 3, 4))
    torch.library.opcheck(gdn.ops.norm.norm_operator, (x, z, weight, 1e-6, "silu", None))
    torch.library.opcheck(gdn.ops.norm.norm_operator, (x, None, None, 1e-6, None, "eager"))
    compiled = torch.compile(gdn.rms_norm_gated, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (3, 7, 2):
        tensors = inputs(2, T, 8, dtype=torch.float32)
        pair = gdn.rms_norm_gated(*tensors), compiled(*tensors)
        assert torch.equal(*pair)
        grads = [torch.autograd.grad(y.sum(), tensors) for y in pair]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("model", "name"), [("qwen3_next", "Qwen3NextRMSNormGated"), ("qwen3_5", "Qwen3_5RMSNormGated")]
)
def test_transformers(model, name):
    pytest.importorskip("transformers")
    module = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)(
        128, eps=1e-5
    )
    x, z, weight = (t.detach() for t in inputs(50, 128, dtype=torch.float32))
    module.weight.data.copy_(weight)
    assert torch.allclose(gdn.rms_norm_gated(x, z, weight, eps=1e-5), module(x, z), rtol=1e-6, atol=1e-6)


X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (TypeError, "x", {"x": 1.0}),
        (ValueError, "x", {"x": torch.zeros(3, 0)}),
        (ValueError, "z", {"z": X[:1]}),
        (TypeError, "z", {"z": X.long()}),
        (ValueError, "weight", {"weight": torch.zeros(5)}),
        (TypeError, "eps", {"eps": "small"}),
        (ValueError, "activation", {"activation": "gelu"}),
        (TypeError, "backend", {"backend": 1}),
    ],
)
def test_refusals(error, name, options):
    with pytest.raises(error, match=rf"^{name}: expected .*, got "):
        gdn.rms_norm_gated(**{"x": X} | options)


def test_examples():
    assert doctest.testmod(gdn.ops.norm).failed == 0
