"""Whether providers accept a message history: the rules that they have in common."""

from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Any, NoReturn

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage


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
    _History(messages).check()


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


class _History:
    """Reads a message history, from the first message to the last."""

    def __init__(self, messages: Sequence[BaseMessage]) -> None:
        self._messages = messages
        self._caller = 0
        """The index of the newest message that is no answer."""
        self._calls: dict[str, str] = {}
        """The tools that it calls, by the call's id."""
        self._answers: dict[str, int] = {}
        """The indices of the answers to it, by the call's id."""

    def check(self) -> None:
        """Read the messages."""
        if not self._messages:
            raise AssertionError("There are no messages. A request needs at least one.")
        for index, message in enumerate(self._messages):
            if isinstance(message, ToolMessage):
                self._add_answer(index, message)
                continue
            self._check_answered(f"before {self._at(index)}")
            self._caller, self._calls, self._answers = index, {}, {}
            if isinstance(message, AIMessage):
                self._add_calls(index, message)
            self._check_content(index, message)
        self._check_answered("before the history ends")

    def _add_calls(self, index: int, message: AIMessage) -> None:
        for call in (*message.tool_calls, *message.invalid_tool_calls):
            call_id, tool = call["id"], str(call["name"])
            if not call_id:
                self._refuse(
                    index,
                    f"calls {_brief(tool)} without an id",
                    "Every tool call needs an id, or no answer can name it",
                )
            if call_id in self._calls:
                self._refuse(
                    index,
                    f"makes two calls with the id {_brief(call_id)}",
                    "Every call of a message needs an id of its own",
                )
            self._calls[call_id] = tool

    def _add_answer(self, index: int, message: ToolMessage) -> None:
        call_id = message.tool_call_id
        if call_id not in self._calls:
            caller = f"{self._at(self._caller)} does not make" if index else "no message makes"
            self._refuse(
                index,
                f"answers the call {_brief(call_id)}, which {caller}",
                "A ToolMessage must directly follow the AIMessage that makes its call",
            )
        if call_id in self._answers:
            self._refuse(
                index,
                f"answers the call {_brief(call_id)} again, after "
                f"{self._at(self._answers[call_id])}",
                "Every tool call needs exactly one answer",
            )
        self._answers[call_id] = index

    def _check_answered(self, due: str) -> None:
        for call_id, tool in self._calls.items():
            if call_id not in self._answers:
                self._refuse(
                    self._caller,
                    f"calls {_brief(tool)} (id {_brief(call_id)}) and gets no answer",
                    f"A ToolMessage must answer the call {due}",
                )

    def _check_content(self, index: int, message: BaseMessage) -> None:
        if (
            self._calls
            or not isinstance(message, HumanMessage | AIMessage)
            or _has_content(message)
        ):
            return
        calls = " and calls no tool" if isinstance(message, AIMessage) else ""
        self._refuse(
            index,
            f"is empty{calls}: its content is {_brief(message.content)}",
            "Some providers refuse an empty message",
        )

    def _at(self, index: int) -> str:
        return f"messages[{index}] ({type(self._messages[index]).__name__})"

    def _refuse(self, index: int, what: str, rule: str) -> NoReturn:
        raise AssertionError(f"{self._at(index)} {what}. {rule}.")


def _has_content(message: BaseMessage) -> bool:
    """Whether there is something else than white space."""
    content = message.content
    return any(map(_is_content, [content] if isinstance(content, str) else content))


def _is_content(block: str | dict[str, Any]) -> bool:
    if isinstance(block, str):
        return bool(block.strip())
    return block.get("type") != "text" or bool(str(block.get("text") or "").strip())


def _brief(value: object) -> str:
    """A value's `repr`, shortened so that it fits into a message."""
    return _BRIEFLY.repr(value)


_BRIEFLY = Repr()
_BRIEFLY.maxstring = _BRIEFLY.maxother = 60
_BRIEFLY.maxlevel = 2
