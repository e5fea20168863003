"""The gated delta rule: what runs here, is it right, and how fast.

info and each benchmark take --json FILE, or --json - for the screen.
"""

import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

import gdn
from gdn import testing
from gdn.backends import ORDER
from gdn.cli.console import Device, Json, console, find_device, run_app, write_json
from gdn.cli.environment import environment
from gdn.cli.warmup import warmup
from gdn.integrations import engine_report

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# commands of gdn_bench, which lies in benchmarks/ of a clone and is no part of the wheel
BENCHMARKS = {"verify": "Compare gdn and its peers with the reference.", "bench": "Measure times."}


def main() -> None:
    """Run the `gdn` script."""
    run_app(build_app(), "gdn")


def build_app() -> typer.Typer:
    """Return the command line, with the commands of gdn_bench where that can be imported."""
    app = typer.Typer(
        help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False
    )
    app.callback()(common)
    app.command()(info)
    app.command()(warmup)
    add_benchmarks(app)
    return app


def add_benchmarks(app: typer.Typer) -> None:
    """Add the commands of gdn_bench; without it, commands of the same names that print what is missing."""
    clone = Path(gdn.__file__).resolve().parents[2]
    if find_spec("gdn_bench") is None and (clone / "src" / "gdn" / "__init__.py").is_file():
        # gdn runs from a clone: its benchmarks lie beside it
        sys.path.append(str(clone / "benchmarks"))
    if find_spec("gdn_bench") is None:
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        for name, text in BENCHMARKS.items():
            app.command(name, help=text, context_settings=anything)(refuse_benchmarks)
        return
    from gdn_bench.commands.app import app as bench
    from gdn_bench.commands.verify import verify

    app.command()(verify)
    app.add_typer(bench, name="bench")


def refuse_benchmarks() -> None:
    """Raise a usage error that says where gdn_bench is."""
    raise typer.BadParameter(
        "needs gdn_bench, which is no part of the installed package: "
        "set PYTHONPATH to the folder benchmarks of a clone"
    )


def print_version(is_asked: bool) -> None:
    """Print the version and exit."""
    if is_asked:
        print(f"gdn {gdn.__version__}")
        raise typer.Exit()


def common(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Take the options of `gdn` itself."""


def print_engines(json_file: str | None) -> None:
    """Print for each installed engine who serves prefill, decode and verification, and what changes it."""
    rows, rejected = engine_report.report()
    facts = {
        "engines": [asdict(row) for row in rows],
        "rejected": [{"function": name, "reason": why, "calls": n} for (name, why), n in rejected.items()],
    }
    if write_json(json_file, facts):
        return
    if not rows:
        console.print("no engine is installed: vllm, sglang, lmdeploy")
    table = Table("engine", "layer", "phase", "served by", "calls of gdn", "changed by")
    for row in rows:
        tested = engine_report.TESTED[row.engine]
        version = row.version if row.version == tested else f"{row.version} (tested: {tested})"
        engine = f"{row.engine} {version}"
        table.add_row(engine, row.layer, row.phase, row.server, str(row.calls or "-"), row.setting)
    if rows:
        console.print(table)
    for (name, reason), calls in rejected.items():
        console.print(f"{calls} calls of {name} went to the engine: {reason}")


# large enough for every backend; its tensors take 50 MB in fp32
PROMPT = testing.Case(lengths=testing.rows(1024), heads=(16, 32), sizes=(128, 128))


def info(
    device: Device = None,
    json_file: Json = None,
    engines: Annotated[
        bool, typer.Option("--engines", help="Whose kernels run the layers of vLLM, SGLang, lmdeploy.")
    ] = False,
) -> None:
    """Print versions, devices, threads, and the backend of a prompt of 1,024 tokens of each dtype."""
    if engines:
        print_engines(json_file)
        return
    where = find_device(device)
    devices = ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))]
    reports = {}
    for name, dtype in DTYPES.items():
        given = testing.inputs(PROMPT, dtype, device=where)
        reports[name] = gdn.explain(**given.tensors, **given.options)
    facts = {
        **environment(),
        "devices": devices,
        "backends": {name: asdict(report) for name, report in reports.items()},
    }
    if write_json(json_file, facts):
        return
    table = Table("", "", show_header=False, box=None)
    for name, version in facts["versions"].items():
        table.add_row(name, version)
    table.add_row("commit", facts["commit"] or "-")
    table.add_row("processor", f"{facts['cpu']}, {facts['threads']} threads")
    table.add_row("devices", ", ".join(devices))
    console.print(table)
    table = Table(f"1,024 tokens on {where}", *ORDER)
    for name, report in reports.items():
        words = ((report.refusals.get(b), b == report.chosen) for b in ORDER)
        table.add_row(
            name,
            *(reason or ("[green]chosen[/]" if is_chosen else "supported") for reason, is_chosen in words),
        )
    console.print(table)
