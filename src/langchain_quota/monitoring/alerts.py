"""What is recorded and alerted on: expressions, thresholds and texts."""

import textwrap
from dataclasses import dataclass
from typing import Literal

OVERVIEW = "langchain-quota-overview"
THREAD = "langchain-quota-thread"
"""The UIDs of the dashboards that alerts lead to."""

# Every threshold of the alerts.
REFUSED_SHARE = 0.2
MIN_DECISIONS = 20
EXHAUSTED_THREADS = 10
EXHAUSTED_SHARE = 0.1
THREAD_REFUSALS = 10
FALLBACK_SHARE = 0.05
STORE_SHARE = 0.8
NEAR = 0.8
PREDICTED_FROM = 0.5
PREDICTED_WITHIN = 1800
ACTIVE_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Record:
    """A recording rule."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert rule; `dashboard` is the path below Grafana's address."""

    name: str
    severity: Literal["critical", "warning", "info"]
    expr: str
    summary: str
    description: str
    dashboard: str
    hold: str = ""
    keep_firing_for: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated together, in order."""

    name: str
    rules: tuple[Record | Alert, ...]
    interval: str = ""


def groups(selector: str, *, per_thread: bool) -> tuple[Group, ...]:
    """The rules.

    Args:
        selector: Matchers put into every selector of a metric.
        per_thread: Whether to alert on single threads that come near their limits.
    """
    metrics = _Metrics(selector)
    alerts = (
        _limit_breached(metrics),
        _block_ratio_high(metrics),
        _many_threads_exhausted(metrics),
        _thread_keeps_hitting(metrics),
        _enforcement_degraded(metrics),
        _metrics_missing(metrics),
        _telemetry_errors(metrics),
        _store_nearly_full(metrics),
        _near_threads_hidden(metrics),
    )
    of_threads = (_thread_near_limit(metrics), _thread_exhaustion_predicted())
    return (
        Group("langchain-quota", (*_block_ratios(metrics), *alerts)),
        # A fixed interval: the prediction counts the points that it is made from.
        Group(
            "langchain-quota-threads",
            (_thread_ratio(metrics), *(of_threads if per_thread else ())),
            interval="1m",
        ),
    )


class _Metrics:
    """Selectors of the package's metrics, with the user's matchers in each."""

    def __init__(self, selector: str) -> None:
        self._selector = selector

    def __call__(self, name: str, matchers: str = "") -> str:
        inner = ",".join(part for part in (matchers, self._selector) if part)
        return f"langchain_quota_{name}{{{inner}}}" if inner else f"langchain_quota_{name}"


def _grown(series: str, window: str) -> str:
    """What a counter counted in a window.

    `increase` alone misses what was counted before a series' first scrape: a process whose first
    call is refused. So a series that was not there before the window counts with its value; one
    that was only not scraped for a while does not.
    """
    return (
        f"({series}\n"
        f"  unless last_over_time({series}[1h] offset {window}))\n"
        f"or increase({series}[{window}])"
    )


def _aggregate(head: str, inner: str) -> str:
    return f"{head} (\n{textwrap.indent(inner, '  ')}\n)"


def _quoted(label: str) -> str:
    """A label in a text: quoted, so that no value can forge a line."""
    return f'{{{{ printf "%q" $labels.{label} }}}}'


_COUNT = '{{ $value | printf "%.0f" }}'
_SHARE = "{{ $value | humanizePercentage }}"

# A thread id may be whatever a caller sends: in a text it must not mention anybody either.
_THREAD_ID = '{{ printf "%q" $labels.thread_id | reReplaceAll "[@<]" "?" }}'


def _link(uid: str, *labels: str) -> str:
    """A dashboard with its variables set to labels of the alert."""
    variables = "&".join(
        f"var-{label.removesuffix('_id')}={{{{ $labels.{label} | urlquery }}}}" for label in labels
    )
    return f"/d/{uid}?{variables}"


_BLOCKED_PER_CALLS = "job_agent:langchain_quota_blocked_per_calls:ratio_rate"
_THREAD_RATIO = "job_agent_limit_thread_id:langchain_quota_thread_used:ratio"


def _block_ratios(metrics: _Metrics) -> tuple[Record, ...]:
    blocked, calls = metrics("calls_total", 'decision="blocked"'), metrics("calls_total")
    return tuple(
        Record(
            f"{_BLOCKED_PER_CALLS}{window}",
            f"sum by (job, agent) (rate({blocked}[{window}]))\n"
            f"/ sum by (job, agent) (rate({calls}[{window}]))",
        )
        for window in ("5m", "1h")
    )


def _thread_ratio(metrics: _Metrics) -> Record:
    """The used share of each thread, as its freshest replica has it: a stale one has old counts."""
    used, limit = metrics("thread_used"), metrics("thread_limit")
    decided = metrics("thread_last_decision_timestamp_seconds")
    inner = (
        f"({used} / ({limit} > 0))\n"
        "and on (job, instance, agent, thread_id)\n"
        f"topk by (job, agent, thread_id) (1, {decided})"
    )
    return Record(_THREAD_RATIO, _aggregate("max by (job, agent, limit, thread_id)", inner))


def _limit_breached(metrics: _Metrics) -> Alert:
    # A block because the store failed breaches no limit: it is for EnforcementDegraded.
    blocked = metrics("limit_decisions_total", 'decision="blocked",scope!="store"')
    summed = _aggregate("sum by (job, agent, limit, scope)", _grown(blocked, "5m"))
    return Alert(
        "LangChainQuotaLimitBreached",
        "warning",
        f"{summed} > 0",
        summary=f"Limit {_quoted('limit')} of agent {_quoted('agent')} refuses calls",
        description=(
            f"About {_COUNT} calls of agent {_quoted('agent')} "
            f"(job {_quoted('job')}) were refused within 5 minutes by limit {_quoted('limit')}, "
            f"scope {_quoted('scope')}."
        ),
        dashboard=_link(OVERVIEW, "job", "agent", "limit"),
        keep_firing_for="10m",
    )


def _block_ratio_high(metrics: _Metrics) -> Alert:
    return Alert(
        "LangChainQuotaBlockRatioHigh",
        "warning",
        f"{_BLOCKED_PER_CALLS}5m > {REFUSED_SHARE}\n"
        f"and {_BLOCKED_PER_CALLS}1h > {REFUSED_SHARE}\n"
        f"and sum by (job, agent) (increase({metrics('calls_total')}[1h])) >= {MIN_DECISIONS}",
        summary=f"Many calls of agent {_quoted('agent')} are refused",
        description=(
            f"{_SHARE} of the calls of agent {_quoted('agent')} "
            f"(job {_quoted('job')}) were refused within 5 minutes, and more than "
            f"{REFUSED_SHARE:.0%} within the hour."
        ),
        dashboard=_link(OVERVIEW, "job", "agent"),
        keep_firing_for="10m",
    )


def _many_threads_exhausted(metrics: _Metrics) -> Alert:
    # Crossings, not states, so that idle exhausted threads are silent. The share is of states,
    # since the threads of several replicas are in both of its sums alike.
    crossed = metrics("exhausted_total", 'scope="thread"')
    exhausted = metrics("subjects", 'scope="thread",state="exhausted"')
    tracked = metrics("subjects", 'scope="thread"')
    return Alert(
        "LangChainQuotaManyThreadsExhausted",
        "warning",
        f"sum by (job, agent, limit) (increase({crossed}[30m])) >= {EXHAUSTED_THREADS}\n"
        "and\n"
        f"  sum by (job, agent, limit) ({exhausted})\n"
        f"  / sum by (job, agent, limit) ({tracked}) >= {EXHAUSTED_SHARE}",
        summary=f"Many threads of agent {_quoted('agent')} used up limit {_quoted('limit')}",
        description=(
            f"About {_COUNT} threads of agent {_quoted('agent')} "
            f"(job {_quoted('job')}) used up limit {_quoted('limit')} within 30 minutes; of all "
            f"recent threads at least {EXHAUSTED_SHARE:.0%} have."
        ),
        dashboard=_link(OVERVIEW, "job", "agent", "limit"),
        keep_firing_for="10m",
    )


def _thread_keeps_hitting(metrics: _Metrics) -> Alert:
    blocked = metrics("thread_blocked_total")
    labels = "job, agent, limit, thread_id"
    return Alert(
        "LangChainQuotaThreadKeepsHitting",
        "info",
        f"sum by ({labels}) (increase({blocked}[15m])) >= {THREAD_REFUSALS}",
        summary=f"Thread {_THREAD_ID} keeps hitting limit {_quoted('limit')}",
        description=(
            f"About {_COUNT} calls on thread {_THREAD_ID} of agent "
            f"{_quoted('agent')} (job {_quoted('job')}) were refused within 15 minutes by limit "
            f"{_quoted('limit')}."
        ),
        dashboard=_link(THREAD, "job", "agent", "limit", "thread_id"),
        keep_firing_for="5m",
    )


def _enforcement_degraded(metrics: _Metrics) -> Alert:
    # A share, so that a store that fails over for some seconds wakes nobody. By instance: of many
    # replicas a single one may have lost the store.
    fallbacks = _grown(metrics("store_fallbacks_total"), "10m")
    calls = _grown(metrics("calls_total"), "10m")
    share = (
        f"{_aggregate('sum by (job, instance, agent, action)', fallbacks)}\n"
        "/ on (job, instance, agent) group_left ()\n"
        f"{_aggregate('sum by (job, instance, agent)', calls)}"
    )
    return Alert(
        "LangChainQuotaEnforcementDegraded",
        "critical",
        f"{_aggregate('max by (job, agent, action)', share)} > {FALLBACK_SHARE}",
        summary=f"Limits of agent {_quoted('agent')} are decided without the shared store",
        description=(
            f"Within 10 minutes {_SHARE} of the calls of agent "
            f"{_quoted('agent')} (job {_quoted('job')}) in one process were decided without the "
            f"shared store. What it does with them: {_quoted('action')}."
        ),
        dashboard=_link(OVERVIEW, "job", "agent"),
    )


def _metrics_missing(metrics: _Metrics) -> Alert:
    info = metrics("build_info")
    return Alert(
        "LangChainQuotaMetricsMissing",
        "warning",
        f"group by (job) (last_over_time({info}[1h] offset 10m))\nunless group by (job) ({info})",
        summary=f"Job {_quoted('job')} has no metrics of langchain-quota any more",
        description=(
            f"Job {_quoted('job')} had metrics of langchain-quota within the last 70 minutes and "
            "has none now. No other alert can see it."
        ),
        dashboard=_link(OVERVIEW, "job"),
        hold="5m",
    )


def _telemetry_errors(metrics: _Metrics) -> Alert:
    errors = _grown(metrics("errors_total"), "10m")
    return Alert(
        "LangChainQuotaTelemetryErrors",
        "warning",
        f"{_aggregate('sum by (job, component, error_type)', errors)} > 0",
        summary=f"Component {_quoted('component')} of langchain-quota fails",
        description=(
            f"In job {_quoted('job')} component {_quoted('component')} of langchain-quota failed "
            f"with {_quoted('error_type')} within 10 minutes. The first failure is in the log."
        ),
        dashboard=_link(OVERVIEW, "job"),
        keep_firing_for="10m",
    )


def _store_nearly_full(metrics: _Metrics) -> Alert:
    # By process: of many replicas each has a store of its own.
    kept = metrics("store_keys", 'droppable="false"')
    share = f"{kept}\n/ ignoring (droppable) {metrics('store_max_keys')}"
    return Alert(
        "LangChainQuotaStoreNearlyFull",
        "warning",
        f"{_aggregate('max by (job)', share)} > {STORE_SHARE}",
        summary=f"A store in memory of job {_quoted('job')} is nearly full",
        description=(
            f"In one process of job {_quoted('job')} {_SHARE} of the store in memory is taken by "
            "counts that make no room for others. When all of it is, calls that need another "
            "count are decided without the store."
        ),
        dashboard=_link(OVERVIEW, "job"),
        hold="5m",
    )


def _near_threads_hidden(metrics: _Metrics) -> Alert:
    # Where no thread is exported at all, that was chosen.
    hidden = metrics("threads_hidden", 'state="near"')
    exported = metrics("thread_last_decision_timestamp_seconds")
    summed = _aggregate("max by (job)", f"{hidden}\nand on (job, instance) {exported}")
    return Alert(
        "LangChainQuotaNearThreadsHidden",
        "info",
        f"{summed} > 0",
        summary=f"Threads of job {_quoted('job')} near their limits have no series",
        description=(
            f"In one process of job {_quoted('job')} {{{{ $value }}}} threads near a limit have "
            "no series: dashboards and alerts for single threads do not see them."
        ),
        dashboard=_link(OVERVIEW, "job"),
        hold="10m",
    )


def _thread_near_limit(metrics: _Metrics) -> Alert:
    decided = metrics("thread_last_decision_timestamp_seconds")
    return Alert(
        "LangChainQuotaThreadNearLimit",
        "info",
        f"{_THREAD_RATIO} >= {NEAR} < 1\n"
        "and on (job, agent, thread_id)\n"
        f"  time() - max by (job, agent, thread_id) ({decided}) < {ACTIVE_SECONDS}",
        summary=f"Thread {_THREAD_ID} is near limit {_quoted('limit')}",
        description=(
            f"Thread {_THREAD_ID} of agent {_quoted('agent')} (job {_quoted('job')}) has used "
            f"{_SHARE} of limit {_quoted('limit')}, and goes on."
        ),
        dashboard=_link(THREAD, "job", "agent", "limit", "thread_id"),
        keep_firing_for="5m",
    )


def _thread_exhaustion_predicted() -> Alert:
    # Without delta it would fire for minutes on a conversation that has stopped.
    return Alert(
        "LangChainQuotaThreadExhaustionPredicted",
        "info",
        f"{_THREAD_RATIO} >= {PREDICTED_FROM} < 1\n"
        f"and predict_linear({_THREAD_RATIO}[15m], {PREDICTED_WITHIN}) >= 1\n"
        f"and delta({_THREAD_RATIO}[5m]) > 0\n"
        f"and count_over_time({_THREAD_RATIO}[15m]) >= 10",
        summary=f"Thread {_THREAD_ID} will soon use up limit {_quoted('limit')}",
        description=(
            f"Thread {_THREAD_ID} of agent {_quoted('agent')} (job {_quoted('job')}) has used "
            f"{_SHARE} of limit {_quoted('limit')}. If it goes on "
            "as in the last 15 minutes, nothing is left in half an hour."
        ),
        dashboard=_link(THREAD, "job", "agent", "limit", "thread_id"),
        keep_firing_for="5m",
    )
