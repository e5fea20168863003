"""Test gdn.patch_transformers() on tiny random models whose layers have a decay per key channel (KDA)."""

import copy
import importlib
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.kimi_linear")

import gdn  # noqa: E402
from gdn.integrations import transformers_calls as calls  # noqa: E402
from gdn.integrations.transformers_packing import cache_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("originals_restored")
FAMILIES = ("kimi_linear", "glm5_next", "bailing_hybrid")
VOCAB = 97
LENGTHS = [1, 5, 33, 2, 29]

transformers.logging.set_verbosity_error()


def make_config(family):
    """Return a config of three small layers, the middle one of attention."""
    options = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "linear_head_dim": 8, "linear_num_heads": 3,
        "linear_conv_kernel_dim": 4, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "max_position_embeddings": 256,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }  # fmt: skip
    if family == "kimi_linear":
        return transformers.KimiLinearConfig(**options, num_local_experts=4)
    if family == "bailing_hybrid":
        more = {"num_local_experts": 4, "first_k_dense_replace": 1, "head_dim": 8}
        return transformers.BailingHybridConfig(**options, **more)
    options |= {
        "n_routed_experts": 4, "q_lora_rank": 16, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2,
        "index_kpool": 4, "qk_rope_head_dim": 0, "qk_nope_head_dim": 16,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
        "image_size": 28, "projection_intermediate_size": 16,
    }  # fmt: skip
    return transformers.Glm5NextConfig(text_config=options, vision_config=vision)


_models = {}


def make_model(family):
    """Return the family's random model in eval mode; it is built once, so no test may change its weights."""
    if family not in _models:
        torch.manual_seed(0)
        config = make_config(family)
        auto = transformers.AutoModelForImageTextToText
        auto = auto if family == "glm5_next" else transformers.AutoModelForCausalLM
        model = auto.from_config(config).eval()
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.data.uniform_(-3, 0)
            if name.endswith("dt_bias"):
                p.data.uniform_(-3, 1)
        _models[family] = model
    return _models[family]


def tokens(*shape, seed=1):
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def error(x, ref):
    x, ref = x.detach().double(), ref.detach().double()
    return float((x - ref).norm() / ref.norm())


def loss_and_gradients(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients


def generate(model, ids, **options):
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **options}
    return model.generate(ids, **options)[:, ids.shape[1] :]


@pytest.fixture
def counts(monkeypatch):
    """Count the calls of each public gdn function by the patched functions."""
    seen = {}

    def counted(name, serve):
        def count(*args, **kwargs):
            seen[name] = seen.get(name, 0) + 1
            return serve(*args, **kwargs)

        return count

    for owner, name in SERVED:
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    return seen


SERVED = (
    (calls, "chunk_gated_delta_rule"),
    (calls, "decode"),
    (calls.short_conv, "causal_conv1d"),
    (calls.short_conv, "causal_conv1d_update"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_the_originals(family, counts):
    model, ids = make_model(family), tokens(2, 70)
    logits = model(input_ids=ids, use_cache=False).logits
    loss, gradients = loss_and_gradients(model, ids)
    assert not counts and any(name.endswith("A_log") for name in gradients)
    with gdn.patch_transformers() as patch:
        assert f"transformers.models.{family}.modeling_{family}" in patch.modules
        assert error(model(input_ids=ids, use_cache=False).logits, logits) <= 2e-5
        patched_loss, patched_gradients = loss_and_gradients(model, ids)
    assert counts == {"chunk_gated_delta_rule": 4, "causal_conv1d": 4}
    assert error(patched_loss, loss) <= 2e-5
    assert patched_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # the scales of glm5_next's hyper-connections have gradients that cancel over all tokens
        assert error(patched_gradients[name], gradient) <= (1e-3 if "_hc." in name else 1e-4), name


def test_the_gate_can_fail(monkeypatch):
    model, ids = make_model("kimi_linear"), tokens(2, 70)
    logits = model(input_ids=ids, use_cache=False).logits
    serve = calls.chunk_gated_delta_rule
    monkeypatch.setattr(
        calls, "chunk_gated_delta_rule", lambda *x, g, **more: serve(*x, g=g.flip(-1), **more)
    )
    with gdn.patch_transformers():
        assert error(model(input_ids=ids, use_cache=False).logits, logits) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_and_pieces_are_those_of_the_originals(family, counts):
    """Greedy tokens, and the logits of a prompt in pieces of many tokens and of one."""
    model, ids = make_model(family), tokens(2, 70)
    words = generate(model, ids)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        with gdn.patch_transformers():
            assert torch.equal(generate(model, ids), words)
            out, rows = {}, []
            for piece in ids.split([64, 1, 1, 4], dim=1):
                out = model(input_ids=piece, use_cache=True, **cache_of(out))
                rows.append(out.logits)
    assert error(torch.cat(rows, 1), logits) <= 2e-5
    for _, name in SERVED:
        assert counts[name] > 0, name


def make_packed(family):
    """Return a model that can separate documents, the documents, and their packed batch."""
    model = make_model(family)
    if family == "glm5_next":
        config = make_config(family)
        config.text_config.layer_types = ["linear_attention"] * 3
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    documents = [tokens(n, seed=n) for n in LENGTHS]
    collator = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True
    )
    batch = collator([{"input_ids": d} for d in documents])
    batch.pop("labels")
    return model, documents, batch


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_separate(family):
    """The sparse attention of glm5_next does not: there all layers are those of this test."""
    model, documents, batch = make_packed(family)
    with gdn.patch_transformers(), torch.no_grad():
        alone = torch.cat([model(d[None], use_cache=False).logits for d in documents], 1)
        for left_out in ((), ("seq_idx",), ("cu_seq_lens_q", "cu_seq_lens_k")):
            given = {name: x for name, x in batch.items() if name not in left_out}
            assert error(model(**given, use_cache=False).logits, alone) <= 2e-5
    with torch.no_grad(), pytest.raises(ValueError, match="packed"):
        model(**batch, use_cache=False)
    names = ("input_ids", "position_ids")
    with gdn.patch_transformers(infer_packing=True), torch.no_grad():
        inferred = model(**{name: batch[name] for name in names}, use_cache=False).logits
    assert error(inferred, alone) <= 2e-5


def make_half(family):
    """Return a copy of the family's model in bf16; convolutions of two families stay fp32."""
    model = copy.deepcopy(make_model(family)).bfloat16()
    if family != "kimi_linear":
        for layer in model.modules():
            if isinstance(layer, torch.nn.Conv1d):
                layer.float()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision(family):
    """In bf16 the patched model is as close to the fp32 one as the original is; convolutions may be fp32."""
    model, ids = make_half(family), tokens(2, 70)
    with torch.no_grad():
        exact = make_model(family)(input_ids=ids).logits
        original = error(model(input_ids=ids).logits, exact)
        with gdn.patch_transformers(), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            out = model(input_ids=ids, use_cache=True)
            after = model(input_ids=ids[:, :1], **cache_of(out))
    assert out.logits.dtype == torch.bfloat16 and bool(after.logits.isfinite().all())
    (cache,) = cache_of(after).values()
    assert cache.layers[0].recurrent_states[0].dtype == torch.float32
    assert error(out.logits, exact) <= 1.3 * original


@pytest.fixture
def gpu():
    """Return the CUDA device; convolutions without TF32, and a call left to Transformers is an error."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is left to Transformers")
        yield torch.device("cuda")


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_gradients_and_tokens_on_a_gpu(family, counts, gpu):
    """In fp32 beside the original functions on the same device, and pieces of a prompt beside the whole."""
    model, ids = copy.deepcopy(make_model(family)).to(gpu), tokens(2, 70).to(gpu)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    loss, gradients = loss_and_gradients(model, ids)
    words = generate(model, ids)
    assert not counts
    with gdn.patch_transformers():
        patched_loss, patched_gradients = loss_and_gradients(model, ids)
        with torch.no_grad():
            assert error(model(input_ids=ids, use_cache=False).logits, logits) <= 2e-5
            out, rows = {}, []
            for piece in ids.split([64, 1, 1, 4], dim=1):
                out = model(input_ids=piece, use_cache=True, **cache_of(out))
                rows.append(out.logits)
        assert torch.equal(generate(model, ids), words)
    assert error(torch.cat(rows, 1), logits) <= 2e-5
    assert error(patched_loss, loss) <= 2e-5 and patched_gradients.keys() == gradients.keys()
    errors = {name: error(patched_gradients[name], x) for name, x in gradients.items()}
    assert max(errors.values()) <= 1e-3, max(errors.items(), key=lambda item: item[1])
    for _, name in SERVED:
        assert counts[name] > 0, name


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_on_a_gpu(family, gpu):
    model, documents, batch = make_packed(family)
    model = copy.deepcopy(model).to(gpu)
    model.set_experts_implementation("eager")
    batch = {name: x.to(gpu) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    with gdn.patch_transformers(infer_packing=True), torch.no_grad():
        alone = torch.cat([model(d[None].to(gpu), use_cache=False).logits for d in documents], 1)
        given = [batch, {name: batch[name] for name in ("input_ids", "position_ids")}]
        for options in given:
            assert error(model(**options, use_cache=False).logits, alone) <= 2e-5


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_on_a_gpu(family, gpu):
    """In bf16 the patched model is as close to the fp32 one on the CPU as the original is; it trains."""
    model, ids = make_half(family).to(gpu), tokens(2, 70)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        exact = make_model(family)(input_ids=ids).logits
        ids = ids.to(gpu)
        original = error(model(input_ids=ids).logits.cpu(), exact)
        with gdn.patch_transformers():
            out = model(input_ids=ids, use_cache=True)
            after = model(input_ids=ids[:, :1], **cache_of(out))
    with gdn.patch_transformers():
        loss, gradients = loss_and_gradients(model, ids)
    assert out.logits.dtype == torch.bfloat16 and bool(after.logits.isfinite().all())
    assert error(out.logits.cpu(), exact) <= 1.3 * original
    assert all(bool(x.isfinite().all()) for x in (loss, *gradients.values()))


def test_a_rejected_call_is_left_to_the_original(monkeypatch):
    model, ids = make_model("kimi_linear"), tokens(1, 9)

    def refuse(*args, **kwargs):
        raise NotImplementedError("no backend supports this call")

    with torch.no_grad():
        logits = model(input_ids=ids).logits
        monkeypatch.setattr(calls, "chunk_gated_delta_rule", refuse)
        with gdn.patch_transformers(), pytest.warns(RuntimeWarning, match="is left to Transformers"):
            assert error(model(input_ids=ids).logits, logits) <= 1e-6


def test_undo():
    file = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    before = file.chunk_kimi_delta_attention
    with gdn.patch_transformers():
        assert file.chunk_kimi_delta_attention is not before
    assert file.chunk_kimi_delta_attention is before
