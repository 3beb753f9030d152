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
"""The metrics of an amount, by its unit.

Each unit has a metric of its own, named after it, so that no query adds calls to dollars. The
metrics of calls are older than the others, and have no unit in their names.
"""


_gauge = MetricSpec
_counter = partial(MetricSpec, kind="counter")
_seconds = partial(MetricSpec, kind="histogram")


def _when(name: str, text: str, labels: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(name, f"{text}, in seconds since the Unix epoch.", labels)


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
NEAR = _counter(
    "langchain_quota_near_limit_total", "Calls after which a count is near its limit.", _PER_SCOPE
)
EXHAUSTED = _counter("langchain_quota_exhausted_total", "Calls that used up a limit.", _PER_SCOPE)
LIMIT = _amounts(_gauge, "langchain_quota_limit", "The configured limit", _PER_SCOPE)
LIMIT_NEAR = _gauge(
    "langchain_quota_limit_near_ratio",
    "The used share from which a limit is near, from 0 to 1.",
    _PER_LIMIT,
)
LIMIT_ALERT = _gauge(
    "langchain_quota_limit_alert",
    "1 if refusals by a limit cause an alert, 0 with alert=False or enforce=False.",
    _PER_LIMIT,
)
CALLS_AFTER_REFUSAL = _counter(
    "langchain_quota_calls_after_refusal_total",
    "Judged calls that come after a refusal in the same run.",
    ("agent", "kind", "decision"),
)
UNJUDGED_CALLS = _counter(
    "langchain_quota_unjudged_calls_total",
    "Model and tool calls in runs with limits that no limit judged.",
    ("agent", "kind"),
)
LOST_ROOT_RUNS = _counter(
    "langchain_quota_lost_root_runs_total",
    "Runs with a root run's budget of their own that may belong to another root run.",
    ("agent", "cause"),
)
SPENT = _spent(
    "langchain_quota_spent_total", "What model runs have spent of a limit", (*_PER_LIMIT, "model")
)
GRANTED = _amounts(
    _counter, "langchain_quota_granted_total", "What was granted on top of a limit", _PER_SCOPE
)
QUESTIONS = _counter(
    "langchain_quota_questions_total",
    "Questions to people: may a run go on at a limit?",
    _PER_LIMIT,
)
ANSWERS = _counter(
    "langchain_quota_answers_total",
    "Answers of people to questions whether a run may go on at a limit.",
    (*_PER_LIMIT, "answer"),
)
MODEL_RUNS = _counter(
    "langchain_quota_model_runs_total",
    "Model runs that limits of tokens or dollars count, by the source of the usage.",
    ("agent", "model", "usage"),
)
UNKNOWN_PRICES = _counter(
    "langchain_quota_unknown_prices_total", "Model calls that have no price.", ("agent", "model")
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
    (*_PER_SCOPE, "state"),
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
THREAD_DECIDED = _when(
    "langchain_quota_thread_last_decision_timestamp_seconds",
    "When a decision or a reset last set what a thread has used",
    _PER_THREAD,
)
THREAD_RESETS = _when(
    "langchain_quota_thread_reset_timestamp_seconds",
    "When the window of a thread's quota ends",
    _PER_THREAD,
)
THREAD_REFUSED = _when(
    "langchain_quota_thread_last_refusal_timestamp_seconds",
    "When a limit last refused a call of a thread",
    _PER_THREAD,
)
THREAD_REFUSED_SINCE = _when(
    "langchain_quota_thread_refused_since_timestamp_seconds",
    "When a limit began to refuse a thread's calls, without a break of 10 minutes",
    _PER_THREAD,
)
SUBJECT_USED = _amounts(
    _gauge, "langchain_quota_subject_used", "What a subject has used of a quota", _PER_SUBJECT
)
SUBJECT_LIMIT = _amounts(
    _gauge, "langchain_quota_subject_limit", "What a subject may use of a quota", _PER_SUBJECT
)
SUBJECT_DECIDED = _when(
    "langchain_quota_subject_last_decision_timestamp_seconds",
    "When a decision last set what a subject has used",
    _PER_SUBJECT,
)
SUBJECT_RESETS = _when(
    "langchain_quota_subject_reset_timestamp_seconds",
    "When the window of a subject's quota ends",
    _PER_SUBJECT,
)
THREADS_HIDDEN = _gauge(
    "langchain_quota_threads_hidden", "Tracked threads without series.", ("state",)
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
    "langchain_quota_store_keys", "Counts that a store in memory keeps.", ("droppable",)
)
STORE_MAX_KEYS = _gauge(
    "langchain_quota_store_max_keys", "How many counts a store in memory can keep."
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
