"""Every metric: its name, help, labels and type. Code, dashboards and tests read them here."""

from typing import Literal, NamedTuple

from langchain_quota.decision import Unit


class MetricSpec(NamedTuple):
    """The specification of a metric.

    Attributes:
        name: The name, as in a query; of a histogram without `_bucket`, `_count` and `_sum`.
        help: What it says.
        labels: The names of its labels.
        kind: Its type.
    """

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

_PER_THREAD = ("agent", "limit", "thread_id")
_PER_SCOPE = ("agent", "limit", "scope")
_PER_SUBJECT = ("agent", "limit", "scope", "subject")

CALLS = MetricSpec(
    "langchain_quota_calls_total",
    "Calls that limits judged, by decision.",
    ("agent", "kind", "tool", "decision"),
    "counter",
)
LIMIT_DECISIONS = MetricSpec(
    "langchain_quota_limit_decisions_total",
    "Calls that a limit judged, by its decision.",
    ("agent", "limit", "scope", "decision"),
    "counter",
)
NEAR = MetricSpec(
    "langchain_quota_near_limit_total",
    "Calls after which a count is near its limit.",
    _PER_SCOPE,
    "counter",
)
EXHAUSTED = MetricSpec(
    "langchain_quota_exhausted_total", "Calls that used up a limit.", _PER_SCOPE, "counter"
)
LIMIT: ByUnit = {
    "calls": MetricSpec("langchain_quota_limit", "The configured limit, in calls.", _PER_SCOPE),
    "tokens": MetricSpec(
        "langchain_quota_limit_tokens", "The configured limit, in tokens.", _PER_SCOPE
    ),
    "microdollars": MetricSpec(
        "langchain_quota_limit_dollars", "The configured limit, in US dollars.", _PER_SCOPE
    ),
}
LIMIT_NEAR = MetricSpec(
    "langchain_quota_limit_near_ratio",
    "The used share from which a limit is near, from 0 to 1.",
    ("agent", "limit"),
)
LIMIT_ALERT = MetricSpec(
    "langchain_quota_limit_alert",
    "1 if refusals by a limit cause an alert, 0 with alert=False or enforce=False.",
    ("agent", "limit"),
)
CALLS_AFTER_REFUSAL = MetricSpec(
    "langchain_quota_calls_after_refusal_total",
    "Judged calls that come after a refusal in the same run.",
    ("agent", "kind", "decision"),
    "counter",
)
UNJUDGED_CALLS = MetricSpec(
    "langchain_quota_unjudged_calls_total",
    "Model and tool calls in runs with limits that no limit judged.",
    ("agent", "kind"),
    "counter",
)
LOST_ROOT_RUNS = MetricSpec(
    "langchain_quota_lost_root_runs_total",
    "Runs with a root run's budget of their own that may belong to another root run.",
    ("agent", "cause"),
    "counter",
)
SPENT: ByUnit = {
    "tokens": MetricSpec(
        "langchain_quota_spent_tokens_total",
        "What model runs have spent of a limit, in tokens.",
        ("agent", "limit", "model"),
        "counter",
    ),
    "microdollars": MetricSpec(
        "langchain_quota_spent_dollars_total",
        "What model runs have spent of a limit, in US dollars.",
        ("agent", "limit", "model"),
        "counter",
    ),
}
GRANTED: ByUnit = {
    "calls": MetricSpec(
        "langchain_quota_granted_total",
        "What was granted on top of a limit, in calls.",
        _PER_SCOPE,
        "counter",
    ),
    "tokens": MetricSpec(
        "langchain_quota_granted_tokens_total",
        "What was granted on top of a limit, in tokens.",
        _PER_SCOPE,
        "counter",
    ),
    "microdollars": MetricSpec(
        "langchain_quota_granted_dollars_total",
        "What was granted on top of a limit, in US dollars.",
        _PER_SCOPE,
        "counter",
    ),
}
QUESTIONS = MetricSpec(
    "langchain_quota_questions_total",
    "Questions to people: may a run go on at a limit?",
    ("agent", "limit"),
    "counter",
)
ANSWERS = MetricSpec(
    "langchain_quota_answers_total",
    "Answers of people to questions whether a run may go on at a limit.",
    ("agent", "limit", "answer"),
    "counter",
)
MODEL_RUNS = MetricSpec(
    "langchain_quota_model_runs_total",
    "Model runs that limits of tokens or dollars count, by the source of the usage.",
    ("agent", "model", "usage"),
    "counter",
)
UNKNOWN_PRICES = MetricSpec(
    "langchain_quota_unknown_prices_total",
    "Model calls that have no price.",
    ("agent", "model"),
    "counter",
)
RUNS = MetricSpec("langchain_quota_runs_total", "Runs that have begun.", ("agent",), "counter")
RUNS_ENDED = MetricSpec(
    "langchain_quota_runs_ended_total",
    "Runs that a limit has ended.",
    ("agent", "limit"),
    "counter",
)
DECISION_SECONDS = MetricSpec(
    "langchain_quota_decision_seconds",
    "How long it took to judge the calls of a step.",
    ("kind", "counts"),
    "histogram",
)
WAIT_SECONDS = MetricSpec(
    "langchain_quota_wait_seconds",
    "How long tool calls waited for other calls to end, under limits with at_once.",
    ("agent", "limit", "decision"),
    "histogram",
)
SUBJECTS = MetricSpec(
    "langchain_quota_subjects",
    "Tracked threads, and subjects of quotas, by how much of a limit they have used.",
    ("agent", "limit", "scope", "state"),
)
THREAD_USED: ByUnit = {
    "calls": MetricSpec(
        "langchain_quota_thread_used", "What a thread has used of a limit, in calls.", _PER_THREAD
    ),
    "tokens": MetricSpec(
        "langchain_quota_thread_used_tokens",
        "What a thread has used of a limit, in tokens.",
        _PER_THREAD,
    ),
    "microdollars": MetricSpec(
        "langchain_quota_thread_used_dollars",
        "What a thread has used of a limit, in US dollars.",
        _PER_THREAD,
    ),
}
THREAD_LIMIT: ByUnit = {
    "calls": MetricSpec(
        "langchain_quota_thread_limit", "What a thread may use of a limit, in calls.", _PER_THREAD
    ),
    "tokens": MetricSpec(
        "langchain_quota_thread_limit_tokens",
        "What a thread may use of a limit, in tokens.",
        _PER_THREAD,
    ),
    "microdollars": MetricSpec(
        "langchain_quota_thread_limit_dollars",
        "What a thread may use of a limit, in US dollars.",
        _PER_THREAD,
    ),
}
THREAD_SPENT: ByUnit = {
    "tokens": MetricSpec(
        "langchain_quota_thread_spent_tokens_total",
        "What the model runs of a thread have spent of a limit, in tokens.",
        _PER_THREAD,
        "counter",
    ),
    "microdollars": MetricSpec(
        "langchain_quota_thread_spent_dollars_total",
        "What the model runs of a thread have spent of a limit, in US dollars.",
        _PER_THREAD,
        "counter",
    ),
}
THREAD_BLOCKED = MetricSpec(
    "langchain_quota_thread_blocked_total",
    "Calls refused on a thread by a limit.",
    _PER_THREAD,
    "counter",
)
THREAD_DECIDED = MetricSpec(
    "langchain_quota_thread_last_decision_timestamp_seconds",
    "When a decision or a reset last set what a thread has used, in seconds since the Unix epoch.",
    _PER_THREAD,
)
THREAD_RESETS = MetricSpec(
    "langchain_quota_thread_reset_timestamp_seconds",
    "When the window of a thread's quota ends, in seconds since the Unix epoch.",
    _PER_THREAD,
)
THREAD_REFUSED = MetricSpec(
    "langchain_quota_thread_last_refusal_timestamp_seconds",
    "When a limit last refused a call of a thread, in seconds since the Unix epoch.",
    _PER_THREAD,
)
THREAD_REFUSED_SINCE = MetricSpec(
    "langchain_quota_thread_refused_since_timestamp_seconds",
    "When a limit began to refuse a thread's calls, without a break of 10 minutes, in seconds "
    "since the Unix epoch.",
    _PER_THREAD,
)
SUBJECT_USED: ByUnit = {
    "calls": MetricSpec(
        "langchain_quota_subject_used",
        "What a subject has used of a quota, in calls.",
        _PER_SUBJECT,
    ),
    "tokens": MetricSpec(
        "langchain_quota_subject_used_tokens",
        "What a subject has used of a quota, in tokens.",
        _PER_SUBJECT,
    ),
    "microdollars": MetricSpec(
        "langchain_quota_subject_used_dollars",
        "What a subject has used of a quota, in US dollars.",
        _PER_SUBJECT,
    ),
}
SUBJECT_LIMIT: ByUnit = {
    "calls": MetricSpec(
        "langchain_quota_subject_limit",
        "What a subject may use of a quota, in calls.",
        _PER_SUBJECT,
    ),
    "tokens": MetricSpec(
        "langchain_quota_subject_limit_tokens",
        "What a subject may use of a quota, in tokens.",
        _PER_SUBJECT,
    ),
    "microdollars": MetricSpec(
        "langchain_quota_subject_limit_dollars",
        "What a subject may use of a quota, in US dollars.",
        _PER_SUBJECT,
    ),
}
SUBJECT_DECIDED = MetricSpec(
    "langchain_quota_subject_last_decision_timestamp_seconds",
    "When a decision last set what a subject has used, in seconds since the Unix epoch.",
    _PER_SUBJECT,
)
SUBJECT_RESETS = MetricSpec(
    "langchain_quota_subject_reset_timestamp_seconds",
    "When the window of a subject's quota ends, in seconds since the Unix epoch.",
    _PER_SUBJECT,
)
THREADS_HIDDEN = MetricSpec(
    "langchain_quota_threads_hidden", "Tracked threads without series.", ("state",)
)
STORE_SECONDS = MetricSpec(
    "langchain_quota_store_seconds",
    "How long the shared store took to answer.",
    ("operation", "outcome"),
    "histogram",
)
STORE_FALLBACKS = MetricSpec(
    "langchain_quota_store_fallbacks_total",
    "Decisions that were made without the shared store.",
    ("agent", "action"),
    "counter",
)
STORE_KEYS = MetricSpec(
    "langchain_quota_store_keys", "Counts that a store in memory keeps.", ("droppable",)
)
STORE_MAX_KEYS = MetricSpec(
    "langchain_quota_store_max_keys", "How many counts a store in memory can keep."
)
ERRORS = MetricSpec(
    "langchain_quota_errors_total",
    "Failures of telemetry, observers, stores and functions that you gave.",
    ("component", "error_type"),
    "counter",
)
START_TIME = MetricSpec(
    "langchain_quota_start_time_seconds",
    "When the counters of the process began at 0, in seconds since the Unix epoch.",
)
BUILD_INFO = MetricSpec(
    "langchain_quota_build_info", "1, with the version of langchain-quota.", ("version",)
)

METRICS = tuple(
    spec
    for each in tuple(globals().values())
    for spec in (each.values() if isinstance(each, dict) else (each,))
    if isinstance(spec, MetricSpec)
)
"""All of them."""
