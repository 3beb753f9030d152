"""The calls of a step, and their plans.

batch = tool_batch(…) or model_batch(…)
result = batch.by_state(), the store's answer to batch.to_store(), or batch.without_store(…)
conclusion = conclude(batch, result)
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
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


def refund_corrections(step: str, refunds: Mapping[str, Amounts]) -> tuple[Correction, ...]:
    """Return the corrections that refund calls in a store, each once in a step."""
    return tuple(
        Correction(f"{step}/{call_id}", {key: -amount for key, amount in amounts.items()})
        for call_id, amounts in refunds.items()
    )


class HookResult(NamedTuple):
    """Verdicts of a hook, and its update, refunds and exception."""

    verdicts: Sequence[Verdict]
    update: Update | None = None
    refunds: Sequence[Refund] = ()
    error: Exception | None = None


@dataclass(slots=True, kw_only=True)
class Batch:
    """Calls that are checked together, and their plans."""

    state: State
    ledger: Ledger
    context: CallContext
    task: str
    limits: LimitSet
    places: Places
    calls: Sequence[Call]
    plans: Sequence[Plan]
    used: dict[str, int]
    # Makes the same batch under other limits.
    make: Callable[[LimitSet, Places], "Batch | None"]
    runtime: object = None
    original_limits: LimitSet = field(init=False)
    stops: Mapping[str, int] = field(default_factory=dict)
    started: int = field(default_factory=time.time_ns)
    demands: Sequence[Demand] = field(init=False)
    index_of: Sequence[int] = field(init=False)
    # The name of a request that is never repeated; by default the task's name.
    name: str = ""
    sent: AcquireRequest | None = None
    # The counts against which the calls were checked.
    counted: Mapping[str, int] = field(default_factory=dict)
    # Those whose subjects were frozen.
    frozen: Sequence[str] = ()
    answered: bool = False
    # What a store's grants added to its limits, by the name of the count.
    granted: Mapping[str, int] = field(default_factory=dict)
    # The model that a model call is to reach, with its settings, if that is known before it.
    model: tuple[BaseChatModel, Mapping[str, Any]] | None = None
    # What a person answered at a limit.
    answer: Answer | None = None
    # How long the calls have waited for room, in seconds.
    waited: float = 0.0
    # The data of features about the batch, by their names.
    feature_data: dict[str, Any] = field(default_factory=dict)
    # An update of the ledger, beside that of the hook result.
    ledger_update: Ledger = field(default_factory=Ledger)
    # Of tool calls: the id of their message, those that wait, and what is charged to them.
    message: str | None = None
    middleware: str = ""
    pending: PendingCalls | None = None
    every_call: Sequence[Call] = ()
    counts: ToolCounts | None = None
    renewed: Sequence[Correction] = ()

    def __post_init__(self) -> None:
        self.original_limits = self.limits
        self.demands, self.index_of = demands_of(self.calls, self.plans)

    def set_plans(self, plans: Iterable[Plan]) -> None:
        """Replace the plans of the calls."""
        self.plans = [*plans]
        self.demands, self.index_of = demands_of(self.calls, self.plans)

    def rebuild(self, limits: LimitSet, places: Places) -> "Batch":
        """Return a batch of the same calls under other limits; its check began with this one."""
        batch = self.make(limits, places)
        assert batch is not None  # noqa: S101 - for the type checker: the calls wait
        batch.started, batch.model = self.started, self.model
        return batch

    def save(self, feature: str, values: Mapping[str, object]) -> None:
        """Add a feature's values to the update of the ledger."""
        if values:
            self.ledger_update = merge_ledgers(
                self.ledger_update, Ledger(own={feature: {**values}})
            )

    @property
    def pending_calls(self) -> PendingCalls:
        """Calls of a batch of tool calls."""
        assert self.pending is not None  # noqa: S101 - for the type checker
        return self.pending

    @property
    def tool_counts(self) -> ToolCounts:
        """Counts of a batch of tool calls."""
        assert self.counts is not None  # noqa: S101 - for the type checker
        return self.counts

    @property
    def question(self) -> str:
        """Name of the question to a person about the calls; the same if the node runs again."""
        # In a graph, a model call is then another one.
        contents = [(message.type, message.content) for message in self.state.get("messages") or ()]
        node = call_context(running_runtime())
        return node.step(f"{self.middleware}/{self.message or contents}")

    def by_state(self) -> AcquireResult:
        """Return the result by the state's counts."""
        return admit(self.demands, self.used, self.stops)

    def to_store(self) -> AcquireRequest:
        """Return the request to a store, and keep it as `sent`."""
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
        self.sent = AcquireRequest(
            # An answer that is remembered is matched by position.
            idempotency_key=f"{name}/{len(counters)}/{len(self.demands)}",
            attempt_id=token_hex(16),
            counters=counters,
            demands=tuple(self.demands),
            stops=self.stops,
            corrections=tuple(self.renewed),
        )
        return self.sent

    def without_store(self, outage: OnStoreError) -> AcquireResult:
        """Return the result by the state's counts alone, while the store is unavailable."""
        # "block" refuses every call of a limit with a count in the store, by a threshold of -1.
        # "allow" leaves out quotas.
        self.limits = self.limits.without_store(outage)
        self.set_plans(
            Plan.of(rule.without_store(outage) for rule in plan.rules) for plan in self.plans
        )
        return self.by_state()

    def raise_limits(self, granted: Mapping[str, int]) -> None:
        """Raise the limits by grants of the store, by the name of the count."""
        self.granted, self.limits = granted, self.limits.raised(granted)
        self.set_plans(Plan.of(rule.raised(granted) for rule in plan.rules) for plan in self.plans)

    def decide(
        self, result: AcquireResult, *, charging: bool = True
    ) -> tuple[list[Verdict], list[Breach]]:
        """Return the verdict about each call, and the enforced limits that refuse calls."""
        exits: dict[str, Exit] = {}
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


def model_batch(  # noqa: PLR0913 - what a hook knows
    state: State,
    runtime: object,
    limits: LimitSet,
    places: Places,
    *,
    task: str,
    context: CallContext | None = None,
) -> Batch:
    """Return the batch of the next model call."""
    context = model_context(state, runtime, context)
    call = Call("model", agent=context.agent, thread_id=context.thread_id)
    return Batch(
        state=state,
        ledger=ledger(state),
        context=context,
        task=task,
        limits=limits,
        places=places,
        calls=[call],
        plans=[limits.plan_for(call)],
        used=model_counts(state),
        runtime=runtime,
        make=partial(model_batch, state, runtime, task=task, context=context),
        stops=limits.stops,
    )


def model_context(state: State, runtime: object, context: CallContext | None = None) -> CallContext:
    """Return the agent and thread of a model call; inside a tool, the newest answer tells them."""
    context = context or call_context(runtime)
    if context.own_name == context.agent or not run_model(state):
        return context
    return context.answered_by(newest_name(state.get("messages") or ()))


def tool_batch(  # noqa: PLR0913 - what a hook knows
    state: State,
    runtime: object,
    context: CallContext,
    limits: LimitSet,
    places: Places,
    *,
    middleware: str,
    every_call: bool = True,
    task: str = "",
) -> Batch | None:
    """Return the batch of the tool calls that wait for an answer, or `None` without any."""
    waiting = pending_calls(state)
    if waiting is None or not waiting.calls:
        return None
    run_ledger = ledger(state)
    final = run_ledger.get("final")
    context = context.answered_by(waiting.message.name)
    calls = [
        Call("tool", call["name"], call["id"], 1, context.agent, context.thread_id)
        for call in waiting.calls
    ]
    plans = [limits.plan_for(call) for call in calls]
    matched = {str(call.id) for call, plan in zip(calls, plans, strict=True) if plan.rules}
    if not (every_call or final or matched or _has_charged(limits, waiting, run_ledger)):
        return None
    # After the last call of a budget no tool runs.
    pairs = () if final else zip(calls, plans, strict=True)
    checked = [(call, plan) for call, plan in pairs if plan.rules or every_call]
    counts = ToolCounts.of(state, run_ledger, waiting.message.id)
    used: dict[str, int] = {}
    for _, plan in checked:
        for rule in plan.rules:
            thread, run, *_ = rule.meters
            if thread.counter not in used:
                used[thread.counter], used[run.counter] = counts.used(rule.limit.counter, matched)
    # With the structured response the run ends anyway.
    stops: dict[str, int] = {}
    if limits.stops and not waiting.structured:
        refusals = (run_ledger.get("refusals") or {}).get(middleware, {})
        stops = {
            name: max(1, n - refusals.get(name, 0))
            for name, n in limits.stops.items()
            if limits.by_name[name].unit == "calls"
        }
    renewed: Sequence[Correction] = ()
    if counts.calls:
        # What a store charged for these calls before. The names are the same if the request is made
        # again, so that no refund is made twice.
        read = read_keys(places)
        keys = {call_id: counts.forget_keys(call_id, read) for call_id in sorted(matched)}
        step = context.step(task or middleware)
        charges = {call_id: amounts for call_id, amounts in keys.items() if amounts}
        renewed = refund_corrections(step, charges)
    return Batch(
        state=state,
        ledger=run_ledger,
        context=context,
        task=task or middleware,
        limits=limits,
        places=places,
        calls=[call for call, _ in checked],
        plans=[plan for _, plan in checked],
        used=used,
        runtime=runtime,
        make=partial(
            tool_batch,
            state,
            runtime,
            context,
            middleware=middleware,
            every_call=every_call,
            task=task,
        ),
        stops=stops,
        message=waiting.message.id or "",
        middleware=middleware,
        pending=waiting,
        every_call=calls,
        counts=counts,
        renewed=renewed,
    )


def _has_charged(limits: LimitSet, waiting: PendingCalls, run_ledger: Ledger) -> bool:
    """Return whether limits match an answered call of a message whose calls were charged."""
    # It is recorded that these limits have checked the message.
    batch = run_ledger.get("batch")
    if batch is None or batch["message"] != waiting.message.id:
        return False
    calls = waiting.message.tool_calls
    return any(limits.plan_for(Call("tool", call["name"])).rules for call in calls)
