"""Test replay, which verifies drafts on a state that is only read, against the reference and plain decode."""

import doctest
import importlib
import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from kit import api
from kit.api import reference
from kit.serving import TOLERANCE, error, inputs, moved, pool_of, same_bits

import gdn
import gdn.ops.replay
from gdn.problem.replay import parse_keep, parse_replay

NAN = float("nan")
B, T, SLOTS, PLACES = 5, 3, 9, 8
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LAYOUTS = [True, False]
WRITTEN = ("history_u", "history_k", "history_G")


def history(slots=SLOTS, places=PLACES, H=2, HV=4, K=16, V=24, dtype=F32, G=F64, lead=()):
    """Return histories that hold other tokens, with cursors at many places."""
    decays = -torch.rand(*lead, slots, places, HV, dtype=F64) / 8
    return {
        "history_u": torch.randn(*lead, slots, places, HV, V).to(dtype) / 4,
        "history_k": torch.randn(*lead, slots, places, H, K).to(dtype) / 4,
        "history_G": decays.cumsum(-2).to(G),
        "cursor": torch.arange(slots) % (places - 2),
    }


def call(
    rows=B, tokens=T, dtype=F32, pool=F32, kept=F32, index=torch.int64, v_first=True, raw=False, **sizes
):
    x = inputs(rows, tokens, dtype=dtype, raw=raw, **sizes)
    x |= history(dtype=kept, **sizes)
    x["cursor"] = x["cursor"].to(index)
    where = {name: n for name, n in sizes.items() if name != "H"}
    return x | {
        "state": pool_of(SLOTS, dtype=pool, v_first=v_first, **where),
        "read_index": torch.tensor([7, 2, -1, 4, SLOTS][:rows], dtype=index),
    }


def run(backend, device, x, **options):
    """Run a call on copies on a device, with a poisoned output; return all that it wrote, on the CPU."""
    x = moved(x, device)
    before = x["state"].clone(), x["cursor"].clone()
    out = torch.full_like(x["v"], NAN)
    assert api.replay_decode(**x, out=out, backend=backend, **options) is out
    assert same_bits(x["state"], before[0]) and torch.equal(x["cursor"], before[1]), "only read"
    return out.cpu(), *(x[name].cpu() for name in WRITTEN)


def find_errors(got, expected, x, tolerance, G_tolerance=1e-12):
    """Return everything that is wrong with what a call wrote; unwritten places must keep their bits."""
    found = [] if error(got[0], expected.o) <= tolerance else [f"o is off by {error(got[0], expected.o):.1e}"]
    limits = (tolerance, tolerance, G_tolerance)
    exact = (expected.u, expected.k, expected.G)
    for name, y, z, limit in zip(WRITTEN, got[1:], exact, limits, strict=True):
        is_new = (z != x[name]).flatten(2).any(2)
        if not same_bits(y[~is_new], x[name][~is_new]):
            found.append(f"{name} was touched")
        if not error(y[is_new], z[is_new]) <= limit:
            found.append(f"{name} is off by {error(y[is_new], z[is_new]):.1e}")
    return found


def agrees(backend, device, x, tolerance, G_tolerance=1e-12, **options):
    expected = reference.replay_decode(**x, **{k: v for k, v in options.items() if k != "max_seqlen"})
    got = run(backend, device, x, **options)
    assert find_errors(got, expected, x, tolerance, G_tolerance) == []
    return got


# dtype of the tokens, of the pool, of the history, and of the index tensors
KINDS = {
    "fp32": (F32, F32, F32, torch.int64),
    "bf16": (BF16, F32, BF16, torch.int32),
    "bf16 pool": (BF16, BF16, F32, torch.int32),
    "fp16": (F16, F16, F16, torch.int64),
    "fp32 on bf16": (F32, BF16, BF16, torch.int64),
    "fp64": (F64, F64, F64, torch.int32),
}


FEW = {("fp32", True), ("bf16", False), ("fp32 on bf16", True)}  # the kinds that are interpreted


@pytest.mark.parametrize(
    "kind, v_first",
    [
        pytest.param(*case, marks=[pytest.mark.interpret] if case in FEW else [])
        for case in itertools.product(KINDS, LAYOUTS)
    ],
)
def test_replay(backend, device, poison, kind, v_first):
    dtype, pool, kept, index = KINDS[kind]
    if dtype == F64 and backend != "eager":
        pytest.skip("float64 is for eager alone")
    x = call(dtype=dtype, pool=pool, kept=kept, index=index, v_first=v_first, raw=dtype != F32)
    tolerance = max(TOLERANCE[d] for d in (dtype, kept))
    G_tolerance = 1e-12 if backend == "eager" else 1e-6
    o, *_ = agrees(backend, device, x, tolerance, G_tolerance, state_v_first=v_first)
    assert not o[2].any() and not o[4].any()


def test_the_gate_can_fail(backend, device):
    x = call()
    got, expected = run(backend, device, x), reference.replay_decode(**x)
    assert find_errors(got, expected, x, 1e-5, 1e-6) == []
    o, u, k, G = got
    lies = {
        "zero": (torch.zeros_like(o), u, k, G),
        "swapped heads": (o.flip(2), u, k, G),
        "unwritten": (torch.full_like(o, NAN), u, k, G),
        "no history": (run(backend, device, x | {"cursor": 0 * x["cursor"]})[0], u, k, G),
        "dropped state": (run(backend, device, x | {"state": 0 * x["state"]})[0], u, k, G),
        "nothing kept": (o, x["history_u"], k, G),
        "normalised keys": (o, u, k * 1.1, G),
        "sums that start anew": (o, u, k, G + 0.1),
    }
    for name, lie in lies.items():
        assert find_errors(lie, expected, x, 1e-5, 1e-6), name


@pytest.mark.interpret
@pytest.mark.parametrize(
    "H, HV, K, V, tokens",
    [(1, 1, 1, 1, 1), (1, 3, 60, 100, 5), (1, 2, 128, 64, 8), (1, 2, 64, 32, 2), (1, 1, 200, 33, 4)],
)
def test_heads_and_sizes(backend, device, H, HV, K, V, tokens):
    sizes = {"H": H, "HV": HV, "K": K, "V": V}
    agrees(backend, device, call(2, tokens, **sizes), 1e-5, 1e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("absent", [("g",), ("beta",), ("g", "beta")])
def test_options(backend, device, absent):
    x = call() | dict.fromkeys(absent)
    x["k"] /= 4
    agrees(backend, device, x, 1e-5, 1e-6, scale=0.3, use_qk_l2norm_in_kernel=False)
    x = call(raw=True) | {"dt_bias": None}
    agrees(backend, device, x, 1e-5, 1e-6, allow_neg_eigval=True)


@pytest.mark.interpret
@pytest.mark.parametrize("keys", ["random", "identical"])
def test_sixteen_tokens_on_a_long_history(backend, device, keys):
    """A history longer than a block agrees, with keys that make the triangular system ill-conditioned."""
    x = inputs(2, 16)
    if keys == "identical":
        x["k"][:] = x["k"][:, :1]
        x["beta"][:], x["g"][:] = 1, 0
    x |= history(2, 50) | {"state": pool_of(2)}
    x["cursor"] = torch.tensor([34, 17])
    agrees(backend, device, x, 1e-5 if keys == "random" else 3e-4, 1e-6)


@pytest.mark.interpret
def test_reset_in_a_packet_and_in_a_history(backend, device):
    """g = -1e6 and g = -inf forget all earlier tokens and change no later one."""
    x = call()
    x["g"][:, 1] = -1e6
    x["g"][0, 2] = -torch.inf
    _, u, k, G = agrees(backend, device, x, 1e-5, 1e-6)
    later = call() | {"history_u": u, "history_k": k, "history_G": G, "state": x["state"]}
    later["cursor"] = (x["cursor"] + T).clamp(max=PLACES)
    agrees(backend, device, later, 1e-5, 1e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nan_in_what_is_not_read_reaches_nothing(backend, device, dtype):
    """NaN in other slots, in places past the cursor and in rows without a slot reaches no result."""
    x = call(dtype=dtype, pool=dtype, kept=dtype)
    clean, dirty = run(backend, device, x), {name: v.clone() for name, v in x.items()}
    live = [7, 2, 4]
    dirty["state"][[s for s in range(SLOTS) if s not in live]] = NAN
    for name in WRITTEN:
        dirty[name][torch.arange(PLACES) >= x["cursor"][:, None]] = NAN
        dirty[name][[s for s in range(SLOTS) if s not in live]] = NAN
    for name in ("q", "k", "v", "g", "beta"):
        dirty[name][[2, 4]] = NAN
    o, *kept = run(backend, device, dirty)
    assert same_bits(o, clean[0]) and not o[2].any()
    for slot in live:
        end = int(x["cursor"][slot]) + T
        assert all(same_bits(a[slot, :end], b[slot, :end]) for a, b in zip(kept, clean[1:], strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("places, dtype, K, V", [(20, F32, 32, 100), (70, F32, 32, 100), (20, BF16, 64, 96)])
def test_programs_of_many_strips(triton_device, monkeypatch, places, dtype, K, V):
    """Replay agrees in the tiles that are chosen when rows and heads fill a GPU."""
    monkeypatch.setattr(importlib.import_module("gdn.backends.triton.serving.packet"), "FILLED", 0)
    sizes = {"HV": 4, "K": K, "V": V, "dtype": dtype}
    x = inputs(2, 5, H=2, **sizes) | history(2, places, H=2, **sizes) | {"state": pool_of(2, **sizes)}
    x["cursor"] = torch.tensor([places - 5, 3])
    agrees("triton", triton_device, x, TOLERANCE[dtype], 1e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("tokens, dtype", [(4, F32), (4, BF16), (12, BF16)])
def test_a_history_of_any_length(backend, device, tokens, dtype):
    """A history may have more places than a program holds in registers."""
    x = inputs(2, tokens, dtype=dtype) | history(2, 100, dtype=dtype)
    x |= {"state": pool_of(2, dtype=dtype), "cursor": torch.tensor([88, 17])}
    agrees(backend, device, x, TOLERANCE[dtype], 1e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("l2norm, tokens, dtype", [(True, T, F32), (False, T, F32), (True, 11, BF16)])
def test_nan_in_one_query_stays_there(backend, device, l2norm, tokens, dtype):
    x = call(tokens=tokens, dtype=dtype, pool=dtype, kept=dtype) | history(SLOTS, 20, dtype=dtype)
    clean, dirty = run(backend, device, x, use_qk_l2norm_in_kernel=l2norm), x | {"q": x["q"].clone()}
    dirty["q"][0, 1] = NAN
    o, *kept = run(backend, device, dirty, use_qk_l2norm_in_kernel=l2norm)
    assert bool(o[0, 1].isnan().all()) and all(same_bits(a, b) for a, b in zip(kept, clean[1:], strict=True))
    o[0, 1] = clean[0][0, 1]
    assert same_bits(o, clean[0])


@pytest.mark.interpret
def test_cursors_out_of_range_are_clamped(backend, device):
    """A cursor out of range is clamped: no place out of range is read or written, and results are right."""
    x = call()
    x["cursor"][[7, 2, 4]] = torch.tensor([PLACES - 1, -5, 99])
    agrees(backend, device, x, 1e-5, 1e-6)


@pytest.mark.interpret
def test_packed_rows(backend, device, poison):
    """Rows of 0 to 3 tokens agree, and so do tokens past the last row."""
    x = call(raw=True) | inputs(1, 9, raw=True)
    x["cu_seqlens"] = torch.tensor([0, 2, 2, 3, 6, 7], dtype=torch.int32)
    x["read_index"] = torch.tensor([7, 2, 0, 4, -1])
    o, *kept = agrees(backend, device, x, 1e-5, 1e-6, max_seqlen=3, null_slot=0)
    assert not o[0, 6:].any() and not o[0, 2].any()
    alone = x | {name: x[name][:, 3:6] for name in ("q", "k", "v", "a", "b")} | {"cu_seqlens": None}
    single = run(backend, device, alone | {"read_index": torch.tensor([4])})
    assert error(single[0], o[:, 3:6]) <= 1e-6 and error(single[1][4], kept[0][4]) <= 1e-6


def test_a_row_does_not_depend_on_the_batch(backend, device):
    for dtype in (F32, BF16):
        x = call(dtype=dtype) | inputs(SLOTS, T, dtype=dtype) | {"read_index": torch.arange(SLOTS)}
        expected = run(backend, device, x)
        for batch in ([3], [4, 3, 1, 0], [8, 7]):
            few = x | {name: x[name][batch] for name in ("q", "k", "v", "g", "beta", "read_index")}
            got = run(backend, device, few)
            assert same_bits(got[0], expected[0][batch])
            assert all(same_bits(a[batch], b[batch]) for a, b in zip(got[1:], expected[1:], strict=True))


@pytest.mark.interpret
def test_strides_are_free(backend, device):
    """A page may hold state and history, heads may precede places, tokens may be views."""
    x = moved(call(dtype=BF16, kept=BF16), device)
    expected = run(backend, device, x)
    page = torch.randn(SLOTS, 20_000, device=device)
    state = page[:, 40 : 40 + 4 * 24 * 16].unflatten(1, (4, 24, 16)).copy_(x["state"])
    kept = torch.randn(SLOTS, 6, PLACES, 40, dtype=BF16, device=device)
    views = {"state": state, "history_k": kept[:, :2, :, :16].transpose(1, 2)}
    views["history_u"] = kept[:, 2:, :, 8:32].transpose(1, 2)
    views["history_G"] = torch.zeros(SLOTS, 4, PLACES + 1, dtype=F64, device=device)[..., 1:].transpose(1, 2)
    for name in WRITTEN:
        views[name].copy_(x[name])
    rows = torch.randn(B, T, 500, dtype=BF16, device=device)
    for name, start, heads in (("q", 3, 2), ("k", 40, 2), ("v", 100, 4)):
        views[name] = rows[..., start : start + heads * x[name].shape[3]].unflatten(2, (heads, -1))
        views[name].copy_(x[name])
    out = torch.full((T, B, 4, 24), NAN, dtype=BF16, device=device).transpose(0, 1)
    api.replay_decode(**x | views, out=out, backend=backend)
    assert error(out, expected[0]) <= 1e-6
    assert all(error(views[name], y) <= 1e-6 for name, y in zip(WRITTEN, expected[1:], strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_nothing_to_do(backend, device, shape):
    x = inputs(*shape) | history() | {"state": pool_of(SLOTS)}
    o, *kept = run(backend, device, x)
    assert o.shape == x["v"].shape
    assert all(same_bits(y, x[name]) for name, y in zip(WRITTEN, kept, strict=True))


def run_commit(backend, device, x, **options):
    """Run a commit on copies; return the state and the cursor. Histories are only read."""
    x = moved(x, device)
    before = [x[name].clone() for name in WRITTEN]
    api.replay_commit(**x, backend=backend, **options)
    assert all(same_bits(x[name], y) for name, y in zip(WRITTEN, before, strict=True))
    return x["state"].cpu(), x["cursor"].cpu()


def entries(layers=3, pool=F32, kept=F32, index=torch.int64, v_first=True, **sizes):
    """Return slots that fold and slots that do not, counts and cursors out of range, and padding."""
    x = history(lead=(layers,), dtype=kept, **sizes)
    x["cursor"] = torch.tensor([2, 0, 4, 3, 5, 6, -4, 99, 0], dtype=index)
    where = {name: n for name, n in sizes.items() if name != "H"}
    return x | {
        "state": pool_of(layers, SLOTS, dtype=pool, v_first=v_first, **where),
        "index": torch.tensor([0, 2, 3, -1, 4, 5, SLOTS, 6, 7, 8], dtype=index),
        "accepted": torch.tensor([1, 2, 1, 3, -7, 2, 1, 3, 1, 99], dtype=index),
    }


@pytest.mark.parametrize(
    "kind, v_first",
    [
        pytest.param(*case, marks=[pytest.mark.interpret] if case in FEW else [])
        for case in itertools.product(("fp32", "bf16", "bf16 pool", "fp64"), LAYOUTS)
    ],
)
def test_commit(backend, device, kind, v_first):
    _, pool, kept, index = KINDS[kind]
    if pool == F64 and backend != "eager":
        pytest.skip("float64 is for eager alone")
    x = entries(pool=pool, kept=kept, index=index, v_first=v_first)
    expected, moved_to = reference.replay_commit(**x, room=3, state_v_first=v_first)
    state, cursor = run_commit(backend, device, x, room=3, state_v_first=v_first)
    assert torch.equal(cursor, moved_to) and cursor.tolist() == [3, 0, 0, 4, 5, 0, 3, 0, 3]
    for slot in range(SLOTS):
        if slot in (2, 5, 7):
            assert error(state[:, slot], expected[:, slot]) <= TOLERANCE[pool]
            assert error(x["state"][:, slot], expected[:, slot]) > 10 * TOLERANCE[pool], "the gate can fail"
        else:
            assert same_bits(state[:, slot], x["state"][:, slot])
    assert torch.equal(
        run_commit(backend, device, x, room=3, update_cursor=False, state_v_first=v_first)[1], x["cursor"]
    )


@pytest.mark.interpret
@pytest.mark.parametrize("H, HV, K, V", [(1, 1, 1, 1), (1, 3, 60, 100), (1, 2, 128, 64), (1, 1, 200, 33)])
def test_commit_of_heads_and_sizes(backend, device, H, HV, K, V):
    """room = places folds any history, and an empty history leaves the bits of the state."""
    x = entries(1, H=H, HV=HV, K=K, V=V)
    expected, _ = reference.replay_commit(**x, room=PLACES)
    state, cursor = run_commit(backend, device, x, room=PLACES)
    assert error(state, expected) <= 1e-5 and not cursor[x["index"].clamp(0, SLOTS - 1)].any()
    x["cursor"][:], x["accepted"][:] = 0, 0
    assert same_bits(run_commit(backend, device, x, room=PLACES)[0], x["state"])


@pytest.mark.interpret
def test_commit_in_programs_of_many_strips(triton_device, monkeypatch):
    """The fold agrees in the tiles that are chosen when rows and heads fill a GPU."""
    monkeypatch.setattr(importlib.import_module("gdn.backends.triton.serving.packet"), "FILLED", 0)
    test_commit_of_heads_and_sizes("triton", triton_device, 1, 3, 60, 100)


@pytest.mark.interpret
def test_commit_of_nan_and_null(backend, device):
    """Slot 0 is padding, and nothing past the accepted tokens is read."""
    x = entries()
    x["index"][:2] = torch.tensor([0, 2])
    clean = run_commit(backend, device, x, room=3, null_slot=0)
    assert int(clean[1][0]) == 2
    for name in WRITTEN:
        x[name][:, 2, 6:], x[name][:, 5, 8:], x[name][:, 0] = NAN, NAN, NAN
    assert same_bits(run_commit(backend, device, x, room=3, null_slot=0)[0], clean[0])


def run_packets(backend, device, steps, room, places, B=2, rounded=F32, tolerance=1e-5):
    """Verify packets and accept some tokens of each; decode the accepted tokens plainly.

    The outputs of every packet must agree, and the state at the end, since a call leaves no other result.
    """
    HV, K, V = 4, 16, 24
    state = pool_of(B)
    plain = state.clone().to(device)
    pool = state[None].to(device)
    x = history(B, places, dtype=rounded, lead=(1,))
    x = {name: torch.full_like(v, NAN) if v.is_floating_point() else 0 * v for name, v in x.items()}
    x = moved(x, device)
    single = {name: v[0] if v.dim() > 1 else v for name, v in x.items()}
    slots = torch.arange(B, device=device)
    for tokens, accepted in steps:
        packet = moved(inputs(B, tokens, HV=HV, K=K, V=V), device)
        o = api.replay_decode(**packet, state=pool[0], **single, backend=backend)
        for n in range(B):
            row = {name: v[n : n + 1] for name, v in packet.items()}
            whole = api.decode(**row, state=plain, read_index=slots[n : n + 1], write="none", backend=backend)
            assert error(o[n : n + 1], whole) <= tolerance
            row = {name: v[:, : accepted[n]] for name, v in row.items()}
            api.decode(**row, state=plain, read_index=slots[n : n + 1], backend=backend)
        counts = torch.tensor(accepted[:B], device=device)
        api.replay_commit(pool, **x, index=slots, accepted=counts, room=room, backend=backend)
        assert bool(((x["cursor"] >= 0) & (x["cursor"] <= places - room)).all())
    api.replay_commit(pool, **x, index=slots, accepted=0 * slots, room=places, backend=backend)
    assert error(pool[0], plain) <= tolerance and not x["cursor"].any()


@pytest.mark.interpret
def test_replay_then_commit_is_decode_of_the_accepted(backend, device):
    run_packets(backend, device, [(3, (3, 0)), (3, (1, 2)), (1, (1, 1))], 3, 6)


def test_any_packets(backend, device):
    """Any packets, accepted counts and room in a history give the states of plain decode."""
    packet = st.integers(1, 5).flatmap(lambda t: st.tuples(st.just(t), st.tuples(*[st.integers(0, t)] * 2)))

    @hypothesis.settings(max_examples=60 if backend == "eager" else 15)
    @hypothesis.given(st.lists(packet, min_size=1, max_size=7), st.integers(0, 9))
    def check(steps, more):
        torch.manual_seed(len(steps))
        run_packets(backend, device, steps, 5, 5 + more)

    check()


def test_a_narrow_history_stays_within_its_limit(backend, device):
    """The errors of bf16 histories do not add up over 12 packets and several folds."""
    run_packets(backend, device, [(4, (4, i % 5)) for i in range(12)], 4, 16, rounded=BF16, tolerance=5e-3)


@pytest.mark.interpret
def test_a_cached_call(backend, device):
    """A second call with other addresses skips the checks and changes nothing else."""
    first, second = call(), call()
    expected = reference.replay_decode(**second)
    run(backend, device, first)
    assert find_errors(run(backend, device, second), expected, second, 1e-5, 1e-6) == []
    other = second | {"cursor": second["cursor"].int()}
    assert (
        find_errors(
            run(backend, device, other, scale=0.5),
            reference.replay_decode(**other, scale=0.5),
            other,
            1e-5,
            1e-6,
        )
        == []
    )


def test_layers_apart(backend, device):
    """Calls layer by layer, of which the last moves the cursors, equal one call for all layers."""
    x = moved(entries(), device)
    expected = run_commit(backend, device, x, room=3)
    for layer in range(3):
        parts = {name: x[name][layer : layer + 1] for name in (*WRITTEN, "state")}
        api.replay_commit(**x | parts, room=3, update_cursor=layer == 2, backend=backend)
    assert same_bits(x["state"], expected[0]) and torch.equal(x["cursor"].cpu(), expected[1])


@pytest.mark.gpu
def test_a_step_in_a_cuda_graph():
    """Verification and commit, captured once, may be replayed with other slots, cursors and counts."""
    x, other = (moved(call(), "cuda") for _ in range(2))
    accepted = torch.tensor([1, 2, 0, 3, 1], device="cuda")

    def step(x, accepted):
        layers = {name: x[name][None] for name in (*WRITTEN, "state")}
        o = api.replay_decode(**x, backend="triton")
        api.replay_commit(
            **layers, cursor=x["cursor"], index=x["read_index"], accepted=accepted, room=T, backend="triton"
        )
        return o

    step(moved(x, "cuda"), accepted)
    graph, held = torch.cuda.CUDAGraph(), moved(x, "cuda")
    with torch.cuda.graph(graph):
        o = step(held, accepted)
    for name, v in other.items():
        held[name].copy_(v)
    held["read_index"].copy_(torch.tensor([1, 8, 3, -1, 0]))
    held["cursor"].add_(1)
    expected = moved(held, "cuda")
    graph.replay()
    assert same_bits(step(expected, accepted), o)
    assert all(same_bits(expected[name], held[name]) for name in (*WRITTEN, "state"))
    assert torch.equal(expected["cursor"], held["cursor"])


def test_compile_and_operators(backend, device):
    x = moved(call(raw=True), device)
    copies = {name: v.clone() for name, v in x.items()}
    expected = api.replay_decode(**copies, backend=backend) * 2
    step = torch.compile(
        lambda x: api.replay_decode(**x, backend=backend) * 2, fullgraph=True, backend="aot_eager"
    )
    assert same_bits(step(x), expected)
    assert all(same_bits(x[name], copies[name]) for name in WRITTEN)
    kept = moved(entries(), device)
    expected = run_commit(backend, device, kept, room=3)
    torch.compile(
        lambda x: api.replay_commit(**x, room=3, backend=backend), fullgraph=True, backend="aot_eager"
    )(kept)
    assert same_bits(kept["state"], expected[0]) and torch.equal(kept["cursor"].cpu(), expected[1])


def test_operators_match_their_schemas():
    """The schemas name exactly the tensors that are written, and the fakes match the outputs."""
    absent = dict.fromkeys(
        ("g", "beta", "a", "b", "A_log", "dt_bias", "scale", "lower_bound", "cu_seqlens", "max_seqlen",
         "null_slot", "out", "backend")
    )  # fmt: skip
    flags = {"use_qk_l2norm_in_kernel": True, "allow_neg_eigval": False, "state_v_first": True}
    problem = parse_replay(**absent | flags | call() | {"out": torch.empty(B, T, 4, 24)})
    torch.library.opcheck(torch.ops.gdn.replay_decode.default, problem.arguments())
    problem = parse_keep(
        **entries(), room=3, update_cursor=True, state_v_first=True, null_slot=None, backend=None
    )
    torch.library.opcheck(torch.ops.gdn.replay_commit.default, problem.arguments())


SMALL = {name: v[:, :2] for name, v in history().items() if name != "cursor"}
DECODE = [
    (TypeError, "history_u: expected a tensor", {"history_u": None}),
    (TypeError, "cursor: expected an int32", {"cursor": torch.zeros(SLOTS)}),
    (ValueError, "cursor: expected shape .slots=9", {"cursor": torch.zeros(B, dtype=torch.int32)}),
    (ValueError, "history_u: expected shape", {"history_u": torch.zeros(SLOTS, PLACES, 4, 16)}),
    (ValueError, "history_k: expected shape", {"history_k": torch.zeros(SLOTS, PLACES, 4, 16)}),
    (ValueError, "history_k: expected at most float32", {"history_k": history(dtype=F64)["history_k"]}),
    (ValueError, "history_G: expected shape", {"history_G": torch.zeros(SLOTS, PLACES - 1, 4, dtype=F64)}),
    (ValueError, "history_G: expected dtype", {"history_G": torch.zeros(SLOTS, PLACES, 4).half()}),
    (ValueError, "history_G: expected room for 3", SMALL),
    (
        ValueError,
        "history_u: expected a contiguous last axis",
        {"history_u": torch.zeros(SLOTS, PLACES, 24, 4).mT},
    ),
    (
        ValueError,
        "history_G: expected memory of its own",
        {"history_G": torch.zeros(1, PLACES, 4, dtype=F64).expand(SLOTS, PLACES, 4)},
    ),
    (ValueError, "read_index: expected shape", {"read_index": torch.zeros(B, 1, dtype=torch.int32)}),
    (
        ValueError,
        "state: expected shape .*, got .*, 2, 4, 24, 16.",
        {"state": torch.zeros(SLOTS, 2, 4, 24, 16)},
    ),
    (ValueError, "g: expected None with the raw", {"a": torch.zeros(B, T, 4)}),
    (ValueError, "null_slot: expected None or 0", {"null_slot": 2}),
    (ValueError, "out: expected dtype", {"out": torch.zeros(B, T, 4, 24).half()}),
    (TypeError, "unexpected keyword", {"write": "final"}),
    (NotImplementedError, "hopper:", {"backend": "hopper"}),
    (ValueError, "state: expected a tensor without gradient", {"state": pool_of(SLOTS).requires_grad_()}),
]
COMMIT = [
    (ValueError, "state: expected shape .layers", {"state": pool_of(SLOTS)}),
    (ValueError, "history_u: expected shape", {"history_u": history()["history_u"]}),
    (ValueError, "history_k: expected H to divide", {"history_k": torch.zeros(3, SLOTS, PLACES, 3, 16)}),
    (ValueError, "accepted: expected shape", {"accepted": torch.zeros(3, dtype=torch.int32)}),
    (TypeError, "index: expected an int32", {"index": torch.zeros(10)}),
    (TypeError, "room: expected an int", {"room": 3.0}),
    (ValueError, "room: expected 1 to 8", {"room": 9}),
    (ValueError, "room: expected 1 to 8", {"room": 0}),
    (TypeError, "update_cursor: expected a bool", {"update_cursor": 1}),
    (ValueError, "null_slot: expected None or 0", {"null_slot": -1}),
    (NotImplementedError, "hopper:", {"backend": "hopper"}),
    (TypeError, "unexpected keyword", {"step": None}),
]


@pytest.mark.parametrize(
    "function, kind, message, change",
    [(api.replay_decode, *case) for case in DECODE] + [(api.replay_commit, *case) for case in COMMIT],
)
def test_refusals_touch_nothing(function, kind, message, change):
    x = (
        call() | {"out": torch.ones(B, T, 4, 24)}
        if function is api.replay_decode
        else entries() | {"room": 3}
    )
    # a valid call before does not hide the error of the next one
    function(**moved(x, "cpu"))
    x |= change
    before = {k: v.detach().clone() for k, v in x.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(kind, match=message):
        function(**x)
    assert all(torch.equal(before[k], x[k]) for k in before)


def test_examples_run():
    assert doctest.testmod(gdn.ops.replay).failed == 0
