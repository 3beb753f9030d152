"""The third dashboard: what is spent, in tokens and in dollars.

What counts tokens and what counts money never meet in one panel's axis or column.
"""

from dataclasses import dataclass

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards import settings
from dashboards.columns import LINKS, use_columns
from dashboards.counters import bars as grown
from dashboards.counters import share, total
from dashboards.panels import (
    Column,
    Place,
    Properties,
    Query,
    bars,
    new_dashboard,
    row,
    stat,
    table,
    text,
    timeseries,
    words,
)
from dashboards.queries import (
    AGENT,
    LIMIT,
    LIMIT_ALERT,
    LIMIT_NEAR,
    MODEL_RUNS,
    TRACED,
    UNKNOWN_PRICES,
    among,
    of_limit,
    select,
    with_traced,
)
from dashboards.settings import (
    COUNT,
    CRITICAL,
    NEUTRAL,
    OK,
    RANGE,
    RANGE_SECONDS,
    ROUNDED,
    WARNING,
)
from dashboards.usage import of_subjects, of_threads
from dashboards.variables import common_variables, found, limits
from langchain_quota.telemetry import names
from langchain_quota.units import Unit


@dataclass(frozen=True, slots=True)
class Budget:
    """A unit that limits count, and how Grafana shows it.

    Attributes:
        unit: The unit.
        name: What the panels call it.
        first: The id of the first panel of its row.
        granted: The id of the panel on grants.
        shown: Grafana's unit.
        rounded: The same of large amounts.
        decimals: Of amounts of threads.
    """

    unit: Unit
    name: str
    first: int
    granted: int
    shown: str
    rounded: str
    decimals: int

    @property
    def nearest(self) -> str:
        """The variable with the threads that are nearest to such a limit."""
        return f"nearest_{self.name.lower()}"

    @property
    def spent(self) -> str:
        """What model runs spent."""
        return select(names.SPENT[self.unit].name, AGENT, LIMIT)

    def amounts(self, decimals: int, width: int = 90) -> Properties:
        """What a column of amounts has of its own."""
        return {"unit": self.shown, "decimals": decimals, "custom.width": width}


_DOLLARS = settings.DOLLARS
MONEY = Budget("microdollars", "Money", 5, 22, _DOLLARS, _DOLLARS, settings.DECIMALS_OF_THREADS)
TOKENS = Budget("tokens", "Tokens", 12, 23, COUNT, ROUNDED, 0)
_ESTIMATED = 'usage="estimated"'
_ONCE = "If several limits count the same runs, this is the one that counts most."


def build() -> Dashboard:
    """The dashboard; it has no annotations."""
    board = new_dashboard(
        settings.BUDGETS_UID,
        settings.BUDGETS_TITLE,
        "What is spent, by whom and on which model, and what is left of limits on tokens and "
        "money.",
    )
    budgets = " or ".join(select(spec.name, AGENT) for spec in names.SPENT.values())
    board.variables(
        [
            *common_variables(),
            limits(budgets),
            *(
                found(each.nearest, f"{each.name}: nearest", of_threads(unit=each.unit).nearest)
                for each in (MONEY, TOKENS)
            ),
        ]
    )
    _first_look(board)
    for budget in (MONEY, TOKENS):
        _spending(board, budget)
        _left(board, budget)
    _usage(board)
    return board


def _first_look(board: Dashboard) -> None:
    for number, budget in ((1, MONEY), (2, TOKENS)):
        by = "job, instance, agent, model, limit"
        grown_by = total(by, budget.spent, RANGE, RANGE_SECONDS)
        board.with_panel(
            stat(
                Place(number, 6, 4),
                f"{budget.name} spent",
                f"What model runs spent in the chosen time. {_ONCE}",
                f"sum(max by (job, instance, agent, model) ({grown_by}))",
                unit=budget.rounded,
                steps=[(None, NEUTRAL)],
            ).decimals(settings.DECIMALS_OF_TOTALS)
        )
    board.with_panel(
        stat(
            Place(3, 6, 4),
            "Estimated usage",
            "The share of model runs whose tokens are estimated, because the provider reported "
            "none, or because the run was cut off. The variable Limit does not narrow it.",
            share_of_estimates(),
            unit="percentunit",
            steps=[(None, OK), (settings.ESTIMATED_SHARE_WARNING, WARNING)],
        ).decimals(1)
    )
    board.with_panel(
        stat(
            Place(4, 6, 4),
            "Calls without a price",
            "Model calls in the chosen time that have no price: no limit counts their cost. The "
            "variable Limit does not narrow it.",
            total("", select(UNKNOWN_PRICES, AGENT), RANGE, RANGE_SECONDS),
            unit=COUNT,
            steps=[(None, OK), (1, CRITICAL)],
            no_value="none",
        ).decimals(0)
    )


def share_of_estimates() -> str:
    """The share of model runs in the chosen time whose usage is estimated."""
    estimated, every = (
        total("", select(MODEL_RUNS, AGENT, *only), RANGE, RANGE_SECONDS)
        for only in ((_ESTIMATED,), ())
    )
    return f"{estimated} / ({every} > 0)"


def per_hour(by: str, budget: Budget) -> str:
    """How fast is spent, counting each model run once."""
    rate = f"rate({budget.spent}[{settings.RATE}])"
    once = f"max by (job, instance, agent, model) ({rate})"
    return f"sum by ({by}) ({once}) * 3600 > 0"


def _spending(board: Dashboard, budget: Budget) -> None:
    name, of = budget.name, f"of {budget.name.lower()}"
    board.with_row(row(budget.first, name))
    board.with_panel(
        timeseries(
            Place(budget.first + 1, 12, 8),
            f"{name} per hour",
            f"How fast each agent spends, by model. {_ONCE}",
            [Query(per_hour("agent, model", budget), "{{agent}}: {{model}}")],
            unit=budget.rounded,
        ).no_value("Nothing was spent.")
    )
    board.with_panel(
        table(
            Place(budget.first + 2, 12, 8),
            f"Limits {of}",
            "How much a limit allows in a run, thread or quota. 'Near from' is the used share from "
            "which the limit is near. 'Alerts' is no for a limit with alert=False or "
            "enforce=False. Limits that a function computes are not listed.",
            [
                text("Agent", "agent", 120),
                text("Limit", "limit", 120),
                text("Scope", "scope", 80),
                Column(
                    "Allowed",
                    of_limit(names.LIMIT[budget.unit].name, budget.unit),
                    budget.amounts(min(budget.decimals, settings.DECIMALS_OF_TOTALS), 110),
                ),
                Column(
                    "Near from",
                    of_limit(LIMIT_NEAR, budget.unit),
                    {"unit": "percentunit", "custom.width": 80},
                ),
                Column(
                    "Alerts",
                    of_limit(LIMIT_ALERT, budget.unit),
                    {"mappings": [words({"no": None, "yes": None})], "custom.width": 60},
                ),
                text("Job", "job", 80),
            ],
            sort_by=of_limit(names.LIMIT[budget.unit].name, budget.unit),
        )
    )
    spent = select(names.THREAD_SPENT[budget.unit].name, AGENT, LIMIT)
    dearest = total("job, agent, limit, thread_id", spent, RANGE, RANGE_SECONDS)
    dearest = f"max by (job, agent, thread_id) ({dearest})"
    dearest = with_traced(f"topk({settings.TOP}, {dearest} > 0)")
    board.with_panel(
        table(
            Place(budget.first + 3, 24, 8),
            f"Threads that spend the most {budget.name.lower()}",
            f"Which conversations spent most in the chosen time. {_ONCE} The table lists only "
            "conversations with series. Click one to see more, or to see its traces.",
            [
                text("Thread", "thread_id", 290, links=LINKS),
                text("Agent", "agent", 140),
                Column("Spent", dearest, budget.amounts(budget.decimals, 110)),
                text("Job", "job", 120),
                Column(TRACED, TRACED, {"custom.hidden": True}),
            ],
            sort_by=dearest,
            no_value="Nothing was spent.",
        )
    )


def _left(board: Dashboard, budget: Budget) -> None:
    of = f"of {budget.name.lower()}"
    threads = of_threads(among(budget.nearest), unit=budget.unit)
    amounts = budget.amounts(budget.decimals)
    board.with_panel(
        table(
            Place(budget.first + 4, 24, 8),
            f"Threads about to run out {of}",
            "How much of their limits conversations have left. The nearest to a limit is on top, "
            f"and exhausted ones are last. The table has at most {settings.TOP} rows. 'Time to "
            f"exhaustion' uses the pace of the last {settings.PACE_WINDOW}.",
            [
                text("Thread", "thread_id", 285, links=LINKS),
                text("Agent", "agent", 110),
                text("Limit", "limit", 110),
                *use_columns(
                    lambda ask: threads.freshest(ask(threads)), traced=True, amounts=amounts
                ),
                text("Job", "job", 80),
                Column(TRACED, TRACED, {"custom.hidden": True}),
            ],
            sort_by=threads.freshest(threads.rank),
        )
    )
    shared = of_subjects('subject=""', unit=budget.unit)
    amounts = budget.amounts(min(budget.decimals, settings.DECIMALS_OF_TOTALS))
    board.with_panel(
        table(
            Place(budget.first + 5, 24, 6),
            f"Shared quotas {of}",
            "How much is used of quotas per agent and of global quotas, and when nothing is left "
            f"at the pace of the last {settings.PACE_WINDOW}. 'Resets' is empty if a quota has no "
            "time window.",
            [
                text("Quota", "scope", 110),
                text("Agent", "agent", 140),
                text("Limit", "limit", 140),
                *use_columns(lambda ask: shared.top(ask(shared)), amounts=amounts),
                text("Job", "job", 110),
            ],
            sort_by=shared.top(shared.rank),
        )
    )
    granted = select(names.GRANTED[budget.unit].name, AGENT, LIMIT)
    board.with_panel(
        bars(
            Place(budget.granted, 24, 6),
            f"{budget.name} granted",
            "How much was granted on top of limits. A grant shows when the first call is judged "
            "with it. If a grant raises several limits, each of them counts it.",
            [Query(grown("limit, scope", granted), "{{limit}} ({{scope}})")],
        )
        .unit(budget.rounded)
        .no_value("Nothing was granted.")
    )
    subjects = of_subjects('subject!=""', unit=budget.unit)
    board.with_panel(
        table(
            Place(budget.first + 6, 24, 8),
            f"Subjects that have used the most {budget.name.lower()}",
            "Which users, tenants or other subjects have used most, with the highest amount on "
            "top. The table is empty unless Telemetry(subject_label=…) names the quotas.",
            [
                text("Subject", "subject", 180),
                text("Quota", "scope", 100),
                text("Agent", "agent", 120),
                text("Limit", "limit", 120),
                *use_columns(
                    lambda ask: subjects.dearest(ask(subjects)),
                    amounts=budget.amounts(budget.decimals),
                ),
                text("Job", "job", 90),
            ],
            sort_by=subjects.dearest(subjects.used),
            no_value="No subject has a label: see Telemetry(subject_label=…).",
        )
    )


def _usage(board: Dashboard) -> None:
    board.with_row(row(19, "Prices and usage, whatever Limit is chosen"))
    runs = select(MODEL_RUNS, AGENT)
    board.with_panel(
        timeseries(
            Place(20, 12, 8),
            "Estimated usage by model",
            "The share of model runs whose tokens are estimated. 100%: the model's provider "
            "reports no tokens. For instance, ChatOpenAI with a base_url needs stream_usage=True.",
            [
                Query(
                    share("agent, model", select(MODEL_RUNS, AGENT, _ESTIMATED), runs),
                    "{{agent}}: {{model}}",
                )
            ],
            unit="percentunit",
        ).max(1)
    )
    board.with_panel(
        bars(
            Place(21, 12, 8),
            "Calls without a price by model",
            "Model calls that have no price, so no limit counts their cost. The bars add up to "
            "what was counted.",
            [Query(grown("agent, model", select(UNKNOWN_PRICES, AGENT)), "{{agent}}: {{model}}")],
        ).no_value("Every model has a price.")
    )
