"""Compare stages with the reference, adjoints with its autograd, and the reference with the recurrence."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import gdn
from gdn import reference
from gdn.backends import load
from gdn.problem.stages import AXES
from gdn.reference import stages as reference_stages

C = 64
# stage: arguments, outputs, and the adjoint's arguments before the gradients of the outputs
STAGES = {
    "chunk_cumsum": ("g", "G", "g"),
    "chunk_gate_cumsum": ("a A_log dt_bias", "G", "a A_log dt_bias"),
    "chunk_kkt": ("k beta G", "A", "k beta G"),
    "solve_tril": ("A", "A_inv", "A_inv"),
    "wy_transform": ("k v beta G A_inv", "w u", "k v beta G A_inv"),
    "chunk_state": ("k w u G initial_state", "S_in v_new final_state", "k w u G initial_state S_in v_new"),
    "chunk_output": ("q k v_new G S_in", "o", "q k v_new G S_in"),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FINEST = {"eager": torch.float64, "triton": torch.float32}  # the widest dtype that a backend computes in


@dataclass(frozen=True)
class Case:
    T: int
    B: int = 1
    H: int = 2
    HV: int = 2
    K: int = 8
    V: int = 5
    keys: str = "random"
    gate: str = "mild"
    offsets: tuple[int, ...] | None = None


LADDER = (0, 0, 1, 64, 64, 129, 193, 258, 258)
CASES = {
    "nothing": Case(T=0, B=2),
    "one token": Case(T=1, B=2, HV=4),
    "63 tokens": Case(T=63, B=2, HV=6, K=5, V=8),
    "64 tokens": Case(T=64, H=1, HV=3, gate="none"),
    "65 tokens": Case(T=65, B=2, H=3, HV=3, K=3, gate="strong"),
    "130 tokens": Case(T=130, B=2, HV=4, gate="slow"),
    "identical keys": Case(T=130, HV=4, keys="identical"),
    "negative eigenvalues": Case(T=130, HV=4, keys="negative"),
    "reset": Case(T=130, HV=4, gate="reset"),
    "packed": Case(T=260, HV=4, offsets=LADDER),
    "packed resets": Case(T=258, HV=4, gate="reset", offsets=LADDER),
    "no token, two sequences": Case(T=0, offsets=(0, 0, 0)),
    "no sequence": Case(T=70, offsets=(0,)),
}
INTERPRETED = ("65 tokens", "packed")
each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.interpret] * (name in INTERPRETED))
        for name, case in CASES.items()
    ],
)
each_stage = pytest.mark.parametrize("stage", STAGES)
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp64", "fp32"])


@pytest.fixture(autouse=True)
def unwritten_memory_holds_nan(request):
    """Poison new memory; on a GPU allow operators without a deterministic form, as adjoints use some."""
    on_gpu = "device" in request.fixturenames and request.getfixturevalue("device") == "cuda"
    request.getfixturevalue("poison" if on_gpu else "strict_poison")


def offsets_of(case: Case) -> torch.Tensor | None:
    return None if case.offsets is None else torch.tensor(case.offsets)


def leaves(case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the inputs that a caller gives, in float64."""
    rng = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    # two unit vectors with a common part of weight 0.8 have that cosine
    common = {"random": 0.0, "identical": 1.0, "negative": 0.8}[case.keys]
    shared = F.normalize(randn(B, 1, H, K), dim=-1).expand(B, T, H, K)
    k = F.normalize(
        common**0.5 * shared + (1 - common) ** 0.5 * F.normalize(randn(B, T, H, K), dim=-1), dim=-1
    )
    beta = {"random": torch.sigmoid(randn(B, T, HV)), "identical": torch.ones(B, T, HV, dtype=torch.float64)}
    g = (
        F.logsigmoid(randn(B, T, HV))
        / {"strong": 1, "mild": 16, "reset": 16, "slow": 1024, "none": 1}[case.gate]
    )
    g = g * (case.gate != "none")
    if case.gate == "reset":
        g[:, [3, 50, 51, 90]], g[:, [20, 70], 1] = -1e6, -torch.inf
    N = B if case.offsets is None else len(case.offsets) - 1
    return {
        "q": randn(B, T, H, K), "k": k, "v": randn(B, T, HV, V), "g": g,
        "beta": beta.get(case.keys, torch.full((B, T, HV), 1.9, dtype=torch.float64)),
        "a": randn(B, T, HV) * 3, "A_log": randn(HV), "dt_bias": randn(HV),
        "initial_state": randn(N, HV, K, V),
    }  # fmt: skip


def tensors(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return every tensor of every stage: the reference's in float64, then rounded; G stays float64."""
    return {name: x if name == "G" else x.to(dtype) for name, x in exact_tensors(case).items()}


@cache
def exact_tensors(case: Case) -> dict[str, torch.Tensor]:
    known = leaves(case)
    for stage, (arguments, outputs, _) in STAGES.items():
        if stage != "chunk_gate_cumsum":
            known |= named(outputs, expected(stage, [known[x] for x in arguments.split()], case))
    return known


def expected(stage: str, arguments: list[torch.Tensor], case: Case) -> tuple[torch.Tensor, ...]:
    result = getattr(reference_stages, stage)(*(x.double() for x in arguments), cu_seqlens=offsets_of(case))
    return result if isinstance(result, tuple) else (result,)


def compute(
    stage: str, arguments: list[torch.Tensor], case: Case, backend: str, device: str
) -> tuple[torch.Tensor, ...]:
    """Return the results of a stage on the device, copied back."""
    offsets = offsets_of(case)
    arguments = [x.to(device) for x in arguments]
    offsets = None if offsets is None else offsets.to(device)
    result = getattr(gdn.stages, stage)(*arguments, cu_seqlens=offsets, backend=backend)
    return tuple(x.cpu() for x in (result if isinstance(result, tuple) else (result,)))


def named(names: str, values: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return dict(zip(names.split(), values, strict=True))


def random_gradients(stage: str, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return one gradient for each output of a stage."""
    rng = torch.Generator().manual_seed(1)
    known = exact_tensors(case)
    douts = [
        torch.randn(known[x].shape, generator=rng, dtype=torch.float64) for x in STAGES[stage][1].split()
    ]
    return [x if STAGES[stage][1] == "G" else x.to(dtype) for x in douts]


def adjoint_arguments(stage: str, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    known = tensors(case, dtype)
    return [known[x] for x in STAGES[stage][2].split()] + random_gradients(stage, case, dtype)


def expected_gradients(stage: str, case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the gradients by autograd of the reference."""
    arguments, known = STAGES[stage][0].split(), tensors(case, dtype)
    inputs = [known[x].double().clone().requires_grad_() for x in arguments]
    douts = [x.double() for x in random_gradients(stage, case, dtype)]
    values = differentiate(expected(stage, inputs, case), inputs, douts)
    return {f"d{name}": x for name, x in zip(arguments, values, strict=True)}


def differentiate(results, inputs, douts) -> tuple[torch.Tensor, ...]:
    """Return autograd's gradients, with zeros where nothing depends on an input."""
    used = [(y, dy) for y, dy in zip(results, douts, strict=True) if y.requires_grad]
    if not used:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad([y for y, _ in used], inputs, [dy for _, dy in used], materialize_grads=True)


def agrees(x: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    """Assert a relative RMS error within tolerance, plus 1e-6 per element where the result is zero."""
    x = x.double()
    floor = 1e-6 * wanted.numel() ** 0.5
    return x.shape == wanted.shape and bool(
        (x - wanted).norm() <= tolerance * max(wanted.norm().item(), floor)
    )


@each_case
def test_reference_stages_agree_with_the_recurrence(case):
    x = {n: t.requires_grad_() for n, t in leaves(case).items() if n not in ("a", "A_log", "dt_bias")}
    cu_seqlens, state = offsets_of(case), x["initial_state"]
    args = [x[n] for n in ("q", "k", "v", "g", "beta")]
    recurrence = reference.gated_delta_rule(*args, initial_state=state, cu_seqlens=cu_seqlens)
    mine = reference_stages.rule_by_stages(*args, initial_state=state, cu_seqlens=cu_seqlens)
    douts = [torch.randn(y.shape, dtype=torch.float64) for y in recurrence]
    wanted, got = ((*y, *differentiate(y, list(x.values()), douts)) for y in (recurrence, mine))
    assert all(agrees(a, b, 1e-10) for a, b in zip(got, wanted, strict=True))
    dropped = reference_stages.rule_by_stages(*args, cu_seqlens=cu_seqlens)
    assert not agrees(dropped[0], recurrence[0], 1e-10) or recurrence[0].count_nonzero() == 0


def skip_unless_supported(backend, dtype):
    if dtype == torch.float64 and FINEST[backend] != dtype:
        pytest.skip("fp64 is eager's")


@each_dtype
@each_case
@each_stage
def test_forward(backend, device, stage, case, dtype):
    skip_unless_supported(backend, dtype)
    arguments, outputs, _ = STAGES[stage]
    known = tensors(case, dtype)
    taken = [known[x] for x in arguments.split()]
    wanted = named(outputs, expected(stage, taken, case))
    got = named(outputs, compute(stage, taken, case, backend, device))
    for name in wanted:
        assert got[name].dtype == (torch.float64 if name == "G" else dtype)
        assert agrees(got[name], wanted[name], TOLERANCE[dtype]), name


@each_dtype
@each_case
@each_stage
def test_adjoint(backend, device, stage, case, dtype):
    skip_unless_supported(backend, dtype)
    taken = adjoint_arguments(stage, case, dtype)
    got = compute(f"{stage}_bwd", taken, case, backend, device)
    wanted = expected_gradients(stage, case, dtype)
    for name, x, argument in zip(wanted, got, taken[: len(wanted)], strict=True):
        assert x.dtype == argument.dtype
        assert agrees(x, wanted[name], TOLERANCE[dtype]), name


@each_stage
def test_wrong_answers_are_seen(stage):
    """The comparison finds zeros, swapped heads, a dropped chunk and a small error in every result."""
    case = CASES["packed"]
    arguments, outputs, _ = STAGES[stage]
    known = exact_tensors(case)
    wanted = expected_gradients(stage, case, torch.float64)
    wanted |= named(outputs, expected(stage, [known[x] for x in arguments.split()], case))
    for name, x in wanted.items():
        axes = AXES[name if name in AXES else name[1:]].split()
        heads = axes.index("HV") if "HV" in axes else axes.index("H")
        dropped = x.clone()
        if "T" in axes:
            dropped[:, 129:193] = 0
        else:
            dropped[..., -1] = 0
        for wrong in (torch.zeros_like(x), x.flip(heads), dropped, x * (1 + 2e-5)):
            assert not agrees(wrong, x, TOLERANCE[torch.float32]), name


@pytest.mark.interpret
def test_inverse(backend, device):
    """The inverse agrees with PyTorch's, for every structure of keys, and reads only the triangle."""
    dtype = FINEST[backend]
    for name in ("130 tokens", "identical keys", "negative eigenvalues"):
        A = tensors(CASES[name], dtype)["A"]
        tile = A[:, :C].transpose(1, 2).double()
        wanted = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + tile)
        found = gdn.stages.solve_tril(A.to(device), backend=backend).cpu()[:, :C]
        assert agrees(found.transpose(1, 2), wanted, TOLERANCE[dtype])
        row = torch.arange(A.shape[1]) % C
        above = A.masked_fill((torch.arange(C) >= row[:, None])[None, :, None], torch.nan)
        assert torch.equal(gdn.stages.solve_tril(above.to(device), backend=backend).cpu()[:, :C], found)


@pytest.mark.interpret
def test_inverse_where_powers_overflow(backend, device):
    """With identical keys and beta = 2 powers of A reach 1e20; the inverse, at most 2, is exact."""
    A = torch.full((C, C), 2.0, dtype=FINEST[backend]).tril(-1)
    wanted = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + A.double())
    found = gdn.stages.solve_tril(A[None, :, None].to(device), backend=backend).cpu()[0, :, 0]
    assert wanted.abs().max() < 2.001 and A.double().matrix_power(20).abs().max() > 1e20
    assert torch.equal(found.double(), wanted.round())


@pytest.mark.interpret
def test_reset_leaves_the_resolution(backend, device):
    """-1e6 or -inf on one token changes no difference of G; a plain fp32 sum would lose digits."""
    g = -torch.rand(1, C, 1, device=device)
    marked = g.clone()
    marked[:, 10], marked[:, 30] = -1e6, -torch.inf
    G, M = (gdn.stages.chunk_cumsum(x, backend=backend) for x in (g, marked))
    for span in (slice(0, 10), slice(11, 30), slice(31, C)):
        assert torch.allclose(G[:, span].diff(dim=1), M[:, span].diff(dim=1), rtol=0, atol=1e-11)
    plain = marked.cpu().clamp(min=-1e6).cumsum(1)
    assert not torch.allclose(
        G.cpu()[:, 31:].diff(dim=1), plain[:, 31:].double().diff(dim=1), rtol=0, atol=1e-3
    )
    dg = gdn.stages.chunk_cumsum_bwd(marked, torch.randn_like(G), backend=backend)
    assert bool(torch.isfinite(dg).all()) and bool((dg[:, [10, 30]] == 0).all())


@pytest.mark.interpret
def test_no_decay(backend, device):
    a, A_log = torch.randn(1, 70, 2, device=device), torch.tensor([-torch.inf, 0.0], device=device)
    G = gdn.stages.chunk_gate_cumsum(a, A_log, backend=backend)
    assert bool((G[..., 0] == 0).all()) and bool((G[:, 1:64, 1] < G[:, :63, 1]).all())
    dG = torch.randn_like(G)
    da, dA_log, ddt_bias = gdn.stages.chunk_gate_cumsum_bwd(a, A_log, None, dG, backend=backend)
    assert ddt_bias is None and bool((da[..., 0] == 0).all()) and bool(torch.isfinite(dA_log).all())


@pytest.mark.interpret
@each_stage
def test_a_nan_stays_in_its_sequence_and_head(backend, device, stage):
    case, dtype = CASES["packed"], FINEST[backend]
    known = tensors(case, dtype)
    forward = [known[x] for x in STAGES[stage][0].split()]
    for name, taken in ((stage, forward), (f"{stage}_bwd", adjoint_arguments(stage, case, dtype))):
        clean = compute(name, taken, case, backend, device)
        poisoned = [x.clone() for x in taken]
        for x in poisoned:
            if x.dim() > 1 and x.shape[1] == case.T:
                # the tokens of sequence 4, last head
                x[0, 64:129, -1] = torch.nan
        for x, y in zip(compute(name, poisoned, case, backend, device), clean, strict=True):
            if y.dim() > 1 and y.shape[1] == case.T:
                per_head = x.shape[2] // case.H if x.shape[2] == case.HV else 1
                others = slice(None, -per_head)
                assert torch.equal(x[:, :64], y[:, :64]) and torch.equal(x[:, 129:], y[:, 129:])
                assert torch.equal(x[:, :, others], y[:, :, others])
            elif y.dim() == 4:
                assert torch.equal(x[:, :2], y[:, :2])


@pytest.mark.interpret
@each_stage
def test_tokens_of_no_sequence_are_not_read(backend, device, stage):
    """NaN past cu_seqlens[-1] changes no bit; the results of these tokens and surplus states are zero."""
    case, dtype = CASES["packed"], FINEST[backend]
    end, known = case.offsets[-1], tensors(case, dtype)
    forward = [known[x] for x in STAGES[stage][0].split()]
    for name, taken in ((stage, forward), (f"{stage}_bwd", adjoint_arguments(stage, case, dtype))):
        clean = compute(name, taken, case, backend, device)
        poisoned = [x.clone() for x in taken]
        for x in poisoned:
            if x.dim() > 1 and x.shape[1] == case.T:
                x[:, end:] = torch.nan
        for x, y in zip(compute(name, poisoned, case, backend, device), clean, strict=True):
            assert torch.equal(x, y)
            if y.dim() > 1 and y.shape[1] == case.T:
                assert y[:, :end].count_nonzero() > 0 and y[:, end:].count_nonzero() == 0
            if name == "chunk_state" and len(y) == len(known["S_in"]):
                assert y[:7].count_nonzero() > 0 and y[7:].count_nonzero() == 0


@each_stage
def test_reads_nothing_on_the_device(stage):
    """Sizes and dtypes alone choose the kernels: a meta tensor has no contents to read."""
    case = CASES["packed"]
    known = {n: x.to("meta") for n, x in tensors(case, torch.bfloat16).items()}
    taken = [known[x] for x in STAGES[stage][0].split()]
    scale = (0.5,) if stage == "chunk_output" else ()
    results = getattr(load("eager"), stage)(*taken, *scale, torch.tensor(case.offsets, device="meta"))
    for x in results if isinstance(results, tuple) else (results,):
        assert x.device.type == "meta"


@pytest.mark.interpret
def test_dtypes_and_strides(backend, device):
    """Narrow and strided inputs give fp32 results, o in q's dtype, and gradients in their tensors' dtypes."""
    case = CASES["packed"]
    known = {name: x.to(device) for name, x in tensors(case, torch.bfloat16).items()}
    strided = {
        n: x if n == "G" else torch.stack([x, x], dim=-2)[..., 0, :] for n, x in known.items() if x.dim() > 1
    }
    k, beta, G = strided["k"], strided["beta"], known["G"]
    options = {"cu_seqlens": offsets_of(case).to(device), "backend": backend}
    A = gdn.stages.chunk_kkt(k, beta, G, **options)
    assert A.dtype == torch.float32
    assert torch.equal(A, gdn.stages.chunk_kkt(known["k"], known["beta"], G, **options))
    assert [x.dtype for x in gdn.stages.chunk_kkt_bwd(k, beta, G, A, **options)] == [
        torch.bfloat16, torch.bfloat16, torch.float64,
    ]  # fmt: skip
    o = gdn.stages.chunk_output(*(known[x] for x in ("q", "k", "v_new")), G, known["S_in"], **options)
    assert o.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("K, V", [(128, 128), (256, 192), (60, 100)])
def test_sizes_of_models(dtype, K, V):
    """Every stage agrees in several blocks of columns, and repeats its bits."""
    case = Case(T=300, H=2, HV=4, K=K, V=V, offsets=(0, 130, 130, 131, 290))
    known = tensors(case, dtype)
    for stage, (arguments, outputs, _) in STAGES.items():
        taken = [known[x] for x in arguments.split()]
        wanted = named(outputs, expected(stage, taken, case))
        got = named(outputs, compute(stage, taken, case, "triton", "cuda"))
        again = named(outputs, compute(stage, taken, case, "triton", "cuda"))
        for name in wanted:
            limit = 1e-5 if dtype == torch.float32 else 5e-3
            assert agrees(got[name], wanted[name], limit), (stage, name)
            assert torch.equal(got[name], again[name])


@pytest.mark.parametrize(
    "error, words, change",
    [
        (TypeError, "k: expected a tensor, got int", {"k": 3}),
        (TypeError, "beta: expected a tensor of float16", {"beta": torch.zeros(1, 70, 4, dtype=torch.long)}),
        (TypeError, "backend: expected a name", {"backend": 3}),
        (TypeError, "unexpected keyword", {"chunk_size": 64}),
        (ValueError, r"beta: expected shape \[B=1, T=70, HV", {"beta": torch.zeros(1, 3, 4)}),
        (ValueError, r"G: expected shape .* HV=4\]", {"G": torch.zeros(1, 70, 3)}),
        (ValueError, "expected HV to be a multiple of H=3, got HV=4", {"k": torch.zeros(1, 70, 3, 8)}),
        (ValueError, "k: expected K >= 1", {"k": torch.zeros(1, 70, 2, 0)}),
        (ValueError, "G: expected dtype float64", {"G": torch.zeros(1, 70, 4).half()}),
        (ValueError, "beta: expected device cpu", {"beta": torch.zeros(1, 70, 4, device="meta")}),
        (ValueError, "backend: expected None or one of", {"backend": "cuda"}),
        (
            ValueError,
            "k: expected a tensor without gradient",
            {"k": torch.zeros(1, 70, 2, 8).requires_grad_()},
        ),
        (ValueError, "cu_seqlens: expected the last offset", {"cu_seqlens": torch.tensor([0, 71])}),
        (ValueError, r"cu_seqlens: expected shape \[N\+1\]", {"cu_seqlens": torch.tensor(3)}),
        (NotImplementedError, "hopper", {"backend": "hopper"}),
    ],
)
def test_the_door(error, words, change):
    good = {"k": torch.randn(1, 70, 2, 8), "beta": torch.rand(1, 70, 4), "G": torch.zeros(1, 70, 4).double()}
    with pytest.raises(error, match=words):
        gdn.stages.chunk_kkt(**{**good, **change})


def test_chunks_and_states_are_checked():
    with pytest.raises(ValueError, match=r"A: expected shape .*C=64\]"):
        gdn.stages.solve_tril(torch.zeros(1, 70, 4, 63))
    q, G = torch.zeros(1, 70, 2, 8), torch.zeros(1, 70, 2)
    with pytest.raises(ValueError, match=r"S_in: expected shape \[NC=2, HV=2"):
        gdn.stages.chunk_output(q, q, q, G, torch.zeros(1, 2, 8, 8))
    with pytest.raises(ValueError, match="g: expected B=1 with cu_seqlens"):
        gdn.stages.chunk_cumsum(G.expand(2, 70, 2), cu_seqlens=torch.tensor([0, 70]))
