"""What is right: the law and the stages in plain torch. Slow, differentiable, no code of any backend."""

from gdn.reference.recurrence import gate, gated_delta_rule, l2norm

__all__ = ["gate", "gated_delta_rule", "l2norm"]
