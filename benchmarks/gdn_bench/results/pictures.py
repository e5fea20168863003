"""Draw figures from results files: speed against length, a roofline, ratios, errors by gates and keys.

Each function takes the results of one machine and returns a figure, or None where no row has what it draws.
Colours and marks differ in grey, too; sizes are for a column of print.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gdn.testing import accuracy
from gdn_bench.providers.names import owner_of, title_of
from gdn_bench.results import scaling_pictures
from gdn_bench.results.pages import Results
from gdn_bench.results.panels import add_grid, add_legend, make_panels, set_numbers, set_title
from gdn_bench.results.picture_files import save_svg
from gdn_bench.results.rows import Row

# colours of Okabe and Ito; a provider has one colour and mark in all pictures
LOOKS: Mapping[str, tuple[str, str, str]] = {
    "gdn": ("#0072b2", "o", "-"),
    "fla": ("#d55e00", "^", "--"),
    "flash_qla": ("#009e73", "s", "-."),
    "flash_kda": ("#e69f00", "P", (0, (3, 1, 1, 1, 1, 1))),  # type: ignore[dict-item]
    "flashinfer": ("#cc79a7", "D", ":"),
    "transformers": ("#7f7f7f", "v", (0, (5, 1))),  # type: ignore[dict-item]
}
CLASSES = {
    "o, final state": ("o", "final_state"),
    "dq, dk, dv, dh0": ("dq", "dk", "dv", "dh0"),
    "dg, dbeta, dA_log, ddt_bias": ("dg", "dbeta", "dA_log", "ddt_bias"),
}


def draw(one: Results, folder: Path) -> list[tuple[str, str]]:
    """Draw every picture that the rows allow, as SVG; return (title, file name) of each."""
    drawn = []
    folder.mkdir(parents=True, exist_ok=True)
    for kind, (title, make) in PICTURES.items():
        figure = make(one)
        if figure is None:
            continue
        name = f"{one.name}-{kind}.svg"
        save_svg(figure, folder / name)
        drawn.append((title, name))
    return drawn


def lengths(one: Results) -> Any:
    """Draw tokens per second against the length of one sequence, a panel for each head count and pass."""
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    measured = [row for row in one.last("prefill", "train", "cpu") if "ms" in row and row.get("N") == 1]
    for row in measured:
        if row.get("T", 0) > 1:
            what = row["case"].rpartition(" ")[0] if row["pass"] == "cpu" else f"{row['H']}/{row['HV']} heads"
            title = f"{row['pass']}, {what}"
            points = groups.setdefault(title, {}).setdefault(owner_of(row["provider"]), [])
            points.append((row["T"], row["T"] / row["ms"] / (1e3 if "gpu" in row else 1)))
    groups = {t: g for t, g in groups.items() if any(len(points) > 1 for points in g.values())}
    up = f"{'million' if any('gpu' in row for row in measured) else 'thousand'} tokens per second"
    return _curves(groups, "tokens in one sequence", up, "Speed against sequence length", one, measured)


def prefill(one: Results) -> Any:
    """Draw tokens per second of a prefill against the length of one sequence: the README's picture."""
    measured = [
        row
        for row in one.last("prefill")
        if row["pass"] == "prefill" and "ms" in row and row.get("N") == 1 and row.get("T", 0) > 1
    ]
    heads = [name for name in ((16, 32), (2, 8)) if any((row["H"], row["HV"]) == name for row in measured)]
    if not heads:
        return None
    figure, panels = make_panels(len(heads), width=4.2, height=3.4)
    for (H, HV), axes in zip(heads, panels, strict=True):
        of_heads = [row for row in measured if (row["H"], row["HV"]) == (H, HV)]
        for provider, (colour, mark, style) in LOOKS.items():
            points = sorted(
                (row["T"], row["T"] / row["ms"] / 1e3)
                for row in of_heads
                if owner_of(row["provider"]) == provider
            )
            if points:
                axes.plot(
                    *zip(*points, strict=True), color=colour, marker=mark, linestyle=style,
                    markersize=6, linewidth=2 if provider == "gdn" else 1.4, label=title_of(provider),
                )  # fmt: skip
        ticks = sorted({row["T"] for row in of_heads})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
        axes.xaxis.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens in one sequence")
        axes.set_title(f"{H} key heads, {HV} value heads of 128 x 128", fontsize=10)
        add_grid(axes)
    panels[0].set_ylabel("million tokens per second")
    set_title(figure, "Prefill of one sequence", one, measured)
    add_legend(figure, panels)
    return figure


def batches(one: Results) -> Any:
    """Draw microseconds of a decode call against its rows, a panel for each dtype of states."""
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    measured = [row for row in one.last("decode") if "ms" in row]
    for row in measured:
        points = groups.setdefault(f"decode, {row['state']} states", {})
        points.setdefault(owner_of(row["provider"]), []).append((row["N"], 1e3 * row["ms"]))
    return _curves(groups, "rows", "us a call", "Time of a decode call", one, measured)


def roofline(one: Results) -> Any:
    """Draw flop per second against flop per byte, under the highest rates seen on that machine."""
    measured = [row for row in one.last("prefill", "train") if row.get("flop") and "copy_gb_per_s" in row]
    if not measured:
        return None
    figure, (axes,) = make_panels(1, width=7.4, height=3.8)
    copy, matmul = one.ceilings
    low, high = (f([row["flop"] / row["bytes"] for row in measured]) for f in (min, max))
    low, high = min(low, 1e3 * matmul / copy) / 3, max(high, 1e3 * matmul / copy) * 3
    ridge = 1e3 * matmul / copy
    axes.plot(
        [low, ridge, high], [low * copy / 1e3, matmul, matmul], color="black", linewidth=1.2, zorder=1,
        label=f"copy {copy:.0f} GB/s,\nbf16 product {matmul:.0f} TFLOP/s",
    )  # fmt: skip
    for provider in LOOKS:
        for job in ("prefill", "train"):
            of = [
                r
                for r in measured
                if owner_of(r["provider"]) == provider and r["pass"].partition(":")[0] == job
            ]
            if of:
                colour, mark, _ = LOOKS[provider]
                axes.scatter(
                    [r["flop"] / r["bytes"] for r in of], [r["tflop_per_s"] for r in of], s=34, marker=mark,
                    facecolors=colour if job == "prefill" else "none", edgecolors=colour, linewidths=1.2,
                    label=f"{title_of(provider)}, {job}", zorder=2,
                )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    set_numbers(axes.xaxis)
    set_numbers(axes.yaxis)
    axes.set_xlabel("flop per byte that the job must move")
    axes.set_ylabel("TFLOP/s")
    add_grid(axes)
    set_title(figure, "Roofline", one, measured)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def ratios(one: Results, *, job: str) -> Any:
    """Draw each peer's time over gdn's in one run: blue where gdn is faster, red where it is slower."""
    from matplotlib.colors import TwoSlopeNorm

    measured = [row for row in one.ours(job) if row.get("ratio")]
    cells: dict[tuple[str, str], float] = {}
    for row in measured:
        for peer, ratio in row["ratio"].items():
            line, column = _place(row, peer)
            # ways of speculation have one column: that of the fastest peer
            cells[line, column] = min(float(ratio), cells.get((line, column), math.inf))
    if len(cells) < 2:
        # one number needs no picture
        return None
    lines, columns = (list(dict.fromkeys(place[i] for place in cells)) for i in (0, 1))
    columns.sort(key=lambda column: column.partition("\n")[0])
    grid = [[math.log2(cells.get((line, column), math.nan)) for column in columns] for line in lines]
    size = (2.4 + (0.75 if len(columns) > 9 else 0.95) * len(columns), 1.5 + 0.26 * len(lines))
    figure, (axes,) = make_panels(1, width=max(size[0], 6.4), height=size[1])
    axes.imshow(grid, cmap="RdBu", norm=TwoSlopeNorm(0, -2, 2), aspect="auto")
    for (line, column), ratio in cells.items():
        colour = "white" if abs(math.log2(ratio)) > 1.2 else "black"
        axes.text(
            columns.index(column), lines.index(line), f"{ratio:.2f}", ha="center", va="center", fontsize=8,
            color=colour, weight="bold" if ratio < 1 else "normal",
        )  # fmt: skip
    axes.set_yticks(range(len(lines)), lines, fontsize=8)
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.set_xlabel("peer's time / gdn's time; bold: gdn is slower", fontsize=9)
    set_title(figure, f"Peers' times over gdn's, {job}", one, measured)
    return figure


def _place(row: Row, peer: str) -> tuple[str, str]:
    """Return line and column of a ratio; ways of speculation and variants have columns of their own."""
    case, variant = str(row["case"]), row["pass"].partition(":")[2]
    if row["pass"].startswith("spec"):
        rows, tokens, dtype, way = case.split(" ", 3)
        return f"{rows} {tokens}", f"{dtype}\n{way}"
    if row["pass"].startswith("stages"):
        line, _, stage = case.rpartition(" ")
        return line, f"{title_of(peer)}\n{stage}"
    return case, f"{title_of(peer)}\n{variant}".strip()


def errors(one: Results) -> Any:
    """Draw the largest error of each class of outputs, and its limit, by distribution of gates and keys."""
    from matplotlib.ticker import LogLocator, NullFormatter

    # other sets and profiles are passes of their own
    judged = [row for row in one.last("accuracy") if (row["pass"], row["dtype"]) == ("accuracy", "bfloat16")]
    distributions = list(dict.fromkeys(row["case"] for row in judged))
    if not distributions:
        return None
    figure, panels = make_panels(len(CLASSES), width=3.4, height=1.4 + 0.36 * len(distributions))
    there = [p for p in LOOKS if any(owner_of(row["provider"]) == p for row in judged)]
    worst = {outputs: [_worst(row, outputs) for row in judged] for outputs in CLASSES.values()}
    lowest = min((x for values in worst.values() for x in values if x), default=1e-4)
    for (title, outputs), axes in zip(CLASSES.items(), panels, strict=True):
        for i, provider in enumerate(there):
            colour, mark, _ = LOOKS[provider]
            offset = (i - (len(there) - 1) / 2) * 0.7 / len(there)
            points = [
                (x, distributions.index(row["case"]) + offset)
                for row, x in zip(judged, worst[outputs], strict=True)
                if x and owner_of(row["provider"]) == provider
            ]
            if points:
                xs, ys = zip(*points, strict=True)
                axes.scatter(xs, ys, s=24, marker=mark, color=colour, label=title_of(provider))
        for j, name in enumerate(distributions):
            axes.plot([limit(name, outputs[0])] * 2, [j - 0.4, j + 0.4], color="black", linewidth=1.5)
        axes.set_xscale("log")
        axes.set_xlim(10.0 ** math.floor(math.log10(0.8 * lowest)), 0.1)
        axes.xaxis.set_major_locator(LogLocator(numticks=9))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("relative RMS error; line: limit", fontsize=9)
        axes.set_yticks(
            range(len(distributions)), distributions if axes is panels[0] else [""] * len(distributions)
        )
        axes.set_ylim(len(distributions) - 0.5, -0.5)
        add_grid(axes)
    set_title(figure, "Errors by distribution of gates and keys", one, judged)
    add_legend(figure, panels)
    return figure


def _worst(row: Row, outputs: tuple[str, ...]) -> float | None:
    """Return the largest error of some outputs; None where a row has none of them, or no finite number."""
    values = [row["errors"][name] for name in outputs if name in row["errors"]]
    return None if not values or None in values else max(values)


def limit(name: str, output: str) -> float:
    """Return the limit of a bf16 output under a distribution of that name in `gdn verify`."""
    import torch

    kinds = ("correlated", "identical", "negative")
    keys = next((kind for kind in kinds if f"{kind} keys" in name), "random")
    return accuracy.error_limits(torch.bfloat16, keys)[output]


PICTURES: Mapping[str, tuple[str, Callable[[Results], Any]]] = {
    "prefill": ("Prefill of one sequence: tokens per second against its length", prefill),
    "lengths": ("Speed against sequence length", lengths),
    "batches": ("Time of a decoding step against its rows", batches),
    "roofline": ("Roofline", roofline),
    **{
        f"ratios-{job}": (f"Peers' times over gdn's in {job}", partial(ratios, job=job))
        for job in ("prefill", "train", "decode", "spec", "stages", "layer", "e2e", "host", "cpu")
    },
    **scaling_pictures.PICTURES,
    "errors": ("Errors by gate and key distribution", errors),
}


def _curves(
    groups: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], across: str, up: str, about: str,
    one: Results, measured: Sequence[Row],
) -> Any:  # fmt: skip
    """Draw a panel for each group and a line for each provider, on two logarithmic axes."""
    if not groups:
        return None
    figure, panels = make_panels(len(groups), width=3.4, height=3.2)
    for (title, lines), axes in zip(groups.items(), panels, strict=True):
        for provider, (colour, mark, style) in LOOKS.items():
            points = sorted(lines.get(provider, ()))
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    marker=mark,
                    linestyle=style,
                    markersize=5,
                    label=title_of(provider),
                )
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        set_numbers(axes.yaxis)
        axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks], fontsize=8)
        axes.xaxis.minorticks_off()
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.set_title(title, fontsize=10)
        add_grid(axes)
    set_title(figure, about, one, measured)
    add_legend(figure, panels)
    return figure
