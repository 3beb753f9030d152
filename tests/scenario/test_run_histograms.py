"""Histograms of what runs have used when they end: `Telemetry(run_histograms=True)`."""

import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware, hook_config
from langchain_core.messages import BaseMessage
from langchain_core.tools import StructuredTool
from langgraph.types import interrupt

from langchain_quota import (
    CostLimit,
    ModelCallLimit,
    RepeatLimit,
    TimeLimit,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from tests.scene import Form, Kind, Scene, both_forms, either, recording
from tests.telemetry import Signals, paid, telling

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

    class Jump(AgentMiddleware[Any, Any]):
        @hook_config(can_jump_to=["end"])
        async def abefore_model(self, state: Any, runtime: Any) -> Any:
            ends = how == "jump" and state["messages"][-1].type == "tool"
            return {"jump_to": "end"} if ends else None

    scene = Scene(observing, turns(9), [Jump(), limit, TimeLimit(run_limit="1h")], tools=[direct])
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
