"""The bounded table of what each thread has used, read at scrape time."""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from threading import Lock

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from langchain_quota.decision import Decision, Level, level
from langchain_quota.telemetry.labels import label

MAX_TRACKED = 100_000
"""The most threads that a table remembers; beyond it the longest idle is forgotten."""

_EXPIRED_PER_UPDATE = 2
_EXPIRED_PER_SCRAPE_STEP = 50
_SEVERITY = {Level.OK: 0, Level.NEAR: 1, Level.EXHAUSTED: 2}


@dataclass(frozen=True, slots=True)
class LimitUse:
    """What a thread has used of one limit, in calls; `limit` is `None` without a thread limit."""

    used: int
    limit: int | None
    blocked: int = 0
    near: float = 1.0
    enforced: bool = True

    @property
    def rated(self) -> bool:
        """Whether the limit says how much of its quota the thread has used."""
        return self.limit is not None and self.enforced

    @property
    def share(self) -> float:
        """The used share of the thread limit, from 0."""
        return self.used / self.limit if self.limit and self.enforced else 0.0

    @property
    def level(self) -> Level:
        """How much of the thread limit is used."""
        if self.limit is None or not self.enforced:
            return Level.OK
        return level(self.used, self.limit, self.near)


@dataclass(frozen=True, slots=True)
class ThreadUse:
    """What one thread of one agent has used; replaced, never changed, so readers need no lock."""

    agent: str
    thread: str
    limits: Mapping[str, LimitUse]
    level: Level
    share: float
    last_decision: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one scrape exports."""

    threads: list[ThreadUse]
    subjects: dict[tuple[str, str], dict[Level, int]]
    hidden: dict[Level, int]


class ThreadTable(Collector):
    """Threads by recency, grouped by how much of their limits they have used.

    Args:
        near: The share from which a limit is near.
        max_exported: The most threads that a scrape exports.
        ttl: How long, in seconds, a thread without decisions is remembered.
        on_error: Told of an entry that could not be rendered.
        clock: The time in seconds since the Unix epoch.
    """

    def __init__(  # noqa: PLR0913 - keyword-only settings
        self,
        *,
        near: float,
        max_exported: int,
        ttl: float,
        on_error: Callable[[Exception], None],
        max_tracked: int = MAX_TRACKED,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._near = near
        self._max_exported = max_exported
        self._max_tracked = max_tracked
        self._ttl = ttl
        self._on_error = on_error
        self._clock = clock
        self._lock = Lock()
        self._threads: OrderedDict[tuple[str, str], ThreadUse] = OrderedDict()
        # Ordered by recency but for the near ones, of which a scrape needs all: a plain dict is
        # copied some ten times faster.
        self._by_level: dict[Level, dict[tuple[str, str], ThreadUse]] = {
            Level.OK: OrderedDict(),
            Level.NEAR: {},
            Level.EXHAUSTED: OrderedDict(),
        }
        self._subjects: dict[tuple[str, str], dict[Level, int]] = {}

    def record(self, agent: str, thread: str, decisions: Iterable[Decision]) -> None:
        """Take in the decisions about calls of one thread, in order; labels are given."""
        now = self._clock()
        key = (agent, thread)
        with self._lock:
            old = self._threads.get(key)
            limits = dict(old.limits) if old else {}
            refused = False
            for decision in decisions:
                for standing in decision.standings:
                    known = limits.get(standing.limit)
                    blocked = standing.refused and standing.enforced
                    refused = refused or blocked
                    limits[standing.limit] = LimitUse(
                        standing.thread_count,
                        standing.thread_limit or None,
                        (known.blocked if known else 0) + blocked,
                        self._near if standing.near is None else standing.near,
                        standing.enforced,
                    )
            self._put(key, limits, now, refused=refused)
            self._expire(now, _EXPIRED_PER_UPDATE)
            if len(self._threads) > self._max_tracked:
                self._forget(next(iter(self._threads)))

    def refund(self, agent: str, thread: str, limit: str, amount: int) -> None:
        """Take a charge back from what a thread has used of a limit."""
        key = (agent, thread)
        with self._lock:
            old = self._threads.get(key)
            if old is None or limit not in old.limits:
                return
            use = old.limits[limit]
            limits = {**old.limits, limit: replace(use, used=max(0, use.used - amount))}
            self._put(key, limits, self._clock(), refused=False)

    def forget(self, agent: str, thread: str) -> None:
        """Forget a thread, if it is tracked."""
        with self._lock:
            if (agent, thread) in self._threads:
                self._forget((agent, thread))

    def snapshot(self) -> Snapshot:
        """The threads to export: the near ones first, then the exhausted, then the recent."""
        self._expire_all()
        most = self._max_exported
        with self._lock:
            near = list(self._by_level[Level.NEAR].values())
            exhausted = _newest(self._by_level[Level.EXHAUSTED], most)
            rest = _newest(self._by_level[Level.OK], most)
            tracked = {each: len(group) for each, group in self._by_level.items()}
            subjects = {key: dict(counts) for key, counts in self._subjects.items()}
        nearest = heapq.nlargest(most, near, key=lambda use: (use.share, use.last_decision))
        chosen = [*nearest, *exhausted, *rest][:most]
        hidden = dict(tracked)
        for use in chosen:
            hidden[use.level] -= 1
        return Snapshot(chosen, subjects, hidden)

    def describe(self) -> Iterator[Metric]:
        """The families without samples: for the registry's check for duplicates."""
        return iter(_families().values())

    def collect(self) -> Iterator[Metric]:
        """Render a snapshot entry by entry: one that cannot be rendered is left out."""
        snapshot = self.snapshot()
        families = _families()
        for use in snapshot.threads:
            try:
                samples = list(_samples(use))
            except Exception as error:  # noqa: BLE001 - whatever one entry raises, the scrape goes on
                self._on_error(error)
                continue
            for name, labels, value in samples:
                families[name].add_metric(labels, value)
        for (agent, limit), counts in snapshot.subjects.items():
            for each, count in counts.items():
                families[_SUBJECTS].add_metric([agent, label(limit), "thread", each], count)
        for each, count in snapshot.hidden.items():
            families[_HIDDEN].add_metric([each], count)
        return iter(families.values())

    def _put(
        self, key: tuple[str, str], limits: Mapping[str, LimitUse], now: float, *, refused: bool
    ) -> None:
        old = self._threads.get(key)
        self._count(key[0], old, -1)
        use = ThreadUse(
            agent=key[0],
            thread=key[1],
            limits=limits,
            level=max(
                (each.level for each in limits.values()),
                key=_SEVERITY.__getitem__,
                default=Level.OK,
            ),
            share=max((each.share for each in limits.values()), default=0.0),
            last_decision=now,
        )
        self._count(key[0], use, +1)
        self._threads[key] = use
        self._threads.move_to_end(key)
        if old is not None and old.level is not use.level:
            del self._by_level[old.level][key]
        group = self._by_level[use.level]
        keeps_place = use.level is Level.EXHAUSTED and key in group and not refused
        group[key] = use
        if isinstance(group, OrderedDict) and not keeps_place:
            group.move_to_end(key)

    def _count(self, agent: str, use: ThreadUse | None, by: int) -> None:
        if use is None:
            return
        for limit, each in use.limits.items():
            if each.rated:
                counts = self._subjects.setdefault((agent, limit), dict.fromkeys(Level, 0))
                counts[each.level] += by

    def _forget(self, key: tuple[str, str]) -> None:
        use = self._threads.pop(key)
        del self._by_level[use.level][key]
        self._count(key[0], use, -1)

    def _expire(self, now: float, most: int) -> bool:
        """Forget idle threads, at most so many; whether there may be more."""
        for _ in range(most):
            key = next(iter(self._threads), None)
            if key is None or now - self._threads[key].last_decision <= self._ttl:
                return False
            self._forget(key)
        return True

    def _expire_all(self) -> None:
        more = True
        while more:
            with self._lock:
                more = self._expire(self._clock(), _EXPIRED_PER_SCRAPE_STEP)


_USED = "langchain_quota_thread_used"
_LIMIT = "langchain_quota_thread_limit"
_BLOCKED = "langchain_quota_thread_blocked"
_TIMESTAMP = "langchain_quota_thread_last_decision_timestamp_seconds"
_SUBJECTS = "langchain_quota_subjects"
_HIDDEN = "langchain_quota_threads_hidden"


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    thread = ["agent", "limit", "thread_id"]
    families: tuple[GaugeMetricFamily | CounterMetricFamily, ...] = (
        GaugeMetricFamily(_USED, "Calls that a thread has used of a limit.", labels=thread),
        GaugeMetricFamily(_LIMIT, "Calls that a thread may use of a limit.", labels=thread),
        CounterMetricFamily(_BLOCKED, "Calls refused on a thread by a limit.", labels=thread),
        GaugeMetricFamily(
            _TIMESTAMP,
            "When a call of a thread was last judged, in seconds since the Unix epoch.",
            labels=["agent", "thread_id"],
        ),
        GaugeMetricFamily(
            _SUBJECTS,
            "Tracked threads by how much of a limit they have used.",
            labels=["agent", "limit", "scope", "state"],
        ),
        GaugeMetricFamily(_HIDDEN, "Tracked threads without series.", labels=["state"]),
    )
    return {family.name: family for family in families}


def _samples(use: ThreadUse) -> Iterator[tuple[str, list[str], float]]:
    for limit, each in use.limits.items():
        labels = [use.agent, label(limit), use.thread]
        if each.limit is not None:
            yield _USED, labels, float(each.used)
            yield _LIMIT, labels, float(each.limit)
        yield _BLOCKED, labels, float(each.blocked)
    yield _TIMESTAMP, [use.agent, use.thread], float(use.last_decision)


def _newest(group: dict[tuple[str, str], ThreadUse], most: int) -> list[ThreadUse]:
    return list(islice(reversed(group.values()), most))
