"""Define backends as frozen values, and select one per call. Triton is imported only for CUDA tensors."""

from gdn.backends.backend import Backend, Borders, FinishBackward, FinishForward, Gradients, Kept, Saved
from gdn.backends.select import (
    ORDER,
    Report,
    load,
    other_launches,
    report,
    select,
    select_backward,
    select_recurrent,
)

__all__ = [
    "ORDER", "Backend", "Borders", "FinishBackward", "FinishForward", "Gradients", "Kept", "Report", "Saved",
    "load", "other_launches", "report", "select", "select_backward", "select_recurrent",
]  # fmt: skip
