"""Measure times: CUDA graphs, events, the host, new processes."""
