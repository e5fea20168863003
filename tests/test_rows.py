"""Check that a row's bits do not depend on the number of rows, by which tile sizes are chosen."""

import importlib

import pytest
import torch
from kit import api
from kit.serving import inputs, pool_of, same_bits, step_of

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MOST, FEWER = 300, (1, 2, 8, 64, 200)
TOKENS = {"one token": 1, "chunk form": 6, "replay of 16": 16}  # others: 4
PER_ROW = ("q", "k", "v", "a", "b", "z", "mixed_qkv", "read_index")


def make_call(name, sizes, pool, most=MOST):
    """Return a call of `most` rows on the default device: tensors, options, and what it writes by slot."""
    (H, HV, K, V), dtype = sizes, F16 if pool == F16 else BF16
    options = {"backend": None}
    if name == "step":
        x, how = step_of(MOST, H, HV, K, V, 4, dtype, pool, slots=MOST)
        return x | {"read_index": torch.arange(MOST)}, options | how, ("state", "conv_state")
    tokens = 16 if name.startswith("16") else TOKENS.get(name, 4)
    x = inputs(most, tokens, H, HV, K, V, dtype=dtype, raw=True)
    x |= {"state": pool_of(most, HV=HV, K=K, V=V, dtype=pool), "read_index": torch.arange(most)}
    if not name.startswith("replay"):
        options |= {"exact_packet": "chunk form" not in name}
        return x, options | ({"write": "none"} if "no state" in name else {}), ("state",)
    places = tokens + 4
    x |= {
        "history_u": torch.randn(most, places, HV, V).to(dtype),
        "history_k": torch.randn(most, places, H, K).to(dtype),
        "history_G": -torch.rand(most, places, HV, dtype=torch.float64).cumsum(1),
        "cursor": torch.arange(most) % 5,
    }  # fmt: skip
    return x, options, ("history_u", "history_k", "history_G")


@pytest.mark.parametrize("pool", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "one token", "packet", "chunk form", "chunk form, no state", "16 in chunk form", "replay",
        "replay of 16", "step",
    ],
)  # fmt: skip
def test_a_row_among_any_number_of_rows(backend, device, name, pool):
    """A row has its bits among 32 to 9600 states, which fill a GPU not at all or many times."""
    call = {"replay": api.replay_decode, "step": api.decode_step}.get(name.split()[0], api.decode)
    with torch.device(device):
        x, options, written = make_call(name, (2, 4, 16, 24) if device == "cpu" else (16, 32, 128, 128), pool)
        options["backend"] = backend
        batches = [torch.randperm(MOST)[:count] for count in FEWER]

    whole = run_rows(call, x, options, written, torch.arange(MOST, device=device))
    assert all(y.isfinite().all() and y.any() for y in whole)
    for batch in batches:
        for few, many in zip(run_rows(call, x, options, written, batch), whole, strict=True):
            assert same_bits(few, many[batch]), len(batch)


def run_rows(call, x, options, written, batch):
    """Return the outputs of some rows, and the states in their slots."""
    few = {key: v[batch] if key in PER_ROW else v for key, v in x.items()}
    few |= {key: x[key].clone() for key in written}
    return [call(**few, **options), *(few[key][batch] for key in written)]


@pytest.mark.interpret
@pytest.mark.parametrize(
    "name", ["chunk form", "chunk form, no state", "16 in chunk form, no state", "replay", "replay of 16"]
)
def test_a_row_in_programs_of_each_size(triton_device, monkeypatch, name):
    """A row has its bits in programs of few columns, of one strip that waits for its state, and of all."""
    launch = pytest.importorskip("gdn.backends.triton.launch")
    packet, replay = (
        importlib.import_module(f"gdn.backends.triton.serving.{x}") for x in ("packet", "replay")
    )
    call = api.replay_decode if name.startswith("replay") else api.decode
    if triton_device == "cpu":
        # few rows fill four SMs
        for module in (packet, replay):
            monkeypatch.setattr(module, "machine", lambda device: launch.Machine("cuda", 90, 4, 227 * 1024))
    monkeypatch.setattr(launch.PlanCache, "get", lambda cache, key, make: make())
    with torch.device(triton_device):
        most = 12 if triton_device == "cpu" else MOST
        heads = (1, 2) if triton_device == "cpu" else (4, 4)
        x, options, written = make_call(name, (*heads, 32, 64), BF16, most)
        every = torch.arange(most)
        for key in written if name.startswith("replay") else ():
            # places that are not in use
            x[key][torch.arange(x[key].shape[1]) >= x["cursor"][:, None]] = float("nan")
    options["backend"] = "triton"
    batches, used = (every[:1], every[3 : 3 + most // 3], every), []
    for batch in batches:
        with launch.record_launches([]) as launches:
            run_rows(call, x, options, written, batch)
        constants = launches[0][0].constants
        used.append(
            (constants["BV"], constants["STRIPS"], constants.get("WAITS", constants.get("READS_PAST")))
        )
    is_late = name in ("chunk form, no state", "16 in chunk form, no state", "replay")
    assert used[:2] == [(16, 1, False), (32, 1, is_late)] and used[2][1] > 1
    *parts, whole = (run_rows(call, x, options, written, batch) for batch in batches)
    assert whole[0].isfinite().all() and whole[0].any()
    for batch, part in zip(batches, parts, strict=False):
        assert all(same_bits(few, many[batch]) for few, many in zip(part, whole, strict=True)), len(batch)


@pytest.mark.interpret
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("function", ["decode", "replay_decode"])
def test_tokens_with_the_last_stride_of_time(backend, device, function, decay):
    """q | k | v of a convolution [B, D, T], transposed and split: the bits of contiguous ones, also alone."""
    N, T, H, K = 3, 2, 2, 32
    parts = torch.randn(N, 3 * H * K, T).transpose(1, 2).split(H * K, -1)
    x = {name: y.unflatten(-1, (H, K)) for name, y in zip("qkv", parts, strict=True)}
    x |= {"g": -torch.rand(N, T, H, *([K] if decay == "channel" else [])), "beta": torch.rand(N, T, H)}
    states, found = torch.randn(N, H, K, K), []

    def run(given, rows):
        pool = {"state": states[rows].clone()}
        if function == "replay_decode":
            G = torch.zeros(
                len(rows), 4, *x["g"].shape[2:], dtype=F32 if decay == "channel" else torch.float64
            )
            pool |= {
                "history_u": torch.zeros(len(rows), 4, H, K),
                "history_k": torch.zeros(len(rows), 4, H, K),
            }
            pool |= {"history_G": G, "cursor": torch.zeros(len(rows), dtype=torch.int32)}
        given = {name: y[rows].to(device) for name, y in given.items()}
        pool = {name: y.to(device) for name, y in pool.items()}
        options = {"use_qk_l2norm_in_kernel": True, "backend": backend}
        o = getattr(api, function)(**given, **pool, **options)
        return torch.cat([o.flatten(1), pool["state"].flatten(1)], 1)

    every = torch.arange(N)
    for given in ({name: y.contiguous() for name, y in x.items()}, x):
        found += [run(given, every), torch.cat([run(given, every[n : n + 1]) for n in range(N)])]
    assert all(same_bits(found[0], y) for y in found[1:])
