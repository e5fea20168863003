"""Our stages beside their references on the same inputs, as pto-kernels checks its own.

Each stage gets what ours before it made, rounded to the dtype of q as kernels hand it on, and its reference
the same in fp64: `gdn verify --set pto`.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

import gdn
from gdn.testing.cases import Case
from gdn.testing.memory import poison_memory
from gdn.testing.tensors import Inputs
from gdn_bench.passes.stages import REFERENCE, TABLE

WHOLE = "whole o"
ROUNDED = ("A_inv", "w", "u", "S_in", "v_new")


def takes(case: Case) -> bool:
    """Whether a problem is the stages' own: gates given, keys as they come, no state, no scale."""
    return case == Case(case.gate, case.keys, case.lengths, case.heads, case.sizes) and case.gate != "absent"


def beside(given: Inputs, backend: str | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(result, ours, the reference's) of every stage; at last `whole o`: one call's o, and the stages' o."""
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
            # ours counts as many chunks as there might be
            yield name, own[: len(ref)], ref
            x[name] = own.to(dtype) if name in ROUNDED else own
    call: dict[str, Any] = {**given.tensors, **given.options, "backend": backend}
    o, _ = gdn.chunk_gated_delta_rule(**call)
    yield WHOLE, o, x["o"].double()
