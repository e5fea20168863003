"""A small engine on gdn: continuous batching, prefix reuse, drafts verified, text of several prompts at once.

    python examples/serve.py                     random weights: what is shown is the machinery, not the text
    python examples/serve.py --device cuda --requests 12 --drafts 3
    python examples/serve.py --spread 0.02       weights so small that the model repeats itself: drafts hold

The model is Transformers' Qwen3.5 text class, a token per byte; its weights, norms and MLPs are used as they
are, while states, windows, keys and values live in a pool of slots that belongs to the engine:

    prefill   whole prompts, packed: gdn.causal_conv1d, and gdn.prefill from the slot of a kept prefix into
              the request's own, leaving the state after the last whole block for others (snapshot)
    step      one packet per running request, its last token and some drafts: gdn.causal_conv1d_update and
              gdn.decode on rings. Entry p % R is the state after p tokens, so accepting tokens is adding to p

A step has the same shapes whoever runs, so on a GPU it is one CUDA graph. Idle rows have slot -1.
"""

import argparse
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import gdn

# q and k are normalised in the kernel, states are [..., HV, V, K]
CONVENTIONS = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}
BLOCK = 64  # tokens; prefixes are kept at multiples of it
SHARED = "You are a careful assistant who answers in one sentence. Think before you speak, then say it. "
QUESTIONS = (
    "Why is the sky blue?", "What is a prime?", "Who was Ada?", "How do tides work?", "What is rust?",
    "Why do cats purr?", "What is a monad?", "Where is Ulm?",
)  # fmt: skip


@dataclass
class Request:
    """A prompt and what has become of it."""

    prompt: list[int]
    max_new: int
    tokens: list[int] = field(default_factory=list)  # generated
    slot: int = -1
    row: int = -1
    seen: int = 0  # tokens whose state is in the slot
    reused: int = 0  # tokens of the prompt that a kept prefix spared
    drafted: int = 0
    accepted: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.max_new


@dataclass
class Plan:
    """One request's part of a prefill: tokens first:last of its prompt."""

    request: Request
    first: int
    last: int
    source: int  # the slot that holds the state after `first` tokens
    keep: int = -1  # a slot for the state after `keep_at` tokens, for others
    keep_at: int = -1


class Pool:
    """Slots, and in each what the layers remember of one sequence or of one kept prefix."""

    def __init__(self, model: Any, slots: int, packet: int, max_len: int) -> None:
        c, device, dtype = model.config, model.device, model.dtype
        kinds = [c.layer_types.count(kind) for kind in ("linear_attention", "full_attention")]
        width = 2 * c.linear_num_key_heads * c.linear_key_head_dim
        width += c.linear_num_value_heads * c.linear_value_head_dim
        state = (c.linear_num_value_heads, c.linear_value_head_dim, c.linear_key_head_dim)
        self.W, self.packet, self.max_len = c.linear_conv_kernel_dim, packet, max_len
        self.states = torch.zeros(kinds[0], slots, packet, *state, device=device)
        self.windows = torch.zeros(
            kinds[0], slots, width, self.W - 1 + packet - 1, dtype=dtype, device=device
        )
        # one slot more: idle rows write their keys somewhere
        shape = (kinds[1], slots + 1, max_len, c.num_key_value_heads, c.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.free = list(range(slots))
        self.prefixes: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self.slots, self.hits = slots, 0

    def take(self, in_use: set[int]) -> int | None:
        """A free slot; if there is none, that of the prefix used longest ago that nobody is about to read."""
        if not self.free:
            old = next((key for key, slot in self.prefixes.items() if slot not in in_use), None)
            return None if old is None else self.prefixes.pop(old)
        return self.free.pop()

    def find(self, prompt: list[int]) -> tuple[int, int]:
        """The longest kept prefix of a prompt, its last token left to compute: (tokens, slot), or (0, -1)."""
        for n in range((len(prompt) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            slot = self.prefixes.get(key := tuple(prompt[:n]))
            if slot is not None:
                self.prefixes.move_to_end(key)
                self.hits += 1
                return n, slot
        return 0, -1

    def place(self, slots: Iterable[int], seen: Iterable[int]) -> Tensor:
        """Where a ring keeps the state after `seen` tokens, counted through all slots."""
        at = [slot * self.packet + n % self.packet for slot, n in zip(slots, seen, strict=True)]
        return torch.tensor(at, device=self.states.device)

    def columns(self, seen: int) -> Tensor:
        """Where a ring keeps the W - 1 inputs of the convolution before token `seen`."""
        L = self.windows.shape[-1]
        return torch.tensor(
            [(seen - self.W + 1 + i) % L for i in range(self.W - 1)], device=self.windows.device
        )

    def megabytes(self) -> float:
        return sum(x.nbytes for x in (self.states, self.windows, self.keys, self.values)) / 1e6

    def __str__(self) -> str:
        kept = len(self.prefixes)
        running = self.slots - len(self.free) - kept
        bar = "#" * running + "=" * kept + "." * len(self.free)
        return (
            f"pool [{bar}] {running} running, {kept} prefixes ({self.hits} hits), {self.megabytes():.1f} MB"
        )


class Engine:
    """Requests come in by `add`; `step` serves those that run, and lets in what the pool has slots for."""

    def __init__(
        self, model: Any, *, slots: int = 12, rows: int = 4, drafts: int = 2, max_len: int = 512,
        on_text: Callable[[Request, list[int]], None] = lambda request, tokens: None,
    ) -> None:  # fmt: skip
        self.model, self.rows, self.drafts, self.on_text = model, rows, drafts, on_text
        self.pool = Pool(model, slots, 1 + drafts, max_len)
        self.waiting: deque[Request] = deque()
        self.running: list[Request | None] = [None] * rows
        device = model.device
        # a step's inputs and output, at addresses that a graph may keep
        self.tokens = torch.zeros(rows, 1 + drafts, dtype=torch.long, device=device)
        self.slots, self.seen = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(2))
        self.slots.fill_(-1)
        self.next = torch.zeros_like(self.tokens)
        self.graph: Any = None

    def add(self, prompt: list[int], max_new: int) -> Request:
        if not 0 < len(prompt) <= self.pool.max_len - max_new - self.drafts:
            raise ValueError(f"prompt: expected 1 to max_len - max_new - drafts tokens, got {len(prompt)}")
        self.waiting.append(Request(prompt, max_new))
        return self.waiting[-1]

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not any(self.running)

    def warmup(self) -> list[str]:
        """Compile all that requests will meet; a line for each call."""
        c, dtype = self.model.config, self.model.dtype
        return gdn.warmup(
            self.model.device, num_k_heads=c.linear_num_key_heads, num_v_heads=c.linear_num_value_heads,
            head_k_dim=c.linear_key_head_dim, head_v_dim=c.linear_value_head_dim,
            conv_size=c.linear_conv_kernel_dim, dtypes=(dtype,), state_dtypes=(torch.float32,),
            dt_bias_dtype=dtype, max_tokens=1 + self.drafts, max_rows=self.rows, index_dtype=torch.int64,
            **CONVENTIONS,
        )  # fmt: skip

    @torch.no_grad()
    def step(self) -> None:
        """Let in what fits, verify a packet of every running request, let go of those that are done."""
        plans = self._admit()
        if plans:
            self._prefill(plans)
        self._decode()
        for row, request in enumerate(self.running):
            if request is not None and request.is_done:
                self.pool.free.append(request.slot)
                self.running[row] = None

    def _admit(self) -> list[Plan]:
        plans: list[Plan] = []
        for row in range(self.rows):
            if self.running[row] is not None or not self.waiting:
                continue
            slot = self.pool.take({plan.source for plan in plans})
            if slot is None:
                break
            request = self.waiting.popleft()
            request.row, request.slot = row, slot
            self.running[row] = request
            plans.append(self._plan(request, plans))
        return plans

    def _plan(self, request: Request, plans: list[Plan]) -> Plan:
        prompt = request.prompt
        n, source = self.pool.find(prompt)
        plan = Plan(request, n, len(prompt), source)
        request.reused = n
        whole = len(prompt) // BLOCK * BLOCK
        kept = {
            tuple(p.request.prompt[: p.keep_at]) for p in plans if p.keep >= 0
        } | self.pool.prefixes.keys()
        if whole > n and tuple(prompt[:whole]) not in kept and self.pool.free:
            plan.keep, plan.keep_at = self.pool.free.pop(), whole
        return plan

    # forward: the model's own modules around two mixers, one for prompts and one for packets

    def _forward(self, tokens: Tensor, positions: Tensor, linear: Any, attention: Any) -> Tensor:
        """Hidden states [B, T, hidden] of tokens at positions [B, T]."""
        body, counts = self.model.model, {"linear_attention": 0, "full_attention": 0}
        x = body.embed_tokens(tokens)
        rope = body.rotary_emb(x, positions[None].expand(3, -1, -1))
        for layer in body.layers:
            index = counts[layer.block_type]
            counts[layer.block_type] += 1
            y = layer.input_layernorm(x)
            if layer.block_type == "linear_attention":
                x = x + self._gated_delta_net(layer.linear_attn, y, partial(linear, index))
            else:
                x = x + self._attention(layer.self_attn, y, rope, partial(attention, index))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return body.norm(x)

    def _gated_delta_net(self, m: Any, x: Tensor, mix: Callable[..., Tensor]) -> Tensor:
        raw = {"a": m.in_proj_a(x), "b": m.in_proj_b(x), "A_log": m.A_log, "dt_bias": m.dt_bias}
        heads = (m.num_k_heads, m.head_k_dim), (m.num_k_heads, m.head_k_dim), (m.num_v_heads, m.head_v_dim)

        def split(mixed: Tensor) -> dict[str, Tensor]:
            parts = mixed.split([h * d for h, d in heads], -1)
            return {n: p.unflatten(-1, size) for n, p, size in zip("qkv", parts, heads, strict=True)} | raw

        o = mix(m.in_proj_qkv(x), m.conv1d.weight[:, 0], split)
        z = m.in_proj_z(x).view_as(o)
        return m.out_proj(gdn.rms_norm_gated(o, z, m.norm.weight, eps=m.layer_norm_epsilon).flatten(-2))

    def _attention(self, m: Any, x: Tensor, rope: Any, mix: Callable[..., Tensor]) -> Tensor:
        q, gate = m.q_proj(x).unflatten(-1, (-1, 2 * m.head_dim)).chunk(2, -1)
        k, v = (f(x).unflatten(-1, (-1, m.head_dim)) for f in (m.k_proj, m.v_proj))
        q, k = rotated(m.q_norm(q), *rope), rotated(m.k_norm(k), *rope)
        return m.o_proj(mix(q, k, v).flatten(-2) * gate.flatten(-2).sigmoid())

    # prompts

    def _prefill(self, plans: list[Plan]) -> None:
        device, counts = self.model.device, [p.last - p.first for p in plans]
        ids = [token for p in plans for token in p.request.prompt[p.first : p.last]]
        at = [n for p in plans for n in range(p.first, p.last)]
        offsets = torch.tensor([0, *counts], device=device).cumsum(0)
        tokens, positions = (torch.tensor([x], device=device) for x in (ids, at))
        mixers = partial(self._linear_prompts, plans, offsets), partial(self._attend_prompts, plans, counts)
        x = self._forward(tokens, positions, *mixers)
        chosen = self.model.lm_head(x[0, offsets[1:] - 1]).argmax(-1).tolist()
        for plan, token in zip(plans, chosen, strict=True):
            request = plan.request
            request.seen = plan.last
            if plan.keep >= 0:
                self.pool.prefixes[tuple(request.prompt[: plan.keep_at])] = plan.keep
            self._emit(request, [token])

    def _linear_prompts(
        self, plans: list[Plan], offsets: Tensor, index: int, qkv: Tensor, weight: Tensor, split: Any
    ) -> Tensor:
        pool, device = self.pool, qkv.device
        windows, states = pool.windows[index], pool.states[index].flatten(0, 1)
        fresh = torch.tensor([p.first == 0 for p in plans], device=device)
        before = torch.stack([windows[p.source][:, pool.columns(p.first)] for p in plans])
        before = before.masked_fill(fresh[:, None, None], 0)
        mixed, after = gdn.causal_conv1d(
            qkv, weight, activation="silu", initial_state=before, output_final_state=True, cu_seqlens=offsets
        )
        for n, (p, start) in enumerate(zip(plans, offsets.tolist(), strict=False)):
            windows[p.request.slot][:, pool.columns(p.last)] = after[n]
            if p.keep >= 0:
                inputs = torch.cat([before[n], qkv[0, start : start + p.keep_at - p.first].t()], 1)
                windows[p.keep][:, pool.columns(p.keep_at)] = inputs[:, 1 - pool.W :]
        kept = [p.keep >= 0 for p in plans]
        snapshots = [p.keep_at - p.first if keeps else -1 for p, keeps in zip(plans, kept, strict=True)]
        return gdn.prefill(
            **split(mixed), **CONVENTIONS, state=states, cu_seqlens=offsets, has_initial_state=~fresh,
            state_index=pool.place((max(p.source, 0) for p in plans), (p.first for p in plans)),
            out_state_index=pool.place((p.request.slot for p in plans), (p.last for p in plans)),
            snapshot_pos=torch.tensor(snapshots, device=device),
            snapshot_index=pool.place((p.keep for p in plans), (max(p.keep_at, 0) for p in plans)),
        )  # fmt: skip

    def _attend_prompts(
        self, plans: list[Plan], counts: list[int], index: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        keys, values, out = self.pool.keys[index], self.pool.values[index], []
        for p, qs, ks, vs in zip(plans, *(x[0].split(counts) for x in (q, k, v)), strict=True):
            slot, n, end = p.request.slot, p.first, p.last
            for cache, new in ((keys, ks), (values, vs)):
                cache[slot, :n] = cache[p.source, :n]
                cache[slot, n:end] = new
                if p.keep >= 0:
                    cache[p.keep, : p.keep_at] = cache[slot, : p.keep_at]
            at = torch.arange(end, device=q.device)
            mask = at[n:, None] >= at
            out.append(attend(qs[None], keys[slot, :end][None], values[slot, :end][None], mask))
        return torch.cat(out, 1)

    # packets

    def _decode(self) -> None:
        packets, slots, seen = [], [], []
        for request in self.running:
            idle = request is None or request.is_done
            packets.append([0] * (1 + self.drafts) if idle else self._packet(request))
            slots.append(-1 if idle else request.slot)
            seen.append(0 if idle else request.seen)
        if max(slots) < 0:
            return
        for buffer, value in ((self.tokens, packets), (self.slots, slots), (self.seen, seen)):
            buffer.copy_(torch.tensor(value))
        self._run()
        for request, packet, tokens in zip(self.running, packets, self.next.tolist(), strict=True):
            if request is not None and not request.is_done:
                self._accept(request, packet, tokens)

    def _packet(self, request: Request) -> list[int]:
        """The last token, and what followed it when it, and the one before it, last came up."""
        text = request.prompt + request.tokens
        for n in (3, 2, 1):
            tail = text[-n:]
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == tail:
                    drafts = text[start + n : start + n + self.drafts]
                    return [text[-1], *drafts, *[0] * (self.drafts - len(drafts))]
        return [text[-1], *[0] * self.drafts]

    def _accept(self, request: Request, packet: list[int], tokens: list[int]) -> None:
        """Drafts hold as long as the model says the same."""
        count = 1
        while count < len(packet) and packet[count] == tokens[count - 1]:
            count += 1
        request.drafted += self.drafts
        request.accepted += count - 1
        count = min(count, request.max_new - len(request.tokens))
        request.seen += count
        self._emit(request, tokens[:count])

    def _emit(self, request: Request, tokens: list[int]) -> None:
        request.tokens += tokens
        self.on_text(request, tokens)

    def _run(self) -> None:
        if self.model.device.type != "cuda":
            self._packets()
            return
        if self.graph is None:
            kept = [x.clone() for x in (self.pool.states, self.pool.windows)]
            self._packets()
            for x, before in zip((self.pool.states, self.pool.windows), kept, strict=True):
                x.copy_(before)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._packets()
        self.graph.replay()

    def _packets(self) -> None:
        """From self.tokens, slots and seen to self.next: the same launches every time."""
        positions = self.seen[:, None] + torch.arange(1 + self.drafts, device=self.seen.device)
        places = torch.where(self.slots < 0, self.pool.slots, self.slots)
        x = self._forward(
            self.tokens, positions, self._linear_packets, partial(self._attend_packets, positions, places)
        )
        self.next.copy_(self.model.lm_head(x).argmax(-1))

    def _linear_packets(self, index: int, qkv: Tensor, weight: Tensor, split: Any) -> Tensor:
        mixed = gdn.causal_conv1d_update(
            qkv,
            self.pool.windows[index],
            weight,
            activation="silu",
            state_index=self.slots,
            ring_pos=self.seen,
        )
        return gdn.decode(
            **split(mixed),
            **CONVENTIONS,
            state=self.pool.states[index],
            read_index=self.slots,
            ring_pos=self.seen,
            write="all",
        )

    def _attend_packets(
        self, positions: Tensor, places: Tensor, index: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        keys, values = self.pool.keys[index], self.pool.values[index]
        keys[places[:, None], positions], values[places[:, None], positions] = k, v
        at = torch.arange(self.pool.max_len, device=q.device)
        return attend(q, keys[places], values[places], at <= positions[:, :, None])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention, q [B, T, heads, D], k and v [B, keys, fewer, D]; mask [B, T, keys] or [T, keys]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = mask if mask.dim() == 2 else mask[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the first dimensions of each head."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos[:, :, None] + torch.cat([-second, first], -1) * sin[:, :, None]
    return torch.cat([turned, rest], -1)


def build(device: str, dtype: torch.dtype, spread: float) -> Any:
    """A Qwen3.5 text model with random weights of that standard deviation, a token per byte."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging

    logging.set_verbosity_error()
    config = Qwen3_5TextConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, tie_word_embeddings=True, initializer_range=spread,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config).to(device, dtype).eval()
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            # as engines hold it, and warmup expects
            layer.linear_attn.A_log.data = layer.linear_attn.A_log.data.float()
    return model


def readable(tokens: list[int]) -> str:
    return "".join(c if c.isprintable() else "." for c in bytes(tokens).decode("latin-1"))


class Screen:
    """A line for each request, rewritten in place on a terminal. Elsewhere a line for each step, with what
    every request got, and the requests at the end."""

    def __init__(self) -> None:
        self.is_live, self.drawn = sys.stdout.isatty(), 0
        self.said: dict[int, int] = {}  # tokens of each request that were printed

    def draw(self, requests: list[Request], pool: Pool, is_last: bool = False) -> None:
        if not self.is_live and not is_last:
            texts = [(n, readable(r.tokens[self.said.get(n, 0) :])) for n, r in enumerate(requests)]
            self.said = {n: len(r.tokens) for n, r in enumerate(requests)}
            print(pool, *(f" {n}: {text}" for n, text in texts if text), flush=True)
            return
        lines = [str(pool)]
        for number, r in enumerate(requests):
            shown = readable(r.tokens)[-60:]
            state = "done" if r.is_done else "runs" if r.slot >= 0 else "waits"
            about = f"{r.reused:4} reused {r.accepted:4}/{r.drafted} drafts"
            lines.append(f"{number:2} {state:5} {len(r.tokens):4} tokens {about}  {shown}")
        if self.is_live and self.drawn:
            print(f"\x1b[{self.drawn}A", end="")
        print("\n".join(f"{line}\x1b[K" if self.is_live else line for line in lines), flush=True)
        self.drawn = len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (("requests", 8), ("new", 48), ("slots", 10), ("rows", 4), ("drafts", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    # at 0.02 the model says one byte again and again and every draft holds, at 0.1 none does
    parser.add_argument("--spread", type=float, default=0.045)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = build(args.device, dtype, args.spread)
    engine, start = Engine(model, slots=args.slots, rows=args.rows, drafts=args.drafts), time.perf_counter()
    calls = engine.warmup()
    compiled = sum("compiled" in call for call in calls)
    print(f"warmup: {len(calls)} calls, {compiled} compiled, {time.perf_counter() - start:.1f} s", flush=True)
    prompts = [SHARED + QUESTIONS[n % len(QUESTIONS)] for n in range(args.requests)]
    requests = [engine.add(list(prompt.encode()), args.new) for prompt in prompts]
    screen, start, steps = Screen(), time.perf_counter(), 0
    while not engine.is_idle:
        engine.step()
        steps += 1
        screen.draw(requests, engine.pool)
    seconds = time.perf_counter() - start
    screen.draw(requests, engine.pool, is_last=True)
    count, held = sum(len(r.tokens) for r in requests), sum(r.accepted for r in requests)
    print(
        f"{count} tokens in {steps} steps, {held} of {sum(r.drafted for r in requests)} drafts accepted, "
        f"{seconds:.2f} s, {count / seconds:.0f} tokens/s on {args.device}"
    )


if __name__ == "__main__":
    main()
