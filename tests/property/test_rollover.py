"""What rolls over from window to window, in random zones and stores, against a plain model."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from langchain_quota import Decision, MemoryStore, Quota, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, Correction
from langchain_quota.limits.quotas import CALENDAR
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.postgres import PostgresStore
from langchain_quota.stores.redis import RedisStore
from tests.examples import examples
from tests.property.test_calendar import ODD
from tests.scene import ANN, Form, Scene, asking
from tests.server.postgres import time_of
from tests.server.redis import RedisServer, let_pass, time_from
from tests.stores import Clock
from tests.telemetry import telling

LIMIT, ROLLOVER = 5, 3
START = 3 * 10**9
"""When a history begins: so late that Redis, by its own clock, forgets nothing meanwhile."""
Step = tuple[str, int]
"""What happens, and an amount: of calls, or of tenths of a window."""
Wait = Callable[[float], None] | None
Window = tuple[str, str | int | None]
"""A window, and when it starts."""
WINDOWS: list[Window] = [
    *(("6h", None), ("hour", None), ("day", None)),
    *(("week", "sunday"), ("month", 1), ("month", 31)),
]
ACTIONS = ["run", "run", "run", "wait", "wait", "grant", "reset", "late"]


class History(NamedTuple):
    """What happens from when on, under which quota, and how the agent is called."""

    plan: list[Step]
    window: Window
    zone: str
    now: int
    form: Form


histories = st.builds(
    History,
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 8)), min_size=3, max_size=14),
    st.sampled_from(WINDOWS),
    st.sampled_from([*ODD, "Europe/Berlin", "UTC"]),
    st.integers(START, START + 10**8),
    st.sampled_from(["sync", "async"]),
)
LATE = [("run", 4), ("wait", 8), ("run", 1), ("late", 8), ("run", 8), ("wait", 20), ("run", 1)]
refunded_late = example(History(LATE, ("day", None), "Europe/Berlin", 3_005_463_600, "sync"))
"""A call is refunded in the next window, on a day on which clocks are set forward."""


class World:
    """An agent under a quota that rolls over, and what the model says of each window, by its end.

    Args:
        history: What happens.
        store: Where the agent counts.
        clock: The store's clock.
        wait: Lets seconds pass there, if that takes more than the clock.
    """

    def __init__(
        self,
        history: History,
        store: Any,
        clock: Clock,
        wait: Callable[[float], None] | None = None,
    ) -> None:
        (window, starts), zone = history.window, history.zone
        tz = zone if window in CALENDAR else None
        self.quota = Quota(
            LIMIT, per="user_id", window=window, tz=tz, starts=starts, rollover=ROLLOVER
        )
        store.clock = clock
        self.store, self.clock, self.wait, self.form = store, clock, wait, history.form
        self.used, self.granted, self.rolled = dict[int, int](), dict[int, int](), dict[int, int]()
        self.calls, self.runs, self.decisions = 0, 0, list[Decision]()
        self.scene = Scene(
            telling(spans="off"),
            self.answer,
            [ToolCallLimit("search", quotas=[self.quota])],
            store=store,
            form=history.form,
            on_decision=self.decisions.append,
        )

    def answer(self, messages: Any) -> Any:
        return asking(*["search"] * self.calls)(messages)

    def key(self, now: float) -> CountKey:
        return CountKey.at("search", "user_id", "ann", self.quota.period, now)

    @property
    def begin(self) -> int:
        """When the present window began, and the one before ended."""
        return self.end - (self.key(self.clock.now).window or 0)

    @property
    def end(self) -> int:
        return self.key(self.clock.now).ends or 0

    @property
    def limit(self) -> int:
        """The limit of the present window; until its first call, what would roll over now."""
        left = LIMIT - self.used.get(self.begin, 0)
        rolled = self.rolled.get(self.end, max(0, min(ROLLOVER, left)))
        return LIMIT + rolled + self.granted.get(self.end, 0)

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.form == "sync":
            return getattr(self.scene.quota, method)("tool:search", *arguments, **ANN)
        return await getattr(self.scene.quota, f"a{method}")("tool:search", *arguments, **ANN)

    async def run(self, calls: int) -> None:
        limit, before, ran = self.limit, self.used.get(self.end, 0), len(self.scene.ran)
        self.calls, self.runs = calls, self.runs + 1
        self.decisions.clear()
        await self.scene.play(context=ANN, thread_id=self.runs)
        admitted = min(calls, max(0, limit - before))
        assert len(self.scene.ran) - ran == admitted
        counts: list[Any] = [
            status.count_of("user_id") for each in self.decisions for status in each.limits
        ]
        assert {count.limit for count in counts} == {limit}
        self.rolled.setdefault(self.end, limit - LIMIT - self.granted.get(self.end, 0))
        self.used[self.end] = before + admitted

    async def step(self, what: str, amount: int) -> None:
        if what == "run":
            await self.run(amount)
        elif what == "wait":
            seconds = (self.end - self.begin) * amount // 10 + 1
            if self.wait is None:
                self.clock.now += seconds
            else:
                self.wait(seconds)
        elif what == "grant":
            await self.call("grant", amount)
            self.granted[self.end] = self.granted.get(self.end, 0) + amount
        elif what == "reset":
            await self.call("reset")
            self.used[self.end] = 0
        elif self.begin in self.rolled:
            # A call of the window before is refunded, or settled, in this one.
            change = 4 - amount
            late = Correction(uuid4().hex, {str(self.key(self.begin - 1)): change})
            self.store.acquire(AcquireRequest("", "", corrections=(late,)))
            self.used[self.begin] = max(0, self.used[self.begin] + change)

    async def play(self, plan: list[Step]) -> None:
        for what, amount in plan:
            await self.step(what, amount)
            balance, used = await self.call("left"), self.used.get(self.end, 0)
            assert (balance.used, balance.limit) == (used, self.limit)
            assert balance.left == max(0, self.limit - used)
            assert balance.resets_at.timestamp() == self.end


@examples(60)
@given(history=histories)
@refunded_late
def test_rollover(history: History) -> None:
    """Of any runs, waits, grants, resets and late charges, each window has what the model says."""
    clock = Clock(history.now)
    asyncio.run(World(history, MemoryStore(clock=clock), clock).play(history.plan))


@pytest.mark.rest
@examples(60)
@given(history=histories)
@refunded_late
def test_rollover_in_redis(redis_server: RedisServer, history: History) -> None:
    """The same in Redis, where every count expires."""
    clock, history = Clock(history.now), history._replace(form="sync")
    with redis_server.client() as client, time_from("now"):
        client.flushall()
        wait = partial(let_pass, client, "now", clock)
        wait(0)
        store = RedisStore(client, prefix=uuid4().hex)
        asyncio.run(World(history, store, clock, wait).play(history.plan))
        assert all(client.expiretime(name) > clock.now for name in client.keys("*:count:*"))


@pytest.mark.rest
@examples(60)
@given(history=histories)
@refunded_late
def test_rollover_in_postgres(postgres_url: str, history: History) -> None:
    """The same in PostgreSQL."""
    clock, history = Clock(history.now), history._replace(form="sync")
    with (
        closing(PostgresStore(postgres_url, prefix=uuid4().hex, timeout=60)) as store,
        time_of(clock),
    ):
        asyncio.run(World(history, store, clock).play(history.plan))
