"""Count the operators of a patched layer's decode step; each is at least one launch on a GPU.

A CPU stands for the GPU: the norm's own patch serves it as well, so that a second path would be counted.
"""

import pytest
import torch
from kit.operators import Operators

transformers = pytest.importorskip("transformers")

import test_transformers as models  # noqa: E402

import gdn  # noqa: E402
from gdn.integrations import transformers_norm as norms  # noqa: E402

pytestmark = pytest.mark.usefixtures("originals_restored")
# operators of Transformers' own step, and of ours before decode_step; Qwen3-Next sorts its rows by heads
FAMILIES = {
    "qwen3_5": (49, ["mm"] * 4),
    "qwen3_next": (54, ["mm"] * 2 + ["clone"] * 6 + ["cat"]),
}


def step_of(family, prompt):
    """Return a function that runs one token through the first layer, on the cache of a prompt."""
    model, x = models.make_model(family), torch.randn(2, 1, 32)
    cache = model(prompt, use_cache=True)[models.CACHE]
    layer = model.model.layers[0].linear_attn
    return lambda: layer(hidden_states=x, **{models.CACHE_OF_LAYER: cache})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_operators_of_a_decode_step(family, monkeypatch):
    """Between the projections lies one operator, which is three launches on a GPU; the norm is inside."""
    monkeypatch.setattr(norms, "DEVICES", ("cpu", "cuda"))
    prompt, (count, before) = models.tokens(2, 9), FAMILIES[family]
    with torch.no_grad():
        run = step_of(family, prompt)
        with Operators() as plain:
            run()
        with gdn.patch_transformers():
            run = step_of(family, prompt)
            with Operators() as patched:
                run()
    assert patched.names == [*before, "decode_step", "mm"]
    # other versions of Transformers and PyTorch may have some more or fewer
    assert abs(len(plain.names) - count) <= 8, plain.names
