"""GraphQuota: limits for any graph of LangGraph, by a limited model and limited tools."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from hashlib import sha256
from typing import Any, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ModelResponse
from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, ensure_config
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as as_tool
from langgraph.prebuilt import ToolNode

from langchain_quota.admission import AcquireRequest, Counter, Hits
from langchain_quota.arguments import UserLine, one_list
from langchain_quota.concurrency import Form, ask, now
from langchain_quota.decision import ROOT_RUN
from langchain_quota.errors import QuotaStoreError
from langchain_quota.features.graph.inline import InlineQuotaMiddleware
from langchain_quota.limits import Limit, check_together
from langchain_quota.messages import ABANDONED
from langchain_quota.middleware.context import running_runtime, runs_tools
from langchain_quota.middleware.history import answer_of_refused, answered_history, dangling_calls
from langchain_quota.middleware.quota import QuotaMiddleware
from langchain_quota.middleware.root_run import RootRun, root_run, watch_root_runs
from langchain_quota.state import LEDGER, Ledger, merge_ledgers
from langchain_quota.stores import QuotaStore, check_store
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.memory import MemoryStore

Tools = Sequence[BaseTool | Callable[..., Any] | dict[str, Any]]
Config = RunnableConfig | None
T = TypeVar("T")

_MARK = "langchain_quota"  # in a message's `response_metadata`: which of its calls are refused
_MOST_RUNS = 10_000  # that are remembered; of one that is forgotten the store keeps the counts


class GraphQuota:
    """Holds any graph to many limits, by a limited model and limited tools.

    It replaces `QuotaMiddleware` where `create_agent` is not used. Limits, counts, messages,
    exceptions and telemetry are the same. A run is one invocation of the outermost graph, with its
    resumes; a sub-graph counts by itself. Make a `GraphQuota` when the program starts.

    Args:
        limits: The limits, at least one, each under a name of its own. None may `"ask"`.
        name: The agent's name in telemetry.
        store: Keeps the counts, as in `QuotaMiddleware`; by default a `MemoryStore`, with which a
            `thread_limit` is a `QuotaWarning`: its count ends with the process.
        options: `tell_model`, `hide_exhausted`, `on_decision`, `on_store_error`, `prices`,
            `unknown_price` and `telemetry`, as in `QuotaMiddleware`.

    Attributes:
        store: The store that keeps the counts.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no limit, one has `exit_behavior="ask"`, or arguments do not go
            together; see `QuotaMiddleware`.

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

    @one_list  # type: ignore[arg-type]  # because of the options
    def __init__(
        self,
        limits: Sequence[Limit],
        *,
        name: str | None = None,
        store: QuotaStore | None = None,
        **options: Any,
    ) -> None:
        check_together(limits)
        check_store(store, limits)
        asks = next((each.name for each in limits if each.exit_behavior == "ask"), None)
        if asks is not None:
            raise ValueError(
                f"limit {asks!r} has exit_behavior='ask', which GraphQuota cannot do: a node that "
                "waits for an answer calls its model again. Use create_agent with QuotaMiddleware"
            )
        if store is None and any(each.thread_limit is not None for each in limits):
            UserLine.of_caller().warn(
                "GraphQuota has a thread limit and no store: the count of a thread ends with this "
                "process. Give it store=RedisStore(), or store=MemoryStore() if that is meant"
            )
        self.store: QuotaStore = MemoryStore() if store is None else store
        self._name, self._is_shared, self._has_tools = name, store is not None, False
        self._inline = _Inline(limits, store=self.store, **options)
        of_tools = [each for each in limits if each.kind == "tool"]
        options = {key: each for key, each in options.items() if "price" not in key}
        self._alone = _Alone(of_tools, store=self.store, **options) if of_tools else None
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._roots: WeakKeyDictionary[RootRun, str] = WeakKeyDictionary()
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
        return _LimitedModel(ask=self._ask, inner=inner, offered=_as_tools(tools))

    def tools(self, tools: Tools, **options: Any) -> ToolNode:
        """A node of tools: it answers the calls that a limit refuses, and runs the others.

        It also judges the calls of a model without limits.

        Args:
            tools: The tools.
            options: Further arguments of `ToolNode`, except its wrappers.
        """
        self._has_tools = True
        run, key = self._run_tool, options.get("messages_key", "messages")
        return ToolNode(
            [each for each in tools if not isinstance(each, dict)],
            wrap_tool_call=lambda request, handler: now(run("", request, handler, key)),
            awrap_tool_call=lambda request, handler: run("a", request, handler, key),
            **options,
        )

    async def _ask(self, form: Form, given: list[Any], call: Any, **request: Any) -> AIMessage:
        """The answer of a model, or of the limits in its place."""
        made = False

        async def handler(asked: ModelRequest[Any]) -> ModelResponse[Any]:
            nonlocal made
            made = True
            return ModelResponse(result=[await call(asked)])

        with self._named():
            run = await self._run(form, given)
            if run.ended is not None:
                return run.ended.model_copy(update={"id": str(uuid4())})
            # Without the answers of limits: a graph that comes again may be a second edge.
            known = [each for each in given if each.type != "ai" or each.text not in run.final]
            request["state"] = {**run.state, "messages": known}
            # Each call is charged, also if a node calls its model twice or runs again.
            left = dangling_calls({"messages": given})
            history = answered_history(given, left, ABANDONED, is_shared=False)
            asked = ModelRequest(messages=history, runtime=_runtime(uuid4().hex), **request)
            handling = handler if form else lambda each: now(handler(each))
            response = await ask(form, self._inline, "wrap_model_call", asked, handling)
            said = response.model_response.result
            answer = next(each for each in reversed(said) if isinstance(each, AIMessage))
            if run.learn(response.command.update, answer) and made:
                run.ended = answer
            refused = {each.tool_call_id: each.text for each in said if each.type == "tool"}
            if not answer.tool_calls:
                return answer
            if refused and not self._has_tools:
                raise RuntimeError(
                    "a limit refuses a tool call, and nothing answers it: give the graph "
                    "limits.tools([…]) of the same GraphQuota in place of its ToolNode"
                )
            for each in answer.tool_calls:
                judged = each["name"], refused.get(each["id"] or "")
                # Older versions of LangGraph may give a tool its call without the message.
                run.judged[answer.id or "", each["id"]] = run.judged["", each["id"]] = judged
            await self._proof(form, run, answer, refused, proves=True)
            marked = {**answer.response_metadata, _MARK: {"refused": refused}}
            return answer.model_copy(update={"response_metadata": marked})

    async def _run_tool(self, form: Form, request: Any, handler: Any, key: str) -> Any:
        """Answer a tool call that is refused, or run it."""
        state, call = request.state, request.tool_call
        state = state.get(key) if isinstance(state, Mapping) else getattr(state, key, state)
        history = [each for each in state or () if not isinstance(each, dict)]
        with self._named(request.runtime.config):
            run = await self._run(form, history)
            text = await self._refusal(form, run, call, history)
            if text is not None:
                return answer_of_refused(call["id"], call["name"], text)
            if type(self._inline).wrap_tool_call is AgentMiddleware.wrap_tool_call:
                given = handler(request)
                return await given if form else given
            given = request.override(state={**run.state, "messages": history})
            inner = lambda each: handler(each.override(state=request.state))  # noqa: E731
            return await ask(form, self._inline, "wrap_tool_call", given, inner)

    async def _refusal(self, form: Form, run: "_Run", call: Any, history: list[Any]) -> str | None:
        """What answers a call that does not run: as its message says, or else judged now."""
        info = getattr(_runtime(), "execution_info", None)
        call_id, task = call["id"], uuid4().hex if info is None else info.task_id
        message, is_answered = None, False
        for each in reversed(history):
            is_answered = is_answered or getattr(each, "tool_call_id", None) == call_id
            if call_id in [one["id"] for one in getattr(each, "tool_calls", ())]:
                message = each
                break
        key = getattr(message, "id", None) or "", call_id
        judged = run.judged.get(key)
        if judged is None and message is not None:
            mark = message.response_metadata.get(_MARK)
            refused = mark.get("refused") if isinstance(mark, dict) else None
            if isinstance(refused, dict) and await self._proof(form, run, message, refused):
                judged = call["name"], refused.get(call_id)
        # In another task it would be a further call.
        is_first = run.ran.setdefault(key, task) == task
        if judged is None or judged[0] != call["name"] or is_answered or not is_first:
            judged = run.judged.get((task, call_id))
        if judged is None and self._alone is not None:
            made = AIMessage("", id=f"{task}/{call_id}", tool_calls=[call])
            given = {**run.state, "messages": [*history, made]}
            update = await ask(form, self._alone, "after_model", given, _runtime(str(made.id)))
            said = (update or {}).get("messages") or [made]
            if run.learn(update, said[-1]):
                run.ended = said[-1]
            text = next((each.text for each in said if isinstance(each, ToolMessage)), None)
            judged = run.judged[task, call_id] = call["name"], text
            root, seen = root_run(), uuid4()
            if root is not None and not root.ignore_chat_model:
                # This takes the model's call for judged, too: make up for it.
                config: Any = var_child_runnable_config.get()
                root.on_chat_model_start({}, [[]], run_id=seen, metadata=config["metadata"])
                root.on_llm_end(None, run_id=seen)  # type: ignore[arg-type]
        return None if judged is None else judged[1]

    async def _run(self, form: Form, given: list[Any]) -> "_Run":
        """What is remembered of the run that is going on: of this graph, in this root run."""
        root = root_run()
        if root is None:
            raise RuntimeError(
                "a limited model or tool was called outside of a run, or the run began before its "
                "GraphQuota was made: call it in a node, a task or an entrypoint"
            )
        if root not in self._roots:
            self._roots[root] = await self._numbered(form, root)
        # A node that is a graph is entered again and again. A graph in a tool is a run each time.
        place = _config("checkpoint_ns") or ""
        parts = [each if runs_tools(each) else each.split(":")[0] for each in place.split("|")]
        name = _digest(self._roots[root], parts[:-1])
        if name not in self._runs:
            begun = await ask(form, self._inline, "before_agent", {"messages": given}, _runtime())
            begun[LEDGER] = {**begun[LEDGER], "run": name}
            while len(self._runs) >= _MOST_RUNS:
                self._runs.popitem(last=False)
            return self._runs.setdefault(name, _Run(self._roots[root], begun))
        return self._runs[name]

    async def _numbered(self, form: Form, root: RootRun) -> str:
        """The name of a root run: its thread and a number, which another process finds, too."""
        thread = _config("thread_id") if root.thread_id is None else root.thread_id
        if thread is None:
            return root.key
        key = self._key("", str(thread))
        # The number begins with the time: one that has expired is not given again.
        used = await self._stored(form, key, root.key, int(time.time()), adds=not root.resumes)
        if used is None and root.resumes:
            used = await self._stored(form, key, root.key, int(time.time()), adds=True)
        return root.key if used is None else f"{thread}@{used}"

    async def _proof(
        self, form: Form, run: "_Run", message: Any, refused: Any, *, proves: bool = False
    ) -> bool:
        """Whether the store knows, or learns, that limits have judged a message like this."""
        calls = [[each["id"], each["name"]] for each in message.tool_calls]
        key = self._key("judged", _digest(run.root, message.id, calls, sorted(refused.items())))
        return self._is_shared and bool(await self._stored(form, key, key, 0, adds=proves))

    async def _stored(self, form: Form, key: str, name: str, at: int, *, adds: bool) -> int | None:
        """A count of the store, with one more if it is to add that; `None` if there is none."""
        counters, hits = {key: Counter(key, used=at, mirrored=True)}, (Hits({key: 1}),)
        try:
            if not adds:
                (known,) = await ask(form, self.store, "peek", [key])
                return None if known is None else int(known.used)
            request = AcquireRequest(name, uuid4().hex, counters, hits)
            return int((await ask(form, self.store, "acquire", request)).used[key]) + 1
        except QuotaStoreError:
            return None  # the middleware says so, and does what `on_store_error` says

    def _key(self, counter: str, subject: str) -> str:
        prefix = getattr(self.store, "prefix", "")
        prefix = str(prefix({}, _runtime())) if callable(prefix) else ""
        return str(CountKey(counter, ROOT_RUN, subject, prefix=prefix))

    @contextmanager
    def _named(self, config: Any = None) -> Iterator[None]:
        """Run under the agent's name, as LangGraph does for an agent that has one."""
        given = ensure_config()
        if self._name is not None:
            given["metadata"] = {**given.get("metadata", {}), "lc_agent_name": self._name}
            if config is not None:
                config["metadata"] = given["metadata"]
        token = var_child_runnable_config.set(given)
        try:
            yield
        finally:
            var_child_runnable_config.reset(token)


class _Inline(InlineQuotaMiddleware[Any, Any]):
    _in_agent = False
    name = "GraphQuota"


class _Alone(QuotaMiddleware[Any, Any]):
    name = "GraphQuota"


@dataclass(slots=True)
class _Run:
    """What is remembered of a run."""

    root: str
    state: dict[str, Any]
    # The tool and the refusal of a tool call, by the ids of its message and its own; and its task.
    judged: dict[tuple[str, str | None], tuple[str, str | None]] = field(default_factory=dict)
    ran: dict[tuple[str, str | None], str] = field(default_factory=dict)
    # The texts with which limits have answered, and the answer that has ended the run.
    final: set[str] = field(default_factory=set)
    ended: AIMessage | None = None

    def learn(self, update: Any, final: AIMessage) -> bool:
        """Take in what a middleware writes to the state; whether it ends the run."""
        new: Any = {key: each for key, each in (update or {}).items() if key != "messages"}
        has_ended: bool = new.pop("jump_to", None) == "end"
        new[LEDGER] = merge_ledgers(self.state[LEDGER], new.get(LEDGER) or Ledger())
        self.state.update(new)
        self.final.update({final.text} if has_ended else ())
        return has_ended


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
            found: dict[str, Any] = {}

            async def call(request: ModelRequest[Any]) -> Any:
                found.update(await ask(form, structured, "invoke", request.messages))
                # A tool that only gives the answer its form is no call to judge.
                return found["raw"].model_copy(update={"tool_calls": []})

            messages = self._convert_input(given).to_messages()
            answer = await self.ask(form, messages, call, model=self.inner, tools=[])
            if found.get("parsing_error") and not include_raw:
                raise found["parsing_error"]
            found = found or {"raw": answer, "parsed": None, "parsing_error": None}
            return found if include_raw else found["parsed"]

        async def aask(given: Any) -> Any:
            return await asked("a", given)

        return RunnableLambda(lambda given: now(asked("", given)), aask)

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


def _as_tools(tools: Tools) -> tuple[Any, ...]:
    return tuple(each if isinstance(each, BaseTool | dict) else as_tool(each) for each in tools)


def _config(key: str) -> Any:
    return (ensure_config().get("configurable") or {}).get(key)


def _digest(*parts: Any) -> str:
    return sha256(repr(parts).encode(errors="backslashreplace")).hexdigest()


def _runtime(work: str = "") -> Any:
    """The runtime of the running node; as if a piece of work in it were a task of its own."""
    runtime = running_runtime()
    info = getattr(runtime, "execution_info", None)
    if not work or info is None:
        return runtime
    return runtime.override(execution_info=replace(info, task_id=f"{info.task_id}/{work}"))
