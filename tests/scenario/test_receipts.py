"""Receipts: what the runs of a block have used, and meters, the limits without a number.

And histograms of what runs have used when they end: `Telemetry(run_histograms=True)`.
"""

import asyncio
import gc
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any
from weakref import ref

import pytest
from langchain.agents.middleware import before_model
from langchain_core.caches import InMemoryCache
from langchain_core.messages import BaseMessage
from langchain_core.tools import StructuredTool
from langgraph.types import interrupt
from prometheus_client import generate_latest

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    Price,
    Receipt,
    RepeatLimit,
    TimeLimit,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, Kind, Scene, both_forms, delegate, each_kind, either, recording, until
from tests.telemetry import Signals, paid, telling
from tests.tokens import RETRY, ProviderError, answer

PRICES = {"big": Price(input=2, output=8), "small": Price(input=1, output=1)}
METERS: list[Limit] = [
    CostLimit(enforce=False, tool_prices={"search": "0.10"}),
    TokenLimit(enforce=False),
    TimeLimit(enforce=False),
    ToolCallLimit("search", enforce=False),
    ModelCallLimit(enforce=False),
]
ASKED: Any = {"messages": [("user", "hi")]}


def model(*script: Any, name: str = "big") -> ScriptedChatModel:
    return ScriptedChatModel(model=name, script=[*script])


def totals(bill: Any) -> tuple[int, int, int]:
    """The calls of models and tools, and the tokens."""
    models = bill.total("model")
    return models.calls, bill.total("tool").calls, models.total_tokens


@pytest.mark.parametrize("store", [None, MemoryStore()], ids=["state", "store"])
@each_kind
async def test_a_meter_counts_and_limits_nothing(kind: Kind, store: Any, signals: Signals) -> None:
    """Limits without a number count in spans, metrics and the state, and no limit has a series."""
    script = answer(1000, "search"), answer(500)
    options: dict[str, Any] = {"kind": kind, "store": store, "prices": PRICES, "tell_model": True}
    scene = Scene(signals, model(*script), METERS, **options)
    with scene.quota.receipt() as bill:
        await scene.play()
    assert scene.last_text() == "Hello."
    for limit in METERS:
        labels = {"agent": "unnamed", "limit": limit.name}
        counted = scene.metric(limit.name, "allowed"), scene.metric(limit.name, "would_block")
        assert (counted[0] > 0, counted[1]) == (True, 0), limit.name
        assert signals.samples("langchain_quota_limit", **labels) == {}
        assert signals.samples("langchain_quota_limit_near_ratio", **labels) == {}
    assert signals.samples("langchain_quota_errors_total") == {}
    assert b"NaN" not in generate_latest(signals.registry)
    assert totals(bill) == (2, 1, 1500)
    assert bill.dollars == Decimal("0.10") + Decimal(1498 * 2 + 2 * 8) / 10**6


def test_what_users_read() -> None:
    """Receipts and their lines have no public method that writes."""
    line: Any = type(Receipt().total("tool"))
    members = {name for kind in (Receipt, line) for name in dir(kind) if name[0] != "_"}
    assert members == {*line.__slots__, "runs", "seconds", "lines", "total", "dollars", "as_dict"}


async def test_the_tree(signals: Signals) -> None:
    """A receipt shows calls, tokens, costs, refusals and the end, by agent, tool and model."""
    small = model(answer(11, "search"), answer(21, "search"), name="small")
    limit = ToolCallLimit("search", run_limit=1, exit_behavior="end")
    inner = Scene(signals, small, [limit], name="reader", checkpointer=None)
    big, tools = model(answer(101, "delegate"), answer(201)), [delegate(inner.agent)]
    meter = CostLimit(enforce=False)
    scene = Scene(signals, big, [meter], tools=tools, prices=PRICES, name="main")
    with scene.quota.receipt() as bill:
        await scene.play()
    bill.seconds = 1.5
    assert str(bill).splitlines() == [
        "1 run, 1.5s",
        "  all models: 4 calls, 334 tokens, $0.000648",
        "  all tools: 2 calls, 1 blocked by tool:search",
        "  main",
        "    big: 2 calls, 302 tokens, $0.000616",
        "    delegate: 1 call",
        "  reader",
        "    small: 2 calls, 32 tokens, $0.000032",
        "    search: 1 call, 1 blocked by tool:search",
        "    ended by tool:search",
    ]
    plain = json.loads(json.dumps(bill.as_dict()))
    assert (plain["dollars"], plain["models"]["calls"]) == (0.000648, 4)
    assert plain["tools"]["blocked"] == {"tool:search": 1}
    assert plain["ended_by"] == [["reader", "tool:search"]]


async def test_an_answer_from_a_cache(signals: Signals) -> None:
    """A call that LangChain's cache answers is on the bill, and costs nothing."""
    cached = ScriptedChatModel(model="big", script=[answer(60)], cache=InMemoryCache())
    scene = Scene(signals, cached, [CostLimit(enforce=False)], prices=PRICES, checkpointer=None)
    with scene.quota.receipt() as bill:
        await scene.play()
        await scene.play()
    assert totals(bill) == (2, 0, 60)
    assert bill.dollars == Decimal(59 * 2 + 8) / 10**6


async def test_what_is_not_known(signals: Signals) -> None:
    """Without a price there is no cost, which is not 0; unreported tokens are estimates."""
    options: dict[str, Any] = {"prices": PRICES, "unknown_price": "allow"}
    for limit, more in ((ModelCallLimit(run_limit=5), {}), (CostLimit(enforce=False), options)):
        scene = Scene(signals, model("Hello.", name="new"), [limit], **more)
        with scene.quota.receipt() as bill:
            await scene.play()
        assert (bill.dollars, bill.as_dict()["dollars"]) == (None, None)
        assert (bill.total("model").calls, bill.total("model").estimated) == (1, 1)
        assert "cost unknown" in str(bill)


@both_forms
async def test_an_interrupt(form: Form, signals: Signals) -> None:
    """Of an interrupt and its resume in two blocks each has its part."""
    ask = recording("ask", [], lambda: interrupt("May I?"))
    script = answer(10, "ask"), answer(20)
    scene = Scene(signals, model(*script), [TokenLimit(run_limit=99)], tools=[ask], form=form)
    with scene.quota.receipt() as first:
        await scene.play()
    with scene.quota.receipt() as second:
        await scene.resume("yes")
    assert [totals(each) for each in (first, second)] == [(1, 0, 10), (1, 1, 20)]
    assert (first.runs, second.runs) == (1, 1)


@both_forms
async def test_nested_and_beside(form: Form, signals: Signals) -> None:
    """Nested receipts both get the numbers; one task or thread does not see what another runs."""

    async def play(tokens: int) -> list[int]:
        scene = Scene(signals, lambda _: answer(tokens), [TokenLimit(run_limit=99)], form=form)
        quota = scene.quota
        with quota.receipt() as outer:
            await scene.play()
            with quota.receipt() as inner:
                await scene.agent.abatch([ASKED] * 2, scene.config)
                async for _ in scene.agent.astream(ASKED, scene.config):
                    pass
        await scene.play()
        return [outer.total("model").total_tokens, inner.total("model").total_tokens, outer.runs]

    if form == "async":
        results = await asyncio.gather(*map(play, (1, 2, 3)))
    else:
        with ThreadPoolExecutor() as threads:
            results = [*threads.map(lambda tokens: asyncio.run(play(tokens)), (1, 2, 3))]
    assert results == [[4, 3, 4], [8, 6, 4], [12, 9, 4]]


async def test_calls_that_do_not_run(signals: Signals) -> None:
    """Refunded and skipped calls are not on the bill; retries, and calls that fail, are."""
    refused = asyncio.Event()
    limits: list[Limit] = [
        ConcurrencyLimit("search", max_concurrency=1, wait=0),
        CostLimit(run_limit=1, tool_prices={"search": "0.10", "calc": "0.01"}),
        # A call that several limits charge is paid once.
        CostLimit(name="day", run_limit=1, tool_prices={"search": "0.08"}),
    ]
    script = answer(10, "search", "search", "calc"), ProviderError(), answer(20)
    scene = Scene(
        signals,
        model(*script),
        [RETRY, *limits],
        tools=[recording("search", [], refused.wait), "calc"],
        prices=PRICES,
        store=MemoryStore(),
        on_decision=lambda each: refused.set() if each.outcome == "blocked" else None,
    )
    with scene.quota.receipt() as bill:
        await scene.play()
    assert bill.total("tool").blocked == {"concurrency:search": 1}
    calls = [(line.name, line.calls) for line in bill.lines]
    assert calls == [("big", 3), ("calc", 1), ("search", 1)]
    assert bill.total("tool").nanodollars == 110_000_000


async def test_nothing_is_kept(signals: Signals) -> None:
    """After the block a receipt counts nothing more, keeps no run, and is freed with its name."""
    started, goes_on = asyncio.Event(), asyncio.Event()

    def search() -> Any:
        started.set()
        return goes_on.wait()

    tool = recording("search", [], search)
    script = [answer(10, "search"), answer(20)]
    scene = Scene(signals, model(*script), [TokenLimit(run_limit=99)], tools=[tool])
    with scene.quota.receipt() as bill:
        run = asyncio.create_task(scene.play())
        await started.wait()
    goes_on.set()
    await run

    def is_freed(kept: Any) -> bool:
        gc.collect()
        return kept() is None

    # The event loop lets go of its tasks and contexts by and by.
    kept = ref(scene.model)
    del scene, run, tool
    await until(lambda: is_freed(kept))
    assert (totals(bill), bill.running) == ((1, 1, 10), {})
    freed = ref(bill)
    del bill
    await until(lambda: is_freed(freed))


USED = "langchain_quota_run_used"
MODEL, SEARCH = ModelCallLimit(run_limit=99, name="model"), ToolCallLimit("search", run_limit=2)


@pytest.fixture
def observing() -> Signals:
    return telling(run_histograms=True)


def observed(signals: Signals, limit: str, unit: str = "", agent: str = "unnamed") -> list[float]:
    """How many runs were observed, none beyond the last bucket, and what they used together."""
    buckets = signals.samples(f"{USED}{unit}_bucket", agent=agent, limit=limit)
    assert len({*[*buckets.values()][-2:]}) <= 1
    values = (
        signals.value(f"{USED}{unit}_{part}", agent=agent, limit=limit) for part in ("count", "sum")
    )
    return [-1 if value is None else value for value in values]


def turns(*numbers: int) -> Callable[[Sequence[BaseMessage]], Any]:
    """A script that calls so many tools in each run, one after the other, for 10 tokens a call."""

    def script(messages: Sequence[BaseMessage]) -> Any:
        asked = [index for index, each in enumerate(messages) if each.type == "human"]
        called = sum(each.type == "ai" for each in messages[asked[-1] :])
        return paid(10, *(["search"] if called < numbers[len(asked) - 1] else []))

    return script


@both_forms
@either
async def test_each_run_of_a_thread_is_observed(kind: Kind, form: Form, observing: Signals) -> None:
    """With its calls, tokens, dollars and seconds; refused calls and other runs do not count."""
    limits: list[Limit] = [
        *(MODEL, SEARCH, RepeatLimit(9, name="repeats")),
        *(TokenLimit(thread_limit=9_999), TimeLimit(run_limit="1h")),
        CostLimit(run_limit=9, tool_prices={"search": Decimal("0.25")}),
    ]
    options: Any = {"kind": kind, "form": form, "prices": lambda usage: Decimal(0)}
    scene = Scene(observing, turns(0, 1, 4), limits, **options)
    for _ in range(3):
        await scene.play()
    assert observed(observing, "model") == [3, 1 + 2 + 5]
    assert observed(observing, "tool:search") == [3, 0 + 1 + 2]
    assert observed(observing, "tokens", "_tokens") == [3, 80]
    assert observed(observing, "cost", "_dollars") == [3, 0.75]
    spent = observing.samples("langchain_quota_spent_seconds_total", limit="time")
    assert observed(observing, "time", "_seconds") == pytest.approx([3, sum(spent.values())])
    assert observed(observing, "repeats") == [-1, -1]


async def test_a_run_that_waits_for_a_person_counts_once(observing: Signals) -> None:
    """When it really ends, with what it used before; a run that raises does not count."""

    def ask() -> Any:
        return interrupt("May I?")

    def fail() -> Any:
        raise RuntimeError("the tool failed")

    ran: list[str] = []
    tools = [recording("search", ran, ask), recording("fail", ran, fail)]
    script = [paid(1, "search"), paid(1), paid(1, "fail")]
    scene = Scene(observing, script, [MODEL], tools=tools, ran=ran)
    assert "__interrupt__" in await scene.play()
    # The series begins at 0, so that `increase()` sees the first run.
    assert observed(observing, "model") == [0, 0]
    await scene.resume("yes")
    assert observed(observing, "model") == [1, 2]
    with pytest.raises(RuntimeError, match="the tool failed"):
        await scene.play()
    assert observed(observing, "model") == [1, 2]


@pytest.mark.parametrize("how", ["end", "direct", "jump"])
async def test_all_ends_count(how: str, observing: Signals) -> None:
    """A limit's end, a tool that returns directly, and another middleware that ends the run."""
    options: Any = {"name": "search", "description": "Search.", "return_direct": how == "direct"}

    def search() -> str:
        time.sleep(0.01)
        return "42"

    direct = StructuredTool.from_function(search, **options)
    limit = ToolCallLimit("search", run_limit=1, exit_behavior="end")

    @before_model(can_jump_to=["end"])
    async def jump(state: Any, runtime: Any) -> Any:
        ends = how == "jump" and state["messages"][-1].type == "tool"
        return {"jump_to": "end"} if ends else None

    scene = Scene(observing, turns(9), [jump, limit, TimeLimit(run_limit="1h")], tools=[direct])
    await scene.play()
    assert observed(observing, "tool:search") == [1, 1]
    spent = sum(observing.samples("langchain_quota_spent_seconds_total", limit="time").values())
    assert observed(observing, "time", "_seconds") == pytest.approx([1, spent])


async def test_a_sub_agents_run_is_its_own(observing: Signals) -> None:
    """A sub-agent in a tool is observed under its name, and its calls are not the outer agent's."""
    helper = Scene(observing, turns(1, 0), [MODEL], name="helper")
    tool = recording("search", [], lambda: helper.play(thread_id="2"))
    await Scene(observing, turns(2), [MODEL], tools=[tool], name="boss").play()
    assert observed(observing, "model", agent="boss") == [1, 3]
    assert observed(observing, "model", agent="helper") == [2, 3]


@pytest.mark.parametrize("kind", ["quota", "drop-in", "graph"])
async def test_where_there_are_none(kind: Kind, signals: Signals, observing: Signals) -> None:
    """Without the option there is no node and no series; drop-ins and graphs never have them."""
    scene = Scene(signals if kind == "quota" else observing, turns(1), [MODEL], kind=kind)
    await scene.play()
    assert not [name for name in scene.agent.nodes if "after_agent" in name]
    assert observed(scene.signals, "model") == [-1, -1]
