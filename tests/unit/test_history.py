"""Tool calls in a message history: which wait, which were answered, which were left."""

import re
from copy import deepcopy
from typing import Any, cast

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolCall, ToolMessage
from langgraph.graph.message import add_messages

from langchain_quota.middleware._history import (
    DanglingCalls,
    answered_history,
    dangling_calls,
    identified,
    newest_name,
    pending_calls,
    since,
    unfinished_calls,
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


@pytest.mark.parametrize(
    ("messages", "pending"),
    [
        # Another middleware has answered one already.
        ([ai(call("a"), call("b"), call("c")), result("b", "error")], ["a", "c"]),
        ([ai(call("a")), result("a")], []),
        # Calls that an older message left open are not about to run.
        ([ai(call("old")), HumanMessage("again"), ai(call("new"))], ["new"]),
        # A middleware may append a message of the user's before the tools run.
        ([ai(call("a")), HumanMessage("hurry")], ["a"]),
        # Models use an id again: the earlier answer is not one of this call.
        ([ai(call("a")), result("a"), HumanMessage("again"), ai(call("a"))], ["a"]),
        # The judge treats two calls of one id as one.
        ([ai(call("a"), call("a", "calc"))], ["a", "a"]),
    ],
)
def test_pending_calls(messages: list[AnyMessage], pending: list[str]) -> None:
    """The calls of the newest AIMessage that have no answer behind it are pending.

    Where every call has an id the message is not replaced.
    """
    found = pending_calls({"messages": messages})
    assert found is not None
    assert [each["id"] for each in found.calls] == pending
    assert any(found.message is each for each in messages)
    assert not found.replaces


@pytest.mark.parametrize("no_id", [None, ""])
def test_calls_without_an_id_get_one(no_id: str | None) -> None:
    """A call without an id is pending like any other, under an id of its own."""
    message = ai(call(no_id), call("a"), call(no_id, "calc"))
    found = pending_calls({"messages": [message]})
    assert found is not None
    assert found.replaces
    assert found.message.tool_calls == list(found.calls)
    assert [each["name"] for each in found.calls] == ["search", "search", "calc"]
    first, second, third = (str(each["id"]) for each in found.calls)
    assert second == "a"
    assert first != third
    # What OpenAI, Anthropic and Bedrock take.
    assert all(re.fullmatch("[a-zA-Z0-9_-]{1,40}", each) for each in (first, third))
    assert found.message.id == message.id
    assert [each["id"] for each in message.tool_calls] == [no_id, "a", no_id]


def test_an_empty_id_that_is_answered_stays() -> None:
    """Calls with an empty id are answered by the answer to the empty id; others are pending."""
    found = pending_calls({"messages": [ai(call(""), call(None), call("")), result("")]})
    assert found is not None
    assert [each["id"] for each in found.message.tool_calls[::2]] == ["", ""]
    assert [each["id"] for each in found.calls] == [found.message.tool_calls[1]["id"]]


def test_ids_are_those_of_their_message() -> None:
    """A message always gets the same ids, another message others."""
    message = AIMessage("", tool_calls=[call(None), call("")], id="\udc80 m")
    other = AIMessage("", tool_calls=[call(None), call("")], id="n")
    again = deepcopy(message)
    ids = [each["id"] for each in identified(message).tool_calls]
    assert [each["id"] for each in identified(again).tool_calls] == ids
    assert not set(ids) & {each["id"] for each in identified(other).tool_calls}


def test_an_id_that_is_taken_is_not_given() -> None:
    """An id that another call has already is not given again."""
    (free,) = identified(AIMessage("", tool_calls=[call(None)], id="m")).tool_calls
    crossed = AIMessage("", tool_calls=[call(None), call(free["id"])], id="m")
    first, second = identified(crossed).tool_calls
    assert second["id"] == free["id"]
    assert first["id"] != free["id"]


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


def test_an_edited_call_is_what_it_became() -> None:
    """A reviewer's edit decides which tool runs, with which arguments; the message stays."""
    message = ai(call("a"), call("b"))
    edits = {"a": {"name": "calc", "args": {"x": 1}}}
    found = pending_calls({"messages": [message], "hitl_edited_tool_calls": edits})
    assert found is not None
    assert [(each["name"], each["args"], each["id"]) for each in found.calls] == [
        ("calc", {"x": 1}, "a"),
        ("search", {}, "b"),
    ]
    assert found.message is message
    assert message.tool_calls == [call("a"), call("b")]


@pytest.mark.parametrize(
    ("messages", "response", "structured"),
    [
        ([ai(call("answer"), call("a")), result("answer")], {"x": 1}, True),
        ([ai(call("answer"), call("a")), result("answer", "error")], {"x": 1}, False),
        ([ai(call("answer"), call("a")), result("answer")], None, False),
        ([ai(call("answer"), call("a"))], {"x": 1}, False),
        # That of an earlier turn says nothing about this one.
        (
            [ai(call("answer")), result("answer"), HumanMessage("hi"), ai(call("a"))],
            {"x": 1},
            False,
        ),
    ],
)
def test_a_structured_response_that_was_delivered(
    messages: list[AnyMessage], response: object, *, structured: bool
) -> None:
    """It is there, and a call of this message was answered with success."""
    found = pending_calls({"messages": messages, "structured_response": response})
    assert found is not None
    assert found.structured is structured


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [HumanMessage("hi"), AIMessage("hello")],
        [ai(call("a"), call("b")), result("b"), result("a"), AIMessage("done")],
        [ai(call("a")), result("a"), HumanMessage("x"), ai(call("a")), result("a")],
        [ai(call(""), call("")), result("")],
    ],
)
def test_nothing_dangles_in_an_answered_history(messages: list[AnyMessage]) -> None:
    """A history without calls, or with an answer for each, is left alone."""
    assert dangling_calls({"messages": messages}) == []
    assert dangling_calls({}) == []


def test_dangling_calls_and_where_their_answers_belong() -> None:
    """Each message with open calls is found, in order, with the place behind its answers.

    An id that a later turn answers leaves the earlier turn's call of that id open.
    """
    messages = [
        HumanMessage("hi"),
        ai(call("a")),
        HumanMessage("again"),
        ai(call("a"), call("b"), call("c")),
        result("a"),
        HumanMessage("and again"),
    ]
    first, second = (each for each in messages if isinstance(each, AIMessage))
    assert dangling_calls({"messages": messages}) == [
        DanglingCalls(first, (call("a"),), 1, 2),
        DanglingCalls(second, (call("b"), call("c")), 3, 5),
    ]


def test_a_dangling_edited_call_is_what_it_became() -> None:
    """An abandoned call is given under the name of the tool that would have run."""
    (dangling,) = dangling_calls(
        {
            "messages": [ai(call("a")), HumanMessage("again")],
            "hitl_edited_tool_calls": {"a": {"name": "calc", "args": {}}},
        }
    )
    assert [each["name"] for each in dangling.calls] == ["calc"]


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


def test_nothing_is_left_of_a_call_that_is_taken_out() -> None:
    """OpenAI's older form of a call is removed with it, and so is reasoning without an answer."""
    others = {
        "function_call": {"name": "search", "arguments": "{}"},
        "reasoning": reasoning("1"),
        "other": 1,
    }
    asked = AIMessage("", tool_calls=[call("a")], additional_kwargs=others)

    history = repaired(asked, HumanMessage("again"), is_shared=True)

    assert (history[0].text, history[0].additional_kwargs) == ("gone", {"other": 1})


def test_a_repaired_history_answers_in_place() -> None:
    """Answers stand behind the message that made the call, behind those that it has.

    Then there is nothing to repair, and the messages that were there stay the same.
    """
    messages: list[AnyMessage] = [
        HumanMessage("hi"),
        ai(call("a")),
        HumanMessage("again"),
        ai(call("b"), call("c", "calc")),
        result("b"),
        HumanMessage("x"),
    ]
    history = repaired(*messages)
    types = [each.type for each in history]
    assert types == ["human", "ai", "tool", "human", "ai", "tool", "tool", "human"]
    answers = [each for each in history if isinstance(each, ToolMessage)]
    assert [(each.tool_call_id, each.name, each.status, each.content) for each in answers] == [
        ("a", "search", "error", "gone"),
        ("b", None, "success", "found"),
        ("c", "calc", "error", "gone"),
    ]
    assert repaired(*history) == history
    assert [each for each in history if each in messages] == messages
    assert len(messages) == 6


def test_calls_that_share_an_id_get_one_answer() -> None:
    """Providers reject two answers for one id."""
    history = repaired(ai(call("a"), call("a")), HumanMessage("x"))
    assert [each.type for each in history] == ["ai", "tool", "human"]


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


def test_newest_name() -> None:
    """The name is that of the last AIMessage, whatever follows it."""
    messages = [
        AIMessage("a", name="old"),
        AIMessage("b", name="boss"),
        HumanMessage("c", name="x"),
    ]
    assert newest_name(messages) == "boss"
    assert newest_name([*messages, AIMessage("d")]) is None
    assert newest_name([HumanMessage("c", name="x")]) is None


BATCH = ai(call("a"), call("b"), call("c"))
BATCH.id = "m"


@pytest.mark.parametrize(
    ("behind", "unfinished"),
    [
        ([], ["a", "b", "c"]),
        ([result("a"), result("b", "error")], ["b", "c"]),
        ([result("a"), result("b", "error"), HumanMessage("next")], ["b", "c"]),
        # The model has gone on: an error is what a tool, or a limit, answered.
        ([result("a"), result("b", "error"), AIMessage("done")], ["c"]),
        ([result("a"), result("b"), result("c")], []),
    ],
)
def test_calls_that_no_tool_has_finished(behind: list[AnyMessage], unfinished: list[str]) -> None:
    """A call is unfinished without an answer, or with an error as the newest that there is."""
    found = unfinished_calls({"messages": [HumanMessage("hi"), BATCH, *behind]}, "m")
    assert found is not None
    message, calls = found
    assert message is BATCH
    assert [each["id"] for each in calls] == unfinished


def test_a_message_that_is_gone_has_no_unfinished_calls() -> None:
    """Where the message is no longer in the history nothing is known of its calls."""
    assert unfinished_calls({"messages": [ai(call("a"))]}, "m") is None
    assert unfinished_calls({}, "m") is None


@pytest.mark.parametrize(
    ("turn", "expected"), [("h", 2), (1, 2), (3, 0), ("gone", None), (None, None)]
)
def test_the_messages_since_a_run_began(turn: str | int | None, expected: int | None) -> None:
    """They are those behind the newest message of then, by its id or by how many there were."""
    history: list[AnyMessage] = [HumanMessage("hi", id="h"), BATCH, result("a")]
    found = since(history, turn)
    assert (None if found is None else len(found)) == expected
