"""Test histories on states in int8 with a remainder of 4 bits: rounding, tokens, folds, drift, refusals."""

import pytest
import torch
from conftest import GPU
from kit import api
from kit.api import reference
from kit.serving import error, inputs, moved, nothing_waits, same_bits

import gdn
from gdn.reference.integers import StoredStates, join_integers, largest_integer, round_columns, split_integers

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
NAN = float("nan")
SLOTS, PLACES = 4, 6
SIZES = {"H": 1, "HV": 2, "K": 24, "V": 12}
# a fold differs from the reference's by at most the distance of two integers, where their inputs differ
ONE_STEP = 1.1


def pool(
    device="cpu", room=1, kept=F32, v_first=True, has_remainder=True, slots=SLOTS, places=PLACES, **sizes
):
    """Return a pool of random states with empty histories."""
    s = SIZES | sizes
    x = gdn.allocate_history_pool(
        slots, num_k_heads=s["H"], num_v_heads=s["HV"], head_k_dim=s["K"], head_v_dim=s["V"], places=places,
        room=room, state_dtype=torch.int8, history_dtype=kept, with_remainder=has_remainder,
        state_v_first=v_first, device=device,
    )  # fmt: skip
    x.write(
        torch.arange(slots, device=device), torch.randn(x.state.shape, device=device), state_v_first=v_first
    )
    return x


def copy(x, device="cpu"):
    """Return a copy of a pool on a device."""
    held = {name: y.to(device, copy=True) if torch.is_tensor(y) else y for name, y in vars(x).items()}
    return gdn.HistoryPool(**held)


def written(x):
    """Return the tensors of a pool that a fold writes."""
    return [y for y in (x.state, x.column_scale, x.remainder) if y is not None]


def states_of(x, v_first=True):
    """Return the states of a pool, remainders included, in fp64, with K first."""
    return StoredStates(x.state, x.column_scale, v_first, F64, x.remainder).read(slice(None))


def steps_apart(x, expected, v_first=True):
    """Return by how many steps of the last bit the states of two pools differ at most, NaN aside."""
    distance = (states_of(x, v_first) - states_of(expected, v_first)).abs().amax(-2)
    return float((distance / expected.column_scale.clamp(min=1e-30)).nan_to_num().max())


CASES = {  # dtype of the tokens, tokens, keys, layout, remainder
    "fp32": (F32, 1, 24, True, True),
    "bf16, K first": (BF16, 1, 24, False, True),
    "odd keys": (F32, 1, 17, True, True),
    "bf16 drafts": (BF16, 2, 24, True, True),
    "odd keys first, drafts": (F32, 2, 17, False, True),
    "int8 alone": (BF16, 1, 24, True, False),
    "int8 alone, K first": (F32, 1, 24, False, False),
}
FEW = {"bf16, K first", "odd keys"}  # what is interpreted


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.interpret] if name in FEW else []) for name in CASES]
)
def test_tokens_and_folds(backend, device, name):
    """Outputs and states are the reference's over a fold; a column with NaN keeps it to itself."""
    dtype, T, K, v_first, has_remainder = CASES[name]
    mine = pool(room=T, kept=dtype, v_first=v_first, has_remainder=has_remainder, K=K, places=4)
    rows, options = torch.tensor([2, 0, -1]), {"state_v_first": v_first, "use_qk_l2norm_in_kernel": True}
    for step in range(5):
        x = inputs(3, T, **SIZES | {"K": K}, dtype=dtype)
        if step == 1:
            x["v"][0, 0, 1, 5] = NAN
        drafts = {"num_accepted": torch.tensor([1, T, 0])} if T > 1 else {}
        where = {"read_index": rows} | drafts
        want, after = reference.decode_with_history(**x, pool=mine, **where, **options)
        got = copy(mine, device)
        o = api.decode_with_history(**moved(x | where, device), pool=got, backend=backend, **options).cpu()
        got = copy(got)
        assert error(o.nan_to_num(), want.nan_to_num()) <= (1e-5 if dtype == F32 else 5e-3)
        assert torch.equal(o.isnan(), want.isnan()) and torch.equal(got.cursor, after.cursor)
        agree(got, after, v_first, dtype)
        unread = [same_bits(a[[1, 3]], b[[1, 3]]) for a, b in zip(written(got), written(mine), strict=True)]
        assert all(unread)
        mine = got
    before, folded = copy(mine), copy(mine, device)
    api.fold_history(folded, rows.to(device), backend=backend, state_v_first=v_first)
    folded = copy(folded)
    agree(folded, reference.fold_history(before, rows, state_v_first=v_first), v_first, dtype)
    assert not folded.cursor[:, 1:].any() and folded.column_scale.isnan().nonzero().tolist() == [[2, 1, 5]]
    # an empty history is not folded: all bits stay
    again = copy(folded, device)
    api.fold_history(again, rows.to(device), backend=backend, state_v_first=v_first)
    assert all(same_bits(a, b) for a, b in zip(written(again), written(folded), strict=True))


def agree(got, expected, v_first, dtype):
    """Check states after a call: within one step of the last bit, or within the errors of u in 16 bits."""
    assert torch.equal(got.column_scale.isnan(), expected.column_scale.isnan())
    if dtype == F32:
        assert steps_apart(got, expected, v_first) <= ONE_STEP
    else:
        x, y = (states_of(z, v_first).nan_to_num() for z in (got, expected))
        assert error(x, y) <= (2e-3 if got.remainder is not None else 1e-2)


@pytest.mark.interpret
def test_a_fold_without_writes_keeps_the_bits(backend, device):
    """Tokens with beta = 0 and g = 0: folds read and store the same integers, remainders and scales."""
    x, zeros = pool(places=2, slots=1), torch.zeros(1, 1, 2)
    given = inputs(1, 1, **SIZES) | {"beta": zeros, "g": zeros}
    mine = copy(x, device)
    for _ in range(3):
        api.decode_with_history(**moved(given, device), pool=mine, backend=backend)
    assert int(mine.cursor[0, 1]) == 1
    assert all(same_bits(a, b) for a, b in zip(written(mine), written(x), strict=True))


def test_only_folds_read_the_remainder(backend, device):
    x, given = pool(device), moved(inputs(SLOTS, 1, **SIZES), device)
    other = copy(x, device)
    other.remainder.zero_()
    outputs = [api.decode_with_history(**given, pool=y, backend=backend) for y in (x, other)]
    assert same_bits(*outputs)
    for y in (x, other):
        api.fold_history(y, torch.arange(SLOTS, device=device), backend=backend)
    assert not same_bits(x.remainder, other.remainder)


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("K, has_remainder", [(24, True), (17, True), (17, False)])
def test_rounding_is_that_of_the_reference(v_first, K, has_remainder):
    x = pool(v_first=v_first, K=K, has_remainder=has_remainder)
    states = torch.randn(x.state.shape, dtype=F64)
    states[0, 0, 0], states[1, 1, 2, 3], states[2, 0, 1, 1] = 0, NAN, 1e39
    expected = copy(x)
    held = StoredStates(expected.state, expected.column_scale, v_first, F64, expected.remainder)
    for slot in range(SLOTS):
        held.write(slot, states[slot].mT if v_first else states[slot])
    x.cursor.fill_(1)
    x.write(torch.arange(SLOTS), states, state_v_first=v_first)
    assert torch.equal(x.column_scale.nan_to_num(-1), expected.column_scale.nan_to_num(-1))
    assert same_bits(x.state, expected.state) and not x.cursor.any()
    assert not has_remainder or same_bits(x.remainder, expected.remainder)
    back = x.read(torch.arange(SLOTS), state_v_first=v_first, dtype=F64)
    most = largest_integer(x.state, x.remainder)
    limit = states.abs().nan_to_num(0, 0, 0).amax(-1 if v_first else -2, keepdim=True) / (2 * most)
    assert ((back - states).abs() <= limit * (1 + 1e-6))[~back.isnan()].all()
    # states in fp32, whose scales a division has made, come back bit for bit
    slots = torch.arange(SLOTS)
    x.write(slots, back.nan_to_num().float(), state_v_first=v_first)
    before = copy(x)
    x.write(slots, x.read(slots, state_v_first=v_first), state_v_first=v_first)
    assert all(same_bits(a, b) for a, b in zip(written(x), written(before), strict=True))


def test_all_integers_and_scales_come_back():
    """Each of the 3,811 integers splits and joins; a scale that a division made is made again."""
    n = torch.arange(-1905, 1906, dtype=torch.int16)[:, None]
    high, packed = split_integers(n)
    assert (
        high.abs().max() == 127 and packed.shape == (1906, 1) and torch.equal(join_integers(high, packed), n)
    )
    mantissas = torch.cat(
        (torch.arange(2**14), torch.randint(0, 2**23, (2**15,)), 2**23 - 1 - torch.arange(64))
    )
    largest = (mantissas.int() | 127 << 23).view(F32)
    for most in (127, 1905):
        _, scale = round_columns(largest[None].double(), most)
        _, again = round_columns((most * scale)[None].double(), most)
        assert same_bits(scale, again)


def test_the_error_of_o_stays_bounded():
    """320 tokens without decay: 12 bits are nearer than bf16 written every token, int8 alone is as far."""
    torch.manual_seed(2)
    T, sizes = 320, {"H": 1, "HV": 1, "K": 32, "V": 32}
    x = inputs(1, T, **sizes)
    x["g"], x["beta"] = torch.zeros(1, T, 1), torch.sigmoid(torch.randn(1, T, 1))
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    exact = {name: y.double() for name, y in x.items()}
    want = api.decode(**exact, state=torch.zeros(1, 1, 32, 32, dtype=F64), backend="eager")

    def errors(step):
        o = torch.cat([step({name: y[:, t : t + 1] for name, y in x.items()}) for t in range(T)], 1)
        return [error(o[:, a : a + 100], want[:, a : a + 100]) for a in (120, 220)]

    found = {}
    for has_remainder in (True, False):
        mine = pool(slots=1, places=17, has_remainder=has_remainder, **sizes)
        mine.write(torch.tensor([0]), torch.zeros(1, 1, 32, 32), state_v_first=True)
        found[has_remainder] = errors(
            lambda y, p=mine: api.decode_with_history(**y, pool=p, state_v_first=True, backend="eager")
        )
    state = torch.zeros(1, 1, 32, 32, dtype=BF16)
    rounded = errors(lambda y: api.decode(**y, state=state, backend="eager"))
    assert max(found[True]) < 8e-3 and max(found[False]) < 1.6e-2 and min(rounded) > max(found[True])
    assert found[True][1] < 1.3 * found[True][0], "the error does not grow"


def test_states_of_a_prefill(backend, device):
    """prefill writes rows in fp32, `write` rounds them into slots, and decoding goes on from there."""
    sizes = {"H": 1, "HV": 2, "K": 24, "V": 12}
    mine, rows = pool(device), torch.tensor([3, 1], device=device)
    prompts, offsets = inputs(1, 70, **sizes), torch.tensor([0, 40, 70])
    states = torch.zeros(2, 2, 12, 24, device=device)
    given = moved(prompts | {"cu_seqlens": offsets, "state_index": torch.arange(2)}, device)
    api.prefill(**given, state=states, state_v_first=True, backend=backend)
    mine.cursor.fill_(3)
    mine.write(rows, states, state_v_first=True)
    assert mine.cursor[:, 1].tolist() == [3, 0, 3, 0]
    x = inputs(2, 1, **sizes)
    where = {"read_index": rows.cpu(), "state_v_first": True}
    want, _ = reference.decode_with_history(**x, pool=copy(mine), **where)
    o = api.decode_with_history(**moved(x | where, device), pool=mine, backend=backend)
    assert error(o, want) <= 1e-5
    plain = api.decode(**moved(x, device), state=states, state_v_first=True, backend=backend)
    assert error(o, plain) <= 2e-2
    held, none = copy(mine), torch.tensor([-1, SLOTS], device=device)
    mine.write(none, states, state_v_first=True)
    assert all(same_bits(a, b) for a, b in zip(written(mine), written(held), strict=True))
    assert not mine.read(none, state_v_first=True).any()


PREFILLS = {  # dtype of the states, keys, layout, remainder, decay per key channel
    "int8": (torch.int8, 24, True, True, False),
    "int8, odd keys first": (torch.int8, 17, False, True, False),
    "int8, one key": (torch.int8, 1, True, True, False),
    "int8 alone": (torch.int8, 24, True, False, False),
    "int8, channels": (torch.int8, 24, False, True, True),
    "int16": (torch.int16, 24, True, False, False),
    "fp32": (F32, 32, True, False, False),
    "bf16, K first": (BF16, 24, False, False, False),
}
INTERPRETED_PREFILLS = {"int8", "int8, odd keys first", "fp32"}


def prompts_on(x, K, is_per_channel, has_more=True):
    """Return a prefill of a pool of nine slots.

    A slot is continued, one is read by two prompts, one is new, one sequence is empty, one has no slot.
    """
    offsets = torch.tensor([0, 67, 70, 72, 140, 140, 143])
    given = inputs(1, 143, **SIZES | {"K": K}, is_per_channel=is_per_channel) | {
        "cu_seqlens": offsets, "state_index": torch.tensor([3, 1, 1, 5, 2, -1]),
        "out_state_index": torch.tensor([3, 0, 7, 5, 2, 4]),
        "has_initial_state": torch.tensor([True, True, True, False, True, True]),
    }  # fmt: skip
    if has_more:
        given |= {
            "checkpoints": torch.full((3, *x.state.shape[1:]), NAN), "checkpoint_every": 64,
            "checkpoint_offsets": torch.tensor([0, -1, -1, 1, -1, 2]),
            "snapshot_pos": torch.tensor([-1, 4, 1, 65, 0, 0]),
            "snapshot_index": torch.tensor([4, 4, 6, 9, 8, 4]),
        }  # fmt: skip
    return given


@pytest.mark.parametrize("has_more", [True, False], ids=["checkpoints", "plain"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.interpret] if name in INTERPRETED_PREFILLS else [])
        for name in PREFILLS
    ],
)
def test_prefill(backend, device, name, has_more):
    """Fold the histories that are continued, store the reference's states, and empty their histories."""
    dtype, K, v_first, has_remainder, is_per_channel = PREFILLS[name]
    options = {"state_v_first": v_first, "use_qk_l2norm_in_kernel": True}
    mine = gdn.allocate_history_pool(
        9, num_k_heads=1, num_v_heads=2, head_k_dim=K, head_v_dim=12, places=PLACES, state_dtype=dtype,
        history_dtype=F32, with_remainder=has_remainder, state_v_first=v_first,
        decay="channel" if is_per_channel else "head",
    )  # fmt: skip
    mine.write(torch.arange(9), torch.randn(mine.state.shape), state_v_first=v_first)
    for _ in range(2):
        token = inputs(9, 1, **SIZES | {"K": K}, is_per_channel=is_per_channel)
        api.decode_with_history(**token, pool=mine, use_history=True, backend="eager", **options)
    if mine.column_scale is not None:
        mine.column_scale[5] = NAN
    before, mine = copy(mine), copy(mine, device)
    x = prompts_on(before, K, is_per_channel, has_more)
    folded = copy(before, device)
    api.fold_history(folded, torch.tensor([3, 1, 2], device=device), backend=backend, state_v_first=v_first)
    folded = copy(folded)
    scales = {"column_scale": folded.column_scale, "remainder": folded.remainder}
    want = reference.prefill(**x, state=folded.state, **scales, **options)
    after = gdn.HistoryPool(**vars(folded) | {"state": want.state, "column_scale": want.column_scale,
                                              "remainder": want.remainder})  # fmt: skip

    given = moved(x, device)
    o = api.prefill(**given, state=mine, backend=backend, **options)
    got = copy(mine)
    assert error(o.cpu(), want.o) <= 1e-5
    if has_more:
        kept = given["checkpoints"].cpu()
        assert error(kept[:2], want.extra[:2]) <= 1e-5 and kept[2].isnan().all()
    written = [0, 3, 5, 7] + ([6, 8] if has_more else [])
    assert torch.equal(got.cursor[:, 1] == 0, torch.tensor([i in (1, 2, *written) for i in range(9)]))
    assert not got.cursor[written].any()
    if dtype in (F32, BF16):
        assert error(got.state, after.state) <= (1e-5 if dtype == F32 else 4e-3)
    else:
        assert not got.column_scale.isnan().any() and steps_apart(got, after, v_first) <= ONE_STEP
    # what is read only is folded, and what is neither keeps its bits and its history
    read, rest = [1, 2], [4] if has_more else [4, 6, 8]
    for a, b, c in zip(*(tensors_of(y) for y in (got, folded, before)), strict=True):
        assert same_bits(a[read], b[read]) and same_bits(a[rest], c[rest])

    token = inputs(9, 1, **SIZES | {"K": K}, is_per_channel=is_per_channel)
    expected, _ = reference.decode_with_history(**token, pool=got, **options)
    o = api.decode_with_history(
        **moved(token, device), pool=mine, use_history=True, backend=backend, **options
    )
    assert error(o.cpu(), expected) <= 1e-5


def tensors_of(x):
    """Return all tensors of a pool."""
    return [y for y in vars(x).values() if torch.is_tensor(y)]


def test_prefill_on_a_graph_of_operators(backend, device):
    """The operator writes states, scales, remainders and cursors where a compiler traces it."""
    mine = pool(device, slots=9)
    other, x = copy(mine, device), moved(prompts_on(mine, 24, False), device)
    kept = x["checkpoints"].clone()
    api.prefill(**x, state=mine, backend=backend)

    def run(*tensors):
        held = gdn.HistoryPool(*tensors[:5], 1, *tensors[5:])
        return api.prefill(**x | {"checkpoints": kept}, state=held, backend=backend)

    names = ("state", "history_u", "history_k", "history_G", "cursor", "column_scale", "remainder")
    torch.compile(run, fullgraph=True, backend="aot_eager")(*(getattr(other, name) for name in names))
    assert all(same_bits(a, b) for a, b in zip(tensors_of(mine), tensors_of(other), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, BF16])
def test_a_captured_prefill_folds_rounds_and_empties(dtype):
    """No call waits for the device; a replay with other slots has the bits of a call with them."""
    D, sizes = 128, {"H": 2, "HV": 4, "K": 128, "V": 128}
    mine = gdn.allocate_history_pool(
        9, num_k_heads=2, num_v_heads=4, head_k_dim=D, head_v_dim=D, places=PLACES, state_dtype=dtype,
        history_dtype=BF16, state_v_first=True, device=GPU,
    )  # fmt: skip
    mine.write(torch.arange(9, device=GPU), torch.randn(9, 4, D, D, device=GPU), state_v_first=True)
    token = moved(inputs(9, 1, **sizes, dtype=BF16), GPU)
    api.decode_with_history(**token, pool=mine, use_history=True, backend="triton")
    x = moved(prompts_on(mine, D, False) | inputs(1, 143, **sizes, dtype=BF16), GPU)
    other = {"state_index": torch.tensor([5, 7, 7, 1, 4, -1], device=GPU),
             "out_state_index": torch.tensor([5, 2, 0, 1, 4, 3], device=GPU)}  # fmt: skip
    api.prefill(**x, state=copy(mine, GPU), backend="triton")
    wanted = copy(mine, GPU)
    with nothing_waits():
        o = api.prefill(**x | other, state=wanted, backend="triton")
    held, out = copy(mine, GPU), torch.empty_like(x["v"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        api.prefill(**x, state=held, out=out, backend="triton")
    for name, index in other.items():
        x[name].copy_(index)
    graph.replay()
    assert same_bits(out, o)
    assert all(same_bits(a, b) for a, b in zip(tensors_of(held), tensors_of(wanted), strict=True))


@pytest.mark.parametrize("kind, message, change", [
    (TypeError, "remainder: expected uint8", {"remainder": torch.zeros(9, 2, 12, 12).to(torch.int8)}),
    (ValueError, "remainder: expected shape", {"remainder": torch.zeros(9, 2, 12, 24).to(torch.uint8)}),
    (TypeError, "column_scale: expected float32", {"column_scale": torch.zeros(9, 2, 12).half()}),
    (TypeError, "state: expected int8 with scales, in a HistoryPool", {"column_scale": None}),
    (ValueError, "cursor: expected", {"cursor": torch.zeros(9, 2, dtype=torch.int32)}),
    (ValueError, "history_u: expected shape", {"history_u": torch.zeros(9, 6, 2, 13)}),
    (ValueError, "history_u: expected at most float32", {"history_u": torch.zeros(9, 6, 2, 12).double()}),
    (ValueError, "room: expected 1 to 3", {"room": 5}),
    (TypeError, "history_k: expected a tensor", {"history_k": None}),
])  # fmt: skip
def test_a_prefill_refuses_wrong_pools(kind, message, change):
    x = pool(slots=9)
    wrong, before, given = gdn.HistoryPool(**vars(x) | change), copy(x), prompts_on(x, 24, False)
    with pytest.raises(kind, match=message):
        api.prefill(**given, state=wrong)
    assert all(same_bits(a, b) for a, b in zip(tensors_of(x), tensors_of(before), strict=True))


def test_a_refused_prefill_folds_nothing():
    """A wrong argument is found before the histories are folded; so is a pool of several layers."""
    mine = pool(slots=9)
    api.decode_with_history(**inputs(9, 1, **SIZES), pool=mine)
    before, given = copy(mine), prompts_on(mine, 24, False)
    layers = gdn.HistoryPool(*(y if isinstance(y, int) else y[None] for y in vars(mine).values()))
    for kind, message, change in (
        (ValueError, "checkpoint_every: expected a positive multiple of 64", {"checkpoint_every": 32}),
        (ValueError, "cu_seqlens: expected the first offset", {"cu_seqlens": given["cu_seqlens"] + 1}),
        (TypeError, "has_initial_state: expected a bool", {"has_initial_state": given["state_index"]}),
        (ValueError, "history_G: expected shape", {"g": torch.zeros(1, 143, 2, 24)}),
        (ValueError, "state: expected ", {"state": layers}),
        (NotImplementedError, "triton: expected", {"backend": "triton"}),
    ):
        with pytest.raises(kind, match=message):
            api.prefill(**{**given, "state": mine, "backend": "eager", **change})
        assert all(same_bits(a, b) for a, b in zip(tensors_of(mine), tensors_of(before), strict=True))


def test_a_decay_per_key_channel():
    options = {"state_v_first": True}
    mine = gdn.allocate_history_pool(
        2, num_k_heads=1, num_v_heads=2, head_k_dim=24, head_v_dim=12, places=4, state_dtype=torch.int8,
        history_dtype=F32, state_v_first=True, decay="channel",
    )  # fmt: skip
    for _ in range(6):
        given = inputs(2, 1, **SIZES, is_per_channel=True)
        want, after = reference.decode_with_history(**given, pool=mine, **options)
        o = api.decode_with_history(**given, pool=mine, backend="eager", **options)
        assert error(o, want) <= 1e-5 and steps_apart(mine, after) <= ONE_STEP


def test_warmup_runs_the_calls_that_int8_has():
    sizes = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 16}
    few = {"max_rows": 1, "max_tokens": 1, "dtypes": (F32,), "engines": ("history",)}
    lines = gdn.warmup("cpu", **sizes, **few, state_dtypes=(torch.int8,))
    wanted = {"decode_with_history", "fold_history", "decode_step", "prefill"}
    assert {line.split()[0] for line in lines} >= wanted


def test_bytes_and_layers():
    sizes = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128}
    with torch.device("meta"):
        x = gdn.allocate_history_pool(3, 5, **sizes, state_dtype=torch.int8, state_v_first=True)
        alone = gdn.allocate_history_pool(5, **sizes, state_dtype=torch.int8, with_remainder=False)
        wide = gdn.allocate_history_pool(5, **sizes, state_dtype=BF16)
    assert x[1].remainder.shape == (5, 32, 128, 64) and x[1].bytes_per_slot == x.bytes_per_slot
    elements, scales = 32 * 128 * 128, 32 * 128 * 4
    assert x.bytes_per_slot - wide.bytes_per_slot == scales - elements // 2
    assert alone.bytes_per_slot - wide.bytes_per_slot == scales - elements


WRONG = [
    (TypeError, "column_scale: expected float32", {"column_scale": torch.zeros(SLOTS, 2, 12).half()}),
    (TypeError, "state: expected int8 with scales, in a HistoryPool", {"column_scale": None}),
    (TypeError, "state: expected int16 or int8", {"state": torch.zeros(SLOTS, 2, 12, 24)}),
    (TypeError, "remainder: expected uint8", {"remainder": torch.zeros(SLOTS, 2, 12, 12).to(torch.int8)}),
    (ValueError, "remainder: expected shape", {"remainder": torch.zeros(SLOTS, 2, 12, 24).to(torch.uint8)}),
    (TypeError, "remainder: expected a tensor", {"remainder": 3}),
    (ValueError, "remainder: expected None with states in torch.int16",
     {"state": torch.zeros(SLOTS, 2, 12, 24).to(torch.int16)}),
]  # fmt: skip


@pytest.mark.parametrize("kind, message, change", WRONG)
def test_wrong_pools_are_refused(kind, message, change):
    x = gdn.HistoryPool(**vars(pool()) | change)
    with pytest.raises(kind, match=message):
        api.decode_with_history(**inputs(SLOTS, 1, **SIZES), pool=x, state_v_first=True)
    with pytest.raises(kind, match=message):
        api.fold_history(x, torch.tensor([0]), state_v_first=True)


def test_functions_that_write_every_token_refuse_int8():
    x, given = pool(), inputs(SLOTS, 1, **SIZES)
    before = copy(x)
    held = gdn.Int16Pool(x.state, x.column_scale)
    packed = {"cu_seqlens": torch.tensor([0, 4]), "state_index": torch.tensor([0])}
    prompt = {name: y.flatten(0, 1)[None] for name, y in given.items()}
    with pytest.raises(ValueError, match="use_history: expected None or True with states in int8, got False"):
        api.decode_with_history(**given, pool=x, use_history=False, state_v_first=True)
    with pytest.raises(TypeError, match="state: expected a tensor, got HistoryPool"):
        api.decode(**given, state=x, state_v_first=True)
    for state, message in (
        (held, "state: expected int16 in an Int16Pool, got torch.int8"),
        (x.state, "state: expected a tensor of float16"),
    ):
        with pytest.raises(TypeError, match=message):
            api.decode(**given, state=state, state_v_first=True)
        with pytest.raises(TypeError, match=message):
            api.prefill(**prompt, **packed, state=state, state_v_first=True)
    assert all(same_bits(a, b) for a, b in zip(written(x), written(before), strict=True))
