"""A call's place among those that run at the same time anywhere: a lease in a store.

The store holds 1 under each count of the call. While the call runs, the lease is renewed: in one
step, the store gives the old hold back and holds anew. It ends by itself when the process has died.
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Event, Thread
from uuid import uuid4

from langchain_quota.admission import (
    AcquireRequest,
    AcquireResult,
    Compensation,
    Counter,
    Hits,
    Threshold,
)
from langchain_quota.concurrency import Form, fork_safe_lock, now
from langchain_quota.decision import AT_ONCE
from langchain_quota.limits.calls import ToolCallLimit
from langchain_quota.rule import stored_as
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

    def __init__(self, store: StoreClient, limits: Collection[ToolCallLimit]) -> None:
        self._store = store
        self._counters = {
            count: Counter(str(CountKey(count, AT_ONCE, "")), lease=SLOT_LEASE)
            for count in map(stored_as, limits)
        }
        thresholds = tuple(
            Threshold(each.name, AT_ONCE, stored_as(each), each.at_once or 0, each.enforce)
            for each in limits
        )
        self._hits = (Hits(dict.fromkeys(self._counters, 1), thresholds),)
        # The requests that may hold something: without an answer it is unknown.
        self._open: tuple[str, ...] = ()
        self._over = Event()
        self._renewing = fork_safe_lock()
        # What renews it in an event loop, if something does.
        self._keeper: asyncio.Task[None] | None = None
        self._wake: Callable[[], object] = self._over.set
        self.waits = False

    async def take(self, form: Form, until: float) -> AcquireResult | None:
        """Wait for a place; the store's newest answer, `None` if it does not answer."""
        pause = FIRST_PAUSE
        try:
            result = await self._ask(form)
            while result is not None and not result.admitted[0]:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self.waits = True
                some = min(left, pause * random.uniform(0.5, 1))  # noqa: S311 - no secret
                if form:
                    await asyncio.sleep(some)
                else:
                    time.sleep(some)  # noqa: ASYNC251 - in the sync form
                pause = min(LONGEST_PAUSE, pause * 1.5)
                result = await self._ask(form)
        except BaseException:
            await self.end(form)
            raise
        if result is None:
            # The store may have counted it.
            self._store.settle_soon(self._return())
        return result

    def keep(self, form: Form) -> None:
        """Renew the lease until it ends, in this event loop or in a thread."""
        if form:
            loop, woken = asyncio.get_running_loop(), asyncio.Event()
            self._keeper = loop.create_task(self._keep_in_loop(woken))
            self._wake = lambda: loop.call_soon_threadsafe(woken.set)
        else:
            Thread(target=self._keep, name="langchain-quota lease", daemon=True).start()

    async def end(self, form: Form) -> None:
        """Note that the call has ended, and give its place back."""
        self._over.set()
        # The thread of a tool may outlive the event loop that renews the lease.
        with suppress(RuntimeError):
            self._wake()
            if not form and "sync" not in self._store.forms:
                # That loop gives it back.
                return
        # Who is renewing it gives it back: a store must not get that first.
        if not self._renewing.acquire(blocking=not form):
            return
        self._renewing.release()
        if form and self._keeper is not None and not isinstance(sys.exception(), GeneratorExit):
            try:
                # It may be cancelled, and be done: the loop ends.
                await asyncio.shield(self._keeper)
            finally:
                if self._keeper.done():
                    await self._give_back(form)
            return
        # What a store that serves only event loops cannot take now, it gets with the next request.
        with suppress(TypeError):
            await self._give_back(form)

    async def _give_back(self, form: Form) -> None:
        back, self._open = self._return(), ()
        if form and isinstance(sys.exception(), GeneratorExit):
            # The call is dropped: nothing can be awaited.
            self._store.settle_soon(back)
        elif back.compensations:
            await self._store.settle(form, back)

    def _keep(self) -> None:
        while not self._over.wait(RENEWAL):
            with self._renewing:
                if not self._over.is_set():
                    now(self._ask(""))
        now(self._give_back(""))

    async def _keep_in_loop(self, woken: asyncio.Event) -> None:
        while not self._over.is_set():
            try:
                async with asyncio.timeout(RENEWAL):
                    await woken.wait()
            except TimeoutError:
                await self._ask("a")
        await self._give_back("a")

    async def _ask(self, form: Form) -> AcquireResult | None:
        """Hold the place, if there is one; `None` if the store does not answer."""
        name, before = uuid4().hex, self._return().compensations
        self._open = (*self._open, name)
        request = AcquireRequest(name, name, self._counters, self._hits, compensations=before)
        result: AcquireResult | None = await self._store.acquire(form, request, undo=False)
        if result is not None:
            # What was held before is given back.
            self._open = (name,) if all(result.admitted) else ()
        return result

    def _return(self) -> AcquireRequest:
        """What gives back all that may be held, also if a request arrives later."""
        nothing = {str(each.key): 0 for each in self._counters.values()}
        returned = (Compensation(each, nothing, each, each, settles=each) for each in self._open)
        return AcquireRequest("", "", compensations=tuple(returned))
