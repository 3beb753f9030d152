"""A step: calls that are checked together, what is asked about them, and what comes back.

step = tool_step(…) or model_step(…)
step = step.by_state(), or step.by_store(request, its answer), or step.without_store(…)
change = conclude(step)
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from secrets import token_hex
from types import MappingProxyType
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel

from langchain_quota.core.admission import (
    AcquireRequest,
    AcquireResult,
    Correction,
    CountRef,
    Demand,
    admit,
)
from langchain_quota.core.decide import Breach, Verdict, decide, find_breaches
from langchain_quota.core.decision import Answer, Refund
from langchain_quota.core.plans import LimitSet, OnStoreError, Places, Plan, demands_of, read_keys
from langchain_quota.limits.call import RUN, THREAD, Call, Exit
from langchain_quota.limits.options import MODEL
from langchain_quota.middleware.context import CallContext, call_context, running_runtime
from langchain_quota.middleware.history import PendingCalls, newest_name, pending_calls
from langchain_quota.middleware.state import (
    LEDGER,
    Amounts,
    Ledger,
    State,
    ToolCounts,
    ledger,
    merge_ledgers,
    run_model,
    thread_model,
)

Update = dict[str, Any]
"""A hook's update of the state."""

OF_THREAD = f"{MODEL}/{THREAD}"
OF_RUN = f"{MODEL}/{RUN}"
"""The names of the counts of model calls."""

_UNASKED = AcquireResult({})


def refund_corrections(name: str, refunds: Mapping[str, Amounts]) -> tuple[Correction, ...]:
    """Return the corrections that refund calls in a store, each once in a step."""
    return tuple(
        Correction(f"{name}/{call_id}", {key: -amount for key, amount in amounts.items()})
        for call_id, amounts in refunds.items()
    )


Model = tuple[BaseChatModel, Mapping[str, Any]]
"""A model, and the settings of its call."""


class Change(NamedTuple):
    """What a hook gives back: verdicts, and the hook's update, refunds and exception."""

    verdicts: Sequence[Verdict]
    update: Update | None = None
    refunds: Sequence[Refund] = ()
    error: Exception | None = None
    # The model that answers in place of the step's.
    model: Model | None = None

    def saving(self, feature: str, values: Mapping[str, object]) -> "Change":
        """Return the change with a feature's values in the update of the ledger."""
        return self.writing(Ledger(own={feature: {**values}})) if values else self

    def writing(self, written: Ledger) -> "Change":
        """Return the change with this in the update of the ledger."""
        update = self.update or {}
        return self._replace(
            update={**update, LEDGER: merge_ledgers(update.get(LEDGER, {}), written)}
        )


class Step(NamedTuple):
    """Calls that are checked together, and what is known of them. Nobody changes it."""

    state: State
    runtime: object
    ledger: Ledger
    context: CallContext
    task: str
    limits: LimitSet
    places: Places
    calls: Sequence[Call]
    plans: Sequence[Plan]
    # What the plans add up to: for each call, the index of its demand.
    demands: Sequence[Demand]
    index_of: Sequence[int]
    used: Mapping[str, int]
    # The limits whose refusals stop the calls, and after how many refusals.
    stops: Mapping[str, int]
    started: int
    # The limits before grants of a store, and before features have adjusted the plans.
    original_limits: LimitSet
    # Of tool calls: the middleware, those that wait, what is charged to them, and what a store
    # charged before, which it charges again now.
    middleware: str = ""
    pending: PendingCalls | None = None
    every_call: Sequence[Call] = ()
    counts: ToolCounts | None = None
    renewed: Mapping[str, Amounts] = MappingProxyType({})
    # The model that a model call is to reach, with its settings, if that is known before it.
    model: Model | None = None
    # Of a second check: the name of its request, which is never repeated, and what makes the step
    # again under other limits.
    name: str = ""
    remake: Callable[[LimitSet, Places], "Step"] | None = None
    # The request to a store, and whether it was answered; then the answer, or that of the state.
    sent: AcquireRequest | None = None
    answered: bool = False
    result: AcquireResult = _UNASKED
    # The stops that hold while a store is unavailable, because nothing waits for it.
    outage_stops: Mapping[str, int] | None = None
    # What a person answered at a limit.
    answer: Answer | None = None
    # How long the calls have waited for room, in seconds, and the limit that made them wait.
    waited: float = 0.0
    waited_for: str = ""
    # An update of the ledger, beside that of the change.
    written: Ledger = Ledger()

    @property
    def is_second(self) -> bool:
        """Whether it is the second check of a model call, around the model, which asks nobody."""
        return bool(self.name)

    @property
    def message(self) -> str | None:
        """Id of the message of tool calls."""
        return None if self.pending is None else self.pending.message.id or ""

    @property
    def question(self) -> str:
        """Name of the question to a person about the calls; the same if the node runs again."""
        # In a graph, a model call is then another one.
        contents = [(message.type, message.content) for message in self.state.get("messages") or ()]
        node = call_context(running_runtime())
        return node.step(f"{self.middleware}/{self.message or contents}")

    def with_plans(self, plans: Iterable[Plan], **changed: Any) -> "Step":
        """Return the step with other plans."""
        plans = [*plans]
        demands, index_of = demands_of(self.calls, plans)
        return self._replace(plans=plans, demands=demands, index_of=index_of, **changed)

    def using(self, counts: Mapping[str, int]) -> "Step":
        """Return the step with other counts before it."""
        return self._replace(used={**self.used, **counts})

    def saving(self, feature: str, values: Mapping[str, object]) -> "Step":
        """Return the step with a feature's values in the update of the ledger."""
        return self._replace(written=merge_ledgers(self.written, Ledger(own={feature: {**values}})))

    def rebuilt(self, limits: LimitSet, places: Places) -> "Step":
        """Return a step of the same calls under other limits: begun, and waited, as this one."""
        made = self.state, self.runtime, self.context, limits, places
        step: Step | None
        if self.remake is not None:
            step = self.remake(limits, places)
        elif self.pending is None:
            step = model_step(*made, task=self.task, model=self.model)
        else:
            step = tool_step(*made, middleware=self.middleware, task=self.task)
        assert step is not None  # noqa: S101 - for the type checker: the calls wait
        return step._replace(
            started=self.started,
            context=self.context,
            waited=self.waited,
            waited_for=self.waited_for,
        )

    def by_state(self) -> "Step":
        """Return the step with the result by the state's counts."""
        return self._replace(result=admit(self.demands, self.used, self.stops))

    def request(self) -> AcquireRequest:
        """Return the request to a store."""
        counters: dict[str, CountRef] = {}
        rules = (rule for plan in self.plans for rule in plan.rules)
        for meter in (meter for rule in rules for meter in rule.meters):
            if meter.counter not in counters:
                place, used = self.places.get(meter.counter), self.used.get(meter.counter, 0)
                if place is None:
                    counters[meter.counter] = CountRef(None, used)
                    continue
                # A smooth quota is not reset: then the next call fits.
                resets_at = None if meter.spacing else place.resets_at
                ends = None if resets_at is None else resets_at.timestamp()
                kept = place.key, used, ends, place.mirrored, meter.lease, place.rollover
                counters[meter.counter] = CountRef(*kept)
        name = self.name or self.context.step(self.task)
        # The names are the same if the request is made again, so no refund is made twice.
        corrections = refund_corrections(name, self.renewed) if self.renewed else ()
        return AcquireRequest(
            # An answer that is remembered is matched by position.
            idempotency_key=f"{name}/{len(counters)}/{len(self.demands)}",
            attempt_id=token_hex(16),
            counters=counters,
            demands=tuple(self.demands),
            stops=self.stops,
            corrections=corrections,
        )

    def by_store(self, sent: AcquireRequest, result: AcquireResult) -> "Step":
        """Return the step with a store's answer, and with the limits that its grants raise."""
        granted, limits = result.granted, self.limits.raised(result.granted)
        step = self._replace(sent=sent, answered=True, result=result, limits=limits)
        if limits is self.limits:
            return step
        return step.with_plans(
            Plan.of(rule.raised(granted) for rule in plan.rules) for plan in self.plans
        )

    def without_store(self, sent: AcquireRequest, outage: OnStoreError) -> "Step":
        """Return the step with the result by the state's counts, while the store is unavailable."""
        # "block" refuses every call of a limit with a count in the store, by a threshold of -1.
        # "allow" leaves out quotas.
        limits = self.limits.without_store(outage)
        stops = self.stops if self.outage_stops is None else self.outage_stops
        plans = (Plan.of(rule.without_store(outage) for rule in plan.rules) for plan in self.plans)
        return self.with_plans(plans, limits=limits, sent=sent, stops=stops).by_state()

    def decide(self, *, charging: bool = True) -> tuple[list[Verdict], list[Breach]]:
        """Return the verdict about each call, and the enforced limits that refuse calls."""
        exits: dict[str, Exit] = {}
        result = self.result
        if any(result.refused):
            exits = {
                name: "end"
                for name, after in self.stops.items()
                if self.limits.by_name[name].exit_behavior == "continue"
                and sum(name in names for names in result.refused) >= after
            }
        if self.limits.asking:
            # After a person was asked, or could not be asked.
            is_rejected = self.answer is not None and self.answer.type == "reject"
            then: Exit = "end" if is_rejected or self.pending is None else "continue"
            exits |= dict.fromkeys(self.limits.asking, then)
        if self.pending is not None and self.limits.budgets:
            # What is left may be enough for the model.
            exits |= {rule.limit.name: "continue" for rule in self.limits.budgets}
        verdicts = decide(
            self.calls,
            self.plans,
            self.index_of,
            result,
            places=self.places,
            charging=charging,
            exits=exits,
            answer=self.answer,
            waited=self.waited,
        )
        if not any(result.refused):
            return verdicts, []
        return verdicts, find_breaches(self.limits, self.index_of, verdicts, result)


def model_counts(state: State) -> dict[str, int]:
    """Return the state's counts of model calls, by the name of the counter."""
    return {OF_THREAD: thread_model(state), OF_RUN: run_model(state)}


def model_step(  # noqa: PLR0913 - what a hook knows
    state: State,
    runtime: object,
    context: CallContext,
    limits: LimitSet,
    places: Places,
    *,
    task: str,
    model: Model | None = None,
) -> Step:
    """Return the step of the next model call."""
    context = model_context(state, runtime, context)
    call = Call("model", agent=context.agent, thread_id=context.thread_id)
    plan = limits.plan_for(call)
    return Step(
        *(state, runtime, ledger(state), context, task, limits, places, [call], [plan]),
        *([plan.demand], (0,), model_counts(state), limits.stops),
        started=time.time_ns(),
        original_limits=limits,
        model=model,
    )


def model_context(state: State, runtime: object, context: CallContext | None = None) -> CallContext:
    """Return the agent and thread of a model call; inside a tool, the newest answer tells them."""
    context = context or call_context(runtime)
    if context.own_name == context.agent or not run_model(state):
        return context
    return context.answered_by(newest_name(state.get("messages") or ()))


def tool_step(  # noqa: PLR0913 - what a hook knows
    state: State,
    runtime: object,
    context: CallContext,
    limits: LimitSet,
    places: Places,
    *,
    middleware: str,
    every_call: bool = True,
    task: str = "",
) -> Step | None:
    """Return the step of the tool calls that wait for an answer, or `None` without any."""
    waiting = pending_calls(state)
    if waiting is None or not waiting.calls:
        return None
    run_ledger = ledger(state)
    final = run_ledger.get("final")
    context = context.answered_by(waiting.message.name)
    every, calls, plans, matched = list[Call](), list[Call](), list[Plan](), set[str]()
    for asked in waiting.calls:
        call = Call("tool", asked["name"], asked["id"], 1, context.agent, context.thread_id)
        plan = limits.plan_for(call)
        every.append(call)
        if plan.rules:
            matched.add(str(call.id))
        # After the last call of a budget no tool runs.
        if (plan.rules or every_call) and not final:
            calls.append(call)
            plans.append(plan)
    if not (every_call or final or matched or _has_charged(limits, waiting, run_ledger)):
        return None
    counts = ToolCounts.of(state, run_ledger, waiting.message.id)
    used: dict[str, int] = {}
    for plan in plans:
        for rule in plan.rules:
            thread, run, *_ = rule.meters
            if thread.counter not in used:
                used[thread.counter], used[run.counter] = counts.used(rule.limit.counter, matched)
    # With the structured response the run ends anyway.
    has_stops = limits.stops and not waiting.structured
    stops = _tool_stops(limits, run_ledger, middleware) if has_stops else {}
    renewed: Mapping[str, Amounts] = {}
    if counts.calls:
        charged = {call: counts.forget_keys(call, read_keys(places)) for call in sorted(matched)}
        renewed = {call: amounts for call, amounts in charged.items() if amounts}
    return Step(
        *(state, runtime, run_ledger, context, task or middleware, limits, places),
        *(calls, plans, *demands_of(calls, plans), used, stops),
        started=time.time_ns(),
        original_limits=limits,
        middleware=middleware,
        pending=waiting,
        every_call=every,
        counts=counts,
        renewed=renewed,
    )


def _tool_stops(limits: LimitSet, run_ledger: Ledger, middleware: str) -> dict[str, int]:
    """Return the limits on tool calls that stop a run's calls, and after how many refusals now."""
    refusals = (run_ledger.get("refusals") or {}).get(middleware, {})
    return {
        name: max(1, after - refusals.get(name, 0))
        for name, after in limits.stops.items()
        if limits.by_name[name].unit == "calls"
    }


def _has_charged(limits: LimitSet, waiting: PendingCalls, run_ledger: Ledger) -> bool:
    """Return whether limits match an answered call of a message whose calls were charged."""
    # It is recorded that these limits have checked the message.
    batch = run_ledger.get("batch")
    if batch is None or batch["message"] != waiting.message.id:
        return False
    calls = waiting.message.tool_calls
    return any(limits.plan_for(Call("tool", call["name"])).rules for call in calls)
