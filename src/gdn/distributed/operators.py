"""Define the calls of a context as torch operators, so that `torch.compile(fullgraph=True)` traces them.

    gdn::rank_forward, gdn::rank_backward       the rule on the tokens of a rank, exchange included
    gdn::rank_windows, gdn::rank_windows_bwd    the inputs before each run, for the convolution

A compiler that traced the collectives themselves could drop one whose result a rank does not need, or repeat
one to save memory, by sizes that differ between ranks; the other ranks would wait for ever. Each operator
holds a whole exchange, and its backward is an operator as well. A compiler keeps their results and drops
none, so that each runs once on every rank.

The name of a context stands for it among the arguments. Shapes of results may not depend on the contents of
`cu_seqlens`: with offsets, every rank has as many rows of states as it could have pieces, the last ones
empty, and no rows of states are arguments or results of a call.
"""

import copy
import math
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.fx.node import has_side_effect

from gdn._torch_compat import run_once
from gdn.distributed import calls, halo, rule
from gdn.distributed.check import Compared, Hashed, conv_words, hashed
from gdn.distributed.exchange import split_heads
from gdn.distributed.plan import Plan
from gdn.ops.conv import causal_conv1d
from gdn.ops.library import (
    GIVEN,
    GRADIENTS,
    SAVED,
    as_output,
    define,
    define_autograd,
    gradients_fake,
    no_second_derivative,
    requested,
    saved_fake,
)
from gdn.problem import Problem
from gdn.problem.check import records_gradient

if TYPE_CHECKING:
    from gdn.distributed.context import ContextParallel

NUM_SAVED = SAVED.count("Tensor")
# name -> id -> context; those of equal values share a name, so that a new one does not compile a call again
_contexts: "dict[str, weakref.WeakValueDictionary[int, ContextParallel]]" = {}
# group -> name -> the compiled calls that its ranks have compared: alike on all ranks, whichever contexts of
# one name their garbage collections have left
_compared: "weakref.WeakKeyDictionary[ProcessGroup, dict[str, Compared]]" = weakref.WeakKeyDictionary()


def name_context(context: "ContextParallel", values: tuple[Any, ...]) -> str:
    """Return the name of a context among the arguments of the operators. `values` tell it from others."""
    # a group that is made after another one has ended may have its name
    groups = (None if x is None else id(x) for x in context._groups)
    name = f"{hashed(repr((tuple(groups), values))):016x}"
    _contexts.setdefault(name, weakref.WeakValueDictionary())[id(context)] = context
    return name


def find_context(name: str) -> "ContextParallel":
    """Return a context of this name, whose values are those of a living one, and its compared calls."""
    context = next(iter(_contexts[name].values()), None)
    if context is None:
        raise RuntimeError("cp_context: expected the context to live until the backward, got a deleted one")
    of_group = _compared.setdefault(context._groups.whole, {})
    compiled = copy.copy(context)
    object.__setattr__(compiled, "_compared", of_group.setdefault(name, Compared()))
    return compiled


def can_trace(context: "ContextParallel", options: Mapping[str, Any]) -> bool:
    """Return True unless rows of states are given or wanted with offsets, or heads are exchanged."""
    has_rows = options.get("initial_state") is not None or options.get("output_final_state", False)
    return context.exchange != "heads" and not (has_rows and options.get("cu_seqlens") is not None)


def compiled_rule(name: str, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Call gdn::rank_forward; arguments: those of `parse`."""
    names, flags = Problem.declaration.names, Problem.declaration.flags
    given: dict[str, Any] = {n: False if n in flags else None for n in names}
    given["exact"] = True
    given |= {n: x for n, x in arguments.items() if n != "cp_context"}
    if given["scale"] is None:
        given["scale"] = float(given["q"].shape[-1] ** -0.5)
    values = [given[n] for n in names]
    differentiable = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    save = records_gradient(*[given[n] for n in differentiable])
    o, final, *_ = rank_forward(*values, name, save)
    return o, final if given["output_final_state"] else None


def _rows(context: "ContextParallel", x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return how many rows of states this rank has in a compiled call of x [B, T, ...]."""
    if cu_seqlens is not None:
        # each run of a rank but the first may begin with a sequence that an earlier one has
        return int(cu_seqlens.shape[0]) - 1 + context._num_slots
    return len(context._plan("q", int(x.shape[0]), int(x.shape[1]), None, None)[0].pieces)


def _pad(context: "ContextParallel", x: Tensor, cu_seqlens: Tensor | None) -> Callable[[Plan], Plan] | None:
    """Return the function that pads a plan to `_rows`; None without offsets."""
    if cu_seqlens is None:
        return None
    rows = _rows(context, x, cu_seqlens)
    return lambda plan: plan.padded(rows)


def _num_maps(context: "ContextParallel", name: str, p: Problem) -> int:
    """Return at least how many matrices M the backward of a call needs."""
    groups, slots = context._groups, context._num_slots
    if name == "nodes" and groups.within is not None and groups.between is not None:
        g, nodes = groups.within, groups.between
        heads = len(split_heads(p.HV, g.size())[g.rank()])
        own = len(split_heads(heads, nodes.size())[nodes.rank()])
        # a node has at most as many groups of runs as it has runs
        return g.size() * slots * p.B * (heads + nodes.size() * own)
    own = p.HV if name == "gather" else len(split_heads(p.HV, groups.whole.size())[groups.whole.rank()])
    return groups.whole.size() * slots * p.B * own


def _fields(p: Problem) -> dict[str, Any]:
    return dict(zip(p.declaration.names, p.arguments(), strict=True))


def _forward(*args: Any) -> tuple[Tensor, ...]:
    """Implement gdn::rank_forward: o, final_state, the states that the pieces began from, M, Saved."""
    p, (name, save) = Problem.split(args)
    context = find_context(name)
    checked = calls.check_rule(context, _fields(p), save, _pad(context, p.q, p.cu_seqlens))
    exchange = calls.make_exchange(checked.exchange, checked.plan, context._groups, p.backend)
    local = checked.problem
    forward = rule.begin_forward(rule.Call(local, checked.plan, exchange), save, checked.agree)()
    kept: list[Tensor | None] = [None] * (2 + NUM_SAVED)
    if save:
        states = forward.initial_state
        if states is None and p.cu_seqlens is not None:
            # whether a state enters depends on the offsets, the shapes of results do not
            states = p.v.new_zeros(local.state_shape, dtype=local.state_dtype)
        maps = p.v.new_zeros(_num_maps(context, checked.exchange, p), p.K, p.K, dtype=p.state_dtype)
        if forward.maps is not None:
            flat = forward.maps.reshape(-1, p.K, p.K)
            maps[: len(flat)] = flat
        saved = (*forward.saved, *[None] * NUM_SAVED)[:NUM_SAVED]
        kept = [states if states is None else states.to(p.state_dtype), maps, *saved]
    return tuple(as_output(x, p.q) for x in (forward.o.view(p.v.shape), forward.final, *kept))


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    p, (name, save) = Problem.split(args)
    context, q = find_context(name), p.q
    rows, state = _rows(context, q, p.cu_seqlens), (p.V, p.K) if p.state_v_first else (p.K, p.V)

    def states() -> Tensor:
        return q.new_empty(rows, p.HV, *state, dtype=p.state_dtype)

    o = p.v.new_empty(p.v.shape)
    final = states() if p.output_final_state else q.new_empty(0)
    if not save:
        return (o, final, *[q.new_empty(0) for _ in range(2 + NUM_SAVED)])
    chosen = context.exchange or calls.choose(context, calls.form_of(p), context._num_slots)
    maps = q.new_empty(_num_maps(context, chosen, p), p.K, p.K, dtype=p.state_dtype)
    plan = None if p.cu_seqlens is not None else context._plan("q", int(p.B), int(p.T), None, None)[0]
    has_states = plan is None or p.initial_state is not None or (plan.has_exchange and plan.entering)
    entering = states() if has_states else q.new_empty(0)
    if plan is not None and not plan.pieces:
        return (o, final, entering, maps, *[q.new_empty(0) for _ in range(NUM_SAVED)])
    local = p
    if plan is None or plan.offsets is not None:
        # batch rows are side by side, and every one is cut into the pieces of this rank
        packed = [None if x is None else x.flatten(0, 1)[None] for x in (q, p.k, p.v, p.g, p.beta)]
        others = [*p.tensors()[5:7], None, q.new_empty(rows + 1, dtype=torch.int64), None]
        local = p.with_tensors((*packed, *others))
    return (o, final, entering, maps, *saved_fake(local, save))


def _backward(*args: Any) -> tuple[Tensor, ...]:
    """Implement gdn::rank_backward: the gradients of the problem."""
    p, (name, states, maps, *saved, do, dS) = Problem.split(args)
    context = find_context(name)
    given = _fields(p) | {"initial_state": states}
    problem, plan, _ = calls.local_problem(context, given, _pad(context, p.q, p.cu_seqlens))
    chosen = context.exchange or calls.choose(context, calls.form_of(problem), context._num_slots)
    exchange = calls.make_exchange(chosen, plan, context._groups, p.backend)
    if exchange is not None:
        shape = exchange.maps_shape(p.HV, p.K)
        maps = maps[: math.prod(shape[:-2])].view(shape)
    do = None if do is None else calls.flat(do, plan)
    local = rule.begin_backward(rule.Call(problem, plan, exchange), maps, saved, do, dS)()
    gradients = []
    for x, d in zip(p.differentiable, local, strict=True):
        gradients.append(None if x is None or d is None else d.reshape(x.shape).to(x.dtype))
    return tuple(as_output(d, p.q) for d in gradients)


rank_forward = define(
    "rank_forward",
    f"({Problem.declaration.schema}, str context, bool save) -> "
    f"(Tensor o, Tensor final_state, Tensor states, Tensor maps, {SAVED})",
    _forward,
    _forward_fake,
)
rank_backward = define(
    "rank_backward",
    f"({Problem.declaration.schema}, str context, Tensor? states, Tensor? maps, {GIVEN}, Tensor? do, "
    f"Tensor? dfinal_state) -> ({GRADIENTS})",
    _backward,
    lambda *args: gradients_fake(Problem.split(args)[0]),
)


class _Rule(torch.autograd.Function):
    """Differentiate gdn::rank_forward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        output = run_once(rank_forward, *args)
        problem, (ctx.name, _) = Problem.split(args)
        ctx.problem = problem.without_tensors()
        ctx.save_for_backward(*problem.tensors(), *(None if x.dim() == 1 else x for x in output[2:]))
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
        tensors, kept = Problem.split_tensors(ctx.saved_tensors)
        problem = ctx.problem.with_tensors(tensors)
        dS = dS if problem.output_final_state else None
        # also without a gradient: the exchange is in the backward of all ranks or of none
        gradients = rank_backward(*problem.arguments(), ctx.name, *kept, do, dS)
        return requested(gradients, ctx.needs_input_grad)


define_autograd("rank_forward", _Rule)
no_second_derivative("rank_backward")


def compiled_conv(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Call gdn::rank_windows, then the convolution of packed sequences: the pieces of this rank."""
    given = dict(options)
    state, cu_seqlens, cpu = (given.pop(n, None) for n in ("initial_state", "cu_seqlens", "cu_seqlens_cpu"))
    records = records_gradient(x, state)
    windows, offsets = rank_windows(x, state, cu_seqlens, cpu, weight.shape[1], name, records)
    local = x.flatten(0, 1)[None]
    y, final = causal_conv1d(local, weight, bias, initial_state=windows, cu_seqlens=offsets, **given)
    return y.view(x.shape), final


def _windows(*args: Any) -> tuple[Tensor, Tensor]:
    """Implement gdn::rank_windows: the initial states of the local pieces, and their offsets."""
    x, initial_state, cu_seqlens, cpu, width, name, records = args
    context = find_context(name)
    with context._comparing("causal_conv1d") as compare:
        plan, offsets = _conv_plan(context, x, cu_seqlens, cpu)
        words = conv_words(x, width, initial_state, plan, records)
        compare(*words, ("cu_seqlens", Hashed(offsets)))
    if plan.has_exchange and width > 1:
        group = context._groups.whole
        _, wait = halo.start_windows(x, initial_state, plan, offsets, width, group)
        windows = wait()
    elif initial_state is None:
        windows = x.new_zeros(len(plan.pieces), x.shape[2], width - 1)
    else:
        windows = initial_state.clone()
    ends = [0]
    for piece in plan.pieces:
        ends.append(ends[-1] + piece.stop - piece.start)
    return windows.contiguous(), torch.tensor(ends, dtype=torch.int64, device=x.device)


def _conv_plan(
    context: "ContextParallel", x: Tensor, cu_seqlens: Tensor | None, cpu: Tensor | None
) -> tuple[Plan, tuple[int, ...] | None]:
    plan, offsets = context._plan("x", x.shape[0], x.shape[1], cu_seqlens, cpu)
    pad = _pad(context, x, cu_seqlens)
    return (plan if pad is None else pad(plan)), offsets


def _windows_fake(*args: Any) -> tuple[Tensor, Tensor]:
    x, initial_state, cu_seqlens, _, width, name, _ = args
    rows = _rows(find_context(name), x, cu_seqlens)
    dtype = x.dtype if initial_state is None else torch.promote_types(x.dtype, initial_state.dtype)
    windows = x.new_empty(rows, x.shape[2], width - 1, dtype=dtype)
    return windows, x.new_empty(rows + 1, dtype=torch.int64)


def _windows_bwd(*args: Any) -> tuple[Tensor, Tensor]:
    d, x, initial_state, cu_seqlens, cpu, name = args
    context = find_context(name)
    plan, offsets = _conv_plan(context, x, cu_seqlens, cpu)
    if plan.has_exchange and d.shape[-1] > 0:
        dx, drows = halo.windows_bwd(d, x, initial_state, plan, offsets, context._groups.whole)
    else:
        dx, drows = torch.zeros_like(x), None if initial_state is None else d.to(initial_state.dtype).clone()
    return dx.contiguous(), as_output(drows, x)


def _windows_bwd_fake(*args: Any) -> tuple[Tensor, Tensor]:
    _, x, initial_state, *_ = args
    return x.new_empty(x.shape), x.new_empty(0) if initial_state is None else initial_state.new_empty(
        initial_state.shape
    )


_SEQUENCES = "Tensor? initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"
rank_windows = define(
    "rank_windows",
    f"(Tensor x, {_SEQUENCES}, int width, str context, bool records) -> (Tensor windows, Tensor offsets)",
    _windows,
    _windows_fake,
)
rank_windows_bwd = define(
    "rank_windows_bwd",
    f"(Tensor dwindows, Tensor x, {_SEQUENCES}, str context) -> (Tensor dx, Tensor dinitial_state)",
    _windows_bwd,
    _windows_bwd_fake,
)


class _Windows(torch.autograd.Function):
    """Differentiate gdn::rank_windows."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        windows, offsets = run_once(rank_windows, *args)
        x, initial_state, cu_seqlens, cpu, _, ctx.name, _ = args
        ctx.save_for_backward(x, initial_state, cu_seqlens, cpu)
        ctx.mark_non_differentiable(offsets)
        return windows, offsets

    @staticmethod
    def backward(ctx: Any, dwindows: Tensor, _: Any) -> tuple[Any, ...]:
        dx, drows = rank_windows_bwd(dwindows, *ctx.saved_tensors, ctx.name)
        return dx, drows if ctx.needs_input_grad[1] else None, None, None, None, None, None


define_autograd("rank_windows", _Windows)
no_second_derivative("rank_windows_bwd")
for _op in (rank_forward, rank_backward, rank_windows, rank_windows_bwd):
    has_side_effect(_op)
