"""Run a packet of up to 16 tokens at once on tensor cores: decode with exact_packet=False, parts of replay.

    S_t = e^(G_t) S,  and in replay + sum_j e^(G_t - G_j) k_j u_j^T over the history
    r_t = beta_t (v_t - S_t^T k_t);    A_tj = beta_t e^(G_t - G_j) <k_t, k_j> for j < t;    (I + A) d = r
    o_t = scale (S_t^T q_t + sum_(j <= t) e^(G_t - G_j) <q_t, k_j> d_j)

The state is read once from HBM, and once more (from L2) where the last state is written:
e^(G_T) S + sum_j e^(G_T - G_j) k_j d_j^T. `packet_lib` has the parts. `decode` writes every state faster.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton.launch import Launch, Machine, kernel, machine, unit_of
from gdn.backends.triton.launch.pdl import launch_dependents_then_wait, pdl_options, supports_pdl
from gdn.backends.triton.lib import column_mask, decay, split_fp64
from gdn.backends.triton.serving.packet_lib import (
    ROWS,
    add_outer_product,
    column_pointer,
    compute_outputs,
    fill_outputs,
    load_slot,
    load_values,
    multiply_parts,
    multiply_state,
    output_strip_pointers,
    row_pointers,
    scale_rows,
    solve_packet,
    spread_over_rows,
    store_outputs,
    tokens_of_rows,
)
from gdn.backends.triton.serving.packet_loads import (
    late_count,
    load_packet,
    load_strip,
    multiply_held,
    sum_gates,
    use_parts_here,
)
from gdn.backends.triton.serving.recurrent_lib import (
    divide,
    limit_tokens,
    locate_program,
    prefetch_columns,
    spoil_longer_row,
    token_range,
)
from gdn.backends.triton.serving.state_tiles import RESIDENT, magic_numbers, max_row_tokens, pool_strides
from gdn.backends.triton.serving.structs import (
    Gates,
    GateStrides,
    Packet,
    Slots,
    Strip,
    group_constants,
)
from gdn.problem import RESET, DecodeProblem, FoldProblem, HistoryProblem, KeepProblem, ReplayProblem

MAX_TOKENS = 16  # tokens of a packet
HELD = {2: 128, 4: 32}  # bytes of an element -> keys of q and k that a program holds in registers
FEW, MANY = 16, 32  # columns of a state that a program has in registers at a time
FILLED = 6  # warps per SM from which a program takes all strips of columns instead of one
UPDATED = 64  # keys of a state that one MMA updates, if the state is loaded again
REGISTERS = 128  # maxnreg of programs of 8 tokens that write no state: sixteen programs an SM
EXACT_TOKENS = 4  # tokens up to which packets that write an fp32 state run token by token: `supports_packet`
LONG_REGISTERS = 200  # of one strip of 16 tokens: 7.25 us at B = 8, 32 heads, for 7.57 in 248 (bf16, H200)
INT8_REGISTERS = 168  # the same on states in int8: twelve programs an SM, and no spills


@kernel
def packet_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, column_scale_ptr,
    cu_seqlens_ptr, read_index_ptr, num_accepted_ptr, ring_pos_ptr, write_index_ptr, intermediate_ptr,
    intermediate_row_ptr, parent_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, q_0, k_0, v_0, q_k, k_k, v_v, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, state_n, state_r, state_h, state_k, state_v,
    read_n, read_c, accepted_n, ring_n, write_n,
    N, T, HV, HV_magic, HV_s, ratio_magic, ratio_s, slots, lowest, columns, entries, scale,
    K: tl.constexpr, V: tl.constexpr, BU: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    STRIPS: tl.constexpr, STAGES: tl.constexpr, AXIS: tl.constexpr, DENSE: tl.constexpr, NEAR: tl.constexpr,
    LINE: tl.constexpr, UNIT: tl.constexpr, STATE_UNIT: tl.constexpr, WRITE: tl.constexpr, NORM: tl.constexpr,
    NEGATIVE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, FP32_PRECISION: tl.constexpr,
    RESET: tl.constexpr, PDL: tl.constexpr, LOADS_FIRST: tl.constexpr, HOLDS: tl.constexpr,
    FETCHED: tl.constexpr, SUBSTITUTES: tl.constexpr, SHUFFLES: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Run one row's tokens as `decode` does, where at most the last state is written.

    Program (row, head, block): STRIPS strips of BV value columns. Grid: (N, + 1 if packed) * HV * blocks; one
    or two `warps`. PDL: it lets the next kernel start at once, and waits before its first load. Reads q, k,
    v, gates of up to 16 tokens and the state; writes o, and the last state if WRITE is "final".
    LOADS_FIRST, HOLDS, FETCHED, SUBSTITUTES, SHUFFLES: see `order_loads`; WAITS: see `late_count`.
    """
    C: tl.constexpr = group_constants(
        K=K, V=V, BV=BV, BS=BS, BT=BT, STRIPS=STRIPS, STAGES=STAGES, AXIS=AXIS, DENSE=DENSE, NEAR=NEAR,
        LINE=LINE, UNIT=UNIT, STATE_UNIT=STATE_UNIT, NORM=NORM, NEGATIVE=NEGATIVE, LEVELS=LEVELS,
        PRECISION=PRECISION, FP32_PRECISION=FP32_PRECISION, RESET=RESET, SUBSTITUTES=SUBSTITUTES,
        SHUFFLES=SHUFFLES,
    )  # fmt: skip
    if PDL:
        launch_dependents_then_wait()
    n, head, block = locate_program(HV, HV_magic, HV_s, (V + BV * STRIPS - 1) // (BV * STRIPS))
    first, total = token_range(cu_seqlens_ptr, n, N, T)
    count = limit_tokens(cu_seqlens_ptr, total, 1 << LEVELS)
    slots_read = Slots(
        read_index_ptr, num_accepted_ptr, ring_pos_ptr, read_n, read_c, accepted_n, ring_n, columns, entries
    )
    slot, entry = load_slot(n, N, slots_read)
    # no integer division before the first load
    key_head = divide(head, ratio_magic, ratio_s)
    o_ptr += (n * o_b + first * o_t + head * o_h) * UNIT
    q_ptr += (n * q_b + first * q_t + key_head * q_h + q_0) * UNIT
    k_ptr += (n * k_b + first * k_t + key_head * k_h + k_0) * UNIT
    v_ptr += (n * v_b + first * v_t + head * v_h + v_0) * UNIT
    # q, k and gates are loaded before the slot index arrives, so their latencies overlap
    PARTS: tl.constexpr = 2 * BT // ROWS
    packet = Packet(q_ptr, k_ptr, count, total, q_t, k_t, q_k, k_k)
    gates = Gates(g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr)
    gate_strides = GateStrides(g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h)
    now = tl.arange(0, BT)
    X, products, sums = load_packet(packet, gates, gate_strides, n, first, head, C, LOADS_FIRST)
    is_idle = (slot < lowest) | (slot >= slots) | (n >= N)
    if cu_seqlens_ptr is not None:
        # no token of a row that has a slot and no more tokens than promised
        begin, filler = tl.where(is_idle, 0, count), tl.where(is_idle, 0.0, float("nan"))
        fill_outputs(o_ptr, begin, total, filler, block * STRIPS, o_t, o_v, C)
    # not an early return: exporters look for the stores of a kernel, and do not follow jumps
    if is_idle:
        if cu_seqlens_ptr is None:
            fill_outputs(o_ptr, 0, total, 0.0, block * STRIPS, o_t, o_v, C)
    else:
        values = Strip(v_ptr, None, None, v_t, v_v)
        start_ptr = state_ptr + head.to(tl.int64) * state_h * STATE_UNIT
        start_ptr += (slot * state_n + entry * state_r) * STATE_UNIT
        if FETCHED > 0:
            LINES: tl.constexpr = K * state_ptr.dtype.element_ty.primitive_bitwidth // (8 * 128)
            prefetch_columns(start_ptr, block * (STRIPS * BV), state_v, FETCHED, LINES, STATE_UNIT)
        if HOLDS:
            # S is on its way from HBM while the packet's system is solved in registers
            held_v = load_values(values, block * BV, count, C)
            held_ptr = column_pointer(start_ptr, block * BV, state_v * STATE_UNIT, AXIS == "v")
            held = load_strip(Strip(held_ptr, tl.arange(0, BV), V - block * BV, state_k, state_v), C)
        if LOADS_FIRST:
            if HOLDS or PARTS == 2:
                X = use_parts_here(X)
            XK, QQ = multiply_parts(X, packet, C)
            G, beta = sum_gates(sums, gates, count, C)
        else:
            XK, QQ = products
            G, beta = sums
        high, low = split_fp64(spread_over_rows(G))
        beta_rows = spread_over_rows(spoil_longer_row(beta, count, total))
        # W is computed once and stays in registers over all strips
        W, row_scales = solve_packet(XK, QQ, high, low, beta_rows, scale, C)
        decays = tl.exp(high)
        end_high, end_low = split_fp64(tl.sum(tl.where(now == BT - 1, G, 0.0), 0))
        at_end = decay(high, low, end_high, end_low)
        # distance from the slot that is read to the slot that is written
        there, is_written = tl.full([], 0, tl.int64), False
        if WRITE == "final":
            target = slot
            if write_index_ptr is not None:
                target = tl.load(write_index_ptr + n * write_n).to(tl.int64)
            is_written = (target >= lowest) & (target < slots) & (count > 0)
            there = (target - slot) * state_n * STATE_UNIT
        for strip in tl.range(0, late_count(STRIPS, count, WAITS), num_stages=STAGES):
            column, vs = (block * STRIPS + strip) * BV, tl.arange(0, BV)
            left = V - column
            tokens, is_k = tokens_of_rows(PARTS - 1, BT)
            strip_ptr = column_pointer(start_ptr, column, state_v * STATE_UNIT, AXIS == "v")
            state = Strip(strip_ptr, vs, left, state_k, state_v)
            if HOLDS:
                v, XS = held_v, multiply_held(X, held, C)
            else:
                v = load_values(values, column, count, C)
                XS = multiply_state(X, packet, state, C)
            # norms and decays scale MMA results in registers, instead of q and k
            XS = scale_rows(XS, row_scales, decays)
            outputs = compute_outputs(XS, v, beta_rows, W, BT, FP32_PRECISION)
            o = Strip(column_pointer(o_ptr, column, o_v, DENSE), vs, left, o_t, o_v)
            store_outputs(o, outputs, count, C)
            if WRITE == "final":
                u = tl.where(is_k[:, None], outputs[PARTS - 1] * at_end[:, None], 0.0)
                # in blocks of BU keys: S is still in L2, and all of it may not fit into registers
                # k that is converted to fp32 is loaded again, for the reason in `multiplies_as_loaded`
                IS_SPLIT: tl.constexpr = AXIS == "k" and q_ptr.dtype.element_ty == tl.bfloat16
                KEEPS: tl.constexpr = HOLDS and BU == BS and IS_SPLIT
                for start in tl.static_range(0, K, BU):
                    ks = start + tl.arange(0, BU)
                    place, in_state = output_strip_pointers(state, ks, C)
                    if KEEPS:
                        # the products of q's rows may be NaN, and must not reach the state
                        S, k = held, tl.where(is_k[:, None], X[PARTS - 1], 0.0)
                    else:
                        S = tl.load(place, mask=in_state, other=0.0)
                        k_at = row_pointers(k_ptr, tokens, ks, k_t, k_k, UNIT, DENSE, NEAR)
                        has_key = (is_k & (tokens < count))[:, None] & column_mask(ks, K)[None, :]
                        k = tl.load(k_at, mask=has_key, other=0.0)
                    S = S.to(tl.float32) * tl.exp(end_high)
                    S = add_outer_product(S, k, u, AXIS, PRECISION).to(state_ptr.dtype.element_ty)
                    tl.store(place + there, S, mask=in_state & is_written)


def levels(longest: int) -> int:
    """Return how many doublings invert I + A for a packet of so many tokens."""
    return (longest - 1).bit_length() if longest > 0 else 0


def precisions(is_wide: bool, machine: Machine) -> dict[str, str]:
    """Return the precision of large fp32 MMAs, and of those of the triangular system (`dot_precise`)."""
    fp32_precision = "ieee" if machine.kind == "hip" else "tf32x3" if is_wide else "bf16"
    return {"PRECISION": fp32_precision if is_wide else "tf32", "FP32_PRECISION": fp32_precision}


def blocks(
    K: int, V: int, width: int, longest: int, num_states: int, machine: Machine, state_width: int,
    is_written: bool,
) -> dict[str, int]:  # fmt: skip
    """Return the sizes of a program's tiles for `num_states` rows x heads, and its pipeline depth.

    A program takes all columns if there are rows and heads for every warp. It takes few columns if programs
    of many columns would leave SMs idle. On NVIDIA no bit depends on this: a column is summed by itself.
    """
    # waves over the SMs: few programs with all strips, or many with one strip
    takes_all, few = (
        num_states >= FILLED * machine.num_sms,
        triton.cdiv(V, FEW) * num_states <= 2 * machine.num_sms,
    )
    is_small = few or takes_all and (longest <= 8 or is_written or state_width > 2)
    BV = min(FEW if is_small else MANY, max(16, triton.next_power_of_2(V)))
    return {
        "BV": BV, "BS": min(HELD[width], max(16, triton.next_power_of_2(K))),
        "BT": 8 if longest <= 8 else MAX_TOKENS, "STRIPS": triton.cdiv(V, BV) if takes_all else 1,
        "STAGES": 2 if is_written or state_width > 2 or machine.kind == "hip" else 3,
    }  # fmt: skip


def num_programs(p: "AnyRows", sizes: Mapping[str, int]) -> int:
    """Return the programs of a launch: STRIPS strips of columns of each row and head, with a surplus row."""
    is_packed = p.cu_seqlens is not None
    return (p.N + int(is_packed)) * p.HV * triton.cdiv(p.V, sizes["BV"] * sizes["STRIPS"])


def warps(sizes: Mapping[str, int]) -> int:
    """Return the warps of a program: its MMAs of 16 rows occupy two only for one strip of many columns."""
    return 2 if sizes["BV"] == MANY and sizes["STRIPS"] == 1 and sizes["BT"] == 8 else 1


def options(
    sizes: Mapping[str, int], p: "AnyRows", is_written: bool, holds_state: bool = False
) -> dict[str, Any]:
    """Return the options of a launch: PDL, and a register limit if occupancy counts and nothing spills."""
    gpu = machine(p.q.device)
    is_small = sizes["BT"] == 8 and p.q.element_size() == 2 and not is_written
    # int16 takes the registers of its two halves
    limit = INT8_REGISTERS if p.state.dtype == torch.int8 else REGISTERS
    has_limit = p.state.dtype in (torch.bfloat16, torch.float16, torch.int8)
    is_limited = is_small and has_limit and sizes["STRIPS"] > 1
    # eight rows of 32 heads are then one wave over the SMs
    is_limited |= holds_state and warps(sizes) == 2
    if holds_state and isinstance(p, DecodeProblem) and not is_written and sizes["BT"] == MAX_TOKENS:
        is_limited, limit = sizes["BV"] == MANY, LONG_REGISTERS
    return pdl_options(gpu) | ({"maxnreg": limit} if is_limited and gpu.kind == "cuda" else {})


def order_loads(sizes: Mapping[str, int], p: DecodeProblem | ReplayProblem, axis: str) -> dict[str, Any]:
    """Return constants of the order of loads, and of the triangular system: only SUBSTITUTES changes bits.

    LOADS_FIRST: all loads that need no other are issued before the first MMA.
    HOLDS: a program of one strip loads its state and v then, and keeps them in registers.
    FETCHED: a program of several strips prefetches so many columns, the first two strips, into L2.
    SUBSTITUTES: `substitute` inverts the triangular system, and MMAs do not.
    SHUFFLES: the warps that do so with shuffles in PTX; 0 for the same in Triton, if PTX cannot be traced.
    """
    has_all_keys, is_single = sizes["BS"] >= p.K, sizes["STRIPS"] == 1
    is_first = machine(p.q.device).kind == "cuda" and has_all_keys and multiplies_as_loaded(p)
    # the scores of 16 tokens with a history need the registers of half a strip
    fits = sizes["BT"] == 8 or sizes["BV"] * sizes["BS"] <= FEW * HELD[2] or isinstance(p, DecodeProblem)
    # whole lines of 128 bytes, and strips that all columns of a program fill
    is_even = axis == "k" and p.K in (64, 128) and p.V % sizes["BV"] == 0
    fetched = 2 * sizes["BV"] if is_first and not is_single and is_even else 0
    return {
        "LOADS_FIRST": is_first, "HOLDS": is_first and is_single and fits, "FETCHED": fetched,
        "SUBSTITUTES": is_first, "SHUFFLES": warps(sizes) if is_first else 0,
    }  # fmt: skip


def multiplies_as_loaded(p: DecodeProblem | ReplayProblem) -> bool:
    """Return True if MMAs multiply tokens, state and history in the one 16-bit dtype that they have.

    Where an operand is converted to fp32, Triton chooses the order of an MMA's keys by the width of its load,
    which it does not see through `use_here`: sums, and so bits, would be others.
    """
    tensors = (p.q, p.state) if isinstance(p, DecodeProblem) else (p.q, p.state, p.history_u, p.history_k)
    return {x.dtype for x in tensors} in ({torch.bfloat16}, {torch.float16})


def fits_32_bits(*extents: int) -> bool:
    """Return True if offsets within tiles fit into 32 bits; an extent is a stride times its steps."""
    return all(abs(x) < 2**30 for x in extents)


def row_extents(rows: Sequence[int], tails: Sequence[int], p: "AnyRows") -> list[int]:
    """Return the extents of a packet's tiles along tokens and along keys or columns."""
    sizes = p.K, p.K, p.V, p.V
    return [MAX_TOKENS * s for s in rows[1::3]] + [size * s for size, s in zip(sizes, tails, strict=True)]


AnyRows = DecodeProblem | ReplayProblem | HistoryProblem
AnyProblem = AnyRows | KeepProblem | FoldProblem


def state_extents(strides: Sequence[int], unit: int, p: AnyProblem) -> list[int]:
    """Return the extents of a state's tiles; strides as `pool_strides` gives them."""
    return [strides[3] * unit * p.K, strides[4] * unit * p.V]


def line_stride(axis: str, strides: Sequence[int], unit: int, p: AnyProblem) -> int:
    """Return the stride of a state's other axis if the state is contiguous in memory, else 0."""
    line, size = {"k": (strides[4], p.K), "v": (strides[3], p.V)}.get(axis, (0, 1))
    return size if line * unit == size else 0


def sample_num_states(machine: Machine) -> tuple[int, ...]:
    """Return rows times heads that leave the GPU almost empty, that nearly fill it, and that do fill it."""
    return 1, FILLED * machine.num_sms - 1, 2 * RESIDENT * machine.num_sms


def token_strides(x: Tensor | None, is_packed: bool) -> tuple[int, int, int]:
    """Return the strides of row, token and head; packed rows share one token axis."""
    return (0, 0, 0) if x is None else (0 if is_packed else x.stride(0), x.stride(1), x.stride(2))


def index_strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    """Return the first strides of an index tensor, padded with zeros."""
    strides = () if x is None else x.stride()[:count]
    return (*strides, *(0,) * (count - len(strides)))


def supports_packet(p: DecodeProblem) -> bool:
    """Return True if this form supports the decode, the caller allows its rounding, and it is faster.

    Where an fp32 state is written, `decode` of 4 tokens takes 0.53 to 0.97 of the time (H200), and errs less.
    """
    if p.exact_packet or p.write == "all" or p.intermediate is not None:
        return False
    # token by token is exact, too: `decode` runs the gates and pools that this form lacks
    if p.is_per_channel or p.lower_bound is not None or p.column_scale is not None:
        return False
    longest = max_row_tokens(p)
    least = EXACT_TOKENS if p.write == "final" and p.state.dtype == torch.float32 else 1
    return longest is not None and least < longest <= MAX_TOKENS


def plan(p: DecodeProblem, starts: Sequence[int], num_states: int | None = None) -> Launch:
    """Return the launch; arguments as for `decode.plan_launch`."""
    axis, state_unit, state = pool_strides(p.state, p.K, p.V, p.state_v_first)
    is_packed, gpu = p.cu_seqlens is not None, machine(p.q.device)
    rows = [s for x in (p.q, p.k, p.v, p.out) for s in token_strides(x, is_packed)]
    gates = [
        token_strides(x, is_packed) for x in (p.g if p.a is None else p.a, p.beta if p.b is None else p.b)
    ]
    num_states, longest = p.N * p.HV if num_states is None else num_states, max_row_tokens(p) or MAX_TOKENS
    is_written = p.write != "none"
    sizes = blocks(p.K, p.V, p.q.element_size(), longest, num_states, gpu, p.state.element_size(), is_written)
    # the unit of strides decides the width of loads from HBM
    unit = unit_of(*rows, *starts)
    tails = (p.q.stride(3), p.k.stride(3), p.v.stride(3), p.out.stride(3))
    scalars = (
        *(s // unit for s in (*rows, *starts)), *tails, *(s for x in gates for s in x),
        *index_strides(p.A_log, 1), *index_strides(p.dt_bias, 1), *state, *index_strides(p.read_index, 2),
        *index_strides(p.num_accepted, 1), *index_strides(p.ring_pos, 1), *index_strides(p.write_index, 1),
        p.N, p.q.shape[1], p.HV, *magic_numbers(p.HV), *magic_numbers(p.HV // p.H), p.state.shape[0],
        0 if p.null_slot is None else 1,
        p.read_index.shape[1] if p.num_accepted is not None and p.read_index is not None else 1,
        p.state.shape[1] if p.ring_pos is not None else 1, p.scale,
    )  # fmt: skip
    loads = order_loads(sizes, p, axis)
    # few tokens of few columns leave the registers to update all keys of a state that is held
    is_held = loads["HOLDS"] and (sizes["BT"], sizes["BV"], axis, p.q.dtype) == (8, FEW, "k", torch.bfloat16)
    updated = sizes["BS"] if is_held else UPDATED
    constants = {
        "K": p.K, "V": p.V, "BU": min(updated, sizes["BS"]), **sizes, "AXIS": axis,
        "DENSE": tails == (1, 1, 1, 1),
        "NEAR": fits_32_bits(*row_extents(rows, tails, p), *state_extents(state, state_unit, p)),
        "LINE": line_stride(axis, state, state_unit, p), "UNIT": unit, "STATE_UNIT": state_unit,
        "WRITE": p.write, "NORM": p.use_qk_l2norm_in_kernel, "NEGATIVE": p.allow_neg_eigval,
        "LEVELS": levels(longest), **precisions(p.q.dtype == torch.float32, gpu), "RESET": RESET,
        # 5.23 us for 5.63 at B = 8 (4 tokens, bf16, H200); with few columns, at B = 1, 4.69 for 3.86
        "PDL": supports_pdl(gpu), **loads, "WAITS": loads["HOLDS"] and not is_written and sizes["BV"] == MANY,
    }  # fmt: skip
    rest, programs = options(sizes, p, is_written, loads["HOLDS"]), num_programs(p, sizes)
    return Launch(packet_kernel, programs, scalars, constants, warps(sizes), options=rest)
