"""Define the rule as torch operators: gdn::chunk_forward, gdn::chunk_backward, gdn::recurrent_forward.

Each operator has the fields of Problem as arguments, in order, and its schema is derived from them. It
returns an empty tensor for an output that is not required. The name of the backend is an argument; the
operator selects the backend when it runs. The fake of chunk_forward also selects one, since the shapes of
the saved tensors depend on the backend.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from gdn import settings
from gdn._torch_compat import intercepts_operators, is_plain
from gdn.backends import Backend, Gradients, Saved, select, select_backward, select_recurrent
from gdn.problem import Problem, check, host_offsets
from gdn.problem.declaration import Declaration, schema_of
from gdn.problem.inspection import inspect_problem
from gdn.problem.layer import ConvProblem

logger = logging.getLogger("gdn")
library = torch.library.Library("gdn", "DEF")


def define(name: str, schema: str, implementation: Any, fake: Any) -> Any:
    """Register the operator gdn::name for every device, with its fake; return the overload."""
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gdn::{name}", fake, lib=library)
    return getattr(torch.ops.gdn, name).default


def define_writer(name: str, declaration: Declaration, run: Callable[..., Any]) -> Any:
    """Register an operator that only writes tensors among its arguments; return the overload."""
    return define(name, f"({declaration.schema}) -> ()", run, lambda *_: None)


@dataclass(frozen=True)
class Signature:
    """Hold the names of an operator, its inputs and its outputs, for the messages of debug mode."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("out",)


def guarded(
    signature: Signature,
    device: torch.device,
    run: Callable[[], Any],
    problem: Any = None,
    tensors: Sequence[Tensor | None] | None = None,
) -> Any:
    """Run the body of an operator without autocast; in debug mode inspect `problem`, log, test finiteness.

    `run` returns the outputs of the signature, in order. `tensors` are its inputs, in order; without them the
    inputs are fields of `problem`.
    """
    if not settings.debug():
        return without_autocast(device, run)
    if tensors is None:
        tensors = [getattr(problem, name) for name in signature.inputs]
    inputs = dict(zip(signature.inputs, tensors, strict=True))
    shapes = {name: list(x.shape) for name, x in inputs.items() if x is not None}
    logger.warning("gdn::%s on %s: %s", signature.name, device, shapes)
    for finding in inspect_problem(problem):
        logger.warning("gdn::%s: %s", signature.name, finding)
    out = without_autocast(device, run)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # test outputs only: inputs may hold any value in padding, and -inf in g
    outputs = (out,) if isinstance(out, Tensor) else out
    bad = [name for name, x in zip(signature.outputs, outputs, strict=False) if not _is_finite(x)]
    if bad:
        given = [name for name, x in inputs.items() if not _is_finite(x)]
        cause = "no input holds any; keys that are not normalised and g > 0 let the state grow without bound"
        if given:
            cause = f"inputs that hold them: {', '.join(given)}"
        raise FloatingPointError(
            f"{signature.name}: expected finite outputs, got NaN or Inf in {', '.join(bad)}; {cause}"
        )
    return out


_GRADIENTS = tuple(f.name for f in fields(Gradients))
DIFFERENTIABLE = tuple(name.removeprefix("d") for name in _GRADIENTS)  # names of tensors that have gradients
CHUNK_FORWARD = Signature("chunk_forward", Problem.declaration.tensors, ("o", "final_state"))
RECURRENT_FORWARD = Signature("recurrent_forward", Problem.declaration.tensors, ("o", "final_state"))
CHUNK_BACKWARD = Signature("chunk_backward", ("do", "dfinal_state"), _GRADIENTS)


def _is_finite(x: Tensor | None) -> bool:
    return x is None or not x.is_floating_point() or bool(torch.isfinite(x).all())


def is_autocasting(device: torch.device) -> bool:
    """Return True under autocast for the type of `device`; torch raises for the meta device, so skip it."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device, run: Any) -> Any:
    if not is_autocasting(device):
        return run()
    with torch.autocast(device.type, enabled=False):
        return run()


def are_plain(*tensors: Tensor | None) -> bool:
    """Return True if `is_plain` holds for the first tensor and no tensor intercepts operators."""
    first, *others = (x for x in tensors if x is not None)
    # the type first: 13 calls of a function take 1 us longer; `is_plain` has looked at the first tensor's
    return is_plain(first) and not any(type(x) is not Tensor and intercepts_operators(x) for x in others)


def runs_directly(*tensors: Tensor | None) -> bool:
    """Return True if the body of an operator with a gradient may be called in its place.

    No gradient is recorded, and nobody has to see the operator. The dispatcher and the autograd of an
    operator take 10 us and more before they find that out.
    """
    # a trace of TorchScript has an operator, and would miss the launches of a body
    return not check.records_gradient(*tensors) and are_plain(*tensors) and not torch.jit.is_tracing()


def no_second_derivative(name: str) -> None:
    """Register an autograd formula of gdn::name, a backward, that raises NotImplementedError.

    The backward itself then runs where autograd records; only differentiating it raises.
    """

    def refuse(ctx: Any, *_gradients: Any) -> Any:
        raise NotImplementedError(f"{name}: expected first derivatives only, got a request for the second")

    torch.library.register_autograd(f"gdn::{name}", refuse, lib=library)


def define_autograd(name: str, function: type[torch.autograd.Function]) -> None:
    """Register an autograd function, which takes all arguments, as the formula of gdn::name."""
    library.impl(name, lambda *args: function.apply(*args), "Autograd")


def as_output(x: Tensor | None, like: Tensor) -> Tensor:
    """Return x contiguous, as the fake declares it; return an empty tensor for None."""
    return like.new_empty(0) if x is None else x.contiguous()


def make_contiguous(x: Tensor | None) -> Tensor | None:
    """Return x contiguous, or None."""
    return None if x is None else x.contiguous()


def check_offsets(problem: Problem | ConvProblem) -> None:
    """Raise for bad cu_seqlens before anything is computed; offsets on a device only in debug mode."""
    if problem.cu_seqlens is not None:
        host_offsets(problem.cu_seqlens, problem.cu_seqlens_cpu, problem.T, read_device=settings.debug())


def check_backend(problem: Problem) -> None:
    """Raise NotImplementedError unless a backend supports the problem."""
    select(problem)


def _chunk_forward(*args: Any) -> tuple[Tensor | None, ...]:
    problem, (save,) = Problem.split(args)
    check_offsets(problem)

    def run() -> tuple[Tensor | None, ...]:
        o, final, saved = select(problem).chunk_forward(problem, save)
        return tuple(map(make_contiguous, (o, final, *saved)))

    return guarded(CHUNK_FORWARD, problem.device, run, problem)


def _chunk_forward_fake(*args: Any) -> tuple[Tensor, ...]:
    problem, (save,) = Problem.split(args)
    return (*_outputs_fake(problem), *saved_fake(problem, save))


def saved_fake(problem: Problem, save: bool) -> list[Tensor]:
    """Return the tensors of Saved, in order, without contents; an empty one for each that is not saved."""
    shapes = select(problem).saves(problem) if save else [None for _ in fields(Saved)]
    q = problem.q
    return [q.new_empty(0) if shape is None else _empty(q, *shape) for shape in shapes]


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _outputs_fake(problem: Problem) -> tuple[Tensor, Tensor]:
    o = problem.v.new_empty(problem.v.shape)
    if not problem.output_final_state:
        return o, o.new_empty(0)
    return o, o.new_empty(problem.state_shape, dtype=problem.state_dtype)


def _recurrent_forward(*args: Any) -> tuple[Tensor | None, ...]:
    problem = Problem(*args)
    check_offsets(problem)

    def run() -> tuple[Tensor | None, ...]:
        return tuple(map(make_contiguous, select_recurrent(problem).recurrent_forward(problem)))

    return guarded(RECURRENT_FORWARD, problem.device, run, problem)


def _chunk_backward(*args: Any) -> tuple[Tensor | None, ...]:
    problem, (*kept, do, dS) = Problem.split(args)

    def run() -> tuple[Tensor | None, ...]:
        backward = select_backward(problem).chunk_backward
        saved = complete_saved(problem, Saved(*kept), select(problem) if problem.recompute else None)
        return tuple(map(make_contiguous, backward(problem, saved, do, dS)))

    return guarded(CHUNK_BACKWARD, problem.device, run, tensors=(do, dS))


def complete_saved(problem: Problem, saved: Saved, forward: Backend | None) -> Saved:
    """Return the saved tensors of a forward; with `recompute`, also those that `forward` computes again."""
    if not problem.recompute:
        return saved
    assert forward is not None
    return forward.recompute_saved(problem, saved)


def _as_operator(body: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Wrap a body for registration: replace None by an empty tensor, since an operator returns no None."""

    def run(q: Tensor, *args: Any) -> tuple[Tensor, ...]:
        return tuple(as_output(x, q) for x in body(q, *args))

    return run


def _chunk_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    problem, _ = Problem.split(args)
    return gradients_fake(problem)


def gradients_fake(problem: Problem) -> tuple[Tensor, ...]:
    """Return the gradients of a problem without contents; an empty one for each tensor that is None."""
    q = problem.q
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in problem.differentiable)


_RULE = Problem.declaration.schema
_OUTPUTS = "Tensor o, Tensor final_state"
SAVED, GIVEN, GRADIENTS = schema_of(Saved), schema_of(Saved, "?"), schema_of(Gradients)
chunk_forward = define(
    "chunk_forward",
    f"({_RULE}, bool save) -> ({_OUTPUTS}, {SAVED})",
    _as_operator(_chunk_forward),
    _chunk_forward_fake,
)
chunk_backward = define(
    "chunk_backward",
    f"({_RULE}, {GIVEN}, Tensor? do, Tensor? dfinal_state) -> ({GRADIENTS})",
    _as_operator(_chunk_backward),
    _chunk_backward_fake,
)
recurrent_forward = define(
    "recurrent_forward",
    f"({_RULE}) -> ({_OUTPUTS})",
    _as_operator(_recurrent_forward),
    lambda *args: _outputs_fake(Problem(*args)),
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    """Save the tensors of the problem and, after a chunk_forward with save=True, its saved tensors."""
    problem, rest = Problem.split(inputs)
    _, _, *saved = output
    # gdn::recurrent_forward has no `save`
    kept = Saved(*(None if x is None or x.dim() == 1 else x for x in saved)) if any(rest) else Saved()
    ctx.problem = problem.without_tensors()
    ctx.save_for_backward(*problem.tensors(), *kept)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dS: Tensor | None, *_saved: Tensor | None) -> tuple[Any, ...]:
    """Run the chunked backward, which serves both forms: the two compute the same function."""
    tensors, saved = Problem.split_tensors(ctx.saved_tensors)
    problem, needs = ctx.problem.with_tensors(tensors), ctx.needs_input_grad
    if not problem.output_final_state:
        dS = None
    if do is None and dS is None:
        return (None,) * len(needs)
    is_direct = not torch.is_grad_enabled() and are_plain(*tensors, *saved, do, dS)
    backward = _chunk_backward if is_direct else chunk_backward
    return requested(backward(*problem.arguments(), *saved, do, dS), needs)


def requested(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument that needs one, else None; `gradients` are of the first ones."""
    chosen = [x if need else None for x, need in zip(gradients, needs, strict=False)]
    return (*chosen, *(None,) * (len(needs) - len(chosen)))


def rule(problem: Problem, *, is_recurrent: bool) -> tuple[Tensor, Tensor]:
    """Run the operator with autograd; return o and final_state (empty if it is not required)."""
    p = problem
    if is_recurrent:
        return recurrent_forward(*p.arguments())  # type: ignore[no-any-return]
    save = check.records_gradient(*p.differentiable)
    o, final_state, *_ = chunk_forward(*p.arguments(), save)
    return o, final_state


for _op in ("chunk_forward", "recurrent_forward"):
    torch.library.register_autograd(f"gdn::{_op}", _differentiate, setup_context=_keep, lib=library)
no_second_derivative("chunk_backward")
