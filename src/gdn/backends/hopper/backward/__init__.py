"""Compute the gradients of the chunked rule on sm_90 with Gluon kernels: bf16, K = V = 128.

`plan` lists the launches and decides whether they are used; every other file is one kernel.
"""
