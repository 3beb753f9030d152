"""The queries: selectors of PromQL, what a process tells of itself, TraceQL, and links.

Every selector begins with the matcher on the job: there an export puts the matchers that it was
given. A thread's id is any printable text of up to 64 characters: it stands in
raw strings, in which only the backtick means something.
"""

import json
from urllib.parse import quote

from dashboards import settings
from langchain_quota.telemetry import names, tracing
from langchain_quota.units import Unit

PROCESS = ('job=~"$job"', 'instance=~"$instance"')
AGENT = 'agent=~"$agent"'
LIMIT = 'limit=~"$limit"'
THREAD = "thread_id=`${thread:raw}`"
NO_BACKTICK = "/^[^`]+$/"
"""Keeps a thread id out of the variable that would end the raw string that it stands in."""

THREAD_OF_RESULT = r'/thread_id="([^`]+)"\} /'
"""Takes the thread out of a line of `query_result()`, for a raw string."""

CALLS = names.CALLS.name
DECISIONS = names.LIMIT_DECISIONS.name
NEAR = names.NEAR.name
EXHAUSTED = names.EXHAUSTED.name
GRANTED = names.GRANTED["calls"].name
QUESTIONS = names.QUESTIONS.name
ANSWERS = names.ANSWERS.name
CONFIGURED = names.LIMIT["calls"].name
LIMIT_NEAR = names.LIMIT_NEAR.name
LIMIT_ALERT = names.LIMIT_ALERT.name
SUBJECTS = names.SUBJECTS.name
THREAD_BLOCKED = names.THREAD_BLOCKED.name
THREAD_DECIDED = names.THREAD_DECIDED.name
HIDDEN = names.THREADS_HIDDEN.name
STORE = names.STORE_SECONDS.name
STORE_KEYS = names.STORE_KEYS.name
STORE_MAX_KEYS = names.STORE_MAX_KEYS.name
FALLBACKS = names.STORE_FALLBACKS.name
ERRORS = names.ERRORS.name
BUILD = names.BUILD_INFO.name
STARTED = names.START_TIME.name
AFTER_REFUSAL = names.CALLS_AFTER_REFUSAL.name
RUNS = names.RUNS.name
RUNS_ENDED = names.RUNS_ENDED.name
DECISION = names.DECISION_SECONDS.name
WAIT = names.WAIT_SECONDS.name
UNJUDGED = names.UNJUDGED_CALLS.name
LOST_ROOT_RUNS = names.LOST_ROOT_RUNS.name
MODEL_RUNS = names.MODEL_RUNS.name
UNKNOWN_PRICES = names.UNKNOWN_PRICES.name

LIMIT_OF_RESULT = r'/limit="(.+)"\} /'
"""The same for a limit."""

TRACED = "traced"
"""The label with a thread's id, where that can stand in a link to its traces as it is."""


def select(metric: str, *matchers: str) -> str:
    """The series of a metric of the chosen processes."""
    return f"{metric}{{{','.join((*PROCESS, *matchers))}}}"


def among(variable: str) -> str:
    """Matches the threads that a hidden variable has found."""
    return f"thread_id=~`${{{variable}:regex}}`"


def label_values(selector: str, label: str) -> str:
    """The query of a variable."""
    return f"label_values({selector}, {label})"


def sum_by(by: str, expression: str) -> str:
    """A sum that keeps labels, if there are any to be kept."""
    return f"sum by ({by}) ({expression})" if by else f"sum ({expression})"


def store_share() -> str:
    """How much of a store in memory is taken by counts that make no room for others."""
    kept = select(STORE_KEYS, 'droppable="false"')
    share = f"{kept} / ignoring (droppable) {select(STORE_MAX_KEYS)}"
    return f"max by (job, instance) ({share})"


def scrape_duration() -> str:
    """How long scrapes of our processes take: a metric that Prometheus adds."""
    duration = select("scrape_duration_seconds")
    return f"max by (job, instance) ({duration} and on (job, instance) {select(BUILD)})"


def processes() -> str:
    """Whether processes have metrics of ours: 0 if so, 1 if they are gone, 2 if they are lost.

    A process is lost if it had metrics within an hour, has none, and is still to be scraped.
    """
    by, on = "max by (job, instance, version)", "on (job, instance)"
    build = select(BUILD)
    had = f"{by} (last_over_time({build}[{settings.LOOKBACK}])) unless {on} {build}"
    lost = f"2 * ({had} and {on} {select('scrape_duration_seconds')})"
    return f"0 * {by} ({build}) or {lost} or {had}"


def firing_alerts() -> str:
    """Since when the alerts fire that began last, in milliseconds."""
    chosen = f'alertname=~"{settings.ALERTS}",{PROCESS[0]}'
    firing = f'ALERTS{{{chosen},alertstate="firing"}}'
    since = f"ALERTS_FOR_STATE{{{chosen}}} * 1000 and ignoring (alertstate) {firing}"
    return f"topk({settings.TOP}, {since})"


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
            tracing.UNIT,
            tracing.THREAD_USED,
            tracing.THREAD_LIMIT,
            tracing.RUN_USED,
            tracing.RUN_LIMIT,
            tracing.EXIT_BEHAVIOR,
        )
    )
    return f'{{ span.{tracing.DECISION} =~ "{decisions}" && ({its}) }} | select({shown})'


def of_limit(metric: str, unit: Unit) -> str:
    """What is known of a limit that counts a unit, for each of its scopes."""
    configured = select(names.LIMIT[unit].name, AGENT, LIMIT)
    if metric != names.LIMIT[unit].name:
        on = "on (job, instance, agent, limit) group_left ()"
        configured = f"{configured} * 0 + {on} {select(metric, AGENT, LIMIT)}"
    return f"max by (job, agent, limit, scope) ({configured})"


def thread_link() -> str:
    """From a row of a table to its thread's dashboard."""
    return (
        f"/d/{settings.THREAD_UID}?${{datasource:queryparam}}&${{tempo:queryparam}}"
        "&${instance:queryparam}"
        "&var-job=${__data.fields.job:percentencode}"
        "&var-agent=${__data.fields.agent:percentencode}"
        "&var-thread=${__data.fields.thread_id:percentencode}"
        "&${__url_time_range}"
    )


def traces_link() -> str:
    """From a row of a table to its thread's calls in Tempo."""
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
