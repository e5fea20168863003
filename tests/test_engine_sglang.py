"""Test gdn's plug-in on SGLang's own modules, from its wheel (`make engines`).

SGLang's loader runs the plug-in, its dispatcher builds gdn's kernel from its flags, and its backend calls it
with its metadata; outputs and states are compared with the recurrence in fp64. SGLang's convolution has a
Triton kernel, in the place of which a function of the same signature runs on the CPU.
"""

from types import SimpleNamespace

import pytest
import torch
from kit import engine_sources, sglang_engine
from kit.serving import error

from gdn.integrations import sglang, sglang_dispatch, usage, vllm_conv
from gdn.ops.gate import gate
from gdn.reference import layer as reference_layers
from gdn.reference.recurrence import gated_delta_rule

pytestmark = pytest.mark.skipif(
    engine_sources.find("sglang") is None, reason="no sources of SGLang: make engines has them"
)
H, HV, K, V, W, SLOTS = 2, 4, 32, 32, 4, 9
D = 2 * H * K + HV * V


@pytest.fixture(scope="module")
def package():
    return sglang_engine.load()


@pytest.fixture
def flags(package, monkeypatch):
    return sglang_engine.use_flags(package, monkeypatch)


def dispatcher(package):
    return sglang_engine.build(package, package.backend.GDNKernelDispatcher)


def kernels(package):
    phases = ("decode", "extend", "verify", "tree_verify")
    return sglang_engine.serves(dispatcher(package), phases, sglang.GDNKernel)


def test_the_name_is_a_backend(package, flags):
    """Each flag selects gdn for its phase; without a flag SGLang's dispatcher is as it was."""
    assert kernels(package) == [False, False, False, False]
    flags.linear_attn_prefill_backend = "gdn"
    assert kernels(package) == [False, True, False, False]
    flags.linear_attn_decode_backend = "gdn"
    # SGLang writes "triton" for verification that has no flag
    assert kernels(package) == [True, True, True, True]
    flags.linear_attn_verify_backend = "triton"
    assert kernels(package) == [True, True, False, False]
    flags.linear_attn_verify_backend, flags.linear_attn_decode_backend = "gdn", None
    assert kernels(package) == [False, True, True, True]
    flags.linear_attn_backend, flags.linear_attn_verify_backend = "gdn", None
    assert kernels(package) == [True, True, True, True]
    assert dispatcher(package).supports_packed_decode
    made = dispatcher(package).decode_kernel
    assert isinstance(made, package.triton.TritonGDNKernel)
    assert isinstance(made, package.triton.LinearAttnKernelBase)


def test_without_the_plugin_the_name_is_an_error(package, flags):
    """The check can fail: SGLang's own dispatcher rejects every name that it does not know."""
    flags.linear_attn_backend = "gdn"
    backends = package.utils.resolve_linear_attn_backends()
    assert backends.decode.is_custom()
    with pytest.raises(ValueError, match="Unsupported GDN decode backend"):
        package.own(backends.decode, backends.prefill, backends.verify)
    flags.linear_attn_backend = "something"
    with pytest.raises(ValueError, match="Unsupported GDN decode backend"):
        dispatcher(package)


def layer_of(package):
    weight = torch.randn(D, W)
    return SimpleNamespace(
        layer_id=0, conv_weights=weight, bias=None, activation="silu", A_log=torch.randn(HV),
        dt_bias=torch.randn(HV), q_dim=H * K, k_dim=H * K, v_dim=HV * V, num_q_heads=H, num_k_heads=H,
        num_v_heads=HV, head_q_dim=K, head_k_dim=K, head_v_dim=V,
    )  # fmt: skip


def backend_of(package, pools, monkeypatch):
    """Return SGLang's GDNAttnBackend around two pools, its convolution on the CPU."""
    made = object.__new__(package.backend.GDNAttnBackend)
    made.kernel_dispatcher = dispatcher(package)
    drafts = SimpleNamespace(intermediate_ssm=pools.get("states"), intermediate_conv_window=[None])
    cache = SimpleNamespace(
        conv=[pools["windows"]], temporal=pools["temporal"], replayssm_d=None, replayssm_k=None,
        replayssm_g=None, replayssm_rawv=None, **vars(drafts),
    )  # fmt: skip
    made.req_to_token_pool = SimpleNamespace(
        mamba2_layer_cache=lambda layer: cache, mamba_pool=SimpleNamespace(mamba_cache=cache)
    )
    made.enable_mis, made.mis_metadata, made._use_strided_target_verify_qkv = False, None, True
    made._track_mamba_state_decode = lambda *args: None
    monkeypatch.setattr(package.backend, "causal_conv1d_fn", conv_of_prompts)
    monkeypatch.setattr(package.backend, "causal_conv1d_update", conv_step)
    monkeypatch.setattr(package.backend, "fused_gdn_gating", gating)
    return made


def conv_of_prompts(x, weight, bias, activation, conv_states, has_initial_state, cache_indices,
                    query_start_loc, **rest):  # fmt: skip
    return vllm_conv.causal_conv1d_fn(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation,
        null_block_id=-1,
    )  # fmt: skip


def conv_step(x, conv_state, weight, bias, activation, conv_state_indices, **rest):
    return vllm_conv.causal_conv1d_update(
        x.clone(), conv_state, weight, bias, activation, conv_state_indices, null_block_id=-1
    )


def gating(A_log, a, b, dt_bias):
    g, beta = gate(a, b, A_log, dt_bias)
    return g.unsqueeze(0), beta.unsqueeze(0)


def expected_of(layer, x):
    """Return the rule's output [T, HV, V] and final state of one sequence in fp64."""
    mixed, a, b = (t.double() for t in x)
    mixed, _ = reference_layers.causal_conv1d(mixed[None], layer.conv_weights.double(), activation="silu")
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    o, S = gated_delta_rule(
        q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V)), a[None], b[None],
        A_log=layer.A_log, dt_bias=layer.dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        use_qk_l2norm_in_kernel=True, state_v_first=True, initial_state=torch.zeros(1, HV, V, K),
    )  # fmt: skip
    return o[0], S[0]


def sequence(T):
    return torch.randn(T, D), torch.randn(T, HV), torch.randn(T, HV)


class Mode:
    """Stand for the modes of SGLang's ForwardMode that the backend asks for."""

    def __init__(self, is_verify=False):
        self.is_verify = is_verify

    def is_target_verify(self):
        return self.is_verify


def test_sglangs_backend_from_prompt_to_decode(package, flags, monkeypatch):
    """forward_extend and forward_decode of SGLang's backend, with its metadata, equal one pass in fp64."""
    flags.linear_attn_decode_backend = flags.linear_attn_prefill_backend = "gdn"
    pools = {"windows": torch.randn(SLOTS, D, W - 1), "temporal": torch.randn(SLOTS, HV, V, K)}
    slots, layer = torch.tensor([3, 7], dtype=torch.int32), layer_of(package)
    # SGLang clears a slot when a request gets it
    for pool in pools.values():
        pool[slots.long()] = 0
    made, xs = backend_of(package, pools, monkeypatch), [sequence(9), sequence(7)]
    lengths = [6, 4]
    offsets = torch.tensor([0, 6, 10], dtype=torch.int32)
    made.forward_metadata = package.Metadata(query_start_loc=offsets, mamba_cache_indices=slots)
    batch = SimpleNamespace(
        forward_mode=Mode(), extend_prefix_lens=torch.zeros(2, dtype=torch.int32), spec_info=None,
        extend_seq_lens_cpu=lengths, batch_size=2, multi_item_delimiter_indices=None, is_prefill_only=False,
    )  # fmt: skip
    mixed, a, b = (torch.cat([x[part][:n] for x, n in zip(xs, lengths, strict=True)]) for part in range(3))
    parts = [[part] for part in made.forward_extend(layer, batch, mixed, a, b)[0].split(lengths)]
    made.forward_metadata = package.Metadata(
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32), mamba_cache_indices=slots
    )
    for t in range(3):
        mixed, a, b = (
            torch.stack([x[part][n + t] for x, n in zip(xs, lengths, strict=True)]) for part in range(3)
        )
        o = made.forward_decode(layer, batch, mixed, a, b)
        for n in range(2):
            parts[n].append(o[0, n : n + 1])
    for n, x in enumerate(xs):
        o, S = expected_of(layer, tuple(t[: lengths[n] + 3] for t in x))
        assert error(torch.cat(parts[n]), o) < 1e-5 and error(pools["temporal"][slots[n]], S) < 1e-5
    assert usage.served == {("sglang", "prefill"): 1, ("sglang", "decode"): 3} and not usage.rejected


def test_the_unpacked_projection_of_decode_reaches_gdn(package, flags, monkeypatch):
    """SGLang's one-launch unpacking with the convolution stays its own; gdn decodes what it returns."""
    flags.linear_attn_decode_backend = "gdn"
    pools = {"windows": torch.randn(SLOTS, D, W - 1), "temporal": torch.randn(SLOTS, HV, V, K)}
    slots, layer = torch.tensor([3, -1], dtype=torch.int32), layer_of(package)
    made = backend_of(package, pools, monkeypatch)
    made.forward_metadata = package.Metadata(query_start_loc=None, mamba_cache_indices=slots)
    qkv, a, b = torch.randn(2, D), torch.randn(2, HV), torch.randn(2, HV)
    z = torch.randn(2, HV, V)
    monkeypatch.setattr(
        package.backend, "can_use_fused_qkvzba_causal_conv1d_update_contiguous",
        lambda *args, **kwargs: (True, "eligible"), raising=False,
    )  # fmt: skip
    monkeypatch.setattr(
        package.backend, "fused_qkvzba_causal_conv1d_update_contiguous",
        lambda *args, **kwargs: (qkv, z, b, a), raising=False,
    )  # fmt: skip
    before = pools["temporal"].clone()
    pair = (torch.randn(2, D + HV * V), torch.randn(2, 2 * HV))
    o, same = made.forward_decode(layer, SimpleNamespace(batch_size=2), pair, None, None)
    assert same is z and o.shape == (1, 2, HV, V) and not o[0, 1].any() and o[0, 0].any()
    changed = (pools["temporal"] != before).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [3]


def test_the_dispatchers_verification(package, flags):
    """Drafts are verified with the arguments that SGLang's backend passes, and written to its buffer."""
    flags.linear_attn_decode_backend = "gdn"
    made, layer = dispatcher(package), layer_of(package)
    T, states = 3, torch.randn(SLOTS, HV, V, K)
    kept, slots = torch.zeros(2, T, HV, V, K), torch.tensor([3, 7], dtype=torch.int32)
    q, k, v = torch.randn(1, 2 * T, H, K), torch.randn(1, 2 * T, H, K), torch.randn(1, 2 * T, HV, V)
    a, b, before = torch.randn(2 * T, HV), torch.randn(2 * T, HV), states.clone()
    for parent in (None, torch.tensor([[-1, 0, 0], [-1, 0, 1]])):
        o = made.target_verify(
            A_log=layer.A_log, dt_bias=layer.dt_bias, q=q, k=k, v=v, a=a, b=b, ssm_states=states,
            cache_indices=slots, query_start_loc=torch.tensor([0, T, 2 * T], dtype=torch.int32),
            intermediate_states_buffer=kept, intermediate_state_indices=torch.arange(2, dtype=torch.int32),
            cache_steps=T, retrieve_parent_token=parent, stable_rows=False,
        )  # fmt: skip
        for n in range(2):
            row = slice(n * T, n * T + (T if parent is None else 2))
            expected, _ = gated_delta_rule(
                q[:, row], k[:, row], v[:, row], a[None, row], b[None, row], A_log=layer.A_log,
                dt_bias=layer.dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                use_qk_l2norm_in_kernel=True, state_v_first=True, initial_state=states[slots[n]][None],
            )  # fmt: skip
            assert error(o[:, row], expected) < 1e-5
    assert torch.equal(states, before) and kept.any() and usage.served == {("sglang", "verify"): 2}


def test_a_rejected_call_is_sglangs(package, flags, monkeypatch):
    """The rings of ReplaySSM go to the kernel of SGLang that ours is a subclass of."""
    flags.linear_attn_decode_backend = "gdn"
    made, layer, called = dispatcher(package), layer_of(package), []
    monkeypatch.setattr(
        package.triton, "fused_recurrent_gdn_replayssm_decode", lambda **kwargs: called.append(sorted(kwargs))
    )
    ring = torch.zeros(1)
    o = made.packed_decode(
        torch.randn(2, D), torch.randn(2, HV), torch.randn(2, HV), A_log=layer.A_log, dt_bias=layer.dt_bias,
        scale=K**-0.5, ssm_states=torch.randn(SLOTS, HV, V, K), cache_indices=torch.tensor([3, 7]).int(),
        num_v_heads=HV, head_v_dim=V, replayssm_d=ring, replayssm_k=ring, replayssm_g=ring,
        replayssm_write_pos=ring, replayssm_force_flush=None,
    )  # fmt: skip
    assert o.shape == (1, 2, HV, V) and len(called) == 1 and "write_pos" in called[0]
    assert list(usage.rejected.values()) == [1] and not usage.served


def test_what_decides_in_sglang(package, flags, monkeypatch):
    """Every flag and default that the page names, in SGLang's own code."""
    import inspect

    assert flags.linear_attn_backend == "triton"
    assert flags.linear_attn_decode_backend is None and flags.linear_attn_prefill_backend is None
    assert flags.linear_attn_verify_backend is None
    backend = package.backend
    states = SimpleNamespace(dtype=torch.float32)
    runner = SimpleNamespace(
        model_config=None,
        req_to_token_pool=SimpleNamespace(
            mamba_pool=SimpleNamespace(mamba_cache=SimpleNamespace(temporal=states))
        ),
    )
    schedule = SimpleNamespace(chunked_prefill_size=8192, enable_dynamic_chunking=False)
    model = SimpleNamespace(linear_key_head_dim=128, linear_value_head_dim=128)
    monkeypatch.setattr(backend, "is_cuda", lambda: True)
    monkeypatch.setattr(backend, "get_schedule", lambda: schedule)
    monkeypatch.setattr(backend, "hybrid_gdn_config", lambda config: model)
    flashinfer = "sglang.srt.layers.attention.linear.kernels.gdn_flashinfer"
    monkeypatch.setitem(
        __import__("sys").modules, flashinfer,
        SimpleNamespace(is_flashinfer_gdn_prefill_available=lambda: True),
    )  # fmt: skip
    cases = (
        (9, torch.float32, "13.0", "flashinfer"), (9, torch.bfloat16, "13.0", None),
        (10, torch.bfloat16, "13.0", "flashinfer"), (8, torch.float32, "13.0", None),
        (10, torch.bfloat16, "12.8", None),
    )  # fmt: skip
    for major, dtype, cuda, found in cases:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda m=major: (m, 0))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        states.dtype = dtype
        assert backend.flashinfer_gdn_prefill_default(runner) == found, (major, dtype)
        sentences = sglang_dispatch.needed_flags((major, 0), int(cuda.split(".")[0]))
        assert any("--linear-attn-prefill-backend" in s for s in sentences) >= (found is not None)
    # a flag of ours, or of triton, ends it
    states.dtype = torch.float32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name in ("triton", "gdn"):
        flags.linear_attn_prefill_backend = name
        assert backend.flashinfer_gdn_prefill_default(runner) is None
    flags.linear_attn_prefill_backend = None
    # on SM100 a hook sets decode where no flag of decode does; extra_buffer and page-major ask for names
    from sglang.srt.arg_groups import attention_hook, kv_cache_hook, overrides

    hook = inspect.getsource(attention_hook.handle_linear_attn_backend)
    assert "cfg.linear_attn_decode_backend is None" in hook and "get_platform().is_sm100" in hook
    assert 'decode_allowed = {"triton", "flashinfer"}' in inspect.getsource(kv_cache_hook)
    assert 'return view.linear_attn_backend == "triton"' in inspect.getsource(overrides)
    assert 'if decode not in {"triton", "helion"}' in hook
    monkeypatch.setattr(
        backend, "get_exec", lambda: SimpleNamespace(features=SimpleNamespace(enable_mis=True))
    )
    with pytest.raises(ValueError, match="requires the Triton linear-attention prefill"):
        backend.validate_gdn_mis_backend(package.utils.LinearAttnKernelBackend("gdn"))


def test_a_slot_is_copied_without_its_ring(package, monkeypatch):
    """Without --enable-linear-replayssm there are no rings; with it a copy leaves them and resets the cursor.

    So a ring has to be folded before a copy: SGLang's cursor belongs to all layers, and SGLang moves it.
    """
    from dataclasses import fields

    from sglang.srt.mem_cache.memory_pool import MambaPool

    states = torch.randn(1, SLOTS, HV, V, K)
    given = {"conv": [torch.randn(1, SLOTS, D, W - 1)], "temporal": states}
    rings = [field.name for field in fields(MambaPool.State) if field.name not in given]
    assert rings and all(getattr(MambaPool.State(**given), name) is None for name in rings)
    assert "replayssm_write_pos" not in rings
    assert "replayssm_write_pos" in [field.name for field in fields(package.Metadata)]

    pool, ring = object.__new__(MambaPool), torch.randn(1, SLOTS, HV, 16, V)
    pool.mamba_cache = MambaPool.State(**given, replayssm_d=ring.clone())
    pool.replayssm_write_pos = torch.arange(SLOTS, dtype=torch.int32)
    pool.debug_memory_pool, pool._slot_siblings = False, ()
    monkeypatch.setattr(MambaPool, "_should_fuse_slot_ops", lambda self: False)
    pool.copy_from(torch.tensor([3]), torch.tensor([5]))
    assert torch.equal(states[0, 5], states[0, 3])
    assert torch.equal(pool.mamba_cache.replayssm_d, ring) and pool.replayssm_write_pos[5] == 0


def test_registering_twice_does_nothing(package):
    choices = list(package.choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES)
    sglang.register_backend()
    assert choices == package.choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES and choices.count("gdn") == 1
