"""Record which kernels Triton compiles or loads from its cache on disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton

from gdn.backends.triton.launch.precompile import finish_ahead


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Yield a list that gets the name of a kernel for every binary that this process compiles or loads.

    What calls leave to the background is compiled before the context ends.
    """
    # what earlier calls have left to the background is theirs
    finish_ahead()
    names: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook

    # keep calling the hook that somebody else has installed
    def hook(*, fn: Any, **rest: Any) -> Any:
        # called once per binary, whether ptxas ran or the disk cache had it
        names.append(fn.name)
        return None if before is None else before(fn=fn, **rest)

    triton.knobs.runtime.jit_post_compile_hook = hook
    try:
        yield names
        finish_ahead()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
