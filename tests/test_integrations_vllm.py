"""Test vLLM's functions on gdn against the reference: its call sites, its padding, its speculation."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from kit.api import reference
from kit.serving import error, inputs, pool_of, same_bits
from kit.signatures import VLLM, parameters, real

from gdn.integrations import vllm, vllm_layer
from gdn.reference import layer as reference_layers
from gdn.reference.recurrence import gated_delta_rule

pytestmark = pytest.mark.usefixtures("default_backend_and_device")

NAN = float("nan")
BLOCKS, H, HV, K, V, W, D = 12, 2, 4, 16, 24, 4, 10
L2 = {"use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize("module, name", VLLM)
def test_signatures(module, name):
    assert parameters(getattr(vllm, name)) == VLLM[module, name]
    package = real(module, name)
    assert package is None or parameters(package) == VLLM[module, name]


def paged_states(blocks=BLOCKS, dtype=torch.float32):
    """Return states inside pages, where the stride of a block is not the size of its state."""
    memory = torch.randn(blocks, HV * V * K + 40).to(dtype)
    return memory[:, 8 : 8 + HV * V * K].unflatten(1, (HV, V, K))


def packed_inputs(counts, raw=False, extra=0):
    """Return q, k, v, gates [1, total, ...] and offsets in vLLM's form, and `extra` padding tokens."""
    total = sum(counts) + extra
    x = inputs(1, total, raw=raw)
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return x, offsets


# speculation: tables of blocks, rows of any length, and more rows of indices than the batch has


def drafts():
    """Return a table of blocks and accepted counts for one row more than the batch has."""
    table = [[1, 2, 3, 4], [0, 0, 0, 0], [5, 6, 7, 0], [-1, 8, 9, 10], [11, 11, 11, 11]]
    return torch.tensor(table).int(), torch.tensor([2, 1, 3, 2, 1]).int()


@pytest.mark.interpret
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_speculation(raw, dtype):
    """P2 reads column accepted - 1, writes token t to column t, skips blocks <= 0, keeps fp32."""
    x, offsets = packed_inputs([4, 4, 2, 3], raw=raw, extra=2)
    state, (table, accepted) = paged_states(dtype=dtype), drafts()
    where = {
        "read_index": table[:4], "num_accepted": accepted[:4], "write_index": table[:4], "write": "all",
        "null_slot": 0, "cu_seqlens": offsets, "max_seqlen": 4,
    }  # fmt: skip
    expected = reference.decode(**x, state=state, **{k: v for k, v in where.items() if k != "max_seqlen"})
    options = {
        "initial_state": state, "cu_seqlens": offsets, "ssm_state_indices": table,
        "num_accepted_tokens": accepted, **L2,
    }  # fmt: skip
    o, same = _call(x, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    assert same is state and error(o, expected.o) < 1e-5 and error(state, expected.state) < tolerance
    # rows of padding, and tokens past the last row, are zero
    assert not o[0, 4:8].any() and not o[0, 13:].any() and o[0, :4].all(-1).any()


def _call(x, **options):
    q, k, v = x["q"], x["k"], x["v"]
    if "a" not in x:
        return vllm.fused_recurrent_gated_delta_rule(q, k, v, x["g"], x["beta"], **options)
    # vLLM's logits have no batch axis
    return vllm.fused_sigmoid_gating_delta_rule_update(
        x["A_log"], x["a"][0], x["b"][0], x["dt_bias"], q, k, v, **options
    )


def test_accepted_counts_out_of_range_are_clamped():
    x, offsets = packed_inputs([2, 2])
    table, state = torch.tensor([[1, 2], [3, 4]]).int(), pool_of(6)
    results = []
    for accepted in ([-5, 99], [1, 2]):
        pool = state.clone()
        o, _ = _call(
            x, initial_state=pool, cu_seqlens=offsets, ssm_state_indices=table,
            num_accepted_tokens=torch.tensor(accepted).int(), **L2,
        )  # fmt: skip
        results.append((o, pool))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_acceptance_is_free():
    """Three verified packets with 1, 3 and 2 accepted tokens equal the accepted tokens one by one."""
    state, table = pool_of(BLOCKS), torch.tensor([[1, 2, 3, 4]]).int()
    single = state.clone()
    accepted, offsets = torch.ones(1).int(), torch.tensor([0, 4]).int()
    for count in (1, 3, 2):
        x, _ = packed_inputs([4])
        o, _ = _call(
            x, initial_state=state, cu_seqlens=offsets, ssm_state_indices=table,
            num_accepted_tokens=accepted, **L2,
        )  # fmt: skip
        for t in range(count):
            token = {name: value[:, t : t + 1] for name, value in x.items()}
            one, _ = _call(token, initial_state=single, ssm_state_indices=table[:, 0], **L2)
            assert same_bits(one[:, 0], o[:, t])
        accepted.fill_(count)
    assert same_bits(state[table[0, accepted[0] - 1]], single[1])


# plain decode


@pytest.mark.interpret
@pytest.mark.parametrize("raw", [False, True])
def test_decode_by_one_index_each(raw):
    """Plain decode takes offsets of N rows, a longer index buffer, and rows of padding at the end."""
    x, _ = packed_inputs([1, 1, 1], raw=raw, extra=1)
    offsets = torch.tensor([0, 1, 2, 3, 3]).int()
    index, state = torch.tensor([5, 0, 2, 0, 7, 8]).int(), paged_states()
    state[0] = NAN
    expected = reference.decode(**x, state=state, read_index=index[:4], null_slot=0, cu_seqlens=offsets)
    o, same = _call(x, initial_state=state, cu_seqlens=offsets, ssm_state_indices=index, **L2)
    assert same is state and error(o, expected.o) < 1e-5 and error(state[1:], expected.state[1:]) < 1e-5
    assert state[0].isnan().all() and not o[0, 1].any() and not o[0, 3].any()


def test_packed_decode():
    """Rows may have any pitch, out is written in place, and beta is not rounded."""
    B, columns = 4, 2 * H * K + HV * V
    mixed = torch.randn(B, columns + 30).bfloat16()[:, 7 : 7 + columns]
    a, b = torch.randn(B, 3 * HV).bfloat16()[:, :HV], torch.randn(B, HV).bfloat16()
    A_log, dt_bias, index = torch.randn(HV), torch.randn(HV), torch.tensor([3, 0, 1, 9]).int()
    state, out = paged_states(), torch.full((B, 1, HV, V), NAN).bfloat16()
    q, k, v = (x.unsqueeze(1) for x in mixed.split([H * K, H * K, HV * V], 1))
    x = {"q": q.unflatten(2, (H, K)), "k": k.unflatten(2, (H, K)), "v": v.unflatten(2, (HV, V))}
    gates = {"a": a[:, None], "b": b[:, None], "A_log": A_log, "dt_bias": dt_bias}
    expected = reference.decode(**x, **gates, state=state, read_index=index, null_slot=0, scale=0.3)
    got, same = vllm.fused_recurrent_gated_delta_rule_packed_decode(
        mixed, a, b, A_log, dt_bias, 0.3, state, out, index, True
    )
    assert got is out and same is state
    assert error(out, expected.o) < 5e-3 and not out[1].any() and error(state, expected.state) < 1e-5
    # a beta rounded to bf16 would change the state
    rounded = reference.decode(
        x["q"], x["k"], x["v"], g=reference_decay(gates), beta=b[:, None].float().sigmoid().bfloat16(),
        state=state * 0, read_index=index, null_slot=0,
    )  # fmt: skip
    exact = reference.decode(**x, **gates, state=state * 0, read_index=index, null_slot=0)
    assert error(rounded.state, exact.state) > 1e-4


def reference_decay(gates):
    from gdn.reference.recurrence import gate

    return gate(gates["a"].double(), gates["A_log"].double(), gates["dt_bias"].double())


def test_states_of_each_token_apart():
    x, state = inputs(2, 3), pool_of(2)
    before = state.clone()
    o, kept = _call(x, initial_state=state, inplace_final_state=False, **L2)
    expected = reference.decode(**x, state=state, write="none", intermediate=torch.empty(2, 3, HV, V, K))
    assert same_bits(state, before) and error(o, expected.o) < 1e-5
    assert kept.shape == (6, HV, V, K) and error(kept, expected.extra.flatten(0, 1)) < 1e-5
    with pytest.raises(NotImplementedError, match="inplace_final_state"):
        many, offsets = packed_inputs([1, 2])
        _call(many, initial_state=state, inplace_final_state=False, cu_seqlens=offsets)


def test_no_tokens_at_all():
    x, offsets = packed_inputs([0, 0])
    o, _ = _call(
        x, initial_state=pool_of(4), cu_seqlens=offsets, ssm_state_indices=torch.tensor([1, 2]).int()
    )
    assert o.shape == (1, 0, HV, V)


def test_what_gdn_does_not_have():
    x, state = inputs(1, 1, raw=True), pool_of(1)
    gates = (x["A_log"], x["a"], x["b"], x["dt_bias"], x["q"], x["k"], x["v"])
    for options in ({"is_kda": True}, {"beta": 2.0}, {"threshold": 10.0}):
        with pytest.raises(NotImplementedError):
            vllm.fused_sigmoid_gating_delta_rule_update(*gates, initial_state=state, **options)
    with pytest.raises(NotImplementedError, match="beta: expected shape"):
        vllm.fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], x["a"], x["v"], initial_state=state)
    with pytest.raises(NotImplementedError, match="null_block_id"):
        vllm.causal_conv1d_update(torch.ones(1, D), torch.ones(3, D, 3), torch.ones(D, W),
                                  conv_state_indices=torch.ones(1).int(), null_block_id=2)  # fmt: skip


def test_gating():
    a, b, A_log, dt_bias = torch.randn(5, HV), torch.randn(5, HV).bfloat16(), torch.randn(HV), torch.randn(HV)
    g, beta = vllm.fused_gdn_gating(A_log, a, b, dt_bias)
    assert g.shape == beta.shape == (1, 5, HV) and g.dtype == beta.dtype == torch.float32
    assert error(beta[0], b.double().sigmoid()) < 1e-6
    assert error(g[0], reference_decay({"a": a, "A_log": A_log, "dt_bias": dt_bias})) < 1e-6


# prefill


@pytest.mark.parametrize("with_buffer", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_prefill(with_buffer, with_state):
    x, offsets = packed_inputs([5, 0, 70, 1])
    x["beta"] = x["beta"][..., :HV]
    S = torch.randn(4, HV, V, K).bfloat16() if with_state else None
    before = None if S is None else S.clone()
    buffer = torch.full((76, HV, V), NAN) if with_buffer else None
    o, final = vllm.chunk_gated_delta_rule(
        *(x[name] for name in ("q", "k", "v", "g", "beta")), initial_state=S, output_final_state=True,
        cu_seqlens=offsets, chunk_indices=offsets, chunk_offsets=offsets, core_attn_out=buffer, **L2,
    )  # fmt: skip
    expected = gated_delta_rule(**x, initial_state=S, cu_seqlens=offsets, state_v_first=True, **L2)
    assert error(o, expected[0]) < 1e-5 and error(final, expected[1]) < 1e-5 and final.dtype == torch.float32
    assert buffer is None or o.data_ptr() == buffer.data_ptr()
    assert S is None or same_bits(S, before)


def test_prefill_of_a_batch_into_a_buffer():
    x = inputs(2, 20)
    five = [x[name] for name in ("q", "k", "v", "g", "beta")]
    buffer = torch.full((40, HV, V), NAN)
    o, final = vllm.chunk_gated_delta_rule(*five, core_attn_out=buffer, **L2)
    assert final is None and error(o, gated_delta_rule(**x, **L2)[0]) < 1e-5
    assert o.data_ptr() == buffer.data_ptr()


# the convolution: windows at the front of a block


def reference_conv(x, weight, bias, window):
    """Return the reference's y [T, D] and the window after it, of x [T, D] after window [D, W - 1]."""
    y, after = reference_layers.causal_conv1d(
        x[None], weight, bias, activation="silu", initial_state=window[None]
    )
    return y[0], after[0]


def conv_inputs(tokens, columns=W - 1 + 3):
    return torch.randn(tokens, D), torch.randn(BLOCKS, D, columns), torch.randn(D, W), torch.randn(D)


def test_conv_of_prompts():
    x, state, weight, bias = conv_inputs(12)
    state[[2, 0]] = NAN
    before = state.clone()
    offsets, index = torch.tensor([0, 2, 2, 8, 10, 11]).int(), torch.tensor([3, 4, 2, 0, 7, 9, 9]).int()
    has = torch.tensor([True, True, False, True, True, False])
    y = vllm.causal_conv1d_fn(x.t(), weight, bias, state, offsets, index, has, "swish", metadata=object())
    assert y.shape == (D, 12)
    ends = offsets.tolist()
    for n in (0, 2, 4):
        slot, span = index[n], slice(ends[n], ends[n + 1])
        window = before[slot, :, : W - 1] if has[n] else torch.zeros(D, W - 1)
        expected, after = reference_conv(x[span], weight, bias, window)
        assert error(y.t()[span], expected) < 1e-5 and error(state[slot, :, : W - 1], after) < 1e-6
        assert same_bits(state[slot, :, W - 1 :], before[slot, :, W - 1 :])
    # an empty sequence, padding, and tokens past the end
    assert same_bits(state[4], before[4]) and state[0].isnan().all()
    assert not y[:, 8:10].any() and not y[:, 11:].any()


def test_conv_without_a_mask_starts_from_zeros():
    x, state, weight, bias = conv_inputs(3)
    offsets = torch.tensor([0, 3]).int()
    y = vllm.causal_conv1d_fn(x.t(), weight, bias, state, offsets, torch.tensor([1]).int(), activation=True)
    assert error(y.t(), reference_conv(x, weight, bias, torch.zeros(D, W - 1))[0]) < 1e-5


@pytest.mark.parametrize("T", [None, 1, 2])
def test_conv_step_overwrites_its_input(T):
    x, state, weight, bias = conv_inputs(3)
    if T is not None:
        x = torch.randn(3, D, T)
    before, given, index = state.clone(), x.clone(), torch.tensor([4, 0, 6]).int()
    y = vllm.causal_conv1d_update(x, state, weight, bias, "silu", index)
    assert y is x and not y[1].any() and same_bits(state[0], before[0])
    for n, slot in ((0, 4), (2, 6)):
        tokens = given[n].t() if T else given[n : n + 1]
        expected, after = reference_conv(tokens, weight, bias, before[slot, :, : W - 1])
        assert error(y[n].t() if T else y[n : n + 1], expected) < 1e-5
        assert error(state[slot, :, : W - 1], after) < 1e-6
        assert same_bits(state[slot, :, W - 1 :], before[slot, :, W - 1 :])
    out = torch.empty_like(given)
    assert vllm.causal_conv1d_update(given, before, weight, bias, True, index, out=out) is out
    assert same_bits(out, x)


def test_conv_of_packed_rows_without_speculation():
    x, state, weight, bias = conv_inputs(6)
    before, given = state.clone(), x.clone()
    offsets, index = torch.tensor([0, 1, 1, 4, 5]).int(), torch.tensor([4, 5, 6, 0]).int()
    y = vllm.causal_conv1d_update(x, state, weight, bias, "silu", index, None, offsets, 3)
    for n, slot in ((0, 4), (2, 6)):
        span = slice(*offsets[n : n + 2].tolist())
        expected, after = reference_conv(given[span], weight, bias, before[slot, :, : W - 1])
        assert error(y[span], expected) < 1e-5 and error(state[slot, :, : W - 1], after) < 1e-6
    assert same_bits(state[5], before[5]) and not y[4:].any()


@pytest.mark.interpret
def test_conv_of_packets_slides():
    """Verified packets of several lengths, partly accepted, equal the accepted tokens in a row."""
    _, state, weight, bias = conv_inputs(0)
    index = torch.tensor([3, 0, 5, 7]).int()
    history = {slot: state[slot, :, : W - 1].t().clone() for slot in (3, 5, 7)}
    accepted = torch.ones(4).int()
    for counts, taken in (
        ([4, 2, 3, 1], [2, 1, 3, 1]),
        ([1, 4, 4, 0], [1, 1, 2, 1]),
        ([3, 1, 4, 2], [3, 1, 4, 2]),
    ):
        x = torch.randn(sum(counts) + 1, D)
        offsets = torch.tensor([0, *counts]).cumsum(0).int()
        given, before = x.clone(), state.clone()
        y = vllm.causal_conv1d_update(x, state, weight, bias, "silu", index, accepted, offsets, 4)
        assert not y[sum(counts[:1]) : sum(counts[:2])].any() and not y[sum(counts) :].any()
        for n, slot in ((0, 3), (2, 5), (3, 7)):
            span = slice(*offsets[n : n + 2].tolist())
            if counts[n] == 0:
                assert same_bits(state[slot], before[slot])
                continue
            expected, _ = reference_conv(given[span], weight, bias, history[slot][1 - W :].t())
            assert error(y[span], expected) < 1e-5
            history[slot] = torch.cat([history[slot], given[span][: taken[n]]])
            accepted[n] = taken[n]


# the patch, on modules with vLLM's names


def test_patch(monkeypatch):
    modules = {module: types.ModuleType(module) for module, _ in VLLM} | {"vllm": types.ModuleType("vllm")}
    layer = modules["vllm.layer"] = types.ModuleType("vllm.layer")
    for module, name in VLLM:
        vars(modules[module])[name] = lambda *args, **kwargs: "vllm's own"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    prefill = modules["vllm.third_party.flash_linear_attention.ops.chunk"].chunk_gated_delta_rule
    layer.fla_chunk_gated_delta_rule = prefill
    update = modules["vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating"]
    x, raw, state = inputs(1, 5), inputs(1, 1, raw=True), pool_of(1)
    gates = (raw["A_log"], raw["a"], raw["b"], raw["dt_bias"], raw["q"], raw["k"], raw["v"])
    with vllm.patch_vllm() as patch:
        o, _ = layer.fla_chunk_gated_delta_rule(**x)
        assert patch.is_active and error(o, gated_delta_rule(**x)[0]) < 1e-5
        step = update.fused_sigmoid_gating_delta_rule_update
        assert step(*gates, is_kda=True, initial_state=state) == "vllm's own"
        assert torch.is_tensor(step(*gates, initial_state=state)[0])
    assert layer.fla_chunk_gated_delta_rule is prefill and step(*gates) == "vllm's own"


# a whole layer, as the plug-in runs it


def vllm_layer_of():
    D2 = 2 * H * K + HV * V
    return SimpleNamespace(
        conv1d=SimpleNamespace(weight=torch.randn(D2, 1, 4), bias=None), activation="silu",
        A_log=torch.randn(HV), dt_bias=torch.randn(HV),
    )  # fmt: skip


def vllm_meta(**fields):
    """Return the fields of vLLM's GDNAttentionMetadata that the layer reads."""
    counts = ("num_prefills", "num_decodes", "num_decode_tokens", "num_spec_decodes")
    return SimpleNamespace(**{"checkpoint": None} | dict.fromkeys(counts, 0) | fields)


def test_a_whole_layer_on_pools():
    """Prompts with a snapshot, a mixed batch, drafts and steps on vLLM's pools equal one pass in fp64."""
    layer, D2, drafts = vllm_layer_of(), 2 * H * K + HV * V, 2
    windows = torch.full((12, 3 + drafts, D2), NAN).transpose(1, 2)
    pools, total = (windows, torch.full((12, HV, V, K), NAN)), 80
    x = [(torch.randn(total, D2), torch.randn(total, HV), torch.randn(total, HV)) for _ in range(2)]
    out = [torch.zeros(total, HV, V) for _ in x]

    def step(spans, **fields):
        counts = [s.stop - s.start for s in spans]
        tokens = tuple(torch.cat([x[n][p][s] for n, s in enumerate(spans)]) for p in range(3))
        y = torch.zeros(sum(counts), HV, V)
        vllm_layer.run_step(layer, vllm_meta(num_actual_tokens=len(y), **fields), pools, tokens, y, True)
        for n, part in enumerate(y.split(counts)):
            out[n][spans[n]] = part

    prompts = {"num_prefills": 1, "prefill_has_initial_state": torch.tensor([False])}
    checkpoint = SimpleNamespace(checkpoint_offsets=torch.tensor([64]).int(), state_indices=torch.tensor([9]))
    step(
        [slice(0, 70), slice(0, 0)], **prompts, prefill_query_start_loc=torch.tensor([0, 70]).int(),
        prefill_state_indices=torch.tensor([1]).int(), checkpoint=checkpoint,
    )  # fmt: skip
    # request 0 decodes beside the prompt of request 1
    step(
        [slice(70, 71), slice(0, 66)], **prompts, prefill_query_start_loc=torch.tensor([0, 66]).int(),
        prefill_state_indices=torch.tensor([4]).int(), num_decodes=1, num_decode_tokens=1,
        non_spec_state_indices_tensor=torch.tensor([1, 4]).int(),
    )  # fmt: skip
    at, accepted = [71, 66], torch.tensor([1, 1]).int()
    table = torch.tensor([[1, 2, 3], [4, 5, 6]]).int()
    for keep in ([2, 3], [1, 2]):
        step(
            [slice(p, p + 3) for p in at], num_spec_decodes=2,
            spec_query_start_loc=torch.tensor([0, 3, 6]).int(), spec_state_indices_tensor=table,
            num_accepted_tokens=accepted,
        )  # fmt: skip
        at, accepted = [p + n for p, n in zip(at, keep, strict=True)], torch.tensor(keep).int()
    for n, end in enumerate(at):
        mixed, b, a = (t[:end] for t in x[n])
        mixed, _ = reference_layers.causal_conv1d(mixed[None], layer.conv1d.weight[:, 0], activation="silu")
        q, k, v = vllm_layer.split_heads(mixed, pools[1])
        o, _ = gated_delta_rule(
            q, k, v, a[None], b[None], A_log=layer.A_log, dt_bias=layer.dt_bias, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, state_v_first=True,
        )  # fmt: skip
        assert error(out[n][:end], o[0]) < 1e-5
    assert torch.equal(windows[9, :, :3], x[0][0][61:64].t()) and not pools[1][9].isnan().any()
    assert pools[1][0].isnan().all() and windows[0].isnan().all()


def test_layers_that_stay_vllms():
    """The reasons are structural, so they are decided when a layer is built."""
    made, fp32 = SimpleNamespace(head_k_dim=128, head_v_dim=128, activation="silu"), (torch.float32,) * 2
    assert vllm_layer.reason_to_reject(made, fp32, True) is None
    assert "CUDA" in vllm_layer.reason_to_reject(made, fp32, False)
    assert "float8" in vllm_layer.reason_to_reject(made, (torch.float32, torch.float8_e4m3fn), True)
    made.head_v_dim = 512
    assert "512" in vllm_layer.reason_to_reject(made, fp32, True)
    made.head_v_dim, made.activation = 128, "gelu"
    assert "gelu" in vllm_layer.reason_to_reject(made, fp32, True)
