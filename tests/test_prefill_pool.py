"""Check that a prefill on a pool in place has the bits of one on gathered states, on triton and hopper."""

import pytest
import torch
from conftest import GPU, HAS_TRITON
from kit.serving import same_bits

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit import api
from kit.hopper import on_hopper, set_fast_path, simulated

from gdn.backends import hopper
from gdn.backends.triton.launch import PlanCache
from gdn.backends.triton.rule import choose, run
from gdn.backends.triton.serving import prefill
from gdn.problem.prefill import PrefillProblem, parse_prefill

NAN = float("nan")
LENGTHS = (66, 0, 3, 1, 2)
OPTIONS = {
    "fp32, V first": (torch.float32, True, {}),
    "bf16, K first": (torch.bfloat16, False, {"update_state": False}),
    "bf16, V first, other slots": (
        torch.bfloat16, True,
        {"out_state_index": torch.tensor([6, 7, 8, 2, 1]), "null_slot": 0},
    ),
    "fp32, K first, new sequences": (
        torch.float32, False, {"has_initial_state": torch.tensor([True, True, True, False, False])},
    ),
}  # fmt: skip
each_option = pytest.mark.parametrize("name", OPTIONS)


def make_call(name, D, HV=1, lengths=LENGTHS, device="cpu"):
    """Return a prefill on a poisoned pool: one sequence is empty, one has no slot, slots are strided."""
    pool, is_v_first, options = OPTIONS[name]
    total = sum(lengths) + 3
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    state = torch.full((9, HV, D, D), NAN, dtype=pool)
    for slot in (5, 3, 4):
        state[slot] = torch.randn(HV, D, D, generator=generator)
    if "has_initial_state" not in options:
        state[2] = torch.randn(HV, D, D, generator=generator)
    x = {
        "q": torch.nn.functional.normalize(draw(1, total, 1, D).float(), dim=-1).bfloat16(),
        "k": torch.nn.functional.normalize(draw(1, total, 1, D).float(), dim=-1).bfloat16(),
        "v": draw(1, total, HV, D), "g": -torch.rand(1, total, HV, generator=generator),
        "beta": torch.rand(1, total, HV, generator=generator),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        # strided: every other element
        "state_index": torch.tensor([5, 0, 3, 0, -1, 0, 2, 0, 4])[::2], "state": state,
        "out": torch.full((1, total, HV, D), NAN, dtype=torch.bfloat16), **options,
    }  # fmt: skip
    moved = {key: y.to(device) if isinstance(y, torch.Tensor) else y for key, y in x.items()}
    return moved | {"state_v_first": is_v_first}


def run_call(backend, x, is_over_v=False):
    """Run a prefill on copies, o in the memory of v if wanted; return o and the pool."""
    v = x["v"].clone()
    x = x | {"v": v, "out": v if is_over_v else x["out"].clone(), "state": copy_strided(x["state"])}
    assert api.prefill(**x, backend=backend) is x["out"]
    return x["out"], x["state"]


def copy_strided(state):
    """Return a copy of a pool with its strides, between NaN."""
    memory = torch.full((state.shape[0], 2, *state.shape[1:]), NAN, dtype=state.dtype, device=state.device)
    return memory[:, 1].copy_(state)


def check_in_place(monkeypatch, backend, x):
    """Compare with gathered states; the memory of the pool that is not written keeps its bits."""
    gathers = []
    monkeypatch.setattr(prefill.Launch, "__call__", _counted(gathers, prefill.Launch.__call__))
    o, state = run_call(backend, x)
    assert not gathers
    with monkeypatch.context() as patch:
        patch.setattr(prefill, "pool_of", lambda p: None)
        expected = run_call(backend, x)
    assert gathers and not o.isnan().any() and o.any()
    assert same_bits(o, expected[0]) and same_bits(state, expected[1])
    if "out_state_index" in x:
        # the same where o may not be stored at once: it lies in the memory of v
        alias = run_call(backend, x, is_over_v=True)
        assert same_bits(alias[0], o) and same_bits(alias[1], state)


def _counted(found, call):
    def counted(launch, *tensors):
        if launch.kernel is prefill.gather_kernel:
            found.append(launch)
        call(launch, *tensors)

    return counted


@pytest.mark.interpret
@simulated
@pytest.mark.parametrize("name, is_fused", [(name, name == "bf16, K first") for name in OPTIONS])
def test_triton(monkeypatch, name, is_fused):
    """Compare both kernels that pass the state, one of them with one option: the code is shared."""
    if is_fused:
        monkeypatch.setattr(choose, "_choose_forward", lambda p, gpu, count: choose.fused_tiles(p, gpu))
    monkeypatch.setattr(run, "_forwards", PlanCache())
    lengths = (3, 0, 2, 1, 4) if is_fused else LENGTHS
    check_in_place(monkeypatch, "triton", make_call(name, 16, lengths=lengths))


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("name", ["bf16, V first, other slots", "fp32, K first, new sequences"])
def test_hopper(monkeypatch, name):
    """Compare the simulated scan."""
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    set_fast_path(monkeypatch)
    check_in_place(monkeypatch, "hopper", make_call(name, 128))


@pytest.mark.gpu
@each_option
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=on_hopper)])
@pytest.mark.parametrize("D", [64, 128])
def test_on_a_gpu(monkeypatch, backend, D, name):
    """Compare prompts of many heads, of which some are long."""
    x = make_call(name, D, HV=8, lengths=(700, 0, 64, 1, 129), device=GPU)
    check_in_place(monkeypatch, backend, x)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=on_hopper)])
def test_a_captured_prefill_follows_its_slots(backend):
    """Replay a graph with other slots, lengths and states: the pool is the caller's, in place."""
    lengths = ((700, 0, 64, 1, 129), (1, 200, 493, 0, 200))
    first, second = (
        make_call("bf16, V first, other slots", 128, HV=8, lengths=some, device=GPU) for some in lengths
    )
    second["state_index"] = second["state_index"].roll(1)
    expected = run_call(backend, second)
    static = {key: y.clone() if isinstance(y, torch.Tensor) else y for key, y in first.items()}
    api.prefill(**static, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        api.prefill(**static, backend=backend)
    for key, y in second.items():
        if isinstance(y, torch.Tensor):
            static[key].copy_(y)
    graph.replay()
    assert same_bits(static["out"], expected[0]) and same_bits(static["state"], expected[1])


@pytest.mark.parametrize("change, is_dense", [
    ({}, True), ({"state": torch.zeros(9, 1, 16, 32)[..., ::2]}, False),
    ({"state": torch.zeros(9, 264).as_strided((9, 1, 16, 16), (264, 264, 16, 1))}, False),
    ({"state_v_first": False, "state": torch.zeros(9, 1, 16, 16).mT}, False),
    ({"checkpoints": torch.zeros(4, 1, 16, 16), "checkpoint_every": 64,
      "checkpoint_offsets": torch.zeros(5, dtype=torch.int64)}, False),
])  # fmt: skip
def test_a_pool_is_dense_or_gathered(change, is_dense):
    """Take a pool of dense states in place; gather others, and those that checkpoints need."""
    absent = dict.fromkeys(PrefillProblem.declaration.names)
    absent |= dict.fromkeys(("use_qk_l2norm_in_kernel", "allow_neg_eigval", "batch_invariant"), False)
    x = absent | {"checkpoint_every": 0, "update_state": True} | make_call("fp32, V first", 16) | change
    pool = prefill.pool_of(parse_prefill(**x))
    assert (pool is not None) == is_dense and (pool is None or pool.out is x["out"])
    x["out"] = torch.zeros(1, x["out"].shape[1], 1, 32, dtype=torch.bfloat16)[..., :16]
    assert not is_dense or prefill.pool_of(parse_prefill(**x)).out is None
