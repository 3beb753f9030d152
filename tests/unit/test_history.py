"""Tool calls in a message history: which wait, which were answered, which were left."""

import re
from copy import deepcopy
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolCall, ToolMessage

from langchain_quota.middleware.history import (
    DanglingCalls,
    PendingCalls,
    answer,
    answered_history,
    dangling_calls,
    identified,
    newest_name,
    pending_calls,
)


def call(id_: str | None, name: str = "search") -> ToolCall:
    return ToolCall(name=name, args={}, id=id_, type="tool_call")


def ai(*calls: ToolCall) -> AIMessage:
    return AIMessage(content="", tool_calls=list(calls))


def result(id_: str, status: Any = "success") -> ToolMessage:
    return ToolMessage(content="found", tool_call_id=id_, status=status)


def pending_ids(*messages: AnyMessage, **state: Any) -> list[str | None] | None:
    found = pending_calls({"messages": list(messages), **state})
    return None if found is None else [each["id"] for each in found.calls]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [HumanMessage("hi")],
        [HumanMessage("hi"), AIMessage("hello")],
        [HumanMessage("hi"), ai(call("a")), result("a"), AIMessage("done")],
    ],
)
def test_nothing_is_pending_without_calls(messages: list[AnyMessage]) -> None:
    """Without an AIMessage, or where the newest one made no calls, nothing is pending."""
    assert pending_calls({"messages": messages}) is None
    assert pending_calls({}) is None


def test_calls_without_an_answer_are_pending() -> None:
    """Of a batch, those that another middleware answered already do not run."""
    assert pending_ids(ai(call("a"), call("b"), call("c")), result("b", "error")) == ["a", "c"]


def test_a_batch_that_is_answered_whole_has_nothing_pending() -> None:
    """A message whose calls are all answered is found, with no calls left."""
    assert pending_ids(ai(call("a")), result("a")) == []


def test_pending_calls_are_those_of_the_newest_ai_message() -> None:
    """Calls that an older message left open are not about to run."""
    assert pending_ids(ai(call("old")), HumanMessage("again"), ai(call("new"))) == ["new"]


def test_a_message_behind_the_calls_does_not_hide_them() -> None:
    """A middleware may append a message of the user's before the tools run."""
    assert pending_ids(ai(call("a")), HumanMessage("hurry")) == ["a"]


def test_an_id_that_an_earlier_turn_used_is_pending_again() -> None:
    """Models reuse ids: the answer of the earlier turn is not one of this turn's call."""
    assert pending_ids(ai(call("a")), result("a"), HumanMessage("again"), ai(call("a"))) == ["a"]


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


def test_a_message_whose_calls_have_ids_is_not_replaced() -> None:
    """Nothing is written anew where every call has an id."""
    message = ai(call("a"))
    found = pending_calls({"messages": [message]})
    assert found is not None
    assert found.message is message
    assert not found.replaces


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


def test_calls_that_share_an_id_are_all_given() -> None:
    """Two calls of one id are both pending, for the judge to treat as one."""
    assert pending_ids(ai(call("a"), call("a", "calc"))) == ["a", "a"]


def test_an_edited_call_is_what_it_became() -> None:
    """A reviewer's edit decides which tool runs, with which arguments; other calls stay."""
    edits = {"a": {"name": "calc", "args": {"x": 1}}}
    found = pending_calls({"messages": [ai(call("a"), call("b"))], "hitl_edited_tool_calls": edits})
    assert found is not None
    assert [(each["name"], each["args"], each["id"]) for each in found.calls] == [
        ("calc", {"x": 1}, "a"),
        ("search", {}, "b"),
    ]


def test_an_edit_does_not_change_the_message() -> None:
    """The AIMessage in the history is the model's and stays as it was."""
    message = ai(call("a"))
    edits = {"a": {"name": "calc", "args": {}}}
    found = pending_calls({"messages": [message], "hitl_edited_tool_calls": edits})
    assert isinstance(found, PendingCalls)
    assert found.message is message
    assert message.tool_calls == [call("a")]


@pytest.mark.parametrize(
    ("answers", "response", "structured"),
    [
        ([result("answer")], {"x": 1}, True),
        ([result("answer", "error")], {"x": 1}, False),
        ([result("answer")], None, False),
        ([], {"x": 1}, False),
    ],
)
def test_structured_response(
    answers: list[AnyMessage], response: object, *, structured: bool
) -> None:
    """It was delivered if it is there and a call of this message was answered with success."""
    found = pending_calls(
        {
            "messages": [ai(call("answer"), call("a")), *answers],
            "structured_response": response,
        }
    )
    assert found is not None
    assert found.structured is structured


def test_a_structured_response_of_an_earlier_turn_is_stale() -> None:
    """What an earlier message delivered says nothing about this one."""
    messages = [ai(call("answer")), result("answer"), HumanMessage("again"), ai(call("a"))]
    found = pending_calls({"messages": messages, "structured_response": {"x": 1}})
    assert found is not None
    assert found.structured is False


def dangling_ids(*messages: AnyMessage) -> list[tuple[list[str | None], int]]:
    found = dangling_calls({"messages": list(messages)})
    return [([each["id"] for each in dangling.calls], dangling.end) for dangling in found]


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
    """Each message with open calls is found, in order, with the place behind its answers."""
    assert dangling_ids(
        HumanMessage("hi"),
        ai(call("a")),
        HumanMessage("again"),
        ai(call("b"), call("c"), call("d")),
        result("c"),
        HumanMessage("and again"),
    ) == [(["a"], 2), (["b", "d"], 5)]


def test_a_later_answer_of_a_reused_id_is_not_an_earlier_ones() -> None:
    """An id answered in a later turn leaves the earlier turn's call of that id open."""
    assert dangling_ids(
        ai(call("a")), HumanMessage("again"), ai(call("a")), result("a"), HumanMessage("x")
    ) == [(["a"], 1)]


def test_a_dangling_edited_call_is_what_it_became() -> None:
    """An abandoned call is given under the name of the tool that would have run."""
    (dangling,) = dangling_calls(
        {
            "messages": [ai(call("a")), HumanMessage("again")],
            "hitl_edited_tool_calls": {"a": {"name": "calc", "args": {}}},
        }
    )
    assert [each["name"] for each in dangling.calls] == ["calc"]


def repaired(*messages: AnyMessage) -> list[AnyMessage]:
    return answered_history(messages, dangling_calls({"messages": list(messages)}), "gone")


def test_a_repaired_history_answers_in_place() -> None:
    """Answers stand behind the message that made the call, behind those that it has."""
    history = repaired(
        HumanMessage("hi"),
        ai(call("a")),
        HumanMessage("again"),
        ai(call("b"), call("c", "calc")),
        result("b"),
        HumanMessage("x"),
    )
    types = [each.type for each in history]
    assert types == ["human", "ai", "tool", "human", "ai", "tool", "tool", "human"]
    answers = [each for each in history if isinstance(each, ToolMessage)]
    assert [(each.tool_call_id, each.status, each.content) for each in answers] == [
        ("a", "error", "gone"),
        ("b", "success", "found"),
        ("c", "error", "gone"),
    ]
    assert answers[2].name == "calc"


def test_a_repaired_history_has_nothing_to_repair() -> None:
    """Repairing again changes nothing, and the messages that were there stay the same."""
    messages: list[AnyMessage] = [ai(call("a"), call("b")), result("b"), HumanMessage("x")]
    once = repaired(*messages)
    assert repaired(*once) == once
    assert [each for each in once if each in messages] == messages
    assert len(messages) == 3


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


def test_answered_history_of_nothing() -> None:
    """Without dangling calls the history is copied as it is."""
    messages: list[AnyMessage] = [HumanMessage("hi")]
    history = answered_history(messages, [], "gone")
    assert history == messages
    assert history is not messages


def test_an_answer_is_an_error_message() -> None:
    """The answer of a call that does not run names its tool and says that it failed."""
    message = answer("a", "search", "no")
    assert (message.tool_call_id, message.name) == ("a", "search")
    assert (message.status, message.content) == ("error", "no")


def test_newest_name() -> None:
    """The name is that of the last AIMessage, whatever stands behind it."""
    messages = [
        AIMessage("a", name="old"),
        AIMessage("b", name="boss"),
        HumanMessage("c", name="x"),
    ]
    assert newest_name(messages) == "boss"
    assert newest_name([*messages, AIMessage("d")]) is None
    assert newest_name([HumanMessage("c", name="x")]) is None


def test_dangling_calls_name_their_message() -> None:
    """What was charged for the calls is found by the message that made them."""
    message = ai(call("a"))
    assert dangling_calls({"messages": [message]}) == [DanglingCalls(message, (call("a"),), 0, 1)]
