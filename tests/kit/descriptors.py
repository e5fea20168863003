"""Find WGMMA operands whose addresses ptxas 12.8 may lose, in PTX.

WGMMA reads an operand by a descriptor of 64 bits: the lower half has its address in shared memory, the upper
half its layout. Where operands of two layouts begin at the same address, one after the other, Triton adds the
constants of both to one register. ptxas 12.8, which Triton 3.6 runs for sm_90, then computes further
descriptors of the second operand from a register that nothing has written: the MMA reads elsewhere, within
shared memory or past it. ptxas 12.9 does not.
"""

import re
from collections import defaultdict

# kernels whose descriptors are right in spite of it: their SASS has been read
VERIFIED = (
    "pairs_bwd_kernel K=256 V=256 BK=64 BV=16 ",
    "rows_bwd_kernel K=256 V=256 BK=64 BV=16 ",
    "state_kernel K=100 V=128 BK=128 BV=16 C=64 UNIT=4 ",
)
_SUM = re.compile(r"(?:or\.b64|add\.s64)\s+%rd\d+, (%rd\d+), (-?\d+);")


def find_shared_bases(ptx: str) -> list[str]:
    """Return a line for each register from which descriptors of several layouts are computed."""
    layouts: defaultdict[str, set[int]] = defaultdict(set)
    for base, constant in _SUM.findall(ptx):
        # sums of pointers have small constants
        if abs(int(constant)) >> 32:
            layouts[base].add((int(constant) & (1 << 64) - 1) >> 32)
    return [
        f"descriptors of {len(found)} layouts begin at {base}: {', '.join(map(hex, sorted(found)))}"
        for base, found in layouts.items()
        if len(found) > 1
    ]
