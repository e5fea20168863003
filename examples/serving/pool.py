"""Hold the memory of all sequences: states and windows in slots, keys and values in pages."""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

import gdn

BLOCK = 64  # tokens in a page, and in a block of a prefix


def hash_blocks(tokens: list[int]) -> list[bytes]:
    """Return a hash for each whole block of tokens; each includes those before it, so it names a prefix."""
    hashes: list[bytes] = []
    for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        text = repr(tokens[start : start + BLOCK]).encode()
        hashes.append(blake2b(text, key=hashes[-1] if hashes else b"", digest_size=16).digest())
    return hashes


@dataclass
class Snapshot:
    """Hold a prefix: the slot with the state after it, and the pages of its keys and values."""

    slot: int
    pages: list[int]


class Pool:
    """Allocate slots and pages. A page is shared by all requests and snapshots that begin with its tokens.

    states      [layers, slots, HV, V, K]          of each linear attention layer
    histories   HistoryPool or None                with places for each slot; its states are `states`
    windows     [layers, slots, D, W - 1 + drafts] the newest W - 1 inputs of the convolution come first
    keys        [layers, pages + 1, BLOCK, heads, head_dim]; padding rows write the last page; values likewise
    """

    def __init__(
        self, config: Any, device: torch.device, dtype: torch.dtype, *,
        slots: int, pages: int, drafts: int, state_dtype: torch.dtype, history: int = 0,
    ) -> None:  # fmt: skip
        linear, full = (config.layer_types.count(kind) for kind in ("linear_attention", "full_attention"))
        H, HV = config.linear_num_key_heads, config.linear_num_value_heads
        K, V, W = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
        self.num_slots, self.num_pages, self.hits = slots, pages, 0
        self.histories = None if history == 0 else gdn.allocate_history_pool(
            linear, slots, num_k_heads=H, num_v_heads=HV, head_k_dim=K, head_v_dim=V, places=history,
            state_dtype=state_dtype, history_dtype=dtype, state_v_first=True, device=device,
        )  # fmt: skip
        if self.histories is None:
            self.states = torch.zeros(linear, slots, HV, V, K, device=device, dtype=state_dtype)
        else:
            self.states = self.histories.state
        self.windows = torch.zeros(
            linear, slots, 2 * H * K + HV * V, W - 1 + drafts, device=device, dtype=dtype
        )
        shape = (full, pages + 1, BLOCK, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.free_slots, self.free_pages = list(range(slots)), list(range(pages))
        self.num_users = [0] * pages
        self.snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()

    def allocate(self, hashes: list[bytes], num_pages: int) -> tuple[int, list[int], int] | None:
        """Return (slot, pages, blocks) for a sequence that starts from its longest prefix in a snapshot.

        The slot then holds the state after that many blocks. None: others must end first.
        """
        name = next((h for h in reversed(hashes) if h in self.snapshots), None)
        blocks = 0 if name is None else hashes.index(name) + 1
        snapshot = None if name is None else self.snapshots.pop(name)
        fits = self._evict(slots=1, pages=num_pages - blocks)
        if name is not None and snapshot is not None:
            # last in the order of eviction
            self.snapshots[name] = snapshot
        if not fits:
            return None
        slot, pages = self.free_slots.pop(), [self.free_pages.pop() for _ in range(num_pages - blocks)]
        if snapshot is not None:
            self.hits += 1
            pages = snapshot.pages + pages
            for pool in (self.states, self.windows):
                pool[:, slot] = pool[:, snapshot.slot]
        if self.histories is not None:
            # the state of the slot is that of a snapshot, or is written by the first piece of the prompt
            self.histories.reset(torch.tensor([slot], device=self.states.device))
        self._use(pages)
        return slot, pages, blocks

    def keep(self, name: bytes, pages: list[int]) -> int | None:
        """Return a slot for the state after the prefix of this name, or None if none is free."""
        if name in self.snapshots or not self._evict(slots=1, pages=0):
            return None
        snapshot = self.snapshots[name] = Snapshot(self.free_slots.pop(), list(pages))
        self._use(pages)
        return snapshot.slot

    def release(self, slot: int, pages: list[int]) -> None:
        """Free the slot, and the pages that no other sequence has."""
        self.free_slots.append(slot)
        for page in pages:
            self.num_users[page] -= 1
            if self.num_users[page] == 0:
                self.free_pages.append(page)

    def forget(self) -> None:
        """Drop all snapshots."""
        while self.snapshots:
            _, old = self.snapshots.popitem()
            self.release(old.slot, old.pages)

    def _use(self, pages: list[int]) -> None:
        for page in pages:
            self.num_users[page] += 1

    def _evict(self, slots: int, pages: int) -> bool:
        """Drop the snapshots that were used longest ago until so much is free; False if it never is."""
        while len(self.free_slots) < slots or len(self.free_pages) < pages:
            if not self.snapshots:
                return False
            _, old = self.snapshots.popitem(last=False)
            self.release(old.slot, old.pages)
        return True

    def num_bytes(self) -> int:
        states = (self.states,) if self.histories is None else self.histories.tensors()
        return sum(x.nbytes for x in (*states, self.windows, self.keys, self.values))

    def __str__(self) -> str:
        free, prefixes = len(self.free_slots), len(self.snapshots)
        running = self.num_slots - free - prefixes
        bar = "#" * running + "=" * prefixes + "." * free
        pages = f"{self.num_pages - len(self.free_pages)}/{self.num_pages} pages"
        return (
            f"pool [{bar}] {running} running, {prefixes} prefixes ({self.hits} hits), {pages}, "
            f"{self.num_bytes() / 1e6:.1f} MB"
        )
