"""The shared store as the hooks ask it: timed, its failures seen, its corrections not lost."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from typing import Self

from langchain_quota.errors import QuotaStoreError
from langchain_quota.locks import fork_safe_lock
from langchain_quota.reservation import Grant, Reservation, Settlement
from langchain_quota.stores import QuotaStore
from langchain_quota.telemetry.recorder import Recorder

MAX_UNSETTLED = 10_000
"""The most corrections that wait for the store to come back."""

SETTLED_AT_ONCE = 5
"""The most corrections that one question carries: they double what it costs, and no more."""


class StoreClient:
    """Asks a store, and says so when it cannot be asked.

    Args:
        store: The store.
        recorder: Times its answers and counts its failures.
    """

    def __init__(self, store: QuotaStore, recorder: Recorder) -> None:
        self.store = store
        self._recorder = recorder
        self._lock = fork_safe_lock()
        self._down = False
        self._unsettled = _Unsettled()
        self._fills = recorder.watch_store(store)
        """Whether it can be full, and has not been nearly so yet."""

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: a copy of the middleware asks the same store."""
        return self

    def reserve(self, reservation: Reservation) -> Grant | None:
        """The store's answer; `None` if it gave none.

        Raises:
            TypeError: The store is used in a way that it does not support.
        """
        grant, last = None, False
        with self._asking("reserve", reservation):
            while not last:
                with self._carrying(reservation) as (asked, last):
                    answer = self.store.reserve(asked)
                grant = answer if last else None
        return grant

    async def areserve(self, reservation: Reservation) -> Grant | None:
        """The store's answer; `None` if it gave none.

        Raises:
            TypeError: The store is used in a way that it does not support.
        """
        grant, last = None, False
        with self._asking("reserve", reservation):
            while not last:
                with self._carrying(reservation) as (asked, last):
                    answer = await self.store.areserve(asked)
                grant = answer if last else None
        return grant

    def peek(self, keys: Sequence[str]) -> dict[str, int] | None:
        """What is used of each key that the store has, in calls; `None` if it does not answer."""
        counts: dict[str, int] | None = None if keys else {}
        if keys:
            with self._asking("peek"):
                found = self.store.peek(keys)
                counts = {each.key: each.used for each in found if each is not None}
        return counts

    async def apeek(self, keys: Sequence[str]) -> dict[str, int] | None:
        """What is used of each key that the store has, in calls; `None` if it does not answer."""
        counts: dict[str, int] | None = None if keys else {}
        if keys:
            with self._asking("peek"):
                found = await self.store.apeek(keys)
                counts = {each.key: each.used for each in found if each is not None}
        return counts

    def reset(self, keys: Sequence[str]) -> None:
        """Set what is used of keys to 0.

        Raises:
            QuotaStoreError: The store could not be asked.
        """
        with self._timing("reset"):
            self.store.reset(keys)

    async def areset(self, keys: Sequence[str]) -> None:
        """Set what is used of keys to 0.

        Raises:
            QuotaStoreError: The store could not be asked.
        """
        with self._timing("reset"):
            await self.store.areset(keys)

    def settle_later(
        self, reservation: Reservation, amounts: Mapping[str, int] | None = None
    ) -> None:
        """Correct the counts when the store can be asked again.

        Args:
            reservation: The one that failed: perhaps the store has heard of it, or will.
            amounts: What has run all the same, in calls by key.
        """
        attempt = reservation.attempt
        settlement = Settlement(
            attempt,
            amounts or {},
            attempt,
            reservation.id,
            {slot.key: slot.used for slot in reservation.slots if slot.key is not None},
        )
        with self._lock:
            lost = self._unsettled.add(settlement)
        if lost:
            error = QuotaStoreError(f"more than {MAX_UNSETTLED} corrections wait for the store")
            self._recorder.record_error("store", error, log=False)

    @contextmanager
    def _carrying(self, reservation: Reservation) -> Iterator[tuple[Reservation, bool]]:
        """What to ask next, and whether that is the reservation: some corrections go ahead of it.

        What it carries is settled if it is answered.
        """
        with self._lock:
            carried, last = self._unsettled.take(reservation)
        asked = Reservation("", "", (), (), settlements=carried)
        if last:
            settlements = (*carried, *reservation.settlements)
            asked = replace(reservation, settlements=settlements) if carried else reservation
        settled = False
        try:
            yield asked, last
            settled = True
        finally:
            with self._lock:
                self._unsettled.give_back(carried, settled=settled)

    @contextmanager
    def _asking(self, operation: str, reservation: Reservation | None = None) -> Iterator[None]:
        try:
            with self._timing(operation):
                yield
        except TypeError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a store raises, it has not answered
            with self._lock:
                first, self._down = not self._down, True
            self._recorder.record_error("store", error, log=first)
        except BaseException:
            # Cancelled: the call will not run, but the store may have heard of it.
            if reservation is not None:
                self.settle_later(reservation)
            raise
        else:
            with self._lock:
                back, self._down = self._down, False
            if back:
                self._recorder.record_recovery("store")
            if self._fills:
                self._fills = not self._recorder.store_nearly_full(self.store)

    @contextmanager
    def _timing(self, operation: str) -> Iterator[None]:
        started = time.perf_counter()
        outcome = "error"
        try:
            yield
            outcome = "ok"
        except Exception as error:
            if getattr(error, "timed_out", False) or isinstance(error, TimeoutError):
                outcome = "timeout"
            raise
        finally:
            self._recorder.observe_store(operation, outcome, time.perf_counter() - started)


class _Unsettled:
    """Corrections that the store has not confirmed, the oldest first.

    If all callers sent the same ones, an outage would not end: they go with one at a time.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._by_attempt: dict[str, tuple[int, Settlement]] = {}
        self._about: dict[str, set[str]] = {}
        self._travelling: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_attempt)

    def add(self, settlement: Settlement) -> bool:
        """Keep a correction; whether the oldest had to make room for it."""
        self._by_attempt[settlement.id] = next(self._numbers), settlement
        for subject in _subjects(settlement):
            self._about.setdefault(subject, set()).add(settlement.id)
        full = len(self) > MAX_UNSETTLED
        if full:
            self._remove(next(iter(self._by_attempt)))
        return full

    def take(self, reservation: Reservation) -> tuple[tuple[Settlement, ...], bool]:
        """What the next question carries, and whether that can be the reservation itself.

        Before it the store must know of its earlier attempts, and of all that may be in counts
        which the caller has, or corrects. One question at a time carries others, too.
        """
        attempts = self._made_again(reservation.id)
        for key in _callers(reservation):
            attempts |= self._about.get(key, set())
        # Where a count starts, the oldest knows.
        first = [each for _, each in sorted(self._by_attempt[each] for each in attempts)]
        others: list[Settlement] = []
        if len(first) < SETTLED_AT_ONCE and not self._travelling:
            oldest = islice(self._by_attempt.items(), SETTLED_AT_ONCE)
            others = [each for attempt, (_, each) in oldest if attempt not in attempts]
            others = others[: SETTLED_AT_ONCE - len(first)]
            self._travelling = {each.id for each in others}
        return (*first[:SETTLED_AT_ONCE], *others), len(first) <= SETTLED_AT_ONCE

    def give_back(self, taken: Sequence[Settlement], *, settled: bool) -> None:
        """Forget what was settled; what was not can travel again."""
        for each in taken:
            self._travelling.discard(each.id)
            if settled:
                self._remove(each.id)

    def _made_again(self, name: str) -> set[str]:
        """The earlier attempts of a reservation that a hook makes when it runs again.

        What they let through did not run.
        """
        found = set()
        for attempt in self._about.get(name, ()) if name else ():
            number, settlement = self._by_attempt[attempt]
            if settlement.reservation == name:
                found.add(attempt)
                self._by_attempt[attempt] = number, replace(settlement, amounts={})
        return found

    def _remove(self, attempt: str) -> None:
        _, settlement = self._by_attempt.pop(attempt, (0, None))
        for subject in _subjects(settlement) if settlement else ():
            self._about[subject].discard(attempt)
            if not self._about[subject]:
                del self._about[subject]


def _subjects(settlement: Settlement) -> set[str]:
    """What a correction is about: a reservation, and keys."""
    return {settlement.reservation, *settlement.starts}


def _callers(reservation: Reservation) -> set[str]:
    """The keys of which the caller has a count, or has something to correct."""
    keys = {slot.key for slot in reservation.slots if slot.key is not None and slot.used}
    return keys.union(*(each.amounts for each in reservation.settlements))
