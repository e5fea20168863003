"""The gated delta rule: what runs here, is it right, how fast, and a demo. --json FILE (or -) for JSON."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import TaskID
from rich.table import Table

import gdn
from gdn.backends import ORDER
from gdn.bench import cases, measure
from gdn.bench.cases import Case
from gdn.bench.commands import bench
from gdn.bench.console import Device, Json, console, place, progress, wrote
from gdn.bench.plot import plot
from gdn.bench.verify import DTYPES, verify

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False
)
app.add_typer(bench, name="bench")
app.command()(verify)
app.command()(plot)


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
