"""Compute single stages of the chunk form: cumulative gates, A, its inverse, states, outputs."""
