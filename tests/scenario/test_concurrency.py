"""Many threads at once on one agent count apart, and our hooks never block the event loop.

Blocking calls are found by blockbuster, which raises where one is made on a running loop.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest
from blockbuster import BlockingError, blockbuster_ctx
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from langchain_quota import (
    Decision,
    ModelCallLimit,
    ModelCallLimitExceededError,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import Turn, captured_decisions
from tests.scene import Form, Scene, asking, both_forms, model_limiter, tool_limiter
from tests.telemetry import Signals

THREADS = 20
MOST = 3
DEADLINE = 60
"""The seconds within which all threads meet; only a failure waits so long."""


def asked_by(thread: str) -> int:
    """How many searches a thread asks for: from 1 to 5, the first alone, the rest in one batch."""
    return int(thread) % 5 + 1


def script(messages: Sequence[BaseMessage]) -> Turn:
    """What the model answers, told from the messages alone: it is shared by all threads."""
    asked = asked_by(messages[0].text)
    answered = sum(each.type == "tool" for each in messages)
    if answered == 0:
        return [("search", {"first": True})]
    return [("search", {"first": False})] * (asked - 1) if answered < asked else "done"


def meeting() -> BaseTool:
    """A tool in whose first call all threads wait for each other."""
    barrier, abarrier = threading.Barrier(THREADS, timeout=DEADLINE), asyncio.Barrier(THREADS)

    def search(*, first: bool) -> str:
        if first:
            barrier.wait()
        return "found"

    async def asearch(*, first: bool) -> str:
        if first:
            async with asyncio.timeout(DEADLINE):
                await abarrier.wait()
        return "found"

    return StructuredTool.from_function(search, asearch, name="search", description="Search.")


@both_forms
async def test_threads_at_once(
    form: Form, sqlite_saver: AsyncSqliteSaver, signals: Signals
) -> None:
    """Threads that are all in their first tool at once count apart, in state and in signals."""
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=9),
        ToolCallLimit("search", thread_limit=MOST),
    ]
    saver = sqlite_saver if form == "async" else InMemorySaver()
    scene = Scene(signals, script, limits, tools=[meeting()], checkpointer=saver, name="researcher")

    def given(thread: str) -> Any:
        return {"messages": [("user", thread)]}, {"configurable": {"thread_id": thread}}

    def play(thread: str) -> list[Decision]:
        with captured_decisions() as decisions:
            scene.agent.invoke(*given(thread))
        return decisions

    async def aplay(thread: str) -> list[Decision]:
        with captured_decisions() as decisions:
            await scene.agent.ainvoke(*given(thread))
        return decisions

    threads = [str(number) for number in range(THREADS)]
    if form == "async":
        captured = await asyncio.gather(*map(aplay, threads))
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            captured = await asyncio.to_thread(lambda: list(pool.map(play, threads)))

    for thread, decisions in zip(threads, captured, strict=True):
        searches = min(asked_by(thread), MOST)
        blocked = asked_by(thread) - searches
        assert {each.call.thread_id for each in decisions} == {thread}
        outcomes = Counter(str(each.outcome) for each in decisions if each.call.kind == "tool")
        assert outcomes == Counter(allowed=searches, blocked=blocked)
        state = (await scene.agent.aget_state({"configurable": {"thread_id": thread}})).values
        assert state["thread_tool_call_count"] == {"search": searches}
        assert state["thread_model_call_count"] == (2 if asked_by(thread) == 1 else 3)
        statuses = Counter(each.status for each in state["messages"] if each.type == "tool")
        assert statuses == Counter(success=searches, error=blocked)
        labels = {"agent": "researcher", "limit": "tool:search", "thread_id": thread}
        assert signals.value("langchain_quota_thread_used", **labels) == searches
        refused = signals.value("langchain_quota_thread_blocked_total", **labels)
        assert (refused or 0) == blocked


LIMITS: list[Limit] = [
    ToolCallLimit("search", thread_limit=9, run_limit=2, give_up_after=2),
    ToolCallLimit("search", thread_limit=9, run_limit=2, exit_behavior="end"),
    ToolCallLimit("search", thread_limit=9, run_limit=2, exit_behavior="error"),
    ModelCallLimit(thread_limit=9, run_limit=2),
    ModelCallLimit(thread_limit=9, run_limit=2, exit_behavior="error"),
    ModelCallLimit(thread_limit=9, run_limit=2, exit_behavior="finalize"),
]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda each: f"{each.kind} {each.exit_behavior}")
async def test_nothing_blocks(limit: Limit, signals: Signals) -> None:
    """Checking, refusing, counting, tracing and repairing block the event loop nowhere."""
    scene = Scene(signals, lambda messages: ["search", "calc"], [limit])

    def sleepy(_: Decision) -> str:
        time.sleep(0)
        return "no"

    limiter = tool_limiter(signals, run_limit=0, message=sleepy)
    detected = Scene(signals, [["search"], "done"], [limiter], thread_id="another")

    with blockbuster_ctx():
        for _ in range(3):
            with suppress(ToolCallLimitExceededError, ModelCallLimitExceededError):
                await scene.play()
                scene.check()
        # What blocks in our hooks would be seen.
        with pytest.raises(BlockingError, match=r"time\.sleep"):
            await detected.play()

    decisions = {(span.attributes or {})["langchain_quota.decision"] for span in signals.spans()}
    assert "blocked" in decisions or limit.exit_behavior == "finalize"
    # A BlockingError inside of telemetry would end up here.
    names = {sample.name for family in signals.registry.collect() for sample in family.samples}
    assert "langchain_quota_errors_total" not in names


@both_forms
@pytest.mark.parametrize("limiter", [tool_limiter, model_limiter])
async def test_the_callers_context_reaches_the_message(
    limiter: Any, form: Form, signals: Signals
) -> None:
    """A `message` function sees the context variables of its caller, not those of others."""
    tenant: ContextVar[str] = ContextVar("tenant")
    middleware = limiter(signals, run_limit=0, message=lambda _: f"refused for {tenant.get()}")
    options: dict[str, Any] = {"checkpointer": None, "form": form, "thread_id": None}
    scene = Scene(signals, asking("search"), [middleware], **options)

    async def call(name: str) -> str:
        tenant.set(name)
        await asyncio.sleep(0)
        return str((await scene.invoke({"messages": [("user", "hi")]}))["messages"])

    names = [f"tenant-{number}!" for number in range(10)]
    histories = await asyncio.gather(*map(call, names))

    for name, history in zip(names, histories, strict=True):
        assert f"refused for {name}" in history
