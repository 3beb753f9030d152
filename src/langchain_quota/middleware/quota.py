"""QuotaMiddleware: many limits in one middleware, judged together."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

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
from langgraph.types import StateSnapshot
from langgraph.typing import ContextT

from langchain_quota.engine import Used
from langchain_quota.limits import Limit, Terms, check_together
from langchain_quota.middleware.dynamic import aterms_now, terms_now
from langchain_quota.middleware.limiter import Limiter
from langchain_quota.middleware.observers import Observer, Observers
from langchain_quota.middleware.requests import (
    last_call,
    remaining,
    with_note,
    without_exhausted,
)
from langchain_quota.middleware.rulings import (
    Ruling,
    Update,
    rule_on_model,
    rule_on_tools,
)
from langchain_quota.state import (
    LEDGER,
    THREAD_MODEL,
    UNUSED,
    Ledger,
    QuotaState,
    ledger,
    run_model,
    run_tools,
    thread_model,
    thread_tools,
)
from langchain_quota.telemetry import Telemetry


class QuotaMiddleware(Limiter[QuotaState[ResponseT], ContextT, ResponseT]):
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
            request only, at the end of the newest human message, never in the history.
        hide_exhausted: Whether tools with nothing left are no longer offered to the model.
        on_decision: Called with every `Decision`, before the agent goes on: one function or
            several, sync or async. What one raises is counted and logged, and the agent goes on.
            Async ones need the agent's async methods.
        telemetry: Where decisions are made visible; by default shared by the process, on
            Prometheus' global registry and OpenTelemetry's global tracer provider.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no limit, two have one name, or one can never be reached.

    Example:
        ```python
        from langchain.agents import create_agent
        from langchain_quota import ModelCallLimit, QuotaMiddleware, ToolCallLimit

        quota = QuotaMiddleware(
            [
                ModelCallLimit(run_limit=10, thread_limit=100),
                ToolCallLimit("search", run_limit=3, thread_limit=20),
                ToolCallLimit(run_limit=50, exclude=("write_todos",)),
            ]
        )
        agent = create_agent("openai:gpt-5.5", tools=[search], middleware=[quota])
        ```
    """

    state_schema = QuotaState  # type: ignore[assignment]  # generic, as LangChain's own

    def __init__(
        self,
        limits: Sequence[Limit],
        *,
        tell_model: bool = False,
        hide_exhausted: bool = False,
        on_decision: Observer | Sequence[Observer] = (),
        telemetry: Telemetry | None = None,
    ) -> None:
        check_together(limits)
        for argument, value in (("tell_model", tell_model), ("hide_exhausted", hide_exhausted)):
            if not isinstance(value, bool):
                raise TypeError(f"{argument} must be True or False, not {value!r}")
        super().__init__(tuple(limits), limit_name=None, telemetry=telemetry)
        self._observers = Observers(on_decision, self._telemetry)
        self._tell_model = tell_model
        self._hide_exhausted = hide_exhausted
        self._shapes_requests = (
            tell_model
            or hide_exhausted
            or any(limit.exit_behavior == "finalize" for limit in limits)
        )
        self._model_limits = [limit for limit in limits if limit.kind == "model"]
        self._model_mode = "admitted" if self._model_limits else None
        self._tool_limits = [limit for limit in limits if limit.kind == "tool"]

    @property
    def name(self) -> str:
        """The middleware's name in the graph: that of the class."""
        return type(self).__name__

    @hook_config(can_jump_to=["end"])
    def before_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the model call that is about to be made, and charge it.

        Raises:
            ModelCallLimitExceededError: A limit with `exit_behavior="error"` is reached.
            RuntimeError: A limit's function or an observer is async.
        """
        terms = terms_now(self._model_limits, state, runtime, self._telemetry)
        return self._conclude(_rule_on_model(state, runtime, terms))

    @hook_config(can_jump_to=["end"])
    async def abefore_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the model call that is about to be made, and charge it.

        Raises:
            ModelCallLimitExceededError: A limit with `exit_behavior="error"` is reached.
        """
        terms = await aterms_now(self._model_limits, state, runtime, self._telemetry)
        return await self._aconclude(_rule_on_model(state, runtime, terms))

    @hook_config(can_jump_to=["end"])
    def after_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the tool calls that the model just made.

        Raises:
            ToolCallLimitExceededError: A limit with `exit_behavior="error"` refuses a call.
            RuntimeError: A limit's function or an observer is async.
        """
        terms = terms_now(self._tool_limits, state, runtime, self._telemetry)
        return self._conclude(rule_on_tools(state, runtime, terms, every_call=True))

    @hook_config(can_jump_to=["end"])
    async def aafter_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the tool calls that the model just made.

        Raises:
            ToolCallLimitExceededError: A limit with `exit_behavior="error"` refuses a call.
        """
        terms = await aterms_now(self._tool_limits, state, runtime, self._telemetry)
        return await self._aconclude(rule_on_tools(state, runtime, terms, every_call=True))

    def wrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], ModelResponse[ResponseT]],
    ) -> ModelResponse[ResponseT]:
        """Tell the model what is left, and offer it what it may call."""
        self._learn_tools(request)
        if not self._shapes_requests:
            return handler(request)
        terms = terms_now(self._limits, request.state, request.runtime, self._telemetry)
        return handler(self._shaped(request, terms))

    async def awrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], Awaitable[ModelResponse[ResponseT]]],
    ) -> ModelResponse[ResponseT]:
        """Tell the model what is left, and offer it what it may call."""
        self._learn_tools(request)
        if not self._shapes_requests:
            return await handler(request)
        terms = await aterms_now(self._limits, request.state, request.runtime, self._telemetry)
        return await handler(self._shaped(request, terms))

    def reset(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        """Set what a thread has used back to nothing.

        Args:
            agent: The agent, as `create_agent` made it with this middleware.
            config: Names the thread: `{"configurable": {"thread_id": …}}`.

        Raises:
            ValueError: The agent does not have this middleware.
            RuntimeError: The thread has no state, or waits in mid-run (interrupted, or failed
                elsewhere than at a limit).
        """
        node = self._last_node(agent)
        self._check_at_rest(agent.get_state(config), config)
        agent.update_state(config, dict(UNUSED), as_node=node)
        # What the update made the graph want to run next.
        agent.update_state(config, None, as_node=END)
        self._forget(agent, config)

    async def areset(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        """Set what a thread has used back to nothing.

        Args:
            agent: The agent, as `create_agent` made it with this middleware.
            config: Names the thread: `{"configurable": {"thread_id": …}}`.

        Raises:
            ValueError: The agent does not have this middleware.
            RuntimeError: The thread has no state, or waits in mid-run (interrupted, or failed
                elsewhere than at a limit).
        """
        node = self._last_node(agent)
        self._check_at_rest(await agent.aget_state(config), config)
        await agent.aupdate_state(config, dict(UNUSED), as_node=node)
        # What the update made the graph want to run next.
        await agent.aupdate_state(config, None, as_node=END)
        self._forget(agent, config)

    def _last_node(self, agent: Pregel[Any, Any, Any, Any]) -> str:
        node = f"{self.name}.after_model"
        if node not in agent.nodes:
            raise ValueError(f"the agent does not have the middleware {self.name}")
        return node

    def _check_at_rest(self, snapshot: StateSnapshot, config: RunnableConfig) -> None:
        thread_id = config.get("configurable", {}).get("thread_id")
        if not snapshot.values:
            raise RuntimeError(f"thread {thread_id!r} has no state: there is nothing to reset")
        # A run that a limit ended with an exception waits at the limit.
        own = {f"{self.name}.before_model", f"{self.name}.after_model"}
        if any(task.error is None or task.name not in own for task in snapshot.tasks):
            raise RuntimeError(
                f"thread {thread_id!r} waits in mid-run before {', '.join(snapshot.next)}: let "
                "the run end, or begin a new one, before resetting its use"
            )

    def _forget(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        name = ((agent.config or {}).get("metadata") or {}).get("lc_agent_name")
        self._telemetry.forget(name, config.get("configurable", {}).get("thread_id"))

    def _shaped(
        self, request: ModelRequest[ContextT], terms: Sequence[Terms]
    ) -> ModelRequest[ContextT]:
        state: Mapping[str, Any] = request.state
        if ledger(state).get("final"):
            return last_call(request)
        usage = _usage(state, terms)
        notes = []
        if self._tell_model:
            notes.append(remaining(terms, usage, near=self._telemetry.near))
        if self._hide_exhausted:
            request, note = without_exhausted(request, terms, usage)
            notes.append(note)
        text = " ".join(note for note in notes if note)
        return request.override(messages=with_note(request.messages, text)) if text else request

    def _emit(self, ruling: Ruling) -> None:
        """Make a ruling visible on the sync path."""
        self._observers.refuse_async()
        super()._emit(ruling)
        self._observers.tell(ruling.decisions, ruling.task_id)

    async def _aconclude(self, ruling: Ruling | None) -> Update | None:
        """Make a ruling visible, and then let it take effect."""
        if ruling is None:
            return None
        super()._emit(ruling)
        await self._observers.atell(ruling.decisions, ruling.task_id)
        return self._effect(ruling)


def _rule_on_model(state: Mapping[str, Any], runtime: Any, terms: Sequence[Terms]) -> Ruling:
    ruling, after = rule_on_model(state, runtime, terms, charging=True)
    if not terms or ruling.update is not None or ruling.error is not None:
        return ruling
    final = any(_is_last(each, after) for each in terms)
    return ruling.writing(
        {THREAD_MODEL: after.thread, LEDGER: Ledger(run_model=after.run, final=final)}
    )


def _is_last(terms: Terms, used: Used) -> bool:
    """Whether the call that brought the count here is the last before the run is finalized."""
    return terms.exit_behavior == "finalize" and (
        used.thread == terms.thread_limit or used.run == terms.run_limit
    )


def _usage(state: Mapping[str, Any], terms: Sequence[Terms]) -> dict[str, Used]:
    """The counts of each limit, by its name."""
    thread, run = thread_tools(state), run_tools(state)
    model = Used(thread_model(state), run_model(state))
    return {
        each.limit.name: model
        if each.limit.kind == "model"
        else Used(thread.get(each.limit.counter, 0), run.get(each.limit.counter, 0))
        for each in terms
    }
