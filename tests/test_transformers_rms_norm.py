"""Test the zero-centred RMS norms that gdn.patch_transformers() serves; on a CPU the bits are the class's."""

import copy
import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

transformers = pytest.importorskip("transformers")

import test_transformers as models  # noqa: E402

import gdn  # noqa: E402
from gdn.integrations import transformers_rms_norm as rms_norms  # noqa: E402

pytestmark = pytest.mark.usefixtures("originals_restored")
NAMES = {
    "qwen3_5": "Qwen3_5RMSNorm",
    "qwen3_next": "Qwen3NextRMSNorm",
    "qwen3_5_moe": "Qwen3_5MoeRMSNorm",
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def counts(monkeypatch):
    """Count the norms that gdn serves; those of a patch's own checks come before, so clear them."""
    seen, serve = [], rms_norms.normalise
    monkeypatch.setattr(rms_norms, "normalise", lambda *given: seen.append(1) or serve(*given))
    return seen


@pytest.fixture
def patched(counts):
    with gdn.patch_transformers() as patch:
        counts.clear()
        yield patch


def norm_class(family="qwen3_5"):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, NAMES[family])


def make_norm(family="qwen3_5", size=48, dtype=torch.float32):
    norm = norm_class(family)(size, eps=1e-6)
    norm.weight.data = torch.randn(size, generator=torch.Generator().manual_seed(3)) / 2
    return norm.to(dtype)


def inputs(size, dtype):
    """Return rows of a token, of heads, of a prompt, of a part of a projection, and of other orders."""
    x = 3 * torch.randn(2, 70, 4, 2 * size, generator=torch.Generator().manual_seed(4)).to(dtype)
    token = x[:1, :1, 0, :size].contiguous()
    return [
        token, token.expand(3, 1, size), x[:1, :1, :, size:], x[..., :size], x[..., :size].transpose(0, 2),
        x.transpose(2, 3)[..., :size, :].transpose(2, 3), x[:0, :, 0, :size], token[0, 0],
    ]  # fmt: skip


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_dtype_and_strides_are_those_of_the_class(family, dtype, counts):
    for size, weight_dtype in ((48, dtype), (192, dtype), (7, torch.float32), (80, torch.bfloat16)):
        norm = make_norm(family, size, weight_dtype)
        given = inputs(size, dtype)
        before = copy.deepcopy(given)
        with torch.no_grad():
            expected = [norm(x) for x in given]
            with gdn.patch_transformers():
                counts.clear()
                served = [norm(x) for x in given]
                assert len(counts) == len(given)
        for ours, theirs, x, same in zip(served, expected, given, before, strict=True):
            assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
            assert torch.equal(ours, theirs) and torch.equal(x, same)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e38])
def test_numbers_at_the_borders(value, counts):
    norm = make_norm()
    x = torch.full((2, 48), value)
    x[1] = 1
    with torch.no_grad():
        expected = norm(x)
        with gdn.patch_transformers():
            counts.clear()
            assert torch.equal(norm(x).nan_to_num(7), expected.nan_to_num(7)) and counts
    assert torch.equal(norm(x).isnan(), expected.isnan())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_writes_the_same_tokens_with_every_norm_served(mode, counts):
    model, ids = models.make_model("qwen3_5"), models.tokens(2, 9)
    num_norms = sum(type(m) is norm_class() for m in model.modules())
    assert num_norms == 9
    words = models.generate(model, ids)
    with gdn.patch_transformers(), mode():
        counts.clear()
        model(ids)
        assert len(counts) == num_norms
        assert torch.equal(models.generate(model, ids), words)


def test_gradients_are_left_to_the_class(counts):
    model, ids = copy.deepcopy(models.make_model("qwen3_5")).train(), models.tokens(2, 70)
    norm, x = make_norm(), torch.randn(2, 5, 48, requires_grad=True)
    norm(x).square().sum().backward()
    expected = x.grad.clone(), norm.weight.grad.clone()
    with gdn.patch_transformers():
        counts.clear()
        models.loss_and_gradients(model, ids)
        x.grad = norm.weight.grad = None
        norm(x).square().sum().backward()
        assert not counts and torch.equal(x.grad, expected[0]) and torch.equal(norm.weight.grad, expected[1])
        # either of the two can ask for a gradient; a frozen norm of a plain input is served
        norm(x.detach()).sum().backward()
        norm.requires_grad_(False)
        norm(x).sum().backward()
        assert not counts
        assert not norm(x.detach()).requires_grad and len(counts) == 1


def test_changes_of_the_weight_are_seen(patched, counts):
    norm, x = make_norm(), torch.randn(2, 48)
    with torch.no_grad():
        for change in (
            lambda: norm.weight.add_(1), lambda: norm.weight.data.mul_(3),
            lambda: setattr(norm.weight, "data", torch.full((48,), 0.5)), lambda: setattr(norm, "eps", 0.25),
            lambda: setattr(norm, "weight", torch.nn.Parameter(torch.ones(48))),
        ):  # fmt: skip
            change()
            exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (1 + norm.weight)
            assert models.error(norm(x), exact) <= 1e-6
    assert len(counts) == 5


class Doubled(norm_class()):
    """Double a norm's output by its own forward."""

    def forward(self, x):
        return 2 * super().forward(x)


class Tagged(torch.Tensor):
    """Be a tensor of another class."""


def own_forward(norm, x):
    norm.forward = lambda x: x + 1
    return norm(x)


def in_fake_mode(norm, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert norm(mode.from_tensor(x)).shape == x.shape
    return norm.forward.__wrapped__(norm, x)


def on_meta(norm, x):
    assert copy.deepcopy(norm).to("meta")(x.to("meta")).is_meta
    return norm.forward.__wrapped__(norm, x)


LEFT = {
    "instance": own_forward,
    "subclass": lambda norm, x: Doubled(48)(x),
    "tensor": lambda norm, x: norm(x.as_subclass(Tagged)).as_subclass(torch.Tensor),
    "fake": in_fake_mode,
    "meta": on_meta,
    "vmap": lambda norm, x: torch.vmap(norm)(x),
    "eps": lambda norm, x: setattr(norm, "eps", 1) or norm(x),
    "weight of one": lambda norm, x: setattr(norm.weight, "data", torch.ones(1)) or norm(x),
}


@pytest.mark.parametrize("reason", LEFT)
@torch.no_grad()
def test_left_to_the_class(reason, counts):
    x = torch.randn(3, 48)
    expected = LEFT[reason](make_norm(), x) if reason not in ("fake", "meta") else make_norm()(x)
    with gdn.patch_transformers():
        counts.clear()
        assert torch.equal(LEFT[reason](make_norm(), x), expected)
    assert not counts
    # no constant of another mode is kept
    with gdn.patch_transformers(), torch.no_grad():
        assert type(make_norm()(x)) is torch.Tensor


@torch.no_grad()
def test_hooks_run_and_nothing_is_served_after_the_patch(counts):
    norm, x, seen = make_norm(), torch.randn(3, 48), []
    forward = norm_class().forward
    norm.register_forward_hook(lambda module, given, y: seen.append(y))
    with gdn.patch_transformers(), gdn.patch_transformers():
        kept = norm.forward
        counts.clear()
        assert norm(x) is seen[0] and len(counts) == 1
    assert norm_class().forward is forward
    assert torch.equal(kept(x), norm(x)) and len(counts) == 1


@torch.no_grad()
def test_compiled_graphs_and_exported_programs_have_the_operators_of_the_class(patched, counts):
    torch._dynamo.reset()
    norm, x, graphs = make_norm(), torch.randn(3, 48), []

    def backend(graph, example_inputs):
        graphs.append(str(graph.code))
        return graph.forward

    y = torch.compile(norm, fullgraph=True, backend=backend)(x)
    programs = [torch.export.export(norm, (x,), strict=strict) for strict in (False, True)]
    torch._dynamo.reset()
    graphs += [program.graph_module.code for program in programs]
    assert not counts and torch.equal(y, norm(x))
    assert len(graphs) == 3 and all("pow" in text and "mean" in text for text in graphs)


@torch.no_grad()
def test_a_trace_has_the_operators_of_the_class(patched, counts):
    """torch.onnx.export(dynamo=False) traces, and translates no function with `out`."""
    norm, x = make_norm(), torch.randn(3, 48)
    traced = torch.jit.trace(norm, x, check_trace=False)
    assert not counts and "pow" in str(traced.graph) and torch.equal(traced(2 * x), norm(2 * x))


SAME = """
import torch
from torch import nn
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule
)
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(48)), 1e-6
    def _norm(self, x):
        return {norm}
    def forward(self, x):
        output = self._norm(x.float())
        output = output * ({scale} + self.weight.float())
        return output.type_as(x)
"""
NORM = "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"
FORMS = {
    "the same": (NORM, "1.0", True),
    "not centred": (NORM, "0.0", False),
    "eps outside": (NORM.replace(" + self.eps)", ") + self.eps"), "1.0", False),
    "an option": (f"{NORM} if getattr(self, 'group', None) is None else x", "1.0", False),
    "another attribute": (NORM.replace("x *", "self.scale * x *"), "1.0", False),
    "raises": (f"(1 / 0, {NORM})", "1.0", False),
}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_class_is_known_by_its_names_and_values(form, monkeypatch, counts):
    norm, scale, is_served = FORMS[form]
    file = types.ModuleType("their_modeling_code")
    monkeypatch.setitem(sys.modules, file.__name__, file)
    exec(SAME.format(norm=norm, scale=scale), vars(file))
    original, state = file.Norm.forward, torch.get_rng_state()
    assert rms_norms.is_rms_norm(file.Norm) == is_served and torch.equal(torch.get_rng_state(), state)
    with gdn.patch_transformers() as patch:
        assert file.__name__ in patch.modules
        assert (file.Norm.forward is not original) == is_served


def test_classes_of_other_formulas_are_not_served():
    for family in ("qwen4_exp", "olmo_hybrid", "kimi_linear"):
        module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
        kinds = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
        assert not any(map(rms_norms.is_rms_norm, kinds))


def test_the_gate_can_fail(monkeypatch):
    """A served norm that differs in its last bit is noticed: by the check of the class, then by the bits."""
    norm, x, serve = make_norm(), torch.randn(3, 48), rms_norms.normalise
    with torch.no_grad():
        expected = norm(x)
        with gdn.patch_transformers():
            monkeypatch.setattr(rms_norms, "normalise", lambda x, *given: serve(x, *given) * (1 + 2**-23))
            assert not torch.equal(norm(x), expected)
        with gdn.patch_transformers():
            assert torch.equal(norm(x), expected)


def exact(x, weight, eps):
    x, weight = x.double(), weight.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)


def check_zero_centred(device, dtype, size):
    """The norm for GPUs has the shape and strides of the class, and errors beside fp64 that are no larger."""
    norm = make_norm(size=size, dtype=dtype).to(device)
    for x in inputs(size, dtype):
        x = x.to(device)
        with torch.no_grad():
            own, y = norm(x), rms_norms.rms_norm_zero_centred(x, norm.weight, norm.eps)
        assert y.shape == own.shape and y.dtype == own.dtype
        expected = exact(x, norm.weight, norm.eps)
        if x.numel() > 0:
            # the stride of an axis of one element has no meaning
            assert all(a == b for a, b, n in zip(y.stride(), own.stride(), y.shape, strict=True) if n > 1)
            assert (y - expected).norm() <= 1.02 * (own - expected).norm() + 2e-7 * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_for_gpus_computes_the_norm(dtype):
    check_zero_centred("cpu", dtype, 48)


def kernels_of(run):
    """Return the names of the GPU's kernels in run()."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return [e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [128, 256, 2048])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_kernel_computes_the_norm_on_a_gpu(dtype, size):
    check_zero_centred("cuda", dtype, size)
    norm = make_norm(size=size, dtype=dtype).cuda()
    token, _, _, heads, *_ = (x.cuda() for x in inputs(size, dtype))
    # rows with the stride of a wider projection, which a copy to the GPU does not keep
    heads = torch.cat([heads, heads], -1)[..., :size]
    with gdn.patch_transformers(), torch.no_grad():
        for x in (token, heads):
            expected = rms_norms.rms_norm_zero_centred(x, norm.weight, norm.eps)
            assert torch.equal(norm(x), expected)
            assert len(kernels_of(lambda x=x: norm(x))) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_first_launch_is_captured_and_a_replay_reads_the_weight():
    # no other test has norms of this size
    norm = make_norm(size=208, dtype=torch.bfloat16).cuda()
    x = inputs(208, torch.bfloat16)[0].cuda()
    with gdn.patch_transformers(), torch.no_grad():
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = norm(x)
        norm.weight.mul_(2)
        graph.replay()
        assert torch.equal(y, rms_norms.rms_norm_zero_centred(x, norm.weight, norm.eps))
