"""Test decoding with a history against the reference, and against plain decode token by token."""

import doctest
import itertools

import hypothesis
import pytest
import torch
from conftest import INTERPRETED
from hypothesis import strategies as st
from kit import api
from kit.api import reference
from kit.serving import TOLERANCE, error, inputs, moved, nothing_waits, same_bits, step_of

import gdn
import gdn.ops.history
from gdn.problem.history import parse_fold, parse_history

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZES = {"H": 1, "HV": 2, "K": 16, "V": 12}
SLOTS, PLACES = 6, 8
LAYOUTS = [True, False]
DECAYS = ["head", "channel"]
WRITTEN = ("state", "history_u", "history_k", "history_G", "cursor")


def pool(
    places=PLACES, room=1, state=F32, kept=F32, v_first=True, decay="head", device="cpu", slots=SLOTS, **sizes
):
    """Return a pool of random states, with NaN in the places of its histories, which are all empty."""
    s = SIZES | sizes
    x = gdn.allocate_history_pool(
        slots, num_k_heads=s["H"], num_v_heads=s["HV"], head_k_dim=s["K"], head_v_dim=s["V"], places=places,
        room=room, state_dtype=state, history_dtype=kept, state_v_first=v_first, decay=decay,
    )  # fmt: skip
    x.write(torch.arange(slots), torch.randn(x.state.shape), state_v_first=v_first)
    for history in (x.history_u, x.history_k, x.history_G):
        history.fill_(float("nan"))
    return on(x, device)


def on(x, device):
    """Return a copy of a pool on a device."""
    copy = {name: y.to(device, copy=True) if torch.is_tensor(y) else y for name, y in vars(x).items()}
    return gdn.HistoryPool(**copy)


def fill(x, steps, backend, device, rows, **options):
    """Decode a few tokens with the reference, so that the histories hold tokens at many cursors."""
    for n in range(steps):
        given = inputs(len(rows), 1, **options)
        _, new = reference.decode_with_history(**given, pool=x, read_index=rows[n % 2 :: 2][: len(rows)])
        x = gdn.HistoryPool(**vars(new), room=x.room)
    return x


def find_errors(o, got, expected, tolerance, G_tolerance=1e-6):
    """Return everything that is wrong with the outputs and the pool after a call."""
    want, after = expected
    found = [] if error(o, want) <= tolerance else [f"o is off by {error(o, want):.1e}"]
    if not torch.equal(got.cursor.cpu(), after.cursor):
        found.append(f"cursor: expected {after.cursor.tolist()}, got {got.cursor.tolist()}")
    limits = (tolerance, tolerance, tolerance, G_tolerance)
    for name, limit in zip(WRITTEN, limits, strict=False):
        x, y = getattr(got, name).cpu(), getattr(after, name)
        if not torch.equal(x.isnan(), y.isnan()):
            found.append(f"{name}: NaN in other places")
        elif not error(x.nan_to_num(), y.nan_to_num()) <= limit:
            found.append(f"{name} is off by {error(x.nan_to_num(), y.nan_to_num()):.1e}")
    return found


def agree(backend, device, x, given, tolerance=1e-5, **options):
    """Run a call on a pool and compare it with the reference on a copy; return the pool after it."""
    expected = reference.decode_with_history(**given, pool=x, **{"use_history": True} | options)
    got = on(x, device)
    out = torch.full_like(given["v"], float("nan"), device=device)
    options = {"use_history": True} | {
        name: y.to(device) if isinstance(y, torch.Tensor) else y for name, y in options.items()
    }
    assert (
        api.decode_with_history(**moved(given, device), pool=got, out=out, backend=backend, **options) is out
    )
    assert find_errors(out, got, expected, tolerance) == []
    return on(got, "cpu"), out.cpu()


KINDS = {  # dtype of the tokens, of the states, of the history, and of the index tensors
    "fp32": (F32, F32, F32, torch.int64),
    "bf16": (BF16, F32, BF16, torch.int32),
    "bf16 pool": (BF16, BF16, BF16, torch.int32),
    "fp64": (F64, F64, F64, torch.int64),
}
FEW = {("fp32", False), ("bf16", True)}  # the kinds that are interpreted


@pytest.mark.parametrize(
    "kind, v_first",
    [
        pytest.param(*case, marks=[pytest.mark.interpret] if case in FEW else [])
        for case in itertools.product(KINDS, LAYOUTS)
    ],
)
def test_a_token_for_each_row(backend, device, poison, kind, v_first):
    """Rows at different cursors, one of them full, agree; padding outputs zeros and touches nothing."""
    dtype, state, kept, index = KINDS[kind]
    if dtype == F64 and backend != "eager":
        pytest.skip("float64 is for eager alone")
    x = pool(4, state=state, kept=kept, v_first=v_first)
    # in slots 4 and 2 histories of 3 tokens, which are full, and of one; the ring of slot 4 has turned
    x.cursor[4, 0] = 2
    for rows in ([4, 2], [4], [4]):
        given = inputs(len(rows), 1, **SIZES, dtype=dtype, raw=True)
        options = {"read_index": torch.tensor(rows), "state_v_first": v_first}
        _, after = reference.decode_with_history(**given, pool=x, **options)
        x = gdn.HistoryPool(**vars(after), room=x.room)
    given = inputs(4, 1, **SIZES, dtype=dtype, raw=True)
    rows = torch.tensor([4, -1, 2, SLOTS], dtype=index)
    tolerance = TOLERANCE[dtype]
    got, o = agree(backend, device, x, given, tolerance, read_index=rows, state_v_first=v_first)
    assert got.cursor.tolist()[2] == [0, 2, 0] and got.cursor.tolist()[4] == [1, 1, 0]
    assert not o[1].any() and not o[3].any()
    assert same_bits(got.state[2], x.state[2]) and not same_bits(got.state[4], x.state[4])


def test_the_gate_can_fail(backend, device):
    x, given = pool(4), inputs(SLOTS, 1, **SIZES)
    x.cursor[:, 1], x.history_u[:], x.history_k[:] = 3, 0.1, 0.1
    x.history_G[:] = -torch.arange(4.0)[:, None]
    expected = reference.decode_with_history(**given, pool=x)
    got = on(x, device)
    o = api.decode_with_history(**moved(given, device), pool=got, use_history=True, backend=backend)
    assert find_errors(o, got, expected, 1e-5) == []
    for name in WRITTEN:
        lie = on(got, device)
        getattr(lie, name).copy_(getattr(x, name))
        assert find_errors(o, lie, expected, 1e-5), name
    assert find_errors(torch.zeros_like(o), got, expected, 1e-5)


@pytest.mark.interpret
@pytest.mark.parametrize("tokens, places, kept", [(3, 7, F32), (9, 20, BF16)])
def test_drafts_of_which_some_are_kept(backend, device, tokens, places, kept):
    """num_accepted keeps drafts of the last call; counts out of range are clamped; full rows are folded."""
    x = pool(places, tokens, kept=kept)
    counts = [[0, 0, 0], [tokens, 2, 5], [99, -4, 0], [1, tokens, 0]]
    for accepted in counts[:2] if tokens > 8 else counts:
        given = inputs(3, tokens, **SIZES, dtype=kept)
        where = {"read_index": torch.tensor([3, 1, -1]), "num_accepted": torch.tensor(accepted)}
        x, _ = agree(backend, device, x, given, TOLERANCE[kept], **where)


@pytest.mark.parametrize(
    "null_slot, decay", [(None, "head"), *(pytest.param(0, x, marks=pytest.mark.interpret) for x in DECAYS)]
)
def test_packed_rows(backend, device, null_slot, decay):
    """Rows of 0 to 3 tokens agree, and tokens past the last row output zeros."""
    x, offsets = pool(6, 3, decay=decay), torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    for _ in range(2):
        given = inputs(1, 7, **SIZES, raw=True, is_per_channel=decay == "channel")
        where = {"read_index": torch.tensor([3, 2, 5, 0]), "cu_seqlens": offsets, "null_slot": null_slot}
        expected = reference.decode_with_history(**given, pool=x, **where)
        got = on(x, device)
        where = moved(where, device) | {"max_seqlen": 3, "use_history": True, "backend": backend}
        o = api.decode_with_history(**moved(given, device), pool=got, **where)
        assert find_errors(o, got, expected, 1e-5) == [] and not o[:, 6:].any()
        x = on(got, "cpu")
    assert x.cursor[2].tolist() == [0, 0, 0] and bool(x.cursor[0].any()) == (null_slot is None)


@pytest.mark.interpret
@pytest.mark.parametrize("V", [68, 96])
def test_a_long_history_in_programs_of_many_strips(triton_device, monkeypatch, V):
    """Two blocks of 16 places, several strips of columns for each program, keys in two blocks.

    The programs of a head share the strips of the row that folds; of the other row one of them does all. Four
    programs would have 8 strips of the 5 or 6, which at V = 96 have no mask.
    """
    from gdn.backends.triton.serving import packet

    monkeypatch.setattr(packet, "FILLED", 0)
    x = pool(32, K=60, V=V, slots=2)
    x.cursor[:] = torch.tensor([[20, 31, 0], [20, 3, 0]])
    x.history_u[:], x.history_k[:] = torch.randn(32, 2, V) / 4, torch.randn(32, 1, 60) / 4
    # sums of g in the order of the tokens, which begin at place 20 of the ring
    x.history_G[:] = (-torch.arange(32.0).roll(20) / 16)[:, None]
    got, _ = agree("triton", triton_device, x, inputs(2, 1, H=1, HV=2, K=60, V=V))
    assert got.cursor.tolist() == [[19, 1, 0], [20, 4, 0]]


@pytest.mark.interpret
@pytest.mark.parametrize("state", [F32, BF16, torch.int16, torch.int8])
def test_wide_strips_have_the_bits_of_narrow_ones(triton_device, monkeypatch, state):
    """Programs of two warps have the bits of programs of one: empty histories, folds, steps after them."""
    from gdn.backends.triton import launch
    from gdn.backends.triton.serving import history, packet
    from gdn.ops import fastpath

    monkeypatch.setattr(packet, "FILLED", 0)
    sizes, gpu = {"H": 1, "HV": 2, "K": 128, "V": 128}, launch.machine(torch.device(triton_device))
    x = gdn.allocate_history_pool(
        3, num_k_heads=1, num_v_heads=2, head_k_dim=128, head_v_dim=128, places=4, state_dtype=state,
        history_dtype=BF16, state_v_first=True, with_remainder=False,
    )  # fmt: skip
    x.write(torch.arange(3), torch.randn(3, 2, 128, 128) / 12, state_v_first=True)
    steps = [moved(inputs(3, 1, **sizes, dtype=BF16, raw=True), triton_device) for _ in range(4)]
    results, strips = [], []
    for columns in ({}, {(gpu.capability, 128, 128): history.COLUMNS[90, 128, 128]}):
        monkeypatch.setattr(history, "COLUMNS", columns)
        monkeypatch.setattr(history, "_plans", launch.PlanCache())
        monkeypatch.setattr(fastpath, "_calls", {})
        one = on(x, triton_device)
        one.cursor[1, 0] = 2
        o = [
            api.decode_with_history(**given, pool=one, use_history=True, backend="triton") for given in steps
        ]
        results.append([*o, *one.tensors()])
        (plan,) = history._plans.plans.values()
        strips.append((plan.launch.constants["BV"], plan.launch.num_warps))
    assert strips == [(16, 1), (32 if state == F32 else 64, 2)]
    pairs = list(zip(*results, strict=True))
    if triton_device == "cpu":
        # NumPy sums a product's terms in an order that depends on the number of columns
        assert all(error(z.double(), y.double()) < 1e-3 for y, z in pairs)
    else:
        assert all(same_bits(y, z) for y, z in pairs)


@pytest.mark.skipif(INTERPRETED, reason="no kernel runs")
def test_wide_strips_are_for_histories_of_16_bits(monkeypatch):
    """In fp32 a history takes the registers of a second warp: 646 bytes would be spilled, and none is now."""
    pytest.importorskip("triton")
    from kit.compiling import TARGETS, recording

    from gdn.backends.triton.serving import packet

    monkeypatch.setattr(packet, "FILLED", 0)
    given = inputs(2, 1, H=1, HV=2, K=128, V=128, dtype=BF16, raw=True)
    warps = {}
    for kept in (BF16, F32):
        x = pool(16, kept=kept, slots=2, K=128, V=128)
        with recording(TARGETS["cuda:90"].machine) as launches:
            api.decode_with_history(**given, pool=x, use_history=True, backend="triton")
        warps[kept] = [one.num_warps for one, _ in launches]
    assert warps == {BF16: [2], F32: [1]}


def run_steps(backend, device, steps, x, tolerance=1e-5, dtype=F32):
    """Decode steps of (tokens, kept, what to do first) on a pool, and plainly the tokens that are kept.

    kept is None where all tokens are; else drafts, whose number is passed with the next step.
    """
    x, plain = on(x, device), x.state.clone().to(device)
    last, kept = None, None
    slots = torch.tensor([4, 2], device=device)
    for tokens, accepted, action in steps:
        num_accepted = None
        if kept is not None:
            num_accepted = torch.tensor(kept, device=device)
            for n, count in enumerate(kept):
                row = {name: y[n : n + 1, :count] for name, y in last.items()}
                api.decode(**row, state=plain, read_index=slots[n : n + 1], backend=backend)
        elif accepted is not None:
            num_accepted = torch.zeros(2, dtype=torch.int32, device=device)
        if action == "reset":
            x.reset(slots[:1])
            x.state[4], plain[4] = 1.0, 1.0
            if num_accepted is not None:
                num_accepted[0] = 0
        given = moved(inputs(2, tokens, **SIZES, dtype=dtype), device)
        scratch = plain if accepted is None else plain.clone()
        if kept is not None and accepted is None:
            # drafts of the last call are settled by a fold, before tokens that are all kept
            gdn.fold_history(x, slots, num_accepted=num_accepted, state_v_first=True, backend=backend)
            num_accepted = None
        uses = None if num_accepted is not None else action != "plain"
        o = api.decode_with_history(
            **given, pool=x, read_index=slots, num_accepted=num_accepted, use_history=uses, backend=backend
        )
        expected = api.decode(**given, state=scratch, read_index=slots, backend=backend)
        assert error(o, expected) <= tolerance
        last, kept = given, accepted
    count = None if kept is None else torch.tensor([0, 0], device=device)
    gdn.fold_history(x, slots, num_accepted=count, state_v_first=True, backend=backend)
    assert error(x.state, plain) <= tolerance and not x.cursor[:, 1:].any()


def test_steps_agree_with_decode(backend, device):
    """Several cycles of folds, drafts, plain calls between and a slot that is used again."""
    one = (1, None, "")
    some = [one] * 12 + [(1, None, "plain"), (2, None, ""), (1, None, "reset")] + [one] * 9
    drafts = [(3, (1, 2), ""), (3, (0, 3), ""), (2, (2, 0), ""), (3, (3, 3), "reset"), (3, (1, 1), "")]
    run_steps(backend, device, [*some, *drafts, one, *drafts], pool(7, 3))


def test_any_steps(backend, device):
    """Any packets, accepted counts, resets and plain calls give the states of plain decode."""
    drafts = st.integers(1, 4).flatmap(
        lambda t: st.tuples(st.just(t), st.tuples(*[st.integers(0, t)] * 2), st.sampled_from(["", "reset"]))
    )
    whole = st.tuples(st.integers(1, 4), st.none(), st.sampled_from(["", "", "plain", "reset"]))

    @hypothesis.settings(max_examples=12 if backend == "eager" else 10, deadline=None)
    @hypothesis.given(st.lists(st.one_of(whole, drafts), min_size=1, max_size=9), st.integers(8, 12))
    def check(steps, places):
        torch.manual_seed(len(steps))
        run_steps(backend, device, steps, pool(places, 4))

    check()


def test_a_thousand_tokens_do_not_drift(backend, device):
    """bf16 histories err as much after 1,000 tokens, and 142 folds, as after 100."""
    torch.manual_seed(1)
    sizes = {"H": 1, "HV": 1, "K": 8, "V": 8}
    x, errors = pool(8, kept=BF16, device=device, slots=1, **sizes), []
    exact = x.state.double().cpu()
    tokens = inputs(1, 1000, **sizes, dtype=BF16)
    for t in range(1000):
        given = {name: y[:, t : t + 1].to(device) for name, y in tokens.items()}
        o = api.decode_with_history(**given, pool=x, use_history=True, backend=backend)
        if t % 100 == 0:
            part = {name: y[:, t : t + 100].double() for name, y in tokens.items()}
            expected = api.decode(**part, state=exact, backend="eager")
            parts = []
        parts.append((o.cpu().double(), expected[:, t % 100].unsqueeze(1)))
        if t % 100 == 99:
            got, want = (torch.cat(y, 1) for y in zip(*parts, strict=True))
            errors.append(error(got, want))
    assert max(errors) <= TOLERANCE[BF16] and errors[-1] <= 2 * max(errors[:2])


def test_the_plain_way_has_the_bits_of_decode(backend, device):
    """With empty histories use_history=False is `decode`, and touches neither histories nor other slots."""
    x = pool(device=device)
    before, plain = on(x, device), x.state.clone()
    given = moved(inputs(2, 1, **SIZES), device) | {"read_index": torch.tensor([3, -1], device=device)}
    o = api.decode_with_history(**given, pool=x, use_history=False, backend=backend)
    assert same_bits(o, api.decode(**given, state=plain, backend=backend)) and same_bits(x.state, plain)
    for name in ("history_u", "history_k", "history_G"):
        assert same_bits(getattr(x, name), getattr(before, name))
    assert not x.cursor.any()


@pytest.mark.interpret
def test_the_plain_way_folds_first(backend, device):
    x = pool(device=device)
    given = moved(inputs(2, 2, **SIZES), device)
    for t, uses in enumerate((True, False)):
        one = {name: y[:, t : t + 1] for name, y in given.items()}
        expected = reference.decode_with_history(**moved(one, "cpu"), pool=on(x, "cpu"), use_history=uses)
        o = api.decode_with_history(**one, pool=x, use_history=uses, backend=backend)
        assert find_errors(o, x, expected, 1e-5) == []
    assert not x.cursor.any()


def test_a_row_does_not_depend_on_the_batch(backend, device):
    x, given = pool(kept=BF16), inputs(SLOTS, 1, **SIZES, dtype=BF16)
    whole = on(x, device)
    o = api.decode_with_history(**moved(given, device), pool=whole, use_history=True, backend=backend)
    for rows in ([3], [4, 0, 1]):
        part, few = on(x, device), {name: y[rows] for name, y in given.items()}
        few |= {"read_index": torch.tensor(rows)}
        got = api.decode_with_history(**moved(few, device), pool=part, use_history=True, backend=backend)
        assert same_bits(got, o[rows])
        assert all(same_bits(y[rows], z[rows]) for y, z in zip(part.tensors(), whole.tensors(), strict=True))


@pytest.mark.interpret
def test_strides_are_free(backend, device):
    """Slots may be pages, heads may precede places, tokens and cursors may be views of wider tensors."""
    x, given = pool(4, kept=BF16), inputs(2, 1, **SIZES, dtype=BF16)
    x.cursor[:, 1] = 3
    for history in (x.history_u, x.history_k):
        history.normal_()
    x.history_G[:] = -torch.arange(4.0)[:, None]
    page = torch.zeros(SLOTS, 5000, device=device)
    state = page[:, 8 : 8 + x.state[0].numel()].unflatten(1, x.state.shape[1:])
    heads = torch.zeros(SLOTS, 3, 4, 24, dtype=BF16, device=device)
    u, k = heads[:, :2, :, :12].transpose(1, 2), heads[:, 2:, :, :16].transpose(1, 2)
    G = torch.zeros(SLOTS, 2, 5, dtype=F64, device=device)[..., 1:].transpose(1, 2)
    cursor = torch.zeros(SLOTS, 7, dtype=torch.int32, device=device)[:, 2:5]
    views = gdn.HistoryPool(state, u, k, G, cursor)
    for y, z in zip(views.tensors(), x.tensors(), strict=True):
        y.copy_(z)
    rows = torch.randn(2, 1, 100, dtype=BF16, device=device)
    for name, start in (("q", 3), ("k", 30), ("v", 60)):
        part = rows[..., start : start + given[name][0, 0].numel()].unflatten(2, given[name].shape[2:])
        part.copy_(given[name])
        given[name] = part
    expected = reference.decode_with_history(**moved(given, "cpu"), pool=x)
    o = api.decode_with_history(**moved(given, device), pool=views, use_history=True, backend=backend)
    assert find_errors(o, views, expected, TOLERANCE[BF16]) == []


@pytest.mark.parametrize(
    "is_gated, uses, kind, decay",
    [
        pytest.param(True, True, F32, "head", marks=pytest.mark.interpret),
        (False, False, F32, "head"),
        (False, True, torch.int16, "head"),
        pytest.param(True, False, torch.int16, "head", marks=pytest.mark.interpret),
        (True, True, torch.int8, "head"),
        pytest.param(False, True, torch.int8, "channel", marks=pytest.mark.interpret),
        (True, False, F32, "channel"),
    ],
)
def test_a_step_of_a_layer(backend, device, is_gated, uses, kind, decay):
    """decode_step on a HistoryPool has the bits of its three functions, and calls repeat from the cache."""
    x, options = step_of(2, 1, 2, 16, 12, 4, is_gated=is_gated, slots=3, is_per_channel=decay == "channel")
    sizes = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 12, "state_v_first": True}
    sizes |= {"decay": decay}
    x, given = moved(x, device), {"use_history": uses, "backend": backend}
    state = x.pop("state")
    types, slots = {"state_dtype": kind, "history_dtype": F32}, torch.arange(3, device=device)
    pools = [gdn.allocate_history_pool(3, **sizes, **types, device=device) for _ in range(2)]
    for one in pools:
        # three tokens, which the plain way folds
        one.history_u.copy_(state[:, None, :, :, 0]), one.history_k.copy_(state[:, None, :1, 0])
        one.write(slots, state, state_v_first=True)
        one.cursor[:, 1] = 3
    windows, index, HV = x["conv_state"].clone(), x.get("read_index"), 2
    for _ in range(2):
        o = api.decode_step(**x, **options, state=pools[0], **given)
        mixed = gdn.causal_conv1d_update(
            x["mixed_qkv"][:, None], windows, x["conv_weight"], x["conv_bias"], activation="silu",
            state_index=index, backend=backend,
        )  # fmt: skip
        q, k, v = (
            y.unflatten(2, (n, -1)) for n, y in zip((1, 1, HV), mixed.split([16, 16, 24], 2), strict=True)
        )
        raw = {"a": x["a"][:, None], "b": x["b"][:, None], "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
        expected = api.decode_with_history(q, k, v, pools[1], **raw, read_index=index, **given)[:, 0]
        if is_gated:
            expected = gdn.rms_norm_gated(expected, x["z"], x["norm_weight"], backend=backend)
        assert same_bits(o, expected)
    assert all(same_bits(y, z) for y, z in zip(pools[0].tensors(), pools[1].tensors(), strict=True))
    assert kind == F32 or same_bits(pools[0].column_scale, pools[1].column_scale)
    assert int(pools[0].cursor[:, 1].max()) == (5 if uses else 3)


def test_a_step_refuses_what_a_history_does_not_have():
    x, options = step_of(2, 1, 2, 16, 12, 4, is_gated=False)
    sizes = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 12, "state_v_first": True}
    for change, message in (
        ({"use_history": True}, "use_history: expected None without a HistoryPool, got True"),
        (
            {"state": gdn.allocate_history_pool(9, **sizes), "write_index": NONE},
            "write_index: expected None with",
        ),
        ({"state": gdn.allocate_history_pool(9, **sizes | {"head_v_dim": 8})}, "state: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            api.decode_step(**x | options | change)


@pytest.mark.parametrize(
    "tokens, places, kinds, options",
    [
        pytest.param(1, 4, (F32, F32, F32), {"K": 80, "v_first": True}, marks=pytest.mark.interpret),
        pytest.param(9, 20, (BF16, BF16, BF16), {"v_first": False}, marks=pytest.mark.interpret),
        (3, 8, (F32, BF16, F32), {"K": 200, "V": 40, "v_first": True}),
        (1, 32, (BF16, F32, BF16), {"K": 128, "V": 72, "v_first": False}),
    ],
)
def test_a_decay_per_key_channel(backend, device, poison, tokens, places, kinds, options):
    """A history of g itself agrees through turns of its ring and folds, with a reset, a bound and drafts."""
    sizes, v_first = SIZES | options, options["v_first"]
    sizes.pop("v_first")
    dtype, state, kept = kinds
    x = pool(places, tokens, state, kept, v_first, decay="channel", **sizes)
    x.cursor[:, 0] = places - 1
    for step in range(5 if tokens > 1 else 6):
        given = inputs(3, tokens, **sizes, dtype=dtype, raw=step % 2 == 1, is_per_channel=True)
        where = {"read_index": torch.tensor([5, -1, 2]), "state_v_first": v_first}
        where |= {"use_qk_l2norm_in_kernel": True}
        if tokens > 1:
            where["num_accepted"] = torch.tensor([0 if step == 0 else tokens, 0, step])
        if step % 2 == 1:
            where["lower_bound"] = -5.0
        else:
            given["g"][:, 0, :, 3] = -torch.inf
        x, o = agree(backend, device, x, given, max(TOLERANCE[t] for t in kinds), **where)
        assert not o[1].any()


def test_a_pool_of_layers():
    """allocate, one layer, reset of slots in every layer, bytes of a slot."""
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 24}
    x = gdn.allocate_history_pool(3, SLOTS, **sizes, room=4, state_v_first=True, state_dtype=BF16)
    assert x.state.shape == (3, SLOTS, 4, 24, 16) and x.history_k.shape == (3, SLOTS, 16, 2, 16)
    assert (
        x.bytes_per_slot
        == x[0].bytes_per_slot
        == 4 * 16 * 24 * 2 + 16 * (4 * 24 * 2 + 2 * 16 * 2 + 4 * 8) + 12
    )
    x.cursor[:] = 7
    one = x[1]
    assert one.room == 4 and one.state.data_ptr() == x.state[1].data_ptr()
    index = torch.tensor([2, -1, SLOTS, 5])
    x.reset(index)
    assert x.cursor[:, [2, 5]].count_nonzero() == 0 and bool((x.cursor[:, [0, 1, 3, 4]] == 7).all())
    one.reset(torch.tensor([0]))
    assert x.cursor[:, 0, 0].tolist() == [7, 0, 7]
    # a mask is no list of slots
    for wrong, kind in ((torch.zeros(SLOTS, dtype=torch.bool), TypeError), (index[:, None], ValueError)):
        with pytest.raises(kind, match="index: expected"):
            x.reset(wrong)
    assert x.cursor[0, 1].tolist() == [7, 7, 7]


@pytest.mark.parametrize("state", [F32, BF16, torch.int16, torch.int8])
def test_a_slot_is_copied_by_the_tensors_of_its_pool(state):
    """They are all that a slot has: the copy decodes and folds as the slot does."""
    x = pool(4, state=state)
    assert len(x.tensors()) == {torch.int16: 6, torch.int8: 7}.get(state, 5)
    source, target = torch.tensor([3]), torch.tensor([5])
    steps = [inputs(1, 1, **SIZES) for _ in range(6)]
    for given in steps[:2]:
        api.decode_with_history(**given | {"read_index": source}, pool=x, use_history=True)
    for y in x.tensors():
        y[target] = y[source]
    for given in steps[2:]:
        one, two = (
            api.decode_with_history(**given | {"read_index": slot}, pool=x, use_history=True)
            for slot in (source, target)
        )
        assert one.any() and same_bits(one, two)
    assert all(same_bits(y[3], y[5]) for y in x.tensors())


def test_cursors_out_of_range_are_clamped(backend, device):
    """Any cursor and any count reads and writes no place out of range."""
    x = pool()
    for history in (x.history_u, x.history_k, x.history_G):
        history.fill_(0)
    x.cursor[:] = torch.tensor(
        [[-5, 3, 0], [99, 2, 0], [0, -9, 0], [0, 99, 0], [7, 7, 0], [2**30, -(2**30), 0]]
    )
    agree(backend, device, x, inputs(SLOTS, 1, **SIZES))


def test_history_is_used_where_it_was_measured():
    """By itself a call appends from 64 rows of 32 heads of 128 x 128 on, on an imagined H200."""
    pytest.importorskip("triton")
    from gdn.backends.triton.serving.history import appends_history

    absent = dict.fromkeys(("num_accepted", "use_history", "null_slot", "backend", "read_index", "out"))
    absent |= dict.fromkeys(
        ("a", "b", "A_log", "dt_bias", "scale", "lower_bound", "cu_seqlens", "max_seqlen")
    )
    flags = {"use_qk_l2norm_in_kernel": True, "allow_neg_eigval": False, "state_v_first": True}

    def appends(rows, size=128, **change):
        sizes = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": size, "head_v_dim": size}
        with torch.device("meta"):
            x = gdn.allocate_history_pool(rows, **sizes, state_v_first=True)
            given = inputs(rows, 1, 16, 32, size, size, BF16)
        return appends_history(parse_history(**absent | flags | vars(x) | given | change))

    assert appends(64) and appends(256) and not appends(63) and not appends(1) and not appends(64, size=64)
    assert not appends(64, use_history=False) and appends(1, use_history=True)
    assert appends(1, num_accepted=torch.zeros(1, dtype=torch.int32, device="meta"))


def test_operators_match_their_schemas():
    """The schemas name exactly the tensors that are written, and the fakes match the outputs."""
    x, given = pool(), inputs(2, 1, **SIZES)
    names = dict.fromkeys(("a", "b", "A_log", "dt_bias", "scale", "lower_bound", "cu_seqlens", "max_seqlen"))
    names |= dict.fromkeys(
        ("null_slot", "backend", "num_accepted", "read_index", "column_scale", "remainder")
    )
    flags = {"use_qk_l2norm_in_kernel": True, "allow_neg_eigval": False, "state_v_first": True}
    tensors = dict(zip(WRITTEN, x.tensors(), strict=True)) | {"room": 1}
    for name in ("history_u", "history_k", "history_G"):
        tensors[name].fill_(0)
    problem = parse_history(
        **names, **flags, **given, **tensors, use_history=True, out=torch.empty(2, 1, 2, 12)
    )
    torch.library.opcheck(torch.ops.gdn.decode_with_history.default, problem.arguments())
    x.cursor[:, 1] = 2
    fold = parse_fold(
        **tensors, column_scale=None, remainder=None, index=torch.tensor([0, 3]), num_accepted=None,
        state_v_first=True, null_slot=None, backend=None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.gdn.fold_history.default, fold.arguments())


def test_a_compiled_step(backend, device):
    x, given = pool(device=device), moved(inputs(2, 1, **SIZES), device)
    plain = on(x, device)
    expected = api.decode_with_history(**given, pool=plain, use_history=True, backend=backend) * 2

    def step(*tensors):
        one = gdn.HistoryPool(*tensors)
        return api.decode_with_history(**given, pool=one, use_history=True, backend=backend) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(*x.tensors()), expected)
    assert all(same_bits(y, z) for y, z in zip(x.tensors(), plain.tensors(), strict=True))


NONE = torch.zeros(2, dtype=torch.int32)
REFUSED = [
    (TypeError, "pool: expected a HistoryPool, got Tensor", {"pool": torch.zeros(2)}),
    (TypeError, "use_history: expected a bool", {"use_history": 1}),
    (ValueError, "use_history: expected None or True", {"use_history": False, "num_accepted": NONE}),
    (ValueError, "num_accepted: expected shape", {"num_accepted": torch.zeros(3, dtype=torch.int32)}),
    (TypeError, "read_index: expected", {"read_index": torch.zeros(2)}),
    (ValueError, "state: expected shape", {"state_v_first": False}),
    (ValueError, "g: expected None with the raw", {"a": torch.zeros(2, 1, 2)}),
    (ValueError, "out: expected dtype", {"out": torch.zeros(2, 1, 2, 12).half()}),
    (NotImplementedError, "hopper:", {"backend": "hopper"}),
    (TypeError, "unexpected keyword", {"write": "final"}),
]  # fmt: skip
WRONG_POOLS = [
    (ValueError, r"cursor: expected \[slots, 3\] in int32", "cursor", torch.zeros(SLOTS, 3).long()),
    (ValueError, r"cursor: expected \[slots, 3\] in int32", "cursor", torch.zeros(SLOTS, 2).int()),
    (ValueError, "history_u: expected shape", "history_u", torch.zeros(SLOTS, PLACES, 2, 13)),
    (ValueError, "history_k: expected at most float32", "history_k", torch.zeros(6, 8, 1, 16, dtype=F64)),
    (ValueError, "history_G: expected dtype", "history_G", torch.zeros(SLOTS, PLACES, 2).half()),
    (ValueError, "room: expected 1 to 4, half of 8 places, got 5", "room", 5),
    (TypeError, "room: expected an int", "room", 1.0),
]  # fmt: skip


@pytest.mark.parametrize("kind, message, change", REFUSED)
def test_refusals_touch_nothing(kind, message, change):
    x = pool()
    given = inputs(2, 1, **SIZES) | {"pool": x}
    api.decode_with_history(**given, use_history=True)
    before = [y.clone() for y in x.tensors()]
    with pytest.raises(kind, match=message):
        api.decode_with_history(**given | change)
    assert all(same_bits(y, z) for y, z in zip(before, x.tensors(), strict=True))


@pytest.mark.parametrize("offsets", [[0, 1, 5], [0, 0, 5]])
@pytest.mark.parametrize("use_history", [True, False])
def test_a_packed_row_has_no_more_tokens_than_there_is_room(offsets, use_history):
    """Offsets on the CPU are checked where `max_seqlen` is not given; the history would lose tokens."""
    x = pool()
    before = [y.clone() for y in x.tensors()]
    given = inputs(1, 5, **SIZES) | {"read_index": torch.arange(2), "cu_seqlens": torch.tensor(offsets)}
    longest = max(b - a for a, b in itertools.pairwise(offsets))
    with pytest.raises(
        ValueError, match=f"room: expected at least {longest}, the most tokens of a row, got 1"
    ):
        api.decode_with_history(**given, pool=x, use_history=use_history)
    assert all(same_bits(y, z) for y, z in zip(before, x.tensors(), strict=True))


@pytest.mark.parametrize("kind", ["history", "int16"])
def test_what_write_refuses_changes_nothing(kind):
    """States with a gradient would make the pool part of a graph; an inference tensor cannot be written."""
    sizes = {"num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 8}

    def make():
        if kind == "int16":
            return gdn.allocate_int16_pool(3, **sizes)
        x = gdn.allocate_history_pool(3, num_k_heads=2, **sizes)
        x.cursor[:, 1] = 1
        return x

    states, slot = torch.ones(1, 2, 8, 8, requires_grad=True), torch.tensor([1])
    with torch.inference_mode():
        cold = make()
    for x, given, message in (
        (make(), states, "states: expected a tensor without gradient"),
        (cold, states.detach(), "expected a tensor that may be written outside inference mode"),
    ):
        before = {name: y.clone() for name, y in vars(x).items() if torch.is_tensor(y)}
        with pytest.raises(ValueError, match=message):
            x.write(slot, given)
        assert all(same_bits(getattr(x, name), y) for name, y in before.items())
    x = make()
    with torch.no_grad():
        x.write(slot, states)
    assert not x.state.requires_grad and error(x.read(slot), states.detach()) < 1e-4


@pytest.mark.parametrize("kind, message, name, value", WRONG_POOLS)
def test_wrong_pools_are_refused(kind, message, name, value):
    wrong = gdn.HistoryPool(**vars(pool()) | {name: value})
    with pytest.raises(kind, match=message):
        api.decode_with_history(**inputs(2, 1, **SIZES), pool=wrong)
    with pytest.raises(kind, match=message.replace("at most float32", "")):
        if "at most float32" in message:
            pytest.skip("a fold has no tokens to compare dtypes with")
        api.fold_history(wrong, torch.tensor([0]))


def test_debug_mode_finds_two_rows_of_one_slot(monkeypatch):
    monkeypatch.setenv("GDN_DEBUG", "1")
    x, rows = pool(), torch.tensor([3, 3])
    with pytest.raises(ValueError, match="read_index: expected a slot of its own .* slot 3 for rows 0 and 1"):
        api.decode_with_history(**inputs(2, 1, **SIZES), pool=x, read_index=rows, use_history=True)
    with pytest.raises(ValueError, match="index: expected a slot of its own"):
        api.fold_history(x, rows)


def test_sizes_are_checked():
    sizes = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 12}
    for change, message in (
        ({"places": 33}, "places: expected 2 to 32, got 33"),
        ({"head_k_dim": 0}, "head_k_dim: expected at least 1, got 0"),
        ({"num_k_heads": 3}, "num_v_heads: expected a multiple of num_k_heads=3, got 2"),
        ({"state_dtype": torch.int32}, "state_dtype: expected one of"),
        ({"history_dtype": torch.int16}, "history_dtype: expected one of"),
        ({"room": 9}, "room: expected 1 to 8, half of 16 places, got 9"),
        ({"decay": "row"}, "decay: expected one of"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            gdn.allocate_history_pool(2, **sizes | change)
    with pytest.raises(ValueError, match="room: expected at least 2, the most tokens of a row, got 1"):
        api.decode_with_history(**inputs(2, 2, **SIZES), pool=pool())


def test_no_history_is_kept_on_a_cpu_by_itself():
    x = pool()
    api.decode_with_history(**inputs(2, 1, **SIZES), pool=x)
    assert not x.cursor.any() and x.explain(2, dtype=F32).startswith("eager: writes every state (2 rows x 2")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "state, kept, places, tokens",
    [(F32, BF16, 16, 1), (BF16, BF16, 32, 1), (F32, BF16, 12, 4), (torch.int8, BF16, 16, 1)],
)
def test_a_graph_of_steps_over_several_folds(state, kept, places, tokens):
    """A captured step, replayed over folds of rows at different cursors, equals the calls made one by one."""
    sizes = {"H": 16, "HV": 32, "K": 128, "V": 128}
    x = pool(places, tokens, state, BF16, device="cuda", slots=80, **sizes)
    x.cursor[:, 0] = torch.arange(80, device="cuda") % places
    alone, given = on(x, "cuda"), moved(inputs(64, tokens, **sizes, dtype=BF16, raw=True), "cuda")
    given |= {"read_index": torch.randperm(80, device="cuda")[:64].int()}
    if tokens > 1:
        given["num_accepted"] = torch.zeros(64, dtype=torch.int32, device="cuda")

    def step(p):
        return api.decode_with_history(**given, pool=p, use_history=True, backend="triton")

    step(on(x, "cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(x)
    for n in range(40):
        for name in ("q", "k", "v", "a", "b"):
            given[name].normal_()
        given["read_index"].copy_(torch.randperm(80, device="cuda")[:64])
        if tokens > 1:
            given["num_accepted"].random_(0, tokens + 1)
        if n == 20:
            x.reset(given["read_index"][:5])
            alone.reset(given["read_index"][:5])
        graph.replay()
        with nothing_waits():
            expected = step(alone)
        assert same_bits(o, expected), n
        assert all(same_bits(y, z) for y, z in zip(x.tensors(), alone.tensors(), strict=True)), n


@pytest.mark.gpu
@pytest.mark.parametrize("state", [F32, BF16])
def test_large_batches_agree_with_decode(state):
    """A batch that fills the GPU, decoded over two folds, agrees with plain decode in fp32 states."""
    sizes = {"H": 16, "HV": 32, "K": 128, "V": 128}
    x = pool(16, 1, state, BF16, device="cuda", slots=96, **sizes)
    x.state.div_(12)
    # a copy: `float` returns the pool's own state in fp32, which both calls would then advance
    plain = x.state.to(F32, copy=True)
    x.cursor[:, 0] = torch.arange(96, device="cuda") % 16
    for _ in range(33):
        given = moved(inputs(96, 1, **sizes, dtype=BF16, raw=True), "cuda")
        o = api.decode_with_history(**given, pool=x, backend="triton")
        assert error(o, api.decode(**given, state=plain, backend="triton")) <= (
            5e-3 if state == F32 else 1e-2
        )
    assert not bool((x.cursor[:, 1] == 0).any()), "appended by itself"


def make_steps(rows, state, is_step, device):
    """Return a function that draws a call's arguments, and a pool, at 16/32 heads of 128 x 128.

    Slots have histories of any length, in rings that wrap. Each call has other slots; some rows have none.
    """
    H, HV, D, places, slots = 16, 32, 128, 16, rows + 8
    with torch.device(device):
        x = gdn.allocate_history_pool(
            slots, num_k_heads=H, num_v_heads=HV, head_k_dim=D, head_v_dim=D, places=places,
            state_dtype=state, state_v_first=True,
        )  # fmt: skip
        x.state.normal_().div_(12)
        x.history_u.normal_().div_(4)
        x.history_k.normal_()
        x.cursor[:, 0], x.cursor[:, 1] = torch.arange(slots) % places, 5 * torch.arange(slots) % places
        # sums of g in the order of the tokens
        token = (torch.arange(places) - x.cursor[:, :1]) % places
        x.history_G.copy_(-token[:, :, None] / 16.0)
        layer, options = step_of(rows, H, HV, D, D, 4, BF16, slots=slots) if is_step else ({}, {})
        layer.pop("state", None)

    def draw():
        with torch.device(device):
            index = torch.randperm(slots)[:rows].int()
            index[::7], index[3::11] = -1, slots
            if not is_step:
                return inputs(rows, 1, H, HV, D, D, BF16, raw=True) | {"read_index": index}
            fresh = {name: torch.randn_like(layer[name]) for name in ("mixed_qkv", "a", "b")}
            windows = torch.randn_like(layer["conv_state"])
            return layer | options | fresh | {"conv_state": windows, "read_index": index}

    return draw, x


def call(x, given, backend):
    """Run one token of each row, or a layer's whole step on windows of its own."""
    if "conv_state" in given:
        given = given | {"conv_state": given["conv_state"].clone()}
        return api.decode_step(**given, state=x, use_history=True, backend=backend)
    return api.decode_with_history(**given, pool=x, use_history=True, backend=backend)


def check_same_bits(first, second, rows, state, steps, is_step, device):
    """Demand the same bits of outputs and pools of two backends after each of some steps."""
    draw, x = make_steps(rows, state, is_step, device)
    y = on(x, device)
    for n in range(steps):
        given = draw()
        assert equal_bits(call(x, given, first), call(y, given, second)), n
        assert all(map(equal_bits, x.tensors(), y.tensors())), n
    assert not x.cursor[:, 2].any()


def check_graph(first, second, rows, state, replays, graph_of):
    """Demand the bits of a second backend's calls from a captured call of the first one, at each replay."""
    draw, x = make_steps(rows, state, False, "cuda")
    y, given = on(x, "cuda"), draw()
    call(on(x, "cuda"), given, first)
    replay, o = graph_of(lambda: call(x, given, first))
    for n in range(replays):
        for name, value in draw().items():
            given[name].copy_(value)
        replay()
        assert equal_bits(o(), call(y, given, second)), n
        assert all(map(equal_bits, x.tensors(), y.tensors())), n


def equal_bits(x, y):
    """Compare as `same_bits`, on the device."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.view(kind), y.view(kind))


def captured(function):
    """Return the replay of a function's CUDA graph, and a function that returns its output."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = function()
    return graph.replay, lambda: o


def kernels_launched(plans):
    """Return the names of the kernels in a cache of plans."""
    all_launches = [getattr(plan, "launches", None) or [plan.launch] for plan in plans.plans.values()]
    return {one.kernel.fn.__name__ for some in all_launches for one in some}


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="expected sm_90"
)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("is_step", [False, True], ids=["decode_with_history", "decode_step"])
@pytest.mark.parametrize("state", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [40, 300])
def test_hopper_has_the_bits_of_triton(monkeypatch, rows, state, is_step):
    """The persistent kernel has the bits of Triton's over 40 steps, with folds of some rows in each."""
    from gdn.backends.triton.launch import PlanCache
    from gdn.backends.triton.serving import history, step
    from gdn.ops import fastpath

    plans = PlanCache()
    monkeypatch.setattr(step if is_step else history, "_plans", plans)
    monkeypatch.setattr(fastpath, "_calls", {})
    check_same_bits("hopper", "triton", rows, state, 40, is_step, "cuda")
    assert {"decode_with_history_kernel", "history_kernel"} <= kernels_launched(plans)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("state", [F32, BF16], ids=["fp32", "bf16"])
def test_a_graph_on_hopper_has_the_bits_of_triton(state):
    """A captured step, replayed 100 times on other tokens and slots, has the bits of Triton's calls."""
    check_graph("hopper", "triton", 64, state, 100, captured)


def test_examples_run():
    assert doctest.testmod(gdn.ops.history).failed == 0
