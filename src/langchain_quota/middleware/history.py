"""Tool calls in a message history: pending, answered and dangling ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolCall, ToolMessage


@dataclass(frozen=True, slots=True)
class PendingCalls:
    """The tool calls of the newest AIMessage that wait for an answer.

    Attributes:
        message: The AIMessage.
        calls: Its calls without an answer, under the name of the tool that will run.
        structured: Whether another call of the message has delivered the structured response.
    """

    message: AIMessage
    calls: tuple[ToolCall, ...]
    structured: bool


def pending_calls(state: Mapping[str, Any]) -> PendingCalls | None:
    """The calls that are about to run; `None` if the newest AIMessage made none.

    A call that a reviewer edited (`hitl_edited_tool_calls`, written by LangChain's human review)
    is given as what it became. Calls without an id cannot be answered and are left out.
    """
    messages: Sequence[AnyMessage] = state.get("messages") or ()
    answers = []
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            break
        if isinstance(message, ToolMessage):
            answers.append(message)
    else:
        return None
    if not message.tool_calls:
        return None
    answered = {each.tool_call_id for each in answers}
    structured = state.get("structured_response") is not None and any(
        each.status != "error" for each in answers
    )
    return PendingCalls(message, _unanswered(message, answered, state), structured)


@dataclass(frozen=True, slots=True)
class DanglingCalls:
    """The calls of one AIMessage that were left without an answer.

    Attributes:
        message: The AIMessage.
        calls: Its calls without an answer, under the name of the tool that would have run.
        end: The index behind the answers that it has: where theirs belong.
    """

    message: AIMessage
    calls: tuple[ToolCall, ...]
    end: int


def dangling_calls(state: Mapping[str, Any]) -> list[DanglingCalls]:
    """The calls that runs before this one left without an answer, in order."""
    messages: Sequence[AnyMessage] = state.get("messages") or ()
    found = []
    answered: set[str] = set()
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
        elif isinstance(message, AIMessage):
            unanswered = _unanswered(message, answered, state) if message.tool_calls else ()
            if unanswered:
                end = index + 1
                while end < len(messages) and isinstance(messages[end], ToolMessage):
                    end += 1
                found.append(DanglingCalls(message, unanswered, end))
            answered = set()
    return found[::-1]


def unfinished_calls(
    state: Mapping[str, Any], message_id: str
) -> tuple[AIMessage, tuple[ToolCall, ...]] | None:
    """The calls of a message that no tool is known to have finished, and the message.

    They have no answer; or an error only, and the model has not answered since: another middleware
    may have put it where there was none.
    """
    messages: Sequence[AnyMessage] = state.get("messages") or ()
    answers: list[ToolMessage] = []
    is_newest = True
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            answers.append(message)
        elif isinstance(message, AIMessage):
            if message.id == message_id:
                finished = {
                    each.tool_call_id for each in answers if not is_newest or each.status != "error"
                }
                return message, _unanswered(message, finished, state)
            answers, is_newest = [], False
    return None


def answered_history(
    messages: Sequence[AnyMessage], dangling: Sequence[DanglingCalls], content: str
) -> list[AnyMessage]:
    """The messages with an answer for each dangling call, behind the message that made it."""
    history = list(messages)
    for each in reversed(dangling):
        names = {str(call["id"]): call["name"] for call in each.calls}
        history[each.end : each.end] = [
            answer(call_id, name, content) for call_id, name in names.items()
        ]
    return history


def answer(call_id: str, tool: str | None, content: str) -> ToolMessage:
    """The error message that answers a call which does not run."""
    return ToolMessage(content=content, tool_call_id=call_id, name=tool, status="error")


def since(messages: Sequence[AnyMessage], turn: str | int | None) -> Sequence[AnyMessage] | None:
    """The messages behind the one that was the newest when a run began; `None` if it is unknown.

    Args:
        messages: The history.
        turn: The id of that message or, where it has none, how many there were.
    """
    if isinstance(turn, int):
        return messages[turn:]
    for index in range(len(messages) - 1, -1, -1):
        if turn is not None and messages[index].id == turn:
            return messages[index + 1 :]
    return None


def newest_name(messages: Sequence[BaseMessage]) -> str | None:
    """The name on the newest AIMessage."""
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            return message.name
    return None


def _unanswered(
    message: AIMessage, answered: set[str], state: Mapping[str, Any]
) -> tuple[ToolCall, ...]:
    edited: Mapping[str, Any] = state.get("hitl_edited_tool_calls") or {}
    return tuple(
        _as_edited(call, edited.get(call["id"]))
        for call in message.tool_calls
        if call["id"] is not None and call["id"] not in answered
    )


def _as_edited(call: ToolCall, action: Mapping[str, Any] | None) -> ToolCall:
    return call if action is None else {**call, "name": action["name"], "args": action["args"]}
