"""The tool calls of this process that run at the same time: a semaphore for each count.

Threads and event loops share a semaphore. Its lock is held for a few operations, however many calls
wait, and never during a wait. Who comes first is served first.
"""

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import TIMEOUT_MAX, Event
from weakref import WeakValueDictionary

from langchain_quota.concurrency import fork_safe_lock


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
    """The calls of one count that are `running`, those that wait, and those that have `ended`."""

    def __init__(self) -> None:
        self.running = 0
        self.ended: deque[Slot] = deque()
        self._lock = fork_safe_lock()
        self._line: OrderedDict[Slot, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._line)

    def take(self, most: int | None, seconds: float) -> Slot:
        """Wait until fewer than `most` run (`None`: only count); not `taken` if the time is up."""
        woken = Event()
        with self._asking(most, woken.set) as slot:
            if slot.waits and seconds > 0:
                woken.wait(min(seconds, TIMEOUT_MAX))
        return slot

    async def atake(self, most: int | None, seconds: float) -> Slot:
        """The async form of `take`."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        with self._asking(most, lambda: loop.call_soon_threadsafe(woken.set)) as slot:
            if slot.waits and seconds > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await woken.wait()
        return slot

    @contextmanager
    def _asking(self, most: int | None, wake: Callable[[], object]) -> Iterator[Slot]:
        slot = Slot(self, most, wake)
        try:
            self.change(slot, sure=True)
            yield slot
        except BaseException:
            # Cancelled, perhaps just when it got its slot.
            slot.give_back()
            raise
        if not slot.taken:
            self.ended.append(slot)
            self.change(sure=True)

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
            self.running -= slot.taken
            slot.taken = False
        granted: list[Slot] = []
        if asks is not None:
            asks.found = self.running
            self._line[asks] = None
            if asks.most is None:
                self._line.move_to_end(asks, last=False)
        while self._line:
            slot = next(iter(self._line))
            if slot.most is not None and self.running >= slot.most:
                break
            del self._line[slot]
            slot.taken = True
            self.running += 1
            granted += [slot] if slot.waits else []
        if asks is not None:
            asks.waits = not asks.taken
        return granted


class Semaphores(dict[tuple[int, str], Semaphore]):
    """The semaphores of all counts. A forked child has its own: it runs no calls of its parent."""

    def of(self, count: str) -> Semaphore:
        """The semaphore of a count, made when it is first used."""
        key = os.getpid(), count
        return self.get(key) or self.setdefault(key, Semaphore())


PROCESS = Semaphores()
"""The calls that no store counts, of all middlewares."""

_of_stores: WeakValueDictionary[int, Semaphores] = WeakValueDictionary()


def semaphores_of(store: object | None) -> Semaphores:
    """The semaphores of a store, whose `id` stays its own while the caller keeps it, too."""
    return PROCESS if store is None else _of_stores.setdefault(id(store), Semaphores())
