"""Decodes of several tokens whose programs take several tiles of a state, and packets that run as decodes."""

import importlib

import pytest
import torch
from kit import api
from kit.serving import TOLERANCE, error, inputs, moved, pool_of, same_bits

from gdn.ops import fastpath

NAN = float("nan")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROWS = {"read_index": torch.tensor([2, -1, 0])}
MOVED = ROWS | {"write_index": torch.tensor([1, 3, 9])}
PACKED = ROWS | {"cu_seqlens": torch.tensor([0, 3, 3, 6])}


@pytest.fixture
def resident(monkeypatch):
    """Return a function that sets how many programs an SM holds; no plan is kept."""
    monkeypatch.setattr("gdn.backends.triton.launch.PlanCache.get", lambda cache, key, make: make())
    strips = importlib.import_module("gdn.backends.triton.serving.decode_strips")

    def set_resident(count):
        monkeypatch.setattr(strips, "RESIDENT", count)
        fastpath._calls.clear()

    yield set_resident
    fastpath._calls.clear()


def run(device, x, **options):
    """Run a decode on copies; return its output and pool, and the names of its kernels with their strips."""
    launches = importlib.import_module("gdn.backends.triton.launch.launches")
    names, call = [], launches.Launch.__call__

    def record(self, *tensors):
        names.append((self.kernel.__name__, self.constants.get("STRIPS")))
        return call(self, *tensors)

    x = moved(x, device)
    out = torch.full_like(x["v"], NAN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches.Launch, "__call__", record)
        api.decode(**x, out=out, backend="triton", **options)
    return out.cpu(), x["state"].cpu(), names


@pytest.mark.interpret
@pytest.mark.parametrize(
    "rows, tokens, K, dtype, pool, raw, options, strips",
    [
        (1, 7, 64, BF16, BF16, True, {**PACKED, "max_seqlen": 3}, 4),
        (3, 4, 128, BF16, F32, True, MOVED, 2),
        (3, 6, 64, BF16, BF16, False, ROWS | {"round_state": True}, 4),
        (3, 5, 128, F16, F16, True, {}, 4),
        (3, 2, 64, F32, F32, False, ROWS | {"write": "none", "use_qk_l2norm_in_kernel": False}, 2),
    ],
)
def test_strips_change_no_bit(triton_device, resident, rows, tokens, K, dtype, pool, raw, options, strips):
    """A program that takes several tiles of a state computes what programs of one tile each do."""
    x = inputs(rows, tokens, 1, 2, K, 128, dtype, raw=raw)
    x |= {"state": pool_of(4, HV=2, K=K, V=128, dtype=pool)}
    x |= {name: options[name] for name in options if isinstance(options[name], torch.Tensor)}
    options = {name: value for name, value in options.items() if name not in x}
    got = []
    for count in (10**6, 0):
        resident(count)
        got.append(run(triton_device, x, **options))
    assert [x[2] for x in got] == [[("decode_kernel", None)], [("decode_strips_kernel", strips)]]
    assert all(same_bits(a, b) for a, b in zip(got[0][:2], got[1][:2], strict=True))


@pytest.mark.interpret
def test_nan_of_another_token_or_row_stays_there(triton_device, resident):
    """Scalars of up to four tokens are computed side by side; NaN of one does not reach an earlier one."""
    resident(0)
    x = inputs(2, 6, 1, 2, 64, 64, BF16, raw=True) | {"state": pool_of(2, HV=2, K=64, V=64)}
    clean = run(triton_device, x)
    x["k"][0, 3], x["a"][0, 4] = NAN, NAN
    o, state, _ = run(triton_device, x)
    assert same_bits(o[0, :3], clean[0][0, :3]) and same_bits(o[1], clean[0][1])
    assert o[0, 3:].isnan().all() and same_bits(state[1], clean[1][1])


@pytest.mark.parametrize(
    "rows, tokens, pool, options, expected",
    [
        (2, 4, BF16, {}, None),
        (4, 4, BF16, {}, (1, True)),
        (8, 4, BF16, {}, (1, True)),
        (16, 4, BF16, {}, (2, True)),
        (64, 4, BF16, {}, (4, True)),
        (64, 16, BF16, {}, (4, False)),
        (64, 17, BF16, {}, None),
        (64, 1, BF16, {}, None),
        (4, 4, F32, {}, None),
        (8, 4, F32, {}, (1, True)),
        (64, 4, F32, {}, (2, True)),
        (64, 4, F32, {"exact_packet": False}, (2, True)),
        (64, 4, F32, {"write": "none"}, (2, True)),
        (64, 4, F32, {"intermediate": 4}, None),
    ],
)
def test_which_decodes_run_in_strips(rows, tokens, pool, options, expected):
    """Rows of 2 to 16 tokens that write at most the last state, for half of the places on the SMs or more."""
    compiling = pytest.importorskip("kit.compiling")
    x = {name: y.expand(rows, *y.shape[1:]) for name, y in inputs(1, tokens, 16, 32, 128, 128, BF16).items()}
    x |= {"read_index": torch.arange(rows), "state": torch.empty(rows, 32, 128, 128, dtype=pool)} | options
    if "intermediate" in options:
        x |= {"intermediate": torch.empty(rows, tokens, 32, 128, 128, dtype=pool)}
    with compiling.recording(compiling.TARGETS["cuda:90"].machine) as launches:
        api.decode(**x, state_v_first=True, backend="triton")
    one = launches[0][0]
    assert one.kernel.__name__ == ("decode_kernel" if expected is None else "decode_strips_kernel")
    if expected is not None:
        strips, is_one_pass = expected
        # from Triton 3.7 on A is smaller
        is_one_pass = is_one_pass and tokens <= one.constants["A"]
        assert (one.constants["STRIPS"], one.constants["IS_ONE_PASS"]) == (strips, is_one_pass)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "tokens, pool, write, is_exact",
    [(4, F32, "final", True), (2, F32, "final", True), (5, F32, "final", False), (4, F32, "none", False),
     (4, BF16, "final", False)],
)  # fmt: skip
def test_short_packets_that_write_fp32_states_are_exact(triton_device, tokens, pool, write, is_exact):
    """A packet of at most four tokens that writes an fp32 state has the bits of its tokens one by one."""
    x = inputs(2, tokens, 1, 2, 64, 32, BF16, raw=True) | {"state": pool_of(2, HV=2, K=64, V=32, dtype=pool)}
    exact, got = (run(triton_device, x, write=write, exact_packet=e) for e in (True, False))
    assert got[2][0][0] == ("decode_kernel" if is_exact else "packet_kernel")
    same = all(same_bits(a, b) for a, b in zip(got[:2], exact[:2], strict=True))
    assert same == is_exact
    assert all(error(a, b) <= TOLERANCE[BF16] for a, b in zip(got[:2], exact[:2], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("tokens", [4, 16])
@pytest.mark.parametrize("rows, pool, strips", [(8, F32, 1), (17, F32, 2), (8, BF16, 1), (17, BF16, 4)])
def test_strips_on_a_gpu(resident, rows, pool, strips, tokens, exact):
    """Strips have the bits of `decode_kernel`, and agree with fp64; so do packets that run as decodes."""
    if not exact and (tokens > 4 or pool != F32):
        pytest.skip("the chunk form")
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("the numbers of strips are those of 132 SMs")
    x = inputs(rows, tokens, 16, 32, 128, 128, BF16, raw=True)
    x |= {"state": pool_of(rows, HV=32, K=128, V=128, dtype=pool), "read_index": torch.arange(rows)}
    got = run("cuda", x, exact_packet=exact)
    assert got[2] == [("decode_strips_kernel", strips)]
    resident(10**6)
    plain = run("cuda", x)
    assert plain[2] == [("decode_kernel", None)]
    assert all(same_bits(a, b) for a, b in zip(got[:2], plain[:2], strict=True))
    wide = {name: y.double() if y.is_floating_point() else y for name, y in moved(x, "cuda").items()}
    o = api.decode(**wide, backend="eager")
    tolerance = max(TOLERANCE[BF16], TOLERANCE[pool])
    assert error(got[0], o.cpu()) <= tolerance
    assert error(got[1], wide["state"].cpu()) <= (TOLERANCE[F32] if pool == F32 else tolerance)
