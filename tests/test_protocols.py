"""Run engines side by side: each uses another protocol, and all see the same drafts and accept the same.

After any sequence of packets, accepted counts and prompts, all hold the state of plain decoding: bit for bit
if a protocol stores states, within rounding if it replays them.
"""

import hypothesis
import torch
from hypothesis import strategies as st
from kit import api
from kit.serving import error, inputs, pool_of, same_bits

import gdn

ROWS, MOST, PLACES = 2, 4, 9  # requests, drafts of a packet, places of a history


class Engine:
    """Hold a pool with one request per row, which starts from the given states."""

    def __init__(self, states, backend):
        self.backend, self.device = backend, states.device
        self.rows = torch.arange(ROWS, device=states.device)
        self.start(states)

    def ints(self, values):
        return torch.tensor(values, device=self.device)

    def prompt(self, x, row):
        """Prefill a new prompt in a row's place, into the protocol's own state; other rows keep theirs."""
        state = self.states()
        cu = self.ints([0, x["q"].shape[1]])
        fresh = torch.zeros(1, dtype=torch.bool, device=self.device)
        api.prefill(
            **x, state=state, cu_seqlens=cu, state_index=self.rows[row : row + 1], has_initial_state=fresh,
            backend=self.backend,
        )  # fmt: skip
        self.start(state)


class Plain(Engine):
    """Decode accepted tokens only."""

    def start(self, states):
        self.pool = states.clone()

    def states(self):
        return self.pool.clone()

    def verify(self, x):
        self.drafts = x
        return api.decode(**x, state=self.pool, write="none", backend=self.backend)

    def accept(self, counts):
        for n, count in enumerate(counts):
            row = {name: v[n : n + 1, :count] for name, v in self.drafts.items()}
            api.decode(**row, state=self.pool, read_index=self.rows[n : n + 1], backend=self.backend)


class Ring(Engine):
    """Keep states by P1, as lmdeploy does."""

    def start(self, states):
        self.ring = torch.full((ROWS, MOST, *states.shape[1:]), float("nan"), device=self.device)
        self.lengths = self.ints([7, 2])
        self.ring[self.rows, self.lengths % MOST] = states

    def states(self):
        return self.ring[self.rows, self.lengths % MOST].clone()

    def verify(self, x):
        return api.decode(
            **x, state=self.ring, ring_pos=self.lengths, write="all", round_state=True, backend=self.backend
        )

    def accept(self, counts):
        # at least one token of a packet is accepted, the one that the target model adds
        self.lengths += self.ints(counts)


class Table(Engine):
    """Keep states by P2, as vLLM does, with slot 0 for padding."""

    def start(self, states):
        self.pool = torch.full((ROWS * MOST + 1, *states.shape[1:]), float("nan"), device=self.device)
        self.table = 1 + torch.arange(ROWS * MOST, device=self.device).view(ROWS, MOST)
        self.accepted = self.ints([3, 1])
        self.pool[self.table[self.rows, self.accepted - 1]] = states

    def states(self):
        return self.pool[self.table[self.rows, self.accepted - 1]].clone()

    def verify(self, x):
        return api.decode(
            **x, state=self.pool, read_index=self.table, num_accepted=self.accepted, write_index=self.table,
            write="all", null_slot=0, backend=self.backend,
        )  # fmt: skip

    def accept(self, counts):
        self.accepted = self.ints(counts)


class Intermediate(Plain):
    """Keep states by P3, as SGLang and FlashInfer do."""

    def verify(self, x):
        self.kept = torch.full((ROWS, MOST, *self.pool.shape[1:]), float("nan"), device=self.device)
        return api.decode(**x, state=self.pool, write="none", intermediate=self.kept, backend=self.backend)

    def accept(self, counts):
        gdn.commit(self.pool[None], self.kept[None], self.rows, self.rows, self.ints(counts) - 1)


class Tree(Intermediate):
    """Keep states by P4 on a chain with a second guess at every token: token 2 t + 1 is wrong."""

    def verify(self, x):
        T = x["q"].shape[1]
        twice = {name: v.repeat_interleave(2, 1) for name, v in x.items()}
        twice["v"][:, 1::2] += 1
        before = torch.arange(2 * T, device=self.device) // 2 * 2 - 2
        self.kept = torch.full((ROWS, 2 * MOST, *self.pool.shape[1:]), float("nan"), device=self.device)
        return api.decode(
            **twice, state=self.pool, write="none", intermediate=self.kept,
            parent=before.clamp(min=-1).expand(ROWS, -1), backend=self.backend,
        )[:, ::2]  # fmt: skip

    def accept(self, counts):
        gdn.commit(self.pool[None], self.kept[None], self.rows, self.rows, 2 * (self.ints(counts) - 1))


class Replay(Engine):
    """Keep tokens by P5, as TensorRT-LLM does."""

    def start(self, states):
        self.pool = states.clone()
        nothing = lambda *sizes: torch.full((ROWS, PLACES, *sizes), float("nan"), device=self.device)  # noqa: E731
        self.history = {"history_u": nothing(4, 24), "history_k": nothing(2, 16)}
        self.history["history_G"] = nothing(4).double()
        self.cursor = torch.zeros(ROWS, dtype=torch.int32, device=self.device)

    def states(self):
        self.accept([0] * ROWS, room=PLACES)
        return self.pool.clone()

    def verify(self, x):
        return api.replay_decode(
            **x, state=self.pool, **self.history, cursor=self.cursor, backend=self.backend
        )

    def accept(self, counts, room=MOST):
        layers = {name: v[None] for name, v in self.history.items()}
        api.replay_commit(
            self.pool[None], **layers, cursor=self.cursor, index=self.rows, accepted=self.ints(counts),
            room=room, backend=self.backend,
        )  # fmt: skip


packets = st.integers(1, MOST).flatmap(lambda T: st.tuples(st.just(T), *[st.integers(1, T)] * ROWS))
prompts = st.tuples(st.just("prompt"), st.integers(0, ROWS - 1), st.integers(1, 70))


def run_engines(backend, device, steps, engines=(Ring, Table, Intermediate, Tree, Replay)):
    states = pool_of(ROWS).to(device)
    plain, others = Plain(states, backend), [engine(states, backend) for engine in engines]
    for kind, *rest in steps:
        if kind == "prompt":
            row, tokens = rest
            x = {name: v.to(device) for name, v in inputs(1, tokens).items()}
            for engine in (plain, *others):
                engine.prompt(x, row)
            continue
        x = {name: v.to(device) for name, v in inputs(ROWS, kind).items()}
        expected = plain.verify(x)
        for engine in others:
            o, name = engine.verify(x), type(engine).__name__
            assert error(o, expected) <= 1e-5 if name == "Replay" else same_bits(o, expected), name
        for engine in (plain, *others):
            engine.accept(rest)
    for engine in others:
        name = type(engine).__name__
        found, expected = engine.states(), plain.states()
        assert error(found, expected) <= 1e-5 if name == "Replay" else same_bits(found, expected), name


def test_any_packets_and_prompts(backend, device, monkeypatch):
    monkeypatch.setenv("GDN_BACKEND", backend)

    @hypothesis.settings(max_examples=60 if backend == "eager" else 15)
    @hypothesis.given(st.lists(st.one_of(packets, packets, packets, prompts), min_size=1, max_size=6))
    def check(steps):
        torch.manual_seed(len(steps))
        run_engines(backend, device, steps)

    check()


def test_a_wrong_engine_is_found(backend, device, monkeypatch):
    """The comparison finds an engine that accepts a token too many."""
    monkeypatch.setenv("GDN_BACKEND", backend)

    class Greedy(Replay):
        def accept(self, counts, room=MOST):
            super().accept([c + (room == MOST) for c in counts], room)

    steps = [(4, 1, 2), (3, 2, 1)]
    run_engines(backend, device, steps)
    try:
        run_engines(backend, device, steps, (Greedy,))
    except AssertionError:
        return
    raise AssertionError("not found")
