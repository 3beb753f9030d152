"""Tool calls in a message history: pending, answered and dangling ones."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolCall, ToolMessage

from langchain_quota.core.messages import ABANDONED, NOT_RUN
from langchain_quota.core.stops import STOP, StopReason
from langchain_quota.middleware.state import State

Block = str | dict[str, Any]
"""A part of a message's content."""

_ID_OF_BLOCK = {"tool_use": "id", "tool_call": "id", "function_call": "call_id"}
"""The key that has the tool call's id in a block of a message's content, by the block's type."""

_REASONING = {"reasoning", "thinking", "redacted_thinking"}
"""The types of reasoning blocks: some providers refuse them if their result does not follow."""

EDITED_CALLS = "hitl_edited_tool_calls"
"""The state key under which LangChain's review keeps the edits of the newest message's calls."""

_CALLS = {"tool_calls", "function_call"}
"""Where some providers' classes keep a second form of calls, and send it if there are no others."""


def identified(message: AIMessage, answered: Collection[str] = ()) -> AIMessage:
    """Return the message with an id for every tool call; itself, if none lacks one."""
    # Without an id a call cannot be answered: some providers and parsers give none, or an empty
    # one. The ids follow from the message's id, so that a hook that runs again gives the same ones.
    # Every provider takes them: they are short, and have letters, digits and `_` only.
    missing = [
        index
        for index, call in enumerate(message.tool_calls)
        if not call["id"] and call["id"] not in answered
    ]
    if not missing:
        return message
    if message.id is None:
        # As LangGraph's reducer does. Otherwise our message would follow it, not replace it.
        message.id = str(uuid4())
    used_ids = {call["id"] for call in message.tool_calls}
    calls = list(message.tool_calls)
    for index in missing:
        call_id = next(call_id for call_id in _ids(message.id, index) if call_id not in used_ids)
        calls[index] = {**calls[index], "id": call_id}
    content: str | list[Block] = message.content
    if isinstance(content, list):
        unnamed = [calls[index] for index in missing]
        content = [_identified_block(block, unnamed) for block in content]
    return message.model_copy(update={"tool_calls": calls, "content": content})


def _ids(message_id: str, index: int) -> Iterator[str]:
    """Yield the ids for a call of a message, the first choice first."""
    for choice in count():
        source = f"{message_id}/{index}/{choice}".encode(errors="backslashreplace")
        yield f"call_{sha256(source).hexdigest()[:24]}"


def _identified_block(block: Block, calls: list[ToolCall]) -> Block:
    """Return a content block with the id of its call, and remove the call from `calls`."""
    key = _ID_OF_BLOCK.get(_type(block))
    if key is None or isinstance(block, str) or block.get(key):
        return block
    for index, call in enumerate(calls):
        if call["name"] == block.get("name"):
            return {**block, key: calls.pop(index)["id"]}
    return block


class PendingCalls(NamedTuple):
    """The tool calls of the newest AIMessage that wait for an answer."""

    message: AIMessage
    calls: tuple[ToolCall, ...]
    structured: bool
    replaces: bool = False


def pending_calls(state: State) -> PendingCalls | None:
    """Return the calls that are about to run, or `None` if the newest AIMessage made none."""
    # A call that a reviewer edited is given in its edited form.
    messages: Sequence[AnyMessage] = state.get("messages") or ()
    answers = []
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            answers.append(message)
        if isinstance(message, AIMessage):
            break
    else:
        return None
    if not message.tool_calls:
        return None
    answered = {reply.tool_call_id for reply in answers}
    has_response = state.get("structured_response") is not None
    structured = has_response and any(reply.status != "error" for reply in answers)
    named = identified(message, answered)
    calls = _unanswered(named, answered, state)
    return PendingCalls(named, calls, structured, replaces=named is not message)


def unfinished_calls(
    state: State, message_id: str
) -> tuple[AIMessage, tuple[ToolCall, ...]] | None:
    """Return a message, and those of its calls that no tool is known to have finished."""
    # They have no answer. Or they have only an error, and the model has not answered since: then
    # another middleware may have added that error.
    messages: Sequence[AnyMessage] = state.get("messages") or ()
    answers: list[ToolMessage] = []
    is_newest = True
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            answers.append(message)
        elif isinstance(message, AIMessage):
            if message.id == message_id:
                finished = {
                    reply.tool_call_id
                    for reply in answers
                    if not is_newest or reply.status != "error"
                }
                named = identified(message, finished)
                return named, _unanswered(named, finished, state)
            answers, is_newest = [], False
    return None


def repaired(state: State, *, is_shared: bool) -> list[AnyMessage] | None:
    """Return the messages with an answer after each call that earlier runs left without one.

    `None` if there is none. In a history that a graph shares, calls further up are taken out.
    """
    history: list[AnyMessage] = [*(state.get("messages") or ())]
    answered: set[str] = set()
    has_changed = False
    for index in reversed(range(len(history))):
        message = history[index]
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
        if not isinstance(message, AIMessage):
            continue
        before, answered = answered, set()
        if before.issuperset([call["id"] for call in message.tool_calls]):
            continue
        named = identified(message, before)
        calls = _unanswered(named, before, state)
        has_changed = True
        end = index + 1
        while end < len(history) and isinstance(history[end], ToolMessage):
            end += 1
        if is_shared and end < len(history):
            history[index] = _without(named, calls, ABANDONED)
            continue
        history[index] = named
        names = {str(call["id"]): call["name"] for call in calls}
        history[end:end] = [answer(call_id, name, ABANDONED) for call_id, name in names.items()]
    return history if has_changed else None


def _without(message: AIMessage, calls: Sequence[ToolCall], text: str) -> AIMessage:
    """Return the message without some of its calls, or with a text if nothing is left."""
    removed = {call["id"] for call in calls}
    remaining = [call for call in message.tool_calls if call["id"] not in removed]
    content: str | list[Block] = message.content
    gone = _CALLS
    if not remaining and not str(message.text).strip():
        content, gone = text, _CALLS | _REASONING
    elif isinstance(content, list):
        content = _without_blocks(content, removed)
    kwargs = {key: value for key, value in message.additional_kwargs.items() if key not in gone}
    return message.model_copy(
        update={"tool_calls": remaining, "content": content, "additional_kwargs": kwargs}
    )


def _without_blocks(content: Sequence[Block], removed: Collection[str | None]) -> list[Block]:
    """Return the blocks without those of some calls and the reasoning that led only to them."""
    remaining: list[Block] = []
    led_to_removed = False
    for block in reversed(content):
        key = _ID_OF_BLOCK.get(_type(block))
        if key and isinstance(block, dict) and block.get(key) in removed:
            led_to_removed = True
            continue
        leads_nowhere = led_to_removed and (not remaining or _type(remaining[-1]) in _REASONING)
        if not (leads_nowhere and _type(block) in _REASONING):
            remaining.append(block)
            led_to_removed = False
    return remaining[::-1]


def _type(block: Block) -> str:
    return str(block.get("type")) if isinstance(block, dict) else ""


def answer(
    call_id: str, tool: str | None, content: str, reason: StopReason | None = None
) -> ToolMessage:
    """Return the error message that answers a call which does not run, with the reason as data."""
    artifact = None if reason is None else {STOP: reason}
    return ToolMessage(
        content=content, tool_call_id=call_id, name=tool, status="error", artifact=artifact
    )


def answer_of_blocked(
    call_id: str, tool: str | None, content: str, reason: StopReason | None = None
) -> ToolMessage:
    """Return the answer of a blocked call, which another middleware may have allowed before."""
    message = answer(call_id, tool, content, reason)
    # The mark is not sent to the model. A `RepeatLimit` reads it; no call is refunded by it.
    message.response_metadata[NOT_RUN] = True
    return message


def since(messages: Sequence[AnyMessage], turn: str | int | None) -> Sequence[AnyMessage] | None:
    """Return the messages since a run began, or `None` if its first message is unknown."""
    if isinstance(turn, int):
        return messages[turn:]
    for index in range(len(messages) - 1, -1, -1):
        if turn is not None and messages[index].id == turn:
            return messages[index + 1 :]
    return None


def newest_name(messages: Sequence[BaseMessage]) -> str | None:
    """Return the name of the newest AIMessage."""
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            return message.name
    return None


def as_edited(call: ToolCall, state: State) -> ToolCall:
    """Return a call as a reviewer edited it; the call itself, if nobody did."""
    # LangChain puts them in place around the tool.
    edited: Mapping[str, ToolCall] = state.get(EDITED_CALLS) or {}
    action = edited.get(str(call["id"]))
    return call if action is None else {**call, "name": action["name"], "args": action["args"]}


def _unanswered(message: AIMessage, answered: set[str], state: State) -> tuple[ToolCall, ...]:
    if not (answered or state.get(EDITED_CALLS)):
        return tuple(message.tool_calls)
    return tuple(
        as_edited(call, state) for call in message.tool_calls if call["id"] not in answered
    )
