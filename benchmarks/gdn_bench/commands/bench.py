"""The benchmarks: one command for each thing that is timed, `cpu`, and `compare`."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from gdn.cli.console import Device, Json, check_choice, console, need_packages, status, write_json
from gdn.cli.environment import environment
from gdn.cli.options import take_options
from gdn_bench.commands.console import (
    find_gpu,
    name_file,
    open_progress,
    require_match,
    show_table,
    split_words,
)
from gdn_bench.problems import catalog
from gdn_bench.results import compare as comparing
from gdn_bench.results import tables
from gdn_bench.timing import measure

app = typer.Typer(
    help="Times beside other libraries, each answer checked before it is timed.",
    no_args_is_help=True,
    add_completion=False,
)
HELP = {
    "prefill": "Forward, packed sequences, with states in and out.",
    "train": "Forward and backward through autograd, with both states and their gradients.",
    "decode": "One token for B rows, on a pool of states, gates and l2norm inside.",
    "step": "One token for B rows, from before the convolution to after the gated norm: every form.",
    "spec": "4 and 16 tokens for B rows, verified in every way, beside one token of the same rows.",
    "stages": "Stage by stage and whole, on PTO's shape and GVA set, beside FLA.",
    "layer": "The whole layer, 2048 wide, 16/32 heads, 16,384 tokens: gdn's, FLA's, Transformers'.",
    "e2e": "Tokens per second and time to the first token of a Transformers model: prompts, 128 steps.",
    "model": "A training step of a Transformers model: time, memory, and GPU time by kind of kernel.",
    "host": "Host time of an eager call, while the GPU is not waited for.",
    "cold": "A new process with empty caches, and the compilations of other problems.",
}
# the other providers have no stages, layers or models to time
DEFAULT = {
    "stages": ("gdn", "fla"),
    "layer": ("gdn", "fla", "transformers"),
    "step": ("gdn",),
    "spec": ("gdn", "fla", "flashinfer"),
    "e2e": ("gdn", "fla", "transformers"),
    "model": ("gdn", "fla", "transformers"),
}
# jobs whose problems take long, most of it compiling; what has begun ends within nine minutes
MINUTES = {"stages": 4, "e2e": 5, "model": 5, "layer": 5}
MOST_MINUTES = 8
EXPLAINED = (
    "ratio: the peer's time over gdn's; limit: share of the speed that copies and MMAs of this run allow; "
    "error: the largest, as a share of its limit"
)


@dataclass(frozen=True)
class MeasureOptions:
    """Options of a benchmark."""

    variant: Annotated[str, typer.Option(help=f"Other gates or options: {', '.join(catalog.VARIANTS)}.")] = ""
    problems: Annotated[str, typer.Option("--set", help=f"Other problems: {', '.join(catalog.SETS)}.")] = (
        "table"
    )
    only: Annotated[str, typer.Option(help="Only rows whose name holds one of these: 16/32,2/8.")] = ""
    names: Annotated[
        str | None, typer.Option("--providers", help="gdn, gdn:BACKEND, fla, flash_qla, flashinfer, ...")
    ] = None
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no problem after so many; 8, for long problems 4 or 5.")
    ] = None
    warm: Annotated[bool, typer.Option(help="Compile first, in as many processes as there are cores.")] = True
    is_eager: Annotated[bool, typer.Option("--eager", help="Launch from Python, without a CUDA graph.")] = (
        False
    )
    resume: Annotated[
        bool, typer.Option(help="Leave out the rows that the file has of this commit and kind of GPU.")
    ] = False
    gate_tokens: Annotated[
        int | None, typer.Option(min=1, help="Compare at most so many tokens per sequence.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="Append the rows to this JSON-lines file.")] = None
    commit: Annotated[str | None, typer.Option(help="The commit of this tree, where git is absent.")] = None
    device: Device = None
    json_file: Json = None


def _register(job: str) -> None:
    @app.command(job, help=HELP[job])
    @take_options(MeasureOptions)
    def command(options: MeasureOptions) -> None:
        from gdn_bench.commands import row_names
        from gdn_bench.passes import gpu
        from gdn_bench.providers.names import PROVIDERS
        from gdn_bench.results import rows

        minutes = MINUTES.get(job, MOST_MINUTES) if options.minutes is None else options.minutes
        where, deadline = find_gpu(options.device), time.monotonic() + 60 * minutes
        label = _label(job, options.variant)
        check_choice("set", options.problems, catalog.SETS)
        about = {**measure.on_gpu(where), **({"commit": options.commit} if options.commit else {})}
        file = options.out or measure.RESULTS / f"{measure.slug(where)}.jsonl"
        done = rows.done(rows.read(file), about) if options.resume and file.exists() else set()
        try:
            session = gpu.Session(
                split_words(options.names) if options.names else DEFAULT.get(job, PROVIDERS),
                where,
                split_words(options.only),
                deadline,
                is_named=options.names is not None,
                gate_tokens=options.gate_tokens,
                is_eager=options.is_eager,
                done=frozenset(done),
                problems=catalog.SETS[options.problems] if options.problems != "table" else (),
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        require_match(session.only, row_names.list_rows(session, label))
        if options.warm and where.type == "cuda":
            with open_progress() as report:
                report("compile", 0, None, "")
                seconds = gpu.warm(session, [label])
            status.print(f"compiled in {seconds:.0f} s")
        _measure(session, label, file, about, options.json_file)


for _job in HELP:
    _register(_job)


def _label(job: str, variant: str) -> str:
    """Return the pass of a job, or of a variant of prefill, train or decode."""
    if not variant:
        return job
    if (job == "decode") != (variant == "int16") or job not in ("prefill", "train", "decode"):
        raise typer.BadParameter(f"variant: expected one of prefill and train, or int16 of decode, got {job}")
    if (job, variant) == ("train", "pool"):
        raise typer.BadParameter("variant: expected pool with prefill only, got train")
    return f"{job}:{check_choice('variant', variant, catalog.VARIANTS)}"


def _measure(session: Any, label: str, file: Path, about: dict[str, Any], json_file: str | None) -> None:
    """Run a pass, append its rows as they come, print its table."""
    from gdn_bench.commands import row_names
    from gdn_bench.passes import gpu

    measured: list[dict[str, Any]] = []
    # other passes have several rows of a name
    is_counted = label.partition(":")[0] in (*gpu.WORKLOADS, "spec", "layer", "host")
    names = [name for name in row_names.list_rows(session, label) if session.wants(name)]
    with open_progress() as report:
        report(label, 0, len(names) if is_counted else None, "")
        for row in _rows(session, label):
            measured.append(row)
            # a problem that was not begun has no row, so that a later run measures it
            measure.append(file, [] if "skipped" in row else [{**row, **about}])
            done = len({row["case"] for row in measured})
            report(label, done, len(names) if is_counted else None, row["case"])
            status.print(tables.summarize(row), markup=False, highlight=False)
    name_file(file, sum("skipped" not in row for row in measured))
    if write_json(json_file, measure.plain({"about": about, "absent": session.absent, "rows": measured})):
        return
    table = tables.build_table(label, [{**row, **about} for row in measured], more=tables.SCREEN)
    if table.lines:
        place = about.get("gpu") or "cpu"
        show_table(table.columns, table.lines, f"{label}, {place}, {about['date']}, {about['commit']}")
    for note in [*(f"{name}: {why}" for name, why in session.absent.items()), *tables.notes(measured)]:
        console.print(note, markup=False, highlight=False)
    console.print(EXPLAINED, style="dim")


def _rows(session: Any, label: str) -> Iterator[dict[str, Any]]:
    from gdn_bench.passes import end_to_end, gpu, layer, model, spec, stage_chains, stages, step
    from gdn_bench.providers import models

    if label in ("layer", "spec", "step"):
        return {"layer": layer, "spec": spec, "step": step}[label].run(session)
    if label not in ("stages", "e2e", "model"):
        return gpu.run(session, [label])
    try:
        if label == "stages":
            chains, absent = stage_chains.load(session.names)
            produced = stages.run(session, chains)
        else:
            served, absent = models.serving(session.names)
            produced = (end_to_end if label == "e2e" else model).run(session, served)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    session.absent.update(absent)
    return produced


@app.command()
def cpu(
    threads: Annotated[int, typer.Option(min=1, help="Threads for every provider.")] = 2,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="2048 tokens and decoding only, few runs.")
    ] = False,
    only: Annotated[str, typer.Option(help="Only rows whose name holds one of these: kda,decode.")] = "",
    out: Annotated[Path | None, typer.Option(help="Append the rows to this JSON-lines file.")] = None,
    json_file: Json = None,
) -> None:
    """The rule on the CPU beside Transformers' plain PyTorch functions, in turn in one run."""
    need_packages("bench", "transformers")
    from gdn_bench.passes import cpu as cpu_bench

    rows: list[dict[str, Any]] = []
    file, words = out or measure.RESULTS / "cpu.jsonl", split_words(only)
    every = cpu_bench.jobs(is_quick=is_quick)
    require_match(words, [job.title for job in every])
    selected = [job for job in every if not words or any(word in job.title for word in words)]
    with measure.threads(threads), open_progress() as report:
        for done, job in enumerate(selected):
            report("bench cpu", done, len(selected), job.title)
            rows += ({**row, **environment()} for row in cpu_bench.run(job))
        report("bench cpu", len(selected), len(selected), "")
    measure.append(file, rows)
    name_file(file, len(rows))
    if write_json(json_file, rows):
        return
    table = tables.build_table("cpu", rows, more=tables.SCREEN)
    show_table(table.columns, table.lines, "cpu, fp32")
    for note in tables.notes(rows):
        console.print(note, markup=False, highlight=False)
    console.print(EXPLAINED, style="dim")


@dataclass(frozen=True)
class CompareOptions:
    """Arguments and options of `compare`."""

    before: Annotated[str, typer.Argument(help="FILE, FILE@COMMIT, a folder with a checkout, or a commit.")]
    after: Annotated[str, typer.Argument(help="The same, of what came later.")]
    threshold: Annotated[float, typer.Option(min=0, help="By how much a time may differ.")] = (
        comparing.THRESHOLD
    )
    by: Annotated[str | None, typer.Option(help="Divide by a peer's time: machines differ.")] = None
    job: Annotated[str, typer.Option("--run", help="What to run for commits: prefill, decode, ...")] = (
        "prefill"
    )
    only: Annotated[str, typer.Option(help="Only rows whose name holds one of these.")] = ""
    names: Annotated[str, typer.Option("--providers", help="The providers to run.")] = "gdn"
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each commit, in turn.")] = comparing.ROUNDS
    device: Device = None
    json_file: Json = None


@app.command()
@take_options(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Two commits, or two results files. Exit code 1 if anything of gdn is slower by 5 %, or lost."""
    arguments = [check_choice("run", options.job, HELP), "--providers", options.names, "--only", options.only]
    arguments += ["--device", options.device] if options.device else []
    names = (options.before, options.after)
    if not any(comparing.is_file(name) for name in names):
        find_gpu(options.device)
    try:
        with open_progress() as report:
            both = comparing.sides(names, arguments, rounds=options.rounds, report=report)
        changed = comparing.changes(*both, threshold=options.threshold, by=options.by)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    is_bad = comparing.is_regression(changed) or not changed
    if not write_json(options.json_file, {"ok": not is_bad, "changes": [vars(x) for x in changed]}):
        table = comparing.build_table(changed, options.by)
        show_table(table.columns, table.lines)
        if not changed:
            console.print("nothing that both sides have")
    raise typer.Exit(1 if is_bad else 0)
