"""QuotaMiddleware: many limits in one middleware, judged together."""

import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Generic

from langchain.agents.middleware.types import ModelRequest, ModelResponse, ResponseT, hook_config
from langgraph.runtime import Runtime

from langchain_quota.admission import AcquireResult
from langchain_quota.arguments import check_choice, check_switch, one_list
from langchain_quota.decision import Kind
from langchain_quota.features.ask.questions import questions_of
from langchain_quota.features.at_once.at_once import caps_of
from langchain_quota.features.budgets.agent_budgets import budgets_of, late_use
from langchain_quota.features.budgets.budgeted_call import BudgetedCall
from langchain_quota.features.budgets.budgets import Budgets
from langchain_quota.features.budgets.charged_response import ChargedResponse, has_ended
from langchain_quota.features.budgets.prices import Price, Prices, UnknownPrice
from langchain_quota.features.budgets.unlimited_models import leave_out_before_model
from langchain_quota.features.grants import Grantable
from langchain_quota.features.telling.model_request import shaped
from langchain_quota.limits import Limit, check_together
from langchain_quota.middleware import _model_calls as model_calls
from langchain_quota.middleware import _tool_calls as tool_calls
from langchain_quota.middleware._base import ContextT, effect
from langchain_quota.middleware._calls import Conclusion, Request, Update
from langchain_quota.middleware._context import CallContext
from langchain_quota.middleware._current_limits import CurrentLimits
from langchain_quota.middleware._form import Form, ask, in_sync, now
from langchain_quota.middleware._observers import Observer, Observers
from langchain_quota.middleware._store import StoreClient
from langchain_quota.resolved import Outage, ResolvedLimits
from langchain_quota.state import LEDGER, QuotaState
from langchain_quota.stores import QuotaStore, QuotaUsage, check_store
from langchain_quota.telemetry import Telemetry


class QuotaMiddleware(Grantable[ContextT, ResponseT], Generic[ContextT, ResponseT]):
    """Holds an agent to many limits at once, and makes every call visible.

    All limits are judged together: a call runs only if every limit that matches it admits it, and
    a refused call is charged to none. There is one count for a tool, a set of tools, all tools or
    the model, so two limits on one tool are two thresholds over one count. If a batch of calls
    hits several limits, `"error"` wins over `"end"`, and `"end"` over `"continue"`. A model
    call is counted when it is admitted, even if it raises. What it uses of a budget is charged
    when it is done. List this middleware after those whose `before_model` can jump and, with a
    `reserve`, after those that retry or fall back.

    Args:
        limits: The limits, at least one, each under a name of its own.
        tell_model: Whether each model request says what is left, once a limit is near. The note is
            at the end of the request's newest message, and never in the history. A provider's
            prompt cache stays valid for everything before it.
        hide_exhausted: Whether tools with nothing left are no longer offered to the model, unless
            a person is asked for more. When one disappears, a provider's prompt cache is not read.
        on_decision: One function or several, sync or async, called with every `Decision` before
            the agent goes on. An exception in one is counted and logged, and the agent goes on.
            Async functions need the agent's async methods.
        store: Counts quotas and threads where runs, workers and tenants share them: a
            `MemoryStore` in one process, a `RedisStore` in many. `thread_limit` is then exact for
            concurrent runs of a thread, and needs a thread id but no checkpointer. Without a
            store, threads are counted in the agent's state.
        on_store_error: What happens to calls when the store cannot be asked. `"deny"` refuses
            them, with the scope `"store"`; `"allow"` judges them by the state's counts, without
            quotas, and adds them to the store later. Every call asks the store again.
        prices: What tokens cost; needs a `CostLimit`. A table of `Price` by model, or a function
            from the `ModelUsage` of one model run to a `Decimal` of dollars. By default, and for
            models that are not in the table: the prices of the package genai-prices, without
            network. The function is also asked before the first call of a model, when there are no
            tokens and only the `request_model` is known.
        unknown_price: What happens to a call of a model without a price. `"error"` raises
            `UnknownPriceError` before the first call, also if a middleware or a fallback chooses
            another model. If the price of a call fails afterwards, the call is charged what was
            held for it, or a millionth of a dollar, and the model's next call raises the error.
            Models that only `charge_all_models` charges are not refused. `"allow"` makes the call,
            and needs a `CostLimit`. The call costs nothing, unless the answer names a model that
            has a price, as Azure's answers do.
        charge_all_models: Whether budgets (`TokenLimit`, `CostLimit`) are also charged for the
            model calls that the agent's tools, sub-agents and other middlewares make; needs a
            budget. Only the agent's own calls are refused.
        telemetry: Where decisions are made visible; by default shared by the process, on
            Prometheus' global registry and OpenTelemetry's global tracer provider.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no limit, two have one name, one can never be reached, or the `reserve`
            of one would refuse every call. Or a limit has quotas and there is no store,
            `on_store_error` or `unknown_price` is unknown, `charge_all_models` has no budget to
            charge, or there are prices and no `CostLimit`.

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
    _budgets_class: type[Budgets] = Budgets

    @one_list
    def __init__(  # noqa: PLR0913 - keyword-only settings with defaults
        self,
        limits: Sequence[Limit],
        *,
        tell_model: bool = False,
        hide_exhausted: bool = False,
        on_decision: Observer | Sequence[Observer] = (),
        store: QuotaStore | None = None,
        on_store_error: Outage = "deny",
        prices: Prices | Mapping[str, Price] | None = None,
        unknown_price: UnknownPrice = "error",
        charge_all_models: bool = False,
        telemetry: Telemetry | None = None,
    ) -> None:
        check_together(limits)
        check_choice("on_store_error", on_store_error, ("deny", "allow"))
        check_store(store, limits)
        for argument, value in (("tell_model", tell_model), ("hide_exhausted", hide_exhausted)):
            check_switch(argument, value)
        super().__init__(tuple(limits), limit_name=None, telemetry=telemetry)
        self._observers = Observers(on_decision, self._recorder)
        self._has_store = store is not None
        self._store = None if store is None else StoreClient(store, on_store_error, self._recorder)
        self._budgets = budgets_of(
            self._budgets_class,
            limits,
            prices=prices,
            unknown_price=unknown_price,
            store=self._store,
            recorder=self._recorder,
            charge_all_models=charge_all_models,
        )
        self._asking = questions_of(limits, store, self._recorder)
        self._clock = getattr(store, "clock", time.time)
        self._tell_model = tell_model
        self._hide_exhausted = hide_exhausted
        self._shows_usage = tell_model or hide_exhausted
        finalizes = any(limit.exit_behavior == "finalize" for limit in limits)
        self._shapes_requests = self._shows_usage or finalizes
        self._current = CurrentLimits(
            limits, self._store, self._recorder, counts_root_runs=self._counts_root_runs
        )
        self._model_mode = "admitted" if self._current.of_kind["model"] else None
        if type(self) is QuotaMiddleware and self._model_mode is None:
            leave_out_before_model(self)
        self._at_once = caps_of(self, on_store_error)

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
        return now(self._before_model("", state, runtime))

    @hook_config(can_jump_to=["end"])
    async def abefore_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """`before_model`, without blocking the event loop."""
        return await self._before_model("a", state, runtime)

    async def _before_model(
        self, form: Form, state: Mapping[str, Any], runtime: Any
    ) -> Update | None:
        if self._budgets is not None and has_ended(state):
            return {"jump_to": "end"}
        limits = await self._resolve(form, "model", state, runtime)
        late = await late_use(form, self._budgets, state, runtime, limits)
        first = self._before_request(limits)
        request_for = partial(model_calls.pending, state, runtime, task=self.name, late=late)
        request = request_for(first)
        result = await self._acquire(form, request)
        if self._asking is not None and result.stopped:
            acquire = partial(self._acquire, form)
            request, result = await self._asking.put(
                form, request, result, first, request_for, acquire
            )
        return await self._take_effect(form, request, self._let_through(request, result))

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
        return now(self._after_model("", state, runtime))

    @hook_config(can_jump_to=["end"])
    async def aafter_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """`after_model`, without blocking the event loop."""
        return await self._after_model("a", state, runtime)

    async def _after_model(
        self, form: Form, state: Mapping[str, Any], runtime: Any
    ) -> Update | None:
        self._mark_judged(state)
        if self._budgets is not None:
            self._budgets.learn_written(state)
        limits = await self._resolve(form, "tool", state, runtime)
        request_for = partial(
            tool_calls.pending, state, runtime, middleware=self.name, every_call=True
        )
        request = request_for(limits)
        if request is None:
            return None
        result = await self._acquire(form, request)
        if self._asking is not None and result.stopped:
            acquire = partial(self._acquire, form)
            request, result = await self._asking.put(
                form, request, result, limits, request_for, acquire
            )
        conclusion = tool_calls.conclude(request, result, has_caps=self._at_once is not None)
        return await self._take_effect(form, request, conclusion)

    def wrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], ModelResponse[ResponseT]],
    ) -> ModelResponse[ResponseT]:
        """Add what is left to the request, offer only usable tools, and charge what is used.

        Raises:
            RuntimeError: A limit's function is async.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve sync calls.
            ValueError: It is out of bounds or missing.
            UnknownPriceError: There is a limit of costs, and no price for the model.
        """
        return now(self._wrap_model_call("", request, in_sync(handler)))

    async def awrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], Awaitable[ModelResponse[ResponseT]]],
    ) -> ModelResponse[ResponseT]:
        """Add what is left to the request, offer only usable tools, and charge what is used."""
        return await self._wrap_model_call("a", request, handler)

    async def _wrap_model_call(
        self,
        form: Form,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], Awaitable[ModelResponse[ResponseT]]],
    ) -> ModelResponse[ResponseT]:
        self._learn_tools(request)
        given = await self._shape(form, request) if self._shapes_requests else request
        if self._budgets is None:
            return await handler(given)
        limits = await self._resolve(form, "model", request.state, request.runtime)
        call = BudgetedCall(self._budgets, given, limits, task=self.name)
        made = call.make(form, handler, self._acquire, self._take_effect, self._observers)
        return ChargedResponse.of(*await made)

    @property
    def name(self) -> str:
        """The middleware's name in the graph: the name of the class."""
        return type(self).__name__

    def _resolve(
        self, form: Form, kind: Kind | None, state: Any, runtime: Any
    ) -> Coroutine[Any, Any, ResolvedLimits]:
        """The limits on calls of a kind, or on all calls, with their numbers at this moment."""
        return self._current.at(form, self._clock(), kind, state, runtime)

    def _before_request(self, limits: ResolvedLimits) -> ResolvedLimits:
        """The limits that judge a model call before its request is known."""
        return limits if self._budgets is None else self._budgets.before_request(limits)

    async def _acquire(self, form: Form, request: Request) -> AcquireResult:
        """The answer: from the state's counts, or from the store's if it keeps any of them."""
        if self._store is None or not request.shared:
            return request.by_state()
        # Fail before anything is charged.
        self._observers.check(form)
        answer: AcquireResult = await ask(form, self._store, "acquire", request)
        return answer

    def _let_through(self, request: Request, result: AcquireResult) -> Conclusion:
        """What is decided about a model call; a call under budgets may be judged once more."""
        conclusion = model_calls.conclude(request, result)
        if self._budgets is None or not all(result.admitted):
            return conclusion
        decided = not self._budgets.bounds_calls
        held: Any = (conclusion.update or {})[LEDGER]["held"]
        call = model_calls.admitted(request, conclusion, decided=decided)
        self._budgets.let_through.add(held["request"], call)
        return conclusion if decided else conclusion._replace(decisions=())

    async def _take_effect(
        self, form: Form, request: Request, conclusion: Conclusion
    ) -> Update | None:
        """Make a conclusion visible, also to the observers, and then let it take effect."""
        self._observers.check(form)
        recorded = self._record(request, conclusion)
        if self._observers.present:
            await ask(form, self._observers, "notify", conclusion.decisions, request.task_id)
        return effect(recorded)

    def _begin_run(self, state: Mapping[str, Any], runtime: Any) -> Update:
        if self._asking is not None:
            self._asking.check_can_wait(runtime)
        update = super()._begin_run(state, runtime)
        if self._budgets is not None:
            update[LEDGER] |= self._budgets.begun(state)
        return update

    def _counts_last(self, context: CallContext) -> bool:
        """Whether the counts of threads outlive the run."""
        in_store = self._store is not None and context.run_thread_id is not None
        return in_store or super()._counts_last(context)

    async def _shape(self, form: Form, request: ModelRequest[ContextT]) -> ModelRequest[ContextT]:
        """The request as the model gets it: with what is left, and the tools that it may call."""
        limits = await self._resolve(form, None, request.state, request.runtime)
        kept: Mapping[str, QuotaUsage] | None = {}
        if self._store is not None and self._shows_usage:
            kept = await ask(form, self._store, "peek", limits.keys())
        near = self._recorder.near if self._tell_model else None
        uses = kept or {}
        limits = limits.raised({key: each.granted for key, each in uses.items()})
        counts = None if kept is None else {key: each.used for key, each in uses.items()}
        known = self._before_request(limits)
        return shaped(request, known, counts, near=near, hides=self._hide_exhausted)
