"""The shared store as the hooks ask it: timed, its failures seen, its corrections not lost."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, Self

from langchain_quota.errors import QuotaStoreError
from langchain_quota.locks import fork_safe_lock
from langchain_quota.reservation import Grant, Reservation, Settlement
from langchain_quota.stores import QuotaStore
from langchain_quota.telemetry import Telemetry

MAX_UNSETTLED = 10_000
"""The most corrections that wait for the store to come back."""

_SETTLED_AT_ONCE = 100


class StoreClient:
    """Asks a store, and says so when it cannot be asked.

    Args:
        store: The store.
        telemetry: Times its answers and counts its failures.
    """

    def __init__(self, store: QuotaStore, telemetry: Telemetry) -> None:
        self.store = store
        self._telemetry = telemetry
        self._lock = fork_safe_lock()
        self._down = False
        self._unsettled: dict[str, _Correction] = {}
        self._fills = telemetry.watch_store(store)
        """Whether it can be full, and has not been nearly so yet."""

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: a copy of the middleware asks the same store."""
        return self

    def reserve(self, reservation: Reservation) -> Grant | None:
        """The store's answer; `None` if it gave none.

        Raises:
            TypeError: The store is used in a way that it does not support.
        """
        sent = self._waiting(reservation)
        grant = None
        with self._asking("reserve", reservation):
            grant = self.store.reserve(_with(reservation, sent))
            self._settled(sent)
        return grant

    async def areserve(self, reservation: Reservation) -> Grant | None:
        """The store's answer; `None` if it gave none.

        Raises:
            TypeError: The store is used in a way that it does not support.
        """
        sent = self._waiting(reservation)
        grant = None
        with self._asking("reserve", reservation):
            grant = await self.store.areserve(_with(reservation, sent))
            self._settled(sent)
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
            self._unsettled[attempt] = _Correction(reservation.id, settlement)
            lost = len(self._unsettled) > MAX_UNSETTLED
            if lost:
                del self._unsettled[next(iter(self._unsettled))]
        if lost:
            error = QuotaStoreError(f"more than {MAX_UNSETTLED} corrections wait for the store")
            self._telemetry.failed("store", error, log=False)

    def _waiting(self, reservation: Reservation) -> list[Settlement]:
        """The corrections to send with a reservation."""
        with self._lock:
            for attempt, (name, settlement) in self._unsettled.items():
                # Made again by a hook that runs again: what it let through before did not run.
                if name == reservation.id and settlement.amounts:
                    undone = replace(settlement, amounts={})
                    self._unsettled[attempt] = _Correction(name, undone)
            return [each.settlement for each in islice(self._unsettled.values(), _SETTLED_AT_ONCE)]

    def _settled(self, sent: Sequence[Settlement]) -> None:
        with self._lock:
            for each in sent:
                self._unsettled.pop(each.id, None)

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
            self._telemetry.failed("store", error, log=first)
        except BaseException:
            # Cancelled: the call will not run, but the store may have heard of it.
            if reservation is not None:
                self.settle_later(reservation)
            raise
        else:
            with self._lock:
                back, self._down = self._down, False
            if back:
                self._telemetry.recovered("store")
            if self._fills:
                self._fills = not self._telemetry.nearly_full(self.store)

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
            self._telemetry.stored(operation, outcome, time.perf_counter() - started)


class _Correction(NamedTuple):
    reservation: str
    settlement: Settlement


def _with(reservation: Reservation, settlements: Sequence[Settlement]) -> Reservation:
    if not settlements:
        return reservation
    return replace(reservation, settlements=(*settlements, *reservation.settlements))
