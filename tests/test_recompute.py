"""Training with recompute=True: no saved states, the same bits of outputs and gradients."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON, INTERPRETED

import gdn
from gdn.backends import load
from gdn.backends.backend import Saved
from gdn.ops import library
from gdn.problem import parse
from gdn.testing import Case, inputs, packed, rows
from gdn.testing.memory import poison_memory

FAKE = "test_faketensor"
ALL = {"use_qk_l2norm_in_kernel": True, "raw_gate": "on", "beta": "negative"}
CASES = {
    "ragged rows": Case(lengths=rows(129), sizes=(32, 32)),
    "packed": Case(lengths=packed(5, 0, 70, 130, tail=3), sizes=(32, 16), heads=(1, 2), state="wide", **ALL),
    "per channel": Case(lengths=rows(66), heads=(1, 2), sizes=(16, 16), is_per_channel=True),
    "batch invariant": Case(lengths=packed(65, 200), sizes=(32, 32), batch_invariant=True),
}


def train(given, backend, recompute):
    """Return outputs and gradients of one call, and the bytes of the tensors that it saves."""
    leaves = {
        name: x.clone().requires_grad_() if x.is_floating_point() else x for name, x in given.tensors.items()
    }
    sizes = []

    def pack(x):
        sizes.append(x.numel() * x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, S = gdn.chunk_gated_delta_rule(**leaves, **given.options, backend=backend, recompute=recompute)
    loss = (o * given.do).sum() + (0 if S is None else (S * given.dfinal_state).sum())
    found = torch.autograd.grad(loss, [x for x in leaves.values() if x.requires_grad])
    return [o, *([] if S is None else [S]), *found], sum(sizes)


def check(given, backend, bytes_of_states):
    (first, more), (second, less) = (train(given, backend, x) for x in (False, True))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert more - less > bytes_of_states / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_of_less_memory(backend, device, name, dtype):
    """Outputs and gradients are those of a call that keeps the states."""
    case = CASES[name]
    (K, V), HV = case.sizes, case.heads[1]
    given = inputs(case, dtype, device=device)
    chunks = parse(**given.tensors, **given.options).num_chunks
    check(given, backend, chunks * HV * K * V * given.do.element_size())


def test_the_operator_recomputes_too(device):
    """The operators, which a compiler traces, keep no states either."""
    given = inputs(CASES["packed"], torch.float32, device=device)
    found = []
    for recompute in (False, True):
        problem = parse(**given.tensors, **given.options, recompute=recompute)
        o, S, *saved = library.chunk_forward(*problem.arguments(), True)
        saved = [x if x.numel() else None for x in saved]
        assert (saved[2] is None) == recompute
        torch.library.opcheck(
            library.chunk_forward, (*problem.arguments(), True), test_utils="test_faketensor"
        )
        found.append(library.chunk_backward(*problem.arguments(), *saved, given.do, given.dfinal_state))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    with pytest.raises(TypeError, match="recompute: expected a bool"):
        parse(**given.tensors, **given.options, recompute=1)


def forward(backend, given, recompute):
    """Return the outputs and the saved tensors that a backward gets."""
    problem = parse(**given.tensors, **given.options, backend="triton", recompute=recompute)
    o, S, saved = backend.chunk_forward(problem, True)
    assert (saved.S_in is None) == recompute
    shapes = [None if x is None else (x.shape, x.dtype) for x in saved]
    assert shapes == [None if x is None else (torch.Size(x[0]), x[1]) for x in backend.saves(problem)]
    return [o, S, *(backend.recompute_saved(problem, saved) if recompute else saved)]


@pytest.mark.interpret
@pytest.mark.skipif(not INTERPRETED or not HAS_TRITON, reason="expected kernels to be interpreted")
@pytest.mark.parametrize("name", ["hopper", "hopper in segments", "hopper, few keys", "triton"])
def test_kernels_save_the_same_bits(monkeypatch, name):
    """S_in comes from the saved A_inv and factors with the bits that the forward would have stored."""
    from kit.hopper import set_segments, simulate_launches

    # each chunk is used: nothing zeroes the others, which nothing reads
    case = Case(sizes=(128, 128), heads=(1, 1), lengths=packed(70, 33, tail=5), state="wide", **ALL)
    if name == "triton":
        case = replace(case, sizes=(32, 32))
    else:
        simulate_launches(monkeypatch)
        set_segments(monkeypatch, 1 if "segments" in name else None)
    if "segments" in name:
        case = replace(case, lengths=packed(130, tail=5))
    if "few" in name:
        case = replace(case, sizes=(64, 64), lengths=rows(64))
    given = inputs(case, torch.bfloat16)
    backend = load(name.split()[0].rstrip(","))
    first, second = (forward(backend, given, x) for x in (False, True))
    for x, y in zip(first, second, strict=True):
        assert (x is None) == (y is None) and (x is None or torch.equal(x, y))


@pytest.mark.interpret
@pytest.mark.skipif(not INTERPRETED or not HAS_TRITON, reason="expected kernels to be interpreted")
def test_training_with_a_decay_per_key_channel():
    """The backward on `triton` has a place for the states that its forward has not kept."""
    case = Case(lengths=rows(5), heads=(1, 1), sizes=(16, 16), is_per_channel=True)
    given = inputs(case, torch.float32)
    for x, y in zip(train(given, "triton", True)[0], train(given, "eager", False)[0], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_backward_recomputes_all_that_a_forward_did_not_save(recompute):
    """A new backend may save nothing, as CONTRIBUTING.md shows; the bits are those of saved tensors."""
    given = inputs(CASES["packed"], torch.float32)
    problem, eager = parse(**given.tensors, **given.options, recompute=recompute), load("eager")
    ends = given.do, given.dfinal_state
    saved = eager.chunk_forward(replace(problem, recompute=False), True)[2]
    expected, got = (tuple(eager.chunk_backward(problem, x, *ends)) for x in (saved, Saved()))
    pairs = zip(got, expected, strict=True)
    assert all(x is y is None or torch.equal(x, y) for x, y in pairs) and got[0].any()


@pytest.mark.interpret
@pytest.mark.skipif(not INTERPRETED or not HAS_TRITON, reason="expected kernels to be interpreted")
def test_unused_chunks_are_zero():
    """An operator returns no unwritten memory, which may hold NaN."""
    case = Case(sizes=(32, 32), heads=(1, 2), lengths=packed(5, 0, 2, tail=3), use_qk_l2norm_in_kernel=True)
    given = inputs(case, torch.bfloat16)
    problem = parse(**given.tensors, **given.options, backend="triton", recompute=True)
    with poison_memory():
        saved = load("triton").chunk_forward(problem, True)[2]
    assert problem.num_chunks == 3 and not saved.A_inv[2].any()
    for x in (saved.G, saved.A_inv, saved.q_rstd, saved.k_rstd, saved.factors[2]):
        assert x.isfinite().all()
    # nor does it keep a row that only a backward writes
    assert saved.factors[:2, :, :, 0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128)])
def test_hopper_on_a_gpu(sizes):
    """The Gluon kernels give the same bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("expected sm_90")
    for lengths in (rows(1000), packed(900, 0, 70, 1, 2500, tail=3)):
        case = Case(sizes=sizes, heads=(2, 4), lengths=lengths, state="wide", **ALL)
        given = inputs(case, torch.bfloat16, device="cuda")
        chunks = parse(**given.tensors, **given.options).num_chunks
        check(given, "hopper", chunks * 4 * sizes[0] * sizes[1] * 2)
