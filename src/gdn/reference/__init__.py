"""Define the correct results in plain torch: the reference recurrence and the reference stages.

Everything here is slow and differentiable, and shares no code with a backend.
"""

from gdn.reference.recurrence import gate, gated_delta_rule, l2norm

__all__ = ["gate", "gated_delta_rule", "l2norm"]
