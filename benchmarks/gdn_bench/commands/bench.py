"""`gdn bench`: one command for each thing that is timed, and `compare`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gdn.cli.console import Device, Json, check_choice, console, need_packages, status, write_json
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
from gdn_bench.timing import measure

app = typer.Typer(
    help="Times against other implementations, each checked before it is timed.", no_args_is_help=True
)
HELP = {
    "prefill": "Forward, packed sequences, with states in and out.",
    "train": "Forward and backward through autograd, with both states and their gradients.",
    "decode": "One token for B rows, on a pool of states, gates and l2norm inside.",
    "step": "One token for B rows, from before the convolution to after the gated norm: every form.",
    "spec": "4 and 16 tokens for B rows, verified in every way there is, beside one token of the same rows.",
    "stages": "Stage by stage and whole on PTO's shape and GVA set, beside FLA at its best chunk size.",
    "layer": "The whole layer, 2048 wide, 16/32 heads, 16,384 tokens: ours, FLA's, Transformers'.",
    "e2e": "Tokens per second and time to the first token of a Transformers model: prompts, 128 steps.",
    "host": "Host time of an eager call that nobody waits for, and for gdn where it goes.",
    "cold": "A new process with empty caches, and what is compiled again for another problem.",
}
# others have no stages, layers or models to time
DEFAULT = {
    "stages": ("gdn", "fla"),
    "layer": ("gdn", "fla", "transformers"),
    "step": ("gdn",),
    "spec": ("gdn", "flashinfer"),
    "e2e": ("gdn", "fla", "transformers"),
}
# where one problem may take long, most of it compiling: what is begun ends within nine
MINUTES = {"stages": 4, "e2e": 5, "layer": 5}
EXPLAINED = (
    "fla, qla, fi, hf: their time over this one; limit: share of what bytes and products allow at the rates "
    "of this run; goal: moved by the best peer of the day it was set; error: the largest, as a share of its "
    "limit"
)


def _register(job: str) -> None:
    def command(
        variant: Annotated[
            str, typer.Option(help=f"Other gates or options: {', '.join(catalog.VARIANTS)}.")
        ] = "",
        problems: Annotated[
            str, typer.Option("--set", help=f"Other problems: {', '.join(catalog.SETS)}.")
        ] = "table",
        only: Annotated[str, typer.Option(help="Only rows whose name holds one of these: 16/32,2/8.")] = "",
        names: Annotated[
            str | None, typer.Option("--providers", help="gdn, gdn:BACKEND, fla, flash_qla, flashinfer, ...")
        ] = None,
        minutes: Annotated[float, typer.Option(min=0, help="Begin no problem after so many.")] = MINUTES.get(
            job, 8
        ),
        warm: Annotated[
            bool, typer.Option(help="Compile first, in as many processes as there are cores.")
        ] = True,
        is_eager: Annotated[
            bool, typer.Option("--eager", help="Calls as Python makes them, no graph.")
        ] = False,
        resume: Annotated[
            bool, typer.Option(help="Leave out what the file has of this commit on this kind of GPU.")
        ] = False,
        gate_tokens: Annotated[
            int | None, typer.Option(min=1, help="Judge at most so many tokens per sequence.")
        ] = None,
        out: Annotated[Path | None, typer.Option(help="Append the rows to this JSON-lines file.")] = None,
        commit: Annotated[str | None, typer.Option(help="Of this tree, where git cannot tell.")] = None,
        device: Device = None,
        json_file: Json = None,
    ) -> None:
        from gdn_bench.commands import row_names
        from gdn_bench.passes import gpu
        from gdn_bench.providers.names import PROVIDERS
        from gdn_bench.results import rows

        where, deadline = find_gpu(device), time.monotonic() + 60 * minutes
        label = _label(job, variant)
        check_choice("set", problems, catalog.SETS)
        about = {**measure.on_gpu(where), **({"commit": commit} if commit else {})}
        file = out or measure.RESULTS / f"{measure.slug(where)}.jsonl"
        done = rows.done(rows.read(file), about) if resume and file.exists() else set()
        try:
            session = gpu.Session(
                split_words(names) if names else DEFAULT.get(job, PROVIDERS), where, split_words(only),
                deadline, is_named=names is not None, gate_tokens=gate_tokens, is_eager=is_eager,
                done=frozenset(done), problems=catalog.SETS[problems] if problems != "table" else (),
            )  # fmt: skip
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        require_match(session.only, row_names.list_rows(session, label))
        if warm and where.type == "cuda":
            with open_progress() as report:
                report("compile", 0, None, "")
                seconds = gpu.warm(session, [label])
            status.print(f"compiled in {seconds:.0f} s")
        _measure(session, label, file, about, json_file)

    app.command(job, help=HELP[job])(command)


for _job in HELP:
    _register(_job)


def _label(job: str, variant: str) -> str:
    """A pass, or a variant of prefill or train."""
    if not variant:
        return job
    if job not in ("prefill", "train"):
        raise typer.BadParameter(f"variant: expected one of prefill and train only, got {job}")
    return f"{job}:{check_choice('variant', variant, catalog.VARIANTS)}"


def _measure(session: Any, label: str, file: Path, about: dict[str, Any], json_file: str | None) -> None:
    """Run a pass, append its rows as they come, print its table."""
    from gdn_bench.commands import row_names
    from gdn_bench.passes import gpu
    from gdn_bench.results import tables

    found: list[dict[str, Any]] = []
    # other passes make several rows of a name
    is_counted = label.partition(":")[0] in (*gpu.TARGETS, "spec", "layer", "host")
    names = [name for name in row_names.list_rows(session, label) if session.wants(name)]
    with open_progress() as report:
        report(label, 0, len(names) if is_counted else None, "")
        for row in _rows(session, label):
            found.append(row)
            # what was not begun has no row: a later run does it
            measure.append(file, [] if "skipped" in row else [{**row, **about}])
            done = len({row["case"] for row in found})
            report(label, done, len(names) if is_counted else None, row["case"])
            status.print(tables.line(row), markup=False, highlight=False)
    name_file(file, sum("skipped" not in row for row in found))
    if write_json(json_file, measure.plain({"about": about, "absent": session.absent, "rows": found})):
        return
    columns, cells = tables.table(label, found)
    if cells:
        show_table(
            columns, cells, f"{label}, {about.get('gpu') or 'cpu'}, {about['date']}, {about['commit']}"
        )
    for note in [*(f"{name}: {why}" for name, why in session.absent.items()), *tables.notes(found)]:
        console.print(note, markup=False, highlight=False)
    console.print(EXPLAINED, style="dim")


def _rows(session: Any, label: str) -> Iterator[dict[str, Any]]:
    from gdn_bench.passes import end_to_end, gpu, layer, spec, stage_chains, stages, step
    from gdn_bench.providers import models

    if label == "spec":
        return spec.run(session)
    if label in ("layer", "step"):
        return (layer if label == "layer" else step).run(session)
    if label not in ("stages", "e2e"):
        return gpu.run(session, [label])
    try:
        if label == "stages":
            chains, absent = stage_chains.load(session.names)
            found = stages.run(session, chains)
        else:
            served, absent = models.serving(session.names)
            found = end_to_end.run(session, served)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    session.absent.update(absent)
    return found


@app.command()
def cpu(
    threads: Annotated[int, typer.Option(min=1, help="Threads for every provider.")] = 2,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="2048 tokens and decoding only, few runs.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this JSON-lines file.")] = None,
    json_file: Json = None,
) -> None:
    """The rule on the CPU against Transformers' plain-torch functions, interleaved in one run."""
    need_packages("bench", "transformers")
    from gdn_bench.passes import cpu as cpu_bench
    from gdn_bench.results.tables import digits

    rows: list[dict[str, Any]] = []
    file = out or measure.RESULTS / "cpu.jsonl"
    with measure.threads(threads), open_progress() as report:
        found = cpu_bench.jobs(is_quick=is_quick)
        for done, job in enumerate(found):
            report("bench cpu", done, len(found), f"{job.name} {job.B}x{job.T}")
            rows += ({**row, **measure.environment()} for row in cpu_bench.run(job))
        report("bench cpu", len(found), len(found), "")
    measure.append(file, rows)
    name_file(file, len(rows))
    if write_json(json_file, rows):
        return
    cells = []
    for row in rows:
        ratio, goal = row.get("ratio", {}).get(cpu_bench.FALLBACK), row.get("goal_ratio")
        colour = "bold" if goal is None or ratio is None else ("green" if ratio >= goal else "red")
        ms = [digits(row[name]) for name in ("ms", "p20", "p80")] if "ms" in row else ["wrong", "", ""]
        shown = f"[{colour}]{ratio:.2f}[/]" if ratio else ""
        cells.append(
            [row["case"], row["provider"], *ms, shown, str(goal or ""), f"{row['share_of_limit']:.0%}"]
        )
    show_table(("fp32", "provider", "ms", "p20", "p80", "ratio", "goal", "error"), cells)
    console.print(
        "ratio: Transformers' time over ours; error: the largest, as a share of its limit", style="dim"
    )


@app.command()
def compare(
    before: Annotated[str, typer.Argument(help="FILE, FILE@COMMIT, a folder with a checkout, or a commit.")],
    after: Annotated[str, typer.Argument(help="The same, of what came later.")],
    threshold: Annotated[
        float, typer.Option(min=0, help="By how much a time may differ.")
    ] = comparing.THRESHOLD,
    by: Annotated[str | None, typer.Option(help="Divide by a peer's time: machines differ.")] = None,
    job: Annotated[
        str, typer.Option("--run", help="What to run for commits: prefill, decode, ...")
    ] = "prefill",
    only: Annotated[str, typer.Option(help="Only rows whose name holds one of these.")] = "",
    names: Annotated[str, typer.Option("--providers", help="Whom to run.")] = "gdn",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each commit, in turn.")] = comparing.ROUNDS,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Two commits, or two results files. Exit code 1 if anything of ours is slower by 5 %, or lost."""
    arguments = [check_choice("run", job, HELP), "--providers", names, "--only", only]
    arguments += ["--device", device] if device else []
    if not any(comparing.is_file(name) for name in (before, after)):
        find_gpu(device)
    try:
        with open_progress() as report:
            both = comparing.sides((before, after), arguments, rounds=rounds, report=report)
        found = comparing.changes(*both, threshold=threshold, by=by)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    is_bad = comparing.is_regression(found) or not found
    if not write_json(json_file, {"ok": not is_bad, "changes": [vars(change) for change in found]}):
        show_table(*comparing.table(found, by))
        if not found:
            console.print("nothing that both sides have")
    raise typer.Exit(1 if is_bad else 0)
