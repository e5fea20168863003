"""Emulate the error of dg if <q, dq> and <k, dk> took the place of the sums over pairs, on a CPU (a minute).

    python docs/lab/2026-11-26-gate-gradients.py

One value head, eight chunks, K = V = 128, fp64 with every rounding of the gradient kernel: A_inv - 1, u, S,
dS, dv, w, E, F and the scaled do and dv in bf16. Errors in 1e-3 against autograd, means over three seeds.
"""

import torch

C, D, NUM = 64, 128, 8
CASES = (
    ("none", "random", "sigmoid"),
    ("slow", "random", "sigmoid"),
    ("mild", "random", "sigmoid"),
    ("strong", "random", "sigmoid"),
    ("none", "random", "one"),
    ("none", "correlated", "sigmoid"),
    ("none", "identical", "sigmoid"),
    ("mild", "random", "small"),
)


def bf16(x):
    return x.float().bfloat16().double()


def suffix(x):
    return x.flip(0).cumsum(0).flip(0)


def prefix(x):
    return x.cumsum(0) - x


def draw(gate, keys, betas, width, seed):
    """Return q, k, v, do, g, beta and the first state and last gradient, of one head."""
    generator = torch.Generator().manual_seed(seed)

    def rn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    T = C * NUM
    q, k = rn(T, D), rn(T, D)
    k = {"random": k, "correlated": k + 2 * rn(1, D), "identical": rn(1, D).expand(T, D)}[keys]
    q, k = (bf16(torch.nn.functional.normalize(x, dim=-1)) for x in (q, k))
    g = torch.nn.functional.logsigmoid(rn(T)) * {"none": 0, "slow": 2**-10, "mild": 1 / 16, "strong": 4}[gate]
    beta = rn(T).sigmoid() if betas != "one" else torch.ones(T, dtype=torch.float64)
    if betas == "small":
        beta = beta * 10 ** (-6 * torch.rand(T, generator=generator, dtype=torch.float64))
    return q, k, bf16(rn(T, D)), bf16(rn(T, D)), g, beta, rn(D, D) * width, rn(D, D) * width


def reference(q, k, v, do, g, beta, S, dfinal):
    """Return dg, and S that enters and dS that leaves each chunk."""
    g = g.requires_grad_()
    states, loss = [], 0.0
    for t in range(len(g)):
        if t % C == 0:
            S = S * 1.0
            states.append(S)
        S = S * g[t].exp()
        S = S + k[t][:, None] * (beta[t] * (v[t] - k[t] @ S))[None, :]
        loss = loss + (D**-0.5 * (q[t] @ S) * do[t]).sum()
    last = S * 1.0
    dg, *gradients = torch.autograd.grad(loss + (last * dfinal).sum(), [g, *states[1:], last])
    return dg, [x.detach() for x in states], gradients


def dg_of_chunk(q, k, v, do, g, beta, S, dS):
    """Return dg of one chunk by the sums over pairs in fp32, by pairs of rounded E and F, and by rows."""
    G, scale = g.cumsum(0), D**-0.5
    decay = (G[:, None] - G[None, :]).exp().tril()
    qk, kk = q @ k.T, k @ k.T
    A_inv = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + beta[:, None] * (decay * kk).tril(-1))
    dv_new = (scale * decay * qk).T @ do + (G[-1] - G).exp()[:, None] * (k @ dS)
    dv = bf16(beta[:, None] * (A_inv.T @ dv_new))
    S, dS = bf16(S), bf16(dS)
    read, into, out = scale * G.exp(), -G.exp(), (G[-1] - G).exp()
    kS = k @ S
    u = beta[:, None] * (v + into[:, None] * kS)
    v_new = u + bf16(A_inv - torch.eye(C)) @ bf16(u)
    w = bf16(v_new * out[:, None])
    E = (do @ v_new.T) * decay * scale
    F = -((dv @ v_new.T) * decay).tril(-1)
    through = G[-1].exp() * (S * dS).sum()
    entering = suffix(read * (do * (q @ S)).sum(1) + into * (dv * kS).sum(1))
    leaving = out * (v_new * (k @ dS)).sum(1)

    def by_pairs(E, F):
        H = E * qk + F * kk
        return entering + prefix(leaving + H.sum(0) - H.sum(1)) + through

    rounded = bf16(E), bf16(F)
    scaled = bf16(dv * into[:, None])
    before = bf16(do * read[:, None]) @ S.T
    dq = before + rounded[0] @ k
    dk = scaled @ S.T + w @ dS.T + rounded[0].T @ q + (rounded[1] + rounded[1].T) @ k
    a, b = (q * dq).sum(1), (k * dk).sum(1)
    # the part of k's rows in k S and F: v_new / beta = v - e^G k S - (the keys before)
    row_k = (dv * (v_new / beta[:, None] - v)).sum(1)
    entering_k = (scaled * kS).sum(1)
    row_F = row_k - into * (dv * kS).sum(1)
    by_rows = suffix(a + entering_k) - (a - (q * before).sum(1)).sum() + prefix(b - entering_k - 2 * row_F)
    return by_pairs(E, F), by_pairs(*rounded), by_rows + through


def main():
    """Print a line for each case and width of the states."""
    print("states  gate    keys        beta       pairs  rounded pairs    rows")
    for width in (1.0, 0.1):
        for gate, keys, betas in CASES:
            errors = torch.zeros(3, dtype=torch.float64)
            for seed in range(3):
                tokens = draw(gate, keys, betas, width, seed)
                dg, states, gradients = reference(*tokens)
                chunks = zip(*(x.detach().split(C) for x in tokens[:6]), states, gradients, strict=True)
                parts = zip(*(dg_of_chunk(*chunk) for chunk in chunks), strict=True)
                errors += torch.stack([(torch.cat(x) - dg).norm() / dg.norm() for x in parts]) / 3e-3
            cells = "".join(f"{x:12.2f}" for x in errors.tolist())
            print(f"{width:6.1f}  {gate:7s} {keys:11s} {betas:8s}{cells}", flush=True)


if __name__ == "__main__":
    main()
