"""The first dashboard: what is wrong, who is refused, and who is about to run out."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards import settings
from dashboards.columns import LINKS, Ask, use_columns
from dashboards.counters import bars as grown
from dashboards.counters import per_minute, quantile, share, total
from dashboards.panels import (
    Column,
    Place,
    Query,
    bars,
    breaches,
    count,
    fixed,
    from_one,
    new_dashboard,
    row,
    stat,
    table,
    text,
    timeseries,
    when,
    words,
)
from dashboards.queries import (
    AFTER_REFUSAL,
    AGENT,
    ANSWERS,
    CALLS,
    CONFIGURED,
    DECISION,
    DECISIONS,
    ERRORS,
    EXHAUSTED,
    FALLBACKS,
    GRANTED,
    HIDDEN,
    LIMIT,
    LIMIT_ALERT,
    LIMIT_NEAR,
    LOST_ROOT_RUNS,
    NEAR,
    QUESTIONS,
    RUNS,
    RUNS_ENDED,
    STORE,
    SUBJECTS,
    THREAD_BLOCKED,
    TRACED,
    UNJUDGED,
    WAIT,
    among,
    firing_alerts,
    label_values,
    of_limit,
    processes,
    scrape_duration,
    select,
    store_share,
    with_traced,
)
from dashboards.settings import COUNT, CRITICAL, NEUTRAL, OK, RANGE, RANGE_SECONDS, WARNING
from dashboards.usage import (
    in_any_unit,
    latest_refusals,
    of_subjects,
    of_threads,
    refused_since,
    refused_threads,
    threads_by_state,
)
from dashboards.variables import common_variables, found, several
from langchain_quota.monitoring.exports import RUNBOOKS

_BLOCKED = 'decision="blocked"'
_OF_MODEL = 'kind="model"'
_REFUSALS = select(DECISIONS, AGENT, LIMIT, _BLOCKED)
_OF_THREAD = "job, agent, limit, thread_id"
_DECIDED = {"allowed": OK, "blocked": CRITICAL, "would_block": WARNING, "skipped": NEUTRAL}
_SAID = {"approve": OK, "reject": CRITICAL}
_NEAREST, _REFUSED = "nearest", "refused"


def build() -> Dashboard:
    """The dashboard, without its annotations."""
    board = new_dashboard(
        settings.OVERVIEW_UID,
        settings.OVERVIEW_TITLE,
        "What is wrong, who is refused, who is about to run out, and whether the limits work.",
    )
    limit = several("limit", "Limit", label_values(select(DECISIONS, AGENT), "limit"))
    board.variables(
        [
            *common_variables(),
            limit,
            found(_NEAREST, "Threads nearest to a limit", of_threads().nearest),
            found(_REFUSED, "Threads refused last", refused_threads()),
        ]
    )
    _first_look(board)
    _refused(board)
    _about_to_run_out(board)
    _shared_quotas(board)
    _limits(board)
    _agents(board)
    _processes(board)
    return board


def annotations() -> list[dict[str, object]]:
    """Where a limit refused calls, if its refusals are worth an alert."""
    return [
        breaches(
            total(
                "job, agent, limit, scope",
                _REFUSALS,
                settings.BREACH_WINDOW,
                settings.BREACH_SECONDS,
                alerting=True,
            ),
            title="{{limit}} refused calls ({{scope}} limit)",
            text="agent {{agent}}, job {{job}}",
        )
    ]


def _first_look(board: Dashboard) -> None:
    runbook = {
        "title": "Runbook",
        "url": f"{RUNBOOKS}/${{__data.fields.alertname:percentencode}}.md",
        "targetBlank": True,
    }
    board.with_panel(
        table(
            Place(24, 24, 8),
            "Alerts that fire",
            "The alerts of langchain-quota that fire for the chosen jobs, the newest on top. "
            "Click an alert to open its runbook.",
            [
                text("Alert", "alertname", 330, links=[runbook]),
                text("Severity", "severity", 90),
                text("Agent", "agent", 140),
                text("Limit", "limit", 140),
                text("Thread", "thread_id", 290),
                when("Since", firing_alerts(), 130),
                text("Job", "job", 110),
            ],
            sort_by=firing_alerts(),
            no_value="No alert fires.",
            only_columns=True,
        )
    )
    judged = select(DECISIONS, AGENT, LIMIT, 'decision=~"allowed|blocked|would_block"')
    refused_of, all_of = (
        total("", selector, RANGE, RANGE_SECONDS, alerting=True) for selector in (_REFUSALS, judged)
    )
    twice = "A call that two limits refuse counts for both."
    board.with_panel(
        stat(
            Place(1, 6, 4),
            "Calls refused",
            f"Calls that the chosen limits refused in the chosen time. {twice}",
            total("", _REFUSALS, RANGE, RANGE_SECONDS),
            unit=COUNT,
            steps=[(None, NEUTRAL)],
        ).decimals(0)
    )
    board.with_panel(
        stat(
            Place(2, 6, 4),
            "Refused share",
            "The share of the judged calls that the chosen limits refused in the chosen time. The "
            "panel leaves out limits with alert=False and limits on trial (enforce=False). No "
            f"data: no call was judged. {twice}",
            f"{refused_of} / ({all_of} > 0)",
            unit="percentunit",
            steps=[
                (None, OK),
                (settings.REFUSED_SHARE_WARNING, WARNING),
                (settings.REFUSED_SHARE_CRITICAL, CRITICAL),
            ],
        ).decimals(1)
    )
    threads = stat(
        Place(27, 6, 4),
        "Threads at their limits",
        "How many conversations (threads) are near a limit, and how many have used one up: the "
        "limit refuses their next call. A conversation counts once, for its most used limit. "
        "Conversations without series count once in every process, whatever Limit is chosen.",
        threads_by_state(),
        unit=COUNT,
        steps=[(None, OK)],
        legend="{{state}}",
    ).decimals(0)
    for name, colour in settings.STATES.items():
        if name != "ok":
            threads.override_by_name(name, from_one(colour))
    board.with_panel(threads)
    board.with_panel(
        stat(
            Place(5, 6, 4),
            "Threads hidden",
            "How many conversations have no series, so that no table lists them. A process lists "
            "at most max_exported_threads, and those near a limit first. The variables Agent and "
            "Limit do not narrow this number.",
            f"sum({select(HIDDEN)})",
            unit=COUNT,
            steps=[(None, NEUTRAL)],
        ).decimals(0)
    )


def _refused(board: Dashboard) -> None:
    latest = latest_refusals()
    of_latest = f"and on ({_OF_THREAD}) {latest}"
    blocked = select(THREAD_BLOCKED, AGENT, LIMIT)
    refusals = total(_OF_THREAD, blocked, RANGE, RANGE_SECONDS)
    board.with_panel(
        table(
            Place(23, 24, 9),
            "Refused now",
            "Which conversations were refused in the chosen time, and by which limit, with the "
            "latest refusal on top. Run limits and shared quotas are included. 'Refused since' "
            "says when the refusals began, without a pause of ten minutes. It is empty if the "
            "process that judged last refused nothing, or is gone. Click a thread to see more, or "
            "to see its traces.",
            [
                text("Thread", "thread_id", 290, links=LINKS),
                text("Agent", "agent", 140),
                text("Limit", "limit", 140),
                count("Refusals", with_traced(f"{refusals} {of_latest}"), 90),
                when("Last refusal", f"{latest} * 1000", 150),
                when(
                    "Refused since", f"({refused_since(among(_REFUSED))} {of_latest}) * 1000", 150
                ),
                text("Job", "job", 120),
                Column(TRACED, TRACED, {"custom.hidden": True}),
            ],
            sort_by=f"{latest} * 1000",
            no_value="No thread with series was refused.",
        )
    )


def _about_to_run_out(board: Dashboard) -> None:
    threads = of_threads(among(_NEAREST))
    board.with_panel(
        table(
            Place(6, 24, 10),
            "Threads about to run out",
            "How much of their limits conversations have left. The nearest to a limit is on top, "
            f"and exhausted ones are last. The table has at most {settings.TOP} rows. 'Time to "
            f"exhaustion' uses the pace of the last {settings.PACE_WINDOW}. It is empty if a "
            f"thread used no call in the last {settings.ACTIVE_WINDOW}. Another dashboard has the "
            "limits of tokens and money. Click a thread to see more, or to see its traces.",
            [
                text("Thread", "thread_id", 285, links=LINKS),
                text("Agent", "agent", 120),
                text("Limit", "limit", 120),
                *use_columns(lambda ask: threads.freshest(ask(threads)), traced=True),
                text("Job", "job", 100),
                Column(TRACED, TRACED, {"custom.hidden": True}),
            ],
            sort_by=threads.freshest(threads.rank),
        )
    )


def _shared_quotas(board: Dashboard) -> None:
    shared = of_subjects('subject=""')

    def of_all(ask: Ask) -> str:
        return in_any_unit(lambda use: use.top(ask(use)), 'subject=""', of=of_subjects)

    board.with_panel(
        table(
            Place(25, 24, 6),
            "Shared quotas",
            "How much is used of quotas per agent and of global quotas, and when nothing is left "
            f"at the pace of the last {settings.PACE_WINDOW}. 'Resets' is empty if a quota has no "
            "time window.",
            [
                text("Quota", "scope", 110),
                text("Agent", "agent", 140),
                text("Limit", "limit", 140),
                *use_columns(of_all, amounts_of=lambda ask: shared.top(ask(shared))),
                text("Job", "job", 110),
            ],
            sort_by=of_all(lambda use: use.rank),
        )
    )
    subjects = of_subjects('subject!=""')
    board.with_panel(
        table(
            Place(26, 24, 8),
            "Top subjects of shared quotas",
            "How many calls of their quota users, tenants or other subjects have left. The nearest "
            "to the limit is on top. The table is empty unless Telemetry(subject_label=…) names "
            "the quotas.",
            [
                text("Subject", "subject", 180),
                text("Quota", "scope", 100),
                text("Agent", "agent", 120),
                text("Limit", "limit", 120),
                *use_columns(lambda ask: subjects.top(ask(subjects))),
                text("Job", "job", 100),
            ],
            sort_by=subjects.top(subjects.rank),
            no_value="No subject has a label: see Telemetry(subject_label=…).",
        )
    )


def _limits(board: Dashboard) -> None:
    board.with_row(row(7, "Limits"))
    refusals = select(DECISIONS, AGENT, LIMIT, 'decision=~"blocked|would_block"')
    board.with_panel(
        bars(
            Place(9, 12, 8),
            "Refusals by limit and scope",
            "How many calls a limit refused, and at which threshold. A limit on trial "
            "(enforce=False) shows what it would have refused: would_block. The bars add up to "
            "the counted refusals.",
            [
                Query(
                    grown("limit, scope, decision", refusals),
                    "{{limit}} ({{scope}}) {{decision}}",
                    exemplar=True,
                )
            ],
        ).no_value("Nothing was refused.")
    )
    board.with_panel(
        bars(
            Place(10, 12, 8),
            "Near and exhausted",
            "How often a count came near its limit, and how often a call used up a limit. Run "
            "limits are included. The bars add up to what was counted.",
            [
                Query(
                    grown("limit, scope", select(metric, AGENT, LIMIT)),
                    f"{state} {{{{limit}}}} ({{{{scope}}}})",
                )
                for state, metric in (("near", NEAR), ("exhausted", EXHAUSTED))
            ],
        ).no_value("No count came near its limit.")
    )
    board.with_panel(
        timeseries(
            Place(11, 12, 8),
            "Subjects by state",
            "How many threads, users and other subjects are ok, near a limit or exhausted. A "
            "subject counts once for every limit, and once in every process that served it.",
            [
                Query(
                    f"sum by (scope, state) ({_subjects(name)}) > 0",
                    "{{scope}}: {{state}}",
                    properties=fixed(colour),
                )
                for name, colour in settings.STATES.items()
            ],
            unit=COUNT,
        ).decimals(0)
    )
    allowed, refunded = (
        per_minute("limit", select(DECISIONS, AGENT, LIMIT, f'decision="{decision}"'))
        for decision in ("allowed", "refunded")
    )
    board.with_panel(
        timeseries(
            Place(12, 12, 8),
            "Charged to each limit",
            "Calls per minute that a limit counted. Charges that were taken back are subtracted.",
            [Query(f"({allowed} - {refunded}) != 0", "{{limit}}")],
            unit="cpm",
        )
    )
    board.with_panel(
        timeseries(
            Place(28, 12, 8),
            "Runs that a limit ended",
            "The share of the runs that a limit ended before the agent was done. No data: no run "
            "began.",
            [
                Query(
                    share(
                        "agent, limit",
                        select(RUNS_ENDED, AGENT, LIMIT),
                        select(RUNS, AGENT),
                        wider="agent",
                    ),
                    "{{agent}}: {{limit}}",
                )
            ],
            unit="percentunit",
        ).max(1)
    )
    board.with_panel(
        table(
            Place(13, 12, 8),
            "Configured limits",
            "How many calls a limit allows in a run, thread or quota. 'Near from' is the used "
            "share from which the limit is near. 'Alerts' is no for a limit with alert=False or "
            "enforce=False. Limits that a function computes are not listed.",
            [
                text("Agent", "agent", 120),
                text("Limit", "limit", 120),
                text("Scope", "scope", 80),
                count("Allowed", of_limit(CONFIGURED, "calls"), 75),
                Column(
                    "Near from",
                    of_limit(LIMIT_NEAR, "calls"),
                    {"unit": "percentunit", "custom.width": 80},
                ),
                Column(
                    "Alerts",
                    of_limit(LIMIT_ALERT, "calls"),
                    {"mappings": [words({"no": None, "yes": None})], "custom.width": 60},
                ),
                text("Job", "job", 80),
            ],
        )
    )
    board.with_panel(
        timeseries(
            Place(33, 24, 7),
            "Waits of tool calls",
            "How long tool calls wait for other calls to end, under limits with at_once. 0: they "
            "do not wait. blocked: they waited, and were then refused. No data: no tool with "
            "such a limit is called.",
            [
                Query(
                    # Leaves out only what no call has; a line must not hide that nobody waits.
                    f"{quantile(level, WAIT, 'agent, limit, decision', AGENT, LIMIT)} >= 0",
                    f"p{level * 100:.0f} {{{{agent}}}}: {{{{limit}}}} {{{{decision}}}}",
                )
                for level in settings.QUANTILES
            ],
            unit="s",
        ).no_value("No call of a tool with at_once.")
    )
    board.with_panel(
        bars(
            Place(34, 12, 7),
            "Calls granted",
            "How many calls were granted on top of limits. A grant shows when the first call is "
            "judged with it. If a grant raises several limits, each of them counts it.",
            [Query(grown("limit, scope", select(GRANTED, AGENT, LIMIT)), "{{limit}} ({{scope}})")],
        ).no_value("Nothing was granted.")
    )
    board.with_panel(
        bars(
            Place(35, 12, 7),
            "Questions and answers",
            "How often limits with exit_behavior='ask' asked a person whether a run may go on "
            "(dots), and the answers (bars). A question about several limits counts once for each "
            "of them. Fewer answers than questions: runs wait for a person.",
            [
                Query(grown("answer", select(ANSWERS, AGENT, LIMIT)), "{{answer}}", colours=_SAID),
                Query(
                    grown("", select(QUESTIONS, AGENT, LIMIT)),
                    "asked",
                    properties={
                        **fixed(NEUTRAL),
                        "custom.drawStyle": "points",
                        "custom.stacking": {"mode": "none"},
                    },
                ),
            ],
        ).no_value("Nobody was asked.")
    )


def _agents(board: Dashboard) -> None:
    board.with_row(row(31, "Agents, whatever Limit is chosen"))
    calls = select(CALLS, AGENT)
    board.with_panel(
        timeseries(
            Place(8, 12, 8),
            "Calls by decision",
            "Judged calls per minute. blocked: refused. skipped: not run, because another call of "
            "the batch stopped the batch. would_block: run, but a limit on trial would refuse it. "
            "Click a dot to open the trace of a call.",
            [
                Query(
                    f"{per_minute('decision', calls)} > 0",
                    "{{decision}}",
                    exemplar=True,
                    colours=_DECIDED,
                )
            ],
            unit="cpm",
        )
    )
    board.with_panel(
        timeseries(
            Place(29, 12, 8),
            "Does the model listen?",
            "Refused again: the share of refusals that come after another refusal in the same "
            "run. It is high if the model tries again. Model calls after a refusal: the share of "
            "model calls that come after a refusal. They are what such runs still cost.",
            [
                Query(
                    share("", *(select(each, AGENT, _BLOCKED) for each in (AFTER_REFUSAL, CALLS))),
                    "refused again",
                    properties=fixed(CRITICAL),
                ),
                Query(
                    share("", *(select(each, AGENT, _OF_MODEL) for each in (AFTER_REFUSAL, CALLS))),
                    "model calls after a refusal",
                    properties=fixed(WARNING),
                ),
            ],
            unit="percentunit",
        ).max(1)
    )
    board.with_panel(
        bars(
            Place(32, 24, 7),
            "Calls that no limit judged",
            "Model and tool calls that no limit judged, in runs with limits: calls of agents "
            "without limits, and calls that tools make directly. The variables Agent and Limit "
            "do not narrow this panel. The bars add up to what was counted.",
            [Query(grown("agent, kind", select(UNJUDGED)), "{{agent}}: {{kind}}")],
        ).no_value("None, or they are not counted: see Telemetry(count_unjudged_calls=…).")
    )


def _processes(board: Dashboard) -> None:
    board.with_row(row(14, "Health of the processes, whatever Agent and Limit are chosen"))
    board.with_panel(
        bars(
            Place(15, 8, 7),
            "Errors",
            "How often telemetry, observers, stores or functions that compute limits failed, and "
            "runs that did not find their root run. The bars add up to what was counted.",
            [
                Query(
                    grown("component, error_type", select(ERRORS)),
                    "{{component}}: {{error_type}}",
                ),
                Query(
                    grown("agent, cause", select(LOST_ROOT_RUNS)),
                    "{{agent}}: no root run ({{cause}})",
                ),
            ],
        ).no_value("Nothing failed.")
    )
    board.with_panel(
        timeseries(
            Place(16, 8, 7),
            "Store latency",
            "How long the shared store takes, by operation. No data: no shared store is used.",
            [
                Query(
                    f"{quantile(level, STORE, 'operation')} > 0",
                    f"p{level * 100:.0f} {{{{operation}}}}",
                )
                for level in settings.QUANTILES
            ],
            unit="s",
        )
    )
    board.with_panel(
        bars(
            Place(17, 8, 7),
            "Decisions without the store",
            "Calls that were judged without the shared store, because it did not answer. allow: "
            "they ran, if no other limit refused them. deny: they were refused. The bars add up "
            "to what was counted.",
            [Query(grown("agent, action", select(FALLBACKS)), "{{agent}} {{action}}")],
        ).no_value("The store never failed, or none is used.")
    )
    board.with_panel(
        timeseries(
            Place(18, 8, 7),
            "Store operations",
            "Operations per minute on the shared store, and how they ended. No data: no shared "
            "store is used.",
            [
                Query(
                    f"{per_minute('operation, outcome', select(f'{STORE}_count'))} > 0",
                    "{{operation}} {{outcome}}",
                )
            ],
            unit="opm",
        )
    )
    board.with_panel(
        timeseries(
            Place(19, 8, 7),
            "Scrape duration",
            "How long Prometheus takes to read a process's metrics.",
            [Query(scrape_duration(), "{{job}} {{instance}}")],
            unit="s",
        )
    )
    board.with_panel(
        timeseries(
            Place(20, 8, 7),
            "Threads without series",
            "How many conversations have no series, so that no table lists them. If some of them "
            "are near a limit, raise max_exported_threads.",
            [Query(f"sum by (state) ({select(HIDDEN)}) > 0", "{{state}}", colours=settings.STATES)],
            unit=COUNT,
        )
        .decimals(0)
        .no_value("Every thread has series.")
    )
    board.with_panel(
        timeseries(
            Place(22, 8, 7),
            "Stores in memory",
            "How full a store in memory is with counts that cannot be dropped. At 100%, calls that "
            "need a new count are decided without the store. No data: no such store is used.",
            [Query(store_share(), "{{job}} {{instance}}")],
            unit="percentunit",
        ).max(1)
    )
    board.with_panel(
        timeseries(
            Place(30, 8, 7),
            "Time to judge",
            "How long it takes to judge the calls of a step, with counts in the agent's state "
            "(state) and in a store (store).",
            [
                Query(
                    f"{quantile(level, DECISION, 'counts')} > 0",
                    f"p{level * 100:.0f} {{{{counts}}}}",
                )
                for level in settings.QUANTILES
            ],
            unit="s",
        )
    )
    board.with_panel(
        table(
            Place(21, 8, 7),
            "Processes",
            "The processes that had metrics of langchain-quota within the last hour. yes: a "
            "process has metrics now. lost: it has none, but Prometheus still tries to scrape "
            "it. gone: Prometheus no longer tries.",
            [
                text("Job", "job", 100),
                text("Instance", "instance", 160),
                text("Version", "version", 80),
                Column(
                    "Metrics",
                    processes(),
                    {
                        "mappings": [words({"yes": None, "gone": NEUTRAL, "lost": CRITICAL})],
                        "custom.cellOptions": {"type": "color-text"},
                        "custom.width": 70,
                    },
                ),
            ],
            sort_by=processes(),
        )
    )


def _subjects(name: str) -> str:
    return select(SUBJECTS, AGENT, LIMIT, f'state="{name}"')
