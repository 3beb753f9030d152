"""A store as the hooks ask it: its failures are seen, and its corrections are not lost."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from langchain_quota import QuotaStoreError, QuotaUsage
from langchain_quota.admission import AcquireRequest, AcquireResult, admit
from langchain_quota.middleware import _corrections as corrections
from langchain_quota.middleware._calls import Request
from langchain_quota.middleware._store import StoreClient
from langchain_quota.resolved import Outage
from langchain_quota.stores import Occupancy
from tests.judged import KEY, request_of
from tests.signals import Signals

Mode = Literal["sync", "async"]
modes = pytest.mark.parametrize("mode", ["sync", "async"])

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
async def test_what_is_kept(mode: Mode, signals: Signals) -> None:
    """A peek gives the counts that there are, a reset sets them to 0; no key, no request."""
    asking = Asking(signals, mode)
    asking.store.used[KEY] = 3
    assert await asking.peek(KEY, "another") == {KEY: 3}
    await asking.reset(KEY)
    assert await asking.peek(KEY) == {KEY: 0}
    assert await asking.peek() == {}
    assert (seconds(signals, "peek", "ok"), seconds(signals, "reset", "ok")) == (2, 1)


async def test_a_misused_store_is_not_down(signals: Signals) -> None:
    """A TypeError is the programmer's: it reaches the caller, and is no outage."""
    asking = Asking(signals)
    asking.store.failing = TypeError("a client of redis.asyncio serves no sync calls")
    with pytest.raises(TypeError, match="serves no sync calls"):
        await asking.acquire()
    with pytest.raises(TypeError, match="serves no sync calls"):
        await asking.peek(KEY)
    assert not failures(signals, "TypeError")


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


def test_a_copy_is_the_same(signals: Signals) -> None:
    """Frameworks copy agents: a copy asks the same store, and knows the same corrections."""
    client = Asking(signals).client
    copied: Any = copy.deepcopy(client)
    assert copied is client


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
