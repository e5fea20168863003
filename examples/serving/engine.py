"""Serve requests by continuous batching: chunked prefill beside decoding, prefix reuse, drafts, CUDA graphs.

    decode    one packet per running request: its last token and some drafts. Without drafts a layer is
              one gdn.decode_step; with drafts gdn.decode leaves the pool as it is, writes the state after
              each token to a buffer, and gdn.commit copies the accepted ones (protocol P3)
    prefill   pieces of prompts, packed, as many tokens as the budget of a step leaves: gdn.causal_conv1d and
              gdn.prefill continue in the request's slot; checkpoints become snapshots of prefixes

A decode has the shapes of its bucket (powers of two of rows and of pages), so on a GPU each is one CUDA
graph. Padding rows have slot -1: gdn reads and writes nothing for them.
"""

import itertools
from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gdn
from serving.model import Model, attend, norm, split_heads
from serving.pool import BLOCK, Pool, hash_blocks
from serving.request import Limits, Piece, Request
from serving.sampling import Drafter, sample

# q and k are normalised in the kernel, states are [..., HV, V, K]
CONVENTIONS = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}


class Engine:
    """Take requests by `add`, also from other threads; `step` serves those that run and admits others."""

    def __init__(self, causal: Any, limits: Limits) -> None:
        n = limits
        self.model, self.limits, self.packet = Model(causal), n, 1 + n.drafts
        if n.budget < n.rows * self.packet + BLOCK:
            raise ValueError(
                f"budget: expected at least rows * (1 + drafts) + {BLOCK} tokens, got {n.budget}"
            )
        if n.history > 0 and n.drafts > 0:
            raise ValueError(f"history: expected 0 with {n.drafts} drafts, got {n.history}")
        device = self.model.device
        self.pages_per_row = -(-n.max_len // BLOCK)
        pages = n.pages or self.pages_per_row * n.rows * 3 // 2
        self.pool = Pool(
            self.model.config, device, self.model.dtype,
            slots=n.slots, pages=pages, drafts=n.drafts, state_dtype=n.state_dtype, history=n.history,
        )  # fmt: skip
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        # inputs and outputs of a decode, at addresses that a graph may keep
        self.tokens = torch.zeros(n.rows, self.packet, dtype=torch.long, device=device)
        self.slots, self.seen, self.accepted = (
            torch.zeros(n.rows, dtype=torch.long, device=device) for _ in range(3)
        )
        self.table = torch.zeros(n.rows, self.pages_per_row, dtype=torch.long, device=device)
        self.rows = torch.arange(n.rows, device=device)
        layers, _, *state = self.pool.states.shape
        self.drafted_states = self.pool.states.new_zeros(layers, n.rows, self.packet, *state)
        # an example shows what it was asked for: without this the number of states would choose
        self.use_history = True if n.history > 0 else None
        self.graphs: dict[tuple[int, int], tuple[Any, Tensor]] = {}

    # requests

    def add(self, request: Request) -> Request:
        total = len(request.prompt) + request.max_new + self.limits.drafts
        if not request.prompt or request.max_new < 1 or total > self.limits.max_len:
            raise ValueError(
                f"prompt: expected 1 to {self.limits.max_len} tokens with the answer and "
                f"{self.limits.drafts} drafts, got {len(request.prompt)} and an answer of {request.max_new}"
            )
        if -(-total // BLOCK) > self.pool.num_pages:
            raise ValueError(
                f"prompt: expected at most {self.pool.num_pages} pages, got {-(-total // BLOCK)}"
            )
        request.hashes = hash_blocks(request.prompt)
        self.waiting.append(request)
        return request

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def fail(self) -> None:
        """End all requests after an error."""
        while self.waiting:
            self._end(self.waiting.popleft(), "error")
        for request in list(self.running):
            self._end(request, "error")
        # a snapshot may be half written
        self.pool.forget()

    @torch.no_grad()
    def step(self) -> None:
        """Decode for every request, then prefill with what the budget leaves."""
        for request in [r for r in self.running if r.is_cancelled]:
            self._end(request, "cancelled")
        self._admit()
        decoding = [r for r in self.running if r.is_prefilled]
        pieces = self._plan(self.limits.budget - len(decoding) * self.packet)
        if decoding:
            self._decode(decoding)
        if pieces:
            self._prefill(pieces)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.rows:
            request = self.waiting[0]
            if request.is_cancelled:
                self._end(self.waiting.popleft(), "cancelled")
                continue
            total = len(request.prompt) + request.max_new + self.limits.drafts
            # the last token of a prompt is computed again: its logits are needed
            usable = request.hashes[: (len(request.prompt) - 1) // BLOCK]
            place = self.pool.allocate(usable, -(-total // BLOCK))
            if place is None:
                return
            self.running.append(self.waiting.popleft())
            request.slot, request.pages, blocks = place
            request.seen = request.reused = blocks * BLOCK
            request.drafter = Drafter(request.prompt)

    def _plan(self, budget: int) -> list[Piece]:
        """Divide the budget among prompts in their order; all pieces but a prompt's last are whole blocks."""
        pieces = []
        for request in self.running:
            first, last = request.seen, len(request.prompt)
            if request.is_prefilled:
                continue
            if last - first > budget:
                last = first + budget // BLOCK * BLOCK
            if last == first:
                break
            budget -= last - first
            snapshots = {}
            for block in range(first // BLOCK + 1, last // BLOCK + 1):
                if block % self.limits.snapshot_every == 0 or block == len(request.hashes):
                    slot = self.pool.keep(request.hashes[block - 1], request.pages[:block])
                    if slot is not None:
                        snapshots[block] = slot
            pieces.append(Piece(request, first, last, snapshots))
        return pieces

    def _emit(self, request: Request, tokens: list[int]) -> None:
        """Append tokens up to the first that stops, and end the request if it is complete."""
        left = request.max_new - len(request.tokens)
        stop = next((n for n, token in enumerate(tokens[:left]) if token in request.stop_ids), None)
        tokens = tokens[: left if stop is None else stop + 1]
        request.tokens += tokens
        if request.drafter is not None:
            request.drafter.extend(tokens)
        request.on_tokens(request, tokens)
        if stop is not None or len(request.tokens) == request.max_new:
            self._end(request, "length" if stop is None else "stop")

    def _end(self, request: Request, reason: str) -> None:
        # a stop string may have ended the answer before
        request.finish = request.finish or reason
        if request in self.running:
            self.running.remove(request)
            self.pool.release(request.slot, request.pages)
        request.on_tokens(request, [])

    # prompts

    def _prefill(self, pieces: list[Piece]) -> None:
        device, counts = self.model.device, [p.last - p.first for p in pieces]
        ids = [token for p in pieces for token in p.request.prompt[p.first : p.last]]
        at = [n for p in pieces for n in range(p.first, p.last)]
        offsets = torch.tensor([0, *itertools.accumulate(counts)], device=device)
        tokens, positions = (torch.tensor([x], device=device) for x in (ids, at))
        x = self.model.forward(
            tokens, positions,
            partial(self._prefill_linear, pieces, offsets), partial(self._prefill_attention, pieces, counts),
        )  # fmt: skip
        ends = [n for n, p in enumerate(pieces) if p.last == len(p.request.prompt)]
        for p in pieces:
            p.request.seen = p.last
        if ends:
            logits = self.model.head(x[0, offsets[1:][ends] - 1])[:, None]
            requests = [pieces[n].request for n in ends]
            for request, (token,) in zip(requests, self._sample(logits, requests), strict=True):
                self._emit(request, [token])

    def _prefill_linear(
        self, pieces: list[Piece], offsets: Tensor, index: int, m: Any, qkv: Tensor, a: Tensor, b: Tensor,
        z: Tensor,
    ) -> Tensor:  # fmt: skip
        W, device = m.conv_kernel_size, qkv.device
        windows, states = self.pool.windows[index][..., : W - 1], self.pool.states[index]
        slots = torch.tensor([p.request.slot for p in pieces], device=device)
        has_state = torch.tensor([p.first > 0 for p in pieces], device=device)
        before = windows[slots].masked_fill(~has_state[:, None, None], 0)
        mixed, after = gdn.causal_conv1d(
            qkv, m.conv1d.weight[:, 0], activation="silu", initial_state=before, output_final_state=True,
            cu_seqlens=offsets,
        )  # fmt: skip
        windows[slots] = after
        options: dict[str, Any] = {}
        if any(p.snapshots for p in pieces):
            # the state after each block of each piece
            ends = [0, *itertools.accumulate((p.last - p.first) // BLOCK for p in pieces)]
            rows = torch.tensor(ends[:-1], device=device)
            checkpoints = torch.empty(ends[-1], *states.shape[1:], device=device)
            options = {"checkpoints": checkpoints, "checkpoint_every": BLOCK, "checkpoint_offsets": rows}
        o = gdn.prefill(
            **split_heads(m, mixed), a=a, b=b, A_log=m.A_log, dt_bias=m.dt_bias, state=states,
            cu_seqlens=offsets, state_index=slots, has_initial_state=has_state, **CONVENTIONS, **options,
        )  # fmt: skip
        for n, (p, start) in enumerate(zip(pieces, offsets.tolist(), strict=False)):
            for block, slot in p.snapshots.items():
                count = block * BLOCK - p.first
                states[slot] = checkpoints[ends[n] + count // BLOCK - 1]
                inputs = torch.cat([before[n], qkv[0, start : start + count].t()], 1)
                windows[slot] = inputs[:, 1 - W :]
        return norm(m, o, z)

    def _prefill_attention(
        self, pieces: list[Piece], counts: list[int], index: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        out = []
        for p, *new in zip(pieces, *(x[0].split(counts) for x in (q, k, v)), strict=True):
            pages = torch.tensor(p.request.pages, device=q.device)
            at = torch.arange(p.last, device=q.device)
            past = []
            for cache, x in zip((self.pool.keys[index], self.pool.values[index]), new[1:], strict=True):
                cache[pages[at[p.first :] // BLOCK], at[p.first :] % BLOCK] = x
                past.append(cache[pages[: -(-p.last // BLOCK)]].flatten(0, 1)[None, : p.last])
            out.append(attend(new[0][None], *past, at[p.first :, None] >= at))
        return torch.cat(out, 1)

    # packets

    def _decode(self, requests: list[Request]) -> None:
        packets = [r.drafter.packet(self.limits.drafts) for r in requests]
        logits = self._run(packets, requests)
        accepted = [1] * len(requests)
        choices = self._sample(logits, requests)
        for n, (request, packet, tokens) in enumerate(zip(requests, packets, choices, strict=True)):
            # drafts hold as long as the model says the same
            while accepted[n] < self.packet and packet[accepted[n]] == tokens[accepted[n] - 1]:
                accepted[n] += 1
            request.num_drafted += self.limits.drafts
            request.num_accepted += accepted[n] - 1
            request.accepted = accepted[n]
            request.seen += accepted[n]
        if self.limits.drafts:
            count = len(requests)
            steps = torch.tensor(accepted, device=self.rows.device) - 1
            gdn.commit(self.pool.states, self.drafted_states, self.slots[:count], self.rows[:count], steps)
        for request, tokens in zip(requests, choices, strict=True):
            self._emit(request, tokens[: request.accepted])

    def _sample(self, logits: Tensor, requests: list[Request]) -> list[list[int]]:
        positions = [len(r.tokens) for r in requests]
        return sample(logits, [r.sampling for r in requests], positions).tolist()

    def _run(self, packets: list[list[int]], requests: list[Request]) -> Tensor:
        """Return logits [requests, T, vocabulary] of the packets."""
        rows, pages = self._bucket(requests)
        padding, last = rows - len(requests), self.pool.num_pages
        table = [(r.pages + [last] * pages)[:pages] for r in requests] + [[last] * pages] * padding
        for buffer, value in (
            (self.tokens[:rows], packets + [[0] * self.packet] * padding),
            (self.slots[:rows], [r.slot for r in requests] + [-1] * padding),
            (self.seen[:rows], [r.seen for r in requests] + [0] * padding),
            (self.accepted[:rows], [r.accepted for r in requests] + [1] * padding),
            (self.table[:rows, :pages], table),
        ):
            buffer.copy_(torch.tensor(value))
        return self._replay(rows, pages)[: len(requests)]

    def _bucket(self, requests: list[Request]) -> tuple[int, int]:
        """Return rows and pages of the smallest bucket that holds the requests."""
        pages = max(-(-(r.seen + self.packet) // BLOCK) for r in requests)
        sizes = [1 << (n - 1).bit_length() for n in (len(requests), pages)]
        return min(sizes[0], self.limits.rows), min(sizes[1], self.pages_per_row)

    def _replay(self, rows: int, pages: int) -> Tensor:
        if self.model.device.type != "cuda":
            return self._packets(rows, pages)
        if (rows, pages) not in self.graphs:
            self._capture(rows, pages)
        graph, logits = self.graphs[rows, pages]
        graph.replay()
        return logits

    def _capture(self, rows: int, pages: int) -> None:
        """Record the decode of a bucket, after a run whose rows are all padding."""
        slots = self.slots.clone()
        self.slots.fill_(-1)
        self._packets(rows, pages)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # the memory of all graphs is one: they never run at the same time
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool):
            logits = self._packets(rows, pages)
        self.graphs[rows, pages] = graph, logits
        self.slots.copy_(slots)

    def _packets(self, rows: int, pages: int) -> Tensor:
        """Return logits for the first rows of self.tokens, slots, seen and table."""
        positions = self.seen[:rows, None] + torch.arange(self.packet, device=self.seen.device)
        attention = partial(self._decode_attention, positions, self.table[:rows, :pages])
        x = self.model.forward(self.tokens[:rows], positions, partial(self._decode_linear, rows), attention)
        return self.model.head(x)

    def _decode_linear(
        self, rows: int, index: int, m: Any, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor
    ) -> Tensor:
        windows, states, slots = self.pool.windows[index], self.pool.states[index], self.slots[:rows]
        weight, gates = m.conv1d.weight[:, 0], {"A_log": m.A_log, "dt_bias": m.dt_bias}
        if self.packet == 1:
            qkv, a, b, z = (x.squeeze(1) for x in (qkv, a, b, z))
            # with histories the step appends what the token writes, and folds the rows whose history is full
            held = states if self.pool.histories is None else self.pool.histories[index]
            o = gdn.decode_step(
                qkv, windows, weight, None, a, b, **gates, state=held, num_k_heads=m.num_k_heads,
                head_k_dim=m.head_k_dim, head_v_dim=m.head_v_dim, z=z, norm_weight=m.norm.weight,
                norm_eps=m.layer_norm_epsilon, read_index=slots, use_history=self.use_history, **CONVENTIONS,
            )  # fmt: skip
            return o[:, None]
        mixed = gdn.causal_conv1d_update(
            qkv, windows, weight, activation="silu", state_index=slots, num_accepted=self.accepted[:rows]
        )
        o = gdn.decode(
            **split_heads(m, mixed), a=a, b=b, **gates, state=states, read_index=slots, write="none",
            intermediate=self.drafted_states[index], round_state=states.dtype != torch.float32,
            **CONVENTIONS,
        )  # fmt: skip
        return norm(m, o, z)

    def _decode_attention(
        self, positions: Tensor, table: Tensor, index: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        place = table.gather(1, positions // BLOCK), positions % BLOCK
        past = []
        for cache, x in ((self.pool.keys[index], k), (self.pool.values[index], v)):
            cache[place] = x
            past.append(cache[table].flatten(1, 2))
        at = torch.arange(past[0].shape[1], device=q.device)
        return attend(q, *past, at <= positions[:, :, None])

    # before the first request

    def warmup(self) -> list[str]:
        """Compile all that requests will launch and record the graphs; return a line for each call."""
        c, dtype = self.model.config, self.model.dtype
        calls = gdn.warmup(
            self.model.device, num_k_heads=c.linear_num_key_heads, num_v_heads=c.linear_num_value_heads,
            head_k_dim=c.linear_key_head_dim, head_v_dim=c.linear_value_head_dim,
            conv_size=c.linear_conv_kernel_dim, dtypes=(dtype,), state_dtypes=(self.limits.state_dtype,),
            dt_bias_dtype=dtype, max_tokens=self.packet, max_rows=self.limits.rows, index_dtype=torch.int64,
            engines=("gdn",) if self.limits.history == 0 else ("gdn", "history"),
            **CONVENTIONS,
        )  # fmt: skip
        self.slots.fill_(-1)
        self.table.fill_(self.pool.num_pages)
        for rows, pages in self.buckets():
            with torch.no_grad():
                self._replay(rows, pages)
        return calls

    def buckets(self) -> list[tuple[int, int]]:
        """Return all pairs of rows and pages that a decode may have."""
        rows, pages = (
            sorted({min(1 << n, most) for n in range(most.bit_length() + 1)})
            for most in (self.limits.rows, self.pages_per_row)
        )
        return list(itertools.product(rows, pages))
