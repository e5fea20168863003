"""Reproduce the seven kinds of bugs that serving engines have had with these states.

A check takes the functions that an engine would call. It must pass with our functions, and raise with the
functions changed as an engine once shipped them, which shows that the check can fail.
"""

import ast
from pathlib import Path

import pytest
import torch
from kit import api
from kit.serving import error, inputs, moved, pool_of, same_bits

import gdn

NAN = float("nan")
BF16 = torch.bfloat16
DRAFTS = 3


def fails(check, *args, **changes):
    """Return True if a check raises with some of the functions replaced."""
    try:
        check(*args, **changes)
    except AssertionError:
        return True
    return False


def check_padding(backend, device, decode=api.decode):
    """Check a batch filled up for a graph: live rows are unchanged, padded rows output and write nothing."""
    for null_slot, pad in ((None, -1), (0, 0), (0, -1), (None, 6)):
        x, state = moved(inputs(4, 2), device), pool_of(6).to(device)
        read = torch.tensor([2, pad, 5, pad], device=device)
        few = {name: v[::2].clone() for name, v in x.items()}
        alone, expected = state.clone(), None
        expected = api.decode(**few, state=alone, read_index=read[::2], backend=backend)
        for name in ("q", "k", "v"):
            x[name][1::2] = NAN
        state[0] = NAN if pad == 0 else state[0]
        alone[0] = state[0]
        out = torch.full_like(x["v"], NAN)
        o = decode(**x, state=state, read_index=read, null_slot=null_slot, out=out, backend=backend)
        assert same_bits(o[::2], expected) and not o[1::2].any(), "rows"
        assert same_bits(state, alone), "slots"


def test_padding(backend, device):
    """(a) vLLM 33326, 34077; SGLang 21109; FlashInfer 2810."""

    def remapped(*, read_index, **rest):
        return api.decode(**rest, read_index=read_index.clamp(min=0))

    def without_null(*, null_slot, **rest):
        return api.decode(**rest)

    def unwritten(*, out, read_index, **rest):
        o = api.decode(**rest, read_index=read_index)
        return torch.where((read_index > 0)[:, None, None, None], o, out)

    def last_slot(*, read_index, state, **rest):
        return api.decode(**rest, state=state, read_index=read_index % state.shape[0])

    check_padding(backend, device)
    for bent in (remapped, without_null, unwritten, last_slot):
        assert fails(check_padding, backend, device, bent), bent.__name__


def check_drafts(backend, device, decode=api.decode, commit=gdn.commit):
    """Check that drafts with valid and invalid counts leave the state of the accepted tokens."""
    x, T = moved(inputs(4, DRAFTS), device), DRAFTS
    pool = pool_of(4 * T + 1).to(device)
    table = torch.arange(1, 4 * T + 1, device=device).view(4, T)
    for count in (1, 2, T, 0, -1, 99):
        accepted = torch.tensor([count, 1, 2, T], device=device)
        column = accepted.clamp(1, T) - 1
        start = pool[table.gather(1, column[:, None])[:, 0]]
        expected = api.decode(**x, state=start.clone(), backend=backend)
        how = {"read_index": table, "num_accepted": accepted, "write_index": table, "write": "all"}
        assert same_bits(decode(**x, state=pool.clone(), **how, backend=backend), expected), "columns"
    # rows of the intermediate buffer belong to the batch, not to the slots
    kept, slots = torch.full((4, T, 4, 24, 16), NAN, device=device), torch.tensor([3, 9, 1, 0], device=device)
    decode(**x, state=pool, read_index=slots, write="none", intermediate=kept, backend=backend)
    step = torch.tensor([0, T - 1, -1, 1], device=device)
    expected = pool.clone()
    for n, t in enumerate(step.tolist()):
        row = {name: v[n : n + 1, : t + 1] for name, v in x.items()}
        api.decode(**row, state=expected, read_index=slots[n : n + 1], backend=backend)
    commit(pool[None], kept[None], slots, torch.arange(4, device=device), step)
    assert same_bits(pool, expected), "commit"


def test_accepted_counts_and_rows(backend, device, monkeypatch):
    """(b) vLLM 31649, 50021; SGLang 26829."""
    monkeypatch.setenv("GDN_BACKEND", backend)

    def unclamped(*, num_accepted=None, read_index, **rest):
        if num_accepted is not None:
            wild = (num_accepted - 1) % read_index.shape[1]
            read_index = read_index.gather(1, wild[:, None])[:, 0]
        return api.decode(**rest, read_index=read_index)

    def one_behind(*, num_accepted=None, **rest):
        more = {} if num_accepted is None else {"num_accepted": num_accepted + 1}
        return api.decode(**rest, **more)

    def rows_of_slots(*, read_index, intermediate=None, **rest):
        if intermediate is not None:
            rest |= {"intermediate": intermediate, "intermediate_row": read_index}
        return api.decode(**rest, read_index=read_index)

    def counts_for_steps(dst, src, dst_index, src_row, step):
        gdn.commit(dst, src, dst_index, src_row, step + 1)

    check_drafts(backend, device)
    for bent in (unclamped, one_behind, rows_of_slots):
        assert fails(check_drafts, backend, device, bent), bent.__name__
    assert fails(check_drafts, backend, device, commit=counts_for_steps)


def check_prompts(backend, device, prefill=api.prefill):
    """Check new prompts on used slots, a hit in a prefix cache, and prompts as short as a packet."""
    lengths = [1, 1 + DRAFTS, 66]
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    x, state = moved(inputs(1, sum(lengths)), device), pool_of(8).to(device)
    state[[1, 2]] = NAN
    prefix = state[3].clone()
    o = prefill(
        **x, state=state, cu_seqlens=cu, state_index=torch.tensor([1, 2, 3], device=device),
        has_initial_state=torch.tensor([False, False, True], device=device),
        out_state_index=torch.tensor([1, 2, 6], device=device), backend=backend,
    )  # fmt: skip
    assert same_bits(state[3], prefix), "the prefix belongs to others as well"
    for n, (slot, start) in enumerate(zip((1, 2, 6), (None, None, prefix), strict=True)):
        tokens = slice(int(cu[n]), int(cu[n + 1]))
        alone = torch.zeros_like(state[:1]) if start is None else start[None].clone()
        row = {name: v[:, tokens] for name, v in x.items()}
        expected = api.decode(**row, state=alone, backend=backend)
        assert error(o[:, tokens], expected) <= 1e-5, "outputs"
        assert error(state[slot], alone[0]) <= 1e-5, "the state that the next step starts from"


def test_states_that_are_stale_or_not_written(backend, device):
    """(c) vLLM 53051, 53912, 55766; SGLang 31833; TPU 2431."""

    def without_mask(*, has_initial_state, **rest):
        return api.prefill(**rest)

    def wiped_by_a_gate(*, has_initial_state, g, cu_seqlens, **rest):
        g = g.clone()
        g[0, cu_seqlens[:-1][~has_initial_state]] = -1e6
        return api.prefill(**rest, g=g, cu_seqlens=cu_seqlens)

    def short_ones_verified(*, state, cu_seqlens, out_state_index, **rest):
        before = state.clone()
        o = api.prefill(**rest, state=state, cu_seqlens=cu_seqlens, out_state_index=out_state_index)
        short = out_state_index[cu_seqlens.diff() == 1 + DRAFTS]
        state[short] = before[short]
        return o

    def in_place(*, out_state_index, **rest):
        return api.prefill(**rest)

    check_prompts(backend, device)
    for bent in (without_mask, wiped_by_a_gate, short_ones_verified, in_place):
        assert fails(check_prompts, backend, device, bent), bent.__name__


def check_precision(backend, device, decode=api.decode):
    """Check 64 steps in bf16 on an fp32 pool: gates, states and packets are never rounded to bf16."""
    x = moved(inputs(2, 64, dtype=BF16, raw=True), device)
    x |= {"a": x["a"].to(BF16), "b": x["b"].to(BF16), "A_log": x["A_log"] - 4}
    law = {name: v.double().cpu() for name, v in x.items()}
    state, exact = torch.zeros(2, 4, 24, 16, device=device), torch.zeros(2, 4, 24, 16, dtype=torch.float64)
    heads = ("A_log", "dt_bias")
    for t in range(0, 64, 4):
        token = {name: v if name in heads else v[:, t : t + 4] for name, v in x.items()}
        decode(**token, state=state, backend=backend)
        token = {name: v if name in heads else v[:, t : t + 4] for name, v in law.items()}
        api.decode(**token, state=exact, backend="eager")
    assert error(state, exact) <= 1e-5


def check_rounding(backend, device, decode=api.decode):
    """Check that a bf16 pool rounded after every token of a packet drifts as single steps do."""
    x, state = moved(inputs(2, 8, dtype=BF16), device), pool_of(2, dtype=BF16).to(device)
    single = state.clone()
    for t in range(8):
        api.decode(**{name: v[:, t : t + 1] for name, v in x.items()}, state=single, backend=backend)
    decode(**x, state=state, round_state=True, backend=backend)
    assert same_bits(state, single)


def test_precision(backend, device):
    """(d) vLLM 53877; SGLang 38975, 33515; lmdeploy 4744."""

    def narrow_beta(*, a, b, A_log, dt_bias, **rest):
        g, beta = gdn.gate(a, b, A_log, dt_bias)
        return api.decode(**rest, g=g, beta=beta.to(b.dtype))

    def narrow_decay(*, a, b, A_log, dt_bias, **rest):
        g, beta = gdn.gate(a, b, A_log, dt_bias)
        return api.decode(**rest, g=g.to(a.dtype), beta=beta)

    def narrow_state(*, state, **rest):
        o = api.decode(**rest, state=state)
        state.copy_(state.bfloat16())
        return o

    def not_rounded(*, round_state, **rest):
        return api.decode(**rest)

    check_precision(backend, device)
    for bent in (narrow_beta, narrow_decay, narrow_state):
        assert fails(check_precision, backend, device, bent), bent.__name__
    check_rounding(backend, device)
    assert fails(check_rounding, backend, device, not_rounded)


def distant_slots(backend, device, decode=api.decode):
    """Return slots that begin 2^31 or more elements apart."""
    pitch = 2**31 // 3 + 2**20
    state = torch.empty(3 * pitch + 1536, dtype=BF16, device=device).as_strided(
        (4, 4, 24, 16), (pitch, 384, 16, 1)
    )
    small = pool_of(4, dtype=BF16).to(device)
    state.copy_(small)
    x, read = moved(inputs(2, 1), device), torch.tensor([3, 1], device=device)
    o = decode(**x, state=state, read_index=read, backend=backend)
    assert same_bits(o, api.decode(**x, state=small, read_index=read, backend=backend))
    assert same_bits(state, small)


def test_offsets(backend, device, alone):
    """(e) vLLM 41966; SGLang 31934."""

    def in_32_bits(*, state, read_index, **rest):
        # read where an offset that wrapped around points to, if that is still in the pool
        wrapped = (read_index * state.stride(0) + 2**31) % 2**32 - 2**31
        return api.decode(**rest, state=state, read_index=wrapped.abs() // state.stride(0))

    distant_slots(backend, device)
    assert fails(distant_slots, backend, device, in_32_bits)


def autotuned_kernels(sources):
    """Return the functions whose Triton kernels try configurations on the tensors of the first caller."""
    names = {"autotune", "heuristics", "do_bench", "Autotuner"}
    found = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
            found |= {name} & names
    return found


def test_nothing_is_tuned_on_a_callers_tensors():
    """(f) vLLM 36599, 37338: autotuning at the first request ran out of memory, and wrote to pools."""
    room = Path(gdn.__file__).parent
    sources = [path.read_text() for path in room.rglob("*.py") if "bench" not in path.parts]
    assert autotuned_kernels(sources) == set()
    assert autotuned_kernels(["import triton\n@triton.autotune(configs=[])\ndef f(): ..."]) == {"autotune"}


def check_first_call(backend, device, decode=api.decode):
    """Check that the first call of a size computes once, on the given pool, and allocates no copy."""
    x, state = moved(inputs(3, 2, K=44, V=52), device), pool_of(64, K=44, V=52).to(device)
    read, expected = torch.tensor([5, -1, 60], device=device), state.to("cpu", copy=True)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    o = decode(**x, state=state, read_index=read, backend=backend)
    if device != "cpu":
        assert torch.cuda.max_memory_allocated(device) - before < state.nbytes, "memory"
    law = api.decode(**moved(x, "cpu"), state=expected, read_index=read.cpu(), backend="eager")
    assert error(o, law) <= 1e-5 and error(state, expected) <= 1e-5


def test_the_first_call_leaves_the_callers_pool_right(backend, device):
    """(f) vLLM 36599, 37338: the autotuner ran candidates on the states in place, or on copies of them."""

    def tried_in_place(**given):
        return [api.decode(**given) for _ in range(3)][-1]

    def tried_on_copies(*, state, **rest):
        for pool in [state.clone() for _ in range(3)]:
            api.decode(**rest, state=pool)
        return api.decode(**rest, state=state)

    check_first_call(backend, device)
    assert fails(check_first_call, backend, device, tried_in_place)
    if device != "cpu":
        assert fails(check_first_call, backend, device, tried_on_copies)


def compiled_kernels(call, monkeypatch):
    """Return the kernels that Triton compiles during a call."""
    import triton

    found = []
    with monkeypatch.context() as patch:
        hook = lambda **info: found.append(info["fn"].name)  # noqa: E731
        patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
        call()
    return found


@pytest.mark.gpu
def test_nothing_compiles_after_the_first_step(monkeypatch):
    """(f) Another batch, other slots and another number of drafts run the binaries of the first step."""
    x = {B: moved(inputs(B, 1, 2, 4, 48, 48, dtype=BF16, raw=True), "cuda") for B in (2, 7)}
    pool = pool_of(9, K=48, V=48).cuda()

    def step(B, **options):
        slots = torch.arange(B, device="cuda")
        api.decode(**x[B], state=pool, read_index=slots, **options, backend="triton")

    assert compiled_kernels(lambda: step(2), monkeypatch)
    assert not compiled_kernels(lambda: step(7), monkeypatch)
    assert compiled_kernels(lambda: step(7, use_qk_l2norm_in_kernel=False), monkeypatch), (
        "the hook sees a new one"
    )


def check_draft_memory(backend, device, verify):
    """Check that verifying and keeping 16 drafts takes a third of the memory of one more state."""
    x, before = moved(inputs(1, 16, 16, 32, 128, 128), device), pool_of(1, HV=32, K=128, V=128).to(device)
    expected_state, state = before.clone(), before.clone()
    expected = api.decode(**x, state=expected_state, backend=backend)
    o, written, accept = verify(x, state)
    assert same_bits(state, before) and error(o, expected) <= 5e-3, "verification"
    accept()
    assert error(state, expected_state) <= 5e-3, "what was written is enough"
    assert 3 * sum(y.nbytes for y in written) < state.nbytes, "memory"


def test_memory_of_drafts(backend, device, monkeypatch):
    """(g) SGLang 23643, 28730: the engines allocated states for every draft of every request."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    first, last = torch.tensor([0], device=device), torch.tensor([15], device=device)

    def replayed(x, state):
        u, k = (torch.zeros(1, 32, heads, 128, device=device, dtype=BF16) for heads in (32, 16))
        G = torch.zeros(1, 32, 32, device=device, dtype=torch.float64)
        cursor = torch.zeros(1, device=device, dtype=torch.int32)
        o = api.replay_decode(**x, state=state, history_u=u, history_k=k, history_G=G, cursor=cursor)
        layers = (y[None] for y in (state, u, k, G))
        return o, (u, k, G), lambda: api.replay_commit(*layers, cursor, first, last + 1, room=32)

    def kept(x, state):
        states = torch.zeros(1, 16, *state.shape[1:], device=device)
        o = api.decode(**x, state=state, write="none", intermediate=states)
        return o, (states,), lambda: gdn.commit(state[None], states[None], first, first, last)

    check_draft_memory(backend, device, replayed)
    with pytest.raises(AssertionError, match="memory"):
        check_draft_memory(backend, device, kept)
