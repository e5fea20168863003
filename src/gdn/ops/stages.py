"""Run the stages of the chunked rule one by one, for tests, study and benchmarks; the whole rule is faster.

With C = 64 tokens per chunk, G the sum of g within a chunk and S the state before it, a chunk is

    A = strict_lower(beta_i e^(G_i - G_j) <k_i, k_j>);   A_inv = (I + A)^-1
    w = A_inv (beta e^G k);   u = A_inv (beta v);   v_new = u - w S
    o = scale (e^G (q S) + lower(e^(G_i - G_j) <q_i, k_j>) v_new);   S <- e^(G_C) S + (e^(G_C - G) k)^T v_new

The stages are `chunk_cumsum`, `chunk_kkt`, `solve_tril`, `wy_transform`, `chunk_state`, `chunk_output`. The
adjoint `x_bwd` of a stage `x` follows it. Its arguments are the arguments of x in order, the outputs that it
needs, and the gradients of the outputs. It returns the gradient of each argument of x, in order, in the dtype
of the argument.

Arguments and results that all stages share:
    q, k           [B, T, H, K]    any float (fp64 on eager); value head j reads key head j // (HV // H)
    v, u, v_new    [B, T, HV, V]   any float
    w              [B, T, HV, K]   any float
    g, beta        [B, T, HV]      any float; natural log decay per token, <= 0; write strength
    G              [B, T, HV]      float64 (fp32 on devices without), natural
    A, A_inv       [B, T, HV, C]   any float; row i is token i, column j the j-th token of its chunk
    S_in           [NC, HV, K, V]  any float; the state before each chunk
    cu_seqlens     [N+1] or None   int32 or int64; packed sequences, B == 1, empty ones allowed
    backend        str or None     None: chosen automatically; a named one never falls back
The first chunk of a sequence starts at its first token, and chunks are numbered sequence by sequence. NC is
B ceil(T / C), or floor((T + N (C - 1)) / C) if packed; surplus rows of S_in are zero. Results are fp32 (fp64
if the first argument is) unless a docstring states another dtype. They are zero in columns past the end of a
chunk and for tokens past cu_seqlens[-1].

Raises: TypeError, ValueError, NotImplementedError as in `gdn.problem`; ValueError when autograd would record,
        since stages have adjoints, not gradients. Nothing has been computed then.
Cost:   stated per token and value head.
Source: arXiv:2412.06464, section 3.3; arXiv:2406.06484 for the ungated rule.
"""

from typing import Any

from torch import Tensor

from gdn import settings
from gdn.backends import select
from gdn.notation import (
    AInv,
    AStrict,
    ChunkStates,
    GSum,
    HeadParam,
    Keys,
    Offsets,
    PerHead,
    Q,
    State,
    UValues,
    Values,
    WKeys,
)
from gdn.ops.library import Signature, guarded
from gdn.problem import host_offsets
from gdn.problem.stages import parse_stage


def chunk_cumsum(g: PerHead, *, cu_seqlens: Offsets | None = None, backend: str | None = None) -> GSum:
    """Compute G_i = sum of g_j over j <= i in the chunk of i  [chunk_local_cumsum].

    Returns G in float64, so that g = -1e6 on one token does not cost the other tokens their resolution. A g
    below -1000 counts as -1000, because e^-1000 is 0 in every dtype; -inf is allowed.
    Cost: 1 add; one read, one write.
    """
    G: Tensor = _run("chunk_cumsum", {"g": g}, cu_seqlens, backend)
    return G


def chunk_cumsum_bwd(
    g: PerHead, dG: GSum, *, cu_seqlens: Offsets | None = None, backend: str | None = None
) -> PerHead:
    """Compute dg_j = sum of dG_i over i >= j in the chunk of j; 0 where g < -1000. Returns dg, dtype of g."""
    dg: Tensor = _run("chunk_cumsum_bwd", {"g": g, "dG": dG}, cu_seqlens, backend)
    return dg


def chunk_gate_cumsum(
    a: PerHead,
    A_log: HeadParam,
    dt_bias: HeadParam | None = None,
    *,
    cu_seqlens: Offsets | None = None,
    backend: str | None = None,
) -> GSum:
    """Compute G of g = -exp(A_log) softplus(a + dt_bias), in one pass  [gdn_gate_chunk_cumsum].

    a [B, T, HV], A_log and dt_bias [HV], any float; A_log = -inf: no decay. Returns G like `chunk_cumsum`.
    Cost: 3 transcendental functions and 1 add; one read, one write.
    """
    G: Tensor = _run("chunk_gate_cumsum", {"a": a, "A_log": A_log, "dt_bias": dt_bias}, cu_seqlens, backend)
    return G


def chunk_gate_cumsum_bwd(
    a: PerHead,
    A_log: HeadParam,
    dt_bias: HeadParam | None,
    dG: GSum,
    *,
    cu_seqlens: Offsets | None = None,
    backend: str | None = None,
) -> tuple[PerHead, HeadParam, HeadParam | None]:
    """Compute the gradients of `chunk_gate_cumsum`, with sums in fp32 or better.

        da = -exp(A_log) sigmoid(a + dt_bias) dg;   dA_log = sum g dg;   ddt_bias = sum da

    dg is the result of `chunk_cumsum_bwd`. Returns da, dA_log, ddt_bias (None without dt_bias).
    """
    tensors = {"a": a, "A_log": A_log, "dt_bias": dt_bias, "dG": dG}
    da, dA_log, ddt_bias = _run("chunk_gate_cumsum_bwd", tensors, cu_seqlens, backend)
    return da, dA_log, ddt_bias


def chunk_kkt(
    k: Keys, beta: PerHead, G: GSum, *, cu_seqlens: Offsets | None = None, backend: str | None = None
) -> AStrict:
    """Compute A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j, else 0  [chunk_scaled_dot_kkt].

    The exponential is computed only of differences that are not positive, so it cannot overflow.
    Cost: 2 C K flop; the value heads of a key head share the product.
    """
    A: Tensor = _run("chunk_kkt", {"k": k, "beta": beta, "G": G}, cu_seqlens, backend)
    return A


def chunk_kkt_bwd(
    k: Keys,
    beta: PerHead,
    G: GSum,
    dA: AStrict,
    *,
    cu_seqlens: Offsets | None = None,
    backend: str | None = None,
) -> tuple[Keys, PerHead, GSum]:
    """Compute the gradients of `chunk_kkt`.

        dk = beta M k + (beta M)^T k;   dbeta_i = sum_j M_ij <k_i, k_j>;   dG = row sums - column sums of dA A

    M = dA D with D_ij = e^(G_i - G_j) below the diagonal, else 0. dk is summed over the value heads of a key
    head.
    Returns dk, dbeta, dG. Cost: 4 C K flop.
    """
    tensors = {"k": k, "beta": beta, "G": G, "dA": dA}
    dk, dbeta, dG = _run("chunk_kkt_bwd", tensors, cu_seqlens, backend)
    return dk, dbeta, dG


def solve_tril(A: AStrict, *, cu_seqlens: Offsets | None = None, backend: str | None = None) -> AInv:
    """Compute A_inv = (I + A)^-1 of each chunk from the part of A below its diagonal  [solve_tril, tri_inv].

    Returns A_inv, unit lower triangular, in fp32 or better; accurate for correlated keys with beta up to 2.
    Cost: C^2 / 3 flop.
    """
    A_inv: Tensor = _run("solve_tril", {"A": A}, cu_seqlens, backend)
    return A_inv


def solve_tril_bwd(
    A_inv: AInv, dA_inv: AInv, *, cu_seqlens: Offsets | None = None, backend: str | None = None
) -> AStrict:
    """Compute dA = -strict_lower(A_inv^T dA_inv A_inv^T). Returns dA. Cost: 4 C^2 flop."""
    dA: Tensor = _run("solve_tril_bwd", {"A_inv": A_inv, "dA_inv": dA_inv}, cu_seqlens, backend)
    return dA


def wy_transform(
    k: Keys,
    v: Values,
    beta: PerHead,
    G: GSum,
    A_inv: AInv,
    *,
    cu_seqlens: Offsets | None = None,
    backend: str | None = None,
) -> tuple[WKeys, UValues]:
    """Compute w = A_inv (beta e^G k) and u = A_inv (beta v)  [recompute_w_u, wy_fast].

    Returns w, u. Only the lower triangle of A_inv is read.
    Cost: 2 C (K + V) flop.
    """
    tensors = {"k": k, "v": v, "beta": beta, "G": G, "A_inv": A_inv}
    w, u = _run("wy_transform", tensors, cu_seqlens, backend)
    return w, u


def wy_transform_bwd(
    k: Keys,
    v: Values,
    beta: PerHead,
    G: GSum,
    A_inv: AInv,
    dw: WKeys,
    du: UValues,
    *,
    cu_seqlens: Offsets | None = None,
    backend: str | None = None,
) -> tuple[Keys, Values, PerHead, GSum, AInv]:
    """Compute the gradients of `wy_transform`.

        dA_inv = lower(dw (beta e^G k)^T + du (beta v)^T)

    The other gradients follow from A_inv^T dw and A_inv^T du by the product rule.
    Returns dk, dv, dbeta, dG, dA_inv. Cost: 4 C (K + V) flop.
    """
    tensors = {"k": k, "v": v, "beta": beta, "G": G, "A_inv": A_inv, "dw": dw, "du": du}
    dk, dv, dbeta, dG, dA_inv = _run("wy_transform_bwd", tensors, cu_seqlens, backend)
    return dk, dv, dbeta, dG, dA_inv


def chunk_state(
    k: Keys,
    w: WKeys,
    u: UValues,
    G: GSum,
    initial_state: State | None = None,
    *,
    cu_seqlens: Offsets | None = None,
    backend: str | None = None,
) -> tuple[ChunkStates, Values, State]:
    """Advance S through the chunks of each sequence, one after the other  [chunk_fwd_h, chunk_h].

        v_new = u - w S;   S <- e^(G_C) S + (e^(G_C - G) k)^T v_new

    initial_state is [N, HV, K, V], any float; None: zero.
    Returns S_in [NC, HV, K, V], v_new [B, T, HV, V], final_state [N, HV, K, V].
    Cost: 4 K V flop; sequential over the chunks of a sequence.
    """
    tensors = {"k": k, "w": w, "u": u, "G": G, "initial_state": initial_state}
    S_in, v_new, final_state = _run("chunk_state", tensors, cu_seqlens, backend)
    return S_in, v_new, final_state


def chunk_state_bwd(
    k: Keys,
    w: WKeys,
    u: UValues,
    G: GSum,
    initial_state: State | None,
    S_in: ChunkStates,
    v_new: Values,
    dS_in: ChunkStates,
    dv_new: Values,
    dfinal_state: State | None,
    *,
    cu_seqlens: Offsets | None = None,
    backend: str | None = None,
) -> tuple[Keys, WKeys, UValues, GSum, State | None]:
    """Run the adjoint of `chunk_state` from the last chunk to the first.

        du = dv_new + e^(G_C - G) k dS;   dw = -du S_in^T;   dS <- dS_in + e^(G_C) dS - w^T du

    dS is the gradient of the state after a chunk. dfinal_state may be None: zero.
    Returns dk, dw, du, dG, dinitial_state (None without initial_state).
    Cost: 8 K V flop.
    """
    tensors = {
        "k": k, "w": w, "u": u, "G": G, "initial_state": initial_state, "S_in": S_in, "v_new": v_new,
        "dS_in": dS_in, "dv_new": dv_new, "dfinal_state": dfinal_state,
    }  # fmt: skip
    dk, dw, du, dG, dinitial_state = _run("chunk_state_bwd", tensors, cu_seqlens, backend)
    return dk, dw, du, dG, dinitial_state


def chunk_output(
    q: Q,
    k: Keys,
    v_new: Values,
    G: GSum,
    S_in: ChunkStates,
    *,
    scale: float | None = None,
    cu_seqlens: Offsets | None = None,
    backend: str | None = None,
) -> Values:
    """Compute the outputs of all chunks  [chunk_fwd_o, chunk_o].

        o_i = scale (e^(G_i) q_i S_in + sum over j <= i of e^(G_i - G_j) <q_i, k_j> v_new_j)

    scale None: K ** -0.5. Returns o [B, T, HV, V], dtype of q.
    Cost: 2 K V + 2 C (K + V) flop.
    """
    tensors = {"q": q, "k": k, "v_new": v_new, "G": G, "S_in": S_in}
    o: Tensor = _run("chunk_output", tensors, cu_seqlens, backend, scale=scale)
    return o


def chunk_output_bwd(
    q: Q,
    k: Keys,
    v_new: Values,
    G: GSum,
    S_in: ChunkStates,
    do: Values,
    *,
    scale: float | None = None,
    cu_seqlens: Offsets | None = None,
    backend: str | None = None,
) -> tuple[Q, Keys, Values, GSum, ChunkStates]:
    """Compute the gradients of `chunk_output`; do below stands for scale do.

        dv_new = (D q k^T)^T do;   dS_in = (e^G q)^T do;   dq = e^G do S_in^T + M k;   dk = M^T q

    D_ij = e^(G_i - G_j) for i >= j, else 0; M = D (do v_new^T). dq and dk are summed over the value heads of
    a key head.
    Returns dq, dk, dv_new, dG, dS_in. Cost: 4 K V + 4 C (K + V) flop.
    """
    tensors = {"q": q, "k": k, "v_new": v_new, "G": G, "S_in": S_in, "do": do}
    dq, dk, dv_new, dG, dS_in = _run("chunk_output_bwd", tensors, cu_seqlens, backend, scale=scale)
    return dq, dk, dv_new, dG, dS_in


_OUTPUTS = {
    "chunk_cumsum": ("G",),
    "chunk_cumsum_bwd": ("dg",),
    "chunk_gate_cumsum": ("G",),
    "chunk_gate_cumsum_bwd": ("da", "dA_log", "ddt_bias"),
    "chunk_kkt": ("A",),
    "chunk_kkt_bwd": ("dk", "dbeta", "dG"),
    "solve_tril": ("A_inv",),
    "solve_tril_bwd": ("dA",),
    "wy_transform": ("w", "u"),
    "wy_transform_bwd": ("dk", "dv", "dbeta", "dG", "dA_inv"),
    "chunk_state": ("S_in", "v_new", "final_state"),
    "chunk_state_bwd": ("dk", "dw", "du", "dG", "dinitial_state"),
    "chunk_output": ("o",),
    "chunk_output_bwd": ("dq", "dk", "dv_new", "dG", "dS_in"),
}


def _run(
    stage: str, tensors: dict[str, Any], cu_seqlens: Any, backend: Any, *, scale: float | None = None
) -> Any:
    """Check a call, select a backend and run its function of the name `stage`.

    The function gets the tensors in order, scale if the stage has one, and cu_seqlens.
    """
    problem = parse_stage(stage, tensors, cu_seqlens=cu_seqlens, scale=scale, backend=backend)
    if cu_seqlens is not None:
        host_offsets(cu_seqlens, None, problem.sizes["T"], read_device=settings.debug())
    args = list(tensors.values())
    if stage.startswith("chunk_output"):
        args.append(problem.sizes["K"] ** -0.5 if scale is None else float(scale))
    run = getattr(select(problem), stage)
    # -inf is a valid log decay and a valid A_log
    finite = {name: x for name, x in tensors.items() if name not in ("g", "A_log")}
    signature = Signature(stage, tuple(finite), _OUTPUTS[stage])
    return guarded(signature, problem.device, lambda: run(*args, cu_seqlens), tensors=tuple(finite.values()))
