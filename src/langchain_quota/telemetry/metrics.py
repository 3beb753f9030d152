"""The Prometheus counters, gauges and histograms of decisions, made once per registry."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from langchain_quota import __version__
from langchain_quota.core.decision import Decision, LimitStatus, Outcome, Refund
from langchain_quota.limits.call import Scope
from langchain_quota.runtime.sync_async import fork_safe_lock
from langchain_quota.runtime.units import UNIT_LABELS, Level, in_base_unit
from langchain_quota.telemetry import names
from langchain_quota.telemetry.events import CallerLabels, DecisionEvent, Granted, Spent
from langchain_quota.telemetry.labels import NONE, limit_label
from langchain_quota.telemetry.names import MetricSpec

_Configured = tuple[object, ...]
"""The settings that a limit's series depend on; not the subjects of quotas."""


class _Counter(Counter):
    def _child_samples(self) -> Iterable[Sample]:
        return _without_created(super()._child_samples())


class _Histogram(Histogram):
    def _child_samples(self) -> Iterable[Sample]:
        return _without_created(super()._child_samples())


def _without_created(samples: Iterable[Sample]) -> Iterable[Sample]:
    """The samples without the time of creation: it would double counters, and nothing uses it."""
    return [each for each in samples if each.name != "_created"]


_Metric = TypeVar("_Metric", Counter, Histogram)


class Series(dict[tuple[str, ...], _Metric]):
    """The series of a metric by labels; those that differ in the last one begin together, at 0."""

    # So `increase()` sees the first increment of every series.

    def __init__(self, metric: _Metric, last: Sequence[str]) -> None:
        super().__init__()
        self._metric: _Metric = metric
        self._last = last

    def __missing__(self, labels: tuple[str, ...]) -> _Metric:
        siblings = [(*labels[:-1], value) for value in {*self._last, *labels[-1:]}]
        made = {each: self._metric.labels(*each) for each in siblings}
        self.update(made)
        return made[labels]


class Metrics:
    """The sink that counts: the metrics of one registry."""

    # The methods take labels of agents and tools, and render them unchanged.

    def __init__(self, registry: CollectorRegistry, near: float) -> None:
        self._counters: dict[str, Series[Counter]] = {}
        self._histograms: dict[str, Series[Histogram]] = {}
        self._gauges: dict[str, Gauge] = {}
        for spec in names.METRICS:
            given: Any = {"labelnames": spec.labels, "registry": registry}
            if spec.is_of_table:
                continue
            if spec.kind == "counter":
                counter = _Counter(spec.name, spec.help, **given)
                self._counters[spec.name] = Series(counter, spec.together)
                if spec is names.LIMIT_DECISIONS:
                    self._refusals = Series(counter, (Outcome.BLOCKED, Outcome.WOULD_BLOCK))
            elif spec.kind == "histogram":
                histogram = _Histogram(spec.name, spec.help, buckets=spec.buckets, **given)
                self._histograms[spec.name] = Series(histogram, spec.together)
            else:
                gauge = Gauge(spec.name, spec.help, multiprocess_mode=spec.mode, **given)
                self._gauges[spec.name] = gauge
        self._gauges[names.BUILD_INFO.name].labels(__version__).set(1)
        self._calls = self._counters[names.CALLS.name]
        self._charges = self._counters[names.LIMIT_DECISIONS.name]
        self._decided = self._histograms[names.DECISION_SECONDS.name]
        self._near_share = near
        self._limits: dict[tuple[str, str], tuple[_Configured, Counter]] = {}
        # While a fork holds it, no thread is inside prometheus_client: otherwise the child would
        # find that package's own locks held.
        self._lock = fork_safe_lock()

    def count(self, spec: MetricSpec, amount: float, *labels: str) -> None:
        """Count something."""
        with self._lock:
            self._counters[spec.name][labels].inc(amount)

    def observe(self, spec: MetricSpec, seconds: float, *labels: str) -> None:
        """Time something."""
        with self._lock:
            self._histograms[spec.name][labels].observe(seconds)

    def judged(self, told: DecisionEvent) -> None:
        """Count decisions for the calls and for each limit that matches one, and time them."""
        agent, kind = told.who.agent, told.decisions[0].call.kind
        shared = any(status.shared for each in told.decisions for status in each.limits)
        # The system's clock may have been set back since.
        seconds = max(0, told.took) / 1e9
        judged = [*zip(told.decisions, told.exemplars, told.tools, strict=True)]
        refused = False
        with self._lock:
            self._decided[kind, "store" if shared else "state"].observe(seconds)
            for decision, exemplar, tool in judged:
                self._calls[agent, kind, tool, decision.outcome].inc(1, exemplar)
                if decision.downgraded_by:
                    downgraded = self._counters[names.DOWNGRADED.name]
                    downgraded[agent, limit_label(decision.downgraded_by)].inc()
            for decision, exemplar, tool in judged:
                for status in decision.limits:
                    if status.unit != "calls" and status.cost:
                        of_limit = agent, limit_label(status.limit), tool, Outcome.ALLOWED
                        paid = self._counters[names.TOOL_SPENT.name][of_limit]
                        paid.inc(in_base_unit(status.cost, status.unit), exemplar)
                    charged = self._meet(agent, status)
                    if status.reason is None:
                        if status.charged or (status.deferred and not status.enforced):
                            charged.inc(decision.call.amount, exemplar)
                    # If the store could not be asked, there is no scope: it counts for no limit.
                    elif status.scope is not None:
                        refused = True
                        self._refusal(agent, status).inc(exemplar=exemplar)
        limit = ended_by(told.decisions) if refused else None
        if limit is not None:
            self.count(names.RUNS_ENDED, 1, agent, limit_label(limit))

    def crossed(self, told: DecisionEvent) -> None:
        """Count the thresholds that charges have crossed."""
        for status, scope, reached in told.notices:
            if reached is not None:
                labels = told.who.agent, limit_label(status.limit), scope, reached
                self.count(names.CROSSINGS, 1, *labels)

    def charged(self, told: DecisionEvent) -> None:
        """Count a charge that is no part of a decision."""
        with self._lock:
            for status in told.decisions[0].limits:
                self._meet(told.who.agent, status).inc(told.charged, told.exemplars[0])

    def refused(self, told: DecisionEvent) -> None:
        """Count refusals that are no part of a decision: at the cap on calls at once."""
        with self._lock:
            for status in told.decisions[0].limits:
                if status.scope is not None:
                    self._refusal(told.who.agent, status).inc(exemplar=told.exemplars[0])

    def refunded(self, who: CallerLabels, tool: str, refund: Refund) -> None:
        """Count a charge taken back."""
        agent, limit, end = who.agent, limit_label(refund.limit), "refunded"
        if refund.call.amount:
            self.count(names.LIMIT_DECISIONS, refund.call.amount, agent, limit, NONE, end)
        if refund.nanodollars:
            dollars = in_base_unit(refund.nanodollars, "nanodollars")
            self.count(names.TOOL_SPENT, dollars, agent, limit, tool, end)

    def spend(
        self, who: CallerLabels, spent: Sequence[Spent], model: str, price: str, usage: str
    ) -> None:
        """Count a model run that limits were charged for, and what it has spent of them."""
        # Time is not that of a model run.
        if price:
            self.count(names.MODEL_RUNS, 1, who.agent, model, price, usage)
        for limit, unit, amount in spent:
            # Agents, limits and models are bounded, so these series are, too.
            labels = who.agent, limit_label(limit), model
            self.count(names.SPENT[unit], in_base_unit(amount, unit), *labels)

    def granted(self, who: CallerLabels, granted: Sequence[Granted]) -> None:
        """Count what was granted on top of limits."""
        for limit, scope, unit, amount in granted:
            labels = who.agent, limit_label(limit), scope, UNIT_LABELS[unit]
            self.count(names.GRANTED, in_base_unit(amount, unit), *labels)

    def waited(
        self, who: CallerLabels, limit: str, decision: str, seconds: float, scope: Scope
    ) -> None:
        """Time how long a call has waited."""
        name = limit_label(limit)
        self.observe(names.WAIT_SECONDS, seconds, who.agent, name, decision)
        with self._lock:
            # The first refusal is then seen as such.
            _ = self._refusals[who.agent, name, scope, Outcome.BLOCKED]

    def wait(self, who: CallerLabels, limit: str, more: int) -> None:
        """Count calls that wait now."""
        with self._lock:
            self._gauges[names.WAITING.name].labels(who.agent, limit_label(limit)).inc(more)

    def _refusal(self, agent: str, status: LimitStatus) -> Counter:
        outcome = Outcome.BLOCKED if status.enforced else Outcome.WOULD_BLOCK
        return self._refusals[agent, limit_label(status.limit), status.scope or NONE, outcome]

    def _meet(self, agent: str, status: LimitStatus) -> Counter:
        """Where charges of a limit are counted; its first call and new settings make its series."""
        computed = status.computed
        configured: _Configured = (
            *(status.near, status.alert, status.enforced, status.unit),
            *[None if each.scope in computed else each.limit for each in status.counts],
        )
        known = self._limits.get((agent, status.limit))
        if known is None or known[0] != configured:
            charged = self._charges[agent, limit_label(status.limit), NONE, Outcome.ALLOWED]
            known = self._limits[agent, status.limit] = configured, charged
            self._begin(agent, limit_label(status.limit), status)
        return known[1]

    def _begin(self, agent: str, limit: str, status: LimitStatus) -> None:
        """Make the series of a limit, and show its settings."""
        for count in (each for each in status.counts if each.limit is not None):
            _ = self._refusals[agent, limit, count.scope, Outcome.BLOCKED]
            _ = self._counters[names.CROSSINGS.name][agent, limit, count.scope, Level.NEAR]
            if count.scope not in status.computed:
                labels = agent, limit, count.scope, UNIT_LABELS[status.unit]
                most = in_base_unit(count.limit or 0, status.unit)
                self._gauges[names.LIMIT.name].labels(*labels).set(most)
        _ = self._counters[names.RUNS_ENDED.name][agent, limit]
        if status.enforced and status.exit_behavior == "ask":
            _ = self._counters[names.QUESTIONS.name][agent, limit, "asked"]
        # A limit on trial refuses nothing, so nobody is near it.
        if status.enforced:
            near = self._near_share if status.near is None else status.near
            alert = str(status.alert).lower()
            self._gauges[names.LIMIT_NEAR.name].labels(agent, limit, alert).set(near)


def ended_by(decisions: Sequence[Decision]) -> str | None:
    """The first limit that ends the run with these decisions, if one does."""
    for decision in decisions:
        if decision.outcome is Outcome.BLOCKED:
            for status in decision.refused_by:
                ends = status.enforced and status.exit_behavior != "continue"
                if ends and status.scope is not None:
                    return status.limit
    return None
