"""Define what every test shares: seeds, threads, poisoned memory, and the backend and device it runs on.

pytest                                   `eager` on the CPU, and `triton` on a CUDA device if there is one
                                         (GDN_TEST_DEVICE names it)
TRITON_INTERPRET=1 pytest -m interpret   `triton` on the CPU, with interpreted kernels; small problems
pytest -m compile                        every kernel compiled for GPUs that need not be there
"""

import fcntl
import gc
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._inductor.config
from hypothesis import HealthCheck, settings
from kit import processes
from kit.failures import Failures

from gdn.testing.memory import poison_memory

# kernels that are interpreted, and imports, make many objects and few cycles; the default is 700
gc.set_threshold(10_000)
settings.register_profile("gdn", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("gdn")

# tests start processes, which need the path where the package is not installed
SOURCE = str(processes.ROOT / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore = (
    []
    if HAS_TRITON
    else [
        "test_compile.py",
        "test_cuda.py",
        "test_interpreter.py",
        "test_kinds.py",
        "test_launch.py",
        "test_lib.py",
    ]
)
GPU = os.environ.get("GDN_TEST_DEVICE", "cuda")
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from kit import interpreter

    interpreter.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu on a machine without a CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Leave what the imports have made out of garbage collections, which would take a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def older_objects_frozen() -> None:
    """Leave out of a file's garbage collections what earlier files have made, too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed PyTorch, so that every test draws the same numbers in any order."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def failure_log() -> Iterator[Failures]:
    """Keep what `log_failure` logs while tests run, between two of them as well."""
    handler, logger = Failures(), logging.getLogger("gdn.failures")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def failures(failure_log: Failures, request: pytest.FixtureRequest) -> Iterator[Failures]:
    """Fail a test in which work failed that a call does not need; one that causes this uses `expects`."""
    yield failure_log
    texts = failure_log.end(request.node.nodeid)
    assert not texts, "\n".join(texts)


@pytest.fixture(
    params=["triton"] if INTERPRETED else ["eager", pytest.param("triton", marks=pytest.mark.gpu)]
)
def backend(request: pytest.FixtureRequest) -> str:
    """Return the name of a backend that runs the shared tests."""
    name: str = request.param
    return name


@pytest.fixture
def device(backend: str) -> str:
    """Return the device on which the tensors of the backend must be."""
    return GPU if backend == "triton" and not INTERPRETED else "cpu"


@pytest.fixture
def default_backend_and_device(backend: str, device: str, monkeypatch: pytest.MonkeyPatch):
    """Make the fixture's backend and device the defaults of calls and tensors that name none."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    if device == "cpu":
        yield
        return
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param(GPU, marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the device of a test of kernels alone: the GPU, or the CPU if kernels are interpreted."""
    name: str = request.param
    with nullcontext() if name == "cpu" else torch.cuda.device(name):
        yield name


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run a test that needs gigabytes of GPU memory alone among all workers, then free its memory."""
    with open(tmp_path_factory.getbasetemp().parent / "alone", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@pytest.fixture
def packager(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    """Give AOTInductor its own folder, since parallel tests may write the same files, and `shared_cxx`.

    The instruction sets are those of the processor: in a new folder Inductor would compile a test of each.
    A package compiles headers once or twice, for which precompiled ones take longer, and its wrapper, which
    launches, needs no optimisation.
    """
    compiler = processes.shared_cxx(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("CXX", compiler)
    # the object only inherits the attribute, so monkeypatch would delete it at the end
    with torch._inductor.config.patch(
        {"cpp.cxx": (None, compiler), "cpp.vec_isa_ok": True, **processes.PACKAGING}
    ):
        yield


@pytest.fixture
def poison():
    """Fill new memory with NaN, so that a test sees elements that were never written."""
    with poison_memory():
        yield


@pytest.fixture
def strict_poison():
    """Fill new memory with NaN, and raise for an operation that has no deterministic form."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def originals_restored() -> Iterator[None]:
    """Assert that a test ends with the original functions of Transformers in place."""
    yield
    from gdn.integrations import transformers as integration

    assert integration._active == [] and integration._replaced == []


@pytest.fixture
def simulated_launches(monkeypatch):
    """Let the forward of the Hopper backend run on the CPU."""
    from kit.hopper import simulate_launches

    simulate_launches(monkeypatch)


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[list[Any]]:
    """Hold the ranks that tests share, and end them; none are started until a test asks."""
    started: list[Any] = []
    yield started
    for ranks in started:
        ranks.close()


@pytest.fixture
def ranks(shared_ranks: list[Any]) -> Any:
    """Return three ranks of a gloo group for functions that leave the group as it was."""
    from kit.ranks import share_ranks

    return share_ranks(shared_ranks, 3)
