"""Test SGLang's functions and kernel interface on gdn: decode, verify and commit, extend with tracking."""

import sys
import types

import pytest
import torch
from kit.api import reference
from kit.serving import error, inputs, pool_of, same_bits
from kit.signatures import SGLANG, SGLANG_KERNEL, parameters, real

from gdn.integrations import sglang
from gdn.reference.recurrence import gated_delta_rule

pytestmark = pytest.mark.usefixtures("default_backend_and_device")

NAN = float("nan")
SLOTS, H, HV, K, V = 9, 2, 4, 16, 24
L2 = {"use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize("module, name", SGLANG)
def test_signatures(module, name):
    assert parameters(getattr(sglang, name)) == SGLANG[module, name]
    package = real(module, name)
    assert package is None or parameters(package) == SGLANG[module, name]


@pytest.mark.parametrize("name", SGLANG_KERNEL)
def test_kernel_signatures(name):
    assert parameters(getattr(sglang.GDNKernel, name)) == SGLANG_KERNEL[name]
    package = real("sglang.srt.layers.attention.linear.kernels.gdn_triton", "TritonGDNKernel")
    assert package is None or parameters(getattr(package, name)) == SGLANG_KERNEL[name]


def update(x, state, indices, **options):
    """Call the update by position, as SGLang does; packed logits have no batch axis."""
    a, b = (x[name] if options.get("cu_seqlens") is None else x[name][0] for name in "ab")
    return sglang.fused_sigmoid_gating_delta_rule_update(
        x["A_log"],
        a,
        x["dt_bias"],
        1.0,
        20.0,
        x["q"],
        x["k"],
        x["v"],
        b,
        state,
        indices,
        None,
        True,
        **options,
    )


def test_decode_by_the_kernel_interface():
    """Decode works on views of a packed projection and a pool inside pages, with padding of a graph."""
    x, offsets = inputs(1, 4, raw=True), torch.arange(5).int()
    index = torch.tensor([3, -1, 7, 0]).int()
    memory = torch.randn(SLOTS, HV * V * K + 16)
    state = memory[:, 16:].unflatten(1, (HV, V, K))
    expected = reference.decode(**x, state=state, read_index=index, cu_seqlens=offsets)
    o = sglang.GDNKernel().decode(
        x["q"], x["k"], x["v"], x["a"][0], x["b"][0], A_log=x["A_log"], dt_bias=x["dt_bias"],
        ssm_states=state, cache_indices=index, query_start_loc=offsets, layer_id=3,
    )  # fmt: skip
    assert error(o, expected.o) < 1e-5 and not o[0, 1].any() and error(state, expected.state) < 1e-5


def test_packed_decode():
    B, columns = 3, 2 * H * K + HV * V
    mixed, index = torch.randn(B, columns + 6)[:, :columns], torch.tensor([2, -1, 5]).int()
    a, b, A_log, dt_bias = torch.randn(B, HV), torch.randn(B, HV), torch.randn(HV), torch.randn(HV)
    state, other = pool_of(SLOTS), None
    other = state.clone()
    q, k, v = (x.unsqueeze(1) for x in mixed.split([H * K, H * K, HV * V], 1))
    x = {"q": q.unflatten(2, (H, K)), "k": k.unflatten(2, (H, K)), "v": v.unflatten(2, (HV, V))}
    gates = {"a": a[:, None], "b": b[:, None], "A_log": A_log, "dt_bias": dt_bias}
    expected = reference.decode(**x, **gates, state=state, read_index=index)
    out = torch.full((B, 1, HV, V), NAN)
    got, same = sglang.fused_recurrent_gated_delta_rule_packed_decode(
        mixed, a, b, A_log, dt_bias, None, state, out, index, True
    )
    assert (
        got is out and same is state and error(out, expected.o) < 1e-5 and error(state, expected.state) < 1e-5
    )
    kernel = {
        "A_log": A_log, "dt_bias": dt_bias, "scale": K**-0.5, "ssm_states": other, "cache_indices": index,
        "num_v_heads": HV, "head_v_dim": V,
    }  # fmt: skip
    again = sglang.GDNKernel().packed_decode(mixed, a, b, **kernel, replayssm_d=None)
    assert again.shape == (1, B, HV, V) and same_bits(again[0], out[:, 0]) and same_bits(other, state)
    with pytest.raises(NotImplementedError, match="ReplaySSM"):
        sglang.GDNKernel().packed_decode(mixed, a, b, **kernel, replayssm_d=mixed)


def channel_call(T, rows):
    """Return tokens of rows with a decay per key channel, the reference's gate, and SGLang's flat one."""
    x = inputs(1, rows * T, raw=True, is_per_channel=True)
    gate = {name: x.pop(name) for name in ("a", "b", "A_log", "dt_bias")}
    flat = {
        "a": gate["a"][0].flatten(1), "b": gate["b"][0], "dt_bias": gate["dt_bias"].flatten(),
        "A_log": gate["A_log"].view(1, 1, HV, 1),
    }  # fmt: skip
    return x, gate, flat, torch.arange(rows + 1).int() * T


@pytest.mark.parametrize("bound", [None, -5.0])
def test_key_channels(bound):
    """Decode and verification with is_kda, whatever axes the logits have."""
    rest = {"softplus_beta": 1.0, "softplus_threshold": 20.0, "lower_bound": bound, "is_kda": True, **L2}
    x, gate, flat, offsets = channel_call(1, 3)
    index, state = torch.tensor([3, -1, 7]).int(), pool_of(SLOTS)
    expected = reference.decode(
        **x, **gate, lower_bound=bound, state=state, read_index=index, cu_seqlens=offsets
    )
    for a in (flat["a"], gate["a"], gate["a"][0], flat["a"][None]):
        pool = state.clone()
        o = sglang.fused_sigmoid_gating_delta_rule_update(
            **x, **flat | {"a": a}, initial_state_source=pool, initial_state_indices=index,
            cu_seqlens=offsets, **rest,
        )  # fmt: skip
        assert error(o, expected.o) < 1e-5 and error(pool, expected.state) < 1e-5 and not o[0, 1].any()
    x, gate, flat, offsets = channel_call(3, 3)
    kept, before = torch.zeros(4, 5, HV, V, K), state.clone()
    rows = torch.tensor([1, 0, 3]).int()
    expected = reference.decode(
        **x, **gate, lower_bound=bound, state=state, read_index=index, cu_seqlens=offsets, write="none",
        intermediate=kept, intermediate_row=rows,
    )  # fmt: skip
    o = sglang.fused_sigmoid_gating_delta_rule_update(
        **x, **flat, initial_state_source=state, initial_state_indices=index, cu_seqlens=offsets,
        disable_state_update=True, intermediate_states_buffer=kept, intermediate_state_indices=rows, **rest,
    )  # fmt: skip
    assert error(o, expected.o) < 1e-5 and error(kept, expected.extra) < 1e-5 and same_bits(state, before)


def test_packed_decode_of_key_channels():
    x, gate, flat, _ = channel_call(1, 3)
    index, state = torch.tensor([2, -1, 5]).int(), pool_of(SLOTS)
    expected = reference.decode(
        **{name: value.transpose(0, 1) for name, value in x.items()}, A_log=gate["A_log"],
        a=gate["a"].transpose(0, 1), b=gate["b"].transpose(0, 1), dt_bias=gate["dt_bias"], state=state,
        read_index=index, lower_bound=-5.0,
    )  # fmt: skip
    mixed = torch.cat([x[name][0].flatten(1) for name in ("q", "k", "v")], 1)
    out = torch.full((3, 1, HV, V), NAN)
    got, same = sglang.fused_recurrent_kda_packed_decode(
        mixed, flat["a"], flat["b"], flat["A_log"].view(-1), flat["dt_bias"], K**-0.5, state, out, index,
        True, -5.0,
    )  # fmt: skip
    assert got is out and same is state
    assert error(out, expected.o) < 1e-5 and error(state, expected.state) < 1e-5


@pytest.mark.parametrize("bound", [None, -5.0])
def test_the_kernel_of_key_channels(bound):
    """Prompts with a snapshot, then a decoded token, from raw logits in SGLang's shapes."""
    kernel, state, index = sglang.KDAKernel(), pool_of(SLOTS), torch.tensor([3, -1, 7]).int()
    heads = {"ssm_states": state, "cache_indices": index, "lower_bound": bound}
    for T in (70, 1):
        x, gate, flat, offsets = channel_call(T, 3)
        heads |= {"A_log": flat["A_log"], "dt_bias": flat["dt_bias"], "query_start_loc": offsets}
        where, before = {"state": state.clone(), "cu_seqlens": offsets}, state[3].double()
        if T == 1:
            expected = reference.decode(**x, **gate, lower_bound=bound, **where, read_index=index)
            o = kernel.decode(**x, a=flat["a"][None], b=flat["b"][None], **heads)
            assert error(o, expected.o) < 1e-5 and error(state, expected.state) < 1e-5
            continue
        track = torch.full((3, HV, V, K), NAN)
        expected = reference.prefill(**x, **gate, lower_bound=bound, **where, state_index=index)
        o = kernel.extend(
            **x, g=gate["a"], beta=gate["b"], **heads, beta_is_raw=True, track_state=track,
            track_chunk_idx=torch.tensor([1, -1, 0]).int(),
        )  # fmt: skip
        assert error(o, expected.o) < 1e-5 and error(state, expected.state) < 1e-5
        first = {name: t[:, :64] for name, t in (*x.items(), ("g", gate["a"]), ("beta", gate["b"]))}
        _, S = gated_delta_rule(
            **first, A_log=gate["A_log"], dt_bias=gate["dt_bias"], lower_bound=bound, state_v_first=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, initial_state=before[None], **L2,
        )  # fmt: skip
        assert error(track[0], S[0]) < 1e-5


def verify_call(tree=False, pitch=5):
    """Return a verification of three requests of three drafts, one padding, with rows out of order."""
    x, offsets = inputs(1, 9, raw=True), torch.tensor([0, 3, 6, 9]).int()
    index, rows = torch.tensor([4, -1, 2, 8]).int(), torch.tensor([1, 0, 3, 2])
    parent = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 0]]) if tree else None
    buffer = torch.full((4, pitch, HV, V, K), NAN)
    return x, offsets, index, rows, parent, buffer


@pytest.mark.interpret
@pytest.mark.parametrize("tree", [False, True])
def test_verify_and_commit(tree):
    """With P3 and P4 verification does not write the pool, and the commit copies accepted steps into it."""
    x, offsets, index, rows, parent, buffer = verify_call(tree)
    pools, before = pool_of(1, SLOTS), None
    before = pools.clone()
    o = sglang.GDNKernel().target_verify(
        x["A_log"], x["dt_bias"], x["q"], x["k"], x["v"], x["a"][0], x["b"][0], ssm_states=pools[0],
        cache_indices=index, query_start_loc=offsets, intermediate_states_buffer=buffer,
        intermediate_state_indices=rows, cache_steps=3, retrieve_parent_token=parent, stable_rows=False,
    )  # fmt: skip
    expected = reference.decode(
        **x, state=pools[0], read_index=index[:3], write="none", cu_seqlens=offsets, intermediate=buffer * 0,
        intermediate_row=rows[:3], parent=parent,
    )  # fmt: skip
    assert same_bits(pools, before) and error(o, expected.o) < 1e-5 and not o[0, 3:6].any()
    assert error(buffer[[1, 3], :3], expected.extra[[1, 3], :3]) < 1e-5 and buffer[[0, 2]].isnan().all()
    steps = torch.tensor([2, 1, 0])
    sglang.fused_mamba_state_scatter_with_mask(pools, buffer[None], index[:3], steps, rows[:3])
    assert same_bits(pools[0, 4], buffer[1, 2]) and same_bits(pools[0, 2], buffer[3, 0])
    assert same_bits(pools[0, [0, 1, 3, 5, 6, 7, 8]], before[0, [0, 1, 3, 5, 6, 7, 8]])
    # used as pool slots or as rows of the batch, these rows would name other states
    assert not same_bits(buffer[1, 2], buffer[0, 2])


def test_commit_without_rows():
    pools, buffer = pool_of(3, SLOTS), pool_of(3, 2, 4)
    before = pools.clone()
    sglang.fused_mamba_state_scatter_with_mask(
        pools, buffer, torch.tensor([5, 6]).int(), torch.tensor([3, -1])
    )
    assert same_bits(pools[:, 5], buffer[:, 0, 3]) and same_bits(pools[:, 6], before[:, 6])


@pytest.mark.interpret
@pytest.mark.parametrize("are_apart", [False, True])
def test_commit_with_tracking(are_apart):
    """The commit covers states and windows of all layers, also where the windows of a request overlap."""
    D, W, T = 6, 4, 5
    wide = torch.randn(2, 3, D, T + W - 2).bfloat16()
    windows = wide.unfold(3, W - 1, 1).transpose(2, 3)
    caches = types.SimpleNamespace(
        temporal=pool_of(2, SLOTS),
        intermediate_ssm=pool_of(2, 3, T),
        conv=[torch.zeros(2, SLOTS, D, W - 1).bfloat16(), torch.zeros(0)],
        intermediate_conv_window=[windows.contiguous() if are_apart else windows, torch.zeros(0)],
    )
    slots, steps, rows = torch.tensor([4, -1, 2]).int(), torch.tensor([3, 1, -1]), torch.tensor([2, 1, 0])
    for given, at in ((rows, [2, 1, 0]), (None, [0, 1, 2])):
        before = caches.temporal.clone(), caches.conv[0].clone()
        sglang.scatter_mamba_states_after_mtp_verify(caches, slots, steps, None, steps, given)
        for dst, src, old in (
            (caches.temporal, caches.intermediate_ssm, before[0]), (caches.conv[0], windows, before[1]),
        ):  # fmt: skip
            assert same_bits(dst[:, 4], src[:, at[0], 3])
            others = [0, 1, 2, 3, 5, 6, 7, 8]
            assert same_bits(dst[:, others], old[:, others])
        # the first two requests cross a boundary of the prefix cache, at different steps
        track = torch.tensor([7, 1, -1]), torch.tensor([0, 4, -1])
        sglang.scatter_mamba_states_after_mtp_verify(caches, slots, steps, *track, given)
        for dst, src in ((caches.temporal, caches.intermediate_ssm), (caches.conv[0], windows)):
            assert same_bits(dst[:, 7], src[:, at[0], 0]) and same_bits(dst[:, 1], src[:, at[1], 4])
            assert same_bits(dst[:, 4], src[:, at[0], 3])


def test_drafts_adapt_within_the_pitch():
    """A packet may have fewer drafts than the buffer has room for."""
    x, offsets, index, rows, _, _ = verify_call()
    results = []
    for pitch in (3, 8):
        buffer, state = torch.full((4, pitch, HV, V, K), NAN), torch.ones(SLOTS, HV, V, K)
        update(
            x, state, index, cu_seqlens=offsets, disable_state_update=True, intermediate_states_buffer=buffer,
            intermediate_state_indices=rows,
        )  # fmt: skip
        results.append(buffer[[1, 3], :3])
    assert same_bits(*results)


def test_verify_with_gates_activated():
    x, state = inputs(2, 3), pool_of(SLOTS)
    buffer = torch.zeros(2, 3, HV, V, K)
    index = torch.tensor([1, 3])
    expected = reference.decode(**x, state=state, read_index=index, intermediate=buffer)
    o = sglang.fused_recurrent_gated_delta_rule_update(
        *(x[name] for name in ("q", "k", "v", "g", "beta")), None, state, index, None, True,
        intermediate_states_buffer=buffer,
    )  # fmt: skip
    assert (
        error(o, expected.o) < 1e-5
        and error(state, expected.state) < 1e-5
        and error(buffer, expected.extra) < 1e-5
    )


# prompts

LENGTHS = [130, 0, 64, 5, 128]


def prompts():
    x = inputs(1, sum(LENGTHS))
    return x, torch.tensor([0, *LENGTHS]).cumsum(0).int(), torch.tensor([6, 1, 0, 3, 8]).int()


def state_after(x, span, count, begin):
    """Return the reference's state after `count` tokens of a sequence."""
    part = {name: value[:, span.start : span.start + count] for name, value in x.items()}
    return gated_delta_rule(**part, initial_state=begin[None], state_v_first=True, **L2)[1][0]


def test_extend_tracks_in_fp32():
    x, offsets, index = prompts()
    state = pool_of(SLOTS).bfloat16()
    before = state.clone()
    where = {"ssm_states": state, "cache_indices": index, "query_start_loc": offsets}
    five = [x[name] for name in ("q", "k", "v", "g", "beta")]
    track, chunk = torch.full((5, HV, V, K), NAN), torch.tensor([2, -1, 0, 0, 1]).int()
    o, none, h = sglang.GDNKernel().extend(
        *five, **where, track_state=track, track_chunk_idx=chunk, output=None
    )
    assert none is None and h is None
    expected = reference.prefill(**x, state=before, cu_seqlens=offsets, state_index=index)
    assert error(o, expected.o) < 1e-5 and error(state, expected.state) < 5e-3
    for n in (0, 2, 3, 4):
        span = slice(*offsets[n : n + 2].tolist())
        exact = state_after(x, span, 64 * int(chunk[n]), before[index[n]].double())
        # a state rounded to bf16 would be off by 2e-3
        assert error(track[n], exact) < 1e-5, n
    # padding and a slot past the pool output zeros, and nothing is read or written
    odd = {"cache_indices": torch.tensor([6, 1, -1, SLOTS, 8]).int(), "ssm_states": before.clone()}
    padded, *_ = sglang.GDNKernel().extend(*five, **where | odd, track_state=track, track_chunk_idx=chunk)
    assert same_bits(padded[:, :130], o[:, :130]) and not padded[:, 130:199].any()
    assert same_bits(odd["ssm_states"][[6, 8]], state[[6, 8]])
    assert same_bits(odd["ssm_states"][[0, 3]], before[[0, 3]])
    plain, again = before.clone(), sglang.GDNKernel().extend(*five, **where | {"ssm_states": before.clone()})
    assert same_bits(again[0], o) and again[1:] == (None, None)
    sglang.GDNKernel().extend(
        *five, **where | {"ssm_states": plain}, inplace_update=False, track_state=track, track_chunk_idx=chunk
    )
    sglang.GDNKernel().extend(*five, **where | {"ssm_states": plain}, inplace_update=False)
    assert same_bits(plain, before)


def test_states_before_every_chunk():
    x, offsets, index = prompts()
    state = pool_of(SLOTS)
    before = state.clone()
    five = [x[name] for name in ("q", "k", "v", "g", "beta")]
    o, none, h = sglang.chunk_gated_delta_rule(*five, None, state, index, offsets, False, True)
    expected = reference.prefill(**x, state=before, cu_seqlens=offsets, state_index=index)
    assert none is None and error(o, expected.o) < 1e-5 and error(state, expected.state) < 1e-5
    row = 0
    for n, length in enumerate(LENGTHS):
        span = slice(*offsets[n : n + 2].tolist())
        for i in range(-(-length // 64)):
            assert error(h[0, row], state_after(x, span, 64 * i, before[index[n]].double())) < 1e-5, (n, i)
            row += 1
    assert row == 7 and h.shape[1] >= row and h.dtype == torch.float32


@pytest.mark.parametrize("head_first", [False, True])
def test_a_batch_of_prompts(head_first):
    x = inputs(2, 70)
    five = [x[name] for name in ("q", "k", "v", "g", "beta")]
    given = [t.transpose(1, 2) for t in five] if head_first else five
    o, _, h = sglang.chunk_gated_delta_rule(*given, head_first=head_first)
    expected = gated_delta_rule(**x)
    assert error(o.transpose(1, 2) if head_first else o, expected[0]) < 1e-5 and not h[0, 0].any()
    S = torch.randn(2, HV, K, V).bfloat16()
    before = S.clone()
    expected = gated_delta_rule(**x, initial_state=S, **L2)
    o, final, h = sglang.chunk_gated_delta_rule_npu(*given, initial_state=S, head_first=head_first, **L2)
    assert (
        error(o.transpose(1, 2) if head_first else o, expected[0]) < 1e-5 and error(final, expected[1]) < 1e-5
    )
    assert same_bits(S, before) and h.shape[2:] == (HV, K, V) and error(h[0, 0], S[0].double()) < 1e-6
    assert sglang.chunk_gated_delta_rule_npu(*given, None, None, False, None, head_first)[1] is None


def test_npu_signature_on_packed_prompts():
    x, offsets, _ = prompts()
    five = [x[name] for name in ("q", "k", "v", "g", "beta")]
    o, final, _ = sglang.chunk_gated_delta_rule_npu(*five, cu_seqlens=offsets, **L2)
    expected = gated_delta_rule(**x, cu_seqlens=offsets, **L2)
    assert error(o, expected[0]) < 1e-5 and error(final, expected[1]) < 1e-5


def test_what_gdn_does_not_have():
    x, state, index = inputs(1, 1, raw=True), pool_of(2), torch.tensor([1])
    for options in (
        {"lower_bound": -5.0},
        {"cache_ring": True},
        {"match_cutedsl_decode": True},
    ):
        with pytest.raises(NotImplementedError):
            update(x, state, index, **options)
    with pytest.raises(NotImplementedError, match="softplus"):
        sglang.fused_gdn_gating(x["A_log"], x["a"][0], x["b"][0], x["dt_bias"], 1.0, 30.0)


def test_patch(monkeypatch):
    modules = {m[0]: types.ModuleType(m[0]) for m in sglang.PACKAGE.served}
    dispatcher = modules["sglang.dispatcher"] = types.ModuleType("sglang.dispatcher")
    for module, name, serve in sglang.PACKAGE.served:
        own = type(name, (), {}) if isinstance(serve, type) else (lambda *args, **kwargs: "sglang's own")
        vars(modules[module])[name] = own
    kernels = modules["sglang.srt.layers.attention.linear.kernels.gdn_triton"]
    dispatcher.TritonGDNKernel = theirs = kernels.TritonGDNKernel
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with sglang.patch_sglang():
        assert isinstance(dispatcher.TritonGDNKernel(), sglang.GDNKernel)
        chunk = modules["sglang.kernels.ops.attention.fla.chunk"].chunk_gated_delta_rule
        x = inputs(1, 5)
        assert torch.is_tensor(chunk(*(x[name] for name in ("q", "k", "v", "g", "beta")))[0])
    assert dispatcher.TritonGDNKernel is theirs and chunk(1) == "sglang's own"
