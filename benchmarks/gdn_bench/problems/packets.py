"""Speculation as problems: the ways to verify a packet of drafts, and the reference's outputs of each.

    states        token by token; the state after each is kept beside the pool for `commit`
    final         token by token; the state after the last token is written
    chunk         one chunk by MMAs, no state written
    chunk final   one chunk by MMAs; the state after the last token is written
    replay        a state that is only read, and a history of writes, to which the packet is added
    fold          a full history added to its state: once in places / T packets if all are accepted
    history       one token by `decode_with_history`; rows whose history is full are folded in the same launch

A group is B rows on states of one dtype: all its ways get equal tokens, on states of one pool.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gdn.testing.accuracy import Expected, reference_by_heads
from gdn.testing.cases import Case
from gdn.testing.tensors import Inputs
from gdn_bench.problems import catalog, jobs
from gdn_bench.problems.workloads import Cost
from gdn_bench.providers.provider import TOKENS

WAYS = ("states", "final", "chunk", "chunk final", "replay", "fold")
HISTORY = "history"  # for one token, and for more rows than the packets
SINGLE = "decode"  # one token, its state written: the time that those of packets are divided by
STATES = {"fp32": "wide", "bf16": "narrow"}


@dataclass(frozen=True)
class Shape:
    """Describe the timed problems: heads, size of keys and values, rows, tokens of a packet."""

    heads: tuple[int, int] = (16, 32)
    size: int = 128
    rows: tuple[int, ...] = (1, 8, 64, 128)
    tokens: tuple[int, ...] = (4, 16)
    history_rows: tuple[int, ...] = (1, 8, 64, 128, 256, 512)

    def case(self, B: int, dtype: str) -> Case:
        """Return the case of B rows with tokens for the longest history."""
        made = catalog.step(B, tokens=max(map(places, self.tokens)), state=STATES[dtype])
        return replace(made, heads=self.heads, sizes=(self.size, self.size))


SHAPE = Shape()


@dataclass(frozen=True)
class Packet:
    """Describe a row to measure: T tokens for each of B rows, verified in one way."""

    B: int
    T: int
    dtype: str
    way: str

    @property
    def name(self) -> str:
        """Return the name of the row."""
        return f"B={self.B} T={self.T} {self.dtype} {self.way}"

    @property
    def with_history(self) -> bool:
        """Return True if the way reads a history."""
        return self.way in ("replay", "fold", HISTORY)

    @property
    def accepted(self) -> Tensor:
        """Return [B] tokens in each row's history: whole packets that leave space for one more."""
        packets = places(self.T) // self.T
        rows = torch.full((self.B,), packets - 1) if self.way == "fold" else torch.arange(1, self.B + 1)
        return self.T * (rows % packets)

    def cost(self, shape: Shape) -> Cost:
        """Return the bytes of states, tokens and history, each read or written once."""
        (H, HV), K = shape.heads, shape.size
        states = {"states": 1 + self.T, "chunk": 1, "replay": 1, HISTORY: 1}.get(self.way, 2)
        state = HV * K * K * (4 if self.dtype == "fp32" else 2)
        tokens = 0 if self.way == "fold" else self.T * (4 * H * K + 4 * HV * K + 4 * HV)
        read = int(self.accepted.sum()) + self.B * self.T
        kept = {"replay": read, HISTORY: read, "fold": self.B * places(self.T)}
        history = kept.get(self.way, 0) * (2 * HV * K + 2 * H * K + 8 * HV)
        folds = int((self.accepted + self.T == places(self.T)).sum()) if self.way == HISTORY else 0
        return Cost(self.B * (states * state + tokens) + history + folds * state, 0)


def places(T: int) -> int:
    """Return the tokens that fit a slot's history: two packets, at least the 16 of one block."""
    return max(16, 2 * T)


def groups(shape: Shape, wants: Callable[[str], bool]) -> list[list[Packet]]:
    """Return the wanted packets of each group, one token first; groups without any are left out."""
    selected = []
    rows = sorted({*shape.rows, *shape.history_rows})
    for B, dtype in ((B, dtype) for B in rows for dtype in STATES):
        packets = [Packet(B, 1, dtype, HISTORY)] if B in shape.history_rows else []
        packets += [Packet(B, T, dtype, way) for T in shape.tokens for way in WAYS if B in shape.rows]
        wanted = [packet for packet in packets if wants(packet.name)]
        single = Packet(B, 1, dtype, SINGLE)
        if wanted or wants(single.name):
            selected.append([single, *wanted])
    return selected


def problems(packet: Packet, rows: Sequence[Inputs]) -> list[Inputs]:
    """Return the problems of a packet on rows of a pool. Problems with a history share one, which is empty.

    q, k, v, g, beta are the packet's tokens. With a history, past_q and so on are the tokens before them, of
    which the first accepted[row] are in the history; the pool has the states before all of these.
    """
    if not packet.with_history:
        return [
            replace(one, tensors={**one.tensors, **_tokens(one.tensors, slice(packet.T))}) for one in rows
        ]
    x, P = rows[0].tensors, places(packet.T)
    slots, (H, K), (HV, V) = len(x["pool"]), x["k"].shape[2:], x["v"].shape[2:]
    shared = {
        "history_u": x["v"].new_empty(slots, P, HV, V), "history_k": x["k"].new_empty(slots, P, H, K),
        "history_G": x["v"].new_empty(slots, P, HV, dtype=torch.float64),
        "cursor": x["read_index"].new_zeros(slots), "accepted": packet.accepted.to(x["read_index"]),
    }  # fmt: skip
    row, place = _places(packet, x["q"].device)
    return [
        replace(
            one,
            tensors={
                **one.tensors, **shared, **{name: one.tensors[name][row, place] for name in TOKENS},
                **{f"past_{name}": y for name, y in _tokens(one.tensors, slice(P - packet.T)).items()},
            },
        )
        for one in rows
    ]  # fmt: skip


def wanted(packet: Packet, expected: Expected) -> Expected:
    """Return the reference of a packet. expected: that of all tokens, with the state after each."""
    o, states = expected.outputs["o"], expected.outputs["final_state"].unflatten(0, (packet.B, -1))
    row, place = _places(packet, o.device)
    if packet.way != "states":
        states = states[row[:, 0], place[:, -1]]
    else:
        states = states[row, place].flatten(0, 1)
    outputs = {"o": o[row, place], "final_state": states}
    if packet.way == "chunk":
        del outputs["final_state"]
    return replace(expected, outputs=outputs)


def named(names: Sequence[str], device: torch.device) -> Iterator[tuple[str, Inputs]]:
    """Yield (way, problem) of packets by name."""
    for group in groups(SHAPE, lambda name: name in names):
        first = jobs.given(SHAPE.case(group[0].B, group[0].dtype), device)
        on_pool = jobs.sets(SINGLE, first, 1)
        for packet in group:
            yield packet.way, problems(packet, on_pool)[0]


def reference_of_packets(
    q: Tensor, k: Tensor, v: Tensor, *gates: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute the reference with the state after every token, [B * T, HV, ...], as speculation keeps it."""
    outputs, states, S = [], [], options.pop("initial_state")
    for t in range(q.shape[1]):
        one = {
            name: x[:, t : t + 1] if name in ("g", "beta") and x is not None else x
            for name, x in options.items()
        }
        token = (None if x is None else x[:, t : t + 1] for x in (q, k, v, *gates))
        o, S = reference_by_heads(*token, initial_state=S, **one)  # type: ignore[arg-type]
        outputs.append(o)
        states.append(S)
    return torch.cat(outputs, 1), torch.stack(states, 1).flatten(0, 1)


def _places(packet: Packet, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows [B, 1], and the indices [B, T] of the packet's tokens: after the accepted ones."""
    start = packet.accepted if packet.with_history else torch.zeros(packet.B, dtype=torch.int64)
    place = start[:, None] + torch.arange(packet.T)
    return torch.arange(packet.B, device=device)[:, None], place.to(device)


def _tokens(x: dict[str, Tensor], which: slice) -> dict[str, Tensor]:
    """Return some tokens of each row, copied."""
    return {name: x[name][:, which].contiguous() for name in TOKENS}
