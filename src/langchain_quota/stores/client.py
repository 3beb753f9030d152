"""The client of a shared store: it times requests, records failures and keeps corrections.

While the store does not answer, a correction waits in this process. It undoes the request, in case
the store has received it, and adds the calls that ran nevertheless. The next requests of this
client take it along; if there are none, it is sent alone.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Self
from uuid import uuid4
from weakref import WeakValueDictionary

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction
from langchain_quota.errors import QuotaStoreError
from langchain_quota.runtime.sync_async import Mode, call_variant, fork_safe_lock, run_sync
from langchain_quota.stores import QuotaStore, QuotaUsage
from langchain_quota.stores.corrections import MAX_PENDING, CorrectionQueue
from langchain_quota.stores.keys import keys_of, prefix_of
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.rate_limiter import RateLimiting
from langchain_quota.stores.server import ServerStore
from langchain_quota.telemetry import logs, names
from langchain_quota.telemetry.recorder import Recorder


class LostLeaseError(QuotaStoreError):
    """A store has not held a call's place all the time."""


class StoreClient:
    """Asks a store, and says so when it cannot be asked."""

    by_name: ClassVar[WeakValueDictionary[str, "StoreClient"]] = WeakValueDictionary()
    """The clients of this process: one middleware refunds what another one has charged."""

    def __init__(self, store: QuotaStore, recorder: Recorder) -> None:
        self.store = store
        self.name = uuid4().hex
        self.by_name[self.name] = self
        self.prefix: object = getattr(store, "prefix", None)
        self.forms: Collection[str] = getattr(store, "forms", ("sync", "async"))
        self._recorder = recorder
        server = store.server if isinstance(store, ServerStore) else type(store).__name__
        self.label = recorder.store_label(server)
        self._lock = fork_safe_lock()
        self._down = False
        self._corrections = CorrectionQueue(self.forms, self.send_waiting)
        # Whether the log may still have to say that the store is nearly full.
        self._fills = True

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: a copy of the middleware asks the same store."""
        return self

    async def acquire(
        self, mode: Mode, sent: AcquireRequest, *, undo: bool = True
    ) -> AcquireResult | None:
        """Return the store's result; `None` if it is unavailable: then the caller corrects later.

        Where the caller is cancelled, the request is undone later, if there is anything to undo.
        """
        result: AcquireResult | None = None
        with self._asking("acquire", sent if undo else None):
            result = await self._send(mode, sent)
            if not result.replayed:
                prefix = self.prefix
                if callable(prefix):
                    prefix = prefix_of(next(iter(keys_of(sent)), ""))
                self._recorder.record_freezes(f"{self.label} {prefix}", result.freezes)
        return result

    async def settle(self, mode: Mode, sent: AcquireRequest) -> AcquireResult | None:
        """Charge what was used in place of what was held: now, or later if it cannot be sent."""
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
            run_sync(self.settle("", replace(sent, counters={})))
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
        return uses  # noqa: RET504 - the same

    async def delay(self, mode: Mode, key: str, seconds: float, burst: int = 0) -> None:
        """Have a smooth count admit nothing for some seconds, if the store answers."""
        store = self.store
        assert isinstance(store, RateLimiting)  # noqa: S101 - for the type checker: it has the method
        with self._asking("delay"):
            await call_variant(mode, store.delay, store.adelay, key, seconds, burst=burst)

    async def reset(self, mode: Mode, keys: Sequence[str]) -> None:
        """Reset the counts of keys, after the corrections of them that wait."""
        with self._timing("reset"):
            if self._corrections and keys:
                await self._send(mode, AcquireRequest("", ""), keys)
            await call_variant(mode, self.store.reset, self.store.areset, keys)

    def correct_later(
        self, request: AcquireRequest, amounts: Mapping[str, int] | None = None
    ) -> None:
        """Undo a request that the store may have received, and add the calls that ran without."""
        attempt = request.attempt_id
        correction = Correction(
            attempt,
            amounts or {},
            attempt,
            request.idempotency_key,
            {
                counter.key: counter.used
                for counter in request.counters.values()
                if counter.key is not None
            },
        )
        # What the request was to refund is refunded, too.
        self._make_later([correction, *request.corrections])

    def lose(self, count: str) -> None:
        """Record that a lease was over before its call."""
        why = "its worker stood still, or the store did not answer: others may run in its place"
        error = LostLeaseError(f"a running call of {count!r} lost its place, for {why}")
        self._recorder.record_error("store", error)

    def _make_later(self, corrections: Sequence[Correction]) -> None:
        if self._corrections.add(corrections):
            error = QuotaStoreError(f"more than {MAX_PENDING} corrections wait for the store")
            self._recorder.record_error("store", error, log=False)

    async def send_waiting(self, mode: Mode) -> None:
        """Send the corrections that wait."""
        for prefix in self._corrections.prefixes():
            with self._asking("acquire"):
                remaining = True
                while remaining:
                    with self._corrections.carried(prefix) as (carried, _):
                        remaining = bool(carried)
                        if remaining:
                            alone = AcquireRequest("", "", corrections=carried)
                            await self._acquire(mode, alone)

    async def _acquire(self, mode: Mode, sent: AcquireRequest) -> AcquireResult:
        return await call_variant(mode, self.store.acquire, self.store.aacquire, sent)

    async def _send(
        self, mode: Mode, sent: AcquireRequest, reset: Sequence[str] = ()
    ) -> AcquireResult:
        """Send a request, and before it the corrections that it needs, and return the result."""
        last, answer = False, AcquireResult({})
        if not self._corrections:
            return _checked(await self._acquire(mode, sent), sent)
        prefix = prefix_of(next(iter([*reset, *keys_of(sent)]), ""))
        # The counts that the caller has, or corrects.
        keys = {*reset, *(counter.key or "" for counter in sent.counters.values() if counter.used)}
        keys.update(*(correction.amounts for correction in sent.corrections))
        while not last:
            with self._corrections.carried(prefix, keys, sent.idempotency_key) as (carried, last):
                request = sent if last else AcquireRequest("", "")
                if carried:
                    request = replace(request, corrections=(*carried, *request.corrections))
                answer = await self._acquire(mode, request)
        return _checked(answer, sent)

    @contextmanager
    def _asking(self, operation: str, request: AcquireRequest | None = None) -> Iterator[None]:
        try:
            with self._timing(operation):
                yield
        except (TypeError, AttributeError, LookupError, NameError):
            raise  # a bug, which an outage would hide
        except Exception as error:  # noqa: BLE001 - whatever a store raises, it has not answered
            with self._lock:
                first, self._down = not self._down, True
            self._recorder.record_error("store", error, log=first)
        except BaseException:
            # Cancelled: the call will not run, but the store may have received the request.
            if request is not None:
                self.correct_later(request)
            raise
        else:
            if self._down:
                with self._lock:
                    back, self._down = self._down, False
                if back:
                    self._recorder.log(logs.recovery, "store")
            if self._fills:
                self._fills = not self._recorder.store_nearly_full(self.store)

    @contextmanager
    def _timing(self, operation: str) -> Iterator[None]:
        started = time.perf_counter()
        outcome = "error"
        try:
            yield
            outcome = "ok"
        except Exception as error:
            if getattr(error, "timed_out", False) or isinstance(error, TimeoutError):
                outcome = "timeout"
            raise
        finally:
            seconds = time.perf_counter() - started
            self._recorder.observe(names.STORE_SECONDS, seconds, self.label, operation, outcome)


def _checked(result: AcquireResult, request: AcquireRequest) -> AcquireResult:
    """Return a store's result once it is validated: the store may be a user's own."""
    if {len(result.admitted), len(result.refused)} != {len(request.demands)}:
        raise QuotaStoreError("the store's answer does not say of each call what refuses it")
    return result
