"""The benchmarks. Each checks every provider against the reference, then times the right ones in turn."""
