"""`gdn verify`: the accuracy protocol over backends and peers, as a table, CSV, JSON and pictures."""

import csv
import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

import gdn
from gdn.cli.console import Device, Json, check_choice, console, find_device, need_packages, write_json
from gdn.testing import accuracy, cases
from gdn.testing.cases import Case
from gdn_bench.commands.console import name_file, open_progress, require_match, show_table, split_words
from gdn_bench.judging import laboratory
from gdn_bench.judging.laboratory import Reading
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.names import PROVIDERS
from gdn_bench.providers.provider import Bound, Provider
from gdn_bench.results import rows as results
from gdn_bench.timing import measure

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
ENTRIES = {"chunk": gdn.chunk_gated_delta_rule, "recurrent": gdn.fused_recurrent_gated_delta_rule}
PROFILES = ("gdn", "pto")
SETS = ("covering", "quick", "full", *laboratory.NAMED)
# tokens times state elements: the law judges a case of this size in about ten seconds
CI_COST = 2**25
STEM_WIDTH = 72  # characters of a case's name in the names of its pictures


def verify(
    problems: Annotated[
        str,
        typer.Option(
            "--set",
            help=f"One of {', '.join(SETS)}: every pair of options; the same on small shapes; the whole "
            "product, or as much of it as --max-cases; or problems by name.",
        ),
    ] = "covering",
    profile: Annotated[
        str | None, typer.Option(help="gdn: the protocol's limits; pto: pto-kernels' own. By the set.")
    ] = None,
    names: Annotated[
        str | None,
        typer.Option("--providers", help="gdn, gdn:BACKEND, fla, flash_qla, flashinfer, transformers."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(DTYPES)}; may be repeated.")
    ] = None,
    entry: Annotated[str, typer.Option(help=f"Of gdn: one of {', '.join(ENTRIES)}.")] = "chunk",
    only: Annotated[str, typer.Option(help="Only cases whose name holds one of these.")] = "",
    max_cases: Annotated[int | None, typer.Option(min=0, help="Judge at most this many cases.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for readings.csv and .json and two pictures per case and dtype."),
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no case after so many.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Leave out what the results have of this commit on this kind of GPU.")
    ] = False,
    appends: Annotated[
        bool, typer.Option("--append", help="Add a row per case to benchmarks/results/<gpu>.jsonl.")
    ] = False,
    into: Annotated[
        Path | None, typer.Option("--results", help="Add them to this JSON-lines file instead.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Of this tree, where git cannot tell.")] = None,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Judge outputs and gradients against the law in fp64. Exit code 1 if any of ours misses its limit."""
    where = find_device(device)
    if out:
        need_packages("bench", "matplotlib")
    own = laboratory.profile_of(check_choice("set", problems, SETS))
    profile = check_choice("profile", profile or own, PROFILES)
    dtypes = [check_choice("dtype", name, DTYPES) for name in dtype or _dtypes(problems)]
    chosen = _cases(problems, max_cases, seed, split_words(only))
    everybody = ",".join(PROVIDERS) if problems in laboratory.NAMED else "gdn"
    taking, absent = _providers(names or everybody, check_choice("entry", entry, ENTRIES))
    about = {**measure.on_gpu(where), **({"commit": commit} if commit else {})}
    label = laboratory.label(problems, profile)
    file = into or measure.RESULTS / f"{measure.slug(where)}.jsonl"
    done = results.done(results.read(file), about) if resume and file.exists() else set()
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    readings: list[Reading] = []
    rows: list[dict[str, Any]] = []
    aside: dict[str, dict[str, list[str]]] = {"refused": {}, "failed": {}, "skipped": {}}
    total = len(chosen) * len(dtypes) if isinstance(chosen, list) else None
    appended = 0
    with open_progress() as report:
        for number, ((name, case), short) in enumerate(itertools.product(chosen, dtypes)):
            report("verify", number, total, f"{short} {name}")
            is_late, head = time.monotonic() > deadline, {**label, "case": name, "dtype": _word(short)}
            if is_late or all(results.key({**head, "provider": who}) in done for who in taking):
                why = "out of time" if is_late else "measured before"
                aside["skipped"].setdefault(why, []).append(f"{short} {name}")
                continue
            one = laboratory.examine(
                name, case, DTYPES[short], taking, profile=profile, seed=seed, device=where
            )
            readings += one.readings
            fresh = laboratory.rows(one, head)
            rows += fresh
            if appends or into:
                measure.append(file, [{**row, **about} for row in fresh])
                appended += len(fresh)
            for kind, reasons in (("refused", one.refused), ("failed", one.failed)):
                for who, why in reasons.items():
                    aside[kind].setdefault(f"{who}: {why}", []).append(f"{short} {name}")
            if out:
                _draw(out, f"{number:03d} {name} {short}", one, case)
        if total:
            report("verify", total, total, "")
    if appends or into:
        name_file(file, appended)
    # a run that had nothing left to do is no failure; one that was cut short before it began is
    is_done = not readings and list(aside["skipped"]) == ["measured before"]
    ok = is_done or _is_good(readings, rows, aside["failed"])
    found = {**about, "ok": ok, "profile": profile, "absent": absent, **aside}
    found["rows"] = [laboratory.flat(r) for r in readings]
    if out:
        _tables(out, found)
    if not write_json(json_file, found):
        _print(readings, rows, aside, absent)
    raise typer.Exit(0 if ok else 1)


def _word(dtype: str) -> str:
    """bf16 as rows call it."""
    return str(DTYPES[dtype]).removeprefix("torch.")


def _dtypes(problems: str) -> tuple[str, ...]:
    if problems in laboratory.NAMED:
        return ("fp16", "bf16") if problems.startswith("pto") else ("bf16",)
    return ("bf16", "fp16", "fp32")


def _cases(
    problems: str, max_cases: int | None, seed: int, only: Sequence[str]
) -> Iterable[tuple[str, Case]]:
    """Return (name, case) of a set; the whole product is not made at once."""

    def is_wanted(name: str) -> bool:
        return not only or any(part in name for part in only)

    if problems == "full" and max_cases is None:
        # 129 million names; each of their parts occurs in a set that meets every pair of options
        parts = [str(case) for case in cases.covering()] if only else []
        if not any(all(any(p in name for name in parts) for p in word.split()) for word in only):
            require_match(only, parts)
        everything = ((str(case), case) for case in cases.product())
        return (pair for pair in everything if is_wanted(pair[0]))
    if problems in laboratory.NAMED:
        found = list(laboratory.NAMED[problems].items())
    elif problems == "full":
        found = [(str(case), case) for case in cases.sample(max_cases or 0, seed=seed)]
    else:
        covering = cases.covering(cases.QUICK) if problems == "quick" else cases.covering(max_cost=CI_COST)
        found = [(str(case), case) for case in covering]
    if found:
        require_match(only, [name for name, _ in found])
    return [pair for pair in found if is_wanted(pair[0])][:max_cases]


def _providers(names: str, entry: str) -> tuple[dict[str, Provider], dict[str, str]]:
    """Those that are there, and why the others are not; gdn by the function that was asked for."""
    taking: dict[str, Provider] = {}
    absent: dict[str, str] = {}
    for name in split_words(names):
        try:
            found = load_provider(name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if isinstance(found, str):
            absent[name] = found
        else:
            taking[name] = _entered(name, entry) if name.startswith("gdn") else found
    return taking, absent


def _entered(name: str, entry: str) -> Provider:
    backend = name.partition(":")[2] or None

    def bind(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Bound:
        # the two functions do not take g and beta in the same place
        arguments = {**tensors, **options, "backend": backend}
        return Bound(lambda: ENTRIES[entry](**arguments))

    return Provider(name, {"prefill": bind, "train": bind})


def _is_good(readings: list[Reading], rows: list[dict[str, Any]], failed: Mapping[str, Any]) -> bool:
    """True if ours was judged, missed nothing, failed nowhere, and is nowhere worse than the best peer."""
    ours = [r.ok for r in readings if r.provider.startswith("gdn")]
    is_worse = any(row.get("worse") for row in rows)
    return bool(ours) and all(ours) and not is_worse and not any(who.startswith("gdn") for who in failed)


def _tables(out: Path, found: Mapping[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_json(str(out / "readings.json"), found)
    with (out / "readings.csv").open("w", newline="", encoding="ascii") as file:
        writer = csv.DictWriter(file, list(found["rows"][0]) if found["rows"] else ["name"])
        writer.writeheader()
        writer.writerows(found["rows"])


def _draw(out: Path, name: str, one: laboratory.Examined, case: Case) -> None:
    from gdn_bench.judging import portraits

    if one.found:
        stem = "".join(c if c.isalnum() else "-" for c in name[:STEM_WIDTH])
        title = name.partition(" ")[2]
        portraits.scatter(out / f"{stem}-scatter.png", title, one)
        portraits.over_time(out / f"{stem}-time.png", title, one, case.lengths)


def _print(
    readings: list[Reading],
    rows: list[dict[str, Any]],
    aside: Mapping[str, Mapping[str, list[str]]],
    absent: Mapping[str, str],
) -> None:
    """The worst of each output by provider and dtype; then the narrowest passes, refusals, failures."""
    _print_worst(readings)
    ours = [r for r in readings if r.provider.startswith("gdn")]
    for dtype in sorted({r.dtype for r in ours}):
        near = max((r for r in ours if r.dtype == dtype), key=_share)
        console.print(f"nearest to its limit: {dtype} {near.output}, {near.case}")
    for kind, reasons in aside.items():
        for reason, calls in reasons.items():
            word = "not taken" if kind == "refused" else kind
            console.print(
                f"[yellow]{word}[/] ({len(calls)} calls, such as {escape(calls[0])}): {escape(reason)}"
            )
    for name, why in absent.items():
        console.print(f"{name}: {escape(why)}")
    for row in rows:
        if row.get("worse"):
            what = ", ".join(row["worse"])
            console.print(f"[red]less accurate than a peer[/] in {what}: {row['dtype']} {row['case']}")
    failed = [r for r in readings if not r.ok]
    for r in failed[:20]:
        where = f"{r.provider} {r.dtype} {r.output}"
        console.print(f"[red]fails[/] {where} {r.error:.2e} > {r.limit:.0e}: {r.case}")
    console.print(f"{len(readings) - len(failed)} of {len(readings)} outputs within their limits")


def _print_worst(readings: list[Reading]) -> None:
    columns = ("provider", "dtype", "output", "cases", "worst error", "limit", "share")
    groups: dict[tuple[str, str, str], list[Reading]] = {}
    for r in readings:
        groups.setdefault((r.provider, r.dtype, r.output), []).append(r)
    cells = []
    for (provider, dtype, output), group in sorted(groups.items(), key=lambda item: _order(item[0])):
        worst, m = max(group, key=_share), [r.metrics for r in group]
        colour = "green" if all(r.ok for r in group) else "red"
        # a law that is one number has neither R2 nor correlation
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
    """Ours first, outputs as the protocol lists them, those of stages behind."""
    place = {output: i for i, output in enumerate(accuracy.OUTPUTS)}
    return not key[0].startswith("gdn"), key[0], key[1], place.get(key[2], len(place)), key[2]
