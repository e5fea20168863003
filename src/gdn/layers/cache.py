"""Define the cache that a GatedDeltaNet layer reads and updates at each call."""

from dataclasses import dataclass

from gdn.notation import ConvState, State


@dataclass
class GatedDeltaNetCache:
    """Hold the recurrent memory of one GatedDeltaNet over N sequences; both fields start as None.

        conv_state   [N, D, W-1]     last inputs of the convolution, newest last; dtype of the activations
        state        [N, HV, K, V]   state of the gated delta rule, fp32 (fp64 for fp64 activations)

    A call reads both fields and assigns new tensors to them; it writes no tensor in place. A copy of the
    dataclass is therefore a snapshot, and gradients flow through both fields from call to call.
    """

    conv_state: ConvState | None = None
    state: State | None = None
