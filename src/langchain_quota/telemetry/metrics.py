"""The Prometheus counters and gauges of decisions, made once per registry."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from langchain_quota._version import __version__
from langchain_quota.decision import Decision, Level, Outcome, Standing
from langchain_quota.limits import STORE
from langchain_quota.locks import fork_safe_lock
from langchain_quota.telemetry.labels import NONE, label

_REFUNDED = "refunded"

STORE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
"""The bounds of `langchain_quota_store_seconds`, in seconds."""

_STORE_OUTCOMES = ("ok", "error", "timeout")
_FALLBACKS = ("deny", "allow")

Exemplar = dict[str, str] | None


class _LimitSeries:
    """The series of one limit of one agent, all created together at 0."""

    def __init__(self, metrics: "Metrics", agent: str, standing: Standing) -> None:
        self._configured = _configured(standing)
        limit = label(standing.limit)

        def decisions(scope: str, decision: str) -> Counter:
            return metrics.limit_decisions.labels(agent, limit, scope, decision)

        self.allowed = decisions(NONE, Outcome.ALLOWED)
        self.refunded = decisions(NONE, _REFUNDED)
        self.refusals: dict[tuple[str, Outcome], Counter] = {}
        self.crossings: dict[tuple[str, Level], Counter] = {}
        # A store that cannot be asked refuses, too, but is no limit to come near to.
        for scope in (*standing.scopes, *((STORE,) if standing.shared else ())):
            for outcome in (Outcome.BLOCKED, Outcome.WOULD_BLOCK):
                self.refusals[scope, outcome] = decisions(scope, outcome)
        for scope in standing.scopes:
            labels = (agent, limit, scope)
            self.crossings[scope, Level.NEAR] = metrics.near.labels(*labels)
            self.crossings[scope, Level.EXHAUSTED] = metrics.exhausted.labels(*labels)

    def fits(self, standing: Standing) -> bool:
        """Whether a limit has the scopes and the fixed numbers that it had."""
        return self._configured == _configured(standing)


def _configured(standing: Standing) -> tuple[object, ...]:
    """What a limit's series are made by; of a quota not whose it is."""
    if standing.computed or standing.quotas:
        numbers = [
            (scope, None if scope in standing.computed else standing.threshold(scope))
            for scope in standing.scopes
        ]
        return standing.shared, *numbers
    return standing.shared, standing.thread_limit, standing.run_limit


class Metrics:
    """The metrics of one registry.

    The labels of agents and tools that it is given are rendered as they are.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "langchain_quota_calls",
            "Judged calls, by what was decided.",
            ["agent", "kind", "tool", "decision"],
            registry=registry,
        )
        self.limit_decisions = Counter(
            "langchain_quota_limit_decisions",
            "What each limit did with the calls that it matches.",
            ["agent", "limit", "scope", "decision"],
            registry=registry,
        )
        self.near = Counter(
            "langchain_quota_near_limit",
            "Calls that brought a count near its limit.",
            ["agent", "limit", "scope"],
            registry=registry,
        )
        self.exhausted = Counter(
            "langchain_quota_exhausted",
            "Calls that used up a limit.",
            ["agent", "limit", "scope"],
            registry=registry,
        )
        self.limit = Gauge(
            "langchain_quota_limit",
            "The configured limit, in calls.",
            ["agent", "limit", "scope"],
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self.errors = Counter(
            "langchain_quota_errors",
            "Failures of telemetry, observers and stores.",
            ["component", "error_type"],
            registry=registry,
        )
        self.store_seconds = Histogram(
            "langchain_quota_store_seconds",
            "How long the shared store took.",
            ["operation", "outcome"],
            registry=registry,
            buckets=STORE_BUCKETS,
        )
        self.store_fallbacks = Counter(
            "langchain_quota_store_fallbacks",
            "Decisions taken without the shared store.",
            ["agent", "action"],
            registry=registry,
        )
        build_info = Gauge(
            "langchain_quota_build_info",
            "1, with the version of langchain-quota.",
            ["version"],
            registry=registry,
            multiprocess_mode="max",
        )
        build_info.labels(__version__).set(1)
        self._calls: dict[tuple[str, str, str], dict[Outcome, Counter]] = {}
        self._limits: dict[tuple[str, str], _LimitSeries] = {}
        self._store_seconds: dict[str, dict[str, Histogram]] = {}
        # While a fork holds it no thread is inside of prometheus_client, whose own locks a child
        # would find held.
        self._lock = fork_safe_lock()

    def record(self, decision: Decision, agent: str, tool: str, exemplar: Exemplar) -> None:
        """Count a decision for the call and for each limit that matches it."""
        kind = decision.call.kind
        with self._lock:
            calls = self._calls.get((agent, kind, tool))
            if calls is None:
                calls = {each: self.calls.labels(agent, kind, tool, each) for each in Outcome}
                self._calls[agent, kind, tool] = calls
            calls[decision.outcome].inc(exemplar=exemplar)
            for standing in decision.standings:
                series = self._series(agent, standing)
                if standing.charged:
                    series.allowed.inc(decision.call.amount, exemplar)
                elif standing.scope is not None:
                    outcome = Outcome.BLOCKED if standing.enforced else Outcome.WOULD_BLOCK
                    series.refusals[standing.scope, outcome].inc(exemplar=exemplar)

    def charged(self, agent: str, standing: Standing, amount: int, exemplar: Exemplar) -> None:
        """Count a charge."""
        with self._lock:
            self._series(agent, standing).allowed.inc(amount, exemplar)

    def crossed(self, agent: str, standing: Standing, scope: str, reached: Level) -> None:
        """Count a crossing of a threshold."""
        with self._lock:
            self._series(agent, standing).crossings[scope, reached].inc()

    def refunded(self, agent: str, limit: str, amount: int) -> None:
        """Count a charge taken back."""
        with self._lock:
            charges = {
                decision: self.limit_decisions.labels(agent, label(limit), NONE, decision)
                for decision in (Outcome.ALLOWED, _REFUNDED)
            }
            charges[_REFUNDED].inc(amount)

    def failed(self, component: str, error_type: str) -> None:
        """Count a failure."""
        with self._lock:
            self.errors.labels(component, error_type).inc()

    def stored(self, operation: str, outcome: str, seconds: float) -> None:
        """Time a request to the shared store."""
        with self._lock:
            times = self._store_seconds.get(operation)
            if times is None:
                times = {
                    each: self.store_seconds.labels(operation, each) for each in _STORE_OUTCOMES
                }
                self._store_seconds[operation] = times
            times[outcome].observe(seconds)

    def fell_back(self, agent: str, action: str, calls: int) -> None:
        """Count decisions that were taken without the shared store."""
        with self._lock:
            fallbacks = {each: self.store_fallbacks.labels(agent, each) for each in _FALLBACKS}
            fallbacks[action].inc(calls)

    def _series(self, agent: str, standing: Standing) -> _LimitSeries:
        """The series of a limit, created at first touch."""
        series = self._limits.get((agent, standing.limit))
        if series is None or not series.fits(standing):
            series = self._limits[agent, standing.limit] = _LimitSeries(self, agent, standing)
            for scope in standing.scopes:
                if scope not in standing.computed:
                    limit = standing.threshold(scope)
                    self.limit.labels(agent, label(standing.limit), scope).set(limit or 0)
        return series
