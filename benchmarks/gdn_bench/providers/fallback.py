"""Transformers' plain PyTorch functions as its file defines them, neither patched nor decorated."""

import ast
import inspect
from functools import cache
from importlib import import_module

from gdn.testing.accuracy import Provider

FILE = "transformers.models.qwen3_5.modeling_qwen3_5"
CHANNELS_FILE = "transformers.models.kimi_linear.modeling_kimi_linear"


@cache
def function(name: str, file: str = FILE) -> Provider:
    """Compile a function of a model file without its decorator, which may pick another package's."""
    module = import_module(file)
    tree = ast.parse(inspect.getsource(module))
    definition = next((x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name), None)
    if definition is None:
        raise ImportError(f"transformers: expected a version whose {file} defines {name}, got none")
    definition.decorator_list.clear()
    namespace = dict(vars(module))
    exec(compile(ast.Module([definition], []), inspect.getfile(module), "exec"), namespace)
    provider: Provider = namespace[name]
    return provider


def chunk() -> Provider:
    """Return torch_chunk_gated_delta_rule: training and prefill."""
    return function("torch_chunk_gated_delta_rule")


def recurrent() -> Provider:
    """Return torch_recurrent_gated_delta_rule: decoding."""
    return function("torch_recurrent_gated_delta_rule")


def chunk_channels() -> Provider:
    """Return chunk_kimi_delta_attention: the whole rule with a decay per key channel."""
    return function("chunk_kimi_delta_attention", CHANNELS_FILE)
