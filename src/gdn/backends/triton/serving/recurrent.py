"""Run the token recurrence: one program keeps some columns of one state in registers through a sequence.

    kS, qS = [k; q] S;   d = beta (v - e^g kS);   o = scale (e^g qS + <q, k> d);   S <- e^g S + k d^T

`recurrent_lib` says how a program's tile of a state lies in registers.
"""

from collections.abc import Hashable

import torch
import triton.language as tl
from torch import Tensor

from gdn.backends.triton.launch import Launch, PlanCache, device_guard, kernel, machine, unit_of
from gdn.backends.triton.serving.gates import gate_layout
from gdn.backends.triton.serving.recurrent_lib import (
    advance_token,
    decay_pointers,
    divide,
    key_offsets,
    load_gate_parameters,
    load_token,
    locate_program,
    tile_indices,
    tile_pointers,
    token_range,
)
from gdn.backends.triton.serving.state_tiles import kernel_offsets, magic_numbers, pick_tile, pool_strides
from gdn.backends.triton.serving.structs import (
    GateParameters,
    Gates,
    GateStrides,
    Token,
    Tokens,
    group_constants,
)
from gdn.problem import Problem


@kernel
def recurrent_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, initial_ptr, cu_seqlens_ptr, o_ptr,
    final_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, o_b, o_t, o_h,
    q_k, k_k, v_v, A_log_h, dt_bias_h, initial_n, initial_h, initial_k, initial_v, N, T,
    HV, HV_magic, HV_s, ratio_magic, ratio_s, scale, g_k, dt_bias_k, lower_bound,
    K: tl.constexpr, V: tl.constexpr, A: tl.constexpr, J: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    R_FIRST: tl.constexpr, AXIS: tl.constexpr, INITIAL_AXIS: tl.constexpr, DENSE: tl.constexpr,
    UNIT: tl.constexpr, INITIAL_UNIT: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr,
    NEGATIVE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # S <- e^g S + k d^T and o, token after token of a row; Diag(e^g) S with CHANNELS, the unit of the strides
    # of a decay per key channel.
    # Program (row, head, block of V): A * B columns of S in fp32 registers, through all tokens of the row.
    # Grid: (N, + 1 if packed) * HV * BLOCKS, blocks fastest; 1 warp; no PDL.
    # Reads S once, and q, k, v and gates per token; writes o per token and S at the end. Row N of a packed
    # batch zeros the outputs of tokens past the last sequence.
    C: tl.constexpr = group_constants(
        NORM=NORM, DECAY=g_ptr is not None, SIGMOID=SIGMOID, NEGATIVE=NEGATIVE, CHANNELS=CHANNELS,
        GATE=(A_log_ptr is not None) or (lower_bound is not None),
    )  # fmt: skip
    BLOCKS: tl.constexpr = (V + A * B - 1) // (A * B)
    row, head, block = locate_program(HV, HV_magic, HV_s, BLOCKS)
    first, count = token_range(cu_seqlens_ptr, row, N, T)
    keys, values = tile_indices(block, A, J, B, W, AXIS, R_FIRST)
    has_key, has_value = keys < K, values < V
    in_state = has_key & has_value[:, None, :, None]
    o_ptr += row * o_b + first * o_t + head * o_h + values
    if row == N:
        for _ in range(count):  # tokens past the last sequence have output zero
            tl.store(o_ptr, tl.zeros([A, B], o_ptr.dtype.element_ty), mask=has_value)
            o_ptr += o_t
        return
    key_head = divide(head, ratio_magic, ratio_s)
    q_ptr += (row * q_b + first * q_t + key_head * q_h) * UNIT
    k_ptr += (row * k_b + first * k_t + key_head * k_h) * UNIT
    q_ptr += key_offsets(keys, q_k, A, B, AXIS, R_FIRST, DENSE)
    k_ptr += key_offsets(keys, k_k, A, B, AXIS, R_FIRST, DENSE)
    v_ptr += row * v_b + first * v_t + head * v_h + values * v_v
    gates = Gates(g_ptr, beta_ptr, None, None, A_log_ptr, dt_bias_ptr)
    strides = GateStrides(g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h)
    if g_ptr is not None:
        along = key_offsets(keys, g_k, A, B, AXIS, R_FIRST, DENSE) if CHANNELS else 0
        g_ptr = decay_pointers(g_ptr, row * g_b + first * g_t + head * g_h, along, CHANNELS)
    if beta_ptr is not None:
        beta_ptr += row * beta_b + first * beta_t + head * beta_h
    at = tl.full([], 0, tl.int64)  # token index; 64 bits because strides may be large
    tokens = Tokens(q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, q_t, k_t, v_t, g_t, beta_t, None)
    q, k, v, g, beta = load_token(tokens, at, count, has_key, has_value, UNIT, CHANNELS)
    S = tl.zeros([A, J, B, W], tl.float32)  # fp32 registers for the whole sequence
    if initial_ptr is not None:
        initial_ptr += (row * initial_n + head * initial_h) * INITIAL_UNIT
        start = tile_pointers(initial_ptr, keys, values, initial_k, initial_v, INITIAL_UNIT, INITIAL_AXIS)
        S = tl.load(start, mask=in_state, other=0.0).to(tl.float32)
    along = key_offsets(keys, dt_bias_k, A, B, AXIS, R_FIRST, DENSE) if CHANNELS else 0
    rate, bias = load_gate_parameters(gates, strides, head, along, has_key, lower_bound, CHANNELS)
    gate = GateParameters(rate, bias, lower_bound)
    for _ in range(count):
        # load the next token from HBM while this one is computed in registers
        q_next, k_next, v_next, g_next, beta_next = load_token(
            tokens, at + 1, count, has_key, has_value, UNIT, CHANNELS
        )
        S, o = advance_token(S, Token(q, k, v, g, beta), gate, scale, C)
        tl.store(o_ptr + at * o_t, o.to(o_ptr.dtype.element_ty), mask=has_value)
        at += 1
        q, k, v, g, beta = q_next, k_next, v_next, g_next, beta_next
    if final_ptr is not None:
        final_ptr += (row * HV + head) * (K * V)  # the only store of S to HBM
        tl.store(tile_pointers(final_ptr, keys, values, V, K, 1, AXIS), S, mask=in_state)


_plans: PlanCache[Launch] = PlanCache()


def recurrent_forward(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """See `Backend`. 6 K V flop per token and value head; HBM reads and writes the state once."""
    p = problem
    with device_guard(p.device):
        launch = _plans.get(_key(p), lambda: _plan(p))
        o = p.v.new_empty(p.v.shape)
        final = p.q.new_empty(p.state_shape, dtype=torch.float32) if p.output_final_state else None
        offsets = kernel_offsets(p.device, p.cu_seqlens)
        launch(p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, p.initial_state, offsets, o, final)
    return o, final


def _key(p: Problem) -> Hashable:
    """Return everything that the launch depends on, except the addresses of tensors."""
    tensors = (p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, p.initial_state, p.cu_seqlens)
    return (
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors), p.device, p.scale,
        p.lower_bound, p.output_final_state, p.use_qk_l2norm_in_kernel, p.use_beta_sigmoid_in_kernel,
        p.allow_neg_eigval, p.state_v_first,
    )  # fmt: skip


def _plan(p: Problem) -> Launch:
    axis, is_packed = "k" if p.state_v_first else "v", p.cu_seqlens is not None
    part = pick_tile(p.K, p.V, axis, 4, 4, machine(p.device))
    start: tuple[str, int, tuple[int, ...]] = ("", 1, (0,) * 5)
    if p.initial_state is not None:
        start = pool_strides(p.initial_state, p.K, p.V, p.state_v_first)
    # loads of q and k as wide as those of the state give each lane the same keys: no shuffles
    unit = min(4, unit_of(*p.q.stride()[:3], *p.k.stride()[:3]))
    o = (p.T * p.HV * p.V, p.HV * p.V, p.V)
    strides = [tuple(s // unit for s in x.stride()[:3]) for x in (p.q, p.k)]
    gates = gate_layout(p, p.g, p.beta, 4)
    strides += [p.v.stride()[:3], gates.g, gates.beta]
    scalars = [s for x in (*strides, o) for s in ((0, *x[1:]) if is_packed else x)]
    scalars += [x.stride(3) for x in (p.q, p.k, p.v)]
    scalars += [gates.A_log, gates.dt_bias, start[2][0], *start[2][2:]]
    return Launch(
        recurrent_kernel,
        (p.N + int(is_packed)) * p.HV * part.blocks(p.V),
        (*scalars, p.N, p.T, p.HV, *magic_numbers(p.HV), *magic_numbers(p.HV // p.H), p.scale, *gates.rest),
        {
            "K": p.K, "V": p.V, **part.constants(), "AXIS": axis, "INITIAL_AXIS": start[0],
            "DENSE": p.q.stride(3) == p.k.stride(3) == 1 and gates.is_dense, "UNIT": unit,
            "INITIAL_UNIT": start[1], "NORM": p.use_qk_l2norm_in_kernel,
            "SIGMOID": p.use_beta_sigmoid_in_kernel, "NEGATIVE": p.allow_neg_eigval,
            "CHANNELS": gates.channels,
        },
        part.num_warps,
    )  # fmt: skip
