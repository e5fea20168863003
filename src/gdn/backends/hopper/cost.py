"""What a forward takes, in us on an H200: into which spans it is split, and whether Triton's is the faster.

The numbers are of K = V = 128; with 64 both take about as long, Triton 1.5 to 2.8 times what is taken here.
Of packed sequences nobody on the host knows the lengths but by `cu_seqlens_cpu`: they may be alike, or one
may have all chunks. A cut is chosen by the sum of the times of both.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import torch

from gdn.problem import CHUNK, Problem


class Walk(NamedTuple):
    """us of a launch beside its jobs, of a job beside its chunks, of a chunk alone and on a full machine."""

    once: float
    job: float
    alone: float
    full: float


# a tile of 64 tokens and a value head in `gates` and `solve`; all launches of a forward that is not split
TILE, LAUNCHES = 0.0065, 10.0
# the walk by the chains of its programs
WALKS = {1: Walk(5.0, 2.0, 1.05, 1.1), 2: Walk(5.0, 2.0, 1.45, 1.78)}
ENDS = Walk(2.0, 4.0, 0.9, 1.05)
# of `jobs` and `combine`, and of each span in it
COMBINE = 3.0, 1.15
# few spans have an M: those of less than FADING chunks, over which a g of -1/21 leaves something, and of
# longer ones those of ALIVE of the heads
FADING, ALIVE = 34, 0.25
GAIN = 0.9  # of the time without spans, or of Triton's, at most: more launches take the host longer
# Triton: its launches, a tile in prepare, as much in output, a chunk in the state pass by strips, and in scan
TRITON_LAUNCHES, TRITON_TILE, TRITON_STRIPS, TRITON_SCAN = 15.0, 0.020, ((8, 1.1), (4, 1.4)), 3.85
# sequences, chunks of all of them, and of the longest
Way = tuple[int, int, int]
Jobs = Sequence[tuple[int, int]]  # how many, of how many chunks each


class Cut(NamedTuple):
    """How sequences are cut into spans: `longs` of `long` chunks, a short one, the rest; as far as they go.

    M and N of a span are two jobs of `ends`, of the first span one: so the long ones fill multiprocessors two
    by two, and who is left takes both jobs of the short one.
    """

    long: int
    longs: int
    short: int

    def spans(self, chunks: int) -> tuple[Jobs, int]:
        """Those of a sequence, without the last, and how long that is."""
        longs = min(self.longs, max(0, chunks - 1) // self.long)
        found, left = [(longs, self.long)], chunks - longs * self.long
        if longs == self.longs and left > self.short:
            found, left = [*found, (1, self.short)], left - self.short
        return (found if longs else ()), left

    def most(self, N: int, chunks: int) -> int:
        """Spans of N sequences, whose lengths only the device knows, at most."""
        found = chunks // self.long + chunks // (self.longs * self.long + self.short)
        return N + min(N * (self.longs + 1), found)


class Cuts(NamedTuple):
    """Of which the device takes one: how sequences are cut where most spans have an M, and where few have."""

    many: Cut
    few: Cut


def equal(chunks: int) -> Cuts:
    """Spans of so many chunks, however long the sequences."""
    cut = Cut(chunks, 1 << 16, chunks)
    return Cuts(cut, cut)


def cuts_of(p: Problem) -> Cuts | None:
    """How sequences are cut, or None: not at all."""
    return None if p.batch_invariant else _cuts(*_sizes(p))


def chains_of(p: Problem, cuts: Cuts | None) -> int:
    """Chains of a program of the walk, at K = V = 128: one, if so many programs run at the same time."""
    HV, ways, num_sms = _sizes(p)
    return max(_chains(HV, ways, cut, num_sms) for cut in cuts or (None,))


def is_faster(p: Problem) -> bool:
    """Whether the kernels here are to be preferred to Triton's."""
    return _is_faster(*_sizes(p))


def _sizes(p: Problem) -> tuple[int, tuple[Way, ...], int]:
    """Value heads, the ways in which chunks may be spread over sequences, multiprocessors."""
    return p.HV, _ways(p), num_sms(p.device)


def alike(N: int, chunks: int) -> Way:
    """N sequences of so many chunks."""
    return N, N * chunks, chunks


def _ways(p: Problem) -> tuple[Way, ...]:
    if p.cu_seqlens is None or p.N <= 1:
        return (alike(p.N, _cdiv(p.num_chunks, max(1, p.N))),)
    if p.cu_seqlens_cpu is None:
        return alike(p.N, _cdiv(p.num_chunks, p.N)), (p.N, p.num_chunks, p.num_chunks)
    return (_packed(tuple(p.cu_seqlens_cpu.tolist())),)


@lru_cache(64)
def _packed(offsets: tuple[int, ...]) -> Way:
    """Of sequences that lie so; all layers of a step ask for the same, cuts and chains of each."""
    chunks = [_cdiv(end - start, CHUNK) for start, end in pairwise(offsets)]
    return len(chunks), sum(chunks), max(chunks)


@lru_cache
def num_sms(device: torch.device) -> int:
    """An H200's where there is no GPU."""
    return 132 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(4096)
def _cuts(HV: int, ways: tuple[Way, ...], num_sms: int) -> Cuts | None:
    """What is fastest over the ways."""
    longest = max(longest for *_, longest in ways)
    heads = [_alike(*way) * HV for way in ways]
    if min(heads) == 0 or num_sms <= max(heads):
        return None

    def total(cut: Cut | None, alive: float) -> float:
        return sum(_time(HV, way, cut, num_sms, alive) for way in ways)

    possible = list(_possible(longest, num_sms // max(heads), num_sms // min(heads)))
    times = {cut: total(cut, 1.0) for cut in possible}
    # no M of shorter spans fades
    faded = {cut: total(cut, ALIVE) if cut.long >= FADING else time for cut, time in times.items()}
    # the same walk takes both cuts
    walks: dict[int, list[Cut]] = {}
    for cut in possible:
        walks.setdefault(_chains(HV, ways, cut, num_sms), []).append(cut)
    pairs = [Cuts(min(x, key=times.__getitem__), min(x, key=faded.__getitem__)) for x in walks.values()]
    best = min(pairs, key=lambda cuts: times[cuts.many] + faded[cuts.few])
    return best if times[best.many] < GAIN * total(None, 1.0) else None


def _possible(longest: int, least: int, most: int) -> Iterator[Cut]:
    """Those with about as many long spans as each head has multiprocessors, which are least to most."""
    longs = max(1, least // 2 - 1)
    while longs <= most:
        long = _cdiv(longest, longs + 1)
        yield Cut(long, longs, long)
        # half a long one, and the rest as long as one, or as one and the half
        for rest in (2, 3):
            long = _cdiv(2 * longest, 2 * longs + 1 + rest)
            yield Cut(long, longs, _cdiv(long, 2))
        longs += 1 + longs // 16


@lru_cache(4096)
def _is_faster(HV: int, ways: tuple[Way, ...], num_sms: int) -> bool:
    """As it is in the first of the ways. A problem without tokens is Triton's."""
    N, chunks, _ = ways[0]
    if chunks == 0:
        return False
    cuts = _cuts(HV, ways, num_sms)
    here = LAUNCHES + TILE * chunks * HV + _time(HV, ways[0], cuts and cuts.many, num_sms)
    return here < GAIN * _triton(N * HV, _cdiv(chunks, N), num_sms)


def _chains(HV: int, ways: tuple[Way, ...], cut: Cut | None, num_sms: int) -> int:
    """Of a walk that takes all of the ways: one, if twice as many programs as jobs run at the same time."""
    return 1 if all(2 * _jobs(HV, way, cut) <= num_sms for way in ways) else 2


def _jobs(HV: int, way: Way, cut: Cut | None) -> int:
    """Of the walk: spans of sequences as long as the longest, and the others."""
    N, _, longest = way
    before, _ = cut.spans(longest) if cut else ((), 0)
    return HV * (N + _alike(*way) * sum(count for count, _ in before))


def _alike(N: int, chunks: int, longest: int) -> int:
    """How many sequences as long as the longest have as many chunks as there are."""
    return chunks // max(1, longest)


def _time(HV: int, way: Way, cut: Cut | None, num_sms: int, alive: float = 1.0) -> float:
    """us that the walks take; `alive`: the share of heads whose M is something over many tokens."""
    _, chunks, longest = way
    n = _alike(*way)
    rest = (chunks - n * longest) * HV / num_sms
    before: Jobs = ()
    last = longest
    if cut is not None:
        before, last = cut.spans(longest)
    n *= HV
    chains = _chains(HV, (way,), cut, num_sms)
    jobs = [(2 // chains * n * count, span) for count, span in ((1, last), *before)]
    walk = _walks(WALKS[chains], jobs, rest, num_sms)
    if not before:
        return walk
    ends = []
    for i, (count, span) in enumerate(before):
        maps = (count - (i == 0)) * (alive if span >= FADING else 1.0)
        ends.append((int(n * (count + maps)), span))
    combine, each = COMBINE
    return _walks(ENDS, ends, rest, num_sms) + combine + each * sum(count for count, _ in before) + walk


def _walks(cost: Walk, jobs: Jobs, rest: float, num_sms: int) -> float:
    """Of jobs as programs take them one by one, and of `rest` chunks of each multiprocessor beside them."""
    longest = max(chunks for _, chunks in jobs)
    busy = sum(count * chunks for count, chunks in jobs) / max(1, longest)
    each = max(cost.alone, cost.full * min(busy / num_sms, 1.0))
    if len(jobs) == 1:
        ((count, chunks),) = jobs
        return cost.once + _cdiv(count, num_sms) * (cost.job + each * chunks) + each * rest
    free = [(0.0, num_sms)]  # when, how many
    for count, chunks in jobs:
        time = cost.job + each * chunks
        while count > 0:
            start, idle = heappop(free)
            taken = min(count, idle)
            if taken < idle:
                heappush(free, (start, idle - taken))
            heappush(free, (start + time, taken))
            count -= taken
    return cost.once + max(end for end, _ in free) + each * rest


def _triton(pairs: int, chunks: int, num_sms: int) -> float:
    tiles = TRITON_TILE * pairs * chunks
    if 2 * pairs > num_sms:
        return TRITON_LAUNCHES + tiles + _cdiv(pairs, num_sms) * chunks * TRITON_SCAN
    walk = min(_cdiv(strips * pairs, num_sms) * us for strips, us in TRITON_STRIPS)
    return TRITON_LAUNCHES + 2 * tiles + chunks * walk


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
