"""The second dashboard: one thread, whether or not a limit counts per thread."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards import panels as show
from dashboards import queries as ask
from dashboards import settings
from dashboards.settings import COUNT, CRITICAL, DOLLARS, OK, ROUNDED, SHARE, WARNING
from dashboards.variables import common_variables, one

_RATIO = ask.thread_ratio(ask.AGENT, ask.THREAD)
_NO_LIMIT = "No limit counts per thread."


def build() -> Dashboard:
    """The dashboard."""
    known = ask.select("langchain_quota_thread_timestamp_seconds", ask.AGENT)
    threads = one("thread", "Thread", f"label_values({known}, thread_id)").regex(ask.NO_BACKTICK)
    refused = ask.refusals(ask.AGENT, ask.THREAD)
    spent = "max(sum by (limit) ({}))"
    most_used = f"topk({settings.TOP}, {_RATIO})"
    return show.new_dashboard(
        settings.THREAD_UID,
        settings.THREAD_TITLE,
        "What one conversation has used of its limits, what was refused on it, and why.",
        [*common_variables(limit=False), threads],
        show.stat(
            show.Place(41, 6, 5),
            "Refused",
            "How many calls of the thread limits refused, since the processes that serve it "
            "started. A call that two limits refuse counts for both.",
            [show.Query(f"sum({refused}) or vector(0)", "calls")],
            unit=COUNT,
            steps=((None, OK), (1, CRITICAL)),
        ),
        show.stat(
            show.Place(42, 6, 5),
            "Most used limit",
            "What share of a limit the thread has used: of the limit of which it has used most.",
            [show.Query(f"max({_RATIO})", "used")],
            unit=SHARE,
            steps=((None, OK), (0.8, WARNING), (1, CRITICAL)),
            no_value=_NO_LIMIT,
        ).decimals(0),
        show.stat(
            show.Place(43, 6, 5),
            "Runs out in",
            "When nothing is left of a limit, at the pace of the last 15 minutes. 0 if nothing is "
            "left of one.",
            [
                *(
                    show.Query(_seconds_left(unit), unit.removeprefix("_") or "calls", instant=True)
                    for unit in ask.UNITS
                ),
                show.Query(f"min(0 * ({_RATIO} >= 1))", "used up", instant=True),
            ],
            unit="s",
            steps=show.TIME_LEFT,
            no_value="Not at this pace.",
        ).decimals(0),
        show.stat(
            show.Place(44, 6, 5),
            "Spent",
            "What the model runs of the thread have spent, since the processes that serve it "
            "started. Limits of money count dollars, limits of tokens or money count tokens.",
            [
                show.Query(
                    spent.format(
                        ask.select(
                            f"langchain_quota_thread_spent_{unit}_total", ask.AGENT, ask.THREAD
                        )
                    ),
                    unit,
                    properties={"unit": shown, "decimals": decimals},
                )
                for unit, shown, decimals in (("dollars", DOLLARS, 4), ("tokens", ROUNDED, 0))
            ],
            unit=COUNT,
            no_value="No limit of tokens or money.",
        ),
        show.timeseries(
            show.Place(45, 12, 8),
            "Used of each limit",
            "What share of each limit the thread has used. At 100% its next call is refused.",
            [show.Query(_RATIO, "{{limit}}")],
            unit=SHARE,
        )
        .no_value(_NO_LIMIT)
        .max(1),
        show.timeseries(
            show.Place(46, 12, 8),
            "Refusals over time",
            "How many calls of the thread each limit has refused in all, limits of runs and shared "
            "quotas included. A step is a refusal; a fall is a process that ended.",
            [show.Query(refused, "{{limit}}")],
            unit=COUNT,
        ).no_value("Nothing was refused."),
        show.table(
            show.Place(47, 24, 7),
            "Limits of this thread",
            "The limits that checked calls of the thread. 'Used' is empty for a limit that does "
            "not count per thread, such as a limit of runs.",
            [
                show.text("Limit", "limit", 220),
                show.text("Agent", "agent", 180),
                show.gauge("Used", most_used, 200),
                show.count("Refused", refused, 110),
                show.when("Last refusal", _last("refusal"), 160),
                show.when("Last call", _last("decision"), 160),
                show.when("Resets", _last("reset"), 160),
            ],
            sort_by=most_used,
            no_value="The thread has no series any more.",
        ),
        show.row(
            49,
            "Traces",
            show.traces(
                show.Place(48, 24, 9),
                "Blocked calls in traces",
                "Calls of the thread that were blocked or skipped: by which limit, at which "
                "threshold, and how much was used. The panel cannot show a thread whose id has a "
                "backtick.",
                ask.refused_spans(),
            ).no_value("No trace of a blocked call in this time."),
        ),
    )


def _last(event: str) -> str:
    return f"{ask.last_time(event, ask.AGENT, ask.THREAD)} * 1000"


def _seconds_left(unit: str) -> str:
    used = f"langchain_quota_thread_used{unit}"
    limit = ask.select(f"langchain_quota_thread_limit{unit}", ask.THREAD)
    left = f"{limit} - {ask.select(used, ask.THREAD)} > 0"
    return f"min(({left}) / (deriv({ask.select(used, ask.AGENT, ask.THREAD)}[15m]) > 0))"
