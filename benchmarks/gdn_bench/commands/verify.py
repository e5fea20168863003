"""`gdn verify`: errors of backends and peers beside the reference, as a table, CSV, JSON and pictures."""

import csv
import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

import gdn
from gdn.cli.console import Device, Json, check_choice, console, find_device, need_packages, write_json
from gdn.cli.options import take_options
from gdn.testing import accuracy, cases
from gdn.testing.cases import Case
from gdn_bench.commands.console import name_file, open_progress, require_match, show_table, split_words
from gdn_bench.judging import readings
from gdn_bench.judging.readings import Reading
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.names import PROVIDERS
from gdn_bench.providers.provider import Bound, Provider
from gdn_bench.results import rows as rows_of
from gdn_bench.timing import measure

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
ENTRIES = {"chunk": gdn.chunk_gated_delta_rule, "recurrent": gdn.fused_recurrent_gated_delta_rule}
PROFILES = ("gdn", "pto")
SETS = ("covering", "quick", "full", *readings.NAMED)
# tokens times state elements; the reference takes about ten seconds for a case of this size
CI_COST = 2**25
STEM_WIDTH = 72  # characters of a case's name in the names of its pictures


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `verify`."""

    problems: Annotated[
        str,
        typer.Option(
            "--set",
            help=f"One of {', '.join(SETS)}: every pair of options; the same on small shapes; the whole "
            "product, or as much of it as --max-cases; or problems by name.",
        ),
    ] = "covering"
    profile: Annotated[
        str | None,
        typer.Option(help="gdn: the limits of gdn.testing; pto: those of pto-kernels. By the set."),
    ] = None
    names: Annotated[
        str | None,
        typer.Option(
            "--providers", help="gdn, gdn:BACKEND, fla, flash_qla, flash_kda, flashinfer, transformers."
        ),
    ] = None
    dtype: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(DTYPES)}; may be repeated.")] = (
        None
    )
    entry: Annotated[str, typer.Option(help=f"Function of gdn: one of {', '.join(ENTRIES)}.")] = "chunk"
    only: Annotated[str, typer.Option(help="Only cases whose name holds one of these.")] = ""
    max_cases: Annotated[int | None, typer.Option(min=0, help="Compare at most this many cases.")] = None
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for readings.csv and .json and two pictures per case and dtype."),
    ] = None
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no case after so many.")] = None
    resume: Annotated[
        bool, typer.Option(help="Leave out the rows that the results have of this commit and kind of GPU.")
    ] = False
    appends: Annotated[
        bool, typer.Option("--append", help="Add a row per case to benchmarks/results/<gpu>.jsonl.")
    ] = False
    into: Annotated[
        Path | None, typer.Option("--results", help="Add them to this JSON-lines file instead.")
    ] = None
    commit: Annotated[str | None, typer.Option(help="The commit of this tree, where git is absent.")] = None
    device: Device = None
    json_file: Json = None


@dataclass
class Outcome:
    """Hold the readings and rows of a run, and calls without any: kind -> reason -> calls."""

    readings: list[Reading] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    aside: dict[str, dict[str, list[str]]] = field(
        default_factory=lambda: {"refused": {}, "failed": {}, "skipped": {}}
    )
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Return True if gdn has readings, all within limits, none worse than a peer's, and no failure."""
        ours = [r.ok for r in self.readings if r.provider.startswith("gdn")]
        is_worse = any(row.get("worse") for row in self.rows)
        has_failed = any(who.startswith("gdn") for who in self.aside["failed"])
        if not self.readings and list(self.aside["skipped"]) == ["measured before"]:
            # a run that had nothing left is no failure; one that was cut short before it began is
            return True
        return bool(ours) and all(ours) and not is_worse and not has_failed


@take_options(VerifyOptions)
def verify(options: VerifyOptions) -> None:
    """Compare outputs and gradients with the fp64 reference. Exit code 1 if gdn exceeds a limit."""
    where = find_device(options.device)
    if options.out:
        need_packages("bench", "matplotlib")
    own = readings.profile_of(check_choice("set", options.problems, SETS))
    profile = check_choice("profile", options.profile or own, PROFILES)
    dtypes = [check_choice("dtype", x, DTYPES) for x in options.dtype or _dtypes(options.problems)]
    chosen = _cases(options.problems, options.max_cases, options.seed, split_words(options.only))
    everybody = ",".join(PROVIDERS) if options.problems in readings.NAMED else "gdn"
    outcome, about = Outcome(), measure.on_gpu(where)
    able, outcome.absent = _providers(
        options.names or everybody, check_choice("entry", options.entry, ENTRIES)
    )
    about |= {"commit": options.commit} if options.commit else {}
    file = options.into or measure.RESULTS / f"{measure.slug(where)}.jsonl"
    appends = options.appends or options.into is not None
    done = rows_of.done(rows_of.read(file), about) if options.resume and file.exists() else set()
    deadline = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    total = len(chosen) * len(dtypes) if isinstance(chosen, list) else None
    with open_progress() as report:
        for number, ((name, case), short) in enumerate(itertools.product(chosen, dtypes)):
            report("verify", number, total, f"{short} {name}")
            head = {**readings.label(options.problems, profile), "case": name, "dtype": _dtype_name(short)}
            is_late = time.monotonic() > deadline
            if is_late or all(rows_of.key({**head, "provider": who}) in done for who in able):
                why = "out of time" if is_late else "measured before"
                outcome.aside["skipped"].setdefault(why, []).append(f"{short} {name}")
                continue
            one = readings.examine(
                name, case, DTYPES[short], able, profile=profile, seed=options.seed, device=where
            )
            fresh = readings.rows(one, head)
            _collect(outcome, one, fresh, f"{short} {name}")
            if appends:
                measure.append(file, [{**row, **about} for row in fresh])
            if options.out:
                _draw(options.out, f"{number:03d} {name} {short}", one, case)
        if total:
            report("verify", total, total, "")
    if appends:
        name_file(file, len(outcome.rows))
    document = {**about, "ok": outcome.is_good, "profile": profile, "absent": outcome.absent, **outcome.aside}
    document["rows"] = [readings.flat(r) for r in outcome.readings]
    if options.out:
        _write_tables(options.out, document)
    if not write_json(options.json_file, document):
        _print(outcome)
    raise typer.Exit(0 if outcome.is_good else 1)


def _collect(outcome: Outcome, one: readings.Examined, fresh: list[dict[str, Any]], call: str) -> None:
    """Add one case to the outcome of a run."""
    outcome.readings += one.readings
    outcome.rows += fresh
    for kind, reasons in (("refused", one.refused), ("failed", one.failed)):
        for who, why in reasons.items():
            outcome.aside[kind].setdefault(f"{who}: {why}", []).append(call)


def _dtype_name(dtype: str) -> str:
    """Return the name of bf16, fp16, ... in rows: bfloat16, ..."""
    return str(DTYPES[dtype]).removeprefix("torch.")


def _dtypes(problems: str) -> tuple[str, ...]:
    if problems in readings.NAMED:
        return ("fp16", "bf16") if problems.startswith("pto") else ("bf16",)
    return ("bf16", "fp16", "fp32")


def _cases(
    problems: str, max_cases: int | None, seed: int, only: Sequence[str]
) -> Iterable[tuple[str, Case]]:
    """Return (name, case) of a set; the whole product is not made at once."""

    def is_wanted(name: str) -> bool:
        return not only or any(part in name for part in only)

    if problems == "full" and max_cases is None:
        # 129 million names; each of their parts occurs in a set that has every pair of options
        parts = [str(case) for case in cases.covering()] if only else []
        if not any(all(any(p in name for name in parts) for p in word.split()) for word in only):
            require_match(only, parts)
        everything = ((str(case), case) for case in cases.product())
        return (pair for pair in everything if is_wanted(pair[0]))
    if problems in readings.NAMED:
        named = list(readings.NAMED[problems].items())
    elif problems == "full":
        named = [(str(case), case) for case in cases.sample(max_cases or 0, seed=seed)]
    else:
        covering = cases.covering(cases.QUICK) if problems == "quick" else cases.covering(max_cost=CI_COST)
        named = [(str(case), case) for case in covering]
    if named:
        require_match(only, [name for name, _ in named])
    return [pair for pair in named if is_wanted(pair[0])][:max_cases]


def _providers(names: str, entry: str) -> tuple[dict[str, Provider], dict[str, str]]:
    """Return the providers that are installed, gdn by a function of it, and why others are absent."""
    able: dict[str, Provider] = {}
    absent: dict[str, str] = {}
    for name in split_words(names):
        try:
            loaded = load_provider(name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if isinstance(loaded, str):
            absent[name] = loaded
        else:
            able[name] = _entered(name, entry) if name.startswith("gdn") else loaded
    return able, absent


def _entered(name: str, entry: str) -> Provider:
    backend = name.partition(":")[2] or None

    def bind(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Bound:
        # the two functions have g and beta at different positions
        arguments = {**tensors, **options, "backend": backend}
        return Bound(lambda: ENTRIES[entry](**arguments))

    return Provider(name, {"prefill": bind, "train": bind})


def _write_tables(out: Path, document: Mapping[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_json(str(out / "readings.json"), document)
    with (out / "readings.csv").open("w", newline="", encoding="ascii") as file:
        writer = csv.DictWriter(file, list(document["rows"][0]) if document["rows"] else ["name"])
        writer.writeheader()
        writer.writerows(document["rows"])


def _draw(out: Path, name: str, one: readings.Examined, case: Case) -> None:
    from gdn_bench.judging import portraits

    if one.outputs:
        stem = "".join(c if c.isalnum() else "-" for c in name[:STEM_WIDTH])
        title = name.partition(" ")[2]
        portraits.scatter(out / f"{stem}-scatter.png", title, one)
        portraits.over_time(out / f"{stem}-time.png", title, one, case.lengths)


def _print(outcome: Outcome) -> None:
    """Print the worst error of each output, the narrowest passes, refusals and failures."""
    judged = outcome.readings
    _print_worst(judged)
    ours = [r for r in judged if r.provider.startswith("gdn")]
    for dtype in sorted({r.dtype for r in ours}):
        nearest = max((r for r in ours if r.dtype == dtype), key=_share)
        console.print(f"nearest to its limit: {dtype} {nearest.output}, {nearest.case}")
    for kind, reasons in outcome.aside.items():
        for reason, calls in reasons.items():
            word = "not supported" if kind == "refused" else kind
            console.print(
                f"[yellow]{word}[/] ({len(calls)} calls, such as {escape(calls[0])}): {escape(reason)}"
            )
    for name, why in outcome.absent.items():
        console.print(f"{name}: {escape(why)}")
    for row in outcome.rows:
        if row.get("worse"):
            what = ", ".join(row["worse"])
            console.print(f"[red]less accurate than a peer[/] in {what}: {row['dtype']} {row['case']}")
    failed = [r for r in judged if not r.ok]
    for r in failed[:20]:
        where = f"{r.provider} {r.dtype} {r.output}"
        console.print(f"[red]fails[/] {where} {r.error:.2e} > {r.limit:.0e}: {r.case}")
    console.print(f"{len(judged) - len(failed)} of {len(judged)} outputs within their limits")


def _print_worst(judged: list[Reading]) -> None:
    columns = ("provider", "dtype", "output", "cases", "worst error", "limit", "share")
    groups: dict[tuple[str, str, str], list[Reading]] = {}
    for r in judged:
        groups.setdefault((r.provider, r.dtype, r.output), []).append(r)
    cells = []
    for (provider, dtype, output), group in sorted(groups.items(), key=lambda item: _order(item[0])):
        worst, m = max(group, key=_share), [r.metrics for r in group]
        colour = "green" if all(r.ok for r in group) else "red"
        # a constant reference has neither R2 nor correlation
        r2, rho = (
            min(filter(math.isfinite, x), default=math.nan)
            for x in ([y.r2 for y in m], [y.pearson for y in m])
        )
        cells.append([
            provider, dtype.removeprefix("torch."), output, str(len(group)), f"{worst.error:.2e}",
            f"{worst.limit:.0e}", f"[{colour}]{_share(worst):.3f}[/]",
            f"{max(x.rmse_over_mean for x in m):.1e}", f"{r2:.6f}", f"{rho:.6f}",
            f"{min(x.close for x in m):.1%}", f"{max(x.max_abs for x in m):.1e}",
        ])  # fmt: skip
    show_table([*columns, "RMSE/mean", "R2", "Pearson", "close", "max abs"], cells)


def _share(r: Reading) -> float:
    return r.error / r.limit


def _order(key: tuple[str, str, str]) -> tuple[bool, str, str, int, str]:
    """Sort gdn first, then outputs in the order of OUTPUTS, those of stages last."""
    place = {output: i for i, output in enumerate(accuracy.OUTPUTS)}
    return not key[0].startswith("gdn"), key[0], key[1], place.get(key[2], len(place)), key[2]
