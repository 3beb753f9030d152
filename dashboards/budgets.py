"""The third dashboard: what is spent, in tokens and in dollars.

What counts tokens and what counts money never meet in one panel's axis or column.
"""

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.table import Panel as TablePanel

from dashboards import settings
from dashboards.overview import cost, shared
from dashboards.panels import (
    Column,
    Place,
    Query,
    bars,
    gauge,
    hidden,
    new_dashboard,
    row,
    stat,
    table,
    text,
    timeseries,
)
from dashboards.queries import (
    AGENT,
    ALLOWED,
    BAR,
    LIMIT,
    LINKS,
    OF_SUBJECT,
    grown,
    ratio,
    select,
    spent,
    with_traced,
)
from dashboards.settings import CRITICAL, DOLLARS, OK, ROUNDED, SHARE, WARNING
from dashboards.variables import common_variables

_RUNS = "job_agent_model_usage_price:langchain_quota_model_runs:increase15s"
_PER_HOUR = "/ (${__interval_ms} / 3600000)"
_ONCE = "A run that several limits count is counted once."


def build() -> Dashboard:
    """The dashboard."""
    board = new_dashboard(
        settings.BUDGETS_UID,
        settings.BUDGETS_TITLE,
        "What is spent, by whom and on which model, and what is left of budgets.",
    )
    board.variables(common_variables())
    board.with_panel(cost(Place(41, 8, 5)))
    board.with_panel(
        stat(
            Place(42, 8, 5),
            "Tokens today",
            f"What model runs used in the last 24 hours, and in the last hour: the pace. {_ONCE}",
            [Query(spent("tokens", "24h"), "24 hours"), Query(spent("tokens", "1h"), "last hour")],
            unit=ROUNDED,
            no_value="No limit of tokens.",
        )
    )
    board.with_panel(_uncertain_share())
    for number, unit, name, shown in (
        (44, "dollars", "Money", DOLLARS),
        (45, "tokens", "Tokens", ROUNDED),
    ):
        board.with_panel(
            bars(
                Place(number, 12, 8),
                f"{name} per hour",
                f"How fast each agent spends, by model. {_ONCE}",
                [
                    Query(
                        f"{spent(unit, BAR, 'agent, model')} {_PER_HOUR} > 0",
                        "{{agent}}: {{model}}",
                    )
                ],
                unit=shown,
            ).no_value("Nothing was spent.")
        )
    board.with_panel(_budgets())
    board.with_panel(_threads())
    runs = grown(_RUNS, BAR, AGENT, 'usage!="reported"', by="agent, model")
    prices = grown(_RUNS, BAR, AGENT, 'price="unknown"', by="agent, model")
    board.with_row(
        row(
            49,
            "Estimates and prices, whatever Limit is chosen",
            timeseries(
                Place(48, 24, 8),
                "Uncertain runs",
                "Model runs whose tokens are estimated, because the provider reported none or the "
                "run was cut off, and runs without a price, whose cost no limit counts.",
                [
                    Query(runs, "estimated: {{agent}}, {{model}}"),
                    Query(prices, "no price: {{agent}}, {{model}}"),
                ],
                unit=settings.COUNT,
            ).no_value("Every run has a price and a report of its usage."),
        )
    )
    return board


def _uncertain_share() -> StatPanel:
    def share(only: str) -> str:
        return f"{grown(_RUNS, '24h', AGENT, only)} / {grown(_RUNS, '24h', AGENT)} or vector(0)"

    return stat(
        Place(43, 8, 5),
        "Uncertain runs today",
        "The share of the model runs of the last 24 hours whose usage is estimated, and of those "
        "without a price. The variable Limit does not narrow it.",
        [
            Query(share('usage="estimated"'), "estimated"),
            Query(share('price="unknown"'), "no price"),
        ],
        unit=SHARE,
        steps=((None, OK), (0.05, WARNING), (0.5, CRITICAL)),
    ).decimals(1)


def _budgets() -> TablePanel:
    budgets = " and on (job, agent, limit) " + select(ALLOWED, AGENT, LIMIT, 'unit!="calls"')

    def amount(name: str, unit: str) -> str:
        amounts = select(f"langchain_quota_subject_{name}_{unit}", AGENT, LIMIT)
        return f"max by ({OF_SUBJECT}) ({amounts})"

    return shared(
        Place(46, 24, 8),
        "Budgets",
        [
            gauge("Share", f"{ratio()}{budgets}", 100),
            Column("Spent $", amount("used", "dollars"), _amount(DOLLARS, 2)),
            Column("of $", amount("limit", "dollars"), _amount(DOLLARS, 2)),
            Column("Tokens", amount("used", "tokens"), _amount(ROUNDED, 1)),
            Column("of", amount("limit", "tokens"), _amount(ROUNDED, 1)),
        ],
        budgets,
    )


def _amount(unit: str, decimals: int) -> dict[str, object]:
    return {"unit": unit, "decimals": decimals, "custom.width": 80}


def _threads() -> TablePanel:
    by = "job, agent, thread_id"

    def total(unit: str) -> str:
        of = select(f"langchain_quota_thread_spent_{unit}_total", AGENT, LIMIT)
        return f"topk({settings.TOP}, max by ({by}) (sum by ({by}, limit) ({of}) > 0))"

    return table(
        Place(47, 24, 8),
        "Threads that spend the most",
        "What conversations have spent since they have series, the most expensive on top. Click "
        "one to see more, or to see its traces.",
        [
            text("Thread", "thread_id", 380, links=LINKS),
            text("Agent", "agent", 220),
            Column(
                "Dollars",
                with_traced(total("dollars")),
                _amount(DOLLARS, 4) | {"custom.width": 150},
            ),
            Column(
                "Tokens", with_traced(total("tokens")), _amount(ROUNDED, 1) | {"custom.width": 150}
            ),
            text("Job", "job", 160),
            hidden("traced"),
        ],
        sort_by=with_traced(total("dollars")),
        no_value="Nothing was spent.",
    )
