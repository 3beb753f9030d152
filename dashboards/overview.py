"""The first dashboard: what is wrong, who is blocked, what is left of quotas, and health."""

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
_ALERTS = f'alertname=~"LangChainQuota.+",{ask.JOB}'
_ABOUT = (
    '"limit", "subject", "thread_id", "store", "instance", "model", "cause", '
    '"kind", "component", "error_type"'
)

_FREE = "No limit of money."


def build() -> Dashboard:
    """Return the dashboard."""
    blocked = ask.grown(ask.CALLS, "5m", ask.AGENT, _BLOCKED)
    return show.new_dashboard(
        settings.OVERVIEW_UID,
        settings.OVERVIEW_TITLE,
        "What is wrong, who is blocked, what each thread and customer has used, and what it costs.",
        common_variables(),
        _firing(),
        _refused_now(),
        _calls_blocked(),
        cost(show.Place(45, 6, show.LOW), _times_yesterday(ask.cost("1h"))),
        _health_now(),
        _alerts(),
        _blocked_now(),
        _refusals(),
        _compared(show.Place(72, 6, 6), "Calls blocked, 5 min", blocked, COUNT),
        _compared(show.Place(73, 6, 6), "Cost, 5 min", ask.cost("5m"), DOLLARS).no_value(_FREE),
        _threads(),
        _subjects(),
        _frozen(),
        show.row(54, "Limits, and dry runs", _limits(), _runs()),
        show.row(60, "Runs and waits", _ended(), _waits()),
        show.row(55, "Health, whatever Agent and Limit are chosen", _health()),
    )


def _firing() -> StatPanel:
    steps = {"critical": CRITICAL, "warning": settings.WARNING}
    firing = {
        each: _or_zero(f'count(ALERTS{{{_ALERTS},alertstate="firing",severity="{each}"}})')
        for each in steps
    }
    panel = show.stat(
        show.Place(70, 3, show.LOW),
        "Alerts firing",
        "How many alerts of langchain-quota fire for the chosen jobs. Critical ones page.",
        [show.Query(ask.together(firing), "{{what}}")],
        unit=COUNT,
    )
    return show.style(
        panel,
        {each: {"thresholds": show.thresholds(((None, OK), (1, steps[each])))} for each in steps},
    )


def _alerts() -> TablePanel:
    runbook = {
        "title": "Runbook",
        "url": f"{RUNBOOKS}/LangChainQuota${{__data.fields.alert:percentencode}}.md",
        "targetBlank": True,
    }
    firing = f'ALERTS{{{_ALERTS},alertstate="firing"'
    began = f"ALERTS_FOR_STATE{{{_ALERTS}}}"
    # A severity outweighs any time in seconds since 1970.
    worst_first = (
        f'max without (alertstate) (2e10 * {firing},severity="critical"}} '
        f'or 1e10 * {firing},severity="warning"}} or 0 * {firing}}}) + {began}'
    )

    def about(expr: str) -> str:
        short = f'label_replace({expr}, "alert", "$1", "alertname", "LangChainQuota(.+)")'
        return f'label_join({short}, "about", " ", {_ABOUT})'

    return show.table(
        show.Place(41, 12, 8),
        "Alerts that fire",
        "The firing alerts of langchain-quota for the chosen jobs: those that page on top, and of "
        "these the newest. Click an alert to read what to do. 'About' shows the limit, and the "
        "customer, thread, store, process, model or kind of calls, or what failed.",
        [
            show.text("Severity", "severity", 75, **show.severities()),
            show.text("Alert", "alert", 195, links=[runbook]),
            show.text("About", "about"),
            show.text("Agent", "agent", 90),
            show.lasts(about(f"time() - {began} and ignoring (alertstate) {firing}}}")),
        ],
        sort_by=about(worst_first),
        no_value="No alert fires.",
    )


def _refused_now() -> StatPanel:
    refused = "job_agent:langchain_quota_{}_refused:count5m"
    counts = {
        name: _or_zero(f"sum({ask.select(refused.format(each), ask.AGENT)})")
        for name, each in (("threads", "threads"), ("customers", "subjects"))
    }
    frozen = ask.select("langchain_quota_frozen_subjects")
    return show.stat(
        show.Place(42, 5, show.LOW),
        "Blocked now",
        "How many conversations (threads) and customers (subjects of quotas) with series had calls "
        "blocked in the last 5 minutes, regardless of the chosen time and limit, and how many "
        "subjects operators have frozen.",
        [show.Query(ask.together({**counts, "frozen": f"max({frozen})"}), "{{what}}")],
        unit=COUNT,
        steps=((None, OK), (1, CRITICAL)),
    )


def _calls_blocked() -> StatPanel:
    blocked = ask.grown(ask.CALLS, "1h", ask.AGENT, _BLOCKED)
    checked = ask.grown(ask.CALLS, "1h", ask.AGENT)
    return show.stat(
        show.Place(44, 6, show.LOW),
        "Calls blocked, last hour",
        "How many calls were blocked, their share of all checked calls, and how many times as many "
        "as in the same hour of yesterday. A call that two limits refuse counts once. Calls that "
        "were blocked because the store failed are included. The variable Limit has no effect.",
        [
            show.Query(_or_zero(blocked), "calls", properties=show.fixed(settings.NEUTRAL)),
            show.Query(
                _or_zero(f"{blocked} / ({checked} > 0)"),
                "share",
                properties={"unit": SHARE, "decimals": 1},
            ),
            _times_yesterday(blocked),
        ],
        unit=COUNT,
        steps=settings.REFUSED_SHARE,
    )


def _times_yesterday(expr: str) -> show.Query:
    steps = show.thresholds(settings.TIMES_YESTERDAY)
    return show.Query(
        f"{expr} / ({ask.earlier(expr, '1d')} > 0)",
        "vs yesterday",
        properties={"unit": "suffix:\N{MULTIPLICATION SIGN}", "decimals": 1, "thresholds": steps},
    )


def _compared(place: show.Place, title: str, expr: str, unit: str) -> TimeseriesPanel:
    day, week = (ask.earlier(expr, offset) for offset in ("1d", "7d"))
    panel = show.timeseries(
        place,
        title,
        "What was counted within 5 minutes, beside the same time of yesterday and a week ago. The "
        "variable Limit has no effect.",
        [show.Query(ask.together({"now": expr, "yesterday": day, "last week": week}), "{{what}}")],
        unit=unit,
        # With numbers, the third name would have no room.
        has_numbers=False,
    )
    own = {"now": show.fixed(OK), "yesterday": show.THIN, "last week": show.DASHED}
    return show.style(panel, own)


def cost(place: show.Place, *more: show.Query) -> StatPanel:
    """Return what model runs and paid tools cost."""
    return show.stat(
        place,
        "Cost, last 24 hours",
        "What model runs and paid tools cost in the last 24 hours, and in the last hour, which "
        "shows the pace, on the overview also as times that of the same hour of yesterday. A run "
        "under several limits counts once. Only agents with a limit of money are included.",
        [show.Query(ask.cost("24h"), "24 hours"), show.Query(ask.cost("1h"), "last hour"), *more],
        unit=DOLLARS,
        no_value=_FREE,
    )


def _health_now() -> StatPanel:
    processes = ask.select("langchain_quota_build_info")
    seconds = ask.select("langchain_quota_store_seconds_count")
    failed = ask.select("langchain_quota_store_seconds_count", 'outcome!="ok"')
    by_store = "sum by (store) "
    return show.stat(
        show.Place(71, 4, show.LOW),
        "Health",
        "How many processes export metrics, and which share of its requests failed in the last 5 "
        "minutes, for the shared store that fails most. Dashed lines in the charts mark restarts.",
        [
            show.Query(
                # 0 if all are gone, as long as the alert of missing metrics looks back.
                f"count({processes}) or 0 * count(last_over_time({processes}[1h]))",
                "processes",
                properties=show.fixed(settings.NEUTRAL),
            ),
            show.Query(
                f"max(({by_store}(rate({failed}[5m])) or 0 * {by_store}(rate({seconds}[5m]))) "
                f"/ ({by_store}(rate({seconds}[5m])) > 0))",
                "store fails",
                properties={"unit": SHARE, "decimals": 1},
            ),
        ],
        unit=COUNT,
        steps=((None, OK), (0.01, settings.WARNING), (1, CRITICAL)),
        no_value="no process",
    )


def _threads() -> TablePanel:
    rank = ask.top(ask.THREADS)
    first = f"and on ({ask.OF_THREAD}) {rank}"
    _, limit = ask.thread_amounts(ask.AGENT)
    used = ask.recent(ask.ratio(ask.THREADS))
    blocked = ask.thread_blocked("5m", ask.AGENT, ask.LIMIT)
    last = f"topk by ({ask.OF_THREAD}) (1, {ask.refusals()})"
    by = f'group by ({ask.OF_THREAD}, by) (label_join({last}, "by", " ", "scope", "subject"))'
    return show.table(
        show.Place(57, 24, 10),
        "Quota used by thread",
        "What each conversation has used of its limits. Those with most calls blocked in the last "
        "5 minutes come first, then those with least left. 'Blocked by' names whose count refused "
        "last: that of the thread, of a run, or of a quota and its customer. An idle thread whose "
        "process is gone, as after a deployment, is shown for an hour as of its last call. 'Runs "
        "out in' uses the pace of the last 15 minutes. Click a thread to see more.",
        [
            show.text("Thread", "thread_id", links=ask.LINKS),
            show.text("Agent", "agent", 105),
            show.text("Limit", "limit", 130),
            show.gauge("Used", f"{used} {first}"),
            show.left(f"{ask.recent(limit)} {first}", "Of", 70),
            show.text("Unit", "unit", 75),
            show.duration("Runs out in", f"{ask.thread_seconds_left()} {first}", 95),
            show.count("Blocked, 5 min", f"{blocked} > 0 {first}", 118),
            show.text("Blocked by", "by", 130),
            show.when("Last call", f"{ask.last_time('decision', ask.AGENT)} {first}", 145),
            show.hidden("job"),
        ],
        sort_by=rank,
        labels_from=by,
        no_value="No limit per thread has checked a call.",
    )


def _subjects() -> TablePanel:
    rank = ask.top(ask.SUBJECT)
    first = f"and on ({ask.OF_SUBJECT}) {rank}"
    limit = ask.recent(ask.select(ask.SUBJECT_LIMIT, ask.AGENT))
    used = ask.recent(ask.ratio(ask.SUBJECT))
    resets = ask.select(f"{ask.SUBJECT}_reset:max", ask.AGENT, ask.LIMIT)
    blocked = ask.increases(f"{ask.SUBJECT}_blocked", "5m", ask.AGENT, ask.LIMIT)
    decided = ask.last_time("decision", ask.AGENT, of="subject", by=ask.OF_SUBJECT)
    return show.table(
        show.Place(58, 24, 8),
        "Quota used by customer",
        "What each customer, or everybody together, has used of shared quotas, in the same order "
        "as threads, and as long. 'Runs out in' uses the pace of the last hour. Customers are only "
        "listed if Telemetry(subject_label=…) names the quota. A smooth quota has no used share.",
        [
            show.text("Customer", "subject", noValue="everybody"),
            show.text("Quota", "scope", 90),
            show.text("Agent", "agent", 105),
            show.text("Limit", "limit", 130),
            show.gauge("Used", f"{used} {first}"),
            show.left(f"{limit} {first}", "Of", 70),
            show.text("Unit", "unit", 75),
            show.duration("Runs out in", ask.seconds_left(), 95),
            show.count("Blocked, 5 min", f"{blocked} > 0", 118),
            show.when("Resets", f"{resets} * 1000", 120),
            show.when("Last call", f"{decided} {first}", 145),
        ],
        sort_by=rank,
        no_value="No quota is shared.",
    )


def _blocked_now() -> TablePanel:
    calls, since = (
        ask.select(f"{ask.REFUSED}:{each}", ask.AGENT, ask.LIMIT) for each in ("sum5m", "since")
    )
    each = f"group by ({ask.OF_SUBJECT}, thread_id) ({ask.refusals()})"
    threads = f"count by ({ask.OF_SUBJECT}) ({each})"
    whose = f'label_join({calls}, "whose", " ", "scope", "subject")'
    return show.table(
        show.Place(74, 12, 8),
        "Who is blocked now",
        "Whose count refused calls in the last 5 minutes: that of a quota, with the customer if "
        "Telemetry(subject_label=…) names the quota, of each thread, or of each run. Most calls "
        "come first. 'Threads' are those with series. Refusals have gone on 'For' so long, without "
        "a pause of 5 minutes.",
        [
            show.text("Blocked by", "whose"),
            show.text("Limit", "limit"),
            show.text("Agent", "agent", 95),
            show.count("Calls", whose, 60),
            show.count("Threads", f"{threads} and on ({ask.OF_SUBJECT}) {calls}", 75),
            show.lasts(f"time() - {since}"),
        ],
        sort_by=whose,
        no_value="Nothing is blocked.",
    )


def _frozen() -> TablePanel:
    def when(event: str) -> str:
        times = ask.select("langchain_quota_frozen_timestamp_seconds", f'event="{event}"')
        return f"max by (job, scope, subject, by) ({times}) * 1000"

    return show.table(
        show.Place(75, 24, 4),
        "Who is frozen",
        "Whose calls operators have frozen, as processes last read it; without 'Until', until they "
        "are thawed. Customers are only listed if Telemetry(subject_label=…) names them.",
        [
            show.text("Customer", "subject", noValue="everybody"),
            show.text("Scope", "scope", 200),
            show.text("By", "by", 200),
            show.when("Since", when("since"), 200),
            show.when("Until", when("until"), 200),
            show.text("Job", "job", 150),
        ],
        sort_by=when("since"),
        no_value="Nobody is frozen.",
    )


def _refusals() -> TimeseriesPanel:
    refused = ask.grown(ask.DECISIONS, ask.BAR, ask.AGENT, ask.LIMIT, _BLOCKED, by="limit, scope")
    return show.bars(
        show.Place(48, 12, 6),
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
                properties={**show.LINE, **show.UNNAMED},
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
            show.text("Unit", "unit", 130),
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

    waiting = ask.select("langchain_quota_waiting_calls", ask.AGENT, ask.LIMIT)
    actions = ask.together({what: grown(name) for what, name in counted.items()})
    return show.bars(
        show.Place(63, 12, 8),
        "What else limits do",
        "How many runs were ended by limits since the previous bar, how many model calls a budget "
        "sent to its downgrade_to, how many tool calls took longer than call_limit, and how many "
        "calls providers refused (429). Runs that end with a last answer of the model do not "
        "count. The line shows calls that wait now.",
        [
            show.Query(actions, "{{what}} {{limit}}"),
            show.Query(grown("provider_refusals"), "429s of {{limit}}"),
            show.Query(
                f"sum by (limit) ({waiting})", "waiting for {{limit}}", properties=show.LINE
            ),
        ],
        unit=settings.ROUNDED,
        has_totals=False,
    ).no_value("Nothing.")


def _waits() -> TimeseriesPanel:
    waited = ask.select("langchain_quota_wait_seconds_bucket", ask.AGENT, ask.LIMIT)
    seconds = ask.select("langchain_quota_store_seconds_bucket")

    def within(share: float, series: str, by: str = "le") -> str:
        return f"histogram_quantile({share}, sum by ({by}) (rate({series}[$__rate_interval])))"

    store = {"median": within(0.5, seconds), "99 of 100": within(0.99, seconds)}
    waits = "job_agent_limit:langchain_quota_provider_waits:bool"
    paced = ask.select(waits, ask.AGENT, ask.LIMIT)
    return show.timeseries(
        show.Place(64, 12, 8),
        "Time that calls wait",
        "How long calls waited for room in a quota, or for other calls to end. Nine of ten calls "
        "waited no longer than this. For providers, the share of the time in which calls waited; "
        "for the shared store, how long requests took: the median, and 99 of 100.",
        [
            show.Query(within(0.9, waited, "le, limit"), "{{limit}}"),
            show.Query(
                f"max by (limit) (avg_over_time({paced}[{ask.BAR}]))",
                "{{limit}}, share of time",
                properties={"unit": SHARE, "decimals": 0},
            ),
            show.Query(ask.together(store), "store, {{what}}"),
        ],
        unit="s",
    ).no_value("No limit lets calls wait.")


def _runs() -> TablePanel:
    of_all = (ask.RUN_USED, ask.AGENT, ask.LIMIT)
    allowed = ask.select(ask.ALLOWED, ask.AGENT, ask.LIMIT, 'scope="run"')

    def column(title: str, expr: str, width: int = 100) -> show.Column:
        return show.Column(title, expr, {"decimals": 2, "custom.width": width})

    def used(title: str, share: float) -> show.Column:
        def within(unit: str) -> str:
            grown = f"increase({ask.select(*of_all, unit)}[{ask.RANGE}])"
            return f"histogram_quantile({share}, sum by (job, agent, limit, unit, le) ({grown}))"

        # Between the bounds of a histogram are parts of a call, and a run makes none.
        return column(title, f"""ceil({within('unit="calls"')}) or {within('unit!="calls"')}""")

    ended = ask.select(*of_all, 'le="+Inf"')
    runs = f"sum by (job, agent, limit, unit) (increase({ended}[{ask.RANGE}]))"
    return show.table(
        show.Place(56, 24, 8),
        "What runs use",
        "What runs that ended in the chosen time had used of each limit. Half of them used at most "
        "'Median', and 95 of 100 at most '95 %', as far as a histogram knows. All used at most "
        "'Highest', one of its bounds. 'Allowed' is the run limit. Needs "
        "Telemetry(run_histograms=True).",
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
    def counted(series: str, label: str, *only: str) -> str:
        return f"{ask.grown(f'{series}:increase15s', ask.BAR, *only, by=label)} > 0"

    fallbacks = "job_agent_store_action:langchain_quota_store_fallbacks"
    requests = "job_instance_store_outcome:langchain_quota_store_requests"
    errors, hidden = "job_component_error_type:langchain_quota_errors", "near threads hidden"
    unchecked = "job_agent_kind:langchain_quota_unchecked_calls"
    near = ask.select("langchain_quota_subjects", 'scope="thread",state="near",shown="false"')
    failed = {
        # What a store does not answer is counted by store, below.
        "failures of ": counted(errors, "component", 'error_type!="QuotaStoreError"'),
        "calls that no limit checked: ": counted(unchecked, "kind"),
        hidden: f"sum({near}) > 0",
    }
    of_stores = {
        "failures of": counted(requests, "store", 'outcome!="ok"'),
        "calls blocked without": counted(fallbacks, "store", 'action="block"'),
        "calls allowed without": counted(fallbacks, "store", 'action="allow"'),
    }
    panel = show.bars(
        show.Place(52, 24, 8),
        "What failed",
        "Failures since the previous bar, calls that were blocked or allowed because a store did "
        "not answer, and calls that no limit checked. Hidden threads near a limit have no series, "
        "and are in no table.",
        [
            show.Query(ask.together(failed), "{{what}}{{component}}{{kind}}"),
            show.Query(ask.together(of_stores), "{{what}} {{store}}"),
        ],
        unit=COUNT,
        has_totals=False,
    )
    return show.style(panel, {hidden: show.LINE}).no_value("Nothing failed.")


def _or_zero(expr: str) -> str:
    """Return 0 where a query finds nothing, but nothing if no process has metrics."""
    return f"{expr} or 0 * count({ask.select('langchain_quota_build_info')})"
