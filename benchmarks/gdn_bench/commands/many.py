"""The benchmarks of several GPUs: `ranks` and `links`. Each starts a process for each GPU."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gdn.cli.console import Device, Json, check_choice, console, status, write_json
from gdn.cli.options import take_options
from gdn_bench.commands.console import find_gpu, name_file, open_progress, show_table, split_words
from gdn_bench.results import scaling, tables
from gdn_bench.results.rows import Row
from gdn_bench.timing import measure

Count = Annotated[int | None, typer.Option("--ranks", min=2, help="Ranks; all GPUs, or 2 on a CPU.")]
Out = Annotated[Path | None, typer.Option(help="Append the rows to this JSON-lines file.")]
Commit = Annotated[str | None, typer.Option(help="The commit of this tree, where git is absent.")]
Size = Annotated[int, typer.Option(min=1, help="K and V.")]


GATES = ("mixed", "mild", "slow", "none", "strong")


@dataclass(frozen=True)
class RankOptions:
    """Options of `ranks`."""

    num_ranks: Count = None
    heads: Annotated[str, typer.Option(help="H/HV.")] = "16/32"
    size: Size = 128
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the sequence, in strong scaling.")] = 131072
    local: Annotated[int, typer.Option(min=1, help="Tokens a rank, in weak scaling.")] = 65536
    gate: Annotated[str, typer.Option(help=f"Gates: {', '.join(GATES)}.")] = GATES[0]
    exchanges: Annotated[
        str, typer.Option(help="Exchanges, in turn: gather, owner, heads, and nodes of two ranks from 4 on.")
    ] = "gather,owner,heads"
    names: Annotated[
        str, typer.Option("--providers", help="gdn, and fla: FLA tunes its kernels for minutes.")
    ] = "gdn"
    out: Out = None
    commit: Commit = None
    device: Device = None
    json_file: Json = None


@dataclass(frozen=True)
class LinkOptions:
    """Options of `links`."""

    num_ranks: Count = None
    heads: Annotated[str, typer.Option(help="Value heads of the states, in turn.")] = "16,32,64"
    size: Size = 128
    most: Annotated[int, typer.Option(min=4, help="Bytes that a rank sends in the largest collective.")] = (
        2**26
    )
    out: Out = None
    commit: Commit = None
    device: Device = None
    json_file: Json = None


@take_options(RankOptions)
def ranks(options: RankOptions) -> None:
    """Training and forward of one long sequence on several GPUs beside one, by every exchange."""
    from gdn_bench.passes import ranks as times

    device, count = _find_ranks(options)
    heads = tuple(int(x) for x in options.heads.split("/"))
    if len(heads) != 2 or heads[1] % heads[0]:
        raise typer.BadParameter(f"heads: expected H/HV, HV a multiple of H, got {options.heads}")
    if options.tokens % count:
        raise typer.BadParameter(f"tokens: expected a multiple of {count} ranks, got {options.tokens}")
    exchanges = split_words(options.exchanges)
    names = (*times.EXCHANGES, times.NODES)
    if unknown := set(exchanges) - set(names):
        raise typer.BadParameter(
            f"exchanges: expected some of {', '.join(names)}, got {', '.join(sorted(unknown))}"
        )
    if times.NODES in exchanges and (count < 4 or count % 2):
        raise typer.BadParameter(
            f"exchanges: expected an even number of ranks from 4 on for {times.NODES}, got {count}"
        )
    chosen = times.Scaling(
        heads, options.size, options.tokens, options.local,
        check_choice("gate", options.gate, GATES), _dtype(device), exchanges, split_words(options.names),
    )  # fmt: skip
    _measure("ranks", times.measure, count, device, chosen, options)


@take_options(LinkOptions)
def links(options: LinkOptions) -> None:
    """Collectives by size, and exchanges of states: the times that the cost model predicts."""
    from gdn_bench.passes import links as times

    device, count = _find_ranks(options)
    heads = tuple(int(x) for x in split_words(options.heads))
    sizes = tuple(size for size in times.SIZES if size <= options.most)
    if len(sizes) < 2:
        raise typer.BadParameter(f"most: expected at least {times.SIZES[1]}, got {options.most}")
    _measure("links", times.measure, count, device, times.Links(sizes, heads, options.size), options)


def _find_ranks(options: Any) -> tuple[torch.device, int]:
    """Return the kind of device, and how many ranks run."""
    device = find_gpu(options.device)
    if device.type != "cuda":
        return device, options.num_ranks or 2
    there = torch.cuda.device_count()
    count = options.num_ranks or there
    if not 2 <= count <= there:
        raise typer.BadParameter(f"ranks: expected 2 to {there}, a GPU each, got {count}")
    return device, count


def _dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def _measure(
    label: str, work: Callable[..., Iterator[Row]], count: int, device: torch.device, chosen: Any,
    options: Any,
) -> None:  # fmt: skip
    """Run a pass on ranks, append its rows as they come, print its table."""
    from gdn_bench.timing.ranks import run_on_ranks

    about = {**measure.on_gpu(device), **({"commit": options.commit} if options.commit else {})}
    file = options.out or measure.RESULTS / f"{measure.slug(device)}.jsonl"
    measured: list[Row] = []
    with open_progress() as report:
        report(label, 0, None, f"{count} ranks")
        for row in run_on_ranks(work, count, device, chosen):
            measured.append({**row, **about})
            measure.append(file, measured[-1:])
            report(label, len(measured), None, row["case"])
            status.print(tables.summarize(row), markup=False, highlight=False)
    name_file(file, len(measured))
    if write_json(options.json_file, measure.plain({"about": about, "rows": measured})):
        return
    timed = [row for row in measured if "ms" in row]
    if timed:
        table = tables.build_table(label, timed)
        place = about.get("gpu") or "cpu"
        show_table(table.columns, table.lines, f"{label}, {place}, {about['date']}, {about['commit']}")
    for note in tables.notes(measured):
        console.print(note, markup=False, highlight=False)
    for line in scaling.EXPLAINED[label]:
        console.print(line, style="dim", highlight=False)
