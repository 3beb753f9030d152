"""Leases in a store for the slots of running tool calls.

A store holds a lease: 1 under each count of the call. While the call runs, the lease is renewed: in
one step, the store gives the old hold back and holds anew. It ends by itself when the process has
died.
"""

import asyncio
import math
import random
import sys
import time
from collections.abc import Collection
from threading import Event, Thread
from uuid import uuid4

from langchain_quota.core.admission import (
    AcquireRequest,
    AcquireResult,
    Correction,
    CountRef,
    Demand,
    Threshold,
)
from langchain_quota.core.checks import store_counter
from langchain_quota.limits.call import CONCURRENCY
from langchain_quota.limits.concurrency import ConcurrencyLimit
from langchain_quota.runtime.sync_async import Mode, run_sync, wait_for
from langchain_quota.stores.client import StoreClient
from langchain_quota.stores.keys import CountKey

SLOT_LEASE = 60
"""How long a store holds a place without a renewal, in seconds: as long as it stays taken after a
worker has died."""

RENEWAL = SLOT_LEASE / 3
"""How often it is renewed, in seconds: one renewal may be late, and one may fail."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""How long a waiting call pauses between two questions to the store, in seconds. The pause grows by
about a half each time, at random, so that workers do not ask at the same moment."""


class Lease:
    """The place of one call in a store."""

    def __init__(self, store: StoreClient, limits: Collection[ConcurrencyLimit]) -> None:
        self.store = store
        self._counters = {
            count: CountRef(str(CountKey(count, CONCURRENCY, "")), lease=SLOT_LEASE)
            for count in map(store_counter, limits)
        }
        thresholds = tuple(
            Threshold(
                limit.name, CONCURRENCY, store_counter(limit), limit.max_concurrency, limit.enforce
            )
            for limit in limits
        )
        self._demands = (Demand(dict.fromkeys(self._counters, 1), thresholds),)
        # The requests that may hold something: without an answer it is unknown.
        self._open: tuple[str, ...] = ()
        self._over = Event()
        # What renews it.
        self._keeper: asyncio.Task[None] | Thread | None = None
        self._renews = False
        self.waits = False
        # When the store was asked for what it holds; infinite if it holds nothing.
        self._held_at = math.inf

    async def take(self, mode: Mode, until: float) -> AcquireResult | None:
        """Wait for a place; the store's newest answer, `None` if it does not answer."""
        pause = FIRST_PAUSE
        try:
            result = await self._ask(mode)
            while result is not None and not result.admitted[0]:
                remaining = until - time.monotonic()
                if remaining <= 0:
                    break
                self.waits = True
                some = min(remaining, pause * random.uniform(0.5, 1))  # noqa: S311 - no secret
                await wait_for(mode, some)
                pause = min(LONGEST_PAUSE, pause * 1.5)
                result = await self._ask(mode)
        except BaseException:
            await self.end(mode)
            raise
        if result is None:
            # The store may have counted it.
            self.store.settle_soon(self._return())
        return result

    def keep(self, mode: Mode) -> None:
        """Renew the lease until it ends, in this event loop or in a thread."""
        if mode:
            self._keeper = asyncio.get_running_loop().create_task(self._keep_in_loop())
        else:
            self._keeper = Thread(target=self._keep, name="langchain-quota lease", daemon=True)
            self._keeper.start()

    async def end(self, mode: Mode) -> None:
        """Note that the call has ended, and give its place back."""
        self._over.set()
        self._look_back(time.monotonic())
        keeper, is_dropped = self._keeper, isinstance(sys.exception(), GeneratorExit)
        if isinstance(keeper, Thread):
            if not mode:
                keeper.join()
            elif self._renews:
                # A store must not get the end before the renewal: the thread gives the place back.
                return
        elif keeper is not None and mode and not is_dropped:
            keeper.cancel()
        if is_dropped or (isinstance(keeper, asyncio.Task) and not mode):
            # Nothing can be awaited: the call is dropped, or its thread has outlived its task.
            self.store.settle_soon(self._return())
        elif mode:
            # A run that is cancelled now gives it back all the same.
            await asyncio.shield(asyncio.create_task(self._give_back(mode)))
        else:
            await self._give_back(mode)

    async def _give_back(self, mode: Mode) -> None:
        back = self._return()
        if back.corrections:
            await self.store.settle(mode, back)

    def _keep(self) -> None:
        while not self._over.wait(RENEWAL):
            # Who ends the call looks at the one after it has set the other.
            self._renews = True
            if not self._over.is_set():
                run_sync(self._ask(""))
            self._renews = False
            if self._over.is_set():
                run_sync(self._give_back(""))

    async def _keep_in_loop(self) -> None:
        await asyncio.sleep(RENEWAL)
        while not self._over.is_set():
            await self._ask("a")
            await asyncio.sleep(RENEWAL)

    async def _ask(self, mode: Mode) -> AcquireResult | None:
        """Hold the place, if there is one; `None` if the store does not answer."""
        now = time.monotonic()
        name, before = uuid4().hex, self._return().corrections
        self._open = (*self._open, name)
        request = AcquireRequest(name, name, self._counters, self._demands, corrections=before)
        result: AcquireResult | None = await self.store.acquire(mode, request, undo=False)
        if result is not None:
            # What was held before is given back.
            is_held = all(result.admitted)
            self._open = (name,) if is_held else ()
            self._look_back(now, is_lost=not is_held)
            self._held_at = now if is_held else math.inf
        return result

    def _look_back(self, now: float, *, is_lost: bool = False) -> None:
        """Say so if the store has not held the place all the time: others may have taken it."""
        if now - self._held_at >= (0 if is_lost else SLOT_LEASE):
            self.store.lose(next(iter(self._counters)))

    def _return(self) -> AcquireRequest:
        """Return the correction that releases all leases, even if a request arrives later."""
        nothing = {str(counter.key): 0 for counter in self._counters.values()}
        returned = (
            Correction(request, nothing, request, request, settles=request)
            for request in self._open
        )
        return AcquireRequest("", "", corrections=tuple(returned))
