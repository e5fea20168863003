"""Provide public calls on small tensors, one for every choice of another binary, function by function.

They compile without a GPU, and run on one. A row of a table is one specimen; its last column names the GPUs
that it is compiled for: all, or those that have tuned sizes.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import gdn
from gdn.backends.triton import BACKEND as TRITON
from gdn.ops.conv import convolve_and_split
from gdn.problem import Problem, parse
from gdn.problem.history import parse_history
from gdn.problem.layer import NormProblem
from gdn.problem.propagate import PropagateProblem, RunStep
from gdn.testing import Case, inputs, packed, rows
from gdn.testing.accuracy import run
from kit import api
from kit.serving import inputs as rows_of
from kit.serving import pool_of, step_of

# Every kernel but those for Hopper has a specimen for each GPU. Where it has no tcgen05, sm_100 is left out:
# the PTX is that for sm_120.
EVERYWHERE = ("cuda:80", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942")
WITHOUT_TCGEN05 = ("cuda:80", "cuda:90", "cuda:120", "hip:gfx942")
# the largest tiles. sm_80 has the MMAs and nearly all tiles of sm_120, and more shared memory; for fp32 at
# K = 256 the 64 KB of a gfx942 are too few
LARGEST = ("cuda:90", "cuda:100", "cuda:120", "hip:gfx942")
LARGEST_FP32 = LARGEST[:-1]
LARGEST_WITHOUT_TCGEN05 = ("cuda:90", "cuda:120", "hip:gfx942")
# other specimens of a kernel, which differ by more than numbers
VENDORS = ("cuda:90", "hip:gfx942")
TUNED = ("cuda:90",)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT16, INT8 = torch.int16, torch.int8


class Specimen(NamedTuple):
    make: Callable[[], Callable[[], Any]]  # tensors on the default device, and a call on them
    targets: tuple[str, ...]

    def on(self, device: str) -> Callable[[], Any]:
        """Return the call, with its tensors on a device."""
        with torch.device(device):
            return self.make()


def chunk(*x, **options):
    return gdn.chunk_gated_delta_rule(*x, backend="triton", **options)


def recurrent(q, k, v, g, beta, **options):
    return gdn.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, backend="triton", **options)


ALL = {
    "use_qk_l2norm_in_kernel": True, "raw_gate": "on", "beta": "negative", "state": "wide",
    "state_v_first": True, "is_strided": True,
}  # fmt: skip
LADDER = packed(0, 5, 64, 130)
# name -> case, dtype, targets: forward with and without saved tensors, then the backward
RULE = {
    "bf16 128": (Case(sizes=(128, 128), heads=(2, 4)), BF16, TUNED),
    "bf16 128 all packed": (Case(sizes=(128, 128), heads=(2, 4), lengths=LADDER, **ALL), BF16, EVERYWHERE),
    "bf16 60": (Case(sizes=(60, 60), raw_gate="no_bias", beta="sigmoid"), BF16, TUNED),
    "bf16 32": (Case(sizes=(32, 32), state="wide", use_qk_l2norm_in_kernel=True), BF16, TUNED),
    "bf16 128 many": (Case(sizes=(128, 128), heads=(8, 16), lengths=rows(64)._replace(B=32)), BF16, TUNED),
    "fp32 128 all": (Case(sizes=(128, 128), **ALL), FP32, VENDORS),
    "fp32 256": (Case(sizes=(256, 256), gate="absent", beta="absent"), FP32, LARGEST_FP32),
    "bf16 256 all": (Case(sizes=(256, 256), **ALL), BF16, LARGEST),
    "fp16 64/128 narrow invariant": (
        Case(sizes=(64, 128), state="narrow", has_narrow_gates=True, exact=False, batch_invariant=True),
        FP16, TUNED,
    ),
    "fp16 192/60 packed": (Case(sizes=(192, 60), lengths=LADDER, beta="sigmoid"), FP16, TUNED),
    "bf16 128 channels": (
        Case(sizes=(128, 128), heads=(2, 4), raw_gate="on", use_qk_l2norm_in_kernel=True,
             is_per_channel=True), BF16, WITHOUT_TCGEN05,
    ),
    "fp32 64 channels": (
        Case(sizes=(64, 64), lengths=LADDER, raw_gate="lower_bound", beta="sigmoid", state="wide",
             use_qk_l2norm_in_kernel=True, is_per_channel=True), FP32, TUNED,
    ),
    "bf16 128 channels many": (
        Case(sizes=(128, 128), heads=(16, 16), lengths=rows(64)._replace(B=32), raw_gate="on",
             use_qk_l2norm_in_kernel=True, is_per_channel=True), BF16, TUNED,
    ),
}  # fmt: skip
RECURRENT = {
    "bf16 128": (Case(sizes=(128, 128), heads=(2, 4)), BF16, TUNED),
    "bf16 128 all packed": (Case(sizes=(128, 128), lengths=LADDER, **ALL), BF16, WITHOUT_TCGEN05),
    "fp32 256": (Case(sizes=(256, 256), gate="absent", beta="absent", state="wide"), FP32, TUNED),
    "fp16 60": (Case(sizes=(60, 60), raw_gate="no_bias", beta="sigmoid"), FP16, TUNED),
    "bf16 128 of channels": (
        Case("bounded", sizes=(128, 128), lengths=LADDER, is_per_channel=True, **ALL), BF16, TUNED,
    ),
}  # fmt: skip


def rule(provider: Callable[..., Any], case: Case, dtype: torch.dtype) -> Callable[[], Any]:
    device = torch.get_default_device()
    with torch.device("cpu"):
        given = inputs(case, dtype, device=device)
    modes = (False, True) if provider is chunk else (False,)
    return lambda: [run(provider, given, with_backward) for with_backward in modes]


def slots(*shape: int) -> torch.Tensor:
    """Return one slot for every place."""
    return torch.arange(math.prod(shape), dtype=torch.int32).view(shape)


def protocol(name: str, B: int, T: int, pool: torch.Tensor) -> dict[str, Any]:
    """Return the arguments by which the rows of a decode find their states."""
    ring = torch.randn(B, 4, *pool.shape[1:]).to(pool.dtype)
    kept = torch.empty(B, T, *pool.shape[1:], dtype=pool.dtype)
    states, rows, table = {"state": pool}, {"read_index": slots(B)}, slots(B, T)
    intermediate = rows | states | {"write": "none", "intermediate": kept}
    return {
        "final": states,
        "index": rows | states | {"null_slot": 0},
        "P1": rows | {"state": ring, "ring_pos": slots(B), "write": "all", "round_state": True},
        "P2": {
            "state": pool, "read_index": table, "num_accepted": slots(B), "write_index": table,
            "write": "all", "null_slot": 0,
        },
        "P3": intermediate,
        "P4": intermediate | {"parent": table % 3 - 1, "intermediate_row": slots(B)},
        "P6": rows | states | {"write_index": slots(B)},
    }[name]  # fmt: skip


# name -> protocol, B, T, K, V, dtype, pool's dtype, raw gates, v first, targets
DECODE = {
    "bf16": ("index", 4, 1, 128, 128, BF16, FP32, True, True, WITHOUT_TCGEN05),
    "bf16 pool": ("final", 4, 1, 128, 128, BF16, BF16, True, True, VENDORS),
    "many rows": ("index", 256, 1, 128, 128, BF16, FP32, True, True, TUNED),
    "many rows, bf16 pool": ("index", 256, 1, 128, 128, BF16, BF16, True, True, TUNED),
    "K first": ("final", 4, 1, 128, 128, BF16, FP32, False, False, VENDORS),
    "P1": ("P1", 4, 4, 128, 128, BF16, BF16, True, True, VENDORS),
    "P2": ("P2", 4, 4, 128, 128, BF16, FP32, True, True, TUNED),
    "P3": ("P3", 4, 4, 128, 128, BF16, FP32, True, True, TUNED),
    "P4": ("P4", 4, 4, 128, 128, BF16, FP32, True, True, VENDORS),
    "P3, many rows": ("P3", 64, 4, 128, 128, BF16, FP32, True, True, TUNED),
    "P3, many rows, bf16 pool": ("P3", 64, 4, 128, 128, BF16, BF16, True, True, WITHOUT_TCGEN05),
    "P6": ("P6", 4, 1, 128, 128, BF16, FP32, False, True, TUNED),
    "fp16 60": ("index", 4, 2, 60, 60, FP16, FP16, False, True, TUNED),
    "fp32 256": ("final", 4, 1, 256, 256, FP32, FP32, False, True, VENDORS),
    "fp32 64, K first": ("P4", 4, 3, 64, 64, FP32, BF16, True, False, TUNED),
    "many rows 256, bf16 pool": ("index", 256, 1, 256, 256, BF16, BF16, True, True, TUNED),
    "many rows, int16 pool": ("index", 256, 1, 128, 128, BF16, INT16, True, True, TUNED),
    "P1, int16 pool": ("P1", 4, 4, 128, 128, BF16, INT16, True, True, TUNED),
    "fp32, K first, int16 pool": ("P6", 4, 1, 64, 64, FP32, INT16, False, False, TUNED),
}
# the same with a decay per key channel
DECODE_OF_CHANNELS = {
    "many rows, bf16 pool": ("index", 256, 1, 128, 128, BF16, BF16, True, True, VENDORS),
    "many rows 256, bf16 pool": ("index", 256, 1, 256, 256, BF16, BF16, True, True, TUNED),
    "K first": ("final", 4, 1, 128, 128, BF16, FP32, False, False, TUNED),
    "P4": ("P4", 4, 4, 128, 128, BF16, FP32, True, True, TUNED),
}


def decode(
    name: str, B: int, T: int, K: int, V: int, dtype: Any, pool_dtype: Any, raw: bool, v_first: bool,
    is_per_channel: bool = False,
) -> Callable[[], Any]:  # fmt: skip
    pool = pool_of(B * T, K=K, V=V, dtype=pool_dtype, v_first=v_first)
    x = rows_of(B, T, K=K, V=V, dtype=dtype, raw=raw, is_per_channel=is_per_channel)
    x |= protocol(name, B, T, pool)
    if raw and is_per_channel:
        # logits of a projection, and the bounded form
        x |= {"a": x["a"].to(dtype), "lower_bound": -5.0}
    if pool_dtype == INT16:
        x |= {"state": with_scales(x["state"], v_first)}
    return lambda: api.decode(**x, state_v_first=v_first, backend="triton")


def decode_in_strips(H: int, HV: int, T: int, pool_dtype: Any) -> Callable[[], Any]:
    x = rows_of(16, T, H, HV, 128, 128, BF16, raw=True)
    x |= {"state": pool_of(16, HV=HV, K=128, V=128, dtype=pool_dtype), "read_index": slots(16)}
    return lambda: api.decode(**x, state_v_first=True, backend="triton")


def with_scales(states: torch.Tensor, v_first: bool) -> gdn.Int16Pool:
    """Return a pool of integers with scales of 1."""
    shape = states.shape[:-1] if v_first else (*states.shape[:-2], states.shape[-1])
    return gdn.Int16Pool(states, torch.ones(shape))


def decode_in_chunk_form(
    B: int, T: int, D: int, dtype: Any, pool_dtype: Any, v_first: bool, has_slots: bool, write: str = "final"
) -> Callable[[], Any]:
    x = rows_of(B, T, K=D, V=D, dtype=dtype, raw=has_slots)
    x |= {"state": pool_of(B, K=D, V=D, dtype=pool_dtype, v_first=v_first)}
    x |= {"read_index": slots(B)} if has_slots else {}
    x |= {"write_index": slots(B)} if has_slots and write == "final" else {}
    return lambda: api.decode(**x, write=write, exact_packet=False, state_v_first=v_first, backend="triton")


def decode_of_packed_rows() -> Callable[[], Any]:
    x = rows_of(1, 7, K=128, V=128, dtype=BF16, raw=True)
    offsets = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    x |= {"state": pool_of(3, K=128, V=128), "cu_seqlens": offsets}
    return lambda: api.decode(**x, max_seqlen=4, backend="triton")


def decode_of_a_projection() -> Callable[[], Any]:
    x, a = torch.randn(4, 2 * 2 * 128 + 4 * 128, dtype=BF16), torch.randn(4, 4, dtype=BF16)
    rest, pool = torch.zeros(2, 4), pool_of(4, K=128, V=128)
    sizes = {"num_k_heads": 2, "head_k_dim": 128, "head_v_dim": 128}
    return lambda: api.decode_packed(x, a, a, *rest, pool, **sizes, backend="triton")


def prompts(D: int, dtype: torch.dtype, pool_dtype: torch.dtype, raw: bool, v_first: bool) -> dict[str, Any]:
    """Return the arguments of a prefill of three sequences, without those of its slots."""
    return rows_of(1, 199, K=D, V=D, dtype=dtype, raw=raw) | {
        "state": pool_of(6, K=D, V=D, dtype=pool_dtype, v_first=v_first), "state_v_first": v_first,
        "cu_seqlens": torch.tensor([0, 65, 65, 199], dtype=torch.int32), "has_initial_state": slots(3).bool(),
    }  # fmt: skip


def prefill_in_place(*arguments: Any) -> Callable[[], Any]:
    x = prompts(*arguments) | {"state_index": slots(3), "out_state_index": slots(3) + 3}
    return lambda: api.prefill(**x, backend="triton")


def with_snapshots(D: int) -> dict[str, Any]:
    """Return the arguments by which a prefill stores states inside sequences."""
    return {
        "state_index": torch.arange(3), "checkpoints": torch.empty(3, 4, D, D),
        "checkpoint_offsets": torch.arange(3), "checkpoint_every": 64,
        "snapshot_pos": slots(3), "snapshot_index": slots(3) + 3,
    }  # fmt: skip


def prefill(D: int, *arguments: Any) -> Callable[[], Any]:
    x = prompts(D, *arguments) | with_snapshots(D)
    if x["state"].dtype == INT16:
        x |= {"state": with_scales(x["state"], x["state_v_first"])}
    return lambda: api.prefill(**x, backend="triton")


def prefill_of_histories(D: int, dtype: torch.dtype, pool_dtype: torch.dtype, *layout: bool) -> Any:
    """Return a prefill that folds the histories of its slots first, and one that stores snapshots."""
    x = prompts(D, dtype, torch.float32, *layout)
    x["state"] = gdn.allocate_history_pool(
        6, num_k_heads=2, num_v_heads=4, head_k_dim=D, head_v_dim=D, places=16, state_dtype=pool_dtype,
        history_dtype=dtype, state_v_first=x["state_v_first"],
    )  # fmt: skip

    where = {"state_index": torch.arange(3), "out_state_index": slots(3) + 3}
    snapshots = with_snapshots(D)

    def call() -> None:
        api.prefill(**x, **where, backend="triton")
        api.prefill(**x, **snapshots, backend="triton")

    return call


def prefill_of_channels(D: int, *arguments: Any) -> Callable[[], Any]:
    """Return a prefill with a decay per key channel in place, and one that stores snapshots."""
    x = prompts(D, *arguments)
    x |= {"a": torch.randn(1, 199, 4, D), "dt_bias": torch.randn(4, D), "lower_bound": -5.0}
    x |= {"state_index": torch.arange(3), "cu_seqlens": x["cu_seqlens"].long()}
    snapshots = with_snapshots(D)

    def call() -> None:
        for more in ({}, snapshots):
            api.prefill(**x | more, backend="triton")

    return call


def commit(dtype: torch.dtype, has_extra: bool) -> Callable[[], Any]:
    pool, kept = torch.empty(2, 5, 2, 64, 64, dtype=dtype), torch.empty(2, 3, 4, 2, 64, 64)
    index, extra = torch.arange(2), torch.arange(2) + 2
    options = {"extra_dst_index": extra, "extra_step": index} if has_extra else {}
    return lambda: gdn.commit(pool, kept, index, index, index, **options)


def commit_to_int16(D: int, v_first: bool, has_extra: bool) -> Callable[[], Any]:
    pool = with_scales(pool_of(2, 5, K=D, V=D, dtype=INT16, v_first=v_first), v_first)
    kept = pool_of(2, 3, 4, K=D, V=D, v_first=v_first)
    index, extra = torch.arange(2), torch.arange(2) + 2
    options = {"extra_dst_index": extra, "extra_step": index} if has_extra else {}
    return lambda: gdn.commit(pool, kept, index, index, index, state_v_first=v_first, **options)


def replay(
    B: int, T: int, K: int, V: int, dtype: Any, pool_dtype: Any, kept: Any, v_first: bool, is_packed: bool,
    is_per_channel: bool = False, places: int = 20,
) -> Callable[[], Any]:  # fmt: skip
    """Return a verification and its commit."""
    lead = (1, B * T) if is_packed else (B, T)
    x = rows_of(*lead, K=K, V=V, dtype=dtype, raw=True, is_per_channel=is_per_channel)
    if is_packed:
        x |= {"cu_seqlens": torch.arange(B + 1, dtype=torch.int32), "max_seqlen": T}
    state = pool_of(1, B, K=K, V=V, dtype=pool_dtype, v_first=v_first)
    u, k = torch.randn(1, B, places, 4, V).to(kept), torch.randn(1, B, places, 2, K).to(kept)
    G, cursor, rows = torch.zeros(1, B, places, 4, dtype=torch.float64), slots(B), slots(B)
    if is_per_channel:
        G = torch.zeros(1, B, places, 4, K)
        x |= {"a": x["a"].to(dtype), "lower_bound": -5.0}
    options = {"state_v_first": v_first, "backend": "triton"}

    def call() -> None:
        api.replay_decode(**x, state=state[0], history_u=u[0], history_k=k[0], history_G=G[0],
                             cursor=cursor, read_index=rows, **options)  # fmt: skip
        api.replay_commit(state, u, k, G, cursor, rows, rows, room=T, **options)

    return call


def history(
    B: int, T: int, D: int, dtype: Any, pool_dtype: Any, places: int, v_first: bool, has_drafts: bool,
    is_per_channel: bool = False, has_remainder: bool = True,
) -> Callable[[], Any]:  # fmt: skip
    """Return a step that appends to histories, and a fold of these."""
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": D, "head_v_dim": D, "state_v_first": v_first}
    pool = gdn.allocate_history_pool(
        B, **sizes, places=places, room=T, state_dtype=pool_dtype, history_dtype=dtype,
        decay="channel" if is_per_channel else "head",
        with_remainder=has_remainder,
    )  # fmt: skip
    x = rows_of(B, T, K=D, V=D, dtype=dtype, raw=True, is_per_channel=is_per_channel)
    options, drafts, rows = {"state_v_first": v_first, "backend": "triton"}, {}, slots(B)
    if has_drafts:
        drafts["num_accepted"] = slots(B)

    def call() -> None:
        api.decode_with_history(**x, pool=pool, read_index=rows, **options, **drafts, use_history=True)
        api.fold_history(pool, rows, **options, **drafts)

    return call


def hopper_history(pool_dtype: torch.dtype, gates: str, is_normalised: bool) -> Callable[[], Any]:
    """Return a step of `hopper` that appends to histories, on slots; gates: raw, given or absent."""
    rows, D = 256, 128
    pool = gdn.allocate_history_pool(
        rows, num_k_heads=2, num_v_heads=4, head_k_dim=D, head_v_dim=D, state_dtype=pool_dtype,
        state_v_first=True,
    )  # fmt: skip
    x = rows_of(rows, 1, K=D, V=D, dtype=BF16, raw=gates == "raw")
    if gates == "absent":
        x = {name: x[name] for name in ("q", "k", "v")}
    absent = ("g", "beta", "a", "b", "A_log", "dt_bias", "scale", "lower_bound", "cu_seqlens", "max_seqlen")
    absent += ("num_accepted", "null_slot", "out")
    problem = parse_history(
        **dict.fromkeys(absent) | x | vars(pool), read_index=slots(rows), state_v_first=True,
        use_qk_l2norm_in_kernel=is_normalised, allow_neg_eigval=gates == "raw", use_history=True,
        backend="hopper",
    )  # fmt: skip

    def call() -> None:
        from gdn.backends.hopper.serving.history import plan_append
        from gdn.backends.triton.serving.history import decode_with_history

        decode_with_history(problem, plan_append)

    return call


def gate(
    dtype: torch.dtype, has_bias: bool, channels: tuple[int, ...] = (), bound: float | None = None
) -> Callable[[], Any]:
    shapes = ((2, 70, 4, *channels), (2, 70, 4), (4,))
    a, b, A_log = (torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes)
    bias = torch.zeros(4, *channels, requires_grad=True) if has_bias else None
    leaves = [x for x in (a, b, A_log, bias) if x is not None]

    def call() -> None:
        g, beta = gdn.gate(a, b, A_log, bias, lower_bound=bound, backend="triton")
        torch.autograd.grad((g, beta), leaves, (g, beta))

    return call


def norm(dtype: torch.dtype, D: int, activation: str | None, is_gated: bool) -> Callable[[], Any]:
    x, z = (torch.randn(2, 70, 4, D, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = torch.ones(D, requires_grad=True)

    def call() -> None:
        y = gdn.rms_norm_gated(x, z if is_gated else None, weight, activation=activation, backend="triton")
        torch.autograd.grad(y, (x, z, weight) if is_gated else (x, weight), y)

    return call


def zero_centred_norm(dtype: torch.dtype, D: int) -> Callable[[], Any]:
    x, weight = torch.randn(2, 3, 4, 2 * D, dtype=dtype)[..., :D], torch.ones(D, dtype=dtype)
    problem = NormProblem(x=x, z=None, weight=weight, eps=1e-6, activation=None, backend="triton")
    return lambda: TRITON.rms_norm_zero_centred(problem)


def conv(
    dtype: torch.dtype, W: int, activation: str | None, is_packed: bool, is_whole: bool
) -> Callable[[], Any]:
    """Return a convolution; is_whole adds a bias, an initial state and a final one."""
    N = 3 if is_packed else 1
    shapes = ((1, 150, 96), (96, W), (96,), (N, 96, W - 1))
    leaves = [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes[: 4 if is_whole else 2]]
    x, weight, bias, initial = (*leaves, None, None)[:4]
    offsets = torch.tensor([0, 70, 70, 150], dtype=torch.int32) if is_packed else None
    pool, index = torch.empty(5, 96, W + 2, dtype=dtype), torch.arange(N)
    options = {"activation": activation, "cu_seqlens": offsets, "backend": "triton"}

    def call() -> None:
        y, final = gdn.causal_conv1d(
            x, weight, bias, initial_state=initial, output_final_state=is_whole, **options
        )
        outputs = [y] if final is None else [y, final]
        torch.autograd.grad(outputs, leaves, [o.detach() for o in outputs])
        with torch.no_grad():
            gdn.causal_conv1d(x, weight, state=pool, state_index=index, **options)

    return call


def conv_of_parts(dtype: torch.dtype) -> Callable[[], Any]:
    """Return a convolution whose q, k and v are tensors of their own, and its backward."""
    sizes = (1024, 1024, 2048)
    x, weight = (torch.randn(s, dtype=dtype, requires_grad=True) for s in ((1, 150, 4096), (4096, 4)))

    def call() -> None:
        parts, _ = convolve_and_split(sizes, x, weight, activation="silu", backend="triton")
        torch.autograd.grad(parts, [x, weight], [part.detach().contiguous() for part in parts])

    return call


def conv_update(dtype: torch.dtype, T: int, place: str | None) -> Callable[[], Any]:
    x, pool, weight = (
        torch.randn(3, T, 96, dtype=dtype),
        torch.empty(5, 96, 8, dtype=dtype),
        torch.randn(96, 4),
    )
    where = {} if place is None else {place: slots(3)}
    arguments, where["state_index"] = (x, pool, weight.to(dtype), torch.zeros(96)), torch.arange(3)
    return lambda: gdn.causal_conv1d_update(*arguments, activation="silu", **where, backend="triton")


def whole_step(dtype: Any, pool_dtype: Any, sizes: tuple[int, int], v_first: bool) -> Callable[[], Any]:
    """Return a layer's step, with biases and slots."""
    x, options = step_of(4, 2, 4, *sizes, 4, dtype, pool_dtype, v_first=v_first)
    return lambda: api.decode_step(**x | options, backend="triton")


def stages(dtype: torch.dtype, K: int, V: int, is_packed: bool) -> Callable[[], Any]:
    """Run each stage on the results of the previous one, then its adjoint."""
    q, k, v = torch.randn(1, 150, 2, K), torch.randn(1, 150, 2, K) / K**0.5, torch.randn(1, 150, 4, V)
    q, k, v, S = (x.to(dtype) for x in (q, k, v, torch.randn(3 if is_packed else 1, 4, K, V)))
    g, beta, bias = -torch.rand(1, 150, 4), torch.rand(1, 150, 4), torch.zeros(4)
    options = {"cu_seqlens": torch.tensor([0, 70, 70, 150]) if is_packed else None, "backend": "triton"}
    of = gdn.stages

    def call() -> None:
        G = of.chunk_cumsum(g, **options)
        of.chunk_cumsum_bwd(g, G, **options)
        of.chunk_gate_cumsum_bwd(g, bias, bias, of.chunk_gate_cumsum(g, bias, bias, **options), **options)
        A = of.chunk_kkt(k, beta, G, **options)
        of.chunk_kkt_bwd(k, beta, G, A, **options)
        A_inv = of.solve_tril(A, **options)
        of.solve_tril_bwd(A_inv, A_inv, **options)
        w, u = of.wy_transform(k, v, beta, G, A_inv, **options)
        of.wy_transform_bwd(k, v, beta, G, A_inv, w, u, **options)
        S_in, v_new, final = of.chunk_state(k, w, u, G, S, **options)
        of.chunk_state_bwd(k, w, u, G, S, S_in, v_new, S_in, v_new, final, **options)
        o = of.chunk_output(q, k, v_new, G, S_in, **options)
        of.chunk_output_bwd(q, k, v_new, G, S_in, o, **options)

    return call


def operator_on_packed_rows() -> Callable[[], Any]:
    """Return the forward as a compiler calls it, with all saved tensors."""
    case = RULE["bf16 128 all packed"][0]
    given = inputs(case, BF16, device=torch.get_default_device())
    problem = parse(**given.tensors, **given.options, backend="triton")
    return lambda: torch.ops.gdn.chunk_forward(*problem.arguments(), True)


def forward(case: Case, dtype: torch.dtype) -> Callable[[], Any]:
    """Return a forward alone, of the rule as dispatched."""
    given = inputs(case, dtype, device=torch.get_default_device())
    return lambda: run(chunk, given, False)


def hopper_forward(
    case: Case,
    segment: int | None = None,
    kept: torch.dtype | None = None,
    consumers: tuple[int, ...] = (1, 2),
) -> Callable[[], Any]:
    """Return the Hopper forward with each number of consumer warpgroups.

    `segment` is the number of chunks in a segment (None: sequences are not cut), `kept` the dtype of stored
    states. At K = V = 128 every forward has the fast path.
    """
    given = inputs(case, BF16, device=torch.get_default_device())
    problem = parse(**given.tensors, **given.options, backend="hopper")

    def call() -> None:
        from gdn.backends.hopper import cost, rule
        from gdn.backends.triton.launch import PlanCache

        # the plan cache's key has no cuts and no number of warpgroups
        plans = patch.object(rule, "_forwards", PlanCache())
        cuts = None if segment is None else cost.equal_cuts(segment)
        with patch.object(cost, "cuts_of", lambda problem, has_pool=False: cuts), plans:
            for count in consumers:
                with patch.object(cost, "consumers_of", lambda problem, cuts, count=count: count):
                    rule.forward(rule.to_kernel_layout(problem), kept)

    return call


def hopper_of_short_sequences(case: Case) -> Callable[[], Any]:
    """Return the Hopper forward of many short sequences, on the fast path at K = V = 128."""
    given = inputs(case, BF16, device=torch.get_default_device())
    problem = parse(**given.tensors, **given.options, backend="hopper")

    def call() -> None:
        from gdn.backends.hopper import cost, rule

        with patch.object(cost, "has_short_items", lambda problem: True):
            rule.forward(rule.to_kernel_layout(problem), None)

    return call


def hopper_on_a_pool(case: Case, dtype: Any = FP32, is_short: bool = False) -> Callable[[], Any]:
    """Return the Hopper forward on the fast path that reads and updates slots of a pool."""
    given = inputs(case, BF16, device=torch.get_default_device())
    problem = parse(**given.tensors, **given.options, backend="hopper")
    pool = pool_of(6, HV=problem.HV, K=problem.K, V=problem.V, dtype=dtype, v_first=problem.state_v_first)
    slot, mask = slots(problem.N), slots(problem.N).bool()

    def call() -> None:
        from gdn.backends.hopper import cost, rule
        from gdn.backends.triton.rule.pool import StatePool

        out = torch.empty_like(problem.v, memory_format=torch.contiguous_format)
        with (
            patch.object(cost, "consumers_of", lambda problem, cuts: 2),
            patch.object(cost, "has_short_items", lambda problem: is_short),
        ):
            on_pool = replace(problem, initial_state=pool, output_final_state=False)
            rule.forward(
                rule.to_kernel_layout(on_pool), None, StatePool(pool, slot, None, mask, True, 1, out)
            )

    return call


def hopper_between_ranks(case: Case) -> Callable[[], Any]:
    """Return Hopper forwards of ranks: every row receives a state and passes one on, or only the latter."""
    given = inputs(case, BF16, device=torch.get_default_device())
    problem = parse(**given.tensors, **given.options, backend="hopper")

    def call() -> None:
        from gdn.backends import Borders
        from gdn.backends.hopper import borders

        rows = tuple(range(problem.N))
        # of two ranks no row is both: N is exchanged alone
        borders.forward_begin(problem, Borders((), rows, with_maps=False), True)
        _, finish = borders.forward_begin(problem, Borders(rows, rows), True)
        finish(problem.initial_state)

    return call


def zero_saved(problem: Problem, backend: str = "triton") -> Any:
    """Return saved tensors of a backend without its forward, whose kernels other specimens launch."""
    from gdn.backends import Saved
    from gdn.backends.select import load

    shapes = load(backend).saves(problem)
    return Saved(
        *(None if x is None else torch.zeros(x[0], dtype=x[1], device=problem.device) for x in shapes)
    )


def between_ranks(case: Case) -> Callable[[], Any]:
    """Return the forward of a rank of `triton`: every row receives a state and passes one on."""
    given = inputs(case, BF16, device=torch.get_default_device())
    problem = parse(**given.tensors, **given.options, backend="triton")

    def call() -> None:
        from gdn.backends import Borders
        from gdn.backends.triton.rule import borders

        rows = tuple(range(problem.N))
        borders.forward_begin(problem, Borders(rows, rows), True)

    return call


def backward_state_pass(case: Case, dtype: torch.dtype) -> Callable[[], Any]:
    """Return the state pass of a backward alone, on tensors of zeros."""
    given = inputs(case, dtype, device=torch.get_default_device())
    problem = parse(**given.tensors, **given.options, backend="triton")

    def call() -> None:
        from gdn.backends.backend import Saved
        from gdn.backends.triton.launch import allocate
        from gdn.backends.triton.rule import describe, run

        p = describe.to_kernel_layout(problem)
        shapes = describe.saves(p)
        saved = Saved(
            *[None if x is None else torch.zeros(x[0], dtype=x[1], device=p.device) for x in shapes]
        )
        plan = run.backward_plan(p, saved, given.do, given.dfinal_state)
        tensors = (*describe.tensors_of(p), *saved, given.do, given.dfinal_state)
        plan.run_state([*tensors, *allocate(p.device, plan.specs)])

    return call


def states_between_ranks(K: int, V: int, of_groups: bool) -> Callable[[], Any]:
    """Return folds of states and of gradients of states; of_groups: also one of groups of runs."""
    steps = (RunStep(-1, 1, 1), RunStep(0, -1, -1))
    transfers = torch.empty(2, 1, 1, 2, K, V + K)
    N, M = transfers[..., :V], transfers[..., V:]
    C, maps = torch.empty(2, 1, 1, 2, K, V), torch.empty(2, 1, 1, 2, K, K)
    problems = [
        PropagateProblem(torch.empty_like(C), N, M, None, steps),
        PropagateProblem(torch.empty_like(C), C, maps, None, steps, True),
    ]
    if of_groups:
        problems.append(PropagateProblem(torch.empty_like(transfers), N, M, transfers[0, 0], steps))

    def call() -> None:
        from gdn.backends.triton.rule.propagate import propagate_states

        for problem in problems:
            propagate_states(problem)

    return call


def hopper_backward(case: Case, has_scan: bool = True) -> Callable[[], Any]:
    """Make the backward of `hopper`, by CTAs of one consumer and of two, or on Triton's state pass."""
    given = inputs(case, BF16, device=torch.get_default_device())
    problem = parse(**given.tensors, **given.options, backend="hopper")

    def call() -> None:
        from gdn.backends.hopper.backward import plan

        saved = zero_saved(problem)
        scan = patch.object(plan, "HAS_SCAN", has_scan)
        for consumers in range(1, problem.V // 64 + 1):
            with scan, patch.object(plan, "consumers_of", lambda problem, consumers=consumers: consumers):
                plan.chunk_backward(problem, saved, given.do, given.dfinal_state)

    return call


def hopper_backward_of_few_heads(case: Case, forward: str = "hopper") -> Callable[[], Any]:
    """Make the reverse scan in segments after a backend's forward, by CTAs of one consumer and of two."""
    given = inputs(case, BF16, device=torch.get_default_device())
    problem = parse(**given.tensors, **given.options, backend="hopper")

    def call() -> None:
        from gdn.backends.hopper.backward import plan
        from gdn.backends.hopper.backward.cost import Segmentation
        from gdn.backends.hopper.cost import Cut

        saved = zero_saved(problem, forward)
        cut = Cut(1, 9, 1)
        for consumers in range(1, problem.V // 64 + 1):
            schedule = consumers, Segmentation(cut, consumers, consumers)
            with patch.object(plan, "schedule_of", lambda p, found=schedule: found):
                plan.chunk_backward(problem, saved, given.do, given.dfinal_state)

    return call


def hopper_backward_in_slabs(case: Case) -> Callable[[], Any]:
    """Make the backward of `hopper` in passes of two chunks."""
    given = inputs(case, BF16, device=torch.get_default_device())
    problem = parse(**given.tensors, **given.options, backend="hopper")

    def call() -> None:
        from gdn.backends.hopper.backward import plan
        from gdn.backends.triton.rule import run

        saved = run.chunk_forward(problem, True)[2]
        with patch.object(plan, "slab_of", lambda p: 2), patch.object(plan, "consumers_of", lambda p: 2):
            plan.chunk_backward(problem, saved, given.do, given.dfinal_state)

    return call


# name -> function, arguments, targets
OTHERS = {
    "bounded channels": (
        forward,
        (Case(sizes=(100, 128), lengths=LADDER, raw_gate="lower_bound", is_per_channel=True), FP16),
        TUNED,
    ),
    "hopper": (hopper_forward, (Case(sizes=(128, 128), heads=(2, 4)),), TUNED),
    "hopper all packed, with gates": (
        hopper_forward,
        (Case(sizes=(128, 128), heads=(2, 4), lengths=LADDER, batch_invariant=True, **ALL), None, None, (2,)),
        TUNED,
    ),
    "hopper that saves": (hopper_forward, (Case(sizes=(128, 128), heads=(2, 4)), None, BF16), TUNED),
    "hopper that saves all packed": (
        hopper_forward,
        (Case(sizes=(128, 128), heads=(2, 4), lengths=LADDER, **ALL), None, BF16, (2,)),
        TUNED,
    ),
    "hopper in a prefill": (
        hopper_forward,
        (Case(sizes=(128, 128), heads=(2, 4), lengths=LADDER, **ALL), None, FP32, (2,)),
        TUNED,
    ),
    "hopper in segments": (hopper_forward, (Case(sizes=(128, 128), heads=(2, 4)), 1), TUNED),
    "hopper in segments of many heads": (hopper_forward, (Case(sizes=(128, 128), heads=(2, 32)), 1), TUNED),
    "hopper in segments all packed": (
        hopper_forward,
        (Case(sizes=(128, 128), heads=(2, 4), lengths=LADDER, **ALL), 1, None, (2,)),
        TUNED,
    ),
    "hopper 64": (hopper_forward, (Case(sizes=(64, 64), heads=(2, 4)),), TUNED),
    "hopper 64 in a prefill": (
        hopper_forward,
        (Case(sizes=(64, 64), heads=(2, 4), lengths=LADDER, **ALL), None, FP32),
        TUNED,
    ),
    "hopper 64 in segments": (
        hopper_forward,
        (Case(sizes=(64, 64), heads=(2, 4), state="wide"), 1, FP32),
        TUNED,
    ),
    "hopper on a pool": (
        hopper_on_a_pool,
        (Case(sizes=(128, 128), heads=(2, 4), lengths=LADDER, **ALL),),
        TUNED,
    ),
    "hopper of short sequences": (
        hopper_of_short_sequences,
        (Case(sizes=(128, 128), heads=(2, 4), state="wide"),),
        TUNED,
    ),
    "hopper of short sequences without initial states": (
        hopper_of_short_sequences,
        (Case(sizes=(128, 128), heads=(2, 4), state_v_first=True),),
        TUNED,
    ),
    "hopper 64 of short sequences": (
        hopper_of_short_sequences,
        (Case(sizes=(64, 64), heads=(2, 4), state="wide", state_v_first=True),),
        TUNED,
    ),
    "hopper of short sequences on a pool": (
        hopper_on_a_pool,
        (Case(sizes=(128, 128), heads=(2, 4), lengths=LADDER, **ALL), FP32, True),
        TUNED,
    ),
    "hopper of short sequences on a pool in bf16, keys first": (
        hopper_on_a_pool,
        (
            Case(sizes=(128, 128), heads=(2, 4), lengths=LADDER, **(ALL | {"state_v_first": False})),
            BF16,
            True,
        ),
        TUNED,
    ),
    "hopper between ranks": (
        hopper_between_ranks,
        (Case(sizes=(128, 128), heads=(2, 4), state="wide"),),
        TUNED,
    ),
    "hopper 64 between ranks": (
        hopper_between_ranks,
        (Case(sizes=(64, 64), heads=(2, 4), state="wide"),),
        TUNED,
    ),
    "between ranks, channels": (
        between_ranks,
        (Case(sizes=(128, 128), heads=(2, 4), use_qk_l2norm_in_kernel=True, is_per_channel=True),),
        TUNED,
    ),
    "state pass of a backward, 256 channels": (
        backward_state_pass,
        (Case(sizes=(256, 256), is_per_channel=True, state="wide"), BF16),
        TUNED,
    ),
    "states between ranks 128": (states_between_ranks, (128, 128, False), TUNED),
    "states between ranks 60": (states_between_ranks, (60, 44, True), TUNED),
    "hopper backward all packed": (
        hopper_backward,
        (Case(sizes=(128, 128), heads=(2, 4), lengths=LADDER, **ALL),),
        TUNED,
    ),
    "hopper backward of few heads": (
        hopper_backward_of_few_heads,
        (Case(sizes=(128, 128), heads=(2, 4), state="wide", lengths=rows(257)),),
        TUNED,
    ),
    "hopper 64 backward": (
        hopper_backward_of_few_heads,
        (Case(sizes=(64, 64), heads=(2, 4), lengths=LADDER, **ALL),),
        TUNED,
    ),
    "hopper 64 backward after triton": (
        hopper_backward_of_few_heads,
        (Case(sizes=(64, 64), heads=(2, 4), lengths=LADDER, **ALL), "triton"),
        TUNED,
    ),
    "hopper backward in slabs": (
        hopper_backward_in_slabs,
        (Case(sizes=(128, 128), heads=(2, 4), state="wide", lengths=rows(257)),),
        TUNED,
    ),
    "hopper backward on Triton's state pass": (
        hopper_backward,
        (Case(sizes=(128, 128), heads=(2, 4), lengths=LADDER, **ALL), False),
        TUNED,
    ),
    "operator on packed rows": (operator_on_packed_rows, (), WITHOUT_TCGEN05),
    "decode in strips": (decode_in_strips, (8, 32, 4, FP32), EVERYWHERE),
    "decode in strips, bf16 pool": (decode_in_strips, (8, 64, 4, BF16), EVERYWHERE),
    "decode in strips, 16 tokens": (decode_in_strips, (8, 64, 16, BF16), TUNED),
    "decode in strips, 16 tokens, fp32 pool": (decode_in_strips, (8, 32, 16, FP32), TUNED),
    "decode in one strip": (decode_in_strips, (8, 16, 4, FP32), TUNED),
    "decode in one strip, bf16 pool": (decode_in_strips, (8, 16, 4, BF16), TUNED),
    "decode in one strip of 8 columns": (decode_in_strips, (4, 8, 4, BF16), TUNED),
    "decode packed rows": (decode_of_packed_rows, (), VENDORS),
    "decode a projection": (decode_of_a_projection, (), TUNED),
    "chunk form bf16": (decode_in_chunk_form, (4, 6, 128, BF16, FP32, True, True), WITHOUT_TCGEN05),
    "chunk form, many rows": (decode_in_chunk_form, (80, 16, 128, BF16, BF16, True, True), TUNED),
    "chunk form fp32 256, K first": (
        decode_in_chunk_form,
        (4, 8, 256, FP32, FP32, False, False),
        LARGEST_WITHOUT_TCGEN05,
    ),
    "chunk form, bf16 pool": (decode_in_chunk_form, (4, 4, 128, BF16, BF16, True, True), WITHOUT_TCGEN05),
    "chunk form, two warps": (decode_in_chunk_form, (80, 4, 128, BF16, BF16, True, True), TUNED),
    "chunk form, two warps, no write": (
        decode_in_chunk_form,
        (80, 4, 128, BF16, BF16, True, True, "none"),
        WITHOUT_TCGEN05,
    ),
    "chunk form in strips": (decode_in_chunk_form, (200, 4, 128, BF16, BF16, True, True), TUNED),
    "chunk form, 16 tokens, no write": (
        decode_in_chunk_form,
        (16, 16, 128, BF16, BF16, True, True, "none"),
        TUNED,
    ),
    "chunk form fp16 60": (decode_in_chunk_form, (4, 5, 60, FP16, FP16, True, True), TUNED),
    "prefill bf16": (prefill, (128, BF16, FP32, True, True), TUNED),
    "prefill fp32": (prefill, (64, FP32, BF16, False, False), TUNED),
    "prefill int16 pool": (prefill, (128, BF16, INT16, True, True), TUNED),
    "prefill int8": (prefill_of_histories, (128, BF16, INT8, True, True), WITHOUT_TCGEN05),
    "prefill int8, K first": (prefill_of_histories, (64, BF16, INT8, False, False), TUNED),
    "prefill of histories in fp32": (prefill_of_histories, (64, FP32, FP32, False, True), TUNED),
    "prefill in place": (prefill_in_place, (128, BF16, FP32, True, True), TUNED),
    "prefill of channels": (prefill_of_channels, (64, FP32, FP32, True, False), TUNED),
    "stages fp32": (stages, (FP32, 128, 128, False), EVERYWHERE),
    "stages bf16 packed": (stages, (BF16, 64, 60, True), TUNED),
    "commit": (commit, (FP32, False), WITHOUT_TCGEN05),
    "replay bf16": (replay, (3, 4, 128, 128, BF16, FP32, BF16, True, False), WITHOUT_TCGEN05),
    "replay bf16 pool": (replay, (3, 16, 128, 128, BF16, BF16, BF16, True, True), TUNED),
    "replay many rows": (replay, (80, 4, 128, 128, BF16, FP32, BF16, True, False), TUNED),
    "replay few tokens, bf16 pool": (
        replay,
        (3, 4, 128, 128, BF16, BF16, BF16, True, False),
        WITHOUT_TCGEN05,
    ),
    "replay two warps, short history": (
        replay,
        (80, 4, 128, 128, BF16, BF16, BF16, True, False, False, 16),
        WITHOUT_TCGEN05,
    ),
    "replay two warps": (replay, (80, 4, 128, 128, BF16, BF16, BF16, True, False), TUNED),
    "replay in strips": (replay, (200, 4, 128, 128, BF16, BF16, BF16, True, False), TUNED),
    "replay one token": (replay, (3, 1, 128, 128, BF16, FP32, BF16, True, False), TUNED),
    "replay fp32 256, K first": (
        replay,
        (3, 8, 256, 256, FP32, FP32, FP32, False, False),
        LARGEST_WITHOUT_TCGEN05,
    ),
    "history": (history, (256, 1, 128, BF16, FP32, 16, True, False), TUNED),
    "history bf16": (history, (256, 1, 128, BF16, BF16, 16, True, False), TUNED),
    "history 64": (history, (256, 1, 64, BF16, BF16, 16, True, False), TUNED),
    "history int16": (history, (256, 1, 128, BF16, INT16, 16, True, False), TUNED),
    "history int8": (history, (256, 1, 128, BF16, INT8, 16, True, False), TUNED),
    "history int8 alone": (history, (256, 1, 128, BF16, INT8, 16, True, False, False, False), TUNED),
    "history int8 64": (history, (256, 1, 64, BF16, INT8, 16, True, False), WITHOUT_TCGEN05),
    "history int8 of drafts, K first": (history, (3, 4, 64, BF16, INT8, 20, False, True), TUNED),
    "hopper history": (hopper_history, (FP32, "raw", True), TUNED),
    "hopper history bf16": (hopper_history, (BF16, "raw", True), TUNED),
    "hopper history, given gates": (hopper_history, (FP32, "given", False), TUNED),
    "hopper history bf16, given gates": (hopper_history, (BF16, "given", False), TUNED),
    "hopper history, no gates": (hopper_history, (FP32, "absent", True), TUNED),
    "hopper history bf16, no gates": (hopper_history, (BF16, "absent", False), TUNED),
    "history of channels": (history, (80, 1, 128, BF16, FP32, 16, True, False, True), TUNED),
    "history of channels, int8": (history, (3, 4, 64, BF16, INT8, 20, False, True, True), TUNED),
    "replay of channels": (replay, (80, 4, 128, 128, BF16, FP32, BF16, True, False, True), TUNED),
    "replay fp16 60": (replay, (3, 4, 60, 60, FP16, FP16, FP32, True, False), TUNED),
    "commit to two places": (commit, (BF16, True), TUNED),
    "commit to int16": (commit_to_int16, (128, True, True), WITHOUT_TCGEN05),
    "commit to int16, K first": (commit_to_int16, (64, False, False), TUNED),
    "gate fp32": (gate, (FP32, True), WITHOUT_TCGEN05),
    "gate bf16": (gate, (BF16, False), TUNED),
    "gate of channels": (gate, (BF16, True, (128,), -5.0), TUNED),
    "norm bf16": (norm, (BF16, 128, "silu", True), WITHOUT_TCGEN05),
    "norm fp32": (norm, (FP32, 60, "sigmoid", True), TUNED),
    "norm fp16": (norm, (FP16, 256, None, False), TUNED),
    "conv bf16": (conv, (BF16, 4, "silu", False, False), VENDORS),
    "conv fp32": (conv, (FP32, 3, None, True, True), WITHOUT_TCGEN05),
    "zero-centred norm bf16": (zero_centred_norm, (BF16, 2048), WITHOUT_TCGEN05),
    "zero-centred norm fp32": (zero_centred_norm, (FP32, 7168), TUNED),
    "zero-centred norm fp16 of heads": (zero_centred_norm, (FP16, 256), TUNED),
    "conv bf16 of parts": (conv_of_parts, (BF16,), TUNED),
    "step": (whole_step, (BF16, FP32, (128, 128), True), VENDORS),
    "conv update": (conv_update, (BF16, 1, None), WITHOUT_TCGEN05),
    "conv update on a ring": (conv_update, (FP32, 4, "ring_pos"), VENDORS),
    "conv update of a window": (conv_update, (BF16, 4, "num_accepted"), TUNED),
}


def _table() -> dict[str, Specimen]:
    table = {}
    for label, provider, lines in (("chunk", chunk, RULE), ("recurrent", recurrent, RECURRENT)):
        for name, (case, dtype, targets) in lines.items():
            table[f"{label} {name}"] = Specimen(lambda a=(provider, case, dtype): rule(*a), targets)
    for name, (*arguments, targets) in DECODE.items():
        table[f"decode {name}"] = Specimen(lambda a=tuple(arguments): decode(*a), targets)
    for name, (*arguments, targets) in DECODE_OF_CHANNELS.items():
        table[f"decode of channels {name}"] = Specimen(lambda a=(*arguments, True): decode(*a), targets)
    for name, (function, arguments, targets) in OTHERS.items():
        table[name] = Specimen(lambda f=function, a=arguments: f(*a), targets)
    return table


SPECIMENS = _table()
