"""Budgets beside other limiters of the same agent, in both orders: nothing is charged twice."""

from typing import Any

import pytest

from langchain_quota import (
    CostLimit,
    QuotaMiddleware,
    TokenLimit,
)
from langchain_quota.limits import Limit
from tests.scene import Order, Scene, in_order, model_limiter, orders
from tests.signals import Signals


class OtherQuota(QuotaMiddleware[Any, Any]):
    """A second one, which LangChain tells apart by its class."""


def budget(
    signals: Signals, *more: Limit, kind: Any = QuotaMiddleware, store: Any = None
) -> QuotaMiddleware[Any, Any]:
    limits = [TokenLimit(run_limit=200, thread_limit=1000, reserve=10), *more]
    made: QuotaMiddleware[Any, Any] = kind(limits, store=store, telemetry=signals.telemetry)
    return made


@orders(2)
@pytest.mark.parametrize("second", ["quota", "drop-in"])
async def test_limits_of_models(order: Order, second: str, signals: Signals) -> None:
    """A second middleware that counts model calls is an error, which says what to do."""
    other: Any = (
        OtherQuota([CostLimit(run_limit=1)], prices=lambda _: None, telemetry=signals.telemetry)
        if second == "quota"
        else model_limiter(signals, run_limit=4)
    )
    scene = Scene(signals, [], in_order(order, budget(signals), other))

    with pytest.raises(RuntimeError, match="all model limits into one QuotaMiddleware"):
        await scene.play()
