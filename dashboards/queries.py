"""The queries: PromQL over the raw metrics, and TraceQL.

Every selector begins with the matcher on the job: there an export puts the matchers that it was
given. A thread's id is any printable text of up to 64 characters: it stands in
raw strings, in which only the backtick means something.
"""

import json
from dataclasses import dataclass
from urllib.parse import quote

from dashboards import settings
from langchain_quota.telemetry import names, tracing

PROCESS = ('job=~"$job"', 'instance=~"$instance"')
AGENT = 'agent=~"$agent"'
LIMIT = 'limit=~"$limit"'
THREAD = "thread_id=`${thread:raw}`"
NO_BACKTICK = "/^[^`]+$/"
"""Keeps a thread id out of the variable that would end the raw string that it stands in."""

CALLS = names.CALLS.name
DECISIONS = names.LIMIT_DECISIONS.name
NEAR = names.NEAR.name
EXHAUSTED = names.EXHAUSTED.name
CONFIGURED = names.LIMIT.name
SUBJECTS = names.SUBJECTS.name
THREAD_USED = names.THREAD_USED.name
THREAD_LIMIT = names.THREAD_LIMIT.name
THREAD_BLOCKED = names.THREAD_BLOCKED.name
THREAD_SEEN = names.THREAD_SEEN.name
HIDDEN = names.THREADS_HIDDEN.name
STORE = names.STORE_SECONDS.name
STORE_KEYS = names.STORE_KEYS.name
STORE_MAX_KEYS = names.STORE_MAX_KEYS.name
FALLBACKS = names.STORE_FALLBACKS.name
ERRORS = names.ERRORS.name
BUILD = names.BUILD_INFO.name

TRACED = "traced"
"""The label with a thread's id, where that can stand in a link to its traces as it is."""


def select(metric: str, *matchers: str) -> str:
    """The series of a metric of the chosen processes."""
    return f"{metric}{{{','.join((*PROCESS, *matchers))}}}"


def label_values(selector: str, label: str) -> str:
    """The query of a variable."""
    return f"label_values({selector}, {label})"


def increase(by: str, selector: str, window: str) -> str:
    """By how much counters grew, with what they were born with.

    `increase()` sees nothing of a counter's first value: the refusal with which a process began.
    A counter that was not there before the window adds its least value, which is its first. The
    added label keeps the two apart, so that the sum takes both.
    """
    born = (
        f"min_over_time({selector}[{window}]) "
        f"unless last_over_time({selector}[{settings.BORN_LOOKBACK}] offset {window})"
    )
    grew = f"increase({selector}[{window}])"
    return f'{_sum(by)} ({grew} or label_replace({born}, "born", "yes", "", ""))'


def per_minute(by: str, selector: str) -> str:
    """How fast counters grow."""
    return f"{_sum(by)} (rate({selector}[{settings.RATE}])) * 60"


def quantile(share: float) -> str:
    """A quantile of the time that operations of the shared store took."""
    buckets = select(f"{STORE}_bucket")
    return f"histogram_quantile({share}, sum by (le, operation) (rate({buckets}[{settings.RATE}])))"


def store_share() -> str:
    """How much of a store in memory is taken by counts that make no room for others."""
    kept = select(STORE_KEYS, 'droppable="false"')
    share = f"{kept} / ignoring (droppable) {select(STORE_MAX_KEYS)}"
    return f"max by (job, instance) ({share})"


def scrape_duration() -> str:
    """How long scrapes of our processes take: a metric that Prometheus adds."""
    duration = select("scrape_duration_seconds")
    return f"max by (job, instance) ({duration} and on (job, instance) {select(BUILD)})"


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"


@dataclass(frozen=True, slots=True)
class Threads:
    """Expressions over threads with series of their own; `only` is a matcher that narrows them."""

    only: str | None = None

    def freshest(self, expression: str) -> str:
        """Of a thread that several processes serve, what the one says that served it last."""
        return (
            f"max by (job, agent, limit, thread_id) (({expression}) "
            "and on (job, instance, agent, thread_id) "
            f"topk by (job, agent, thread_id) (1, {self._select(THREAD_SEEN)}))"
        )

    @property
    def used(self) -> str:
        """Calls used."""
        return self._select(THREAD_USED, LIMIT)

    @property
    def limit(self) -> str:
        """Calls allowed."""
        return self._select(THREAD_LIMIT, LIMIT)

    @property
    def blocked(self) -> str:
        """Calls refused: a counter."""
        return self._select(THREAD_BLOCKED, LIMIT)

    @property
    def share(self) -> str:
        """The used share."""
        return f"{self.used} / ({self.limit} > 0)"

    @property
    def rank(self) -> str:
        """The share, but for exhausted threads: the near ones come before them."""
        exhausted = f"({self.share} >= bool 1) * {settings.RANK_OF_EXHAUSTED}"
        return f"({self.share} < 1) or {exhausted}"

    @property
    def remaining(self) -> str:
        """Calls left."""
        return f"clamp_min({self.limit} - {self.used}, 0)"

    @property
    def seconds_left(self) -> str:
        """Seconds until the limit is used up, for threads that are using it at this moment."""
        pace = f"deriv({self.used}[{settings.PACE_WINDOW}]) > 0"
        active = f"delta({self.used}[{settings.ACTIVE_WINDOW}]) > 0"
        return f"({self.limit} - {self.used} > 0) / ({pace}) and {active}"

    @property
    def predicted(self) -> str:
        """Calls that will be used if the thread goes on like this."""
        return f"predict_linear({self.used}[{settings.PACE_WINDOW}], {settings.PREDICTED_SECONDS})"

    @property
    def seen(self) -> str:
        """When a call was last judged."""
        return self._select(THREAD_SEEN)

    def _select(self, metric: str, *matchers: str) -> str:
        only = () if self.only is None else (self.only,)
        return select(metric, AGENT, *matchers, *only)


def with_traced(expression: str) -> str:
    r"""Add the label `traced`: the thread's id, if it has no `"`, no `\` and no backtick.

    A link to Tempo has the id in a TraceQL string, in JSON, in a URL; Grafana can escape for the
    last of them only. Without the label the link finds nothing.
    """
    return f'label_replace({expression}, "{TRACED}", "$1", "thread_id", "([^\\"\\\\\\\\`]*)")'


def spans(thread: str, *, refused: bool = False) -> str:
    """TraceQL: the judged calls of a thread, what was decided and why.

    Args:
        thread: The thread's id, or what Grafana replaces by it.
        refused: Whether to leave out the calls that were simply let through.
    """
    its = " || ".join(
        f"span.{attribute} = `{thread}`"
        for attribute in (tracing.CONVERSATION_ID, tracing.THREAD_LABEL)
    )
    decisions = "blocked|skipped|would_block" if refused else ".+"
    shown = ", ".join(
        f"span.{attribute}"
        for attribute in (
            tracing.DECISION,
            tracing.LIMIT,
            tracing.SCOPE,
            tracing.AGENT_NAME,
            tracing.TOOL_NAME,
            tracing.THREAD_USED,
            tracing.THREAD_LIMIT,
            tracing.RUN_USED,
            tracing.RUN_LIMIT,
            tracing.EXIT_BEHAVIOR,
        )
    )
    return f'{{ span.{tracing.DECISION} =~ "{decisions}" && ({its}) }} | select({shown})'


def thread_link() -> str:
    """From a row of the ranked table to its thread's dashboard."""
    return (
        f"/d/{settings.THREAD_UID}?${{datasource:queryparam}}&${{tempo:queryparam}}"
        "&${instance:queryparam}"
        "&var-job=${__data.fields.job:percentencode}"
        "&var-agent=${__data.fields.agent:percentencode}"
        "&var-thread=${__data.fields.thread_id:percentencode}"
        "&${__url_time_range}"
    )


def traces_link() -> str:
    """From a row of the ranked table to its thread's calls in Tempo."""
    thread = f"${{__data.fields.{TRACED}:percentencode}}"
    query = {
        "refId": "A",
        "datasource": {"type": "tempo", "uid": "${tempo}"},
        "queryType": "traceql",
        "tableType": "spans",
        "limit": settings.TRACES_SHOWN,
        "query": spans(thread),
    }
    panes = {
        "quota": {
            "datasource": "${tempo}",
            "queries": [query],
            "range": {"from": "${__from}", "to": "${__to}"},
        }
    }
    url = "/explore?schemaVersion=1&panes=" + quote(
        json.dumps(panes, separators=(",", ":")), safe=""
    )
    for filled_by_grafana in ("${tempo}", "${__from}", "${__to}", thread):
        url = url.replace(quote(filled_by_grafana, safe=""), filled_by_grafana)
    return url
