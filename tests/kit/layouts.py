"""Find PTX that exchanges numbers between lanes, and whose operands have another layout than it expects.

`packet_solve` inverts a triangular system by shuffles: its PTX names the lanes and registers of a result
[16, 16] of MMAs of m16n8. Triton chooses the layout of the operands, here read in TTGIR.
"""

import re

EXPECTED = "#ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = ["


def find_other_layouts(ttgir: str) -> list[str]:
    """Return a message for each block of PTX with shuffles whose operands are no results of such MMAs."""
    layouts, messages = dict(re.findall(r"^(#\w+) = (#ttg\.\S+<.*>)$", ttgir, re.M)), []
    for line in ttgir.splitlines():
        if "shfl.sync" in line:
            tile, count = re.search(r"-> tensor<16x16xf32, (#\w+)>", line), re.search(r"ement = (\d+)", line)
            layout = layouts[tile[1]] if tile else line
            warps = re.search(r"\[\d+, (\d)\], instrShape = \[16, 8\]}>$", layout)
            # a lane has 8 registers, or 4 if two warps share the columns; PTX for 4 runs twice for 8
            is_right = layout.startswith(EXPECTED) and warps and count and int(count[1]) * int(warps[1]) <= 8
            messages += [] if is_right else [f"shuffles of operands in {layout}"]
    return messages
