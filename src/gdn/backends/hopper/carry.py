"""Run a consumer warpgroup of the state scan: 64 value rows of S^T, every chunk of every work item.

S^T stays in registers from the first chunk of a work item to the last. The loops call functions, since
Triton traces the body of a loop twice and that of a nested loop four times, but a function once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.chunk import (
    JOB,
    OF_STATE,
    OF_TOKENS,
    STRIP,
    C,
    advance,
    glide,
    glide_alone,
    is_of_map,
    is_tame,
    job_at,
    parted,
    sequence,
    turn_of,
)
from gdn.backends.hopper.gluon import gdc_wait, mbarrier, tma_store_wait


@gluon.jit
def carry(
    MINE: gl.constexpr, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full, ring,
    o_ptr, initial_ptr, final_ptr, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs,
    V_FIRST: gl.constexpr, GLIDES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Run consumer warpgroup MINE: advance its 64 value rows of S^T through all work items, and store o.

    For `ends_kernel` o_d is None: chunks are whole and no outputs are stored. S then starts from the identity
    for M (from zero if the segment is empty), from zero for N, or from the caller's state where the work item
    names one. With S_d the states that enter the chunks are stored by TMA, keys down: in bf16 for a backward,
    in fp32 for checkpoints.
    """
    i = 0
    turn = 0
    taken = job_at(turn, ring)
    while taken < jobs:
        i = over_job(
            taken, i, MINE, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full,
            o_ptr, initial_ptr, final_ptr, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound,
            V_FIRST, GLIDES, CHAINS, D,
        )  # fmt: skip
        turn += 1
        taken = job_at(turn, ring)
    if o_d is not None:
        # shared memory must outlive the last TMA store that reads it
        tma_store_wait(0)


@gluon.jit
def over_job(
    taken, i, MINE: gl.constexpr, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full,
    o_ptr, initial_ptr, final_ptr, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound,
    V_FIRST: gl.constexpr, GLIDES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Scan one work item whose first chunk is chunk i of the CTA; return the chunk count after its last."""
    # a table without cu_seqlens holds the work items of segments: see `split`
    IN_SPANS: gl.constexpr = table_ptr is not None and cu_seqlens_ptr is None
    job, strip = parted(taken, MINE, CHAINS, D)
    head = job % HV
    first_v = strip * STRIP
    row, first, length, chunk = sequence(job, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound)
    S = first_state(job, length, head, first_v, o_d, initial_ptr, table_ptr, HV, IN_SPANS, V_FIRST, D)
    end = i + gl.cdiv(length, C)
    # chunk numbers count over all work items of the CTA: first token and tile that chunk 0 would have
    token = row * T + first - i * C
    tile = (chunk - i) * HV + head
    S, i = over_chunks(
        S, i, end, i * C + length, token, tile, head, first_v, MINE, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s,
        S_s, full, empty, P_full, o_ptr, HV, GLIDES, CHAINS, D,
    )  # fmt: skip
    if final_ptr is not None:
        last_state(S, job, head, first_v, o_d, final_ptr, table_ptr, HV, IN_SPANS, V_FIRST, D)
    return i


@gluon.jit
def over_chunks(
    S, i, end, past, token, tile, head, first_v, MINE: gl.constexpr, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s,
    S_s, full, empty, P_full, o_ptr, HV, GLIDES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Advance S through all chunks of a work item; return S and the chunk count after its last.

    `past` is the end of the item's tokens, counted from the CTA's chunk 0.
    """
    # Each run of well-conditioned chunks and of others has its own loop: with both kinds in one loop ptxas
    # runs out of registers and serialises all MMAs.
    if GLIDES:
        while i < end:
            S, i = over_tame(
                S, i, end, token, tile, head, first_v, MINE, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s,
                full, empty, P_full, HV, CHAINS, D,
            )  # fmt: skip
            S, i = over_others(
                S, i, end, past, token, tile, head, first_v, MINE, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s,
                S_s, full, empty, P_full, o_ptr, HV, GLIDES, CHAINS, D,
            )  # fmt: skip
    else:
        S, i = over_others(
            S, i, end, past, token, tile, head, first_v, MINE, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s,
            S_s, full, empty, P_full, o_ptr, HV, GLIDES, CHAINS, D,
        )  # fmt: skip
    return S, i


@gluon.jit
def over_tame(
    S, i, end, token, tile, head, first_v, MINE: gl.constexpr, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s,
    full, empty, P_full, HV, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Advance S through chunks on the fast path until one is not well-conditioned, or the work item ends."""
    while is_next(True, True, i, end, f_s, full):
        # a lone consumer has more registers (248, not 200), and a version of the fast path that uses them
        if CHAINS == 1:
            S = glide_alone(
                S, i, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, empty, P_full,
                token + i * C, tile + i * HV, head, first_v, D,
            )  # fmt: skip
        else:
            S = glide(
                S, i, MINE, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, empty, P_full,
                token + i * C, tile + i * HV, head, D,
            )  # fmt: skip
        i += 1
    return S, i


@gluon.jit
def over_others(
    S, i, end, past, token, tile, head, first_v, MINE: gl.constexpr, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s,
    S_s, full, empty, P_full, o_ptr, HV, GLIDES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Advance S through chunks on the general path until one is well-conditioned, or the work item ends."""
    while is_next(False, GLIDES, i, end, f_s, full):
        S = advance(
            S, i, past - i * C, MINE, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, empty, P_full,
            o_ptr, token + i * C, tile + i * HV, head, first_v, HV, CHAINS, D,
        )  # fmt: skip
        i += 1
    return S, i


@gluon.jit
def is_next(WANTED: gl.constexpr, GLIDES: gl.constexpr, i, end, f_s, full):
    """Return True if chunk i belongs to the work item and, with the fast path on, its `TAME` is as WANTED."""
    found = i < end
    if found:
        stage, parity = turn_of(i, full)
        # from here on the stage's tiles and factors, `TAME` among them, are in shared memory
        mbarrier.wait(full.index(stage), parity)
        if GLIDES:
            found = is_tame(f_s, stage) == WANTED
    return found


@gluon.jit
def of_state_at(states_ptr, state, first_v, IS_V_FIRST: gl.constexpr, D: gl.constexpr):
    """Return the addresses in HBM of 64 value rows of a state, as a tensor [64, D] with values down."""
    # the layout of the WGMMA accumulator: S moves between HBM and registers without shared memory
    layout: gl.constexpr = OF_TOKENS if D == C else OF_STATE
    v = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    k = gl.arange(0, D, gl.SliceLayout(0, layout))
    VALUE: gl.constexpr = D if IS_V_FIRST else 1
    KEY: gl.constexpr = 1 if IS_V_FIRST else D
    states_ptr += state * (D * D) + first_v * VALUE
    return states_ptr + v[:, None] * VALUE + k[None, :] * KEY


@gluon.jit
def first_state(
    job, length, head, first_v, o_d, initial_ptr, table_ptr, HV,
    IN_SPANS: gl.constexpr, V_FIRST: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Return S^T before the first chunk of a work item: zero, the identity, or loaded from HBM."""
    layout: gl.constexpr = OF_TOKENS if D == C else OF_STATE
    if o_d is None:
        v = first_v + gl.arange(0, STRIP, gl.SliceLayout(1, layout))
        k = gl.arange(0, D, gl.SliceLayout(0, layout))
        is_map = is_of_map(job, table_ptr) & (length > 0)
        S = (v[:, None] == k[None, :]).to(gl.float32) * is_map.to(gl.float32)
        if initial_ptr is not None:
            # the state that the item names; below 0: none
            start = gl.load(table_ptr + job * JOB + 5)
            if start >= 0:
                state = start.to(gl.int64) * HV + head
                S = gl.load(of_state_at(initial_ptr, state, first_v, V_FIRST, D)).to(gl.float32)
    elif initial_ptr is None:
        S = gl.zeros((STRIP, D), gl.float32, layout)
    else:
        state = job.to(gl.int64)
        if IN_SPANS:
            # `combine_kernel`, the launch before, writes the state that enters a segment to HBM
            gdc_wait()
            state = gl.load(table_ptr + job * JOB + 5).to(gl.int64) * HV + head
        S = gl.load(of_state_at(initial_ptr, state, first_v, V_FIRST, D)).to(gl.float32)
    return S


@gluon.jit
def last_state(
    S, job, head, first_v, o_d, final_ptr, table_ptr, HV,
    IN_SPANS: gl.constexpr, V_FIRST: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Store S^T after the last chunk of a work item to HBM; M and N are stored keys down."""
    if IN_SPANS:
        # below 0: not stored. Of the scan's segments only a sequence's last one has a final state
        goal = gl.load(table_ptr + job * JOB + 4).to(gl.int64)
        if goal >= 0:
            state = goal * HV + head
            gl.store(of_state_at(final_ptr, state, first_v, V_FIRST and o_d is not None, D), S)
    else:
        gl.store(of_state_at(final_ptr, job.to(gl.int64), first_v, V_FIRST, D), S)
