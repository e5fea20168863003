"""Provide gdn::decode_step: the whole decode step of a layer on the pools of an engine."""

from torch import Tensor

from gdn.notation import ConvPool, ConvWeight, GateBias, HeadParam, Index, Pool
from gdn.ops.fastpath import PoolFunction
from gdn.ops.history import HistoryPool
from gdn.ops.int16 import Int16Pool, tensors_of
from gdn.ops.library import Signature
from gdn.problem.step import StepProblem, parse_step


def decode_step(
    mixed_qkv: Tensor,
    conv_state: ConvPool,
    conv_weight: ConvWeight,
    conv_bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    A_log: HeadParam | None,
    dt_bias: GateBias | None,
    state: Pool | Int16Pool | HistoryPool,
    *,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    conv_activation: str | None = "silu",
    z: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str | None = "silu",
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    conv_index: Index | None = None,
    read_index: Index | None = None,
    write_index: Index | None = None,
    use_history: bool | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Run one token per row through a layer between its projections, on the two pools of an engine.

        mixed <- causal_conv1d_update(mixed_qkv, conv_state, conv_weight, conv_bias)
        o     <- decode_packed(mixed, a, b, A_log, dt_bias, state), or decode_with_history
        out   <- rms_norm_gated(o, z, norm_weight)          if z or norm_weight is given

    Args:                        shape                       dtype
        mixed_qkv                [B, 2 H K + HV V]           bf16, fp16, fp32 (fp64 on eager); any row stride;
                                                             rows of q | k | v before the convolution
        conv_state               [slots, D, L]               any float, any strides; L >= W - 1; column L-1 is
                                                             the newest input; updated in place
        conv_weight              [D, W]                      any float; conv_weight[:, W-1] multiplies the
                                                             newest input
        conv_bias                [D] or None                 any float
        a, b                     [B, HV]                     any float; raw logits of the gates; a [B, HV, K]
                                                             and dt_bias [HV, K] decay key channels
        A_log, dt_bias           [HV]                        any float; dt_bias may be None
        state                    [slots, HV, K, V]           as in `decode`, also an Int16Pool; updated in
                                                             place. A HistoryPool of one layer: decode with a
                                                             history
        num_k_heads              int                         H
        head_k_dim, head_v_dim   int                         K, V
        conv_activation          "silu" or None
        z                        [B, HV, V] or None          any float, any strides; None: no gate
        norm_weight              [V] or None                 any float; None: ones, or no norm without z
        norm_eps                 number of at least 0
        norm_activation          "silu", "sigmoid" or None   act(z) in `rms_norm_gated`
        conv_index               [B] int or None             the slot of each row's window; None: read_index
        read_index, write_index  [B] int or None             slots of `state`, as in `decode`
        use_history              bool or None                only with a HistoryPool, as in
                                                             `decode_with_history`; write_index is then None
        null_slot                None or 0                   0: slot 0 of both pools is padding as well
        out                      [B, HV, V] or None          gets the result and is returned
        scale, lower_bound, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, backend: as in `decode`

    Returns: out [B, HV, V], dtype of mixed_qkv.

    Padding: a row whose slot in `state` is invalid outputs the norm of zeros, which is 0 where z is finite. A
            row whose window is invalid runs with q = k = v = 0. No invalid slot is read or written. Two rows
            must not have one slot.
    Bits:   the result of each stage is rounded to the dtype of mixed_qkv, as in the three functions. The bits
            are those of the three functions on the same backend, except that a fused norm in `triton` may sum
            in another order. With a HistoryPool `hopper` has the bits of `triton`.
    Raises: as `decode`; ValueError if a gradient is required. No tensor has been modified then.
    Cost:   that of the three functions; on a GPU in fewer launches where that is faster (`gdn bench step`).
    Source: arXiv:2412.06464, section 3.4.

    Example:
        >>> import torch, gdn
        >>> windows, states = torch.zeros(10, 128, 3), torch.zeros(10, 4, 16, 16)
        >>> a, z, ones = torch.zeros(2, 4), torch.ones(2, 4, 16), torch.ones(16)
        >>> o = gdn.decode_step(
        ...     torch.randn(2, 128), windows, torch.randn(128, 4), None, a, a, torch.zeros(4), None, states,
        ...     num_k_heads=2, head_k_dim=16, head_v_dim=16, z=z, norm_weight=ones,
        ...     read_index=torch.tensor([7, -1]))
        >>> o.shape, bool(o[1].any()), states.flatten(1).any(1).nonzero().tolist()
        (torch.Size([2, 4, 16]), False, [[7]])
    """
    history, room = _NO_HISTORY, None
    if isinstance(state, HistoryPool):
        room = state.room
        history = (state.history_u, state.history_k, state.history_G, state.cursor)
        states, column_scale, remainder = state.state, state.column_scale, state.remainder
    else:
        (states, column_scale), remainder = tensors_of(state), None
    tensors = (
        mixed_qkv, conv_state, conv_weight, conv_bias, a, b, A_log, dt_bias, states, column_scale, remainder,
        conv_index, read_index, write_index, z, norm_weight, *history,
    )  # fmt: skip
    options = (
        num_k_heads, head_k_dim, head_v_dim, conv_activation, norm_eps, norm_activation, scale,
        lower_bound, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, room, use_history, null_slot,
        backend,
    )  # fmt: skip
    return _decode_step(mixed_qkv, tensors, out, options)


_NO_HISTORY: tuple[Tensor | None, ...] = (None,) * 4
_SIGNATURE = Signature(
    "decode_step", ("mixed_qkv", "conv_weight", "conv_bias", "a", "b", "A_log", "dt_bias", "z", "norm_weight")
)
_decode_step = PoolFunction(_SIGNATURE, StepProblem, parse_step)
