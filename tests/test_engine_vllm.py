"""Test gdn's plug-in on vLLM's own modules, from its wheel (`make engines`).

The layer is built by vLLM's constructor through its registry, called through its operator with metadata of
its own builder, compared with the recurrence in fp64. vLLM has no compiled extension here; its platform is
a stand-in that says what an H200 says.
"""

import os
from types import SimpleNamespace

import pytest
import torch
from kit import engine_sources, vllm_engine
from kit.serving import error
from kit.vllm_engine import metadata

from gdn.integrations import usage, vllm, vllm_layer
from gdn.reference import layer as reference_layers
from gdn.reference.recurrence import gated_delta_rule

pytestmark = pytest.mark.skipif(
    engine_sources.find("vllm") is None, reason="no sources of vLLM: make engines has them"
)
H, HV, K, V, W, HIDDEN, BLOCKS = 2, 4, 32, 32, 4, 48, 16
D = 2 * H * K + HV * V
PREFIX = "model.layers.0.linear_attn"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return vllm_engine.load(tmp_path_factory.mktemp("group"))


def build(package, drafts=0, interleaved=False, dtype=torch.float32, mode="none", is_olmo=False):
    """Return vLLM's layer, as its models make it, and its metadata builder."""
    from transformers import OlmoHybridConfig, Qwen3NextConfig

    model = (OlmoHybridConfig if is_olmo else Qwen3NextConfig)(
        hidden_size=HIDDEN, linear_num_key_heads=H, linear_num_value_heads=HV, linear_key_head_dim=K,
        linear_value_head_dim=V, linear_conv_kernel_dim=W, num_attention_heads=2,
    )  # fmt: skip
    config = package.config
    config.model_config = SimpleNamespace(dtype=dtype, hf_text_config=model)
    config.speculative_config = (
        SimpleNamespace(
            num_speculative_tokens=drafts, use_eagle_block_drop=lambda: False, parallel_drafting=False
        ) if drafts else None
    )  # fmt: skip
    config.cache_config.mamba_cache_mode = mode
    config.cache_config.mamba_cache_dtype = config.cache_config.mamba_ssm_cache_dtype = "auto"
    config.cache_config.mamba_block_size = 64
    config.compilation_config.static_forward_context.clear()
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with package.set_config(config):
            if is_olmo:
                layer = package.olmo.OlmoHybridGatedDeltaNetAttention(model, config, PREFIX)
            else:
                layer = package.qwen.QwenGatedDeltaNetAttention(
                    model, config, PREFIX, gqa_interleaved_layout=interleaved
                )
    finally:
        torch.set_default_dtype(default)
    for name, p in layer.named_parameters():
        p.data.copy_(torch.randn(p.shape) / (1 if p.dim() == 1 or "conv1d" in name else p.shape[-1] ** 0.5))
    windows = torch.full((BLOCKS, W - 1 + drafts, D), float("nan"), dtype=dtype)
    layer.kv_cache = (windows, torch.full((BLOCKS, HV, V, K), float("nan")))
    spec = package.MambaSpec(
        block_size=64, shapes=((W - 1 + drafts, D), (HV, V, K)), dtypes=(dtype, torch.float32),
        num_speculative_blocks=drafts, mamba_cache_mode=mode,
        num_prefill_checkpoint_blocks=int(mode == "align"), prefill_checkpoint_alignment=64,
    )  # fmt: skip
    with package.set_config(config):
        builder = package.attention.GDNAttentionMetadataBuilder(spec, [PREFIX], config, torch.device("cpu"))
    return layer, builder


def run(package, layer, info, x):
    """Call vLLM's operator on mixed_qkv, b and a, as the layer does between its projections."""
    mixed, b, a = x
    out = torch.zeros(len(mixed), HV, V, dtype=mixed.dtype)
    with package.context({PREFIX: info}, package.config):
        torch.ops.vllm.qwen_gdn_attention_core(mixed.clone(), b, a, out, PREFIX)
    return out


def expected_of(layer, x):
    """Return the rule's output [T, HV, V] of one sequence in fp64, before the norm."""
    mixed, b, a = (t.double() for t in x)
    weight = layer.conv1d.weight.detach().double().flatten(1)
    mixed, _ = reference_layers.causal_conv1d(mixed[None], weight, activation="silu")
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    o, S = gated_delta_rule(
        q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V)), a[None], b[None],
        A_log=layer.A_log.detach(), dt_bias=layer.dt_bias.detach(), use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, state_v_first=True,
        initial_state=torch.zeros(1, HV, V, K), allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
    )  # fmt: skip
    return o[0], S[0]


def sequence(T):
    return torch.randn(T, D), torch.randn(T, HV), torch.randn(T, HV)


def joined(sequences, spans):
    return tuple(torch.cat([x[part][s] for x, s in zip(sequences, spans, strict=True)]) for part in range(3))


@pytest.fixture(autouse=True)
def no_gradient():
    usage.reset()
    with torch.inference_mode():
        yield


def test_prompts_then_mixed_batches_then_decode(package):
    """The registered layer serves every kind of batch with the metadata of vLLM's builder.

    The blocks hold NaN at first, so a new request that read its block would show it; block 0 stays untouched.
    """
    layer, builder = build(package)
    assert isinstance(layer, package.qwen.QwenGatedDeltaNetAttention) and layer.is_served
    assert type(layer).__name__ == "GdnQwenGatedDeltaNetAttention"
    total, table = 12, torch.tensor([[3], [7]], dtype=torch.int32)
    xs = [sequence(total) for _ in range(2)]
    out = [torch.zeros(total, HV, V) for _ in xs]

    def step(spans):
        counts, seen = [s.stop - s.start for s in spans], [s.start for s in spans]
        rows = [n for n in (0, 1) if counts[n] > 0]
        info = metadata(package, builder, [counts[n] for n in rows], [seen[n] for n in rows], table[rows])
        y = run(package, layer, info, joined([xs[n] for n in rows], [spans[n] for n in rows]))
        for n, part in zip(rows, y.split([counts[n] for n in rows]), strict=True):
            out[n][spans[n]] = part
        return info

    first = step([slice(0, 5), slice(0, 0)])
    assert first.num_prefills == 1 and first.num_decodes == 0
    # request 0 decodes while a prompt begins, then continues its prompt
    mixed = step([slice(5, 6), slice(0, 4)])
    assert (mixed.num_prefills, mixed.num_decodes) == (1, 1)
    step([slice(6, 7), slice(4, 8)])
    for t in range(4):
        info = step([slice(7 + t, 8 + t), slice(8 + t, 9 + t)])
        assert info.num_decodes == 2
    for n, end in ((0, 11), (1, 12)):
        o, S = expected_of(layer, tuple(t[:end] for t in xs[n]))
        assert error(out[n][:end], o) < 1e-5 and error(layer.kv_cache[1][table[n, 0]], S) < 1e-5
    assert layer.kv_cache[1][0].isnan().all() and layer.kv_cache[0][0].isnan().all()
    assert usage.served == {("vllm", "prefill"): 3, ("vllm", "decode"): 6} and not usage.rejected


def test_padding_of_a_graph(package):
    """Rows of a captured batch without a request have block 0: they output zeros and write nothing."""
    layer, builder = build(package)
    info = metadata(package, builder, [1, 1], [5, 5], torch.zeros(2, 1, dtype=torch.int32))
    y = run(package, layer, info, sequence(2))
    assert not y.any() and all(t.isnan().all() for t in layer.kv_cache)


@pytest.mark.parametrize("with_prompt", [False, True])
def test_drafts(package, with_prompt):
    """MTP drafts follow protocol P2 on vLLM's tables, alone and beside a prompt."""
    layer, builder = build(package, drafts=2)
    assert package.qwen.envs.VLLM_GDN_DECODE_KERNEL == "cuda"
    xs, total = [sequence(20), sequence(20)], 6
    tables = torch.tensor([[3, 4, 5], [7, 8, 9]], dtype=torch.int32)
    prompts = metadata(package, builder, [total, total], [0, 0], tables)
    run(package, layer, prompts, joined(xs, [slice(0, total)] * 2))
    at, accepted, checked = [total, total], torch.tensor([1, 1], dtype=torch.int32), 0
    fresh = sequence(3)
    for keep in ([2, 3], [1, 2], [3, 1]):
        spans = [slice(p, p + 3) for p in at]
        counts, seen, rows = [3, 3], list(at), tables
        drafting = {"num_accepted_tokens": accepted, "num_decode_draft_tokens_cpu": torch.tensor([2, 2])}
        x = joined(xs, spans)
        if with_prompt:
            counts, seen = [3, 3, 3], [*at, 0]
            rows = torch.cat([tables, torch.tensor([[11, 12, 13]], dtype=torch.int32)])
            drafting["num_accepted_tokens"] = torch.cat([accepted, torch.ones(1).int()])
            drafting["num_decode_draft_tokens_cpu"] = torch.tensor([2, 2, -1])
            x = joined([*xs, fresh], [*spans, slice(0, 3)])
        info = metadata(package, builder, counts, seen, rows, **drafting)
        assert info.num_spec_decodes == 2 and info.num_prefills == int(with_prompt)
        y = run(package, layer, info, x).split(counts)
        for n in range(2):
            o, _ = expected_of(layer, tuple(t[: spans[n].stop] for t in xs[n]))
            assert error(y[n], o[spans[n]]) < 1e-5
            at[n] += keep[n]
            checked += 1
        if with_prompt:
            assert error(y[2], expected_of(layer, fresh)[0]) < 1e-5
        accepted = torch.tensor(keep, dtype=torch.int32)
    assert checked == 6 and usage.served["vllm", "verify"] == 3


def test_the_norm_is_part_of_the_step_where_vllm_has_an_operator_for_it(package):
    """In bf16 vLLM's layer calls one operator with the gate; a whole forward equals the reference."""
    layer, builder = build(package, dtype=torch.bfloat16)
    assert layer.enable_fused_gdn_spec_decode and package.config.speculative_config is None
    assert not build(package, dtype=torch.bfloat16, interleaved=True)[0].enable_fused_gdn_spec_decode
    layer, builder = build(package, dtype=torch.bfloat16)
    table, x = torch.tensor([[3]], dtype=torch.int32), torch.randn(9, HIDDEN).bfloat16()
    parts = []
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9)):
        info = metadata(package, builder, [stop - start], [start], table)
        with package.context({PREFIX: info}, package.config):
            parts.append(layer(x[start:stop]))
    p = {name: value.detach().double() for name, value in layer.named_parameters()}
    mixed, z = (x.double() @ p["in_proj_qkvz.weight"].T).split([D, HV * V], -1)
    b, a = (x.double() @ p["in_proj_ba.weight"].T).chunk(2, -1)
    o, _ = expected_of(layer, (mixed, b, a))
    y = reference_layers.rms_norm_gated(
        o, z.unflatten(1, (HV, V)), p["norm.weight"], eps=layer.norm.eps, activation="silu"
    )
    assert error(torch.cat(parts), y.flatten(1) @ p["out_proj.weight"].T) < 2e-2
    assert usage.served["vllm", "decode"] == 3


def test_olmos_layer(package, monkeypatch):
    """OLMo's operator contains the projections and the norm, for every kind of batch."""
    # without a GPU vLLM has a stand-in for Triton, which has no allocator
    monkeypatch.setattr(package.olmo, "set_triton_allocator", lambda device: None)
    xs, tables = [torch.randn(14, HIDDEN) for _ in range(2)], torch.tensor([[3, 4], [7, 8]]).int()
    for drafts, steps in ((0, [(5, 3), (1, 4), (1, 1), (1, 1)]), (1, [(5, 4), (2, 2), (2, 2)])):
        layer, builder = build(package, drafts=drafts, is_olmo=True)
        assert isinstance(layer, package.olmo.OlmoHybridGatedDeltaNetAttention) and layer.is_served
        assert layer.allow_neg_eigval and not hasattr(layer, "norm")
        usage.reset()
        seen, parts = [0, 0], [[], []]
        for counts in steps:
            drafting = {}
            if drafts > 0 and seen[0] > 0:
                # the packet before, or the prompt, has been accepted as a whole
                drafting["num_accepted_tokens"] = torch.tensor([2, 2] if seen[0] > 5 else [1, 1]).int()
                drafting["num_decode_draft_tokens_cpu"] = torch.tensor([1, 1])
            info = metadata(package, builder, counts, seen, tables[:, : 1 + drafts].contiguous(), **drafting)
            x = torch.cat([x[s : s + n] for x, s, n in zip(xs, seen, counts, strict=True)])
            # a captured batch has more rows than tokens
            x, out = torch.cat([x, x[:2]]), torch.full((len(x) + 2, HIDDEN), float("nan"))
            with package.context({PREFIX: info}, package.config):
                layer(x, out)
            for n, y in enumerate(out[:-2].split(counts)):
                parts[n].append(y)
                seen[n] += counts[n]
            assert not out[-2:].any()
        p = {name: value.detach().double() for name, value in layer.named_parameters()}
        for n in range(2):
            x = xs[n][: seen[n]].double()
            mixed, z = (x @ p["in_proj_qkvg.weight"].T).split([D, HV * V], -1)
            o, S = expected_of(layer, (mixed, x @ p["b_proj.weight"].T, x @ p["a_proj.weight"].T))
            y = reference_layers.rms_norm_gated(
                o, z.unflatten(1, (HV, V)), p["o_norm.weight"], eps=layer.o_norm.eps, activation="silu"
            )
            assert error(torch.cat(parts[n]), y.flatten(1) @ p["o_proj.weight"].T) < 1e-5
            assert error(layer.kv_cache[1][tables[n, drafts]], S) < 1e-5
        roles = {role for _, role in usage.served}
        assert roles == ({"prefill", "verify"} if drafts else {"prefill", "decode"}) and not usage.rejected


def test_snapshots_for_prefix_caching(package):
    """With mamba_cache_mode=align a prompt is not split: the state at a block's end goes to its block."""
    layer, builder = build(package, mode="align")
    assert layer.get_prefill_checkpoint_alignment() == vllm_layer.CHECKPOINT_ALIGNMENT
    x, table = sequence(100), torch.tensor([[2, 5]], dtype=torch.int32)
    cache = package.config.cache_config
    cache.hash_block_size = cache.cache_hit_alignment_tokens = 64
    info = metadata(package, builder, [100], [0], table)
    assert info.checkpoint.offsets == [64] and info.checkpoint.state_indices.tolist() == [2]
    y = run(package, layer, info, x)
    o, S = expected_of(layer, x)
    assert error(y, o) < 1e-5 and error(layer.kv_cache[1][5], S) < 1e-5
    # block 2 continues after 64 tokens as if the prompt had ended there
    _, at_64 = expected_of(layer, tuple(t[:64] for t in x))
    assert error(layer.kv_cache[1][2], at_64) < 1e-5
    assert torch.equal(layer.kv_cache[0][2], x[0][64 - (W - 1) : 64])
    # another request of the same beginning: vLLM copies the block first
    for t in layer.kv_cache:
        t[9] = t[2]
    info = metadata(package, builder, [36], [64], torch.tensor([[2, 9]], dtype=torch.int32))
    again = run(package, layer, info, tuple(t[64:] for t in x))
    assert error(again, o[64:]) < 1e-5


def test_what_decides_in_vllm(package, monkeypatch):
    """Every flag and default that the page names, in vLLM's own code."""
    config, qwen = package.config, package.qwen
    build(package)
    # prefill on Hopper: FlashInfer, unless a flag names triton
    assert qwen._resolve_gdn_prefill_backend(config) == ("auto", "flashinfer")
    monkeypatch.setattr(config, "additional_config", {"gdn_prefill_backend": "triton"})
    assert qwen._resolve_gdn_prefill_backend(config) == ("triton", "triton")
    monkeypatch.setattr(config, "additional_config", {})
    for capability, k, cuda, backend in (((10, 0), 128, 13, "flashinfer"), ((10, 0), 128, 12, "triton"),
                                         ((10, 0), 64, 13, "triton"), ((12, 0), 128, 13, "flashinfer"),
                                         ((8, 0), 128, 13, "triton")):  # fmt: skip
        from vllm.platforms.interface import DeviceCapability

        monkeypatch.setattr(
            package.machine,
            "get_device_capability",
            staticmethod(lambda device_id=0, c=capability: DeviceCapability(*c)),
        )
        monkeypatch.setattr(package.machine, "get_cuda_runtime_major", staticmethod(lambda c=cuda: c))
        monkeypatch.setattr(config.model_config.hf_text_config, "linear_key_head_dim", k)
        assert qwen._resolve_gdn_prefill_backend(config) == ("auto", backend), capability
        sentences = vllm_layer.needed_flags(capability, cuda)
        assert any("--gdn-prefill-backend" in s for s in sentences) >= (backend == "flashinfer")
    # drafts: the CUDA operator, unless the environment names triton
    from vllm import envs

    assert envs.VLLM_GDN_DECODE_KERNEL == "cuda" and envs.VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE
    assert any("VLLM_GDN_DECODE_KERNEL" in s for s in vllm_layer.needed_flags((8, 0), 13))
    monkeypatch.setenv("VLLM_GDN_DECODE_KERNEL", "triton")
    assert vllm_layer.needed_flags((8, 0), 13) == []


def test_the_operator_for_prompts_is_gdns(package):
    """Whoever calls vLLM's ChunkGatedDeltaRule gets gdn, whatever vLLM resolves."""
    layer, _ = build(package)
    rule = layer.chunk_gated_delta_rule
    assert isinstance(rule, package.qwen.ChunkGatedDeltaRule)
    T, cu = 9, torch.tensor([0, 4, 9]).int()
    q, k, v = torch.randn(1, T, H, K), torch.randn(1, T, H, K), torch.randn(1, T, HV, V)
    g, beta, S = -torch.rand(1, T, HV), torch.rand(1, T, HV), torch.randn(2, HV, V, K)
    expected = gated_delta_rule(q, k, v, g, beta, initial_state=S, cu_seqlens=cu, state_v_first=True)
    o, final = rule(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=S, output_final_state=True, cu_seqlens=cu,
        use_qk_l2norm_in_kernel=False, aiter_prefill_metadata=None,
    )  # fmt: skip
    assert error(o, expected[0]) < 1e-5 and error(final, expected[1]) < 1e-5


def test_batch_invariance_is_answered_where_gdn_is(package, monkeypatch):
    """With VLLM_BATCH_INVARIANT=1 vLLM's selector refuses its own backend and takes ours."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    kind = package.registry.MambaAttentionBackendEnum.GDN_ATTN
    select = package.selector._cached_get_mamba_attn_backend
    layer, _ = build(package)
    select.cache_clear()
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)
    assert select(kind).__name__ == "GatedDeltaBackend"
    assert select(kind).get_builder_cls() is package.attention.GDNAttentionMetadataBuilder
    monkeypatch.setattr(vllm_layer, "built", [])
    monkeypatch.setattr("gdn.integrations.vllm_backend.built", [])
    select.cache_clear()
    with pytest.raises(RuntimeError, match="batch_invariant mode is not supported"):
        select(kind)
    assert not package.attention.GDNAttentionBackend.supports_batch_invariance()
    select.cache_clear()


def test_a_layer_that_gdn_does_not_serve_is_vllms(package, monkeypatch):
    """The reason is counted, and the layer calls vLLM's own functions."""
    monkeypatch.setattr(vllm_layer, "reason_to_reject", lambda *args: "expected something else")
    layer, builder = build(package)
    assert not layer.is_served
    assert usage.rejected == {("QwenGatedDeltaNetAttention", "expected something else"): 1}
    info = metadata(package, builder, [1], [5], torch.tensor([[3]], dtype=torch.int32))
    called = []
    monkeypatch.setattr(package.qwen, "causal_conv1d_update", lambda *a, **k: called.append(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(package, layer, info, sequence(1))
    assert called
    vllm_layer.built.pop()


def test_a_block_has_no_memory_for_a_history(package):
    """A layer may not exceed the size of a page, and prefix caching copies windows and states alone."""
    from vllm.model_executor.models import interfaces, qwen3_5, qwen3_next
    from vllm.v1.worker import mamba_utils

    models = qwen3_next.Qwen3NextForCausalLM, qwen3_5.Qwen3_5ForConditionalGeneration
    for model in models:
        assert len(model.get_mamba_state_copy_func()) == 2
        assert not interfaces.supports_replayssm(model)  # --use-replayssm raises for it
    layer, builder = build(package, mode="align")
    shapes, dtypes = tuple(layer.get_state_shape()), layer.get_state_dtype()
    assert len(shapes) == 2
    size = builder.kv_cache_spec.page_size_bytes
    assert package.MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes, page_size_padded=size).shapes
    more = {"shapes": (*shapes, (16, HV, V)), "dtypes": (*dtypes, torch.bfloat16), "page_size_padded": size}
    with pytest.raises(AssertionError):
        _ = package.MambaSpec(block_size=64, **more).page_size_bytes

    # a third tensor of a block stays where it was
    layer.kv_cache = (*layer.kv_cache, torch.ones(BLOCKS, 16, HV, V))
    spec, names = builder.kv_cache_spec, ("src_ptrs", "dst_ptrs", "sizes")
    buffers = SimpleNamespace(offset=0, **{x: SimpleNamespace(np=[None] * 4) for x in names})
    group = SimpleNamespace(layer_names=[PREFIX], kv_cache_spec=spec)
    mamba_utils.collect_mamba_copy_meta(
        buffers, SimpleNamespace(kv_cache_groups=[group]),
        {spec.mamba_type: models[0].get_mamba_state_copy_func()}, [0], 1, 2, 0,
        SimpleNamespace(block_ids=[[3, 5, 6]]), {PREFIX: layer},
    )  # fmt: skip
    assert buffers.offset == 2
    assert buffers.dst_ptrs.np[:2] == [x[6].data_ptr() for x in layer.kv_cache[:2]]


def test_registering_twice_does_nothing(package):
    before = dict(package.custom_op.op_registry_oot)
    vllm.register_layers()
    assert package.custom_op.op_registry_oot == before
    names = {"QwenGatedDeltaNetAttention", "OlmoHybridGatedDeltaNetAttention", "ChunkGatedDeltaRule"}
    assert names <= set(before) and os.environ.get("GDN_ENGINES") is None
