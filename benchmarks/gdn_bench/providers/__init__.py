"""Implementations of the gated delta rule, each called in its own conventions."""
