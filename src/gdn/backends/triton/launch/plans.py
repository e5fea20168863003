"""Cache plans: a plan holds the launches of one call with all their scalars and constants."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Plan = TypeVar("Plan")


class PlanCache(Generic[Plan]):
    """Cache plans by the values they depend on; it is emptied when it holds `limit` plans."""

    def __init__(self, limit: int = 2048) -> None:
        self.limit = limit
        self.plans: dict[Hashable, Plan] = {}

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= self.limit:
                self.plans.clear()
            plan = self.plans[key] = make()
        return plan
