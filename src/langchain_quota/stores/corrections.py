"""Corrections of a store's counts that wait until it can be asked.

The next requests take them along. When there are none, a task of the event loop sends them alone.
"""

import asyncio
import atexit
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from langchain_quota.admission import Compensation
from langchain_quota.concurrency import Form, fork_safe_lock, now
from langchain_quota.stores.keys import prefix_of

MAX_PENDING = 10_000
"""The most corrections that wait for the store to come back."""

COMPENSATED_AT_ONCE = 5
"""The most corrections that one request carries: so they at most double its cost."""

_FIRST, _LONGEST = 1.0, 30.0
"""How long a task waits before it sends for the first time, and at most, in seconds."""


class Corrections:
    """Corrections that the store has not confirmed, the oldest first."""

    def __init__(
        self, forms: Collection[str], send_all: Callable[[Form], Coroutine[Any, Any, None]]
    ) -> None:
        self._forms = forms
        self._send_all = send_all
        self._lock = fork_safe_lock()
        self._waiting: dict[str, Compensation] = {}
        self._travelling: set[str] = set()
        self._tasks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = (
            WeakKeyDictionary()
        )

    def __len__(self) -> int:
        return len(self._waiting)

    def prefixes(self) -> list[str]:
        """The prefixes of the keys that corrections are of."""
        with self._lock:
            return [*dict.fromkeys(map(_prefix, self._waiting.values()))]

    def add(self, corrections: Sequence[Compensation]) -> int:
        """Keep corrections; how many old ones were dropped for them."""
        with self._lock:
            self._waiting |= {each.id: each for each in corrections}
            dropped = [*islice(self._waiting, max(0, len(self) - MAX_PENDING))]
            for each in dropped:
                del self._waiting[each]
        if self._waiting:
            self._send_later()
        return len(dropped)

    @contextmanager
    def carried(
        self, prefix: str, keys: Collection[str] = (), name: str = ""
    ) -> Iterator[tuple[tuple[Compensation, ...], bool]]:
        """The corrections to send next, and whether a request itself can be sent with them.

        They are forgotten unless sending them fails.
        """
        with self._lock:
            taken, last = self._next(prefix, set(keys), name)
        made = False
        try:
            yield taken, last
            made = True
        finally:
            with self._lock:
                for each in taken:
                    self._travelling.discard(each.id)
                    if made:
                        self._waiting.pop(each.id, None)

    def _next(
        self, prefix: str, keys: Collection[str], name: str
    ) -> tuple[tuple[Compensation, ...], bool]:
        # The store must first get the corrections of the request's earlier attempts, and those of
        # keys whose counts the caller has or corrects; the oldest first, for its `starts` is the
        # right start. Others of the prefix are carried by one request at a time: else every caller
        # would send the same ones to a store that has just come back. The node of another prefix
        # may be down.
        first: list[Compensation] = []
        others: list[Compensation] = []
        for each in self._waiting.values():
            if name and each.idempotency_key == name:
                # The calls that an earlier attempt let through did not run.
                first.append(replace(each, amounts={}))
            elif any(key in keys for key in each.starts):
                first.append(each)
            elif len(others) < COMPENSATED_AT_ONCE and _prefix(each) == prefix:
                others.append(each)
        self._waiting |= {each.id: each for each in first}
        others = [] if self._travelling else others[: max(0, COMPENSATED_AT_ONCE - len(first))]
        self._travelling |= {each.id for each in others}
        return (*first[:COMPENSATED_AT_ONCE], *others), len(first) <= COMPENSATED_AT_ONCE

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
            now(self._send_all(""))


def _prefix(correction: Compensation) -> str:
    return prefix_of(next(iter([*correction.amounts, *correction.starts]), ""))


_at_exit: WeakSet[Corrections] = WeakSet()


@atexit.register
def _finish() -> None:
    for each in list(_at_exit):
        each.finish()
