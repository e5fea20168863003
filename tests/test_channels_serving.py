"""Test prefill, the gate and replay with a decay per key channel, on every backend."""

import functools

import pytest
import torch
from kit import api
from kit.serving import TOLERANCE, error, find_wrong_state, inputs, moved, pool_of, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import gdn
from gdn.backends import triton
from gdn.problem.stages import parse_gate

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN = float("nan")
HV, K, V = 2, 16, 24
LENGTHS = (66, 0, 3, 2)
SLOTS = {
    "in place": {"null_slot": 0},
    "to other slots": {"out_state_index": torch.tensor([6, 7, 1, 2])},
    "of new sequences": {"has_initial_state": torch.tensor([True, False, False, True])},
    "snapshots": {
        "snapshot_pos": torch.tensor([65, 0, 2, 3]), "snapshot_index": torch.tensor([1, 2, 3, 6]),
        "checkpoint_every": 64, "checkpoint_offsets": torch.tensor([0, 1, 1, 1]),
    },
}  # fmt: skip


def prompts(name, dtype, pool, lengths=LENGTHS, HV=HV, D=K, **options):
    """Return a packed prefill with a reset of one channel, raw logits where there is a bound."""
    total, v_first = sum(lengths) + 2, pool == F32
    raw = "lower_bound" in options
    sizes = {"H": HV // 2, "HV": HV, "K": D, "V": D}
    x = inputs(1, total, **sizes, dtype=dtype, raw=raw, is_per_channel=True) | options
    if raw:
        x["a"] = x["a"].to(dtype)
    else:
        x["g"][:, 1, :, 3] = -1e6
    x |= SLOTS[name] | {
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "state": pool_of(9, HV=HV, K=D, V=D, dtype=pool, v_first=v_first),
        "state_index": torch.tensor([5, 3, 4, 8]),
    }
    if name == "snapshots":
        x["checkpoints"] = torch.full((3, *x["state"].shape[1:]), NAN)
    return x | {"state_v_first": v_first}


def check_prefill(backend, device, x, tolerance):
    expected = api.reference.prefill(**x)
    y = moved(x, device)
    out = torch.full_like(y["v"], NAN)
    assert api.prefill(**y, out=out, backend=backend) is out
    assert error(out, expected.o) <= tolerance
    assert find_wrong_state(y["state"], expected.state, x["state"], tolerance) is None
    if "checkpoints" in x:
        assert find_wrong_state(y["checkpoints"], expected.extra, x["checkpoints"], tolerance) is None


PREFILLS = [
    ("in place", BF16, BF16, {"lower_bound": -5.0}),
    ("snapshots", F32, F32, {"lower_bound": -40.0}),
    ("to other slots", F32, F32, {}),
    ("of new sequences", F16, F16, {}),
    ("snapshots", BF16, BF16, {}),
]


@pytest.mark.parametrize(
    "name, dtype, pool, options",
    [pytest.param(*x, marks=[pytest.mark.interpret] if i < 2 else []) for i, x in enumerate(PREFILLS)],
)
def test_prefill(backend, device, poison, name, dtype, pool, options):
    x = prompts(name, dtype, pool, **options)
    check_prefill(backend, device, x, max(TOLERANCE[dtype], TOLERANCE[pool]))


def gate_inputs(dtype, *lead, K=K, device="cpu"):
    """Return a, b, A_log and dt_bias; a is a view of rows of a projection, whose rows are wider."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((*lead, HV * K + 16), (*lead, HV), (HV,), (HV, K))
    x = [torch.randn(s, generator=rng).to(device, dtype) for s in shapes]
    return [x[0][..., : HV * K].unflatten(-1, (HV, K)), *x[1:]]


def run_gate(backend, given, dy, lower_bound):
    """Return g and beta and all gradients; without a backend in fp64, by the reference."""
    given = [None if x is None else x.detach() for x in given]
    if backend is None:
        given = [None if x is None else x.cpu().double() for x in given]
    leaves = [x.requires_grad_() for x in given if x is not None]
    if backend is None:
        a, b, A_log, dt_bias = given
        outputs = (gdn.reference.gate(a, A_log, dt_bias, lower_bound, is_per_channel=True), b.sigmoid())
    else:
        outputs = gdn.gate(*given, lower_bound=lower_bound, backend=backend)
    return *outputs, *torch.autograd.grad(
        outputs, leaves, [y.to(x) for x, y in zip(outputs, dy, strict=True)]
    )


def check_gate(backend, given, lower_bound, tolerance):
    """Compare every element with the reference, and with dy > 0 the sums, whose terms have one sign."""
    dy = [torch.rand(given[0].shape), torch.rand(given[1].shape)]
    found, expected = (run_gate(name, given, dy, lower_bound) for name in (backend, None))
    narrow = torch.finfo(given[0].dtype).eps
    for i, (x, ref) in enumerate(zip(found, expected, strict=True)):
        rtol = tolerance if i < 2 else max(narrow, tolerance)
        # the terms of dA_log of the bounded form have both signs
        atol = rtol * float(ref.abs().sum()) / 4 if lower_bound is not None and i == 4 else 0
        torch.testing.assert_close(x.cpu().double(), ref, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "lead, channels, dtype, bound",
    [
        pytest.param((2, 5), K, BF16, -5.0, marks=pytest.mark.interpret),
        pytest.param((3,), 37, F32, None, marks=pytest.mark.interpret),
        ((), 200, F32, -40.0),
        ((0,), K, F32, None),
        ((2, 3, 4), 160, BF16, None),
    ],
)
def test_gate(backend, device, lead, channels, dtype, bound):
    """Logits of any leading axes, of rows of a projection, with and without their parameters."""
    given = gate_inputs(dtype, *lead, K=channels, device=device)
    check_gate(backend, given, bound, 4e-6)
    if bound is None:
        check_gate(backend, [*given[:3], None], bound, 4e-6)
    else:
        check_gate(backend, [*given[:2], None, None], bound, 4e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_gate_of_extreme_logits(backend, device, bound):
    """Values and gradients of unused and of saturated logits are finite; NaN without a gradient is none."""
    a, b, A_log, dt_bias = gate_inputs(F32, 4, device=device)
    a = a.clone()
    a[0], a[1] = NAN, torch.tensor([torch.inf, -torch.inf], device=device)[:, None]
    a[2], A_log[1] = torch.tensor([1e38, -1e38], device=device)[:, None], 100.0 if bound else -torch.inf
    dy = [
        torch.tensor([0.0, 0.0 if bound is None else 1.0, 1.0, 1.0])[:, None].expand(4, HV) for _ in range(2)
    ]
    dy[0] = dy[0][..., None].expand(4, HV, K)
    g, beta, da, db, dA_log, ddt_bias = run_gate(
        backend, (a, b, A_log, dt_bias), [y.to(device) for y in dy], bound
    )
    assert bool(g[0].isnan().all()) and bool(g[1:].le(0).all() and beta.isfinite().all())
    assert not da[0].any() and bool(da[3, 0].ne(0).all())
    for x in (da, db, dA_log, ddt_bias):
        assert bool(x.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_gate_of_many_tokens(bound):
    """Several blocks per program, several strips of channels; reruns give the same bits."""
    for lead, channels in (((2, 5000), 128), ((700,), 200)):
        given = gate_inputs(F32, *lead, K=channels, device="cuda")
        check_gate("triton", given, bound, 4e-6)
        dy = [torch.rand(x.shape, device="cuda") for x in given[:2]]
        first = run_gate("triton", given, dy, bound)
        for _ in range(10):
            again = run_gate("triton", given, dy, bound)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_a_gpu_runs_the_kernels():
    """The backend of a gate per key channel on a GPU is `triton`, whether or not the call names it."""
    with FakeTensorMode():
        a, b = torch.empty(2, HV, K, device="cuda"), torch.empty(2, HV, device="cuda")
        for name in (None, "triton"):
            assert triton.refuses(parse_gate(a, b, None, None, -5.0, name)) is None


# dtype of the tokens, of the pool and of the history; tokens of a row; options
REPLAYS = [
    (BF16, BF16, BF16, 4, {"lower_bound": -5.0, "state_v_first": True}),
    (F32, F32, F32, 9, {"state_v_first": False, "K": 80, "places": 84}),
    (F16, F32, F32, 1, {"lower_bound": -40.0, "state_v_first": True, "use_qk_l2norm_in_kernel": False}),
    (F32, BF16, BF16, 16, {"lower_bound": -5.0, "state_v_first": False}),
    (BF16, F32, BF16, 2, {"state_v_first": True}),
]
PLACES = 36


def packets(dtype, pool, kept, T, rows=4, HV=HV, K=K, V=V, places=PLACES, **options):
    """Return packets on histories of other tokens: empty, short, longer, and almost full.

    The third row has no slot. One channel of the history, and one of a packet, has a reset.
    """
    H, raw, v_first = HV // 2, "lower_bound" in options, options["state_v_first"]
    x = inputs(rows, T, H=H, HV=HV, K=K, V=V, dtype=dtype, raw=raw, is_per_channel=True)
    if not options.get("use_qk_l2norm_in_kernel", True):
        x |= {name: torch.nn.functional.normalize(x[name].float(), dim=-1).to(dtype) for name in "qk"}
    if not raw:
        x["g"][:, T // 2, :, 5] = -torch.inf
    slots = rows + 2
    index = torch.arange(rows).flip(0)
    index[2:3] = -1
    history = {
        "history_u": torch.randn(slots, places, HV, V).to(kept) / 8,
        "history_k": torch.randn(slots, places, H, K).to(kept) / 4,
        "history_G": -torch.rand(slots, places, HV, K) / 8,
        "cursor": torch.tensor([0, places - 2, 5, 20])[:rows].repeat(slots)[:slots].int(),
    }
    history["history_G"][:, 3, :, 2] = -1000.0
    state = pool_of(slots, HV=HV, K=K, V=V, dtype=pool, v_first=v_first)
    return x | history | {"state": state, "read_index": index} | options


def check_replay(backend, device, x, tolerance, **packing):
    """Compare with the reference; what is not written keeps its bits."""
    expected = api.reference.replay_decode(**x, **{k: y for k, y in packing.items() if k != "max_seqlen"})
    y = moved(x, device)
    out = torch.full_like(y["v"], NAN)
    assert api.replay_decode(**y, **moved(packing, device), out=out, backend=backend) is out
    assert error(out, expected.o) <= tolerance
    assert same_bits(y["state"].cpu(), x["state"])
    names = ("history_u", "history_k", "history_G")
    for name, ref in zip(names, (expected.u, expected.k, expected.G), strict=True):
        found, is_new = y[name].cpu(), (ref != x[name]).flatten(2).any(2)
        assert same_bits(found[~is_new], x[name][~is_new]), name
        assert error(found[is_new], ref[is_new]) <= (tolerance if name == "history_u" else 1e-6), name


@pytest.mark.parametrize(
    "dtype, pool, kept, tokens, options",
    [pytest.param(*x, marks=[pytest.mark.interpret] if i < 3 else []) for i, x in enumerate(REPLAYS)],
)
def test_replay(backend, device, poison, dtype, pool, kept, tokens, options):
    x = packets(dtype, pool, kept, tokens, **options)
    check_replay(backend, device, x, max(TOLERANCE[d] for d in (dtype, kept)))


def test_replay_of_packed_rows(backend, device, poison):
    """An empty row, and tokens past the last row, which get zeros."""
    x = packets(F32, F32, F32, 7, rows=1, lower_bound=-5.0, state_v_first=True)
    x |= {"read_index": torch.tensor([1, 0, 2]), "cursor": torch.tensor([17, 3, 36], dtype=torch.int32)}
    check_replay(backend, device, x, 1e-5, cu_seqlens=torch.tensor([0, 2, 2, 5]), max_seqlen=3)


@pytest.mark.parametrize("v_first", [pytest.param(True, marks=pytest.mark.interpret), False])
def test_packets_and_folds_are_plain_decode(backend, device, v_first):
    """Some, all and none of the drafts are accepted; full histories of several blocks are folded."""
    options = {"lower_bound": -5.0, "state_v_first": v_first}
    room, places = 9, 20 if v_first else 36
    x = packets(F32, F32, F32, 1, rows=2, places=places, **options)
    plain, slots = x["state"].double(), torch.arange(2, device=device)
    names = ("history_u", "history_k", "history_G", "cursor")
    history = {name: torch.full_like(x[name], NAN) for name in names[:3]} | {"cursor": 0 * x["cursor"]}
    history, state = moved(history, device), x["state"].clone().to(device)
    fold = [state[None], *(history[name][None] for name in names[:3]), history["cursor"]]
    commit = functools.partial(api.replay_commit, *fold, state_v_first=v_first, backend=backend)
    for tokens, accepted in ((4, (4, 0)), (9, (3, 9)), (9, (9, 6))):
        given = inputs(2, tokens, H=1, HV=HV, raw=True, is_per_channel=True) | options
        o = api.replay_decode(**moved(given, device), state=state, **history, backend=backend)
        assert error(o, api.reference.decode(**given, state=plain, write="none").o) <= 1e-5
        for n, kept in enumerate(accepted):
            row = {k: y[n : n + 1, :kept] if k in ("q", "k", "v", "a", "b") else y for k, y in given.items()}
            plain = api.reference.decode(**row, state=plain, read_index=torch.tensor([n])).state
        commit(slots, torch.tensor(accepted, device=device), room=room)
    commit(slots, 0 * slots, room=places)
    assert error(state[:2], plain[:2]) <= 1e-5 and error(x["state"][:2], plain[:2]) > 1e-2
    assert same_bits(state[2:].cpu(), x["state"][2:]) and not history["cursor"].any()


@pytest.mark.parametrize("kept", [pytest.param(F32, marks=pytest.mark.interpret), BF16])
def test_commit(backend, device, kept):
    """Slots that are full are folded, with a reset in the history; the others keep their bits."""
    x = packets(F32, BF16 if kept == BF16 else F32, kept, 1, K=80 if kept == F32 else K, state_v_first=True)
    names = ("state", "history_u", "history_k", "history_G")
    layers = {name: torch.stack((x[name], x[name].flip(0))) for name in names}
    layers["cursor"], layers["index"] = x["cursor"], torch.tensor([0, 1, -1])
    layers["accepted"] = torch.tensor([3, 1, 2])
    expected, cursor = api.reference.replay_commit(**layers, room=16)
    y = moved(layers, device)
    api.replay_commit(**y, room=16, backend=backend)
    assert torch.equal(y["cursor"].cpu(), cursor)
    for slot in range(6):
        pair = (y["state"][:, slot].cpu(), layers["state"][:, slot])
        if slot == 1:
            assert error(pair[0], expected[:, slot]) <= TOLERANCE[kept] < error(pair[1], expected[:, slot])
        else:
            assert same_bits(*pair)
