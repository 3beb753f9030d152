"""A store as the hooks ask it: its failures are seen, and its corrections are not lost."""

import asyncio
import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import pytest

from langchain_quota import MemoryStore, QuotaStoreError, QuotaUsage
from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, admit
from langchain_quota.middleware import _corrections as corrections
from langchain_quota.middleware._calls import Request
from langchain_quota.middleware._store import StoreClient
from langchain_quota.resolved import Outage
from langchain_quota.state import Amounts
from langchain_quota.stores import Occupancy
from tests.judged import KEY, request_of
from tests.signals import Signals

Mode = Literal["sync", "async"]
modes = pytest.mark.parametrize("mode", ["sync", "async"])

THREAD = "search/thread"
KEYS = "langchain_quota_store_keys"
MAX_KEYS = "langchain_quota_store_max_keys"
DOWN = QuotaStoreError("refused")


class RecordingStore:
    """A store that fails when it should, by counts that the test sets; it keeps its requests."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}
        self.asked: list[AcquireRequest] = []
        self.failing: BaseException | None = None
        self.hears = False
        self.meanwhile: Callable[[], object] | None = None

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        self.asked.append(request)
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        if self.failing is None or self.hears:
            result = self.answer(request)
        self._fail()
        return result

    def answer(self, request: AcquireRequest) -> AcquireResult:
        counters = request.counters.items()
        used = {name: self.used.get(each.key or "", each.used) for name, each in counters}
        return admit(request.hits, used, request.stops)

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        self._fail()
        found = [(key, self.used.get(key)) for key in keys]
        return tuple(None if n is None else QuotaUsage(key, n, None, None) for key, n in found)

    def reset(self, keys: Sequence[str]) -> None:
        self._fail()
        self.used |= dict.fromkeys(keys, 0)

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        return self.acquire(request)

    async def apeek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        return self.peek(keys)

    async def areset(self, keys: Sequence[str]) -> None:
        self.reset(keys)

    def breaks(self) -> None:
        """Fail from now on."""
        self.failing = DOWN

    def _fail(self) -> None:
        if self.failing is not None:
            raise self.failing


class LossyStore(RecordingStore):
    """A store in memory that has heard what it is asked, or not, when it fails."""

    def __init__(self, *, hears: bool) -> None:
        super().__init__()
        self.hears = hears
        self.kept = MemoryStore()

    def answer(self, request: AcquireRequest) -> AcquireResult:
        return self.kept.acquire(request)

    def reset(self, keys: Sequence[str]) -> None:
        self._fail()
        self.kept.reset(keys)


class BoundedStore(RecordingStore):
    """A store that says how full it is."""

    def __init__(self, keys: int, droppable: int, max_keys: int) -> None:
        super().__init__()
        self.occupancy_now: Occupancy | None = Occupancy(keys, droppable, max_keys)

    @property
    def occupancy(self) -> Occupancy:
        if self.occupancy_now is None:
            raise KeyError("nobody knows")
        return self.occupancy_now


class Asking:
    """A client of a store, asked in one of the two forms."""

    def __init__(
        self,
        signals: Signals,
        mode: Mode = "sync",
        store: RecordingStore | None = None,
        outage: Outage = "allow",
    ) -> None:
        self.mode = mode
        self.store = store or RecordingStore()
        self.client = StoreClient(self.store, outage, signals.recorder)

    async def acquire(self, request: Request | None = None) -> AcquireResult:
        request = request or request_of()
        if self.mode == "sync":
            return self.client.acquire(request)
        return await self.client.aacquire(request)

    async def peek(self, *keys: str) -> dict[str, int] | None:
        if self.mode == "sync":
            found = self.client.peek(keys)
        else:
            found = await self.client.apeek(keys)
        return None if found is None else {key: each.used for key, each in found.items()}

    async def reset(self, *keys: str) -> None:
        if self.mode == "sync":
            self.client.reset(keys)
        else:
            await self.client.areset(keys)

    def lose(self, request: Request | None = None) -> AcquireRequest:
        """A request that the store does not answer; what it was asked."""
        request = request or request_of()
        self.store.failing = DOWN
        self.client.acquire(request)
        self.store.failing = None
        self.store.asked.clear()
        assert request.sent is not None
        return request.sent

    def carried(self) -> list[list[str]]:
        """The corrections that each request to the store took along."""
        return [[each.id for each in one.compensations] for one in self.store.asked]


def seconds(signals: Signals, operation: str, outcome: str) -> float | None:
    """How many requests to the store had this outcome."""
    name = "langchain_quota_store_seconds_count"
    return signals.value(name, operation=operation, outcome=outcome)


def failures(signals: Signals, error_type: str = "QuotaStoreError") -> float | None:
    name = "langchain_quota_errors_total"
    return signals.value(name, component="store", error_type=error_type)


@modes
async def test_the_stores_answer(mode: Mode, signals: Signals) -> None:
    """It is handed on as it is, and its time is taken."""
    asking = Asking(signals, mode)
    asking.store.used[KEY] = 4
    admitted, refused = request_of(), request_of(most=4)
    assert (await asking.acquire(admitted)).admitted == (True,)
    result = await asking.acquire(refused)
    assert (result.used[THREAD], result.admitted) == (4, (False,))
    assert admitted.answered
    assert refused.answered
    assert asking.store.asked == [admitted.sent, refused.sent]
    assert seconds(signals, "acquire", "ok") == 2


@modes
async def test_what_is_kept(mode: Mode, signals: Signals) -> None:
    """A peek gives the counts that there are, a reset sets them to 0; no key, no request."""
    asking = Asking(signals, mode)
    asking.store.used[KEY] = 3
    assert await asking.peek(KEY, "another") == {KEY: 3}
    await asking.reset(KEY)
    assert await asking.peek(KEY) == {KEY: 0}
    assert await asking.peek() == {}
    assert (seconds(signals, "peek", "ok"), seconds(signals, "reset", "ok")) == (2, 1)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (QuotaStoreError("refused"), "error"),
        (QuotaStoreError("no answer", timed_out=True), "timeout"),
        (TimeoutError(), "timeout"),
        (ZeroDivisionError(), "error"),
    ],
    ids=repr,
)
@modes
async def test_a_store_that_fails(
    mode: Mode, error: Exception, outcome: str, signals: Signals
) -> None:
    """Whatever it raises, calls are judged without it; it is timed and counted. A reset raises."""
    asking = Asking(signals, mode)
    asking.store.failing = error
    request = request_of()
    assert (await asking.acquire(request)).admitted == (True,)
    assert not request.answered
    assert await asking.peek(KEY) is None
    assert failures(signals, type(error).__name__) == 2
    with pytest.raises(type(error)):
        await asking.reset(KEY)
    for operation in ("acquire", "peek", "reset"):
        assert seconds(signals, operation, outcome) == 1


async def test_an_outage_is_logged_once(signals: Signals, caplog: pytest.LogCaptureFixture) -> None:
    """Its first failure and its end are logged, each failure is counted, and so the next outage."""
    asking = Asking(signals)
    for number in (1, 2):
        asking.store.failing = DOWN
        for _ in range(3):
            await asking.acquire()
        asking.store.failing = None
        for _ in range(3):
            await asking.acquire()
        assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
        assert failures(signals) == 3 * number
        caplog.clear()


async def test_a_misused_store_is_not_down(signals: Signals) -> None:
    """A TypeError is the programmer's: it reaches the caller, and is no outage."""
    asking = Asking(signals)
    asking.store.failing = TypeError("a client of redis.asyncio serves no sync calls")
    with pytest.raises(TypeError, match="serves no sync calls"):
        await asking.acquire()
    with pytest.raises(TypeError, match="serves no sync calls"):
        await asking.peek(KEY)
    assert not failures(signals, "TypeError")


@pytest.mark.parametrize(
    ("outage", "arguments", "admitted", "ran"),
    [
        ("allow", {}, (True,), {KEY: 1}),
        ("allow", {"calls": 2}, (True, True), {KEY: 2}),
        ("allow", {"own": 7, "most": 7}, (False,), {}),
        ("allow", {"calls": 2, "most": 1, "exit_behavior": "end"}, (True, False), {}),
        ("deny", {}, (False,), {}),
        ("deny", {"enforce": False}, (True,), {KEY: 1}),
    ],
    ids=["one", "two", "used up", "stopped", "denied", "denied on trial"],
)
@modes
async def test_an_outage(
    mode: Mode,
    signals: Signals,
    *,
    outage: Outage,
    arguments: Any,
    admitted: tuple[bool, ...],
    ran: Amounts,
) -> None:
    """Calls are judged without the store, which is then corrected by what has run."""
    asking = Asking(signals, mode, outage=outage)
    request = request_of(**arguments)
    asking.store.breaks()
    assert (await asking.acquire(request)).admitted == admitted
    assert signals.value(
        "langchain_quota_store_fallbacks_total", agent="unnamed", action=outage
    ) == len(admitted)
    asking.store.failing = None
    await asking.acquire()
    sent = request.sent
    assert sent is not None
    (correction,) = asking.store.asked[-1].compensations
    assert correction == Compensation(
        sent.attempt_id,
        ran,
        sent.attempt_id,
        sent.idempotency_key,
        {KEY: arguments.get("own", 0)},
    )


@modes
async def test_an_answer_that_says_too_little_is_none(mode: Mode, signals: Signals) -> None:
    """A store of a user's own that leaves out what refuses the calls has not answered."""

    class TerseStore(RecordingStore):
        def answer(self, request: AcquireRequest) -> AcquireResult:
            return replace(super().answer(request), refused=())

    request = request_of()
    result = await Asking(signals, mode, TerseStore(), outage="deny").acquire(request)
    assert not request.answered
    assert result.admitted == (False,)
    assert failures(signals, "QuotaStoreError") == 1


@modes
async def test_a_reset_holds_for_what_ran_in_an_outage(mode: Mode, signals: Signals) -> None:
    """What waits to be counted is counted first: it does not come back after the reset."""
    asking = Asking(signals, mode, LossyStore(hears=False))
    asking.store.breaks()
    for _ in range(7):
        await asking.acquire()
    asking.store.failing = None

    await asking.reset(KEY)
    await asking.acquire()

    store = asking.store
    assert isinstance(store, LossyStore)
    (usage,) = store.kept.peek([KEY])
    assert usage is not None
    assert usage.used == 1


@pytest.mark.parametrize("hears", [False, True])
@pytest.mark.parametrize(("outage", "used"), [("deny", 1), ("allow", 2)])
async def test_a_call_of_an_outage_is_counted_once_if_it_ran(
    outage: Outage,
    used: int,
    hears: bool,  # noqa: FBT001 - a parameter of the test
    signals: Signals,
) -> None:
    """Whether or not the store had heard of it when it failed."""
    store = LossyStore(hears=hears)
    asking = Asking(signals, store=store, outage=outage)
    asking.lose()
    result = await asking.acquire()
    assert result.used[THREAD] == used - 1
    (kept,) = store.kept.peek([KEY])
    assert kept is not None
    assert kept.used == used


async def test_corrections_are_sent_until_they_arrive(signals: Signals) -> None:
    """They wait out an outage, travel with the first request that is answered, and not again."""
    asking = Asking(signals)
    lost = asking.lose()
    asking.store.breaks()
    await asking.acquire(failing := request_of())
    asking.store.failing = None
    await asking.acquire()
    await asking.acquire()
    assert failing.sent is not None
    both = [lost.attempt_id, failing.sent.attempt_id]
    assert asking.carried() == [[lost.attempt_id], both, []]


async def test_corrections_come_before_the_requests_own(signals: Signals) -> None:
    """What ran is charged before what is to be taken back of it."""
    asking = Asking(signals)
    lost = asking.lose()
    await asking.acquire(request_of(refunds={"refund": {KEY: 1}}))
    assert asking.carried() == [[lost.attempt_id, "refund"]]


async def test_a_few_corrections_at_a_time(signals: Signals) -> None:
    """A long outage does not make the first request after it a huge one, and loses none."""
    asking = Asking(signals)
    lost = [asking.lose().attempt_id for _ in range(12)]
    for _ in range(4):
        await asking.acquire()
    assert asking.carried() == [lost[:5], lost[5:10], lost[10:], []]


async def test_one_request_at_a_time_carries_corrections(signals: Signals) -> None:
    """While they are on their way others go without them, and afterwards with what is left."""
    asking = Asking(signals)
    lost = [asking.lose().attempt_id for _ in range(6)]
    asking.store.meanwhile = lambda: asking.client.acquire(request_of())
    await asking.acquire()
    await asking.acquire()
    assert asking.carried() == [lost[:5], [], lost[5:]]


@pytest.mark.parametrize("failing", [DOWN, asyncio.CancelledError()], ids=repr)
async def test_the_next_request_carries_what_a_lost_one_did(
    failing: BaseException, signals: Signals
) -> None:
    """A request that failed or was cancelled holds no corrections back."""
    asking = Asking(signals)
    lost = asking.lose()
    asking.store.failing = failing
    with suppress(asyncio.CancelledError):
        await asking.acquire()
    asking.store.failing = None
    await asking.acquire()
    assert lost.attempt_id in asking.carried()[-1]


async def test_a_step_that_runs_again_did_not_run_before(signals: Signals) -> None:
    """The correction of its first attempt goes ahead of it, and charges nothing.

    Even while another request carries it: else the step would be answered as that attempt was, and
    then lose its charge to the correction.
    """
    asking = Asking(signals)
    lost = asking.lose(request_of(task="task"))
    again = request_of(task="task")
    asking.store.meanwhile = lambda: asking.client.acquire(again)
    await asking.acquire()
    assert asking.carried() == [[lost.attempt_id]] * 2
    (correction,) = asking.store.asked[1].compensations
    assert again.sent is not None
    assert correction.idempotency_key == again.sent.idempotency_key
    assert correction.amounts == {}


@modes
@pytest.mark.parametrize("breaks", [False, True])
async def test_the_store_first_learns_what_the_caller_has_counted(
    mode: Mode,
    breaks: bool,  # noqa: FBT001 - a parameter of the test
    signals: Signals,
) -> None:
    """All that ran of a thread in an outage goes, oldest first, ahead of the thread's next call.

    Else the call would be judged on less, or what is in the caller's own count counted twice.
    """
    asking = Asking(signals, mode)
    lost = [asking.lose(request_of(own=own)).attempt_id for own in range(12)]
    expected = [lost[:5], lost[5:10], lost[10:]]
    if breaks:
        # In the middle: what has arrived is not sent again.
        asking.store.meanwhile = lambda: setattr(asking.store, "meanwhile", asking.store.breaks)
        await asking.acquire(failed := request_of(own=12))
        assert failed.sent is not None
        assert asking.carried() == expected[:2]
        asking.store.failing = None
        asking.store.asked.clear()
        expected = [lost[5:10], [*lost[10:], failed.sent.attempt_id]]
    await asking.acquire(request_of(own=12))
    assert asking.carried() == expected
    assert [bool(each.hits) for each in asking.store.asked] == [
        *[False] * (len(expected) - 1),
        True,
    ]


async def test_the_store_first_learns_what_it_is_to_take_back(signals: Signals) -> None:
    """A refund takes along what is still to be charged under its keys, also if others carry it."""
    asking = Asking(signals)
    lost = asking.lose()
    refunding = request_of(refunds={"refund": {KEY: 1}})
    asking.store.meanwhile = lambda: asking.client.acquire(refunding)
    await asking.acquire()
    assert asking.carried() == [[lost.attempt_id], [lost.attempt_id, "refund"]]


async def test_corrections_are_bounded(monkeypatch: pytest.MonkeyPatch, signals: Signals) -> None:
    """Beyond so many the oldest is lost, and that is counted."""
    monkeypatch.setattr(corrections, "MAX_PENDING", 2)
    asking = Asking(signals)
    lost = [asking.lose().attempt_id for _ in range(2)]
    assert failures(signals) == 2
    lost.append(asking.lose().attempt_id)
    assert failures(signals) == 3 + 1
    await asking.acquire()
    assert asking.carried() == [lost[1:]]


async def test_what_waits_goes_by_the_form_that_the_store_serves(
    monkeypatch: pytest.MonkeyPatch, signals: Signals
) -> None:
    """A store without an async form is not asked in that form: the next request takes it along."""

    class SyncStore(RecordingStore):
        forms = ("sync",)

        async def aacquire(self, request: AcquireRequest) -> AcquireResult:
            raise TypeError("no async form")

    monkeypatch.setattr(corrections, "_FIRST", 0.0)
    store = SyncStore()
    asking = Asking(signals, store=store)
    lost = asking.lose()
    for _ in range(5):
        await asyncio.sleep(0)
    assert asking.carried() == []
    asking.client.acquire(request_of())
    assert asking.carried() == [[lost.attempt_id]]


async def test_a_cancelled_request_is_undone(signals: Signals) -> None:
    """Whoever asks next takes back what a cancelled run has, or may yet have, charged."""
    asking = Asking(signals, "async")
    asking.store.failing = asyncio.CancelledError()
    cancelled = request_of()
    with pytest.raises(asyncio.CancelledError):
        await asking.acquire(cancelled)
    asking.store.failing = None
    await asking.acquire()
    (correction,) = asking.store.asked[-1].compensations
    assert cancelled.sent is not None
    assert (correction.attempt_id, correction.amounts) == (cancelled.sent.attempt_id, {})
    # A cancellation is nobody's failure.
    assert not failures(signals, "CancelledError")


async def test_a_cancelled_peek_leaves_nothing_to_correct(signals: Signals) -> None:
    """Looking charges nothing."""
    asking = Asking(signals, "async")
    asking.store.failing = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await asking.peek(KEY)
    asking.store.failing = None
    await asking.acquire()
    assert asking.carried() == [[]]


def test_a_copy_is_the_same(signals: Signals) -> None:
    """Frameworks copy agents: a copy asks the same store, and knows the same corrections."""
    client = Asking(signals).client
    copied: Any = copy.deepcopy(client)
    assert copied is client


def test_the_store_with_the_least_room_is_shown(signals: Signals) -> None:
    """A scrape has what it keeps, what of it can make room, and its bound, while it is in use."""
    large = Asking(signals, store=BoundedStore(20, 0, 100))
    small = Asking(signals, store=BoundedStore(3, 2, 3))
    assert [signals.value(KEYS, droppable=each) for each in ("true", "false")] == [2, 1]
    assert signals.value(MAX_KEYS) == 3
    del small
    assert [signals.value(KEYS, droppable=each) for each in ("true", "false")] == [0, 20]
    assert signals.value(MAX_KEYS) == 100
    assert isinstance(large.store, BoundedStore)


async def test_a_store_without_a_bound(signals: Signals) -> None:
    """Of a store that does not say how full it is nothing is shown, and nothing fails."""
    asking = Asking(signals)
    await asking.acquire()
    assert signals.value(MAX_KEYS) is None
    assert signals.value("langchain_quota_errors_total", component="threads") is None


async def test_a_store_that_fills_is_logged_once(
    signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """At four fifths, before anything is refused; what makes room for others does not count."""
    store = BoundedStore(10, 3, 10)
    asking = Asking(signals, store=store)
    await asking.acquire()
    assert caplog.records == []
    for droppable in (2, 0):
        store.occupancy_now = Occupancy(10, droppable, 10)
        await asking.acquire()
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "nearly full: 8 counts of at most 10" in record.getMessage()


async def test_a_store_that_cannot_say_how_full_it_is(signals: Signals) -> None:
    """Its failure is counted, and neither the agent nor the scrape fails."""
    store = BoundedStore(1, 0, 10)
    asking = Asking(signals, store=store)
    assert signals.value(MAX_KEYS) == 10
    store.occupancy_now = None
    for _ in range(2):
        assert (await asking.acquire()).admitted == (True,)
    failed = {"component": "threads", "error_type": "KeyError"}
    assert signals.value("langchain_quota_errors_total", **failed) == 1
    assert signals.value(MAX_KEYS) is None
    assert signals.value("langchain_quota_errors_total", **failed) == 2
