"""Say when the kernels of decodes, packets and replays load what they read: no bit of a result depends on it.

A packet by one strip of columns is a chain of latencies: of HBM, of MMAs, of the launch. `Loading` holds the
options that shorten it, `LOADING` those in use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gdn.backends.triton.launch import Machine, machine
from gdn.backends.triton.launch.pdl import supports_pdl
from gdn.backends.triton.serving.state_tiles import RESIDENT
from gdn.problem import DecodeProblem, HistoryProblem, ReplayProblem

OnPackets = DecodeProblem | ReplayProblem | HistoryProblem
HELD = 64  # registers of a lane for a state that a packet holds
LINE = 128  # bytes that a prefetch brings into L2


@dataclass(frozen=True)
class Loading:
    """Hold the options of loads.

    has_loads_first  packets and replays: a program issues its loads before its first MMA, and holds the state
                     of its one strip in registers. With 8 tokens, 16 columns and one warp a packet holds it
                     until it writes the last state, and a replay loads 16 places of the history as early
    strips           packets and replays: strips of the state that a program prefetches into L2 at its start,
                     a power of two
    is_early         PDL: the programs that are resident at first prefetch before they wait for the previous
                     kernel. They read a slot index that this kernel may still write: the slot is read again
                     after the wait, and the first one decides nothing but the lines that L2 gets
    has_next_token   decodes of several tokens: registers hold the next token while one is computed
    """

    has_loads_first: bool = False
    strips: int = 0
    is_early: bool = False
    has_next_token: bool = True

    def of_packet(
        self, p: DecodeProblem | ReplayProblem, axis: str, sizes: Mapping[str, int], num_warps: int
    ) -> dict[str, Any]:
        """Return the constants of a packet or a replay with such tiles."""
        gpu, width, is_replay = machine(p.q.device), p.state.element_size(), isinstance(p, ReplayProblem)
        strips = min(self.strips, p.V // sizes["BV"]) if _is_even(p, axis, sizes["BV"], gpu) else 0
        # on fp32 states q and k of 16 tokens would spill beside one strip
        is_first = self.has_loads_first and gpu.kind == "cuda"
        is_first &= sizes["BT"] == 8 or width <= 2 or sizes["STRIPS"] > 1
        holds = 0
        if is_first and sizes["STRIPS"] == 1 and sizes["BS"] >= p.K:
            # a second warp halves the registers, and what is written or replayed needs some beside the state
            is_crowded = num_warps > 1 and (isinstance(p, ReplayProblem) or p.write == "final")
            is_crowded |= is_replay and sizes["BT"] > 8
            share = sizes["BV"] * sizes["BS"] // (32 * num_warps) * width // 4
            holds = int(share <= (HELD // 2 if is_crowded else HELD))
            holds += int(holds and num_warps == 1 and sizes["BV"] == 16 and sizes["BT"] == 8)
        first = {"LOADS_FIRST": is_first, "HOLDS": holds}
        return {**first, "FETCHED": strips, "EARLY": self._early(gpu, strips > 0)}

    def limits_two_warps(self, p: OnPackets, sizes: Mapping[str, int]) -> bool:
        """Return True if programs of two warps get 128 registers: 8 rows of 32 heads are then one wave."""
        is_changed = (self.has_loads_first or self.is_early) and not p.is_per_channel
        if isinstance(p, HistoryProblem) or sizes["BT"] > 8 or p.q.element_size() > 2:
            return False
        # a replay on fp32 states takes more, with any options
        return is_changed and (isinstance(p, DecodeProblem) or p.state.element_size() <= 2)

    def of_decode(self, p: DecodeProblem, axis: str, columns: int) -> dict[str, Any]:
        """Return the constants of a decode by tiles of so many columns."""
        gpu = machine(p.q.device)
        return {"EARLY": self._early(gpu, _is_even(p, axis, columns, gpu)), "HAS_NEXT": self.has_next_token}

    def _early(self, gpu: Machine, is_even: bool) -> int:
        return RESIDENT * gpu.num_sms if self.is_early and is_even and supports_pdl(gpu) else 0


def _is_even(p: DecodeProblem | ReplayProblem, axis: str, columns: int, gpu: Machine) -> bool:
    """Return True if each tile of columns of a state is a power of two of whole 128-byte lines."""
    lines, rest = divmod(p.K * p.state.element_size(), LINE)
    return gpu.kind == "cuda" and axis == "k" and rest == 0 and lines in (1, 2, 4, 8) and p.V % columns == 0


LOADING = Loading()
