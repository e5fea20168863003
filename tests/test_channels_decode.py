"""Test a decay per key channel in the kernels that run token by token, on every backend."""

from dataclasses import replace

import pytest
import torch
from kit import api
from kit.serving import (
    NAMES,
    TOLERANCE,
    B,
    T,
    error,
    find_wrong_state,
    inputs,
    moved,
    pool_of,
    protocols,
    same_bits,
    step_of,
)

import gdn
from gdn.ops import fastpath
from gdn.ops.warmup_calls import ENGINES
from gdn.ops.warmup_sizes import Sizes
from gdn.testing import Case, check, packed, rows
from gdn.testing.cases import CHANNEL_FACTORS

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HV, K = 4, 16
NAN = float("nan")
# dtype of the tokens, of the pool, and of the index tensors
KINDS = {
    "fp32": (F32, F32, torch.int64),
    "bf16": (BF16, F32, torch.int32),
    "bf16 pool": (BF16, BF16, torch.int32),
    "fp16": (F16, F16, torch.int64),
    "fp32 on bf16": (F32, BF16, torch.int64),
}
INTERPRETED = {
    ("P1 final", "bf16 pool", True),
    ("P2", "fp32", False),
    ("P4", "fp32", True),
}


def agrees(backend, device, x, tolerance, **options):
    """Assert that output, pool and intermediate states agree with the reference; return the first two."""
    expected = api.reference.decode(
        **x, **{k: v for k, v in options.items() if k not in ("max_seqlen", "exact_packet")}
    )
    y = moved(x, device)
    out = torch.full_like(y["v"], NAN)
    api.decode(**y, out=out, backend=backend, **options)
    assert error(out, expected.o) <= tolerance
    lead = 2 if "ring_pos" in x else 1
    assert find_wrong_state(y["state"], expected.state, x["state"], tolerance, lead) is None
    if "intermediate" in x:
        wrong = find_wrong_state(y["intermediate"], expected.extra, x["intermediate"], tolerance, lead=2)
        assert wrong is None
    return out.cpu(), y["state"].cpu()


@pytest.mark.parametrize(
    "name, kind, v_first",
    [
        pytest.param(*case, marks=[pytest.mark.interpret] if case in INTERPRETED else [])
        for case in ((name, kind, v_first) for name in NAMES for kind in KINDS for v_first in (True, False))
    ],
)
def test_protocol(backend, device, poison, name, kind, v_first):
    """Every protocol agrees with the reference, with a reset of one channel among the tokens."""
    dtype, pool, index = KINDS[kind]
    x = inputs(B, T, dtype=dtype, is_per_channel=True) | protocols(index, v_first, pool)[name]
    x["g"][:, 1, :, 3] = -1e6
    stored = min(x.get("intermediate", x["state"]).dtype, pool, dtype, key=lambda d: -TOLERANCE[d])
    agrees(backend, device, x, TOLERANCE[stored], state_v_first=v_first)


def raw(dtype=F32, *lead, **options):
    """Return a call on raw logits of a projection: a is a view of rows [tokens, HV K]."""
    x = inputs(*lead, dtype=dtype, raw=True, is_per_channel=True)
    projected = torch.randn(*lead, HV * K + 6).to(dtype)
    x["a"] = projected[..., 2 : 2 + HV * K].unflatten(-1, (HV, K))
    return x | options


RAW = [(None, F32), (-5.0, BF16), (-40.0, F16), (-5.0, F32), (None, BF16)]


@pytest.mark.parametrize(
    "bound, dtype",
    [pytest.param(*x, marks=[pytest.mark.interpret] if i < 2 else []) for i, x in enumerate(RAW)],
)
def test_raw_gates(backend, device, bound, dtype):
    x = raw(dtype, 1, 2, lower_bound=bound, state=pool_of(1))
    agrees(backend, device, x, TOLERANCE[dtype], allow_neg_eigval=True)
    if bound == -5.0:
        agrees(backend, device, x | {"A_log": None, "dt_bias": None}, TOLERANCE[dtype])


@pytest.mark.interpret
def test_a_lower_bound_of_a_decay_per_head(backend, device):
    x = inputs(1, 2, raw=True) | {"state": pool_of(1), "lower_bound": -3.0}
    agrees(backend, device, x, 1e-5)
    # the chunk form has no lower bound, and token by token is exact, too
    agrees(backend, device, x | {"A_log": None}, 1e-5, exact_packet=False)


@pytest.mark.interpret
def test_extreme_gates(backend, device):
    """Logits and rates of any size give finite states; thousands of nats and -inf are a reset."""
    extreme = torch.tensor([0.0, 1e38, -1e38, 25.0]).repeat(HV, K // 4)
    x = raw(F32, 1, 2, state=pool_of(1), a=extreme.expand(1, 2, HV, K), dt_bias=None)
    rates = torch.tensor([-torch.inf, 0.0, 1.0, 100.0])
    for bound in (None, -5.0):
        o, state = agrees(
            backend, device, x | {"lower_bound": bound, "A_log": rates[:3].repeat(2)[:HV]}, 1e-5
        )
        assert bool(o.isfinite().all() and state.isfinite().all())
    y = moved(x | {"lower_bound": -5.0, "A_log": rates}, device)
    assert bool(api.decode(**y, backend=backend).isfinite().all())
    x = inputs(2, 3, is_per_channel=True) | {"state": pool_of(2)}
    x["g"] = x["g"] * 4e4
    x["g"][0, 1], x["g"][1, 1, :, ::2] = -torch.inf, -1e6
    agrees(backend, device, x, 1e-5)


@pytest.mark.interpret
def test_any_strides_and_sizes(backend, device):
    """g may have any strides and dtype: a projection's rows, keys apart, one number for all channels."""
    x = inputs(1, 1, is_per_channel=True) | {"state": pool_of(1, v_first=False)}
    expected = agrees(backend, device, x, 1e-5, state_v_first=False)
    apart = torch.stack([x["g"], x["g"]], -1)[..., 1]
    found = agrees(backend, device, x | {"g": apart}, 1e-5, state_v_first=False)
    assert all(error(*pair) <= 1e-6 for pair in zip(found, expected, strict=True))
    one = x["g"][..., :1].bfloat16()
    wide = agrees(backend, device, x | {"g": one.expand(-1, -1, -1, K)}, 1e-5, state_v_first=False)
    per_head = agrees(backend, device, x | {"g": one[..., 0]}, 1e-5, state_v_first=False)
    assert all(error(*pair) <= 1e-6 for pair in zip(wide, per_head, strict=True))
    odd = {"HV": 3, "K": 37, "V": 5}
    x = inputs(1, 1, 1, **odd, is_per_channel=True) | {"state": pool_of(1, **odd)}
    agrees(backend, device, x, 1e-5, use_qk_l2norm_in_kernel=False, scale=0.3)


@pytest.mark.parametrize(
    "pool, v_first", [(F32, True), pytest.param(BF16, False, marks=pytest.mark.interpret), (F16, True)]
)
def test_a_packet_equals_single_steps(backend, device, pool, v_first):
    x = moved(raw(BF16, 1, 3, lower_bound=-5.0), device)
    state = pool_of(1, dtype=pool, v_first=v_first).to(device)
    heads = {k: x.pop(k) for k in ("A_log", "dt_bias", "lower_bound")}
    options = {"state_v_first": v_first, "backend": backend, "round_state": pool != F32, **heads}
    whole = state.clone()
    o = api.decode(**x, state=whole, **options)
    for t in range(3):
        token = {k: v[:, t : t + 1] for k, v in x.items()}
        assert same_bits(api.decode(**token, state=state, **options), o[:, t : t + 1])
    assert same_bits(whole, state)


@pytest.mark.interpret
def test_packed_rows_and_projections(backend, device):
    x = moved(raw(BF16, 1, 5, lower_bound=-5.0), device)
    pool, offsets = pool_of(4).to(device), torch.tensor([0, 2, 2, 4], device=device, dtype=torch.int32)
    where = {"cu_seqlens": offsets, "max_seqlen": 2, "read_index": torch.tensor([3, 0, 1], device=device)}
    expected_state = pool.clone()
    expected = api.decode(**x, state=expected_state, **where, backend=backend)
    assert not expected[0, 4:].any()
    mixed = torch.cat([x[name].flatten(2) for name in ("q", "k", "v")], -1)[0]
    sizes = {"num_k_heads": 2, "head_k_dim": K, "head_v_dim": 24, "lower_bound": -5.0}
    gates = (x["a"][0], x["b"][0], x["A_log"], x["dt_bias"])
    o = api.decode_packed(mixed, *gates, pool, **sizes, **where, backend=backend)
    assert same_bits(o, expected[0]) and same_bits(pool, expected_state)


@pytest.mark.interpret
def test_the_step_of_a_layer(backend, device):
    """decode_step has the bits of its three functions."""
    x, options = step_of(3, 2, HV, K, 24, 4, BF16, is_per_channel=True)
    x = moved(x, device)
    options |= {"lower_bound": -5.0, "backend": backend}
    names = ("conv_weight", "conv_bias", "conv_state", "z", "norm_weight", "mixed_qkv", "read_index")
    weight, bias, windows, z, gain, mixed, index = (x[name] for name in names)
    state = x["state"].clone()
    mixed = gdn.causal_conv1d_update(
        mixed[:, None], windows.clone(), weight, bias, activation="silu", state_index=index, backend=backend
    )[:, 0]
    gates = (x["a"], x["b"], x["A_log"], x["dt_bias"])
    o = api.decode_packed(mixed, *gates, state, **options, read_index=index)
    expected = gdn.rms_norm_gated(o, z, gain, backend=backend)
    out = api.decode_step(**x, **options)
    assert error(out, expected) <= 1e-3 and same_bits(x["state"], state)


RECURRENT = [
    Case("bounded", lengths=packed(0, 3, 2, tail=1), raw_gate="lower_bound", beta="negative", state="wide",
         use_qk_l2norm_in_kernel=True),
    Case("reset", lengths=rows(4), state="narrow", state_v_first=True, is_strided=True),
]  # fmt: skip


@pytest.mark.parametrize(
    "i, dtype", [pytest.param(0, BF16, marks=pytest.mark.interpret), (0, F32), (1, F32), (1, F16)]
)
def test_recurrent_form(backend, i, dtype, device):
    """Every output is within the limits of the recurrent form; gradients come from `eager`, on a GPU, too."""
    case = replace(RECURRENT[i], heads=(2, HV), sizes=(K, 24), is_per_channel=True)

    def recurrent(*x, **options):
        return gdn.fused_recurrent_kda(*x, **options, backend=backend)

    bad = [v for v in check(recurrent, case, dtype, device=device) if not v.ok]
    assert not bad, bad


@pytest.mark.gpu
@pytest.mark.parametrize("i", range(len(CHANNEL_FACTORS["gate"])))
def test_recurrent_form_of_many_tokens(i):
    """Every gate, each in one dtype; the forward alone, since the backward is that of the chunked form."""
    gate, dtype = CHANNEL_FACTORS["gate"][i], (F32, F16, BF16)[i % 3]
    case = Case(gate, lengths=packed(129, 3, 64), heads=(2, 4), sizes=(128, 128), is_per_channel=True)

    def recurrent(*x, **options):
        return gdn.fused_recurrent_kda(*x, **options, backend="triton")

    bad = [v for v in check(recurrent, case, dtype, device="cuda", with_backward=False) if not v.ok]
    assert not bad, bad


@pytest.mark.gpu
@pytest.mark.parametrize("pool", [F32, BF16])
def test_many_rows(pool):
    """The largest tiles agree with the reference, for one token and for packets."""
    for rows_, tokens, bound in ((256, 1, -5.0), (64, 4, None)):
        x = inputs(rows_, tokens, 2, 4, 128, 128, dtype=BF16, raw=True, is_per_channel=True)
        x |= {"state": pool_of(rows_, K=128, V=128, dtype=pool), "lower_bound": bound}
        agrees("triton", "cuda", x, TOLERANCE[BF16])


def test_the_gate_of_these_tests_can_fail(backend, device):
    """A decay of the wrong channel is seen."""
    x = inputs(2, 2, is_per_channel=True) | {"state": pool_of(2)}
    x["g"] *= 16
    expected = api.reference.decode(**x)
    wrong = x | {"g": x["g"].roll(1, -1)}
    y = moved(wrong, device)
    o = api.decode(**y, backend=backend)
    assert error(o, expected.o) > 1e-2 and find_wrong_state(y["state"], expected.state, x["state"], 1e-2)


def test_a_warmup_launches_every_binary_of_a_decode(monkeypatch):
    """Nothing is left to compile for a decode of other rows, on an imagined H200, whatever the bound is."""
    compiling = pytest.importorskip("kit.compiling")
    monkeypatch.setenv("GDN_BACKEND", "triton")
    # calls cached on CPU tensors are valid only while launches are recorded
    monkeypatch.setattr(fastpath, "_calls", {})
    sizes = Sizes(
        H=2, HV=4, K=128, V=128, W=4, T=3, rows=256, device=torch.device("cpu"), dtype=BF16,
        dt_bias_dtype=F32, backend="triton", is_per_channel=True, lower_bound=-5.0,
    )  # fmt: skip
    decodes = ("decode", "decode_packed", "decode_step", "decode_functional")
    calls = [call for name, _, call in ENGINES["gdn"](sizes, BF16) if name in decodes]

    def binaries(call):
        return set(compiling.jobs(call, "cuda:90"))

    warmed = set().union(*map(binaries, calls))
    options = {"H": 2, "HV": 4, "K": 128, "V": 128, "dtype": BF16, "raw": True, "is_per_channel": True}
    for rows_, tokens in ((1, 1), (7, 2), (256, 1), (256, 3)):
        x = inputs(rows_, tokens, **options) | {"state": pool_of(rows_, K=128, V=128, dtype=BF16)}
        x |= {name: x[name].to(BF16) for name in ("a", "b")}
        for more in ({"lower_bound": -3.0}, {"lower_bound": -5.0, "exact_packet": False}):
            index = {"read_index": torch.arange(rows_, dtype=torch.int32)}
            missing = binaries(lambda x=x, more=more, index=index: api.decode(**x, **index, **more)) - warmed
            assert not missing, missing
    assert binaries(lambda: api.decode(**x)) - warmed, "another form of the gate is another binary"
