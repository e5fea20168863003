"""List the kernels that the first `generate` of the lab's model compiles, in order, with CPU seconds; no GPU.

    PYTHONPATH=.:tests:src:benchmarks python docs/lab/2026-11-28-first-generate.py [--tokens 512]

Calls are those of Transformers 5.17 with the patch: the prompt's layers, then a token's. Each call is
recorded, and its kernels are compiled for sm_90, one after another in this process, without a cache.
Seconds are of the CPU, ptxas included; "tracing" holds Python's lock. A call compiles its kernels in
parallel, but one call compiles after another.
"""

import argparse
import os
import tempfile
from unittest.mock import patch

import torch
import triton
from kit import compiling
from triton.compiler import ASTSource

from gdn.backends.hopper import rule
from gdn.backends.triton.layer import norm
from gdn.ops import conv, step
from gdn.problem import parse
from gdn.problem.layer import NormProblem

BF16, F32 = torch.bfloat16, torch.float32
H, D, HIDDEN, W = 32, 128, 2048, 4


def now():
    """Return the CPU seconds of this process and its children."""
    return sum(os.times()[:4])


def rand(*shape, dtype=BF16):
    return torch.randn(*shape, dtype=dtype)


def calls(T):
    def normalise(x, z=None, act=None):
        weight = rand(x.shape[-1])
        problem = NormProblem(x=x, z=z, weight=weight, eps=1e-6, activation=act, backend="triton")
        return norm.rms_norm_zero_centred(problem) if z is None else norm.rms_norm_gated(problem)

    def prompt_rule():
        heads = [rand(1, T, H, D) for _ in range(3)]
        given = dict(
            zip("qkv", heads, strict=True), g=-rand(1, T, H, dtype=F32).abs(), beta=rand(1, T, H).sigmoid()
        )
        problem = parse(
            **given, scale=None, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True,
            backend="hopper",
        )  # fmt: skip
        rule.forward(rule.to_kernel_layout(problem), None)

    mixed = 2 * 16 * D + H * D
    step_tensors = (
        rand(1, mixed), rand(1, mixed, W), rand(mixed, W), None, rand(1, H), rand(1, H), rand(H, dtype=F32),
        rand(H), rand(1, H, D, D, dtype=F32),
    )  # fmt: skip
    yield "norm of 2,048", lambda: normalise(rand(1, T, HIDDEN))
    yield (
        "convolution",
        lambda: conv.causal_conv1d(
            rand(1, mixed, T).transpose(1, 2).contiguous(),
            rand(mixed, W),
            None,
            activation="silu",
            backend="triton",
        ),
    )
    yield "rule", prompt_rule
    yield "gated norm", lambda: normalise(rand(T * H, D), rand(T * H, D), "silu")
    yield "norm of heads", lambda: normalise(rand(1, T, 16, 512)[..., :256])
    yield "norm of 2,048, a token", lambda: normalise(rand(1, 1, HIDDEN))
    yield "decode_step", lambda: step.decode_step(
        *step_tensors, num_k_heads=16, head_k_dim=D, head_v_dim=D, z=rand(1, H, D), norm_weight=rand(D),
        use_qk_l2norm_in_kernel=True, backend="triton",
    )  # fmt: skip
    yield "norm of heads, a token", lambda: normalise(rand(1, 1, 16, 512)[..., :256])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512)
    T = parser.parse_args().tokens
    torch.manual_seed(0)
    traced = [0.0]

    def timed(trace):
        def call(*args, **options):
            start = now()
            try:
                return trace(*args, **options)
            finally:
                traced[0] += now() - start

        return call

    sources = [x for x in (ASTSource, *ASTSource.__subclasses__()) if "make_ir" in vars(x)]
    for source in sources:
        source.make_ir = timed(source.make_ir)
    compiling.triton_key()
    seen, total = set(), 0.0
    print(f"{'call':24s} {'kernel':28s} tracing  all, s")
    with (
        tempfile.TemporaryDirectory() as folder,
        triton.knobs.cache.scope(),
        patch.object(rule, "compile_ahead", lambda *_: None),
    ):
        triton.knobs.cache.dir = folder
        for name, call in calls(T):
            for job in compiling.jobs(call, "cuda:90"):
                if job in seen:
                    continue
                seen.add(job)
                traced[0], start = 0.0, now()
                compiling._compile(job)
                seconds = now() - start
                total += seconds
                print(f"{name:24s} {job.kernel.__name__:28s} {traced[0]:7.2f} {seconds:7.2f}", flush=True)
    print(f"{len(seen)} binaries, {total:.2f} s one after another")


if __name__ == "__main__":
    main()
