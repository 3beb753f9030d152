"""QuotaMiddleware: many limits in one middleware, judged together."""

from collections.abc import Awaitable, Callable

from langchain.agents.middleware.types import (
    ModelRequest,
    ModelResponse,
    ResponseT,
    hook_config,
)
from langgraph.runtime import Runtime

from langchain_quota.middleware.model_case import ModelCase
from langchain_quota.middleware.quotas import Quotas
from langchain_quota.middleware.rulings import Update
from langchain_quota.middleware.tool_case import tool_case
from langchain_quota.middleware.typevars import ContextT
from langchain_quota.state import QuotaState


class QuotaMiddleware(Quotas[ContextT, ResponseT]):
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

    @hook_config(can_jump_to=["end"])
    def before_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the model call that is about to be made, and charge it.

        Raises:
            ModelCallLimitExceededError: A limit with `exit_behavior="error"` is reached.
            RuntimeError: A limit's function or an observer is async.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve sync calls.
            ValueError: It is out of bounds or missing.
        """
        limits = self._terms_now("model", state, runtime)
        case = ModelCase(state, runtime, limits, judge=self.name)
        return self._conclude(self._judge(case))

    @hook_config(can_jump_to=["end"])
    async def abefore_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the model call that is about to be made, and charge it.

        Raises:
            ModelCallLimitExceededError: A limit with `exit_behavior="error"` is reached.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve async calls.
            ValueError: It is out of bounds or missing.
        """
        limits = await self._aterms_now("model", state, runtime)
        case = ModelCase(state, runtime, limits, judge=self.name)
        return await self._aconclude(await self._ajudge(case))

    @hook_config(can_jump_to=["end"])
    def after_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the tool calls that the model just made.

        Raises:
            ToolCallLimitExceededError: A limit with `exit_behavior="error"` refuses a call.
            RuntimeError: A limit's function or an observer is async.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve sync calls.
            ValueError: It is out of bounds or missing.
        """
        limits = self._terms_now("tool", state, runtime)
        case = tool_case(state, runtime, limits, judge=self.name, every_call=True)
        return None if case is None else self._conclude(self._judge(case))

    @hook_config(can_jump_to=["end"])
    async def aafter_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the tool calls that the model just made.

        Raises:
            ToolCallLimitExceededError: A limit with `exit_behavior="error"` refuses a call.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve async calls.
            ValueError: It is out of bounds or missing.
        """
        limits = await self._aterms_now("tool", state, runtime)
        case = tool_case(state, runtime, limits, judge=self.name, every_call=True)
        return None if case is None else await self._aconclude(await self._ajudge(case))

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
