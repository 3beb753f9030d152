"""The second dashboard: one thread, whether or not a limit counts per thread."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards import panels as show
from dashboards import queries as ask
from dashboards import settings
from dashboards.settings import COUNT, CRITICAL, DOLLARS, OK, ROUNDED, SHARE
from dashboards.variables import common_variables, one

_RATIO = ask.ratio(ask.THREADS, ask.AGENT, ask.THREAD)


def build() -> Dashboard:
    """Return the dashboard."""
    tracked = ask.select("langchain_quota_thread_timestamp_seconds", ask.AGENT)
    threads = one("thread", "Thread", f"label_values({tracked}, thread_id)").regex(ask.NO_BACKTICK)

    def blocked(window: str, by: str = ask.OF_THREAD) -> str:
        return ask.thread_blocked(window, ask.AGENT, ask.THREAD, by=by)

    def spent(unit: str) -> str:
        series = f"{ask.THREADS}_spent_{unit}"
        return f"max(sum by (limit) ({ask.increases(series, ask.RANGE, ask.AGENT, ask.THREAD)}))"

    used, limit = ask.thread_amounts(ask.AGENT, ask.THREAD)
    of, checked = ask.recent(limit), ask.last_time("decision", ask.AGENT, ask.THREAD)
    others = ask.select(ask.ALLOWED, ask.AGENT, 'scope!="thread"')
    of_thread = f"and on (job, agent, limit) {checked}"
    return show.new_dashboard(
        settings.THREAD_UID,
        settings.THREAD_TITLE,
        "What one conversation has used of its limits, what was blocked on it, and why.",
        [*common_variables(limit=False), threads],
        show.stat(
            show.Place(41, 8, show.LOW),
            "Calls blocked",
            "How many calls of the thread limits blocked in the chosen time. A call that two "
            "limits refuse counts for both.",
            [show.Query(f"sum({blocked(ask.RANGE)}) or 0 * count({checked})", "calls")],
            unit=COUNT,
            steps=((None, OK), (1, CRITICAL)),
        ),
        show.stat(
            show.Place(43, 8, show.LOW),
            "Runs out in",
            "When the first limit is exhausted, at the pace of the last 15 minutes. 0 if one "
            "already is.",
            [
                show.Query(
                    f"min({ask.thread_seconds_left(ask.AGENT, ask.THREAD)} or 0 * ({_RATIO} >= 1))",
                    "first limit",
                ),
            ],
            unit="s",
            steps=show.TIME_LEFT,
            no_value="Not at this pace.",
        ).decimals(0),
        show.stat(
            show.Place(44, 8, show.LOW),
            "Spent",
            "What the thread's model runs spent in the chosen time. Dollars need a limit of money, "
            "and tokens one of tokens.",
            [
                show.Query(spent(unit), unit, properties={"unit": shown, "decimals": decimals})
                for unit, shown, decimals in (("dollars", DOLLARS, 4), ("tokens", ROUNDED, 0))
            ],
            unit=COUNT,
            no_value="No limit of tokens or money.",
        ),
        show.table(
            show.Place(47, 24, 7),
            "Limits of this thread",
            "The limits that checked calls of the thread within an hour, as they were at its last "
            "call. 'Used' is empty for limits that do not count per thread, such as run limits.",
            [
                show.text("Limit", "limit"),
                show.text("Agent", "agent", 130),
                show.gauge("Used", ask.recent(_RATIO)),
                show.left(f"sum by ({ask.OF_THREAD}) (clamp_min({of} - {ask.recent(used)}, 0))"),
                show.left(of, "Of", 70),
                show.text("Unit", "unit", 75),
                show.count("Blocked", f"{blocked(ask.RANGE)} > 0", 90),
                show.when("Last block", ask.last_time("refusal", ask.AGENT, ask.THREAD), 145),
                show.when("Last call", checked, 145),
                show.when("Resets", ask.last_time("reset", ask.AGENT, ask.THREAD), 130),
            ],
            sort_by=f"{ask.recent(_RATIO)} or 0 * {checked}",
            no_value="The thread has no series any more.",
        ),
        show.table(
            show.Place(50, 12, 8),
            "Numbers for each run, and shared quotas",
            "What else the thread's limits allow: in each run, and in shared quotas. The overview "
            "shows how much of a quota is used.",
            [
                show.text("Limit", "limit"),
                show.text("Agent", "agent", 130),
                show.text("Counted per", "scope", 120),
                show.left(f"({others} + 0) {of_thread}", "Allowed", 110),
                show.text("Unit", "unit", 130),
            ],
            sort_by=f"({others} * 0) {of_thread}",
            no_value="No other limit has a number.",
        ),
        show.bars(
            show.Place(46, 12, 8),
            "Calls blocked by limit",
            "How many calls of the thread each limit blocked since the previous bar, and whose "
            "count refused them: that of the thread, of a run, or of a quota. 'frozen' are calls "
            "that an operator has stopped.",
            [show.Query(f"{blocked(ask.BAR, 'limit, scope')} > 0", "{{limit}} ({{scope}})")],
            unit=COUNT,
        ).no_value("Nothing was blocked."),
        show.row(
            49,
            "History and traces",
            show.timeseries(
                show.Place(45, 24, 8),
                "Used of each limit",
                "The share of each limit that the thread has used. At 100%, its next call is "
                "blocked.",
                [show.Query(_RATIO, "{{limit}}")],
                unit=SHARE,
            )
            .no_value("No limit counts per thread.")
            # A budget may be exceeded, and the line goes on there.
            .axis_soft_max(1)
            .thresholds(show.configured(show.USED))
            .thresholds_style(show.DASHED_LINES),
            show.traces(
                show.Place(48, 24, 9),
                "Blocked calls in traces",
                "Calls of the thread that were blocked or skipped, with the limit, the threshold "
                "and how much was used. The panel cannot show threads whose id contains a "
                "backtick.",
                ask.refused_spans(),
            ).no_value("No trace of a blocked call in this time."),
        ),
    )
