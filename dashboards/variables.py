"""The variables: which data sources, jobs, agents, limits and threads are shown."""

from grafana_foundation_sdk.builders.dashboard import DatasourceVariable, QueryVariable
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import (
    VariableModel,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from dashboards.panels import PROMETHEUS
from dashboards.queries import AGENT, select


def common_variables(*, limit: bool = True) -> list[Builder[VariableModel]]:
    """Those that all dashboards have; a dashboard may leave out the limit."""
    limits = "langchain_quota_limit_decisions_total"
    found: list[Builder[VariableModel]] = [
        DatasourceVariable("datasource").label("Data source").type("prometheus"),
        DatasourceVariable("tempo").label("Traces").type("tempo"),
        several("job", "Job", 'label_values(langchain_quota_build_info{job=~".+"}, job)'),
        several("agent", "Agent", f"label_values({select('langchain_quota_calls_total')}, agent)"),
        several("limit", "Limit", f"label_values({select(limits, AGENT)}, limit)"),
    ]
    return found if limit else found[:-1]


def several(name: str, label: str, query: str) -> QueryVariable:
    """A variable with any number of values; all of them at first."""
    everything = VariableOption(text=["All"], value=["$__all"], selected=True)
    return (
        one(name, label, query)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".+")
        .current(everything)
    )


def one(name: str, label: str, query: str) -> QueryVariable:
    """A variable with one value, which can be searched for."""
    return (
        QueryVariable(name)
        .label(label)
        .datasource(PROMETHEUS)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )
