"""QuotaMiddleware beside other limiters and other middlewares, and hooks that run again."""

import asyncio
from typing import Any

import pytest

from langchain_quota import (
    Decision,
    ModelCallLimit,
    Outcome,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from tests.scene import Order, Scene, in_order, model_limiter, orders
from tests.signals import Signals


class OtherQuota(QuotaMiddleware[Any, Any]):
    """A second one, which LangChain tells apart by its class."""


@orders(2)
@pytest.mark.parametrize("second", ["quota", "drop-in"])
async def test_two_that_count_the_model(order: Order, second: str, signals: Signals) -> None:
    """Two middlewares that would charge each model call twice: an error that says what to do."""
    quota = QuotaMiddleware([ModelCallLimit(run_limit=4)], telemetry=signals.telemetry)
    other: Any = (
        OtherQuota([ModelCallLimit(run_limit=4, name="other")], telemetry=signals.telemetry)
        if second == "quota"
        else model_limiter(signals, run_limit=4)
    )
    scene = Scene(signals, ["done"], in_order(order, quota, other))
    with pytest.raises(RuntimeError, match="all model limits into one QuotaMiddleware"):
        await scene.play()


async def test_another_decision_on_resume(signals: Signals) -> None:
    """A refused run goes on under a larger plan: what it does now is counted and logged."""
    plan = {"searches": 1}

    def searches(state: Any, runtime: Any) -> int:
        return plan["searches"]

    seen: list[Decision] = []
    quota = QuotaMiddleware(
        [
            ToolCallLimit(
                "search",
                thread_limit=lambda state, runtime: plan["searches"],
                exit_behavior="error",
            )
        ],
        on_decision=seen.append,
        telemetry=signals.telemetry,
    )
    scene = Scene(signals, [["search"], ["search"], "done"], [quota])
    with pytest.raises(ToolCallLimitExceededError):
        await scene.play()

    plan["searches"] = 5
    await scene.go_on()

    assert scene.ran == ["search", "search"]
    assert scene.metric("tool:search", "allowed") == 2
    tools = [each.outcome for each in seen if each.call.kind == "tool"]
    assert tools == [Outcome.ALLOWED, Outcome.BLOCKED, Outcome.ALLOWED]


async def test_observers_of_a_cancelled_hook(signals: Signals) -> None:
    """A run cancelled while an observer waits, and resumed: the observer misses no decision."""
    waiting = asyncio.Event()
    finished: list[str | None] = []
    patient = False

    async def bill(decision: Decision) -> None:
        if decision.call.tool == "calc" and not patient:
            waiting.set()
            await asyncio.Event().wait()
        finished.append(decision.call.tool)

    quota = QuotaMiddleware(
        [ToolCallLimit(run_limit=9)], on_decision=bill, telemetry=signals.telemetry
    )
    scene = Scene(signals, [["search", "calc"], "done"], [quota])
    task = asyncio.ensure_future(scene.play())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    patient = True
    await scene.go_on()

    assert finished == [None, "search", "calc", None]
    assert scene.metric("tool:*", "allowed") == 2
