"""Derive what a torch operator needs to know of its arguments from the fields of a problem.

A problem is a frozen dataclass of one checked call. Each field declares one argument, once: its name, its
type, whether it may be None, and whether the operator writes it. The order of the fields is the order of the
arguments, tensors before options. A field with a default belongs to the problem, not to the operator.

    @declared
    @dataclass(frozen=True)
    class ScaleProblem(Declared):
        x: Annotated[Values, WRITTEN]
        weight: Tensor | None
        scale: float
        length: SymInt | None

    ScaleProblem.declaration.schema    "Tensor(a!) x, Tensor? weight, float scale, SymInt? length"
    ScaleProblem.declaration.tensors   ("x", "weight")
    ScaleProblem.declaration.options   ("scale", "length")
    ScaleProblem.declaration.written   ("x",)

Everything is derived when the class is defined, so that a call pays nothing for it. Groups of arguments that
several problems share are dataclasses of their own; of several base classes, the last has the first fields.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from gdn.problem import check

WRITTEN = "the operator writes this tensor"
SymInt = Annotated[int, "a compiler may keep this number symbolic"]

_SCHEMA_TYPES = {bool: "bool", float: "float", int: "int", str: "str"}


class Declaration:
    """Describe the arguments of a torch operator: their names, in order, and their types in its schema.

    `names` are those of all arguments, `tensors` those of the tensors, `written` of the tensors that the
    operator writes, `options` of the rest, and `flags` of the bools among these. `schema` is the part of the
    operator's schema in brackets. `absent` are the values of fields that are no arguments of this operator.
    """

    def __init__(
        self,
        problem: type[Any],
        types: Mapping[str, str],
        written: Sequence[str],
        absent: Mapping[str, Any] | None = None,
    ) -> None:
        self.problem, self.types, self.absent = problem, dict(types), dict(absent or {})
        self.names = tuple(types)
        self.tensors = tuple(name for name, kind in types.items() if kind.startswith("Tensor"))
        self.options = self.names[len(self.tensors) :]
        if self.names[: len(self.tensors)] != self.tensors:
            raise TypeError(f"expected all tensors before the first option, got {', '.join(self.names)}")
        self.flags = tuple(name for name in self.options if types[name] == "bool")
        self.written = tuple(written)
        alias = {name: f"Tensor({chr(ord('a') + i)}!)" for i, name in enumerate(written)}
        kinds = (types[name].replace("Tensor", alias.get(name, "Tensor")) for name in self.names)
        self.schema = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, self.names, strict=True))
        self._read: Callable[[Any], tuple[Any, ...]] = attrgetter(*self.names)
        self._read_tensors: Callable[[Any], tuple[Any, ...]] = attrgetter(*self.tensors)

    def without(self, *names: str, required: Sequence[str] = (), written: bool = True) -> "Declaration":
        """Return the declaration of an operator without some arguments, which are None, or False for flags.

        `required` arguments may not be None in it. With written=False it writes no tensor.
        """
        types = {name: kind for name, kind in self.types.items() if name not in names}
        types |= {name: types[name].removesuffix("?") for name in required}
        absent = {name: False if self.types[name] == "bool" else None for name in names}
        kept = [name for name in self.written if written and name in types]
        return Declaration(self.problem, types, kept, absent)

    def arguments_of(self, problem: Any) -> tuple[Any, ...]:
        """Return the arguments of the operator, in order."""
        if torch.compiler.is_compiling():
            # not every version of the compiler traces an attrgetter, which takes 3 us less for 27 fields
            return tuple([getattr(problem, name) for name in self.names])
        return self._read(problem)

    def tensors_of(self, problem: Any) -> tuple[Any, ...]:
        """Return the tensors among the arguments, in order."""
        if torch.compiler.is_compiling() or len(self.tensors) == 1:
            return tuple([getattr(problem, name) for name in self.tensors])
        return self._read_tensors(problem)

    def fields_of(self, args: Sequence[Any]) -> dict[str, Any]:
        """Return the fields of the problem of an operator's arguments, by name."""
        return {**dict(zip(self.names, args, strict=True)), **self.absent}

    def split(self, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        """Return the problem of the first arguments of an operator, and the arguments that follow."""
        count = len(self.names)
        values = dict(zip(self.names, args[:count], strict=True))
        if self.absent:
            values.update(self.absent)
        return _hold(self.problem, values), tuple(args[count:])


class Declared:
    """Be the base class of the problems: `declaration` describes the fields of each."""

    declaration: ClassVar[Declaration]

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the torch operator, in order."""
        return self.declaration.arguments_of(self)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors among the arguments, in order."""
        return self.declaration.tensors_of(self)

    def options(self) -> tuple[Any, ...]:
        """Return the arguments that are no tensors, in order."""
        return tuple([getattr(self, name) for name in self.declaration.options])

    def with_tensors(self: "P", tensors: Sequence[Tensor | None], **others: Any) -> "P":
        """Return this problem with other tensors, in order, and `others`, fields that are no arguments."""
        problem = object.__new__(type(self))  # as in `_hold`
        values = problem.__dict__
        values.update(self.__dict__)
        values.update(zip(self.declaration.tensors, tensors, strict=True))
        if others:
            values.update(others)
        return problem

    def without_tensors(self: "P") -> "P":
        """Return this problem with None for each tensor, to keep it without their memory."""
        return self.with_tensors([None] * len(self.declaration.tensors))

    @classmethod
    def draft(cls: "type[P]", given: dict[str, Any]) -> "P":
        """Return the problem of a call before its checks; raise TypeError for a flag that is no bool."""
        check.flags(given, cls.declaration.flags)
        if given.keys() == cls.declaration.types.keys() and not torch.compiler.is_compiling():
            return _hold(cls, given)
        return cls(**given)  # for an unexpected or missing argument Python raises the error that names it

    def complete(self, **values: Any) -> None:
        """Set fields of a problem that nobody else has seen, such as `scale` where the caller gives none."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def split(cls: "type[P]", args: Sequence[Any]) -> tuple["P", tuple[Any, ...]]:
        """Return the problem of the first arguments of an operator, and the arguments that follow."""
        return cls.declaration.split(args)

    @classmethod
    def split_tensors(cls, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the tensors of a problem, which come first, and those that follow."""
        count = len(cls.declaration.tensors)
        return tuple(tensors[:count]), tuple(tensors[count:])


P = TypeVar("P", bound=Declared)


def _hold(problem: type[P], values: Mapping[str, Any]) -> P:
    """Return a problem with these fields; the others have their defaults.

    This bypasses __init__, which takes 2.4 us longer in a frozen dataclass of 20 fields.
    """
    held = object.__new__(problem)
    held.__dict__.update(values)
    return held


def declared(problem: type[P]) -> type[P]:
    """Derive the declaration of a problem from its fields; use it as a class decorator above dataclass."""
    hints = get_type_hints(problem, include_extras=True)
    types, written = {}, []
    for f in fields(problem):  # type: ignore[arg-type]
        if f.default is MISSING:
            types[f.name], marks = _schema_type(hints[f.name])
            if WRITTEN in marks:
                written.append(f.name)
    problem.declaration = Declaration(problem, types, written)
    return problem


def schema_of(results: type, optional: str = "") -> str:
    """Return the schema of the tensors that a dataclass names; with optional="?" each may be None."""
    return ", ".join(f"Tensor{optional} {f.name}" for f in fields(results))


def _schema_type(hint: Any) -> tuple[str, list[Any]]:
    """Return the type of an argument in a schema, such as "Tensor?", and the marks of its annotation."""
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        kind, others = _schema_type(base)
        is_symbolic = hint == SymInt
        return ("SymInt" if is_symbolic else kind), [*marks, *others]
    if get_origin(hint) in (Union, types.UnionType):
        members = [_schema_type(x) for x in get_args(hint) if x is not type(None)]
        # named tensors of two ranks, such as those of a decay, are one type
        (kind,) = {kind for kind, _ in members}
        optional = "?" if type(None) in get_args(hint) else ""
        return f"{kind}{optional}", [mark for _, marks in members for mark in marks]
    # the named tensors of `notation` know the class of their arrays
    kind = getattr(hint, "array_type", hint)
    return ("Tensor" if issubclass(kind, Tensor) else _SCHEMA_TYPES[kind]), []
