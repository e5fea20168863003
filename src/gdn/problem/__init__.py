"""The door: callers' tensors in, checked frozen problems out. Nothing below validates again."""

from gdn.problem.replay import KeepProblem, ReplayProblem
from gdn.problem.rule import CHUNK, RESET, ContextParallel, Problem, host_offsets, parse
from gdn.problem.serving import CommitProblem, DecodeProblem, PrefillProblem

__all__ = [
    "CHUNK",
    "RESET",
    "CommitProblem",
    "ContextParallel",
    "DecodeProblem",
    "KeepProblem",
    "PrefillProblem",
    "Problem",
    "ReplayProblem",
    "host_offsets",
    "parse",
]
