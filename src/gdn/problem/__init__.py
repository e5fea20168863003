"""Check the tensors and options of a call and return a frozen problem.

All validation is in this folder; no module below it validates again.
"""

from gdn.problem.commit import CommitProblem
from gdn.problem.history import FoldProblem, HistoryProblem
from gdn.problem.prefill import PrefillProblem
from gdn.problem.replay import KeepProblem, ReplayProblem
from gdn.problem.rule import (
    RESET,
    ContextParallel,
    Problem,
    check_context,
    check_decoder,
    check_next_token,
    host_offsets,
    parse,
)
from gdn.problem.serving import DecodeProblem
from gdn.problem.shapes import CHUNK

__all__ = [
    "CHUNK",
    "RESET",
    "CommitProblem",
    "ContextParallel",
    "DecodeProblem",
    "FoldProblem",
    "HistoryProblem",
    "KeepProblem",
    "PrefillProblem",
    "Problem",
    "ReplayProblem",
    "check_context",
    "check_decoder",
    "check_next_token",
    "host_offsets",
    "parse",
]
