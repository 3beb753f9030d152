"""What all processes know of their subjects at one moment: for the page, and as metrics."""

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import islice
from math import inf
from operator import itemgetter
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from langchain_quota.limits.call import ROOT_RUN, RUN, THREAD
from langchain_quota.runtime.units import Level, in_base_unit, level
from langchain_quota.telemetry import names
from langchain_quota.telemetry.labels import limit_label
from langchain_quota.telemetry.workers import (
    Key,
    Number,
    OnError,
    Snapshot,
    Subject,
    Use,
    merge,
    merge_two,
)

BLOCKED_NOW = 300
"""For how many seconds after its last blocked call a subject counts as blocked now."""

STAYS = 15 * 60
"""For how many seconds a series is exported at least, while its subject is in the table."""

MAX_NEW = 50
"""Maximum of threads, and of other subjects, whose series begin with one scrape."""

HOURS = 24
"""The number of hours for which costs are kept."""

SLICE = 256
"""The number of subjects that are read or written without a pause."""

_PAUSE = 0.0001
_HOUR = 3600

T = TypeVar("T")

Series = tuple[str, str, str, Level]
"""The label of an agent, a limit, a scope and a level."""

_Rated = tuple[tuple[int, float, float], Subject, list[Series]]
"""The sort key of a subject for the export, the subject, and the levels that it has reached."""

_BLOCKED = 2
"""The urgency of a subject that is blocked now; the near ones have 1, and the others 0."""

_METRICS = {
    True: (names.THREAD_USED, names.THREAD_LIMIT, names.THREAD_TIMES, names.THREAD_BLOCKED),
    False: (names.SUBJECT_USED, names.SUBJECT_LIMIT, names.SUBJECT_TIMES, names.SUBJECT_BLOCKED),
}
"""The metrics of use, limit, times and refusals, for threads (`True`) and other subjects."""


class Reading:
    """The subjects of all processes at one moment, bounded for the export."""

    def __init__(
        self, snapshots: Sequence[Snapshot], on_error: OnError, *, is_scrape: bool = False
    ) -> None:
        self.now = now = time.time()
        self.processes = len(snapshots)
        self.started = min((snapshot.started for snapshot in snapshots), default=now)
        """When the first process began."""
        self.waiting = sum(snapshot.waiting for snapshot in snapshots)
        """The number of calls that wait now."""
        answers = (snapshot.frozen for snapshot in snapshots)
        self.frozen = max(answers, key=itemgetter(0), default=(0.0, ()))[1]
        """Who is frozen, by the store's newest answer."""
        self.costs = Counter[int]()
        """Nanodollars by the hour since the Unix epoch, for the last 24 hours."""
        for hour, amount in (cost for snapshot in snapshots for cost in snapshot.costs):
            if hour > now // 3600 - HOURS:
                self.costs[hour] += amount
        self.calls = {"allowed": Counter[int](), "blocked": Counter[int]()}
        """Calls by the minute since the Unix epoch."""
        for minute, allowed, blocked in (one for snapshot in snapshots for one in snapshot.calls):
            self.calls["allowed"][minute] += allowed
            self.calls["blocked"][minute] += blocked
        self._refusals = [refusal for snapshot in snapshots for refusal in snapshot.refusals]
        self.unnamed: set[str] = set()
        """The names of quotas whose subjects have no label."""
        self.states = defaultdict[tuple[bool, str], set[str]](set)
        """All subjects that are `blocked` now, `exhausted` or `near`: threads (`True`) or not."""
        self.tracked = Counter[Series]()
        """The number of all subjects, by what they have used of a limit."""
        self.exported = Counter[Series]()
        """The number of those that are in `rows`."""
        self.hidden = Counter[bool]()
        """The number of subjects that are not in `rows`: threads (`True`), and others."""
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

    def _read(self, snapshots: Sequence[Snapshot], on_error: OnError) -> Sequence[Subject]:
        bounds = snapshots[0]
        threads, of_quotas, named = list[Subject](), list[Subject](), set[str]()
        for subject in in_slices(merge(snapshots)):
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
            rated = self._rate_all(subjects, on_error)
            top = self._choose(rated, len(subjects), bound, stays=stays)
            self.hidden[subjects is threads] += len(subjects) - len(top)
            self._named += subjects if bound else ()
            for _, subject, reached in top:
                self.exported.update(reached)
                key = (*subject.key[:2], subject.label)
                first = rows.get(key)
                rows[key] = subject if first is None else merge_two(first, subject, by_time=False)
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
        for _, thread, quota, shown in sorted(self._refusals, key=itemgetter(0))[::-1]:
            rows[THREAD, thread].append(shown)
            rows[quota[0], quota[1]].append(shown)
        return rows

    def _rate_all(self, subjects: Iterable[Subject], on_error: OnError) -> Iterator[_Rated]:
        # Yield them singly: for a list of many, the garbage collector would stop all threads.
        for subject in in_slices(subjects):
            try:
                yield self._rate(subject)
            except Exception as error:
                on_error(error)

    def _rate(self, subject: Subject) -> _Rated:
        """Count and rate a subject: those blocked now come first, then near ones by share."""
        agent, scope, name = subject.key
        is_thread, last = scope == THREAD, subject.last
        reached: list[Series] = []
        highest = refused = 0.0
        # Copy, because a concurrent decision may add a limit.
        for limit, use in list(subject.uses.items()):
            number, use_level = rate(use, self.now, is_thread=is_thread)
            if number is not None and use_level is not None:
                reached.append((agent, limit, scope, use_level))
                # It fails here if a limit is too large for a metric, not where it is rendered.
                highest = max(highest, number[0] / float(number[1]))
            refused = max(refused, use.refused or 0.0)
        self.tracked.update(reached)
        levels = {use_level for _, _, _, use_level in reached}
        # Strings, for many new tuples would have the garbage collector stop all threads.
        if not is_thread:
            name = f"{scope} {name}"
        urgency = 0, last, last
        if Level.EXHAUSTED in levels:
            self.states[is_thread, Level.EXHAUSTED].add(name)
        elif Level.NEAR in levels:
            self.states[is_thread, Level.NEAR].add(name)
            urgency = 1, highest, last
        if self.now - refused < BLOCKED_NOW:
            self.states[is_thread, "blocked"].add(name)
            urgency = _BLOCKED, refused, last
        return urgency, subject, reached

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


class Families(dict[str, Metric]):
    """The families of what subjects have used, by name, with their samples."""

    def __init__(self) -> None:
        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        super().__init__(
            (spec.name, kinds[spec.kind](spec.name, spec.help, labels=spec.labels))
            for spec in names.METRICS
            if spec.is_of_table
        )

    def add_all(self, reading: Reading, series: Iterable[tuple[str, str, str]]) -> None:
        """Add the samples of a reading; `series` has what is exported even at 0."""
        for row in reading.rows:
            for limit, use in list(row.uses.items()):
                self._add_use(row, limit, use, reading.now)
        for agent, limit, scope in series:
            labels = {"agent": agent, "limit": limit_label(limit), "scope": scope}
            for state in Level:
                visible = reading.exported[agent, limit, scope, state]
                hidden = reading.tracked[agent, limit, scope, state] - visible
                self._add(names.SUBJECTS, {**labels, "state": state, "shown": "true"}, visible)
                self._add(names.SUBJECTS, {**labels, "state": state, "shown": "false"}, hidden)
        self._add(names.FROZEN, {}, len(reading.frozen))
        # Subjects without a label may look the same, and no series may come twice.
        for who, times in {(*row[:3],): row[3:] for row in reading.frozen[:100]}.items():
            labels = dict(zip(names.FROZEN_TIMES.labels, who, strict=False))
            for event, when in zip(("since", "until"), times, strict=True):
                self._add_time(names.FROZEN_TIMES, labels, event, when)
        self._add(names.START_TIME, {}, reading.started)

    def _add_use(self, row: Subject, limit: str, use: Use, now: float) -> None:
        agent, scope, _ = row.key
        is_thread, unit, label = scope == THREAD, use.unit, row.label or ""
        used_specs, limit_specs, times, blocked = _METRICS[is_thread]
        labels = {"agent": agent, "limit": limit_label(limit)}
        if is_thread:
            labels["thread_id"] = label
            known = (use.refusal or {}).items()
            why = {name: text for name, text in known if text and name in {"scope", "subject"}}
            self._add_time(times, {**labels, **why}, "refusal", use.refused)
            # Export from 0 on, because `increase()` does not see the first value of a series.
            if unit != "calls":
                self._add(names.THREAD_SPENT[unit], labels, in_base_unit(use.spent, unit))
        else:
            labels |= {"scope": scope, "subject": label}
        number, _ = rate(use, now, is_thread=is_thread)
        if number is not None:
            used, maximum, ends, _ = number
            self._add(used_specs[unit], labels, in_base_unit(used, unit))
            self._add(limit_specs[unit], labels, in_base_unit(maximum, unit))
            self._add_time(times, labels, "reset", ends)
        if number is not None or is_thread:
            self._add_time(times, labels, "decision", use.decided)
        for scope, count in use.blocked.items():
            self._add(blocked, {**labels, "scope": scope}, count)

    def _add(self, spec: names.MetricSpec, labels: dict[str, str], value: float) -> None:
        # The metrics of a thread share a dict of labels. `add_metric` would copy it for each.
        self[spec.name].samples.append(Sample(spec.name, labels, value))

    def _add_time(
        self, spec: names.MetricSpec, labels: dict[str, str], event: str, when: float | None
    ) -> None:
        # Round to milliseconds, because a tenth of what a scrape transfers is times.
        if when:
            self._add(spec, {**labels, "event": event}, round(when, 3))


def in_slices(items: Iterable[T]) -> Iterator[T]:
    """Yield items, and pause after some of them, so that no event loop waits for this thread."""
    # Python takes the interpreter from a busy thread only after 5 ms, and each step of an event
    # loop may have to wait that long. A thread that sleeps gives it away at once.
    for index, item in enumerate(items, 1):
        if not index % SLICE:
            time.sleep(_PAUSE)
        yield item


def rate(use: Use, now: float, *, is_thread: bool) -> tuple[Number | None, Level | None]:
    """Return the number with the highest used share, and its level if the limit is enforced."""
    numbers = use.numbers
    if len(numbers) == 1 and numbers[0][2] is None:
        number = numbers[0] if numbers[0][1] else None
    else:
        running = current_numbers(numbers, now, is_thread=is_thread)
        number = max(running, key=lambda number: number[0] / number[1], default=None)
    if number is None or use.near is None:
        return number, None
    return number, level(number[0], number[1], use.near)


def still_refuses(use: Use, now: float) -> bool:
    """Return whether the last refusal of a limit still holds, as far as is known."""
    refusal, refused = use.refusal or {}, use.refused or 0.0
    # A run is over soon after its limit has refused a call.
    lasts = 60 if refusal.get("scope") in (RUN, ROOT_RUN) else BLOCKED_NOW
    return now - refused < lasts and now < (refusal.get("resets_at") or inf)


def current_numbers(numbers: Sequence[Number], now: float, *, is_thread: bool) -> Iterator[Number]:
    """Return the numbers of windows that have not ended; an ended window of a thread has used 0."""
    for used, limit, ends, scope in numbers:
        if limit and (ends is None or ends > now):
            yield used, limit, ends, scope
        elif limit and is_thread:
            yield 0, limit, None, scope


def digest(subject: str) -> str:
    """Return the hash of a subject, which is stored so that users' names are not."""
    return hashlib.blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


EVERYBODY = digest("")
"""The hash of the only subject of a global quota, which all agents share."""
