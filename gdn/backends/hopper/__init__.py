"""The seat of the Hopper backend: known by name, refusing until its kernels exist."""

from gdn.backends.backend import absent

BACKEND = absent("hopper", "the Hopper kernels are not part of this version")
