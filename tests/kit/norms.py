"""Serve the gated norms of Transformers by gdn on a CPU, as if it were a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from gdn.integrations import transformers_norm as norms


@contextmanager
def served_on_cpu() -> Iterator[list[Any]]:
    """Give the list to which each call of rms_norm_gated by a patched norm adds its weight."""
    weights: list[Any] = []
    serve = norms.rms_norm_gated

    def counting(x: Any, gate: Any, weight: Any, **options: Any) -> Any:
        weights.append(weight)
        return serve(x, gate, weight, **options)

    with mock.patch.multiple(norms, DEVICES=("cpu", "cuda"), rms_norm_gated=counting):
        yield weights
