"""Budgets beside other limiters of the same agent, in both orders: nothing is charged twice."""

from typing import Any

import pytest
from langchain.agents import middleware as langchain_middleware
from langchain_core.messages import AIMessage

from langchain_quota import (
    CostLimit,
    InlineQuotaMiddleware,
    MemoryStore,
    QuotaMiddleware,
    TokenLimit,
    ToolCallLimit,
    usage,
)
from langchain_quota.limits import Limit
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import CONFIG, Scene, model_limiter, tool_limiter
from tests.agent.shared import counts
from tests.signals import Signals, needs_inline

TOTAL = "model.total_tokens"
THREAD_KEY = f"{TOTAL}:thread:thread-1"
EITHER = pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)


class OtherQuota(QuotaMiddleware[Any, Any]):
    """A second one, which LangChain tells apart by its class."""


class LangChainsToolLimit(langchain_middleware.ToolCallLimitMiddleware[Any, Any]):
    """LangChain's own."""


class LangChainsModelLimit(langchain_middleware.ModelCallLimitMiddleware[Any, Any]):
    """LangChain's own."""


def answer(tokens: int, *calls: str) -> AIMessage:
    """An answer that has cost so many tokens."""
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    called = [
        {"name": name, "args": {}, "id": f"{name}-{tokens}-{index}"}
        for index, name in enumerate(calls)
    ]
    return AIMessage("Hello.", usage_metadata=used, tool_calls=called)


def budget(
    signals: Signals, *more: Limit, kind: Any = QuotaMiddleware, store: Any = None
) -> QuotaMiddleware[Any, Any]:
    limits = [TokenLimit(run_limit=200, thread_limit=1000, reserve=10), *more]
    made: QuotaMiddleware[Any, Any] = kind(limits, store=store, telemetry=signals.telemetry)
    return made


def used(scene: Scene) -> Any:
    return usage(scene.agent.get_state(CONFIG))


@EITHER
@orders(2)
@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("other", ["drop-in", "LangChain's", "quota"])
async def test_limits_of_tools(
    order: Order, kind: Any, other: str, signals: Signals, *, has_store: bool
) -> None:
    """A limit of tools in another middleware refuses its calls; the budget charges each answer."""
    store = MemoryStore() if has_store else None
    others: dict[str, Any] = {
        "drop-in": tool_limiter(signals, "search", run_limit=2),
        "LangChain's": LangChainsToolLimit(tool_name="search", run_limit=2),
        "quota": OtherQuota([ToolCallLimit("search", run_limit=2)], telemetry=signals.telemetry),
    }
    script = [answer(60, "search", "search"), answer(50, "search"), answer(40), answer(7)]
    scene = Scene(
        signals, script, in_order(order, budget(signals, kind=kind, store=store), others[other])
    )

    await scene.turn()

    assert scene.ran == ["search"] * 2
    assert used(scene).spent == used(scene).run_spent == {TOTAL: 150}

    await scene.turn()

    assert (used(scene).spent, used(scene).run_spent) == ({TOTAL: 157}, {TOTAL: 7})
    if store is not None:
        assert counts(store)[THREAD_KEY] == 157
    scene.check_requests()


@EITHER
@orders(2)
async def test_a_batch_that_a_drop_in_ends(order: Order, kind: Any, signals: Signals) -> None:
    """If another limiter ends the run, what the model has used is still charged."""
    ends = tool_limiter(signals, "search", run_limit=0, exit_behavior="end")
    store = MemoryStore()
    middlewares = in_order(order, budget(signals, kind=kind, store=store), ends)
    scene = Scene(signals, [answer(60, "search"), answer(50, "search")], middlewares)

    for spent in (60, 110):
        await scene.turn()
        assert used(scene).spent == {TOTAL: spent}
        assert counts(store)[THREAD_KEY] == spent


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
        await scene.turn()


@EITHER
@orders(2)
async def test_langchains_limit_of_models(order: Order, kind: Any, signals: Signals) -> None:
    """LangChain's own limit of model calls counts as it does alone."""
    theirs = LangChainsModelLimit(run_limit=2, thread_limit=5)
    script = [answer(10 + index, "search") for index in range(9)]
    scene = Scene(signals, script, in_order(order, budget(signals, kind=kind), theirs))

    for calls, spent in ((2, 21), (4, 46), (5, 60), (5, 60)):
        await scene.turn()
        assert len(scene.model.calls) == calls
        assert used(scene).spent == {TOTAL: spent}
