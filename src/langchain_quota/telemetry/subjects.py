"""The bounded table of what users, tenants and other subjects of quotas have used."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from langchain_quota.decision import Decision, Level, QuotaUse, Standing, level
from langchain_quota.limits import Scope
from langchain_quota.locks import fork_safe_lock
from langchain_quota.telemetry.windows import Windows

MAX_TRACKED = 100_000
"""The most subjects that a table remembers; beyond it the longest idle is forgotten."""

_EXPIRED_PER_UPDATE = 2
_EXPIRED_PER_SCRAPE_STEP = 50


class Series(NamedTuple):
    """What subjects are counted by."""

    agent: str
    limit: str
    scope: Scope


class Subject(NamedTuple):
    """Whose use of which quota."""

    series: Series
    digest: bytes


@dataclass(frozen=True, slots=True)
class SubjectUse:
    """How much of a quota a subject has used, as the last decision told."""

    level: Level
    ends: tuple[float, ...]
    last_decision: float


class SubjectTable:
    """Subjects by recency, with how much of a quota each has used; threads have their own table.

    Args:
        near: The share from which a limit is near.
        ttl: How long, in seconds, a subject without decisions is remembered.
        max_tracked: The most subjects that are remembered.
        clock: The time in seconds since the Unix epoch.
    """

    def __init__(
        self,
        *,
        near: float,
        ttl: float,
        max_tracked: int = MAX_TRACKED,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._near = near
        self._ttl = ttl
        self._max_tracked = max_tracked
        self._clock = clock
        self._on_change: Callable[[], object] | None = None
        self._lock = fork_safe_lock()
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            self._entries: OrderedDict[Subject, SubjectUse] = OrderedDict()
            self._windows: Windows[Subject] = Windows()
            self._counts: dict[Series, dict[Level, int]] = {}

    def listen(self, on_change: Callable[[], object]) -> None:
        """Tell a function, which must not block, whenever a decision has changed the table."""
        self._on_change = on_change

    def contents(self) -> tuple[dict[Subject, SubjectUse], list[Series]]:
        """All subjects, in no order, and what has or had any."""
        with self._lock:
            # Of the underlying dict: in an OrderedDict's order it takes longer than decisions
            # should have to wait.
            return dict.copy(self._entries), list(self._counts)

    def record(self, agent: str, decisions: Iterable[Decision]) -> None:
        """Take in the decisions about calls of one agent, in order; its label is given."""
        newest = {
            (Series(agent, standing.limit, quota.scope), quota.subject): (standing, quota)
            for decision in decisions
            for standing in decision.standings
            if standing.quotas
            for quota in standing.quotas
            if not quota.per_thread
        }
        found = [
            (Subject(series, _digest(subject)), *use) for (series, subject), use in newest.items()
        ]
        for key, standing, quota in found:
            with self._lock:
                now = self._clock()
                self._forget(key)
                # As of threads, only limits above 0 that are enforced say how much is used.
                if standing.enforced and quota.limit:
                    self._remember(key, self._entry(standing, quota, now))
                self._expire(now, _EXPIRED_PER_UPDATE)
                if len(self._entries) > self._max_tracked:
                    self._forget(next(iter(self._entries)))
        if found and self._on_change is not None:
            self._on_change()

    def counts(self) -> dict[Series, dict[Level, int]]:
        """How many subjects have used how much."""
        self._expire_all()
        with self._lock:
            return {series: dict(counts) for series, counts in self._counts.items()}

    def _entry(self, standing: Standing, quota: QuotaUse, now: float) -> SubjectUse:
        near = self._near if standing.near is None else standing.near
        used = quota.before if standing.deferred else quota.used
        ends = () if quota.resets_at is None else (quota.resets_at.timestamp(),)
        return SubjectUse(level(used, quota.limit, near), ends, now)

    def _remember(self, key: Subject, entry: SubjectUse) -> None:
        self._entries[key] = entry
        self._windows.add(key, entry.ends)
        counts = self._counts.get(key.series)
        if counts is None:
            counts = self._counts[key.series] = dict.fromkeys(Level, 0)
        counts[entry.level] += 1

    def _forget(self, key: Subject) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._windows.discard(key, entry.ends)
            self._counts[key.series][entry.level] -= 1

    def _expire(self, now: float, most: int) -> bool:
        """Forget subjects that are idle or past their window, at most so many.

        Returns:
            Whether there may be more.
        """
        for _ in range(most):
            idle = next(iter(self._entries), None)
            if idle is not None and now - self._entries[idle].last_decision > self._ttl:
                self._forget(idle)
            elif (passed := self._windows.pop_passed(now)) is not None:
                self._forget(passed)
            else:
                return False
        return True

    def _expire_all(self) -> None:
        more = True
        while more:
            with self._lock:
                more = self._expire(self._clock(), _EXPIRED_PER_SCRAPE_STEP)


def _digest(subject: str) -> bytes:
    """What is remembered of a subject: users are told apart, and their names not kept."""
    return hashlib.blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=16).digest()
