"""Share what layers of the gated delta rule have in common: masks, packing, caches, convolution, rule."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gdn.layers.cache import GatedDeltaNetCache
from gdn.layers.conv import ShortConvolution, convolve_and_split
from gdn.layers.norm import GatedRMSNorm
from gdn.layers.projections import SharedInput, has_own_forward
from gdn.layers.recompute import can_recompute, freeze, recomputing
from gdn.notation import Mask, Offsets
from gdn.ops.conv import holds_alone
from gdn.ops.rule import chunk_gated_delta_rule, chunk_on_own_keys, fused_recurrent_gated_delta_rule
from gdn.problem import ContextParallel, check_context
from gdn.problem.layer import check_cache, check_hidden

SHORT = 16  # up to so many tokens, a cached call without gradient runs token by token: a quarter of a chunk


class DeltaRuleMixer(nn.Module):
    """Mix tokens by the modules and sizes that a subclass makes in its __init__.

    in_proj_a gives the logits of the decay, one for each number of dt_bias: [HV], or [HV, K] for a decay per
    key channel.
    """

    hidden_size: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    value_dim: int
    allow_neg_eigval: bool
    backend: str | None
    lower_bound: float | None = None
    recompute: bool = False

    in_proj_qkv: nn.Linear
    in_proj_z: nn.Module
    in_proj_b: nn.Linear
    in_proj_a: nn.Module
    conv1d: ShortConvolution
    A_log: nn.Parameter
    dt_bias: nn.Parameter
    norm: GatedRMSNorm
    out_proj: nn.Linear

    def reset_gates(self) -> None:
        """Draw A_log = log U(0, 16), clamped above log 0; softplus(dt_bias) log-uniform in [0.001, 0.1]."""
        with torch.no_grad():
            self.A_log.uniform_(0, 16).clamp_(min=1e-4).log_()
            dt = self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def forward(
        self,
        hidden: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Offsets | None = None,
        cu_seqlens_cpu: Offsets | None = None,
        cache: GatedDeltaNetCache | None = None,
        cp_context: ContextParallel | None = None,
    ) -> Tensor:
        """Mix the tokens of each sequence.

        Args:
            hidden           [B, T, hidden_size], in the dtype of the weights (any float under autocast)
            attention_mask   [B, T'] with T' >= T, any dtype, 0 where a token is padding; only the last T
                             columns are used. Padding at any position affects no output, state or window.
            cu_seqlens       [N+1] int32 or int64: packed sequences, B = 1; not with attention_mask
            cu_seqlens_cpu   a copy of cu_seqlens on the CPU, if the caller has one
            cache            the recurrent memory of N sequences (N = B if not packed). The call reads it and
                             stores the new memory in it. With an empty cache the sequences start here.
            cp_context       hidden holds the tokens of this rank, offsets are global: `gdn.ContextParallel`;
                             neither with a mask nor with a cache
        Returns [B, T, hidden_size], dtype of hidden or of autocast: zero at padding and past cu_seqlens[-1].
        Raises: TypeError and ValueError for inputs that do not fit, before anything is computed.

        A call of up to 16 tokens with a cache and without gradient runs token by token. Any other call runs
        in chunks of 64.
        """
        if cp_context is not None:
            check_context(cp_context, attention_mask=attention_mask, cache=cache)
        check_hidden(hidden, attention_mask, cu_seqlens, self.hidden_size, self._weight_dtype())
        B, T, _ = hidden.shape
        check_cache(
            cache, GatedDeltaNetCache, B if cu_seqlens is None else cu_seqlens.shape[0] - 1,
            self.conv1d.weight, (self.num_v_heads, self.head_k_dim, self.head_v_dim),
        )  # fmt: skip
        is_short = cache is not None and T <= SHORT and not torch.is_grad_enabled()
        if attention_mask is None:
            if cu_seqlens is not None and cp_context is None:
                # tokens past the end may hold any value, too
                is_past = torch.arange(T, device=hidden.device) >= cu_seqlens[-1].to(hidden.device)
                hidden = hidden.masked_fill(is_past[:, None], 0)
            return self._mix(hidden, cu_seqlens, cu_seqlens_cpu, cache, is_short, cp_context)
        mask = attention_mask[:, attention_mask.shape[1] - T :] != 0
        order, place, cu_seqlens = pack(mask)
        # padding may hold any value, also NaN; masked_fill makes its gradient zero as well
        packed = hidden.masked_fill(~mask[..., None], 0).flatten(0, 1)[order]
        out = self._mix(packed[None], cu_seqlens, None, cache, is_short)
        return out[0][place].view(B, T, self.hidden_size)

    def _mix(
        self, hidden: Tensor, cu_seqlens: Offsets | None, cu_seqlens_cpu: Offsets | None,
        cache: GatedDeltaNetCache | None, is_short: bool, cp_context: ContextParallel | None = None,
    ) -> Tensor:  # fmt: skip
        shared = SharedInput(hidden, self.in_proj_qkv, self.in_proj_a, self.in_proj_b, self.in_proj_z)
        gates = Once(lambda: shared.project(self.in_proj_a, self.in_proj_b))
        gating = Once(lambda: shared.project_last(self.in_proj_z))
        (qkv,) = shared.project(self.in_proj_qkv)
        window, state = (None, None) if cache is None else (cache.conv_state, cache.state)
        lengths: dict[str, Any] = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
        kept: AbstractContextManager[Any] = nullcontext()
        if is_short and window is not None and cu_seqlens is None:
            qkv, window = self.conv1d.step(qkv, window)
            parts = qkv.split(self._widths, dim=-1)
        else:
            old, context = window, cp_context and cp_context.overlap(gates)
            parts, window = convolve_and_split(
                self.conv1d, self._widths, qkv, old, output_final_state=cache is not None, cp_context=context,
                **lengths,
            )  # fmt: skip
            if self.recompute and holds_alone(parts[0]) and can_recompute(*parts):
                given = qkv.detach(), None if old is None else old.detach()
                again = partial(convolve_and_split, freeze(self.conv1d), self._widths, *given, **lengths)
                inputs = [x for x in given if x is not None]
                kept = recomputing(lambda: again()[0], self.conv1d, inputs, *parts)
        del qkv  # without a graph, the convolution's input is free during the rule
        with kept:
            options = {"initial_state": state, "output_final_state": cache is not None, **lengths}
            context = cp_context and cp_context.overlap(gating)
            o, state = self._run_rule(parts, gates(), is_short, cp_context=context, **options)
        if cache is not None:
            cache.conv_state, cache.state = window, state
        del parts, kept  # and q, k, v are free during the norm and the projections
        z = gating().unflatten(-1, (self.num_v_heads, self.head_v_dim))
        y = self.norm(o, z).flatten(-2)
        # another norm may have buffers, or draw random numbers
        is_own = type(self.norm) is GatedRMSNorm and has_own_forward(self.norm)
        if not (self.recompute and is_own and can_recompute(y)):
            return self.out_proj(y)  # type: ignore[no-any-return]
        inputs = [o.detach(), z.detach()]
        normalise = partial(freeze(self.norm), *inputs)
        with recomputing(lambda: (normalise().flatten(-2),), self.norm, inputs, y):
            return self.out_proj(y)  # type: ignore[no-any-return]

    @property
    def _widths(self) -> list[int]:
        """Return the channels of q, k and v."""
        return [self.key_dim, self.key_dim, self.value_dim]

    def _run_rule(
        self, parts: tuple[Tensor, ...], logits: tuple[Tensor, ...], is_short: bool, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run the rule on the channels of q, k and v and on the logits of the gates."""
        q, k, v = parts
        a, b = logits
        rule: Callable[..., Any] = fused_recurrent_gated_delta_rule
        if not is_short:
            rule = chunk_on_own_keys if holds_alone(q) else chunk_gated_delta_rule
            options["recompute"] = self.recompute and options["cp_context"] is None
        return rule(  # type: ignore[no-any-return]
            q.unflatten(-1, (self.num_k_heads, self.head_k_dim)),
            k.unflatten(-1, (self.num_k_heads, self.head_k_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
            g=a.unflatten(-1, self.dt_bias.shape),
            beta=b,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            backend=self.backend,
            **options,
        )

    def _weight_dtype(self) -> torch.dtype | None:
        """Return the dtype that inputs must have, or None under autocast and for a replaced projection."""
        projection = self.in_proj_qkv
        is_replaced = type(projection) is not nn.Linear
        if is_replaced or torch.is_autocast_enabled(projection.weight.device.type):
            return None
        return projection.weight.dtype

    def extra_repr(self) -> str:
        heads = f"num_k_heads={self.num_k_heads}, num_v_heads={self.num_v_heads}"
        dims = f"head_k_dim={self.head_k_dim}, head_v_dim={self.head_v_dim}"
        return f"{self.hidden_size}, {heads}, {dims}, allow_neg_eigval={self.allow_neg_eigval}"


class Once:
    """Compute a value when it is first needed: during an exchange of context parallelism, or later."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute, self._value = compute, None

    def __call__(self) -> Any:
        if self._value is None:
            self._value = self._compute()
        return self._value


def pack(mask: Mask) -> tuple[Tensor, Tensor, Offsets]:
    """Sort the real tokens of a padded batch to the front, in order; no length is read on the host.

    For mask [B, T] return order [B T], the token at each packed position; place [B T], its inverse;
    cu_seqlens [B+1].
    """
    order = torch.argsort((~mask).flatten().to(torch.uint8), stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    ends = mask.sum(1).cumsum(0)
    return order, place, torch.cat([ends.new_zeros(1), ends])
