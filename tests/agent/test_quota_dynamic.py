"""Limits whose numbers are functions of the agent's state and runtime."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from langchain_quota import ModelCallLimit, QuotaMiddleware, ToolCallLimit
from langchain_quota.limits import Limit
from tests.agent.conftest import Form
from tests.agent.rules import CONFIG, Scene
from tests.signals import Signals

SEARCHES = {"free": 1, "pro": 3, "unlimited": None}


@dataclass(frozen=True)
class Tenant:
    """What the application knows of its caller."""

    plan: str


class PlanError(Exception):
    """The plan cannot be found."""


def by_plan(state: Any, runtime: Any) -> int | None:
    return SEARCHES[runtime.context.plan]


async def aby_plan(state: Any, runtime: Any) -> int | None:
    return SEARCHES[runtime.context.plan]


class ByPlan:
    """An object that is called like an async function."""

    async def __call__(self, state: Any, runtime: Any) -> int | None:
        return SEARCHES[runtime.context.plan]


functions = pytest.mark.parametrize(
    ("form", "function"),
    [("sync", by_plan), ("async", by_plan), ("async", aby_plan), ("async", ByPlan())],
    ids=["sync", "sync in async", "async", "async object"],
)


class PlannedScene(Scene):
    """A scene whose runs are given a context."""

    plan = "free"

    async def invoke(self, given: Any) -> dict[str, Any]:
        context = Tenant(self.plan)
        if self.form == "sync":
            return dict(self.agent.invoke(given, CONFIG, context=context))
        return dict(await self.agent.ainvoke(given, CONFIG, context=context))


def scene_of(
    signals: Signals, script: Any, *limits: Limit, form: Form = "async", **options: Any
) -> PlannedScene:
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry, **options)
    return PlannedScene(signals, script, [quota], context_schema=Tenant, form=form)


async def turn(scene: PlannedScene, plan: str) -> dict[str, Any]:
    scene.plan = plan
    return await scene.turn()


def failures(signals: Signals, error: type[Exception]) -> float | None:
    return signals.value(
        "langchain_quota_errors_total", component="dynamic_limit", error_type=error.__name__
    )


@functions
@pytest.mark.parametrize(("plan", "runs"), [("free", 1), ("pro", 3), ("unlimited", 4)])
async def test_the_plan_of_a_tenant(
    form: Form, function: Any, plan: str, runs: int, signals: Signals
) -> None:
    """How many calls run is what the function makes of `runtime.context`; `None` is no limit."""
    scene = scene_of(
        signals, [["search"] * 4, "done"], ToolCallLimit("search", run_limit=function), form=form
    )

    await turn(scene, plan)

    assert scene.ran == ["search"] * runs
    assert scene.metric("tool:search", "blocked", "run") == 4 - runs
    scene.check()


@functions
async def test_a_plan_that_changes(form: Form, function: Any, signals: Signals) -> None:
    """A thread keeps its count, and is judged by the plan of each turn."""
    scene = scene_of(
        signals,
        [["search"] * 2, "done", ["search"] * 3, "done", ["search"], "done"],
        ToolCallLimit("search", thread_limit=function),
        form=form,
    )

    ran = []
    for plan in ("free", "pro", "free"):
        await turn(scene, plan)
        ran.append(len(scene.ran))

    assert ran == [1, 3, 3]
    scene.check()


@functions
async def test_model_calls(form: Form, function: Any, signals: Signals) -> None:
    """The limit of model calls is computed, too, and the final message tells its number."""
    scene = scene_of(
        signals, [["search"]] * 3, ModelCallLimit(run_limit=function, thread_limit=99), form=form
    )

    result = await turn(scene, "pro")

    assert len(scene.model.calls) == 3
    assert result["messages"][-1].content == "Model call limits exceeded: run limit (3/3)"
    scene.check()


async def test_the_state_of_the_moment(signals: Signals) -> None:
    """The function sees the state of the step that is judged: the call, and all before it."""
    seen: list[str] = []

    def allowance(state: Any, runtime: Any) -> int:
        newest = state["messages"][-1]
        assert isinstance(newest, AIMessage)
        seen.append(newest.tool_calls[0]["name"] if newest.tool_calls else "none")
        return sum(isinstance(each, HumanMessage) for each in state["messages"])

    scene = scene_of(
        signals,
        [["search"], ["calc"], "done", ["search"], ["calc"], "done"],
        ToolCallLimit(run_limit=allowance),
    )

    await turn(scene, "free")
    assert scene.ran == ["search"]
    await turn(scene, "free")

    # One call in the first turn, two in the second.
    assert scene.ran == ["search", "search", "calc"]
    assert seen == ["search", "calc", "none"] * 2
    scene.check()


async def test_functions_beside_numbers(signals: Signals) -> None:
    """One scope computed, one fixed: whichever is lower at the moment refuses."""
    scene = scene_of(
        signals,
        [["search"] * 4, "done", ["search"] * 4, "done"],
        ToolCallLimit("search", run_limit=by_plan, thread_limit=2),
    )

    await turn(scene, "free")
    assert len(scene.ran) == 1
    await turn(scene, "pro")

    assert len(scene.ran) == 2
    assert scene.metric("tool:search", "blocked", "run") == 3
    assert scene.metric("tool:search", "blocked", "thread") == 3
    scene.check()


async def test_no_gauge_of_a_computed_limit(signals: Signals) -> None:
    """A computed limit has no gauge of its own; a fixed one beside it has."""
    scene = scene_of(
        signals,
        [["search"], "done"],
        ToolCallLimit("search", run_limit=by_plan, thread_limit=9),
        ModelCallLimit(run_limit=by_plan),
    )

    await turn(scene, "pro")

    gauges = {
        (sample.labels["limit"], sample.labels["scope"]): sample.value
        for family in signals.registry.collect()
        if family.name == "langchain_quota_limit"
        for sample in family.samples
    }
    assert gauges == {("tool:search", "thread"): 9}
    assert scene.metric("tool:search", "allowed") == 1
    assert scene.metric("model", "allowed") == 2


async def test_crossings_of_a_computed_limit(signals: Signals) -> None:
    """A call that uses up a computed limit is counted as that."""
    scene = scene_of(signals, [["search"], "done"], ToolCallLimit("search", run_limit=by_plan))

    await turn(scene, "free")

    labels = {"agent": "unnamed", "limit": "tool:search", "scope": "run"}
    assert signals.value("langchain_quota_exhausted_total", **labels) == 1


async def araising(state: Any, runtime: Any) -> int:
    return raising(state, runtime)


def raising(state: Any, runtime: Any) -> int:
    raise PlanError("the plans are down")


raisers = pytest.mark.parametrize(
    ("form", "function"),
    [("sync", raising), ("async", raising), ("async", araising)],
    ids=["sync", "sync in async", "async"],
)


@raisers
@pytest.mark.parametrize("tell_model", [False, True], ids=["", "tell_model"])
@pytest.mark.parametrize("kind", ["model", "tool"])
async def test_one_that_raises(
    form: Form,
    function: Any,
    tell_model: bool,  # noqa: FBT001 - a parameter of the test
    kind: str,
    signals: Signals,
) -> None:
    """A function that raises fails the run with its error, once counted; nothing runs."""
    limit: Limit = (
        ModelCallLimit(run_limit=function) if kind == "model" else ToolCallLimit(run_limit=function)
    )
    scene = scene_of(signals, [["search"], "done"], limit, tell_model=tell_model, form=form)

    with pytest.raises(PlanError, match="the plans are down"):
        await turn(scene, "free")

    assert failures(signals, PlanError) == 1
    assert scene.ran == []
    asked = kind == "tool" and not tell_model
    assert len(scene.model.calls) == (1 if asked else 0)


async def test_after_one_that_raised(signals: Signals) -> None:
    """The turn after a function failed answers what was left over, and charges it to nobody."""
    plans: list[int | Exception] = [PlanError("the plans are down"), 1, 1]

    def function(state: Any, runtime: Any) -> int:
        plan = plans.pop(0)
        if isinstance(plan, Exception):
            raise plan
        return plan

    scene = scene_of(
        signals, [["search"], ["search"], "done"], ToolCallLimit(thread_limit=function)
    )
    with pytest.raises(PlanError):
        await scene.turn()

    await scene.turn()

    assert scene.ran == ["search"]
    assert scene.answers() == [("search", "error"), ("search", "success")]
    scene.check()


BAD_VALUES: list[Any] = [-1, True, 2.5, "3", float("nan"), [1]]


@pytest.mark.parametrize("value", BAD_VALUES, ids=repr)
@pytest.mark.parametrize("scope", ["thread_limit", "run_limit"])
async def test_values_that_are_no_limits(value: Any, scope: str, signals: Signals) -> None:
    """What is no whole number from 0 fails the run with an error that names limit and value."""
    thresholds: Any = {scope: lambda state, runtime: value}
    scene = scene_of(signals, [["search"], "done"], ToolCallLimit(name="budget", **thresholds))

    with pytest.raises(ValueError if value == -1 else TypeError) as raised:
        await scene.turn()

    assert f"{scope} of limit 'budget'" in str(raised.value)
    assert repr(value) in str(raised.value)
    assert scene.ran == []


@pytest.mark.parametrize("function", [aby_plan, ByPlan()], ids=["function", "object"])
@pytest.mark.parametrize("kind", ["model", "tool"])
async def test_an_async_one_under_invoke(
    function: Callable[..., Any], kind: str, signals: Signals
) -> None:
    """An async function under `invoke` is a clear error, and no coroutine is left behind."""
    limit: Limit = (
        ModelCallLimit(run_limit=function, name="budget")
        if kind == "model"
        else ToolCallLimit(run_limit=function, name="budget")
    )
    scene = scene_of(signals, [["search"], "done"], limit, form="sync")

    with pytest.raises(
        RuntimeError, match="run_limit of limit 'budget' is async: call the agent with ainvoke"
    ):
        await turn(scene, "free")
    gc.collect()  # a coroutine that was never awaited warns here, and warnings are errors

    assert scene.ran == []
