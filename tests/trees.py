"""Agents that start agents, whose searches draw on one budget of their root run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.types import interrupt

from langchain_quota import MemoryStore, Quota, QuotaMiddleware, Telemetry, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.scene import recording

LOST = "langchain_quota_errors_total"
ASKED = {"messages": [("user", "Find it!")]}


def config(thread: object = "7") -> Any:
    return {"configurable": {"thread_id": thread}}


@dataclass
class Tree:
    """Agents whose searches draw on one budget of their root run.

    Attributes:
        most: The budget.
        store: Where it is counted.
        ran: The searches that ran.
    """

    telemetry: Telemetry
    most: int = 5
    store: Any = field(default_factory=MemoryStore)
    ran: list[str] = field(default_factory=list)

    def quota(self) -> QuotaMiddleware[Any, Any]:
        limit = ToolCallLimit("search", quotas=[Quota(self.most, per="root_run")])
        return QuotaMiddleware([limit], store=self.store, telemetry=self.telemetry)

    def search(self) -> BaseTool:
        return recording("search", self.ran)

    def agent(self, searches: int, *children: BaseTool, name: str = "", **options: Any) -> Any:
        """An agent that searches, and asks others, all at once; then it is done."""

        def script(messages: Sequence[BaseMessage]) -> Turn:
            if messages[-1].type == "tool":
                return "done"
            return ["search"] * searches + [each.name for each in children]

        return create_agent(
            ScriptedChatModel(script=script),
            [self.search(), *children],
            middleware=[self.quota()],
            name=name or None,
            **options,
        )


def ask(agent: Any, name: str = "delegate", **given: Any) -> BaseTool:
    """A tool that asks an agent."""

    def delegate() -> str:
        return str(agent.invoke(ASKED, **given)["messages"][-1].content)

    async def adelegate() -> str:
        return str((await agent.ainvoke(ASKED, **given))["messages"][-1].content)

    return StructuredTool.from_function(delegate, adelegate, name=name, description="Ask.")


def human() -> str:
    """Ask somebody."""
    return f"human: {interrupt('May I?')}"


def one_by_one(*tools: str) -> Callable[[Sequence[BaseMessage]], Turn]:
    """A script that calls one tool after the other in each run."""

    def script(messages: Sequence[BaseMessage]) -> Turn:
        steps = [each.type for each in reversed(messages)].index("human") // 2
        return [tools[steps]] if steps < len(tools) else "done"

    return script


def inside(tree: Tree, saver: BaseCheckpointSaver[Any]) -> Any:
    """An agent whose sub-agent searches, asks a human, and is followed by another sub-agent."""
    asks = StructuredTool.from_function(human, name="human", description="Ask somebody.")

    first = create_agent(
        ScriptedChatModel(script=one_by_one("search", "human")),
        [tree.search(), asks],
        middleware=[tree.quota()],
    )
    return create_agent(
        ScriptedChatModel(script=one_by_one("first", "second")),
        [ask(first, "first"), ask(tree.agent(9), "second")],
        middleware=[tree.quota()],
        checkpointer=saver,
    )


def in_one_tool(tree: Tree, saver: BaseCheckpointSaver[Any]) -> Any:
    """An agent whose tool asks a human, and only then a sub-agent on a thread of its own."""

    async def late() -> str:
        human()
        await tree.agent(9).ainvoke(ASKED, config("late"))
        return "done"

    tool = StructuredTool.from_function(coroutine=late, name="late", description="Ask.")
    return tree.agent(2, tool, checkpointer=saver)
