"""Check that a warmup launches every kernel that an engine's calls launch. Launches are recorded, not run."""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch
from kit import api
from kit.serving import pool_of

import gdn
from gdn.integrations import lmdeploy, lmdeploy_layer, sglang, sglang_kda, vllm, vllm_layer
from gdn.ops import fastpath
from gdn.ops.warmup_calls import ENGINES

H, HV, K, V, W, D = 4, 8, 128, 128, 4, 2 * 4 * 128 + 8 * 128
SIZES = {"num_k_heads": H, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V, "max_rows": 32}
TINY = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 16}
BF16 = torch.bfloat16
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_call_runs(engine):
    lines = api.warmup(
        "cpu",
        **TINY,
        dtypes=(torch.float32, BF16),
        state_dtypes=(torch.float32,),
        engines=(engine,),
        training=True,
    )
    names = {line.split()[0] for line in lines}
    expected = {
        "decode",
        "prefill",
        "chunk_gated_delta_rule",
        "causal_conv1d",
        "causal_conv1d_update",
        "gate",
    }
    assert expected <= names and not any("compiled" in line for line in lines)
    assert all(f"{dtype}" in " ".join(lines) for dtype in (torch.float32, BF16))


def test_the_callers_tensors_and_gradients_are_left_alone():
    x = torch.ones(2, requires_grad=True)
    before = torch.random.get_rng_state()
    api.warmup("cpu", **TINY, training=True)
    assert x.grad is None and torch.equal(torch.random.get_rng_state(), before)


def test_refusals():
    with pytest.raises(
        ValueError, match="engines: expected some of gdn, vllm, sglang, lmdeploy, history, got 'vlm'"
    ):
        api.warmup("cpu", **TINY, engines=("vlm",))
    with pytest.raises(TypeError, match="engines: expected a sequence of names"):
        api.warmup("cpu", **TINY, engines="vllm")
    with pytest.raises(ValueError, match="gates: expected some of raw, active, got 'a'"):
        api.warmup("cpu", **TINY, gates=("a",))
    with pytest.raises(TypeError, match="state_dtypes: expected floats, int16 or int8, got torch.bool"):
        api.warmup("cpu", **TINY, state_dtypes=(torch.bool,))
    match = "state_dtypes: expected floats for engine 'vllm', got torch.int16, which gdn and history alone"
    with pytest.raises(ValueError, match=match):
        api.warmup("cpu", **TINY, state_dtypes=(torch.int16,), engines=("gdn", "vllm"))
    with pytest.raises(ValueError, match="got torch.int8, which history alone takes"):
        api.warmup("cpu", **TINY, state_dtypes=(torch.int8,))
    with pytest.raises(TypeError, match="index_dtype: expected int32 or int64, got torch.int16"):
        api.warmup("cpu", **TINY, index_dtype=torch.int16)


@pytest.fixture
def record_binaries(monkeypatch):
    """Return a function that returns the set of binaries that a call would launch on an H200."""
    compiling = pytest.importorskip("kit.compiling")
    monkeypatch.setenv("GDN_BACKEND", "triton")
    yield lambda call: set(compiling.jobs(call, "cuda:90"))
    # calls cached on CPU tensors are valid only while launches are recorded
    fastpath._calls.clear()


def tokens(*lead, gates="raw", dtype=BF16):
    """Return q, k, v as views of a projection, and gates."""
    mixed = torch.randn(*lead, D).to(dtype)
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    x = {"q": q.unflatten(-1, (H, K)), "k": k.unflatten(-1, (H, K)), "v": v.unflatten(-1, (HV, V))}
    if gates == "raw":
        return x, torch.randn(*lead, HV).to(dtype), torch.randn(*lead, HV).to(dtype)
    return x, -torch.rand(*lead, HV), torch.rand(*lead, HV)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def offsets(*counts):
    return torch.tensor([0, *counts]).cumsum(0).int()


HEADS = (torch.zeros(HV), torch.zeros(HV))


def vllm_calls(pool, decay="head", lower_bound=None):
    """Yield the calls of vLLM 0.33; with a decay per key channel those of its layers alone."""
    A_log, dt_bias = HEADS
    if decay == "channel":
        # vLLM has filters in fp32 there
        taps, bias = torch.zeros(D, W), torch.zeros(HV, K)
        yield from vllm_layer_calls(pool, vllm_layer.ChannelWeights(taps, None, A_log, bias, lower_bound))
        return
    x, a, b = tokens(1, 5)
    rest = {"initial_state": pool, "use_qk_l2norm_in_kernel": True}
    given = (A_log, a[0], b[0], dt_bias, x["q"], x["k"], x["v"])
    table, index = torch.arange(20).view(5, 4).int(), ints(1, 2, 3, 4, 5, 6)
    update = vllm.fused_sigmoid_gating_delta_rule_update
    yield lambda: update(*given, **rest, cu_seqlens=offsets(1, 1, 1, 1, 1), ssm_state_indices=index)
    yield lambda: update(
        *given,
        **rest,
        cu_seqlens=offsets(4, 1),
        ssm_state_indices=table,
        num_accepted_tokens=ints(1, 2, 1, 1, 1),
    )
    mixed, out = torch.randn(5, D).bfloat16(), torch.empty(5, 1, HV, V, dtype=BF16)
    yield lambda: vllm.fused_recurrent_gated_delta_rule_packed_decode(
        mixed, a[0], b[0], A_log, dt_bias, K**-0.5, pool, out, index[:5], True
    )
    for N in (1, 7, 32):
        y, g, beta = tokens(1, 66 * N, gates="active")
        S = pool_of(N, HV=HV, K=K, V=V, dtype=pool.dtype)
        yield lambda y=y, g=g, beta=beta, S=S, N=N: vllm.chunk_gated_delta_rule(
            **y, g=g, beta=beta, initial_state=S, output_final_state=True, cu_seqlens=offsets(*[66] * N)
        )
    blocks, weight, row = (
        torch.zeros(9, W - 1 + 3, D, dtype=BF16).mT,
        torch.zeros(D, W, dtype=BF16),
        ints(3, 5),
    )
    has = torch.tensor([True, False])
    yield lambda: vllm.causal_conv1d_fn(mixed.t(), weight, None, blocks, offsets(3, 2), row, has, "silu")
    yield lambda: vllm.causal_conv1d_update(mixed[:2], blocks, weight, None, "silu", row)
    yield lambda: vllm.causal_conv1d_update(
        mixed, blocks, weight, None, "silu", row, ints(1, 2), offsets(4, 1), 4
    )
    yield from vllm_layer_calls(pool)


def vllm_layer_calls(pool, channels=None):
    """Yield the calls of the layer that the plug-in registers; channels: weights of a decay per channel."""
    layer = channels or SimpleNamespace(
        conv1d=SimpleNamespace(weight=torch.zeros(D, 1, W, dtype=BF16)), activation="silu", A_log=HEADS[0],
        dt_bias=HEADS[1],
    )  # fmt: skip
    last = () if channels is None else (K,)

    def logits(N):
        return torch.randn(N, HV).to(BF16), torch.randn(N, HV, *last).to(BF16)

    pools = (torch.zeros(32, W - 1 + 3, D, dtype=BF16).mT, pool)
    for N in (1, 5, 32):
        given = torch.randn(N, D).to(BF16), *logits(N)
        meta = SimpleNamespace(non_spec_state_indices_tensor=torch.arange(N).int())
        z, out = torch.randn(N, HV, V).to(BF16), torch.empty(N, HV, V, dtype=BF16)
        norm = {"z": z, "norm_weight": torch.ones(V, dtype=BF16)}
        norm |= {"norm_activation": "silu" if channels is None else "sigmoid"}
        for more in ({}, norm):
            yield lambda x=given, meta=meta, out=out, more=more: vllm_layer.decode_tokens(
                layer, meta, pools, x, out, len(out), **more
            )
        prompts = torch.randn(66 * N, D).to(BF16), *logits(66 * N)
        at = SimpleNamespace(checkpoint_offsets=torch.zeros(N).int(), state_indices=torch.zeros(N).int())
        for checkpoint in (None, at):
            meta = SimpleNamespace(
                prefill_query_start_loc=offsets(*[66] * N), prefill_state_indices=torch.arange(N).int(),
                prefill_has_initial_state=torch.ones(N).bool(), checkpoint=checkpoint,
            )  # fmt: skip
            yield lambda x=prompts, meta=meta: vllm_layer.run_prompts(layer, meta, pools, x, None, False)
    drafts = SimpleNamespace(
        num_spec_decodes=2, spec_state_indices_tensor=torch.arange(8).view(2, 4).int(),
        spec_query_start_loc=offsets(4, 4), num_accepted_tokens=ints(1, 2),
    )  # fmt: skip
    given = torch.randn(8, D).to(BF16), *logits(8)
    yield lambda: vllm_layer.verify(layer, drafts, pools, given)


def sglang_channel_calls(pool, lower_bound):
    """Yield the calls of SGLang's dispatcher of layers with a decay per key channel."""
    kernel, index = sglang.KDAKernel(), ints(1, 2)
    heads = {
        "A_log": HEADS[0],
        "dt_bias": torch.zeros(HV * K),
        "lower_bound": lower_bound,
        "ssm_states": pool,
    }
    kept = pool_of(3, 4, HV=HV, K=K, V=V, dtype=pool.dtype)
    for T in (1, 4):
        x, _, b = tokens(1, 2 * T)
        x |= {"a": torch.randn(1, 2 * T, HV * K).to(BF16), "b": b, "query_start_loc": offsets(T, T)}
        x |= {"cache_indices": index, **heads}
        if T == 1:
            yield lambda x=x: kernel.decode(**x)
            continue
        yield lambda x=x: kernel.target_verify(
            **x, intermediate_states_buffer=kept, intermediate_state_indices=ints(2, 0), cache_steps=4,
            retrieve_parent_token=None,
        )  # fmt: skip
    mixed, a, b = (torch.randn(2, n).to(BF16) for n in (D, HV * K, HV))
    yield lambda: kernel.packed_decode(
        mixed, a, b, **heads, cache_indices=index, scale=K**-0.5, num_v_heads=HV, head_v_dim=V
    )
    # the backend's decode, Kimi K3's norm with weights in fp32
    windows, taps, ones = torch.zeros(9, W - 1, D, dtype=BF16), torch.zeros(D, W), torch.ones(V)
    caches = SimpleNamespace(conv=[windows], temporal=pool, replayssm_d=None)
    layer = SimpleNamespace(conv_weights=taps, bias=None, num_k_heads=H, **heads)
    offered = {
        "_k3_onorm_gate": torch.randn(2, HV * V).to(BF16),
        "_k3_fused_decode_args": (*[None] * 5, ones, 1e-5),
    }
    for more in ({}, offered):
        given = SimpleNamespace(**vars(layer) | more)
        yield lambda given=given: sglang_kda._decode_layer(given, caches, index, mixed, a, b)
    for N in (1, 12, 32):
        z, _, beta = tokens(1, 70 * N)
        z |= {"g": torch.randn(1, 70 * N, HV, K).to(BF16), "beta": beta, "beta_is_raw": True, **heads}
        z |= {"cache_indices": torch.zeros(N).int(), "query_start_loc": offsets(*[70] * N)}
        track = {"track_state": torch.empty(N, HV, V, K), "track_chunk_idx": torch.ones(N).int()}
        for more in ({}, track, {"return_intermediate_states": True}):
            yield lambda z=z, more=more: kernel.extend(**z, **more)


def sglang_calls(pool, decay="head", lower_bound=None):
    """Yield the calls of SGLang's dispatcher."""
    if decay == "channel":
        yield from sglang_channel_calls(pool, lower_bound)
        return
    kernel, (A_log, dt_bias) = sglang.GDNKernel(), HEADS
    heads = {"A_log": A_log, "dt_bias": dt_bias}
    index = ints(1, 2)
    x, a, b = tokens(1, 2)
    where = {"ssm_states": pool, "cache_indices": index}
    yield lambda: kernel.decode(**x, a=a[0], b=b[0], **heads, **where, query_start_loc=offsets(1, 1))
    mixed = torch.randn(2, D).bfloat16()
    yield lambda: kernel.packed_decode(
        mixed, a[0], b[0], **heads, scale=K**-0.5, **where, num_v_heads=HV, head_v_dim=V
    )
    y, la, lb = tokens(1, 8)
    kept = pool_of(3, 4, HV=HV, K=K, V=V, dtype=pool.dtype)
    for parent in (None, torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32)):
        yield lambda parent=parent: kernel.target_verify(
            **y, a=la[0], b=lb[0], **heads, **where, query_start_loc=offsets(4, 4), cache_steps=4,
            intermediate_states_buffer=kept, intermediate_state_indices=ints(2, 0),
            retrieve_parent_token=parent,
        )  # fmt: skip
    steps = torch.tensor([1, -1])
    yield lambda: sglang.fused_mamba_state_scatter_with_mask(pool[None], kept[None], index, steps)
    for caches in (sglang_caches(pool, kept, True), sglang_caches(pool, kept, False)):
        for track in ((None, None), (steps + 2, steps)):
            yield lambda caches=caches, track=track: sglang.scatter_mamba_states_after_mtp_verify(
                caches, index, steps, *track, ints(2, 0)
            )
    for N in (1, 12, 32):
        z, g, beta = tokens(1, 70 * N, gates="active")
        many = {"ssm_states": pool, "cache_indices": torch.zeros(N, dtype=torch.int32)}
        many |= {"query_start_loc": offsets(*[70] * N), "g": g, "beta": beta}
        yield lambda z=z, many=many: kernel.extend(**z, **many)
        track = {"track_state": torch.empty(N, HV, V, K), "track_chunk_idx": torch.ones(N, dtype=torch.int32)}
        yield lambda z=z, many=many, track=track: kernel.extend(**z, **many, **track)
        yield lambda z=z, many=many: kernel.extend(**z, **many, inplace_update=False)
        rest = (g, beta, None, pool, many["cache_indices"], many["query_start_loc"], False, True)
        yield lambda z=z, rest=rest: sglang.chunk_gated_delta_rule(*z.values(), *rest)


def sglang_caches(pool, kept, are_apart):
    """Return its SpeculativeState, with separate windows of drafts or all of a request in one tensor."""
    windows = torch.zeros(2, 3, D, W + 2, dtype=BF16).unfold(3, W - 1, 1).transpose(2, 3)
    return SimpleNamespace(
        temporal=torch.stack([pool] * 2),
        intermediate_ssm=torch.stack([kept] * 2),
        conv=[torch.zeros(2, 9, D, W - 1, dtype=BF16)],
        intermediate_conv_window=[windows.contiguous() if are_apart else windows],
    )


def lmdeploy_calls(pool):
    """Yield the calls of lmdeploy's methods of 0.16, and of `forward` of 0.18."""
    rule, ring = lmdeploy.GatedDeltaRule(), pool_of(6, 4, HV=HV, K=K, V=V, dtype=pool.dtype)
    slots, seen = ints(4, 1, -1, dtype=torch.int64), ints(7, 3, 0)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "transpose_state_layout": True}
    for T, state, where in ((1, pool, {}), (4, ring, {"cache_seqlens": seen})):
        x, g, beta = tokens(3, T, gates="active")
        given = {**x, "g": g, "beta": beta, "initial_state": state, "state_indices": slots}
        yield lambda given=given, where=where: rule.fused_recurrent_gated_delta_rule(
            **given, **where, **options
        )
    x, a, b = tokens(1, 60)
    rest = (*HEADS, HV // H, True)
    yield lambda: rule.prepare_inputs(x["q"], x["k"], b, a, *rest, False, torch.zeros(60, dtype=torch.bool))
    y, g, beta = tokens(1, 60, gates="active")
    for state, entries in ((pool, None), (ring, (slots.clamp(0), slots.clamp(0)))):
        given = {**y, "g": g, "beta": beta, "initial_state": state, "state_indices": slots.clamp(0)}
        given |= {"cu_seqlens": offsets(20, 20, 20), "spec_state_offsets": entries}
        yield lambda given=given: rule.chunk_gated_delta_rule(**given, **options)
    windows, weight = torch.zeros(6, D, W + 3, dtype=BF16), torch.zeros(D, W, dtype=BF16)
    mixed = torch.randn(3, D, 4).bfloat16()
    yield lambda: lmdeploy.causal_conv1d_update(
        mixed[..., 0], windows, weight, None, "silu", None, slots.int()
    )
    yield lambda: lmdeploy.causal_conv1d_update(mixed, windows, weight, None, "silu", seen, slots.int())
    layer = SimpleNamespace(
        conv1d=SimpleNamespace(
            weight=weight[:, None], bias=None, causal_conv1d_func=SimpleNamespace(activation="silu")
        ),
        norm=lmdeploy_layer.build_rmsnorm_gated(V, dtype=BF16).requires_grad_(False), A_log=HEADS[0],
        dt_bias=HEADS[1], head_k_dim=K, head_v_dim=V, kv_ratio=HV // H, out_proj=lambda x: x,
        gated_delta=SimpleNamespace(use_qk_l2norm_in_kernel=True),
    )  # fmt: skip
    for N in (1, 5, 32):
        x = (torch.randn(1, N, D).to(BF16), torch.randn(1, N, HV, V).to(BF16))
        x += tuple(torch.randn(2, 1, N, HV).to(BF16))
        meta = SimpleNamespace(origin_state_ids=torch.arange(N))
        pools = (torch.zeros(32, D, W, dtype=BF16), pool)
        yield lambda x=x, meta=meta, pools=pools: lmdeploy_layer._decode_layer(
            layer, lambda *args: x, None, pools, meta
        )


def own_calls(pool, gates=("raw",), index_dtype=torch.int32, state_v_first=True):
    """Yield the calls of an engine on gdn itself: docs/serving.md and examples/serve.py."""
    for kind in gates:
        yield from own_decodes(pool, kind, index_dtype, state_v_first)
        yield from own_packets(pool, kind, index_dtype, state_v_first)
        yield from own_prompts(pool, kind, index_dtype, state_v_first)
    index, heads = ints(3, 1, 2, dtype=index_dtype), {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    heads["state_v_first"] = state_v_first
    mixed, logits = torch.randn(3, D).to(BF16), torch.randn(3, HV).to(BF16)
    given = (mixed, logits, logits, *HEADS, pool)
    yield lambda: api.decode_packed(*given, **heads, read_index=index)
    rows = {"cu_seqlens": ints(0, 2, 3, dtype=index_dtype), "max_seqlen": 2}
    yield lambda: api.decode_packed(*given, **heads, read_index=index[:2], **rows)
    windows, weight = torch.zeros(9, D, W - 1, dtype=BF16), torch.zeros(D, W, dtype=BF16)
    z, ones = torch.randn(3, HV, V).to(BF16), torch.ones(V, dtype=BF16)
    for norm in ({}, {"z": z, "norm_weight": ones}):
        yield lambda norm=norm: api.decode_step(
            mixed, windows, weight, None, logits, logits, *HEADS, pool, **heads, **norm, read_index=index
        )
    ring = torch.zeros(9, D, W - 1 + 3, dtype=BF16)
    x = torch.randn(3, 4, D).to(BF16)
    where = {"state_index": index, "activation": "silu"}
    yield lambda: gdn.causal_conv1d_update(x, ring, weight, **where, ring_pos=index)
    before, prompts = torch.zeros(2, D, W - 1, dtype=BF16), torch.randn(1, 130, D).to(BF16)
    offsets = ints(0, 100, 130, dtype=index_dtype)
    more = {"initial_state": before, "output_final_state": True, "cu_seqlens": offsets, "activation": "silu"}
    yield lambda: gdn.causal_conv1d(prompts, weight, **more)
    yield lambda: gdn.rms_norm_gated(x.view(3, 4, D)[..., :V], x[..., :V], ones)
    kept = torch.zeros(2, 3, 4, *pool.shape[1:], dtype=pool.dtype)
    layers = torch.stack([pool, pool])
    for extra in ({}, {"extra_dst_index": index + 3, "extra_step": index}):
        yield lambda extra=extra: gdn.commit(layers, kept, index, index, index, **extra)


def own_decodes(pool, gates, index_dtype, state_v_first):
    """Yield decodes of tokens and packets by each protocol, dense and packed."""
    index, ring = ints(3, 1, 2, dtype=index_dtype), torch.stack([pool[:4]] * 4)
    kept = torch.zeros(3, 4, *pool.shape[1:], dtype=pool.dtype)
    for T, lead in ((1, (3, 1)), (3, (3, 3)), (4, (3, 4)), (4, (1, 9))):
        x, first, second = tokens(*lead, gates=gates)
        raw = {"a": first, "b": second, "A_log": HEADS[0], "dt_bias": HEADS[1]}
        x |= raw if gates == "raw" else {"g": first, "beta": second}
        if lead[0] == 1:
            x |= {"cu_seqlens": ints(0, 4, 5, 9, dtype=index_dtype), "max_seqlen": 4}
        x |= {"state": pool, "state_v_first": state_v_first}
        table = torch.arange(3 * T).to(index_dtype).view(3, T)
        verify = {"read_index": index, "write": "none", "intermediate": kept}
        protocols = [
            {"state": pool[:3]},
            {"read_index": index},
            {"state": ring, "read_index": index, "ring_pos": index, "write": "all"},
            {"read_index": table, "num_accepted": index, "write_index": table, "write": "all"},
            verify,
            verify | {"intermediate_row": index},
            verify | {"parent": table},
            verify | {"parent": table, "intermediate_row": index},
            {"read_index": index, "write_index": index + 3},
        ]
        for where in protocols:
            yield lambda x=x, where=where: api.decode(**{**x, **where})
            yield lambda x=x, where=where: api.decode(**{**x, **where}, round_state=True)


def own_packets(pool, gates, index_dtype, state_v_first):
    """Yield packets in the chunk form, with few rows and with many."""
    layout = {"state_v_first": state_v_first}
    for N, T, P in ((1, 4, 20), (32, 4, 20), (3, 1, 16), (32, 1, 20), (5, 2, 16)):
        G, cursor = torch.zeros(32, P, HV, dtype=torch.float64), torch.zeros(32, dtype=index_dtype)
        history = {"history_u": torch.zeros(32, P, HV, V, dtype=BF16), "history_G": G, "cursor": cursor}
        history["history_k"] = torch.zeros(32, P, H, K, dtype=BF16)
        index = torch.arange(N).to(index_dtype)
        packed = {"cu_seqlens": torch.arange(N + 1).to(index_dtype) * T, "max_seqlen": T}
        for lead, rows in (((N, T), {}), ((1, N * T), packed)):
            x, first, second = tokens(*lead, gates=gates)
            raw = {"a": first, "b": second, "A_log": HEADS[0], "dt_bias": HEADS[1]}
            x |= raw if gates == "raw" else {"g": first, "beta": second}
            given = {**x, **rows, **layout, "state": pool, "read_index": index}
            yield lambda given=given, history=history: api.replay_decode(**given, **history)
            yield lambda given=given: api.decode(**given, exact_packet=False)
        layers = {name: x[None] for name, x in history.items() if name != "cursor"}
        yield lambda layers=layers, index=index, T=T, cursor=cursor: api.replay_commit(
            pool[None], **layers, cursor=cursor, index=index, accepted=index, room=T, **layout
        )


def own_prompts(pool, gates, index_dtype, state_v_first):
    """Yield prompts that continue and that do not, from slot to slot, with prefixes kept."""
    for N in (1, 3, 12):
        x, first, second = tokens(1, 66 * N, gates=gates)
        raw = {"a": first, "b": second, "A_log": HEADS[0], "dt_bias": HEADS[1]}
        x |= raw if gates == "raw" else {"g": first, "beta": second}
        index = torch.arange(N).to(index_dtype)
        x |= {"state": pool, "cu_seqlens": torch.arange(N + 1).to(index_dtype) * 66, "state_index": index}
        begins, splits = {"has_initial_state": index < 1}, {"out_state_index": index + N}
        kept = pool_of(2 * N, HV=HV, K=K, V=V, v_first=state_v_first)
        kept = {"checkpoints": kept, "checkpoint_every": 64, "checkpoint_offsets": index * 2}
        snapshot = {"snapshot_pos": index + 64, "snapshot_index": index + 12}
        for more in (
            {}, begins, splits, begins | splits, kept | begins, snapshot, snapshot | begins,
            snapshot | begins | splits, snapshot | kept | begins | splits, {"update_state": False},
        ):  # fmt: skip
            yield lambda x=x, more=more: api.prefill(**x, **more, state_v_first=state_v_first)


def history_calls(pool, gates=("raw",), index_dtype=torch.int32, state_v_first=True):
    """Yield steps on histories: single tokens, drafts in dense and in packed rows, layers' steps, folds."""
    sizes = {"num_k_heads": H, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V}
    layout = {"state_v_first": state_v_first}
    for N, T, P in ((1, 1, 16), (32, 1, 20), (3, 4, 16), (32, 4, 20), (5, 2, 12)):
        held = gdn.allocate_history_pool(32, **sizes, **layout, places=P, room=T, state_dtype=pool.dtype)
        index = torch.arange(N).to(index_dtype)
        packed = {"cu_seqlens": torch.arange(N + 1).to(index_dtype) * T, "max_seqlen": T}
        for lead, rows in (((N, T), {}), ((1, N * T), packed)):
            x, a, b = tokens(*lead, gates="raw")
            x |= {"a": a, "b": b, "A_log": HEADS[0], "dt_bias": HEADS[1], "pool": held, "read_index": index}
            for more in ({"use_history": True}, {"use_history": False}, {"num_accepted": index}, {}):
                yield lambda x=x | rows | more: api.decode_with_history(**x, **layout)
        yield lambda held=held, index=index: gdn.fold_history(held, index, **layout)


def int16_calls(pool, gates=("raw",), index_dtype=torch.int32, state_v_first=True):
    """Yield the calls of an engine whose pools have states in int16; `pool` has no states of its own."""
    sizes = {"num_v_heads": HV, "head_k_dim": K, "head_v_dim": V, "state_v_first": state_v_first}
    pool, ring = gdn.allocate_int16_pool(32, **sizes), gdn.allocate_int16_pool(9, 4, **sizes)
    layers, kept = gdn.allocate_int16_pool(2, 32, **sizes), torch.zeros(3, 4, *pool.state.shape[1:])
    index, layout = ints(3, 1, 2, dtype=index_dtype), {"state_v_first": state_v_first}
    for T, lead in ((1, (3, 1)), (4, (3, 4)), (4, (1, 9))):
        x, a, b = tokens(*lead, gates="raw")
        x |= {"a": a, "b": b, "A_log": HEADS[0], "dt_bias": HEADS[1], "state": pool, **layout}
        if lead[0] == 1:
            x |= {"cu_seqlens": ints(0, 4, 5, 9, dtype=index_dtype), "max_seqlen": 4}
        table = torch.arange(3 * T).to(index_dtype).view(3, T)
        verify = {"read_index": index, "write": "none", "intermediate": kept}
        for where in (
            {"read_index": index}, {"read_index": index, "write_index": index + 3},
            {"state": ring, "read_index": index, "ring_pos": index, "write": "all"},
            {"read_index": table, "num_accepted": index, "write_index": table, "write": "all"},
            verify, verify | {"parent": table, "intermediate_row": index},
        ):  # fmt: skip
            for is_rounded in (False, True):
                yield lambda x=x, where=where, r=is_rounded: api.decode(**{**x, **where}, round_state=r)
    yield from own_prompts(pool, "raw", index_dtype, state_v_first)
    heads = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V, **layout}
    mixed, logits = torch.randn(3, D).to(BF16), torch.randn(3, HV).to(BF16)
    yield lambda: api.decode_packed(mixed, logits, logits, *HEADS, pool, **heads, read_index=index)
    windows, weight = torch.zeros(9, D, W - 1, dtype=BF16), torch.zeros(D, W, dtype=BF16)
    gated = {"z": torch.randn(3, HV, V).to(BF16), "norm_weight": torch.ones(V, dtype=BF16)}
    for norm in ({}, gated):
        yield lambda norm=norm: api.decode_step(
            mixed, windows, weight, None, logits, logits, *HEADS, pool, **heads, **norm, read_index=index
        )
    moved = torch.stack([kept] * 2)
    for extra in ({}, {"extra_dst_index": index + 3, "extra_step": index}):
        yield lambda extra=extra: gdn.commit(layers, moved, index, index, index, **extra, **layout)


CALLS = {
    "history": history_calls,
    "gdn": own_calls,
    "vllm": vllm_calls,
    "sglang": sglang_calls,
    "lmdeploy": lmdeploy_calls,
}


@needs_triton
@pytest.mark.parametrize(
    "engine, state_dtype, options",
    [
        ("gdn", BF16, {}),
        ("gdn", torch.float32, {}),
        ("gdn", torch.float32, {"index_dtype": torch.int64}),
        ("gdn", torch.int16, {}),
        ("gdn", torch.int16, {"index_dtype": torch.int64, "state_v_first": False}),
        ("gdn", torch.float32, {"gates": ("active",), "state_v_first": False}),
        ("gdn", BF16, {"gates": ("raw", "active"), "index_dtype": torch.int64, "state_v_first": False}),
        ("vllm", BF16, {}),
        ("vllm", torch.float32, {"decay": "channel", "lower_bound": -5.0}),
        ("sglang", torch.float32, {"decay": "channel", "lower_bound": -5.0}),
        ("sglang", torch.float32, {}),
        ("sglang", BF16, {}),
        ("lmdeploy", torch.float32, {}),
        ("lmdeploy", BF16, {}),
        ("history", torch.float32, {}),
    ],
)
def test_nothing_is_left_to_compile(record_binaries, engine, state_dtype, options):
    """Every binary that the engine's calls launch is among those of the warmup, on an imagined H200."""
    asked = {"state_dtypes": (state_dtype,), "engines": (engine,), "backend": "triton", **options}
    warmed = record_binaries(lambda: api.warmup("cpu", **SIZES, **asked))
    is_int16 = state_dtype == torch.int16
    pool = None if is_int16 else pool_of(32, HV=HV, K=K, V=V, dtype=state_dtype)
    calls = int16_calls if is_int16 else CALLS[engine]
    for number, call in enumerate(calls(pool, **options)):
        missing = record_binaries(call) - warmed
        assert not missing, (number, sorted(job.name for job in missing))
    # the comparison can fail: another head size needs another binary
    other = record_binaries(lambda: api.warmup("cpu", **{**SIZES, "head_v_dim": 64}, **asked))
    assert record_binaries(next(calls(pool, **options))) - other


@needs_triton
@pytest.mark.parametrize(
    "change",
    [{"gates": ("active",)}, {"index_dtype": torch.int64}, {"state_v_first": False}],
    ids=["gates", "indices", "layout"],
)
def test_what_is_not_asked_for_is_left(record_binaries, change):
    """A warmup without an option does not compile the kernels of that option."""
    # short packets that write a state in fp32 are no packets of `packet_kernel`
    warmed = record_binaries(lambda: api.warmup("cpu", **SIZES, state_dtypes=(BF16,), backend="triton"))
    pool = pool_of(32, HV=HV, K=K, V=V, dtype=BF16)
    missing = set().union(*(record_binaries(call) - warmed for call in own_calls(pool, **change)))
    expected = {"decode_kernel", "replay_kernel", "packet_kernel"}
    assert expected <= {job.kernel.__name__ for job in missing}


@needs_triton
def test_compilations_are_named(monkeypatch):
    """The warmup names each compilation, and calls a listener that was there before."""
    import triton

    from gdn.backends.triton.launch.compilations import compilations

    seen = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **it: seen.append(it["fn"].name)
    )
    before = triton.knobs.runtime.jit_post_compile_hook

    class Compiled:
        name = "decode_kernel"

    with compilations() as names:
        triton.knobs.runtime.jit_post_compile_hook(key=1, repr="", fn=Compiled, compile={})
    assert names == seen == ["decode_kernel"] and triton.knobs.runtime.jit_post_compile_hook is before


@pytest.mark.gpu
def test_a_second_warmup_compiles_nothing():
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("nothing compiles")
    sizes = {**SIZES, "max_rows": 4}
    api.warmup("cuda", **sizes)
    assert not any("compiled" in line for line in api.warmup("cuda", **sizes))
