"""Define KimiDeltaAttention, a token mixer built on the gated delta rule with a decay per key channel."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gdn.layers.conv import ShortConvolution
from gdn.layers.mixer import DeltaRuleMixer
from gdn.layers.norm import GatedRMSNorm
from gdn.layers.weights import from_kimi
from gdn.problem.layer import check_kimi, check_layer


class KimiDeltaAttention(DeltaRuleMixer):
    """Mix tokens as GatedDeltaNet does, with a decay per key channel (KDA).

        q, k, v = conv(in_proj_qkv(x));   z, b, a = in_proj_z(x), in_proj_b(x), in_proj_a(x)
        g = -exp(A_log) softplus(a + dt_bias), or lower_bound sigmoid(exp(A_log) (a + dt_bias))
        o = gated_delta_rule(l2norm(q), l2norm(k), v, g, beta=sigmoid(b))
        y = out_proj(norm(o) * sigmoid(z))

    Args:
        hidden_size       width of the residual stream
        num_k_heads       H, query and key heads
        num_v_heads       HV, a multiple of H; None: H
        head_k_dim        K
        head_v_dim        V; None: K
        conv_size         W, taps of the short convolution
        gate_rank         rank of in_proj_a and in_proj_z, each two linear maps; None: one linear map each
        lower_bound       the gate's lower bound, a number below 0; None: the gate with softplus
        norm_eps          eps of the gated norm
        recompute         True: keep neither q, k, v, nor states, nor the input of out_proj for the backward,
                          which computes them again: the same bits, less memory, more time (docs/limits.md).
                          Calls with cp_context ignore it
        backend           backend of every operator, so not `hopper`, which has the rule alone; None: chosen
                          automatically for each
        device, dtype     device and dtype of the parameters, A_log and dt_bias as in `GatedDeltaNet`

    Parameters: in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv1d, A_log [HV], dt_bias [HV, K], norm,
            out_proj. The two linear maps of a gate_rank are in_proj_a.0 and in_proj_a.1, and so for z.
    Raises: as `GatedDeltaNet`; ValueError for a gate_rank below 1 and a lower_bound that is not below 0.
    Cost:   as `GatedDeltaNet`; the rule of a decay per key channel takes longer (docs/channel_decay.md).
    Source: arXiv:2510.26692. The cache is a `GatedDeltaNetCache`.

    Example:
        >>> import torch, gdn
        >>> layer = gdn.KimiDeltaAttention(64, num_k_heads=2, head_k_dim=16, gate_rank=16, lower_bound=-5.0)
        >>> layer(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_k_heads: int,
        head_k_dim: int,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        *,
        gate_rank: int | None = None,
        lower_bound: float | None = None,
        norm_eps: float = 1e-6,
        recompute: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        HV = num_k_heads if num_v_heads is None else num_v_heads
        V = head_k_dim if head_v_dim is None else head_v_dim
        check_layer(
            "sigmoid", backend, norm_eps, {"recompute": recompute}, hidden_size=hidden_size,
            num_k_heads=num_k_heads, num_v_heads=HV, head_k_dim=head_k_dim, head_v_dim=V, conv_size=conv_size,
        )  # fmt: skip
        check_kimi(gate_rank, lower_bound)
        self.hidden_size, self.num_k_heads, self.num_v_heads = hidden_size, num_k_heads, HV
        self.head_k_dim, self.head_v_dim = head_k_dim, V
        self.allow_neg_eigval, self.recompute, self.backend = False, recompute, backend
        self.gate_rank, self.lower_bound = gate_rank, lower_bound
        self.key_dim, self.value_dim = num_k_heads * head_k_dim, HV * V

        def project(*sizes: int) -> nn.Module:
            maps = [
                nn.Linear(i, o, bias=False, device=device, dtype=dtype)
                for i, o in zip(sizes[:-1], sizes[1:], strict=True)
            ]
            return maps[0] if len(maps) == 1 else nn.Sequential(*maps)

        between = () if gate_rank is None else (gate_rank,)
        channels = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = nn.Linear(hidden_size, channels, bias=False, device=device, dtype=dtype)
        self.in_proj_z = project(hidden_size, *between, self.value_dim)
        self.in_proj_b = nn.Linear(hidden_size, HV, bias=False, device=device, dtype=dtype)
        self.in_proj_a = project(hidden_size, *between, HV * head_k_dim)
        self.conv1d = ShortConvolution(channels, conv_size, backend=backend, device=device, dtype=dtype)
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.A_log = nn.Parameter(torch.empty(HV, device=device, dtype=wide))
        self.dt_bias = nn.Parameter(torch.empty(HV, head_k_dim, device=device, dtype=wide))
        self.norm = GatedRMSNorm(
            V, eps=norm_eps, activation="sigmoid", backend=backend, device=device, dtype=dtype
        )
        self.out_proj = nn.Linear(self.value_dim, hidden_size, bias=False, device=device, dtype=dtype)
        self.reset_gates()

    @classmethod
    def from_transformers(
        cls,
        source: nn.Module | Mapping[str, Tensor],
        *,
        lower_bound: float | None = None,
        norm_eps: float | None = None,
        backend: str | None = None,
    ) -> "KimiDeltaAttention":
        """Build the layer with the weights, dtype and device of a Transformers layer.

        The layers are KimiLinearDeltaAttention, Glm5NextTextLinearAttention and BailingHybridDeltaAttention.

        Args:
            source        the module, or its state_dict
            lower_bound   None: the value of the module; a state_dict has none, which is the softplus gate
            norm_eps      None: the value of the module; 1e-6 for a state_dict
        Raises: ValueError if the tensors are not those of such a layer. Transformers is not imported.
        """
        sizes, weights = from_kimi(source, lower_bound, norm_eps)
        like = weights["out_proj.weight"]
        layer = cls(**sizes, backend=backend, device=like.device, dtype=like.dtype)  # type: ignore[arg-type]
        # the convolution of some checkpoints is fp32 beside bf16
        layer.conv1d.to(weights["conv1d.weight"].dtype)
        layer.load_state_dict(weights)
        return layer

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gate_rank={self.gate_rank}, lower_bound={self.lower_bound}"
