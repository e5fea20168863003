"""Pages made from results files, and from nothing else: docs/results.md, and what README says was measured.

Of each thing the last row of ours counts. It holds the ratios of peers timed in its own run; one timed beside
the same commit in another run, as they compile too long for one, comes with the ratio of that run.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdn.bench import rows, tables
from gdn.bench.accuracy import OUTPUTS
from gdn.bench.rows import Row

NAMES = {"fla": "FLA", "flash_qla": "FlashQLA", "flashinfer": "FlashInfer", "transformers": "Transformers"}
PACKAGES = {
    "fla": "flash-linear-attention", "flash_qla": "flash-qla", "flashinfer": "flashinfer-python",
    "transformers": "transformers", "gdn": "gdn",
}  # fmt: skip
ABOUT = {
    "prefill": "forward, packed sequences, bf16, K = V = 128, fp32 states in and out",
    "train": "forward and backward, bf16, K = V = 128, with states and their gradients",
    "decode": "one token for B rows, states in a pool, gates and l2norm inside, 16/32 heads",
    "step": "a layer's step for B rows, convolution, decode and gated norm, 16/32 heads",
    "spec": "T tokens for B rows, the state after each kept, 16/32 heads",
    "stages": "forward, stage by stage, on PTO's shape and its GVA set; what is inside a time stands below",
    "layer": "the whole layer, forward and backward",
    "e2e": "a random-weight model in Transformers: prompt x tokens written",
    "host": "host time of an eager call",
    "cold": "a new process with empty caches",
    "accuracy": "largest relative RMS error against the law in fp64, by regime",
    "cpu": "fp32, 16 heads of 128 x 128",
}
Cells = tuple[list[str], list[list[str]]]  # columns, and rows under them
MARKS = ("<!-- made by gdn plot -->", "<!-- end -->")


@dataclass(frozen=True)
class Results:
    """The rows of one file, whose name is the machine's kind: h200, cpu."""

    name: str
    rows: Sequence[Row]

    def last(self, *passes: str) -> list[Row]:
        """The last measured row of each thing in these passes and their variants, in the file's order."""
        kept: dict[Any, Row] = {}
        for row in self.rows:
            if rows.is_measured(row) and row["pass"].partition(":")[0] in passes:
                key = rows.key({**row, "provider": owner(row["provider"])})
                before = kept.get(key, {})
                if row.get("ratio") and before.get("commit") == row.get("commit"):
                    row = {**row, "ratio": {**before.get("ratio", {}), **row["ratio"]}}
                kept[key] = row
        return list(kept.values())

    def ours(self, *passes: str) -> list[Row]:
        """Of these, ours."""
        return [row for row in self.last(*passes) if owner(row["provider"]) == "gdn"]

    @property
    def passes(self) -> list[str]:
        """The passes there are, variants apart, in the order of ABOUT."""
        found = dict.fromkeys(row["pass"] for row in self.rows if rows.is_measured(row))
        order = {job: i for i, job in enumerate(ABOUT)}
        known = [(order[job], name) for name in found if (job := name.partition(":")[0]) in order]
        return [name for _, name in sorted(known)]

    @property
    def ceilings(self) -> tuple[float, float]:
        """The highest GB/s and TFLOP/s seen here: of copies and products, or of a job that went past them."""
        copy = [row[name] for row in self.rows for name in ("copy_gb_per_s", "gb_per_s") if name in row]
        matmul = [
            row[name] for row in self.rows for name in ("matmul_tflop_per_s", "tflop_per_s") if name in row
        ]
        return max(copy, default=0.0), max(matmul, default=0.0)

    def of_limit(self, row: Row) -> float | None:
        """The share of what bytes and products allow at these rates."""
        copy, matmul = self.ceilings
        if not copy or not matmul or "bytes" not in row or "ms" not in row:
            return None
        return 1e3 * max(row["bytes"] / copy / 1e9, row["flop"] / matmul / 1e12) / float(row["ms"])


def owner(provider: str) -> str:
    """gdn for each of its backends, else the provider."""
    return provider.partition(":")[0]


def load(folder: Path, limits: Mapping[str, int] | None = None) -> list[Results]:
    """Every results file of a folder, or its first rows: files only grow."""
    found = []
    for path in sorted(folder.glob("*.jsonl"), key=lambda p: (p.stem == "cpu", p.stem)):
        held = rows.read(path)
        found.append(Results(path.stem, held[: (limits or {}).get(path.stem, len(held))]))
    return found


def page(found: Iterable[Results], pictures: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """docs/results.md. pictures: file name of results -> (title, path beside the page) of each."""
    found = list(found)
    made_from = ", ".join(f"{len(one.rows)} rows of {one.name}.jsonl" for one in found)
    text = [
        "# Results", "",
        f"Made by `gdn plot` from {made_from} (`benchmarks/results/`), not by hand.",
        "How a number comes about: [measuring.md](measuring.md). A ratio is a peer's time over ours in the",
        "same run: above 1, ours is faster. Where peers were timed beside one commit in several runs, ours",
        "is of the last one, and a peer's time is its ratio times that. Limit: the share of what bytes and",
        "products allow at the highest rates seen on that GPU.", "",
    ]  # fmt: skip
    for one in found:
        text += [f"## {machine(one)}", ""]
        text += [line for sentence in statements(one) for line in (f"- {sentence}",)]
        text += ["", *(f"![{title}]({path})" for title, path in pictures.get(one.name, ())), ""]
        for name in one.passes:
            text += section(one, name)
    return "\n".join(text).rstrip() + "\n"


def readme(found: Iterable[Results]) -> str:
    """What README says: the statements of each machine."""
    text = []
    for one in found:
        sentences = statements(one)
        text += [f"- {sentence}" for sentence in sentences]
    return "\n".join(text) + "\n"


def between(text: str, made: str) -> str:
    """A page with what stands between the two marks replaced. ValueError without marks."""
    start, end = (text.find(mark) for mark in MARKS)
    if start < 0 or end < start:
        raise ValueError(f"expected a page with {MARKS[0]} and {MARKS[1]}, got one without")
    return text[: start + len(MARKS[0])] + "\n" + made + text[end:]


def machine(one: Results) -> str:
    """The GPU, or the processor and its threads."""
    last: Row = next((row for row in reversed(one.rows) if "ms" in row), one.rows[-1] if one.rows else {})
    return last.get("gpu") or f"{last.get('cpu', one.name)}, {last.get('threads', '?')} threads"


def statements(one: Results) -> list[str]:
    """How many times as fast as each peer, pass by pass: cases, versions, date, commit, command."""
    found = []
    for name in one.passes:
        ours = [row for row in one.ours(name.partition(":")[0]) if row["pass"] == name and row.get("ratio")]
        for peer in dict.fromkeys(p for row in ours for p in row["ratio"]):
            with_peer = [row for row in ours if peer in row["ratio"]]
            ordered = sorted(with_peer, key=lambda row, peer=peer: row["ratio"][peer])  # type: ignore[misc]
            found.append(_statement(machine(one), name, peer, ordered))
    return found


def _statement(where: str, name: str, peer: str, ordered: Sequence[Row]) -> str:
    least, most = ordered[0], ordered[-1]

    def factor(row: Row) -> str:
        own = row["ms"]
        return (
            f"{row['ratio'][peer]:.2f} ({row['case']}: {time(own)} against {time(own * row['ratio'][peer])})"
        )

    span = factor(least) if least is most else f"{factor(least)} to {factor(most)}"
    count = f"{len(ordered)} problems" if len(ordered) > 1 else "one problem"
    return (
        f"`{name}`: {span} times as fast as {NAMES.get(peer, peer)} {version(least, peer)}, in {count}; "
        f"{where}, {provenance(ordered)}; `{command(name, least['case'] if least is most else None)}`"
    )


def provenance(found: Sequence[Row]) -> str:
    """Versions, commits and dates of some rows."""
    last = found[-1]
    held = [f"gdn at {_spread(row.get('commit') or '?' for row in found)}"]
    held += [f"{name} {last['versions'][name]}" for name in ("torch", "triton") if name in last["versions"]]
    return ", ".join([*held, _spread(row["date"] for row in found)])


def version(row: Row, provider: str) -> str:
    """The version of a provider's package in a row."""
    return str(row["versions"].get(PACKAGES.get(provider, provider), "?"))


def command(name: str, case: str | None = None) -> str:
    """What measures a pass, or one case of it, again."""
    job, _, variant = name.partition(":")
    if job == "accuracy":
        return "gdn verify --set regimes --append"
    options = [] if job == "cpu" or case is None else ["--only", case]
    options += {"": [], "eager": ["--eager"]}.get(variant, ["--variant", variant.removesuffix(":eager")])
    return shlex.join(["gdn", "bench", job, *options])


def section(one: Results, name: str) -> list[str]:
    """One pass: its table, and the command."""
    held = [row for row in one.last(name.partition(":")[0]) if row["pass"] == name]
    job = name.partition(":")[0]
    make = {"cold": _cold, "accuracy": _accuracy, "e2e": _end_to_end}.get(job)
    columns, cells = make(held) if make else _times(held, one.of_limit)
    if not cells:
        return []
    align = "|".join(["---", *["---:"] * (len(columns) - 1)])
    lines = [f"| {' | '.join(row)} |" for row in (columns, *cells)]
    lines.insert(1, f"|{align}|")
    notes = [line for note in tables.inside(held) for line in (f"{note}.", "")]
    return [f"### {name}", "", f"{ABOUT[job]}; {provenance(held)}; `{command(name)}`", "", *lines, "", *notes]


def _times(held: Sequence[Row], of_limit: Callable[[Row], float | None]) -> Cells:
    """Ours with its spread, then every peer's time in the same run and how often ours fits into it."""
    ours = [row for row in held if owner(row["provider"]) == "gdn" and "ms" in row]
    peers = [p for p in NAMES if any(p in row.get("ratio", {}) for row in ours)]
    has_limit = any(of_limit(row) for row in ours)
    cells = []
    for row in ours:
        spread = f"{time(row['p20'])} to {time(row['p80'])}"
        share = of_limit(row)
        limit = [f"{share:.0%}" if share else ""] if has_limit else []
        theirs = [
            f"{time(row['ms'] * row['ratio'][p])} ({row['ratio'][p]:.2f}{_chunk(row)})"
            if p in row.get("ratio", {})
            else ""
            for p in peers
        ]
        cells.append(
            [row["case"], time(row["ms"]), spread, *limit, *theirs, _backend(row), row.get("commit") or "?"]
        )
    columns = ["", "gdn", "p20 to p80", *(["limit"] if has_limit else [])]
    return [*columns, *(f"{NAMES[p]} (ratio)" for p in peers), "backend", "commit"], cells


def _cold(held: Sequence[Row]) -> Cells:
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


def _accuracy(held: Sequence[Row]) -> Cells:
    outputs = [name for name in OUTPUTS if any(name in row["errors"] for row in held)]
    cells = [
        [
            f"{row['case']}, {row['provider']}, {row['dtype']}",
            *(_error(row["errors"].get(name, "")) for name in outputs),
            "yes" if row["ok"] else "no",
        ]
        for row in held
    ]
    return ["", *outputs, "within limits"], cells


def _end_to_end(held: Sequence[Row]) -> Cells:
    cells = [
        [
            f"{row['case']}, {row['provider']}", f"{row['tokens_per_s']:.0f}", time(row["first_token_ms"]),
            f"{row['logit_error']:.1e}", f"{row['same_tokens']:.0%}",
        ]
        for row in held
        if "tokens_per_s" in row
    ]  # fmt: skip
    return ["", "tokens/s", "first token", "logit error", "same token where it is decided"], cells


def _error(x: Any) -> str:
    return "-" if x is None else f"{x:.1e}" if isinstance(x, float) else str(x)


def time(ms: float) -> str:
    """Milliseconds, or microseconds below a tenth of one, in three digits."""
    x, unit = (ms, "ms") if ms >= 0.1 else (1e3 * ms, "us")
    return f"{x:.0f} {unit}" if x >= 100 else f"{x:.3g} {unit}"


def _chunk(row: Row) -> str:
    """The peer's best chunk size, where stages were timed."""
    return f", chunks of {row['best_chunk']}" if "best_chunk" in row else ""


def _backend(row: Row) -> str:
    return row.get("backend") or ""


def _spread(found: Iterable[str]) -> str:
    """One value, or the first and the last of several."""
    ordered = sorted(set(found))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
