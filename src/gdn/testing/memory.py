"""Memory that a kernel has not written holds NaN."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poison_memory() -> Iterator[None]:
    """Fill each new tensor with NaN (integers: the largest number) within a `with` block.

        with gdn.testing.poison_memory():
            o = my_kernel(q, k, v)
        assert o.isfinite().all()

    An element that a kernel does not write is then NaN instead of whatever the allocator reused. This is
    PyTorch's deterministic mode with `torch.utils.deterministic.fill_uninitialized_memory`; its previous
    state is restored afterwards. Operators without a deterministic implementation still run, without their
    warnings.

    Cost: one fill for each new tensor.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
