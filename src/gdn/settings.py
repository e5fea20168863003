"""Read the environment variables of this package; no other module reads the environment.

GDN_BACKEND   the backend of a call that names none (as if `backend=` had been passed: there is no fallback)
GDN_SEGMENTS  0: no forward on Hopper cuts a sequence into segments (docs/bits.md)
GDN_DEBUG     1: log each operator before it runs, synchronise after it, check lengths and finiteness
"""

import os


def backend(named: str | None = None) -> str | None:
    """Return the backend that the call names, else the one in GDN_BACKEND, else None."""
    return named or os.environ.get("GDN_BACKEND") or None


def allows_segments() -> bool:
    """Return False when GDN_SEGMENTS is 0: then no forward cuts a sequence into segments."""
    return os.environ.get("GDN_SEGMENTS", "1") != "0"


def debug() -> bool:
    """Return True when GDN_DEBUG is set to anything but 0."""
    return os.environ.get("GDN_DEBUG", "0") not in ("", "0")


def of_call() -> tuple[str | None, bool]:
    """Return GDN_BACKEND or None, and whether GDN_DEBUG is set: what a call reads of the environment."""
    read = os.environ.get
    return read("GDN_BACKEND") or None, read("GDN_DEBUG", "0") not in ("", "0")


def interprets() -> bool:
    """Return True under TRITON_INTERPRET=1, where Triton kernels run on CPU tensors, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
