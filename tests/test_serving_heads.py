"""Test that a serving function on a slice of heads has the bits of the slice of the whole.

An engine with tensor parallelism over R ranks gives each rank H/R key heads with their value heads: rows
q | k | v of these heads, and a pool [slots, HV/R, V, K].
"""

from typing import Any

import pytest
import torch
from kit import api
from kit.serving import inputs, pool_of, same_bits, step_of
from torch import Tensor

import gdn
from gdn.reference.integers import round_columns

H, HV, K, V, W = 8, 16, 16, 24, 4
# 8 rows of 2 heads are 16 elements, a vector of AVX-512: PyTorch gives elements of a shorter one other bits
B, T, SLOTS, PLACES = 8, 4, 9, 8
SIZES = {"H": H, "HV": HV, "K": K, "V": V}
BF16, F32 = torch.bfloat16, torch.float32

# tensor -> axis of its heads, and the heads of the whole; 0: q | k | v side by side. Others are not split
AXES = {
    "q": (-2, H), "k": (-2, H), "v": (-2, HV), "z": (-2, HV), "g": (2, HV), "beta": (-1, HV), "a": (-1, HV),
    "b": (-1, HV), "A_log": (0, HV), "dt_bias": (0, HV), "state": (-3, HV), "intermediate": (-3, HV),
    "dst": (-3, HV), "src": (-3, HV), "history_u": (-2, HV), "history_k": (-2, H),
    "history_G": (-1, HV), "column_scale": (-2, HV), "mixed_qkv": (-1, 0), "conv_state": (-2, 0),
    "conv_weight": (0, 0), "conv_bias": (0, 0), "o": (-2, HV), "new_state": (-3, HV),
}  # fmt: skip


def take(name: str, x: Any, rank: int, num_ranks: int) -> Any:
    """Return the part of a tensor that a rank has."""
    if name == "num_k_heads":
        return x // num_ranks
    if not isinstance(x, Tensor) or name not in AXES:
        return x
    axis, heads = AXES[name]
    if heads:
        return x.narrow(axis, rank * heads // num_ranks, heads // num_ranks)
    parts = x.split([H * K, H * K, HV * V], axis)
    return torch.cat([part.chunk(num_ranks, axis)[rank] for part in parts], axis)


def packed(x: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of decode_packed, from those of decode with raw gates."""
    rows = torch.cat([x.pop(name).flatten(2) for name in ("q", "k", "v")], -1)
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    return x | {"mixed_qkv": rows[:, 0], "a": x["a"][:, 0], "b": x["b"][:, 0]} | sizes


def history(*lead: int) -> dict[str, Tensor]:
    size = (*lead, SLOTS, PLACES)
    return {
        "history_u": torch.randn(*size, HV, V),
        "history_k": torch.randn(*size, H, K),
        "history_G": -torch.rand(*size, HV, dtype=torch.float64).cumsum(-2),
        "cursor": torch.arange(SLOTS) % (PLACES - T),
    }


def arguments(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a call on all heads."""
    slots = torch.tensor([3, 0, 4, 8, 1, 7, 2, 5])
    x = inputs(B, T, **SIZES, dtype=dtype, raw=True)
    pool = {"state": pool_of(SLOTS, HV=HV, K=K, V=V), "read_index": slots}
    if name == "decode":
        return x | pool | {"write": "none", "intermediate": pool_of(B, T, HV=HV, K=K, V=V)}
    if name == "decode of int16":
        stored, scale = round_columns(pool["state"].mT.double())
        return x | pool | {"state": stored.mT.contiguous(), "column_scale": scale}
    if name == "decode per channel":
        return inputs(B, T, **SIZES, dtype=dtype, is_per_channel=True) | pool
    if name == "decode_with_history":
        kept, zeros = history(), torch.zeros(SLOTS)
        # 0 to 7 places in use: a slot with 7 is folded
        kept["cursor"] = torch.stack([zeros, torch.arange(SLOTS) % PLACES, zeros], -1).int()
        return inputs(B, 1, **SIZES, dtype=dtype, raw=True) | pool | kept
    if name == "decode in chunk form":
        return inputs(B, 6, **SIZES, dtype=dtype, raw=True) | pool | {"exact_packet": False}
    if name == "decode_functional":
        return x | {"state": pool_of(B, HV=HV, K=K, V=V)}
    if name == "decode_packed":
        return packed(inputs(B, 1, **SIZES, dtype=dtype, raw=True)) | pool
    if name == "decode_step":
        tensors, options = step_of(B, H, HV, K, V, W, dtype=dtype, slots=SLOTS)
        return tensors | options
    if name == "prefill":
        x = inputs(1, 150, **SIZES, dtype=dtype)
        offsets = torch.tensor([0, 10, 10, 80, 81, 83, 90, 140, 150])
        # as for the bits of a batch: without it, the number of states decides which kernels run on a GPU
        invariant = {"batch_invariant": True}
        return x | {"state": pool["state"], "cu_seqlens": offsets, "state_index": slots} | invariant
    if name == "replay_decode":
        return x | pool | history()
    if name == "replay_commit":
        states = pool_of(2, SLOTS, HV=HV, K=K, V=V)
        return {"state": states, **history(2), "index": slots, "accepted": slots % 5, "room": T}
    rows = {"dst_index": slots, "src_row": torch.arange(B), "step": slots % T}
    return {"dst": pool_of(2, SLOTS, HV=HV, K=K, V=V), "src": pool_of(2, B, T, HV=HV, K=K, V=V)} | rows


def decode_int16(state: Tensor, column_scale: Tensor, **x: Any) -> Tensor:
    return api.decode(state=gdn.Int16Pool(state, column_scale), **x)


def decode_with_history(
    state: Tensor, history_u: Tensor, history_k: Tensor, history_G: Tensor, cursor: Tensor, **x: Any
) -> Tensor:
    pool = gdn.HistoryPool(state, history_u, history_k, history_G, cursor)
    return api.decode_with_history(pool=pool, use_history=True, **x)


FUNCTIONS = {
    "decode of int16": decode_int16, "decode per channel": api.decode,
    "decode_with_history": decode_with_history,
    "decode": api.decode, "decode in chunk form": api.decode, "decode_functional": api.decode_functional,
    "decode_packed": api.decode_packed, "decode_step": api.decode_step, "prefill": api.prefill,
    "replay_decode": api.replay_decode, "replay_commit": api.replay_commit, "commit": gdn.commit,
}  # fmt: skip


def run(name: str, x: dict[str, Any], device: str) -> dict[str, Tensor]:
    """Return the tensors of a call after it, with its results."""
    # contiguous: PyTorch's CPU loops give strided elements other bits than vectors of them
    x = {key: y.contiguous().to(device, copy=True) if isinstance(y, Tensor) else y for key, y in x.items()}
    result = FUNCTIONS[name](**x)
    names = ("o", "new_state")
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    written = x | dict(zip(names, results, strict=False))
    return {key: y for key, y in written.items() if isinstance(y, Tensor)}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_slice_of_heads_has_the_bits_of_the_whole(backend, device, name, dtype, monkeypatch):
    monkeypatch.setenv("GDN_BACKEND", backend)
    x = arguments(name, dtype)
    whole = run(name, x, device)
    for num_ranks in (2, 4, 8):
        for rank in (0, num_ranks - 1):
            part = run(name, {key: take(key, y, rank, num_ranks) for key, y in x.items()}, device)
            for key, y in whole.items():
                want = take(key, y, rank, num_ranks)
                assert same_bits(part[key], want), f"{key} of rank {rank} of {num_ranks}"
                if key in ("o", "new_state") and rank > 0:
                    assert not same_bits(take(key, y, 0, num_ranks), want), "ranks have different heads"
