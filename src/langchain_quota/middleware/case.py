"""Calls that wait to be judged, from the state to what is decided and written."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
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
        # Made when first asked for. In Python 3.11 a cached_property has one lock for all cases,
        # which a fork could leave held for ever.
        self._plan: Plan | None = None
        self._asked_before: Plan | None = None
        self._step: str | None = None

    @property
    def plan(self) -> Plan:
        """What is asked."""
        if self._plan is None:
            self._plan = self._planned(None)
        return self._plan

    def without_store(self, outage: Outage) -> Self:
        """The same calls, judged by what the state alone knows."""
        case = copy(self)
        case._asked_before = self.plan  # noqa: SLF001 - a copy of its own
        case._plan = self._planned(outage)  # noqa: SLF001 - the same
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

    @property
    def _asked(self) -> Plan:
        """What was asked of the store, whatever became of it."""
        return self._asked_before or self.plan

    @property
    def _name(self) -> str:
        """Names what is reserved."""
        if self._step is None:
            self._step = self._caller.step(self._judge)
        return self._step
