"""The specifications of all metrics, which code, dashboards and tests read."""

from functools import partial
from typing import Any, Literal, NamedTuple

from langchain_quota.runtime.units import Unit

STORE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
DECISION_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)
WAIT_BUCKETS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""The bounds of histograms, in seconds. Calls that did not wait are in the first bucket."""

RUN_BUCKETS: dict[Unit, tuple[float, ...]] = {
    "calls": (0, 1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 75, 100, 150, 200, 500),
    "tokens": (0, *(digits * 10**power for power in range(2, 7) for digits in (1, 2, 5))),
    "nanodollars": (0, *(digits / 10**power for power in range(4, -2, -1) for digits in (1, 2, 5))),
    "milliseconds": (0, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1_200, 1_800, 3_600),
}
"""The bounds of what a run uses: calls, tokens, dollars and seconds."""


class MetricSpec(NamedTuple):
    """The specification of a metric."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "gauge", "histogram"] = "gauge"
    together: tuple[str, ...] = ()
    """Values of the last label whose series are created together, at 0."""
    buckets: tuple[float, ...] = ()
    mode: Literal["mostrecent", "livesum"] = "mostrecent"
    """The value that a gauge of several workers has: the newest one, or the sum of live workers."""
    is_of_table: bool = False
    """True if a scrape computes the metric from the table of what subjects have used."""

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the metric's series."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


ByUnit = dict[Unit, MetricSpec]
"""Metrics of used amounts, by unit.

Each unit has its own metric, so that no query adds calls to dollars. The names end in the unit,
except for calls. What people set, limits and grants, is one metric with a label `unit`.
"""


def _metric(name: str, labels: str, text: str, **options: Any) -> MetricSpec:
    return MetricSpec(f"langchain_quota_{name}", text, tuple(labels.split()), **options)


def _amounts(name: str, labels: str, text: str, **options: Any) -> ByUnit:
    stem = name.removesuffix("_total")
    end = name.removeprefix(stem)
    parts: dict[Unit, tuple[str, str]] = {
        "calls": ("", "calls"),
        "tokens": ("_tokens", "tokens"),
        "nanodollars": ("_dollars", "US dollars"),
        "milliseconds": ("_seconds", "seconds"),
    }
    return {
        unit: _metric(f"{stem}{part}{end}", labels, f"{text}, in {unit_text}.", **options)
        for unit, (part, unit_text) in parts.items()
    }


def _spent(name: str, labels: str, text: str, **options: Any) -> ByUnit:
    metrics = _amounts(name, labels, text, kind="counter", **options)
    return {unit: metrics[unit] for unit in metrics if unit != "calls"}


def _of_runs(name: str, labels: str, text: str) -> ByUnit:
    metrics = _amounts(name, labels, text, kind="histogram")
    return {unit: metrics[unit]._replace(buckets=RUN_BUCKETS[unit]) for unit in metrics}


_counter = partial(_metric, kind="counter")
_histogram = partial(_metric, kind="histogram")
_of_table = partial(_metric, is_of_table=True)
_amounts_of_table = partial(_amounts, is_of_table=True)

CALLS = _counter(
    "calls_total",
    "agent kind tool decision",
    "Calls that limits checked, by decision. Every middleware that checks a call counts it.",
    together=("allowed", "blocked", "skipped", "would_block"),
)
LIMIT_DECISIONS = _counter(
    "limit_decisions_total",
    "agent limit scope decision",
    "Calls that a limit checked, by its decision. Its count grows by allowed minus refunded.",
    together=("allowed", "refunded"),
)
CROSSINGS = _counter(
    "crossings_total",
    "agent limit scope level",
    "Calls after which a count is near its limit, or has exhausted it.",
    together=("near", "exhausted"),
)
LIMIT = _metric(
    "limit",
    "agent limit scope unit",
    "The configured limit without grants or rollover, in calls, tokens, dollars or seconds, as the "
    "label unit says. Absent if a function computes it. The rate of a smooth quota has a unit such "
    "as calls or tokens per minute, and is 0 if a function computes it.",
)
LIMIT_NEAR = _metric(
    "limit_near_ratio",
    "agent limit alert",
    "The used share, from 0 to 1, at which a limit counts as near. Absent with enforce=False.",
)
UNCHECKED_CALLS = _counter(
    "unchecked_calls_total",
    "agent kind",
    "Model and tool calls that no limit checked, in runs with limits. Counted only with "
    "count_unchecked_calls=True.",
)
SPENT = _spent("spent_total", "agent limit model", "What model runs have spent of a limit")
TOOL_SPENT = _counter(
    "tool_spent_dollars_total",
    "agent limit tool decision",
    "What paid tool calls have spent of a limit, in US dollars: allowed minus refunded.",
    together=("allowed", "refunded"),
)
DOWNGRADED = _counter(
    "downgraded_calls_total",
    "agent limit",
    "Model calls that a limit of tokens or dollars sent to its cheaper model.",
)
GRANTED = _counter(
    "granted_total",
    "agent limit scope unit",
    "What was granted on top of a limit, in calls, tokens, dollars or seconds, as the label unit "
    "says. A grant in a store is counted by the first process that checks a call under it.",
)
QUESTIONS = _counter(
    "questions_total",
    "agent limit event",
    "Questions that ask a person whether a run may go on at a limit, and their answers. A question "
    "counts for each limit that it is about, and again if its answer is invalid.",
    together=("asked", "approve", "reject"),
)
MODEL_RUNS = _counter(
    "model_runs_total",
    "agent model price usage",
    "Model runs under limits of tokens or dollars, by the sources of their usage and price. This "
    "includes calls that were not made because their model has no price.",
    together=("reported", "estimated"),
)
RUNS = _counter("runs_total", "agent", "Runs that have started.")
RUNS_ENDED = _counter(
    "runs_ended_total",
    "agent limit",
    "Runs that an exhausted or frozen limit ended, except for those that ended with a last answer.",
)
RUN_USED = _of_runs(
    "run_used",
    "agent limit",
    "What runs had used of a limit when they ended, only with run_histograms=True",
)
LONG_CALLS = _counter(
    "long_tool_calls_total",
    "agent limit outcome",
    "Tool calls that took longer than call_limit, by what happened to them.",
    together=("cancelled", "left_running", "dry_run"),
)
DECISION_SECONDS = _histogram(
    "decision_seconds",
    "kind counts",
    "How long it took to check the calls of a step.",
    together=("state", "store"),
    buckets=DECISION_BUCKETS,
)
WAIT_SECONDS = _histogram(
    "wait_seconds",
    "agent limit decision",
    "How long calls waited: for other calls to end, under a concurrency limit, or for room in a "
    "quota, under a limit with wait. Calls that did not wait are in the first bucket.",
    together=("allowed", "blocked", "would_block", "cancelled"),
    buckets=WAIT_BUCKETS,
)
PROVIDER_REFUSALS = _counter(
    "provider_refusals_total",
    "agent limit",
    "Model calls that a provider answered with status 429, under ModelPaceMiddleware. The label "
    "limit shows provider and model.",
)
WAITING = _metric("waiting_calls", "agent limit", "Calls that are waiting now.", mode="livesum")
SUBJECTS = _of_table(
    "subjects",
    "agent limit scope state shown",
    "Tracked threads and subjects of quotas, by how much of a limit they have used. Root runs, "
    "limits of 0 and limits with enforce=False are not included.",
)
THREAD_USED = _amounts_of_table(
    "thread_used", "agent limit thread_id", "What a thread has used of a limit"
)
THREAD_LIMIT = _amounts_of_table(
    "thread_limit", "agent limit thread_id", "What a thread may use of a limit"
)
THREAD_SPENT = _spent(
    "thread_spent_total",
    "agent limit thread_id",
    "What the model runs of a thread have spent of a limit",
    is_of_table=True,
)
THREAD_BLOCKED = _of_table(
    "thread_blocked_total",
    "agent limit thread_id scope",
    "Calls that a limit refused on a thread, by scope. Absent before the first refusal.",
    kind="counter",
)
THREAD_TIMES = _of_table(
    "thread_timestamp_seconds",
    "agent limit thread_id event scope subject",
    "When a thread's count was last set, when a call of it was last refused, with the scope and "
    "the subject, and when its window ends, in seconds since the Unix epoch.",
)
SUBJECT_USED = _amounts_of_table(
    "subject_used", "agent limit scope subject", "What a subject has used of a quota"
)
SUBJECT_LIMIT = _amounts_of_table(
    "subject_limit", "agent limit scope subject", "What a subject may use of a quota"
)
SUBJECT_BLOCKED = _of_table(
    "subject_blocked_total",
    "agent limit scope subject",
    "Calls that a quota refused for a subject, or a freeze. Absent before the first refusal.",
    kind="counter",
)
SUBJECT_TIMES = _of_table(
    "subject_timestamp_seconds",
    "agent limit scope subject event",
    "When a subject's count was last set, and when its window ends, in seconds since the Unix "
    "epoch.",
)
STORE_SECONDS = _histogram(
    "store_seconds",
    "store operation outcome",
    "How long the shared store took to answer. The label store shows its kind and server.",
    together=("ok", "error", "timeout"),
    buckets=STORE_BUCKETS,
)
STORE_FALLBACKS = _counter(
    "store_fallbacks_total",
    "agent store action",
    "Calls that were checked without the shared store, because it was unavailable.",
    together=("block", "allow"),
)
ERRORS = _counter(
    "errors_total",
    "component error_type",
    "Failures of telemetry, observers, stores and your own functions.",
)
FROZEN = _of_table(
    "frozen_subjects",
    "",
    "Subjects that are frozen, by the store's last answer to a process that checks calls.",
)
FROZEN_TIMES = _of_table(
    "frozen_timestamp_seconds",
    "scope subject by event",
    "Since when, and until when, subjects are frozen, in seconds since the Unix epoch.",
)
START_TIME = _of_table(
    "start_time_seconds",
    "",
    "When the counters of the process started at 0, in seconds since the Unix epoch. If several "
    "workers share a port, this is the time of the first one.",
)
BUILD_INFO = _metric(
    "build_info", "version", "Always 1, labelled with the version of langchain-quota."
)

METRICS = tuple(
    spec
    for value in tuple(globals().values())
    for spec in (value.values() if isinstance(value, dict) else (value,))
    if isinstance(spec, MetricSpec)
)
"""The specifications of all metrics of this module, in its order."""

LABELS = {
    "agent": "unnamed | the `name=` of `create_agent` or `GraphQuota`, or `unnamed`",
    "limit": "model, tool:search, tool:*, concurrency:search, repeats, time | your `name=` or "
    "`limit_name=`, or else what is limited, as in these examples",
    "tool": "none, _other | the tool; `none` for a model call, `_other` for a name out of bounds",
    "thread_id": "| the thread's id, or what your `thread_label` returns for it",
    "subject": "| the user, tenant or other subject, as your `subject_label` returns it; empty for "
    'a quota `per="agent"` or `per="global"`, and where no quota refused a thread',
    "model": "unnamed, _other, none | the model's name from its provider; `unnamed` without one, "
    "`_other` out of bounds, `none` for time",
    "usage": "reported, estimated, none | the provider reported the usage; it reported too little, "
    "or the run was cut off; the call was not made, because its model has no price",
    "price": "known, unknown, none | the run has a price; its model, or a part of it, has none, or "
    "`prices` failed; no limit of money counts the run",
    "event of questions_total": "asked, approve, reject | a question; an amount is granted; "
    "nothing is granted, and the run ends",
    "event of thread_timestamp_seconds": "decision, refusal, reset | a decision or a reset set the "
    "count; the limit refused a call, in no outage; the window of the shown quota ends",
    "event of subject_timestamp_seconds": "decision, reset | a decision set the count; the window "
    "ends",
    "event of frozen_timestamp_seconds": "since, until | the freeze began; it ends by itself",
    "by": "| who has frozen the subject, as they said",
    "level": "near, exhausted | the level that the count has newly reached",
    "unit": "calls, tokens, dollars, seconds, calls per hour | what the limit counts; for a smooth "
    "quota by second, minute, hour or day",
    "alert": "true, false | whether refusals cause an alert, as the limit's `alert=` says",
    "shown": "true, false | whether the threads or subjects have their own series",
    "counts": "state, store | where the counts are: in the agent's state, or in a store",
    "kind": "model, tool | what is called",
    "decision of calls_total": "allowed, blocked, skipped, would_block | it runs; it is refused; "
    "it does not run, because another call of its message stopped all; it runs, although a dry run "
    "would refuse it",
    "decision of limit_decisions_total": "allowed, blocked, would_block, refunded | the limit is "
    "charged; it refuses the call; it is a dry run, and would refuse it; a charge is refunded",
    "decision of tool_spent_dollars_total": "allowed, refunded | the call is charged; its charge "
    "is refunded, because it does not run",
    "decision of wait_seconds": "allowed, blocked, would_block, cancelled | it runs after the "
    "wait; it is refused after it; it runs now, although a dry run would make it wait; its run was "
    "cancelled. Only the limit that made it wait counts the wait",
    "scope of limit_decisions_total": "thread, run, call, agent, global, root_run, concurrency, "
    "frozen, none | what refused the call: of several, thread before run, and run before quotas, "
    "by their names, such as `user_id`. `none`: a charge or a refund",
    "scope of crossings_total limit granted_total": "thread, run, call, agent, global, root_run | "
    "the part of the limit, or the one that a grant raises",
    "scope of subjects": "thread, agent, global | the kind of subject",
    "scope of thread_blocked_total thread_timestamp_seconds": "thread, run, call, agent, global, "
    "root_run, concurrency, frozen | what refused the calls",
    "scope of subject_*": "agent, global, frozen | the quota's name, or `frozen`",
    "scope of frozen_timestamp_seconds": "all | a name such as `user_id`, `thread`, or `all`. The "
    "series show up to 100 freezes",
    "state": "ok, near, exhausted | how much is used",
    "store": "MemoryStore | kind and server, such as redis cache:6379, without user and database; "
    "or the class of your own store or client",
    "operation": "acquire, peek, reset, delay, mark | calls are checked and charged; somebody "
    "reads what is left, or once a minute who is frozen; `reset`; a provider asks for a pause, or "
    "has less left than was counted; a call has used a share that is told once",
    "outcome of store_seconds": "ok, error, timeout | whether the store answered. A blocked event "
    "loop counts as `timeout`",
    "outcome of long_tool_calls_total": "cancelled, left_running, dry_run | the async tool was "
    "cancelled; nobody waits for the sync tool, which runs on; a dry run did nothing",
    "action": "block, allow | the call was refused; it was checked against the process' own counts",
    "component": "metrics, tracing, threads, thread_label, subject_label, observer, store, "
    "dynamic_limit, prices, root_run | what failed; `threads` is the table of threads and "
    "subjects, and `root_run` counts runs that may belong to another root run, but start their own",
    "error_type": "inside | the exception's class; `inside` for `root_run`",
    "version": "| the version of langchain-quota",
}
"""The values and the meaning of each label, for the metrics that are named, or for all.

Several meanings stand in the order of the values. The reference is made of this.
"""
