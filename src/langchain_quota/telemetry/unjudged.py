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
    """Counts and logs calls that no limit judged.

    They are logged and cause no `QuotaWarning`: they are found in a callback, where LangChain would
    swallow a warning that is an error.
    """

    def __init__(self, instruments: Instruments) -> None:
        self._metrics = instruments.metrics
        self._agents = instruments.agents
        self._tools = instruments.tools
        self._failed = instruments.failures.record
        self._logged: set[tuple[str, str, str]] = set()

    def record(self, agent: str | None, kind: str, tool: str | None, nodes: str) -> None:
        """Count a call, and log it if it is the first of its kind.

        Args:
            agent: The name of the agent in which it ran, if it has one.
            kind: `"model"` or `"tool"`.
            tool: The tool; `None` for a model call.
            nodes: The nodes in which it ran, from the outermost in; empty outside of a graph.
        """
        try:
            name = self._agents.label(agent)
            shown = self._tools.label(name, tool)
            self._metrics.unjudged(name, kind, shown)
        except Exception as error:
            self._failed("metrics", error)
            return
        try:
            self._log(agent_name(agent), kind, shown, nodes)
        except Exception as error:
            self._failed("observer", error)

    def _log(self, agent: str, kind: str, tool: str, nodes: str) -> None:
        known = (agent, kind, nodes if kind == "model" else tool)
        if known in self._logged or len(self._logged) >= _MOST_LOGGED:
            return
        self._logged.add(known)
        logger.warning(
            "no limit judged a %s of agent %r (%s), and its run has limits: %s",
            "model call" if kind == "model" else f"call of tool {tool!r}",
            agent,
            f"node {nodes!r}" if nodes else "outside of a graph",
            _REMEDY,
        )
