"""Compare unmodified Transformers models on three ranks with one process."""

from typing import Any

import pytest
import torch
from kit.sharded import relative
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gdn

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")

VOCAB = 32
FAMILIES = ("qwen3_5", "qwen3_next")


def model_of(family: str) -> nn.Module:
    """Return a tiny random model of three layers, one of which has attention, in fp64."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 3,
        "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 4,
        "initializer_range": 0.2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }  # fmt: skip
    if family == "qwen3_5":
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**options)).double()
    options["mlp_only_layers"] = [0, 1, 2]  # experts need fp32
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**options)).double()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def split(rank: int, family: str) -> list[float]:
    """Return the errors of logits, gradients and state_dict of a model whose heads are on three ranks."""
    alone, model = model_of(family), model_of(family)
    gdn.distributed.tensor_parallel(model, init_device_mesh("cpu", (3,), mesh_dim_names=("tp",)))
    ids = torch.randint(3, VOCAB, (2, 70))
    y, want = model(ids).logits, alone(ids).logits
    y.square().mean().backward()
    want.square().mean().backward()
    errors = [relative(y.detach(), want.detach())]
    # a cache holds the states of the heads of this rank
    with torch.no_grad():
        pair = [x(ids, use_cache=True).past_key_values for x in (model, alone)]
        y, want = (x(ids[:, :1], past_key_values=c).logits for x, c in zip((model, alone), pair, strict=True))
    errors.append(relative(y, want))
    assert (
        pair[0].layers[0].recurrent_states[0].shape[1] * 3 == pair[1].layers[0].recurrent_states[0].shape[1]
    )
    for read in (nn.Module.state_dict, gradients):
        found, original = read(model), read(alone)
        assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in original.items()}
        errors += [relative(whole(x), original[name]) for name, x in found.items()]
    mixer = model.model.layers[0].linear_attn
    assert mixer.out_proj.weight.shape == (24, 8), "a rank computes a third of the heads"
    assert type(mixer).forward is not type(alone.model.layers[0].linear_attn).forward
    return errors


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of all parameters by the names of the whole layer; they replace the parameters."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.grad)
    return module.state_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_on_ranks_compute_as_one_process(ranks, family):
    for errors in ranks.run(split, family):
        assert max(errors) <= 1e-5  # Transformers runs the rule in fp32
