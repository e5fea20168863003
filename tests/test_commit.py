"""Commit: the accepted states of all layers into their slots. The contract of any backend."""

import pytest
import torch
from serving import inputs, pool_of, same_bits

import gdn
from gdn.reference import serving as law

L, SLOTS, ROWS, T = 3, 8, 4, 5


def entries(index=torch.int64):
    """Good ones, and every way to be skipped."""
    names = ("dst_index", "src_row", "step")
    values = ([5, 0, -1, SLOTS, 2, 3, 4, 6], [3, 0, 1, 1, -1, ROWS, 2, 2], [4, 0, 1, 1, 1, 1, -1, T])
    return {name: torch.tensor(v, dtype=index) for name, v in zip(names, values, strict=True)}


def extras():
    """A second slot for the same rows."""
    return {
        "extra_dst_index": torch.tensor([7, -1, 2, 1, 1, 1, 3, 1]),
        "extra_step": torch.tensor([0, 1, 3, -1, 2, 2, 1, -5]),
    }


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
def test_commit(dst, src, index, with_extra):
    d, s = pool_of(L, SLOTS, dtype=dst), pool_of(L, ROWS, T, dtype=src)
    x = entries(index) | (extras() if with_extra else {})
    want = law.commit(d, s, **x)
    before, source = d.clone(), s.clone()
    assert gdn.commit(d, s, **x) is None
    assert same_bits(d, want) and same_bits(s, source)
    changed = {slot for slot in range(SLOTS) if not same_bits(d[:, slot], before[:, slot])}
    assert changed == ({0, 2, 3, 5, 7} if with_extra else {0, 5})
    # the comparison sees a layer left out and a step too many
    assert not same_bits(torch.cat([d[:-1], before[-1:]]), want)
    assert not same_bits(law.commit(before, s, **x | {"step": x["step"] + 1}), want)


def test_nan_moves_only_where_it_is_asked_for():
    d, s = pool_of(L, SLOTS), torch.full((L, ROWS, T, 4, 24, 16), float("nan"))
    s[:, 3, 4], s[:, 0, 0] = 1, 2
    gdn.commit(d, s, **entries())
    assert d.isfinite().all() and (d[:, 5] == 1).all() and (d[:, 0] == 2).all()


def test_any_shape_and_stride():
    """Ring pools, convolution windows, pools inside pages, index columns of a table."""
    for rest in [(), (7,), (2, 4, 24, 16)]:
        memory = torch.randn(SLOTS, L, 3, *rest)
        d = memory.transpose(0, 1)[:, :, 1]
        s = torch.randn(ROWS, L, 2 * T, *rest).transpose(0, 1)[:, :, ::2]
        table = torch.stack([entries()["dst_index"]] * 2, 1)
        x = entries() | {"dst_index": table[:, 1]}
        want = law.commit(d, s, **x)
        others = memory[:, :, [0, 2]].clone()
        gdn.commit(d, s, **x)
        assert same_bits(d, want) and same_bits(memory[:, :, [0, 2]], others)


def test_verify_then_commit_is_decode(backend):
    """P3: any number of accepted tokens leaves the pool as if only they had been decoded."""
    x, state = inputs(3, 4), pool_of(SLOTS)
    read = torch.tensor([6, 2, 0])
    kept = torch.empty(3, 4, 4, 24, 16)
    gdn.decode(**x, state=state, read_index=read, write="none", intermediate=kept, backend=backend)
    accepted = [1, 4, 0]
    want = state.clone()
    for n, count in enumerate(accepted):
        row = {name: v[n : n + 1, :count] for name, v in x.items()}
        gdn.decode(**row, state=want, read_index=read[n : n + 1], backend=backend)
    gdn.commit(state[None], kept[None], read, torch.arange(3), torch.tensor(accepted) - 1)
    assert same_bits(state, want)


def test_empty():
    d, nothing = pool_of(L, SLOTS), torch.zeros(0, dtype=torch.int32)
    before = d.clone()
    gdn.commit(d, pool_of(L, ROWS, T), nothing, nothing, nothing)
    assert same_bits(d, before)


def test_compile_and_operator():
    d, s = pool_of(L, SLOTS), pool_of(L, ROWS, T)
    copy = d.clone()
    gdn.commit(copy, s, **entries())
    torch.library.opcheck(torch.ops.gdn.commit.default, (d.clone(), s, *entries().values(), None, None))
    torch.compile(lambda d: gdn.commit(d, s, **entries()), fullgraph=True, backend="aot_eager")(d)
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
