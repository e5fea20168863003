"""Test pools in int16 with a scale per column of V: the rounding, the functions that take one, the drift."""

import doctest
import itertools

import pytest
import torch
from kit import api
from kit.api import reference
from kit.serving import (
    NAMES,
    SLOTS,
    B,
    T,
    error,
    inputs,
    moved,
    pool_of,
    protocols,
    same_bits,
    step_of,
)

import gdn
import gdn.ops.int16
from gdn.reference.integers import LEVELS, StoredStates, round_columns

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
LAYOUTS = [True, False]
# a state differs from the reference's by at most the distance of two integers, where their inputs differ
ONE_STEP = 1.1


def rounded(states, v_first=True):
    """Return an Int16Pool of states, rounded as the reference does."""
    n, scale = round_columns((states.mT if v_first else states).double())
    return gdn.Int16Pool((n.mT if v_first else n).contiguous(), scale)


def copy(pool, device="cpu"):
    return gdn.Int16Pool(pool.state.to(device, copy=True), pool.column_scale.to(device, copy=True))


def states_of(pool, v_first=True):
    """Return the states of a pool in fp64, with K first."""
    held = StoredStates(pool.state.cpu(), pool.column_scale.cpu(), v_first, F64)
    return held.read(slice(None))


def steps_apart(pool, expected, v_first=True):
    """Return by how many scales the states of two pools differ at most."""
    distance = (states_of(pool, v_first) - states_of(expected, v_first)).abs().amax(-2)
    return float((distance / expected.column_scale.clamp(min=1e-30)).max())


def run(x, backend, device, v_first=True, **options):
    """Decode on copies on a device; return o, the pool and intermediate."""
    given = {k: y.to(device, copy=True) if isinstance(y, torch.Tensor) else y for k, y in x.items()}
    given["state"] = pool = copy(x["state"], device)
    o = api.decode(**given, backend=backend, state_v_first=v_first, **options)
    return o.cpu(), copy(pool), given.get("intermediate")


def expect(x, function=reference.decode, v_first=True, **options):
    """Return the reference of a call, and its pool."""
    pool = x["state"]
    given = x | {"state": pool.state, "column_scale": pool.column_scale}
    done = function(**given, state_v_first=v_first, **options)
    return done, gdn.Int16Pool(done.state, done.column_scale)


FEW = {("P1", True), ("P2", False)}  # what is interpreted


@pytest.mark.parametrize(
    "name, v_first",
    [
        pytest.param(*case, marks=[pytest.mark.interpret] if case in FEW else [])
        for case in itertools.product(NAMES, LAYOUTS)
    ],
)
def test_protocol(backend, device, poison, name, v_first):
    x = inputs(B, T) | protocols(torch.int32, v_first)[name]
    x["state"] = rounded(x["state"], v_first)
    want, pool = expect(x, v_first=v_first)
    o, got, kept = run(x, backend, device, v_first)
    # a step of one rounding, and of each of T with round_state
    limit, steps = (1e-5, T) if x.get("round_state") else (1e-6, 1)
    assert error(o, want.o) <= limit
    assert steps_apart(got, pool, v_first) <= steps * ONE_STEP
    assert error(got.column_scale, pool.column_scale) <= limit
    if kept is not None:
        assert error(kept, want.extra) <= 5e-3
    untouched = (pool.state == x["state"].state).flatten(1).all(1)
    assert same_bits(got.state[untouched], pool.state[untouched])
    assert same_bits(got.column_scale[untouched], pool.column_scale[untouched])


def test_the_states_differ_where_the_scale_is_lost(backend, device):
    x = inputs(B, T) | protocols(torch.int32)["index"]
    x["state"] = rounded(x["state"])
    want, pool = expect(x)
    o, got, _ = run(
        x | {"state": gdn.Int16Pool(pool.state, torch.ones_like(pool.column_scale))}, backend, device
    )
    assert error(o, want.o) > 1
    assert steps_apart(x["state"], pool) > ONE_STEP, "the decode did not write"


@pytest.mark.interpret
def test_a_packet_equals_its_steps_with_round_state(backend, device):
    sizes = {"HV": 2, "K": 16, "V": 8}
    x, pool = inputs(2, 3, H=1, **sizes), rounded(pool_of(2, **sizes))
    o, whole, _ = run(x | {"state": pool}, backend, device, round_state=True)
    single, outputs = pool, []
    for t in range(3):
        token = {name: y[:, t : t + 1] for name, y in x.items()}
        one, single, _ = run(token | {"state": single}, backend, device)
        outputs.append(one)
    assert same_bits(o, torch.cat(outputs, 1))
    assert same_bits(whole.state, single.state) and same_bits(whole.column_scale, single.column_scale)


@pytest.mark.interpret
def test_special_columns(backend, device):
    # a token that writes nothing: what is read is what is stored, whatever the column holds
    x = inputs(1, 1, HV=2) | {"g": torch.zeros(1, 1, 2), "beta": torch.zeros(1, 1, 2)}
    x["k"], x["q"] = torch.zeros_like(x["k"]), torch.ones_like(x["q"])
    states = torch.randn(1, 2, 24, 16)
    states[0, 0, 0] = 0
    states[0, 0, 1] = 1e-40
    states[0, 0, 2, :15] = 0
    states[0, 0, 3] = -states[0, 0, 3].abs()
    pool = rounded(states)
    pool.column_scale[0, 1, 5] = NAN
    o, after, _ = run(x | {"state": pool}, backend, device)
    assert same_bits(after.column_scale, pool.column_scale)
    # the integers of a column that reads as NaN do not count
    after.state[0, 1, 5] = pool.state[0, 1, 5] = 0
    assert same_bits(after.state, pool.state)
    assert o[0, 0].isnan().nonzero().tolist() == [[1, 5]]
    assert (pool.state[0, 0, :2] == 0).all() and (pool.column_scale[0, 0, :2] == 0).all()
    assert pool.state[0, 0, 2, 15].abs() == LEVELS and pool.state[0, 0, 3].min() == -LEVELS


@pytest.mark.interpret
def test_infinity_makes_a_column_nan(backend, device):
    x, pool = inputs(1, 1, HV=2), rounded(pool_of(1, HV=2))
    x["v"][0, 0, 1, 7] = INF
    _, after, _ = run(x | {"state": pool}, backend, device)
    assert after.column_scale[0].isnan().nonzero().tolist() == [[1, 7]]


def test_rounding_is_that_of_the_reference():
    states, pool = pool_of(4, dtype=F64), gdn.allocate_int16_pool(
        5, num_v_heads=4, head_k_dim=16, head_v_dim=24, state_v_first=True
    )  # fmt: skip
    states[0, 0, 0], states[0, 1, 2], states[1, 2, 3, 4], states[2, 0, 5, 6] = 0, 1e-35, NAN, -INF
    states[3, 1, 1, 2] = 1e39
    expected = rounded(states)
    pool.write(torch.tensor([3, 0, 4, 1]), states, state_v_first=True)
    assert same_bits(pool.state[[3, 0, 4, 1]], expected.state)
    assert torch.equal(pool.column_scale[[3, 0, 4, 1]].nan_to_num(-1), expected.column_scale.nan_to_num(-1))
    assert not pool.state[2].any() and pool.column_scale.isnan().sum() == 3
    back = pool.read(torch.tensor([3, 0, 4, 1]), state_v_first=True, dtype=F64)
    finite = ~back.isnan()
    assert finite.logical_not().sum() == 3 * 16
    limit = states.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True) / (2 * LEVELS)
    assert ((back - states).abs() <= limit * (1 + 1e-6) + 2.0**-100)[finite].all()


@pytest.mark.parametrize("slots", [(2, -1, 5, 0), (5, -3, 7, -1)], ids=["some", "none"])
def test_slots_outside_a_pool_are_skipped(slots):
    """A slot below 0 or past the pool reads as zeros and is not written, as in the functions on a pool."""
    pool = gdn.allocate_int16_pool(5, num_v_heads=4, head_k_dim=16, head_v_dim=24)
    pool.write(torch.arange(5), torch.randn(5, 4, 16, 24))
    before, states, index = copy(pool), torch.randn(4, 4, 16, 24), torch.tensor(slots)
    pool.write(index, states)
    for slot in range(5):
        if slot in slots:
            assert error(pool.read(torch.tensor([slot]))[0], states[slots.index(slot)]) < 2e-5
        else:
            assert same_bits(pool.state[slot], before.state[slot])
            assert same_bits(pool.column_scale[slot], before.column_scale[slot])
    found = pool.read(index).flatten(1).any(1)
    assert found.tolist() == [0 <= slot < 5 for slot in slots]


def test_reading_and_storing_again_keeps_the_bits():
    # every mantissa is too slow here: the first, the last and some thousands of others
    largest = torch.cat(
        (torch.arange(2**14), torch.randint(0, 2**23, (2**14,)), 2**23 - 1 - torch.arange(64))
    )
    largest = (largest.int() | 127 << 23).view(F32)
    columns = torch.stack((largest, -largest / 3, largest * torch.rand(len(largest))), -1)
    pool = gdn.allocate_int16_pool(
        1, num_v_heads=1, head_k_dim=3, head_v_dim=len(largest), state_v_first=True
    )
    slot = torch.zeros(1, dtype=torch.int64)
    pool.write(slot, columns[None, None], state_v_first=True)
    once = copy(pool)
    pool.write(slot, pool.read(slot, state_v_first=True), state_v_first=True)
    assert same_bits(pool.state, once.state) and same_bits(pool.column_scale, once.column_scale)
    narrow = columns[None, None].bfloat16()
    pool.write(slot, narrow, state_v_first=True)
    assert error(pool.read(slot, state_v_first=True), narrow) < 2e-5


def drift(state, T=3000):
    """Return the relative RMS errors of o over the last 300 of T tokens against fp64, of each of two heads.

    The first head has no decay. The second one decays slowly, and nothing is written after 1,000 tokens.
    """
    torch.manual_seed(1)
    x = inputs(1, T, H=1, HV=2, K=32, V=32)
    x["g"], x["beta"] = torch.zeros(1, T, 2), torch.sigmoid(torch.randn(1, T, 2))
    x["g"][..., 1], x["beta"][:, 1000:, 1] = -1e-3, 0
    exact = {name: y.double() for name, y in x.items()}
    want = api.decode(**exact, state=torch.zeros(1, 2, 32, 32, dtype=F64), backend="eager")
    # round_state: bit for bit what T calls of one token write
    o = api.decode(**x, state=state, round_state=True, backend="eager")
    return [error(o[:, -300:, head], want[:, -300:, head]) for head in (0, 1)]


def test_the_error_after_3000_tokens_is_far_below_that_of_bf16():
    sizes = {"num_v_heads": 2, "head_k_dim": 32, "head_v_dim": 32, "state_v_first": True}
    no_decay, slow = drift(gdn.allocate_int16_pool(1, **sizes))
    assert no_decay < 3e-4
    # a decay of less than half a step of bf16 does not move a bf16 state; here it moves the scales
    assert slow < 1e-3
    no_decay, slow = drift(torch.zeros(1, 2, 32, 32, dtype=BF16))
    assert no_decay > 5e-3 and slow > 1


@pytest.mark.interpret
def test_packed_rows_and_the_layers_step(backend, device):
    options = {"H": 1, "HV": 2, "K": 16, "V": 16}
    x, sizes = step_of(4, W=4, **options)
    pool = rounded(x.pop("state"))
    names = ("mixed_qkv", "a", "b", "A_log", "dt_bias")
    packed = {name: x[name].to(device) for name in names} | {"read_index": x["read_index"].to(device)}
    mine = copy(pool, device)
    o = api.decode_packed(**packed, state=mine, backend=backend, **sizes)
    q, k, v = x["mixed_qkv"].split([16, 16, 32], 1)
    tokens = {"q": q.view(4, 1, 1, 16), "k": k.view(4, 1, 1, 16), "v": v.view(4, 1, 2, 16)}
    tokens |= {"a": x["a"][:, None], "b": x["b"][:, None], "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    tokens |= {"read_index": x["read_index"], "state": pool}
    want, expected = expect(tokens)
    assert error(o, want.o[:, 0]) <= 1e-6 and steps_apart(mine, expected) <= ONE_STEP

    given = moved(x, device)
    mine, windows = copy(pool, device), given["conv_state"].clone()
    o = api.decode_step(**given, state=mine, backend=backend, **sizes)
    mixed = gdn.causal_conv1d_update(
        given["mixed_qkv"][:, None], windows, given["conv_weight"], given["conv_bias"], activation="silu",
        state_index=given["read_index"], backend=backend,
    )[:, 0]  # fmt: skip
    parts = copy(pool, device)
    raw = api.decode_packed(**packed | {"mixed_qkv": mixed}, state=parts, backend=backend, **sizes)
    y = gdn.rms_norm_gated(raw, given["z"], given["norm_weight"], backend=backend)
    assert error(o, y) <= 1e-6
    assert same_bits(mine.state, parts.state) and same_bits(mine.column_scale, parts.column_scale)


def test_slots_of_an_engine_may_be_strided(backend, device):
    # state and scales of a slot side by side in one block of memory
    x = inputs(B, 1) | {"read_index": torch.tensor([7, 2, -1, 4, SLOTS])}
    pool = rounded(pool_of(SLOTS))
    block = torch.zeros(SLOTS, 4 * 24 * (16 * 2 + 4) + 64, dtype=torch.uint8, device=device)
    state = block[:, : 4 * 24 * 32].view(torch.int16).unflatten(1, (4, 24, 16))
    scale = block[:, 4 * 24 * 32 : 4 * 24 * 36].view(F32).unflatten(1, (4, 24))
    held = gdn.Int16Pool(state, scale)
    state.copy_(pool.state), scale.copy_(pool.column_scale)
    given = {name: y.to(device) for name, y in x.items()}
    o = api.decode(**given, state=held, backend=backend)
    o_dense, dense, _ = run(x | {"state": pool}, backend, device)
    assert same_bits(o, o_dense)
    assert same_bits(held.state, dense.state) and same_bits(held.column_scale, dense.column_scale)


@pytest.mark.parametrize(
    "v_first, is_per_channel",
    [
        pytest.param(True, False, marks=pytest.mark.interpret),
        pytest.param(False, True, marks=pytest.mark.interpret),
        (False, False),
        (True, True),
    ],
)
def test_prefill(backend, device, v_first, is_per_channel):
    sizes = {"HV": 2, "K": 16, "V": 8}
    pool = rounded(pool_of(SLOTS, **sizes, v_first=v_first), v_first)
    x = inputs(1, 140, H=1, **sizes, is_per_channel=is_per_channel) | {
        "cu_seqlens": torch.tensor([0, 70, 70, 140]), "state_index": torch.tensor([4, 1, 6]),
        "out_state_index": torch.tensor([4, 2, 0]), "has_initial_state": torch.tensor([True, True, False]),
        "checkpoints": torch.zeros(3, *pool.state.shape[1:]), "checkpoint_every": 64,
        "checkpoint_offsets": torch.tensor([0, -1, 1]), "snapshot_pos": torch.tensor([3, 0, 70]),
        "snapshot_index": torch.tensor([3, 5, 8]), "state": pool,
    }  # fmt: skip
    want, pool = expect(x, reference.prefill, v_first)
    mine, given = copy(x["state"], device), moved(x, device)
    o = api.prefill(**given | {"state": mine}, state_v_first=v_first, backend=backend)
    assert error(o, want.o) <= 1e-5 and error(given["checkpoints"], want.extra) <= 1e-5
    mine = copy(mine)
    assert steps_apart(mine, pool, v_first) <= ONE_STEP
    assert same_bits(mine.state[[1, 2, 6, 7]], x["state"].state[[1, 2, 6, 7]])
    # a snapshot of an initial state is read and stored again
    for held, given_pool in zip(vars(mine).values(), vars(x["state"]).values(), strict=True):
        assert same_bits(held[5], given_pool[1])
    # in place, a pool of floats is read and written by the rule's kernels; int16 is copied
    plain = {name: y for name, y in given.items() if not name.startswith(("checkpoint", "snapshot"))}
    again = copy(x["state"], device)
    api.prefill(**plain | {"state": again}, state_v_first=v_first, backend=backend)
    assert same_bits(copy(again).state[[0, 4]], mine.state[[0, 4]])


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_histories_fold_into_int16(decay):
    sizes = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 12}
    layout = {"places": 4, "history_dtype": F32, "state_v_first": True, "decay": decay}
    mine = gdn.allocate_history_pool(3, **sizes, **layout, state_dtype=torch.int16)
    wide = gdn.allocate_history_pool(3, **sizes, **layout)
    assert mine.bytes_per_slot == wide.bytes_per_slot - 2 * (2 * 16 * 12) + 4 * 2 * 12
    rows, plain = torch.tensor([2, 0]), gdn.allocate_int16_pool(
        3, num_v_heads=2, head_k_dim=16, head_v_dim=12, state_v_first=True
    )  # fmt: skip
    for step in range(9):
        x = inputs(2, 1, H=1, HV=2, K=16, V=12, is_per_channel=decay == "channel")
        expected = reference.decode_with_history(**x, pool=mine, read_index=rows, use_history=step != 6)
        o = api.decode_with_history(**x, pool=mine, read_index=rows, use_history=step != 6, backend="eager")
        o_wide = api.decode_with_history(**x, pool=wide, read_index=rows, use_history=True, backend="eager")
        assert error(o, expected[0]) <= 1e-6 and error(o, o_wide) <= 1e-3
        after = gdn.Int16Pool(expected[1].state, expected[1].column_scale)
        assert steps_apart(gdn.Int16Pool(mine.state, mine.column_scale), after) <= ONE_STEP
        api.decode(**x, state=plain, read_index=rows, backend="eager")
    api.fold_history(mine, rows, backend="eager")
    assert not mine.cursor.any() and not mine.state[1].any()
    got = states_of(gdn.Int16Pool(mine.state, mine.column_scale))
    assert error(got, states_of(plain)) <= 1e-3


@pytest.mark.parametrize(
    "kind, tokens, v_first, decay",
    [
        pytest.param("fp32", 1, True, "head", marks=pytest.mark.interpret),
        pytest.param("fp32", 1, False, "channel", marks=pytest.mark.interpret),
        ("fp32", 1, False, "head"),
        pytest.param("bf16", 3, True, "head", marks=pytest.mark.interpret),
        ("bf16", 3, False, "head"),
        ("bf16", 3, True, "channel"),
    ],
)
def test_kernels_of_histories_in_int16(backend, device, kind, tokens, v_first, decay):
    """Outputs, integers and scales are the reference's; a column with NaN keeps it to itself."""
    dtype = {"fp32": F32, "bf16": BF16}[kind]
    with torch.device(device):
        mine = gdn.allocate_history_pool(
            4, num_k_heads=1, num_v_heads=2, head_k_dim=40, head_v_dim=12, places=6, room=tokens,
            state_dtype=torch.int16, history_dtype=dtype, state_v_first=v_first, decay=decay,
        )  # fmt: skip
    start = rounded(pool_of(4, HV=2, K=40, V=12, v_first=v_first), v_first)
    start.state[1] = 0
    mine.state.copy_(start.state), mine.column_scale.copy_(start.column_scale)
    rows, options = torch.tensor([2, 0, 1, -1]), {"state_v_first": v_first, "use_qk_l2norm_in_kernel": True}
    for step in range(7):
        held = copy(mine)
        x = inputs(4, tokens, H=1, HV=2, K=40, V=12, dtype=dtype, is_per_channel=decay == "channel")
        if step == 4:
            x["v"][0, 0, 1, 5] = float("nan")
        more = {"num_accepted": torch.tensor([1, tokens, 0, 1])} if tokens > 1 else {"use_history": True}
        expected, after = reference.decode_with_history(
            **x, pool=on_cpu(mine), read_index=rows, **options, **more
        )
        given = moved(x | {"read_index": rows} | more, device)
        o = api.decode_with_history(**given, pool=mine, backend=backend, **options)
        assert error(o.nan_to_num().cpu(), expected.nan_to_num()) <= (1e-5 if dtype == F32 else 5e-3)
        assert torch.equal(o.isnan().cpu(), expected.isnan())
        agree_in_int16(mine, after, v_first, dtype)
        assert same_bits(copy(mine).state[3], held.state[3])
    before = on_cpu(mine)
    api.fold_history(mine, rows[:3].to(device), backend=backend, state_v_first=v_first)
    agree_in_int16(mine, reference.fold_history(before, rows[:3], state_v_first=v_first), v_first, dtype)
    assert not mine.cursor[:3, 1:].any() and mine.column_scale.isnan().nonzero().tolist() == [[2, 1, 5]]


def on_cpu(pool):
    """Return a copy of a pool of histories on the CPU."""
    held = {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in vars(pool).items()}
    return gdn.HistoryPool(**held)


def agree_in_int16(mine, expected, v_first, dtype):
    """Check states against others: within one step, or within the errors of u in 16 bits."""
    got, want = copy(mine), gdn.Int16Pool(expected.state, expected.column_scale)
    assert torch.equal(got.column_scale.isnan(), want.column_scale.isnan())
    known = gdn.Int16Pool(*(x.nan_to_num() for x in (got.state, got.column_scale)))
    other = gdn.Int16Pool(*(x.nan_to_num() for x in (want.state, want.column_scale)))
    if dtype == F32:
        assert steps_apart(known, other, v_first) <= ONE_STEP
    else:
        assert error(states_of(known, v_first), states_of(other, v_first)) <= 2e-3


def test_a_prefill_refuses_checkpoints_in_int16():
    pool = rounded(pool_of(3))
    before = copy(pool)
    x = inputs(1, 70) | {"cu_seqlens": torch.tensor([0, 70]), "state_index": torch.tensor([1])}
    x |= {"checkpoint_every": 64, "checkpoint_offsets": torch.tensor([0])}
    for wrong, message in (
        (pool, "checkpoints: expected a tensor, got Int16Pool"),
        (pool.state, "checkpoints: expected a tensor of float16, bfloat16, float32 or float64, got"),
    ):
        with pytest.raises(TypeError, match=message):
            api.prefill(**x, state=pool, checkpoints=wrong)
    with pytest.raises(ValueError, match="checkpoints: expected dtype torch.float32, got torch.bfloat16"):
        api.prefill(**x, state=pool, checkpoints=torch.zeros(1, 4, 24, 16, dtype=BF16))
    assert same_bits(pool.state, before.state) and same_bits(pool.column_scale, before.column_scale)


def test_refusals():
    x, pool = inputs(2, 1), rounded(pool_of(2))
    for wrong, message, kind in (
        (pool.state, "state: expected int16 with scales", TypeError),
        (gdn.Int16Pool(pool.state.int(), pool.column_scale), "state: expected int16 in an", TypeError),
        (gdn.Int16Pool(pool.state, pool.column_scale.half()), "column_scale: expected float32", TypeError),
        (gdn.Int16Pool(pool.state, pool.column_scale[:, :, :16]), "column_scale: expected shape", ValueError),
        (gdn.Int16Pool(pool.state, pool.column_scale[:1].expand(2, -1, -1)), "column_scale: expected memory",
         ValueError),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            api.decode(**x, state=wrong)
    with pytest.raises(TypeError, match="state: expected a tensor, got Int16Pool"):
        api.decode_functional(**x, state=pool)
    history = (torch.zeros(2, 4, 4, 24), torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 4), torch.zeros(2).int())
    names = ("history_u", "history_k", "history_G", "cursor")
    with pytest.raises(TypeError, match="state: expected a tensor, got Int16Pool"):
        api.replay_decode(**x, state=pool, **dict(zip(names, history, strict=True)))
    with pytest.raises(ValueError, match="states: expected shape"):
        pool.write(torch.tensor([0]), torch.zeros(1, 4, 16, 24), state_v_first=True)
    with pytest.raises(TypeError, match="index: expected an int32 or int64 tensor"):
        pool.read(torch.tensor([0.0]), state_v_first=True)
    sizes = {"num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 24}
    for lead, change, match in (
        ((2.0,), {}, r"lead\[0\]: expected an int"), ((2, -1), {}, r"lead\[1\]: expected at least 0"),
        ((), {}, "expected slots"), ((2,), {"head_v_dim": 0}, "head_v_dim: expected at least 1"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=match):
            gdn.allocate_int16_pool(*lead, **sizes | change)


def test_examples_and_bytes():
    assert doctest.testmod(gdn.ops.int16).failed == 0
    pool = gdn.allocate_int16_pool(2, 5, num_v_heads=4, head_k_dim=128, head_v_dim=128)
    assert pool[1].state.shape == (5, 4, 128, 128) and pool[1].bytes_per_slot == pool.bytes_per_slot
    assert pool.bytes_per_slot == 4 * 128 * (2 * 128 + 4)
