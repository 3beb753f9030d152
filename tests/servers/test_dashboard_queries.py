"""Every query of the dashboards, asked of a real Prometheus that scraped real agents."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.messages.ai import UsageMetadata
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider
from prometheus_client import CollectorRegistry

from langchain_quota import (
    CostLimit,
    MemoryStore,
    Price,
    Quota,
    QuotaMiddleware,
    QuotaStore,
    RedisStore,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitMiddleware,
    start_metrics_server,
)
from tests.grafana import ALL, Board, Query, Values, Variable, boards, interpolate
from tests.servers.agents import build_agent, run
from tests.servers.conftest import StartPrometheus
from tests.servers.demo import running_demo
from tests.servers.prometheus import Prometheus, eventually

pytestmark = pytest.mark.filterwarnings("ignore:model .* reports no usage")

OVERVIEW, THREAD = "langchain-quota-overview", "langchain-quota-thread"

CUSTOMERS = [f"customer-{number}" for number in range(1, 5)]

HOSTILE = 'a"b\\c\'d $job {x=~"\\.+"} ü'
BACKSLASH = "a\\b"
QUIET = "quiet"
SHARING = "sharing"
LOOPING = "looping"
SPENDING = "spending"
ASKING = "asking"
APPROVED = {"decisions": [{"type": "approve"}]}
ALLOWED = 4
"""How often the agents of the second job may search on a thread."""
TRIED = 7
"""How often they try on the hostile one."""

ANYTHING: Values = dict.fromkeys(("job", "instance", "agent", "limit"), ALL)


class BrokenProcessor(SpanProcessor):
    """A tracer that fails whenever a span begins."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        raise RuntimeError("this tracer is broken")


@dataclass(frozen=True)
class Seen:
    """A Prometheus that has scraped two jobs, and since when."""

    prometheus: Prometheus
    began: float

    def ask(self, query: Query, values: Values) -> list[Any]:
        """The series that a query gives, as Grafana would ask it."""
        parameters = {"query": interpolate(query.expr, values)}
        if query.over_time:
            span = {"start": self.began, "end": time.time(), "step": "1s"}
            return self.prometheus.result("query_range", **parameters, **span)
        return self.prometheus.result("query", **parameters)

    def offered(self, variable: Variable, values: Values) -> list[str]:
        """The values that a variable offers."""
        if variable.expr:
            lines = self.prometheus.result("query", query=interpolate(variable.expr, values))
            return [each["metric"][variable.label] for each in lines]
        selector = interpolate(variable.selector, values)
        found: list[str] = self.prometheus._get(
            f"/api/v1/label/{variable.label}/values", **{"match[]": selector}
        )
        return found

    def everything(self, board: Board) -> Values:
        """All values of all variables."""
        values: dict[str, str | list[str]] = {**ANYTHING}
        for variable in board.variables:
            if variable.expr:
                values[variable.name] = self.offered(variable, values)
        return values


def wait_for_scrapes(prometheus: Prometheus, count: int) -> None:
    """Wait until every job was scraped so many times more."""
    scrapes = "min(count_over_time(up[1h]) and up == 1)"
    before = prometheus.value(scrapes) or 0
    eventually(lambda: (prometheus.value(scrapes) or 0) >= before + count)


class Searchers:
    """Agents of the second job; their tracer fails."""

    def __init__(self, registry: CollectorRegistry) -> None:
        provider = TracerProvider()
        provider.add_span_processor(BrokenProcessor())
        telemetry = Telemetry(
            registry=registry, tracer_provider=provider, subject_label={"tenant": str}
        )
        self._saver = InMemorySaver()
        self._limiter = ToolCallLimitMiddleware(
            tool_name="search", thread_limit=ALLOWED, telemetry=telemetry
        )
        self._once = ToolCallLimitMiddleware(tool_name="search", run_limit=1, telemetry=telemetry)
        # One store that answers, and one that nobody listens for.
        stores: list[QuotaStore] = [MemoryStore(), RedisStore("redis://127.0.0.1:1")]
        hour = timedelta(hours=1)
        limit = ToolCallLimit(
            "search",
            quotas=[
                Quota(100, per="global", window=hour),
                Quota(10, per="tenant", window=hour),
                Quota(ALLOWED, per="thread", window=hour),
            ],
        )
        self._sharing = [
            QuotaMiddleware([limit], store=store, on_store_error="allow", telemetry=telemetry)
            for store in stores
        ]
        self._waiting = QuotaMiddleware([ToolCallLimit("search", at_once=1)], telemetry=telemetry)
        of_all = [
            [Quota(most, per=per, window=hour) for per in ("global", "tenant", "thread")]
            for most in (10_000, 1)
        ]
        self._store = MemoryStore()
        self._budgets = QuotaMiddleware(
            [
                TokenLimit(run_limit=10_000, quotas=of_all[0]),
                CostLimit(run_limit=1, quotas=of_all[1]),
            ],
            prices={"priced": Price(input=3, output=15)},
            unknown_price="allow",
            store=self._store,
            telemetry=telemetry,
        )
        self._asking = QuotaMiddleware(
            [
                ToolCallLimit("search", run_limit=1, exit_behavior="ask"),
                TokenLimit(run_limit=30, exit_behavior="ask"),
                CostLimit(run_limit=30, exit_behavior="ask"),
            ],
            prices=lambda usage: Decimal(usage.total_tokens),
            telemetry=telemetry,
        )

    def search(self, thread: str, times: int) -> None:
        """Search in one run on a thread."""
        script = [["search"] * times, "done"]
        run(build_agent(script, [self._limiter], name="finder", saver=self._saver), thread)

    def loop(self) -> None:
        """Search again and again, though the limit of a run refuses it."""
        script = [["search"], ["search"], ["search"], "done"]
        run(build_agent(script, [self._once], name="looping", saver=self._saver), LOOPING)

    def share(self) -> None:
        """Search under quotas that are shared in stores."""
        for middleware in self._sharing:
            agent = build_agent([["search"], "done"], [middleware], name="sharing")
            config = {"configurable": {"thread_id": SHARING}}
            asyncio.run(agent.ainvoke({"messages": []}, config, context={"tenant": "acme"}))

    def wait(self) -> None:
        """Search several times at once, where one search at a time may run."""
        run(build_agent([["search"] * 4, "done"], [self._waiting], name="sharing"))

    def spend(self) -> None:
        """Spend tokens and dollars, after a grant; a part is estimated, and a part has no price."""
        for counter, more in (("model.total_tokens", 100), (CostLimit.counter, "0.50")):
            self._store.grant(f"{counter}:tenant:acme", more, window=timedelta(hours=1))
        used = UsageMetadata(input_tokens=20, output_tokens=10, total_tokens=30)
        answers = [
            AIMessage("", response_metadata={"model_name": model}, usage_metadata=reported)
            for model, reported in (("priced", used), ("priced", None), ("unpriced", used))
        ]
        for answer in answers:
            agent = build_agent([answer], [self._budgets], name="spending", saver=self._saver)
            config = {"configurable": {"thread_id": SPENDING}}
            asyncio.run(agent.ainvoke({"messages": []}, config, context={"tenant": "acme"}))

    def ask(self) -> None:
        """Ask a person at limits of calls, tokens and dollars, who approves."""
        used = UsageMetadata(input_tokens=20, output_tokens=10, total_tokens=30)
        calls = [ToolCall(name="search", args={}, id=f"call-{number}") for number in range(2)]
        answers = [AIMessage("", tool_calls=calls, usage_metadata=used), AIMessage("done")]
        agent = build_agent(answers, [self._asking], name=ASKING, saver=self._saver)
        run(agent, ASKING)
        config = {"configurable": {"thread_id": ASKING}}
        while agent.get_state(config).interrupts:
            asyncio.run(agent.ainvoke(Command(resume=APPROVED), config))


@pytest.fixture(scope="module")
def seen(
    start_prometheus: StartPrometheus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    """The demo, and agents that were at work before their first scrape and after it."""
    output = tmp_path_factory.mktemp("demo") / "output"
    registry = CollectorRegistry()
    searchers = Searchers(registry)
    searchers.search(HOSTILE, TRIED)
    searchers.search(BACKSLASH, 1)
    searchers.search(QUIET, 1)
    searchers.share()
    searchers.wait()
    searchers.loop()
    searchers.spend()
    searchers.ask()
    began = time.time()
    with (
        running_demo(output, threads=len(CUSTOMERS)) as demo,
        start_metrics_server(port=0, registry=registry) as server,
    ):
        agents = f"{server.addr}:{server.port}"
        prometheus = start_prometheus({"demo": demo.address, "agents": agents})
        wait_for_scrapes(prometheus, 2)
        searchers.search(QUIET, 1)
        searchers.share()
        searchers.wait()
        searchers.loop()
        searchers.spend()
        searchers.ask()
        demo.wait_for_end_of_traffic()
        wait_for_scrapes(prometheus, 4)
        yield Seen(prometheus, began)
        demo.check()


def board(uid: str) -> Board:
    """A dashboard."""
    [found] = [each for each in boards() if each.uid == uid]
    return found


def query(where: str) -> Query:
    """A query of a dashboard."""
    [found] = [each for board in boards() for each in board.queries if each.where == where]
    return found


def choices(board: Board, seen: Seen, *, everything: bool) -> Iterator[Values]:
    """What can be chosen for the variables: all or each value, and one thread after the other."""
    values: dict[str, str | list[str]] = {}
    after_thread: list[Variable] = []
    thread: Variable | None = None
    for variable in board.variables:
        if thread is not None:
            after_thread.append(variable)
        elif variable.expr:
            values[variable.name] = seen.offered(variable, values)
        elif variable.several:
            values[variable.name] = ALL if everything else seen.offered(variable, values)
        else:
            thread = variable
    if thread is None:
        yield values
        return
    for each in seen.offered(thread, values):
        chosen = {**values, thread.name: each}
        for variable in after_thread:
            chosen[variable.name] = ALL if everything else seen.offered(variable, chosen)
        yield chosen


@pytest.mark.parametrize("everything", [True, False], ids=["all", "each"])
def test_every_query_returns_data(seen: Seen, *, everything: bool) -> None:
    """Each query finds something; but no alert fires, and nothing is hidden, unjudged or lost."""
    empty = set()
    for board in boards():
        chosen = list(choices(board, seen, everything=everything))
        assert chosen
        for query in board.queries:
            if not any(seen.ask(query, values) for values in chosen):
                empty.add(query.where)
    assert empty == {f"{OVERVIEW} {panel}" for panel in ("15 B", "20 A", "24 A", "32 A")}


def test_every_variable_offers_values(seen: Seen) -> None:
    """The variables offer the jobs, processes, agents, limits and threads that there are."""
    offered: dict[str, set[str]] = {}
    for board in boards():
        for values in choices(board, seen, everything=True):
            for variable in board.variables:
                found = seen.offered(variable, values)
                # A thread that has limits of runs alone has used nothing of a limit of its own.
                assert found or values.get("thread") in {LOOPING, ASKING}, variable
                offered.setdefault(variable.name, set()).update(found)
    assert len(offered.pop("instance")) == 2
    assert {HOSTILE, LOOPING} <= offered.pop("refused") <= {*CUSTOMERS, HOSTILE, LOOPING}
    assert offered == {
        "job": {"demo", "agents"},
        "agent": {"support", "finder", "sharing", "looping", "spending", ASKING},
        "limit": {
            *("model", "tool:*", "tool:search", "tokens", "cost"),
            *("repeats", "search at once"),
        },
        "thread": {*CUSTOMERS, HOSTILE, BACKSLASH, QUIET, SHARING, LOOPING, SPENDING, ASKING},
        "nearest": {*CUSTOMERS, HOSTILE, BACKSLASH, QUIET, SHARING},
        "nearest_money": {SPENDING},
        "nearest_tokens": {*CUSTOMERS, SPENDING},
    }


def test_exemplars(seen: Seen) -> None:
    """Where a panel shows exemplars, there are some."""
    asked = [each for board in boards() for each in board.queries if each.exemplar]
    assert asked
    for each in asked:
        assert seen.prometheus.exemplars(interpolate(each.expr, ANYTHING)), each.where


def test_a_hostile_thread_is_found(seen: Seen) -> None:
    """A thread whose id has quotes, backslashes and variables is shown, and no other."""
    one = board(THREAD)
    [values] = [each for each in choices(one, seen, everything=True) if each["thread"] == HOSTILE]
    [used] = seen.ask(query(f"{THREAD} 6 A"), values)
    assert used["metric"] == {
        "job": "agents",
        "agent": "finder",
        "limit": "tool:search",
        "thread_id": HOSTILE,
    }
    assert float(used["values"][-1][1]) == ALLOWED
    [refused] = seen.ask(query(f"{THREAD} 4 A"), values)
    assert float(refused["value"][1]) == TRIED - ALLOWED


def labels_of_links(seen: Seen) -> Mapping[str, str | None]:
    """The label for links to traces, by thread."""
    return {
        series["metric"]["thread_id"]: series["metric"].get("traced")
        for series in seen.ask(query(f"{OVERVIEW} 6 B"), seen.everything(board(OVERVIEW)))
    }


def test_only_harmless_ids_stand_in_links_to_traces(seen: Seen) -> None:
    """An id that could break out of the link's query is left out of it."""
    assert labels_of_links(seen) == {
        **{customer: customer for customer in CUSTOMERS},
        QUIET: QUIET,
        SHARING: SHARING,
        HOSTILE: None,
        BACKSLASH: None,
    }


def test_refusals_before_the_first_scrape_are_counted(seen: Seen) -> None:
    """What a process refused before Prometheus knew it is in the sum; increase() misses it."""
    values: Values = {**ANYTHING, "job": ["agents"], "agent": ["finder"]}
    [refused] = seen.ask(query(f"{OVERVIEW} 1 A"), values)
    assert float(refused["value"][1]) == TRIED - ALLOWED
    blocked = 'langchain_quota_calls_total{agent="finder",decision="blocked"}'
    assert seen.prometheus.value(f"sum(increase({blocked}[1h]))") == 0
    [share] = seen.ask(query(f"{OVERVIEW} 2 A"), values)
    # increase() guesses what happened between the edges of a range and the nearest scrapes.
    judged = TRIED + 3
    assert float(share["value"][1]) == pytest.approx((TRIED - ALLOWED) / judged, rel=0.15)


def test_threads_are_ranked(seen: Seen) -> None:
    """The fullest threads with calls left come first; the exhausted ones come last."""

    def by_thread(where: str) -> dict[tuple[str, str], float]:
        return {
            (each["metric"]["thread_id"], each["metric"]["limit"]): float(each["value"][1])
            for each in seen.ask(query(where), seen.everything(board(OVERVIEW)))
        }

    share, rank = by_thread(f"{OVERVIEW} 6 B"), by_thread(f"{OVERVIEW} 6 G")
    assert share.keys() == rank.keys()

    assert any(use >= 1 for use in share.values())
    assert rank == {who: 0 if use >= 1 else pytest.approx(use) for who, use in share.items()}


def test_an_export_for_one_job_sees_that_job_only(seen: Seen) -> None:
    """With a selector every query and variable is narrowed, whatever is chosen."""
    [narrowed] = [each for each in boards(selector='job="agents"') if each.uid == OVERVIEW]
    for variable in narrowed.variables:
        if variable.name == "job":
            assert seen.offered(variable, ANYTHING) == ["agents"]
    assert jobs(seen, narrowed) == {"agents"}
    assert jobs(seen, board(OVERVIEW)) == {"agents", "demo"}


def jobs(seen: Seen, board: Board) -> set[str]:
    """The jobs that all queries of a dashboard find something of."""
    values = seen.everything(board)
    return {
        series["metric"]["job"]
        for query in board.queries
        for series in seen.ask(query, values)
        if "job" in series["metric"]
    }
