"""Predict the time of the reverse state scan in us on an H200, and choose its segments.

As `hopper.cost` does for the forward. M and N take the same scan as a segment does, so a cut pays only where
few heads leave most of the SMs idle. The constants are for K = V = 128. With 64 values a CTA has one
consumer, and is predicted to take as long as with half of 128.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gdn.backends.hopper import cost as forward
from gdn.backends.hopper.cost import (
    ALIVE,
    FADING,
    GAIN,
    PROPAGATE_TIME,
    TRANSFER_COST,
    Cut,
    Distribution,
    ScanCost,
    candidate_cuts,
    count_longest,
    makespan,
    sizes_of,
)
from gdn.problem import Problem

# us of the reverse scan, and of that of M and N, which stores no chunk, by the consumer warpgroups of a CTA
SCAN_COSTS = {1: ScanCost(6.0, 2.0, 2.33, 2.35), 2: ScanCost(6.0, 2.0, 3.6, 3.95)}
TRANSFER_COSTS = {1: ScanCost(4.0, 4.0, 2.25, 2.3), 2: ScanCost(4.0, 4.0, 3.4, 3.6)}
PLAN_TIME = 3.0  # us of `plan_reverse_segments`
# us of Triton's backward: a launch of all its kernels, a chunk of its state pass, a chunk and value head
TRITON_LAUNCHES, TRITON_CHUNK, TRITON_TILE = 25.0, 2.4, 0.147
STRIP = 64  # value rows of dS^T of a consumer warpgroup
SLABS = False  # run every backward in passes; off: they save memory, and take 30 % longer on an H100
# bytes of dS of a pass, which stay in the 50 MB of L2, and the least number of passes
SLAB_BYTES, LEAST_PASSES = 24 << 20, 4
# the same with `recompute`, where memory counts: a pass of any size takes some 34 us more
RECOMPUTE_BYTES, RECOMPUTE_PASSES = 64 << 20, 2
MOST_PLANS = 1 << 16  # passes x sequences, each a program of the kernel that plans the passes
HOST_TIME = 200.0  # us in which the host launches this backward, twice that of Triton's


def is_worth_launching(p: Problem) -> bool:
    """Return True if Triton's backward would keep the GPU busy for longer than the host launches this one.

    On the GPU this backward is faster at nearly all sizes. In a short one the host is the slower of the two.
    """
    HV, distributions, _ = sizes_of(p)
    longest = max(longest for *_, longest in distributions)
    time = TRITON_LAUNCHES + TRITON_CHUNK * longest + TRITON_TILE * p.num_chunks * HV
    return time >= HOST_TIME


def slab_of(p: Problem) -> int | None:
    """Return the chunks of a pass of SLAB_BYTES or RECOMPUTE_BYTES of dS, or None if one pass has all.

    One pass has all without `recompute`, unless SLABS is on; where there would be few; where many sequences
    would make their plan slow; and where their boundary states in fp32 would take the memory that is saved.
    """
    if not has_slabs(p):
        return None
    most, least = (SLAB_BYTES, LEAST_PASSES) if SLABS else (RECOMPUTE_BYTES, RECOMPUTE_PASSES)
    size = max(1, most // (p.HV * p.K * p.V * p.q.element_size()))
    passes = -(-p.num_chunks // size)
    is_smaller = p.num_chunks - size > 4 * p.N
    return size if passes >= least and passes * p.N <= MOST_PLANS and is_smaller else None


def has_slabs(p: Problem) -> bool:
    """Return True if a larger backward of this kind runs in passes."""
    return SLABS or (p.recompute and 2 * STRIP == p.K)


def slab_kinds(p: Problem) -> tuple[int | None, ...]:
    """Return a size of a pass for each kind of binaries that a problem of any size may need."""
    return (None, 1) if has_slabs(p) else (None,)


class Segmentation(NamedTuple):
    """Hold how the reverse scan cuts sequences into segments, counted from a sequence's end."""

    cut: Cut
    consumers: int  # consumer warpgroups of a CTA of the scan
    transfer_consumers: int  # of a CTA that scans M or N


def segmentation_of(p: Problem) -> Segmentation | None:
    """Return how sequences are cut into segments, or None if they are not."""
    # a cut depends on the other sequences of the batch, and it changes the rounding of dS
    if p.batch_invariant:
        return None
    HV, distributions, num_sms = sizes_of(p)
    return _best_segmentation(HV, distributions, num_sms, p.V // STRIP)


@lru_cache(4096)
def _best_segmentation(
    HV: int, distributions: tuple[Distribution, ...], num_sms: int, strips: int = 2
) -> Segmentation | None:
    """Return the fastest segmentation over all distributions, or None if it gains less than 10 %.

    `strips`: of 64 value rows of dS^T, as each consumer warpgroup has one.
    """
    heads = [HV * count_longest(*distribution) for distribution in distributions]
    # every SM has a work item already without segments
    if min(heads) == 0 or num_sms <= max(heads):
        return None
    longest = max(longest for *_, longest in distributions)
    times = {
        choice: sum(_cut_time(HV, distribution, choice, num_sms, strips) for distribution in distributions)
        for choice in _candidates(longest, num_sms, min(heads), max(heads))
        if max(choice.consumers, choice.transfer_consumers) <= strips
    }
    whole = sum(_whole_time(HV, distribution, num_sms, strips) for distribution in distributions)
    best = min(times, key=times.__getitem__)
    return best if times[best] < GAIN * whole else None


def _candidates(longest: int, num_sms: int, fewest: int, most: int) -> Iterator[Segmentation]:
    """Yield segmentations of the longest sequence, where `fewest` to `most` heads have one."""
    for cut in candidate_cuts(longest, num_sms // most, num_sms // fewest):
        for consumers in (1, 2):
            for transfer_consumers in (1, 2):
                yield Segmentation(cut, consumers, transfer_consumers)


def _rest(HV: int, distribution: Distribution, num_sms: int) -> float:
    """Return the chunks of an SM that belong to sequences that are not the longest."""
    _, chunks, longest = distribution
    return (chunks - count_longest(*distribution) * longest) * HV / num_sms


def whole_consumers(heads: int, num_sms: int) -> int:
    """Return the consumers of a CTA without segments: one if two CTAs a head fit the SMs."""
    return 1 if num_sms >= 2 * heads else 2


def _whole_time(HV: int, distribution: Distribution, num_sms: int, strips: int = 2) -> float:
    """Return the us of the scan without segments."""
    N, _, longest = distribution
    consumers = min(strips, whole_consumers(N * HV, num_sms))
    items = ((strips // consumers * HV * count_longest(*distribution), longest),)
    return makespan(SCAN_COSTS[consumers], items, _rest(HV, distribution, num_sms), num_sms)


def _cut_time(
    HV: int, distribution: Distribution, choice: Segmentation, num_sms: int, strips: int = 2
) -> float:
    """Return the us of the scan of segments, and of all launches before it."""
    *_, longest = distribution
    before, last = choice.cut.segments(longest)
    if not before:
        return _whole_time(HV, distribution, num_sms, strips)
    heads = HV * count_longest(*distribution)
    rest = _rest(HV, distribution, num_sms)
    pieces = heads * (strips // choice.consumers)
    items = [(pieces * count, chunks) for count, chunks in ((1, last), *before)]
    scan = makespan(SCAN_COSTS[choice.consumers], items, rest, num_sms)
    # N of each segment, and M of all but the first
    pieces = heads * (strips // choice.transfer_consumers)
    transfers = [(pieces * (2 * count - (i == 0)), chunks) for i, (count, chunks) in enumerate(before)]
    transfer = makespan(TRANSFER_COSTS[choice.transfer_consumers], transfers, rest, num_sms)
    once, each = PROPAGATE_TIME
    segments = sum(count for count, _ in before)
    return PLAN_TIME + transfer + once + each * segments + scan


@lru_cache(4096)
def rank_segments(heads: int, chunks: int, num_sms: int, strips: int = 2) -> int:
    """Return into how many equal segments a rank of context parallelism cuts its tokens.

    Both directions have the same segments, as the backward reads the forward's M. `heads`: of all sequences,
    each of at most `chunks` chunks.
    """

    def time(count: int) -> float:
        long, items = -(-chunks // count), heads * count
        alive = (1.0, ALIVE if long >= FADING else 1.0)
        maps = [makespan(TRANSFER_COST, [(items, long), (int(items * x), long)], 0, num_sms) for x in alive]
        # one consumer a CTA if the two halves of all items fit the SMs
        consumers = min(strips, 1 if num_sms >= 2 * items else 2)
        work = [(strips // consumers * items, long)]
        costs = (forward.SCAN_COSTS, TRANSFER_COSTS, SCAN_COSTS)
        scans = [makespan(x[consumers], work, 0, num_sms) for x in costs]
        # the state, or the gradient of one, passes through all segments before and after each exchange
        return sum(maps) / len(maps) + sum(scans) + 4 * PROPAGATE_TIME[1] * count

    return min(range(1, min(chunks, max(1, 4 * num_sms // heads)) + 1), key=time)
