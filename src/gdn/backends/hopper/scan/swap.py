"""Hand work items and states from the scheduler warp to the other partitions of the scan of short sequences.

Both go through shared memory: four published work items, and one or two states, each of which a swap replaces
by another.
"""

from typing import Any

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import (
    fence_async_shared,
    jit,
    mbarrier,
    struct,
    tma_load,
    tma_store,
    tma_store_wait,
)
from gdn.backends.hopper.scan.operands import ACC_STATE, ACC_TOKENS
from gdn.backends.hopper.scan.scheduler import ONE_WARP, STRIP, stage_and_phase

# int32 fields of a published work item: tokens (below 0: no item is left), row, first token in it, value
# head, first chunk, index of the initial state (past the states: zero) and of the final one (past the states:
# it is not stored)
LENGTH, ROW, TOKEN, HEAD, CHUNK, SOURCE, GOAL = (gl.constexpr(i) for i in range(7))
FIELDS = gl.constexpr(8)
SLOTS = gl.constexpr(4)  # slots in shared memory for published work items


@struct
class WorkQueue:
    """Hold published work items in shared memory, the mbarriers of their slots, the counter in HBM.

    The scheduler, which has few registers, keeps the fields of its items there, too: of the item before, the
    present one and the next two.
    """

    items: Any
    full: Any  # 1 arrival, by the scheduler
    empty: Any  # 1 arrival by each reader: the producer, the score warpgroup and the consumers
    next_ptr: Any  # the tile scheduler: items that were taken, beyond the first of each CTA

    @jit
    def publish(self, fields, turn):
        """Write the fields of the CTA's turn-th work item to shared memory."""
        slot, phase = stage_and_phase(turn, self.full)
        # all partitions have read what this slot of shared memory held SLOTS turns before
        mbarrier.wait(self.empty.index(slot), phase ^ 1)
        self.items.index(slot).store(fields)
        fence_async_shared()
        mbarrier.arrive(self.full.index(slot), count=1)

    @jit
    def field(self, turn, FIELD: gl.constexpr, layout: gl.constexpr):
        """Return a field of the CTA's turn-th work item as a scalar, in every lane of a layout."""
        # a maximum over one element: every lane gets it as a scalar register
        return gl.max(self.items.index(turn % SLOTS).slice(FIELD, 1).load(layout), 0)

    @jit
    def wait_length(self, turn, layout: gl.constexpr):
        """Wait until the CTA's turn-th work item is published; return its length."""
        slot, phase = stage_and_phase(turn, self.full)
        mbarrier.wait(self.full.index(slot), phase)
        return self.field(turn, LENGTH, layout)

    @jit
    def release(self, turn):
        """Release the item's slot to the scheduler; a fence must come before."""
        mbarrier.arrive(self.empty.index(turn % SLOTS), count=1)


@struct
class States:
    """Hold the shared memory of one or two states, and how TMA moves them between there and HBM.

    Swap t: each consumer reads the initial state of item t from buffer t % BUFFERS, and writes the final
    state of item t - 1 to the same addresses. After the last item there is one swap more. Each consumer has
    its half of a buffer, and mbarriers of its own: its half moves while the other consumer still computes.
    """

    initial: Any  # descriptor [1, 1, 64, D] of value rows, or [1, 1, D, 64] keys first; None: zero
    final: Any  # None: not stored
    tiles: Any  # of each buffer and consumer; in the same order the mbarriers:
    full: Any  # 1 arrival, by the scheduler, and its TMA bytes: swap t may begin
    empty: Any  # 1 arrival, by the consumer: swap t is done

    @jit
    def half_and_phase(self, turn, WG: gl.constexpr, config):
        """Return the half of a buffer that a consumer swaps at a turn, and the mbarrier phase to wait for."""
        BUFFERS: gl.constexpr = self.full.shape[0] // config.CONSUMERS
        return turn % BUFFERS * config.CONSUMERS + WG, (turn // BUFFERS) & 1

    @jit
    def tile(self, turn, WG: gl.constexpr, config):
        """Return the shared memory of a consumer's S^T at a turn, value rows down."""
        D: gl.constexpr = config.D
        half, _ = self.half_and_phase(turn, WG, config)
        if config.V_FIRST:
            return self.tiles.index(half).reshape([STRIP, D])
        else:
            return self.tiles.index(half).reshape([D, STRIP]).permute((1, 0))

    @jit
    def wait_full(self, turn, WG: gl.constexpr, config):
        """Wait until a consumer's half of the initial state of the turn-th item is in shared memory."""
        half, phase = self.half_and_phase(turn, WG, config)
        mbarrier.wait(self.full.index(half), phase)

    @jit
    def put_final(self, S, turn, WG: gl.constexpr, config):
        """Write S to shared memory as the final state of the item before the turn-th, and end the swap."""
        if self.final is not None:
            self.tile(turn, WG, config).store(S.to(self.final.dtype))
        # order reads and writes of shared memory before the TMA store that reads and the load that overwrites
        fence_async_shared()
        half, _ = self.half_and_phase(turn, WG, config)
        mbarrier.arrive(self.empty.index(half), count=1)

    @jit
    def swap(self, S, turn, WG: gl.constexpr, config):
        """Return S^T before the turn-th item of the CTA; S is that after the item before, and is stored."""
        layout: gl.constexpr = ACC_TOKENS if config.D == C else ACC_STATE
        self.wait_full(turn, WG, config)
        if self.initial is None:
            following = gl.zeros((STRIP, config.D), gl.float32, layout)
        else:
            following = self.tile(turn, WG, config).load(layout).to(gl.float32)
        self.put_final(S, turn, WG, config)
        return following

    @jit
    def move(self, turn, queue, config):
        """Store the final state that swap `turn` leaves in its buffer, and load the next initial state there.

        That is the state of item turn + BUFFERS, if there is such a swap: with the last item there is not.
        """
        BUFFERS: gl.constexpr = self.full.shape[0] // config.CONSUMERS
        self.store_final(turn, queue, config)
        # below 0: no item, and no swap after its own
        if queue.field(turn + BUFFERS - 1, LENGTH, ONE_WARP) >= 0:
            for n in gl.static_range(config.CONSUMERS):
                # the n-th half has been read, the stores of later ones may still read theirs
                tma_store_wait(config.CONSUMERS - 1 - n)
                self.load_half(turn + BUFFERS, n, queue, config)

    @jit
    def store_final(self, turn, queue, config):
        """Wait for swap `turn`, and issue the TMA stores of the state of the item before to HBM."""
        for n in gl.static_range(config.CONSUMERS):
            half, phase = self.half_and_phase(turn, n, config)
            mbarrier.wait(self.empty.index(half), phase)
            # traced apart: the first is a constant of the binary, the second a scalar register
            if self.final is not None:  # noqa: SIM102
                if turn > 0:
                    goal = queue.field(turn - 1, GOAL, ONE_WARP)
                    head = queue.field(turn - 1, HEAD, ONE_WARP)
                    tma_store(self.final, state_corner(goal, head, n, config), self.tiles.index(half))

    @jit
    def load_initial(self, turn, queue, config):
        """Load the initial state of the turn-th item by TMA; without one, the consumers may swap at once."""
        for n in gl.static_range(config.CONSUMERS):
            self.load_half(turn, n, queue, config)

    @jit
    def load_half(self, turn, WG: gl.constexpr, queue, config):
        """Load a consumer's half of the initial state of the turn-th item by TMA."""
        half, _ = self.half_and_phase(turn, WG, config)
        ready = self.full.index(half)
        if self.initial is None:
            mbarrier.arrive(ready, count=1)
        else:
            source = queue.field(turn, SOURCE, ONE_WARP)
            head = queue.field(turn, HEAD, ONE_WARP)
            mbarrier.expect(ready, self.initial.block_type.nbytes)
            tma_load(self.initial, state_corner(source, head, WG, config), ready, self.tiles.index(half))


@jit
def state_corner(state, head, WG: gl.constexpr, config):
    """Return the coordinates of a consumer's 64 value rows of a state."""
    if config.V_FIRST:
        return [state, head, WG * STRIP, 0]
    else:
        return [state, head, 0, WG * STRIP]
