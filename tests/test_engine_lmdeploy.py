"""Test patch_lmdeploy on lmdeploy's own modules, from its wheel (`make engines`).

Its layers are built by its builders and called with its metadata; outputs and states are compared with the
recurrence in fp64. FLA and TileLang are not installed here.
"""

from types import SimpleNamespace

import pytest
import torch
from kit import engine_sources
from kit.operators import Operators
from kit.serving import error

from gdn.integrations import lmdeploy, usage
from gdn.reference import layer as reference_layers
from gdn.reference.recurrence import gated_delta_rule

pytestmark = pytest.mark.skipif(
    engine_sources.find("lmdeploy") is None, reason="no sources of lmdeploy: make engines has them"
)
H, HV, K, V, W, HIDDEN, SLOTS = 2, 4, 32, 32, 4, 48, 6
LAYERS = ("qwen3_next", "qwen3_5")


@pytest.fixture(scope="module")
def package():
    """Return lmdeploy's modules; they stay in this process."""
    engine_sources.provide("lmdeploy")
    from lmdeploy.pytorch import model_inputs
    from lmdeploy.pytorch.backends.cuda import attention, causal_conv1d, gated_delta_rule, step_metadata
    from lmdeploy.pytorch.backends.cuda.graph_runner import piecewise
    from lmdeploy.pytorch.configurations import qwen3_5 as configuration
    from lmdeploy.pytorch.models import patch as models
    from lmdeploy.pytorch.models import qwen3_5, qwen3_next
    from lmdeploy.pytorch.nn import gated_delta

    return SimpleNamespace(
        model_inputs=model_inputs, attention=attention, conv=causal_conv1d, rule=gated_delta_rule,
        steps=step_metadata, piecewise=piecewise, models=models, qwen3_5=qwen3_5, qwen3_next=qwen3_next,
        nn=gated_delta, configuration=configuration,
    )  # fmt: skip


@pytest.fixture
def patched(package):
    usage.reset()
    with lmdeploy.patch_lmdeploy(), torch.inference_mode():
        yield package


class Attention:
    """Stand for lmdeploy's attention, which registers for metadata and for piecewise CUDA graphs."""

    def __init__(self, package):
        self.package, self.is_enabled = package, False
        package.steps.register_step_metadata_impl(self)

    def get_step_metadata_provider(self):
        steps = self.package.steps
        named = {name: lambda *args: None for name in steps.CudaAttentionMetaBuilder.__abstractmethods__}
        return type("Builder", (steps.CudaAttentionMetaBuilder,), named | {"key": 0})()

    def bind_step_meta_group(self, group): ...

    def supports_piecewise_cuda_graph(self):
        return True

    def enable_piecewise_cuda_graph(self):
        self.is_enabled = True


def build(package, kind, num_spec_tokens=0):
    """Return a layer with random weights, and the plan of lmdeploy's CUDA graphs for a model of it."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        hidden_size=HIDDEN, linear_num_key_heads=H, linear_num_value_heads=HV, linear_key_head_dim=K,
        linear_value_head_dim=V, linear_conv_kernel_dim=W,
    )  # fmt: skip
    holder = SimpleNamespace(
        backend_step_meta_plan=None, build_ctx=SimpleNamespace(num_spec_tokens=num_spec_tokens)
    )
    cls = {"qwen3_next": "Qwen3NextGatedDeltaNet", "qwen3_5": "Qwen3_5GatedDeltaNet"}[kind]
    with (
        package.models.build_model_context(package.models.BuildModelContext()),
        package.steps.collect_step_metadata(holder),
    ):
        Attention(package)
        builder = package.nn.GatedDeltaMetaBuilder()
        layer = getattr(getattr(package, kind), cls)(config, 0, dtype=torch.float32, device="cpu")
    for name, p in layer.named_parameters():
        p.data.copy_(torch.randn(p.shape) / (1 if p.dim() == 1 or "conv1d" in name else p.shape[-1] ** 0.5))
    return layer, builder, holder


def metadata(package, counts, seen, is_decoding):
    """Return lmdeploy's attention metadata of `counts` new tokens after `seen`."""
    counts, seen = torch.tensor(counts), torch.tensor(seen)
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    return package.attention.TritonAttentionMetadata(
        is_decoding=is_decoding, block_offsets=None, q_seqlens=counts, kv_seqlens=seen + counts,
        cu_seqlens_q=offsets,
    )  # fmt: skip


def expected_of(layer, kind, x):
    """Return a layer's output on x [T, HIDDEN] in fp64."""
    p = {name: value.detach().double() for name, value in layer.named_parameters()}
    x = x.double()
    if kind == "qwen3_next":
        ratio = HV // H
        groups = (x @ p["in_proj_qkvz.weight"].T).unflatten(-1, (H, 2 * K + 2 * ratio * V))
        q, k, v, z = groups.split([K, K, ratio * V, ratio * V], -1)
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], -1)
        b, a = (x @ p["in_proj_ba.weight"].T).unflatten(-1, (H, 2, ratio)).unbind(-2)
        z, b, a = z.reshape(len(x), HV, V), b.flatten(1), a.flatten(1)
    else:
        mixed = x @ p["in_proj_qkv.weight"].T
        z = (x @ p["in_proj_z.weight"].T).unflatten(-1, (HV, V))
        b, a = (x @ p["in_proj_ba.weight"].T).split(HV, -1)
    mixed, _ = reference_layers.causal_conv1d(mixed[None], p["conv1d.weight"][:, 0], activation="silu")
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    o, _ = gated_delta_rule(
        q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V)), a[None], b[None],
        A_log=p["A_log"], dt_bias=p["dt_bias"], use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    y = reference_layers.rms_norm_gated(
        o[0], z, p["norm.weight"], eps=layer.layer_norm_epsilon, activation="silu"
    )
    return y.flatten(1) @ p["out_proj.weight"].T


def caches(drafts):
    """Return the two caches of a layer among three, as lmdeploy slices them, with NaN in every slot."""
    ring = (1 + drafts,) if drafts else ()
    shapes = (2 * H * K + HV * V, W + drafts), (*ring, HV, V, K)
    return tuple(torch.full((SLOTS, 3, *shape), float("nan")).transpose(0, 1)[1] for shape in shapes)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_from_prompt_to_decode(patched, kind, drafts):
    """Two prompts in two pieces, then steps of one token or of packets, equal one pass in fp64."""
    layer, builder, holder = build(patched, kind, drafts)
    total, ids, memory = 16, torch.tensor([3, 1]), caches(drafts)
    x, out = torch.randn(2, total, HIDDEN), torch.zeros(2, total, HIDDEN)

    def run(spans, seen, is_decoding):
        counts = [s.stop - s.start for s in spans]
        info = metadata(patched, counts, seen, is_decoding)
        with patched.model_inputs.step_ctx_manager(holder):
            meta = builder(sum(counts), W, ids, info)
        tokens = torch.cat([x[n, s] for n, s in enumerate(spans)])[None]
        y = layer(hidden_states=tokens, past_key_value=memory, gated_delta_meta=meta)
        assert y.shape == tokens.shape
        for n, (part, span) in enumerate(zip(y[0].split(counts), spans, strict=True)):
            out[n, span] = part

    run([slice(0, 7), slice(0, 2)], [0, 0], False)
    run([slice(7, 8), slice(2, 9)], [7, 2], False)
    at = [8, 9]
    while max(at) + 1 + drafts <= total:
        run([slice(p, p + 1 + drafts) for p in at], at, True)
        # of three drafts two are accepted
        at = [p + min(2, 1 + drafts) for p in at]
    for n, end in enumerate(at):
        assert error(out[n, :end], expected_of(layer, kind, x[n])[:end]) < 1e-5
    roles = {role for engine, role in usage.served if engine == "lmdeploy"}
    assert roles == {"prefill", "verify" if drafts else "decode"} and not usage.rejected


@pytest.mark.parametrize("kind, others", [("qwen3_5", []), ("qwen3_next", ["copy_", "copy_", "contiguous"])])
def test_a_decode_step_is_one_operator_between_the_projections(patched, kind, others):
    """No kernel prepares a step: the metadata launches none, and lmdeploy's reordering copies four times."""
    layer, builder, holder = build(patched, kind)
    info, x, ids = metadata(patched, [1, 1], [5, 9], True), torch.randn(1, 2, HIDDEN), torch.tensor([3, 1])
    memory = tuple(t.nan_to_num() for t in caches(0))
    with patched.model_inputs.step_ctx_manager(holder), Operators() as found:
        meta = builder(2, W, ids, info)
    assert found.names == []
    with Operators() as found:
        layer(x, memory, meta)
    projections = [name for name in found.names if name in ("mm", "addmm", "bmm", "linear", "matmul")]
    between = [name for name in found.names if name not in projections]
    assert len(projections) == (4 if kind == "qwen3_5" else 3)
    start = between.index("decode_step")
    assert between[:start] == others and between[start + 1 :] == []


def test_padding_rows_of_a_graph(patched):
    """lmdeploy fills the rows of a captured batch that have no sequence with slot -1."""
    layer, builder, holder = build(patched, "qwen3_5")
    memory = caches(0)
    info = metadata(patched, [1, 1], [5, 1], True)
    with patched.model_inputs.step_ctx_manager(holder):
        meta = builder(2, W, torch.tensor([-1, -1]), info)
    y = layer(torch.randn(1, 2, HIDDEN), memory, meta)
    assert not y.any() and all(t.isnan().all() for t in memory)


def test_the_metadata_has_every_field_of_lmdeploys(patched, package):
    """A field that gdn does not read is computed when lmdeploy's own functions read it."""
    _, builder, holder = build(patched, "qwen3_5")
    own = next(c for c in patched.nn.GatedDeltaMeta.__mro__ if c.__module__.startswith("lmdeploy"))
    ids = torch.tensor([3, -1])
    for is_decoding, counts, seen in ((False, [3, 2], [0, 4]), (True, [1, 1], [5, 2])):
        info = metadata(patched, counts, seen, is_decoding)
        with patched.model_inputs.step_ctx_manager(holder):
            ours, theirs = builder(sum(counts), W, ids, info), own(sum(counts), W, ids, info)
            for name, value in vars(theirs).items():
                got = getattr(ours, name)
                assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value, name


def test_rule_convolution_and_norm_need_no_other_package(patched):
    """lmdeploy's builders give gdn's classes, which are subclasses of lmdeploy's, without FLA, TileLang."""
    assert not patched.conv.has_tilelang() and not patched.rule.has_fla()
    layer, _, _ = build(patched, "qwen3_next")
    rule, conv = layer.gated_delta.impl, layer.conv1d.causal_conv1d_func.impl
    assert isinstance(rule, lmdeploy.GatedDeltaRule) and isinstance(conv, lmdeploy.CausalConv1d)
    assert isinstance(rule, patched.rule.GatedDeltaRuleImpl)
    assert isinstance(conv, patched.conv.CausalConv1dImpl)
    assert type(layer.norm).__module__.startswith("gdn.")
    patched.configuration._check_env_qwen3_next("cuda")


def test_undo_restores_everything(package):
    """After the patch lmdeploy's builders ask for their own packages again."""
    before = package.qwen3_next.Qwen3NextGatedDeltaNet.forward
    with lmdeploy.patch_lmdeploy():
        assert package.qwen3_next.Qwen3NextGatedDeltaNet.forward is not before
    assert package.qwen3_next.Qwen3NextGatedDeltaNet.forward is before
    assert package.qwen3_next.GatedDeltaMeta.__module__.startswith("lmdeploy")
    with pytest.raises(RuntimeError, match="No available implementation for CausalConv1d"):
        package.conv._build_causal_conv1d()
    with pytest.raises(ImportError, match="flash-linear-attention"):
        package.configuration._check_env_qwen3_next("cuda")


@pytest.fixture
def one_thread():
    """With several threads a matmul of 16 rows has other bits than one of 9 of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", LAYERS)
def test_piecewise_graphs_run_the_layer_between_their_pieces(patched, kind):
    """lmdeploy enables them for gdn's classes, whose calls then leave the captured pieces.

    A stand-in for its capture records the boundaries and gives each result to lmdeploy's own adapter, which
    rejects views and results that are not contiguous.
    """
    layer, builder, holder = build(patched, kind)
    plan = holder.backend_step_meta_plan
    operators = (layer.gated_delta.impl, layer.conv1d.causal_conv1d_func.impl, builder.impl)
    assert plan.is_supported and all(x in plan.implementations for x in operators)
    # no updater: FLA's chunk indices, for which lmdeploy waits for the device, are not prepared
    assert plan.step_updaters == ()
    assert plan.enable_piecewise_cuda_graph()
    assert all(x._piecewise_forward is not None for x in operators)

    counts, bucket = [5, 4], 16
    info, ids = metadata(patched, counts, [0, 3], False), torch.tensor([3, 1])
    x = torch.randn(1, bucket, HIDDEN)
    memory = tuple(t.nan_to_num() for t in caches(0))
    direct = tuple(t.clone() for t in memory)
    with patched.model_inputs.step_ctx_manager(holder):
        meta = builder(9, W, ids, info)
    expected = layer(x[:, :9], direct, meta)

    class Boundaries:
        inside_eager_boundary, names = False, []

        def call_eager(self, declaration, args, kwargs):
            self.inside_eager_boundary = True
            output = declaration.func(*args, **kwargs)
            self.inside_eager_boundary = False
            self.names.append(declaration.func.__qualname__.split(".")[0])
            if declaration.adapter_factory is None:
                return output
            adapter = declaration.adapter_factory()
            inputs = [t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)]
            bridge = adapter.allocate(output, frozenset(inputs), None)
            adapter.copy(bridge, output)
            return bridge

    token = patched.piecewise._ACTIVE_BUILDER.set(Boundaries())
    try:
        with patched.piecewise.piecewise_graph_execution(9, bucket):
            with patched.model_inputs.step_ctx_manager(holder):
                meta = builder(bucket, W, ids, info)
            y = layer(x, memory, meta)
    finally:
        patched.piecewise._ACTIVE_BUILDER.reset(token)
    names = ["CudaGatedDeltaMetaImpl", "CausalConv1dTilelangImpl", "CudaGatedDeltaRuleImpl"]
    assert Boundaries.names == names
    assert error(y[:, :9], expected) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(memory, direct, strict=True))


def test_the_patch_without_registration_was_captured(package):
    """The check can fail: an operator that does not register leaves graphs enabled, with it inside them."""
    steps, holder = package.steps, SimpleNamespace(backend_step_meta_plan=None)
    with steps.collect_step_metadata(holder):
        attention = Attention(package)
    assert holder.backend_step_meta_plan.enable_piecewise_cuda_graph() and attention.is_enabled


def test_a_layer_gets_two_tensors_of_a_slot(package):
    """The model's configuration names windows and states, and the models hand these two to their layers."""
    import inspect

    from lmdeploy.pytorch.configurations.qwen3_next import Qwen3NextModelConfigBuilder
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(num_hidden_layers=4, layer_types=None)
    config.full_attention_interval, config.architectures = 4, ["Qwen3NextForCausalLM"]
    made = Qwen3NextModelConfigBuilder.build(config)
    assert [shape[0] for shape, _ in made.states_shapes] == [3, 3]
    assert "cfg.states_shapes = [(conv_state_shape, dtype), (recurrent_state_shape, ssm_dtype)]" in (
        inspect.getsource(package.configuration)
    )
    for module in (package.qwen3_next, package.qwen3_5):
        assert "zip(state_caches[0], state_caches[1])" in inspect.getsource(module)


def test_defaults_that_decide(package, tmp_path):
    """TurboMind is the first choice for Qwen3.5; piecewise graphs are off; decode is not compiled."""
    import inspect

    from lmdeploy import archs, messages
    from lmdeploy.pytorch import envs
    from lmdeploy.turbomind import supported_models

    source = inspect.getsource(archs.autoget_backend)
    assert "is_supported" in source and "turbomind" in source
    names = supported_models.SUPPORTED_ARCHS
    assert "Qwen3_5ForConditionalGeneration" in names and "Qwen3_5MoeForConditionalGeneration" in names
    assert "Qwen3NextForCausalLM" not in names
    config = messages.PytorchEngineConfig()
    assert config.piecewise_cudagraph_max_tokens is None and config.eager_mode is False
    assert config.tp == 1 and not envs.enable_decode_torch_compile
    mixins = [c.__name__ for c in package.qwen3_5.Qwen3_5ForConditionalGeneration.__mro__]
    assert "PiecewiseCudaGraphMixin" in mixins
    assert "PiecewiseCudaGraphMixin" not in [
        c.__name__ for c in package.qwen3_next.Qwen3NextForCausalLM.__mro__
    ]
