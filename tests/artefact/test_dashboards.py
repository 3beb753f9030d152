"""The dashboards: as generated, as Grafana wants them, and what real Prometheus answers them."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from langchain_core.messages import AIMessage, ToolCall
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider
from prometheus_client import CollectorRegistry

from dashboards import build, settings
from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    MemoryStore,
    ModelPaceMiddleware,
    Price,
    Quota,
    QuotaMiddleware,
    RedisStore,
    Telemetry,
    TimeLimit,
    TokenLimit,
    ToolCallLimit,
    start_metrics_server,
)
from langchain_quota.cli import export
from tests.artefact.test_rules import promtool
from tests.scene import Scene
from tests.server.alertmanager import hurried
from tests.server.demo import running_demo
from tests.server.prometheus import DEADLINE, Prometheus, eventually, running_prometheus
from tests.telemetry import telling

pytestmark = pytest.mark.filterwarnings("ignore:model .* reports no usage")

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "tests/assets/grafana/dashboard.schema.json").read_text())
OVERVIEW, THREAD = "langchain-quota-overview", "langchain-quota-thread"
HOSTILE = 'a"b\\c\'d $job {x=~"\\.+"} ü'
CUSTOMERS = [f"chat-{number}" for number in range(1, 5)]
ALLOWED, TRIED = 4, 7
"""How often an agent of the second job may search on a thread, and tries to on the hostile one."""

Values = Mapping[str, str | list[str]]
"""What is chosen for each variable: a list where several can be, `ALL` for all."""

ALL = ["$__all"]
ANYTHING: Values = dict.fromkeys(("job", "agent", "limit"), ALL)
INTERVALS = {"__interval": "10s", "__interval_ms": "10000", "__rate_interval": "10s"}
OF_GRAFANA = {**INTERVALS, "__range": "1h"}
SPEED = 15
"""How many seconds of the rules pass in a second here."""
VARIABLE = re.compile(r"\$\{(?P<braced>\w+)(?::(?P<format>\w+))?\}|\$(?P<bare>\w+)")


@dataclass(frozen=True)
class Query:
    """A query to Prometheus; `where` is such as `langchain-quota-overview 6 B`."""

    where: str
    expr: str
    over_time: bool = True
    exemplar: bool = False


@dataclass(frozen=True)
class Variable:
    """A variable: its values are those of a label."""

    name: str
    label: str
    several: bool
    expr: str


@dataclass(frozen=True)
class Board:
    """A dashboard."""

    model: Any

    @property
    def uid(self) -> str:
        return str(self.model["uid"])

    @property
    def panels(self) -> list[Any]:
        """The panels, with those in rows."""
        return [panel for each in self.model["panels"] for panel in each.get("panels", [each])]

    @property
    def queries(self) -> list[Query]:
        """The queries of panels to Prometheus."""
        return [
            Query(
                f"{self.uid} {panel['id']} {target['refId']}",
                target["expr"],
                not target.get("instant", False),
                target.get("exemplar", False),
            )
            for panel in self.panels
            for target in panel["targets"]
            if target["datasource"]["type"] == "prometheus"
        ]

    @property
    def variables(self) -> list[Variable]:
        """The variables that Prometheus is asked about, in order."""
        found = []
        for model in self.model["templating"]["list"]:
            if model["type"] == "query":
                query = r"label_values\((?P<of>.+), (?P<label>\w+)\)"
                asked = re.fullmatch(query, model["query"])
                assert asked is not None, model["query"]
                found.append(Variable(model["name"], asked["label"], model["multi"], asked["of"]))
        return found


def boards(**options: Any) -> list[Board]:
    """The dashboards as they are exported."""
    return [Board(json.loads(text)) for text in export.dashboards(**options).values()]


def interpolate(expr: str, values: Values) -> str:
    """Replace variables as Grafana's Prometheus data source does."""
    every: Values = {**OF_GRAFANA, **values}

    def replaced(match: re.Match[str]) -> str:
        name = match["braced"] or match["bare"]
        if name not in every:
            return match[0]
        value = every[name]
        if value == ALL:
            return ".+"
        if isinstance(value, list):  # for a regular expression within a PromQL string
            quoted = [each.replace("\\", "\\\\\\\\") for each in value]
            escaped = [re.sub(r"[$^*{}\[\]'+?.()|]", r"\\\\\g<0>", each) for each in quoted]
            return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
        if match["format"] == "raw" or name.startswith("__"):
            return value
        return value.replace("\\", "\\\\").replace("'", "\\\\'")

    return VARIABLE.sub(replaced, expr)


def board(uid: str, **options: Any) -> Board:
    """A dashboard."""
    [found] = [each for each in boards(**options) if each.uid == uid]
    return found


def query(where: str) -> Query:
    """A query of a dashboard."""
    [found] = [each for board in boards() for each in board.queries if each.where == where]
    return found


def test_the_files_are_what_is_generated() -> None:
    """What is committed is what the code says, and the package gives it out as it is."""
    assert export.dashboards() == build.render()
    for name, text in build.render().items():
        assert (build.FOLDER / name).read_text(encoding="utf-8") == text


def test_grafana_takes_the_json() -> None:
    """Dashboards have only what Grafana's types have; numbers are of now, and grey without one."""
    panels = [panel for each in boards() for panel in each.panels]
    stats = [panel for panel in panels if panel["type"] == "stat"]
    mappings = [panel["fieldConfig"]["defaults"]["mappings"] for panel in stats]
    assert {each[0]["options"]["result"]["color"] for each in mappings} == {settings.NEUTRAL}
    assert all(target["instant"] for panel in stats for target in panel["targets"])
    assert (len(panels) <= 32, sum(len(panel["targets"]) for panel in panels) <= 80) == (True, True)
    assert all(len(query.expr) <= 650 for each in boards() for query in each.queries)
    validator = jsonschema.Draft7Validator(SCHEMA)
    for each in boards():
        assert [error.message[:300] for error in validator.iter_errors(each.model)] == []
        each.panels[0]["targets"][0].pop("expr")
        assert not validator.is_valid(each.model)


def test_links_of_rows_lead_somewhere() -> None:
    """What a link takes from a row is in the row, under the name that the link uses."""
    own = boards(runbooks="https://runbooks.example.org")
    assert "langchain-quota/blob/" not in json.dumps([board.model for board in own])
    panels = [panel for board in own for panel in board.panels if panel["type"] == "table"]
    taken = [set(re.findall(r"__data\.fields\.(\w+)", json.dumps(panel))) for panel in panels]
    named = [json.dumps(panel.get("transformations", [])) for panel in panels]
    assert {"alert"} in taken
    assert all(f'"{name}"' in names for of, names in zip(taken, named, strict=True) for name in of)


_COUNTED = (
    'job_instance_agent_decision:langchain_quota_calls:increase15s{job="a",agent="b",decision="blocked"}',
    'job_agent:langchain_quota_cost_dollars:increase15s{job="a",agent="b"}',
)
_WHEN = {'{what="now"}': 12, '{what="yesterday"}': 3, '{what="last week"}': 6}
_OF_LIMIT = 'job="a",agent="b",limit="l",scope='
_DECIDED = "job_agent_limit_scope_decision:langchain_quota_limit_decisions:increase15s"
_MOST = "job_agent_limit_scope_unit:langchain_quota_limit:max"
_MEDIAN = '{job="a",agent="b",limit="l",unit="calls"}'
_RUNS = f"job_instance_agent_limit_unit_le:langchain_quota_run_used:sum{_MEDIAN[:-1]},le="
_SHARES = {
    f'{_DECIDED}{{{_OF_LIMIT}"none",decision="allowed"}}': "6x6000",
    f'{_DECIDED}{{{_OF_LIMIT}"run",decision="blocked"}}': "2x6000",
    f'{_MOST}{{{_OF_LIMIT}"run",unit="calls"}}': "9x6000",
    **dict.fromkeys((f'{_RUNS}"3"}}', f'{_RUNS}"+Inf"}}'), "0+1x6000"),
}
_ANN = 'job="a",agent="finder",limit="search",thread_id="ann"'
_OF_ANN = {
    f"job_agent_limit_thread_id:langchain_quota_thread:rank{{{_ANN}}}": "1x6000",
    f"job_agent_limit_thread_id:langchain_quota_thread_used:ratio{{{_ANN}}}": "0.5x5740",
    "job_agent_limit_thread_id_unit:langchain_quota_thread_limit:newest"
    f'{{{_ANN},unit="calls"}}': "20x5740",
    f'langchain_quota_thread_timestamp_seconds{{{_ANN},event="decision"}}': "9x5740",
    'langchain_quota_build_info{job="a"}': "1x5740",
}


@pytest.mark.parametrize(
    ("series", "answers"),
    [
        # A week ago 2 within 2 minutes, yesterday 1, and now 4.
        (
            dict.fromkeys(_COUNTED, "2x1000 1x4300 4x700"),
            {
                "44 C": {"{}": 4},
                "45 A": {"{}": 261 + 459 * 4},
                "45 C": {"{}": 4},
                "72 A": _WHEN,
                "73 A": _WHEN,
            },
        ),
        # Of eight calls that the limit checked, it refused two. Runs make no half of a call.
        (_SHARES, {"51 D": {f'{{{_OF_LIMIT}"run",unit="calls"}}': 0.25}, "56 B": {_MEDIAN: 2}}),
        # Its process has been gone for 40 minutes.
        (
            _OF_ANN,
            {
                "57 B": {f"{{{_ANN}}}": 0.5},
                "57 C": {f'{{{_ANN},unit="calls"}}': 20},
                "57 F": {f"{{{_ANN}}}": 9000},
                "71 A": {"{}": 0},
            },
        ),
    ],
    ids=["days before", "shares", "an idle thread"],
)
def test_what_queries_compute(
    series: dict[str, str], answers: dict[str, dict[str, float]], tmp_path: Path
) -> None:
    """Days before are compared with now; idle threads are shown; no process is 0; calls whole."""
    asked = [
        {
            "expr": interpolate(query(f"{OVERVIEW} {where}").expr, ANYTHING),
            "eval_time": "8d30s",
            "exp_samples": [{"labels": key, "value": value} for key, value in found.items()],
        }
        for where, found in answers.items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    case = {"interval": "2m", "input_series": given, "promql_expr_test": asked}
    (file := tmp_path / "test.yaml").write_text(json.dumps({"tests": [case]}))  # JSON is YAML
    tested = promtool("test", "rules", file)
    assert tested.returncode == 0, tested.stdout + tested.stderr


class BrokenProcessor(SpanProcessor):
    """A tracer that fails whenever a span begins."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        raise RuntimeError("this tracer is broken")


@dataclass(frozen=True)
class Seen:
    """A Prometheus that has scraped two jobs, and since when."""

    prometheus: Prometheus
    began: float
    go_on: Callable[[], None]

    def ask(self, query: Query, values: Values) -> list[Any]:
        """The series that a query gives, as Grafana would ask it."""
        parameters = {"query": interpolate(query.expr, values)}
        if query.over_time:
            span = {"start": self.began, "end": time.time(), "step": "1s"}
            return self.prometheus.result("query_range", **parameters, **span)
        return self.prometheus.result("query", **parameters)

    def offered(self, variable: Variable, values: Values) -> list[str]:
        """The values that a variable offers."""
        asked = interpolate(variable.expr, values)
        found = self.prometheus.result("query", query=asked)
        return sorted({each["metric"][variable.label] for each in found})

    def choices(self, board: Board) -> Iterator[Values]:
        """What can be chosen: all of each variable, and one thread after the other."""
        threads = [variable for variable in board.variables if not variable.several]
        for thread in threads:
            for each in self.offered(thread, ANYTHING):
                yield {**ANYTHING, thread.name: each}
        if not threads:
            yield ANYTHING


class Searchers:
    """Agents of the second job; their tracer fails, and a thread's id is to break queries."""

    def __init__(self, registry: CollectorRegistry) -> None:
        provider = TracerProvider()
        provider.add_span_processor(BrokenProcessor())
        of: Any = {"registry": registry, "subject_label": {"tenant": str}}
        self._telemetry = Telemetry(tracer_provider=provider, run_histograms=True, **of)
        # Exemplars lead to spans, which the demo makes only where an SDK is set up around it.
        self._traced = Telemetry(tracer_provider=TracerProvider(), **of)
        self._saver = InMemorySaver()
        hour = timedelta(hours=1)

        def quotas(*most: int) -> list[Quota]:
            pers = ("global", "tenant", "thread")
            return [Quota(each, per=per, window=hour) for each, per in zip(most, pers, strict=True)]

        # One store that answers, and one that nobody listens for.
        self._stores = [MemoryStore(), RedisStore("redis://127.0.0.1:1")]
        self.thread = self._quota(ToolCallLimit("search", thread_limit=ALLOWED))
        self._once = self._quota(ToolCallLimit("search", run_limit=1))
        shared = ToolCallLimit("search", quotas=quotas(100, 10, ALLOWED))
        self._sharing = [
            self._quota(shared, store=store, on_store_error="allow") for store in self._stores
        ]
        self._waiting = self._quota(ConcurrencyLimit("search", max_concurrency=1))
        self._budgets = self._quota(
            TokenLimit(run_limit=10_000, quotas=quotas(*[10_000] * 3)),
            CostLimit(run_limit=1, quotas=quotas(1, 1, 1), tool_prices={"search": "0.01"}),
            TimeLimit(thread_limit="1h"),
            prices={"priced": Price(input=3, output=15)},
            unknown_price="allow",
            store=self._stores[0],
        )
        until = datetime.now(UTC) + hour
        self._budgets.freeze(tenant="hooli", until=until, reason="key leaked", by="ada")
        self._paced = ModelPaceMiddleware(telemetry=self._telemetry)
        self._asking = self._quota(
            ToolCallLimit("search", run_limit=1, exit_behavior="ask"),
            TokenLimit(run_limit=30, exit_behavior="ask"),
            CostLimit(run_limit=30, exit_behavior="ask"),
            prices=lambda usage: Decimal(usage.total_tokens),
        )

    def _quota(self, *limits: Any, **options: Any) -> Any:
        return QuotaMiddleware(limits, telemetry=self._telemetry, **options)

    def run(self, script: Any, quota: Any, name: str, thread: str = "") -> None:
        """Run an agent on its thread, and approve what a person is asked."""
        options: Any = {"name": name, "thread_id": thread or name, "checkpointer": self._saver}
        scene = Scene(telling(), script, [quota], context={"tenant": "acme"}, **options)
        result = asyncio.run(scene.play())
        while "__interrupt__" in result:
            result = asyncio.run(scene.resume({"decisions": [{"type": "approve"}]}))

    def go_on(self) -> None:
        """Search under limits of each kind; spend; wait; ask a person."""
        traced = QuotaMiddleware([ToolCallLimit("search", run_limit=1)], telemetry=self._traced)
        self.run([["search"], ["search"], "done"], traced, "finder", "quiet")
        self.run([["search"], "done"], self.thread, "finder", "quiet")
        self.run([["search"] * TRIED, "done"], self.thread, "finder", HOSTILE)
        # Again and again, though the limit of a run refuses it.
        self.run([["search"]] * 3 + ["done"], self._once, "looping")
        for quota in self._sharing:
            self.run([["search"], "done"], quota, "sharing")
        self.run([["search"] * 4, "done"], self._waiting, "sharing", "waiting")
        self.run(["done"], self._paced, "paced")
        # After a grant; a part is estimated, and a part has no price.
        for counter, more in (("model.total_tokens", 100), (CostLimit.counter, "0.50")):
            window = timedelta(hours=1)
            self._stores[0].grant(f"{counter}:tenant:acme", more, window=window)
        used: Any = {"input_tokens": 20, "output_tokens": 10, "total_tokens": 30}
        for model, reported in (("priced", used), ("priced", None), ("unpriced", used)):
            told: Any = {"response_metadata": {"model_name": model}, "usage_metadata": reported}
            self.run([AIMessage("", **told)], self._budgets, "spending")
        self.run([["search"], "done"], self._budgets, "spending")
        calls = [ToolCall(name="search", args={}, id=f"call-{number}") for number in range(2)]
        answers = [AIMessage("", tool_calls=calls, usage_metadata=used), AIMessage("done")]
        self.run(answers, self._asking, "asking")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """The demo, and agents that were at work before their first scrape and after it."""
    registry = CollectorRegistry()
    searchers = Searchers(registry)
    searchers.go_on()
    began = time.time()
    directory = tmp_path_factory.mktemp("prometheus")
    [rules] = export.rules().values()
    (directory / "rules.yaml").write_text(hurried(rules, SPEED), encoding="utf-8")
    with (
        running_demo(directory / "demo.log", threads=len(CUSTOMERS)) as demo,
        start_metrics_server(port=0, registry=registry) as server,
        running_prometheus(
            directory,
            {"demo": demo.address, "agents": f"{server.addr}:{server.port}"},
            rule_files=["rules.yaml"],
        ) as prometheus,
    ):
        for _ in range(2):
            prometheus.wait_for_scrape("agents")
        searchers.go_on()
        demo.wait_for_end_of_traffic()
        for job in ("agents", "demo") * 4:
            prometheus.wait_for_scrape(job)
        yield Seen(prometheus, began, searchers.go_on)
        demo.check()


def test_every_query_returns_data(seen: Seen) -> None:
    """Each query finds something; but there was no yesterday, and nothing is hidden."""
    empty = {f"{OVERVIEW} {each}" for each in ("44 C", "45 C", "63 B")}
    perhaps = {f"{OVERVIEW} 58 E"}  # a customer is blocked only if the agents ran again and again
    left = [(board, query) for board in boards() for query in board.queries]

    def found() -> bool:
        # Each only until it finds something: on a busy machine, no moment has something for all.
        left[:] = [
            (board, query)
            for board, query in left
            if not any(seen.ask(query, values) for values in seen.choices(board))
        ]
        if {query.where for _, query in left} - perhaps == empty:
            return True
        # An increase between two late scrapes is not seen: there is another.
        seen.go_on()
        return False

    eventually(found, seconds=3 * DEADLINE)
    for query in (query for board in boards() for query in board.queries if query.exemplar):
        asked = interpolate(query.expr, ANYTHING)
        assert eventually(lambda: seen.prometheus.exemplars(asked)), query.where  # noqa: B023 - at once


def test_every_part_of_a_query_returns_data(seen: Seen) -> None:
    """A query that joins several finds each, but not of what is rare or long ago."""
    queries = [each for board in boards() for each in board.queries if "label_replace" in each.expr]
    none = {"calls to a cheaper model by", "tool calls over the time of", "yesterday", "last week"}
    none |= {"calls that no limit checked: ", "near threads hidden", "calls blocked without"}
    left = {part for each in queries for part in re.findall(r'"what", "(.+?)"', each.expr)}
    left.add("tool search")

    def found() -> bool:
        for each in queries:
            for series in seen.ask(each, ANYTHING):
                left.difference_update(series["metric"].values())
        seen.go_on()
        return left == none

    eventually(found, seconds=3 * DEADLINE)


def test_every_variable_offers_values(seen: Seen) -> None:
    """The variables offer the jobs, agents, limits and threads that there are."""
    threads = {*CUSTOMERS, HOSTILE, "quiet", "looping", "sharing", "spending", "asking"}

    def all_offered() -> dict[tuple[str, str], list[str]] | None:
        found = {
            (board.uid, variable.name): seen.offered(variable, values)
            for board in boards()
            for values in seen.choices(board)
            for variable in board.variables
        }
        # A busy machine may leave out a scrape: a job is gone until the next one.
        return found if threads <= {*found[THREAD, "thread"]} else None

    offered = eventually(all_offered, seconds=3 * DEADLINE)
    assert {*offered[THREAD, "thread"]} <= {*threads, "waiting"}
    assert offered[OVERVIEW, "job"] == ["agents", "demo"]
    assert {"support", "finder", "sharing", "looping", "spending"} <= {*offered[OVERVIEW, "agent"]}
    assert {"model", "tool:search", "tokens", "cost", "repeats"} <= {*offered[OVERVIEW, "limit"]}


def test_a_hostile_thread_is_found(seen: Seen) -> None:
    """A thread whose id has quotes, backslashes and variables is shown, and no other."""
    panels = [query(f"{THREAD} {each}") for each in ("45 A", "41 A", "43 A", "47 D")]

    def shown() -> list[Any] | None:
        answers = [seen.ask(each, {**ANYTHING, "thread": HOSTILE}) for each in panels]
        if {len(each) for each in answers} == {1} and float(answers[1][0]["value"][1]) > 0:
            return answers
        # A busy machine may leave out a scrape, or an evaluation: there is more to see.
        seen.go_on()
        return None

    [used], _, [left], [allowed] = eventually(shown, seconds=3 * DEADLINE)
    of = {"job": "agents", "agent": "finder", "limit": "tool:search", "thread_id": HOSTILE}
    assert of.items() <= used["metric"].items()
    assert float(used["values"][-1][1]) == 1
    assert float(left["value"][1]) == 0
    assert (float(allowed["value"][1]), allowed["metric"]["unit"]) == (ALLOWED, "calls")


def test_an_export_for_one_job_sees_that_job_only(seen: Seen) -> None:
    """A selector narrows each metric.

    Recorded series are narrowed by the rules, which are exported with the same selector.
    """
    for options, expected in (({}, {"agents", "demo"}), ({"selector": 'job="agents"'}, {"agents"})):
        [job, *_] = board(OVERVIEW, **options).variables
        eventually(lambda: {*seen.offered(job, ANYTHING)} == expected)  # noqa: B023 - at once
