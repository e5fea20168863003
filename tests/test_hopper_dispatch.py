"""Check what the Hopper backend supports, what it copies, and what it compiles ahead."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON, INTERPRETED

import gdn
from gdn import backends
from gdn.problem import parse
from gdn.problem.prefill import PrefillProblem, parse_prefill
from gdn.problem.propagate import PropagateProblem, RunStep
from gdn.testing import inputs, packed, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit.compiling import TARGETS, jobs_of, recording
from kit.hopper import BASE, CASES, checkpoint_options, make_prefill

from gdn.backends import hopper
from gdn.backends.hopper import cost, descriptors, rule, scans, segments
from gdn.backends.hopper.backward import cost as backward_cost
from gdn.backends.hopper.backward import plan
from gdn.backends.triton.rule import run as chunked
from gdn.backends.triton.rule.describe import operand_dtype, to_kernel_layout


@pytest.mark.skipif(INTERPRETED, reason="expected no interpreter")
def test_supported_problems(monkeypatch):
    """Name a reason for each problem that is not supported, as on a GPU of capability (9, 0)."""
    monkeypatch.setattr(hopper.triton, "refuses", lambda problem: None)
    given = inputs(BASE, torch.bfloat16)

    def named(backend="hopper", **changed):
        return parse(**{**given.tensors, **changed}, **given.options, backend=backend)

    assert "capability (9, 0), got cpu" in hopper.refuses(named())
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    assert hopper.refuses(named()) is None
    assert "faster at than triton, got N=2, HV=2, T=129" in hopper.refuses(named(backend=None))
    monkeypatch.setattr(cost, "is_faster", lambda problem: True)
    assert hopper.refuses(named(backend=None)) is None
    for backend in (None, "hopper"):
        x = make_prefill((1, 2), 128, 64, 70) | checkpoint_options(64, 2, 128, 64, 70)
        flags = dict.fromkeys(("use_qk_l2norm_in_kernel", "state_v_first", "update_state"), True)
        flags |= dict.fromkeys(("allow_neg_eigval", "batch_invariant"), False)
        absent = dict.fromkeys(PrefillProblem.declaration.names)
        prefill = parse_prefill(**absent | flags | x | {"backend": backend})
        assert hopper.refuses(prefill) is None
    # the faster backend depends on the batch, so one of them computes every size
    monkeypatch.setattr(cost, "is_faster", lambda problem: False)
    assert hopper.refuses(replace(prefill, backend=None)) is not None
    assert hopper.refuses(replace(prefill, backend=None, batch_invariant=True)) is None
    assert "batch_invariant" in hopper.refuses(replace(named(backend=None), batch_invariant=True))
    assert hopper.refuses(replace(named(), batch_invariant=True)) is None
    wide = {name: x.float() for name, x in given.tensors.items()}
    assert "expected bf16, got torch.float32" in hopper.refuses(named(**wide))
    small = inputs(replace(BASE, sizes=(64, 128)), torch.bfloat16)
    assert "scale of at least 0, got -1.0" in hopper.refuses(replace(named(), scale=-1.0))
    small = parse(**small.tensors, **small.options, backend="hopper")
    assert "got K=64, V=128" in hopper.refuses(small)
    monkeypatch.undo()
    monkeypatch.setattr(hopper.triton, "refuses", lambda problem: None)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    few = inputs(replace(BASE, sizes=(64, 64), lengths=rows(20000), state="none"), torch.bfloat16)
    few = parse(**few.tensors, **few.options)
    assert hopper.refuses(few) is None and cost.cuts_of(few) is not None
    assert list(hopper._forward_launches(few, None)) and not list(
        hopper._forward_launches(replace(few, batch_invariant=True), None)
    )


@pytest.mark.skipif(INTERPRETED, reason="expected no interpreter")
def test_the_backward_of_a_problem(monkeypatch):
    """Choose this backward on sm_90 whichever backend runs the forward; `explain` names it."""
    given = inputs(BASE, torch.bfloat16)

    def backward(case=BASE, dtype=torch.bfloat16, **changed):
        made = inputs(case, dtype)
        report = gdn.explain(**made.tensors, **made.options | changed)
        assert report.backward is None or f"backward {report.backward}" in str(report)
        return report.chosen, report.backward

    assert backward() == ("eager", "eager")
    monkeypatch.setattr(hopper.triton, "refuses", lambda problem: None)
    supporting = replace(backends.triton.BACKEND, refuses=lambda problem: None)
    monkeypatch.setattr(backends.triton, "BACKEND", supporting)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    # the host launches Triton's backward of few chunks faster
    assert backward() == ("triton", "triton")
    assert backward(replace(BASE, lengths=rows(64 * 80))) == ("hopper", "hopper")
    assert backward(backend="hopper") == ("hopper", "hopper")
    assert backward(backend="triton") == ("triton", "triton")
    assert backward(backend="eager") == ("eager", "eager")
    small = replace(BASE, sizes=(64, 64))
    assert backward(small, backend="hopper") == ("hopper", "hopper")
    assert backward(replace(small, lengths=rows(64 * 80))) == ("hopper", "hopper")
    assert backward(dtype=torch.float16) == ("triton", "triton")
    assert backward(batch_invariant=True) == ("triton", "triton")
    assert backward(batch_invariant=True, backend="hopper") == ("hopper", "hopper")
    problem = parse(**given.tensors, **given.options, backend="hopper")
    with pytest.raises(ValueError, match="GDN_BACKEND"):
        monkeypatch.setenv("GDN_BACKEND", "hoper")
        backends.select_backward(replace(problem, backend=None))


def test_ranks_fold_states_for_a_named_backend(monkeypatch):
    """A context's call that names `hopper` passes the name on to the fold, whose kernel is Triton's."""
    x = torch.zeros(1, 1, 2, 64, 64)
    for name in ("hopper", None):
        problem = PropagateProblem(x, x, None, x[0], (RunStep(0, 0, 0),), backend=name)
        monkeypatch.setattr(hopper.triton, "refuses", lambda problem: None)
        assert (hopper.refuses(problem) is None) == (name == "hopper")


@pytest.mark.parametrize("shape, strides", [
    ((1, 1, 2, 128), (999, 777, 128, 1)), ((1, 5, 2, 128), (7, 256, 128, 1)),
    ((1, 70, 1, 128), (8960, 128, 3, 1)), ((2, 5, 2, 128), (2000, 300, 130, 1)),
])  # fmt: skip
def test_unaligned_tensors_are_copied(shape, strides):
    """Copy what TMA cannot read: strides that are no multiples of 16 bytes, or 0."""
    x = torch.randn(4000 + 70 * 128).as_strided(shape, strides)
    copy = descriptors.make_aligned(x)
    assert torch.equal(copy, x) and descriptors.make_descriptor(
        copy.bfloat16(), (1, 64, 1, 128), descriptors.TOKENS
    )
    spread = torch.zeros(2, 5, 1, 128).expand(2, 5, 4, 128)
    assert descriptors.make_aligned(spread).stride() == (2560, 512, 128, 1)
    good = torch.zeros(2, 5, 2, 128)
    assert descriptors.make_aligned(good) is good


@pytest.mark.parametrize("kept", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_heads", [
    lambda x: x.view(2, 4, 75, 384).transpose(1, 2)[..., :128], lambda x: x.view(2, 75, 4, 384)[..., :128],
    lambda x: x[: 2 * 75 * 512].view(2, 75, 4, 128)[:, 5:], lambda x: x.view(2, 75, 4, 384)[..., :64],
])  # fmt: skip
def test_compiling_ahead_takes_any_strides(monkeypatch, of_heads, kept):
    """Compile every launch of all plans, on placeholders, before the first forward of a kind."""
    launches = []
    monkeypatch.setattr(rule, "compile_ahead", lambda device, kind, steps: launches.extend(steps()))
    v = of_heads(torch.zeros(2 * 75 * 4 * 384, dtype=torch.bfloat16))
    q = torch.zeros(2, v.shape[1], 2, v.shape[3], dtype=torch.bfloat16)
    problem = parse(q=q, k=q, v=v, g=None, beta=None, backend="triton")
    rule.plan_first(problem, None, 2, kept)
    found = [launch for launch, _ in launches]
    widths = {launch.constants["BV"] for launch in found if launch.kernel is segments.propagate_states_kernel}
    assert widths == set(segments.PROPAGATE[problem.K][0])
    consumers = [
        launch.constants["CONSUMERS"] for launch in found if launch.kernel is scans.persistent_scan_kernel
    ]
    assert sorted(consumers) == ([1, 1, 2, 2] if problem.K == 128 else [1] * 4)


@pytest.mark.skipif(INTERPRETED, reason="expected kernels to be compiled")
@pytest.mark.parametrize("save", (False, True))
@pytest.mark.parametrize("named", (None, "triton", "hopper"))
def test_other_backends_are_compiled_ahead(monkeypatch, named, save):
    """Compile the kernels of both backends with the first forward of a kind, unless one is named."""
    found = {}

    def ahead(device, kind, steps):
        found[kind[0]] = {launch.kernel.__name__ for launch, _ in steps()}
        # the key tells the first call of a named backend from that of a call that may go to both
        assert kind[-1] == (named is None)

    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper.triton, "refuses", lambda problem: None)
    given = inputs(CASES["packed"], torch.bfloat16)
    problem = parse(**given.tensors, **given.options, backend=named)
    with recording(TARGETS["cuda:90"].machine):
        for module in (chunked, rule):
            monkeypatch.setattr(module, "compile_ahead", ahead)
        chunked.forward(to_kernel_layout(problem), operand_dtype(problem) if save else None)
        rule.chunk_forward(problem, save)
    theirs, own = (
        {"prepare_kernel", "state_kernel"},
        {"persistent_scan_kernel", "segment_transfer_kernel", "solve_kernel"},
    )
    assert theirs <= found["forward"] and own <= found["hopper"]
    assert found["forward"] & own == (own if named is None else set())
    assert found["hopper"] & theirs == (theirs if named is None else set())


@pytest.mark.skipif(INTERPRETED, reason="expected kernels to be compiled")
@pytest.mark.parametrize("name", ("packed", "few keys"))
@pytest.mark.parametrize("named", (None, "triton", "hopper"))
def test_other_backwards_are_compiled_ahead(monkeypatch, named, name):
    """A small backward of a kind is Triton's, and a large one not: the first of either compiles both.

    So do both forms of A_inv at K = V = 64: the forward, too, may be Triton's or Hopper's.
    """
    jobs = {}

    def ahead(device, kind, steps):
        assert kind[-1] == (named is None)
        jobs[kind[0]] = set(jobs_of(steps(), "cuda:90"))

    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper.triton, "refuses", lambda problem: None)
    given = inputs(CASES[name], torch.bfloat16)
    with recording(TARGETS["cuda:90"].machine) as launches:
        problem = parse(**given.tensors, **given.options, backend=named)
        saved = chunked.chunk_forward(problem, True)[2]
        for module in (chunked, plan):
            monkeypatch.setattr(module, "compile_ahead", ahead)
        backwards = {"backward": chunked.chunk_backward, "hopper backward": plan.chunk_backward}
        forms = {"": saved}
        if problem.K == 64:
            parts = torch.stack([saved.A_inv, saved.A_inv], 2).bfloat16()
            forms["split, "] = replace(saved, A_inv=parts)
        launched, compiled = {}, {}
        for form, (kind, run) in itertools.product(forms, backwards.items()):
            launches.clear()
            jobs.clear()
            run(problem, forms[form], given.do, given.dfinal_state)
            launched[form + kind] = set(jobs_of(launches, "cuda:90"))
            (compiled[form + kind],) = jobs.values()
    for name, other in itertools.permutations(launched, 2):
        # both backwards, and in Hopper's both forms; Triton's joins the parts
        is_known = named is None or launched[other] <= launched[name]
        assert launched[name] <= compiled[name] and (launched[other] <= compiled[name]) == is_known


@pytest.mark.skipif(INTERPRETED, reason="expected kernels to be compiled")
@pytest.mark.parametrize("name", ["packed", "options", "one chunk", "packed, in passes", "few keys"])
def test_the_backward_is_compiled_ahead(monkeypatch, name):
    """Compile all binaries of backwards of a kind with the first one; those of other sizes are among them."""
    name, in_passes = name.removesuffix(", in passes"), name.endswith("in passes")
    # some of the sizes then have one pass, and some many
    monkeypatch.setattr(backward_cost, "SLABS", in_passes)
    monkeypatch.setattr(backward_cost, "SLAB_BYTES", 1 << 18)
    kinds = {}
    monkeypatch.setattr(plan, "compile_ahead", lambda device, kind, steps: kinds.update({kind: steps}))
    launched = set()
    with recording(TARGETS["cuda:90"].machine) as launches:
        sizes = (((1, 2), 1, 65), ((8, 64), 3, 65), ((2, 2), 40, 65), ((1, 2), 1, 1500))
        for heads, B, T in sizes:
            case = CASES[name]
            lengths = rows(T)._replace(B=B) if case.lengths.ends is None else packed(*[T] * B)
            given = inputs(replace(case, heads=heads, lengths=lengths), torch.bfloat16)
            problem = parse(**given.tensors, **given.options, backend="triton")
            saved = chunked.chunk_forward(problem, True)[2]
            launches.clear()
            plan.chunk_backward(problem, saved, given.do, given.dfinal_state)
            launched |= set(jobs_of(launches, "cuda:90"))
        compiled = set().union(*(jobs_of(steps(), "cuda:90") for steps in kinds.values()))
    assert len(kinds) == 1 and launched <= compiled
    names = {job.kernel.__name__ for job in launched}
    assert names >= {"reverse_scan_kernel", "gradients_kernel"}
    assert ("plan_slabs_kernel" in names) == in_passes
    scans = [dict(job.constants) for job in launched if job.kernel is plan.reverse_scan_kernel]
    assert {scan["CONSUMERS"] for scan in scans} == ({1} if name == "few keys" else {1, 2})


def test_compiling_ahead_copies_no_tensor_and_needs_no_token(monkeypatch):
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper.triton, "refuses", lambda problem: None)
    given = inputs(CASES["packed"], torch.bfloat16)
    spread = given.tensors | {"v": given.tensors["v"][:, :1].expand_as(given.tensors["v"])}
    odd = given.tensors | {"v": torch.nn.functional.pad(given.tensors["v"], (0, 1))[..., :-1]}
    monkeypatch.setattr(descriptors, "make_aligned", None)
    with recording(TARGETS["cuda:90"].machine):
        for tensors in (given.tensors, spread, odd):
            problem = parse(**tensors, **given.options)
            found = {launch.kernel.__name__ for launch, _ in hopper._forward_launches(problem, None)}
            own = {"persistent_scan_kernel", "segment_transfer_kernel", "solve_kernel"}
            assert own | {"short_scan_kernel"} <= found
            saved = chunked.chunk_forward(problem, True)[2]
            for do in (given.do, given.do[:, :1].expand_as(given.do)):
                launches = hopper._backward_launches(problem, saved, do, given.dfinal_state)
                found = {launch.kernel.__name__ for launch, _ in launches}
                assert {"reverse_scan_kernel", "reverse_transfer_kernel", "gradients_kernel"} <= found
    names = ("q", "k", "v", "g", "beta")
    for options in ({}, {"cu_seqlens": torch.zeros(3, dtype=torch.int32)}):
        tensors = {name: given.tensors[name][:, :0] for name in names}
        nothing = parse(**tensors, **options)
        assert list(hopper._forward_launches(nothing, None)) == []
        assert list(hopper._backward_launches(nothing, None, given.do, None)) == []
        assert "faster at" in hopper.refuses(nothing)
