"""The door: callers' tensors in, checked frozen problems out. Nothing below validates again."""

from gdn.problem.rule import CHUNK, ContextParallel, Problem, host_offsets, parse

__all__ = ["CHUNK", "ContextParallel", "Problem", "host_offsets", "parse"]
