"""Corrections of a store's counts that wait until it can be asked."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice

from langchain_quota.admission import AcquireRequest, Compensation
from langchain_quota.stores.keys import prefix_of

MAX_PENDING = 10_000
"""The most corrections that wait for the store to come back."""

COMPENSATED_AT_ONCE = 5
"""The most corrections that one request carries: so they at most double its cost."""


class PendingCompensations:
    """Corrections that the store has not confirmed, the oldest first.

    Only one request at a time carries old ones. Otherwise every caller would send the same ones to
    a store that has just come back. It carries those of its own prefix: the node of another may
    be down.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._by_attempt: dict[str, tuple[int, Compensation]] = {}
        self._about: dict[str, set[str]] = {}
        self._with_prefix: dict[str, dict[str, None]] = {}
        self._travelling: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_attempt)

    def prefixes(self) -> list[str]:
        """The prefixes of the keys that corrections are of."""
        return list(self._with_prefix)

    def add(self, compensation: Compensation) -> bool:
        """Keep a correction; whether the oldest one was dropped for it."""
        self._by_attempt[compensation.id] = next(self._numbers), compensation
        self._with_prefix.setdefault(_prefix(compensation), {})[compensation.id] = None
        for subject in _subjects(compensation):
            self._about.setdefault(subject, set()).add(compensation.id)
        full = len(self) > MAX_PENDING
        if full:
            self._remove(next(iter(self._by_attempt)))
        return full

    def take(self, request: AcquireRequest) -> tuple[tuple[Compensation, ...], bool]:
        """The corrections to send next, and whether the request itself can be sent with them.

        The store must first get the corrections of the request's earlier attempts, and those of
        keys whose counts the caller has or corrects. One request at a time carries others of its
        prefix, too.
        """
        if not self._by_attempt:
            return (), True
        attempts = self._made_again(request.idempotency_key)
        for key in _callers(request):
            attempts |= self._about.get(key, set())
        # The oldest goes first: its `starts` is the right start.
        first = [each for _, each in sorted(self._by_attempt[each] for each in attempts)]
        others: list[Compensation] = []
        if len(first) < COMPENSATED_AT_ONCE and not self._travelling:
            oldest = islice(self._with_prefix.get(_prefix(request), ()), COMPENSATED_AT_ONCE)
            others = [self._by_attempt[each][1] for each in oldest if each not in attempts]
            others = others[: COMPENSATED_AT_ONCE - len(first)]
            self._travelling = {each.id for each in others}
        return (*first[:COMPENSATED_AT_ONCE], *others), len(first) <= COMPENSATED_AT_ONCE

    def give_back(self, taken: Sequence[Compensation], *, made: bool) -> None:
        """Forget the corrections that were made; the others can be sent again."""
        for each in taken:
            self._travelling.discard(each.id)
            if made:
                self._remove(each.id)

    def _made_again(self, name: str) -> set[str]:
        """The earlier attempts of a request that a hook makes again.

        The calls that they let through did not run.
        """
        found = set()
        for attempt in self._about.get(name, ()) if name else ():
            number, compensation = self._by_attempt[attempt]
            if compensation.idempotency_key == name:
                found.add(attempt)
                self._by_attempt[attempt] = number, replace(compensation, amounts={})
        return found

    def _remove(self, attempt: str) -> None:
        _, compensation = self._by_attempt.pop(attempt, (0, None))
        if compensation is None:
            return
        prefix = _prefix(compensation)
        del self._with_prefix[prefix][attempt]
        if not self._with_prefix[prefix]:
            del self._with_prefix[prefix]
        for subject in _subjects(compensation):
            self._about[subject].discard(attempt)
            if not self._about[subject]:
                del self._about[subject]


def _subjects(compensation: Compensation) -> set[str]:
    """What a correction is about: a request, and keys."""
    return {compensation.idempotency_key, *compensation.starts}


def _prefix(asked: Compensation | AcquireRequest) -> str:
    """What all keys of a request or correction begin with, if the store's prefix is a function."""
    if isinstance(asked, AcquireRequest):
        for counter in asked.counters.values():
            if counter.key is not None:
                return prefix_of(counter.key)
        return _prefix(asked.compensations[0]) if asked.compensations else ""
    for key in asked.amounts or asked.starts:
        return prefix_of(key)
    return ""


def _callers(request: AcquireRequest) -> set[str]:
    """The keys whose counts the caller has, or corrects."""
    keys = {each.key for each in request.counters.values() if each.key is not None and each.used}
    return keys.union(*(each.amounts for each in request.compensations))
