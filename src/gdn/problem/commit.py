"""Check a commit: copies of the accepted states of all layers into their slots, after verification.

The fields have the names of the arguments of `gdn.commit`, where they are documented.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from gdn.notation import Index
from gdn.problem import addressing, check
from gdn.problem.declaration import WRITTEN, Declared, declared


@declared
@dataclass(frozen=True)
class CommitProblem(Declared):
    """Hold one checked commit: dst [L, slots, ...], src [L, rows, T, ...], the indices [n].

    With column_scale [L, slots, HV, V] dst is in int16, [L, slots, HV, K, V] or with V first.
    """

    dst: Annotated[Tensor, WRITTEN]
    src: Tensor
    dst_index: Index
    src_row: Index
    step: Index
    extra_dst_index: Index | None
    extra_step: Index | None
    column_scale: Annotated[Tensor | None, WRITTEN]
    state_v_first: bool
    backend: str | None = None


def parse_commit(**given: Any) -> CommitProblem:
    """Check a call of `commit` without reading tensor contents."""
    p = CommitProblem.draft(given)
    addressing.check_states(p.dst, p.column_scale, name="dst")
    check.floating("src", p.src)
    if p.column_scale is not None:
        dims: dict[str, int] = {}
        check.shape("dst", p.dst, "L slots HV V K" if p.state_v_first else "L slots HV K V", dims)
        addressing.column_scale(p.column_scale, "L slots HV V", dims)
    elif p.dst.dim() < 2:
        raise ValueError(f"dst: expected shape [L, slots, ...], got {list(p.dst.shape)}")
    dst, src = p.dst.shape, p.src.shape
    if len(src) != len(dst) + 1 or src[0] != dst[0] or src[3:] != dst[2:]:
        rest = "".join(f", {size}" for size in dst[2:])
        raise ValueError(f"src: expected shape [L={dst[0]}, rows, T{rest}], got {list(src)}")
    check.writable("dst", p.dst)
    dims = {}
    addressing.index("dst_index", p.dst_index, "n", dims)
    addressing.index("src_row", p.src_row, "n", dims)
    addressing.index("step", p.step, "n", dims)
    if p.extra_dst_index is not None or p.extra_step is not None:
        addressing.index("extra_dst_index", p.extra_dst_index, "n", dims)
        addressing.index("extra_step", p.extra_step, "n", dims)
    check.companions(
        p.dst, "dst", src=p.src, dst_index=p.dst_index, src_row=p.src_row, step=p.step,
        extra_dst_index=p.extra_dst_index, extra_step=p.extra_step, column_scale=p.column_scale,
    )  # fmt: skip
    check.no_gradient("commit", dst=p.dst, src=p.src, column_scale=p.column_scale)
    return p
