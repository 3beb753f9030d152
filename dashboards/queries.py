"""Selectors of PromQL, what several panels ask, TraceQL, and links.

Most queries are over recorded series: `src/langchain_quota/monitoring/rules.yaml` defines what each
number means, for panels and alerts alike. Every selector begins with the matcher on the job: there
an export puts the matchers that it was given. A thread's id is any printable text of up to 64
characters: it stands in raw strings, in which only the backtick means something.
"""

from collections.abc import Mapping
from itertools import product

from dashboards import settings
from langchain_quota.telemetry import tracing

JOB = 'job=~"$job"'
AGENT = 'agent=~"$agent"'
LIMIT = 'limit=~"$limit"'
THREAD = "thread_id=`${thread:raw}`"
NO_BACKTICK = "/^[^`]+$/"
"""Keeps a thread id out of the variable that would end the raw string that it stands in."""

SUBJECT = "job_agent_limit_scope_subject:langchain_quota_subject"
SUBJECT_LIMIT = "job_agent_limit_scope_subject_unit:langchain_quota_subject_limit:newest"
REFUSED = "job_agent_limit_scope_subject:langchain_quota_refused"
THREADS = "job_agent_limit_thread_id:langchain_quota_thread"
DECISIONS = "job_agent_limit_scope_decision:langchain_quota_limit_decisions:increase15s"
CALLS = "job_instance_agent_decision:langchain_quota_calls:increase15s"
ALLOWED = "job_agent_limit_scope_unit:langchain_quota_limit:max"
RUN_USED = "job_instance_agent_limit_unit_le:langchain_quota_run_used:sum"
OF_SUBJECT = "job, agent, limit, scope, subject"
OF_THREAD = "job, agent, limit, thread_id"

BAR = "$__interval"
RANGE = "$__range"


def select(metric: str, *matchers: str) -> str:
    """The series of a metric of the chosen jobs."""
    return f"{metric}{{{','.join((JOB, *matchers))}}}"


def together(exprs: Mapping[str, str]) -> str:
    """Ask several queries as one: the label `what` of each series is the key of its query."""
    return " or ".join(
        f'label_replace({expr}, "what", "{what}", "", "")' for what, expr in exprs.items()
    )


def grown(metric: str, window: str, *matchers: str, by: str = "") -> str:
    """How much was counted in a window, exactly: the sum of what each evaluation recorded."""
    total = f"sum_over_time({select(metric, *matchers)}[{window}])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def top(series: str) -> str:
    """Return the first rows of a table: the order of threads or subjects is recorded."""
    # A table merges rows only if all labels are equal, and the name of a series is one of them.
    return f"topk({settings.TOP}, {select(f'{series}:rank', AGENT, LIMIT)} + 0)"


def ratio(series: str, *only: str) -> str:
    """Return the used share of threads' limits or of shared quotas, in any unit."""
    return select(f"{series}_used:ratio", *(only or (AGENT, LIMIT)))


def increases(series: str, window: str, *only: str) -> str:
    """Return how much a recorded series of threads or subjects grew in a window."""
    return f"sum_over_time({select(f'{series}:increase15s', *only)}[{window}])"


def thread_blocked(window: str, *only: str, by: str = OF_THREAD) -> str:
    """Return how many calls of threads were refused in a window, by limit or other labels."""
    series = "job_agent_limit_scope_thread_id:langchain_quota_thread_blocked"
    return f"sum by ({by}) ({increases(series, window, *only)})"


def thread_amounts(*only: str) -> tuple[str, str]:
    """Return what threads have used, and their limits; the label `unit` says in what."""
    series = "job_agent_limit_thread_id_unit:langchain_quota_thread_"
    return select(f"{series}used:newest", *only), select(f"{series}limit:newest", *only)


def seconds_left() -> str:
    """Return how long what is left of a shared quota lasts, at the pace of the last hour."""
    growth = select(f"{SUBJECT}_used:growth1h", AGENT, LIMIT)
    return f"(1 - {ratio(SUBJECT)} > 0) / ({growth} > 0) * 3600"


def thread_seconds_left(*only: str) -> str:
    """Return how long what is left of threads' limits lasts, at the pace of 15 minutes."""
    used = ratio(THREADS, *only)
    return f"(1 - {used} > 0) / (deriv({used}[15m]) > 0)"


def recent(series: str) -> str:
    """Return the newest values of the last hour: a deployment takes away the series of the idle."""
    # Without the name of the series, by which a table would keep rows apart.
    return f"(last_over_time({series}[1h]) + 0)"


def refusals() -> str:
    """Return when threads were refused within 5 minutes, with the scope and the subject."""
    times = select("langchain_quota_thread_timestamp_seconds", 'event="refusal"', AGENT, LIMIT)
    return f"last_over_time({times}[5m]) > time() - 300"


def last_time(event: str, *only: str, of: str = "thread", by: str = OF_THREAD) -> str:
    """When something last happened to threads or subjects, in milliseconds, by limit."""
    times = select(f"langchain_quota_{of}_timestamp_seconds", f'event="{event}"', *only)
    return f"max by ({by}) ({recent(times)}) * 1000"


def earlier(expr: str, offset: str) -> str:
    """Return what a query of counted values gave some time ago."""
    return expr.replace("]", f"] offset {offset}")


def spent(unit: str, window: str, by: str = "") -> str:
    """What model runs spent in a window; a run that several limits count is counted once."""
    return grown(f"job_agent_model:langchain_quota_spent_{unit}:increase15s", window, AGENT, by=by)


def spent_by_tools(window: str) -> str:
    """What paid tool calls spent in a window, by agent and tool."""
    of_tools = "job_agent_tool_decision:langchain_quota_tool_spent_dollars:increase15s"
    made, back = (
        grown(of_tools, window, AGENT, f'decision="{each}"', by="agent, tool")
        for each in ("allowed", "refunded")
    )
    return f"({made} - {back})"


def cost(window: str) -> str:
    """What model runs and paid tool calls spent in a window, together."""
    return grown("job_agent:langchain_quota_cost_dollars:increase15s", window, AGENT)


def refused_spans() -> str:
    """TraceQL: the calls of the thread that were not simply allowed, and why."""
    thread = " || ".join(
        f"span.{attribute} = `${{thread:raw}}`"
        for attribute in (tracing.CONVERSATION_ID, tracing.THREAD_LABEL)
    )
    pairs = product(("thread", "run"), (tracing.USED, tracing.LIMIT_OF))
    counts = (name.format(scope=scope) for scope, name in pairs)
    named = (tracing.DECISION, tracing.LIMIT, tracing.SCOPE, tracing.AGENT_NAME, tracing.TOOL_NAME)
    every = (*named, tracing.UNIT, *counts, tracing.EXIT_BEHAVIOR)
    shown = ", ".join(f"span.{each}" for each in every)
    decided = f'span.{tracing.DECISION} =~ "blocked|skipped|would_block"'
    return f"{{ {decided} && ({thread}) }} | select({shown})"


def thread_link() -> str:
    """From a row of a table to its thread's dashboard."""
    return (
        f"/d/{settings.THREAD_UID}?${{datasource:queryparam}}&${{tempo:queryparam}}"
        "&var-job=${__data.fields.job:percentencode}"
        "&var-agent=${__data.fields.agent:percentencode}"
        "&var-thread=${__data.fields.thread_id:percentencode}"
        "&${__url_time_range}"
    )


LINKS = [{"title": "This thread", "url": thread_link()}]
"""Where a thread in a table leads; the table must have a column of the job."""
