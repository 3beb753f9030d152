"""Smooth counts of amounts: a call reserves, waits for its amount to drain, and settles its use."""

import asyncio
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota import Quota, TokenLimit
from langchain_quota.core.admission import Correction
from langchain_quota.stores.keys import CountKey, seconds_until_room
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.postgres import PostgresStore
from langchain_quota.stores.redis import RedisStore
from langchain_quota.testing import captured_decisions
from tests.examples import examples
from tests.scene import Scene
from tests.server.postgres import time_of
from tests.server.redis import RedisServer, let_pass, time_from
from tests.server.stores import batch, correcting, settlement, used
from tests.stores import Clock
from tests.telemetry import Signals, paid

START, NOW, LEASE = 3 * 10**9, "now", 900
TICK = Fraction(1, 64)
"""A step of the clock that floating point has exactly, in seconds."""


def key_of(limit: int, counter: str = "model.total_tokens") -> str:
    """The key of a smooth count with so many tokens a minute."""
    return str(CountKey.at(counter, "global", "", timedelta(minutes=1), 0, limit=limit))


@dataclass
class Call:
    """A call: what it reserves, when it was admitted, and what it used of it in the end."""

    request: Any
    reserve: int
    at: Fraction
    used: int = 0


Step = tuple[str, int, int]
"""What happens, and two numbers from 0 to 1000 that say to which call, how much or how long."""

steps = st.tuples(
    st.sampled_from(["call"] * 4 + ["settle"] * 4 + ["wait"] * 3 + ["lost", "delay", "back"]),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
histories = st.tuples(
    st.sampled_from([7, 90_000, 25_000_000, 150_000_000]), st.lists(steps, max_size=40)
)


class Play:
    """A history, played on stores that share a clock and must agree."""

    def __init__(self, limit: int, wait: Callable[[float], None], *stores: Any) -> None:
        self.limit, self.wait, self.stores, self.key = limit, wait, stores, key_of(limit)
        self.now, self.running, self.calls = Fraction(START), list[Call](), list[Call]()
        self.closed_until = self.now
        wait(0)

    def do(self, kind: str, first: int, second: int) -> None:
        """Do a step, and compare what the stores say."""
        if kind in ("wait", "back"):
            passed = TICK * (first * second // 250)
            self.now += passed if kind == "wait" else 0
            self.wait(float(passed if kind == "wait" else -passed))
            return
        if kind == "call":
            self.call(1 + self.limit * first * second // 10**6)
        elif kind == "delay":
            self.closed_until = max(self.closed_until, self.now + TICK * first)
            for store in self.stores:
                store.delay(self.key, float(TICK * first), burst=self.limit)
        elif self.running:
            call = self.running.pop(first % len(self.running))
            undo = Correction(uuid4().hex, attempt_id=call.request.attempt_id)
            settled = settlement(call.request, {self.key: call.reserve * second // 500})
            call.used = 0 if kind == "lost" else min(call.reserve, settled.amounts[self.key])
            for store in self.stores:
                for _ in range(2):
                    store.acquire(correcting(undo if kind == "lost" else settled))
        counts, *others = [used(store, self.key) for store in self.stores]
        assert others == [counts] * len(others)

    def call(self, reserve: int) -> None:
        over = {self.key: self.limit}
        request = batch({self.key: reserve}, limits=over, leases={self.key: LEASE})
        result, *others = [store.acquire(request) for store in self.stores]
        assert others == [result] * len(others)
        level, room = result.drained_in[self.key], self.limit - reserve
        if result.admitted[0]:
            assert self.now >= self.closed_until
            self.calls.append(Call(request, reserve, self.now, reserve))
            self.running.append(self.calls[-1])
        else:
            # It is refused for lack of room alone, and is told when there is some.
            assert seconds_until_room(self.key, level, room) > -1e-6

    def check(self) -> None:
        """In no span of time more than rate and burst; a microsecond is the unit of time."""
        for first, begin in enumerate(self.calls):
            total = 0
            for end in self.calls[first:]:
                total += end.used
                seconds = end.at - begin.at + Fraction(1, 10**6)
                assert total <= self.limit + seconds * self.limit / 60


@examples(120)
@given(history=histories)
def test_redis_agrees(redis_server: RedisServer, history: tuple[int, list[Step]]) -> None:
    """Redis and memory give the same answers, and no time has more than the rate and the burst."""
    clock, prefix = Clock(START), uuid4().hex
    with redis_server.client() as client, time_from(NOW):
        wait = partial(let_pass, client, NOW, clock)
        stores = MemoryStore(clock=clock), RedisStore(client, prefix=prefix)
        play(history, wait, *stores)


@examples(60)
@given(history=histories)
def test_postgres_agrees(postgres_url: str, history: tuple[int, list[Step]]) -> None:
    """The same for PostgreSQL."""
    clock, prefix = Clock(START), uuid4().hex

    def wait(seconds: float) -> None:
        clock.now += seconds

    with closing(PostgresStore(postgres_url, prefix=prefix, timeout=60)) as shared, time_of(clock):
        play(history, wait, MemoryStore(clock=clock), shared)


def play(history: tuple[int, list[Step]], wait: Callable[[float], None], *stores: Any) -> None:
    """Play a history, and check what was admitted."""
    limit, happens = history
    scene = Play(limit, wait, *stores)
    for step in happens:
        scene.do(*step)
    scene.check()


@pytest.mark.parametrize("limit", [90_000, 2_000_000, 25_000_000, 150_000_000])
def test_large_limits_are_reached(limit: int) -> None:
    """Callers that never pause use at least 99.9 % of each limit, and never more than all of it."""
    dice, clock = random.Random(limit), Clock(START)  # noqa: S311 - no secret
    store, key, total, waited = MemoryStore(clock=clock), key_of(limit), 0, 0.0
    for _ in range(2000):
        amount = dice.randint(1, limit // 50)
        request = batch({key: amount}, limits={key: limit})
        while not (result := store.acquire(request)).admitted[0]:
            seconds = seconds_until_room(key, result.drained_in[key], limit - amount)
            clock.now, waited = clock.now + seconds + 1e-6, waited + seconds + 1e-6
        total += amount
    allowed = limit + limit * waited / 60
    assert waited > 300
    assert 0.999 * allowed <= total <= allowed


def test_a_call_that_fits_exactly() -> None:
    """The whole burst fits, one token more never does, and a negative limit refuses everything."""
    for limit in (7, 90_000, 150_000_000):
        key = key_of(limit)
        for maximum, amount, fits in (
            (limit, limit, True),
            (limit, limit + 1, False),
            (-1, 0, False),
        ):
            store = MemoryStore(clock=Clock(START))
            result = store.acquire(batch({key: amount}, limits={key: maximum}))
            assert result.admitted == (fits,)
            assert used(store, key) == [amount if fits else None]


def test_what_has_drained_is_not_given_back() -> None:
    """A call that used less gives back what has not drained; one that used more owes the rest."""
    clock = Clock(START)
    store, key = MemoryStore(clock=clock), key_of(60)
    first, second, third = (batch({key: 60}, limits={key: 60}, leases={key: LEASE}) for _ in "abc")
    assert store.acquire(first).admitted == (True,)
    clock.now += 60
    assert store.acquire(second).admitted == (True,)
    clock.now += 1
    store.acquire(correcting(settlement(first, {key: 0})))
    assert store.acquire(third).admitted == (False,)
    clock.now += 9
    store.acquire(correcting(settlement(second, {key: 30})))
    assert used(store, key) == [20]
    clock.now += 20
    assert store.acquire(third).admitted == (True,)
    store.acquire(correcting(settlement(third, {key: 90})))
    assert used(store, key) == [90]


@pytest.mark.parametrize("kind", ["redis", "postgres"])
async def test_agents_share_a_pace(
    kind: str, signals: Signals, request: pytest.FixtureRequest
) -> None:
    """Agents of two workers wait for tokens in a real store, all run, and settle what they used."""
    if kind == "redis":
        make, url = RedisStore, request.getfixturevalue("redis_server").url
    else:
        make, url = PostgresStore, request.getfixturevalue("postgres_url")  # type: ignore[assignment]
    # Of 30 calls with 1000 tokens each, 9 come at once, and the others within about a second.
    quota = Quota(20_000, per="global", window="1s", smooth=True, burst=10_000)
    limit = TokenLimit(quotas=[quota], reserve=2_000, wait=60)
    stores = [make(url, prefix="pace", timeout=30) for _ in range(2)]
    scenes = [
        Scene(signals, lambda _: paid(1_000), [limit], store=stores[each % 2], thread_id=str(each))
        for each in range(30)
    ]
    try:
        with captured_decisions() as decisions:
            answers = await asyncio.gather(*(scene.play() for scene in scenes))
        assert {each["messages"][-1].text for each in answers} == {"done"}
        assert len([each for each in decisions if each.waited]) >= 10
        pace = await asyncio.to_thread(stores[0].usages, "*:global:*")
        assert [0 <= use.used <= 10_000 for use in pace] == [True]
    finally:
        for store in stores:
            await store.aclose()


def test_a_delay() -> None:
    """It closes a count for so long, the longest one holds, and what was held reopens nothing."""
    clock, key = Clock(START), key_of(60)
    store = MemoryStore(clock=clock)
    held = batch({key: 50}, limits={key: 60}, leases={key: LEASE})
    store.acquire(held)
    for seconds in (10, 20, 10):
        store.delay(key, seconds, burst=60)
    store.acquire(correcting(settlement(held, {key: 0})))
    assert store.acquire(batch({key: 1}, limits={key: 60})).drained_in == {key: 80 * 10**6}
    clock.now += 21
    calls = [store.acquire(batch({key: 1}, limits={key: 60})).admitted for _ in range(2)]
    assert calls == [(True,), (False,)]
    with pytest.raises(
        ValueError, match="key must be that of a smooth count, not 'search:user_id:"
    ):
        store.delay("search:user_id:ada", 1)
