"""What waits in a middleware, and what is decided about it, without an agent."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_quota.core.decide import Breach, Verdict
from langchain_quota.core.plans import (
    LimitSet,
    OnStoreError,
    Place,
    Places,
    Plan,
    Rule,
    demands_of,
    run_counter,
    thread_counter,
)
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from langchain_quota.limits.calls import ToolCallLimit
from langchain_quota.middleware.calls import Step
from langchain_quota.middleware.context import CallContext, fixed
from langchain_quota.middleware.state import Ledger

KEY = "search:thread:7"
"""Where a store keeps what a thread has searched."""


@dataclass(frozen=True)
class Used:
    """What is used of a limit: of the thread, the run, and its quotas in their order."""

    thread: int = 0
    run: int = 0
    quotas: tuple[int, ...] = ()


@dataclass(frozen=True)
class Checked:
    """The verdict about each call, the limits whose refusals hold, and the answer behind them."""

    verdicts: tuple[Verdict, ...]
    breaches: list[Breach]
    request: Step

    def used(self, limit: Limit) -> Used:
        """What is used of a limit afterwards, of the thread and the run."""
        result = self.request.result
        charged = result.charged(self.request.demands)
        thread, run = thread_counter(limit), run_counter(limit)
        return Used(
            result.used.get(thread, 0) + charged.get(thread, 0),
            result.used.get(run, 0) + charged.get(run, 0),
        )


def check(
    limits: Sequence[Limit | Rule],
    usage: Mapping[str, Used],
    calls: Sequence[Call],
    *,
    stops: bool = True,
    charging: bool = True,
    outage: OnStoreError | None = None,
    kept: Mapping[str, int] | None = None,
) -> Checked:
    """Check calls by counts that are given by what is counted.

    Args:
        limits: The limits.
        usage: What is used, by what a limit counts.
        calls: The calls.
        stops: Whether refusals may stop the batch.
        charging: Whether admitted calls are charged now.
        outage: What follows from a store that cannot be asked, if it is so.
        kept: Counts by their own names, which go before.
    """
    resolved = LimitSet(each if isinstance(each, Rule) else fixed(each) for each in limits)
    if outage is not None:
        resolved = resolved.without_store(outage)
    counts: dict[str, int] = dict(kept or {})
    for each in resolved.rules:
        used = usage.get(each.limit.counter, Used())
        rows = each.meters
        numbers = (used.thread, used.run, *used.quotas, *[0] * len(rows))
        # A quota may be a further threshold over a count that is there already.
        for row, number in zip(rows, numbers, strict=False):
            counts.setdefault(row.counter, number)
    plans = [resolved.plan_for(call) for call in calls]
    step = _step(Ledger(), CallContext(), "check", resolved, {}, calls, plans, counts)
    step = step._replace(stops=resolved.stops if stops else {}).by_state()
    verdicts, breaches = step.decide(charging=charging)
    return Checked(tuple(verdicts), breaches, step)


def request_of(
    *,
    task: str | None = None,
    own: int = 0,
    most: int = 5,
    calls: int = 1,
    **arguments: Any,
) -> Step:
    """Searches of a thread, in a step of their own unless the task has a name.

    Args:
        task: Names the task.
        own: The state's count.
        most: The thread's limit.
        calls: How many searches.
        **arguments: Further arguments of the limit.
    """
    limit = ToolCallLimit("search", thread_limit=most, **arguments)
    places = {thread_counter(limit): Place(KEY)}
    rule = Rule.of(limit, thread=most, run=None)
    limits = LimitSet([rule.stored(rule.meters, places)])
    searches = [Call("tool", "search", f"call-{index}") for index in range(calls)]
    plans = [limits.plan_for(call) for call in searches]
    used = {**dict.fromkeys(plans[0].demand.amounts, 0), thread_counter(limit): own}
    context = CallContext(task_id=task)
    return _step(Ledger(), context, "QuotaMiddleware", limits, places, searches, plans, used)


def _step(  # noqa: PLR0917 - what a step has
    ledger: Ledger,
    context: CallContext,
    task: str,
    limits: LimitSet,
    places: Places,
    calls: Sequence[Call],
    plans: Sequence[Plan],
    used: Mapping[str, int],
) -> Step:
    """A step of calls that wait."""
    asked = ledger, context, task, limits, places, calls, plans, *demands_of(calls, plans)
    return Step({}, None, *asked, used, limits.stops, _never, time.time_ns(), limits)


def _never(*_: object) -> None:
    """Nobody is asked, so nothing is checked under other limits."""
