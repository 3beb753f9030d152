"""Several limiters on overlapping tools."""

from typing import Any

from langchain_quota import (
    ModelCallLimitMiddleware,
)
from tests.scene import Order, Scene, in_order, model_limiter, orders, tool_limiter
from tests.signals import Signals


class OtherModelLimit(ModelCallLimitMiddleware[Any, Any]):
    """A second limiter on an agent, told apart by its class."""


@orders(2)
async def test_refused_by_one_is_charged_to_none(order: Order, signals: Signals) -> None:
    """Two limiters: a call refused by one is answered once and taken back from the other."""
    scene = Scene(
        signals,
        [["search", "search", "calc", "calc"], "done"],
        in_order(
            order, tool_limiter(signals, run_limit=2), tool_limiter(signals, "search", run_limit=1)
        ),
    )

    await scene.play()

    # The last of the list judges first. What it refused, a later refund does not revive.
    all_tools_first = order == (1, 0)
    assert sorted(scene.ran) == (["search"] if all_tools_first else ["calc", "search"])
    assert scene.metric("tool:*", "refunded") == (1 if all_tools_first else 0)
    assert scene.metric("tool:search", "blocked", "run") == 1
    scene.check()


@orders(3)
async def test_three_limiters(order: Order, signals: Signals) -> None:
    """Three limiters on overlapping tools keep the rules over two turns, in every order."""
    batch = ["search", "calc", "search", "calc", "mail"]
    scene = Scene(
        signals,
        [batch, batch, "done", batch, "done"],
        in_order(
            order,
            tool_limiter(signals, thread_limit=5, run_limit=3),
            tool_limiter(signals, "search", thread_limit=2, run_limit=1),
            tool_limiter(signals, "calc", run_limit=1),
        ),
        tools=("search", "calc", "mail"),
    )

    for _ in range(2):
        await scene.play()
        scene.check()

    assert scene.ran.count("search") == 2
    assert len(scene.answers()) == 15


def charged(scene: Scene) -> float:
    """What both limits let through and have not taken back."""
    return scene.metric("tool:search", "allowed") - scene.metric("tool:search", "refunded")


@orders(2)
async def test_two_model_limiters(order: Order, signals: Signals) -> None:
    """Two model limiters on one agent count each call once, and the smaller limit holds."""
    scene = Scene(
        signals,
        [["calc"], ["calc"], ["calc"], "done"],
        in_order(
            order,
            model_limiter(signals, run_limit=3),
            OtherModelLimit(thread_limit=6, limit_name="thread", telemetry=signals.telemetry),
        ),
    )

    await scene.play()

    assert len(scene.model.calls) == 3
    scene.check()


@orders(2)
async def test_two_model_limiters_where_the_inner_refuses(order: Order, signals: Signals) -> None:
    """A model call admitted by one limiter and refused by another is charged to neither."""
    scene = Scene(
        signals,
        [["calc"], ["calc"], "done"],
        in_order(
            order,
            model_limiter(signals, run_limit=1),
            model_limiter(signals, run_limit=9, limit_name="generous"),
        ),
    )

    await scene.play()

    assert len(scene.model.calls) == 1
    scene.check()
