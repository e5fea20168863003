"""Check the cost model of the Hopper backend: segments, consumers, and the faster backend."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON

from gdn.problem import parse
from gdn.testing import inputs, packed, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)


from kit.hopper import BASE

from gdn.backends.hopper import cost
from gdn.backends.hopper.backward.cost import rank_segments


def distributions(N, chunks, is_packed):
    """Return the distributions of N sequences of equal length; packed, one of them may have all chunks."""
    found = (cost.equal_lengths(N, chunks),)
    return (*found, (N, N * chunks, N * chunks)) if is_packed and N > 1 else found


def test_a_full_gpu_is_not_cut():
    """Cut long sequences only: not where the SMs are busy."""
    for pairs in (132, 133, 264, 4000):
        for chunks, is_packed in itertools.product((1, 64, 2048), (False, True)):
            for N in (1, 2, pairs):
                assert cost._best_cuts(-(-pairs // N), distributions(N, chunks, is_packed), 132) is None
    for chunks in (1, 2, 4, 8):
        assert cost._best_cuts(8, distributions(1, chunks, False), 132) is None
    for HV, chunks in itertools.product((1, 8, 16, 32), (128, 512, 2048)):
        distribution = cost.equal_lengths(1, chunks)
        cuts = cost._best_cuts(HV, (distribution,), 132)
        for cut in cuts:
            before, _ = cut.segments(chunks)
            assert 1 <= sum(count for count, _ in before) <= 132 // HV
        assert cost._scan_time(HV, distribution, cuts.many, 132) < cost.GAIN * cost._scan_time(
            HV, distribution, None, 132
        )
    # one of sixteen sequences may have all tokens
    assert cost._best_cuts(8, distributions(16, 64, False), 132) is None
    assert cost._best_cuts(8, distributions(16, 64, True), 132) is not None
    given = inputs(replace(BASE, lengths=rows(20000)), torch.bfloat16)
    problem = parse(**given.tensors, **given.options)
    assert cost.cuts_of(problem) is not None


def test_sizes_of_rows_are_those_of_packed_sequences():
    for B, T in ((1, 130), (1, 64), (3, 65)):
        dense = inputs(replace(BASE, lengths=rows(T)._replace(B=B)), torch.bfloat16)
        one = inputs(replace(BASE, lengths=packed(T)), torch.bfloat16)
        HV, ((N, chunks, longest),), num_sms = cost.sizes_of(parse(**dense.tensors, **dense.options))
        expected = HV, ((1, longest, longest),), num_sms
        assert (N, chunks) == (B, B * longest) and longest == -(-T // 64)
        assert cost.sizes_of(parse(**one.tensors, **one.options)) == expected


def test_ctas_of_one_consumer():
    """Use one consumer a CTA where twice as many CTAs fit the SMs, also with segments."""
    for HV, consumers in ((8, 1), (66, 1), (67, 2), (132, 2)):
        assert cost._consumers(HV, (cost.equal_lengths(1, 64),), None, 132) == consumers
    given = inputs(replace(BASE, heads=(1, 8), lengths=rows(8192)._replace(B=1)), torch.bfloat16)
    problem = parse(**given.tensors, **given.options)
    cuts = cost.cuts_of(problem)
    before, last = cuts.many.segments(128)
    num_segments = 1 + sum(count for count, _ in before)
    assert cost.consumers_of(problem, cuts) == 1 and 2 * 8 * num_segments <= 132 and last <= 20
    assert cost.consumers_of(problem, cost.equal_cuts(8)) == 2 and cost.consumers_of(problem, None) == 1
    # both cuts run in the same launch of the scan
    for HV, chunks in itertools.product((1, 4, 8, 16, 32, 64), (32, 64, 128, 256, 512, 2048)):
        distribution = cost.equal_lengths(1, chunks)
        cuts = cost._best_cuts(HV, (distribution,), 132) or (None,)
        assert len({cost._consumers(HV, (distribution,), cut, 132) for cut in cuts}) == 1


def problem_of(HV, lengths, is_known=False, **options):
    """Return a problem of packed sequences; is_known: the host has their lengths."""
    given = inputs(replace(BASE, heads=(1, HV), lengths=packed(64)), torch.bfloat16).tensors
    tensors = {
        name: given[name].new_empty(1, sum(lengths), *given[name].shape[2:], device="meta")
        for name in ("q", "k", "v", "g", "beta")
    }
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    cpu = offsets if is_known else None
    return parse(**tensors, cu_seqlens=offsets.to("meta"), cu_seqlens_cpu=cpu, **options)


def test_short_sequences_of_unknown_lengths_are_not_cut():
    """Cut where one sequence may have so many tokens that a cut pays for its launches, if it is not there.

    On an H200 the launches took 12 to 18 us where no sequence was cut (16 or 8 of 64 to 256 tokens of 8
    heads), and gather and scatter of a pool of 128 states 17 more.
    """
    for HV, lengths in ((8, [64] * 16), (8, [17] * 16), (8, [256] * 8), (1, [64] * 16), (32, [64] * 4)):
        assert cost.cuts_of(problem_of(HV, lengths)) is None
    # one of sixteen may have 2,048 tokens, or 3,072; one of four 6,000
    assert cost.cuts_of(problem_of(8, [128] * 16)) is None
    assert cost.cuts_of(problem_of(8, [192] * 16)) is not None
    assert cost.cuts_of(problem_of(8, [192] * 16), has_pool=True) is None
    assert cost.cuts_of(problem_of(8, [1500] * 4), has_pool=True) is not None
    # the longest that one may be, not the bound of all chunks
    assert cost.sizes_of(problem_of(8, [65] * 16))[1] == ((16, 32, 2), (16, 17, 17))


def test_which_scan_a_problem_has():
    """Move states by TMA where an SM has two items of few chunks."""
    for HV, lengths, expected in (
        (8, [64] * 16, False), (66, [64] * 2, False), (8, [64] * 17, True), (67, [64] * 2, True),
        (32, [448] * 8, True), (32, [513] * 8, False),
    ):  # fmt: skip
        assert cost.has_short_items(problem_of(HV, lengths)) == expected


def test_lengths_on_the_host_decide_on_segments():
    """Use `cu_seqlens_cpu`: four long sequences of 32 heads fill the SMs, one long sequence does not."""

    def cuts(lengths, is_known=True):
        return cost.cuts_of(problem_of(32, lengths, is_known))

    assert cuts([2048] * 4) is None
    assert cuts([8192, 0, 0, 0]) is not None and cuts([8000, 64, 64, 64]) is not None
    assert cuts([2048] * 4, is_known=False) is not None


def test_cuts_of_a_batch_invariant_call(monkeypatch):
    """Decide by a sequence's own length and the heads alone, on any GPU; GDN_SEGMENTS=0 forbids cuts."""
    least = {1: 96, 8: 96, 9: 257, 16: 257, 32: 257, 33: 257}
    assert {HV: cost.own_cuts(HV).least for HV in least} == least
    assert cost.own_cuts(34) is None and cost.own_cuts(64) is None
    for HV, n in itertools.product((1, 4, 8), (96, 128, 383, 384, 2048)):
        shape = (cost.own_cuts(HV).below, cost.own_cuts(HV).above)[n >= cost.LONG_FROM]
        before, last = cost.own_cuts(HV).cut_of(n).segments(n)
        assert sum(count * chunks for count, chunks in before) + last == n and last > 0
        assert sum(count for count, _ in before) <= 1 + shape.longs

    def problem(HV, *lengths, is_known=True, num_sms=132):
        monkeypatch.setattr(cost, "num_sms", lambda device: num_sms)
        return problem_of(HV, lengths, is_known, batch_invariant=True)

    long, short = 96 * 64, 95 * 64
    assert cost.cuts_of(problem(8, long)) is cost.own_cuts(8)
    assert cost.cuts_of(problem(8, *[64] * 500, long, num_sms=66)) is cost.own_cuts(8)
    assert cost.cuts_of(problem(8, *[short] * 4)) is None
    # one of the sequences may have all tokens: the device decides
    assert cost.cuts_of(problem(8, *[short] * 4, is_known=False)) is cost.own_cuts(8)
    assert cost.own_cuts(8).most(4, 4 * 95) == 4 + 3 * 14
    monkeypatch.setenv("GDN_SEGMENTS", "0")
    assert cost.cuts_of(problem(8, long)) is None
    assert cost.cuts_of(replace(problem(8, long), batch_invariant=False)) is None


def test_sizes_it_is_faster_at():
    """Choose `hopper` as measured on an H200: for long or many sequences, not for few short ones."""
    for N, HV, chunks in (
        (1, 32, 8), (1, 64, 8), (1, 8, 32), (1, 8, 128), (1, 8, 512), (8, 8, 64), (1, 64, 512), (8, 32, 64),
        (8, 32, 16), (16, 16, 256), (32, 32, 1), (64, 32, 2),
    ):  # fmt: skip
        assert all(
            cost._is_faster(HV, distributions(N, chunks, is_packed), 132) for is_packed in (False, True)
        )
    for N, HV, chunks in ((1, 8, 1), (1, 32, 1), (1, 8, 16)):
        assert not cost._is_faster(HV, distributions(N, chunks, False), 132)


def test_segments_of_a_rank_fill_the_sms():
    """Cut the tokens of a rank so that few SMs are idle, forward and backward."""
    assert [rank_segments(heads, 1024, 132) for heads in (8, 16, 32)] == [16, 8, 4]
    # two segments of 48 heads leave 36 SMs idle, and one of 96 as many
    for heads in (48, 96):
        count = rank_segments(heads, 1024, 132)
        waves = -(-heads * count // 132)
        assert heads * count / (132 * waves) >= 0.95
    for heads in (1, 48, 200, 1000):
        assert rank_segments(heads, 1, 132) == 1
        assert 1 <= rank_segments(heads, 3, 132) <= 3
