"""Check a kernel against the reference: problems as data, the fp64 reference, limits, poisoned memory.

    from gdn.testing import Case, check

    for verdict in check(my_kernel, Case(gate="slow", heads=(2, 4)), torch.bfloat16, device="cuda"):
        assert verdict.ok, verdict

`my_kernel` has the signature of `gdn.chunk_gated_delta_rule`. The package needs PyTorch and gdn only.
"""

from gdn.testing.accuracy import Verdict, check, error_limits, measure_error, reference_rule, run
from gdn.testing.cases import Case, Lengths, covering, packed, rows
from gdn.testing.memory import poison_memory
from gdn.testing.tensors import Inputs, inputs

__all__ = [
    "Case",
    "Inputs",
    "Lengths",
    "Verdict",
    "check",
    "covering",
    "error_limits",
    "inputs",
    "measure_error",
    "packed",
    "poison_memory",
    "reference_rule",
    "rows",
    "run",
]
