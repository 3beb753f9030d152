"""Windows of the calendar, at random times in random zones, against dateutil's recurrences."""

import asyncio
from collections import Counter
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4
from zoneinfo import ZoneInfo, available_timezones

from dateutil.rrule import DAILY, HOURLY, MONTHLY, WEEKLY, rrule
from dateutil.tz import datetime_ambiguous, datetime_exists
from hypothesis import example, given
from hypothesis import strategies as st

from langchain_quota import CostLimit, Decision, MemoryStore, Quota, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, Correction
from langchain_quota.limits.quotas import CALENDAR
from tests.examples import examples
from tests.scene import Form, Scene
from tests.stores import Clock
from tests.telemetry import paid, telling

ZONES = sorted(each for each in available_timezones() if not each.startswith(("posix", "right")))
ODD = ["Australia/Lord_Howe", "Africa/Cairo", "America/Havana", "America/St_Johns", "Asia/Gaza"]
"""Zones whose clocks are set at midnight, or by half an hour."""
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
Cycle = tuple[str, int]
"""A window, and the day on which it starts, if that matters."""


class Window(NamedTuple):
    """A window of a count: its key there, and when it begins and ends."""

    key: str
    begin: int
    end: int


def window_at(quota: Quota, now: float, count: str = "search:tenant:acme") -> Window:
    """The window of a moment, as the grant to a count shows it."""
    granted = MemoryStore(clock=lambda: now).grant(count, 1, window=quota.period)
    assert granted.ends is not None
    return Window(granted.key, granted.ends - int(granted.key.split(":")[3]), granted.ends)


def starts_of(zone: ZoneInfo, cycle: Cycle, since: int, until: int) -> set[int]:
    """The moments at which windows start: when a clock first shows what dateutil gives."""
    window, day = cycle
    every: dict[str, tuple[Any, dict[str, Any]]] = {
        "hour": (HOURLY, {}),
        "day": (DAILY, {}),
        "week": (WEEKLY, {"byweekday": day % 7}),
        # The day of the month, or the last one of a month that has no such day.
        "month": (MONTHLY, {"bymonthday": (day + 1, -1), "bysetpos": 1}),
    }
    frequency, days = every[window]
    hour = None if window == "hour" else 0
    known: dict[str, Any] = {"byhour": hour, "byminute": 0, "bysecond": 0, **days}
    begin, end = (
        datetime.fromtimestamp(each, zone).replace(tzinfo=None) for each in (since, until)
    )
    # More than a zone's clock is ever set by.
    given = begin.replace(microsecond=0) - timedelta(days=33), end + timedelta(days=2)
    found = set[int]()
    for local in rrule(frequency, dtstart=given[0], until=given[1], **known):
        first, again = (local.replace(tzinfo=zone, fold=fold).timestamp() for fold in (0, 1))
        if not datetime_exists(local, zone):
            # The clock skips it, some minutes before it would show it.
            while datetime.fromtimestamp(first - 60, zone).replace(tzinfo=None) >= local:
                first -= 60
        elif window == "hour" and datetime_ambiguous(local, zone):
            found.add(int(again))
        found.add(int(first))
    return found


@examples(200)
@given(
    name=st.sampled_from(ZONES) | st.sampled_from(ODD),
    cycle=st.tuples(st.sampled_from(["hour", "day", "week", "month"]), st.integers(0, 30)),
    # To the second, since the last zone has had an odd number of seconds.
    now=st.integers(100_000_000, 2_500_000_000),
)
@example(name="Pacific/Apia", cycle=("day", 0), now=1_325_200_000)  # a day that never was
@example(name="Pacific/Chatham", cycle=("hour", 0), now=1_790_429_400)  # 3:00 is skipped at 2:45
@example(name="Europe/Berlin", cycle=("month", 30), now=1_774_700_000)  # the last day of February
@example(name="Europe/Berlin", cycle=("hour", 0), now=1_792_883_400)  # 2:00 comes twice
@example(name="Australia/Lord_Howe", cycle=("hour", 0), now=1_775_312_000)
@example(name="America/Toronto", cycle=("day", 0), now=562_125_000)  # set back at 0:01
def test_windows_follow_one_another(name: str, cycle: Cycle, now: int) -> None:
    """Three windows begin and end as a clock shows, each where the one before has ended."""
    window, day = cycle
    starts = {"week": DAYS[day % 7], "month": str(day + 1)}.get(window)
    quota = Quota(1, per="tenant", window=window, tz=name, starts=starts)
    windows = [window_at(quota, now)]
    windows += [following := window_at(quota, windows[0].end), window_at(quota, following.end)]
    moments = [*(each.begin for each in windows), windows[-1].end]
    assert moments[0] <= now < moments[1]
    assert moments[1:] == [each.end for each in windows]
    # Every moment of a window has the same key.
    assert windows == [window_at(quota, each.end - 1) for each in windows]
    starts_there = starts_of(ZoneInfo(name), cycle, moments[0], moments[-1])
    assert sorted(each for each in starts_there if moments[0] <= each <= moments[-1]) == moments


LIMIT, ROLLOVER = 5, 3
START = 3 * 10**9
"""When a history begins at the earliest."""
Step = tuple[str, str, int]
"""What happens, to which tenant, and an amount: of calls, or of tenths of a window."""
WINDOWS: list[tuple[str, str | int | None]] = [
    *(("6h", None), ("hour", None), ("day", None)),
    *(("week", "sunday"), ("month", 1), ("month", 31)),
]
"""A window, and when it starts."""
ACTIONS = ["run", "run", "run", "wait", "wait", "grant", "revoke", "reset", "late"]
TENANTS = ("acme", "beta")


class History(NamedTuple):
    """What happens from when on, under which quota, and how the agent is called.

    The quota is of calls or of money: then each call, of a tool or of the model, costs a cent.
    """

    plan: list[Step]
    window: tuple[str, str | int | None]
    zone: str
    now: int
    form: Form
    money: bool


steps = st.tuples(st.sampled_from(ACTIONS), st.sampled_from(TENANTS), st.integers(1, 8))
histories = st.builds(
    History,
    st.lists(steps, min_size=3, max_size=14),
    st.sampled_from(WINDOWS),
    st.sampled_from([*ODD, "Europe/Berlin", "UTC"]),
    st.integers(START, START + 10**8),
    st.sampled_from(["sync", "async"]),
    st.booleans(),
)
LATE = [("run", 4), ("wait", 8), ("run", 1), ("late", 8), ("run", 8), ("wait", 20), ("run", 1)]
REFUNDED_LATE = History(
    [(what, "acme", amount) for what, amount in LATE],
    *(("day", None), "Europe/Berlin", 3_005_463_600, "sync"),
    money=False,
)
"""A call is refunded in the next window, on a day on which clocks are set forward."""


class World:
    """An agent under a quota that rolls over, and what the model says of each tenant's windows.

    Args:
        history: What happens.
    """

    def __init__(self, history: History) -> None:
        (window, starts), money = history.window, history.money
        self.one: Any = Decimal("0.01") if money else 1
        self.unit = 10**7 if money else 1
        amounts: Any = {"limit": LIMIT * self.one, "rollover": ROLLOVER * self.one}
        tz = history.zone if window in CALENDAR else None
        self.quota = Quota(per="tenant", window=window, tz=tz, starts=starts, **amounts)
        kind: Any = partial(ToolCallLimit, "search")
        if money:
            kind = partial(CostLimit, tool_prices={"search": "0.01"})
        options: Any = {"prices": lambda used: Decimal(used.total_tokens) / 100} if money else {}
        self.clock, self.history = Clock(history.now), history
        self.store = MemoryStore(clock=self.clock)
        # By tenant and the end of a window.
        self.used, self.granted = Counter[Any](), Counter[Any]()
        self.rolled, self.grants = dict[Any, int](), dict[str, Any]()
        self.tenant, self.calls, self.runs = "", 0, 0
        self.decisions = list[Decision]()
        self.scene = Scene(
            telling(spans="off"),
            self.answer,
            [kind(quotas=[self.quota], name="limit")],
            store=self.store,
            form=history.form,
            on_decision=self.decisions.append,
            **options,
        )

    def answer(self, messages: Any) -> Any:
        self.used[self.now] += self.history.money
        return paid(1, *["search"] * (self.calls if messages[-1].type == "human" else 0))

    def window(self, now: float) -> Window:
        """The present tenant's window."""
        counter = "model.nanodollars" if self.history.money else "search"
        return window_at(self.quota, now, f"{counter}:tenant:{self.tenant}")

    @property
    def now(self) -> tuple[str, int]:
        return self.tenant, self.window(self.clock.now).end

    @property
    def before(self) -> tuple[str, int]:
        return self.tenant, self.window(self.clock.now).begin

    @property
    def limit(self) -> int:
        """The limit of the present window; until its first call, what would roll over now."""
        left = LIMIT - self.used[self.before]
        rolled = self.rolled.get(self.now, max(0, min(ROLLOVER, left)))
        return LIMIT + rolled + self.granted[self.now]

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self.scene.call(method, "limit", *arguments, tenant=self.tenant)

    async def run(self, calls: int) -> None:
        limit, used, ran = self.limit, self.used[self.now], len(self.scene.ran)
        self.calls, self.runs = calls, self.runs + 1
        self.decisions.clear()
        await self.scene.play(context={"tenant": self.tenant}, thread_id=self.runs)
        # The first model call costs a cent, too; the last one may not be made any more.
        admitted = min(calls, max(0, limit - used - self.history.money))
        assert len(self.scene.ran) - ran == admitted
        counts: list[Any] = [
            status.count_of("tenant") for each in self.decisions for status in each.limits
        ]
        assert {count.limit for count in counts} == {limit * self.unit}
        assert counts[0].before == used * self.unit
        self.rolled.setdefault(self.now, limit - LIMIT - self.granted[self.now])
        self.used[self.now] += admitted

    async def step(self, what: str, amount: int) -> None:
        window = self.window(self.clock.now)
        if what == "run":
            await self.run(amount)
        elif what == "wait":
            self.clock.now += (window.end - window.begin) * amount // 10 + 1
        elif what == "grant":
            granted = await self.call("grant", amount * self.one)
            self.grants[self.tenant] = granted.id, self.now
            self.granted[self.now] += amount
        elif what == "revoke" and self.tenant in self.grants:
            grant_id, then = self.grants[self.tenant]
            ended = await self.call("revoke", grant_id)
            self.granted[then] -= ended.amount // self.unit if ended else 0
        elif what == "reset":
            await self.call("reset")
            self.used[self.now] = 0
        elif what == "late" and self.before in self.rolled:
            # A call of the window before is refunded, or settled, in this one.
            change, key = 4 - amount, self.window(window.begin - 1).key
            late = Correction(uuid4().hex, {key: change * self.unit})
            self.store.acquire(AcquireRequest("", "", corrections=(late,)))
            self.used[self.before] = max(0, self.used[self.before] + change)

    async def play(self) -> None:
        for what, tenant, amount in self.history.plan:
            self.tenant = tenant
            await self.step(what, amount)
            for each in TENANTS:
                self.tenant = each
                balance, used, limit = await self.call("left"), self.used[self.now], self.limit
                amounts = used * self.one, limit * self.one, max(0, limit - used) * self.one
                assert (balance.used, balance.limit, balance.left) == amounts
                assert balance.unit == ("dollars" if self.history.money else "calls")
                # As the clocks there show it.
                ends = datetime.fromtimestamp(self.now[1], ZoneInfo(self.quota.tz or "UTC"))
                assert balance.resets_at.isoformat() == ends.isoformat()


@examples(100)
@given(history=histories)
@example(history=REFUNDED_LATE)
def test_rollover(history: History) -> None:
    """Of any runs, grants, revocations, resets and late charges, each window has what is said."""
    asyncio.run(World(history).play())
