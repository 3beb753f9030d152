"""Many threads at once on one agent: each has its own counts, in the state and in the signals."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from langchain_quota import Decision, ModelCallLimitMiddleware, Outcome, ToolCallLimitMiddleware
from langchain_quota.testing import ScriptedChatModel, Turn, captured_decisions

if TYPE_CHECKING:
    from tests.signals import Signals

Saver = BaseCheckpointSaver[Any]

THREADS = 20
THREAD_LIMIT = 3
DEADLINE = 120
"""Seconds after which threads that should meet are taken to have been run one by one."""


def asked_by(thread: int) -> int:
    """How many searches a thread asks for: from 1 to 5, the first alone, the rest in one batch."""
    return thread % 5 + 1


def script(messages: Sequence[BaseMessage]) -> Turn:
    """What the model answers, told from the messages alone: it is shared by all threads."""
    asked = asked_by(int(str(messages[0].content)))
    answered = sum(isinstance(each, ToolMessage) for each in messages)
    if answered == 0:
        return [("search", {"first": True})]
    if answered < asked:
        return [("search", {"first": False})] * (asked - 1)
    return "done"


def inputs(thread: int) -> dict[str, list[AnyMessage]]:
    return {"messages": [HumanMessage(str(thread))]}


def config(thread: int) -> RunnableConfig:
    return {"configurable": {"thread_id": f"thread-{thread}"}}


def agent_of(
    saver: Saver,
    signals: "Signals",
    *,
    meet: Callable[[], object] | None = None,
    ameet: Callable[[], Awaitable[object]] | None = None,
) -> Any:
    """An agent whose threads all wait for each other in their first tool call."""

    def search(*, first: bool) -> str:
        if first and meet is not None:
            meet()
        return "found"

    async def asearch(*, first: bool) -> str:
        if first and ameet is not None:
            await ameet()
        return "found"

    limiters: list[Any] = [
        ModelCallLimitMiddleware(thread_limit=9, telemetry=signals.telemetry),
        ToolCallLimitMiddleware(
            tool_name="search", thread_limit=THREAD_LIMIT, telemetry=signals.telemetry
        ),
    ]
    return create_agent(
        ScriptedChatModel(script=script),
        [StructuredTool.from_function(search, asearch, name="search", description="Search.")],
        middleware=limiters,
        checkpointer=saver,
        name="researcher",
    )


async def check(agent: Any, signals: "Signals", threads: int) -> None:
    """Assert the counts of every thread: in its state, its history, its series and the totals."""
    ran = refused = models = 0
    for thread in range(threads):
        searches = min(asked_by(thread), THREAD_LIMIT)
        blocked = asked_by(thread) - searches
        requests = 2 if asked_by(thread) == 1 else 3
        state = (await agent.aget_state(config(thread))).values
        assert state["thread_tool_call_count"] == {"search": searches}
        assert state["thread_model_call_count"] == requests
        statuses = Counter(
            each.status for each in state["messages"] if isinstance(each, ToolMessage)
        )
        assert (statuses["success"], statuses["error"]) == (searches, blocked)
        assert sum(isinstance(each, AIMessage) for each in state["messages"]) == requests
        series = {"agent": "researcher", "thread_id": f"thread-{thread}"}
        for limit, used, kept_out in (("tool:search", searches, blocked), ("model", requests, 0)):
            labels = {**series, "limit": limit}
            assert signals.value("langchain_quota_thread_used", **labels) == used
            assert (
                signals.value("langchain_quota_thread_blocked_total", **labels) or 0
            ) == kept_out
        ran, refused, models = ran + searches, refused + blocked, models + requests
    tool_calls = {"agent": "researcher", "kind": "tool", "tool": "search"}
    name = "langchain_quota_calls_total"
    assert signals.value(name, **tool_calls, decision="allowed") == ran
    assert signals.value(name, **tool_calls, decision="blocked") == refused
    model_calls = {"agent": "researcher", "kind": "model", "tool": "none"}
    assert signals.value(name, **model_calls, decision="allowed") == models


async def test_gathered_threads(sqlite_saver: AsyncSqliteSaver, signals: "Signals") -> None:
    """20 threads under `asyncio.gather`, all in their first tool at once, count apart."""
    barrier = asyncio.Barrier(THREADS)
    agent = agent_of(sqlite_saver, signals, ameet=barrier.wait)
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(
            *(agent.ainvoke(inputs(thread), config(thread)) for thread in range(THREADS))
        )
    await check(agent, signals, THREADS)


async def test_batched_threads(signals: "Signals") -> None:
    """The threads of one `abatch`, all in their first tool at once, count apart."""
    barrier = asyncio.Barrier(5)
    agent = agent_of(InMemorySaver(), signals, ameet=barrier.wait)
    async with asyncio.timeout(DEADLINE):
        await agent.abatch(
            [inputs(thread) for thread in range(5)], [config(thread) for thread in range(5)]
        )
    await check(agent, signals, 5)


async def test_pooled_threads(signals: "Signals") -> None:
    """20 threads under `invoke` in a thread pool, all in their first tool at once, count apart."""
    barrier = threading.Barrier(THREADS, timeout=DEADLINE)
    agent = agent_of(InMemorySaver(), signals, meet=barrier.wait)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(THREADS) as pool:
        await asyncio.gather(
            *(
                loop.run_in_executor(pool, agent.invoke, inputs(thread), config(thread))
                for thread in range(THREADS)
            )
        )
    await check(agent, signals, THREADS)


async def test_captured_decisions_stay_apart(signals: "Signals") -> None:
    """`captured_decisions` in one task does not see what another task's agent decides."""
    barrier = asyncio.Barrier(10)
    agent = agent_of(InMemorySaver(), signals, ameet=barrier.wait)

    async def run(thread: int) -> list[Decision]:
        with captured_decisions() as decisions:
            await agent.ainvoke(inputs(thread), config(thread))
        return decisions

    async with asyncio.timeout(DEADLINE):
        captured = await asyncio.gather(*(run(thread) for thread in range(10)))
    for thread, decisions in enumerate(captured):
        assert {each.call.thread_id for each in decisions} == {f"thread-{thread}"}
        outcomes = Counter(each.outcome for each in decisions if each.call.kind == "tool")
        allowed = min(asked_by(thread), THREAD_LIMIT)
        assert outcomes[Outcome.ALLOWED] == allowed
        assert outcomes[Outcome.BLOCKED] == asked_by(thread) - allowed
