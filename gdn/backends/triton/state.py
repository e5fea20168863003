"""The state pass where sequences and heads are few: the shortest chain from chunk to chunk.

    v_new = u - w S;   S <- e^(G_C) S + (e^(G_C - G) k)^T v_new

One program takes a strip of value columns of S through all chunks of a sequence; w and u of `prepare` leave
two products between a state and the next. The states that enter and v_new leave, and `output` makes all
outputs at once.
Bytes per token and value head at K = V = 128 in bf16, HV = H: w, u, k 768, factors 20, S_in 512, v_new 256:
1560.
"""

import triton.language as tl

from gdn.backends.triton.chunks import sequence
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import dot, exist, rows_of, state_tile
from gdn.backends.triton.pairs import factor, through


@kernel
def state_kernel(
    k_ptr, w_ptr, u_ptr, factors_ptr, initial_ptr, cu_seqlens_ptr, table_ptr, S_in_ptr, v_new_ptr, final_ptr,
    k_b, k_t, k_h, T, HV, ratio, chunks_per_row, bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    V_FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    strips = tl.cdiv(V, BV)
    strip = tl.program_id(0) % strips
    head = (tl.program_id(0) // strips) % HV
    n = tl.program_id(0) // (strips * HV)
    row, start, total, chunk = sequence(n, table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C)
    operand: tl.constexpr = k_ptr.dtype.element_ty

    vs = strip * BV + tl.arange(0, BV)
    ks = tl.arange(0, BK)
    tokens = tl.arange(0, C)
    state_place, state_mask = state_tile((n.to(tl.int64) * HV + head) * (K * V), ks, vs, K, V, V_FIRST)
    if initial_ptr is None:
        S = tl.zeros([BK, BV], tl.float32)
    else:
        S = tl.load(initial_ptr + state_place, mask=state_mask, other=0.0).to(tl.float32)

    for done in tl.range(0, total, C, num_stages=STAGES):
        length = tl.minimum(total - done, C)
        tile = (chunk + done // C).to(tl.int64) * HV + head
        k = rows_of(k_ptr, row, start + done, length, head // ratio, k_b, k_t, k_h, ks, K, C, UNIT)
        w_place = tile * (C * K) + tokens[:, None] * K + ks[None, :]
        w = tl.load(w_ptr + w_place, mask=exist(ks, K)[None, :], other=0.0)
        tile_place = tile * (C * V) + tokens[:, None] * V + vs[None, :]
        u = tl.load(u_ptr + tile_place, mask=exist(vs, V)[None, :], other=0.0)
        out = factor(factors_ptr, tile, 0, C)

        S_operand = S.to(operand)
        place, mask = state_tile(tile * (K * V), ks, vs, K, V, False)
        tl.store(S_in_ptr + place, S_operand, mask=mask)
        v_new = u.to(tl.float32) - dot(w, S_operand, None, PRECISION)
        tl.store(v_new_ptr + tile_place, v_new.to(operand), mask=exist(vs, V)[None, :])
        grown = (v_new * out[:, None]).to(operand)
        S = dot(tl.trans(k), grown, S * through(factors_ptr, tile, C), PRECISION)

    if final_ptr is not None:
        tl.store(final_ptr + state_place, S, mask=state_mask)
