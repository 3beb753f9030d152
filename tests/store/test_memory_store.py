"""What is MemoryStore's own: its clock, its bounds, and what it drops when it is full."""

import gc
import tracemalloc
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import pytest

from langchain_quota.core.admission import AcquireRequest, Correction, CountRef, Demand, Threshold
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores.memory import MemoryStore
from tests.server.stores import correcting, used
from tests.stores import Clock, calls_made

A, C, D = (f"{each}:global:" for each in "acd")
HOUR = 3600
DAY = 24 * HOUR
WEEK = 7 * DAY


class Key(str):
    """A key that counts how often keys are looked at."""

    __slots__ = ()
    looks: ClassVar[int] = 0

    def __hash__(self) -> int:
        Key.looks += 1
        return super().__hash__()


def asked(
    *keys: str,
    limit: int = 100,
    used: int = 0,
    mirrored: bool = False,
    name: str = "",
    ends: float | None = None,
    lease: int | None = None,
    corrections: tuple[Correction, ...] = (),
) -> AcquireRequest:
    """One call that is charged to keys; a name is its idempotency key and its attempt."""
    counters = {key: CountRef(key, used, ends, mirrored, lease) for key in keys}
    over = tuple(Threshold("limit", "thread", key, limit) for key in keys)
    demand = Demand(dict.fromkeys(keys, 1), over)
    return AcquireRequest(name, name, counters, (demand,), corrections=corrections)


def test_a_full_store_refuses_new_keys() -> None:
    """A store full of live counts forgets none, whoever comes; what has run always fits."""
    clock = Clock(0)
    store = MemoryStore(max_keys=2, clock=clock)
    store.acquire(asked(A))
    store.acquire(asked("b", ends=100))
    with pytest.raises(QuotaStoreError, match="the store is full: it keeps 2 counts at most"):
        store.acquire(asked(C))
    with pytest.raises(QuotaStoreError):
        store.reset([A, C])
    with pytest.raises(QuotaStoreError):
        store.acquire(asked("thread", mirrored=True))
    assert store.acquire(asked(C, limit=0)).admitted == (False,)
    assert used(store, A, "b", C) == [1, 1, None]
    store.acquire(correcting(Correction("outage", {D: 1})))
    assert used(store, A, "b", D) == [1, 1, 1]
    clock.now = 100 + HOUR
    store.reset([D])
    assert used(store, A, "b", D) == [1, None, 0]


def test_a_full_store_drops_what_its_caller_brings_back() -> None:
    """Of counts that callers mirror the one that was charged longest ago makes room."""
    store = MemoryStore(max_keys=3)
    for thread in ("one", "two", "three", "one", "four"):
        assert store.acquire(asked(thread, mirrored=True)).admitted == (True,)
    assert used(store, "one", "two", "three", "four") == [2, None, 1, 1]
    # It goes on where its own state says.
    assert store.acquire(asked("two", used=1, limit=2, mirrored=True)).used == {"two": 1}
    assert used(store, "one", "two", "three", "four") == [2, 2, None, 1]


def test_what_is_charged_now_is_not_dropped_for_it() -> None:
    """A batch drops counts of others, and none if it does not fit even then."""
    store = MemoryStore(max_keys=3)
    for key in ("a", "b"):
        store.acquire(asked(key, mirrored=True))
    store.acquire(asked("user"))
    with pytest.raises(QuotaStoreError):
        store.acquire(asked("a", "c", "d", mirrored=True))
    assert used(store, "a", "b", "user") == [1, 1, 1]
    store.acquire(asked("a", "c", mirrored=True))
    assert used(store, "a", "b", "c", "user") == [2, None, 1, 1]


def test_a_dropped_count_takes_its_holds_along() -> None:
    """A count that comes back from its caller has nothing held: a settlement charges all."""
    store = MemoryStore(max_keys=1)
    store.acquire(asked("a", used=3, mirrored=True, name="one", lease=60))
    store.acquire(asked("b", mirrored=True))
    assert used(store, "a", "b") == [None, 1]
    settled = Correction("s", {"a": 4}, starts={"a": 3}, settles="one")
    store.acquire(correcting(settled))
    assert used(store, "a") == [7]


def test_occupancy() -> None:
    """How many counts there are, how many of them can be dropped, and how many there can be."""
    clock = Clock(0)
    store = MemoryStore(max_keys=10, clock=clock)
    store.acquire(asked("user"))
    store.acquire(asked("thread", mirrored=True))
    store.acquire(asked("window", ends=100))
    assert store.occupancy == (3, 1, 10)
    assert store.occupancy.share == 0.2
    assert repr(store) == "MemoryStore(keys=3, max_keys=10)"
    clock.now = 100 + HOUR
    store.acquire(asked("user"))
    assert store.occupancy == (2, 1, 10)


def test_a_charge_does_not_look_at_other_counts() -> None:
    """However many counts there are, a charge costs the same: also in a full store."""
    store = MemoryStore(max_keys=1_000)
    for number in range(1_000):
        store.acquire(asked(Key(f"thread-{number}"), mirrored=True))
    Key.looks = 0
    made = calls_made(lambda: store.acquire(asked(Key("thread-0"), mirrored=True)))
    made += calls_made(lambda: store.acquire(asked(Key("another"), mirrored=True)))
    assert Key.looks < 100
    assert made < 200 + Key.looks


def test_holds_and_grants_of_others_are_not_looked_at() -> None:
    """However much is held and granted, a charge, a settlement and a grant cost the same."""

    def work(others: int) -> list[int]:
        clock = Clock()
        store = MemoryStore(clock=clock)
        end = datetime.fromtimestamp(clock.now + HOUR, UTC)
        store.grant("search:user_id:ann", 1, window=None, until=end, id="over")
        for number in range(others):
            store.grant(f"search:user_id:{number}", 1, window=None)
            store.acquire(asked("tokens", name=str(number), lease=WEEK * 2, limit=10**6))
        settled = correcting(Correction("s", {"tokens": 2}, settles="0"))
        made = [
            calls_made(lambda: store.acquire(settled)),
            calls_made(lambda: store.acquire(asked("tokens", name="x", lease=60, limit=10**6))),
        ]
        clock.now += HOUR + WEEK
        made.append(
            calls_made(lambda: store.grant("search:user_id:ann", 2, window=None, id="over"))
        )
        return [*made, calls_made(lambda: store.revoke("search:user_id:ann", "over"))]

    few, many = work(10), work(1_000)
    assert all(more <= less + 50 for less, more in zip(few, many, strict=True))


def test_memory_is_bounded() -> None:
    """However many subjects and requests come and go, no more is kept than fits."""
    clock = Clock(0)
    store = MemoryStore(max_keys=50, idle_ttl=timedelta(seconds=10), clock=clock)

    def grown(numbers: range) -> int:
        before = taken()
        for number in numbers:
            clock.now += 1
            undo = Correction(f"s{number}", attempt_id=f"lost{number}")
            store.acquire(asked(f"user-{number}", name=f"name{number}", corrections=(undo,)))
            if number % 3 == 0:
                store.acquire(asked("steady", limit=1000, ends=number + 5.5))
        return taken() - before

    def taken() -> int:
        # Python keeps small objects that are free until it collects garbage.
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        grown(range(500))
        assert grown(range(500, 2000)) < 20_000
    finally:
        tracemalloc.stop()
    assert used(store, "steady") == [667]
    assert len(store.usages()) == 11


def test_expired_counts_go_in_steps() -> None:
    """No operation pays for all that has expired at once, and in the end all of it is gone."""
    clock = Clock(0)
    store = MemoryStore(clock=clock)
    for number in range(1000):
        store.acquire(asked(f"user-{number}", ends=10))
    clock.now = 10 + HOUR
    sizes = []
    for _ in range(11):
        store.acquire(asked("search"))
        sizes.append(store.occupancy.keys)
    assert sizes == [901, 801, 701, 601, 501, 401, 301, 201, 101, 1, 1]


def test_a_clock_that_goes_back() -> None:
    """A count is kept for as long as was said when it was charged last, and at least as before."""
    clock = Clock(HOUR)
    store = MemoryStore(idle_ttl=timedelta(seconds=HOUR), clock=clock)
    for now, ends in ((3 * HOUR, 4 * HOUR), (HOUR, 2 * HOUR)):
        clock.now = now
        store.acquire(asked("search", ends=ends))
        store.acquire(asked("email"))
    clock.now = 4 * HOUR - 1
    assert used(store, "search", "email") == [2, 2]
    clock.now = 5 * HOUR
    assert used(store, "search", "email") == [None, None]
