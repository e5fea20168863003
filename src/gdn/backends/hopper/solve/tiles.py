"""Locate the tiles of `solve`: a tile is a chunk and a value head."""

from typing import Any

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import jit, struct

# registers of one warp, tokens down: 16 bytes a lane
TILE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


@struct
class Grid:
    """Hold the sizes that a tile's number is divided by."""

    table_ptr: Any  # first token and length of each chunk of packed sequences, or None
    T: Any
    HV: Any
    ratio: Any  # value heads of a key head
    chunks_per_row: Any

    @jit
    def locate(self, n):
        """Return the index of tile n, or of a step of n tiles."""
        # value heads of a chunk are neighbours in time: they share k, which then comes from L2
        chunk = n // self.HV
        head = n % self.HV
        if self.table_ptr is None:
            row = chunk // self.chunks_per_row
            return Tile(row, chunk % self.chunks_per_row, head // self.ratio, head % self.ratio)
        else:
            # packed sequences lie in one row; their chunks are numbered by the table in HBM
            return Tile(n * 0, chunk, head // self.ratio, head % self.ratio)

    @jit
    def count_used(self, count, total_at):
        """Return the number of tiles of chunks that sequences have, of `count` tiles; total_at 0: all."""
        if self.table_ptr is not None and total_at > 0:
            # unused entries come last in the table
            count = gl.minimum(count, gl.load(self.table_ptr + total_at) * self.HV)
        return count


@struct
class Tile:
    """Hold the index of a tile: row, chunk, key head, and value head within the key head."""

    row: Any
    chunk: Any
    key: Any
    value: Any

    @jit
    def advance_by(self, step, grid):
        """Add the index of a step with carries, without an integer division."""
        value = self.value + step.value
        is_over = (value >= grid.ratio).to(gl.int32)
        key = self.key + step.key + is_over
        value -= is_over * grid.ratio
        is_over = (key * grid.ratio >= grid.HV).to(gl.int32)
        chunk = self.chunk + step.chunk + is_over
        key -= is_over * (grid.HV // grid.ratio)
        row = self.row + step.row
        if grid.table_ptr is None:
            is_over = (chunk >= grid.chunks_per_row).to(gl.int32)
            row += is_over
            chunk -= is_over * grid.chunks_per_row
        return Tile(row, chunk, key, value)

    @jit
    def tokens(self, grid):
        """Return the first token of the chunk in its row, and its length; below 0: tokens of no sequence."""
        if grid.table_ptr is None:
            return self.chunk * C, gl.minimum(grid.T - self.chunk * C, C)
        else:
            entry = grid.table_ptr + 2 * self.chunk
            return gl.load(entry), gl.load(entry + 1)


@jit
def zero_outputs(o_ptr, place, count, HV, D: gl.constexpr):
    """Store zeros to HBM for the outputs of a chunk's first `count` tokens."""
    i = gl.arange(0, C, gl.SliceLayout(1, TILE_ROWS))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, TILE_ROWS))[None, :]
    for column in gl.static_range(0, D, C):
        none = gl.zeros((C, C), gl.float32, TILE_ROWS)
        gl.store(o_ptr + (place + i * HV) * D + (column + j), none, mask=i < count)
