"""More than limits say: what is granted to a thread or a user is checked, shown and counted."""

from decimal import Decimal
from typing import Any

import pytest

from langchain_quota import CostLimit, MemoryStore, ModelCallLimit, Quota, ToolCallLimit
from tests.scene import ANN, Form, Scene, asking, both_forms
from tests.telemetry import Signals

SEARCH = ToolCallLimit("search", thread_limit=1)


def scene_of(signals: Signals, *limits: Any, **options: Any) -> Scene:
    """An agent that searches twice in each run."""
    options = {"store": MemoryStore(), "name": "boss", "context": ANN, **options}
    return Scene(signals, asking("search", "search"), limits, **options)


async def outcomes(scene: Scene) -> list[str]:
    """What a new run decides about tool calls."""
    await scene.play()
    return [str(each.outcome) for each in scene.decisions if each.call.kind == "tool"]


def value(scene: Scene, name: str, limit: str = "tool:search", **labels: str) -> float | None:
    return scene.signals.value(f"langchain_quota_{name}", agent="boss", limit=limit, **labels)


@both_forms
async def test_a_thread_is_granted_more(signals: Signals, form: Form) -> None:
    """So many calls more run, once for an id; decisions, gauges and messages have the new limit."""
    scene = scene_of(signals, SEARCH, form=form)
    assert await outcomes(scene) == ["allowed", "blocked"]
    given: Any = {"thread": "thread-1", "reason": "ticket 4711", "by": "bo", "id": "4711"}
    for amount in (2, 9):
        grant = await scene.call("grant", "tool:search", amount, **given)
        assert (grant.amount, grant.reason, grant.by) == (2, "ticket 4711", "bo")
    assert await outcomes(scene) == ["allowed", "allowed"]
    assert [each.limits[0].counts[0].limit for each in scene.decisions if each.limits] == [3, 3]
    assert await outcomes(scene) == ["blocked", "blocked"]
    assert value(scene, "thread_limit", thread_id="thread-1") == 3
    assert value(scene, "granted_total", scope="thread", unit="calls") == 2
    assert value(scene, "limit", scope="thread", unit="calls") == 1
    await scene.reset()
    assert await outcomes(scene) == ["allowed", "allowed"]


async def test_a_grant_raises_every_limit_over_its_count(signals: Signals) -> None:
    """Two limits over one count are raised by one grant, and each counts it for itself."""
    trial = ToolCallLimit("search", name="trial", thread_limit=1, enforce=False)
    scene = scene_of(signals, SEARCH, trial, ModelCallLimit(thread_limit=9))
    scene.quota.grant("trial", 2, thread="thread-1")
    assert await outcomes(scene) == ["allowed", "allowed"]
    for limit in ("tool:search", "trial"):
        assert value(scene, "thread_limit", limit, thread_id="thread-1") == 3
        assert value(scene, "granted_total", limit, scope="thread", unit="calls") == 2
    assert value(scene, "thread_limit", "model", thread_id="thread-1") == 9


async def test_a_key_that_can_hold_no_count(signals: Signals) -> None:
    """A limit's name, and a key without its window, are refused with what to write instead."""
    store = MemoryStore()
    monthly = Quota(1, per="user_id", window="month")
    given: Any = {"store": store, "context": ANN}
    limits, prices = [CostLimit(quotas=[monthly])], lambda _: Decimal(1)
    scene = await Scene(signals, lambda _: "done", limits, prices=prices, **given).played()
    key = "model.nanodollars:user_id:ann"
    for name in ("cost", "nanodollars"):
        with pytest.raises(ValueError, match=f"under '{name}:user_id:ann': write '{key}'$"):
            store.grant(f"{name}:user_id:ann", 1, window=None)
    with pytest.raises(ValueError, match=f"under '{key}': give the quota's window, window="):
        await store.agrant(key, 1)
    assert store.grants() == []
    store.grant(key, 1, window=monthly.period)
    await scene.play()
    assert scene.last_text() == "done"
    # In advance; and a tool may have the name of a limit.
    store.grant("search:user_id:ann", 1, window=None)
    tool = ToolCallLimit("cost", quotas=[Quota(1, per="user_id")])
    await Scene(signals, asking("cost"), [tool], tools=["cost"], **given).play()
    store.grant("cost:user_id:ann", 1)


async def test_no_store_that_gives_grants(signals: Signals) -> None:
    """Only a store gives grants, which a user's own need not do."""
    store = MemoryStore()

    class Own:
        """Keeps counts alone."""

        acquire, aacquire = store.acquire, store.aacquire
        peek, apeek, reset, areset = store.peek, store.apeek, store.reset, store.areset

    for own, name in ((None, "None: pass sto"), (Own(), "<")):
        scene = scene_of(signals, SEARCH, store=own)
        with pytest.raises(TypeError, match=f"grants and freezes need .*, not {name}"):
            await scene.call("grant", "tool:search", 1, thread="thread-1")
