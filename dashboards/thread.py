"""The second dashboard: one thread."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards import settings
from dashboards.counters import bars as grown
from dashboards.counters import total
from dashboards.panels import (
    TIME_LEFT,
    Place,
    Query,
    bars,
    breaches,
    dashed,
    fixed,
    new_dashboard,
    row,
    stat,
    timeseries,
    traces,
    words,
)
from dashboards.queries import (
    AGENT,
    LIMIT,
    NO_BACKTICK,
    THREAD,
    THREAD_BLOCKED,
    THREAD_DECIDED,
    THREAD_LIMIT,
    label_values,
    select,
    spans,
)
from dashboards.settings import (
    COUNT,
    CRITICAL,
    NEUTRAL,
    OK,
    RANGE,
    RANGE_SECONDS,
    WARNING,
)
from dashboards.usage import of_threads, refused_since
from dashboards.variables import common_variables, one, several

_USE = of_threads(THREAD)
_REFUSALS = select(THREAD_BLOCKED, AGENT, LIMIT, THREAD)


def build() -> Dashboard:
    """The dashboard, without its annotations."""
    board = new_dashboard(
        settings.THREAD_UID,
        settings.THREAD_TITLE,
        "What one conversation has used of its limits, what was refused on it, and why.",
    )
    threads = label_values(select(THREAD_DECIDED, AGENT), "thread_id")
    limits = label_values(select(THREAD_LIMIT, AGENT, THREAD), "limit")
    thread = one("thread", "Thread", threads).regex(NO_BACKTICK)
    board.variables([*common_variables(), thread, several("limit", "Limit", limits)])
    _stats(board)
    _use(board)
    _refusals(board)
    return board


def annotations() -> list[dict[str, object]]:
    """Where calls of the thread were refused, if that is worth an alert."""
    return [
        breaches(
            total(
                "job, agent, limit",
                _REFUSALS,
                settings.BREACH_WINDOW,
                settings.BREACH_SECONDS,
                alerting=True,
            ),
            title="{{limit}} refused calls of this thread",
            text="agent {{agent}}, job {{job}}",
        )
    ]


def _stats(board: Dashboard) -> None:
    worst = f"max({_USE.freshest(_USE.state)})"
    board.with_panel(
        stat(
            Place(12, 3, 4),
            "State",
            "How the limit stands of which most is used: ok, near, or exhausted.",
            worst,
            unit=COUNT,
            steps=[(None, NEUTRAL)],
        ).mappings([words(settings.STATES)])
    )
    board.with_panel(
        stat(
            Place(1, 3, 4),
            "Utilization",
            "The used share of the limit that is used most.",
            f"max({_USE.freshest(_USE.share)})",
            unit="percentunit",
            steps=[(None, NEUTRAL)],
        )
    )
    board.with_panel(
        stat(
            Place(2, 3, 4),
            "Calls left",
            "How many calls the limit with the fewest calls left still allows.",
            f"min({_USE.freshest(_USE.remaining)})",
            unit=COUNT,
            steps=[(None, NEUTRAL), (0, CRITICAL), (1, NEUTRAL)],
        ).decimals(0)
    )
    board.with_panel(
        stat(
            Place(3, 3, 4),
            "Runs out in",
            "When the first limit is used up, if the thread goes on with the pace of the last "
            f"{settings.PACE_WINDOW}. Empty: it used no call in the last "
            f"{settings.ACTIVE_WINDOW}, or has used its limits up.",
            f"min({_USE.freshest(_USE.seconds_left)})",
            unit="s",
            steps=TIME_LEFT,
            no_value="-",
        ).decimals(0)
    )
    board.with_panel(
        stat(
            Place(4, 3, 4),
            "Calls refused",
            "Calls of the thread that were refused in the chosen time, by a limit of the thread, "
            "of a run or of a shared quota. A call that two limits refuse counts for both.",
            total("", _REFUSALS, RANGE, RANGE_SECONDS),
            unit=COUNT,
            steps=[(None, NEUTRAL)],
            no_value="none",
        ).decimals(0)
    )
    board.with_panel(
        stat(
            Place(10, 3, 4),
            "Refused since",
            "When the latest refusals of the thread began, without a pause of ten minutes. Empty: "
            "nothing was refused.",
            f"min({refused_since(THREAD)}) * 1000",
            unit="dateTimeFromNow",
            steps=[(None, NEUTRAL), (0, CRITICAL)],
            no_value="-",
        )
    )
    board.with_panel(
        stat(
            Place(11, 3, 4),
            "Resets",
            "When the first window of its limits ends. Empty: they have no time window.",
            f"min({_USE.freshest(_USE.resets)})",
            unit="dateTimeFromNow",
            steps=[(None, NEUTRAL)],
            no_value="-",
        )
    )
    board.with_panel(
        stat(
            Place(5, 3, 4),
            "Last decision",
            "When a call of the thread was last judged, or the thread was last reset.",
            f"max({_USE.decided}) * 1000",
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
            f"{settings.PACE_WINDOW}: where it is at the limit, the thread runs out before.",
            [
                Query(
                    _USE.freshest(_USE.used), "used ({{agent}}, {{limit}})", properties=fixed(OK)
                ),
                Query(
                    _USE.freshest(_USE.limit),
                    "limit ({{agent}}, {{limit}})",
                    properties=dashed(CRITICAL),
                ),
                Query(
                    _USE.freshest(_USE.predicted),
                    f"in {settings.PREDICTED_TEXT} ({{{{agent}}}}, {{{{limit}}}})",
                    properties=dashed(WARNING),
                ),
            ],
            unit=COUNT,
        )
        .decimals(0)
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
            "How many calls of the thread each limit refused. The bars add up to the refusals that "
            "were counted.",
            [Query(grown("agent, limit", _REFUSALS), "{{limit}} ({{agent}})")],
        ).no_value("Nothing was refused.")
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
