"""Counts in the memory of one process, shared by its threads and event loops."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, Counter, admit
from langchain_quota.arguments import check_count
from langchain_quota.errors import QuotaStoreError
from langchain_quota.locks import fork_safe_lock
from langchain_quota.stores import (
    COMPENSATED,
    IDLE_TTL,
    Occupancy,
    QuotaUsage,
    check_fits,
    check_keys,
    check_request,
    idle_seconds,
    metadata,
    window_end,
)
from langchain_quota.stores.grants import Grant, Granting
from langchain_quota.stores.memory_tables import Counts, Grants, Recent

_REMEMBERED_AT_MOST = 100_000
"""A result takes about three times the memory of a count."""


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
        self._counts = Counts(max_keys, self._idle)
        remembered = min(max_keys, _REMEMBERED_AT_MOST)
        self._results: Recent[_Acquired] = Recent(remembered)
        self._attempts: Recent[_Acquired] = Recent(remembered)
        self._refused: Recent[bool] = Recent(remembered)
        self._compensated: Recent[bool] = Recent(remembered, COMPENSATED)
        self._settled: Recent[bool] = Recent(remembered)
        self._grants = Grants()
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
        granted = self._grants.amount(key, now)
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

    def _undo(self, attempt_id: str, now: float) -> None:
        made = self._attempts.get(attempt_id, now)
        if made is None:
            return
        self._attempts.forget(attempt_id)
        if self._results.get(made.idempotency_key, now) is made:
            self._results.forget(made.idempotency_key)
        for key, amount in made.amounts.items():
            held = made.held.get(key, 0)
            self._counts.give_back(key, made.idempotency_key, now, held)
            self._add(key, held - amount, now)

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
        used = {name: self._used(counter, now) for name, counter in request.counters.items()}
        granted: dict[str, int] = {}
        if self._grants:
            keys = {name: each.key for name, each in request.counters.items() if each.key}
            granted = {name: self._grants.amount(key, now) for name, key in keys.items()}
            granted = {name: amount for name, amount in granted.items() if amount}
        result = admit(request.hits, used, request.stops, granted)
        charged = result.charged(request.hits)
        amounts = {key: amount for key, amount in request.keyed(charged).items() if amount}
        if amounts:
            self._make_room(amounts, now)
            beside = metadata(request)
            held: dict[str, int] = {}
            for name, counter in request.counters.items():
                if counter.key is not None and charged[name]:
                    # Another counter with this key may have been charged just now.
                    count = self._used(counter, now) + charged[name]
                    ends = beside[counter.key].ends
                    self._counts.put(counter.key, count, ends, now, beside[counter.key])
                    if counter.lease is not None:
                        over = int(now) + counter.lease + 1
                        self._counts.hold(counter.key, request.idempotency_key, charged[name], over)
                        held[counter.key] = held.get(counter.key, 0) + charged[name]
            made = _Acquired(request.idempotency_key, result, amounts, held)
            if request.idempotency_key:
                self._results.put(request.idempotency_key, made, now)
            if request.attempt_id:
                self._attempts.put(request.attempt_id, made, now)
        if granted:
            new = {key: self._grants.take_new(key, now) for key in {keys[name] for name in granted}}
            newly = {name: new[keys[name]] for name in granted if new[keys[name]]}
            result = replace(result, newly_granted=newly)
        return result

    def _make_room(self, keys: Collection[str], now: float) -> None:
        """Make room for counts."""
        if not self._counts.make_room(keys, now):
            most = self._counts.max_keys
            raise QuotaStoreError(f"the store is full: it keeps {most} counts at most")


@dataclass(slots=True, eq=False)
class _Acquired:
    """What a request charged, and how much of it it only held, by key; and its answer."""

    idempotency_key: str
    result: AcquireResult
    amounts: dict[str, int]
    held: dict[str, int]
