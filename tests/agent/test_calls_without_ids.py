"""Tool calls without an id: they get one, are judged like any other, and run or are refused."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolCall, ToolMessage
from langgraph.graph.message import add_messages

from langchain_quota import (
    InlineQuotaMiddleware,
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.messages import FINALIZED
from tests.scene import Form, Scene, tool_limiter
from tests.signals import Signals, needs_inline


def call(tool: str, call_id: str | None = None) -> ToolCall:
    return ToolCall(name=tool, args={}, id=call_id, type="tool_call")


def limiter(kind: str, signals: Signals, **limits: Any) -> AgentMiddleware[Any, Any, Any]:
    """A middleware that limits the calls of `search`."""
    telemetry = signals.telemetry
    match kind:
        case "drop-in of a tool":
            return ToolCallLimitMiddleware(tool_name="search", telemetry=telemetry, **limits)
        case "drop-in":
            return ToolCallLimitMiddleware(telemetry=telemetry, **limits)
        case "quota":
            return QuotaMiddleware([ToolCallLimit("search", **limits)], telemetry=telemetry)
        case _:
            return InlineQuotaMiddleware([ToolCallLimit("search", **limits)], telemetry=telemetry)


def check(scene: Scene) -> None:
    """Assert the rules, and that each call has an id of its own."""
    scene.check()
    histories: list[Sequence[Any]] = [each.messages for each in scene.model.calls]
    for messages in [*histories, scene.state()["messages"]]:
        for message in messages:
            if isinstance(message, AIMessage):
                ids = [each["id"] for each in message.tool_calls]
                assert all(ids), message
                assert len(set(ids)) == len(ids), message


async def test_an_error_with_other_calls_pending(signals: Signals) -> None:
    """`on_pending="raise"` raises where the pending calls have no id."""
    scene = Scene(
        signals,
        [[call("search"), call("calc")], "done"],
        [tool_limiter(signals, "search", run_limit=0, exit_behavior="end", on_pending="raise")],
    )

    with pytest.raises(NotImplementedError, match="calc"):
        await scene.play()
    await scene.play()

    assert scene.ran == []
    check(scene)


@pytest.mark.parametrize("kind", ["quota", pytest.param("inline", marks=needs_inline)])
async def test_finalize(kind: str, signals: Signals) -> None:
    """What the last model call of a budget asks for does not run, and is answered."""
    middleware = {"quota": QuotaMiddleware, "inline": InlineQuotaMiddleware}[kind]
    last = ModelCallLimit(run_limit=1, exit_behavior="finalize")
    scene = Scene(
        signals,
        [[call("search"), call("calc", "")], "done"],
        [middleware([last], telemetry=signals.telemetry)],
    )

    await scene.play()
    assert scene.ran == []
    texts = [each.text for each in scene.state()["messages"] if isinstance(each, ToolMessage)]
    assert texts == [FINALIZED] * 2
    check(scene)

    await scene.play()
    check(scene)


def judged(limiter: Any, messages: list[Any], **state: Any) -> tuple[Mapping[str, Any], list[Any]]:
    """What a hook writes, and the history with it."""
    update = limiter.after_model({"messages": messages, **state}, None)
    return update, list(add_messages(messages, update.get("messages", [])))


@pytest.mark.parametrize("message_id", ["m", None])
@pytest.mark.parametrize("kind", ["drop-in of a tool", "drop-in", "quota"])
@pytest.mark.parametrize("form", ["sync", "async"])
async def test_a_hook_called_directly(
    form: Form, kind: str, message_id: str | None, signals: Signals
) -> None:
    """The update replaces the message in its place, and has the answers behind it."""
    hook: Any = limiter(kind, signals, run_limit=1)
    batch = [call("search"), call("search", ""), call("search", "a")]
    asked = AIMessage("I search.", tool_calls=batch, id=message_id)
    state: Any = {"messages": [HumanMessage("hi"), asked]}

    update = (
        hook.after_model(state, None) if form == "sync" else await hook.aafter_model(state, None)
    )

    assert [each.type for each in update["messages"]] == ["ai", "tool", "tool"]
    assert asked.tool_calls == batch
    merged: Any = add_messages(state["messages"], update["messages"])
    assert [each.type for each in merged] == ["human", "ai", "tool", "tool"]
    first, second, third = (each["id"] for each in merged[1].tool_calls)
    assert third == "a"
    assert [each.tool_call_id for each in merged[2:]] == [second, "a"]
    assert first
    assert update["langchain_quota"]["run_tools"] in ({"__all__": 1}, {"search": 1})
