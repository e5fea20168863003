"""Per chunk and value head, the inverse of what couples its tokens, and the norms put into its factors.

    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j;     A_inv = (I + A)^-1, stored less 1

As `triton.prepare`, but without P, and with products in fp16, which is as exact as tf32 and has room for
|A| < 65504: a recurrence with larger ones grows by as much from token to token. With l2norm raw k go through
the product, and OUT, INTO, FROM of `factors` are multiplied with k_rstd, READ and TO with q_rstd. The
diagonal of A_inv has what rounding took from the row's sum: see `triton.prepare`. Outputs of tokens that
belong to no sequence are zeroed here.

Bytes per token and value head at K = V = 128 in bf16, HV = H: k 256, A_inv 128, factors 12: 396; with l2norm
300 more.
"""

import triton
import triton.language as tl

from gdn.backends.hopper.chained import after_the_one_before
from gdn.backends.hopper.factors import FROM, GAIN, HIGH, INTO, OUT, READ, ROWS, TO
from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import rows_of, rstd_of, squares
from gdn.backends.triton.prepare import clear_outputs
from gdn.backends.triton.tril import inverse_in_parts


@triton.jit
def _round(x):
    """x in fp32, rounded to what bf16 has a place for; ties away from zero. By masks: see `lib.cut`."""
    return ((x.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _scale_row(factors, ROW: tl.constexpr, x, C: tl.constexpr):
    tl.store(factors + ROW * C, tl.load(factors + ROW * C) * x)


@kernel
def solve_kernel(
    q_ptr, k_ptr, table_ptr, factors_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, T, HV, ratio, chunks_per_row,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    if length <= 0:
        if o_ptr is not None:
            clear_outputs(o_ptr, row.to(tl.int64) * T + first, -length, head, HV, V, C)
        return
    tokens = tl.arange(0, C)
    ks = tl.arange(0, K)
    k = rows_of(k_ptr, row, first, length, head // ratio, k_b, k_t, k_h, ks, K, C, UNIT)
    tile = chunk.to(tl.int64) * HV + head
    factors = factors_ptr + tile * (ROWS * C) + tokens
    high = tl.load(factors + HIGH * C)
    columns = tl.load(factors + FROM * C)
    rows = tl.load(factors + GAIN * C)
    kk = tl.dot(k, tl.trans(k))
    if NORM:
        k_rstd = rstd_of(squares(k))
        columns *= k_rstd
        rows *= k_rstd
        tl.store(factors + FROM * C, columns)
        _scale_row(factors, OUT, k_rstd, C)
        _scale_row(factors, INTO, k_rstd, C)
        q = rows_of(q_ptr, row, first, length, head // ratio, q_b, q_t, q_h, ks, K, C, UNIT)
        q_rstd = rstd_of(squares(q))
        if q_rstd_ptr is not None:
            place = (row.to(tl.int64) * T + first + tokens) * (HV // ratio) + head // ratio
            is_mine = (tokens < length) & (head % ratio == 0)
            tl.store(q_rstd_ptr + place, q_rstd, mask=is_mine)
            tl.store(k_rstd_ptr + place, k_rstd, mask=is_mine)
        _scale_row(factors, READ, q_rstd, C)
        _scale_row(factors, TO, q_rstd, C)

    # above the diagonal anything, infinity included: it is not read
    A = kk * tl.exp2(high[:, None] - high[None, :]) * columns[None, :] * rows[:, None]
    X, Y = inverse_in_parts(A, "fp16")
    n, i = tl.arange(0, 2), tl.arange(0, C // 2)
    X = tl.where((i[:, None] > i[None, :])[None, :, :], X, 0.0)
    kept, kept_Y = _round(X), _round(Y)
    lost = tl.sum(X - kept, 2) + tl.where(n == 1, 1.0, 0.0)[:, None] * tl.sum(Y - kept_Y, 1)[None, :]
    kept = tl.where((i[:, None] == i[None, :])[None, :, :], lost[:, :, None], kept)
    base = A_inv_ptr + tile * (C * C) + i[:, None] * C + i[None, :]
    tl.store(base[None, :, :] + (n * (C // 2 * (C + 1)))[:, None, None], kept.to(tl.bfloat16))
    tl.store(base + C // 2 * C, kept_Y.to(tl.bfloat16))
    tl.store(base + C // 2, tl.zeros([C // 2, C // 2], tl.bfloat16))
