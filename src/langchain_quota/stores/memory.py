"""Counts in the memory of one process, shared by its threads and event loops."""

import heapq
import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import chain, islice
from typing import Generic, TypeVar

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, Counter, admit
from langchain_quota.arguments import check_count
from langchain_quota.concurrency import fork_safe_lock
from langchain_quota.decision import ROOT_RUN, RUN
from langchain_quota.errors import QuotaStoreError
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
from langchain_quota.stores.grants import Grant, Granting, in_utc
from langchain_quota.stores.keys import dimension_of

_REMEMBERED_AT_MOST = 100_000
"""A result takes about three times the memory of a count."""
_PURGED_AT_ONCE = 100
"""How many counts one operation looks at to make room, so that no operation takes long."""

V = TypeVar("V")


class MemoryStore(Granting):
    """A `QuotaStore` in the memory of one process; its threads and event loops share it.

    It never waits for anything but its own lock, so the async forms are the same as the sync ones.
    Its counts end with the process; other processes do not see them.

    Args:
        max_keys: Most counts that are kept, from 1. When the store is full, it drops counts that
            agents can bring back: first those of runs, then of root runs, then of threads whose
            state has the count, too. In each group it drops the oldest charges first. Counts of
            users and windows, and others that only the store has, are never dropped. If only such
            counts are left, a charge that needs a new one is refused with a `QuotaStoreError`. Only
            calls that ran in an outage are counted beyond `max_keys`. The store also remembers the
            latest results, compensations and refused attempts: at most `max_keys` of each, and at
            most 100,000. Grants have no bound: each is kept until a week after its end.
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
        check_count("max_keys", max_keys, least=1, what="a whole number")
        self._idle = idle_seconds(idle_ttl)
        self._counts = _Counts(max_keys, self._idle)
        remembered = min(max_keys, _REMEMBERED_AT_MOST)
        self._results: _Recent[_Acquired] = _Recent(remembered)
        self._attempts: _Recent[_Acquired] = _Recent(remembered)
        self._refused: _Recent[bool] = _Recent(remembered)
        self._compensated: _Recent[bool] = _Recent(remembered, COMPENSATED)
        self._settled: _Recent[bool] = _Recent(remembered)
        self._grants = _Grants()
        self.clock = clock
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
            now = self.clock()
            for compensation in request.compensations:
                self._compensate(compensation, now)
            if request.attempt_id and self._refused.get(request.attempt_id, now):
                raise QuotaStoreError("the attempt was compensated before it arrived")
            made = self._results.get(request.idempotency_key, now)
            if made is None:
                return self._admit(request, now)
            check_fits(len(made.result.used), len(made.result.admitted), request)
            names = dict(zip(made.result.used, request.counters, strict=True))
            return replace(
                made.result,
                used={names[name]: used for name, used in made.result.used.items()},
                replayed=True,
                granted={names[name]: amount for name, amount in made.result.granted.items()},
            )

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """What is kept under keys, in their order; `None` if nothing is.

        Raises:
            TypeError: The keys are no sequence of strings.
        """
        check_keys(keys)
        with self._lock:
            now = self.clock()
            return tuple(self._use(key, now) for key in keys)

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0, and keep the keys; see `QuotaStore.reset`.

        Raises:
            QuotaStoreError: The store is full.
            TypeError: The keys are no sequence of strings.
        """
        check_keys(keys)
        with self._lock:
            now = self.clock()
            self._make_room(keys, now)
            for key in keys:
                self._counts.forget_holds(key)
                self._counts.put(key, 0, window_end(key), now)

    def usages(self, pattern: str = "*") -> list[QuotaUsage]:
        """What is kept under the keys that match a glob pattern, sorted by key.

        Args:
            pattern: As in Python's `fnmatch.fnmatchcase`.
        """
        with self._lock:
            now = self.clock()
            uses = [self._use(key, now) for key in self._counts.matching(pattern)]
        return [use for use in uses if use is not None]

    def grants(self, pattern: str = "*") -> list[Grant]:
        """The grants that have not ended, sorted by key and time.

        Args:
            pattern: A glob pattern of keys, as in Python's `fnmatch.fnmatchcase`.
        """
        with self._lock:
            return self._grants.matching(pattern, self.clock())

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        """`acquire`; it does not block."""
        return self.acquire(request)

    async def apeek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """`peek`; it does not block."""
        return self.peek(keys)

    async def areset(self, keys: Sequence[str]) -> None:
        """`reset`; it does not block."""
        self.reset(keys)

    def _now(self) -> float:
        return self.clock()

    def _grant(self, asked: Grant) -> tuple[Grant | None, bool]:
        with self._lock:
            now = self.clock()
            kept, is_new = self._grants.give(asked, now)
            count = self._counts.get(asked.key, now) if is_new else None
            if count is not None:
                # The count's idle time begins anew, as after a charge.
                self._counts.put(asked.key, count.used, window_end(asked.key), now)
            return kept, is_new

    async def _agrant(self, asked: Grant) -> tuple[Grant | None, bool]:
        return self._grant(asked)

    def _revoke(self, key: str, name: str) -> Grant | None:
        with self._lock:
            return self._grants.revoke(key, name, self.clock())

    async def _arevoke(self, key: str, name: str) -> Grant | None:
        return self._revoke(key, name)

    def _use(self, key: str, now: float) -> QuotaUsage | None:
        count = self._counts.get(key, now)
        granted = _amount(self._grants.of(key, now))
        if count is not None:
            return QuotaUsage(key, count.used, count.limit, count.ends, granted)
        return QuotaUsage(key, 0, None, window_end(key), granted) if granted else None

    def _compensate(self, compensation: Compensation, now: float) -> None:
        made = self._settled if compensation.settles else self._compensated
        if made.get(compensation.id, now):
            return
        made.put(compensation.id, True, now)
        if compensation.attempt_id:
            self._undo(compensation.attempt_id, now)
            self._refused.put(compensation.attempt_id, True, now)
        if self._results.get(compensation.idempotency_key, now) is None:
            for key, amount in compensation.amounts.items():
                if compensation.settles:
                    self._counts.give_back(key, compensation.settles, now)
                self._add(key, amount, now, start=compensation.starts.get(key, 0))
                count = self._counts.get(key, now)
                if count is not None and amount > 0:
                    count.limit = compensation.limits.get(key, count.limit)

    def _undo(self, attempt_id: str, now: float) -> None:
        made = self._attempts.get(attempt_id, now)
        if made is None:
            return
        self._attempts.forget(attempt_id)
        if self._results.get(made.idempotency_key, now) is made:
            self._results.forget(made.idempotency_key)
        for key, amount, is_held in made.charged:
            if is_held:
                self._counts.give_back(key, made.idempotency_key, now, amount)
            else:
                self._add(key, -amount, now)

    def _add(self, key: str, amount: int, now: float, *, start: int = 0) -> None:
        count = self._counts.get(key, now)
        if amount > 0:
            used = start if count is None else count.used
            # Calls that have run are counted even if the store is full.
            self._counts.make_room((key,), now)
            self._counts.put(key, used + amount, window_end(key), now)
        elif count is not None:
            count.used = max(0, count.used + amount)

    def _used(self, counter: Counter, now: float) -> int:
        count = None if counter.key is None else self._counts.get(counter.key, now)
        return counter.used if count is None else count.used

    def _admit(self, request: AcquireRequest, now: float) -> AcquireResult:
        counters = request.counters
        used = {name: self._used(counter, now) for name, counter in counters.items()}
        grants: dict[str, list[_Kept]] = {}
        if self._grants:
            of_each = {name: self._grants.of(each.key, now) for name, each in counters.items()}
            grants = {name: some for name, some in of_each.items() if some}
        granted = {name: _amount(some) for name, some in grants.items()}
        result = admit(request.hits, used, request.stops, granted)
        amounts = result.charged(request.hits)
        charges = {
            name: amount for name, amount in amounts.items() if amount and counters[name].key
        }
        if charges:
            self._charge(request, result, charges, now)
        if grants:
            new = {name: [each for each in some if each.is_new] for name, some in grants.items()}
            newly = {name: _amount(some) for name, some in new.items() if some}
            result = replace(result, newly_granted=newly)
            for each in chain.from_iterable(new.values()):
                each.is_new = False
        return result

    def _charge(
        self, request: AcquireRequest, result: AcquireResult, charges: dict[str, int], now: float
    ) -> None:
        charged = []
        beside = metadata(request)
        keys = {str(request.counters[name].key) for name in charges}
        self._make_room(keys, now)
        for name, amount in charges.items():
            counter, key = request.counters[name], str(request.counters[name].key)
            # Another counter with this key may have been charged just now.
            count = self._used(counter, now) + amount
            self._counts.put(key, count, beside[key].ends, now, beside[key])
            if counter.lease is not None:
                over = int(now) + counter.lease + 1
                self._counts.hold(key, request.idempotency_key, amount, over)
            charged.append((key, amount, counter.lease is not None))
        made = _Acquired(request.idempotency_key, result, charged)
        if request.idempotency_key:
            self._results.put(request.idempotency_key, made, now)
        if request.attempt_id:
            self._attempts.put(request.attempt_id, made, now)

    def _make_room(self, keys: Iterable[str], now: float) -> None:
        if not self._counts.make_room(keys, now):
            most = self._counts.max_keys
            raise QuotaStoreError(f"the store is full: it keeps {most} counts at most")


@dataclass(slots=True, eq=False)
class _Acquired:
    """The answer to a request, and each key and amount that it charged, and whether it is held."""

    idempotency_key: str
    result: AcquireResult
    charged: list[tuple[str, int, bool]]


@dataclass(slots=True)
class _Count:
    """What is kept under a key; `used` includes what is held."""

    used: int
    limit: int | None
    ends: int | None
    expires: float
    among: OrderedDict[str, None] | None
    """The keys that expire after the same idle time; `None` for a count of a window."""
    holds: dict[str, tuple[int, int]] | None = None
    """What is held, and until when, by the request that holds it."""
    next_end: float = math.inf
    """No lease of the holds ends before this time."""


class _Counts:
    """The counts by key; expired ones are removed step by step."""

    def __init__(self, max_keys: int, idle: int) -> None:
        self.max_keys = max_keys
        self._idle = idle
        self._counts: dict[str, _Count] = {}
        # Each key is in one of these. Of windows: an entry at a time when it cannot have expired
        # yet. Of the others: by their last charge, since the idle time is the same for all in it.
        self._windows: list[tuple[float, str]] = []
        self._lasting: OrderedDict[str, None] = OrderedDict()
        self._mirrored: OrderedDict[str, None] = OrderedDict()
        self._runs: OrderedDict[str, None] = OrderedDict()
        self._root_runs: OrderedDict[str, None] = OrderedDict()
        # Those whose counts callers mirror; the first ones are dropped first.
        self._droppable = (self._runs, self._root_runs, self._mirrored)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def occupancy(self) -> Occupancy:
        """How full it is."""
        return Occupancy(len(self._counts), sum(map(len, self._droppable)), self.max_keys)

    def get(self, key: str, now: float) -> _Count | None:
        """A count, without holds whose lease is over; `None` if there is none."""
        count = self._counts.get(key)
        if count is None or count.expires <= now:
            return None
        if count.holds and count.next_end <= now:
            for name in [name for name, (_, ends) in count.holds.items() if ends <= now]:
                count.used = max(0, count.used - count.holds.pop(name)[0])
            count.next_end = min((ends for _, ends in count.holds.values()), default=math.inf)
        return count

    def hold(self, key: str, name: str, amount: int, ends: int) -> None:
        """Note that a request only holds, until its lease ends, so much of what it has charged."""
        count = self._counts[key]
        count.holds = count.holds or {}
        held, last = count.holds.get(name, (0, ends))
        count.holds[name] = (held + amount, max(ends, last))
        count.next_end = min(ends, count.next_end)

    def give_back(self, key: str, name: str, now: float, most: int | None = None) -> None:
        """Give back what a request still holds, or `most` of it."""
        count = self.get(key, now)
        if count is not None and count.holds and name in count.holds:
            held, ends = count.holds.pop(name)
            amount = held if most is None else min(held, most)
            count.used = max(0, count.used - amount)
            if held > amount:
                count.holds[name] = (held - amount, ends)

    def forget_holds(self, key: str) -> None:
        count = self._counts.get(key)
        if count is not None:
            count.holds = None

    def matching(self, pattern: str) -> list[str]:
        """The keys that match a glob pattern, sorted."""
        return sorted(key for key in self._counts if fnmatchcase(key, pattern))

    def put(
        self, key: str, used: int, ends: int | None, now: float, beside: Metadata | None = None
    ) -> None:
        """Write a count; only a charge changes its limit, and whether it is mirrored."""
        kept, live = self._counts.get(key), self.get(key, now)
        limit = None if live is None else live.limit
        mirrored = kept is not None and kept.among is self._mirrored
        if beside is not None:
            limit, mirrored = beside.limit, beside.mirrored
        expires = now + idle_time(key, self._idle) if ends is None else max(ends, now) + GRACE
        among = None
        if kept is not None:
            # Never earlier, so the existing entry stays correct.
            expires = max(expires, kept.expires)
        if kept is None and ends is not None:
            heapq.heappush(self._windows, (expires, key))
        elif kept is None or kept.among is not None:
            others = self._mirrored if mirrored else self._lasting
            among = {RUN: self._runs, ROOT_RUN: self._root_runs}.get(dimension_of(key), others)
            if kept is not None and kept.among is not None:
                del kept.among[key]
            among[key] = None
        count = self._counts[key] = _Count(used, limit, ends, expires, among)
        if live is not None and live.holds:
            count.holds, count.next_end = live.holds, live.next_end

    def make_room(self, keys: Iterable[str], now: float) -> bool:
        """Whether keys fit, without what has expired and, if they must go, mirrored counts."""
        for _ in range(_PURGED_AT_ONCE):
            if not self._purge(now):
                break
        wanted = set(keys)
        if len(self._counts) + len(wanted) <= self.max_keys:
            return True
        while (excess := self._excess(wanted)) > 0:
            if not self._purge(now):
                break
        oldest = (key for others in self._droppable for key in others if key not in wanted)
        dropped = [*islice(oldest, max(excess, 0))]
        if len(dropped) < excess:
            return False
        for key in dropped:
            self._remove(key)
        return True

    def _excess(self, wanted: set[str]) -> int:
        return len(self._counts) + len(wanted - self._counts.keys()) - self.max_keys

    def _remove(self, key: str) -> None:
        among = self._counts.pop(key).among
        if among is not None:
            del among[key]

    def _purge(self, now: float) -> bool:
        """Look at one count that may have expired; whether there was such a count."""
        if self._windows and self._windows[0][0] <= now:
            key = self._windows[0][1]
            expires = self._counts[key].expires
            if expires <= now:
                heapq.heappop(self._windows)
                del self._counts[key]
            else:  # charged since
                heapq.heapreplace(self._windows, (expires, key))
            return True
        for others in (*self._droppable, self._lasting):
            if others and self._counts[oldest := next(iter(others))].expires <= now:
                self._remove(oldest)
                return True
        return False


class _Recent(Generic[V]):
    """Remembers the latest values for some seconds."""

    def __init__(self, most: int, seconds: int = REMEMBERED) -> None:
        self._most = most
        self._seconds = seconds
        self._values: OrderedDict[str, tuple[V, float]] = OrderedDict()

    def get(self, name: str, now: float) -> V | None:
        """What is remembered under a name."""
        value, expires = self._values.get(name, (None, now))
        return None if expires <= now else value

    def put(self, name: str, value: V, now: float) -> None:
        """Remember a value."""
        self._values[name] = (value, now + self._seconds)
        self._values.move_to_end(name)
        while len(self._values) > self._most or next(iter(self._values.values()))[1] <= now:
            self._values.popitem(last=False)

    def forget(self, name: str) -> None:
        """Forget what is remembered under a name."""
        self._values.pop(name, None)


@dataclass(slots=True)
class _Kept:
    """A grant, and whether a call has been judged by it."""

    grant: Grant
    ends: int
    is_new: bool = True


def _amount(grants: Iterable[_Kept]) -> int:
    return sum(each.grant.amount for each in grants)


class _Grants:
    """Grants by key and id. An ended one is remembered for a week, so it is not given again."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, _Kept]] = {}
        # The end, key and id of each, sorted.
        self._ends: list[tuple[int, str, str]] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def give(self, asked: Grant, now: float) -> tuple[Grant | None, bool]:
        """The grant that is kept, and whether it is new; `None` if it would have ended."""
        self._forget(now)
        known = self._kept.get(asked.key, {}).get(asked.id)
        if known is not None:
            return known.grant, False
        kept = _Kept(asked, asked.ends or 0)
        if kept.ends <= now:
            return None, False
        self._kept.setdefault(asked.key, {})[asked.id] = kept
        insort(self._ends, (kept.ends, asked.key, asked.id))
        return asked, True

    def revoke(self, key: str, name: str, now: float) -> Grant | None:
        """End a grant; `None` if there is none."""
        kept = self._kept.get(key, {}).get(name)
        if kept is None or kept.ends <= now:
            return None
        del self._ends[bisect_left(self._ends, (kept.ends, key, name))]
        kept.ends = int(now)
        insort(self._ends, (kept.ends, key, name))
        kept.grant = replace(kept.grant, until=in_utc(kept.ends))
        return kept.grant

    def of(self, key: str | None, now: float) -> list[_Kept]:
        """The grants of a key that have not ended."""
        return [each for each in self._kept.get(key or "", {}).values() if each.ends > now]

    def matching(self, pattern: str, now: float) -> list[Grant]:
        """The grants of the keys that match a glob pattern, sorted by key and time."""
        found = [
            each.grant
            for key in sorted(self._kept)
            if fnmatchcase(key, pattern)
            for each in self.of(key, now)
        ]
        return sorted(found, key=lambda grant: (grant.key, grant.given_at))

    def _forget(self, now: float) -> None:
        """Forget the grants that ended long ago, without a look at the others."""
        count = bisect_right(self._ends, now, key=lambda each: each[0] + COMPENSATED)
        for _, key, name in self._ends[:count]:
            del self._kept[key][name]
            if not self._kept[key]:
                del self._kept[key]
        del self._ends[:count]
