"""Declare kernels and their functions so that imports read no source and no scalar is specialised on.

Triton's constructor tokenizes the source of each function. That takes most of the import of gdn's kernels,
and a process that launches saved binaries compiles nothing. `jit` and `kernel` therefore defer the
constructor to the first use (`Unread`).

Triton compiles another binary for an integer that is 1 or divisible by 16. Here another number of tokens,
sequences or heads must not compile anything, so scalars are plain runtime values. A stride of unknown
divisibility would prevent 16-byte loads from HBM; strides are therefore passed in UNITs of elements, and UNIT
is a constant of the kernel.
"""

import io
import linecache
import os
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar

import triton
from triton.runtime.jit import JITFunction

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run on CPU tensors
READING = RLock()  # one thread at a time constructs a function

Source = tuple[tuple[int, int], bytes]  # time and size of a file, its bytes
_sources: dict[str, Source] = {}  # by name of the file


class Unread:
    """Stand for a function of Triton's JIT until something other than its name or arguments is needed.

    Then Triton's constructor reads the source, and the object becomes one of Triton's own type: whoever
    compiles, hashes or launches it finds what `triton.jit` would have returned. The source is that of the
    import, though the file may have been edited since.
    """

    triton_type: ClassVar[type]
    fn: Any
    arg_names: list[str]

    def __init__(self, function: Any, source: Source, do_not_specialize: list[str]) -> None:
        code = function.__code__
        names = ("__name__", "__qualname__", "__module__", "__doc__", "__globals__")
        vars(self).update({name: getattr(function, name) for name in names})
        arguments = list(code.co_varnames[: code.co_argcount])
        vars(self).update(fn=function, arg_names=arguments, unread=(source, do_not_specialize))

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute; construct the function first unless the attribute is known before."""
        if name not in ("fn", "arg_names") and not name.startswith("__"):
            _construct(self)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the constructed function: the constructor would overwrite it."""
        if name != "__class__":
            _construct(self)
        object.__setattr__(self, name, value)


class UnreadTriton(Unread, JITFunction):  # type: ignore[type-arg]
    """Stand for what `triton.jit` returns."""

    triton_type = JITFunction


def jit(function: Any) -> Any:
    """Apply triton.jit, which reads the function's source at its first use."""
    return defer(UnreadTriton, function) or triton.jit(function)


def kernel(function: Any) -> Any:
    """Apply triton.jit without specialisation on scalars: these stay runtime values."""
    names = scalar_names(function, ("_ptr",))
    return defer(UnreadTriton, function, names) or triton.jit(function, do_not_specialize=names)


def defer(kind: type[Unread], function: Any, do_not_specialize: list[str] | None = None) -> Any:
    """Return a function whose source is read later; None where it has no file, or is interpreted."""
    if triton.knobs.runtime.interpret:
        return None
    file = function.__code__.co_filename
    try:
        status = os.stat(file)
        stamp = status.st_mtime_ns, status.st_size
        # functions of one file share its bytes; a module may be imported again after an edit
        if file not in _sources or _sources[file][0] != stamp:
            _sources[file] = stamp, Path(file).read_bytes()
    except OSError:
        return None
    return kind(function, _sources[file], do_not_specialize or [])


def scalar_names(function: Any, endings: tuple[str, ...]) -> list[str]:
    """Return the names of a kernel's parameters that are no constants and have none of these endings."""
    code, constant = function.__code__, triton.language.constexpr
    names = code.co_varnames[: code.co_argcount]
    return [
        name
        for name in names
        if not name.endswith(endings) and function.__annotations__.get(name) is not constant
    ]


def _construct(function: Any) -> None:
    """Make an unread function one of Triton's own type; threads that need it meanwhile wait."""
    with READING:
        kind = type(function)
        unread = vars(function).pop("unread", None)
        # another thread has constructed it, or Triton's constructor reads what it has set
        if unread is None:
            return
        (_, text), names = unread
        file = function.fn.__code__.co_filename
        before = linecache.cache.get(file)
        lines = io.TextIOWrapper(io.BytesIO(text), "utf-8").readlines()
        # `inspect` takes the lines from here; without a time they are not read again from an edited file
        linecache.cache[file] = len(text), None, lines, file
        try:
            kind.triton_type.__init__(function, function.fn, do_not_specialize=names)
            function.__class__ = kind.triton_type
        except BaseException:
            vars(function)["unread"] = unread
            raise
        finally:
            linecache.cache.pop(file, None)
            if before is not None:
                linecache.cache[file] = before


def unit_of(*strides: int) -> int:
    """Return the largest of 16, 8, 4, 2, 1 that divides every stride: strides are counted in it."""
    bits = 16
    for stride in strides:
        bits |= stride
    return bits & -bits
