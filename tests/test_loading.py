"""When the kernels of a packet, a replay and a decode load what they read changes no bit of a result."""

import importlib

import pytest
import torch
from kit import api
from kit.compiling import TARGETS, recording
from kit.serving import inputs, pool_of

from gdn.backends.triton.serving import loading

pytestmark = pytest.mark.interpret
packet = importlib.import_module("gdn.backends.triton.serving.packet")
F32, BF16 = torch.float32, torch.bfloat16
PLAIN = loading.Loading()
CHANGED = {
    "loads first": loading.Loading(has_loads_first=True),
    "prefetch": loading.Loading(strips=2),
    "prefetch before the wait": loading.Loading(has_loads_first=True, strips=1, is_early=True),
    "no next token": loading.Loading(is_early=True, has_next_token=False),
}


@pytest.fixture(params=CHANGED)
def change(request, monkeypatch):
    """Return a function that runs a call as usual, then with other options of loads, on equal tensors."""
    monkeypatch.setattr("gdn.backends.triton.launch.PlanCache.get", lambda cache, key, make: make())

    def both(call):
        found = []
        for options in (PLAIN, CHANGED[request.param]):
            monkeypatch.setattr(loading, "LOADING", options)
            importlib.import_module("gdn.ops.fastpath")._calls.clear()
            found.append([x.clone() for x in call()])
        return found

    return both


def assert_same_bits(found):
    """Assert that two runs wrote equal bits; NaN equals NaN."""
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize(
    "tokens, write, pool, is_v_first, filled",
    [
        (4, "final", BF16, True, 6),
        (4, "final", F32, False, 6),
        (7, "none", F32, True, 6),
        (12, "final", BF16, True, 6),
        (12, "none", BF16, False, 6),
        (5, "final", BF16, True, 0),
        (12, "none", BF16, True, 0),
    ],
)
def test_packets(change, triton_device, monkeypatch, tokens, write, pool, is_v_first, filled):
    monkeypatch.setattr(packet, "FILLED", filled)
    x = inputs(3, tokens, 1, 2, 64, 32, dtype=BF16, raw=True)
    x |= {"read_index": torch.tensor([2, -1, 0]), "write_index": torch.tensor([2, 1, 3])}
    if write == "none":
        del x["write_index"]
    # NaN in a query reaches no other token, nor the state
    x["q"][0, 1] = float("nan")
    start = pool_of(4, HV=2, K=64, V=32, dtype=pool, v_first=is_v_first)

    def call():
        y = {name: z.to(triton_device) for name, z in x.items()}
        state = start.clone().to(triton_device)
        options = {"exact_packet": False, "state_v_first": is_v_first, "write": write}
        return api.decode(**y, state=state, **options, backend="triton"), state

    assert_same_bits(change(call))


@pytest.mark.parametrize("tokens, pool, filled", [(4, BF16, 6), (3, F32, 6), (12, BF16, 6), (4, BF16, 0)])
def test_replays(change, triton_device, monkeypatch, tokens, pool, filled):
    monkeypatch.setattr(packet, "FILLED", filled)
    x = inputs(3, tokens, 1, 2, 64, 32, dtype=BF16, raw=True)
    x |= {"read_index": torch.tensor([2, -1, 0]), "state": pool_of(4, HV=2, K=64, V=32, dtype=pool)}
    # places beyond the cursor hold NaN, which nothing may read
    past = {"history_u": torch.randn(4, 30, 2, 32).to(BF16), "history_k": torch.randn(4, 30, 1, 64).to(BF16)}
    past |= {"history_G": -torch.rand(4, 30, 2).double().cumsum(1), "cursor": torch.tensor([0, 4, 9, 28])}
    for name in ("history_u", "history_k", "history_G"):
        for slot, used in enumerate(past["cursor"].tolist()):
            past[name][slot, used:] = float("nan")

    def call():
        y = {name: z.clone().to(triton_device) for name, z in (x | past).items()}
        o = api.replay_decode(**y, state_v_first=True, backend="triton")
        return o, y["history_u"], y["history_k"], y["history_G"]

    assert_same_bits(change(call))


@pytest.mark.parametrize("pool", [BF16, F32])
@pytest.mark.parametrize("is_packed", [True, False])
def test_decodes(change, triton_device, pool, is_packed):
    lead = (1, 7) if is_packed else (3, 3)
    x = inputs(*lead, 1, 2, 64, 32, dtype=BF16, raw=True)
    x |= {"read_index": torch.tensor([2, -1, 0]), "write": "none"}
    if is_packed:
        x |= {"cu_seqlens": torch.tensor([0, 3, 3, 6]), "max_seqlen": 3}
    start = pool_of(4, HV=2, K=64, V=32, dtype=pool)

    def call():
        y = {name: z.to(triton_device) if torch.is_tensor(z) else z for name, z in x.items()}
        state = start.clone().to(triton_device)
        kept = torch.zeros(3, 3, 2, 32, 64, dtype=pool, device=triton_device)
        y |= {"write": "final"} if is_packed else {"intermediate": kept}
        return api.decode(**y, state=state, state_v_first=True, backend="triton"), state, kept

    assert_same_bits(change(call))


@pytest.mark.parametrize(
    "B, tokens, pool, write, expected",
    [
        (1, 4, BF16, "final", (True, 2, 1, 2112)),
        (1, 4, F32, "final", (True, 2, 1, 2112)),
        (8, 4, BF16, "none", (True, 1, 1, 2112)),
        (8, 16, BF16, "none", (True, 1, 1, 2112)),
        (8, 16, F32, "none", (False, 0, 1, 2112)),
        (64, 4, BF16, "none", (True, 0, 1, 2112)),
    ],
)
def test_options_of_a_hopper_gpu(monkeypatch, B, tokens, pool, write, expected):
    """Programs of one strip hold the state, those of fp32 states and 16 tokens load as before."""
    monkeypatch.setattr(loading, "LOADING", CHANGED["prefetch before the wait"])
    x = {name: y.expand(B, *y.shape[1:]) for name, y in inputs(1, tokens, 16, 32, 128, 128, BF16).items()}
    x |= {"read_index": torch.arange(B), "state": torch.empty(B, 32, 128, 128, dtype=pool)}
    x |= {"state_v_first": True}
    with recording(TARGETS["cuda:90"].machine) as launches:
        api.decode(**x, exact_packet=False, write=write, backend="triton")
    constants = launches[0][0].constants
    assert tuple(constants[name] for name in ("LOADS_FIRST", "HOLDS", "FETCHED", "EARLY")) == expected
