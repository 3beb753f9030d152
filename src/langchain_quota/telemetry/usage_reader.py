"""What a scrape exports of what subjects have used, as all processes know it together."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.samples import Sample

from langchain_quota.decision import THREAD
from langchain_quota.stores import Occupancy
from langchain_quota.telemetry import names, workers
from langchain_quota.telemetry.labels import limit_label
from langchain_quota.telemetry.workers import Number, Snapshot, Subject, Use, merged
from langchain_quota.units import Level, in_base_unit, level

OnError = Callable[[Exception], None]

_Levels = Sequence[tuple[str, str, str, Level]]
"""The agent's label, the limit, the scope, and how much of the limit a subject has used."""


def families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    """The families by name, without samples."""
    made = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    return {
        spec.name: made[spec.kind](spec.name, spec.help, labels=spec.labels)
        for spec in names.METRICS
        if spec.is_of_table
    }


class _Rated(NamedTuple):
    """A subject, its levels, and its place among those that are exported."""

    subject: Subject
    levels: _Levels
    place: tuple[int, float, float]


_by_place = attrgetter("place")


def fullest(found: Iterable[Occupancy]) -> Occupancy | None:
    """The one with the least room left, by share; `None` without one."""
    return max(found, key=lambda each: each.share, default=None)


class UsageReader:
    """Reads and renders what subjects have used."""

    def __init__(self, directory: Path | None, own: Path | None, on_error: OnError) -> None:
        self._directory = directory
        self._own = own
        self._on_error = on_error
        # Once known they are exported, at 0 too.
        self._series: dict[tuple[str, str, str], None] = {}
        # Most lines are those of the last scrape: to make all anew takes long, and as long the
        # garbage collector would stop all threads.
        self._lines: dict[Path, workers.Lines] = {}

    def others(self) -> list[Snapshot]:
        """What the other processes have written."""
        found: list[Snapshot] = []
        paths: list[Path] = []
        read: dict[Path, workers.Lines] = {}
        try:
            if self._directory is not None:
                paths += self._directory.glob(workers.FILES)
        except Exception as error:
            self._on_error(error)
        for path in paths:
            if path != self._own:
                try:
                    snapshot, read[path] = workers.read(path, self._lines.get(path, {}))
                    found.append(snapshot)
                except Exception as error:
                    self._on_error(error)
        self._lines = read
        return found

    def collect(self) -> Iterator[Metric]:
        """Render what the others have written, by their settings, in a process without a table."""
        snapshots = self.others()
        return self.rendered(snapshots, merged(snapshots), time.time()) if snapshots else iter(())

    def rendered(
        self, snapshots: Sequence[Snapshot], subjects: Iterable[Subject], now: float
    ) -> Iterator[Metric]:
        """Render subjects by the settings of the first snapshot, which bound their number."""
        bounds, found = snapshots[0], _Rendered(now)
        tracked: Counter[tuple[str, str, str, Level]] = Counter()
        others: list[_Rated] = []

        def threads() -> Iterator[_Rated]:
            # One after the other: a list of many would make the garbage collector stop all threads.
            for each in subjects:
                if now - each.last > bounds.ttl:
                    continue
                try:
                    rated = _rated(each, now)
                except Exception as error:
                    self._on_error(error)
                    continue
                tracked.update(rated.levels)
                if each.key[1] == THREAD:
                    yield rated
                else:
                    others.append(rated)

        all_threads = threads()
        shown = nlargest(bounds.max_exported, all_threads, key=_by_place)
        # If none is to be exported, none was taken.
        deque(all_threads, maxlen=0)
        for each in shown:
            found.add_thread(each.subject)
        # What an agent or all share has no label, and is always shown.
        bounded = [each for each in others if each.subject.label == ""]
        labelled = [each for each in others if each.subject.label]
        of_subjects = bounded + nlargest(bounds.max_subjects, labelled, key=_by_place)
        found.add_subjects(each.subject for each in of_subjects)
        exported = Counter(one for each in (*shown, *of_subjects) for one in each.levels)
        self._series |= dict.fromkeys((agent, limit, scope) for agent, limit, scope, _ in tracked)
        # A copy: another scrape may add to it meanwhile.
        for agent, limit, scope in list(self._series):
            for state in Level:
                labels = {"agent": agent, "limit": limit_label(limit), "scope": scope}
                labels["state"] = state
                of_state = exported[agent, limit, scope, state]
                hidden = tracked[agent, limit, scope, state] - of_state
                found.add(names.SUBJECTS, {**labels, "shown": "true"}, of_state)
                found.add(names.SUBJECTS, {**labels, "shown": "false"}, hidden)
        store = fullest(each.store for each in snapshots if each.store is not None)
        if store is not None:
            found.add(names.STORE_KEYS, {"state": "kept"}, store.keys - store.droppable)
            found.add(names.STORE_KEYS, {"state": "droppable"}, store.droppable)
            found.add(names.STORE_KEYS, {"state": "free"}, store.max_keys - store.keys)
        found.add(names.START_TIME, {}, min(each.started for each in snapshots))
        return iter(found.families.values())


class _Rendered:
    """What is exported."""

    def __init__(self, now: float) -> None:
        self._now = now
        self.families = families()

    def add(self, spec: names.MetricSpec, labels: dict[str, str], value: float) -> None:
        # The metrics of a thread share their labels: `add_metric` would make them anew for each.
        self.families[spec.name].samples.append(Sample(spec.name, labels, value))

    def add_thread(self, subject: Subject) -> None:
        """Add what is exported of a thread."""
        agent, scope, thread = subject.key
        for limit, use in _uses(subject):
            labels = {"agent": agent, "limit": limit_label(limit), "thread_id": thread}
            self._add_count(use, scope, labels, names.THREAD_USED, names.THREAD_LIMIT)
            if use.decided:
                self._add_time(names.THREAD_TIMES, labels, "decision", use.decided)
            if use.refused is not None:
                self._add_time(names.THREAD_TIMES, labels, "refusal", use.refused)
                self.add(names.THREAD_BLOCKED, labels, use.blocked)
            # From 0 on: `increase()` does not see the first value of a series.
            if use.unit != "calls":
                self.add(names.THREAD_SPENT[use.unit], labels, in_base_unit(use.spent, use.unit))

    def add_subjects(self, subjects: Iterable[Subject]) -> None:
        """Add what is exported of other subjects, near ones first."""
        blocked: Counter[tuple[str, ...]] = Counter()
        for subject in subjects:
            agent, scope, _ = subject.key
            for limit, use in _uses(subject):
                shown = (agent, limit_label(limit), scope, subject.label or "")
                labels = dict(zip(names.SUBJECT_BLOCKED.labels, shown, strict=True))
                # The user's function may give two subjects the same label.
                is_new = shown not in blocked
                blocked[shown] += use.blocked
                if is_new and self._add_count(
                    use, scope, labels, names.SUBJECT_USED, names.SUBJECT_LIMIT
                ):
                    self._add_time(names.SUBJECT_TIMES, labels, "decision", use.decided)
        for of_labels, count in (+blocked).items():
            labels = dict(zip(names.SUBJECT_BLOCKED.labels, of_labels, strict=True))
            self.add(names.SUBJECT_BLOCKED, labels, count)

    def _add_count(
        self,
        use: Use,
        scope: str,
        labels: dict[str, str],
        used_of: names.ByUnit,
        limit_of: names.ByUnit,
    ) -> bool:
        """Add the number with the highest used share; whether there is one."""
        numbers = _numbers(use, scope, self._now)
        if not numbers:
            return False
        used, cap, ends = max(numbers, key=_share)
        self.add(used_of[use.unit], labels, in_base_unit(used, use.unit))
        self.add(limit_of[use.unit], labels, in_base_unit(cap, use.unit))
        if ends is not None:
            times = names.THREAD_TIMES if scope == THREAD else names.SUBJECT_TIMES
            self._add_time(times, labels, "reset", ends)
        return True

    def _add_time(
        self, spec: names.MetricSpec, labels: dict[str, str], event: str, when: float
    ) -> None:
        # To the millisecond: a tenth of what a scrape transfers is times.
        self.add(spec, {**labels, "event": event}, round(when, 3))


def _share(number: Number) -> float:
    return number[0] / number[1]


def _rated(subject: Subject, now: float) -> _Rated:
    """The subject with its levels: near ones by share, then exhausted ones, then others."""
    agent, scope, _ = subject.key
    levels: list[tuple[str, str, str, Level]] = []
    share = refused = 0.0
    for limit, use in _uses(subject):
        refused = max(refused, use.refused or 0.0)
        numbers = () if use.near is None else _numbers(use, scope, now)
        if numbers:
            used, cap, _ = max(numbers, key=_share)
            levels.append((agent, limit, scope, level(used, cap, use.near or 0)))
            share = max(share, used / cap)
    found = {each for *_, each in levels}
    if Level.EXHAUSTED in found:
        place = 1, refused, subject.last
    elif Level.NEAR in found:
        place = 2, share, subject.last
    else:
        place = 0, subject.last, subject.last
    return _Rated(subject, levels, place)


def _uses(subject: Subject) -> Iterable[tuple[str, Use]]:
    """What it has used, by limit, copied at once: a decision may add a limit meanwhile."""
    return list(subject.uses.items())


def _numbers(use: Use, scope: str, now: float) -> Sequence[Number]:
    """The limited numbers, as they are now: of a window that has ended, nothing is used."""
    if len(use.numbers) == 1 and use.numbers[0][1] and use.numbers[0][2] is None:
        return use.numbers
    found: list[Number] = []
    for used, cap, ends in use.numbers:
        if cap and (ends is None or ends > now):
            found.append((used, cap, ends))
        elif cap and scope == THREAD:
            found.append((0, cap, None))
    return found
