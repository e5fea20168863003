"""Train on a GPU with the Gluon backward: drawn problems, every option, bits, graphs, compilers, autocast."""

import copy
import os
import random
from dataclasses import replace
from functools import partial
from statistics import mean

import pytest
import torch
from conftest import HAS_TRITON
from torch.utils.checkpoint import checkpoint

import gdn
from gdn.problem import parse
from gdn.testing import Case, accuracy, inputs, packed, rows
from gdn.testing.cases import is_contradiction
from gdn.testing.memory import poison_memory

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit import one_launch
from kit.hopper import error, on_hopper, simulated
from kit.serving import nothing_waits
from test_hopper_backward import CASES, NAMES, expected_gradients
from test_hopper_gpu import PROBLEMS, SEEDS, draw_kind, draw_problem

from gdn import backends
from gdn.backends import Saved, eager
from gdn.backends.hopper import rule
from gdn.backends.hopper.backward import plan
from gdn.backends.hopper.backward.cost import Segmentation
from gdn.backends.hopper.cost import Cut
from gdn.backends.triton.launch.compilations import compilations
from gdn.backends.triton.rule import run as chunked

FULL = Case(
    "mild", lengths=packed(0, 5, 70, 0, 300), heads=(2, 4), sizes=(128, 128), state="wide",
    use_qk_l2norm_in_kernel=True, raw_gate="on", beta="negative", state_v_first=True,
)  # fmt: skip
LARGE = replace(FULL, lengths=packed(900, 1, 640, 407, *[70] * 20, 3000), heads=(16, 32))
hopper = partial(gdn.chunk_gated_delta_rule, backend="hopper")
FORWARDS = {"hopper": rule.chunk_forward, "triton": chunked.chunk_forward}


def trains(test):
    """Run a test on an sm_90 GPU, where its backward must run the Gluon kernels."""
    return pytest.mark.gpu(on_hopper(pytest.mark.usefixtures("gluon")(test)))


@pytest.fixture
def gluon(monkeypatch):
    """Count the backwards that run the Gluon kernels; the test must run one."""
    count, of = [0], plan.plan_of

    def counted(*args):
        count[0] += 1
        return of(*args)

    monkeypatch.setattr(plan, "plan_of", counted)
    yield
    assert count[0] > 0, "expected the backward to run the Gluon kernels"


def reference_gradients(given, do, dfinal):
    """Differentiate the reference recurrence, in one launch each way; return gradients in order of NAMES."""
    wide = given.double()
    leaves = {name: wide.tensors[name].requires_grad_() for name in NAMES if name in wide.tensors}
    options = {name: x for name, x in wide.options.items() if name not in accuracy.BACKEND_OPTIONS}
    outputs = one_launch.reference_recurrence(**wide.tensors, **options)
    pairs = [(x, y.double()) for x, y in zip(outputs, (do, dfinal), strict=True) if y is not None]
    values, gradients = zip(*pairs, strict=True)
    found = torch.autograd.grad(values, list(leaves.values()), gradients, allow_unused=True)
    by_name = dict(zip(leaves, found, strict=True))
    return [by_name.get(name) for name in NAMES]


@pytest.mark.interpret
@simulated
@pytest.mark.parametrize("case", [
    Case(
        sizes=(32, 32), heads=(1, 2), lengths=packed(5, 0, 2, tail=1), state="wide", raw_gate="on",
        beta="negative", use_qk_l2norm_in_kernel=True, state_v_first=True,
    ),
    Case(sizes=(32, 32), heads=(1, 1), lengths=rows(3), gate="reset", beta="absent"),
])  # fmt: skip
def test_the_reference_in_one_launch(case):
    """Compare its gradients with those of the reference recurrence."""
    given = inputs(case, torch.bfloat16)
    ends = given.do, given.dfinal_state
    for x, y in zip(reference_gradients(given, *ends), expected_gradients(given, *ends), strict=True):
        assert (x is None) == (y is None)
        assert x is None or error(x, y) < 1e-12


def with_rounded_states(saved):
    """Round S_in to bf16, as the MMAs of the Gluon kernels do: at K = V = 64 it is saved in fp32."""
    return replace(saved, S_in=saved.S_in.bfloat16().to(saved.S_in.dtype))


def check_gradients(here, triton, expected, keys):
    """Return the gradients that are neither within the limits of `accuracy` nor as near as Triton's.

    The sums over tokens have a check of their own: see `Sums`.
    """
    limits = accuracy.error_limits(torch.bfloat16, keys)
    bad = []
    for name, x, y, z in zip(NAMES, here, triton, expected, strict=True):
        if x is None or z is None:
            assert y is None or not y.any(), name
            continue
        is_near = (x - z).norm() <= max(1.6 * (y - z).norm(), limits[accuracy.GRADIENTS[name]] * z.norm())
        if x.isnan().any() or (name not in SUMS and not is_near):
            bad.append(f"{name}: {error(x, z):.1e}, Triton {error(y, z):.1e}")
    return bad


SUMS = ("A_log", "dt_bias")
TINY = 1e-30  # where every term is zero, so is the sum


class Sums:
    """Pool the errors of dA_log and ddt_bias over problems, in units of the limits of `accuracy`.

    They sum dg over tokens, and may cancel to a few numbers, whose relative error in one problem says little.
    """

    def __init__(self):
        self.squares = {name: [] for name in SUMS}

    def add(self, here, triton, expected, keys):
        limits = accuracy.error_limits(torch.bfloat16, keys)
        terms = expected[NAMES.index("g")]
        for name, x, y, z in zip(NAMES, here, triton, expected, strict=True):
            if name in SUMS and x is not None and z is not None:
                unit = limits[accuracy.GRADIENTS[name]] * max(z.norm(), terms.norm()).clamp(min=TINY)
                self.squares[name].append([((w - z).norm() / unit).item() ** 2 for w in (x, y)])

    def check(self):
        """Return the sums whose error is above the limit and above 1.6 times that of Triton's backward."""
        means = {
            name: [mean(column) ** 0.5 for column in zip(*x, strict=True)]
            for name, x in self.squares.items()
            if x
        }
        return {name: pair for name, pair in means.items() if not pair[0] <= max(1.0, 1.6 * pair[1])}


@trains
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("D", [128, 64])
def test_gradients_of_any_problem_on_a_gpu(monkeypatch, D, forward, seed):
    """Be within the limits, or as accurate as Triton's backward, after the forward of either backend."""
    source = random.Random(f"{forward} {seed}")
    kind = replace(draw_kind(source), sizes=(D, D))
    sums = Sums()
    for number in PROBLEMS:
        case = draw_problem(source, kind)[0]
        # the reference keeps the states of all tokens: at most 1 GB
        while case.cost > 2**27 or is_contradiction(vars(case)):
            case = draw_problem(source, kind)[0]
        consumers = 1 + number % (D // 64)
        monkeypatch.setattr(plan, "consumers_of", lambda problem, n=consumers: n)
        given = inputs(case, torch.bfloat16, device="cuda", seed=number)
        do, dfinal = source.choice(
            ((given.do, given.dfinal_state),) * 3 + ((given.do, None), (None, given.dfinal_state))
        )
        problem = parse(**given.tensors, **given.options, backend=forward)
        with poison_memory():
            saved = FORWARDS[forward](problem, True)[2]
            here = plan.chunk_backward(problem, saved, do, dfinal)
            triton = chunked.chunk_backward(problem, with_rounded_states(saved), do, dfinal)
        expected = reference_gradients(given, do, dfinal)
        bad = check_gradients(here, triton, expected, case.keys)
        assert not bad, f"{number}, {consumers} consumers: {case}: {bad}"
        sums.add(here, triton, expected, case.keys)
    assert not sums.check()


OPTIONS = {
    **CASES,
    "key heads of eight": replace(FULL, lengths=packed(65, 1, 130), heads=(1, 8)),
    "key heads of three": replace(FULL, lengths=rows(129), heads=(2, 6), beta="sigmoid", keys="correlated"),
    "model": replace(FULL, lengths=rows(447), gate="model", has_narrow_gates=True, is_strided=True),
    "slow": replace(FULL, lengths=rows(640), gate="slow", raw_gate="off", beta="given"),
    "negative": replace(FULL, lengths=packed(70, 0, 33, tail=29), keys="negative"),
    "empty": replace(FULL, lengths=packed(0, 5, 0, 0, 64, 130, 0)),
}


@trains
@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_on_a_gpu(monkeypatch, name, consumers):
    """Outputs and gradients are within the limits of docs/accuracy.md; sums over tokens: the next test."""
    monkeypatch.setattr(plan, "consumers_of", lambda problem: consumers)
    verdicts = accuracy.check(hopper, OPTIONS[name], torch.bfloat16, device="cuda")
    sums = [accuracy.GRADIENTS[name] for name in SUMS]
    bad = [verdict for verdict in verdicts if not verdict.ok and verdict.output not in sums]
    assert not bad, bad


@trains
@pytest.mark.parametrize("name", [name for name, case in OPTIONS.items() if case.raw_gate != "off"])
def test_sums_over_tokens_on_a_gpu(name):
    """Pooled over seeds, dA_log and ddt_bias are within the limits, or as near as Triton's."""
    case, sums = OPTIONS[name], Sums()
    for seed in range(8):
        given = inputs(case, torch.bfloat16, device="cuda", seed=seed)
        problem = parse(**given.tensors, **given.options, backend="hopper")
        saved = FORWARDS["hopper"](problem, True)[2]
        ends = given.do, given.dfinal_state
        here, triton = (x.chunk_backward(problem, saved, *ends) for x in (plan, chunked))
        sums.add(here, triton, reference_gradients(given, *ends), case.keys)
    assert sums.squares["A_log"] and not sums.check()


@trains
@pytest.mark.parametrize("case, count", [(FULL, 1000), (LARGE, 100)], ids=["small", "large"])
def test_reruns_are_bit_identical(case, count):
    given = inputs(case, torch.bfloat16, device="cuda")
    first = accuracy.run(hopper, given)
    for _ in range(count):
        again = accuracy.run(hopper, given)
        assert all(torch.equal(again[name], x) for name, x in first.items())


@trains
def test_a_head_among_many_has_the_bits_that_it_has_alone():
    case = Case("mixed", lengths=rows(1024), heads=(16, 32), sizes=(128, 128), state="wide")
    given = inputs(replace(case, batch_invariant=True), torch.bfloat16, device="cuda")
    found, alone = accuracy.run(hopper, given), accuracy.run(hopper, given.heads([5]))
    for name, x in alone.items():
        axis = 1 if name in ("final_state", "dh0") else 2
        assert torch.equal(found[name].narrow(axis, 5 * x.shape[axis], x.shape[axis]), x), name


@trains
def test_a_sequence_among_many_has_the_bits_that_it_has_alone():
    case = replace(LARGE, batch_invariant=True, is_strided=False, raw_gate="off", beta="given")
    given = inputs(case, torch.bfloat16, device="cuda")
    first, last = (given.tensors["cu_seqlens"].tolist()[i] for i in (2, 3))
    tokens = {name: given.tensors[name][:, first:last] for name in ("q", "k", "v", "g", "beta")}
    S = given.tensors["initial_state"]
    alone = replace(
        given, tensors={**tokens, "initial_state": S[2:3]}, do=given.do[:, first:last],
        dfinal_state=given.dfinal_state[2:3],
    )  # fmt: skip
    found, own = accuracy.run(hopper, given), accuracy.run(hopper, alone)
    for name, x in own.items():
        part = found[name][2:3] if name in ("final_state", "dh0") else found[name][:, first:last]
        assert torch.equal(part, x), name


@trains
@pytest.mark.parametrize("forward", ["triton", "eager", "recurrent"])
def test_the_backward_follows_any_forward(forward):
    """Gradients after another backend's forward are those after the forward of Hopper, but for rounding."""
    given = inputs(replace(FULL, lengths=rows(257)), torch.bfloat16, device="cuda")
    problem = parse(**given.tensors, **given.options, backend="hopper")
    saved = {
        "triton": lambda: chunked.chunk_forward(problem, True)[2],
        "eager": lambda: eager.BACKEND.chunk_forward(problem, True)[2],
        "recurrent": Saved,
    }[forward]()
    ends = given.do, given.dfinal_state
    own = plan.chunk_backward(problem, FORWARDS["hopper"](problem, True)[2], *ends)
    found = plan.chunk_backward(problem, saved, *ends)
    bad = check_gradients(found, own, expected_gradients(given, *ends), "random")
    assert not bad, bad


@trains
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_few_keys_on_a_gpu(name):
    """At K = V = 64 outputs and gradients are within the limits of docs/accuracy.md."""
    case = replace(OPTIONS[name], sizes=(64, 64))
    verdicts = accuracy.check(hopper, case, torch.bfloat16, device="cuda")
    sums = [accuracy.GRADIENTS[name] for name in SUMS]
    bad = [verdict for verdict in verdicts if not verdict.ok and verdict.output not in sums]
    assert not bad, bad


@trains
@pytest.mark.parametrize("is_cut", [False, True])
def test_reruns_of_few_keys_are_bit_identical(monkeypatch, is_cut):
    """At K = V = 64, too, also in segments, whose gradients differ by the rounding of dS alone."""
    case = replace(LARGE, sizes=(64, 64), heads=(2, 4))
    given = inputs(case, torch.bfloat16, device="cuda")
    monkeypatch.setattr(plan, "schedule_of", lambda p: (1, None))
    whole = accuracy.run(hopper, given)
    if is_cut:
        cut = Segmentation(Cut(3, 9, 2), 1, 1)
        monkeypatch.setattr(plan, "schedule_of", lambda p: (1, cut))
    first = accuracy.run(hopper, given)
    for name, x in whole.items():
        assert error(first[name], x.double()) < 3e-3, name
    for _ in range(100):
        again = accuracy.run(hopper, given)
        assert all(torch.equal(again[name], x) for name, x in first.items())


@pytest.mark.gpu
@on_hopper
def test_few_keys_have_the_bits_of_triton_where_no_backend_is_named():
    """At K = V = 64 a call that names no backend has Triton's backward, and so has fp16."""
    given = inputs(replace(FULL, sizes=(64, 64)), torch.bfloat16, device="cuda")
    problem = parse(**given.tensors, **given.options)
    saved = backends.select(problem).chunk_forward(problem, True)[2]
    expected = chunked.chunk_backward(problem, saved, given.do, given.dfinal_state)
    found = accuracy.run(gdn.chunk_gated_delta_rule, given)
    for name, x in zip(NAMES, expected, strict=True):
        assert torch.equal(found[accuracy.GRADIENTS[name]], x), name
    half = inputs(FULL, torch.float16, device="cuda")
    assert gdn.explain(**half.tensors, **half.options).backward == "triton"


@trains
def test_nan_stays_in_its_sequence_on_a_gpu():
    """NaN past the end of a sequence, and of the last one, reaches no gradient of another token."""
    given = inputs(
        replace(CASES["packed"], lengths=packed(40, 30, 70, tail=9)), torch.bfloat16, device="cuda"
    )
    expected = accuracy.run(hopper, given)
    for x in (*(given.tensors[name] for name in ("q", "k", "v", "g", "beta")), given.do):
        x[:, 40:70] = x[:, 140:] = float("nan")
    found = accuracy.run(hopper, given)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        for part in (slice(0, 40), slice(70, 140)):
            assert torch.equal(found[name][:, part], expected[name][:, part]), name
        # a g that is NaN has no gradient, as one below the reset
        assert name == "dg" or found[name][:, 40:70].isnan().any(), name
        assert not found[name][:, 140:].any(), name
    assert torch.equal(found["dh0"][[0, 2]], expected["dh0"][[0, 2]]) and found["dh0"][1].isnan().any()


@trains
def test_a_cuda_graph_follows_its_inputs():
    """A graph of forward and backward may be replayed with other values and other lengths."""
    given, other = (inputs(FULL, torch.bfloat16, seed=seed, device="cuda") for seed in (0, 1))
    moved = torch.tensor([0, 60, 60, 61, 190, 375], device="cuda").to(given.tensors["cu_seqlens"].dtype)
    other.tensors["cu_seqlens"].copy_(moved)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            accuracy.run(hopper, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = accuracy.run(hopper, given)
    for name, x in other.tensors.items():
        given.tensors[name].copy_(x)
    given.do.copy_(other.do)
    given.dfinal_state.copy_(other.dfinal_state)
    graph.replay()
    expected = accuracy.run(hopper, other)
    assert all(torch.equal(captured[name], x) for name, x in expected.items())


def layer_inputs(T, dtype=torch.bfloat16, B=2, H=2, HV=4, seed=0):
    """Return q, k, v, g and beta that require gradients."""
    x = inputs(Case(lengths=rows(T)._replace(B=B), heads=(H, HV), sizes=(128, 128)), dtype, seed=seed).tensors
    return [x[name].cuda().requires_grad_() for name in ("q", "k", "v", "g", "beta")]


def gradients_of(function, x):
    """Return the outputs of a function, and the gradients of its arguments for gradients of ones."""
    out = function(*x)
    return [*out, *torch.autograd.grad(out, x, [torch.ones_like(y) for y in out])]


def equal_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def call(*x):
    return hopper(*x, output_final_state=True)


@trains
def test_compiled_whole_forward_and_backward():
    """Inductor compiles one graph, and another length compiles nothing."""
    torch._dynamo.reset()
    model = torch.compile(call, fullgraph=True, dynamic=True)
    for T in (65, 200, 130):
        x = layer_inputs(T)
        torch._dynamo.mark_dynamic(x[0], 1)
        with torch._dynamo.config.patch(error_on_recompile=T != 65):
            found = gradients_of(model, x)
        assert equal_bits(found, gradients_of(call, x))


@trains
def test_graphed_callables():
    """`torch.cuda.make_graphed_callables` captures forward and backward."""
    sample, x = layer_inputs(300), layer_inputs(300, seed=1)
    graphed = torch.cuda.make_graphed_callables(call, tuple(sample))
    found = [y.clone() for y in gradients_of(graphed, x)]
    assert equal_bits(found, gradients_of(call, x))


def hopper_layer():
    """Return a layer whose rule runs on `hopper`, which has no convolution and no norm."""
    layer = gdn.GatedDeltaNet(256, 2, 4, 128, 128).to("cuda", torch.bfloat16)
    layer.backend = "hopper"
    return layer


@trains
def test_a_recorded_step_with_its_optimizer_trains_as_eager_mode():
    """A CUDA graph of forward, backward and Adam changes the parameters of a layer as steps one by one do."""
    torch.manual_seed(0)
    layer = hopper_layer()
    twin, before = copy.deepcopy(layer), copy.deepcopy(layer)
    batches = torch.randn(4, 2, 300, 256, device="cuda", dtype=torch.bfloat16)
    hidden = batches[0].clone()

    def step_of(model):
        # steps of less than 4e-3 would be lost where weights are 1 in bf16
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-2, capturable=True, foreach=False)

        def step():
            optimizer.zero_grad(set_to_none=True)
            model(hidden).square().mean().backward()
            optimizer.step()

        return step

    recorded, plain = step_of(layer), step_of(twin)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        recorded()
    torch.cuda.current_stream().wait_stream(stream)
    plain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded()
    for batch in batches[1:]:
        hidden.copy_(batch)
        graph.replay()
        plain()
    assert equal_bits(layer.parameters(), twin.parameters())
    assert not any(torch.equal(x, y) for x, y in zip(layer.parameters(), before.parameters(), strict=True))


@trains
def test_a_graphed_layer_has_the_gradients_of_eager_mode():
    """CUDA graphs of forward and backward, in turn; the backward may use the memory of what it has read."""
    layer = hopper_layer()
    hidden = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(hidden).sum(), hidden)
    graphed = torch.cuda.make_graphed_callables(layer, (hidden.detach().clone().requires_grad_(),))
    for _ in range(2):
        (found,) = torch.autograd.grad(graphed(hidden).sum(), hidden)
        assert torch.equal(found, expected)


@trains
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    """A checkpoint runs the forward again; use_reentrant runs it first as one without gradients."""
    x = layer_inputs(300)
    out = checkpoint(call, *x, use_reentrant=use_reentrant)
    torch.autograd.backward(out, [torch.ones_like(y) for y in out])
    expected = gradients_of(call, x)
    if use_reentrant:
        with torch.no_grad():
            expected[: len(out)] = call(*x)
    assert equal_bits([*out, *(y.grad for y in x)], expected)


@trains
def test_saved_tensors_on_the_cpu():
    """Hooks may move the saved tensors elsewhere and back."""
    x = layer_inputs(300)
    with torch.autograd.graph.save_on_cpu():
        found = gradients_of(call, x)
    assert equal_bits(found, gradients_of(call, x))


@trains
def test_autocast():
    """Under autocast q, k and v in fp32 run in bf16, and their gradients are fp32."""
    wide = layer_inputs(300, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = gradients_of(call, wide)
    q, k, v, *gates = wide
    narrow = [*(x.detach().bfloat16().requires_grad_() for x in (q, k, v)), *gates]
    expected = gradients_of(call, narrow)
    assert [x.dtype for x in found[2:]] == [torch.float32] * 5
    assert equal_bits([x.to(y.dtype) for x, y in zip(found, expected, strict=True)], expected)


@trains
def test_nothing_waits_for_the_device():
    given = inputs(FULL, torch.bfloat16, device="cuda")
    accuracy.run(hopper, given)
    with nothing_waits():
        accuracy.run(hopper, given)


@trains
def test_another_stream_and_unaligned_tensors():
    """Kernels run on the caller's stream; tensors that TMA cannot read are copied."""
    given = inputs(FULL, torch.bfloat16, device="cuda")
    expected = accuracy.run(hopper, given)
    for name in ("q", "k", "v"):
        x = given.tensors[name]
        given.tensors[name] = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    given = replace(
        given, do=given.do.new_empty(given.do.numel() + 1)[1:].view(given.do.shape).copy_(given.do)
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        v = given.tensors["v"]
        v.copy_((v * 2).clone() / 2)
        found = accuracy.run(hopper, given)
    stream.synchronize()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@trains
@pytest.mark.parametrize("is_packed", [False, True])
def test_other_sizes_compile_nothing(is_packed):
    """Any number of heads, rows or tokens of a kind runs binaries of the first call or of `warmup`."""

    def run(B, T, H, HV):
        x = layer_inputs(T * B if is_packed else T, B=1 if is_packed else B, H=H, HV=HV)
        ends = torch.arange(0, B + 1, device="cuda") * T if is_packed else None
        o, S = gdn.chunk_gated_delta_rule(*x, cu_seqlens=ends, output_final_state=True)
        torch.autograd.grad([o, S], x, [o.detach(), S.detach()])

    run(2, 100, 2, 4)
    with compilations() as names:
        for sizes in ((1, 1, 2, 4), (3, 257, 2, 2), (4, 64, 4, 12), (1, 2000, 16, 32), (16, 100, 1, 3)):
            run(*sizes)
    assert not names


@trains
@pytest.mark.skipif("GDN_TEST_SEEDS" not in os.environ, reason="expected GDN_TEST_SEEDS")
def test_a_warm_process_compiles_nothing():
    """`warmup` with training=True compiles the backward; a training step then compiles nothing."""
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128}
    gdn.warmup("cuda", **sizes, training=True, gates=("active",), max_rows=1, use_qk_l2norm_in_kernel=True)
    x = layer_inputs(777, B=1)
    ends = torch.tensor([0, 500, 777], device="cuda", dtype=torch.int32)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "cu_seqlens": ends}
    with compilations() as names:
        gradients_of(lambda *x: gdn.chunk_gated_delta_rule(*x, **options), x)
    assert not names
