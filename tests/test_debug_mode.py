"""Test GDN_DEBUG=1, which inspects the values of a call's tensors and names the tensors it objects to."""

import re

import pytest
import torch
from kit import api
from kit.serving import inputs, pool_of, step_of

import gdn

B, SLOTS = 3, 5


@pytest.fixture(autouse=True)
def debug(monkeypatch):
    monkeypatch.setenv("GDN_DEBUG", "1")


def ints(*values):
    return torch.tensor(values)


def decode(T=1, **where):
    return api.decode(**{**inputs(B, T), "state": pool_of(SLOTS), **where})


def prefill(**where):
    return api.prefill(
        **{**inputs(1, 30), "state": pool_of(SLOTS), "cu_seqlens": ints(0, 10, 20, 30), **where},
    )


def step(**where):
    x, options = step_of(B, 2, 4, 16, 24, 4, slots=SLOTS, is_gated=False)
    return api.decode_step(**x, **options, **where)


def replay(**where):
    history = {
        "history_u": torch.zeros(SLOTS, 4, 4, 24), "history_k": torch.zeros(SLOTS, 4, 2, 16),
        "history_G": torch.zeros(SLOTS, 4, 4, dtype=torch.float64),
        "cursor": torch.zeros(SLOTS, dtype=torch.int32),
    }  # fmt: skip
    return api.replay_decode(**inputs(B, 1), state=pool_of(SLOTS), **history, **where)


def update(**where):
    return gdn.causal_conv1d_update(torch.randn(B, 6), torch.zeros(SLOTS, 6, 3), torch.randn(6, 4), **where)


TABLE = torch.tensor([[1, 2], [3, 4], [2, 0]])
ONE_SLOT = "expected a slot of its own for each row that writes, got slot {} for rows {} and {}"
SHARED = "expected no row to write what another reads, got slot {} read by row {} and written by row {}"
DUPLICATES = {
    "decode": (lambda: decode(read_index=ints(1, 4, 1)), "read_index: " + ONE_SLOT.format(1, 0, 2)),
    "decode to": (
        lambda: decode(read_index=ints(0, 1, 2), write_index=ints(3, 4, 3)),
        "write_index: " + ONE_SLOT.format(3, 0, 2),
    ),
    "decode from": (
        lambda: decode(read_index=ints(0, 1, 2), write_index=ints(3, 0, 4)),
        "write_index: " + SHARED.format(0, 0, 1),
    ),
    "table": (
        lambda: decode(T=2, read_index=TABLE, write_index=TABLE, write="all"),
        "write_index: " + ONE_SLOT.format(2, 0, 2),
    ),
    "ring": (
        lambda: decode(
            state=pool_of(SLOTS, 3), read_index=ints(1, 2, 1), ring_pos=ints(0, 0, 2), write="all"
        ),
        "read_index: " + SHARED.format(1, 0, 2),
    ),
    "intermediate": (
        lambda: decode(
            write="none", intermediate=pool_of(4, 1), read_index=ints(1, 1, 2), intermediate_row=ints(3, 0, 3)
        ),
        "intermediate_row: " + ONE_SLOT.format(3, 0, 2),
    ),
    "prefill": (lambda: prefill(state_index=ints(4, 4, 0)), "state_index: " + ONE_SLOT.format(4, 0, 1)),
    "prefill to": (
        lambda: prefill(state_index=ints(0, 0, 1), out_state_index=ints(2, 3, 3)),
        "out_state_index: " + ONE_SLOT.format(3, 1, 2),
    ),
    "snapshot": (
        lambda: prefill(state_index=ints(0, 1, 2), snapshot_pos=ints(3, -1, 4), snapshot_index=ints(4, 4, 4)),
        "snapshot_index: " + ONE_SLOT.format(4, 0, 2),
    ),
    "step": (lambda: step(read_index=ints(1, 0, 1)), "read_index: " + ONE_SLOT.format(1, 0, 2)),
    "step reads a written slot": (
        lambda: step(read_index=ints(1, 3, 0), write_index=ints(3, 4, 0)),
        "write_index: expected no row to write what another reads, got slot 3 read by row 1 and written",
    ),
    "steps of one window": (
        lambda: step(read_index=ints(1, 1, 0), write_index=ints(3, 4, 0)),
        "read_index: " + ONE_SLOT.format(1, 0, 1),
    ),
    "step's window": (lambda: step(conv_index=ints(1, 1, 0)), "conv_index: " + ONE_SLOT.format(1, 0, 1)),
    "replay": (lambda: replay(read_index=ints(2, 2, 0)), "read_index: " + ONE_SLOT.format(2, 0, 1)),
    "convolution": (lambda: update(state_index=ints(2, 0, 2)), "state_index: " + ONE_SLOT.format(2, 0, 2)),
    "commit": (
        lambda: gdn.commit(torch.zeros(1, 4, 3), torch.zeros(1, 2, 2, 3), ints(1, 1), ints(0, 1), ints(0, 1)),
        "dst_index: " + ONE_SLOT.format(1, 0, 1),
    ),
}


@pytest.mark.parametrize("name", DUPLICATES)
def test_two_rows_on_one_slot_are_refused(name):
    call, message = DUPLICATES[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_rows_that_share_a_slot_and_do_not_write_are_supported(caplog):
    decode(read_index=ints(1, 1, 1), write="none")
    decode(read_index=ints(-1, -1, 1))
    decode(read_index=ints(1, 1, 1), write_index=ints(0, 2, 3))
    # neither a padded row nor a skipped entry writes
    step(read_index=ints(3, -1, 0), write_index=ints(2, 2, 0))
    gdn.commit(torch.zeros(1, 4, 3), torch.zeros(1, 2, 2, 3), ints(1, 1), ints(0, -1), ints(0, 1))
    prefill(state_index=ints(0, 0, 0), update_state=False)
    prefill(state_index=ints(0, 0, 0), out_state_index=ints(1, 2, 3))
    # one request has two columns
    api.decode(
        **inputs(1, 2), state=pool_of(4), read_index=ints(1), write_index=ints(2, 3)[None], write="all"
    )
    assert "past" not in caplog.text


PAST = {
    "decode": (lambda: decode(read_index=ints(1, SLOTS, -1)), r"read_index: \[5\] past the 5 slots"),
    "decode to": (lambda: decode(write_index=ints(3, 4, 99)), r"write_index: \[99\] past the 5 slots"),
    "prefill": (lambda: prefill(state_index=ints(4, 7, 6)), r"state_index: \[6, 7\] past the 5 slots"),
    "step": (lambda: step(read_index=ints(1, 0, 5)), r"read_index: \[5\] past the 5 slots"),
    "replay": (lambda: replay(read_index=ints(2, 5, 0)), r"read_index: \[5\] past the 5 slots"),
    "convolution": (lambda: update(state_index=ints(2, 0, 8)), r"state_index: \[8\] past the 5 slots"),
}


@pytest.mark.parametrize("name", PAST)
def test_a_slot_past_the_pool_is_named(name, caplog):
    call, message = PAST[name]
    call()
    assert caplog.messages and any(re.search(message, line) for line in caplog.messages)


def rule(**changes):
    x = inputs(2, 70, H=4, HV=4) | changes
    return gdn.chunk_gated_delta_rule(x.pop("q"), x.pop("k"), x.pop("v"), **x)


@pytest.mark.parametrize("call", [rule, lambda **x: decode(T=2, **x)])
def test_a_growing_decay_is_refused(call):
    g = torch.full((2, 70, 4), -0.1) if call is rule else torch.full((B, 2, 4), -0.1)
    call(g=g, use_qk_l2norm_in_kernel=True)
    g[1, 1, 2] = 0.25
    with pytest.raises(ValueError, match="g: expected log decays <= 0, got 0.25"):
        call(g=g, use_qk_l2norm_in_kernel=True)


def test_what_padding_holds_does_not_matter():
    x = inputs(B, 1)
    for name in ("g", "k"):
        x[name][1] = float("nan") if name == "k" else 1.0
    api.decode(**x, state=pool_of(SLOTS), read_index=ints(0, -1, 2), use_qk_l2norm_in_kernel=False)
    y = inputs(1, 30)
    y["g"][:, 20:] = 3.0
    gdn.chunk_gated_delta_rule(**y, cu_seqlens=ints(0, 20), use_qk_l2norm_in_kernel=True)


def test_keys_that_are_not_normalised_are_named(caplog):
    k = torch.nn.functional.normalize(torch.randn(2, 70, 4, 16), dim=-1)
    rule(k=k)
    assert "norms" not in caplog.text
    rule(k=1.4 * k, beta=torch.ones(2, 70, 4))
    assert "norms" not in caplog.text
    rule(k=1.5 * k, beta=torch.ones(2, 70, 4))
    assert "k: norms up to 1.5, above sqrt(2 / beta)" in caplog.text


def test_an_output_that_overflows_says_what_to_look_at():
    with pytest.raises(FloatingPointError, match="NaN or Inf in o; no input holds any; keys"):
        rule(k=torch.full((2, 70, 4, 16), 40.0), beta=torch.ones(2, 70, 4), g=None)


def test_heads_before_tokens_are_named(caplog):
    x = {name: v.transpose(1, 2) for name, v in inputs(2, 70, H=4, HV=4).items()}
    gdn.chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True)
    assert "q: T=4 tokens and H=70 heads; expected [B, T, H, K], tokens before heads" in caplog.text
    caplog.clear()
    rule(use_qk_l2norm_in_kernel=True)
    assert "tokens before heads" not in caplog.text


def test_shapes_are_logged_by_name(caplog):
    rule(use_qk_l2norm_in_kernel=True)
    assert "gdn::chunk_forward on cpu: {'q': [2, 70, 4, 16], 'k'" in caplog.text
