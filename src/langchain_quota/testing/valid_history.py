"""Whether providers accept a message history: the rules that they have in common."""

from collections.abc import Iterator, Mapping, Sequence
from reprlib import Repr
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    InvalidToolCall,
    ToolCall,
    ToolMessage,
)


def assert_valid_history(messages: Sequence[BaseMessage]) -> None:
    """Assert that providers accept a message history: a request's, or that of a finished run.

    OpenAI, Anthropic, Gemini or Bedrock, or all of them, refuse a request that breaks one of these
    rules. If the history is stored, every later request is refused, too.

    1. Every tool call has an id, which no other call of its message has.
    2. Every tool call has exactly one answer: a `ToolMessage` with its id. The answers to a message
       follow it directly, in any order. They may be empty.
    3. Every `ToolMessage` is such an answer.
    4. A `HumanMessage` is not empty, nor is an `AIMessage` that calls no tool. White space alone is
       empty.

    A call whose arguments could not be parsed (`invalid_tool_calls`) needs its answer, too: it is
    sent like any other. `create_agent` adds that answer to the request, not to the state. Rules of
    a single provider, such as the form of an id, are not checked.

    Args:
        messages: The messages, oldest first: the `messages` of a `ModelCall`, or those of an
            agent's result.

    Raises:
        AssertionError: The history breaks a rule, or is empty. The text has the index of the
            message, what is wrong with it, and the rule.
        TypeError: `messages` is not a list of LangChain messages.

    Examples:
        >>> from langchain.agents import create_agent
        >>> from langchain_quota import ToolCallLimitMiddleware
        >>> from langchain_quota.testing import ScriptedChatModel, assert_valid_history
        >>> def search(query: str = "") -> str:
        ...     "Search the web."
        ...     return "nothing found"
        >>> model = ScriptedChatModel(script=[["search", "search"], "That is all I found."])
        >>> limiter = ToolCallLimitMiddleware(tool_name="search", run_limit=1)
        >>> agent = create_agent(model, [search], middleware=[limiter])
        >>> result = agent.invoke({"messages": [("user", "Find it!")]})
        >>> assert_valid_history(result["messages"])
        >>> assert_valid_history(result["messages"][:2])
        Traceback (most recent call last):
        AssertionError: messages[1] (AIMessage) calls 'search' (id 'call_1') and gets no answer. ...
    """
    _check_types(messages)
    if not messages:
        raise AssertionError("There are no messages. A request needs at least one.")
    for index, fault, rule in _faults(messages):
        raise AssertionError(f"{_at(messages, index)} {fault}. {rule}.")


def _check_types(messages: Any) -> None:
    if not isinstance(messages, list | tuple):
        remedy = '. Give its "messages"' if isinstance(messages, Mapping) else ""
        raise TypeError(f"messages must be a list of messages, not {_brief(messages)}{remedy}")
    for index, message in enumerate(messages):
        if not isinstance(message, BaseMessage):
            raise TypeError(
                f"messages[{index}] must be a LangChain message, not {_brief(message)}. "
                "convert_to_messages of langchain_core.messages makes one of it"
            )


def _faults(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str, str]]:
    """Where a history breaks a rule, what is wrong there, and the rule; the first one is right."""
    caller = 0  # the newest message that is no answer
    calls: dict[str | None, str] = {}  # the tools that it calls
    answers: dict[str, int] = {}
    for index, message in enumerate((*messages, None)):
        if isinstance(message, ToolMessage):
            call_id = message.tool_call_id
            if call_id not in calls:
                made = f"{_at(messages, caller)} does not make" if index else "no message makes"
                rule = "A ToolMessage must directly follow the AIMessage that makes its call"
                yield index, f"answers the call {_brief(call_id)}, which {made}", rule
            if call_id in answers:
                first = _at(messages, answers[call_id])
                rule = "Every tool call needs exactly one answer"
                yield index, f"answers the call {_brief(call_id)} again, after {first}", rule
            answers[call_id] = index
            continue
        due = "the history ends" if message is None else _at(messages, index)
        for open_id, tool in calls.items():
            if open_id not in answers:
                fault = f"calls {_brief(tool)} (id {_brief(open_id)}) and gets no answer"
                yield caller, fault, f"A ToolMessage must answer the call before {due}"
        if message is not None:
            yield from ((index, *fault) for fault in _faults_of(message))
        caller, answers = index, {}
        calls = {call["id"]: str(call["name"]) for call in _calls(message)}


def _faults_of(message: BaseMessage) -> Iterator[tuple[str, str]]:
    """What is wrong with a message by itself, and the rule."""
    ids: set[str | None] = set()
    for call in _calls(message):
        if not call["id"]:
            rule = "Every tool call needs an id, or no answer can name it"
            yield f"calls {_brief(str(call['name']))} without an id", rule
        if call["id"] in ids:
            rule = "Every call of a message needs an id of its own"
            yield f"makes two calls with the id {_brief(call['id'])}", rule
        ids.add(call["id"])
    if isinstance(message, HumanMessage | AIMessage) and not ids and _is_empty(message):
        what = " and calls no tool" if isinstance(message, AIMessage) else ""
        fault = f"is empty{what}: its content is {_brief(message.content)}"
        yield fault, "Some providers refuse an empty message"


def _calls(message: BaseMessage | None) -> Sequence[ToolCall | InvalidToolCall]:
    if not isinstance(message, AIMessage):
        return ()
    return (*message.tool_calls, *message.invalid_tool_calls)


def _is_empty(message: BaseMessage) -> bool:
    """Whether there is nothing but white space."""
    content = message.content
    blocks = [content] if isinstance(content, str) else content
    texts = [each if isinstance(each, str) else each.get("text") for each in blocks]
    others = [each for each in blocks if isinstance(each, dict) and each.get("type") != "text"]
    return not others and not any(str(each or "").strip() for each in texts)


def _at(messages: Sequence[BaseMessage], index: int) -> str:
    return f"messages[{index}] ({type(messages[index]).__name__})"


def _brief(value: object) -> str:
    """A value's `repr`, shortened so that it fits into a message."""
    return _BRIEFLY.repr(value)


_BRIEFLY = Repr()
_BRIEFLY.maxstring = _BRIEFLY.maxother = 60
_BRIEFLY.maxlevel = 2
