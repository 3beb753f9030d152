"""Counts in the memory of one process, shared by its threads and event loops."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

from langchain_quota.core.admission import (
    AcquireRequest,
    AcquireResult,
    Correction,
    CountRef,
    admit,
)
from langchain_quota.runtime.arguments import validate_count, validate_type
from langchain_quota.runtime.expiring_dict import ExpiringDict
from langchain_quota.runtime.store_errors import AttemptCorrectedError
from langchain_quota.runtime.sync_async import T, fork_safe_lock
from langchain_quota.stores import CORRECTED, GRACE, IDLE_TTL, REMEMBERED, Occupancy, QuotaUsage
from langchain_quota.stores.base import Operation
from langchain_quota.stores.counts import (
    Count,
    Counts,
    Entry,
    check_held,
    check_request,
    demands_in_drain_time,
    idle_seconds,
    level_of,
    replay,
    smallest_limits,
)
from langchain_quota.stores.grants import Grant, SupportsGrants, in_utc
from langchain_quota.stores.keys import (
    COUNT,
    FREEZES,
    NEAR,
    NOTES,
    digest,
    drain_time,
    drained_amount,
    freeze_entry,
    grant_entry,
    hold_entry,
    is_freezes,
    read_emission_interval,
    window_end,
)

RESULT, ATTEMPT, CORRECTION, SETTLEMENT = "result", "attempt", "corrected", "settled"
"""What is kept beside counts and the notes of their grants."""

_REMEMBERED_AT_MOST = 100_000
"""A result takes about three times the memory of a count."""

ROLLOVER = "rollover"
"""The name of the entry of what rolled over from the window before."""

_NEVER = 2**52
"""A time that never comes, in seconds."""


class Attempt(NamedTuple):
    """The name of its request, and each key and amount that it charged, and whether it is held."""

    request: str
    charged: list[tuple[str, int, bool]]


REFUSED = Attempt("", [])
"""An attempt that was corrected: it is refused if it arrives later."""


class Tables:
    """What is kept, and what each operation does to it at one moment.

    A `MemoryStore` keeps all in one; a server, the rows from which one is made for an operation.
    """

    def __init__(self, max_keys: int, idle: int) -> None:
        self.now = 0.0
        """The moment, in seconds since the Unix epoch."""
        remembered = min(max_keys, _REMEMBERED_AT_MOST)
        self.counts = Counts(max_keys, idle)
        # Who gave each grant of a count, and why, by id.
        self.notes: ExpiringDict[dict[str, Grant]] = ExpiringDict()
        self._results: ExpiringDict[AcquireResult] = ExpiringDict(remembered)
        self._attempts: ExpiringDict[Attempt] = ExpiringDict(remembered)
        self.by_kind: dict[str, ExpiringDict[Any]] = {
            COUNT: self.counts,
            NOTES: self.notes,
            RESULT: self._results,
            ATTEMPT: self._attempts,
            CORRECTION: ExpiringDict(remembered),
            SETTLEMENT: ExpiringDict(remembered),
        }

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        """Admit each call of a batch against all of its limits; see `QuotaStore.acquire`."""
        now = self.now
        for correction in request.corrections:
            self._correct(correction, now)
        if self._attempts.get(request.attempt_id, now) == REFUSED:
            raise AttemptCorrectedError
        stored = self._results.get(request.idempotency_key, now)
        return self._admit(request, now) if stored is None else replay(stored, request)

    def peek(self, keys: Iterable[str]) -> dict[str, QuotaUsage | None]:
        """Return what is counted under keys."""
        return {key: self._use(key, self.now) for key in keys}

    def entries(self, keys: Iterable[str]) -> dict[str, QuotaUsage | None]:
        """Return what is counted under those of the keys that have something."""
        return {key: use for key, use in self.peek(keys).items() if use is not None}

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0, and keep the keys; see `QuotaStore.reset`."""
        self.counts.make_room(keys, self.now)
        for key in keys:
            count = self.counts.get(key, self.now)
            count = self.counts.write(key, count, 0, window_end(key), self.now)
            count.entries = {
                name: each
                for name, each in count.entries.items()
                if each.amount <= 0 and not name.startswith(NEAR)
            }

    def mark(self, key: str, limit: str, thresholds: Sequence[int]) -> tuple[int | None, int]:
        """Mark which threshold a limit's settled use has passed; see `SupportsGrants.mark`."""
        count, entry = self.counts.get(key, self.now), f"{NEAR}{digest(limit)}"
        if count is None or count.used is None:
            return None, 0
        used = count.used - sum(max(0, each.amount) for each in count.entries.values())
        marked = count.entries.get(entry, Entry(0, _NEVER)).place
        passed = max((number for number in thresholds if number <= used), default=0)
        if passed <= marked:
            return None, marked
        count.entries[entry] = Entry(0, _NEVER, passed)
        return used, passed

    def delay(self, key: str, microseconds: int) -> None:
        """Have a count drain no sooner than in so many microseconds."""
        now = self.now
        self.counts.make_room([key], now)
        count = self.counts.get(key, now)
        level = max(microseconds, level_of(count, now))
        count = self.counts.write(key, count, level, None, now)
        # What was held before gives back nothing of the delay.
        for name, entry in count.entries.items():
            count.entries[name] = entry._replace(place=entry.place - microseconds)

    def grant(self, grant: Grant) -> tuple[Grant | None, bool]:
        """Return the stored grant and whether it is new; `None` if it would have ended."""
        now, key, until = self.now, grant.key, grant.ends or 0
        notes = self._notes_of(key, now - CORRECTED)
        # A freeze takes the place of an earlier one.
        if grant.id in notes and grant.amount:
            return notes[grant.id], False
        if until <= now:
            return None, False
        notes[grant.id] = grant
        last = max(note.ends or 0 for note in notes.values())
        self.notes.put(key, notes, last + CORRECTED, now)
        # The count's idle time is reset, as after a charge.
        count = self.counts.get(key, now)
        used, ends = (count.used, count.ends) if count else (None, window_end(key))
        count = self.counts.write(key, count, used, ends, now, until)
        self.counts.droppable.pop(key, None)
        entry = grant_entry(grant.id)
        count.drop(entry, now)
        count.grant(entry, grant.amount or 1, until, grant.amount)
        return grant, True

    def revoke(self, key: str, name: str) -> Grant | None:
        """End a grant and return it; `None` if there is none."""
        grant, count = self._notes_of(key, self.now).get(name), self.counts.get(key, self.now)
        if grant is not None:
            grant = self.notes.all[key][0][name] = replace(grant, until=in_utc(int(self.now)))
            if count is not None:
                count.drop(grant_entry(name), self.now)
        return grant

    def grants(self, keys: Iterable[str]) -> list[Grant]:
        """Return the grants under keys that have not ended."""
        return [grant for key in keys for grant in self._notes_of(key, self.now).values()]

    def _notes_of(self, key: str, now: float) -> dict[str, Grant]:
        """Return the grants that have not ended, by id."""
        notes, _ = self.notes.all.get(key, ({}, 0))
        return {name: grant for name, grant in notes.items() if (grant.ends or 0) > now}

    def _use(self, key: str, now: float) -> QuotaUsage | None:
        # A server writes nothing when it reads: the count does not follow a clock that goes back.
        kept = ExpiringDict.get(self.counts, key, now)
        count = kept and replace(kept, entries={**kept.entries})
        if count is not None:
            count.update(now)
        if count is None or is_freezes(key) or (count.used is None and not count.raised):
            return None
        used, rolled = drained_amount(key, level_of(count, now)), count.entries.get(ROLLOVER)
        ends = window_end(key) if count.ends is None else count.ends
        return QuotaUsage(
            key, used, count.limit, ends, count.raised, None if rolled is None else -rolled.amount
        )

    def _correct(self, correction: Correction, now: float) -> None:
        done = self.by_kind[SETTLEMENT if correction.settles else CORRECTION]
        if done.get(correction.id, now):
            return
        lasts = REMEMBERED if correction.settles else CORRECTED
        done.put(correction.id, True, now + lasts, now)
        if correction.attempt_id:
            self._undo(correction.attempt_id, now)
        if self._results.get(correction.idempotency_key, now) is None:
            for key, amount in correction.amounts.items():
                count, added = self.counts.get(key, now), drain_time(key, amount)
                if count is not None and correction.settles:
                    drained = count.drop(hold_entry(correction.settles), now)
                    added = max(0, added - drained) if added > 0 else added
                if added > 0:
                    used = level_of(count, now, key, correction.starts.get(key, 0))
                    # Calls that have run are counted even if the store is full.
                    count = self.counts.write(key, count, used + added, window_end(key), now)
                    count.limit = correction.limits.get(key, count.limit)
                    if key in correction.starts:
                        self.counts.note_charge(key, mirrored=key in correction.mirrored)
                elif count is not None and count.used is not None:
                    count.lower(-added)

    def _undo(self, attempt_id: str, now: float) -> None:
        name, charged = self._attempts.get(attempt_id, now) or REFUSED
        self._attempts.put(attempt_id, REFUSED, now + REMEMBERED, now)
        if self._results.get(name, now) is not None:
            self._results.remove(name)
        for key, amount, is_held in charged:
            count = self.counts.get(key, now)
            if count is not None and is_held:
                count.drop(hold_entry(name), now, amount)
            elif count is not None and count.used is not None:
                count.lower(amount)

    def _admit(self, request: AcquireRequest, now: float) -> AcquireResult:
        counters = request.counters
        self.roll_over(request)
        used, granted, new, drained_in = {}, {}, {}, {}
        counts: dict[str, Count | None] = {}
        for name, counter in counters.items():
            key, used[name] = counter.key, counter.used
            if key is None:
                continue
            count = counts[key] = self.counts.get(key, now)
            used[name] = level_of(count, now, key, counter.used)
            if "~" in key and read_emission_interval(key):
                drained_in[name] = used[name]
            if count is not None and count.raised:
                granted[name] = count.raised
                new[name] = count.fresh
        frozen, freezes = self._frozen(counters, now)
        demands = demands_in_drain_time(request) if drained_in else request.demands
        result = admit(demands, used, request.stops, granted, frozen)
        charged = result.charged(demands)
        if freezes or drained_in or new:
            used |= {n: drained_amount(counters[n].key, time) for n, time in drained_in.items()}
            result = result._replace(
                newly_granted={name: amount for name, amount in new.items() if amount},
                drained_in=drained_in,
                freezes=freezes,
            )
        self._charge(request, charged, result, counts, now)
        for name in result.newly_granted:
            count, _ = self.counts.all[counters[name].key or ""]
            count.fresh, count.checked = 0, count.checked + 1
        return result

    def _frozen(self, counters: Mapping[str, CountRef], now: float) -> tuple[list[str], int]:
        """Return the names of the counters whose subjects are frozen, and how many freezes are."""
        row, _ = self.counts.all.get(FREEZES, (None, 0))
        # What has ended stays there: in a database, requests do not lock this row.
        freezes = {n for n, entry in row.entries.items() if entry.until > now} if row else set()
        if not freezes:
            return [], 0
        frozen = []
        for name, counter in counters.items():
            freeze = freeze_entry(counter.key or "")
            if freeze and not freezes.isdisjoint((freeze, grant_entry(FREEZES))):
                frozen.append(name)
        return frozen, len(freezes)

    def roll_over(self, request: AcquireRequest) -> None:
        """Fix what rolls over to counts with the first request of their windows."""
        now = self.now
        for counter in request.counters.values():
            key, rollover = counter.key, counter.rollover
            if key is None or rollover is None:
                continue
            count, previous = self.counts.get(key, now), self.counts.get(rollover.previous, now)
            if count is None or ROLLOVER not in count.entries:
                self.counts.make_room([key], now)
                rest = rollover.of((previous.used or 0) if previous else 0)
                until, level = rollover.kept_until + GRACE, level_of(count, now, key, counter.used)
                count = self.counts.write(key, count, level, window_end(key), now, until)
                # It ends with its count.
                count.grant(ROLLOVER, rest, _NEVER)

    def _charge(
        self,
        request: AcquireRequest,
        charged: Mapping[str, int],
        result: AcquireResult,
        counts: dict[str, Count | None],
        now: float,
    ) -> None:
        charges = [
            (counter, counter.key, amount)
            for name, amount in charged.items()
            if amount and (counter := request.counters[name]).key is not None
        ]
        if not charges:
            return
        limits, attempt = smallest_limits(request), Attempt(request.idempotency_key, [])
        only_here = {counter.key for counter in request.counters.values() if not counter.mirrored}
        self.counts.make_room([key for _, key, _ in charges], now)
        hold = ""
        for counter, key, _ in charges:
            if counter.lease is not None:
                hold, count = hold or hold_entry(request.idempotency_key), counts[key]
                if count is not None and count.changed_at is not None and hold not in count.entries:
                    check_held(key, len(count.entries))
        for counter, key, amount in charges:
            # Another counter with this key may have been charged just now.
            used = level_of(counts[key], now, key, counter.used) + amount
            ends = None if counter.expires_at is None else math.ceil(counter.expires_at)
            count = counts[key] = self.counts.write(key, counts[key], used, ends, now)
            count.limit = limits.get(key)
            self.counts.note_charge(key, mirrored=key not in only_here)
            if counter.lease is not None:
                count.hold(hold, amount, int(now) + counter.lease + 1)
            attempt.charged.append((key, amount, counter.lease is not None))
        if request.idempotency_key:
            self._results.put(request.idempotency_key, result, now + REMEMBERED, now)
        if request.attempt_id:
            self._attempts.put(request.attempt_id, attempt, now + REMEMBERED, now)


class MemoryStore(SupportsGrants):
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
        validate_type("clock", clock, Callable, "a function that returns seconds")
        self._idle = idle_seconds(idle_ttl)
        self._tables = Tables(max_keys, self._idle)
        self.clock = clock
        self._lock = fork_safe_lock()

    def __repr__(self) -> str:
        counts = self._tables.counts
        return f"MemoryStore(keys={len(counts.all)}, max_keys={counts.max_keys})"

    @property
    def occupancy(self) -> Occupancy:
        """How full it is."""
        counts = self._tables.counts
        return Occupancy(len(counts.all), len(counts.droppable), counts.max_keys)

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        """`acquire`, also that of a subclass; it does not block."""
        return self.acquire(request)

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        """Admit each call of a batch against all of its limits; see `QuotaStore.acquire`."""
        check_request(request)
        with self._lock:
            self._tables.now = self.clock()
            return self._tables.acquire(request)

    async def _run(
        self,
        keys: Sequence[str],
        operation: Operation[T],
        *,
        reads: bool = False,  # noqa: ARG002
    ) -> list[T]:
        with self._lock:
            self._tables.now = self.clock()
            return [operation(self._tables, keys)]

    def _keys(self, kind: str, _: str) -> list[str]:
        return [*self._tables.by_kind[kind].all]
