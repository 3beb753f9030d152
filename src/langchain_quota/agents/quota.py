"""QuotaMiddleware: many limits in one middleware, checked together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypedDict

from langchain.agents.middleware.types import (
    AgentMiddleware,
    ModelResponse,
    ResponseT,
    ToolCallRequest,
    hook_config,
)
from langgraph.runtime import Runtime

from langchain_quota.agents.thread_methods import ThreadMethods
from langchain_quota.core.plans import OnStoreError
from langchain_quota.features.ask import Questions
from langchain_quota.features.budgets.budgets import Budgets
from langchain_quota.features.call_timeouts import CallTimes
from langchain_quota.features.concurrency.slots import ConcurrencySlots
from langchain_quota.features.model_notes import ModelNotes
from langchain_quota.features.repeats import Repeats
from langchain_quota.features.reruns import Reruns
from langchain_quota.features.root_runs import RootRuns
from langchain_quota.features.run_telemetry import RunHistograms, Unchecked
from langchain_quota.features.setup_checks import CountWarnings, DeepAgents, MisspelledTools
from langchain_quota.features.waiting import Waiting
from langchain_quota.limits import check_together
from langchain_quota.limits.budgets import Price, Prices, UnknownPrice
from langchain_quota.limits.options import LimitOptions
from langchain_quota.middleware.base import (
    ContextT,
    LimitMiddleware,
    WrittenResponse,
    check_store,
    is_own,
    may_end_runs,
)
from langchain_quota.middleware.calls import Update
from langchain_quota.middleware.conclude import end_again
from langchain_quota.middleware.feature import (
    Feature,
    FeatureOptions,
    Handler,
    Request,
    ToolAnswer,
    ToolHandler,
)
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import QuotaState, ToolQuotaState
from langchain_quota.runtime.arguments import explain_arguments, validate_choice, validate_switch
from langchain_quota.runtime.sync_async import Mode, as_async, run_sync
from langchain_quota.stores import QuotaStore
from langchain_quota.telemetry import Telemetry
from langchain_quota.telemetry.observers import NearFunction, Observer


class SharedOptions(TypedDict, total=False):
    """Arguments that `QuotaMiddleware` shares with what limits other graphs."""

    tell_model: bool
    hide_exhausted: bool
    on_decision: Observer | Sequence[Observer]
    on_near: NearFunction | None
    on_store_error: OnStoreError
    prices: Prices | Mapping[str, Price] | None
    unknown_price: UnknownPrice
    stream_events: bool
    telemetry: Telemetry | None


@explain_arguments('QuotaMiddleware([ToolCallLimit("search", run_limit=5)])')
class QuotaMiddleware(
    ThreadMethods[ContextT, ResponseT],
    LimitMiddleware[Any, ContextT, ResponseT],
    Generic[ContextT, ResponseT],
):
    """Holds an agent to many limits, and makes every call visible.

    Without a limit on tools, tool calls are not checked, counted or traced.

    All limits are checked together: a call runs only if every limit that matches it admits it, and
    a refused call is charged to none. There is one count for a tool, a set of tools, all tools or
    the model, so two limits on one tool are two thresholds over one count. If a batch of calls
    hits several limits, `"error"` wins over `"end"`, and `"end"` over `"continue"`. A model
    call is counted when it is admitted, even if it raises. What it uses of a budget is charged
    when it is done. List this middleware after those whose `before_model` can jump and, with a
    `reserve`, after those that retry or fall back.

    Args:
        limits: The limits, at least one, each under a name of its own.
        tell_model: Whether each model request says what is left, once a limit is near: at the end
            of its newest message, and never in the history.
        hide_exhausted: Whether tools with nothing left are no longer offered to the model, unless
            a person is asked for more. When one disappears, a provider's prompt cache is not read.
        on_decision: One function or several, sync or async, called with every `Decision` before
            the agent goes on. An exception in one is counted and logged. Async functions need the
            agent's async methods.
        on_near: A function, sync or async, that gets a `QuotaEvent` when a count has newly used a
            share of its limit: each of the limit's `near`, else that of the `Telemetry`. With a
            store, one of its processes is told. It is called in a thread of its own, after the
            charge, and never waited for; at most 100 events wait, and further ones are dropped and
            counted. Its `subject` is the user, customer or thread itself.
        store: Counts quotas and threads where runs, workers and tenants share them: a
            `MemoryStore` in one process, a `RedisStore` or `PostgresStore` in many. `thread_limit`
            is then exact for concurrent runs of a thread, and needs a thread id but no
            checkpointer. Without a store, threads are counted in the agent's state.
        on_store_error: What happens to calls while the store is unavailable. `"block"` refuses
            them, with the scope `"store"`; `"allow"` checks them by the state's counts, without
            quotas, and adds them to the store later. Every call asks the store again.
        prices: What tokens cost; needs a `CostLimit`. A table of `Price` by model, or a function
            from the `ModelUsage` of one model run to a `Decimal` of dollars. By default, and for
            models that are not in the table: the prices of the package genai-prices, without
            network. The function is also asked before the first call of a model, without tokens.
        unknown_price: What happens to a call of a model without a price. `"error"` raises
            `UnknownPriceError` before the first call, whoever chooses the model. If the price of a
            call fails afterwards, the call is charged its reserve, or a billionth of a dollar, and
            the model's next call raises the error. `"reported"` makes the call, which costs what
            its provider reports; one that reports nothing is like a price that fails. `"allow"`
            makes the call, too: it costs nothing, unless the answer names a model that has a price.
            Both need a `CostLimit`.
        charge_all_models: Whether budgets (`TokenLimit`, `CostLimit`) are also charged for the
            model calls that the agent's tools, sub-agents and other middlewares make; needs a
            budget. Only the agent's own calls are refused.
        stream_events: Whether a client that reads the run's stream mode `custom` gets a
            `QuotaEvent` for each crossing, refusal, wait and downgrade, and for the end of the run.
        telemetry: Where decisions are made visible; by default shared by the process, on
            Prometheus' global registry and OpenTelemetry's global tracer provider.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no limit, two have one name, or the `reserve` of one would refuse every
            call. Or an option is unknown, or needs a limit or a store that is not there.

    Examples:
        >>> from langchain_quota import ModelCallLimit, QuotaMiddleware, ToolCallLimit
        >>> quota = QuotaMiddleware(
        ...     [
        ...         ModelCallLimit(run_limit=10),
        ...         ToolCallLimit("search", run_limit=1),
        ...         ToolCallLimit(run_limit=50, exclude=("write_todos",)),
        ...     ]
        ... )
    """

    state_schema: type[QuotaState] = QuotaState
    feature_kinds: ClassVar[Sequence[type[Feature]]] = (
        CountWarnings,
        Reruns,
        Questions,
        Repeats,
        # A call that waits for its start or its turn does not work: the time begins in here.
        Waiting,
        ConcurrencySlots,
        Budgets,
        RootRuns,
        ModelNotes,
        DeepAgents,
        MisspelledTools,
        Unchecked,
        CallTimes,
        RunHistograms,
    )

    checks_inline: ClassVar[bool] = False
    """Whether calls are checked in the model's own node."""
    why_nobody_is_asked: ClassVar[str] = ""
    """What an agent needs instead of this middleware, if no limit of it can ask."""

    def __init__(  # noqa: PLR0913 - keyword-only settings with defaults
        self,
        limits: Sequence[LimitOptions],
        *,
        tell_model: bool = False,
        hide_exhausted: bool = False,
        on_decision: Observer | Sequence[Observer] = (),
        on_near: NearFunction | None = None,
        store: QuotaStore | None = None,
        on_store_error: OnStoreError = "block",
        prices: Prices | Mapping[str, Price] | None = None,
        unknown_price: UnknownPrice = "error",
        charge_all_models: bool = False,
        stream_events: bool = False,
        telemetry: Telemetry | None = None,
    ) -> None:
        known = check_together(limits)
        validate_choice("on_store_error", on_store_error, ("block", "allow"))
        check_store(store, known)
        if store is None and on_store_error != "block":
            raise ValueError(
                f"on_store_error={on_store_error!r} needs a store: add store=RedisStore(), or "
                "leave it out"
            )
        validate_switch("tell_model", tell_model)
        validate_switch("hide_exhausted", hide_exhausted)
        validate_switch("stream_events", stream_events)
        super().__init__(
            known,
            telemetry=telemetry,
            store=store,
            on_store_error=on_store_error,
            on_decision=on_decision,
            on_near=on_near,
            stream_events=stream_events,
            options=FeatureOptions(
                tell_model=tell_model,
                hide_exhausted=hide_exhausted,
                prices=prices,
                unknown_price=unknown_price,
                charge_all_models=charge_all_models,
            ),
            why_nobody_is_asked=self.why_nobody_is_asked,
            checks_inline=self.checks_inline,
            counts_models="admitted" if any("model" in limit.kinds for limit in known) else None,
        )
        self.remove_hooks(_unneeded(self.kernel, self.feature_kinds))
        needs_key = any("model" in limit.kinds and limit.unit == "calls" for limit in known)
        if is_own(type(self)) and not needs_key:
            # LangGraph copies the channel of each key at each step.
            schema: Any = ToolQuotaState
            self.state_schema = schema

    @hook_config(can_jump_to=["end"])
    def before_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Check the model call that is about to be made, and charge it.

        Raises:
            ModelCallLimitExceededError: A limit with `exit_behavior="error"` is reached.
            RuntimeError: A limit's function or an observer is async, or a refused call was made.
            TypeError: What a limit or a quota computes or reads from the context has the wrong
                type, or the store does not serve sync calls.
            ValueError: It is out of bounds or missing.
        """
        # A judge leads an ended run back, or LangChain, which waits for a structured response.
        ended = end_again(state, runtime)
        return ended or run_sync(self.kernel.check_model_call("", state, runtime))

    @hook_config(can_jump_to=["end"])
    async def abefore_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Call `before_model` without blocking the event loop."""
        ended = end_again(state, runtime)
        return ended or await self.kernel.check_model_call("a", state, runtime)

    @hook_config(can_jump_to=["end"])
    def after_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Check the tool calls that the model just made; other errors are those of `before_model`.

        Raises:
            ToolCallLimitExceededError: A limit with `exit_behavior="error"` refuses a call.
        """
        return run_sync(self.kernel.after_model("", state, runtime))

    @hook_config(can_jump_to=["end"])
    async def aafter_model(
        self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Call `after_model` without blocking the event loop."""
        return await self.kernel.after_model("a", state, runtime)

    def after_agent(self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]) -> None:
        """Observe what the run has used, with `Telemetry(run_histograms=True)`."""
        self.kernel.end_run(state, runtime)

    async def aafter_agent(self, state: QuotaState[ResponseT], runtime: Runtime[ContextT]) -> None:
        """Call `after_agent` without blocking the event loop."""
        self.kernel.end_run(state, runtime)

    async def _call_model(
        self, mode: Mode, request: Request, handler: Handler
    ) -> ModelResponse[ResponseT]:
        # Add what is left to the request, offer only usable tools, and charge what is used.
        written: Update = {}
        response = await self.kernel.call_model(mode, request, handler, written)
        if response is None or written:
            return WrittenResponse(response, written)
        if self.kernel.after_model_hooks and type(self).after_model is AgentMiddleware.after_model:
            messages = [*request.state["messages"], *response.result]
            self.kernel.learn_answer({**request.state, "messages": messages}, saved=False)
        return response

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolAnswer]
    ) -> ToolAnswer:
        """Make a tool call when it may run, and as a part of its root run."""
        return run_sync(self.kernel.call_tool("", request, as_async(handler)))

    async def awrap_tool_call(self, request: ToolCallRequest, handler: ToolHandler) -> ToolAnswer:
        """Call `wrap_tool_call` without blocking the event loop."""
        return await self.kernel.call_tool("a", request, handler)


_OPTIONAL = ("before_model", "after_model", "wrap_model_call", "wrap_tool_call", "after_agent")
"""The hooks that only some limits and options need."""


def _unneeded(kernel: Kernel, kinds: Sequence[type[Feature]]) -> tuple[str, ...]:
    """Return the hooks that neither limits nor features need."""
    of_kind = {"model": "before_model", "tool": "after_model"}
    needed = {of_kind[kind] for kind in kernel.kinds}
    needed.update(*(kind.needed_hooks(kernel.limits) for kind in kinds))
    has_node, charges_all = "after_model" in needed, kernel.options.get("charge_all_models", False)
    around_model: list[object] = [
        *(kernel.shape_request_hooks, kernel.around_model_hooks),
        kernel.checks_inline,
        kernel.after_model_hooks and not has_node,
        # Something that leads an ended run back must not call the model.
        may_end_runs(kernel.limits) and "before_model" not in needed,
    ]
    needs = {
        "wrap_model_call": any(around_model),
        "wrap_tool_call": (kernel.store is not None and has_node) or charges_all,
        "after_agent": bool(kernel.end_run_hooks),
    }
    needed.update(hook for hook, is_needed in needs.items() if is_needed)
    return tuple(hook for hook in _OPTIONAL if hook not in needed)
