"""Provide the causal depthwise convolution: the public functions and their torch operators.

`convolve_and_split` is for layers: its backward reads the gradients of q, k and v where they are.

gdn::causal_conv1d has a backward. gdn::causal_conv1d_pool and gdn::causal_conv1d_update write a pool.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn import settings
from gdn._torch_compat import has_saved_tensor_hooks
from gdn.backends import select
from gdn.notation import Channels, ConvPool, ConvState, ConvWeight, Index, Mask, Offsets
from gdn.ops.library import (
    Signature,
    are_plain,
    as_output,
    check_offsets,
    define,
    define_writer,
    guarded,
    library,
    no_second_derivative,
    requested,
    runs_directly,
    without_autocast,
)
from gdn.problem import ContextParallel, check, check_context
from gdn.problem.layer import ConvProblem, ConvUpdateProblem, parse_conv, parse_conv_update


def causal_conv1d(
    x: Channels,
    weight: ConvWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: ConvState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Offsets | None = None,
    cu_seqlens_cpu: Offsets | None = None,
    state: ConvPool | None = None,
    state_index: Index | None = None,
    has_initial_state: Mask | None = None,
    null_slot: int | None = None,
    cp_context: ContextParallel | None = None,
    backend: str | None = None,
) -> tuple[Channels, ConvState | None]:
    """Compute the causal depthwise convolution of whole sequences, for training and prefill.

        y_t = act(bias + sum_j weight[:, j] x_{t-W+1+j})

    The inputs before the first token of a sequence are its initial state, or zeros, but never those of
    another sequence.

    Args:                   shape                   dtype
        x                   [B, T, D], any strides  bf16, fp16, fp32, fp64; channels or time contiguous
        weight              [D, W]                  any float; weight[:, W-1] multiplies the newest input
        bias                [D] or None             any float
        activation          None or "silu"
        initial_state       [N, D, W-1] or None     any float; the inputs before the first token, newest last;
                                                    None: zeros
        output_final_state  bool                    True: return the last W - 1 inputs of each sequence
        cu_seqlens          [N+1] int32, int64      packed: sequence n is tokens cu_seqlens[n]:cu_seqlens[n+1]
                                                    of the only batch row; empty sequences allowed
        cu_seqlens_cpu      [N+1] int32, int64      a copy on the CPU, if the caller has one
        state               [slots, D, L] or None   any float, any strides, L >= W - 1: a pool, updated in
                                                    place; a slot holds the last L inputs, newest in the last
                                                    column
        state_index         [N] int32, int64        the slot of each sequence; None: n
        has_initial_state   [N] bool or None        False: start from zeros and do not read the slot; None:
                                                    all True
        null_slot           None or 0               0: slot 0 is padding as well
        cp_context          ContextParallel or      x holds the tokens of this rank, offsets are global; see
                            None                    `gdn.ContextParallel`
        backend             str or None             None: chosen automatically; a named one never falls back

    With `state`, a sequence whose slot is below the lowest valid one or past the pool outputs zeros, and no
    slot is read or written for it. An empty sequence leaves its slot unchanged. The result is undefined if
    two sequences have one slot. An engine that keeps the window at the front of longer slots (num_accepted in
    `causal_conv1d_update`) passes `state[:, :, :W-1]`.

    Returns:
        y            [B, T, D]     dtype of x; zero past cu_seqlens[-1]
        final_state  [N, D, W-1]   dtype of x, or None; includes inputs from the initial state

    Gradients: x, weight, bias and initial_state get gradients from both outputs, each in the dtype of its
            tensor, summed in fp32 (fp64 for fp64); there are none with `state`.
    Raises: TypeError, ValueError, NotImplementedError as `chunk_gated_delta_rule` does.
    Cost:   2 W flop per element forward, 6 W backward; the forward reads x once and writes y once.
    Source: arXiv:2312.00752, section 3.4 (the short convolution of Mamba).

    Example:
        >>> import torch, gdn
        >>> x, weight = torch.randn(2, 10, 6), torch.randn(6, 4)
        >>> y, window = gdn.causal_conv1d(x, weight, activation="silu", output_final_state=True)
        >>> y.shape, torch.equal(window, x[:, -3:].transpose(1, 2))
        (torch.Size([2, 10, 6]), True)
    """
    if cp_context is not None:
        check_context(
            cp_context, state=state, state_index=state_index, has_initial_state=has_initial_state,
            null_slot=null_slot,
        )  # fmt: skip
        return cp_context.causal_conv1d(
            x, weight, bias, activation=activation, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
            backend=backend,
        )  # fmt: skip
    p = parse_conv(
        x=x, weight=weight, bias=bias, activation=activation, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        state=state, state_index=state_index, has_initial_state=has_initial_state, null_slot=null_slot,
        backend=backend,
    )  # fmt: skip
    if p.state is not None:
        return pool_operator(*_POOL.arguments_of(p)), None
    check.no_tangent("causal_conv1d", x=p.x, weight=p.weight, bias=p.bias, initial_state=p.initial_state)
    run = _conv if runs_directly(p.x, p.weight, p.bias, p.initial_state) else conv_operator
    y, final_state = run(*_CONV.arguments_of(p))
    return y, final_state if output_final_state else None


def convolve_and_split(
    sizes: Sequence[int], x: Channels, weight: ConvWeight, bias: Tensor | None = None, **options: Any
) -> tuple[tuple[Channels, ...], ConvState | None]:
    """Return `causal_conv1d`'s y, split into parts of so many channels, and the final state.

    Autograd would copy the gradients of the parts into one tensor. The backward here reads the parts. Calls
    that a tracer or a hook has to see are `causal_conv1d` and `split`; `holds_alone` tells them apart.
    """
    context = options.pop("cp_context", None)
    tensors = (x, weight, bias, options.get("initial_state"))
    # checkpointing compares what two forwards save, and the second one may run in another mode
    if context is not None or not are_plain(*tensors) or has_saved_tensor_hooks():
        y, final = causal_conv1d(x, weight, bias, cp_context=context, **options)
        return y.split(sizes, dim=-1), final
    absent = dict.fromkeys(ConvProblem.declaration.names) | {"output_final_state": False}
    p = parse_conv(**absent | options | {"x": x, "weight": weight, "bias": bias})
    arguments = (tuple(sizes), *_CONV.arguments_of(p))
    has_gradient = check.records_gradient(*tensors)
    *parts, final = _SplitConvolution.apply(*arguments) if has_gradient else _convolve_parts(*arguments)
    return tuple(parts), final if p.output_final_state else None


def holds_alone(part: Tensor) -> bool:
    """Return True if a tensor is a part of `convolve_and_split`'s y that no hook and no mode has seen.

    Its own backward does not read it, so the memory is free once the last reader's backward has run.
    """
    if torch.compiler.is_compiling():
        return False
    return type(part.grad_fn).__name__ == "_SplitConvolutionBackward"


def causal_conv1d_update(
    x: Channels,
    state: ConvPool,
    weight: ConvWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    state_index: Index | None = None,
    ring_pos: Index | None = None,
    num_accepted: Index | None = None,
    null_slot: int | None = None,
    out: Channels | None = None,
    backend: str | None = None,
) -> Channels:
    """Convolve T new tokens for each row of a batch, with the windows in a pool, for decode.

        y_t = act(bias + sum_j weight[:, j] x_{t-W+1+j}),  x_{-1}, x_{-2}, ... from the slot of the row

    The L columns of a slot have one of three layouts:

        (neither)     a window: column L-1 is the newest input; the call shifts the packet in. L >= W - 1.
        ring_pos      a ring: token t of the packet goes to column (ring_pos + t) % L. The W - 1 inputs before
                      the packet are at columns (ring_pos - (W-1) + i) % L, i = 0 .. W-2. Other columns keep
                      their values. L >= W - 1, and L >= W - 1 + T - 1 if tokens may be rejected. The caller
                      then advances ring_pos by the number of accepted tokens.
        num_accepted  a sliding window at the front of the slot, L >= W - 1 + T - 1. Let a be the number of
                      accepted tokens of the previous packet, clamped to 1 .. L - W + 2. The W - 1 inputs
                      before the packet are columns a-1 : a+W-2. After the call, columns 0 : W-2 hold the last
                      W - 2 of those inputs and columns W-2 : W-2+T the packet; later columns keep their
                      values. After a prefill, a = 1 and the window is columns 0 : W-1. (With W = 1 no column
                      is read, and columns 0 : T-1 get tokens 1 : T of the packet.)

    Args:             shape                  dtype
        x             [B, D] or [B, T, D]    bf16, fp16, fp32, fp64; any strides
        state         [slots, D, L]          any float, any strides; updated in place
        weight        [D, W]                 any float; weight[:, W-1] multiplies the newest input
        bias          [D] or None            any float
        activation    None or "silu"
        state_index   [B] int32, int64       the slot of each row; None: the row's number
        ring_pos      [B] int32, int64       any sign; see above
        num_accepted  [B] int32, int64       see above
        null_slot     None or 0              0: slot 0 is padding as well
        out           shape and dtype of x   written and returned; may be x itself; None: a new tensor
        backend       str or None            None: chosen automatically; a named one never falls back

    A row whose slot is below the lowest valid one or past the pool outputs zeros, and no slot is read or
    written for it. The result is undefined if two rows have one slot. If the pool has the dtype of x, one
    packet of T tokens equals T single steps.

    Returns y, with the shape and dtype of x.
    Gradients: none. Raises: as `causal_conv1d`; ValueError if a gradient is required.
    Cost: 2 W flop per element; reads and writes each slot once.
    """
    problem = parse_conv_update(
        x=x, state=state, weight=weight, bias=bias, activation=activation, state_index=state_index,
        ring_pos=ring_pos, num_accepted=num_accepted, null_slot=null_slot, out=out, backend=backend,
    )  # fmt: skip
    update_operator(*problem.arguments())
    if out is not None:
        return out
    return problem.out.squeeze(1) if x.dim() == 2 else problem.out


# one problem, two operators: of whole sequences, with gradients, and of sequences whose windows are in a pool
_CONV = ConvProblem.declaration.without("state", "state_index", "has_initial_state", "null_slot")
_POOL = ConvProblem.declaration.without("initial_state", "output_final_state", required=("state",))


def _conv(*args: Any) -> tuple[Tensor, Tensor]:
    problem, _ = _CONV.split(args)
    check_offsets(problem)

    def run() -> tuple[Tensor, Tensor]:
        y, final = select(problem).causal_conv1d(problem)
        return as_output(y, y), as_output(final, y)

    return guarded(_FORWARD, problem.x.device, run, problem)


def _conv_fake(*args: Any) -> tuple[Tensor, Tensor]:
    problem, _ = _CONV.split(args)
    y = problem.x.new_empty(problem.x.shape)
    return y, y.new_empty(problem.state_shape) if problem.output_final_state else y.new_empty(0)


def _conv_backward(*args: Any) -> tuple[Tensor, ...]:
    problem, (dy, dfinal) = _CONV.split(args)

    def run() -> tuple[Tensor, ...]:
        gradients = select(problem).causal_conv1d_bwd(problem, dy, dfinal)
        return tuple(as_output(x, problem.x) for x in gradients)

    return guarded(_BACKWARD, problem.x.device, run, tensors=(dy, dfinal))


def _conv_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    problem, _ = _CONV.split(args)
    primals = (getattr(problem, name) for name in _FORWARD.inputs)
    return tuple(problem.x.new_empty(0) if t is None else t.new_empty(t.shape) for t in primals)


def _pool(*args: Any) -> Tensor:
    problem, _ = _POOL.split(args)
    check_offsets(problem)
    function = select(problem).causal_conv1d

    def run() -> tuple[Tensor]:
        y, _ = function(problem)
        return (y,)

    # unused slots of a pool may hold any value, so debug mode does not test the pool for NaN
    (y,) = guarded(_POOL_SIGNATURE, problem.x.device, run, problem)
    return y


def _update(*args: Any) -> None:
    problem = ConvUpdateProblem(*args)
    function = select(problem).causal_conv1d_update

    def run() -> tuple[Tensor]:
        function(problem)
        return (problem.out,)

    guarded(_UPDATE, problem.x.device, run, problem)


_FORWARD = Signature("causal_conv1d", ("x", "weight", "bias", "initial_state"), ("y", "final_state"))
_BACKWARD = Signature(
    "causal_conv1d_backward", ("dy", "dfinal_state"), ("dx", "dweight", "dbias", "dinitial_state")
)
_POOL_SIGNATURE = Signature("causal_conv1d", ("x", "weight", "bias"), ("y",))
_UPDATE = Signature("causal_conv1d_update", ("x", "weight", "bias"), ("y",))
conv_operator = define(
    "causal_conv1d", f"({_CONV.schema}) -> (Tensor y, Tensor final_state)", _conv, _conv_fake
)
conv_backward_operator = define(
    "causal_conv1d_backward",
    f"({_CONV.schema}, Tensor dy, Tensor? dfinal_state) -> "
    "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)",
    _conv_backward,
    _conv_backward_fake,
)
pool_operator = define(
    "causal_conv1d_pool", f"({_POOL.schema}) -> Tensor", _pool, lambda x, *_: x.new_empty(x.shape)
)
update_operator = define_writer("causal_conv1d_update", ConvUpdateProblem.declaration, _update)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    count = len(_CONV.tensors)
    ctx.save_for_backward(*inputs[:count])
    ctx.options = dict(zip(_CONV.options, inputs[count:], strict=True))


def _differentiate(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
    arguments = _backward_arguments(ctx, ctx.saved_tensors, dy, dfinal)
    return requested(conv_backward_operator(*arguments), ctx.needs_input_grad)


def _backward_arguments(
    ctx: Any, saved: Sequence[Any], dy: Tensor | tuple[Tensor, ...], dfinal: Tensor
) -> tuple[Any, ...]:
    dS = dfinal if ctx.options["output_final_state"] else None
    return (*saved, *ctx.options.values(), dy, dS)


def _convolve_parts(sizes: tuple[int, ...], *args: Any) -> tuple[Tensor, ...]:
    """Return the parts of y and the final state; without a final state an empty tensor."""
    if settings.debug():
        y, final = conv_operator(*args)
        return (*y.split(sizes, dim=-1), final)
    problem, _ = _CONV.split(args)
    check_offsets(problem)
    function = select(problem).causal_conv1d
    parts, final = without_autocast(problem.x.device, lambda: function(problem, sizes))
    return (*parts, as_output(final, problem.x))


class _SplitConvolution(torch.autograd.Function):
    """Run the operator and split y; the backward takes the gradients of the parts."""

    @staticmethod
    def forward(ctx: Any, sizes: tuple[int, ...], *args: Any) -> tuple[Tensor, ...]:
        _keep(ctx, args, ())
        return _convolve_parts(sizes, *args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        *parts, dfinal = gradients
        # once: activation checkpointing computes a saved tensor for one reader
        saved = ctx.saved_tensors
        is_direct = not torch.is_grad_enabled() and not settings.debug()
        if is_direct and are_plain(*saved, *gradients):
            computed = _conv_backward(*_backward_arguments(ctx, saved, tuple(parts), dfinal))
        else:
            dy = torch.cat(parts, -1)
            computed = conv_backward_operator(*_backward_arguments(ctx, saved, dy, dfinal))
        _, *needs = ctx.needs_input_grad
        return None, *requested(computed, needs)


torch.library.register_autograd("gdn::causal_conv1d", _differentiate, setup_context=_keep, lib=library)
no_second_derivative("causal_conv1d_backward")
