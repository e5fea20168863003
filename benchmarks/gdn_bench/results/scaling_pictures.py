"""Draw rows of several GPUs: strong and weak scaling by exchange, and links, beside the cost model.

A filled mark is a measurement, the open mark of the same form the cost model: where one is within the other,
the call takes the predicted time.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdn.distributed.cost import BUILT
from gdn_bench.providers.names import owner_of, title_of
from gdn_bench.results.pages import Results
from gdn_bench.results.panels import add_grid, add_legend, make_panels, set_numbers, set_title
from gdn_bench.results.rows import Row
from gdn_bench.results.scaling import job_of
from gdn_bench.results.tables import MANY_TIMED, format_bytes, predicted

# exchanges of gdn are shades of its blue, and grey; FLA has its colour and mark of all pictures
LOOKS: Mapping[str, tuple[str, str]] = {
    "gather": ("#0072b2", "o"),
    "owner": ("#56b4e9", "s"),
    "nodes": ("#332288", "p"),
    "heads": ("#666666", "X"),
    "fla": ("#d55e00", "^"),
}
# each collective has the looks of the exchange that consists of it
COLLECTIVES = {"all_gather": "gather", "all_to_all": "owner"}
MODEL = "cost model (open marks)"
TITLES = {"train": "training step", "forward": "forward"}
SHIFT = 0.08  # doublings of the ranks between the marks of two exchanges
IDEAL = {"color": "black", "linewidth": 1, "linestyle": (0, (6, 3)), "label": "ideal", "zorder": 1}
Problem = tuple[str, int, int, int]  # pass, H, HV, tokens


@dataclass(frozen=True)
class Measure:
    """Hold what a picture shows of a row.

    field     its name in a row, after the beginning that MANY_TIMED gives
    value     the number that is drawn
    tokens    the tokens that one GPU computes in the time that it is relative to
    words     these tokens in words, after their number
    form      a number as text
    """

    field: str
    value: Callable[[float], float]
    tokens: Callable[[Row], int]
    words: str
    form: str


SPEEDUP = Measure("speedup", lambda x: x, lambda row: int(row["T"]), "tokens", "{:.2f}x")
EFFICIENCY = Measure(
    "weak", lambda x: 1 / x, lambda row: int(row["T"] // row["num_ranks"]), "tokens a GPU", "{:.0%}"
)


def strong(one: Results) -> Any:
    """Draw speed-ups over one GPU with all tokens: a line of panels for each job, a column for each way."""
    drawn = _scaling(one, SPEEDUP, "Strong scaling of one sequence", "speed-up over one GPU")
    if drawn is None:
        return None
    figure, panels = drawn
    for axes in panels:
        counts = axes.get_xticks()
        axes.plot(counts, counts, **IDEAL)
        axes.set_yscale("log", base=2)
        low, high = axes.get_ylim()
        ticks = [2.0**n for n in range(-8, 9) if low <= 2.0**n <= high]
        axes.set_yticks(ticks, [f"{x:g}x" for x in ticks])
        axes.yaxis.minorticks_off()
    return _finish(figure, panels)


def weak(one: Results) -> Any:
    """Draw one GPU's time over that of ranks with as many tokens each: the efficiency of weak scaling."""
    drawn = _scaling(
        one, EFFICIENCY, "Weak scaling, as many tokens on each GPU as on one", "one GPU's time / this time"
    )
    if drawn is None:
        return None
    figure, panels = drawn
    for axes in panels:
        axes.axhline(1, **IDEAL)
        axes.set_ylim(0, max(1.2, axes.get_ylim()[1]))
        ticks = (0, 0.25, 0.5, 0.75, 1)
        axes.set_yticks(ticks, [f"{x:.0%}" for x in ticks])
    return _finish(figure, panels)


def _scaling(one: Results, shown: Measure, title: str, up: str) -> tuple[Any, list[Any]] | None:
    """Draw a panel for each problem, job and timing; None where no row has the measure."""
    rows = one.last("ranks")
    measured = [row for row in rows if shown.field in row]
    problems = _problems(measured, shown)
    measured = [row for row in measured if _problem(row, shown) in problems]
    timings = [t for t, name in MANY_TIMED.items() if any(name + shown.field in row for row in measured)]
    lines = [
        (what, job)
        for what in problems
        for job in TITLES
        if any((_problem(row, shown), job_of(row)) == (what, job) for row in measured)
    ]
    if not lines:
        return None
    figure, panels = make_panels(len(lines) * len(timings), width=3.4, height=3.1, columns=len(timings))
    for i, axes in enumerate(panels):
        (what, job), timing = lines[i // len(timings)], timings[i % len(timings)]
        of_line = [r for r in measured if (_problem(r, shown), job_of(r)) == (what, job)]
        alone = [r for r in rows if r["num_ranks"] == 1 and (_problem(r, shown), job_of(r)) == (what, job)]
        _draw_panel(axes, of_line, alone, MANY_TIMED[timing], shown)
        axes.set_title(f"{TITLES[job]}, {timing}", fontsize=10)
        if i % len(timings) == 0:
            gates = what[0].partition(":")[2]
            heads = f"{what[1]}/{what[2]} heads{f', gates {gates}' if gates else ''}"
            axes.set_ylabel(f"{heads}\n{what[3]:,} {shown.words}\n{up}", fontsize=9)
    set_title(figure, title, one, measured)
    return figure, panels


def _problem(row: Row, shown: Measure) -> Problem:
    return row["pass"], row["H"], row["HV"], shown.tokens(row)


def _problems(measured: Sequence[Row], shown: Measure) -> list[Problem]:
    """Return one problem for each pass and head count: of those on most numbers of ranks the longest."""
    counts: dict[Problem, set[int]] = {}
    for row in measured:
        counts.setdefault(_problem(row, shown), set()).add(row["num_ranks"])
    best: dict[tuple[Any, ...], Problem] = {}
    for what in sorted(counts, key=lambda what: (len(counts[what]), what[3])):
        best[what[:3]] = what
    return [best[what] for what in dict.fromkeys(what[:3] for what in counts)]


def _draw_panel(axes: Any, measured: Sequence[Row], alone: Sequence[Row], name: str, shown: Measure) -> None:
    """Draw a line for each exchange and for FLA, the model's marks, and the best number of each count."""
    timed = [row for row in measured if name + shown.field in row]
    exchanges = [x for x in LOOKS if any(_looks_of(row) == x for row in timed)]
    best: dict[int, float] = {}
    for i, exchange in enumerate(exchanges):
        colour, mark = LOOKS[exchange]
        shift = 2.0 ** (SHIFT * (i - (len(exchanges) - 1) / 2))
        points, model = [], []
        for row in timed:
            if _looks_of(row) == exchange:
                y, share = shown.value(row[name + shown.field]), predicted(row, name)
                points.append((shift * row["num_ranks"], y))
                model += [(shift * row["num_ranks"], y / share)] if share else []
                if exchange != "fla":
                    best[row["num_ranks"]] = max(y, best.get(row["num_ranks"], 0.0))
        # tokens and not states are exchanged by heads: no line from one GPU, as it would only cross others
        start = [(1.0, 1.0)] if exchange in BUILT else []
        axes.plot(
            *zip(*start, *sorted(points), strict=True), color=colour, marker=mark, markersize=5.5,
            linewidth=1.4, linestyle="--" if exchange == "fla" else "-", label=title_of(exchange),
        )  # fmt: skip
        _draw_model(axes, model, colour, mark)
    shares = [share for row in alone if (share := predicted(row, name))]
    _draw_model(axes, [(1.0, 1 / share) for share in shares], "black", "o")
    for count, y in best.items():
        axes.annotate(
            shown.form.format(y), (count, y), (0, -22), textcoords="offset points", ha="center", fontsize=8.5,
            weight="bold",
        )  # fmt: skip
    counts = sorted({1, *(row["num_ranks"] for row in measured)})
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.8, 1.3 * counts[-1])
    axes.set_xticks(counts, [str(x) for x in counts])
    axes.xaxis.minorticks_off()
    axes.set_xlabel("GPUs")
    add_grid(axes)


def _draw_model(axes: Any, points: Sequence[tuple[float, float]], colour: str, mark: str) -> None:
    if points:
        axes.plot(
            *zip(*sorted(points), strict=True), color=colour, marker=mark, markersize=9.5, linewidth=0.8,
            linestyle=":", fillstyle="none", zorder=3,
        )  # fmt: skip


def _finish(figure: Any, panels: Sequence[Any]) -> Any:
    """Add the legend, with one entry for the cost model, and return the figure."""
    panels[-1].plot(
        [], [], color="black", marker="o", markersize=9.5, linestyle=":", fillstyle="none", label=MODEL
    )
    add_legend(figure, panels)
    return figure


def _looks_of(row: Row) -> str:
    return str(row["exchange"]) if owner_of(row["provider"]) == "gdn" else owner_of(row["provider"])


def links(one: Results) -> Any:
    """Draw times in a row: of collectives against bytes, and of exchanges of states against value heads."""
    measured = one.last("links")
    counts = sorted({row["num_ranks"] for row in measured})
    if not counts:
        return None
    figure, panels = make_panels(3 * len(counts), width=3.4, height=3.1)
    for R, at in zip(counts, range(0, len(panels), 3), strict=True):
        of_count = [row for row in measured if row["num_ranks"] == R]
        _draw_collectives(panels[at], [row for row in of_count if "bytes" in row], R)
        for axes, way in zip(panels[at + 1 : at + 3], ("forward", "backward"), strict=True):
            _draw_exchanges(axes, of_count, way, R)
    set_title(figure, "Links between GPUs", one, measured)
    return _finish(figure, panels)


def _draw_collectives(axes: Any, measured: Sequence[Row], num_ranks: int) -> None:
    fits = []
    for name, exchange in COLLECTIVES.items():
        rows = [row for row in measured if row["case"].startswith(name)]
        points = [(row["bytes"], 1e3 * row["queued_ms"]) for row in rows]
        _draw_times(axes, points, [(row["bytes"], 1e3 * row["predicted_ms"]) for row in rows], exchange, name)
        bandwidths = [row["link_gb_per_s"] for row in rows if row.get("link_gb_per_s")]
        fits += [f"{name}: {rows[0]['latency_us']:.1f} us a step, {x:.0f} GB/s" for x in bandwidths[:1]]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    set_numbers(axes.yaxis)
    most = max((row["bytes"] for row in measured), default=0)
    ticks = [2.0**n for n in range(12, 41, 4) if 2.0**n <= most]
    axes.set_xticks(ticks, [format_bytes(x) for x in ticks])
    axes.xaxis.minorticks_off()
    axes.set_xlabel("bytes that a GPU receives")
    axes.set_ylabel("us, 8 in a row")
    axes.set_title("\n".join([f"collectives of {num_ranks} GPUs", *fits]), fontsize=9)
    add_grid(axes)


def _draw_exchanges(axes: Any, measured: Sequence[Row], way: str, num_ranks: int) -> None:
    heads = set()
    for exchange in COLLECTIVES.values():
        points, model = [], []
        for row in measured:
            if which := re.match(rf"{exchange} of states {way}, (\d+) heads", row["case"]):
                heads.add(int(which[1]))
                points.append((int(which[1]), 1e3 * row["queued_ms"]))
                model.append((int(which[1]), 1e3 * row["predicted_ms"]))
        _draw_times(axes, points, model, exchange, exchange)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(heads), [str(x) for x in sorted(heads)])
    axes.xaxis.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("value heads")
    axes.set_title(f"exchange of states of {num_ranks} GPUs, {way}", fontsize=9)
    add_grid(axes)


def _draw_times(
    axes: Any, points: Sequence[tuple[float, float]], model: Sequence[tuple[float, float]], exchange: str,
    name: str,
) -> None:  # fmt: skip
    colour, mark = LOOKS[exchange]
    if points:
        axes.plot(
            *zip(*sorted(points), strict=True), color=colour, marker=mark, markersize=5.5, linewidth=1.4,
            label=name,
        )  # fmt: skip
        _draw_model(axes, model, colour, mark)


PICTURES: Mapping[str, tuple[str, Callable[[Results], Any]]] = {
    "ranks": ("Speed-up of one sequence on several GPUs, beside the cost model", strong),
    "ranks-weak": ("As many tokens on each GPU as on one, beside the cost model", weak),
    "links": ("Collectives and exchanges of states between GPUs, beside the cost model", links),
}
