"""Peers in their own conventions, with the inputs that their callers have:

FLA         int32 offsets, states K first; decode reads states of its own and leaves new ones in new memory
FlashQLA    int32 offsets; gates are computed by torch operators where the problem holds raw logits
FlashKDA    int64 offsets, states V first, memory for its outputs; normalises q and k and activates raw logits
            in bf16 itself, g with a lower bound
FlashInfer  tokens without a batch axis, int64 offsets and the longest length, decay as exp(g), gates in
            fp32, states V first; decode writes the caller's pool, from 16-bit logits and fp32 parameters;
            prompts read and write it by `state_indices` where the version has that argument;
            it has one function of several tokens for fp32 pools and one for bf16, and for bf16 pools that
            are only read a kernel without states and one with a ring
Transformers  plain PyTorch: a sequence at a time, a key head for every value head, gates by torch operators,
            states read from the cache and copied back into it

On a pool (prefill:pool) a peer that takes states of its own has them gathered and scattered by torch
operators, as its callers do, and that is timed. Other conversions are not timed, except the activation of raw
logits, which is part of the job.
"""

import inspect
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gdn_bench.providers import fallback
from gdn_bench.providers.arguments import (
    activate_gates,
    convert_offsets,
    require_half,
    require_heads,
    require_tensors,
)
from gdn_bench.providers.flash_kda import flash_kda as flash_kda
from gdn_bench.providers.provider import TOKENS, Bind, Bound, Options, Provider, Tensors


def fla() -> Provider:
    """Return flash-linear-attention with its forwarding to FlashQLA and FlashKDA switched off."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend
    from fla.ops.kda import chunk_kda
    from fla.ops.kda.backends.flash_kda import FlashKDABackend

    for backend in (FlashQLABackend, FlashKDABackend):
        backend.default_enable = False
        if backend().is_enabled():
            reason = "got a value that makes FLA call another library"
            raise RuntimeError(f"expected {backend.env_var} unset or 0, {reason}")

    def chunk(tensors: Tensors, options: Options) -> Bound:
        q, k, v, g, beta = require_tensors(tensors, "q", "k", "v", "g", "beta")
        flags = {name: x for name, x in options.items() if name not in ("exact", "batch_invariant")}
        rest = {name: tensors.get(name) for name in ("initial_state", "A_log", "dt_bias")}
        offsets, rule = convert_offsets(tensors, torch.int32), chunk_gated_delta_rule
        if g.dim() == 4:
            # its faster kernels are right for gates of at least -5 only; where that is known they are used
            is_raw, bound = options["use_gate_in_kernel"], options.get("lower_bound", -math.inf)
            flags["safe_gate"] = -5 <= bound < 0 if is_raw else bool((g.detach() >= -5).all())
            # it has dt_bias as [HV K]
            rest |= {x: tensors[x].float().flatten() for x in ("A_log", "dt_bias") if x in tensors}
            rule = chunk_kda
        return Bound(lambda: rule(q, k, v, g, beta, cu_seqlens=offsets, **rest, **flags))

    def decode(tensors: Tensors, options: Options) -> Bound:
        require_heads(tensors)
        pool = tensors["pool"]
        if pool.dtype != torch.float32:
            raise NotImplementedError("fla: returns its states in fp32 only")
        states = pool[tensors["read_index"].long()]
        arguments: dict[str, Any] = {
            **{name: tensors[name] for name in ("q", "k", "v", "g", "beta")},
            **{name: tensors[name].float() for name in ("A_log", "dt_bias")},
            **{name: options[name] for name in ("scale", "use_qk_l2norm_in_kernel", "state_v_first")},
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "output_final_state": True,
        }
        return Bound(lambda: fused_recurrent_gated_delta_rule(initial_state=states, **arguments))

    pooled = {"decode": decode, "int16": decode, "pool": gather_pool(chunk)}
    return Provider("fla", {"prefill": chunk, "train": chunk, **pooled})


def flash_qla() -> Provider:
    """Return FlashQLA: forward and backward, no decode."""
    from flash_qla import chunk_gated_delta_rule

    def chunk(tensors: Tensors, options: Options) -> Bound:
        require_heads(tensors)
        q, k, v = require_tensors(tensors, "q", "k", "v")
        require_half(q, v)
        names = ("scale", "output_final_state", "use_qk_l2norm_in_kernel", "state_v_first")
        flags = {name: options[name] for name in names}
        offsets, state = convert_offsets(tensors, torch.int32), tensors.get("initial_state")

        def run() -> Any:
            g, beta = activate_gates(tensors, options)
            return chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, cu_seqlens=offsets, **flags)

        return Bound(run)

    return Provider("flash_qla", {"prefill": chunk, "train": chunk, "pool": gather_pool(chunk)})


def gather_pool(chunk: Bind) -> Bind:
    """Return prompts on a pool as callers of a peer without one run them: gather, forward, scatter."""

    def pool(tensors: Tensors, options: Options) -> Bound:
        states, index = tensors["pool"], tensors["read_index"].long()
        initial = states[index]
        own = {name: x for name, x in tensors.items() if name not in ("pool", "read_index")}
        bound = chunk({**own, "initial_state": initial}, {**options, "output_final_state": True})

        def run() -> Any:
            torch.index_select(states, 0, index, out=initial)
            o, final = bound()
            assert final is not None
            states.index_copy_(0, index, final.to(states.dtype))
            return o

        return Bound(run, lambda o: (o, states[index].float()))

    return pool


def flashinfer() -> Provider:
    """Return FlashInfer: prefill, decode and speculation, no gradients."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    return Provider(
        "flashinfer",
        {
            "prefill": _flashinfer_chunk(chunk_gated_delta_rule),
            "pool": _flashinfer_prompts(chunk_gated_delta_rule),
            "decode": _flashinfer_decode(gated_delta_rule_decode_pretranspose),
            "int16": _flashinfer_decode(gated_delta_rule_decode_pretranspose),
            **_flashinfer_packets(gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp),
            "replay": _flashinfer_replay,
        },
    )


def _flashinfer_chunk(chunk_gated_delta_rule: Any) -> Bind:
    def chunk(tensors: Tensors, options: Options) -> Bound:
        require_heads(tensors)
        q, k, v = require_tensors(tensors, "q", "k", "v")
        require_half(q, v)
        offsets = convert_offsets(tensors, torch.int64)
        if offsets is None:
            offsets = q.shape[1] * torch.arange(q.shape[0] + 1, device=q.device)
        is_raw = options["use_gate_in_kernel"] or options["use_beta_sigmoid_in_kernel"]
        state = tensors.get("initial_state")
        if state is not None:
            state = (state if options["state_v_first"] else state.transpose(-1, -2)).contiguous()
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        arguments: dict[str, Any] = {
            "scale": options["scale"],
            "initial_state": state,
            "output_final_state": options["output_final_state"],
            "cu_seqlens": offsets,
            "use_qk_l2norm_in_kernel": options["use_qk_l2norm_in_kernel"],
            "max_seqlen": int(offsets.diff().max()),
        }

        def linear() -> tuple[Tensor, Tensor]:
            g, beta = activate_gates(tensors, options)
            return g.float().exp().flatten(0, 1), beta.float().flatten(0, 1)

        ready = None if is_raw else linear()

        def run() -> Any:
            return chunk_gated_delta_rule(*flat, *(ready or linear()), **arguments)

        def restore(results: Any) -> tuple[Tensor, Tensor]:
            o, final = results
            return o.view(v.shape), final if options["state_v_first"] else final.transpose(-1, -2)

        return Bound(run, restore)

    return chunk


def _flashinfer_prompts(chunk_gated_delta_rule: Any) -> Bind:
    if "state_indices" not in inspect.signature(chunk_gated_delta_rule).parameters:
        return gather_pool(_flashinfer_chunk(chunk_gated_delta_rule))

    def pool(tensors: Tensors, options: Options) -> Bound:
        states, index = tensors["pool"], tensors["read_index"]
        if not options["state_v_first"]:
            raise NotImplementedError("flashinfer: takes pools with V first only")

        def indexed(*given: Any, **arguments: Any) -> Any:
            arguments |= {"initial_state": states, "output_state": states, "state_indices": index}
            return chunk_gated_delta_rule(*given, **arguments)

        bound = _flashinfer_chunk(indexed)(tensors, {**options, "output_final_state": True})
        return Bound(bound, lambda results: (results[0], states[index.long()].float()))

    return pool


def _flashinfer_pool(tensors: Tensors, options: Options) -> dict[str, Any]:
    """Return the arguments of FlashInfer's decode and multi-token functions."""
    require_heads(tensors)
    q, k, v, a, b = require_tensors(tensors, "q", "k", "v", "g", "beta")
    if not options["state_v_first"]:
        raise NotImplementedError("flashinfer: decodes on pools with V first only")
    return {
        "q": q, "k": k, "v": v, "a": a.to(q.dtype), "b": b.to(q.dtype),
        "A_log": tensors["A_log"].float(), "dt_bias": tensors["dt_bias"].float(),
        "scale": options["scale"], "use_qk_l2norm": options["use_qk_l2norm_in_kernel"],
        "initial_state": tensors["pool"], "initial_state_indices": tensors["read_index"],
        "output": torch.empty_like(v),
    }  # fmt: skip


def _flashinfer_decode(gated_delta_rule_decode_pretranspose: Any) -> Bind:
    def decode(tensors: Tensors, options: Options) -> Bound:
        arguments = _flashinfer_pool(tensors, options)

        def run() -> Tensor:
            o: Tensor = gated_delta_rule_decode_pretranspose(state=None, **arguments)[0]
            return o

        pool, index = tensors["pool"], tensors["read_index"]
        return Bound(run, lambda o: (o, pool[index].float()))

    return decode


def _flashinfer_packets(
    gated_delta_rule_decode_pretranspose: Any, gated_delta_rule_mtp: Any
) -> dict[str, Bind]:
    """Return the ways with several tokens a row: all states kept, the last one written, none written."""

    def through(pool: Tensor, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if pool.dtype == torch.bfloat16:
            return gated_delta_rule_decode_pretranspose, {**arguments, "state": None}
        return gated_delta_rule_mtp, arguments

    def states(tensors: Tensors, options: Options) -> Bound:
        arguments, pool = _flashinfer_pool(tensors, options), tensors["pool"]
        kept = pool.new_empty(*tensors["v"].shape[:2], *pool.shape[1:])
        arguments |= {"intermediate_states_buffer": kept, "disable_state_update": True}
        verify, arguments = through(pool, arguments)

        def run() -> tuple[Tensor, Tensor]:
            return verify(**arguments)[0], kept

        return Bound(run, lambda results: (results[0], results[1].flatten(0, 1).float()))

    def final(tensors: Tensors, options: Options) -> Bound:
        pool, index = tensors["pool"], tensors["read_index"]
        arguments = _flashinfer_pool(tensors, options) | {"disable_state_update": False}
        verify, arguments = through(pool, arguments)
        return Bound(lambda: verify(**arguments)[0], lambda o: (o, pool[index].float()))

    def chunk(tensors: Tensors, options: Options) -> Bound:
        if tensors["pool"].dtype == torch.bfloat16:
            from flashinfer.gdn_kernels import gdn_decode_bf16_wy_output_only as kernel

            verify, arguments = kernel.gated_delta_rule_mtp, _flashinfer_kernel(tensors, options)
            # without `output`: with it, packets of less than 16 tokens are copied
            return Bound(lambda: verify(**arguments, disable_state_update=True), lambda o: (o, None))
        arguments = _flashinfer_pool(tensors, options) | {"disable_state_update": True}
        return Bound(lambda: gated_delta_rule_mtp(**arguments)[0], lambda o: (o, None))

    return {"states": states, "final": final, "chunk": chunk, "chunk final": final}


def _flashinfer_kernel(tensors: Tensors, options: Options) -> dict[str, Any]:
    """Return the arguments of the kernels that only read bf16 pools; parameters of gates in bf16."""
    arguments = _flashinfer_pool(tensors, options)
    return {
        **{name: arguments[name] for name in ("q", "k", "v", "a", "b", "scale")},
        **{name: tensors[name].bfloat16() for name in ("A_log", "dt_bias")},
        "use_qk_l2norm_in_kernel": arguments["use_qk_l2norm"],
        "initial_state_source": arguments["initial_state"],
        "initial_state_indices": arguments["initial_state_indices"],
    }


def _flashinfer_replay(tensors: Tensors, options: Options) -> Bound:
    """Bind FlashInfer's replay; its ring is filled by the tokens before the packet, packet by packet."""
    pool, k, v = require_tensors(tensors, "pool", "k", "v")
    if pool.dtype != torch.bfloat16:
        raise NotImplementedError("flashinfer: replays on bf16 pools only, before Blackwell")
    from flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache import gated_delta_rule_mtp_ucache

    (T, H, K), (HV, V), slots = k.shape[1:], v.shape[2:], len(pool)
    ring = {
        "k_cache": pool.new_zeros(slots, H, 16, K), "u_cache": pool.new_zeros(slots, HV, 16, V),
        "g_cache": pool.new_zeros(slots, HV, 16, dtype=torch.float32), "output": torch.empty_like(v),
        "hist_len": torch.zeros_like(tensors["accepted"]),
    }  # fmt: skip
    for start in range(0, tensors["past_q"].shape[1], T):
        past = {x: tensors[f"past_{x}"][:, start : start + T].contiguous() for x in TOKENS}
        ring["hist_len"].fill_(start)
        gated_delta_rule_mtp_ucache(**_flashinfer_kernel({**tensors, **past}, options), **ring)
    ring["hist_len"].copy_(tensors["accepted"])
    arguments = _flashinfer_kernel(tensors, options) | ring
    return Bound(lambda: gated_delta_rule_mtp_ucache(**arguments), lambda o: (o, None))


def transformers() -> Provider:
    """Return Transformers' plain PyTorch functions, which a model runs on without other packages."""
    whole, recurrent = fallback.chunk(), fallback.recurrent()

    def arranged(tensors: Tensors, options: Options) -> list[Tensor]:
        """Return q, k, v and gates as its layer passes them, a key head to each value head."""
        q, k, v = require_tensors(tensors, "q", "k", "v")
        if options["scale"] is not None:
            raise NotImplementedError("transformers: has no scale but its own")
        group = v.shape[2] // q.shape[2]
        return [*(x.repeat_interleave(group, dim=2) for x in (q, k)), v, *activate_gates(tensors, options)]

    def chunk(tensors: Tensors, options: Options) -> Bound:
        flags = {
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": options["use_qk_l2norm_in_kernel"],
        }
        offsets, state = tensors.get("cu_seqlens"), tensors.get("initial_state")
        rule = fallback.chunk_channels() if "g" in tensors and tensors["g"].dim() == 4 else whole
        ends = None if offsets is None else offsets.tolist()
        if ends is not None and (ends[-1] != tensors["q"].shape[1] or min(map(_length, pairwise(ends))) == 0):
            raise NotImplementedError("transformers: has no empty sequences and no tokens past the last")

        def run() -> tuple[Tensor, Tensor]:
            given = arranged(tensors, options)
            first = state.transpose(-1, -2) if state is not None and options["state_v_first"] else state
            if ends is None:
                o, final = rule(*given, initial_state=first, **flags)
            else:
                sequences = [
                    rule(
                        *(x[:, a:b] for x in given),
                        initial_state=None if first is None else first[[n]],
                        **flags,
                    )
                    for n, (a, b) in enumerate(pairwise(ends))
                ]
                o, final = (
                    torch.cat(parts, dim)
                    for parts, dim in zip(zip(*sequences, strict=True), (1, 0), strict=True)
                )
            assert final is not None
            return o, final.transpose(-1, -2) if options["state_v_first"] else final

        return Bound(run)

    def decode(tensors: Tensors, options: Options) -> Bound:
        require_heads(tensors)
        pool, index = tensors["pool"], tensors["read_index"].long()

        def run() -> Tensor:
            states = pool[index].transpose(-1, -2) if options["state_v_first"] else pool[index]
            o, final = recurrent(
                *arranged(tensors, options), initial_state=states.float(), output_final_state=True,
                use_qk_l2norm_in_kernel=options["use_qk_l2norm_in_kernel"],
            )  # fmt: skip
            assert final is not None
            pool[index] = (final.transpose(-1, -2) if options["state_v_first"] else final).to(pool.dtype)
            return o

        return Bound(run, lambda o: (o, pool[index].float()))

    return Provider("transformers", {"prefill": chunk, "train": chunk, "decode": decode})


def _length(ends: tuple[int, int]) -> int:
    return ends[1] - ends[0]
