"""Compute the gradients of the chunked rule on sm_90 with Gluon kernels: bf16, K = V = 128 or 64.

`plan` lists the launches and says which problems they support; every other file is a part of a kernel.
"""
