# mypy: disable-error-code="assignment"
"""Decode rows of several tokens strip by strip: a program takes several tiles of a state, one after another.

`decode` gives each tile of 8 or 16 value columns a program of its own, so eight or sixteen programs compute
the same gates, norms and <q, k> of each token: a quarter of their instructions (sm_90), and many rows are
bound by instructions, not by HBM. Here a program computes them once. Each group of lanes that holds other
columns of the state takes another token, so one pass is for as many tokens as there are groups. Sums have
the order of `decode`, so no bit differs. `decode` uses it for rows of 2 to 16 tokens that write at most the
last state, where there are programs for half of the places on the SMs.
"""

from dataclasses import replace

import torch
import triton.language as tl
from torch._subclasses.functional_tensor import FunctionalTensor

from gdn.backends.triton.launch import Launch, jit, kernel, machine
from gdn.backends.triton.launch.pdl import ON_GPU, launch_dependents, wait_previous
from gdn.backends.triton.lib import activate_beta
from gdn.backends.triton.serving.packet_lib import load_slot
from gdn.backends.triton.serving.recurrent_lib import (
    activate_decay,
    divide,
    inner_product,
    key_offsets,
    limit_tokens,
    load_gate_parameters,
    locate_program,
    prefetch_columns,
    rounded_product,
    spoil_longer_row,
    tile_indices,
    tile_pointers,
    token_range,
)
from gdn.backends.triton.serving.state_tiles import RESIDENT, StateTile, max_row_tokens
from gdn.backends.triton.serving.structs import (
    GateParameters,
    Gates,
    GateStrides,
    Packet,
    Slots,
    Tokens,
    group_constants,
)
from gdn.problem import DecodeProblem

FP32_TILES = 2  # tiles of `decode` that make one tile here, on fp32 states
REGISTERS = 128  # maxnreg: sixteen programs an SM
LONGEST = 16  # tokens of a row; a row of one token has nothing to share, and is slower here


@kernel
def decode_strips_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, column_scale_ptr,
    cu_seqlens_ptr, read_index_ptr, num_accepted_ptr, ring_pos_ptr, write_index_ptr, intermediate_ptr,
    intermediate_row_ptr, parent_ptr, o_ptr,
    q_b, q_t, q_h, q_0, k_b, k_t, k_h, k_0, q_k, k_k, v_b, v_t, v_h, v_v, v_0, o_b, o_t, o_h, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h,
    state_n, state_r, state_h, state_k, state_v, kept_n, kept_t, kept_h, kept_k, kept_v,
    read_n, read_c, accepted_n, ring_n, write_n, write_t, kept_row_n, parent_n, parent_t,
    N, T, HV, HV_magic, HV_s, ratio_magic, ratio_s, slots, lowest, columns, entries, kept_rows, scale,
    g_k, dt_bias_k, lower_bound, scale_n, scale_r, scale_h, scale_v, most,
    K: tl.constexpr, V: tl.constexpr, A: tl.constexpr, J: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    R_FIRST: tl.constexpr, AXIS: tl.constexpr, KEPT_AXIS: tl.constexpr, DENSE: tl.constexpr,
    UNIT: tl.constexpr, STATE_UNIT: tl.constexpr, KEPT_UNIT: tl.constexpr, WRITE: tl.constexpr,
    ROUND: tl.constexpr, NORM: tl.constexpr, NEGATIVE: tl.constexpr, PDL: tl.constexpr,
    AHEAD: tl.constexpr, HAS_NEXT: tl.constexpr, CHANNELS: tl.constexpr,
    STRIPS: tl.constexpr, IS_ONE_PASS: tl.constexpr,
):  # fmt: skip
    """Run all tokens of a row as `decode_kernel` does, on STRIPS tiles of A * B value columns of its state.

    Program (row, head, block); grid: (N, + 1 if packed) * HV * blocks; 1 warp. Parameters as in `decode`.
    Reads the state once, v and q and k once per strip (from L1), the gates once; writes o and the last state.
    The tile of the next strip is prefetched into L2 while one is in registers. IS_ONE_PASS: at most A tokens.
    PDL: it waits for the previous kernel before its first load; the next one starts after its first tile.
    """
    C: tl.constexpr = group_constants(
        NORM=NORM, NEGATIVE=NEGATIVE, DENSE=DENSE, DECAY=(a_ptr is not None) or (g_ptr is not None),
        GATE=a_ptr is not None, A=A, ROUND=ROUND, STORED=state_ptr.dtype.element_ty,
    )  # fmt: skip
    if PDL:
        wait_previous()
    BLOCKS: tl.constexpr = V // (A * B * STRIPS)
    row, head, block = locate_program(HV, HV_magic, HV_s, BLOCKS)
    first, total = token_range(cu_seqlens_ptr, row, N, T)
    count = total
    if IS_ONE_PASS:
        count = limit_tokens(cu_seqlens_ptr, total, A)
    slots_read = Slots(
        read_index_ptr, num_accepted_ptr, ring_pos_ptr, read_n, read_c, accepted_n, ring_n, columns, entries
    )
    slot, entry = load_slot(row, N, slots_read)
    keys, values = tile_indices(0, A, J, B, W, AXIS, R_FIRST)
    key_head = divide(head, ratio_magic, ratio_s)
    q_ptr += (row * q_b + first * q_t + key_head * q_h + q_0) * UNIT
    k_ptr += (row * k_b + first * k_t + key_head * k_h + k_0) * UNIT
    v_ptr += row * v_b + first * v_t + head * v_h + v_0 + block * (STRIPS * A * B * v_v)
    o_ptr += row * o_b + first * o_t + head * o_h + block * (STRIPS * A * B * o_v)
    q_at = q_ptr + key_offsets(keys, q_k, A, B, AXIS, R_FIRST, DENSE)
    k_at = k_ptr + key_offsets(keys, k_k, A, B, AXIS, R_FIRST, DENSE)
    if a_ptr is not None:
        g_ptr, beta_ptr = a_ptr, b_ptr
    if g_ptr is not None:
        g_ptr += row * g_b + first * g_t + head * g_h
    if beta_ptr is not None:
        beta_ptr += row * beta_b + first * beta_t + head * beta_h
    gates = Gates(g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr)
    strides = GateStrides(g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h)
    is_idle = (slot < lowest) | (slot >= slots) | (row >= N)
    IS_LIMITED: tl.constexpr = IS_ONE_PASS and cu_seqlens_ptr is not None
    if IS_LIMITED:
        # in one loop, which no row runs that has a slot and no more tokens than promised
        filler = tl.where(is_idle, 0.0, float("nan"))
        fill_row((o_ptr, o_t, o_v), values, tl.where(is_idle, 0, count), total, filler, STRIPS)
    # not an early return: exporters look for the stores of a kernel, and do not follow jumps
    if is_idle:
        if not IS_LIMITED:
            fill_row((o_ptr, o_t, o_v), values, 0, total, 0.0, STRIPS)
    else:
        start = (slot * state_n + entry * state_r + head.to(tl.int64) * state_h) * STATE_UNIT
        columns_of_tile = tl.full([], A * B, tl.int64)
        state_ptr += start + block * STRIPS * columns_of_tile * (state_v * STATE_UNIT)
        LINES: tl.constexpr = K * state_ptr.dtype.element_ty.primitive_bitwidth // (8 * 128)
        target, is_written = slot, False
        if WRITE == "final":
            if write_index_ptr is not None:
                target = tl.load(write_index_ptr + row * write_n).to(tl.int64)
            is_written = (target >= lowest) & (target < slots) & (count > 0)
        to_target = (target - slot) * (state_n * STATE_UNIT)
        if AHEAD > 0:
            # the first tile is on its way from HBM while the gates and norms are computed
            prefetch_columns(state_ptr, 0, state_v, A * B, LINES, STATE_UNIT)
        rate, bias = load_gate_parameters(gates, strides, head, 0, True, None, 0)
        gate = GateParameters(rate, bias, None)
        packet = Packet(q_ptr, k_ptr, count, total, q_t * UNIT, k_t * UNIT, q_k, k_k)
        if IS_ONE_PASS:
            prepared = prepare_tokens(packet, keys, tl.arange(0, A), gates, strides, gate, C)
        for strip in range(STRIPS):
            place = tile_pointers(state_ptr, keys, values, state_k, state_v, STATE_UNIT, AXIS)
            S = tl.load(place)
            if PDL:
                launch_dependents()
            if (AHEAD > 0) & (strip + 1 < STRIPS):
                # L2: the next tile of this program
                prefetch_columns(state_ptr, A * B, state_v, A * B, LINES, STATE_UNIT)
            S = to_fp32(S)
            tokens = Tokens(
                q_at, k_at, v_ptr + values * v_v, None, None, q_t * UNIT, k_t * UNIT, v_t, 0, 0, None
            )
            o_at = o_ptr + values * o_v
            if IS_ONE_PASS:
                S = run_tokens(S, prepared, 0, count, tokens, (o_at, o_t), scale, C)
            else:
                # more tokens than groups of lanes: their scalars would not fit into registers
                for part in range(0, count, A):
                    passed = prepare_tokens(packet, keys, part + tl.arange(0, A), gates, strides, gate, C)
                    end = tl.minimum(part + A, count)
                    S = run_tokens(S, passed, part, end, tokens, (o_at, o_t), scale, C)
            if WRITE == "final":  # noqa: SIM102 - a constant, and what only then is compiled
                if is_written:
                    tl.store(place + to_target, S.to(state_ptr.dtype.element_ty))
            state_ptr += columns_of_tile * (state_v * STATE_UNIT)
            v_ptr += columns_of_tile * v_v
            o_ptr += columns_of_tile * o_v


@jit
def fill_row(output, values, start, end, filler, STRIPS: tl.constexpr):
    """Store one value as o of the tokens from `start` to `end`, on STRIPS tiles of columns."""
    o_ptr, o_t, o_v = output
    at = tl.full([], 0, tl.int64) + start
    for _ in range(start, end):
        for strip in tl.static_range(STRIPS):
            place = o_ptr + at * o_t + (strip * values.numel + values) * o_v
            tl.store(place, tl.full(values.shape, filler, o_ptr.dtype.element_ty))
        at += 1


@jit
def prepare_tokens(packet, keys, tokens, gates, strides, gate, C: tl.constexpr):
    """Return decay, beta, <q, k> and inverse norms of k and q [A, 1] of A tokens.

    What `advance_token` computes of a token alone, in registers; token a is in the lanes of column a.
    """
    is_token = tokens < packet.count
    rows = tokens[:, None, None, None].to(tl.int64)
    q_keys, k_keys = keys, keys
    if not C.DENSE:
        q_keys, k_keys = keys * packet.q_k, keys * packet.k_k
    has_key = is_token[:, None, None, None]
    q = to_fp32(tl.load(packet.q_ptr + (rows * packet.q_t + q_keys), mask=has_key, other=0.0))
    k = to_fp32(tl.load(packet.k_ptr + (rows * packet.k_t + k_keys), mask=has_key, other=0.0))
    qk = inner_product(q, k)
    k_rstd, q_rstd = tl.full(qk.shape, 1.0, tl.float32), tl.full(qk.shape, 1.0, tl.float32)
    if C.NORM:
        k_rstd = tl.rsqrt(inner_product(k, k) + 1e-6)
        q_rstd = tl.rsqrt(inner_product(q, q) + 1e-6)
        qk = qk * q_rstd * k_rstd
    decay, beta = tl.full(qk.shape, 1.0, tl.float32), tl.full(qk.shape, 1.0, tl.float32)
    if gates.g_ptr is not None:
        place = gates.g_ptr + tokens.to(tl.int64)[:, None] * strides.g_t
        g = tl.load(place, mask=is_token[:, None], other=0.0).to(tl.float32)
        if C.GATE:
            g = activate_decay(g, gate)
        decay = tl.exp(g)
    if gates.beta_ptr is not None:
        place = gates.beta_ptr + tokens.to(tl.int64)[:, None] * strides.beta_t
        beta = tl.load(place, mask=is_token[:, None], other=0.0)
    beta = spoil_longer_row(activate_beta(beta, C.GATE, C.NEGATIVE), packet.count, packet.total)
    return decay, beta, qk, k_rstd, q_rstd


@jit
def run_tokens(S, prepared, start, end, tokens, output, scale, C: tl.constexpr):
    """Advance a tile S by the tokens from `start` to `end`, which are in `prepared`; store o of each."""
    o_at, o_t = output
    at = tl.full([], 0, tl.int64) + start
    for t in range(start, end):
        q = to_fp32(tl.load(tokens.q_ptr + at * tokens.q_t))
        k = to_fp32(tl.load(tokens.k_ptr + at * tokens.k_t))
        v = tl.load(tokens.v_ptr + at * tokens.v_t).to(tl.float32)
        S, o = advance_prepared(S, q, k, v, pick_token(prepared, t - start, C.A), scale, C)
        if C.ROUND:
            S = S.to(C.STORED).to(tl.float32)
        tl.store(o_at + at * o_t, o.to(o_at.dtype.element_ty))
        at += 1
    return S


@jit
def to_fp32(x):
    """Return x in fp32; of two bf16 in a register each takes one instruction, where ptxas takes three."""
    if ON_GPU and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(tl.float32)


@jit
def pick_token(prepared, lane, A: tl.constexpr):
    """Return the scalars [A, 1] of one token of what `prepare_tokens` returned, from its group of lanes."""
    outputs = ()
    index = tl.zeros([A, 1], tl.int32) + lane
    for i in tl.static_range(len(prepared)):
        outputs = outputs + (tl.gather(prepared[i], index, 0),)
    return outputs


@jit
def advance_prepared(S, q, k, v, token, scale, C: tl.constexpr):
    """Return what `advance_token` returns, of a token whose scalars are computed."""
    decay, beta, qk, k_rstd, q_rstd = token
    kS, qS = inner_product(S, k), inner_product(S, q)
    if C.NORM:
        kS, qS = kS * k_rstd, qS * q_rstd
    if C.DECAY:
        # in place, after both products have used S
        S *= decay[:, None, :, None]
    d = beta * tl.fma(-decay, kS, v)
    o = scale * tl.fma(decay, qS, rounded_product(qk, d))
    return tl.fma(k, (d * k_rstd)[:, None, :, None], S), o


def supports_strips(p: DecodeProblem) -> bool:
    """Return True if this kernel supports the decode: rows of 2 to 16 tokens that write at most one state."""
    # a trace takes no inline assembly
    if isinstance(p.q, FunctionalTensor) or machine(p.q.device).kind != "cuda" or p.K not in (64, 128):
        return False
    is_plain = p.column_scale is None and p.intermediate is None and p.parent is None and p.write != "all"
    is_plain &= not p.is_per_channel and p.lower_bound is None
    return is_plain and 1 < (max_row_tokens(p) or 0) <= LONGEST


def most_strips(dtype: torch.dtype) -> int:
    """Return the most tiles of a program on states of this dtype; on fp32 states these have 16 columns.

    More are slower: last states of 4 tokens at B = 64, 32 heads of 128 x 128, in us (H200), with at most 2,
    4 and 8 tiles: bf16 57.3, 56.3, 57.0; fp32 86.3, 95.1, 102.9. `decode_kernel` takes 70.4 and 96.8.
    """
    return 2 if dtype == torch.float32 else 4


def strips_num_states(p: DecodeProblem) -> tuple[int, ...]:
    """Return rows times heads that together take every binary of a decode that this kernel supports."""
    if not supports_strips(p):
        return ()
    # tiles have 8, 16 or 32 columns: the most states that have half a program for each place, one, two, four
    places = RESIDENT * machine(p.q.device).num_sms
    return tuple(max(1, places * columns // p.V) for columns in (4, 8, 16, 32, 64, 128))


def length_key(p: DecodeProblem) -> tuple[bool, int]:
    """Return what a launch depends on of the longest row, and whether packets may be rounded otherwise."""
    return p.exact_packet, min(max_row_tokens(p) or 0, LONGEST + 1)


def in_strips(one: Launch, p: DecodeProblem, tile: StateTile, num_states: int) -> Launch:
    """Return this kernel's launch for one of `decode_kernel`, or that one where few rows fill no GPU.

    A program takes as many tiles as leave one program for each place on the SMs, up to `most_strips`.
    """
    if not supports_strips(p) or one.constants["AXIS"] != "k":
        return one
    rows = one.grid // tile.blocks(p.V)
    if p.state.dtype == torch.float32:
        tile = replace(tile, P=tile.P * FP32_TILES)
    columns, places, strips = tile.R * tile.P, RESIDENT * machine(p.q.device).num_sms, 1
    if num_states * p.V // columns <= places // 2 or p.V % columns:
        return one
    while strips < most_strips(p.state.dtype) and p.V % (2 * strips * columns) == 0:
        if num_states * p.V // (strips * columns) <= places:
            break
        strips *= 2
    own = {"STRIPS": strips, "IS_ONE_PASS": (max_row_tokens(p) or 0) <= tile.constants()["A"]}
    constants = {**one.constants, **tile.constants(), **own}
    del constants["IS_SINGLE"]
    grid, options = rows * (p.V // (columns * strips)), {**one.options, "maxnreg": REGISTERS}
    return Launch(decode_strips_kernel, grid, one.scalars, constants, one.num_warps, options=options)
