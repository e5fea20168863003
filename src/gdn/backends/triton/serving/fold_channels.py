# mypy: disable-error-code="assignment, var-annotated"
"""Read histories of a decay per key channel, which hold g itself, and fold them into states.

    S <- Diag(e^(g_0 + .. + g_(P-1))) S + sum_(j < P) (e^(g_(j+1) + .. + g_(P-1)) k_j) u_j^T

The sums go from the newest place backwards, 16 places at a time. They have terms of one sign, so a reset of a
channel leaves the digits of all later tokens, and the exponents are never positive.
"""

from typing import Any

import triton
import triton.language as tl

from gdn.backends.triton.launch import Launch, Machine, jit, kernel
from gdn.backends.triton.lib import column_mask
from gdn.backends.triton.rule.channels import double_pieces
from gdn.backends.triton.serving.history_lib import history_length, load_history_u
from gdn.backends.triton.serving.packet import precisions
from gdn.backends.triton.serving.packet_lib import (
    add_outer_product,
    column_pointer,
    output_strip_pointers,
    row_pointers,
    strip_mask,
)
from gdn.backends.triton.serving.recurrent_lib import divide, locate_program
from gdn.backends.triton.serving.structs import History, Strip, group_constants

KEYS, COLUMNS = 64, 64  # of a state that a program of the fold has in registers
# maxnreg on an H100: three CTAs an SM, not two, hide more of the latency of loads than spills cost.
# 64 rows of 32 heads, 33 places, us: without a limit 319, 160 registers 256, 128 registers 307
REGISTERS = 160


@jit
def load_past_rows(history, G_k, start, ks, later, C: tl.constexpr):
    """Load BP places of a history: return k, decayed up to its end, in fp32 [BP, ks], and the sums of g.

    later [ks]: the sums of g over the places after these. The sums that are returned begin at `start`.
    """
    old = start + tl.arange(0, C.BP)
    mask = (old < history.count)[:, None] & column_mask(ks, C.K)[None, :]
    k_at = row_pointers(history.k_ptr, old, ks, history.k_p, 1, C.PAST_UNIT, True, C.NEAR)
    k = tl.load(k_at, mask=mask, other=0.0).to(tl.float32)
    g_at = history.G_ptr + (old.to(tl.int64) * history.G_p)[:, None] + (ks * G_k)[None, :]
    g = tl.load(g_at, mask=mask, other=0.0).to(tl.float32)
    before = tl.reshape(g, (1, C.BP, ks.shape[0]))
    after = tl.zeros_like(before)
    # sums over 2, 4, 8, 16 places, in registers
    for level in range(4):
        before, after = double_pieces(before, after, level)
    after = tl.reshape(after, (C.BP, ks.shape[0])) + later[None, :]
    return k * tl.exp(after), later + tl.sum(g, 0)


@kernel
def fold_channels_kernel(
    state_ptr, u_ptr, k_ptr, g_ptr, cursor_ptr, index_ptr, accepted_ptr,
    state_l, state_n, state_h, state_k, state_v, u_l, u_n, u_p, u_h, k_l, k_n, k_p, k_h,
    g_l, g_n, g_p, g_h, g_k, cursor_n, index_n, accepted_n, layers, HV, HV_magic, HV_s, ratio_magic, ratio_s,
    slots, lowest, places, room,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr,
    AXIS: tl.constexpr, NEAR: tl.constexpr, LINE: tl.constexpr, STATE_UNIT: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # S <- Diag(e^G) S + k_out^T u for one block of keys and columns of one state; formula at the top.
    # Program (entry, layer, head, block of K and V): a tile [BK, BV] of S in fp32 registers. Grid: entries *
    # layers * HV * blocks; 4 warps; no PDL.
    # Reads S once and P rows of k, g and u; writes S once. It does nothing if the history has space for
    # another packet.
    C: tl.constexpr = group_constants(
        K=K, V=V, BP=BP, STRIPS=1, AXIS=AXIS, NEAR=NEAR, LINE=LINE, STATE_UNIT=STATE_UNIT, PAST_UNIT=UNIT
    )
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    layer_and_entry, head, block = locate_program(HV, HV_magic, HV_s, BLOCKS * ((K + BK - 1) // BK))
    entry, layer = layer_and_entry // layers, layer_and_entry % layers
    slot = tl.load(index_ptr + entry * index_n).to(tl.int64)
    if (slot < lowest) | (slot >= slots):
        return
    end = history_length(
        tl.load(cursor_ptr + slot * cursor_n), tl.load(accepted_ptr + entry * accepted_n), room, places
    ).to(tl.int32)
    if (end == 0) | (end + room <= places):
        return
    key_head = divide(head, ratio_magic, ratio_s)
    ks, vs = block // BLOCKS * BK + tl.arange(0, BK), tl.arange(0, BV)
    column = block % BLOCKS * BV
    left = V - column
    state_ptr += (layer * state_l + slot * state_n + head.to(tl.int64) * state_h) * STATE_UNIT
    strip_ptr = column_pointer(state_ptr, column, state_v * STATE_UNIT, AXIS == "v")
    place, in_state = output_strip_pointers(Strip(strip_ptr, vs, left, state_k, state_v), ks, C)
    # issued first: the latency of the state in HBM overlaps the sums over the history
    S_old = tl.load(place, mask=in_state, other=0.0)
    u_ptr += (layer * u_l + slot * u_n + head * u_h) * UNIT + column
    k_ptr += (layer * k_l + slot * k_n + key_head * k_h) * UNIT
    g_ptr += layer * g_l + slot * g_n + head * g_h
    history = History(u_ptr, k_ptr, g_ptr, end, u_p, k_p, g_p, None, None)
    has_value = strip_mask(vs, left, V, 1)[None, :]
    sums = tl.zeros([BK], tl.float32)
    added = tl.zeros(place.shape, tl.float32)
    start = (end - 1) // BP * BP
    for _ in range((end + BP - 1) // BP):
        k_out, sums = load_past_rows(history, g_k, start, ks, sums, C)
        u = load_history_u(history, u_ptr, start, vs, has_value, C).to(tl.float32)
        # MMAs on tensor cores accumulate in registers
        added = add_outer_product(added, k_out, u, AXIS, PRECISION)
        start -= BP
    if AXIS == "k":
        S = S_old.to(tl.float32) * tl.exp(sums)[None, :] + added
    else:
        S = S_old.to(tl.float32) * tl.exp(sums)[:, None] + added
    # one store of S to HBM
    tl.store(place, S.to(state_ptr.dtype.element_ty), mask=in_state)


def plan_channels_fold(
    num_states: int, scalars: tuple[int, ...], constants: dict[str, Any], gpu: Machine
) -> Launch:
    """Build a fold of so many states; scalars and constants: those of `fold_kernel`."""
    K, V = constants["K"], constants["V"]
    BK, BV = (min(most, max(16, triton.next_power_of_2(n))) for most, n in ((KEYS, K), (COLUMNS, V)))
    names = ("K", "V", "BP", "AXIS", "NEAR", "LINE", "STATE_UNIT", "UNIT")
    return Launch(
        fold_channels_kernel,
        num_states * triton.cdiv(K, BK) * triton.cdiv(V, BV),
        scalars,
        # k with its decays is in fp32, so both operands are
        {**{name: constants[name] for name in names}, "BK": BK, "BV": BV, **_fp32(gpu)},
        4,
        options={"maxnreg": REGISTERS} if gpu.kind == "cuda" and gpu.capability == 90 else {},
    )


def _fp32(gpu: Machine) -> dict[str, str]:
    return {"PRECISION": precisions(True, gpu)["PRECISION"]}
