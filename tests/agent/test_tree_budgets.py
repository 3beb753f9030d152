"""Budgets over trees of agents: all that the models report is charged, once, to the token."""

from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from itertools import count
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, BaseMessage
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    CostLimit,
    InlineQuotaMiddleware,
    MemoryStore,
    Quota,
    QuotaMiddleware,
    TokenLimit,
    with_limits,
)
from langchain_quota.limits import Limit
from langchain_quota.model_usage import ModelUsage
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.scene import CONFIG, Form, both_forms, recording
from tests.signals import Signals, needs_inline
from tests.stores import counts

TOTAL = "model.total_tokens"
MONEY = "model.microdollars"
THREAD_KEY = f"{TOTAL}:thread:thread-1"
ASKED: Any = {"messages": [("user", "Go!")]}
EITHER = pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)


class Reported:
    """What models have reported, in the order of their calls.

    Attributes:
        by: The tokens of each call, by who was called.
    """

    def __init__(self) -> None:
        self.by: dict[str, list[int]] = {}
        self._ids = count(1)

    @property
    def total(self) -> int:
        return sum(map(sum, self.by.values()))

    def model(
        self, name: str, script: Callable[[Sequence[BaseMessage]], Turn], size: int = 101
    ) -> ScriptedChatModel:
        """A model whose calls use one token more each time."""

        def play(messages: Sequence[BaseMessage]) -> AIMessage:
            turn: Any = script(messages)
            calls = self.by.setdefault(name, [])
            calls.append(size + len(calls))
            used: Any = {
                "input_tokens": calls[-1] - 1,
                "output_tokens": 1,
                "total_tokens": calls[-1],
            }
            if isinstance(turn, str):
                return AIMessage(turn, usage_metadata=used)
            asked = [each if isinstance(each, tuple) else (each, {}) for each in turn]
            tool_calls = [
                {"name": tool, "args": args, "id": f"call-{next(self._ids)}"}
                for tool, args in asked
            ]
            return AIMessage("", tool_calls=tool_calls, usage_metadata=used)

        return ScriptedChatModel(script=play)


def once(*tools: Any) -> Callable[[Sequence[BaseMessage]], Turn]:
    """A script that calls these tools, and then is done."""

    def script(messages: Sequence[BaseMessage]) -> Turn:
        return list(tools) if messages[-1].type == "human" else "done"

    return script


def seven(used: ModelUsage) -> Decimal:
    """Seven microdollars a token."""
    return Decimal(7 * used.total_tokens) / 10**6


def of_root_runs(store: MemoryStore, counter: str = TOTAL) -> list[int]:
    return sorted(each.used for each in store.usages(f"{counter}:root_run:*"))


async def run(agent: Any, form: Form) -> Any:
    if form == "sync":
        return agent.invoke(ASKED, CONFIG)
    return await agent.ainvoke(ASKED, CONFIG)


def roomy(**options: Any) -> list[Limit]:
    """Budgets that no test uses up."""
    per_root_run = Quota(10**6, per="root_run")
    return [
        TokenLimit(run_limit=10**6, thread_limit=10**6, quotas=[per_root_run], **options),
        CostLimit(thread_limit=1000, quotas=[Quota(1000, per="root_run")]),
    ]


def check_charged(store: MemoryStore, reported: Reported) -> None:
    """Assert that the thread and its root runs are charged exactly what was reported."""
    assert counts(store)[THREAD_KEY] == reported.total
    assert sum(of_root_runs(store)) == reported.total
    assert counts(store)[f"{MONEY}:thread:thread-1"] == 7 * reported.total
    assert sum(of_root_runs(store, MONEY)) == 7 * reported.total


@pytest.mark.filterwarnings("ignore:The feature `forked subagents` is in beta")
@both_forms
@EITHER
async def test_deep_agents(signals: Signals, kind: Any, form: Form) -> None:
    """Of a deep agent and its parallel sub-agents all calls are charged, to thread and root run."""
    deepagents = pytest.importorskip("deepagents")
    names = ("general-purpose", "researcher", "fork", "researcher")
    tasks = [("task", {"description": "Look.", "subagent_type": name}) for name in names]
    reported, store = Reported(), MemoryStore()

    def script(messages: Sequence[BaseMessage]) -> Turn:
        if messages[-1].type != "human":
            return "done"
        return ["search"] if "Look." in messages[-1].text else ["search", *tasks]

    quota = kind(roomy(), store=store, prices=seven, telemetry=signals.telemetry)
    agent = with_limits(deepagents.create_deep_agent, quota)(
        reported.model("all", script),
        [recording("search", [])],
        subagents=[
            {"name": "researcher", "description": "Searches.", "system_prompt": "Search."},
            {"name": "fork", "description": "Goes on.", "mode": "fork"},
        ],
        checkpointer=InMemorySaver(),
    )

    for _ in range(2):
        await run(agent, form)

    assert len(reported.by["all"]) == 2 * (2 + 2 * len(names))
    check_charged(store, reported)
    assert len(of_root_runs(store)) == 2


class Asks(AgentMiddleware[Any, Any, Any]):
    """Asks an agent within each model call."""

    def __init__(self, agent: Any) -> None:
        super().__init__()
        self.agent = agent

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        self.agent.invoke(ASKED)
        return handler(request)

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        await self.agent.ainvoke(ASKED)
        return await handler(request)


@both_forms
async def test_an_agent_within_a_model_call(signals: Signals, form: Form) -> None:
    """What an agent uses within a call of another one is charged once to each budget they have."""
    reported, store = Reported(), MemoryStore()
    root_run = Quota(10**6, per="root_run")

    def quota() -> Any:
        limit = TokenLimit(quotas=[root_run, Quota(10**6, per="agent")])
        return QuotaMiddleware([limit], store=store, telemetry=signals.telemetry)

    child = create_agent(
        reported.model("child", lambda _: "done"), middleware=[quota()], name="child"
    )
    parent = create_agent(
        reported.model("parent", once("search")),
        [recording("search", [])],
        middleware=[quota(), Asks(child)],
        name="parent",
    )

    await run(parent, form)

    assert of_root_runs(store) == [reported.total]
    kept = counts(store)
    assert kept[f"{TOTAL}:agent:child"] == sum(reported.by["child"])
    assert kept[f"{TOTAL}:agent:parent"] == reported.total
