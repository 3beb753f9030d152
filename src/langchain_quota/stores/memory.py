"""Counts in the memory of one process, shared by its threads and event loops."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import chain, islice

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction, admit
from langchain_quota.errors import QuotaStoreError
from langchain_quota.runtime.arguments import validate_count
from langchain_quota.runtime.sync_async import Mode, fork_safe_lock
from langchain_quota.stores import (
    CORRECTED,
    GRACE,
    IDLE_TTL,
    REMEMBERED,
    Occupancy,
    QuotaUsage,
)
from langchain_quota.stores.common import (
    check_keys,
    check_request,
    demands_in_drain_time,
    idle_seconds,
    idle_time,
    metadata,
    replay,
)
from langchain_quota.stores.expiring_dict import ExpiringDict
from langchain_quota.stores.grants import Grant, SupportsGrants, in_utc
from langchain_quota.stores.keys import (
    FREEZES,
    drain_time,
    drained_amount,
    freezes_of,
    read_emission_interval,
    window_end,
)
from langchain_quota.stores.rate_limiter import RateLimiting

_REMEMBERED_AT_MOST = 100_000
"""A result takes about three times the memory of a count."""


class MemoryStore(SupportsGrants, RateLimiting):
    """A `QuotaStore` in the memory of one process; its threads and event loops share it.

    It never waits for anything but its own lock, so the async forms are the same as the sync ones.
    Its counts end with the process; other processes do not see them.

    Args:
        max_keys: Most counts that are kept, from 1. When the store is full, it drops counts that
            agents can bring back: of runs, and of threads whose state has the count, too; the one
            that was charged longest ago goes first. Counts of users and windows, and others that
            only the store has, are never dropped. If only such counts are left, a charge that
            needs a new one is refused with a `QuotaStoreError`. Only calls that ran in an outage
            are counted beyond `max_keys`. The store also remembers the
            latest results, corrections and refused attempts: at most `max_keys` of each, and at
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
        validate_count("max_keys", max_keys, least=1, what="a whole number")
        self._max_keys = max_keys
        self._idle = idle_seconds(idle_ttl)
        self._counts = _Counts()
        remembered = min(max_keys, _REMEMBERED_AT_MOST)
        self._results: ExpiringDict[StoredResult] = ExpiringDict(remembered)
        self._attempts: ExpiringDict[StoredResult] = ExpiringDict(remembered)
        self._corrected: ExpiringDict[bool] = ExpiringDict(remembered)
        self._settled: ExpiringDict[bool] = ExpiringDict(remembered)
        self._grants: ExpiringDict[list[StoredGrant]] = ExpiringDict()
        self.clock = clock
        self._lock = fork_safe_lock()

    def __repr__(self) -> str:
        return f"MemoryStore(keys={len(self._counts.all)}, max_keys={self._max_keys})"

    @property
    def occupancy(self) -> Occupancy:
        """How full it is."""
        return Occupancy(len(self._counts.all), len(self._counts.droppable), self._max_keys)

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        """Admit each call of a batch against all of its limits; see `QuotaStore.acquire`."""
        check_request(request)
        with self._lock:
            now = self.clock()
            for correction in request.corrections:
                self._correct(correction, now)
            if self._attempts.get(request.attempt_id, now) is REFUSED:
                raise QuotaStoreError("the attempt was corrected before it arrived")
            stored = self._results.get(request.idempotency_key, now)
            return self._admit(request, now) if stored is None else replay(stored.result, request)

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """Return what is counted under keys, in their order; `None` where nothing is."""
        check_keys(keys)
        with self._lock:
            now = self.clock()
            return tuple(self._use(key, now) for key in keys)

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0, and keep the keys; see `QuotaStore.reset`."""
        check_keys(keys, of_counts=True)
        with self._lock:
            now = self.clock()
            self._make_room(keys, now)
            for key in keys:
                count = self._counts.get(key, now)
                self._write(key, count, 0, window_end(key), now).holds = None

    def usages(self, pattern: str = "*") -> list[QuotaUsage]:
        """Return what is counted under the keys that match a glob pattern, sorted by key.

        Args:
            pattern: As in Python's `fnmatch.fnmatchcase`.
        """
        with self._lock:
            now = self.clock()
            keys = sorted(key for key in self._counts.all if fnmatchcase(key, pattern))
            uses = [self._use(key, now) for key in keys]
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

    async def _delay(self, _: Mode, key: str, microseconds: int) -> None:
        with self._lock:
            now = self.clock()
            self._make_room([key], now)
            count = self._counts.get(key, now)
            level = max(microseconds, 0 if count is None else count.at(key, now))
            # What was held before gives back nothing of the delay.
            self._write(key, count, level, None, now).charged += microseconds

    async def _grant(self, _: Mode, grant: Grant) -> tuple[Grant | None, bool]:
        with self._lock:
            now = self.clock()
            self._grants.purge(now)
            by_id = {
                stored_grant.grant.id: stored_grant
                for stored_grant in self._granted(grant.key, now - CORRECTED)
            }
            # A freeze takes the place of an earlier one.
            if grant.id in by_id and grant.amount:
                return by_id[grant.id].grant, False
            new = by_id[grant.id] = StoredGrant(grant)
            if new.ends <= now:
                return None, False
            last = max(stored_grant.ends for stored_grant in by_id.values())
            self._grants.put(grant.key, [*by_id.values()], last + CORRECTED)
            count = self._counts.get(grant.key, now)
            if count is not None:
                # The count's idle time is reset, as after a charge.
                self._write(grant.key, count, count.used, count.ends, now)
            return grant, True

    async def _revoke(self, _: Mode, key: str, name: str) -> Grant | None:
        with self._lock:
            now = self.clock()
            for stored_grant in self._granted(key, now):
                if stored_grant.grant.id == name:
                    stored_grant.grant = replace(stored_grant.grant, until=in_utc(int(now)))
                    return stored_grant.grant
        return None

    def _active_grants(self, pattern: str) -> list[Grant]:
        with self._lock:
            now = self.clock()
            keys = [key for key in self._grants.all if fnmatchcase(key, pattern)]
            return [stored_grant.grant for key in keys for stored_grant in self._granted(key, now)]

    def _granted(self, key: str | None, now: float) -> list["StoredGrant"]:
        """Return the grants that have not ended."""
        grants, _ = self._grants.all.get(key or "", ((), 0))
        return [stored_grant for stored_grant in grants if stored_grant.ends > now]

    def _use(self, key: str, now: float) -> QuotaUsage | None:
        count, granted = self._counts.get(key, now), _amount(self._granted(key, now))
        if count is not None:
            used, rolled_over = drained_amount(key, count.at(key, now)), count.rolled_over
            granted += rolled_over or 0
            return QuotaUsage(key, used, count.limit, count.ends, granted, rolled_over)
        return QuotaUsage(key, 0, None, window_end(key), granted) if granted else None

    def _correct(self, correction: Correction, now: float) -> None:
        done = self._settled if correction.settles else self._corrected
        if done.get(correction.id, now):
            return
        done.remember(correction.id, True, REMEMBERED if correction.settles else CORRECTED, now)
        if correction.attempt_id:
            self._undo(correction.attempt_id, now)
        if self._results.get(correction.idempotency_key, now) is None:
            for key, amount in correction.amounts.items():
                count, added = self._counts.get(key, now), drain_time(key, amount)
                if count is not None and correction.settles:
                    drained = count.lower(math.inf, correction.settles, count.level(key, now))
                    added = max(0, added - drained) if added > 0 else added
                if added > 0:
                    start = drain_time(key, correction.starts.get(key, 0))
                    used = start if count is None else count.at(key, now)
                    # Calls that have run are counted even if the store is full.
                    count = self._write(key, count, used + added, window_end(key), now)
                    count.limit = correction.limits.get(key, count.limit)
                elif count is not None:
                    count.lower(-added)

    def _undo(self, attempt_id: str, now: float) -> None:
        stored = self._attempts.get(attempt_id, now)
        self._attempts.remember(attempt_id, REFUSED, REMEMBERED, now)
        if stored is None:
            return
        if self._results.get(stored.name, now) is stored:
            self._results.remove(stored.name)
        for key, amount, is_held in stored.charged:
            count = self._counts.get(key, now)
            if count is not None:
                held_by = stored.name if is_held else None
                count.lower(amount, held_by, count.level(key, now))

    def _admit(self, request: AcquireRequest, now: float) -> AcquireResult:
        used, grants, granted, drained_in = {}, {}, {}, {}
        self._roll_over(request, now)
        for name, counter in request.counters.items():
            key = counter.key
            count = None if key is None else self._counts.get(key, now)
            added = (count.rolled_over or 0) if count else 0
            used[name] = count.at(key, now) if count else drain_time(key, counter.used)
            if read_emission_interval(key):
                drained_in[name] = used[name]
            if counter.key in self._grants.all:
                grants[name] = self._granted(counter.key, now)
                added += _amount(grants[name])
            if added:
                granted[name] = added
        demands = demands_in_drain_time(request) if drained_in else request.demands
        freezes, frozen = set[str](), list[str]()
        if FREEZES in self._grants.all:
            freezes = {stored_grant.grant.id for stored_grant in self._granted(FREEZES, now)}
            frozen = [
                name
                for name, counter in request.counters.items()
                if not freezes.isdisjoint(freezes_of(counter.key or ""))
            ]
        result = admit(demands, used, request.stops, granted, frozen)
        charged = result.charged(demands)
        if freezes:
            result = replace(result, freezes=len(freezes))
        if drained_in:
            counters = request.counters
            used |= {n: drained_amount(counters[n].key, time) for n, time in drained_in.items()}
            result = replace(result, drained_in=drained_in)
        self._charge(request, charged, result, now)
        newly = {
            name: [stored_grant for stored_grant in given if stored_grant.is_new]
            for name, given in grants.items()
        }
        for stored_grant in chain.from_iterable(newly.values()):
            stored_grant.is_new = False
        new = {name: _amount(given) for name, given in newly.items() if given}
        return replace(result, newly_granted=new) if new else result

    def _roll_over(self, request: AcquireRequest, now: float) -> None:
        """Fix what rolls over to counts with the first request of their windows."""
        for counter in request.counters.values():
            key, rollover = counter.key, counter.rollover
            if key is None or rollover is None:
                continue
            count, previous = self._counts.get(key, now), self._counts.get(rollover.previous, now)
            if count is None or count.rolled_over is None:
                self._make_room([key], now)
                count = count or Count(counter.used)
                count.rolled_over = rollover.of(previous.used if previous else 0)
                self._counts.put(key, count, rollover.kept_until + GRACE)
                self._write(key, count, count.used, window_end(key), now)

    def _charge(
        self,
        request: AcquireRequest,
        charged: Mapping[str, int],
        result: AcquireResult,
        now: float,
    ) -> None:
        charges = [
            (counter, counter.key, amount)
            for name, amount in charged.items()
            if amount and (counter := request.counters[name]).key is not None
        ]
        if not charges:
            return
        beside, stored = metadata(request), StoredResult(request.idempotency_key, result, [])
        self._make_room([key for _, key, _ in charges], now)
        for counter, key, added in charges:
            # Another counter with this key may have been charged just now.
            known = self._counts.get(key, now)
            used = known.at(key, now) if known else drain_time(key, counter.used)
            count = self._write(key, known, used + added, beside[key].ends, now)
            count.limit = beside[key].limit
            self._counts.droppable.pop(key, None)
            if beside[key].mirrored:
                self._counts.droppable[key] = None
            if counter.lease is not None:
                count.hold(request.idempotency_key, added, int(now) + counter.lease + 1)
            stored.charged.append((key, added, counter.lease is not None))
        self._results.remember(request.idempotency_key, stored, REMEMBERED, now)
        self._attempts.remember(request.attempt_id, stored, REMEMBERED, now)

    def _write(
        self, key: str, known: "Count | None", used: int, ends: int | None, now: float
    ) -> "Count":
        count = known or Count()
        expires = now + idle_time(key, self._idle) if ends is None else max(ends, now) + GRACE
        if read_emission_interval(key):
            count.charged += max(0, used - count.at(key, now))
            count.used, expires = used + _micros(now), now + used / 10**6 + GRACE
            count.changed_at = _micros(now)
        else:
            count.used = used
        count.ends = ends
        # Never earlier than before.
        _, least = self._counts.all.get(key, (None, expires))
        self._counts.put(key, count, max(expires, least))
        return count

    def _make_room(self, keys: Iterable[str], now: float) -> None:
        counts, wanted = self._counts, set(keys)
        counts.purge(now)
        while (excess := len(counts.all) + len(wanted.difference(counts.all)) - self._max_keys) > 0:
            if counts.purge(now, 1):
                continue
            droppable = (key for key in counts.droppable if key not in wanted)
            dropped = [*islice(droppable, excess)]
            if len(dropped) < excess:
                raise QuotaStoreError(
                    f"the store is full: it keeps {self._max_keys} counts at most"
                )
            for key in dropped:
                counts.remove(key)


@dataclass(slots=True)
class StoredGrant:
    """A grant, and whether a call has been checked by it."""

    grant: Grant
    is_new: bool = True

    @property
    def ends(self) -> int:
        """When it ends, in seconds since the Unix epoch."""
        return self.grant.ends or 0


def _amount(grants: Iterable[StoredGrant]) -> int:
    return sum(grant.grant.amount for grant in grants)


@dataclass(slots=True, eq=False)
class StoredResult:
    """The answer to a request, and each key and amount that it charged, and whether it is held."""

    name: str
    result: AcquireResult
    charged: list[tuple[str, int, bool]]


REFUSED = StoredResult("", AcquireResult({}), [])
"""What an attempt that is corrected has charged."""


def _micros(now: float) -> int:
    return int(now * 10**6)


@dataclass(slots=True)
class Count:
    """What is kept under a key; `used` includes what is held. If it drains, it is when it is 0."""

    used: int = 0
    limit: int | None = None
    ends: int | None = None
    holds: dict[str, tuple[int, int, int]] | None = None
    """What is held, until when, and what was `charged` by then, by the request that holds it."""
    next_end: float = math.inf
    """No lease of the holds ends before this time."""
    changed_at: int = 0
    """If it drains, when it was last changed: a clock that goes back takes the count with it."""
    charged: int = 0
    """If it drains, all that was ever added to it."""
    rolled_over: int | None = None
    """What rolled over from the window before; `None` before it is fixed."""

    def level(self, key: str, now: float) -> int | None:
        """Return the count at a time, in microseconds, if it drains; `None` for any other."""
        return self.at(key, now) if read_emission_interval(key) else None

    def at(self, key: str | None, now: float) -> int:
        """Return the count at a time; in microseconds if it drains."""
        return max(0, self.used - _micros(now)) if read_emission_interval(key) else self.used

    def hold(self, name: str, amount: int, ends: int) -> None:
        """Note that a request only holds, until its lease ends, so much of what it has charged."""
        self.holds = self.holds or {}
        held, last, charged = self.holds.get(name, (0, ends, self.charged))
        self.holds[name] = (held + amount, max(ends, last), charged)
        self.next_end = min(ends, self.next_end)

    def lower(self, amount: float, held_by: str | None = None, level: int | None = None) -> int:
        """Subtract an amount; if a request is named, no more than it still holds.

        Return the part of it that has drained, which is not subtracted again.

        Args:
            amount: In microseconds if the count drains.
            held_by: The idempotency key of a request.
            level: The count now if it drains.
        """
        drained = 0
        if held_by is not None:
            held, ends, charged = (self.holds or {}).pop(held_by, (0, 0, 0))
            amount = min(amount, held)
            if held > amount and self.holds is not None:
                self.holds[held_by] = (held - int(amount), ends, charged)
            if level is not None:
                # A count drains in the order of charges. So what was charged later is left first.
                drained = int(amount) - max(0, min(int(amount), level - self.charged + charged))
        self.used = max(0, self.used - int(amount) + drained)
        return drained

    def end_leases(self, key: str, now: float) -> None:
        """Release what is held by leases that are over."""
        holds = self.holds or {}
        for name in [name for name, (_, ends, _) in holds.items() if ends <= now]:
            self.lower(math.inf, name, self.level(key, now))
        self.next_end = min((ends for _, ends, _ in holds.values()), default=math.inf)


class _Counts(ExpiringDict[Count]):
    """The counts, and the keys of those that callers mirror: the oldest charge comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.droppable: OrderedDict[str, None] = OrderedDict()

    def get(self, name: str, now: float) -> Count | None:
        count = super().get(name, now)
        if count is not None and 0 < _micros(now) < count.changed_at:
            count.used = max(0, count.used - count.changed_at + _micros(now))
            count.changed_at = _micros(now)
        if count is not None and count.next_end <= now:
            count.end_leases(name, now)
        return count

    def remove(self, name: str) -> None:
        self.droppable.pop(name, None)
        super().remove(name)
