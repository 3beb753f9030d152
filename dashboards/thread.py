"""The second dashboard: one thread, whether or not a limit counts per thread."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards import settings
from dashboards.panels import (
    TIME_LEFT,
    Place,
    Query,
    count,
    gauge,
    new_dashboard,
    stat,
    table,
    text,
    timeseries,
    traces,
    when,
)
from dashboards.queries import (
    AGENT,
    NO_BACKTICK,
    THREAD,
    UNITS,
    last_time,
    refusals,
    select,
    spans,
    thread_ratio,
)
from dashboards.settings import COUNT, CRITICAL, DOLLARS, OK, ROUNDED, SHARE, WARNING
from dashboards.variables import common_variables, one

_RATIO = thread_ratio(AGENT, THREAD)
_NO_LIMIT = "No limit counts per thread."


def build() -> Dashboard:
    """The dashboard."""
    board = new_dashboard(
        settings.THREAD_UID,
        settings.THREAD_TITLE,
        "What one conversation has used of its limits, what was refused on it, and why.",
    )
    known = select("langchain_quota_thread_timestamp_seconds", AGENT)
    threads = one("thread", "Thread", f"label_values({known}, thread_id)").regex(NO_BACKTICK)
    board.variables([*common_variables(limit=False), threads])
    refused = f"sum({select('langchain_quota_thread_blocked_total', AGENT, THREAD)}) or vector(0)"
    board.with_panel(
        stat(
            Place(41, 6, 5),
            "Refused",
            "How many calls of the thread limits refused, since it has series. A call that two "
            "limits refuse counts for both.",
            [Query(refused, "calls")],
            unit=COUNT,
            steps=((None, OK), (1, CRITICAL)),
        )
    )
    board.with_panel(
        stat(
            Place(42, 6, 5),
            "Most used limit",
            "What share of a limit the thread has used: of the limit of which it has used most.",
            [Query(f"max({_RATIO})", "used")],
            unit=SHARE,
            steps=((None, OK), (0.8, WARNING), (1, CRITICAL)),
            no_value=_NO_LIMIT,
        ).decimals(0)
    )
    board.with_panel(
        stat(
            Place(43, 6, 5),
            "Runs out in",
            "When nothing is left of a limit, at the pace of the last 15 minutes.",
            [Query(_seconds_left(unit), unit.removeprefix("_") or "calls") for unit in UNITS],
            unit="s",
            steps=TIME_LEFT,
            no_value="Not at this pace.",
        ).decimals(0)
    )
    spent = "max(sum by (limit) ({}))"
    board.with_panel(
        stat(
            Place(44, 6, 5),
            "Spent",
            "What the model runs of the thread have spent. Limits of money count dollars, limits "
            "of tokens or money count tokens.",
            [
                Query(
                    spent.format(
                        select(f"langchain_quota_thread_spent_{unit}_total", AGENT, THREAD)
                    ),
                    unit,
                    properties={"unit": shown, "decimals": decimals},
                )
                for unit, shown, decimals in (("dollars", DOLLARS, 4), ("tokens", ROUNDED, 0))
            ],
            unit=COUNT,
            no_value="No limit of tokens or money.",
        )
    )
    board.with_panel(
        timeseries(
            Place(45, 12, 8),
            "Used of each limit",
            "What share of each limit the thread has used. At 100% its next call is refused.",
            [Query(_RATIO, "{{limit}}")],
            unit=SHARE,
        )
        .no_value(_NO_LIMIT)
        .max(1)
    )
    board.with_panel(
        timeseries(
            Place(46, 12, 8),
            "Refusals over time",
            "How many calls of the thread each limit has refused in all, limits of runs and shared "
            "quotas included. A step is a refusal.",
            [Query(refusals(AGENT, THREAD), "{{limit}}")],
            unit=COUNT,
        ).no_value("Nothing was refused.")
    )
    board.with_panel(
        table(
            Place(47, 24, 7),
            "Limits of this thread",
            "The limits that judged calls of the thread. 'Used' is empty for a limit that does not "
            "count per thread, such as a limit of runs.",
            [
                text("Limit", "limit", 220),
                text("Agent", "agent", 180),
                gauge("Used", _RATIO, 200),
                count("Refused", refusals(AGENT, THREAD), 110),
                when("Last refusal", f"{last_time('refusal', AGENT, THREAD)} * 1000", 160),
                when("Last call", f"{last_time('decision', AGENT, THREAD)} * 1000", 160),
                when("Resets", f"{last_time('reset', AGENT, THREAD)} * 1000", 160),
            ],
            sort_by=f"{last_time('decision', AGENT, THREAD)} * 1000",
            no_value="The thread has no series any more.",
        )
    )
    board.with_panel(
        traces(
            Place(48, 24, 9),
            "Refused calls in traces",
            "Calls of the thread that were refused or skipped: by which limit, at which threshold, "
            "and how much was used. The panel cannot show a thread whose id has a backtick.",
            spans("${thread:raw}", refused=True),
        )
    )
    return board


def _seconds_left(unit: str) -> str:
    used = f"langchain_quota_thread_used{unit}"
    left = f"{select(f'langchain_quota_thread_limit{unit}', THREAD)} - {select(used, THREAD)} > 0"
    return f"min(({left}) / (deriv({select(used, AGENT, THREAD)}[15m]) > 0))"
