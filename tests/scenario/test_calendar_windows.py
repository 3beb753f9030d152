"""Quotas in windows of the calendar: until when a count holds in a zone, and how that is told."""

import time
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest
from blockbuster import blockbuster_ctx

from langchain_quota import MemoryStore, Quota, ToolCallLimit, stop_reason
from tests.forked import run_python, without
from tests.scene import ANN, Scene, asking, texts
from tests.stores import Clock, counts
from tests.telemetry import Signals, attributes, telling

BERLIN = "Europe/Berlin"


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def scene_of(signals: Signals, store: MemoryStore, *quotas: Quota) -> Scene:
    limit = ToolCallLimit("search", quotas=quotas)
    return Scene(signals, asking("search"), [limit], store=store, context=ANN)


@pytest.mark.parametrize(
    ("of", "now", "told"),
    [
        (("hour", None, None), "2026-06-01T10:10Z", "2026-06-01T11:00:00Z"),
        (("hour", "Asia/Kolkata", None), "2026-06-01T10:10Z", "2026-06-01T16:00:00+05:30"),
        (("week", BERLIN, "friday"), "2026-03-26T23:00Z", "2026-04-03T00:00:00+02:00"),
        (("month", None, 31), "2026-01-31T00:00Z", "2026-02-28T00:00:00Z"),
    ],
)
async def test_until_when_a_count_holds(
    of: tuple[Any, ...], now: str, told: str, signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds up to the second that is told, in the zone and in UTC; then the next one begins."""
    caplog.set_level("DEBUG")
    ends, clock = at(told), Clock(at(now))
    utc = f"{datetime.fromtimestamp(ends, UTC):%Y-%m-%dT%H:%M:%SZ}"
    store = MemoryStore(clock=clock)
    quota = Quota(1, per="user_id", window=of[0], tz=of[1], starts=of[2])
    scene = await scene_of(signals, store, quota).played()
    clock.now = ends - 1
    result = await scene.play()
    said = told if told == utc else f"{told} ({utc})"
    assert texts(result)[-1].endswith(f" It resets at {said}.")
    decided = [each.resets_at.isoformat() for each in scene.decisions if each.resets_at]
    assert decided == [told.replace("Z", "+00:00")]
    spans = map(attributes, signals.decision_spans())
    in_utc = [
        *(each["resets_at"] for each in spans if "resets_at" in each),
        *(each.quota_resets_at for each in caplog.records if hasattr(each, "quota_resets_at")),
    ]
    assert in_utc == [utc.replace("Z", "+00:00")] * 2
    clock.now = ends
    await scene.play()
    assert scene.ran == ["search"] * 2
    assert list(counts(store).values()) == [1, 1]


async def test_many_zones(signals: Signals) -> None:
    """A run reads no zone from the disk: its limits have done so."""
    zones = [each for each in sorted(available_timezones()) if each.startswith("Africa/")]
    quotas = [
        Quota(9, per="thread", window="day", tz=each, name=f"of_{index:c}")
        for index, each in enumerate(zones[:20], start=ord("a"))
    ]
    scene = scene_of(signals, MemoryStore(), *quotas)
    ZoneInfo.clear_cache()
    with blockbuster_ctx():
        await scene.play()
    assert scene.ran == ["search"]


def test_a_system_without_zones() -> None:
    """UTC is always known; of another zone the error says what to install."""
    program = (
        "import zoneinfo; zoneinfo.reset_tzpath([])\n"
        "from langchain_quota import Quota\n"
        "Quota(5, per='global', window='day')\n"
        "Quota(5, per='global', window='day', tz='Europe/Berlin')\n"
    )
    done = run_python(without("tzdata") + program)
    assert done.stderr.splitlines()[-1] == (
        'ValueError: tz must be the name of a time zone, such as "Europe/Berlin", not '
        "'Europe/Berlin'. If this system has no time zones, install the package tzdata"
    )


async def test_windows_that_end_together(signals: Signals) -> None:
    """Windows that end together share no count if they began at other times, else they do."""
    store = MemoryStore(clock=Clock(at("2026-02-27T23:30+01:00")))
    months: Any = [(BERLIN, 28), (BERLIN, 29), (BERLIN, "30"), (BERLIN, 30), ("Europe/Vienna", 30)]
    for window, tz, starts in (
        *(("hour", BERLIN, None), ("day", BERLIN, None), ("1d", None, None)),
        *(("month", *each) for each in months),
    ):
        quota = Quota(9, per="user_id", window=window, tz=tz, starts=starts)
        await scene_of(signals, store, quota).play()
    ends = f"{at('2026-02-28T00:00+01:00'):.0f}+3600"
    days = {1 / 24: 1, 1: 1, 31: 1, 30: 1, 29: 3}
    start = "search:user_id:ann"
    assert counts(store) == {
        **{f"{start}:{length * 86_400:.0f}:{ends}": used for length, used in days.items()},
        f"{start}:86400:{at('2026-02-27T00:00Z') // 86_400:.0f}": 1,
    }


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
