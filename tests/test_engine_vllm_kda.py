"""Test gdn's plug-in on vLLM's own layers with a decay per key channel, from its wheel (`make engines`).

The layers of Kimi-Linear, Kimi K3, GLM-5.3-Flash and Ling-3.0 are built by vLLM's constructors through its
registry, called through their forward with metadata of vLLM's builders, and compared with fp64.
"""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from kit import engine_sources, vllm_engine
from kit.serving import error
from kit.vllm_engine import metadata

from gdn.integrations import usage, vllm_kda_layer, vllm_layer
from gdn.reference import layer as reference_layers
from gdn.reference.recurrence import gated_delta_rule

pytestmark = pytest.mark.skipif(
    engine_sources.find("vllm") is None, reason="no sources of vLLM: make engines has them"
)
H, K, W, HIDDEN, BLOCKS = 3, 16, 4, 40, 16
P = H * K
PREFIX = "model.layers.0.self_attn"
MODELS = ["kimi", "kimi bounded", "k3", "k3 unbounded", "glm", "ling", "ling unbounded"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    made = vllm_engine.load(tmp_path_factory.mktemp("group"))
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as kimi
    from vllm.model_executor.models import bailing_moe_v3 as ling
    from vllm.models.glm5next.common import kda as glm
    from vllm.models.kimi_k3.nvidia import kda as k3
    from vllm.models.kimi_k3.nvidia import kda_metadata
    from vllm.models.kimi_k3.nvidia.specialized_decode.runtime import specialized_decode_config

    made.kimi, made.ling, made.glm, made.k3, made.k3_metadata = kimi, ling, glm, k3, kda_metadata
    made.k3_specialized = specialized_decode_config
    return made


@pytest.fixture(autouse=True)
def no_gradient():
    usage.reset()
    with torch.inference_mode():
        yield


def build(package, model, drafts=0, mode="none"):
    """Return vLLM's layer, as its model file makes it, and its metadata builder."""
    from transformers import Glm5NextTextConfig

    config, dtype = package.config, torch.float32
    config.model_config = SimpleNamespace(dtype=dtype, hf_text_config=SimpleNamespace())
    config.speculative_config = (
        SimpleNamespace(
            num_speculative_tokens=drafts, use_eagle_block_drop=lambda: False, parallel_drafting=False
        ) if drafts else None
    )  # fmt: skip
    cache = config.cache_config
    cache.mamba_cache_mode, cache.mamba_block_size = mode, 64
    cache.mamba_cache_dtype = cache.mamba_ssm_cache_dtype = "auto"
    config.compilation_config.static_forward_context.clear()
    base = {"hidden_size": HIDDEN, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    with package.set_config(config):
        if model.startswith("kimi"):
            rule = {"head_dim": K, "num_heads": H, "short_conv_kernel_size": W}
            rule["gate_lower_bound"] = -4.0 if "bounded" in model else None
            layer = package.kimi.KimiGatedDeltaNetAttention(
                SimpleNamespace(linear_attn_config=rule, **base), config, PREFIX
            )
        elif model.startswith("k3"):
            rule = {"head_dim": K, "num_heads": H, "short_conv_kernel_size": W, "use_full_rank_gate": True}
            rule |= {"gate_lower_bound": None if "unbounded" in model else -4.0, "kda_layers": [0]}
            layer = package.k3.KimiK3DeltaAttention(
                SimpleNamespace(linear_attn_config=rule, **base), config, PREFIX
            )
        elif model == "glm":
            text = Glm5NextTextConfig(
                linear_head_dim=K, linear_num_heads=H, linear_conv_kernel_dim=W, hidden_size=HIDDEN
            )
            layer = package.glm.Glm5NextLinearAttention(text, config, PREFIX)
        else:
            text = SimpleNamespace(
                head_dim=K, num_attention_heads=H, short_conv_kernel_size=W, no_kda_lora=True,
                kda_safe_gate="unbounded" not in model, kda_lower_bound=-3.0, **base,
            )  # fmt: skip
            layer = package.ling.BailingMoeV3KimiDeltaAttention(
                text, None, 0, PREFIX, config.model_config, cache, drafts
            )
    for name, p in layer.named_parameters():
        p.data.copy_(torch.randn(p.shape) / (1 if p.dim() == 1 or "conv1d" in name else p.shape[-1] ** 0.5))
    # vLLM's norm is a Triton kernel on CUDA
    layer.o_norm._forward_method = layer.o_norm.forward_native
    (window, state), (_, kept) = layer.get_state_shape(), layer.get_state_dtype()
    assert (window, state, kept) == ((W - 1 + drafts, 3 * P), (H, K, K), torch.float32)
    layer.kv_cache = (
        torch.full((BLOCKS, *window), float("nan")), torch.full((BLOCKS, *state), float("nan"))
    )  # fmt: skip
    spec = layer.get_kv_cache_spec(config)
    builder = layer.get_attn_backend().get_builder_cls()
    assert (builder is package.k3_metadata.KimiK3KDAMetadataBuilder) == model.startswith("k3")
    with package.set_config(config):
        return layer, builder(spec, [PREFIX], config, torch.device("cpu"))


def run(package, layer, info, x):
    """Return the layer's output of x [tokens, HIDDEN], called as its model calls it."""
    with package.context({PREFIX: info}, package.config):
        if isinstance(layer, package.ling.BailingMoeV3KimiDeltaAttention):
            out = torch.empty_like(x)
            layer(x, None, out)
            return out
        return layer(x, None)


def expected_of(layer, x):
    """Return the layer's output and the final state of one sequence [T, HIDDEN] in fp64."""
    p = {name: value.detach().double() for name, value in layer.named_parameters()}
    x = x.double()

    def project(name, value=x):
        return value @ p[f"{name}.weight"].T

    if isinstance(layer, vllm_kda_layer.KimiK3Layer):
        mixed, z, f_a, b = project("in_proj_qkvgfab")[:, : 4 * P + K + H].split([3 * P, P, K, H], -1)
        a, bound = project("f_b_proj", f_a), layer.gate_lower_bound
        filters = p["conv1d.weight"].flatten(1)
    elif "in_proj_qkvgfab.weight" in p:
        mixed, b, f_a = project("in_proj_qkvgfab").split([3 * P, H, K], -1)
        a, z = project("f_b_proj", f_a), project("g_b_proj", project("g_a_proj"))
        bound = layer.gate_lower_bound
        filters = p["conv1d.weight"].flatten(1)
    else:
        filters = torch.cat([p[f"{name}_conv1d.weight"].flatten(1) for name in "qkv"])
        if "qkvb_proj.weight" in p:
            mixed, b = project("qkvb_proj").split([3 * P, H], -1)
            a, z, bound = project("f_proj"), project("g_proj"), layer.lower_bound if layer.safe_gate else None
        else:
            mixed, b, f_a, g_a = project("in_proj_qkvbfg_a").split([3 * P, H, K, K], -1)
            a, z, bound = project("f_b_proj", f_a), project("g_b_proj", g_a), layer.kda_lower_bound
    mixed, _ = reference_layers.causal_conv1d(mixed[None], filters, activation="silu")
    q, k, v = (part.unflatten(2, (H, K)) for part in mixed.split(P, -1))
    o, S = gated_delta_rule(
        q, k, v, a.unflatten(1, (H, K))[None], b[None], A_log=p["A_log"].flatten(), lower_bound=bound,
        dt_bias=p["dt_bias"].view(H, K), use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        use_qk_l2norm_in_kernel=True, state_v_first=True, initial_state=torch.zeros(1, H, K, K),
    )  # fmt: skip
    y = reference_layers.rms_norm_gated(
        o[0], z.unflatten(1, (H, K)), p["o_norm.weight"], eps=layer.o_norm.eps, activation="sigmoid"
    )
    return project("o_proj", y.flatten(1)), S[0]


@pytest.mark.parametrize("model", MODELS)
def test_prompts_then_mixed_batches_then_decode(package, model):
    """The registered layer serves every kind of batch; blocks hold NaN at first, and block 0 stays so."""
    layer, builder = build(package, model)
    assert isinstance(layer, vllm_kda_layer.ChannelLayer) and layer.is_served
    total, table = 12, torch.tensor([[3], [7]], dtype=torch.int32)
    xs, out = torch.randn(2, total, HIDDEN), torch.zeros(2, total, HIDDEN)

    def step(*spans):
        rows = [n for n, s in enumerate(spans) if s.stop > s.start]
        counts, seen = [spans[n].stop - spans[n].start for n in rows], [spans[n].start for n in rows]
        info = metadata(package, builder, counts, seen, table[rows])
        y = run(package, layer, info, torch.cat([xs[n, spans[n]] for n in rows]))
        for n, part in zip(rows, y.split(counts), strict=True):
            out[n, spans[n]] = part
        return info

    assert step(slice(0, 5), slice(0, 0)).num_prefills == 1
    # request 0 decodes while a prompt begins, then continues its prompt
    mixed = step(slice(5, 6), slice(0, 4))
    assert (mixed.num_prefills, mixed.num_decodes) == (1, 1)
    step(slice(6, 7), slice(4, 8))
    for t in range(4):
        assert step(slice(7 + t, 8 + t), slice(8 + t, 9 + t)).num_decodes == 2
    for n, end in ((0, 11), (1, 12)):
        y, S = expected_of(layer, xs[n, :end])
        assert error(out[n, :end], y) < 1e-5 and error(layer.kv_cache[1][table[n, 0]], S) < 1e-5
    assert all(pool[0].isnan().all() for pool in layer.kv_cache)
    names = usage.CHANNEL_ROLES
    assert usage.served == {("vllm", names["prefill"]): 3, ("vllm", names["decode"]): 6}
    assert not usage.rejected


@pytest.mark.parametrize("with_prompt", [False, True])
@pytest.mark.parametrize("model", ["kimi", "k3", "glm", "ling"])
def test_drafts(package, model, with_prompt):
    """Drafts follow protocol P2 on vLLM's tables, alone and beside a prompt."""
    layer, builder = build(package, model, drafts=2)
    xs, fresh = torch.randn(2, 20, HIDDEN), torch.randn(3, HIDDEN)
    tables = torch.tensor([[3, 4, 5], [7, 8, 9]], dtype=torch.int32)
    run(package, layer, metadata(package, builder, [6, 6], [0, 0], tables), xs[:, :6].flatten(0, 1))
    at, accepted = [6, 6], torch.tensor([1, 1], dtype=torch.int32)
    for keep in ([2, 3], [1, 2], [3, 1]):
        counts, seen, rows = [3, 3], list(at), tables
        drafting = {"num_accepted_tokens": accepted, "num_decode_draft_tokens_cpu": torch.tensor([2, 2])}
        x = torch.cat([xs[n, at[n] : at[n] + 3] for n in range(2)])
        if with_prompt:
            counts, seen, x = [3, 3, 3], [*at, 0], torch.cat([x, fresh])
            rows = torch.cat([tables, torch.tensor([[11, 12, 13]], dtype=torch.int32)])
            drafting["num_accepted_tokens"] = torch.cat([accepted, torch.ones(1).int()])
            drafting["num_decode_draft_tokens_cpu"] = torch.tensor([2, 2, -1])
        info = metadata(package, builder, counts, seen, rows, **drafting)
        assert info.num_spec_decodes == 2 and info.num_prefills == int(with_prompt)
        y = run(package, layer, info, x).split(counts)
        for n in range(2):
            expected, _ = expected_of(layer, xs[n, : at[n] + 3])
            assert error(y[n], expected[at[n] :]) < 1e-5
            at[n] += keep[n]
        if with_prompt:
            assert error(y[2], expected_of(layer, fresh)[0]) < 1e-5
        accepted = torch.tensor(keep, dtype=torch.int32)
    assert usage.served["vllm", usage.CHANNEL_ROLES["verify"]] == 3 and not usage.rejected


@pytest.mark.parametrize("model", ["kimi", "k3", "glm", "ling"])
def test_snapshots_for_prefix_caching(package, model, monkeypatch):
    """With mamba_cache_mode=align a prompt is not split: the state at a block's end goes to its block."""
    # K3's builder finds a row's blocks by a kernel, where the other one has operators
    table_of_blocks = package.attention.mamba_get_block_table_tensor
    monkeypatch.setattr(package.k3_metadata, "_mamba_get_block_table_tensor", table_of_blocks)
    layer, builder = build(package, model, mode="align")
    assert layer.get_prefill_checkpoint_alignment() == vllm_layer.CHECKPOINT_ALIGNMENT
    x, table = torch.randn(100, HIDDEN), torch.tensor([[2, 5]], dtype=torch.int32)
    cache = package.config.cache_config
    cache.hash_block_size = cache.cache_hit_alignment_tokens = 64
    info = metadata(package, builder, [100], [0], table)
    assert info.checkpoint.offsets == [64] and info.checkpoint.state_indices.tolist() == [2]
    y, (expected, S) = run(package, layer, info, x), expected_of(layer, x)
    assert error(y, expected) < 1e-5 and error(layer.kv_cache[1][5], S) < 1e-5
    assert error(layer.kv_cache[1][2], expected_of(layer, x[:64])[1]) < 1e-5
    # another request of the same beginning: vLLM copies the block first
    for pool in layer.kv_cache:
        pool[9] = pool[2]
    info = metadata(package, builder, [36], [64], torch.tensor([[2, 9]], dtype=torch.int32))
    assert error(run(package, layer, info, x[64:]), expected[64:]) < 1e-5


def test_drafts_beside_single_tokens_of_k3(package):
    """K3's builder keeps rows without drafts as single tokens; vLLM's other builder makes prompts of them."""
    layer, builder = build(package, "k3", drafts=2)
    xs, tables = torch.randn(3, 10, HIDDEN), torch.tensor([[3, 4, 5], [7, 8, 9], [10, 11, 12]]).int()
    run(package, layer, metadata(package, builder, [6] * 3, [0] * 3, tables), xs[:, :6].flatten(0, 1))
    drafting = {
        "num_accepted_tokens": torch.ones(3).int(), "num_decode_draft_tokens_cpu": torch.tensor([2, -1, 2]),
    }  # fmt: skip
    info = metadata(package, builder, [3, 1, 3], [6] * 3, tables, **drafting)
    assert (info.num_spec_decodes, info.num_decodes, info.num_prefills) == (2, 1, 0)
    usage.reset()
    counts = [3, 1, 3]
    tokens = torch.cat([x[6 : 6 + n] for x, n in zip(xs, counts, strict=True)])
    for x, n, y in zip(xs, counts, run(package, layer, info, tokens).split(counts), strict=True):
        assert error(y, expected_of(layer, x[: 6 + n])[0][6:]) < 1e-5
    assert error(layer.kv_cache[1][7], expected_of(layer, xs[1, :7])[1]) < 1e-5
    roles = usage.CHANNEL_ROLES
    assert usage.served == {("vllm", roles["verify"]): 1, ("vllm", roles["decode"]): 1}


def test_recoverssm_is_vllms(package, monkeypatch):
    """--use-replayssm with drafts: K3's layer stays vLLM's, and the reason is counted."""
    monkeypatch.setattr(vllm_layer, "built", [])
    monkeypatch.setattr(package.config.cache_config, "use_kda_recoverssm", True)
    layer, _ = build(package, "k3", drafts=2)
    assert layer.use_recoverssm and not layer.is_served and layer.step() is None
    ((name, reason),) = usage.rejected
    assert name == "KimiK3DeltaAttention" and "--use-replayssm" in reason


def test_what_decides_in_vllm(package, monkeypatch):
    """Every flag and default that the page names, in vLLM's own code; none matters to gdn's layers."""
    resolve, bf16 = package.glm._resolve_kda_prefill_backend, torch.bfloat16
    # prompts of GLM on Hopper: FlashKDA, unless --kda-prefill-backend names triton
    assert resolve("auto", 128, bf16, -5.0) == "flashkda" == resolve("flashkda", 128, bf16, -5.0)
    assert resolve("triton", 128, bf16, -5.0) == resolve("auto", 64, bf16, -5.0) == "triton"
    assert resolve("auto", 128, bf16, None) == resolve("auto", 128, torch.float16, -5.0) == "triton"
    # K3's own layer: FlashKDA, and a fused kernel for single tokens in bf16 with 12, 24, 48 or 96 heads
    assert package.k3.resolve_kda_prefill_backend("auto", 128, bf16, torch.float32, -5.0) == "flashkda"
    decide, sizes = package.k3.resolve_kda_decode_backend, (128, 4, 0, bf16, bf16, torch.float32)
    monkeypatch.setattr(torch.ops._C, "fused_kda_decode", None, raising=False)
    assert decide("auto", 12, *sizes) == "native" and decide("triton", 12, *sizes) == "triton"
    assert decide("auto", 8, *sizes) == "triton"
    # on sm_100 a decode of the whole model, which calls no layer, if it is asked for
    specialized = package.k3_specialized
    assert specialized(SimpleNamespace(additional_config={})) is None
    source = inspect.getsource(sys.modules[specialized.__module__])
    assert "current_platform.is_device_capability_family(100)" in source and "latency_specialized" in source
    # GLM's and Kimi's layers break a graph that is captured in pieces, Ling's is an operator of its own
    made = vllm_kda_layer.make_channel_layers()
    names = {name for _, name, _ in vllm_kda_layer.LAYERS}
    assert set(made) == names <= set(package.custom_op.op_registry_oot)
    breaks = {name: hasattr(vars(layer).get("_forward"), "__wrapped__") for name, layer in made.items()}
    assert breaks == {
        "KimiGatedDeltaNetAttention": True, "KimiK3DeltaAttention": True, "Glm5NextLinearAttention": True,
        "BailingMoeV3KimiDeltaAttention": False,
    }  # fmt: skip
    build(package, "ling")
    operators = package.config.compilation_config.splitting_ops
    assert operators is None or "vllm::bailing_v3_kda_attention" in operators


@pytest.mark.parametrize("model", ["kimi", "k3", "glm", "ling"])
def test_a_layer_that_gdn_does_not_serve_is_vllms(package, model, monkeypatch):
    """The reason is counted, and the layer calls vLLM's own functions; a profile run calls none."""
    monkeypatch.setattr(vllm_layer, "reason_to_reject", lambda *args: "expected something else")
    monkeypatch.setattr(vllm_layer, "built", [])
    layer, builder = build(package, model)
    assert not layer.is_served and list(usage.rejected.values()) == [1]
    assert layer.get_prefill_checkpoint_alignment() is None
    info = metadata(package, builder, [1], [5], torch.tensor([[3]], dtype=torch.int32))
    called, module = [], getattr(package, model)
    monkeypatch.setattr(module, "causal_conv1d_update", lambda *a, **k: called.append(1) or 1 / 0)
    monkeypatch.setattr(package.ling, "fused_kda_gate", lambda g, *a, **k: g.unflatten(-1, (H, K)))
    with pytest.raises(ZeroDivisionError):
        run(package, layer, info, torch.randn(1, HIDDEN))
    assert called
    with package.context(None, package.config):
        assert build(package, model)[0].step() is None
