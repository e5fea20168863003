"""Test gdn.patch_transformers() on tiny random models of every family, with Transformers 5.17 to 5.24."""

import copy
import importlib
import inspect
import sys
import warnings

import pytest
import torch
from kit import forks
from torch._dynamo.backends.debugging import aot_eager

transformers = pytest.importorskip("transformers")

import gdn  # noqa: E402
from gdn.integrations import transformers_calls as calls  # noqa: E402
from gdn.integrations import transformers_step as steps  # noqa: E402
from gdn.integrations.transformers_packing import (  # noqa: E402
    CACHES,
    cache_of,
    find_documents,
    restarts,
)

pytestmark = pytest.mark.usefixtures("originals_restored")
FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid")
VOCAB = 97
RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
FUNCTIONS = (*RULES, "causal_conv1d_fn", "causal_conv1d_update")
TEXT_MODELS = {
    "qwen3_5": "Qwen3_5TextModel",
    "qwen3_next": "Qwen3NextModel",
    "qwen3_5_moe": "Qwen3_5MoeTextModel",
    "qwen4_exp": "Qwen4ExpTextModel",
    "olmo_hybrid": "OlmoHybridModel",
}

# the names of a model's arguments and outputs in the installed version
PARAMETERS = inspect.signature(transformers.Qwen3_5ForCausalLM.forward).parameters
(CACHE,) = [name for name in CACHES if name in PARAMETERS]
CACHE_OF_LAYER = "cache" if CACHE == "cache" else "cache_params"

transformers.logging.set_verbosity_error()


def make_config(family):
    """Return a config of three small layers, with K != V and two value heads per key head if possible."""
    options = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "initializer_range": 0.2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }  # fmt: skip
    moe = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }  # fmt: skip
    if family == "qwen3_5":
        return transformers.Qwen3_5TextConfig(**options)
    if family == "qwen3_next":
        return transformers.Qwen3NextConfig(**options, **moe)
    if family == "qwen3_5_moe":
        return transformers.Qwen3_5MoeTextConfig(**options, **moe)
    if family == "olmo_hybrid":
        return transformers.OlmoHybridConfig(**(options | {"linear_num_key_heads": 4}))
    del options["layer_types"]
    indexer = {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    }  # fmt: skip
    return transformers.Qwen4ExpTextConfig(
        **options, **moe, **indexer, full_attention_interval=2, hc_lowrank=8
    )


_models = {}


def make_model(family):
    """Return the family's random model in eval mode; it is built once, so no test may change its weights."""
    if family not in _models:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(make_config(family)).eval()
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                # decays of a few percent per token: states reach across chunks, and A_log has a gradient
                p.data.uniform_(-4, -1)
        _models[family] = model
    return _models[family]


def model_file(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def tokens(*shape, seed=1):
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def error(x, ref):
    """Return the relative RMS error in fp64."""
    x, ref = x.detach().double(), ref.detach().double()
    return float((x - ref).norm() / ref.norm())


def loss_and_gradients(model, ids, **options):
    """Return the next-token loss, and the gradient of every parameter that has one."""
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False, **options).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients


def generate(model, ids, **options):
    """Return greedy tokens after the prompt, with no early end."""
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **options}
    return model.generate(ids, **options)[:, ids.shape[1] :]


@pytest.fixture
def counts(monkeypatch):
    """Count the calls of each public gdn function by the patched functions."""
    seen = {}

    def counted(owner, name):
        serve = getattr(owner, name)

        def count(*args, **kwargs):
            seen[name] = seen.get(name, 0) + 1
            return serve(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    for owner, name in SERVED:
        counted(owner, name)
    return seen


SERVED = (
    (calls, "chunk_gated_delta_rule"),
    (calls, "fused_recurrent_gated_delta_rule"),
    (calls, "decode"),
    (calls.short_conv, "causal_conv1d"),
    (calls.short_conv, "causal_conv1d_update"),
    (steps, "decode_step"),
)
# families whose layers run a token by decode_step
STEPPED = tuple(family for family in FAMILIES if family != "olmo_hybrid")


# results agree with the original functions


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_the_originals(family, counts):
    model, ids = make_model(family), tokens(2, 70)
    logits = model(ids, use_cache=False).logits
    loss, gradients = loss_and_gradients(model, ids)
    assert not counts
    with gdn.patch_transformers():
        assert error(model(ids, use_cache=False).logits, logits) <= 2e-5
        patched_loss, patched_gradients = loss_and_gradients(model, ids)
    assert counts == {"chunk_gated_delta_rule": 4, "causal_conv1d": 4}
    assert error(patched_loss, loss) <= 2e-5
    assert patched_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert error(patched_gradients[name], gradient) <= 1e-4, name


@pytest.mark.parametrize("wrong", ["zeros", "swapped heads", "no state"])
def test_the_gate_can_fail(wrong, monkeypatch):
    model, ids = make_model("qwen3_5"), tokens(2, 70)
    logits, words = model(ids, use_cache=False).logits, generate(model, ids)
    serve = calls.chunk_gated_delta_rule

    def served_wrongly(*args, **kwargs):
        o, S = serve(*args, **kwargs)
        if wrong == "zeros":
            return torch.zeros_like(o), S
        if wrong == "swapped heads":
            return o.flip(2), S
        return o, None if S is None else torch.zeros_like(S)

    monkeypatch.setattr(calls, "chunk_gated_delta_rule", served_wrongly)
    with gdn.patch_transformers():
        is_close = error(model(ids, use_cache=False).logits, logits) <= 2e-5
        assert is_close == (wrong == "no state")
        assert not torch.equal(generate(model, ids), words)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_is_that_of_the_originals(family, counts):
    model, ids = make_model(family), tokens(2, 70)
    ways = {
        "greedy": {},
        "beam search": {"num_beams": 3},
        "static cache": {"cache_implementation": "static", "disable_compile": True},
        "left padded": {"attention_mask": (torch.arange(70) >= torch.tensor([[0], [41]])).long()},
    }
    words = {way: generate(model, ids, **options) for way, options in ways.items()}
    with gdn.patch_transformers():
        for way, options in ways.items():
            assert torch.equal(generate(model, ids, **options), words[way]), way
    if family in STEPPED:
        # a token for each row and layer with a state, in all four ways
        assert set(counts) == {"chunk_gated_delta_rule", "causal_conv1d", "decode_step"}
    else:
        assert set(counts) == {name for _, name in SERVED} - {"decode_step"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_pieces_equals_the_whole(family):
    model, ids = make_model(family), tokens(2, 70)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        with gdn.patch_transformers():
            for pieces in ([66, 4], [1, 69], [2, 1, 67], [64, 1, 1, 4]):
                out, rows = {}, []
                for piece in ids.split(pieces, dim=1):
                    out = model(piece, use_cache=True, **cache_of(out))
                    rows.append(out.logits)
                assert error(torch.cat(rows, 1), logits) <= 2e-5, pieces


def test_decoding_outside_of_no_grad(counts):
    """A decode loop works without no_grad, though the serving functions have no gradient."""
    model, ids = make_model("qwen3_5"), tokens(1, 9)

    def step():
        cache = cache_of(model(ids[:, :-1], use_cache=True))
        return model(ids[:, -1:], **cache).logits

    logits = step()
    with gdn.patch_transformers():
        patched = step()
    assert patched.requires_grad and error(patched, logits) <= 2e-5
    assert counts["fused_recurrent_gated_delta_rule"] == 2


def test_only_the_buffers_of_a_cache_are_written():
    """A decode step updates a cache's state in place, and no state from elsewhere."""
    model, ids, file = make_model("olmo_hybrid"), tokens(2, 9), model_file("olmo_hybrid")
    with gdn.patch_transformers(), torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True)[CACHE]
        buffer = cache.layers[0].recurrent_states[0]
        S, seen = buffer.clone(), []
        with pytest.MonkeyPatch.context() as patch:
            update = cache.update_recurrent_state
            patch.setattr(
                cache, "update_recurrent_state", lambda S, *args: seen.append(S) or update(S, *args)
            )
            model(ids[:, -1:], **{CACHE: cache})
        assert seen[0] is buffer and cache.layers[0].recurrent_states[0] is buffer
        assert error(buffer, S) > 1e-3
        before, x = S.clone(), torch.randn(2, 1, 4, 8)
        gates = {"g": -torch.rand(2, 1, 4), "beta": torch.rand(2, 1, 4)}
        o, after = file.torch_recurrent_gated_delta_rule(
            x, x, torch.randn(2, 1, 4, 12), **gates, initial_state=S, output_final_state=True
        )
        assert torch.equal(S, before) and error(after, before) > 1e-3


@pytest.mark.parametrize("family", STEPPED)
def test_a_step_of_a_layer_writes_the_buffers_of_its_cache(family, counts):
    """One token runs by decode_step on the cache's own window and state, which are those of the original."""
    model, ids = make_model(family), tokens(2, 9)

    def step():
        cache = model(ids[:, :-1], use_cache=True)[CACHE]
        layer = cache.layers[0]
        buffers = layer.conv_states[0], layer.recurrent_states[0]
        logits = model(ids[:, -1:], **{CACHE: cache}).logits
        assert layer.conv_states[0] is buffers[0] and layer.recurrent_states[0] is buffers[1]
        return logits, *buffers

    with torch.no_grad():
        expected = step()
        with gdn.patch_transformers():
            for one, other in zip(step(), expected, strict=True):
                assert error(one, other) <= 2e-5
    assert counts["decode_step"] == sum(t == "linear_attention" for t in model.config.layer_types)


REASONS = ("hook", "pre-hook", "adapter", "replaced forward", "recorded past", "padding", "several tokens")
REASONS += ("global hook", "other norm", "parametrised filter", "parametrised bias")


class ZeroCentred(torch.nn.Module):
    """Compute the gated norm of a model file with other weights, which have the same name."""

    def __init__(self, norm):
        super().__init__()
        self.weight = torch.nn.Parameter(norm.weight.detach() - 1)
        self.variance_epsilon, self.activation = norm.variance_epsilon, norm.activation

    def forward(self, x, gate):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight) * x * rstd * torch.nn.functional.silu(gate)


def make_special(layer, reason):
    """Replace a part of a layer by one that computes something else from parameters of the same names."""
    register = torch.nn.utils.parametrize.register_parametrization
    if reason == "other norm":
        layer.norm = ZeroCentred(layer.norm)
    elif reason == "parametrised filter":
        register(layer.conv1d, "weight", torch.nn.Tanh())
    elif reason == "parametrised bias":
        register(layer, "dt_bias", torch.nn.Tanh())


@pytest.mark.parametrize("reason", REASONS)
def test_a_step_with_something_special_is_the_classs_own(reason, counts):
    model, ids = copy.deepcopy(make_model("qwen3_5")), tokens(2, 9)
    layer, calls_of_hook = model.model.layers[0].linear_attn, []
    make_special(layer, reason)
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
    with gdn.patch_transformers(), torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True)[CACHE]
        if reason == "hook":
            layer.norm.register_forward_hook(lambda *args: calls_of_hook.append(args))
        elif reason == "pre-hook":
            layer.in_proj_z.register_forward_pre_hook(lambda *args: calls_of_hook.append(args))
        elif reason == "adapter":
            layer.out_proj = torch.nn.Sequential(layer.out_proj)
        elif reason == "replaced forward":
            layer.norm.forward = type(layer.norm).forward.__get__(layer.norm)
        elif reason == "recorded past":
            if not hasattr(cache, "activate_past_recording"):
                pytest.skip("this version of Transformers records no past")
            cache.activate_past_recording()
        elif reason == "padding":
            x, mask = torch.randn(2, 1, 32), torch.ones(2, 1)
            layer(hidden_states=x, attention_mask=mask, **{CACHE_OF_LAYER: cache})
        elif reason == "global hook":
            hook = torch.nn.modules.module.register_module_forward_hook(
                lambda module, *args: calls_of_hook.append(args) if module is layer.in_proj_z else None
            )
        last = ids[:, -2:] if reason == "several tokens" else ids[:, -1:]
        if reason != "padding":
            logits = model(last, **{CACHE: cache}).logits
            assert reason == "several tokens" or error(logits, expected) <= 2e-5
        if reason == "global hook":
            hook.remove()
    # the second layer is special only by its cache and by the number of tokens
    own = {"recorded past", "several tokens", "padding", "global hook"}
    assert counts.get("decode_step", 0) == (0 if reason in own else 1)
    assert len(calls_of_hook) == ("hook" in reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_keep_an_fp32_state(dtype):
    model, ids = copy.deepcopy(make_model("qwen3_5")).to(dtype), tokens(2, 70)
    with torch.no_grad():
        exact = make_model("qwen3_5")(ids).logits
        original = error(model(ids).logits, exact)
        with gdn.patch_transformers():
            out = model(ids, use_cache=True)
    assert out.logits.dtype == dtype
    assert out[CACHE].layers[0].recurrent_states[0].dtype == torch.float32
    assert error(out.logits, exact) <= 1.1 * original


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_without_a_cache(family):
    """A padded row has the result of its text alone, whichever side the padding is on."""
    model, ids = make_model(family), tokens(2, 70)
    with gdn.patch_transformers(), torch.no_grad():
        for start, end in ((0, 41), (29, 70)):
            mask = torch.zeros(2, 70, dtype=torch.long)
            mask[0], mask[1, start:end] = 1, 1
            padded = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
            assert error(padded[1, start:end], model(ids[1:, start:end]).logits[0]) <= 2e-5
            assert error(padded[0], model(ids[:1]).logits[0]) <= 2e-5


def test_autocast():
    """Under autocast the patched model is as close to the fp32 one as the original model is."""
    model, ids = make_model("qwen3_5"), tokens(2, 70)
    exact_loss, exact = loss_and_gradients(model, ids)
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    with torch.autocast("cpu", torch.bfloat16):
        loss, original = loss_and_gradients(model, ids)
        with gdn.patch_transformers():
            patched_loss, patched = loss_and_gradients(model, ids)
    assert error(patched_loss, exact_loss) <= max(1.5 * error(loss, exact_loss), 1e-3)
    assert error(patched[name], exact[name]) <= 1.1 * error(original[name], exact[name])


LIMIT = (
    "the layer's forward neither masks the decay nor skips pads in the cached window; no argument tells us"
)


@pytest.mark.xfail(reason=LIMIT, strict=True)
def test_limit_left_pads_inside_a_continued_segment():
    model, ids = make_model("qwen3_5"), tokens(2, 70)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, 50:60] = 0
    with gdn.patch_transformers(), torch.no_grad():
        cache = model(ids[:, :50], attention_mask=mask[:, :50])[CACHE]
        position_ids = (mask.cumsum(1) - 1)[:, 50:]
        out = model(ids[:, 50:], attention_mask=mask, position_ids=position_ids, **{CACHE: cache}).logits
        alone = model(ids[1:, mask[1].bool()]).logits
    assert error(out[1, 10:], alone[0, 50:]) <= 2e-5


@pytest.mark.xfail(reason=LIMIT, strict=True)
def test_limit_right_padded_prefill_then_decode():
    model, ids = make_model("qwen3_5"), tokens(2, 71)
    mask = torch.ones(2, 71, dtype=torch.long)
    mask[1, 41:70] = 0
    with gdn.patch_transformers(), torch.no_grad():
        cache = model(ids[:, :70], attention_mask=mask[:, :70])[CACHE]
        position_ids = (mask.cumsum(1) - 1)[:, 70:]
        out = model(ids[:, 70:], attention_mask=mask, position_ids=position_ids, **{CACHE: cache}).logits
        alone = model(ids[1:, mask[1].bool()]).logits
    assert error(out[1, -1], alone[0, -1]) <= 2e-5


# training


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family, counts):
    model, ids = copy.deepcopy(make_model(family)).train(), tokens(2, 70)
    with gdn.patch_transformers():
        loss, gradients = loss_and_gradients(model, ids)
        model.gradient_checkpointing_enable()
        again, checkpointed = loss_and_gradients(model, ids)
    assert counts["chunk_gated_delta_rule"] == 6  # 2 calls, then 2 forward and 2 recomputed
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        assert error(checkpointed[name], gradient) <= 1e-6 or not gradient.any(), name


def train(model, tmp_path, collator=None, **options):
    """Return the losses of three Trainer steps on documents, of one length without a collator."""
    lengths = [24] * 6 if collator is None else [24, 1, 70, 5, 3, 33]
    data = [{"input_ids": (ids := tokens(n, seed=n + i)), "labels": ids} for i, n in enumerate(lengths)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2 if collator is None else 3,
        use_cpu=True, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True, seed=0,
        learning_rate=1e-3, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator)
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def test_trainer(tmp_path, counts):
    losses = train(copy.deepcopy(make_model("qwen3_5")), tmp_path)
    assert losses.shape == (3,) and not counts
    with gdn.patch_transformers():
        patched = train(copy.deepcopy(make_model("qwen3_5")), tmp_path, gradient_checkpointing=True)
    assert counts["chunk_gated_delta_rule"] >= 6
    torch.testing.assert_close(patched, losses, rtol=1e-4, atol=0)


def flattening(**options):
    return transformers.DataCollatorWithFlattening(**options)


def test_trainer_on_packed_documents(tmp_path):
    """Three steps on packed rows give the same losses with infer_packing and only restarting positions."""
    told = flattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    with gdn.patch_transformers():
        losses = train(copy.deepcopy(make_model("qwen3_5")), tmp_path, told)
    with gdn.patch_transformers(infer_packing=True):
        inferred = train(copy.deepcopy(make_model("qwen3_5")), tmp_path, flattening())
    assert torch.equal(losses, inferred)
    with gdn.patch_transformers(), pytest.warns(RuntimeWarning, match="position_ids restart"):
        leaking = train(copy.deepcopy(make_model("qwen3_5")), tmp_path, flattening())
    assert not torch.allclose(leaking, losses, rtol=1e-4)


# packed documents

LENGTHS = [1, 5, 33, 2, 29]


def pack(model, collator, **kwargs):
    """Return the logits of the packed documents, and of each document alone, in one row."""
    documents = [tokens(n, seed=n) for n in LENGTHS]
    batch = collator([{"input_ids": d} for d in documents])
    batch.pop("labels")
    with torch.no_grad():
        alone = torch.cat([model(d[None], use_cache=False).logits for d in documents], 1)
        return model(**batch, use_cache=False, **kwargs).logits, alone


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_separate(family, counts):
    model = make_model(family)
    both = flattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    try:
        packed, alone = pack(model, both)
    except ValueError as refusal:  # 5.23
        assert "packed" in str(refusal)
    else:  # 5.17
        assert error(packed, alone) > 1e-3
    with gdn.patch_transformers():
        for collator in (both, flattening(return_flash_attn_kwargs=True), flattening(return_seq_idx=True)):
            packed, alone = pack(model, collator)
            assert error(packed, alone) <= 2e-5
    with gdn.patch_transformers(infer_packing=True):
        packed, alone = pack(model, flattening())
        assert error(packed, alone) <= 2e-5
    with gdn.patch_transformers(), pytest.warns(RuntimeWarning, match="position_ids restart") as seen:
        packed, alone = pack(model, flattening())
        pack(model, flattening())
    assert error(packed, alone) > 1e-3 and len(seen) == 1
    assert counts["chunk_gated_delta_rule"] > 0


def test_packed_gradients_are_those_of_the_documents():
    model = make_model("qwen3_5")
    documents = [tokens(n, seed=n) for n in LENGTHS]
    batch = flattening(return_flash_attn_kwargs=True, return_seq_idx=True)(
        [{"input_ids": d} for d in documents]
    )
    with gdn.patch_transformers():
        model.zero_grad()
        model(**batch, use_cache=False).logits.square().sum().backward()
        packed = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        for document in documents:
            model(document[None], use_cache=False).logits.square().sum().backward()
    assert all(error(packed[name], p.grad) <= 1e-4 for name, p in model.named_parameters())
    model.zero_grad()


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_packing_is_inferred_from_rows_of_positions(rows):
    """Three rows of positions separate documents; only calls are compared, since the attention does not."""
    model, seen, serve = make_model("qwen3_5"), [], calls.chunk_gated_delta_rule
    documents = flattening()([{"input_ids": tokens(n, seed=n)} for n in LENGTHS])
    position_ids = documents["position_ids"].expand(rows, 1, -1)
    if rows == 1:
        position_ids = position_ids[0]

    def spy(*args, cu_seqlens=None, **kwargs):
        seen.append(cu_seqlens)
        return serve(*args, cu_seqlens=cu_seqlens, **kwargs)

    with pytest.MonkeyPatch.context() as patch, gdn.patch_transformers(infer_packing=True), torch.no_grad():
        patch.setattr(calls, "chunk_gated_delta_rule", spy)
        model(documents["input_ids"], position_ids=position_ids, use_cache=False)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    assert len(seen) == 2 and all(torch.equal(cu.long(), ends) for cu in seen)


def test_where_documents_start():
    # the first document is a picture of 2 x 2 patches and text, the second is text
    temporal, height, width = [0, 0, 0, 0, 2, 3, 0, 1], [0, 0, 1, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3, 0, 1]
    picture = torch.tensor([temporal, height, width])[:, None]
    assert restarts(picture).nonzero().flatten().tolist() == [5]
    assert restarts(torch.tensor([[0, 0, 1, 5, 6, 2]])).nonzero().flatten().tolist() == [0, 4]
    assert not restarts(torch.tensor([[7, 8, 12]])).any()


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_continued_text_has_no_documents(name):
    """A continued text is one document, by whatever name its cache comes; an empty cache decides nothing."""
    model, restarting = make_model("qwen3_5"), torch.arange(20).fmod(12)[None]
    with torch.no_grad():
        used = model(tokens(1, 4), use_cache=True)[CACHE]
    assert find_documents({name: used}, restarting) == {}
    empty = transformers.DynamicCache(config=model.config)
    assert find_documents({name: empty}, restarting)["cu_seq_lens_q"].tolist() == [0, 12, 20]


@pytest.mark.parametrize("why", ["continued", "padded", "two rows", "told", "one document"])
def test_packing_is_not_inferred(why):
    """Where a row is not packed, infer_packing changes no bit of the logits and gives no warning."""
    model, ids = make_model("qwen3_5"), tokens(2 if why == "two rows" else 1, 20)
    restarting = torch.arange(20).fmod(12)[None]
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[:, :3] = 0

    def run():
        options = {"position_ids": restarting}
        if why == "continued":
            options |= cache_of(model(ids[:, :4], use_cache=True))
        if why == "padded":
            options["attention_mask"] = mask
        if why == "told":
            options["cu_seq_lens_q"] = torch.tensor([0, 20], dtype=torch.int32)
        if why == "one document":
            options["position_ids"] = torch.arange(20)[None] + 3
        return model(ids, **options).logits

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with gdn.patch_transformers():
            plain = run()
        with gdn.patch_transformers(infer_packing=True):
            assert torch.equal(run(), plain)


def test_a_packed_row_leaves_the_last_document_in_the_cache():
    file, q = model_file("qwen3_5"), torch.randn(1, 9, 2, 8)
    arguments = (q, q + 1, torch.randn(1, 9, 4, 12))
    gates = {"g": -torch.rand(1, 9, 4), "beta": torch.rand(1, 9, 4), "output_final_state": True}
    with gdn.patch_transformers():
        _, S = file.torch_chunk_gated_delta_rule(*arguments, **gates, cu_seqlens=torch.tensor([0, 2, 9]))
        last = {name: x[:, 2:] if torch.is_tensor(x) else x for name, x in gates.items()}
        _, alone = file.torch_chunk_gated_delta_rule(*(x[:, 2:] for x in arguments), **last)
        torch.testing.assert_close(S, alone)
        with pytest.raises(ValueError, match="initial_state"):
            file.torch_chunk_gated_delta_rule(
                *arguments, **gates, cu_seqlens=torch.tensor([0, 2, 9]), initial_state=S
            )


def test_packed_convolution_with_columns_in_front():
    """A packed prompt that is shorter than the filter may arrive padded to the filter's width."""
    file, weight, x = model_file("qwen3_5"), torch.randn(6, 4), torch.randn(1, 6, 3)
    offsets, seq_idx = torch.tensor([0, 1, 3]), torch.tensor([[0, 1, 1]])
    padded = torch.nn.functional.pad(x, (1, 0))
    with gdn.patch_transformers():
        conv = file.causal_conv1d_fn
        alone = torch.cat([conv(x[:, :, :1], weight), conv(x[:, :, 1:], weight)], 2)
        for told in (
            {"cu_seq_lens_q": offsets},
            {"seq_idx": seq_idx},
            {"cu_seq_lens_q": offsets, "seq_idx": seq_idx},
        ):
            torch.testing.assert_close(conv(padded, weight, None, activation=None, **told)[:, :, 1:], alone)


# torch.compile, export, and calls that go to the original functions


@pytest.mark.slow
@pytest.mark.parametrize(("family", "with_joint_graph"), [("olmo_hybrid", True), ("qwen3_5", False)])
def test_compiled_without_graph_breaks_for_every_length(family, with_joint_graph):
    """One graph serves all lengths, with gradients; the originals compile for each number of chunks."""
    torch._dynamo.reset()
    model, graphs = copy.deepcopy(make_model(family)), []
    del model.model.layers[2]
    model.config.num_hidden_layers = 2

    def backend(graph, example_inputs):
        graphs.append(str(graph.code))
        return aot_eager(graph, example_inputs) if with_joint_graph else graph.forward

    with gdn.patch_transformers():
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for T in (70, 130):
            ids = tokens(2, T)
            expected, gradients = loss_and_gradients(model, ids)
            torch._dynamo.mark_dynamic(ids, 1)
            loss, compiled_gradients = loss_and_gradients(compiled, ids)
            assert error(loss, expected) <= 1e-6
            for name, gradient in gradients.items():
                assert error(compiled_gradients["_orig_mod." + name], gradient) <= 1e-5, name
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert graphs[0].count("gdn.chunk_forward") == graphs[0].count("gdn.causal_conv1d") == 1


def test_a_compiled_decode_step():
    """One graph serves every step on a static cache, and updates its convolution window in place."""
    torch._dynamo.reset()
    model, ids, graphs = make_model("qwen3_5"), tokens(2, 12), []

    def backend(graph, example_inputs):
        graphs.append(str(graph.code))
        return aot_eager(graph, example_inputs)

    with gdn.patch_transformers(), torch.no_grad():
        step = torch.compile(model, fullgraph=True, backend=backend)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        rows = [model(ids[:, :6], **{CACHE: cache}).logits]
        for i in range(6, 12):
            position_ids = torch.full((2, 1), i)
            rows.append(step(ids[:, i : i + 1], position_ids=position_ids, **{CACHE: cache}).logits)
        assert error(torch.cat(rows, 1), model(ids, use_cache=False).logits) <= 2e-5
    torch._dynamo.reset()
    assert len(graphs) == 1
    # an operator that writes the cache's buffers: no state is returned, none is copied
    assert graphs[0].count("gdn.decode_step") == 2
    assert not any(
        name in graphs[0] for name in ("gdn.recurrent_forward", "gdn.causal_conv1d_update", ".copy_(")
    )


def test_packing_is_never_inferred_inside_a_graph():
    """Reading positions breaks a graph, and raises with fullgraph, so no graph silently mixes documents."""
    torch._dynamo.reset()
    model, batch = make_model("qwen3_5"), flattening()([{"input_ids": tokens(n, seed=n)} for n in LENGTHS])
    options = {"position_ids": batch["position_ids"], "use_cache": False}
    with gdn.patch_transformers(infer_packing=True), torch.no_grad():
        compiled = torch.compile(model.model, fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="give cu_seq_lens_q and seq_idx instead"):
            compiled(batch["input_ids"], **options)
    torch._dynamo.reset()


def test_exported_functions_are_the_originals():
    file = model_file("qwen3_5")

    class Rule(torch.nn.Module):
        def forward(self, x, gate):
            return file.causal_conv1d_fn(x, torch.ones(8, 4), activation="silu")

    with gdn.patch_transformers():
        program = torch.export.export(Rule(), (torch.randn(1, 8, 5), torch.randn(1, 5, 2)))
        assert "gdn" not in program.graph_module.code
        compiled = torch.compile(Rule(), backend="eager", fullgraph=True)(
            torch.randn(1, 8, 5), torch.randn(1, 5, 2)
        )
        assert compiled.shape == (1, 8, 5)


def test_meta_tensors_go_to_the_originals(counts):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(make_config("qwen3_5"))
    with gdn.patch_transformers():
        logits = model(torch.zeros(2, 5, dtype=torch.long, device="meta")).logits
    assert logits.shape == (2, 5, VOCAB) and not counts


def test_an_unsupported_problem_goes_to_the_originals(monkeypatch):
    model, ids = make_model("qwen3_5"), tokens(1, 9)
    logits = model(ids, use_cache=False).logits

    def refuse(*args, **kwargs):
        raise NotImplementedError("no backend supports this call: eager: not today")

    for owner, name in SERVED:
        monkeypatch.setattr(owner, name, refuse)
    with gdn.patch_transformers():
        with pytest.warns(RuntimeWarning, match="left to Transformers: .*not today"):
            assert torch.equal(model(ids, use_cache=False).logits, logits)
        with pytest.raises(NotImplementedError, match="not today"):
            model(ids, use_cache=False, cu_seq_lens_q=torch.tensor([0, 4, 9]))


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_whatever_gdn_rejects_goes_to_the_originals(monkeypatch, error):
    """Rejected calls go to the originals, except packed ones; an error of a backend at work is raised."""
    model, ids = make_model("qwen3_5"), tokens(1, 9)
    logits = model(ids, use_cache=False).logits

    def reject(*args, **kwargs):
        raise error("q: expected this, got that")

    with monkeypatch.context() as patched:
        for owner, name in SERVED:
            patched.setattr(owner, name, reject)
        with gdn.patch_transformers():
            with pytest.warns(RuntimeWarning, match="left to Transformers: q: expected this"):
                assert torch.equal(model(ids, use_cache=False).logits, logits)
            with pytest.raises(error, match="q: expected this"):
                model(ids, use_cache=False, cu_seq_lens_q=torch.tensor([0, 4, 9]))
    monkeypatch.setattr(importlib.import_module("gdn.backends.eager.conv"), "convolve_sequences", reject)
    with gdn.patch_transformers(), pytest.raises(error, match="q: expected this"):
        model(ids, use_cache=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_device_of_the_tensors_decides(family):
    """One process serves a model on the CPU and its copy on a GPU."""
    model, ids = make_model(family), tokens(2, 70)
    twin = copy.deepcopy(model).cuda()
    expected, written = loss_and_gradients(twin, ids.cuda()), generate(twin, ids.cuda())
    with gdn.patch_transformers(infer_packing=True):
        loss, gradients = loss_and_gradients(twin, ids.cuda())
        assert error(loss, expected[0]) <= 2e-5
        assert all(error(gradients[name], x) <= 1e-3 for name, x in expected[1].items())
        assert torch.equal(generate(twin, ids.cuda()), written)
        if family == "qwen4_exp":
            # its indexer ranks keys, and rounding can change a rank: the original loss differs by 4e-5 too
            return
        batch = flattening()([{"input_ids": tokens(n, seed=n)} for n in LENGTHS])
        options = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
        packed = twin(**{name: x.cuda() for name, x in options.items()}, use_cache=False).logits
        assert error(packed.cpu(), model(**options, use_cache=False).logits) <= 2e-5


# which models run on gdn, and when


def test_every_family_is_found_and_restored_bit_for_bit():
    from transformers.modeling_utils import PreTrainedModel

    def everything():
        owners = [(model_file(family), name) for family in FAMILIES for name in FUNCTIONS]
        owners += [(getattr(model_file(family), cls), "forward") for family, cls in TEXT_MODELS.items()]
        return [vars(owner)[name] for owner, name in [*owners, (PreTrainedModel, "__init_subclass__")]]

    originals = everything()
    patch = gdn.patch_transformers()
    files = [f"transformers.models.{family}.modeling_{family}" for family in FAMILIES]
    assert set(patch.modules) >= set(files) and "qwen3_5" in repr(patch)
    served = everything()
    assert all(ours is not original for ours, original in zip(served, originals, strict=True))
    again = gdn.patch_transformers()
    assert all(x is y for x, y in zip(everything(), served, strict=True))
    patch.undo()
    assert all(x is y for x, y in zip(everything(), served, strict=True)) and not patch.is_active
    again.undo()
    assert all(x is y for x, y in zip(everything(), originals, strict=True))
    patch.undo()
    assert repr(patch) == "Patch(undone)" and patch.modules == []


def test_nested_patches_end_in_any_order(counts):
    model, ids = make_model("qwen3_5"), tokens(1, 5)

    def is_served():
        counts.clear()
        model(ids, use_cache=False)
        return bool(counts)

    outer = gdn.patch_transformers()
    with gdn.patch_transformers(infer_packing=True) as inner:
        outer.undo()
        assert is_served() and inner.is_active
        with pytest.raises(KeyError), gdn.patch_transformers():
            raise KeyError
        assert is_served()
    assert not is_served()
    with gdn.patch_transformers():
        assert is_served()


def test_a_function_that_outlives_its_patch_calls_the_original(counts):
    file = model_file("qwen3_5")
    with gdn.patch_transformers():
        kept = file.causal_conv1d_fn
        file.causal_conv1d_fn = wrapper = lambda *args, **kwargs: kept(*args, **kwargs)
    assert file.causal_conv1d_fn is wrapper  # not ours to restore
    x = torch.randn(1, 8, 5)
    assert wrapper(x, torch.ones(8, 4)).shape == x.shape and not counts
    file.causal_conv1d_fn = kept.__closure__[[*kept.__code__.co_freevars].index("original")].cell_contents


def test_models_made_before_and_during_and_loaded(tmp_path, counts):
    before, ids = make_model("qwen3_5"), tokens(1, 70)
    logits = before(ids).logits
    before.save_pretrained(tmp_path)
    with gdn.patch_transformers():
        for model in (before, transformers.AutoModelForCausalLM.from_pretrained(tmp_path)):
            counts.clear()
            assert error(model(ids).logits, logits) <= 2e-5 and counts["chunk_gated_delta_rule"] == 2


def test_the_vision_language_model_is_served(counts):
    text = make_config("qwen3_5").to_dict()
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model, ids = transformers.Qwen3_5ForConditionalGeneration(config).eval(), tokens(2, 20)
    logits = model(ids).logits
    with gdn.patch_transformers():
        assert error(model(ids).logits, logits) <= 2e-5
    assert counts["chunk_gated_delta_rule"] == 2


LATER = """
import sys
import gdn
assert not {"transformers", "triton"} & set(sys.modules), "import gdn must stay light"
patch = gdn.patch_transformers()
assert patch.modules == []
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig
from gdn.integrations import transformers_calls as calls
name = "transformers.models.qwen3_next.modeling_qwen3_next"
assert name not in sys.modules
config = Qwen3NextConfig(
    vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1,
    num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
    moe_intermediate_size=8, shared_expert_intermediate_size=8,
    layer_types=["linear_attention", "full_attention"],
)
model, seen, serve = AutoModelForCausalLM.from_config(config), [], calls.chunk_gated_delta_rule
calls.chunk_gated_delta_rule = lambda *args, **kwargs: seen.append(1) or serve(*args, **kwargs)
served = model(torch.ones(1, 5, dtype=torch.long)).logits
assert seen == [1] and patch.modules == [name]
file = sys.modules[name]
assert hasattr(file.Qwen3NextModel.forward, "__wrapped__") and file.Qwen3NextModel.forward.__module__ == name
patch.undo()
torch.testing.assert_close(model(torch.ones(1, 5, dtype=torch.long)).logits, served)
assert seen == [1]
"""


def test_model_files_imported_later_and_a_light_import():
    done = forks.python("-c", LATER)
    assert done.returncode == 0, done.stderr


def test_files_are_found_by_their_names_but_scripts_that_import_them_are_not(monkeypatch):
    import types

    original = model_file("qwen3_5")
    remote, script = types.ModuleType("their_modeling_code"), types.ModuleType("their_script")
    for module in (remote, script):
        for name in RULES:
            setattr(module, name, vars(original)[name])
        monkeypatch.setitem(sys.modules, module.__name__, module)
    remote.Layer = type("Layer", (torch.nn.Module,), {"__module__": remote.__name__})
    with gdn.patch_transformers() as patch:
        assert "their_modeling_code" in patch.modules and "their_script" not in patch.modules
        assert script.torch_chunk_gated_delta_rule is not remote.torch_chunk_gated_delta_rule
    assert script.torch_chunk_gated_delta_rule is remote.torch_chunk_gated_delta_rule


def test_refusals(monkeypatch):
    with pytest.raises(TypeError, match="infer_packing: expected a bool, got str"):
        gdn.patch_transformers(infer_packing="yes")
    # Transformers replaces its own module object while it loads
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.9.1")
    with pytest.raises(ImportError, match=r"transformers: expected version 5.17 or newer, got 5.9.1"):
        gdn.patch_transformers()
