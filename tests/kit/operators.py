"""Record the operators of a call, on any device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Record the operators that run a kernel: no views, no allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function).split(".")[1]
        # `reshape` and `contiguous` copy or do not
        is_view = isinstance(result, torch.Tensor) and function.is_view
        is_view = is_view and result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        if not is_view and not name.startswith(("empty", "new_empty", "split", "unbind", "_unsafe_view")):
            self.names.append(name)
        return result
