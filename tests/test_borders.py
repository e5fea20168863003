"""Compare what a rank exchanges, and what follows, with the reference recurrence: each backend, no ranks."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import INTERPRETED

from gdn import reference
from gdn.backends import Borders, load
from gdn.problem import Problem, parse

# offsets, V first, rows that enter, rows that leave
CASES = {
    "one row": (None, False, (0,), (0,)),
    "two rows of a batch": (None, True, (0, 1), (0,)),
    "packed, V first": ((0, 70, 200), True, (0, 1), (0, 1)),
    "one enters, one leaves": ((0, 70, 200), False, (0,), (1,)),
    "nothing enters": ((0, 70, 200), True, (), (1,)),
    "nothing leaves": ((0, 70, 200), True, (1,), ()),
}
GATES = {
    "use_gate_in_kernel": True, "lower_bound": -5.0, "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}  # fmt: skip


def problem_of(
    offsets: tuple[int, ...] | None,
    is_v_first: bool,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    channels: tuple[int, ...] = (),
    device: str = "cpu",
) -> Problem:
    B, K = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    q, k, v = (draw(B, 200, heads, K).to(dtype) for heads in (1, 1, 2))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    g, beta = torch.nn.functional.logsigmoid(draw(B, 200, 2, *channels)) / 16, draw(B, 200, 2).sigmoid()
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    return parse(
        q, k, v, g.to(wide), beta.to(wide), initial_state=draw(B if offsets is None else 2, 2, K, K).to(wide),
        output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=is_v_first,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(device), cu_seqlens_cpu=cu_seqlens,
        backend=None if device == "cpu" else "triton",
    )  # fmt: skip


def law(p: Problem, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the reference recurrence on q, k, v, g, beta, initial_state."""
    *x, S = (t.double() for t in tensors)
    return reference.gated_delta_rule(
        *x, initial_state=S, cu_seqlens=p.cu_seqlens, use_qk_l2norm_in_kernel=True,
        state_v_first=p.state_v_first,
    )  # fmt: skip


def relative(x: torch.Tensor, want: torch.Tensor) -> float:
    return ((x.double() - want).norm() / want.norm()).item()


def compare(
    backend: str,
    case: str,
    dtype: torch.dtype,
    K: int,
    channels: tuple[int, ...] = (),
    device: str = "cpu",
) -> dict[str, float]:
    """Return the errors of N, M and C, and of the outputs and gradients that follow."""
    offsets, is_v_first, entering, leaving = CASES[case]
    B = 1 if offsets is not None else len({*entering, *leaving})
    p = problem_of(offsets, is_v_first, dtype, (B, K), channels, device)
    with_maps = not {*entering}.isdisjoint(leaving)
    borders = Borders(entering, leaving, with_maps)
    kernels = load(backend)
    S = p.initial_state
    assert S is not None
    # rows that enter may hold anything before the exchange
    rows_in, rows = (torch.tensor(x, dtype=torch.int64, device=device) for x in (entering, leaving))
    before = S.index_fill(0, rows_in, torch.nan)
    transfers, finish = kernels.forward_begin(replace(p, initial_state=before), borders, True)
    o, final, kept = finish(S)
    tensors = (p.q, p.k, p.v, p.g, p.beta, S)
    leaves = [t.double().clone().requires_grad_() for t in tensors]
    wanted = law(p, *leaves)
    found = {"o": relative(o, wanted[0].detach()), "S": relative(final, wanted[1].detach())}
    if leaving:
        assert transfers is not None and transfers.shape[:3] == (len(leaving), 2, K)
        assert transfers.shape[3] == 2 * K if with_maps else transfers.shape[3] >= K
        zero = S.index_fill(0, rows_in, 0)
        N = law(p, *tensors[:-1], zero)[1]
        found["N"] = relative(transfers[..., :K], (N.mT if is_v_first else N)[rows])
        # M times a state is where this state goes without values
        end = law(p, p.q, p.k, torch.zeros_like(p.v), p.g, p.beta, S)[1]
        start, end = (x.mT if is_v_first else x for x in (S.double(), end))
        for i, row in enumerate(leaving if with_maps else ()):
            M = transfers[i, ..., K:].double()
            if row in entering:
                found["M"] = relative(M @ start[row], end[row])
            else:
                assert not M.any()
    generator = torch.Generator().manual_seed(1)
    do, dS, d = (
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(device)
        for x in (wanted[0], *[wanted[1]] * 2)
    )
    do = do.to(dtype)
    after = dS.index_add(0, rows, d[rows])
    wide = S.dtype
    if backend != "hopper":
        # the forward of another backend may have kept more
        kept = (*kept, torch.empty(0))
    C, finish_backward = kernels.backward_begin(p, kept, do, dS.to(wide), borders)
    gradients = finish_backward(after.to(wide) if leaving else dS.to(wide))
    if entering:
        (dinitial,) = torch.autograd.grad(wanted, leaves[-1:], [do.double(), dS], retain_graph=True)
        dinitial = dinitial.mT if is_v_first else dinitial
        found["C"] = relative(C, dinitial[list(entering)])
    want = torch.autograd.grad(wanted, leaves, [do.double(), after])
    got = [x for x in gradients if x is not None]
    for name, x, y in zip(("q", "k", "v", "g", "beta", "initial_state"), got, want, strict=True):
        found[f"d{name}"] = relative(x, y)
    return found


@pytest.mark.parametrize("case", CASES)
def test_eager(case):
    for channels in ((), (12,)):
        found = compare("eager", case, torch.float64, 12, channels)
        assert max(found.values()) <= 1e-10, found


interpreted = pytest.mark.skipif(not INTERPRETED, reason="expected kernels to be interpreted")
thorough = pytest.mark.skipif("GDN_TEST_SEEDS" not in os.environ, reason="expected GDN_TEST_SEEDS")
# a case takes 3 to 9 s: the suite runs the one that has all, GDN_TEST_SEEDS=1 each
SOME_CASES = [
    pytest.param(case, marks=() if case == "packed, V first" else thorough, id=case) for case in CASES
]


@pytest.mark.interpret
@interpreted
@pytest.mark.parametrize("channels", [(), (16,)], ids=["decay per head", "decay per channel"])
@pytest.mark.parametrize("case", SOME_CASES)
def test_triton(case, channels):
    found = compare("triton", case, torch.float32, 16, channels)
    assert max(found.values()) <= 1e-5, found


def errors_of_ranks(rank: int) -> dict[str, float]:
    """Return the errors of a call with channels on three ranks whose kernels are interpreted."""
    from kit import interpreter
    from kit.sharded import Sharded, errors
    from torch import distributed as dist

    from gdn import ContextParallel

    interpreter.install()
    problem = Sharded(
        {"order": "headtail", "num_tokens": 90}, offsets=(0, 20, 90), H=1, HV=2, K=16, V=16,
        dtype=torch.float32, options=GATES, has_channels=True,
    )  # fmt: skip
    with mock.patch.dict(os.environ, {"GDN_BACKEND": "triton"}):
        return errors(problem, ContextParallel(dist.group.WORLD, exchange="gather", **problem.context))


@pytest.mark.interpret
@interpreted
@thorough
def test_ranks_on_triton(ranks):
    found, *_ = ranks.run(errors_of_ranks, limit=120)
    assert max(found.values()) <= 1e-5, found


@pytest.mark.gpu
@pytest.mark.parametrize("K, case", [*((128, case) for case in CASES), (256, "packed, V first")])
def test_triton_on_a_gpu(K, case):
    """Both ranks of the gate, in bf16, on kernels that the call names."""
    for channels in ((), (K,)):
        found = compare("triton", case, torch.bfloat16, K, channels, "cuda")
        assert max(found.values()) <= 8e-3, found


@pytest.mark.interpret
@interpreted
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("K", [128, pytest.param(64, marks=thorough)])
@pytest.mark.parametrize("case", SOME_CASES)
def test_hopper(case, K, monkeypatch):
    from kit.hopper import Simulated, check_prepared

    from gdn.backends.hopper import borders
    from gdn.backends.hopper.backward import plan, segments

    for module in (borders, plan, segments):
        monkeypatch.setattr(module, "Launch", Simulated)
    # a segment of each chunk: the cost model cuts no sequence that is so short
    monkeypatch.setattr(borders, "rank_segments", lambda heads, chunks, *_: chunks)
    check_prepared(monkeypatch)
    found = compare("hopper", case, torch.bfloat16, K)
    assert max(found.values()) <= 5e-3, found
