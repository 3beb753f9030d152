"""MemoryStore, RedisStore and the rule itself agree on random batches, call by call."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_quota.errors import QuotaStoreError
from langchain_quota.reservation import Cap, Grant, Reservation, Settlement, Slot, admit
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.redis import RedisStore
from tests.servers.redis import RedisServer

KEYS = (
    "plain",
    str(CountKey("search", "user_id", "ada")),
    str(CountKey("search", "user_id", "ada", 86_400, 40_000)),
    str(CountKey("__all__", "tenant", "Grüße:{*}", 3600, 900_000)),
)
ATTEMPTS = ("", "a", "b", "c")
LIMITS = ("one", "two", "three")

caps = st.builds(
    Cap,
    name=st.sampled_from(LIMITS),
    limit=st.integers(-2, 8) | st.just(2**53 - 1),
    enforced=st.booleans(),
)
slots = st.builds(
    Slot,
    key=st.none() | st.sampled_from(KEYS),
    used=st.integers(0, 3) | st.just(10**15),
    expires_at=st.none() | st.sampled_from([5e9, 5e9 + 0.5]),
    caps=st.lists(caps, max_size=3).map(tuple),
    mirrored=st.booleans(),
)
settlements = st.builds(
    Settlement,
    id=st.sampled_from(["s", "t", "u", "v"]),
    amounts=st.dictionaries(st.sampled_from(KEYS), st.sampled_from([-7, -1, 0, 2]), max_size=3),
    attempt=st.none() | st.sampled_from(ATTEMPTS),
    reservation=st.sampled_from(["", "i", "j", "k"]),
    starts=st.dictionaries(st.sampled_from(KEYS), st.integers(0, 9), max_size=2),
)


@st.composite
def reservations(draw: st.DrawFn) -> Reservation:
    """A batch; ids, attempts and keys are few, so that they meet again."""
    some = draw(st.lists(slots, max_size=4))
    indexes = st.integers(0, len(some) - 1) if some else st.nothing()
    amounts = st.integers(1, 3) | st.just(10**14)
    charge = st.dictionaries(indexes, amounts, max_size=min(3, len(some)))
    return Reservation(
        id=draw(st.sampled_from(["", "", "i", "j", "k"])),
        attempt=draw(st.sampled_from(ATTEMPTS)),
        slots=tuple(some),
        charges=tuple(draw(st.lists(charge, max_size=4))),
        stops=draw(st.dictionaries(st.sampled_from(LIMITS), st.integers(1, 3), max_size=2)),
        settlements=tuple(draw(st.lists(settlements, max_size=2))),
    )


@dataclass
class Model:
    """What stores promise, said as plainly as can be, without time."""

    counts: dict[str, int] = field(default_factory=dict)
    answers: dict[str, Grant] = field(default_factory=dict)
    made: dict[str, tuple[str, dict[str, int]]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)

    def reserve(self, reservation: Reservation) -> Grant:
        for settlement in reservation.settlements:
            if settlement.id not in self.settled:
                self.settled.add(settlement.id)
                self.settle(settlement)
        if reservation.attempt in self.refused:
            raise QuotaStoreError("settled")
        known = self.answers.get(reservation.id)
        if known is not None:
            sizes = (len(reservation.slots), len(reservation.charges))
            if (len(known.used), len(known.admitted)) != sizes:
                raise QuotaStoreError("form")
            return replace(known, known=True)
        return self.judge(reservation)

    def judge(self, reservation: Reservation) -> Grant:
        used = [self.counts.get(slot.key or "", slot.used) for slot in reservation.slots]
        grant = admit(reservation, used)
        charged: dict[str, int] = {}
        for slot, before, amount in zip(
            reservation.slots, used, grant.charged(reservation), strict=True
        ):
            if slot.key and amount:
                charged[slot.key] = charged.get(slot.key, 0) + amount
                self.counts[slot.key] = self.counts.get(slot.key, before) + amount
        if charged:
            if reservation.id:
                self.answers[reservation.id] = grant
            if reservation.attempt:
                self.made[reservation.attempt] = (reservation.id, charged)
        return grant

    def settle(self, settlement: Settlement) -> None:
        amounts = list(settlement.amounts.items())
        if settlement.attempt:
            self.refused.add(settlement.attempt)
            name, charged = self.made.pop(settlement.attempt, ("", {}))
            self.answers.pop(name, None)
            for key, amount in charged.items():
                self.add(key, -amount)
        if settlement.reservation not in self.answers:
            for key, amount in amounts:
                self.add(key, amount, settlement.starts.get(key, 0))

    def add(self, key: str, amount: int, start: int = 0) -> None:
        if amount > 0 or key in self.counts:
            self.counts[key] = max(0, self.counts.get(key, start) + amount)


@pytest.fixture(scope="module")
def server(redis_server: RedisServer) -> Iterator[RedisServer]:
    """The module's server, emptied afterwards."""
    yield redis_server
    with redis_server.client() as client:
        client.flushall()


def outcome(store: Model | QuotaStore, reservation: Reservation) -> Grant | None:
    """The answer; `None` for a refusal of the whole."""
    try:
        return store.reserve(reservation)
    except QuotaStoreError:
        return None


@settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(asked=st.lists(reservations(), min_size=1, max_size=10))
def test_all_agree(server: RedisServer, asked: list[Reservation]) -> None:
    """The same batches get the same answers, and leave the same counts, limits and windows."""
    model, memory = Model(), MemoryStore()
    shared = RedisStore(server.url, prefix=server.prefix(), timeout=30)
    try:
        for reservation in asked:
            expected = outcome(model, reservation)
            assert outcome(memory, reservation) == expected
            assert outcome(shared, reservation) == expected
            kept = memory.peek(KEYS)
            assert shared.peek(KEYS) == kept
            assert [use and use.used for use in kept] == [model.counts.get(key) for key in KEYS]
        assert shared.usages() == memory.usages()
    finally:
        shared.close()
