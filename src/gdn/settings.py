"""The only place that reads the environment.

GDN_BACKEND   the backend taken when a call names none (as if `backend=` had been given: it never falls back)
GDN_DEBUG     1: log each operator before it runs, synchronise after it, check lengths and finiteness
"""

import os


def backend(named: str | None = None) -> str | None:
    """Name of the backend that a call names, or else GDN_BACKEND asks for; or None."""
    return named or os.environ.get("GDN_BACKEND") or None


def debug() -> bool:
    """True when GDN_DEBUG is set to anything but 0."""
    return os.environ.get("GDN_DEBUG", "0") not in ("", "0")


def interprets() -> bool:
    """TRITON_INTERPRET=1: Triton's kernels run on CPU tensors, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
