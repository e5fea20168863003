"""The recurrence and its chunk form, from scratch.

This tutorial writes the gated delta rule twice, as a loop over tokens and in chunks of tokens, and compares
both with gdn. It runs on a CPU in a second:

    python docs/tutorials/recurrence.py
"""

# %% ## One token at a time
#
# A state `S` of shape `[K, V]` is a small associative memory: it maps a key of size K to a value of size V.
# Every token does four things. The state decays by `e^g`. The state is read with the token's key, and the
# difference between the token's value and what was read is an error. A share `beta` of the error, `d`, is
# written back under the same key. The output is what the query reads. This is the *delta rule*: a token
# corrects the value under its key and does not add to it.

import argparse
from pathlib import Path

import torch
from torch import Tensor

import gdn


def by_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the rule for one head: q, k [T, K], v [T, V], g and beta [T]."""
    S = q.new_zeros(k.shape[1], v.shape[1])
    outputs = []
    for t in range(len(q)):
        S = g[t].exp() * S
        d = beta[t] * (v[t] - S.T @ k[t])
        S = S + torch.outer(k[t], d)
        outputs.append(S.T @ q[t])
    return torch.stack(outputs), S


# %% ## A chunk at a time
#
# The loop has T steps that depend on each other, and each one is too small for a GPU. So the tokens are cut
# into chunks of C. Let `G` be the sum of `g` from the start of the chunk. If the state that enters the
# chunk is `S`, then the error of token i is
#
# `d_i = beta_i (v_i - e^(G_i) S^T k_i - sum over j < i of e^(G_i - G_j) <k_i, k_j> d_j)`.
#
# The last sum contains the errors of earlier tokens of the chunk. Together the C equations are a triangular
# system `(I + A) D = R`, with `A_ij = beta_i e^(G_i - G_j) <k_i, k_j>` below the diagonal. One inverse of a
# C x C matrix and a few matrix products replace C steps, and only T / C steps depend on each other.


def chunk_system(k: Tensor, G: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return A of a chunk, and (I + A)^-1."""
    decay = (G[:, None] - G[None, :]).tril().exp()
    A = (beta[:, None] * decay * (k @ k.T)).tril(-1)
    identity = torch.eye(len(k), dtype=k.dtype)
    return A, torch.linalg.solve_triangular(identity + A, identity, upper=False, unitriangular=True)


def by_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, C: int = 64) -> tuple[Tensor, Tensor]:
    """Compute the rule for one head, C tokens at a time."""
    S = q.new_zeros(k.shape[1], v.shape[1])
    outputs = []
    for q_c, k_c, v_c, g_c, beta_c in zip(*(x.split(C) for x in (q, k, v, g, beta)), strict=True):
        G = g_c.cumsum(0)
        _, inverse = chunk_system(k_c, G, beta_c)
        D = inverse @ (beta_c[:, None] * (v_c - G.exp()[:, None] * (k_c @ S)))
        decay = (G[:, None] - G[None, :]).tril().exp().tril()
        outputs.append(G.exp()[:, None] * (q_c @ S) + (decay * (q_c @ k_c.T)) @ D)
        S = G[-1].exp() * S + (k_c * (G[-1] - G).exp()[:, None]).T @ D
    return torch.cat(outputs), S


# %% ## The same numbers three times
#
# Keys have norm 1, as in the models of this family: then no token can make the state grow.
# `gdn.chunk_gated_delta_rule` has a batch axis and a head axis, and scales the output by `K ** -0.5` unless
# told otherwise.


def compare(T: int = 256, K: int = 32, V: int = 48) -> dict[str, Tensor]:
    """Return the inputs of one head after checking that loop, chunks and gdn agree."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(T, K, dtype=torch.float64), dim=-1) for _ in "qk")
    v = torch.randn(T, V, dtype=torch.float64)
    g, beta = -torch.rand(T, dtype=torch.float64) / 8, torch.rand(T, dtype=torch.float64)
    o, S = by_tokens(q, k, v, g, beta)
    for C in (1, 16, 64, T):
        o_chunks, S_chunks = by_chunks(q, k, v, g, beta, C)
        torch.testing.assert_close(o_chunks, o)
        torch.testing.assert_close(S_chunks, S)
    q, k, v, g, beta = (x[None, :, None] for x in (q, k, v, g, beta))
    o_gdn, S_gdn = gdn.chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0, output_final_state=True)
    torch.testing.assert_close(o_gdn[0, :, 0], o)
    torch.testing.assert_close(S_gdn[0, 0], S)
    return {"k": k[0, :, 0], "g": g[0, :, 0], "beta": beta[0, :, 0]}


# %% ## The matrices of a chunk
#
# The picture shows `A` and `(I + A)^-1 - I` of the first chunk. The decay makes distant tokens matter less.
# The right panel shows the condition number of `I + A` as the keys become more similar: rounding errors
# grow with it. This is the reason why [the accuracy page](../accuracy.md) treats correlated and identical
# keys apart.
#
# ![A, its inverse, and the condition of the system against the similarity of keys](recurrence.svg)


def draw(k: Tensor, g: Tensor, beta: Tensor, path: Path, C: int = 64) -> None:
    """Draw A and the inverse of the first chunk, and the condition of systems of similar keys."""
    from matplotlib.figure import Figure

    A, inverse = chunk_system(k[:C], g[:C].cumsum(0), beta[:C])
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    limit = float(A.abs().max())
    for ax, x, title in zip(
        axes, (A, inverse - torch.eye(C)), ("A", "inverse of I + A, minus I"), strict=False
    ):
        image = ax.imshow(x, cmap="RdBu", vmin=-limit, vmax=limit, interpolation="nearest")
        ax.set_title(f"{title}, one chunk of {C} tokens", fontsize=10)
        ax.set_xlabel("token j")
        ax.set_ylabel("token i")
    figure.colorbar(image, ax=axes[:2], shrink=0.8)
    shares = torch.linspace(0, 1, 21, dtype=k.dtype)
    for strength in (0.5, 1.0, 1.9):
        conditions = []
        for share in shares:
            similar = torch.nn.functional.normalize((1 - share) * k[:C] + share * k[:1], dim=-1)
            zero = torch.zeros(C, dtype=k.dtype)
            A, _ = chunk_system(similar, zero, zero + strength)
            conditions.append(float(torch.linalg.cond(torch.eye(C, dtype=k.dtype) + A)))
        axes[2].plot(shares, conditions, label=f"beta = {strength}")
    axes[2].set_title("condition of I + A, g = 0", fontsize=10)
    axes[2].set_xlabel("share of one common key")
    axes[2].set_yscale("log")
    axes[2].legend(frameon=False)
    axes[2].grid(alpha=0.35, linewidth=0.5)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Compare the three forms and draw the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    options = parser.parse_args()
    draw(**compare(), path=options.out)
    print(f"loop, chunks and gdn agree; {options.out}")


if __name__ == "__main__":
    main()
