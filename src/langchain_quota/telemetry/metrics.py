"""The Prometheus counters, gauges and histogram of decisions, made once per registry."""

from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from langchain_quota import __version__
from langchain_quota.concurrency import fork_safe_lock
from langchain_quota.decision import AT_ONCE, Decision, LimitStatus, Outcome, Refund, Scope
from langchain_quota.telemetry import names
from langchain_quota.telemetry.labels import NONE, Who, limit_label
from langchain_quota.telemetry.names import MetricSpec
from langchain_quota.telemetry.tracing import Exemplar, Judged
from langchain_quota.telemetry.workers import Spent
from langchain_quota.units import UNIT_LABELS, Level, Unit, in_base_unit

_REFUNDED = "refunded"
CANCELLED = "cancelled"

STORE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
"""The bounds of `langchain_quota_store_seconds`, in seconds."""

DECISION_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)
"""The bounds of `langchain_quota_decision_seconds`, in seconds."""

WAIT_BUCKETS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""The bounds of `langchain_quota_wait_seconds`, in seconds; the first has calls without a wait."""

Granted = tuple[str, Scope, Unit, int]
"""The name of a limit, the scope of its threshold, its unit, and how much was added to it."""


def _without_created(samples: Iterable[Sample]) -> Iterable[Sample]:
    # They would double the series, and Prometheus does not use them.
    return [each for each in samples if each.name != "_created"]


class _Counter(Counter):
    def _child_samples(self) -> Iterable[Sample]:
        return _without_created(super()._child_samples())


class _Histogram(Histogram):
    def _child_samples(self) -> Iterable[Sample]:
        return _without_created(super()._child_samples())


_Metric = TypeVar("_Metric", Counter, Histogram)
_Configured = tuple[object, ...]
"""The settings that a limit's series depend on; not the subjects of quotas."""


class Series(dict[tuple[str, ...], _Metric]):
    """The series of a metric by labels; those that differ in the last one begin together, at 0."""

    # So `increase()` sees the first increment of every series.

    def __init__(self, metric: _Metric, *last: str) -> None:
        super().__init__()
        self.metric: _Metric = metric
        self._last = last

    def __missing__(self, labels: tuple[str, ...]) -> _Metric:
        siblings = [(*labels[:-1], value) for value in {*self._last, labels[-1]}]
        made = {each: self.metric.labels(*each) for each in siblings}
        self.update(made)
        return made[labels]


class Metrics:
    """The sink that counts: the metrics of one registry."""

    # The methods take labels of agents and tools, and render them unchanged.

    def __init__(self, registry: CollectorRegistry, near: float) -> None:
        def counted(spec: MetricSpec, *last: str) -> Series[Counter]:
            return Series(_Counter(spec.name, spec.help, spec.labels, registry=registry), *last)

        def timed(spec: MetricSpec, bounds: tuple[float, ...], *last: str) -> Series[Histogram]:
            labels = spec.labels
            metric = _Histogram(spec.name, spec.help, labels, registry=registry, buckets=bounds)
            return Series(metric, *last)

        def gauge(spec: MetricSpec, mode: Literal["max", "mostrecent"]) -> Gauge:
            return Gauge(
                spec.name, spec.help, spec.labels, registry=registry, multiprocess_mode=mode
            )

        refusals = (Outcome.BLOCKED, Outcome.WOULD_BLOCK)
        self._calls = counted(names.CALLS, *Outcome)
        self._charges = counted(names.LIMIT_DECISIONS, Outcome.ALLOWED, _REFUNDED)
        self._refusals = Series(self._charges.metric, *refusals)
        self._crossings = counted(names.CROSSINGS, Level.NEAR, Level.EXHAUSTED)
        self.errors = counted(names.ERRORS)
        self.fallbacks = counted(names.STORE_FALLBACKS, "deny", "allow")
        self.unjudged = counted(names.UNJUDGED_CALLS)
        self._granted = counted(names.GRANTED)
        self._spent = {unit: counted(spec) for unit, spec in names.SPENT.items()}
        self.questions = counted(names.QUESTIONS, "asked", "approve", "reject")
        self.model_runs = counted(names.MODEL_RUNS, "reported", "estimated")
        self.runs = counted(names.RUNS)
        self._runs_ended = counted(names.RUNS_ENDED)
        self._limit = gauge(names.LIMIT, "mostrecent")
        self._limit_near = gauge(names.LIMIT_NEAR, "mostrecent")
        gauge(names.BUILD_INFO, "max").labels(__version__).set(1)
        self._store_seconds = timed(names.STORE_SECONDS, STORE_BUCKETS, "ok", "error", "timeout")
        self._decision_seconds = timed(names.DECISION_SECONDS, DECISION_BUCKETS, "state", "store")
        self._wait_seconds = timed(
            names.WAIT_SECONDS, WAIT_BUCKETS, Outcome.ALLOWED, *refusals, CANCELLED
        )
        self._near_share = near
        self._limits: dict[tuple[str, str], tuple[_Configured, Counter]] = {}
        # While a fork holds it, no thread is inside prometheus_client: otherwise the child would
        # find that package's own locks held.
        self._lock = fork_safe_lock()

    def add(self, series: Series[Counter], amount: float, *labels: str) -> None:
        """Count something."""
        with self._lock:
            series[labels].inc(amount)

    def observe_store(self, operation: str, outcome: str, seconds: float) -> None:
        """Time a request to the shared store."""
        with self._lock:
            self._store_seconds[operation, outcome].observe(seconds)

    def judged(self, told: Judged) -> None:
        """Count decisions for the calls and for each limit that matches one, and time them."""
        agent, kind = told.who.agent, told.decisions[0].call.kind
        shared = any(status.shared for each in told.decisions for status in each.limits)
        refused = False
        with self._lock:
            try:
                # The system's clock may have been set back since.
                seconds = max(0, told.took) / 1e9
                self._decision_seconds[kind, "store" if shared else "state"].observe(seconds)
                for index, decision in enumerate(told.decisions):
                    labels = agent, kind, told.tools[index], decision.outcome
                    self._calls[labels].inc(1, told.exemplars[index])
            finally:
                told.notice(self._near_share)
            for index, decision in enumerate(told.decisions):
                exemplar = told.exemplars[index]
                for status in decision.limits:
                    charged = self._meet(agent, status)
                    if status.reason is None:
                        if status.charged or (status.deferred and not status.enforced):
                            charged.inc(decision.call.amount, exemplar)
                    elif status.scope is not None:
                        refused = True
                        self._refuse(agent, status, status.scope, exemplar)
            limit = ended_by(told.decisions) if refused else None
            if limit is not None:
                self._runs_ended[agent, limit_label(limit)].inc()

    def crossed(self, told: Judged) -> None:
        """Count the thresholds that charges have crossed."""
        for status, scope, reached in told.notices:
            if reached is not None:
                labels = told.who.agent, limit_label(status.limit), scope, reached
                self.add(self._crossings, 1, *labels)

    def charged(self, told: Judged, amount: int, exemplar: Exemplar) -> None:
        """Count a charge that is no part of a decision."""
        (status,) = told.decisions[0].limits
        try:
            with self._lock:
                self._meet(told.who.agent, status).inc(amount, exemplar)
        finally:
            told.notice(self._near_share)

    def refunded(self, who: Who, refund: Refund) -> None:
        """Count a charge taken back."""
        labels = (who.agent, limit_label(refund.limit), NONE, _REFUNDED)
        self.add(self._charges, refund.call.amount, *labels)

    def spend(self, who: Who, model: str, spent: Sequence[Spent], usage: str, price: str) -> None:
        """Count a model run that limits were charged for, and what it has spent of them."""
        with self._lock:
            self.model_runs[who.agent, model, price, usage].inc()
            for limit, unit, amount in spent:
                # Agents, limits and models are bounded, so these series are, too.
                series = self._spent[unit][who.agent, limit_label(limit), model]
                series.inc(in_base_unit(amount, unit))

    def grant(self, who: Who, limit: str, scope: Scope, unit: Unit, amount: int) -> None:
        """Count what was granted on top of a limit."""
        labels = who.agent, limit_label(limit), scope, UNIT_LABELS[unit]
        self.add(self._granted, in_base_unit(amount, unit), *labels)

    def waited(self, who: Who, limit: str, decision: str, seconds: float) -> None:
        """Time how long a call has waited for others to end."""
        name = limit_label(limit)
        with self._lock:
            self._wait_seconds[who.agent, name, decision].observe(seconds)
            # The first refusal is then seen as such.
            _ = self._refusals[who.agent, name, AT_ONCE, Outcome.BLOCKED]

    def refused_at_once(self, who: Who, status: LimitStatus, exemplar: Exemplar) -> None:
        """Count a refusal at the cap on calls at once, or because its count is unknown."""
        with self._lock:
            if status.scope is not None:
                self._refuse(who.agent, status, status.scope, exemplar)

    def _refuse(self, agent: str, status: LimitStatus, scope: Scope, exemplar: Exemplar) -> None:
        outcome = Outcome.BLOCKED if status.enforced else Outcome.WOULD_BLOCK
        self._refusals[agent, limit_label(status.limit), scope, outcome].inc(exemplar=exemplar)

    def _meet(self, agent: str, status: LimitStatus) -> Counter:
        """Where charges of a limit are counted; its first call and new settings make its series."""
        configured: _Configured = (
            *(status.shared, status.near, status.alert, status.enforced, status.unit),
            *(status.thread_limit, status.run_limit),
        )
        if status.computed or status.quotas:
            configured = configured[:5] + tuple(
                (scope, None if scope in status.computed else status.threshold(scope))
                for scope in status.scopes
            )
        known = self._limits.get((agent, status.limit))
        if known is None or known[0] != configured:
            charged = self._charges[agent, limit_label(status.limit), NONE, Outcome.ALLOWED]
            known = self._limits[agent, status.limit] = configured, charged
            self._begin(agent, limit_label(status.limit), status)
        return known[1]

    def _begin(self, agent: str, limit: str, status: LimitStatus) -> None:
        """Make the series of a limit, and show its settings."""
        for scope in status.scopes:
            _ = self._refusals[agent, limit, scope, Outcome.BLOCKED]
            _ = self._crossings[agent, limit, scope, Level.NEAR]
            if scope not in status.computed:
                most = in_base_unit(status.threshold(scope) or 0, status.unit)
                self._limit.labels(agent, limit, scope, UNIT_LABELS[status.unit]).set(most)
        _ = self._runs_ended[agent, limit]
        if status.enforced and status.exit_behavior == "ask":
            _ = self.questions[agent, limit, "asked"]
        # A limit on trial refuses nothing, so nobody is near it.
        if status.enforced:
            near = self._near_share if status.near is None else status.near
            self._limit_near.labels(agent, limit, str(status.alert).lower()).set(near)


def ended_by(decisions: Sequence[Decision]) -> str | None:
    """The first limit that ends the run with these decisions, if one does."""
    for decision in decisions:
        if decision.outcome is Outcome.BLOCKED:
            for status in decision.refused_by:
                ends = status.exit_behavior != "continue" and status.reason != "store"
                if status.enforced and ends:
                    return status.limit
    return None
