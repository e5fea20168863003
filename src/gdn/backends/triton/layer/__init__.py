"""Compute the other parts of a Gated DeltaNet layer: short convolution, gated RMS norm and gate."""
