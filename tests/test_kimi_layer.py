"""Test KimiDeltaAttention: its reference, caches, packing, padding, weights of three Transformers files."""

import doctest
import importlib
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import gdn
import gdn.layers.kimi_delta_attention
from gdn import reference
from gdn.reference.layer import causal_conv1d, rms_norm_gated

SIZES = {"hidden_size": 24, "num_k_heads": 2, "head_k_dim": 8, "num_v_heads": 4, "head_v_dim": 12}
OPTIONS = [
    {},
    {"gate_rank": 6},
    {"lower_bound": -5.0},
    {"gate_rank": 6, "lower_bound": -5.0, "norm_eps": 1e-3},
]


def build(dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = gdn.KimiDeltaAttention(**SIZES | options, dtype=dtype)
    with torch.no_grad():
        layer.norm.weight.normal_(1, 0.2)
        layer.dt_bias += 3  # decays of a few tokens
    return layer


def reference_layer(layer, x, p):
    """Return the layer's output, computed by the references alone from parameters p."""
    H, HV = layer.num_k_heads, layer.num_v_heads

    def project(name):
        maps = [f"{name}.weight"] if f"{name}.weight" in p else [f"{name}.0.weight", f"{name}.1.weight"]
        y = x
        for key in maps:
            y = F.linear(y, p[key])
        return y.unflatten(-1, (HV, -1))

    qkv, _ = causal_conv1d(F.linear(x, p["in_proj_qkv.weight"]), p["conv1d.weight"], activation="silu")
    q, k, v = qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    o, _ = reference.gated_delta_rule(
        q.unflatten(-1, (H, -1)), k.unflatten(-1, (H, -1)), v.unflatten(-1, (HV, -1)), project("in_proj_a"),
        F.linear(x, p["in_proj_b.weight"]), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        A_log=p["A_log"], dt_bias=p["dt_bias"], lower_bound=layer.lower_bound,
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    normed = rms_norm_gated(
        o, project("in_proj_z"), p["norm.weight"], eps=layer.norm.eps, activation="sigmoid"
    )
    return F.linear(normed.flatten(-2), p["out_proj.weight"])


@pytest.mark.parametrize("options", OPTIONS)
def test_reference_and_gradients(options):
    layer = build(**options)
    x = torch.randn(2, 70, 24, dtype=torch.float64, requires_grad=True)
    p = {name: w.detach().clone().requires_grad_() for name, w in layer.named_parameters()}
    y, expected = layer(x), reference_layer(layer, x, p)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-10)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    for name, a, b in zip(["x", *p], found, torch.autograd.grad(expected, [x, *p.values()], dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=name)


def test_cache_padding_and_packing():
    """They are shared with GatedDeltaNet; a padded, a packed and a cut call give the same tokens."""
    layer, x = build(gate_rank=6), torch.randn(2, 70, 24, dtype=torch.float64)
    with torch.no_grad():
        whole, cache = layer(x), gdn.GatedDeltaNetCache()
        cut = torch.cat([layer(part, cache=cache) for part in x.split([60, 1, 9], 1)], 1)
        torch.testing.assert_close(cut, whole)
        assert cache.state.shape == (2, 4, 8, 12)
        mask = torch.ones(2, 75)
        mask[:, :5] = 0
        padded = layer(F.pad(x, (0, 0, 5, 0), value=float("nan")), attention_mask=mask)
        torch.testing.assert_close(padded[:, 5:], whole)
        packed = layer(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, 70, 140]))
        torch.testing.assert_close(packed.view_as(whole), whole)


FILES = [
    ("kimi_linear", "KimiLinearDeltaAttention", {}),
    ("glm5_next", "Glm5NextTextLinearAttention", {"linear_lower_bound": -5.0}),
    ("glm5_next", "Glm5NextTextLinearAttention", {"linear_lower_bound": None}),
    ("bailing_hybrid", "BailingHybridDeltaAttention", {"kda_safe_gate": True, "kda_lower_bound": -5.0}),
    ("bailing_hybrid", "BailingHybridDeltaAttention", {"kda_safe_gate": False, "kda_lower_bound": -5.0}),
]


@pytest.mark.parametrize(("file", "name", "options"), FILES)
def test_weights_of_transformers(file, name, options):
    module = f"transformers.models.{file}.modeling_{file}"
    try:
        their = getattr(importlib.import_module(module), name)
    except ImportError as e:
        pytest.skip(str(e))
    sizes = {"hidden_size": 48, "linear_num_heads": 3, "linear_head_dim": 16, "linear_conv_kernel_dim": 4}
    more = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "layer_types": ["linear_attention"]}
    torch.manual_seed(0)
    layer = their(SimpleNamespace(**sizes, **more, **options), 0)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.3 if p.dim() > 1 else 1.0)
        x = torch.randn(2, 70, 48)
        expected, ours = layer(x), gdn.KimiDeltaAttention.from_transformers(layer)
        y = ours(x)
    # their softplus, log(1 + e^x), rounds
    assert (y - expected).norm() < 1e-5 * expected.norm()
    assert ours.lower_bound == (
        -5.0 if -5.0 in options.values() and options.get("kda_safe_gate", True) else None
    )
    by_weights = gdn.KimiDeltaAttention.from_transformers(
        layer.state_dict(), lower_bound=ours.lower_bound, norm_eps=1e-5
    )
    with torch.no_grad():
        assert torch.equal(by_weights(x), y)


def test_refusals():
    for error, message, options in (
        (ValueError, "num_v_heads: expected a multiple of num_k_heads=2", {"num_v_heads": 3}),
        (ValueError, "gate_rank: expected a positive size, got 0", {"gate_rank": 0}),
        (TypeError, "gate_rank: expected an int or None, got float", {"gate_rank": 1.5}),
        (ValueError, "lower_bound: expected a number below 0, got 5", {"lower_bound": 5}),
    ):
        with pytest.raises(error, match=message):
            gdn.KimiDeltaAttention(**SIZES | options)
    with pytest.raises(ValueError, match="source: expected the tensors of a KimiLinear"):
        gdn.KimiDeltaAttention.from_transformers(gdn.GatedDeltaNet(8, 1, 1, 4, 4))


def test_example():
    assert doctest.testmod(gdn.layers.kimi_delta_attention).failed == 0
