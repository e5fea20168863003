"""Describe the gates of a call to the kernels that run token by token: per head, or per key channel."""

from typing import NamedTuple

from torch import Tensor

from gdn.backends.triton.launch import unit_of
from gdn.problem import DecodeProblem, Problem


class GateLayout(NamedTuple):
    """Hold the strides of the gates, as the kernels take them.

    channels: the constant CHANNELS, the unit of the strides of a decay per key channel; 0 for one per head
    g, beta: strides of row, token and head; A_log, dt_bias: of the head
    rest: the scalars g_k, dt_bias_k (strides of the key) and lower_bound; None: not a parameter of the binary
    is_dense: the key strides are 1
    """

    channels: int
    g: tuple[int, ...]
    beta: tuple[int, ...]
    A_log: int
    dt_bias: int
    rest: tuple[int | float | None, ...]
    is_dense: bool


def gate_layout(p: DecodeProblem | Problem, g: Tensor | None, beta: Tensor | None, most: int) -> GateLayout:
    """Return the layout of g and beta, or of their raw logits. `most`: elements of a state's widest load.

    A lane loads as many channels as elements of a state, so that both lie in the same lanes.
    """
    is_packed, bias = p.cu_seqlens is not None, p.dt_bias
    unit, is_dense = 0, True
    keys: tuple[int | None, int | None] = (None, None)
    if p.is_per_channel:
        assert g is not None
        unit = min(most, unit_of(*g.stride()[:3], 0 if bias is None else bias.stride(0)))
        keys = (g.stride(3), 1 if bias is None else bias.stride(1))
        is_dense = keys == (1, 1)
    per_row = [
        (0, 0, 0) if x is None else (0 if is_packed else x.stride(0), *x.stride()[1:3]) for x in (g, beta)
    ]
    return GateLayout(
        unit,
        tuple([s // (unit or 1) for s in per_row[0]]),
        per_row[1],
        0 if p.A_log is None else p.A_log.stride(0),
        0 if bias is None else bias.stride(0) // (unit or 1),
        (*keys, p.lower_bound),
        is_dense,
    )
