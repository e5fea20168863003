"""Group what the partitions of a scan CTA share. One value, `Scan`, is passed to each of them.

The kernels' own signatures are flat: they are what the host passes. A binary has no trace of a struct.
"""

from typing import Any

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import NUM_ROWS, WELL_CONDITIONED, C
from gdn.backends.hopper.gluon import fence_async_shared, jit, mbarrier, struct
from gdn.backends.hopper.scan.scheduler import ONE_WARPGROUP, stage_and_phase
from gdn.backends.triton.rule.pool import UNIT


@struct
class Config:
    """Hold the compile-time constants of a scan."""

    CONSUMERS: Any  # consumer warpgroups of a CTA, 64 value rows of S^T each
    D: Any  # K = V, 64 or 128
    V_FIRST: Any  # states in HBM are [V, K]
    FAST_PATH: Any  # well-conditioned chunks take the fast path
    IN_SEGMENTS: Any  # the table in HBM holds the work items of segments


@struct
class Inputs:
    """Hold the TMA descriptors and HBM pointers that a scan reads."""

    q: Any  # descriptor [1, C, 1, 64], or None: no outputs
    k: Any
    v: Any
    A: Any  # descriptors [1, rows, C] of A_inv, from the upper rows down: two of 32 rows, or four of 16
    factors: Any  # descriptor [1, BOX_LINES, LINE]
    factors_ptr: Any
    initial_ptr: Any  # states, or None


@struct
class Outputs:
    """Hold the TMA descriptors and HBM pointers that a scan writes; None where it does not."""

    o: Any  # descriptor [C, 64]
    S: Any  # descriptor [K, 64] of the states that enter the chunks, keys down
    o_ptr: Any
    final_ptr: Any


@struct
class Slots:
    """Hold which slots of a pool in HBM the sequences read and write: see `triton.rule.pool`."""

    index_ptr: Any
    out_index_ptr: Any  # or None
    has_initial_ptr: Any  # or None
    state_n: Any  # strides of the pool in UNIT elements
    state_h: Any
    index_n: Any
    out_index_n: Any
    has_initial_n: Any
    slots: Any
    lowest: Any

    @jit
    def is_slot(self, slot):
        """Return True if the pool has the slot."""
        return (slot >= self.lowest) & (slot < self.slots)

    @jit
    def offset(self, slot, head):
        """Return the first element of a state."""
        return (slot * self.state_n + head * self.state_h) * UNIT


@struct
class Tiles:
    """Hold the shared memory of all pipeline stages, and the buffers of the TMA stores."""

    qk: Any  # q over k
    v: Any  # [C, 64] of each consumer
    A_rows: Any  # what one TMA load of A_inv writes
    A: Any  # the same memory as [C, C]
    factor_boxes: Any  # what one TMA load of factors writes
    factors: Any  # the same memory, row by row
    P: Any  # [C, C], or None
    o: Any  # [C, 64] of each consumer, or None
    S: Any  # [K, 64] of each consumer, or None

    @jit
    def load_row(self, stage, ROW: gl.constexpr, layout: gl.constexpr):
        """Load one row of a chunk's factors [C] from shared memory."""
        return self.factors.index(NUM_ROWS * stage + ROW).reshape([C]).load(layout)

    @jit
    def load_scalar(self, stage, PLACE: gl.constexpr):
        """Load one factor of a chunk from shared memory as a scalar."""
        row = self.factors.index(NUM_ROWS * stage + PLACE // C).reshape([C])
        # a maximum over one element gives every lane the same scalar register
        return gl.max(row.slice(PLACE % C, 1).load(ONE_WARPGROUP), 0)

    @jit
    def is_well_conditioned(self, stage):
        """Return True if `solve` found the chunk of a stage well-conditioned."""
        return self.load_scalar(stage, WELL_CONDITIONED) > 0.0


@struct
class Pipeline:
    """Hold the mbarriers of the pipeline stages."""

    full: Any  # 1 arrival, by the producer, and its TMA bytes
    empty: Any  # 1 arrival by each reader of the stage: the score warpgroup and the consumers
    P_full: Any  # 1 arrival, by the score warpgroup; None without outputs

    @jit
    def wait_full(self, i):
        """Wait until the tiles and factors of the CTA's chunk i are in shared memory; return its stage."""
        stage, phase = stage_and_phase(i, self.full)
        mbarrier.wait(self.full.index(stage), phase)
        return stage

    @jit
    def wait_empty(self, stage, phase):
        """Wait until all readers have released the chunk that was in the stage before."""
        # the opposite phase: the first pass over the stages does not block
        mbarrier.wait(self.empty.index(stage), phase ^ 1)

    @jit
    def wait_scores(self, stage, phase):
        """Wait until P of the stage is in shared memory."""
        mbarrier.wait(self.P_full.index(stage), phase)

    @jit
    def publish_scores(self, stage):
        """Publish P of the stage to the consumers, and release the stage."""
        # Order the reads of the stage before the TMA loads that overwrite it, and the writes of P before the
        # MMA that reads P: TMA and WGMMA access shared memory through the async proxy.
        fence_async_shared()
        mbarrier.arrive(self.P_full.index(stage), count=1)
        mbarrier.arrive(self.empty.index(stage), count=1)

    @jit
    def release(self, stage):
        """Release the stage to the producer."""
        # order this warpgroup's reads of shared memory before the TMA loads that overwrite them
        fence_async_shared()
        mbarrier.arrive(self.empty.index(stage), count=1)


@struct
class Position:
    """Hold where a chunk is: its first token and tile in HBM, its head, the first value row of S^T."""

    token: Any
    tile: Any
    head: Any
    first_v: Any

    @jit
    def advance_by(self, i, HV):
        """Return the position i chunks later."""
        return Position(self.token + i * C, self.tile + i * HV, self.head, self.first_v)


@struct
class Scan:
    """Hold all that the partitions of a CTA share."""

    inputs: Any
    outputs: Any
    tiles: Any
    pipeline: Any
    queue: Any  # published work items; None: each CTA has one
    geometry: Any
    config: Any
    slots: Any  # of a pool; None: states are [N, HV, D, D]
