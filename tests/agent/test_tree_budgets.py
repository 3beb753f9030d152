"""Budgets over trees of agents: all that the models report is charged, once, to the token."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from itertools import count, cycle
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph

from langchain_quota import (
    CostLimit,
    GraphQuota,
    InlineQuotaMiddleware,
    MemoryStore,
    Quota,
    QuotaMiddleware,
    TokenLimit,
    usage,
    with_limits,
)
from langchain_quota.limits import Limit
from langchain_quota.model_usage import ModelUsage
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import CONFIG, check_history, recording
from tests.agent.shared import counts
from tests.signals import Signals, needs_inline

TOTAL = "model.total_tokens"
MONEY = "model.microdollars"
THREAD_KEY = f"{TOTAL}:thread:thread-1"
ASKED: Any = {"messages": [("user", "Go!")]}
EITHER = pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)
SUPERVISOR = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")


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


def asking(agent: Any, name: str) -> BaseTool:
    """A tool that asks an agent."""

    def ask() -> str:
        return str(agent.invoke(ASKED)["messages"][-1].text)

    async def aask() -> str:
        return str((await agent.ainvoke(ASKED))["messages"][-1].text)

    return StructuredTool.from_function(ask, aask, name=name, description="Ask.")


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


@both_forms
async def test_deep_agents_at_the_end(signals: Signals, form: Form) -> None:
    """With a reserve that holds, parallel sub-agents never exceed the budget of the root run."""
    deepagents = pytest.importorskip("deepagents")
    tasks = [("task", {"description": "Look.", "subagent_type": "general-purpose"})] * 6
    reported, store = Reported(), MemoryStore()

    def script(messages: Sequence[BaseMessage]) -> Turn:
        if "Look." in messages[-1].text or messages[-1].name == "search":
            return ["search"]
        return tasks if messages[-1].type == "human" else "done"

    limit = TokenLimit(quotas=[Quota(2000, per="root_run")], reserve=150)
    quota: Any = QuotaMiddleware([limit], store=store, telemetry=signals.telemetry)
    agent = with_limits(deepagents.create_deep_agent, quota)(
        reported.model("all", script, size=100),
        [recording("search", [])],
        checkpointer=InMemorySaver(),
    )

    result = await run(agent, form)

    assert of_root_runs(store) == [reported.total]
    assert 2000 - 150 < reported.total <= 2000
    answers = [each.text for each in result["messages"] if each.type == "tool"]
    assert any(each.startswith("Token limits exceeded: root_run limit") for each in answers)
    check_history(result["messages"])


@both_forms
async def test_a_swarm(signals: Signals, form: Form) -> None:
    """Agents that hand over to each other draw on one budget of the root run, and of the thread."""
    swarms = pytest.importorskip("langgraph_swarm")
    reported, store = Reported(), MemoryStore()
    quota: Any = QuotaMiddleware(roomy(), store=store, prices=seven, telemetry=signals.telemetry)

    def hands_over(to: str) -> Callable[[Sequence[BaseMessage]], Turn]:
        return lambda messages: [f"transfer_to_{to}"] if len(messages) < 8 else "done"

    agents = [
        create_agent(
            reported.model(name, hands_over(other)),
            [swarms.create_handoff_tool(agent_name=other)],
            middleware=[quota],
            name=name,
        )
        for name, other in (("alice", "bob"), ("bob", "alice"))
    ]
    graph = swarms.create_swarm(agents, default_active_agent="alice").compile(
        checkpointer=InMemorySaver()
    )

    for _ in range(2):
        await run(graph, form)

    assert len(reported.by["alice"]) > 1
    assert len(reported.by["bob"]) > 1
    check_charged(store, reported)


async def test_a_swarm_at_the_end(signals: Signals) -> None:
    """Agents that hand over for ever end when the tokens of the root run are used."""
    swarms = pytest.importorskip("langgraph_swarm")
    reported, store = Reported(), MemoryStore()
    limit = TokenLimit(quotas=[Quota(500, per="root_run")])
    quota: Any = QuotaMiddleware([limit], store=store, telemetry=signals.telemetry)

    def hands_over(to: str) -> Callable[[Sequence[BaseMessage]], Turn]:
        return lambda _: [f"transfer_to_{to}"]

    agents = [
        create_agent(
            reported.model(name, hands_over(other)),
            [swarms.create_handoff_tool(agent_name=other)],
            middleware=[quota],
            name=name,
        )
        for name, other in (("alice", "bob"), ("bob", "alice"))
    ]
    graph = swarms.create_swarm(agents, default_active_agent="alice").compile()

    result = await graph.ainvoke(ASKED, CONFIG)

    assert reported.by == {"alice": [101, 102, 103], "bob": [101, 102]}
    assert result["messages"][-1].text == ("Token limits exceeded: root_run limit (509/500 tokens)")


@SUPERVISOR
@both_forms
async def test_a_supervisor(signals: Signals, form: Form) -> None:
    """The supervisor, which has hooks alone, and its agents are charged, each call once."""
    supervisors = pytest.importorskip("langgraph_supervisor")
    reported, store = Reported(), MemoryStore()
    options: dict[str, Any] = {"store": store, "prices": seven, "telemetry": signals.telemetry}

    def search(messages: Sequence[BaseMessage]) -> Turn:
        return "done" if messages[-1].name == "search" else ["search"]

    agents = [
        create_agent(
            reported.model(name, search),
            [recording("search", [])],
            middleware=[QuotaMiddleware(roomy(), **options)],
            name=name,
        )
        for name in ("one", "two")
    ]

    turns = cycle([["transfer_to_one"], ["transfer_to_two"], "done"])
    graph = supervisors.create_supervisor(
        agents,
        model=reported.model("supervisor", lambda _: next(turns)),
        **GraphQuota(roomy(), **options).react_hooks(name="supervisor"),
    ).compile(checkpointer=InMemorySaver())

    for _ in range(2):
        await run(graph, form)

    assert {name: len(calls) for name, calls in reported.by.items()} == {
        "supervisor": 6,
        "one": 4,
        "two": 4,
    }
    check_charged(store, reported)


@both_forms
async def test_nested_budgets(signals: Signals, form: Form) -> None:
    """A parent's budget has all of the tree, and a sub-agent's own what that sub-agent has used."""
    reported, store = Reported(), MemoryStore()
    root_run = Quota(10**6, per="root_run")

    def quota(*limits: Limit) -> Any:
        return QuotaMiddleware(limits, store=store, telemetry=signals.telemetry)

    def endless(_: Sequence[BaseMessage]) -> Turn:
        return ["search"]

    own = TokenLimit(run_limit=250, quotas=[root_run, Quota(10**6, per="agent")])
    child = create_agent(
        reported.model("child", endless),
        [recording("search", [])],
        middleware=[quota(own)],
        name="child",
    )
    parent: Any = create_agent(
        reported.model("parent", once("ask", "ask")),
        [asking(child, "ask")],
        middleware=[quota(TokenLimit(quotas=[root_run, Quota(10**6, per="agent")]))],
        name="parent",
        checkpointer=InMemorySaver(),
    )

    result = await run(parent, form)

    of_child = sum(reported.by["child"])
    assert len(reported.by["child"]) == 6
    assert [each.text[:32] for each in result["messages"] if each.type == "tool"] == [
        "Token limits exceeded: run limit"
    ] * 2
    assert of_root_runs(store) == [reported.total]
    kept = counts(store)
    assert kept[f"{TOTAL}:agent:child"] == of_child
    assert kept[f"{TOTAL}:agent:parent"] == sum(reported.by["parent"])
    assert usage(parent.get_state(CONFIG)).spent == {TOTAL: sum(reported.by["parent"])}


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


@both_forms
async def test_a_graph_and_its_agents(signals: Signals, form: Form) -> None:
    """A loop that is written by hand and the agents in its tools have one budget."""
    reported, store = Reported(), MemoryStore()
    options: dict[str, Any] = {"store": store, "prices": seven, "telemetry": signals.telemetry}
    child = create_agent(
        reported.model("child", once("search")),
        [recording("search", [])],
        middleware=[QuotaMiddleware(roomy(), **options)],
        name="child",
    )
    graph = StateGraph(MessagesState)
    model = reported.model("graph", once("ask", "ask", "ask"))
    GraphQuota(roomy(), **options).add_to(graph, model=model, tools=[asking(child, "ask")])

    await run(graph.compile(checkpointer=InMemorySaver()), form)

    assert len(reported.by["child"]) == 6
    check_charged(store, reported)


async def test_many_trees_at_once(signals: Signals) -> None:
    """Each of many trees that run at once has a budget of its own, and they share the tenant's."""
    reported, store = [Reported() for _ in range(8)], MemoryStore()
    limits = [TokenLimit(quotas=[Quota(10**6, per="root_run"), Quota(10**6, per="global")])]

    def tree(one: Reported, size: int) -> Any:
        quota: Any = QuotaMiddleware(limits, store=store, telemetry=signals.telemetry)
        child = create_agent(one.model("child", lambda _: "done", size), middleware=[quota])
        tools = [asking(child, "ask")]
        model = one.model("parent", once("ask", "ask", "ask"), size)
        return create_agent(model, tools, middleware=[quota])

    trees = [tree(one, 100 * index) for index, one in enumerate(reported, 1)]
    await asyncio.gather(*(each.ainvoke(ASKED) for each in trees))

    assert of_root_runs(store) == sorted(one.total for one in reported)
    assert counts(store)[f"{TOTAL}:global:"] == sum(one.total for one in reported)
