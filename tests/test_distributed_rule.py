"""Compare the rule and the convolution on three ranks with the reference on all tokens. gloo, no GPU."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from kit.exchanges import GATES
from kit.sharded import LIMITS, TOKENS, Sharded, computed, errors, gathered, inputs, relative
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gdn
from gdn import reference
from gdn.backends.eager import propagate
from gdn.distributed import calls, check, exchange, halo, rule
from gdn.distributed.table import equal_runs
from gdn.integrations import fla, fla_cp
from gdn.ops import borders
from gdn.reference.layer import causal_conv1d as reference_conv
from gdn.testing.accuracy import error_limits

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")

ZIGZAG = [(0, 0, 17), (1, 17, 31), (2, 31, 45), (2, 45, 58), (1, 58, 74), (0, 74, 90)]
CASES = {
    "contiguous": Sharded({"num_tokens": 90}),
    "contiguous, chunks of 64 and more": Sharded({"num_tokens": 250}, T=250, B=1, H=3, HV=3, gate="none"),
    "headtail": Sharded({"order": "headtail", "num_tokens": 90}, options={**GATES, "allow_neg_eigval": True}),
    "unequal, packed": Sharded(
        {"runs": [(0, 0, 31), (1, 31, 84), (2, 84, 90)]}, offsets=(0, 20, 31, 50, 50, 85, 90),
        options={"state_v_first": True}, gate="reset",
    ),
    "packed without a crossing": Sharded({"num_tokens": 90}, offsets=(0, 30, 30, 60, 70, 90)),
    "zigzag, packed": Sharded({"runs": ZIGZAG}, offsets=(0, 0, 12, 40, 90, 90), options=GATES),
    "zigzag of two rows": Sharded(
        {"runs": ZIGZAG}, B=2, options={"state_v_first": True, "scale": 0.3}, gate="strong"
    ),
    "a decay per key channel, headtail": Sharded(
        {"order": "headtail", "num_tokens": 90}, offsets=(0, 20, 90), options={**GATES, "lower_bound": -5.0},
        has_channels=True,
    ),
    "a decay per key channel, two rows": Sharded(
        {"num_tokens": 90}, B=2, has_channels=True, gate="reset"
    ),
    "two rows": Sharded({"num_tokens": 90}, B=2, absent=("initial_state", "g")),
    "a run of two tokens": Sharded({"runs": [(0, 0, 50), (1, 50, 52), (2, 52, 90)]}, gate="slow"),
    "a rank without tokens": Sharded({"runs": [(0, 0, 44), (2, 44, 90)]}, offsets=(0, 70, 90)),
    "a rank without tokens, two rows": Sharded({"runs": [(2, 0, 44), (0, 44, 90)]}, B=2, absent=("beta",)),
    "fewer heads than ranks": Sharded({"num_tokens": 90}, H=1, HV=2, offsets=(0, 8, 90)),
    "drawn": Sharded(
        {"runs": [(1, 0, 5), (0, 5, 9), (1, 9, 40), (2, 40, 41), (0, 41, 66), (2, 66, 90)]},
        offsets=(0, 3, 41, 66, 80, 90),
    ),
}  # fmt: skip


def context_of(p: Sharded, name: str) -> Any:
    return gdn.ContextParallel(dist.group.WORLD, exchange=name, **p.context)


def compare(rank: int, p: Sharded) -> dict[str, float]:
    """Return the errors of every exchange and dtype."""
    found = {}
    for dtype in (torch.float64, torch.float32):
        for name in ("gather", "owner", "heads")[: 3 if p.H >= 3 else 2]:
            case = replace(p, dtype=dtype)
            for output, error in errors(case, context_of(p, name)).items():
                if not error <= LIMITS[dtype]:
                    found[f"{name} {dtype} {output}"] = error
    return found


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_the_reference_recurrence(ranks, name):
    found, *_ = ranks.run(compare, CASES[name])
    assert not found


def compare_narrow(rank: int, p: Sharded) -> dict[str, float]:
    """Return the errors of a case in 16 bits that are above their limits."""
    limits = error_limits(p.dtype, "random")
    limits["dinitial_state"] = limits["dh0"]
    return {name: error for name, error in errors(p, context_of(p, "owner")).items() if error > limits[name]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["unequal, packed", "a decay per key channel, two rows"])
def test_ranks_compute_in_16_bits(ranks, name, dtype):
    assert not any(ranks.run(compare_narrow, replace(CASES[name], dtype=dtype)))


# of two ranks with one run each, no run passes a state on: N travels alone, and a rank takes it as it is
TWO = (
    Sharded({"num_tokens": 90}, options={"state_v_first": True}),
    Sharded({"runs": [(1, 0, 50), (0, 50, 90)]}, B=2),
    Sharded({"num_tokens": 90}, offsets=(0, 20, 70, 90), absent=("initial_state",)),
)


def compare_two(rank: int) -> dict[str, float]:
    """Return the errors of two ranks in fp64, and whether the bits of both exchanges differ."""
    group = dist.new_group([0, 1], use_local_synchronization=True)
    found = {}
    for i, case in enumerate(TWO):
        contexts = [gdn.ContextParallel(group, exchange=name, **case.context) for name in ("gather", "owner")]
        for context in contexts:
            found |= {f"{i} {context.exchange} {n}": x for n, x in errors(case, context).items()}
        results = [computed(case, context).values() for context in contexts]
        found[f"{i} bits"] = float(not all(map(torch.equal, *results)))
    return found


def test_two_ranks_compute_the_reference_recurrence(ranks):
    for is_done, found in ranks.outcomes(compare_two, only=[0, 1]):
        assert is_done and max(found.values()) <= LIMITS[torch.float64], found


def worst(rank: int, p: Sharded, name: str, wrong: str | None) -> float:
    """Return the largest error of a case, with a part of the program made wrong."""
    with ExitStack() as stack:
        if wrong is not None:
            stack.enter_context(WRONG[wrong]())
        found = errors(p, context_of(p, name))
    return max(found.values(), default=0.0)


def drop_map() -> Any:
    """Return a patch that makes M zero in forward and backward."""
    return mock.patch.object(propagate, "multiply", lambda M, S: torch.zeros_like(S))


def swap_runs() -> Any:
    """Return a patch that exchanges the last two runs."""
    right = exchange.slots_of_runs
    return mock.patch.object(
        exchange, "slots_of_runs", lambda plan: [*right(plan)[:-2], *right(plan)[:-3:-1]]
    )


def forget_state_gradient() -> Any:
    """Return a patch that computes gradients without those of the returned states."""
    right = borders.backward_begin
    return mock.patch.object(
        borders, "backward_begin", lambda p, kept, do, dS, rows: right(p, kept, do, None, rows)
    )


def forget_entering() -> Any:
    """Return a patch that starts every run from the caller's states or zeros."""

    def rows(problem: Any, plan: Any, states: torch.Tensor) -> torch.Tensor:
        return right(problem, plan, torch.zeros_like(states))

    right = rule.entering_rows
    return mock.patch.object(rule, "entering_rows", rows)


def forget_leaving() -> Any:
    """Return a patch that loses the gradients from later runs."""
    right = rule.add_rows
    return mock.patch.object(rule, "add_rows", lambda p, plan, dS, d: right(p, plan, dS, torch.zeros_like(d)))


WRONG = {
    "a dropped M": drop_map,
    "swapped runs": swap_runs,
    "a lost state": forget_entering,
    "a lost gradient": forget_leaving,
    "a lost gradient of a state": forget_state_gradient,
}


@pytest.mark.parametrize("name", ["gather", "owner"])
def test_wrong_answers_fail(ranks, name):
    """Make each part wrong once: the comparison of the other tests sees it."""
    case = CASES["headtail"]
    assert max(ranks.run(worst, case, name, None)) <= LIMITS[torch.float64]
    for wrong in WRONG:
        assert max(ranks.run(worst, case, name, wrong)) > 1e-3, wrong


@dataclass
class FLAContext:
    """Be FLA's context: the offsets of this rank, and how many ranks have the ends of its sequences."""

    group: Any
    cu_seqlens: torch.Tensor
    is_first_rank: bool
    pre_num_ranks: int = 0
    post_num_ranks: int = 0
    layout: str = "contiguous"


def take_fla(rank: int) -> None:
    """Compare a call with FLA's context with one of the reference on all tokens."""
    p = Sharded(offsets=(0, 20, 70, 90), absent=("initial_state",))
    local = [[0, 20, 30], [0, 30], [0, 10, 30]][rank]
    context = gdn.ContextParallel(dist.group.WORLD, num_tokens=90)
    given = FLAContext(dist.group.WORLD, torch.tensor(local, dtype=torch.int32), rank == 0)
    x, do, _ = inputs(p)
    for _ in range(2):
        leaves = {n: context.shard(t, 1).clone().requires_grad_() for n, t in x.items()}
        o, _ = fla.chunk_gated_delta_rule(**leaves, cu_seqlens=given.cu_seqlens, cp_context=given)
        o.backward(context.shard(do, 1))
        whole = {n: t.clone().requires_grad_() for n, t in x.items()}
        want, _ = reference.gated_delta_rule(**whole, cu_seqlens=p.cu_seqlens)
        want.backward(do)
        assert relative(context.unshard(o.detach(), 1), want.detach()) <= 1e-10
        for n, t in leaves.items():
            assert relative(context.unshard(t.grad, 1), whole[n].grad) <= 1e-10, n
    with pytest.raises(NotImplementedError, match="cp_context: expected layout='contiguous', got 'zigzag'"):
        fla.chunk_gated_delta_rule(**leaves, cp_context=replace(given, layout="zigzag"))
    alone = replace(given, group=None)
    o, _ = fla.chunk_gated_delta_rule(**leaves, cp_context=alone)
    want, _ = gdn.chunk_gated_delta_rule(**leaves, cu_seqlens=given.cu_seqlens)
    assert torch.equal(o, want)
    del given, alone
    assert not fla_cp._known


def test_the_context_of_fla_is_taken(ranks):
    ranks.run(take_fla)


def repeat(rank: int, p: Sharded) -> None:
    """Compare the bits of repeated calls, and of the two exchanges of states."""
    first = computed(p, context_of(p, "gather"))
    for name in ("gather", "owner", "owner", "gather"):
        for output, x in computed(p, context_of(p, name)).items():
            assert torch.equal(x, first[output]), (name, output)


@pytest.mark.parametrize("name", ["headtail", "unequal, packed"])
def test_bits_are_equal(ranks, name):
    ranks.run(repeat, replace(CASES[name], dtype=torch.float32, K=64, V=64))


REPEATED = {
    "two rows": replace(CASES["zigzag of two rows"], dtype=torch.float32),
    "gates": replace(CASES["headtail"], dtype=torch.float32),
}


def checks(rank: int, p: Sharded, most: int) -> tuple[list[int], list[int]]:
    """Return how many calls are checked and compared of each of several kinds, which repeat one another.

    most: the number of calls that a context remembers
    """
    numbers: list[list[int]] = [[], []]
    context, other = (gdn.ContextParallel(dist.group.WORLD, check=c, **p.context) for c in ("plan", "call"))
    turned = replace(p, options={**p.options, "state_v_first": not p.options.get("state_v_first", False)})
    with mock.patch.object(check, "NUM_COMPARED", most):
        for case, given, has_grad in [
            *[(p, context, True)] * 4, *[(p, context, False)] * 4, *[(turned, context, True)] * 3,
            (p, context, True), (p, other, True), (p, other, True),
        ]:  # fmt: skip
            spies = (
                mock.patch.object(calls, "check_rule", side_effect=calls.check_rule),
                mock.patch.object(check, "start_agreement", side_effect=check.start_agreement),
            )
            with spies[0] as checked, spies[1] as compared:
                if has_grad:
                    got = computed(case, given)
                else:
                    with torch.no_grad():
                        got = forward_of(case, given)
            numbers[0].append(checked.call_count)
            numbers[1].append(compared.call_count)
            # a context that remembers nothing gives the same bits
            for name, x in computed(case, context_of(case, "gather")).items():
                if has_grad or name in got:
                    assert torch.equal(x, got[name]), name
    return numbers[0], numbers[1]


def forward_of(p: Sharded, context: Any) -> dict[str, torch.Tensor]:
    """Return the outputs of a call on the tokens of this rank that records nothing."""
    x, *_ = inputs(p)
    local = {n: context.shard(t, 1) if n in TOKENS else t for n, t in x.items()}
    local["initial_state"] = context.shard_states(x["initial_state"], p.cu_seqlens)
    o, S = gdn.chunk_gated_delta_rule(**local, **p.options, cp_context=context, output_final_state=True)
    return {"o": o, "final_state": S}


@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_call_is_checked_no_more(ranks, name):
    first = [1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    compared = [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 1]
    assert ranks.run(checks, REPEATED[name], 256) == [(first, compared)] * 3
    # what is forgotten is compared again, by all ranks
    first[-3], compared[-3] = 1, 1
    assert ranks.run(checks, REPEATED[name], 1) == [(first, compared)] * 3


def alone(rank: int) -> None:
    """Compare the bits of one rank, and of `heads`, with those of no context."""
    for p in (Sharded(), Sharded(B=2), Sharded(offsets=(0, 20, 20, 77, 90))):
        p = replace(p, dtype=torch.float32, options={"batch_invariant": True})
        x, do, dS = inputs(p)

        def run(context: Any, p: Sharded = p, x: Any = x, do: Any = do, dS: Any = dS) -> list[torch.Tensor]:
            leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
            outputs = gdn.chunk_gated_delta_rule(
                **leaves, **p.options, cu_seqlens=p.cu_seqlens, cp_context=context, output_final_state=True
            )
            torch.autograd.backward(outputs, [do, dS])
            return [*(t.detach() for t in outputs), *(t.grad for t in leaves.values())]

        mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "cp"))
        want = run(None)
        for got, other in zip(run(gdn.ContextParallel(mesh["cp"])), want, strict=True):
            assert torch.equal(got, other)
        context = gdn.ContextParallel(dist.group.WORLD, exchange="heads", num_tokens=p.T)
        whole = gathered(p, context, computed(p, context))
        assert torch.equal(whole["o"], want[0]) and torch.equal(whole["final_state"], want[1])


def test_one_rank_and_heads_have_the_bits_of_one_process(ranks):
    ranks.run(alone)


def narrow(rank: int) -> None:
    """Compare a call under autocast with a call on rounded tensors: states stay in fp32."""
    p = Sharded({"num_tokens": 90}, dtype=torch.float32)
    x, _, _ = inputs(p)
    for name in ("gather", "owner"):
        context = context_of(p, name)
        q, k, v, g, beta = (context.shard(x[n], 1) for n in ("q", "k", "v", "g", "beta"))
        options = {"cp_context": context, "output_final_state": True}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o, S = gdn.chunk_gated_delta_rule(q, k, v, g, beta, **options)
        q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
        want, state = gdn.chunk_gated_delta_rule(q, k, v, g, beta, **options)
        assert o.dtype == torch.bfloat16 and S.dtype == torch.float32
        assert torch.equal(o, want) and torch.equal(S, state)


def test_autocast_does_not_round_states(ranks):
    ranks.run(narrow)


def differ(rank: int) -> None:
    """Infer, then train: tensors that a plan keeps are not those of inference mode. Also K + V above 256."""
    p = Sharded({"order": "headtail", "num_tokens": 90}, H=1, HV=2, K=144, V=120, dtype=torch.float32)
    x, _, _ = inputs(p)
    context = context_of(p, "owner")
    with torch.inference_mode():
        gdn.causal_conv1d(context.shard(x["v"].flatten(2), 1), torch.ones(240, 4), cp_context=context)
    mine = context.shard(x["v"].flatten(2), 1).requires_grad_()
    gdn.causal_conv1d(mine, torch.ones(240, 4), cp_context=context)[0].sum().backward()
    found = errors(p, context)
    assert max(found.values(), default=0) <= 1e-5, found


def test_inference_then_training_and_many_columns(ranks):
    ranks.run(differ)


def poison(rank: int, name: str, tensor: str) -> None:
    """Compare a call with NaN in one sequence, which crosses two borders, with the call without."""
    offsets = (0, 25, 65, 90)
    p = Sharded({"num_tokens": 90}, offsets=offsets, options=GATES)
    context = context_of(p, name)
    clean = gathered(p, context, computed(p, context))

    def spoiled(_: Sharded) -> Any:
        x, do, dS = inputs(p)
        if tensor == "initial_state":
            x[tensor][1] = torch.nan
        else:
            x[tensor][:, 40] = torch.nan
        return x, do, dS

    with mock.patch("kit.sharded.inputs", spoiled):
        found = computed(p, context)
    # `gathered` moves tokens and rows; sums over ranks would spread the NaN
    found = {n: x for n, x in found.items() if n not in ("dA_log", "ddt_bias", "dinitial_state")}
    for output, x in gathered(p, context, found).items():
        for n in (0, 2):
            if output == "final_state":
                got, want = x[n], clean[output][n]
            else:
                part = slice(offsets[n], offsets[n + 1])
                got, want = x[:, part], clean[output][:, part]
            assert relative(got, want) <= 1e-12, (output, n)
        if output == "o":
            assert x[:, 41:65].isnan().any(), "the NaN was not read"


@pytest.mark.parametrize("name", ["gather", "owner", "heads"])
def test_nan_stays_in_its_sequence(ranks, name):
    for tensor in ("v", "k", "g", "initial_state"):
        ranks.run(poison, name, tensor)


def log_order(rank: int) -> list[str]:
    """Return in which order a first call computes, compares and sends."""
    order: list[str] = []

    def logged(where: Any, name: str) -> Any:
        right = getattr(where, name)

        def run(*args: Any) -> Any:
            order.append(name)
            return right(*args)

        return mock.patch.object(where, name, run)

    p = Sharded({"num_tokens": 90})
    with logged(rule, "begin"), logged(check, "_compare"), logged(exchange.Gather, "start_states"):
        computed(p, replace(context_of(p, "gather"), check="call"))
    return order


def test_ranks_compare_a_call_while_they_compute_and_before_they_send(ranks):
    for order in ranks.run(log_order):
        assert order == ["begin", "_compare", "start_states"]


def use_little(rank: int, name: str) -> None:
    """Take gradients that need one output, or nothing, on some ranks; no rank may wait for another."""
    p = replace(CASES["headtail"], dtype=torch.float32)
    context = context_of(p, name)
    x, _, _ = inputs(p)
    x = {n: context.shard(t, 1) if t.dim() > 2 and n != "initial_state" else t for n, t in x.items()}
    x["initial_state"] = context.shard_states(x["initial_state"])

    def run(**options: Any) -> tuple[dict[str, torch.Tensor], Any]:
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        options = {"output_final_state": True, "cp_context": context, **p.options, **options}
        return leaves, gdn.chunk_gated_delta_rule(**leaves, **options)

    leaves, (o, S) = run()
    (S.sum() if rank == 0 else o.sum() if rank == 1 else 0 * o.sum()).backward()
    assert leaves["v"].grad.any() or rank == 2
    leaves, (o, S) = run(output_final_state=False)
    assert S is None
    o.sum().backward()
    leaves, (o, S) = run()
    (dv,) = torch.autograd.grad(o.sum(), [leaves["v"]])
    assert dv.shape == leaves["v"].shape
    with torch.no_grad():
        gdn.chunk_gated_delta_rule(**x, **p.options, cp_context=context)
    dist.barrier()


@pytest.mark.parametrize("name", ["gather", "owner", "heads"])
def test_no_rank_waits_where_little_is_needed(ranks, name):
    ranks.run(use_little, name)


def convolve(rank: int, p: Sharded, W: int, with_initial: bool, wrong: bool = False) -> float:
    """Return the largest error of the convolution on the tokens of this rank, on rank 0 for all ranks."""
    D = 5
    generator = torch.Generator().manual_seed(1)
    sizes = {"x": (p.B, p.T, D), "weight": (D, W), "bias": (D,), "initial": (p.N, D, W - 1)}
    sizes |= {"dy": (p.B, p.T, D), "dfinal": (p.N, D, W - 1)}
    x, weight, bias, initial, dy, dfinal = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes.values()
    )
    context = gdn.ContextParallel(dist.group.WORLD, **p.context)
    pieces = context.pieces(p.cu_seqlens, batch=p.B)
    leaves = [t.clone().requires_grad_() for t in (context.shard(x, 1), weight, bias)]
    state = None
    if with_initial:
        state = context.shard_states(initial, p.cu_seqlens).clone()
        state[[i for i, piece in enumerate(pieces) if not piece.is_first]] = torch.nan
        state.requires_grad_()
    options = {"activation": "silu", "output_final_state": True, "cu_seqlens": p.cu_seqlens}
    lost = mock.patch.object(
        halo, "start_swap", lambda x, receive, *_: lambda: x.new_zeros(sum(receive), D) + 0 * x.sum()
    )
    with lost if wrong else ExitStack():
        y, final = gdn.causal_conv1d(*leaves, initial_state=state, cp_context=context, **options)
    local = context.shard_states(dfinal, p.cu_seqlens).clone()
    local[[i for i, piece in enumerate(pieces) if not piece.is_last]] = 0
    torch.autograd.backward([y, final], [context.shard(dy, 1), local])
    got = [context.unshard(y.detach(), 1), context.unshard(leaves[0].grad, 1)]
    got.append(context.gather_states(final.detach(), p.cu_seqlens, batch=p.B))
    for parameter in leaves[1:]:
        dist.all_reduce(parameter.grad)
        got.append(parameter.grad)
    if state is not None:
        rows = torch.zeros_like(initial)
        for row, piece in enumerate(pieces):
            if piece.is_first:
                rows[piece.sequence] = state.grad[row]
        dist.all_reduce(rows)
        got.append(rows)
    if rank != 0:
        return 0.0
    whole = [t.clone().requires_grad_() for t in (x, weight, bias, initial)]
    y, final = reference_conv(
        *whole[:3],
        activation="silu",
        initial_state=whole[3] if with_initial else None,
        cu_seqlens=p.cu_seqlens,
    )
    torch.autograd.backward([y, final], [dy, dfinal])
    want = [y.detach(), whole[0].grad, final.detach(), whole[1].grad, whole[2].grad]
    want += [whole[3].grad] if with_initial else []
    return max(relative(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("with_initial", [False, True])
def test_ranks_convolve_as_one_process(ranks, with_initial):
    for name, case in CASES.items():
        for W in (4, 1) if name == "headtail" else (4,):
            assert max(ranks.run(convolve, case, W, with_initial)) <= 1e-12, (name, W)
    assert max(ranks.run(convolve, CASES["contiguous"], 4, with_initial, True)) > 1e-3, "a lost halo"


def move(rank: int) -> None:
    """Shard, unshard, convert, and gather states, with gradients."""
    one = gdn.ContextParallel(dist.group.WORLD, num_tokens=40)
    other = gdn.ContextParallel(dist.group.WORLD, order="headtail", num_tokens=40)
    x = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = one.shard(x, 1).requires_grad_()
    whole = one.unshard(mine, dim=1)
    assert torch.equal(whole, x)
    (whole * (rank + 1)).sum().backward()
    assert torch.equal(mine.grad, torch.full_like(mine, 6))
    mine.grad = None
    there = one.convert(mine, 1, to=other)
    assert torch.equal(there, other.shard(x, 1))
    (there * other.shard(x, 1)).sum().backward()
    assert torch.equal(mine.grad, one.shard(x, 1))
    assert torch.equal(other.convert(there, -2, to=one), mine)
    states = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    cu_seqlens = torch.tensor([0, 5, 5, 30, 40])
    rows = one.shard_states(states, cu_seqlens).requires_grad_()
    back = one.gather_states(rows, cu_seqlens)
    assert torch.equal(back, states)
    (back * (rank + 1)).sum().backward()
    final = one.final_rows(cu_seqlens)
    assert bool((rows.grad[final] == 6).all()) and rows.grad.sum() == 12 * len(final)
    assert equal_runs("headtail", 40, 3).num_local[rank] == there.shape[1]


def test_tokens_and_states_move_between_ranks(ranks):
    ranks.run(move)
