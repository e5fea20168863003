"""Define backends as frozen values, and select one per call. Triton is imported only for CUDA tensors."""

from gdn.backends.backend import Backend, Gradients, Saved
from gdn.backends.select import ORDER, Report, load, other_launches, report, select, select_backward

__all__ = [
    "ORDER", "Backend", "Gradients", "Report", "Saved", "load", "other_launches", "report", "select",
    "select_backward",
]  # fmt: skip
