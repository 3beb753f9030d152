"""Tools for testing limits: a scripted model, the decisions made, whether a history is valid."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from reprlib import Repr
from typing import Any, NoReturn

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    ToolCall,
    ToolCallChunk,
    ToolMessage,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, PrivateAttr

from langchain_quota.decision import Decision
from langchain_quota.locks import fork_safe_lock
from langchain_quota.telemetry import capturing

ToolRequest = str | tuple[str, dict[str, Any]] | ToolCall
"""A tool call of a script: a tool's name, its name and arguments, or LangChain's own form."""

Turn = str | Sequence[ToolRequest] | AIMessage | BaseException
"""One answer of a script: a text, a batch of tool calls, a message, or an exception to raise."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A request that a `ScriptedChatModel` received.

    Attributes:
        messages: The messages.
        tools: The names of the tools that were offered.

    Examples:
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> model = ScriptedChatModel(script=["Hello."])
        >>> answer = model.invoke("Hi!")
        >>> model.calls[0].messages[-1].content
        'Hi!'
    """

    messages: tuple[BaseMessage, ...]
    tools: tuple[str, ...]


class ScriptedChatModel(BaseChatModel):
    """A chat model that plays a script, for tests and demos: no network, no key.

    Attributes:
        script: The answers, one for each model call, in order: a text, a list of tool calls
            (each a tool's name, a `(name, arguments)` pair or a LangChain `ToolCall`), an
            `AIMessage`, or an exception, which is raised. Or a function from the messages to
            such an answer, which keeps concurrent conversations apart.

    Raises:
        RuntimeError: When called beyond the end of the script.

    Examples:
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> model = ScriptedChatModel(script=[["search", "search"], "That is all I found."])
        >>> [call["name"] for call in model.invoke("Find it!").tool_calls]
        ['search', 'search']
        >>> model.invoke("And?").content
        'That is all I found.'
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    script: Any
    _position: int = PrivateAttr(default=0)
    _calls: list[ModelCall] = PrivateAttr(default_factory=list)
    _ids: Iterator[int] = PrivateAttr(default_factory=lambda: count(1))
    _lock: Any = PrivateAttr(default_factory=fork_safe_lock)

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """The requests received so far."""
        return tuple(self._calls)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools, as of LangChain's `BaseChatModel`; each request records their names."""
        names = tuple(_tool_name(tool) for tool in tools)
        return self.bind(offered=names, tool_choice=tool_choice, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,  # noqa: ARG002 - the model interface
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - the same
        **kwargs: Any,
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._next(messages, kwargs))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,  # noqa: ARG002 - the model interface
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        message = self._next(messages, kwargs)
        for chunk in _chunks(message):
            generation = ChatGenerationChunk(message=chunk)
            if run_manager is not None and isinstance(chunk.content, str):
                run_manager.on_llm_new_token(chunk.content, chunk=generation)
            yield generation

    def _next(self, messages: Sequence[BaseMessage], kwargs: dict[str, Any]) -> AIMessage:
        with self._lock:
            self._calls.append(ModelCall(tuple(messages), kwargs.get("offered", ())))
            scripted = None if callable(self.script) else self._turn()
        return self._message(self.script(messages) if scripted is None else scripted)

    def _turn(self) -> Turn:
        if self._position >= len(self.script):
            raise RuntimeError(f"the script has only {len(self.script)} answers")
        turn: Turn = self.script[self._position]
        self._position += 1
        return turn

    def _message(self, turn: Turn) -> AIMessage:
        if isinstance(turn, AIMessage):
            return turn.model_copy()
        if isinstance(turn, str):
            return AIMessage(content=turn)
        if isinstance(turn, BaseException):
            raise turn
        return AIMessage(content="", tool_calls=[self._tool_call(request) for request in turn])

    def _tool_call(self, request: ToolRequest) -> ToolCall:
        if isinstance(request, str):
            return ToolCall(name=request, args={}, id=self._new_id(), type="tool_call")
        if isinstance(request, tuple):
            name, args = request
            return ToolCall(name=name, args=args, id=self._new_id(), type="tool_call")
        return request

    def _new_id(self) -> str:
        return f"call_{next(self._ids)}"


@contextmanager
def captured_decisions() -> Iterator[list[Decision]]:
    """Capture the decisions made in this context, and in tasks and `asyncio.to_thread` from it.

    They are in the list in the order in which they were made.

    Examples:
        >>> import asyncio
        >>> from langchain.agents import create_agent
        >>> from langchain_quota import QuotaMiddleware, ToolCallLimit
        >>> from langchain_quota.testing import ScriptedChatModel, captured_decisions
        >>> def search(query: str = "") -> str:
        ...     "Search the web."
        ...     return "nothing found"
        >>> model = ScriptedChatModel(script=[["search", "search"], "That is all I found."])
        >>> quota = QuotaMiddleware([ToolCallLimit("search", run_limit=1)])
        >>> agent = create_agent(model, [search], middleware=[quota])
        >>> with captured_decisions() as decisions:
        ...     result = asyncio.run(agent.ainvoke({"messages": [("user", "Find it!")]}))
        >>> [f"{decision.call.kind} {decision.outcome}" for decision in decisions]
        ['model allowed', 'tool allowed', 'tool blocked', 'model allowed']
    """
    decisions: list[Decision] = []
    with capturing(decisions):
        yield decisions


def assert_valid_history(messages: Sequence[BaseMessage]) -> None:
    """Assert that providers accept a message history: what a model is sent, or a run ends with.

    A request that breaks one of these rules is refused by OpenAI, Anthropic, Gemini or Bedrock, if
    not by all of them. Where the history is stored, every later request is refused, too.

    1. Every tool call has an id, which no other call of its message has.
    2. Every tool call has exactly one answer: a `ToolMessage` with its id. The answers to a message
       stand right behind it, in any order. They may be empty.
    3. Every `ToolMessage` is such an answer.
    4. A `HumanMessage` is not empty, nor is an `AIMessage` that calls no tool. White space alone is
       empty.

    A call whose arguments could not be parsed (`invalid_tool_calls`) needs its answer, too: it is
    sent like any other. `create_agent` adds that answer to the request, not to the state. What only
    a single provider asks for is not checked, such as the form of an id.

    Args:
        messages: The messages, oldest first: the `messages` of a `ModelCall`, or those of an
            agent's result.

    Raises:
        AssertionError: The history breaks a rule, or is empty. The text has the index of the
            message, what stands there, and the rule.
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


Script = Sequence[Turn] | Callable[[Sequence[BaseMessage]], Turn]
"""What a `ScriptedChatModel` plays."""


def _tool_name(tool: Any) -> str:
    if isinstance(tool, dict):
        function = tool.get("function") or {}
        return str(function.get("name") or tool.get("name") or tool.get("type"))
    return str(getattr(tool, "name", None) or tool.__name__)


def _chunks(message: AIMessage) -> Iterator[AIMessageChunk]:
    """The message in pieces: what has no pieces first, then words, then tool calls."""
    words = message.content.split(" ") if isinstance(message.content, str) else []
    yield AIMessageChunk(
        content="" if words else message.content,
        id=message.id,
        name=message.name,
        additional_kwargs=message.additional_kwargs,
        response_metadata=message.response_metadata,
        usage_metadata=message.usage_metadata,
    )
    for index, word in enumerate(words):
        yield AIMessageChunk(content=word if index == 0 else f" {word}", id=message.id)
    for index, call in enumerate(message.tool_calls):
        yield AIMessageChunk(
            content="",
            id=message.id,
            tool_call_chunks=[
                ToolCallChunk(
                    name=call["name"],
                    args=json.dumps(call["args"]),
                    id=call["id"],
                    index=index,
                    type="tool_call_chunk",
                )
            ],
        )
    yield AIMessageChunk(content="", id=message.id, chunk_position="last")


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
    """A message history as it is read, from the first message to the last.

    Args:
        messages: The messages.
    """

    def __init__(self, messages: Sequence[BaseMessage]) -> None:
        self._messages = messages
        self._caller = 0
        """The index of the newest message that is no answer."""
        self._calls: dict[str, str] = {}
        """The tools that it calls, by the call's id."""
        self._answers: dict[str, int] = {}
        """The indices of the answers to it, likewise."""

    def check(self) -> None:
        """Read the messages.

        Raises:
            AssertionError: There is none, or one breaks a rule.
        """
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
                "A ToolMessage must stand right behind the AIMessage that makes its call",
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
    """A value as Python writes it, and no longer than fits into a message."""
    return _BRIEFLY.repr(value)


_BRIEFLY = Repr()
_BRIEFLY.maxstring = _BRIEFLY.maxother = 60
_BRIEFLY.maxlevel = 2
