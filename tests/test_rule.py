"""Test the rule as PyTorch sees it: operators, tracing, checkpoints, autocast, and other properties."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gdn
from gdn.backends import Saved, load
from gdn.backends.eager.blocks import plan_blocks
from gdn.ops import library
from gdn.problem import parse
from gdn.testing import Case, inputs, packed, rows
from gdn.testing.accuracy import check, run
from gdn.testing.accuracy import compare_outputs as judge
from gdn.testing.accuracy import expect_outputs as expect
from gdn.testing.accuracy import measure_error as compare
from gdn.testing.accuracy import reference_rule as law
from gdn.testing.accuracy import run_poisoned as answers

FORMS = [gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule]
chunk, recurrent = FORMS
# the recurrent form is slow in an interpreter, which runs the chunked form only
CHUNKED = [pytest.param(chunk, marks=pytest.mark.interpret), recurrent]


def provider_of(function, backend=None):
    """Return a function of the rule as a provider: q, k, v, g, beta by position."""
    return lambda q, k, v, g, beta, **options: function(q, k, v, g=g, beta=beta, backend=backend, **options)


def tensors(T=70, B=2, H=2, HV=4, K=16, V=24, dtype=torch.float32, device="cpu", requires_grad=False):
    q, k = torch.randn(2, B, T, H, K, dtype=dtype)
    k = torch.nn.functional.normalize(k, dim=-1)
    v, g = torch.randn(B, T, HV, V, dtype=dtype), -torch.rand(B, T, HV) / 8
    return [x.to(device).requires_grad_(requires_grad) for x in (q, k, v, g, torch.rand(B, T, HV))]


def copy_options(options, device):
    """Return a call's options with their tensors on a device."""
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


OPTIONS = [
    {},
    {"use_qk_l2norm_in_kernel": True, "output_final_state": True},
    {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(4),
     "initial_state": torch.ones(2, 4, 24, 16), "state_v_first": True, "use_beta_sigmoid_in_kernel": True,
     "allow_neg_eigval": True, "output_final_state": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "state", "all"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(backend, device, options, requires_grad):
    x = tensors(device=device, requires_grad=requires_grad)
    problem = parse(*x, backend=backend, **copy_options(options, device))
    torch.library.opcheck(library.chunk_forward, (*problem.arguments(), requires_grad))
    torch.library.opcheck(library.recurrent_forward, problem.arguments())


def permute_memory(x):
    """Return the same numbers with the first axis innermost in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def test_opcheck_of_permuted_inputs(backend, device):
    """Outputs are contiguous whatever the strides of the inputs, since the compiler plans for that."""
    x = [permute_memory(t) for t in tensors(B=3, device=device)]
    S = permute_memory(torch.randn(3, 4, 16, 24, device=device))
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "use_beta_sigmoid_in_kernel": True}
    problem = parse(
        *x, initial_state=S, output_final_state=True, backend=backend, **copy_options(gate, device)
    )  # fmt: skip
    torch.library.opcheck(library.chunk_forward, (*problem.arguments(), True))
    backward = (*problem.arguments(), *Saved(), permute_memory(x[2]), S)
    torch.library.opcheck(library.chunk_backward, backward)
    torch.library.opcheck(library.recurrent_forward, problem.arguments())
    outputs = library.chunk_backward(*backward), library.chunk_forward(*problem.arguments(), True)
    assert all(out.is_contiguous() for outs in outputs for out in outs)


@pytest.mark.interpret
def test_opcheck_backward_and_packed(poison, backend, device):
    """The backward and packed calls pass opcheck in poisoned memory, where NaN equals nothing."""
    x = [t[:1] for t in tensors(device=device)]
    offsets = torch.tensor([0, 0, 30, 65], device=device)
    problem = parse(*x, cu_seqlens=offsets, output_final_state=True, backend=backend)
    torch.library.opcheck(library.chunk_forward, (*problem.arguments(), True))
    o, S, *saved = library.chunk_forward(*problem.arguments(), True)
    saved = [s if s.numel() else None for s in saved]
    torch.library.opcheck(library.chunk_backward, (*problem.arguments(), *saved, o, S))
    torch.library.opcheck(library.chunk_backward, (*problem.arguments(), *Saved(), None, S))


@pytest.mark.parametrize("function", FORMS)
def test_compile_fullgraph_with_dynamic_length(backend, device, function):
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "backend": backend}

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def model(q, k, v, g, beta):
        o, S = function(q * 2, k, v, g=g, beta=beta, **options)
        return o.sum() + S.square().sum()

    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (65, 70, 200):
            x = tensors(T, device=device, requires_grad=True)
            torch._dynamo.mark_dynamic(x[0], 1)
            compiled = torch.autograd.grad(model(*x), x)
            o, S = function(x[0] * 2, *x[1:3], g=x[3], beta=x[4], **options)
            for a, b in zip(compiled, torch.autograd.grad(o.sum() + S.square().sum(), x), strict=True):
                torch.testing.assert_close(a, b)


def test_compile_with_inductor(backend, device):
    x = tensors(100, device=device)
    # precompiled headers take longer than one file of C++ with its headers
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        compiled = torch.compile(lambda *x: chunk(*x, backend=backend)[0] * 2, fullgraph=True)(*x)
    torch.testing.assert_close(compiled, chunk(*x, backend=backend)[0] * 2)


def test_export_with_dynamic_length(backend, device):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return chunk(q, k, v, g, beta, output_final_state=True, backend=backend)

    T = torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(Model(), tuple(tensors(device=device)), dynamic_shapes=({1: T},) * 5)
    for length in (2, 64, 129):
        x = tensors(length, device=device)
        for a, b in zip(program.module()(*x), Model()(*x), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", FORMS)
def test_activation_checkpointing(backend, device, function, reentrant):
    x = tensors(device=device, requires_grad=True)
    f = provider_of(function, backend)
    plain = torch.autograd.grad(f(*x)[0].sum(), x)
    for t in x:
        t.grad = None
    checkpoint(lambda *x: f(*x)[0], *x, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(t.grad, p) for t, p in zip(x, plain, strict=True))


@pytest.mark.parametrize("function", FORMS)
def test_autocast_casts_q_k_v_and_nothing_else(backend, device, function):
    f = provider_of(function, backend)
    q, k, v, g, beta = tensors(device=device)
    expected = f(q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta, output_final_state=True)
    with torch.autocast(device, torch.bfloat16):
        given = f(q, k.bfloat16(), v, g, beta, output_final_state=True)
    assert given[0].dtype == torch.bfloat16 and given[1].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    x = tensors(device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        f(*x)[0].sum().backward()
    assert all(t.grad.dtype == t.dtype for t in x)


@pytest.mark.parametrize("function", FORMS)
def test_gradcheck(function):
    x = [t.double().detach().requires_grad_() for t in tensors(T=5, B=1, H=1, HV=2, K=3, V=2)]
    more = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2,), (2,), (1, 2, 2, 3))]

    def f(q, k, v, g, beta, A_log, dt_bias, S):
        return provider_of(function)(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=S, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, use_qk_l2norm_in_kernel=True,
            state_v_first=True, output_final_state=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(f, (*x, *more))


@pytest.mark.parametrize("function", CHUNKED)
def test_only_what_was_asked_for_gets_a_gradient(backend, device, function):
    q, k, v, g, beta = tensors(device=device)
    S = torch.randn(2, 4, 16, 24).to(device).requires_grad_()
    o, final = provider_of(function, backend)(q, k, v, g, beta, initial_state=S, output_final_state=True)
    final.sum().backward()
    assert S.grad.abs().sum() > 0 and q.grad is None
    assert provider_of(function, backend)(q, k, v, g, beta)[1] is None


@pytest.mark.interpret
@pytest.mark.parametrize("function", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_of_every_output(backend, device, function, dtype):
    q, k, v, g, beta = tensors(20, dtype=dtype, device=device)
    leaves = [q, k, v, g.half(), beta.bfloat16(), torch.randn(2, 4, 16, 24).half().to(device)]
    leaves = [x.detach().requires_grad_() for x in leaves]
    f = provider_of(function, backend)
    if backend == "triton" and dtype == torch.float64:
        with pytest.raises(NotImplementedError, match="triton: expected bf16, fp16 or fp32, got float64"):
            f(*leaves[:5])
        return
    o, S = f(*leaves[:5], initial_state=leaves[5], output_final_state=True)
    assert o.dtype == dtype and S.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    gradients = torch.autograd.grad([o.sum(), S.sum()], leaves)
    assert [x.dtype for x in gradients] == [x.dtype for x in leaves]


@pytest.mark.interpret
@pytest.mark.parametrize("function", FORMS)
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (1, 1), (3, 1)])
def test_smallest_problems(backend, device, function, shape):
    B, T = shape
    x = [t.detach().requires_grad_() for t in tensors(T, B, device=device)]
    S = torch.randn(B, 4, 16, 24).to(device).requires_grad_()
    o, final = provider_of(function, backend)(*x, initial_state=S, output_final_state=True)
    expected = law(*x, initial_state=S, output_final_state=True, exact=True, batch_invariant=False)
    torch.testing.assert_close(o, expected[0].float())
    torch.testing.assert_close(final, expected[1].float() if B else S)
    (o.sum() + final.sum()).backward()
    assert S.grad is not None and (T > 0 or torch.equal(S.grad, torch.ones_like(S)))


@pytest.mark.interpret
@pytest.mark.parametrize("function", FORMS)
@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0], [0, 3, 3, 5]])
def test_packed_corners(backend, device, function, offsets):
    T = 7 if offsets[-1] else 0
    x = [t.detach().requires_grad_() for t in tensors(T, 1, device=device)]
    S = torch.randn(len(offsets) - 1, 4, 16, 24).to(device).requires_grad_()
    cu_seqlens = torch.tensor(offsets, device=device)
    o, final = provider_of(function, backend)(
        *x, initial_state=S, cu_seqlens=cu_seqlens, output_final_state=True
    )
    assert final.shape == S.shape and bool((o[:, offsets[-1] :] == 0).all())
    gradients = torch.autograd.grad([o.sum(), final.sum()], [*x, S])
    assert all(bool((d[:, offsets[-1] :] == 0).all()) for d in gradients[:5])


@pytest.mark.interpret
@pytest.mark.parametrize("function", FORMS)
def test_nan_reaches_no_other_sequence_and_no_other_head(backend, device, function):
    x, f = tensors(200, 1, device=device), provider_of(function, backend)
    offsets = torch.tensor([0, 50, 130, 200], device=device)
    clean = f(*x, cu_seqlens=offsets, output_final_state=True)
    x[2][0, 70, 1] = torch.nan
    x[3][0, 199, 3] = torch.nan
    o, S = f(*x, cu_seqlens=offsets, output_final_state=True)
    assert bool(o[0, 70, 1].isnan().any()) and bool(S[2, 3].isnan().any())
    touched = torch.zeros(o.shape[:3], dtype=torch.bool)
    touched[0, 50:130, 1] = touched[0, 130:, 3] = True
    assert torch.equal(o[~touched.to(device)], clean[0][~touched.to(device)])
    assert torch.equal(S[0], clean[1][0]) and torch.equal(S[1, [0, 2, 3]], clean[1][1, [0, 2, 3]])


@pytest.mark.interpret
@pytest.mark.parametrize("function", CHUNKED)
def test_nan_in_the_gradient_of_o_is_seen(backend, device, function):
    x = tensors(70, 1, K=64, dtype=torch.bfloat16, device=device, requires_grad=True)
    o, _ = provider_of(function, backend)(*x)
    do = torch.ones_like(o)
    do[0, 40, 1, 5] = torch.nan
    dv = torch.autograd.grad(o, x[2], do)[0]
    assert dv[0, :41, 1, 5].isnan().all() and dv[0, :, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("function", CHUNKED)
def test_strided_views_are_not_disturbed(backend, device, function):
    projection = torch.randn(2, 70, 2 * 2 * 16 + 4 * 24).to(device)
    q, k, v = projection.split([32, 32, 96], -1)
    q, k, v = q.unflatten(-1, (2, 16)), k.unflatten(-1, (2, 16)), v.unflatten(-1, (4, 24))
    along_T = v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert v.stride(1) != v[0, 0].numel() and along_T.stride(1) == 1
    g, beta = tensors(device=device)[3:]
    copy, f = projection.clone(), provider_of(function, backend)
    expected = f(q.contiguous(), k.contiguous(), v.contiguous(), g, beta)[0]
    assert torch.equal(f(q, k, v, g, beta)[0], expected)
    assert torch.equal(f(q, k, along_T, g, beta)[0], expected)
    assert torch.equal(projection, copy)


CASES = [
    Case("mild", lengths=rows(300), heads=(2, 4), sizes=(32, 48), state="wide"),
    Case("reset", lengths=packed(0, 5, 70, 0, 129), heads=(2, 6), sizes=(32, 16), state="narrow",
         state_v_first=True, raw_gate="on", beta="negative", use_qk_l2norm_in_kernel=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reruns_are_bit_identical(backend, device, case):
    given = inputs(case, torch.bfloat16, device=device)
    first, second = (run(provider_of(chunk, backend), given) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("function", CHUNKED)
def test_packed_equals_separate_and_cut_equals_whole(backend, device, function):
    dtype, f = torch.float32 if backend == "triton" else torch.float64, provider_of(function, backend)
    near = {"rtol": 1e-4, "atol": 1e-5} if backend == "triton" else {}
    x = tensors(200, 1, dtype=dtype, device=device)
    S0 = torch.randn(2, 4, 16, 24, dtype=dtype).to(device)
    offsets = torch.tensor([0, 83, 200], device=device)
    o, S = f(*x, initial_state=S0, cu_seqlens=offsets, output_final_state=True)
    parts = [[t[:, :83] for t in x], [t[:, 83:] for t in x]]
    alone = [f(*p, initial_state=S0[n : n + 1], output_final_state=True) for n, p in enumerate(parts)]
    torch.testing.assert_close(o, torch.cat([a[0] for a in alone], 1), **near)
    torch.testing.assert_close(S, torch.cat([a[1] for a in alone]), **near)
    whole = f(*x, initial_state=S0[:1], output_final_state=True)
    first = f(*parts[0], initial_state=S0[:1], output_final_state=True)
    second = f(*parts[1], initial_state=first[1], output_final_state=True)
    torch.testing.assert_close(whole[0], torch.cat([first[0], second[0]], 1), **near)
    torch.testing.assert_close(whole[1], second[1], **near)


@pytest.mark.parametrize("function", FORMS)
def test_batch_invariance(backend, device, function):
    """With the option a sequence has the bits that it has alone, whatever else is in the batch."""
    x, f = tensors(150, 5, H=2, HV=4, K=32, V=32, device=device), provider_of(function, backend)
    o, S = f(*x, batch_invariant=True, output_final_state=True)
    for b in range(5):
        alone = f(*(t[b : b + 1] for t in x), batch_invariant=True, output_final_state=True)
        assert torch.equal(o[b], alone[0][0]) and torch.equal(S[b], alone[1][0])


@pytest.mark.parametrize(
    "options", [{}, {"cu_seqlens": torch.tensor([0, 30, 60, 70])}], ids=["batch", "packed"]
)
def test_a_batch_invariant_block_holds_one_sequence(options):
    """Bits may agree by chance, so the reason is tested: a block holds one sequence."""
    x = [t[:1] for t in tensors()] if options else tensors()

    def widest(**more):
        blocks = plan_blocks(parse(*x, **options, **more)).blocks
        return max(step.stop - step.start for block in blocks for step in block.steps)

    assert widest(batch_invariant=True) == 1 < widest()


@pytest.mark.interpret
def test_any_backward_follows_a_forward_that_saved_nothing(backend, device):
    dtype, limit = (torch.float32, 1e-5) if backend == "triton" else (torch.float64, 1e-10)
    given = inputs(replace(CASES[1], heads=(1, 2), lengths=packed(0, 5, 0, 70)), dtype, device=device)
    saved, recomputed = run(provider_of(chunk, backend), given), run(provider_of(recurrent, backend), given)
    for name in saved:
        error, _ = compare(saved[name], recomputed[name], limit, lambda: 0.0)
        assert error <= limit, name


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_backward_follows_any_forward(backend, device, case):
    """The backward of every backend accepts the saved tensors of every forward."""
    given = inputs(case, torch.float32, device=device)
    options = {name: x for name, x in given.options.items() if name != "backend"}
    problem = parse(**{"g": None, "beta": None, **given.tensors}, **options, backend=backend)
    (one, other), fields = (load(backend), load("eager")), ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
    for first, second in ((one, other), (other, one)):
        saved = first.chunk_forward(problem, True)[2]
        own, theirs = (
            b.chunk_backward(problem, saved, given.do, given.dfinal_state) for b in (first, second)
        )
        for name in fields:
            assert compare(getattr(theirs, name), getattr(own, name), 1e-4, lambda: 0.0)[0] <= 1e-4, name


def test_lengths_that_are_only_on_the_device(monkeypatch):
    """A plan for lengths on the device gives the results of one for lengths on the host."""
    given = inputs(CASES[1], torch.float64)
    expected = run(chunk, given), run(provider_of(recurrent), given)
    for module in ("blocks", "recurrent"):
        monkeypatch.setattr(f"gdn.backends.eager.{module}.host_offsets", lambda *args, **options: None)
    for function in FORMS:
        o, S = provider_of(function)(*tensors(7, 1), cu_seqlens=torch.tensor([0]), output_final_state=True)
        assert S.shape[0] == 0 and not o.any()
    for function, results in zip((chunk, provider_of(recurrent)), expected, strict=True):
        for name, x in run(function, given).items():
            assert compare(x, results[name], 1e-12, lambda: 0.0)[0] <= 1e-10, name


@pytest.mark.interpret
def test_time_and_memory_are_linear(backend, device):
    """The saved tensors of a forward grow with T, and never with T squared."""
    sizes = []
    for T in (256, 512):
        arguments = parse(*tensors(T, 1, device=device), backend=backend).arguments()
        sizes.append(sum(s.numel() for s in library.chunk_forward(*arguments, True)[2:]))
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.interpret
def test_a_wrong_answer_is_refused(backend, device):
    case = Case("mild", lengths=rows(100), heads=(1, 2), sizes=(32, 48), state="wide")

    def dropped_state(*args, **options):
        return chunk(*args, **{**options, "initial_state": None, "backend": backend})

    assert all(row.ok for row in check(provider_of(chunk, backend), case, torch.float32, device=device))
    assert not all(row.ok for row in check(dropped_state, case, torch.float32, device=device))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("K", [32, 128])
def test_rows_of_any_norm_and_writes_of_any_strength(backend, device, dtype, K):
    """Rows of q and k with norms from 0 to 16, and beta from 0 to 1, agree side by side in one chunk."""
    case = Case("mild", lengths=rows(70), heads=(1, 2), sizes=(K, 32), use_qk_l2norm_in_kernel=True)
    given = inputs(case, dtype, device=device)
    place = torch.arange(70, device=device)
    norms = torch.tensor([0.0, 2**-4, 1.0, 16.0], device=device)
    for name, x in (("q", norms[place // 5 % 4]), ("k", norms[place % 4])):
        given.tensors[name] *= x[:, None, None].to(dtype)
    strengths = torch.tensor([0.0, 1e-5, 9e-4, 2e-3, 1.0], device=device)
    given.tensors["beta"].copy_(strengths[place % 5][None, :, None])
    expected = expect(given, lambda: given, 1, True)
    results = answers(provider_of(chunk, backend), given)
    wrong = [(row.output, row.error) for row in judge(results, expected, case) if not row.ok]
    assert not wrong, wrong


@pytest.mark.parametrize("function", CHUNKED)
def test_what_lies_past_the_last_sequence_reaches_nothing(backend, device, function):
    case = Case("model", lengths=packed(70, 0, 33, tail=29), raw_gate="on", beta="sigmoid", state="wide")
    given = inputs(case, torch.float32, device=device)
    clean = run(provider_of(function, backend), given)
    for name in ("q", "k", "v", "g", "beta"):
        given.tensors[name][:, 103:] = torch.nan
    for name, x in run(provider_of(function, backend), given).items():
        assert torch.equal(x, clean[name]), name


@pytest.mark.parametrize("function", CHUNKED)
def test_no_decay_and_full_decay_have_finite_gradients(backend, device, function):
    q, k, v, _, beta = tensors(device=device)
    full = torch.full((2, 70, 4), -torch.inf, device=device)
    for g, A_log in ((torch.zeros_like(full), -torch.inf), (full, None)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        options = {}
        if A_log is not None:
            rate = torch.full((4,), A_log, device=device, requires_grad=True)
            options = {"use_gate_in_kernel": True, "A_log": rate}
        o, S = provider_of(function, backend)(*leaves, output_final_state=True, **options)
        found = torch.autograd.grad(o.sum() + S.sum(), [*leaves, *list(options.values())[1:]])
        assert all(bool(x.isfinite().all()) for x in (o, S, *found))


@pytest.mark.parametrize("function", FORMS)
def test_forward_mode_and_second_derivatives_are_refused(function):
    """Forward mode raises instead of giving zero, and a second derivative raises only if it is computed."""
    q, *others = tensors(T=5)
    with pytest.raises(NotImplementedError, match="forward-mode tangent"):
        torch.func.jvp(lambda q: provider_of(function)(q, *others)[0], (q,), (torch.ones_like(q),))
    q.requires_grad_()
    (dq,) = torch.autograd.grad(provider_of(function)(q, *others)[0].square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        dq.sum().backward()


@pytest.mark.parametrize("function", CHUNKED)
def test_a_cached_call(monkeypatch, backend, device, function):
    """Skipping the checks changes no bit, with strided tensors and where hooks give tensors other layouts."""
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}

    def call(x, S):
        leaves = [*x, S]
        outputs = provider_of(function, backend)(*x, **options, initial_state=S)
        return [*outputs, *torch.autograd.grad(outputs, leaves, [y.detach().clone() for y in outputs])]

    def draw():
        x = tensors(device=device)
        x[0] = x[0].mT.contiguous().mT
        return [t.requires_grad_() for t in x], torch.randn(2, 4, 16, 24, device=device, requires_grad=True)

    call(*draw())
    given = draw()
    results = [call(*given)]
    with torch.autograd.graph.save_on_cpu():
        results.append(call(*given))
    with torch.no_grad():
        outputs = provider_of(function, backend)(*given[0], **options, initial_state=given[1])
    monkeypatch.setenv("GDN_DEBUG", "1")
    want = call(*given)
    for got in (*results, outputs):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=False))


@pytest.mark.parametrize("function", FORMS)
def test_what_a_known_call_still_checks(backend, device, function):
    x = [t[:1] for t in tensors(device=device)]
    call = provider_of(function, backend)
    for offsets in ([0, 30, 70], [0, 40, 70], [0, 30, 69]):
        call(*x, cu_seqlens=torch.tensor(offsets))
    for offsets, message in (([0, 70, 30], "non-decreasing"), ([0, 30, 71], "at most T=70")):
        with pytest.raises(ValueError, match=message):
            call(*x, cu_seqlens=torch.tensor(offsets))
    call(*x, scale=1.0)
    call(*x, scale=1)
    with pytest.raises(TypeError, match="scale: expected a number, got bool"):
        call(*x, scale=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert call(*x)[0].dtype == torch.bfloat16
    assert call(*x)[0].dtype == torch.float32


@pytest.mark.interpret
def test_what_is_saved_is_written_whole(poison, backend, device):
    """The saved tiles of a short sequence's only chunk are written whole, with nothing else in them."""
    for T in (1, 20, 33, 64, 65):
        problem = parse(*tensors(T, device=device), backend=backend)
        saved = library.chunk_forward(*problem.arguments(), True)[2:]
        assert all(bool(x.isfinite().all()) for x in saved)


@pytest.mark.interpret
@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 30, 65], [0, 1, 2, 3, 4, 5, 6], [0, 64, 130]])
def test_what_is_saved_of_packed_sequences_is_written_whole(poison, backend, device, offsets):
    """Surplus tiles, and tokens past the last sequence, are written whole, with nothing else in them."""
    x = [t[:1] for t in tensors(150, device=device)]
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": torch.tensor(offsets, device=device)}
    problem = parse(*x, **options, backend=backend)
    saved = library.chunk_forward(*problem.arguments(), True)[2:]
    assert all(bool(t.isfinite().all()) for t in saved)
    results = library.chunk_backward(
        *problem.arguments(), *(t if t.numel() else None for t in saved), x[2], None
    )
    assert all(bool(t.isfinite().all()) for t in results)
