"""Test what a serving engine relies on, by protocol and backend: sizes, padding, counts, bits."""

import itertools

import pytest
import torch
from kit import api
from kit.serving import NAMES, B, R, T, error, inputs, moved, pool_of, protocols, same_bits, step_of

import gdn

NAN = float("nan")
BF16, F32 = torch.bfloat16, torch.float32
INTS = [torch.int32, torch.int64]


def run(backend, device, x, **options):
    """Run a decode on copies on a device, with a poisoned output; return all that it wrote."""
    x = moved(x, device)
    out = torch.full_like(x["v"], NAN)
    api.decode(**x, out=out, backend=backend, **options)
    kept = x.get("intermediate")
    return out.cpu(), x["state"].cpu(), None if kept is None else kept.cpu()


def spread(x, pitch, offset):
    """Return a copy of a tensor whose first axis has a stride of `pitch` elements, at an odd offset."""
    memory = torch.full((x.shape[0], pitch), NAN, dtype=x.dtype)
    part = memory[:, offset : offset + x[0].numel()]
    part.copy_(x.reshape(x.shape[0], -1))
    return part.unflatten(1, x.shape[1:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, T), (B, 0)])
def test_no_rows_and_no_tokens(backend, device, name, shape):
    x = inputs(*shape) | protocols()[name]
    if shape[0] == 0:
        per_row = ("read_index", "num_accepted", "ring_pos", "write_index", "intermediate_row", "parent")
        x |= {key: x[key][:0] for key in per_row if key in x}
    o, state, kept = run(backend, device, x)
    assert o.shape == x["v"].shape and same_bits(state, x["state"])
    assert kept is None or same_bits(kept, x["intermediate"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", INTS, ids=str)
def test_counts_and_indices_of_any_value(backend, device, name, index):
    """The largest and smallest integers cause no read or write out of bounds.

    A row without a slot to read outputs zeros; a row without a slot to write does not change the pool.
    """
    ends = torch.iinfo(index)
    x = inputs(B, T) | protocols(index)[name]
    for key, wild in itertools.product(
        ("read_index", "num_accepted", "ring_pos", "write_index", "intermediate_row", "parent"),
        (ends.min, ends.max, -1, 10**6),
    ):
        if key in x:
            values = x[key].clone()
            values.view(-1)[:: 2 if key == "parent" else 1] = wild
            o, state, kept = run(backend, device, x | {key: values})
            assert o.isfinite().all() and state.isfinite().all(), key
            if key in ("read_index", "write_index"):
                assert same_bits(state, x["state"]), key
            if key == "read_index":
                assert not o.any()
            if key == "intermediate_row":
                assert same_bits(kept, x["intermediate"])


def test_a_ring_position_may_be_any_number(backend, device):
    """Negative positions count from the end of the ring, as the remainder does."""
    for position in (-R - 2, 10**6 + 3):
        x = inputs(1, R) | {"state": pool_of(1, R)}
        at = {"ring_pos": torch.tensor([position]), "write": "all"}
        want = run(backend, device, x | at | {"ring_pos": torch.tensor([position % R])})
        assert all(same_bits(a, b) for a, b in zip(run(backend, device, x | at)[:2], want[:2], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_any_pitch(backend, device, name):
    """Pools inside pages, with odd strides and odd offsets, give the bits of dense ones."""
    x = inputs(B, T, dtype=BF16) | protocols()[name]
    want = run(backend, device, x)
    wide = {key: spread(x[key], 9_001, 3) for key in ("state", "intermediate") if key in x}
    wide |= {key: spread(x[key], 311, 5) for key in ("q", "k", "v")}
    got = run(backend, device, x | wide)
    assert all(a is None or same_bits(a, b) for a, b in zip(got, want, strict=True))


def single_steps(backend, device, x, states, round_state):
    """Return the outputs, and the state after each token, of rows that are decoded one token at a time."""
    x, pool = moved(x, device), states.to(device)
    o, after = [], []
    for t in range(x["q"].shape[1]):
        token = {key: v[:, t : t + 1] for key, v in x.items()}
        o.append(api.decode(**token, state=pool, round_state=round_state, backend=backend).cpu())
        after.append(pool.cpu().clone())
    return torch.cat(o, 1), torch.stack(after, 1)


@pytest.mark.parametrize(
    "name, pool",
    [
        pytest.param(*case, marks=[pytest.mark.interpret] if case in {("P1", BF16), ("P2", F32)} else [])
        for case in itertools.product(("P1", "P2", "P3", "P4", "P6"), (F32, BF16))
    ],
)
def test_a_packet_equals_single_steps(backend, device, name, pool):
    """Under every protocol a packet has the outputs of single steps, and the states that it stores."""
    x, state = inputs(2, T), pool_of(8, dtype=pool)
    ring, kept, rows = pool_of(2, R, dtype=pool), pool_of(2, T, dtype=pool), torch.tensor([5, 2])
    table = torch.tensor([[5, 1, 3], [2, 4, 6]])
    options = {"round_state": pool != F32}
    how = {
        "P1": {"state": ring, "ring_pos": torch.tensor([2, 0]), "write": "all"},
        "P2": {"state": state, "read_index": table, "write_index": table, "write": "all"},
        "P3": {"state": state, "read_index": rows, "intermediate": kept, "write": "none"},
        "P4": {
            "state": state, "read_index": rows, "intermediate": kept, "write": "none",
            "parent": torch.tensor([[-1, 0, 1]] * 2),
        },
        "P6": {"state": state, "read_index": rows, "write_index": torch.tensor([7, 0])},
    }[name]  # fmt: skip
    start = torch.stack([ring[0, 2], ring[1, 0]]) if name == "P1" else state[rows]
    want, after = single_steps(backend, device, x, start, **options)
    o, left, kept = run(backend, device, x | how, **options)
    assert same_bits(o, want)
    if name == "P1":
        assert all(
            same_bits(left[n, (p + 1 + t) % R], after[n, t]) for n, p in ((0, 2), (1, 0)) for t in range(T)
        )
    elif name == "P2":
        assert same_bits(left[table], after)
    elif name == "P6":
        assert same_bits(left[[7, 0]], after[:, -1]) and same_bits(left[rows], state[rows])
    else:
        assert same_bits(kept, after) and same_bits(left, state)


@pytest.mark.parametrize("name", ["index", "P1", "P2", "P3", "P4", "P6", "replay"])
def test_more_than_65535_rows_and_heads(backend, device, name):
    """The last rows of a grid that is too large for one axis of a GPU have the bits that they have alone."""
    rows, HV, K, V = 4100, 16, 4, 4
    sizes = {"HV": HV, "K": K, "V": V}
    x = moved(inputs(rows, 2 if name == "P4" else 1, H=8, **sizes), device)
    slots, last = torch.arange(rows, device=device), slice(rows - 2, rows)
    how = {
        "index": {"state": pool_of(rows, **sizes), "read_index": slots},
        "P1": {"state": pool_of(rows, 2, **sizes), "ring_pos": slots, "write": "all"},
        "P2": {
            "state": pool_of(2 * rows, **sizes), "read_index": slots[:, None],
            "write_index": slots[:, None] + rows, "write": "all",
        },
        "P3": {
            "state": pool_of(rows, **sizes), "write": "none", "intermediate": torch.zeros(rows, 1, HV, V, K),
        },
        "P4": {
            "state": pool_of(rows, **sizes), "write": "none", "intermediate": torch.zeros(rows, 2, HV, V, K),
            "parent": slots[:, None].cpu() % torch.tensor([2, 2]) - 1,
        },
        "P6": {"state": pool_of(2 * rows, **sizes), "write_index": slots + rows},
        "replay": {
            "state": pool_of(rows, **sizes), "history_u": torch.randn(rows, 3, HV, V),
            "history_k": torch.randn(rows, 3, 8, K), "cursor": slots % 3, "read_index": slots,
            "history_G": torch.zeros(rows, 3, HV, dtype=torch.float64),
        },
    }[name]  # fmt: skip
    how = moved(how, device)
    call = api.replay_decode if name == "replay" else api.decode
    few = {key: v[last].clone() for key, v in x.items()} | moved(how, device)
    for key in ("ring_pos", "read_index", "write_index", "parent"):
        if key in few:
            few[key] = few[key][last]
    if name in ("P1", "P3", "P4", "P6"):
        few["read_index"] = slots[last]
    if name in ("P3", "P4"):
        few["intermediate_row"] = slots[last]
    o = call(**x, **how, backend=backend)
    assert same_bits(call(**few, backend=backend), o[last]) and o[last].any()
    for key, lead in (("state", -2), ("intermediate", -2), ("history_u", -2)):
        if key in how:
            assert same_bits(how[key][lead:], few[key][lead:]), key


@pytest.mark.parametrize("name", ["step", "prefill", "replay's commit"])
def test_other_calls_of_more_than_65535_rows_and_heads(backend, device, monkeypatch, name):
    """A layer's whole step, a prefill and a fold support as many rows as decode does."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    rows, H, HV, K, V = 4100, 8, 16, 16, 16
    if (backend, name) == ("eager", "prefill"):
        rows = 300  # no grid: one sequence after the other, 2.5 ms each
    slots, sizes, options = torch.arange(rows), {"HV": HV, "K": K, "V": V}, {}
    tokens, per_row, written = (), ("read_index", "state_index", "index", "accepted"), ("state",)
    if name == "step":
        call, written = api.decode_step, ("state", "conv_state")
        x, options = step_of(rows, H, HV, K, V, 4, slots=rows)
        x["read_index"], per_row = slots, (*per_row, "mixed_qkv", "a", "b", "z")
    elif name == "prefill":
        call, options, x = api.prefill, {"batch_invariant": True}, inputs(1, rows, H, **sizes)
        tokens = tuple(x)
        x |= {"state": pool_of(rows, **sizes), "state_index": slots, "cu_seqlens": torch.arange(rows + 1)}
    else:
        call, written, options = api.replay_commit, ("state", "cursor"), {"room": 3}
        x = {
            "state": pool_of(1, rows, **sizes), "history_u": torch.randn(1, rows, 3, HV, V),
            "history_k": torch.randn(1, rows, 3, H, K), "cursor": slots % 2 + 1, "index": slots,
            "history_G": torch.zeros(1, rows, 3, HV, dtype=torch.float64), "accepted": slots % 3,
        }  # fmt: skip
    x, few = moved(x, device), moved(x, device)
    for key in few:
        if key in tokens:
            few[key] = few[key][:, -2:].clone()
        elif key in per_row:
            few[key] = few[key][-2:].clone()
        elif key == "cu_seqlens":
            few[key] = few[key][:3].clone()
    before = x["state"].clone()
    o, alone = call(**x, **options), call(**few, **options)
    assert o is None or same_bits(alone, (o[:, -2:] if tokens else o[-2:])) and o[-2:].any()
    for key in written:
        axis = 1 if x[key].dim() == 5 else 0
        assert same_bits(x[key].narrow(axis, rows - 2, 2), few[key].narrow(axis, rows - 2, 2)), key
    assert not same_bits(x["state"], before)


def test_commit_of_more_than_65535_states(backend, device, monkeypatch):
    monkeypatch.setenv("GDN_BACKEND", backend)
    n = 70_000
    index = torch.arange(n, device=device)
    source = torch.randn(1, n, 1, 2, device=device)
    pool = torch.zeros(1, n, 2, device=device)
    if backend == "eager":
        index = index[-500:]
    gdn.commit(pool, source, index, index, 0 * index)
    assert same_bits(pool[:, index], source[:, index, 0])


HUGE = 2**31 + 2**20  # elements; only those that a test uses are ever touched


def far(x, *, last):
    """Return a copy of some slots, the last of which begins more than 2^31 elements after the first."""
    pitch = HUGE // last
    memory = torch.empty(last * pitch + x[0].numel(), dtype=x.dtype, device=x.device)
    view = memory.as_strided(x.shape, (pitch, *x[0].contiguous().stride()))
    return view.copy_(x)


FAR = ["index", "P1", "P2", "P3", "P4", "P6", "replay", "replay's commit", "prefill", "commit", "step"]


@pytest.mark.interpret
@pytest.mark.parametrize("name", [*FAR, "convolution", "convolution on a ring", "convolution of prompts"])
def test_pools_beyond_2_to_the_31_elements(backend, device, monkeypatch, alone, name):
    """Offsets are 64-bit; 32-bit offsets would silently read and write other memory."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    x, n = moved(inputs(1, 2), device), torch.tensor([3], device=device)
    state, table = pool_of(4, dtype=BF16).to(device), torch.tensor([[3, 2]], device=device)
    kept = pool_of(4, 2, dtype=BF16).to(device)
    cu = torch.tensor([0, 2], device=device)
    u, k = (torch.randn(4, 3, *size).to(device, BF16) for size in ((4, 24), (2, 16)))
    G = torch.full((4, 3, 4), -0.5, device=device, dtype=torch.float64)
    cursor = torch.ones(4, device=device, dtype=torch.int32)
    rows, windows, taps = (
        torch.randn(*shape).to(device, BF16) for shape in ((1, 2, 20), (4, 20, 6), (20, 4))
    )
    whole, options = step_of(1, 2, 4, 16, 24, 4, BF16, BF16, slots=4)
    whole = moved(whole | {"read_index": torch.tensor([3])}, device)

    def call(place):
        """Return the output, and a written tensor, of a call on pools of four slots that `place` lays out."""
        if name.startswith("convolution"):
            pool, where = place(windows), {"state_index": n}
            if name == "convolution of prompts":
                return gdn.causal_conv1d(rows, taps, state=pool, cu_seqlens=cu, **where)[0], pool
            where |= {"ring_pos": n} if name == "convolution on a ring" else {}
            return gdn.causal_conv1d_update(rows, pool, taps, **where), pool
        if name == "step":
            own = whole | {key: place(whole[key]) for key in ("state", "conv_state")}
            o = api.decode_step(**own, **options)
            return torch.cat([o.flatten(), own["conv_state"][3].flatten()]), own["state"]
        if name.startswith("replay"):
            past = {"history_u": place(u), "history_k": place(k), "history_G": G, "cursor": cursor.clone()}
            if name == "replay":
                return api.replay_decode(**x, state=place(state), **past, read_index=n), past["history_u"]
            layers = {key: past[key][None] for key in ("history_u", "history_k", "history_G")}
            pool = place(state)
            api.replay_commit(
                pool[None], **layers, cursor=past["cursor"], index=n, accepted=0 * n + 1, room=3
            )
            return past["cursor"], pool
        if name == "prefill":
            packed, pool = {key: v.reshape(1, 2, *v.shape[2:]) for key, v in x.items()}, place(state)
            return api.prefill(**packed, state=pool, cu_seqlens=cu, state_index=n), pool
        if name == "commit":
            pool = place(state)
            gdn.commit(pool[None], place(kept)[None], n, n, 0 * n + 1)
            return pool[3:], pool
        tree = {"write": "none", "intermediate_row": n}
        how = {
            "index": lambda: {"state": place(state), "read_index": n},
            "P1": lambda: {"state": place(kept), "read_index": n, "ring_pos": 0 * n, "write": "all"},
            "P2": lambda: {
                "state": place(state), "read_index": table, "write_index": table, "write": "all",
            },
            "P3": lambda: {"state": place(state), "read_index": n, "intermediate": place(kept)} | tree,
            "P4": lambda: {
                "state": place(state), "read_index": n, "intermediate": place(kept), "parent": 0 * table,
            } | tree,
            "P6": lambda: {"state": place(state), "read_index": 0 * n, "write_index": n},
        }[name]()  # fmt: skip
        return api.decode(**x, **how), how.get("intermediate", how["state"])

    def spread_out(y):
        found = far(y, last=3)
        assert (found[3].data_ptr() - found[0].data_ptr()) // y.element_size() > 2**31
        return found

    (o, left), (want, small) = call(spread_out), call(lambda y: y.clone())
    assert same_bits(o, want) and same_bits(left, small)


def test_prefill_then_decode_is_decode_all_the_way(backend, device):
    """Decode and replay continue a prefill of any length as if every token had been decoded."""
    for length in (1, 3, 63, 64, 65, 100):
        x, state = moved(inputs(1, length + 6), device), torch.zeros(2, 4, 24, 16, device=device)
        token = lambda a, b, x=x: {key: v[:, a:b] for key, v in x.items()}  # noqa: E731
        o = [api.decode(**token(t, t + 1), state=state[1:], backend=backend) for t in range(length + 6)]
        pool = torch.full((2, 4, 24, 16), NAN, device=device)
        cu, at = torch.tensor([0, length], device=device), torch.tensor([1], device=device)
        fresh = torch.tensor([False], device=device)
        first = api.prefill(
            **token(0, length), state=pool, cu_seqlens=cu, state_index=at, has_initial_state=fresh,
            backend=backend,
        )  # fmt: skip
        replayed = pool.clone()
        rest = api.decode(**token(length, length + 6), state=pool, read_index=at, backend=backend)
        assert error(torch.cat([first, rest], 1), torch.cat(o, 1)) <= 1e-5
        assert error(pool[1], state[1]) <= 1e-5 and pool[0].isnan().all()
        kept = {
            "history_u": torch.full((2, 6, 4, 24), NAN, device=device),
            "history_k": torch.full((2, 6, 2, 16), NAN, device=device),
            "history_G": torch.full((2, 6, 4), NAN, dtype=torch.float64, device=device),
        }
        cursor = torch.zeros(2, dtype=torch.int32, device=device)
        for start in (length, length + 3):
            o_replayed = api.replay_decode(
                **token(start, start + 3),
                state=replayed,
                **kept,
                cursor=cursor,
                read_index=at,
                backend=backend,
            )
            assert error(o_replayed, rest[:, start - length : start - length + 3]) <= 1e-5
            api.replay_commit(
                replayed[None],
                *(h[None] for h in kept.values()),
                cursor,
                at,
                0 * at + 3,
                room=3,
                backend=backend,
            )
        api.replay_commit(
            replayed[None], *(h[None] for h in kept.values()), cursor, at, 0 * at, room=6, backend=backend
        )
        assert error(replayed[1], state[1]) <= 1e-5


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_results_may_be_changed_in_place(backend, device, function, v_first):
    """Autograd refuses this for views among several outputs."""
    x = torch.randn(2, 20, 2, 16, device=device, requires_grad=True)
    o, state = getattr(gdn, function)(
        x, x, x, use_qk_l2norm_in_kernel=True, output_final_state=True, state_v_first=v_first, backend=backend
    )
    state[0] = 0
    o[0].mul_(2)
    (o.sum() + state.sum()).backward()
    assert x.grad[1].any()


@pytest.mark.parametrize("channels", [1, 16])
def test_results_of_a_convolution_may_be_changed_in_place(backend, device, channels):
    x = torch.randn(2, 20, channels, device=device, requires_grad=True)
    weight = torch.randn(channels, 4, device=device)
    y, window = gdn.causal_conv1d(x, weight, output_final_state=True, backend=backend)
    y[0].mul_(2)
    window[0] = 0
    (y.sum() + window.sum()).backward()
    assert x.grad.any()
