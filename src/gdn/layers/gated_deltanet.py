"""Define GatedDeltaNet, a token mixer built on the gated delta rule."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gdn.layers.cache import GatedDeltaNetCache
from gdn.layers.conv import ShortConvolution
from gdn.layers.norm import GatedRMSNorm
from gdn.layers.weights import from_transformers
from gdn.notation import Mask, Offsets
from gdn.ops.rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from gdn.problem import ContextParallel, check_context
from gdn.problem.layer import check_cache, check_hidden, check_layer

SHORT = 16  # up to so many tokens, a cached call without gradient runs token by token: a quarter of a chunk


class GatedDeltaNet(nn.Module):
    """Mix tokens: projections, short convolution with SiLU, gated delta rule, gated norm, output projection.

        q, k, v = conv(in_proj_qkv(x));   z, b, a = in_proj_z(x), in_proj_b(x), in_proj_a(x)
        o = gated_delta_rule(l2norm(q), l2norm(k), v, g=-exp(A_log) softplus(a + dt_bias), beta=sigmoid(b))
        y = out_proj(norm(o) * act(z))

    Args:
        hidden_size       width of the residual stream
        num_k_heads       H, query and key heads
        num_v_heads       HV, a multiple of H; value head j reads key head j // (HV // H)
        head_k_dim        K
        head_v_dim        V
        conv_size         W, taps of the short convolution
        with_conv_bias    True: the convolution has a bias per channel
        allow_neg_eigval  True: beta = 2 sigmoid(b)
        norm_eps          eps of the gated norm
        output_gate       "silu" or "sigmoid": the function act
        backend           backend of every operator; None: chosen automatically for each
        device, dtype     device and dtype of the parameters. A_log and dt_bias are created in fp32 (fp64 for
                          fp64) for every dtype, because 16 bits are too few for a log decay. A later
                          `.to(torch.bfloat16)` narrows them like any parameter; the gate is computed in fp32
                          in both cases.

    The parameters have the names of the Qwen3.5 layer: in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv1d,
    A_log [HV], dt_bias [HV], norm, out_proj; conv1d.weight is [2 H K + HV V, W]. All of them get gradients.
    Raises: ValueError for a size that is not positive, or if num_v_heads is not a multiple of num_k_heads.
    Source: arXiv:2412.06464, section 3.4.

    Example:
        >>> import torch, gdn
        >>> layer = gdn.GatedDeltaNet(64, num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16)
        >>> layer(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
        >>> cache = gdn.GatedDeltaNetCache()
        >>> with torch.no_grad():
        ...     y = [layer(x, cache=cache) for x in torch.randn(2, 100, 64).split([98, 1, 1], dim=1)]
        >>> cache.state.shape
        torch.Size([2, 4, 16, 16])
    """

    def __init__(
        self,
        hidden_size: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_size: int = 4,
        *,
        with_conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-6,
        output_gate: str = "silu",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_layer(
            output_gate, backend, hidden_size=hidden_size, num_k_heads=num_k_heads, num_v_heads=num_v_heads,
            head_k_dim=head_k_dim, head_v_dim=head_v_dim, conv_size=conv_size,
        )  # fmt: skip
        self.hidden_size, self.num_k_heads, self.num_v_heads = hidden_size, num_k_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.allow_neg_eigval, self.backend = allow_neg_eigval, backend
        self.key_dim, self.value_dim = num_k_heads * head_k_dim, num_v_heads * head_v_dim
        place = {"device": device, "dtype": dtype}
        channels = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = nn.Linear(hidden_size, channels, bias=False, **place)  # type: ignore[arg-type]
        self.in_proj_z = nn.Linear(hidden_size, self.value_dim, bias=False, **place)  # type: ignore[arg-type]
        self.in_proj_b = nn.Linear(hidden_size, num_v_heads, bias=False, **place)  # type: ignore[arg-type]
        self.in_proj_a = nn.Linear(hidden_size, num_v_heads, bias=False, **place)  # type: ignore[arg-type]
        self.conv1d = ShortConvolution(
            channels, conv_size, with_bias=with_conv_bias, backend=backend, device=device, dtype=dtype
        )
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.A_log = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=wide))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=wide))
        self.norm = GatedRMSNorm(
            head_v_dim, eps=norm_eps, activation=output_gate, backend=backend, device=device, dtype=dtype
        )
        self.out_proj = nn.Linear(self.value_dim, hidden_size, bias=False, **place)  # type: ignore[arg-type]
        self.reset_gates()

    def reset_gates(self) -> None:
        """Draw A_log = log U(0, 16), clamped above log 0; softplus(dt_bias) log-uniform in [0.001, 0.1]."""
        with torch.no_grad():
            self.A_log.uniform_(0, 16).clamp_(min=1e-4).log_()
            dt = self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    @classmethod
    def from_transformers(
        cls,
        source: nn.Module | Mapping[str, Tensor],
        *,
        num_k_heads: int | None = None,
        norm_eps: float | None = None,
        output_gate: str | None = None,
        backend: str | None = None,
    ) -> "GatedDeltaNet":
        """Build the layer with the weights, dtype and device of a Transformers Qwen3-Next or Qwen3.5 layer.

        Args:
            source        the module, or its state_dict
            num_k_heads   required with a state_dict, whose shapes do not determine it; a module provides it
            norm_eps      None: the value of the module; 1e-6 for a state_dict
            output_gate   None: the value of the module; "silu" for a state_dict
        Raises: ValueError if the tensors are not those of such a layer. Transformers is not imported.
        """
        sizes, weights = from_transformers(source, num_k_heads, norm_eps, output_gate)
        like = weights["out_proj.weight"]
        layer = cls(**sizes, backend=backend, device=like.device, dtype=like.dtype)  # type: ignore[arg-type]
        layer.load_state_dict(weights)
        return layer

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
            hidden           [B, T, hidden_size]
            attention_mask   [B, T'] with T' >= T, any dtype, 0 where a token is padding; only the last T
                             columns are used. Padding at any position affects no output, state or window.
            cu_seqlens       [N+1] int32 or int64: packed sequences, B = 1; not with attention_mask
            cu_seqlens_cpu   a copy of cu_seqlens on the CPU, if the caller has one
            cache            the recurrent memory of N sequences (N = B if not packed). The call reads it and
                             stores the new memory in it. With an empty cache the sequences start here.
            cp_context       hidden holds the tokens of this rank, offsets are global: `gdn.ContextParallel`;
                             neither with a mask nor with a cache
        Returns [B, T, hidden_size]: zero at padding and past cu_seqlens[-1].
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
        qkv = self.in_proj_qkv(hidden)
        window, state = (None, None) if cache is None else (cache.conv_state, cache.state)
        if is_short and window is not None and cu_seqlens is None:
            qkv, window = self.conv1d.step(qkv, window)
        else:
            qkv, window = self.conv1d(
                qkv, window, output_final_state=cache is not None, cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context,
            )  # fmt: skip
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        rule = fused_recurrent_gated_delta_rule if is_short else chunk_gated_delta_rule
        o, state = rule(
            q.unflatten(-1, (self.num_k_heads, self.head_k_dim)),
            k.unflatten(-1, (self.num_k_heads, self.head_k_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
            g=self.in_proj_a(hidden),
            beta=self.in_proj_b(hidden),
            initial_state=state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            cp_context=cp_context,
            backend=self.backend,
        )
        if cache is not None:
            cache.conv_state, cache.state = window, state
        z = self.in_proj_z(hidden).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        return self.out_proj(self.norm(o, z).flatten(-2))

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


def pack(mask: Mask) -> tuple[Tensor, Tensor, Offsets]:
    """Sort the real tokens of a padded batch to the front, in order; no length is read on the host.

    For mask [B, T] return order [B T], the token at each packed position; place [B T], its inverse;
    cu_seqlens [B+1].
    """
    order = torch.argsort((~mask).flatten().to(torch.uint8), stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    ends = mask.sum(1).cumsum(0)
    return order, place, torch.cat([ends.new_zeros(1), ends])
