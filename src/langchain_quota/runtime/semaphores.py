"""Queues of calls in this process, whatever they wait for.

Threads and event loops share a semaphore for each count of calls that run, and queues for counts
of a store. Locks are held for a few operations, however many calls wait, and never during a wait.
Calls get slots, and leave queues, in the order of arrival.
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
from weakref import WeakValueDictionary

from langchain_quota.runtime.sync_async import Mode, fork_safe_lock

LOOKS_AGAIN = 1.0
"""After how many seconds the first call of a queue looks for room that others have made."""


@dataclass(eq=False, slots=True)
class Slot:
    """One call in one queue: how many calls were `running` before it, and whether it has waited."""

    semaphore: "Semaphore"
    maximum: int | None
    wake: Callable[[], object]
    running: int = 0
    acquired: bool = False
    waits: bool = False

    def release(self) -> None:
        """Release the slot. Releasing it twice is harmless."""
        self.semaphore.ended.append(self)
        self.semaphore.change()


class Semaphore:
    """The calls of one count: the number that run, the queue, and the slots that have `ended`."""

    def __init__(self) -> None:
        self.ended: deque[Slot] = deque()
        self._running = 0
        self._lock = fork_safe_lock(Lock)
        self._queue: OrderedDict[Slot, None] = OrderedDict()

    async def acquire(
        self,
        mode: Mode,
        maximum: int | None,
        seconds: float,
        on_wait: Callable[[], object] = bool,
    ) -> Slot:
        """Wait until fewer than `maximum` calls run, and return a slot.

        `on_wait` is called before a wait.
        The slot is not `acquired` if the time is over first. With `None` a call is only counted.
        """
        waiter = Waiter(mode)
        slot = Slot(self, maximum, waiter.wake)
        try:
            self.change(slot, sure=True)
            if slot.waits and seconds > 0:
                on_wait()
                await waiter.sleep(seconds)
        except BaseException:
            # The call was cancelled, possibly after it got its slot.
            slot.release()
            raise
        if not slot.acquired:
            self.ended.append(slot)
            self.change(sure=True)
        return slot

    def change(self, arriving: Slot | None = None, *, sure: bool = False) -> None:
        """Count a call that arrives and the ended ones, and wake the calls that may run."""
        # An abandoned call ends when garbage is collected: perhaps here, while this thread holds
        # the lock. So the end of a call does not wait for the lock: its holder counts the end, too.
        while sure or self.ended:
            if not self._lock.acquire(blocking=sure):
                return
            try:
                granted = self._update(arriving)
            finally:
                self._lock.release()
            for slot in granted:
                try:
                    slot.wake()
                except RuntimeError:
                    # The event loop is closed, so the call no longer waits.
                    self.ended.append(slot)
            arriving, sure = None, False

    def _update(self, arriving: Slot | None) -> list[Slot]:
        """Update the counts with the lock held; return the slots that have waited and may run."""
        while self.ended:
            slot = self.ended.popleft()
            self._queue.pop(slot, None)
            self._running -= slot.acquired
            slot.acquired = False
        granted: list[Slot] = []
        if arriving is not None:
            arriving.running = self._running
            self._queue[arriving] = None
            if arriving.maximum is None:
                self._queue.move_to_end(arriving, last=False)
        while self._queue:
            slot = next(iter(self._queue))
            if slot.maximum is not None and self._running >= slot.maximum:
                break
            del self._queue[slot]
            slot.acquired = True
            self._running += 1
            granted += [slot] if slot.waits else []
        if arriving is not None:
            arriving.waits = not arriving.acquired
        return granted


_arrivals = count()


class Waiter:
    """A call that came, and that any thread can wake; the queue in which it stands, if it waits."""

    def __init__(self, mode: Mode) -> None:
        self._woken = asyncio.Event() if mode else Event()
        self.wake: Callable[[], object] = self._woken.set
        if mode:
            self.wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self.wake)
        self.number, self.queue = next(_arrivals), ""

    async def sleep(self, seconds: float) -> None:
        """Wait until it is woken, for so many seconds at most."""
        if isinstance(self._woken, asyncio.Event):
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
            waiter_behind = self._moved(waiter, busy) if busy else None
        self._wake(waiter_behind)
        return busy is None

    def move(self, waiter: Waiter, name: str = "") -> None:
        """Move a call to another queue, or to none."""
        with self._lock:
            waiter_behind = self._moved(waiter, name)
        self._wake(waiter_behind)

    def look_again(self, keys: Iterable[str]) -> None:
        """Wake the first call that waits for each of these counts, in any window."""
        with self._lock:
            names = {name for key in keys for name in (key, key.rpartition(":")[0])}
            firsts = [min(self._queues[name].items())[1] for name in names & self._queues.keys()]
        for first in firsts:
            self._wake(first)

    def _moved(self, waiter: Waiter, name: str) -> Waiter | None:
        """Move a call, with the lock held, and return who is first now instead of it."""
        old_name, waiter.queue = waiter.queue, name
        queue = self._queues.get(old_name, {})
        queue.pop(waiter.number, None)
        if not queue:
            self._queues.pop(old_name, None)
        if name:
            self._queues.setdefault(name, {})[waiter.number] = waiter
        first = min(queue, default=-1)
        return queue[first] if first > waiter.number else None

    def _wake(self, first: Waiter | None) -> None:
        if first is not None:
            try:
                first.wake()
            except RuntimeError:
                # Its event loop is closed, so the call no longer waits.
                self.move(first)


_creation_lock = fork_safe_lock()
_semaphores: WeakValueDictionary[tuple[int, int, str], Semaphore] = WeakValueDictionary()
"""The semaphores in use. A forked child has its own, because it runs no calls of its parent."""

_queues: WeakValueDictionary[tuple[int, int], Queues] = WeakValueDictionary()


def queues_of(store: object) -> Queues:
    """Return the queues of this process for a store."""
    key = os.getpid(), id(store)
    with _creation_lock:
        return _queues.setdefault(key, Queues())


def semaphore_of(store: object, count: str) -> Semaphore:
    """Return the semaphore of a count in a store, or with `None` of calls that no store counts."""
    key = os.getpid(), id(store), count
    with _creation_lock:
        semaphore = _semaphores.get(key)
        if semaphore is None:
            semaphore = _semaphores[key] = Semaphore()
        return semaphore
