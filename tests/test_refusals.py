"""Test that wrong arguments raise an error that names them, and touch nothing."""

import inspect

import numpy
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import gdn

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 8
RULES = [gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule]


def tokens(B=B, T=T):
    """Return q, k, v, g and beta by name."""
    return {
        "q": torch.randn(B, T, H, K), "k": torch.randn(B, T, H, K), "v": torch.randn(B, T, HV, V),
        "g": -torch.rand(B, T, HV), "beta": torch.rand(B, T, HV),
    }  # fmt: skip


def split(x):
    """Return the three tensors that are positional, and the others by name."""
    return [x[name] for name in "qkv"], {name: y for name, y in x.items() if name not in "qkv"}


def rule(function, **changes):
    first, options = split(tokens() | changes)
    return function(*first, **options)


def decode(**changes):
    return gdn.decode(**{**tokens(), "state": torch.randn(B, HV, K, V), **changes})


def prefill(**changes):
    x = {name: y[:1] for name, y in tokens().items()}
    where = {"cu_seqlens": torch.tensor([0, T]), "state_index": torch.tensor([0])}
    return gdn.prefill(**{**x, "state": torch.randn(B, HV, K, V), **where, **changes})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("call", [*(lambda f=f, **x: rule(f, **x) for f in RULES), decode, prefill])
def test_scale_is_finite(call, value):
    with pytest.raises(ValueError, match=r"scale: expected a finite number of at most 3.4e\+38, got "):
        call(scale=value)


@pytest.mark.parametrize("name", ["q", "v", "g", "beta"])
def test_tensors_are_strided(name):
    with pytest.raises(TypeError, match=f"{name}: expected a strided tensor, got layout torch.sparse_coo"):
        rule(gdn.chunk_gated_delta_rule, **{name: tokens()[name].to_sparse()})


@pytest.mark.parametrize("function", RULES)
@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state"])
def test_a_subclass_that_intercepts_operators_is_named(function, name):
    x = tokens() | {"initial_state": torch.randn(B, HV, K, V)}
    x[name] = TwoTensor(x[name], x[name].clone())
    with pytest.raises(TypeError, match=f"{name}: expected a plain tensor like q, got TwoTensor"):
        rule(function, **x)


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "state"])
def test_a_subclass_in_a_decode_is_named(name):
    x = tokens() | {"state": torch.randn(B, HV, K, V)}
    with pytest.raises(TypeError, match=f"{name}: expected a plain tensor like q, got TwoTensor"):
        gdn.decode(**x | {name: TwoTensor(x[name], x[name].clone())})


def test_parameters_and_a_call_of_one_subclass_are_supported():
    x = tokens()
    wanted, _ = rule(gdn.chunk_gated_delta_rule, **x)
    with torch.no_grad():
        o, _ = rule(gdn.chunk_gated_delta_rule, **x | {"beta": torch.nn.Parameter(x["beta"])})
        assert torch.equal(o, wanted)
    o, _ = rule(gdn.chunk_gated_delta_rule, **{n: TwoTensor(y, y.clone()) for n, y in x.items()})
    assert type(o) is TwoTensor and torch.equal(o.a, wanted)


def test_a_gradient_of_a_subclass_goes_through_the_operators():
    x = {name: y.requires_grad_() for name, y in tokens().items()}
    o, _ = rule(gdn.chunk_gated_delta_rule, **x)
    do = torch.randn_like(o)
    wanted = torch.autograd.grad(o, list(x.values()), do, retain_graph=True)
    got = torch.autograd.grad(o, list(x.values()), TwoTensor(do, do.clone()))
    for ours, plain in zip(got, wanted, strict=True):
        assert torch.equal(ours.a if isinstance(ours, TwoTensor) else ours, plain)


def overlapping():
    """Return a pool whose slots overlap: each begins within the previous one."""
    size = HV * K * V
    return torch.zeros(2 * size).as_strided((3, HV, K, V), (size // 2, K * V, V, 1))


@pytest.mark.parametrize("call", [decode, prefill])
def test_slots_must_not_overlap(call):
    with pytest.raises(ValueError, match=r"state: expected memory of its own for every element, got shape"):
        call(state=overlapping())


def test_windows_must_not_overlap():
    pool = torch.zeros(200).as_strided((3, 6, 3), (9, 3, 1))
    for call in (
        lambda: gdn.causal_conv1d_update(torch.randn(2, 6), pool, torch.randn(6, 4)),
        lambda: gdn.causal_conv1d(
            torch.randn(1, 5, 6), torch.randn(6, 4), state=pool, state_index=torch.tensor([1])
        ),
    ):
        with pytest.raises(ValueError, match="state: expected memory of its own"):
            call()


@pytest.mark.parametrize(
    "strides", [(1000, 64, 8, 1), (64, 128, 8, 1), (64, 192, 1, 8), (1, 3, 12, 96)], ids=str
)
def test_pools_in_any_order_with_any_gaps_are_supported(strides):
    pool = torch.zeros(3000).as_strided((2 if strides[0] != 1 else 3, HV, K, V), strides)
    o = decode(state=pool)
    assert o.isfinite().all() and pool.any()


def test_there_are_slots_for_all_rows():
    with pytest.raises(ValueError, match="state: expected at least 2 slots for 2 rows, got 1"):
        decode(state=torch.zeros(1, HV, K, V))
    with pytest.raises(ValueError, match="state: expected at least 2 slots for 2 rows, got 1"):
        gdn.decode_packed(
            torch.randn(2, 2 * H * K + HV * V), torch.randn(2, HV), torch.randn(2, HV), torch.zeros(HV), None,
            torch.zeros(1, HV, K, V), num_k_heads=H, head_k_dim=K, head_v_dim=V,
        )  # fmt: skip
    with pytest.raises(ValueError, match="state: expected at least 2 slots for 2 rows, got 1"):
        gdn.causal_conv1d_update(torch.randn(2, 6), torch.zeros(1, 6, 3), torch.randn(6, 4))
    with pytest.raises(ValueError, match="state: expected at least 2 slots for 2 rows, got 1"):
        gdn.causal_conv1d(
            torch.randn(1, 5, 6), torch.randn(6, 4), state=torch.zeros(1, 6, 3),
            cu_seqlens=torch.tensor([0, 2, 5]),
        )  # fmt: skip


def step(**changes):
    given = {
        "mixed_qkv": torch.randn(2, 2 * H * K + HV * V), "conv_state": torch.zeros(2, 2 * H * K + HV * V, 3),
        "conv_weight": torch.randn(2 * H * K + HV * V, 4), "conv_bias": None, "a": torch.randn(2, HV),
        "b": torch.randn(2, HV), "A_log": torch.zeros(HV), "dt_bias": None, "num_k_heads": H,
        "state": torch.zeros(2, HV, K, V), "head_k_dim": K, "head_v_dim": V,
    }  # fmt: skip
    return gdn.decode_step(**given | changes)


def test_there_are_slots_for_all_rows_of_a_step():
    with pytest.raises(ValueError, match="state: expected at least 2 slots for 2 rows, got 1"):
        step(state=torch.zeros(1, HV, K, V))
    with pytest.raises(ValueError, match="conv_state: expected at least 2 slots for 2 rows, got 1"):
        step(conv_state=torch.zeros(1, 2 * H * K + HV * V, 3))
    step(conv_state=torch.zeros(1, 2 * H * K + HV * V, 3), conv_index=torch.tensor([0, -1]))


def replay(**changes):
    history = {
        "history_u": torch.zeros(B, 8, HV, V), "history_k": torch.zeros(B, 8, H, K),
        "history_G": torch.zeros(B, 8, HV, dtype=torch.float64), "cursor": torch.zeros(B, dtype=torch.int32),
    }  # fmt: skip
    return gdn.replay_decode(**{**tokens(), "state": torch.zeros(B, HV, K, V), **history, **changes})


def test_there_are_slots_for_all_rows_of_a_replay():
    one = {name: x[:1] for name, x in {
        "state": torch.zeros(B, HV, K, V), "history_u": torch.zeros(B, 8, HV, V),
        "history_k": torch.zeros(B, 8, H, K), "history_G": torch.zeros(B, 8, HV, dtype=torch.float64),
        "cursor": torch.zeros(B, dtype=torch.int32),
    }.items()}  # fmt: skip
    with pytest.raises(ValueError, match="state: expected at least 2 slots for 2 rows, got 1"):
        replay(**one)


FORWARD_MODE = {
    "decode": lambda v: decode(v=v),
    "prefill": lambda v: prefill(v=v[:1]),
    "decode_functional": lambda v: gdn.decode_functional(
        **tokens() | {"v": v}, state=torch.zeros(B, HV, K, V)
    )[0],
    "causal_conv1d_update": lambda v: gdn.causal_conv1d_update(
        v.flatten(2), torch.zeros(B, HV * V, 3), torch.randn(HV * V, 4)
    ),
    "causal_conv1d with state": lambda v: gdn.causal_conv1d(
        v[:1].flatten(2), torch.randn(HV * V, 4), state=torch.zeros(B, HV * V, 3)
    )[0],
    "replay_decode": lambda v: replay(v=v),
    "decode_step": lambda v: step(mixed_qkv=torch.cat([v[:, 0].flatten(1), v[:, 1].flatten(1)], 1)),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_is_refused(name):
    v, function = torch.randn(B, T, HV, V), "decode" if name == "decode_functional" else name
    with pytest.raises(
        NotImplementedError, match=f"{function}: expected reverse-mode .* a forward-mode tangent of"
    ):
        torch.func.jvp(FORWARD_MODE[name], (v,), (torch.ones_like(v),))


@pytest.mark.parametrize("name", ["out", "intermediate", "state"])
def test_an_inference_tensor_is_refused_before_anything_is_written(name):
    state = torch.randn(B, HV, K, V)
    make = {
        "out": lambda: torch.zeros(B, T, HV, V), "intermediate": lambda: torch.zeros(B, T, HV, K, V),
        "state": lambda: state.clone(),
    }[name]  # fmt: skip
    with torch.inference_mode():
        frozen = make()
        decode(**{"state": state.clone(), name: make()})
    # the same call with ordinary tensors is cached, and must not let this one pass
    decode(**{"state": state.clone(), name: make()})
    given = {"state": state.clone(), name: frozen}
    before = {key: x.clone() for key, x in given.items()}
    with pytest.raises(
        ValueError, match=f"{name}: expected a tensor that may be written .* inference tensor"
    ):
        decode(**given)
    assert all(torch.equal(given[key], before[key]) for key in given)


def test_explain_refuses_what_the_call_refuses():
    x = tokens()
    with pytest.raises(
        ValueError, match="backend: expected None or one of hopper, triton, eager, got 'bogus'"
    ):
        gdn.explain(**x, backend="bogus")
    with pytest.raises(TypeError, match=r"explain: .* unexpected cu_seqlen \(did you mean cu_seqlens\?\)"):
        gdn.explain(**x, cu_seqlen=1)


def test_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("GDN_BACKEND", "tritn")
    for call in (lambda: rule(RULES[0]), decode, lambda: gdn.explain(**tokens())):
        with pytest.raises(
            ValueError, match=r"GDN_BACKEND \(environment\): expected one of hopper, .* 'tritn'"
        ):
            call()


@pytest.mark.parametrize("function", RULES)
def test_callers_of_fla_are_pointed_to_its_conventions(function):
    first, options = split(tokens())
    for call in (
        lambda: function(*first, options["g"], options["beta"], 0.5, None),
        lambda: function(*first, **options, head_first=False),
    ):
        with pytest.raises(TypeError, match="gdn.integrations.fla"):
            call()
    # an error of the function itself is not changed, and the signature is the function's
    with pytest.raises(TypeError) as error:
        function([1], *first[1:])
    assert str(error.value) == "q: expected a tensor, got list"
    assert "scale" in inspect.signature(function).parameters


def test_heads_before_tokens_are_named():
    first, options = split({name: x.transpose(1, 2) for name, x in tokens().items()})
    with pytest.raises(ValueError, match=r"q: expected tensors \[B, T, H, K\], tokens before heads"):
        gdn.chunk_gated_delta_rule(*first, **options)


def test_a_numpy_bool_is_a_bool():
    wanted, _ = rule(RULES[0], use_qk_l2norm_in_kernel=True)
    torch.manual_seed(0)
    first, options = split(tokens())
    wanted = gdn.chunk_gated_delta_rule(*first, **options, use_qk_l2norm_in_kernel=True)[0]
    o = gdn.chunk_gated_delta_rule(*first, **options, use_qk_l2norm_in_kernel=numpy.bool_(True))[0]
    assert torch.equal(o, wanted)
    leaf = first[0].clone().requires_grad_()
    gdn.chunk_gated_delta_rule(leaf, *first[1:], **options, state_v_first=numpy.bool_(False))[
        0
    ].sum().backward()
    decode(state_v_first=numpy.True_)
    with pytest.raises(TypeError, match="state_v_first: expected a bool, got int"):
        decode(state_v_first=1)


def packed_decode(**changes):
    given = {
        "mixed_qkv": torch.randn(2, 2 * H * K + HV * V), "a": torch.randn(2, HV), "b": torch.randn(2, HV),
        "A_log": torch.zeros(HV), "dt_bias": None, "state": torch.zeros(2, HV, K, V), "num_k_heads": H,
        "head_k_dim": K, "head_v_dim": V,
    }  # fmt: skip
    return gdn.decode_packed(**given | changes)


@pytest.mark.parametrize("call", [packed_decode, step])
def test_the_tensor_of_a_projection_is_named(call):
    """A wrong tensor is named, not one that it is compared with, nor a view of it."""
    few = torch.randn(2, HV - 1)
    for changes, match in (
        ({"a": few}, r"a: expected shape \[tokens=2, HV=4\], got \[2, 3\]"),
        ({"b": few}, r"b: expected shape \[tokens=2, HV=4\], got \[2, 3\]"),
        ({"mixed_qkv": few}, r"mixed_qkv: expected 2 \* 2 \* 8 \+ 4 \* 8 = 64 columns, got \[2, 3\]"),
        (
            {"mixed_qkv": torch.randn(2, 2 * H * K + HV * V, requires_grad=True)},
            "mixed_qkv: expected a tensor without gradient",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            call(**changes)


def test_a_misspelt_option_of_the_rule_has_its_name_in_the_error():
    for function in RULES:
        with pytest.raises(TypeError, match="[Dd]id you mean .?output_final_state"):
            rule(function, output_final_stat=True)


def test_arguments_that_a_call_leaves_out_are_named():
    """Refuse what has no place in a call, and name what is expected there."""
    with pytest.raises(ValueError, match="checkpoint_every: expected 0 without checkpoints, got 64"):
        prefill(checkpoint_every=64)
    with pytest.raises(
        ValueError, match="checkpoint_offsets: expected None without checkpoints, got a tensor"
    ):
        prefill(checkpoint_offsets=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"state: expected shape \[slots, HV=4, K=8, V=8\], got \[1, 2, 4, 8, 8\]"
    ):
        prefill(state=torch.randn(1, 2, HV, K, V))
    with pytest.raises(ValueError, match=r"x: expected shape \[B, D\] or \[B, T, D\], got \[6\]"):
        gdn.causal_conv1d_update(torch.randn(6), torch.zeros(1, 6, 3), torch.randn(6, 4))


def test_pools_are_read_in_floats():
    pool = gdn.allocate_int16_pool(2, num_v_heads=HV, head_k_dim=K, head_v_dim=V)
    with pytest.raises(TypeError, match="dtype: expected .*, got torch.int8"):
        pool.read(torch.tensor([0]), dtype=torch.int8)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"norm_eps": -1e-6}, "norm_eps: expected at least 0, got -1e-06"),
        ({"recompute": "yes"}, "recompute: expected a bool, got str"),
        ({"head_k_dim": 0}, "head_k_dim: expected a positive size, got 0"),
    ],
)
@pytest.mark.parametrize("layer", [gdn.GatedDeltaNet, gdn.KimiDeltaAttention])
def test_a_layer_checks_its_options(layer, options, match):
    sizes = {"hidden_size": 8, "num_k_heads": H, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V}
    with pytest.raises((TypeError, ValueError), match=match):
        layer(**sizes | options)
    with pytest.raises(TypeError, match="source: expected a module or a state_dict, got list"):
        layer.from_transformers([1])


def test_warmup_names_its_own_arguments():
    sizes = {"num_k_heads": H, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V}
    for changes, match in (
        ({"num_v_heads": 3}, "num_v_heads: expected a multiple of num_k_heads=2, got 3"),
        ({"num_k_heads": 0}, "num_k_heads: expected at least 1, got 0"),
        ({"conv_size": 0}, "conv_size: expected at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            gdn.warmup("cpu", **sizes | changes)
