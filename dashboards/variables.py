"""The variables: which data sources, processes, agents, limits and threads are shown."""

from grafana_foundation_sdk.builders.dashboard import DatasourceVariable, QueryVariable
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import (
    VariableHide,
    VariableModel,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from dashboards.panels import PROMETHEUS
from dashboards.queries import (
    BUILD,
    CALLS,
    LIMIT_OF_RESULT,
    PROCESS,
    THREAD_OF_RESULT,
    label_values,
    select,
)


def common_variables() -> list[Builder[VariableModel]]:
    """Those that all dashboards have."""
    any_job = f"{BUILD}{{{PROCESS[0].replace('$job', '.+')}}}"
    this_job = f"{BUILD}{{{PROCESS[0]}}}"
    return [
        DatasourceVariable("datasource").label("Data source").type("prometheus"),
        DatasourceVariable("tempo").label("Traces").type("tempo"),
        several("job", "Job", label_values(any_job, "job")),
        several("instance", "Instance", label_values(this_job, "instance")),
        several("agent", "Agent", label_values(select(CALLS), "agent")),
    ]


def found(name: str, label: str, expr: str) -> QueryVariable:
    """A hidden variable with the ids of the threads that a table is about.

    It is asked once, over all threads; the columns are then about the found ones only. To look
    through all threads for each column takes seconds where there are many.
    """
    everything = VariableOption(text=["All"], value=["$__all"], selected=True)
    return (
        one(name, label, f"query_result(group by (thread_id) ({expr}))")
        .regex(THREAD_OF_RESULT)
        .hide(VariableHide.HIDE_VARIABLE)
        .multi(multi=True)
        .include_all(include_all=True)
        .current(everything)
    )


def limits(expr: str) -> QueryVariable:
    """The variable of limits that count different units."""
    return several("limit", "Limit", f"query_result(group by (limit) ({expr}))").regex(
        LIMIT_OF_RESULT
    )


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
