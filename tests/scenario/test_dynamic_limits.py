"""Limits whose numbers are functions of the agent's state and runtime."""

import gc
import warnings
from typing import Any

import pytest

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import Form, Kind, Scene, asking, either
from tests.telemetry import Signals


class PlanError(Exception):
    """The plan cannot be found."""


def by_plan(state: Any, runtime: Any) -> int | None:
    plan = runtime.context["plan"]
    if plan == "unknown":
        raise PlanError("the plans are down")
    return {"free": 1, "pro": 3, "unlimited": None}[plan]


async def aby_plan(state: Any, runtime: Any) -> int | None:
    return by_plan(state, runtime)


class ByPlan:
    """An object that is called like an async function."""

    async def __call__(self, state: Any, runtime: Any) -> int | None:
        return by_plan(state, runtime)


functions = pytest.mark.parametrize(
    ("form", "function"),
    [("sync", by_plan), ("async", by_plan), ("async", aby_plan), ("async", ByPlan())],
    ids=["sync", "sync in async", "async", "async object"],
)


@functions
async def test_a_plan_that_changes(form: Form, function: Any, signals: Signals) -> None:
    """A thread keeps its count, and is checked by the plan of each turn; `None` is no limit."""
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=function),
        ModelCallLimit(run_limit=lambda state, runtime: 2, thread_limit=99),
    ]
    scene = Scene(signals, asking(*["search"] * 3), limits, form=form)
    ran = []
    for plan in ("free", "pro", "free", "unlimited"):
        await scene.play(context={"plan": plan})
        ran.append(len(scene.ran))
    assert ran == [1, 3, 3, 6]
    gauges = signals.samples("langchain_quota_limit", agent="unnamed")
    assert gauges == {("model", "thread", "calls"): 99}
    exhausted = signals.samples("langchain_quota_crossings_total", level="exhausted")
    assert exhausted["unnamed", "tool:search", "thread"] >= 1
    scene.check()


@functions
@either
async def test_one_that_raises(form: Form, function: Any, kind: Kind, signals: Signals) -> None:
    """A function that raises fails the run, once counted; the next turn is charged to nobody."""
    limit = ToolCallLimit("search", thread_limit=function)
    scene = Scene(signals, [["search"], ["search"], "done"], [limit], kind=kind, form=form)
    with pytest.raises(PlanError, match="the plans are down"):
        await scene.play(context={"plan": "unknown"})
    labels = {"component": "dynamic_limit", "error_type": "PlanError"}
    assert signals.value("langchain_quota_errors_total", **labels) == 1
    assert (scene.ran, len(scene.model.calls)) == ([], 1)
    await scene.play(context={"plan": "free"})
    assert scene.ran == ["search"]
    scene.check()


@pytest.mark.parametrize("function", [aby_plan, ByPlan()], ids=["function", "object"])
@pytest.mark.parametrize("kind", [ModelCallLimit, ToolCallLimit])
async def test_an_async_one_under_invoke(kind: Any, function: Any, signals: Signals) -> None:
    """An async function under `invoke` is a clear error, and no coroutine is left behind."""
    with warnings.catch_warnings(action="ignore"):
        gc.collect()  # what tests before this one have left
    limit = kind(run_limit=function, name="budget")
    scene = Scene(signals, [["search"], "done"], [limit], form="sync")
    match = "run_limit of limit 'budget' is async: call the agent with ainvoke"
    with pytest.raises(RuntimeError, match=match):
        await scene.play(context={"plan": "free"})
    gc.collect()  # a coroutine that was never awaited warns here, and warnings are errors
    assert scene.ran == []
