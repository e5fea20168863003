"""Load the tree of hub/build.py as the package `kernels` does, and run its layers in a Transformers model."""

import importlib.util
import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch
from kit import forks
from kit.serving import error
from torch import nn

pytest.importorskip("transformers")
ROOT = Path(__file__).parent.parent
# layer of the tree -> function of a model file, class of a model file
FUNCTIONS = {
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
}
# names under which Transformers looks for the layers
NAMES = {
    **{name: name for name in FUNCTIONS if name != "recurrent_gated_delta_rule"},
    "fused_recurrent_gated_delta_rule": "recurrent_gated_delta_rule",
    "RMSNormGated": "FusedRMSNormGated",
}
ALONE = """
import importlib.util, sys
sys.modules |= {"gdn": None, "jaxtyping": None, "transformers": None}
import torch
def load(name):
    spec = importlib.util.spec_from_file_location(name, sys.argv[1] + "/__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
first, second, again = load("_gdn_1"), load("_gdn_2"), load("_gdn_1")
x = [torch.ones(1, 70, 2, 8, requires_grad=True) for _ in range(3)] + [torch.zeros(1, 70, 2)] * 2
for gdn in (first, second, again):
    o, _ = gdn.chunk_gated_delta_rule(*x)
    o.sum().backward()
    assert gdn.layers.chunk_gated_delta_rule.has_backward
assert torch.ops._gdn_1.chunk_forward is not torch.ops._gdn_2.chunk_forward
print(sorted({name.split(".")[0] for name in sys.modules if "gdn" in name}))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    runpy.run_path(str(ROOT / "hub" / "build.py"))["main"](folder)
    return folder


@pytest.fixture(scope="module")
def layers(tree):
    name = "_gdn_of_test_hub"
    path = tree / "build" / "torch-universal" / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.layers


def test_the_tree_needs_no_package_and_loads_twice(tree, tmp_path):
    """Two names, and one name again, load beside each other where gdn and jaxtyping cannot be imported."""
    # of this repository nothing is on the path
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    done = forks.python("-c", ALONE, str(tree / "build" / "torch-universal"), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['_gdn_1', '_gdn_2', 'gdn']"


def test_the_builder_finds_the_name_of_the_package():
    check = runpy.run_path(str(ROOT / "hub" / "build.py"))["check"]
    for text in ("import gdn.ops", "from gdn.ops import rule", "x = gdn.decode"):
        with pytest.raises(ValueError, match="line 1: expected no name of the package"):
            check(text)


def model_file():
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return modeling_qwen3_5


def of_torch(name):
    """Return a function of the model file without the wrapper that looks for other packages."""
    return inspect.unwrap(vars(model_file())[name])


def test_layers_have_the_form_that_kernels_accepts(layers):
    """A layer has no constructor, no members, and as many parameters, of the same kinds, as the original."""
    allowed = {name for name, _ in inspect.getmembers(nn.Module)} | {"can_torch_compile", "has_backward"}
    originals = {layer: of_torch(name) for layer, name in FUNCTIONS.items()}
    originals["FusedRMSNormGated"] = model_file().Qwen3_5RMSNormGated.forward
    for name, function in originals.items():
        layer = vars(layers)[name]
        assert issubclass(layer, nn.Module) and layer.__init__ is nn.Module.__init__
        assert {n for n, _ in inspect.getmembers(layer)} <= allowed
        ours = list(inspect.signature(layer.forward).parameters.values())
        theirs = list(inspect.signature(function).parameters.values())
        own = ours if theirs[0].name == "self" else ours[1:]
        assert [p.kind for p in own] == [p.kind for p in theirs], name
        assert [p.name for p in own] == [p.name for p in theirs], name


def bound(layers, name, function):
    """Return a layer of the tree in the place of a function, as `kernels` binds it."""
    module = type(
        "Func", (nn.Module,), {"forward": lambda self, *args, **kwargs: function(*args, **kwargs)}
    )()
    module.forward = MethodType(vars(layers)[name].forward, module)
    return module


def test_layers_serve_a_model_and_leave_the_rest_to_it(layers, monkeypatch):
    from serving.model import build_random_model

    model, ids = build_random_model("cpu", torch.float32, 0.1), torch.arange(1, 71)[None]
    options = {"max_new_tokens": 4, "do_sample": False}

    def run():
        logits = model(ids).logits
        return logits, model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    with torch.no_grad():
        expected = run()
        module, originals = model_file(), {}
        for layer, name in FUNCTIONS.items():
            originals[layer] = of_torch(name)
            monkeypatch.setattr(module, name, bound(layers, layer, originals[layer]))
        norms = [m for m in model.modules() if isinstance(m, module.Qwen3_5RMSNormGated)]
        for norm in norms:
            norm.forward = MethodType(layers.FusedRMSNormGated.forward, norm)
        logits, tokens = run()
    assert torch.equal(tokens, expected[1]) and not torch.equal(logits, expected[0])
    assert error(logits, expected[0]) < 1e-5
    model(ids).logits.sum().backward()
    assert model.model.layers[0].linear_attn.A_log.grad.abs().sum() > 0
    x, weight = torch.randn(1, 6, 5), torch.randn(6, 4)
    conv = bound(layers, "causal_conv1d_fn", originals["causal_conv1d_fn"])
    with pytest.warns(RuntimeWarning, match="causal_conv1d_fn is left to Transformers"):
        y = conv(x, weight, None, "gelu")
    assert torch.equal(y, originals["causal_conv1d_fn"](x, weight, None, "gelu"))
    norms[0].activation = "gelu"
    z = torch.randn(2, 32)
    assert torch.equal(norms[0](z, z), type(norms[0]).forward(norms[0], z, z))
    with pytest.warns(RuntimeWarning), pytest.raises(NotImplementedError, match="replaced no function"):
        layers.causal_conv1d_fn()(x, weight, None, "gelu")


LOADED = """
import sys
import torch, transformers.utils, transformers.utils.import_utils as found
# this machine may have another version of kernels than this Transformers wants, and has no GPU
found.is_kernels_available = transformers.utils.is_kernels_available = lambda *args, **kwargs: True
from transformers.utils import kernel_config
kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
from serving.model import build_random_model
model, ids = build_random_model("cpu", torch.float32, 0.1), torch.arange(1, 71)[None]
generate = lambda: model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
expected = generate()
names = {name: f"{sys.argv[1]}:{layer}" for name, layer in eval(sys.argv[2]).items()}
model.set_use_kernels(True, kernel_config.KernelConfig(names, use_local_kernel=True))
assert torch.equal(generate(), expected)
functions = model.model.layers[0].linear_attn._kernel_funcs.values()
print(sum(f.forward.__func__.__module__.startswith("_gdn_torch_universal") for f in functions))
"""


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="kernels is not installed")
def test_transformers_loads_the_tree_by_its_own_configuration(tree):
    command = [sys.executable, "-c", LOADED, str(tree), repr(NAMES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "examples")
    assert done.returncode == 0 and done.stdout.split() == ["4"], done.stderr
