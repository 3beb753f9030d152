"""Limits whose numbers are functions of the agent's state and runtime."""

from dataclasses import dataclass
from typing import Any

import pytest

from langchain_quota import QuotaMiddleware, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import CONFIG, Form, Scene
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
    return await scene.play()


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
        await scene.play()

    await scene.play()

    assert scene.ran == ["search"]
    assert scene.answers() == [("search", "error"), ("search", "success")]
    scene.check()
