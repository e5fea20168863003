"""Test decode on every backend: every protocol against the reference, and what a row may depend on."""

import doctest
import importlib
import itertools

import pytest
import torch
from kit import api
from kit.api import reference
from kit.serving import (
    NAMES,
    SLOTS,
    TOLERANCE,
    B,
    R,
    T,
    error,
    find_wrong_state,
    inputs,
    moved,
    pool_of,
    protocols,
    same_bits,
)

import gdn
import gdn.ops.serving

NAN = float("nan")
LAYOUTS = [True, False]


def find_errors(o, state, kept, expected, x, tolerance, ring=False):
    """Return everything that is wrong with what a decode wrote."""
    found = [f"o is off by {error(o, expected.o):.1e}"] if not error(o, expected.o) <= tolerance else []
    found.append(find_wrong_state(state, expected.state, x["state"], tolerance, lead=2 if ring else 1))
    if kept is not None:
        found.append(find_wrong_state(kept, expected.extra, x["intermediate"], tolerance, lead=2))
    return [f for f in found if f]


def run(backend, device, x, **options):
    """Run a decode on copies on a device, with a poisoned output; return all that it wrote."""
    x = moved(x, device)
    out = torch.full_like(x["v"], NAN)
    assert api.decode(**x, out=out, backend=backend, **options) is out
    kept = x.get("intermediate")
    return out.cpu(), x["state"].cpu(), None if kept is None else kept.cpu()


def agrees(backend, device, x, tolerance, **options):
    """Assert that output, pool and intermediate states agree with the reference; return them."""
    expected = reference.decode(
        **x, **{k: v for k, v in options.items() if k not in ("max_seqlen", "exact_packet")}
    )
    got = run(backend, device, x, **options)
    assert find_errors(*got, expected, x, tolerance, ring="ring_pos" in x) == []
    return got


F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# dtype of the tokens, of the pool, and of the index tensors
KINDS = {
    "fp32": (F32, F32, torch.int64),
    "bf16": (BF16, F32, torch.int32),
    "bf16 pool": (BF16, BF16, torch.int32),
    "fp16": (F16, F16, torch.int64),
    "fp32 on bf16": (F32, BF16, torch.int64),
    "fp64": (F64, F64, torch.int32),
}
FEW = {("fp32", True), ("bf16 pool", False)}  # the kinds that are interpreted


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "kind, v_first",
    [
        pytest.param(*case, marks=[pytest.mark.interpret] if case in FEW else [])
        for case in itertools.product(KINDS, LAYOUTS)
    ],
)
def test_protocol(backend, device, poison, name, kind, v_first):
    dtype, pool, index = KINDS[kind]
    if dtype == F64 and backend != "eager":
        pytest.skip("float64 is for eager alone")
    x = inputs(B, T, dtype=dtype) | protocols(index, v_first, pool)[name]
    stored = min(x.get("intermediate", x["state"]).dtype, pool, dtype, key=lambda d: -TOLERANCE[d])
    agrees(backend, device, x, TOLERANCE[stored], state_v_first=v_first)


def test_the_gate_can_fail(backend, device):
    x = inputs(B, T) | protocols()["P3"]
    got, expected = run(backend, device, x), reference.decode(**x)
    assert find_errors(*got, expected, x, 1e-5) == []
    o, state, kept = got
    lies = {
        "zero": (torch.zeros_like(o), state, kept),
        "swapped heads": (o.flip(2), state, kept),
        "unwritten": (torch.full_like(o, NAN), state, kept),
        "dropped history": (run(backend, device, x | {"state": 0 * x["state"]})[0], state, kept),
        "touched pool": (o, state + 1e-3, kept),
        "stale intermediate": (o, state, x["intermediate"]),
        "keys turned round": (o, state, kept.flip(-1)),
    }
    for name, lie in lies.items():
        assert find_errors(*lie, expected, x, 1e-5), name
    final = inputs(B, T) | protocols()["index"]
    o, state, _ = run(backend, device, final)
    assert find_errors(o, final["state"], None, reference.decode(**final), final, 1e-5), "state not written"


@pytest.mark.parametrize("name", NAMES)
def test_nan_in_what_is_not_read_reaches_nothing(backend, device, name):
    x = inputs(B, T) | protocols()[name]
    clean = run(backend, device, x)
    expected = reference.decode(**x | {"state": torch.full_like(x["state"], NAN)})
    reads = torch.zeros(x["state"].shape[0], dtype=torch.bool)
    for slot in range(len(reads)):
        state = x["state"].clone()
        state[slot] = NAN
        reads[slot] = reference.decode(**x | {"state": state}).o.isnan().any()
    dirty = dict(x)
    dirty["state"] = x["state"].clone()
    dirty["state"][~reads] = NAN
    if "intermediate" in x:
        dirty["intermediate"] = torch.full_like(x["intermediate"], NAN)
    # the inputs of a row without a slot may hold anything as well
    idle = [n for n in range(B) if not expected.o[n].isnan().any()]
    for key in ("q", "k", "v", "g", "beta"):
        dirty[key] = x[key].clone()
        dirty[key][idle] = NAN
    o, state, _ = run(backend, device, dirty)
    assert same_bits(o, clean[0])
    assert not o[idle].any()
    assert same_bits(state[reads], clean[1][reads])


def bits_of_rows(backend, x, batch):
    """Return each row's output and state, where `batch` names the rows and their slots in one call."""
    device = x["state"].device
    per_row = {k: v[batch] for k, v in x.items() if k in ("q", "k", "v", "g", "beta", "a", "b")}
    state = x["state"].clone()
    o = api.decode(
        **per_row, state=state, read_index=torch.tensor(batch, device=device), A_log=x.get("A_log"),
        dt_bias=x.get("dt_bias"), backend=backend,
    )  # fmt: skip
    return o, state[batch]


SHAPES = [
    (1, 1, 1, 1),
    (1, 1, 7, 5),
    (1, 3, 60, 100),
    (2, 4, 128, 128),
    (1, 1, 128, 64),
    (2, 6, 37, 32),
    (1, 2, 256, 1),
]


@pytest.mark.parametrize(
    "H, HV, K, V, threads", [(*s, 1) for s in SHAPES] + [(1, 1, 128, 128, 2), (1, 3, 60, 100, 2)]
)
def test_a_row_does_not_depend_on_the_batch(backend, device, H, HV, K, V, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype, pool, raw in ((F32, F32, False), (BF16, F32, True), (BF16, BF16, True), (F16, F16, True)):
            x = inputs(16, 2, H, HV, K, V, dtype=dtype, raw=raw)
            x = moved(x | {"state": pool_of(16, HV=HV, K=K, V=V, dtype=pool)}, device)
            o, state = bits_of_rows(backend, x, list(range(16)))
            for batch in ([3], [0, 1, 2, 3, 4], [4, 3, 1, 0], [15, 7]):
                got = bits_of_rows(backend, x, batch)
                assert same_bits(got[0], o[batch]) and same_bits(got[1], state[batch])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("v_first", LAYOUTS)
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packet_equals_single_steps(backend, device, pool, v_first):
    for dtype, raw in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        x = moved(inputs(3, 5, dtype=dtype, raw=raw), device)
        state = pool_of(3, dtype=pool, v_first=v_first).to(device)
        heads = {k: v for k, v in x.items() if k in ("A_log", "dt_bias")}
        options = {"state_v_first": v_first, "backend": backend, "round_state": pool != torch.float32}
        whole = state.clone()
        o = api.decode(**x, state=whole, **options)
        for t in range(5):
            token = {k: v[:, t : t + 1] for k, v in x.items() if k not in heads}
            assert same_bits(api.decode(**token, **heads, state=state, **options), o[:, t : t + 1])
        assert same_bits(whole, state)
        if pool != torch.float32:
            loose = api.decode(**x, state=state.clone(), state_v_first=v_first, backend=backend)
            assert not same_bits(loose, api.decode(**x, state=state.clone(), **options))


PACKET = 6  # tokens: of four or fewer that write an fp32 state, each is computed by itself
ONLY_THE_LAST = [
    "identity",
    "index",
    "P1 final",
    "P2 read",
    "P6",
]  # protocols that write at most one state per row
INTERPRETED = {
    ("index", "bf16", True),
    ("P1 final", "fp32", False),
    ("P2 read", "fp32", True),
    ("P6", "bf16 pool", True),
}


@pytest.mark.parametrize(
    "name, kind, v_first",
    [
        pytest.param(*case, marks=[pytest.mark.interpret] if case in INTERPRETED else [])
        for case in itertools.product(ONLY_THE_LAST, KINDS, LAYOUTS)
    ],
)
def test_the_chunk_form(backend, device, poison, name, kind, v_first):
    """With exact_packet=False results agree within the same limits, with padded rows and split slots."""
    dtype, pool, index = KINDS[kind]
    if dtype == F64 and backend != "eager":
        pytest.skip("float64 is for eager alone")
    x = inputs(B, PACKET, dtype=dtype, raw=True) | protocols(index, v_first, pool)[name]
    tolerance = max(TOLERANCE[dtype], TOLERANCE[pool])
    agrees(backend, device, x, tolerance, state_v_first=v_first, exact_packet=False)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "H, HV, K, V, tokens", [(1, 3, 60, 100, 5), (1, 2, 128, 64, 16), (1, 1, 200, 33, 9), (1, 2, 1, 1, 5)]
)
def test_the_chunk_form_of_heads_and_sizes(backend, device, H, HV, K, V, tokens):
    x = inputs(2, tokens, H, HV, K, V) | {"state": pool_of(2, HV=HV, K=K, V=V)}
    x["g"][0, 1] = -1e6
    agrees(backend, device, x, 1e-5, exact_packet=False)
    x["k"] /= K
    agrees(
        backend, device, x | {"g": None}, 1e-5, exact_packet=False, use_qk_l2norm_in_kernel=False, scale=0.3
    )


@pytest.mark.interpret
@pytest.mark.parametrize(
    "tokens, dtype, K, V", [(6, F32, 32, 100), (11, F32, 32, 100), (6, BF16, 64, 96), (11, BF16, 64, 96)]
)
def test_the_chunk_form_in_programs_of_many_strips(triton_device, monkeypatch, tokens, dtype, K, V):
    """The chunk form agrees in the tiles that are chosen when rows and heads fill a GPU."""
    packet = importlib.import_module("gdn.backends.triton.serving.packet")
    monkeypatch.setattr(packet, "FILLED", 0)
    width, gpu = dtype.itemsize, packet.machine(torch.device("cpu"))
    assert packet.blocks(K, V, width, tokens, 1, gpu, width, True)["STRIPS"] == -(-V // 16)
    x = inputs(2, tokens, 1, 2, K, V, dtype) | {"state": pool_of(2, HV=2, K=K, V=V, dtype=dtype)}
    agrees("triton", triton_device, x, TOLERANCE[dtype], exact_packet=False)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tokens, write, V", [(4, "final", 32), (12, "final", 32), (12, "none", 70)])
def test_the_chunk_form_that_loads_first(triton_device, dtype, tokens, write, V):
    """Programs that load the state before they know the packet agree, and read no slot of another row."""
    x = inputs(3, tokens, 1, 2, 64, V, dtype, raw=True) | {"write": write}
    x |= {"state": pool_of(5, HV=2, K=64, V=V, dtype=dtype), "read_index": torch.tensor([2, -1, 5])}
    clean = agrees("triton", triton_device, x, TOLERANCE[dtype], exact_packet=False)
    x["state"][[0, 1, 3, 4]] = NAN
    o, state, _ = run("triton", triton_device, x, exact_packet=False)
    assert same_bits(o, clean[0]) and not o[1:].any() and same_bits(state[2], clean[1][2])


@pytest.mark.parametrize(
    "rows, tokens, dtype, pool, v_first, expected",
    [
        (1, 4, BF16, BF16, True, (True, True, 0, 128)),
        (1, 4, BF16, BF16, False, (True, True, 0, 64)),
        (1, 4, F16, F16, True, (True, True, 0, 64)),
        (8, 16, BF16, BF16, True, (True, True, 0, 64)),
        (64, 4, BF16, BF16, True, (True, False, 32, 64)),
        (8, 6, BF16, F32, True, (False, False, 0, 64)),
        (8, 4, BF16, F16, True, (False, False, 0, 64)),
        (64, 6, F32, F32, True, (False, False, 0, 32)),
    ],
)
def test_which_packets_load_first(rows, tokens, dtype, pool, v_first, expected):
    """Tokens and states of one 16-bit dtype: programs of one strip hold it, others prefetch two."""
    compiling = pytest.importorskip("kit.compiling")
    x = {name: y.expand(rows, *y.shape[1:]) for name, y in inputs(1, tokens, 16, 32, 128, 128, dtype).items()}
    x |= {"read_index": torch.arange(rows), "state": torch.empty(rows, 32, 128, 128, dtype=pool)}
    with compiling.recording(compiling.TARGETS["cuda:90"].machine) as launches:
        api.decode(**x, exact_packet=False, state_v_first=v_first, backend="triton")
    constants = launches[0][0].constants
    assert tuple(constants[name] for name in ("LOADS_FIRST", "HOLDS", "FETCHED", "BU")) == expected


@pytest.mark.parametrize(
    "rows, K, pool, has_parents, expected",
    [
        (1, 128, BF16, False, (True, None)),
        (8, 128, BF16, False, (False, 128)),
        (8, 128, F32, False, (False, None)),
        (1, 128, F32, False, (True, None)),
        (8, 256, BF16, False, (True, 160)),
        (8, 128, BF16, True, (True, 160)),
    ],
)
def test_which_decodes_hold_the_next_token(rows, K, pool, has_parents, expected):
    """Few programs load the next token early, and those whose registers would spill; many need registers."""
    compiling = pytest.importorskip("kit.compiling")
    x = {name: y.expand(rows, *y.shape[1:]) for name, y in inputs(1, 4, 16, 32, K, 128, BF16).items()}
    x |= {"read_index": torch.arange(rows), "state": torch.empty(rows, 32, 128, K, dtype=pool)}
    x |= {"write": "none", "intermediate": torch.empty(rows, 4, 32, 128, K, dtype=pool)}
    if has_parents:
        x |= {"parent": torch.zeros(rows, 4, dtype=torch.int64)}
    with compiling.recording(compiling.TARGETS["cuda:90"].machine) as launches:
        api.decode(**x, state_v_first=True, backend="triton")
    one = launches[0][0]
    assert (one.constants["HAS_NEXT"], one.options.get("maxnreg")) == expected


@pytest.mark.interpret
@pytest.mark.parametrize("pool", [BF16, F32])
def test_the_next_token_in_registers_changes_no_bit(triton_device, monkeypatch, pool):
    """A row has the same bits in a batch of few rows, which loads the next token early, and of many."""
    users = [importlib.import_module(f"gdn.backends.triton.serving.{x}") for x in ("decode", "state_tiles")]
    monkeypatch.setattr("gdn.backends.triton.launch.PlanCache.get", lambda cache, key, make: make())
    x = inputs(1, 7, 1, 2, 64, 32, BF16, raw=True) | {"read_index": torch.tensor([2, -1, 0])}
    x |= {"cu_seqlens": torch.tensor([0, 3, 3, 6]), "state": pool_of(4, HV=2, K=64, V=32, dtype=pool)}
    got = []
    for resident in (0, 10**6):
        for module in users:
            monkeypatch.setattr(module, "RESIDENT", resident)
        got.append(run("triton", triton_device, x, max_seqlen=3, state_v_first=True)[:2])
    assert all(same_bits(a, b) for a, b in zip(*got, strict=True))


@pytest.mark.interpret
def test_the_chunk_form_of_packed_rows_and_projections(backend, device):
    x = inputs(1, 9, raw=True, dtype=BF16) | {"state": pool_of(SLOTS)}
    x |= {"cu_seqlens": torch.tensor([0, 2, 2, 3, 8]), "read_index": torch.tensor([3, 0, -1, 5])}
    o, state, _ = agrees(backend, device, x, 5e-3, exact_packet=False, max_seqlen=5)
    assert not o[0, 8:].any() and not o[0, 2].any()
    y = moved(x, device)
    a, b = (y[name].flatten(0, 1) for name in ("a", "b"))
    rest = {name: y[name] for name in ("cu_seqlens", "read_index")}
    sizes = {"num_k_heads": 2, "head_k_dim": 16, "head_v_dim": 24}
    got = api.decode_packed(
        packed_projection(y, 13), a, b, y["A_log"], y["dt_bias"], y["state"], **sizes, **rest, max_seqlen=5,
        exact_packet=False, backend=backend,
    )  # fmt: skip
    assert same_bits(got, o[0]) and same_bits(y["state"], state)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "exact, tokens, dtype", [(True, 5, F32), (False, 5, F32), (False, 12, F32), (False, 5, BF16)]
)
def test_nan_in_one_query_stays_there(backend, device, exact, tokens, dtype):
    """NaN in one token's query changes only that token's output, in either form."""
    x = inputs(2, tokens, dtype=dtype) | {"state": pool_of(2, dtype=dtype)}
    clean, dirty = run(backend, device, x, exact_packet=exact), x | {"q": x["q"].clone()}
    dirty["q"][0, 3] = NAN
    o, state, *_ = run(backend, device, dirty, exact_packet=exact)
    assert bool(o[0, 3].isnan().all()) and same_bits(state, clean[1])
    o[0, 3] = clean[0][0, 3]
    assert same_bits(o, clean[0])


@pytest.mark.interpret
def test_the_chunk_form_runs_where_it_is_allowed(triton_device):
    """The chunk form does not have the bits of single steps; a packet that stores every state still has."""
    x = inputs(1, PACKET) | {"state": pool_of(1), "intermediate": pool_of(1, PACKET)}
    x = moved(x, triton_device)
    alone = {name: v for name, v in x.items() if name != "intermediate"}
    exact, loose = (run("triton", triton_device, alone, exact_packet=e) for e in (True, False))
    assert not same_bits(exact[0], loose[0]) and error(loose[0], exact[0]) <= 1e-5
    kept = (run("triton", triton_device, x, exact_packet=e) for e in (True, False))
    assert all(same_bits(a, b) for a, b in zip(*kept, strict=True))


def test_a_packet_equals_single_steps_on_a_ring(backend, device):
    """P1 on a bf16 pool equals plain decode on the entry that each step leaves."""
    x, ring = (
        moved(inputs(2, R, dtype=torch.bfloat16), device),
        pool_of(2, R, dtype=torch.bfloat16).to(device),
    )
    position = torch.tensor([5, 2], device=device)
    state = torch.stack([ring[n, int(p) % R] for n, p in enumerate(position)])
    o = api.decode(**x, state=ring, ring_pos=position, write="all", round_state=True, backend=backend)
    for t in range(R):
        single = api.decode(**{k: v[:, t : t + 1] for k, v in x.items()}, state=state, backend=backend)
        assert same_bits(single, o[:, t : t + 1])
        assert all(same_bits(ring[n, (int(p) + 1 + t) % R], state[n]) for n, p in enumerate(position))


@pytest.mark.parametrize("v_first", LAYOUTS)
def test_packed_rows(backend, device, poison, v_first):
    """Rows of 0 to T tokens equal each row alone, and tokens past the last row are zero."""
    lengths, total = [2, 0, 1, 3, 1], 9
    cu = torch.tensor([0, 2, 2, 3, 6, 7], dtype=torch.int32)
    for name, dtype in itertools.product(NAMES, (torch.float32, torch.bfloat16)):
        x = inputs(1, total, dtype=dtype) | protocols(v_first=v_first, dtype=dtype)[name] | {"cu_seqlens": cu}
        stored = x.get("intermediate", x["state"]).dtype
        tolerance = max(TOLERANCE[d] for d in (stored, dtype))
        o, state, _ = agrees(backend, device, x, tolerance, state_v_first=v_first, max_seqlen=T)
        assert not o[0, 7:].any()
        if name == "index":
            row = {k: x[k][:, 3:6] for k in ("q", "k", "v", "g", "beta")}
            row |= {"state": x["state"], "read_index": x["read_index"][3:4]}
            single, alone, _ = run(backend, device, row, state_v_first=v_first)
            assert same_bits(single, o[:, 3:6]) and same_bits(alone[4], state[4])
    assert sum(lengths) == cu[-1]


@pytest.mark.interpret
def test_strides_are_free(backend, device, poison):
    """Pools inside larger memory, strided entries, heads of a projection and columns of tables work."""
    plain = moved(inputs(B, T, dtype=torch.bfloat16) | protocols()["P3"], device)
    expected = run(backend, device, plain)
    memory = torch.randn(SLOTS, 7, 4, 24, 16, device=device)
    pool = memory[:, 2]
    pool.copy_(plain["state"])
    kept = torch.randn(2, B + 2, 2 * T + 5, 4, 24, 16, device=device)[1, :, ::2]
    projected = torch.randn(B, T, 500, dtype=torch.bfloat16, device=device)
    views = {"state": pool, "intermediate": kept[:, :T]}
    for name, start, heads in (("q", 3, 2), ("k", 40, 2), ("v", 100, 4)):
        views[name] = projected[..., start : start + heads * plain[name].shape[3]].unflatten(2, (heads, -1))
        views[name].copy_(plain[name])
    views["read_index"] = torch.stack([plain["read_index"], plain["read_index"]], 1)[:, 0]
    before = memory.clone()
    out = torch.full((T, B, 4, 24), NAN, dtype=torch.bfloat16, device=device).transpose(0, 1)
    assert api.decode(**plain | views, out=out, backend=backend) is out
    assert same_bits(out, expected[0]) and same_bits(memory, before)
    rows = [0, 1, 3]
    assert same_bits(kept[rows][:, :T], expected[2][rows][:, :T])
    # write the final state in place, in a pool whose heads and slots are strided
    apart = torch.randn(SLOTS, 9, 24 * 16 + 8, device=device)
    pool = apart[:, 1:9:2, : 24 * 16].unflatten(2, (24, 16))
    pool.copy_(plain["state"])
    before = apart.clone()
    x = moved(inputs(B, T), device) | {"read_index": plain["read_index"]}
    expected = run(backend, device, x | {"state": plain["state"]})
    assert same_bits(api.decode(**x, state=pool, backend=backend), expected[0]) and same_bits(
        pool, expected[1]
    )
    apart[:, 1:9:2, : 24 * 16] = before[:, 1:9:2, : 24 * 16]
    assert same_bits(apart, before)


@pytest.mark.interpret
def test_memory_order_is_free(backend, device):
    """K-first memory as a V-first view, strided last axes and strided scalars are supported."""
    x = inputs(B, T) | {"state": pool_of(SLOTS), "read_index": torch.tensor([7, 2, -1, 4, SLOTS])}
    expected = run(backend, device, x)
    crossed = x | {"state": x["state"].mT.contiguous().mT}
    for name in ("q", "k", "v", "g", "beta"):
        crossed[name] = torch.stack([x[name], x[name]], -1)[..., 1]
    gaps = x | {"state": torch.stack([x["state"], x["state"]], -1)[..., 1]}
    for other in (crossed, gaps):
        got = run(backend, device, other)
        assert (
            error(got[0], expected[0]) <= 1e-6
            and find_wrong_state(got[1], expected[1], x["state"], 1e-6) is None
        )


@pytest.mark.interpret
@pytest.mark.parametrize("negative", [False, True])
def test_raw_gates(backend, device, negative):
    x = inputs(B, T, raw=True) | {"state": pool_of(B)}
    agrees(backend, device, x, 1e-5, allow_neg_eigval=negative)
    agrees(backend, device, x | {"dt_bias": None}, 1e-5, allow_neg_eigval=negative)
    extreme = torch.tensor([-100.0, 100.0, 25.0, -25.0])
    x |= {"a": extreme.expand(B, T, 4), "b": extreme.flip(0).expand(B, T, 4)}
    o, state, _ = agrees(backend, device, x | {"A_log": torch.tensor([-torch.inf, 0.0, 1.0, 2.0])}, 1e-5)
    assert state.isfinite().all()


@pytest.mark.interpret
@pytest.mark.parametrize("absent", [("g",), ("beta",), ("g", "beta")])
def test_gates_left_out(backend, device, absent):
    x = inputs(B, T) | {"state": pool_of(B)} | dict.fromkeys(absent)
    agrees(backend, device, x, 1e-5, scale=0.3, use_qk_l2norm_in_kernel="beta" in absent)


@pytest.mark.interpret
def test_reset_in_a_packet(backend, device):
    x = inputs(B, T) | {"state": pool_of(B)}
    x["g"][:, 1] = -1e6
    agrees(backend, device, x, 1e-5)


@pytest.mark.parametrize(
    "H, HV, K, V", [(1, 1, 1, 1), (1, 3, 60, 100), (2, 16, 128, 128), (3, 3, 256, 32), (1, 8, 7, 5)]
)
def test_heads_and_sizes(backend, device, poison, H, HV, K, V):
    for v_first in LAYOUTS:
        x = inputs(2, 2, H, HV, K, V) | {"state": pool_of(3, HV=HV, K=K, V=V, v_first=v_first)}
        agrees(backend, device, x, 1e-5, state_v_first=v_first)


@pytest.mark.interpret
@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_nothing_to_do(backend, device, shape):
    x = inputs(*shape) | {"state": pool_of(3)}
    o, state, _ = run(backend, device, x)
    assert o.shape == x["v"].shape and same_bits(state, x["state"])
    packed = inputs(1, 0) | {"state": pool_of(3), "cu_seqlens": torch.tensor([0])}
    assert same_bits(run(backend, device, packed, max_seqlen=0)[1], packed["state"])


def packed_projection(x, pitch=0):
    """Return q | k | v of a dense call of single tokens, as rows of a projection that are `pitch` wider."""
    rows = torch.cat([x[name].flatten(0, 1).flatten(1) for name in ("q", "k", "v")], 1)
    wide = rows.new_full((rows.shape[0], rows.shape[1] + pitch), NAN)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


@pytest.mark.interpret
@pytest.mark.parametrize("packed", [False, True])
def test_decode_packed(backend, device, packed):
    x = (
        inputs(1, 6, raw=True, dtype=torch.bfloat16)
        if packed
        else inputs(6, 1, raw=True, dtype=torch.bfloat16)
    )
    pool, out = pool_of(SLOTS), torch.full((6, 4, 24), NAN, dtype=torch.bfloat16)
    options = {"read_index": torch.tensor([3, 0, 1, 4, 5, -1]), "null_slot": 0, "backend": backend}
    if packed:
        options |= {
            "read_index": torch.tensor([3, 0, 1]),
            "cu_seqlens": torch.tensor([0, 1, 3, 6]),
            "max_seqlen": 3,
        }
    x, options = moved(x, device), moved(options, device)
    pool, out = pool.to(device), out.to(device)
    want_state = pool.clone()
    expected = api.decode(**x, state=want_state, **options)
    a, b = (x[name].flatten(0, 1) for name in ("a", "b"))
    sizes = {"num_k_heads": 2, "head_k_dim": 16, "head_v_dim": 24}
    o = api.decode_packed(
        packed_projection(x, 13), a, b, x["A_log"], x["dt_bias"], pool, **sizes, out=out, **options
    )
    assert o.data_ptr() == out.data_ptr() and o.shape == (6, 4, 24)
    assert same_bits(o, expected.flatten(0, 1)) and same_bits(pool, want_state)


@pytest.mark.parametrize("v_first", LAYOUTS)
def test_functional_leaves_its_state_alone(backend, device, v_first):
    for pool in (torch.float32, torch.bfloat16):
        x, state = moved(inputs(B, T), device), pool_of(B, dtype=pool, v_first=v_first).to(device)
        before = state.clone()
        o, new = api.decode_functional(**x, state=state, state_v_first=v_first, backend=backend)
        assert same_bits(state, before) and new.data_ptr() != state.data_ptr()
        assert same_bits(api.decode(**x, state=state, state_v_first=v_first, backend=backend), o)
        assert same_bits(state, new)


@pytest.mark.gpu
def test_a_pool_beyond_2_to_the_31_elements(alone):
    """The last slots of a pool of 2.2e9 elements give the bits of a small pool."""
    H, HV, K, V = 16, 32, 128, 128
    slots = 2**31 // (HV * K * V) + 65
    pool = torch.zeros(slots, HV, V, K, dtype=torch.bfloat16, device="cuda")
    ends = torch.tensor([0, slots - 1, slots - 64], device="cuda")
    pool[ends] = torch.randn(3, HV, V, K, device="cuda").bfloat16()
    small, x = pool[ends], moved(inputs(3, 2, H, HV, K, V, dtype=torch.bfloat16), "cuda")
    o = api.decode(**x, state=pool, read_index=ends, backend="triton")
    assert same_bits(o, api.decode(**x, state=small, backend="triton"))
    assert same_bits(pool[ends], small) and not pool[1:-64].any()


@pytest.mark.gpu
def test_protocols_in_a_cuda_graph():
    """A graph that is captured once may be replayed with other slots, positions and trees."""
    for name in NAMES:
        first, second = (moved(inputs(B, T) | protocols()[name], "cuda") for _ in range(2))
        tensors = {k: v for k, v in second.items() if isinstance(v, torch.Tensor)}
        for v in tensors.values():
            if not v.is_floating_point():
                v.copy_(v.roll(1, 0))
        held, out = moved(first, "cuda"), torch.empty_like(first["v"])
        api.decode(**held, out=out, backend="triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            api.decode(**held, out=out, backend="triton")
        for k, v in tensors.items():
            held[k].copy_(v)
        graph.replay()
        expected, state, kept = run("triton", "cuda", second)
        assert same_bits(out, expected) and same_bits(held["state"], state), name
        assert kept is None or same_bits(held["intermediate"], kept), name


@pytest.mark.gpu
@pytest.mark.parametrize("K, V", [(128, 128), (60, 100)])
def test_alignment_changes_no_bit(K, V):
    """Tokens and pools may begin at any element, and rows may have any pitch."""
    x = moved(inputs(4, 2, K=K, V=V, dtype=torch.bfloat16), "cuda")
    pool = pool_of(4, K=K, V=V).cuda()
    expected = pool.clone()
    o = api.decode(**x, state=expected, backend="triton")
    for shift in (1, 2, 4):
        views = dict(x)
        for name in ("q", "k", "v"):
            wide = torch.zeros(4, 2, x[name].shape[2] * x[name].shape[3] + 9, dtype=BF16, device="cuda")
            flat = wide[..., shift : shift + x[name][0, 0].numel()]
            views[name] = flat.copy_(x[name].flatten(2)).unflatten(2, x[name].shape[2:])
        apart = torch.zeros(4, 4 * V * K + 7, device="cuda")[:, shift : shift + 4 * V * K]
        state = apart.copy_(pool.flatten(1)).unflatten(1, (4, V, K))
        assert same_bits(api.decode(**views, state=state, backend="triton"), o) and same_bits(state, expected)


class Step(torch.nn.Module):
    """A model that carries its state from call to call."""

    def forward(self, q, k, v, g, beta, state):
        return api.decode_functional(q, k, v, state, g=g, beta=beta)


def test_export_with_dynamic_batch():
    batch = torch.export.Dim("batch", min=1, max=64)
    example = (*inputs(3, 1).values(), pool_of(3))
    program = torch.export.export(Step(), example, dynamic_shapes=[{0: batch} for _ in example])
    for rows in (1, 2, 7):
        args = (*inputs(rows, 1).values(), pool_of(rows))
        for got, expected in zip(program.module()(*args), Step()(*args), strict=True):
            assert same_bits(got, expected)


def test_compile(backend, device):
    """A compiled step has no graph break, keeps the mutation, and leaves shapes dynamic."""
    step = torch.compile(
        lambda x, **options: api.decode(**x, backend=backend, **options) * 2, fullgraph=True, dynamic=True,
        backend="aot_eager",
    )  # fmt: skip
    for rows in (2, 5):
        x = moved(inputs(rows, T) | {"state": pool_of(rows), "intermediate": pool_of(rows, T)}, device)
        copies = {k: v.clone() for k, v in x.items()}
        expected = api.decode(**copies, backend=backend) * 2
        assert same_bits(step(x), expected)
        assert same_bits(x["state"], copies["state"]) and same_bits(x["intermediate"], copies["intermediate"])


def test_operators():
    """The schemas name exactly the tensors that are written, and the fakes match the outputs."""
    x = inputs(B, T, raw=True) | protocols()["P3"] | {"out": torch.empty(B, T, 4, 24)}
    problem = gdn.ops.serving.parse_decode(**dict.fromkeys(OPTIONAL) | DEFAULTS | x)
    torch.library.opcheck(torch.ops.gdn.decode.default, problem.arguments())
    x = inputs(B, T) | {"state": pool_of(B)}
    args = gdn.ops.serving.parse_decode(**dict.fromkeys(OPTIONAL) | DEFAULTS | x).arguments()
    torch.library.opcheck(torch.ops.gdn.decode.default, args)
    torch.library.opcheck(torch.ops.gdn.decode_functional.default, (*args[:10], args[11], *args[20:]))


OPTIONAL = (
    "g", "beta", "a", "b", "A_log", "dt_bias", "scale", "lower_bound", "cu_seqlens", "max_seqlen",
    "read_index", "num_accepted", "ring_pos", "write_index", "intermediate", "intermediate_row", "parent",
    "null_slot", "out", "backend", "column_scale",
)  # fmt: skip
DEFAULTS = {
    "use_qk_l2norm_in_kernel": True, "allow_neg_eigval": False, "state_v_first": True, "write": "final",
    "round_state": False, "exact_packet": True,
}  # fmt: skip

at = torch.tensor
ROWS = torch.arange(B)
KEPT = torch.zeros(B, T, 4, 24, 16)
RING = torch.zeros(SLOTS, R, 4, 24, 16)
LOGITS = torch.zeros(B, T, 4)
REFUSALS = [
    (TypeError, "q: expected a tensor", {"q": [1]}),
    (TypeError, "q: expected a tensor of float16", {"q": torch.zeros(B, T, 2, 16, dtype=torch.int32)}),
    (ValueError, "k: expected shape", {"k": torch.zeros(B, T, 1, 16)}),
    (ValueError, "v: expected dtype", {"v": torch.zeros(B, T, 4, 24).half()}),
    (ValueError, "v: expected HV to be a multiple", {"v": torch.zeros(B, T, 3, 24)}),
    (ValueError, "g: expected None with the raw", {"a": LOGITS}),
    (ValueError, "beta: expected None with the raw", {"g": None, "b": LOGITS}),
    (ValueError, "b: expected a tensor", {"g": None, "beta": None, "a": LOGITS, "A_log": torch.zeros(4)}),
    (ValueError, "A_log: expected a tensor", {"g": None, "beta": None, "a": LOGITS, "b": LOGITS}),
    (ValueError, "dt_bias: expected None without", {"dt_bias": torch.zeros(4)}),
    (ValueError, "allow_neg_eigval: expected the raw", {"allow_neg_eigval": True}),
    (TypeError, "allow_neg_eigval: expected a bool", {"allow_neg_eigval": 1}),
    (ValueError, "g: expected shape", {"g": torch.zeros(B, T, 2)}),
    (TypeError, "scale: expected a number", {"scale": "1"}),
    (ValueError, "state: expected shape", {"state": torch.zeros(SLOTS, 4, 16, 24)}),
    (ValueError, "state: expected .* without ring_pos", {"state": RING}),
    (ValueError, "state: expected shape .*R", {"ring_pos": ROWS}),
    (ValueError, "state: expected float32", {"state": pool_of(SLOTS).double()}),
    (
        ValueError,
        "state: expected memory of its own",
        {"state": torch.zeros(1, 4, 24, 16).expand(SLOTS, 4, 24, 16)},
    ),
    (
        TypeError,
        "state: expected a tensor of float16",
        {"state": torch.zeros(SLOTS, 4, 24, 16, dtype=torch.int8)},
    ),
    (TypeError, "read_index: expected an int32", {"read_index": ROWS.float()}),
    (ValueError, "read_index: expected shape", {"read_index": ROWS[1:]}),
    (ValueError, "read_index: expected at least one", {"read_index": torch.zeros(B, 0, dtype=torch.int32)}),
    (ValueError, "num_accepted: expected a table", {"num_accepted": ROWS}),
    (ValueError, "num_accepted: expected a table", {"num_accepted": ROWS, "read_index": ROWS}),
    (
        ValueError,
        "read_index: expected shape",
        {"state": RING, "ring_pos": ROWS, "read_index": ROWS[:, None]},
    ),
    (ValueError, "write: expected one of", {"write": "last"}),
    (TypeError, "write: expected a string", {"write": None}),
    (ValueError, "write_index: expected either", {"write": "all"}),
    (
        ValueError,
        "write_index: expected either",
        {"write": "all", "state": RING, "ring_pos": ROWS, "write_index": ROWS},
    ),
    (ValueError, "write_index: expected None", {"write": "none", "write_index": ROWS}),
    (ValueError, "write_index: expected shape", {"write_index": ROWS[:, None]}),
    (ValueError, "write_index: expected room", {"write": "all", "write_index": ROWS[:, None]}),
    (ValueError, "intermediate_row: expected None", {"intermediate_row": ROWS}),
    (ValueError, "parent: expected None", {"parent": torch.zeros(B, T, dtype=torch.int32)}),
    (ValueError, "parent: expected room", {"parent": ROWS[:, None], "intermediate": KEPT}),
    (ValueError, "intermediate: expected room", {"intermediate": KEPT[:, 1:]}),
    (ValueError, "intermediate: expected shape", {"intermediate": KEPT[..., 1:]}),
    (ValueError, "null_slot: expected None or 0", {"null_slot": 3}),
    (TypeError, "null_slot: expected None or 0", {"null_slot": False}),
    (ValueError, "round_state: expected False", {"round_state": True, "exact_packet": False}),
    (ValueError, "out: expected shape", {"out": torch.zeros(B, T, 4, 16)}),
    (ValueError, "out: expected dtype", {"out": torch.zeros(B, T, 4, 24).half()}),
    (ValueError, "max_seqlen: expected None", {"max_seqlen": 3}),
    (ValueError, "q: expected B=1", {"cu_seqlens": at([0, 1])}),
    (ValueError, "backend: expected None or one of", {"backend": "fpga"}),
    (TypeError, "backend: expected a name", {"backend": 3}),
    (NotImplementedError, "hopper:", {"backend": "hopper"}),
    (TypeError, "unexpected keyword", {"initial_state": None}),
]
PACKED = [
    (ValueError, "cu_seqlens: expected non-decreasing", {"cu_seqlens": at([0, 3, 1, 5])}),
    (ValueError, "cu_seqlens: expected the last offset", {"cu_seqlens": at([0, 3, 3, 99])}),
    (ValueError, "cu_seqlens: expected the first", {"cu_seqlens": at([1, 3, 3, 5])}),
    (TypeError, "cu_seqlens: expected an int32", {"cu_seqlens": at([0.0, 5.0])}),
    (ValueError, "max_seqlen: expected at least 3", {"max_seqlen": 2}),
    (TypeError, "max_seqlen: expected an int", {"max_seqlen": 3.0}),
    (ValueError, "intermediate: expected room for 3", {"intermediate": KEPT[:3, :2]}),
    (ValueError, "write_index: expected room for 3", {"write": "all", "write_index": ROWS[:3, None]}),
]


@pytest.mark.parametrize("kind, message, change", REFUSALS)
def test_refusals_touch_nothing(kind, message, change):
    refuses(inputs(B, T) | {"state": pool_of(SLOTS), "out": torch.ones(B, T, 4, 24)}, kind, message, change)


@pytest.mark.parametrize("kind, message, change", PACKED)
def test_packed_refusals_touch_nothing(kind, message, change):
    x = inputs(1, 5) | {
        "state": pool_of(SLOTS),
        "out": torch.ones(1, 5, 4, 24),
        "cu_seqlens": at([0, 3, 3, 5]),
    }
    refuses(x, kind, message, change)


def refuses(x, kind, message, change):
    # a valid call before does not hide the error of the next one
    api.decode(**x)
    x |= change
    before = {k: v.clone() for k, v in x.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(kind, match=message):
        api.decode(**x)
    assert all(torch.equal(before[k], x[k]) for k in before)


def test_other_refusals():
    x = inputs(B, 1, raw=True)
    args = (packed_projection(x), x["a"][:, 0], x["b"][:, 0], x["A_log"], x["dt_bias"], pool_of(SLOTS))
    sizes = {"num_k_heads": 2, "head_k_dim": 16, "head_v_dim": 24}
    for kind, message, change in [
        (ValueError, "mixed_qkv: expected 2 [*] 3", {"num_k_heads": 3}),
        (TypeError, "head_k_dim: expected an int", {"head_k_dim": 16.0}),
        (ValueError, "head_v_dim: expected at least 1", {"head_v_dim": 0}),
        (ValueError, "out: expected shape", {"out": torch.zeros(B, 1, 4, 24)}),
    ]:
        with pytest.raises(kind, match=message):
            api.decode_packed(*args, **sizes | change)
    with pytest.raises(ValueError, match="state: expected one state for each of B=5"):
        api.decode_functional(**inputs(B, T), state=pool_of(SLOTS))


@pytest.mark.parametrize("name", ["q", "g", "state"])
def test_no_gradient(name):
    x = inputs(B, T) | {"state": pool_of(B)}
    x[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name}: expected a tensor without gradient"):
        api.decode(**x)
    with torch.no_grad():
        assert not api.decode(**x).requires_grad


def test_warmup_names_what_it_ran():
    sizes = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 16}
    warmed = api.warmup("cpu", **sizes, dtypes=(torch.float32,), state_dtypes=(torch.float32, torch.bfloat16))
    for name in (
        "decode",
        "decode_packed",
        "decode_functional",
        "prefill",
        "commit",
        "chunk_gated_delta_rule",
    ):
        assert any(line.startswith(f"{name} ") for line in warmed), name


def test_examples_run():
    assert doctest.testmod(gdn.ops.serving).failed == 0


def test_no_tracer_or_transform_runs_the_body():
    """A meta pool passes without running the operator's body, and a rejected vmap touches nothing."""
    shapes = ((2, 1, 2, 8), (2, 1, 2, 8), (2, 1, 4, 8), (2, 4, 8, 8))
    index = torch.empty(2, dtype=torch.int64, device="meta")
    assert api.decode(*(torch.empty(s, device="meta") for s in shapes), read_index=index).is_meta
    q, k, v, state = (torch.ones(3, *s) for s in shapes)
    g = -torch.ones(3, 2, 1, 4)
    with pytest.raises(RuntimeError):
        torch.vmap(lambda q, k, v, s, g: api.decode(q, k, v, s, g=g))(q, k, v, state, g)
    assert torch.equal(state, torch.ones_like(state))
