"""Test gdn's plug-in on SGLang's own modules for a decay per key channel, from its wheel (`make engines`).

SGLang's KDAAttnBackend calls the kernel that its dispatcher builds, with its own metadata; outputs and states
are compared with the recurrence in fp64. Functions of the same signature stand for SGLang's convolution.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from kit import engine_sources, sglang_engine
from kit.serving import error

from gdn.integrations import sglang, sglang_dispatch, sglang_kda, usage, vllm_conv
from gdn.reference import layer as reference_layers
from gdn.reference.recurrence import gated_delta_rule

pytestmark = pytest.mark.skipif(
    engine_sources.find("sglang") is None, reason="no sources of SGLang: make engines has them"
)
H, K, W, SLOTS = 3, 16, 4, 9
P = H * K
ROLES = usage.CHANNEL_ROLES


@pytest.fixture(scope="module")
def package():
    return sglang_engine.load()


@pytest.fixture
def flags(package, monkeypatch):
    return sglang_engine.use_flags(package, monkeypatch)


def dispatcher(package):
    return sglang_engine.build(package, package.channels.KDAKernelDispatcher)


def kernels(package):
    return sglang_engine.serves(dispatcher(package), ("decode", "extend", "verify"), sglang_kda.KDAKernel)


def test_each_flag_selects_its_phase(package, flags):
    assert kernels(package) == [False, False, False]
    flags.linear_attn_prefill_backend = "gdn"
    assert kernels(package) == [False, True, False]
    flags.linear_attn_decode_backend = "gdn"
    assert kernels(package) == [True, True, True]
    # what SGLang's hook sets for Kimi's models with drafts
    flags.linear_attn_verify_backend = "nv_cutedsl"
    assert kernels(package) == [True, True, False]
    flags.linear_attn_verify_backend, flags.linear_attn_decode_backend = "gdn", None
    assert kernels(package) == [False, True, True]
    flags.linear_attn_backend, flags.linear_attn_verify_backend = "gdn", None
    assert kernels(package) == [True, True, True]
    made = dispatcher(package)
    assert made.supports_packed_decode and made.supports_packed_decode_safe_gate
    assert isinstance(made.decode_kernel, package.channel_triton.TritonKDAKernel)
    assert made.effective_extend_kernel(-5.0, 1) is made.extend_kernel
    # without the plug-in the name is an error
    with pytest.raises(ValueError, match="Unsupported KDA decode backend"):
        sglang_engine.build(package, package.own_channels)


class Layer(SimpleNamespace):
    def __call__(self, forward_batch, **tokens):
        """Decode as SGLang's layer does, which finds its backend in a global."""
        return self.backend.forward_decode(self, forward_batch, **tokens)


def layer_of(bound, H=H, K=K):
    P = H * K
    return Layer(
        layer_id=0, conv_weights=torch.randn(3 * P, W), bias=None, A_log=torch.randn(1, 1, H, 1),
        dt_bias=torch.randn(P), lower_bound=bound, q_dim=P, k_dim=P, v_dim=P, num_q_heads=H, num_k_heads=H,
        num_v_heads=H, head_q_dim=K, head_k_dim=K, head_v_dim=K,
    )  # fmt: skip


def conv_of_prompts(x, weight, bias, activation, conv_states, has_initial_state, cache_indices,
                    query_start_loc, **rest):  # fmt: skip
    return vllm_conv.causal_conv1d_fn(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation,
        null_block_id=-1,
    )  # fmt: skip


def conv_step(x, conv_state, weight, bias, activation, conv_state_indices, **rest):
    if x.dim() == 3:
        # of drafts [N, D, T]: the windows in the pool are read only
        rows = conv_state[conv_state_indices.long()]
        tokens = torch.cat([rows, x], 2)[..., -(x.shape[2] + W - 1) :]
        return torch.nn.functional.silu(torch.nn.functional.conv1d(tokens, weight[:, None], groups=3 * P))
    return vllm_conv.causal_conv1d_update(
        x.clone(), conv_state, weight, bias, activation, conv_state_indices, null_block_id=-1
    )


def backend_of(package, monkeypatch, T=3, H=H, K=K, dtype=torch.float32):
    """Return SGLang's KDAAttnBackend around pools, its convolution on the CPU, and the pools."""
    P = H * K
    pools = SimpleNamespace(
        conv=[torch.randn(SLOTS, W - 1, 3 * P, dtype=dtype)], temporal=torch.randn(SLOTS, H, K, K),
        replayssm_d=None, replayssm_k=None, replayssm_g=None, intermediate_ssm=torch.zeros(4, T, H, K, K),
        intermediate_conv_window=[torch.zeros(4, T, W - 1, 3 * P)],
    )  # fmt: skip
    made = object.__new__(package.channels.KDAAttnBackend)
    made._fused_override_notice = None
    made.kernel_dispatcher, made.accept_lens_pool = dispatcher(package), None
    made._fused_chain_verify_fn, made.verify_intermediate_state_indices = None, torch.arange(4).int()
    made.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda layer: pools, size=4)
    made._track_mamba_state_decode = lambda *args: None
    monkeypatch.setattr(package.channels, "causal_conv1d_fn", conv_of_prompts)
    monkeypatch.setattr(package.channels, "causal_conv1d_update", conv_step)
    return made, pools


def sequence(T):
    return torch.randn(T, 3 * P), torch.randn(T, P), torch.randn(T, H)


def expected_of(layer, x):
    """Return the rule's output [T, H, K] and final state of one sequence in fp64."""
    H, K, P = layer.num_k_heads, layer.head_k_dim, layer.k_dim
    mixed, a, b = (t.double() for t in x)
    mixed, _ = reference_layers.causal_conv1d(mixed[None], layer.conv_weights.double(), activation="silu")
    q, k, v = (part.unflatten(2, (H, K)) for part in mixed.split(P, -1))
    o, S = gated_delta_rule(
        q, k, v, a.unflatten(1, (H, K))[None], b[None], A_log=layer.A_log.flatten(),
        dt_bias=layer.dt_bias.view(H, K), lower_bound=layer.lower_bound, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, state_v_first=True,
        initial_state=torch.zeros(1, H, K, K),
    )  # fmt: skip
    return o[0], S[0]


def batch_of(lengths, seen, is_verify=False, **fields):
    mode = SimpleNamespace(is_target_verify=lambda: is_verify, is_draft_extend_v2=lambda: False)
    return SimpleNamespace(
        forward_mode=mode, extend_prefix_lens=torch.tensor(seen).int(), extend_seq_lens_cpu=lengths,
        batch_size=len(lengths), req_pool_indices=torch.arange(len(lengths)), **fields,
    )  # fmt: skip


def joined(xs, spans):
    mixed, a, b = (torch.cat([x[part][s] for x, s in zip(xs, spans, strict=True)]) for part in range(3))
    return mixed, a[None], b[None]


@pytest.mark.parametrize("bound", [None, -5.0])
def test_prompts_decode_and_drafts(package, flags, monkeypatch, bound):
    """SGLang's backend from prompt to verification, with its metadata, equals one pass in fp64."""
    flags.linear_attn_decode_backend = flags.linear_attn_prefill_backend = "gdn"
    made, pools = backend_of(package, monkeypatch)
    layer, slots = layer_of(bound), torch.tensor([3, 7, -1], dtype=torch.int32)
    # SGLang clears a slot when a request gets it
    pools.conv[0][[3, 7]] = pools.temporal[[3, 7]] = 0
    xs, lengths = [sequence(12), sequence(12)], [6, 4]
    made.forward_metadata = package.Metadata(
        query_start_loc=torch.tensor([0, 6, 10]).int(), mamba_cache_indices=slots[:2]
    )
    made.forward_metadata.logical_num_tokens, made.forward_metadata.has_mamba_track_mask = None, False
    mixed, a, b = joined(xs, [slice(0, 6), slice(0, 4)])
    # a padded graph has more tokens than the batch
    more = [torch.cat([x, x[:, :2] if x.dim() == 3 else x[:2]], x.dim() - 2) for x in (mixed, a, b)]
    o = made.forward_extend(layer, batch_of(lengths, [0, 0]), *more)
    assert not o[:, 10:].any()
    parts = [[part] for part in o[0, :10].split(lengths)]
    # a row of padding beside the requests
    made.forward_metadata = package.Metadata(query_start_loc=torch.arange(4).int(), mamba_cache_indices=slots)
    for t in range(3):
        spans = [slice(n + t, n + t + 1) for n in lengths]
        mixed, a, b = joined([*xs, xs[0]], [*spans, slice(0, 1)])
        o = made.forward_decode(layer, batch_of([1] * 3, [0] * 3), mixed, a, b)
        assert not o[0, 2].any()
        for n in range(2):
            parts[n].append(o[0, n : n + 1])
    before = pools.temporal.clone()
    at = [n + 3 for n in lengths]
    made.forward_metadata = package.Metadata(
        query_start_loc=torch.tensor([0, 3, 6]).int(), mamba_cache_indices=slots[:2]
    )
    spec = SimpleNamespace(draft_token_num=3, ragged_verify_layout=None)
    o = made.forward_extend(
        layer,
        batch_of([3, 3], at, is_verify=True, spec_info=spec),
        *joined(xs, [slice(n, n + 3) for n in at]),
    )
    assert torch.equal(pools.temporal, before)
    for n, x in enumerate(xs):
        parts[n].append(o[0, 3 * n : 3 * n + 3])
        expected, _ = expected_of(layer, tuple(t[: at[n] + 3] for t in x))
        _, S = expected_of(layer, tuple(t[: at[n]] for t in x))
        assert error(torch.cat(parts[n]), expected) < 1e-5 and error(pools.temporal[slots[n]], S) < 1e-5
        for t in range(3):
            _, S = expected_of(layer, tuple(x[: at[n] + t + 1] for x in x))
            assert error(pools.intermediate_ssm[n, t], S) < 1e-5
    assert usage.served == {
        ("sglang", ROLES["prefill"]): 1, ("sglang", ROLES["decode"]): 3, ("sglang", ROLES["verify"]): 1,
    }  # fmt: skip
    assert not usage.rejected


def k3_of(package, layer):
    """Return what SGLang's layer of Kimi K3 reads of itself; the norm's own call must not come."""
    H, K = layer.num_v_heads, layer.head_v_dim
    norm = SimpleNamespace(weight=torch.randn(K), eps=1e-5)
    made = SimpleNamespace(
        attn=layer, o_norm=norm, head_dim=K, use_full_rank_gate=True, do_fuse_qkvbfg=True,
        _kda_hip_fused_decode_ready=False, _kda_fused_decode_ready=False, all_reduce_fusion=False,
        o_proj=lambda x: (x, None),
        forward_qkvbfg_fused=lambda x, defer_f_b: x.split([3 * H * K, H, H * K, H * K], 1),
    )  # fmt: skip
    package.k3.KimiK3DeltaAttention._prepare_fused_decode(made)
    assert made._kda_fused_decode_ready
    return made


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_fused_decode_of_kimi_k3(package, flags, monkeypatch, dtype, limit):
    """K3's layer at SGLang's sizes: its convolution, rule and norm in one call, a row of padding beside."""
    H, K, T, called = 12, 128, 3, []

    def fused(*args, **kwargs):
        called.append(1)
        return torch.zeros(1, 2, H, K, dtype=dtype)

    monkeypatch.setattr(package.channels.kda_fused_decode, "kda_fused_decode", fused)
    layer = layer_of(-5.0, H, K)
    k3, x = k3_of(package, layer), torch.randn(T, 5 * H * K + H).to(dtype)
    mode = SimpleNamespace(is_decode=lambda: True, is_target_verify=lambda: False)
    batch = SimpleNamespace(forward_mode=mode, logical_forward_mode=mode)

    def steps():
        layer.backend, pools = backend_of(package, monkeypatch, H=H, K=K, dtype=dtype)
        pools.conv[0][3] = pools.temporal[3] = 0
        layer.backend.forward_metadata = package.Metadata(
            query_start_loc=torch.arange(3).int(), mamba_cache_indices=torch.tensor([3, -1]).int()
        )
        rows = (torch.stack([row, row]) for row in x)
        return pools, [package.k3.KimiK3DeltaAttention.forward(k3, row, None, batch, None) for row in rows]

    flags.linear_attn_decode_backend = "gdn"
    pools, out = steps()
    assert not called and usage.served == {("sglang", ROLES["decode"]): T} and not usage.rejected
    mixed, b, a, z = x.split([3 * H * K, H, H * K, H * K], 1)
    o, S = expected_of(layer, (mixed, a, b))
    expected = reference_layers.rms_norm_gated(
        o, z.unflatten(1, (H, K)), k3.o_norm.weight, eps=1e-5, activation="sigmoid"
    )
    assert error(torch.stack([y[0] for y in out]), expected.flatten(1)) < limit
    assert not any(y[1].any() for y in out)
    assert error(pools.temporal[3], S) < limit and error(pools.conv[0][3], mixed[-3:]) < 1e-7
    if dtype is torch.bfloat16:
        # without the flag the kernel is SGLang's
        flags.linear_attn_decode_backend = None
        steps()
        assert called == [1] * T and usage.served == {("sglang", ROLES["decode"]): T}


def test_tree_verification_and_unpacked_decode(package, flags):
    """Drafts that form a tree start from their parent's state; decode takes q, k and v apart as well."""
    flags.linear_attn_backend = "gdn"
    made, layer, states = dispatcher(package), layer_of(-5.0), torch.randn(SLOTS, H, K, K)
    kept, parent = torch.zeros(1, 3, H, K, K), torch.tensor([[-1, 0, 0]])
    q, k, v = torch.randn(3, 1, 3, H, K)
    a, b, begin = torch.randn(1, 3, P), torch.randn(1, 3, H), states[4].clone()
    heads = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "lower_bound": -5.0}

    def expected(places):
        return gated_delta_rule(
            q[:, places], k[:, places], v[:, places], a.unflatten(2, (H, K))[:, places], b[:, places],
            A_log=layer.A_log.flatten(), dt_bias=layer.dt_bias.view(H, K), lower_bound=-5.0,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
            state_v_first=True, initial_state=begin[None],
        )  # fmt: skip

    o = made.target_verify(
        q=q, k=k, v=v, a=a, b=b, ssm_states=states, cache_indices=torch.tensor([4]).int(),
        query_start_loc=torch.tensor([0, 3]).int(), intermediate_states_buffer=kept,
        intermediate_state_indices=torch.arange(1).int(), cache_steps=3, retrieve_parent_token=parent,
        **heads,
    )  # fmt: skip
    for places in ([0, 1], [0, 2]):
        y, S = expected(places)
        assert error(o[:, places], y) < 1e-5 and error(kept[0, places[-1]], S[0]) < 1e-5
    first = made.decode(
        q[:, :1], k[:, :1], v[:, :1], a[:, :1], b[:, :1], ssm_states=states, **heads,
        cache_indices=torch.tensor([4]).int(), query_start_loc=torch.tensor([0, 1]).int(),
    )  # fmt: skip
    assert error(first, expected([0])[0]) < 1e-5 and error(states[4], expected([0])[1][0]) < 1e-5


def test_states_for_the_prefix_cache(package, flags):
    """extend writes one state of each request in fp32, or returns the state before every chunk."""
    flags.linear_attn_prefill_backend = "gdn"
    made, layer, x = dispatcher(package), layer_of(-5.0), sequence(150)
    mixed, _ = reference_layers.causal_conv1d(x[0][None], layer.conv_weights, activation="silu")
    q, k, v = (part.unflatten(2, (H, K)) for part in mixed.split(P, -1))
    expected, S = expected_of(layer, x)
    at = {n: expected_of(layer, tuple(t[: 64 * n] for t in x))[1] for n in (1, 2)}
    common = {
        "g": x[1].unflatten(1, (H, K))[None], "beta": x[2][None], "A_log": layer.A_log,
        "dt_bias": layer.dt_bias, "lower_bound": -5.0, "beta_is_raw": True,
        "cache_indices": torch.tensor([5]).int(), "query_start_loc": torch.tensor([0, 150]).int(),
    }  # fmt: skip
    track, states = torch.full((1, H, K, K), float("nan")), torch.zeros(SLOTS, H, K, K)
    o, h = made.extend(
        q, k, v, ssm_states=states, **common, return_intermediate_states=True, track_state=track,
        track_chunk_idx=torch.tensor([2]).int(), track_ssm_h_src=torch.tensor([2]),
    )  # fmt: skip
    assert h is None and error(o[0], expected) < 1e-5 and error(states[5], S) < 1e-5
    assert error(track[0], at[2]) < 1e-5
    states.zero_()
    o, h = made.extend(q, k, v, ssm_states=states, **common, return_intermediate_states=True)
    assert error(o[0], expected) < 1e-5 and error(h[0, 1], at[1]) < 1e-5 and error(h[0, 2], at[2]) < 1e-5
    # only the final state is read: no other is stored
    states.zero_()
    o, h = made.extend(
        q, k, v, ssm_states=states, **common, return_intermediate_states=True,
        track_ssm_h_src=torch.empty(0),
    )  # fmt: skip
    assert h is None and error(states[5], S) < 1e-5


def test_a_rejected_call_is_sglangs(package, flags, monkeypatch):
    """Rings of ReplaySSM, and gates activated before, go to the kernel that ours is a subclass of."""
    flags.linear_attn_backend = "gdn"
    made, layer, called, own = dispatcher(package), layer_of(None), [], package.channel_triton
    for name in (
        "fused_recurrent_linear_replayssm_decode",
        "fused_sigmoid_gating_delta_rule_update",
        "chunk_kda",
    ):
        monkeypatch.setattr(own, name, lambda name=name, **kwargs: called.append(name))
    x, states, ring = sequence(2), torch.randn(SLOTS, H, K, K), torch.zeros(1)
    before, slots = states.clone(), torch.tensor([3, 7]).int()
    q, k, v = torch.randn(3, 1, 2, H, K)
    heads = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "ssm_states": states, "cache_indices": slots}
    made.packed_decode(
        *x, **heads, scale=K**-0.5, num_v_heads=H, head_v_dim=K, lower_bound=None, replayssm_d=ring,
        replayssm_k=ring, replayssm_g=ring, replayssm_write_pos=ring, replayssm_force_flush=None,
    )  # fmt: skip
    made.target_verify(
        q=q, k=k, v=v, a=x[1][None], b=x[2][None], **heads, query_start_loc=torch.tensor([0, 1, 2]).int(),
        intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=1,
        retrieve_parent_token=None, cache_ring=True, replayssm_rawv=ring,
    )  # fmt: skip
    made.extend(
        q, k, v, x[1].view(1, 2, H, K), x[2][None], **heads, query_start_loc=torch.tensor([0, 1, 2]).int()
    )
    assert called == [
        "fused_recurrent_linear_replayssm_decode", "fused_sigmoid_gating_delta_rule_update", "chunk_kda"
    ]  # fmt: skip
    assert torch.equal(states, before) and len(usage.rejected) == 3 and not usage.served


@pytest.mark.parametrize("change", ["rings", "deferred gate", "split filters"])
def test_a_rejected_step_is_sglangs(package, flags, monkeypatch, change):
    """Rings of ReplaySSM, K3's gate on ROCm and filters apart: the method of SGLang's backend runs, once."""
    flags.linear_attn_decode_backend = "gdn"
    made, pools = backend_of(package, monkeypatch)
    layer, called = layer_of(None), []
    monkeypatch.setattr(type(made).__mro__[1], "forward_decode", lambda self, *args: called.append(args) or 7)
    monkeypatch.setattr(made, "_track_mamba_state_decode", lambda *args: 1 / 0)
    if change == "rings":
        pools.replayssm_d = torch.zeros(1)
    elif change == "deferred gate":
        layer._k3_deferred_f_b = True
    else:
        layer.conv_weights = layer.conv_weights.split(P)
    made.forward_metadata = package.Metadata(
        query_start_loc=torch.arange(2).int(), mamba_cache_indices=torch.tensor([3]).int()
    )
    mixed, a, b = sequence(1)
    states = pools.temporal.clone()
    assert made.forward_decode(layer, None, mixed, a[None], b[None]) == 7 and len(called) == 1
    assert torch.equal(states, pools.temporal) and not usage.served
    ((name, _),) = usage.rejected
    assert name == "KDAAttnBackend.forward_decode"


def test_what_decides_in_sglang(package, flags, monkeypatch):
    """Every flag and default that the page names, in SGLang's own code."""
    from sglang.srt.arg_groups import glm5_next_hook, kimi_k3_hook, model_hook
    from sglang.srt.configs import hybrid_arch
    from sglang.srt.environ import envs

    channels, own = package.channels, package.channel_triton.TritonKDAKernel
    assert flags.linear_attn_backend == "triton"
    # without a bound SGLang decodes packed, with one it does not
    assert own.supports_packed_decode and not getattr(own, "supports_packed_decode_safe_gate", False)
    # its fused verification passes the dispatcher by: off by default, and ours does not offer it
    assert not envs.SGLANG_OPT_FUSED_KDA_VERIFY.get() and own.supports_fused_chain_verify
    assert not sglang_kda.KDAKernel.supports_fused_chain_verify
    source = inspect.getsource(model_hook)
    assert '"KimiLinearForCausalLM",\n        "KimiK3ForConditionalGeneration",\n    ):\n' in source
    assert 'model_arch == "Glm5NextForConditionalGeneration"' in source
    # Kimi's models pin verification where its own flag does not say otherwise, GLM's on SM100
    pinned = inspect.getsource(kimi_k3_hook.apply_kimi_k3_spec_backend_defaults)
    assert "cfg.linear_attn_verify_backend is None" in pinned
    assert (
        'linear_attn_verify_backend="nv_cutedsl"' in pinned
        and "is_sm100" not in pinned.split("DSPARK-only")[0]
    )
    pinned = inspect.getsource(glm5_next_hook.apply_glm5_next_spec_backend_defaults)
    assert 'linear_attn_verify_backend="nv_cutedsl"' in pinned and "is_sm100" in pinned
    assert "get_device_capability()[0] != 10" in inspect.getsource(
        channels.KDAAttnBackend._can_run_dspark_cutedsl_mtp
    )
    # the convolution, and Kimi K3's fused decode, pass the dispatcher by: ours is a subclass of the backend
    made = channels.KDAAttnBackend
    assert made.__module__ == sglang_kda.__name__
    assert "_k3_fused_decode_args" in inspect.getsource(made.__mro__[1].forward_decode)
    # prompts on SM100 and SM103 with a bound
    execution = channels.get_exec()
    execution.overlap = SimpleNamespace(enable_two_batch_overlap=False)
    execution.graph = SimpleNamespace(
        cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend=None))
    )
    monkeypatch.setattr(channels, "is_cuda", lambda: True)
    for capability in ((9, 0), (10, 0), (10, 3), (12, 0)):
        for bound in (None, -5.0):
            rule = SimpleNamespace(linear_attn_config={"gate_lower_bound": bound})
            monkeypatch.setattr(hybrid_arch, "hybrid_kda_config", lambda config, rule=rule: rule)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
            found = channels.flashinfer_kda_prefill_default(SimpleNamespace(model_config=None))
            assert (found == "flashinfer") == (capability[0] == 10 and bound is not None)
            sentences = sglang_dispatch.needed_flags(capability, 13)
            assert any(s.startswith("prompts") for s in sentences) >= (found is not None)
    assert sglang.KDAKernel is sglang_kda.KDAKernel
