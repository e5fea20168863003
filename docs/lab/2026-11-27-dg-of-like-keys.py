"""Emulate every rounding on the way to dg of both backwards in fp64, each behind a switch of its own.

    TRITON_INTERPRET=1 PYTHONPATH=src:tests python docs/lab/2026-11-27-dg-of-like-keys.py [alone] [simulate]

The saved G, A_inv and S_in are those of the interpreted forward of Triton; dg is compared with autograd
through the reference in fp64. A row: relative error of dg in 1e-3 of Hopper's and Triton's roundings, then
of Hopper's with some of them left out. `alone`: also with one of them alone. `simulate`: also the errors of
the kernels themselves, simulated and interpreted. No GPU is needed; a row takes seconds, a simulated one up
to a minute.
"""

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import test_hopper_training as training
import torch
from kit import interpreter
from kit.hopper import Simulated
from test_hopper_backward import expected_gradients
from torch import Tensor

from gdn.backends.hopper.backward import plan
from gdn.backends.triton.rule import run as chunked
from gdn.problem import CHUNK, parse
from gdn.testing import Case, inputs, rows

Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    return x


def bf16(x: Tensor) -> Tensor:
    return x.float().bfloat16().double()


def split(x: Tensor) -> Tensor:
    return bf16(x) + bf16(x - bf16(x))


def tf32(x: Tensor) -> Tensor:
    return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double()


# operand or stored tensor -> its rounding, at K = V = 64 and at 128; `scaled`: P, scaled do and scaled dv
# dS_in_scan    dS in k dS of the reverse scan            dS_through    dS in <S, dS>
# dv_new        dv_new in A_inv^T dv_new                  dS_leaving    dS in <v_new, k dS>
# A_inv, S      as operands                               u             u in v_new = A_inv u
# dv            dv (or dr) between the two kernels        v_new_E, _F   v_new in E and in F
HOPPER_64 = {
    "dS_in_scan": split, "dS_through": bf16, "dS_leaving": bf16, "dv_new": split, "A_inv": split, "S": split,
    "u": bf16, "dv": bf16, "v_new_E": split, "v_new_F": bf16, "scaled": split,
}  # fmt: skip
HOPPER_128 = HOPPER_64 | {"dv_new": bf16, "A_inv": exact, "S": exact}
TRITON_64 = dict.fromkeys(HOPPER_64, tf32) | {"dS_through": exact, "dv": bf16}
TRITON_128 = HOPPER_128 | {"dS_through": exact, "u": split}
WITHOUT = {
    "as it is": (),
    "F": ("v_new_F",),
    "<S, dS>": ("dS_through",),
    "dS": ("dS_through", "dS_leaving"),
    "dv": ("dv",),
    "u": ("u",),
    "F, dS": ("v_new_F", "dS_through", "dS_leaving"),
    "F, dS, dv": ("v_new_F", "dS_through", "dS_leaving", "dv"),
}


@dataclass
class Head:
    """Hold one value head of one row, in fp64: rows with their norms, and what the forward saved."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    G: Tensor
    beta: Tensor
    dS: Tensor
    S_in: Tensor
    A_inv: Tensor
    slope: Tensor  # dg of the argument for dg of the decay
    expected: Tensor


def backward(x: Head, scale: float, r: dict[str, Rounding], has_dr: bool) -> Tensor:
    """Return dg with the roundings `r`; has_dr: dr lies between the kernels, not dv."""
    dg, dS = torch.zeros_like(x.G), x.dS
    for c in reversed(range(0, len(x.G), CHUNK)):
        q, k, v, do, G, beta = (y[c : c + CHUNK] for y in (x.q, x.k, x.v, x.do, x.G, x.beta))
        S, A_inv = x.S_in[c // CHUNK], x.A_inv[c // CHUNK][: len(G), : len(G)]
        D = (G[:, None] - G[None, :]).clamp(max=0).exp().tril()
        into, out = G.exp(), (G[-1] - G).exp()
        P = r["scaled"](scale * D * (q @ k.T))
        # the reverse scan
        dv_new = out[:, None] * (k @ r["dS_in_scan"](dS)) + P.T @ do
        dr = dv_new + r["A_inv"](A_inv).T @ r["dv_new"](dv_new)
        scaled_do, scaled_dv = (scale * into)[:, None] * do, (beta * into)[:, None] * dr
        dS_next = G[-1].exp() * dS + q.T @ r["scaled"](scaled_do) - k.T @ r["scaled"](scaled_dv)
        dv = r["dv"](dr) * beta[:, None] if has_dr else r["dv"](dr * beta[:, None])
        # the gradient kernel
        kS, qS = k @ r["S"](S), q @ r["S"](S)
        u = beta[:, None] * (v - into[:, None] * kS)
        v_new = u + r["A_inv"](A_inv) @ r["u"](u)
        E = scale * D * (do @ r["v_new_E"](v_new).T)
        F = -D * (dv @ r["v_new_F"](v_new).T)
        H = (E * (q @ k.T) + F * (k @ k.T)).tril(-1)
        entering = scale * into * (do * qS).sum(1) - into * (dv * kS).sum(1)
        leaving = out * (v_new * (k @ r["dS_leaving"](dS))).sum(1) + H.sum(0) - H.sum(1)
        through = G[-1].exp() * (S * r["dS_through"](dS)).sum()
        dg[c : c + CHUNK] = through + entering.flip(0).cumsum(0).flip(0) + leaving.cumsum(0) - leaving
        dS = dS_next
    return dg * x.slope


def draw(forward: str, seed: int, number: int) -> tuple[Case, str]:
    """Return a drawn problem of the GPU test at K = V = 64, and which gradients of outputs it has."""
    source = random.Random(f"{forward} {seed}")
    kind = replace(training.draw_kind(source), sizes=(64, 64))
    for n in range(number + 1):
        case = training.draw_problem(source, kind)[0]
        while case.cost > 2**27 or training.is_contradiction(vars(case)):
            case = training.draw_problem(source, kind)[0]
        ends = source.choice(("both",) * 3 + ("do", "dfinal"))
        if n == number:
            return case, ends
    raise AssertionError


def problems() -> Iterator[tuple[str, Case, str, int]]:
    """Yield name, case, gradients of outputs and seed; the first two are those that failed on a GPU."""
    for forward, seed, number in (("triton", 3, 7), ("triton", 1, 7), ("hopper", 2, 5), ("hopper", 2, 2)):
        yield f"64 drawn {forward} {seed} {number}", *draw(forward, seed, number), number
    for D, lengths in ((64, rows(512)), (128, rows(256))):
        base = Case(sizes=(D, D), lengths=lengths, heads=(1, 2), state="wide")
        for gate, keys in (
            ("none", "random"), ("slow", "random"), ("mild", "random"), ("slow", "correlated"),
            ("mild", "correlated"), ("mild", "identical"),
        ):  # fmt: skip
            yield f"{D} {gate}, {keys}", replace(base, gate=gate, keys=keys), "both", 0


def heads(given, saved, do, dfinal, expected) -> Iterator[Head]:
    """Yield each value head of each row."""
    t, o = given.tensors, given.options
    B, T, H, K = t["q"].shape
    HV = t["v"].shape[2]
    q, k = t["q"].double(), t["k"].double()
    if saved.q_rstd is not None:
        q, k = q * saved.q_rstd[..., None], k * saved.k_rstd[..., None]
    beta = t["beta"].double() if "beta" in t else torch.ones(B, T, HV, dtype=torch.float64)
    if o.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid() * (2 if o.get("allow_neg_eigval") else 1)
    slope = torch.ones(B, T, HV, dtype=torch.float64)
    if "A_log" in t:
        x = t["g"].double() + (t["dt_bias"].double() if "dt_bias" in t else 0)
        slope = -t["A_log"].double().exp() * x.sigmoid()
    dS = torch.zeros(B, HV, K, K) if dfinal is None else dfinal.mT if o.get("state_v_first") else dfinal
    chunks = -(-T // CHUNK)
    S_in = saved.S_in.view(B, chunks, HV, K, K).double()
    A_inv = saved.A_inv.view(B, chunks, HV, CHUNK, CHUNK).double()
    do = torch.zeros_like(t["v"]) if do is None else do
    for b in range(B):
        for h in range(HV):
            j = h * H // HV
            yield Head(
                q[b, :, j], k[b, :, j], t["v"][b, :, h].double(), do[b, :, h].double(),
                saved.G.view(B, T, HV)[b, :, h], beta[b, :, h], dS[b, h].double(), S_in[b, :, h],
                A_inv[b, :, h], slope[b, :, h], expected[b, :, h],
            )  # fmt: skip


def main(options: list[str]) -> None:
    """Print a row for each problem."""
    interpreter.install()
    torch.set_num_threads(1)
    plan.Launch, plan.schedule_of = Simulated, lambda p: (1, None)
    print("| problem | Hopper | Triton |", " | ".join(f"without {n}" for n in list(WITHOUT)[1:]), "|")
    for name, case, ends, seed in problems():
        given = inputs(case, torch.bfloat16, seed=seed)
        do, dfinal = (
            None if ends == "dfinal" else given.do,
            None if ends == "do" else given.dfinal_state,
        )
        problem = parse(**given.tensors, **given.options, backend="triton")
        saved = chunked.chunk_forward(problem, True)[2]
        dg = expected_gradients(given, do, dfinal)[3]
        given = inputs(case, torch.bfloat16, seed=seed)
        all_heads = list(heads(given, saved, do, dfinal, dg.double()))
        few = problem.K == 64
        hopper, triton = (HOPPER_64, TRITON_64) if few else (HOPPER_128, TRITON_128)

        def error(r: dict[str, Rounding], has_dr: bool = False) -> float:
            square = sum(
                float((backward(x, problem.scale, r, has_dr) - x.expected).square().sum())  # noqa: B023
                for x in all_heads  # noqa: B023
            )
            return square**0.5 / float(dg.norm()) * 1e3  # noqa: B023

        columns = [error(hopper | dict.fromkeys(left_out, exact)) for left_out in WITHOUT.values()]
        columns.insert(1, error(triton, True))
        print(f"| {name} |", " | ".join(f"{x:.3g}" for x in columns), "|", flush=True)
        none = dict.fromkeys(hopper, exact)
        if "alone" in options:
            for label, r, has_dr in (("Hopper", hopper, False), ("Triton", triton, True)):
                each = {n: error(none | {n: f}, has_dr) for n, f in r.items()}
                print(f"  {label} alone:", ", ".join(f"{n} {x:.2g}" for n, x in each.items()), flush=True)
            print(f"  none of both: {error(none):.3g}", flush=True)
        if "simulate" in options:
            found = [f.chunk_backward(problem, saved, do, dfinal).dg for f in (plan, chunked)]
            errors = [float((x - dg).norm() / dg.norm()) * 1e3 for x in found]
            print("  kernels: Hopper {:.3g}, Triton {:.3g}".format(*errors), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
