"""Define every letter and every named tensor of this package, once.

    B  batch           T  tokens          N  sequences (B, or len(cu_seqlens) - 1 when packed)
    H  query/key heads HV value heads     HV % H == 0; value head j reads key head j // (HV // H)
    K  key dim         V  value dim       C  tokens per chunk (64)        NC number of chunks

Log decays are natural logarithms per token, in [-inf, 0]. A state is logically [K, V], in any memory layout.
dX is the gradient of X. It has the shape of X, and the dtype of X unless a docstring states another.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Q = Float[Tensor, "B T H K"]  # queries
Keys = Float[Tensor, "B T H K"]  # keys
Values = Float[Tensor, "B T HV V"]  # values v, outputs o, corrected values v_new
PerHead = Float[Tensor, "B T HV"]  # g: log decay per token; beta: write strength; a, b: their raw logits
PerChannel = Float[Tensor, "B T HV K"]  # g: log decay per token and key channel; a: its raw logits
Decay = PerHead | PerChannel  # g or its raw logits a, whose rank says what one of them decays
HeadParam = Float[Tensor, "HV"]  # A_log, dt_bias
ChannelParam = Float[Tensor, "HV K"]  # dt_bias of a decay per key channel
GateBias = HeadParam | ChannelParam
GSum = Float[Tensor, "B T HV"]  # inclusive sum of g from the start of the token's chunk, float64
AStrict = Float[
    Tensor, "B T HV C"
]  # strictly lower beta_i e^(G_i - G_j) <k_i, k_j>; row i is token i, column j of its chunk
AInv = Float[Tensor, "B T HV C"]  # (I + A)^-1, unit lower triangular
WKeys = Float[Tensor, "B T HV K"]  # A_inv (beta e^G k)
UValues = Float[Tensor, "B T HV V"]  # A_inv (beta v)
State = Float[Tensor, "N HV K V"]  # S: one state per sequence and value head
ChunkInverse = Float[Tensor, "NC HV C C"]  # (I + A)^-1 of each chunk; padding rows are the identity or zero
ChunkValues = Float[Tensor, "NC HV C V"]  # values of the tokens of each chunk
ChunkStates = Float[Tensor, "NC HV K V"]  # S_in: the state entering each chunk
InverseNorm = Float[Tensor, "B T H"]  # rsqrt(sum(x x) + 1e-6) of queries or keys, fp32
Pool = Float[Tensor, "slots HV K V"]  # the states of an engine; [slots, HV, V, K] with state_v_first
Channels = Float[Tensor, "B T D"]  # D channels: q | k | v side by side, before and after the convolution
ConvWeight = Float[Tensor, "D W"]  # W taps per channel; the last tap multiplies the newest input
ConvState = Float[Tensor, "N D W-1"]  # the last inputs of each sequence, newest in the last column
ConvPool = Float[Tensor, "slots D L"]  # the convolution windows of an engine, L >= W - 1
Offsets = Int[Tensor, "N+1"]  # cu_seqlens: sequence n holds tokens cu_seqlens[n] : cu_seqlens[n + 1]
Index = Int[Tensor, "N"]
Mask = Bool[Tensor, "N"]
