"""The third dashboard: what is spent, in tokens and in dollars.

What counts tokens and what counts money never meet in one panel's axis or column.
"""

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.table import Panel as TablePanel
from grafana_foundation_sdk.builders.timeseries import Panel as TimeseriesPanel

from dashboards import panels as show
from dashboards import queries as ask
from dashboards import settings
from dashboards.overview import cost, subjects
from dashboards.settings import CRITICAL, DOLLARS, OK, ROUNDED, SHARE, WARNING
from dashboards.variables import common_variables

_RUNS = "job_agent_model_usage_price:langchain_quota_model_runs:increase15s"
_ONCE = "A run that several limits count is counted once."


def build() -> Dashboard:
    """The dashboard."""
    return show.new_dashboard(
        settings.BUDGETS_UID,
        settings.BUDGETS_TITLE,
        "What is spent, by whom and on which model, and what is left of budgets.",
        common_variables(),
        cost(show.Place(41, 8, 5)),
        show.stat(
            show.Place(42, 8, 5),
            "Tokens, last 24 hours",
            f"What model runs used in the last 24 hours, and the last hour as the pace. {_ONCE}",
            [
                show.Query(ask.spent("tokens", "24h"), "24 hours"),
                show.Query(ask.spent("tokens", "1h"), "last hour"),
            ],
            unit=ROUNDED,
            no_value="No limit of tokens.",
        ),
        _uncertain_share(),
        _spent(44, "Money spent", "dollars", DOLLARS),
        _spent(45, "Tokens used", "tokens", ROUNDED),
        subjects(show.Place(46, 24, 8), "Shared budgets", 'unit!="calls"'),
        _threads(),
        show.row(49, "Estimates and prices, whatever Limit is chosen", _uncertain_runs()),
    )


def _spent(number: int, title: str, spent: str, unit: str) -> TimeseriesPanel:
    amounts = f"{ask.spent(spent, ask.BAR, 'agent, model')} > 0"
    queries = [show.Query(amounts, "{{agent}}: {{model}}")]
    if spent == "dollars":
        of_tools = f"{ask.spent_by_tools(ask.BAR)} > 0"
        queries.append(show.Query(of_tools, "{{agent}}: tool {{tool}}"))
    return show.bars(
        show.Place(number, 12, 8),
        title,
        "What each agent spent since the previous bar, by model"
        f"{' and by paid tool' * (len(queries) > 1)}. {_ONCE}",
        queries,
        unit=unit,
    ).no_value("Nothing was spent.")


def _uncertain_runs() -> TimeseriesPanel:
    def runs(only: str) -> str:
        return f"{ask.grown(_RUNS, ask.BAR, ask.AGENT, only, by='agent, model')} > 0"

    return show.bars(
        show.Place(48, 24, 8),
        "Uncertain runs",
        "Model runs whose tokens are estimated, because the provider reported none or the "
        "run was cut off, and runs without a price, whose cost no limit counts.",
        [
            show.Query(runs('usage="estimated"'), "estimated: {{agent}}, {{model}}"),
            show.Query(runs('price="unknown"'), "no price: {{agent}}, {{model}}"),
        ],
        unit=settings.COUNT,
    ).no_value("Every run has a price and a report of its usage.")


def _uncertain_share() -> StatPanel:
    def share(only: str) -> str:
        part, whole = ask.grown(_RUNS, "24h", ask.AGENT, only), ask.grown(_RUNS, "24h", ask.AGENT)
        return f"{part} / {whole} or vector(0)"

    return show.stat(
        show.Place(43, 8, 5),
        "Uncertain runs, last 24 hours",
        "The share of model runs in the last 24 hours whose usage is estimated, and of those that "
        "have no price. The variable Limit has no effect here.",
        [
            show.Query(share('usage="estimated"'), "estimated"),
            show.Query(share('price="unknown"'), "no price"),
        ],
        unit=SHARE,
        steps=((None, OK), (0.05, WARNING), (0.5, CRITICAL)),
    ).decimals(1)


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
