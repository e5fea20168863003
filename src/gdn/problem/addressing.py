"""Check the parts of a serving call: tokens, gates, the pool, and the slots that are read and written.

`dims` maps letters to sizes. Each check compares with the sizes in `dims` and adds those that are missing.
"""

from typing import Any

import torch
from torch import Tensor

from gdn.problem import check
from gdn.problem.declaration import Declared
from gdn.problem.shapes import CHUNK

WRITES = ("final", "all", "none")
# integers of states -> the pool that has their scales
POOLS = {torch.int16: "an Int16Pool", torch.int8: "a HistoryPool"}


def tokens(q: Any, k: Any, v: Any) -> dict[str, int]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.floating(name, x)
    dims: dict[str, int] = {}
    check.shape("q", q, "B T H K", dims)
    if k.shape != q.shape:
        check.shape("k", k, "B T H K", dims)
    check.time_first(v, dims)
    check.shape("v", v, "B T HV V", dims)
    if not q.dtype == k.dtype == v.dtype:
        check.same_dtype(q, "q", k=k, v=v)
    if dims["K"] < 1 or dims["V"] < 1:
        raise ValueError(f"v: expected K >= 1 and V >= 1, got K={dims['K']}, V={dims['V']}")
    if dims["H"] < 1 or dims["HV"] < dims["H"] or dims["HV"] % dims["H"]:
        raise ValueError(f"v: expected HV to be a multiple of H={dims['H']}, got HV={dims['HV']}")
    return dims


def gates(p: Any, dims: dict[str, int]) -> None:
    g, beta, a, b, A_log = p.g, p.beta, p.a, p.b, p.A_log
    is_raw = a is not None or b is not None
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            if is_raw:
                raise ValueError(f"{name}: expected None with the raw logits a and b, got both")
            check.floating(name, x)
    if g is not None:
        check.decay("g", g, "B T HV", dims)
    if beta is not None:
        check.shape("beta", beta, "B T HV", dims)
    if not is_raw:
        check.no_gate_parameters(p, "the raw logits a and b")
        if p.allow_neg_eigval:
            raise ValueError("allow_neg_eigval: expected the raw logits a and b with it, got none")
        return
    for name, x in (("a", a), ("b", b), ("A_log", A_log)):
        if x is None and (name != "A_log" or p.lower_bound is None):
            raise ValueError(f"{name}: expected a tensor (raw logits need a, b and A_log), got None")
    check.decay("a", a, "B T HV", dims)
    check.floating("b", b)
    check.shape("b", b, "B T HV", dims)
    check.gate_parameters(p.A_log, p.dt_bias, p.lower_bound, "HV K" if p.is_per_channel else "HV", dims)


def packing(q: Tensor, cu_seqlens: Any, max_seqlen: Any, dims: dict[str, int]) -> None:
    """Check cu_seqlens and max_seqlen; set dims N, the rows, and M, the most tokens of a row, where known."""
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen: expected None without cu_seqlens, got {max_seqlen}")
        dims["N"], dims["M"] = dims["B"], dims["T"]
        return
    dims["N"] = check.offsets("q", cu_seqlens, None, dims)
    if cu_seqlens.device.type != "cpu":
        check.companions(q, "q", cu_seqlens=cu_seqlens)
    if max_seqlen is not None:
        if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
            raise TypeError(f"max_seqlen: expected an int or None, got {type(max_seqlen).__name__}")
        if max_seqlen < 0:
            raise ValueError(f"max_seqlen: expected at least 0, got {max_seqlen}")
        dims["M"] = max_seqlen  # type: ignore[assignment]  # a SymInt while tracing
    elif cu_seqlens.device.type != "cpu":
        raise ValueError(f"max_seqlen: expected an int with cu_seqlens on {cu_seqlens.device}, got None")


def pool(p: Any, is_ring: bool, dims: dict[str, int], has_history: bool = False) -> None:
    q, state = p.q, p.state
    check_states(state, p.column_scale, has_history)
    axes = ("slots R " if is_ring else "slots ") + ("HV V K" if p.state_v_first else "HV K V")
    if state.dim() == 5 and not is_ring and hasattr(p, "ring_pos"):
        sizes = check.describe(axes.split(), dims)
        raise ValueError(f"state: expected shape [{sizes}] without ring_pos, got {list(state.shape)}")
    check.shape("state", state, axes, dims)
    if is_ring and dims["R"] < 1:
        raise ValueError(f"state: expected a ring of R >= 1 entries, got R={dims['R']}")
    if state.dtype == torch.float64 and q.dtype != torch.float64:
        raise ValueError(
            f"state: expected float32, bfloat16 or float16 with q in {q.dtype}, got {state.dtype}"
        )
    check.writable("state", state)
    if p.column_scale is not None:
        column_scale(p.column_scale, "slots R HV V" if is_ring else "slots HV V", dims)
    null(p.null_slot)


def check_states(state: Any, scale: Any, has_history: bool = False, name: str = "state") -> None:
    """Check the kind of the states of a pool: floats, or int16 with scales; int8 only with histories."""
    if scale is None:
        held = POOLS if has_history else (torch.int16,)
        if isinstance(state, Tensor) and state.dtype in held:
            kind = str(state.dtype).removeprefix("torch.")
            raise TypeError(
                f"{name}: expected {kind} with scales, in {POOLS[state.dtype]}, got a tensor of {kind}"
            )
        check.floating(name, state)
        return
    check.tensor(name, state)
    if has_history and state.dtype not in POOLS:
        raise TypeError(f"{name}: expected int16 or int8 with column_scale, got {state.dtype}")
    if not has_history and state.dtype != torch.int16:
        raise TypeError(f"{name}: expected int16 in an Int16Pool, got {state.dtype}")


def column_scale(scale: Any, axes: str, dims: dict[str, int]) -> None:
    """Check the scales of a pool of integers."""
    check.tensor("column_scale", scale)
    if scale.dtype != torch.float32:
        raise TypeError(f"column_scale: expected float32, got {scale.dtype}")
    check.shape("column_scale", scale, axes, dims)
    check.writable("column_scale", scale)


def remainder(low: Any, state: Tensor, v_first: bool, dims: dict[str, int]) -> None:
    """Check the 4-bit remainders of a pool in int8, of two keys in a byte."""
    check.tensor("remainder", low)
    if state.dtype != torch.int8:
        raise ValueError(f"remainder: expected None with states in {state.dtype}, got a tensor")
    if low.dtype != torch.uint8:
        raise TypeError(f"remainder: expected uint8, got {low.dtype}")
    axes = "slots HV V pairs" if v_first else "slots HV pairs V"
    check.shape("remainder", low, axes, {**dims, "pairs": (dims["K"] + 1) // 2})
    check.writable("remainder", low)


def null(null_slot: Any) -> None:
    if isinstance(null_slot, bool) or not (null_slot is None or isinstance(null_slot, int)):
        raise TypeError(f"null_slot: expected None or 0, got {type(null_slot).__name__}")
    if null_slot not in (None, 0):
        raise ValueError(f"null_slot: expected None or 0, got {null_slot}")


def index(name: str, x: Any, axes: str, dims: dict[str, int]) -> None:
    check.integral(name, x)
    check.shape(name, x, axes, dims)


def one_slot_per_row(read_index: Any, dims: dict[str, int]) -> None:
    """Check the slot that each row reads; None: the row's number, of which the pool needs enough slots."""
    if read_index is None:
        check.enough_slots("state", dims["slots"], dims["N"], "read_index")
    else:
        index("read_index", read_index, "N", dims)


def reading(read_index: Any, num_accepted: Any, ring_pos: Any, dims: dict[str, int]) -> None:
    if read_index is None:
        check.enough_slots("state", dims["slots"], dims["N"], "read_index")
    else:
        check.integral("read_index", read_index)
        if read_index.dim() == 2 and ring_pos is None:
            check.shape("read_index", read_index, "N columns", dims)
            if read_index.shape[1] < 1:
                raise ValueError(f"read_index: expected at least one column, got {list(read_index.shape)}")
        else:
            check.shape("read_index", read_index, "N", dims)
    if num_accepted is not None:
        if read_index is None or read_index.dim() != 2:
            raise ValueError("num_accepted: expected a table read_index [N, columns] with it, got none")
        index("num_accepted", num_accepted, "N", dims)
    if ring_pos is not None:
        index("ring_pos", ring_pos, "N", dims)


def write(write: Any, round_state: bool, exact_packet: bool) -> None:
    if not isinstance(write, str):
        raise TypeError(f"write: expected a string, got {type(write).__name__}")
    if write not in WRITES:
        raise ValueError(f"write: expected one of {', '.join(WRITES)}, got {write!r}")
    if round_state and not exact_packet:
        raise ValueError("round_state: expected False with exact_packet=False, got True")


def writing(write: str, write_index: Any, ring_pos: Any, dims: dict[str, int]) -> None:
    if write == "all" and (write_index is None) == (ring_pos is None):
        got = "neither" if write_index is None else "both"
        raise ValueError(f"write_index: expected either write_index or ring_pos with write='all', got {got}")
    if write_index is None:
        return
    if write == "none" or ring_pos is not None:
        with_what = "ring_pos" if ring_pos is not None else "write='none'"
        raise ValueError(f"write_index: expected None with {with_what}, got a tensor")
    check.integral("write_index", write_index)
    if write == "final":
        check.shape("write_index", write_index, "N", dims)
    else:
        check.shape("write_index", write_index, "N columns", {"N": dims["N"]})
        columns("write_index", write_index, dims.get("M"))


def token_ranges(offsets: list[int], max_seqlen: int | None) -> list[tuple[int, int]]:
    """Return (first token, number of tokens) of every packed row; ValueError for one over max_seqlen."""
    rows = [(start, end - start) for start, end in zip(offsets[:-1], offsets[1:], strict=True)]
    longest = max((count for _, count in rows), default=0)
    if max_seqlen is not None and longest > max_seqlen:
        raise ValueError(f"max_seqlen: expected at least {longest} (the longest row), got {max_seqlen}")
    return rows


def columns(name: str, x: Tensor | None, count: int | None) -> None:
    """Raise ValueError if axis 1 of x has fewer than `count` entries, one for each token of a row."""
    if x is not None and count is not None and x.shape[1] < count:
        raise ValueError(f"{name}: expected room for {count} tokens on axis 1, got {list(x.shape)}")


def intermediate(
    intermediate: Any, intermediate_row: Any, parent: Any, v_first: bool, dims: dict[str, int]
) -> None:
    if intermediate is None:
        for name, x in (("intermediate_row", intermediate_row), ("parent", parent)):
            if x is not None:
                raise ValueError(f"{name}: expected None without intermediate, got a tensor")
        return
    check.floating("intermediate", intermediate)
    sizes = {name: dims[name] for name in ("HV", "K", "V")}
    check.shape(
        "intermediate", intermediate, "rows tokens HV V K" if v_first else "rows tokens HV K V", sizes
    )
    columns("intermediate", intermediate, dims.get("M"))
    check.writable("intermediate", intermediate)
    if intermediate_row is not None:
        index("intermediate_row", intermediate_row, "N", dims)
    if parent is not None:
        index("parent", parent, "N columns", {"N": dims["N"]})
        columns("parent", parent, dims.get("M"))


def checkpoints(p: Any, dims: dict[str, int]) -> None:
    checkpoints, every, offsets = p.checkpoints, p.checkpoint_every, p.checkpoint_offsets
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"checkpoint_every: expected an int, got {type(every).__name__}")
    if checkpoints is None:
        if offsets is not None or every:
            name, wanted, got = "checkpoint_offsets", "None", "a tensor"
            if every:
                name, wanted, got = "checkpoint_every", "0", str(every)
            raise ValueError(f"{name}: expected {wanted} without checkpoints, got {got}")
        return
    if every < CHUNK or every % CHUNK:
        raise ValueError(f"checkpoint_every: expected a positive multiple of {CHUNK}, got {every}")
    check.floating("checkpoints", checkpoints)
    check.shape("checkpoints", checkpoints, "rows HV V K" if p.state_v_first else "rows HV K V", dims)
    dtype = torch.float64 if p.q.dtype == torch.float64 else torch.float32
    if checkpoints.dtype not in (torch.float32, dtype):
        raise ValueError(f"checkpoints: expected dtype {dtype}, got {checkpoints.dtype}")
    check.writable("checkpoints", checkpoints)
    index("checkpoint_offsets", offsets, "N", dims)


def out(q: Tensor, v: Tensor, out: Any) -> None:
    if out is None:
        return
    check.floating("out", out)
    if out.shape != v.shape:
        raise ValueError(f"out: expected shape {list(v.shape)} (that of v), got {list(out.shape)}")
    check.same_dtype(q, "q", out=out)
    check.writable("out", out)


def output(v: Tensor, out: Tensor | None) -> Tensor:
    """Return `out`, or a new tensor of its shape."""
    return v.new_empty(v.shape) if out is None else out


def devices(function: str, q: Tensor, p: Declared, name: str = "q") -> None:
    """Check that all tensors of p but cu_seqlens can be operands beside q, and that none has a gradient.

    name: that of q among the arguments of the function.
    """
    given = zip(p.declaration.tensors, p.tensors(), strict=True)
    tensors = {name: q, **{other: x for other, x in given if x is not None}}
    tensors.pop("cu_seqlens", None)
    check.companions(q, name, **tensors)
    check.no_gradient(function, **tensors)


def scale(scale: Any, dims: dict[str, int]) -> float:
    if scale is None:
        return float(dims["K"] ** -0.5)
    check.number("scale", scale)
    return float(scale)
