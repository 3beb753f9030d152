"""What is MemoryStore's own: its clock, its bounds, and what it forgets."""

import asyncio
from datetime import timedelta
from typing import ClassVar

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota.admission import (
    AcquireRequest,
    AcquireResult,
    Compensation,
    Counter,
    Hits,
    Threshold,
)
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores.grants import in_utc
from langchain_quota.stores.keys import CountKey
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


def daily(store: MemoryStore, clock: Clock, limit: int = 1) -> AcquireResult:
    """A call charged to the day's count."""
    key = CountKey.at("search", "user_id", "ada", DAY, clock())
    return store.acquire(asked(str(key), limit, ends=key.ends))


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


def test_window_edges() -> None:
    """A day's quota is spent until its last moment, and whole again from the next one's first."""
    clock = Clock(86_400)
    store = MemoryStore(clock=clock)
    assert daily(store, clock).admitted == (True,)
    clock.now = 2 * 86_400 - 0.001
    assert daily(store, clock).admitted == (False,)
    clock.now = 2 * 86_400
    assert daily(store, clock).admitted == (True,)
    assert daily(store, clock).admitted == (False,)


def test_clock_that_goes_backwards() -> None:
    """Set back over a window's edge, the earlier window's count is still there."""
    clock = Clock(2 * 86_400 - 1)
    store = MemoryStore(clock=clock)
    assert daily(store, clock).admitted == (True,)
    clock.now = 2 * 86_400 + 1
    assert daily(store, clock).admitted == (True,)
    clock.now = 2 * 86_400 - 2
    assert daily(store, clock).admitted == (False,)
    clock.now = 2 * 86_400 + 2
    assert daily(store, clock).admitted == (False,)


def test_clock_far_back() -> None:
    """A clock that jumps back by years forgets nothing."""
    clock = Clock(1e9)
    store = MemoryStore(clock=clock)
    store.acquire(asked("search", name="one", attempt="one"))
    clock.now = 1
    store.acquire(asked("search"))
    assert used(store, "search") == [2]
    assert store.acquire(asked("search", name="one")).replayed
    clock.now = 1e9 + HOUR - 1
    assert used(store, "search") == [2]


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


def test_window_by_the_text_of_the_key() -> None:
    """What compensations and resets make expires with its window, too."""
    clock = Clock(0)
    store = MemoryStore(clock=clock)
    keys = [str(CountKey("search", "user_id", who, 100, 0)) for who in ("ada", "bob")]
    compensate(store, Compensation("s", {keys[0]: 1}))
    store.reset(keys[1:])
    clock.now = 100 + HOUR - 1
    assert used(store, *keys) == [1, 0]
    clock.now += 1
    assert used(store, *keys) == [None, None]


def test_idle_time() -> None:
    """A count without a window lasts as long as it is charged now and then; refunds do not help."""
    clock = Clock(0)
    store = MemoryStore(idle_ttl=timedelta(seconds=100), clock=clock)
    store.acquire(asked("search"))
    clock.now = 99
    store.acquire(asked("search"))
    clock.now = 198
    compensate(store, Compensation("refund", {"search": -1}))
    assert used(store, "search") == [1]
    clock.now = 199
    assert used(store, "search") == [None]
    assert store.usages() == []
    compensate(store, Compensation("other refund", {"search": -1}))
    assert used(store, "search") == [None]


def test_default_idle_time() -> None:
    """By default a count lasts a year."""
    clock = Clock(0)
    store = MemoryStore(clock=clock)
    store.acquire(asked("search"))
    clock.now = 365 * 86_400 - 1
    assert used(store, "search") == [1]
    clock.now += 1
    assert used(store, "search") == [None]


def test_remembered_for_an_hour() -> None:
    """Results and refused attempts are known for an hour, compensations for a week."""
    clock = Clock(0)
    store = MemoryStore(clock=clock)
    store.acquire(asked("search", name="one", attempt="one"))
    compensate(store, Compensation("late", {"email": 1}, attempt_id="refused"))
    clock.now = HOUR - 1
    assert store.acquire(asked("search", name="one")).replayed
    compensate(store, Compensation("late", {"email": 1}, attempt_id="refused"))
    with pytest.raises(QuotaStoreError):
        store.acquire(asked("search", attempt="refused"))
    assert used(store, "search", "email") == [1, 1]
    clock.now = HOUR
    assert not store.acquire(asked("search", name="one")).replayed
    assert store.acquire(asked("search", attempt="refused")).admitted == (True,)
    compensate(store, Compensation("late", {"email": 1}), Compensation("undo", attempt_id="one"))
    assert used(store, "search", "email") == [3, 1]
    clock.now = 7 * 24 * HOUR
    compensate(store, Compensation("late", {"email": 1}))
    assert used(store, "email") == [2]


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


def test_settled_for_an_hour() -> None:
    """What settles a request is known for an hour, and pushes out no other compensation."""
    clock = Clock(0)
    store = MemoryStore(max_keys=2, clock=clock)
    late = Compensation("late", {"tokens": 1})
    first = Compensation("0", {"tokens": 10}, settles="one")
    compensate(store, late, first)
    clock.now = HOUR - 1
    compensate(store, late, first)
    assert used(store, "tokens") == [11]
    for number in range(5):
        compensate(store, Compensation(str(number), settles="one"))
    compensate(store, late)
    assert used(store, "tokens") == [11]
    clock.now = 2 * HOUR
    compensate(store, first)
    assert used(store, "tokens") == [21]


def test_a_dropped_count_takes_its_holds_along() -> None:
    """A count that comes back from its caller has nothing held: a settlement charges all."""
    store = MemoryStore(max_keys=1)
    counters = {"count": Counter("a", used=3, mirrored=True, lease=60)}
    store.acquire(AcquireRequest("one", "one", counters, (Hits({"count": 5}),)))
    store.acquire(asked("b", mirrored=True))
    assert used(store, "a", "b") == [None, 1]
    compensate(store, Compensation("s", {"a": 4}, starts={"a": 3}, settles="one"))
    assert used(store, "a") == [7]


def test_many_holds_are_not_looked_at() -> None:
    """However much is held of a count, a charge and a settlement cost the same."""
    store = MemoryStore(clock=Clock())
    made = []
    for calls in (1, 1_000):
        for number in range(calls):
            store.acquire(holding(f"{calls}-{number}", 60))
        settled = Compensation(f"s{calls}", {"tokens": 2}, settles=f"{calls}-0")
        made.append(calls_made(lambda: compensate(store, settled)))  # noqa: B023 - called now
        made.append(calls_made(lambda: store.acquire(holding(f"{calls}", 60))))  # noqa: B023 - the same
    assert made[:2] == made[2:]


def test_a_full_store_takes_corrections() -> None:
    """What has run is counted even where no other key would fit."""
    store = MemoryStore(max_keys=1)
    store.acquire(asked("a"))
    compensate(store, Compensation("outage", {"b": 1}))
    assert used(store, "a", "b") == [1, 1]


def test_full_store_refuses_new_keys() -> None:
    """A store that is full of live counts forgets none: it refuses what needs another."""
    clock = Clock(0)
    store = MemoryStore(max_keys=2, clock=clock)
    store.acquire(asked("a"))
    store.acquire(asked("b", ends=100))
    with pytest.raises(QuotaStoreError, match="keeps 2 counts at most"):
        store.acquire(asked("c"))
    with pytest.raises(QuotaStoreError):
        store.reset(["a", "c"])
    assert store.acquire(asked("a")).used == {"count": 1}
    assert store.acquire(asked("c", limit=0)).admitted == (False,)
    store.reset(["a"])
    assert used(store, "a", "b", "c") == [0, 1, None]
    clock.now = 100 + HOUR
    assert store.acquire(asked("c")).admitted == (True,)
    compensate(store, Compensation("s", {"a": 5}))
    assert used(store, "a", "b", "c") == [5, None, 1]


def test_a_full_store_drops_what_its_caller_brings_back() -> None:
    """Of counts that callers mirror the one that was charged longest ago makes room."""
    store = MemoryStore(max_keys=3)
    for thread in ("one", "two", "three", "one", "four"):
        assert store.acquire(asked(thread, mirrored=True)).admitted == (True,)
    assert used(store, "one", "two", "three", "four") == [2, None, 1, 1]
    # It goes on where its own state says.
    result = store.acquire(asked("two", used=1, limit=2, mirrored=True))
    assert (result.used, result.admitted) == ({"count": 1}, (True,))
    assert used(store, "one", "two", "three", "four") == [2, 2, None, 1]


def test_windows_and_users_are_never_dropped() -> None:
    """What only the store has is kept, whoever comes: then there is no room, and that is said."""
    store = MemoryStore(max_keys=3)
    store.acquire(asked("user"))
    store.acquire(asked("window", ends=1e12))
    for number in range(5):
        assert store.acquire(asked(f"thread-{number}", mirrored=True)).admitted == (True,)
    store.acquire(asked("other user"))
    with pytest.raises(QuotaStoreError, match="the store is full: it keeps 3 counts at most"):
        store.acquire(asked("thread-5", mirrored=True))
    assert [use.key for use in store.usages()] == ["other user", "user", "window"]


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


def test_runs_make_room_first() -> None:
    """A full store drops the run charged longest ago, however it was charged, before a thread."""
    store = MemoryStore(max_keys=3)
    store.acquire(asked("search:thread:t1", mirrored=True))
    for run in "ab":
        store.acquire(asked(f"search:run:{run}"))
    store.acquire(asked("search:thread:t2", mirrored=True))
    assert [use.key for use in store.usages()] == [
        "search:run:b",
        "search:thread:t1",
        "search:thread:t2",
    ]


def test_root_runs_make_room() -> None:
    """A full store drops root runs before threads, the one charged longest ago first."""
    store = MemoryStore(max_keys=3)
    store.acquire(asked("search:thread:t1", mirrored=True))
    for run in "abc":
        store.acquire(asked(f"search:root_run:{run}", mirrored=True))
    assert store.occupancy.droppable == 3
    assert [use.key for use in store.usages()] == [
        "search:root_run:b",
        "search:root_run:c",
        "search:thread:t1",
    ]


def test_runs_expire_beside_threads() -> None:
    """A run's count expires after a day, though a thread's that is older is kept."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    store.acquire(asked("search:thread:t1", mirrored=True))
    store.acquire(asked("search:run:a", mirrored=True))
    clock.now += 24 * HOUR
    store.acquire(asked("search:thread:t1", mirrored=True))
    assert store.occupancy.keys == 1


def test_root_runs_expire_beside_threads() -> None:
    """A root run's count expires after a week, though a thread's that is older is kept."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    store.acquire(asked("search:thread:t1"))
    store.acquire(asked("search:root_run:a"))
    clock.now += 7 * 24 * HOUR - 1
    assert used(store, "search:root_run:a") == [1]
    clock.now += 1
    store.acquire(asked("search:thread:t1"))
    assert store.occupancy.keys == 1


def test_the_last_charge_says_whether_a_count_is_mirrored() -> None:
    """Charged by one who has no mirror a count stays; with one counter of two mirrored, too."""
    store = MemoryStore(max_keys=2)
    store.acquire(asked("a", mirrored=True))
    store.acquire(asked("a"))
    store.acquire(asked("b"))
    store.acquire(asked("b", mirrored=True))
    store.acquire(asked("c", mirrored=True))
    assert used(store, "a", "b", "c") == [2, None, 1]
    both = {"one": Counter("c", mirrored=True), "other": Counter("c")}
    store.acquire(AcquireRequest("", "", both, (Hits({"one": 1, "other": 1}),)))
    with pytest.raises(QuotaStoreError):
        store.acquire(asked("d"))


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


def test_one_batch_with_too_many_keys() -> None:
    """A batch that does not fit as a whole charges nothing."""
    store = MemoryStore(max_keys=2)
    with pytest.raises(QuotaStoreError):
        store.acquire(call("a", "b", "c", name="one"))
    assert store.usages() == []
    assert not store.acquire(call("a", "b", name="one")).replayed


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


async def test_async_forms_do_not_block() -> None:
    """The async forms make no blocking call, and wait for nothing."""
    store = MemoryStore()
    with blockbuster_ctx():
        assert (await store.aacquire(asked("search"))).admitted == (True,)
        await store.areset(["search"])
        (use,) = await store.apeek(["search"])
    assert use is not None
    assert use.used == 0


def test_many_event_loops() -> None:
    """One store serves one event loop after the other."""
    store = MemoryStore()
    for before in range(3):
        assert asyncio.run(store.aacquire(asked("search"))).used == {"count": before}


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
