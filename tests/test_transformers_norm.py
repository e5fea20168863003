"""Test the gated norms that gdn.patch_transformers() serves; the CPU stands for a GPU but in two tests."""

import copy
import sys
import types

import pytest
import torch
from kit.norms import served_on_cpu
from torch._subclasses.fake_tensor import FakeTensorMode

transformers = pytest.importorskip("transformers")

import test_transformers as per_head  # noqa: E402
import test_transformers_channels as per_channel  # noqa: E402

import gdn  # noqa: E402
from gdn.integrations import transformers_norm as norms  # noqa: E402

pytestmark = pytest.mark.usefixtures("originals_restored")
SOURCES = dict.fromkeys(per_head.FAMILIES, per_head) | dict.fromkeys(per_channel.FAMILIES, per_channel)
NAMES = {
    "qwen3_5": "Qwen3_5RMSNormGated",
    "qwen3_next": "Qwen3NextRMSNormGated",
    "qwen3_5_moe": "Qwen3_5MoeRMSNormGated",
    "qwen4_exp": "Qwen4ExpTextRMSNormGated",
    "olmo_hybrid": "OlmoHybridRMSNormGated",
    "kimi_linear": "KimiLinearRMSNormGated",
    "glm5_next": "Glm5NextTextRMSNormGated",
    "bailing_hybrid": "BailingHybridRMSNormGated",
}
error = per_head.error


@pytest.fixture
def counts():
    """Count the calls of rms_norm_gated by patched norms, on a CPU as if it were a GPU."""
    with served_on_cpu() as seen:
        yield seen


def norm_class(family):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, NAMES[family])


def make_norm(family="qwen3_5", size=32, dtype=torch.float32):
    """Return a norm with random weights, an input and a gate whose rows have a stride."""
    draw = torch.Generator().manual_seed(3)
    norm = norm_class(family)(size, eps=1e-6)
    norm.weight.data = 1 + torch.randn(size, generator=draw) / 2
    x, gate = 2 * torch.randn(2, 40, 2 * size, generator=draw)
    return norm.to(dtype), x[:, :size].to(dtype), gate[:, size:].to(dtype)


def run(norm, x, gate):
    """Return the output, and the gradients of the input, the gate and the weight."""
    x, gate = x.clone().requires_grad_(), gate.clone().requires_grad_()
    norm.weight.grad = None
    y = norm(x, gate)
    y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape).to(y))
    return y.detach(), x.grad, gate.grad, norm.weight.grad


def in_fp64(norm, x, gate):
    """Return what `run` does, by the formula in fp64."""

    def formula(x, gate):
        y = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return y * norms.ACTIVATIONS[norm.activation](gate)

    x, gate, weight = (t.detach().double().requires_grad_() for t in (x, gate, norm.weight))
    y = formula(x, gate)
    y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape).to(norm.weight.dtype).double())
    return y.detach(), x.grad, gate.grad, weight.grad


@pytest.mark.parametrize("family", SOURCES)
def test_logits_gradients_and_tokens_are_those_of_the_originals(family, counts):
    source = SOURCES[family]
    model, ids = source.make_model(family), source.tokens(2, 70)
    loss, gradients = source.loss_and_gradients(model, ids)
    words = source.generate(model, ids)
    num_norms = sum(type(m) is norm_class(family) for m in model.modules())
    assert not counts and num_norms == 2
    with gdn.patch_transformers():
        patched_loss, patched = source.loss_and_gradients(model, ids)
        assert len(counts) == num_norms
        assert torch.equal(source.generate(model, ids), words)
    assert error(patched_loss, loss) <= 2e-5 and patched.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # the scales of glm5_next's hyper-connections have gradients that cancel over all tokens
        assert error(patched[name], gradient) <= (1e-3 if "_hc." in name else 1e-4), name


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_are_at_least_as_near_to_fp64(family, dtype, counts):
    """Output and gradients, in each dtype beside Transformers' own."""
    norm, x, gate = make_norm(family, dtype=dtype)
    expected, original = in_fp64(norm, x, gate), run(norm, x, gate)
    with gdn.patch_transformers():
        served = run(norm, x, gate)
    assert counts
    for ours, theirs, exact in zip(served, original, expected, strict=True):
        assert ours.dtype == theirs.dtype
        # 1e-6: fp32 itself, in which the order of a sum decides
        assert error(ours, exact) <= max(1.02 * error(theirs, exact), 1e-6)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float64])
def test_mixed_dtypes(weight_dtype, counts):
    """The input decides the output's dtype, as in the original; the gate and the weight may be wider."""
    norm, x, gate = make_norm()
    norm, x = norm.to(weight_dtype), x.bfloat16()
    original = run(norm, x, gate)
    with gdn.patch_transformers():
        served = run(norm, x, gate)
    assert counts
    assert [t.dtype for t in served] == [t.dtype for t in original]
    for ours, theirs in zip(served, original, strict=True):
        assert error(ours, theirs) <= 5e-3


def test_autocast_and_checkpointing(counts):
    model, ids = copy.deepcopy(per_head.make_model("qwen3_5")).train(), per_head.tokens(2, 70)
    exact_loss, exact = per_head.loss_and_gradients(model, ids)
    name = "model.layers.0.linear_attn.norm.weight"
    with torch.autocast("cpu", torch.bfloat16):
        _, original = per_head.loss_and_gradients(model, ids)
        with gdn.patch_transformers():
            loss, patched = per_head.loss_and_gradients(model, ids)
            model.gradient_checkpointing_enable()
            again, checkpointed = per_head.loss_and_gradients(model, ids)
    assert len(counts) == 6  # 2 forward, then 2 forward and 2 recomputed
    assert error(loss, exact_loss) <= 1e-3 and torch.equal(loss, again)
    assert error(patched[name], exact[name]) <= 1.1 * error(original[name], exact[name])
    assert torch.equal(checkpointed[name], patched[name])


def test_no_model_on_a_cpu_is_served(monkeypatch):
    norm, x, gate = make_norm()
    expected = run(norm, x, gate)
    monkeypatch.setattr(norms, "rms_norm_gated", None)
    with gdn.patch_transformers():
        assert all(torch.equal(a, b) for a, b in zip(run(norm, x, gate), expected, strict=True))


class Doubled(norm_class("qwen3_5")):
    """Double a norm's output by its own forward."""

    def forward(self, hidden_states, gate):
        return 2 * super().forward(hidden_states, gate)


class Named(norm_class("qwen3_5")):
    """Add a method that the forward does not use."""

    def name(self):
        return "norm"


class Wide(norm_class("qwen3_5")):
    """Override an attribute that the forward uses."""

    @property
    def variance_epsilon(self):
        return 0.5

    @variance_epsilon.setter
    def variance_epsilon(self, value):
        pass


class Tagged(torch.Tensor):
    """Be a tensor of another class."""


@pytest.mark.parametrize(
    "reason", ["activation", "subclass", "attribute", "instance", "tensor", "fake", "meta", "no gate"]
)
def test_left_to_the_class(reason, counts):
    norm, x, gate = make_norm()
    with gdn.patch_transformers():
        if reason == "activation":
            norm.activation = "gelu"
        elif reason == "subclass":
            norm = Doubled(32)
        elif reason == "attribute":
            norm = Wide(32)
        elif reason == "instance":
            norm.forward = lambda x, gate: x + gate
            assert torch.equal(norm(x, gate), x + gate)
        elif reason == "tensor":
            gate = gate.as_subclass(Tagged)
        if reason == "no gate":
            with pytest.raises(AttributeError):
                norm(x, None)
        elif reason == "fake":
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                assert norm(mode.from_tensor(x), mode.from_tensor(gate)).shape == x.shape
        elif reason == "meta":
            assert copy.deepcopy(norm).to("meta")(x.to("meta"), gate.to("meta")).is_meta
        else:
            y = norm(x, gate)
    assert not counts
    if reason not in ("fake", "meta", "no gate"):
        assert torch.equal(y, norm(x, gate))


def test_a_class_that_inherits_the_forward_is_served(counts):
    norm, x, gate = make_norm()
    expected = run(norm, x, gate)
    other = types.SimpleNamespace(**vars(norm), **norm._parameters)
    forward, norm.__class__ = type(norm).forward, Named
    with gdn.patch_transformers():
        got = run(norm, x, gate)
        assert len(counts) == 1
        # what only looks like the norm is not known
        assert torch.equal(Named.forward(other, x, gate), forward(norm, x, gate))
    assert len(counts) == 1
    assert all(error(a, b) < 1e-6 for a, b in zip(got, expected, strict=True))


def test_a_rejected_call_is_left_to_the_class(counts):
    norm, x, gate = make_norm()
    expected = norm(x, gate[:1])
    with (
        gdn.patch_transformers(),
        pytest.warns(RuntimeWarning, match="gated norm is left to .*: z: expected"),
    ):
        y = norm(x, gate[:1])
    assert counts and torch.equal(y, expected)


def test_hooks_run_and_nothing_is_served_after_the_patch(counts):
    norm, x, gate = make_norm()
    forward, seen = type(norm).forward, []
    norm.register_forward_hook(lambda module, given, y: seen.append(y))
    with gdn.patch_transformers(), gdn.patch_transformers():
        kept = norm.forward
        assert norm(x, gate) is seen[0] and len(counts) == 1
    assert type(norm).forward is forward
    assert torch.equal(kept(x, gate), norm(x, gate)) and len(counts) == 1


def test_compiled_graphs_and_exported_programs_have_the_operators_of_the_class(counts):
    torch._dynamo.reset()
    (norm, x, gate), graphs = make_norm(), []
    expected = norm(x, gate)

    def backend(graph, example_inputs):
        graphs.append(str(graph.code))
        return graph.forward

    with gdn.patch_transformers():
        y = torch.compile(norm, fullgraph=True, backend=backend)(x, gate)
        programs = [torch.export.export(norm, (x, gate), strict=strict) for strict in (False, True)]
    torch._dynamo.reset()
    graphs += [program.graph_module.code for program in programs]
    assert torch.equal(y, expected) and not counts
    assert len(graphs) == 3 and all("rsqrt" in text and "gdn" not in text for text in graphs)


SAME = """
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule
)
class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.variance_epsilon, self.activation = 1e-6, "silu"
    def forward(self, hidden_states, gate):
        x = hidden_states.float()
        {before}
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (({weight}) * y * {gate}).to(hidden_states.dtype)
"""
GATE = "ACT2FN[self.activation](gate.float())"
FORMS = {
    "Norm": ({}, {"silu", "sigmoid"}),
    "GateFirst": ({"before": f"x = x * {GATE}", "gate": "1"}, set()),
    "ZeroCentred": ({"weight": "1 + self.weight"}, set()),
    "Silu": ({"gate": "nn.functional.silu(gate.float() if self.activation else gate)"}, {"silu"}),
    "Raises": ({"before": "raise OSError"}, set()),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_class_is_known_by_its_values(name, monkeypatch, counts):
    """A file of somebody else may have a norm of another formula with the same attributes."""
    changes, activations = FORMS[name]
    parts = {"name": name, "before": "", "weight": "self.weight", "gate": GATE} | changes
    file = types.ModuleType("their_modeling_code")
    monkeypatch.setitem(sys.modules, file.__name__, file)
    exec(SAME.format(**parts), vars(file))
    cls = vars(file)[name]
    original, state = cls.forward, torch.get_rng_state()
    assert norms.activations_of(cls) == activations and torch.equal(torch.get_rng_state(), state)
    with gdn.patch_transformers() as patch:
        assert file.__name__ in patch.modules
        assert (cls.forward is not original) == bool(activations)
        norm, (_, x, gate) = cls(), make_norm()
        if name != "Raises":
            for activation in ("silu", "sigmoid"):
                counts.clear()
                norm.activation = activation
                assert error(norm(x, gate), original(norm, x, gate)) <= 1e-6
                assert len(counts) == (activation in activations)


def test_the_gate_can_fail(monkeypatch, counts):
    norm, x, gate = make_norm()
    serve = norms.rms_norm_gated
    monkeypatch.setattr(norms, "rms_norm_gated", lambda x, z, weight, **more: serve(x, z, None, **more))
    with gdn.patch_transformers():
        served = run(norm, x, gate)[:3]
    assert all(error(y, exact) > 1e-2 for y, exact in zip(served, in_fp64(norm, x, gate), strict=False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", SOURCES)
def test_on_a_gpu(family, monkeypatch):
    """Every norm is served; in bf16 results are at least as near to fp64 as Transformers' own."""
    seen, serve = [], norms.rms_norm_gated
    monkeypatch.setattr(
        norms, "rms_norm_gated", lambda *args, **given: seen.append(1) or serve(*args, **given)
    )
    norm, x, gate = make_norm(family, 128, torch.bfloat16)
    norm, x, gate = norm.cuda(), x.cuda(), gate.cuda()
    expected, original = in_fp64(norm.cpu(), x.cpu(), gate.cpu()), run(norm.cuda(), x, gate)
    with gdn.patch_transformers():
        served = run(norm, x, gate)
        for ours, theirs, exact in zip(served, original, expected, strict=True):
            assert error(ours.cpu(), exact) <= max(1.02 * error(theirs.cpu(), exact), 1e-6)
        source = SOURCES[family]
        model = copy.deepcopy(source.make_model(family)).cuda()
        if source is per_channel:
            model.set_experts_implementation("eager")
        seen.clear()
        source.loss_and_gradients(model, source.tokens(2, 70).cuda())
    assert len(seen) == 2
