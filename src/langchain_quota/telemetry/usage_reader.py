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

from langchain_quota.decision import THREAD
from langchain_quota.stores import Occupancy
from langchain_quota.telemetry import names, workers
from langchain_quota.telemetry.labels import limit_label
from langchain_quota.telemetry.names import MetricSpec
from langchain_quota.telemetry.workers import Number, Snapshot, Subject, Use, merged
from langchain_quota.units import Level, in_base_unit, near_threshold

Families = dict[MetricSpec, GaugeMetricFamily | CounterMetricFamily]
OnError = Callable[[Exception], None]
_Series = tuple[str, str, str]
"""The agent's label, the limit, and the scope of the subjects that are counted."""

_LEVELS = (Level.OK, Level.NEAR, Level.EXHAUSTED)
_OK, _NEAR, _EXHAUSTED = range(3)
_DECISION, _RESET = "decision", "reset"


def families() -> Families:
    """The families, without samples."""
    computed = ("subject", "thread", "store_keys", "start_time")
    begins = tuple(f"langchain_quota_{each}" for each in computed)
    specs = [each for each in names.METRICS if each.name.startswith(begins)]
    made = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    return {spec: made[spec.kind](spec.name, spec.help, labels=spec.labels) for spec in specs}


class _Rated(NamedTuple):
    """A subject, the highest level of its limits, and its place among those that are exported."""

    subject: Subject
    level: int
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
        self._series: dict[_Series, None] = {}
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
        found, bounds = families(), snapshots[0]
        counts: Counter[tuple[_Series, int]] = Counter()
        others: list[_Rated] = []

        def threads() -> Iterator[_Rated]:
            # One after the other: a list of many would make the garbage collector stop all threads.
            for each in self._known(subjects, bounds.ttl, counts, now):
                if each.subject.key[1] == THREAD:
                    yield each
                elif each.subject.label is not None:
                    others.append(each)

        all_threads = threads()
        shown = nlargest(bounds.max_exported, all_threads, key=_by_place)
        # If none is to be exported, none was taken.
        deque(all_threads, maxlen=0)
        for chosen in shown:
            _add_thread(found, chosen.subject, now)
        labelled = [each for each in others if each.subject.label]
        bounded = [each for each in others if not each.subject.label]
        labelled = nlargest(bounds.max_subjects, labelled, key=_by_place)
        _add_subjects(found, bounded, now)
        _add_subjects(found, labelled, now)
        exported: Counter[tuple[_Series, int]] = Counter()
        for chosen in (*shown, *bounded, *labelled):
            _rated(chosen.subject, exported, now)
        self._series |= dict.fromkeys(series for series, _ in counts)
        # A copy: another scrape may add to it meanwhile.
        for series in list(self._series):
            agent, limit, scope = series
            for number, state in enumerate(_LEVELS):
                labels, several = [agent, limit_label(limit), scope, state], (series, number)
                found[names.SUBJECTS].add_metric([*labels, "true"], exported[several])
                hidden = counts[several] - exported[several]
                found[names.SUBJECTS].add_metric([*labels, "false"], hidden)
        _add_processes(found, snapshots)
        return iter(found.values())

    def _known(
        self,
        subjects: Iterable[Subject],
        ttl: float,
        counts: Counter[tuple[_Series, int]],
        now: float,
    ) -> Iterator[_Rated]:
        """The subjects with calls not too long ago; their levels are counted for each limit."""
        for each in subjects:
            if now - each.last <= ttl:
                try:
                    yield _rated(each, counts, now)
                except Exception as error:
                    self._on_error(error)


def _rated(subject: Subject, counts: Counter[tuple[_Series, int]], now: float) -> _Rated:
    """The subject with its level, which is counted for each limit."""
    agent, scope, _ = subject.key
    highest, share, refused, fell = _OK, 0.0, 0.0, False
    for limit, use in _uses(subject):
        if use.refused is not None and use.refused > refused:
            refused = use.refused
        near = use.near
        if near is None:
            continue
        numbers = _numbers(use, scope, now)
        if numbers is not use.numbers:
            fell = fell or any(_has_fallen(each, near, now) for each in use.numbers)
        if numbers:
            rated = max([_level(used, cap, near) for used, cap, _ in numbers])
            counts[(agent, limit, scope), rated] += 1
            highest = max(highest, rated)
            share = max(share, *[used / cap for used, cap, _ in numbers])
    if highest == _NEAR:
        return _Rated(subject, highest, (2, share, subject.last))
    if highest == _EXHAUSTED:
        return _Rated(subject, highest, (1, refused, subject.last))
    # One whose level falls without a call comes after those with a call.
    return _Rated(subject, highest, (0, 0.0 if fell else subject.last, subject.last))


def _level(used: int, cap: int, near: float) -> int:
    if used >= cap:
        return _EXHAUSTED
    return _NEAR if used >= near_threshold(cap, near) else _OK


def _uses(subject: Subject) -> Iterable[tuple[str, Use]]:
    """What it has used, by limit, copied at once: a decision may add a limit meanwhile."""
    return list(subject.uses.items())


def _has_fallen(number: Number, near: float, now: float) -> bool:
    """Whether a number was near or exhausted when its window ended."""
    used, cap, ends = number
    return bool(cap) and ends is not None and ends <= now and _level(used, cap, near) > _OK


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


def _add_thread(found: Families, subject: Subject, now: float) -> None:
    """Add what is exported of a thread."""
    agent, scope, thread = subject.key
    for limit, use in _uses(subject):
        labels = [agent, limit_label(limit), thread]
        numbers = _numbers(use, scope, now)
        if numbers:
            used, cap, ends = max(numbers, key=lambda each: each[0] / each[1])
            found[names.THREAD_USED[use.unit]].add_metric(labels, in_base_unit(used, use.unit))
            found[names.THREAD_LIMIT[use.unit]].add_metric(labels, in_base_unit(cap, use.unit))
            if ends is not None:
                found[names.THREAD_TIMES].add_metric([*labels, _RESET], ends)
        if use.decided:
            found[names.THREAD_TIMES].add_metric([*labels, _DECISION], use.decided)
        if use.refused is not None:
            found[names.THREAD_TIMES].add_metric([*labels, "refusal"], use.refused)
            found[names.THREAD_BLOCKED].add_metric(labels, use.blocked)
        if use.spent:
            spent = in_base_unit(use.spent, use.unit)
            found[names.THREAD_SPENT[use.unit]].add_metric(labels, spent)


def _add_subjects(found: Families, several: Iterable[_Rated], now: float) -> None:
    """Add what is exported of subjects with labels, near ones first."""
    shown = set()
    blocked: Counter[tuple[str, ...]] = Counter()
    for subject, *_ in several:
        agent, scope, _ = subject.key
        for limit, use in _uses(subject):
            labels = (agent, limit_label(limit), scope, subject.label or "")
            # The user's function may give two subjects the same label.
            blocked[labels] += use.blocked
            numbers = _numbers(use, scope, now)
            if not numbers or labels in shown:
                continue
            shown.add(labels)
            ((used, cap, ends),) = numbers
            found[names.SUBJECT_USED[use.unit]].add_metric(labels, in_base_unit(used, use.unit))
            found[names.SUBJECT_LIMIT[use.unit]].add_metric(labels, in_base_unit(cap, use.unit))
            found[names.SUBJECT_TIMES].add_metric([*labels, _DECISION], use.decided)
            if ends is not None:
                found[names.SUBJECT_TIMES].add_metric([*labels, _RESET], ends)
    for several_labels, count in blocked.items():
        if count:
            found[names.SUBJECT_BLOCKED].add_metric(several_labels, count)


def _add_processes(found: Families, snapshots: Sequence[Snapshot]) -> None:
    """Add how full the fullest store is, and when the first process began."""
    store = fullest(each.store for each in snapshots if each.store is not None)
    if store is not None:
        found[names.STORE_KEYS].add_metric(["kept"], store.keys - store.droppable)
        found[names.STORE_KEYS].add_metric(["droppable"], store.droppable)
        found[names.STORE_KEYS].add_metric(["free"], store.max_keys - store.keys)
    found[names.START_TIME].add_metric([], min(each.started for each in snapshots))
