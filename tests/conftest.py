"""What every test stands on: fixed seeds, few threads, memory that is never zero by luck."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from gdn.bench.accuracy import poisoned

settings.register_profile("gdn", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("gdn")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers in any order."""
    torch.manual_seed(0)


@pytest.fixture(params=["eager"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backends that the shared contract's tests run on."""
    name: str = request.param
    return name


@pytest.fixture
def poison():
    """New memory that is left unwritten holds NaN."""
    with poisoned():
        yield


@pytest.fixture
def strict_poison():
    """As poison, and an operation without a deterministic form is an error."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
