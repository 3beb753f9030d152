"""The Prometheus counters, gauges and histogram of decisions, made once per registry."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from langchain_quota._version import __version__
from langchain_quota.decision import (
    AT_ONCE,
    STORE,
    Decision,
    LimitStatus,
    Outcome,
    Scope,
    Unit,
)
from langchain_quota.levels import Level
from langchain_quota.locks import fork_safe_lock
from langchain_quota.telemetry import names
from langchain_quota.telemetry.labels import NONE, limit_label
from langchain_quota.telemetry.names import MetricSpec
from langchain_quota.units import in_base_unit

_REFUNDED = "refunded"
CANCELLED = "cancelled"
_REPORTED, _ESTIMATED = "reported", "estimated"

STORE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
"""The bounds of `langchain_quota_store_seconds`, in seconds."""

DECISION_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)
"""The bounds of `langchain_quota_decision_seconds`, in seconds."""

WAIT_BUCKETS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""The bounds of `langchain_quota_wait_seconds`, in seconds; the first has calls without a wait."""

Exemplar = dict[str, str] | None
_Metric = TypeVar("_Metric", Counter, Histogram)


class _Siblings(dict[tuple[str, ...], dict[str, _Metric]]):
    """The series of a metric, by all labels but the last; siblings begin together, at 0."""

    # So `increase()` sees the first increment of every series.

    def __init__(self, metric: _Metric, values: Iterable[str]) -> None:
        self._metric: _Metric = metric
        self._values = tuple(values)

    def __missing__(self, labels: tuple[str, ...]) -> dict[str, _Metric]:
        made = {value: self._metric.labels(*labels, value) for value in self._values}
        self[labels] = made
        return made


class _Met(NamedTuple):
    """A limit of an agent, with the settings of its last call."""

    label: str
    configured: tuple[object, ...]
    charged: Counter


def _configured(status: LimitStatus) -> tuple[object, ...]:
    """The settings that a limit's series depend on; not the subjects of quotas."""
    options = (status.shared, status.near, status.alert, status.enforced, status.unit)
    if status.computed or status.quotas:
        numbers = [
            (scope, None if scope in status.computed else status.threshold(scope))
            for scope in status.scopes
        ]
        return options, *numbers
    return options, status.thread_limit, status.run_limit


class Metrics:
    """The metrics of one registry."""

    # The methods take labels of agents and tools, and render them unchanged.

    def __init__(self, registry: CollectorRegistry, near: float) -> None:
        def histogram(spec: MetricSpec, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(spec.name, spec.help, spec.labels, registry=registry, buckets=buckets)

        def counter(spec: MetricSpec) -> Counter:
            return Counter(spec.name, spec.help, spec.labels, registry=registry)

        def gauge(spec: MetricSpec, mode: Literal["max", "mostrecent"]) -> Gauge:
            return Gauge(
                spec.name, spec.help, spec.labels, registry=registry, multiprocess_mode=mode
            )

        self.calls = counter(names.CALLS)
        self.limit_decisions = counter(names.LIMIT_DECISIONS)
        self.near = counter(names.NEAR)
        self.exhausted = counter(names.EXHAUSTED)
        self.errors = counter(names.ERRORS)
        self.store_fallbacks = counter(names.STORE_FALLBACKS)
        self.calls_after_refusal = counter(names.CALLS_AFTER_REFUSAL)
        self.unjudged_calls = counter(names.UNJUDGED_CALLS)
        self.lost_root_runs = counter(names.LOST_ROOT_RUNS)
        self.granted = {unit: counter(spec) for unit, spec in names.GRANTED.items()}
        self.spent = {unit: counter(spec) for unit, spec in names.SPENT.items()}
        self.questions = counter(names.QUESTIONS)
        self.answers = counter(names.ANSWERS)
        self.model_runs = counter(names.MODEL_RUNS)
        self.unknown_prices = counter(names.UNKNOWN_PRICES)
        self.runs = counter(names.RUNS)
        self.runs_ended = counter(names.RUNS_ENDED)
        self.limit = {unit: gauge(spec, "mostrecent") for unit, spec in names.LIMIT.items()}
        self.limit_near = gauge(names.LIMIT_NEAR, "mostrecent")
        self.limit_alert = gauge(names.LIMIT_ALERT, "mostrecent")
        self._near = near
        gauge(names.BUILD_INFO, "max").labels(__version__).set(1)
        self.store_seconds = histogram(names.STORE_SECONDS, STORE_BUCKETS)
        self.decision_seconds = histogram(names.DECISION_SECONDS, DECISION_BUCKETS)
        self.wait_seconds = histogram(names.WAIT_SECONDS, WAIT_BUCKETS)
        self._wait_seconds = _Siblings(
            self.wait_seconds,
            (Outcome.ALLOWED, Outcome.BLOCKED, Outcome.WOULD_BLOCK, CANCELLED),
        )
        self._calls = _Siblings(self.calls, Outcome)
        self._calls_after_refusal = _Siblings(self.calls_after_refusal, Outcome)
        self._decision_seconds = _Siblings(self.decision_seconds, ("state", "store"))
        self._charges = _Siblings(self.limit_decisions, (Outcome.ALLOWED, _REFUNDED))
        self._refusals = _Siblings(self.limit_decisions, (Outcome.BLOCKED, Outcome.WOULD_BLOCK))
        self._store_seconds = _Siblings(self.store_seconds, ("ok", "error", "timeout"))
        self._fallbacks = _Siblings(self.store_fallbacks, ("deny", "allow"))
        self._model_runs = _Siblings(self.model_runs, (_REPORTED, _ESTIMATED))
        self._spent: dict[tuple[str, str, Unit, str], Counter] = {}
        self._limits: dict[tuple[str, str], _Met] = {}
        # While a fork holds it, no thread is inside prometheus_client: otherwise the child would
        # find that package's own locks held.
        self._lock = fork_safe_lock()

    def record(
        self,
        decision: Decision,
        agent: str,
        tool: str,
        exemplar: Exemplar,
        *,
        after_refusal: bool = False,
    ) -> None:
        """Count a decision for the call and for each limit that matches it."""
        call = decision.call
        with self._lock:
            self._calls[agent, call.kind, tool][decision.outcome].inc(exemplar=exemplar)
            if after_refusal:
                self._calls_after_refusal[agent, call.kind][decision.outcome].inc()
            for status in decision.limits:
                limit = self._meet(agent, status)
                on_trial = status.deferred and not status.enforced and not status.refused
                if status.charged or on_trial:
                    limit.charged.inc(call.amount, exemplar)
                elif status.refusal_scope is not None:
                    outcome = Outcome.BLOCKED if status.enforced else Outcome.WOULD_BLOCK
                    self._refusals[agent, limit.label, status.refusal_scope][outcome].inc(
                        exemplar=exemplar
                    )

    def charged(self, agent: str, status: LimitStatus, amount: int, exemplar: Exemplar) -> None:
        """Count a charge."""
        with self._lock:
            self._meet(agent, status).charged.inc(amount, exemplar)

    def spend(self, agent: str, limit: str, unit: Unit, model: str, amount: int) -> None:
        """Count what a model run has spent of a limit."""
        with self._lock:
            # Agents, limits and models are bounded, so these series are, too.
            series = self._spent.get((agent, limit, unit, model))
            if series is None:
                series = self.spent[unit].labels(agent, limit_label(limit), model)
                self._spent[agent, limit, unit, model] = series
            series.inc(in_base_unit(amount, unit))

    def grant(self, agent: str, limit: str, scope: Scope, unit: Unit, amount: int) -> None:
        """Count what was granted on top of a limit."""
        with self._lock:
            series = self.granted[unit].labels(agent, limit_label(limit), scope)
            series.inc(in_base_unit(amount, unit))

    def asked(self, agent: str, limits: Iterable[str]) -> None:
        """Count a question to a person."""
        with self._lock:
            for limit in limits:
                self.questions.labels(agent, limit_label(limit)).inc()

    def answered(self, agent: str, limits: Iterable[str], answer: str) -> None:
        """Count a person's answer."""
        with self._lock:
            for limit in limits:
                self.answers.labels(agent, limit_label(limit), answer).inc()

    def model_run(self, agent: str, model: str, *, estimated: bool) -> None:
        """Count a model run that limits were charged for."""
        with self._lock:
            self._model_runs[agent, model][_ESTIMATED if estimated else _REPORTED].inc()

    def unknown_price(self, agent: str, model: str) -> None:
        """Count a model call that has no price."""
        with self._lock:
            self.unknown_prices.labels(agent, model).inc()

    def judged(self, kind: str, seconds: float, *, shared: bool) -> None:
        """Time how long judging the calls of a step took."""
        with self._lock:
            self._decision_seconds[kind,]["store" if shared else "state"].observe(seconds)

    def unjudged(self, agent: str, kind: str, count: int) -> None:
        """Count calls that no limit judged."""
        with self._lock:
            self.unjudged_calls.labels(agent, kind).inc(count)

    def lost_root_run(self, agent: str, cause: str) -> None:
        """Count a run that may belong to another root run."""
        with self._lock:
            self.lost_root_runs.labels(agent, cause).inc()

    def run_begun(self, agent: str) -> None:
        """Count a run."""
        with self._lock:
            self.runs.labels(agent).inc()

    def run_ended(self, agent: str, limit: str) -> None:
        """Count a run that a limit has ended."""
        with self._lock:
            self.runs_ended.labels(agent, limit_label(limit)).inc()

    def crossed(self, agent: str, limit: str, scope: str, reached: Level) -> None:
        """Count a crossing of a limit's threshold."""
        threshold_events = self.near if reached is Level.NEAR else self.exhausted
        with self._lock:
            threshold_events.labels(agent, limit_label(limit), scope).inc()

    def refunded(self, agent: str, limit: str, amount: int) -> None:
        """Count a charge taken back."""
        with self._lock:
            self._charges[agent, limit_label(limit), NONE][_REFUNDED].inc(amount)

    def failed(self, component: str, error_type: str) -> None:
        """Count a failure."""
        with self._lock:
            self.errors.labels(component, error_type).inc()

    def observe_store(self, operation: str, outcome: str, seconds: float) -> None:
        """Time a request to the shared store."""
        with self._lock:
            self._store_seconds[operation,][outcome].observe(seconds)

    def waited(self, agent: str, limit: str, decision: str, seconds: float) -> None:
        """Time how long a call has waited for others to end."""
        name = limit_label(limit)
        with self._lock:
            self._wait_seconds[agent, name][decision].observe(seconds)
            # The first refusal is then seen as such.
            _ = self._refusals[agent, name, AT_ONCE]

    def refused_at_once(self, agent: str, status: LimitStatus, exemplar: Exemplar) -> None:
        """Count a refusal at the cap on calls at once, or because its count is unknown."""
        outcome = Outcome.BLOCKED if status.enforced else Outcome.WOULD_BLOCK
        scope = status.refusal_scope or NONE
        with self._lock:
            series = self._refusals[agent, limit_label(status.limit), scope]
            series[outcome].inc(exemplar=exemplar)

    def fallback(self, agent: str, action: str, calls: int) -> None:
        """Count decisions that were taken without the shared store."""
        with self._lock:
            self._fallbacks[agent,][action].inc(calls)

    def _meet(self, agent: str, status: LimitStatus) -> _Met:
        """What is known of a limit; its first call makes its series, and so do new settings."""
        configured = _configured(status)
        known = self._limits.get((agent, status.limit))
        if known is not None and known.configured == configured:
            return known
        limit = limit_label(status.limit)
        charged = self._charges[agent, limit, NONE][Outcome.ALLOWED]
        # A store that cannot be asked also refuses, but it has no level.
        for scope in (*status.scopes, *((STORE,) if status.shared else ())):
            _ = self._refusals[agent, limit, scope]
        for scope in status.scopes:
            self.near.labels(agent, limit, scope)
            self.exhausted.labels(agent, limit, scope)
        self.runs_ended.labels(agent, limit)
        if status.enforced and status.exit_behavior == "ask":
            self.questions.labels(agent, limit)
            for answer in ("approve", "reject"):
                self.answers.labels(agent, limit, answer)
        for kind in ("model", "tool"):
            _ = self._calls_after_refusal[agent, kind]
        met = self._limits[agent, status.limit] = _Met(limit, configured, charged)
        # A limit on trial refuses nothing, so nobody is near it.
        if status.enforced:
            near = self._near if status.near is None else status.near
            self.limit_near.labels(agent, limit).set(near)
        self.limit_alert.labels(agent, limit).set(status.alert and status.enforced)
        for scope in status.scopes:
            if scope not in status.computed:
                most = in_base_unit(status.threshold(scope) or 0, status.unit)
                self.limit[status.unit].labels(agent, limit, scope).set(most)
        return met


def ended_by(decisions: Sequence[Decision]) -> str | None:
    """The first limit that ends the run with these decisions, if one does."""
    for decision in decisions:
        if decision.outcome is Outcome.BLOCKED:
            for status in decision.refused_by:
                if status.enforced and status.exit_behavior != "continue":
                    return status.limit
    return None
