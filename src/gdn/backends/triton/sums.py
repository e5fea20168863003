"""Add partial sums over a whole batch, in a fixed order.

Kernels store one partial sum per program, and this kernel adds them. There are no atomics, so the same inputs
give the same bits.
"""

import triton
import triton.language as tl

from gdn.backends.triton.launch import Launch, kernel

BP, BD = 256, 16  # partial sums and columns that a program loads at once: a tile of 4096 in registers


@kernel
def add_kernel(
    partial_ptr, first_ptr, last_ptr, num_partials, D, partial_step, partial_row, first_row, first_column,
    ROWS: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add num_partials times [ROWS, D]; store all rows but the last to first_ptr, the last to last_ptr.

    Program (column block, row): BD columns of one row. Grid: cdiv(D, BD) * ROWS, rows fastest; 4 warps; no
    PDL. Reads every partial sum once, [BP, BD] at a time into registers; writes BD sums.
    """
    row = tl.program_id(0) % ROWS
    columns = (tl.program_id(0) // ROWS) * BD + tl.arange(0, BD)
    is_column = columns < D
    lanes = tl.arange(0, BP)[:, None]
    total = tl.zeros([BP, BD], partial_ptr.dtype.element_ty)
    # the tile stays in registers over the loop; one reduction follows it
    for i in range(0, num_partials, BP):
        place = (i + lanes).to(tl.int64) * partial_step + row * partial_row + columns[None, :]
        total += tl.load(partial_ptr + place, mask=(i + lanes < num_partials) & is_column[None, :], other=0.0)
    sums = tl.sum(total, 0)
    if first_ptr is not None:
        first = first_ptr + row * first_row + columns * first_column
        tl.store(first, sums.to(first_ptr.dtype.element_ty), mask=is_column & (row < ROWS - 1))
    if last_ptr is not None:
        tl.store(last_ptr + columns, sums.to(last_ptr.dtype.element_ty), mask=is_column & (row == ROWS - 1))


def add(
    num_partials: int, rows: int, D: int, strides: tuple[int, int] = (0, 0), *, is_row_first: bool = False
) -> Launch:
    """Return Launch(partial, first or None, last or None). strides: those of first, by row and by column.

    `partial` is [num_partials, rows, D], or [rows, num_partials, D] with is_row_first.
    """
    # strides of the partial sums: by program and by row
    apart = (D, num_partials * D) if is_row_first else (rows * D, D)
    scalars = (num_partials, D, *apart, *strides)
    constants = {"ROWS": rows, "BP": BP, "BD": BD}
    return Launch(add_kernel, triton.cdiv(D, BD) * rows, scalars, constants, num_warps=4)
