"""Test prefill on every backend: outputs, final states, checkpoints and snapshots against the reference."""

import pytest
import torch
from kit import api
from kit.api import reference
from kit.serving import TOLERANCE, error, find_wrong_state, inputs, moved, pool_of, same_bits

from gdn.problem.prefill import parse_prefill

NAN = float("nan")
LENGTHS = [70, 0, 1, 64, 200, 129]
N, TAIL, SLOTS = len(LENGTHS), 3, 9
SLOT = [4, 0, 7, 1, 3, 8]
LAYOUTS = [True, False]


def batch(
    lengths=LENGTHS, slots=SLOT, tail=TAIL, pool=torch.float32, v_first=True, index=torch.int64, **options
):
    """Return a packed call, with a few tokens past the last sequence."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    x = inputs(1, int(ends[-1]) + tail, **options)
    state = pool_of(SLOTS, dtype=pool, v_first=v_first)
    return x | {
        "state": state,
        "cu_seqlens": ends.to(torch.int32),
        "state_index": torch.tensor(slots, dtype=index),
    }


def checkpoint_options(rows=40, checkpoint_options=64, offsets=(0, 0, 1, 4, 5, 20), v_first=True):
    """Return checkpoints at multiples of `checkpoint_options`, in poisoned memory."""
    kept = torch.full((rows, 4, *((24, 16) if v_first else (16, 24))), NAN)
    return {
        "checkpoints": kept,
        "checkpoint_every": checkpoint_options,
        "checkpoint_offsets": torch.tensor(offsets),
    }


def find_errors(o, state, kept, expected, x, tolerance):
    """Return everything that is wrong with what a prefill wrote."""
    found = [f"o is off by {error(o, expected.o):.1e}"] if not error(o, expected.o) <= tolerance else []
    found.append(find_wrong_state(state, expected.state, x["state"], tolerance))
    if kept is not None:
        found.append(find_wrong_state(kept, expected.extra, x["checkpoints"], tolerance))
    return [f for f in found if f]


def run(backend, device, x, **options):
    """Run a prefill on copies on a device, with a poisoned output; return all that it wrote."""
    x, options = moved(x, device), moved(options, device)
    out = torch.full_like(x["v"], NAN)
    assert api.prefill(**x, out=out, backend=backend, **options) is out
    kept = x.get("checkpoints")
    return out.cpu(), x["state"].cpu(), None if kept is None else kept.cpu()


def agrees(backend, device, x, tolerance, **options):
    """Assert that everything written agrees with the reference; return it."""
    expected = reference.prefill(**x, **{k: v for k, v in options.items() if k != "batch_invariant"})
    got = run(backend, device, x, **options)
    assert find_errors(*got, expected, x, tolerance) == []
    return got


@pytest.mark.parametrize("v_first", LAYOUTS)
@pytest.mark.parametrize(
    "dtype, pool, index",
    [
        (torch.float32, torch.float32, torch.int64),
        (torch.bfloat16, torch.float32, torch.int32),
        (torch.bfloat16, torch.bfloat16, torch.int32),
        (torch.float16, torch.float16, torch.int64),
        (torch.float64, torch.float64, torch.int64),
    ],
)
def test_prefill(backend, device, poison, dtype, pool, index, v_first):
    if dtype == torch.float64 and backend != "eager":
        pytest.skip("float64 is for eager alone")
    tolerance = max(TOLERANCE[dtype], TOLERANCE[pool])
    x = batch(dtype=dtype, pool=pool, index=index, v_first=v_first)
    o, _, _ = agrees(backend, device, x, tolerance, state_v_first=v_first)
    assert not o[:, -TAIL:].any()
    kept = checkpoint_options(v_first=v_first)
    kept["checkpoints"] = kept["checkpoints"].to(torch.promote_types(dtype, torch.float32))
    agrees(backend, device, x | kept, tolerance, state_v_first=v_first, batch_invariant=True)


def test_the_gate_can_fail(backend, device):
    x = batch() | checkpoint_options()
    got, expected = run(backend, device, x), reference.prefill(**x)
    assert find_errors(*got, expected, x, 1e-5) == []
    o, state, kept = got
    shifted = kept.roll(1, 0)
    lies = {
        "zero": (torch.zeros_like(o), state, kept),
        "swapped heads": (o.flip(2), state, kept),
        "dropped state": (
            run(backend, device, x, has_initial_state=torch.zeros(N, dtype=torch.bool))[0],
            state,
            kept,
        ),
        "dropped chunk": (torch.cat([o[:, :64] * 0, o[:, 64:]], 1), state, kept),
        "state not written": (o, x["state"], kept),
        "next checkpoint": (o, state, shifted),
        "no checkpoint": (o, state, x["checkpoints"]),
    }
    for name, lie in lies.items():
        assert find_errors(*lie, expected, x, 1e-5), name


@pytest.mark.parametrize("invariant", [False, True])
def test_slots(backend, device, poison, invariant):
    """Padding, separate write slots and new sequences on used slots agree, with NaN in all unread memory."""
    x = batch(slots=[-1, 5, 0, 1, SLOTS, 8])
    x |= {
        "has_initial_state": torch.tensor([True, True, True, False, True, True]),
        "out_state_index": torch.tensor([3, 4, 2, 1, 6, -1]),
    }
    for slot in (0, 1, 2, 3, 4, 5, 6, 7):
        x["state"][slot] = NAN
    starts = x["cu_seqlens"].tolist()
    for n in (0, 2, 4):
        for name in ("q", "k", "v", "g", "beta"):
            x[name][:, starts[n] : starts[n + 1]] = NAN
    o, state, _ = run(backend, device, x, null_slot=0, batch_invariant=invariant)
    clean = {name: v.nan_to_num() if v.is_floating_point() else v for name, v in x.items()}
    expected = reference.prefill(**clean, null_slot=0)
    assert error(o, expected.o) <= 1e-5
    touched = [1]
    assert error(state[touched], expected.state[touched]) <= 1e-5
    rest = [s for s in range(SLOTS) if s not in touched]
    assert same_bits(state[rest], x["state"][rest])
    assert same_bits(
        run(backend, device, x | {"update_state": False, "out_state_index": None})[1], x["state"]
    )


def test_neighbours_with_nan(backend, device):
    """NaN in one sequence, also in its state, reaches no other sequence."""
    x = batch()
    expected = run(backend, device, x)
    x["state"][SLOT[3]] = NAN
    x["q"][:, 75], x["k"][:, 72], x["v"][:, 80] = NAN, NAN, NAN
    o, state, _ = run(backend, device, x)
    starts = x["cu_seqlens"].tolist()
    for n in (0, 1, 2, 4, 5):
        rows = slice(starts[n], starts[n + 1])
        assert (
            error(o[:, rows], expected[0][:, rows]) <= 1e-6
            and error(state[SLOT[n]], expected[1][SLOT[n]]) <= 1e-6
        )


@pytest.mark.interpret
@pytest.mark.parametrize("step", [64, 128])
def test_checkpoints(backend, device, step):
    offsets = (0, 0, -1, 4, 38 if step == 64 else 39, 20)
    x = batch() | checkpoint_options(checkpoint_options=step, offsets=offsets)
    _, _, kept = agrees(backend, device, x, 1e-5)
    written = [row for row in range(40) if not kept[row].isnan().any()]
    assert written == ([0, 4, 20, 21, 38, 39] if step == 64 else [20, 39])
    # the final state of a sequence that ends on a checkpoint is that checkpoint
    aligned = batch([128, 192], [2, 5]) | checkpoint_options(checkpoint_options=64, offsets=(0, 10))
    _, state, kept = agrees(backend, device, aligned, 1e-5)
    assert same_bits(kept[1], state[2]) and same_bits(kept[12], state[5])


@pytest.mark.interpret
@pytest.mark.parametrize("HV", [1, pytest.param(264, marks=pytest.mark.gpu, id="one walk")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_are_not_rounded_to_the_tokens_dtype(backend, device, dtype, HV):
    """A checkpoint or snapshot has the numbers of a prefill that ends there."""
    sizes = {"H": 1, "HV": HV, "K": 128, "V": 16}
    x = batch([130], [0], tail=0, dtype=dtype, **sizes)
    x |= {"state": pool_of(3, HV=HV, K=128, V=16), "snapshot_pos": torch.tensor([64])}
    x |= {"checkpoints": torch.full((2, HV, 16, 128), NAN), "checkpoint_offsets": torch.tensor([0])}
    _, state, kept = run(backend, device, x | {"snapshot_index": torch.tensor([2])}, checkpoint_every=64)
    for i, end in enumerate((64, 128)):
        part = {name: x[name][:, :end] for name in ("q", "k", "v", "g", "beta")}
        part |= {"state": x["state"], "state_index": x["state_index"], "cu_seqlens": torch.tensor([0, end])}
        _, alone, _ = run(backend, device, part)
        assert error(kept[i], alone[0]) <= 1e-6
        assert error(kept[i].bfloat16(), alone[0]) > 1e-4, "the gate can fail"
    assert same_bits(state[2], kept[0])


@pytest.mark.parametrize("v_first", LAYOUTS)
@pytest.mark.parametrize("invariant", [False, True])
def test_snapshots(backend, device, v_first, invariant):
    positions = (
        [70, 0, 1, 64, 200, 129],
        [1, 0, 0, 63, 130, 128],
        [-1, 1, 2, 65, 64, 127],
        [63, -1, 5, 0, 191, 65],
    )
    for pos in positions:
        x = batch(slots=[1, 2, 3, 4, 5, 6], v_first=v_first)
        wide = pool_of(14, v_first=v_first)
        wide[1:7] = x["state"][1:7]
        x |= {
            "state": wide,
            "snapshot_pos": torch.tensor(pos),
            "snapshot_index": torch.tensor([8, 9, 10, 11, 12, 13]),
        }
        _, state, _ = agrees(backend, device, x, 1e-5, state_v_first=v_first, batch_invariant=invariant)
        for n, at in enumerate(pos):
            assert same_bits(state[8 + n], wide[8 + n]) == (not 0 <= at <= LENGTHS[n])
    x |= {"snapshot_index": torch.tensor([-1, 0, 99, 11, 12, 13])}
    assert same_bits(agrees(backend, device, x, 1e-5, state_v_first=v_first, null_slot=0)[1][0], wide[0])


def test_batch_invariance(backend, device):
    """A sequence has the bits that it has alone, whatever else is in the batch, in any order."""
    x = batch() | checkpoint_options() | {"snapshot_pos": torch.tensor([33, 0, 1, 5, 100, 65])}
    x["state"] = pool_of(2 * SLOTS)
    x["snapshot_index"] = torch.tensor(SLOT) + SLOTS
    o, state, kept = run(backend, device, x, batch_invariant=True)
    starts = x["cu_seqlens"].tolist()
    for n in range(N):
        rows = slice(starts[n], starts[n + 1])
        alone = x | {name: x[name][:, rows].clone() for name in ("q", "k", "v", "g", "beta")}
        for name in ("state_index", "checkpoint_offsets", "snapshot_pos", "snapshot_index"):
            alone[name] = x[name][n : n + 1]
        alone["cu_seqlens"] = torch.tensor([0, LENGTHS[n]])
        single = run(backend, device, alone, batch_invariant=True)
        assert same_bits(single[0], o[:, rows])
        assert all(same_bits(single[1][s], state[s]) for s in (SLOT[n], SLOT[n] + SLOTS))
        for i in range(LENGTHS[n] // 64):
            row = int(x["checkpoint_offsets"][n]) + i
            assert same_bits(single[2][row], kept[row])


@pytest.mark.parametrize("threads", [1, 2])
def test_reruns_give_the_same_bits(backend, device, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = batch() | checkpoint_options()
        first, second = run(backend, device, x), run(backend, device, x)
        assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
def test_a_captured_prefill_follows_its_indices():
    """A graph may be replayed with other slots, lengths, states, checkpoints and snapshots."""
    first, second = (moved(batch(dtype=torch.bfloat16) | checkpoint_options(), "cuda") for _ in range(2))
    for x, at in ((first, [70, 0, 1, 64, 130, -1]), (second, [1, 0, -1, 33, 64, 128])):
        x["state"] = torch.cat([x["state"], x["state"]])
        x |= {"snapshot_pos": torch.tensor(at, device="cuda"), "snapshot_index": x["state_index"] + SLOTS}
        x["has_initial_state"] = torch.tensor(at, device="cuda") > 0
    second["state_index"].copy_(torch.tensor([1, 0, 2, 5, -1, 4]))
    second["cu_seqlens"].copy_(torch.tensor([0, 3, 70, 70, 200, 300, 460]))
    held, out = moved(first, "cuda"), torch.empty_like(first["v"])
    api.prefill(**moved(first, "cuda"), out=out, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        api.prefill(**held, out=out, backend="triton")
    for name, v in second.items():
        if isinstance(v, torch.Tensor):
            held[name].copy_(v)
    graph.replay()
    expected = run("triton", "cuda", second)
    got = (out, held["state"], held["checkpoints"])
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def test_gates(backend, device):
    x = batch(raw=True)
    for negative in (False, True):
        agrees(backend, device, x, 1e-5, allow_neg_eigval=negative)
    agrees(backend, device, x | {"dt_bias": None}, 1e-5, scale=0.5, use_qk_l2norm_in_kernel=True)
    agrees(backend, device, batch() | {"g": None, "beta": None}, 1e-5)
    reset = batch()
    reset["g"][:, ::50] = -1e6
    agrees(backend, device, reset, 1e-5)


@pytest.mark.interpret
@pytest.mark.parametrize("H, HV, K, V", [(1, 1, 1, 1), (1, 3, 60, 100), (2, 2, 128, 32)])
def test_heads_and_sizes(backend, device, H, HV, K, V):
    x = batch([65, 3], [1, 0], H=H, HV=HV, K=K, V=V) | {"state": pool_of(3, HV=HV, K=K, V=V)}
    agrees(backend, device, x, 1e-5)


@pytest.mark.interpret
def test_prefill_then_decode_is_the_whole(backend, device):
    x, index = inputs(1, 80), torch.tensor([0])
    state = {"state": torch.zeros(1, 4, 24, 16), "state_index": index}
    whole, expected, _ = run(backend, device, x | state, cu_seqlens=torch.tensor([0, 80]))
    first = {k: v[:, :77] for k, v in x.items()}
    o, middle, _ = run(backend, device, first | state, cu_seqlens=torch.tensor([0, 77]))
    middle, rest = middle.to(device), moved({k: v[:, 77:] for k, v in x.items()}, device)
    rest = api.decode(**rest, state=middle, backend=backend).cpu()
    assert error(torch.cat([o, rest], 1), whole) <= 1e-5 and error(middle, expected) <= 1e-5


@pytest.mark.interpret
def test_strided_pool_and_views(backend, device, poison):
    x = moved(batch(), device)
    expected = run(backend, device, x)
    memory = torch.randn(SLOTS, 3, 4, 24, 16, device=device)
    pool = memory[:, 1]
    pool.copy_(x["state"])
    before = memory.clone()
    total = x["q"].shape[1]
    wide = torch.randn(1, total, 300, device=device)
    views = {"q": wide[..., 5:37].unflatten(2, (2, 16)), "v": wide[..., 100:196].unflatten(2, (4, 24))}
    for name, view in views.items():
        view.copy_(x[name])
    out = torch.full((total, 1, 4, 24), NAN, device=device).transpose(0, 1)
    api.prefill(**x | views | {"state": pool}, out=out, backend=backend)
    assert same_bits(out, expected[0]) and same_bits(pool, expected[1])
    before[:, 1] = pool
    assert same_bits(memory, before)


@pytest.mark.interpret
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_nothing_to_do(backend, device, lengths):
    for tail in (0, 2):
        x = batch(lengths, list(range(len(lengths))), tail=tail)
        o, state, _ = run(backend, device, x)
        assert not o.any() and same_bits(state, x["state"])


def test_compile(backend, device):
    step = torch.compile(
        lambda x: api.prefill(**x, checkpoint_every=64, backend=backend) + 1, fullgraph=True, dynamic=True,
        backend="aot_eager",
    )  # fmt: skip
    for lengths in ([70, 3], [5, 129]):
        x = moved(batch(lengths, [2, 4]) | checkpoint_options(offsets=(0, 4)), device)
        del x["checkpoint_every"]
        copies = {k: v.clone() for k, v in x.items()}
        expected = api.prefill(**copies, checkpoint_every=64, backend=backend) + 1
        assert same_bits(step(x), expected)
        assert same_bits(x["state"], copies["state"]) and same_bits(x["checkpoints"], copies["checkpoints"])


OPTIONAL = (
    "g", "beta", "a", "b", "A_log", "dt_bias", "scale", "lower_bound", "out_state_index",
    "has_initial_state", "checkpoints", "checkpoint_offsets", "snapshot_pos", "snapshot_index", "null_slot",
    "out", "backend", "column_scale", "remainder", "history_u", "history_k", "history_G", "cursor", "room",
)  # fmt: skip
DEFAULTS = {
    "use_qk_l2norm_in_kernel": True, "allow_neg_eigval": False, "state_v_first": True,
    "batch_invariant": False, "update_state": True, "checkpoint_every": 0,
}  # fmt: skip


def test_operator():
    for extra in ({}, checkpoint_options(offsets=(0, 4))):
        x = batch([70, 3], [2, 4]) | extra
        args = parse_prefill(**dict.fromkeys(OPTIONAL) | DEFAULTS | x).arguments()
        torch.library.opcheck(torch.ops.gdn.prefill.default, args)


KEPT = checkpoint_options(offsets=(0, 2))
REFUSALS = [
    (ValueError, "q: expected B=1", {name: v.expand(2, *v.shape[1:]) for name, v in inputs(1, 73).items()}),
    (TypeError, "cu_seqlens: expected a tensor", {"cu_seqlens": None}),
    (ValueError, "cu_seqlens: expected the last offset", {"cu_seqlens": torch.tensor([0, 70, 99])}),
    (ValueError, "cu_seqlens: expected non-decreasing", {"cu_seqlens": torch.tensor([0, 70, 60])}),
    (TypeError, "state_index: expected a tensor", {"state_index": None}),
    (ValueError, "state_index: expected shape", {"state_index": torch.tensor([1])}),
    (TypeError, "state_index: expected an int32", {"state_index": torch.tensor([1.0, 2.0])}),
    (
        ValueError,
        "out_state_index: expected None",
        {"out_state_index": torch.tensor([1, 2]), "update_state": False},
    ),
    (TypeError, "has_initial_state: expected a bool", {"has_initial_state": torch.tensor([1, 0])}),
    (ValueError, "has_initial_state: expected shape", {"has_initial_state": torch.tensor([True])}),
    (ValueError, "checkpoint_every: expected a positive", KEPT | {"checkpoint_every": 32}),
    (ValueError, "checkpoint_every: expected a positive", KEPT | {"checkpoint_every": 0}),
    (ValueError, "checkpoint_every: expected a positive", KEPT | {"checkpoint_every": -64}),
    (ValueError, "checkpoint_every: expected 0 without checkpoints", {"checkpoint_every": 64}),
    (TypeError, "checkpoint_offsets: expected a tensor", KEPT | {"checkpoint_offsets": None}),
    (ValueError, "checkpoint_offsets: expected shape", KEPT | {"checkpoint_offsets": torch.tensor([1])}),
    (ValueError, "checkpoints: expected dtype", KEPT | {"checkpoints": torch.zeros(4, 4, 24, 16).bfloat16()}),
    (ValueError, "checkpoints: expected shape", KEPT | {"checkpoints": torch.zeros(4, 4, 16, 24)}),
    (TypeError, "snapshot_index: expected a tensor", {"snapshot_pos": torch.tensor([1, 2])}),
    (ValueError, "state: expected shape .*, got .3, 2, 4, 24, 16.", {"state": torch.zeros(3, 2, 4, 24, 16)}),
    (ValueError, "null_slot: expected None or 0", {"null_slot": 1}),
    (ValueError, "out: expected shape", {"out": torch.zeros(1, 73, 4, 16)}),
    (TypeError, "batch_invariant: expected a bool", {"batch_invariant": None}),
    (ValueError, "g: expected None with the raw", {"a": torch.zeros(1, 73, 4)}),
    (NotImplementedError, "hopper:", {"backend": "hopper"}),
    (TypeError, "unexpected keyword", {"initial_state": None}),
]


@pytest.mark.parametrize("kind, message, change", REFUSALS)
def test_refusals_touch_nothing(kind, message, change):
    x = batch([70, 3], [2, 4], tail=0) | {"out": torch.ones(1, 73, 4, 24)} | change
    before = {k: v.clone() for k, v in x.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(kind, match=message):
        api.prefill(**x)
    assert all(torch.equal(before[k].nan_to_num(), x[k].nan_to_num()) for k in before)


@pytest.mark.parametrize("name", ["q", "beta", "state"])
def test_no_gradient(name):
    x = batch([3, 2], [0, 1])
    x[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name}: expected a tensor without gradient"):
        api.prefill(**x)
