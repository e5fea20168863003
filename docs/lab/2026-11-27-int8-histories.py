"""Measure how states in int8 drift in `decode_with_history` itself: 100,000 tokens on `eager`, beside fp64.

    PYTHONPATH=src python docs/lab/2026-11-27-int8-histories.py FORM [--tokens 100000] [--packet 1]

FORM is "remainder" (int8 and 4 bits), "int8" (alone), "bf16" or "fp32". One row of four heads, K = V = 128,
each with its own keys and gates; u and k of the history are in bf16, as an engine's. The reference is the
recurrence in fp64, token by token. A history is folded after 16 tokens. Prints the relative RMS error of o in
percent for the 1,000 tokens before 1,000, 10,000 and so on, and at the end that of the states. One core takes
2 minutes with packets of 4 tokens, and needs no GPU.
"""

import argparse
import math
import time

import torch
from torch import Tensor

import gdn

K = V = 128
# gate, cosine of two keys, beta: logsigmoid(N) times the gate, sigmoid(N), or sigmoid(N - 4)
HEADS = {
    "none/random/sigmoid": (0.0, 0.0, 0.0),
    "none/correlated/sigmoid": (0.0, 0.8, 0.0),
    "none/random/low": (0.0, 0.0, -4.0),
    "slow/random/low": (1 / 1024, 0.0, -4.0),
}
WINDOWS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
STATES = {"remainder": torch.int8, "int8": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}


def draw(generator: torch.Generator, common: Tensor, count: int) -> dict[str, Tensor]:
    """Draw `count` tokens of the row; q and k have norm 1."""

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, count, len(HEADS), *sizes, generator=generator)

    unit = torch.nn.functional.normalize
    gates, cosines, shifts = (torch.tensor(x) for x in zip(*HEADS.values(), strict=True))
    share = cosines[:, None]
    q, k = (
        unit(share.sqrt() * common + (1 - share).sqrt() * unit(normal(K), dim=-1), dim=-1) for _ in range(2)
    )
    g = torch.nn.functional.logsigmoid(normal()) * gates
    # values that bf16 holds: the reference then has the inputs of a call in bf16
    q, k, v = (x.bfloat16().float() for x in (q, k, normal(V)))
    return {"q": q, "k": k, "v": v, "g": g, "beta": torch.sigmoid(normal() + shifts)}


def main() -> None:
    """Decode on a pool and in fp64, and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("form", choices=list(STATES))
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--packet", type=int, default=1, help="tokens of a call")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    T, n = asked.packet, len(HEADS)
    pool = gdn.allocate_history_pool(
        1, num_k_heads=n, num_v_heads=n, head_k_dim=K, head_v_dim=V, places=16 + T, room=T,
        state_dtype=STATES[asked.form], with_remainder=asked.form == "remainder", state_v_first=True,
    )  # fmt: skip
    generator, start = torch.Generator().manual_seed(0), time.time()
    common = torch.nn.functional.normalize(torch.randn(K, generator=generator), dim=0)
    S = torch.zeros(n, K, V, dtype=torch.float64)
    squares, norms = torch.zeros(n).double(), torch.zeros(n).double()
    for first in range(0, asked.tokens, 1_000):
        x = draw(generator, common, 1_000)
        o = [
            gdn.decode_with_history(
                **{name: y[:, t : t + T] for name, y in x.items()},
                pool=pool, use_history=True, state_v_first=True, backend="eager",
            )
            for t in range(0, 1_000, T)
        ]  # fmt: skip
        o = torch.cat(o, 1)[0].double()
        q, k, v, g, beta = (y[0].double() for y in x.values())
        decays, wanted = g.exp(), torch.empty(1_000, n, V, dtype=torch.float64)
        for t in range(1_000):
            S *= decays[t][:, None, None]
            u = beta[t][:, None] * (v[t] - torch.bmm(k[t][:, None], S)[:, 0])
            S.baddbmm_(k[t][:, :, None], u[:, None])
            wanted[t] = torch.bmm(q[t][:, None], S)[:, 0] / math.sqrt(K)
        if first + 1_000 in WINDOWS:
            squares, norms = (o - wanted).square().sum((0, 2)), wanted.square().sum((0, 2))
            cells = "  ".join(
                f"{name} {100 * e:.2g}" for name, e in zip(HEADS, (squares / norms).sqrt(), strict=True)
            )
            print(f"{asked.form} {first + 1_000:,}: {cells}  ({time.time() - start:.0f} s)", flush=True)
    gdn.fold_history(pool, torch.zeros(1, dtype=torch.int64), state_v_first=True, backend="eager")
    held = pool.read(torch.zeros(1, dtype=torch.int64), state_v_first=True, dtype=torch.float64)[0].mT
    errors = ((held - S).square().sum((1, 2)) / S.square().sum((1, 2))).sqrt()
    print(f"{asked.form} states:", "  ".join(f"{100 * e:.2g}" for e in errors))


if __name__ == "__main__":
    main()
