"""Speculative decoding: what to keep until drafts are accepted.

A small model drafts a few tokens, the large one verifies them in one call, and some of them are accepted.
This tutorial verifies drafts in three ways that keep different things, and checks that all end in the same
state. It runs on a CPU in seconds:

    python docs/tutorials/speculation.py
"""

# %% ## Why a state is not a cache of keys
#
# A transformer forgets a rejected token by shortening its cache. A state of the delta rule has absorbed the
# token: there is no way back, so something has to be kept from the time before. A pool holds one state per
# slot; here two requests live on slots 1 and 3, and in each step both verify packets of four tokens.

import argparse
from pathlib import Path

import torch
from torch import Tensor

import gdn

H, HV, K, V = 2, 4, 16, 16
SLOTS = torch.tensor([1, 3])
T, STEPS = 4, 6
OPTIONS = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}


def packets(seed: int = 0) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return packets of tokens for both requests, and how many of each packet are accepted, 1 to T."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, T, *shape, generator=draw)

    return [
        (
            {
                "q": normal(H, K), "k": normal(H, K), "v": normal(HV, V),
                "g": -normal(HV).abs() / 8, "beta": normal(HV).sigmoid(),
            },
            torch.randint(1, T + 1, (2,), generator=draw),
        )
        for _ in range(STEPS)
    ]  # fmt: skip


def one_by_one(given: list[tuple[dict[str, Tensor], Tensor]]) -> Tensor:
    """Return the pool after the accepted tokens alone, one call for each: what every way has to equal."""
    pool = torch.zeros(5, HV, V, K)
    for tokens, accepted in given:
        for t in range(T):
            # a slot of -1 is padding: that row is not computed
            rows = torch.where(t < accepted, SLOTS, -1)
            one = {name: x[:, t : t + 1] for name, x in tokens.items()}
            gdn.decode(**one, state=pool, read_index=rows, **OPTIONS)
    return pool


# %% ## A ring of states
#
# The pool has R states for each slot, and entry `p % R` is the state after p tokens. `decode` reads the
# entry of `ring_pos` and writes the T entries after it. Accepting n tokens means adding n to the position:
# nothing is copied.


def by_ring(given: list[tuple[dict[str, Tensor], Tensor]], R: int = T + 1) -> Tensor:
    """Return the pool after verification on rings."""
    pool = torch.zeros(5, R, HV, V, K)
    position = torch.zeros(2, dtype=torch.int64)
    for tokens, accepted in given:
        gdn.decode(**tokens, state=pool, read_index=SLOTS, ring_pos=position, write="all", **OPTIONS)
        position += accepted
    last = torch.zeros(5, HV, V, K)
    last[SLOTS] = pool[SLOTS, position % R]
    return last


# %% ## Intermediate states and a commit
#
# The pool has one state for each slot and is only read. `decode` writes the state after each token into a
# buffer that belongs to the batch, not to the request. After verification `gdn.commit` moves one state of
# each row into its slot, for all layers in one launch. Here there is one layer.


def by_commit(given: list[tuple[dict[str, Tensor], Tensor]]) -> Tensor:
    """Return the pool after verification with a buffer of states."""
    pool, buffer = torch.zeros(1, 5, HV, V, K), torch.empty(1, 2, T, HV, V, K)
    for tokens, accepted in given:
        gdn.decode(**tokens, state=pool[0], read_index=SLOTS, write="none", intermediate=buffer[0], **OPTIONS)
        gdn.commit(pool, buffer, SLOTS, torch.arange(2), accepted - 1)
    return pool[0]


# %% ## Replay of a history
#
# The third way keeps no states at all. It keeps what each token wrote, a key and a corrected value, which
# is about one percent of a state. `replay_decode` computes outputs from the state and this history.
# `replay_commit` moves the cursor by the accepted tokens, and folds the history into the state where fewer
# than `room` places remain.


def by_replay(given: list[tuple[dict[str, Tensor], Tensor]], places: int = 8) -> Tensor:
    """Return the pool after verification with histories, which are folded at the end."""
    pool = torch.zeros(1, 5, HV, V, K)
    u, k = torch.empty(1, 5, places, HV, V), torch.empty(1, 5, places, H, K)
    G = torch.empty(1, 5, places, HV, dtype=torch.float64)
    cursor = torch.zeros(5, dtype=torch.int32)
    for tokens, accepted in given:
        gdn.replay_decode(
            **tokens, state=pool[0], history_u=u[0], history_k=k[0], history_G=G[0], cursor=cursor,
            read_index=SLOTS, **OPTIONS,
        )  # fmt: skip
        gdn.replay_commit(pool, u, k, G, cursor, SLOTS, accepted, room=T, state_v_first=True)
    nothing = torch.zeros(2, dtype=torch.int64)
    gdn.replay_commit(pool, u, k, G, cursor, SLOTS, nothing, room=places, state_v_first=True)
    return pool[0]


# %% ## Which one?
#
# The picture shows the memory of one request and layer of a Qwen3.5-shaped model (16 key heads, 32 value
# heads of 128 x 128, fp32 states, histories in bf16 with 16 places). A ring multiplies the pool. The buffer
# of intermediate states is needed for the rows of a batch only, not for every request in the pool. A
# history is small; in exchange verification reads it, and a fold now and then costs about a step.
# [Serving](../serving.md#drafts) lists three more ways and their times.
#
# ![Memory for verification against the number of drafts](speculation.svg)


def draw(path: Path) -> None:
    """Draw the memory of each way against the number of tokens in a packet."""
    from matplotlib.figure import Figure

    state = 32 * 128 * 128 * 4 / 2**20
    history = 16 * (32 * 128 * 2 + 16 * 128 * 2 + 32 * 8) / 2**20
    tokens = list(range(2, 17))
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(tokens, [(n + 1) * state for n in tokens], label="ring: each request", marker="o")
    axes.plot(
        tokens, [n * state for n in tokens], label="buffer: each row of the batch", marker="s", linestyle="--"
    )
    axes.plot(tokens, [history for _ in tokens], label="history: each request", marker="^", linestyle="-.")
    axes.axhline(state, color="black", linewidth=1, linestyle=":", label="the state itself")
    axes.set_xlabel("tokens in a packet")
    axes.set_ylabel("MiB for each layer")
    axes.set_ylim(bottom=0)
    axes.set_title("16 key and 32 value heads of 128 x 128, fp32 states", fontsize=10)
    axes.legend(frameon=False)
    axes.grid(alpha=0.35, linewidth=0.5)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Compare the ways and draw their memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    options = parser.parse_args()
    given = packets()
    wanted = one_by_one(given)
    # a packet equals single steps bit for bit; replay equals them within rounding
    assert torch.equal(by_ring(given), wanted) and torch.equal(by_commit(given), wanted)
    torch.testing.assert_close(by_replay(given), wanted, rtol=1e-4, atol=1e-5)
    draw(options.out)
    kept = sum(int(accepted.sum()) for _, accepted in given)
    print(f"{kept} of {2 * T * STEPS} tokens accepted; ring, commit and replay agree; {options.out}")


if __name__ == "__main__":
    main()
