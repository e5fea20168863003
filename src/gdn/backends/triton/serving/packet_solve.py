"""Invert the triangular system of a packet by forward substitution, in the registers of one warp.

The MMAs of `invert_unit_lower` are a chain: of 16 tokens six fp32 products of three MMAs each, whose
operands move between lanes. Substitution is a chain of one shuffle and one fma per token, in fp32 registers,
without shared memory.
"""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.launch.pdl import ON_GPU

HALF = 8  # rows of an MMA's result between two registers of a lane


def substitution(count: int, num_warps: int) -> str:
    """Return PTX that solves (I + A) X = I by rows: X[i] -= A[i, j] X[j] for j = 0, 1, .. count - 2.

    Operands are a lane's registers of X, -A and I [16, 16] as an MMA of m16n8 has its result: lane 4 g + c
    has rows g and g + 8, columns 2 c and 2 c + 1, and with num_warps 1 columns 8 more. 4 or 8 tokens are the
    last 8 rows and columns. A shuffle brings X[j] to all rows, and another one, within four lanes, A[i, j] to
    all columns.
    """
    is_long, num = count > HALF, 8 // num_warps
    x, minus_a = [f"${i}" for i in range(num)], [f"${num + i}" for i in range(num)]
    lines = ["{ .reg .b32 lane, from; .reg .f32 a0, a1, x0, x1, x2, x3;", "mov.u32 lane, %laneid;"]
    lines += ["and.b32 lane, lane, 3;"]
    lines += [f"mov.b32 {x[i]}, ${2 * num + i};" for i in range(num)]

    def row(to: str, register: str) -> str:
        return f"shfl.sync.idx.b32 {to}, {register}, from, 0x1f, 0xffffffff;"

    def column(to: str, register: str, j: int) -> str:
        return f"shfl.sync.idx.b32 {to}, {register}, {j // 2}, 0x1c1f, 0xffffffff;"

    last = num - 2  # registers of the last rows and columns: two from here on
    for j in range(count - 1):
        lines += [f"add.u32 from, lane, {4 * (j % HALF)};"]
        if is_long and j < HALF:
            # X[j] has no later columns yet, and A[i, j] is in both halves of the rows
            lines += [row("x0", x[0]), row("x1", x[1])]
            lines += [column("a0", minus_a[j % 2], j), column("a1", minus_a[2 + j % 2], j)]
            sums = [(0, "a0", "x0"), (1, "a0", "x1"), (2, "a1", "x0"), (3, "a1", "x1")]
        else:
            sums = [(last, "a0", "x2"), (last + 1, "a0", "x3")]
            lines += [row("x2", x[last]), row("x3", x[last + 1])]
            if is_long:
                lines += [row("x0", x[2]), row("x1", x[3])]
                sums += [(2, "a0", "x0"), (3, "a0", "x1")]
            lines += [column("a0", minus_a[last + j % 2], j % HALF)]
        lines += [f"fma.rn.f32 {x[i]}, {a}, {y}, {x[i]};" for i, a, y in sums]
    return "\n".join([*lines, "}"])


def constraints(num: int) -> str:
    """Return the constraints of the operands: num results in registers of their own, and 2 num inputs."""
    return ",".join(["=&f"] * num + ["f"] * (2 * num))


# texts by tokens and warps; 16 tokens run in one warp
FOUR, EIGHT, SIXTEEN = (tl.constexpr(substitution(count, 1)) for count in (4, 8, 16))
FOUR_IN_TWO, EIGHT_IN_TWO = (tl.constexpr(substitution(count, 2)) for count in (4, 8))
IN_ONE, IN_TWO = tl.constexpr(constraints(8)), tl.constexpr(constraints(4))


@jit
def substitute(A, LEVELS: tl.constexpr, SHUFFLES: tl.constexpr):
    """Return (I + A)^-1 of A [16, 16]; it is zero but for 2^LEVELS tokens, up to 8 of them in the last rows.

    SHUFFLES: 0, or the warps that have A as an MMA's result, each all of it or 8 columns.
    """
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    X = tl.where(i == j, 1.0, 0.0)
    if ON_GPU and SHUFFLES == 2:
        return _run(FOUR_IN_TWO if LEVELS == 2 else EIGHT_IN_TWO, IN_TWO, A, X, 4)
    elif ON_GPU and SHUFFLES == 1:
        return _run(FOUR if LEVELS == 2 else EIGHT if LEVELS == 3 else SIXTEEN, IN_ONE, A, X, 8)
    else:
        FIRST: tl.constexpr = 0 if LEVELS == 4 else 8
        END: tl.constexpr = 11 if LEVELS == 2 else 15
        for step in tl.static_range(FIRST, END):
            row = tl.sum(tl.where(i == step, X, 0.0), 0)[None, :]
            column = tl.sum(tl.where(j == step, A, 0.0), 1)[:, None]
            X = tl.fma(-column, row, X)
        return X


@jit
def _run(TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr, A, X, NUM: tl.constexpr):
    # not pure: Triton then keeps the layout of an MMA's result, which the text assumes
    return tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, [-A, X], dtype=tl.float32, is_pure=False, pack=NUM
    )  # fmt: skip
