"""The bounded table of what each thread has used, read at scrape time."""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from langchain_quota.decision import Decision, Level, Standing, level
from langchain_quota.limits import STORE, THREAD
from langchain_quota.locks import fork_safe_lock
from langchain_quota.telemetry.labels import label
from langchain_quota.telemetry.subjects import Series, SubjectTable
from langchain_quota.telemetry.windows import Windows

MAX_TRACKED = 100_000
"""The most threads that a table remembers; beyond it the longest idle is forgotten."""

_EXPIRED_PER_UPDATE = 2
_EXPIRED_PER_SCRAPE_STEP = 50
_NO_ENDS: frozenset[float] = frozenset()
_SEVERITY = {Level.OK: 0, Level.NEAR: 1, Level.EXHAUSTED: 2}


@dataclass(frozen=True, slots=True)
class QuotaCount:
    """What a thread has used of a quota per thread, in calls; `limit` is from 1."""

    used: int
    limit: int
    resets_at: float | None = None
    """When its window ends, in seconds since the Unix epoch."""

    def at(self, now: float) -> "QuotaCount":
        """As it stands then: nothing is known to be used of a new window."""
        passed = self.resets_at is not None and self.resets_at <= now
        return QuotaCount(0, self.limit) if passed else self


@dataclass(frozen=True, slots=True)
class LimitUse:
    """What a thread has used of one limit, in calls; `limit` is `None` without a thread limit."""

    used: int
    limit: int | None
    blocked: int = 0
    near: float = 1.0
    enforced: bool = True
    quotas: tuple[QuotaCount, ...] = ()
    decided: float = field(default=0.0, compare=False)
    """When a decision last told what is used, in seconds since the Unix epoch."""
    level: Level | None = field(init=False, compare=False)
    """How much of its quota the thread has used; `None` if the limit does not say."""
    share: float = field(init=False, compare=False)
    """The used share of the thread limit, from 0."""

    def __post_init__(self) -> None:
        """Rate it once: it is read more often than made."""
        shown = self.shown if self.enforced else None
        used, limit = shown or (0, 1)
        object.__setattr__(self, "level", level(used, limit, self.near) if shown else None)
        object.__setattr__(self, "share", used / limit)

    @property
    def shown(self) -> tuple[int, int] | None:
        """What is used of how much, where the share is highest; `None` if nothing is limited."""
        own = (self.used, self.limit) if self.limit else None
        if not self.quotas:
            return own
        counts = [(each.used, each.limit) for each in self.quotas]
        return max([own, *counts] if own else counts, key=lambda count: count[0] / count[1])

    def at(self, now: float) -> "LimitUse":
        """As it stands then."""
        if not self.quotas:
            return self
        return replace(self, quotas=tuple(each.at(now) for each in self.quotas))

    def less(self, amount: int) -> "LimitUse":
        """With a charge taken back."""
        quotas = (replace(each, used=max(0, each.used - amount)) for each in self.quotas)
        return replace(self, used=max(0, self.used - amount), quotas=tuple(quotas))


ThreadKey = tuple[str, str]
"""The labels of an agent and of a thread."""


@dataclass(frozen=True, slots=True)
class ThreadUse:
    """What one thread of one agent has used; replaced, never changed, so readers need no lock."""

    agent: str
    thread: str
    limits: Mapping[str, LimitUse]
    level: Level
    share: float
    last_decision: float
    placed: float
    """When it came to its place among those of its level, in seconds since the Unix epoch."""
    ends: frozenset[float]
    """When windows end, in seconds since the Unix epoch."""

    @classmethod
    def of(
        cls, key: ThreadKey, limits: Mapping[str, LimitUse], *, last_decision: float, placed: float
    ) -> Self:
        """With the level and share that the limits make."""
        level, share = rate(limits.values())
        ends = ends_of(limits.values())
        return cls(*key, limits, level, share, last_decision, placed, ends)

    def at(self, now: float) -> "ThreadUse":
        """As it stands then; that a window has passed is no decision."""
        if all(end > now for end in self.ends):
            return self
        limits = {limit: each.at(now) for limit, each in self.limits.items()}
        use = ThreadUse.of(
            (self.agent, self.thread),
            limits,
            last_decision=self.last_decision,
            placed=self.placed,
        )
        # At a new level it comes behind those that had a call there.
        return use if use.level is self.level else replace(use, placed=0.0)

    @property
    def rated(self) -> Iterator[tuple[str, Level]]:
        """The limits that say how much of their quota is used, and how much that is."""
        levels = ((limit, each.level) for limit, each in self.limits.items())
        return ((limit, each) for limit, each in levels if each is not None)


def ends_of(limits: Iterable[LimitUse]) -> frozenset[float]:
    """When windows end, in seconds since the Unix epoch."""
    ends = [quota.resets_at for use in limits if use.quotas for quota in use.quotas]
    return frozenset(end for end in ends if end is not None) if ends else _NO_ENDS


def rate(limits: Iterable[LimitUse]) -> tuple[Level, float]:
    """The highest level and share of the limits."""
    highest, share = Level.OK, 0.0
    for each in limits:
        share = max(share, each.share)
        if each.level is not None and _SEVERITY[each.level] > _SEVERITY[highest]:
            highest = each.level
    return highest, share


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one scrape exports."""

    threads: list[ThreadUse]
    subjects: dict[tuple[str, str], dict[Level, int]]
    hidden: dict[Level, int]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a table holds."""

    threads: list[ThreadUse]
    forgotten: dict[ThreadKey, float]
    """When others were forgotten on request, in seconds since the Unix epoch."""
    limits: list[tuple[str, str]]
    """The agents and limits that have or had threads."""


class ThreadTable(Collector):
    """Threads by recency, grouped by how much of their limits they have used.

    Args:
        near: The share from which a limit is near.
        max_exported: The most threads that a scrape exports.
        ttl: How long, in seconds, a thread without decisions is remembered.
        on_error: Told of an entry that could not be rendered.
        max_tracked: The most threads that are remembered.
        subjects: Those that are no threads; both are counted in one family.
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
        subjects: SubjectTable | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._near = near
        self._max_exported = max_exported
        self._max_tracked = max_tracked
        self._ttl = ttl
        self._on_error = on_error
        self._others = subjects
        self._clock = clock
        self._on_change: Callable[[], object] | None = None
        self._lock = fork_safe_lock()
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            self._threads: OrderedDict[ThreadKey, ThreadUse] = OrderedDict()
            # Ordered by recency but for the near ones, of which a scrape needs all: a plain dict is
            # copied some ten times faster.
            self._by_level: dict[Level, dict[ThreadKey, ThreadUse]] = {
                Level.OK: OrderedDict(),
                Level.NEAR: {},
                Level.EXHAUSTED: OrderedDict(),
            }
            self._windows: Windows[ThreadKey] = Windows()
            self._subjects: dict[tuple[str, str], dict[Level, int]] = {}
            self._forgotten: dict[ThreadKey, float] = {}

    @property
    def max_exported(self) -> int:
        """The most threads that a scrape exports."""
        return self._max_exported

    @property
    def ttl(self) -> float:
        """How long, in seconds, a thread without decisions is remembered."""
        return self._ttl

    def listen(self, on_change: Callable[[], object]) -> None:
        """Tell a function, which must not block, whenever a decision has changed the table."""
        self._on_change = on_change

    def contents(self) -> "Contents":
        """All that it holds; threads in no order."""
        with self._lock:
            # The values of the underlying dict: those of an OrderedDict, in its order, take
            # longer than decisions should have to wait.
            threads = list(dict.values(self._threads))
            return Contents(threads, dict(self._forgotten), list(self._subjects))

    def record(self, agent: str, thread: str, decisions: Iterable[Decision]) -> None:
        """Take in the decisions about calls of one thread, in order; labels are given."""
        now = self._clock()
        key = (agent, thread)
        with self._lock:
            old = self._current(key, now)
            limits = dict(old.limits) if old else {}
            refused = False
            for decision in decisions:
                for standing in decision.standings:
                    refused = refused or (standing.refused and standing.enforced)
                    limits[standing.limit] = self._use(standing, limits.get(standing.limit), now)
            self._put(key, limits, now, refused=refused)
            self._expire(now, _EXPIRED_PER_UPDATE)
            if len(self._threads) > self._max_tracked:
                self._forget(next(iter(self._threads)))
        self._changed()

    def refund(self, agent: str, thread: str, limit: str, amount: int) -> None:
        """Take a charge back from what a thread has used of a limit."""
        now = self._clock()
        key = (agent, thread)
        with self._lock:
            old = self._current(key, now)
            if old is None or limit not in old.limits:
                return
            limits = {**old.limits, limit: old.limits[limit].less(amount)}
            self._put(key, limits, now, refused=False)
        self._changed()

    def forget(self, agent: str, thread: str) -> None:
        """Forget a thread, if it is tracked."""
        now = self._clock()
        key = (agent, thread)
        with self._lock:
            if key in self._threads:
                self._forget(key)
            # Other workers may know it still, for as long as they remember a thread.
            self._forgotten.pop(key, None)
            self._forgotten[key] = now
            oldest = next(iter(self._forgotten))
            if (
                len(self._forgotten) > self._max_tracked
                or now - self._forgotten[oldest] > self._ttl
            ):
                del self._forgotten[oldest]
        self._changed()

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
        return iter(families().values())

    def collect(self) -> Iterator[Metric]:
        """Render a snapshot entry by entry: one that cannot be rendered is left out."""
        snapshot = self.snapshot()
        return render(snapshot, self._subject_counts(snapshot), self._on_error)

    def _subject_counts(self, snapshot: Snapshot) -> dict[Series, dict[Level, int]]:
        threads = {
            Series(agent, limit, THREAD): counts
            for (agent, limit), counts in snapshot.subjects.items()
        }
        if self._others is None:
            return threads
        try:
            return threads | self._others.counts()
        except Exception as error:  # noqa: BLE001 - the threads are told all the same
            self._on_error(error)
            return threads

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def _current(self, key: ThreadKey, now: float) -> ThreadUse | None:
        """A thread as it stands now."""
        use = self._threads.get(key)
        if use is None or all(end > now for end in use.ends):
            return use
        self._lapse(key, now)
        return self._threads[key]

    def _use(self, standing: Standing, known: LimitUse | None, now: float) -> LimitUse:
        """What a thread has used of a limit after a decision."""
        blocked = (known.blocked if known else 0) + (standing.refused and standing.enforced)
        near = self._near if standing.near is None else standing.near
        if _is_unknown(standing):
            return replace(
                known or LimitUse(0, None), blocked=blocked, near=near, enforced=standing.enforced
            )
        return LimitUse(
            standing.thread_count,
            standing.thread_limit or None,
            blocked,
            near,
            standing.enforced,
            _quota_counts(standing) if standing.quotas else (),
            now,
        )

    def _put(
        self, key: ThreadKey, limits: Mapping[str, LimitUse], now: float, *, refused: bool
    ) -> None:
        """Take in what a thread has used now: it is the most recent."""
        old = self._threads.get(key)
        use = ThreadUse.of(key, limits, last_decision=now, placed=now)
        if any(end <= now for end in use.ends):
            limits = {limit: each.at(now) for limit, each in limits.items()}
            use = ThreadUse.of(key, limits, last_decision=now, placed=now)
        stays = old is not None and old.level is use.level is Level.EXHAUSTED
        if old is not None and stays and not refused:
            self._set(replace(use, placed=old.placed))
        else:
            self._set(use)
            group = self._by_level[use.level]
            if isinstance(group, OrderedDict):
                group.move_to_end(key)
        self._threads.move_to_end(key)

    def _lapse(self, key: ThreadKey, now: float) -> None:
        """Take in that a window of a thread has passed."""
        old = self._threads[key]
        use = old.at(now)
        self._set(use)
        group = self._by_level[use.level]
        if isinstance(group, OrderedDict) and use.level is not old.level:
            group.move_to_end(key, last=False)

    def _set(self, use: ThreadUse) -> None:
        """Replace what is known of a thread."""
        key = (use.agent, use.thread)
        old = self._threads.get(key)
        self._recount(use.agent, old.limits if old else {}, use.limits)
        before = old.ends if old else _NO_ENDS
        if before != use.ends:
            self._windows.discard(key, before)
            self._windows.add(key, use.ends)
        if old is not None and old.level is not use.level:
            del self._by_level[old.level][key]
        self._by_level[use.level][key] = use
        self._threads[key] = use

    def _recount(
        self, agent: str, old: Mapping[str, LimitUse], new: Mapping[str, LimitUse]
    ) -> None:
        """Count a thread under what it has used now, no longer under what it had."""
        # A thread that is known has its limits, and may come to have more.
        for limit in new or old:
            known, use = old.get(limit), new.get(limit)
            if known is use:
                continue
            before, after = known.level if known else None, use.level if use else None
            if before is after:
                continue
            counts = self._subjects.get((agent, limit))
            if counts is None:
                counts = self._subjects[agent, limit] = dict.fromkeys(Level, 0)
            if before is not None:
                counts[before] -= 1
            if after is not None:
                counts[after] += 1

    def _forget(self, key: ThreadKey) -> None:
        use = self._threads.pop(key)
        del self._by_level[use.level][key]
        self._windows.discard(key, use.ends)
        self._recount(key[0], use.limits, {})

    def _expire(self, now: float, most: int) -> bool:
        """Forget idle threads and what passed windows held, at most so many.

        Returns:
            Whether there may be more.
        """
        for _ in range(most):
            idle = next(iter(self._threads), None)
            if idle is not None and now - self._threads[idle].last_decision > self._ttl:
                self._forget(idle)
            elif (passed := self._windows.pop_passed(now)) is not None:
                self._lapse(passed, now)
            else:
                return False
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


def families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    """The families of tables, by name, without samples."""
    thread = ["agent", "limit", "thread_id"]
    made: tuple[GaugeMetricFamily | CounterMetricFamily, ...] = (
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
            "Tracked threads, and subjects of quotas, by how much of a limit they have used.",
            labels=["agent", "limit", "scope", "state"],
        ),
        GaugeMetricFamily(_HIDDEN, "Tracked threads without series.", labels=["state"]),
    )
    return {family.name: family for family in made}


def render(
    snapshot: Snapshot,
    subjects: Mapping[Series, Mapping[Level, int]],
    on_error: Callable[[Exception], None],
) -> Iterator[Metric]:
    """The families with the samples of a scrape; an entry that cannot be rendered is left out."""
    found = families()
    for use in snapshot.threads:
        try:
            samples = list(_samples(use))
        except Exception as error:  # noqa: BLE001 - whatever one entry raises, the scrape goes on
            on_error(error)
            continue
        for name, labels, value in samples:
            found[name].add_metric(labels, value)
    for (agent, limit, scope), counts in subjects.items():
        for each, count in counts.items():
            found[_SUBJECTS].add_metric([agent, label(limit), scope, each], count)
    for each, count in snapshot.hidden.items():
        found[_HIDDEN].add_metric([each], count)
    return iter(found.values())


def _samples(use: ThreadUse) -> Iterator[tuple[str, list[str], float]]:
    for limit, each in use.limits.items():
        labels = [use.agent, label(limit), use.thread]
        if each.shown is not None:
            used, of = each.shown
            yield _USED, labels, float(used)
            yield _LIMIT, labels, float(of)
        yield _BLOCKED, labels, float(each.blocked)
    yield _TIMESTAMP, [use.agent, use.thread], float(use.last_decision)


def _quota_counts(standing: Standing) -> tuple[QuotaCount, ...]:
    """What a thread has used of the quotas that are the thread's."""
    return tuple(
        QuotaCount(
            quota.before if standing.deferred else quota.used,
            quota.limit,
            None if quota.resets_at is None else quota.resets_at.timestamp(),
        )
        for quota in standing.quotas
        if quota.per_thread and quota.limit
    )


def _is_unknown(standing: Standing) -> bool:
    """Whether the thread's count is not known, because the shared store could not be asked."""
    if standing.scope == STORE:
        return True
    # Let through in an outage: no quota has an answer, and the state keeps no count of its own.
    return standing.shared and not standing.quotas and standing.thread_limit is None


def _newest(group: dict[ThreadKey, ThreadUse], most: int) -> list[ThreadUse]:
    return list(islice(reversed(group.values()), most))
