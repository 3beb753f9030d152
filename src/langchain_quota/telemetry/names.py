"""Every metric: its name, help, labels and type. Code, dashboards and tests read them here."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from langchain_quota.units import Unit


class MetricSpec(NamedTuple):
    """The specification of a metric."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "gauge", "histogram"] = "gauge"

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


ByUnit = dict[Unit, MetricSpec]
"""The metrics of what is used, by its unit.

Each unit has a metric of its own, named after it, so that no query adds calls to dollars. The
metrics of calls have no unit in their names. What people set, limits and grants, is one metric with
a label `unit`.
"""


_gauge = MetricSpec
_counter = partial(MetricSpec, kind="counter")
_seconds = partial(MetricSpec, kind="histogram")


def _amounts(
    make: Callable[..., MetricSpec], name: str, text: str, labels: tuple[str, ...]
) -> ByUnit:
    stem = name.removesuffix("_total")
    end = name.removeprefix(stem)
    return {
        "calls": make(name, f"{text}, in calls.", labels),
        "tokens": make(f"{stem}_tokens{end}", f"{text}, in tokens.", labels),
        "microdollars": make(f"{stem}_dollars{end}", f"{text}, in US dollars.", labels),
    }


def _spent(name: str, text: str, labels: tuple[str, ...]) -> ByUnit:
    made = _amounts(_counter, name, text, labels)
    return {unit: made[unit] for unit in ("tokens", "microdollars")}


_PER_LIMIT = ("agent", "limit")
_PER_THREAD = (*_PER_LIMIT, "thread_id")
_PER_SCOPE = (*_PER_LIMIT, "scope")
_PER_SUBJECT = (*_PER_SCOPE, "subject")

CALLS = _counter(
    "langchain_quota_calls_total",
    "Calls that limits judged, by decision.",
    ("agent", "kind", "tool", "decision"),
)
LIMIT_DECISIONS = _counter(
    "langchain_quota_limit_decisions_total",
    "Calls that a limit judged, by its decision.",
    (*_PER_SCOPE, "decision"),
)
CROSSINGS = _counter(
    "langchain_quota_crossings_total",
    "Calls after which a count is near its limit, or has used it up.",
    (*_PER_SCOPE, "level"),
)
LIMIT = _gauge(
    "langchain_quota_limit",
    "The configured limit, in the unit of the label: calls, tokens or dollars.",
    (*_PER_SCOPE, "unit"),
)
LIMIT_NEAR = _gauge(
    "langchain_quota_limit_near_ratio",
    "The used share from which a limit is near, from 0 to 1.",
    (*_PER_LIMIT, "alert"),
)
UNJUDGED_CALLS = _counter(
    "langchain_quota_unjudged_calls_total",
    "Model and tool calls in runs with limits that no limit judged.",
    ("agent", "kind"),
)
SPENT = _spent(
    "langchain_quota_spent_total", "What model runs have spent of a limit", (*_PER_LIMIT, "model")
)
GRANTED = _counter(
    "langchain_quota_granted_total",
    "What was granted on top of a limit, in the unit of the label: calls, tokens or dollars.",
    (*_PER_SCOPE, "unit"),
)
QUESTIONS = _counter(
    "langchain_quota_questions_total",
    "Questions to people whether a run may go on at a limit, and their answers.",
    (*_PER_LIMIT, "event"),
)
MODEL_RUNS = _counter(
    "langchain_quota_model_runs_total",
    "Model runs that limits of tokens or dollars count, by where usage and price come from.",
    ("agent", "model", "price", "usage"),
)
RUNS = _counter("langchain_quota_runs_total", "Runs that have begun.", ("agent",))
RUNS_ENDED = _counter(
    "langchain_quota_runs_ended_total", "Runs that a limit has ended.", _PER_LIMIT
)
DECISION_SECONDS = _seconds(
    "langchain_quota_decision_seconds",
    "How long it took to judge the calls of a step.",
    ("kind", "counts"),
)
WAIT_SECONDS = _seconds(
    "langchain_quota_wait_seconds",
    "How long tool calls waited for other calls to end, under limits with at_once.",
    (*_PER_LIMIT, "decision"),
)
SUBJECTS = _gauge(
    "langchain_quota_subjects",
    "Tracked threads, and subjects of quotas, by how much of a limit they have used.",
    (*_PER_SCOPE, "state", "shown"),
)
THREAD_USED = _amounts(
    _gauge, "langchain_quota_thread_used", "What a thread has used of a limit", _PER_THREAD
)
THREAD_LIMIT = _amounts(
    _gauge, "langchain_quota_thread_limit", "What a thread may use of a limit", _PER_THREAD
)
THREAD_SPENT = _spent(
    "langchain_quota_thread_spent_total",
    "What the model runs of a thread have spent of a limit",
    _PER_THREAD,
)
THREAD_BLOCKED = _counter(
    "langchain_quota_thread_blocked_total", "Calls refused on a thread by a limit.", _PER_THREAD
)
THREAD_TIMES = _gauge(
    "langchain_quota_thread_timestamp_seconds",
    "When a thread's count was last set, a call of it last refused, and its window ends, in "
    "seconds since the Unix epoch.",
    (*_PER_THREAD, "event"),
)
SUBJECT_USED = _amounts(
    _gauge, "langchain_quota_subject_used", "What a subject has used of a quota", _PER_SUBJECT
)
SUBJECT_LIMIT = _amounts(
    _gauge, "langchain_quota_subject_limit", "What a subject may use of a quota", _PER_SUBJECT
)
SUBJECT_BLOCKED = _counter(
    "langchain_quota_subject_blocked_total", "Calls refused to a subject by a quota.", _PER_SUBJECT
)
SUBJECT_TIMES = _gauge(
    "langchain_quota_subject_timestamp_seconds",
    "When a subject's count was last set, and its window ends, in seconds since the Unix epoch.",
    (*_PER_SUBJECT, "event"),
)
STORE_SECONDS = _seconds(
    "langchain_quota_store_seconds",
    "How long the shared store took to answer.",
    ("operation", "outcome"),
)
STORE_FALLBACKS = _counter(
    "langchain_quota_store_fallbacks_total",
    "Decisions that were made without the shared store.",
    ("agent", "action"),
)
STORE_KEYS = _gauge(
    "langchain_quota_store_keys",
    "Counts that a store in memory keeps, and those for which it has room.",
    ("state",),
)
ERRORS = _counter(
    "langchain_quota_errors_total",
    "Failures of telemetry, observers, stores and functions that you gave.",
    ("component", "error_type"),
)
START_TIME = _gauge(
    "langchain_quota_start_time_seconds",
    "When the counters of the process began at 0, in seconds since the Unix epoch.",
)
BUILD_INFO = _gauge(
    "langchain_quota_build_info", "1, with the version of langchain-quota.", ("version",)
)

METRICS = tuple(
    spec
    for each in tuple(globals().values())
    for spec in (each.values() if isinstance(each, dict) else (each,))
    if isinstance(spec, MetricSpec)
)
"""All of them."""
