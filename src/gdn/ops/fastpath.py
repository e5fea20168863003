"""Repeat a call that differs from an earlier one only in the addresses of its tensors.

Why. A layer, a training step and an engine make the same call again and again, on other memory. The checks of
a decode cost 20 us of host time and those of the rule as much; the dispatcher and the autograd of the torch
operators cost 250 us for a forward and a backward. A decode of a small batch takes the GPU 7 us, so without a
fast path the host is what limits the speed.

What is cached. `CachedCall` holds a call whose checks have passed, without its tensors: the problem, the
backend that was selected for it, and the launch that the backend has returned, if it has. A second call with
the same key skips the checks, the selection and the dispatcher. It sets its tensors into the problem, or
passes them to the launch. The rule with gradients goes through one autograd function, which calls the backend
in both directions.

What the key holds. All values that the checks read: of each tensor the class, shape, strides, dtype and
device, every option with its type, and GDN_BACKEND. Nothing is keyed by the id of an object, and no content
of a tensor decides anything. A call with another key is checked like a first one; at 4,096 keys the cache is
emptied.

What bypasses it. A call is checked each time, and nothing is cached, where the checks read more than the key
holds or where someone has to see the operator: under a compiler's trace, a transform, a dispatch mode or
forward-mode differentiation, and in debug mode; for the rule under autocast, which changes the tensors; for
the serving functions where a tensor requires a gradient, where a written one is an inference tensor outside
inference mode, and where offsets are on the CPU, since their values are checked. The rule checks offsets on
the CPU in every call.

What backends may rely on. Problems with one `layout_key` differ only in the addresses of their tensors, so a
backend may use it as the key of its plans. It is None where a call is not repeated. Only the caller's own
results leave such a call: no saved tensor is returned to anyone but the backward.

Gain. 6 us for the key in the place of 20 us for the checks of a decode; 250 us for a forward with backward.
`gdn bench` measures the host time of both.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gdn import settings
from gdn._torch_compat import is_plain, keeps_graph
from gdn.backends import Backend, Saved, select, select_backward, select_recurrent
from gdn.ops.library import (
    CHUNK_BACKWARD,
    CHUNK_FORWARD,
    DIFFERENTIABLE,
    RECURRENT_FORWARD,
    Signature,
    are_plain,
    check_offsets,
    chunk_backward,
    complete_saved,
    define_writer,
    guarded,
    make_contiguous,
    requested,
    rule,
)
from gdn.problem import Problem, check
from gdn.problem.declaration import Declared

Tensors = tuple[Tensor | None, ...]

_calls: dict[Hashable, "CachedCall"] = {}
_MOST_CALLS = 4096


@dataclass(frozen=True)
class CachedCall:
    """Hold a checked call without its tensors, for all calls that differ only in the addresses of tensors.

    `launch` takes the tensors of a call in order and writes its results; None if the backend has none to
    repeat. `is_repeated` is False for a call that is not stored: it may be in debug mode or under autocast.
    `backward` is the backend of the rule's backward, None for other functions.
    """

    signature: Signature
    problem: Any  # each tensor is None
    backend: Backend
    launch: Callable[..., None] | None = None
    output: torch.Size | None = None  # shape of `out`, for calls that pass none
    is_repeated: bool = True
    reads_offsets: bool = False
    backward: Backend | None = None

    def write(self, *tensors: Tensor | None) -> None:
        """Run a function of the backend that writes its results and has returned no launch."""
        problem = self.problem.with_tensors(tensors)
        function = getattr(self.backend, self.signature.name)
        guarded(self.signature, problem.out.device, lambda: function(problem))

    def compute(self, tensors: Tensors, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
        """Run the rule; return o, final_state and the tensors saved for a backward."""
        problem = self.problem.with_tensors(tensors)
        if self.reads_offsets:
            check_offsets(problem)
        if not self.is_repeated:
            return self._compute_guarded(problem, tensors, save)
        if self.signature is CHUNK_FORWARD:
            o, final, saved = self.backend.chunk_forward(problem, save)
        else:
            o, final = self.backend.recurrent_forward(problem)
            saved = Saved()
        return o.contiguous(), make_contiguous(final), saved

    def _compute_guarded(
        self, problem: Problem, tensors: Tensors, save: bool
    ) -> tuple[Tensor, Tensor | None, Saved]:
        body, saved = replace(self, is_repeated=True, reads_offsets=False), Saved()

        def run() -> Tensors:
            nonlocal saved
            o, final, saved = body.compute(tensors, save)
            return (o, final, *saved)

        o, final, *_ = guarded(self.signature, problem.device, run, problem)
        return o, final, saved


class _Rule(torch.autograd.Function):
    """Differentiate a call. Both forms use the chunked backward, since they compute the same function."""

    @staticmethod
    def forward(
        ctx: Any, call: CachedCall, owns_keys: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        o, final, saved = call.compute(tensors, True)
        ctx.call, ctx.owns_keys = call, owns_keys
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Any, ...]:
        _, _, *needs = ctx.needs_input_grad
        if do is None and dS is None:
            return (None, None, *(None for _ in needs))
        call = ctx.call
        assert call.backward is not None
        tensors, saved = Problem.split_tensors(ctx.saved_tensors)
        # no layout key: saved-tensor hooks may have changed the strides
        problem = call.problem.with_tensors(tensors, layout_key=None)
        if torch.is_grad_enabled() or not are_plain(*tensors, do, dS):
            gradients = chunk_backward(*problem.arguments(), *saved, do, dS)
        else:
            last = replace(problem, may_overwrite=True) if ctx.owns_keys and _is_last(problem) else problem

            def run() -> Tensors:
                kept = complete_saved(problem, Saved(*saved), call.backend)
                gradients = call.backward.chunk_backward(last, kept, do, dS)
                return tuple([make_contiguous(x) for x in gradients])

            gradients = guarded(CHUNK_BACKWARD, problem.device, run, tensors=(do, dS))
        return (None, None, *requested(gradients, needs))


def _is_last(problem: Problem) -> bool:
    """Return True if no other backward reads the saved tensors of this one.

    A backward in a CUDA graph may be replayed more often than its forward.
    """
    is_recorded = problem.q.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (is_recorded or keeps_graph())


@dataclass(frozen=True)
class RuleFunction:
    """Describe a public function of the rule: its name, its operator, and the check of its arguments.

    owns_keys: q and k of a call are tensors that nobody else reads, so a backward may store dq and dk there.
    """

    name: str
    signature: Signature
    parse: Callable[[Tensors, tuple[Any, ...]], Problem]
    owns_keys: bool = False

    def __call__(self, q: Tensor, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        """Run the rule, from the cache if possible; return o and final_state.

        tensors, options: the arguments in the order of Problem, and then those that are no fields of it.
        """
        key, call = None, None
        try:
            asked, is_debugging = settings.of_call()
            # under autocast the checks change the dtype of q
            if is_plain(q) and not is_debugging and not torch.is_autocast_enabled(q.device.type):
                key = key_of(self.name, asked, tensors, options)
                call = _calls.get(key)
        except (AttributeError, TypeError, RuntimeError):
            # an argument of the wrong kind: the checks raise the error that names it
            key = None
        if call is None:
            problem = self._check(tensors, options)
            if not is_plain(problem.q):
                # a tracer or a transform has to see the operator
                o, S = rule(problem, is_recurrent=self.signature is RECURRENT_FORWARD)
                return o, S if problem.output_final_state else None
            call, tensors = self._cached(problem, key is not None), problem.tensors()
            if key is not None:
                store(key, call)
        if torch.is_grad_enabled():
            for x in tensors:
                if x is not None and x.requires_grad:
                    return _Rule.apply(call, self.owns_keys, *tensors)  # type: ignore[no-any-return]
        o, final_state, _ = call.compute(tensors, False)
        return o, final_state

    def _check(self, tensors: Tensors, options: tuple[Any, ...]) -> Problem:
        problem = self.parse(tensors, options)
        check.no_tangent(self.name, **{name: getattr(problem, name) for name in DIFFERENTIABLE})
        return problem

    def _cached(self, p: Problem, is_repeated: bool) -> CachedCall:
        is_on_host = p.cu_seqlens is not None and (
            p.cu_seqlens_cpu is not None or p.cu_seqlens.device.type == "cpu"
        )
        has_offsets = p.cu_seqlens is not None and not is_repeated
        layout_key = object() if is_repeated else None
        return CachedCall(
            self.signature,
            replace(p, layout_key=layout_key).without_tensors(),
            select_recurrent(p) if self.signature is RECURRENT_FORWARD else select(p),
            is_repeated=is_repeated,
            reads_offsets=is_on_host or has_offsets,
            backward=select_backward(p),
        )


class PoolFunction:
    """Describe a public function that writes its result into `out` and its states into pools."""

    def __init__(
        self, signature: Signature, declares: type[Declared], parse: Callable[..., Any], operator: Any = None
    ) -> None:
        """Describe a function and register its operator.

        signature  the operator's name, and the fields of the problem that debug mode tests for NaN
        declares   the class whose fields are the arguments of the function; `out` is the last tensor
        parse      checks the arguments, given by name, and returns the problem
        operator   the operator of another function whose problem is the same; None: register one
        """

        def body(*args: Any) -> None:
            self.run(declares(*args))

        arguments = declares.declaration
        self.name = declares.__name__
        self.signature, self.arguments, self.parse = signature, arguments, parse
        self.operator = define_writer(signature.name, arguments, body) if operator is None else operator
        position = arguments.tensors.index
        self._offsets = position("cu_seqlens") if "cu_seqlens" in arguments.tensors else None
        self._written = tuple(position(name) for name in arguments.written)

    def __call__(
        self, like: Tensor, tensors: Tensors, out: Tensor | None, options: tuple[Any, ...]
    ) -> Tensor:
        """Run the function, from the cache if possible, and return `out`.

        tensors, options: the arguments, in order. like: a tensor of the device and dtype of `out`.
        """
        given, key, call = (*tensors, out), None, None
        try:
            asked, is_debugging = settings.of_call()
            if is_plain(like) and not is_debugging:
                key = self._key(asked, given, options)
                call = _calls.get(key)
        except (AttributeError, TypeError, RuntimeError):
            # an argument of the wrong kind: the checks raise the error that names it
            key = None
        if call is None:
            return self._first(key, like, given, options)
        if out is None:
            out = like.new_empty(call.output)  # type: ignore[arg-type]
        if call.launch is None:
            call.write(*tensors, out)
        else:
            call.launch(*tensors, out)
        return out

    def _key(self, asked: str | None, given: Tensors, options: tuple[Any, ...]) -> Hashable:
        """Return the key of a call; None where its checks read more than a key holds."""
        if self._offsets is not None:
            cu_seqlens = given[self._offsets]
            if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
                return None
        if torch.is_grad_enabled():
            for x in given:
                if x is not None and x.requires_grad:
                    return None
        if not torch.is_inference_mode_enabled():
            for i in self._written:
                x = given[i]
                if x is not None and x.is_inference():
                    return None
        return key_of(self.name, asked, given, options)

    def _first(self, key: Hashable, like: Tensor, given: Tensors, options: tuple[Any, ...]) -> Tensor:
        """Check and run a call; run it as a torch operator where a tracer or transform is active."""
        problem = self.parse(**dict(zip(self.arguments.names, (*given, *options), strict=True)))
        if not is_plain(like):
            self.operator(*problem.arguments())
            return self.result(problem)
        launch = self.run(problem)
        call = None if key is None else self.cache(problem, launch, given)
        if call is not None:
            store(key, call)
        return self.result(problem)

    def run(self, problem: Any) -> Any:
        """Run the function of the backend; return its launch for later calls, or None.

        This is the body of the torch operator, too.
        """
        if self._offsets is not None and problem.cu_seqlens is not None:
            problem.token_ranges(read_device=settings.debug())
        launch = None

        def run() -> Tensors:
            nonlocal launch
            launch = getattr(select(problem), self.signature.name)(problem)
            return (problem.out,)

        guarded(self.signature, problem.out.device, run, problem)
        return launch

    def result(self, problem: Any) -> Tensor:
        """Return the result of a call from the problem that it has run."""
        out: Tensor = problem.out
        return out

    def cache(self, problem: Any, launch: Callable[..., None] | None, given: Tensors) -> CachedCall | None:
        """Return what later calls repeat; None if each of them is checked."""
        output, backend = problem.out.shape, select(problem)
        return CachedCall(self.signature, problem.without_tensors(), backend, launch, output)


def key_of(name: str, asked: str | None, tensors: Tensors, options: tuple[Any, ...]) -> Hashable:
    """Return the key of a call of a function under GDN_BACKEND: all values that its checks read."""
    values: list[Any] = [name, asked, *options, *map(type, options)]
    for x in tensors:
        if x is None:
            values.append(None)
        else:
            values += (type(x), x.shape, x.stride(), x.dtype, x.device)
    return tuple(values)


def store(key: Hashable, call: CachedCall) -> None:
    """Store the call that later ones with this key repeat."""
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[key] = call


@contextmanager
def forget_recorded() -> Iterator[None]:
    """Forget the calls that are stored without a launch while launches are recorded instead of run.

    Their backend has returned none to repeat. Calls of the rule have none at any time.
    """
    before = set(_calls)
    try:
        yield
    finally:
        for key in _calls.keys() - before:
            call = _calls.get(key)
            if call is not None and call.launch is None and call.backward is None:
                _calls.pop(key, None)
