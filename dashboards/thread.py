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
    label_values,
    select,
    spans,
)
from dashboards.settings import (
    COUNT,
    CRITICAL,
    DOLLARS,
    NEUTRAL,
    OK,
    RANGE,
    RANGE_SECONDS,
    WARNING,
)
from dashboards.usage import in_any_unit, of_threads, refused_since
from dashboards.variables import common_variables, limits, one
from langchain_quota.telemetry import names
from langchain_quota.units import Unit

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
    limited = " or ".join(select(spec.name, AGENT, THREAD) for spec in names.THREAD_LIMIT.values())
    thread = one("thread", "Thread", threads).regex(NO_BACKTICK)
    board.variables([*common_variables(), thread, limits(limited)])
    _stats(board)
    _budgets(board)
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
    worst = f"max({in_any_unit(lambda use: use.freshest(use.state), THREAD)})"
    board.with_panel(
        stat(
            Place(12, 3, 4),
            "State",
            "The state of the most used limit: ok, near or exhausted.",
            worst,
            unit=COUNT,
            steps=[(None, NEUTRAL)],
        ).mappings([words(settings.STATES)])
    )
    board.with_panel(
        stat(
            Place(1, 3, 4),
            "Utilization",
            "The used share of the most used limit.",
            f"max({in_any_unit(lambda use: use.freshest(use.share), THREAD)})",
            unit="percentunit",
            steps=[(None, NEUTRAL)],
        )
    )
    board.with_panel(
        stat(
            Place(2, 3, 4),
            "Calls left",
            "How many calls are left of the limit with the fewest calls left. No data: no limit of "
            "the thread counts calls.",
            f"min({_USE.freshest(_USE.remaining)})",
            unit=COUNT,
            steps=[(None, NEUTRAL), (0, CRITICAL), (1, NEUTRAL)],
        ).decimals(0)
    )
    board.with_panel(
        stat(
            Place(3, 3, 4),
            "Runs out in",
            "How long until the first limit is used up, at the pace of the last "
            f"{settings.PACE_WINDOW}. Empty: the thread used no call in the last "
            f"{settings.ACTIVE_WINDOW}, or has used up its limits.",
            f"min({in_any_unit(lambda use: use.freshest(use.seconds_left), THREAD)})",
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
            "When the thread's latest refusals began, without a pause of ten minutes. Empty: "
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
            "When the first time window of the thread's limits ends. Empty: they have no time "
            "window.",
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


def _budgets(board: Dashboard) -> None:
    """What is left of budgets, and what was spent."""
    budgets: tuple[tuple[int, Unit, str, str, int], ...] = (
        (13, "tokens", "Tokens", COUNT, 0),
        (15, "microdollars", "Money", DOLLARS, settings.DECIMALS_OF_THREADS),
    )
    for number, unit, what, dashboard_unit, decimals in budgets:
        use = of_threads(THREAD, unit=unit)
        board.with_panel(
            stat(
                Place(number, 6, 4),
                f"{what} left",
                f"How much is left of the limit of {what.lower()} that has least left.",
                f"min({use.freshest(use.remaining)})",
                unit=dashboard_unit,
                steps=[(None, NEUTRAL)],
                no_value="no such limit",
            ).decimals(decimals)
        )
        spent = select(names.THREAD_SPENT[unit].name, AGENT, LIMIT, THREAD)
        by = "job, instance, agent, limit"
        board.with_panel(
            stat(
                Place(number + 1, 6, 4),
                f"{what} spent",
                f"{what} that model runs of the thread spent in the chosen time. If several limits "
                "count the same runs, this is the one that counts most.",
                f"sum(max by (job, instance, agent) ({total(by, spent, RANGE, RANGE_SECONDS)}))",
                unit=dashboard_unit,
                steps=[(None, NEUTRAL)],
                no_value="none",
            ).decimals(decimals)
        )


def _used(unit: Unit, panel_unit: str) -> list[Query]:
    """What is used, what may be used, and what will be used."""
    use = of_threads(THREAD, unit=unit)
    own = {"unit": panel_unit}
    return [
        Query(
            use.freshest(use.used), "used ({{agent}}, {{limit}})", properties={**own, **fixed(OK)}
        ),
        Query(
            use.freshest(use.limit),
            "limit ({{agent}}, {{limit}})",
            properties={**own, **dashed(CRITICAL)},
        ),
        Query(
            use.freshest(use.predicted),
            f"in {settings.PREDICTED_TEXT} ({{{{agent}}}}, {{{{limit}}}})",
            properties={**own, **dashed(WARNING)},
        ),
    ]


def _use(board: Dashboard) -> None:
    board.with_panel(
        timeseries(
            Place(6, 24, 10),
            "Used against limit: $limit",
            "What the thread has used, and what it may use, in the limit's unit: calls, tokens or "
            "dollars. The orange line is what the thread will have used "
            f"{settings.PREDICTED_TEXT} later, at the pace of the last {settings.PACE_WINDOW}. If "
            "it reaches the limit, nothing is left by then.",
            [*_used("calls", COUNT), *_used("tokens", COUNT), *_used("microdollars", DOLLARS)],
            unit=COUNT,
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
            "How many calls of the thread a limit refused. The bars add up to the counted "
            "refusals.",
            [Query(grown("agent, limit", _REFUSALS), "{{limit}} ({{agent}})")],
        ).no_value("Nothing was refused.")
    )
    board.with_panel(
        traces(
            Place(9, 24, 10),
            "Refused calls in traces",
            "Calls of the thread that were refused or skipped: by which limit, at which threshold, "
            "and how much was used. The panel cannot show a thread whose id has a backtick.",
            spans("${thread:raw}", refused=True),
        )
    )
