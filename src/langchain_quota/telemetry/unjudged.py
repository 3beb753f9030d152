"""Calls that no limit judged, in runs with limits: all are counted, the first of a kind logged."""

import logging

from langchain_quota.telemetry.instruments import Instruments
from langchain_quota.telemetry.labels import agent_name

logger = logging.getLogger("langchain_quota")

_REMEDY = (
    "give the agent that makes it a QuotaMiddleware with the same store (deepagents: "
    "with_limits(create_deep_agent, quota); a supervisor: GraphQuota(…).react_hooks()). Others of "
    "this kind are only counted, in langchain_quota_unjudged_calls_total"
)

_MOST_LOGGED = 1000
"""How many kinds of calls are logged; the metric counts all."""


class UnjudgedCalls:
    """Counts and logs calls that no limit judged."""

    # They are logged and cause no `QuotaWarning`: they are found in a callback, where LangChain
    # would swallow a warning that is an error.

    def __init__(self, instruments: Instruments) -> None:
        self._metrics = instruments.metrics
        self._agents = instruments.agents
        self._failed = instruments.failures.record
        self._guard = instruments.failures.guard
        self._logged: set[tuple[str, str]] = set()

    def record(self, agent: str | None, kind: str, count: int) -> None:
        """Count an agent's calls of a kind, and log them if they are the first."""
        try:
            self._metrics.unjudged(self._agents.label(agent), kind, count)
        except Exception as error:
            self._failed("metrics", error)
            return
        with self._guard("observer"):
            known = agent_name(agent), kind
            if known not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(known)
                logger.warning(
                    "no limit judged a %s call of agent %r, and its run has limits: %s",
                    kind,
                    known[0],
                    _REMEDY,
                )
