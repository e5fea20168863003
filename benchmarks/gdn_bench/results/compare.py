"""Compare the times of two states of the library: slower, faster, equal, lost.

A side is a results file, FILE@COMMIT for the rows of one commit in it, a folder with a checkout, or a commit.
A commit or a folder is measured here and now, both sides in turn, with this clone's gdn_bench, `gdn.testing`
and `gdn.cli`: only the library itself differs.
"""

import shutil
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import gdn
from gdn_bench.commands.progress import Report
from gdn_bench.results import rows
from gdn_bench.results.rows import Row
from gdn_bench.results.tables import Table
from gdn_bench.timing import measure
from gdn_bench.timing.processes import run_module

THRESHOLD = 0.05  # two runs of one kernel on a busy machine differ by that much
ROUNDS = 3
LAYOUTS = ("src/gdn", "gdn")  # where a checkout holds the package, the newer place first
LAID_OVER = ("testing", "cli")  # parts of the package that belong to the measurement
LIMIT = 540  # seconds that one run of one side may take
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Change:
    """Hold the milliseconds of one problem before and after; verdict: faster, same, slower, lost, new."""

    what: Key
    before: float | None
    after: float | None
    verdict: str

    @property
    def ratio(self) -> float | None:
        """Return time after over time before."""
        return self.after / self.before if self.before and self.after else None


def changes(
    before: Iterable[Row], after: Iterable[Row], *, threshold: float = THRESHOLD, by: str | None = None
) -> list[Change]:
    """Return the change of each problem. by: a peer that both sides timed; its times divide the others.

    A problem with a time before and a row without one after (refused, failed, wrong) is lost.
    """
    old, new = medians(_plainly(before), by), medians(_plainly(after), by)
    changed = []
    for what in dict.fromkeys([*old, *new]):
        x, y = old.get(what), new.get(what)
        if x is None and y is None:
            continue
        if x is None or y is None:
            if what in old and what in new:
                changed.append(Change(what, x, y, "new" if x is None else "lost"))
            continue
        is_slower, is_faster = y > x * (1 + threshold), x > y * (1 + threshold)
        changed.append(Change(what, x, y, "slower" if is_slower else "faster" if is_faster else "same"))
    return changed


def medians(measured: Iterable[Row], by: str | None = None) -> dict[Key, float | None]:
    """Return the median time of each problem; None where its last row has none."""
    times: dict[Key, list[float]] = {}
    last: dict[Key, Row] = {}
    for row in measured:
        last[rows.key(row)] = row
        if "ms" in row:
            times.setdefault(rows.key(row), []).append(row["ms"])
    of = {what: statistics.median(times[what]) if "ms" in row else None for what, row in last.items()}
    if by is None:
        return of
    scaled: dict[Key, float | None] = {}
    for what, x in of.items():
        theirs = of.get(
            tuple(by if i == rows.SAME.index("provider") else part for i, part in enumerate(what))
        )
        if theirs and what[rows.SAME.index("provider")] != by:
            scaled[what] = None if x is None else x / theirs
    return scaled


def _plainly(measured: Iterable[Row]) -> list[Row]:
    """Rename gdn:BACKEND to gdn on a side that has rows of one backend only."""
    measured = list(measured)
    names = {row["provider"] for row in measured if row["provider"].partition(":")[0] == "gdn"}
    return [{**row, "provider": "gdn"} if names == {row["provider"]} else row for row in measured]


def is_regression(changed: Sequence[Change]) -> bool:
    """Return True if a row of gdn became slower or lost its time."""
    provider = rows.SAME.index("provider")
    return any(c.verdict in ("slower", "lost") and c.what[provider].startswith("gdn") for c in changed)


def sides(
    names: tuple[str, str], arguments: Sequence[str], *, rounds: int = ROUNDS, root: Path = measure.ROOT,
    report: Report = lambda *_: None,
) -> tuple[list[Row], list[Row]]:  # fmt: skip
    """Return the rows of both sides, from files or measured in turn by gdn_bench with these arguments."""
    if all(is_file(name) for name in names):
        return recorded(names[0]), recorded(names[1])
    if any(is_file(name) for name in names):
        raise ValueError(f"expected two files, or two commits or folders, got {' and '.join(names)}")
    with ExitStack() as stack:
        homes = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in names]
        for name, home in zip(names, homes, strict=True):
            checkout(name, home, root)
        results: tuple[list[Row], list[Row]] = ([], [])
        for i in range(rounds):
            for done, side in enumerate((0, 1) if i % 2 == 0 else (1, 0)):
                report("compare", 2 * i + done, 2 * rounds, names[side])
                results[side].extend(_measured(homes[side], names[side], arguments))
        report("compare", 2 * rounds, 2 * rounds, "")
    return results


def is_file(name: str) -> bool:
    """Return True if a side is a results file."""
    return name.partition("@")[0].endswith(".jsonl")


def recorded(name: str) -> list[Row]:
    """Return the rows of FILE or FILE@COMMIT."""
    path, _, commit = name.partition("@")
    selected = [row for row in rows.read(Path(path)) if not commit or row.get("commit") == commit]
    if not selected:
        raise ValueError(f"expected rows in {name}, got none")
    return selected


def checkout(name: str, home: Path, root: Path) -> None:
    """Put the package of a folder or a commit into home/src/gdn, with this clone's gdn.testing and gdn.cli.

    Commits before 0.2 hold the package in gdn, later ones in src/gdn.
    """
    package = home / "src" / "gdn"
    place = next((x for x in LAYOUTS if Path(name, x, "__init__.py").is_file()), None)
    if name and place is not None:
        shutil.copytree(Path(name, place), package, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        _extract_commit(name, package, root)
    (package / "cli.py").unlink(missing_ok=True)
    for folder in LAID_OVER:
        shutil.rmtree(package / folder, ignore_errors=True)
        own = Path(gdn.__file__).parent / folder
        shutil.copytree(own, package / folder, ignore=shutil.ignore_patterns("__pycache__"))


def _extract_commit(name: str, package: Path, root: Path) -> None:
    """Write the package of a commit. git gets a hash, never a name, which could be an option."""
    named = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    commit = _git(root, *named).decode().strip() if name else ""
    place = next((x for x in LAYOUTS if commit and _git(root, "ls-tree", commit, f"{x}/__init__.py")), None)
    if place is None:
        raise ValueError(f"expected a results file, a checkout or a commit, got {name!r}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(_git(root, "archive", commit, place))) as archive:
            # Python before 3.10.12 and 3.11.4 has no filters
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
            archive.extractall(folder)
        shutil.copytree(Path(folder, place), package)


def _git(root: Path, *arguments: str) -> bytes:
    """Return what git prints; nothing where it fails."""
    done = subprocess.run(("git", *arguments), cwd=root, capture_output=True)
    return done.stdout if done.returncode == 0 else b""


def _measured(home: Path, name: str, arguments: Sequence[str]) -> list[Row]:
    out = home / "rows.jsonl"
    out.unlink(missing_ok=True)
    command = ["gdn_bench", *arguments, f"--out={out}", f"--commit={name}"]
    try:
        done = run_module(command, LIMIT, first=[home / "src"], folder=home)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{name}: expected rows within {LIMIT} s, got none") from None
    if done.returncode != 0 or not out.exists():
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"{name}: expected rows, got {last}")
    return rows.read(out)


def build_table(changed: Sequence[Change], by: str | None = None) -> Table:
    """Return the changes as a table, verdicts coloured in rich's markup."""
    colours: Mapping[str, str] = {"slower": "red", "lost": "red", "faster": "green"}
    unit = "ms" if by is None else f"x {by}"
    cells = []
    for c in changed:
        colour = colours.get(c.verdict, "dim")
        numbers = ["" if x is None else f"{x:.4g}" for x in (c.before, c.after, c.ratio)]
        cells.append([*(str(part or "") for part in c.what), *numbers, f"[{colour}]{c.verdict}[/]"])
    return Table([*rows.SAME, f"before, {unit}", f"after, {unit}", "ratio", ""], cells)
