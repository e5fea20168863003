"""Provide the serving functions, and their references, with the options of every serving engine.

q and k are normalised in the kernel and states are [..., HV, V, K]; a call may still pass other values.
"""

from functools import partial
from types import SimpleNamespace

import gdn
from gdn.reference import commit, history, serving

LAYOUT = {"state_v_first": True}
CONVENTIONS = {"use_qk_l2norm_in_kernel": True, **LAYOUT}

decode = partial(gdn.decode, **CONVENTIONS)
decode_packed = partial(gdn.decode_packed, **CONVENTIONS)
decode_functional = partial(gdn.decode_functional, **CONVENTIONS)
decode_step = partial(gdn.decode_step, **CONVENTIONS)
decode_with_history = partial(gdn.decode_with_history, **CONVENTIONS)
fold_history = partial(gdn.fold_history, **LAYOUT)
prefill = partial(gdn.prefill, **CONVENTIONS)
replay_decode = partial(gdn.replay_decode, **CONVENTIONS)
replay_commit = partial(gdn.replay_commit, **LAYOUT)
warmup = partial(gdn.warmup, **CONVENTIONS)

reference = SimpleNamespace(
    commit=commit.commit,
    commit_to_int16=partial(commit.commit_to_int16, **LAYOUT),
    decode=partial(serving.decode, **CONVENTIONS),
    decode_with_history=partial(history.decode_with_history, **CONVENTIONS),
    fold_history=partial(history.fold_history, **LAYOUT),
    prefill=partial(serving.prefill, **CONVENTIONS),
    replay_commit=partial(serving.replay_commit, **LAYOUT),
    replay_decode=partial(serving.replay_decode, **CONVENTIONS),
)
