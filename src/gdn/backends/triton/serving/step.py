"""Run a layer's whole decode step: the convolution, `decode` and the norm, chained by PDL.

Microseconds on an H200, 16/32 heads of 128 x 128, states in fp32 and in bf16: at B = 1 6.7 and 6.3 (8.7 and
8.6 without PDL), at B = 8 15.1 and 10.2, at B = 64 78 and 44.

Fewer launches were slower and were removed. With the norm in programs that have whole value heads: 6.6 and
6.0 at B = 1, but it sums in another order than for more rows, and is slower for these. With programs that
compute the convolution they need, and windows moved in the norm's launch: 0.81 to 1.01 of the speed. With
programs of a key head and all its value heads in one launch: 0.37 to 0.99.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gdn.backends.eager.step import compose_step
from gdn.backends.triton.launch import (
    Launch,
    PlanCache,
    Step,
    compile_ahead,
    device_guard,
    is_recording,
    machine,
)
from gdn.backends.triton.layer import conv_update, norm
from gdn.backends.triton.layer.conv import MAX_TAPS, drop_empty
from gdn.backends.triton.serving import decode, history, packet
from gdn.backends.triton.serving.fold_history import plan_fold
from gdn.problem.step import StepProblem


@dataclass(frozen=True)
class CachedStep:
    """Repeat the launches of a step for calls that differ only in the addresses of tensors."""

    launches: tuple[Launch, ...]
    device: torch.device
    appends: bool | None  # None: slots without histories; False: these are folded before the decode

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch with the tensors of a problem, in its order."""
        with device_guard(self.device):
            for one, given in self.steps(*tensors):
                one(*given)

    def steps(self, *tensors: Tensor | None) -> list[Step]:
        """Return the launches and the tensors of each."""
        x, conv, weight, bias, a, b, A_log, dt_bias, state, column_scale, low, conv_index, *rest = tensors
        read, write, z, gain, *history, out = rest
        assert x is not None and conv is not None and out is not None
        mixed, gates = x.new_empty(x.shape), (a, b, A_log, dt_bias, column_scale)
        convolution = (
            x,
            drop_empty(conv),
            weight,
            bias,
            read if conv_index is None else conv_index,
            None,
            mixed,
        )
        rows = (None, read, None, None, write, None, None, None)
        rule: list[tuple[Tensor | None, ...]] = [(mixed, mixed, mixed, state, None, None, *gates, *rows, out)]
        if self.appends:
            rule = [(mixed, mixed, mixed, state, *history, None, None, *gates, low, None, read, None, out)]
        elif self.appends is not None:
            rule = [(state, *history, column_scale, low, read, None), *rule]
        # the norm runs in place: a program loads its rows into registers before it stores them
        given = [convolution, *rule, (out, z, gain, out)]
        # without a norm there is no third launch
        return list(zip(self.launches, given, strict=False))


_plans: PlanCache[CachedStep] = PlanCache()


def decode_step(problem: StepProblem, plan: history.PlanAppend | None = None) -> CachedStep | None:
    """See `Backend`. `plan`: as for `history.decode_with_history`."""
    p = problem
    if needs_copies(p):
        rule = partial(history.decode_with_history, plan=plan) if p.has_history else decode.decode
        compose_step(p, conv_update.causal_conv1d_update, rule, norm.rms_norm_gated)
        return None
    cached = _plans.get((plan, *_key(p)), lambda: _first(p, plan or history.plan_append))
    cached(*launch_tensors(p))
    return None if is_recording() else cached


def launch_tensors(p: StepProblem) -> tuple[Tensor | None, ...]:
    """Return the problem's tensors in its order."""
    return (
        p.mixed_qkv, p.conv_state, p.conv_weight, p.conv_bias, p.a, p.b, p.A_log, p.dt_bias, p.state,
        p.column_scale, p.remainder, p.conv_index, p.read_index, p.write_index, p.z, p.norm_weight,
        p.history_u, p.history_k, p.history_G, p.cursor, p.out,
    )  # fmt: skip


def needs_copies(p: StepProblem) -> bool:
    """Return True if the launches cannot be repeated on other tensors of these layouts."""
    # the convolution then runs in `eager`, or its output is zero
    if p.W > MAX_TAPS or p.conv_state.shape[0] == 0:
        return True
    # a repeated launch takes addresses only, so nothing may be copied on the way
    packed = (p.conv_weight, p.conv_bias, p.norm_weight, p.out)
    return any(x is not None and not x.is_contiguous() for x in packed) or (
        p.z is not None and p.z.stride(2) != 1
    )


def plan_step(p: StepProblem, num_states: int | None, plan: history.PlanAppend) -> CachedStep:
    """Return the launches; `plan` plans the one that appends to histories.

    `num_states`: rows times heads for the tiles of `decode`, if not the problem's.
    """
    # only the layout of the convolution's output counts here: it is allocated anew for each step
    mixed, o, keys = p.mixed_qkv.new_empty(p.mixed_qkv.shape), p.out, p.H * p.K
    starts, appends = (0, keys, 2 * keys), None
    launches = [conv_update.plan_launch(p.conv(mixed))]
    if p.has_history:
        rule = p.with_history(mixed, o)
        appends = history.appends_history(rule)
        launches.append(plan(rule, starts, num_states) if appends else plan_fold(rule.fold(), num_states))
    if not appends:
        launches.append(decode.plan_launch(p.decode(mixed, o), starts, num_states))
    if p.has_norm:
        launches.append(norm.plan_launch(p.norm(o), o, p.z))
    return CachedStep(tuple(launches), p.x.device, appends)


def _first(p: StepProblem, plan: history.PlanAppend) -> CachedStep:
    cached, tensors = plan_step(p, None, plan), launch_tensors(p)
    kind = tuple(one.binary_key(given) for one, given in cached.steps(*tensors))
    # binaries for other numbers of rows
    others = [plan_step(p, num_states, plan) for num_states in packet.sample_num_states(machine(p.x.device))]
    compile_ahead(p.x.device, kind, lambda: [one for other in others for one in other.steps(*tensors)])
    return cached


def _key(p: StepProblem) -> tuple[Hashable, ...]:
    """Return everything that the launches depend on, except the addresses of tensors."""
    return (
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in launch_tensors(p)), p.x.device,
        p.num_k_heads, p.head_k_dim, p.conv_activation, p.norm_eps, p.norm_activation, p.scale, p.lower_bound,
        p.use_qk_l2norm_in_kernel, p.allow_neg_eigval, p.state_v_first, p.room, p.use_history, p.null_slot,
    )  # fmt: skip
