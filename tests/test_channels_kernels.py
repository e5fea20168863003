"""Test the Triton kernels of the chunked rule with a decay per key channel: interpreted, and on a GPU."""

import functools
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import jit
from triton import language as tl

import gdn
from gdn.backends import eager, triton
from gdn.backends.triton.launch import Machine, PlanCache
from gdn.backends.triton.rule import build_channels, channel_halves, choose, prepare_channels
from gdn.backends.triton.rule import run as chunked
from gdn.problem import parse
from gdn.testing import Case, check, covering, inputs, packed, rows
from gdn.testing.accuracy import (
    affordable_heads,
    compare_outputs,
    expect_outputs,
    reference_rule,
    run,
    run_poisoned,
)
from gdn.testing.cases import CHANNEL_FACTORS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
kda = functools.partial(gdn.chunk_kda, backend="triton")
CHANNEL = functools.partial(Case, is_per_channel=True, heads=(1, 2), sizes=(16, 16))
ONE = rows(1)._replace(B=1)
# a reset of channels, thousands of nats, a rate for each channel; the other options differ from case to case
SMALL = [
    (CHANNEL("reset", lengths=packed(19, 0, 3, tail=2), raw_gate="lower_bound", beta="negative", state="wide",
             use_qk_l2norm_in_kernel=True, is_strided=True), FP32),
    (CHANNEL("wild", lengths=ONE._replace(T=67), sizes=(20, 16), state="narrow", state_v_first=True), FP16),
    (CHANNEL("rates", lengths=ONE._replace(T=40), raw_gate="on", heads=(1, 1), beta="sigmoid",
             use_qk_l2norm_in_kernel=True), BF16),
    (CHANNEL("mild", lengths=ONE._replace(T=17), heads=(1, 1), sizes=(132, 16), state="wide",
             use_qk_l2norm_in_kernel=True), FP16),
    (CHANNEL("bounded", lengths=ONE._replace(T=70), sizes=(68, 16), heads=(1, 1), raw_gate="lower_bound",
             beta="negative", use_qk_l2norm_in_kernel=True), BF16),
]  # fmt: skip
FACTORS = CHANNEL_FACTORS | {
    "lengths": (*map(rows, (1, 15, 63, 65, 129)), packed(0, 5, 0, 64, 69, 3, tail=3)),
    "heads": ((2, 2), (2, 4), (1, 4)),
    "sizes": ((64, 64), (128, 128), (60, 20), (256, 64)),
}
CASES = covering(FACTORS, max_cost=2**22)
PARTS = 6


def error(x, ref):
    return float((x.double() - ref.double()).norm() / ref.double().norm())


def excess(case, dtype, seed):
    """Return the largest error of the outputs and gradients of a problem, in units of their limits.

    dA_log adds up terms of both signs, at times to a few numbers far smaller than these: its error is
    relative to dg where that is larger, as in `test_hopper_training.Sums`.
    """
    given = inputs(case, dtype, seed=seed, device="cuda")
    found = run_poisoned(kda, given)
    calm = lambda: inputs(replace(case, gate="none"), dtype, seed=seed, device="cuda")  # noqa: E731
    expected = expect_outputs(given, calm, affordable_heads(case, 2**26), True)
    ratios = {v.output: v.error / v.limit for v in compare_outputs(found, expected, case)}
    if "dA_log" in ratios:
        terms, total = (float(expected.outputs[name].norm()) for name in ("dg", "dA_log"))
        ratios["dA_log"] *= total / max(terms, total)
    return max((ratio, name) for name, ratio in ratios.items())


def draw(gate, T, dtype, device, **options):
    case = CHANNEL(gate, lengths=ONE._replace(T=T), heads=(1, 1), **options)
    return inputs(case, dtype, device=device)


@pytest.mark.interpret
@pytest.mark.parametrize(("case", "dtype"), SMALL, ids=lambda x: str(x))
def test_small_problems(triton_device, case, dtype):
    """Outputs and all gradients, whose memory is poisoned before, are those of the reference."""
    bad = [v for v in check(kda, case, dtype, device=triton_device) if not v.ok]
    assert not bad, bad


# 65 to 128 channels in 16 bits: chunks by halves where the decay over 16 tokens fits fp32, else by levels
HALVES = [
    CHANNEL("bounded", lengths=ONE._replace(T=70), heads=(1, 1), sizes=(128, 16), state="wide",
            use_qk_l2norm_in_kernel=True),
    CHANNEL("reset", lengths=packed(66, 0, 3, tail=2), sizes=(65, 16), beta="negative", state="wide",
            use_qk_l2norm_in_kernel=True, is_strided=True),
    CHANNEL("bounded", lengths=ONE._replace(T=40), sizes=(72, 16), raw_gate="lower_bound"),
    CHANNEL("model", lengths=ONE._replace(T=40), sizes=(100, 16), raw_gate="on",
            use_qk_l2norm_in_kernel=True),
    CHANNEL("slow", lengths=ONE._replace(T=130), heads=(1, 1), sizes=(128, 16)),
]  # fmt: skip


@pytest.mark.interpret
@pytest.mark.parametrize("case", HALVES, ids=lambda x: str(x))
def test_halves_of_a_chunk(triton_device, case):
    """The error of fp16 stays far below its limit: pairs are as exact as those of the levels."""
    found = check(kda, case, FP16, device=triton_device, with_backward=False)
    bad = [v for v in found if v.error > 0.3 * v.limit]
    assert not bad, bad


@pytest.mark.interpret
def test_gradients_after_halves_of_a_chunk(triton_device):
    """The backward computes rows, and P as hi + lo, by halves as well."""
    case = CHANNEL("bounded", lengths=ONE._replace(T=66), heads=(1, 1), sizes=(80, 16), state="wide")
    bad = [v for v in check(kda, case, FP16, device=triton_device) if v.error > 0.5 * v.limit]
    assert not bad, bad


@pytest.mark.interpret
@pytest.mark.parametrize("is_normalized", [True, False], ids=["normalised", "large keys"])
def test_a_gate_of_its_lower_bound(monkeypatch, triton_device, is_normalized):
    """Normalised keys take halves at -5 a token; factors of other keys could overflow: these take levels."""
    if triton_device == "cuda":
        pytest.skip("a GPU compiles both branches")
    case = CHANNEL("none", lengths=ONE._replace(T=64), heads=(1, 1), sizes=(80, 16))
    given = inputs(replace(case, use_qk_l2norm_in_kernel=is_normalized), BF16, device=triton_device)
    given.tensors["g"].fill_(-5.0)
    # a pair across the middle that stays large, of factors far below 2^-126
    given.tensors["g"][:, 32] = -1.0
    if is_normalized:
        monkeypatch.setattr(prepare_channels, "add_pairs", None)
    else:
        given.tensors["k"].mul_(2.0**17)
        given.tensors["beta"].mul_(2.0**-34)
    found = kda(**given.tensors, **given.options)[0]
    expected = reference_rule(**given.double().tensors, **given.options)[0]
    assert error(found, expected) < 5e-3


@pytest.mark.interpret
@pytest.mark.parametrize("gate", ["bounded", "wild"])
def test_dbeta_of_the_last_tokens(triton_device, gate):
    """At strong decays dbeta is a few products of dr and v_new, whose rounding to bf16 would show."""
    case = CHANNEL(gate, lengths=ONE._replace(T=9), heads=(2, 2), sizes=(68, 64), state="wide",
                   use_qk_l2norm_in_kernel=True)  # fmt: skip
    errors = {v.output: v.error for v in check(kda, case, BF16, device=triton_device)}
    assert errors["dbeta"] < 8e-4 and errors["dv"] < 2e-3


@pytest.mark.interpret
@pytest.mark.parametrize("scale", [None, 0.0])
def test_dinitial_state_where_channels_do_not_decay(triton_device, scale):
    """The first token's scale q is not rounded where its decay is 1: half of the channels in `turns`."""
    given = inputs(
        CHANNEL("turns", lengths=rows(2), heads=(1, 1), sizes=(128, 16), state="wide"), BF16,
        device=triton_device,
    )  # fmt: skip
    given.options["scale"] = scale
    found, expected = (run(rule, x)["dh0"] for rule, x in ((kda, given), (reference_rule, given.double())))
    assert error(found, expected) < 8e-4


@pytest.mark.interpret
def test_a_token_that_decays_nothing_has_no_gradient_of_its_gate(triton_device):
    """The first token of a sequence without a state has dg = 0, not the rounding of its sums."""
    given = inputs(
        CHANNEL("mild", lengths=rows(1), heads=(1, 1), sizes=(128, 128)), BF16, device=triton_device
    )
    assert not run(kda, given)["dg"].any()


@jit
def gates_kernel(x_ptr, softplus_ptr, sigmoid_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(softplus_ptr + i, channel_halves.softplus_by_polynomial(x))
    tl.store(sigmoid_ptr + i, channel_halves.sigmoid_by_rsqrt(x))


@pytest.mark.interpret
def test_gates_of_halves(triton_device):
    """Both functions of logits have the digits of fp32, for logits of any size."""
    x = torch.cat([torch.linspace(-80, 80, 1021), torch.tensor([torch.inf, -torch.inf, 0.0])]).to(
        triton_device
    )
    softplus, sigmoid = torch.empty_like(x), torch.empty_like(x)
    gates_kernel[(1,)](x, softplus, sigmoid, 1024)
    torch.testing.assert_close(
        softplus.double(), torch.logaddexp(x.double(), x.new_zeros(())), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(sigmoid.double(), x.double().sigmoid(), rtol=1e-5, atol=0)


def test_halves_are_for_wide_16_bit_keys_on_hopper():
    """fp32 needs the digits of the levels; operands of halves need the shared memory of sm_90."""
    with FakeTensorMode():
        for K, dtype, capability, count in (
            (128, BF16, 90, 128), (65, FP16, 90, 128), (64, BF16, 90, 16), (129, BF16, 90, 16),
            (128, FP32, 90, 16), (128, BF16, 80, 16),
        ):  # fmt: skip
            x = [torch.empty(1, 8, 2, K, device="cuda", dtype=dtype) for _ in range(3)]
            g, beta = torch.empty(1, 8, 2, K, device="cuda"), torch.empty(1, 8, 2, device="cuda")
            gpu = Machine("cuda", capability, 132, 227 * 1024)
            assert choose.channel_block(parse(*x, g, beta), gpu) == count


@pytest.mark.interpret
def test_other_tokens_keep_their_digits_beside_a_reset(triton_device):
    """A reset of one channel leaves the error of fp32 in all results; sums of g are never subtracted."""
    given = draw("slow", 34, FP32, triton_device, state="wide")
    given.tensors["g"][:, 20, :, 0] = -1e6
    found = run(kda, given)
    for name, ref in run(reference_rule, given.double()).items():
        assert error(found[name], ref) < 5e-7, name


@pytest.mark.interpret
def test_logits_at_extremes_have_finite_gradients(triton_device):
    """Logits of any size give the gradients of `eager`: 0 times inf is 0, as the slope of the gate is."""
    given = draw("mild", 8, FP32, triton_device, raw_gate="lower_bound")
    extremes = torch.tensor([3.0, -3.0, 1e2, -1e2, 1e38, -1e38, torch.inf, -torch.inf])
    given.tensors["g"][:] = extremes.to(triton_device)[None, :, None, None]
    # the factor of the logits overflows, and is taken as the largest number
    given.tensors["A_log"][:] = 100.0
    given.tensors["dt_bias"][:] = 0.0
    found, expected = run(kda, given), run(functools.partial(gdn.chunk_kda, backend="eager"), given)
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.interpret
def test_each_backward_follows_each_forward(triton_device):
    """`eager` and `triton` save other tensors, and recompute what the other did not save."""
    given = draw("mild", 20, FP32, triton_device, state="wide")
    problem = parse(**given.tensors, **given.options)
    expected = eager.BACKEND.chunk_backward(
        problem, eager.BACKEND.chunk_forward(problem, True)[2], given.do, None
    )
    ours, theirs = chunked.chunk_forward(problem, True)[2], eager.BACKEND.chunk_forward(problem, True)[2]
    for found in (
        chunked.chunk_backward(problem, theirs, given.do, None),
        eager.BACKEND.chunk_backward(problem, ours, given.do, None),
    ):
        for x, ref in zip(found, expected, strict=True):
            assert (x is None and ref is None) or error(x, ref) < 2e-6


@pytest.mark.interpret
@pytest.mark.parametrize("value", [-40.0, float("nan")])
def test_strips_that_decay_much_are_computed_by_levels(triton_device, monkeypatch, value):
    """A strip with a large decay, or with NaN, has the bits of levels alone; the next strip has not."""
    given = draw("bounded", 20, BF16, triton_device, sizes=(68, 16))
    given.tensors["g" if value < 0 else "q"][0, 3:9, 0, 5] = value
    ours = run(kda, given)
    monkeypatch.setattr(build_channels, "mma_strip", lambda problem, machine: None)
    monkeypatch.setattr(chunked, "_backwards", PlanCache())
    levels = run(kda, given)
    for name in ("dq", "dk", "dg"):
        x, y = ours[name][:, :64], levels[name][:, :64]
        torch.testing.assert_close(x[..., :32], y[..., :32], rtol=0, atol=0, equal_nan=True)
        assert value != value or not torch.equal(x[..., 32:], y[..., 32:]), name


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_problems(part):
    """Every pair of options, outputs and all gradients; the dtype changes from case to case."""
    for i in range(part, len(CASES), PARTS):
        ratio, name = excess(CASES[i], (BF16, FP32, FP16)[i % 3], i)
        assert ratio <= 1, f"{name} {ratio:.2f} of its limit: {CASES[i]}"


LARGE = CHANNEL("bounded", heads=(4, 4), sizes=(128, 128), lengths=packed(1000, 0, 64, 453), state="wide")


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["slow", "bounded", "turns"])
@pytest.mark.parametrize("heads", [(4, 4), (80, 80)], ids=["state pass", "scan"])
def test_long_sequences(gate, heads):
    """Many chunks: with few heads in two kernels, with many in one."""
    case = replace(LARGE, gate=gate, heads=heads, use_qk_l2norm_in_kernel=True)
    bad = [v for v in check(kda, case, BF16, device="cuda", budget=2**23) if not v.ok]
    assert not bad, bad


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(128, 128), (256, 256)], ids=str)
def test_a_head_among_many_has_the_bits_that_it_has_alone(sizes):
    """No load overwrites an operand of an MMA in flight; that shows only if all SMs are busy."""
    case = CHANNEL(
        "slow", lengths=rows(1024), heads=(48, 48), sizes=sizes, state="wide", batch_invariant=True
    )
    given = inputs(case, BF16, device="cuda")
    found, alone = run(kda, given), run(kda, given.heads([5]))
    for name, x in alone.items():
        axis = 1 if name in ("final_state", "dh0") else 2
        assert torch.equal(found[name].narrow(axis, 5 * x.shape[axis], x.shape[axis]), x), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_more_than_128_channels(dtype):
    """The backward at K = 256 and many chunks, whose state pass has tiles of its own."""
    lengths = packed(1000, 0, 64, 453) if dtype == BF16 else packed(130, 60)
    case = replace(LARGE, sizes=(256, 128), lengths=lengths, use_qk_l2norm_in_kernel=True)
    bad = [v for v in check(kda, case, dtype, device="cuda", budget=2**23) if not v.ok]
    assert not bad, bad


@pytest.mark.gpu
def test_reruns_and_batches_give_the_same_bits():
    given = inputs(replace(LARGE, batch_invariant=True), BF16, device="cuda")
    first = run(kda, given)
    for _ in range(100):
        again = run(kda, given)
        assert all(torch.equal(again[name], x) for name, x in first.items())
    x = given.tensors
    alone = [x[name][:, :1000] for name in ("q", "k", "v", "g", "beta")]
    o, _ = kda(*alone, initial_state=x["initial_state"][:1], batch_invariant=True)
    assert torch.equal(o, first["o"][:, :1000])


@pytest.mark.gpu
def test_a_recorded_step_has_the_bits_of_eager_mode():
    """A CUDA graph of a forward and its backward, replayed on other values in the same tensors."""
    given, other = (inputs(LARGE, BF16, device="cuda", seed=seed) for seed in (0, 1))
    first, expected = run(kda, given), run(kda, other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run(kda, given)
    kept, values = ([*x.tensors.values(), x.do, x.dfinal_state] for x in (given, other))
    for x, y in zip(kept, values, strict=True):
        x.copy_(y)
    graph.replay()
    for name, x in recorded.items():
        assert torch.equal(x, expected[name]), name
        assert not torch.equal(x, first[name]), name


def test_large_rows_in_fp32_fit_into_shared_memory():
    """In fp32 `scan` would take 268 KB of sm_90 at K = 256: such a call has two kernels, in 16 bits one."""
    gpu = Machine("cuda", 90, 132, 227 * 1024)
    with FakeTensorMode():
        for dtype, is_fused in ((FP32, False), (BF16, True)):
            x = [torch.empty(64, 64, 16, 256, device="cuda", dtype=dtype) for _ in range(3)]
            g, beta = torch.empty(64, 64, 16, 256, device="cuda"), torch.empty(64, 64, 16, device="cuda")
            assert choose.forward_tiles(parse(*x, g, beta), gpu).is_fused == is_fused
            assert choose.forward_tiles(parse(*x, beta, beta), gpu).is_fused


@pytest.mark.gpu
@pytest.mark.parametrize("is_per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("sizes", [(65, 65), (66, 65), (97, 97), (127, 64), (129, 64), (255, 255)], ids=str)
def test_rows_that_are_loaded_by_elements(sizes, is_per_channel):
    """Operands that Triton does not pipeline share memory, and some had wrong addresses on an H100."""
    case = Case(
        "bounded", lengths=rows(200)._replace(B=1), sizes=sizes, state="wide", is_per_channel=is_per_channel
    )
    rule = kda if is_per_channel else functools.partial(gdn.chunk_gated_delta_rule, backend="triton")
    bad = [v for v in check(rule, case, BF16, device="cuda") if not v.ok]
    assert not bad, bad


@pytest.mark.gpu
def test_rows_of_odd_strides():
    """Rows of 128 columns in buffers of 129 are loaded by elements, too."""

    def rule(q, k, v, **options):
        q, k, v = (torch.nn.functional.pad(x, (0, 1))[..., :-1] for x in (q, k, v))
        return gdn.chunk_gated_delta_rule(q, k, v, backend="triton", **options)

    case = Case("mild", lengths=rows(200)._replace(B=1), sizes=(128, 128), state="wide")
    bad = [v for v in check(rule, case, BF16, device="cuda") if not v.ok]
    assert not bad, bad


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("sizes", [(68, 16), (80, 16), (128, 16), (128, 32), (100, 60)], ids=str)
def test_gradients_of_few_values(sizes, dtype):
    """A loop of one strip of values is not pipelined: its operands share memory, too."""
    case = CHANNEL("bounded", lengths=rows(200)._replace(B=1), sizes=sizes, state="wide")
    bad = [v for v in check(kda, case, dtype, device="cuda") if not v.ok]
    assert not bad, bad


@pytest.mark.parametrize("K", [16, 136])
def test_a_gpu_runs_the_kernels(K):
    """Calls of both ranks run on `triton`; a backward that no GPU has run does if they name it."""
    with FakeTensorMode():
        x = [torch.empty(1, 8, 2, K, device="cuda") for _ in range(3)]
        g, beta = torch.empty(1, 8, 2, K, device="cuda"), torch.empty(1, 8, 2, device="cuda")
        for gate in (g, beta):
            problem = parse(*x, gate, beta)
            assert triton.refuses(problem) is None
            assert (triton.refuses_backward(problem) is None) == (gate is beta or K == 16)
            assert triton.refuses_backward(parse(*x, gate, beta, backend="triton")) is None


def test_gradients_by_mma_need_operands_in_shared_memory():
    with FakeTensorMode():
        x = torch.empty(1, 64, 2, 128, dtype=BF16, device="cuda")
        problem = parse(q=x, k=x, v=x, g=x)
    assert choose.mma_strip(problem, Machine("cuda", 90, 132, 227 * 1024)) is not None
    assert choose.mma_strip(problem, Machine("cuda", 80, 108, 163 * 1024)) is None
