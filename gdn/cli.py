"""The gated delta rule: what runs here, is it right, how fast, and a demo. --json FILE (or -) for JSON."""

import itertools
import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

import gdn
from gdn.backends import ORDER
from gdn.bench import accuracy, cases, measure
from gdn.bench.accuracy import Row
from gdn.bench.cases import Case

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False
)
bench = typer.Typer(
    help="Times against other implementations, each checked before it is timed.", no_args_is_help=True
)
app.add_typer(bench, name="bench")
console = Console(stderr=False)
status = Console(stderr=True)  # progress goes here, so that --json - stays clean

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
ENTRIES = {"chunk": gdn.chunk_gated_delta_rule, "recurrent": gdn.fused_recurrent_gated_delta_rule}
# tokens times state elements: the law judges a case of this size in about ten seconds
CI_COST = 2**25

Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write JSON to a file, or to the screen with -.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; the GPU if there is one.")]


def main() -> None:
    """Entry point of the `gdn` script."""
    app(prog_name="gdn")


@app.command()
def info(device: Device = None, json_file: Json = None) -> None:
    """Versions, devices, threads, and which backend takes a call of each dtype here."""
    place = _device(device)
    devices = ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))]
    reports = {}
    for name, dtype in DTYPES.items():
        given = cases.inputs(Case(lengths=cases.rows(64)), dtype, device=place)
        reports[name] = gdn.explain(**given.tensors, **given.options)
    facts = {
        **measure.environment(),
        "devices": devices,
        "backends": {n: asdict(r) for n, r in reports.items()},
    }
    if _wrote(json_file, facts):
        return
    table = Table("", "", show_header=False, box=None)
    for name, version in facts["versions"].items():
        table.add_row(name, version)
    table.add_row("commit", facts["commit"] or "-")
    table.add_row("processor", f"{facts['cpu']}, {facts['threads']} threads")
    table.add_row("devices", ", ".join(devices))
    console.print(table)
    table = Table(f"on {place}", *ORDER)
    for name, report in reports.items():
        words = ((report.refusals.get(b), b == report.chosen) for b in ORDER)
        table.add_row(
            name,
            *(reason or ("[green]chosen[/]" if is_chosen else "takes it") for reason, is_chosen in words),
        )
    console.print(table)


@app.command()
def verify(
    backend: Annotated[str | None, typer.Option(help="Force a backend by name.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(DTYPES)}; may be repeated.")
    ] = None,
    entry: Annotated[str, typer.Option(help=f"One of {', '.join(ENTRIES)}.")] = "chunk",
    is_quick: Annotated[
        bool, typer.Option("--quick", help="Every pair of options, on small shapes.")
    ] = False,
    is_full: Annotated[bool, typer.Option("--full", help="The full product; ends with --max-cases.")] = False,
    max_cases: Annotated[int | None, typer.Option(help="Judge at most this many cases.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Judge outputs and gradients against the law in fp64. Exit code 1 if anything misses its limit."""
    place = _device(device)
    names = [_choice("dtype", name, DTYPES) for name in dtype or ("bf16", "fp16", "fp32")]
    function = ENTRIES[_choice("entry", entry, ENTRIES)]
    if is_quick and is_full:
        raise typer.BadParameter("expected one of --quick and --full, got both")
    chosen: Iterable[Case]
    if is_full:
        chosen = cases.product() if max_cases is None else cases.sample(max_cases, seed=seed)
    else:
        chosen = cases.covering(cases.QUICK) if is_quick else cases.covering(max_cost=CI_COST)
    chosen = itertools.islice(chosen, max_cases)
    total = None if is_full and max_cases is None else len(chosen := list(chosen)) * len(names)

    def provider(*args: Any, **options: Any) -> Any:
        return function(*args, **options, backend=backend)

    found: list[Row] = []
    refused: dict[str, list[str]] = {}
    with _progress() as progress:
        task = progress.add_task("verify", total=total)
        for case, name in itertools.product(chosen, names):
            progress.update(task, description=f"{name} {case}"[:60])
            try:
                found += accuracy.check(provider, case, DTYPES[name], seed=seed, device=place)
            except NotImplementedError as error:
                refused.setdefault(str(error), []).append(f"{name} {case}")
            progress.advance(task)
    ok = bool(found) and all(row.ok for row in found)
    if not _wrote(
        json_file, {**measure.environment(), "ok": ok, "refused": refused, "rows": [_plain(r) for r in found]}
    ):
        _print_verdict(found, refused)
    raise typer.Exit(0 if ok else 1)


@bench.command()
def cpu(
    threads: Annotated[int, typer.Option(help="Threads for every provider.")] = 2,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="2048 tokens and decoding only, few runs.")
    ] = False,
    results: Annotated[Path | None, typer.Option(help="Append the rows to this JSON-lines file.")] = None,
    json_file: Json = None,
) -> None:
    """The rule on the CPU against Transformers' plain-torch functions, interleaved in one run."""
    from gdn.bench import cpu as cpu_bench

    rows: list[dict[str, Any]] = []
    with measure.threads(threads), _progress() as progress:
        found = cpu_bench.jobs(is_quick=is_quick)
        task = progress.add_task("bench", total=len(found))
        for job in found:
            progress.update(task, description=f"{job.name}, {job.B} x {job.T}")
            rows += ({**row, **measure.environment()} for row in cpu_bench.run(job))
            progress.advance(task)
    measure.append(results or measure.RESULTS / "cpu.jsonl", rows)
    if _wrote(json_file, rows):
        return
    columns = ("fp32", "B", "T", "provider", "ms", "p20..p80", "ratio", "goal", "error")
    table = Table(*columns, box=None, padding=(0, 1))
    for row in rows:
        ratio, goal = row.get("ratio"), row.get("goal")
        colour = "bold" if goal is None or ratio is None else ("green" if ratio >= goal else "red")
        ms = [_three_digits(row[name]) for name in ("p50_ms", "p20_ms", "p80_ms") if name in row]
        time = [ms[0] if ms else "wrong", "..".join(ms[1:])]
        table.add_row(
            row["job"], str(row["B"]), str(row["T"]), row["provider"], *time,
            f"[{colour}]{ratio:.2f}[/]" if ratio else "", str(goal or ""), f"{row['share_of_limit']:.0%}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "ratio: Transformers' time over ours; error: the largest, as a share of its limit", style="dim"
    )


@bench.command()
def gpu(
    passes: Annotated[
        str,
        typer.Option("--pass", help="Some of prefill, train, decode, host, cold, accuracy; prefill:slow..."),
    ] = "prefill,train,decode,host,cold,accuracy",
    only: Annotated[str, typer.Option(help="Only rows whose name holds one of these, such as 16/32.")] = "",
    names: Annotated[
        str | None, typer.Option("--providers", help="Some of gdn, gdn:BACKEND, fla, flash_qla, flashinfer.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Begin no problem after so many.")] = 8.5,
    warm: Annotated[
        bool, typer.Option(help="Compile first, in as many processes as there are cores.")
    ] = True,
    gate_tokens: Annotated[
        int | None, typer.Option(help="Judge at most so many tokens per sequence.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this JSON-lines file.")] = None,
    commit: Annotated[str | None, typer.Option(help="Of this tree, where git cannot tell.")] = None,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """The rule on a GPU against FLA, FlashQLA, FlashInfer: CUDA graphs in turn, each answer checked first."""
    from gdn.bench import gpu as gpu_bench
    from gdn.bench import providers, tables

    place, deadline = _device(device), time.monotonic() + 60 * minutes
    wanted = [_pass(name) for name in passes.split(",")]
    chosen = tuple(names.split(",")) if names else providers.NAMES
    parts = tuple(part for part in only.split(",") if part)
    try:
        session = gpu_bench.Session(chosen, place, parts, deadline, names is not None, gate_tokens)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    about = {**measure.on_gpu(place), **({"commit": commit} if commit else {})}
    if warm and place.type == "cuda":
        status.print(f"compiled in {gpu_bench.warm(session, wanted):.0f} s")
    rows: list[dict[str, Any]] = []
    for row in gpu_bench.run(session, wanted):
        rows.append(row)
        measure.append(out or measure.RESULTS / f"{measure.slug(place)}.jsonl", [{**row, **about}])
        status.print(tables.line(row), markup=False, highlight=False)
    if _wrote(json_file, measure.plain({"about": about, "absent": session.absent, "rows": rows})):
        return
    wide = Console(width=max(console.width, 128))
    for name in wanted:
        columns, cells = tables.table(name, [row for row in rows if row["pass"] == name])
        if cells:
            found = Table(*columns, title=name, title_justify="left", box=None, padding=(0, 1))
            for row_cells in cells:
                found.add_row(*row_cells)
            wide.print(found)
    for note in [*(f"{n}: {why}" for n, why in session.absent.items()), *tables.notes(rows)]:
        wide.print(note, markup=False, highlight=False)
    wide.print(
        "fla, qla, fi: their time over this one; limit: share of the larger of bytes and products at the "
        "rates of this run; error: the largest, as a share of its limit",
        style="dim",
    )


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out/demo"),
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Train a small hybrid model on Python's own sources, draw its loss, let it write, and compare speeds."""
    from gdn.bench import demo as main_job

    with _progress() as progress:
        tasks: dict[str, TaskID] = {}

        def report(name: str, done: int, total: int, note: str) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done, description=f"{name} {note}")

        count = main_job.STEPS if steps is None else steps
        result = main_job.run(out, device=_device(device), steps=count, report=report)
    if _wrote(json_file, {**measure.environment(), **asdict(result)}):
        return
    console.print(result.prompt, style="dim", markup=False, highlight=False, end="")
    console.print(result.continuation + "\n", style="bold", markup=False, highlight=False)
    table = Table("tokens per second", "gdn", "transformers", "ratio")
    for name, ours, theirs in result.speeds:
        table.add_row(name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")
    console.print(table)
    early, late = (sum(part) / len(part) for part in (result.losses[:5], result.losses[-5:]))
    console.print(f"loss in nats per token: {early:.2f} -> {late:.2f}, drawn in {result.picture}")
    console.print(
        f"largest difference of a logit between gdn and transformers: {result.logit_difference:.1e}"
    )


def _device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _pass(name: str) -> str:
    """A pass, or a variant of prefill or train."""
    from gdn.bench import gpu as gpu_bench
    from gdn.bench.targets import VARIANTS

    job, colon, variant = name.partition(":")
    _choice("pass", job, gpu_bench.PASSES)
    if colon and job in ("prefill", "train"):
        _choice("pass", variant, VARIANTS)
    elif colon:
        raise typer.BadParameter(f"pass: expected variants of prefill and train only, got {name}")
    return name


def _choice(option: str, value: str, known: Iterable[str]) -> str:
    if value not in known:
        raise typer.BadParameter(f"{option}: expected one of {', '.join(known)}, got {value}")
    return value


def _wrote(file: str | None, value: Any) -> bool:
    """Write JSON where --json says; False without it."""
    if file is None:
        return False
    text = json.dumps(value, indent=1)
    if file == "-":
        print(text)
    else:
        Path(file).write_text(text + "\n", encoding="ascii")
    return True


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=status, transient=not sys.stderr.isatty())


def _plain(row: Row) -> dict[str, Any]:
    """A row as JSON holds it: what is infinite or NaN is null, the case is its own words and its fields."""
    values = {**asdict(row), "case": str(row.case), "factors": asdict(row.case)}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _print_verdict(found: list[Row], refused: dict[str, list[str]]) -> None:
    """The worst error of each output by dtype; then the narrowest passes, refusals and failures."""
    table = Table("dtype", "output", "cases", "worst error", "limit", "share", "max abs", box=None)
    for dtype, output in sorted({(row.dtype, row.output) for row in found}, key=_place):
        rows = [row for row in found if (row.dtype, row.output) == (dtype, output)]
        worst = max(rows, key=lambda row: row.error / row.limit)
        share = f"[{'green' if worst.ok else 'red'}]{worst.error / worst.limit:.3f}[/]"
        table.add_row(
            dtype.removeprefix("torch."), output, str(len(rows)), f"{worst.error:.2e}", f"{worst.limit:.0e}",
            share, f"{worst.max_abs:.1e}",
        )  # fmt: skip
    console.print(table)
    for dtype in sorted({row.dtype for row in found}):
        near = max((row for row in found if row.dtype == dtype), key=lambda row: row.error / row.limit)
        console.print(f"nearest to its limit: {dtype} {near.output}, {near.case}")
    for reason, calls in refused.items():
        console.print(f"[yellow]not taken[/] ({len(calls)} calls, such as {calls[0]}): {reason}")
    failed = [row for row in found if not row.ok]
    for row in failed[:20]:
        console.print(f"[red]fails[/] {row.dtype} {row.output} {row.error:.2e} > {row.limit:.0e}: {row.case}")
    console.print(f"{len(found) - len(failed)} of {len(found)} outputs within their limits")


def _place(key: tuple[str, str]) -> tuple[str, int]:
    return key[0], accuracy.OUTPUTS.index(key[1])


def _three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"
