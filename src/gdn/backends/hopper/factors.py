"""Define the factors of a chunk, which `gates` and `solve` write to HBM and the state scan reads.

    g = -exp(A_log) softplus(a + dt_bias)  or as given;   G = chunk sums of g, in fp64
    Q_DECAY scale e^G q_rstd;  K_DECAY -e^G k_rstd;  UPDATE_DECAY e^(G_C - G) k_rstd;  BETA
    LOG2_K (G - log k_rstd) / log 2;  LOG2_Q (G + log(scale q_rstd)) / log 2
    CHUNK_DECAY e^(G_C), a scalar; the element after it is WELL_CONDITIONED: 1 for such a chunk, else 0

The scaled score e^(G_i - G_j) <q_i, k_j> of normalised rows is then 2^(LOG2_Q_i - LOG2_K_j) times the product
of the caller's rows: one exponential a pair. The rows form two boxes, as each box is one TMA load. The first
is written to HBM for chunks that are not well-conditioned, and only for these. The second is that of every
chunk; its load ends with the line of 128 bytes that holds the scalars. A g below MIN_G counts as
MIN_G: e^MIN_G is 0 in fp32, and G stays so small that a difference of two G in fp32 is off by at most 2^-10.
Without l2norm rstd is 1.
"""

from triton.experimental.gluon import language as gl

C = gl.constexpr(64)  # tokens of a chunk
# rows of a chunk's factors: the first box has rows 0 to 3, the second rows 4 to 7 (7 is unused)
UPDATE_DECAY, BETA, LOG2_K, LOG2_Q = (gl.constexpr(i) for i in (0, 1, 2, 3))
Q_DECAY, K_DECAY, CHUNK_DECAY = (gl.constexpr(i) for i in (4, 5, 6))
NUM_ROWS, BOX_ROWS = gl.constexpr(8), gl.constexpr(4)
# the same memory in lines of 128 bytes: those of a box, and those that are written at all
LINE, BOX_LINES, NUM_LINES = gl.constexpr(32), gl.constexpr(8), gl.constexpr(13)
# its index among the chunk's factors: the element after CHUNK_DECAY
WELL_CONDITIONED = gl.constexpr(CHUNK_DECAY.value * C.value + 1)
# values of FAST_PATH of `solve` and the scan, if it is on: `solve` stores B of well-conditioned chunks in the
# place of A_inv, or A_inv of all chunks, which a backward reads
WITH_B, WITH_A_INV = gl.constexpr(True), gl.constexpr(2)
MIN_G = -128.0  # e^MIN_G is 0 in fp32
MIN_LOG2_DECAY = gl.constexpr(
    -92.0
)  # a chunk whose log2 of e^(G_C) is at least this has a decay that fits fp32
LOG2_E = gl.constexpr(1.4426950408889634)
