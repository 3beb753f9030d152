"""The tools for users' own tests: a scripted model, captured decisions, valid histories."""

import asyncio
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)

from langchain_quota import Decision, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel, assert_valid_history, captured_decisions
from tests.scene import Scene, recording
from tests.telemetry import Signals


def called(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


def test_a_script_is_played_in_order() -> None:
    """Texts, batches of calls with ids of their own, and errors; then an error says it is over."""
    own = ToolCall(name="fetch", args={"url": "x"}, id="mine", type="tool_call")
    script = ["one", ["search", ("calc", {"x": 1}), own], TimeoutError("slow"), ["search"]]
    model = ScriptedChatModel(script=script)
    assert model.invoke("hi").content == "one"
    batch = model.invoke("hi")
    assert called(batch) == [("search", {}), ("calc", {"x": 1}), ("fetch", {"url": "x"})]
    with pytest.raises(TimeoutError, match="slow"):
        model.invoke("hi")
    calls = [*batch.tool_calls, *model.invoke("hi").tool_calls]
    assert len({each["id"] for each in calls}) == 4
    assert batch.tool_calls[2]["id"] == "mine"
    with pytest.raises(RuntimeError, match="only 4 answers"):
        model.invoke("hi")
    assert len(model.calls) == 5  # also those that failed


def test_requests_are_recorded() -> None:
    """The messages of each request, and the names of tools offered in whatever form."""

    def calc(x: int) -> int:
        """Calculate."""
        return x

    model = ScriptedChatModel(script=["one", "two"])
    openai = {"type": "function", "function": {"name": "fetch", "parameters": {}}}
    anthropic, built_in = {"name": "browse", "input_schema": {}}, {"type": "web_search"}
    offered = model.bind_tools([recording("search", []), calc, openai, anthropic, built_in])
    offered.invoke([SystemMessage("be brief"), HumanMessage("hi")])
    model.invoke("bye")
    first, second = model.calls
    assert [message.content for message in first.messages] == ["be brief", "hi"]
    assert first.tools == ("search", "calc", "fetch", "browse", "web_search")
    assert [message.content for message in second.messages] == ["bye"]
    assert second.tools == ()


@pytest.mark.parametrize(("keep", "kept"), [(None, "123"), (2, "23"), (5, "123"), (0, "")])
def test_requests_can_be_forgotten(keep: int | None, kept: str) -> None:
    """Only the newest requests are kept; the script is still played to its end."""
    model = ScriptedChatModel(script=["a", "b", "c"], keep_calls=keep)
    assert [model.invoke(text).text for text in "123"] == ["a", "b", "c"]
    assert [call.messages[0].content for call in model.calls] == list(kept)
    for bad, text in ((-1, "0 or more"), (True, "a whole"), (1.0, "a whole"), ("2", "a whole")):
        given: Any = {"keep_calls": bad}
        with pytest.raises((TypeError, ValueError), match=f"keep_calls must be {text}.*{bad!r}"):
            ScriptedChatModel(script=[], **given)


RICH = AIMessage(
    [{"type": "text", "text": "so be it"}],
    name="boss",
    tool_calls=[ToolCall(name="search", args={"query": "x"}, id="a", type="tool_call")],
    additional_kwargs={"refusal": None},
    response_metadata={"finish_reason": "stop"},
    usage_metadata={"input_tokens": 3, "output_tokens": 1, "total_tokens": 4},
)


CALLS = [("search", {"query": "x"}), ("calc", {"x": [1, {"y": None}]})]


@pytest.mark.parametrize("turn", ["three words here", CALLS, RICH], ids=["text", "calls", "all"])
async def test_all_forms_are_the_same(turn: Any) -> None:
    """Streamed, an answer comes in several chunks that add up to what `invoke` gives."""
    answered = ScriptedChatModel(script=[turn]).invoke("hi")
    chunks = list(ScriptedChatModel(script=[turn]).stream("hi"))
    later = [each async for each in ScriptedChatModel(script=[turn]).astream("hi")]
    assert len(chunks) == len(later) > 1
    alone = await ScriptedChatModel(script=[turn]).ainvoke("hi")
    found: list[AIMessage] = [reduce(add, chunks), reduce(add, later), alone]
    for each in found:
        assert (each.text, called(each)) == (answered.text, called(answered))
        assert [call["id"] for call in each.tool_calls] == [c["id"] for c in answered.tool_calls]
        assert each.usage_metadata == answered.usage_metadata
        assert each.additional_kwargs == answered.additional_kwargs
        assert each.response_metadata.items() >= answered.response_metadata.items()


async def test_decisions_are_captured(signals: Signals) -> None:
    """Blocks at the same time see their own decisions, an outer one those of an inner one, too."""

    def play(name: str, tool_name: str) -> Any:
        limit = ToolCallLimit(tool_name, run_limit=1, name=f"{name} {tool_name}")
        script = [[tool_name], "done"]
        return Scene(signals, script, [limit], thread_id=name, tools=[tool_name]).play()

    def names(decisions: Sequence[Decision]) -> list[str]:
        return [each.limits[0].limit for each in decisions if each.limits]

    both_inside = asyncio.Barrier(2)

    async def run(name: str) -> tuple[list[str], list[str]]:
        with captured_decisions() as outer:
            await both_inside.wait()
            await play(name, "search")
            with captured_decisions() as inner:
                await play(name, "calc")
            await both_inside.wait()
        await play(name, "search")
        return names(outer), names(inner)

    for name, found in zip("ab", await asyncio.gather(run("a"), run("b")), strict=True):
        assert found == ([f"{name} search", f"{name} calc"], [f"{name} calc"])


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
    given: Any = {"name": "search", "args": "{", "id": call_id, "error": "no JSON"}
    return AIMessage("", invalid_tool_calls=[given])


VALID: list[Sequence[BaseMessage]] = [
    [SystemMessage(""), HI, calling("a", "b"), answer("b", ""), answer("a", " "), DONE, HI],
    [HI, calling("a", text="let me see"), answer("a"), calling("a"), answer("a")],
    [HI, unparsed("a"), answer("a"), DONE],
    [HI, HI, DONE, DONE],
    [HumanMessage([{"type": "image", "url": "x"}]), AIMessage(["", "done"])],
    (HI,),
]


def test_a_valid_history_is_accepted() -> None:
    """Answers in any order, empty ones, an id again, what cannot be parsed, turns of one role."""
    for messages in VALID:
        assert_valid_history(messages)


CALLER = "messages[1] (AIMessage)"
NO_ID = (
    f"{CALLER} calls 'search' without an id. Every tool call needs an id, or no answer can name it."
)
AGAIN = (
    "messages[3] (ToolMessage) answers the call 'a' again, after messages[2] (ToolMessage). "
    "Every tool call needs exactly one answer."
)
TWICE = f"{CALLER} makes two calls with the id 'a'. Every call of a message needs an id of its own."
OPEN = f"{CALLER} calls 'search' (id 'a') and gets no answer. A ToolMessage must answer the call"
BEHIND = "A ToolMessage must directly follow the AIMessage that makes its call."
EMPTY = "Some providers refuse an empty message."
ANOTHERS = f"messages[2] (ToolMessage) answers the call 'b', which {CALLER} does not make. {BEHIND}"
NO_CALL = f"messages[0] (ToolMessage) answers the call 'a', which no message makes. {BEHIND}"
INVALID: list[tuple[Sequence[BaseMessage], str]] = [
    ([], "There are no messages. A request needs at least one."),
    ([HI, calling("b", None)], NO_ID),
    ([HI, calling("a", "a"), answer("a"), answer("a")], TWICE),
    ([HI, calling("a"), HI, answer("a")], f"{OPEN} before messages[2] (HumanMessage)."),
    ([HI, calling("a")], f"{OPEN} before the history ends."),
    ([HI, unparsed("a")], f"{OPEN} before the history ends."),
    ([HI, calling("a"), answer("a"), answer("a"), DONE], AGAIN),
    ([HI, calling("a"), answer("b")], ANOTHERS),
    ([answer("a"), DONE], NO_CALL),
    ([HI, AIMessage(" "), HI], f"{CALLER} is empty and calls no tool: its content is ' '. {EMPTY}"),
    ([HumanMessage("\n")], f"messages[0] (HumanMessage) is empty: its content is '\\n'. {EMPTY}"),
]


def test_an_invalid_history_is_refused() -> None:
    """What providers refuse is named: the message, what is wrong with it, and the rule."""
    for messages, text in INVALID:
        with pytest.raises(AssertionError) as refused:
            assert_valid_history(messages)
        assert str(refused.value) == text


def test_a_refusal_is_short() -> None:
    """However long an id or a text is, the message about it fits on a screen."""
    blanks: list[str | dict[str, Any]] = [{"type": "text", "text": " " * 1_000_000}] * 10
    for messages in ([HI, calling("x" * 1_000_000)], [HumanMessage(blanks)]):
        with pytest.raises(AssertionError) as refused:
            assert_valid_history(messages)
        assert len(str(refused.value)) < 1_000


def test_no_history_at_all() -> None:
    """What is no list of LangChain messages is a TypeError with the remedy."""
    bad: Any = {"messages": []}, "hi", [HI, ("ai", "hi")]
    for given in bad:
        with pytest.raises(
            TypeError, match=r'messages must be .*, not .*: give result\["messages"\]'
        ):
            assert_valid_history(given)
