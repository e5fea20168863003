"""Find loads that overwrite an operand of an MMA in flight, a fault of Triton 3.6's pipeliner, in TTGIR.

A pipelined loop loads some iterations ahead, into as many buffers as iterations. An operand of WGMMA needs
one buffer more, since the MMA may be in flight when its iteration ends. Triton 3.6 does not give that buffer
to an operand that is also read into registers, so the next load overwrites an operand in use. On an H200 the
gradient of k was wrong by 4 %, in large problems only.
"""

import re
from dataclasses import dataclass, field

_VIEWS = ("ttg.memdesc_index ", "ttg.memdesc_trans ", "ttg.memdesc_reshape ", "ttg.memdesc_subslice ")


@dataclass
class _Trace:
    buffers: dict[str, tuple[int, int]] = field(default_factory=dict)  # allocation -> number, loop depth
    sources: dict[str, str] = field(default_factory=dict)  # view -> tensor of the view
    ahead: dict[str, int] = field(default_factory=dict)  # allocation -> loads into it before its loop
    # MMAs in flight: result, allocations that they read, iterations since their start
    running: list[tuple[str, set[str], int]] = field(default_factory=list)
    captured: list[str] = field(default_factory=list)  # what partitions of warps take as arguments
    found: list[str] = field(default_factory=list)

    def lines(self, lines: list[str], depth: int = 0) -> None:
        """Follow a block of TTGIR; follow the body of a loop for two iterations."""
        at = 0
        while at < len(lines):
            line, at = lines[at], at + 1
            self._line(line.strip(), depth)
            if " = scf.for " not in line and not line.lstrip().startswith("scf.for "):
                continue
            column = len(line) - len(line.lstrip())
            end = next(i for i in range(at, len(lines)) if lines[i].startswith(" " * column + "}"))
            for _ in range(2):
                self.lines(lines[at:end], depth + 1)
                self.running = [(name, reads, turns + 1) for name, reads, turns in self.running]
            at = end

    def _line(self, line: str, depth: int) -> None:
        result, _, body = line.partition(" = ")
        result, names = result.split(":")[0], re.findall(r"%[\w#]+", body)
        if line.startswith("ttg.warp_specialize("):
            self.captured = re.findall(r"%[\w#]+", line.split(")")[0])
        elif re.match(r"partition\d+\(", line):
            # all partitions of a kernel have arguments of the same names
            self.sources |= zip(re.findall(r"(%\w+):", line), self.captured, strict=True)
        elif body.startswith("ttg.local_alloc"):
            count = re.search(r"memdesc<(\d+)x\d+x\d+x", body)
            self.buffers[result], self.ahead[result] = (int(count[1]) if count else 1, depth), 0
        elif body.startswith(_VIEWS):
            self.sources[result] = names[0]
        elif body.startswith("ttg.async_copy_global_to_local "):
            self._load(self._allocation(names[1]), depth)
        elif body.startswith("ttng.warp_group_dot ") and "isAsync = true" in body:
            self.running.append((result, {self._allocation(x) for x in names[:2]}, 0))
        elif body.startswith("ttng.warp_group_dot_wait "):
            pending = re.search(r"pendings = (\d+)", body)
            assert pending is not None, line
            self.running = self.running[len(self.running) - int(pending[1]) :] if int(pending[1]) else []
            for i, x in enumerate(re.findall(r"%[\w#]+", body.split("{")[0])):
                self.sources[f"{result}#{i}"] = x

    def _load(self, into: str, depth: int) -> None:
        count, place = self.buffers[into]
        if depth == place:
            self.ahead[into] += 1
            return
        # iteration t loads for t + ahead while the operands of t - turns may be read: both share a buffer
        # if they are as many iterations apart as there are buffers
        for name, reads, turns in self.running:
            if into in reads and self.ahead[into] + turns >= count:
                self.found.append(f"a load into {into}, {count} buffers, meets {name}")

    def _allocation(self, value: str) -> str:
        while value in self.sources:
            value = self.sources[value]
        return value


def find_overwrites(ttgir: str) -> list[str]:
    """Return a line for each MMA and buffer where a load may overwrite the operand in flight."""
    trace = _Trace()
    trace.lines(ttgir.splitlines())
    return list(dict.fromkeys(trace.found))
