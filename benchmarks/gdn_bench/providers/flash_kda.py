"""FlashKDA: MoonshotAI's CUTLASS kernels of the forward with a bounded decay per key channel."""

import math
from typing import Any

import torch
from torch import Tensor

from gdn_bench.providers.arguments import convert_offsets, require_tensors
from gdn_bench.providers.provider import Bound, Options, Provider, Tensors


def flash_kda() -> Provider:
    """Return FlashKDA: the forward with a bounded decay per key channel, no gradients, no decode."""
    from flash_kda import fwd

    def chunk(tensors: Tensors, options: Options) -> Bound:
        q, k, v, g, beta = require_tensors(tensors, "q", "k", "v", "g", "beta")
        require_support(tensors, options)
        (B, _, H, K), V, v_first = q.shape, v.shape[3], options["state_v_first"]
        offsets, state = convert_offsets(tensors, torch.int64), tensors.get("initial_state")
        if state is not None:
            state = (state if v_first else state.transpose(-1, -2)).contiguous()
        final_shape = (B if offsets is None else len(offsets) - 1, H, V, K)
        given = [x.contiguous() for x in (q, k, v, g, beta)]
        scale = K**-0.5 if options["scale"] is None else options["scale"]
        # without these parameters the gate is that of zeros
        A_log, dt_bias = tensors.get("A_log", g.new_zeros(H)), tensors.get("dt_bias", g.new_zeros(H, K))
        arguments: dict[str, Any] = {
            "A_log": A_log.float(), "dt_bias": dt_bias.float(), "lower_bound": options["lower_bound"],
            "initial_state": state, "cu_seqlens": offsets,
        }  # fmt: skip

        def run() -> tuple[Tensor, Tensor | None]:
            o, final = torch.empty_like(given[2]), None
            if options["output_final_state"]:
                final = v.new_empty(final_shape, dtype=torch.float32 if state is None else state.dtype)
            fwd(*given, scale, o, final_state=final, **arguments)
            return o, final

        def restore(results: Any) -> tuple[Tensor, Tensor | None]:
            o, final = results
            if final is None or v_first:
                return o, final
            return o, final.transpose(-1, -2)

        return Bound(run, restore)

    return Provider("flash_kda", {"prefill": chunk})


def require_support(tensors: Tensors, options: Options) -> None:
    """Raise NotImplementedError for problems other than FlashKDA's: a bounded decay per key channel."""
    q, v, g, beta = (tensors[name] for name in ("q", "v", "g", "beta"))
    if g.dim() != 4:
        raise NotImplementedError("supports a decay per key channel only")
    if q.dtype != torch.bfloat16 or (q.shape[3], v.shape[3]) != (128, 128):
        raise NotImplementedError("supports bf16 with K = V = 128 only")
    if q.shape[2] != v.shape[2]:
        raise NotImplementedError("supports one value head per key head only")
    if not options["use_qk_l2norm_in_kernel"]:
        raise NotImplementedError("supports q and k that it normalises only")
    if not options["use_gate_in_kernel"] or not -5 <= options.get("lower_bound", -math.inf) <= 0:
        raise NotImplementedError("supports raw logits of g with a lower bound of -5 to 0 only")
    if not options["use_beta_sigmoid_in_kernel"] or options["allow_neg_eigval"]:
        raise NotImplementedError("supports raw logits of beta in 0 to 1 only")
    if g.dtype != torch.bfloat16 or beta.dtype != torch.bfloat16:
        raise NotImplementedError("supports raw logits in bf16 only")
