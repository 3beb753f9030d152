"""Selectors of PromQL, what several panels ask, TraceQL, and links.

Most queries are over recorded series: `src/langchain_quota/monitoring/rules.yaml` defines what each
number means, for panels and alerts alike. Every selector begins with the matcher on the job: there
an export puts the matchers that it was given. A thread's id is any printable text of up to 64
characters: it stands in raw strings, in which only the backtick means something.
"""

from dashboards import settings
from langchain_quota.telemetry import tracing

JOB = 'job=~"$job"'
AGENT = 'agent=~"$agent"'
LIMIT = 'limit=~"$limit"'
THREAD = "thread_id=`${thread:raw}`"
NO_BACKTICK = "/^[^`]+$/"
"""Keeps a thread id out of the variable that would end the raw string that it stands in."""

UNITS = ("", "_tokens", "_dollars", "_seconds")
"""How the names of the metrics of an amount end: those of calls have no unit."""

SUBJECT = "job_agent_limit_scope_subject:langchain_quota_subject_"
DECISIONS = "job_agent_limit_scope_decision:langchain_quota_limit_decisions:increase15s"
CALLS = "job_instance_agent_decision:langchain_quota_calls:increase15s"
ALLOWED = "job_agent_limit_scope_unit:langchain_quota_limit:max"
OF_SUBJECT = "job, agent, limit, scope, subject"
OF_THREAD = "job, agent, limit, thread_id"

BAR = "$__interval"
RANGE = "$__range"
PER_MINUTE = "/ (${__interval_ms} / 60000)"


def select(metric: str, *matchers: str) -> str:
    """The series of a metric of the chosen jobs."""
    return f"{metric}{{{','.join((JOB, *matchers))}}}"


def grown(metric: str, window: str, *matchers: str, by: str = "") -> str:
    """How much was counted in a window, exactly: the sum of what each evaluation recorded."""
    total = f"sum_over_time({select(metric, *matchers)}[{window}])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def refused_subjects(only: str) -> str:
    """How many calls of each subject of a quota were refused in 5 minutes."""
    blocked = select(f"{SUBJECT}blocked:increase15s", AGENT, LIMIT, only)
    return f"sum_over_time({blocked}[5m])"


def ratio(*only: str) -> str:
    """The used share of shared quotas."""
    return select(f"{SUBJECT}used:ratio", AGENT, LIMIT, *only)


def rank() -> str:
    """The order of subjects: who is refused most, who has nothing left, who has little left."""
    refused = refused_subjects('subject=~".*"')
    return f"topk({settings.TOP}, clamp_max({ratio()}, 1) + ({refused} or 0 * {ratio()}))"


def seconds_left(*only: str) -> str:
    """How long what is left of a shared quota lasts, at the pace of the last hour."""
    growth = select(f"{SUBJECT}used:growth1h", AGENT, LIMIT, *only)
    return f"(1 - {ratio(*only)} > 0) / ({growth} > 0) * 3600"


def thread_ratio(*only: str) -> str:
    """What threads have used of their limits, in any unit, from the replica that decided last.

    Only the time has matchers: the join narrows the rest.
    """
    shares = " or ".join(
        f"langchain_quota_thread_used{unit} / (langchain_quota_thread_limit{unit} > 0)"
        for unit in UNITS
    )
    decided = select("langchain_quota_thread_timestamp_seconds", 'event="decision"', *only)
    last = f"topk by ({OF_THREAD}) (1, {decided})"
    return (
        f"max by ({OF_THREAD}) (({shares}) and on (job, instance, agent, limit, thread_id) {last})"
    )


def refusals(*only: str) -> str:
    """How many calls of threads were refused, by limit, since the threads have series."""
    return f"sum by ({OF_THREAD}) ({select('langchain_quota_thread_blocked_total', *only)})"


def last_time(event: str, *only: str) -> str:
    """When something last happened to threads, in seconds, by limit."""
    times = select("langchain_quota_thread_timestamp_seconds", f'event="{event}"', *only)
    return f"max by ({OF_THREAD}) ({times})"


def spent(unit: str, window: str, by: str = "") -> str:
    """What model runs spent in a window; a run that several limits count is counted once."""
    return grown(f"job_agent_model:langchain_quota_spent_{unit}:increase15s", window, AGENT, by=by)


_OF_TOOLS = "job_agent_tool_decision:langchain_quota_tool_spent_dollars:increase15s"
_MADE, _BACK = 'decision="allowed"', 'decision="refunded"'


def spent_by_tools(window: str) -> str:
    """What paid tool calls spent in a window, by agent and tool."""
    made, back = (grown(_OF_TOOLS, window, AGENT, of, by="agent, tool") for of in (_MADE, _BACK))
    return f"({made} - {back})"


def cost(window: str) -> str:
    """What model runs and paid tool calls spent in a window, together."""
    models, made, back = (
        f"sum_over_time({select(name, AGENT, *of)}[{window}])"
        for name, *of in (
            ["job_agent_model:langchain_quota_spent_dollars:increase15s"],
            [_OF_TOOLS, _MADE],
            [_OF_TOOLS, _BACK],
        )
    )
    # Not a sum of sums, which is empty where one of them is.
    return f"sum({models} or {made} or -{back})"


def refused_spans() -> str:
    """TraceQL: the calls of the thread that were not simply allowed, and why."""
    thread = " || ".join(
        f"span.{attribute} = `${{thread:raw}}`"
        for attribute in (tracing.CONVERSATION_ID, tracing.THREAD_LABEL)
    )
    shown = ", ".join(
        f"span.{attribute}"
        for attribute in (
            *(tracing.DECISION, tracing.LIMIT, tracing.SCOPE, tracing.AGENT_NAME),
            *(tracing.TOOL_NAME, tracing.UNIT),
            *(
                attribute.format(scope=scope)
                for scope in ("thread", "run")
                for attribute in (tracing.USED, tracing.LIMIT_OF)
            ),
            tracing.EXIT_BEHAVIOR,
        )
    )
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
"""Where a thread in a table leads."""
