"""The Grafana dashboards: as generated, as Grafana wants them, about metrics that exist."""

import json
import re
from typing import Any

from dashboards import build
from langchain_quota.monitoring import exports
from langchain_quota.telemetry.names import METRICS
from tests.grafana import boards

BOARDS = {board.uid: board for board in boards()}
OVERVIEW, THREAD = "langchain-quota-overview", "langchain-quota-thread"

QUERIES = [query for board in BOARDS.values() for query in board.queries]


SELECTOR = re.compile(r"(?P<metric>\w+)\{(?P<matchers>(?:\"(?:[^\"\\]|\\.)*\"|`[^`]*`|[^\"`}])*)\}")
MATCHER = re.compile(r"(\w+)(?:=~|!~|!=|=)(?:\"(?:[^\"\\]|\\.)*\"|`[^`]*`)")


def selectors(expr: str) -> list[tuple[str, list[str]]]:
    """The metrics of a query, each with the labels that it is narrowed by."""
    return [
        (found["metric"], MATCHER.findall(found["matchers"])) for found in SELECTOR.finditer(expr)
    ]


def panel(uid: str, number: int) -> Any:
    [found] = [each for each in BOARDS[uid].panels if each["id"] == number]
    return found


def shown(each: Any, ref_id: str) -> str:
    """The unit in which a panel shows a query, or what else it makes of it."""
    name = f"Value #{ref_id}" if len(each["targets"]) > 1 else "Value"
    for step in each.get("transformations", []):
        if step["id"] == "organize":
            if step["options"]["excludeByName"].get(name):
                return "hidden"
            name = step["options"]["renameByName"].get(name, name)
    unit: str = each["fieldConfig"]["defaults"]["unit"]
    own = {
        one["id"]: one["value"]
        for override in each["fieldConfig"]["overrides"]
        if override["matcher"]["options"] in {name, ref_id}
        for one in override["properties"]
    }
    if "mappings" in {*own, *each["fieldConfig"]["defaults"]} and "unit" not in own:
        return "state"
    return str(own.get("unit", unit))


def test_every_metric_is_on_a_dashboard() -> None:
    """No metric of the code is without a panel."""
    shown = {metric for query in QUERIES for metric, _ in selectors(query.expr)}
    assert [metric.name for metric in METRICS if not shown & {*metric.series}] == []


def test_an_export_without_options_is_what_is_generated() -> None:
    """The package gives out the generated files as they are."""
    assert exports.dashboards() == build.render()


def test_an_export_begins_with_a_data_source() -> None:
    """The variable of the data source has the given value at first, and can be changed."""
    for text in exports.dashboards(datasource="prom-1").values():
        model = json.loads(text)
        [chosen] = [each for each in model["templating"]["list"] if each["name"] == "datasource"]
        assert chosen.pop("current") == {"selected": True, "text": "prom-1", "value": "prom-1"}
        assert model == BOARDS[model["uid"]].model
