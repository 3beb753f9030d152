"""`on_decision`: callables that are given every decision, before the agent goes on."""

import asyncio
import functools
import gc
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from langchain_quota import (
    Decision,
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import captured_decisions
from tests.scene import Form, Scene
from tests.signals import Signals

Seen = tuple[str, str]


class BillingError(Exception):
    """The billing is down."""


def scene_of(
    signals: Signals,
    script: Any,
    limits: Sequence[Limit],
    on_decision: Any,
    *,
    form: Form = "async",
    **options: Any,
) -> Scene:
    quota = QuotaMiddleware(limits, on_decision=on_decision, telemetry=signals.telemetry)
    return Scene(signals, script, [quota], **options, form=form)


def tale(decisions: Sequence[Decision]) -> list[Seen]:
    return [(each.call.tool or "model", str(each.outcome)) for each in decisions]


class Observers:
    """Observers of every kind, all writing down what they see."""

    def __init__(self) -> None:
        self.seen: list[Decision] = []

    def sync(self, decision: Decision) -> None:
        self.seen.append(decision)

    async def awaited(self, decision: Decision) -> None:
        await asyncio.sleep(0)
        self.seen.append(decision)

    async def partial(self, note: str, decision: Decision) -> None:
        await self.awaited(decision)

    def returned(self, decision: Decision) -> Any:
        """A plain function that returns something to wait for."""
        return self.awaited(decision)

    async def __call__(self, decision: Decision) -> None:
        await self.awaited(decision)


def observer_of(kind: str, observers: Observers) -> Any:
    return {
        "sync": observers.sync,
        "async": observers.awaited,
        "partial": functools.partial(observers.partial, "note"),
        "object": observers,
        "returned": observers.returned,
    }[kind]


ASYNC_KINDS = ["async", "partial", "object", "returned"]
kinds = pytest.mark.parametrize(
    ("form", "kind"), [("sync", "sync"), ("async", "sync"), *(("async", k) for k in ASYNC_KINDS)]
)

LIMITS: list[Limit] = [
    ModelCallLimit(run_limit=3),
    ToolCallLimit("search", run_limit=1),
    ToolCallLimit("calc", run_limit=1, enforce=False),
]


@kinds
async def test_a_hook_that_runs_again(form: Form, kind: str, signals: Signals) -> None:
    """A run that goes on after an error repeats the hook that raised: nothing is recorded twice."""
    observers = Observers()
    scene = scene_of(
        signals,
        [["search"]],
        [ToolCallLimit("search", run_limit=0, exit_behavior="error")],
        observer_of(kind, observers),
        form=form,
    )

    with captured_decisions() as decisions:
        for again in (scene.play, scene.go_on, scene.go_on):
            with pytest.raises(ToolCallLimitExceededError):
                await again()

    assert tale(decisions) == [("model", "allowed"), ("search", "blocked")]
    assert tale(observers.seen) == tale(decisions)


class Failing:
    """Observers that raise."""

    def sync(self, decision: Decision) -> None:
        raise BillingError(decision.call.tool)

    async def awaited(self, decision: Decision) -> None:
        await asyncio.sleep(0)
        raise BillingError(decision.call.tool)


@pytest.mark.parametrize(
    ("form", "observer"),
    [("sync", Failing().sync), ("async", Failing().sync), ("async", Failing().awaited)],
    ids=["sync", "sync in async", "async"],
)
async def test_one_that_raises(
    form: Form, observer: Any, signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """What an observer raises is counted each time and logged once; agent and others go on."""
    observers = Observers()
    scene = scene_of(
        signals, [["search", "search"], "done"], LIMITS[1:], [observer, observers.sync], form=form
    )

    with caplog.at_level(logging.ERROR, "langchain_quota"):
        result = await scene.play()

    assert result["messages"][-1].content == "done"
    assert scene.ran == ["search"]
    assert tale(observers.seen) == [
        ("model", "allowed"),
        ("search", "allowed"),
        ("search", "blocked"),
        ("model", "allowed"),
    ]
    errors = signals.value(
        "langchain_quota_errors_total", component="observer", error_type="BillingError"
    )
    assert errors == 4
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert record.name == "langchain_quota"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], BillingError)
    assert scene.metric("tool:search", "blocked", "run") == 1


async def test_an_async_one_under_invoke(signals: Signals) -> None:
    """Under the sync path an async observer is refused at the first call, before anything runs."""
    observers = Observers()
    for kind in ASYNC_KINDS:
        for others in ([], [lambda _decision: None]):
            given = [*others, observer_of(kind, observers)]
            scene = scene_of(signals, [["search"], "done"], LIMITS, given, form="sync")
            with pytest.raises(RuntimeError, match=r"on_decision=.* is async: call the agent with"):
                await scene.play()
            assert (scene.model.calls, scene.ran, observers.seen) == ((), [], [])
    gc.collect()  # a coroutine that was never awaited warns here, and warnings are errors


@pytest.mark.parametrize("given", ["print", 3, [print, 3], None], ids=repr)
def test_what_cannot_observe(given: Any) -> None:
    """Anything but functions is an error that shows the argument."""
    with pytest.raises(TypeError, match="on_decision must be a function or several"):
        QuotaMiddleware([ModelCallLimit(run_limit=1)], on_decision=given)
