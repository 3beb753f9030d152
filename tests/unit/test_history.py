"""Tool calls in a message history: which wait, which were answered, which were left."""

from copy import deepcopy
from typing import Any, cast

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolCall, ToolMessage
from langgraph.graph.message import add_messages

from langchain_quota.middleware._history import (
    answered_history,
    dangling_calls,
    identified,
    pending_calls,
)
from langchain_quota.testing import assert_valid_history


def call(id_: str | None, name: str = "search") -> ToolCall:
    return ToolCall(name=name, args={}, id=id_, type="tool_call")


def ai(*calls: ToolCall) -> AIMessage:
    return AIMessage(content="", tool_calls=list(calls))


def result(id_: str, status: Any = "success") -> ToolMessage:
    return ToolMessage(content="found", tool_call_id=id_, status=status)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [HumanMessage("hi")],
        [HumanMessage("hi"), ai(call("a")), result("a"), AIMessage("done")],
    ],
)
def test_nothing_is_pending_without_calls(messages: list[AnyMessage]) -> None:
    """Without an AIMessage, or where the newest one made no calls, nothing is pending."""
    assert pending_calls({"messages": messages}) is None
    assert pending_calls({}) is None


def test_an_empty_id_that_is_answered_stays() -> None:
    """Calls with an empty id are answered by the answer to the empty id; others are pending."""
    found = pending_calls({"messages": [ai(call(""), call(None), call("")), result("")]})
    assert found is not None
    assert [each["id"] for each in found.message.tool_calls[::2]] == ["", ""]
    assert [each["id"] for each in found.calls] == [found.message.tool_calls[1]["id"]]


def test_the_content_has_the_same_ids() -> None:
    """Blocks that stand for a call get its id; what else the content has stays as it is."""
    text = {"type": "text", "text": "I search."}
    known = {"type": "tool_use", "name": "search", "id": "a", "input": {}}
    content: list[str | dict[str, Any]] = [
        "And:",
        text,
        {"type": "tool_use", "name": "search", "id": None, "input": {}},
        known,
        {"type": "tool_call", "name": "calc", "args": {}},
        {"type": "function_call", "name": "search", "call_id": "", "id": "fc_1"},
        {"type": "tool_use", "name": "another", "id": None, "input": {}},
    ]
    calls = [call(None), call("a"), call("", "calc"), call(None)]
    before = deepcopy(content)
    message = identified(AIMessage(content, tool_calls=calls, id="m"))
    first, _, calc, last = (each["id"] for each in message.tool_calls)
    assert message.content == [
        "And:",
        text,
        {"type": "tool_use", "name": "search", "id": first, "input": {}},
        known,
        {"type": "tool_call", "name": "calc", "args": {}, "id": calc},
        {"type": "function_call", "name": "search", "call_id": last, "id": "fc_1"},
        {"type": "tool_use", "name": "another", "id": None, "input": {}},
    ]
    assert content == before


def repaired(*messages: AnyMessage, is_shared: bool = False) -> list[AnyMessage]:
    dangling = dangling_calls({"messages": list(messages)})
    return answered_history(messages, dangling, "gone", is_shared=is_shared)


def test_a_shared_history_is_repaired_where_a_merge_keeps_the_order() -> None:
    """At the end calls are answered; further up they are removed with all their blocks.

    Where an enclosing graph merges the result into the same history, its history is valid.
    """
    blocks: list[Any] = [
        {"type": "text", "text": "Wait."},
        {"type": "tool_use", "id": "a", "name": "search", "input": {}},
        {"type": "tool_use", "id": "b", "name": "search", "input": {}},
    ]
    first = AIMessage(
        blocks,
        tool_calls=[call("a"), call("b")],
        id="1",
        additional_kwargs={"tool_calls": [], "other": 1},
    )
    history: list[AnyMessage] = [
        HumanMessage("hi", id="0"),
        first,
        result("a").model_copy(update={"id": "2"}),
        HumanMessage("again", id="3"),
        ai(call("c")).model_copy(update={"id": "4"}),
        HumanMessage("and again", id="5"),
        ai(call("d"), call("e")).model_copy(update={"id": "6"}),
        result("d").model_copy(update={"id": "7"}),
    ]

    merged: Any = add_messages(
        cast("Any", history), cast("Any", repaired(*history, is_shared=True))
    )

    assert_valid_history(merged)
    assert [each.id for each in merged[:-1]] == list("01234567")
    assert merged[1].tool_calls == [call("a")]
    assert merged[1].content == blocks[:2]
    assert merged[1].additional_kwargs == {"other": 1}
    assert (merged[4].text, merged[4].tool_calls) == ("gone", [])
    assert (merged[-1].tool_call_id, merged[-1].text) == ("e", "gone")


def reasoning(id_: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": id_, "summary": []}


def asking(id_: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": "search", "arguments": "{}"}


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ([reasoning("1"), asking("a"), reasoning("2"), asking("b")], [0, 1]),
        ([reasoning("1"), asking("b"), reasoning("2"), asking("a")], [2, 3]),
        ([reasoning("1"), asking("a"), reasoning("2"), reasoning("3"), asking("b")], [0, 1]),
        # Reasoning stays before another call, and at the end where the model put it there.
        ([reasoning("1"), asking("b"), asking("a")], [0, 2]),
        ([reasoning("1"), asking("a"), asking("b")], [0, 1]),
        ([reasoning("1"), reasoning("2"), asking("b"), asking("a")], [0, 1, 3]),
        ([asking("b"), asking("a"), reasoning("1")], [1, 2]),
        (
            [
                {"type": "thinking", "thinking": "?", "signature": "s"},
                {"type": "tool_use", "id": "a", "name": "search", "input": {}},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "tool_use", "id": "b", "name": "search", "input": {}},
            ],
            [0, 1],
        ),
    ],
)
def test_reasoning_goes_with_its_call(content: list[Any], left: list[int]) -> None:
    """Reasoning that led only to a call that is taken out goes, too: providers refuse it alone."""
    asked = AIMessage(content, tool_calls=[call("a"), call("b")])

    history = repaired(asked, result("a"), HumanMessage("again"), is_shared=True)

    assert history[0].content == [content[index] for index in left]


def test_repaired_calls_have_ids() -> None:
    """A call without an id that was left open gets one, and is answered, in its place."""
    asked = ai(call(None), call("a"), call("", "calc"))
    history = repaired(HumanMessage("hi"), asked, result("a"), HumanMessage("x"))
    assert [each.type for each in history] == ["human", "ai", "tool", "tool", "tool", "human"]
    message = history[1]
    assert isinstance(message, AIMessage)
    assert message.id == asked.id
    first, second, third = (each["id"] for each in message.tool_calls)
    answers = [each.tool_call_id for each in history if isinstance(each, ToolMessage)]
    assert answers == [second, first, third]
    assert repaired(*history) == history


BATCH = ai(call("a"), call("b"), call("c"))
BATCH.id = "m"
