"""The gated delta rule: what runs here, is it right, how fast, and a demo. --json FILE (or -) for JSON."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import TaskID
from rich.table import Table

import gdn
from gdn.backends import ORDER
from gdn.bench import accuracy, cases, measure
from gdn.bench.accuracy import Row
from gdn.bench.cases import Case
from gdn.bench.commands import bench
from gdn.bench.console import Device, Json, choice, console, place, progress, wrote

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False
)
app.add_typer(bench, name="bench")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
ENTRIES = {"chunk": gdn.chunk_gated_delta_rule, "recurrent": gdn.fused_recurrent_gated_delta_rule}
# tokens times state elements: the law judges a case of this size in about ten seconds
CI_COST = 2**25


def main() -> None:
    """Entry point of the `gdn` script."""
    app(prog_name="gdn")


@app.command()
def info(device: Device = None, json_file: Json = None) -> None:
    """Versions, devices, threads, and which backend takes a call of each dtype here."""
    where = place(device)
    devices = ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))]
    reports = {}
    for name, dtype in DTYPES.items():
        given = cases.inputs(Case(lengths=cases.rows(64)), dtype, device=where)
        reports[name] = gdn.explain(**given.tensors, **given.options)
    facts = {
        **measure.environment(),
        "devices": devices,
        "backends": {n: asdict(r) for n, r in reports.items()},
    }
    if wrote(json_file, facts):
        return
    table = Table("", "", show_header=False, box=None)
    for name, version in facts["versions"].items():
        table.add_row(name, version)
    table.add_row("commit", facts["commit"] or "-")
    table.add_row("processor", f"{facts['cpu']}, {facts['threads']} threads")
    table.add_row("devices", ", ".join(devices))
    console.print(table)
    table = Table(f"on {where}", *ORDER)
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
    where = place(device)
    names = [choice("dtype", name, DTYPES) for name in dtype or ("bf16", "fp16", "fp32")]
    function = ENTRIES[choice("entry", entry, ENTRIES)]
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
    with progress() as bar:
        task = bar.add_task("verify", total=total)
        for case, name in itertools.product(chosen, names):
            bar.update(task, description=f"{name} {case}"[:60])
            try:
                found += accuracy.check(provider, case, DTYPES[name], seed=seed, device=where)
            except NotImplementedError as error:
                refused.setdefault(str(error), []).append(f"{name} {case}")
            bar.advance(task)
    ok = bool(found) and all(row.ok for row in found)
    if not wrote(
        json_file, {**measure.environment(), "ok": ok, "refused": refused, "rows": [_plain(r) for r in found]}
    ):
        _print_verdict(found, refused)
    raise typer.Exit(0 if ok else 1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out/demo"),
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Train a small hybrid model on Python's own sources, draw its loss, let it write, and compare speeds."""
    from gdn.bench import demo as main_job

    with progress() as bar:
        tasks: dict[str, TaskID] = {}

        def report(name: str, done: int, total: int, note: str) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, description=f"{name} {note}")

        count = main_job.STEPS if steps is None else steps
        result = main_job.run(out, device=place(device), steps=count, report=report)
    if wrote(json_file, {**measure.environment(), **asdict(result)}):
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
