"""Calls that wait in line in this process, whatever they wait for.

Threads and event loops share a semaphore for each count of calls that run, and queues for what is
kept in a store. Locks are held for a few operations, however many calls wait, and never during a
wait. Who comes first is served first.
"""

import asyncio
import math
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import TIMEOUT_MAX, Event, Lock
from typing import Any
from weakref import WeakValueDictionary

from langchain_quota.runtime.sync_async import Mode, fork_safe_lock

LOOKS_AGAIN = 1.0
"""After how many seconds the first call of a queue looks for room again, which may come early."""


@dataclass(eq=False, slots=True)
class Slot:
    """One call in one count: what it `found` running, whether it `waits`, and has `taken` it."""

    semaphore: "Semaphore"
    most: int | None
    wake: Callable[[], object]
    found: int = 0
    taken: bool = False
    waits: bool = False

    def release(self) -> None:
        """Note that the call no longer runs or waits. A second time does nothing."""
        self.semaphore.ended.append(self)
        self.semaphore.change()


class Semaphore:
    """The calls of one count that run, those that wait, and those that have `ended`."""

    def __init__(self) -> None:
        self.ended: deque[Slot] = deque()
        self._running = 0
        self._lock = fork_safe_lock(Lock)
        self._line: OrderedDict[Slot, None] = OrderedDict()

    async def take(self, mode: Mode, most: int | None, seconds: float) -> Slot:
        """Wait until fewer than `most` run (`None`: only count); not `taken` if the time is up."""
        waiter = Waiter(mode)
        slot = Slot(self, most, waiter.wake)
        try:
            self.change(slot, sure=True)
            if slot.waits and seconds > 0:
                await waiter.sleep(seconds)
        except BaseException:
            # Cancelled, perhaps just when it got its slot.
            slot.release()
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


_arrivals = count()


class Waiter:
    """A call that came, and that any thread can wake; the queue in which it stands, if it waits."""

    def __init__(self, mode: Mode) -> None:
        self._form = mode
        self._woken: Any = asyncio.Event() if mode else Event()
        self.wake: Callable[[], object] = self._woken.set
        if mode:
            self.wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self.wake)
        self.number, self.queue = next(_arrivals), ""

    async def sleep(self, seconds: float) -> None:
        """Wait until it is woken, for so many seconds at most."""
        if self._form:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._woken.wait()
        else:
            self._woken.wait(min(seconds, TIMEOUT_MAX))
        self._woken.clear()


class Queues:
    """The calls that wait in this process for counts of one store, each in one queue at a time."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._queues: dict[str, dict[int, Waiter]] = {}

    def is_next(self, waiter: Waiter, names: Iterable[str]) -> bool:
        """Return whether no earlier call stands in these queues; otherwise, join the first one."""
        with self._lock:
            firsts = ((each, min(self._queues.get(each, ()), default=math.inf)) for each in names)
            busy = next((name for name, first in firsts if first < waiter.number), None)
            left = self._moved(waiter, busy) if busy else None
        self._wake(left)
        return busy is None

    def move(self, waiter: Waiter, name: str = "") -> None:
        """Move a call to another queue, or to none."""
        with self._lock:
            left = self._moved(waiter, name)
        self._wake(left)

    def _moved(self, waiter: Waiter, name: str) -> Waiter | None:
        """Move a call, with the lock held, and return who is first now in the queue it leaves."""
        left, waiter.queue = waiter.queue, name
        queue = self._queues.get(left, {})
        queue.pop(waiter.number, None)
        if not queue:
            self._queues.pop(left, None)
        if name:
            self._queues.setdefault(name, {})[waiter.number] = waiter
        return queue.get(min(queue, default=-1))

    def _wake(self, first: Waiter | None) -> None:
        if first is not None:
            try:
                first.wake()
            except RuntimeError:
                # Its event loop is closed, so the call no longer waits.
                self.move(first)


_making = fork_safe_lock()
_semaphores: WeakValueDictionary[tuple[int, int, str], Semaphore] = WeakValueDictionary()
"""Those that calls are in. A forked child has its own: it runs no calls of its parent."""

_queues: WeakValueDictionary[tuple[int, int], Queues] = WeakValueDictionary()


def queues_of(store: object) -> Queues:
    """Return the queues of this process for a store."""
    key = os.getpid(), id(store)
    with _making:
        return _queues.setdefault(key, Queues())


def semaphore_of(store: object, count: str) -> Semaphore:
    """The semaphore of a count, for a store; `None` for the calls that no store counts."""
    key = os.getpid(), id(store), count
    with _making:
        found = _semaphores.get(key)
        if found is None:
            found = _semaphores[key] = Semaphore()
        return found
