"""Compute the gated RMS norm, in blocks of rows that stay in cache, the zero-centred one, and the l2 norm.

y = weight * n * act(z);   n = x * rstd;   rstd = rsqrt(mean(x * x) + eps)
dn = weight * act(z) * dy;   dx = rstd * (dn - n * mean(n * dn))
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gdn.problem.layer import NormProblem

BLOCK = 1 << 17  # elements of a block per thread: 0.5 MiB in fp32


def rms_norm_gated(problem: NormProblem) -> Tensor:
    """Return y in x's dtype; the computation is in fp32 (fp64 for fp64)."""
    x, z = problem.x, problem.z
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = None if problem.weight is None else problem.weight.to(dtype)
    y = x.new_empty(x.shape)
    for part, (xs, zs) in _row_blocks(y, x, z):
        assert xs is not None
        n, _ = normalise(xs.to(dtype), problem.eps)
        if weight is not None:
            # in place: the block stays in the CPU cache, and no new memory is touched
            n = n.mul_(weight)
        if zs is not None:
            n = n.mul_(activate_gate(zs.to(dtype), problem.activation))
        # rounded while it is in cache: the fp32 result never exists as a whole in memory
        part.copy_(n)
    return y


def rms_norm_gated_bwd(problem: NormProblem, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, z and weight, each in its tensor's dtype; sums are in fp32 or fp64."""
    x, z = problem.x, problem.z
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = None if problem.weight is None else problem.weight.to(dtype)
    dx = x.new_empty(x.shape)
    dz = None if z is None else z.new_empty(z.shape)
    dweight = None if weight is None else torch.zeros_like(weight)
    for part, (xs, zs, dys, dzs) in _row_blocks(dx, x, z, dy, dz):
        assert xs is not None and dys is not None
        n, rstd = normalise(xs.to(dtype), problem.eps)
        dn = dys.to(dtype)
        if zs is not None and dzs is not None:
            gate = activate_gate(zs.to(dtype), problem.activation)
            dgate = dn * n if weight is None else dn * n * weight
            dzs.copy_(_activation_bwd(dgate, zs.to(dtype), problem.activation))
            dn = dn * gate
        if weight is not None and dweight is not None:
            # dweight = sum n act(z) dy: added before dn takes the weight
            dweight += (dn * n).flatten(0, -2).sum(0)
            dn = dn * weight
        part.copy_(rstd * (dn - n * (n * dn).mean(-1, keepdim=True)))
    return dx, dz, None if dweight is None else dweight.to(problem.weight.dtype)  # type: ignore[union-attr]


def rms_norm_zero_centred(problem: NormProblem) -> Tensor:
    """Return (x * rsqrt(mean(x * x) + eps)) * (1 + weight), in fp32 and with the strides of empty_like(x).

    Three operators, two for fp32. y + y * weight is in the place of y * (1 + weight).
    """
    x, weight = problem.x, problem.weight
    assert weight is not None
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], None, problem.eps)
    # `out` takes the conversion into the same kernel
    return torch.addcmul(y, y, weight, out=torch.empty_like(x))


def _row_blocks(first: Tensor, *others: Tensor | None) -> Iterator[tuple[Tensor, list[Tensor | None]]]:
    """Yield the same blocks of rows of tensors of one shape [..., D]; None for a tensor that is None."""
    if first.numel() == 0:
        return
    # the head axis is kept where folding it would copy, as in a slice of one projection
    num_axes = 1 if all(x is None or _is_foldable(x) for x in (first, *others)) else 2
    flat = [None if x is None else x.reshape(-1, *x.shape[-num_axes:]) for x in (first, *others)]
    # a CPU works on one block per thread in its cache; a device takes all rows at once
    size = BLOCK * torch.get_num_threads() if first.device.type == "cpu" else first.numel()
    rows = flat[0].shape[0]  # type: ignore[union-attr]
    step = max(1, size * rows // first.numel())
    for i in range(0, rows, step):
        part, *rest = (None if x is None else x[i : i + step] for x in flat)
        yield part, rest  # type: ignore[misc]


def _is_foldable(x: Tensor) -> bool:
    return all(x.stride(i) == x.shape[i + 1] * x.stride(i + 1) for i in range(x.dim() - 2))


def normalise(x: Tensor, eps: float | Tensor) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


def activate_gate(z: Tensor, activation: str | None) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(z)
    return torch.sigmoid(z) if activation == "sigmoid" else z


def _activation_bwd(grad: Tensor, z: Tensor, activation: str | None) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, z)
    if activation == "sigmoid":
        return torch.ops.aten.sigmoid_backward(grad, torch.sigmoid(z))
    return grad


def l2norm_(x: Tensor, eps: float | Tensor = 1e-6) -> Tensor:
    """Scale x by rsqrt(sum(x * x) + eps) over its last axis in place; a row's bits depend on it alone."""
    return x.mul_((x * x).sum(-1, keepdim=True).add_(eps).rsqrt_())
