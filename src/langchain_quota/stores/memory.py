"""Counts in the memory of one process, shared by its threads and event loops."""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, Counter, admit
from langchain_quota.decision import ROOT_RUN, RUN
from langchain_quota.errors import QuotaStoreError
from langchain_quota.locks import fork_safe_lock
from langchain_quota.stores import (
    COMPENSATED,
    GRACE,
    IDLE_TTL,
    REMEMBERED,
    Metadata,
    Occupancy,
    QuotaUsage,
    check_fits,
    check_keys,
    check_request,
    idle_seconds,
    idle_time,
    metadata,
    window_end,
)
from langchain_quota.stores.keys import dimension_of

_PURGED_AT_ONCE = 100
"""Each operation makes so much room at most, so that none of them has to pay for all."""

_REMEMBERED_AT_MOST = 100_000
"""A result takes about three times the memory of a count."""

V = TypeVar("V")


class MemoryStore:
    """A `QuotaStore` in the memory of one process; its threads and event loops share it.

    It never waits for anything but its own lock, so that the async forms are the sync ones. With
    the process its counts are gone; other processes do not see them.

    Args:
        max_keys: Most counts that are kept, from 1. When so many are alive, the thread's count that
            was charged longest ago makes room, if the thread's state has it, too: it comes back
            from there with the thread's next call. Counts of users and windows, and others that
            only the store has, are never forgotten: where only such are left, a charge that needs
            another is refused with a `QuotaStoreError`. Only what ran in an outage is counted
            beyond that. Of what is remembered (results, compensations, refused attempts) the latest
            so many are kept, and 100,000 at most.
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
        max_keys: int = 250_000,
        idle_ttl: timedelta = IDLE_TTL,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int):
            raise TypeError(f"max_keys must be a whole number, not {max_keys!r}")
        if max_keys < 1:
            raise ValueError(f"max_keys must be 1 or more, not {max_keys!r}")
        self._counts = _Counts(max_keys, idle_seconds(idle_ttl))
        remembered = min(max_keys, _REMEMBERED_AT_MOST)
        self._results: _Recent[_Acquired] = _Recent(remembered)
        self._attempts: _Recent[_Acquired] = _Recent(remembered)
        self._refused: _Recent[bool] = _Recent(remembered)
        self._compensated: _Recent[bool] = _Recent(remembered, COMPENSATED)
        self._clock = clock
        self._lock = fork_safe_lock()

    def __repr__(self) -> str:
        return f"MemoryStore(keys={len(self._counts)}, max_keys={self._counts.max_keys})"

    @property
    def occupancy(self) -> Occupancy:
        """How full it is."""
        return self._counts.occupancy

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        """Admit each call of a batch against all of its limits; see `QuotaStore.acquire`.

        Raises:
            QuotaStoreError: The store is full, the attempt was compensated before it arrived, or
                the idempotency key was given to a batch of another form.
            TypeError: It is no `AcquireRequest`.
        """
        check_request(request)
        with self._lock:
            now = self._clock()
            for compensation in request.compensations:
                self._compensate(compensation, now)
            if request.attempt_id and self._refused.get(request.attempt_id, now):
                raise QuotaStoreError("the attempt was compensated before it arrived")
            made = self._results.get(request.idempotency_key, now)
            if made is None:
                return self._admit(request, now)
            check_fits(len(made.result.used), len(made.result.admitted), request)
            used = dict(zip(request.counters, made.result.used.values(), strict=True))
            return replace(made.result, used=used, replayed=True)

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
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
            self._make_room(keys, now)
            for key in keys:
                self._counts.put(key, 0, window_end(key), now)

    def usages(self, pattern: str = "*") -> list[QuotaUsage]:
        """What is kept under the keys that match a glob pattern, sorted by key.

        Args:
            pattern: As of Python's `fnmatch.fnmatchcase`.
        """
        with self._lock:
            now = self._clock()
            uses = [self._counts.use(key, now) for key in self._counts.matching(pattern)]
        return [use for use in uses if use is not None]

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        """`acquire`; it does not block."""
        return self.acquire(request)

    async def apeek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """`peek`; it does not block."""
        return self.peek(keys)

    async def areset(self, keys: Sequence[str]) -> None:
        """`reset`; it does not block."""
        self.reset(keys)

    def _compensate(self, compensation: Compensation, now: float) -> None:
        if self._compensated.get(compensation.id, now):
            return
        self._compensated.put(compensation.id, True, now)
        if compensation.attempt_id:
            self._undo(compensation.attempt_id, now)
            self._refused.put(compensation.attempt_id, True, now)
        if self._results.get(compensation.idempotency_key, now) is None:
            for key, amount in compensation.amounts.items():
                self._add(key, amount, now, start=compensation.starts.get(key, 0))

    def _undo(self, attempt_id: str, now: float) -> None:
        made = self._attempts.get(attempt_id, now)
        if made is None:
            return
        self._attempts.forget(attempt_id)
        if self._results.get(made.idempotency_key, now) is made:
            self._results.forget(made.idempotency_key)
        for key, amount in made.amounts.items():
            self._add(key, -amount, now)

    def _add(self, key: str, amount: int, now: float, *, start: int = 0) -> None:
        count = self._counts.get(key, now)
        if amount > 0:
            used = start if count is None else count.used
            # What has run is counted all the same.
            self._counts.make_room((key,), now)
            self._counts.put(key, used + amount, window_end(key), now)
        elif count is not None:
            count.used = max(0, count.used + amount)

    def _used(self, counter: Counter, now: float) -> int:
        count = None if counter.key is None else self._counts.get(counter.key, now)
        return counter.used if count is None else count.used

    def _admit(self, request: AcquireRequest, now: float) -> AcquireResult:
        used = {name: self._used(counter, now) for name, counter in request.counters.items()}
        result = admit(request.hits, used, request.stops)
        charged = result.charged(request.hits)
        amounts = {key: amount for key, amount in request.keyed(charged).items() if amount}
        if amounts:
            self._make_room(amounts, now)
            beside = metadata(request)
            for name, counter in request.counters.items():
                if counter.key is not None and charged[name]:
                    # Another counter with this key may have been charged just now.
                    count = self._used(counter, now) + charged[name]
                    ends = beside[counter.key].ends
                    self._counts.put(counter.key, count, ends, now, beside[counter.key])
            made = _Acquired(request.idempotency_key, result, amounts)
            if request.idempotency_key:
                self._results.put(request.idempotency_key, made, now)
            if request.attempt_id:
                self._attempts.put(request.attempt_id, made, now)
        return result

    def _make_room(self, keys: Collection[str], now: float) -> None:
        """Make room for counts.

        Raises:
            QuotaStoreError: They do not fit.
        """
        if not self._counts.make_room(keys, now):
            most = self._counts.max_keys
            raise QuotaStoreError(f"the store is full: it keeps {most} counts at most")


@dataclass(slots=True, eq=False)
class _Acquired:
    """What a request charged, by key, and the result with which it was answered."""

    idempotency_key: str
    result: AcquireResult
    amounts: dict[str, int]


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
        # Each key is in one of these. Of windows: an entry at a time when it cannot have expired
        # yet. Of the others: by their last charge, since the idle time is the same for all in it.
        self._windows: list[tuple[float, str]] = []
        self._lasting: OrderedDict[str, None] = OrderedDict()
        self._mirrored: OrderedDict[str, None] = OrderedDict()
        # Of runs, which are mirrored, too, and kept for a shorter time.
        self._runs: OrderedDict[str, None] = OrderedDict()
        # Of root runs, which are mirrored, too, and kept for a time of their own.
        self._root_runs: OrderedDict[str, None] = OrderedDict()
        self._by_dimension = {RUN: self._runs, ROOT_RUN: self._root_runs}

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(len(self._counts), sum(map(len, self._droppable)), self.max_keys)

    @property
    def _droppable(self) -> tuple[OrderedDict[str, None], ...]:
        """The keys whose counts callers mirror; the first go first."""
        return self._runs, self._root_runs, self._mirrored

    def get(self, key: str, now: float) -> _Count | None:
        count = self._counts.get(key)
        return None if count is None or count.expires <= now else count

    def use(self, key: str, now: float) -> QuotaUsage | None:
        count = self.get(key, now)
        return None if count is None else QuotaUsage(key, count.used, count.limit, count.ends)

    def matching(self, pattern: str) -> list[str]:
        return sorted(key for key in self._counts if fnmatchcase(key, pattern))

    def put(
        self, key: str, used: int, ends: int | None, now: float, beside: Metadata | None = None
    ) -> None:
        """Write a count; only a charge changes its limit, and whether it is mirrored."""
        kept, live = self._counts.get(key), self.get(key, now)
        limit = None if live is None else live.limit
        mirrored = key in self._mirrored
        if beside is not None:
            limit, mirrored = beside.limit, beside.mirrored
        expires = now + idle_time(key, self._idle) if ends is None else max(ends, now) + GRACE
        if kept is not None:
            # Never earlier, so that the entry that is there stays right.
            expires = max(expires, kept.expires)
        if kept is None and ends is not None:
            heapq.heappush(self._windows, (expires, key))
        elif (runs := self._by_dimension.get(dimension_of(key))) is not None:
            runs[key] = None
            runs.move_to_end(key)
        elif kept is None or key in self._lasting or key in self._mirrored:
            self._lasting.pop(key, None)
            self._mirrored.pop(key, None)
            (self._mirrored if mirrored else self._lasting)[key] = None
        self._counts[key] = _Count(used, limit, ends, expires)

    def make_room(self, keys: Collection[str], now: float) -> bool:
        """Remove what has expired: some of it, and more if keys would not fit.

        If they still do not fit, the counts go that callers mirror, as many as have to.

        Returns:
            Whether the keys fit now.
        """
        for _ in range(_PURGED_AT_ONCE):
            if not self._purge(now):
                break
        while (excess := self._excess(keys)) > 0 and self._purge(now):
            pass
        if excess <= 0:
            return True
        droppable = self._droppable
        wanted = {key for key in keys for others in droppable if key in others}
        if excess > sum(map(len, droppable)) - len(wanted):
            return False
        for others in droppable:
            for key in [*wanted & others.keys()]:
                others.move_to_end(key)
            while excess > 0 and others and (oldest := next(iter(others))) not in wanted:
                del others[oldest], self._counts[oldest]
                excess -= 1
        return True

    def _excess(self, keys: Collection[str]) -> int:
        """How many counts there would be too many."""
        new = {key for key in keys if key not in self._counts}
        return len(self._counts) + len(new) - self.max_keys

    def _purge(self, now: float) -> bool:
        """Look at a count that may have expired; whether there was one."""
        if self._windows and self._windows[0][0] <= now:
            key = self._windows[0][1]
            expires = self._counts[key].expires
            if expires <= now:
                heapq.heappop(self._windows)
                del self._counts[key]
            else:  # charged since
                heapq.heapreplace(self._windows, (expires, key))
            return True
        for others in (self._runs, self._root_runs, self._lasting, self._mirrored):
            oldest = next(iter(others), None)
            if oldest is not None and self._counts[oldest].expires <= now:
                del others[oldest], self._counts[oldest]
                return True
        return False


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
