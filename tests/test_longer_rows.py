"""Test packed rows of more tokens than `max_seqlen` promises, which nothing checks on a GPU.

Every output and state of such a row is right, or NaN where the kernel is for fewer tokens; all other rows are
right, and nothing else is written.
"""

import importlib
import itertools
from dataclasses import replace

import pytest
import torch
from kit import api
from kit.serving import TOLERANCE, inputs, moved, pool_of

import gdn
from gdn.ops import fastpath
from gdn.problem.replay import OnHistory
from gdn.problem.serving import DecodeProblem
from gdn.reference.integers import LEVELS, round_columns

F32, BF16, INT16, INT8 = torch.float32, torch.bfloat16, torch.int16, torch.int8
GUARD = 77.0  # in the memory past the tensors of a call
PROMISED = 3
ONE_STEP = 1.1 / LEVELS  # the distance of two integers, for the largest state of a column
LENGTHS = (3, 9, 0, 2)  # of rows; the second one is too long
SIZES = {"H": 1, "HV": 2, "K": 64, "V": 64}


@pytest.fixture
def unchecked(triton_device, monkeypatch):
    """Return the device; offsets are not read where they are, as on a GPU, and no plan is kept."""
    monkeypatch.setattr("gdn.backends.triton.launch.PlanCache.get", lambda cache, key, make: make())
    if triton_device == "cpu":
        for problem in (DecodeProblem, OnHistory):
            monkeypatch.setattr(problem, "token_ranges", lambda self, read_device: None)
    fastpath._calls.clear()
    yield triton_device
    fastpath._calls.clear()


def guarded(x, rows=0, axis=1):
    """Return a copy of x that is a part of a larger tensor, and that tensor, which holds GUARD elsewhere."""
    shape = list(x.shape)
    shape[0], shape[axis] = shape[0] + 1 + rows, shape[axis] + 20
    whole = torch.full(shape, GUARD).to(x.dtype)
    part = whole[: x.shape[0]].narrow(axis, 0, x.shape[axis])
    part.copy_(x)
    return part, whole


def packed(**options):
    """Return tokens of rows of LENGTHS, one token past the last row, and their offsets."""
    x = inputs(1, sum(LENGTHS) + 1, **SIZES, **options)
    return x | {"cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)}


def rows_of(o):
    """Return the outputs of each row, and those past the last row."""
    return o[0].split([*LENGTHS, o.shape[1] - sum(LENGTHS)])


def check(got, exact, tolerance, may_be_nan=True):
    """Check numbers that are right or NaN; where they may not be NaN, that none is."""
    is_nan = got.isnan()
    assert may_be_nan or not is_nan.any()
    wrong = (got.double() - exact.double()).abs()[~is_nan]
    assert wrong.numel() == 0 or wrong.max() <= tolerance * max(1.0, exact.abs().max().item())
    return is_nan


def run_decode(device, x, longest, **options):
    """Decode on copies in guarded memory; return o, the pool and `intermediate`, and the kernel's name."""
    launches = importlib.import_module("gdn.backends.triton.launch.launches")
    names, call = [], launches.Launch.__call__

    def record(self, *tensors):
        names.append(self.kernel.__name__)
        return call(self, *tensors)

    y, wholes = moved(x, device), []
    out = torch.full_like(y["v"], GUARD)
    for name in ("state", "column_scale", "intermediate"):
        if name in y:
            y[name], whole = guarded(y[name].cpu(), axis=1 if name == "intermediate" else 0)
            whole = whole.to(device)
            y[name] = whole[: y[name].shape[0]].narrow(1, 0, y[name].shape[1])
            wholes.append((whole, y[name]))
    if "column_scale" in y:
        y["state"] = gdn.Int16Pool(y["state"], y.pop("column_scale"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches.Launch, "__call__", record)
        api.decode(**y, out=out, max_seqlen=longest, state_v_first=True, backend="triton", **options)
    results = [out.cpu(), *(part.cpu().clone() for _, part in wholes)]
    if "column_scale" in x:
        # of integers the states, which are NaN where the scale is
        results[1:3] = [results[1].float() * results[2][..., None]]
    for whole, part in wholes:
        part.fill_(GUARD)
        assert (whole == GUARD).all(), "memory past a tensor was written"
    return results, names[0]


DECODES = {
    "strips": ("decode_strips_kernel", BF16, F32, {}),
    "strips, bf16 pool": ("decode_strips_kernel", BF16, BF16, {}),
    "strips, not written": ("decode_strips_kernel", BF16, F32, {"write": "none"}),
    "packet": ("packet_kernel", BF16, BF16, {"exact_packet": False}),
    "packet, not written": ("packet_kernel", F32, F32, {"exact_packet": False, "write": "none"}),
    "intermediate": ("decode_kernel", F32, F32, {"intermediate": PROMISED}),
    "tree": ("decode_kernel", F32, F32, {"intermediate": PROMISED, "parent": PROMISED, "write": "none"}),
    "all": ("decode_kernel", F32, F32, {"write": "all", "write_index": PROMISED}),
    "final": ("decode_kernel", F32, F32, {"use_qk_l2norm_in_kernel": False}),
    "int16": ("decode_kernel", BF16, INT16, {}),
    "int16, not written": ("decode_kernel", BF16, INT16, {"write": "none"}),
    "int16, intermediate": ("decode_kernel", F32, INT16, {"intermediate": PROMISED}),
    "int16, all": ("decode_kernel", F32, INT16, {"write": "all", "write_index": PROMISED}),
}


@pytest.mark.interpret
@pytest.mark.parametrize("case", DECODES)
def test_decode_of_a_longer_row(unchecked, monkeypatch, case):
    """Outputs and states of the longer row are right or NaN, and so are the states of its tokens."""
    kernel, dtype, pool, options = DECODES[case]
    strips = importlib.import_module("gdn.backends.triton.serving.decode_strips")
    monkeypatch.setattr(strips, "RESIDENT", 0 if "strips" in case else 10**6)
    columns, rows = max(LENGTHS), len(LENGTHS)
    options = {"use_qk_l2norm_in_kernel": True, **options}
    x = packed(dtype=dtype, raw=True) | {"read_index": torch.tensor([4, 1, 0, 3])}
    x["state"] = before = pool_of(40, HV=2, K=64, V=64, dtype=F32 if pool == INT16 else pool)
    if pool == INT16:
        n, x["column_scale"] = round_columns(before.mT)
        x["state"] = n.mT.contiguous()
        before = x["state"].float() * x["column_scale"][..., None]
    tokens = {"intermediate": torch.full((rows, columns, 2, 64, 64), GUARD)}
    tokens["parent"] = torch.tensor([-1, 0, 0, 1, 2, 2, 4, 5, 3]).repeat(rows, 1)
    tokens["write_index"] = 4 + torch.arange(rows * columns).view(rows, columns)
    given = {name: options.pop(name) for name in tokens if name in options}

    def run(width, longest):
        each = {name: y[:, :width].clone() for name, y in tokens.items() if name in given}
        # what is next to the promised columns names a slot that no row may write
        if "write_index" in each:
            whole = torch.full((rows, columns), 39)
            whole[:, :width] = each["write_index"]
            each["write_index"] = whole[:, :width]
        return run_decode(unchecked, x | each, longest, **options)

    exact, _ = run(columns, columns)
    got, name = run(PROMISED, PROMISED)
    assert name == kernel
    tolerance = max(TOLERANCE[dtype], TOLERANCE.get(pool, ONE_STEP))
    for n, (a, b) in enumerate(zip(rows_of(got[0]), rows_of(exact[0]), strict=True)):
        is_nan = check(a, b, tolerance, may_be_nan=n == 1)
        if n == 1 and (kernel != "decode_kernel" or given):
            # NaN of a token, and of all tokens after it
            assert is_nan[-1].all() and not (is_nan[:-1] & ~is_nan[1:]).any()
    # every slot of the pool but those of the longer row
    slots = tokens["write_index"][1].tolist() if "write_index" in given else [1]
    others = [slot for slot in range(40) if slot not in slots]
    check(got[1][others].float(), exact[1][others].float(), tolerance, may_be_nan=False)
    if "write_index" in given:
        check(got[1][slots[:PROMISED]], exact[1][slots[:PROMISED]], tolerance, may_be_nan=False)
        assert torch.equal(got[1][slots[PROMISED:]], before[slots[PROMISED:]])
    else:
        check(got[1][slots].float(), exact[1][slots].float(), tolerance)
    if "intermediate" in given:
        check(got[2], exact[2][:, :PROMISED], tolerance)


@pytest.mark.interpret
def test_a_longer_row_of_padding_outputs_zeros(unchecked, monkeypatch):
    """A row without a slot has zeros, however long it is, and so have the tokens past the last row."""
    strips = importlib.import_module("gdn.backends.triton.serving.decode_strips")
    monkeypatch.setattr(strips, "RESIDENT", 0)
    x = packed(dtype=BF16, raw=True) | {"read_index": torch.tensor([4, -1, 0, 3])}
    x["state"] = pool_of(5, HV=2, K=64, V=64, dtype=BF16)
    for options in ({}, {"exact_packet": False}):
        (o, _), _ = run_decode(unchecked, x, PROMISED, use_qk_l2norm_in_kernel=True, **options)
        _, longer, _, _, rest = rows_of(o)
        assert not longer.any() and not rest.any()


@pytest.mark.interpret
@pytest.mark.parametrize(
    "kind, promised",
    [
        *itertools.product(["packet", "replay", "history"], [2, PROMISED, 8]),
        *itertools.product(["replay of channels", "history of channels"], [1, PROMISED]),
        *itertools.product(["int16 history", "int8 history", "int8 history of channels"], [PROMISED]),
        ("int8 history without remainder", 2),
    ],
)
def test_packets_of_a_longer_row(unchecked, kind, promised):
    """All outputs and updates of a row that a packet does not hold are NaN, and other rows are right."""
    is_per_channel = kind.endswith("channels")
    lengths = [min(n, promised) for n in LENGTHS]
    lengths[1] = min(2 * promised + 1, 16)
    x = inputs(1, sum(lengths) + 1, H=1, HV=2, K=16, V=24, raw=True, is_per_channel=is_per_channel)
    x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    x["read_index"] = torch.tensor([4, 1, 0, 3])
    got, exact = (call(kind, unchecked, x, longest, promised) for longest in (promised, max(lengths)))
    pairs = zip(*(y[0][0].split([*lengths, 1]) for y in (got, exact)), strict=True)
    for n, (a, b) in enumerate(pairs):
        is_nan = check(a, b, TOLERANCE[BF16 if kind == "packet" else F32], may_be_nan=n == 1)
        assert is_nan.all() or n != 1
    others = [0, 2, 3, 4]
    for name, a in got[1].items():
        b = exact[1][name]
        check(a[others], b[others], 1e-5, may_be_nan=False)
        if name == "state":
            assert a[1].isnan().all()
        elif name == "history_u":
            # of an empty history the first places; what is past the packet is not written
            is_nan = a[1].flatten(1).isnan()
            num_new = int(is_nan.any(1).sum())
            assert num_new >= promised and is_nan[:num_new].all() and not a[1, num_new:].any()
        elif name == "states":
            # an empty history is not folded
            assert torch.equal(a, b)
        elif name != "cursor":
            check(a[1, :promised], b[1, :promised], 1e-5, may_be_nan=False)


def call(kind, device, x, longest, promised):
    """Run a packet on copies; return o, and the written tensors of the first five slots by name."""
    y, out = moved(x, device), torch.full_like(x["v"], GUARD).to(device)
    options = {"max_seqlen": longest, "out": out, "state_v_first": True, "backend": "triton"}
    torch.manual_seed(1)
    state = pool_of(5, HV=2, K=16, V=24, dtype=BF16 if kind == "packet" else F32).to(device)
    if kind == "packet":
        api.decode(**y, state=state, exact_packet=False, **options)
        return out.cpu(), {"state": state.cpu()}
    is_per_channel, places = kind.endswith("channels"), 40
    if "history" in kind:
        # places for one packet beside another, and no more
        places, room = 2 * promised if longest == promised else 32, promised if longest == promised else 16
    sums = (2, 16) if is_per_channel else (2,)
    tensors = {"history_u": (2, 24), "history_k": (1, 16), "history_G": sums}
    held, wholes = {}, []
    for name, last in tensors.items():
        dtype = torch.float64 if name == "history_G" and not is_per_channel else F32
        whole = torch.full((6, places + 8, *last), GUARD, dtype=dtype, device=device)
        held[name] = whole[:5, :places]
        held[name].zero_()
        wholes.append((whole, held[name]))
    if kind.startswith("replay"):
        held |= {"cursor": torch.zeros(5, dtype=torch.int32, device=device)}
        api.replay_decode(**y, state=state, **held, **options)
    else:
        held |= {"cursor": torch.zeros(5, 3, dtype=torch.int32, device=device)}
        integers = INT16 if "int16" in kind else INT8 if "int8" in kind else None
        pool = gdn.HistoryPool(state=state, column_scale=None, remainder=None, room=room, **held)
        if integers is not None:
            stored = gdn.allocate_history_pool(
                5, num_k_heads=1, num_v_heads=2, head_k_dim=16, head_v_dim=24, places=places, room=room,
                state_dtype=integers, with_remainder="without" not in kind, state_v_first=True,
                decay="channel" if is_per_channel else "head", device=device,
            )  # fmt: skip
            stored.write(torch.arange(5, device=device), state, state_v_first=True)
            pool = replace(
                pool, state=stored.state, column_scale=stored.column_scale, remainder=stored.remainder
            )
        api.decode_with_history(**y, pool=pool, use_history=True, **options)
        # a later call reads NaN
        assert pool.cursor[1, 1] <= places
        state = pool.read(torch.arange(5, device=device), state_v_first=True)
    results = {name: part[:, : 2 * promised].cpu().clone() for name, part in held.items() if name != "cursor"}
    results |= {"cursor": held["cursor"].cpu()}
    if "history" in kind:
        results["states"] = state.cpu()
    for whole, part in wholes:
        part.fill_(GUARD)
        assert (whole == GUARD).all(), "memory past a history was written"
    return out.cpu(), results
