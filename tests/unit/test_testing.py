"""The tools for users' own tests: a scripted model, captured decisions, valid histories."""

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.tools import tool

from langchain_quota import Decision
from langchain_quota.testing import (
    ScriptedChatModel,
    assert_valid_history,
)


def called(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


def test_the_script_ends() -> None:
    """One call too many is an error that tells how long the script is, not a repeated answer."""
    model = ScriptedChatModel(script=["only"])
    model.invoke("hi")
    with pytest.raises(RuntimeError, match="only 1 answers"):
        model.invoke("hi")


@tool
def search(query: str) -> str:
    """Search."""
    return query


def calc(x: int) -> int:
    """Calculate."""
    return x


FETCH = {"type": "function", "function": {"name": "fetch", "parameters": {}}}
ANTHROPIC = {"name": "browse", "input_schema": {}}
BUILT_IN = {"type": "web_search"}


def test_requests_are_recorded() -> None:
    """The messages of each request, and the names of tools offered in whatever form."""
    model = ScriptedChatModel(script=["one", "two"])
    offered = model.bind_tools([search, calc, FETCH, ANTHROPIC, BUILT_IN])
    offered.invoke([SystemMessage("be brief"), HumanMessage("hi")])
    model.invoke("bye")
    first, second = model.calls
    assert [message.content for message in first.messages] == ["be brief", "hi"]
    assert first.tools == ("search", "calc", "fetch", "browse", "web_search")
    assert [message.content for message in second.messages] == ["bye"]
    assert second.tools == ()


@pytest.mark.parametrize(
    ("keep", "kept"), [(None, ["1", "2", "3"]), (2, ["2", "3"]), (5, ["1", "2", "3"]), (0, [])]
)
def test_requests_can_be_forgotten(keep: int | None, kept: list[str]) -> None:
    """Only the newest requests are kept; the script is still played to its end."""
    model = ScriptedChatModel(script=["a", "b", "c"], keep_calls=keep)
    assert [model.invoke(text).text for text in ("1", "2", "3")] == ["a", "b", "c"]
    assert [call.messages[0].content for call in model.calls] == kept


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        (-1, ValueError, "keep_calls must be 0 or more, not -1"),
        (True, TypeError, "keep_calls must be a whole number or None, not True"),
        (1.0, TypeError, r"keep_calls must be a whole number or None, not 1\.0"),
        ("2", TypeError, "keep_calls must be a whole number or None, not '2'"),
    ],
)
def test_a_keep_calls_that_is_no_number_is_refused(
    keep: Any, error: type[Exception], message: str
) -> None:
    """What is no whole number from 0 is refused, with the argument's name and the value."""
    with pytest.raises(error, match=message):
        ScriptedChatModel(script=[], keep_calls=keep)


RICH = AIMessage(
    [{"type": "text", "text": "so be it"}],
    tool_calls=[ToolCall(name="search", args={"query": "x"}, id="a", type="tool_call")],
    additional_kwargs={"refusal": None},
    response_metadata={"finish_reason": "stop"},
    usage_metadata={"input_tokens": 3, "output_tokens": 1, "total_tokens": 4},
)
TURNS = pytest.mark.parametrize(
    "turn",
    [
        "three words here",
        [("search", {"query": "x"}), ("calc", {"x": [1, {"y": None}]})],
        AIMessage("let me see", tool_calls=RICH.tool_calls),
        RICH,
    ],
    ids=["text", "calls", "text and calls", "all there is"],
)


def whole(chunks: Sequence[AIMessageChunk]) -> AIMessageChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


def assert_same(streamed: AIMessage, answered: AIMessage) -> None:
    assert streamed.text == answered.text
    assert called(streamed) == called(answered)
    assert [call["id"] for call in streamed.tool_calls] == [
        call["id"] for call in answered.tool_calls
    ]
    assert streamed.usage_metadata == answered.usage_metadata
    assert streamed.additional_kwargs == answered.additional_kwargs
    assert streamed.response_metadata.items() >= answered.response_metadata.items()


@TURNS
def test_streaming_adds_up(turn: Any) -> None:
    """Streamed, an answer comes in several chunks that add up to the same message."""
    chunks = list(ScriptedChatModel(script=[turn]).stream("hi"))
    assert len(chunks) > 1
    assert_same(whole(chunks), ScriptedChatModel(script=[turn]).invoke("hi"))


def test_an_empty_answer_streams() -> None:
    """An answer without text and calls is still a message."""
    assert whole(list(ScriptedChatModel(script=[""]).stream("hi"))).content == ""


def names(decisions: Sequence[Decision]) -> list[str | None]:
    return [decision.call.tool for decision in decisions]


HI = HumanMessage("hi")
DONE = AIMessage("done")


def calling(*ids: str | None, text: str = "") -> AIMessage:
    """A message that calls `search` under these ids."""
    calls = [ToolCall(name="search", args={}, id=each, type="tool_call") for each in ids]
    return AIMessage(text, tool_calls=calls)


def answer(call_id: str, text: str = "found") -> ToolMessage:
    return ToolMessage(text, tool_call_id=call_id)


def unparsed(call_id: str | None) -> AIMessage:
    """A message with a call whose arguments are no JSON."""
    call = InvalidToolCall(
        name="search", args="{", id=call_id, error="no JSON", type="invalid_tool_call"
    )
    return AIMessage("", invalid_tool_calls=[call])


VALID: dict[str, Sequence[BaseMessage]] = {
    "text": [HI, DONE],
    "calls": [SystemMessage(""), HI, calling("a", "b"), answer("a"), answer("b"), DONE, HI],
    "answers in another order": [HI, calling("a", "b"), answer("b"), answer("a")],
    "empty answers": [HI, calling("a", "b"), answer("a", ""), answer("b", " ")],
    "one id in two messages": [HI, calling("a"), answer("a"), calling("a"), answer("a")],
    "a call that could not be parsed": [HI, unparsed("a"), answer("a"), DONE],
    "text and a call": [HI, calling("a", text="let me see"), answer("a")],
    "turns of one role": [HI, HI, DONE, DONE],
    "blocks": [HumanMessage([{"type": "image", "url": "x"}]), AIMessage(["", "done"])],
    "a tuple": (HI,),
}


@pytest.mark.parametrize("messages", VALID.values(), ids=VALID)
def test_a_valid_history_is_accepted(messages: Sequence[BaseMessage]) -> None:
    """What providers accept raises nothing."""
    assert_valid_history(messages)


BLANK: list[str | dict[str, Any]] = [{"text": " ", "type": "text"}]
CALLER = "messages[1] (AIMessage)"
LAST = "messages[3] (ToolMessage)"
NO_ID = (
    f"{CALLER} calls 'search' without an id. Every tool call needs an id, or no answer can name it."
)
TWICE = f"{CALLER} makes two calls with the id 'a'. Every call of a message needs an id of its own."
OPEN = f"{CALLER} calls 'search' (id 'a') and gets no answer. A ToolMessage must answer the call"
ONCE = "Every tool call needs exactly one answer."
BEHIND = "A ToolMessage must directly follow the AIMessage that makes its call."
EMPTY = "Some providers refuse an empty message."
INVALID: dict[str, tuple[Sequence[BaseMessage], str]] = {
    "no messages": ([], "There are no messages. A request needs at least one."),
    "no id": ([HI, calling("b", None)], NO_ID),
    "an empty id": ([HI, calling("")], NO_ID),
    "no id, and no JSON": ([HI, unparsed(None)], NO_ID),
    "one id for two calls": ([HI, calling("a", "a"), answer("a"), answer("a")], TWICE),
    "one call unanswered": (
        [HI, calling("b", "a"), answer("b"), DONE],
        f"{OPEN} before messages[3] (AIMessage).",
    ),
    "an answer too late": (
        [HI, calling("a"), HI, answer("a")],
        f"{OPEN} before messages[2] (HumanMessage).",
    ),
    "a call at the end": ([HI, calling("a")], f"{OPEN} before the history ends."),
    "no JSON, and no answer": ([HI, unparsed("a")], f"{OPEN} before the history ends."),
    "two answers": (
        [HI, calling("a"), answer("a"), answer("a"), DONE],
        f"{LAST} answers the call 'a' again, after messages[2] (ToolMessage). {ONCE}",
    ),
    "another call's answer": (
        [HI, calling("a"), answer("b")],
        f"messages[2] (ToolMessage) answers the call 'b', which {CALLER} does not make. {BEHIND}",
    ),
    "an answer to nothing": (
        [HI, DONE, HI, answer("a")],
        f"{LAST} answers the call 'a', which messages[2] (HumanMessage) does not make. {BEHIND}",
    ),
    "an answer at the beginning": (
        [answer("a"), DONE],
        f"messages[0] (ToolMessage) answers the call 'a', which no message makes. {BEHIND}",
    ),
    "an empty answer of the model": (
        [HI, AIMessage(""), HI],
        f"{CALLER} is empty and calls no tool: its content is ''. {EMPTY}",
    ),
    "an answer of white space": (
        [HI, AIMessage(BLANK)],
        f"{CALLER} is empty and calls no tool: its content is {BLANK!r}. {EMPTY}",
    ),
    "an empty question": (
        [HumanMessage("\n")],
        f"messages[0] (HumanMessage) is empty: its content is '\\n'. {EMPTY}",
    ),
}


@pytest.mark.parametrize(("messages", "text"), INVALID.values(), ids=INVALID)
def test_an_invalid_history_is_refused(messages: Sequence[BaseMessage], text: str) -> None:
    """What providers refuse is named: the message, what is wrong with it, and the rule."""
    with pytest.raises(AssertionError) as refused:
        assert_valid_history(messages)
    assert str(refused.value) == text


@pytest.mark.parametrize(
    "messages",
    [
        [HI, calling("x" * 1_000_000)],
        [HI, calling("a"), answer("x" * 1_000_000)],
        [HumanMessage(" " * 1_000_000)],
        [HumanMessage([{"type": "text", "text": " " * 1_000_000}] * 1_000)],
    ],
    ids=["id", "answered id", "text", "blocks"],
)
def test_a_refusal_is_short(messages: Sequence[BaseMessage]) -> None:
    """However long an id or a text is, the message about it fits on a screen."""
    with pytest.raises(AssertionError) as refused:
        assert_valid_history(messages)
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"messages": []}, r"must be a list of messages, not {'messages': \[\]}\. Give its \"mess"),
        ("hi", "must be a list of messages, not 'hi'"),
        (
            [HI, ("ai", "hi")],
            r"messages\[1\] must be a LangChain message, not \('ai', 'hi'\)\. conv",
        ),
    ],
    ids=["a result", "a text", "a pair"],
)
def test_no_history_at_all(given: Any, text: str) -> None:
    """What is no list of LangChain messages is a TypeError with the remedy."""
    with pytest.raises(TypeError, match=text):
        assert_valid_history(given)
