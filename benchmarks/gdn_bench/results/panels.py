"""Parts that all pictures share: panels, title, legend, ticks, grid."""

import math
from collections.abc import Sequence
from typing import Any

from gdn_bench.results.pages import Results, machine
from gdn_bench.results.rows import Row


def make_panels(count: int, *, width: float, height: float, columns: int = 3) -> tuple[Any, list[Any]]:
    """Return a figure and its panels, so many in a line at most; width and height of one in inches."""
    from matplotlib.figure import Figure

    columns = min(count, columns)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    return figure, [figure.add_subplot(lines, columns, i + 1) for i in range(count)]


def add_legend(figure: Any, panels: Sequence[Any], **options: Any) -> None:
    """Add one legend for all panels, under them; options: more arguments of matplotlib's legend."""
    entries = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels)
    handles = {label: handle for pairs in entries for handle, label in pairs}
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=max(len(handles), 1),
        frameon=False,
        **options,
    )


def set_numbers(axis: Any) -> None:
    """Set ticks at 1, 2 and 5, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))


def add_grid(axes: Any) -> None:
    """Draw pale lines at the ticks."""
    axes.grid(alpha=0.35, linewidth=0.5, which="major")


def set_title(figure: Any, title: str, one: Results, measured: Sequence[Row]) -> None:
    """Set a title with machine, dtypes and dates."""
    dates = sorted({str(row["date"]) for row in measured})
    day = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    dtypes = ", ".join(sorted({str(row["dtype"]) for row in measured if row.get("dtype")}))
    figure.suptitle(f"{title}: {machine(one)}, {dtypes}, {day}", fontsize=11)
