"""Test a serving loop in its steady state: it allocates nothing, waits for nothing, and replays graphs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from kit import adapters, api
from kit.serving import B, R, T, inputs, moved, nothing_waits, pool_of, protocols, same_bits, step_of
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import gdn

BF16 = torch.bfloat16


@pytest.fixture
def served(backend, monkeypatch):
    """Make the fixture's backend that of calls that name none, since `commit` has no argument for it."""
    monkeypatch.setenv("GDN_BACKEND", backend)


# memory


@pytest.fixture
def asked(triton_device, monkeypatch):
    """Return a function that counts a call's allocations. Kernels that would be interpreted do not run."""
    if triton_device != "cpu":

        def count(call):
            before = torch.cuda.memory_stats(triton_device)["allocation.all.allocated"]
            call()
            return torch.cuda.memory_stats(triton_device)["allocation.all.allocated"] - before

        return count
    from gdn.backends.triton.launch import Launch

    launched: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *tensors: launched.append(self))

    def count(call):
        launched.clear()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            call()
        assert launched
        return sum(event.self_cpu_memory_usage > 0 for event in seen.events())

    return count


def histories(*lead, K=16, V=24):
    """Return empty histories of 8 places, for 2 key heads and 4 value heads."""
    return {
        "history_u": torch.zeros(*lead, 8, 4, V), "history_k": torch.zeros(*lead, 8, 2, K),
        "history_G": torch.zeros(*lead, 8, 4, dtype=torch.float64),
        "cursor": torch.zeros(lead[-1], dtype=torch.int32),
    }  # fmt: skip


def a_step():
    """Return the arguments of a layer's whole step of B rows by name, and a tensor like its output."""
    x, options = step_of(B, 2, 4, 16, 24, 4, BF16)
    return x | options, torch.empty(B, 4, 24, dtype=BF16)


def claims():
    """Return function, arguments and a tensor like the output by name; None for a call without an output."""
    found: dict[str, tuple[Any, dict[str, Any], torch.Tensor | None]] = {}
    for name, how in protocols(torch.int32).items():
        x = inputs(B, T)
        found[name] = api.decode, x | how, x["v"]
    rows, pool = torch.arange(B, dtype=torch.int32), pool_of(B)
    x = inputs(B, 1, dtype=BF16, raw=True)
    found["one token"] = api.decode, x | {"state": pool, "read_index": rows}, x["v"]
    x = inputs(1, 7, dtype=BF16)
    spans = {"cu_seqlens": torch.tensor([0, 3, 3, 7], dtype=torch.int32), "max_seqlen": 4}
    found["packed rows"] = api.decode, x | spans | {"state": pool_of(3)}, x["v"]
    x = inputs(B, T + 3, dtype=BF16)
    found["chunk form"] = api.decode, x | {"state": pool, "exact_packet": False}, x["v"]
    found["replay"] = api.replay_decode, x | histories(B) | {"state": pool, "read_index": rows}, x["v"]
    step, like = a_step()
    given = {name: step[name] for name in ("mixed_qkv", "a", "b", "A_log", "dt_bias", "state", "read_index")}
    sizes = {"num_k_heads": 2, "head_k_dim": 16, "head_v_dim": 24}
    found["projection"] = api.decode_packed, given | sizes, like
    kept = {"state": pool_of(2, B)} | histories(2, B) | {"index": rows, "accepted": rows, "room": 3}
    found["replay's commit"] = api.replay_commit, kept, None
    steps = {"step": rows % T, "extra_dst_index": rows + B, "extra_step": rows % 2}
    moves = {"dst": pool_of(2, 2 * B), "src": pool_of(2, B, T), "dst_index": rows, "src_row": rows} | steps
    found["commit"] = gdn.commit, moves, None
    return found


@pytest.mark.interpret
@pytest.mark.parametrize("name", list(claims()))
def test_no_memory_is_asked_for_with_out(name, asked, triton_device, monkeypatch):
    """A call on a pool allocates its output alone, and nothing with `out`, as docs/serving.md states."""
    monkeypatch.setenv("GDN_BACKEND", "triton")
    function, x, like = claims()[name]
    x = moved(x, triton_device)
    where = {} if like is None else {"out": torch.empty_like(like, device=triton_device)}
    function(**x, **where)
    assert [asked(lambda: function(**x, **where)) for _ in range(2)] == [0, 0]
    if where:
        function(**x)
        assert asked(lambda: function(**x)) == 1, "what counts can count"


@pytest.mark.interpret
def test_a_whole_step_asks_for_what_its_launches_hand_on(asked, triton_device, monkeypatch):
    monkeypatch.setenv("GDN_BACKEND", "triton")
    x, like = a_step()
    x |= {"out": torch.empty_like(like)}
    x = moved(x, triton_device)
    api.decode_step(**x)
    assert asked(lambda: api.decode_step(**x)) <= 1


# waiting


class Waits(TorchDispatchMode):
    """Record the operators that would read from a GPU; operators inside gdn's own are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        places = args[1] if name in ("index", "index_put", "index_put_") else ()
        by_mask = any(x is not None and x.dtype == torch.bool for x in places)
        if by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.found.append(name)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", adapters.CALLS)
def test_adapters_wait_for_nothing(name, backend, device, served):
    """No adapter reads from the device: on a GPU PyTorch would raise, on a CPU operators are recorded."""
    make, arguments = adapters.CALLS[name]
    with torch.device(device):
        call = make(*arguments)
    call()
    if device == "cpu":
        with Waits() as waits:
            call()
        assert waits.found == []
        return
    with nothing_waits():
        call()


def test_waits_are_seen():
    x = torch.randn(5)
    with Waits() as waits:
        x[x > 0] = 1
        x[x > 0].sum().item()
        x[torch.arange(2)], bool(x.any()), x.clamp(0)
    assert waits.found == ["index_put_", "index", "_local_scalar_dense", "_local_scalar_dense"]


# graphs


class Day(NamedTuple):
    """Hold one step of an engine, and the values that change from step to step."""

    call: Callable[[dict[str, Any], dict[str, Any]], None]  # with `written`, and the indices of a step
    written: dict[str, torch.Tensor]
    indices: dict[str, torch.Tensor]  # [steps, ...]


ROWS = 6


def day(name, steps, device):
    """Return steps with distinct slots in any order, two of them padding, and counts in and out of range."""
    sizes, count = {"H": 2, "HV": 4, "K": 32, "V": 32}, ROWS * T
    order = torch.rand(steps, count + 2).argsort(1) - 1
    table = order[:, :count].view(steps, ROWS, T)
    slots, draw = table[..., 0], lambda low, high, *shape: torch.randint(low, high, (steps, ROWS, *shape))
    states = lambda *lead: pool_of(*lead, HV=4, K=32, V=32)  # noqa: E731
    pool = {"state": states(count)}
    x = moved(inputs(ROWS, 1 if name in ("one token", "history") else T, **sizes, dtype=BF16), device)

    def decode(w, at, **options):
        api.decode(**x, **w, **at, **options)

    def verify(w, at):
        """Read the pool (P3, P4), then write the accepted states to it."""
        where = {key: at[key] for key in ("read_index", "intermediate_row", "parent") if key in at}
        decode(w, where, write="none")
        layer = w["state"][None], w["intermediate"][None]
        gdn.commit(*layer, at["read_index"], at["intermediate_row"], at["step"])

    def replay(w, at):
        api.replay_decode(**x, **w, read_index=at["index"])
        layer = {key: w[key][None] for key in ("state", "history_u", "history_k", "history_G")}
        api.replay_commit(**layer, cursor=w["cursor"], **at, room=T)

    def append(w, at):
        """Add a token to the history of each row; a history of 8 places is folded at its eighth token."""
        names = ("state", "history_u", "history_k", "history_G", "cursor")
        kept = gdn.HistoryPool(*(w[key] for key in names))
        api.decode_with_history(**x, **at, pool=kept, out=w["out"], use_history=True)

    kept = {"intermediate": states(ROWS, T)}
    tree = {"intermediate_row": torch.rand(steps, ROWS).argsort(1), "step": draw(-1, T + 1)}
    tree["read_index"] = slots
    past = histories(count, K=32, V=32)
    every = lambda w, at: decode(w, at, write="all")  # noqa: E731
    if name == "step":
        whole, options = step_of(ROWS, 2, 4, 32, 32, 4, BF16, slots=count)
        written = {key: whole.pop(key) for key in ("conv_state", "state")}
        whole = moved(whole, device)
        del whole["read_index"]
        indices = {"read_index": slots, "conv_index": torch.rand(steps, count).argsort(1)[:, :ROWS]}
        found = lambda w, at: api.decode_step(**whole, **options, **w, **at)  # noqa: E731
    elif name == "rows of any length":
        ends = torch.cat([torch.zeros(steps, 1, dtype=torch.int64), draw(0, T + 1).cumsum(1)], 1)
        x = {key: v.reshape(1, count, *v.shape[2:]) for key, v in x.items()}
        written, indices = pool, {"read_index": slots, "cu_seqlens": ends.int()}
        found = lambda w, at: decode(w, at, max_seqlen=T)  # noqa: E731
    else:
        found, written, indices = {
            "one token": (decode, pool, {"read_index": slots}),
            "P1": (every, {"state": states(count, R)}, {"read_index": slots, "ring_pos": draw(-9, 99)}),
            "P2": (
                every, pool, {"read_index": table, "write_index": table, "num_accepted": draw(-1, T + 2)},
            ),
            "P3": (verify, pool | kept, tree),
            "P4": (verify, pool | kept, tree | {"parent": draw(-2, T, T)}),
            "P5": (replay, pool | past, {"index": slots, "accepted": draw(-1, T + 2)}),
            "P6": (decode, pool, {"read_index": slots, "write_index": table[..., 1]}),
            "history": (
                append, pool | past | {"cursor": torch.zeros(count, 3, dtype=torch.int32)},
                {"read_index": slots},
            ),
        }[name]  # fmt: skip
    out = torch.zeros(ROWS, 4, 32) if name == "step" else torch.zeros(x["v"].shape)
    return Day(found, moved(written | {"out": out.to(BF16)}, device), moved(indices, device))


DAYS = ["one token", "rows of any length", "P1", "P2", "P3", "P4", "P5", "P6", "history", "step"]


def strays(name, steps, device, follows=True):
    """Return the first replay among 20, and the last, whose bits differ from the same calls made one by one.

    On a CPU a replay is a call. With follows=False the captured step does not see its indices change.
    """
    today = day(name, steps, device)
    now = {key: v[0].clone() for key, v in today.indices.items()}
    captured = now if follows else moved(now, device)
    graphed, plain = (moved(today.written, device) for _ in range(2))
    replay: Callable[[], Any] = lambda: today.call(graphed, captured)  # noqa: E731
    if device != "cpu":
        today.call(moved(graphed, device), captured)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replay()
        replay = graph.replay
    looked_at = {*torch.randperm(steps)[:20].tolist(), steps - 1}
    for i in range(steps):
        for key, v in today.indices.items():
            now[key].copy_(v[i])
        replay()
        today.call(plain, now)
        if i in looked_at:
            for key, v in plain.items():
                if not same_bits(graphed[key], v):
                    return f"{key} after replay {i}"
    unmoved = [key for key, v in plain.items() if same_bits(v, today.written[key])]
    assert not unmoved and all(v.isfinite().all() for v in plain.values())
    return None


@pytest.mark.parametrize("name", DAYS)
def test_10000_replays_of_a_graph_with_changing_indices(name, backend, device, served):
    """One captured step has the right bits for all slots, positions, counts and trees of an engine's day."""
    assert strays(name, 40 if device == "cpu" else 10_000, device) is None
    assert strays(name, 40, device, follows=False) is not None


# launches that start while others run


@pytest.mark.gpu
def test_streams_that_fork_and_join():
    """Decodes on two pools on two streams, then one that reads both outputs, equal the calls in order."""
    x = moved(inputs(2, 1, 16, 32, 128, 128, dtype=BF16, raw=True), "cuda")
    pools = [pool_of(2, HV=32, K=128, V=128, dtype=BF16).cuda() for _ in range(2)]
    side = torch.cuda.Stream()

    def step(pool, v):
        return api.decode(**x | {"v": v}, state=pool)

    def apart(pools):
        side.wait_stream(torch.cuda.current_stream())
        one = step(pools[0], x["v"])
        with torch.cuda.stream(side):
            other = step(pools[1], x["v"])
        torch.cuda.current_stream().wait_stream(side)
        return step(pools[0], one + other)

    def in_order(pools):
        return step(pools[0], step(pools[0], x["v"]) + step(pools[1], x["v"]))

    copies = [pool.clone() for pool in pools]
    apart([pool.clone() for pool in pools])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = apart(pools)
    for _ in range(200):
        graph.replay()
        wanted = in_order(copies)
    assert same_bits(found, wanted)
    assert all(same_bits(a, b) for a, b in zip(pools, copies, strict=True))
