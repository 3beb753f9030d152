"""The Prometheus counters, gauges and histograms of decisions, created once per registry."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from langchain_quota import __version__
from langchain_quota.core.decide import Verdict
from langchain_quota.core.decision import LimitStatus, Outcome, Refund
from langchain_quota.core.plans import Plan, Rule
from langchain_quota.limits import Limit
from langchain_quota.limits.budgets import TokenLimit
from langchain_quota.limits.call import CALL, CONCURRENCY, RUN, THREAD
from langchain_quota.limits.calls import ConcurrencyLimit
from langchain_quota.runtime.compat import without_created
from langchain_quota.runtime.sync_async import fork_safe_lock
from langchain_quota.runtime.units import UNIT_LABELS, Level, in_base_unit, near_threshold, rate_of
from langchain_quota.telemetry import names
from langchain_quota.telemetry.events import CallerLabels, DecisionEvent, LimitSpend
from langchain_quota.telemetry.labels import NONE, BoundedLabels, limit_label
from langchain_quota.telemetry.names import MetricSpec

_LimitSettings = tuple[object, ...]
"""The settings that a limit's series depend on; not the subjects of quotas."""

_Counter = without_created(Counter)
_Histogram = without_created(Histogram)

_Metric = TypeVar("_Metric", Counter, Histogram)


class Series(dict[tuple[str, ...], _Metric]):
    """The series of a metric by labels; those that differ in the last one begin together, at 0."""

    # `increase()` sees the first increment of a series only if it began at 0.

    def __init__(self, metric: _Metric, last_values: Sequence[str]) -> None:
        super().__init__()
        self._metric: _Metric = metric
        self._last_values = last_values

    def __missing__(self, labels: tuple[str, ...]) -> _Metric:
        siblings = [(*labels[:-1], value) for value in {*self._last_values, *labels[-1:]}]
        created = {sibling: self._metric.labels(*sibling) for sibling in siblings}
        self.update(created)
        return created[labels]


class Metrics:
    """The sink of metrics, for one registry."""

    # Callers pass the bounded labels of agents and tools, not their names.

    def __init__(self, registry: CollectorRegistry, near_share: float) -> None:
        self._counters: dict[str, Series[Counter]] = {}
        self._histograms: dict[str, Series[Histogram]] = {}
        self._gauges: dict[str, Gauge] = {}
        for spec in names.METRICS:
            if spec.is_of_table:
                continue
            head = spec.name, spec.help, spec.labels
            if spec.kind == "counter":
                counter = _Counter(*head, registry=registry)
                self._counters[spec.name] = Series(counter, spec.together)
                if spec is names.LIMIT_DECISIONS:
                    self._refusals = Series(counter, (Outcome.BLOCKED, Outcome.WOULD_BLOCK))
            elif spec.kind == "histogram":
                histogram = _Histogram(*head, buckets=spec.buckets, registry=registry)
                self._histograms[spec.name] = Series(histogram, spec.together)
            else:
                gauge = Gauge(*head, multiprocess_mode=spec.mode, registry=registry)
                self._gauges[spec.name] = gauge
        self._gauges[names.BUILD_INFO.name].labels(__version__).set(1)
        self._calls = self._counters[names.CALLS.name]
        self._charges = self._counters[names.LIMIT_DECISIONS.name]
        self._decision_seconds = self._histograms[names.DECISION_SECONDS.name]
        self._near_share = near_share
        self._limits: dict[tuple[str, str], tuple[Rule, _LimitSettings, Counter]] = {}
        # A fork takes this lock, so no thread is inside prometheus_client at that moment. Otherwise
        # the child could inherit a lock of that package that nobody releases.
        self._lock = fork_safe_lock()

    def begin_series(self, agent: str, limits: Iterable[Limit], tools: BoundedLabels) -> None:
        """Create the series of limits at 0, and those of the tools that they name."""
        with self._lock:
            for limit in limits:
                name = limit_label(limit.name)
                numbers = {THREAD: limit.thread_limit, RUN: limit.run_limit}
                numbers |= {quota.name: quota.limit for quota in limit.quotas}
                if isinstance(limit, ConcurrencyLimit):
                    _ = self._refusals[agent, name, CONCURRENCY, Outcome.BLOCKED]
                else:
                    _ = self._charges[agent, name, NONE, Outcome.ALLOWED]
                    _ = self._counters[names.RUNS_ENDED.name][agent, name]
                if getattr(limit, "wait", None) is not None:
                    self._gauges[names.WAITING.name].labels(agent, name)
                if isinstance(limit, TokenLimit) and limit.call_limit is not None:
                    _ = self._refusals[agent, name, CALL, Outcome.BLOCKED]
                for scope in (scope for scope, number in numbers.items() if number is not None):
                    _ = self._refusals[agent, name, scope, Outcome.BLOCKED]
                    _ = self._counters[names.CROSSINGS.name][agent, name, scope, Level.NEAR]
                for tool in limit.named_tools:
                    _ = self._calls[agent, "tool", tools[agent, tool], Outcome.ALLOWED]

    def count(self, spec: MetricSpec, amount: float, *labels: str) -> None:
        """Add an amount to a counter."""
        with self._lock:
            self._counters[spec.name][labels].inc(amount)

    def observe(self, spec: MetricSpec, seconds: float, *labels: str) -> None:
        """Add a duration to a histogram."""
        with self._lock:
            self._histograms[spec.name][labels].observe(seconds)

    def count_decisions(self, event: DecisionEvent) -> None:
        """Count verdicts for the calls and for each limit that matches one, and time the check."""
        agent, kind = event.caller.agent, event.verdicts[0].call.kind
        refused = shared = False
        with self._lock:
            # Calls come first: they are counted even if counting for a limit fails.
            for index, verdict in enumerate(event.verdicts):
                calls = self._calls[agent, kind, event.tools[index], verdict.outcome]
                calls.inc(not verdict.needs_slot, event.exemplars.get(index))
                shared = shared or verdict.plan.shared
                if verdict.downgraded_by:
                    downgraded = self._counters[names.DOWNGRADED.name]
                    downgraded[agent, limit_label(verdict.downgraded_by)].inc()
            # The duration is below 0 if the system's clock was set back during the check.
            seconds = max(0, event.duration) / 1e9
            self._decision_seconds[kind, "store" if shared else "state"].observe(seconds)
            for index, verdict in enumerate(event.verdicts):
                exemplar, tool = event.exemplars.get(index), event.tools[index]
                for number, rule in enumerate(verdict.plan.rules):
                    limit = rule.limit
                    if verdict.cost and limit.unit == "nanodollars" and verdict.amounts[number]:
                        labels = agent, limit_label(limit.name), tool, Outcome.ALLOWED
                        dollars = in_base_unit(verdict.amounts[number], limit.unit)
                        self._counters[names.TOOL_SPENT.name][labels].inc(dollars, exemplar)
                    charges = self._charges_of(agent, rule)
                    in_dry_run = limit.name in verdict.deferred and not limit.enforce
                    if verdict.charged[number] or (
                        in_dry_run and limit.name not in verdict.refused
                    ):
                        charges.inc(verdict.call.amount, exemplar)
                # A refusal without a scope comes from the store's outage, and from no limit.
                for status in verdict.refused_by if verdict.refused else ():
                    if status.scope is not None:
                        refused = True
                        self._refusals_of(agent, status).inc(exemplar=exemplar)
        ending = find_ending_limit(event.verdicts) if refused else None
        if ending is not None:
            self.count(names.RUNS_ENDED, 1, agent, limit_label(ending))

    def count_crossings(self, event: DecisionEvent) -> None:
        """Find the refusals and the thresholds that charges have crossed; count the latter."""
        for verdict in event.verdicts:
            prepared, before, amounts = verdict.plan.prepared, verdict.before, verdict.amounts
            near = prepared["near"] if "near" in prepared else self._find_near(verdict.plan)
            crossed = [n for n, counter, first in near if before[counter] + amounts[n] >= first]
            if not (crossed or verdict.refused):
                continue
            for index, rule in enumerate(verdict.plan.rules):
                status = verdict.decision.limits[index]
                if rule.limit.name in verdict.refused:
                    event.notices.append((verdict, status, status.refusal_scope or "", None))
                elif verdict.charged[index] and index in crossed:
                    # Of several shares, each is told once by `record_near`.
                    told = isinstance(rule.limit.near, tuple)
                    event.notices += [
                        (verdict, status, scope, level)
                        for scope, level in status.threshold_events(self._near_share)
                        if level is Level.EXHAUSTED or not told
                    ]
        for _, status, scope, reached in event.notices:
            if reached is not None:
                labels = event.caller.agent, limit_label(status.limit), scope, reached
                self.count(names.CROSSINGS, 1, *labels)

    def _find_near(self, plan: Plan) -> list[tuple[int, str, int]]:
        """Return the index of each rule with its counters, and the counts from which it is near."""
        plan.prepared["near"] = near = [
            (index, meter.counter, near_threshold(meter.maximum, share))
            for index, rule in enumerate(plan.rules)
            for share in (rule.limit.near_share or self._near_share,)
            for meter in rule.meters
            if meter.maximum is not None
        ]
        return near

    def count_charge(self, event: DecisionEvent) -> None:
        """Count a charge that is no part of a decision."""
        with self._lock:
            for rule in event.verdicts[0].plan.rules:
                charges = self._charges_of(event.caller.agent, rule)
                charges.inc(event.charged_calls, event.exemplars.get(0))

    def count_slot_decision(self, event: DecisionEvent) -> None:
        """Count a verdict about slots for its call, and the refusals of concurrency limits."""
        agent, exemplar = event.caller.agent, event.exemplars.get(0)
        with self._lock:
            for verdict, tool in zip(event.verdicts, event.tools, strict=True):
                self._calls[agent, verdict.call.kind, tool, verdict.outcome].inc(1, exemplar)
                for status in verdict.refused_by:
                    if status.scope is not None:
                        self._refusals_of(agent, status).inc(exemplar=exemplar)

    def count_refund(self, caller: CallerLabels, tool: str, refund: Refund) -> None:
        """Count a refund of a charge."""
        agent, limit, end = caller.agent, limit_label(refund.limit), "refunded"
        if refund.call.amount:
            self.count(names.LIMIT_DECISIONS, refund.call.amount, agent, limit, NONE, end)
        if refund.nanodollars:
            dollars = in_base_unit(refund.nanodollars, "nanodollars")
            self.count(names.TOOL_SPENT, dollars, agent, limit, tool, end)

    def count_spend(
        self, caller: CallerLabels, spent: Sequence[LimitSpend], model: str, price: str, usage: str
    ) -> None:
        """Count a model run that was charged to limits, and what it has spent of them."""
        # Spent time has no price, because it is not the time of a model run.
        if price:
            self.count(names.MODEL_RUNS, 1, caller.agent, model, price, usage)
        for limit, unit, amount in spent:
            # The labels of agents, limits and models are bounded, and so is the number of series.
            labels = caller.agent, limit_label(limit), model
            self.count(names.SPENT[unit], in_base_unit(amount, unit), *labels)

    def observe_run(
        self, caller: CallerLabels, used: Sequence[LimitSpend], *, has_ended: bool
    ) -> None:
        """Add what a run has used to the histograms, if it has ended; create their series at 0."""
        with self._lock:
            for limit, unit, amount in used:
                histogram = self._histograms[names.RUN_USED[unit].name]
                series = histogram[caller.agent, limit_label(limit)]
                if has_ended:
                    series.observe(in_base_unit(amount, unit))

    def change_waiting(self, caller: CallerLabels, limit: str, change: int) -> None:
        """Change the number of calls that wait now."""
        with self._lock:
            self._gauges[names.WAITING.name].labels(caller.agent, limit_label(limit)).inc(change)

    def _refusals_of(self, agent: str, status: LimitStatus) -> Counter:
        outcome = Outcome.BLOCKED if status.enforced else Outcome.WOULD_BLOCK
        scope = status.refusal_scope or NONE
        return self._refusals[agent, limit_label(status.limit), scope, outcome]

    def _charges_of(self, agent: str, rule: Rule) -> Counter:
        """Return the counter of a limit's charges; create series for a limit with new settings."""
        limit = rule.limit
        entry = self._limits.get((agent, limit.name))
        if entry is not None and entry[0] is rule:
            return entry[2]
        settings: _LimitSettings = (
            *(limit.near, limit.alert, limit.enforce, limit.unit),
            *[
                (meter.spacing, None)
                if meter.computed
                else (meter.spacing, meter.maximum and meter.maximum - meter.granted)
                for meter in rule.meters
            ],
        )
        charges = self._charges[agent, limit_label(limit.name), NONE, Outcome.ALLOWED]
        self._limits[agent, limit.name] = rule, settings, charges
        if entry is None or entry[1] != settings:
            self._create_series(agent, limit_label(limit.name), rule)
        return charges

    def _create_series(self, agent: str, name: str, rule: Rule) -> None:
        """Create the series of a limit at 0, and set the gauges of its settings."""
        limit = rule.limit
        for meter in (meter for meter in rule.meters if meter.maximum is not None):
            _ = self._refusals[agent, name, meter.scope, Outcome.BLOCKED]
            _ = self._counters[names.CROSSINGS.name][agent, name, meter.scope, Level.NEAR]
            if meter.spacing or not meter.computed:
                amount = in_base_unit((meter.maximum or 0) - meter.granted, limit.unit)
                unit = UNIT_LABELS[limit.unit]
                if meter.spacing:
                    amount, unit = rate_of(meter.spacing, limit.unit, meter.window)
                    if meter.computed:
                        amount, unit = 0, f"{limit.unit} per second"
                labels = agent, name, meter.scope, unit
                self._gauges[names.LIMIT.name].labels(*labels).set(amount)
        _ = self._counters[names.RUNS_ENDED.name][agent, name]
        if limit.enforce and limit.exit_behavior == "ask":
            _ = self._counters[names.QUESTIONS.name][agent, name, "asked"]
        # A limit in dry run stops no call, so nobody is near it.
        if limit.enforce:
            near = limit.near_share or self._near_share
            alert = str(limit.alert).lower()
            self._gauges[names.LIMIT_NEAR.name].labels(agent, name, alert).set(near)


def find_ending_limit(verdicts: Sequence[Verdict]) -> str | None:
    """Return the first limit that ends the run with these verdicts, or `None`."""
    for verdict in verdicts:
        if verdict.outcome is Outcome.BLOCKED:
            for status in verdict.refused_by:
                ends = status.enforced and status.exit_behavior != "continue"
                if ends and status.scope is not None:
                    return status.limit
    return None
