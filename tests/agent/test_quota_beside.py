"""QuotaMiddleware beside other limiters and other middlewares, and hooks that run again."""

import asyncio
from importlib.metadata import version
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    hook_config,
)
from langchain_core.messages import ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph

from langchain_quota import (
    Decision,
    ModelCallLimit,
    Outcome,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import CONFIG, Scene, model_limiter, tool_limiter
from tests.signals import Signals


class OtherQuota(QuotaMiddleware[Any, Any]):
    """A second one, which LangChain tells apart by its class."""


@orders(2)
@pytest.mark.parametrize("second", ["quota", "drop-in"])
async def test_two_that_count_the_model(order: Order, second: str, signals: Signals) -> None:
    """Two middlewares that would charge each model call twice: an error that says what to do."""
    quota = QuotaMiddleware([ModelCallLimit(run_limit=4)], telemetry=signals.telemetry)
    other: Any = (
        OtherQuota([ModelCallLimit(run_limit=4, name="other")], telemetry=signals.telemetry)
        if second == "quota"
        else model_limiter(signals, run_limit=4)
    )
    scene = Scene(signals, ["done"], in_order(order, quota, other))
    with pytest.raises(RuntimeError, match="all model limits into one QuotaMiddleware"):
        await scene.turn()


@orders(2)
@pytest.mark.parametrize("second", ["quota", "drop-in"])
async def test_model_limits_in_one_of_two(order: Order, second: str, signals: Signals) -> None:
    """Tool limits here and model limits there: each call counts once."""
    tools = QuotaMiddleware([ToolCallLimit("search", run_limit=9)], telemetry=signals.telemetry)
    models: Any = (
        OtherQuota([ModelCallLimit(run_limit=3)], telemetry=signals.telemetry)
        if second == "quota"
        else model_limiter(signals, run_limit=3)
    )
    scene = Scene(signals, [["search"]] * 4, in_order(order, tools, models))

    await scene.turn()

    assert (len(scene.model.calls), scene.ran) == (3, ["search"] * 3)
    scene.check()


@orders(3)
async def test_tool_limits_in_all_of_three(order: Order, signals: Signals) -> None:
    """Tool limits in a quota and in drop-ins: a refused call is charged to none of them."""
    scene = Scene(
        signals,
        [["search", "search", "calc"], ["calc", "search"], "done"],
        in_order(
            order,
            QuotaMiddleware(
                [ToolCallLimit("search", run_limit=1, name="quota")], telemetry=signals.telemetry
            ),
            tool_limiter(signals, run_limit=2),
            tool_limiter(signals, "calc", thread_limit=1, limit_name="calc"),
        ),
    )

    await scene.turn()

    assert len(scene.ran) == 2
    scene.check()


@orders(3)
async def test_tool_limits_beside_model_limits_only(order: Order, signals: Signals) -> None:
    """A quota without tool limits changes no count and no refund of the limiters beside it.

    Calls that one drop-in refuses are given back by the other, and one that a person was asked
    about, and that the next turn leaves behind.
    """
    quota = QuotaMiddleware([ModelCallLimit(run_limit=9)], telemetry=signals.telemetry)
    scene = Scene(
        signals,
        [["search", "search", "calc"], ["search"], "done", ["calc"], "done"],
        [
            tool_limiter(signals, run_limit=9),
            HumanInTheLoopMiddleware({"calc": True}),
            *in_order(
                order,
                quota,
                tool_limiter(signals, "search", run_limit=1, limit_name="one"),
                tool_limiter(signals, "search", thread_limit=9, limit_name="nine"),
            ),
            tool_limiter(signals, "calc", thread_limit=9),
        ],
    )

    await scene.turn()
    await scene.resume({"decisions": [{"type": "approve"}]})
    assert sorted(scene.ran) == ["calc", "search"]
    scene.check()
    await scene.turn()
    await scene.turn("never mind")

    assert sorted(scene.ran) == ["calc", "search"]
    assert scene.metric("tool:calc", "refunded") == 1
    scene.check()


async def test_a_turn_after_a_failed_one(signals: Signals) -> None:
    """A provider that fails before it answers does not make the next turn look like the same."""
    quota = QuotaMiddleware([ModelCallLimit(thread_limit=3)], telemetry=signals.telemetry)
    scene = Scene(signals, [ConnectionError()] * 3, [quota])

    for _ in range(3):
        with pytest.raises(ConnectionError):
            await scene.turn()
    await scene.turn()

    assert len(scene.model.calls) == 3
    assert scene.state()["langchain_quota"]["begun_by"] == ["QuotaMiddleware"]
    assert scene.state()["thread_model_call_count"] == 3


async def test_one_id_for_two_tools(signals: Signals) -> None:
    """Calls of two tools with one id: one is refused, so neither runs, and there is one answer."""
    quota = QuotaMiddleware([ToolCallLimit("search", run_limit=0)], telemetry=signals.telemetry)
    batch: Any = [
        {"name": name, "args": {}, "id": "x", "type": "tool_call"} for name in ("search", "calc")
    ]
    scene = Scene(signals, [batch, "done"], [quota])

    with captured_decisions() as decisions:
        await scene.turn()

    tools = [each for each in decisions if each.call.kind == "tool"]
    assert [each.outcome for each in tools] == [Outcome.BLOCKED, Outcome.BLOCKED]
    assert scene.ran == []
    answers = [each for each in scene.state()["messages"] if isinstance(each, ToolMessage)]
    assert [each.tool_call_id for each in answers] == ["x"]


async def test_another_decision_on_resume(signals: Signals) -> None:
    """A refused run goes on under a larger plan: what it does now is counted and logged."""
    plan = {"searches": 1}

    def searches(state: Any, runtime: Any) -> int:
        return plan["searches"]

    seen: list[Decision] = []
    quota = QuotaMiddleware(
        [
            ToolCallLimit(
                "search",
                thread_limit=lambda state, runtime: plan["searches"],
                exit_behavior="error",
            )
        ],
        on_decision=seen.append,
        telemetry=signals.telemetry,
    )
    scene = Scene(signals, [["search"], ["search"], "done"], [quota])
    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()

    plan["searches"] = 5
    await scene.go_on()

    assert scene.ran == ["search", "search"]
    assert scene.metric("tool:search", "allowed") == 2
    tools = [each.outcome for each in seen if each.call.kind == "tool"]
    assert tools == [Outcome.ALLOWED, Outcome.BLOCKED, Outcome.ALLOWED]


async def test_observers_of_a_cancelled_hook(signals: Signals) -> None:
    """A run cancelled while an observer waits, and resumed: the observer misses no decision."""
    waiting = asyncio.Event()
    finished: list[str | None] = []
    patient = False

    async def bill(decision: Decision) -> None:
        if decision.call.tool == "calc" and not patient:
            waiting.set()
            await asyncio.Event().wait()
        finished.append(decision.call.tool)

    quota = QuotaMiddleware(
        [ToolCallLimit(run_limit=9)], on_decision=bill, telemetry=signals.telemetry
    )
    scene = Scene(signals, [["search", "calc"], "done"], [quota])
    task = asyncio.ensure_future(scene.turn())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    patient = True
    await scene.go_on()

    assert finished == [None, "search", "calc", None]
    assert scene.metric("tool:*", "allowed") == 2


class StraightToTools(AgentMiddleware[Any, Any]):
    """Jumps over the other hooks, to the tools."""

    @hook_config(can_jump_to=["tools"])
    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        newest = state["messages"][-1]
        return {"jump_to": "tools"} if newest.type == "ai" and newest.tool_calls else None


@pytest.mark.parametrize(("quota_first", "ran"), [(True, 3), (False, 1)])
async def test_a_jump_to_the_tools(*, quota_first: bool, ran: int, signals: Signals) -> None:
    """A middleware that jumps to the tools before the quota judges takes its calls past it."""
    quota = QuotaMiddleware([ToolCallLimit("search", run_limit=1)], telemetry=signals.telemetry)
    jump = StraightToTools()
    scene = Scene(
        signals,
        [["search"], ["search"], ["search"], "done"],
        [quota, jump] if quota_first else [jump, quota],
    )
    await scene.turn()
    assert len(scene.ran) == ran


async def test_an_agent_as_a_node(signals: Signals) -> None:
    """A named agent that is a node of a graph has thread series from its first call on."""
    quota = QuotaMiddleware([ModelCallLimit(thread_limit=5)], telemetry=signals.telemetry)
    agent: Any = create_agent(ScriptedChatModel(script=["done"]), name="node", middleware=[quota])
    graph = StateGraph(MessagesState)
    graph.add_node("node", agent)
    graph.add_edge(START, "node")
    graph.add_edge("node", END)
    compiled: Any = graph.compile(checkpointer=InMemorySaver())
    given = {"messages": [("user", "hi")]}

    with pytest.warns(match="does not outlive the run"):
        await compiled.ainvoke(given, CONFIG)

    # Before 1.2, LangGraph does not give the hooks of a node that is an agent its name.
    agent_label = (
        "node" if tuple(map(int, version("langgraph").split(".")[:2])) >= (1, 2) else "unnamed"
    )
    thread = CONFIG["configurable"]["thread_id"]
    labels = {"agent": agent_label, "limit": "model", "thread_id": thread}
    assert signals.value("langchain_quota_thread_used", **labels) == 1
