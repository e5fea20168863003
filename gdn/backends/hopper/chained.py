"""One launch after another without the gap between them: programmatic dependent launch.

A kernel launched so may begin once all programs of the one before have come to `after_the_one_before`. There
it waits until that one is done and what it stored is seen: no memory may be touched before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn.backends.triton.launch import INTERPRETED

CHAINED = {"launch_pdl": True}  # of a Launch
_ON_GPU = tl.constexpr(not INTERPRETED)


@triton.jit
def after_the_one_before():
    if _ON_GPU:
        gdc_launch_dependents()
        gdc_wait()
