"""The first dashboard: alerts, each thread's and customer's quota, what is blocked, and health."""

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.table import Panel as TablePanel
from grafana_foundation_sdk.builders.timeseries import Panel as TimeseriesPanel

from dashboards import panels as show
from dashboards import queries as ask
from dashboards import settings
from dashboards.settings import COUNT, CRITICAL, DOLLARS, OK, SHARE
from dashboards.variables import common_variables
from langchain_quota.cli.export import RUNBOOKS

_BLOCKED = 'decision="blocked"'
_LABELLED = 'subject!=""'
_ABOUT = (
    '"subject", "thread_id", "instance", "model", "cause", '
    '"kind", "component", "error_type", "action"'
)


def build() -> Dashboard:
    """Return the dashboard."""
    return show.new_dashboard(
        settings.OVERVIEW_UID,
        settings.OVERVIEW_TITLE,
        "What each thread and customer has used of its quota, what is wrong, and what it costs.",
        common_variables(),
        _refused_now(),
        _at_limits(),
        _calls_blocked(),
        cost(show.Place(45, 4, 5)),
        show.stat(
            show.Place(61, 4, 5),
            "Processes",
            "How many processes export metrics. Dashed lines in the charts mark restarts.",
            [show.Query(f"count({ask.select('langchain_quota_build_info')})", "running")],
            unit=COUNT,
            no_value="no process",
        ),
        _store(),
        _threads(),
        _subjects(),
        _alerts(),
        _blocked_threads(),
        _refusals(),
        show.row(54, "Limits, and dry runs", _limits(), _runs()),
        show.row(60, "Runs and waits", _ended(), _waits()),
        show.row(55, "Health, whatever Agent and Limit are chosen", _health(), _store_seconds()),
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
        show.Place(41, 24, 6),
        "Alerts that fire",
        "The firing alerts of langchain-quota for the chosen jobs, with those that page on top. "
        "Click an alert to open its runbook. 'About' shows the customer, thread, process, model or "
        "kind of calls, what failed, or what happens to calls while the store fails.",
        [
            show.text("Severity", "severity", 80, **show.severities()),
            show.text("Alert", "alertname", links=[runbook]),
            show.text("Agent", "agent", 130),
            show.text("Limit", "limit", 130),
            show.text("About", "about", 250),
            show.when("Since", about(since), 145),
        ],
        sort_by=about(severity),
        no_value="No alert fires.",
    )


def _refused_now() -> StatPanel:
    return show.stat(
        show.Place(42, 4, 5),
        "Blocked now",
        "How many conversations (threads) and customers (subjects of quotas) with series had calls "
        "blocked in the last 5 minutes, regardless of the chosen time and limit, and how many "
        "subjects operators have frozen.",
        [
            *(
                show.Query(_or_zero(f"sum({ask.select(metric, ask.AGENT)})"), name)
                for metric, name in (
                    ("job_agent:langchain_quota_threads_refused:count5m", "threads"),
                    ("job_agent:langchain_quota_subjects_refused:count5m", "customers"),
                )
            ),
            show.Query(f"max({ask.select('langchain_quota_frozen_subjects')})", "frozen"),
        ],
        unit=COUNT,
        steps=((None, OK), (1, CRITICAL)),
    )


def _at_limits() -> StatPanel:
    exhausted = ask.select(
        "job_agent_limit:langchain_quota_threads_exhausted:count", ask.AGENT, ask.LIMIT
    )
    customers = f"group by (job, agent, scope, subject) ({ask.ratio(_LABELLED)} >= 1)"
    waiting = ask.select("langchain_quota_waiting_calls", ask.AGENT, ask.LIMIT)
    refusals = ask.select("langchain_quota_provider_refusals_total", ask.AGENT, ask.LIMIT)
    waits = "job_agent_limit:langchain_quota_provider_waits:bool"
    paced = f"max(avg_over_time({ask.select(waits, ask.AGENT, ask.LIMIT)}[{ask.RANGE}]))"
    return show.stat(
        show.Place(43, 4, 5),
        "At their limits",
        "How many threads and customers have exhausted a limit, so that their next call is "
        "blocked. If an agent has several limits, the one that most threads exhausted counts. "
        "'Waiting' calls wait for room in a quota, at a provider or for other calls to end. '429s' "
        "are the calls that providers refused in the chosen time, and 'paced' is the share of it "
        "in which calls waited for a provider.",
        [
            show.Query(_or_zero(f"sum(max by (job, agent) ({exhausted}))"), "threads"),
            show.Query(_or_zero(f"count({customers})"), "customers"),
            show.Query(_or_zero(f"sum({waiting})"), "waiting"),
            show.Query(f"sum(increase({refusals}[{ask.RANGE}]))", "429s"),
            show.Query(paced, "paced", properties={"unit": SHARE, "decimals": 0}),
        ],
        unit=COUNT,
        steps=((None, OK), (1, settings.WARNING)),
    )


def _calls_blocked() -> StatPanel:
    blocked = ask.grown(ask.CALLS, ask.RANGE, ask.AGENT, _BLOCKED)
    checked = ask.grown(ask.CALLS, ask.RANGE, ask.AGENT)
    return show.stat(
        show.Place(44, 4, 5),
        "Calls blocked",
        "How many calls were blocked in the chosen time, and their share of all checked calls. A "
        "call that two limits refuse counts once. Calls that were blocked because the store failed "
        "are included. The variable Limit has no effect here.",
        [
            show.Query(_or_zero(blocked), "calls", properties=show.fixed(settings.NEUTRAL)),
            show.Query(
                _or_zero(f"{blocked} / ({checked} > 0)"),
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
    """Return what model runs and paid tools cost."""
    return show.stat(
        place,
        "Cost, last 24 hours",
        "What model runs and paid tools cost in the last 24 hours, and in the last hour, which "
        "shows the pace. A run under several limits counts once. Only agents with a limit of money "
        "are included.",
        [
            show.Query(ask.cost("24h"), "24 hours"),
            show.Query(ask.cost("1h"), "last hour"),
        ],
        unit=DOLLARS,
        no_value="No limit of money.",
    )


def _store() -> StatPanel:
    seconds = ask.select("langchain_quota_store_seconds_count")
    failed = ask.select("langchain_quota_store_seconds_count", 'outcome!="ok"')
    return show.stat(
        show.Place(62, 4, 5),
        "Store failures",
        "The share of requests to the shared store that failed in the last 5 minutes, and how many "
        "calls were checked without the store in the chosen time.",
        [
            show.Query(
                f"(sum(rate({failed}[5m])) or 0 * sum(rate({seconds}[5m]))) "
                f"/ (sum(rate({seconds}[5m])) > 0)",
                "requests",
                properties={"unit": SHARE, "decimals": 1},
            ),
            show.Query(
                _or_zero(
                    ask.grown(
                        "job_agent_store_action:langchain_quota_store_fallbacks:increase15s",
                        ask.RANGE,
                    )
                ),
                "calls without it",
            ),
        ],
        unit=COUNT,
        steps=((None, OK), (0.01, settings.WARNING), (1, CRITICAL)),
        no_value="no store",
    )


def _threads() -> TablePanel:
    rank = ask.top(ask.THREADS)
    first = f"and on ({ask.OF_THREAD}) {rank}"
    used, limit = ask.thread_amounts(ask.AGENT)
    blocked = ask.increases(f"{ask.THREADS}_blocked", "5m", ask.AGENT, ask.LIMIT)
    decided = ask.last_time("decision", ask.AGENT, ask.LIMIT)
    return show.table(
        show.Place(57, 24, 10),
        "Quota used by thread",
        "What each conversation has used of its limits. Those with blocked calls in the last 5 "
        "minutes come first, then those with least left. 'Runs out in' uses the pace of the last "
        "15 minutes. Click a thread to see more.",
        [
            show.text("Thread", "thread_id", links=ask.LINKS),
            show.text("Agent", "agent", 110),
            show.text("Limit", "limit", 120),
            show.gauge("Used", f"({ask.thread_ratio(ask.AGENT, ask.LIMIT)} + 0) {first}", 150),
            show.text("Of", "amount", 180),
            show.left(f"sum by ({ask.OF_THREAD}) ({limit} - {used}) {first}"),
            show.duration("Runs out in", f"{ask.thread_seconds_left()} {first}", 95),
            show.count("Blocked, 5 min", f"{blocked} > 0 {first}", 118),
            show.when("Last call", f"{decided} * 1000 {first}", 130),
        ],
        sort_by=rank,
        labels_from=ask.amount(f"({used} {first})", limit, f"{ask.OF_THREAD}, unit"),
        no_value="No limit per thread has checked a call.",
    )


def _subjects() -> TablePanel:
    used, limit = ask.subject_amounts()
    rank = ask.top(ask.SUBJECT)
    resets = ask.select(f"{ask.SUBJECT}_reset:max", ask.AGENT, ask.LIMIT)
    blocked = ask.increases(f"{ask.SUBJECT}_blocked", "5m", ask.AGENT, ask.LIMIT)
    return show.table(
        show.Place(58, 24, 7),
        "Quota used by customer",
        "What each customer, or everybody together, has used of shared quotas, in the same order "
        "as threads. 'Runs out in' uses the pace of the last hour. Customers are only listed if "
        "Telemetry(subject_label=…) names the quota. A row without a customer is for everybody.",
        [
            show.text("Customer", "subject"),
            show.text("Quota", "scope", 75),
            show.text("Agent", "agent", 90),
            show.text("Limit", "limit", 110),
            show.gauge("Used", ask.ratio(), 140),
            show.text("Of", "amount", 150),
            show.left(f"sum by ({ask.OF_SUBJECT}) ({limit} - {used})"),
            show.duration("Runs out in", ask.seconds_left(), 95),
            show.count("Blocked, 5 min", f"{blocked} > 0", 118),
            show.when("Resets", f"{resets} * 1000", 120),
        ],
        sort_by=rank,
        labels_from=ask.amount(used, limit, f"{ask.OF_SUBJECT}, unit"),
        no_value="No quota is shared.",
    )


def _blocked_threads() -> TablePanel:
    blocked = ask.increases(f"{ask.THREADS}_blocked", "5m", ask.AGENT, ask.LIMIT)
    most = f"topk({settings.TOP}, sum by ({ask.OF_THREAD}) ({blocked}) > 0)"
    last = ask.last_time("refusal", ask.AGENT, ask.LIMIT)
    return show.table(
        show.Place(68, 12, 8),
        "Threads blocked now",
        "Which conversations had calls blocked in the last 5 minutes, by limits of any kind. Click "
        "a thread to see more.",
        [
            show.text("Thread", "thread_id", links=ask.LINKS),
            show.text("Agent", "agent", 110),
            show.text("Limit", "limit", 120),
            show.count("Blocked", most, 80),
            show.when("Last", f"{last} * 1000 and on ({ask.OF_THREAD}) {most}", 130),
        ],
        sort_by=most,
        no_value="No thread is blocked.",
    )


def _refusals() -> TimeseriesPanel:
    refused = ask.grown(ask.DECISIONS, ask.BAR, ask.AGENT, ask.LIMIT, _BLOCKED, by="limit, scope")
    return show.bars(
        show.Place(48, 12, 8),
        "Calls blocked by limit",
        "How many calls each limit refused since the previous bar, and at which threshold. Click a "
        "dot to open the trace of a call.",
        [
            show.Query(f"{refused} > 0", "{{limit}} ({{scope}})"),
            # Only for the exemplars, which recorded series do not have.
            show.Query(
                f"0 * sum(rate({ask.select('langchain_quota_calls_total', ask.AGENT, _BLOCKED)}"
                "[$__rate_interval]))",
                "traces",
                exemplar=True,
                properties=show.LINE,
            ),
        ],
        unit=settings.ROUNDED,
    ).no_value("No call was blocked.")


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
        "What limits allow, at which used share they count as near, and which share of their "
        "checked calls they refused in the chosen time. 'Would block' is this share for a limit in "
        "a dry run (enforce=False). Limits that a function computes are not listed.",
        [
            show.text("Agent", "agent", 150),
            show.text("Limit", "limit"),
            show.text("Scope", "scope", 100),
            show.left(allowed, "Allowed", 110),
            show.text("Unit", "unit", 80),
            show.share_of(
                "Near from", f"({allowed} ^ 0) * on (job, agent, limit) group_left () {near}"
            ),
            show.share_of("Blocked", share("blocked")),
            show.share_of("Would block", share("would_block")),
            show.text("Job", "job", 110),
        ],
        # Every row needs a number: Grafana does not sort others.
        sort_by=f"{refused('blocked|would_block')} {unit} or 0 * {allowed}",
        no_value="No limit has a number.",
    )


def _ended() -> TimeseriesPanel:
    counted = {
        "runs ended by": "runs_ended",
        "calls to a cheaper model by": "downgraded_calls",
        "tool calls over the time of": "long_tool_calls",
    }

    def grown(name: str) -> str:
        series = ask.select(f"langchain_quota_{name}_total", ask.AGENT, ask.LIMIT)
        return f"sum by (limit) (increase({series}[$__rate_interval])) > 0"

    actions = ask.together({what: grown(name) for what, name in counted.items()})
    return show.bars(
        show.Place(63, 12, 8),
        "What else limits do",
        "How many runs were ended by limits since the previous bar, how many model calls a budget "
        "sent to its downgrade_to, and how many tool calls took longer than call_limit. Runs that "
        "end with a last answer of the model do not count.",
        [show.Query(actions, "{{what}} {{limit}}")],
        unit=settings.ROUNDED,
    ).no_value("Nothing.")


def _waits() -> TimeseriesPanel:
    waited = ask.select("langchain_quota_wait_seconds_bucket", ask.AGENT, ask.LIMIT)
    return show.timeseries(
        show.Place(64, 12, 8),
        "Time that calls wait",
        "How long calls waited for room in a quota, or for other calls to end. Nine of ten calls "
        "waited no longer than this.",
        [
            show.Query(
                f"histogram_quantile(0.9, sum by (le, limit) (rate({waited}[$__rate_interval])))",
                "{{limit}}",
            )
        ],
        unit="s",
    ).no_value("No limit lets calls wait.")


def _runs() -> TablePanel:
    buckets = ask.select(ask.RUN_USED, ask.AGENT, ask.LIMIT)
    grown = f"sum by (job, agent, limit, unit, le) (increase({buckets}[{ask.RANGE}]))"
    allowed = ask.select(ask.ALLOWED, ask.AGENT, ask.LIMIT, 'scope="run"')

    def column(title: str, expr: str, width: int = 100) -> show.Column:
        return show.Column(title, expr, {"decimals": 2, "custom.width": width})

    def used(title: str, share: float) -> show.Column:
        return column(title, f"histogram_quantile({share}, {grown})")

    runs = f'sum by (job, agent, limit, unit) (increase({buckets[:-1]},le="+Inf"}}[{ask.RANGE}]))'
    return show.table(
        show.Place(56, 24, 8),
        "What runs use",
        "What runs that ended in the chosen time had used of each limit. Half of them used at most "
        "'Median', 95 of 100 at most '95 %', and all at most 'Highest', rounded up to a bound of "
        "the histogram. 'Allowed' is the run limit. Needs Telemetry(run_histograms=True).",
        [
            show.text("Agent", "agent", 150),
            show.text("Limit", "limit"),
            show.count("Runs", runs, 80),
            used("Median", 0.5),
            used("95 %", 0.95),
            used("Highest", 1),
            column("Allowed", f"max by (job, agent, limit, unit) ({allowed})"),
            show.text("Unit", "unit", 80),
            show.text("Job", "job", 110),
        ],
        sort_by=runs,
        no_value="No run ended with Telemetry(run_histograms=True).",
    )


def _health() -> TimeseriesPanel:
    errors = "job_component_error_type:langchain_quota_errors:increase15s"
    fallbacks = "job_agent_store_action:langchain_quota_store_fallbacks:increase15s"
    unchecked = "job_agent_kind:langchain_quota_unchecked_calls:increase15s"
    near = 'scope="thread",state="near",shown="false"'
    return show.bars(
        show.Place(52, 12, 8),
        "What failed",
        "Failures since the previous bar, calls that were checked without the shared store, and "
        "calls that no limit checked. Hidden threads near a limit have no series, and are in no "
        "table.",
        [
            show.Query(
                f"{ask.grown(errors, ask.BAR, by='component')} > 0", "failures of {{component}}"
            ),
            show.Query(
                f"{ask.grown(fallbacks, ask.BAR, by='action')} > 0",
                "calls without the store: on_store_error={{action}}",
            ),
            show.Query(
                f"{ask.grown(unchecked, ask.BAR, by='kind')} > 0",
                "calls that no limit checked: {{kind}}",
            ),
            show.Query(
                f"sum({ask.select('langchain_quota_subjects', near)}) > 0",
                "near threads hidden",
                properties=show.LINE,
            ),
        ],
        unit=COUNT,
    ).no_value("Nothing failed.")


def _store_seconds() -> TimeseriesPanel:
    seconds = ask.select("langchain_quota_store_seconds_bucket")

    def within(share: float) -> str:
        return f"histogram_quantile({share}, sum by (le) (rate({seconds}[$__rate_interval])))"

    return show.timeseries(
        show.Place(67, 12, 8),
        "Time that the store takes",
        "How long requests to the shared store took: the median, and the time within which 99 of "
        "100 ended.",
        [show.Query(ask.together({"median": within(0.5), "99 of 100": within(0.99)}), "{{what}}")],
        unit="s",
    ).no_value("No store.")


def _or_zero(expr: str) -> str:
    """Return 0 where a query finds nothing, but nothing if no process has metrics."""
    return f"{expr} or 0 * count({ask.select('langchain_quota_build_info')})"
