"""Allocate what a backward writes, where possible in memory that is free by then: the peak memory falls."""

import math
from collections.abc import Sequence

from torch import Tensor

from gdn.backends.hopper.backward.segments import Segments
from gdn.backends.triton.launch import TensorSpec, allocate
from gdn.problem import Problem


def allocate_late(
    p: Problem, specs: Sequence[TensorSpec], segments: Segments | None, dS: Tensor | None
) -> list[Tensor | None]:
    """Return the tensors of `Plan.late`: factors, dq, dk, those of `segments` and of `slabs`.

    dq and dk take the memory of q and k if nobody reads these afterwards (`may_overwrite`). In `gradients`
    one CTA loads q and k of a chunk and key head, and stores dq and dk there afterwards. Another CTA may load
    some of these rows behind the end of its own sequence, but masks them.

    M and N of segments take the memory of dS: `propagate_states` has read them before `reverse_scan` starts.
    """
    given: dict[int, Tensor] = {}
    if p.may_overwrite and p.q.is_contiguous() and p.k.is_contiguous():
        given = {1: p.q.detach(), 2: p.k.detach()}
    if segments is not None and dS is not None:
        transfers = 2 + len(segments.specs)
        shape, strides, dtype = specs[transfers]
        if math.prod(shape) * dtype.itemsize <= dS.numel() * dS.element_size():
            given[transfers] = dS.view(dtype).as_strided(shape, strides)
    late = allocate(p.device, [None if i in given else spec for i, spec in enumerate(specs)])
    for i, x in given.items():
        late[i] = x
    return late
