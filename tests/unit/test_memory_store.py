"""What is MemoryStore's own: its clock, its bounds, and what it forgets."""

import asyncio
from datetime import timedelta
from typing import ClassVar

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota.errors import QuotaStoreError
from langchain_quota.reservation import Cap, Grant, Reservation, Settlement, Slot
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.memory import MemoryStore
from tests.calls import calls_made
from tests.clock import Clock

HOUR = 3600
DAY = timedelta(days=1)


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
    id: str = "",  # noqa: A002 - the reservation's field
    attempt: str = "",
    ends: float | None = None,
    settlements: tuple[Settlement, ...] = (),
) -> Reservation:
    slots = (Slot(key, used, ends, (Cap("limit", limit),), mirrored=mirrored),)
    return Reservation(id, attempt, slots, ({0: 1},), settlements=settlements)


def daily(store: MemoryStore, clock: Clock, limit: int = 1) -> Grant:
    """A call charged to the day's count."""
    key = CountKey.at("search", "user_id", "ada", DAY, clock())
    return store.reserve(asked(str(key), limit, ends=key.ends))


def settle(store: MemoryStore, *settlements: Settlement) -> None:
    store.reserve(Reservation("", "", (), (), settlements=settlements))


def check_each_key_is_kept_once(store: MemoryStore) -> None:
    """Nothing is left of a count that is gone, and every count is found when its time comes."""
    counts = store._counts
    windows = [key for _, key in counts._windows]
    assert sorted([*windows, *counts._lasting, *counts._mirrored, *counts._runs]) == sorted(
        counts._counts
    )


def used(store: MemoryStore, *keys: str) -> list[int | None]:
    return [None if use is None else use.used for use in store.peek(keys)]


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
    store.reserve(asked("search", id="one", attempt="one"))
    clock.now = 1
    store.reserve(asked("search"))
    assert used(store, "search") == [2]
    assert store.reserve(asked("search", id="one")).known
    clock.now = 1e9 + HOUR - 1
    assert used(store, "search") == [2]


def test_past_window_is_kept_for_an_hour() -> None:
    """A count is there until an hour after its window, and a late charge gives it an hour more."""
    clock = Clock(0)
    store = MemoryStore(clock=clock)
    store.reserve(asked("search", ends=100))
    clock.now = 100 + HOUR - 1
    store.reserve(asked("search", ends=100))
    assert used(store, "search") == [2]
    clock.now += HOUR - 1
    assert used(store, "search") == [2]
    clock.now += 1
    assert used(store, "search") == [None]
    assert store.reserve(asked("search", ends=100)).used == (0,)


def test_window_by_the_text_of_the_key() -> None:
    """What settlements and resets make expires with its window, too."""
    clock = Clock(0)
    store = MemoryStore(clock=clock)
    keys = [str(CountKey("search", "user_id", who, 100, 0)) for who in ("ada", "bob")]
    settle(store, Settlement("s", {keys[0]: 1}))
    store.reset(keys[1:])
    clock.now = 100 + HOUR - 1
    assert used(store, *keys) == [1, 0]
    clock.now += 1
    assert used(store, *keys) == [None, None]


def test_idle_time() -> None:
    """A count without a window lasts as long as it is charged now and then; refunds do not help."""
    clock = Clock(0)
    store = MemoryStore(idle_ttl=timedelta(seconds=100), clock=clock)
    store.reserve(asked("search"))
    clock.now = 99
    store.reserve(asked("search"))
    clock.now = 198
    settle(store, Settlement("refund", {"search": -1}))
    assert used(store, "search") == [1]
    clock.now = 199
    assert used(store, "search") == [None]
    assert store.usages() == []
    settle(store, Settlement("other refund", {"search": -1}))
    assert used(store, "search") == [None]


def test_default_idle_time() -> None:
    """By default a count lasts a year."""
    clock = Clock(0)
    store = MemoryStore(clock=clock)
    store.reserve(asked("search"))
    clock.now = 365 * 86_400 - 1
    assert used(store, "search") == [1]
    clock.now += 1
    assert used(store, "search") == [None]


def test_remembered_for_an_hour() -> None:
    """Answers and refused attempts are known for an hour, settlements for a week."""
    clock = Clock(0)
    store = MemoryStore(clock=clock)
    store.reserve(asked("search", id="one", attempt="one"))
    settle(store, Settlement("late", {"email": 1}, attempt="refused"))
    clock.now = HOUR - 1
    assert store.reserve(asked("search", id="one")).known
    settle(store, Settlement("late", {"email": 1}, attempt="refused"))
    with pytest.raises(QuotaStoreError):
        store.reserve(asked("search", attempt="refused"))
    assert used(store, "search", "email") == [1, 1]
    clock.now = HOUR
    assert not store.reserve(asked("search", id="one")).known
    assert store.reserve(asked("search", attempt="refused")).admitted == (True,)
    settle(store, Settlement("late", {"email": 1}), Settlement("undo", attempt="one"))
    assert used(store, "search", "email") == [3, 1]
    clock.now = 7 * 24 * HOUR
    settle(store, Settlement("late", {"email": 1}))
    assert used(store, "email") == [2]


def test_a_full_store_takes_corrections() -> None:
    """What has run is counted even where no other key would fit."""
    store = MemoryStore(max_keys=1)
    store.reserve(asked("a"))
    settle(store, Settlement("outage", {"b": 1}))
    assert used(store, "a", "b") == [1, 1]


def test_full_store_refuses_new_keys() -> None:
    """A store that is full of live counts forgets none: it refuses what needs another."""
    clock = Clock(0)
    store = MemoryStore(max_keys=2, clock=clock)
    store.reserve(asked("a"))
    store.reserve(asked("b", ends=100))
    with pytest.raises(QuotaStoreError, match="keeps 2 counts at most"):
        store.reserve(asked("c"))
    with pytest.raises(QuotaStoreError):
        store.reset(["a", "c"])
    assert store.reserve(asked("a")).used == (1,)
    assert store.reserve(asked("c", limit=0)).admitted == (False,)
    store.reset(["a"])
    assert used(store, "a", "b", "c") == [0, 1, None]
    clock.now = 100 + HOUR
    assert store.reserve(asked("c")).admitted == (True,)
    settle(store, Settlement("s", {"a": 5}))
    assert used(store, "a", "b", "c") == [5, None, 1]


def test_a_full_store_drops_what_its_caller_brings_back() -> None:
    """Of counts that callers mirror the one that was charged longest ago makes room."""
    store = MemoryStore(max_keys=3)
    for thread in ("one", "two", "three", "one", "four"):
        assert store.reserve(asked(thread, mirrored=True)).admitted == (True,)
    assert used(store, "one", "two", "three", "four") == [2, None, 1, 1]
    # It goes on where its own state says.
    grant = store.reserve(asked("two", used=1, limit=2, mirrored=True))
    assert (grant.used, grant.admitted) == ((1,), (True,))
    assert used(store, "one", "two", "three", "four") == [2, 2, None, 1]


def test_windows_and_users_are_never_dropped() -> None:
    """What only the store has is kept, whoever comes: then there is no room, and that is said."""
    store = MemoryStore(max_keys=3)
    store.reserve(asked("user"))
    store.reserve(asked("window", ends=1e12))
    for number in range(5):
        assert store.reserve(asked(f"thread-{number}", mirrored=True)).admitted == (True,)
    store.reserve(asked("other user"))
    with pytest.raises(QuotaStoreError, match="the store is full: it keeps 3 counts at most"):
        store.reserve(asked("thread-5", mirrored=True))
    assert [use.key for use in store.usages()] == ["other user", "user", "window"]


def test_what_is_charged_now_is_not_dropped_for_it() -> None:
    """A batch drops other counts than its own, and none if it does not fit all the same."""
    store = MemoryStore(max_keys=3)
    for key in ("a", "b"):
        store.reserve(asked(key, mirrored=True))
    store.reserve(asked("user"))
    slots = tuple(Slot(key, mirrored=True) for key in "acd")
    with pytest.raises(QuotaStoreError):
        store.reserve(Reservation("", "", slots, ({0: 1, 1: 1, 2: 1},)))
    assert used(store, "a", "b", "user") == [1, 1, 1]
    store.reserve(Reservation("", "", slots, ({0: 1, 1: 1},)))
    assert used(store, "a", "b", "c", "user") == [2, None, 1, 1]


def test_runs_make_room_first() -> None:
    """A full store drops the run charged longest ago, however it was charged, before a thread."""
    store = MemoryStore(max_keys=3)
    store.reserve(asked("search:thread:t1", mirrored=True))
    for run in "ab":
        store.reserve(asked(f"search:run:{run}"))
    store.reserve(asked("search:thread:t2", mirrored=True))
    assert [use.key for use in store.usages()] == [
        "search:run:b",
        "search:thread:t1",
        "search:thread:t2",
    ]


def test_runs_expire_beside_threads() -> None:
    """A run's count expires after a day, though a thread's that is older is kept."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    store.reserve(asked("search:thread:t1", mirrored=True))
    store.reserve(asked("search:run:a", mirrored=True))
    clock.now += 24 * HOUR
    store.reserve(asked("search:thread:t1", mirrored=True))
    assert store.occupancy.keys == 1


def test_the_last_charge_says_whether_a_count_is_mirrored() -> None:
    """Charged by one who has no mirror a count stays; with one slot of two mirrored, too."""
    store = MemoryStore(max_keys=2)
    store.reserve(asked("a", mirrored=True))
    store.reserve(asked("a"))
    store.reserve(asked("b"))
    store.reserve(asked("b", mirrored=True))
    store.reserve(asked("c", mirrored=True))
    assert used(store, "a", "b", "c") == [2, None, 1]
    both = (Slot("c", mirrored=True), Slot("c"))
    store.reserve(Reservation("", "", both, ({0: 1, 1: 1},)))
    with pytest.raises(QuotaStoreError):
        store.reserve(asked("d"))


def test_resets_and_corrections_drop_what_they_may() -> None:
    """They make room as a charge does, and leave a count that is mirrored to be dropped later."""
    store = MemoryStore(max_keys=2)
    store.reserve(asked("a", mirrored=True))
    store.reserve(asked("b", mirrored=True))
    store.reset(["a"])
    settle(store, Settlement("late", {"c": 1}))
    assert used(store, "a", "b", "c") == [0, None, 1]
    store.reset(["d"])
    assert used(store, "a", "c", "d") == [None, 1, 0]
    assert store.occupancy == (2, 0, 2)


def test_occupancy() -> None:
    """How many counts there are, how many of them can be dropped, and how many there can be."""
    clock = Clock(0)
    store = MemoryStore(max_keys=10, clock=clock)
    store.reserve(asked("user"))
    store.reserve(asked("thread", mirrored=True))
    store.reserve(asked("window", ends=100))
    assert store.occupancy == (3, 1, 10)
    assert store.occupancy.share == 0.2
    clock.now = 100 + HOUR
    store.reserve(asked("user"))
    assert store.occupancy == (2, 1, 10)


def test_a_charge_does_not_look_at_other_counts() -> None:
    """However many counts there are, a charge costs the same: also in a full store."""
    store = MemoryStore(max_keys=1_000)
    for number in range(1_000):
        store.reserve(asked(Key(f"thread-{number}"), mirrored=True))
    Key.looks = 0
    made = calls_made(lambda: store.reserve(asked(Key("thread-0"), mirrored=True)))
    made += calls_made(lambda: store.reserve(asked(Key("another"), mirrored=True)))
    assert Key.looks < 100
    assert made < 200 + Key.looks


def test_one_batch_with_too_many_keys() -> None:
    """A batch that does not fit as a whole charges nothing."""
    store = MemoryStore(max_keys=2)
    slots = tuple(Slot(key) for key in "abc")
    with pytest.raises(QuotaStoreError):
        store.reserve(Reservation("id", "", slots, ({0: 1, 1: 1, 2: 1},)))
    assert store.usages() == []
    assert not store.reserve(Reservation("id", "", slots, ({0: 1}, {1: 1}, {}))).known


def test_memory_is_bounded() -> None:
    """However many subjects and reservations come and go, no more is kept than fits."""
    clock = Clock(0)
    store = MemoryStore(max_keys=50, idle_ttl=timedelta(seconds=10), clock=clock)
    for number in range(2000):
        clock.now += 1
        settlement = Settlement(f"s{number}", attempt=f"lost{number}")
        store.reserve(
            asked(
                f"user-{number}", id=f"id{number}", attempt=f"a{number}", settlements=(settlement,)
            )
        )
        if number % 3 == 0:
            store.reserve(asked("steady", 1000, ends=number + 5.5))
    for recent in (store._answers._values, store._attempts._values):
        assert len(recent) == 50
    for marked in (store._refused._values, store._settled._values):
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
        store.reserve(asked(f"user-{number}", ends=10))
    clock.now = 10 + HOUR
    sizes = []
    for _ in range(11):
        store.reserve(asked("search"))
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
        grant = store.reserve(asked(key, ends=ends, mirrored=mirrored))
        assert grant.used == (expected.get(key, 0),)
        kept[key] = (grant.used[0] + 1, max(kept[key][1], last) if key in expected else last)
        expired.discard(key)
        check_each_key_is_kept_once(store)


async def test_async_forms_do_not_block() -> None:
    """The async forms make no blocking call, and wait for nothing."""
    store = MemoryStore()
    with blockbuster_ctx():
        assert (await store.areserve(asked("search"))).admitted == (True,)
        await store.areset(["search"])
        (use,) = await store.apeek(["search"])
    assert use is not None
    assert use.used == 0


def test_many_event_loops() -> None:
    """One store serves one event loop after the other."""
    store = MemoryStore()
    for before in range(3):
        assert asyncio.run(store.areserve(asked("search"))).used == (before,)


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
    store.reserve(asked("search"))
    assert repr(store) == "MemoryStore(keys=1, max_keys=7)"
