"""What a forward takes, in us on an H200: into which spans it is split, and whether Triton's is the faster.

The numbers are of K = V = 128; with 64 both take about as long, Triton 1.5 to 2.8 times what is taken here.
Of packed sequences nobody on the host knows the lengths but by `cu_seqlens_cpu`: they may be alike, or one
may have all chunks. A span is chosen by the sum of the times of both.
"""

from functools import lru_cache
from itertools import pairwise

import torch

from gdn.problem import CHUNK, Problem

# a tile of 64 tokens and a value head in `gates` and `solve`; all launches of a forward that is not split
TILE, LAUNCHES = 0.0065, 10.0
# first: what a wave of programs takes before and after its chunks; then each chunk
WALK, ENDS = (7.0, 2.2), (6.0, 1.43)
# of `jobs`, and of `combine`, its first span and each
JOBS, COMBINE = 2.5, (6.0, 1.6)
GAIN = 0.9  # of the time without spans, or of Triton's, at most: more launches take the host longer
# Triton: its launches, a tile in prepare, as much in output, a chunk in the state pass by strips, and in scan
TRITON_LAUNCHES, TRITON_TILE, TRITON_STRIPS, TRITON_SCAN = 15.0, 0.020, ((8, 1.1), (4, 1.4)), 3.85
# sequences, chunks of all of them, and of the longest
Way = tuple[int, int, int]


def span_of(p: Problem) -> int | None:
    """Chunks of a span, or None: no sequence is split."""
    return None if p.batch_invariant else _span(*_sizes(p))


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
    ends = p.cu_seqlens_cpu.tolist()
    chunks = [_cdiv(end - start, CHUNK) for start, end in pairwise(ends)]
    return ((p.N, sum(chunks), max(chunks)),)


@lru_cache
def num_sms(device: torch.device) -> int:
    """An H200's where there is no GPU."""
    return 132 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(4096)
def _span(HV: int, ways: tuple[Way, ...], num_sms: int) -> int | None:
    """What is fastest over the ways."""
    longest = max(longest for *_, longest in ways)
    if num_sms <= max(_alike(*way) for way in ways) * HV:
        return None
    # in more than a wave the walk would be no faster
    spans = {_cdiv(longest, pieces) for pieces in range(2, num_sms // HV + 1)}

    def total(span: int) -> float:
        return sum(_time(HV, way, span, num_sms) for way in ways)

    best = min(sorted(spans), key=total, default=longest)
    return best if total(best) < GAIN * total(longest) else None


@lru_cache(4096)
def _is_faster(HV: int, ways: tuple[Way, ...], num_sms: int) -> bool:
    """As it is in the first of the ways. A problem without tokens is Triton's."""
    N, chunks, longest = ways[0]
    if chunks == 0:
        return False
    here = LAUNCHES + TILE * chunks * HV + _time(HV, ways[0], _span(HV, ways, num_sms) or longest, num_sms)
    return here < GAIN * _triton(N * HV, _cdiv(chunks, N), num_sms)


def _alike(N: int, chunks: int, longest: int) -> int:
    """How many sequences as long as the longest have as many chunks as there are."""
    return chunks // max(1, longest)


def _time(HV: int, way: Way, span: int, num_sms: int) -> float:
    """us that the walks take in spans. A span's M is counted, whatever its decay."""
    _, chunks, longest = way
    n = _alike(*way)
    spans, rest = _cdiv(longest, span), (chunks - n * longest) * HV / num_sms
    walk = _walks(WALK, n * spans * HV, min(span, longest), rest, num_sms)
    if spans <= 1:
        return walk
    ends = _walks(ENDS, 2 * n * (spans - 1) * HV, span, rest, num_sms)
    return ends + JOBS + _of(COMBINE, spans - 1) + walk


def _walks(cost: tuple[float, float], programs: int, chunks: int, rest: float, num_sms: int) -> float:
    """Of programs that are alike, in waves, and of `rest` chunks of each multiprocessor beside them."""
    return _cdiv(programs, num_sms) * _of(cost, chunks) + cost[1] * rest


def _triton(pairs: int, chunks: int, num_sms: int) -> float:
    tiles = TRITON_TILE * pairs * chunks
    if 2 * pairs > num_sms:
        return TRITON_LAUNCHES + tiles + _cdiv(pairs, num_sms) * chunks * TRITON_SCAN
    walk = min(_cdiv(strips * pairs, num_sms) * us for strips, us in TRITON_STRIPS)
    return TRITON_LAUNCHES + 2 * tiles + chunks * walk


def _of(cost: tuple[float, float], chunks: int) -> float:
    first, each = cost
    return first + each * chunks


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
