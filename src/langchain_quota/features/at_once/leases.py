"""A call's place among those that run at the same time anywhere, held in a store by a lease.

The store holds 1 under each count of the call. The lease is renewed while the call runs, and ends
by itself when the process has died. A renewal is one step of the store: it gives the old hold back,
and holds anew.
"""

import asyncio
import random
import sys
import time
from collections.abc import Collection, Iterator
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

RENEWALS = 3
"""How many renewals fit into a lease: one may be late, and one may fail."""

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
        self._id = uuid4().hex
        self._number = 0
        # The requests that may hold something: without an answer it is unknown.
        self._open: list[str] = []
        self._over = False
        self._ended = Event()
        self._renewing = fork_safe_lock()
        self._kept = False
        # What renews it in an event loop, if something does.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken: asyncio.Event
        self._keeper: asyncio.Task[None]

    async def ask(self, form: Form, *settled: Compensation) -> AcquireResult | None:
        """Hold the place, if there is one; `None` if the store does not answer."""
        name = f"{self._id}/{self._number}"
        if name not in self._open:
            self._open.append(name)
        request = AcquireRequest(
            name, uuid4().hex, self._counters, self._hits, compensations=settled
        )
        result: AcquireResult | None = await self._store.ask(form, request)
        if result is not None:
            # What was held before is given back.
            self._open = [name] if all(result.admitted) else []
        return result

    async def give_back(self, form: Form) -> None:
        """Give the place back; what cannot be sent now is sent with the next request."""
        if self._open:
            await self._store.settle(form, self._return())
            self._open.clear()

    def give_back_later(self) -> None:
        """Give the place back with the next request, where nobody can wait."""
        if self._open:
            self._store.settle_soon(self._return())

    def keep(self) -> None:
        """Renew the lease in a thread until the call ends, while no event loop does."""
        if not self._kept:
            self._kept = True
            Thread(target=self._keep, name="langchain-quota lease", daemon=True).start()

    def akeep(self) -> None:
        """Renew the lease in this event loop until the call ends."""
        self._loop, self._woken = asyncio.get_running_loop(), asyncio.Event()
        self._keeper = self._loop.create_task(self._akeep())

    def end(self) -> None:
        """Note that the call has ended, and give its place back."""
        if not self._told():
            self._ended.set()
            # A renewal that is being sent would hold again what is given back.
            with self._renewing, suppress(TypeError):
                # A store that serves only event loops gets it with the next request.
                now(self.give_back(""))

    async def aend(self) -> None:
        """Note that the call has ended in its event loop, and give its place back."""
        told = self._told()
        if isinstance(sys.exception(), GeneratorExit):
            # The call is dropped: nothing can be awaited.
            if not told:
                self.give_back_later()
            return
        self._ended.set()
        try:
            # It may be cancelled, and be done: the loop ends.
            await asyncio.shield(self._keeper)
        finally:
            if self._keeper.done():
                await self.give_back("a")

    def _told(self) -> bool:
        """Note that the call is over; whether its event loop gives the place back."""
        self._over = True
        if self._loop is not None and self._renews():
            # The loop may be closed meanwhile.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._woken.set)
                return True
        return False

    def _renews(self) -> bool:
        """Whether an event loop renews it."""
        return self._loop is not None and self._loop.is_running() and not self._keeper.done()

    def _keep(self) -> None:
        # A store that serves only event loops cannot be asked here: the lease ends by itself.
        with suppress(TypeError):
            while not (self._ended.wait(SLOT_LEASE / RENEWALS) or self._over):
                with self._renewing:
                    if not (self._over or self._renews()):
                        now(self._renew(""))

    async def _akeep(self) -> None:
        while not self._over:
            try:
                async with asyncio.timeout(SLOT_LEASE / RENEWALS):
                    await self._woken.wait()
            except TimeoutError:
                await self._renew("a")
        await self.give_back("a")

    async def _renew(self, form: Form) -> None:
        settled = self._return().compensations
        self._number += 1
        await self.ask(form, *settled)

    def _return(self) -> AcquireRequest:
        """What gives back all that may be held."""
        counters = {each.key: Counter(each.key) for each in self._counters.values() if each.key}
        settled = [
            Compensation(f"{each}/returned", dict.fromkeys(counters, 0), settles=each)
            for each in self._open
        ]
        return AcquireRequest("", "", counters, compensations=tuple(settled))


def pauses(until: float) -> Iterator[float]:
    """How long to pause before each further question, in seconds, up to a `time.monotonic`."""
    pause = FIRST_PAUSE
    while (left := until - time.monotonic()) > 0:
        yield min(left, pause * random.uniform(0.5, 1))  # noqa: S311 - no secret
        pause = min(LONGEST_PAUSE, pause * 1.5)
