"""Make docs/results.md and a page of each pass from results files; `summary` makes the README's table.

The last row of each problem and provider counts. A row of gdn has the ratios of the peers timed in its own
run. A peer timed beside the same commit in another run, since both compile too long for one, has the ratio of
that run. A peer timed beside an older commit is shown with that commit. A peer whose last row has no time is
shown with the reason.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdn_bench.judging.readings import OF_FLA, over_peer
from gdn_bench.providers.names import PEERS, owner_of, title_of
from gdn_bench.results import rows, scaling, tables
from gdn_bench.results.rows import Row
from gdn_bench.results.tables import format_time

ABOUT = {
    "prefill": "forward, packed sequences, bf16, K = V = 128, fp32 states in and out",
    "train": "forward and backward, bf16, K = V = 128, with states and their gradients",
    "decode": "one token for B rows, states in a pool, gates and l2norm inside, 16/32 heads",
    "step": "a layer's step for B rows, convolution, decode and gated norm, 16/32 heads",
    "spec": "T tokens for B rows, verified in the ways of measuring.md; 16/32 heads",
    "stages": "forward, stage by stage, on PTO's shape and its GVA set; what times include is noted below",
    "layer": "the whole layer, forward and backward",
    "e2e": "a model with random weights in Transformers: prompt + generated tokens",
    "model": "a training step of a model with random weights in Transformers",
    "ranks": "one long sequence on several GPUs beside one, bf16, K = V = 128",
    "links": "collectives and exchanges of states between GPUs",
    "host": "host time of a call launched from Python",
    "cold": "a new process with empty caches",
    "accuracy": "relative RMS error against the reference in fp64",
    "cpu": "fp32, 16 heads of 128 x 128; `kda`: a decay per key channel, 4 heads",
}
MARKS = ("<!-- made by gdn bench plot -->", "<!-- end -->")


@dataclass(frozen=True)
class Results:
    """Hold the rows of one file, whose name is the kind of machine: h200, cpu."""

    name: str
    rows: Sequence[Row]

    def last(self, *passes: str) -> list[Row]:
        """Return the last measured row of each problem and provider in these passes and their variants.

        In each row, then: peer -> the row of an older commit that the peer was last timed beside.
        """
        kept: dict[Any, Row] = {}
        for row in self.rows:
            if rows.is_measured(row) and row["pass"].partition(":")[0] in passes:
                key = rows.key({**row, "provider": owner_of(row["provider"])})
                kept[key] = _after(row, kept.get(key, {}))
        gone = {(row["pass"], row["case"], row["provider"]) for row in self.without_time}
        for row in kept.values():
            for name in ("ratio", "then"):
                row[name] = {p: x for p, x in row[name].items() if (row["pass"], row["case"], p) not in gone}
        return list(kept.values())

    @property
    def without_time(self) -> list[Row]:
        """Return the last rows of what was refused, failed or was wrong; all backends of gdn count as one."""
        last: dict[Any, Row] = {}
        for row in self.rows:
            if "skipped" not in row:
                who = "gdn" if owner_of(row["provider"]) == "gdn" else row["provider"]
                last[rows.key({**row, "provider": who})] = row
        return [row for row in last.values() if not _is_timed(row) and tables.reason(row)[0]]

    def ours(self, *passes: str) -> list[Row]:
        """Return the rows of gdn among `last`."""
        return [row for row in self.last(*passes) if owner_of(row["provider"]) == "gdn"]

    @property
    def passes(self) -> list[str]:
        """Return the passes that have rows, each variant by itself, in the order of ABOUT."""
        names = dict.fromkeys(row["pass"] for row in self.rows if rows.is_measured(row))
        order = {job: i for i, job in enumerate(ABOUT)}
        ordered = [(order[job], name) for name in names if (job := name.partition(":")[0]) in order]
        return [name for _, name in sorted(ordered)]

    @property
    def ceilings(self) -> tuple[float, float]:
        """Return the highest GB/s and TFLOP/s of copies, of bf16 MMAs, or of a job that exceeded them."""
        copy = [row[name] for row in self.rows for name in ("copy_gb_per_s", "gb_per_s") if name in row]
        matmul = [
            row[name] for row in self.rows for name in ("matmul_tflop_per_s", "tflop_per_s") if name in row
        ]
        return max(copy, default=0.0), max(matmul, default=0.0)

    def of_limit(self, row: Row) -> float | None:
        """Return the share of the speed that bytes and flop allow at these rates."""
        copy, matmul = self.ceilings
        if not copy or not matmul or "bytes" not in row or "ms" not in row:
            return None
        return 1e3 * max(row["bytes"] / copy / 1e9, row["flop"] / matmul / 1e12) / float(row["ms"])


def _after(row: Row, before: Row) -> Row:
    """Return a row with the peers of the row before it: in `ratio` those of its commit, others in `then`."""
    if "ms" not in row:
        return {**row, "ratio": {}, "then": {}}
    ratio, earlier = row.get("ratio", {}), before.get("ratio", {})
    if before.get("commit") == row.get("commit"):
        ratio = {**earlier, **ratio}
    then = {**before.get("then", {}), **dict.fromkeys(earlier, before)}
    return {**row, "ratio": ratio, "then": {p: x for p, x in then.items() if p not in ratio}}


def _is_timed(row: Row) -> bool:
    """Return True for a row that a table can show; a wrong row of accuracy has errors to show."""
    return "ms" in row or "seconds" in row or ("errors" in row and row["pass"].startswith("accuracy"))


def load(folder: Path, limits: Mapping[str, int] | None = None) -> list[Results]:
    """Return the results of each file of a folder, most rows first and the CPU last.

    limits: name -> number of first rows to read.
    """
    loaded = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = rows.read(path)
        loaded.append(Results(path.stem, lines[: (limits or {}).get(path.stem, len(lines))]))
    return sorted(loaded, key=lambda one: (one.name == "cpu", -len(one.rows)))


def page(
    results: Iterable[Results], pictures: Mapping[str, Sequence[tuple[str, str]]], folder: str = "results"
) -> str:
    """Return the text of docs/results.md: statements, pictures, and links to the pages of the passes.

    pictures: name of results -> (title, path) of each. folder: the folder of the other pages.
    """
    results = list(results)
    made_from = ", ".join(f"{len(one.rows)} rows of {one.name}.jsonl" for one in results)
    links = ", ".join(f"[{job}]({folder}/{job}.md)" for job in pass_pages(results))
    text = [
        "# Results", "",
        f"Made by `gdn bench plot` from {made_from} (`benchmarks/results/`), not by hand.",
        "[Measuring](measuring.md) says how each number is measured. A ratio is the other library's time",
        "over gdn's in the same run: above 1, gdn is faster. If libraries were timed beside one commit of",
        "gdn in several runs, gdn's time is that of the last run, and another library's time is its ratio",
        "multiplied by that. If a library was last timed beside an older commit, its line names that commit.",
        "",
        f"All rows, one page for each pass: {links}.", "",
    ]  # fmt: skip
    for one in results:
        text += [f"## {machine(one)}", ""]
        text += [line for sentence in statements(one) for line in (f"- {sentence}",)]
        text += ["", *(f"![{title}]({path})" for title, path in pictures.get(one.name, ())), ""]
    return "\n".join(text).rstrip() + "\n"


def pass_pages(
    results: Iterable[Results], pictures: Mapping[str, Sequence[tuple[str, str]]] | None = None
) -> dict[str, str]:
    """Return the page of each pass, by its name: the tables of its variants on each machine.

    pictures: as those of `page`; the pages of several GPUs begin with theirs.
    """
    results = list(results)
    texts = {}
    for job, about in ABOUT.items():
        lines = []
        for one in results:
            tables_of_job = [section(one, name) for name in one.passes if name.partition(":")[0] == job]
            if any(tables_of_job):
                drawn = _pictures_of(job, (pictures or {}).get(one.name, ()))
                lines += [f"## {machine(one)}", "", *drawn, *(x for table in tables_of_job for x in table)]
        if lines:
            head = [
                f"# Results of {job}", "",
                f"`{job}`: {about}.", "",
                "Made by `gdn bench plot`, not by hand. [All results](../results.md) says what a ratio is.",
                *_columns_of(job), "",
            ]  # fmt: skip
            texts[job] = "\n".join([*head, *lines]).rstrip() + "\n"
    return texts


def _pictures_of(job: str, pictures: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines that show the pictures of a pass of several GPUs, from its own page."""
    names = [(title, path.rpartition("/")[2]) for title, path in pictures]
    shown = [(title, name) for title, name in names if job in scaling.EXPLAINED and f"-{job}" in name]
    return [line for title, name in shown for line in (f"![{title}]({name})", "")]


def _columns_of(job: str) -> list[str]:
    """Return the lines of a page that explain the columns of its tables."""
    if job not in scaling.EXPLAINED:
        return [
            "Limit: the speed as a share of the roofline (the highest HBM and MMA rates measured there).",
            "MB: the most memory that a call allocates beyond its inputs.",
        ]
    return [scaling.EXCHANGES_PAGE, "", *(f"- {line}." for line in scaling.EXPLAINED[job])]


def between(text: str, made: str) -> str:
    """Return a page with the text between the two marks replaced. ValueError without marks."""
    start, end = (text.find(mark) for mark in MARKS)
    if start < 0 or end < start:
        raise ValueError(f"expected a page with {MARKS[0]} and {MARKS[1]}, got one without")
    return text[: start + len(MARKS[0])] + "\n" + made + text[end:]


def machine(one: Results) -> str:
    """Return the name of the GPU, or of the processor with its threads."""
    last: Row = next((row for row in reversed(one.rows) if "ms" in row), one.rows[-1] if one.rows else {})
    return last.get("gpu") or f"{last.get('cpu', one.name)}, {last.get('threads', '?')} threads"


def statements(one: Results) -> list[str]:
    """Return sentences on each pass and peer: ratios, problems, versions, dates, commits, command."""
    sentences = []
    for name in one.passes:
        if name.partition(":")[0] in scaling.EXPLAINED:
            sentences += _scaling_statements(one, name)
        ours = [row for row in one.ours(name.partition(":")[0]) if row["pass"] == name and row.get("ratio")]
        for peer in dict.fromkeys(p for row in ours for p in row["ratio"]):
            with_peer = [row for row in ours if peer in row["ratio"]]
            ordered = sorted(with_peer, key=lambda row, peer=peer: row["ratio"][peer])  # type: ignore[misc]
            sentences.append(_statement(machine(one), name, peer, ordered))
        if name.partition(":")[0] == "accuracy":
            sentences += _accuracy_statements(one, name)
    return sentences


def _statement(where: str, name: str, peer: str, ordered: Sequence[Row]) -> str:
    least, most = ordered[0], ordered[-1]

    def factor(row: Row) -> str:
        own, ratio = row["ms"], row["ratio"][peer]
        return f"{ratio:.2f} ({row['case']}: {format_time(own)} against {format_time(own * ratio)})"

    range_ = factor(least) if least is most else f"{factor(least)} to {factor(most)}"
    count = f"{len(ordered)} problems" if len(ordered) > 1 else "one problem"
    how = ", by its context parallelism on the same ranks" if name.partition(":")[0] == "ranks" else ""
    again = _commands(name, ordered, [peer], least["case"] if least is most else None)
    return (
        f"`{name}`: {range_} times as fast as {title_of(peer)} {version(least, peer)}{how}, in {count}; "
        f"{where}, {provenance(ordered)}; {again}"
    )


def _scaling_statements(one: Results, name: str) -> list[str]:
    """Return sentences on rows of several GPUs: speed beside one GPU, fits of the links."""
    measured = [row for row in one.last(name.partition(":")[0]) if row["pass"] == name]
    return [
        f"{sentence}; {machine(one)}, {provenance(of_it)}; {_commands(name, of_it)}"
        for sentence, of_it in scaling.statements(name, measured)
    ]


def _accuracy_statements(one: Results, name: str) -> list[str]:
    """Return sentences on gdn's errors over those of each peer on equal inputs."""
    judged = [
        row for row in one.last("accuracy") if row["pass"] == name and row.get("profile", "gdn") == "gdn"
    ]
    ours = {(row["case"], row["dtype"]): row for row in judged if owner_of(row["provider"]) == "gdn"}
    sentences = []
    for peer in PEERS:
        theirs = {(row["case"], row["dtype"]): row for row in judged if row["provider"] == peer}
        both = [(row, theirs[what]) for what, row in ours.items() if what in theirs]
        ratios = {
            (row["case"], x, row["dtype"]): over_peer(row["errors"][x], other["errors"][x])
            for row, other in both
            for x in row["errors"]
            if None not in (row["errors"][x], other["errors"].get(x))
        }
        if not ratios:
            continue
        ends = (f(ratios, key=ratios.__getitem__) for f in (min, max))
        range_ = " to ".join(f"{ratios[end]:.2f} ({end[0]}: {end[1]})" for end in ends)
        gates = [ratio for (_, x, _), ratio in ratios.items() if x in OF_FLA]
        of_gates = f", of {' and '.join(OF_FLA)} {min(gates):.2f} to {max(gates):.2f}" if gates else ""
        sentences.append(
            f"`{name}`: errors of outputs and gradients {range_} times those of {title_of(peer)} "
            f"{version(both[-1][1], peer)}{of_gates}, in {len(both)} problems; {machine(one)}, "
            f"{provenance([row for row, _ in both])}; `{command(name)}`"
        )
    return sentences


def provenance(measured: Sequence[Row]) -> str:
    """Return commits, versions and dates of some rows as text."""
    last = measured[-1]
    versions = [f"gdn at {spread(row.get('commit') or '?' for row in measured)}"]
    versions += [
        f"{name} {last['versions'][name]}" for name in ("torch", "triton") if name in last["versions"]
    ]
    return ", ".join([*versions, spread(row["date"] for row in measured)])


def version(row: Row, provider: str) -> str:
    """Return the version of a provider's package in a row."""
    return str(row["versions"].get(PEERS[provider].distribution if provider in PEERS else provider, "?"))


def command(name: str, case: str | None = None) -> str:
    """Return the command that measures a pass, or one case of it, again."""
    job, _, variant = name.partition(":")
    if job == "accuracy":
        problems, _, profile = (variant or "distributions").partition(":")
        judged = ["--profile", profile] if profile else []
        return shlex.join(["gdn", "verify", "--set", problems, *judged, "--append"])
    options = [] if job == "cpu" or case is None else ["--only", case]
    options += {"": [], "eager": ["--eager"]}.get(variant, ["--variant", variant.removesuffix(":eager")])
    return shlex.join(["gdn", "bench", job, *options])


def _commands(name: str, measured: Sequence[Row], peers: Iterable[str] = (), case: str | None = None) -> str:
    """Return the commands that measure some rows of a pass again, as code."""
    is_scaling = name.partition(":")[0] in scaling.EXPLAINED
    made = scaling.commands(name, measured, peers) if is_scaling else [command(name, case)]
    return ", ".join(f"`{x}`" for x in made)


def section(one: Results, name: str) -> list[str]:
    """Return the heading, table, command and notes of one pass."""
    job = name.partition(":")[0]
    measured = [row for row in one.last(job) if row["pass"] == name]
    without = [row for row in one.without_time if row["pass"] == name]
    table = tables.build_table(name, measured, without, one.of_limit)
    if not table.lines:
        return []
    about = ABOUT[job]
    if measured[0].get("profile") == "pto":
        about += ", judged by pto-kernels' gates; ~: gdn against a peer"
    peers = [row["provider"] for row in measured if row["provider"] in PEERS]
    below = (*tables.other_ways(measured), *tables.timed_regions(measured), *tables.reasons(without))
    head = [f"### {name}", "", f"{about}; {provenance(measured)}; {_commands(name, measured, peers)}", ""]
    return [*head, *tables.to_markdown(table), "", *(line for note in below for line in (f"{note}.", ""))]


def spread(values: Iterable[str]) -> str:
    """Return one value, or the first and the last of several."""
    ordered = sorted(set(values))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
