"""Read the environment variables of this package; no other module reads the environment.

GDN_BACKEND   the backend of a call that names none (as if `backend=` had been passed: there is no fallback)
GDN_SEGMENTS  0: no forward on Hopper cuts a sequence into segments (docs/bits.md)
GDN_DEBUG     1: log each operator before it runs, synchronise after it, check lengths and finiteness
GDN_ENGINES   the engines whose plug-in is active: names with commas between, or `all`; unset: none
GDN_CALLS     a folder, to which each process with an active patch writes how many calls gdn served
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


def assemblers() -> list[str]:
    """Return the assemblers that Triton runs instead of its own: for Blackwell, and for other GPUs."""
    names = ("TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH")
    return [path for name in names if (path := os.environ.get(name))]


def engines(supported: tuple[str, ...]) -> tuple[str, ...]:
    """Return the engines named in GDN_ENGINES; ValueError for another name."""
    named = [name.strip() for name in os.environ.get("GDN_ENGINES", "").split(",") if name.strip()]
    for name in named:
        if name not in (*supported, "all"):
            raise ValueError(f"GDN_ENGINES: expected some of {', '.join(supported)} or all, got {name!r}")
    return supported if "all" in named else tuple(named)


def calls_folder() -> str | None:
    """Return the folder in GDN_CALLS, or None."""
    return os.environ.get("GDN_CALLS") or None


def of_engine(name: str) -> str | None:
    """Return an engine's own environment variable, which decides which of its kernels serves a call."""
    return os.environ.get(name)
