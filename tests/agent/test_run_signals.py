"""What is counted of runs: how many, which a limit ended, and what follows a refusal."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware

from langchain_quota import (
    InlineQuotaMiddleware,
    Limit,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from tests.agent.rules import Scene
from tests.signals import Signals, needs_inline

LIMITS: list[Limit] = [ToolCallLimit("search", run_limit=1), ModelCallLimit(run_limit=3)]


def drop_ins(telemetry: Telemetry) -> list[Any]:
    return [
        ToolCallLimitMiddleware(tool_name="search", run_limit=1, telemetry=telemetry),
        ModelCallLimitMiddleware(run_limit=3, telemetry=telemetry),
    ]


def quota(telemetry: Telemetry) -> list[Any]:
    return [QuotaMiddleware(LIMITS, telemetry=telemetry)]


def inline(telemetry: Telemetry) -> list[Any]:
    return [InlineQuotaMiddleware(LIMITS, telemetry=telemetry)]


each_middleware = pytest.mark.parametrize(
    "make", [drop_ins, quota, pytest.param(inline, marks=needs_inline)]
)


def runs(signals: Signals) -> tuple[float | None, float | None]:
    """The runs that have begun, and those that the limit on model calls has ended."""
    return (
        signals.value("langchain_quota_runs_total", agent="unnamed"),
        signals.value("langchain_quota_runs_ended_total", agent="unnamed", limit="model"),
    )


def after_refusal(signals: Signals, kind: str, decision: str) -> float | None:
    return signals.value(
        "langchain_quota_calls_after_refusal_total", agent="unnamed", kind=kind, decision=decision
    )


@each_middleware
async def test_runs_are_counted_once(make: Callable[[Telemetry], Any], signals: Signals) -> None:
    """Each run counts once, however many middlewares it has; one that a limit ends, once more."""
    turns = [["calc"], "done", *[["calc"]] * 3, "done"]
    scene = Scene(signals, turns, make(signals.telemetry))

    await scene.turn()
    assert runs(signals) == (1, 0)
    await scene.turn()

    assert runs(signals) == (2, 1)


async def test_a_run_that_is_resumed_is_the_same(signals: Signals) -> None:
    """An interrupt and its answer belong to one run."""
    review = HumanInTheLoopMiddleware(interrupt_on={"search": True})
    scene = Scene(signals, [["search"], "done"], [review, *quota(signals.telemetry)])

    await scene.turn()
    await scene.resume({"decisions": [{"type": "approve"}]})

    assert scene.ran == ["search"]
    assert runs(signals) == (1, 0)


@each_middleware
async def test_what_follows_a_refusal(make: Callable[[Telemetry], Any], signals: Signals) -> None:
    """After a refusal the run's calls are counted once more; a new run begins without one."""
    turns = [["search", "search"], ["search", "calc"], "done", ["search"], "done"]
    scene = Scene(signals, turns, make(signals.telemetry))

    for _ in range(2):
        await scene.turn()

    assert after_refusal(signals, "model", "allowed") == 2
    assert after_refusal(signals, "tool", "blocked") == 1
    assert after_refusal(signals, "tool", "allowed") == (0 if make is drop_ins else 1)


async def test_calls_of_one_message_do_not_follow_each_other(signals: Signals) -> None:
    """What another middleware refuses of the same message, the model has not asked again."""
    limiters = [
        ToolCallLimitMiddleware(tool_name=name, run_limit=0, telemetry=signals.telemetry)
        for name in ("search", "calc")
    ]
    scene = Scene(signals, [["search", "calc"], ["calc"], "done"], limiters)

    await scene.turn()

    assert after_refusal(signals, "tool", "blocked") == 1
