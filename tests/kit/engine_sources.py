"""Import the real modules of an engine from its unpacked wheel, without its other dependencies.

`make engines` unpacks the wheels to build/engines and runs the tests of each engine in a process of its own,
with GDN_ENGINE_SOURCES; without it they are skipped. Packages that an engine imports and that no test calls
are stubs: their attributes are classes that accept everything. Of the engine itself nothing is a stub but its
compiled extensions.
"""

import importlib.machinery
import importlib.util
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

# packages that an engine imports at import time, beside torch, Transformers and Triton
STUBS = {
    "lmdeploy": ("mmengine", "pybase64", "requests", "urllib3", "zmq"),
    "sglang": (
        "IPython",
        "aiohttp",
        "compressed_tensors",
        "einops",
        "fastapi",
        "gguf",
        "openai",
        "orjson",
        "partial_json_parser",
        "pybase64",
        "requests",
        "sentencepiece",
        "starlette",
        "torchvision",
        "tvm_ffi",
        "uvicorn",
        "zmq",
    ),
    "vllm": (
        "aiohttp",
        "cachetools",
        "cbor2",
        "cloudpickle",
        "compressed_tensors",
        "cpuinfo",
        "einops",
        "fastapi",
        "llguidance",
        "msgspec",
        "openai",
        "openai_harmony",
        "partial_json_parser",
        "prometheus_client",
        "pybase64",
        "requests",
        "torchvision",
        "urllib3",
        "uvloop",
        "xgrammar",
        "zmq",
    ),
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
    # Transformers looks for packages that are stubs afterwards
    importlib.import_module("transformers.models.auto.processing_auto")
    # and what no stub can stand for, such as msgspec's structs
    sys.path[:0] = [str(folder), str(folder.parent / "deps")]
    # SGLang writes classes to text while it is imported
    sys.modules.setdefault("dill", pickle)
    # last, so that what is installed is taken as it is
    sys.meta_path.append(StubFinder(STUBS[engine]))  # type: ignore[arg-type]
    return folder


def entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points that pyproject.toml declares in a group; the package need not be installed."""
    text = (Path(__file__).parent.parent.parent / "pyproject.toml").read_text()
    _, _, rest = text.partition(f'[project.entry-points."{group}"]\n')
    lines = rest.split("\n\n")[0].splitlines()
    pairs = [line.replace('"', "").split(" = ") for line in lines if line]
    return [EntryPoint(name, value, group) for name, value in pairs]
