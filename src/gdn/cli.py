"""The gated delta rule: what runs here, is it right, how fast, and a demo.

info, verify, demo and each bench take --json FILE, or --json - for the screen.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import gdn
from gdn.backends import ORDER
from gdn.bench import cases, measure
from gdn.bench.cases import Case
from gdn.bench.commands import bench
from gdn.bench.console import Device, Json, console, need_packages, place, progress, status, wrote
from gdn.bench.plot import plot
from gdn.bench.verify import DTYPES, verify

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False
)
app.add_typer(bench, name="bench")
app.command()(verify)
app.command()(plot)


def main() -> None:
    """Run the `gdn` script: a usage error is one line on stderr, exit code 2."""
    try:
        code = app(prog_name="gdn", standalone_mode=False)
    except typer.Abort:
        sys.exit("gdn: aborted")
    except Exception as error:
        # click's errors; newer versions of typer hold click inside, so its classes have no common place
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            print(usage_line(error), file=sys.stderr)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def usage_line(error: Any) -> str:
    """Return a usage error in one line, after the command that it belongs to."""
    command = error.ctx.command_path if getattr(error, "ctx", None) else "gdn"
    text = " ".join(error.format_message().split()).removeprefix("Invalid value: ")
    return f"{command}: {text} (see {command} --help)"


def print_version(is_asked: bool) -> None:
    """Print the version and leave."""
    if is_asked:
        print(f"gdn {gdn.__version__}")
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Take the options of `gdn` itself."""


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
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; by default the faster of 1 and PyTorch's own.")
    ] = None,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Train a small hybrid model on Python's own sources, draw its loss, let it write, and compare speeds."""
    need_packages("plot,transformers", "matplotlib", "transformers")
    from gdn.bench import demo as main_job
    from gdn.bench.thread_choice import ThreadControl

    where, count = place(device), main_job.STEPS if steps is None else steps
    control = None
    if where.type == "cpu" and threads is None:
        control = ThreadControl(lambda text: status.print(text, markup=False, highlight=False))
    with progress() as report, measure.threads(threads or torch.get_num_threads()):
        result = main_job.run(out, device=where, steps=count, report=report, control=control)
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
