"""Queues of calls in this process, whatever they wait for.

A call waits for a slot, which is counted here, or for room in a count of a store. It stands in one
queue at a time, and its place there follows from its arrival. Threads and event loops share the
queues of a store, or those of the calls that no store counts. Locks are held for a few operations,
however many calls wait, and never during a wait.
"""

import asyncio
import math
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import count
from threading import TIMEOUT_MAX, Event, Lock
from weakref import WeakValueDictionary

from langchain_quota.runtime.sync_async import Mode, P, T, fork_safe_lock

WaitContext = Callable[[], AbstractContextManager[object]]
"""Returns the context of a wait, such as one that counts it."""

LOOKS_AGAIN = 1.0
"""After how many seconds the first call of a queue looks for room that others have made."""

_arrivals = count()


class Queues:
    """The calls of this process that wait for counts of one store, and the slots that are taken."""

    def __init__(self) -> None:
        # An abandoned call leaves when garbage is collected: perhaps while this thread holds the
        # lock. So who leaves does not wait for the lock: its holder sees to those that are `_late`.
        self._lock = fork_safe_lock(Lock)
        self._late: deque[Waiter | Sequence[str]] = deque()
        self._queues: dict[str, dict[int, Waiter]] = {}
        self._taken = Counter[str]()
        # The queues whose first call may go on.
        self._moving: set[str] = set()

    def is_next(self, waiter: "Waiter", names: Iterable[str]) -> bool:
        """Return whether no earlier call stands in these queues; otherwise, join the first one."""
        return self._locked(self._is_next, waiter, names)

    def take(self, waiter: "Waiter", name: str, maximum: int | None) -> tuple[bool, int]:
        """Take a slot if fewer than `maximum` are taken, or else join the queue.

        Return whether the call has got one, and how many were taken before. With `None` a call does
        not wait.
        """
        return self._locked(self._take, waiter, name, maximum)

    def move(self, waiter: "Waiter", name: str = "") -> None:
        """Move a call to another queue, or to none."""
        self._locked(self._move, waiter, name)

    def leave(self, waiter: "Waiter") -> None:
        """Have a call leave its queue, and release its slots. Leaving twice is harmless."""
        self._late.append(waiter)
        self._work_off()

    def look_again(self, keys: Iterable[str]) -> None:
        """Wake the first call that waits for each of these counts, in any window."""
        self._late.append([name for key in keys for name in (key, key.rpartition(":")[0])])
        self._work_off()

    def _locked(self, change: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Make a change with the lock held, and wake the calls that may go on then."""
        with self._lock:
            self._let_leave()
            result = change(*args, **options)
            firsts = self._firsts()
        self._wake(firsts)
        self._work_off()
        return result

    def _work_off(self) -> None:
        while self._late and self._lock.acquire(blocking=False):
            try:
                self._let_leave()
                firsts = self._firsts()
            finally:
                self._lock.release()
            self._wake(firsts)

    def _let_leave(self) -> None:
        while self._late:
            late = self._late.popleft()
            if isinstance(late, Waiter):
                self._move(late, "")
                self._taken.subtract(late.slots)
                self._moving.update(late.slots)
                late.slots.clear()
            else:
                self._moving.update(late)

    def _firsts(self) -> list["Waiter"]:
        """Return the calls that may go on, and must be woken when the lock is free."""
        names, self._moving = self._moving & self._queues.keys(), set()
        return [min(self._queues[name].items())[1] for name in names]

    def _wake(self, firsts: Iterable["Waiter"]) -> None:
        for first in firsts:
            try:
                first.wake()
            except RuntimeError:
                # Its event loop is closed, so the call no longer waits.
                self._late.append(first)

    def _is_next(self, waiter: "Waiter", names: Iterable[str]) -> bool:
        firsts = ((name, min(self._queues.get(name, ()), default=math.inf)) for name in names)
        busy = next((name for name, first in firsts if first < waiter.number), None)
        if busy is not None:
            self._move(waiter, busy)
        return busy is None

    def _take(self, waiter: "Waiter", name: str, maximum: int | None) -> tuple[bool, int]:
        taken = self._taken[name]
        is_free = maximum is None or (taken < maximum and self._is_next(waiter, (name,)))
        if is_free:
            self._taken[name] += 1
            waiter.slots.append(name)
        self._move(waiter, "" if is_free else name)
        return is_free, taken

    def _move(self, waiter: "Waiter", name: str) -> None:
        if waiter.queue == name:
            return
        queue = self._queues.get(waiter.queue, {})
        queue.pop(waiter.number, None)
        if not queue:
            self._queues.pop(waiter.queue, None)
        elif min(queue) > waiter.number:
            self._moving.add(waiter.queue)
        if name:
            self._queues.setdefault(name, {})[waiter.number] = waiter
        waiter.queue = name


class Waiter:
    """A call that came, and that any thread can wake: the queue in which it stands, its slots.

    It may have `waited` for some seconds before.
    """

    def __init__(self, mode: Mode, waited: float = 0.0) -> None:
        self._woken = asyncio.Event() if mode else Event()
        self.wake: Callable[[], object] = self._woken.set
        if mode:
            self.wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self.wake)
        self.number, self.queue = next(_arrivals), ""
        self.slots: list[str] = []
        self.came_at, self.has_waited = time.monotonic() - waited, waited > 0

    @property
    def waited(self) -> float:
        """Seconds since it came; 0 if it has never waited."""
        return time.monotonic() - self.came_at if self.has_waited else 0.0

    async def retry(
        self,
        attempt: Callable[[], Awaitable[float]],
        deadline: float,
        waiting: WaitContext = nullcontext,
    ) -> bool:
        """Make attempts until one succeeds; return False if the time is over before.

        Args:
            attempt: Returns 0, or less, if it has succeeded, and else after how many seconds the
                next one makes sense, unless the call is woken before.
            deadline: A time of `time.monotonic`.
            waiting: The context of each wait.
        """
        while (pause := await attempt()) > 0:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            with waiting():
                self.has_waited = True
                await self.sleep(min(pause, remaining))
        return True

    async def sleep(self, seconds: float) -> None:
        """Wait until it is woken, for so many seconds at most."""
        if isinstance(self._woken, asyncio.Event):
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._woken.wait()
        else:
            self._woken.wait(min(seconds, TIMEOUT_MAX))
        self._woken.clear()


_creation_lock = fork_safe_lock()
_queues: WeakValueDictionary[tuple[int, int], Queues] = WeakValueDictionary()
"""The queues in use. A forked child has its own, because it runs no calls of its parent."""


def queues_of(store: object) -> Queues:
    """Return the queues of this process for a store, or with `None` for calls that none counts."""
    key = os.getpid(), id(store)
    with _creation_lock:
        queues = _queues.get(key)
        if queues is None:
            queues = _queues[key] = Queues()
        return queues
