"""Calls that wait to be judged, from the state to what is decided and written."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any, Self

from langchain_quota.decision import Call
from langchain_quota.engine import Limits, Outage, Plan
from langchain_quota.middleware.origin import Origin
from langchain_quota.middleware.rulings import Ruling
from langchain_quota.reservation import Grant
from langchain_quota.state import ledger


class Case(ABC):
    """Calls of one kind that wait to be judged, and what they ask of which counts.

    Args:
        state: The agent's state.
        limits: The limits for them.
        caller: The agent and thread.
        calls: Those that are judged.
        judge: The name of the middleware.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        limits: Limits,
        caller: Origin,
        calls: Sequence[Call],
        *,
        judge: str,
    ) -> None:
        self._state = state
        self._limits = limits
        self._caller = caller
        self._judge = judge
        self._ruling = partial(
            Ruling,
            started=time.time_ns(),
            task_id=caller.task(judge),
            trace=ledger(state).get("trace"),
        )
        self.judged = calls
        self.shared = limits.shared and any(
            each.shared for call in calls for each in limits.of(call)
        )
        """Whether a store keeps one of the counts."""

    @cached_property
    def plan(self) -> Plan:
        """What is asked."""
        return self._planned(None)

    def without_store(self, outage: Outage) -> Self:
        """The same calls, judged by what the state alone knows."""
        case = copy(self)
        case._asked = self.plan  # noqa: SLF001 - a copy of its own
        case.plan = self._planned(outage)
        case.shared = False
        return case

    @abstractmethod
    def rule(self, grant: Grant | None = None) -> Ruling:
        """What is decided.

        Args:
            grant: What was answered to the plan's reservation; `None` to judge by the state's
                counts.
        """

    @abstractmethod
    def _planned(self, outage: Outage | None) -> Plan:
        """What is asked; of what the state knows, if the store cannot be."""

    @cached_property
    def _asked(self) -> Plan:
        """What was asked of the store, whatever became of it."""
        return self.plan

    @cached_property
    def _name(self) -> str:
        """Names what is reserved."""
        return self._caller.step(self._judge)
