"""The queue of corrections that wait until a store is available again.

The next requests take them along. When there are none, a task of the event loop sends them alone.
"""

import asyncio
import atexit
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from weakref import WeakKeyDictionary, WeakSet

from langchain_quota.core.admission import Correction
from langchain_quota.runtime.sync_async import Mode, fork_safe_lock, run_sync
from langchain_quota.stores.keys import prefix_of

MAX_PENDING = 10_000
"""The most corrections that wait for the store to come back."""

MAX_CORRECTIONS_AT_ONCE = 5
"""The most corrections that one request carries: so they at most double its cost."""

_FIRST, _LONGEST = 1.0, 30.0
"""How long a task waits before it sends for the first time, and at most, in seconds."""


class CorrectionQueue:
    """Corrections that the store has not confirmed, the oldest first."""

    def __init__(
        self, forms: Collection[str], send_all: Callable[[Mode], Coroutine[object, None, None]]
    ) -> None:
        self._forms = forms
        self._send_all = send_all
        self._lock = fork_safe_lock()
        self._waiting: dict[str, Correction] = {}
        # Their ids in the order of arrival, by what a request looks for.
        self._index: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        self._numbers = count()
        self._travelling: set[str] = set()
        self._tasks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = (
            WeakKeyDictionary()
        )

    def __len__(self) -> int:
        return len(self._waiting)

    def prefixes(self) -> list[str]:
        """Return the prefixes of the keys of corrections."""
        with self._lock:
            return [text for kind, text in self._index if kind == "prefix"]

    def add(self, corrections: Sequence[Correction]) -> int:
        """Keep corrections; how many old ones were dropped for them."""
        with self._lock:
            for correction in corrections:
                self._remove(correction.id)
                self._waiting[correction.id] = correction
                for word in _words(correction):
                    self._index[word][correction.id] = next(self._numbers)
            dropped = [*islice(self._waiting, max(0, len(self) - MAX_PENDING))]
            for name in dropped:
                self._remove(name)
        if self._waiting:
            self._send_later()
        return len(dropped)

    @contextmanager
    def carried(
        self, prefix: str, keys: Collection[str] = (), name: str = ""
    ) -> Iterator[tuple[tuple[Correction, ...], bool]]:
        """Return the corrections to send next, and whether a request can be sent with them.

        They are forgotten unless sending them fails.
        """
        with self._lock:
            corrections, last = self._next(prefix, set(keys), name)
        complete = False
        try:
            yield corrections, last
            complete = True
        finally:
            with self._lock:
                for correction in corrections:
                    self._travelling.discard(correction.id)
                    if complete:
                        self._remove(correction.id)

    def _next(
        self, prefix: str, keys: Collection[str], name: str
    ) -> tuple[tuple[Correction, ...], bool]:
        # The store must first get the corrections of the request's earlier attempts, and those of
        # keys whose counts the caller has or corrects; the oldest first, for its `starts` is the
        # right start. Others of the prefix are carried by one request at a time: else every caller
        # would send the same ones to a store that has just come back. The node of another prefix
        # may be down.
        maximum = MAX_CORRECTIONS_AT_ONCE
        for correction_id in self._found(("name", name)):
            # The calls that an earlier attempt admitted did not run.
            correction = self._waiting[correction_id]
            self._waiting[correction_id] = replace(
                correction, amounts=dict.fromkeys(correction.amounts, 0)
            )
        first = self._found(("name", name), *(("key", key) for key in keys), maximum=maximum + 1)
        further: list[str] = []
        if len(first) < maximum and not self._travelling:
            of_prefix = self._found(("prefix", prefix), maximum=2 * maximum)
            further = [correction_id for correction_id in of_prefix if correction_id not in first][
                : maximum - len(first)
            ]
        self._travelling.update(further)
        sent = tuple(self._waiting[correction_id] for correction_id in (*first[:maximum], *further))
        return sent, len(first) <= maximum

    def _found(self, *words: tuple[str, str], maximum: int | None = None) -> list[str]:
        """Return the ids of the oldest corrections under some words."""
        ids: dict[str, int] = {}
        for word in words:
            ids.update(islice(self._index.get(word, {}).items(), maximum))
        return sorted(ids, key=ids.__getitem__)[:maximum]

    def _remove(self, name: str) -> None:
        correction = self._waiting.pop(name, None)
        for word in _words(correction) if correction else ():
            self._index[word].pop(name, None)
            if not self._index[word]:
                del self._index[word]

    def _send_later(self) -> None:
        """Have them sent without a request, at the latest when the loop or the process ends."""
        _at_exit.add(self)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if "async" in self._forms and loop not in self._tasks:
            task = self._tasks[loop] = loop.create_task(self._until_sent())
            task.add_done_callback(lambda _: self._tasks.pop(loop, None))

    async def _until_sent(self) -> None:
        wait = _FIRST
        try:
            while self._waiting:
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST)
                await self._send_all("a")
        except asyncio.CancelledError:
            # The event loop ends.
            await self._send_all("a")
            raise

    def finish(self) -> None:
        """Try for the last time, before the process ends."""
        # An async client has had a last try when its event loop ended.
        if self._waiting and "sync" in self._forms:
            run_sync(self._send_all(""))


def _words(correction: Correction) -> list[tuple[str, str]]:
    prefix = prefix_of(next(iter([*correction.amounts, *correction.starts]), ""))
    name = correction.idempotency_key
    words = [("prefix", prefix), *(("key", key) for key in correction.starts)]
    return [*words, ("name", name)] if name else words


_at_exit: WeakSet[CorrectionQueue] = WeakSet()


@atexit.register
def _finish() -> None:
    for queue in list(_at_exit):
        queue.finish()
