"""What a forward takes, in us on an H200: into which spans it is split, and whether Triton's is the faster.

The numbers are of K = V = 128; with 64 both take about as long, Triton 1.5 to 2.8 times what is taken here.
Of packed sequences nobody on the host knows the lengths: they may be alike, or one may have all chunks. A
span is chosen by the sum of the times of both.
"""

from functools import lru_cache

import torch

from gdn.problem import Problem

# a tile of 64 tokens and a value head in `factors` and `solve`; all launches of a forward that is not split
TILE, LAUNCHES = 0.010, 10.0
# first: what a wave of programs takes before and after its chunks; then each chunk
WALK, ENDS = (7.0, 2.3), (6.0, 1.43)
# of `jobs`, and of `combine`, its first span and each
JOBS, COMBINE = 2.5, (9.0, 1.9)
GAIN = 0.9  # of the time without spans, or of Triton's, at most: more launches take the host longer
# Triton: its launches, a tile in prepare, as much in output, a chunk in the state pass by strips, and in scan
TRITON_LAUNCHES, TRITON_TILE, TRITON_STRIPS, TRITON_SCAN = 15.0, 0.020, ((8, 1.1), (4, 1.4)), 3.85


def span_of(p: Problem) -> int | None:
    """Chunks of a span, or None: no sequence is split."""
    return None if p.batch_invariant else _span(*_sizes(p))


def is_faster(p: Problem) -> bool:
    """Whether the kernels here are to be preferred to Triton's."""
    return _is_faster(*_sizes(p))


def _sizes(p: Problem) -> tuple[int, int, int, bool, int]:
    return p.N, p.HV, p.num_chunks, p.cu_seqlens is not None, _num_sms(p.device)


@lru_cache
def _num_sms(device: torch.device) -> int:
    """An H200's where there is no GPU."""
    return 132 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(4096)
def _span(N: int, HV: int, num_chunks: int, is_packed: bool, num_sms: int) -> int | None:
    """What is fastest over the ways in which the chunks may be spread over sequences."""
    if num_sms <= N * HV:
        return None
    ways = _ways(N, num_chunks, is_packed)
    longest = max(chunks for _, chunks in ways)
    # in more than a wave the walk would be no faster
    spans = {_cdiv(longest, pieces) for pieces in range(2, num_sms // HV + 1)}

    def total(span: int) -> float:
        return sum(_time(n * HV, chunks, span, num_sms) for n, chunks in ways)

    best = min(sorted(spans), key=total, default=longest)
    return best if total(best) < GAIN * total(longest) else None


@lru_cache(4096)
def _is_faster(N: int, HV: int, num_chunks: int, is_packed: bool, num_sms: int) -> bool:
    """As it is for sequences that are alike. A problem without tokens is Triton's."""
    if N * num_chunks == 0:
        return False
    chunks = _cdiv(num_chunks, N)
    span = _span(N, HV, num_chunks, is_packed, num_sms) or chunks
    here = LAUNCHES + TILE * num_chunks * HV + _time(N * HV, chunks, span, num_sms)
    return here < GAIN * _triton(N * HV, chunks, num_sms)


def _ways(N: int, num_chunks: int, is_packed: bool) -> list[tuple[int, int]]:
    """Sequences, and chunks of each."""
    found = [(N, _cdiv(num_chunks, N))]
    return [*found, (1, num_chunks)] if is_packed and N > 1 else found


def _time(pairs: int, chunks: int, span: int, num_sms: int) -> float:
    """us that the walks of so many sequences and heads take, `chunks` each, in spans.

    In waves of a program each. A span's M is counted, whatever its decay.
    """
    spans = _cdiv(chunks, span)
    walk = _cdiv(spans * pairs, num_sms) * _of(WALK, min(span, chunks))
    if spans == 1:
        return walk
    ends = _cdiv(2 * (spans - 1) * pairs, num_sms) * _of(ENDS, span)
    return ends + JOBS + _of(COMBINE, spans - 1) + walk


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
