"""Backends are values; `select` picks one. Nothing here imports Triton unless a GPU problem asks for it."""

from gdn.backends.backend import Backend, Gradients, Saved
from gdn.backends.select import ORDER, Report, load, report, select

__all__ = ["ORDER", "Backend", "Gradients", "Report", "Saved", "load", "report", "select"]
