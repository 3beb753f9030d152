"""The event loop: never blocked by us, its context kept, and a cancelled run leaves a thread whole.

Blocking calls are found by blockbuster, which raises where one is made on a running loop.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest
from blockbuster import BlockBuster, BlockingError, blockbuster_ctx
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import StructuredTool, tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from langchain_quota import (
    Decision,
    ModelCallLimitExceededError,
    ModelCallLimitMiddleware,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
)
from langchain_quota.messages import ABANDONED
from langchain_quota.testing import ScriptedChatModel
from tests.agent.rules import model_limiter, tool_limiter

if TYPE_CHECKING:
    from tests.signals import Signals

Saver = BaseCheckpointSaver[Any]

THREAD: RunnableConfig = {"configurable": {"thread_id": "thread-1"}}
DEADLINE = 60
"""Seconds after which a tool that should have started is taken to be lost."""


@pytest.fixture
def no_blocking() -> Iterator[BlockBuster]:
    """Any blocking call on the event loop raises `BlockingError`, whoever makes it."""
    with blockbuster_ctx() as detector:
        yield detector


@pytest.fixture(params=["memory", "sqlite"])
def saver(request: pytest.FixtureRequest, sqlite_saver: AsyncSqliteSaver) -> Saver:
    """Each of the two checkpointers."""
    return sqlite_saver if request.param == "sqlite" else InMemorySaver()


def inputs(text: str = "hi") -> dict[str, list[AnyMessage]]:
    """A new message each time: LangGraph gives it an id, by which a second one would replace it."""
    return {"messages": [HumanMessage(text)]}


@tool
async def search(query: str = "") -> str:
    """Search."""
    return "found"


@tool
async def calc(term: str = "") -> str:
    """Calculate."""
    return "4"


def agent_of(script: Any, *limiters: Any, saver: Saver | None = None, tools: Any = None) -> Any:
    return create_agent(
        ScriptedChatModel(script=script),
        tools or [search, calc],
        middleware=limiters,
        checkpointer=saver,
        name="researcher",
    )


@pytest.mark.usefixtures("no_blocking")
async def test_detector_sees_a_blocking_tool() -> None:
    """The detector works: a tool that sleeps on the event loop is caught."""

    async def sleep() -> str:
        time.sleep(0)  # noqa: ASYNC251 - the blocking call that is to be found
        return "slept"

    sleeper = StructuredTool.from_function(coroutine=sleep, name="sleep", description="Sleep.")
    with pytest.raises(BlockingError, match=r"time\.sleep"):
        await agent_of([["sleep"], "done"], tools=[sleeper]).ainvoke(inputs())


@pytest.mark.usefixtures("no_blocking")
@pytest.mark.parametrize("kind", ["tool", "model"])
async def test_detector_sees_into_the_hooks(kind: str, signals: "Signals") -> None:
    """The detector works in our hooks: a `message` function that sleeps is caught."""

    def sleepy(_: Decision) -> str:
        time.sleep(0)
        return "no"

    limiter: Any = (
        tool_limiter(signals, run_limit=0, message=sleepy)
        if kind == "tool"
        else model_limiter(signals, run_limit=0, message=sleepy)
    )
    with pytest.raises(BlockingError, match=r"time\.sleep"):
        await agent_of([["search"], "done"], limiter).ainvoke(inputs())


@pytest.mark.usefixtures("no_blocking")
@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
@pytest.mark.parametrize("form", ["ainvoke", "astream"])
async def test_tool_limits_do_not_block(form: str, exit_behavior: Any, signals: "Signals") -> None:
    """Judging, refusing, counting and tracing tool calls blocks the event loop nowhere."""
    agent = agent_of(
        [["search", "calc"], ["search", "search", "calc"], "done"],
        tool_limiter(signals, "search", thread_limit=9, run_limit=2, exit_behavior=exit_behavior),
        tool_limiter(signals, run_limit=9),
        saver=InMemorySaver(),
    )
    try:
        await finish(agent, form)
    except ToolCallLimitExceededError:
        assert exit_behavior == "error"
    check_refused(signals, "tool", "search")


@pytest.mark.usefixtures("no_blocking")
@pytest.mark.parametrize("exit_behavior", ["end", "error"])
@pytest.mark.parametrize("form", ["ainvoke", "astream"])
async def test_model_limits_do_not_block(form: str, exit_behavior: Any, signals: "Signals") -> None:
    """Judging, refusing, counting and tracing model calls blocks the event loop nowhere."""
    agent = agent_of(
        [["search"], "never"],
        model_limiter(signals, thread_limit=9, run_limit=1, exit_behavior=exit_behavior),
        saver=InMemorySaver(),
    )
    try:
        await finish(agent, form)
    except ModelCallLimitExceededError:
        assert exit_behavior == "error"
    check_refused(signals, "model", "none")


async def finish(agent: Any, form: str) -> None:
    if form == "astream":
        async for _ in agent.astream(inputs(), THREAD):
            pass
    else:
        await agent.ainvoke(inputs(), THREAD)


def check_refused(signals: "Signals", kind: str, tool_name: str) -> None:
    """Assert that a call was refused, seen in all signals, and that telemetry failed nowhere."""
    labels = {"agent": "researcher", "kind": kind, "tool": tool_name, "decision": "blocked"}
    assert signals.value("langchain_quota_calls_total", **labels) == 1
    decisions = [(span.attributes or {})["langchain_quota.decision"] for span in signals.spans()]
    assert "blocked" in decisions
    # A BlockingError inside of telemetry would end up here.
    failures = [
        sample
        for family in signals.registry.collect()
        for sample in family.samples
        if sample.name == "langchain_quota_errors_total"
    ]
    assert failures == []


@pytest.mark.usefixtures("no_blocking")
async def test_repair_does_not_block(signals: "Signals") -> None:
    """The turn after an `error`, which repairs the history, blocks the event loop nowhere."""
    limiter = tool_limiter(signals, run_limit=1, exit_behavior="error")
    agent = agent_of([["search", "search"], "done"], limiter, saver=InMemorySaver())
    with pytest.raises(ToolCallLimitExceededError):
        await agent.ainvoke(inputs(), THREAD)
    result = await agent.ainvoke(inputs(), THREAD)
    assert sum(isinstance(each, ToolMessage) for each in result["messages"]) == 2
    assert result["messages"][-1].content == "done"


tenant: ContextVar[str] = ContextVar("tenant")


def for_tenant(_: Decision) -> str:
    return f"refused for {tenant.get()}"


LIMITERS: dict[str, Callable[..., Any]] = {
    "tool continue": ToolCallLimitMiddleware,
    "tool end": ToolCallLimitMiddleware,
    "model": ModelCallLimitMiddleware,
}


@pytest.mark.parametrize("kind", ["tool continue", "tool end", "model"])
@pytest.mark.parametrize("form", ["ainvoke", "astream", "invoke"])
async def test_callers_context_reaches_the_message(
    form: str, kind: str, signals: "Signals"
) -> None:
    """A context variable that the caller has set is visible in a `message` function."""
    options: dict[str, Any] = {"exit_behavior": "end"} if kind == "tool end" else {}
    limiter = LIMITERS[kind](
        run_limit=0, message=for_tenant, telemetry=signals.telemetry, **options
    )
    # A sync tool, for `invoke`; it is never run.
    offered = StructuredTool.from_function(lambda: "found", name="search", description="Search.")
    agent = agent_of([["search"], "done"], limiter, saver=InMemorySaver(), tools=[offered])
    token = tenant.set("acme")
    try:
        if form == "invoke":
            agent.invoke(inputs(), THREAD)
        else:
            await finish(agent, form)
    finally:
        tenant.reset(token)
    messages = agent.get_state(THREAD).values["messages"]
    assert "refused for acme" in [each.content for each in messages]


async def test_concurrent_callers_contexts_stay_apart(signals: "Signals") -> None:
    """Each of 20 concurrent callers has its own context in the `message` function."""
    limiter = model_limiter(signals, run_limit=0, message=for_tenant)
    agent = agent_of([], limiter)

    async def call(name: str) -> str:
        tenant.set(name)
        await asyncio.sleep(0)
        result = await agent.ainvoke(inputs())
        return str(result["messages"][-1].content)

    names = [f"tenant-{number}" for number in range(20)]
    texts = await asyncio.gather(*(call(name) for name in names))
    assert texts == [f"refused for {name}" for name in names]


async def test_cancelled_in_mid_tool(saver: Saver, signals: "Signals") -> None:
    """A run cancelled in mid-tool leaves a readable state; the next turn answers the call."""
    started = asyncio.Event()

    async def wait() -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    waiting = StructuredTool.from_function(coroutine=wait, name="wait", description="Wait.")
    model = ScriptedChatModel(script=[["wait"], ["calc"], "done"])
    limiters: list[Any] = [
        model_limiter(signals, thread_limit=9),
        tool_limiter(signals, thread_limit=2, run_limit=1),
    ]
    agent: Any = create_agent(
        model, [waiting, calc], middleware=limiters, checkpointer=saver, name="researcher"
    )
    running = asyncio.create_task(agent.ainvoke(inputs(), THREAD))
    async with asyncio.timeout(DEADLINE):
        await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    state = (await agent.aget_state(THREAD)).values
    assert [type(each) for each in state["messages"]] == [HumanMessage, AIMessage]
    assert state["thread_model_call_count"] == 1
    # The tool had started, so its call stays charged.
    assert state["thread_tool_call_count"] == {"__all__": 1}

    result = await agent.ainvoke(inputs(), THREAD)
    assert [described(each) for each in result["messages"]] == [
        ("human", "hi"),
        ("ai", ["wait"]),
        ("wait error", ABANDONED),
        ("human", "hi"),
        ("ai", ["calc"]),
        ("calc success", "4"),
        ("ai", "done"),
    ]
    state = (await agent.aget_state(THREAD)).values
    assert state["thread_model_call_count"] == 3
    assert state["thread_tool_call_count"] == {"__all__": 2}
    labels = {"agent": "researcher", "limit": "tool:*", "thread_id": "thread-1"}
    assert signals.value("langchain_quota_thread_used", **labels) == 2


def described(message: BaseMessage) -> tuple[str, Any]:
    if isinstance(message, ToolMessage):
        return f"{message.name} {message.status}", message.content
    if isinstance(message, AIMessage) and message.tool_calls:
        return "ai", [call["name"] for call in message.tool_calls]
    return message.type, message.content


async def test_cancelled_while_others_run(signals: "Signals") -> None:
    """Cancelling one thread's run leaves the runs of other threads and their counts alone."""
    started = asyncio.Event()

    async def wait() -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    waiting = StructuredTool.from_function(coroutine=wait, name="wait", description="Wait.")
    limiter = tool_limiter(signals, thread_limit=2)

    def script(messages: Any) -> Any:
        if isinstance(messages[-1], ToolMessage):
            return "done"
        return [str(messages[0].content)]

    agent = agent_of(script, limiter, saver=InMemorySaver(), tools=[waiting, calc])

    def invoke(tool_name: str, thread_id: str) -> Any:
        return agent.ainvoke(inputs(tool_name), {"configurable": {"thread_id": thread_id}})

    running = asyncio.create_task(invoke("wait", "cancelled"))
    async with asyncio.timeout(DEADLINE):
        await started.wait()
    others = asyncio.gather(*(invoke("calc", f"other-{number}") for number in range(5)))
    running.cancel()
    results = await others
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [each["messages"][-1].content for each in results] == ["done"] * 5
    for number in range(5):
        labels = {"agent": "researcher", "limit": "tool:*", "thread_id": f"other-{number}"}
        assert signals.value("langchain_quota_thread_used", **labels) == 1
