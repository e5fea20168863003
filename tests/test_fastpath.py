"""Test that a problem's fields are the only declaration of a call, and the way of a call that is repeated."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gdn
from gdn.backends import Saved, eager
from gdn.ops import fastpath
from gdn.ops.library import Signature, are_plain
from gdn.problem.declaration import WRITTEN, Declared, SymInt, declared
from gdn.problem.layer import ConvProblem
from gdn.problem.rule import Problem
from gdn.problem.serving import DecodeProblem

PACKAGE = Path(gdn.__file__).parent
B, H, HV, K, V = 2, 2, 4, 8, 6


@declared
@dataclass(frozen=True)
class BoundedDecode(DecodeProblem):
    """Add one option to a decode: a lower bound of the log decay."""

    min_g: float | None


def tokens() -> dict[str, Tensor]:
    heads = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": (HV,), "beta": (HV,)}
    return {name: torch.rand(B, 1, *sizes) for name, sizes in heads.items()}


def arguments(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a decode by name, in order."""
    absent = dict.fromkeys(BoundedDecode.declaration.names) | dict.fromkeys(
        DecodeProblem.declaration.flags, False
    )
    return absent | tokens() | {"state": torch.zeros(B, HV, K, V), "write": "final", "scale": 1.0} | changes


# one declaration


def test_an_option_is_declared_once():
    before, after = DecodeProblem.declaration, BoundedDecode.declaration
    assert after.schema == f"{before.schema}, float? min_g"
    assert after.names == (*before.names, "min_g") and after.options == (*before.options, "min_g")
    assert (after.tensors, after.written, after.flags) == (before.tensors, before.written, before.flags)
    problem = BoundedDecode(**arguments(min_g=-5.0))
    *_, last = problem.arguments()
    assert last == -5.0 and problem.arguments() == (*problem.tensors(), *problem.options())
    same, rest = BoundedDecode.split((*problem.arguments(), "more"))
    assert same.min_g == -5.0 and rest == ("more",)
    assert problem.without_tensors().options() == problem.options()
    assert not any(x is not None for x in problem.without_tensors().tensors())


def test_a_written_tensor_is_declared_once():
    @dataclass(frozen=True)
    class First:
        x: Tensor
        y: Annotated[Tensor | None, WRITTEN]

    @declared
    @dataclass(frozen=True)
    class Second(Declared, First):
        out: Annotated[Tensor, WRITTEN]
        size: SymInt | None
        exact: bool
        cached: str = "no argument"

    declaration = Second.declaration
    assert declaration.schema == "Tensor x, Tensor(a!)? y, Tensor(b!) out, SymInt? size, bool exact"
    assert declaration.written == ("y", "out") and declaration.flags == ("exact",)
    part = declaration.without("x", "exact", required=("y",))
    assert part.schema == "Tensor(a!) y, Tensor(b!) out, SymInt? size"
    assert part.split((1, 2, 3, 4)) == (Second(x=None, y=1, out=2, size=3, exact=False), (4,))
    assert part.fields_of((1, 2, 3)) == {"y": 1, "out": 2, "size": 3, "x": None, "exact": False}
    assert declaration.without("y", written=False).schema == "Tensor x, Tensor out, SymInt? size, bool exact"


def test_tensors_come_before_options():
    with pytest.raises(TypeError, match="all tensors before the first option, got scale, x"):

        @declared
        @dataclass(frozen=True)
        class Wrong(Declared):
            scale: float
            x: Tensor


def test_fields_with_a_default_are_no_arguments():
    assert "layout_key" not in Problem.declaration.names and "state" in ConvProblem.declaration.written


class Operators(TorchDispatchMode):
    """Note the operators of gdn that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "gdn":
            self.calls.append((function, args))
        return function(*args, **kwargs or {})


@pytest.fixture(scope="module")
def bounded() -> SimpleNamespace:
    """Return a public function of BoundedDecode, and what its check and its backend have seen."""
    seen = SimpleNamespace(checked=[], computed=[], backend=None)

    def parse(**given: Any) -> BoundedDecode:
        seen.checked.append(given["min_g"])
        if given["out"] is None:
            given["out"] = torch.empty_like(given["v"])
        return BoundedDecode(**given)

    seen.backend = SimpleNamespace(bounded_decode=lambda problem: seen.computed.append(problem.min_g))
    seen.function = fastpath.PoolFunction(Signature("bounded_decode", ("q",)), BoundedDecode, parse)
    return seen


def test_an_option_reaches_operator_key_and_backend(bounded, monkeypatch):
    monkeypatch.setattr(fastpath, "select", lambda problem: bounded.backend)
    schema = f"gdn::bounded_decode({BoundedDecode.declaration.schema}) -> ()"
    assert str(torch.ops.gdn.bounded_decode.default._schema) == schema

    def call(**changes: Any) -> Tensor:
        given = arguments(**changes)
        of = lambda names: tuple(given[name] for name in names)  # noqa: E731
        *tensors, out = of(BoundedDecode.declaration.tensors)
        return bounded.function(given["q"], tuple(tensors), out, of(BoundedDecode.declaration.options))

    for value, num_checks in ((-5.0, 1), (-5.0, 1), (-4.0, 2), (None, 3), (-5.0, 3)):
        assert call(min_g=value).shape == (B, 1, HV, V)
        assert len(bounded.checked) == num_checks and bounded.computed[-1] == value
    assert len(bounded.computed) == 5
    with Operators() as operators:
        call(min_g=-5.0)
    ((operator, given),) = operators.calls
    assert operator is torch.ops.gdn.bounded_decode.default and given[-1] == -5.0


# the way of a repeated call


def way(call: Callable[[], Any], backend: str) -> tuple[list[str], int]:
    """Run a call up to the function `backend`; return the modules on the stack there, and all frames entered.

    Frames of this package are counted, the public function included and the backend's function not.
    """
    entered, stack = 0, None

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal entered, stack
        if event != "call" or stack is not None:
            return
        if frame.f_code.co_name == backend and frame.f_code.co_filename == __file__:
            stack, above = [], frame.f_back
            while above is not None:
                if above.f_code.co_filename.startswith(str(PACKAGE)):
                    stack.append(above.f_code.co_filename)
                above = above.f_back
        elif frame.f_code.co_filename.startswith(str(PACKAGE)):
            entered += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert stack is not None, "the backend was not reached"
    return [Path(name).stem for name in reversed(stack)], entered


@pytest.fixture
def launching(monkeypatch) -> dict[str, Callable[[], Any]]:
    """Return calls on a backend that computes nothing, and whose serving functions return a launch."""

    class Launch:
        def __call__(self, *tensors: Tensor | None) -> None:
            the_backend()

        def packed(self, problem: DecodeProblem, mixed_qkv: Tensor) -> "Launch":
            return self

    def the_backend() -> None:
        pass

    def chunk(problem: Problem, save: bool) -> tuple[Any, ...]:
        the_backend()
        return torch.zeros_like(problem.v), None, Saved()

    def recurrent(problem: Problem) -> tuple[Any, ...]:
        the_backend()
        return torch.zeros_like(problem.v), None

    def launch(problem: Any) -> Launch:
        return Launch()

    fake = replace(
        eager.BACKEND, chunk_forward=chunk, recurrent_forward=recurrent, decode=launch, decode_step=launch,
        replay_decode=launch,
    )  # fmt: skip
    monkeypatch.setattr(eager, "BACKEND", fake)
    monkeypatch.setattr(fastpath, "_calls", {})
    x = tokens()
    first, gates = (x["q"], x["k"], x["v"]), {"g": x["g"], "beta": x["beta"]}
    needs = [t.clone().requires_grad_() for t in first]
    pool = torch.zeros(B, HV, K, V)
    history = torch.zeros(B, 3, HV, V), torch.zeros(B, 3, H, K), torch.zeros(B, 3, HV), torch.zeros(B).int()
    mixed, logits, heads = torch.zeros(B, 2 * H * K + HV * V), torch.zeros(B, HV), torch.zeros(HV)
    window, taps = torch.zeros(B, mixed.shape[1], 3), torch.zeros(mixed.shape[1], 4)
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    raw = (logits, logits, heads, None, pool)
    return {
        "chunk": lambda: gdn.chunk_gated_delta_rule(*first, **gates),
        "chunk with gradients": lambda: gdn.chunk_gated_delta_rule(*needs, **gates),
        "recurrent": lambda: gdn.fused_recurrent_gated_delta_rule(*first, **gates),
        "decode": lambda: gdn.decode(*first, pool, **gates),
        "decode_packed": lambda: gdn.decode_packed(mixed, *raw, **sizes),
        "replay_decode": lambda: gdn.replay_decode(*first, pool, *history, **gates),
        "decode_step": lambda: gdn.decode_step(mixed, window, taps, None, *raw, **sizes),
    }


NAMES = [
    "chunk",
    "chunk with gradients",
    "recurrent",
    "decode",
    "decode_packed",
    "replay_decode",
    "decode_step",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_call_goes_straight_to_the_launch(launching, name):
    """Count frames of this package, from the public function to the launch or the backend's function.

    At most six are on the stack there. At most eight are entered, those of helpers that have returned
    included; the autograd function is one more. No module is on the stack twice with another in between.
    """
    call = launching[name]
    call()
    stack, entered = way(call, "the_backend")
    assert len(stack) <= 6 and entered <= 8 + ("gradients" in name), (stack, entered)
    runs = [module for i, module in enumerate(stack) if i == 0 or stack[i - 1] != module]
    assert len(runs) == len(set(runs)), stack


def test_frames_of_a_first_call_are_more(launching):
    """See that frames are counted: a first call checks its arguments."""
    stack, entered = way(launching["chunk"], "the_backend")
    assert entered > 8


class Intercepting(Tensor):
    """Intercept operators."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("expected no operator")


def test_any_tensor_may_intercept_operators():
    x = torch.zeros(2)
    assert are_plain(None, x, None, x) and are_plain(x, torch.nn.Parameter(x))
    assert not are_plain(x, None, torch.Tensor._make_subclass(Intercepting, x))
