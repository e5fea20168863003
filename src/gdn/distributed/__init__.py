"""Provide context and tensor parallelism over torch.distributed.

Reading order: `table` (which rank holds which tokens), `plan` (what one rank does for one call), `context`
(the public class), `calls` (its calls in two steps), `rule`, `exchange`, `folds` and `nodes` (the gated delta
rule), `halo` (the short convolution), `heads` (the all-to-all form), `operators` (compiled calls), `check`
(ranks that disagree), `cost`, `simulate` and `explain` (the model that chooses an exchange). Tensor
parallelism is `tensor` (which rank holds which heads) and `sections` (q | k | v as three parameters); `fsdp`
and `state` are about FSDP2 and checkpoints.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdn.distributed.fsdp import fully_shard_layers
    from gdn.distributed.state import get_state_dict, set_state_dict
    from gdn.distributed.tensor import tensor_parallel

__all__ = ["fully_shard_layers", "get_state_dict", "set_state_dict", "tensor_parallel"]

_HOMES = {
    "fully_shard_layers": "fsdp",
    "get_state_dict": "state",
    "set_state_dict": "state",
    "tensor_parallel": "tensor",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import DTensor with the first function that needs it: a context does not."""
        if name in _HOMES:
            return getattr(import_module(f"gdn.distributed.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'gdn.distributed' has no attribute {name!r}")
