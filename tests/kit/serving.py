"""Provide inputs for the serving tests, and compare what a call wrote with what it should have written."""

from contextlib import contextmanager

import torch

B, T, SLOTS, R = 5, 3, 9, 4  # rows, tokens, slots and ring entries of the calls of `protocols`
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2.5e-3, torch.bfloat16: 5e-3}


def inputs(B, T, H=2, HV=4, K=16, V=24, dtype=torch.float32, raw=False, is_per_channel=False):
    """Return q, k, v and gates of a call, by name."""
    decay = (HV, K) if is_per_channel else (HV,)
    x = {
        "q": torch.randn(B, T, H, K, dtype=dtype),
        "k": torch.randn(B, T, H, K, dtype=dtype),
        "v": torch.randn(B, T, HV, V, dtype=dtype),
    }
    if not raw:
        return x | {
            "g": torch.nn.functional.logsigmoid(torch.randn(B, T, *decay)) / 16,
            "beta": torch.rand(B, T, HV),
        }
    gates = {"a": torch.randn(B, T, *decay), "b": torch.randn(B, T, HV)}
    return x | gates | {"A_log": torch.randn(HV), "dt_bias": torch.randn(decay)}


@contextmanager
def nothing_waits():
    """Raise for every operation that waits for the current GPU or reads from it."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def pool_of(*lead, HV=4, K=16, V=24, dtype=torch.float32, v_first=True):
    """Return random states [*lead, HV, V, K], or with K first."""
    return torch.randn(*lead, HV, *((V, K) if v_first else (K, V))).to(dtype)


def step_of(
    B, H, HV, K, V, W, dtype=torch.float32, pool=torch.float32, *, slots=9, L=None, v_first=True,
    is_gated=True, conv_dtype=None, is_per_channel=False,
):  # fmt: skip
    """Return the tensors of a layer's whole step by name, and its options.

    Rows of the projection and slots are strided. With is_gated the step has biases, z and a norm, on some
    slots.
    """
    D, L = 2 * H * K + HV * V, W - 1 if L is None else L
    decay = (HV, K) if is_per_channel else (HV,)
    apart = torch.full((slots, HV * K * V + 64), float("nan"), dtype=pool)
    last = (V, K) if v_first else (K, V)
    state = apart[:, : HV * K * V].unflatten(1, (HV, *last)).copy_(torch.randn(slots, HV, *last))
    windows = torch.randn(slots, D, L).to(conv_dtype or dtype)
    x = {
        "mixed_qkv": torch.randn(B, D + 32).to(dtype)[:, :D], "conv_state": windows,
        "conv_weight": torch.randn(D, W).to(dtype),
        "conv_bias": torch.randn(D).to(dtype) if is_gated else None,
        "a": torch.randn(B, *decay).to(dtype), "b": torch.randn(B, HV).to(dtype), "A_log": torch.randn(HV),
        "dt_bias": torch.randn(decay) if is_gated else None, "state": state,
    }  # fmt: skip
    options = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V, "state_v_first": v_first}
    if is_gated:
        x |= {"z": torch.randn(B, HV * V + 8).to(dtype)[:, : HV * V].unflatten(1, (HV, V))}
        x |= {"norm_weight": torch.randn(V), "read_index": torch.randperm(slots)[:B].int()}
    return x, options


# the default options of a step, by which its problem is created
STEP = {
    "conv_activation": "silu", "z": None, "norm_weight": None, "norm_eps": 1e-6, "norm_activation": "silu",
    "scale": None, "lower_bound": None, "use_qk_l2norm_in_kernel": True, "allow_neg_eigval": False,
    "state_v_first": True, "conv_index": None, "read_index": None, "write_index": None, "null_slot": None,
    "out": None, "backend": None, "history_u": None, "history_k": None, "history_G": None, "cursor": None,
    "room": None, "use_history": None, "column_scale": None, "remainder": None,
}  # fmt: skip


def protocols(index=torch.int64, v_first=True, dtype=torch.float32):
    """Return for each protocol what to add to the inputs of a call of B rows of T tokens."""
    at = lambda *values: torch.tensor(values, dtype=index)  # noqa: E731
    pool, ring = pool_of(SLOTS, dtype=dtype, v_first=v_first), pool_of(SLOTS, R, dtype=dtype, v_first=v_first)
    kept = pool_of(B + 2, T + 2, dtype=dtype, v_first=v_first)
    rows = at(7, 2, -1, 4, SLOTS)
    table = at(*range(1, 1 + 8 * 4)).view(B + 3, 4)[:B] % SLOTS
    wide = pool_of(B * 4 + 1, dtype=dtype, v_first=v_first)
    columns = torch.arange(1, 1 + B * 4).view(B, 4).to(index)
    skips = columns.clone()
    skips[1, 1], skips[2] = -1, 0
    return {
        "identity": {"state": pool},
        "index": {"state": pool, "read_index": rows},
        "P1": {
            "state": ring, "read_index": rows, "ring_pos": at(0, 3, 1, 6, 2), "write": "all",
            "round_state": True,
        },
        "P1 final": {"state": ring, "read_index": rows, "ring_pos": at(0, 3, 1, 6, 2)},
        "P2": {
            "state": wide, "read_index": skips, "num_accepted": at(1, 4, 2, -3, 99), "write_index": skips,
            "write": "all", "null_slot": 0,
        },
        "P2 read": {"state": pool, "read_index": table, "num_accepted": at(1, 2, 3, 4, 5), "write": "none"},
        "P3": {"state": pool, "read_index": rows, "write": "none", "intermediate": kept},
        "P3 rows": {
            "state": pool, "read_index": rows, "write": "none", "intermediate": kept.half(),
            "intermediate_row": at(6, 99, 0, -1, 1),
        },
        "P4": {
            "state": pool, "read_index": rows, "write": "none", "intermediate": kept,
            "parent": at(9, 0, 0, -1, -1, 1, 0, 0, 0, 5, 0, -1, 0, 0, 1).view(B, T),
        },
        "P4 narrow": {
            "state": pool, "read_index": rows, "intermediate": kept.bfloat16(),
            "intermediate_row": at(6, 99, 0, 1, 2),
            "parent": at(0, 0, 0, -1, -1, 0, 0, 0, 0, 0, 0, 7, 0, 0, 1).view(B, T),
        },
        "P6": {"state": pool, "read_index": at(7, 7, -1, 4, 2), "write_index": at(0, 1, 3, -1, 5)},
    }  # fmt: skip


NAMES = list(protocols())


def moved(x, device):
    """Copy all tensors of a call to a device, each with the strides, offset and gaps that it had."""
    return {name: _moved(v, device) if isinstance(v, torch.Tensor) else v for name, v in x.items()}


def _moved(x, device):
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return memory.to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


def error(x, expected):
    """Return the relative RMS error, or infinity if the result holds NaN."""
    if expected.numel() == 0:
        return 0.0
    x, expected = x.cpu(), expected.cpu()
    e = (x.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    return float("inf") if e.isnan() else float(e)


def same_bits(x, y):
    """Return True if all bits are equal, including those of NaN and signed zeros."""
    as_ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    x, y = x.cpu().contiguous(), y.cpu().contiguous()
    return x.dtype == y.dtype and torch.equal(x.view(as_ints), y.view(as_ints))


def find_wrong_state(x, expected, before, tolerance, lead=1):
    """Return what is wrong with a written tensor: a place that changed, or a wrong state; or None."""
    x, expected, before = (t.flatten(0, lead - 1) for t in (x, expected, before))
    for i in range(x.shape[0]):
        if same_bits(expected[i], before[i]):
            if not same_bits(x[i], before[i]):
                return f"place {i} was touched"
        elif error(x[i], expected[i]) > tolerance:
            return f"place {i} is off by {error(x[i], expected[i]):.1e}"
    return None
