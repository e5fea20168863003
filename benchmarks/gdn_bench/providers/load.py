"""Find a provider by name: gdn on the backend it chooses or on a named one, or an installed peer."""

from importlib import import_module
from importlib.util import find_spec

from gdn_bench.providers.gdn_calls import gdn_provider
from gdn_bench.providers.names import PEERS, PROVIDERS
from gdn_bench.providers.provider import Provider


def load_provider(name: str) -> Provider | str:
    """Return the provider of a name, or the reason of its absence. ValueError for an unknown name."""
    if name == "gdn" or name.startswith("gdn:"):
        return gdn_provider(name.partition(":")[2] or None)
    if name not in PEERS:
        raise ValueError(f"providers: expected some of {', '.join(PROVIDERS)}, gdn:BACKEND, got {name!r}")
    if find_spec(PEERS[name].module) is None:
        return "not installed"
    try:
        peer: Provider = getattr(import_module("gdn_bench.providers.peers"), name)()
    except Exception as error:
        # a peer's import looks for compilers and devices, and fails in ways of its own
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return peer
