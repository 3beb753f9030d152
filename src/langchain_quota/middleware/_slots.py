"""The calls that run at the same time in this process, and those that wait for them to end.

One lock guards all counts of a pool. It is held for a few dictionary operations, however many
calls wait, and never while anybody waits. A call takes all that it needs in one step, so no two
calls wait for each other. Calls that need the same stand in one line, and are served in the order
in which they came.
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
        line: Where it waits: the same for calls that need the same.
        number: Those who come later have a higher one.
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
        # What is to be taken in, by any thread.
        self._ended: deque[Slot] = deque()
        self._serving: set[int] = set()
        _pools.add(self)

    def running(self, count: str) -> int:
        """How many run that are in a count."""
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
            counts: As of `take`.
            caps: As of `take`.
            seconds: As of `take`.

        Returns:
            As of `take`.
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
        """Note that a call runs no more, or no longer waits. A second time does nothing."""
        self._ended.append(slot)
        self._serve()

    def _ask(self, slot: Slot) -> bool:
        """Queue a call behind those that wait, and see whether it may run."""
        self._serve(slot)
        return not slot.waits

    def _serve(self, asks: Slot | None = None) -> None:
        """Change the counts, and wake those that may run.

        A call that was left behind ends when garbage is collected: perhaps here, while this thread
        holds the lock. It is taken in when the change is made.
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
            # Its event loop is closed: nobody waits there any more.
            self._ended.append(slot)

    def _change(self, asks: Slot | None) -> list[Slot]:
        """Take in which calls have ended, and which one asks; with the lock held.

        Returns:
            Who is let run: to be woken without the lock.
        """
        while self._ended:
            slot = self._ended.popleft()
            self._leave_line(slot)
            if slot.taken and slot.counted_in is self._running:
                self._running.subtract(slot.counts)
                # Keys with nothing in them would add up.
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
        """Leave the queue, where others may have waited behind this one."""
        if not slot.taken:
            self.give_back(slot)

    def _leave_line(self, slot: Slot) -> None:
        line = self._lines.get(slot.line)
        if line is not None:
            line.pop(slot, None)
            if not line:
                del self._lines[slot.line]

    def _hand_out(self) -> list[Slot]:
        """Let run who may: a call that waits for a count keeps those behind it out of that count.

        Returns:
            Who is let run.
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
                # Those behind it in its line lack the same.
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
        """Forget all: in a forked child runs nothing of what its parent runs."""
        self._running = Counter()
        self._lines = {}
        self._ended = deque()
        self._serving = set()


_pools: WeakSet[Slots] = WeakSet()

PROCESS = Slots()
"""The calls that no store counts, whichever middleware they belong to."""

_of_stores: WeakValueDictionary[int, Slots] = WeakValueDictionary()


def slots_of(store: object | None) -> Slots:
    """The calls of this process that a store counts; or those that none counts.

    Args:
        store: The store. Whoever keeps the slots keeps it, too, so its `id` names it.
    """
    return PROCESS if store is None else _of_stores.setdefault(id(store), Slots())


def _forked() -> None:
    for each in _pools:
        each.begin_anew()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forked)
