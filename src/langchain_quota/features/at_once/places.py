"""The places of tool calls that run at the same time: in this process, and in a store.

Threads and event loops share a semaphore for each count. Its lock is held for a few operations,
however many calls wait, and never during a wait. Who comes first is served first.

A store holds a lease: 1 under each count of the call. While the call runs, the lease is renewed: in
one step, the store gives the old hold back and holds anew. It ends by itself when the process has
died.
"""

import asyncio
import os
import random
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from threading import TIMEOUT_MAX, Event, Thread
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

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
from langchain_quota.limits.concurrency import ConcurrencyLimit
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


class Slot:
    """One call in one count: what it `found` running, whether it `waits`, and has `taken` it."""

    def __init__(
        self, semaphore: "Semaphore", most: int | None, wake: Callable[[], object]
    ) -> None:
        self.most = most
        self.wake = wake
        self.found = 0
        self.taken = self.waits = False
        self._semaphore = semaphore

    def give_back(self) -> None:
        """Note that the call no longer runs or waits. A second time does nothing."""
        self._semaphore.ended.append(self)
        self._semaphore.change()


class Semaphore:
    """The calls of one count that run, those that wait, and those that have `ended`."""

    def __init__(self) -> None:
        self.ended: deque[Slot] = deque()
        self._running = 0
        self._lock = fork_safe_lock()
        self._line: OrderedDict[Slot, None] = OrderedDict()

    async def take(self, form: Form, most: int | None, seconds: float) -> Slot:
        """Wait until fewer than `most` run (`None`: only count); not `taken` if the time is up."""
        woken: Any = asyncio.Event() if form else Event()
        wake: Callable[[], object] = woken.set
        if form:
            wake = partial(asyncio.get_running_loop().call_soon_threadsafe, wake)
        slot = Slot(self, most, wake)
        try:
            self.change(slot, sure=True)
            if slot.waits and seconds > 0:
                if form:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            await woken.wait()
                else:
                    woken.wait(min(seconds, TIMEOUT_MAX))
        except BaseException:
            # Cancelled, perhaps just when it got its slot.
            slot.give_back()
            raise
        if not slot.taken:
            self.ended.append(slot)
            self.change(sure=True)
        return slot

    def change(self, asks: Slot | None = None, *, sure: bool = False) -> None:
        """Count a call that asks and those that have ended, and wake those that may run."""
        # An abandoned call ends when garbage is collected: perhaps here, while this thread holds
        # the lock. So an end does not wait for the lock: who holds it counts the end, too.
        while sure or self.ended:
            if not self._lock.acquire(blocking=sure):
                return
            try:
                granted = self._counted(asks)
            finally:
                self._lock.release()
            for slot in granted:
                try:
                    slot.wake()
                except RuntimeError:
                    # Its event loop is closed: the call no longer waits.
                    self.ended.append(slot)
            asks, sure = None, False

    def _counted(self, asks: Slot | None) -> list[Slot]:
        """Count, with the lock held; the calls that have waited and may run now."""
        while self.ended:
            slot = self.ended.popleft()
            self._line.pop(slot, None)
            self._running -= slot.taken
            slot.taken = False
        granted: list[Slot] = []
        if asks is not None:
            asks.found = self._running
            self._line[asks] = None
            if asks.most is None:
                self._line.move_to_end(asks, last=False)
        while self._line:
            slot = next(iter(self._line))
            if slot.most is not None and self._running >= slot.most:
                break
            del self._line[slot]
            slot.taken = True
            self._running += 1
            granted += [slot] if slot.waits else []
        if asks is not None:
            asks.waits = not asks.taken
        return granted


_lock = fork_safe_lock()
_semaphores: WeakValueDictionary[tuple[int, int, str], Semaphore] = WeakValueDictionary()
"""Those that calls are in. A forked child has its own: it runs no calls of its parent."""


def semaphore_of(store: object, count: str) -> Semaphore:
    """The semaphore of a count, for a store; `None` for the calls that no store counts."""
    key = os.getpid(), id(store), count
    with _lock:
        found = _semaphores.get(key)
        if found is None:
            found = _semaphores[key] = Semaphore()
        return found


class Lease:
    """The place of one call in a store."""

    def __init__(self, store: StoreClient, limits: Collection[ConcurrencyLimit]) -> None:
        self._store = store
        self._counters = {
            count: Counter(str(CountKey(count, AT_ONCE, "")), lease=SLOT_LEASE)
            for count in map(stored_as, limits)
        }
        thresholds = tuple(
            Threshold(each.name, AT_ONCE, stored_as(each), each.at_once, each.enforce)
            for each in limits
        )
        self._hits = (Hits(dict.fromkeys(self._counters, 1), thresholds),)
        # The requests that may hold something: without an answer it is unknown.
        self._open: tuple[str, ...] = ()
        self._over = Event()
        # What renews it.
        self._keeper: asyncio.Task[None] | Thread | None = None
        self._renews = False
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
            self._keeper = asyncio.get_running_loop().create_task(self._keep_in_loop())
        else:
            self._keeper = Thread(target=self._keep, name="langchain-quota lease", daemon=True)
            self._keeper.start()

    async def end(self, form: Form) -> None:
        """Note that the call has ended, and give its place back."""
        self._over.set()
        keeper, is_dropped = self._keeper, isinstance(sys.exception(), GeneratorExit)
        if isinstance(keeper, Thread):
            if not form:
                keeper.join()
            elif self._renews:
                # A store must not get the end before the renewal: the thread gives the place back.
                return
        elif keeper is not None and form and not is_dropped:
            keeper.cancel()
        if is_dropped or (isinstance(keeper, asyncio.Task) and not form):
            # Nothing can be awaited: the call is dropped, or its thread has outlived its task.
            self._store.settle_soon(self._return())
        elif form:
            # A run that is cancelled now gives it back all the same.
            await asyncio.shield(asyncio.create_task(self._give_back(form)))
        else:
            await self._give_back(form)

    async def _give_back(self, form: Form) -> None:
        back = self._return()
        if back.compensations:
            await self._store.settle(form, back)

    def _keep(self) -> None:
        while not self._over.wait(RENEWAL):
            # Who ends the call looks at the one after it has set the other.
            self._renews = True
            if not self._over.is_set():
                now(self._ask(""))
            self._renews = False
            if self._over.is_set():
                now(self._give_back(""))

    async def _keep_in_loop(self) -> None:
        await asyncio.sleep(RENEWAL)
        while not self._over.is_set():
            await self._ask("a")
            await asyncio.sleep(RENEWAL)

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
