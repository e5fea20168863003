"""Test `commit`, which copies the accepted states of all layers into their slots, on every backend."""

import pytest
import torch
from conftest import GPU
from kit import api
from kit.api import reference
from kit.serving import error, inputs, moved, nothing_waits, pool_of, same_bits

import gdn
from gdn.reference.integers import round_columns

L, SLOTS, ROWS, T = 3, 8, 4, 5


def entries(index=torch.int64):
    """Return valid entries, and every kind of entry that commit skips."""
    names = ("dst_index", "src_row", "step")
    values = ([5, 0, -1, SLOTS, 2, 3, 4, 6], [3, 0, 1, 1, -1, ROWS, 2, 2], [4, 0, 1, 1, 1, 1, -1, T])
    return {name: torch.tensor(v, dtype=index) for name, v in zip(names, values, strict=True)}


def extras():
    """Return a second slot for the same rows."""
    return {
        "extra_dst_index": torch.tensor([7, -1, 2, 1, 1, 1, 3, 1]),
        "extra_step": torch.tensor([0, 1, 3, -1, 2, 2, 1, -5]),
    }


@pytest.fixture(autouse=True)
def default_backend(request, monkeypatch):
    """Set GDN_BACKEND, since `commit` has no argument for the backend."""
    if "backend" in request.fixturenames:
        monkeypatch.setenv("GDN_BACKEND", request.getfixturevalue("backend"))


@pytest.mark.interpret
@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.parametrize(
    "dst, src, index",
    [
        (torch.float32, torch.float32, torch.int64),
        (torch.bfloat16, torch.float32, torch.int32),
        (torch.float32, torch.bfloat16, torch.int64),
        (torch.float16, torch.float16, torch.int32),
    ],
)
def test_commit(backend, device, dst, src, index, with_extra):
    before, s = pool_of(L, SLOTS, dtype=dst), pool_of(L, ROWS, T, dtype=src)
    x = entries(index) | (extras() if with_extra else {})
    expected = reference.commit(before, s, **x)
    d, source = before.to(device, copy=True), s.to(device, copy=True)
    assert gdn.commit(d, source, **moved(x, device)) is None
    d = d.cpu()
    assert same_bits(d, expected) and same_bits(s, source)
    changed = {slot for slot in range(SLOTS) if not same_bits(d[:, slot], before[:, slot])}
    assert changed == ({0, 2, 3, 5, 7} if with_extra else {0, 5})
    # the comparison finds a missing layer and a step too many
    assert not same_bits(torch.cat([d[:-1], before[-1:]]), expected)
    assert not same_bits(reference.commit(before, s, **x | {"step": x["step"] + 1}), expected)


@pytest.mark.interpret
def test_nan_moves_only_where_it_is_asked_for(backend, device):
    d, s = pool_of(L, SLOTS).to(device), torch.full((L, ROWS, T, 4, 24, 16), float("nan"), device=device)
    s[:, 3, 4], s[:, 0, 0] = 1, 2
    gdn.commit(d, s, **moved(entries(), device))
    assert d.isfinite().all() and (d[:, 5] == 1).all() and (d[:, 0] == 2).all()


@pytest.mark.interpret
@pytest.mark.parametrize("rest", [(), (7,), (2, 4, 24, 16), (1, 3, 1)])
def test_any_shape_and_stride(backend, device, rest):
    """Pools may be rings, convolution windows or parts of pages, and indices may be columns of a table."""
    table = torch.stack([entries()["dst_index"]] * 2, 1)
    x = moved(entries() | {"dst_index": table[:, 1]}, device)
    memory = torch.randn(SLOTS, L, 3, *rest, device=device)
    others = memory[:, :, [0, 2]].clone()
    d = memory.transpose(0, 1)[:, :, 1]
    s = torch.randn(ROWS, L, 2 * T, *rest, device=device).transpose(0, 1)[:, :, ::2]
    expected = reference.commit(d, s, **x)
    gdn.commit(d, s, **x)
    assert same_bits(d, expected) and same_bits(memory[:, :, [0, 2]], others)


@pytest.mark.interpret
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_every_axis_apart(backend, device, count):
    """The contents of a slot may have `count` axes, none of which is contiguous with the next."""
    rest = (2, 3, 2, 3, 2)[:count]
    thin = (..., *(slice(None, None, 2) for _ in rest))
    memory = torch.randn(L, SLOTS, *(2 * n for n in rest), device=device)
    d, s = memory[thin], torch.randn(L, ROWS, T, *(2 * n for n in rest), device=device)[thin]
    before, x = memory.clone(), moved(entries(), device)
    expected = reference.commit(d, s, **x)
    gdn.commit(d, s, **x)
    assert same_bits(d, expected)
    d.copy_(before[thin])
    assert same_bits(memory, before)


@pytest.mark.interpret
def test_verify_then_commit_is_decode(backend, device):
    """With P3 any number of accepted tokens leaves the pool as decoding only these tokens does."""
    x, state = moved(inputs(3, 4), device), pool_of(SLOTS).to(device)
    read = torch.tensor([6, 2, 0], device=device)
    kept = torch.empty(3, 4, 4, 24, 16, device=device)
    api.decode(**x, state=state, read_index=read, write="none", intermediate=kept, backend=backend)
    accepted = [1, 4, 0]
    expected = state.clone()
    for n, count in enumerate(accepted):
        row = {name: v[n : n + 1, :count] for name, v in x.items()}
        api.decode(**row, state=expected, read_index=read[n : n + 1], backend=backend)
    row, step = torch.arange(3, device=device), torch.tensor(accepted, device=device) - 1
    gdn.commit(state[None], kept[None], read, row, step)
    assert same_bits(state, expected)


def int16_pool(*lead, v_first=True, device="cpu", **sizes):
    """Return an Int16Pool of random states, rounded as the reference does."""
    states = pool_of(*lead, v_first=v_first, **sizes)
    n, scale = round_columns((states.mT if v_first else states).double())
    return gdn.Int16Pool((n.mT if v_first else n).contiguous().to(device), scale.to(device))


def tensors_of(pool):
    """Return copies of the integers and scales of a pool on the CPU."""
    return pool.state.to("cpu", copy=True), pool.column_scale.to("cpu", copy=True)


@pytest.mark.parametrize(
    "src, v_first, K, with_extra",
    [
        pytest.param(torch.float32, True, 16, True, marks=pytest.mark.interpret),
        pytest.param(torch.bfloat16, False, 17, False, marks=pytest.mark.interpret),
        (torch.float32, False, 16, True),
        (torch.float16, True, 40, False),
    ],
)
def test_commit_to_int16(backend, device, src, v_first, K, with_extra):
    """Scales are the reference's; integers too, but for quotients so near a half that fp32 rounds onto it."""
    options = {"v_first": v_first, "K": K, "V": 12, "HV": 2}
    pool, s = int16_pool(L, SLOTS, **options), pool_of(L, ROWS, T, dtype=src, **options)
    # columns of zeros, too small, with NaN, and with the largest element last
    columns = s[1, 3, 4, 1] if v_first else s[1, 3, 4, 1].mT
    columns[0], columns[1], columns[2, 5], columns[3, -1] = 0, 1e-38, float("nan"), -9
    x = entries() | (extras() if with_extra else {})
    n, scale = reference.commit_to_int16(*tensors_of(pool), s, **x, state_v_first=v_first)
    mine = gdn.Int16Pool(*(y.to(device) for y in tensors_of(pool)))
    assert gdn.commit(mine, s.to(device), **moved(x, device), state_v_first=v_first) is None
    got, got_scale = tensors_of(mine)
    assert torch.equal(got_scale.isnan(), scale.isnan()) and scale[1, 5, 1].isnan().sum() == 1
    assert same_bits(got_scale.nan_to_num(-1), scale.nan_to_num(-1))
    keys_last = (got, n) if v_first else (got.mT, n.mT)
    apart = torch.sub(*(y[~scale.isnan()].int() for y in keys_last)).abs()
    assert apart.max() <= 1 and apart.float().mean() < 5e-3
    written = {0, 2, 3, 5, 7} if with_extra else {0, 5}
    before = tensors_of(pool)
    changed = {i for i in range(SLOTS) if not all(map(same_bits, (got[:, i], got_scale[:, i]),
                                                      (y[:, i] for y in before)))}  # fmt: skip
    assert changed == written


@pytest.mark.interpret
@pytest.mark.parametrize("round_state", [False, True])
def test_verify_then_commit_to_int16_is_decode(backend, device, round_state):
    """On a pool in int16, too, P3 leaves the bits that decoding the accepted tokens leaves."""
    sizes = {"HV": 2, "K": 16, "V": 8}
    x, state = moved(inputs(3, 3, H=1, **sizes), device), int16_pool(2, 7, device=device, **sizes)
    pool, read = state[0], torch.tensor([6, 2, 0], device=device)
    kept = torch.empty(2, 3, 3, 2, 8, 16, device=device)
    options = {"read_index": read, "round_state": round_state, "backend": backend}
    api.decode(**x, state=pool, write="none", intermediate=kept[0], **options)
    kept[1] = kept[0]
    before, accepted = tensors_of(state), [1, 3, 0]
    expected = gdn.Int16Pool(*(y.to(device) for y in tensors_of(pool)))
    for n, count in enumerate(accepted):
        row = {name: v[n : n + 1, :count] for name, v in x.items()}
        api.decode(**row, state=expected, **options | {"read_index": read[n : n + 1]})
    row, step = torch.arange(3, device=device), torch.tensor(accepted, device=device) - 1
    gdn.commit(state, kept, read, row, step, state_v_first=True)
    assert same_bits(pool.state, expected.state) and same_bits(pool.column_scale, expected.column_scale)
    assert not same_bits(tensors_of(state)[0], before[0])
    # the second layer had other states, and has got the same ones
    assert all(map(same_bits, *((y[i][[6, 2]] for y in tensors_of(state)) for i in (0, 1))))
    assert all(same_bits(y[1][[0, 1, 3]], z[1][[0, 1, 3]])
               for y, z in zip(tensors_of(state), before, strict=True))  # fmt: skip


@pytest.mark.interpret
def test_checkpoints_of_a_prefill_go_to_an_int16_pool(backend, device):
    """A cache of prefixes in int16: rows of checkpoints are a src of one layer and one step."""
    sizes = {"HV": 2, "K": 16, "V": 8}
    x, cache = inputs(1, 70, H=1, **sizes), int16_pool(1, 5, device=device, **sizes)
    kept = torch.zeros(1, 2, 8, 16, device=device)
    where = {
        "cu_seqlens": torch.tensor([0, 70]), "state_index": torch.tensor([1]),
        "checkpoint_offsets": torch.tensor([0]), "has_initial_state": torch.tensor([False]),
    }  # fmt: skip
    api.prefill(
        **moved(x | where, device), state=cache[0], checkpoints=kept, checkpoint_every=64, backend=backend
    )
    one = torch.tensor([0], device=device)
    gdn.commit(cache, kept[None, :, None], one + 3, one, one, state_v_first=True)
    assert error(cache[0].read(one + 3, state_v_first=True)[0], kept[0]) < 2e-5 and kept.any()


@pytest.mark.gpu
def test_a_captured_commit_rounds_other_rows_on_a_replay(monkeypatch):
    """No call waits for the device; 32 heads of 128 x 128, whose programs fill the GPU."""
    monkeypatch.setenv("GDN_BACKEND", "triton")
    sizes = {"HV": 32, "K": 128, "V": 128}
    mine, s = int16_pool(2, 6, device=GPU, **sizes), pool_of(2, ROWS, T, **sizes).to(GPU)
    names = ("dst_index", "src_row", "step")
    values, others = ([5, 0, 1], [3, 0, 1], [4, -1, 2]), ([2, 4, 1], [1, 2, 0], [0, 3, 1])
    x, y = ({n: torch.tensor(v, device=GPU) for n, v in zip(names, z, strict=True)} for z in (values, others))
    wanted, held = (gdn.Int16Pool(*(z.clone() for z in (mine.state, mine.column_scale))) for _ in range(2))
    gdn.commit(mine, s, **x, state_v_first=True)
    with nothing_waits():
        gdn.commit(wanted, s, **y, state_v_first=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gdn.commit(held, s, **x, state_v_first=True)
    for name, index in y.items():
        x[name].copy_(index)
    graph.replay()
    assert same_bits(held.state, wanted.state) and same_bits(held.column_scale, wanted.column_scale)
    found, half = held[1].read(y["dst_index"], state_v_first=True)[1], held.column_scale[1, 4, ..., None] / 2
    # round to nearest: half a step, and the rounding of the product in fp32
    assert ((found - s[1, 2, 3]).abs() <= half * (1 + 2**-7)).all()


@pytest.mark.interpret
def test_int16_pools_may_be_strided(backend, device):
    """Layers beside slots, columns and keys apart, scales beside states."""
    memory = torch.zeros(SLOTS, L, 2, 2 * 12, 2 * 16, dtype=torch.int16, device=device)
    scales = torch.zeros(SLOTS, L, 2 * 12, 2, device=device)
    wide = gdn.Int16Pool(
        memory.transpose(0, 1)[:, :, :, ::2, ::2], scales.transpose(0, 1)[:, :, ::2].transpose(-1, -2)
    )
    s = pool_of(ROWS, L, T, HV=2, K=16, V=12).to(device).transpose(0, 1)
    dense = gdn.Int16Pool(*(y.contiguous() for y in (wide.state, wide.column_scale)))
    for pool in (wide, dense):
        gdn.commit(pool, s, **moved(entries(), device), state_v_first=True)
    assert same_bits(wide.state, dense.state) and same_bits(wide.column_scale, dense.column_scale)
    assert dense.state.any() and not memory[..., 1::2].any() and not memory[..., 1::2, :].any()
    assert not scales[:, :, 1::2].any()
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    gdn.commit(wide, s, nothing, nothing, nothing, state_v_first=True)
    empty = gdn.Int16Pool(wide.state[:0], wide.column_scale[:0])
    gdn.commit(empty, s[:0], **moved(entries(), device), state_v_first=True)
    assert same_bits(wide.state, dense.state)


@pytest.mark.interpret
def test_empty(backend, device):
    d, nothing = pool_of(L, SLOTS).to(device), torch.zeros(0, dtype=torch.int32, device=device)
    before = d.clone()
    gdn.commit(d, pool_of(L, ROWS, T).to(device), nothing, nothing, nothing)
    assert same_bits(d, before)


def test_compile_and_operator(backend, device):
    d, s, x = pool_of(L, SLOTS).to(device), pool_of(L, ROWS, T).to(device), moved(entries(), device)
    copy = d.clone()
    gdn.commit(copy, s, **x)
    torch.library.opcheck(torch.ops.gdn.commit.default, (d.clone(), s, *x.values(), None, None, None, False))
    torch.compile(lambda d: gdn.commit(d, s, **x), fullgraph=True, backend="aot_eager")(d)
    assert same_bits(d, copy)
    n, scale = tensors_of(int16_pool(L, SLOTS))
    mine = gdn.Int16Pool(n.to(device, copy=True), scale.to(device, copy=True))
    torch.library.opcheck(
        torch.ops.gdn.commit.default,
        (mine.state.clone(), s, *x.values(), None, None, mine.column_scale.clone(), True),
    )

    def run(state, scale):
        gdn.commit(gdn.Int16Pool(state, scale), s, **x, state_v_first=True)

    torch.compile(run, fullgraph=True, backend="aot_eager")(mine.state, mine.column_scale)
    expected = gdn.Int16Pool(n.to(device, copy=True), scale.to(device, copy=True))
    run(expected.state, expected.column_scale)
    assert same_bits(mine.state, expected.state) and same_bits(mine.column_scale, expected.column_scale)
    assert not same_bits(mine.state, n.to(device))


@pytest.mark.parametrize(
    "kind, message, change",
    [
        (TypeError, "dst: expected a tensor of float16", {"dst": torch.zeros(L, SLOTS, 4, dtype=torch.int8)}),
        (ValueError, "dst: expected shape", {"dst": torch.zeros(L)}),
        (
            ValueError,
            "dst: expected memory of its own",
            {"dst": torch.zeros(L, 1, 4, 24, 16).expand(L, SLOTS, 4, 24, 16)},
        ),
        (ValueError, "src: expected shape .L=3, rows, T", {"src": pool_of(L, ROWS)}),
        (ValueError, "src: expected shape", {"src": pool_of(L - 1, ROWS, T)}),
        (ValueError, "src: expected shape", {"src": pool_of(L, ROWS, T, V=16, K=24)}),
        (ValueError, "src_row: expected shape .n=8", {"src_row": torch.zeros(1, dtype=torch.int32)}),
        (TypeError, "step: expected an int32", {"step": torch.zeros(8)}),
        (TypeError, "extra_step: expected a tensor", {"extra_dst_index": torch.zeros(8, dtype=torch.int32)}),
        (TypeError, "extra_dst_index: expected a tensor", {"extra_step": torch.zeros(8, dtype=torch.int32)}),
        (
            ValueError,
            "src: expected a tensor without gradient",
            {"src": pool_of(L, ROWS, T).requires_grad_()},
        ),
    ],
)
def test_refusals_touch_nothing(kind, message, change):
    x = {"dst": pool_of(L, SLOTS), "src": pool_of(L, ROWS, T)} | entries() | change
    before = {k: v.clone() for k, v in x.items()}
    with pytest.raises(kind, match=message):
        gdn.commit(**x)
    assert all(torch.equal(before[k], x[k]) for k in before)


def test_refusals_of_int16_touch_nothing():
    pool, given = int16_pool(L, SLOTS), {"src": pool_of(L, ROWS, T), **entries()}
    before = tensors_of(pool)
    scale = pool.column_scale
    for kind, message, dst, change in (
        (TypeError, "dst: expected int16 with scales, in an Int16Pool, got a tensor", pool.state, {}),
        (TypeError, "dst: expected int16 in an Int16Pool, got torch.int8",
         gdn.Int16Pool(pool.state.to(torch.int8), scale), {}),
        (TypeError, "column_scale: expected float32", gdn.Int16Pool(pool.state, scale.half()), {}),
        (ValueError, "column_scale: expected shape .L=3, slots=8, HV=4, V=16", pool,
         {"state_v_first": False}),
        (ValueError, "column_scale: expected memory of its own",
         gdn.Int16Pool(pool.state, scale[:, :1].expand(L, SLOTS, 4, 24)), {}),
        (ValueError, "dst: expected shape .L, slots, HV, V, K., got .8, 4, 24, 16.", pool[0], {}),
        (ValueError, "src: expected shape .L=3, rows, T, 4, 24, 16", pool,
         {"src": pool_of(L, ROWS, T, V=16)}),
        (TypeError, "src: expected a tensor, got Int16Pool", pool, {"src": pool}),
        (TypeError, "state_v_first: expected a bool", pool, {"state_v_first": 1}),
        (TypeError, "dst: expected a tensor, got HistoryPool", gdn.HistoryPool(*[scale] * 5), {}),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            gdn.commit(dst, **{"state_v_first": True, **given, **change})
    assert all(map(same_bits, before, tensors_of(pool)))
