"""Test vLLM's functions of a decay per key channel on gdn: its call sites, padding and speculation."""

import sys
import types

import pytest
import torch
from kit.api import reference
from kit.serving import error, inputs, pool_of
from kit.signatures import VLLM_KDA, parameters, real

from gdn.integrations import usage, vllm, vllm_kda, vllm_layer
from gdn.reference import layer as reference_layers
from gdn.reference.recurrence import gated_delta_rule

pytestmark = pytest.mark.usefixtures("default_backend_and_device")

H, K, V, BLOCKS = 4, 16, 24, 12


@pytest.mark.parametrize("module, name", VLLM_KDA)
def test_signatures(module, name):
    assert parameters(getattr(vllm_kda, name)) == VLLM_KDA[module, name]
    package = real(module, name)
    assert package is None or parameters(package) == VLLM_KDA[module, name]


def call_of(*counts, dtype=torch.float32):
    """Return tokens of rows [1, total, ...], the gate in vLLM's shapes, the reference's gate, and offsets."""
    total = sum(counts)
    x = inputs(1, total, H=H, HV=H, K=K, V=V, dtype=dtype, raw=True, is_per_channel=True)
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tokens = {name: x[name] for name in ("q", "k", "v")}
    given = {"raw_g": x["a"], "raw_beta": x["b"], "A_log": x["A_log"]}
    return tokens, given, x["dt_bias"], offsets


def gates(given, bias):
    return {"a": given["raw_g"], "b": given["raw_beta"], "A_log": given["A_log"], "dt_bias": bias}


@pytest.mark.parametrize("bound", [None, -5.0])
def test_speculation(bound):
    """Column accepted - 1 is read, token t is written to column t, blocks <= 0 are padding."""
    tokens, given, bias, offsets = call_of(4, 4, 2, 3)
    table = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0], [5, 6, 7, 0], [-1, 8, 9, 10], [11, 11, 11, 11]]).int()
    accepted, state = torch.tensor([2, 1, 3, 2, 1]).int(), pool_of(BLOCKS, K=K, V=V)
    expected = reference.decode(
        **tokens, **gates(given, bias), lower_bound=bound, state=state, read_index=table[:4],
        num_accepted=accepted[:4], write_index=table[:4], write="all", null_slot=0, cu_seqlens=offsets,
    )  # fmt: skip
    out = torch.empty_like(tokens["v"])
    o, same = vllm_kda.fused_recurrent_kda(
        **tokens, **given, dt_bias=bias.flatten(), lower_bound=bound, initial_state=state, out=out,
        cu_seqlens=offsets, ssm_state_indices=table, num_accepted_tokens=accepted,
    )  # fmt: skip
    assert o is out and same is state
    assert error(o, expected.o) < 1e-5 and error(state, expected.state) < 1e-5 and not o[0, 4:8].any()


def test_packed_decode_equals_single_rows():
    tokens, given, bias, offsets = call_of(1, 1, 1, dtype=torch.bfloat16)
    index, state = torch.tensor([3, 0, 5]).int(), pool_of(BLOCKS, K=K, V=V)
    single = state.clone()
    expected, _ = vllm_kda.fused_recurrent_kda(
        **tokens, **given, dt_bias=bias, lower_bound=-5.0, initial_state=single, cu_seqlens=offsets,
        ssm_state_indices=index,
    )  # fmt: skip
    # the rows of a projection that has more columns
    wide = torch.zeros(3, 2 * H * K + H * V + 8, dtype=torch.bfloat16)
    mixed = wide[:, : 2 * H * K + H * V]
    mixed.copy_(torch.cat([tokens[name][0].flatten(1) for name in ("q", "k", "v")], 1))
    o, same = vllm_kda.fused_recurrent_kda_packed_decode(
        mixed, **given, dt_bias=bias.flatten(), lower_bound=-5.0, initial_state=state, state_indices=index
    )
    assert same is state and torch.equal(state, single) and torch.equal(o, expected) and not o[0, 1].any()
    out = torch.empty_like(o)
    again, _ = vllm_kda.fused_recurrent_kda_packed_decode(
        mixed, **given, dt_bias=bias, lower_bound=None, initial_state=state, state_indices=index, out=out
    )
    assert again is out and not torch.equal(out, o)


def test_prompts(monkeypatch):
    tokens, given, bias, offsets = call_of(70, 5)
    S = torch.randn(2, H, V, K)
    q, k, v = tokens.values()
    options = {"lower_bound": -5.0, "use_qk_l2norm_in_kernel": True, "cu_seqlens": offsets}
    expected = gated_delta_rule(
        q, k, v, given["raw_g"], given["raw_beta"], A_log=given["A_log"], dt_bias=bias, initial_state=S,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True, **options,
    )  # fmt: skip
    out = torch.empty_like(v)
    call = {**given, "A_log": given["A_log"].view(1, 1, H, 1), "g_bias": bias.flatten(), **options}
    found = vllm_kda.chunk_kda_with_fused_gate(
        q, k, v, **call, initial_state=S, output_final_state=True, out=out
    )
    assert found[0] is out
    assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))
    with pytest.raises(TypeError, match="safe_gate: expected no such argument"):
        vllm_kda.chunk_kda_with_fused_gate(q, k, v, **call, safe_gate=True)
    monkeypatch.setattr(vllm_kda, "has_kernel", lambda *_: False)
    with pytest.raises(NotImplementedError, match="raw_g: expected a call with a kernel"):
        vllm_kda.chunk_kda_with_fused_gate(q, k, v, **call)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_the_patch_covers_what_is_imported(monkeypatch, is_loaded):
    """Kimi's module is replaced where a model has imported it; the patch imports none by itself."""
    for module, name, _ in vllm.PACKAGE.served:
        if module not in sys.modules:
            monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        monkeypatch.setattr(sys.modules[module], name, lambda *a, **k: "vllm's own", raising=False)
    own = {}
    for module, name, _ in vllm_kda.SERVED if is_loaded else ():
        if module not in sys.modules:
            monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        own[module, name] = lambda *a, **k: "vllm's own"
        monkeypatch.setattr(sys.modules[module], name, own[module, name], raising=False)
    with vllm.patch_vllm():
        for module, name in own:
            function = getattr(sys.modules[module], name)
            # what gdn rejects goes to vLLM's own function
            assert function is not own[module, name] and function(unknown=1) == "vllm's own"
    assert all(getattr(sys.modules[module], name) is x for (module, name), x in own.items())
    assert is_loaded or not any(module in sys.modules for module, _, _ in vllm_kda.SERVED)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_steps_of_a_layer(bound):
    """Prompts, single tokens with the norm, and drafts on vLLM's pools, as the plug-in runs them."""
    D, W, total, drafts = H * (2 * K + V), 4, 12, 1
    weights = vllm_layer.ChannelWeights(
        torch.randn(D, W), None, torch.randn(H), torch.randn(H, K), lower_bound=bound
    )
    pools = torch.full((6, D, W - 1 + drafts), float("nan")), torch.full((6, H, V, K), float("nan"))
    x = torch.randn(total, D), torch.randn(total, H), torch.randn(total, H, K)
    z, out = torch.randn(total, H, V), torch.zeros(total, H, V)
    norm = types.SimpleNamespace(weight=torch.randn(V), eps=1e-5, activation="sigmoid")
    names = ("num_prefills", "num_decodes", "num_decode_tokens", "num_spec_decodes")

    def step(span, **fields):
        meta = {"checkpoint": None} | dict.fromkeys(names, 0)
        meta = types.SimpleNamespace(**meta | {"num_actual_tokens": span.stop - span.start} | fields)
        tokens = tuple(t[span] for t in x)
        vllm_layer.run_with_norm(weights, norm, meta, pools, tokens, z[span], out[span], True)

    usage.reset()
    slot = torch.tensor([2]).int()
    step(
        slice(0, 7), num_prefills=1, prefill_query_start_loc=torch.tensor([0, 7]).int(),
        prefill_state_indices=slot, prefill_has_initial_state=torch.tensor([False]),
    )  # fmt: skip
    for t in (7, 8):
        step(slice(t, t + 1), num_decodes=1, non_spec_state_indices_tensor=slot)
    step(
        slice(9, 11), num_spec_decodes=1,
        spec_query_start_loc=torch.tensor([0, 2]).int(), num_accepted_tokens=torch.tensor([1]).int(),
        spec_state_indices_tensor=torch.tensor([[2, 3]]).int(),
    )  # fmt: skip
    mixed, _ = reference_layers.causal_conv1d(x[0][None].double(), weights.conv_weight, activation="silu")
    q, k, v = vllm_layer.split_heads(mixed, pools[1])
    o, _ = gated_delta_rule(
        q, k, v, x[2][None], x[1][None], A_log=weights.A_log, dt_bias=weights.dt_bias, lower_bound=bound,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    expected = reference_layers.rms_norm_gated(o[0], z, norm.weight, eps=norm.eps, activation="sigmoid")
    assert error(out[:11], expected[:11]) < 1e-5
    counts = zip(usage.CHANNEL_ROLES.values(), (1, 2, 1), strict=True)
    assert usage.served == {("vllm", name): n for name, n in counts}
