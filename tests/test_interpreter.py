"""Test the corrected interpreter: bf16 as in PyTorch, tf32 as on tensor cores, extremes as on a GPU."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from gdn.backends.triton.launch import INTERPRETED

N = 64
pytestmark = pytest.mark.interpret


BLOCK, SCALAR = [2, 4], []
DTYPES = (
    tl.int1,
    tl.int32,
    tl.uint32,
    tl.int64,
    tl.float16,
    tl.bfloat16,
    tl.float32,
    tl.pointer_type(tl.float32),
)


def promoted(promote, lhs, rhs, options):
    """Return the types and the elements of both operands after a promotion, or the type of its error."""
    try:
        operands = promote(interpreter.interpreter_semantic, lhs, rhs, *options)
    except Exception as e:
        return type(e)
    return [(str(x.type), x.handle.data.tolist(), x.handle.data.dtype) for x in operands]


def operand(dtype, shape):
    """Return a tensor of the numbers from 1 on; a shape of [] is that of a scalar."""
    data = np.arange(1, 1 + np.prod(shape or 1)).reshape(shape or 1).astype(interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, shape) if shape else dtype)


@triton.jit
def _round(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.bfloat16))


@triton.jit
def _arithmetic(x_ptr, y_ptr, o_ptr, mask_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(o_ptr + i, x + y)
    tl.store(o_ptr + N + i, x * y)
    tl.store(o_ptr + 2 * N + i, x - y)
    tl.store(o_ptr + 3 * N + i, tl.where(x < y, x, y))
    tl.store(o_ptr + 4 * N + i, tl.maximum(x, y))
    tl.store(o_ptr + 5 * N + i, -x)
    tl.store(o_ptr + 6 * N + i, tl.abs(x))
    tl.store(o_ptr + 7 * N + i, (x.to(tl.float32) * 1.5).to(tl.bfloat16))
    tl.store(o_ptr + 8 * N + i, i.to(tl.bfloat16))
    tl.store(o_ptr + 9 * N + i, tl.full((N,), 0.3, tl.bfloat16) + tl.zeros((N,), tl.bfloat16))
    tl.store(o_ptr + 10 * N + i, tl.load(x_ptr + i, mask=i < 5, other=0.3))
    tl.store(mask_ptr + i, (x == y) | (x >= y) & (x != 0.0))


@triton.jit
def _dot(a_ptr, b_ptr, o_ptr, sums_ptr, count, N: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    a, b = tl.load(a_ptr + tile), tl.load(b_ptr + tile)
    acc = tl.zeros((N, N), tl.float32)
    for _ in range(count):
        acc = tl.dot(a, b, acc)
    tl.store(o_ptr + tile, acc)
    tl.store(sums_ptr + i, tl.max(a, 1))
    tl.store(sums_ptr + N + i, tl.sum(a, 0))
    tl.store(sums_ptr + 2 * N + i, tl.cumsum(tl.load(a_ptr + i), 0))


@triton.jit
def _dots(a_ptr, b_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    a, b = tl.load(a_ptr + tile), tl.load(b_ptr + tile)
    tl.store(o_ptr + tile, tl.dot(a, b, input_precision="tf32"))
    tl.store(o_ptr + N * N + tile, tl.dot(a, b, input_precision="tf32x3"))


def test_tf32_drops_13_bits(triton_device):
    a, b = (torch.randn(N, N, device=triton_device) for _ in range(2))
    o = torch.empty(2, N, N, device=triton_device)
    _dots[(1,)](a, b, o, N)
    kept_a, kept_b = ((x.view(torch.int32) & -(2**13)).view(torch.float32) for x in (a, b))
    dropped, exact = kept_a.double() @ kept_b.double(), a.double() @ b.double()
    assert (o[0] - dropped).norm() < 1e-5 * exact.norm() and (exact - dropped).norm() > 1e-4 * exact.norm()
    assert (o[1] - exact).norm() < 1e-5 * exact.norm()


@triton.jit
def _corners(x_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(o_ptr + i, tl.maximum(x, -1.0))
    tl.store(o_ptr + N + i, tl.minimum(x, -1.0))
    tl.store(o_ptr + 2 * N + i, tl.exp2(x))
    tl.store(o_ptr + 3 * N + i, tl.exp2(x + 64.0) * 2.0**-64)


def test_extremes_prefer_numbers_and_exp2_has_no_subnormals(triton_device):
    x = torch.tensor([torch.nan, -130.0, -126.0, 0.0], device=triton_device)
    o = torch.empty(4, 4, device=triton_device)
    _corners[(1,)](x, o, 4)
    expected = [
        [-1, -1, -1, 0],
        [-1, -130, -126, -1],
        [torch.nan, 0, 2**-126, 1],
        [torch.nan, 2**-130, 2**-126, 1],
    ]
    torch.testing.assert_close(o.cpu(), torch.tensor(expected), rtol=1e-6, atol=0, equal_nan=True)


def test_a_cast_rounds_to_the_nearest_even(triton_device):
    # all upper halves, with the lower halves around a tie; infinities and NaN are among them
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = (
        ((torch.arange(2**16)[:, None] << 16) + low)
        .to(torch.int32)
        .view(torch.float32)
        .flatten()
        .to(triton_device)
    )
    y = torch.empty(x.numel(), dtype=torch.bfloat16, device=triton_device)
    for start in range(0, x.numel(), 2**16):
        _round[(1,)](x[start : start + 2**16], y[start : start + 2**16], N=2**16)
    expected = x.bfloat16()
    assert torch.equal(y.isnan(), expected.isnan())
    same = y.view(torch.int16) == expected.view(torch.int16)
    assert bool((same | y.isnan()).all())


def test_arithmetic_comparisons_constants_and_defaults(triton_device):
    x, y = torch.randn(2, N).to(triton_device, torch.bfloat16)
    x[:8] = y[:8]
    o = torch.empty(11, N, dtype=torch.bfloat16, device=triton_device)
    mask = torch.empty(N, dtype=torch.bool, device=triton_device)
    _arithmetic[(1,)](x, y, o, mask, N=N)
    third, i = torch.full_like(x, 0.3), torch.arange(N, device=triton_device)
    expected = [
        x + y, x * y, x - y, torch.where(x < y, x, y), x.maximum(y), -x, x.abs(), x * 1.5,
        i.bfloat16(), third, torch.where(i < 5, x, third),
    ]  # fmt: skip
    assert torch.equal(o, torch.stack(expected))
    assert torch.equal(mask, (x == y) | (x >= y) & (x != 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_and_reductions(triton_device, dtype):
    # sums of small integers are exact in any order
    a, b = torch.randint(-2, 3, (2, N, N)).to(triton_device, dtype)
    o, sums = torch.empty(N, N, device=triton_device), torch.empty(3, N, dtype=dtype, device=triton_device)
    _dot[(1,)](a, b, o, sums, 2, N=N)
    assert torch.equal(o, 2 * (a.float() @ b.float()))
    assert torch.equal(sums[0], a.amax(1)) and torch.equal(sums[1], a.float().sum(0).to(dtype))
    assert torch.equal(sums[2].float(), a[0].float().cumsum(0))


@triton.jit
def _square(x_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(o_ptr + i, x * x - 1 + x)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU looks for no overflow")
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_that_overflow_are_refused(triton_device, dtype):
    """Fail at the first number whose square does not fit; 64 bits are not checked."""
    half = torch.iinfo(dtype).bits // 2
    x = torch.tensor([2 ** (half - 1), -3], dtype=dtype, device=triton_device)
    o = torch.empty_like(x)
    _square[(1,)](x, o, 2)
    assert torch.equal(o, x * x - 1 + x)
    x[1] = 2**half
    if dtype == torch.int64:
        _square[(1,)](x, o, 2)
        return
    with pytest.raises(InterpreterError, match="overflow detected for operation mul"):
        _square[(1,)](x, o, 2)


def test_types_of_one_name_are_alike(triton_device):
    """Construct each type twice: what the second one takes from the first is its own."""
    kinds = (tl.float32, tl.bfloat16, tl.int1, tl.pointer_type(tl.float32), tl.pointer_type(tl.bfloat16))
    blocks = [tl.block_type(kind, shape) for _ in range(2) for kind in kinds for shape in ([4, 8], [8, 4])]
    for block, again in zip(blocks[:10], blocks[10:], strict=True):
        assert block == again and block.scalar == again.scalar and block.numel == 32
    for number, block in enumerate(blocks[:10]):
        assert list(block.shape) == ([4, 8], [8, 4])[number % 2] and block.scalar == kinds[number // 2]
        tile = tl.core.tensor(number, block)
        assert tile.handle == number and tile.type is block and tile.dtype == block.scalar
        assert [s.value for s in tile.shape] == list(block.shape)
    assert len({str(block) for block in blocks}) == 10


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has no interpreter")
@pytest.mark.parametrize(
    "options", [(), (True, True), (True, False), (False, False, False), (False, False, True, True)]
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_spared_promotion_is_that_of_triton(triton_device, options):
    """Operands and numbers get the dtype, the shape and the elements that Triton alone gives them."""
    scope = interpreter._patch_lang(_round.fn)
    try:
        wrapped = interpreter.TritonSemantic.binary_op_type_checking_impl
        tensors = [operand(dtype, shape) for dtype in DTYPES for shape in (BLOCK, SCALAR)]
        numbers = [True, 0, -3, 2**31, -(2**31), 2.5, 1e300, float("inf")]
        for lhs in tensors:
            for rhs in (*tensors, operand(lhs.dtype, [1, 4]), *numbers):
                expected = promoted(wrapped.__wrapped__, lhs, rhs, options)
                assert promoted(wrapped, lhs, rhs, options) == expected, (lhs.type, rhs)
    finally:
        scope.restore()


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has no interpreter")
def test_a_broadcast_is_that_of_triton(triton_device):
    """Every pair of shapes and dtypes broadcasts as by Triton alone, the second time, too."""
    scope = interpreter._patch_lang(_round.fn)
    shapes = (SCALAR, BLOCK, [2, 1], [1, 4], [1, 1], [4], [8], [8, 2, 4])
    try:
        wrapped = interpreter.TritonSemantic.broadcast_impl_value
        tensors = [operand(dtype, shape) for dtype in DTYPES for shape in shapes]
        for lhs in tensors:
            for rhs in tensors:
                expected = promoted(wrapped.__wrapped__, lhs, rhs, ())
                for _ in range(2):
                    assert promoted(wrapped, lhs, rhs, ()) == expected, (lhs.type, rhs.type)
    finally:
        scope.restore()


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has no interpreter")
def test_elements_that_do_not_fit_their_type_are_refused(triton_device):
    for dtype, fits, is_too_large in ((tl.int1, bool, np.int16), (tl.bfloat16, np.uint16, np.float32)):
        interpreter.TensorHandle(np.zeros(2, fits), dtype)
        with pytest.raises(ValueError, match="exceeds"):
            interpreter.TensorHandle(np.zeros(2, is_too_large), dtype)
    interpreter.TensorHandle(np.zeros(2, np.uint64), tl.pointer_type(tl.float32))
