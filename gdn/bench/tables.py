"""Rows of `bench gpu` as tables to print: for each pass its columns and cells, in rich's markup."""

from collections.abc import Sequence
from typing import Any

from gdn.bench.accuracy import OUTPUTS

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]


def table(name: str, rows: Sequence[Row]) -> Table:
    """The table of a pass; rows without numbers are left to `notes`."""
    make = {"host": _host, "cold": _cold, "accuracy": _accuracy}.get(name, _times)
    return make(rows)


def notes(rows: Sequence[Row]) -> list[str]:
    """One line for every row that has no numbers, and for every one whose numbers are not what they seem."""
    found = []
    for row in rows:
        where = f"{row['pass']} {row['row']}, {row['provider']}"
        for kind in ("refused", "failed", "skipped", "absent", "error"):
            if row.get(kind):
                found.append(f"{where}: {kind}: {row[kind]}")
        if row.get("errors") and not row["ok"]:
            found.append(f"{where}: wrong: {', '.join(f'{x} {e:.1e}' for x, e in row['errors'].items())}")
        if row.get("why"):
            found.append(f"{where}: timed by {row['timer']}: {row['why']}")
        if row.get("worse"):
            found.append(f"{where}: less accurate than a peer in {', '.join(row['worse'])}")
    return found


def line(row: Row) -> str:
    """A row in few words, as it is measured."""
    for kind, unit in (("p50_ms", "ms"), ("p50_us", "us")):
        if kind in row:
            return f"{row['pass']} {row['row']} {row['provider']} {_digits(row[kind])} {unit}"
    state = next((x for x in ("refused", "failed", "skipped", "absent", "error") if x in row), "measured")
    state = "wrong" if row.get("errors") and not row["ok"] else state
    return f"{row['pass']} {row['row']} {row['provider']} {state}"


def _times(rows: Sequence[Row]) -> Table:
    columns = [
        "",
        "provider",
        "ms",
        "p20..p80",
        "fla",
        "qla",
        "fi",
        "goal",
        "limit",
        "GB/s",
        "TF/s",
        "MB",
        "error",
    ]
    cells = []
    for row in rows:
        if "p50_ms" not in row:
            continue
        ratio = row["ratio"]
        cells.append([
            row["row"], row["provider"], _digits(row["p50_ms"]),
            f"{_digits(row['p20_ms'])}..{_digits(row['p80_ms'])}",
            *(f"{ratio[peer]:.2f}" if peer in ratio else "" for peer in ("fla", "flash_qla", "flashinfer")),
            _goal(row, "goal_ms"), f"{row['share_of_ceiling']:.0%}", f"{row['gb_per_s']:.0f}",
            f"{row['tflop_per_s']:.0f}", f"{row.get('peak_mb', 0):.0f}", f"{row['share_of_limit']:.0%}",
        ])  # fmt: skip
    return columns, cells


def _host(rows: Sequence[Row]) -> Table:
    cells = []
    for row in rows:
        if "p50_us" in row:
            parts = ", ".join(f"{name} {x:.0f}" for name, x in row.get("parts_us", {}).items())
            spread = f"{_digits(row['p20_us'])}..{_digits(row['p80_us'])}"
            cells.append(
                [row["row"], row["provider"], _digits(row["p50_us"]), spread, _goal(row, "goal_us"), parts]
            )
    return ["", "provider", "us", "p20..p80", "goal", "of which"], cells


def _cold(rows: Sequence[Row]) -> Table:
    columns = ["provider", "import", "forward", "backward", "decode", "compiled", "again", "ok"]
    cells = []
    for row in rows:
        if "seconds" in row:
            found = (row["seconds"].get(f"first: {part}") for part in ("forward", "backward", "decode"))
            seconds = ["" if x is None else f"{x:.1f} s" for x in found]
            first = sum(n for what, n in row["compilations"].items() if what.startswith("first"))
            again = sum(row["compilations"].values()) - first
            loading = f"{row['import_s']:.1f} s"
            cells.append([row["provider"], loading, *seconds, str(first), str(again), _mark(row)])
    return columns, cells


def _accuracy(rows: Sequence[Row]) -> Table:
    cells = []
    for row in rows:
        if "errors" in row:
            errors = row["errors"]
            shown = [f"{errors[x]:.1e}" if x in errors else "" for x in OUTPUTS]
            cells.append([row["row"], row["provider"], *shown, _mark(row)])
    return ["", "provider", *OUTPUTS, "ok"], cells


def _goal(row: Row, key: str) -> str:
    if row.get(key) is None:
        return ""
    return f"[{'green' if row['reached'] else 'red'}]{_digits(row[key])}[/]" if "reached" in row else ""


def _mark(row: Row) -> str:
    """Whether ours reaches its goal; nothing for a peer."""
    if not row["provider"].startswith("gdn") or "reached" not in row:
        return ""
    return "[green]yes[/]" if row["reached"] else "[red]no[/]"


def _digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"
