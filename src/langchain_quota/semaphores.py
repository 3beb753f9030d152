"""Calls that wait in line in this process, whatever they wait for.

Threads and event loops share a semaphore for each count. Its lock is held for a few operations,
however many calls wait, and never during a wait. Who comes first is served first.
"""

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import TIMEOUT_MAX, Event, Lock
from typing import Any
from weakref import WeakValueDictionary

from langchain_quota.concurrency import Form, fork_safe_lock


@dataclass(eq=False, slots=True)
class Slot:
    """One call in one count: what it `found` running, whether it `waits`, and has `taken` it."""

    semaphore: "Semaphore"
    most: int | None
    wake: Callable[[], object]
    found: int = 0
    taken: bool = False
    waits: bool = False

    def give_back(self) -> None:
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


_making = fork_safe_lock()
_semaphores: WeakValueDictionary[tuple[int, int, str], Semaphore] = WeakValueDictionary()
"""Those that calls are in. A forked child has its own: it runs no calls of its parent."""


def semaphore_of(store: object, count: str) -> Semaphore:
    """The semaphore of a count, for a store; `None` for the calls that no store counts."""
    key = os.getpid(), id(store), count
    with _making:
        found = _semaphores.get(key)
        if found is None:
            found = _semaphores[key] = Semaphore()
        return found
