"""Simulate batch-invariant calls on the Hopper backend: alone and in a batch, whole and in pieces."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON

import gdn
from gdn.testing import inputs, packed

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit.hopper import (
    BASE,
    error,
    forward,
    make_prefill,
    on_hopper,
    run_prefill,
    set_fast_path,
    simulated,
)
from kit.serving import same_bits

from gdn.backends import hopper
from gdn.backends.hopper import cost
from gdn.backends.hopper.cost import Cuts, OwnCut, OwnCuts, equal_cuts

# sequences of 3 chunks or more are cut into three segments, those of 5 or more into up to four
OWN = OwnCuts(OwnCut(2, 6, 2), OwnCut(3, 8, 2), 3)


def set_own_cuts(monkeypatch):
    """Let sequences of few chunks be cut by their own length."""
    set_fast_path(monkeypatch)
    monkeypatch.setattr(cost, "own_cuts", lambda HV: OWN)
    monkeypatch.setattr(cost, "LONG_FROM", 5)


def forward_of(given, order, lengths):
    """Return o and the final states of some sequences of a packed batch, in an order of their own."""
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    tokens = torch.cat([torch.arange(ends[n], ends[n + 1]) for n in order])
    names = ("q", "k", "v", "g", "beta")
    tensors = given.tensors | {name: given.tensors[name][:, tokens] for name in names}
    tensors["cu_seqlens"] = torch.tensor([0, *(lengths[n] for n in order)]).cumsum(0)
    tensors["initial_state"] = given.tensors["initial_state"][list(order)]
    return tokens, *forward(replace(given, tensors=tensors))[:2]


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
def test_a_sequence_has_the_bits_that_it_has_alone(monkeypatch):
    """Compare a batch with some of its sequences in another order, and with one alone; two are cut."""
    set_own_cuts(monkeypatch)
    lengths = (190, 70, 0, 260)
    case = replace(BASE, heads=(1, 1), lengths=packed(*lengths, tail=20), batch_invariant=True)
    given = inputs(case, torch.bfloat16)
    o, final, _ = forward(given)
    for order in ((3, 1), (0,), (3,)):
        tokens, *found = forward_of(given, order, lengths)
        assert same_bits(found[0], o[:, tokens]) and same_bits(found[1], final[list(order)])
    # another cut has other bits, as a batch has without batch_invariant
    monkeypatch.setattr(cost, "cuts_of", lambda problem, has_pool=False: Cuts(*equal_cuts(4)))
    assert not same_bits(forward_of(given, (3,), lengths)[2], final[[3]])


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
def test_prefill_in_pieces_has_the_bits_of_the_whole(monkeypatch):
    """Give pieces of 64 tokens: one prompt is never cut, the other where the whole of it may be cut."""
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    set_own_cuts(monkeypatch)
    lengths, slots, size = (100, 190), (5, 2), 64
    x = make_prefill((1, 1), 128, *lengths) | {"batch_invariant": True}
    names = ("q", "k", "v", "g", "beta")

    def in_pieces():
        pool, outputs = x["state"], []
        for begin in range(0, max(lengths), size):
            # the first prompt is over sooner: its piece is empty then, and its state stays
            pieces = [torch.arange(a, b) for a, b in zip(*token_bounds(lengths, begin, size), strict=True)]
            tokens = torch.cat(pieces)
            ends = torch.tensor([0, *(len(piece) for piece in pieces)]).cumsum(0)
            part = {name: x[name][:, tokens] for name in names} | {"cu_seqlens": ends, "state": pool}
            o, pool, _ = run_prefill("hopper", "cpu", x | part)
            outputs.append((tokens, o))
        whole = torch.empty_like(x["v"])
        for tokens, o in outputs:
            whole[:, tokens] = o
        return whole, pool

    o, pool = in_pieces()
    cut, cut_pool, _ = run_prefill("hopper", "cpu", x)
    assert same_bits(cut[:, :100], o[:, :100]) and same_bits(cut_pool[slots[0]], pool[slots[0]])
    assert not same_bits(cut_pool[slots[1]], pool[slots[1]])
    monkeypatch.setenv("GDN_SEGMENTS", "0")
    whole, whole_pool, _ = run_prefill("hopper", "cpu", x)
    assert same_bits(whole, o) and same_bits(whole_pool, pool)


def token_bounds(lengths, begin, size):
    """Return the first tokens of a piece of each packed prompt, and those after its last."""
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    counts = [(min(begin, n), min(begin + size, n)) for n in lengths]
    return [end + a for end, (a, _) in zip(ends, counts, strict=False)], [
        end + b for end, (_, b) in zip(ends, counts, strict=False)
    ]


def run_rule(tensors, options):
    """Return o and the final state of a batch-invariant forward that names no backend."""
    return gdn.chunk_gated_delta_rule(**tensors, **options)


def select_sequences(given, order, lengths, is_known=True):
    """Return tokens of some sequences, and the tensors of a call on them, offsets on the host if known."""
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    tokens = torch.cat([torch.arange(ends[n], ends[n + 1]) for n in order]).to(given.do.device)
    names = ("q", "k", "v", "g", "beta")
    tensors = given.tensors | {name: given.tensors[name][:, tokens] for name in names}
    offsets = torch.tensor([0, *(lengths[n] for n in order)]).cumsum(0)
    tensors["cu_seqlens"] = offsets.to(tokens.device)
    tensors["initial_state"] = given.tensors["initial_state"][list(order)]
    return tokens, tensors | ({"cu_seqlens_cpu": offsets} if is_known else {})


# heads, lengths: of few heads sequences of 96 and 400 chunks are cut, of many one of 260
BATCHES = {
    "2/8": ((2, 8), (6200, 70, 0, 25600, 1, 6144, 6080, 64)),
    "16/32": ((16, 32), (16640, 70, 0, 2047, 64, 300)),
    "16/64": ((16, 64), (4000, 70, 0, 2047, 64, 300)),
    "64 keys": ((4, 8), (6200, 70, 0, 9000, 64)),
}


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("gate", ["mild", "none", "reset", "strong"])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_on_a_gpu(name, gate):
    """Compare a batch with it permuted, with some sequences removed, with each alone, lengths known or not.

    Every call runs `hopper`.
    """
    heads, lengths = BATCHES[name]
    size = 64 if name == "64 keys" else 128
    case = replace(
        BASE, heads=heads, sizes=(size, size), lengths=packed(*lengths), gate=gate, batch_invariant=True
    )
    given = inputs(case, torch.bfloat16, device="cuda", is_drawn_there=True)
    options = given.options | {"backend": "hopper"}
    report = gdn.explain(**select_sequences(given, (1,), lengths)[1], **options)
    assert report.chosen == "hopper"
    o, final = run_rule(given.tensors, options)
    everything = range(len(lengths))
    for order in ([*reversed(everything)], [0, 3], *([n] for n in everything if lengths[n])):
        for is_known in (True, False):
            tokens, tensors = select_sequences(given, order, lengths, is_known)
            found = run_rule(tensors, options)
            assert same_bits(found[0], o[:, tokens]) and same_bits(found[1], final[order])
    other = run_rule(given.tensors, options | {"batch_invariant": False})
    assert error(o, other[0].double()) < 5e-3 and error(final, other[1].double()) < 5e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("size", [64, 128, 192, 1024])
@pytest.mark.parametrize("heads, length, is_cut", [((16, 32), 3000, False), ((2, 8), 7000, True)])
def test_pieces_on_a_gpu(monkeypatch, heads, length, is_cut, size):
    """Prefill in pieces equals prefill as a whole where the whole is not cut; GDN_SEGMENTS=0 forbids cuts."""
    if is_cut:
        monkeypatch.setenv("GDN_SEGMENTS", "0")
    lengths = (length, 100, 500)
    given = inputs(replace(BASE, heads=heads, lengths=packed(*lengths)), torch.bfloat16, device="cuda")
    x = {name: given.tensors[name] for name in ("q", "k", "v", "g", "beta")}
    slots = torch.tensor([3, 0, 2], device="cuda")
    pool = torch.randn(4, heads[1], 128, 128, device="cuda")

    def run(pool, tokens, ends):
        offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
        part = {name: y[:, tokens] for name, y in x.items()}
        return gdn.prefill(
            **part,
            state=pool,
            cu_seqlens=offsets,
            state_index=slots,
            state_v_first=True,
            batch_invariant=True,
            backend="hopper",
        )

    whole, pieces = pool.clone(), pool.clone()
    everything = torch.arange(sum(lengths), device="cuda")
    o = run(whole, everything, [0, *torch.tensor(lengths).cumsum(0).tolist()])
    found = torch.empty_like(o)
    for begin in range(0, length, size):
        firsts, lasts = token_bounds(lengths, begin, size)
        tokens = torch.cat([torch.arange(a, b, device="cuda") for a, b in zip(firsts, lasts, strict=True)])
        ends = [0, *torch.tensor([b - a for a, b in zip(firsts, lasts, strict=True)]).cumsum(0).tolist()]
        found[:, tokens] = run(pieces, tokens, ends)
    assert same_bits(found, o) and same_bits(pieces, whole)
