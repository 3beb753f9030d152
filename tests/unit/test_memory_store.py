"""What is MemoryStore's own: its clock, its bounds, and what it forgets."""

from datetime import timedelta
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota.admission import (
    AcquireRequest,
    Compensation,
    Counter,
    Hits,
    Threshold,
)
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores.grants import in_utc
from langchain_quota.stores.memory import MemoryStore
from tests.calls import calls_made
from tests.clock import Clock
from tests.servers.stores import used

HOUR = 3600
DAY = timedelta(days=1)
WEEK = 7 * 24 * HOUR


class Key(str):
    """A key that counts how often keys are looked at."""

    __slots__ = ()
    looks: ClassVar[int] = 0

    def __hash__(self) -> int:
        Key.looks += 1
        return super().__hash__()


def asked(
    key: str,
    limit: int = 100,
    *,
    used: int = 0,
    mirrored: bool = False,
    name: str = "",
    attempt: str = "",
    ends: float | None = None,
    compensations: tuple[Compensation, ...] = (),
) -> AcquireRequest:
    """One call that is charged to one key; a name is its idempotency key."""
    counters = {"count": Counter(key, used, ends, mirrored)}
    hits = Hits({"count": 1}, (Threshold("limit", "thread", "count", limit),))
    return AcquireRequest(name, attempt, counters, (hits,), compensations=compensations)


def call(*keys: str, mirrored: bool = False, name: str = "") -> AcquireRequest:
    """One call that is charged to several keys."""
    counters = {key: Counter(key, mirrored=mirrored) for key in keys}
    return AcquireRequest(name, "", counters, (Hits(dict.fromkeys(keys, 1)),))


def compensate(store: MemoryStore, *compensations: Compensation) -> None:
    store.acquire(AcquireRequest("", "", compensations=compensations))


def check_each_key_is_kept_once(store: MemoryStore) -> None:
    """Nothing is left of a count that is gone, and every count is found when its time comes."""
    counts = store._counts
    windows = [key for _, key in counts._windows]
    assert sorted([*windows, *counts._lasting, *counts._mirrored, *counts._runs]) == sorted(
        counts._counts
    )


def kept_grants(store: MemoryStore) -> int:
    """How many grants are remembered: each once by its key and once by its end."""
    ends = {(key, name): ends for ends, key, name in store._grants._ends}
    kept = {
        (key, name): each.ends
        for key, by_name in store._grants._kept.items()
        for name, each in by_name.items()
    }
    assert kept == ends
    assert len(ends) == len(store._grants._ends)
    assert all(store._grants._kept.values())
    return len(kept)


def test_past_window_is_kept_for_an_hour() -> None:
    """A count is there until an hour after its window, and a late charge gives it an hour more."""
    clock = Clock(0)
    store = MemoryStore(clock=clock)
    store.acquire(asked("search", ends=100))
    clock.now = 100 + HOUR - 1
    store.acquire(asked("search", ends=100))
    assert used(store, "search") == [2]
    clock.now += HOUR - 1
    assert used(store, "search") == [2]
    clock.now += 1
    assert used(store, "search") == [None]
    assert store.acquire(asked("search", ends=100)).used == {"count": 0}


def holding(name: str, lease: int, amount: int = 1) -> AcquireRequest:
    """A call that holds an amount of one key."""
    counters = {"count": Counter("tokens", lease=lease)}
    return AcquireRequest(name, name, counters, (Hits({"count": amount}),))


def test_end_of_a_lease() -> None:
    """What is held is there for the lease, and gone with the second after it; so it is shown."""
    clock = Clock(1000.9)
    store = MemoryStore(clock=clock)
    store.acquire(holding("crashed", 60, 5))
    store.acquire(holding("running", 61, 7))
    clock.now = 1060.999
    assert used(store, "tokens") == [12]
    clock.now = 1061
    assert [use.used for use in store.usages()] == [7]
    assert used(store, "tokens") == [7]
    clock.now = 1062
    assert used(store, "tokens") == [0]


def test_a_dropped_count_takes_its_holds_along() -> None:
    """A count that comes back from its caller has nothing held: a settlement charges all."""
    store = MemoryStore(max_keys=1)
    counters = {"count": Counter("a", used=3, mirrored=True, lease=60)}
    store.acquire(AcquireRequest("one", "one", counters, (Hits({"count": 5}),)))
    store.acquire(asked("b", mirrored=True))
    assert used(store, "a", "b") == [None, 1]
    compensate(store, Compensation("s", {"a": 4}, starts={"a": 3}, settles="one"))
    assert used(store, "a") == [7]


def test_what_is_charged_now_is_not_dropped_for_it() -> None:
    """A batch drops counts of others, and none if it does not fit even then."""
    store = MemoryStore(max_keys=3)
    for key in ("a", "b"):
        store.acquire(asked(key, mirrored=True))
    store.acquire(asked("user"))
    with pytest.raises(QuotaStoreError):
        store.acquire(call("a", "c", "d", mirrored=True))
    assert used(store, "a", "b", "user") == [1, 1, 1]
    store.acquire(call("a", "c", mirrored=True))
    assert used(store, "a", "b", "c", "user") == [2, None, 1, 1]


def test_runs_expire_beside_threads() -> None:
    """A run's count expires after a day, though a thread's that is older is kept."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    store.acquire(asked("search:thread:t1", mirrored=True))
    store.acquire(asked("search:run:a", mirrored=True))
    clock.now += 24 * HOUR
    store.acquire(asked("search:thread:t1", mirrored=True))
    assert store.occupancy.keys == 1


def test_resets_and_corrections_drop_what_they_may() -> None:
    """They make room as a charge does, and leave a count that is mirrored to be dropped later."""
    store = MemoryStore(max_keys=2)
    store.acquire(asked("a", mirrored=True))
    store.acquire(asked("b", mirrored=True))
    store.reset(["a"])
    compensate(store, Compensation("late", {"c": 1}))
    assert used(store, "a", "b", "c") == [0, None, 1]
    store.reset(["d"])
    assert used(store, "a", "c", "d") == [None, 1, 0]
    assert store.occupancy == (2, 0, 2)


def test_occupancy() -> None:
    """How many counts there are, how many of them can be dropped, and how many there can be."""
    clock = Clock(0)
    store = MemoryStore(max_keys=10, clock=clock)
    store.acquire(asked("user"))
    store.acquire(asked("thread", mirrored=True))
    store.acquire(asked("window", ends=100))
    assert store.occupancy == (3, 1, 10)
    assert store.occupancy.share == 0.2
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


def test_memory_is_bounded() -> None:
    """However many subjects and requests come and go, no more is kept than fits."""
    clock = Clock(0)
    store = MemoryStore(max_keys=50, idle_ttl=timedelta(seconds=10), clock=clock)
    for number in range(2000):
        clock.now += 1
        compensation = Compensation(f"s{number}", attempt_id=f"lost{number}")
        store.acquire(
            asked(
                f"user-{number}",
                name=f"name{number}",
                attempt=f"a{number}",
                compensations=(compensation,),
            )
        )
        if number % 3 == 0:
            store.acquire(asked("steady", 1000, ends=number + 5.5))
    for recent in (store._results._values, store._attempts._values):
        assert len(recent) == 50
    for marked in (store._refused._values, store._compensated._values):
        assert len(marked) == 50
    assert len(store._counts) <= 50
    check_each_key_is_kept_once(store)
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
        sizes.append(len(store._counts))
    assert sizes == [901, 801, 701, 601, 501, 401, 301, 201, 101, 1, 1]


@given(
    steps=st.lists(
        st.tuples(
            st.integers(-50, 60),
            st.sampled_from("abcd"),
            st.none() | st.integers(0, 300),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_counts_against_a_plain_dict(steps: list[tuple[int, str, int | None, bool]]) -> None:
    """Under a clock that jumps, a count is never lost before its time, nor found after it."""
    clock = Clock(HOUR)
    store = MemoryStore(max_keys=4, idle_ttl=timedelta(seconds=HOUR + 50), clock=clock)
    kept: dict[str, tuple[int, float]] = {}
    expired: set[str] = set()
    for jump, key, ends, mirrored in steps:
        clock.now += jump * 60
        expired |= {each for each, (_, until) in kept.items() if until <= clock.now}
        found = {use.key: use.used for use in store.usages()}
        expected = {
            each: count
            for each, (count, until) in kept.items()
            # What had expired may be there still when the clock goes back.
            if until > clock.now and (each in found or each not in expired)
        }
        assert found == expected
        last = HOUR + (clock.now + 50 if ends is None else max(clock.now, ends))
        result = store.acquire(asked(key, ends=ends, mirrored=mirrored))
        assert result.used == {"count": expected.get(key, 0)}
        kept[key] = (result.used["count"] + 1, max(kept[key][1], last) if key in expected else last)
        expired.discard(key)
        check_each_key_is_kept_once(store)


def test_a_grant_does_not_look_at_other_grants() -> None:
    """However many grants are kept, giving, ending and forgetting one costs the same."""

    def work(grants: int) -> int:
        clock = Clock()
        store = MemoryStore(clock=clock)
        short = in_utc(clock.now + HOUR)
        store.grant("search:user_id:ann", 1, until=short, id="over")
        for number in range(grants):
            store.grant(f"search:user_id:{number}", 1)
        clock.now += HOUR + WEEK

        def again() -> None:
            store.grant("search:user_id:ann", 2, id="over")
            store.revoke("search:user_id:ann", "over")

        made = calls_made(again)
        assert kept_grants(store) == grants + 1
        return made

    assert work(1_000) <= work(10) + 50


@given(
    steps=st.lists(
        st.tuples(
            st.integers(-2, 9),
            st.sampled_from(["search:user_id:ann", "search:user_id:bo"]),
            st.sampled_from("123"),
            st.none() | st.integers(1, 20),
        ),
        max_size=40,
    )
)
def test_grants_against_a_plain_dict(steps: list[tuple[int, str, str, int | None]]) -> None:
    """Each grant holds until its end, and its id is remembered for a week after it, no longer.

    A grant without a number of days is revoked. The end of a revoked grant is that moment.
    """
    clock = Clock(100 * WEEK)
    store = MemoryStore(clock=clock)
    kept: dict[tuple[str, str], tuple[int, float]] = {}
    for amount, (jump, key, name, days) in enumerate(steps, start=1):
        clock.now += jump * DAY.total_seconds()
        given, ends = kept.get((key, name), (0, 0))
        if days is None:
            assert (store.revoke(key, name) is not None) is (ends > clock.now)
            if ends > clock.now:
                kept[key, name] = given, clock.now
        else:
            kept = {each: known for each, known in kept.items() if known[1] + WEEK > clock.now}
            until = clock.now + days * DAY.total_seconds()
            given, _ = kept.setdefault((key, name), (amount, until))
            assert store.grant(key, amount, id=name, until=in_utc(until)).amount == given
            assert kept_grants(store) == len(kept)
        expected = {each: given for each, (given, ends) in kept.items() if ends > clock.now}
        assert {(each.key, each.id): each.amount for each in store.grants()} == expected


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_keys": 0}, ValueError, "max_keys must be 1 or more, not 0"),
        ({"max_keys": 1.5}, TypeError, "max_keys must be a whole number, not 1.5"),
        ({"max_keys": True}, TypeError, "max_keys must be a whole number, not True"),
        ({"idle_ttl": 60}, TypeError, "idle_ttl must be a timedelta, not 60"),
        ({"idle_ttl": timedelta(seconds=0.5)}, ValueError, "idle_ttl must be a second or more"),
    ],
)
def test_wrong_argument(options: dict[str, object], error: type[Exception], text: str) -> None:
    """A wrong argument is refused; the message names it and the value."""
    with pytest.raises(error, match=text):
        MemoryStore(**options)  # type: ignore[arg-type]  # wrong on purpose


def test_repr() -> None:
    """The repr tells how full the store is."""
    store = MemoryStore(max_keys=7)
    store.acquire(asked("search"))
    assert repr(store) == "MemoryStore(keys=1, max_keys=7)"
