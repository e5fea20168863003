"""Test what only a GPU can show: streams, graphs, devices, large sizes, and which calls compile."""

import pytest
import torch
import triton
from kit import api
from kit.serving import nothing_waits
from kit.specimens import SPECIMENS

import gdn
from gdn.testing import Case, inputs, packed, rows
from gdn.testing.accuracy import check, run
from gdn.testing.accuracy import measure_error as compare
from gdn.testing.accuracy import reference_by_heads as law_side_by_side

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FULL = Case(
    "mild", lengths=packed(0, 5, 70, 0, 300), heads=(2, 4), sizes=(128, 128), state="wide",
    use_qk_l2norm_in_kernel=True, raw_gate="on", beta="negative", state_v_first=True,
)  # fmt: skip


def chunk(*x, **options):
    return gdn.chunk_gated_delta_rule(*x, backend="triton", **options)


def recurrent(q, k, v, g, beta, **options):
    return gdn.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, backend="triton", **options)


FORMS = [chunk, recurrent]


def tensors(B, T, H, HV, K=64, V=64, dtype=torch.bfloat16):
    """Return q, k, v, g, beta, created on the GPU."""
    with torch.device("cuda"):
        q, k = (torch.randn(B, T, H, K, dtype=dtype) for _ in range(2))
        v, g, beta = torch.randn(B, T, HV, V, dtype=dtype), -torch.rand(B, T, HV) / 8, torch.rand(B, T, HV)
    return q, torch.nn.functional.normalize(k, dim=-1), v, g, beta


def close(x, ref, limit):
    error, largest = compare(x.detach(), ref.detach(), limit, lambda: 0.0)
    assert error <= limit, f"{error:.1e} (max {largest:.1e})"


@pytest.mark.parametrize("name", SPECIMENS)
def test_nothing_waits_for_the_device(name):
    """Once compiled, no public call reads from the device, not even the lengths of packed sequences."""
    call = SPECIMENS[name].on("cuda")
    call()
    with nothing_waits():
        call()


@pytest.mark.parametrize("sizes", [(128, 128), (64, 64), (256, 256)], ids=str)
def test_a_head_among_many_has_the_bits_that_it_has_alone(sizes):
    """No load overwrites an operand of an MMA in flight; that showed only if each SM had two programs."""
    case = Case("mixed", lengths=rows(1024), heads=(16, 32), sizes=sizes, state="wide", batch_invariant=True)
    given = inputs(case, torch.bfloat16, device="cuda")
    found, alone = run(chunk, given), run(chunk, given.heads([5]))
    for name, x in alone.items():
        axis = 1 if name in ("final_state", "dh0") else 2
        part = found[name].narrow(axis, 5 * x.shape[axis], x.shape[axis])
        assert torch.equal(part, x), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_200_reruns_are_bit_identical(dtype):
    given = inputs(FULL, dtype, device="cuda")
    first = run(chunk, given)
    for _ in range(200):
        again = run(chunk, given)
        assert all(torch.equal(again[name], x) for name, x in first.items())


@pytest.mark.parametrize("with_backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("form", FORMS)
def test_a_cuda_graph_follows_its_inputs(form, with_backward):
    """A graph may be replayed with other values, and with other lengths of as many sequences."""
    given, other = (inputs(FULL, torch.bfloat16, seed=seed, device="cuda") for seed in (0, 1))
    moved = torch.tensor([0, 60, 60, 61, 190, 375], device="cuda").to(given.tensors["cu_seqlens"].dtype)
    other.tensors["cu_seqlens"].copy_(moved)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(form, given, with_backward)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(form, given, with_backward)
    for name, x in other.tensors.items():
        given.tensors[name].copy_(x)
    given.do.copy_(other.do)
    given.dfinal_state.copy_(other.dfinal_state)
    graph.replay()
    expected = run(form, other, with_backward)
    assert all(torch.equal(captured[name], x) for name, x in expected.items())


def test_a_captured_decode_follows_its_indices():
    B, T, K = 3, 2, 64
    with torch.device("cuda"):
        x = dict(zip(("q", "k", "v", "g", "beta"), tensors(B, T, 2, 4), strict=True))
        pool, index = torch.randn(9, 4, K, K), torch.tensor([0, 1, 2])
        accepted, table = torch.tensor([1, 2, 1]), torch.tensor([[0, 1], [2, 3], [4, 5]])
    steps = {"read_index": table, "num_accepted": accepted, "write_index": table, "write": "all"}
    state, out = pool.clone(), torch.empty_like(x["v"])
    api.decode(**x, state=state, **steps, out=out, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        api.decode(**x, state=state, **steps, out=out, backend="triton")
    table.copy_(torch.tensor([[8, 7], [-1, -1], [6, 5]]))
    accepted.copy_(index)
    state.copy_(pool)
    graph.replay()
    expected = pool.clone()
    assert torch.equal(out, api.decode(**x, state=expected, **steps, backend="triton"))
    assert torch.equal(state, expected) and not out[1].any()


@pytest.mark.parametrize("form", FORMS)
def test_compiled_whole_forward_and_backward(form):
    """Inductor compiles one graph, and another length compiles nothing."""
    model = torch.compile(lambda *x: form(*x, output_final_state=True), fullgraph=True, dynamic=True)
    torch._dynamo.reset()
    for T in (65, 200, 130):
        x = [t.requires_grad_() for t in tensors(2, T, 2, 4)]
        torch._dynamo.mark_dynamic(x[0], 1)
        with torch._dynamo.config.patch(error_on_recompile=T != 65):
            got, want = model(*x), form(*x, output_final_state=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        one, two = (torch.autograd.grad(o, x, [torch.ones_like(t) for t in o]) for o in (got, want))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", SPECIMENS)
def test_tensors_on_a_device_that_is_not_the_current_one(name):
    assert torch.cuda.current_device() == 0
    SPECIMENS[name].on("cuda:1")()
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("form", FORMS)
def test_both_devices_give_the_same_bits(form):
    first, second = (run(form, inputs(FULL, torch.bfloat16, device=f"cuda:{i}")) for i in (0, 1))
    assert all(
        second[name].device.index == 1 and torch.equal(x, second[name].to(0)) for name, x in first.items()
    )


def test_4000_packed_sequences():
    """Thousands of short packed sequences give the numbers of as many rows, and those of the reference."""
    N, T = 4000, 17
    x = [t.requires_grad_() for t in tensors(N, T, 2, 4, dtype=torch.float32)]
    offsets = torch.arange(0, N * T + 1, T, device="cuda", dtype=torch.int32)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    row = [t.detach().reshape(1, N * T, *t.shape[2:]).requires_grad_() for t in x]
    got, want = chunk(*row, cu_seqlens=offsets, **options), chunk(*x, **options)
    close(got[0].view_as(want[0]), want[0], 1e-5)
    close(got[1], want[1], 1e-5)
    one, two = (torch.autograd.grad([o.sum(), S.sum()], t) for (o, S), t in ((got, row), (want, x)))
    for a, b in zip(one, two, strict=True):
        close(a.view_as(b), b, 1e-4)
    some = [t[1990:2010].double() for t in x]
    o, S = law_side_by_side(*some, **options, exact=True, batch_invariant=False)
    close(want[0][1990:2010], o, 1e-5)
    close(want[1][1990:2010], S, 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_more_than_65535_rows_and_heads(form):
    case = Case("mild", lengths=rows(3)._replace(B=4200), heads=(16, 16), sizes=(32, 32), state="wide")
    bad = [row for row in check(form, case, torch.float32, device="cuda") if not row.ok]
    assert not bad


def test_decode_of_more_than_65535_rows_and_heads():
    B = 4200
    q, k, v, g, beta = tensors(B, 1, 16, 16, 32, 32, torch.float32)
    pool = torch.randn(B, 16, 32, 32, device="cuda")
    states = pool.clone(), pool[-2:].clone()
    o = api.decode(q, k, v, states[0], g=g, beta=beta, backend="triton")
    last = api.decode(q[-2:], k[-2:], v[-2:], states[1], g=g[-2:], beta=beta[-2:], backend="triton")
    assert torch.equal(o[-2:], last) and torch.equal(states[0][-2:], states[1])


def test_more_than_2_to_the_31_elements(alone):
    """Tensors may exceed 32-bit offsets; the heads at both ends are compared."""
    if torch.cuda.get_device_properties(0).total_memory < 120 * 2**30:
        pytest.skip("needs 120 GiB of GPU memory")
    T, HV, V = 131_200, 64, 256
    q, k, v, g, beta = tensors(1, T, 1, HV, 64, V)
    assert v.numel() > 2**31
    leaves, ends = [x.requires_grad_() for x in (q, k, v, g, beta)], torch.tensor([0, HV - 1], device="cuda")
    o, S = chunk(*leaves, output_final_state=True)
    few = [x.detach() for x in (q, k)] + [x.detach()[:, :, ends].contiguous() for x in (v, g, beta)]
    few = [x.requires_grad_() for x in few]
    small = chunk(*few, output_final_state=True)
    close(o[:, :, ends], small[0], 1e-2)
    close(S[:, ends], small[1], 1e-2)
    do = torch.zeros_like(o)
    do[:, :, ends] = small[0].detach()
    found = torch.autograd.grad(o, leaves, do)
    wanted = torch.autograd.grad(small[0], few, small[0].detach())
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        close(a if i < 2 else a[:, :, ends], b, 1e-2)


def sizes_of(form, B, T, H, HV, is_packed):
    x = [t.requires_grad_() for t in tensors(B, T, H, HV)]
    options = {"output_final_state": True}
    if is_packed:
        options["cu_seqlens"] = torch.arange(0, T + 1, T // 4, device="cuda")
    o, S = form(*x, **options)
    torch.autograd.grad([o, S], x, [o.detach(), S.detach()])


@pytest.mark.parametrize("form", FORMS)
def test_other_sizes_compile_nothing(form, monkeypatch):
    """Another number of heads, rows or tokens runs binaries that exist already."""
    compiled = []
    for is_packed in (False, True):
        sizes_of(form, 1 if is_packed else 2, 100, 2, 4, is_packed)
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["fn"].name)
    )
    for B, T, H, HV in ((1, 1, 2, 4), (3, 257, 2, 2), (4, 64, 4, 12), (1, 1000, 16, 32), (16, 100, 1, 3)):
        sizes_of(form, B, T, H, HV, False)
        sizes_of(form, 1, 4 * T, H, HV, True)
    assert not compiled


def test_other_batches_of_a_decode_compile_nothing(monkeypatch):
    compiled = []

    def call(B, H, HV, slots):
        q, k, v, g, beta = tensors(B, 1, H, HV)
        index = torch.arange(B, device="cuda")
        pool = torch.zeros(slots, HV, 64, 64, device="cuda")
        api.decode(q, k, v, pool, g=g, beta=beta, read_index=index, backend="triton")

    call(2, 2, 4, 5)
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["fn"].name)
    )
    for B, H, HV in ((1, 2, 4), (3, 1, 8), (2, 16, 32)):
        call(B, H, HV, B + 7)
    assert not compiled


def test_a_second_stream_is_followed():
    """Kernels run on the caller's current stream, and read what the caller queued there before."""
    given = inputs(FULL, torch.bfloat16, device="cuda")
    expected = run(chunk, given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        doubled = given.tensors["v"] * 2
        given.tensors["v"] = doubled / 2
        found = run(chunk, given)
    stream.synchronize()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_unaligned_tensors_take_the_long_way():
    """A view that starts two bytes past an aligned address is right after an aligned call was cached."""
    x = tensors(2, 70, 2, 4)
    expected = [chunk(*x, output_final_state=True) for _ in range(2)][1]
    memory = torch.empty(x[0].numel() + 1, dtype=x[0].dtype, device="cuda")
    q = memory[1:].view_as(x[0]).copy_(x[0])
    assert q.data_ptr() % 16 == 2
    found = chunk(q, *x[1:], output_final_state=True)
    # loads of another width may sum in another order
    for a, b in zip(found, expected, strict=True):
        close(a, b, 5e-3)


def test_the_best_backend_takes_a_cuda_problem():
    x = tensors(1, 4, 2, 4)
    report = str(gdn.explain(*x))
    assert "-> triton" in report or "-> hopper" in report, report
