"""Decode with a history on sm_90: a persistent Gluon kernel that keeps states in flight from HBM."""
