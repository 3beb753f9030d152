"""The client of a shared store: it times requests, records failures and sends corrections.

While the store does not answer, a correction waits in this process. It undoes the request, in case
the store has received it, and adds the calls that ran nevertheless. The next requests of this
client take it along. When there are none, a task of the event loop sends it alone.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Self
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakValueDictionary

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction
from langchain_quota.middleware.corrections import MAX_PENDING, CorrectionQueue, shared_prefix
from langchain_quota.runtime.process_end import call_at_end
from langchain_quota.runtime.queues import queues_of
from langchain_quota.runtime.store_errors import (
    AttemptCorrectedError,
    QuotaStoreError,
    ReservationsFullError,
)
from langchain_quota.runtime.sync_async import Mode, call_variant, pop_closed_loops, run_sync
from langchain_quota.stores import QuotaStore, QuotaUsage
from langchain_quota.stores.base import BaseStore
from langchain_quota.stores.grants import Grant, SupportsGrants
from langchain_quota.stores.keys import CountKey, keys_of
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.server import ServerStore
from langchain_quota.telemetry import logs, names
from langchain_quota.telemetry.recorder import Recorder
from langchain_quota.telemetry.workers import Freeze

_FIRST, _LONGEST = 1.0, 30.0
"""How long a task waits before it sends for the first time, and at most, in seconds."""

_BUGS = (TypeError, AttributeError, LookupError, NameError)
"""Errors that are raised, because an outage would hide them."""


class StoreClient:
    """Asks a store, and says so when it cannot be asked."""

    by_name: ClassVar[WeakValueDictionary[str, "StoreClient"]] = WeakValueDictionary()
    """The clients of this process: one middleware refunds what another one has charged."""

    def __init__(self, store: QuotaStore, recorder: Recorder) -> None:
        self.store = store
        self.name = uuid4().hex
        self.by_name[self.name] = self
        self.prefix: object = getattr(store, "prefix", None)
        self.clock: Callable[[], float] = getattr(store, "clock", time.time)
        """The store's clock, by which its windows begin and end."""
        self.forms: Collection[str] = getattr(store, "forms", ("sync", "async"))
        self.recorder, self._outages = recorder, recorder.outages
        server = store.server if isinstance(store, ServerStore) else type(store).__name__
        self.label = recorder.store_label(server)
        # The operation that failed last, until the outage is over.
        self._failed = ""
        # How many subjects were frozen, and in which minute that was read, by prefix.
        self._freezes: dict[str, tuple[int, float]] = {}
        self._corrections = CorrectionQueue()
        self._tasks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = (
            WeakKeyDictionary()
        )
        # Whether the log may still have to say that the store is nearly full.
        self._fills = True

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: a copy of the middleware asks the same store."""
        return self

    async def acquire(
        self, mode: Mode, sent: AcquireRequest, *, undo: bool = True, waits: bool = False
    ) -> AcquireResult | None:
        """Return the store's result; `None` if it is unavailable: then the caller corrects later.

        Where the caller is cancelled, the request is undone later, if there is anything to undo.
        Who waits gets an empty result if a count can have no more reservations now. Without `undo`
        the result is also `None` if the caller's correction of the attempt arrived before it.
        """  # noqa: DOC501 - `_asking` handles it
        result: AcquireResult | None = None
        with self._asking("acquire", sent if undo else None):
            try:
                result = await self._send(mode, sent)
            except ReservationsFullError:
                if waits:
                    return AcquireResult({})
                raise
            except AttemptCorrectedError:
                if undo:
                    raise
                # A newer renewal of the leases has overtaken this one, and stands in its place.
                return None
            if not result.replayed:
                prefix = shared_prefix(keys_of(sent)) if callable(self.prefix) else self.prefix
                source, frozen = f"{self.label} {prefix}", None
                # Read who is frozen once a minute, and when their number has changed.
                state = result.freezes, result.freezes and time.monotonic() // 60
                is_news = state != self._freezes.get(source, (0, 0))
                if is_news and not result.freezes:
                    self._freezes[source], frozen = state, []
                elif is_news and isinstance(self.store, SupportsGrants):
                    self._freezes[source] = state
                    one_prefix = str(prefix) if callable(self.prefix) else ""
                    with self._asking("peek"):
                        reading = self.store.freezes(one_prefix)
                        frozen = [*map(_freeze_of, await reading if mode else run_sync(reading))]
                self.recorder.record_freezes(source, frozen)
        return result

    async def settle(self, mode: Mode, sent: AcquireRequest) -> AcquireResult | None:
        """Send corrections: now, or later if the store does not answer."""
        result: AcquireResult | None = None
        try:
            result = await self.acquire(mode, sent, undo=False)
        finally:
            if result is None:
                self._make_later(sent.corrections)
        return result

    def settle_soon(self, sent: AcquireRequest) -> None:
        """Charge where nobody can wait what was used: at once in memory, or with a next request."""
        if isinstance(self.store, MemoryStore):
            # Without counters, for nobody reads what is newly granted there.
            run_sync(self.settle("", sent._replace(counters={})))
        else:
            self._make_later(sent.corrections)

    async def peek(self, mode: Mode, keys: Sequence[str]) -> dict[str, QuotaUsage] | None:
        """Return what is counted under each key that the store has; `None` if it is unavailable."""
        if not keys:
            return {}
        uses: dict[str, QuotaUsage] | None = None
        with self._asking("peek"):
            usages = await call_variant(mode, self.store.peek, self.store.apeek, keys)
            uses = {usage.key: usage for usage in usages if usage is not None}
        return uses  # noqa: RET504 - the context suppresses exceptions

    async def mark(
        self, key: str, limit: str, thresholds: Sequence[int]
    ) -> tuple[int | None, int] | None:
        """Mark what use has passed, as a store's `mark`; `None` if it is unavailable."""
        assert isinstance(self.store, SupportsGrants)  # noqa: S101 - for the type checker
        marked: tuple[int | None, int] | None = None
        with self._asking("mark"):
            marked = await self.store.mark(key, limit, thresholds)
        return marked  # noqa: RET504 - the context suppresses exceptions

    async def delay(self, mode: Mode, key: str, seconds: float, burst: int = 0) -> None:
        """Have a smooth count admit nothing for some seconds, if the store answers."""
        store = self.store
        assert isinstance(store, BaseStore)  # noqa: S101 - for the type checker: it has the method
        with self._asking("delay"):
            await call_variant(mode, store.delay, store.adelay, key, seconds, burst=burst)

    async def reset(self, mode: Mode, keys: Sequence[str]) -> None:
        """Reset the counts of keys, after the corrections of them that wait."""
        with self._asking("reset", reraises=True):
            if self._corrections.waiting:
                await self._send(mode, AcquireRequest("", ""), keys)
            await call_variant(mode, self.store.reset, self.store.areset, keys)

    def correct_later(
        self, request: AcquireRequest, amounts: Mapping[str, int] | None = None
    ) -> None:
        """Undo a request that the store may have received, and add the calls that ran without."""
        self._make_later(undoing(request, amounts))

    def _make_later(self, corrections: Sequence[Correction]) -> None:
        if self._corrections.add(corrections):
            error = QuotaStoreError(f"more than {MAX_PENDING} corrections wait for the store")
            self.recorder.record_error("store", error, log=False)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        # Without a request they are sent alone, at the latest when the loop or the process ends.
        pop_closed_loops(self._tasks)
        if self._corrections.waiting and "async" in self.forms and loop not in self._tasks:
            task = self._tasks[loop] = loop.create_task(self._send_until_done())
            task.add_done_callback(lambda _: self._tasks.pop(loop, None))

    async def _send_until_done(self) -> None:
        wait = _FIRST
        try:
            while self._corrections.waiting:
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST)
                await self.send_waiting("a")
        except asyncio.CancelledError:
            # The event loop ends.
            await self.send_waiting("a")
            raise

    async def send_waiting(self, mode: Mode) -> None:
        """Send the corrections that wait."""
        for prefix in self._corrections.prefixes():
            with self._asking("acquire"):
                remaining = True
                while remaining:
                    with self._corrections.carried(prefix) as (carried, _):
                        remaining = bool(carried)
                        if remaining:
                            await self._ask(mode, AcquireRequest("", "", corrections=carried))

    async def _send(
        self, mode: Mode, sent: AcquireRequest, reset: Sequence[str] = ()
    ) -> AcquireResult:
        """Send a request, and before it the corrections that it needs, and return the result."""
        if not self._corrections.waiting:
            return await self._ask(mode, sent)
        last, answer, prefix = False, AcquireResult({}), shared_prefix([*reset, *keys_of(sent)])
        # The counts that the caller has, or corrects.
        keys = {*reset, *(counter.key or "" for counter in sent.counters.values() if counter.used)}
        keys.update(*(correction.amounts for correction in sent.corrections))
        while not last:
            with self._corrections.carried(prefix, keys, sent.idempotency_key) as (carried, last):
                request = sent if last else AcquireRequest("", "")
                corrections = *carried, *request.corrections
                answer = await self._ask(mode, request._replace(corrections=corrections))
        return answer

    async def _ask(self, mode: Mode, request: AcquireRequest) -> AcquireResult:
        answer = await call_variant(mode, self.store.acquire, self.store.aacquire, request)
        # The store may be a user's own.
        if {len(answer.admitted), len(answer.refused)} != {len(request.demands)}:
            raise QuotaStoreError("the store's answer does not say of each call what refuses it")
        if request.corrections:
            # They may have made room for calls that wait in this process.
            queues_of(self.store).look_again(keys_of(request._replace(counters={})))
        return answer

    @contextmanager
    def _asking(
        self, operation: str, request: AcquireRequest | None = None, *, reraises: bool = False
    ) -> Iterator[None]:
        """Time an operation; record that the store is unavailable, or raise what it raises."""
        started, outcome = time.perf_counter(), "error"
        try:
            yield
        except Exception as error:
            if getattr(error, "timed_out", False) or isinstance(error, TimeoutError):
                outcome = "timeout"
            if reraises or isinstance(error, _BUGS):
                raise
            # Whatever a store raises, it has not answered.
            self._failed, failure = operation, uuid4().hex
            # The agents of a process lose their store together: the first failure is logged.
            is_first = self._outages.setdefault(self.label, failure) == failure
            self.recorder.record_error("store", error, log=is_first)
        except BaseException:
            # Cancelled: the call will not run, but the store may have received the request.
            if request is not None:
                self.correct_later(request)
            raise
        else:
            outcome = "ok"
            # A server that is full, or is a replica, still answers what only reads.
            if self._failed and (operation != "peek" or self._failed == "peek"):
                self._failed = ""
                if self._outages.pop(self.label, ""):
                    self.recorder.log(logs.recovery, "store")
            if self._fills:
                self._fills = not self.recorder.store_nearly_full(self.store)
        finally:
            seconds = time.perf_counter() - started
            self.recorder.observe(names.STORE_SECONDS, seconds, self.label, operation, outcome)


def undoing(
    request: AcquireRequest, amounts: Mapping[str, int] | None = None
) -> tuple[Correction, ...]:
    """Return the corrections that undo a request, and add amounts in its place."""
    attempt, counters = request.attempt_id, request.counters.values()
    starts = {counter.key: counter.used for counter in counters if counter.key is not None}
    mirrored = {counter.key for counter in counters if counter.key and counter.mirrored}
    name = request.idempotency_key
    correction = Correction(attempt, amounts or {}, attempt, name, starts, mirrored=mirrored)
    # What the request was to refund is refunded, too.
    return correction, *request.corrections


def _freeze_of(grant: Grant) -> Freeze:
    key, until = CountKey.parse(grant.key), grant.until
    ends = None if until is None else until.timestamp()
    return key.dimension, key.subject, grant.by, grant.given_at.timestamp(), ends


def _finish() -> None:
    """Send the corrections that wait for the last time, before the process ends."""
    for client in list(StoreClient.by_name.values()):
        # An async client has had a last try when its event loop ended.
        if "sync" in client.forms:
            run_sync(client.send_waiting(""))


call_at_end(_finish)
