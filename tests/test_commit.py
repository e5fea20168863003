"""Test `commit`, which copies the accepted states of all layers into their slots, on every backend."""

import pytest
import torch
from kit import api
from kit.api import reference
from kit.serving import inputs, moved, pool_of, same_bits

import gdn

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
    torch.library.opcheck(torch.ops.gdn.commit.default, (d.clone(), s, *x.values(), None, None))
    torch.compile(lambda d: gdn.commit(d, s, **x), fullgraph=True, backend="aot_eager")(d)
    assert same_bits(d, copy)


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
