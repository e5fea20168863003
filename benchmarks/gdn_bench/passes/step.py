"""Time the whole decode step of a layer, 16/32 heads of 128 x 128: as three functions, and as one.

Each is compared with the references of the three stages in fp64, on all rows, before it is timed. Convolution
windows and states lie in pools larger than the L2, in random order.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gdn
from gdn.backends import select
from gdn.problem.step import StepProblem, parse_step
from gdn.reference import serving
from gdn.reference.layer import causal_conv1d, rms_norm_gated
from gdn.testing import accuracy
from gdn.testing.memory import poison_memory
from gdn_bench.passes.gpu import Session, noted
from gdn_bench.problems import catalog
from gdn_bench.problems.workloads import Cost
from gdn_bench.results import rows
from gdn_bench.results.rows import Row
from gdn_bench.timing import graph

DTYPE = torch.bfloat16
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FUNCTIONS, ONE = "functions", "decode_step"
# as in every engine: q and k normalised in the kernel, states with V first
CONVENTIONS: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}
FACTOR = 2.0  # times the limits of the rule: rounding between the stages goes through a norm
Tensors = Mapping[str, Any]
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """Describe the timed layer and the numbers of rows."""

    heads: tuple[int, int] = (16, 32)
    size: int = 128
    taps: int = 4
    rows: tuple[int, ...] = catalog.BATCHES

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: those of q, k and v."""
        return (2 * self.heads[0] + self.heads[1]) * self.size


SHAPE = Shape()


def run(session: Session, shape: Shape = SHAPE) -> Iterator[Row]:
    """Yield the rows of both ways, for every number of rows, on states in fp32 and in bf16."""
    session.ceilings = session.ceilings or graph.ceilings(session.device)
    for B, dtype in ((B, dtype) for B in shape.rows for dtype in STATES):
        case = f"B={B} {dtype}"
        if not session.wants(case) or session.has("step", "gdn", f"{case} {ONE}"):
            continue
        if session.is_over:
            yield {"pass": "step", "case": case, "provider": "gdn", "skipped": "out of time"}
            continue
        yield from ({"pass": "step", **row} for row in measured(session, shape, B, dtype))
        graph.release()


def measured(session: Session, shape: Shape, B: int, dtype: str) -> list[Row]:
    """Return the rows of one number of rows: compare each way with the reference, then time them in turn."""
    device, size = session.device, STATES[dtype].itemsize
    cost = _cost(shape, B, size)
    problems = sets(shape, B, STATES[dtype], device, graph.copies(cost.bytes / 2, device))
    wanted = reference_step(problems[0])
    by_name: dict[str, Row] = {}
    prepared: dict[str, graph.Prepared] = {}
    H, HV = shape.heads
    backend = select(_problem(problems[0])).name
    for name, bind in WAYS.items():
        row = by_name[name] = {
            "case": f"B={B} {dtype} {name}", "provider": "gdn", "backend": backend, "dtype": "bfloat16",
            "state": dtype, "H": H, "HV": HV, "K": shape.size, "V": shape.size, "N": B, "T": 1,
        }  # fmt: skip
        with noted(row), torch.no_grad():
            row |= judged(bind, problems[0], wanted)
    # timing changes the states, so all comparisons come first
    for name, bind in WAYS.items():
        if by_name[name].get("ok"):
            with noted(by_name[name]), torch.no_grad():
                calls = [bind(one) for one in problems]
                moved = [problems[0][x] for x in ("conv_state", "state")]
                prepared[name] = graph.prepare(calls, device, is_eager=session.is_eager, moved=moved)
    for name, seconds in (graph.interleaved(prepared, device) if prepared else {}).items():
        by_name[name] |= rows.speed(cost, session.ceilings, seconds, prepared[name]) | {"ratio": {}}
    if FUNCTIONS in prepared:
        for row in by_name.values():
            if "ms" in row:
                row["to_functions"] = by_name[FUNCTIONS]["ms"] / row["ms"]
    return list(by_name.values())


def functions(x: Tensors) -> Run:
    """Return a call of the three public functions."""
    mixed, o = torch.empty_like(x["mixed_qkv"]), torch.empty_like(x["z"])
    names = ("num_k_heads", "head_k_dim", "head_v_dim", "read_index")
    options: dict[str, Any] = {**{name: x[name] for name in names}, **CONVENTIONS}
    gates = [x[name] for name in ("a", "b", "A_log", "dt_bias", "state")]
    taps = [x[name] for name in ("conv_state", "conv_weight", "conv_bias")]

    def call() -> Tensor:
        slots = x["read_index"]
        gdn.causal_conv1d_update(x["mixed_qkv"], *taps, activation="silu", state_index=slots, out=mixed)
        gdn.decode_packed(mixed, *gates, **options, out=o)
        return gdn.rms_norm_gated(o, x["z"], x["norm_weight"])

    return call


def one(x: Tensors) -> Run:
    """Return a call of `gdn.decode_step`."""
    out = torch.empty_like(x["z"])
    return lambda: gdn.decode_step(**x, **CONVENTIONS, out=out)


WAYS = {FUNCTIONS: functions, ONE: one}


def judged(bind: Callable[[Tensors], Run], x: Tensors, wanted: Mapping[str, Tensor]) -> Row:
    """Compare a call on copies with the reference: output, states, and windows bit by bit."""
    own = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in x.items()}
    slots = own["read_index"].long()
    with poison_memory():
        out = bind(own)()
    limits = accuracy.error_limits(DTYPE, "random")
    limit = {"o": FACTOR * limits["o"], "final_state": FACTOR * limits["final_state"], "windows": 1e-30}
    got = {"o": out, "final_state": own["state"][slots], "windows": own["conv_state"][slots]}
    errors = {
        name: accuracy.measure_error(got[name], wanted[name], limit[name], lambda: 0.0)[0] for name in got
    }
    share = max(errors[name] / limit[name] for name in got)
    return {"ok": share <= 1, "error": max(errors.values()), "errors": errors, "share_of_limit": share}


def reference_step(x: Tensors) -> dict[str, Tensor]:
    """Return output, states and windows in fp64; each stage reads its inputs rounded to their dtype."""
    slots, W = x["read_index"].long(), x["conv_weight"].shape[1]
    H, K, V, HV = x["num_k_heads"], x["head_k_dim"], x["head_v_dim"], x["a"].shape[1]
    window, new = x["conv_state"][slots], x["mixed_qkv"]
    mixed, windows = causal_conv1d(
        new[:, None], x["conv_weight"], x["conv_bias"], activation="silu", initial_state=window
    )
    assert windows.shape[2] == W - 1
    q, k, v = mixed.to(new.dtype).split([H * K, H * K, HV * V], 2)
    gates = {"a": x["a"][:, None], "b": x["b"][:, None], "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    served = serving.decode(
        q.unflatten(2, (H, K)),
        k.unflatten(2, (H, K)),
        v.unflatten(2, (HV, V)),
        x["state"][slots],
        **gates,
        **CONVENTIONS,
    )
    o = rms_norm_gated(served.o[:, 0].to(new.dtype), x["z"], x["norm_weight"])
    return {"o": o, "final_state": served.state.double(), "windows": windows}


def sets(shape: Shape, B: int, dtype: torch.dtype, device: torch.device, count: int) -> list[dict[str, Any]]:
    """Return `count` problems with inputs and slots of their own in two pools that all share."""
    (H, HV), K = shape.heads, shape.size
    made: dict[str, Any] = {"device": device, "dtype": DTYPE}
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*size, generator=generator, device=device)).to(DTYPE)

    slots = torch.randperm(B * count, generator=generator, device=device).int()
    pool = torch.empty(B * count, HV, K, K, device=device, dtype=dtype)
    for part in pool:
        part.copy_(draw(HV, K, K))
    shared = {
        "conv_state": draw(B * count, shape.channels, shape.taps - 1), "state": pool,
        "conv_weight": draw(shape.channels, shape.taps, scale=0.5), "conv_bias": None,
        "A_log": torch.zeros(HV, device=device), "dt_bias": torch.ones(HV, **made).float(),
        "norm_weight": torch.ones(K, **made), "num_k_heads": H, "head_k_dim": K, "head_v_dim": K,
    }  # fmt: skip
    return [
        {
            **shared, "mixed_qkv": draw(B, shape.channels), "a": draw(B, HV), "b": draw(B, HV),
            "z": draw(B, HV, K), "read_index": index,
        }
        for index in slots.split(B)
    ]  # fmt: skip


def _problem(x: Tensors) -> StepProblem:
    return parse_step(
        **x, **CONVENTIONS, conv_activation="silu", norm_eps=1e-6, norm_activation="silu", scale=None,
        lower_bound=None, allow_neg_eigval=False, conv_index=None, write_index=None, null_slot=None,
        out=torch.empty_like(x["z"]), backend=None, history_u=None, history_k=None, history_G=None,
        cursor=None, room=None, use_history=None, column_scale=None, remainder=None,
    )  # fmt: skip


def _cost(shape: Shape, B: int, size: int) -> Cost:
    """Return the bytes of states and windows, read and written, of inputs, gates, z, output and weights."""
    HV, K, W = shape.heads[1], shape.size, shape.taps
    window = shape.channels * 2 * (2 * (W - 1) + 1)
    return Cost(B * (2 * size * HV * K * K + window + 4 * HV + 4 * HV * K) + 2 * shape.channels * W, 0)
