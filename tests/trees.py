"""Agents that start agents, whose searches draw on one budget of their root run."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.types import interrupt

from langchain_quota import (
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.scene import delegate, recording
from tests.tokens import answer

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
        started: The other tools that ran.
    """

    telemetry: Telemetry
    most: int = 5
    store: Any = field(default_factory=MemoryStore)
    ran: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def quota(self) -> QuotaMiddleware[Any, Any]:
        limit = ToolCallLimit("search", quotas=[Quota(self.most, per="root_run")])
        return QuotaMiddleware([limit], store=self.store, telemetry=self.telemetry)

    def limits(self) -> list[Any]:
        """The middlewares of the next agent."""
        return [self.quota()]

    def search(self) -> BaseTool:
        return recording("search", self.ran)

    def answer(self, name: str, tools: list[str]) -> Turn:
        """What the model of an agent says that asks for tools, or is done."""
        return tools or "done"

    def agent(self, searches: int, *children: BaseTool, name: str = "", **options: Any) -> Any:
        """An agent that searches, and asks others, all at once; then it is done."""
        wanted = ["search"] * searches + [each.name for each in children]

        def script(messages: Sequence[BaseMessage]) -> Turn:
            return self.answer(name, [] if messages[-1].type == "tool" else wanted)

        return create_agent(
            ScriptedChatModel(script=script),
            [self.search(), *children],
            middleware=self.limits(),
            name=name or None,
            **options,
        )


PER_TOKEN = 7
"""What a token costs, in nanodollars."""


def price(usage: Any) -> Decimal:
    return Decimal(usage.total_tokens * PER_TOKEN) / 10**9


@dataclass
class Billed(Tree):
    """Agents of which each model says what it has used, and each has its own limits or none.

    Attributes:
        limited: How the agents are limited, in turn.
        tokens: What the models have used, by agent.
        calls: How often they were called.
        asked: The searches that they have asked for; agents in threads add to it at once.
    """

    limited: Sequence[str] = ()
    names: list[str] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    asked: list[str] = field(default_factory=list)

    def limits(self) -> list[Any]:
        kind = self.limited[len(self.names) % len(self.limited)]
        given: dict[str, Any] = {"telemetry": self.telemetry}
        if kind == "search":
            return [self.quota()]
        if kind == "meters":
            meters: list[Limit] = [CostLimit(enforce=False), TokenLimit(enforce=False)]
            return [QuotaMiddleware(meters, prices=price, charge_all_models=True, **given)]
        return [QuotaMiddleware([ModelCallLimit(run_limit=9)], **given)] if kind == "calls" else []

    def answer(self, name: str, tools: list[str]) -> Turn:
        used = 10 + len(self.names) + self.calls[name]
        self.calls[name] += 1
        self.tokens[name] += used
        self.asked.extend(tool for tool in tools if tool == "search")
        return answer(used, *tools)

    def agent(self, searches: int, *children: BaseTool, name: str = "", **options: Any) -> Any:
        self.names.append(f"{name or 'agent'}-{len(self.names)}")
        return super().agent(searches, *children, name=self.names[-1], **options)


def in_a_thread(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """What a function returns in a thread that has no context."""
    with ThreadPoolExecutor() as executor:
        return executor.submit(function, *args, **more).result()


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
        [delegate(first, "first"), delegate(tree.agent(9), "second")],
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
