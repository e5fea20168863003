"""Emulate the roundings of FlashKDA's forward in fp32 on the CPU, and print its errors beside the reference.

    PYTHONPATH=src:benchmarks python docs/lab/2026-11-27-flashkda-emulated.py

Chunks of 16 tokens. Each operand of an MMA is rounded to bf16; the inverse of I + A has fp16 operands. The
state is rounded to bf16 after each chunk. Each line leaves some of the roundings out.
"""

from dataclasses import replace

import torch

from gdn.testing import accuracy, inputs, packed
from gdn_bench.problems import catalog

BF16 = torch.bfloat16
LOG2E = 1.4426950408889634


def rule_with(exact=()):
    """Return FlashKDA's forward without the roundings named in exact: state, decays, others."""

    def to(x, kind, dtype=BF16):
        return x.float() if kind in exact else x.to(dtype).float()

    def normalise(x):
        x = x.float()
        return to(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6), "others")

    def chunk(S, q, k, v, g, beta, scale):
        G = g.cumsum(1)
        total = G[:, -1:]
        up, down, last = (to(torch.exp2(x), "decays") for x in (G, -G, total))
        k_out, k_in = to(k * up, "decays"), to(k * down, "decays")
        q_out = to(to(q * up, "decays") * scale, "decays")
        A = to((k_out @ k_in.mT).tril(-1), "others", torch.float16)
        A = to(A * beta, "others", torch.float16)
        inverse, power = to(torch.eye(A.shape[1]) - A, "others", torch.float16), A
        for _ in range(3):
            power = to(power @ power, "others", torch.float16)
            inverse = to(inverse + to(inverse @ power, "others", torch.float16), "others", torch.float16)
        residual = to(to(v - to(k_out @ S.mT, "others"), "others") * to(beta, "others"), "others")
        u = to(to(inverse, "others") @ residual, "others")
        scores = to(q_out @ k_in.mT, "others").tril()
        o = to(to(q_out @ S.mT, "others") + to(scores @ u, "others"), "others")
        S = to(S * torch.exp2(total) + u.mT @ to(k_in * last, "decays"), "state")
        return o, S

    def rule(q, k, v, g, beta, *, A_log, dt_bias, initial_state, cu_seqlens, lower_bound, **options):
        q, k, v, g, beta = (x[0].transpose(0, 1).float() for x in (q, k, v, g, beta))
        q, k, o, finals = normalise(q), normalise(k), torch.zeros_like(v), []
        g = LOG2E * lower_bound * torch.sigmoid(A_log.float().exp()[:, None, None] * (g + dt_bias[:, None]))
        beta, scale = beta.sigmoid()[..., None], to(torch.tensor(q.shape[-1] ** -0.5), "others")
        ends = cu_seqlens.tolist()
        for n, (first, end) in enumerate(zip(ends, ends[1:], strict=False)):
            S = to(initial_state[n].mT, "state")
            for t in range(first, end, 16):
                now = slice(t, min(t + 16, end))
                o[:, now], S = chunk(S, *(x[:, now] for x in (q, k, v, g, beta)), scale)
            finals.append(S.mT)
        return o.transpose(0, 1)[None].to(BF16), torch.stack(finals)

    return rule


def main():
    """Print the errors of o and the final state."""
    for T in (256, 2048, 8192):
        case = replace(catalog.MIXED, heads=(2, 2), lengths=packed(T), **catalog.VARIANTS["kda-gated"])
        given = inputs(case, BF16)
        expected = accuracy.expect_outputs(given, lambda x=given: x, 2, False, accuracy.reference_by_heads)
        for exact in ((), ("state",), ("decays",), ("state", "decays"), ("state", "decays", "others")):
            results = accuracy.run(rule_with(exact), given, False)
            for row in accuracy.compare_outputs(results, expected, case):
                print(T, "without", exact, row.output, f"{row.error:.2e} of {row.limit:.0e}", flush=True)


if __name__ == "__main__":
    main()
