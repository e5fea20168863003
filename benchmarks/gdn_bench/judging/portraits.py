"""Draw two pictures of one case of `gdn verify`: outputs against the reference, and errors over time."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gdn.testing.accuracy import OUTPUTS
from gdn.testing.cases import Lengths
from gdn_bench.judging.readings import Examined
from gdn_bench.results.panels import add_legend

POINTS = 20_000  # of each output in a scatter
BINS = 256  # of a sequence in an error over time
TIMED = ("o", "dq", "dk", "dv", "dg", "dbeta")  # outputs with a token each
# colours of Okabe and Ito, which colour-blind readers can distinguish
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LINES = ("-", "--", ":", "-.")  # of two lines in one place both are visible
MARKS = ("o", "^", "s", "D", "v", "P", "X")


def scatter(path: Path, title: str, one: Examined) -> None:
    """Draw a panel for each output: reference on x, provider on y, a colour for each, the line x = y."""
    outputs = [name for name in OUTPUTS if any(name in outputs_of for outputs_of in one.outputs.values())]
    figure, panels = _panels(outputs, 3.0)
    generator = torch.Generator().manual_seed(0)
    for output, axes in zip(outputs, panels, strict=True):
        ref = one.expected[output].double().flatten().cpu()
        index = torch.randperm(len(ref), generator=generator)[:POINTS]
        low, high = (float(x) for x in (ref.min(), ref.max())) if len(ref) else (0.0, 0.0)
        axes.plot([low, high], [low, high], color="#999999", linewidth=0.8, zorder=0)
        for i, (who, outputs_of) in enumerate(one.outputs.items()):
            if output in outputs_of:
                x = outputs_of[output].double().flatten().cpu()
                axes.scatter(
                    ref[index], x[index], s=max(18 - 5 * i, 3), alpha=0.6, linewidths=0, label=who,
                    color=COLOURS[i % len(COLOURS)], marker=MARKS[i % len(MARKS)], rasterized=True,
                )  # fmt: skip
        axes.set_title(output)
        axes.set_xlabel("reference, fp64")
        axes.set_ylabel("output")
    _finish(figure, panels, title, path)


def over_time(path: Path, title: str, one: Examined, lengths: Lengths) -> None:
    """Draw each bin's RMS error over the output's RMS along the tokens; vertical lines end sequences."""
    outputs = [name for name in TIMED if any(name in outputs_of for outputs_of in one.outputs.values())]
    figure, panels = _panels(outputs, 4.2)
    for output, axes in zip(outputs, panels, strict=True):
        ref = one.expected[output].double()
        for i, (who, outputs_of) in enumerate(one.outputs.items()):
            if output in outputs_of:
                places, errors = by_bin(outputs_of[output].double(), ref)
                axes.plot(
                    places,
                    errors,
                    color=COLOURS[i % len(COLOURS)],
                    linewidth=1.4,
                    linestyle=LINES[i % len(LINES)],
                    label=who,
                )
        for end in (lengths.ends or ())[1:-1]:
            axes.axvline(end, color="#bbbbbb", linewidth=0.6, zorder=0)
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both", linewidth=0.4)
        axes.set_title(output)
        axes.set_xlabel("token")
        axes.set_ylabel("error / RMS of the output")
    _finish(figure, panels, title, path)


def by_bin(x: Tensor, ref: Tensor) -> tuple[list[float], list[float]]:
    """Return the middles of bins of tokens (axis 1), and their RMS errors over the RMS of the output."""
    size = float(ref.square().mean().sqrt())
    T, places, errors = ref.shape[1], [], []
    width = math.ceil(T / BINS)
    for start in range(0, T, max(width, 1)):
        part = slice(start, start + width)
        error = float((x[:, part] - ref[:, part]).square().mean().sqrt())
        if error > 0 and size > 0:
            places.append((start + min(start + width, T)) / 2)
            errors.append(error / size)
    return places, errors


def _panels(names: Sequence[str], side: float) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    columns = min(len(names), 5 if side < 4 else 3) or 1
    lines = math.ceil(len(names) / columns)
    figure = Figure(figsize=(side * columns, 3.0 * lines + 0.6), dpi=130, layout="constrained")
    return figure, [figure.add_subplot(lines, columns, i + 1) for i in range(len(names))]


def _finish(figure: Any, panels: Sequence[Any], title: str, path: Path) -> None:
    # a case's name is longer than two panels are wide; 11 points take about 0.085 inch a character
    figure.suptitle(textwrap.fill(title, int(figure.get_figwidth() / 0.085)), fontsize=11)
    add_legend(figure, panels, markerscale=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
