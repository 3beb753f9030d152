"""Corrections that wait until a store answers again."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice

from langchain_quota.core.admission import Correction
from langchain_quota.runtime.sync_async import fork_safe_lock
from langchain_quota.stores.keys import prefix_of

MAX_PENDING = 10_000
"""The most corrections that wait for the store to come back."""

MAX_CORRECTIONS_AT_ONCE = 5
"""The most corrections that one request carries: so they at most double its cost."""


class CorrectionQueue:
    """Corrections that the store has not confirmed, the oldest first."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self.waiting: dict[str, Correction] = {}
        # Their ids in the order of arrival, by what a request looks for.
        self._index: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        self._numbers = count()
        # By process: a forked child gets no answer to a request of its parent.
        self._travelling = defaultdict[int, set[str]](set)

    def prefixes(self) -> list[str]:
        """Return the prefixes of the keys of corrections."""
        with self._lock:
            return [text for kind, text in self._index if kind == "prefix"]

    def add(self, corrections: Sequence[Correction]) -> int:
        """Keep corrections; how many old ones were dropped for them."""
        with self._lock:
            for correction in corrections:
                self._remove(correction.id)
                self.waiting[correction.id] = correction
                for word in _words(correction):
                    self._index[word][correction.id] = next(self._numbers)
            dropped = [*islice(self.waiting, max(0, len(self.waiting) - MAX_PENDING))]
            for name in dropped:
                self._remove(name)
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
                    self._travelling[os.getpid()].discard(correction.id)
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
            correction = self.waiting[correction_id]
            self.waiting[correction_id] = correction._replace(
                amounts=dict.fromkeys(correction.amounts, 0)
            )
        first = self._found(("name", name), *(("key", key) for key in keys), maximum=maximum + 1)
        sent = first[:maximum]
        travelling = self._travelling[os.getpid()]
        if not travelling:
            of_prefix = self._found(("prefix", prefix), maximum=2 * maximum)
            sent = [*dict.fromkeys((*first, *of_prefix))][:maximum]
            travelling.update(sent[len(first) :])
        return tuple(self.waiting[correction_id] for correction_id in sent), len(first) <= maximum

    def _found(self, *words: tuple[str, str], maximum: int | None = None) -> list[str]:
        """Return the ids of the oldest corrections under some words."""
        ids: dict[str, int] = {}
        for word in words:
            ids.update(islice(self._index.get(word, {}).items(), maximum))
        return sorted(ids, key=ids.__getitem__)[:maximum]

    def _remove(self, name: str) -> None:
        correction = self.waiting.pop(name, None)
        for word in _words(correction) if correction else ():
            self._index[word].pop(name, None)
            if not self._index[word]:
                del self._index[word]


def shared_prefix(keys: Sequence[str]) -> str:
    """Return the prefix that all keys of a request have."""
    return prefix_of(keys[0]) if keys else ""


def _words(correction: Correction) -> list[tuple[str, str]]:
    prefix = shared_prefix([*correction.amounts, *correction.starts])
    name = correction.idempotency_key
    words = [("prefix", prefix), *(("key", key) for key in correction.starts)]
    return [*words, ("name", name)] if name else words
