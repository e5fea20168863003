"""Another number of heads, sequences or tokens compiles nothing: the first call of a kind has it all.

Launches are recorded, not run, on machines that need not be there.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from kit import api
from kit.compiling import TARGETS, jobs_of, recording
from kit.serving import inputs as rows_of
from kit.serving import pool_of

import gdn
from gdn.backends import triton as room
from gdn.backends.triton.rule import build as plans
from gdn.backends.triton.serving import decode, replay
from gdn.bench.cases import Case, inputs, packed, rows
from gdn.ops import repeats
from gdn.problem import parse

ALL = {"use_qk_l2norm_in_kernel": True, "raw_gate": "on", "beta": "sigmoid", "state": "wide"}
# sequences, tokens of each, key heads, value heads: from an almost empty machine to a full one
SIZES = [(1, 1, 1, 1), (1, 65, 2, 8), (3, 16, 16, 32), (2, 64, 8, 8), (5, 63, 2, 64), (130, 3, 1, 4)]
KINDS = {
    "bf16 128": (Case(sizes=(128, 128), **ALL), torch.bfloat16),
    "bf16 128 plain": (Case(sizes=(128, 128), gate="absent", beta="absent"), torch.bfloat16),
    "bf16 128 invariant": (Case(sizes=(128, 128), batch_invariant=True, **ALL), torch.bfloat16),
    "bf16 64": (Case(sizes=(64, 64), **ALL), torch.bfloat16),
    "fp16 256": (Case(sizes=(256, 256), **ALL), torch.float16),
    "fp32 128": (Case(sizes=(128, 128), **ALL), torch.float32),
    "fp32 64/32": (Case(sizes=(64, 32), **ALL), torch.float32),
}


def problem_of(case, dtype, is_packed, size):
    N, T, H, HV = size
    lengths = packed(*[T] * N) if is_packed else rows(T)._replace(B=N)
    given = inputs(replace(case, heads=(H, HV), lengths=lengths), dtype)
    return parse(**given.tensors, **given.options), given


def run(problem, given):
    """A forward alone, and one with its backward."""
    room.BACKEND.chunk_forward(problem, False)
    saved = room.BACKEND.chunk_forward(problem, True)[2]
    room.BACKEND.chunk_backward(problem, saved, given.do, given.dfinal_state)


@pytest.fixture
def met(monkeypatch):
    """(call, target) -> what it has compiled ahead, by kind, and what it launches."""

    def run(call, target):
        asked = {}
        for module in (decode, plans, replay):
            monkeypatch.setattr(
                module, "compile_ahead", lambda device, kind, steps: asked.update({kind: steps})
            )
        with recording(TARGETS[target].machine) as launches:
            call()
            launched = set(jobs_of(launches, target))
            ahead = {kind: frozenset(jobs_of(steps(), target)) for kind, steps in asked.items()}
        return ahead, launched

    yield run
    # what was remembered of calls on tensors of the CPU holds for a recording alone
    repeats._known.clear()


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rule(met, kind, is_packed):
    calls = [problem_of(*KINDS[kind], is_packed, size) for size in SIZES]
    for target in TARGETS:
        first, launched = met(lambda: run(*calls[0]), target)
        compiled = launched.union(*first.values())
        assert len(first) == 3
        for size, call in zip(SIZES, calls, strict=True):
            ahead, launched = met(lambda call=call: run(*call), target)
            assert ahead == first, (target, size)
            assert launched <= compiled, (target, size)


def slots(N):
    return torch.arange(N, dtype=torch.int32)


def tokens(N, T, H, HV, is_packed=False):
    rows = (1, N * T) if is_packed else (N, T)
    x = rows_of(*rows, K=128, V=128, H=H, HV=HV, dtype=torch.bfloat16, raw=True)
    if is_packed:
        x |= {"cu_seqlens": slots(N + 1) * T, "max_seqlen": T}
    return x | {"state": pool_of(N, HV=HV, K=128, V=128), "backend": "triton"}


def a_decode(N, T, H, HV, is_packed=False, **options):
    x = tokens(N, T, H, HV, is_packed)
    return lambda: api.decode(**x, read_index=slots(N), **options)


def a_replay(N, T, H, HV):
    x = tokens(N, T, H, HV)
    u, k = (torch.randn(1, N, 20, heads, 128).bfloat16() for heads in (HV, H))
    G, state = torch.zeros(1, N, 20, HV, dtype=torch.float64), x["state"][None]
    histories = {"history_u": u[0], "history_k": k[0], "history_G": G[0], "cursor": slots(N)}

    def call():
        api.replay_decode(**x, **histories, read_index=slots(N))
        api.replay_commit(state, u, k, G, slots(N), slots(N), slots(N), room=T, backend="triton")

    return call


def a_prefill(N, T, H, HV):
    x = tokens(N, T, H, HV, True)
    del x["max_seqlen"]
    return lambda: api.prefill(**x, state_index=slots(N))


def a_recurrence(N, T, H, HV):
    x = tokens(N, T, H, HV)
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "a", "b"))
    return lambda: gdn.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, backend="triton")


def a_norm(N, T, H, HV):
    x, z = torch.randn(2, N, T, HV, 128).bfloat16().requires_grad_().unbind()
    y = lambda: gdn.rms_norm_gated(x, z, torch.ones(128), activation="silu", backend="triton")  # noqa: E731
    return lambda: y().sum().backward()


def a_conv(N, T, *_):
    """Of as many channels as ever: those are a size of the model, as K is."""
    x = torch.randn(N, T, 768).bfloat16().requires_grad_()
    pool, weight, options = torch.empty(N, 768, 8), torch.randn(768, 4), {"activation": "silu"}

    def call():
        gdn.causal_conv1d(x, weight, **options, backend="triton")[0].sum().backward()
        gdn.causal_conv1d_update(
            x.detach()[:, :1], pool, weight, None, **options, state_index=slots(N), backend="triton"
        )

    return call


OTHERS = {
    "decode": a_decode,
    "decode packed": partial(a_decode, is_packed=True),
    "chunk form": partial(a_decode, exact_packet=False),
    "replay": a_replay,
    "prefill": a_prefill,
    "recurrence": a_recurrence,
    "norm": a_norm,
    "conv": a_conv,
}
# lengths of packets are as fixed as a draft's
PACKETS = [(1, 3, 1, 1), (3, 3, 16, 32), (60, 3, 4, 8), (300, 3, 1, 1), (9, 3, 4, 4)]


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
@pytest.mark.parametrize("name", OTHERS)
def test_others(met, name, target):
    sizes = PACKETS if name in ("decode", "decode packed", "chunk form", "replay") else SIZES
    calls = [OTHERS[name](*size) for size in sizes]
    ahead, launched = met(calls[0], target)
    compiled = launched.union(*ahead.values())
    for size, call in zip(sizes, calls, strict=True):
        assert met(call, target)[1] <= compiled, size
