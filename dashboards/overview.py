"""The first dashboard: what is wrong, who is refused, and what it costs; who is near, below."""

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.table import Panel as TablePanel
from grafana_foundation_sdk.builders.timeseries import Panel as TimeseriesPanel

from dashboards import panels as show
from dashboards import queries as ask
from dashboards import settings
from dashboards.settings import COUNT, CRITICAL, DOLLARS, OK, SHARE
from dashboards.variables import common_variables
from langchain_quota.monitoring.exports import RUNBOOKS

_BLOCKED = 'decision="blocked"'
_LABELLED = 'subject!=""'
_ABOUT = (
    '"subject", "thread_id", "instance", "model", "cause", '
    '"kind", "component", "error_type", "action"'
)


def build() -> Dashboard:
    """The dashboard."""
    return show.new_dashboard(
        settings.OVERVIEW_UID,
        settings.OVERVIEW_TITLE,
        "What is wrong, who is refused now, what is refused, and what it costs.",
        common_variables(),
        _alerts(),
        _refused_now(),
        _at_limits(),
        _calls_refused(),
        cost(show.Place(45, 3, 7)),
        _refusals(),
        _customers(),
        _threads(),
        show.row(53, "Who is near a limit", _shared(), _nearest()),
        show.row(54, "Limits, and dry runs", _limits()),
        show.row(55, "Health, whatever Agent and Limit are chosen", _health()),
    )


def _alerts() -> TablePanel:
    runbook = {
        "title": "Runbook",
        "url": f"{RUNBOOKS}/${{__data.fields.alertname:percentencode}}.md",
        "targetBlank": True,
    }
    alerts = f'alertname=~"LangChainQuota.+",{ask.JOB}'
    firing = f'ALERTS{{{alerts},alertstate="firing"'
    since = f"ALERTS_FOR_STATE{{{alerts}}} * 1000 and ignoring (alertstate) {firing}}}"
    severity = (
        f'max without (alertstate) (3 * {firing},severity="critical"}} '
        f'or 2 * {firing},severity="warning"}} or {firing}}})'
    )

    def about(expr: str) -> str:
        return f'label_join({expr}, "about", " ", {_ABOUT})'

    return show.table(
        show.Place(41, 24, 7),
        "Alerts that fire",
        "The alerts of langchain-quota that fire for the chosen jobs, those that page first. "
        "Click an alert to open its runbook. 'About' is the customer, thread, process, model, kind "
        "of calls, what failed, or what becomes of calls while the store fails.",
        [
            show.text("Severity", "severity", 80, **show.severities()),
            show.text("Alert", "alertname", 320, links=[runbook]),
            show.text("Agent", "agent", 120),
            show.text("Limit", "limit", 130),
            show.text("Quota", "scope", 80),
            show.text("About", "about", 250),
            show.when("Since", about(since), 145),
            show.text("Job", "job", 110),
        ],
        sort_by=about(severity),
        no_value="No alert fires.",
    )


def _refused_now() -> StatPanel:
    return show.stat(
        show.Place(42, 3, 7),
        "Refused now",
        "How many conversations (threads) and customers (subjects of quotas) were refused in the "
        "last 5 minutes, whatever time and limit are chosen, if they have series.",
        [
            show.Query(_or_zero(f"sum({ask.select(metric, ask.AGENT)})"), name)
            for metric, name in (
                ("job_agent:langchain_quota_threads_refused:count5m", "threads"),
                ("job_agent:langchain_quota_subjects_refused:count5m", "customers"),
            )
        ],
        unit=COUNT,
        steps=((None, OK), (1, CRITICAL)),
    )


def _at_limits() -> StatPanel:
    threads = ask.select(
        "job_agent_limit:langchain_quota_threads_exhausted:count", ask.AGENT, ask.LIMIT
    )
    customers = f"group by (job, agent, scope, subject) ({ask.ratio(_LABELLED)} >= 1)"
    waiting = ask.select("langchain_quota_waiting_calls", ask.AGENT, ask.LIMIT)
    return show.stat(
        show.Place(43, 3, 7),
        "At their limits",
        "How many threads and customers have nothing left of a limit: their next call is refused. "
        "Of several limits of an agent, the one that most threads have used up counts. Also how "
        "many calls wait now, for room in a quota or for other calls to end.",
        [
            show.Query(_or_zero(f"sum(max by (job, agent) ({threads}))"), "threads"),
            show.Query(_or_zero(f"count({customers})"), "customers"),
            show.Query(_or_zero(f"sum({waiting})"), "waiting"),
        ],
        unit=COUNT,
        steps=((None, OK), (1, settings.WARNING)),
    )


def _calls_refused() -> StatPanel:
    refused = ask.grown(ask.CALLS, ask.RANGE, ask.AGENT, _BLOCKED)
    checked = ask.grown(ask.CALLS, ask.RANGE, ask.AGENT)
    return show.stat(
        show.Place(44, 3, 7),
        "Calls blocked",
        "How many calls were blocked in the chosen time, and which share of all checked calls that "
        "is. A call that two limits refuse is one call. Calls that were blocked because the store "
        "failed are included. The variable Limit does not narrow it.",
        [
            show.Query(_or_zero(refused), "calls", properties=show.fixed(settings.NEUTRAL)),
            show.Query(
                f"{refused} / ({checked} > 0) or vector(0)",
                "share",
                properties={"unit": SHARE, "decimals": 1},
            ),
        ],
        unit=COUNT,
        steps=(
            (None, OK),
            (settings.REFUSED_SHARE_WARNING, settings.WARNING),
            (settings.REFUSED_SHARE_CRITICAL, CRITICAL),
        ),
    )


def cost(place: show.Place) -> StatPanel:
    """What model runs and paid tools cost."""
    return show.stat(
        place,
        "Cost today",
        "What model runs and paid tools cost in the last 24 hours, and in the last hour: the pace. "
        "A run that several limits count is counted once. Only agents with a limit of money are "
        "counted.",
        [
            show.Query(ask.cost("24h"), "24 hours"),
            show.Query(ask.cost("1h"), "last hour"),
        ],
        unit=DOLLARS,
        no_value="No limit of money.",
    )


def _customers() -> TablePanel:
    refused = f"sum by ({ask.OF_SUBJECT}) ({ask.refused_subjects(_LABELLED)}) > 0"
    most = f"topk({settings.TOP}, {refused})"
    return show.table(
        show.Place(46, 12, 7),
        "Customers refused now",
        "Whom a shared quota refused calls in the last 5 minutes, whoever is refused most on top. "
        "Only quotas that Telemetry(subject_label=…) names are listed.",
        [
            show.text("Customer", "subject", 150),
            show.text("Quota", "scope", 80),
            show.text("Limit", "limit", 105),
            show.count("Refused", most, 80),
            show.gauge("Used", f"{ask.ratio(_LABELLED)} and on ({ask.OF_SUBJECT}) ({refused})", 80),
            show.text("Agent", "agent", 100),
        ],
        sort_by=most,
        no_value="No customer is refused.",
    )


def _threads() -> TablePanel:
    last = ask.last_time("refusal", ask.AGENT, ask.LIMIT)
    latest = f"topk({settings.TOP}, {last} > time() - 300)"
    refused = (
        f"{ask.refusals(ask.AGENT, ask.LIMIT)} and on ({ask.OF_THREAD}) ({last} > time() - 300)"
    )
    most = f"topk({settings.TOP}, {refused})"
    return show.table(
        show.Place(47, 12, 7),
        "Threads refused now",
        "Which conversations a limit refused in the last 5 minutes, and how many calls since they "
        "have series. Click a thread to see more.",
        [
            show.text("Thread", "thread_id", 170, links=ask.LINKS),
            show.text("Limit", "limit", 115),
            show.count("Refused", most, 80),
            show.when("Last refusal", f"{latest} * 1000", 145),
            show.text("Agent", "agent", 100),
            show.Column("job", "job", {"custom.hidden": True}),
        ],
        sort_by=most,
        no_value="No thread is refused.",
    )


def _refusals() -> TimeseriesPanel:
    refused = ask.grown(ask.DECISIONS, ask.BAR, ask.AGENT, ask.LIMIT, _BLOCKED, by="limit, scope")
    calls = ask.select("langchain_quota_calls_total", ask.AGENT, 'decision="allowed"')
    allowed = f"sum(rate({calls}[$__rate_interval])) * 60"
    return show.bars(
        show.Place(48, 12, 7),
        "Refusals by limit, calls/min",
        "How many calls per minute each limit refused, and at which threshold (bars), and how "
        "many were allowed (line). Click a dot to open the trace of a call.",
        [
            show.Query(f"{refused} {ask.PER_MINUTE} > 0", "{{limit}} ({{scope}})"),
            show.Query(allowed, "calls allowed", exemplar=True, properties=show.LINE),
        ],
        unit=settings.ROUNDED,
    ).no_value("No call was checked.")


def _shared() -> TablePanel:
    return shared(
        show.Place(49, 24, 9),
        "Shared quotas",
        [show.gauge("Used", ask.ratio(), 110)],
    )


def shared(
    place: show.Place, title: str, amounts: list[show.Column], among: str = ""
) -> TablePanel:
    """A table of shared quotas and their subjects; an expression may narrow all columns."""
    refused = ask.refused_subjects('subject=~".*"')
    resets = ask.select(f"{ask.SUBJECT}reset:max", ask.AGENT, ask.LIMIT)
    return show.table(
        place,
        title,
        "Quotas of users, tenants, agents and of all. Whoever is refused is on top, then who has "
        "nothing left, then who has least left. 'Time left' uses the pace of the last hour.",
        [
            show.text("Customer", "subject", 170),
            show.text("Quota", "scope", 100),
            show.text("Agent", "agent", 130),
            show.text("Limit", "limit", 130),
            show.count("Refused", f"{refused}{among}", 80),
            *amounts,
            show.duration("Time left", f"{ask.seconds_left()}{among}", 110),
            show.when("Resets", f"{resets} * 1000{among}", 120),
            show.text("Job", "job", 110),
        ],
        sort_by=f"{ask.rank()}{among}",
        no_value="No quota is shared.",
    )


def _nearest() -> TablePanel:
    nearest = f"topk({settings.TOP}, {ask.thread_ratio(ask.AGENT, ask.LIMIT)})"
    return show.table(
        show.Place(50, 24, 9),
        "Threads nearest to their limits",
        "How much of their limits conversations have used, those with nothing left on top. Click a "
        "thread to see more.",
        [
            show.text("Thread", "thread_id", 330, links=ask.LINKS),
            show.text("Agent", "agent", 150),
            show.text("Limit", "limit", 150),
            show.gauge("Used", nearest, 160),
            show.count("Refused", ask.refusals(ask.AGENT, ask.LIMIT), 90),
            show.when(
                "Last call", f"{ask.last_time('decision', ask.AGENT, ask.LIMIT)} * 1000", 145
            ),
            show.text("Job", "job", 130),
        ],
        sort_by=nearest,
        no_value="No limit per thread.",
    )


def _limits() -> TablePanel:
    allowed = ask.select(ask.ALLOWED, ask.AGENT, ask.LIMIT)
    by = "job, agent, limit, scope"
    unit = f"* on ({by}) group_left (unit) ({allowed} ^ 0)"

    def counted(decisions: str, *only: str, by: str = "job, agent, limit") -> str:
        return ask.grown(ask.DECISIONS, ask.RANGE, *only, f'decision=~"{decisions}"', by=by)

    def refused(decisions: str) -> str:
        return counted(decisions, ask.AGENT, ask.LIMIT, by=by)

    def share(decision: str) -> str:
        # An allowed call has no scope.
        checked = counted("allowed|blocked|would_block")
        return f"{refused(decision)} / on (job, agent, limit) group_left () ({checked} > 0) {unit}"

    near = ask.select("job_agent_limit:langchain_quota_limit_near_ratio:max", ask.AGENT, ask.LIMIT)
    return show.table(
        show.Place(51, 24, 8),
        "Limits",
        "What limits allow, from which used share they are near, and which share of the calls that "
        "they checked they refused in the chosen time. 'Would refuse' is the share of a limit in "
        "a dry run (enforce=False). Limits that a function computes are not listed.",
        [
            show.text("Agent", "agent", 150),
            show.text("Limit", "limit", 150),
            show.text("Scope", "scope", 100),
            show.Column("Allowed", allowed, {"decimals": None, "custom.width": 110}),
            show.text("Unit", "unit", 80),
            show.share_of(
                "Near from", f"({allowed} ^ 0) * on (job, agent, limit) group_left () {near}"
            ),
            show.share_of("Refused", share("blocked")),
            show.share_of("Would refuse", share("would_block")),
            show.text("Job", "job", 110),
        ],
        # Every row needs a number: Grafana does not sort others.
        sort_by=f"{refused('blocked|would_block')} {unit} or 0 * {allowed}",
        no_value="No limit has a number.",
    )


def _health() -> TimeseriesPanel:
    errors = "job_component_error_type:langchain_quota_errors:increase15s"
    fallbacks = "job_agent_store_action:langchain_quota_store_fallbacks:increase15s"
    unchecked = "job_agent_kind:langchain_quota_unchecked_calls:increase15s"
    near = 'scope="thread",state="near",shown="false"'
    counted = (
        (errors, "component", "failures of {{component}}"),
        (fallbacks, "action", "calls without the store: {{action}}"),
        (unchecked, "kind", "calls that no limit checked: {{kind}}"),
    )
    return show.bars(
        show.Place(52, 24, 8),
        "Health",
        "How many processes have metrics (line); and since the bar before, what failed, and how "
        "many calls were decided without the shared store (block: refused; allow: run) or "
        "checked by no limit. Threads near a limit that have no series are in no table.",
        [
            show.Query(
                f"count by (job) ({ask.select('langchain_quota_build_info')})",
                "processes of {{job}}",
                properties=show.LINE,
            ),
            *(
                show.Query(f"{ask.grown(metric, ask.BAR, by=label)} > 0", legend)
                for metric, label, legend in counted
            ),
            show.Query(
                f"sum({ask.select('langchain_quota_subjects', near)}) > 0",
                "near threads hidden",
                properties=show.LINE,
            ),
        ],
        unit=COUNT,
    )


def _or_zero(expr: str) -> str:
    return f"{expr} or vector(0)"
