"""Charges that a shared store takes back: calls that others refuse, edit or answer do not count."""

from contextlib import suppress
from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware

from langchain_quota import Quota, ToolCallLimit, ToolCallLimitExceededError
from langchain_quota.stores.memory import MemoryStore
from tests.scene import ANN, Kind, Middleware, Order, Scene, asking, in_order, orders, tool_limiter
from tests.stores import FickleStore, counts, quota
from tests.telemetry import Signals, needs_inline

SEARCHES = "search:user_id:ann"
CALCS = "calc:user_id:ann"
TWICE = asking("search", "search")


def per_user(tool: str, limit: int = 9, **options: Any) -> ToolCallLimit:
    return ToolCallLimit(tool, quotas=[Quota(limit, per="user_id")], **options)


def scene_of(signals: Signals, script: Any, *middleware: Middleware, **options: Any) -> Scene:
    return Scene(signals, script, middleware, context=ANN, **options)


def review(*kinds: str) -> dict[str, Any]:
    """What a person answers about each call."""
    edit = {"name": "calc", "args": {}}
    known: dict[str, Any] = {"respond": {"message": "hm"}, "edit": {"edited_action": edit}}
    return {"decisions": [{"type": kind, **known.get(kind, {})} for kind in kinds]}


@orders(2)
@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
@pytest.mark.parametrize("kind", ["quota", pytest.param("inline", marks=needs_inline)])
async def test_beside_a_drop_in(
    order: Order, exit_behavior: Any, kind: Kind, signals: Signals
) -> None:
    """What a drop-in beside it refuses is taken back, by the next hook that asks the store."""
    store = MemoryStore()
    drop_in: Middleware = tool_limiter(
        signals, "search", run_limit=1, exit_behavior=exit_behavior, limit_name="drop-in"
    )
    groups: list[Any] = in_order(order, [per_user("search"), per_user("calc")], [drop_in])
    items = [each for group in groups for each in group]
    script = asking("search", "search", "calc")
    scene = Scene(signals, script, items, kind=kind, store=store, context=ANN)
    with suppress(ToolCallLimitExceededError):
        await scene.play()
    scene.model.script = asking("calc")
    await scene.play()
    ran = {SEARCHES: scene.ran.count("search"), CALCS: scene.ran.count("calc")}
    assert ran[SEARCHES] == (1 if exit_behavior == "continue" else 0)
    assert counts(store) == {key: used for key, used in ran.items() if used}
    assert scene.state()["langchain_quota"].get("pending_refunds", {}) == {}
    scene.check()


async def test_a_store_that_is_down_when_it_is_owed(signals: Signals) -> None:
    """A refund waits in the thread until the store is back."""
    store = FickleStore(MemoryStore())
    drop_in: Middleware = tool_limiter(signals, "search", run_limit=1, limit_name="drop-in")
    scene = scene_of(signals, TWICE, drop_in, quota(signals, per_user("search"), store=store))
    for down in (False, True, False):
        store.down = down
        await scene.play()
    # The refund of the second search of this turn is pending now.
    assert counts(store) == {SEARCHES: 3}
    scene.model.script = asking("search")
    await scene.play()
    assert scene.ran == ["search"] * 3
    assert counts(store) == {SEARCHES: 3}
    scene.check()


@pytest.mark.parametrize("kind", ["reject", "respond", "edit"])
async def test_a_review_before_it(kind: str, signals: Signals) -> None:
    """Judged after a review: what it rejects or answers is not charged, an edit as it became."""
    store = MemoryStore()
    held = quota(signals, per_user("search"), per_user("calc"), store=store)
    scene = scene_of(signals, TWICE, held, HumanInTheLoopMiddleware({"search": True}))
    await scene.play()
    assert counts(store) == {}
    await scene.resume(review("approve", kind))
    assert sorted(scene.ran) == (["calc", "search"] if kind == "edit" else ["search"])
    assert counts(store) == {SEARCHES: 1} | ({CALCS: 1} if kind == "edit" else {})
    scene.check()
