"""Import the real modules of an engine from its unpacked wheel, without its other dependencies.

`make engines` unpacks the wheels to build/engines and runs the tests of each engine in a process of its own,
with GDN_ENGINE_SOURCES; without it they are skipped. Packages that an engine imports and that no test calls
are stubs: their attributes are classes that accept everything. Of the engine itself nothing is a stub but its
compiled extensions.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# packages that an engine imports at import time, beside torch, Transformers and Triton
STUBS = {
    "lmdeploy": ("mmengine", "pybase64", "requests", "urllib3", "zmq"),
}


def find(engine: str) -> Path | None:
    """Return the folder that holds an engine's unpacked wheel, in GDN_ENGINE_SOURCES; None without."""
    folder = Path(os.environ.get("GDN_ENGINE_SOURCES", "")) / engine
    return folder if (folder / engine).is_dir() else None


class AnyType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Anything(metaclass=AnyType):
    """Accept every call, attribute and subclass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __init_subclass__(cls, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # as a decorator it leaves its function alone
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return {"type": "any"}

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class StubModule(ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = AnyType(name, (Anything,), {})
        setattr(self, name, value)
        return value


class StubFinder:
    """Find a stub for every module of the given packages that is not installed."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not any(name == package or name.startswith(package + ".") for package in self.packages):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def provide(engine: str) -> Path:
    """Make an engine importable in this process, for good: some of it can be imported only once."""
    folder = find(engine)
    assert folder is not None
    sys.path.insert(0, str(folder))
    # last, so that what is installed is taken as it is
    sys.meta_path.append(StubFinder(STUBS[engine]))  # type: ignore[arg-type]
    return folder
