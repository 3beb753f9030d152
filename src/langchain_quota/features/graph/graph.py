"""GraphQuota: limits for any graph of LangGraph, by a limited model and limited tools."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from hashlib import sha256
from typing import Any, TypedDict, Unpack
from uuid import uuid4
from weakref import WeakKeyDictionary

from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, ensure_config
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as as_tool
from langgraph.errors import GraphInterrupt
from langgraph.prebuilt import ToolNode
from langgraph.types import interrupt

from langchain_quota.arguments import UserLine, one_list
from langchain_quota.concurrency import Form, ask, in_sync, now
from langchain_quota.features.graph.inline import InlineQuotaMiddleware
from langchain_quota.limits import Limit, check_together
from langchain_quota.limits.budgets import Price, Prices, UnknownPrice
from langchain_quota.messages import ABANDONED
from langchain_quota.middleware.context import (
    call_context,
    running_runtime,
    runs_tools,
)
from langchain_quota.middleware.history import answer_of_refused, answered_history, dangling_calls
from langchain_quota.middleware.quota import QuotaMiddleware
from langchain_quota.root_run import Notes, RootRun, root_run, watch_root_runs
from langchain_quota.rule import OnStoreError
from langchain_quota.state import LEDGER, Ledger, merge_ledgers
from langchain_quota.stores import QuotaStore, check_store
from langchain_quota.stores.keys import prefix_now
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry import Telemetry
from langchain_quota.telemetry.observers import Observer

Tools = Sequence[BaseTool | Callable[..., Any] | dict[str, Any]]
Config = RunnableConfig | None
Refused = Mapping[str, str | None]  # what answers a call that does not run, by the call's id

_MARK = "langchain_quota"  # in a message's `response_metadata`: which of its calls are refused
_UNKNOWN = "\0"  # in place of an answer, where limits have judged nothing
_MOST_RUNS = 10_000  # that are remembered; of one that is forgotten the store keeps the counts


class Options(TypedDict, total=False):
    """The arguments that `GraphQuota` shares with `QuotaMiddleware`."""

    tell_model: bool
    hide_exhausted: bool
    on_decision: Observer | Sequence[Observer]
    on_store_error: OnStoreError
    prices: Prices | Mapping[str, Price] | None
    unknown_price: UnknownPrice
    telemetry: Telemetry | None


class GraphQuota:
    """Holds any graph to many limits, by a limited model and limited tools.

    It replaces `QuotaMiddleware` where `create_agent` is not used. Limits, counts, messages,
    exceptions and telemetry are the same. A run is one invocation of the outermost graph, with its
    resumes; a sub-graph counts by itself. Make a `GraphQuota` when the program starts.

    Args:
        limits: The limits, at least one, each under a name of its own.
        name: The agent's name in telemetry.
        store: Keeps the counts, as in `QuotaMiddleware`; by default a `MemoryStore`, with which a
            `thread_limit` is a `QuotaWarning`: its count ends with the process.
        options: `tell_model`, `hide_exhausted`, `on_decision`, `on_store_error`, `prices`,
            `unknown_price` and `telemetry`, as in `QuotaMiddleware`.

    Attributes:
        store: The store that keeps the counts.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no limit, or arguments do not go together; see `QuotaMiddleware`.

    Examples:
        >>> from langgraph.graph import START, MessagesState, StateGraph
        >>> from langchain_quota import GraphQuota, ModelCallLimit
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> limits = GraphQuota([ModelCallLimit(run_limit=2)])
        >>> model = limits.model(ScriptedChatModel(script=["Hello.", "Hello again."]))
        >>> def greet(state):
        ...     return {"messages": [model.invoke(state["messages"]) for _ in range(3)]}
        >>> graph = StateGraph(MessagesState).add_node(greet).add_edge(START, "greet").compile()
        >>> graph.invoke({"messages": [("user", "Hi!")]})["messages"][-1].text
        'Model call limits exceeded: run limit (2/2)'
    """

    @one_list
    def __init__(
        self,
        limits: Sequence[Limit],
        *,
        name: str | None = None,
        store: QuotaStore | None = None,
        **options: Unpack[Options],
    ) -> None:
        check_together(limits)
        check_store(store, limits)
        if store is None and any(each.thread_limit is not None for each in limits):
            UserLine.of_caller().warn(
                "GraphQuota has a thread limit and no store: the count of a thread ends with this "
                "process. Give it store=RedisStore(), or store=MemoryStore() if that is meant"
            )
        self.store: QuotaStore = MemoryStore() if store is None else store
        self._limits = _Limits(limits, store=self.store, **options)
        self._limits.agent, self._limits.is_shared = name, store is not None
        watch_root_runs()

    def model(self, llm: str | BaseChatModel, tools: Tools = ()) -> BaseChatModel:
        """A chat model that is held to the limits, as are the tool calls that it makes.

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
        return _LimitedModel(ask=self._limits.ask, inner=inner, offered=_as_tools(tools))

    def tools(self, tools: Tools, **options: Any) -> ToolNode:
        """A node of tools: it answers the calls that a limit refuses, and runs the others.

        It also judges the calls of a model without limits, and all calls if a tool limit can
        `"ask"`: the question comes before any call of the message runs.

        Args:
            tools: The tools.
            options: Further arguments of `ToolNode`, except its wrappers.
        """
        self._limits.has_tools = True
        return _LimitedTools(self._limits, tools, options)


class _Limits(InlineQuotaMiddleware[Any, Any]):
    """Judges the calls of a graph, with what is remembered of its runs in place of a state."""

    name = "GraphQuota"
    why_nobody_is_asked = ""
    _begin_run = QuotaMiddleware._begin_run  # noqa: SLF001 - with any LangChain
    agent: str | None = None
    is_shared = has_tools = False

    def __init__(self, limits: Sequence[Limit], **options: Any) -> None:
        super().__init__(limits, **options)
        asking = {each.kind for each in limits if each.exit_behavior == "ask"}
        self._asks, self._asks_at_tools = bool(asking), bool(asking - {"model"})
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._roots: WeakKeyDictionary[RootRun, str] = WeakKeyDictionary()

    async def ask(self, form: Form, given: list[Any], call: Any, **request: Any) -> AIMessage:
        """The answer of a model, or of the limits in its place."""

        async def handler(asked: ModelRequest[Any]) -> ModelResponse[Any]:
            return ModelResponse(result=[await call(asked)])

        with _running_as(self.agent):
            run = await self._run(form, given)
            if run.ended is not None:
                return run.ended.model_copy(update={"id": str(uuid4())})
            left = dangling_calls({"messages": given})
            request["messages"] = answered_history(given, left, ABANDONED, is_shared=False)
            request["state"] = {**run.state, "messages": given}
            # Each call is charged, also if a node calls its model twice or runs again.
            asked = ModelRequest(runtime=running_runtime(uuid4().hex), **request)
            response: Any = await self._wrap_model_call(form, asked, handler)
            said: list[Any] = response.result
            answer: AIMessage = next(each for each in reversed(said) if each.type == "ai")
            if run.learn(response.command.update) and answer is not said[0]:
                run.ended = answer
            refused = {each.tool_call_id: each.text for each in said if each.type == "tool"}
            if not answer.tool_calls:
                return answer
            if (refused or self._asks_at_tools) and not self.has_tools:
                raise RuntimeError(
                    "a limit refuses a tool call, and nothing answers it: give the graph "
                    "limits.tools([…]) of the same GraphQuota in place of its ToolNode"
                )
            if self._asks_at_tools:
                return answer
            proof = run.proof(answer, refused)
            run.wait(answer, refused, proof)
            if self.is_shared:
                await self._notes.add(form, "judged", proof)
            marked = {**answer.response_metadata, _MARK: {"refused": refused}}
            return answer.model_copy(update={"response_metadata": marked})

    async def refused(self, form: Form, asked: list[Any], key: str) -> tuple[Any, Refused]:
        """The state in which calls of tools run, and what answers those that do not."""
        known, calls = asked[0].state, [each.tool_call for each in asked]
        known = known.get(key) if isinstance(known, Mapping) else getattr(known, key, known)
        history = [each for each in known or () if not isinstance(each, dict)]
        run = await self._run(form, history)
        message, is_open = _message_of(calls, history)
        made = [(message and message.id, each["id"], each["name"]) for each in calls]
        info = getattr(running_runtime(), "execution_info", None)
        work = _digest(uuid4() if info is None else info.task_id, made)
        if work in run.judged:
            await self._pass_over(form, work)
            return {**run.state, "messages": history}, run.judged[work]
        if is_open:
            await self._read_mark(form, run, message)
        # What is taken here is a further call in another task.
        taken = {each: run.waiting.pop(each, _UNKNOWN) for each in {*made}}
        refused = {call_id: text for (_, call_id, _), text in taken.items()}
        if _UNKNOWN in taken.values():
            judged = AIMessage("", id=work, tool_calls=calls)
            given = {**run.state, "messages": [*history, judged]}
            update = await self._judge_tools(form, given, running_runtime(work)) or {}
            answers: list[Any] = update.get("messages") or []
            if run.learn(update):
                run.ended = answers[-1]
            refused = {each.tool_call_id: each.text for each in answers if each.type == "tool"}
        run.judged[work] = refused
        return {**run.state, "messages": history}, refused

    async def _read_mark(self, form: Form, run: "_Run", message: Any) -> None:
        """Learn from a message what another process has judged, if it really has."""
        mark = message.response_metadata.get(_MARK)
        refused = mark.get("refused") if isinstance(mark, dict) else None
        if not self.is_shared or not isinstance(refused, dict):
            return
        proof = run.proof(message, refused)
        if proof not in run.proven and await self._notes.read(form, "judged", proof) is not None:
            run.wait(message, refused, proof)

    async def _judge_tools(
        self, form: Form, state: Any, runtime: Any, *, task: str = ""
    ) -> dict[str, Any] | None:
        if task and self._asks_at_tools:
            # A question behind the model's call would have the call made again.
            return None
        return await super()._judge_tools(form, state, runtime, task=task)

    async def _concluded(self, form: Form, batch: Any, conclude: Any) -> Any:
        question = batch.message or (batch.question if self._asks else "")
        try:
            update = await super()._concluded(form, batch, conclude)
        except GraphInterrupt:
            await self._notes.add(form, "asked", question)
            raise
        if batch.answer is None:
            await self._pass_over(form, question)
        return update

    async def _pass_over(self, form: Form, question: str) -> None:
        """Take an answer that is not needed any more: it must not be one to a tool's question."""
        resumes = self._asks and getattr(root_run(), "resumes", False)
        if resumes and await self._notes.read(form, "asked", question) is not None:
            with suppress(GraphInterrupt):
                interrupt(None)

    @property
    def _notes(self) -> Notes:
        store: Any = self._store
        return Notes(store, prefix_now(store.prefix, {}, running_runtime()))

    async def _run(self, form: Form, given: list[Any]) -> "_Run":
        """What is remembered of the run that is going on: of this graph, in this root run."""
        root = root_run()
        if root is None:
            raise RuntimeError(
                "a limited model or tool was called outside of a run, or the run began before its "
                "GraphQuota was made: call it in a node, a task or an entrypoint"
            )
        if root not in self._roots:
            caller = call_context(running_runtime(), model_name=None)
            self._roots[root] = await self._notes.numbered(form, root, caller) or root.key
        # A node that is a graph is entered again and again. A graph in a tool is a run each time.
        place = (ensure_config().get("configurable") or {}).get("checkpoint_ns") or ""
        parts = [each if runs_tools(each) else each.split(":")[0] for each in place.split("|")]
        name = _digest(self._roots[root], parts[:-1])
        if name not in self._runs:
            begun = self._begin_run(form, {"messages": given}, running_runtime())
            begun[LEDGER]["run"] = name
            while len(self._runs) >= _MOST_RUNS:
                self._runs.popitem(last=False)
            return self._runs.setdefault(name, _Run(self._roots[root], begun))
        return self._runs[name]


@dataclass(slots=True)
class _Run:
    """What is remembered of a run."""

    root: str
    state: dict[str, Any]
    # What answers each call that was judged behind the model; the marks that say so; and what
    # answers the calls of a task.
    waiting: dict[tuple[Any, ...], str | None] = field(default_factory=dict)
    proven: set[str] = field(default_factory=set)
    judged: dict[str, Refused] = field(default_factory=dict)
    # The answer that has ended the run.
    ended: AIMessage | None = None

    def learn(self, update: Any) -> bool:
        """Take in what is written to the state; whether it ends the run."""
        new = {key: each for key, each in update.items() if key not in {"messages", "jump_to"}}
        # A graph that comes again may be a second edge.
        known = merge_ledgers(self.state[LEDGER], new.get(LEDGER) or Ledger())
        self.state.update(new, langchain_quota={**known, "ended": None})
        return "jump_to" in update

    def wait(self, message: Any, refused: Refused, proof: str) -> None:
        """Keep what was judged for the tools, once."""
        if proof not in self.proven:
            self.proven.add(proof)
            for each in message.tool_calls:
                key = message.id, each["id"], each["name"]
                self.waiting[key] = refused.get(each["id"])

    def proof(self, message: Any, refused: Refused) -> str:
        """Names what limits have said about the calls of a message."""
        calls = [(each["id"], each["name"]) for each in message.tool_calls]
        return _digest(self.root, message.id, calls, sorted(map(repr, refused.items())))


_calling: ContextVar[Any] = ContextVar("_calling")
"""What becomes of a call in a node of tools."""


class _LimitedTools(ToolNode):
    """A node of tools that judges all its calls before it runs one."""

    def __init__(self, limits: _Limits, tools: Tools, options: dict[str, Any]) -> None:
        self._limits, self._key = limits, options.get("messages_key", "messages")
        super().__init__(
            [each for each in tools if not isinstance(each, dict)],
            wrap_tool_call=lambda request, call: now(_calling.get()("", request, in_sync(call))),
            awrap_tool_call=lambda request, call: _calling.get()("a", request, call),
            **options,
        )

    def invoke(self, input: Any, config: Config = None, **more: Any) -> Any:  # noqa: A002
        """Answer the calls that a limit refuses, and run the others."""
        return now(self._judged("", partial(in_sync(super().invoke), input, **more), config))

    async def ainvoke(self, input: Any, config: Config = None, **more: Any) -> Any:  # noqa: A002
        """`invoke`, without blocking the event loop."""
        return await self._judged("a", partial(super().ainvoke, input, **more), config)

    async def _judged(self, form: Form, run: Any, config: Config) -> Any:
        asked: list[Any] = []

        async def see(_: Form, request: Any, __: Any) -> ToolMessage:
            asked.append(request)
            return ToolMessage("", tool_call_id=request.tool_call["id"])

        async def make(form: Form, request: Any, call: Any) -> Any:
            call_id, name = request.tool_call["id"], request.tool_call["name"]
            text = refused.get(call_id)
            if text is not None:
                return answer_of_refused(call_id, name, text)
            given = request.override(state=state)
            inner = lambda each: call(each.override(state=request.state))  # noqa: E731
            return await self._limits._wrap_tool_call(form, given, inner)  # noqa: SLF001

        with _running_as(self._limits.agent, config) as named:
            # The node itself says which calls it is to make.
            _calling.set(see)
            given = await run(named)
            if asked:
                state, refused = await self._limits.refused(form, asked, self._key)
                _calling.set(make)
                given = await run(named)
            return given


class _LimitedModel(BaseChatModel):
    """A chat model that is held to limits, whatever is bound to it."""

    ask: Any
    inner: BaseChatModel
    offered: tuple[Any, ...] = ()
    settings: dict[str, Any] = {}  # noqa: RUF012 - a field
    _llm_type = "limited"

    @property
    def bind_tools(self) -> Any:
        """`bind_tools` of the model, with its parameters: frameworks look at them."""

        def bound(tools: Tools, **options: Any) -> BaseChatModel:
            settings = {**self.settings, **options}
            return self.model_copy(update={"offered": _as_tools(tools), "settings": settings})

        return wraps(self.inner.bind_tools)(bound)

    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, **options: Any
    ) -> Runnable[Any, Any]:
        """`with_structured_output` of the model; `None` in place of a refused answer."""
        structured = self.inner.with_structured_output(schema, include_raw=True, **options)

        async def asked(form: Form, given: Any) -> Any:
            found: dict[str, Any] = {"parsed": None, "parsing_error": None}

            async def call(request: ModelRequest[Any]) -> Any:
                found.update(await ask(form, structured, "invoke", request.messages))
                # A tool that only gives the answer its form is no call to judge.
                return found["raw"].model_copy(update={"tool_calls": []})

            messages = self._convert_input(given).to_messages()
            answer = await self.ask(form, messages, call, model=self.inner, tools=[])
            if include_raw:
                return {"raw": answer, **found}
            if found["parsing_error"] is not None:
                raise found["parsing_error"]
            return found["parsed"]

        return RunnableLambda(lambda given: now(asked("", given)), partial(asked, "a"))

    async def _asked(self, form: Form, given: Any, config: Any, options: Any) -> AIMessage:
        async def call(request: ModelRequest[Any]) -> Any:
            bound: Any = request.model.bind(**request.model_settings)
            if request.tools:
                bound = request.model.bind_tools(request.tools, **request.model_settings)
            return await ask(form, bound, "invoke", request.messages, config)

        given = self._convert_input(given).to_messages()
        settings = {**self.settings, **{k: v for k, v in options.items() if v is not None}}
        asked = {"model": self.inner, "tools": [*self.offered], "model_settings": settings}
        answer: AIMessage = await self.ask(form, given, call, **asked)
        return answer

    def invoke(self, input: Any, config: Config = None, **options: Any) -> AIMessage:  # noqa: A002
        """The answer of the model, or of the limits in its place."""
        return now(self._asked("", input, config, options))

    async def ainvoke(self, input: Any, config: Config = None, **options: Any) -> AIMessage:  # noqa: A002
        """`invoke`, without blocking the event loop."""
        return await self._asked("a", input, config, options)

    def _generate(self, messages: Any, *_: Any, **options: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.invoke(messages, **options))])


@contextmanager
def _running_as(agent: str | None, config: Config = None) -> Iterator[RunnableConfig]:
    """Run under an agent's name, as LangGraph does for an agent that has one."""
    given = ensure_config(config)
    if agent is not None:
        given["metadata"] = {**given.get("metadata", {}), "lc_agent_name": agent}
    token = var_child_runnable_config.set(given)
    try:
        yield given
    finally:
        var_child_runnable_config.reset(token)


def _message_of(calls: Sequence[Any], history: Sequence[Any]) -> tuple[Any, bool]:
    """The message that made the calls, if it is there, and whether they have no answer yet."""
    ids, answered = {each["id"] for each in calls}, set[Any]()
    for message in reversed(history):
        if message.type == "ai" and ids <= {each["id"] for each in message.tool_calls}:
            return message, ids.isdisjoint(answered)
        answered.add(getattr(message, "tool_call_id", None))
    return None, False


def _as_tools(tools: Tools) -> tuple[Any, ...]:
    return tuple(each if isinstance(each, BaseTool | dict) else as_tool(each) for each in tools)


def _digest(*parts: Any) -> str:
    return sha256(repr(parts).encode(errors="backslashreplace")).hexdigest()
