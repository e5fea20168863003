"""Check that bits do not depend on the batch if the rows of a tensor do not begin at aligned addresses.

The rounding of a BLAS may depend on the addresses of its operands, on some CPUs only. `gemm` therefore runs
each test twice: with PyTorch's BLAS, and with one that rounds by every operand's address modulo 64 bytes.
"""

import itertools

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import api
from kit.serving import inputs, pool_of, same_bits, step_of

import gdn
from gdn.backends.eager import alignment

SIZES = [
    (3, 5),
    (65, 7),
    (17, 9),
    (7, 1),
    (1, 7),
]  # K, V: the size of a state of 1 or 3 heads is not a multiple of 16 bytes
ENDS = (0, 70, 130, 130, 133)
FORMS = [gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule]
OPTIONS = {"use_qk_l2norm_in_kernel": True}


def round_by_address(patch, operands):
    """Make gemm scale its result by the addresses of its first operands modulo 64 bytes."""
    multiply = torch.bmm

    def factor(*tensors):
        return 1 + sum(x.data_ptr() % 64 << 2 * i for i, x in enumerate(tensors[:operands])) / 2**22

    def bmm(a, b, *, out=None):
        if out is None:
            return multiply(a, b).mul_(factor(a, b))
        return out.copy_(multiply(a, b).mul_(factor(a, b, out)))

    def baddbmm_(acc, a, b, *, beta=1, alpha=1):
        return acc.mul_(beta).add_(multiply(a, b).mul_(factor(a, b, acc)), alpha=alpha)

    patch.setattr(torch, "bmm", bmm)
    patch.setattr(torch.Tensor, "baddbmm_", baddbmm_)


@pytest.fixture(params=["BLAS of torch", "BLAS that rounds by address"])
def gemm(request, monkeypatch):
    """Run a test with both BLAS; the second rounds by the addresses of both operands and of the result."""
    if request.param != "BLAS of torch":
        round_by_address(monkeypatch, 3)


@pytest.fixture(params=["BLAS of torch", "BLAS that rounds by address"])
def packet_gemm(request, monkeypatch):
    """Run a test with both BLAS; the second rounds by the address of [k; q] alone.

    Decode updates states in place, and products of two rows with a state depend on no other address.
    """
    if request.param != "BLAS of torch":
        round_by_address(monkeypatch, 1)


odd = st.integers(0, 64).map(lambda n: 2 * n + 1)
size = st.one_of(odd, st.integers(1, 130))


@st.composite
def packets(draw):
    """Draw a decode of B rows of T tokens: its tensors and its layout."""
    H, ratio = draw(st.sampled_from([1, 2, 3, 5])), draw(st.sampled_from([1, 2, 3]))
    sizes = {"H": H, "HV": H * ratio, "K": draw(size), "V": draw(size)}
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    B, T, v_first = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 2**20)))
    x = inputs(B, T, **sizes, dtype=dtype, raw=draw(st.booleans()))
    wide = torch.promote_types(dtype, torch.float32)
    pool = pool_of(B, **{name: sizes[name] for name in ("HV", "K", "V")}, dtype=wide, v_first=v_first)
    return x, pool, {"state_v_first": v_first, "use_qk_l2norm_in_kernel": draw(st.booleans())}


def part_of(x, rows, tokens):
    """Return a call's tensors for some rows and tokens, in new memory."""
    per_head = ("A_log", "dt_bias")
    return {name: t if name in per_head else t[rows, tokens].clone() for name, t in x.items()}


def decode(x, pool, options):
    """Return o and the states after a decode on a copy of the pool, which lies in new memory."""
    states = pool.clone()
    return api.decode(**x, state=states, backend="eager", **options), states


@pytest.mark.usefixtures("packet_gemm")
def test_a_packet_equals_single_steps():
    """T tokens at once give the bits of T calls of one token, for any sizes."""

    @hypothesis.settings(max_examples=150)
    @given(packets())
    def check(packet):
        x, pool, options = packet
        o, states = decode(x, pool, options)
        for t in range(x["q"].shape[1]):
            o_t, pool = decode(part_of(x, slice(None), slice(t, t + 1)), pool, options)
            assert same_bits(o_t, o[:, t : t + 1])
        assert same_bits(pool, states)

    check()


@pytest.mark.usefixtures("packet_gemm")
def test_a_row_of_decode_has_the_bits_that_it_has_alone():
    """Rows of one length, dense or packed, have the bits that each row has in a call of its own."""

    @hypothesis.settings(max_examples=150)
    @given(packets())
    def check(packet):
        x, pool, options = packet
        (o, states), (B, T) = decode(x, pool, options), x["q"].shape[:2]
        flat = {name: t if name in ("A_log", "dt_bias") else t.flatten(0, 1)[None] for name, t in x.items()}
        offsets = {"cu_seqlens": torch.arange(B + 1) * T, "max_seqlen": T}
        o_packed, states_packed = decode(flat, pool, options | offsets)
        assert same_bits(o_packed.view(o.shape), o) and same_bits(states_packed, states)
        for n in range(B):
            row = slice(n, n + 1)
            alone = decode(part_of(x, row, slice(None)), pool[row], options)
            assert same_bits(alone[0], o[row]) and same_bits(alone[1], states[row])

    check()


@pytest.mark.usefixtures("packet_gemm")
@pytest.mark.parametrize("heads, K, V", [((1, 1), 5, 64), ((3, 3), 33, 9), ((1, 3), 127, 64)], ids=str)
def test_a_row_of_decode_packed_and_decode_step_has_the_bits_that_it_has_alone(heads, K, V):
    """Five rows in one call of either function have the bits of one row in a call of its own.

    The test uses no silu, since the bits of PyTorch's silu depend on an element's place in the tensor.
    """
    B, (H, HV) = 5, heads
    x, options = step_of(B, H, HV, K, V, 4, slots=B, is_gated=False)
    options |= {"use_qk_l2norm_in_kernel": True, "backend": "eager"}
    per_row = ("mixed_qkv", "a", "b", "state", "conv_state")
    for call, more in ((api.decode_step, {"conv_activation": None}), (api.decode_packed, {})):
        names = [name for name in x if call is api.decode_step or "conv" not in name]
        given = {name: x[name] if x[name] is None else x[name].clone() for name in names}
        rows = [
            {name: t[n : n + 1].clone() if name in per_row else t for name, t in given.items()}
            for n in range(B)
        ]
        o = call(**given, **options, **more)
        for n, row in enumerate(rows):
            assert same_bits(call(**row, **options, **more), o[n : n + 1])
            assert same_bits(row["state"], given["state"][n : n + 1])


@pytest.mark.usefixtures("gemm")
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("heads, K, V", [((1, 1), 3, 5), ((3, 3), 65, 7), ((1, 3), 17, 9)], ids=str)
def test_a_row_of_replay_has_the_same_bits_in_every_slot(heads, K, V, v_first):
    """A packet, its history and the folded state do not depend on the slot, nor on other rows."""
    (H, HV), T, slots, places = heads, 3, 4, 7
    x = {name: t.expand(slots, *t.shape[1:]) for name, t in inputs(1, T, H, HV, K, V).items()}
    state = pool_of(1, HV=HV, K=K, V=V, v_first=v_first).expand(slots, -1, -1, -1).clone()
    u, k = torch.zeros(slots, places, HV, V), torch.zeros(slots, places, H, K)
    G, cursor = torch.zeros(slots, places, HV, dtype=torch.float64), torch.zeros(slots, dtype=torch.int64)
    options = {"state_v_first": v_first, "backend": "eager"}
    index, accepted = torch.arange(slots), torch.full((slots,), T)
    for _ in range(2):
        o = api.replay_decode(
            **x, state=state, history_u=u, history_k=k, history_G=G, cursor=cursor, **options, **OPTIONS
        )
        for written in (o, u, k, G):
            assert all(same_bits(written[n], written[0]) for n in range(1, slots))
        history = (state[None], u[None], k[None], G[None])
        api.replay_commit(*history, cursor, index, accepted, room=3, **options)
    api.replay_commit(*history, cursor, index, accepted * 0, room=places, **options)
    assert all(same_bits(state[n], state[0]) for n in range(1, slots))


def whole_call(K, V, H, HV, ends, v_first):
    """Return the tensors of a call by name, and the gradients of its two outputs."""
    B, T, N = (3, ENDS[-1], 3) if ends is None else (1, ends[-1], len(ends) - 1)
    x = inputs(B, T, H, HV, K, V) | {"initial_state": pool_of(N, HV=HV, K=K, V=V, v_first=v_first)}
    return x, torch.randn(B, T, HV, V), torch.randn_like(x["initial_state"])


def part_alone(x, do, dS, n, ends):
    """Return the tensors and gradients of sequence n alone."""
    b, t = (slice(n, n + 1), slice(None)) if ends is None else (slice(None), slice(ends[n], ends[n + 1]))
    state = slice(n, n + 1)
    parts = {name: y[state] if name == "initial_state" else y[b, t] for name, y in x.items()}
    return parts, do[b, t], dS[state]


def results_of(form, x, do, dS, **options):
    """Return o, the final state and the gradients of all tensors, by name."""
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    o, S = form(
        **leaves, output_final_state=True, batch_invariant=True, backend="eager", **OPTIONS, **options
    )
    gradients = torch.autograd.grad((o, S), list(leaves.values()), (do, dS))
    return {"o": o, "final_state": S} | dict(zip(leaves, gradients, strict=True))


@pytest.mark.usefixtures("gemm")
@pytest.mark.parametrize("form", FORMS, ids=["chunk", "recurrent"])
@pytest.mark.parametrize("ends", [None, ENDS], ids=["dense", "packed"])
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (1, 3)], ids=str)
@pytest.mark.parametrize("K, V", [*SIZES, (33, 33)])
def test_batch_invariance_at_odd_sizes(K, V, heads, ends, form):
    """With batch_invariant=True a sequence's outputs and gradients have the bits that it has alone."""
    v_first = K % 3 == 0
    x, do, dS = whole_call(K, V, *heads, ends, v_first)
    offsets = {} if ends is None else {"cu_seqlens": torch.tensor(ends)}
    whole = results_of(form, x, do, dS, state_v_first=v_first, **offsets)
    for n in range(len(dS)):
        if ends is not None:
            offsets = {"cu_seqlens": torch.tensor([0, ends[n + 1] - ends[n]])}
        alone = results_of(form, *part_alone(x, do, dS, n, ends), state_v_first=v_first, **offsets)
        expected, *_ = part_alone(whole, do, dS, n, ends)
        expected["final_state"] = whole["final_state"][n : n + 1]
        wrong = [name for name, y in alone.items() if not same_bits(y, expected[name])]
        assert not wrong, f"sequence {n}: {wrong}"


@pytest.mark.usefixtures("gemm")
@pytest.mark.parametrize("heads", [(1, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("K, V", SIZES)
def test_batch_invariance_of_prefill_at_odd_sizes(K, V, heads):
    """With batch_invariant=True a prompt's outputs, checkpoints and state have the bits that it has alone."""
    x = inputs(1, ENDS[-1], *heads, K, V)
    pool = pool_of(4, HV=heads[1], K=K, V=V)
    options = {"batch_invariant": True, "state_v_first": True, "checkpoint_every": 64, "backend": "eager"}

    def prefill(x, states, lengths):
        offsets = list(itertools.accumulate(lengths, initial=0))
        counts = [length // 64 for length in lengths]
        kept = torch.zeros(sum(counts), *pool.shape[1:])
        o = api.prefill(
            **x, state=states, cu_seqlens=torch.tensor(offsets), state_index=torch.arange(len(lengths)),
            checkpoints=kept, checkpoint_offsets=torch.tensor([0, *itertools.accumulate(counts)][:-1]),
            **options, **OPTIONS,
        )  # fmt: skip
        return o, kept

    lengths, whole = [b - a for a, b in itertools.pairwise(ENDS)], pool.clone()
    o, kept = prefill(x, whole, lengths)
    first = 0
    for n, length in enumerate(lengths):
        tokens, states = slice(ENDS[n], ENDS[n + 1]), pool[n : n + 1].clone()
        o_n, kept_n = prefill(part_of(x, slice(None), tokens), states, [length])
        assert same_bits(o_n, o[:, tokens]) and same_bits(states[0], whole[n])
        assert same_bits(kept_n, kept[first : first + len(kept_n)])
        first += len(kept_n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_aligned_rows(dtype):
    """Rows begin at multiples of 64 bytes, and memory that is aligned already is not copied."""
    for shape in ((3, 5, 7), (1, 5), (0, 3), (4, 16, 2), (2, 8)):
        rows = alignment.zero_aligned_rows(shape, dtype, torch.device("cpu"))
        x = torch.randn(shape, dtype=dtype)
        copy = alignment.align_rows(x)
        assert rows.shape == shape and not rows.any() and torch.equal(copy, x)
        for aligned in (rows, copy):
            assert all(row.data_ptr() % alignment.ALIGNMENT == 0 for row in aligned)
            assert all(row.is_contiguous() for row in aligned)
    x = torch.randn(4, 16, 2, dtype=dtype)
    assert alignment.align_rows(x) is x and alignment.align_rows(x[:1, :3, 0].clone()).is_contiguous()
    assert alignment.align_start(x) is x and torch.equal(alignment.align_start(x[0, 0, 1:]), x[0, 0, 1:])
    assert alignment.align_start(x[0, 0, 1:]).data_ptr() % alignment.ALIGNMENT == 0
