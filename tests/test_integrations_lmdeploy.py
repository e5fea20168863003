"""Test lmdeploy's backend on gdn: rings, padding, new sequences in used slots, its convolution."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from kit.api import reference
from kit.serving import error, inputs, pool_of, same_bits
from kit.signatures import LMDEPLOY, LMDEPLOY_METHODS, parameters, real

from gdn.integrations import lmdeploy
from gdn.integrations import lmdeploy_layer as layer
from gdn.reference import layer as reference_layers
from gdn.reference.recurrence import gated_delta_rule

pytestmark = pytest.mark.usefixtures("default_backend_and_device")

NAN = float("nan")
SLOTS, H, HV, K, V, W, D = 9, 2, 4, 16, 24, 4, 10
RULE, CONV = lmdeploy.GatedDeltaRule(), lmdeploy.CausalConv1d()
L2 = {"use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize("module, name", LMDEPLOY)
def test_signatures(module, name):
    assert parameters(getattr(lmdeploy, name)) == LMDEPLOY[module, name]
    package = real(module, name)
    assert package is None or parameters(package) == LMDEPLOY[module, name]


@pytest.mark.parametrize("owner, name", LMDEPLOY_METHODS)
def test_method_signatures(owner, name):
    assert parameters(getattr(getattr(lmdeploy, owner), name)) == LMDEPLOY_METHODS[owner, name]


def arguments(x):
    return [x[name] for name in ("q", "k", "v", "g", "beta")]


# the recurrent form


@pytest.mark.interpret
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_ring", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrent(transposed, with_ring, dtype):
    """Both layouts, fp32 and bf16 pools and invalid slots agree; states are rounded after every token."""
    T, R = 4, 4
    x = inputs(5, T)
    lead = (SLOTS, R) if with_ring else (SLOTS,)
    state = pool_of(*lead, dtype=dtype, v_first=transposed)
    index, seen = torch.tensor([7, -1, 0, SLOTS, 3]), torch.tensor([0, 3, 9, 1, 6]).int()
    where = {"ring_pos": seen, "write": "all", "round_state": True} if with_ring else {}
    expected = reference.decode(**x, state=state, read_index=index, state_v_first=transposed, **where)
    o, same = lmdeploy.fused_recurrent_gated_delta_rule(
        *arguments(x), None, state, True, True, index, seen if with_ring else None, transposed
    )
    assert same is state and error(o, expected.o) < (1e-5 if dtype == torch.float32 else 5e-3)
    assert error(state, expected.state) < (1e-5 if dtype == torch.float32 else 5e-3)
    assert not o[1].any() and not o[3].any() and o[0].any()


@pytest.mark.parametrize("with_ring", [False, True])
def test_nothing_is_written_unless_asked(with_ring):
    x, state = inputs(2, 3), pool_of(2, 4) if with_ring else pool_of(2)
    before, seen = state.clone(), torch.tensor([1, 6]).int() if with_ring else None
    given = {"initial_state": state, "cache_seqlens": seen, "transpose_state_layout": True, **L2}
    o, none = RULE.fused_recurrent_gated_delta_rule(*arguments(x), **given)
    assert none is None and same_bits(state, before)
    again, _ = RULE.fused_recurrent_gated_delta_rule(*arguments(x), **given, output_final_state=True)
    assert error(o, again) < 1e-6 and not same_bits(state, before)


def test_a_ring_of_one_entry_and_entry_zero():
    x, state = inputs(2, 1), pool_of(3)
    options = {"output_final_state": True, "transpose_state_layout": True, **L2}
    ring, plain = state.clone(), state.clone()
    o, _ = lmdeploy.fused_recurrent_gated_delta_rule(
        *arguments(x), initial_state=ring, cache_seqlens=torch.tensor([3, 8]).int(), **options
    )
    deep = torch.stack([plain, plain + 1], 1)
    other, _ = lmdeploy.fused_recurrent_gated_delta_rule(*arguments(x), initial_state=deep, **options)
    assert same_bits(o, other) and same_bits(deep[:, 0], ring) and same_bits(deep[:, 1], plain + 1)


def test_verified_packets_equal_single_steps():
    """Packets equal single steps bit for bit in a bf16 ring, for any accepted counts."""
    drafts, ring = 3, pool_of(2, 4).bfloat16()
    single, seen = ring.clone(), torch.tensor([5]).int()
    index, options = torch.tensor([1]), {"output_final_state": True, "transpose_state_layout": True, **L2}
    for accepted in (1, 4, 2, 3):
        x = inputs(1, 1 + drafts)
        o, _ = lmdeploy.fused_recurrent_gated_delta_rule(
            *arguments(x), initial_state=ring, state_indices=index, cache_seqlens=seen, **options
        )
        for t in range(accepted):
            token = {name: value[:, t : t + 1] for name, value in x.items()}
            one, _ = lmdeploy.fused_recurrent_gated_delta_rule(
                *arguments(token),
                initial_state=single,
                state_indices=index,
                cache_seqlens=seen,
                **options,
            )
            assert same_bits(one[:, 0], o[:, t])
            seen += 1
    entry = int(seen) % 4
    assert same_bits(ring[1, entry], single[1, entry])


# gates


@pytest.mark.parametrize("grouped", [False, True])
def test_prepare_inputs(grouped):
    """Nothing is expanded or rounded, and only prompts mark new sequences."""
    T, A_log, dt_bias = 6, torch.randn(HV), torch.randn(HV)
    q, k, a, b = (torch.randn(1, T, *s).bfloat16() for s in ((H, K), (H, K), (HV,), (HV,)))
    given = (x.unflatten(-1, (H, HV // H)) if grouped else x for x in (b, a))
    mask = torch.tensor([True, False, False, True, False, False])
    rest = (dt_bias, -A_log.exp(), HV // H, True)
    q2, k2, g, beta, is_normalised = RULE.prepare_inputs(q, k, *given, *rest, False, mask)
    assert q2 is q and k2 is k and is_normalised is False and g.dtype == beta.dtype == torch.float32
    expected = -A_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias)
    assert error(beta, b.double().sigmoid()) < 1e-6 and error(g[:, ~mask], expected[:, ~mask]) < 1e-6
    assert (g[:, mask] == -1e6).all()
    assert error(RULE.prepare_inputs(q, k, b, a, *rest, True, mask)[2], expected) < 1e-6


# prompts

LENGTHS = [5, 70, 0, 3]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_ring", [False, True])
def test_prompts_in_place(transposed, with_ring):
    """Prompts work in a cache of several layers, whose slots are apart, and on a used slot that holds NaN."""
    x, offsets = inputs(1, sum(LENGTHS)), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    index, new = torch.tensor([4, 2, 8, 6]), [True, False, False, False]
    x["g"][0, 0] = lmdeploy.NEW
    lead = (SLOTS, 3, 4) if with_ring else (SLOTS, 3)
    cache = pool_of(*lead, v_first=transposed).bfloat16()
    state = cache[:, 1]
    entries = (torch.tensor([3, 1, 0, 2]), torch.tensor([0, 3, 2, 1])) if with_ring else None
    read, write = (index, index) if entries is None else ((index, entries[0]), (index, entries[1]))
    begin = state[read].double()
    begin[0] = 0
    state[4] = NAN
    before = cache.clone()
    expected = gated_delta_rule(**x, initial_state=begin, cu_seqlens=offsets, state_v_first=transposed, **L2)
    o, same = RULE.chunk_gated_delta_rule(
        *arguments(x), initial_state=state, state_indices=index, cu_seqlens=offsets, output_final_state=True,
        spec_state_offsets=entries, transpose_state_layout=transposed, **L2,
    )  # fmt: skip
    assert same is state and error(o, expected[0]) < 1e-5
    for n in (0, 1, 3):
        place = (write[n],) if entries is None else (write[0][n], write[1][n])
        assert error(state[place], expected[1][n]) < 5e-3, n
        before[:, 1][place] = state[place]
    assert same_bits(cache, before) and new[0]


@pytest.mark.parametrize(
    "slot, entry",
    [(1, -1), (1, 3), (-1, 0), (4, 0), (2**30, 0), (-(2**31), 1), (1, 2**31 - 1), (2**62, 1), (0, -(2**62))],
)
@pytest.mark.parametrize("is_entry_major", [False, True])
def test_slots_and_entries_out_of_range_are_padding(slot, entry, is_entry_major):
    """An invalid slot or entry writes nothing and outputs 0, also where its offset would wrap around."""
    x, offsets, S = inputs(1, 5), torch.tensor([0, 5]), 4
    dtype = torch.int32 if max(abs(slot), abs(entry)) < 2**31 else torch.int64
    # with 4 entries, slot 2**30 times the stride is 2**32, which is 0 in int32
    R = 4 if slot == 2**30 else 3
    ring = pool_of(R, S).transpose(0, 1) if is_entry_major else pool_of(S, R)
    before, given = ring.clone(), torch.tensor([entry], dtype=dtype)
    for read, write in ((given, given), (given.clamp(0, R - 1), given), (given, given.clamp(0, R - 1))):
        o, _ = RULE.chunk_gated_delta_rule(
            *arguments(x), initial_state=ring, state_indices=torch.tensor([slot], dtype=dtype),
            cu_seqlens=offsets, spec_state_offsets=(read, write), transpose_state_layout=True, **L2,
        )  # fmt: skip
        is_read = 0 <= slot < S and 0 <= int(read) < R
        assert bool(o.any()) == is_read
        if not (is_read and 0 <= int(write) < R):
            assert same_bits(ring, before)


@pytest.mark.parametrize("gap", [8, 1])
def test_prompts_on_a_ring_whose_slots_lie_apart_by_no_multiple_of_a_state(gap):
    """A ring with any slot stride has the bits of a dense one, and nothing between slots is written."""
    x, offsets = inputs(1, sum(LENGTHS)), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    index, entries = torch.tensor([4, -1, 3, 0]), (torch.tensor([3, 1, 0, 2]), torch.tensor([0, 3, 2, 1]))
    dense = pool_of(SLOTS, 4)
    size = dense[0].numel()
    page = torch.randn(SLOTS, size + gap)
    before = page.clone()
    apart = page[:, :size].unflatten(1, dense.shape[1:])
    apart.copy_(dense)
    before[:, :size] = dense.flatten(1)

    def prompts(ring):
        return RULE.chunk_gated_delta_rule(
            *arguments(x), initial_state=ring, state_indices=index, cu_seqlens=offsets,
            output_final_state=True, spec_state_offsets=entries, transpose_state_layout=True, **L2,
        )[0]  # fmt: skip

    assert same_bits(prompts(apart), prompts(dense)) and same_bits(apart, dense)
    assert same_bits(page[:, size:], before[:, size:]) and not same_bits(page, before)


def test_int32_slots_reach_the_end_of_a_large_ring():
    """slot x stride is computed in int64; the test has 2**31 states, of which no byte is allocated."""
    shape, step = torch.Size([2**29, 8, HV, V, K]), (8, 1)
    slots, entry = torch.tensor([2**29 - 1, 2**29]).int(), torch.tensor([7, 0]).int()
    assert lmdeploy._flat_index(slots, entry, shape, step).tolist() == [2**32 - 1, -1]


@pytest.mark.interpret
@pytest.mark.parametrize("ids", [[3, -1, 1], [SLOTS, -1, 2**30], [0, 5, -1]])
def test_windows_of_padding_are_left_alone(ids):
    """In the convolution of prompts a slot out of range outputs zeros and writes no window."""
    drafts, counts, seen = 2, [5, 2, 6], [0, 4, 7]
    weight, x = torch.randn(D, 1, W), torch.randn(1, sum(counts), D)
    state = torch.randn(SLOTS, D, W + drafts)
    before, info = state.clone(), prompt_meta(torch.tensor(ids), counts, seen, drafts)
    y = CONV.forward(x, weight, None, state, info, "silu")
    parts = y[0].split(counts)
    for n, (slot, part) in enumerate(zip(ids, parts, strict=True)):
        if not 0 <= slot < SLOTS:
            assert not part.any()
            continue
        alone = before[slot : slot + 1].clone()
        meta_alone = prompt_meta(torch.tensor([0]), counts[n : n + 1], seen[n : n + 1], drafts)
        expected = CONV.forward(x.split(counts, 1)[n], weight, None, alone, meta_alone, "silu")
        assert error(part, expected[0]) < 1e-6 and same_bits(state[slot], alone[0])
        before[slot] = state[slot]
    assert same_bits(state, before)


def test_prompts_of_no_token():
    x, offsets = inputs(1, 0), torch.tensor([0, 0]).int()
    o, none = RULE.chunk_gated_delta_rule(
        *arguments(x), initial_state=pool_of(2), state_indices=torch.tensor([1]), cu_seqlens=offsets,
        transpose_state_layout=True,
    )  # fmt: skip
    assert o.shape == (1, 0, HV, V) and none is None


# a whole layer's calls, as version 0.18 makes them


def meta(**fields):
    names = ("cu_seqlens", "is_init", "cache_seqlens", "spec_state_offsets", "spec_conv_offsets")
    ids = fields["origin_state_ids"]
    fields |= {"state_ids": ids.clamp(0), "conv_state_indices": ids.int()}
    return SimpleNamespace(**dict.fromkeys(names) | fields)


def prompt_meta(ids, counts, seen, drafts):
    """Return the fields of lmdeploy's GatedDeltaMeta for a prefill of `counts` tokens after `seen`."""
    counts, seen = torch.tensor(counts), torch.tensor(seen)
    fields = {"is_decoding": False, "origin_state_ids": ids, "is_init": seen == 0}
    fields["cu_seqlens"] = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    if drafts:
        span, columns = torch.arange(-W, 0), W + drafts
        kv = seen + counts
        fields["spec_conv_offsets"] = ((seen[:, None] + span[1:]) % columns, (kv[:, None] + span) % columns)
        fields["spec_state_offsets"] = (seen % (1 + drafts), kv % (1 + drafts))
    return meta(**fields)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_layers_calls_from_prompt_to_decode(drafts):
    """Two prompts in two pieces, one a single token, then steps, equal one pass; the slots held NaN."""
    channels, total = 2 * H * K + HV * V, 16
    weight, bias = torch.randn(channels, 1, W), torch.randn(channels)
    A_log, dt_bias = torch.randn(HV), torch.randn(HV)
    x = torch.randn(2, total, channels)
    a, b = torch.randn(2, total, HV), torch.randn(2, total, HV)
    ids = torch.tensor([3, 1])
    conv_state = torch.full((SLOTS, channels, W + drafts), NAN)
    ring = (1 + drafts,) if drafts else ()
    state = torch.full((SLOTS, *ring, HV, V, K), NAN)
    out = torch.zeros(2, total, HV, V, dtype=torch.float64)

    def run(spans, info):
        tokens, la, lb = (torch.cat([t[n, s] for n, s in enumerate(spans)])[None] for t in (x, a, b))
        mixed = CONV.forward(tokens, weight, bias, conv_state, info, "silu")
        q, k, v = mixed.split([H * K, H * K, HV * V], 2)
        o = RULE.forward(
            q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V)), lb, la, dt_bias,
            -A_log.exp(), state, info, HV // H, True,
        )  # fmt: skip
        parts = o[0].split([s.stop - s.start for s in spans])
        for n, (part, span) in enumerate(zip(parts, spans, strict=True)):
            out[n, span] = part.double()

    run([slice(0, 7), slice(0, 2)], prompt_meta(ids, [7, 2], [0, 0], drafts))
    run([slice(7, 8), slice(2, 9)], prompt_meta(ids, [1, 7], [7, 2], drafts))
    at = [8, 9]
    while max(at) + 1 + drafts <= total:
        info = meta(is_decoding=True, origin_state_ids=ids)
        if drafts:
            info.cache_seqlens = torch.tensor(at).int()
        run([slice(p, p + 1 + drafts) for p in at], info)
        # of three drafts two are accepted
        at = [p + min(2, 1 + drafts) for p in at]
    mixed, _ = reference_layers.causal_conv1d(x, weight[:, 0], bias, activation="silu")
    q, k, v = mixed.split([H * K, H * K, HV * V], 2)
    expected, _ = gated_delta_rule(
        q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V)), a, b, A_log=A_log,
        dt_bias=dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, **L2,
    )  # fmt: skip
    for n in range(2):
        assert at[n] >= 13 and error(out[n, : at[n]], expected[n, : at[n]]) < 1e-5


# the convolution by itself


@pytest.mark.parametrize("with_state", [False, True])
def test_conv_of_prompts(with_state):
    x, weight, bias = torch.randn(1, 7, D), torch.randn(D, W), torch.randn(D)
    seq_idx = torch.tensor([[0, 0, 0, 2, 2, 2, 2]]).int()
    states = torch.randn(3, D, W - 1) if with_state else None
    y = lmdeploy.causal_conv1d_fn(x.transpose(1, 2), weight, bias, seq_idx, states, activation="silu")
    expected, _ = reference_layers.causal_conv1d(
        x, weight, bias, activation="silu", initial_state=states, cu_seqlens=torch.tensor([0, 3, 3, 7])
    )
    assert y.shape == (1, D, 7) and error(y.transpose(1, 2), expected) < 1e-5
    assert same_bits(CONV.conv1d_fn(x.transpose(1, 2), weight, bias, seq_idx[0], states, False, "swish"), y)
    with pytest.raises(NotImplementedError, match="return_final_states"):
        lmdeploy.causal_conv1d_fn(x.transpose(1, 2), weight, return_final_states=True)


@pytest.mark.parametrize("T", [None, 1, 3])
@pytest.mark.parametrize("with_ring", [False, True])
def test_conv_step(T, with_ring):
    columns = W + 2
    x, weight = torch.randn(3, D) if T is None else torch.randn(3, D, T), torch.randn(D, W)
    state, index = torch.randn(SLOTS, D, columns), torch.tensor([4, -1, 7]).int()
    seen = torch.tensor([1, 3, 8]).int() if with_ring else None
    before = state.clone()
    y = CONV.update_fn(x, state, weight, None, "silu", index, seen)
    assert y.shape == x.shape and not y[1].any()
    for n, slot in ((0, 4), (2, 7)):
        tokens = x[n : n + 1] if T is None else x[n].t()
        start = int(seen[n]) if with_ring else columns
        order = [(start - (W - 1) + i) % columns for i in range(W - 1)]
        expected, _ = reference_layers.causal_conv1d(
            tokens[None], weight, activation="silu", initial_state=before[slot][None][..., order]
        )
        assert error(y[n].t() if T else y[n : n + 1], expected[0]) < 1e-5
        # the slot keeps its other columns, and the packet is at its place
        if with_ring:
            where = [(start + t) % columns for t in range(T or 1)]
            before[slot][:, where] = tokens.t()
        else:
            before[slot] = torch.cat([before[slot], tokens.t()], 1)[:, -columns:]
    assert same_bits(state, before)


def test_patch(monkeypatch):
    """Our classes are subclasses of lmdeploy's, its layers' methods are ours, and undo restores all."""
    modules = {m[0]: types.ModuleType(m[0]) for m in (*lmdeploy.PACKAGE.served, *lmdeploy.PACKAGE.wrapped)}
    for module, name, _ in lmdeploy.PACKAGE.served:
        vars(modules[module])[name] = type(name, (), {})
    for module, name, method, _ in lmdeploy.PACKAGE.wrapped:
        setattr(vars(modules[module]).setdefault(name, type(name, (), {})), method, lambda *args: args)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    backend = modules["lmdeploy.pytorch.backends.cuda.gated_delta_rule"]
    theirs, model = backend.CudaGatedDeltaRuleImpl, modules["lmdeploy.pytorch.models.qwen3_5"]
    forward = model.Qwen3_5GatedDeltaNet.forward
    with lmdeploy.patch_lmdeploy() as patch:
        made = backend.CudaGatedDeltaRuleImpl()
        assert patch.is_active and isinstance(made, lmdeploy.GatedDeltaRule) and isinstance(made, theirs)
        assert model.Qwen3_5GatedDeltaNet.forward is not forward
    assert backend.CudaGatedDeltaRuleImpl is theirs and model.Qwen3_5GatedDeltaNet.forward is forward


def test_register_asks_the_environment(monkeypatch):
    """GDN_ENGINES switches the start-up hook; a name that is not known is an error."""
    calls = []
    monkeypatch.setattr(lmdeploy, "patch_lmdeploy", lambda: calls.append(1))
    for value, count in (("", 0), ("vllm", 0), ("vllm, lmdeploy", 1), ("all", 2)):
        monkeypatch.setenv("GDN_ENGINES", value)
        lmdeploy.register()
        assert len(calls) == count
    monkeypatch.setenv("GDN_ENGINES", "lmdeply")
    with pytest.raises(ValueError, match="GDN_ENGINES: expected some of vllm, sglang, lmdeploy or all"):
        lmdeploy.register()


def test_what_is_computed_once_a_step():
    """The second layer of a step reuses the first one's mask and ring indices."""
    info = prompt_meta(torch.tensor([3, 1]), [4, 2], [0, 4], 2)
    x, weight, pool = torch.randn(1, 6, D), torch.randn(D, 1, W), pool_of(SLOTS, 3)
    for _ in range(2):
        CONV.forward(x, weight, None, torch.randn(SLOTS, D, W + 2), info, "silu")
        mask, rings = info.has_initial_state, dict(info._gdn_windows)
        RULE._prompts(
            tuple(inputs(1, 6)[name] for name in "qkv"), {}, pool, info.origin_state_ids, info.cu_seqlens,
            info.spec_state_offsets, meta=info, has_initial_state=mask, state_v_first=True,
        )  # fmt: skip
    assert info.has_initial_state is mask and len(info._gdn_ring) == 1
    assert all(info._gdn_windows[key] is ring for key, ring in rings.items())


def layer_of(activation="silu"):
    """Return what lmdeploy's layer has, and its projections as identities on given tensors."""
    D2 = 2 * H * K + HV * V
    conv = SimpleNamespace(weight=torch.randn(D2, 1, W), bias=None)
    conv.causal_conv1d_func = SimpleNamespace(activation=activation)
    return SimpleNamespace(
        conv1d=conv, norm=layer.build_rmsnorm_gated(V, 1e-5, activation="swish"), A_log=torch.randn(HV),
        dt_bias=torch.randn(HV), head_k_dim=K, head_v_dim=V, kv_ratio=HV // H, key_dim=H * K,
        value_dim=HV * V, gated_delta=SimpleNamespace(use_qk_l2norm_in_kernel=True), out_proj=lambda x: x,
    )  # fmt: skip


def test_a_decode_step_of_a_layer_is_one_call():
    """A layer's forward is one decode_step, with the bits of its parts; prompts and drafts are lmdeploy's."""
    made, B = layer_of(), 3
    D2 = 2 * H * K + HV * V
    mixed, z = torch.randn(1, B, D2), torch.randn(1, B, HV, V)
    b, a = torch.randn(1, B, H, HV // H), torch.randn(1, B, HV)
    windows, states = torch.randn(SLOTS, D2, W), pool_of(SLOTS)
    ids, copies = torch.tensor([3, -1, 5]), (windows.clone(), states.clone())
    forward = layer._decode_by(lambda self, x: (mixed, z, b, a), lambda *args, **kwargs: "lmdeploy")
    with torch.no_grad():
        y = forward(
            made, torch.zeros(1, B, 8), (windows, states), meta(is_decoding=True, origin_state_ids=ids)
        )
        info = meta(is_decoding=True, origin_state_ids=ids)
        convolved = CONV.forward(mixed, made.conv1d.weight, None, copies[0], info, "silu")
        q, k, v = convolved.split([H * K, H * K, HV * V], 2)
        o = RULE.forward(
            q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V)), b, a, made.dt_bias,
            -made.A_log.exp(), copies[1], info, HV // H, True,
        )  # fmt: skip
        expected = made.norm(o, z)
    assert error(y, expected.flatten(2)) < 1e-5 and not y[0, 1].any()
    assert error(windows, copies[0]) < 1e-6 and error(states, copies[1]) < 1e-5
    for other in (
        prompt_meta(ids, [1, 1, 1], [0, 4, 7], 0), meta(is_decoding=True, origin_state_ids=ids[:1]),
        meta(is_decoding=True, origin_state_ids=ids, cache_seqlens=torch.tensor([1, 2, 3]).int()),
    ):  # fmt: skip
        assert forward(made, torch.zeros(1, B, 8), (windows, states), other) == "lmdeploy"
    # a rejected step goes to lmdeploy, and nothing has been written
    made.conv1d.causal_conv1d_func.activation, before = "gelu", states.clone()
    info = meta(is_decoding=True, origin_state_ids=ids)
    assert forward(made, torch.zeros(1, B, 8), (windows, states), info) == "lmdeploy"
    assert same_bits(states, before)


def test_the_order_of_qwen3_nexts_projection():
    """q | k | v of all heads, z, b and a come from the groups of key heads, as lmdeploy splits them."""
    made, ratio = layer_of(), HV // H
    groups, ba = torch.randn(1, 5, H, 2 * K + 2 * ratio * V), torch.randn(1, 5, H, 2, ratio)
    mixed, z, b, a = layer.ordering_of_qwen3_next(lambda *args: None)(made, groups.flatten(2), ba.flatten(2))
    q, k, v, gate = groups.split([K, K, ratio * V, ratio * V], -1)
    assert torch.equal(mixed, torch.cat([x.flatten(2) for x in (q, k, v)], -1))
    assert torch.equal(z, gate.reshape(1, 5, HV, V))
    assert torch.equal(b, ba[..., 0, :]) and torch.equal(a, ba[..., 1, :])
    assert b.flatten(2).data_ptr() == b.data_ptr()
