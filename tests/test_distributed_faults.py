"""Check what ranks raise where they disagree, where one refuses its call, and where one dies."""

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from kit import forks
from kit import ranks as kit
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import gdn
from gdn.distributed import check, cost
from gdn.distributed.simulate import Work

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")

SIZES = {"T": 10, "H": 2, "HV": 4, "K": 8, "V": 8}


def call(context: Any, **options: Any) -> torch.Tensor:
    """Call the rule on tensors of ones."""
    sizes = SIZES | {n: options.pop(n) for n in SIZES if n in options}
    T, H, HV, K, V = sizes.values()
    dtype = options.pop("dtype", torch.float32)
    q = torch.ones(1, T, H, K, dtype=dtype, requires_grad=options.pop("requires_grad", True))
    v = torch.ones(1, T, HV, V, dtype=dtype)
    return gdn.chunk_gated_delta_rule(
        q, q, v, use_qk_l2norm_in_kernel=True, cp_context=context, **options
    )[0]  # fmt: skip


def raised(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# what rank 1 does otherwise -> the message of all ranks
DISAGREEMENTS: list[tuple[dict[str, Any], str]] = [
    ({"HV": 2}, "got HV=4 on ranks 0, 2 and HV=2 on rank 1"),
    ({"T": 7}, "got num_tokens=30 on ranks 0, 2 and num_tokens=21 on rank 1"),
    ({"dtype": torch.float64}, "got dtype=float32 on ranks 0, 2 and dtype=float64 on rank 1"),
    ({"requires_grad": False}, "got requires_grad=True on ranks 0, 2 and requires_grad=False on rank 1"),
    ({"output_final_state": True}, "got output_final_state=False on ranks 0, 2 and output_final_state=True"),
    ({"scale": 0.5}, r"got scale=0\.35\d* on ranks 0, 2 and scale=0\.5 on rank 1"),
    ({"g": torch.zeros(1, 10, 4, 8)},
     "got decay per key channel=False on ranks 0, 2 and decay per key channel=True on rank 1"),
    ({"exchange": "owner"}, "got exchange=gather on ranks 0, 2 and exchange=owner on rank 1"),
    ({"cu_seqlens": (0, 12, 30)}, "got one cu_seqlens on ranks 0, 2 and another cu_seqlens on rank 1"),
    ({"runs": [(1, 0, 10), (0, 10, 20), (2, 20, 30)]},
     "got one runs on ranks 0, 2 and another runs on rank 1"),
    ({"operation": "unshard"}, "got operation=chunk_gated_delta_rule on ranks 0, 2 and operation=unshard on"),
]  # fmt: skip


def disagree(rank: int, change: dict[str, Any]) -> str:
    """Make one call, which rank 1 changes; return what it raises."""
    same = {"g": torch.zeros(1, 10, 4)} if "g" in change else {}
    change = dict(change) if rank == 1 else same
    runs = change.pop("runs", [(0, 0, 10), (1, 10, 20), (2, 20, 30)])
    order = {"runs": runs} if change.get("T") is None and rank != 1 or "T" not in change else {}
    context = gdn.ContextParallel(dist.group.WORLD, exchange=change.pop("exchange", "gather"), **order)
    if change.pop("operation", None):
        return raised(lambda: context.unshard(torch.ones(10), 0))
    if "cu_seqlens" in change:
        change["cu_seqlens"] = torch.tensor(change["cu_seqlens"])
    elif rank != 1:
        change["cu_seqlens"] = None
    return raised(lambda: call(context, **change))


@pytest.mark.parametrize(("change", "message"), DISAGREEMENTS, ids=[next(iter(x)) for x, _ in DISAGREEMENTS])
def test_ranks_that_disagree_raise_the_same_message(ranks, change, message):
    first, *others = ranks.run(disagree, change)
    wanted = f"ValueError: cp_context: expected the same call on all ranks, {message}"
    assert re.match(wanted, first), first
    assert all(other == first for other in others)
    # the group is as it was: a call that all ranks make alike works
    assert ranks.run(disagree, {}) == ["nothing"] * 3


def refuse(rank: int, change: dict[str, Any], is_refused: int) -> tuple[str, float]:
    context = gdn.ContextParallel(dist.group.WORLD, num_tokens=30, check="call")
    call(context)
    started = time.monotonic()
    return raised(lambda: call(context, **(change if rank == is_refused else {}))), time.monotonic() - started


def test_the_others_raise_where_a_rank_refuses(ranks):
    change = {"T": 9}
    own = "q: expected 10 tokens, runs of rank 2 in cp_context, got 9"
    (zero, _), (one, _), (two, seconds) = ranks.run(refuse, change, 2)
    assert two == f"ValueError: {own}" and seconds < 5
    assert zero == one
    assert (
        zero == f"RuntimeError: cp_context: expected a valid call on all ranks, got an error on rank 2: {two}"
    )
    assert ranks.run(disagree, {}) == ["nothing"] * 3


def test_errors_name_the_argument(ranks):
    ranks.run(refused_arguments)


def refused_arguments(rank: int) -> None:
    """Make calls that all ranks refuse alike."""
    world = dist.group.WORLD
    context = gdn.ContextParallel(world, num_tokens=30)
    make = gdn.ContextParallel
    cases: list[tuple[Any, str]] = [
        (lambda: make("cp"), "TypeError: mesh: expected a DeviceMesh or a ProcessGroup, got str"),
        (lambda: make(world, order="ring"), "ValueError: order: expected one of None, 'contiguous'"),
        (lambda: make(world, exchange="ring"), "ValueError: exchange: expected one of None"),
        (lambda: make(world, exchange="nodes"), "ValueError: exchange: expected a mesh of two dimensions"),
        (lambda: make(world, check="often"), "ValueError: check: expected one of 'plan'"),
        (lambda: make(world, num_tokens=0), "ValueError: num_tokens: expected at least 1, got 0"),
        (lambda: make(world, num_tokens=1.5), "TypeError: num_tokens: expected an int, got float"),
        (lambda: make(world, order="headtail", runs=[(0, 0, 5)]),
         "ValueError: order: expected None with runs, got 'headtail'"),
        (lambda: make(world, runs=[(0, 0, 5)], num_tokens=6), "ValueError: num_tokens: expected 5"),
        (lambda: call(context, cu_seqlens=torch.tensor([0, 10])),
         "ValueError: cu_seqlens: expected global offsets ending at 30, got 10; give those before sharding"),
        (lambda: call(context, cu_seqlens=torch.tensor([0, 9, 8, 30])),
         "ValueError: cu_seqlens: expected non-decreasing offsets, got 9 then 8 at position 1"),
        (lambda: call(context, cu_seqlens_cpu=torch.tensor([0, 30])),
         "ValueError: cu_seqlens_cpu: expected None without cu_seqlens"),
        (lambda: call(context, initial_state=torch.zeros(2, 4, 8, 8)),
         "ValueError: initial_state: expected shape [N=1, HV=4, K=8, V=8], got [2, 4, 8, 8]"),
        (lambda: call(make(world, exchange="heads", num_tokens=30)),
         "ValueError: exchange: expected at most 2 ranks for 2 key heads, got 3; 'owner' has no such limit"),
        (lambda: call(context, backend="hopper"), "NotImplementedError: no backend supports this call"),
        (lambda: context.gather_states(torch.zeros(2, 3)),
         f"ValueError: states: expected 1 rows, pieces of rank {rank} in cp_context, got 2"),
        (lambda: context.convert(torch.zeros(10), 0, to=make(world, num_tokens=31)),
         "ValueError: to: expected 30 tokens on 3 ranks, got 31 on 3"),
        (lambda: gdn.fused_recurrent_gated_delta_rule(*[torch.ones(1, 10, 2, 8)] * 3, cp_context=context),
         "NotImplementedError: cp_context: expected None, got a context; only chunk_gated_delta_rule"),
        (lambda: gdn.causal_conv1d(torch.ones(1, 10, 2), torch.ones(2, 4), cp_context=context,
                                   state=torch.zeros(1, 2, 3)),
         "NotImplementedError: state: expected None with cp_context, got one"),
        (lambda: gdn.causal_conv1d(torch.ones(1, 9, 2), torch.ones(2, 4), cp_context=context),
         f"ValueError: x: expected 10 tokens, runs of rank {rank} in cp_context, got 9"),
    ]  # fmt: skip
    for function, message in cases:
        got = raised(function)
        assert got.startswith(message), f"{got}\nexpected\n{message}"


GROUPS: dict[tuple[int, ...], Any] = {}


def make_groups(rank: int) -> None:
    """Make groups of some ranks; all four ranks have to make each."""
    for members in ((0, 1), (0, 1, 2), (0, 1, 3)):
        GROUPS[members] = dist.new_group(members, timeout=kit.seconds(5))


def refuse_known(rank: int) -> tuple[str, float]:
    """Make a call that all ranks know, which rank 1 refuses."""
    context = gdn.ContextParallel(GROUPS[0, 1], num_tokens=20)
    call(context)
    started = time.monotonic()
    return raised(lambda: call(context, T=9 if rank == 1 else 10)), time.monotonic() - started


def die(rank: int, victims: list[int], when: str) -> tuple[str, float]:
    """Kill the last rank of a group before the exchange of a forward or of a backward."""
    group = GROUPS[tuple(victims)]
    context = gdn.ContextParallel(group, num_tokens=10 * len(victims), exchange="owner")
    call(context).sum().backward()
    dist.barrier(group)
    started = time.monotonic()

    def step() -> None:
        if rank == victims[-1] and when == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        o = call(context)
        if rank == victims[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        o.sum().backward()

    return raised(step), time.monotonic() - started


def test_the_others_raise_where_a_rank_is_killed():
    with kit.started(4, timeout=5) as ranks:
        ranks.run(make_groups)
        # with a plan that the others know, only their timeout tells; a rank that refuses raises by itself
        (_, (zero, waited)), (_, (one, seconds)) = ranks.outcomes(refuse_known, only=[0, 1])
        assert one == "ValueError: q: expected 10 tokens, runs of rank 1 in cp_context, got 9"
        assert "Error" in zero and max(seconds, waited) < 10, (zero, waited, seconds)
        for victim, when in ((3, "backward"), (2, "forward")):
            outcomes = ranks.outcomes(die, [0, 1, victim], when, only=[0, 1, victim])
            assert [ok for ok, _ in outcomes] == [True, True, False], outcomes
            assert "exit code -9" in outcomes[2][1]
            for _, (error, seconds) in outcomes[:2]:
                assert "Error" in error and seconds < 10, (error, seconds)
        # a function that hangs ends its rank and shows the stacks of its threads
        ((ok, text),) = ranks.outcomes(hang, limit=1, only=[0])
        assert not ok and "Timeout" in text and "in hang" in text
        processes = ranks.processes
    assert not any(process.is_alive() for process in processes)


# an interpreter that makes its group before it uses a context, whose imports are only then run
ENDS = """
import gc, weakref
import torch, gdn
from torch import distributed as dist

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
context = gdn.ContextParallel(dist.group.WORLD)
from gdn.distributed import check

q = torch.ones(1, 10, 2, 8, requires_grad=True)
gdn.chunk_gated_delta_rule(q, q, q, use_qk_l2norm_in_kernel=True, cp_context=context)[0].sum().backward()
whole = weakref.ref(dist.group.WORLD)
signatures = weakref.ref(check.signature_group(dist.group.WORLD))
"""


def test_groups_end_before_the_interpreter():
    """A thread of gloo that ends a tensor while the interpreter ends aborts the process."""
    code = ENDS + "dist.destroy_process_group(); del context; gc.collect(); print(whole(), signatures())"
    done = forks.python("-c", code)
    assert (done.returncode, done.stdout) == (0, "None None\n"), done.stderr
    # a group that is kept keeps its own threads, not ours
    code = "import atexit; atexit.register(lambda: print(whole() is None, signatures()))" + ENDS
    done = forks.python("-c", code)
    assert (done.returncode, done.stdout) == (0, "False None\n"), done.stderr


def hang(rank: int, seconds: float = 60) -> None:
    time.sleep(seconds)


def test_ranks_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from kit import ranks\n"
        "if __name__ == '__main__':\n"
        "    started = ranks.Ranks(1)\n"
        "    print(started.processes[0].pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 10
    while _is_running(child):
        assert time.monotonic() < end, "the rank outlived its parent"
        time.sleep(0.1)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_signature_has_a_fixed_size_and_reads_back():
    words = (
        ("T", 3),
        ("dtype", torch.bfloat16),
        ("scale", 0.25),
        ("is_on", True),
        ("runs", check.Hashed(((0, 1),))),
    )
    words += (("flags", check.Flags(("a", "b"), (True, False))), ("exchange", "owner"))
    encoded = check.Signature("unshard", words).encode()
    assert len(encoded) == check.NUM_WORDS and torch.tensor(encoded).dtype == torch.int64
    shown = [check.decode(word, example) for word, (_, example) in zip(encoded[3:], words, strict=False)]
    assert shown[:5] == ["3", "bfloat16", "0.25", "True", None] and shown[6] == "owner"
    assert check.Signature("unshard", words).differences([encoded] * 3) is None
    other = [*encoded[:8], encoded[8] ^ 2, *encoded[9:]]
    message = check.Signature("unshard", words).differences([encoded, other, encoded])
    assert message is not None and message.endswith("got b=False on ranks 0, 2 and b=True on rank 1")


def test_explain_says_what_an_exchange_costs():
    """One rank of eight on torch's fake group: the model's times, bytes and local work; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("nodes", "ranks"))
        q, v = (
            torch.empty(1, 1 << 17, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (16, 32)
        )
        flat, other = (gdn.ContextParallel(x, check="never") for x in (dist.group.WORLD, mesh))
        with Wire() as wire:
            found = gdn.explain(q, q, v, cp_context=flat)
            packed = gdn.explain(q, q, v, cp_context=flat, cu_seqlens=torch.arange(9) * (1 << 17))
            by_nodes = gdn.explain(q, q, v, cp_context=other)
        small = gdn.explain(q[..., :64], q[..., :64], v[..., :64], cp_context=flat)
    finally:
        dist.destroy_process_group()
    assert not wire.sent
    exchange = found.exchange
    assert exchange.exchange == "owner" and set(exchange.times) == {"gather", "owner", "heads"}
    assert [round(x / 2**20, 2) for x in exchange.received] == [5.25, 3.5]
    want = cost.exchange_times(cost.Form(16, 32), 8, "owner", cost.Machine())
    assert exchange.times["owner"] == want
    local = sum(Work().halves(cost.Form(16, 32), 1 << 17))
    assert exchange.share == pytest.approx(want.total / local) and f"{exchange.share:.1%}" in str(found)
    assert "exchange owner of 8 ranks: 92, 83 us forward and backward; each receives 5.2, 3.5 MiB" in str(
        found
    )
    assert "exchange none: no sequence crosses" in str(packed)
    assert set(by_nodes.exchange.times) == {"gather", "owner", "nodes", "heads"}
    # the links within a node of the mesh are NVLink, those between its nodes InfiniBand
    nodes = cost.exchange_times(cost.Form(16, 32), 8, "nodes", cost.Machine(node=4))
    assert by_nodes.exchange.times["nodes"] == nodes
    assert small.exchange.local is None and "local" not in str(small).splitlines()[-2]


class Wire(TorchDispatchMode):
    """Record (operator, bytes that a rank receives) of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1]
        if name in ("all_gather_into_tensor", "all_to_all_single"):
            self.sent.append((name, out.numel() * out.element_size()))
        return out


@pytest.mark.parametrize(("name", "R"), [("gather", 64), ("owner", 512), ("nodes", 512)])
def test_one_rank_of_many_sends_what_the_table_of_costs_says(name, R):
    """Run one of 64 or 512 ranks on torch's fake group: one exchange forward, one backward."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # torch's fake group does not take a rank that owns no head, as gloo does
    H, HV, K, V, T = 2, R, 4, 4, 3
    dist.init_process_group("fake", rank=5, world_size=R, store=FakeStore())
    try:
        mesh: Any = dist.group.WORLD
        if name == "nodes":
            mesh = init_device_mesh("cpu", (R // 8, 8), mesh_dim_names=("nodes", "ranks"))
        context = gdn.ContextParallel(mesh, exchange=name, check="never", num_tokens=R * T)
        q = torch.randn(1, T, H, K, requires_grad=True)
        with Wire() as forward:
            o, _ = gdn.chunk_gated_delta_rule(q, q, torch.randn(1, T, HV, V), cp_context=context)
        with Wire() as backward:
            o.sum().backward()
        x = torch.randn(1, T, 5, requires_grad=True)
        with Wire() as halo:
            gdn.causal_conv1d(x, torch.randn(5, 4), cp_context=context)[0].sum().backward()
    finally:
        dist.destroy_process_group()
    # three inputs of this rank before those of the next one, and their gradients back
    assert halo.sent == [("all_to_all_single", 3 * 5 * 4)] * 2
    P, s = 4 * HV * K * (K + V), 4 * HV * K * V
    if name == "gather":
        assert forward.sent == [("all_gather_into_tensor", R * P)]
        assert backward.sent == [("all_gather_into_tensor", R * s)]
    elif name == "nodes":
        # an eighth of the heads of the node's ranks, of which 1/64 of all nodes; all states of this rank back
        there = [("all_to_all_single", x) for x in (P, P // 8, s // 8, s)]
        back = [("all_to_all_single", x) for x in (s, s // 8, s // 8, s)]
        assert (forward.sent, backward.sent) == (there, back)
    else:
        # one head of all ranks, then all heads of this rank
        assert forward.sent == [("all_to_all_single", P), ("all_to_all_single", s)]
        assert backward.sent == [("all_to_all_single", s), ("all_to_all_single", s)]
    assert o.shape == (1, T, HV, V) and q.grad is not None


class Copies(Wire):
    """Record as well the bytes that copies write beside the collectives, and where these are waited for."""

    copied, order = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.name().split("::")[1].split(".")[0]
        self.order += {"all_to_all_single": "s", "wait_tensor": "w"}.get(name, "")
        if name in ("cat", "clone", "copy_", "index", "_to_copy"):
            self.copied += out.numel() * out.element_size()
        return out


@pytest.mark.parametrize(
    ("B", "order", "num_passes"), [(1, "contiguous", 1), (1, "headtail", 2), (2, "contiguous", 2)]
)
def test_heads_packs_and_unpacks_each_tensor_once(B, order, num_passes):
    """Count the copies of one of four ranks: one pass over each tensor that is sent, or two.

    The cost model counts the same passes.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    R, H, HV, K, V, T = 4, 8, 16, 4, 6, 10
    dist.init_process_group("fake", rank=2, world_size=R, store=FakeStore())
    try:
        context = gdn.ContextParallel(
            dist.group.WORLD, exchange="heads", check="never", order=order, num_tokens=R * T
        )
        x = [torch.randn(B, T, *size, requires_grad=True) for size in ((H, K), (H, K), (HV, V), (HV,), (HV,))]
        with Copies() as forward:
            o, _ = gdn.chunk_gated_delta_rule(*x, cp_context=context)
        with Copies() as backward:
            o.backward(torch.randn(o.shape))
    finally:
        dist.destroy_process_group()
    form = cost.Form(H, HV, K, V, num_tokens=B * R * T, width=4)
    # q, k, v, g, beta there and o back, or their gradients: one is packed while another is on its way
    assert (forward.order, backward.order) == (5 * "s" + 5 * "w" + "sw", "sw" + 5 * "s" + 5 * "w")
    for counted in (forward, backward):
        sent = sum(size for _, size in counted.sent)
        assert sent == form.token * B * T
        assert counted.copied == num_passes * sent
    # read and written
    assert 2 * num_passes * sent == cost.heads_copied(form, R, num_passes)


@pytest.mark.parametrize("order", ["contiguous", "headtail"])
def test_heads_of_an_empty_batch(order):
    """A batch of no rows has an empty output and empty gradients in every order of tokens."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        context = gdn.ContextParallel(
            dist.group.WORLD, exchange="heads", check="never", order=order, num_tokens=8
        )
        q, v = torch.randn(0, 4, 2, 4, requires_grad=True), torch.randn(0, 4, 4, 6, requires_grad=True)
        o, _ = gdn.chunk_gated_delta_rule(q, q, v, cp_context=context)
        o.sum().backward()
    finally:
        dist.destroy_process_group()
    assert o.shape == v.grad.shape == v.shape and q.grad.shape == q.shape
