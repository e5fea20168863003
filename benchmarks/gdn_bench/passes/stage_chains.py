"""Stages of gdn by backend, and of FLA, each in its own conventions.

FLA passes on cumulative gates in fp32 to base 2, A in fp32, and the rest in the dtype of q; its states are
[1, chunks, HV, K, V]. The stages of gdn return fp32 (G in fp64); their outputs are rounded to the dtype of q
for the next stage, as FLA's are, so that both read equal bytes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gdn
from gdn.testing.tensors import Inputs
from gdn_bench.passes.stages import Chain
from gdn_bench.problems.workloads import CHUNK
from gdn_bench.providers.gdn_calls import gdn_provider
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.names import PEERS
from gdn_bench.providers.provider import Provider

RCP_LN2 = 1.4426950216  # 1 / ln 2 in fp32, as FLA passes it


def load(names: tuple[str, ...]) -> tuple[dict[str, Chain], dict[str, str]]:
    """Return chains by provider, and why others are absent. Providers without stages are left out."""
    chains: dict[str, Chain] = {}
    absent: dict[str, str] = {}
    for name in names:
        if name == "gdn" or name.startswith("gdn:"):
            chains[name] = ours(name)
        elif name == "fla":
            loaded = load_provider(name)
            if isinstance(loaded, str):
                absent[name] = loaded
            else:
                chains[name] = fla()
        elif name not in PEERS:
            raise ValueError(f"providers: expected gdn, gdn:BACKEND or fla, got {name!r}")
    return chains, absent


def ours(name: str) -> Chain:
    """Return the chain of gdn.stages, on the backend that it chooses or on one by name."""
    backend = name.partition(":")[2] or None
    stages = gdn.stages

    def tuples(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        def call(*arguments: Any) -> tuple[Tensor, ...]:
            *tensors, offsets = arguments
            results = function(*tensors, cu_seqlens=offsets, backend=backend)
            return results if isinstance(results, tuple) else (results,)

        return call

    def hand_on(name: str, x: Tensor) -> Tensor:
        return x.bfloat16() if name in ("A_inv", "w", "u", "v_new", "S_in") else x

    run = {
        "cumsum": tuples(stages.chunk_cumsum),
        "kkt": tuples(stages.chunk_kkt),
        "solve": tuples(stages.solve_tril),
        "wy": tuples(stages.wy_transform),
        "state": tuples(stages.chunk_state),
        "output": tuples(stages.chunk_output),
    }
    return Chain(name, run, _whole(gdn_provider(backend)), hand_on)


def fla() -> Chain:
    """Return the chain of FLA's functions, in chunks of 64."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.common.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
    from fla.ops.utils import chunk_local_cumsum, solve_tril

    def cumsum(g: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        return (chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, cu_seqlens=offsets),)

    def kkt(k: Tensor, beta: Tensor, G: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        return (chunk_scaled_dot_kkt_fwd(k=k, g=G, beta=beta, cu_seqlens=offsets, chunk_size=CHUNK),)

    def solve(A: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        return (solve_tril(A=A, cu_seqlens=offsets, output_dtype=torch.bfloat16),)

    def wy(*given: Tensor) -> tuple[Tensor, ...]:
        k, v, beta, G, A_inv, offsets = given
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=A_inv, g=G, cu_seqlens=offsets)
        return w, u

    def state(*given: Tensor) -> tuple[Tensor, ...]:
        k, w, u, G, S, offsets = given
        h, v_new, final = chunk_gated_delta_rule_fwd_h(
            k=k, w=w, u=u, g=G, initial_state=S, output_final_state=True, chunk_size=CHUNK, cu_seqlens=offsets
        )
        return h, v_new, final

    def output(*given: Tensor) -> tuple[Tensor, ...]:
        q, k, v_new, G, S_in, offsets = given
        o = chunk_fwd_o(
            q=q, k=k, v=v_new, h=S_in, g=G, scale=q.shape[-1] ** -0.5, cu_seqlens=offsets, chunk_size=CHUNK
        )
        return (o,)

    def plain(name: str, x: Tensor) -> Tensor:
        if name == "G":
            return x.double() * math.log(2)
        return x.flatten(0, 1) if name == "S_in" else x

    run: dict[str, Callable[..., tuple[Tensor, ...]]] = {
        "cumsum": cumsum,
        "kkt": kkt,
        "solve": solve,
        "wy": wy,
        "state": state,
        "output": output,
    }
    whole = load_provider("fla")
    assert isinstance(whole, Provider)
    return Chain("fla", run, _whole(whole), plain=plain)


def _whole(provider: Provider) -> Callable[[Inputs], Callable[[], Any]]:
    return lambda given: provider.binds["prefill"](given.tensors, given.options)
