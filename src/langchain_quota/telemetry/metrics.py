"""The Prometheus counters and gauges of decisions, made once per registry."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from langchain_quota._version import __version__
from langchain_quota.decision import Decision, Level, Outcome, Standing
from langchain_quota.limits import Scope
from langchain_quota.telemetry.labels import NONE, label

_REFUNDED = "refunded"

Exemplar = dict[str, str] | None


_Configured = tuple[tuple[Scope, int | None], ...]
"""The limit of each scope; `None` for one that is computed."""


class _LimitSeries:
    """The series of one limit of one agent, all created together at 0."""

    def __init__(self, metrics: "Metrics", agent: str, standing: Standing) -> None:
        limit = label(standing.limit)

        def decisions(scope: str, decision: str) -> Counter:
            return metrics.limit_decisions.labels(agent, limit, scope, decision)

        self.allowed = decisions(NONE, Outcome.ALLOWED)
        self.refunded = decisions(NONE, _REFUNDED)
        self.refusals: dict[tuple[str, Outcome], Counter] = {}
        self.crossings: dict[tuple[str, Level], Counter] = {}
        for scope in standing.scopes:
            for outcome in (Outcome.BLOCKED, Outcome.WOULD_BLOCK):
                self.refusals[scope, outcome] = decisions(scope, outcome)
            labels = (agent, limit, scope)
            self.crossings[scope, Level.NEAR] = metrics.near.labels(*labels)
            self.crossings[scope, Level.EXHAUSTED] = metrics.exhausted.labels(*labels)


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
        build_info = Gauge(
            "langchain_quota_build_info",
            "1, with the version of langchain-quota.",
            ["version"],
            registry=registry,
            multiprocess_mode="max",
        )
        build_info.labels(__version__).set(1)
        self._calls: dict[tuple[str, str, str], dict[Outcome, Counter]] = {}
        self._limits: dict[tuple[str, str], tuple[_Configured, _LimitSeries]] = {}

    def record(self, decision: Decision, agent: str, tool: str, exemplar: Exemplar) -> None:
        """Count a decision for the call and for each limit that matches it."""
        kind = decision.call.kind
        calls = self._calls.get((agent, kind, tool))
        if calls is None:
            calls = {each: self.calls.labels(agent, kind, tool, each) for each in Outcome}
            self._calls[agent, kind, tool] = calls
        calls[decision.outcome].inc(exemplar=exemplar)
        for standing in decision.standings:
            if standing.charged:
                self.charged(agent, standing, decision.call.amount, exemplar)
            elif standing.scope is not None:
                outcome = Outcome.BLOCKED if standing.enforced else Outcome.WOULD_BLOCK
                series = self._series(agent, standing)
                series.refusals[standing.scope, outcome].inc(exemplar=exemplar)
            else:
                self._series(agent, standing)

    def charged(self, agent: str, standing: Standing, amount: int, exemplar: Exemplar) -> None:
        """Count a charge."""
        self._series(agent, standing).allowed.inc(amount, exemplar)

    def crossed(self, agent: str, standing: Standing, scope: str, reached: Level) -> None:
        """Count a crossing of a threshold."""
        self._series(agent, standing).crossings[scope, reached].inc()

    def refunded(self, agent: str, limit: str, amount: int) -> None:
        """Count a charge taken back."""
        charges = {
            decision: self.limit_decisions.labels(agent, label(limit), NONE, decision)
            for decision in (Outcome.ALLOWED, _REFUNDED)
        }
        charges[_REFUNDED].inc(amount)

    def _series(self, agent: str, standing: Standing) -> _LimitSeries:
        """The series of a limit, created at first touch."""
        configured = tuple(
            (scope, None if scope in standing.computed else standing.threshold(scope))
            for scope in standing.scopes
        )
        key = (agent, standing.limit)
        known, series = self._limits.get(key, (None, None))
        if series is None or known != configured:
            series = _LimitSeries(self, agent, standing)
            self._limits[key] = (configured, series)
            for scope, limit in configured:
                if limit is not None:
                    self.limit.labels(agent, label(standing.limit), scope).set(limit)
        return series
