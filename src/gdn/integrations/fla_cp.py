"""Read the context of FLA's own context parallelism, which holds the offsets of this rank alone.

The ranks gather their offsets when a context is first used: FLA makes one on every rank for each batch. The
run of a rank are its tokens; a sequence goes on from the rank before unless `is_first_rank` says otherwise.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn.distributed.check import gather_rows, signature_group
from gdn.distributed.context import ContextParallel

FIELDS = ("group", "cu_seqlens", "is_first_rank", "pre_num_ranks", "post_num_ranks")


class Read(NamedTuple):
    """Hold the context that FLA's context stands for, and the global offsets on the CPU."""

    context: ContextParallel | None
    cu_seqlens: Tensor


# id of FLA's context, which has no hash -> what it stands for, as long as it lives
_known: dict[int, Read] = {}


def is_fla_context(x: Any) -> bool:
    """Return True for an FLACPContext, known by its fields: FLA is not imported."""
    return all(hasattr(x, name) for name in FIELDS)


def read_context(given: Any) -> Read:
    """Return what FLA's context stands for; its first call is collective over the group.

    Raises NotImplementedError for the zig-zag layout of FLA.
    """
    layout = getattr(given, "layout", "contiguous")
    if layout != "contiguous":
        raise NotImplementedError(
            f"cp_context: expected layout='contiguous', got {layout!r}; "
            "gdn.ContextParallel(order='headtail') is that order"
        )
    read = _known.get(id(given))
    if read is None:
        read = _known[id(given)] = _read(given)
        weakref.finalize(given, _known.pop, id(given), None)
    return read


def _read(given: Any) -> Read:
    if given.group is None:
        return Read(None, given.cu_seqlens)
    local = given.cu_seqlens.tolist()
    rows = gather_rows([int(given.is_first_rank), *local], signature_group(given.group))
    offsets, runs, base = [0], [], 0
    for rank, (is_first, *cuts) in enumerate(rows):
        # a sequence begins at each offset but the last one, and but the first one where it came in
        starts = cuts[:-1] if is_first else cuts[1:-1]
        offsets += [base + x for x in starts if base + x > 0]
        runs.append((rank, base, base + cuts[-1]))
        base += cuts[-1]
    return Read(ContextParallel(given.group, runs=runs), torch.tensor([*offsets, base], device="cpu"))
