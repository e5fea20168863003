"""Call the engines' adapters on small tensors, as the engines do, function by function."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from gdn.integrations import lmdeploy, sglang, vllm
from kit.serving import inputs, pool_of

H, HV, K, V, W = 2, 4, 64, 64, 4
N, T, R, SLOTS = 4, 3, 4, 9  # requests, tokens of a packet, ring entries, slots
D = 2 * H * K + HV * V
L2 = {"use_qk_l2norm_in_kernel": True}
BF16 = torch.bfloat16
RULE, CONV, KERNEL = lmdeploy.GatedDeltaRule(), lmdeploy.CausalConv1d(), sglang.GDNKernel()


def tokens(B: int, count: int, raw: bool = False) -> dict[str, torch.Tensor]:
    return inputs(B, count, H, HV, K, V, dtype=BF16, raw=raw)


def pool(*lead: int) -> torch.Tensor:
    return pool_of(*lead, HV=HV, K=K, V=V)


def offsets(count: int = T) -> torch.Tensor:
    """Return the offsets of N packed requests of `count` tokens each."""
    return torch.arange(0, N * count + 1, count, dtype=torch.int32)


def rule_arguments(x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [x[name] for name in ("q", "k", "v", "g", "beta")]


def projection(rows: int) -> tuple[torch.Tensor, ...]:
    """Return mixed_qkv, a, b, A_log and dt_bias."""
    return torch.randn(rows, D).to(BF16), *torch.randn(2, rows, HV).to(BF16), *torch.randn(2, HV)


def filters() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(D, W).to(BF16), torch.randn(D).to(BF16)


# lmdeploy


def lmdeploy_recurrent(has_ring: bool) -> Callable[[], Any]:
    x, state, slots = tokens(N, T), pool(SLOTS, R) if has_ring else pool(SLOTS), torch.arange(N)
    seen = torch.arange(N).int() if has_ring else None
    return lambda: RULE.fused_recurrent_gated_delta_rule(
        *rule_arguments(x),
        state,
        slots,
        output_final_state=True,
        cache_seqlens=seen,
        transpose_state_layout=True,
        **L2,
    )


def lmdeploy_prompts(has_ring: bool) -> Callable[[], Any]:
    x, state, slots = tokens(1, 70 * N), pool(SLOTS, R) if has_ring else pool(SLOTS), torch.arange(N)
    entries, cu = (torch.arange(N) % R, torch.arange(N) % 2) if has_ring else None, offsets(70)
    return lambda: RULE.chunk_gated_delta_rule(
        *rule_arguments(x), state, slots, cu_seqlens=cu, output_final_state=True, spec_state_offsets=entries,
        transpose_state_layout=True, **L2,
    )  # fmt: skip


def lmdeploy_gates() -> Callable[[], Any]:
    x, mask = tokens(1, 9, raw=True), torch.arange(9) < 1
    rest = x["dt_bias"], -x["A_log"].exp(), HV // H, True, False, mask
    return lambda: RULE.prepare_inputs(x["q"], x["k"], x["b"], x["a"], *rest)


def lmdeploy_layer(is_decoding: bool, has_ring: bool) -> Callable[[], Any]:
    """Return the calls of both `forward`s of lmdeploy 0.18; with drafts the windows are rings as well."""
    columns, slots, count = W + (R - 1 if has_ring else 0), torch.arange(N), T if is_decoding else 70
    total, cu = N * count, offsets(count)
    state, windows = pool(SLOTS, R) if has_ring else pool(SLOTS), torch.randn(SLOTS, D, columns).to(BF16)
    (weight, bias), (x, a, b, A_log, dt_bias) = filters(), projection(total)
    span, seen, rate = torch.arange(-W, 0), torch.arange(N), -A_log.exp()
    ends = seen + count
    meta = SimpleNamespace(
        is_decoding=is_decoding, origin_state_ids=slots, state_ids=slots, conv_state_indices=slots.int(),
        cache_seqlens=seen.int() if has_ring else None, cu_seqlens=cu, is_init=seen == 0,
        spec_state_offsets=(seen % R, ends % R) if has_ring else None,
        spec_conv_offsets=((seen[:, None] + span[1:]) % columns, (ends[:, None] + span) % columns)
        if has_ring else None,
    )  # fmt: skip

    def call() -> None:
        mixed = CONV.forward(x[None], weight[:, None], bias, windows, meta, "silu")
        q, k, v = mixed.split([H * K, H * K, HV * V], 2)
        q, k, v = q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V))
        RULE.forward(q, k, v, b[None], a[None], dt_bias, rate, state, meta, HV // H, True)

    return call


def lmdeploy_conv_of_prompts(has_states: bool) -> Callable[[], Any]:
    (weight, bias), x = filters(), torch.randn(1, D, 12).to(BF16)
    numbers, states = torch.arange(12).int() // 3, torch.randn(N, D, W - 1).to(BF16) if has_states else None
    return lambda: CONV.conv1d_fn(x, weight, bias, numbers, states, False, "silu")


def lmdeploy_conv_step(has_ring: bool) -> Callable[[], Any]:
    (weight, bias), x = filters(), torch.randn(N, D, T).to(BF16)
    windows, slots = torch.randn(SLOTS, D, W + T).to(BF16), torch.arange(N).int()
    seen = torch.arange(N).int() if has_ring else None
    return lambda: CONV.update_fn(x, windows, weight, bias, "silu", slots, seen)


# vLLM


def vllm_decode(is_packed: bool, is_raw: bool) -> Callable[[], Any]:
    """Return a decode with one block per row, or of packed drafts with a table and accepted counts."""
    x = tokens(1, N * T, is_raw) if is_packed else tokens(N, 1, is_raw)
    state, blocks = pool(N * T + 1), torch.arange(N, dtype=torch.int32) + 1
    where: dict[str, Any] = {"ssm_state_indices": blocks}
    if is_packed:
        where["ssm_state_indices"] = torch.arange(N * T, dtype=torch.int32).view(N, T) + 1
        where |= {"num_accepted_tokens": blocks, "cu_seqlens": offsets()}
    if not is_raw:
        return lambda: vllm.fused_recurrent_gated_delta_rule(*rule_arguments(x), None, state, **where, **L2)
    first = [x[name] for name in ("A_log", "a", "b", "dt_bias", "q", "k", "v")]
    return lambda: vllm.fused_sigmoid_gating_delta_rule_update(*first, initial_state=state, **where, **L2)


def vllm_separate_states() -> Callable[[], Any]:
    x, state, blocks = tokens(N, T), pool(SLOTS), torch.arange(N).int() + 1
    return lambda: vllm.fused_recurrent_gated_delta_rule(
        *rule_arguments(x), None, state, False, ssm_state_indices=blocks, **L2
    )


def packed_decode(engine: Any) -> Callable[[], Any]:
    x, state, out = projection(N), pool(SLOTS), torch.empty(N, 1, HV, V, dtype=BF16)
    blocks = torch.arange(N).int() + 1
    return lambda: engine.fused_recurrent_gated_delta_rule_packed_decode(
        *x, K**-0.5, state, out, blocks, True
    )


def vllm_prefill(has_buffer: bool) -> Callable[[], Any]:
    x, states, cu = tokens(1, 70 * N), pool(N), offsets(70)
    buffer = torch.empty(1, 70 * N, HV, V, dtype=BF16) if has_buffer else None
    return lambda: vllm.chunk_gated_delta_rule(
        *rule_arguments(x), None, states, True, cu, core_attn_out=buffer, **L2
    )


def vllm_gating() -> Callable[[], Any]:
    _, a, b, A_log, dt_bias = projection(N)
    return lambda: vllm.fused_gdn_gating(A_log, a, b, dt_bias)


def vllm_conv_of_prompts(has_mask: bool) -> Callable[[], Any]:
    (weight, bias), x, cu = filters(), torch.randn(D, 5 * N).to(BF16), offsets(5)
    windows, blocks = torch.randn(SLOTS, D, W).to(BF16), torch.arange(N).int() + 1
    mask = torch.arange(N) > 1 if has_mask else None
    return lambda: vllm.causal_conv1d_fn(x, weight, bias, windows, cu, blocks, mask)


def vllm_conv_step(is_packed: bool, has_counts: bool) -> Callable[[], Any]:
    (weight, bias), blocks = filters(), torch.arange(N).int() + 1
    x = torch.randn(N * T, D).to(BF16) if is_packed else torch.randn(N, D, T).to(BF16)
    windows, counts = torch.randn(SLOTS, D, W + T).to(BF16), blocks if has_counts else None
    rows = (offsets(), T) if is_packed else ()
    return lambda: vllm.causal_conv1d_update(x, windows, weight, bias, "silu", blocks, counts, *rows)


# SGLang


def sglang_decode() -> Callable[[], Any]:
    x, state, slots, cu = tokens(1, N, raw=True), pool(SLOTS), torch.arange(N).int(), offsets(1)
    return lambda: KERNEL.decode(
        x["q"], x["k"], x["v"], x["a"][0], x["b"][0], A_log=x["A_log"], dt_bias=x["dt_bias"],
        ssm_states=state, cache_indices=slots, query_start_loc=cu,
    )  # fmt: skip


def sglang_verify(is_tree: bool) -> Callable[[], Any]:
    """Return a verification, and the commit of the accepted drafts."""
    x, states, slots, cu = tokens(1, N * T, raw=True), pool(1, SLOTS), torch.arange(N + 2).int(), offsets()
    kept, rows, steps = pool(1, N, T), torch.arange(N), torch.arange(N) - 1
    parent = torch.zeros(N, T, dtype=torch.int64) if is_tree else None

    def call() -> None:
        KERNEL.target_verify(
            x["A_log"], x["dt_bias"], x["q"], x["k"], x["v"], x["a"][0], x["b"][0], ssm_states=states[0],
            cache_indices=slots, query_start_loc=cu, intermediate_states_buffer=kept[0],
            intermediate_state_indices=rows, cache_steps=T, retrieve_parent_token=parent,
        )  # fmt: skip
        sglang.fused_mamba_state_scatter_with_mask(states, kept, slots[:N], steps, rows)

    return call


def sglang_commit_without_rows() -> Callable[[], Any]:
    states, kept, slots = pool(1, SLOTS), pool(1, N, T), torch.arange(N).int()
    return lambda: sglang.fused_mamba_state_scatter_with_mask(states, kept, slots, slots.long() - 1)


def sglang_extend(has_tracking: bool) -> Callable[[], Any]:
    x, state, slots, cu = tokens(1, 70 * N), pool(SLOTS), torch.arange(N).int(), offsets(70)
    track = (pool(N), torch.arange(N).int() - 1) if has_tracking else (None, None)
    return lambda: KERNEL.extend(
        *rule_arguments(x), ssm_states=state, cache_indices=slots, query_start_loc=cu, track_state=track[0],
        track_chunk_idx=track[1],
    )  # fmt: skip


def sglang_chunk_states(is_packed: bool) -> Callable[[], Any]:
    x, state, slots = tokens(1, 70 * N) if is_packed else tokens(N, 70), pool(SLOTS), torch.arange(N).int()
    cu = offsets(70) if is_packed else None
    return lambda: sglang.chunk_gated_delta_rule(*rule_arguments(x), None, state, slots, cu, **L2)


def sglang_npu() -> Callable[[], Any]:
    x, states, cu = tokens(1, 70 * N), pool(N).mT, offsets(70)
    return lambda: sglang.chunk_gated_delta_rule_npu(*rule_arguments(x), None, states, True, cu)


CALLS: dict[str, tuple[Callable[..., Callable[[], Any]], tuple[Any, ...]]] = {
    "lmdeploy recurrent": (lmdeploy_recurrent, (False,)),
    "lmdeploy recurrent on a ring": (lmdeploy_recurrent, (True,)),
    "lmdeploy prompts": (lmdeploy_prompts, (False,)),
    "lmdeploy prompts on a ring": (lmdeploy_prompts, (True,)),
    "lmdeploy gates": (lmdeploy_gates, ()),
    "lmdeploy layer, prompts": (lmdeploy_layer, (False, False)),
    "lmdeploy layer, prompts on rings": (lmdeploy_layer, (False, True)),
    "lmdeploy layer, drafts": (lmdeploy_layer, (True, True)),
    "lmdeploy convolution of prompts": (lmdeploy_conv_of_prompts, (True,)),
    "lmdeploy convolution of new prompts": (lmdeploy_conv_of_prompts, (False,)),
    "lmdeploy convolution of a step": (lmdeploy_conv_step, (False,)),
    "lmdeploy convolution of a step on a ring": (lmdeploy_conv_step, (True,)),
    "vllm decode": (vllm_decode, (False, False)),
    "vllm decode from logits": (vllm_decode, (False, True)),
    "vllm drafts": (vllm_decode, (True, False)),
    "vllm drafts from logits": (vllm_decode, (True, True)),
    "vllm states apart": (vllm_separate_states, ()),
    "vllm packed decode": (packed_decode, (vllm,)),
    "vllm prompts": (vllm_prefill, (False,)),
    "vllm prompts into a buffer": (vllm_prefill, (True,)),
    "vllm gating": (vllm_gating, ()),
    "vllm convolution of prompts": (vllm_conv_of_prompts, (True,)),
    "vllm convolution of new prompts": (vllm_conv_of_prompts, (False,)),
    "vllm convolution of a step": (vllm_conv_step, (False, False)),
    "vllm convolution of drafts": (vllm_conv_step, (False, True)),
    "vllm convolution of packed rows": (vllm_conv_step, (True, False)),
    "vllm convolution of packed drafts": (vllm_conv_step, (True, True)),
    "sglang decode": (sglang_decode, ()),
    "sglang packed decode": (packed_decode, (sglang,)),
    "sglang verify and commit": (sglang_verify, (False,)),
    "sglang verify and commit of trees": (sglang_verify, (True,)),
    "sglang commit without rows": (sglang_commit_without_rows, ()),
    "sglang extend": (sglang_extend, (False,)),
    "sglang extend with tracking": (sglang_extend, (True,)),
    "sglang chunk states": (sglang_chunk_states, (True,)),
    "sglang chunk states of a batch": (sglang_chunk_states, (False,)),
    "sglang for the npu": (sglang_npu, ()),
}
