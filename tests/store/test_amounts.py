"""Smooth counts of amounts: a call reserves, waits for its amount to drain, and settles its use."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from langchain_quota import MemoryStore
from langchain_quota.core.admission import Correction
from tests.examples import examples
from tests.server.stores import batch, correcting, settlement, used
from tests.store.conftest import Place
from tests.stores import Clock

START, LEASE = 3 * 10**9, 900
TICK = Fraction(1, 64)
"""A step of the clock that floating point has exactly, in seconds."""


def key_of(limit: int) -> str:
    """The key of a smooth count with so many tokens a minute."""
    return f"model.total_tokens:global::60~{limit}"


def microseconds(amount: int, limit: int) -> int:
    """How long an amount takes to drain, rounded up."""
    return -(-amount * 60 * 10**6 // limit)


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
    st.sampled_from(
        ["call"] * 4 + ["settle"] * 4 + ["wait"] * 3 + ["delay"] * 2 + ["lost", "back"]
    ),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
histories = st.tuples(
    st.sampled_from([7, 90_000, 25_000_000, 150_000_000]), st.lists(steps, max_size=40)
)

DELAYS: list[Step] = [("delay", 640, 0), ("delay", 1000, 0), ("delay", 640, 0)]
"""The longest one holds, and what was held reopens nothing."""


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
        level = result.drained_in[self.key] + microseconds(reserve, self.limit)
        # Room is the only reason to refuse it.
        assert result.admitted == (level <= microseconds(self.limit, self.limit),)
        if result.admitted[0]:
            assert self.now >= self.closed_until
            self.calls.append(Call(request, reserve, self.now, reserve))
            self.running.append(self.calls[-1])

    def check(self) -> None:
        """In no span of time more than rate and burst; a microsecond is the unit of time."""
        nothing = batch({self.key: 0}, limits={self.key: -1})
        assert [each.acquire(nothing).admitted for each in self.stores] == [(False,)] * 2
        for first, begin in enumerate(self.calls):
            total = 0
            for end in self.calls[first:]:
                total += end.used
                seconds = end.at - begin.at + Fraction(1, 10**6)
                assert total <= self.limit + seconds * self.limit / 60


@pytest.mark.parametrize("place", ["redis", "postgres"], indirect=True)
@examples(120)
@given(history=histories)
@example(history=(90_000, [("call", 900, 1000), *DELAYS, ("settle", 0, 0), ("call", 1, 1)]))
def test_stores_agree(place: Place, history: tuple[int, list[Step]]) -> None:
    """A server and memory answer the same, and no time has more than the rate and the burst."""
    limit, happens = history
    with place.stores(START) as make:
        scene = Play(limit, make.wait, MemoryStore(clock=make.clock), make())
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
            seconds = result.drained_in[key] / 10**6 - (limit - amount) * 60 / limit + 1e-6
            clock.now, waited = clock.now + seconds, waited + seconds
        total += amount
    allowed = limit + limit * waited / 60
    assert waited > 300
    assert 0.999 * allowed <= total <= allowed
