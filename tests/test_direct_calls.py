"""Test that the convolution and the gated norm run without their operators where nobody has to see these."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gdn
import gdn.ops.conv
import gdn.ops.norm

MODULES = {
    "causal_conv1d": (gdn.ops.conv, "conv_operator"),
    "rms_norm_gated": (gdn.ops.norm, "norm_operator"),
}


class Names(TorchDispatchMode):
    """Hold the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=list(MODULES))
def call(request, monkeypatch):
    """Return a call of a function, its tensors, and the list of the calls of its operator."""
    module, name = MODULES[request.param]
    seen, operator = [], getattr(module, name)

    def count(*args):
        seen.append(args)
        return operator(*args)

    monkeypatch.setattr(module, name, count)
    x, weight = torch.randn(2, 9, 4), torch.randn(4, 3)
    if request.param == "causal_conv1d":
        return lambda *given: gdn.causal_conv1d(*given, activation="silu")[0], (x, weight), seen
    return gdn.rms_norm_gated, (x, torch.randn(2, 9, 4), weight[:, 0]), seen


def test_a_call_without_gradient_has_the_bits_of_its_operator(call):
    run, tensors, seen = call
    direct = run(*tensors)
    assert not seen
    tensors[1].requires_grad_()
    recorded = run(*tensors)
    assert len(seen) == 1 and recorded.requires_grad
    with torch.no_grad():
        assert torch.equal(run(*tensors), direct)
    with torch.inference_mode():
        assert torch.equal(run(*tensors), direct)
    assert len(seen) == 1 and torch.equal(recorded, direct)


def test_modes_and_compilers_see_the_operator(call):
    run, tensors, seen = call
    expected = run(*tensors)
    with Names() as names:
        run(*tensors)
    assert len(seen) == 1 and any(name.startswith("gdn.") for name in names.names)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), expected)
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        assert run(*map(fake.from_tensor, tensors)).shape == expected.shape
    meta = run(*(x.to("meta") for x in tensors))
    assert meta.is_meta and meta.shape == expected.shape


def test_a_trace_of_torchscript_has_the_operator(call):
    """A trace holds operators: of a kernel launched directly it would keep the empty output alone."""
    run, tensors, seen = call
    with torch.no_grad():
        traced = torch.jit.trace(run, tensors, check_trace=False)
    assert len(seen) == 1 and any(node.kind().startswith("gdn::") for node in traced.graph.nodes())
    assert torch.equal(traced(*tensors), run(*tensors))
