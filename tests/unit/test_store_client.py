"""A store as the hooks ask it: its failures are seen, and its corrections not lost."""

import asyncio
import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import pytest

from langchain_quota import KeyUse, MemoryStore, QuotaStore, QuotaStoreError
from langchain_quota.middleware import store_client
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.reservation import Cap, Grant, Reservation, Settlement, Slot
from tests.conftest import Signals

Mode = Literal["sync", "async"]
modes = pytest.mark.parametrize("mode", ["sync", "async"])

KEY = "search:user_id:ann"
KEYS = "langchain_quota_store_keys"
MAX_KEYS = "langchain_quota_store_max_keys"
DOWN = QuotaStoreError("refused")


class FickleStore:
    """A store that fails as it is told, having heard of what it is asked or not."""

    def __init__(self) -> None:
        self.kept = MemoryStore()
        self.failing: BaseException | None = None
        self.hears = False
        self.asked: list[Reservation] = []
        self.meanwhile: Callable[[], object] | None = None

    def reserve(self, reservation: Reservation) -> Grant:
        self.asked.append(reservation)
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        if self.failing is None or self.hears:
            grant = self.kept.reserve(reservation)
        self._fail()
        return grant

    def peek(self, keys: Sequence[str]) -> tuple[KeyUse | None, ...]:
        self._fail()
        return self.kept.peek(keys)

    def reset(self, keys: Sequence[str]) -> None:
        self._fail()
        self.kept.reset(keys)

    async def areserve(self, reservation: Reservation) -> Grant:
        return self.reserve(reservation)

    async def apeek(self, keys: Sequence[str]) -> tuple[KeyUse | None, ...]:
        return self.peek(keys)

    async def areset(self, keys: Sequence[str]) -> None:
        self.reset(keys)

    def breaks(self) -> None:
        """Fail from now on."""
        self.failing = DOWN

    def _fail(self) -> None:
        if self.failing is not None:
            raise self.failing


class Asked:
    """A client of a fickle store, asked in one of the two forms."""

    def __init__(self, mode: Mode, signals: Signals) -> None:
        self.mode = mode
        self.store = FickleStore()
        self.client = StoreClient(self.store, signals.recorder)
        self._number = 0

    def reservation(self, *, name: str | None = None, limit: int = 5, own: int = 0) -> Reservation:
        """One call of Ann's; under a name of its own unless it is made again."""
        self._number += 1
        return Reservation(
            id=name or f"step-{self._number}",
            attempt=f"attempt-{self._number}",
            slots=(Slot(KEY, own, caps=(Cap("ann", limit),)),),
            charges=({0: 1},),
        )

    async def reserve(self, reservation: Reservation | None = None) -> Grant | None:
        asked = self.reservation() if reservation is None else reservation
        if self.mode == "sync":
            return self.client.reserve(asked)
        return await self.client.areserve(asked)

    async def peek(self, *keys: str) -> dict[str, int] | None:
        if self.mode == "sync":
            return self.client.peek(keys)
        return await self.client.apeek(keys)

    def used(self) -> int:
        (use,) = self.store.kept.peek([KEY])
        return 0 if use is None else use.used

    def settlements(self) -> tuple[Settlement, ...]:
        """The corrections that the last reservation took along."""
        return self.store.asked[-1].settlements


def seconds(signals: Signals, operation: str, outcome: str) -> float | None:
    """How many requests to the store had this outcome."""
    name = "langchain_quota_store_seconds_count"
    return signals.value(name, operation=operation, outcome=outcome)


def failures(signals: Signals, error_type: str = "QuotaStoreError") -> float | None:
    name = "langchain_quota_errors_total"
    return signals.value(name, component="store", error_type=error_type)


@modes
async def test_the_stores_answer(mode: Mode, signals: Signals) -> None:
    """A grant is handed on as it is, and its time is taken."""
    asked = Asked(mode, signals)
    assert await asked.reserve() == Grant((0,), (True,))
    assert await asked.reserve(asked.reservation(limit=1)) == Grant((1,), (False,))
    assert asked.settlements() == ()
    assert seconds(signals, "reserve", "ok") == 2


@modes
async def test_what_is_kept(mode: Mode, signals: Signals) -> None:
    """A peek tells the counts that there are; without a key nobody is asked."""
    asked = Asked(mode, signals)
    await asked.reserve()
    assert await asked.peek(KEY, "search:user_id:bob") == {KEY: 1}
    assert seconds(signals, "peek", "ok") == 1
    assert await asked.peek() == {}
    assert seconds(signals, "peek", "ok") == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (QuotaStoreError("refused"), "error"),
        (QuotaStoreError("no answer", timed_out=True), "timeout"),
        (TimeoutError(), "timeout"),
        (ConnectionError("reset"), "error"),
        (ZeroDivisionError(), "error"),
    ],
    ids=repr,
)
@modes
async def test_a_store_that_fails_gives_no_answer(
    mode: Mode, error: Exception, outcome: str, signals: Signals
) -> None:
    """Whatever it raises, the caller is told that there is none, and it is timed and counted."""
    asked = Asked(mode, signals)
    asked.store.failing = error
    assert await asked.reserve() is None
    assert await asked.peek(KEY) is None
    assert seconds(signals, "reserve", outcome) == 1
    assert seconds(signals, "peek", outcome) == 1
    assert failures(signals, type(error).__name__) == 2


@modes
async def test_an_outage_is_logged_once(
    mode: Mode, signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first failure and its end are logged, each failure is counted, and so the next outage."""
    asked = Asked(mode, signals)
    told = []
    for _ in range(2):
        asked.store.failing = DOWN
        for _ in range(3):
            await asked.reserve()
        asked.store.failing = None
        for _ in range(3):
            await asked.reserve()
        told.append([record.levelno for record in caplog.records])
        caplog.clear()
    assert told == [[logging.ERROR, logging.WARNING]] * 2
    assert failures(signals) == 6


@modes
async def test_a_misused_store_is_not_down(mode: Mode, signals: Signals) -> None:
    """A TypeError is the programmer's: it reaches the caller, and is no outage."""
    asked = Asked(mode, signals)
    asked.store.failing = TypeError("a client of redis.asyncio serves no sync calls")
    with pytest.raises(TypeError, match="serves no sync calls"):
        await asked.reserve()
    with pytest.raises(TypeError, match="serves no sync calls"):
        await asked.peek(KEY)
    assert not failures(signals, "TypeError")


@pytest.mark.parametrize("heard", [False, True])
@modes
async def test_a_denied_call_is_charged_nowhere(
    mode: Mode,
    heard: bool,  # noqa: FBT001 - a parameter of the test
    signals: Signals,
) -> None:
    """What the store may have charged for a call that did not run is undone when it is back."""
    asked = Asked(mode, signals)
    asked.store.failing, asked.store.hears = DOWN, heard
    lost = asked.reservation()
    assert await asked.reserve(lost) is None
    asked.client.settle_later(lost)
    assert asked.used() == heard
    asked.store.failing = None
    assert await asked.reserve() == Grant((0,), (True,))
    assert asked.used() == 1


@pytest.mark.parametrize("heard", [False, True])
@modes
async def test_what_ran_in_an_outage_is_told(
    mode: Mode,
    heard: bool,  # noqa: FBT001 - a parameter of the test
    signals: Signals,
) -> None:
    """A call that was let through without the store is charged once when it is back."""
    asked = Asked(mode, signals)
    asked.store.failing, asked.store.hears = DOWN, heard
    lost = asked.reservation()
    assert await asked.reserve(lost) is None
    asked.client.settle_later(lost, {KEY: 1})
    asked.store.failing = None
    assert await asked.reserve() == Grant((1,), (True,))
    assert asked.used() == 2


@modes
async def test_what_arrives_late_is_refused(mode: Mode, signals: Signals) -> None:
    """An attempt that was settled charges nothing if the network brings it afterwards."""
    asked = Asked(mode, signals)
    lost = asked.reservation()
    asked.client.settle_later(lost)
    await asked.reserve()
    with pytest.raises(QuotaStoreError, match="settled before it arrived"):
        asked.store.kept.reserve(lost)
    assert asked.used() == 1


@modes
async def test_corrections_are_sent_until_they_arrive(mode: Mode, signals: Signals) -> None:
    """They wait out an outage, travel with the first request that is answered, and not again."""
    asked = Asked(mode, signals)
    lost = asked.reservation()
    asked.client.settle_later(lost, {KEY: 1})
    asked.store.failing = DOWN
    await asked.reserve()
    assert [each.attempt for each in asked.settlements()] == [lost.attempt]
    asked.store.failing = None
    await asked.reserve()
    assert [each.attempt for each in asked.settlements()] == [lost.attempt]
    await asked.reserve()
    assert asked.settlements() == ()


@modes
async def test_corrections_come_before_the_reservations_own(mode: Mode, signals: Signals) -> None:
    """What ran is charged before what is to be taken back of it."""
    asked = Asked(mode, signals)
    asked.client.settle_later(asked.reservation(), {KEY: 1})
    refund = Settlement("refund", {KEY: -1})
    last = asked.reservation()
    reservation = Reservation(
        last.id, last.attempt, last.slots, last.charges, settlements=(refund,)
    )
    assert await asked.reserve(reservation) == Grant((0,), (True,))
    assert asked.used() == 1


@modes
async def test_a_hook_that_runs_again_did_not_run_before(mode: Mode, signals: Signals) -> None:
    """What its first run let through without the store never ran: only the second is charged."""
    asked = Asked(mode, signals)
    asked.store.failing = DOWN
    first = asked.reservation(name="step")
    await asked.reserve(first)
    asked.client.settle_later(first, {KEY: 1})
    asked.store.failing = None
    assert await asked.reserve(asked.reservation(name="step")) == Grant((0,), (True,))
    assert asked.used() == 1


@modes
async def test_a_few_corrections_at_a_time(mode: Mode, signals: Signals) -> None:
    """A long outage does not make the first request after it a huge one, and loses none."""
    asked = Asked(mode, signals)
    for _ in range(12):
        asked.client.settle_later(asked.reservation(), {KEY: 1})
    sent = []
    for _ in range(4):
        await asked.reserve(asked.reservation(limit=1000))
        sent.append(len(asked.settlements()))
    assert sent == [5, 5, 2, 0]
    assert asked.used() == 12 + 4


@modes
async def test_one_request_at_a_time_carries_corrections(mode: Mode, signals: Signals) -> None:
    """While they are on their way others go without them, and afterwards with what is left."""
    asked = Asked(mode, signals)
    lost = [asked.reservation() for _ in range(6)]
    for each in lost:
        asked.client.settle_later(each)
    asked.store.meanwhile = lambda: asked.client.reserve(asked.reservation())
    await asked.reserve()
    await asked.reserve()
    sent = [[each.attempt for each in one.settlements] for one in asked.store.asked]
    assert sent == [[each.attempt for each in lost[:5]], [], [lost[5].attempt]]


@modes
@pytest.mark.parametrize("failing", [DOWN, asyncio.CancelledError()], ids=repr)
async def test_the_next_request_carries_what_a_lost_one_did(
    mode: Mode, failing: BaseException, signals: Signals
) -> None:
    """A request that failed or was cancelled holds no corrections back."""
    asked = Asked(mode, signals)
    lost = asked.reservation()
    asked.client.settle_later(lost, {KEY: 1})
    asked.store.failing = failing
    with suppress(asyncio.CancelledError):
        await asked.reserve()
    asked.store.failing = None
    await asked.reserve()
    assert lost.attempt in [each.attempt for each in asked.settlements()]
    assert asked.used() == 2


@modes
async def test_an_earlier_attempt_is_settled_first(mode: Mode, signals: Signals) -> None:
    """A reservation that is made again takes the correction of its first attempt with it.

    Even while another request carries it: else it would be answered as that attempt was, and
    then lose its charge to the correction.
    """
    asked = Asked(mode, signals)
    asked.store.failing, asked.store.hears = DOWN, True
    first = asked.reservation(name="step")
    await asked.reserve(first)
    asked.client.settle_later(first)
    asked.store.failing = None
    again: list[Grant | None] = []

    def make_again() -> None:
        again.append(asked.client.reserve(asked.reservation(name="step")))

    asked.store.meanwhile = make_again
    await asked.reserve()
    assert again == [Grant((0,), (True,))]
    assert asked.used() == 2


@modes
@pytest.mark.parametrize("breaks", [False, True])
async def test_what_the_caller_has_counted_is_told_first(
    mode: Mode,
    breaks: bool,  # noqa: FBT001 - a parameter of the test
    signals: Signals,
) -> None:
    """All that ran of a thread in an outage is told, oldest first, before its next call is judged.

    Else the call would be judged on less, or what is in the caller's own count counted twice.
    """
    asked = Asked(mode, signals)
    for own in range(12):
        asked.client.settle_later(asked.reservation(own=own), {KEY: 1})
    mine = asked.reservation(own=12, limit=13)
    if breaks:
        # In the middle: what was told before is not told again.
        asked.store.meanwhile = lambda: setattr(asked.store, "meanwhile", asked.store.breaks)
        assert await asked.reserve(mine) is None
        assert asked.used() == 5
        asked.store.failing = None
        asked.store.asked.clear()
    assert await asked.reserve(mine) == Grant((12,), (True,))
    assert [len(each.settlements) for each in asked.store.asked] == [5, 5, 2][breaks:]
    assert asked.used() == 13


@modes
async def test_what_ran_is_told_before_it_is_taken_back(mode: Mode, signals: Signals) -> None:
    """A refund takes along what is still to be told of its keys, also while others carry it."""
    asked = Asked(mode, signals)
    asked.client.settle_later(asked.reservation(), {KEY: 1})
    last = asked.reservation()
    refunding = replace(last, settlements=(Settlement("refund", {KEY: -1}),))
    asked.store.meanwhile = lambda: asked.client.reserve(refunding)
    await asked.reserve()
    assert asked.used() == 2


def test_corrections_are_bounded(monkeypatch: pytest.MonkeyPatch, signals: Signals) -> None:
    """Beyond so many the oldest is lost, and that is counted."""
    monkeypatch.setattr(store_client, "MAX_UNSETTLED", 2)
    asked = Asked("sync", signals)
    reservations = [asked.reservation() for _ in range(3)]
    for number, each in enumerate(reservations):
        assert not failures(signals), number
        asked.client.settle_later(each)
    assert failures(signals) == 1
    asked.client.reserve(asked.reservation())
    assert [each.attempt for each in asked.settlements()] == [
        each.attempt for each in reservations[1:]
    ]


async def test_a_cancelled_reservation_is_undone(signals: Signals) -> None:
    """Whoever asks next takes back what a cancelled run has, or may yet have, charged."""
    asked = Asked("async", signals)
    asked.store.failing, asked.store.hears = asyncio.CancelledError(), True
    lost = asked.reservation()
    with pytest.raises(asyncio.CancelledError):
        await asked.reserve(lost)
    assert asked.used() == 1
    asked.store.failing = None
    assert await asked.reserve() == Grant((0,), (True,))
    # A cancellation is nobody's failure.
    assert not failures(signals, "CancelledError")


async def test_a_cancelled_peek_owes_nothing(signals: Signals) -> None:
    """Looking charges nothing, and leaves nothing to correct."""
    asked = Asked("async", signals)
    asked.store.failing = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await asked.peek(KEY)
    asked.store.failing = None
    await asked.reserve()
    assert asked.settlements() == ()


def test_a_copy_is_the_same(signals: Signals) -> None:
    """Frameworks copy agents: a copy asks the same store, and knows the same corrections."""
    client = StoreClient(MemoryStore(), signals.recorder)
    copied: Any = copy.deepcopy(client)
    assert copied is client


def test_a_fickle_store_is_a_store() -> None:
    """What stands in for a store here has all that a store has."""
    assert isinstance(FickleStore(), QuotaStore)


def charge(client: StoreClient, key: str, *, mirrored: bool = False) -> Grant | None:
    return client.reserve(Reservation("", "", (Slot(key, mirrored=mirrored),), ({0: 1},)))


def test_how_full_a_store_is(signals: Signals) -> None:
    """A scrape tells what a store in memory keeps, what of it makes room, and the most it keeps."""
    client = StoreClient(MemoryStore(max_keys=9), signals.recorder)
    assert [signals.value(KEYS, droppable=each) for each in ("true", "false")] == [0, 0]
    charge(client, "user")
    for thread in ("one", "two"):
        charge(client, thread, mirrored=True)
    assert [signals.value(KEYS, droppable=each) for each in ("true", "false")] == [2, 1]
    assert signals.value(MAX_KEYS) == 9


def test_the_store_with_the_least_room_is_told(signals: Signals) -> None:
    """Of several it is the one that is nearest to its bound, for as long as somebody uses it."""
    large = StoreClient(MemoryStore(max_keys=100), signals.recorder)
    small = StoreClient(MemoryStore(max_keys=3), signals.recorder)
    for number in range(20):
        charge(large, f"user-{number}")
    charge(small, "user")
    assert (signals.value(KEYS, droppable="false"), signals.value(MAX_KEYS)) == (1, 3)
    del small
    assert (signals.value(KEYS, droppable="false"), signals.value(MAX_KEYS)) == (20, 100)


def test_a_store_without_a_bound(signals: Signals) -> None:
    """Of a store that does not say how full it is nothing is told."""
    client = StoreClient(FickleStore(), signals.recorder)
    charge(client, "user")
    assert signals.value(MAX_KEYS) is None
    assert signals.value("langchain_quota_errors_total", component="threads") is None


def test_a_store_that_fills_is_logged_once(
    signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """At four fifths, before anything is refused; what makes room for others does not count."""
    client = StoreClient(MemoryStore(max_keys=10), signals.recorder)
    for number in range(20):
        charge(client, f"thread-{number}", mirrored=True)
    for number in range(7):
        charge(client, f"user-{number}")
    assert caplog.records == []
    for number in range(7, 10):
        assert charge(client, f"user-{number}") is not None
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "nearly full: 8 counts of at most 10" in record.getMessage()


def test_a_store_that_cannot_say_how_full_it_is(signals: Signals) -> None:
    """Its failure is counted, and neither the agent nor the scrape fails."""

    class Silent(FickleStore):
        says = True

        @property
        def occupancy(self) -> tuple[int, int, int]:
            if self.says:
                return 1, 0, 10
            raise KeyError("nobody knows")

    store = Silent()
    client = StoreClient(store, signals.recorder)
    assert signals.value(MAX_KEYS) == 10
    store.says = False
    assert charge(client, "user") is not None
    assert charge(client, "user") is not None
    failed = {"component": "threads", "error_type": "KeyError"}
    assert signals.value("langchain_quota_errors_total", **failed) == 1
    assert signals.value(MAX_KEYS) is None
    assert signals.value("langchain_quota_errors_total", **failed) == 2
