"""Provide the public functions and the torch operators that they call."""
