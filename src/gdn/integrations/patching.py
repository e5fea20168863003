"""Replace another package's functions in every module that holds them, until the patch is undone."""

import sys
import threading
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any

from gdn.integrations.fallback import class_with_fallback, function_with_fallback
from gdn.integrations.transformers import Replaced

Function = Callable[..., Any]


class Package:
    """Hold the functions of one package that gdn can run, and the patches in force on it.

    served: (module, name, our function or class of the same signature). A call that ours rejects goes to the
    package's own function, or to the method of that name of its class (`gdn.integrations.fallback`).
    wrapped: (module, class, method, function of the original method that returns ours): ours decides itself
    what goes to the original. loaded: as `served`, where the module is imported already. Process-wide.
    """

    def __init__(
        self,
        served: tuple[tuple[str, str, Function], ...],
        wrapped: tuple[tuple[str, str, str, Function], ...] = (),
        loaded: tuple[tuple[str, str, Function], ...] = (),
    ) -> None:
        self.served, self.wrapped, self.loaded = served, wrapped, loaded
        self._lock = threading.RLock()
        self._active: list[Patch] = []
        self._replaced: list[Replaced] = []

    @property
    def is_patched(self) -> bool:
        return bool(self._active)

    def patch(self) -> "Patch":
        """Replace the functions from now on; import their modules, which must be installed."""
        with self._lock:
            if not self._active:
                # import every module before the first name is replaced, so that undo() reaches all of them
                for module in [e[0] for e in self.served] + [e[0] for e in self.wrapped]:
                    import_module(module)
                loaded = [entry for entry in self.loaded if entry[0] in sys.modules]
                for module, name, serve in (*self.served, *loaded):
                    self._replace(vars(import_module(module))[name], serve)
                for module, name, method, wrap in self.wrapped:
                    owner = getattr(import_module(module), name)
                    original = vars(owner)[method]
                    self._replaced.append(Replaced(owner, method, original, wrap(original)))
                    setattr(owner, method, self._replaced[-1].replacement)
            self._active.append(Patch(self))
            return self._active[-1]

    def holds(self, patch: "Patch") -> bool:
        return any(active is patch for active in self._active)

    def end(self, patch: "Patch") -> None:
        with self._lock:
            self._active[:] = [active for active in self._active if active is not patch]
            if not self._active:
                for entry in reversed(self._replaced):
                    entry.restore()
                self._replaced.clear()

    def _replace(self, original: Function, serve: Function) -> None:
        """Replace the original in every imported module that holds it, under any name."""
        if isinstance(serve, type):
            replacement: Function = class_with_fallback(serve, original)  # type: ignore[arg-type]
        else:
            replacement = function_with_fallback(serve, original, lambda: self.is_patched)
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and not module.__name__.startswith("gdn."):
                for name in [n for n, value in list(vars(module).items()) if value is original]:
                    self._replaced.append(Replaced(module, name, original, replacement))
                    setattr(module, name, replacement)


class Patch:
    """Keep a patch in force until `undo()` or the end of `with`. The last to end restores the originals."""

    def __init__(self, package: Package) -> None:
        self._package = package

    @property
    def is_active(self) -> bool:
        return self._package.holds(self)

    def undo(self) -> None:
        """End this patch; a second call does nothing. Patches may end in any order."""
        self._package.end(self)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()
