"""Define the rule as torch operators: gdn::chunk_forward, gdn::chunk_backward, gdn::recurrent_forward.

Each operator has the fields of Problem as arguments, in order. It returns an empty tensor for an output that
is not required. The name of the backend is an argument; the operator selects the backend when it runs. The
fake of chunk_forward also selects one, since the shapes of the saved tensors depend on the backend.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gdn import settings
from gdn.backends import Saved, select
from gdn.problem import Problem, host_offsets
from gdn.problem.check import intercepts_operators
from gdn.problem.inspection import inspect_problem
from gdn.problem.layer import ConvProblem

logger = logging.getLogger("gdn")
library = torch.library.Library("gdn", "DEF")

RULE = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, float scale, "
    "bool output_final_state, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, "
    "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first, "
    "bool exact, bool batch_invariant, str? backend"
)
SAVED = "Tensor? G, Tensor? A_inv, Tensor? S_in, Tensor? v_new, Tensor? q_rstd, Tensor? k_rstd"
NUM_FIELDS = 20  # fields of Problem without `form`
NUM_TENSORS = 10  # tensors among these fields; they come first
NUM_SAVED = 6  # tensors of Saved
NUM_DIFFERENTIABLE = 8


def define(name: str, schema: str, implementation: Any, fake: Any) -> Any:
    """Register the operator gdn::name for every device, with its fake; return the overload."""
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gdn::{name}", fake, lib=library)
    return getattr(torch.ops.gdn, name).default


@dataclass(frozen=True)
class Signature:
    """Hold the names of an operator, its inputs and its outputs, for the messages of debug mode."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("out",)


def guarded(
    signature: Signature,
    device: torch.device,
    tensors: Sequence[Tensor | None],
    run: Any,
    problem: Any = None,
) -> Any:
    """Run the body of an operator without autocast; in debug mode inspect `problem`, log, test finiteness.

    `tensors` are the inputs of the signature, in order; `run` returns its outputs, in order.
    """
    if not settings.debug():
        return _without_autocast(device, run)
    shapes = {name: list(x.shape) for name, x in zip(signature.inputs, tensors, strict=True) if x is not None}
    logger.warning("gdn::%s on %s: %s", signature.name, device, shapes)
    for finding in inspect_problem(problem):
        logger.warning("gdn::%s: %s", signature.name, finding)
    out = _without_autocast(device, run)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # test outputs only: inputs may hold any value in padding, and -inf in g
    outputs = (out,) if isinstance(out, Tensor) else out
    bad = [name for name, x in zip(signature.outputs, outputs, strict=False) if not _is_finite(x)]
    if bad:
        given = [name for name, x in zip(signature.inputs, tensors, strict=True) if not _is_finite(x)]
        cause = "no input holds any; keys that are not normalised and g > 0 let the state grow without bound"
        if given:
            cause = f"inputs that hold them: {', '.join(given)}"
        raise FloatingPointError(
            f"{signature.name}: expected finite outputs, got NaN or Inf in {', '.join(bad)}; {cause}"
        )
    return out


_TENSORS = (
    "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu",
)  # fmt: skip
CHUNK_FORWARD = Signature("chunk_forward", _TENSORS, ("o", "final_state"))
RECURRENT_FORWARD = Signature("recurrent_forward", _TENSORS, ("o", "final_state"))
CHUNK_BACKWARD = Signature(
    "chunk_backward",
    ("do", "dfinal_state"),
    ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dinitial_state"),
)


def _is_finite(x: Tensor | None) -> bool:
    return x is None or not x.is_floating_point() or bool(torch.isfinite(x).all())


def is_autocasting(device: torch.device) -> bool:
    """Return True under autocast for the type of `device`; torch raises for the meta device, so skip it."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def _without_autocast(device: torch.device, run: Any) -> Any:
    if not is_autocasting(device):
        return run()
    with torch.autocast(device.type, enabled=False):
        return run()


def are_plain(*tensors: Tensor | None) -> bool:
    """Return True if `is_plain` holds for the first tensor and no tensor intercepts operators."""
    first = next(x for x in tensors if x is not None)
    return is_plain(first) and not any(x is not None and intercepts_operators(x) for x in tensors)


def is_plain(x: Tensor) -> bool:
    """Return True if no tracer, transform or dispatch mode is active for x.

    An operator without gradient may then call its body directly, which saves 40 us.
    """
    return (
        type(x) is Tensor
        and not x.is_meta
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and _get_current_dispatch_mode() is None
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def no_second_derivative(name: str) -> None:
    """Register an autograd formula of gdn::name, a backward, that raises NotImplementedError.

    The backward itself then runs where autograd records; only differentiating it raises.
    """

    def refuse(ctx: Any, *_gradients: Any) -> Any:
        raise NotImplementedError(f"{name}: expected first derivatives only, got a request for the second")

    torch.library.register_autograd(f"gdn::{name}", refuse, lib=library)


def present(x: Tensor | None, like: Tensor) -> Tensor:
    """Return x contiguous, as the fake declares it; return an empty tensor for None."""
    return like.new_empty(0) if x is None else x.contiguous()


def settled(x: Tensor | None) -> Tensor | None:
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
    problem, save = Problem(*args[:NUM_FIELDS]), args[NUM_FIELDS]
    check_offsets(problem)

    def run() -> tuple[Tensor | None, ...]:
        o, final, saved = select(problem).chunk_forward(problem, save)
        return tuple(map(settled, (o, final, *saved)))

    return guarded(CHUNK_FORWARD, problem.device, args[:NUM_TENSORS], run, problem)


def _chunk_forward_fake(*args: Any) -> tuple[Tensor, ...]:
    problem, save = Problem(*args[:NUM_FIELDS]), args[NUM_FIELDS]
    o, final = _outputs_fake(problem)
    shapes = select(problem).saves(problem) if save else (None,) * NUM_SAVED
    q = problem.q
    saved = (q.new_empty(0) if s is None else q.new_empty(s[0], dtype=s[1]) for s in shapes)
    return (o, final, *saved)


def _outputs_fake(problem: Problem) -> tuple[Tensor, Tensor]:
    o = problem.v.new_empty(problem.v.shape)
    if not problem.output_final_state:
        return o, o.new_empty(0)
    return o, o.new_empty(problem.state_shape, dtype=problem.state_dtype)


def _recurrent_forward(*args: Any) -> tuple[Tensor | None, ...]:
    problem = Problem(*args)
    check_offsets(problem)

    def run() -> tuple[Tensor | None, ...]:
        return tuple(map(settled, select(problem).recurrent_forward(problem)))

    return guarded(RECURRENT_FORWARD, problem.device, args[:NUM_TENSORS], run, problem)


def _chunk_backward(*args: Any) -> tuple[Tensor | None, ...]:
    problem = Problem(*args[:NUM_FIELDS])
    end = NUM_FIELDS + NUM_SAVED
    saved, (do, dS) = Saved(*args[NUM_FIELDS:end]), args[end:]

    def run() -> tuple[Tensor | None, ...]:
        return tuple(map(settled, select(problem).chunk_backward(problem, saved, do, dS)))

    return guarded(CHUNK_BACKWARD, problem.device, (do, dS), run)


def _as_operator(body: Any) -> Any:
    """Wrap a body for registration: replace None by an empty tensor, since an operator returns no None."""

    def run(*args: Any) -> tuple[Tensor, ...]:
        return tuple(present(x, args[0]) for x in body(*args))

    return run


def _chunk_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    problem = Problem(*args[:NUM_FIELDS])
    q = problem.q
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in problem.differentiable)


_OUTPUTS = "Tensor o, Tensor final_state"
chunk_forward = define(
    "chunk_forward",
    f"({RULE}, bool save) -> ({_OUTPUTS}, {SAVED.replace('?', '')})",
    _as_operator(_chunk_forward),
    _chunk_forward_fake,
)
chunk_backward = define(
    "chunk_backward",
    f"({RULE}, {SAVED}, Tensor? do, Tensor? dfinal_state) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dA_log, Tensor ddt_bias, "
    "Tensor dinitial_state)",
    _as_operator(_chunk_backward),
    _chunk_backward_fake,
)
recurrent_forward = define(
    "recurrent_forward",
    f"({RULE}) -> ({_OUTPUTS})",
    _as_operator(_recurrent_forward),
    lambda *args: _outputs_fake(Problem(*args)),
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    """Save the tensors of the problem and, after a chunk_forward with save=True, its saved tensors."""
    args = inputs[:NUM_FIELDS]
    outputs = output[2:] if len(output) > 2 and inputs[NUM_FIELDS] else (None,) * NUM_SAVED
    saved = tuple(None if x is None or x.dim() == 1 else x for x in outputs)
    ctx.options = args[10:]
    ctx.save_for_backward(*args[:10], *saved)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dS: Tensor | None, *_saved: Tensor | None) -> tuple[Any, ...]:
    """Run the chunked backward, which serves both forms: the two compute the same function."""
    tensors = ctx.saved_tensors
    needs = ctx.needs_input_grad
    with_final_state = ctx.options[1]
    if not with_final_state:
        dS = None
    if do is None and dS is None:
        return (None,) * len(needs)
    is_direct = not torch.is_grad_enabled() and are_plain(*tensors, do, dS)
    backward = _chunk_backward if is_direct else chunk_backward
    gradients = backward(*tensors[:10], *ctx.options, *tensors[10:], do, dS)
    return wanted(gradients, needs)


def wanted(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument that needs one, else None."""
    asked = [x if need else None for x, need in zip(gradients, needs, strict=False)]
    return (*asked, *(None,) * (len(needs) - NUM_DIFFERENTIABLE))


def rule(problem: Problem, *, is_recurrent: bool) -> tuple[Tensor, Tensor]:
    """Run the operator with autograd; return o and final_state (empty if it is not required)."""
    p = problem
    if is_recurrent:
        return recurrent_forward(*p.arguments())  # type: ignore[no-any-return]
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in p.differentiable)
    o, final_state, *_ = chunk_forward(*p.arguments(), save)
    return o, final_state


for _op in ("chunk_forward", "recurrent_forward"):
    torch.library.register_autograd(f"gdn::{_op}", _differentiate, setup_context=_keep, lib=library)
no_second_derivative("chunk_backward")
