"""The layer, and the modules it is made of."""
