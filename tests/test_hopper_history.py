"""Test the kernel of sm_90 that decodes with a history, simulated on the CPU, and which calls get it."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON, INTERPRETED

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit import gluon_simulator
from kit.compiling import TARGETS, recording
from kit.hopper import Simulated
from kit.serving import STEP, error, inputs, same_bits, step_of

import gdn
from gdn.backends.hopper.serving import history
from gdn.backends.triton.launch import Launch, Machine, launches
from gdn.backends.triton.serving import history as portable
from gdn.problem.history import parse_fold, parse_history
from gdn.problem.step import parse_step

BF16, F32 = torch.bfloat16, torch.float32
D = 128
WRITTEN = ("state", "history_u", "history_k", "history_G", "cursor")
# cursors that no call leaves behind: kernels clamp them
OUT_OF_RANGE = [[-5, 3, 0], [99, 2, 0], [0, -9, 0], [0, 99, 0], [2**30, -(2**30), 0]]
simulated = pytest.mark.skipif(not INTERPRETED, reason="expected kernels to be interpreted")


def make_pool(slots, H, HV, state=F32, places=16, room=1, cursors=()):
    """Return a pool whose first slots have these cursors; NaN in the places that are not in use."""
    pool = gdn.allocate_history_pool(
        slots, num_k_heads=H, num_v_heads=HV, head_k_dim=D, head_v_dim=D, places=places, room=room,
        state_dtype=state, state_v_first=True,
    )  # fmt: skip
    pool.state.copy_(torch.randn(slots, HV, D, D) / 12)
    for history_of in (pool.history_u, pool.history_k, pool.history_G):
        history_of.fill_(float("nan"))
    for slot, cursor in enumerate(cursors):
        pool.cursor[slot] = torch.tensor(cursor)
        first, used = min(max(cursor[0], 0), places - 1), min(max(cursor[1], 0), places - room)
        at = (first + torch.arange(used)) % places
        pool.history_u[slot, at] = (torch.randn(used, HV, D) / 4).to(BF16)
        pool.history_k[slot, at] = torch.randn(used, H, D).to(BF16)
        pool.history_G[slot, at] = -torch.rand(used, HV, dtype=torch.float64).cumsum(0) / 8
    return pool


def copy_of(pool):
    return gdn.HistoryPool(**{n: x.clone() if torch.is_tensor(x) else x for n, x in vars(pool).items()})


def problem_of(pool, x, **options):
    """Return the checked problem of a call that appends."""
    names = ("g", "beta", "a", "b", "A_log", "dt_bias", "scale", "lower_bound", "cu_seqlens", "max_seqlen")
    given = dict.fromkeys((*names, "num_accepted", "read_index", "null_slot", "out"))
    given |= {"state_v_first": True, "use_qk_l2norm_in_kernel": True, "allow_neg_eigval": False}
    return parse_history(**given | {"use_history": True, "backend": "hopper"} | x | vars(pool) | options)


def tokens_of(rows, H, HV, gates="raw"):
    x = inputs(rows, 1, H, HV, D, D, BF16, raw=gates == "raw")
    return x if gates != "absent" else {name: x[name] for name in ("q", "k", "v")}


@pytest.fixture
def one_sm(monkeypatch):
    """Let the kernel run in the simulator, on an imagined GPU of one SM: one CTA in fp32, two in bf16."""
    monkeypatch.setattr(history, "Launch", Simulated)
    monkeypatch.setattr(history, "machine", lambda device: Machine("cuda", 90, 1, 227 * 1024))
    monkeypatch.setattr(history, "FILLED", 0)


def simulate(pool, x, **options):
    """Run the kernel on a pool in place, and return o."""
    p = problem_of(pool, x, **options)
    launch = history.plan_append(p)
    assert launch.kernel is history.decode_with_history_kernel
    launch(*p.tensors())
    return p.out


def check_results(o, pool, expected_o, expected):
    """Demand the results of another kernel, but for sums in another order before they are rounded."""
    limits = {"history_u": 5e-4, "history_k": 0.0, "history_G": 1e-6, "cursor": 0.0}
    limits["state"] = 1e-5 if pool.state.dtype == F32 else 1e-4
    assert error(o, expected_o) <= 5e-4
    for name, limit in limits.items():
        got, want = getattr(pool, name), getattr(expected, name)
        assert torch.equal(got.isnan(), want.isnan()), name
        assert error(got.nan_to_num(), want.nan_to_num()) <= limit, name


# name -> dtype of states, heads, gates, norm, places, room, null slot
CASES = {
    "fp32": (F32, (1, 2), "raw", True, 16, 1, None),
    "bf16": (BF16, (1, 2), "given", False, 16, 2, 0),
    "no gates, 8 places": (F32, (2, 2), "absent", True, 8, 1, 0),
    "no norm, 8 places": (BF16, (1, 1), "raw", False, 8, 2, None),
}


@simulated
@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES)
def test_every_cursor_has_the_results_of_triton(one_sm, case):
    """Histories of any length, in rings that wrap; full ones, which are folded; rows without a slot."""
    state, heads, gates, is_normalised, places, room, null = CASES[case]
    cursors = [[5 * used % places, used, 0] for used in range(places)] + OUT_OF_RANGE
    pool = make_pool(len(cursors) + 1, *heads, state, places, room, cursors)
    rows = [-1, *torch.randperm(len(cursors)).tolist(), len(cursors) + 1]
    options = {
        "read_index": torch.tensor(rows, dtype=torch.int32), "null_slot": null,
        "use_qk_l2norm_in_kernel": is_normalised, "allow_neg_eigval": gates == "raw",
    }  # fmt: skip
    x, other, before = tokens_of(len(rows), *heads, gates), copy_of(pool), copy_of(pool)
    if not is_normalised:
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    o = simulate(pool, x, **options)
    p = problem_of(other, x, **options)
    portable.plan_append(p)(*p.tensors())
    check_results(o, pool, p.out, other)
    assert (pool.cursor[:, 2] == 0).all()
    idle = [len(cursors)] if null is None else [len(cursors), 0]
    for name in WRITTEN:
        assert same_bits(getattr(pool, name)[idle], getattr(before, name)[idle]), name
    for n, slot in enumerate(rows):
        is_idle = slot in idle or slot in (-1, len(cursors) + 1)
        assert bool(o[n].any()) != is_idle, slot


@simulated
@pytest.mark.interpret
@pytest.mark.parametrize("rows, sms, state", [(1, 1, F32), (1, 4, BF16), (3, 2, F32), (3, 2, BF16)])
def test_steps_have_the_results_of_triton(one_sm, monkeypatch, rows, sms, state):
    """Steps over a fold, on one item, on CTAs with different numbers of items, and without read_index."""
    monkeypatch.setattr(history, "machine", lambda device: Machine("cuda", 90, sms, 227 * 1024))
    cursors = [[3, 2, 0], [1, 3, 0], [0, 0, 0]]
    pool = make_pool(3, 1, 2 if rows == 3 else 1, state, 4, 1, cursors)
    other = copy_of(pool)
    for _ in range(3):
        x = tokens_of(rows, *pool.history_k.shape[2:3], pool.state.shape[1])
        o = simulate(pool, x)
        p = problem_of(other, x)
        portable.plan_append(p)(*p.tensors())
        check_results(o, pool, p.out, other)


@simulated
@pytest.mark.interpret
@pytest.mark.parametrize("state", [F32, BF16], ids=["fp32", "bf16"])
def test_a_slow_partition_changes_no_bit(one_sm, monkeypatch, state):
    """No warps read what others have not written yet, or have overwritten, whichever of them are slow.

    A read before a copy has arrived, or after the next one was issued, is NaN.
    """
    cursors = [[2, 2, 0], [5, 7, 0], [0, 0, 0], [1, 7, 0], [7, 6, 0]]
    pool = make_pool(5, 1, 2, state, 8, 1, cursors)
    x, rows, found = tokens_of(6, 1, 2), torch.tensor([0, 1, -1, 2, 3, 4]), []
    anyone = dict.fromkeys(range(4), 0.03)
    for delays in ({}, {0: 0.08}, {1: 0.08}, {2: 0.08}, {3: 0.08}, *[anyone] * 6):
        monkeypatch.setattr(gluon_simulator, "DELAYS", delays)
        after = copy_of(pool)
        found.append([simulate(after, x, read_index=rows), *after.tensors()])
    assert not found[0][0].isnan().any()
    for results in found[1:]:
        assert all(same_bits(y, z) for y, z in zip(results, found[0], strict=True))


LACKS = [
    ("one token a row and no drafts", {"tokens": 2, "room": 2}),
    ("one token a row and no drafts", {"num_accepted": torch.zeros(300, dtype=torch.int32)}),
    ("one token a row and no drafts", {"cu_seqlens": torch.arange(301, dtype=torch.int32)}),
    ("K = V = 128", {"size": 64}),
    ("K = V = 128 and a decay per head", {"decay": "channel"}),
    ("tokens and histories in bf16", {"dtype": F32}),
    ("tokens and histories in bf16", {"history": F32}),
    ("expected states in bf16 or fp32, got torch.float16", {"state": torch.float16}),
    ("expected states in bf16 or fp32, got torch.int16", {"state": torch.int16}),
    ("states in bf16 or fp32", {"state": torch.int8}),
    ("at most 16 places, got 32", {"places": 32}),
]
# layouts that `triton` has a kernel for, and too few rows
LAYOUTS = ["K first", "slots apart", "rows apart", "few rows", "heads far apart"]


def call_of(
    rows=300, tokens=1, size=D, dtype=BF16, state=F32, history=BF16, places=16, room=1, decay="head",
    v_first=True, **options,
):  # fmt: skip
    """Return the problem of a call of 8 heads on tensors without memory."""
    with torch.device("meta"):
        pool = gdn.allocate_history_pool(
            rows, num_k_heads=4, num_v_heads=8, head_k_dim=size, head_v_dim=size, places=places, room=room,
            state_dtype=state, history_dtype=history, state_v_first=v_first, decay=decay,
        )  # fmt: skip
        lead = (1, rows) if "cu_seqlens" in options else (rows, tokens)
        x = inputs(*lead, 4, 8, size, size, dtype, raw=True, is_per_channel=decay == "channel")
    options = {n: y.to("meta") if torch.is_tensor(y) else y for n, y in options.items()}
    if "cu_seqlens" in options:
        options["max_seqlen"] = 1
    return problem_of(pool, x, state_v_first=v_first, **options)


def layout_of(name):
    """Return a problem whose layout the kernel does not support, or with too few rows."""
    if name in ("K first", "few rows"):
        return call_of(v_first=name != "K first", rows=300 if name == "K first" else 98)
    p = call_of()
    if name == "rows apart":
        return replace(p, q=torch.empty(300, 1, 4, 136, dtype=BF16, device="meta")[..., :D])
    if name == "slots apart":
        return replace(p, state=torch.empty(300, 8, D, 144, device="meta")[..., :D])
    return replace(p, state=torch.empty(8, 270000, D, D, device="meta").transpose(0, 1)[:300])


@pytest.fixture
def on_h200(monkeypatch):
    """Plan for an H200 that need not be there."""
    from gdn.backends import hopper

    monkeypatch.setattr(hopper.triton, "refuses", lambda problem: None)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    with recording(TARGETS["cuda:90"].machine) as launches:
        yield launches


@pytest.mark.skipif(INTERPRETED, reason="expected no interpreter")
def test_supported_problems(on_h200):
    """Name a reason for each problem that is not supported, whether or not the backend is named."""
    from gdn.backends import hopper

    for backend in (None, "hopper"):
        for state in (F32, BF16):
            assert hopper.refuses(call_of(state=state, backend=backend)) is None
        for reason, options in LACKS:
            assert reason in str(hopper.refuses(call_of(**options, backend=backend))), options
        for name in LAYOUTS:
            assert hopper.refuses(replace(layout_of(name), backend=backend)) is None
    for _, options in LACKS:
        assert portable_kernel(call_of(**options)), options


def portable_kernel(p, starts=(0, 0, 0)):
    """Return True if the plan is `triton`'s own, False if it is this kernel beside it."""
    one, other = history.plan_append(p, starts), portable.plan_append(p, starts)
    if one.kernel is other.kernel:
        assert one == other
        return True
    assert one.kernel is history.decode_with_history_kernel and one.unaligned == other
    return False


@pytest.mark.skipif(INTERPRETED, reason="expected no interpreter")
def test_the_plan_is_that_of_triton_where_the_kernel_has_no_layout(on_h200):
    for state, ctas in ((F32, 132), (BF16, 264)):
        p = call_of(state=state, read_index=torch.arange(300), null_slot=0)
        assert not portable_kernel(p) and history.plan_append(p).grid == ctas
        # 8 heads: a row more fills the SMs
        assert not portable_kernel(call_of(rows=99)) and portable_kernel(call_of(rows=98))
    assert all(portable_kernel(layout_of(name)) for name in LAYOUTS)
    # a layer's step reads q, k and v from one tensor
    assert not portable_kernel(call_of(), (0, 512, 1024)) and portable_kernel(call_of(), (0, 8, 1024))
    # binaries for other numbers of rows are those that such calls would launch
    p = call_of()
    assert history.plan_append(p, num_states=1).kernel is portable.history_kernel


@pytest.mark.skipif(INTERPRETED, reason="expected no interpreter")
@pytest.mark.parametrize("is_first", [True, False])
def test_unaligned_tensors_run_the_kernel_of_triton(on_h200, monkeypatch, is_first):
    """A copy of 16 bytes needs aligned addresses; Triton compiles its kernel for others."""
    ran = []
    monkeypatch.setattr(Launch, "_dispatch", lambda launch, tensors: ran.append(launch.kernel))
    monkeypatch.setattr(launches, "is_recording", lambda: False)
    p, memory = call_of(), torch.zeros(300 * 4 * D + 1, dtype=BF16)
    one = history.plan_append(p)
    if not is_first:
        one._call = lambda grid, stream, pointers: ran.append(one.kernel)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        one(*p.tensors())
        assert ran.pop() is history.decode_with_history_kernel
    q = memory[1:].view(p.q.shape)
    assert q.data_ptr() % 16
    one(*replace(p, q=q).tensors())
    assert ran == [portable.history_kernel]


def test_a_named_backend_folds_by_the_kernel_of_triton(monkeypatch):
    """Accept the name with which a pool is decoded in `fold_history` as well."""
    from gdn.backends import hopper, triton

    monkeypatch.setattr(hopper.triton, "refuses", lambda problem: None)
    given = {"state_v_first": True, "index": torch.arange(2), "num_accepted": None, "null_slot": None}
    for name in ("hopper", None):
        fold = parse_fold(**given, **vars(make_pool(2, 2, 4)), backend=name)
        assert (hopper.refuses(fold) is None) == (name == "hopper")
    assert hopper.BACKEND.fold_history is triton.BACKEND.fold_history


@pytest.mark.skipif(INTERPRETED, reason="expected no interpreter")
@pytest.mark.parametrize("rows", [300, 20])
def test_a_whole_step_has_the_kernel(on_h200, rows):
    """The convolution, this kernel, or that of Triton for few rows, and the norm."""
    from gdn.backends import hopper

    with torch.device("meta"):
        x, options = step_of(rows, 4, 8, D, D, 4, BF16, slots=rows)
        pool = gdn.allocate_history_pool(
            rows, num_k_heads=4, num_v_heads=8, head_k_dim=D, head_v_dim=D, state_v_first=True
        )
    p = parse_step(**STEP | options | x | vars(pool) | {"use_history": True})
    assert hopper.refuses(p) is None
    hopper.BACKEND.decode_step(p)
    names = [one.kernel.__name__ for one, _ in on_h200]
    expected = history.decode_with_history_kernel if rows == 300 else portable.history_kernel
    assert names[1] == expected.__name__ and len(names) == 3
    alone = parse_step(**STEP | options | x)
    assert "expected the rule, a prefill or a history" in hopper.refuses(alone)
