"""What all processes know of their subjects at one moment: for the page, and as metrics."""

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from heapq import nlargest
from itertools import islice
from math import inf
from operator import itemgetter
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from langchain_quota.limits.call import THREAD
from langchain_quota.runtime.sync_async import T, fork_safe_lock
from langchain_quota.runtime.units import Level, in_base_unit, level
from langchain_quota.telemetry import names, workers
from langchain_quota.telemetry.labels import limit_label
from langchain_quota.telemetry.workers import (
    Key,
    Number,
    Series,
    Subject,
    Use,
    in_slices,
    merge_two,
)

STAYS = 15 * 60
"""For how many seconds a series is exported at least, while its subject is in the table."""

MAX_NEW = 50
"""Maximum of threads, and of other subjects, whose series begin with one scrape."""

_HOUR = 3600

KINDS = ("threads", "subjects")
"""The kinds of rows: of threads, and of the subjects of quotas."""

_Rated = tuple[tuple[int, float, float], Subject, Sequence[Series]]
"""The urgency of a subject, the subject, and what it has reached, as this reading has counted it.

Another reading may rate the subject again meanwhile.
"""

_BLOCKED = 2
"""The urgency of a subject that is blocked now; the near ones have 1, and the others 0."""

_METRICS = {
    True: (names.THREAD_USED, names.THREAD_LIMIT, names.THREAD_TIMES, names.THREAD_BLOCKED),
    False: (names.SUBJECT_USED, names.SUBJECT_LIMIT, names.SUBJECT_TIMES, names.SUBJECT_BLOCKED),
}
"""The metrics of use, limit, times and refusals, for threads (`True`) and other subjects."""

_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


class Reading:
    """The subjects of all processes at one moment, bounded for the export."""

    def __init__(
        self,
        snapshots: Sequence[workers.Snapshot],
        on_error: workers.OnError,
        lock: AbstractContextManager[object],
        *,
        is_scrape: bool = False,
    ) -> None:
        self.now = now = time.time()
        self._lock, self._standings = lock, Counter[Sequence[Series]]()
        self.processes = len(snapshots)
        self.started = min((snapshot.started for snapshot in snapshots), default=now)
        """When the first process began."""
        self.waiting = Counter[tuple[str, str, str]]()
        """The number of calls that wait now, by agent, thread and limit."""
        answers = (snapshot.frozen for snapshot in snapshots)
        self.frozen = max(answers, key=itemgetter(0), default=(0.0, ()))[1]
        """Who is frozen, by the store's newest answer."""
        self.totals = {name: Counter[int]() for name in workers.PERIODS}
        """The amounts of `workers.PERIODS`, by the number of the period."""
        for snapshot in snapshots:
            for agent, thread, limit, count in snapshot.waiting:
                self.waiting[agent, thread, limit] += count
            for name, (seconds, kept) in workers.PERIODS.items():
                first = now // seconds - kept + 1
                amounts = {period: n for period, n in snapshot.totals[name] if period >= first}
                self.totals[name].update(amounts)
        self._refusals = [refusal for snapshot in snapshots for refusal in snapshot.refusals]
        self.unnamed: set[str] = set()
        """The names of quotas whose subjects have no label."""
        self.states = {kind: defaultdict[str, set[str]](set) for kind in KINDS}
        """All subjects that are `blocked` now, `exhausted` or `near`."""
        self.tracked = Counter[Series]()
        """The number of all subjects, by what they have used of a limit."""
        self.exported = Counter[Series]()
        """The number of those that are in `rows`."""
        self.hidden = Counter[str]()
        """The number of subjects that are not in `rows`, by their kind."""
        rows = [row for snapshot in snapshots for row in snapshot.exports if now - row[4] < _HOUR]
        rows.sort(key=itemgetter(4))
        self._latest = rows[-1][4] if rows else 0.0
        self.exports = {(*row[:3],): (row[3], row[4]) for row in rows}
        """When series of an hour began, and were exported last, by their subjects."""
        self._is_scrape, self._named = is_scrape, list[Subject]()
        self.rows: Sequence[Subject] = self._read(snapshots, on_error) if snapshots else ()
        """What is exported: those blocked now first, then the near, threads before quotas.

        Subjects of an agent with one label are one row, with the numbers of the first one.
        """

    def _read(
        self, snapshots: Sequence[workers.Snapshot], on_error: workers.OnError
    ) -> Sequence[Subject]:
        bounds = snapshots[0]
        threads, of_quotas, named = list[Subject](), list[Subject](), set[str]()
        for subject in in_slices(workers.merge(snapshots)):
            if self.now - subject.last <= bounds.ttl:
                (threads if subject.key[1] == THREAD else of_quotas).append(subject)
                (self.unnamed if subject.label is None else named).add(subject.key[1])
        self.unnamed -= named
        rows: dict[tuple[str, str, str | None], Subject] = {}
        for subjects, bound, stays in (
            (threads, bounds.max_threads, self._is_scrape),
            # The subjects of quotas per agent or global have no label, and always have series.
            ([one for one in of_quotas if one.label == ""], len(of_quotas), False),
            ([one for one in of_quotas if one.label], bounds.max_subjects, self._is_scrape),
            ([one for one in of_quotas if one.label is None], 0, False),
        ):
            rated = self._rate(subjects, on_error)
            top = self._choose(rated, len(subjects), bound, stays=stays)
            self.hidden[KINDS[subjects is not threads]] += len(subjects) - len(top)
            self._named += subjects if bound else ()
            for _, subject, reached in top:
                self.exported.update(reached)
                key = (*subject.key[:2], subject.label)
                first = rows.get(key)
                rows[key] = subject if first is None else merge_two(first, subject, by_time=False)
        for reached, count in self._standings.items():
            self.tracked.update(dict.fromkeys(reached, count))
        return [*rows.values()]

    def search(self, text: str) -> Sequence[Subject]:
        """Return at most 500 subjects that are not in `rows`, and have a text in their names."""
        shown = {(row.key[1], row.label) for row in self.rows}
        matching = (
            one
            for one in in_slices(self._named)
            if (one.key[1], one.label) not in shown
            and text in "\n".join((one.label or "", *one.key[:2], *list(one.uses))).casefold()
        )
        return [*islice(matching, 500)]

    def last_refusals(self) -> defaultdict[tuple[str, str | None], list[dict[str, object]]]:
        """Return the last refusals by the scope and the label of their rows, the newest first."""
        rows = defaultdict[tuple[str, str | None], list[dict[str, object]]](list)
        for shown_by, shown in sorted(self._refusals, key=lambda refusal: refusal[1]["at"])[::-1]:
            for scope, label in shown_by:
                rows[scope, label].append(shown)
        return rows

    def periods(self, name: str) -> list[int]:
        """Return a total of each of its last periods, the running one included."""
        seconds, kept = workers.PERIODS[name]
        running = int(self.now // seconds)
        return [self.totals[name][period] for period in range(running - kept + 1, running + 1)]

    def _rate(self, subjects: Iterable[Subject], on_error: workers.OnError) -> Iterator[_Rated]:
        """Count and rate subjects: those blocked now come first, then near ones by share."""
        # Yield them singly: for a list of many, the garbage collector would stop all threads.
        for subject in in_slices(subjects):
            try:
                if not subject.rated <= self.now < subject.rated_until:
                    # Under the lock, no decision is about to change what is read here.
                    with self._lock:
                        _rate_uses(subject, self.now)
            except Exception as error:
                on_error(error)
                continue
            reached = subject.reached
            self._standings[reached] += 1
            _, scope, name = subject.key
            # Strings, for many new tuples would have the garbage collector stop all threads.
            shown = name if scope == THREAD else f"{scope} {name}"
            for state in subject.states:
                self.states[KINDS[scope != THREAD]][state].add(shown)
            yield subject.urgency, subject, reached

    def _choose(
        self, rated: Iterable[_Rated], count: int, bound: int, *, stays: bool
    ) -> Sequence[_Rated]:
        """Return the most urgent of `count` subjects, at most `bound`; series may stay."""
        # A counter that vanishes and returns has a false increase. Prometheus keeps each series for
        # hours: three times the bound at most.
        shown, exports = dict[Key, _Rated](), self.exports

        def noted() -> Iterator[_Rated]:
            for one in rated:
                if exports.get(one[1].key, (0.0, -1.0))[1] == self._latest:
                    shown[one[1].key] = one
                yield one

        # Consume the iterator even if none is exported, because it counts all subjects.
        ranked = nlargest(max(1, bound), noted(), key=itemgetter(0))
        if not stays:
            return ranked[:bound]
        chosen = {key: one for key, one in shown.items() if self.now - exports[key][0] < STAYS}
        is_thread = bool(ranked) and ranked[0][1].key[1] == THREAD
        series, new = sum((key[1] == THREAD) == is_thread for key in exports), 0
        for one in (*ranked, *shown.values()):
            key, is_blocked = one[1].key, one[0][0] == _BLOCKED
            is_new = key not in shown
            # If some are hidden, a part of the room and of the series is for those blocked now.
            room = bound if is_blocked or not is_new or count <= bound else bound - bound // 5
            most = (3 if is_blocked else 2) * bound + (key in exports)
            if len(chosen) < room and not (is_new and (new == MAX_NEW or series >= most)):
                new, series = new + is_new, series + (key not in exports)
                chosen[key] = one
                exports[key] = (self.now if is_new else exports[key][0]), self.now
        exports |= {key: (exports[key][0], self.now) for key in chosen}
        return sorted(chosen.values(), key=itemgetter(0), reverse=True)[:bound]


class UsageReader(Collector):
    """Reads what the processes of a directory know, and renders it as metrics."""

    def __init__(self, directory: Path | None, on_error: workers.OnError) -> None:
        self._directory, self._on_error = directory, on_error
        self._own_path: Path | None = None
        self._lock = fork_safe_lock()
        # Once a series exists, it is exported, even at 0.
        self._series: dict[tuple[str, str, str], None] = {}

    def _own_snapshots(self) -> list[workers.Snapshot]:
        """Return what this process knows now; nothing in one that checks no calls."""
        return []

    def describe(self) -> Iterator[Metric]:
        """Return the families without samples, for the registry's check for duplicates."""
        return iter(_families().values())

    def collect(self) -> Iterator[Metric]:
        """Render the subjects of all processes, by the settings of this one, else of another."""
        reading = self.read(is_scrape=True)
        if not reading.processes:
            return
        self._series |= dict.fromkeys(series[:3] for series in reading.tracked)
        families = _families()
        # Copy, because a concurrent scrape may add series.
        for sample in _samples(reading, list(self._series)):
            families[sample.name].samples.append(sample)
        yield from families.values()

    def read(self, *, is_scrape: bool = False) -> Reading:
        """Return what all processes know now, bounded for the export."""
        snapshots = self._own_snapshots()
        if self._directory is not None:
            snapshots += workers.read_others(self._directory, self._own_path, self._on_error)
        return Reading(snapshots, self._on_error, self._lock, is_scrape=is_scrape)


def _families() -> dict[str, Metric]:
    """Return the families of what subjects have used, by name, without samples."""
    specs = [spec for spec in names.METRICS if spec.is_of_table]
    return {
        spec.name: _FAMILIES[spec.kind](spec.name, spec.help, labels=spec.labels) for spec in specs
    }


def _samples(reading: Reading, series: Iterable[tuple[str, str, str]]) -> Iterator[Sample]:
    """Return the samples of a reading; `series` has what is exported even at 0."""
    for row in reading.rows:
        for limit, use in list(row.uses.items()):
            yield from _samples_of(row, limit, use, reading.now)
    for agent, limit, scope in series:
        labels = {"agent": agent, "limit": limit_label(limit), "scope": scope}
        for state in Level:
            visible = reading.exported[agent, limit, scope, state]
            hidden = reading.tracked[agent, limit, scope, state] - visible
            for shown, count in (("true", visible), ("false", hidden)):
                yield _sample(names.SUBJECTS, {**labels, "state": state, "shown": shown}, count)
    yield _sample(names.FROZEN, {}, len(reading.frozen))
    # Subjects without a label may look the same, and no series may come twice.
    for who, (since, until) in {(*row[:3],): row[3:] for row in reading.frozen[:100]}.items():
        labels = dict(zip(names.FROZEN_TIMES.labels, who, strict=False))
        yield from _times(names.FROZEN_TIMES, labels, since=since, until=until)
    yield _sample(names.START_TIME, {}, reading.started)


def _samples_of(row: Subject, limit: str, use: Use, now: float) -> Iterator[Sample]:
    """Return the samples of what a subject has used of a limit."""
    agent, scope, _ = row.key
    is_thread, unit, label = scope == THREAD, use.unit, row.label or ""
    used_specs, limit_specs, times, blocked = _METRICS[is_thread]
    # The samples share a dict of labels. `add_metric` would copy it for each.
    labels = {"agent": agent, "limit": limit_label(limit)}
    if is_thread:
        labels["thread_id"] = label
        known = (use.refusal or {}).items()
        why = {name: text for name, text in known if text and name in {"scope", "subject"}}
        yield from _times(times, {**labels, **why}, refusal=use.refused)
        # Export from 0 on, because `increase()` does not see the first value of a series.
        if unit != "calls":
            yield _sample(names.THREAD_SPENT[unit], labels, in_base_unit(use.spent, unit))
    else:
        labels |= {"scope": scope, "subject": label}
    numbers, _ = rate(use, now, is_thread=is_thread)
    for used, maximum, ends, _ in numbers[:1]:
        yield _sample(used_specs[unit], labels, in_base_unit(used, unit))
        yield _sample(limit_specs[unit], labels, in_base_unit(maximum, unit))
        yield from _times(times, labels, reset=ends)
    if numbers or is_thread:
        yield from _times(times, labels, decision=use.decided)
    for scope, count in use.blocked.items():
        yield _sample(blocked, {**labels, "scope": scope}, count)


def _sample(spec: names.MetricSpec, labels: dict[str, str], value: float) -> Sample:
    return Sample(spec.name, labels, value)


def _times(
    spec: names.MetricSpec, labels: dict[str, str], **times: float | None
) -> Iterator[Sample]:
    """Return the samples of the events that have a time."""
    for event, when in times.items():
        if when:
            # Round to milliseconds, because a tenth of what a scrape transfers is times.
            yield _sample(spec, {**labels, "event": event}, round(when, 3))


def _rate_uses(subject: Subject, now: float) -> None:
    """Note on a subject what its uses come to, and until when."""
    (agent, scope, _), last = subject.key, subject.last
    reached, worst, share, refused, until = list[Series](), Level.OK, 0.0, 0.0, inf
    for limit, use in subject.uses.items():
        numbers, use_level = rate(use, now, is_thread=scope == THREAD)
        for _, _, ends, _ in numbers:
            until = until if ends is None else min(until, ends)
        if use_level is not None:
            reached.append((agent, limit, scope, use_level))
            used, maximum, _, _ = numbers[0]
            # It fails here if a limit is too large for a metric, not where it is rendered.
            share = max(share, used / float(maximum))
            if worst is not Level.EXHAUSTED and use_level is not Level.OK:
                worst = use_level
        refused = max(refused, use.refused or 0.0)
    states, urgency = [worst.value] * (worst is not Level.OK), (0, last, last)
    if worst is Level.NEAR:
        urgency = 1, share, last
    if now - refused < workers.BLOCKED_NOW:
        states.append("blocked")
        urgency, until = (_BLOCKED, refused, last), min(until, refused + workers.BLOCKED_NOW)
    subject.reached, subject.states, subject.urgency = _same(*reached), _same(*states), urgency
    subject.rated, subject.rated_until = now, until


@lru_cache(maxsize=1024)
def _same(*values: T) -> Sequence[T]:
    """Return these values, as one tuple for all subjects that have the same."""
    return values


def rate(use: Use, now: float, *, is_thread: bool) -> tuple[Sequence[Number], Level | None]:
    """Return the numbers of windows that have not ended, and their level if they are enforced.

    The number with the highest used share comes first. An ended window of a thread has used 0.
    """
    numbers = use.numbers
    if len(numbers) != 1 or numbers[0][2] is not None or not numbers[0][1]:
        numbers = [
            (used, limit, ends, scope) if is_running else (0, limit, None, scope)
            for used, limit, ends, scope in numbers
            if limit and ((is_running := ends is None or ends > now) or is_thread)
        ]
        numbers.sort(key=lambda number: -number[0] / number[1])
    if not numbers or use.near is None:
        return numbers, None
    used, limit, _, _ = numbers[0]
    return numbers, level(used, limit, use.near)


def digest(subject: str) -> str:
    """Return the hash of a subject, which is stored so that users' names are not."""
    return hashlib.blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


EVERYBODY = digest("")
"""The hash of the only subject of a global quota, which all agents share."""
