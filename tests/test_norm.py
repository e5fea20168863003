"""Test the gated RMS norm: the formula, gradients, strides, the torch operator, the Transformers modules."""

import doctest
import importlib

import pytest
import torch

import gdn
import gdn.ops.norm
from gdn.reference.layer import rms_norm_gated as reference_norm

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
FINEST = {"eager": torch.float64, "triton": torch.float32}  # the widest dtype that a backend computes in


pytestmark = pytest.mark.usefixtures("strict_poison")


def relative_error(x, expected):
    """Return the relative RMS error, or infinity if the result holds NaN."""
    x, expected = x.detach().cpu().double(), expected.detach()
    error = (x - expected).norm() / expected.norm().clamp(min=1e-30) if expected.numel() else torch.zeros(())
    return float("inf") if error.isnan() else float(error)


def inputs(*shape, dtype=torch.float64, is_slice=False, device="cpu"):
    """Return x, z (a slice of a wider projection) and weight."""
    x, z, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    x, z, weight = (t.to(device, dtype) for t in (x, z, weight))
    if is_slice:
        z = torch.cat([z.flatten(-2), z.new_zeros(*shape[:-2], 3)], -1)[..., :-3].unflatten(-1, shape[-2:])
    return [t.requires_grad_() for t in (x, z, weight)]


def exact_leaf(t):
    """Return a leaf with the same numbers in fp64 on the CPU, for the reference."""
    return None if t is None else t.detach().cpu().double().requires_grad_()


SHAPES = [(1 << 17, (3, 5, 4, 24)), (300, (3, 5, 4, 24)), (1, (7, 6)), (1, (6,)), (1, (0, 4))]


@pytest.mark.interpret
@pytest.mark.parametrize("activation", ["silu", "sigmoid", None])
@pytest.mark.parametrize("given", ["xzw", "xz", "xw", "x"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_reference(backend, device, dtype, given, activation, monkeypatch):
    if dtype == torch.float64 and backend != "eager":
        pytest.skip("fp64 is eager's")
    for block, shape in SHAPES:
        monkeypatch.setattr("gdn.backends.eager.norm.BLOCK", block)
        agrees(
            inputs(*shape, dtype=dtype, is_slice=len(shape) == 4, device=device), given, activation, backend
        )


def agrees(tensors, given, activation, backend):
    """Assert that y and every gradient agree with the reference."""
    chosen = [t if letter in given else None for letter, t in zip("xzw", tensors, strict=True)]
    exact, dtype = [exact_leaf(t) for t in chosen], tensors[0].dtype
    y = gdn.rms_norm_gated(*chosen, activation=activation, backend=backend)
    expected = reference_norm(*exact, activation=activation)
    assert y.dtype == dtype and y.is_contiguous() and relative_error(y, expected) <= TOLERANCE[dtype]
    seed = torch.randn_like(y)
    leaves = [t for t in chosen if t is not None], [t for t in exact if t is not None]
    got = torch.autograd.grad(y, leaves[0], seed)
    ref = torch.autograd.grad(expected, leaves[1], seed.cpu().double())
    for leaf, a, b in zip(leaves[0], got, ref, strict=True):
        assert a.dtype == leaf.dtype and relative_error(a, b) <= 2 * TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_and_wide_ones(dtype):
    """Several blocks of rows per program agree, and so do rows as wide as a program or wider."""
    for shape in ((4, 1500, 8, 128), (700, 100), (33, 2048), (5, 8192), (3, 8200)):
        is_slice = len(shape) == 4
        agrees(inputs(*shape, dtype=dtype, is_slice=is_slice, device="cuda"), "xzw", "silu", "triton")


@pytest.mark.gpu
def test_reruns_are_bit_identical_and_other_sizes_compile_nothing(monkeypatch):
    triton = pytest.importorskip("triton")

    def run(*shape):
        tensors = inputs(*shape, 128, dtype=torch.bfloat16, device="cuda")
        y = gdn.rms_norm_gated(*tensors, backend="triton")
        return [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]

    torch.manual_seed(1)
    first = run(2, 5000, 4)
    for _ in range(20):
        torch.manual_seed(1)
        assert all(torch.equal(a, b) for a, b in zip(first, run(2, 5000, 4), strict=True))
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["fn"].name)
    )
    for shape in ((1, 1, 1), (3, 77, 16), (1, 9000, 5), (40000,)):
        run(*shape)
    assert not compiled


@pytest.mark.interpret
def test_a_row_does_not_depend_on_the_others(backend, device):
    """A row has the same bits alone and in a larger batch, and NaN in one row reaches no other."""
    x, z, weight = (t.detach() for t in inputs(70, 4, 64, dtype=torch.float32, device=device))
    x[50] = torch.nan
    whole = gdn.rms_norm_gated(x, z, weight, backend=backend)
    part = gdn.rms_norm_gated(x[:3], z[:3], weight, backend=backend)
    assert torch.equal(whole[:3], part) and whole[50].isnan().all()
    assert whole[:50].isfinite().all() and whole[51:].isfinite().all()


def zero_centred_inputs(dtype, device):
    """Return x of a token, of heads of a wider projection, of many rows, of other orders, and of no row."""
    x = 3 * torch.randn(2, 7, 4, 96, device=device).to(dtype)
    token, heads = x[:1, :1, 0].contiguous(), x[..., :48]
    return {
        "token": token, "heads": heads, "heads of a token": x[0, 0][None, None, :, 48:],
        "rows": x.flatten(0, 2)[:, :20], "expanded": token.expand(3, 1, 96),
        "one axis": token[0, 0], "no row": x[:0, :, 0, :48],
        "one column": x[..., :1], "wide": torch.randn(2, 8200, device=device).to(dtype),
        "transposed": heads.transpose(0, 2), "every second column": x[..., ::2], "axes apart": x[:, ::2],
        "no column": x[..., :0],
    }  # fmt: skip


@pytest.mark.interpret
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_zero_centred(backend, device, dtype, weight_dtype, monkeypatch):
    """Compare each layout with fp64; results have the strides of empty_like, and no input is written."""
    if dtype == torch.float64 and backend != "eager":
        pytest.skip("fp64 is eager's")
    monkeypatch.setenv("GDN_BACKEND", backend)
    # fp64 is computed in fp32, as the class does
    limit = max(TOLERANCE[dtype], TOLERANCE[torch.float32])
    for name, x in zero_centred_inputs(dtype, device).items():
        weight, before = torch.randn(x.shape[-1], device=device).to(weight_dtype), x.clone()
        y = gdn.ops.norm.rms_norm_zero_centred(x, weight, 0.25)
        assert y.dtype == dtype and y.shape == x.shape and y.stride() == torch.empty_like(x).stride(), name
        assert torch.equal(x, before), name
        if y.numel():
            gain = 1 + exact_leaf(weight)
            expected = reference_norm(exact_leaf(x), None, gain, eps=0.25, activation=None)
            assert relative_error(y, expected) <= limit, name


@pytest.mark.interpret
def test_zero_centred_is_one_launch_whose_rows_are_independent(triton_device, monkeypatch):
    """Heads of a projection are read in place, and a row has the same bits alone as among others."""
    from gdn.backends.triton.launch import record_launches

    monkeypatch.setenv("GDN_BACKEND", "triton")
    norm = gdn.ops.norm.rms_norm_zero_centred
    given = zero_centred_inputs(torch.bfloat16, triton_device)
    for name, x in given.items():
        with record_launches([]) as launches:
            norm(x, torch.ones(x.shape[-1], device=triton_device), 1e-6)
        composed = ("wide", "transposed", "every second column", "axes apart", "no column")
        # a launch of no program is none
        assert len(launches) == (name not in (*composed, "no row")), name
    weight, many = torch.randn(48, device=triton_device), given["heads"].clone()
    many[1, 3, 2] = torch.nan
    y = norm(many, weight, 1e-6)
    assert torch.equal(y[0, 0], norm(many[0, 0], weight, 1e-6)) and y[1, 3, 2].isnan().all()
    y[1, 3, 2] = 0
    assert y.isfinite().all()


@pytest.mark.interpret
def test_gate_fails_wrong_answers(backend, device):
    dtype = FINEST[backend]
    x, z, weight = (t.detach() for t in inputs(4, 3, 8, dtype=dtype, device=device))
    expected = reference_norm(*(exact_leaf(t) for t in (x, z, weight)))
    assert relative_error(gdn.rms_norm_gated(x, z, weight, backend=backend), expected) < TOLERANCE[dtype]
    calls = ((x, z, weight.flip(0)), (x, z.flip(0), weight), (x, None, weight), (x, z, None))
    assert all(relative_error(gdn.rms_norm_gated(*call, backend=backend), expected) > 1e-2 for call in calls)
    for options in ({"activation": "sigmoid"}, {"eps": 0.1}):
        assert relative_error(gdn.rms_norm_gated(x, z, weight, backend=backend, **options), expected) > 1e-2
    assert relative_error(torch.full_like(x, float("nan")), expected) == float("inf")


@pytest.mark.interpret
def test_zero_rows_and_eps(backend, device):
    """A row of zeros stays zero with finite gradients, and eps has an effect."""
    x = torch.zeros(2, 8, device=device, requires_grad=True)
    y = gdn.rms_norm_gated(x, torch.randn(2, 8, device=device), eps=1e-12, backend=backend)
    assert not y.any() and torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_gradcheck():
    assert torch.autograd.gradcheck(gdn.rms_norm_gated, inputs(2, 3, 4))


def test_operator(backend, device):
    x, z, weight = inputs(2, 3, 8, dtype=torch.float32, device=device)
    torch.library.opcheck(gdn.ops.norm.norm_operator, (x, z, weight, 1e-6, "silu", backend))
    torch.library.opcheck(gdn.ops.norm.norm_operator, (x, None, None, 1e-6, None, backend))

    def norm(*tensors):
        return gdn.rms_norm_gated(*tensors, backend=backend)

    compiled = torch.compile(norm, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (3, 7, 2):
        tensors = inputs(2, T, 8, dtype=torch.float32, device=device)
        pair = norm(*tensors), compiled(*tensors)
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
        (ValueError, "eps", {"eps": -1e-6}),
        (ValueError, "activation", {"activation": "gelu"}),
        (TypeError, "backend", {"backend": 1}),
    ],
)
def test_refusals(error, name, options):
    with pytest.raises(error, match=rf"^{name}: expected .*, got "):
        gdn.rms_norm_gated(**{"x": X} | options)


def test_examples():
    assert doctest.testmod(gdn.ops.norm).failed == 0
