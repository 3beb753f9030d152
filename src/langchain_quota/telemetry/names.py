"""Every metric: its name, help, labels and type. Code, dashboards and tests read them here."""

from typing import Literal, NamedTuple


class MetricSpec(NamedTuple):
    """What a metric is.

    Attributes:
        name: The name, as a query has it; of a histogram without `_bucket`, `_count` and `_sum`.
        help: What it tells.
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


_PER_THREAD = ("agent", "limit", "thread_id")
_PER_SCOPE = ("agent", "limit", "scope")

CALLS = MetricSpec(
    "langchain_quota_calls_total",
    "Judged calls, by what was decided.",
    ("agent", "kind", "tool", "decision"),
    "counter",
)
LIMIT_DECISIONS = MetricSpec(
    "langchain_quota_limit_decisions_total",
    "What each limit did with the calls that it matches.",
    ("agent", "limit", "scope", "decision"),
    "counter",
)
NEAR = MetricSpec(
    "langchain_quota_near_limit_total",
    "Calls that brought a count near its limit.",
    _PER_SCOPE,
    "counter",
)
EXHAUSTED = MetricSpec(
    "langchain_quota_exhausted_total", "Calls that used up a limit.", _PER_SCOPE, "counter"
)
LIMIT = MetricSpec("langchain_quota_limit", "The configured limit, in calls.", _PER_SCOPE)
SUBJECTS = MetricSpec(
    "langchain_quota_subjects",
    "Tracked threads, and subjects of quotas, by how much of a limit they have used.",
    ("agent", "limit", "scope", "state"),
)
THREAD_USED = MetricSpec(
    "langchain_quota_thread_used", "Calls that a thread has used of a limit.", _PER_THREAD
)
THREAD_LIMIT = MetricSpec(
    "langchain_quota_thread_limit", "Calls that a thread may use of a limit.", _PER_THREAD
)
THREAD_BLOCKED = MetricSpec(
    "langchain_quota_thread_blocked_total",
    "Calls refused on a thread by a limit.",
    _PER_THREAD,
    "counter",
)
THREAD_SEEN = MetricSpec(
    "langchain_quota_thread_last_decision_timestamp_seconds",
    "When a call of a thread was last judged, in seconds since the Unix epoch.",
    ("agent", "thread_id"),
)
THREADS_HIDDEN = MetricSpec(
    "langchain_quota_threads_hidden", "Tracked threads without series.", ("state",)
)
STORE_SECONDS = MetricSpec(
    "langchain_quota_store_seconds",
    "How long the shared store took.",
    ("operation", "outcome"),
    "histogram",
)
STORE_FALLBACKS = MetricSpec(
    "langchain_quota_store_fallbacks_total",
    "Decisions taken without the shared store.",
    ("agent", "action"),
    "counter",
)
STORE_KEYS = MetricSpec(
    "langchain_quota_store_keys", "Counts that a store in memory keeps.", ("droppable",)
)
STORE_MAX_KEYS = MetricSpec("langchain_quota_store_max_keys", "The most counts that it keeps.")
ERRORS = MetricSpec(
    "langchain_quota_errors_total",
    "Failures of telemetry, observers and stores.",
    ("component", "error_type"),
    "counter",
)
BUILD_INFO = MetricSpec(
    "langchain_quota_build_info", "1, with the version of langchain-quota.", ("version",)
)

METRICS = tuple(each for each in tuple(globals().values()) if isinstance(each, MetricSpec))
"""All of them."""
