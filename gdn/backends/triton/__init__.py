"""The seat of the Triton backend: known by name, refusing until its kernels exist."""

from gdn.backends.backend import absent

BACKEND = absent("triton", "the Triton kernels are not part of this version")
