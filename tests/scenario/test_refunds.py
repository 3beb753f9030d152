"""Charges that a shared store takes back: calls that others refuse, edit or answer do not count."""

import gc
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware

from langchain_quota import (
    MemoryStore,
    Quota,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from tests.scene import ANN, Order, Scene, asking, either, in_order, orders, tool_limiter
from tests.stores import FickleStore, counts, quota
from tests.telemetry import Signals

SEARCHES = "search:user_id:ann"
CALCS = "calc:user_id:ann"
TWICE = asking("search", "search")


def per_user(tool: str, limit: int = 9, **options: Any) -> ToolCallLimit:
    return ToolCallLimit(tool, quotas=[Quota(limit, per="user_id")], **options)


def scene_of(signals: Signals, script: Any, *middleware: Any, **options: Any) -> Scene:
    return Scene(signals, script, middleware, context=ANN, **options)


def review(*kinds: str) -> dict[str, Any]:
    """What a person answers about each call."""
    edit = {"name": "calc", "args": {}}
    known: dict[str, Any] = {"respond": {"message": "hm"}, "edit": {"edited_action": edit}}
    return {"decisions": [{"type": kind, **known.get(kind, {})} for kind in kinds]}


@orders(2)
@either
async def test_beside_a_drop_in_that_raises(order: Order, kind: Any, signals: Signals) -> None:
    """What was charged before it raised stays charged."""
    store = MemoryStore()
    drop_in = tool_limiter(signals, "search", run_limit=1, exit_behavior="error")
    items: list[Any] = in_order(order, per_user("search"), drop_in)
    scene = Scene(signals, TWICE, items, kind=kind, store=store, context=ANN)
    with pytest.raises(ToolCallLimitExceededError):
        await scene.play()
    scene.model.script = asking("search")
    await scene.play()
    # The last of the list checks first; the inline one checks before all others.
    charged = 2 if kind == "inline" or order == (1, 0) else 0
    assert counts(store) == {SEARCHES: charged + 1}


class Second(QuotaMiddleware[Any, Any]):
    """A second middleware of an agent, told apart by its class."""


class Outage(AgentMiddleware[Any, Any, Any]):
    """The store goes down once, between those who check a message."""

    def __init__(self, store: FickleStore) -> None:
        super().__init__()
        self.stores = [store]

    def after_model(self, state: Any, runtime: Any) -> None:
        while self.stores:
            self.stores.pop().down = True


@pytest.mark.parametrize("outage", ["block", "allow"])
async def test_a_store_that_goes_down_between_two(outage: Any, signals: Signals) -> None:
    """Two middlewares with one store charge a call once, also if only the first one reaches it."""
    store = FickleStore(MemoryStore())
    options: Any = {"store": store, "on_store_error": outage}
    first, limit = quota(signals, per_user("search"), **options), per_user("search", 5)
    second = Second([limit], telemetry=signals.telemetry, **options)
    scene = scene_of(signals, TWICE, second, Outage(store), first)
    await scene.play()
    assert scene.ran == (["search"] * 2 if outage == "allow" else [])
    store.down = False
    scene.model.script = asking("search")
    await scene.play()
    assert counts(store) == {SEARCHES: len(scene.ran)}


async def test_two_stores_in_one_agent(signals: Signals) -> None:
    """A second store in one agent is refused at the first run: a charge names none of both."""
    limits = [per_user("search", 3)]
    first, other = quota(signals, *limits, store=MemoryStore()), MemoryStore()
    second = Second(limits, store=other, telemetry=signals.telemetry)
    for items in ([first, second], [second, first]):
        scene = scene_of(signals, TWICE, *items)
        with pytest.raises(RuntimeError, match="of this agent have two stores: give them the same"):
            await scene.play()
        assert scene.ran == []
    # The same store twice, beside a middleware without one, is as good as one middleware.
    third = quota(signals, per_user("search"), store=other)
    stack: list[Any] = [second, tool_limiter(signals, run_limit=9), third]
    for each in (stack, stack[::-1]):
        other.reset([SEARCHES])
        scene = scene_of(signals, TWICE, *each)
        for _ in range(3):
            await scene.play()
        assert scene.ran == ["search"] * 3
        assert counts(other) == {SEARCHES: 3}


async def test_a_resume_in_another_process(signals: Signals) -> None:
    """A drop-in that goes on where the other's store is not found leaves a blocked call charged."""
    store = MemoryStore()

    def process(*others: Any, **options: Any) -> Scene:
        drop_in = tool_limiter(signals, "search", run_limit=1)
        people = HumanInTheLoopMiddleware[Any, Any]({"search": True})
        return scene_of(signals, TWICE, drop_in, people, *others, **options)

    scene = process(quota(signals, per_user("search"), store=store))
    await scene.play()
    scene = process(checkpointer=scene.agent.checkpointer)
    gc.collect()
    await scene.resume(review("approve", "approve"))
    assert scene.ran == ["search"]
    assert counts(store) == {SEARCHES: 2}


@pytest.mark.parametrize("kind", ["reject", "respond", "edit"])
async def test_a_review_before_it(kind: str, signals: Signals) -> None:
    """Checked after a review: what it rejects or answers is not charged, an edit as it became."""
    store = MemoryStore()
    held = quota(signals, per_user("search"), per_user("calc"), store=store)
    scene = scene_of(signals, TWICE, held, HumanInTheLoopMiddleware({"search": True}))
    await scene.play()
    assert counts(store) == {}
    await scene.resume(review("approve", kind))
    assert sorted(scene.ran) == (["calc", "search"] if kind == "edit" else ["search"])
    assert counts(store) == {SEARCHES: 1} | ({CALCS: 1} if kind == "edit" else {})
    scene.check()
