"""Predict the time of a forward in us on an H200: choose its segments, and `hopper` or `triton`.

The constants are for K = V = 128. With 64 both backends take about as long as with 128, and `triton` 1.5 to
2.8 times as long as `hopper`. The host knows the lengths of packed sequences only from `cu_seqlens_cpu`.
Without it all may be equal, or one may have all chunks: a cut is chosen by the sum of the times of both.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import torch

from gdn import settings
from gdn.problem import CHUNK, Problem


class ScanCost(NamedTuple):
    """Hold the us of a scan: per launch, per work item, per chunk on an idle GPU and with all SMs busy."""

    launch: float
    item: float
    idle_chunk: float
    busy_chunk: float


# us of a chunk and value head in `gates` and `solve` on all SMs; us of all launches without segments
TILE_TIME, LAUNCH_TIME = 0.0065, 10.0
# the state scan by the consumer warpgroups of a CTA: two compete for the SM's tensor cores
SCAN_COSTS = {1: ScanCost(5.0, 2.0, 1.05, 1.1), 2: ScanCost(5.0, 2.0, 1.45, 1.78)}
# the scan of M and N, which loads and stores fewer HBM bytes a chunk
TRANSFER_COST = ScanCost(2.0, 4.0, 0.9, 1.05)
# us of `plan_segments` and `propagate_states` together, and of each segment, as S passes from one to the next
PROPAGATE_TIME = 3.0, 1.15
# us that the launches for segments take where no sequence is cut; us of a gather from a pool and a scatter
# into it, and of each state
UNCUT_TIME, GATHER_TIME = 15.0, (10.0, 0.06)
# with the cut for few M: segments shorter than FADING chunks all have an M, as a g of -1/21 a token leaves
# some decay over them; of longer segments a share ALIVE of the heads has one
FADING, ALIVE = 34, 0.25
# batch invariance: one sequence is cut from so many chunks on, by the least number of such sequences that
# fill the SMs of an H200; LONG_FROM chunks or more have a cut of their own
H200_SMS, OWN_CUT_FROM, LONG_FROM = 132, ((8, 96), (2, 257)), 384
SHORT_CHUNKS = 8  # a sequence, on average: see `has_short_items`
GAIN = 0.9  # at most, of the time without segments, or of `triton`: more launches take the host longer
# `triton`, us: launches; a chunk and head in prepare, and as much in output; a chunk in the state pass by the
# number of value strips, and in the fused scan
TRITON_LAUNCHES, TRITON_TILE, TRITON_STRIPS, TRITON_SCAN = 15.0, 0.020, ((8, 1.1), (4, 1.4)), 3.85
# a distribution of chunks over sequences: sequences, chunks of all of them, chunks of the longest
Distribution = tuple[int, int, int]
Items = Sequence[tuple[int, int]]  # work items: (how many, of how many chunks each)


class Cut(NamedTuple):
    """Cut a sequence into segments: up to `longs` of `long` chunks, one of `short`, and the rest.

    M and N of a segment are two work items of `segment_transfer`, but the first segment has only N. So the
    items of the long segments fill an odd number of SMs; the one left of an even number takes both of the
    short segment.
    """

    long: int
    longs: int
    short: int

    def segments(self, chunks: int) -> tuple[Items, int]:
        """Return the segments of a sequence of `chunks` chunks but the last, and the chunks of the last."""
        longs = min(self.longs, max(0, chunks - 1) // self.long)
        result, left = [(longs, self.long)], chunks - longs * self.long
        if longs == self.longs and left > self.short:
            result, left = [*result, (1, self.short)], left - self.short
        return (result if longs else ()), left

    def most(self, N: int, chunks: int) -> int:
        """Return an upper bound on the segments of N packed sequences, whose lengths only the device has."""
        result = chunks // self.long + chunks // (self.longs * self.long + self.short)
        return N + min(N * (self.longs + 1), result)


class Cuts(NamedTuple):
    """Hold the two cuts that the device chooses from: for segments that mostly have an M, and rarely."""

    many: Cut
    few: Cut


class OwnCut(NamedTuple):
    """Cut a sequence into `longs` long segments and a rest, in proportion to its own length.

    Its length is `halves` halves of a long segment; `short` halves are the short segment of `Cut`.
    """

    longs: int
    halves: int
    short: int

    def cut_of(self, chunks: int) -> Cut:
        """Return the cut of a sequence of `chunks` chunks: `segments.own_cut` on the device."""
        long = max(1, _cdiv(2 * chunks, self.halves))
        return Cut(long, self.longs, long if self.short == 2 else _cdiv(long, 2))


class OwnCuts(NamedTuple):
    """Cut each sequence by its own length and the number of heads alone, for batch invariance."""

    below: OwnCut  # of sequences below LONG_FROM chunks
    above: OwnCut
    least: int  # sequences of fewer chunks are not cut

    def cut_of(self, chunks: int) -> Cut | None:
        """Return the cut of a sequence of `chunks` chunks, or None if it is not cut."""
        if chunks < self.least:
            return None
        return (self.above if chunks >= LONG_FROM else self.below).cut_of(chunks)

    def most(self, N: int, chunks: int) -> int:
        """Return an upper bound on the segments of N sequences with `chunks` chunks in all."""
        return N + min(N, chunks // self.least) * (1 + max(self.below.longs, self.above.longs))


def equal_cuts(chunks: int) -> Cuts:
    """Return cuts into segments of `chunks` chunks each, however long the sequences are."""
    cut = Cut(chunks, 1 << 16, chunks)
    return Cuts(cut, cut)


def cuts_of(p: Problem, has_pool: bool = False) -> Cuts | OwnCuts | None:
    """Return how sequences are cut into segments, or None if they are not.

    has_pool: the states are in a pool, which is read and updated in place only without segments.
    """
    if not settings.allows_segments():
        return None
    if not p.batch_invariant:
        return _best_cuts(*sizes_of(p), has_pool)
    # a cut changes the rounding of S, so it may not depend on the other sequences of the batch
    cuts = own_cuts(p.HV)
    longest = max(longest for *_, longest in _distributions(p))
    return cuts if cuts is not None and longest >= cuts.least else None


@lru_cache
def own_cuts(HV: int) -> OwnCuts | None:
    """Return how a sequence of HV heads is cut by its own length; None: however long it is, it is not cut.

    The cuts are those that the model finds best for one sequence alone, in shape, on an H200 whatever the
    GPU.
    """
    filling = H200_SMS / (2 * HV)  # sequences that fill the SMs, with two consumers of 64 values each
    least = next((chunks for sequences, chunks in OWN_CUT_FROM if filling >= sequences), None)
    if least is None:
        return None
    return OwnCuts(_best_own_cut(HV, LONG_FROM // 3), _best_own_cut(HV, LONG_FROM * 4 // 3), least)


def _best_own_cut(HV: int, chunks: int) -> OwnCut:
    """Return the fastest shape of a cut of one sequence of `chunks` chunks, few M and many M alike."""
    distribution = equal_lengths(1, chunks)

    def total(shape: OwnCut) -> float:
        cut = shape.cut_of(chunks)
        return sum(
            _scan_time(HV, distribution, cut, H200_SMS, alive if cut.long >= FADING else 1.0)
            for alive in (1.0, ALIVE)
        )

    shapes = (
        OwnCut(longs, *shape)
        for longs in range(1, H200_SMS // HV)
        for shape in ((2 * longs + 2, 2), (2 * longs + 3, 1), (2 * longs + 4, 1))
    )
    return min(shapes, key=total)


def consumers_of(p: Problem, cuts: Cuts | OwnCuts | None) -> int:
    """Return the consumers of a CTA of the scan at K = V = 128: one if two CTAs a work item fit the SMs.

    The number does not change bits, so it may depend on the batch.
    """
    HV, distributions, num_sms = sizes_of(p)
    if isinstance(cuts, OwnCuts):
        return max(_consumers(HV, (x,), cuts.cut_of(x[2]), num_sms) for x in distributions)
    return max(_consumers(HV, distributions, cut, num_sms) for cut in cuts or (None,))


def has_short_items(p: Problem) -> bool:
    """Return True if CTAs of the scan have several work items each, of few chunks: `scans.moves_states`.

    An item's states then take as long as its chunks, and can move while other items are scanned. The price is
    a pipeline stage, 3 to 5 % of a chunk's time: SHORT_CHUNKS chunks lose less than 1 us an item, of which
    states take 3 us or more. The host knows the mean length alone.
    """
    return p.num_chunks <= SHORT_CHUNKS * p.N and num_sms(p.device) < p.N * p.HV


def is_faster(p: Problem) -> bool:
    """Return True if `hopper` is predicted to be at least 10 % faster than `triton`."""
    return _is_faster(*sizes_of(p))


def sizes_of(p: Problem) -> tuple[int, tuple[Distribution, ...], int]:
    """Return value heads, the distributions of chunks over sequences that are possible, and SMs."""
    if p.cu_seqlens is None:
        return _dense_sizes(*p.q.shape[:2], p.v.shape[2], p.q.device)
    return p.HV, _distributions(p), num_sms(p.device)


@lru_cache(4096)
def _dense_sizes(B: int, T: int, HV: int, device: torch.device) -> tuple[int, tuple[Distribution, ...], int]:
    """Return the sizes of B rows of T tokens; cached, as a step asks for them three times."""
    return HV, (equal_lengths(B, _cdiv(T, CHUNK) if B else 0),), num_sms(device)


def equal_lengths(N: int, chunks: int) -> Distribution:
    """Return the distribution of N sequences of `chunks` chunks each."""
    return N, N * chunks, chunks


def _distributions(p: Problem) -> tuple[Distribution, ...]:
    # the host may not read lengths from the GPU: without them, the two extremes
    if p.cu_seqlens is None or p.N <= 1:
        return (equal_lengths(p.N, _cdiv(p.num_chunks, max(1, p.N))),)
    if p.cu_seqlens_cpu is None:
        whole = _cdiv(p.T, CHUNK)
        return equal_lengths(p.N, _cdiv(p.num_chunks, p.N)), (p.N, whole, whole)
    return (_packed_distribution(tuple(p.cu_seqlens_cpu.tolist())),)


@lru_cache(64)
def _packed_distribution(offsets: tuple[int, ...]) -> Distribution:
    """Return the distribution of packed sequences; cached, as all layers of a step have the same offsets."""
    chunks = [_cdiv(end - start, CHUNK) for start, end in pairwise(offsets)]
    return len(chunks), sum(chunks), max(chunks)


@lru_cache
def num_sms(device: torch.device) -> int:
    """Return the number of SMs of a GPU, or that of an H200 for other devices."""
    return 132 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(4096)
def _best_cuts(
    HV: int, distributions: tuple[Distribution, ...], num_sms: int, has_pool: bool = False
) -> Cuts | None:
    """Return the fastest cuts over all distributions, or None if they gain less than 10 %."""
    longest = max(longest for *_, longest in distributions)
    longest_heads = [count_longest(*distribution) * HV for distribution in distributions]
    # every SM has a work item already without segments
    if min(longest_heads) == 0 or num_sms <= max(longest_heads):
        return None

    moves = GATHER_TIME[0] + GATHER_TIME[1] * distributions[0][0] * HV if has_pool else 0.0

    def total(cut: Cut | None, alive: float) -> float:
        time = sum(_scan_time(HV, distribution, cut, num_sms, alive) for distribution in distributions)
        return time if cut is None else time + moves * len(distributions)

    possible = list(candidate_cuts(longest, num_sms // max(longest_heads), num_sms // min(longest_heads)))
    times = {cut: total(cut, 1.0) for cut in possible}
    # segments below FADING chunks keep every M
    faded = {cut: total(cut, ALIVE) if cut.long >= FADING else time for cut, time in times.items()}
    # both cuts run in one launch of the scan, so they must agree in its consumer warpgroups
    by_consumers: dict[int, list[Cut]] = {}
    for cut in possible:
        by_consumers.setdefault(_consumers(HV, distributions, cut, num_sms), []).append(cut)
    best_cuts = [
        Cuts(min(x, key=times.__getitem__), min(x, key=faded.__getitem__)) for x in by_consumers.values()
    ]
    best = min(best_cuts, key=lambda cuts: times[cuts.many] + faded[cuts.few])
    return best if times[best.many] < GAIN * total(None, 1.0) else None


def candidate_cuts(longest: int, least: int, most: int) -> Iterator[Cut]:
    """Yield cuts with about as many long segments as there are SMs for each head, from `least` to `most`."""
    longs = max(1, least // 2 - 1)
    while longs <= most:
        long = _cdiv(longest, longs + 1)
        yield Cut(long, longs, long)
        # the short segment is half a long one, the rest as long as one long segment, or one and a half
        for rest in (2, 3):
            long = _cdiv(2 * longest, 2 * longs + 1 + rest)
            yield Cut(long, longs, _cdiv(long, 2))
        longs += 1 + longs // 16


@lru_cache(4096)
def _is_faster(HV: int, distributions: tuple[Distribution, ...], num_sms: int) -> bool:
    """Compare both backends for the first distribution; a problem without tokens is `triton`'s."""
    N, chunks, _ = distributions[0]
    if chunks == 0:
        return False
    cuts = _best_cuts(HV, distributions, num_sms)
    own = (
        LAUNCH_TIME + TILE_TIME * chunks * HV + _scan_time(HV, distributions[0], cuts and cuts.many, num_sms)
    )
    return own < GAIN * _triton_time(N * HV, _cdiv(chunks, N), num_sms)


def _consumers(HV: int, distributions: tuple[Distribution, ...], cut: Cut | None, num_sms: int) -> int:
    """Return the consumers of a CTA: one if for every distribution two CTAs a work item fit the SMs."""
    return (
        1 if all(2 * _count_items(HV, distribution, cut) <= num_sms for distribution in distributions) else 2
    )


def _count_items(HV: int, distribution: Distribution, cut: Cut | None) -> int:
    """Return the work items of the scan: N sequences, and the further segments of the longest ones."""
    N, _, longest = distribution
    before, _ = cut.segments(longest) if cut else ((), 0)
    return HV * (N + count_longest(*distribution) * sum(count for count, _ in before))


def count_longest(N: int, chunks: int, longest: int) -> int:
    """Return how many sequences as long as the longest would have all the chunks."""
    return chunks // max(1, longest)


def _scan_time(
    HV: int, distribution: Distribution, cut: Cut | None, num_sms: int, alive: float = 1.0
) -> float:
    """Return the us of the scan and segment kernels; `alive`: share of heads with an M in long segments."""
    _, chunks, longest = distribution
    n = count_longest(*distribution)
    # chunks of shorter sequences, spread evenly over the SMs
    rest = (chunks - n * longest) * HV / num_sms
    before: Items = ()
    last = longest
    if cut is not None:
        before, last = cut.segments(longest)
    n *= HV
    consumers = _consumers(HV, (distribution,), cut, num_sms)
    items = [(2 // consumers * n * count, segment) for count, segment in ((1, last), *before)]
    scan = makespan(SCAN_COSTS[consumers], items, rest, num_sms)
    if not before:
        return scan if cut is None else scan + UNCUT_TIME
    transfers = []
    for i, (count, segment) in enumerate(before):
        maps = (count - (i == 0)) * (alive if segment >= FADING else 1.0)
        transfers.append((int(n * (count + maps)), segment))
    once, each = PROPAGATE_TIME
    return (
        makespan(TRANSFER_COST, transfers, rest, num_sms)
        + once
        + each * sum(count for count, _ in before)
        + scan
    )


def makespan(cost: ScanCost, items: Items, rest: float, num_sms: int) -> float:
    """Return the us of greedily scheduling items on num_sms CTAs, with `rest` further chunks on each."""
    longest = max(chunks for _, chunks in items)
    busy = sum(count * chunks for count, chunks in items) / max(1, longest)
    # between one busy SM and a GPU whose HBM bandwidth all SMs share
    each = max(cost.idle_chunk, cost.busy_chunk * min(busy / num_sms, 1.0))
    if len(items) == 1:
        ((count, chunks),) = items
        return cost.launch + _cdiv(count, num_sms) * (cost.item + each * chunks) + each * rest
    free = [(0.0, num_sms)]  # heap of (time, SMs that become free then)
    for count, chunks in items:
        time = cost.item + each * chunks
        while count > 0:
            start, idle = heappop(free)
            taken = min(count, idle)
            if taken < idle:
                heappush(free, (start, idle - taken))
            heappush(free, (start + time, taken))
            count -= taken
    return cost.launch + max(end for end, _ in free) + each * rest


def _triton_time(num_heads: int, chunks: int, num_sms: int) -> float:
    # us of `triton` for `num_heads` sequences x heads: the fused scan if it fills the SMs, else value strips
    tiles = TRITON_TILE * num_heads * chunks
    if 2 * num_heads > num_sms:
        return TRITON_LAUNCHES + tiles + _cdiv(num_heads, num_sms) * chunks * TRITON_SCAN
    scan = min(_cdiv(strips * num_heads, num_sms) * us for strips, us in TRITON_STRIPS)
    return TRITON_LAUNCHES + 2 * tiles + chunks * scan


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
