"""ModelCallLimitMiddleware in real agents: what runs, what is kept, and what is made visible."""

from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware.model_call_limit import (
    ModelCallLimitExceededError as LangChainsError,
)
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.trace import StatusCode

from langchain_quota import ModelCallLimitExceededError
from langchain_quota.testing import ScriptedChatModel
from tests.scene import model_limiter

if TYPE_CHECKING:
    from tests.signals import Signals

THREAD: RunnableConfig = {"configurable": {"thread_id": "thread-1"}}

# What a caller is given back is put together in as many ways.
forms = pytest.mark.parametrize(
    "form", ["ainvoke", "astream values", "astream updates", "abatch", "invoke"]
)


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


def agent_of(model: ScriptedChatModel, *limiters: Any, saver: Any = None) -> Any:
    saver = saver or InMemorySaver()
    return create_agent(model, [search], middleware=limiters, checkpointer=saver, name="researcher")


async def turn(agent: Any, form: str = "ainvoke") -> list[BaseMessage]:
    """Run one turn on the thread, and return the messages that it made."""
    inputs = {"messages": [HumanMessage("hi")]}
    if form == "astream updates":
        return [
            message
            async for chunk in agent.astream(inputs, THREAD, stream_mode="updates")
            for update in chunk.values()
            for message in (update or {}).get("messages", [])
        ]
    if form == "astream values":
        async for result in agent.astream(inputs, THREAD, stream_mode="values"):
            last = result
    elif form == "abatch":
        [last] = await agent.abatch([inputs], [THREAD])
    elif form == "invoke":
        last = agent.invoke(inputs, THREAD)
    else:
        last = await agent.ainvoke(inputs, THREAD)
    messages: list[BaseMessage] = last["messages"]
    newest = max(at for at, each in enumerate(messages) if isinstance(each, HumanMessage))
    return messages[newest + 1 :]


def final(messages: list[BaseMessage]) -> str:
    assert isinstance(messages[-1], AIMessage)
    return str(messages[-1].content)


async def thread_count(agent: Any) -> int | None:
    state = await agent.aget_state(THREAD)
    count: int | None = state.values.get("thread_model_call_count")
    return count


def calls(signals: "Signals", decision: str) -> float | None:
    return signals.value(
        "langchain_quota_calls_total",
        agent="researcher",
        kind="model",
        tool="none",
        decision=decision,
    )


def charged(
    signals: "Signals", decision: str, scope: str = "none", limit: str = "model"
) -> float | None:
    return signals.value(
        "langchain_quota_limit_decisions_total",
        agent="researcher",
        limit=limit,
        scope=scope,
        decision=decision,
    )


def thread_series(signals: "Signals", limit: str = "model") -> tuple[float | None, ...]:
    """Used, limit and refused, as exported for the thread."""
    return tuple(
        signals.value(name, agent="researcher", limit=limit, thread_id="thread-1")
        for name in (
            "langchain_quota_thread_used",
            "langchain_quota_thread_limit",
            "langchain_quota_thread_blocked_total",
        )
    )


async def test_error(signals: "Signals") -> None:
    """`error`: our exception reaches the caller, who may catch LangChain's; its span says so."""
    limiter = model_limiter(signals, thread_limit=9, run_limit=1, exit_behavior="error")
    model = ScriptedChatModel(script=[["search"], "never"])
    agent = agent_of(model, limiter)
    with pytest.raises(LangChainsError) as caught:
        await turn(agent)
    error = caught.value
    assert type(error) is ModelCallLimitExceededError
    assert (error.thread_count, error.thread_limit) == (1, 9)
    assert (error.run_count, error.run_limit) == (1, 1)
    assert len(model.calls) == 1
    assert await thread_count(agent) == 1
    assert calls(signals, "allowed") == 1
    assert calls(signals, "blocked") == 1
    assert thread_series(signals) == (1, 9, 1)
    statuses = [
        ((span.attributes or {})["langchain_quota.decision"], span.status.status_code)
        for span in signals.spans()
    ]
    assert statuses == [("allowed", StatusCode.UNSET), ("blocked", StatusCode.ERROR)]


async def test_two_named_limits(signals: "Signals") -> None:
    """With `limit_name` two model limits stand side by side, and each call counts once."""
    per_run = model_limiter(signals, run_limit=2, limit_name="per run")
    per_thread = model_limiter(signals, thread_limit=3, limit_name="per thread")
    assert per_run.name == "ModelCallLimitMiddleware[per run]"
    assert per_thread.name == "ModelCallLimitMiddleware[per thread]"
    model = ScriptedChatModel(script=[["search"]] * 3)
    agent = agent_of(model, per_run, per_thread)
    assert final(await turn(agent)) == "Model call limits exceeded: run limit (2/2)"
    assert await thread_count(agent) == 2
    assert final(await turn(agent)) == "Model call limits exceeded: thread limit (3/3)"
    assert await thread_count(agent) == 3
    assert len(model.calls) == 3
    assert charged(signals, "blocked", "run", limit="per run") == 1
    assert charged(signals, "blocked", "thread", limit="per thread") == 1
    assert thread_series(signals, "per thread") == (3, 3, 1)
