"""Test GatedDeltaNet: its reference, padding, packing, caches, PyTorch features, Transformers' weights."""

import contextlib
import copy
import doctest
import importlib
from dataclasses import replace
from inspect import signature

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gdn
import gdn.layers.gated_deltanet
from gdn import reference
from gdn.backends import load
from gdn.layers import projections
from gdn.ops import fastpath
from gdn.reference.layer import causal_conv1d, rms_norm_gated

SIZES = {"hidden_size": 24, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 8, "head_v_dim": 12}


def build(dtype=torch.float32, **options):
    layer = gdn.GatedDeltaNet(**SIZES | options, dtype=dtype)
    with torch.no_grad():
        layer.norm.weight.normal_(1, 0.2)
        layer.dt_bias += 3  # decays of a few tokens
    return layer


def reference_layer(layer, hidden, parameters=None, conv_state=None, state=None, cu_seqlens=None):
    """Return the layer's output and cache in fp64, computed by the references alone."""
    p = parameters or {name: x.detach().double() for name, x in layer.named_parameters()}
    x = hidden.double()
    H, HV = layer.num_k_heads, layer.num_v_heads
    qkv, window = causal_conv1d(
        F.linear(x, p["in_proj_qkv.weight"]), p["conv1d.weight"], p.get("conv1d.bias"), activation="silu",
        initial_state=conv_state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    q, k, v = qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    o, state = reference.gated_delta_rule(
        q.unflatten(-1, (H, -1)), k.unflatten(-1, (H, -1)), v.unflatten(-1, (HV, -1)),
        F.linear(x, p["in_proj_a.weight"]), F.linear(x, p["in_proj_b.weight"]), initial_state=state,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=p["A_log"], dt_bias=p["dt_bias"],
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=layer.allow_neg_eigval, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    z = F.linear(x, p["in_proj_z.weight"]).unflatten(-1, (HV, -1))
    normed = rms_norm_gated(o, z, p["norm.weight"], eps=layer.norm.eps, activation=layer.norm.activation)
    return F.linear(normed.flatten(-2), p["out_proj.weight"]), window, state


def largest_error(x, expected):
    """Return the larger of the relative RMS and the scaled maximal error, or infinity for NaN."""
    x, expected = x.detach().double(), expected.detach().double()
    rms = (x - expected).norm() / expected.norm().clamp(min=1e-30)
    largest = (x - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    error = torch.maximum(rms, largest)
    return float("inf") if error.isnan() else float(error)


OPTIONS = [
    {},
    {
        "allow_neg_eigval": True,
        "output_gate": "sigmoid",
        "norm_eps": 1e-3,
        "with_conv_bias": True,
        "conv_size": 2,
    },
    {"num_k_heads": 1, "num_v_heads": 3, "head_v_dim": 5, "conv_size": 1},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference_and_gradients(options):
    layer = build(torch.float64, **options)
    hidden = torch.randn(2, 70, SIZES["hidden_size"], dtype=torch.float64, requires_grad=True)
    cache = gdn.GatedDeltaNetCache()
    outputs = layer(hidden, cache=cache), cache.conv_state, cache.state
    leaves = {name: x.detach().clone().requires_grad_() for name, x in layer.named_parameters()}
    expected = reference_layer(layer, hidden, leaves)
    seeds = [torch.randn_like(x) for x in outputs]
    got = torch.autograd.grad(outputs, (hidden, *layer.parameters()), seeds)
    ref = torch.autograd.grad(expected, (hidden, *leaves.values()), seeds)
    for a, b in zip((*outputs, *got), (*expected, *ref), strict=True):
        assert b.numel() == 0 or (b.any() and largest_error(a, b) < 1e-9)
    assert largest_error(layer(hidden), expected[0]) < 1e-9
    wrong = (hidden.flip(1), hidden.roll(1, 1), hidden * (torch.arange(70) != 30)[:, None])
    assert all(largest_error(layer(x), expected[0]) > 1e-3 for x in wrong)


class Scaled(torch.nn.Linear):
    """A projection that a package has replaced."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", ["none", "hooks", "replaced", "frozen", "checkpoint", "autocast"])
def test_the_gradient_of_the_input_is_added_in_matmuls(monkeypatch, change):
    """Bits and saved bytes are those of the modules; only the input's gradient has fewer roundings."""
    layer, calls = build(torch.float64 if change != "autocast" else torch.float32), []
    if change == "hooks":
        layer.in_proj_b.register_forward_hook(lambda *_: calls.append("b"))
        layer.conv1d.register_forward_hook(lambda *_: calls.append("conv"))
    elif change == "replaced":
        layer.in_proj_z.__class__ = Scaled
    elif change == "frozen":
        layer.in_proj_qkv.requires_grad_(False), layer.in_proj_b.requires_grad_(False)
    hidden = torch.randn(2, 70, SIZES["hidden_size"], dtype=layer.dt_bias.dtype, requires_grad=True)
    seed = torch.randn_like(hidden)

    def run():
        kept, parameters = {}, {x.untyped_storage().data_ptr() for x in layer.parameters()}

        def pack(x):
            storage = x.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in parameters)
            return x

        autocast = torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), autocast:
            is_kept = change != "checkpoint"
            y = layer(hidden) if is_kept else checkpoint(layer, hidden, use_reentrant=False)
        leaves = [hidden, *(x for x in layer.parameters() if x.requires_grad)]
        return sum(kept.values()), y, *torch.autograd.grad(y, leaves, seed.to(y.dtype))

    chained = run()
    monkeypatch.setattr(projections, "_can_chain", lambda *_: False)
    monkeypatch.setattr(projections, "has_own_forward", lambda _: False)
    monkeypatch.setattr(gdn.layers.conv, "has_own_forward", lambda _: False)
    apart = run()
    assert calls == (["conv", "b"] * 2 if change == "hooks" else [])
    assert chained[0] <= apart[0]
    assert largest_error(chained[2], apart[2]) < 1e-14
    assert all(
        torch.equal(x, y) for x, y in zip((chained[1], *chained[3:]), (apart[1], *apart[3:]), strict=True)
    )


def test_a_step_adds_and_copies_nothing_of_the_input_size():
    """The backward has no sum of gradients of the input, and no copy of those of q, k and v."""
    layer = build()
    hidden = torch.randn(1, 70, SIZES["hidden_size"], requires_grad=True)
    y = layer(hidden)
    with torch.profiler.profile() as profile:
        y.sum().backward()
    nodes = {event.key for event in profile.key_averages()}
    assert any("_ProjectionBackward" in node for node in nodes)
    assert any("_SplitConvolutionBackward" in node for node in nodes)
    assert not any("SplitWithSizesBackward" in node for node in nodes)


def test_gradients_take_the_memory_of_keys_that_nobody_reads(monkeypatch):
    """A backward may store dq and dk over q and k of a layer, but not if it keeps its graph."""
    seen, eager = [], load("eager")

    def backward(problem, *others):
        seen.append(problem.may_overwrite)
        return eager.chunk_backward(problem, *others)

    monkeypatch.setattr(fastpath, "select_backward", lambda _: replace(eager, chunk_backward=backward))
    monkeypatch.setattr(fastpath, "_calls", {})
    layer = build()
    hidden = torch.randn(1, 70, SIZES["hidden_size"], requires_grad=True)
    loss = layer(hidden).sum()
    for keeps in (True, True, False):
        torch.autograd.grad(loss, hidden, retain_graph=keeps)
    checkpoint(layer, hidden, use_reentrant=False).sum().backward()
    layer.conv1d.register_forward_hook(lambda *_: None)
    layer(hidden).sum().backward()
    q = torch.randn(1, 70, 2, 16, requires_grad=True)
    gdn.chunk_gated_delta_rule(q, q, q)[0].sum().backward()
    assert seen == [False, False, True, False, False, False]


@pytest.mark.parametrize("name", ["GatedDeltaNet", "KimiDeltaAttention", "packed", "a replaced norm"])
def test_recompute_keeps_less(name):
    """Outputs and gradients have the bits of a layer that keeps all; a graph may be used twice."""
    sizes = {"hidden_size": 64, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 32}
    kind = gdn.KimiDeltaAttention if name.startswith("Kimi") else gdn.GatedDeltaNet
    layers = [kind(**sizes, recompute=x, dtype=torch.bfloat16) for x in (False, True)]
    layers[1].load_state_dict(layers[0].state_dict())
    hidden = torch.randn(1, 300, 64, dtype=torch.bfloat16, requires_grad=True)
    options = {"cu_seqlens": torch.tensor([0, 70, 70, 290])} if name == "packed" else {}
    found, kept = [], []
    for layer in layers:
        if name == "a replaced norm":
            layer.norm.register_forward_hook(lambda *_: None)
        # the first call fills caches
        layer(hidden, **options)
        with torch.profiler.profile(profile_memory=True) as profile:
            y = layer(hidden, **options)
        kept.append(sum(x.self_cpu_memory_usage for x in profile.events()))
        leaves, seed = [hidden, *layer.parameters()], torch.ones_like(y)
        first = torch.autograd.grad(y, leaves, seed, retain_graph=True)
        found.append([y, *first, *torch.autograd.grad(y, leaves, seed)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    # q, k and v, the states of five chunks, and the input of out_proj
    less = 300 * 256 * 2 + 5 * 4 * 16 * 32 * 2 + 300 * 128 * 2 * (name != "a replaced norm")
    assert kept[0] - kept[1] >= less


@pytest.mark.parametrize("change", ["functional_call", "written input", "hooks", "random norm"])
def test_recompute_computes_what_the_forward_did(monkeypatch, change):
    """The backward sees the forward's parameters, its own layout of q, k and v, and no written tensor."""
    found, split = [], gdn.ops.conv._convolve_parts
    # kernels may write the parts as tensors of their own, but not where hooks or a mode see the split
    monkeypatch.setattr(gdn.ops.conv, "_convolve_parts", lambda *x: tuple(y.contiguous() for y in split(*x)))
    for recompute in (False, True):
        torch.manual_seed(0)
        layer = gdn.GatedDeltaNet(**SIZES, recompute=recompute)
        hidden = torch.randn(2, 70, SIZES["hidden_size"], requires_grad=True)
        leaves = {name: x.detach().mul(1.5).requires_grad_() for name, x in layer.named_parameters()}
        if change == "functional_call":
            y = torch.func.functional_call(layer, leaves, (hidden,))
        else:
            leaves = dict(layer.named_parameters())
            if change == "written input":
                layer.out_proj = torch.nn.Sequential(torch.nn.ReLU(inplace=True), layer.out_proj)
            if change == "random norm":
                layer.norm = DroppingNorm(layer.norm)
                leaves.pop("norm.weight")
            y = layer(hidden)
        is_hooked = change == "hooks"
        with torch.autograd.graph.save_on_cpu() if is_hooked else contextlib.nullcontext():
            found.append(torch.autograd.grad(y.square().sum(), [hidden, *leaves.values()]))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


CHANGED = [
    "A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight", "in_proj_z.weight", "conv1d.weight",
    "norm.weight", "out_proj.weight", "state", "window",
]  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", CHANGED)
def test_the_backward_refuses_what_was_changed_after_the_forward(name, recompute):
    """An optimizer's step, a reused buffer: within hooks, as those of recompute, autograd does not look."""
    layer = gdn.GatedDeltaNet(32, 2, 4, 8, 8, recompute=recompute)
    hidden, state = torch.randn(1, 70, 32, requires_grad=True), torch.randn(1, 4, 8, 8)
    cache = gdn.GatedDeltaNetCache(torch.randn(1, layer.conv1d.weight.shape[0], 3), state)
    tensors = {**dict(layer.named_parameters()), "state": state, "window": cache.conv_state}
    y = layer(hidden, cache=cache)
    with torch.no_grad():
        tensors[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_recompute_refuses_changes_of_what_it_reads_alone():
    """The gradient of out_proj's weight needs the norm's output, but no node of the norm runs."""
    layer = gdn.GatedDeltaNet(32, 2, 4, 8, 8, recompute=True)
    y = layer(torch.randn(1, 70, 32))
    with torch.no_grad():
        layer.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), layer.out_proj.weight)


class DroppingNorm(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, z):
        return torch.nn.functional.dropout(self.norm(x, z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[70], [50, 20], [1, 69], [2, 1, 67], [64, 1, 5], [66, 1, 1, 1, 1]])
def test_cache_equals_whole(cuts, dtype):
    """A sequence cut anywhere equals the whole, with gradients (chunks) and without (single tokens)."""
    layer, hidden = build(dtype), torch.randn(2, 70, SIZES["hidden_size"], dtype=dtype)
    whole = gdn.GatedDeltaNetCache()
    with torch.no_grad():
        expected = layer(hidden, cache=whole)
    for mode in (torch.no_grad, torch.enable_grad):
        cache = gdn.GatedDeltaNetCache()
        with mode():
            y = torch.cat([layer(part, cache=cache) for part in hidden.split(cuts, 1)], 1)
        limit = 1e-5 if dtype == torch.float32 else 3e-2
        assert largest_error(y, expected) < limit and largest_error(cache.state, whole.state) < limit
        # project piece by piece: on some machines the GEMM of one token has other bits than that of many
        projected = torch.cat([layer.in_proj_qkv(part) for part in hidden.split(cuts, 1)], 1)
        assert torch.equal(cache.conv_state, projected[:, -3:].transpose(1, 2))
        assert (
            largest_error(cache.conv_state, whole.conv_state) < limit / 10
            and cache.state.dtype == torch.float32
        )
    dropped = gdn.GatedDeltaNetCache()
    with torch.no_grad():
        y = torch.cat([layer(part, cache=gdn.GatedDeltaNetCache()) for part in hidden.split([35, 35], 1)], 1)
        layer(hidden[:, 67:], cache=dropped)
    assert largest_error(y, expected) > 5e-2 and largest_error(dropped.state, whole.state) > 1e-3


def test_gradient_flows_through_the_cache():
    """A later piece, short or long, passes a gradient through the state to the inputs of an earlier one."""
    layer = build(torch.float64)
    hidden = torch.randn(1, 20, SIZES["hidden_size"], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(hidden)[:, 18:].sum(), hidden)
    cache = gdn.GatedDeltaNetCache()
    pieces = [layer(part, cache=cache) for part in hidden.split([17, 1, 2], 1)]
    assert (
        largest_error(torch.autograd.grad(pieces[2].sum(), hidden)[0], expected) < 1e-9
        and expected[:, :17].any()
    )


def test_a_kept_cache_is_a_point_to_return_to():
    layer, hidden = build(), torch.randn(1, 6, SIZES["hidden_size"])
    with torch.no_grad():
        cache = gdn.GatedDeltaNetCache()
        layer(hidden[:, :3], cache=cache)
        kept = copy.copy(cache)
        first = layer(hidden[:, 3:], cache=cache)
        assert torch.equal(layer(hidden[:, 3:], cache=kept), first)


MASKS = {
    "left": [[0] * 5 + [1] * 20, [1] * 25],
    "right": [[1] * 9 + [0] * 16, [1] * 25],
    "holes": [[1] * 4 + [0] * 3 + [1] * 18, [0, 1] * 12 + [1]],
    "a row of nothing": [[0] * 25, [1] * 24 + [0]],
    "nothing": [[0] * 25, [0] * 25],
}


@pytest.mark.parametrize("name", list(MASKS))
def test_padding(name):
    """Only real tokens count, in outputs, states and gradients, in first and later pieces, long and short."""
    layer, hidden = build(torch.float64), torch.randn(2, 53, SIZES["hidden_size"], dtype=torch.float64)
    pattern = torch.tensor(MASKS[name])
    mask = torch.cat([pattern, pattern.flip(1), torch.tensor([[1, 0, 1], [0, 0, 1]])], 1)
    filled = hidden.masked_fill(mask[..., None] == 0, float("nan")).requires_grad_()
    cache, start, outputs = gdn.GatedDeltaNetCache(), 0, []
    for length in (25, 25, 3):
        seen = mask[:, : start + length].to(torch.bool if start else torch.float32)
        outputs.append(layer(filled[:, start : start + length], attention_mask=seen, cache=cache))
        start += length
    y = torch.cat(outputs, 1)
    assert not y[mask == 0].any()
    for b in range(2):
        real = mask[b] == 1
        expected, window, state = reference_layer(layer, hidden[b][real][None])
        assert largest_error(y[b][real], expected[0]) < 1e-9
        assert (
            largest_error(cache.state[b], state[0]) < 1e-9
            and largest_error(cache.conv_state[b], window[0]) < 1e-9
        )
    grads = torch.autograd.grad(y.square().sum(), (filled, *layer.parameters()))
    assert (
        all(g.isfinite().all() for g in grads) and not grads[0][mask == 0].any() and grads[0][mask == 1].all()
    )
    with torch.no_grad():
        short = gdn.GatedDeltaNetCache()
        steps = [
            layer(filled[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=short)
            for t in range(mask.shape[1])
        ]
    assert largest_error(torch.cat(steps, 1), y) < 1e-9 and largest_error(short.state, cache.state) < 1e-9


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed(index_dtype):
    layer, hidden = build(), torch.randn(1, 90, SIZES["hidden_size"])
    cu = torch.tensor([0, 0, 1, 66, 80, 85], dtype=index_dtype)
    cache = gdn.GatedDeltaNetCache()
    with torch.no_grad():
        y = layer(hidden, cu_seqlens=cu, cu_seqlens_cpu=cu, cache=cache)
        more = torch.randn(1, 10, SIZES["hidden_size"])
        again = layer(more, cu_seqlens=torch.arange(0, 11, 2), cache=cache)
    offsets = cu.tolist()
    assert not y[:, 85:].any()
    for n in range(5):
        own = torch.cat([hidden[:, offsets[n] : offsets[n + 1]], more[:, 2 * n : 2 * n + 2]], 1)
        expected, window, state = reference_layer(layer, own)
        assert (
            largest_error(
                torch.cat([y[:, offsets[n] : offsets[n + 1]], again[:, 2 * n : 2 * n + 2]], 1), expected
            )
            < 1e-5
        )
        assert (
            largest_error(cache.state[n], state[0]) < 1e-5
            and largest_error(cache.conv_state[n], window[0]) < 1e-5
        )


@pytest.mark.parametrize("kind", [gdn.GatedDeltaNet, gdn.KimiDeltaAttention])
def test_tokens_past_the_end_may_hold_any_value(kind):
    """NaN past cu_seqlens[-1] reaches no output, state, window or gradient, and has none."""
    layer, cu = kind(32, 2, 4, 8, 8), torch.tensor([0, 10, 40])
    found = []
    for tail in (0.0, float("nan"), 1e38):
        hidden, cache = (
            torch.randn(1, 50, 32, generator=torch.Generator().manual_seed(1)),
            gdn.GatedDeltaNetCache(),
        )
        hidden[:, 40:] = tail
        hidden.requires_grad_()
        y = layer(hidden, cu_seqlens=cu, cache=cache)
        gradients = torch.autograd.grad(y.square().sum(), [hidden, *layer.parameters()])
        assert not y[:, 40:].any() and not gradients[0][:, 40:].any()
        found.append([y, cache.state, cache.conv_state, *gradients])
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))
    assert all(x.isfinite().all() for x in found[0])


def test_empty():
    layer, cache = build(), gdn.GatedDeltaNetCache()
    for T in (0, 3, 0):
        kept = cache.state
        y = layer(torch.randn(2, T, SIZES["hidden_size"]), cache=cache)
        assert y.shape == (2, T, SIZES["hidden_size"]) and cache.state.shape == (2, 4, 8, 12)
    assert torch.equal(kept, cache.state) and cache.state.any()


def test_precisions():
    """bf16 and autocast stay near fp64, and the gates' parameters of a bf16 layer are fp32."""
    hidden = torch.randn(2, 70, SIZES["hidden_size"])
    layer = build(torch.bfloat16)
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert layer.to("meta").A_log.dtype == torch.float32
    layer = build(torch.bfloat16)
    y = layer(hidden.bfloat16())
    assert y.dtype == torch.bfloat16 and largest_error(y, reference_layer(layer, hidden.bfloat16())[0]) < 3e-2
    layer = build()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(hidden)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and largest_error(y, reference_layer(layer, hidden)[0]) < 3e-2
    assert all(p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())
    assert layer.bfloat16()(hidden.bfloat16()).isfinite().all()


def test_compile():
    """One graph covers every length, with a mask and gradients; steps with a cache compile too."""
    layer, D = build(recompute=True), SIZES["hidden_size"]
    forward = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (40, 65):
        hidden, mask = torch.randn(2, T, D), (torch.rand(2, T) > 0.3).long()
        with torch._dynamo.config.patch(error_on_recompile=T == 65):
            pair = [f(hidden, attention_mask=mask) for f in (layer, forward)]
        grads = [torch.autograd.grad(y.square().sum(), layer.parameters()) for y in pair]
        assert largest_error(pair[1], pair[0]) < 1e-6
        assert all(largest_error(b, a) < 1e-5 for a, b in zip(*grads, strict=True))
    with torch.no_grad():
        caches = gdn.GatedDeltaNetCache(), gdn.GatedDeltaNetCache()
        for step, T in enumerate((40, 1, 1)):
            hidden = torch.randn(2, T, D)
            with torch._dynamo.config.patch(error_on_recompile=step == 2):
                pair = [f(hidden, cache=c) for f, c in zip((layer, forward), caches, strict=True)]
            assert (
                largest_error(pair[1], pair[0]) < 1e-6
                and largest_error(caches[1].state, caches[0].state) < 1e-6
            )


@pytest.mark.parametrize("is_counted", [(True, False), (False, True)], ids=["forward", "backward"])
def test_modes_around_one_pass_of_a_checkpointed_layer(is_counted):
    """The forward that the backward repeats saves the same tensors, whatever watches one of both."""
    layer, hidden = build(), torch.randn(2, 70, SIZES["hidden_size"], requires_grad=True)
    count = [FlopCounterMode(display=False) if x else contextlib.nullcontext() for x in is_counted]
    with count[0]:
        y = checkpoint(layer, hidden, use_reentrant=False)
    with count[1]:
        y.sum().backward()
    (expected,) = torch.autograd.grad(layer(hidden).sum(), hidden)
    assert largest_error(hidden.grad, expected) < 1e-6


def test_a_checkpoint_keeps_nothing_that_it_can_compute_again():
    layer, hidden = build(), torch.randn(2, 300, SIZES["hidden_size"], requires_grad=True)

    def kept(call):
        """Return the bytes that are still held after a forward, over those of its output."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            y = call()
        return sum(event.self_cpu_memory_usage for event in seen.events()) / y.nbytes

    assert kept(lambda: checkpoint(layer, hidden, use_reentrant=False)) < 1.2
    assert kept(lambda: layer(hidden)) > 5, "what counts can count"


def test_module():
    """Checkpointing, deepcopy and a state_dict change no result, but for the order of dx's sum."""
    layer, hidden = build(), torch.randn(2, 70, SIZES["hidden_size"], requires_grad=True)
    y = layer(hidden)
    expected = torch.autograd.grad(y.square().sum(), (hidden, *layer.parameters()))
    again = checkpoint(layer, hidden, use_reentrant=False)
    got = torch.autograd.grad(again.square().sum(), (hidden, *layer.parameters()))
    # dx is not summed in the projections' matmuls there
    assert torch.equal(again, y) and largest_error(got[0], expected[0]) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(got[1:], expected[1:], strict=True))
    other = build()
    assert not torch.equal(other(hidden), y)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(hidden), y) and torch.equal(copy.deepcopy(layer)(hidden), y)


def test_initial_gates():
    layer = gdn.GatedDeltaNet(8, 512, 512, 1, 1)
    A, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 0 < A.min() < 1 and 15 < A.max() <= 16.001 and abs(A.mean() - 8) < 1
    assert 0.0009 < dt.min() < 0.002 and 0.08 < dt.max() < 0.101
    with torch.no_grad():
        layer.A_log.fill_(float("nan"))
        layer.reset_gates()
    assert layer.A_log.isfinite().all()


HIDDEN = torch.zeros(2, 5, SIZES["hidden_size"])


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (ValueError, "hidden_size", {"hidden_size": 0}),
        (ValueError, "conv_size", {"conv_size": 0}),
        (TypeError, "head_k_dim", {"head_k_dim": 8.0}),
        (ValueError, "num_v_heads", {"num_v_heads": 1}),
        (ValueError, "num_v_heads", {"num_v_heads": 3}),
        (ValueError, "output_gate", {"output_gate": "tanh"}),
        (ValueError, "backend", {"backend": "cudnn"}),
    ],
)
def test_constructor_refusals(error, name, options):
    with pytest.raises(error, match=rf"^{name}: expected .*, got "):
        gdn.GatedDeltaNet(**SIZES | options)


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (ValueError, "hidden", {"hidden": HIDDEN[..., 1:]}),
        (TypeError, "hidden", {"hidden": HIDDEN.long()}),
        (ValueError, "attention_mask", {"attention_mask": torch.ones(2, 4)}),
        (ValueError, "attention_mask", {"attention_mask": torch.ones(2, 1, 5, 5)}),
        (
            ValueError,
            "attention_mask",
            {"attention_mask": torch.ones(2, 5), "cu_seqlens": torch.tensor([0, 5])},
        ),
        (ValueError, "hidden", {"cu_seqlens": torch.tensor([0, 5])}),
        (ValueError, "cache", {"cache": gdn.GatedDeltaNetCache(torch.zeros(3, 80, 3))}),
        (ValueError, "cache", {"cache": gdn.GatedDeltaNetCache(None, torch.zeros(2, 4, 12, 8))}),
        (TypeError, "cache", {"cache": {}}),
        (ValueError, "hidden", {"hidden": HIDDEN.bfloat16()}),
    ],
)
def test_call_refusals(error, name, options):
    layer, call = build(), {"hidden": HIDDEN} | options
    with pytest.raises(error, match=rf"^{name}: expected .*, got "):
        layer(call.pop("hidden"), **call)


def transformers_layer(model, ratio, dtype=torch.float32):
    """Return a Transformers layer of the family with random weights, and a fresh cache for it."""
    pytest.importorskip("transformers")
    from transformers import DynamicCache

    camel, text = {"qwen3_next": ("Qwen3Next", ""), "qwen3_5": ("Qwen3_5", "Text")}[model]
    configuration = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    config = getattr(configuration, f"{camel}{text}Config")(
        hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=2 * ratio, linear_key_head_dim=8,
        linear_value_head_dim=12, linear_conv_kernel_dim=4, num_hidden_layers=1,
        layer_types=["linear_attention"], rms_norm_eps=1e-5, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=8,
    )  # fmt: skip
    layer = getattr(modeling, f"{camel}GatedDeltaNet")(config, 0).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        # decays last some tokens: of a strong decay the fp32 running sum is off by more than the limit
        layer.dt_bias.sub_(3)
    return layer, DynamicCache(config=config)


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5"])
class TestTransformers:
    def test_same_numbers(self, model, ratio):
        """Outputs and states agree for the whole sequence, in pieces and step by step."""
        theirs, _ = transformers_layer(model, ratio)
        ours, hidden = gdn.GatedDeltaNet.from_transformers(theirs), torch.randn(2, 150, 24)
        with torch.no_grad():
            expected, exact = theirs(hidden), reference_layer(ours, hidden)[0]
            # the name is `cache` since Transformers 5.24, and `cache_params` before
            (name,) = {"cache", "cache_params"} & set(signature(theirs.forward).parameters)
            assert largest_error(ours(hidden), expected) < 1e-5
            assert largest_error(ours(hidden), exact) < max(2e-6, 1.1 * largest_error(expected, exact))
            for cuts in ([150], [100, 50], [1, 149], [64, 1, 85], [146, 1, 1, 1, 1]):
                _, cache = transformers_layer(model, ratio)
                own = gdn.GatedDeltaNetCache()
                for part, exact_part in zip(hidden.split(cuts, 1), exact.split(cuts, 1), strict=True):
                    x, y = ours(part, cache=own), theirs(part, **{name: cache})
                    # Transformers' result for a single token is off by 2e-5 on some machines
                    assert largest_error(x, exact_part) < 5e-6 and largest_error(x, y) < 1e-5 + largest_error(
                        y, exact_part
                    )
                kept = cache.layers[0]
                assert largest_error(own.state, kept.recurrent_states[0]) < 1e-5
                assert largest_error(own.conv_state, kept.conv_states[0][..., -3:]) < 1e-5

    def test_left_padding_and_gradients(self, model, ratio):
        theirs, _ = transformers_layer(model, ratio)
        ours, hidden = gdn.GatedDeltaNet.from_transformers(theirs), torch.randn(2, 40, 24)
        mask = torch.ones(2, 40, dtype=torch.long)
        mask[0, :7] = 0
        outputs = [f(hidden, attention_mask=mask)[mask == 1] for f in (ours, theirs)]
        assert largest_error(*outputs) < 1e-5
        got = torch.autograd.grad(outputs[0].square().sum(), (ours.out_proj.weight, ours.A_log, ours.dt_bias))
        expected = torch.autograd.grad(
            outputs[1].square().sum(), (theirs.out_proj.weight, theirs.A_log, theirs.dt_bias)
        )
        assert all(largest_error(a, b) < 1e-4 for a, b in zip(got, expected, strict=True))

    def test_weights(self, model, ratio):
        """Weights load from a module or its state_dict with their dtypes; other layers raise."""
        theirs, _ = transformers_layer(model, ratio, torch.bfloat16)
        ours, hidden = gdn.GatedDeltaNet.from_transformers(theirs), torch.randn(1, 9, 24).bfloat16()
        assert ours.in_proj_qkv.weight.dtype == torch.bfloat16 and ours.norm.eps == 1e-5
        weights = theirs.state_dict()
        again = gdn.GatedDeltaNet.from_transformers(weights, num_k_heads=2, norm_eps=1e-5)
        assert torch.equal(again(hidden), ours(hidden))
        with pytest.raises(ValueError, match=r"^num_k_heads: expected .*, got None"):
            gdn.GatedDeltaNet.from_transformers(weights)
        with pytest.raises(ValueError, match=r"^source: expected .*, got HV="):
            gdn.GatedDeltaNet.from_transformers(weights, num_k_heads=3)
        with pytest.raises(ValueError, match=r"^source: expected .*, got A_log, conv1d.weight"):
            gdn.GatedDeltaNet.from_transformers({k: v for k, v in weights.items() if "in_proj" not in k})
        weights["norm.weight"] = weights["norm.weight"] * 2
        other = gdn.GatedDeltaNet.from_transformers(weights, num_k_heads=2)
        assert largest_error(other(hidden), ours(hidden)) > 0.1


def test_examples():
    assert doctest.testmod(gdn.layers.gated_deltanet).failed == 0
