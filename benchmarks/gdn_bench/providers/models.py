"""Run a Transformers model file on gdn, on FLA, or on its own plain PyTorch functions."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.util import find_spec

import gdn
from gdn_bench.providers import fallback
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.names import PEERS

FUNCTIONS = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn",
    "causal_conv1d_update",
)  # fmt: skip
Serving = Callable[[], AbstractContextManager[object]]


@contextmanager
def plain() -> Iterator[None]:
    """Give the model file the four functions that it defines, within a `with` block."""
    module = import_module(fallback.FILE)
    originals = {name: getattr(module, name) for name in FUNCTIONS}
    try:
        for name in FUNCTIONS:
            setattr(module, name, fallback.function(name))
        yield
    finally:
        for name, function in originals.items():
            setattr(module, name, function)


@contextmanager
def as_imported() -> Iterator[None]:
    """Leave the model file as it is imported: it calls FLA where that is installed."""
    import_module(fallback.FILE)
    yield


def serving(names: tuple[str, ...]) -> tuple[dict[str, Serving], dict[str, str]]:
    """Return a context for each provider that runs models, and why others are absent."""
    contexts: dict[str, Serving] = {}
    absent: dict[str, str] = {}
    if find_spec("transformers") is None:
        return contexts, dict.fromkeys(names, "needs transformers, which is not installed")
    for name in names:
        if name == "gdn":
            contexts[name] = gdn.patch_transformers
        elif name == "transformers":
            contexts[name] = plain
        elif name == "fla":
            loaded = load_provider(name)
            if isinstance(loaded, str):
                absent[name] = loaded
            else:
                contexts[name] = as_imported
        elif name not in PEERS:
            raise ValueError(f"providers: expected some of gdn, fla, transformers, got {name!r}")
    return contexts, absent
