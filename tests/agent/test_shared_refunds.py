"""Charges that a shared store takes back: calls that others refuse, edit or answer do not count."""

from typing import Any

import pytest
from langchain_core.messages import ToolCall

from langchain_quota import (
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.stores.memory import MemoryStore
from tests.scene import ANN, Middleware, Order, Scene, asking, in_order, orders, tool_limiter
from tests.signals import Signals
from tests.stores import counts, quota

SEARCHES = "search:user_id:ann"
CALCS = "calc:user_id:ann"
MODEL_CALLS = "model:user_id:ann"


def per_user(tool: str, limit: int = 9, **options: Any) -> ToolCallLimit:
    return ToolCallLimit(tool, quotas=[Quota(limit, per="user_id")], **options)


def scene_of(signals: Signals, script: Any, *middleware: Middleware) -> Scene:
    scene = Scene(signals, script, middleware)
    scene.context = ANN
    return scene


def call(tool: str, call_id: str) -> ToolCall:
    return ToolCall(name=tool, args={}, id=call_id, type="tool_call")


@orders(2)
@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
@pytest.mark.parametrize("settles", ["tool", "model"])
async def test_beside_a_drop_in(
    order: Order, exit_behavior: Any, settles: str, signals: Signals
) -> None:
    """What a drop-in beside it refuses is taken back, by the next hook that asks the store."""
    store = MemoryStore()
    limits: list[Limit] = [per_user("search"), per_user("calc")]
    if settles == "model":
        limits.append(ModelCallLimit(quotas=[Quota(99, per="user_id")]))
    drop_in: Middleware = tool_limiter(
        signals, "search", run_limit=1, exit_behavior=exit_behavior, limit_name="drop-in"
    )
    middleware: Middleware = quota(signals, *limits, store=store)
    scene = scene_of(
        signals, asking("search", "search", "calc"), *in_order(order, middleware, drop_in)
    )

    if exit_behavior == "error":
        with pytest.raises(ToolCallLimitExceededError):
            await scene.play()
    else:
        await scene.play()
    scene.model.script = asking("calc") if settles == "tool" else lambda messages: "done"
    await scene.play()

    ran = sum(each == "search" for each in scene.ran)
    assert ran == (1 if exit_behavior == "continue" else 0)
    kept = counts(store)
    assert kept.pop(SEARCHES, 0) == ran
    assert kept.pop(CALCS, 0) == sum(each == "calc" for each in scene.ran)
    assert kept.pop(MODEL_CALLS, len(scene.model.calls)) == len(scene.model.calls)
    assert kept == {}
    assert scene.state()["langchain_quota"].get("pending_refunds", {}) == {}
    scene.check()


class Second(QuotaMiddleware[Any, Any]):
    """Another middleware of the kind in one agent."""


@orders(2)
@pytest.mark.parametrize("refused", [True, False])
async def test_two_with_one_store(order: Order, *, refused: bool, signals: Signals) -> None:
    """Two of them in one agent charge each call once to each count, and only what runs."""
    store = MemoryStore()
    first = quota(signals, per_user("search"), per_user("calc"), store=store)
    second = Second(
        [
            ToolCallLimit(
                "search",
                name="second",
                quotas=[Quota(1 if refused else 9, per="global"), Quota(9, per="user_id")],
            )
        ],
        store=store,
        telemetry=signals.telemetry,
    )
    scene = scene_of(signals, asking("search", "search", "calc"), *in_order(order, first, second))

    await scene.play()
    # Makes the pending refund.
    scene.model.script = asking("calc")
    await scene.play()

    searches = 1 if refused else 2
    assert sorted(scene.ran) == ["calc"] * 2 + ["search"] * searches
    assert counts(store) == {SEARCHES: searches, CALCS: 2, "search:global:": searches}
    scene.check()


async def test_an_abandoned_batch_that_a_drop_in_held(signals: Signals) -> None:
    """A batch that another limiter's error stopped never started: the next turn takes it back."""
    store = MemoryStore()
    drop_in: Middleware = tool_limiter(signals, "calc", run_limit=0, exit_behavior="error")
    limit = ToolCallLimit(thread_limit=9, quotas=[Quota(9, per="user_id")])
    scene = scene_of(
        signals, asking("search", "search", "calc"), drop_in, quota(signals, limit, store=store)
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.play()
    assert counts(store) == {"__all__:user_id:ann": 3, "__all__:thread:thread-1": 3}
    scene.model.script = asking("search")
    await scene.play()

    assert scene.ran == ["search"]
    assert counts(store) == {"__all__:user_id:ann": 1, "__all__:thread:thread-1": 1}
    scene.check()
