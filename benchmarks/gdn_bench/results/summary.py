"""Make the README's table of results: of each job the best peers, problems in which gdn is slower."""

from collections.abc import Iterable, Sequence

from gdn.backends import hopper
from gdn_bench.problems.packets import HISTORY
from gdn_bench.providers.names import title_of
from gdn_bench.results.pages import Results, machine, spread, version
from gdn_bench.results.rows import Row

JOBS = {
    "prefill": "prefill: forward, packed",
    "prefill:gated": "prefill, gates and l2norm in the kernel",
    "prefill:slow": "prefill, slowly decaying gates",
    "prefill:pool": "prefill on an engine's pool of states",
    "train": "train: forward and backward",
    "train:gated": "train, gates and l2norm in the kernel",
    "train:slow": "train, slowly decaying gates",
    "decode": "decode: one token",
    "spec": "speculation: 4 or 16 tokens; one on a history",
    "stages": "each stage alone; all fused",
    "layer": "GatedDeltaNet layer, forward",
    "e2e": "generate, 1.7 billion parameters",
    "host": "host time of a decode call",
    "cpu": "CPU: forward, backward, decode",
}
COLUMNS = ("job", "problems", "best peer", "best peer's time / gdn's", "gdn is slower in")
MOST_NAMED = 3  # slower problems that a cell names


def readme(results: Iterable[Results]) -> str:
    """Return the table, and a line on GPU, dtype and versions for each machine under it."""
    table, notes = [], []
    for one in results:
        measured = [(name, _compared(one, name)) for name in JOBS]
        measured = [(name, timed) for name, timed in measured if timed]
        table += [f"| {' | '.join(_cells(name, timed))} |" for name, timed in measured]
        if measured:
            timed = [row for _, rows in measured for row in rows]
            kind = "GPU" if any("gpu" in row for row in timed) else "CPU"
            notes.append(f"{kind}: {machine(one)}, {_conditions(timed)}.")
    head = [f"| {' | '.join(COLUMNS)} |", "|---|---:|---|---|---|"]
    return "\n".join([*head, *table, "", *notes]) + "\n" if table else ""


def _compared(one: Results, name: str) -> list[Row]:
    """Return gdn's rows of a pass that peers were timed beside in the same run."""
    rows = one.ours(name.partition(":")[0])
    return [row for row in rows if row["pass"] == name and row.get("ratio") and _is_chosen(row)]


def _is_chosen(row: Row) -> bool:
    """Return False for a history on so few rows that only a caller who asks for it gets it."""
    is_history = str(row["case"]).endswith(f" {HISTORY}")
    return not is_history or int(row["N"]) * int(row["HV"]) >= hopper.APPENDS_FROM


def _best(row: Row) -> float:
    """Return the ratio of the fastest peer."""
    return float(min(row["ratio"].values()))


def _cells(name: str, measured: Sequence[Row]) -> list[str]:
    least, most = (f(_best(row) for row in measured) for f in (min, max))
    span = [_factor(least)] if len(measured) == 1 else [_factor(least), _factor(most)]
    return [JOBS[name], str(len(measured)), _peers(measured), " to ".join(span), _slower(measured)]


def _factor(ratio: float) -> str:
    """Return a ratio in two decimals, bold where gdn is slower."""
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"


def _peers(measured: Sequence[Row]) -> str:
    """Return the peers that are the fastest in some problem, the most frequent first."""
    fastest = [min(row["ratio"], key=row["ratio"].__getitem__) for row in measured]
    peers = sorted(dict.fromkeys(fastest), key=lambda peer: -fastest.count(peer))
    # a run has the versions of the peers that it timed
    last = {peer: row for row in measured for peer in row["ratio"]}
    return ", ".join(f"{title_of(peer)} {version(last[peer], peer)}" for peer in peers)


def _slower(measured: Sequence[Row]) -> str:
    """Return in bold the problems that the best peer solves faster; all of them where they are few."""
    slower = sorted((row for row in measured if _best(row) < 1), key=_best)
    if not slower:
        return "none"
    named = ", ".join(str(row["case"]) for row in slower[:MOST_NAMED])
    more = ", ..." if len(slower) > MOST_NAMED else ""
    return f"**{len(slower)} of {len(measured)}: {named}{more}**"


def _conditions(measured: Sequence[Row]) -> str:
    """Return dtypes, versions and dates; the commits are in docs/results.md."""
    conditions = sorted({str(row["dtype"]) for row in measured if row.get("dtype")})
    for name in ("torch", "triton"):
        versions = sorted({str(row["versions"][name]) for row in measured if name in row["versions"]})
        conditions += [f"{name} {' and '.join(versions)}"] if versions else []
    return ", ".join([*conditions, spread(str(row["date"]) for row in measured)])
