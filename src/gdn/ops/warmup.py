"""Compile every kernel that the calls of a model need, before the first request."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from gdn.ops.warmup_calls import ENGINES, layer, windows
from gdn.ops.warmup_history import history
from gdn.ops.warmup_sizes import Sizes
from gdn.problem.history import check_pool_sizes
from gdn.problem.warmup import check_index_dtype, check_names, check_state_dtypes


def warmup(
    device: torch.device | str,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    conv_size: int = 4,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    state_dtypes: Sequence[torch.dtype] = (torch.float32,),
    dt_bias_dtype: torch.dtype = torch.float32,
    max_tokens: int = 4,
    max_rows: int = 256,
    engines: Sequence[str] = ("gdn",),
    gates: Sequence[str] = ("raw",),
    decay: str = "head",
    lower_bound: float | None = None,
    index_dtype: torch.dtype = torch.int32,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    training: bool = False,
    backend: str | None = None,
) -> list[str]:
    """Run every function in every form that an engine calls, on small tensors; later calls compile nothing.

    Args:
        device                      device on which the model will run
        num_k_heads, num_v_heads    H, HV
        head_k_dim, head_v_dim      K, V
        conv_size                   W, taps of the causal convolution
        dtypes, state_dtypes        dtypes of activations and raw logits, and of the pools: floats; int16 for
                                    "gdn" (an `Int16Pool`) and "history", int8 for "history"
        dt_bias_dtype               dtype of dt_bias; A_log is assumed to be fp32
        max_tokens                  length of the longest packet of `decode`
        max_rows                    most prompts in one batch: tile sizes depend on their number
        engines                     the engines whose calls are run: "gdn" (the public functions: protocols P1
                                    to P6, dense and packed rows; prefill with every state that it can store),
                                    "history" (decode_with_history and decode_step on a HistoryPool),
                                    "vllm", "sglang", "lmdeploy" (gdn.integrations: their index types, gates
                                    and layouts)
        gates                       for engine "gdn": "raw" (a, b, A_log, dt_bias), "active" (g, beta) or both
        decay, lower_bound          for engine "gdn": what a number of g decays, a "head" or a "channel", and
                                    the lower bound of raw gates; "channel" also for "vllm" and "sglang"
        index_dtype                 for engine "gdn": int32 or int64, dtype of indices, offsets and counts
        use_qk_l2norm_in_kernel,    for engine "gdn": the values in its later calls
        state_v_first
        training                    True: run the backward as well
        backend                     None: chosen automatically; a named one never falls back

    Returns: one line for each call: function, dtypes, form, and, if kernels were compiled for it, their
        names, their number and the seconds. A second warmup with the same arguments names none.
    `gdn warmup --save` does the same and ships the kernels to other machines: see `load_kernels`.
    No tensor of the caller is read or written. On `eager` no kernel is compiled; only torch initialises.
    Raises: as the functions themselves; ValueError for an unknown engine, or one whose states are not
            integers; TypeError for another dtype of states.
    Cost:   the compile time; memory for max_rows prompts of 65 tokens and as many states, and for one prompt
            of 4096 tokens.
    """
    check_pool_sizes(
        (), num_k_heads=num_k_heads, num_v_heads=num_v_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim,
        conv_size=conv_size,
    )  # fmt: skip
    check_names("engines", engines, _ENGINES)
    check_names("gates", gates, ("raw", "active"))
    check_names("decay", (decay,), ("head", "channel"))
    check_index_dtype(index_dtype)
    check_state_dtypes(state_dtypes, engines)
    lines = []
    for dtype in dtypes:
        usual = Sizes(
            num_k_heads, num_v_heads, head_k_dim, head_v_dim, conv_size, max(1, max_tokens), max(1, max_rows),
            torch.device(device), dtype, dt_bias_dtype, backend,
        )  # fmt: skip
        s = replace(usual, gates=tuple(gates), index_dtype=index_dtype)
        s = replace(s, v_first=state_v_first, l2norm=use_qk_l2norm_in_kernel)
        s = replace(s, is_per_channel=decay == "channel", lower_bound=lower_bound)
        kinds = {"gdn": s, "history": s}
        if decay == "channel":
            channels = replace(usual, is_per_channel=True, lower_bound=lower_bound)
            kinds |= {"vllm": channels, "sglang": channels}
        sizes = {name: kinds.get(name, usual) for name in engines}
        calls = [*layer(s, training), *(call for name in engines for call in windows(sizes[name], name))]
        lines += [_met(f"{function} {dtype} {form}", call, s.device) for function, form, call in calls]
        for state_dtype in state_dtypes:
            calls = [call for name in engines for call in _ENGINES[name](sizes[name], state_dtype)]
            about = f"{dtype} {state_dtype}"
            lines += [_met(f"{function} {about} {form}", call, s.device) for function, form, call in calls]
    return lines


_ENGINES = {**ENGINES, "history": history}


def _met(label: str, call: Callable[[], Any], device: torch.device) -> str:
    label = label.rstrip()
    with _listening(device) as names:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
    if not names:
        return label
    compiled = ", ".join(f"{name} x {count}" for name, count in Counter(names).items())
    return f"{label}: compiled {compiled} in {seconds:.1f} s"


def _listening(device: torch.device) -> AbstractContextManager[list[str]]:
    """Return a context that lists compilations; an empty one on a CPU, where Triton is never imported."""
    if device.type == "cpu":
        return nullcontext([])
    try:
        listing: AbstractContextManager[list[str]] = import_module(
            "gdn.backends.triton.launch.compilations"
        ).compilations()
    except ImportError:
        return nullcontext([])
    return listing
