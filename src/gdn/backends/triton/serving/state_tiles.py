"""Choose the tile of a state that a program keeps in registers; describe pools and rows to kernels."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from gdn.backends.triton.launch import Machine, unit_of
from gdn.problem import DecodeProblem


@dataclass(frozen=True)
class StateTile:
    """Describe the tile of a state that a program keeps in registers, and the warps that share it."""

    R: int
    P: int
    J: int
    W: int
    num_warps: int

    @property
    def share(self) -> int:
        """Return the state elements per lane."""
        return self.R * self.P * self.J * self.W // (32 * self.num_warps)

    def blocks(self, V: int) -> int:
        return triton.cdiv(V, self.R * self.P)

    def is_largest(self, K: int, V: int, axis: str, width: int, gpu: Machine) -> bool:
        """Return True for the largest tile of whole 128-byte lines: programs then prefetch into L2."""
        is_even = K in (64, 128, 256) and V % (self.R * self.P) == 0
        return gpu.kind == "cuda" and axis == "k" and self.share == SHARES[axis, width] and is_even

    def constants(self) -> dict[str, int]:
        A, B = (self.R, self.P) if _R_FIRST else (self.P, self.R)
        return {"A": A, "J": self.J, "B": B, "W": self.W, "R_FIRST": _R_FIRST}


# Triton puts lanes along the first axis of a tensor up to 3.6, and along the last from 3.7 on
_R_FIRST = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7)
# (contiguous axis, bytes of an element) -> state elements in a thread's registers. 16-bit states load faster,
# so a program amortises q, k and gates over more columns: 640 instructions for 8 columns, 920 for 16
SHARES = {("k", 4): 32, ("k", 2): 64, ("v", 4): 32, ("v", 2): 32}
WARPS = 1  # warps share no data; with more of them a program's q and k are merely loaded together
RESIDENT = 16  # programs of the largest tile that an SM holds at a time: 128 registers a thread


def pick_tile(
    K: int, V: int, axis: str, width: int, unit: int, machine: Machine, warps: int = WARPS,
    num_states: int | None = None,
) -> StateTile:  # fmt: skip
    """Choose the tile for states of `width` bytes per element, which are loaded `unit` elements at a time.

    J and W, which decide the order of sums over K, depend on K, axis and width alone. `num_states`: rows x
    heads; tiles have half the columns while all programs are resident at once: at B = 1, 32 heads of
    128 x 128 in bf16 2.7 us and not 2.9, at B = 8 7.6 and not 7.1 (H200).
    """
    lanes, vector = 64 if machine.kind == "hip" else 32, min(16 // width, unit)  # 16-byte loads
    K, V = triton.next_power_of_2(K), triton.next_power_of_2(V)
    columns = max(1, min(SHARES[axis, width] * lanes * warps // K, V))
    if num_states is not None and SHARES[axis, width] == max(SHARES.values()):
        half = max(1, columns // 2)
        columns = half if num_states * (V // half) <= RESIDENT * machine.num_sms else columns
    if axis == "v":
        P = min(vector, columns)
        return StateTile(columns // P, P, K, 1, warps)
    W = min(K, 128 // width)
    R = max(1, lanes * warps * vector // W)
    return StateTile(R, max(1, columns // R), K // W, W, warps)


def state_strides(x: Tensor, K: int, V: int, is_v_first: bool) -> tuple[str, int, tuple[int, ...]]:
    """Return the axis along which states are contiguous ("k", "v" or ""), the unit of strides, the strides.

    x is [..., HV, V, K], or K first. Strides: those before the head, head, K, V.
    """
    v, k = x.stride()[-2:] if is_v_first else x.stride()[:-3:-1]
    axis = "k" if k == 1 or K == 1 else "v" if v == 1 or V == 1 else ""
    strides = (*x.stride()[:-2], 0 if axis == "k" else k, 0 if axis == "v" else v)
    unit = unit_of(*strides)
    return axis, unit, tuple(s // unit for s in strides)


def pool_strides(x: Tensor, K: int, V: int, is_v_first: bool) -> tuple[str, int, tuple[int, ...]]:
    """Return what `state_strides` does for a pool, [slots, HV, V, K] or [slots, R, HV, V, K], or K first.

    Strides: slot, R, head, K, V.
    """
    axis, unit, (n, *ring, h, k, v) = state_strides(x, K, V, is_v_first)
    return axis, unit, (n, *(ring or (0,)), h, k, v)


def scale_strides(x: Tensor | None) -> tuple[int | None, ...]:
    """Return the strides of column scales: slot, R, head, V; None is no parameter of a binary."""
    if x is None:
        return (None,) * 4
    return (x.stride(0), x.stride(1) if x.dim() == 4 else 0, *x.stride()[-2:])


def remainder_strides(x: Tensor | None, is_v_first: bool) -> tuple[int | None, ...]:
    """Return the strides of remainders: slot, head, pair of keys, V; None is no parameter of a binary."""
    if x is None:
        return (None,) * 4
    n, h, *last = x.stride()
    return (n, h, *(last[::-1] if is_v_first else last))


def magic_numbers(n: int) -> tuple[int, int]:
    """Return the constants with which `divide` divides by n below 2**30: ceil(2**s / n) and s."""
    s = 30 + (n - 1).bit_length()
    return -(-(1 << s) // n), s


def kernel_offsets(device: torch.device, cu_seqlens: Tensor | None) -> Tensor | None:
    """Return cu_seqlens as the kernels read it: contiguous, on the device."""
    if cu_seqlens is None:
        return None
    return cu_seqlens.contiguous().to(device, non_blocking=True)


def max_row_tokens(p: DecodeProblem) -> int | None:
    """Return the tokens of the longest row, or None if unknown, as while tracing."""
    longest = p.q.shape[1] if p.cu_seqlens is None else p.max_seqlen
    if p.cu_seqlens is not None and longest is None:
        longest = max((count for _, count in p.token_ranges(read_device=False) or ()), default=0)
    return longest if isinstance(longest, int) else None


def most_tokens(p: DecodeProblem) -> int | None:
    """Return the tokens of a packed row for which all per-token tensors have places; None without any."""
    places = [p.write_index if p.write == "all" else None, p.intermediate, p.parent]
    return min((x.shape[1] for x in places if x is not None and p.cu_seqlens is not None), default=None)
