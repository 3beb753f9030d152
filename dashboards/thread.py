"""The second dashboard: one thread."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards import settings
from dashboards.panels import (
    Place,
    Query,
    bars,
    breaches,
    dashed,
    new_dashboard,
    row,
    stat,
    timeseries,
    traces,
)
from dashboards.queries import (
    AGENT,
    NO_BACKTICK,
    THREAD,
    THREAD_SEEN,
    THREAD_USED,
    Threads,
    increase,
    label_values,
    select,
    spans,
)
from dashboards.settings import CRITICAL, NEUTRAL, OK, RANGE, RATE, WARNING
from dashboards.variables import common_variables, one, several

_THREAD = Threads(only=THREAD)


def build() -> Dashboard:
    """The dashboard, without its annotations."""
    board = new_dashboard(
        settings.THREAD_UID,
        settings.THREAD_TITLE,
        "What one conversation has used of its limits, what was refused on it, and why.",
    )
    threads = label_values(select(THREAD_SEEN, AGENT), "thread_id")
    limits = label_values(select(THREAD_USED, AGENT, THREAD), "limit")
    thread = one("thread", "Thread", threads).regex(NO_BACKTICK)
    board.variables([*common_variables(), thread, several("limit", "Limit", limits)])
    _stats(board)
    _use(board)
    _refusals(board)
    return board


def annotations() -> list[dict[str, object]]:
    """Where calls of the thread were refused."""
    return [
        breaches(
            increase("job, agent, limit", _THREAD.blocked, settings.BREACH_WINDOW),
            title="{{limit}} refused calls of this thread",
            text="agent {{agent}}, job {{job}}",
        )
    ]


def _stats(board: Dashboard) -> None:
    board.with_panel(
        stat(
            Place(1, 5, 4),
            "Utilization",
            "The used share of the limit that is used most.",
            f"max({_THREAD.freshest(_THREAD.share)})",
            unit="percentunit",
            steps=[(None, OK), (settings.NEAR, WARNING), (1, CRITICAL)],
        )
    )
    board.with_panel(
        stat(
            Place(2, 5, 4),
            "Calls left",
            "How many calls the limit with the fewest calls left still allows.",
            f"min({_THREAD.freshest(_THREAD.remaining)})",
            unit="short",
            steps=[(None, CRITICAL), (1, OK)],
        )
    )
    board.with_panel(
        stat(
            Place(3, 5, 4),
            "Time to exhaustion",
            "When the first limit is used up, if the thread goes on with the pace of the last "
            f"{settings.PACE_WINDOW}. No data: it used no call in the last "
            f"{settings.ACTIVE_WINDOW}, or has used its limits up.",
            f"min({_THREAD.freshest(_THREAD.seconds_left)})",
            unit="s",
            steps=[
                (None, CRITICAL),
                (settings.LITTLE_TIME_SECONDS, WARNING),
                (settings.SOME_TIME_SECONDS, OK),
            ],
        ).decimals(0)
    )
    board.with_panel(
        stat(
            Place(4, 5, 4),
            "Calls refused",
            "Calls of the thread that were refused in the chosen time, by a limit of the thread or "
            "of a run.",
            increase("", _THREAD.blocked, RANGE),
            unit="short",
            steps=[(None, OK), (1, WARNING)],
        ).decimals(0)
    )
    board.with_panel(
        stat(
            Place(5, 4, 4),
            "Last decision",
            "When a call of the thread was last judged.",
            f"max({_THREAD.seen}) * 1000",
            unit="dateTimeFromNow",
            steps=[(None, NEUTRAL)],
        )
    )


def _use(board: Dashboard) -> None:
    board.with_panel(
        timeseries(
            Place(6, 24, 10),
            "Used against limit: $limit",
            "Calls that the thread has used, and how many it may use. The orange line is where it "
            f"will be {settings.PREDICTED_TEXT} later if it goes on with the pace of the last "
            f"{settings.PACE_WINDOW}: above the limit, it runs out before.",
            [
                Query(_THREAD.freshest(_THREAD.used), "used ({{agent}}, {{limit}})"),
                Query(
                    _THREAD.freshest(_THREAD.limit),
                    "limit ({{agent}}, {{limit}})",
                    properties=dashed(CRITICAL),
                ),
                Query(
                    _THREAD.freshest(_THREAD.predicted),
                    f"in {settings.PREDICTED_TEXT} ({{{{agent}}}}, {{{{limit}}}})",
                    properties=dashed(WARNING),
                ),
            ],
            unit="short",
        )
        .repeat("limit")
        .repeat_direction("h")
        .max_per_row(2)
    )


def _refusals(board: Dashboard) -> None:
    board.with_row(row(7, "What was refused, and why"))
    board.with_panel(
        bars(
            Place(8, 24, 7),
            "Refusals",
            "How many calls of the thread each limit refused.",
            [Query(increase("agent, limit", _THREAD.blocked, RATE), "{{limit}} ({{agent}})")],
        )
    )
    board.with_panel(
        traces(
            Place(9, 24, 10),
            "Refused calls in traces",
            "Calls of the thread that were refused or not run: which limit, at which of its "
            "thresholds, and how much was used. A thread whose id has a backtick cannot be shown.",
            spans("${thread:raw}", refused=True),
        )
    )
