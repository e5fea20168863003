"""What Triton compiles, or fetches from its cache on disk, while somebody listens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of kernels that this process gets binaries of meanwhile, one for each binary."""
    names: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook

    def hook(*, fn: Any, **rest: Any) -> Any:
        names.append(fn.name)
        return None if before is None else before(fn=fn, **rest)

    triton.knobs.runtime.jit_post_compile_hook = hook
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
