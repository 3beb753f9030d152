"""What a window leaves is added to the next one, and shown wherever the limit is."""

import time
from typing import Any

from langchain_quota import MemoryStore, Quota, ToolCallLimit, stop_reason
from tests.scene import ANN, Scene, asking
from tests.stores import Clock
from tests.telemetry import Signals, telling

DAY = 86_400


def daily(limit: Any, **options: Any) -> Quota:
    return Quota(limit, per="user_id", window="1d", rollover=2, **options)


class Days:
    """An agent whose user searches some times on each day, by the store's clock."""

    def __init__(self, signals: Signals, *limits: Any, **options: Any) -> None:
        # Metrics show no window that is over now.
        self.clock, self.calls = Clock((time.time() // DAY + 1.5) * DAY), 0
        self.result: Any = None
        self.store = MemoryStore(clock=self.clock)
        options = {"store": self.store, "context": ANN, **options}
        self.scene = Scene(signals, self.answer, limits, **options)

    def answer(self, messages: Any) -> Any:
        return asking(*["search"] * self.calls)(messages)

    async def search(self, calls: int) -> int:
        """Run once; how many of the searches ran."""
        ran, self.calls = len(self.scene.ran), calls
        self.result = await self.scene.play(thread_id=len(self.scene.ran))
        return len(self.scene.ran) - ran

    def left(self, name: str = "tool:search", **options: Any) -> tuple[Any, Any, Any]:
        balance = self.scene.quota.left(name, user_id="ann", **options)
        return balance.used, balance.limit, balance.left


async def test_shown_wherever_the_limit_is() -> None:
    """Balances, notes, messages, reasons and gauges have what rolled over; it is used once."""
    signals = telling(subject_label={"user_id": str})
    limit = ToolCallLimit("search", quotas=[daily(3)], exit_behavior="end")
    days = Days(signals, limit, ToolCallLimit("calc", run_limit=0), tell_model=True)
    # Nothing was used on the day before.
    assert (days.left(), await days.search(4)) == ((0, 5, 5), 4)
    days.clock.now += DAY
    # What rolled over was used, and of the limit itself nothing was left.
    assert (days.left(), await days.search(1)) == ((0, 3, 3), 1)
    days.clock.now += DAY
    balances: Any = await days.scene.quota.balances({"user_id": "ann"})
    assert (days.left(), balances[0][-1].left, await days.search(4)) == ((0, 5, 5), 5, 4)
    notes = [call.messages[-1].text for call in days.scene.model.calls[-2:]]
    assert ["search: 5 of 5 left" in notes[0], "search: 1 of 5 left" in notes[1]] == [True, True]
    assert await days.search(2) == 0
    reason: Any = stop_reason(days.result)
    assert (reason["used"], reason["threshold"]) == (4, 5)
    assert "user_id limit exceeded (6/5 calls; resets at " in days.scene.last_text()
    names = {"agent": "unnamed", "limit": "tool:search", "scope": "user_id"}
    assert signals.value("langchain_quota_limit", **names, unit="calls") == 3
    assert signals.value("langchain_quota_subject_limit", **names, subject="ann") == 5
    counted = [(each.used, each.limit, each.rolled_over) for each in days.store.usages()[-2:]]
    assert counted == [(1, 3, 0), (4, 3, 2)]


async def test_the_number_of_a_function(signals: Signals) -> None:
    """The limit at the first call of a window is that of which the window before has left."""
    plan = {"ann": 5}
    quota = daily(lambda state, runtime: plan[runtime.context["user_id"]])
    days = Days(signals, ToolCallLimit("search", quotas=[quota]))
    assert await days.search(1) == 1
    days.clock.now += DAY
    plan["ann"] = 2
    assert days.left(limit=2) == (0, 3, 3)
    assert await days.search(1) == 1
    plan["ann"] = 9
    assert days.left(limit=9) == (1, 10, 9)


async def test_limits_over_one_count(signals: Signals) -> None:
    """What rolls over raises every limit over a count, like a grant; a reset keeps it."""
    trial = ToolCallLimit("search", name="trial", enforce=False, quotas=[daily(1)])
    days = Days(signals, ToolCallLimit("search", quotas=[daily(1)]), trial)
    assert await days.search(4) == 2
    days.scene.quota.reset("trial", user_id="ann")
    assert days.left("trial") == days.left() == (0, 2, 2)
