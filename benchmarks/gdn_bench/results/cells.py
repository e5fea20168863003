"""The rows of a pass as a table of docs/results.md: columns, and cells under them."""

from collections.abc import Callable, Sequence
from typing import Any

from gdn.testing.accuracy import OUTPUTS
from gdn_bench.results import tables
from gdn_bench.results.rows import Row

NAMES = {"fla": "FLA", "flash_qla": "FlashQLA", "flashinfer": "FlashInfer", "transformers": "Transformers"}
Cells = tuple[list[str], list[list[str]]]  # columns, and rows under them


def times(held: Sequence[Row], without: Sequence[Row], of_limit: Callable[[Row], float | None]) -> Cells:
    """Ours with its spread, rates and memory, then every peer's time and how often ours fits into it."""
    ours = [row for row in held if owner(row["provider"]) == "gdn" and "ms" in row]
    peers = [p for p in NAMES if any(p in row["ratio"] or p in row["then"] for row in ours)]
    beside = {(row["case"], row["provider"]): row for row in (*held, *without)}
    numbers: dict[str, Callable[[Row], str]] = {
        "limit": lambda row: f"{share:.0%}" if (share := of_limit(row)) else "",
        "GB/s": lambda row: f"{row['gb_per_s']:.0f}" if row.get("gb_per_s") else "",
        "TFLOP/s": lambda row: f"{row['tflop_per_s']:.3g}" if row.get("tflop_per_s") else "",
        "of T = 1": lambda row: f"{row['to_single']:.2f}" if "to_single" in row else "",
        "goal": lambda row: f"{row['goal_to_single']:.2f}" if "goal_to_single" in row else "",
        "with folds": lambda row: f"{row['with_folds']:.2f}" if "with_folds" in row else "",
        "MB": lambda row: f"{row['peak_mb']:.0f}" if "peak_mb" in row else "",
    }
    numbers = {name: number for name, number in numbers.items() if any(number(row) for row in ours)}
    cells = [
        [
            row["case"], time(row["ms"]), f"{time(row['p20'])} to {time(row['p80'])}",
            *(number(row) for number in numbers.values()),
            *(_peer(row, p, beside.get((row["case"], p), {})) for p in peers),
            _backend(row), row.get("commit") or "?",
        ]
        for row in ours
    ]  # fmt: skip
    theirs = [f"{NAMES[p]} (ratio)" for p in peers]
    return ["", "gdn", "p20 to p80", *numbers, *theirs, "backend", "commit"], cells


def _peer(row: Row, peer: str, last: Row) -> str:
    """A peer's time, ratio and memory beside a row of ours, or in a word why it has none."""
    if peer in row["ratio"]:
        ratio = row["ratio"][peer]
        memory = f", {last['peak_mb']:.0f} MB" if "peak_mb" in last else ""
        return f"{time(row['ms'] * ratio)} ({ratio:.2f}{_chunk(row)}){memory}"
    if peer in row["then"]:
        then = row["then"][peer]
        ratio = then["ratio"][peer]
        return f"{time(then['ms'] * ratio)} ({ratio:.2f} at {then.get('commit') or '?'})"
    return tables.reason(last)[0]


def reasons(without: Sequence[Row]) -> list[str]:
    """Who has no time, where and why; what one says of several problems in one line."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in without:
        kind, words = tables.reason(row)
        if kind == "wrong":
            share = row.get("share_of_limit")
            words = "no finite answer" if share is None else f"an error {share:.2f} times its limit"
            if share is not None and share <= 1:
                words = "another token than the reference's where that is decided"
        name, _, rest = row["provider"].partition(":")
        who = f"{NAMES.get(name, name)}{f' ({rest})' if rest else ''}"
        found.setdefault((who, f"{kind}, {words}"), []).append(row["case"])
    return [f"no time of {who} in {', '.join(cases)}: {why}" for (who, why), cases in found.items()]


def cold(held: Sequence[Row]) -> Cells:
    parts = ("first: forward", "first: backward", "first: decode")
    cells = [
        [
            row["provider"],
            *(f"{row['seconds'][part]:.1f} s" if part in row["seconds"] else "" for part in parts),
            str(row.get("compiled_again", "")),
        ]
        for row in held
        if "seconds" in row
    ]
    return ["", "first forward", "first backward", "first decode", "compiled again for other problems"], cells


def accuracy(held: Sequence[Row]) -> Cells:
    there = dict.fromkeys(name for row in held for name in row["errors"])
    # those of the protocol in its order, then those of stages
    outputs = [*(name for name in OUTPUTS if name in there), *(name for name in there if name not in OUTPUTS)]
    cells = [
        [
            f"{row['case']}, {row['provider']}, {row['dtype']}",
            *(_error(row["errors"].get(name, "")) for name in outputs),
            "yes" if row["ok"] else "no",
        ]
        for row in held
    ]
    return ["", *outputs, "within limits"], cells


def end_to_end(held: Sequence[Row]) -> Cells:
    shares = ("decided", "same_tokens", "decided_plain", "same_plain", "same_all")
    cells = [
        [
            f"{row['case']}, {row['provider']}",
            f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else "wrong",
            time(row["first_token_ms"]) if "first_token_ms" in row else "",
            *(_error(row.get(name, "")) for name in ("logit_error", "rms_error")),
            *(f"{row[name]:.0%}" if row.get(name) is not None else "" for name in shares),
        ]
        for row in held
    ]
    columns = ["", "tokens/s", "first token", "logit error", "RMS error", "decided", "same of these"]
    return [*columns, "decided by plain torch's error", "same of these", "same of all"], cells


def owner(provider: str) -> str:
    """gdn for each of its backends, else the provider."""
    return provider.partition(":")[0]


def time(ms: float) -> str:
    """Milliseconds, or microseconds below a tenth of one, in three digits."""
    x, unit = (ms, "ms") if ms >= 0.1 else (1e3 * ms, "us")
    return f"{x:.0f} {unit}" if x >= 100 else f"{x:.3g} {unit}"


def _error(x: Any) -> str:
    return "-" if x is None else f"{x:.1e}" if isinstance(x, float) else str(x)


def _chunk(row: Row) -> str:
    """The peer's best chunk size, where stages were timed."""
    return f", chunks of {row['best_chunk']}" if "best_chunk" in row else ""


def _backend(row: Row) -> str:
    return row.get("backend") or ""
