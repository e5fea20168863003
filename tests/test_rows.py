"""Check that a row's bits do not depend on the number of rows, by which tile sizes are chosen."""

import pytest
import torch
from kit import api
from kit.serving import inputs, pool_of, same_bits, step_of

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MOST, FEWER = 300, (1, 2, 8, 64)
PER_ROW = ("q", "k", "v", "a", "b", "z", "mixed_qkv", "read_index")


def make_call(name, sizes, pool):
    """Return a call of MOST rows on the default device: tensors, options, and what it writes by slot."""
    (H, HV, K, V), dtype = sizes, F16 if pool == F16 else BF16
    options = {"backend": None}
    if name == "step":
        x, how = step_of(MOST, H, HV, K, V, 4, dtype, pool, slots=MOST)
        return x | {"read_index": torch.arange(MOST)}, options | how, ("state", "conv_state")
    tokens = {"one token": 1, "chunk form": 6}.get(name, 4)
    x = inputs(MOST, tokens, H, HV, K, V, dtype=dtype, raw=True)
    x |= {"state": pool_of(MOST, HV=HV, K=K, V=V, dtype=pool), "read_index": torch.arange(MOST)}
    if name != "replay":
        return x, options | {"exact_packet": name != "chunk form"}, ("state",)
    x |= {
        "history_u": torch.randn(MOST, 8, HV, V).to(dtype), "history_k": torch.randn(MOST, 8, H, K).to(dtype),
        "history_G": -torch.rand(MOST, 8, HV, dtype=torch.float64).cumsum(1),
        "cursor": torch.arange(MOST) % 5,
    }  # fmt: skip
    return x, options, ("history_u", "history_k", "history_G")


@pytest.mark.parametrize("pool", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("name", ["one token", "packet", "chunk form", "replay", "step"])
def test_a_row_among_any_number_of_rows(backend, device, name, pool):
    """A row has its bits among 32 to 9600 states, which fill a GPU not at all or many times."""
    call = {"replay": api.replay_decode, "step": api.decode_step}.get(name, api.decode)
    with torch.device(device):
        x, options, written = make_call(name, (2, 4, 16, 24) if device == "cpu" else (16, 32, 128, 128), pool)
        options["backend"] = backend
        batches = [torch.randperm(MOST)[:count] for count in FEWER]

    def run(batch):
        """Return the outputs of some rows, and the states in their slots."""
        few = {key: v[batch] if key in PER_ROW else v for key, v in x.items()}
        few |= {key: x[key].clone() for key in written}
        return [call(**few, **options), *(few[key][batch] for key in written)]

    whole = run(torch.arange(MOST, device=device))
    assert all(y.isfinite().all() and y.any() for y in whole)
    for batch in batches:
        for few, many in zip(run(batch), whole, strict=True):
            assert same_bits(few, many[batch]), len(batch)
