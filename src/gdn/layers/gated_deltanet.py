"""Define GatedDeltaNet, a token mixer built on the gated delta rule."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gdn.layers.conv import ShortConvolution
from gdn.layers.mixer import DeltaRuleMixer
from gdn.layers.norm import GatedRMSNorm
from gdn.layers.weights import from_transformers
from gdn.problem.layer import check_layer


class GatedDeltaNet(DeltaRuleMixer):
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
        recompute         True: keep neither q, k, v, nor states, nor the input of out_proj for the backward,
                          which computes them again: the same bits, less memory, more time (docs/limits.md).
                          Calls with cp_context ignore it
        backend           backend of every operator, so not `hopper`, which has the rule alone; None: chosen
                          automatically for each
        device, dtype     device and dtype of the parameters. A_log and dt_bias are created in fp32 (fp64 for
                          fp64) for every dtype, because 16 bits are too few for a log decay. A later
                          `.to(torch.bfloat16)` narrows them like any parameter; the gate is computed in fp32
                          in both cases.

    The parameters have the names of the Qwen3.5 layer: in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv1d,
    A_log [HV], dt_bias [HV], norm, out_proj; conv1d.weight is [2 H K + HV V, W]. All of them get gradients.
    Raises: TypeError, ValueError for a size that is not a positive int, a num_v_heads that is not a multiple
            of num_k_heads, a negative norm_eps and an unknown output_gate or backend.
    Cost:   five matmuls, the convolution, the rule and the norm; memory in docs/limits.md.
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
        recompute: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        flags = {
            "with_conv_bias": with_conv_bias, "allow_neg_eigval": allow_neg_eigval, "recompute": recompute,
        }  # fmt: skip
        check_layer(
            output_gate, backend, norm_eps, flags, hidden_size=hidden_size, num_k_heads=num_k_heads,
            num_v_heads=num_v_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim, conv_size=conv_size,
        )  # fmt: skip
        self.hidden_size, self.num_k_heads, self.num_v_heads = hidden_size, num_k_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.allow_neg_eigval, self.recompute, self.backend = allow_neg_eigval, recompute, backend
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
