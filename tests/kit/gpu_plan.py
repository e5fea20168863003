"""Divide tests into parts of equal time, and a part into units for its workers: pure functions of names."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TABLE = Path(__file__).parent.parent / "gpu_seconds.json"
UNIT_SECONDS = 12.0  # tests of one function that one worker runs in a row, since they share compiled kernels


@dataclass(frozen=True)
class Durations:
    """Hold the seconds that a test takes, by its function, and the order of the test files."""

    seconds: dict[str, float] = field(default_factory=dict)
    files: tuple[str, ...] = ()  # files whose tests launch the same kernels are neighbours
    serial: tuple[str, ...] = ()  # functions whose tests run in one worker: each takes much GPU memory

    def of_test(self, name: str) -> float:
        """Return the recorded seconds of a test, or the mean of all functions for a new one."""
        if not self.seconds:
            return 1.0
        return self.seconds.get(function_of(name), sum(self.seconds.values()) / len(self.seconds))


def read_durations(path: Path = TABLE) -> Durations:
    """Read the table; an absent file means that all tests take the same time."""
    if not path.exists():
        return Durations()
    table = json.loads(path.read_text())
    return Durations(table["seconds"], tuple(table["files"]), tuple(table["serial"]))


def function_of(name: str) -> str:
    """Return a test's name without its parameters."""
    return name.split("[")[0]


def file_of(name: str) -> str:
    """Return the file of a test."""
    return name.split("::")[0]


def parse_part(text: str) -> tuple[int, int]:
    """Return i and n of `i/n`, where 1 <= i <= n."""
    try:
        part, parts = (int(x) for x in text.split("/"))
    except ValueError:
        part = parts = 0
    if not 1 <= part <= parts:
        raise ValueError(f"part: expected i/n with 1 <= i <= n, got {text!r}")
    return part, parts


def split_parts(names: Sequence[str], parts: int, durations: Durations) -> list[list[str]]:
    """Return the tests of each part: neighbors in the order of the files, cut where the time is reached.

    Every test is in exactly one part. The functions that run in one worker stay together.
    """
    place = {name: i for i, name in enumerate(durations.files)}
    serial = {name: i - len(durations.serial) for i, name in enumerate(durations.serial)}
    position = {name: i for i, name in enumerate(names)}

    def order(name: str) -> tuple[int, int, int]:
        return serial.get(function_of(name), 0), place.get(file_of(name), len(place)), position[name]

    result: list[list[str]] = [[] for _ in range(parts)]
    total, before = sum(durations.of_test(name) for name in names), 0.0
    for name in sorted(names, key=order):
        own = durations.of_test(name)
        middle = (before + own / 2) / total if total else 0.0
        result[min(parts - 1, int(parts * middle))].append(name)
        before += own
    return result


def plan_units(names: Sequence[str], durations: Durations) -> dict[str, list[str]]:
    """Return the units of a part, each for one worker, in the order in which workers take them.

    The longest units come first, because one that began last would keep the others waiting. Units of one
    function are spread among the others of about their length: workers would compile the same kernels.
    """
    functions = defaultdict(list)
    for name in names:
        functions[function_of(name) if function_of(name) not in durations.serial else ""].append(name)
    first = {name: i for i, name in enumerate(durations.serial)}
    functions[""].sort(key=lambda name: first[function_of(name)])
    units: list[tuple[float, int, list[str]]] = []
    for function, tests in functions.items():
        number, unit, seconds = 0, [], 0.0
        for name in tests:
            own = durations.of_test(name)
            if unit and function and seconds + own > UNIT_SECONDS:
                units.append((seconds, number, unit))
                number, unit, seconds = number + 1, [], 0.0
            unit.append(name)
            seconds += own
        if unit:
            units.append((seconds, number, unit))
    ranked = sorted(units, key=lambda unit: (-_length_class(unit[0]), unit[1], -unit[0]))
    return {f"unit {i}": unit for i, (_, _, unit) in enumerate(ranked)}


def _length_class(seconds: float) -> int:
    """Return a class of units whose lengths differ by less than two times."""
    return max(0, int(seconds)).bit_length()


def digest(names: Sequence[str], parts: int, durations: Durations) -> str:
    """Return a name of the division: parts with the same one hold each test exactly once."""
    divided = json.dumps(split_parts(names, parts, durations))
    return hashlib.sha256(divided.encode()).hexdigest()[:12]
