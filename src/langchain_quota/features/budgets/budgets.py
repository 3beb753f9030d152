"""Budgets of tokens and money: checked before a model call, reserved around it, charged after it.

The first check, before the request is known, admits a call if anything is left. With a `reserve`, a
second check asks for all that the call can use when its request is known. A callback handler sees
the model runs of a call, including retries, fallbacks and second calls. Their use is added to the
counts of the state and of the store, where it replaces the reservation.
"""

from asyncio import CancelledError
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar, get_args

from langchain.agents.middleware.types import ModelResponse, ToolCallRequest
from langchain_core.load import dumps
from langchain_core.messages import ToolCall

from langchain_quota.core.plans import LimitSet, Places, Plan
from langchain_quota.errors import ModelCallLimitExceededError
from langchain_quota.features.budgets.charging import (
    MAX_LATE,
    OWN,
    ChargeContext,
    Charging,
    Stopwatch,
    TaskMemory,
    added,
)
from langchain_quota.features.budgets.model_runs import (
    own_call,
    running_graph,
    watch_all_models,
    watch_runs,
)
from langchain_quota.features.budgets.prices import (
    Pricing,
    check_prices,
    cost_and_source,
    resolve_prices,
)
from langchain_quota.features.budgets.second_check import SecondCheck, first_check, without_waits
from langchain_quota.limits import Limit
from langchain_quota.limits.budgets import CostLimit, TokenLimit, UnknownPrice
from langchain_quota.limits.call import Call, ModelUsage
from langchain_quota.limits.options import MILLISECONDS, has_number
from langchain_quota.middleware.calls import Change, Step, Update, model_context
from langchain_quota.middleware.context import CallContext, running_runtime
from langchain_quota.middleware.feature import Feature, ModelCall, Request, ToolAnswer, ToolHandler
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import (
    LEDGER,
    THREAD_TOOLS,
    Counts,
    FeatureData,
    Ledger,
    State,
    feature_ledger,
    ledger,
    merge_ledgers,
)
from langchain_quota.middleware.thread_usage import with_work
from langchain_quota.runtime import compat
from langchain_quota.runtime.arguments import validate_choice, validate_switch
from langchain_quota.runtime.sync_async import Mode, run_sync
from langchain_quota.runtime.units import near_threshold
from langchain_quota.telemetry.receipts import OpenReceipt, Receipt, opened

_NEW_RUN: Mapping[str, Any] = {"run_spent": {}, "admitted": None, "error": None}
"""The feature's data at the start of a run."""

# The caller of the model gets what it raises.
compat.hide_raised("QuotaCallback")


class Budgets(Feature):
    """Charges the model calls of an agent to its budgets."""

    # The feature's data in the ledger also has these entries:
    # - `spent_by`: the name of the newest call whose use is in it. This process may know later
    #   calls.
    # - `admitted`: the first check of a model call whose decision is not recorded yet, see
    #   `first_check`.
    # - `size`: what the provider has reported of the newest request, and the estimate of it.
    # - `error`: what is raised after the model's step: the counts, the limits, and the text.
    name = OWN
    shapes_requests = True
    unused: ClassVar[Mapping[str, Any]] = {"thread_spent": {}, **_NEW_RUN}

    @classmethod
    def create(cls, kernel: Kernel) -> "Budgets | None":
        """Return the budgets among the limits; `None` if there are none."""
        options = kernel.options
        units = {limit.unit for limit in kernel.limits}
        prices, unknown = options["prices"], options["unknown_price"]
        validate_choice("unknown_price", unknown, get_args(UnknownPrice))
        validate_switch("charge_all_models", options["charge_all_models"])
        if "nanodollars" not in units and (prices is not None or unknown != "error"):
            check_prices(prices)
            in_vain = f"unknown_price={unknown!r}" if prices is None else "prices="
            raise ValueError(
                f"{in_vain} needs a limit of costs: add a CostLimit to the limits, or leave it out"
            )
        if options["charge_all_models"] and not units & {"tokens", "nanodollars"}:
            raise ValueError(
                "charge_all_models=True needs a budget to charge: add a TokenLimit or a CostLimit "
                "to the limits"
            )
        return cls(kernel) if units != {"calls"} else None

    @classmethod
    def needed_hooks(cls, limits: Sequence[Limit]) -> Collection[str]:
        """Return the hooks after the model, which learns what is written, and around tools."""
        hooks = [] if all(limit.unit == "calls" for limit in limits) else ["after_model"]
        return (*hooks, "wrap_tool_call") if _of_time(limits) else hooks

    def __init__(self, kernel: Kernel) -> None:
        limits = kernel.limits
        self._kernel = kernel
        self._pricing = Pricing(kernel)
        counters = {limit.counter for limit in limits if has_number(limit)}
        self._charging = Charging(kernel, counters, self._pricing)
        self._late = self._charging.late
        self._downgrades = {
            limit.name: limit.downgrade_to
            for limit in limits
            if isinstance(limit, TokenLimit | CostLimit) and limit.downgrade_to is not None
        }
        # Of a task: whether it has made a model call, and the settings of its first model, as a
        # hash. Of the message of a refusal: the decision, for the error that the next hook raises.
        self._memory: TaskMemory = lru_cache(MAX_LATE)(lambda _: {})
        self._second_check = SecondCheck(kernel, self._pricing, self._charging, self._memory)
        self._counts_time = _of_time(limits)
        self._counts_use = any(limit.unit in ("tokens", "nanodollars") for limit in limits)
        self._stopwatch = Stopwatch()
        self._charges_all: bool = kernel.options["charge_all_models"]
        if self._charges_all:
            watch_all_models()

    def begin_run(self, state: State, feature_data: FeatureData) -> None:
        """Reset the run's use, and keep for the thread what calls of the last run have used."""
        self._late.forget(state)
        feature_data[self.name] = {**self._late.of(state), **_NEW_RUN}

    async def _charge_others(self, mode: Mode, charge_to: ChargeContext) -> None:
        """Charge what tools, sub-agents and other middlewares have used."""
        graph = running_graph() if self._charges_all else None
        if graph is not None:
            charge = self._charging.charge
            graph.step = charge_to._replace(state=_counts_in(charge_to.state))
            graph.charge = lambda step, runs: run_sync(charge(None, step, runs))
            runs = graph.take()
            if runs:
                await charge(mode, graph.step, runs)

    def state_counts(self, state: State) -> Mapping[str, int]:
        """Return the budgets' use in the state."""
        return self._late.counts(state)

    async def prepare(self, mode: Mode, step: Step) -> Step:
        """Know what is used of the budgets; ask for the prices of paid tool calls."""
        if step.pending is not None:
            return self._pay_tools(step, step.pending.calls)
        if not step.is_second:
            charge_to = _charge_context(step.state, step.limits, step.places, step.context)
            await self._charge_others(mode, charge_to)
        self._late.forget(step.state, self._answering(step.context))
        step = step.using(self._late.counts(step.state))
        if entries := self._late.of(step.state):
            step = step.saving(self.name, entries)
        if step.is_second or not self._second_check.waits:
            return step
        # Wait, and hold nothing, until the request is known: then there is a second check.
        limits = LimitSet(without_waits(rule, step) for rule in step.limits.rules)
        plan = Plan.of(without_waits(rule, step) for rule in step.plans[0].rules)
        return step.with_plans([plan], limits=limits)

    def _pay_tools(self, step: Step, tool_calls: Sequence[ToolCall]) -> Step:
        """Have paid tool calls ask for their price; the step knows what paid calls have used."""
        if not step.limits.budgets:
            return step
        state = {LEDGER: {**ledger(step.state), "counts": Counts()}}
        used = added([step.used, self._late.counts(state)])
        plans = (
            Plan.of(
                rule.with_meters(amount=price, keep=rule.keep) if rule.is_budget else rule
                for rule in plan.rules
                if (price := self._pricing.of_tool(rule.limit, call) or not rule.is_budget)
            )
            # After the last call of a budget, no call is checked.
            for call, plan in zip(tool_calls, step.plans, strict=False)
        )
        return step.with_plans(plans, used=used)

    def conclude(self, step: Step, change: Change) -> Change:
        """Choose another model; leave the decision to `around_model` if there is a reserve."""
        if step.pending is not None or change.error or "jump_to" in (change.update or {}):
            return change
        if self._downgrades:
            by = _downgraded_by(step)
            verdicts = [replace(verdict, downgraded_by=by) for verdict in change.verdicts]
            change = change._replace(verdicts=verdicts).writing(Ledger(downgraded=by))
            if by:
                change = change._replace(model=(self._downgrades[by], {}))
        if not self._second_check.has_reserves:
            return change
        change = change.saving(self.name, {"admitted": first_check(step, change)})
        return change._replace(verdicts=())

    def after_model(self, state: State, *, saved: bool) -> None:
        """Learn what is written; raise what a refused call could not raise in the model's step."""
        if saved:
            self._late.forget(state)
            graph = running_graph() if self._charges_all else None
            if graph is not None and graph.step is not None:
                graph.step = graph.step._replace(state=_counts_in(state))
        error = feature_ledger(state, self.name).get("error")
        if error is not None:
            *numbers, text = error
            decision = self._memory(ledger(state).get("ended") or "").pop("decision", None)
            raised = ModelCallLimitExceededError(*numbers, message=text, decision=decision)
            raise with_work(raised, state)

    async def shape_request(self, mode: Mode, request: Request) -> Request:  # noqa: ARG002 - as for every feature
        """Have the call go to the other model, where the budget is nearly used up."""
        other = self._downgrades.get(ledger(request.state).get("downgraded") or "")
        if other is None:
            return request
        task = model_context(request.state, request.runtime).task(self._kernel.name)
        # Another middleware may make an equal model for each request.
        first = settings = hash(dumps(request.model))
        if task is not None:
            first = self._memory(task).setdefault("settings", first)
        # A later attempt of the step with another model is a fallback, which stays.
        return request.override(model=other) if first == settings else request

    async def around_model(
        self, mode: Mode, request: Request, call: ModelCall, written: Update
    ) -> ModelResponse[Any] | None:
        """Reserve what the call can use, make it, and charge what it has used."""
        kernel, state, runtime = self._kernel, request.state, request.runtime
        limits, places = await kernel.resolve_limits(mode, "model", state, runtime)
        context = model_context(state, runtime)
        charge_to = _charge_context(state, limits, places, context)
        task = context.task(kernel.name)
        await self._charge_others(mode, charge_to)
        memory = {} if task is None else self._memory(task)
        # The first check does not know what earlier attempts of the same task have used.
        is_retry = "made" in memory
        if self._second_check.has_reserves or is_retry:
            first = None if is_retry else feature_ledger(state, self.name).get("admitted")
            reserved = await self._second_check.reserve(mode, request, charge_to, first, written)
            if reserved is None:
                return None
            request, charge_to = reserved
        else:
            request = await kernel.shape_request(mode, request)
        graph = running_graph() if self._charges_all else None
        charge = partial(self._charging.charge, is_call=True)
        checked = partial(self._pricing.check, agent=charge_to.call.agent)
        with own_call(checked, graph) if self._counts_use else nullcontext() as own_runs:
            try:
                with self._stopwatch.measured(state) as work:
                    response = await call(request)
            except BaseException as error:
                runs = own_runs.runs() if own_runs else []
                await charge(_mode_after(mode, error), charge_to, runs=runs, work=work)
                raise
            finally:
                memory["made"] = True
        runs = own_runs.runs() if own_runs else []
        charge_to = charge_to._replace(answered_by=self._answering(context))
        entries = {**await charge(mode, charge_to, runs=runs, work=work), "admitted": None}
        entries |= self._second_check.measured(request, runs)
        written[LEDGER] = merge_ledgers(written.get(LEDGER, {}), Ledger(own={self.name: entries}))
        for run in runs:
            if run.usage.estimated and run.succeeded:
                model = next(iter(run.usage.models), "")
                kernel.recorder.warn_of_estimate(model, kernel.created_at)
        return response

    def _answering(self, context: CallContext) -> str:
        """Return the task of a model call, if no hook of the middleware sees its answer."""
        is_last = self._kernel.checks_inline and self._kernel.repeats_model_calls
        return (context.task_id or "").partition("/")[0] if is_last else ""

    async def around_tool(
        self, mode: Mode, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Charge the time that a tool call works, and have what models in it use charged."""
        state: Any = request.state
        graph = running_graph() if self._charges_all else None
        # A resumed run may stop in its tools, before another hook knows whom to charge.
        is_resumed = graph is not None and graph.charge is None
        if not (self._counts_time or is_resumed) or not isinstance(state, Mapping):
            return await call(request)
        runtime = running_runtime()
        limits, places = await self._kernel.resolve_limits(mode, "model", state, runtime)
        charge_to = _charge_context(state, limits, places, model_context(state, runtime))
        if is_resumed:
            await self._charge_others(mode, charge_to)
        if not self._counts_time:
            return await call(request)
        of_time = [budget for budget in limits.budgets if budget.limit.counter == MILLISECONDS]
        charge_to = charge_to._replace(limits=LimitSet(of_time))
        try:
            with self._stopwatch.measured(state) as work:
                answered = await call(request)
        except BaseException as error:
            await self._charging.charge(_mode_after(mode, error), charge_to, work=work)
            raise
        await self._charging.charge(mode, charge_to, work=work)
        return answered


def _downgraded_by(step: Step) -> str:
    """Return the name of the first limit whose use sends calls to another model."""
    for budget in step.limits.budgets:
        limit: Any = budget.limit
        if limit.downgrade_to is not None and any(
            step.result.used[meter.counter] >= near_threshold(meter.maximum, limit.downgrade_at)
            for meter in budget.meters
            if meter.maximum is not None
        ):
            return str(limit.name)
    return ""


def _mode_after(mode: Mode, error: BaseException) -> Mode | None:
    """Return the mode in which to await something after an error."""
    # Where the event loop is closing, nothing can be awaited.
    return mode if not mode or isinstance(error, Exception | CancelledError) else None


def _of_time(limits: Sequence[Limit]) -> bool:
    """Return whether one of the limits has a number for the time that calls work."""
    return any(limit.unit == "milliseconds" and has_number(limit) for limit in limits)


def _counts_in(state: State) -> dict[str, Any]:
    """Return the counts of a state without its messages."""
    return {LEDGER: ledger(state), THREAD_TOOLS: state.get(THREAD_TOOLS)}


def _charge_context(
    state: State, limits: LimitSet, places: Places, context: CallContext
) -> ChargeContext:
    """Return who is charged for the model call that is being made."""
    call = Call("model", agent=context.agent, thread_id=context.thread_id)
    return ChargeContext(state, limits, places, call)


@contextmanager
def receipt_of(kernel: Kernel) -> Iterator[Receipt]:
    """Open a receipt, with the prices of a middleware, for what runs in the block."""
    has_prices = any(limit.unit == "nanodollars" for limit in kernel.limits)
    prices = resolve_prices(kernel.options["prices"]) if has_prices else None

    def price(usage: ModelUsage) -> tuple[int | None, str]:
        # The user's function may fail: the receipt says "cost unknown".
        with suppress(Exception):
            if prices is not None:
                return cost_and_source(usage, prices, kernel.options["unknown_price"])
        return None, "unknown"

    watch_runs()
    with opened(OpenReceipt(price)) as receipt:
        yield receipt
