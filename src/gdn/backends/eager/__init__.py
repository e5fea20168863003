"""Compute everything with plain PyTorch: the default on the CPU, and what other backends must agree with."""

from gdn.backends.backend import Backend
from gdn.backends.eager import stages
from gdn.backends.eager.borders import backward_begin, forward_begin
from gdn.backends.eager.conv import causal_conv1d, causal_conv1d_bwd, causal_conv1d_update
from gdn.backends.eager.decode import decode
from gdn.backends.eager.gate import gate, gate_bwd
from gdn.backends.eager.history import appends_history, decode_with_history, fold_history
from gdn.backends.eager.norm import rms_norm_gated, rms_norm_gated_bwd, rms_norm_zero_centred
from gdn.backends.eager.prefill import commit, prefill
from gdn.backends.eager.propagate import propagate_states
from gdn.backends.eager.recurrent import recurrent_forward
from gdn.backends.eager.replay import replay_commit, replay_decode
from gdn.backends.eager.rule import chunk_backward, chunk_forward, recompute_saved, saves
from gdn.backends.eager.step import decode_step

BACKEND = Backend(
    name="eager",
    refuses=lambda problem: None,
    saves=saves,
    chunk_forward=chunk_forward,
    recompute_saved=recompute_saved,
    chunk_backward=chunk_backward,
    forward_launches=lambda problem, S_in_dtype, pool: (),
    backward_launches=lambda problem, saved, do, dS: (),
    recurrent_forward=recurrent_forward,
    forward_begin=forward_begin,
    backward_begin=backward_begin,
    propagate_states=propagate_states,
    causal_conv1d=causal_conv1d,
    causal_conv1d_bwd=causal_conv1d_bwd,
    causal_conv1d_update=causal_conv1d_update,
    rms_norm_gated=rms_norm_gated,
    rms_norm_gated_bwd=rms_norm_gated_bwd,
    rms_norm_zero_centred=rms_norm_zero_centred,
    chunk_cumsum=stages.chunk_cumsum,
    chunk_cumsum_bwd=stages.chunk_cumsum_bwd,
    chunk_gate_cumsum=stages.chunk_gate_cumsum,
    chunk_gate_cumsum_bwd=stages.chunk_gate_cumsum_bwd,
    chunk_kkt=stages.chunk_kkt,
    chunk_kkt_bwd=stages.chunk_kkt_bwd,
    solve_tril=stages.solve_tril,
    solve_tril_bwd=stages.solve_tril_bwd,
    wy_transform=stages.wy_transform,
    wy_transform_bwd=stages.wy_transform_bwd,
    chunk_state=stages.chunk_state,
    chunk_state_bwd=stages.chunk_state_bwd,
    chunk_output=stages.chunk_output,
    chunk_output_bwd=stages.chunk_output_bwd,
    decode=decode,
    decode_step=decode_step,
    prefill=prefill,
    commit=commit,
    replay_decode=replay_decode,
    replay_commit=replay_commit,
    decode_with_history=decode_with_history,
    fold_history=fold_history,
    appends_history=appends_history,
    gate=gate,
    gate_bwd=gate_bwd,
)
