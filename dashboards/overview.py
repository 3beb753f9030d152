"""The first dashboard: what is wrong, who is refused, and what it costs; who is near, below."""

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.table import Panel as TablePanel
from grafana_foundation_sdk.builders.timeseries import Panel as TimeseriesPanel

from dashboards import settings
from dashboards.panels import (
    Column,
    Place,
    Query,
    bars,
    count,
    duration,
    fixed,
    gauge,
    hidden,
    new_dashboard,
    row,
    severities,
    share_of,
    stat,
    table,
    text,
    thresholds,
    timeseries,
    when,
)
from dashboards.queries import (
    AGENT,
    ALLOWED,
    BAR,
    CALLS,
    DECISIONS,
    JOB,
    LIMIT,
    LINKS,
    OF_SUBJECT,
    OF_THREAD,
    PER_MINUTE,
    RANGE,
    SUBJECT,
    grown,
    last_time,
    or_none,
    rank,
    ratio,
    refusals,
    refused_subjects,
    seconds_left,
    select,
    spent,
    thread_ratio,
    with_traced,
)
from dashboards.settings import COUNT, CRITICAL, DOLLARS, NEUTRAL, OK, SHARE
from dashboards.variables import common_variables
from langchain_quota.monitoring.exports import RUNBOOKS

_BLOCKED = 'decision="blocked"'
_LABELLED = 'subject!=""'
_REFUSED_STEPS = ((None, OK), (1, CRITICAL))


def build() -> Dashboard:
    """The dashboard."""
    board = new_dashboard(
        settings.OVERVIEW_UID,
        settings.OVERVIEW_TITLE,
        "What is wrong, who is refused now, what is refused, and what it costs.",
    )
    board.variables(common_variables())
    board.with_panel(_alerts())
    for number in (_refused_now(), _at_limits(), _calls_refused(), cost(Place(45, 6, 5))):
        board.with_panel(number)
    board.with_panel(_customers())
    board.with_panel(_threads())
    board.with_panel(_refusals())
    board.with_row(row(53, "Who is near a limit", _shared(), _nearest()))
    board.with_row(row(54, "Limits, and limits on trial", _limits()))
    board.with_row(row(55, "Health, whatever Agent and Limit are chosen", _health()))
    return board


def _alerts() -> TablePanel:
    runbook = {
        "title": "Runbook",
        "url": f"{RUNBOOKS}/${{__data.fields.alertname:percentencode}}.md",
        "targetBlank": True,
    }
    alerts = f'alertname=~"LangChainQuota.+",{JOB}'
    firing = f'ALERTS{{{alerts},alertstate="firing"'
    since = f"ALERTS_FOR_STATE{{{alerts}}} * 1000 and ignoring (alertstate) {firing}}}"
    severity = (
        f'max without (alertstate) (3 * {firing},severity="critical"}} '
        f'or 2 * {firing},severity="warning"}} or {firing}}})'
    )
    return table(
        Place(41, 24, 5),
        "Alerts that fire",
        "The alerts of langchain-quota that fire for the chosen jobs, those that page first. "
        "Click an alert to open its runbook.",
        [
            text("Severity", "severity", 90, **severities()),
            text("Alert", "alertname", 330, links=[runbook]),
            text("Agent", "agent", 130),
            text("Limit", "limit", 130),
            text("Quota", "scope", 100),
            text("Customer", "subject", 130),
            when("Since", since, 130),
            text("Job", "job", 110),
        ],
        sort_by=or_none(severity, "severity"),
    )


def _refused_now() -> StatPanel:
    return stat(
        Place(42, 6, 5),
        "Refused now",
        "How many conversations (threads) and customers (subjects of quotas) were refused in the "
        "last 5 minutes, whatever time and limit are chosen, if they have series.",
        [
            Query(
                _or_zero(
                    f"sum({select(f'job_agent:langchain_quota_{who}_refused:count5m', AGENT)})"
                ),
                name,
            )
            for who, name in (("threads", "threads"), ("subjects", "customers"))
        ],
        unit=COUNT,
        steps=_REFUSED_STEPS,
    )


def _at_limits() -> StatPanel:
    threads = select("job_agent_limit:langchain_quota_threads_exhausted:count", AGENT, LIMIT)
    return stat(
        Place(43, 6, 5),
        "At their limits",
        "How many threads and customers have nothing left of a limit: their next call is refused. "
        "Of several limits of an agent, the one that most threads have used up counts.",
        [
            Query(_or_zero(f"sum(max by (job, agent) ({threads}))"), "threads"),
            Query(
                _or_zero(f"count(group by (job, agent, scope, subject) ({ratio(_LABELLED)} >= 1))"),
                "customers",
            ),
        ],
        unit=COUNT,
        steps=((None, OK), (1, settings.WARNING)),
    )


def _calls_refused() -> StatPanel:
    refused, judged = grown(CALLS, RANGE, AGENT, _BLOCKED), grown(CALLS, RANGE, AGENT)
    steps = [(None, OK), (settings.REFUSED_SHARE_WARNING, settings.WARNING)]
    steps.append((settings.REFUSED_SHARE_CRITICAL, CRITICAL))
    return stat(
        Place(44, 6, 5),
        "Calls refused",
        "How many calls were refused in the chosen time, and which share of all judged calls that "
        "is. A call that two limits refuse is one call. Calls that were refused because the store "
        "failed are included. The variable Limit does not narrow it.",
        [
            Query(_or_zero(refused), "calls"),
            Query(
                f"{refused} / ({judged} > 0) or vector(0)",
                "share",
                properties={
                    "unit": SHARE,
                    "decimals": 1,
                    "color": {"mode": "thresholds"},
                    "thresholds": thresholds(steps),
                },
            ),
        ],
        unit=COUNT,
    )


def cost(place: Place) -> StatPanel:
    """What model runs cost."""
    return stat(
        place,
        "Cost today",
        "What model runs cost in the last 24 hours, and in the last hour: the pace. A run that "
        "several limits count is counted once. Only agents with a limit of money are counted.",
        [Query(spent("dollars", "24h"), "24 hours"), Query(spent("dollars", "1h"), "last hour")],
        unit=DOLLARS,
        no_value="No limit of money.",
    )


def _customers() -> TablePanel:
    refused = f"sum by ({OF_SUBJECT}) ({refused_subjects(_LABELLED)}) > 0"
    most = or_none(f"topk({settings.TOP}, {refused})", "subject")
    return table(
        Place(46, 12, 5),
        "Customers refused now",
        "Whom a shared quota refused calls in the last 5 minutes, whoever is refused most on top. "
        "Only quotas that Telemetry(subject_label=…) names are listed.",
        [
            text("Customer", "subject", 150),
            text("Quota", "scope", 80),
            text("Limit", "limit", 105),
            count("Refused", most, 80),
            gauge("Used", f"{ratio(_LABELLED)} and on ({OF_SUBJECT}) ({refused})", 80),
            text("Agent", "agent", 100),
        ],
        sort_by=most,
    )


def _threads() -> TablePanel:
    last = last_time("refusal", AGENT, LIMIT)
    latest = f"topk({settings.TOP}, {last} > time() - 300)"
    refused = f"{refusals(AGENT, LIMIT)} and on ({OF_THREAD}) ({last} > time() - 300)"
    most = or_none(with_traced(f"topk({settings.TOP}, {refused})"), "limit")
    return table(
        Place(47, 12, 5),
        "Threads refused now",
        "Which conversations a limit refused in the last 5 minutes, and how many calls since they "
        "have series. Click a thread to see more, or to see its traces.",
        [
            text("Thread", "thread_id", 170, links=LINKS),
            text("Limit", "limit", 115),
            count("Refused", most, 80),
            when("Last refusal", f"{latest} * 1000", 130),
            text("Agent", "agent", 100),
            hidden("job"),
            hidden("traced"),
        ],
        sort_by=most,
    )


def _refusals() -> TimeseriesPanel:
    refused = grown(DECISIONS, BAR, AGENT, LIMIT, _BLOCKED, by="limit, scope")
    calls = select("langchain_quota_calls_total", AGENT, 'decision="allowed"')
    allowed = f"sum(rate({calls}[$__rate_interval])) * 60"
    line = {
        **fixed(NEUTRAL),
        "custom.drawStyle": "line",
        "custom.fillOpacity": 0,
        "custom.stacking": {"mode": "none"},
    }
    return bars(
        Place(48, 24, 6),
        "Refusals by limit, calls/min",
        "How many calls per minute each limit refused, and at which threshold (bars), and how "
        "many were allowed (line). Click a dot to open the trace of a call.",
        [
            Query(f"{refused} {PER_MINUTE} > 0", "{{limit}} ({{scope}})"),
            Query(allowed, "calls allowed", exemplar=True, properties=line),
        ],
        unit=settings.ROUNDED,
    ).no_value("No call was judged.")


def _shared() -> TablePanel:
    return shared(
        Place(49, 24, 9),
        "Shared quotas",
        [gauge("Used", ratio(), 110)],
    )


def shared(place: Place, title: str, amounts: list[Column], among: str = "") -> TablePanel:
    """A table of shared quotas and their subjects; an expression may narrow all columns."""
    refused = refused_subjects('subject=~".*"')
    resets = select(f"{SUBJECT}reset:max", AGENT, LIMIT)
    return table(
        place,
        title,
        "Quotas of users, tenants, agents and of all. Whoever is refused is on top, then who has "
        "nothing left, then who has least left. 'Time left' uses the pace of the last hour.",
        [
            text("Customer", "subject", 170),
            text("Quota", "scope", 100),
            text("Agent", "agent", 130),
            text("Limit", "limit", 130),
            count("Refused", f"{refused}{among}", 80),
            *amounts,
            duration("Time left", f"{seconds_left()}{among}", 110),
            when("Resets", f"{resets} * 1000{among}", 120),
            text("Job", "job", 110),
        ],
        sort_by=f"{rank()}{among}",
        no_value="No quota is shared.",
    )


def _nearest() -> TablePanel:
    nearest = f"topk({settings.TOP}, {thread_ratio(AGENT, LIMIT)})"
    return table(
        Place(50, 24, 9),
        "Threads nearest to their limits",
        "How much of their limits conversations have used, those with nothing left on top. Click a "
        "thread to see more, or to see its traces.",
        [
            text("Thread", "thread_id", 330, links=LINKS),
            text("Agent", "agent", 150),
            text("Limit", "limit", 150),
            gauge("Used", with_traced(nearest), 160),
            count("Refused", refusals(AGENT, LIMIT), 90),
            when("Last call", f"{last_time('decision', AGENT, LIMIT)} * 1000", 140),
            text("Job", "job", 130),
            hidden("traced"),
        ],
        sort_by=with_traced(nearest),
        no_value="No limit per thread.",
    )


def _limits() -> TablePanel:
    allowed = select(ALLOWED, AGENT, LIMIT)
    by = "job, agent, limit, scope"

    def share(decision: str) -> str:
        part, whole = (
            grown(DECISIONS, RANGE, AGENT, LIMIT, only, by=by)
            for only in (f'decision="{decision}"', 'decision=~"allowed|blocked|would_block"')
        )
        return f"{part} / ({whole} > 0) * on ({by}) group_left (unit) ({allowed} ^ 0)"

    near = select("job_agent_limit:langchain_quota_limit_near_ratio:max", AGENT, LIMIT)
    return table(
        Place(51, 24, 8),
        "Limits",
        "What limits allow, from which used share they are near, and which share of the calls that "
        "they judged they refused in the chosen time. 'Would refuse' is the share of a limit on "
        "trial (enforce=False). Limits that a function computes are not listed.",
        [
            text("Agent", "agent", 150),
            text("Limit", "limit", 150),
            text("Scope", "scope", 100),
            count("Allowed", allowed, 110),
            text("Unit", "unit", 80),
            share_of("Near from", f"({allowed} ^ 0) * on (job, agent, limit) group_left () {near}"),
            share_of("Refused", share("blocked")),
            share_of("Would refuse", share("would_block")),
            text("Job", "job", 110),
        ],
        sort_by=share("would_block"),
        no_value="No limit has a number.",
    )


def _health() -> TimeseriesPanel:
    errors = "job_component_error_type:langchain_quota_errors:increase15s"
    fallbacks = "job_instance_agent_action:langchain_quota_store_fallbacks:increase15s"
    unjudged = "job_agent_kind:langchain_quota_unjudged_calls:increase15s"
    near = 'scope="thread",state="near",shown="false"'
    counted = (
        (errors, "component", "failures of {{component}}"),
        (fallbacks, "action", "calls without the store: {{action}}"),
        (unjudged, "kind", "calls that no limit judged: {{kind}}"),
    )
    return timeseries(
        Place(52, 24, 8),
        "Health",
        "How many processes have metrics; and for each point in time, what failed, how many calls "
        "were decided without the shared store (deny: refused; allow: run) or judged by no limit, "
        "and how many threads near a limit have no series, so that no table lists them.",
        [
            Query(
                f"count by (job) ({select('langchain_quota_build_info')})", "processes of {{job}}"
            ),
            *(
                Query(f"{grown(metric, BAR, by=label)} > 0", legend)
                for metric, label, legend in counted
            ),
            Query(f"sum({select('langchain_quota_subjects', near)}) > 0", "near threads hidden"),
        ],
        unit=COUNT,
    )


def _or_zero(expr: str) -> str:
    return f"{expr} or vector(0)"
