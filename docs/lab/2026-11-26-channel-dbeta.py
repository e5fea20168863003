"""Emulate the roundings that reach dbeta of a decay per key channel, on a CPU (half a minute).

    python docs/lab/2026-11-26-channel-dbeta.py

The last chunk of 256 heads, K = V = 128, l2norm, random S that enters and random gradient of the final state,
in fp64 but for the listed roundings to bf16. For each gate: the error over all heads, the median and the
largest error of a head, in 1e-3, and the share of heads above the limit of 6e-3.
"""

import torch

C, D, HEADS, LIMIT = 64, 128, 256, 6e-3
GATES = {
    "none": torch.zeros_like,
    "strong": torch.nn.functional.logsigmoid,
    "bounded": lambda x: -5 * torch.sigmoid(x),
}


def bf16(x):
    return x.float().bfloat16().double()


def exact(x):
    return x


def draw(gate, generator):
    """Return one head's q, k, g, v, do, beta, S and dS; q and k normalised, but not rounded."""

    def rn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(bf16(rn(C, D)), dim=-1) for _ in range(2))
    return q, k, GATES[gate](rn(C, D)), bf16(rn(C, D)), bf16(rn(C, D)), rn(C).sigmoid(), rn(D, D), rn(D, D)


def dbeta(given, rows=exact, low=exact, A=exact, S=exact, dS=exact, dr=exact):
    """Return <dr, v_new> / beta of a chunk. Arguments: roundings, of k_in (rows), k_out (low), ..."""
    q, k, g, v, do, beta, S_in, dS_out = given
    G = g.cumsum(0)
    decay = (G[:, None] - G[None, :]).clamp(max=0).exp()
    P = D**-0.5 * torch.einsum("ic,jc,ijc->ij", q, k, decay).tril()
    A_inv = torch.eye(C, dtype=torch.float64) + beta[:, None] * torch.einsum(
        "ic,jc,ijc->ij", k, k, decay
    ).tril(-1)
    rest = A(torch.linalg.inv(A_inv) - torch.eye(C, dtype=torch.float64))
    k_in, k_out = rows(G.exp() * k), low((G[-1] - G).exp() * k)
    r = beta[:, None] * (v - k_in @ S(S_in))
    v_new = r + rest @ r
    dv_new = k_out @ dS(dS_out) + P.T @ do
    # the unit diagonal takes dv_new unrounded
    gradient = dr(dv_new + rest.T @ (bf16(dv_new) if A is bf16 else dv_new))
    return (gradient * v_new).sum(-1) / beta


def textbook(given):
    """Return dbeta with dv of the chunk and dS rounded before their products, as FLA's `chunk_kda` rounds."""
    q, k, g, v, do, beta, S_in, dS_out = given
    k, S = bf16(k), bf16(S_in)
    G = g.cumsum(0)
    decay = (G[:, None] - G[None, :]).clamp(max=0).exp()
    P = bf16(D**-0.5 * torch.einsum("ic,jc,ijc->ij", bf16(q), k, decay).tril())
    kk = torch.einsum("ic,jc,ijc->ij", k, k, decay).tril(-1)
    inverse = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + beta[:, None] * kk)
    A = bf16(inverse)
    k_in, k_out = G.exp() * k, bf16((G[-1] - G).exp() * k)
    dv = bf16(k_out @ bf16(dS_out) + bf16(P.T @ do))
    dw = -bf16(dv @ S.T)
    # through u = A (beta v) and w = A (beta k_in), and through A by the products of the keys
    direct = ((A.T @ dv) * v).sum(-1) + ((A.T @ dw) * k_in).sum(-1)
    dA = bf16(dv) @ bf16(beta[:, None] * v).T + dw @ bf16(beta[:, None] * k_in).T
    dkk = -(A.T @ bf16(bf16(dA) @ A.T)).tril(-1)
    return direct + (dkk * kk).sum(-1)


WAYS = {
    "k_out, dr and the rest in bf16": lambda x: dbeta(x, bf16, bf16, bf16, bf16, exact, bf16),
    "dr with 8 more bits": lambda x: dbeta(x, bf16, bf16, bf16, bf16, exact, exact),
    "k_out in two bf16": lambda x: dbeta(x, bf16, exact, bf16, bf16, exact, bf16),
    "both": lambda x: dbeta(x, bf16, exact, bf16, bf16, exact, exact),
    "as FLA rounds": textbook,
}


def main():
    for gate in GATES:
        generator = torch.Generator().manual_seed(0)
        heads = [draw(gate, generator) for _ in range(HEADS)]
        expected = torch.stack([dbeta(x) for x in heads])
        share = float(expected[:, -1].square().sum() / expected.square().sum())
        print(f"{gate}: the last token has {share:.2f} of the squares of dbeta")
        for name, way in WAYS.items():
            wrong = torch.stack([way(x) for x in heads]) - expected
            each = (wrong.norm(dim=1) / expected.norm(dim=1)).sort().values
            cells = (float(wrong.norm() / expected.norm()), float(each[HEADS // 2]), float(each[-1]))
            above = float((each > LIMIT).double().mean())
            print(
                f"  {name:32s} " + " ".join(f"{1e3 * x:6.2f}" for x in cells) + f"  {above:.3f}", flush=True
            )


if __name__ == "__main__":
    main()
