"""Check the calls of a context and run them in two steps, between which the caller may launch other work.

    finish = begin_rule(context, arguments);    other work;    o, states = finish()

The exchange of the rule and the halo of the convolution are on their way between the two steps.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gdn import settings
from gdn._torch_compat import flat_group, is_plain
from gdn.distributed import check as comparison
from gdn.distributed import cost, halo, heads, rule
from gdn.distributed.exchange import Exchange, Gather, Owner
from gdn.distributed.local import NAMES
from gdn.distributed.nodes import Nodes
from gdn.distributed.plan import Plan
from gdn.ops import library
from gdn.ops.conv import causal_conv1d
from gdn.ops.fastpath import key_of
from gdn.problem import Problem, parse
from gdn.problem import check as argument
from gdn.problem.check import records_gradient
from gdn.problem.layer import parse_conv

if TYPE_CHECKING:
    from gdn.distributed.context import ContextParallel

Results: TypeAlias = tuple[Tensor, Tensor | None]
Offsets: TypeAlias = tuple[int, ...] | None


class Groups(NamedTuple):
    """Hold the process groups of a context: all ranks and, on a mesh of two dimensions, those of nodes."""

    whole: ProcessGroup
    between: ProcessGroup | None = None
    within: ProcessGroup | None = None


def groups_of(mesh: Any) -> Groups:
    """Return the process groups of a mesh; raise TypeError or ValueError for one that is no sequence's."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim == 2 and mesh.mesh_dim_names is not None:
            between, within = mesh.mesh_dim_names
            return Groups(flat_group(mesh), mesh.get_group(between), mesh.get_group(within))
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh: expected one dimension, or two with names (nodes, ranks of a node), got {mesh.ndim}; "
                "pass mesh['cp'], for instance"
            )
        return Groups(mesh.get_group())
    if not isinstance(mesh, ProcessGroup):
        raise TypeError(f"mesh: expected a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    return Groups(mesh)


class Checked(NamedTuple):
    """Hold a checked call: its plan, the global offsets, the name of the exchange.

    records   whether the call records gradients, on all ranks
    agree     waits until all ranks have compared the call, and raises if they differ; call it before any
              payload
    """

    problem: Problem
    plan: Plan
    offsets: Offsets
    exchange: str
    records: bool
    agree: Callable[[], None]


def begin_rule(context: "ContextParallel", arguments: Mapping[str, Any]) -> Callable[[], Results]:
    """Begin `chunk_gated_delta_rule` for the tokens of this rank; arguments: those of `parse`."""
    key = _repeated_key(context, arguments)
    repeated, agree = context._compared.repeated.get(key), _no_wait
    if repeated is None:
        checked = check_rule(context, arguments)
        problem, plan, offsets, name, records, agree = checked
        if name == "heads":
            agree()
            whole = heads.make_heads(plan, offsets, problem.H, context._groups.whole)
            # whole sequences: the batch rows are not side by side, and offsets are global
            tokens = {x: arguments[x] for x in ("q", "k", "v", "g", "beta")}
            tokens["cu_seqlens"] = arguments.get("cu_seqlens")
            given = replace(problem, **tokens, cu_seqlens_cpu=None)
            return lambda: heads.rule(given, whole)
        exchange = make_exchange(name, plan, context._groups, problem.backend)
        call = rule.Call(problem, plan, exchange, records, problem.initial_state is not None)
        repeated = call.without_tensors()
        if key is not None and agree is _no_wait:
            context._compared.repeat(key, repeated)
    else:
        tensors = [arguments.get(name) for name in NAMES]
        tensors[:5] = [None if x is None else flat(x, repeated.plan) for x in tensors[:5]]
        call = repeated.with_tensors(tensors)
    finish, shape = rule.begin_rule(call, repeated, agree), arguments["v"].shape

    def rest() -> Results:
        o, final = finish()
        return o.view(shape), final

    return rest


def _repeated_key(context: "ContextParallel", arguments: Mapping[str, Any]) -> Hashable:
    """Return all values that the checks of a call read; None where they read more: see `gdn.ops.fastpath`.

    Only a call that all ranks have compared is repeated, so that none of them waits for the others alone.
    """
    q = arguments["q"]
    if context.check != "plan" or arguments.get("cu_seqlens") is not None or type(q) is not Tensor:
        return None
    asked, is_debugging = settings.of_call()
    if is_debugging or not is_plain(q) or torch.is_autocast_enabled(q.device.type):
        return None
    tensors, options = Problem.declaration.tensors, Problem.declaration.options
    given = tuple(arguments.get(name) for name in tensors)
    try:
        records = records_gradient(*[arguments.get(name) for name in NAMES])
        key = key_of("rule of a rank", asked, given, (*[arguments.get(name) for name in options], records))
        hash(key)
    except (AttributeError, TypeError, RuntimeError):
        # an argument of the wrong kind: the checks raise the error that names it
        return None
    return key


def _no_wait() -> None:
    """Wait for nothing: the call was compared before."""


def check_rule(
    context: "ContextParallel", arguments: Mapping[str, Any], records: bool | None = None,
    pad: Callable[[Plan], Plan] | None = None,
) -> Checked:  # fmt: skip
    """Check a call, and start to compare it on all ranks.

    records: whether the call has a gradient, if autograd does not see it; pad: changes the plan
    """
    pending: list[Callable[[], None]] = []
    with context._comparing("chunk_gated_delta_rule", pending) as compare:
        problem, plan, offsets = local_problem(context, arguments, pad)
        name = context.exchange or choose(context, form_of(problem), context._num_slots)
        if name == "heads":
            heads.check_heads(problem.H, context.world_size)
        records = records_gradient(*problem.differentiable) if records is None else records
        compare(
            *comparison.rule_words(problem, plan, records),
            ("exchange", name),
            ("cu_seqlens", comparison.Hashed(offsets)),
        )
    (agree,) = pending or (_no_wait,)
    return Checked(problem, plan, offsets, name, records, agree)


def make_exchange(name: str, plan: Plan, groups: Groups, backend: str | None = None) -> Exchange | None:
    """Return an exchange of states by its name; None if no sequence crosses a border, on any rank.

    backend: the name of the one that folds the states of runs; None: chosen automatically
    """
    if not plan.has_exchange:
        return None
    if name == "nodes":
        assert groups.between is not None and groups.within is not None
        # with one rank a node, or one node, one of the two levels would send nothing
        if min(groups.between.size(), groups.within.size()) > 1:
            return Nodes(plan, groups.between, groups.within, backend)
    return (Gather if name == "gather" else Owner)(plan, groups.whole, backend)


def form_of(problem: Problem, num_tokens: int = 0) -> cost.Form:
    """Return the sizes of a call for `cost`."""
    p = problem
    width = 8 if p.q.dtype == torch.float64 else 4
    return cost.Form(p.H, p.HV, p.K, p.V, num_tokens, p.q.element_size(), width)


def choose(context: "ContextParallel", form: cost.Form, num_slots: int) -> str:
    """Return the exchange of states that the model of costs prefers on this mesh."""
    return cost.choose(form, context.world_size, machine_of(context), num_slots, exchanges_of(context))


def exchanges_of(context: "ContextParallel") -> tuple[str, ...]:
    """Return the exchanges of states that the mesh allows."""
    return cost.FLAT if context._groups.within is None else cost.BUILT


def machine_of(context: "ContextParallel") -> cost.Machine:
    """Return the assumed machine: nodes as the mesh has them, else of the default size."""
    within = context._groups.within
    return cost.Machine() if within is None else cost.Machine(node=within.size())


def begin_conv(
    context: "ContextParallel", x: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]
) -> Callable[[], Results]:
    """Begin `causal_conv1d` for the tokens of this rank: start to fetch the inputs before each run."""
    given = dict(options)
    cu_seqlens, cu_seqlens_cpu = given.pop("cu_seqlens", None), given.pop("cu_seqlens_cpu", None)
    initial_state = given.pop("initial_state", None)
    with context._comparing("causal_conv1d") as compare:
        argument.shape("x", require_tensor("x", x), "B T D", {})
        plan, offsets = context._plan("x", x.shape[0], x.shape[1], cu_seqlens, cu_seqlens_cpu)
        local = flat(x, plan)
        given |= local_offsets(plan, x.device)
        parse_conv(
            x=local, weight=weight, bias=bias, initial_state=initial_state, state=None, state_index=None,
            has_initial_state=None, null_slot=None, **given,
        )  # fmt: skip
        compare(
            *comparison.conv_words(
                x, weight.shape[1], initial_state, plan, records_gradient(x, initial_state)
            ),
            ("cu_seqlens", comparison.Hashed(offsets)),
        )
    wait = None
    if plan.has_exchange and weight.shape[1] > 1:
        group = context._groups.whole
        local, wait = halo.start_windows(local, initial_state, plan, offsets, weight.shape[1], group)

    def finish() -> Results:
        window = initial_state if wait is None else wait()
        y, final = causal_conv1d(local, weight, bias, initial_state=window, **given)
        return y.view(x.shape), final

    return finish


def local_problem(
    context: "ContextParallel", arguments: Mapping[str, Any], pad: Callable[[Plan], Plan] | None
) -> tuple[Problem, Plan, Offsets]:
    """Check a call; return the problem of this rank: local tokens and offsets, a row for each piece."""
    given = dict(arguments)
    cu_seqlens, cu_seqlens_cpu = given.pop("cu_seqlens", None), given.pop("cu_seqlens_cpu", None)
    q = require_tensor("q", given["q"])
    argument.shape("q", q, "B T H K", {})
    plan, offsets = context._plan("q", q.shape[0], q.shape[1], cu_seqlens, cu_seqlens_cpu)
    plan = plan if pad is None else pad(plan)
    for name in ("q", "k", "v", "g", "beta"):
        if isinstance(given.get(name), Tensor):
            given[name] = flat(given[name], plan)
    problem = parse(**given, **local_offsets(plan, q.device))
    if problem.recompute:
        raise NotImplementedError("recompute: expected False with cp_context, got True")
    argument.no_tangent("chunk_gated_delta_rule", **dict(zip(NAMES, problem.differentiable, strict=True)))
    library.check_backend(problem)
    return problem, plan, offsets


def require_tensor(name: str, x: Any) -> Tensor:
    """Return x; raise TypeError unless it is a tensor."""
    argument.tensor(name, x)
    return x  # type: ignore[no-any-return]


def flat(x: Tensor, plan: Plan) -> Tensor:
    """Return the batch rows side by side where the local call is packed; else x."""
    return x if plan.offsets is None or plan.batch == 1 else x.flatten(0, 1)[None]


def local_offsets(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Return the local offsets as arguments, on the device and on the CPU."""
    return {"cu_seqlens": plan.cu_seqlens(device), "cu_seqlens_cpu": plan.cu_seqlens(torch.device("cpu"))}
