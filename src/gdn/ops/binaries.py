"""Provide load_kernels: install kernels that `gdn warmup --save` compiled, here or on another machine."""

import os
from importlib import import_module
from pathlib import Path


def load_kernels(folder: str | os.PathLike[str]) -> int:
    """Install compiled kernels in Triton's cache, so that no process of this machine compiles them.

    A process then launches them without Triton's JIT, which would hash sources and Triton's library first.

    Args:
        folder      written by `gdn warmup --save` on a machine with the same GPU architecture, Triton, Python
                    and gdn. It contains machine code that will run: load folders that you trust.

    Call it before the first call on a GPU: kernels that a process has compiled stay as they are. On a machine
    without a GPU, as where a container image is built, the GPU of the folder is not checked.

    Returns: how many kernels the folder has. Those that the cache (TRITON_CACHE_DIR) holds are not replaced.
    Raises: ValueError if the folder was not written by `gdn warmup --save`, or for another GPU architecture,
            Triton, Python or source of the kernels; ImportError without Triton.
    Cost:   one copy of each file that is not there yet.
    """
    return int(import_module("gdn.backends.triton.launch.binaries").unpack(Path(folder)))
