"""Check that another number of heads, sequences or tokens compiles nothing after the first call of a kind.

Launches are recorded instead of run, on GPUs that need not be there.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from kit import api
from kit.compiling import TARGETS, jobs_of, recording, zeros_for_random_numbers
from kit.serving import inputs as rows_of
from kit.serving import pool_of

import gdn
from gdn.backends import triton as room
from gdn.backends.triton.rule import run as rule
from gdn.backends.triton.serving import decode, replay
from gdn.ops import fastpath
from gdn.problem import parse
from gdn.testing import Case, inputs, packed, rows

ALL = {"use_qk_l2norm_in_kernel": True, "raw_gate": "on", "beta": "sigmoid", "state": "wide"}
# sequences, tokens of each, key heads, value heads: from an almost empty GPU to a full one
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
    """Run a forward alone, and a forward with its backward."""
    room.BACKEND.chunk_forward(problem, False)
    saved = room.BACKEND.chunk_forward(problem, True)[2]
    room.BACKEND.chunk_backward(problem, saved, given.do, given.dfinal_state)


@pytest.fixture(autouse=True)
def no_random_numbers():
    with zeros_for_random_numbers():
        yield


@pytest.fixture
def record_kinds(monkeypatch):
    """Return a function that returns the kernels compiled ahead, by kind, and those launched."""

    def run(call, target):
        asked = {}
        for module in (decode, rule, replay):
            monkeypatch.setattr(
                module, "compile_ahead", lambda device, kind, steps: asked.update({kind: steps})
            )
        with recording(TARGETS[target].machine) as launches:
            call()
            launched = set(jobs_of(launches, target))
            ahead = {kind: frozenset(jobs_of(steps(), target)) for kind, steps in asked.items()}
        return ahead, launched

    yield run
    # calls cached on CPU tensors are valid only while launches are recorded
    fastpath._calls.clear()


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rule(record_kinds, kind, is_packed):
    calls = [problem_of(*KINDS[kind], is_packed, size) for size in SIZES]
    for target in TARGETS:
        first, launched = record_kinds(lambda: run(*calls[0]), target)
        compiled = launched.union(*first.values())
        assert len(first) == 3
        for size, call in zip(SIZES, calls, strict=True):
            ahead, launched = record_kinds(lambda call=call: run(*call), target)
            assert ahead == first, (target, size)
            assert launched <= compiled, (target, size)


def slots(N):
    return torch.arange(N, dtype=torch.int32)


def tokens(N, T, H, HV, is_packed=False, pool=torch.float32):
    rows = (1, N * T) if is_packed else (N, T)
    x = rows_of(*rows, K=128, V=128, H=H, HV=HV, dtype=torch.bfloat16, raw=True)
    if is_packed:
        x |= {"cu_seqlens": slots(N + 1) * T, "max_seqlen": T}
    return x | {"state": pool_of(N, HV=HV, K=128, V=128, dtype=pool), "backend": "triton"}


def decode_call(N, T, H, HV, is_packed=False, pool=torch.float32, **options):
    x = tokens(N, T, H, HV, is_packed, pool)
    return lambda: api.decode(**x, read_index=slots(N), **options)


def replay_call(N, T, H, HV):
    x = tokens(N, T, H, HV)
    u, k = (torch.randn(1, N, 20, heads, 128).bfloat16() for heads in (HV, H))
    G, state = torch.zeros(1, N, 20, HV, dtype=torch.float64), x["state"][None]
    histories = {"history_u": u[0], "history_k": k[0], "history_G": G[0], "cursor": slots(N)}

    def call():
        api.replay_decode(**x, **histories, read_index=slots(N))
        api.replay_commit(state, u, k, G, slots(N), slots(N), slots(N), room=T, backend="triton")

    return call


def prefill_call(N, T, H, HV):
    x = tokens(N, T, H, HV, True)
    del x["max_seqlen"]
    return lambda: api.prefill(**x, state_index=slots(N))


def recurrence_call(N, T, H, HV):
    x = tokens(N, T, H, HV)
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "a", "b"))
    return lambda: gdn.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, backend="triton")


def norm_call(N, T, H, HV):
    x, z = torch.randn(2, N, T, HV, 128).bfloat16().requires_grad_().unbind()
    y = lambda: gdn.rms_norm_gated(x, z, torch.ones(128), activation="silu", backend="triton")  # noqa: E731
    return lambda: y().sum().backward()


def conv_call(N, T, *_):
    """Return a convolution with a fixed number of channels, which is a size of the model, as K is."""
    x = torch.randn(N, T, 768).bfloat16().requires_grad_()
    pool, weight, options = torch.empty(N, 768, 8), torch.randn(768, 4), {"activation": "silu"}

    def call():
        gdn.causal_conv1d(x, weight, **options, backend="triton")[0].sum().backward()
        gdn.causal_conv1d_update(
            x.detach()[:, :1], pool, weight, None, **options, state_index=slots(N), backend="triton"
        )

    return call


OTHERS = {
    "decode": decode_call,
    "decode packed": partial(decode_call, is_packed=True),
    "decode of bf16 states": partial(decode_call, pool=torch.bfloat16),
    "chunk form": partial(decode_call, exact_packet=False),
    "chunk form, bf16 states": partial(decode_call, exact_packet=False, pool=torch.bfloat16),
    "chunk form of 6 tokens": lambda N, T, H, HV: decode_call(N, 2 * T, H, HV, exact_packet=False),
    "replay": replay_call,
    "prefill": prefill_call,
    "recurrence": recurrence_call,
    "norm": norm_call,
    "conv": conv_call,
}
# the length of a packet is fixed, as the number of drafts is
PACKETS = [(1, 3, 1, 1), (3, 3, 16, 32), (60, 3, 4, 8), (300, 3, 1, 1), (9, 3, 4, 4)]


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
@pytest.mark.parametrize("name", OTHERS)
def test_others(record_kinds, name, target):
    sizes = PACKETS if name.startswith(("decode", "chunk form", "replay")) else SIZES
    calls = [OTHERS[name](*size) for size in sizes]
    ahead, launched = record_kinds(calls[0], target)
    compiled = launched.union(*ahead.values())
    for size, call in zip(sizes, calls, strict=True):
        assert record_kinds(call, target)[1] <= compiled, size
