"""Rows of several GPUs, `ranks` and `links`: what their columns mean, sentences, commands."""

import shlex
from collections.abc import Iterable, Mapping, Sequence

from gdn_bench.providers.names import owner_of
from gdn_bench.results.rows import Row
from gdn_bench.results.tables import MANY_TIMED, format_time, predicted

EXPLAINED: Mapping[str, Sequence[str]] = {
    "ranks": (
        "one call: alone, so that the GPUs wait for the host; 8 in a row: the mean of 8 calls, as in the "
        "layers of a model; CUDA graph: one call that no host launches",
        "speedup (strong scaling): gdn's time on one GPU with all tokens in the same run over this time; "
        "R ranks would ideally reach R",
        "weak (weak scaling): this time over gdn's on one GPU with the tokens of a rank in the same run, "
        "ideally 1",
        "predicted: the time of gdn's cost model, with its share of the measured time in brackets; a CUDA "
        "graph is compared with the model of calls in a row, since neither waits for the host",
        "MB a rank: the most memory that a call allocates beyond its inputs; error: the largest relative "
        "error of outputs and gradients against one process with all tokens",
        "FLA / gdn: the time of FLA's context parallelism on the same ranks over gdn's by gather in the "
        "same run",
    ),
    "links": (
        "one call: mostly the host time of its launch; 8 in a row: launched while the GPU is busy, "
        "without host time",
        "predicted: the time of gdn.distributed.cost for its assumed links, with its share of the time in "
        "a row in brackets",
        "GB/s: the bytes that a rank receives over the time in a row",
        "latency of a step and bandwidth of a link: those that fit the times in a row of all sizes best",
    ),
}
EXCHANGES_PAGE = "[Many GPUs](../many_gpus.md#which-layout-when) explains the exchanges."


def statements(name: str, measured: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return sentences on the measured rows of a pass, each with its rows."""
    if name.partition(":")[0] == "links":
        return _fits(measured)
    return [sentence for rows in _groups(measured).values() for sentence in _speedups(rows)]


def _groups(measured: Sequence[Row]) -> dict[tuple[object, ...], list[Row]]:
    """Return gdn's rows of strong scaling by problem and job, in the order of the rows."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in measured:
        if "speedup" in row and owner_of(row["provider"]) == "gdn":
            what = (*(row[x] for x in ("H", "HV", "K", "T", "dtype")), job_of(row))
            groups.setdefault(what, []).append(row)
    return groups


def job_of(row: Row) -> str:
    """Return train or forward."""
    return str(row["case"]).split()[2].rstrip(",")


def _speedups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return a sentence for each number of ranks: the best exchange in each way of timing, and the model."""
    sentences = []
    for R in sorted({row["num_ranks"] for row in rows}):
        of_count = [row for row in rows if row["num_ranks"] == R]
        parts = []
        for title, name in MANY_TIMED.items():
            timed = [row for row in of_count if f"{name}speedup" in row]
            if not timed:
                continue
            row = max(timed, key=lambda row, name=name: row[f"{name}speedup"])  # type: ignore[misc]
            own, speedup, share = row[f"{name}ms"], row[f"{name}speedup"], predicted(row, name)
            model = f", predicted {format_time(own * share)}" if share else ""
            times = f"{format_time(own)} against {format_time(own * speedup)}{model}"
            parts.append(f"{speedup:.2f} ({title}, {row['exchange']}: {times})")
        first = of_count[0]
        problem = f"`{first['pass']}`: {first['H']}/{first['HV']} 1x{first['T']} {job_of(first)} on {R} ranks"
        sentences.append((f"{problem}: {', '.join(parts)} times as fast as on one GPU", of_count))
    return sentences


def _fits(measured: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return a sentence for each number of ranks: the fitted links, and the model's shares."""
    sentences = []
    for R in sorted({row["num_ranks"] for row in measured}):
        rows = [row for row in measured if row["num_ranks"] == R]
        fits = {row["case"].split()[0]: row for row in rows if "latency_us" in row}
        fitted = [
            f"{row['latency_us']:.1f} us a step"
            + (f" with {row['link_gb_per_s']:.0f} GB/s" if row["link_gb_per_s"] else "")
            + f" ({name})"
            for name, row in fits.items()
        ]
        kinds = {"collectives": True, "exchanges of states": False}
        shares = [
            f"{min(x):.2f} to {max(x):.2f} of those of {kind}"
            for kind, is_fitted in kinds.items()
            if (x := [row["predicted"] for row in rows if ("latency_us" in row) == is_fitted])
        ]
        sentence = (
            f"`links`: {' and '.join(fitted)} fit the times in a row on {R} ranks best; the cost model's"
        )
        sentences.append((f"{sentence} times are {', '.join(shares)}", rows))
    return sentences


def commands(name: str, measured: Sequence[Row], peers: Iterable[str] = ()) -> list[str]:
    """Return the commands that measure these rows again, with these peers: one for each number of ranks."""
    job, _, gate = name.partition(":")
    options = ["--gate", gate] if gate else []
    providers = ",".join(dict.fromkeys(("gdn", *peers)))
    options += ["--providers", providers] if providers != "gdn" else []
    counts = sorted({row["num_ranks"] for row in measured} - {1})
    return [shlex.join(["gdn", "bench", job, "--ranks", str(R), *options]) for R in counts]
