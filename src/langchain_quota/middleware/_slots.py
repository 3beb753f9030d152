"""The calls that run at the same time in this process, and those that wait for them to end.

One lock guards all counts of a pool. It is held for a few dictionary operations, however many calls
wait, and never during a wait. A call takes all that it needs in one step, so no two calls wait for
each other. Calls with the same needs wait in one line, and are served in the order in which they
came.
"""

import asyncio
import itertools
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from operator import attrgetter
from threading import TIMEOUT_MAX, Event, get_ident
from weakref import WeakSet, WeakValueDictionary

from langchain_quota.locks import fork_safe_lock


class Slot:
    """What one call needs, and whether it has it.

    Args:
        counts: The counts that it is in while it runs.
        caps: How many may be in a count at the same time, for those that are capped.
        wake: Called when it gets what it needs while it waits.

    Attributes:
        line: Where it waits: calls with the same needs have one line.
        number: Later calls have a higher one.
        taken: Whether the call may run.
        found: How many were in each count when it came.
        waits: Whether it could not run when it came.
    """

    def __init__(
        self, counts: tuple[str, ...], caps: Mapping[str, int], wake: Callable[[], object]
    ) -> None:
        self.counts = counts
        self.caps = caps
        self.wake = wake
        self.line: Hashable = (counts, *caps.items())
        self.number = 0
        self.taken = False
        self.found: Mapping[str, int] = {}
        self.waits = False
        # A forked child counts anew.
        self.counted_in: Counter[str] | None = None


class Slots:
    """The calls that run at the same time, by count, and those that wait."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._running: Counter[str] = Counter()
        self._numbers = itertools.count()
        # In each line a set, in the order in which they came.
        self._lines: dict[Hashable, OrderedDict[Slot, None]] = {}
        # The changes that are still to be made, by any thread.
        self._ended: deque[Slot] = deque()
        self._serving: set[int] = set()
        _pools.add(self)

    def running(self, count: str) -> int:
        """How many calls in a count are running."""
        return self._running[count]

    def take(self, counts: tuple[str, ...], caps: Mapping[str, int], seconds: float) -> Slot:
        """Wait until a call may run, and note that it runs.

        Args:
            counts: The counts that it is in while it runs.
            caps: How many may be in a count at the same time, for those that are capped.
            seconds: How long it waits at most.

        Returns:
            Its slot, to be given back; not `taken` if the time was up.
        """
        woken = Event()
        slot = Slot(counts, caps, woken.set)
        try:
            if not self._ask(slot) and seconds > 0:
                woken.wait(min(seconds, TIMEOUT_MAX))
        except BaseException:
            self.give_back(slot)
            raise
        self._stop_waiting(slot)
        return slot

    async def atake(self, counts: tuple[str, ...], caps: Mapping[str, int], seconds: float) -> Slot:
        """The async form of `take`.

        Args:
            counts: As in `take`.
            caps: As in `take`.
            seconds: As in `take`.

        Returns:
            As in `take`.
        """
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        slot = Slot(counts, caps, lambda: loop.call_soon_threadsafe(woken.set))
        try:
            if not self._ask(slot) and seconds > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await woken.wait()
        except BaseException:
            # Cancelled, perhaps just when it got its slot.
            self.give_back(slot)
            raise
        self._stop_waiting(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Note that a call no longer runs or waits. A second time does nothing."""
        self._ended.append(slot)
        self._serve()

    def _ask(self, slot: Slot) -> bool:
        """Queue a call after those that wait, and check whether it may run."""
        self._serve(slot)
        return not slot.waits

    def _serve(self, asks: Slot | None = None) -> None:
        """Change the counts, and wake those that may run.

        An abandoned call ends when garbage is collected: perhaps here, while this thread holds the
        lock. Then its end is noted after the present change.
        """
        me = get_ident()
        if me in self._serving:
            return
        while True:
            self._serving.add(me)
            try:
                with self._lock:
                    granted = self._change(asks)
            finally:
                self._serving.discard(me)
            for slot in granted:
                if slot is not asks:
                    self._wake(slot)
            asks = None
            if not self._ended:
                return

    def _wake(self, slot: Slot) -> None:
        try:
            slot.wake()
        except RuntimeError:
            # Its event loop is closed: the call no longer waits.
            self._ended.append(slot)

    def _change(self, asks: Slot | None) -> list[Slot]:
        """Note which calls have ended, and which one asks; with the lock held.

        Returns:
            The calls that may run now. The caller wakes them without the lock.
        """
        while self._ended:
            slot = self._ended.popleft()
            self._leave_line(slot)
            if slot.taken and slot.counted_in is self._running:
                self._running.subtract(slot.counts)
                # Empty keys would pile up.
                self._running += Counter()
            slot.taken = False
        if asks is None:
            return self._hand_out()
        asks.found = {count: self._running[count] for count in asks.counts}
        asks.number = next(self._numbers)
        self._lines.setdefault(asks.line, OrderedDict())[asks] = None
        granted = self._hand_out()
        asks.waits = not asks.taken
        return granted

    def _stop_waiting(self, slot: Slot) -> None:
        """Leave the queue, in which others may wait after this call."""
        if not slot.taken:
            self.give_back(slot)

    def _leave_line(self, slot: Slot) -> None:
        line = self._lines.get(slot.line)
        if line is not None:
            line.pop(slot, None)
            if not line:
                del self._lines[slot.line]

    def _hand_out(self) -> list[Slot]:
        """Find the calls that may run. A call that waits for a count keeps later ones out of it.

        Returns:
            The calls that may run now.
        """
        granted: list[Slot] = []
        full: set[str] = set()
        firsts = {next(iter(line)) for line in self._lines.values()}
        while firsts:
            slot = min(firsts, key=attrgetter("number"))
            firsts.remove(slot)
            lacks = {
                count
                for count, most in slot.caps.items()
                if count in full or self._running[count] >= most
            }
            if lacks:
                # Later calls in its line need the same count.
                full |= lacks
                continue
            slot.taken, slot.counted_in = True, self._running
            self._running.update(slot.counts)
            granted.append(slot)
            self._leave_line(slot)
            if slot.line in self._lines:
                firsts.add(next(iter(self._lines[slot.line])))
        return granted

    def begin_anew(self) -> None:
        """Forget everything: a forked child runs none of its parent's calls."""
        self._running = Counter()
        self._lines = {}
        self._ended = deque()
        self._serving = set()


_pools: WeakSet[Slots] = WeakSet()

PROCESS = Slots()
"""The calls that no store counts, of all middlewares."""

_of_stores: WeakValueDictionary[int, Slots] = WeakValueDictionary()


def slots_of(store: object | None) -> Slots:
    """The calls of this process that a store counts; or those that none counts.

    Args:
        store: The store. The owner of the slots keeps it, too, so its `id` stays its own.
    """
    return PROCESS if store is None else _of_stores.setdefault(id(store), Slots())


def _forked() -> None:
    for each in _pools:
        each.begin_anew()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forked)
