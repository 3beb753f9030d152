"""The third dashboard: what is spent, in tokens and in dollars.

What counts tokens and what counts money never meet in one panel's axis or column.
"""

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.table import Panel as TablePanel
from grafana_foundation_sdk.builders.timeseries import Panel as TimeseriesPanel

from dashboards import panels as show
from dashboards import queries as ask
from dashboards import settings
from dashboards.overview import cost
from dashboards.settings import DOLLARS, ROUNDED
from dashboards.variables import common_variables

_RUNS = "job_agent_model_usage_price:langchain_quota_model_runs:increase15s"
_ONCE = "A run that several limits count is counted once."


def build() -> Dashboard:
    """The dashboard."""
    return show.new_dashboard(
        settings.BUDGETS_UID,
        settings.BUDGETS_TITLE,
        "What is spent, by whom and on which model. The overview shows what is left of budgets.",
        common_variables(),
        cost(show.Place(41, 12, show.LOW)),
        show.stat(
            show.Place(42, 12, show.LOW),
            "Tokens, last 24 hours",
            f"What model runs used in the last 24 hours, and the last hour as the pace. {_ONCE}",
            [
                show.Query(ask.spent("tokens", "24h"), "24 hours"),
                show.Query(ask.spent("tokens", "1h"), "last hour"),
            ],
            unit=ROUNDED,
            no_value="No limit of tokens.",
        ),
        _spent(44, "Money spent", "dollars", DOLLARS),
        _spent(45, "Tokens used", "tokens", ROUNDED),
        _threads(),
        _uncertain_runs(),
    )


def _spent(number: int, title: str, spent: str, unit: str) -> TimeseriesPanel:
    amounts = f"{ask.spent(spent, ask.BAR, 'agent, model')} > 0"
    pays_tools = spent == "dollars"
    if pays_tools:
        of_tools = f"{ask.spent_by_tools(ask.BAR)} > 0"
        amounts += f' or label_replace({of_tools}, "model", "tool $1", "tool", "(.+)")'
    return show.bars(
        show.Place(number, 12, 8),
        title,
        "What each agent spent since the previous bar, by model"
        f"{' and by paid tool' * pays_tools}. {_ONCE}",
        [show.Query(amounts, "{{agent}}: {{model}}")],
        unit=unit,
    ).no_value("Nothing was spent.")


def _uncertain_runs() -> TimeseriesPanel:
    def runs(only: str) -> str:
        return f"{ask.grown(_RUNS, ask.BAR, ask.AGENT, only, by='agent, model')} > 0"

    return show.bars(
        show.Place(48, 24, 6),
        "Uncertain runs",
        "Model runs whose tokens are estimated, because the provider reported none or the "
        "run was cut off, and runs without a price, whose cost no limit counts. The variable Limit "
        "has no effect here.",
        [
            show.Query(
                ask.together(
                    {"estimated": runs('usage="estimated"'), "no price": runs('price="unknown"')}
                ),
                "{{what}}: {{agent}}, {{model}}",
            )
        ],
        unit=settings.COUNT,
    ).no_value("Every run has a price and a report of its usage.")


def _threads() -> TablePanel:
    by = "job, agent, thread_id"

    def total(unit: str) -> str:
        series = f"{ask.THREADS}_spent_{unit}"
        grown = ask.increases(series, ask.RANGE, ask.AGENT, ask.LIMIT)
        return f"max by ({by}) (sum by ({by}, limit) ({grown}) > 0)"

    most = f"topk({settings.TOP}, {total('dollars')} or {total('tokens')} / 1e9)"
    return show.table(
        show.Place(47, 24, 8),
        "Threads that spend the most",
        "What the model runs of conversations spent in the chosen time, with the most expensive on "
        "top. Paid tools are not included. Click a conversation to see more.",
        [
            show.text("Thread", "thread_id", links=ask.LINKS),
            show.text("Agent", "agent", 220),
            show.Column(
                "Dollars", total("dollars"), {"unit": DOLLARS, "decimals": 4, "custom.width": 150}
            ),
            show.Column(
                "Tokens", total("tokens"), {"unit": ROUNDED, "decimals": 1, "custom.width": 150}
            ),
            show.text("Job", "job", 160),
        ],
        sort_by=most,
        no_value="Nothing was spent.",
    )
