"""Provide the GatedDeltaNet layer and the modules that it consists of."""
