"""Check that a layer's whole decode step has the bits of its three functions, and the reference's numbers."""

import doctest
import importlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit import api
from kit.api import reference
from kit.serving import STEP, TOLERANCE, error, find_wrong_state, moved, same_bits, step_of

import gdn
import gdn.ops.step
from gdn.backends.eager import dense_step
from gdn.problem.step import parse_step
from gdn.reference.layer import causal_conv1d, rms_norm_gated

pytestmark = pytest.mark.usefixtures("poison")

NAN, INF = float("nan"), float("inf")
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
WRITTEN = ("conv_state", "state")
ROWS = 5
SIZES = (ROWS, 2, 4, 16, 24, 4)  # B, H, HV, K, V, W
at = torch.tensor


def slot_choices(index=torch.int64):
    """Return by name where rows find their windows and states among 9 slots."""
    rows = at([7, 2, -1, 4, 9], dtype=index)
    return {
        "identity": {},
        "index": {"read_index": rows},
        "null slot": {"read_index": at([7, 2, 0, -1, 4], dtype=index), "null_slot": 0},
        "windows elsewhere": {"read_index": rows, "conv_index": at([3, -5, 6, 0, 1], dtype=index)},
        "split": {
            "read_index": at([7, 7, -1, 4, 2], dtype=index), "write_index": at([0, 1, 3, -1, 5], dtype=index),
            "conv_index": at([0, 1, 3, 8, 5], dtype=index),
        },
        "windows alone": {"conv_index": rows},
    }  # fmt: skip


# dtype of the inputs, of the pool, of the windows (None: as the inputs), and columns of the windows
KINDS = {
    "fp32": (F32, F32, None, 3),
    "bf16": (BF16, F32, F32, 3),
    "bf16 pool": (BF16, BF16, None, 5),
    "fp16": (F16, F16, None, 4),
    "fp32 on bf16": (F32, BF16, BF16, 3),
    "fp64": (F64, F64, None, 3),
}
FEW = {("fp32", True), ("bf16 pool", False)}  # the kinds that are interpreted


def make_step(sizes=SIZES, kind="fp32", **options):
    dtype, pool, windows, L = KINDS[kind]
    L = max(L, sizes[5] - 1)
    x, sizes = step_of(*sizes, dtype, pool, L=L, conv_dtype=windows, **options)
    x.pop("read_index", None)
    return x | sizes


def compose_step(x, backend):
    """Run the three public functions on a step's arguments."""
    x = STEP | x
    slots = x["read_index"] if x["conv_index"] is None else x["conv_index"]
    mixed = gdn.causal_conv1d_update(
        x["mixed_qkv"], x["conv_state"], x["conv_weight"], x["conv_bias"], state_index=slots,
        activation=x["conv_activation"], null_slot=x["null_slot"], backend=backend,
    )  # fmt: skip
    names = (
        "num_k_heads", "head_k_dim", "head_v_dim", "scale", "use_qk_l2norm_in_kernel", "allow_neg_eigval",
        "state_v_first", "read_index", "write_index", "null_slot",
    )  # fmt: skip
    gates = (x[name] for name in ("a", "b", "A_log", "dt_bias", "state"))
    o = api.decode_packed(mixed, *gates, **{name: x[name] for name in names}, backend=backend)
    if x["z"] is None and x["norm_weight"] is None:
        return o
    options = {"eps": x["norm_eps"], "activation": x["norm_activation"], "backend": backend}
    return gdn.rms_norm_gated(o, x["z"], x["norm_weight"], **options)


def reference_step(x):
    """Return the reference's out, windows and states, each function's result rounded to the dtype."""
    x, dtype = STEP | x, x["mixed_qkv"].dtype
    windows, W = x["conv_state"].clone(), x["conv_weight"].shape[1]
    slots = x["read_index"] if x["conv_index"] is None else x["conv_index"]
    mixed = torch.zeros(x["mixed_qkv"].shape, dtype=F64)
    for n, row in enumerate(x["mixed_qkv"]):
        slot = n if slots is None else int(slots[n])
        if not (0 if x["null_slot"] is None else 1) <= slot < len(windows):
            continue
        held = x["conv_state"][slot]
        before = held[None, :, held.shape[1] - (W - 1) :]
        y, _ = causal_conv1d(
            row[None, None], x["conv_weight"], x["conv_bias"], activation=x["conv_activation"],
            initial_state=before,
        )  # fmt: skip
        mixed[n] = y[0, 0]
        windows[slot] = torch.cat([held, row[:, None].to(held.dtype)], 1)[:, 1:]
    H, K, V, HV = x["num_k_heads"], x["head_k_dim"], x["head_v_dim"], x["a"].shape[1]
    q, k, v = mixed.to(dtype)[:, None].split([H * K, H * K, HV * V], 2)
    names = ("scale", "use_qk_l2norm_in_kernel", "allow_neg_eigval", "state_v_first")
    where = {name: x[name] for name in (*names, "A_log", "dt_bias", "read_index", "write_index", "null_slot")}
    served = reference.decode(
        q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V)), x["state"],
        a=x["a"][:, None], b=x["b"][:, None], **where,
    )  # fmt: skip
    o = served.o[:, 0]
    if x["z"] is not None or x["norm_weight"] is not None:
        options = {"eps": x["norm_eps"], "activation": x["norm_activation"]}
        o = rms_norm_gated(o.to(dtype), x["z"], x["norm_weight"], **options)
    return o, windows, served.state


def run(backend, device, x):
    """Run a step on copies on a device; return everything that it wrote, on the CPU."""
    x = moved(x, device)
    out = torch.full((*x["a"].shape, x["head_v_dim"]), NAN, dtype=x["mixed_qkv"].dtype, device=device)
    assert api.decode_step(**x, out=out, backend=backend) is out
    return out.cpu(), *(x[name].cpu() for name in WRITTEN)


def find_errors(got, expected, x, tolerance):
    """Return everything that is wrong with what a step wrote."""
    found = (
        [f"out is off by {error(got[0], expected[0]):.1e}"]
        if not error(got[0], expected[0]) <= tolerance
        else []
    )
    for name, one, other in zip(WRITTEN, got[1:], expected[1:], strict=True):
        found.append(find_wrong_state(one, other, x[name], tolerance))
    return [f for f in found if f]


def limit_of(x):
    """Return the limit of the coarsest dtype a result is rounded to; the norm doubles its input's error."""
    coarse = max((x["mixed_qkv"].dtype, x["state"].dtype), key=lambda d: TOLERANCE[d])
    return 2 * TOLERANCE[coarse]


@pytest.mark.parametrize("name", slot_choices())
@pytest.mark.parametrize(
    "kind, v_first",
    [
        pytest.param(*case, marks=[pytest.mark.interpret] if case in FEW else [])
        for case in itertools.product(KINDS, [True, False])
    ],
)
def test_the_reference_and_the_three_functions(backend, device, kind, v_first, name):
    if kind == "fp64" and backend != "eager":
        pytest.skip("float64 is for eager alone")
    x = make_step(kind=kind, v_first=v_first) | slot_choices()[name]
    got = run(backend, device, x)
    assert find_errors(got, reference_step(x), x, limit_of(x)) == []
    own = moved(x, device)
    expected = compose_step(own, backend)
    assert same_bits(got[0], expected) and all(
        same_bits(g, own[n]) for g, n in zip(got[1:], WRITTEN, strict=True)
    )


OPTIONS = [
    {"conv_activation": None, "conv_bias": None},
    {"scale": 0.3, "use_qk_l2norm_in_kernel": True, "allow_neg_eigval": True},
    {"dt_bias": None, "z": None},
    {"norm_weight": None, "norm_activation": "sigmoid", "norm_eps": 1e-3},
    {"norm_activation": None},
    {"z": None, "norm_weight": None},
]


@pytest.mark.interpret
@pytest.mark.parametrize("change", OPTIONS, ids=lambda c: " ".join(c))
def test_options(backend, device, change):
    x = make_step() | {"read_index": at([3, -1, 0, 8, 5])} | change
    assert find_errors(run(backend, device, x), reference_step(x), x, limit_of(x)) == []


@pytest.mark.interpret
@pytest.mark.parametrize(
    "sizes", [(3, 1, 1, 5, 3, 2), (2, 3, 9, 20, 40, 1), (0, 2, 4, 16, 24, 4), (2, 1, 2, 8, 8, 9)]
)
def test_heads_sizes_and_taps(backend, device, sizes):
    x = make_step(sizes)
    got = run(backend, device, x)
    assert find_errors(got, reference_step(x), x, limit_of(x)) == []


@pytest.mark.interpret
def test_any_layout(backend, device):
    """Contiguous channels of windows, transposed weights and outputs, and distant rows give the same bits."""
    x = make_step() | {"read_index": at([3, -1, 0, 8, 5])}
    expected = run(backend, device, x)
    turned = moved(x, device)
    turned["conv_state"] = turned["conv_state"].mT.contiguous().mT
    turned["conv_weight"] = turned["conv_weight"].t().contiguous().t()
    turned["z"] = turned["z"].mT.contiguous().mT
    turned["mixed_qkv"] = turned["mixed_qkv"].t().contiguous().t()
    turned["read_index"] = turned["read_index"].repeat_interleave(3)[::3]
    turned["out"] = torch.empty(24, 4, ROWS, device=device).permute(2, 1, 0)
    api.decode_step(**turned, backend=backend)
    assert same_bits(turned["out"], expected[0])
    assert all(same_bits(turned[n], w) for n, w in zip(WRITTEN, expected[1:], strict=True))


@pytest.mark.interpret
def test_nan_that_is_not_read_reaches_nothing(backend, device):
    """NaN in padded rows and in slots that no row names reaches no result, and is not overwritten."""
    x = make_step() | {"read_index": at([3, -1, 0, 8, 5])}
    expected = run(backend, device, x)
    dirty = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in x.items()}
    for name in ("mixed_qkv", "a", "b"):
        dirty[name][1] = NAN
    for name in WRITTEN:
        dirty[name][[1, 2, 4, 6, 7]] = NAN
    got = run(backend, device, dirty)
    assert same_bits(got[0], expected[0]) and not got[0][1].any()
    for n, (g, w) in enumerate(zip(got[1:], expected[1:], strict=True)):
        assert same_bits(g[[3, 0, 8, 5]], w[[3, 0, 8, 5]]) and bool(g[[1, 2, 4, 6, 7]].isnan().all()), n


@pytest.mark.interpret
def test_a_cached_call(backend, device):
    """A second call of the same kind, on other tensors, uses the cached launches with the same results."""
    for _ in range(3):
        x = make_step() | {"read_index": torch.randperm(9)[:ROWS]}
        own = moved(x, device)
        expected = compose_step(own, backend)
        mine = moved(x, device)
        assert same_bits(api.decode_step(**mine, backend=backend), expected)
        assert all(same_bits(mine[n], own[n]) for n in WRITTEN)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("L", [3, 4, 6])
@pytest.mark.parametrize("name", ["usual", "value first", "plain", "autocast", "bf16", "fp16 plain"])
def test_a_repeated_dense_step_has_the_bits_of_the_three_functions(monkeypatch, name, L, rows):
    """A CPU repeats a call on whole fp32 states without problems: the same bits, and the same buffers."""
    runs = []
    run_dense = dense_step.DenseStep.run
    monkeypatch.setattr(dense_step.DenseStep, "run", lambda *given: runs.append(given) or run_dense(*given))
    changes = {
        "value first": {"state_v_first": True, "allow_neg_eigval": True, "norm_activation": "sigmoid"},
        "plain": dict.fromkeys(("z", "norm_weight", "conv_activation", "conv_bias", "dt_bias")),
    }
    dtype = {"bf16": BF16, "fp16 plain": F16}.get(name, F32)
    for _ in range(3):
        x, sizes = step_of(rows, 2, 4, 16, 24, 4, dtype, F32, L=L, conv_dtype=dtype)
        x = x | sizes | changes.get(name.split()[-1], {}) | changes.get(name, {})
        x.pop("read_index")
        if not x.get("state_v_first", True):
            x["state"] = x["state"].mT.contiguous()
        own, mine = moved(x, "cpu"), moved(x, "cpu")
        expected = compose_step(own, "eager")
        with torch.autocast("cpu", enabled=name == "autocast"):
            out = api.decode_step(**mine, backend="eager")
        assert same_bits(out, expected) and all(same_bits(mine[x], own[x]) for x in WRITTEN)
    # the first call of a kind in this process is checked
    assert len(runs) >= 2


def run_dense_steps(x, options, count=3):
    """Repeat a step on its pools, and by the three functions; return whether all bits were the same."""
    own, mine = moved(x, "cpu") | options, moved(x, "cpu") | options
    for _ in range(count):
        expected, out = compose_step(own, "eager"), api.decode_step(**mine, backend="eager")
        if not (same_bits(out, expected) and all(same_bits(mine[x], own[x]) for x in WRITTEN)):
            return False
    return True


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("sizes", [(1, 3, 10, 7, 4), (2, 2, 5, 3, 1), (3, 9, 1, 1, 2), (1, 1, 33, 20, 3)])
def test_a_repeated_dense_step_of_odd_sizes(sizes, rows):
    """Rows of keys that are no multiple of 64 bytes are placed as single rows are."""
    x, options = step_of(rows, *sizes, L=4)
    x.pop("read_index")
    assert run_dense_steps(x, options)


@pytest.mark.parametrize("A_log", [-800.0, 0.0, 88.0, 709.9, 3e38, INF, -INF])
def test_a_repeated_dense_step_at_the_borders_of_gates(A_log):
    """Logits and rates from 0 to infinity have the gates of `decode`, and NaN where it has NaN."""
    logits = torch.tensor(
        [0.0, -0.0, 1e-30, 20, -20, 104, -104, 709, -709, 745, -746, 3e38, -3e38, INF, -INF]
    )
    HV = len(logits)
    x, options = step_of(2, 1, HV, 4, 4, 4, L=3)
    x.pop("read_index")
    x |= {
        "a": torch.stack((logits, logits.flip(0))), "b": torch.stack((logits.roll(3), logits)),
        "A_log": torch.full((HV,), A_log), "dt_bias": torch.zeros(HV),
    }  # fmt: skip
    assert run_dense_steps(x, options)


def test_nan_of_a_repeated_dense_step_is_where_decode_has_it():
    x, options = step_of(2, 1, 4, 4, 4, 4, L=3)
    x.pop("read_index")
    x["a"][0, 1] = x["b"][1, 2] = NAN
    own, mine = moved(x, "cpu") | options, moved(x, "cpu") | options
    for _ in range(3):
        expected, out = compose_step(own, "eager"), api.decode_step(**mine, backend="eager")
        assert torch.equal(out.isnan(), expected.isnan()) and bool(out.isnan().any())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())
        assert torch.equal(mine["state"].isnan(), own["state"].isnan())


def dense_workspaces(monkeypatch):
    """Return the list of workspaces that are made from now on."""
    made, create = [], dense_step.Workspace.__init__

    def note(self, sizes):
        create(self, sizes)
        made.append(self)

    monkeypatch.setattr(dense_step.Workspace, "__init__", note)
    return made


@pytest.mark.parametrize("is_large", [False, True])
def test_a_small_workspace_of_a_dense_step_is_kept(monkeypatch, is_large):
    made, sizes = dense_workspaces(monkeypatch), (2, 1, 3, 16, 11 + is_large, 4)
    monkeypatch.setattr(dense_step, "LARGEST", 100 if is_large else 1 << 20)
    for _ in range(4):
        x, options = step_of(*sizes, L=3)
        x.pop("read_index")
        assert run_dense_steps(x, options, 2)
    # the first call is checked
    assert len(made) == (7 if is_large else 1)


def test_dense_steps_of_several_threads_do_not_meet(monkeypatch):
    """Each thread has its own workspace, and a step that fails leaves none in an unknown state."""
    made, x, options = dense_workspaces(monkeypatch), *step_of(1, 2, 4, 16, 13, 4, L=3)
    x.pop("read_index")
    assert run_dense_steps(x, options) and len(made) == 1
    meeting, convolve = threading.Barrier(2), dense_step.DenseStep._convolve

    def convolve_together(*given):
        convolve(*given)
        meeting.wait(30)

    monkeypatch.setattr(dense_step.DenseStep, "_convolve", convolve_together)
    given = [moved(step_of(1, 2, 4, 16, 13, 4, L=3)[0] | {"read_index": None}, "cpu") for _ in range(2)]
    expected = [compose_step(moved(x, "cpu") | options, "eager") for x in given]
    with ThreadPoolExecutor(2) as threads:
        outs = list(threads.map(lambda x: api.decode_step(**x, **options, backend="eager"), given))
    assert len(made) == 2 and all(map(same_bits, outs, expected))


def test_a_repeated_dense_step_leaves_what_autograd_reads():
    """Its result may enter a graph, and a backward notices that a tensor which it kept was written."""
    sizes = (1, 2, 4, 16, 24, 4)
    for _ in range(3):
        x, options = step_of(*sizes, F32, F32, L=4, conv_dtype=F32)
        x.pop("read_index")
        weight = torch.ones((), requires_grad=True)
        kept = [weight * x[name] for name in WRITTEN]
        out = api.decode_step(**x, **options, backend="eager")
        assert not out.is_inference()
        (weight * out).sum().backward()
        for product in kept:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()


def test_the_gate_can_fail(backend, device):
    x = make_step() | {"read_index": at([3, -1, 0, 8, 5])}
    got, expected = run(backend, device, x), reference_step(x)
    out, windows, state = got
    for name, lie in {
        "zero": (0 * out, windows, state), "swapped heads": (out.flip(1), windows, state),
        "stale windows": (out, x["conv_state"], state), "touched": (out, windows + 1e-3, state),
        "stale states": (out, windows, x["state"]), "unwritten": (out * NAN, windows, state),
        "no gate": (run(backend, device, x | {"z": None})[0], windows, state),
    }.items():  # fmt: skip
        assert find_errors(lie, expected, x, limit_of(x)), name


# on a GPU


@pytest.mark.parametrize("has_norm", [True, False])
def test_a_first_call_compiles_what_other_numbers_of_rows_take(monkeypatch, has_norm):
    compiling = pytest.importorskip("kit.compiling")
    step, heads = importlib.import_module("gdn.backends.triton.serving.step"), (16, 32, 128, 128, 4)
    compiled = []

    def binaries(rows):
        x, options = step_of(rows, *heads, BF16, BF16, slots=1, is_gated=has_norm)
        x |= {"read_index": torch.zeros(rows, dtype=torch.int32), "conv_bias": None, "backend": "triton"}
        if has_norm:
            # with one row the stride may be any number
            x["z"] = x["z"].contiguous()
        return set(compiling.jobs(lambda: api.decode_step(**x | options), "cuda:90"))

    with monkeypatch.context() as patch:
        patch.setattr(step, "compile_ahead", lambda device, kind, steps: compiled.extend(steps()))
        few = binaries(1)
    found = [few, binaries(2), binaries(64)]
    assert set().union(*found) == set(compiling.jobs_of(compiled, "cuda:90"))
    assert found[0] == found[1] != found[2], "the numbers of rows differ in what they take"


@pytest.mark.gpu
def test_a_step_in_a_cuda_graph():
    """A captured step may be replayed with other slots."""
    x, sizes = step_of(64, 4, 16, 128, 128, 4, BF16, slots=130)
    held = moved(x | sizes, "cuda") | {"out": torch.empty(64, 16, 128, dtype=BF16, device="cuda")}
    api.decode_step(**held, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        api.decode_step(**held, backend="triton")
    held["read_index"].copy_(torch.randperm(130)[:64])
    copies = moved(held, "cuda")
    for _ in range(20):
        graph.replay()
        expected = compose_step({name: v for name, v in copies.items() if name != "out"}, "triton")
        assert same_bits(held["out"], expected)
        assert all(same_bits(held[n], copies[n]) for n in WRITTEN)


# the operator, refusals


def test_operator_and_compile():
    x = make_step() | {"read_index": at([3, -1, 0, 8, 5])}
    torch.library.opcheck(torch.ops.gdn.decode_step.default, parse_step(**STEP | x).arguments())
    compiled = torch.compile(
        lambda x: api.decode_step(**x) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (2, 5):
        x = make_step((rows, *SIZES[1:]))
        copy = moved(x, "cpu")
        assert same_bits(compiled(copy), 2 * api.decode_step(**x))
        assert all(same_bits(copy[n], x[n]) for n in WRITTEN)


REFUSALS = [
    (TypeError, "mixed_qkv: expected a tensor", {"mixed_qkv": 1}),
    (ValueError, "mixed_qkv: expected 2 [*] 3", {"num_k_heads": 3}),
    (TypeError, "head_v_dim: expected an int", {"head_v_dim": 24.0}),
    (TypeError, "conv_state: expected a tensor", {"conv_state": None}),
    (ValueError, "conv_state: expected L >= W-1 = 3", {"conv_state": torch.zeros(9, 160, 2)}),
    (ValueError, "conv_state: expected shape", {"conv_state": torch.zeros(9, 159, 3)}),
    (ValueError, "conv_state: expected memory", {"conv_state": torch.zeros(1, 160, 3).expand(9, 160, 3)}),
    (ValueError, "conv_weight: expected shape", {"conv_weight": torch.zeros(159, 4)}),
    (ValueError, "conv_weight: expected W", {"conv_weight": torch.zeros(160, 0)}),
    (ValueError, "conv_bias: expected shape", {"conv_bias": torch.zeros(4)}),
    (ValueError, "conv_activation: expected one of", {"conv_activation": "sigmoid"}),
    (TypeError, "norm_activation: expected a name", {"norm_activation": 1}),
    (TypeError, "norm_eps: expected a number", {"norm_eps": None}),
    (ValueError, "norm_eps: expected at least 0", {"norm_eps": -1e-6}),
    (ValueError, "z: expected shape", {"z": torch.zeros(ROWS, 96)}),
    (ValueError, "norm_weight: expected shape", {"norm_weight": torch.zeros(4)}),
    (ValueError, "state: expected shape", {"state": torch.zeros(9, 4, 16, 24)}),
    (ValueError, "A_log: expected a tensor", {"A_log": None}),
    (ValueError, "read_index: expected shape", {"read_index": torch.zeros(ROWS, 1, dtype=torch.int32)}),
    (TypeError, "conv_index: expected an int32", {"conv_index": torch.zeros(ROWS)}),
    (ValueError, "null_slot: expected None or 0", {"null_slot": 1}),
    (TypeError, "state_v_first: expected a bool", {"state_v_first": 1}),
    (ValueError, "out: expected shape", {"out": torch.zeros(ROWS, 96)}),
    (ValueError, "z: expected device", {"z": torch.zeros(ROWS, 4, 24, device="meta")}),
    (ValueError, "z: expected a tensor without", {"z": torch.zeros(ROWS, 4, 24, requires_grad=True)}),
    (NotImplementedError, "hopper:", {"backend": "hopper"}),
    (TypeError, "unexpected keyword", {"ring_pos": None}),
]  # fmt: skip


@pytest.mark.parametrize("kind, message, change", REFUSALS)
def test_refusals_touch_nothing(kind, message, change):
    x = make_step() | {"out": torch.ones(ROWS, 4, 24)}
    # a valid call before does not hide the error of the next one
    api.decode_step(**x)
    x |= change
    before = {k: v.clone() for k, v in x.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(kind, match=message):
        api.decode_step(**x)
    assert all(torch.equal(before[k], x[k]) for k in before if not before[k].is_meta and k != "state")
    assert before.get("state") is None or same_bits(before["state"], x["state"])


def test_warmup_meets_it():
    sizes = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 16}
    warmed = api.warmup("cpu", **sizes, dtypes=(F32,), state_dtypes=(F32, BF16))
    assert sum(line.startswith("decode_step ") for line in warmed) >= 2


def test_examples_run():
    assert doctest.testmod(gdn.ops.step).failed == 0
