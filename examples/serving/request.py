"""Hold requests, pieces of their prompts, and the sizes of an engine."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from serving.sampling import Drafter, Sampling


@dataclass(eq=False)
class Request:
    """Hold a prompt, how to answer it, and how far the answer is."""

    prompt: list[int]
    max_new: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    # called from the thread of the engine with new tokens, and with none when the request has ended
    on_tokens: Callable[["Request", list[int]], None] = lambda request, tokens: None
    tokens: list[int] = field(default_factory=list)  # generated
    finish: str | None = None  # "stop", "length", "cancelled" or "error"
    is_cancelled: bool = False
    hashes: list[bytes] = field(default_factory=list)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    seen: int = 0  # tokens whose state is in the slot
    accepted: int = 1  # tokens of the last packet that became part of the text
    reused: int = 0  # tokens of the prompt that a snapshot spared
    num_drafted: int = 0
    num_accepted: int = 0
    drafter: Drafter | None = None

    @property
    def is_prefilled(self) -> bool:
        return self.seen >= len(self.prompt)


@dataclass
class Piece:
    """Hold one request's part of a prefill: tokens first:last of its prompt, and the snapshots on the way."""

    request: Request
    first: int
    last: int
    snapshots: dict[int, int]  # block of the prompt -> slot for the state after it


@dataclass(frozen=True)
class Limits:
    """Hold the sizes of an engine."""

    rows: int = 8  # requests that run at a time
    slots: int = 24  # requests and snapshots
    max_len: int = 512  # tokens of a prompt and its answer
    pages: int = 0  # 0: as many as `rows` requests of max_len tokens need, and half as many for snapshots
    drafts: int = 0
    budget: int = 512  # tokens of a step, decoded and prefilled
    snapshot_every: int = 4  # blocks; the state after the last whole block of a prompt is kept as well
    state_dtype: torch.dtype = torch.float32
    history: int = 0  # places of each slot's history, 2 to 32; 0: every decode writes the states
