"""Rows of a run as tables to print: for each pass its columns and cells, in rich's markup."""

import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]


PEERS = {"fla": "fla", "flash_qla": "qla", "flashinfer": "fi", "transformers": "hf"}  # in a column's head


def table(name: str, rows: Sequence[Row]) -> Table:
    """The table of a pass; rows without numbers are left to `notes`."""
    make = {"host": _host, "cold": _cold, "e2e": _end_to_end, "step": _step, "spec": _spec}.get(name, _times)
    return make(rows)


def notes(rows: Sequence[Row]) -> list[str]:
    """One line for every row that has no numbers, and for every one whose numbers are not what they seem."""
    found = []
    for row in rows:
        where = f"{row['pass']} {row['case']}, {row['provider']}"
        kind, words = reason(row)
        if kind:
            found.append(f"{where}: {kind}: {words}")
        if row.get("why"):
            found.append(f"{where}: timed by {row['timer']}: {row['why']}")
        if row.get("worse"):
            found.append(f"{where}: less accurate than a peer in {', '.join(row['worse'])}")
    return [*found, *inside(rows)]


def reason(row: Row) -> tuple[str, str]:
    """Why a row has no numbers, in a word and in more: refused, failed, ..., wrong; empty where it has."""
    for kind in ("refused", "failed", "skipped", "absent", "error_message"):
        if row.get(kind):
            return kind.removesuffix("_message"), row[kind]
    if row.get("errors") and not row["ok"]:
        # a file holds what is not finite as null
        errors = {x: math.inf if e is None else e for x, e in row["errors"].items()}
        return "wrong", ", ".join(f"{x} {e:.1e}" for x, e in errors.items())
    return "", ""


def inside(rows: Sequence[Row]) -> list[str]:
    """What the timed region of each stage holds; those that hold the same in one line."""
    held: dict[str, list[str]] = {}
    for row in rows:
        if row.get("inside"):
            names = held.setdefault(row["inside"], [])
            stage = row["case"].rpartition(" ")[2]
            if stage not in names:
                names.append(stage)
    return [f"inside the time of {', '.join(names)}: {what}" for what, names in held.items()]


def line(row: Row) -> str:
    """A row in few words, as it is measured."""
    where = f"{row['pass']} {row['case']} {row['provider']}"
    if "ms" in row:
        return f"{where} {digits(row['ms'])} ms"
    return f"{where} {reason(row)[0] or 'measured'}"


def _times(rows: Sequence[Row]) -> Table:
    columns = [
        "", "provider", "ms", "p20", "p80", "GB", "GFLOP", "GB/s", "TF/s", "limit", "best peer",
        *PEERS.values(), "goal", "MB", "error",
    ]  # fmt: skip
    cells = []
    for row in rows:
        if "ms" not in row:
            continue
        ratio, best = row["ratio"], row.get("to_best_peer")
        cells.append([
            row["case"], row["provider"], *(digits(row[x]) for x in ("ms", "p20", "p80")),
            f"{row['bytes'] / 1e9:.3g}", f"{row['flop'] / 1e9:.3g}", f"{row['gb_per_s']:.0f}",
            f"{row['tflop_per_s']:.0f}", f"{row['of_limit']:.0%}", f"{best:.2f}" if best else "",
            *(f"{ratio[peer]:.2f}" if peer in ratio else "" for peer in PEERS),
            _goal(row), f"{row.get('peak_mb', 0):.0f}", f"{row['share_of_limit']:.0%}",
        ])  # fmt: skip
    return columns, cells


def _host(rows: Sequence[Row]) -> Table:
    cells = []
    for row in rows:
        if "ms" in row:
            parts = ", ".join(f"{name} {x:.0f}" for name, x in row.get("parts_us", {}).items())
            us = [digits(1e3 * row[name]) for name in ("ms", "p20", "p80")]
            cells.append([row["case"], row["provider"], *us, _goal(row, 1e3), parts])
    return ["", "provider", "us", "p20", "p80", "goal", "of which"], cells


def _step(rows: Sequence[Row]) -> Table:
    cells = []
    for row in rows:
        if "ms" in row:
            us = [digits(1e3 * row[name]) for name in ("ms", "p20", "p80")]
            of = f"{row['to_functions']:.2f}" if "to_functions" in row else ""
            share = f"{row['share_of_limit']:.0%}"
            cells.append([row["case"], *us, f"{row['gb_per_s']:.0f}", f"{row['of_limit']:.0%}", of, share])
    return ["", "us", "p20", "p80", "GB/s", "limit", "functions", "error"], cells


def _spec(rows: Sequence[Row]) -> Table:
    cells = []
    for row in rows:
        if "ms" in row:
            us = [digits(1e3 * row[name]) for name in ("ms", "p20", "p80")]
            ratios = [row["ratio"].get("flashinfer"), row.get("to_single"), row.get("with_folds")]
            found = ["" if x is None else f"{x:.2f}" for x in ratios]
            rates = [f"{row['gb_per_s']:.0f}", f"{row['of_limit']:.0%}"]
            goal = _reached(row, row["goal_to_single"]) if "goal_to_single" in row else ""
            cells.append([
                row["case"], row["provider"], *us, *rates, *found, goal, f"{row['share_of_limit']:.0%}",
            ])  # fmt: skip
    columns = ["", "provider", "us", "p20", "p80", "GB/s", "limit", "fi", "of T=1", "with folds", "goal"]
    return [*columns, "error"], cells


def _cold(rows: Sequence[Row]) -> Table:
    columns = ["provider", "start", "forward", "backward", "decode", "compiled", "again", "ok"]
    cells = []
    for row in rows:
        if "seconds" in row:
            found = (row["seconds"].get(f"first: {part}") for part in ("forward", "backward", "decode"))
            seconds = ["" if x is None else f"{x:.1f} s" for x in found]
            first = sum(n for what, n in row["compilations"].items() if what.startswith("first"))
            again = sum(row["compilations"].values()) - first
            start = f"{row['start_s']:.1f} s"
            cells.append([row["provider"], start, *seconds, str(first), str(again), _mark(row)])
    return columns, cells


def _end_to_end(rows: Sequence[Row]) -> Table:
    columns = [
        "",
        "provider",
        "tokens/s",
        "first token ms",
        "step ms",
        "of whole ms",
        "best peer",
        "logit error",
    ]
    cells = []
    for row in rows:
        if "tokens_per_s" in row:
            best = row.get("to_best_peer")
            ms = [digits(row[x]) for x in ("first_token_ms", "step_ms", "ms")]
            same = [f"{row[x]:.0%}" for x in ("decided", "same_tokens", "same_all")]
            cells.append([
                row["case"], row["provider"], f"{row['tokens_per_s']:.0f}", *ms,
                f"{best:.2f}" if best else "", f"{row['logit_error']:.1e}", *same,
            ])  # fmt: skip
    return [*columns, "decided", "same of these", "same of all"], cells


def _goal(row: Row, unit: float = 1) -> str:
    if row.get("goal_ms") is None:
        return ""
    return _reached(row, unit * row["goal_ms"])


def _reached(row: Row, goal: float) -> str:
    return f"[{'green' if row['reached'] else 'red'}]{digits(goal)}[/]"


def _mark(row: Row) -> str:
    """Whether ours reaches its goal; nothing for a peer."""
    if not row["provider"].startswith("gdn") or "reached" not in row:
        return ""
    return "[green]yes[/]" if row["reached"] else "[red]no[/]"


def digits(x: float) -> str:
    """Three of them."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"
