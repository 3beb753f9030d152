"""QuotaMiddleware: many limits in one middleware, judged together."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic

from langchain.agents.middleware.types import (
    ModelRequest,
    ModelResponse,
    ResponseT,
    hook_config,
)
from langchain_core.runnables import RunnableConfig
from langgraph.constants import END
from langgraph.pregel import Pregel
from langgraph.runtime import Runtime

from langchain_quota.admission import AcquireResult
from langchain_quota.arguments import check_choice
from langchain_quota.decision import Kind
from langchain_quota.limits import Limit, check_together, is_dynamic
from langchain_quota.middleware import _model_calls as model_calls
from langchain_quota.middleware import _tool_calls as tool_calls
from langchain_quota.middleware._base import ContextT, Limiter, effect
from langchain_quota.middleware._calls import Conclusion, Request, Update
from langchain_quota.middleware._context import CallContext, aresolve, resolve
from langchain_quota.middleware._model_request import (
    counts_now,
    last_call,
    remaining,
    with_note,
    without_exhausted,
)
from langchain_quota.middleware._observers import Observer, Observers
from langchain_quota.middleware._reset import after_reset, check_at_rest, own_node, thread_keys
from langchain_quota.middleware._root_subject import aroot_subject, root_subject
from langchain_quota.middleware._store import StoreClient
from langchain_quota.resolved import Outage, ResolvedLimit, ResolvedLimits
from langchain_quota.state import UNUSED, QuotaState, ledger
from langchain_quota.stores import QuotaStore
from langchain_quota.telemetry import Telemetry


class QuotaMiddleware(Limiter[Any, ContextT, ResponseT], Generic[ContextT, ResponseT]):
    """Holds an agent to many limits at once, and makes every call visible.

    All limits are judged together: a call runs only if every limit that matches it admits it, and
    a refused call is charged to none. Usage is kept per thing counted (a tool, a set of tools,
    all tools, the model), so two limits on one tool are two thresholds over one count. Where one
    batch of calls hits several limits, `"error"` goes before `"end"` before `"continue"`. A model
    call is charged when it is admitted, so one that raises has been counted; list this
    middleware after those whose `before_model` can jump.

    Args:
        limits: The limits, at least one, each under a name of its own.
        tell_model: Whether each model request says what is left, once a limit is near: in the
            request only, at the end of its newest message, never in the history. All that is
            before it can still be read from a provider's prompt cache.
        hide_exhausted: Whether tools with nothing left are no longer offered to the model. A
            provider then reads nothing from its prompt cache once, when a tool disappears.
        on_decision: Called with every `Decision`, before the agent goes on: one function or
            several, sync or async. What one raises is counted and logged, and the agent goes on.
            Async ones need the agent's async methods.
        store: Counts quotas and threads where runs, workers and tenants share them: a
            `MemoryStore` in one process, a `RedisStore` in many. `thread_limit` is then exact for
            concurrent runs of a thread, and needs a thread id but no checkpointer. Without a
            store, threads are counted in the agent's state.
        on_store_error: What becomes of calls when the store cannot be asked. `"deny"` refuses
            them, with the scope `"store"`; `"allow"` judges them by what the state knows, without
            quotas, and tells the store of them later. Each call tries again.
        telemetry: Where decisions are made visible; by default shared by the process, on
            Prometheus' global registry and OpenTelemetry's global tracer provider.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no limit, two have one name, one can never be reached, one has quotas
            and there is no store, or `on_store_error` is unknown.

    Examples:
        >>> from langchain.agents import create_agent
        >>> from langchain_quota import ModelCallLimit, QuotaMiddleware, ToolCallLimit
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> def search(query: str = "") -> str:
        ...     "Search the web."
        ...     return "nothing found"
        >>> model = ScriptedChatModel(script=[["search", "search"], "That is all I found."])
        >>> quota = QuotaMiddleware(
        ...     [
        ...         ModelCallLimit(run_limit=10),
        ...         ToolCallLimit("search", run_limit=1),
        ...         ToolCallLimit(run_limit=50, exclude=("write_todos",)),
        ...     ]
        ... )
        >>> agent = create_agent(model, [search], middleware=[quota])
        >>> result = agent.invoke({"messages": [("user", "Find it!")]})
        >>> sorted(message.content for message in result["messages"] if message.type == "tool")
        ["Tool call limit exceeded. Do not call 'search' again.", 'nothing found']
    """

    state_schema: type[QuotaState[Any]] = QuotaState

    def __init__(  # noqa: PLR0913 - keyword-only settings with defaults
        self,
        limits: Sequence[Limit],
        *,
        tell_model: bool = False,
        hide_exhausted: bool = False,
        on_decision: Observer | Sequence[Observer] = (),
        store: QuotaStore | None = None,
        on_store_error: Outage = "deny",
        telemetry: Telemetry | None = None,
    ) -> None:
        check_together(limits)
        check_choice("on_store_error", on_store_error, ("deny", "allow"))
        if store is not None and (isinstance(store, type) or not isinstance(store, QuotaStore)):
            given: object = store
            # Not the value of a URL: it may hold a password.
            shown = "a string: RedisStore(url) is one" if isinstance(given, str) else repr(given)
            raise TypeError(f"store must be a QuotaStore or None, not {shown}")
        for limit in limits:
            if store is None and limit.quotas:
                raise ValueError(
                    f"limit {limit.name!r} has quotas: give a store that counts them, "
                    "store=MemoryStore() in one process, store=RedisStore() in several"
                )
        for argument, value in (("tell_model", tell_model), ("hide_exhausted", hide_exhausted)):
            if not isinstance(value, bool):
                raise TypeError(f"{argument} must be True or False, not {value!r}")
        super().__init__(tuple(limits), limit_name=None, telemetry=telemetry)
        self._observers = Observers(on_decision, self._recorder)
        self._has_store = store is not None
        self._store = None if store is None else StoreClient(store, on_store_error, self._recorder)
        self._numbers_root_runs = self._store if self._counts_root_runs else None
        self._clock = time.time
        self._tell_model = tell_model
        self._hide_exhausted = hide_exhausted
        self._shows_usage = tell_model or hide_exhausted
        self._shapes_requests = (
            tell_model
            or hide_exhausted
            or any(limit.exit_behavior == "finalize" for limit in limits)
        )
        self._limits_of: dict[Kind | None, list[Limit]] = {
            "model": [limit for limit in limits if limit.kind == "model"],
            "tool": [limit for limit in limits if limit.kind == "tool"],
            None: [*limits],
        }
        self._model_mode = "admitted" if self._limits_of["model"] else None
        # Limits that are the same at every moment.
        self._fixed: dict[Kind | None, ResolvedLimits] = {}
        if store is None and not any(map(is_dynamic, limits)):
            self._fixed = {
                kind: ResolvedLimits(map(ResolvedLimit.of, each))
                for kind, each in self._limits_of.items()
            }

    @hook_config(can_jump_to=["end"])
    def before_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the model call that is about to be made, and charge it.

        Raises:
            ModelCallLimitExceededError: A limit with `exit_behavior="error"` is reached.
            RuntimeError: A limit's function or an observer is async; or a refused call was made.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve sync calls.
            ValueError: It is out of bounds or missing.
        """
        self._check_wiring(state, runtime)
        limits = self._resolve("model", state, runtime)
        request = model_calls.pending(state, runtime, limits, task=self.name)
        result = self._acquire(request)
        return self._take_effect(request, model_calls.conclude(request, result))

    @hook_config(can_jump_to=["end"])
    async def abefore_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the model call that is about to be made, and charge it.

        Raises:
            ModelCallLimitExceededError: A limit with `exit_behavior="error"` is reached.
            RuntimeError: A refused call was made.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve async calls.
            ValueError: It is out of bounds or missing.
        """
        self._check_wiring(state, runtime)
        limits = await self._aresolve("model", state, runtime)
        request = model_calls.pending(state, runtime, limits, task=self.name)
        result = await self._aacquire(request)
        return await self._atake_effect(request, model_calls.conclude(request, result))

    @hook_config(can_jump_to=["end"])
    def after_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the tool calls that the model just made.

        Raises:
            ToolCallLimitExceededError: A limit with `exit_behavior="error"` refuses a call.
            RuntimeError: A limit's function or an observer is async; or a refused call was made.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve sync calls.
            ValueError: It is out of bounds or missing.
        """
        self._check_wiring(state, runtime)
        limits = self._resolve("tool", state, runtime)
        request = tool_calls.pending(state, runtime, limits, middleware=self.name, every_call=True)
        if request is None:
            return None
        result = self._acquire(request)
        return self._take_effect(request, tool_calls.conclude(request, result))

    @hook_config(can_jump_to=["end"])
    async def aafter_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the tool calls that the model just made.

        Raises:
            ToolCallLimitExceededError: A limit with `exit_behavior="error"` refuses a call.
            RuntimeError: A refused call was made.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve async calls.
            ValueError: It is out of bounds or missing.
        """
        self._check_wiring(state, runtime)
        limits = await self._aresolve("tool", state, runtime)
        request = tool_calls.pending(state, runtime, limits, middleware=self.name, every_call=True)
        if request is None:
            return None
        result = await self._aacquire(request)
        return await self._atake_effect(request, tool_calls.conclude(request, result))

    def wrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], ModelResponse[ResponseT]],
    ) -> ModelResponse[ResponseT]:
        """Tell the model what is left, and offer it what it may call.

        Raises:
            RuntimeError: A limit's function is async.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve sync calls.
            ValueError: It is out of bounds or missing.
        """
        self._learn_tools(request)
        return handler(self._shape(request) if self._shapes_requests else request)

    async def awrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], Awaitable[ModelResponse[ResponseT]]],
    ) -> ModelResponse[ResponseT]:
        """Tell the model what is left, and offer it what it may call."""
        self._learn_tools(request)
        return await handler(await self._ashape(request) if self._shapes_requests else request)

    @property
    def name(self) -> str:
        """The middleware's name in the graph: that of the class."""
        return type(self).__name__

    def reset(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        """Set what a thread has used back to nothing, in its state and in the store.

        Args:
            agent: The agent, as `create_agent` made it with this middleware.
            config: Names the thread: `{"configurable": {"thread_id": …}}`.

        Raises:
            TypeError: The agent runs elsewhere.
            ValueError: The agent does not have this middleware.
            RuntimeError: The thread has no state, or waits in mid-run other than at a limit.
            QuotaStoreError: The store could not be asked.
        """
        node = own_node(agent, self.name)
        check_at_rest(agent.get_state(config), config, self._judging_nodes())
        if self._store is not None:
            self._store.reset(thread_keys(self._limits, config, self._clock()))
        agent.update_state(config, dict(UNUSED), as_node=node)
        # What the update made the graph want to run next.
        agent.update_state(config, None, as_node=END)
        self._record_reset(agent, config)

    async def areset(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        """Set what a thread has used back to nothing, in its state and in the store.

        Args:
            agent: The agent, as `create_agent` made it with this middleware.
            config: Names the thread: `{"configurable": {"thread_id": …}}`.

        Raises:
            TypeError: The agent runs elsewhere.
            ValueError: The agent does not have this middleware.
            RuntimeError: The thread has no state, or waits in mid-run other than at a limit.
            QuotaStoreError: The store could not be asked.
        """
        node = own_node(agent, self.name)
        check_at_rest(await agent.aget_state(config), config, self._judging_nodes())
        if self._store is not None:
            await self._store.areset(thread_keys(self._limits, config, self._clock()))
        await agent.aupdate_state(config, dict(UNUSED), as_node=node)
        # What the update made the graph want to run next.
        await agent.aupdate_state(config, None, as_node=END)
        self._record_reset(agent, config)

    def _judging_nodes(self) -> tuple[str, ...]:
        """The nodes of the graph in which this middleware judges."""
        return f"{self.name}.before_model", f"{self.name}.after_model"

    def _record_reset(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        name = ((agent.config or {}).get("metadata") or {}).get("lc_agent_name")
        thread_id = config.get("configurable", {}).get("thread_id")
        self._recorder.record_reset(name, thread_id, after_reset(self._limits))

    def _resolve(self, kind: Kind | None, state: Any, runtime: Any) -> ResolvedLimits:
        """The limits on calls of a kind, or all of them, as they are at this moment."""
        if self._fixed:
            return self._fixed[kind]
        now = None if self._store is None else self._clock()
        root = root_subject(state, runtime, self._numbers_root_runs)
        limits = self._limits_of[kind]
        found = resolve(limits, state, runtime, self._recorder, now=now, root_run=root)
        return ResolvedLimits(found)

    async def _aresolve(self, kind: Kind | None, state: Any, runtime: Any) -> ResolvedLimits:
        """The limits on calls of a kind, or all of them, as they are at this moment."""
        if self._fixed:
            return self._fixed[kind]
        now = None if self._store is None else self._clock()
        root = await aroot_subject(state, runtime, self._numbers_root_runs)
        limits = self._limits_of[kind]
        found = await aresolve(limits, state, runtime, self._recorder, now=now, root_run=root)
        return ResolvedLimits(found)

    def _acquire(self, request: Request) -> AcquireResult:
        """The answer: by the state's counts, or by the store's where it keeps any."""
        if self._store is None or not request.shared:
            return request.by_state()
        # Nothing is charged for what would then fail.
        self._observers.refuse_async()
        return self._store.acquire(request)

    async def _aacquire(self, request: Request) -> AcquireResult:
        """The answer: by the state's counts, or by the store's where it keeps any."""
        if self._store is None or not request.shared:
            return request.by_state()
        return await self._store.aacquire(request)

    def _take_effect(self, request: Request, conclusion: Conclusion) -> Update | None:
        """Make a conclusion visible, also to the observers, and then let it take effect."""
        self._observers.refuse_async()
        recorded = self._record(request, conclusion)
        self._observers.notify(conclusion.decisions, request.task_id)
        return effect(recorded)

    async def _atake_effect(self, request: Request, conclusion: Conclusion) -> Update | None:
        """Make a conclusion visible, also to the observers, and then let it take effect."""
        recorded = self._record(request, conclusion)
        if self._observers.present:
            await self._observers.anotify(conclusion.decisions, request.task_id)
        return effect(recorded)

    def _counts_last(self, context: CallContext) -> bool:
        """Whether the counts of threads outlive the run."""
        in_store = self._store is not None and context.run_thread_id is not None
        return in_store or super()._counts_last(context)

    def _shape(self, request: ModelRequest[ContextT]) -> ModelRequest[ContextT]:
        """The request as the model gets it: told what is left, offered what it may call."""
        limits = self._resolve(None, request.state, request.runtime)
        kept = self._store.peek(limits.keys()) if self._store and self._shows_usage else {}
        return self._shaped(request, limits, kept)

    async def _ashape(self, request: ModelRequest[ContextT]) -> ModelRequest[ContextT]:
        """The request as the model gets it: told what is left, offered what it may call."""
        limits = await self._aresolve(None, request.state, request.runtime)
        kept = await self._store.apeek(limits.keys()) if self._store and self._shows_usage else {}
        return self._shaped(request, limits, kept)

    def _shaped(
        self,
        request: ModelRequest[ContextT],
        limits: ResolvedLimits,
        kept: Mapping[str, int] | None,
    ) -> ModelRequest[ContextT]:
        state: Mapping[str, Any] = request.state
        if ledger(state).get("final"):
            return last_call(request)
        if kept is None:
            # The store did not answer: what the state knows is shown, and no quota.
            limits, kept = limits.without_store("allow"), {}
        counts = counts_now(state, limits, kept)
        notes = []
        if self._tell_model:
            notes.append(remaining(limits, counts, near=self._recorder.near))
        if self._hide_exhausted:
            request, note = without_exhausted(request, limits, counts)
            notes.append(note)
        text = " ".join(note for note in notes if note)
        return request.override(messages=with_note(request.messages, text)) if text else request
