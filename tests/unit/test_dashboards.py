"""The Grafana dashboards: as generated, as Grafana wants them, about metrics that exist."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import jsonschema
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from dashboards import build
from langchain_quota import Call, Telemetry, ToolCallLimit
from langchain_quota.engine import Used, judge
from langchain_quota.monitoring import exports
from langchain_quota.telemetry import recorder_of
from langchain_quota.telemetry.names import METRICS
from tests.conftest import Signals
from tests.grafana import ALL, Board, Query, Values, boards, interpolate
from tests.metrics import LABELS_OF

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "dashboards" / "grafana"
SCHEMA = json.loads((ROOT / "tests/assets/grafana/dashboard.schema.json").read_text())

BOARDS = {board.uid: board for board in boards()}
OVERVIEW, THREAD = "langchain-quota-overview", "langchain-quota-thread"

QUERIES = [query for board in BOARDS.values() for query in board.queries]
VARIABLES = [
    pytest.param(board.uid, variable, id=f"{board.uid}-{variable.name}")
    for board in BOARDS.values()
    for variable in board.variables
]

ADDED_BY_SCRAPE = {"job", "instance"}
OF_PROMETHEUS = {"scrape_duration_seconds": ADDED_BY_SCRAPE}
"""What every target has, that is no metric of ours."""
KNOWN = {name: labels | ADDED_BY_SCRAPE for name, labels in LABELS_OF.items()} | OF_PROMETHEUS
"""The labels of everything that a query may name."""
MADE_IN_QUERIES = {"born", "traced"}

LIMIT = ToolCallLimit("search", thread_limit=1, run_limit=1)

SELECTOR = re.compile(r"(?P<metric>\w+)\{(?P<matchers>(?:\"(?:[^\"\\]|\\.)*\"|`[^`]*`|[^\"`}])*)\}")
MATCHER = re.compile(r"(\w+)(?:=~|!~|!=|=)(?:\"(?:[^\"\\]|\\.)*\"|`[^`]*`)")
GROUPING = re.compile(r"\b(?:by|on) \(([^)]*)\)")
OF_LEGEND = re.compile(r"\{\{(\w+)\}\}")

PANELS = {
    OVERVIEW: {
        1: "Calls refused",
        2: "Refused share",
        3: "Threads exhausted",
        4: "Threads near a limit",
        5: "Threads hidden",
        6: "Threads about to run out",
        7: "Decisions",
        8: "Calls by decision",
        9: "Refusals by limit and scope",
        10: "Near and exhausted",
        11: "Subjects by state",
        12: "Charged to each limit",
        13: "Configured limits",
        14: "Health of the limits themselves",
        15: "Errors",
        16: "Store latency",
        17: "Decisions without the store",
        18: "Store operations",
        19: "Scrape duration",
        20: "Threads without series",
        21: "Processes",
        22: "Stores in memory",
    },
    THREAD: {
        1: "Utilization",
        2: "Calls left",
        3: "Time to exhaustion",
        4: "Calls refused",
        5: "Last decision",
        6: "Used against limit: $limit",
        7: "What was refused, and why",
        8: "Refusals",
        9: "Refused calls in traces",
    },
}
"""The panels by their ids. Links point to them: a new panel gets a new id, none gets another's."""


def of_query(query: Query) -> str:
    return query.where.replace(" ", "-")


def of_board(uid: str) -> str:
    return uid


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


def expressions() -> Iterator[str]:
    """What all queries and variables ask Prometheus."""
    for board in BOARDS.values():
        yield from (query.expr for query in board.queries)
        yield from (variable.selector for variable in board.variables)


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


def test_the_uids_never_change() -> None:
    """Bookmarks and links from elsewhere have the dashboards' UIDs."""
    assert set(BOARDS) == {OVERVIEW, THREAD}


@pytest.mark.parametrize("uid", BOARDS, ids=of_board)
def test_panels_keep_their_ids(uid: str) -> None:
    """Ids are unique and stable."""
    numbered = [(panel["id"], panel["title"]) for panel in BOARDS[uid].model["panels"]]
    assert sorted(numbered) == sorted(PANELS[uid].items())


@pytest.mark.parametrize("uid", BOARDS, ids=of_board)
def test_queries_of_a_panel_have_ids(uid: str) -> None:
    """Every panel has queries, lettered from A."""
    for each in BOARDS[uid].panels:
        found = [target["refId"] for target in each["targets"]]
        assert found
        assert found == list("ABCDEFGH")[: len(found)]


@pytest.mark.parametrize("uid", BOARDS, ids=of_board)
def test_no_panel_overlaps_another(uid: str) -> None:
    """Each panel has its place within the grid's 24 columns."""
    cells = {
        each["id"]: {
            (x, y)
            for x in range(each["gridPos"]["x"], each["gridPos"]["x"] + each["gridPos"]["w"])
            for y in range(each["gridPos"]["y"], each["gridPos"]["y"] + each["gridPos"]["h"])
        }
        for each in BOARDS[uid].model["panels"]
    }
    assert all(0 <= x < 24 for taken in cells.values() for x, _ in taken)
    overlaps = [(a, b) for a, b in combinations(cells, 2) if cells[a] & cells[b]]
    assert overlaps == []


def test_who_runs_out_is_answered_in_the_top_third() -> None:
    """The numbers come first; the ranked table ends within the first third of the dashboard."""
    places = {each["id"]: each["gridPos"] for each in BOARDS[OVERVIEW].model["panels"]}
    height = max(place["y"] + place["h"] for place in places.values())
    ranked = places[6]
    assert [panel(OVERVIEW, number)["type"] for number in range(1, 6)] == ["stat"] * 5
    assert {places[number]["y"] for number in range(1, 6)} == {0}
    assert panel(OVERVIEW, 6)["title"] == "Threads about to run out"
    assert (ranked["y"] + ranked["h"]) * 3 <= height
    assert ranked["w"] == 24


@pytest.mark.parametrize("uid", BOARDS, ids=of_board)
def test_panels_explain_themselves(uid: str) -> None:
    """Every panel has a title, a description in sentences, and a unit."""
    for each in BOARDS[uid].panels:
        assert each["title"]
        assert re.fullmatch(r"[A-Z].{20,}\.", each["description"]), each["title"]
        assert each["fieldConfig"]["defaults"]["unit"], each["title"]


@pytest.mark.parametrize("uid", BOARDS, ids=of_board)
def test_no_data_is_no_zero(uid: str) -> None:
    """Nothing puts a number where there is none: no filled gap, no default of a query."""
    for each in BOARDS[uid].panels:
        defaults = each["fieldConfig"]["defaults"]
        if each["type"] == "stat":
            assert defaults["noValue"] == "no data"
        if each["type"] == "timeseries":
            assert defaults["custom"]["spanNulls"] is False
        assert not re.search(r"\d", defaults.get("noValue", ""))
    for expr in expressions():
        assert not re.search(r"\b(vector|absent\w*|scalar)\s*\(", expr)


@pytest.mark.parametrize("uid", BOARDS, ids=of_board)
def test_data_sources_are_variables(uid: str) -> None:
    """Every query goes to the data source that is chosen; each kind has one labelled variable."""
    model = BOARDS[uid].model
    chosen = {
        variable["query"]: (variable["name"], variable["label"])
        for variable in model["templating"]["list"]
        if variable["type"] == "datasource"
    }
    assert chosen == {"prometheus": ("datasource", "Data source"), "tempo": ("tempo", "Traces")}
    used = [
        *(each["datasource"] for each in BOARDS[uid].panels),
        *(target["datasource"] for each in BOARDS[uid].panels for target in each["targets"]),
        *(each["datasource"] for each in model["annotations"]["list"]),
        *(each["datasource"] for each in model["templating"]["list"] if each["type"] == "query"),
    ]
    for each in used:
        assert each["uid"] == f"${{{chosen[each['type']][0]}}}"


@pytest.mark.parametrize(
    ("uid", "names"),
    [
        (OVERVIEW, ["job", "instance", "agent", "limit"]),
        (THREAD, ["job", "instance", "agent", "thread", "limit"]),
    ],
)
def test_variables(uid: str, names: list[str]) -> None:
    """Every variable is labelled and follows the chosen time; all but the thread take several."""
    found = [each for each in BOARDS[uid].model["templating"]["list"] if each["type"] == "query"]
    assert [each["name"] for each in found] == names
    for each in found:
        assert each["label"]
        assert each["refresh"] == 2
        if each["name"] == "thread":
            assert not each["multi"]
            assert not each["includeAll"]
        else:
            assert (each["multi"], each["includeAll"], each["allValue"]) == (True, True, ".+")
            assert each["current"]["value"] == ALL


@pytest.mark.parametrize("query", QUERIES, ids=of_query)
def test_every_query_keeps_to_the_chosen_processes(query: Query) -> None:
    """Each selector of each query is narrowed to the job and the instance."""
    found = selectors(query.expr)
    assert found
    for metric, labels in found:
        assert {"job", "instance"} <= set(labels), metric
    both = query.expr.count('{job=~"$job",instance=~"$instance"')
    assert both == len(found) == len(re.findall(r"langchain_quota_\w+|scrape_\w+", query.expr))


@pytest.mark.parametrize(("uid", "variable"), VARIABLES)
def test_every_variable_keeps_to_what_is_chosen_before_it(uid: str, variable: Any) -> None:
    """Values are offered for the job and the instance; these two for what stands before them."""
    chosen = {
        "job": ['job=~".+"'],
        "instance": ['job=~"$job"'],
    }.get(variable.name, ['job=~"$job"', 'instance=~"$instance"'])
    [(_, labels)] = selectors(variable.selector)
    for matcher in chosen:
        assert matcher in variable.selector
    assert labels[: len(chosen)] == [matcher.split("=")[0] for matcher in chosen]


@pytest.mark.parametrize("query", QUERIES, ids=of_query)
def test_metrics_and_labels_exist(query: Query) -> None:
    """What a query names is a metric of the code; no recording rule is needed."""
    available: set[str] = set()
    for metric, labels in selectors(query.expr):
        assert metric in KNOWN
        assert set(labels) <= KNOWN[metric]
        available |= KNOWN[metric]
    for grouped in GROUPING.findall(query.expr):
        assert {label.strip() for label in grouped.split(",")} <= available | MADE_IN_QUERIES
    assert set(OF_LEGEND.findall(query.legend)) <= available


@pytest.mark.parametrize(("uid", "variable"), VARIABLES)
def test_labels_of_variables_exist(uid: str, variable: Any) -> None:
    """A variable offers values of a label that its metric has."""
    [(metric, labels)] = selectors(variable.selector)
    assert {variable.label, *labels} <= KNOWN[metric]


def test_every_metric_is_on_a_dashboard() -> None:
    """No metric of the code is without a panel."""
    shown = {metric for query in QUERIES for metric, _ in selectors(query.expr)}
    assert [metric.name for metric in METRICS if not shown & {*metric.series}] == []


@pytest.mark.parametrize("query", QUERIES, ids=of_query)
def test_counters_are_shown_by_their_growth(query: Query) -> None:
    """A counter stands under rate or increase, or adds the value that it was born with."""
    counter = r"langchain_quota_\w+(?:_total|_bucket|_count|_sum)"
    matchers = SELECTOR.pattern.partition(r"(?P<metric>\w+)")[2].replace("?P<matchers>", "")
    born = re.compile(
        rf"min_over_time\((?P<one>{counter}{matchers})\[(?P<window>[^\]]+)\]\) "
        r"unless last_over_time\((?P=one)\[1h\] offset (?P=window)\)"
    )
    rest = born.sub("", query.expr)
    assert not re.search(rf"(?<!rate\()(?<!increase\()\b{counter}", rest)
    assert len(re.findall(counter, rest)) == len(
        re.findall(rf"(?:rate|increase)\({counter}{matchers}\[", rest)
    )


@pytest.mark.parametrize("query", QUERIES, ids=of_query)
def test_windows_follow_the_chosen_time(query: Query) -> None:
    """Growth is measured over what Grafana says; marks of breaches over the alert's window."""
    windows = set(re.findall(r"(?:rate|increase)\([^\[]*\[([^\]]+)\]", query.expr))
    if query.where.endswith("Breaches"):
        assert windows == {"5m"}
    elif windows:
        assert windows == {"$__rate_interval" if query.over_time else "$__range"}


@pytest.mark.parametrize("uid", BOARDS, ids=of_board)
def test_grafana_takes_the_json(uid: str) -> None:
    """The dashboard has only properties that Grafana's own types have, with values of theirs."""
    assert list(jsonschema.Draft7Validator(SCHEMA).iter_errors(BOARDS[uid].model)) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda board: board["panels"][0]["options"].update(graphmode="none"),
        lambda board: board["panels"][0]["options"].update(graphMode="lines"),
        lambda board: board["panels"][0]["targets"][0].pop("expr"),
        lambda board: board["panels"][5]["fieldConfig"]["overrides"][0]["properties"].append(
            {"id": "custom.widht", "value": 1}
        ),
        lambda board: board["panels"][7]["fieldConfig"]["defaults"]["custom"].update(fill=1),
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
    expr: str = panel(OVERVIEW, 6)["targets"][0]["expr"]
    return expr


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
        asked += [variable.selector for variable in board.variables]
        for expr in asked:
            assert expr.count(f"{{{selector},job=~") == len(selectors(expr))
        added = sum(text.count(selector) for text in texts(board.model))
        assert added == sum(len(selectors(expr)) for expr in asked)
        again = json.dumps(board.model).replace(json.dumps(f"{selector},")[1:-1], "")
        assert json.loads(again) == BOARDS[board.uid].model


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
    assert len(VARIABLES) == 9
