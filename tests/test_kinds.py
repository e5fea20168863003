"""Another number of heads, sequences or tokens compiles nothing: the first call of a kind has it all.

Launches are recorded, not run, on machines that need not be there.
"""

from dataclasses import replace

import pytest
import torch
from compiling import TARGETS, jobs_of, recording

from gdn.backends import triton as room
from gdn.backends.triton import plans
from gdn.bench.cases import Case, inputs, packed, rows
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


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rule(monkeypatch, kind, is_packed):
    calls = [problem_of(*KINDS[kind], is_packed, size) for size in SIZES]
    for target in TARGETS:
        compiled, launched = [], []
        for problem, given in calls:
            asked = {}
            monkeypatch.setattr(plans, "ahead", lambda device, of, steps, to=asked: to.update({of: steps}))
            with recording(TARGETS[target].machine) as launches:
                run(problem, given)
                launched.append(set(jobs_of(launches, target)))
                ahead = [step for steps in asked.values() for step in steps()]
            compiled.append((set(asked), set(jobs_of(ahead, target))))
        assert len(compiled[0][0]) == 3
        for size, all_of_it, needed in zip(SIZES, compiled, launched, strict=True):
            assert all_of_it == compiled[0], (target, size)
            assert needed <= compiled[0][1] | launched[0], (target, size)
