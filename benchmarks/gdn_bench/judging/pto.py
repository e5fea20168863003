"""The problems and limits of pto-kernels, and the stages of gdn beside their references, as it checks its
own.

pto-kernels compares its own kernels end to end: RMSE / mean|r| <= 0.15, R2 >= 0.99, |Pearson| >= 0.995;
Triton's: RMSE / mean|r| <= 0.09; both with one another: 0.02, 0.999, 0.999. Here the fp64 reference is r,
also for the final state. A stage must have |x - r| <= 1e-5 + 1e-2 |r| everywhere, or RMSE / mean|r| <= 0.05
and R2 >= 0.99, and never |x - r| > 1; one call beside its stages RMSE / mean|r| < 0.005 or R2 > 0.9999.

A stage reads the outputs of the stages before it, rounded to the dtype of q as kernels pass them on; its
reference reads equal values in fp64.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

import gdn
from gdn.testing import accuracy, cases
from gdn.testing.cases import Case, packed
from gdn.testing.memory import poison_memory
from gdn.testing.tensors import Inputs
from gdn_bench.judging.metrics import Metrics, Reading, metrics
from gdn_bench.passes.stages import REFERENCE, TABLE
from gdn_bench.problems import catalog

# lengths of the packed sequences
LENGTHS: tuple[cases.Lengths, ...] = (
    *(packed(T) for T in (128, 256, 512, 1024, 2048, 4096)),
    packed(256, 256),
    packed(128, 128, 128),
    packed(384),
    packed(150, 300),
    packed(129, 255),
    packed(1, 17, 128, 129, 255),
    cases.SHORT_LADDER,
    packed(128, 256, 384, 512, 768),
    cases.LONG_LADDER,
)
# RMSE / mean|r| of gdn, of peers, of gdn against a peer; of a stage, of one call beside its stages
OWN, PEER, PAIR = 0.15, 0.09, 0.02
STAGE, CALL = 0.05, 0.005
_CASE = Case("strong", sizes=(128, 128))


def _problem(heads: tuple[int, int], lengths: cases.Lengths) -> tuple[str, Case]:
    words = next((n for n, ladder in catalog.LADDERS.items() if ladder == lengths), None)
    ends = lengths.ends or ()
    each = ",".join(str(b - a) for a, b in zip(ends, ends[1:], strict=False))
    name = f"{heads[0]}/{heads[1]} {words or each}"
    return name, replace(_CASE, heads=heads, lengths=lengths)


SETS: dict[str, dict[str, Case]] = {
    "pto": dict(_problem((16, 16), lengths) for lengths in LENGTHS),
    "pto-gva": dict(
        _problem(catalog.heads(name), lengths)
        for name in catalog.PTO_GVA
        for lengths in LENGTHS
        if lengths not in (packed(384), cases.LONG_LADDER)
    ),
}
WHOLE = "whole o"
ROUNDED = ("A_inv", "w", "u", "S_in", "v_new")


def has_stages(case: Case) -> bool:
    """Return True for a problem of the stages: gates given, keys as they are, no state, no scale."""
    return case == Case(case.gate, case.keys, case.lengths, case.heads, case.sizes) and case.gate != "absent"


def run_stages(given: Inputs, backend: str | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (output, gdn's, the reference's) of each stage; last o of one call, and o of the stages."""
    x: dict[str, Any] = {"initial_state": None, **given.tensors}
    offsets, dtype = x.get("cu_seqlens"), x["q"].dtype
    for stage, (taken, made) in TABLE.items():
        arguments, reference = [x[name] for name in taken], REFERENCE[stage]
        with poison_memory():
            ours = getattr(gdn.stages, reference.__name__)(*arguments, cu_seqlens=offsets, backend=backend)
        exact = [y if y is None else y.double() for y in arguments]
        wanted = reference(*exact, cu_seqlens=offsets)
        both = (y if isinstance(y, tuple) else (y,) for y in (ours, wanted))
        for name, own, ref in zip(made, *both, strict=True):
            # gdn allocates as many chunks as there might be
            yield name, own[: len(ref)], ref
            x[name] = own.to(dtype) if name in ROUNDED else own
    call: dict[str, Any] = {**given.tensors, **given.options, "backend": backend}
    o, _ = gdn.chunk_gated_delta_rule(**call)
    yield WHOLE, o, x["o"].double()


def read_stages(name: str, case: Case, provider: str, given: Inputs) -> Iterator[Reading]:
    """Yield the reading of every stage on the backend of a provider, then that of one call beside them."""
    backend, dtype = provider.partition(":")[2] or None, str(given.tensors["q"].dtype)
    for output, x, ref in run_stages(given, backend):
        scores, is_whole = metrics(x, ref), output == WHOLE
        limit, ok = (CALL, passes_call(scores)) if is_whole else (STAGE, passes_stage(scores))
        error = accuracy.measure_error(x, ref, limit, lambda: 0.0)[0]
        who = f"{provider} stages"
        yield Reading(name, case, who, backend, dtype, output, error, limit, scores, ok)


def read_pairs(
    name: str, case: Case, dtype: str, outputs: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[Reading]:
    """Yield the readings of gdn against every peer."""
    pairs = itertools.product(outputs, outputs)
    for own, peer in pairs:
        if not own.startswith("gdn") or peer.startswith("gdn"):
            continue
        for output in outputs[own].keys() & outputs[peer].keys():
            x, ref = outputs[own][output], outputs[peer][output]
            read = metrics(x, ref)
            error = accuracy.measure_error(x, ref.double(), PAIR, lambda: 0.0)[0]
            ok = passes(read, PAIR, 0.999, 0.999)
            yield Reading(name, case, f"{own} ~ {peer}", None, dtype, output, error, PAIR, read, ok)


def passes(scores: Metrics, ratio: float, r2: float = 0.99, pearson: float = 0.995) -> bool:
    """Return True within the limits of a whole output: RMSE / mean|ref|, R2, |Pearson|; NaN fails."""
    return scores.rmse_over_mean <= ratio and scores.r2 >= r2 and abs(scores.pearson) >= pearson


def passes_end_to_end(scores: Metrics, provider: str) -> bool:
    """Return True within the limits of a provider's output beside the reference."""
    return passes(scores, OWN if provider.startswith("gdn") else PEER)


def passes_stage(scores: Metrics) -> bool:
    """Return True within the limits of a stage; a constant reference has no R2 (NaN), then RMSE decides."""
    is_close = scores.rmse_over_mean <= STAGE and not scores.r2 < 0.99
    return scores.max_abs <= 1 and (scores.close == 1 or is_close)


def passes_call(scores: Metrics) -> bool:
    """Return True within the limits of one call beside its stages."""
    return scores.rmse_over_mean < CALL or scores.r2 > 0.9999
