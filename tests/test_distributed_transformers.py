"""Compare unmodified Transformers models on three ranks with one process."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from kit.norms import served_on_cpu
from kit.sharded import relative
from kit.split_models import gradients, whole
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

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


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_on_ranks_compute_as_one_process(ranks, family):
    for errors in ranks.run(split, family):
        assert max(errors) <= 1e-5  # Transformers runs the rule in fp32


class Ring(torch.autograd.Function):
    """Run torch's ring attention with the attention kernel of CPUs, which torch does not register for it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, group: Any) -> Tensor:
        o, lse = ring._templated_ring_attention(
            group, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v,
            is_causal=True, dropout_p=0.0, scale=scale,
        )  # fmt: skip
        ctx.scale, ctx.group = scale, group
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        gradients = ring._templated_ring_attention_backward(
            ctx.group, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            do.contiguous(), "grad_out", q, k, v, o, lse.to(torch.promote_types(q.dtype, torch.float32)),
            True, dropout_p=0.0, scale=ctx.scale,
        )  # fmt: skip
        return (*gradients, None, None)


def attend(
    group: Any, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend by torch's ring, in the order of tokens that torch's context_parallel has chosen."""
    assert all(x is None for x in args), "a mask"
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return Ring.apply(q.contiguous(), k, v, kwargs["scaling"], group).transpose(1, 2).contiguous(), None


def batch(num_tokens: int) -> dict[str, Tensor]:
    """Return what a model is called with: two rows of tokens, their positions, and the tokens after them."""
    ids = torch.randint(3, VOCAB, (2, num_tokens + 1), generator=torch.Generator().manual_seed(4))
    positions = torch.arange(num_tokens).repeat(2, 1)
    return {"input_ids": ids[:, :-1].clone(), "position_ids": positions, "shift_labels": ids[:, 1:].clone()}


def loss_of(model: nn.Module, x: dict[str, Tensor], num_tokens: int) -> Tensor:
    labels = x["shift_labels"]
    return model(**x, labels=labels, use_cache=False, num_items_in_batch=2 * num_tokens).loss


@contextmanager
def attention_on_ranks(group: Any = None) -> Iterator[None]:
    """Attend on the ranks of a group, by default on all."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = functools.partial(attend, group or dist.group.WORLD)
    yield
    ALL_ATTENTION_FUNCTIONS["sdpa"] = original


def run_alone(rule: Any, *args: Any, cp_context: Any, **options: Any) -> Any:
    return rule(*args, **options)


def train(rank: int, family: str, num_tokens: int, recompute: bool, has_context: bool = True) -> list[float]:
    """Return the errors of the loss and of all gradients, and check what is restored."""
    from gdn.integrations import transformers_cp

    meshes = init_device_mesh("cpu", (3, 1), mesh_dim_names=("cp", "tp"))
    mesh, alone, model = meshes["cp"], model_of(family), model_of(family)
    if recompute:
        # layers whose parameters are DTensors, as under tensor parallelism
        gdn.distributed.tensor_parallel(model, meshes["tp"])
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    x, before = batch(num_tokens), batch(num_tokens)
    with gdn.patch_transformers():
        want = loss_of(alone, x, num_tokens)
        want.backward()
        options: dict[str, Any] = {"buffers": list(x.values()), "buffer_seq_dims": [1, 1, 1]}
        with ExitStack() as stack:
            context = stack.enter_context(gdn.context_parallel(model, mesh, **options))
            assert len(context.runs) == (5 if num_tokens % 6 == 0 else 3), "zig-zag only where it divides"
            if not has_context:
                rule = functools.partial(run_alone, transformers_cp.chunk_gated_delta_rule)
                stack.enter_context(mock.patch.object(transformers_cp, "chunk_gated_delta_rule", rule))
            stack.enter_context(attention_on_ranks())
            loss = loss_of(model, x, num_tokens)
            assert x["input_ids"].shape == (2, num_tokens // 3)
            loss.backward()
    assert all(map(torch.equal, x.values(), before.values())), "buffers are restored"
    total = loss.detach().clone()
    dist.all_reduce(total)
    errors = [abs(float(total - want.detach())) / float(want.detach())]
    for parameter in model.parameters():
        gradient = parameter.grad
        dist.all_reduce(gradient.to_local() if hasattr(gradient, "to_local") else gradient)
    original = gradients(alone)
    return errors + [relative(whole(x), original[name]) for name, x in gradients(model).items()]


@pytest.mark.parametrize(
    "family, num_tokens, recompute",
    [("qwen3_5", 60, False), ("qwen3_5", 63, True), ("qwen3_next", 60, True)],
)
def test_tokens_on_ranks_train_as_one_process(ranks, family, num_tokens, recompute):
    for errors in ranks.run(train, family, num_tokens, recompute):
        assert max(errors) <= 1e-5


def test_layers_without_a_context_are_seen(ranks):
    """A layer that takes its shard for a sequence gives other gradients."""
    for errors in ranks.run(train, "qwen3_5", 60, False, False):
        assert max(errors[1:]) > 1e-2


def shard(model: nn.Module, mesh: Any, dtype: torch.dtype) -> None:
    """Call FSDP2 on layers, blocks and the model, with parameters in a dtype but for the gates."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    gdn.distributed.fully_shard_layers(model, mesh=mesh, mp_policy=policy)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def train_sharded(rank: int, dtype: torch.dtype) -> list[Any]:
    """Return the errors of the loss and of all gradients under FSDP2, and dtypes within a forward."""
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "cp"))
    alone_mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("each", "one"))["one"]
    alone, model, dtypes = model_of("qwen3_5").float(), model_of("qwen3_5").float(), []
    shard(alone, alone_mesh, dtype)
    shard(model, mesh["dp", "cp"]._flatten(f"dp_cp_{dtype}"), dtype)
    mixer, x = model.model.layers[0].linear_attn, batch(60)
    mixer.norm.register_forward_hook(
        lambda *_: dtypes.extend([mixer.A_log.dtype, mixer.in_proj_a.weight.dtype])
    )
    # in bf16 another rounding of the norm moves some gradients of this model by more than ranks may
    serve = served_on_cpu() if dtype == torch.float32 else nullcontext([])
    with gdn.patch_transformers(), serve as norms:
        want = loss_of(alone, x, 60)
        want.backward()
        options: dict[str, Any] = {"buffers": list(x.values()), "buffer_seq_dims": [1, 1, 1]}
        with gdn.context_parallel(model, mesh["cp"], **options), attention_on_ranks(mesh["cp"].get_group()):
            loss = loss_of(model, x, 60)
            (3 * loss).backward()  # FSDP2 averages
    total = loss.detach().clone()
    dist.all_reduce(total)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    errors = [relative(p.grad.full_tensor(), q.grad.full_tensor()) for p, q in pairs]
    return [relative(total, want.detach()), max(errors), dtypes, len(norms)]


@pytest.mark.parametrize("dtype, limits", [(torch.float32, (1e-6, 1e-4)), (torch.bfloat16, (1e-3, 0.1))])
def test_tokens_on_ranks_train_under_fsdp_with_gates_in_fp32(ranks, dtype, limits):
    for *errors, dtypes, num_norms in ranks.run(train_sharded, dtype):
        # those of two layers, alone and on ranks, whose classes FSDP2 has made subclasses
        assert num_norms == (4 if dtype == torch.float32 else 0)
        assert dtypes == [torch.float32, dtype]
        assert all(x <= limit for x, limit in zip(errors, limits, strict=True)), errors


def refuse(rank: int) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as file

    mesh, model, x = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",)), model_of("qwen3_5"), batch(60)
    original = file.torch_chunk_gated_delta_rule
    options: dict[str, Any] = {"buffers": list(x.values()), "buffer_seq_dims": [1, 1, 1]}
    enter = functools.partial(gdn.context_parallel, model, mesh)
    for make, error, message in (
        (
            lambda: gdn.context_parallel(nn.Linear(1, 1), mesh, **options),
            ValueError,
            "model: expected gated delt",
        ),
        (
            lambda: gdn.context_parallel(model, dist.group.WORLD, **options),
            TypeError,
            "mesh: expected a DeviceM",
        ),
        (
            lambda: enter(buffers=[torch.zeros(2, 61)], buffer_seq_dims=[1]),
            ValueError,
            "divisible by the 3 ranks",
        ),
        (lambda: enter(buffers=[], buffer_seq_dims=[]), ValueError, "buffer_seq_dims: expected one for each"),
        (
            lambda: enter(buffers=[torch.zeros(6), torch.zeros(9)], buffer_seq_dims=[0, 0]),
            ValueError,
            "one number",
        ),
    ):
        with pytest.raises(error, match=message), make():
            pass
    with enter(**options), attention_on_ranks():
        with pytest.raises(RuntimeError, match="expected no other one in this process"), enter(**options):
            pass
        zeros = torch.zeros_like(x["input_ids"])
        call = {"use_cache": False, **x}
        for change, error, message in (
            ({"use_cache": None}, NotImplementedError, "use_cache: expected False"),
            ({"attention_mask": zeros}, NotImplementedError, "attention_mask: expected None or no padding"),
            ({"cu_seq_lens_q": zeros}, NotImplementedError, "cu_seq_lens_q: expected None"),
            ({"past_key_values": zeros}, NotImplementedError, "past_key_values: expected None"),
            ({"labels": zeros, "shift_labels": None}, ValueError, "labels: expected shift_labels as well"),
            ({"position_ids": None}, ValueError, "position_ids: expected one of the buffers"),
            ({"position_ids": x["position_ids"] % 7}, ValueError, "position_ids: expected 0 .. T"),
        ):
            with pytest.raises(error, match=message):
                model(**call | change)
        loss = model(**call).logits.sum()
    assert file.torch_chunk_gated_delta_rule is original
    with pytest.raises(RuntimeError, match="expected the backward within it, got one after its end"):
        loss.backward()
    model.set_attn_implementation("eager")
    with pytest.raises(NotImplementedError, match="attn_implementation: expected 'sdpa', got 'eager'"):
        enter(**options).__enter__()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.set_attn_implementation("sdpa")
    with pytest.raises(NotImplementedError, match="use_reentrant: expected False"):
        enter(**options).__enter__()


def test_errors_of_the_context_name_the_argument(ranks):
    ranks.run(refuse)
