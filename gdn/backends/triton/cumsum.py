"""The stages that sum log decays within chunks, and their adjoints.

    G_i = sum of g_j over j <= i in i's chunk, in fp64;   g >= RESET, and g = -exp(A_log) softplus(a + dt_bias)
    dg_j = sum of dG_i over i >= j, 0 where g < RESET;   da = -exp(A_log) sigmoid(a + dt_bias) dg
    dA_log = sum g dg;   ddt_bias = sum da
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton import sums
from gdn.backends.triton.chunks import Table, locate
from gdn.backends.triton.gate import decay_rate, load_heads
from gdn.backends.triton.launch import Launch, Plans, kernel, on
from gdn.notation import GSum, HeadParam, Offsets, PerHead
from gdn.problem import CHUNK, RESET

HEADS = 16  # of a program


@triton.jit
def _places(chunk, table_ptr, T, HV, chunks_per_row, C: tl.constexpr, BH: tl.constexpr):
    """Heads; places and mask [C, BH] of a chunk's tokens and heads."""
    strips = tl.cdiv(HV, BH)
    row, first, length = locate(tl.program_id(0) // strips, table_ptr, T, chunks_per_row, C)
    heads = (tl.program_id(0) % strips) * BH + tl.arange(0, BH)
    tokens = tl.arange(0, C)
    places = (row * T.to(tl.int64) + first + tokens)[:, None] * HV + heads[None, :]
    return heads, places, (tokens < length)[:, None] & (heads < HV)[None, :]
