"""What a layer carries from one call to the next."""

from dataclasses import dataclass

from gdn.notation import ConvState, State


@dataclass
class GatedDeltaNetCache:
    """The memory of one GatedDeltaNet over N sequences; empty until the first call that is given it.

        conv_state   [N, D, W-1]     the convolution's last inputs, newest last, in the activations' dtype
        state        [N, HV, K, V]   the rule's state, fp32 (fp64 for fp64 activations)

    A call reads both fields and puts new tensors in their place; no tensor is written in place, so a copy of
    the dataclass is a point to return to, and gradients flow through both fields from call to call.
    """

    conv_state: ConvState | None = None
    state: State | None = None
