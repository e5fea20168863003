"""Run the stages of the chunked rule one by one as kernels, for tests and study. No pipeline uses them.

`gdn.stages` describes them. A program has a chunk, or a sequence, and a value head. Tensors are contiguous.
MMAs of 16-bit inputs use tf32; those of fp32 inputs are as exact as fp32. The adjoints are those of `eager`,
except the sums of `cumsum`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton.chunks import locate, sequence
from gdn.backends.triton.launch import jit, kernel, machine
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    column_mask,
    decay,
    dot,
    load_beta,
    load_rows,
    load_sums,
    state_pointers,
)
from gdn.backends.triton.rule.tril import inverse_of_blocks
from gdn.backends.triton.stages.cumsum import allocate_output, count_entries, kernel_offsets, launch_stage
from gdn.notation import (
    AInv,
    AStrict,
    ChunkStates,
    GSum,
    Keys,
    Offsets,
    PerHead,
    Q,
    State,
    UValues,
    Values,
    WKeys,
)
from gdn.problem import CHUNK


@jit
def _load_rows(x_ptr, token_range, head, T, heads, columns, D: tl.constexpr, C: tl.constexpr):
    """Load a chunk's rows of a contiguous x [B, T, heads, D]; zeros past its end and past column D."""
    x_t = heads * D
    return load_rows(Rows(x_ptr, T.to(tl.int64) * x_t, x_t, D), token_range, head, columns, D, C, 1)


@jit
def _store_rows(x_ptr, x, token_range, head, T, heads, columns, D: tl.constexpr):
    """Store a chunk's rows of a contiguous tensor [B, T, heads, D]; none past the chunk's end or column D."""
    tokens = tl.arange(0, x.shape[0])
    indices = (token_range.row * T.to(tl.int64) + token_range.first + tokens) * heads + head
    indices = indices[:, None] * D + columns[None, :]
    mask = (tokens < token_range.length)[:, None] & column_mask(columns, D)[None, :]
    tl.store(x_ptr + indices, x.to(x_ptr.dtype.element_ty), mask=mask)


@kernel
def _kkt_kernel(
    table_ptr, k_ptr, beta_ptr, G_ptr, A_ptr, T, HV, chunks_per_row, ratio,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for j < i.
    # Program (chunk, head): A [C, C] is an accumulator in registers over blocks of K.
    # Grid: chunks * HV, heads fastest; 4 warps, 8 for fp32 inputs; no PDL.
    # Reads k, beta, G of 64 tokens; writes A [C, C] in fp32: 256 bytes per token.
    head = tl.program_id(0) % HV
    row, first, length = locate(tl.program_id(0) // HV, table_ptr, T, chunks_per_row, C)
    token_range = TokenRange(row, first, length)
    if length <= 0:
        return
    tokens = tl.arange(0, C)
    A = tl.zeros([C, C], tl.float32)
    for i in range(0, K, BK):
        k = _load_rows(k_ptr, token_range, head // ratio, T, HV // ratio, i + tl.arange(0, BK), K, C)
        A = dot(k, tl.trans(k), A, PRECISION)
    beta = load_beta(Rows(beta_ptr, T.to(tl.int64) * HV, HV, 1), token_range, head, C, False, False)
    high, low, _, _ = load_sums(G_ptr, row, first, length, head, T, HV, C)
    A = A * beta[:, None] * decay(high[None, :], low[None, :], high[:, None], low[:, None])
    A = tl.where(tokens[:, None] > tokens[None, :], A, 0.0)
    _store_rows(A_ptr, A, token_range, head, T, HV, tokens, C)


@kernel
def _tril_kernel(
    table_ptr, A_ptr, A_inv_ptr, T, HV, chunks_per_row, C: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    # A_inv = (I + A)^-1, in registers (see `tril`).
    # Program (chunk, head). Grid: chunks * HV, heads fastest; 4 warps, one per 16 x 16 diagonal block of A;
    # no PDL. Reads A below its diagonal; writes A_inv [C, C] in fp32: 256 bytes per token.
    head = tl.program_id(0) % HV
    row, first, length = locate(tl.program_id(0) // HV, table_ptr, T, chunks_per_row, C)
    token_range = TokenRange(row, first, length)
    if length <= 0:
        return
    # blocks as `tril` takes them, in registers; entries past the chunk's end are masked
    A_ptr += ((row * T.to(tl.int64) + first) * HV + head) * C
    pitch = HV * C
    D = _load_blocks(A_ptr, tl.arange(0, 4)[:, None, None] * 16, 0, length, pitch, 16)
    E = _load_blocks(A_ptr, tl.arange(0, 4)[:, None, None] * 16, 16, length, pitch, 16)
    F = tl.reshape(_load_blocks(A_ptr, tl.full([1, 1, 1], 32, tl.int32), 32, length, pitch, 32), (32, 32))
    A_inv = inverse_of_blocks(D, E, F, PRECISION)
    _store_rows(A_inv_ptr, A_inv, token_range, head, T, HV, tl.arange(0, C), C)


@jit
def _load_blocks(A_ptr, start, SHIFT: tl.constexpr, length, pitch, B: tl.constexpr):
    """Load blocks [n, B, B] at rows start [n, 1, 1], SHIFT columns to the left; 0 on, above the diagonal."""
    rows = start + tl.arange(0, B)[None, :, None]
    columns = start - SHIFT + tl.arange(0, B)[None, None, :]
    mask = (rows < length) & (columns >= 0) & (columns < rows)
    return tl.load(A_ptr + rows * pitch + columns, mask=mask, other=0.0).to(tl.float32)


@kernel
def _wy_kernel(
    table_ptr, k_ptr, v_ptr, beta_ptr, G_ptr, A_inv_ptr, w_ptr, u_ptr, T, HV, chunks_per_row, ratio,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # w = A_inv (beta e^G k);  u = A_inv (beta v).
    # Program (chunk, head): A_inv is loaded once for all blocks of K and V.
    # Grid: chunks * HV, heads fastest; 4 warps, 8 for fp32 inputs; no PDL.
    # Reads k, v, beta, G, A_inv of 64 tokens; writes w [C, K] and u [C, V] in fp32.
    head = tl.program_id(0) % HV
    row, first, length = locate(tl.program_id(0) // HV, table_ptr, T, chunks_per_row, C)
    token_range = TokenRange(row, first, length)
    if length <= 0:
        return
    tokens = tl.arange(0, C)
    A_inv = _load_rows(A_inv_ptr, token_range, head, T, HV, tokens, C, C).to(tl.float32)
    A_inv = tl.where(tokens[:, None] >= tokens[None, :], A_inv, 0.0)
    beta = load_beta(Rows(beta_ptr, T.to(tl.int64) * HV, HV, 1), token_range, head, C, False, False)
    high, _, _, _ = load_sums(G_ptr, row, first, length, head, T, HV, C)
    start_decay = beta * tl.exp(high)
    for i in range(0, K, BK):
        ks = i + tl.arange(0, BK)
        k = _load_rows(k_ptr, token_range, head // ratio, T, HV // ratio, ks, K, C).to(tl.float32)
        w = dot(A_inv, start_decay[:, None] * k, None, PRECISION)
        _store_rows(w_ptr, w, token_range, head, T, HV, ks, K)
    for i in range(0, V, BV):
        vs = i + tl.arange(0, BV)
        v = _load_rows(v_ptr, token_range, head, T, HV, vs, V, C).to(tl.float32)
        u = dot(A_inv, beta[:, None] * v, None, PRECISION)
        _store_rows(u_ptr, u, token_range, head, T, HV, vs, V)


@kernel
def _state_kernel(
    table_ptr, k_ptr, w_ptr, u_ptr, G_ptr, initial_ptr, cu_seqlens_ptr, S_in_ptr, v_new_ptr, final_ptr,
    T, HV, chunks_per_row, ratio, bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # v_new = u - w S;  S <- e^(G_C) S + (e^(G_C - G) k)^T v_new, chunk after chunk of one sequence.
    # Program (n, head, strip of V). Grid: N * HV * STRIPS, strips fastest; 4 warps, 8 for fp32 inputs.
    # Reads k, w, G, a strip of u, and S twice per chunk; writes S_in, v_new, and the final state, in fp32.
    # S is in HBM between chunks, not in registers; no PDL.
    STRIPS: tl.constexpr = (V + BV - 1) // BV
    head = (tl.program_id(0) // STRIPS) % HV
    n = tl.program_id(0) // (STRIPS * HV)
    row, begin, num_tokens, chunk = sequence(n, table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C)
    vs = (tl.program_id(0) % STRIPS) * BV + tl.arange(0, BV)
    tokens = tl.arange(0, C)
    # the state is in HBM, in S_in of each chunk: in registers, fp32 MMAs would spill
    final = final_ptr + (n.to(tl.int64) * HV + head) * (K * V)
    state_ptr = tl.where(num_tokens > 0, S_in_ptr + (chunk.to(tl.int64) * HV + head) * (K * V), final)
    for k0 in range(0, K, BK):
        ks = k0 + tl.arange(0, BK)
        tile, mask = state_pointers(state_ptr, ks, vs, K, V, False)
        S = tl.zeros([BK, BV], tl.float32)
        if initial_ptr is not None:
            initial, _ = state_pointers(
                initial_ptr + (n.to(tl.int64) * HV + head) * (K * V), ks, vs, K, V, False
            )
            S = tl.load(initial, mask=mask, other=0.0).to(tl.float32)
        tl.store(tile, S, mask=mask)
    for i in range(0, num_tokens, C):
        # all threads must see in HBM the state that the last iteration stored
        tl.debug_barrier()
        first = begin + i
        length = tl.minimum(num_tokens - i, C)
        token_range = TokenRange(row, first, length)
        v_new = _load_rows(u_ptr, token_range, head, T, HV, vs, V, C).to(tl.float32)
        for k0 in range(0, K, BK):
            ks = k0 + tl.arange(0, BK)
            w = _load_rows(w_ptr, token_range, head, T, HV, ks, K, C).to(tl.float32)
            tile, mask = state_pointers(state_ptr, ks, vs, K, V, False)
            v_new -= dot(w, tl.load(tile, mask=mask, other=0.0), None, PRECISION)
        _store_rows(v_new_ptr, v_new, token_range, head, T, HV, vs, V)
        high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
        end_decay = tl.where(tokens < length, decay(high, low, end_high, end_low), 0.0)
        # decays scale rows of v_new: one multiplication per value in registers
        v_decayed = end_decay[:, None] * v_new
        next_ptr = tl.where(i + C < num_tokens, state_ptr + HV.to(tl.int64) * (K * V), final)
        for k0 in range(0, K, BK):
            ks = k0 + tl.arange(0, BK)
            k = _load_rows(k_ptr, token_range, head // ratio, T, HV // ratio, ks, K, C).to(tl.float32)
            tile, mask = state_pointers(state_ptr, ks, vs, K, V, False)
            S = tl.exp(end_high) * tl.load(tile, mask=mask, other=0.0)
            tile, mask = state_pointers(next_ptr, ks, vs, K, V, False)
            tl.store(tile, dot(tl.trans(k), v_decayed, S, PRECISION), mask=mask)
        state_ptr = next_ptr


@kernel
def _output_kernel(
    table_ptr, q_ptr, k_ptr, v_new_ptr, G_ptr, S_in_ptr, o_ptr, T, HV, chunks_per_row, ratio, keys, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # o = scale (e^G q S_in + P v_new), P masked and without scale.
    # Program (chunk, head, strip of V): o [C, BV] and P [C, C] are accumulators in registers over K.
    # Grid: chunks * HV * STRIPS, strips fastest; 4 warps, 8 for fp32 inputs; no PDL.
    # Reads q, k, G, and a strip of S_in and v_new; writes a strip of o in q's dtype.
    STRIPS: tl.constexpr = (V + BV - 1) // BV
    head = (tl.program_id(0) // STRIPS) % HV
    chunk = tl.program_id(0) // (STRIPS * HV)
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    token_range = TokenRange(row, first, length)
    if length <= 0:
        return
    tokens = tl.arange(0, C)
    vs = (tl.program_id(0) % STRIPS) * BV + tl.arange(0, BV)
    o = tl.zeros([C, BV], tl.float32)
    P = tl.zeros([C, C], tl.float32)
    # keys equals K but is unknown to the compiler. If the loop had one known iteration, the compiler would
    # chain P's MMA to the last one: with 8 warps, fp32 and K = 8 an H200 then gave wrong outputs
    for i in range(0, keys, BK):
        ks = i + tl.arange(0, BK)
        q = _load_rows(q_ptr, token_range, head // ratio, T, HV // ratio, ks, K, C)
        k = _load_rows(k_ptr, token_range, head // ratio, T, HV // ratio, ks, K, C)
        tile = (chunk.to(tl.int64) * HV + head) * (K * V) + ks[:, None] * V + vs[None, :]
        mask = column_mask(ks, K)[:, None] & column_mask(vs, V)[None, :]
        S = tl.load(S_in_ptr + tile, mask=mask, other=0.0).to(tl.float32)
        o = dot(q.to(tl.float32), S, o, PRECISION)
        P = dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), P, PRECISION)
    high, low, _, _ = load_sums(G_ptr, row, first, length, head, T, HV, C)
    P = P * decay(high[None, :], low[None, :], high[:, None], low[:, None])
    P = tl.where(tokens[:, None] >= tokens[None, :], P, 0.0)
    v_new = _load_rows(v_new_ptr, token_range, head, T, HV, vs, V, C).to(tl.float32)
    o = dot(P, v_new, o * tl.exp(high)[:, None], PRECISION) * scale
    _store_rows(o_ptr, o, token_range, head, T, HV, vs, V)


def _precision(x: Tensor) -> str:
    if x.dtype != torch.float32:
        return "tf32"
    return "ieee" if machine(x.device).kind == "hip" else "tf32x3"


def _block_columns(x: Tensor, size: int) -> int:
    """Return the columns that a program loads at once: fewer in fp32: its MMAs take thrice the registers."""
    return min(32 if x.dtype == torch.float32 else 64, _block_size(size))


def _block_size(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _num_warps(x: Tensor) -> int:
    return 8 if x.dtype == torch.float32 else 4


def chunk_kkt(k: Keys, beta: PerHead, G: GSum, cu_seqlens: Offsets | None) -> AStrict:
    """See `gdn.stages`."""
    cu_seqlens, HV, K = kernel_offsets(cu_seqlens, k), beta.shape[2], k.shape[3]
    A = allocate_output(k, (*beta.shape, CHUNK), torch.float32, cu_seqlens)
    constants = {"K": K, "BK": _block_columns(k, K), "PRECISION": _precision(k)}
    tensors = (k.contiguous(), beta.contiguous(), G.contiguous(), A)
    ratio = HV // k.shape[2]
    launch_stage(
        _kkt_kernel, cu_seqlens, tensors, HV, constants, lambda chunks: chunks * HV, (ratio,), _num_warps(k)
    )
    return A


def solve_tril(A: AStrict, cu_seqlens: Offsets | None) -> AInv:
    """See `gdn.stages`."""
    cu_seqlens, HV = kernel_offsets(cu_seqlens, A), A.shape[2]
    A_inv = allocate_output(A, A.shape, torch.float32, cu_seqlens)
    constants = {"PRECISION": _precision(A)}
    launch_stage(_tril_kernel, cu_seqlens, (A.contiguous(), A_inv), HV, constants, lambda chunks: chunks * HV)
    return A_inv


def wy_transform(
    k: Keys, v: Values, beta: PerHead, G: GSum, A_inv: AInv, cu_seqlens: Offsets | None
) -> tuple[WKeys, UValues]:
    """See `gdn.stages`."""
    cu_seqlens, HV = kernel_offsets(cu_seqlens, k), v.shape[2]
    w = allocate_output(k, (*beta.shape, k.shape[3]), torch.float32, cu_seqlens)
    u = allocate_output(k, v.shape, torch.float32, cu_seqlens)
    tensors = (*(x.contiguous() for x in (k, v, beta, G, A_inv)), w, u)
    K, V = k.shape[3], v.shape[3]
    constants = {
        "K": K,
        "V": V,
        "BK": _block_columns(k, K),
        "BV": _block_columns(k, V),
        "PRECISION": _precision(k),
    }
    ratio = HV // k.shape[2]
    launch_stage(
        _wy_kernel, cu_seqlens, tensors, HV, constants, lambda chunks: chunks * HV, (ratio,), _num_warps(k)
    )
    return w, u


def chunk_state(
    k: Keys, w: WKeys, u: UValues, G: GSum, initial_state: State | None, cu_seqlens: Offsets | None
) -> tuple[ChunkStates, Values, State]:
    """See `gdn.stages`."""
    cu_seqlens, (B, T, HV, V), K = kernel_offsets(cu_seqlens, k), u.shape, k.shape[3]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    num_chunks = B * triton.cdiv(T, CHUNK) if cu_seqlens is None else (T + N * (CHUNK - 1)) // CHUNK
    S_in = allocate_output(k, (num_chunks, HV, K, V), torch.float32, cu_seqlens)
    v_new = allocate_output(k, u.shape, torch.float32, cu_seqlens)
    final_state = k.new_empty((N, HV, K, V), dtype=torch.float32)
    constants = {
        "K": K,
        "V": V,
        "BK": _block_columns(k, K),
        "BV": _block_columns(k, V),
        "PRECISION": _precision(k),
    }
    initial = None if initial_state is None else initial_state.contiguous()
    tensors = (*(x.contiguous() for x in (k, w, u, G)), initial, cu_seqlens, S_in, v_new, final_state)
    programs = N * HV * triton.cdiv(V, constants["BV"])
    scalars = (HV // k.shape[2], count_entries(k, cu_seqlens))
    launch_stage(
        _state_kernel, cu_seqlens, tensors, HV, constants, lambda chunks: programs, scalars, _num_warps(k)
    )
    return S_in, v_new, final_state


def chunk_output(
    q: Q, k: Keys, v_new: Values, G: GSum, S_in: ChunkStates, scale: float, cu_seqlens: Offsets | None
) -> Values:
    """See `gdn.stages`."""
    cu_seqlens, HV = kernel_offsets(cu_seqlens, q), v_new.shape[2]
    o = allocate_output(q, v_new.shape, q.dtype, cu_seqlens)
    K, V = q.shape[3], v_new.shape[3]
    # an H200 gave wrong outputs with blocks of 16 (see the kernel), and right ones with these
    BK, BV = max(32, _block_columns(q, K)), max(32, _block_columns(q, V))
    constants = {"K": K, "V": V, "BK": BK, "BV": BV, "PRECISION": _precision(q)}
    tensors = (*(x.contiguous() for x in (q, k, v_new, G, S_in)), o)
    strips = triton.cdiv(V, constants["BV"])
    scalars = (HV // q.shape[2], K, float(scale))
    launch_stage(
        _output_kernel,
        cu_seqlens,
        tensors,
        HV,
        constants,
        lambda chunks: chunks * HV * strips,
        scalars,
        _num_warps(q),
    )
    return o
