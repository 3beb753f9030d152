"""The first dashboard: who eats which quota, and who is about to run out."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards import settings
from dashboards.panels import (
    Column,
    Place,
    Query,
    bars,
    breaches,
    gauge_cell,
    new_dashboard,
    row,
    stat,
    table,
    thresholds,
    timeseries,
)
from dashboards.queries import (
    AGENT,
    BUILD,
    CALLS,
    CONFIGURED,
    DECISIONS,
    ERRORS,
    EXHAUSTED,
    FALLBACKS,
    HIDDEN,
    LIMIT,
    NEAR,
    STORE,
    SUBJECTS,
    TRACED,
    Threads,
    increase,
    label_values,
    per_minute,
    quantile,
    scrape_duration,
    select,
    store_share,
    thread_link,
    traces_link,
    with_traced,
)
from dashboards.settings import CRITICAL, NEUTRAL, OK, RANGE, RATE, WARNING
from dashboards.variables import common_variables, several

_BLOCKED = 'decision="blocked"'
_OF_THREADS = 'scope="thread"'
_THREADS = Threads()
_COLOURS = {"ok": OK, "near": WARNING, "exhausted": CRITICAL}


def build() -> Dashboard:
    """The dashboard, without its annotations."""
    board = new_dashboard(
        settings.OVERVIEW_UID,
        settings.OVERVIEW_TITLE,
        "Who uses how much of which limit, who is about to run out, and what was refused.",
    )
    limit = several("limit", "Limit", label_values(select(DECISIONS, AGENT), "limit"))
    board.variables([*common_variables(), limit])
    _stats(board)
    _ranked_threads(board)
    _decisions(board)
    _health(board)
    return board


def annotations() -> list[dict[str, object]]:
    """Where a limit refused calls."""
    refused = select(DECISIONS, AGENT, LIMIT, _BLOCKED)
    return [
        breaches(
            increase("job, agent, limit, scope", refused, settings.BREACH_WINDOW),
            title="{{limit}} refused calls ({{scope}} limit)",
            text="agent {{agent}}, job {{job}}",
        )
    ]


def _stats(board: Dashboard) -> None:
    calls = select(CALLS, AGENT)
    blocked = select(CALLS, AGENT, _BLOCKED)
    refused = increase("", blocked, RANGE)
    board.with_panel(
        stat(
            Place(1, 5, 4),
            "Calls refused",
            "Calls that a limit refused in the chosen time, those included with which a process "
            "began. The choice of Limit does not narrow it.",
            refused,
            unit="short",
            steps=[(None, OK), (1, WARNING)],
        ).decimals(0)
    )
    board.with_panel(
        stat(
            Place(2, 5, 4),
            "Refused share",
            "Of all judged calls in the chosen time, the share that was refused. No data: no call "
            "was judged. The choice of Limit does not narrow it.",
            f"{refused} / ({increase('', calls, RANGE)} > 0)",
            unit="percentunit",
            steps=[
                (None, OK),
                (settings.REFUSED_SHARE_WARNING, WARNING),
                (settings.REFUSED_SHARE_CRITICAL, CRITICAL),
            ],
        ).decimals(1)
    )
    for number, state, title, they in (
        (3, "exhausted", "Threads exhausted", "have used a limit up: their next call is refused"),
        (4, "near", "Threads near a limit", "are near a limit, with calls left"),
    ):
        board.with_panel(
            stat(
                Place(number, 5, 4),
                title,
                f"Conversations that {they}, now. Each limit counts for itself, and a thread that "
                "several processes serve is counted by each.",
                f"sum({_subjects(state, _OF_THREADS)})",
                unit="short",
                steps=[(None, OK), (1, _COLOURS[state])],
            )
        )
    board.with_panel(
        stat(
            Place(5, 4, 4),
            "Threads hidden",
            "Conversations that are counted but not listed below: a process lists at most "
            "max_exported_threads, those near a limit first.",
            f"sum({select(HIDDEN)})",
            unit="short",
            steps=[(None, NEUTRAL)],
        )
    )


def _ranked_threads(board: Dashboard) -> None:
    rank = _THREADS.freshest(_THREADS.rank)
    near = [(None, OK), (settings.NEAR, WARNING), (1, CRITICAL)]
    links = [
        {"title": "This thread", "url": thread_link()},
        {"title": "Its calls in Tempo", "url": traces_link(), "targetBlank": True},
    ]
    columns = [
        Column("Thread", "thread_id", {"links": links, "custom.width": 260}),
        Column("Agent", "agent"),
        Column("Limit", "limit"),
        Column(
            "Utilization",
            with_traced(_THREADS.freshest(_THREADS.share)),
            {
                "unit": "percentunit",
                "min": 0,
                "max": 1,
                "thresholds": thresholds(near),
                "color": {"mode": "thresholds"},
                "custom.cellOptions": gauge_cell(),
                "custom.width": 260,
            },
        ),
        Column("Used", _THREADS.freshest(_THREADS.used)),
        Column("Allowed", _THREADS.freshest(_THREADS.limit)),
        Column("Left", _THREADS.freshest(_THREADS.remaining)),
        Column(
            "Time to exhaustion",
            _THREADS.freshest(_THREADS.seconds_left),
            {
                "unit": "s",
                "decimals": 0,
                "noValue": "-",
                "thresholds": thresholds(
                    [
                        (None, CRITICAL),
                        (settings.LITTLE_TIME_SECONDS, WARNING),
                        (settings.SOME_TIME_SECONDS, NEUTRAL),
                    ]
                ),
                "color": {"mode": "thresholds"},
                "custom.cellOptions": {"type": "color-text"},
            },
        ),
        Column("Job", "job"),
        Column(TRACED, TRACED, {"custom.hidden": True}),
    ]
    board.with_panel(
        table(
            Place(6, 24, 11),
            "Threads about to run out",
            "Which conversation has how much of its limit left. First those near their limit, the "
            "nearest on top; then the exhausted; then the others. Time to exhaustion goes on with "
            f"the pace of the last {settings.PACE_WINDOW}; it is empty for a thread that used no "
            f"call in the last {settings.ACTIVE_WINDOW}. Click a thread for more, or for its "
            "traces.",
            columns,
            exprs=[rank],
            sort_by=rank,
        )
    )


def _decisions(board: Dashboard) -> None:
    board.with_row(row(7, "Decisions"))
    board.with_panel(
        timeseries(
            Place(8, 12, 8),
            "Calls by decision",
            "Judged calls per minute: allowed, blocked, skipped (not run, because its batch was "
            "stopped), would_block (a limit on trial refuses it; it ran). A dot leads to the trace "
            "of one call.",
            [Query(per_minute("decision", select(CALLS, AGENT)), "{{decision}}", exemplar=True)],
            unit="cpm",
        )
    )
    refusals = select(DECISIONS, AGENT, LIMIT, 'decision=~"blocked|would_block"')
    board.with_panel(
        bars(
            Place(9, 12, 8),
            "Refusals by limit and scope",
            "How many calls each limit refused, or would have refused if it were more than a "
            "trial, and by which of its thresholds.",
            [
                Query(
                    increase("limit, scope, decision", refusals, RATE),
                    "{{limit}} ({{scope}}) {{decision}}",
                    exemplar=True,
                )
            ],
        )
    )
    board.with_panel(
        bars(
            Place(10, 12, 8),
            "Near and exhausted",
            "How often a count came near its limit, and how often a call used a limit up; for the "
            "limits of runs too.",
            [
                Query(
                    increase("limit, scope", select(metric, AGENT, LIMIT), RATE),
                    f"{state} {{{{limit}}}} ({{{{scope}}}})",
                )
                for state, metric in (("near", NEAR), ("exhausted", EXHAUSTED))
            ],
        )
    )
    board.with_panel(
        timeseries(
            Place(11, 12, 8),
            "Subjects by state",
            "How many threads, users and other subjects of quotas have room, are near a limit, or "
            "have used it up. Each limit counts for itself.",
            [
                Query(
                    f"sum by (scope, state) ({_subjects(state)})",
                    "{{scope}}: {{state}}",
                    properties={"color": {"mode": "fixed", "fixedColor": colour}},
                )
                for state, colour in _COLOURS.items()
            ],
            unit="short",
        )
    )
    allowed, refunded = (
        per_minute("limit", select(DECISIONS, AGENT, LIMIT, f'decision="{decision}"'))
        for decision in ("allowed", "refunded")
    )
    board.with_panel(
        timeseries(
            Place(12, 12, 8),
            "Charged to each limit",
            "Calls per minute that each limit was charged with, less the charges that were taken "
            "back.",
            [Query(f"{allowed} - {refunded}", "{{limit}}")],
            unit="cpm",
        )
    )
    board.with_panel(
        table(
            Place(13, 12, 8),
            "Configured limits",
            "How many calls each limit allows, to a run or to a thread. A limit that is computed "
            "call by call is not listed.",
            [
                Column("Agent", "agent"),
                Column("Limit", "limit"),
                Column("Scope", "scope"),
                Column(
                    "Allowed",
                    f"max by (job, agent, limit, scope) ({select(CONFIGURED, AGENT, LIMIT)})",
                ),
                Column("Job", "job"),
            ],
        )
    )


def _health(board: Dashboard) -> None:
    board.with_row(row(14, "Health of the limits themselves"))
    board.with_panel(
        bars(
            Place(15, 8, 7),
            "Errors",
            "What failed in telemetry, observers, stores or computed limits. No data: nothing "
            "failed.",
            [
                Query(
                    increase("component, error_type", select(ERRORS), RATE),
                    "{{component}}: {{error_type}}",
                )
            ],
        )
    )
    board.with_panel(
        timeseries(
            Place(16, 8, 7),
            "Store latency",
            "How long the shared store takes, by operation. No data: no shared store is used.",
            [
                Query(quantile(share), f"p{share * 100:.0f} {{{{operation}}}}")
                for share in settings.QUANTILES
            ],
            unit="s",
        )
    )
    board.with_panel(
        bars(
            Place(17, 8, 7),
            "Decisions without the store",
            "Calls that were let through (allow) or refused (deny) because the shared store did "
            "not answer. No data: it never failed, or none is used.",
            [
                Query(
                    increase("agent, action", select(FALLBACKS, AGENT), RATE),
                    "{{agent}} {{action}}",
                )
            ],
        )
    )
    board.with_panel(
        timeseries(
            Place(18, 8, 7),
            "Store operations",
            "Operations per minute on the shared store, and how they ended. No data: no shared "
            "store is used.",
            [
                Query(
                    per_minute("operation, outcome", select(f"{STORE}_count")),
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
            "Tracked conversations that are not listed one by one. Near ones among them: raise "
            "max_exported_threads.",
            [Query(f"sum by (state) ({select(HIDDEN)})", "{{state}}")],
            unit="short",
        )
    )
    board.with_panel(
        timeseries(
            Place(22, 8, 7),
            "Stores in memory",
            "The share of a store in memory that is taken by counts which make no room for others. "
            "At 100% calls that need another count are decided without it. No data: none is used.",
            [Query(store_share(), "{{job}} {{instance}}")],
            unit="percentunit",
        )
    )
    board.with_panel(
        table(
            Place(21, 16, 7),
            "Processes",
            "The processes that are scraped, and their version of langchain-quota.",
            [
                Column("Job", "job"),
                Column("Instance", "instance"),
                Column("Version", "version"),
            ],
            exprs=[f"max by (job, instance, version) ({select(BUILD)})"],
        )
    )


def _subjects(state: str, *matchers: str) -> str:
    return select(SUBJECTS, AGENT, LIMIT, f'state="{state}"', *matchers)
