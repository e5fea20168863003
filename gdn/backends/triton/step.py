"""A layer's whole decode step in one launch, two or three.

What stands in the way of one launch: value heads share the convolved q and k of a key head, the norm wants
all columns of a value head together, and a window may move only when all who need it have read it. So

    separate   convolution, decode, norm: `conv_update`, `decode` and `norm`, whose programs are as small as
               each of them likes
    deferred   programs of some columns of a value head convolve what they need from the windows as they were,
               and leave them alone; then one launch norms and moves the windows
    normed     the convolution; then programs of whole value heads, who norm what they made
    whole      programs of a key head and all value heads that read it: nobody else needs their channels. One
               launch, but at 16 key heads and one row 16 programs for 132 multiprocessors

`step_kernel` is the second half of `normed` and all of `whole`; `deferred` is it and `finish_kernel`.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from gdn.backends.eager.step import composed
from gdn.backends.triton import conv_update, decode, launch, norm
from gdn.backends.triton.chained import CHAINED, chains
from gdn.backends.triton.conv import WIDEST, filled
from gdn.backends.triton.launch import Launch, Plans, machine, on
from gdn.backends.triton.packet import strides_of
from gdn.backends.triton.recurrent import Tile, inverse, pool_of, tile_of
from gdn.backends.triton.step_kernels import finish_kernel, step_kernel
from gdn.problem.step import StepProblem


@dataclass(frozen=True)
class Form:
    """Which launches make a step; warps of the programs that have states, where they are `step_kernel`'s."""

    name: str
    num_warps: int = 4

    def __str__(self) -> str:
        return self.name if self.name == "separate" else f"{self.name}, {self.num_warps} warps"


SEPARATE = Form("separate")
FORMS = (
    SEPARATE, Form("deferred"), Form("deferred", 2), Form("normed"), Form("normed", 8), Form("whole"),
    Form("whole", 8),
)  # fmt: skip
# (rows times value heads up to which, form) for steps with a norm, and for those without. `gdn bench step`
# measures the forms; until it has, nothing but the separate kernels is listed
Table = tuple[tuple[float, Form], ...]
NORMED: Table = ((float("inf"), SEPARATE),)
BARE: Table = ((float("inf"), SEPARATE),)
MOST_STRIPS = 4  # of a value head in one program, all of whose outputs wait in registers for the norm


@dataclass(frozen=True)
class Again:
    """The launches that a step came down to, for calls that differ only in where their tensors lie."""

    form: Form
    launches: tuple[Launch, ...]
    device: torch.device

    def __call__(self, *tensors: Tensor | None) -> None:
        """With the tensors of a problem, in its order."""
        x, conv, weight, bias, a, b, A_log, dt_bias, state, conv_index, read, write, z, gain, out = tensors
        assert x is not None and out is not None
        conv, windows = filled(conv), read if conv_index is None else conv_index
        gates, places, name = (a, b, A_log, dt_bias), (read, write), self.form.name
        with on(self.device):
            if name == "whole":
                self.launches[0](x, weight, bias, conv, windows, state, *gates, *places, z, gain, out)
                return
            if name == "deferred":
                self.launches[0](x, weight, bias, conv, windows, state, *gates, *places, None, None, out)
                self.launches[1](out, z, gain, out, x, conv, windows)
                return
            mixed = x.new_empty(x.shape)
            self.launches[0](x, conv, weight, bias, windows, None, mixed)
            if name == "normed":
                self.launches[1](mixed, None, None, None, None, state, *gates, *places, z, gain, out)
                return
            rows = (None, read, None, None, write, None, None, None)
            self.launches[1](mixed, mixed, mixed, state, None, None, *gates, *rows, out)
            if len(self.launches) == 3:
                # in place: a program reads its rows before it writes them
                self.launches[2](out, z, gain, out)


_plans: Plans[Again] = Plans()


def decode_step(problem: StepProblem, form: Form | None = None) -> Again | None:
    """See `Backend`; in the form that the table says, or in one by choice, if that takes the problem."""
    p = problem
    if needs_copies(p) is not None and form is None:
        composed(p, conv_update.causal_conv1d_update, decode.decode, norm.rms_norm_gated)
        return None
    again = _plans.get((form, _key(p)), lambda: plan_of(p, form_of(p) if form is None else form))
    again(*tensors_of(p))
    return None if launch.recorder is not None else again


def tensors_of(p: StepProblem) -> tuple[Tensor | None, ...]:
    """The problem's own, in its order."""
    return (
        p.mixed_qkv, p.conv_state, p.conv_weight, p.conv_bias, p.a, p.b, p.A_log, p.dt_bias, p.state,
        p.conv_index, p.read_index, p.write_index, p.z, p.norm_weight, p.out,
    )  # fmt: skip


def form_of(p: StepProblem) -> Form:
    """The fastest form, as measured; the separate kernels where it does not take the problem."""
    work = p.mixed_qkv.shape[0] * p.HV
    form = next(form for most, form in (NORMED if p.has_norm else BARE) if work <= most)
    return form if cannot(p, form) is None else SEPARATE


def needs_copies(p: StepProblem) -> str | None:
    """Why launches cannot be repeated as they are on other tensors of these layouts; None if they can."""
    if p.W > WIDEST or p.conv_state.shape[0] == 0:
        return f"expected at most {WIDEST} taps and a slot, got {p.W}, {p.conv_state.shape[0]}"
    packed = (p.conv_weight, p.conv_bias, p.norm_weight, p.out)
    if any(x is not None and not x.is_contiguous() for x in packed):
        return "expected conv_weight, conv_bias, norm_weight and out in one piece"
    if p.z is not None and p.z.stride(2) != 1:
        return "expected z with its columns side by side"
    return None


def cannot(p: StepProblem, form: Form) -> str | None:
    """Why a form does not take a problem; None if it does."""
    if (reason := needs_copies(p)) is not None or form.name == "separate":
        return reason
    if p.mixed_qkv.stride(1) != 1 or p.conv_state.numel() == 0:
        return "expected channels side by side, and windows"
    if form.name == "deferred":
        return None if p.has_norm else "expected a norm, in whose launch the windows move"
    strips = _tile(p, form).blocks(p.V)
    if strips > MOST_STRIPS:
        return f"expected a value head in {MOST_STRIPS} tiles, got {strips}"
    return None


def plan_of(p: StepProblem, form: Form) -> Again:
    if (reason := cannot(p, form)) is not None:
        raise NotImplementedError(f"{form}: {reason}")
    x, launches = p.mixed_qkv, []
    mixed, o = x.new_empty(x.shape), p.out
    if form.name in ("separate", "normed"):
        launches.append(conv_update.plan_of(p.conv(mixed)))
    if form.name == "separate":
        keys = p.H * p.K
        launches.append(decode.plan_of(p.decode(mixed, o), (0, keys, 2 * keys)))
        if p.has_norm:
            launches.append(norm.plan_of(p.norm(o), o, p.z))
    else:
        launches.append(_plan_step(p, form, mixed if form.name == "normed" else x))
    if form.name == "deferred":
        launches.append(_plan_finish(p, o))
    return Again(form, tuple(launches), x.device)


def _tile(p: StepProblem, form: Form) -> Tile:
    axis, unit, _ = pool_of(p.state, p.K, p.V, p.state_v_first)
    width = p.state.element_size()
    return tile_of(p.K, p.V, axis or "k", width, unit if axis else 1, machine(p.x.device), form.num_warps)


def _plan_step(p: StepProblem, form: Form, x: Tensor) -> Launch:
    axis, unit, state = pool_of(p.state, p.K, p.V, p.state_v_first)
    part, has_whole_heads = _tile(p, form), form.name != "deferred"
    has_windows = form.name != "normed"
    strips, ratio = part.blocks(p.V) if has_whole_heads else 1, p.HV // p.H
    heads = ratio if form.name == "whole" else 1
    parts, norms = p.HV // heads, has_whole_heads and p.has_norm
    numbers = (
        x.stride(0), *p.a.stride(), *p.b.stride(), *strides_of(p.A_log, 1), *strides_of(p.dt_bias, 1),
        *((0, 0) if p.z is None or not norms else p.z.stride()[:2]),
        *(p.conv_state.stride() if has_windows else (0, 0, 0)), p.conv_state.shape[2],
        *strides_of(p.conv_slots if has_windows else None, 1), p.conv_state.shape[0],
        state[0], *state[2:], *strides_of(p.read_index, 1), *strides_of(p.write_index, 1), p.state.shape[0],
        0 if p.null_slot is None else 1, p.H, p.HV, heads, parts, *inverse(parts), *inverse(ratio), p.scale,
        p.norm_eps,
    )  # fmt: skip
    constants = {
        "K": p.K, "V": p.V, **part.constants(), "AXIS": axis, "STATE_UNIT": unit, "STRIPS": strips,
        "IS_SINGLE": heads == 1, "AHEAD": not has_windows, "CONV": has_windows,
        "MOVE": form.name == "whole", "OLDER": p.conv_state.shape[2] >= p.W, "TAPS": p.W,
        "SILU": p.conv_activation == "silu", "L2NORM": p.use_qk_l2norm_in_kernel,
        "NEGATIVE": p.allow_neg_eigval, "NORM": norms, "GATE": p.norm_activation or "none",
        "CHAINED": chains(machine(x.device)),
    }  # fmt: skip
    grid = x.shape[0] * parts * (1 if has_whole_heads else part.blocks(p.V))
    options = CHAINED if constants["CHAINED"] else {}
    return Launch(step_kernel, grid, numbers, constants, part.num_warps, options=options)


def _plan_finish(p: StepProblem, o: Tensor) -> Launch:
    of_norm = norm.plan_of(p.norm(o), o, p.z)
    x, channels, BC = p.mixed_qkv, p.mixed_qkv.shape[1], 128
    numbers = (
        *of_norm.numbers, of_norm.grid, x.stride(0), *p.conv_state.stride(), p.conv_state.shape[2],
        *strides_of(p.conv_slots, 1), p.conv_state.shape[0], 0 if p.null_slot is None else 1, channels,
    )  # fmt: skip
    grid = of_norm.grid + x.shape[0] * triton.cdiv(channels, BC)
    constants = {**of_norm.constants, "TAPS": p.W, "OLDER": p.conv_state.shape[2] >= p.W, "BC": BC}
    return Launch(finish_kernel, grid, numbers, constants, of_norm.num_warps, options=of_norm.options)


def _key(p: StepProblem) -> Hashable:
    """Everything of a problem that its launches depend on, but for where its tensors lie."""
    return (
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors_of(p)), p.x.device,
        p.num_k_heads, p.head_k_dim, p.conv_activation, p.norm_eps, p.norm_activation, p.scale,
        p.use_qk_l2norm_in_kernel, p.allow_neg_eigval, p.state_v_first, p.null_slot,
    )  # fmt: skip
