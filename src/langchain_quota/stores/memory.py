"""Counts in the memory of one process, shared by its threads and event loops."""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from langchain_quota.errors import QuotaStoreError
from langchain_quota.locks import fork_safe_lock
from langchain_quota.reservation import Grant, Reservation, Settlement, Slot, admit
from langchain_quota.stores import (
    GRACE,
    IDLE_TTL,
    REMEMBERED,
    SETTLED,
    Charging,
    KeyUse,
    chargings,
    check_fits,
    check_keys,
    check_reservation,
    idle_seconds,
    window_end,
)

_PURGED_AT_ONCE = 100
"""Each operation makes so much room at most, so that none of them has to pay for all."""

V = TypeVar("V")


class MemoryStore:
    """A `QuotaStore` in the memory of one process; its threads and event loops share it.

    It never waits for anything but its own lock, so that the async forms are the sync ones. With
    the process its counts are gone; other processes do not see them.

    Args:
        max_keys: Most counts that are kept, from 1. When so many are alive, a charge that needs
            another is refused with a `QuotaStoreError`: a count is never forgotten to make room.
            Only what ran in an outage is counted beyond that. Of what is remembered (answers,
            settlements, refused attempts) the latest so many are kept.
        idle_ttl: How long a count without a window is kept when nobody charges it, from a second.
        clock: The time, in seconds since the Unix epoch.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `max_keys` is below 1, or `idle_ttl` is less than a second.

    Examples:
        >>> from langchain_quota import MemoryStore, QuotaMiddleware, ToolCallLimit
        >>> store = MemoryStore()
        >>> quota = QuotaMiddleware([ToolCallLimit("search", thread_limit=3)], store=store)
        >>> store.usages("search:*")
        []
    """

    def __init__(
        self,
        *,
        max_keys: int = 100_000,
        idle_ttl: timedelta = IDLE_TTL,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int):
            raise TypeError(f"max_keys must be a whole number, not {max_keys!r}")
        if max_keys < 1:
            raise ValueError(f"max_keys must be 1 or more, not {max_keys!r}")
        self._counts = _Counts(max_keys, idle_seconds(idle_ttl))
        self._answers: _Recent[_Answer] = _Recent(max_keys)
        self._attempts: _Recent[_Answer] = _Recent(max_keys)
        self._refused: _Recent[bool] = _Recent(max_keys)
        self._settled: _Recent[bool] = _Recent(max_keys, SETTLED)
        self._clock = clock
        self._lock = fork_safe_lock()

    def __repr__(self) -> str:
        return f"MemoryStore(keys={len(self._counts)}, max_keys={self._counts.max_keys})"

    def reserve(self, reservation: Reservation) -> Grant:
        """Admit each call of a batch against all of its limits; see `QuotaStore.reserve`.

        Raises:
            QuotaStoreError: The store is full, the attempt was settled before it arrived, or the
                reservation's id was given to a batch of another form.
            TypeError: It is no `Reservation`.
        """
        check_reservation(reservation)
        with self._lock:
            now = self._clock()
            for settlement in reservation.settlements:
                self._settle(settlement, now)
            if reservation.attempt and self._refused.get(reservation.attempt, now):
                raise QuotaStoreError("the attempt was settled before it arrived")
            known = self._answers.get(reservation.id, now) if reservation.id else None
            if known is not None:
                check_fits(known.grant, reservation)
                return replace(known.grant, known=True)
            return self._judge(reservation, now)

    def peek(self, keys: Sequence[str]) -> tuple[KeyUse | None, ...]:
        """What is kept under keys, in their order; `None` where nothing is.

        Raises:
            TypeError: The keys are no sequence of strings.
        """
        check_keys(keys)
        with self._lock:
            now = self._clock()
            return tuple(self._counts.use(key, now) for key in keys)

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0, and keep the keys; see `QuotaStore.reset`.

        Raises:
            QuotaStoreError: The store is full.
            TypeError: The keys are no sequence of strings.
        """
        check_keys(keys)
        with self._lock:
            now = self._clock()
            self._counts.make_room(keys, now)
            for key in keys:
                self._counts.put(key, 0, window_end(key), now)

    def usages(self, pattern: str = "*") -> list[KeyUse]:
        """What is kept under the keys that match a glob pattern, sorted by key.

        Args:
            pattern: As of Python's `fnmatch.fnmatchcase`.
        """
        with self._lock:
            now = self._clock()
            uses = [self._counts.use(key, now) for key in self._counts.matching(pattern)]
        return [use for use in uses if use is not None]

    async def areserve(self, reservation: Reservation) -> Grant:
        """`reserve`; it does not block."""
        return self.reserve(reservation)

    async def apeek(self, keys: Sequence[str]) -> tuple[KeyUse | None, ...]:
        """`peek`; it does not block."""
        return self.peek(keys)

    async def areset(self, keys: Sequence[str]) -> None:
        """`reset`; it does not block."""
        self.reset(keys)

    def _settle(self, settlement: Settlement, now: float) -> None:
        if self._settled.get(settlement.id, now):
            return
        self._settled.put(settlement.id, True, now)
        if settlement.attempt:
            self._undo(settlement.attempt, now)
            self._refused.put(settlement.attempt, True, now)
        if settlement.reservation and self._answers.get(settlement.reservation, now):
            return
        for key, amount in settlement.amounts.items():
            self._add(key, amount, now, start=settlement.starts.get(key, 0))

    def _undo(self, attempt: str, now: float) -> None:
        answer = self._attempts.get(attempt, now)
        if answer is None:
            return
        self._attempts.forget(attempt)
        if self._answers.get(answer.id, now) is answer:
            self._answers.forget(answer.id)
        for key, amount in answer.charged.items():
            self._add(key, -amount, now)

    def _add(self, key: str, amount: int, now: float, *, start: int = 0) -> None:
        count = self._counts.get(key, now)
        if amount > 0:
            used = start if count is None else count.used
            self._counts.put(key, used + amount, window_end(key), now)
        elif count is not None:
            count.used = max(0, count.used + amount)

    def _used(self, slot: Slot, now: float) -> int:
        count = None if slot.key is None else self._counts.get(slot.key, now)
        return slot.used if count is None else count.used

    def _judge(self, reservation: Reservation, now: float) -> Grant:
        grant = admit(reservation, [self._used(slot, now) for slot in reservation.slots])
        before: dict[str, int] = {}
        charged: dict[str, int] = {}
        for slot, count, amount in zip(
            reservation.slots, grant.used, grant.charged(reservation), strict=True
        ):
            if slot.key is not None and amount:
                before.setdefault(slot.key, count)
                charged[slot.key] = charged.get(slot.key, 0) + amount
        if charged:
            self._counts.make_room(charged, now)
            charging = chargings(reservation)
            for key, amount in charged.items():
                ends = charging[key].ends
                self._counts.put(key, before[key] + amount, ends, now, charging[key])
            answer = _Answer(reservation.id, grant, charged)
            if reservation.id:
                self._answers.put(reservation.id, answer, now)
            if reservation.attempt:
                self._attempts.put(reservation.attempt, answer, now)
        return grant


@dataclass(slots=True, eq=False)
class _Answer:
    id: str
    grant: Grant
    charged: dict[str, int]


@dataclass(slots=True)
class _Count:
    used: int
    limit: int | None
    ends: int | None
    expires: float


class _Counts:
    """The counts by key; what has expired is removed bit by bit."""

    def __init__(self, max_keys: int, idle: int) -> None:
        self.max_keys = max_keys
        self._idle = idle
        self._counts: dict[str, _Count] = {}
        # One entry for each key, at a time when it cannot have expired yet.
        self._due: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._counts)

    def get(self, key: str, now: float) -> _Count | None:
        count = self._counts.get(key)
        return None if count is None or count.expires <= now else count

    def use(self, key: str, now: float) -> KeyUse | None:
        count = self.get(key, now)
        return None if count is None else KeyUse(key, count.used, count.limit, count.ends)

    def matching(self, pattern: str) -> list[str]:
        return sorted(key for key in self._counts if fnmatchcase(key, pattern))

    def put(
        self, key: str, used: int, ends: int | None, now: float, charging: Charging | None = None
    ) -> None:
        """Write a count; beside a charge the limit stays as it is."""
        live = self.get(key, now)
        limit = None if live is None else live.limit
        if charging is not None:
            limit = charging.limit
        expires = now + self._idle if ends is None else max(ends, now) + GRACE
        if key in self._counts:
            # Never earlier, so that the entry that is there stays right.
            expires = max(expires, self._counts[key].expires)
        else:
            heapq.heappush(self._due, (expires, key))
        self._counts[key] = _Count(used, limit, ends, expires)

    def make_room(self, keys: Iterable[str], now: float) -> None:
        """Remove what has expired: some of it, and more if keys would not fit.

        Raises:
            QuotaStoreError: They do not fit, because so many others are alive.
        """
        wanted = {*keys}
        for _ in range(_PURGED_AT_ONCE):
            self._purge_first(now)
        while len(self._counts) + len(wanted - self._counts.keys()) > self.max_keys:
            if not self._purge_first(now):
                raise QuotaStoreError(f"the store is full: it keeps {self.max_keys} counts at most")

    def _purge_first(self, now: float) -> bool:
        """Look at the entry that is due first; whether there was one."""
        if not self._due or self._due[0][0] > now:
            return False
        key = self._due[0][1]
        expires = self._counts[key].expires
        if expires <= now:
            heapq.heappop(self._due)
            del self._counts[key]
        else:  # charged since
            heapq.heapreplace(self._due, (expires, key))
        return True


class _Recent(Generic[V]):
    """Remembers values for a while, the latest of them.

    Args:
        most: How many.
        seconds: How long.
    """

    def __init__(self, most: int, seconds: int = REMEMBERED) -> None:
        self._most = most
        self._seconds = seconds
        self._values: OrderedDict[str, tuple[V, float]] = OrderedDict()

    def get(self, name: str, now: float) -> V | None:
        value, expires = self._values.get(name, (None, now))
        return None if expires <= now else value

    def put(self, name: str, value: V, now: float) -> None:
        self._values[name] = (value, now + self._seconds)
        self._values.move_to_end(name)
        while len(self._values) > self._most or next(iter(self._values.values()))[1] <= now:
            self._values.popitem(last=False)

    def forget(self, name: str) -> None:
        self._values.pop(name, None)
