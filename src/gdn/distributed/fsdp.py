"""Call fully_shard of FSDP2 on GatedDeltaNet layers; a mixed precision policy leaves their gates fp32."""

from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gdn.distributed.tensor import is_layer

Module = TypeVar("Module", bound=nn.Module)


def fully_shard_layers(
    module: Module, *, mp_policy: MixedPrecisionPolicy | None = None, **options: Any
) -> Module:
    """Call `fully_shard` on every GatedDeltaNet layer of a module, A_log and dt_bias in a group of their own.

    `fully_shard` gathers parameters in `mp_policy.param_dtype`, and 16 bits are too few for a log decay. Here
    the projections, the convolution and the norm are one group with this policy; A_log and dt_bias are one
    that no policy narrows. Call `fully_shard` on blocks and on the model afterwards.

    Args:
        module       a layer or a model; `tensor_parallel` comes first
        mp_policy    that of the projections, the convolution and the norm
        options      those of `fully_shard`: mesh, reshard_after_forward, ...
    Returns: the module. The conv1d of a Transformers layer keeps its dtype as well, as its module is never
             called: use `gdn.patch_transformers()`, whose convolution takes filters of any float dtype.
    Cost:    one more all-gather and reduce-scatter a layer, of 2 HV elements.
    """
    policy = mp_policy or MixedPrecisionPolicy()
    wide = replace(policy, param_dtype=None, output_dtype=None, cast_forward_inputs=False)
    for layer in [x for x in module.modules() if is_layer(x)]:
        children = [x for x in layer.children() if not isinstance(x, nn.Conv1d)]
        fully_shard(children, mp_policy=policy, **options)
        fully_shard(layer, mp_policy=wide, **options)
    return module
