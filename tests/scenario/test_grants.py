"""More than limits say: what is granted to a thread or a user is checked, shown and counted."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest

from langchain_quota import CostLimit, Decision, MemoryStore, ModelCallLimit, Quota, ToolCallLimit
from tests.scene import ANN, CONFIG, Form, Scene, both_forms
from tests.telemetry import Signals

SEARCH = ToolCallLimit("search", thread_limit=1)
TWICE = (["search", "search"], "done")


class GrantScene(Scene):
    """An agent that searches twice in each run, and what was decided about it."""

    def __init__(
        self, signals: Signals, *limits: Any, script: Sequence[Any] = TWICE * 9, **options: Any
    ) -> None:
        self.decisions: list[Decision] = []
        options = {"store": MemoryStore(), "name": "boss", "context": ANN, **options}
        super().__init__(signals, script, limits, on_decision=self.decisions.append, **options)

    async def run(self, **who: Any) -> list[str]:
        """Run once; what was decided about tool calls, in this run."""
        self.decisions.clear()
        await self.play(**who)
        return [str(each.outcome) for each in self.decisions if each.call.kind == "tool"]

    async def grant(self, amount: Any, limit: str = "tool:search", **options: Any) -> Any:
        """Grant the thread more."""
        if self.form == "sync":
            return self.quota.grant(limit, amount, thread="thread-1", **options)
        return await self.quota.agrant(limit, amount, thread="thread-1", **options)

    def value(self, name: str, limit: str = "tool:search", **labels: str) -> float | None:
        return self.signals.value(f"langchain_quota_{name}", agent="boss", limit=limit, **labels)


@both_forms
async def test_a_thread_is_granted_more(signals: Signals, form: Form) -> None:
    """So many calls more run, once for an id; decisions, gauges and messages have the new limit."""
    scene = GrantScene(signals, SEARCH, form=form)
    assert await scene.run() == ["allowed", "blocked"]
    for amount in (2, 9):
        grant = await scene.grant(amount, reason="ticket 4711", by="bo", id="4711")
        assert (grant.amount, grant.reason, grant.by) == (2, "ticket 4711", "bo")
    assert await scene.run() == ["allowed", "allowed"]
    assert [each.limits[0].counts[0].limit for each in scene.decisions if each.limits] == [3, 3]
    assert await scene.run() == ["blocked", "blocked"]
    assert scene.value("thread_limit", thread_id="thread-1") == 3
    assert scene.value("granted_total", scope="thread", unit="calls") == 2
    assert scene.value("limit", scope="thread", unit="calls") == 1
    scene.quota.reset(scene.agent, CONFIG)
    assert await scene.run() == ["allowed", "allowed"]


async def test_a_grant_raises_every_limit_over_its_count(signals: Signals) -> None:
    """Two limits over one count are raised by one grant, and each counts it for itself."""
    trial = ToolCallLimit("search", name="trial", thread_limit=1, enforce=False)
    scene = GrantScene(signals, SEARCH, trial, ModelCallLimit(thread_limit=9))
    await scene.grant(2, limit="trial")
    assert await scene.run() == ["allowed", "allowed"]
    for limit in ("tool:search", "trial"):
        assert scene.value("thread_limit", limit, thread_id="thread-1") == 3
        assert scene.value("granted_total", limit, scope="thread", unit="calls") == 2
    assert scene.value("thread_limit", "model", thread_id="thread-1") == 9


@both_forms
async def test_a_key_that_can_hold_no_count(signals: Signals, form: Form) -> None:
    """A limit's name, and a key without its window, are refused with what to write instead."""
    store = MemoryStore()
    monthly = Quota(1, per="user_id", window="month")
    given: Any = {"store": store, "context": ANN, "form": form}
    priced: Any = {"prices": lambda _: Decimal(1), **given}
    scene = Scene(signals, lambda _: "done", [CostLimit(quotas=[monthly])], tools=(), **priced)

    async def grant(key: str, **options: Any) -> Any:
        if form == "sync":
            return store.grant(key, 1, **options)
        return await store.agrant(key, 1, **options)

    await scene.play()
    key = "model.nanodollars:user_id:ann"
    for name in ("cost", "nanodollars"):
        with pytest.raises(ValueError, match=f"under '{name}:user_id:ann': write '{key}'$"):
            await grant(f"{name}:user_id:ann", window=None)
    with pytest.raises(ValueError, match=f"under '{key}': give the quota's window, window="):
        await grant(key)
    assert store.grants() == []
    await grant(key, window=monthly.period)
    await scene.play()
    assert scene.last_text() == "done"
    # In advance; and a tool may have the name of a limit.
    await grant("search:user_id:ann", window=None)
    tool = ToolCallLimit("cost", quotas=[Quota(1, per="user_id")])
    await Scene(signals, [["cost"], "done"], [tool], tools=["cost"], **given).play()
    await grant("cost:user_id:ann")


async def test_no_store_that_gives_grants(signals: Signals) -> None:
    """Only a store gives grants, which a user's own need not do."""
    store = MemoryStore()

    class Own:
        """Keeps counts alone."""

        acquire, aacquire = store.acquire, store.aacquire
        peek, apeek, reset, areset = store.peek, store.apeek, store.reset, store.areset

    for own, name in ((None, "None: pass sto"), (Own(), "<")):
        scene = GrantScene(signals, SEARCH, store=own)
        with pytest.raises(TypeError, match=f"grants need a store that gives them, not {name}"):
            await scene.grant(1)
