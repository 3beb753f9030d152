"""LangChain's limiters with telemetry as a user would write it: a span and a count for each call.

They are a fairer peer than the bare limiters, which report nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from langchain.agents.middleware import ModelCallLimitMiddleware, ToolCallLimitMiddleware
from langchain.agents.middleware.types import hook_config
from langchain.messages import AIMessage, ToolMessage
from langgraph.config import get_config
from opentelemetry.trace import TracerProvider
from prometheus_client import CollectorRegistry, Counter


class Signals:
    """The signals of one agent's limiters."""

    def __init__(self, provider: TracerProvider) -> None:
        labels = ("agent", "kind", "tool", "decision")
        self._tracer = provider.get_tracer("by hand")
        self._calls = Counter("calls", "Calls, by decision.", labels, registry=CollectorRegistry())

    def record(self, kind: str, tool: str, decision: str, **attributes: str | int | None) -> None:
        """Record a decision about a call."""
        agent = get_config()["metadata"].get("lc_agent_name") or "unnamed"
        labels = {"agent": agent, "kind": kind, "tool": tool, "decision": decision}
        numbers = {name: value for name, value in attributes.items() if value is not None}
        self._tracer.start_span(f"limit {kind}", attributes={**labels, **numbers}).end()
        self._calls.labels(*labels.values()).inc()


class ObservedModelLimiter(ModelCallLimitMiddleware[Any, Any]):
    """LangChain's limiter of model calls, with signals."""

    def __init__(self, signals: Signals, **limits: Any) -> None:
        super().__init__(**limits)
        self._signals = signals

    @hook_config(can_jump_to=["end"])
    async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Check the call as LangChain does, and record it."""
        update = await super().abefore_model(state, runtime)
        decision = "blocked" if update else "allowed"
        used = state.get("run_model_call_count", 0) + (not update)
        self._signals.record("model", "none", decision, used=used, limit=self.run_limit)
        return update


class ObservedToolLimiter(ToolCallLimitMiddleware[Any, Any]):
    """LangChain's limiter of tool calls, with signals."""

    def __init__(self, signals: Signals, **limits: Any) -> None:
        super().__init__(**limits)
        self._signals = signals

    @hook_config(can_jump_to=["end"])
    async def aafter_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Check the calls as LangChain does, and record each of them."""
        update = await super().aafter_model(state, runtime)
        if update is not None:
            self._record(state["messages"], update)
        return update

    def _record(self, messages: Sequence[Any], update: Mapping[str, Any]) -> None:
        newest = next(message for message in reversed(messages) if isinstance(message, AIMessage))
        answers = [reply for reply in update.get("messages", ()) if isinstance(reply, ToolMessage)]
        blocked = {reply.tool_call_id for reply in answers}
        used = update["run_tool_call_count"][self.tool_name or "__all__"]
        for call in newest.tool_calls:
            if self.tool_name in (None, call["name"]):
                decision = "blocked" if call["id"] in blocked else "allowed"
                self._signals.record(
                    "tool",
                    call["name"],
                    decision,
                    used=used,
                    limit=self.run_limit,
                    call_id=call["id"],
                )
