"""GraphQuota: limits for any graph of LangGraph, by a limited model and limited tools."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Unpack

from langchain.agents.middleware.types import ModelRequest, ModelResponse, ToolCallRequest
from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as as_tool
from langgraph.prebuilt import ToolNode

from langchain_quota.agents.graph_limits import GraphLimits, running_as
from langchain_quota.agents.quota import SharedOptions
from langchain_quota.agents.subject_methods import SubjectMethods
from langchain_quota.limits import check_together
from langchain_quota.limits.options import LimitOptions
from langchain_quota.middleware.base import check_store
from langchain_quota.middleware.feature import Request, Response, Tool, ToolAnswer, ToolHandler
from langchain_quota.middleware.history import answer_of_blocked
from langchain_quota.middleware.root_run import watch_root_runs
from langchain_quota.runtime.arguments import UserLine, validate_type
from langchain_quota.runtime.sync_async import Mode, as_async, call_variant, run_sync
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.memory import MemoryStore

Tools = Sequence[Tool | Callable[..., object]]


class _OfGraph(partial[ToolNode]):
    """`GraphQuota.tools`, over which LangChain iterates if the quota is in `middleware`."""

    def __iter__(self) -> Iterator[Tool]:
        """Raise a `TypeError` that says what to write."""
        raise TypeError(
            "GraphQuota is no middleware: write middleware=[QuotaMiddleware([…])] for create_agent"
        )


_ToolWrapper = Callable[[Mode, ToolCallRequest, ToolHandler], Awaitable[ToolAnswer]]
_tool_wrapper: ContextVar[_ToolWrapper] = ContextVar("_tool_wrapper")
"""What a node of tools does around each call."""


class GraphQuota(SubjectMethods):
    """Holds any graph to many limits, by a limited model and limited tools.

    Limits, counts, messages, exceptions and telemetry are those of `QuotaMiddleware`. A run is one
    invocation of the outermost graph, with its resumes; a sub-graph counts by itself. Make a
    `GraphQuota` when the program starts.

    Args:
        limits: The limits, at least one, each under a name of its own.
        name: The agent's name in telemetry.
        store: Keeps the counts; an attribute, too. By default a `MemoryStore`, with which a
            `thread_limit` is a `QuotaWarning`: its count ends with the process.
        options: The other arguments of `QuotaMiddleware`, except `charge_all_models`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no limit, or arguments do not go together; see `QuotaMiddleware`.

    Examples:
        >>> from langchain_quota import GraphQuota, ToolCallLimit
        >>> limits = GraphQuota([ToolCallLimit("search", run_limit=2)])
    """

    def __init__(
        self,
        limits: Sequence[LimitOptions],
        *,
        name: str | None = None,
        store: QuotaStore | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        known = check_together(limits)
        validate_type("name", name, str | None, "a string or None")
        check_store(store, known)
        if store is None and any(limit.thread_limit is not None for limit in known):
            UserLine.of_caller().warn(
                "GraphQuota has a thread limit and no store: the count of a thread ends with this "
                "process. Give it store=RedisStore(), or store=MemoryStore() if that is meant"
            )
        self.store: QuotaStore = MemoryStore() if store is None else store
        shared = store is not None
        self._limits = GraphLimits(known, agent=name, shared=shared, store=self.store, **options)
        self.kernel = self._limits.kernel
        vars(self)["tools"] = _OfGraph(self.tools)
        watch_root_runs()

    def model(self, llm: str | BaseChatModel, tools: Tools = ()) -> BaseChatModel:
        """Return a chat model that is held to the limits, as are the tool calls that it makes.

        Where a limit refuses its call, or ends the run, its answer is the final text. It streams
        its own answer in one piece, and to LangGraph's `stream_mode="messages"` word by word.

        Args:
            llm: The chat model, without tools, or its name, as `init_chat_model` takes it.
            tools: The tools that it is offered; `bind_tools` replaces them.

        Raises:
            TypeError: `llm` is no chat model, or has its tools bound already.
        """
        inner = init_chat_model(llm) if isinstance(llm, str) else llm
        if not isinstance(inner, BaseChatModel):
            raise TypeError(
                f"llm must be a chat model without tools bound, not a {type(llm).__name__}: its "
                "tools are the second argument, and its fallbacks come after it, as in "
                "limits.model(llm).with_fallbacks([limits.model(other)])"
            )
        return _LimitedModel(limits=self._limits, inner=inner, offered=_as_tools(tools))

    def tools(self, tools: Tools, **options: object) -> ToolNode:
        """Return a node of tools that answers the calls which a limit refuses, and runs the others.

        It also checks the calls of a model without limits, and all calls if a tool limit can
        `"ask"`: the question comes before any call of the message runs.

        Args:
            tools: The tools.
            options: Further arguments of `ToolNode`, except its wrappers.
        """
        self._limits.kernel.runs_tools = True
        return _LimitedTools(self._limits, tools, options)


class _LimitedTools(ToolNode):
    """A node of tools that checks all its calls before it runs one."""

    def __init__(self, limits: GraphLimits, tools: Tools, options: dict[str, Any]) -> None:
        self._limits, self._key = limits, options.get("messages_key", "messages")
        super().__init__(
            [tool for tool in tools if not isinstance(tool, dict)],
            wrap_tool_call=lambda request, call: run_sync(
                _run_wrapper("", request, as_async(call))
            ),
            awrap_tool_call=partial(_run_wrapper, "a"),
            **options,
        )

    async def _run_limited(
        self,
        mode: Mode,
        /,
        input: object,  # noqa: A002 - as LangChain calls it
        config: RunnableConfig | None = None,
        **options: Any,
    ) -> object:
        requests: list[ToolCallRequest] = []

        async def collect(_: Mode, request: ToolCallRequest, __: ToolHandler) -> ToolAnswer:
            requests.append(request)
            return ToolMessage("", tool_call_id=request.tool_call["id"])

        async def run_or_answer(
            mode: Mode, request: ToolCallRequest, call: ToolHandler
        ) -> ToolAnswer:
            call_id, name = request.tool_call["id"], request.tool_call["name"]
            blocked = answers.get(call_id)
            if blocked is not None:
                return answer_of_blocked(str(call_id), name, *blocked)

            async def call_in_graph(inner: ToolCallRequest) -> ToolAnswer:
                return await call(inner.override(state=request.state))

            limited = request.override(state=state)
            return await self._limits.kernel.call_tool(mode, limited, call_in_graph)

        with running_as(self._limits.agent, config) as named:
            # The first pass runs nothing: the node itself says which calls it would make.
            _tool_wrapper.set(collect)
            variants = super().invoke, super().ainvoke
            result = await call_variant(mode, *variants, input, named, **options)
            if requests:
                state, answers = await self._limits.check_tools(mode, requests, self._key)
                _tool_wrapper.set(run_or_answer)
                result = await call_variant(mode, *variants, input, named, **options)
            return result

    def invoke(self, *args: Any, **options: Any) -> object:
        return run_sync(self._run_limited("", *args, **options))

    async def ainvoke(self, *args: Any, **options: Any) -> object:
        return await self._run_limited("a", *args, **options)


class _LimitedModel(BaseChatModel):
    """A chat model that is held to limits, whatever is bound to it."""

    limits: GraphLimits
    inner: BaseChatModel
    offered: tuple[Tool, ...] = ()
    settings: dict[str, Any] = {}  # noqa: RUF012 - a field

    @property
    def _llm_type(self) -> str:
        return "limited"

    @property
    def bind_tools(self) -> Any:
        """The model's `bind_tools`, with its parameters, because frameworks inspect them."""

        def bound(tools: Tools, **options: object) -> BaseChatModel:
            settings = {**self.settings, **options}
            return self.model_copy(update={"offered": _as_tools(tools), "settings": settings})

        return wraps(self.inner.bind_tools)(bound)

    def with_structured_output(self, schema: Any, **options: Any) -> Runnable[Any, Any]:
        """Call the model's `with_structured_output`; a blocked call returns `None`."""
        inner_output = self.inner.with_structured_output(schema, **options)

        def structured(model: BaseChatModel) -> Runnable[Any, Any]:
            if model is self.inner:
                return inner_output
            return model.with_structured_output(schema, **options)

        bound: Any = {"structured": structured}
        return RunnableLambda(partial(self.invoke, **bound), partial(self.ainvoke, **bound))

    async def _call_limited(
        self,
        mode: Mode,
        /,
        input: LanguageModelInput,  # noqa: A002 - as LangChain calls it
        config: RunnableConfig | None = None,
        **options: Any,
    ) -> object:
        structured = options.pop("structured", None)
        responses: list[object] = []

        async def call(request: Request) -> Response:
            bound: Runnable[Any, Any] = request.model.bind(**request.model_settings)
            if structured:
                bound = structured(request.model)
            elif request.tools:
                bound = request.model.bind_tools(request.tools, **request.model_settings)
            response = await call_variant(
                mode, bound.invoke, bound.ainvoke, request.messages, config
            )
            responses.append(response)
            # A tool that only gives the answer its form is no call to check.
            return ModelResponse([AIMessage("") if structured else response])

        messages: list[Any] = self._convert_input(input).to_messages()
        request = ModelRequest(
            model=self.inner,
            messages=messages,
            tools=[] if structured else [*self.offered],
            model_settings={
                **self.settings,
                **{name: value for name, value in options.items() if value is not None},
            },
        )
        answer = await self.limits.call_model(mode, request, call)
        return next(iter(responses), None) if structured else answer

    def invoke(self, *args: Any, **options: Any) -> Any:
        return run_sync(self._call_limited("", *args, **options))

    async def ainvoke(self, *args: Any, **options: Any) -> Any:
        return await self._call_limited("a", *args, **options)

    def _generate(self, messages: list[BaseMessage], *_: object, **options: object) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.invoke(messages, **options))])


async def _run_wrapper(mode: Mode, request: ToolCallRequest, call: ToolHandler) -> ToolAnswer:
    return await _tool_wrapper.get()(mode, request, call)


def _as_tools(tools: Tools) -> tuple[Tool, ...]:
    return tuple(tool if isinstance(tool, BaseTool | dict) else as_tool(tool) for tool in tools)
