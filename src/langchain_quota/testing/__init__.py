"""Tools for testing limits: a scripted model, the decisions made, whether a history is valid."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ToolCall,
    ToolCallChunk,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, PrivateAttr, field_validator

from langchain_quota.arguments import check_count
from langchain_quota.concurrency import fork_safe_lock
from langchain_quota.decision import Decision
from langchain_quota.telemetry import capturing
from langchain_quota.testing.valid_history import assert_valid_history

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
        keep_calls: How many requests `calls` keeps, the newest ones, from 0; `None` for all. A
            process that runs for long needs a bound, because each request has a whole history.
        model: The name of the model that it plays, such as `"gpt-4o"`: a `CostLimit` looks for
            its price in the table `prices=`. Empty for none.

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

    model_config = ConfigDict(arbitrary_types_allowed=True)

    script: Any
    keep_calls: int | None = None
    model: str = ""
    _position: int = PrivateAttr(default=0)
    _calls: deque[ModelCall] = PrivateAttr()
    _ids: Iterator[int] = PrivateAttr(default_factory=lambda: count(1))
    _lock: Any = PrivateAttr(default_factory=fork_safe_lock)

    @field_validator("keep_calls", mode="before")
    @classmethod
    def _check_keep_calls(cls, value: object) -> object:
        if value is not None:
            check_count("keep_calls", value)
        return value

    def model_post_init(self, context: Any, /) -> None:
        """Make the bounded list of requests; see pydantic's `BaseModel`."""
        super().model_post_init(context)
        self._calls = deque(maxlen=self.keep_calls)

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """The requests received so far, or the newest `keep_calls` of them."""
        with self._lock:
            return tuple(self._calls)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools, as in LangChain's `BaseChatModel`; each request records their names."""
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
            self._position += 1
            if not callable(self.script) and self._position > len(self.script):
                raise RuntimeError(f"the script has only {len(self.script)} answers")
            position = self._position
        return self._message(
            self.script(messages) if callable(self.script) else self.script[position - 1]
        )

    def _message(self, turn: Turn) -> AIMessage:
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
        ['tool allowed', 'tool blocked']
    """
    decisions: list[Decision] = []
    with capturing(decisions):
        yield decisions


Script = Sequence[Turn] | Callable[[Sequence[BaseMessage]], Turn]
"""The state of a `ScriptedChatModel`."""


def _tool_name(tool: Any) -> str:
    if isinstance(tool, dict):
        function = tool.get("function") or {}
        return str(function.get("name") or tool.get("name") or tool.get("type"))
    return str(getattr(tool, "name", None) or tool.__name__)


def _chunks(message: AIMessage) -> Iterator[AIMessageChunk]:
    """The message in pieces: first what is not divided, then words, then the tool calls."""
    words = message.content.split(" ") if isinstance(message.content, str) else []
    whole = {"id", "name", "additional_kwargs", "response_metadata", "usage_metadata"}
    content = "" if words else message.content
    yield AIMessageChunk(content=content, **message.model_dump(include=whole))
    for index, word in enumerate(words):
        yield AIMessageChunk(content=word if index == 0 else f" {word}", id=message.id)
    calls = [
        ToolCallChunk(
            name=call["name"],
            args=json.dumps(call["args"]),
            id=call["id"],
            index=index,
            type="tool_call_chunk",
        )
        for index, call in enumerate(message.tool_calls)
    ]
    yield AIMessageChunk(content="", id=message.id, tool_call_chunks=calls, chunk_position="last")
