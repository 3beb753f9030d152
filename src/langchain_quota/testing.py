"""Tools for testing limits: a scripted model, captured decisions, a check of histories."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from reprlib import Repr
from typing import Any, ClassVar

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    InvalidToolCall,
    ToolCall,
    ToolMessage,
)
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import PrivateAttr, field_validator

from langchain_quota.core.decision import Decision
from langchain_quota.runtime.arguments import validate_count
from langchain_quota.runtime.sync_async import fork_safe_lock
from langchain_quota.telemetry import capturing

__all__ = [
    "ModelCall",
    "Script",
    "ScriptedChatModel",
    "ToolRequest",
    "Turn",
    "assert_valid_history",
    "captured_decisions",
]

ToolRequest = str | tuple[str, dict[str, Any]] | ToolCall
"""A tool call of a script: a tool's name, its name and arguments, or LangChain's `ToolCall`."""

Turn = str | Sequence[ToolRequest] | AIMessage | BaseException
"""One answer of a script: a text, a batch of tool calls, a message, or an exception to raise."""

Script = Sequence[Turn] | Callable[[Sequence[BaseMessage]], Turn]
"""The script of a `ScriptedChatModel`."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A request that a `ScriptedChatModel` received.

    Attributes:
        messages: The messages.
        tools: The names of the tools that were offered.

    Examples:
        >>> from langchain_quota.testing import ModelCall
        >>> ModelCall(messages=(), tools=("search",)).tools
        ('search',)
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
        keep_calls: How many requests `calls` keeps, the newest ones, from 0; `None` for all. A
            process that runs for long needs a bound, because each request has a whole history.
        model: The name of the model that it plays, such as `"gpt-4o"`, whose price a `CostLimit`
            takes from the table `prices=` or from the list of known models. Empty for none.

    Raises:
        TypeError: `keep_calls` has the wrong type.
        ValueError: `keep_calls` is below 0.
        RuntimeError: When called beyond the end of the script.

    Examples:
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> model = ScriptedChatModel(script=[["search", "search"], "That is all I found."])
        >>> [call["name"] for call in model.invoke("Find it!").tool_calls]
        ['search', 'search']
        >>> model.invoke("And?").content
        'That is all I found.'
    """

    script: Any
    keep_calls: int | None = None
    model: str = ""
    _position: int = PrivateAttr(default=0)
    _calls: deque[ModelCall] = PrivateAttr()
    _ids: Iterator[int] = PrivateAttr(default_factory=lambda: count(1))
    _lock: Any = PrivateAttr(default_factory=fork_safe_lock)
    _llm_type: ClassVar[Any] = "scripted"

    @field_validator("keep_calls", mode="before")
    @classmethod
    def _check_keep_calls(cls, value: object) -> object:
        if value is not None:
            validate_count("keep_calls", value)
        return value

    def model_post_init(self, context: object, /) -> None:
        """Create the bounded list of requests; see pydantic's `BaseModel`."""
        super().model_post_init(context)
        self._calls = deque(maxlen=self.keep_calls)

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """The requests received so far, or the newest `keep_calls` of them."""
        with self._lock:
            return tuple(self._calls)

    def bind_tools(
        self, tools: Sequence[object], *, tool_choice: str | None = None, **kwargs: object
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools, as in LangChain's `BaseChatModel`; each request records their names."""
        names = tuple(_tool_name(tool) for tool in tools)
        return self.bind(offered=names, tool_choice=tool_choice, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **options: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop, **options)
        # The list of prices would look for the model of a provider "scriptedchatmodel".
        params.pop("ls_provider", None)
        return params

    def _generate(self, messages: list[BaseMessage], *_: object, **options: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._next(messages, options))])

    def _stream(
        self, messages: list[BaseMessage], *_: object, **options: Any
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in _chunks(self._next(messages, options)):
            yield ChatGenerationChunk(message=chunk)

    def _next(self, messages: Sequence[BaseMessage], options: dict[str, Any]) -> AIMessage:
        with self._lock:
            self._calls.append(ModelCall(tuple(messages), options.get("offered", ())))
            self._position += 1
            position = self._position
        if callable(self.script):
            turn = self.script(messages)
        elif position > len(self.script):
            raise RuntimeError(f"the script has only {len(self.script)} answers")
        else:
            turn = self.script[position - 1]
        if isinstance(turn, AIMessage):
            return turn.model_copy()
        if isinstance(turn, str):
            return AIMessage(content=turn)
        if isinstance(turn, BaseException):
            raise turn
        return AIMessage(content="", tool_calls=[self._tool_call(request) for request in turn])

    def _tool_call(self, request: ToolRequest) -> ToolCall:
        if isinstance(request, dict):
            return request
        name, args = (request, {}) if isinstance(request, str) else request
        return ToolCall(name=name, args=args, id=f"call_{next(self._ids)}", type="tool_call")


@contextmanager
def captured_decisions() -> Iterator[list[Decision]]:
    """Capture the decisions made in this context, and in tasks and `asyncio.to_thread` begun in it.

    The list has them in the order in which they were made.

    Examples:
        >>> from langchain.agents import create_agent
        >>> from langchain_quota import ModelCallLimit, QuotaMiddleware
        >>> from langchain_quota.testing import ScriptedChatModel, captured_decisions
        >>> quota = QuotaMiddleware([ModelCallLimit(run_limit=1)])
        >>> agent = create_agent(ScriptedChatModel(script=["Hello."]), middleware=[quota])
        >>> with captured_decisions() as decisions:
        ...     result = agent.invoke({"messages": [("user", "Hi!")]})
        >>> [f"{decision.call.kind} {decision.outcome}" for decision in decisions]
        ['model allowed']
    """
    decisions: list[Decision] = []
    with capturing(decisions):
        yield decisions


def _tool_name(tool: object) -> str:
    if isinstance(tool, dict):
        function = tool.get("function") or {}
        return str(function.get("name") or tool.get("name") or tool.get("type"))
    return str(getattr(tool, "name", None) or getattr(tool, "__name__", tool))


def _chunks(message: AIMessage) -> Iterator[AIMessageChunk]:
    """Yield the message in chunks: first what is not divided, then words, then the tool calls."""
    words = message.content.split(" ") if isinstance(message.content, str) else []
    whole = {"id", "name", "additional_kwargs", "response_metadata", "usage_metadata"}
    content = "" if words else message.content
    yield AIMessageChunk(content=content, **message.model_dump(include=whole))
    for index, word in enumerate(words):
        yield AIMessageChunk(content=word if index == 0 else f" {word}", id=message.id)
    calls = [
        tool_call_chunk(
            name=call["name"], args=json.dumps(call["args"]), id=call["id"], index=index
        )
        for index, call in enumerate(message.tool_calls)
    ]
    yield AIMessageChunk(content="", id=message.id, tool_call_chunks=calls, chunk_position="last")


_BRIEFLY = Repr()
_BRIEFLY.maxstring = _BRIEFLY.maxother = 60
_BRIEFLY.maxlevel = 2
_brief = _BRIEFLY.repr


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

    A call whose arguments could not be parsed (`invalid_tool_calls`) needs its answer, too.
    `create_agent` adds it to the request, not to the state. Rules of a single provider, such as the
    form of an id, are not checked.

    Args:
        messages: The messages, oldest first: the `messages` of a `ModelCall`, or those of an
            agent's result.

    Raises:
        AssertionError: The history breaks a rule, or is empty. The text has the index of the
            message, what is wrong with it, and the rule.
        TypeError: `messages` is not a list of LangChain messages.

    Examples:
        >>> from langchain_core.messages import AIMessage, HumanMessage
        >>> from langchain_quota.testing import assert_valid_history
        >>> assert_valid_history([HumanMessage("Hi!"), AIMessage("Hello.")])
        >>> assert_valid_history([HumanMessage("Hi!"), AIMessage("")])
        Traceback (most recent call last):
        AssertionError: messages[1] (AIMessage) is empty and calls no tool: its content is ''. ...
    """
    value: object = messages
    if not isinstance(value, list | tuple) or not all(isinstance(m, BaseMessage) for m in value):
        raise TypeError(
            f"messages must be a list of LangChain messages, not {_brief(value)}: give "
            'result["messages"], or what convert_to_messages makes'
        )
    if not messages:
        raise AssertionError("There are no messages. A request needs at least one.")
    for index, fault, rule in _faults(messages):
        raise AssertionError(f"{_at(messages, index)} {fault}. {rule}.")


def _faults(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str, str]]:
    """Yield index, fault and rule where a history breaks a rule; only the first one is reliable."""
    caller = 0  # the index of the newest message that is no answer
    calls: dict[str | None, str] = {}  # the names of the tools that it calls, by id
    answers: dict[str, int] = {}
    for index, message in enumerate((*messages, None)):
        if isinstance(message, ToolMessage):
            call_id = message.tool_call_id
            if call_id not in calls:
                origin = f"{_at(messages, caller)} does not make" if index else "no message makes"
                rule = "A ToolMessage must directly follow the AIMessage that makes its call"
                yield index, f"answers the call {_brief(call_id)}, which {origin}", rule
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
    """Yield fault and rule where a message by itself breaks a rule."""
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
        detail = " and calls no tool" if isinstance(message, AIMessage) else ""
        fault = f"is empty{detail}: its content is {_brief(message.content)}"
        yield fault, "Some providers refuse an empty message"


def _calls(message: BaseMessage | None) -> Sequence[ToolCall | InvalidToolCall]:
    if not isinstance(message, AIMessage):
        return ()
    return (*message.tool_calls, *message.invalid_tool_calls)


def _is_empty(message: BaseMessage) -> bool:
    """Return True if a message has no content but white space."""
    content = message.content
    blocks = [content] if isinstance(content, str) else content
    texts = [block if isinstance(block, str) else block.get("text") for block in blocks]
    has_media = any(isinstance(block, dict) and block.get("type") != "text" for block in blocks)
    return not has_media and not any(str(text or "").strip() for text in texts)


def _at(messages: Sequence[BaseMessage], index: int) -> str:
    return f"messages[{index}] ({type(messages[index]).__name__})"
