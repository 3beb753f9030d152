"""GraphQuota: limits for any graph of LangGraph, by a limited model and limited tools."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, ClassVar, Unpack
from uuid import uuid4
from weakref import WeakKeyDictionary

from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, ensure_config
from langchain_core.runnables.config import merge_configs, var_child_runnable_config
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as as_tool
from langgraph.errors import GraphInterrupt
from langgraph.prebuilt import ToolNode

from langchain_quota.agents.inline import InlineState, make_model_call
from langchain_quota.agents.quota import QuotaMiddleware, SharedOptions
from langchain_quota.limits import Limit, check_together
from langchain_quota.middleware.calls import Batch
from langchain_quota.middleware.context import call_context, digest, running_runtime
from langchain_quota.middleware.feature import Request, Response
from langchain_quota.middleware.flow import Conclude, Kernel
from langchain_quota.middleware.history import answer_of_blocked, pending_calls, repaired
from langchain_quota.middleware.root_run import RootRun, StoreSequence, root_run, watch_root_runs
from langchain_quota.middleware.state import LEDGER, Ledger, merge_ledgers
from langchain_quota.runtime import compat
from langchain_quota.runtime.arguments import UserLine
from langchain_quota.runtime.sync_async import Mode, as_async, call_variant, run_sync
from langchain_quota.stores import QuotaStore, check_store
from langchain_quota.stores.memory import MemoryStore

Tools = Sequence[BaseTool | Callable[..., Any] | dict[str, Any]]
Refused = Mapping[Any, str | None]  # what answers a call that does not run, by the call's id

_calling: ContextVar[Any] = ContextVar("_calling")  # what becomes of a call in a node of tools
_MARK = "langchain_quota"  # in a message's `response_metadata`: which of its calls are refused
_TAKEN = "\0"  # in place of an answer: a task has taken the call, another one makes a further call
_MAX_RUNS = 10_000  # that are remembered; of one that is forgotten the store keeps the counts


class GraphQuota:
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
        limits: Sequence[Limit],
        *,
        name: str | None = None,
        store: QuotaStore | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        check_together(limits)
        check_store(store, limits)
        if store is None and any(limit.thread_limit is not None for limit in limits):
            UserLine.of_caller().warn(
                "GraphQuota has a thread limit and no store: the count of a thread ends with this "
                "process. Give it store=RedisStore(), or store=MemoryStore() if that is meant"
            )
        self.store: QuotaStore = MemoryStore() if store is None else store
        shared = store is not None
        self._limits = _Limits(limits, agent=name, shared=shared, store=self.store, **options)
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
                "tools are the second argument"
            )
        return _LimitedModel(limits=self._limits, inner=inner, offered=_as_tools(tools))

    def tools(self, tools: Tools, **options: object) -> ToolNode:
        """Return a node of tools: it answers the calls that a limit refuses, and runs the others.

        It also checks the calls of a model without limits, and all calls if a tool limit can
        `"ask"`: the question comes before any call of the message runs.

        Args:
            tools: The tools.
            options: Further arguments of `ToolNode`, except its wrappers.
        """
        self._limits.kernel.runs_tools = True
        return _LimitedTools(self._limits, tools, options)


class _Run:
    """The memory of a run, in place of a graph's state."""

    def __init__(self, root: str, state: dict[str, Any]) -> None:
        self.root, self.state = root, state
        self.ended: AIMessage | None = None  # the answer that has ended it
        # What answers the calls of a message, `None` if they run; and those of a task.
        self.judged: dict[Any, str | None] = {}
        self.taken: dict[str, Refused] = {}

    def learn(self, update: Any) -> bool:
        """Apply an update of the state; return whether it ends the run."""
        new = {key: value for key, value in update.items() if key not in {"messages", "jump_to"}}
        new_ledger = merge_ledgers(self.state[LEDGER], new.get(LEDGER) or Ledger())
        self.state.update(new, langchain_quota=new_ledger)
        return "jump_to" in update


class _GraphKernel(Kernel):
    """Stores the questions to people, and drops answers that are not needed any more."""

    graph: "_Limits"

    async def _check_and_record(self, mode: Mode, batch: Batch, conclude: Conclude) -> Any:
        question = batch.message or (batch.question if self.graph.asks else "")
        try:
            update = await super()._check_and_record(mode, batch, conclude)
        except GraphInterrupt:
            await self.graph.notes.add(mode, "asked", question)
            raise
        if batch.answer is None:
            await self.graph.pass_over(mode, question)
        return update


class _Limits(QuotaMiddleware[Any, Any]):
    """Checks the calls of a graph."""

    name = "GraphQuota"
    kernel: _GraphKernel
    kernel_kind = _GraphKernel

    def __init__(self, limits: Any, *, agent: str | None, shared: bool, **options: Any) -> None:
        super().__init__(limits, **options)
        self.kernel.graph = self
        self.agent, self._is_shared = agent, shared
        self.kernel.runs_tools = False
        asking = {limit.kind for limit in limits if limit.exit_behavior == "ask"}
        self.asks, self._asks_at_tools = bool(asking), bool(asking - {"model"})
        assert self.kernel.store is not None  # noqa: S101 - for the type checker: see GraphQuota
        self.notes = StoreSequence(self.kernel.store)
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._roots: WeakKeyDictionary[RootRun, str] = WeakKeyDictionary()

    async def ask(self, mode: Mode, messages: list[Any], call: Any, **request: Any) -> Any:
        """Return the answer of a model, or of the limits in its place."""
        with _running_as(self.agent):
            run = await self._run(mode, messages)
            if run.ended is not None:
                return run.ended.model_copy(update={"id": str(uuid4())})
            state: Any = {**run.state, "messages": messages}
            request["messages"] = repaired(state, is_shared=False) or messages
            # Each call is charged, also if a node calls its model twice or runs again.
            runtime = running_runtime(uuid4().hex)
            step = InlineState(ModelRequest(state=state, runtime=runtime, **request))
            await make_model_call(self.kernel, mode, step, call)
            run.learn(step.written)
            answer: AIMessage = step.made[-1]
            if not answer.tool_calls:
                return answer
            final, refused = None, dict[str, Any]()
            # A question behind the model's call would have the call made again.
            if not self._asks_at_tools:
                final, refused = await self._judge(mode, run, step, uuid4().hex)
            if (refused or self._asks_at_tools) and not (final or self.kernel.runs_tools):
                raise RuntimeError(
                    "a limit refuses a tool call, and nothing answers it: give the graph "
                    "limits.tools([…]) of the same GraphQuota in place of its ToolNode"
                )
            if final or self._asks_at_tools:
                return final or answer
            judged = _judged(answer, refused)
            run.judged |= judged
            if self._is_shared:
                await self.notes.add(mode, "judged", digest(run.root, repr(judged)))
            marked = {**answer.response_metadata, _MARK: {"refused": refused}}
            return answer.model_copy(update={"response_metadata": marked})

    async def refused(self, mode: Mode, requests: list[Any], key: str) -> tuple[Any, Refused]:
        """Return the state in which tool calls run, and the answers of those that do not run."""
        state, calls = requests[0].state, [request.tool_call for request in requests]
        state = state.get(key) if isinstance(state, Mapping) else getattr(state, key, state)
        history = [message for message in state or () if not isinstance(message, dict)]
        run = await self._run(mode, history)
        waiting = pending_calls({"messages": history})
        ids = {call["id"] for call in waiting.calls} if waiting else set[Any]()
        made_by = waiting.message if waiting and ids.issuperset(c["id"] for c in calls) else None
        names = [(made_by and made_by.id, call["id"], call["name"]) for call in calls]
        work = call_context(running_runtime(), model_name=None).step(repr(names))
        if work in run.taken:
            await self.pass_over(mode, work)
        else:
            if made_by is not None and names[0] not in run.judged:
                await self._read_mark(mode, run, made_by)
            refused: Refused = {key[1]: run.judged.get(key, _TAKEN) for key in names}
            run.judged |= dict.fromkeys(names, _TAKEN)
            if _TAKEN in refused.values():
                judged = AIMessage("", id=work, tool_calls=calls)
                call_state = {**run.state, "messages": [*history, judged]}
                _, refused = await self._judge(mode, run, call_state, work)
            run.taken[work] = refused
        return {**run.state, "messages": history}, run.taken[work]

    async def _read_mark(self, mode: Mode, run: _Run, message: AIMessage) -> None:
        """Read decisions of another process from a message, if it really made them."""
        mark = message.response_metadata.get(_MARK)
        if self._is_shared and isinstance(mark, dict) and isinstance(mark.get("refused"), dict):
            judged = _judged(message, mark["refused"])
            if await self.notes.read(mode, "judged", digest(run.root, repr(judged))) is not None:
                for name, text in judged.items():
                    run.judged.setdefault(name, text)

    async def _judge(self, mode: Mode, run: _Run, state: Any, work: str) -> tuple[Any, Any]:
        """Check the newest calls; return the final text if the run ends, and answers of calls."""
        update = await self.kernel.check_tool_calls(mode, state, running_runtime(work)) or {}
        answers: list[Any] = update.get("messages") or []
        final = answers[-1] if run.learn(update) else None
        run.ended = final or run.ended
        return final, {
            answer.tool_call_id: answer.text for answer in answers if answer.type == "tool"
        }

    async def pass_over(self, mode: Mode, question: str) -> None:
        """Drop an answer that is not needed any more: a tool's question must not get it."""
        resumes = self.asks and getattr(root_run(), "resumes", False)
        if resumes and await self.notes.read(mode, "asked", question) is not None:
            compat.is_answered()

    async def _run(self, mode: Mode, messages: list[Any]) -> _Run:
        """Return the memory of the current run: of this graph, in this root run."""
        root = root_run()
        if root is None:
            raise RuntimeError(
                "a limited model or tool was called outside of a run, or the run began before its "
                "GraphQuota was made: call it in a node, a task or an entrypoint"
            )
        caller = call_context(running_runtime(), model_name=None)
        if root not in self._roots:
            self._roots[root] = await self.notes.numbered(mode, root, caller) or root.key
        name = digest(self._roots[root], *caller.graph)
        if name not in self._runs:
            begun = self.kernel.begin_run(mode, {"messages": messages}, running_runtime())
            begun[LEDGER]["run"] = name
            begun.pop("messages", None)  # each call has its own history
            self._runs.setdefault(name, _Run(self._roots[root], begun))
        while len(self._runs) > _MAX_RUNS:
            self._runs.popitem(last=False)
        return self._runs[name]


class _LimitedTools(ToolNode):
    """A node of tools that checks all its calls before it runs one."""

    def __init__(self, limits: _Limits, tools: Tools, options: dict[str, Any]) -> None:
        self._limits, self._key = limits, options.get("messages_key", "messages")
        super().__init__(
            [tool for tool in tools if not isinstance(tool, dict)],
            wrap_tool_call=lambda request, call: run_sync(
                _calling.get()("", request, as_async(call))
            ),
            awrap_tool_call=lambda request, call: _calling.get()("a", request, call),
            **options,
        )

    async def _answered(self, mode: Mode, /, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002
        requests: list[Any] = []

        async def see(_: Mode, request: Any, __: object) -> ToolMessage:
            requests.append(request)
            return ToolMessage("", tool_call_id=request.tool_call["id"])

        async def make(mode: Mode, request: Any, call: Any) -> Any:
            call_id, name = request.tool_call["id"], request.tool_call["name"]
            text = refused.get(call_id)
            if text is not None:
                return answer_of_blocked(call_id, name, text)
            limited = request.override(state=state)
            inner = lambda inner_request: call(inner_request.override(state=request.state))  # noqa: E731
            return await self._limits.kernel.call_tool(mode, limited, inner)

        with _running_as(self._limits.agent, config) as named:
            # The node itself says which calls it is to make.
            _calling.set(see)
            variants = super().invoke, super().ainvoke
            result = await call_variant(mode, *variants, input, named, **options)
            if requests:
                state, refused = await self._limits.refused(mode, requests, self._key)
                _calling.set(make)
                result = await call_variant(mode, *variants, input, named, **options)
            return result

    def invoke(self, *args: Any, **options: object) -> object:
        return run_sync(self._answered("", *args, **options))

    async def ainvoke(self, *args: object, **options: object) -> object:
        return await self._answered("a", *args, **options)


class _LimitedModel(BaseChatModel):
    """A chat model that is held to limits, whatever is bound to it."""

    limits: Any
    inner: BaseChatModel
    offered: tuple[Any, ...] = ()
    settings: dict[str, Any] = {}  # noqa: RUF012 - a field
    _llm_type: ClassVar[Any] = "limited"

    @property
    def bind_tools(self) -> Any:
        """The model's `bind_tools`, with its parameters, because frameworks inspect them."""

        def bound(tools: Tools, **options: Any) -> BaseChatModel:
            settings = {**self.settings, **options}
            return self.model_copy(update={"offered": _as_tools(tools), "settings": settings})

        return wraps(self.inner.bind_tools)(bound)

    def with_structured_output(self, schema: Any, **options: Any) -> Runnable[Any, Any]:
        """Call the model's `with_structured_output`; a blocked call returns `None`."""
        inner_output = self.inner.with_structured_output(schema, **options)

        def structured(model: BaseChatModel) -> Runnable[Any, Any]:
            return (
                inner_output
                if model is self.inner
                else model.with_structured_output(schema, **options)
            )

        bound: Any = {"structured": structured}
        return RunnableLambda(partial(self.invoke, **bound), partial(self.ainvoke, **bound))

    async def _asked(self, mode: Mode, /, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002
        structured = options.pop("structured", None)
        responses: list[Any] = []

        async def call(request: Request) -> Response:
            bound: Runnable[Any, Any] = request.model.bind(**request.model_settings)
            if structured:
                bound = structured(request.model)
            elif request.tools:
                bound = request.model.bind_tools(request.tools, **request.model_settings)
            responses.append(
                await call_variant(mode, bound.invoke, bound.ainvoke, request.messages, config)
            )
            # A tool that only gives the answer its form is no call to check.
            return ModelResponse([AIMessage("") if structured else responses[0]])

        request_options: Any = {"model": self.inner, "tools": [] if structured else [*self.offered]}
        settings = {**self.settings, **{k: v for k, v in options.items() if v is not None}}
        messages = self._convert_input(input).to_messages()
        answer = await self.limits.ask(
            mode, messages, call, model_settings=settings, **request_options
        )
        return next(iter(responses), None) if structured else answer

    def invoke(self, *args: object, **options: object) -> Any:
        return run_sync(self._asked("", *args, **options))

    async def ainvoke(self, *args: Any, **options: Any) -> Any:
        return await self._asked("a", *args, **options)

    def _generate(self, messages: Any, *_: Any, **options: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.invoke(messages, **options))])


@contextmanager
def _running_as(agent: str | None, config: RunnableConfig | None = None) -> Iterator[Any]:
    """Run under an agent's name, as LangGraph does for an agent that has one."""
    named: Any = None if agent is None else {"metadata": {compat.AGENT_NAME: agent}}
    merged = merge_configs(ensure_config(config), named)
    token = var_child_runnable_config.set(merged)
    try:
        yield merged
    finally:
        var_child_runnable_config.reset(token)


def _judged(message: AIMessage, refused: Refused) -> dict[Any, str | None]:
    """Return the decision about each call of a message: its answer, or `None` if it runs."""
    return {(message.id, c["id"], c["name"]): refused.get(c["id"]) for c in message.tool_calls}


def _as_tools(tools: Tools) -> tuple[Any, ...]:
    return tuple(tool if isinstance(tool, BaseTool | dict) else as_tool(tool) for tool in tools)
