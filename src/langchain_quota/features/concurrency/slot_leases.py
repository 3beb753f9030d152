"""Lease slots in a store while tool calls run.

A lease reserves 1 under each count of its call. The leases of a process are renewed together: one
request reserves for all calls that run, and in the same step the store releases what was reserved
for them before. If the process dies, the reservations expire.
"""

import asyncio
import math
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from uuid import uuid4
from weakref import WeakValueDictionary

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction, CountRef
from langchain_quota.core.plans import Plan
from langchain_quota.limits.call import CONCURRENCY
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.queues import WaitContext, Waiter
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.runtime.sync_async import Mode, fork_safe_lock, run_sync
from langchain_quota.stores.keys import CountKey

SLOT_LEASE = 60
"""How long a store reserves a slot without a renewal, in seconds. A worker that has died keeps its
slots for that long."""

RENEWAL = SLOT_LEASE / 3
"""How often leases are renewed, in seconds: one renewal may be late, and one may fail."""

MIN_PAUSE, MAX_PAUSE = 0.05, 1.0
"""How long a waiting call pauses between two requests to the store, in seconds. The pause grows by
about a half each time, at random, so that workers do not send their requests at the same moment."""

_lock = fork_safe_lock()


class LostLeaseError(QuotaStoreError):
    """A store has not kept a call's slot all the time."""


class Reservations:
    """What a store may have reserved for some leases, of one call or of all that run."""

    def __init__(self, store: StoreClient, *leases: "Lease") -> None:
        self.store = store
        self.leases = dict.fromkeys(leases)
        # The requests that may have reserved something, with their keys, the newest last: without
        # an answer that is unknown.
        self.requests: dict[str, list[str]] = {}
        # The task or thread that renews the leases.
        self._renewer: asyncio.Task[None] | Thread | None = None

    async def reserve(self, mode: Mode) -> AcquireResult | None:
        """Reserve for the leases, each if its slot is free, in place of all reservations.

        Return `None` if the store is unavailable.
        """
        now, name = time.monotonic(), uuid4().hex
        counters: dict[str, CountRef] = {}
        with _lock:
            leases = [*self.leases]
            for lease in leases:
                counters |= lease.counters
                if lease.reservations is not self:
                    self.requests |= lease.reservations.requests
                    lease.reservations = self
            released = self._corrections()
            self.requests[name] = [str(counter.key) for counter in counters.values()]
        demands = tuple(lease.demand for lease in leases)
        request = AcquireRequest(name, name, counters, demands, corrections=released)
        result = await self.store.acquire(mode, request, undo=False)
        if result is None:
            return None
        with _lock:
            # The answer says that what older requests have reserved is released. A newer request
            # that was sent meanwhile releases what this one has reserved.
            is_newest = name == next(reversed(self.requests), "")
            while name in self.requests and (oldest := next(iter(self.requests))) != name:
                del self.requests[oldest]
            if is_newest and not any(result.admitted):
                self.requests.clear()
        for lease, is_reserved in zip(leases if is_newest else (), result.admitted, strict=False):
            lease.note(now, is_reserved=is_reserved)
        return result

    async def release(self, mode: Mode, *, waits: bool = True) -> None:
        """Release all reservations, even those that arrive later."""
        with _lock:
            request = AcquireRequest("", "", corrections=self._corrections())
            self.requests.clear()
        if request.corrections and waits:
            await self.store.settle(mode, request)
        elif request.corrections:
            self.store.settle_soon(request)

    def renew(self, lease: "Lease") -> None:
        """Renew a lease from now on, until it ends, with all others."""
        with _lock:
            self.leases[lease] = None
            renewer = self._renewer
            if isinstance(renewer, Thread):
                return
            if "sync" in self.store.forms:
                # A thread is on time even if the event loop stands still, or has ended.
                name, run = "langchain-quota leases", partial(run_sync, self._renew(""))
                thread = Thread(target=run, name=name, daemon=True)
                thread.start()
                self._renewer = thread
                return
            # A loop that was closed may have had the same id.
            loop = asyncio.get_running_loop()
            if renewer is None or renewer.get_loop() is not loop:
                self._renewer = loop.create_task(self._renew("a"))

    async def _renew(self, mode: Mode) -> None:
        try:
            while True:
                await Waiter(mode).sleep(RENEWAL)
                with _lock:
                    if not self.leases:
                        self._renewer = None
                        return
                await self.reserve(mode)
        except BaseException:
            self._renewer = None
            raise

    def _corrections(self) -> tuple[Correction, ...]:
        return tuple(
            Correction(name, dict.fromkeys(keys, 0), name, name, settles=name)
            for name, keys in self.requests.items()
        )


_running: WeakValueDictionary[tuple[int, int, int], Reservations] = WeakValueDictionary()
"""Those of the calls that run, by process and store, and by event loop if it has no sync form."""


class Lease:
    """The slot of one call in a store."""

    def __init__(self, store: StoreClient, plan: Plan) -> None:
        self.demand = plan.demand
        self.counters = {
            count: CountRef(str(CountKey(count, CONCURRENCY, "")), lease=SLOT_LEASE)
            for count in plan.demand.amounts
        }
        self.reservations = Reservations(store, self)
        """What is reserved for it alone or, once it was renewed, for all leases."""
        self._all = self.reservations
        self._store = store
        # When the request for the current reservation was sent; infinite without one.
        self._reserved_at = math.inf

    async def acquire(
        self,
        mode: Mode,
        waiter: Waiter,
        deadline: float,
        waiting: WaitContext,
        learn: Callable[[AcquireResult], None],
    ) -> bool:
        """Wait for a slot; return whether the store is available. `learn` gets all its answers."""
        result: AcquireResult | None = None
        pause = MIN_PAUSE

        async def reserve() -> float:
            nonlocal result, pause
            result = await self.reservations.reserve(mode)
            if result is not None:
                learn(result)
            if result is None or result.admitted[0]:
                return 0.0
            jittered = pause * random.uniform(0.5, 1)  # noqa: S311 - no secret
            pause = min(MAX_PAUSE, pause * 1.5)
            return jittered

        has_slot = await waiter.retry(reserve, deadline, waiting)
        if result is None:
            # The store may have counted the call.
            await self.reservations.release(mode, waits=False)
        elif has_slot:
            loop = 0 if "sync" in self._store.forms else id(asyncio.get_running_loop())
            key = os.getpid(), id(self._store.store), loop
            with _lock:
                self._all = _running.get(key) or Reservations(self._store)
                _running[key] = self._all
            self._all.renew(self)
        return result is not None

    async def end(self, mode: Mode) -> None:
        """Note that the call has ended, and release the slot."""
        self.note(time.monotonic(), is_reserved=True)
        with _lock:
            reservations = self.reservations
            for leases in (reservations.leases, self._all.leases):
                leases.pop(self, None)
            others = bool(reservations.leases)
        is_dropped = isinstance(sys.exception(), GeneratorExit)
        if is_dropped or (not mode and "sync" not in self._store.forms):
            # Nothing can be awaited: the call is dropped, or its thread has outlived its task. What
            # is reserved with others is released with their next renewal.
            if not others:
                await reservations.release(mode, waits=False)
            return
        release = reservations.reserve(mode) if others else reservations.release(mode)
        # A run that is cancelled now still releases the slot.
        await (asyncio.shield(asyncio.create_task(release)) if mode else release)

    def note(self, now: float, *, is_reserved: bool) -> None:
        """Note when the slot was last known to be reserved; report it if it was lost before."""
        # After its lease another call may have got the slot.
        if now - self._reserved_at >= (SLOT_LEASE if is_reserved else 0):
            what = f"a running call of {next(iter(self.counters))!r} lost its slot"
            why = "its worker stood still, or the store did not answer: others may run in its slot"
            self._store.recorder.record_error("store", LostLeaseError(f"{what}, for {why}"))
        self._reserved_at = now if is_reserved else math.inf
