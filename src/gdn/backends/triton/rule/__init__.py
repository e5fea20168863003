"""Compute the gated delta rule in chunks, forward and backward.

Reading order: `run` has the entry points. For a new problem it calls `describe` (dtypes, strides, table of
chunks), `choose` (tile sizes) and `build` (launches); then it runs the sequence of launches that `launches`
lists. `zero_unused` clears what packed sequences leave unwritten.
Kernels: prepare (with tril), then scan or state + output; backward pairs, state_bwd, gradients, gates_bwd.
"""
