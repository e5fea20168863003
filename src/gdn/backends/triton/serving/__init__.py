"""Serve from a pool of states: prefill, decode, draft packets, replay, commit and one layer's step."""
