"""Test the kernel of sm_90 that decodes with a history, simulated on the CPU, and which calls get it."""

import pytest
import torch
from conftest import HAS_TRITON, INTERPRETED

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit import gluon_simulator
from kit.hopper import Simulated
from kit.serving import error, inputs, same_bits

import gdn
from gdn.backends.hopper.serving import history
from gdn.backends.triton.launch import Machine
from gdn.backends.triton.serving import history as portable
from gdn.problem.history import parse_history

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
