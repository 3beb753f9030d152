"""A graph with a GraphQuota on one thread for a test."""

from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph

from langchain_quota import GraphQuota
from langchain_quota.limits import Limit
from tests.agent.conftest import Form
from tests.agent.rules import Scene
from tests.signals import Signals


class GraphScene(Scene):
    """A loop of model and tools in a StateGraph on one thread, and all that it did.

    Args:
        signals: The telemetry that is written to.
        script: What the model plays.
        limits: The limits.
        tools: Tools by name, which record that they ran, or tools of the test's own.
        ran: The names of the tools that ran, for tools of the test's own.
        form: Which form of the nodes runs.
        state: The graph's state.
        loop: Further arguments of `add_to`; a function gets the scene.
        compiled: Arguments of `compile`.
        **options: Further arguments of `GraphQuota`.
    """

    def __init__(
        self,
        signals: Signals,
        script: Any,
        limits: Sequence[Limit],
        *,
        tools: Sequence[str | BaseTool] = ("search", "calc"),
        ran: list[str] | None = None,
        form: Form = "async",
        state: Any = MessagesState,
        loop: dict[str, Any] | Callable[["GraphScene"], dict[str, Any]] | None = None,
        compiled: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(signals, script, [], ran=ran, form=form)
        self.limits = list(limits)
        self.quota = GraphQuota(limits, telemetry=signals.telemetry, **options)
        self.tools = [each if isinstance(each, BaseTool) else self._tool(each) for each in tools]
        self.graph = StateGraph(state)
        given = loop(self) if callable(loop) else loop or {}
        self.quota.add_to(self.graph, **{"model": self.model, "tools": self.tools, **given})
        self.agent = self.graph.compile(**{"checkpointer": InMemorySaver(), **(compiled or {})})
