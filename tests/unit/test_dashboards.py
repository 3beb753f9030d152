"""The Grafana dashboards: as generated, as Grafana wants them, about metrics that exist."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from string import ascii_uppercase
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import jsonschema
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from dashboards import build
from langchain_quota import Call, Decision, LimitStatus, Outcome, Telemetry, ToolCallLimit
from langchain_quota.monitoring import exports
from langchain_quota.telemetry import recorder_of
from langchain_quota.telemetry.names import METRICS
from tests.faults import at, differences, no_faults
from tests.grafana import ALL, Board, Query, Values, boards, interpolate
from tests.judged import Used, judge
from tests.metrics import LABELS_OF, UNIT_OF, mixed
from tests.signals import Signals

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "dashboards.md"
GENERATED = ROOT / "dashboards" / "grafana"
SCHEMA = json.loads((ROOT / "tests/assets/grafana/dashboard.schema.json").read_text())

BOARDS = {board.uid: board for board in boards()}
OVERVIEW, THREAD = "langchain-quota-overview", "langchain-quota-thread"
BUDGETS = "langchain-quota-budgets"

QUERIES = [query for board in BOARDS.values() for query in board.queries]
VARIABLES = [(board, variable) for board in BOARDS.values() for variable in board.variables]

ADDED_BY_SCRAPE = {"job", "instance"}
OF_ALERTS = {"alertname", "severity", "agent", "limit", "thread_id", "job"}
OF_PROMETHEUS = {
    "scrape_duration_seconds": ADDED_BY_SCRAPE,
    "ALERTS": OF_ALERTS | {"alertstate"},
    "ALERTS_FOR_STATE": OF_ALERTS,
}
"""What Prometheus adds to the metrics of ours."""
KNOWN = {name: labels | ADDED_BY_SCRAPE for name, labels in LABELS_OF.items()} | OF_PROMETHEUS
"""The labels of everything that a query may name."""
MADE_IN_QUERIES = {"state", "traced"}

LIMIT = ToolCallLimit("search", thread_limit=1, run_limit=1)

SELECTOR = re.compile(r"(?P<metric>\w+)\{(?P<matchers>(?:\"(?:[^\"\\]|\\.)*\"|`[^`]*`|[^\"`}])*)\}")
MATCHER = re.compile(r"(\w+)(?:=~|!~|!=|=)(?:\"(?:[^\"\\]|\\.)*\"|`[^`]*`)")
GROUPING = re.compile(r"\b(?:by|on) \(([^)]*)\)")
OF_LEGEND = re.compile(r"\{\{(\w+)\}\}")

PANELS = {
    OVERVIEW: {
        1: "Calls refused",
        2: "Refused share",
        5: "Threads hidden",
        6: "Threads about to run out",
        7: "Limits",
        8: "Calls by decision",
        9: "Refusals by limit and scope",
        10: "Near and exhausted",
        11: "Subjects by state",
        12: "Charged to each limit",
        13: "Configured limits",
        14: "Health of the processes, whatever Agent and Limit are chosen",
        15: "Errors",
        16: "Store latency",
        17: "Decisions without the store",
        18: "Store operations",
        19: "Scrape duration",
        20: "Threads without series",
        21: "Processes",
        22: "Stores in memory",
        23: "Refused now",
        24: "Alerts that fire",
        25: "Shared quotas",
        26: "Top subjects of shared quotas",
        27: "Threads at their limits",
        28: "Runs that a limit ended",
        29: "Does the model listen?",
        30: "Time to judge",
        31: "Agents, whatever Limit is chosen",
        32: "Calls that no limit judged",
        33: "Waits of tool calls",
        34: "Calls granted",
        35: "Questions and answers",
    },
    THREAD: {
        1: "Utilization",
        2: "Calls left",
        3: "Runs out in",
        4: "Calls refused",
        5: "Last decision",
        6: "Used against limit: $limit",
        7: "What was refused, and why",
        8: "Refusals",
        9: "Refused calls in traces",
        10: "Refused since",
        11: "Resets",
        12: "State",
        13: "Tokens left",
        14: "Tokens spent",
        15: "Money left",
        16: "Money spent",
    },
    BUDGETS: {
        1: "Money spent",
        2: "Tokens spent",
        3: "Estimated usage",
        4: "Calls without a price",
        5: "Money",
        6: "Money per hour",
        7: "Limits of money",
        8: "Threads that spend the most money",
        9: "Threads about to run out of money",
        10: "Shared quotas of money",
        11: "Subjects that have used the most money",
        12: "Tokens",
        13: "Tokens per hour",
        14: "Limits of tokens",
        15: "Threads that spend the most tokens",
        16: "Threads about to run out of tokens",
        17: "Shared quotas of tokens",
        18: "Subjects that have used the most tokens",
        19: "Prices and usage, whatever Limit is chosen",
        20: "Estimated usage by model",
        21: "Calls without a price by model",
        22: "Money granted",
        23: "Tokens granted",
    },
}
"""The panels by their ids. Links point to them: a new panel gets a new id, none gets another's."""
GONE = {OVERVIEW: {3, 4}, THREAD: set[int](), BUDGETS: set[int]()}
"""The ids of panels that are no more."""


def at_query(query: Query) -> str:
    """Where a query stands in the generated files, and what it is called."""
    path = GENERATED / f"{query.where.split()[0]}.json"
    return f"{at(path, json.dumps(query.expr, ensure_ascii=False))}: {query.where}"


def at_panel(board: Board, each: Any) -> str:
    """Where a panel stands in the generated files, and its title."""
    return f"{at(GENERATED / f'{board.uid}.json', json.dumps(each['title']))}: {each['title']!r}"


def at_variable(board: Board, label: str) -> str:
    """Where a variable stands in the generated files, and its name."""
    return f"{at(GENERATED / f'{board.uid}.json', json.dumps(label))}: {label!r}"


def decide(telemetry: Telemetry, thread: str) -> None:
    """Let a call through on a thread, and refuse the next."""
    calls = [Call("tool", "search", each, agent="boss", thread_id=thread) for each in ("1", "2")]
    decided = judge([LIMIT], {LIMIT.counter: Used(0, 0)}, calls)
    recorder_of(telemetry).record(decided.decisions, started=1)


def selectors(expr: str) -> list[tuple[str, list[str]]]:
    """The metrics of a query, each with the labels that it is narrowed by."""
    return [
        (found["metric"], MATCHER.findall(found["matchers"])) for found in SELECTOR.finditer(expr)
    ]


def of_ours(expr: str) -> list[tuple[str, list[str]]]:
    """The selectors of a query, but for those of alerts."""
    return [each for each in selectors(expr) if not each[0].startswith("ALERTS")]


def expressions() -> Iterator[tuple[str, str]]:
    """What all queries and variables ask Prometheus, and where."""
    yield from ((at_query(query), query.expr) for query in QUERIES)
    for board, variable in VARIABLES:
        yield at_variable(board, variable.name), variable.asked


def texts(value: Any) -> Iterator[str]:
    """All texts of a dashboard."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


def panel(uid: str, number: int) -> Any:
    [found] = [each for each in BOARDS[uid].panels if each["id"] == number]
    return found


def test_the_files_are_what_is_generated() -> None:
    """Generating the dashboards again changes nothing: what is committed is what the code says."""
    files = {path.name: path.read_text(encoding="utf-8") for path in GENERATED.iterdir()}
    assert build.render() == files


def test_the_page_has_every_panel_once() -> None:
    """docs/dashboards.md has a row for every panel of each dashboard, and for nothing else."""
    text = PAGE.read_text(encoding="utf-8")
    tables = [part.partition("\n## ")[0] for part in text.split("| panel |")[1:]]
    faults: list[str] = []
    for table, uid in zip(tables, (OVERVIEW, THREAD, BUDGETS), strict=True):
        said = re.findall(r"(?m)^\| ([^|]+?) \|", table)
        titles = [each["title"] for each in BOARDS[uid].panels]
        faults += differences(PAGE, said[1:] if said[:1] == ["---"] else said, titles, kind="panel")
    no_faults(faults, remedy="Give every panel its row.")


def test_the_uids_never_change() -> None:
    """Bookmarks and links from elsewhere have the dashboards' UIDs."""
    assert set(BOARDS) == {OVERVIEW, THREAD, BUDGETS}


def test_panels_keep_their_ids() -> None:
    """Ids are unique and stable."""
    for uid, board in BOARDS.items():
        numbered = [(panel["id"], panel["title"]) for panel in board.model["panels"]]
        assert sorted(numbered) == sorted(PANELS[uid].items()), f"{uid}: links have these ids"
        assert not GONE[uid] & PANELS[uid].keys()


def test_queries_of_a_panel_have_ids() -> None:
    """Every panel has queries, lettered from A."""
    no_faults(
        (
            f"{at_panel(board, each)} has queries {found}"
            for board in BOARDS.values()
            for each in board.panels
            if (found := [target["refId"] for target in each["targets"]])
            != list(ascii_uppercase)[: len(found)]
            or not found
        ),
        remedy="Letter its queries A, B, C.",
    )


def misplaced(board: Board) -> Iterator[str]:
    cells = {}
    for each in board.model["panels"]:
        at_x, at_y, width, height = (each["gridPos"][key] for key in "xywh")
        if not 0 <= at_x < at_x + width <= 24:
            yield f"{at_panel(board, each)} leaves the grid"
        cells[each["id"]] = {
            (x, y) for x in range(at_x, at_x + width) for y in range(at_y, at_y + height)
        }
    for one, other in combinations(board.model["panels"], 2):
        if cells[one["id"]] & cells[other["id"]]:
            yield f"{at_panel(board, one)} overlaps {other['title']!r}"


def test_no_panel_overlaps_another() -> None:
    """Each panel has its place within the grid's 24 columns."""
    found = (fault for board in BOARDS.values() for fault in misplaced(board))
    no_faults(found, remedy="Give it free cells of the grid.")


def test_what_no_limit_narrows_says_so() -> None:
    """Panels without a limit stand in rows whose titles say so, or say it themselves."""
    said = ""
    wrong = []
    for each in sorted(BOARDS[OVERVIEW].model["panels"], key=lambda panel: panel["gridPos"]["y"]):
        if each["type"] == "row":
            said = each["title"]
            continue
        asked = " ".join(target["expr"] for target in each["targets"])
        if "$limit" not in asked and "Limit" not in said + each["description"] + each["title"]:
            wrong.append(f"{at_panel(BOARDS[OVERVIEW], each)} does not say it")
    no_faults([each for each in wrong if "Alerts" not in each], remedy="Say it in its row's title.")


def test_the_first_look_answers_what_is_asked_first() -> None:
    """Alerts are on top, then the numbers, who is refused, and who runs out: within a third."""
    places = {each["id"]: each["gridPos"] for each in BOARDS[OVERVIEW].model["panels"]}
    height = max(place["y"] + place["h"] for place in places.values())
    order = sorted(places, key=lambda number: (places[number]["y"], places[number]["x"]))
    assert order[:7] == [24, 1, 2, 27, 5, 23, 6]
    assert {places[number]["y"] for number in (1, 2, 27, 5)} == {places[24]["h"]}
    assert {places[number]["w"] for number in (24, 23, 6)} == {24}
    assert (places[6]["y"] + places[6]["h"]) * 3 <= height


def unexplained(each: Any) -> Iterator[str]:
    if not each["title"]:
        yield "has no title"
    if not re.fullmatch(r"[A-Z].{20,}\.", each["description"]):
        yield f"is described by {each['description']!r}, which is no sentence"
    if not each["fieldConfig"]["defaults"]["unit"]:
        yield "has no unit"


def test_panels_explain_themselves() -> None:
    """Every panel has a title, a description in sentences, and a unit."""
    no_faults(
        (
            f"{at_panel(board, each)} {fault}"
            for board in BOARDS.values()
            for each in board.panels
            for fault in unexplained(each)
        ),
        remedy="Say in dashboards/ what the panel shows.",
    )


def invented(each: Any) -> Iterator[str]:
    defaults = each["fieldConfig"]["defaults"]
    if each["type"] == "stat" and not defaults["noValue"]:
        yield "shows nothing for no data"
    if each["type"] == "timeseries" and defaults["custom"]["spanNulls"] is not False:
        yield "fills gaps"
    if re.search(r"\d", defaults.get("noValue", "")):
        yield "shows a number for no data"


def test_no_data_is_no_zero() -> None:
    """Nothing puts a number where there is none: no filled gap, no default of a query."""
    panels = [
        f"{at_panel(board, each)} {fault}"
        for board in BOARDS.values()
        for each in board.panels
        for fault in invented(each)
    ]
    queries = [
        f"{where} has a default in {expr}"
        for where, expr in expressions()
        if re.search(r"\b(vector|absent\w*|scalar)\s*\(", expr)
    ]
    no_faults([*panels, *queries], remedy="Let no data be no data.")


def test_tables_have_few_rows() -> None:
    """A table shows 100 rows at most, the first ones of an order; the page names the exception."""
    unbounded = []
    for board in BOARDS.values():
        for each in board.panels:
            if each["type"] == "table" and each["datasource"]["type"] == "prometheus":
                steps = {step["id"]: step["options"] for step in each["transformations"]}
                if not {"sortBy", "limit"} <= steps.keys():
                    unbounded.append(each["title"])
                else:
                    assert steps["limit"] == {"limitField": 100}
    assert unbounded == ["Configured limits"]
    assert "*Configured limits* shows all." in PAGE.read_text(encoding="utf-8")


def test_data_sources_are_variables() -> None:
    """Every query goes to the data source that is chosen; each kind has one labelled variable."""
    wrong = []
    for board in BOARDS.values():
        model = board.model
        chosen = {
            variable["query"]: (variable["name"], variable["label"])
            for variable in model["templating"]["list"]
            if variable["type"] == "datasource"
        }
        assert chosen == {"prometheus": ("datasource", "Data source"), "tempo": ("tempo", "Traces")}
        targets = [target for each in board.panels for target in each["targets"]]
        asked = [each for each in model["templating"]["list"] if each["type"] == "query"]
        for each in (*board.panels, *targets, *model["annotations"]["list"], *asked):
            source = each["datasource"]
            if source["uid"] != f"${{{chosen[source['type']][0]}}}":
                wrong.append(f"{board.uid}: {each.get('title') or each} asks {source}")
    no_faults(wrong, remedy="Name the variable of its kind as the data source.")


def unlabelled(model: Any) -> Iterator[str]:
    if not model["label"]:
        yield "has no label"
    if model["refresh"] != 2:
        yield "does not follow the chosen time"
    if model["name"] == "thread":
        if model["multi"] or model["includeAll"]:
            yield "takes several threads"
    elif model.get("hide") == 2:
        # All of what it finds, which is not all there is.
        if (
            model.get("allValue")
            or not model["skipUrlSync"]
            or not (model["multi"] and model["includeAll"])
        ):
            yield "is hidden, and can be changed"
    elif (model["multi"], model["includeAll"], model["allValue"]) != (True, True, ".+"):
        yield "does not take several values"
    elif model["current"]["value"] != ALL:
        yield "does not begin with all values"


def test_variables() -> None:
    """Every variable is labelled and follows the chosen time; all but the thread take several."""
    assert {uid: [each.name for each in board.variables] for uid, board in BOARDS.items()} == {
        OVERVIEW: ["job", "instance", "agent", "limit", "nearest", "refused"],
        THREAD: ["job", "instance", "agent", "thread", "limit"],
        BUDGETS: ["job", "instance", "agent", "limit", "nearest_money", "nearest_tokens"],
    }
    no_faults(
        (
            f"{at_variable(board, each['name'])} {fault}"
            for board in BOARDS.values()
            for each in board.model["templating"]["list"]
            if each["type"] == "query"
            for fault in unlabelled(each)
        ),
        remedy="Make it like its neighbours, in dashboards/variables.py.",
    )


def test_every_query_keeps_to_the_chosen_processes() -> None:
    """Each selector of each query is narrowed to the job and the instance; alerts to the job."""
    no_faults(
        (
            f"{where} asks for all processes: {expr}"
            for where, expr in expressions()
            if not selectors(expr)
            or any("job" not in labels for _, labels in selectors(expr))
            or any(
                "instance" not in labels
                for metric, labels in of_ours(expr)
                if "job=~" not in expr or metric != "langchain_quota_build_info"
            )
            or len(re.findall(r"langchain_quota_\w+|scrape_\w+", expr)) != len(of_ours(expr))
        ),
        remedy='Begin each selector with {job=~"$job",instance=~"$instance".',
    )


def test_every_variable_keeps_to_what_is_chosen_before_it() -> None:
    """Values are offered for the job and the instance; these two for what stands before them."""
    every = ['job=~"$job"', 'instance=~"$instance"']
    before = {"job": ['job=~".+"'], "instance": every[:1]}
    wrong = []
    for board, variable in VARIABLES:
        chosen = before.get(variable.name, every)
        names = [matcher.split("=")[0] for matcher in chosen]
        for _, labels in selectors(variable.asked):
            if labels[: len(chosen)] != names or any(each not in variable.asked for each in chosen):
                wrong.append(f"{at_variable(board, variable.name)} asks {variable.asked}")
    no_faults(wrong, remedy="Narrow it to what stands before it.")


def test_every_figure_about_limits_follows_the_chosen_limit() -> None:
    """A metric that has the label of the limit is narrowed to the chosen ones."""
    no_faults(
        (
            f"{at_query(query)} is about all limits: {metric}"
            for query in QUERIES
            for metric, labels in of_ours(query.expr)
            if "limit" in KNOWN[metric] and "limit" not in labels
        ),
        remedy='Narrow it by limit=~"$limit".',
    )


def misnamed(query: Query, known: dict[str, set[str]]) -> Iterator[str]:
    available: set[str] = set()
    for metric, labels in selectors(query.expr):
        if metric not in known:
            yield f"the metric {metric!r}"
        available |= known.get(metric, set())
        yield from (
            f"the label {label!r}" for label in labels if label not in known.get(metric, ())
        )
    for grouped in GROUPING.findall(query.expr):
        labels = [label.strip() for label in grouped.split(",")]
        unknown = set(labels) - available - MADE_IN_QUERIES
        yield from (f"the label {label!r} of a group" for label in sorted(unknown))
    for label in sorted(set(OF_LEGEND.findall(query.legend)) - available):
        yield f"the label {label!r} of the legend"


def test_metrics_and_labels_exist() -> None:
    """What a query names is a metric of the code; no recording rule is needed."""
    no_faults(
        (
            f"{at_query(query)}: there is not {fault}"
            for query in QUERIES
            for fault in misnamed(query, KNOWN)
        ),
        remedy="Name a metric and labels that telemetry/names.py has.",
    )


def test_labels_of_variables_exist() -> None:
    """A variable offers values of a label that its metrics have."""
    wrong = []
    for board, variable in VARIABLES:
        for metric, labels in selectors(variable.asked):
            unknown = {variable.label, *labels} - KNOWN.get(metric, set())
            if unknown:
                wrong.append(f"{at_variable(board, variable.name)}: {metric} has no {unknown}")
    no_faults(wrong, remedy="Offer the values of a label that the metric has.")


def test_units_are_never_brought_together() -> None:
    """No query adds or compares calls, tokens and dollars, nor shows two of them as one."""
    no_faults(
        (
            f"{where}: {fault}"
            for where, expr in expressions()
            if not expr.startswith("group by (limit)")  # their names only
            for fault in mixed(expr)
        ),
        remedy="Ask for one unit, or for shares.",
    )


NO_AMOUNT = {"percentunit", "s", "dateTimeFromNow", "state", "hidden"}
"""How a query is shown that makes something else from amounts."""


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


def amounts(expr: str) -> set[str]:
    """The units of a query's amounts; of several units, a share or a time is made."""
    return {UNIT_OF[metric] for metric, _ in selectors(expr) if metric in UNIT_OF}


def test_amounts_are_shown_in_their_unit() -> None:
    """Dollars are drawn as dollars; tokens and calls as whole numbers, many tokens rounded."""
    found = {
        (unit, shown(each, target["refId"]))
        for board in BOARDS.values()
        for each in board.panels
        for target in each["targets"]
        if len(units := amounts(target.get("expr", ""))) == 1
        for unit in units
    }
    assert {each for each in found if each[1] not in NO_AMOUNT} == {
        ("calls", "locale"),
        ("tokens", "locale"),
        ("tokens", "short"),
        ("microdollars", "currencyUSD"),
    }


def test_every_metric_is_on_a_dashboard() -> None:
    """No metric of the code is without a panel."""
    shown = {metric for query in QUERIES for metric, _ in selectors(query.expr)}
    assert [metric.name for metric in METRICS if not shown & {*metric.series}] == []


def test_counters_are_shown_by_their_growth() -> None:
    """A counter stands under a function of `dashboards/counters.py`; none is shown as it stands."""
    counter = re.compile(r"langchain_quota_\w+(?:_total|_bucket|_count|_sum)\b")
    matchers = SELECTOR.pattern.partition(r"(?P<metric>\w+)")[2].replace("?P<matchers>", "")
    plain = re.compile(rf"(?<![\w(])\(?{counter.pattern}{matchers}(?![\[\w])")
    wrong = []
    for query in QUERIES:
        if not counter.search(query.expr):
            continue
        grown = re.search(r"\b(?:rate|increase)\(", query.expr)
        difference = "offset ${__interval_ms}ms" in query.expr
        if not grown and not (difference and query.over_time):
            wrong.append(f"{at_query(query)} shows a counter as it stands: {query.expr}")
        if not difference and plain.search(query.expr):
            wrong.append(f"{at_query(query)} shows a counter as it stands: {query.expr}")
    no_faults(wrong, remedy="Take a function of dashboards/counters.py.")


def test_windows_follow_the_chosen_time() -> None:
    """Growth is measured over what Grafana says; marks of breaches over the alert's window."""
    wrong = []
    for query in QUERIES:
        windows = set(re.findall(r"(?:rate|increase)\([^\[]*\[([^\]]+)\]", query.expr))
        assert "$__interval" not in query.expr  # it is rounded
        of_breaches = query.where.endswith("Breaches")
        window = "$__rate_interval" if query.over_time else "$__range"
        wanted = {"5m"} if of_breaches else {window}
        if windows != wanted and (windows or of_breaches):
            wrong.append(f"{at_query(query)} measures over {windows}, not {wanted}")
    no_faults(wrong, remedy="Take the window that Grafana gives.")


def test_grafana_takes_the_json() -> None:
    """The dashboard has only properties that Grafana's own types have, with values of theirs."""
    no_faults(
        (
            f"{at(GENERATED / f'{uid}.json')}: {error.json_path}: {error.message[:300]}"
            for uid, board in BOARDS.items()
            for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(board.model)
        ),
        remedy="Use the builders of grafana-foundation-sdk.",
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda board: board["panels"][1]["options"].update(graphmode="none"),
        lambda board: board["panels"][1]["options"].update(graphMode="lines"),
        lambda board: board["panels"][0]["targets"][0].pop("expr"),
        lambda board: board["panels"][0]["fieldConfig"]["overrides"][0]["properties"].append(
            {"id": "custom.widht", "value": 1}
        ),
        lambda board: next(each for each in board["panels"] if each["id"] == 9)["fieldConfig"][
            "defaults"
        ]["custom"].update(fill=1),
        lambda board: board["templating"]["list"][2].update(multi="yes"),
        lambda board: board.pop("schemaVersion"),
    ],
    ids=["option", "value", "query", "override", "field", "variable", "version"],
)
def test_the_schema_finds_what_is_wrong(spoil: Any) -> None:
    """A misspelt option, a wrong value or a missing property is no dashboard."""
    [spoilt] = [board.model for board in boards() if board.uid == OVERVIEW]
    spoil(spoilt)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SCHEMA).validate(spoilt)


def test_trace_queries_name_attributes_of_spans(signals: Signals) -> None:
    """Every attribute in a TraceQL query is on a span of a refused call."""
    decide(signals.telemetry, "anna")
    hidden = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(hidden))
    hiding = Telemetry(
        registry=CollectorRegistry(), tracer_provider=provider, thread_label=lambda _: "hidden"
    )
    decide(hiding, "anna")
    status = LimitStatus("budget", "end", 0, 1, 2, 0, 1, None, unit="tokens")
    budget = Decision(Call("model", agent="boss"), Outcome.ALLOWED, (status,))
    signals.recorder.record([budget], started=1)
    known = {
        name
        for span in (*signals.spans(), *hidden.get_finished_spans())
        for name in span.attributes or {}
    }
    asked = [query for board in BOARDS.values() for query in board.trace_queries]
    asked.append(tempo_query("anna"))
    assert len(asked) == 2
    for query in asked:
        named = set(re.findall(r"span\.([a-z_.]+)", query))
        assert {"langchain_quota.decision", "langchain_quota.limit"} <= named <= known


def links() -> list[str]:
    """The links of a thread in the ranked table."""
    properties = [
        each
        for override in panel(OVERVIEW, 6)["fieldConfig"]["overrides"]
        for each in override["properties"]
        if each["id"] == "links"
    ]
    [found] = properties
    return [link["url"] for link in found["value"]]


def followed(url: str, row: dict[str, str]) -> str:
    """A link of a row as Grafana makes it."""
    url = re.sub(
        r"\$\{__data\.fields\.(\w+):percentencode\}",
        lambda field: quote(row[field[1]], safe=""),
        url,
    )
    for name in ("datasource", "tempo", "instance"):
        url = url.replace(f"${{{name}:queryparam}}", f"var-{name}=one")
    url = url.replace("${__url_time_range}", "from=now-3h&to=now").replace("${tempo}", "tempo-1")
    url = url.replace("${__from}", "1").replace("${__to}", "2")
    assert "$" not in url
    return url


def tempo_query(thread: str) -> str:
    """The TraceQL query that a row's link leads to."""
    [_, url] = links()
    [panes] = parse_qs(urlsplit(followed(url, {"traced": thread})).query)["panes"]
    pane = json.loads(panes)["quota"]
    assert pane["datasource"] == pane["queries"][0]["datasource"]["uid"] == "tempo-1"
    assert pane["range"] == {"from": "1", "to": "2"}
    query: str = pane["queries"][0]["query"]
    return query


HOSTILE = "a&var-job=b#c/d?e=%41 $job ${x} {y} <i> 'ü'"


def test_a_row_leads_to_its_thread() -> None:
    """The link has the thread, agent and job of the row, whatever characters they have."""
    [url, _] = links()
    row = {"thread_id": HOSTILE + '"\\`', "agent": HOSTILE, "job": "a b"}
    to = urlsplit(followed(url, row))
    assert to.path == f"/d/{THREAD}"
    assert to.fragment == ""
    variables = parse_qs(to.query)
    assert variables["var-thread"] == [row["thread_id"]]
    assert variables["var-agent"] == [row["agent"]]
    assert variables["var-job"] == [row["job"]]
    assert {name.removeprefix("var-") for name in variables} - {"from", "to"} <= {
        variable["name"] for variable in BOARDS[THREAD].model["templating"]["list"]
    }


def test_a_row_leads_to_its_traces() -> None:
    """The link's query finds the spans of that thread, under either attribute."""
    query = tempo_query(HOSTILE)
    assert f"span.gen_ai.conversation.id = `{HOSTILE}`" in query
    assert f"span.langchain_quota.thread.id = `{HOSTILE}`" in query


@pytest.mark.parametrize("character", ['"', "\\", "`"], ids=["quote", "backslash", "backtick"])
def test_ids_that_could_break_out_of_a_link_are_left_out(character: str) -> None:
    """What means something in JSON or in a raw string is not let into the link."""
    [label] = re.findall(r'"traced", "\$1", "thread_id", "((?:[^"\\]|\\.)*)"', links_query())
    allowed = re.compile(json.loads(f'"{label}"'))
    assert allowed.fullmatch(HOSTILE)
    assert not allowed.fullmatch(f"a{character}b")


def links_query() -> str:
    """The query that makes the label for the links."""
    [expr] = {
        target["expr"] for target in panel(OVERVIEW, 6)["targets"] if '"traced"' in target["expr"]
    }
    found: str = expr
    return found


def test_a_thread_stands_in_raw_strings_only() -> None:
    """Quotes and backslashes in a chosen thread change no query; a backtick is not offered."""
    [variable] = [
        each for each in BOARDS[THREAD].model["templating"]["list"] if each["name"] == "thread"
    ]
    offered = re.compile(variable["regex"].strip("/"))
    assert offered.search('a"b\\c')
    assert not offered.search("a`b")
    found = [text for text in texts(BOARDS[THREAD].model) if re.search(r"\$\{?thread\b", text)]
    assert len(found) > 10
    for text in found:
        assert len(re.findall(r"\$\{?thread\b", text)) == text.count("`${thread:raw}`")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"limit": ALL}, 'x{limit=~".+"}'),
        ({"limit": ["tool:*"]}, 'x{limit=~"tool:\\\\*"}'),
        ({"limit": ["a.b", "c"]}, 'x{limit=~"(a\\\\.b|c)"}'),
    ],
    ids=["all", "one", "two"],
)
def test_variables_are_replaced_as_grafana_does(values: Values, expected: str) -> None:
    """What the tests ask Prometheus is what Grafana would: values are regular expressions."""
    assert interpolate('x{limit=~"$limit"}', values) == expected


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


@pytest.mark.parametrize(
    "selector",
    ['cluster="eu"', 'job=~"a\\\\.b|c",namespace!="x y"', 'x="langchain_quota_limit{ \\" ü"'],
)
def test_an_export_narrows_every_selector(selector: str) -> None:
    """The matchers are in each selector of each query, and nowhere else."""
    for board in boards(selector=selector):
        asked = [query.expr for query in board.queries]
        asked += [variable.asked for variable in board.variables]
        for expr in asked:
            assert expr.count(f"{{{selector},job=~") == len(of_ours(expr))
        added = sum(text.count(selector) for text in texts(board.model))
        assert added == sum(len(of_ours(expr)) for expr in asked)
        again = json.dumps(board.model).replace(json.dumps(f"{selector},")[1:-1], "")
        assert json.loads(again) == BOARDS[board.uid].model


def test_an_export_leads_to_runbooks_of_ones_own() -> None:
    """An alert in the table leads to the page with its name at the given address."""
    [before, after] = [
        [text for board in made for text in texts(board.model) if "alertname:percent" in text]
        for made in (boards(), boards(runbooks="https://example.org/a&b/"))
    ]
    assert before == [exports.RUNBOOKS + "/${__data.fields.alertname:percentencode}.md"]
    assert after == ["https://example.org/a&b/${__data.fields.alertname:percentencode}"]


def test_an_installed_package_has_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that the package carries come before those of a source tree."""
    carried = tmp_path / "dashboards"
    carried.mkdir()
    (carried / "board.json").write_text('{"title": "ü"}', encoding="utf-8")
    (carried / "README.md").write_text("no dashboard")
    monkeypatch.setattr(exports, "_DATA", tmp_path)
    assert exports.dashboards() == {"board.json": '{"title": "ü"}'}


def test_boards_are_read() -> None:
    """What is asserted of all dashboards is asserted of something."""
    assert all(isinstance(board, Board) for board in BOARDS.values())
    assert len(QUERIES) >= 40
    assert len(VARIABLES) == 17
