"""Launch the kernel that decodes one token with a history: see the folder's docstring.

HBM bytes per row and value head at K = V = 128, HV = 2 H, with P places in use: the state (64 KiB in fp32),
128 P of k, 256 P of u, 8 P of G, 1 KiB of the token; a fold, once in places - room tokens, writes the state.
"""

from collections.abc import Sequence

import torch
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.gluon import gdc_launch_dependents, gdc_wait, kernel, mbarrier
from gdn.backends.hopper.serving.copies import run_copies
from gdn.backends.hopper.serving.items import (
    COPIERS,
    FIELDS,
    PLACES,
    PLAIN,
    RING,
    ROWS,
    SCORERS,
    STAGES,
    SWIZZLED,
    UNIT,
    Config,
    D,
    Heads,
    Past,
    Shared,
    Sizes,
    Tensors,
)
from gdn.backends.hopper.serving.outputs import run_outputs
from gdn.backends.hopper.serving.scores import run_scores
from gdn.backends.triton.launch import Launch, machine
from gdn.backends.triton.launch.pdl import PDL
from gdn.backends.triton.serving import history as portable
from gdn.backends.triton.serving.packet import FILLED
from gdn.problem import HistoryProblem

# bytes of a state's element -> CTAs an SM, as many as fit its shared memory; registers of a lane, and those
# of the warps that compute no outputs, which leave the others the rest of twice as many
CTAS = {2: 2, 4: 1}
REGISTERS = {2: 128, 4: 168}
OTHERS = {2: 112, 4: 128}


@kernel
def decode_with_history_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, u_history_ptr, k_history_ptr, G_history_ptr, cursor_ptr, g_ptr, beta_ptr,
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, column_scale_ptr, remainder_ptr, cu_seqlens_ptr, read_index_ptr,
    num_accepted_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, q_k, k_k, v_v, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, state_n, state_h, state_k, state_v,
    u_n, u_p, u_h, past_n, past_p, past_h, G_n, G_p, G_h, cursor_n, read_n,
    N, T, HV, HV_magic, HV_s, ratio, ratio_magic, ratio_s, slots, lowest, places, scale,
    accepted_n, room, q_0, k_0, v_0, scale_n, scale_h, scale_v, low_n, low_h, low_k, low_v,
    SIZE: gl.constexpr, NORM: gl.constexpr, NEGATIVE: gl.constexpr, RESET: gl.constexpr,
    OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    # One CTA: items (row, value head) b, b + grid, ...  Grid: min(items, CTAS of each SM), persistent.
    # Parameters are those of `triton.serving.history.history_kernel`; column_scale, remainder, cu_seqlens and
    # num_accepted are None.
    # Warps: 4 of the outputs, 2 of the scores, 2 that copy.
    # Shared memory: STAGES states, RING tokens and histories: 103 KiB (167 KiB in fp32).
    # mbarriers: arrived[r], full[s] 64 arrivals, of the lanes that copy; ready[s], empty[s] 1.
    # PDL: let the next kernel start at once, and wait for the previous one before the first load.
    # Reads S, the history, the tokens; writes o, u, k and G of the tokens, the cursor, and a folded S.
    gdc_launch_dependents()
    gdc_wait()
    gates_ptr = g_ptr if a_ptr is None else a_ptr
    betas_ptr = beta_ptr if a_ptr is None else b_ptr
    tensors = Tensors(
        q=Heads(q_ptr + q_0 * UNIT, q_b, q_h), k=Heads(k_ptr + k_0 * UNIT, k_b, k_h),
        v=Heads(v_ptr + v_0 * UNIT, v_b, v_h), o=Heads(o_ptr, o_b, o_h),
        g=Heads(gates_ptr, g_b, g_h), beta=Heads(betas_ptr, beta_b, beta_h),
        A_log_ptr=A_log_ptr, A_log_head=A_log_h, dt_bias_ptr=dt_bias_ptr, dt_bias_head=dt_bias_h,
        state=Heads(state_ptr, state_n, state_h), u=Past(u_history_ptr, u_n, u_p, u_h),
        past_k=Past(k_history_ptr, past_n, past_p, past_h), G=Past(G_history_ptr, G_n, G_p, G_h),
        cursor_ptr=cursor_ptr, cursor_slot=cursor_n, index_ptr=read_index_ptr, index_row=read_n,
    )  # fmt: skip
    sizes = Sizes(N * HV, HV, HV_magic, HV_s, ratio, ratio_magic, ratio_s, slots, lowest, places, room, scale)
    config = Config(SIZE=SIZE, NORM=NORM, NEGATIVE=NEGATIVE, RESET=RESET)
    state_layout: gl.constexpr = gl.SwizzledSharedLayout(16 // SIZE, 1, 8, [1, 0])
    tile: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        S=gl.allocate_shared_memory(state_ptr.dtype.element_ty, [STAGES, D, D], state_layout),
        x=gl.allocate_shared_memory(gl.bfloat16, [RING, ROWS, D], SWIZZLED),
        k=gl.allocate_shared_memory(gl.bfloat16, [RING, PLACES, D], SWIZZLED),
        u=gl.allocate_shared_memory(gl.bfloat16, [RING, PLACES, D], SWIZZLED),
        v=gl.allocate_shared_memory(gl.bfloat16, [RING, D], PLAIN),
        gram=gl.allocate_shared_memory(gl.float32, [SCORERS, ROWS, ROWS], tile),
        scores=gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, PLACES], SWIZZLED),
        still=gl.allocate_shared_memory(gl.float32, [STAGES, PLACES], PLAIN),
        ints=gl.allocate_shared_memory(gl.int32, [STAGES * FIELDS, 1], PLAIN),
        floats=gl.allocate_shared_memory(gl.float32, [STAGES * FIELDS, 1], PLAIN),
        arrived=gl.allocate_shared_memory(gl.int64, [RING, 1], barrier_layout),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout),
        ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout),
    )  # fmt: skip
    for i in gl.static_range(RING):
        mbarrier.init(shared.arrived.index(i), count=32 * COPIERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(i), count=32 * COPIERS)
        mbarrier.init(shared.ready.index(i), count=1)
        mbarrier.init(shared.empty.index(i), count=1)
    gl.warp_specialize([
        (run_outputs, (tensors, sizes, shared, config)),
        (run_scores, (0, tensors, sizes, shared, config)), (run_scores, (1, tensors, sizes, shared, config)),
        (run_copies, (tensors, sizes, shared, config)),
    ], [1, 1, COPIERS], [OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS])  # fmt: skip


def lacks(p: HistoryProblem) -> str | None:
    """Return why the kernel does not support a problem, or None."""
    tokens = (p.q, p.k, p.v, p.out, p.history_u, p.history_k)
    if p.cu_seqlens is not None or p.q.shape[1] != 1 or p.num_accepted is not None:
        return "expected one token a row and no drafts"
    if p.K != D or p.V != D or p.is_per_channel:
        return f"expected K = V = {D.value} and a decay per head"
    if any(x.dtype != torch.bfloat16 for x in tokens):
        return "expected tokens and histories in bf16"
    if p.state.dtype not in (torch.bfloat16, torch.float32):
        return f"expected states in bf16 or fp32, got {p.state.dtype}"
    if p.places > PLACES:
        return f"expected histories of at most {PLACES.value} places, got {p.places}"
    return None


def plan_append(
    p: HistoryProblem, starts: Sequence[int] = (0, 0, 0), num_states: int | None = None
) -> Launch:
    """Plan the launch that appends to the histories; arguments as for `decode.plan_launch`.

    It is `triton`'s, with the same bits, where the kernel does not support the layout, or where rows and
    heads are too few to fill the SMs.
    """
    other = portable.plan_append(p, starts, num_states)
    gpu, states = machine(p.q.device), p.N * p.HV if num_states is None else num_states
    has_layout = all(
        other.constants[name] == value
        for name, value in {"AXIS": "k", "LINE": D.value, "DENSE": True, "NEAR": True}.items()
    )
    # the kernel's offsets of heads have 32 bits
    has_layout = has_layout and p.HV * p.state.stride(1) < 2**31 * UNIT.value
    units = {other.constants[name] for name in ("UNIT", "STATE_UNIT", "PAST_UNIT")}
    if lacks(p) or not has_layout or units != {UNIT.value} or states < FILLED * gpu.num_sms:
        return other
    size = p.state.element_size()
    constants = {name: other.constants[name] for name in ("NORM", "NEGATIVE", "RESET")}
    return Launch(
        decode_with_history_kernel, min(p.N * p.HV, CTAS[size] * gpu.num_sms), other.scalars,
        {"SIZE": size, **constants, "OTHER_REGISTERS": OTHERS[size]}, 4,
        options={**PDL, "maxnreg": REGISTERS[size]}, unaligned=other,
    )  # fmt: skip
