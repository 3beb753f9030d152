"""Checks of the tools that an agent offers: code and sub-agents that no limit would see."""

from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakSet

from langchain_quota.features.deep_agents.interpreters import unseen_calls
from langchain_quota.features.deep_agents.sub_agents import starters, unlimited_sub_agents
from langchain_quota.middleware.feature import Feature
from langchain_quota.telemetry.labels import UNNAMED


class DeepAgents(Feature):
    """Refuses code that can call a limited tool, and warns of sub-agents without limits."""

    @classmethod
    def of(cls, limiter: Any) -> "DeepAgents":
        """The feature, which every middleware needs."""
        return cls(limiter)

    def __init__(self, limiter: Any) -> None:
        self._limits = limiter.limits
        self._enforced = [limit for limit in limiter.limits if limit.enforce]
        self._made_at = limiter._made_at  # noqa: SLF001 - the kernel gives it
        # The functions that start sub-agents and that have been checked already.
        self._checked: WeakSet[FunctionType] = WeakSet()

    def checked(self, starts: Iterable[FunctionType]) -> None:
        """Note that all sub-agents that functions start have limits, or are left out on purpose."""
        self._checked.update(starts)

    def unseen(self, tools: Sequence[Any]) -> str | None:
        """Says which limit code would go past; `None` for none."""
        return unseen_calls(self._enforced, tools)

    def learn(self, agent: str | None, tools: Sequence[Any]) -> None:
        """Refuse to run an agent whose code can call a limited tool; warn of the rest once."""
        for start in starters(tools):
            if start in self._checked:
                continue
            self._checked.add(start)
            unlimited = ", ".join(map(repr, unlimited_sub_agents(start)))
            if unlimited:
                self._made_at.warn(
                    f"the sub-agents that the tool 'task' of agent {agent or UNNAMED!r} starts "
                    f"have no limits of langchain-quota: {unlimited}. Give them their parent's "
                    "limits: with_limits(create_deep_agent, quota)(…)"
                )
        unseen = self.unseen(tools)
        if unseen is not None:
            raise RuntimeError(unseen)
        on_trial = unseen_calls(self._limits, tools)
        if on_trial is not None:
            self._made_at.warn(on_trial)
