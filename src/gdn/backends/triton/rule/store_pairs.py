"""Store P and A_inv of a chunk with a decay per key channel, from its pairs."""

import triton
import triton.language as tl

from gdn.backends.triton.lib import split_bf16
from gdn.backends.triton.rule.channels import is_odd_block, of_tokens
from gdn.backends.triton.rule.prepare import store_inverse
from gdn.backends.triton.rule.tril import inverse_of_blocks


@triton.jit
def store_pairs(x_ptr, rest_ptr, tile, within, beside, across, C: tl.constexpr):
    """Store pairs [C, C] of a tile from its parts, zeros above the diagonal; rest_ptr: their low half."""
    n = tl.arange(0, 4)[:, None, None]
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    # offsets within a tile are 32 bits wide: 64 would take twice the registers
    x_ptr += tile * (C * C)
    if rest_ptr is not None:
        rest_ptr += tile * (C * C)
    _store_part(x_ptr, rest_ptr, (16 * n + i) * C + 16 * n + j, within)
    # blocks 1 and 3 have their pairs with the block before, blocks 0 and 2 zeros for the block after
    beside = tl.where(is_odd_block(), beside, 0.0)
    _store_part(x_ptr, rest_ptr, (16 * n + i) * C + 16 * (n ^ 1) + j, beside)
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    _store_part(x_ptr, rest_ptr, (32 + i) * C + j, across)
    _store_part(x_ptr, rest_ptr, i * C + 32 + j, tl.zeros_like(across))


@triton.jit
def _store_part(x_ptr, rest_ptr, place, x):
    """Store a part of the pairs; with rest_ptr as hi + lo in two tensors."""
    if rest_ptr is None:
        tl.store(x_ptr + place, x.to(x_ptr.dtype.element_ty))
    else:
        high, low = split_bf16(x, x_ptr.dtype.element_ty)
        tl.store(x_ptr + place, high)
        tl.store(rest_ptr + place, low)


@triton.jit
def store_square(x_ptr, rest_ptr, tile, x, C: tl.constexpr):
    """Store pairs i >= j [C, C] of a tile, zeros above the diagonal; rest_ptr: their low half."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    if rest_ptr is not None:
        rest_ptr += tile * (C * C)
    _store_part(x_ptr + tile * (C * C), rest_ptr, i * C + j, tl.where(i >= j, x, 0.0))


@triton.jit
def store_levels(P_ptr, P_rest_ptr, A_inv_ptr, tile, beta, parts, C: tl.constexpr, PRECISION: tl.constexpr):
    """Store P and A_inv (unless it is None) of a tile from the parts of `pairs_by_levels`."""
    within, beside, across = parts
    within_q, within_k = within
    beside_q, beside_k = beside
    across_q, across_k = across
    store_pairs(P_ptr, P_rest_ptr, tile, within_q, beside_q, across_q, C)
    if A_inv_ptr is not None:
        # each part is multiplied by beta of its rows
        in_block = of_tokens(beta)
        _, late = tl.split(tl.permute(tl.reshape(beta, (2, 32)), (1, 0)))
        A_inv = inverse_of_blocks(
            within_k * in_block, beside_k * in_block, across_k * late[:, None], PRECISION
        )
        store_inverse(A_inv_ptr, tile, A_inv, C)
