"""Imitate the peers: their signatures, copied by hand, over gdn's arithmetic, strict in their arguments.

A stand-in raises where the real function raises, or where it is silently wrong.
"""

import contextlib
import math
from types import ModuleType

import torch

import gdn
from gdn.reference import stages
from kit import api


class FLA:
    """Imitate flash-linear-attention 0.6.0."""

    PATHS = {  # function -> the file that defines it
        "chunk_gated_delta_rule": "fla/ops/gated_delta_rule/chunk.py",
        "fused_recurrent_gated_delta_rule": "fla/ops/gated_delta_rule/fused_recurrent.py",
    }

    @staticmethod
    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
        state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None,
        **kwargs,
    ):  # fmt: skip
        # it ignores unknown names, and uses these four only
        assert set(kwargs) <= {"use_gate_in_kernel", "A_log", "dt_bias", "chunk_size"}
        assert kwargs.pop("chunk_size", 64) in (16, 32, 64)
        return gdn.chunk_gated_delta_rule(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, state_v_first=state_v_first,
            cu_seqlens=cu_seqlens, **kwargs,
        )  # fmt: skip

    @staticmethod
    def fused_recurrent_gated_delta_rule(
        q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
        output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
        dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
        cu_seqlens=None, **kwargs,
    ):  # fmt: skip
        assert not kwargs and gk is None and gv is None
        return gdn.fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, scale=scale, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias,
            output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first,
        )  # fmt: skip


class FLAChannels:
    """Imitate flash-linear-attention 0.6.0 with a decay per key channel."""

    PATHS = {"chunk_kda": "fla/ops/kda/chunk.py"}

    @staticmethod
    def chunk_kda(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
        return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
        cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
    ):  # fmt: skip
        assert set(kwargs) <= {"A_log", "dt_bias"}
        gate, HV, K = {}, v.shape[2], k.shape[3]
        if use_gate_in_kernel:
            A_log, dt_bias = kwargs["A_log"], kwargs["dt_bias"]
            assert A_log.shape == (HV,) and dt_bias.shape == (HV * K,) and A_log.dtype == torch.float32
            gate = {"A_log": A_log, "dt_bias": dt_bias.view(HV, K), "lower_bound": lower_bound}
        if safe_gate and use_gate_in_kernel:
            assert lower_bound is not None and -5 <= lower_bound < 0
        # its faster kernels are wrong below, and it does not look
        assert not safe_gate or use_gate_in_kernel or (g >= -5).all()
        return gdn.chunk_gated_delta_rule(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, state_v_first=state_v_first,
            cu_seqlens=cu_seqlens, use_gate_in_kernel=use_gate_in_kernel, **gate,
        )  # fmt: skip


class FLAStages:
    """Imitate FLA's stages: gates summed to base 2, states by chunk, any of three chunk sizes."""

    PATHS = {
        "chunk_local_cumsum": "fla/ops/utils/cumsum.py",
        "solve_tril": "fla/ops/utils/solve_tril.py",
        "chunk_scaled_dot_kkt_fwd": "fla/ops/common/chunk_scaled_dot_kkt.py",
        "recompute_w_u_fwd": "fla/ops/gated_delta_rule/wy_fast.py",
        "chunk_gated_delta_rule_fwd_h": "fla/ops/common/chunk_delta_h.py",
        "chunk_fwd_o": "fla/ops/common/chunk_o.py",
    }

    @staticmethod
    def chunk_local_cumsum(
        g, chunk_size, reverse=False, scale=None, cu_seqlens=None, output_dtype=torch.float,
        chunk_indices=None, use_graph=False, **kwargs,
    ):  # fmt: skip
        assert not kwargs and not reverse
        with stages_of_size(chunk_size):
            return (stages.chunk_cumsum(g.double(), cu_seqlens) * scale).to(output_dtype)

    @staticmethod
    def chunk_scaled_dot_kkt_fwd(
        k, g=None, beta=None, cu_seqlens=None, chunk_size=64, output_dtype=torch.float32, chunk_indices=None,
    ):  # fmt: skip
        with stages_of_size(chunk_size):
            return stages.chunk_kkt(k.float(), beta.float(), to_natural_log(g), cu_seqlens).to(output_dtype)

    @staticmethod
    def solve_tril(A, cu_seqlens=None, chunk_indices=None, output_dtype=torch.float):
        assert A.shape[-1] in (16, 32, 64)
        with stages_of_size(A.shape[-1]):
            return stages.solve_tril(A.float(), cu_seqlens).to(output_dtype)

    @staticmethod
    def recompute_w_u_fwd(k, v, beta, A, g=None, cu_seqlens=None, chunk_indices=None):
        with stages_of_size(A.shape[-1]):
            found = stages.wy_transform(
                *(x.float() for x in (k, v, beta)), to_natural_log(g), A.float(), cu_seqlens
            )
        return tuple(x.to(k.dtype) for x in found)

    @staticmethod
    def chunk_gated_delta_rule_fwd_h(
        k, w, u, g=None, gk=None, initial_state=None, output_final_state=False, chunk_size=64,
        save_new_value=True, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
        chunk_offsets=None,
    ):  # fmt: skip
        assert gk is None and output_final_state and not state_v_first
        with stages_of_size(chunk_size):
            h, v_new, final = stages.chunk_state(
                k.float(), w.float(), u.float(), to_natural_log(g), initial_state, cu_seqlens
            )
            count = sum(1 for _ in stages.chunks(1, k.shape[1], cu_seqlens))
        return h[None, :count].to(k.dtype), v_new.to(k.dtype), final

    @staticmethod
    def chunk_fwd_o(
        q, k, v, h, g=None, g_gamma=None, scale=None, state_v_first=False, cu_seqlens=None, chunk_size=64,
        chunk_indices=None,
    ):  # fmt: skip
        assert g_gamma is None and not state_v_first
        with stages_of_size(chunk_size):
            return stages.chunk_output(
                *(x.float() for x in (q, k, v)), to_natural_log(g), h[0].float(), scale, cu_seqlens
            ).to(q.dtype)


class FLALayer(torch.nn.Module):
    """Imitate fla.layers.GatedDeltaNet: its parameter names; separate projections and taps of q, k, v."""

    def __init__(
        self, hidden_size=2048, expand_v=2, head_dim=256, num_heads=6, num_v_heads=None, mode="chunk",
        use_gate=True, use_short_conv=True, allow_neg_eigval=False, conv_size=4, conv_bias=False,
        layer_idx=None, norm_eps=1e-5, output_gate_activation="swish", **kwargs,
    ):  # fmt: skip
        super().__init__()
        assert not kwargs and mode == "chunk" and use_gate and use_short_conv and not allow_neg_eigval
        Linear, V = torch.nn.Linear, int(head_dim * expand_v)
        self.H, self.HV, self.norm_eps = num_heads, num_v_heads or num_heads, norm_eps
        widths = {"q": self.H * head_dim, "k": self.H * head_dim, "v": self.HV * V}
        for name, width in widths.items():
            setattr(self, f"{name}_proj", Linear(hidden_size, width, bias=False))
            conv = torch.nn.Conv1d(width, width, conv_size, groups=width, bias=conv_bias)
            setattr(self, f"{name}_conv1d", conv)
        self.a_proj, self.b_proj = (Linear(hidden_size, self.HV, bias=False) for _ in "ab")
        self.A_log, self.dt_bias = (torch.nn.Parameter(torch.zeros(self.HV)) for _ in "ab")
        self.g_proj = Linear(hidden_size, self.HV * V, bias=False)
        self.o_norm = torch.nn.Module()
        self.o_norm.weight = torch.nn.Parameter(torch.ones(V))
        self.o_proj = Linear(self.HV * V, hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, **kwargs):
        x = hidden_states
        q, k, v = (
            gdn.causal_conv1d(
                getattr(self, f"{n}_proj")(x), getattr(self, f"{n}_conv1d").weight[:, 0], activation="silu"
            )[0]
            for n in "qkv"
        )
        heads = (self.H, self.H, self.HV)
        q, k, v = (y.unflatten(-1, (n, -1)) for y, n in zip((q, k, v), heads, strict=True))
        o, _ = FLA.chunk_gated_delta_rule(
            q, k, v, self.a_proj(x), self.b_proj(x), A_log=self.A_log, dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        z = self.g_proj(x).unflatten(-1, (self.HV, -1))
        o = gdn.rms_norm_gated(o, z, self.o_norm.weight, eps=self.norm_eps)
        return self.o_proj(o.flatten(-2)), None, past_key_values


@contextlib.contextmanager
def stages_of_size(chunk_size):
    """Return the reference's stages in chunks of another size."""
    before, stages.C = stages.C, chunk_size
    yield
    stages.C = before


def to_natural_log(g):
    """Convert gates from base 2 to natural logarithms."""
    return g * math.log(2)


class FlashQLABackend:
    """Imitate the backend by which FLA calls FlashQLA."""

    env_var = "FLA_FLASH_QLA"
    default_enable = True
    forced = False

    def is_enabled(self):
        return self.forced or self.default_enable


class FlashKDABackend(FlashQLABackend):
    """Imitate the backend by which FLA calls FlashKDA."""

    env_var = "FLA_FLASH_KDA"


class FlashQLA:
    """Imitate FlashQLA 0.1.3."""

    PATHS = {"chunk_gated_delta_rule": "flash_qla/ops/gated_delta_rule/chunk/__init__.py"}

    @staticmethod
    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, head_first=False, state_v_first=False, auto_cp=True,
        enable_fwd_cp_cache=True, cp_context=None, force_intra_cp=False,
    ):  # fmt: skip
        assert cu_seqlens is None or cu_seqlens.dtype == torch.int32
        assert q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] == v.shape[3] == 128
        return gdn.chunk_gated_delta_rule(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip


class FlashKDA:
    """Imitate FlashKDA 0.0.1 of commit 1ce47ea: outputs in the caller's memory, states V first."""

    PATHS = {"fwd": "flash_kda/__init__.py"}

    @staticmethod
    def fwd(
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None,
        cu_seqlens=None,
    ):  # fmt: skip
        narrow, wide = (q, k, v, g, beta, out), (A_log, dt_bias)
        assert all(x.is_contiguous() and x.dtype == torch.bfloat16 for x in narrow)
        assert all(x.is_contiguous() and x.dtype == torch.float32 for x in wide)
        (B, T, H, K), states = q.shape, [x for x in (initial_state, final_state) if x is not None]
        assert K == 128 and all(x.shape == q.shape for x in (k, v, g, out)) and beta.shape == (B, T, H)
        assert A_log.shape == (H,) and dt_bias.shape == (H, K) and -5 <= lower_bound <= 0
        assert cu_seqlens is None or (B == 1 and cu_seqlens.dtype == torch.int64)
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        assert all(x.shape == (N, H, K, K) and x.is_contiguous() for x in states)
        assert {x.dtype for x in states} in ({torch.bfloat16}, {torch.float32}, set())
        o, final = gdn.chunk_gated_delta_rule(
            q, k, v, g, beta, scale=float(scale), initial_state=initial_state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
            lower_bound=lower_bound, use_beta_sigmoid_in_kernel=True, state_v_first=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        out.copy_(o)
        if final_state is not None:
            final_state.copy_(final)


class FlashInfer:
    """Imitate FlashInfer 0.7.2."""

    PATHS = {
        "chunk_gated_delta_rule": "flashinfer/gdn_prefill.py",
        "gated_delta_rule_decode_pretranspose": "flashinfer/gdn_decode.py",
        "gated_delta_rule_mtp": "flashinfer/gdn_decode.py",
    }

    @staticmethod
    def chunk_gated_delta_rule(
        q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
        use_qk_l2norm_in_kernel=False, output=None, output_state=None, state_checkpoints=None,
        checkpoint_cu_starts=None, checkpoint_every_n_tokens=0, use_cp="auto", state_indices=None,
        _cp_chunk_len=None, backend="auto", max_seqlen=None,
    ):  # fmt: skip
        assert q.dim() == k.dim() == v.dim() == 3 and all(x.is_contiguous() for x in (q, k, v, g, beta))
        assert g.dtype == beta.dtype == torch.float32 and cu_seqlens.dtype == torch.int64
        assert max_seqlen == int(cu_seqlens.diff().max()) and initial_state.is_contiguous()
        o, S = gdn.chunk_gated_delta_rule(
            *(x[None] for x in (q, k, v, g.log(), beta)), scale=scale, initial_state=initial_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, output_final_state=True, state_v_first=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return (o[0], S) if output_final_state else o[0]

    @staticmethod
    def gated_delta_rule_decode_pretranspose(
        q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, initial_state=None,
        initial_state_indices=None, output_state_indices=None, intermediate_states_buffer=None,
        disable_state_update=False, backend="auto",
    ):  # fmt: skip
        assert a.dtype == b.dtype == torch.bfloat16 and A_log.dtype == torch.float32 and state is None
        assert initial_state_indices.dtype in (torch.int32, torch.int64)
        packet = intermediate_states_buffer is not None or disable_state_update
        if packet and (q.shape[1] == 1 or initial_state.dtype != torch.bfloat16):
            raise ValueError("supported only by BF16 pretranspose decode with T > 1")
        o = api.decode(
            q, k, v, initial_state, a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=scale, out=output,
            use_qk_l2norm_in_kernel=use_qk_l2norm, read_index=initial_state_indices,
            intermediate=intermediate_states_buffer, write="none" if disable_state_update else "final",
        )  # fmt: skip
        return o, initial_state

    @staticmethod
    def gated_delta_rule_mtp(
        q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale=None, output=None,
        intermediate_states_buffer=None, ssm_state_indices=None, disable_state_update=None,
        use_qk_l2norm=True, output_state_indices=None, cache_replayssm=False, replayssm_rawv=None,
        replayssm_rawk=None, replayssm_g=None, replayssm_beta=None,
    ):  # fmt: skip
        assert not cache_replayssm
        assert initial_state.dtype == A_log.dtype == torch.float32
        # without it FlashInfer warns, and 0.8 changes the meaning
        assert disable_state_update is not None
        kept = intermediate_states_buffer
        if kept is not None:
            assert disable_state_update and kept.dtype == torch.float32
            assert kept.shape[:2] == q.shape[:2] and kept.is_contiguous()
        assert initial_state_indices.dtype in (torch.int32, torch.int64) and ssm_state_indices is None
        o = api.decode(
            q, k, v, initial_state, a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=scale, out=output,
            use_qk_l2norm_in_kernel=use_qk_l2norm, read_index=initial_state_indices,
            write="none" if disable_state_update else "final", intermediate=kept,
        )  # fmt: skip
        return o, initial_state


class FlashInferOutputOnly:
    """Imitate the kernel of FlashInfer 0.7.2 that reads bf16 states and writes none."""

    PATHS = {"gated_delta_rule_mtp": "flashinfer/gdn_kernels/gdn_decode_bf16_wy_output_only.py"}

    @staticmethod
    def gated_delta_rule_mtp(
        A_log, a, dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=None, k=None, v=None, b=None,
        initial_state_source=None, initial_state_indices=None, output_state_indices=None,
        intermediate_states_buffer=None, accepted_steps=None, ssm_state_indices=None,
        disable_state_update=False, use_qk_l2norm_in_kernel=True, scale=None, output=None,
        disable_output=False, recovery_steps=0,
    ):  # fmt: skip
        tensors = (A_log, a, dt_bias, q, k, v, b, initial_state_source)
        assert all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in tensors)
        assert use_qk_l2norm_in_kernel and initial_state_indices.dtype == torch.int32
        # it copies the result into a given buffer
        assert output is None
        return api.decode(
            q, k, v, initial_state_source, a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=scale,
            read_index=initial_state_indices, write="none",
        )  # fmt: skip


class FlashInferReplay:
    """Imitate the kernel of FlashInfer 0.7.2 with a ring of 16 places: normalised keys, d, their decay."""

    PATHS = {"gated_delta_rule_mtp_ucache": "flashinfer/gdn_kernels/gdn_decode_bf16_wy_ucache.py"}

    @staticmethod
    def gated_delta_rule_mtp_ucache(
        A_log, a, dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=None, k=None, v=None, b=None,
        initial_state_source=None, initial_state_indices=None, output_state_indices=None,
        intermediate_states_buffer=None, accepted_steps=None, ssm_state_indices=None,
        disable_state_update=False, use_qk_l2norm_in_kernel=True, scale=None, output=None,
        disable_output=False, recovery_steps=0, k_cache=None, u_cache=None, g_cache=None, hist_len=None,
        use_pdl=False,
    ):  # fmt: skip
        pool, slots = initial_state_source, initial_state_indices
        tensors = (q, k, v, a, b, pool, k_cache, u_cache)
        assert all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in tensors)
        assert k_cache.shape == (len(pool), k.shape[2], 16, k.shape[3]) and use_qk_l2norm_in_kernel
        assert u_cache.shape == (len(pool), v.shape[2], 16, v.shape[3]) and u_cache.isfinite().all()
        assert g_cache.shape == (len(pool), v.shape[2], 16) and g_cache.dtype == torch.float32
        assert hist_len.dtype == slots.dtype == torch.int32 and int(hist_len.max()) + q.shape[1] <= 16
        if q.shape[1] not in (4, 8):
            raise NotImplementedError(f"gated_delta_rule_mtp_ucache: T={q.shape[1]} unsupported")
        cursor = torch.zeros(len(pool), dtype=torch.int32)
        cursor[slots.long()] = hist_len
        return api.replay_decode(
            *(torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k)), v, pool,
            *(x.transpose(1, 2) for x in (u_cache, k_cache, g_cache)), cursor, a=a, b=b, A_log=A_log,
            dt_bias=dt_bias, scale=scale, use_qk_l2norm_in_kernel=False, read_index=slots, out=output,
        )  # fmt: skip


def modules() -> dict[str, ModuleType]:
    """Return the modules that `import` should find, by dotted name."""
    holders = {
        "fla": None, "fla.ops": None, "fla.ops.gated_delta_rule": FLA, "flash_qla": FlashQLA,
        "flash_kda": FlashKDA, "fla.ops.kda.backends": None,
        "fla.ops.kda": FLAChannels,
        "fla.ops.gated_delta_rule.backends": None, "flashinfer": None, "flashinfer.gdn_prefill": FlashInfer,
        "flashinfer.gdn_decode": FlashInfer, "flashinfer.gdn_kernels": None,
        "flashinfer.gdn_kernels.gdn_decode_bf16_wy_output_only": FlashInferOutputOnly,
        "flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache": FlashInferReplay,
        "fla.ops.utils": FLAStages, "fla.ops.common": None,
        "fla.ops.common.chunk_scaled_dot_kkt": FLAStages, "fla.ops.common.chunk_delta_h": FLAStages,
        "fla.ops.common.chunk_o": FLAStages, "fla.ops.gated_delta_rule.wy_fast": FLAStages,
    }  # fmt: skip
    found = {}
    for name, holder in holders.items():
        found[name] = ModuleType(name)
        for function in holder.PATHS if holder else ():
            setattr(found[name], function, getattr(holder, function))
    found["fla.layers"] = ModuleType("fla.layers")
    found["fla.layers"].GatedDeltaNet = FLALayer
    for rule, file, backend in (
        ("gated_delta_rule", "flash_qla", FlashQLABackend), ("kda", "flash_kda", FlashKDABackend)
    ):  # fmt: skip
        switch = found[f"fla.ops.{rule}.backends.{file}"] = ModuleType("switch")
        # a class of its own, as the provider changes it
        setattr(switch, backend.__name__, type(backend.__name__, (backend,), {}))
    return found
