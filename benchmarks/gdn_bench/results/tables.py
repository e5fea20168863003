"""Rows of a pass as a table: columns and lines of text, and a printer for Markdown.

`gdn_bench.commands.console.show_table` prints the same tables on a screen.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gdn.testing.accuracy import OUTPUTS
from gdn_bench.providers.names import PEERS, owner_of, title_of
from gdn_bench.results.rows import Row

Number = Callable[[Row], str]
# how calls on several GPUs are timed -> what the fields of a row begin with
MANY_TIMED = {"one call": "", "8 in a row": "queued_", "CUDA graph": "graph_"}
# columns of a screen, where a run is read once and not beside a page
SCREEN: Mapping[str, Number] = {
    "of functions": lambda row: f"{row['to_functions']:.2f}" if "to_functions" in row else "",
    "error": lambda row: f"{row['share_of_limit']:.0%}" if row.get("share_of_limit") is not None else "",
}


@dataclass(frozen=True)
class Table:
    """Hold the heads of the columns, and the cells of each line."""

    columns: list[str]
    lines: list[list[str]]


def to_markdown(table: Table) -> list[str]:
    """Return the lines of a Markdown table, numbers aligned to the right."""
    align = "|".join(["---", *["---:"] * (len(table.columns) - 1)])
    head, *body = (f"| {' | '.join(cells)} |" for cells in (table.columns, *table.lines))
    return [head, f"|{align}|", *body]


def build_table(
    name: str,
    measured: Sequence[Row],
    without: Sequence[Row] = (),
    of_limit: Callable[[Row], float | None] = lambda row: row.get("of_limit"),
    more: Mapping[str, Number] | None = None,
) -> Table:
    """Return the table of a pass.

    measured: its rows with numbers. without: its last rows that have none. of_limit: share of what bytes and
    flop allow. more: further columns of a table of times.
    """
    makers = {"cold": _cold, "accuracy": _accuracy, "e2e": _end_to_end, "model": _model}
    makers |= {"ranks": _ranks, "links": _links}
    make = makers.get(name.partition(":")[0])
    return make(measured) if make else _times(measured, without, of_limit, more or {})


def _times(
    measured: Sequence[Row],
    without: Sequence[Row],
    of_limit: Callable[[Row], float | None],
    more: Mapping[str, Number],
) -> Table:
    """Return a line for each row of gdn: its times and rates, then time and ratio of every peer.

    A run of peers alone has a line for each of their rows.
    """
    timed = [row for row in measured if "ms" in row]
    ours = [row for row in timed if owner_of(row["provider"]) == "gdn"]
    is_alone = len({row["case"] for row in ours}) == len(ours) and bool(ours)
    ours = ours or timed
    peers = [p for p in PEERS if any(p in row["ratio"] or p in row.get("then", {}) for row in ours)]
    beside = {(row["case"], row["provider"]): row for row in (*measured, *without)}
    numbers: dict[str, Number] = {
        "limit": lambda row: f"{share:.0%}" if (share := of_limit(row)) else "",
        "GB/s": lambda row: f"{row['gb_per_s']:.0f}" if row.get("gb_per_s") else "",
        "TFLOP/s": lambda row: f"{row['tflop_per_s']:.3g}" if row.get("tflop_per_s") else "",
        "of T = 1": lambda row: f"{row['to_single']:.2f}" if "to_single" in row else "",
        "with folds": lambda row: f"{row['with_folds']:.2f}" if "with_folds" in row else "",
        "MB": lambda row: f"{row['peak_mb']:.0f}" if "peak_mb" in row else "",
        **more,
    }
    numbers = {name: number for name, number in numbers.items() if any(number(row) for row in ours)}
    lines = [
        [
            row["case"] if is_alone else f"{row['case']}, {row['provider']}",
            format_time(row["ms"]), f"{format_time(row['p20'])} to {format_time(row['p80'])}",
            *(number(row) for number in numbers.values()),
            *(_peer(row, p, beside.get((row["case"], p), {})) for p in peers),
            row.get("backend") or "", row.get("commit") or "?",
        ]
        for row in ours
    ]  # fmt: skip
    theirs = [f"{title_of(p)} (ratio)" for p in peers]
    return Table(["", "gdn", "p20 to p80", *numbers, *theirs, "backend", "commit"], lines)


def _peer(row: Row, peer: str, last: Row) -> str:
    """Return a peer's time, ratio and memory beside a row of gdn, or the kind of reason why it has none."""
    then = row.get("then", {})
    if peer in row["ratio"]:
        ratio = row["ratio"][peer]
        memory = f", {last['peak_mb']:.0f} MB" if "peak_mb" in last else ""
        chunk = f", chunks of {row['best_chunk']}" if "best_chunk" in row else ""
        return f"{format_time(row['ms'] * ratio)} ({ratio:.2f}{chunk}){memory}"
    if peer in then:
        ratio = then[peer]["ratio"][peer]
        return f"{format_time(then[peer]['ms'] * ratio)} ({ratio:.2f} at {then[peer].get('commit') or '?'})"
    return reason(last)[0]


def _cold(measured: Sequence[Row]) -> Table:
    parts = ("first: forward", "first: backward", "first: decode")
    lines = [
        [
            row["provider"],
            *(f"{row['seconds'][part]:.1f} s" if part in row["seconds"] else "" for part in parts),
            str(row.get("compiled_again", "")),
        ]
        for row in measured
        if "seconds" in row
    ]
    columns = ["", "first forward", "first backward", "first decode", "compiled again for other problems"]
    return Table(columns, lines)


def _accuracy(judged: Sequence[Row]) -> Table:
    there = dict.fromkeys(name for row in judged for name in row["errors"])
    # outputs of the rule in their order, then those of stages
    outputs = [*(name for name in OUTPUTS if name in there), *(name for name in there if name not in OUTPUTS)]
    lines = [
        [
            f"{row['case']}, {row['provider']}, {row['dtype']}",
            *(_error(row["errors"].get(name, "")) for name in outputs),
            "yes" if row["ok"] else "no",
        ]
        for row in judged
    ]
    return Table(["", *outputs, "within limits"], lines)


def _model(measured: Sequence[Row]) -> Table:
    """Return a line for each provider: its step, its memory, and the GPU time of each kind of kernel."""
    kinds = list(dict.fromkeys(kind for row in measured for kind in row.get("kinds", {})))
    lines = [
        [
            f"{row['case']}, {row['provider']}",
            format_time(row["ms"]) if "ms" in row else "wrong",
            f"{row['peak_mb']:.0f}" if "peak_mb" in row else "",
            *(format_time(row["kinds"][kind]) if kind in row.get("kinds", {}) else "" for kind in kinds),
            _error(row.get("error", "")),
        ]
        for row in measured
    ]
    return Table(["", "step", "MB", *kinds, "error"], lines)


def _end_to_end(measured: Sequence[Row]) -> Table:
    shares = ("decided", "same_tokens", "decided_plain", "same_plain", "same_all")
    lines = [
        [
            f"{row['case']}, {row['provider']}",
            f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else "wrong",
            format_time(row["first_token_ms"]) if "first_token_ms" in row else "",
            *(_error(row.get(name, "")) for name in ("logit_error", "rms_error")),
            *(f"{row[name]:.0%}" if row.get(name) is not None else "" for name in shares),
        ]
        for row in measured
    ]
    columns = ["", "tokens/s", "first token", "logit error", "RMS error", "decided", "same of these"]
    return Table([*columns, "decided by plain torch's error", "same of these", "same of all"], lines)


def _ranks(measured: Sequence[Row]) -> Table:
    """Return a line for each row: jobs apart, then by the length of the sequence, then by ranks."""
    columns: list[tuple[str, Number]] = [("", _label_of_ranks)]
    for title, name in MANY_TIMED.items():
        columns += [
            (title, partial(_time, name=f"{name}ms")),
            ("speedup", partial(_number, name=f"{name}speedup", form="{:.2f}x")),
            ("weak", partial(_number, name=f"{name}weak", form="{:.3f}")),
            ("predicted", partial(_prediction, name=name)),
        ]
    columns += [
        ("MB a rank", partial(_number, name="peak_mb", form="{:.0f}")),
        ("FLA / gdn", lambda row: f"{row['ratio']['fla']:.2f}" if "fla" in row["ratio"] else ""),
        ("error", lambda row: _error(row.get("error", ""))),
    ]
    jobs = list(dict.fromkeys(row["case"].split()[2] for row in measured))
    order = sorted(
        measured, key=lambda row: (row["HV"], jobs.index(row["case"].split()[2]), row["T"], row["num_ranks"])
    )
    return _filled(columns, order)


def _label_of_ranks(row: Row) -> str:
    """Return the case; of FLA, whose exchange is its own, with its name in the place of gdn's exchange."""
    if owner_of(row["provider"]) == "gdn":
        return str(row["case"])
    return f"{row['case'].rpartition(', ')[0]}, {title_of(row['provider'])}"


def _links(measured: Sequence[Row]) -> Table:
    columns: list[tuple[str, Number]] = [
        ("", lambda row: str(row["case"])),
        ("one call", partial(_time, name="ms")),
        ("8 in a row", partial(_time, name="queued_ms")),
        ("predicted", partial(_prediction, name="")),
        ("GB/s", partial(_number, name="queued_gb_per_s", form="{:.1f}")),
        ("latency", partial(_number, name="latency_us", form="{:.1f} us")),
        ("bandwidth", partial(_number, name="link_gb_per_s", form="{:.0f} GB/s")),
    ]
    return _filled(columns, measured)


def _filled(columns: Sequence[tuple[str, Number]], measured: Sequence[Row]) -> Table:
    """Return the table of those columns that have text in any row."""
    cells = [[number(row) for row in measured] for _, number in columns]
    there = [i for i, texts in enumerate(cells) if i == 0 or any(texts)]
    lines = zip(*(cells[i] for i in there), strict=True)
    return Table([columns[i][0] for i in there], [list(line) for line in lines])


def _time(row: Row, name: str) -> str:
    return format_time(row[name]) if name in row else ""


def _number(row: Row, name: str, form: str) -> str:
    return form.format(row[name]) if row.get(name) is not None else ""


def _prediction(row: Row, name: str) -> str:
    """Return the time of the cost model, and its share of the measured one."""
    share = predicted(row, name)
    if share is None:
        return ""
    # links are predicted without host time, as 8 in a row
    measured = row["queued_ms"] if row["pass"] == "links" else row[f"{name}ms"]
    return f"{format_time(share * measured)} ({share:.2f})"


def predicted(row: Row, name: str) -> float | None:
    """Return the share of the cost model's time in a measured one; name: a value of MANY_TIMED.

    The model of calls in a row holds for a CUDA graph, too: neither waits for the host.
    """
    if name == "graph_" and "queued_predicted_ms" in row and "graph_ms" in row:
        return float(row["queued_predicted_ms"] / row["graph_ms"])
    return row.get(f"{name}predicted")


def notes(rows: Sequence[Row]) -> list[str]:
    """Return a line for each row without numbers, and for each one timed or judged in an unusual way."""
    lines = []
    for row in rows:
        where = f"{row['pass']} {row['case']}, {row['provider']}"
        kind, words = reason(row)
        if kind:
            lines.append(f"{where}: {kind}: {words}")
        if row.get("why"):
            lines.append(f"{where}: timed by {row['timer']}: {row['why']}")
        if row.get("worse"):
            lines.append(f"{where}: less accurate than a peer in {', '.join(row['worse'])}")
    return [*lines, *other_ways(rows), *timed_regions(rows)]


def reason(row: Row) -> tuple[str, str]:
    """Return why a row has no numbers: a kind (refused, failed, skipped, absent, error, wrong) and a text."""
    for kind in ("refused", "failed", "skipped", "absent", "error_message"):
        if row.get(kind):
            return kind.removesuffix("_message"), row[kind]
    if row.get("errors") and not row["ok"]:
        # a file has null for numbers that are not finite
        errors = {x: math.inf if e is None else e for x, e in row["errors"].items()}
        return "wrong", ", ".join(f"{x} {e:.1e}" for x, e in errors.items())
    return "", ""


def reasons(without: Sequence[Row]) -> list[str]:
    """Return the providers without a time, with problems and reasons; equal reasons share a line."""
    cases_of: dict[tuple[str, str], list[str]] = {}
    for row in without:
        kind, words = reason(row)
        if kind == "wrong":
            share = row.get("share_of_limit")
            words = "no finite answer" if share is None else f"an error {share:.2f} times its limit"
            if share is not None and share <= 1:
                words = "another token than the reference's where that is decided"
        name, _, rest = row["provider"].partition(":")
        who = f"{title_of(name)}{f' ({rest})' if rest else ''}"
        cases_of.setdefault((who, f"{kind}, {words}"), []).append(row["case"])
    return [f"no time of {who} in {', '.join(cases)}: {why}" for (who, why), cases in cases_of.items()]


def other_ways(rows: Sequence[Row]) -> list[str]:
    """Return which rows stand beside another way of the peers, in a line for each pair of ways."""
    pairs = dict.fromkeys(
        (row["case"].rpartition(" ")[2], row["peer_way"]) for row in rows if "peer_way" in row
    )
    return [f"in the rows of {way} the other libraries' time is that of {theirs}" for way, theirs in pairs]


def timed_regions(rows: Sequence[Row]) -> list[str]:
    """Return what the times of stages include; stages with equal texts share a line."""
    names_of: dict[str, list[str]] = {}
    for row in rows:
        if row.get("inside"):
            names = names_of.setdefault(row["inside"], [])
            stage = row["case"].rpartition(" ")[2]
            if stage not in names:
                names.append(stage)
    return [f"inside the time of {', '.join(names)}: {what}" for what, names in names_of.items()]


def summarize(row: Row) -> str:
    """Return a row in one line, as it is measured."""
    where = f"{row['pass']} {row['case']} {row['provider']}"
    if "ms" in row:
        return f"{where} {format_time(row['ms'])}"
    return f"{where} {reason(row)[0] or 'measured'}"


def format_bytes(size: float) -> str:
    """Return a number of bytes as KiB or MiB.

    >>> format_bytes(4096), format_bytes(2 * 2**20)
    ('4 KiB', '2 MiB')
    """
    return f"{size / 2**10:g} KiB" if size < 2**20 else f"{size / 2**20:g} MiB"


def format_time(ms: float) -> str:
    """Return milliseconds, or microseconds below a tenth of one, in three digits."""
    x, unit = (ms, "ms") if ms >= 0.1 else (1e3 * ms, "us")
    return f"{x:.0f} {unit}" if x >= 100 else f"{x:.3g} {unit}"


def _error(x: Any) -> str:
    return "-" if x is None else f"{x:.1e}" if isinstance(x, float) else str(x)
