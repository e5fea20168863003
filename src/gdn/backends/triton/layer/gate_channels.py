"""Compute the gate of a decay per key channel as a function of its own: elementwise, in fp32.

    g = -exp(A_log) softplus(a + dt_bias)              or lower_bound sigmoid(exp(A_log) (a + dt_bias))
    dA_log = sum over tokens and channels;  ddt_bias = sum over tokens;  beta and db as in `gate`

`prepare_channels` has the same formulas in registers. Bytes per token and head at K = 128 in bf16: forward
774, backward 1030.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton import sums
from gdn.backends.triton.launch import Launch, PlanCache, device_guard, jit, kernel, machine, unit_of
from gdn.backends.triton.lib import column_mask, sigmoid
from gdn.backends.triton.rule.channels import activate_logits, gate_rate, logits_bwd
from gdn.notation import ChannelParam, HeadParam, PerChannel, PerHead

# Tokens times channels of a block, 32 a thread forward and 8 backward. Forward on an H100, 8192 tokens of 32
# heads of 128 channels: 1024 elements 88 us, 2048 81, 4096 78; 67 for the bytes at 3 TB/s
FORWARD, BACKWARD = 4096, 1024
CHANNELS = 128  # most channels of a block


@jit
def load_bias(dt_bias_ptr, head, ks, K: tl.constexpr):
    """Load dt_bias [1, channels] of a head in fp32, or 0."""
    if dt_bias_ptr is None:
        return 0.0
    else:
        return tl.load(dt_bias_ptr + head * K + ks, mask=column_mask(ks, K), other=0.0).to(tl.float32)[
            None, :
        ]


@jit
def row_offsets(rows, row_stride, head, ks, K: tl.constexpr, UNIT: tl.constexpr):
    """Return offsets [rows, channels] of a head in a tensor whose heads and channels are contiguous."""
    # constant factors of the offsets let Triton load 16 bytes of channels at once
    return rows.to(tl.int64)[:, None] * (row_stride * UNIT) + (head * K + ks)[None, :]


@kernel
def gate_channels_kernel(
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, g_ptr, beta_ptr,
    num_rows, HV, a_r, b_r, lower_bound,
    K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # g of every token, head and channel, and beta = sigmoid(b) of every token and head, elementwise.
    # Program (block of BR rows, head, strip of BK channels), strips fastest; BR * BK = FORWARD, 32 per thread
    # in registers. Grid: cdiv(rows, BR) * HV * strips; 4 warps; no PDL.
    # Reads a and b once from HBM; writes g and beta in fp32. The first strip of a head computes its beta.
    STRIPS: tl.constexpr = (K + BK - 1) // BK
    strip = tl.program_id(0) % STRIPS
    head = tl.program_id(0) // STRIPS % HV
    rows = tl.program_id(0) // STRIPS // HV * BR + tl.arange(0, BR)
    ks = strip * BK + tl.arange(0, BK)
    is_row = rows < num_rows
    mask = is_row[:, None] & column_mask(ks, K)[None, :]
    a = tl.load(a_ptr + row_offsets(rows, a_r, head, ks, K, UNIT), mask=mask, other=0.0).to(tl.float32)
    x = a + load_bias(dt_bias_ptr, head, ks, K)
    g = activate_logits(x, gate_rate(A_log_ptr, head), lower_bound, lower_bound is not None)
    tl.store(g_ptr + row_offsets(rows, HV * K, head, ks, K, 1), g, mask=mask)
    b = tl.load(b_ptr + rows.to(tl.int64) * b_r + head, mask=is_row & (strip == 0), other=0.0)
    place = beta_ptr + rows.to(tl.int64) * HV + head
    tl.store(place, sigmoid(b.to(tl.float32)), mask=is_row & (strip == 0))


@kernel
def gate_channels_bwd_kernel(
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, dg_ptr, dbeta_ptr, da_ptr, db_ptr, rates_ptr, biases_ptr,
    num_rows, HV, a_r, b_r, dg_r, dbeta_r, rows_per_program, lower_bound,
    K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # da, db, and partial sums of dA_log and ddt_bias.
    # Program (group of rows, head, strip of BK channels), strips fastest, BR rows at a time; the sums are
    # [BR, BK] in registers. Grid: num_partials * HV * strips, about two programs per SM; 4 warps; no PDL.
    # Reads a, b, dg, dbeta once; writes da and db, and BK + 1 fp32 sums per program.
    STRIPS: tl.constexpr = (K + BK - 1) // BK
    strip = tl.program_id(0) % STRIPS
    head = tl.program_id(0) // STRIPS % HV
    block = tl.program_id(0) // STRIPS // HV
    ks = strip * BK + tl.arange(0, BK)
    rate = gate_rate(A_log_ptr, head)
    bias = load_bias(dt_bias_ptr, head, ks, K)
    # sums stay in registers over all rows of the program
    dA_log = tl.zeros([BR, BK], tl.float32)
    ddt_bias = tl.zeros([BR, BK], tl.float32)
    first = block * rows_per_program
    for i in range(first, tl.minimum(first + rows_per_program, num_rows), BR):
        rows = i + tl.arange(0, BR)
        is_row = rows < num_rows
        mask = is_row[:, None] & column_mask(ks, K)[None, :]
        a = tl.load(a_ptr + row_offsets(rows, a_r, head, ks, K, UNIT), mask=mask, other=0.0).to(tl.float32)
        dg = tl.load(dg_ptr + row_offsets(rows, dg_r, head, ks, K, UNIT), mask=mask, other=0.0)
        x = a + bias
        g = activate_logits(x, rate, lower_bound, lower_bound is not None)
        dx, along = logits_bwd(dg.to(tl.float32), g, x, rate, lower_bound, lower_bound is not None)
        dA_log += along
        ddt_bias += dx
        da_place = da_ptr + row_offsets(rows, HV * K, head, ks, K, 1)
        tl.store(da_place, dx.to(da_ptr.dtype.element_ty), mask=mask)
        # the first strip of a head has db
        is_mine = is_row & (strip == 0)
        b = tl.load(b_ptr + rows.to(tl.int64) * b_r + head, mask=is_mine, other=0.0).to(tl.float32)
        dbeta = tl.load(dbeta_ptr + rows.to(tl.int64) * dbeta_r + head, mask=is_mine, other=0.0)
        # sigmoid(-b), not 1 - sigmoid(b), which cancels; 0 times NaN or inf is 0
        db = tl.where(dbeta == 0.0, 0.0, dbeta.to(tl.float32) * sigmoid(b) * sigmoid(-b))
        db_place = db_ptr + rows.to(tl.int64) * HV + head
        tl.store(db_place, db.to(db_ptr.dtype.element_ty), mask=is_mine)
    # partial sums to HBM, without atomics: `sums` adds them in a fixed order
    if rates_ptr is not None:
        tl.store(rates_ptr + (block.to(tl.int64) * STRIPS + strip) * HV + head, tl.sum(dA_log))
    if biases_ptr is not None:
        place = biases_ptr + (block.to(tl.int64) * HV + head) * K + ks
        tl.store(place, tl.sum(ddt_bias, 0), mask=column_mask(ks, K))


@dataclass(frozen=True)
class _BackwardPlan:
    """Hold the launches of a backward, and the shapes of partial sums of dA_log and ddt_bias."""

    gradients: Launch
    add_rates: Launch
    add_biases: Launch
    rates: tuple[int, int, int]
    biases: tuple[int, int]


_forwards: PlanCache[Launch] = PlanCache()
_backwards: PlanCache[_BackwardPlan] = PlanCache()


def gate_channels(
    a: PerChannel,
    b: PerHead,
    A_log: HeadParam | None,
    dt_bias: ChannelParam | None,
    lower_bound: float | None,
) -> tuple[PerChannel, PerHead]:
    """Return g and beta in fp32."""
    given = _kernel_tensors(a, b, A_log, dt_bias)
    with device_guard(a.device):
        launch = _forwards.get((a.shape, lower_bound, *_key(given)), lambda: _plan(a, given, lower_bound))
        g, beta = (x.new_empty(x.shape, dtype=torch.float32) for x in (a, b))
        launch(*given, g, beta)
    return g, beta


def gate_channels_bwd(
    a: PerChannel,
    b: PerHead,
    A_log: HeadParam | None,
    dt_bias: ChannelParam | None,
    lower_bound: float | None,
    dg: PerChannel,
    dbeta: PerHead,
) -> tuple[PerChannel, PerHead, HeadParam | None, ChannelParam | None]:
    """Return da, db, dA_log, ddt_bias, each in its tensor's dtype."""
    given = (*_kernel_tensors(a, b, A_log, dt_bias), to_rows(dg.flatten(-2)), to_rows(dbeta))
    with device_guard(a.device):
        plan = _backwards.get((a.shape, lower_bound, *_key(given)), lambda: _plan_bwd(a, given, lower_bound))
        da, db = a.new_empty(a.shape), b.new_empty(b.shape)
        dA_log, ddt_bias = (None if x is None else x.new_empty(x.shape) for x in (A_log, dt_bias))
        rates = None if A_log is None else a.new_empty(plan.rates, dtype=torch.float32)
        biases = None if dt_bias is None else a.new_empty(plan.biases, dtype=torch.float32)
        plan.gradients(*given, da, db, rates, biases)
        if rates is not None:
            plan.add_rates(rates, None, dA_log)
        if biases is not None:
            plan.add_biases(biases, None, ddt_bias)
    return da, db, dA_log, ddt_bias


def to_rows(x: Tensor) -> Tensor:
    """Return x as the kernels read it: the last axis contiguous, and all other axes foldable into one."""
    sizes, strides = x.shape, x.stride()
    is_foldable = all(strides[i] == sizes[i + 1] * strides[i + 1] for i in range(x.dim() - 2))
    return x if is_foldable and strides[-1] == 1 else x.contiguous()


def _kernel_tensors(
    a: Tensor, b: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the tensors as the kernels read them; a is [..., HV K], which copies only unusual strides."""
    parameters = (None if x is None else x.contiguous() for x in (A_log, dt_bias))
    return to_rows(a.flatten(-2)), to_rows(b), *parameters


def _key(tensors: tuple[Tensor | None, ...]) -> tuple[object, ...]:
    return tuple(None if x is None else (x.stride(), x.dtype, x.device) for x in tensors)


def _row_strides(*tensors: Tensor | None) -> list[int]:
    return [x.stride(-2) if x is not None and x.dim() > 1 else 0 for x in tensors]


def _blocks(K: int, elements: int) -> dict[str, int]:
    BK = min(CHANNELS, triton.next_power_of_2(K))
    return {"K": K, "BR": elements // BK, "BK": BK}


def _plan(a: Tensor, given: tuple[Tensor | None, ...], lower_bound: float | None) -> Launch:
    HV, K = a.shape[-2:]
    num_rows, sizes = a.numel() // max(1, HV * K), _blocks(K, FORWARD)
    a_r, b_r = _row_strides(*given[:2])
    unit = unit_of(a_r)
    programs = triton.cdiv(num_rows, sizes["BR"]) * HV * triton.cdiv(K, sizes["BK"])
    return Launch(
        gate_channels_kernel, programs, (num_rows, HV, a_r // unit, b_r, lower_bound),
        {**sizes, "UNIT": unit}, 4,
    )  # fmt: skip


def _plan_bwd(a: Tensor, given: tuple[Tensor | None, ...], lower_bound: float | None) -> _BackwardPlan:
    HV, K = a.shape[-2:]
    num_rows, sizes = a.numel() // max(1, HV * K), _blocks(K, BACKWARD)
    a_r, b_r, _, _, dg_r, dbeta_r = _row_strides(*given)
    unit, strips = unit_of(a_r, dg_r), triton.cdiv(K, sizes["BK"])
    # two programs per SM, each of which stores partial sums
    blocks = triton.cdiv(triton.cdiv(num_rows, sizes["BR"]) * HV * strips, 2 * machine(a.device).num_sms)
    rows = max(1, blocks) * sizes["BR"]
    num_partials = triton.cdiv(num_rows, rows)
    scalars = (num_rows, HV, a_r // unit, b_r, dg_r // unit, dbeta_r, rows, lower_bound)
    gradients = Launch(
        gate_channels_bwd_kernel, num_partials * HV * strips, scalars, {**sizes, "UNIT": unit}, 4
    )
    return _BackwardPlan(
        gradients,
        sums.add(num_partials * strips, 1, HV),
        sums.add(num_partials, 1, HV * K),
        (num_partials, strips, HV),
        (num_partials, HV * K),
    )
