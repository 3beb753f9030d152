"""Corrections of a store's counts that wait until it can be asked, and who sends them then.

The next requests take them along. When there are none, a task of the event loop sends them alone.
"""

import asyncio
import atexit
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import count, islice
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from langchain_quota.admission import Compensation
from langchain_quota.concurrency import now
from langchain_quota.stores.keys import prefix_of

if TYPE_CHECKING:
    from langchain_quota.stores.client import StoreClient

MAX_PENDING = 10_000
"""The most corrections that wait for the store to come back."""

COMPENSATED_AT_ONCE = 5
"""The most corrections that one request carries: so they at most double its cost."""

_FIRST, _LONGEST = 1.0, 30.0
"""How long a sender waits before it tries for the first time, and at most, in seconds."""


class PendingCompensations:
    """Corrections that the store has not confirmed, the oldest first."""

    # Only one request at a time carries old ones. Otherwise every caller would send the same ones
    # to a store that has just come back. It carries those of its own prefix: the node of another
    # may be down.

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: dict[str, tuple[int, Compensation]] = {}
        # Their ids by what they are about: a request, keys, and the prefix of the keys.
        self._about: dict[str, dict[str, None]] = {}
        self._travelling: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def prefixes(self) -> list[str]:
        """The prefixes of the keys that corrections are of."""
        return [each[:-1] for each in self._about if each.endswith("/")]

    def add(self, compensation: Compensation) -> bool:
        """Keep a correction; whether the oldest one was dropped for it."""
        self._waiting[compensation.id] = next(self._numbers), compensation
        for subject in _subjects(compensation):
            self._about.setdefault(subject, {})[compensation.id] = None
        full = len(self) > MAX_PENDING
        if full:
            self._remove(next(iter(self._waiting)))
        return full

    def take(
        self, prefix: str, keys: Iterable[str], name: str
    ) -> tuple[tuple[Compensation, ...], bool]:
        """The corrections to send next, and whether a request itself can be sent with them."""
        # The store must first get the corrections of the request's earlier attempts, and those of
        # keys whose counts the caller has or corrects. One request at a time carries others of its
        # prefix, too.
        ids = set(self._made_again(name))
        for key in keys:
            ids.update(self._about.get(key, ()))
        # The oldest goes first: its `starts` is the right start.
        first = [each for _, each in sorted(self._waiting[each] for each in ids)]
        others: list[Compensation] = []
        if len(first) < COMPENSATED_AT_ONCE and not self._travelling:
            oldest = islice(self._about.get(f"{prefix}/", ()), COMPENSATED_AT_ONCE)
            others = [self._waiting[each][1] for each in oldest if each not in ids]
            others = others[: COMPENSATED_AT_ONCE - len(first)]
            self._travelling = {each.id for each in others}
        return (*first[:COMPENSATED_AT_ONCE], *others), len(first) <= COMPENSATED_AT_ONCE

    def give_back(self, taken: Iterable[Compensation], *, made: bool) -> None:
        """Forget the corrections that were made; the others can be sent again."""
        for each in taken:
            self._travelling.discard(each.id)
            if made:
                self._remove(each.id)

    def _made_again(self, request: str) -> Collection[str]:
        """The earlier attempts of a request; the calls that they let through did not run."""
        found = self._about.get(request, ()) if request else ()
        for attempt in found:
            number, compensation = self._waiting[attempt]
            self._waiting[attempt] = number, replace(compensation, amounts={})
        return found

    def _remove(self, attempt: str) -> None:
        _, compensation = self._waiting.pop(attempt, (0, None))
        for subject in _subjects(compensation) if compensation else ():
            self._about[subject].pop(attempt, None)
            if not self._about[subject]:
                del self._about[subject]


def _subjects(compensation: Compensation) -> set[str]:
    key = next(iter([*compensation.amounts, *compensation.starts]), "")
    # No key ends with a slash.
    return {compensation.idempotency_key, *compensation.starts, f"{prefix_of(key)}/"}


_at_exit: WeakSet["StoreClient"] = WeakSet()
_tasks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict["StoreClient", asyncio.Task[None]]] = (
    WeakKeyDictionary()
)


def send_later(client: "StoreClient") -> None:
    """Send what no next request takes along, at the latest when the loop or the process ends."""
    _at_exit.add(client)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    tasks = _tasks.setdefault(loop, {})
    if "async" in client.forms and client not in tasks:
        task = tasks[client] = loop.create_task(_until_sent(client))
        task.add_done_callback(lambda _: tasks.pop(client, None))


async def _until_sent(client: "StoreClient") -> None:
    wait = _FIRST
    try:
        while client.waits():
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST)
            await client.send_waiting("a")
    except asyncio.CancelledError:
        # The event loop ends.
        await client.send_waiting("a")
        raise


@atexit.register
def _finish() -> None:
    for each in list(_at_exit):
        # An async client has had a last try when its event loop ended.
        if each.waits() and "sync" in each.forms:
            now(each.send_waiting(""))
