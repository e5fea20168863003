"""Compute the gated delta rule in chunks, forward and backward.

Reading order: `build` describes a problem and lists its launches, `choose` picks tile sizes, `run` executes.
Kernels: prepare (with tril), scan or state + output; backward pairs, state_bwd, gradients, gates_bwd.
"""
