"""Hold what the warps of a CTA share: tensors in HBM, shared memory, mbarriers, and what an item is."""

from typing import Any

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.gluon import jit, mbarrier, struct
from gdn.backends.hopper.scan.scheduler import ONE_WARP, stage_and_phase
from gdn.backends.triton.serving.recurrent_lib import divide

D = gl.constexpr(128)  # K = V
PLACES = gl.constexpr(16)  # places of a history: the depth of an MMA of 16 bits
ROWS = gl.constexpr(16)  # rows of an MMA: q in the first 8, k in the last, so that each lane has both results
HALF = gl.constexpr(8)
UNIT = gl.constexpr(16)  # elements: a divisor of the strides
STAGES = gl.constexpr(2)  # states in shared memory
RING = gl.constexpr(3)  # tokens and histories in shared memory
SCORERS = gl.constexpr(2)  # warps that compute scores, an item each
COPIERS = gl.constexpr(2)  # warps that copy
# fields of an item that the scores' warps pass to those of the outputs: int32, and fp32
ROW, HEAD, SLOT, PLACE, IS_ROW, IS_FULL = (gl.constexpr(i) for i in range(6))
Q_FACTOR, K_FACTOR, SCORE, BETA, K_RATE, FOLD_DECAY = (gl.constexpr(i) for i in range(6))
FIELDS = gl.constexpr(6)
# registers: an MMA of one warp
SMALL = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
# shared memory: rows of 16 bits as `ldmatrix` reads them without bank conflicts, and plain rows
SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@struct
class Config:
    """Hold the constants of a binary."""

    SIZE: Any  # bytes of an element of a state
    NORM: Any
    NEGATIVE: Any
    RESET: Any


@struct
class Heads:
    """Hold a tensor [row, head, ...]: its pointer, or None, and its strides."""

    ptr: Any
    row: Any
    head: Any

    @jit
    def at(self, row, head, SCALE: gl.constexpr):
        """Return the pointer to a row and head; strides are in SCALE elements."""
        return self.ptr + (row.to(gl.int64) * self.row + head * self.head) * SCALE


@struct
class Past:
    """Hold a tensor [slot, place, head, ...] of the histories: its pointer and strides."""

    ptr: Any
    slot: Any
    place: Any
    head: Any

    @jit
    def at(self, slot, head, SCALE: gl.constexpr):
        """Return the pointer to a slot and head; strides are in SCALE elements."""
        return self.ptr + (slot * self.slot + head * self.head) * SCALE


@struct
class Tensors:
    """Hold the tensors of a call, and where the rows have their slots."""

    q: Any  # Heads
    k: Any
    v: Any
    o: Any
    g: Any  # logits if A_log is given; ptr None: no decay
    beta: Any  # logits if A_log is given; ptr None: 1
    A_log_ptr: Any  # or None
    A_log_head: Any
    dt_bias_ptr: Any  # or None
    dt_bias_head: Any
    state: Any  # Heads, of slots
    u: Any  # Past
    past_k: Any
    G: Any
    cursor_ptr: Any
    cursor_slot: Any
    index_ptr: Any  # or None: row n has slot n
    index_row: Any


@struct
class Sizes:
    """Hold the numbers of a call."""

    items: Any  # rows x value heads
    HV: Any
    HV_magic: Any  # see `divide`
    HV_shift: Any
    ratio: Any  # value heads of a key head
    ratio_magic: Any
    ratio_shift: Any
    slots: Any
    lowest: Any  # first slot that is not padding
    places: Any
    room: Any
    scale: Any


@struct
class Shared:
    """Hold the shared memory of a CTA and its mbarriers."""

    S: Any  # [STAGES, V, K]
    x: Any  # [RING, ROWS, K]
    k: Any  # [RING, PLACES, K]
    u: Any  # [RING, PLACES, V]
    v: Any  # [RING, V]
    gram: Any  # [SCORERS, ROWS, ROWS], a warp's own
    scores: Any  # [2 STAGES, ROWS, PLACES] in bf16, hi and lo of each item
    still: Any  # [STAGES, PLACES]: decays up to the end of a full history
    ints: Any  # [STAGES FIELDS, 1]
    floats: Any
    arrived: Any  # [RING] token and history of an item; 1 arrival of each copying lane
    full: Any  # [STAGES] its state; likewise
    ready: Any  # [STAGES] its scores; 1 arrival, of their warp
    empty: Any  # [STAGES] all of it was read; 1 arrival, of the outputs' warps

    @jit
    def set_int(self, stage, FIELD: gl.constexpr, x):
        """Store an integer field."""
        self.ints.index(stage * FIELDS + FIELD).store(gl.full((1,), x, gl.int32, ONE_WARP))

    @jit
    def set_float(self, stage, FIELD: gl.constexpr, x):
        """Store a float field."""
        self.floats.index(stage * FIELDS + FIELD).store(gl.full((1,), x, gl.float32, ONE_WARP))

    @jit
    def int_field(self, stage, FIELD: gl.constexpr):
        """Return an integer field as a scalar register of every lane."""
        return _scalar(self.ints.index(stage * FIELDS + FIELD))

    @jit
    def float_field(self, stage, FIELD: gl.constexpr):
        """Return a float field as a scalar register of every lane."""
        return _scalar(self.floats.index(stage * FIELDS + FIELD))

    @jit
    def wait_until_empty(self, turn):
        """Wait until the outputs' warps have read the stage that the CTA's item `turn` takes."""
        stage, phase = stage_and_phase(turn, self.empty)
        mbarrier.wait(self.empty.index(stage), phase ^ 1)


@jit
def _scalar(field):
    # a sum over one element
    return gl.sum(field.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@struct
class Item:
    """Say which row and head an item is, and what the cursor of its slot says."""

    number: Any
    row: Any
    head: Any
    slot: Any
    first: Any  # place of the history's first token
    used: Any  # places in use
    has_slot: Any


@jit
def count_items(sizes):
    """Return how many items the CTA has."""
    return (sizes.items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@jit
def load_slot(number, tensors, sizes):
    """Return the slot of an item; -1 past the last item."""
    row = divide(number, sizes.HV_magic, sizes.HV_shift)
    is_item = number < sizes.items
    if tensors.index_ptr is None:
        return gl.where(is_item, row, -1).to(gl.int64)
    else:
        at = tensors.index_ptr + row.to(gl.int64) * tensors.index_row
        return gl.load(at, mask=is_item, other=-1).to(gl.int64)


@jit
def load_item(number, slot, tensors, sizes):
    """Return an item of a known slot, with the cursor as it is in HBM: see `places_of`."""
    has_slot = (slot >= sizes.lowest) & (slot < sizes.slots)
    slot = gl.where(has_slot, slot, 0)
    at = tensors.cursor_ptr + slot * tensors.cursor_slot
    first = gl.load(at, mask=has_slot, other=0)
    used = gl.load(at + 1, mask=has_slot, other=0)
    row = divide(number, sizes.HV_magic, sizes.HV_shift)
    return Item(number, row, number - row * sizes.HV, slot, first, used, has_slot)


@jit
def places_of(item, sizes):
    """Return the first place and the places in use of an item's history, whatever is in the cursor."""
    first = gl.minimum(gl.maximum(item.first, 0), sizes.places - 1)
    used = gl.minimum(gl.maximum(item.used, 0), sizes.places - sizes.room)
    return first, used


@jit
def ring_place(token, first, sizes):
    """Return the place of a history's token."""
    place = token + first
    return gl.where(place >= sizes.places, place - sizes.places, place)
