"""Fall back to a package's own function where gdn rejects a call: one rule for every patch.

gdn rejects a call with NotImplementedError, TypeError or ValueError, raised by its checks before a tensor is
computed or written. Such a call goes to the package's own function; if that raises as well, the caller gets
the error of the package, with gdn's as its context. An error of a backend at work (out of memory, a launch
that fails) goes to the caller as it is: the states may be half written then, and a second run would advance
them twice.
"""

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gdn.integrations import usage

Result = TypeVar("Result")
Function = Callable[..., Any]
REJECTIONS = (NotImplementedError, TypeError, ValueError)
logger = logging.getLogger("gdn")


def call_with_fallback(
    name: str,
    serve: Callable[[], Result],
    original: Callable[[], Result],
    report: Callable[[str, Exception], None] | None = None,
) -> Result:
    """Return serve(), or original() if gdn rejects the call.

    report: called with `name` and gdn's error before original(); may raise. None: `log_rejection`.
    """
    try:
        return serve()
    except REJECTIONS as error:
        if not is_rejection(error):
            raise
        (report or log_rejection)(name, error)
        usage.count_rejected(name, str(error))
        return original()


def is_rejection(error: Exception) -> bool:
    """Return True if a check raised the error, False if a backend did, which may have written by then."""
    if torch.compiler.is_compiling():
        # nothing runs while a function is traced
        return True
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        if module.startswith("gdn.backends.") and module != "gdn.backends.select":
            return False
        trace = trace.tb_next
    return True


def log_rejection(name: str, error: Exception) -> None:
    """Log once for each name and reason, level INFO, that the package's own function runs."""
    if not torch.compiler.is_compiling() and logger.isEnabledFor(logging.INFO):
        _log_once(name, str(error))


@functools.lru_cache(maxsize=256)
def _log_once(name: str, reason: str) -> None:
    logger.info("%s is left to its package: %s", name, reason)


def function_with_fallback(serve: Function, original: Function, is_active: Callable[[], bool]) -> Function:
    """Return a function with the signature of `original` that runs `serve` while a patch is active."""

    @functools.wraps(original)
    def served(*args: Any, **kwargs: Any) -> Any:
        # a caller may have kept this function beyond its patch
        if not is_active():
            return original(*args, **kwargs)
        return call_with_fallback(
            serve.__name__,
            functools.partial(serve, *args, **kwargs),
            functools.partial(original, *args, **kwargs),
        )

    return served


def class_with_fallback(serve: type, original: type) -> type:
    """Return a subclass of `serve` and `original`; methods of `serve` fall back to those of an `original`.

    What an engine asks of its own class it finds in ours: isinstance, attributes, methods that `serve` lacks.
    The instance that serves rejected calls is made at the first rejection. `serve` may have a static method
    arguments_of_original(original, name, args, kwargs): it returns the arguments for the method of the
    original, or None where the original would compute something else; the rejection is raised then.
    """
    convert: Function = getattr(serve, "arguments_of_original", lambda _original, _name, *given: given)

    def with_fallback(name: str, method: Function) -> Function:
        @functools.wraps(method)
        def served(self: Any, *args: Any, **kwargs: Any) -> Any:
            def raise_unless_convertible(label: str, error: Exception) -> None:
                if convert(original, name, args, kwargs) is None:
                    raise error
                log_rejection(label, error)

            def run_original() -> Any:
                if not hasattr(self, "_original"):
                    self._original = original()
                own_args, own_kwargs = convert(original, name, args, kwargs)
                return getattr(self._original, name)(*own_args, **own_kwargs)

            return call_with_fallback(
                f"{original.__name__}.{name}",
                functools.partial(method, self, *args, **kwargs),
                run_original,
                raise_unless_convertible,
            )

        return served

    methods = {
        name: with_fallback(name, method)
        for name, method in vars(serve).items()
        if callable(method) and not name.startswith("_") and callable(getattr(original, name, None))
    }
    return type(serve.__name__, (serve, original), methods | {"__module__": serve.__module__})


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the first frame outside this library, however many frames of a patch lie between."""
    if torch.compiler.is_compiling():
        warnings.warn(message, category, stacklevel=2)
        return
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gdn."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
