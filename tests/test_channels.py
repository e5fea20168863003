"""Test a decay per key channel (KDA) in every function: against the reference, and at the limits of its gate.

The chunked form is exact for any gate (docs/channel_decay.md): these tests have resets of single channels,
thousands of nats a token, and channels that take turns to decay.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gdn
from gdn import reference
from gdn.backends import eager, hopper, select_backward, select_recurrent, triton
from gdn.backends.eager import channels
from gdn.problem import HistoryProblem, parse
from gdn.problem.history import parse_history
from gdn.reference import serving, stages
from gdn.testing import Case, check, covering, inputs, packed, rows
from gdn.testing.accuracy import reference_rule, run
from gdn.testing.cases import CHANNEL_FACTORS

F64 = torch.float64
H, HV, K, V = 2, 4, 12, 20
FACTORS = CHANNEL_FACTORS | {
    "lengths": (*map(rows, (1, 5, 17, 33, 64, 69)), packed(0, 5, 0, 64, 69, 3, tail=3)),
    "heads": ((2, 2), (2, 4), (1, 4)),
    "sizes": ((16, 16), (60, 20), (32, 64), (128, 32)),
}
CASES = covering(FACTORS, max_cost=2**21)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def error(x, ref):
    distance, size = (x.double() - ref.double()).norm(), ref.double().norm()
    return float(distance / size) if distance > 0 else float(distance)


def draw(gate="bounded", lengths=None, dtype=F64, seed=0, **options):
    """Return the inputs of a problem with a decay per key channel, keys normalised."""
    case = Case(
        gate, lengths=lengths or rows(70), heads=(H, HV), sizes=(K, V), is_per_channel=True, **options
    )
    return inputs(case, dtype, seed=seed)


def engine_call(dtype=F64, B=3, T=4, seed=0):
    """Return q, k, v, a pool of 5 slots, and the raw logits of gates, for the serving functions."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, T, heads, size, dtype=dtype) for heads, size in ((H, K), (H, K), (HV, V)))
    logits = {"a": torch.randn(B, T, HV, K, dtype=dtype), "b": torch.randn(B, T, HV, dtype=dtype)}
    logits |= {"A_log": torch.randn(HV, dtype=dtype), "dt_bias": torch.randn(HV, K, dtype=dtype)}
    return q, k, v, torch.randn(5, HV, V, K, dtype=dtype), logits


SERVING = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}
ROWS = {"read_index": torch.tensor([4, 1, 2])}


def activated(logits, lower_bound):
    """Return g and beta of raw logits, with a reset of one channel."""
    a, b, A_log, dt_bias = logits.values()
    g = reference.gate(a, A_log, dt_bias, lower_bound, is_per_channel=True)
    g[:, -1, :, 3] = -1e6
    return {"g": g, "beta": torch.sigmoid(b)}


@pytest.mark.parametrize("i", range(len(CASES)))
def test_drawn_problems(i):
    """Every pair of options, outputs and all gradients; the dtype and the form change from case to case."""
    function = gdn.fused_recurrent_kda if i % 5 == 0 else gdn.chunk_kda
    bad = [v for v in check(function, CASES[i], DTYPES[i % 4], seed=i) if not v.ok]
    assert not bad, bad


@pytest.mark.parametrize("gate", CHANNEL_FACTORS["gate"])
def test_rounding_is_not_amplified(gate):
    """In fp32 every gate has the error of fp32 itself, also where sums of g reach thousands of nats."""
    given = draw(gate, packed(129, 3, 64), torch.float32)
    found = run(gdn.chunk_kda, given)
    for name, ref in run(reference_rule, given.double()).items():
        assert error(found[name], ref) < 2e-6, name


@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 69, 133])
def test_lengths(T):
    given = draw("wild", rows(T))
    found = run(gdn.chunk_kda, given)
    for name, ref in run(reference_rule, given).items():
        assert error(found[name], ref) < 1e-12, name


@pytest.mark.parametrize("gate", ["strong", "reset", "model"])
@pytest.mark.parametrize("raw_gate", ["off", "on"])
def test_a_decay_per_head_is_the_same_in_all_channels(gate, raw_gate):
    """Both ranks give the same outputs and gradients; the gradient of g per head is the sum over channels."""
    given = inputs(Case(gate, lengths=packed(70, 5), heads=(H, HV), sizes=(K, V), raw_gate=raw_gate), F64)
    wide = dict(given.tensors)
    wide["g"] = wide["g"][..., None].expand(*wide["g"].shape, K)
    if raw_gate == "on":
        wide["dt_bias"] = wide["dt_bias"][:, None].expand(HV, K)
    one, each = run(gdn.chunk_gdn, given), run(gdn.chunk_kda, replace(given, tensors=wide))
    for name, ref in one.items():
        x = each[name].sum(-1) if name in ("dg", "ddt_bias") else each[name]
        assert error(x, ref) < 1e-11, name


def test_max_over_channels_is_no_bound():
    """Drop the state where no channel survives by its own decay, as a peer does: it is wrong by e^7.

    Halves of the channels take turns at -2.1: after 16 tokens each has decayed by e^-16.8. But k k^T moves
    what is left from one half into the other, so the state has not.
    """
    T, size = 16, 64
    given = inputs(Case("turns", lengths=rows(T), heads=(1, 1), sizes=(size, size), is_per_channel=True), F64)
    g = given.tensors["g"]
    k = torch.full((1, T, 1, size), size**-0.5, dtype=F64)
    v, S = torch.zeros(1, T, 1, size, dtype=F64), torch.eye(size, dtype=F64)[None, None]
    beta = torch.ones(1, T, 1, dtype=F64)
    options = {"beta": beta, "initial_state": S, "output_final_state": True}
    _, M = gdn.chunk_kda(k, k, v, g[:1], **options)
    _, expected = reference.gated_delta_rule(k, k, v, g[:1], beta, initial_state=S)
    assert M is not None and error(M, expected) < 1e-12
    # the largest log of what a channel keeps, and the log of what the state keeps: its norm was 1
    survives = g[0, :, 0].sum(0).max().item()
    norm = math.log(torch.linalg.matrix_norm(M[0, 0], 2).item())
    assert survives == pytest.approx(-16.8) and survives < math.log(2**-23.5) and norm > -9.5


def test_other_tokens_keep_their_digits_beside_a_reset():
    """A reset of one channel leaves the results of all others as they are without that channel."""
    given = draw("mild", rows(64), torch.float32)
    x = given.tensors
    x["g"][:, 30, :, 0] = -1e6
    found, ref = run(gdn.chunk_kda, given, False), run(reference_rule, given.double(), False)
    assert error(found["o"], ref["o"]) < 5e-7
    x["g"][:, 30, :, 0] = -math.inf
    assert torch.equal(run(gdn.chunk_kda, given, False)["o"], found["o"])


def test_a_reset_leaves_nothing():
    """Leave nothing of a state of 1e25, not even e^-70 of it."""
    given = draw("mild", rows(20), torch.float32)
    x = [given.tensors[name] for name in ("q", "k", "v", "g", "beta")]
    given.tensors["g"][:, 3] = -1e6
    S = torch.zeros(len(x[0]), HV, K, V)
    o, final = gdn.chunk_kda(*x, initial_state=S, output_final_state=True)
    again, final_again = gdn.chunk_kda(*x, initial_state=S + 1e25, output_final_state=True)
    assert torch.equal(final, final_again) and torch.equal(o[:, 10:], again[:, 10:])


def test_heads_do_not_depend_on_the_gates_of_others():
    """A chunk with strong decays scales its operands by powers of 2; the bits of mild heads stay."""
    given = draw("mild", rows(70), torch.float32)
    before = run(gdn.chunk_kda, given)
    given.tensors["g"][:, :, 3] *= 1e4
    after = run(gdn.chunk_kda, given)
    # value head 3 reads key head 1, whose gradients are sums over its value heads
    for name in ("o", "dv", "dg", "dbeta"):
        assert torch.equal(before[name][:, :, :3], after[name][:, :, :3]), name
        assert not torch.equal(before[name][:, :, 3], after[name][:, :, 3]), name
    assert torch.equal(before["dq"][:, :, 0], after["dq"][:, :, 0])


def test_padding_holds_any_value():
    """NaN past the last sequence reaches no output and no gradient of a parameter."""
    given = draw("model", packed(5, 64, tail=7), raw_gate="on", beta="sigmoid")
    clean = run(gdn.chunk_kda, given)
    for name in ("q", "k", "v", "g", "beta"):
        given.tensors[name][:, 69:] = math.nan
    found = run(gdn.chunk_kda, replace(given, do=given.do.index_fill(1, torch.arange(69, 76), 0)))
    for name, ref in clean.items():
        if name == "o" or name in ("dA_log", "ddt_bias", "final_state"):
            assert torch.equal(found[name], ref), name


EXTREMES = (0.0, 3.0, -3.0, 1e2, -1e2, 1e38, -1e38, math.inf, -math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("A_log", [None, 0.0, 4.0, 100.0])
def test_bounded_gate_at_extremes(A_log, dtype):
    """Logits of any size give finite gradients: 0 times inf is 0, as the slope of the sigmoid is."""
    a = torch.tensor(EXTREMES[1:], dtype=dtype)[None, :, None, None].repeat(1, 1, 2, 3).requires_grad_()
    b = torch.zeros(1, len(EXTREMES) - 1, 2, dtype=dtype)
    rate = None if A_log is None else torch.full((2,), A_log, dtype=dtype, requires_grad=True)
    bias = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    g, _ = gdn.gate(a, b, rate, bias, lower_bound=-5.0)
    assert bool(((g <= 0) & (g >= -5)).all())
    zero = torch.zeros(1, 1, 2, 3, dtype=dtype)
    assert bool((gdn.gate(zero, b[:, :1], rate, lower_bound=-5.0)[0] == -2.5).all())
    for x in torch.autograd.grad(g.sum(), [x for x in (a, rate, bias) if x is not None]):
        assert bool(x.isfinite().all())
    # the gradient of a g that nobody uses is zero, whatever the logits are
    for x in torch.autograd.grad((0 * gdn.gate(a, b, rate, bias, lower_bound=-5.0)[0]).sum(), (a, bias)):
        assert not x.any()


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 5, 3, 4)])
@pytest.mark.parametrize("lower_bound", [None, -5.0, -40.0])
def test_gate(shape, lower_bound):
    torch.manual_seed(0)
    a, b = torch.randn(shape, dtype=F64), torch.randn(2, 5, 3, dtype=F64)
    A_log, dt_bias = torch.randn(3, dtype=F64), torch.randn(shape[2:], dtype=F64)
    x = [t.requires_grad_() for t in (a, A_log, dt_bias)]
    g, beta = gdn.gate(a, b, A_log, dt_bias, lower_bound=lower_bound)
    ref = reference.gate(*x, lower_bound, is_per_channel=len(shape) == 4)
    torch.testing.assert_close(g, ref, rtol=1e-14, atol=0)
    torch.testing.assert_close(beta, torch.sigmoid(b))
    dy = torch.randn(shape, dtype=F64)
    for found, expected in zip(torch.autograd.grad(g, x, dy), torch.autograd.grad(ref, x, dy), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.library.opcheck(torch.ops.gdn.gate.default, (*x[:1], b, *x[1:], None, lower_bound))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("is_raw", [True, False])
@pytest.mark.parametrize("v_first", [True, False])
def test_serving(lower_bound, is_raw, v_first):
    """Decode, packets, packed rows and prefill, with either form of the gate."""
    q, k, v, pool, logits = engine_call()
    pool = pool if v_first else pool.mT.contiguous()
    gates = {**logits, "lower_bound": lower_bound} if is_raw else activated(logits, lower_bound)
    state, more = pool.clone(), {**SERVING, **gates, "state_v_first": v_first}
    o = gdn.decode(q, k, v, state, **more, **ROWS)
    ref = serving.decode(q, k, v, pool, **more, **ROWS)
    assert error(o, ref.o) < 1e-12 and error(state, ref.state) < 1e-12
    single = pool.clone()
    for t in range(q.shape[1]):
        one = {name: x[:, t : t + 1] if name in ("a", "b", "g", "beta") else x for name, x in more.items()}
        x = gdn.decode(*(x[:, t : t + 1] for x in (q, k, v)), single, **one, **ROWS)
        assert torch.equal(x, o[:, t : t + 1])
    assert torch.equal(single, state)
    flat = {name: x.flatten(0, 1)[None] if name in ("a", "b", "g", "beta") else x for name, x in more.items()}
    where = {"cu_seqlens": torch.tensor([0, 3, 3, 12]), "state_index": ROWS["read_index"]}
    where |= {"snapshot_pos": torch.tensor([2, -1, 5]), "snapshot_index": torch.tensor([0, 0, 3])}
    state, x = pool.clone(), [x.flatten(0, 1)[None] for x in (q, k, v)]
    o, ref = gdn.prefill(*x, state, **flat, **where), serving.prefill(*x, pool, **flat, **where)
    assert error(o, ref.o) < 1e-12 and error(state, ref.state) < 1e-12


def test_reference_stages():
    """The stages of the reference give the recurrence with either rank; `gdn.stages` has one per head."""
    x = draw("mild", packed(70, 3)).tensors
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    for gate in (g, g[..., 0]):
        o, S = stages.rule_by_stages(q, k, v, gate, beta, cu_seqlens=x["cu_seqlens"])
        ref = reference.gated_delta_rule(q, k, v, gate, beta, cu_seqlens=x["cu_seqlens"])
        assert error(o, ref[0]) < 1e-12 and error(S, ref[1]) < 1e-12
    with pytest.raises(ValueError, match=r"g: expected shape \[B, T, HV\]"):
        gdn.stages.chunk_cumsum(g)


def test_packed_rows_and_the_step_of_a_layer():
    q, k, v, pool, logits = engine_call(T=1)
    mixed = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V, "lower_bound": -5.0, **SERVING}
    gates = (logits["a"][:, 0], logits["b"][:, 0], None, logits["dt_bias"])
    state, ref = pool.clone(), serving.decode(
        q, k, v, pool, a=logits["a"], b=logits["b"], dt_bias=logits["dt_bias"], lower_bound=-5.0, **SERVING,
        **ROWS,
    )  # fmt: skip
    o = gdn.decode_packed(mixed, *gates, state, **sizes, **ROWS)
    assert error(o, ref.o[:, 0]) < 1e-12 and error(state, ref.state) < 1e-12
    # a convolution of one tap, 1, passes q | k | v on
    windows, taps = torch.zeros(5, mixed.shape[1], 0, dtype=F64), torch.ones(mixed.shape[1], 1, dtype=F64)
    again = pool.clone()
    step = gdn.decode_step(mixed, windows, taps, None, *gates, again, conv_activation=None, **sizes, **ROWS)
    assert torch.equal(step, o) and torch.equal(again, state)


def test_functional_and_portable_decode():
    from gdn.ops.portable import table

    q, k, v, pool, logits = engine_call(T=1, dtype=torch.float32)
    for gates in ({**logits, "lower_bound": -5.0}, activated(logits, None)):
        state = pool[:3].clone()
        expected = gdn.decode(q, k, v, state, **gates, **SERVING)
        o, after = gdn.decode_functional(q, k, v, pool[:3], **gates, **SERVING)
        assert torch.equal(o, expected) and torch.equal(after, state)
    ((operator, portable),) = table().items()
    problem = [x.name for x in operator._schema.arguments]
    given = {**dict.fromkeys(problem), **SERVING, **logits, "lower_bound": -5.0, "scale": K**-0.5}
    given |= {"q": q, "k": k, "v": v, "state": pool[:3], "allow_neg_eigval": False}
    found = portable(**given)
    o, after = gdn.decode_functional(q, k, v, pool[:3], **logits, lower_bound=-5.0, **SERVING)
    assert error(found[0], o) < 1e-6 and error(found[1], after) < 1e-6


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_replay(dtype):
    """Packets on a history of increments, then commits with all, some and none accepted, folds included."""
    q, k, v, pool, logits = engine_call(dtype)
    gates = activated(logits, -5.0)
    u, keys = torch.randn(5, 9, HV, V, dtype=dtype), torch.randn(5, 9, H, K, dtype=dtype)
    g = -5 * torch.rand(5, 9, HV, K, dtype=dtype)
    g[4, 1, :, 3] = -1000
    cursor, tolerance = torch.tensor([0, 0, 2, 0, 4]), 1e-12 if dtype == F64 else 1e-6
    ref = serving.replay_decode(q, k, v, pool, u, keys, g, cursor, **gates, **SERVING, **ROWS)
    o = gdn.replay_decode(q, k, v, pool, u, keys, g, cursor, **gates, **SERVING, **ROWS)
    for x, expected in ((o, ref.o), (u, ref.u), (keys, ref.k), (g, ref.G)):
        assert error(x, expected) < tolerance
    # the same as a decode of all tokens that the history holds
    for accepted in ([4, 4, 4], [3, 0, 1]):
        state, moved = pool[None].clone(), cursor.clone()
        layer = (u[None], keys[None], g[None])
        given = (ROWS["read_index"], torch.tensor(accepted))
        gdn.replay_commit(state, *layer, moved, *given, room=4, state_v_first=True)
        expected, where = serving.replay_commit(
            pool[None], *layer, cursor, *given, room=4, state_v_first=True
        )
        assert torch.equal(moved, where) and error(state, expected) < tolerance
        assert not torch.equal(state, pool[None])


def test_a_sequence_does_not_depend_on_its_batch():
    given = draw("wild", packed(70, 64, 5), torch.float32, batch_invariant=True)
    x = given.tensors
    alone = [x[name][:, 70:134] for name in ("q", "k", "v", "g", "beta")]
    options = {**given.options, "batch_invariant": True}
    o, S = gdn.chunk_kda(
        *(x[name] for name in ("q", "k", "v", "g", "beta")), cu_seqlens=x["cu_seqlens"], **options
    )
    o_alone, S_alone = gdn.chunk_kda(*alone, **options)
    assert torch.equal(o[:, 70:134], o_alone) and torch.equal(S[1:2], S_alone)


def test_backward_follows_a_forward_that_saved_nothing():
    given = draw("reset", packed(70, 5), state="wide")
    saved = run(gdn.chunk_kda, given)
    again = run(gdn.fused_recurrent_kda, given)
    for name, ref in saved.items():
        assert error(again[name], ref) < 1e-12, name


def test_compile():
    given = draw("bounded", rows(33), torch.float32)
    x = [given.tensors[name] for name in ("q", "k", "v", "g", "beta")]
    compiled = torch.compile(lambda *x: gdn.chunk_kda(*x)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*x), gdn.chunk_kda(*x)[0])


class OnCuda(torch.Tensor):
    """Be a CPU tensor that says it is on a GPU."""

    device = torch.device("cuda")


def test_kernels_refuse_the_rank_and_the_bound_by_name(monkeypatch):
    """A call on a GPU falls through to the next backend, and is never half done."""
    monkeypatch.setattr(triton, "_is_installed", lambda: True)
    monkeypatch.setattr(triton.settings, "interprets", lambda: True)
    q, v = torch.zeros(1, 5, 2, 16), torch.zeros(1, 5, 4, 16)
    per_head, per_channel = torch.zeros(1, 5, 4), torch.zeros(1, 5, 4, 16)
    raw = {"use_gate_in_kernel": True, "lower_bound": -5.0}
    rank, bound = "expected a decay per head, got one per key channel", "expected lower_bound=None"
    for options, ours, hoppers in (
        ({"g": per_channel}, "", rank),
        ({"g": per_channel, **raw}, "", rank),
        ({"g": per_head, **raw}, bound, bound),
        ({"g": per_head}, "", "expected K = V"),
    ):
        problem = parse(q, q, v, **options)
        reason = triton.refuses(problem)
        assert reason is None if not ours else ours in reason
        assert hoppers in hopper.refuses(problem)
        assert eager.BACKEND.refuses(problem) is None
        # the kernel of the recurrent form has both; any backward follows it
        assert select_recurrent(problem).name == "triton"
        assert select_backward(problem).name == ("triton" if reason is None else "eager")
    with pytest.raises(NotImplementedError, match=f"hopper: {rank}"):
        gdn.chunk_kda(q, q, v, per_channel, backend="hopper")
    assert gdn.explain(q, q, v, per_channel).chosen == "triton"
    # so have the kernels of histories; one with a decay per head has no bound
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 16}
    for decay, g, reason in (("channel", per_channel, None), ("head", per_head, bound)):
        pool = gdn.allocate_history_pool(3, **sizes, places=8, room=4, decay=decay)
        packet = {"a": g[:, :4], "b": g[:, :4, :, 0] if g.dim() == 4 else g[:, :4], "A_log": torch.zeros(4)}
        given = dict.fromkeys(HistoryProblem.__dataclass_fields__) | vars(pool) | packet
        flags = {"use_qk_l2norm_in_kernel": True, "allow_neg_eigval": False, "state_v_first": False}
        given |= flags | {"q": q[:, :4], "k": q[:, :4], "v": v[:, :4], "lower_bound": -5.0}
        refused = triton.refuses(parse_history(**given))
        assert refused is None if reason is None else reason in refused


ZEROS = torch.zeros(1, 5, HV, K)


@pytest.mark.parametrize(("message", "options"), [
    (r"g: expected shape \[B=1, T=5, HV=4\], got \[1, 5\]", {"g": torch.zeros(1, 5)}),
    (r"g: expected shape \[B=1, T=5, HV=4, K=12\], got \[1, 5, 4, 13\]", {"g": torch.zeros(1, 5, HV, 13)}),
    (r"dt_bias: expected shape \[HV=4, K=12\], got \[4\]",
     {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)}),
    (r"dt_bias: expected shape \[HV=4\], got \[4, 12\]",
     {"g": ZEROS[..., 0], "use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": ZEROS[0, 0]}),
    ("lower_bound: expected a number below 0, got 0", {"use_gate_in_kernel": True, "lower_bound": 0}),
    ("lower_bound: expected None without use_gate_in_kernel=True, got -5", {"lower_bound": -5}),
    ("A_log: expected a tensor", {"use_gate_in_kernel": True}),
])  # fmt: skip
def test_refused_arguments(message, options):
    q, v = torch.zeros(1, 5, H, K), torch.zeros(1, 5, HV, V)
    with pytest.raises(ValueError, match=message):
        gdn.chunk_kda(q, q, v, **({"g": ZEROS} | options))


def test_refused_arguments_of_engines():
    q, k, v, pool, logits = engine_call()
    with pytest.raises(ValueError, match=r"history_G: expected shape \[slots=5, places=9, HV=4, K=12\]"):
        history = (pool.new_zeros(5, 9, HV, V), pool.new_zeros(5, 9, H, K), pool.new_zeros(5, 9, HV))
        cursor = torch.zeros(5, dtype=torch.int32)
        gdn.replay_decode(q, k, v, pool, *history, cursor, **logits, **SERVING)
    with pytest.raises(ValueError, match="lower_bound: expected None without the raw logits a and b"):
        gdn.decode(q, k, v, pool, g=logits["a"], lower_bound=-5.0, **SERVING)
    with pytest.raises(ValueError, match=r"b: expected shape \[3, 4, 12\]"):
        gdn.gate(torch.zeros(3, HV, K), torch.zeros(3, K), torch.zeros(HV))


def test_names():
    assert gdn.chunk_kda is gdn.chunk_gated_delta_rule
    assert gdn.fused_recurrent_kda is gdn.fused_recurrent_gated_delta_rule


# the rank of the gate may be asked where a problem is parsed, where the gate is computed, where the pairs of
# tokens and rows are made, and where a history is written: everything else sees rows and states
MAY_ASK = {
    "backends/eager/borders.py",
    "backends/eager/dense_step.py",
    "backends/eager/gate.py",
    "backends/eager/history.py",
    "backends/eager/replay.py",
    "backends/eager/rule.py",
    "backends/hopper/__init__.py",
    "backends/hopper/serving/history.py",
    "backends/triton/__init__.py",
    "backends/triton/layer/gate.py",
    "backends/triton/rule/build.py",
    "backends/triton/rule/build_bwd.py",
    "backends/triton/rule/choose.py",
    "backends/triton/rule/describe.py",
    "backends/triton/rule/run.py",
    "backends/triton/serving/decode_strips.py",
    "backends/triton/serving/fold.py",
    "backends/triton/serving/gates.py",
    "backends/triton/serving/packet.py",
    "backends/triton/serving/replay.py",
    "distributed/check.py",
    "ops/portable.py",
    "ops/warmup.py",
    "ops/warmup_calls.py",
    "ops/warmup_history.py",
    "ops/warmup_sizes.py",
    "problem/addressing.py",
    "problem/history.py",
    "problem/replay.py",
    "problem/rule.py",
    "problem/serving.py",
    "problem/stages.py",
    "problem/step.py",
    "reference/recurrence.py",
    "reference/serving.py",
    "reference/stages.py",
    "testing/cases.py",
    "testing/tensors.py",
}


def asks_for_the_rank(source: str) -> bool:
    """Return True for code that names the rank of the gate, or compares the number of axes of g or a."""
    return re.search(r"\bis_per_channel\b|\b[gGa]\.dim\(\) [=><]", source) is not None


def test_only_these_files_ask_for_the_rank():
    package = Path(gdn.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if asks_for_the_rank(path.read_text())
    }
    assert found - MAY_ASK == set()
    assert MAY_ASK - found == set(), "a file that asks no longer leaves the list"
    assert asks_for_the_rank("x = p.is_per_channel") and asks_for_the_rank("if g.dim() == 4: pass")
    assert not asks_for_the_rank("x = g.shape")


def subtracted(X, g):
    """Return pairs whose decays come from differences of sums, as a textbook has them."""
    G = g.cumsum(2)
    D = (G.unsqueeze(3) - G.unsqueeze(2)).clamp(max=0).exp()
    products = torch.einsum("phxik,phjk,phijk->phxij", X, X[:, :, 1], D).tril()
    products[:, :, 1].diagonal(dim1=-2, dim2=-1).zero_()
    rows_in, rows_out = X * G.exp().unsqueeze(2), X[:, :, 1] * (G[:, :, -1:] - G).exp()
    return channels.Pairs(products, rows_in, rows_out, G[:, :, -1].exp(), is_mild=True)


def test_subtracted_sums_are_seen(monkeypatch):
    """Differences of fp32 sums of thousands of nats are off by more than the limits of the tests above."""
    given = draw("reset", rows(64), torch.float32)
    ref = run(reference_rule, given.double(), False)["o"]
    assert error(run(gdn.chunk_kda, given, False)["o"], ref) < 5e-7
    monkeypatch.setattr(channels, "compute_products", subtracted)
    assert error(run(gdn.chunk_kda, given, False)["o"], ref) > 5e-6
