"""Lease slots in a store while tool calls run.

A lease reserves 1 under each count of the call. While the call runs, the lease is renewed: in one
step, the store releases the old reservation and makes a new one. If the process dies, the lease
expires.
"""

import asyncio
import math
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Event, Thread
from uuid import uuid4

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction, CountRef
from langchain_quota.core.plans import Plan
from langchain_quota.limits.call import CONCURRENCY
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.queues import Waiter
from langchain_quota.runtime.sync_async import Mode, run_sync
from langchain_quota.stores.keys import CountKey

SLOT_LEASE = 60
"""How long a store reserves a slot without a renewal, in seconds. A worker that has died keeps its
slots for that long."""

RENEWAL = SLOT_LEASE / 3
"""How often a lease is renewed, in seconds: one renewal may be late, and one may fail."""

MIN_PAUSE, MAX_PAUSE = 0.05, 1.0
"""How long a waiting call pauses between two requests to the store, in seconds. The pause grows by
about a half each time, at random, so that workers do not send their requests at the same moment."""


class Lease:
    """The slot of one call in a store."""

    def __init__(self, store: StoreClient, plan: Plan) -> None:
        self.store = store
        self._demand = plan.demand
        self._counters = {
            count: CountRef(str(CountKey(count, CONCURRENCY, "")), lease=SLOT_LEASE)
            for count in plan.demand.amounts
        }
        # The requests that may reserve something: without an answer that is unknown.
        self._open: tuple[str, ...] = ()
        self._has_ended = Event()
        # The task or thread that renews the lease.
        self._renewer: asyncio.Task[None] | Thread | None = None
        self._is_renewing = False
        # When the request for the current reservation was sent; infinite without a reservation.
        self._reserved_at = math.inf

    async def acquire(
        self,
        mode: Mode,
        waiter: Waiter,
        deadline: float,
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> AcquireResult | None:
        """Wait for a slot; return the store's newest answer, or `None` if it is unavailable."""
        result: AcquireResult | None = None
        pause = MIN_PAUSE

        async def reserve() -> float:
            nonlocal result, pause
            result = await self._reserve(mode)
            if result is None or result.admitted[0]:
                return 0.0
            jittered = pause * random.uniform(0.5, 1)  # noqa: S311 - no secret
            pause = min(MAX_PAUSE, pause * 1.5)
            return jittered

        try:
            await waiter.retry(reserve, deadline, waiting)
        except BaseException:
            await self.end(mode)
            raise
        if result is None:
            # The store may have counted the call.
            self.store.settle_soon(self._release_request())
        return result

    def start_renewal(self, mode: Mode) -> None:
        """Renew the lease until it ends, in this event loop or in a thread."""
        if mode:
            self._renewer = asyncio.get_running_loop().create_task(self._renew_in_loop())
        else:
            self._renewer = Thread(
                target=self._renew_in_thread, name="langchain-quota lease", daemon=True
            )
            self._renewer.start()

    async def end(self, mode: Mode) -> None:
        """Note that the call has ended, and release the slot."""
        self._has_ended.set()
        self._report_lost(time.monotonic())
        renewer, is_dropped = self._renewer, isinstance(sys.exception(), GeneratorExit)
        if isinstance(renewer, Thread):
            if not mode:
                renewer.join()
            elif self._is_renewing:
                # The release must not reach the store before the renewal, so the thread sends it.
                return
        elif renewer is not None and mode and not is_dropped:
            renewer.cancel()
        if is_dropped or (isinstance(renewer, asyncio.Task) and not mode):
            # Nothing can be awaited: the call is dropped, or its thread has outlived its task.
            self.store.settle_soon(self._release_request())
        elif mode:
            # A run that is cancelled now still releases the slot.
            await asyncio.shield(asyncio.create_task(self._release(mode)))
        else:
            await self._release(mode)

    async def _release(self, mode: Mode) -> None:
        request = self._release_request()
        if request.corrections:
            await self.store.settle(mode, request)

    def _renew_in_thread(self) -> None:
        while not self._has_ended.wait(RENEWAL):
            # This thread sets one flag and then reads the other, and so does `end`. So at least
            # one of them sees that the other is at work.
            self._is_renewing = True
            if not self._has_ended.is_set():
                run_sync(self._reserve(""))
            self._is_renewing = False
            if self._has_ended.is_set():
                run_sync(self._release(""))

    async def _renew_in_loop(self) -> None:
        await asyncio.sleep(RENEWAL)
        while not self._has_ended.is_set():
            await self._reserve("a")
            await asyncio.sleep(RENEWAL)

    async def _reserve(self, mode: Mode) -> AcquireResult | None:
        """Reserve the slot if it is free, in place of older reservations.

        Return `None` if the store is unavailable.
        """
        now = time.monotonic()
        name, released = uuid4().hex, self._release_request().corrections
        self._open = (*self._open, name)
        request = AcquireRequest(name, name, self._counters, (self._demand,), corrections=released)
        result = await self.store.acquire(mode, request, undo=False)
        if result is not None:
            # The answer says that the older reservations are released.
            is_reserved = all(result.admitted)
            self._open = (name,) if is_reserved else ()
            self._report_lost(now, was_refused=not is_reserved)
            self._reserved_at = now if is_reserved else math.inf
        return result

    def _report_lost(self, now: float, *, was_refused: bool = False) -> None:
        """Report a lease that expired before now, because another call may have got the slot."""
        if now - self._reserved_at >= (0 if was_refused else SLOT_LEASE):
            self.store.lose(next(iter(self._counters)))

    def _release_request(self) -> AcquireRequest:
        """Return the corrections that release all reservations, even those that arrive later."""
        nothing = {str(counter.key): 0 for counter in self._counters.values()}
        released = (
            Correction(request, nothing, request, request, settles=request)
            for request in self._open
        )
        return AcquireRequest("", "", corrections=tuple(released))
