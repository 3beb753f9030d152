"""What threads, users and other subjects have used of their limits: a bounded table for scrapes.

A decision changes one entry of a dict; sorting is left to the scrape. If several processes answer
on one port, each writes its table to a file of their directory, and a scrape reads all the files.
"""

import atexit
import hashlib
import os
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from threading import Timer
from weakref import WeakSet

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from langchain_quota.core.decision import CountStatus, LimitStatus, Refund
from langchain_quota.limits.call import ROOT_RUN, RUN, STORE, THREAD
from langchain_quota.runtime.sync_async import fork_safe_lock
from langchain_quota.runtime.units import Level, Unit, in_base_unit, level
from langchain_quota.telemetry import names, workers
from langchain_quota.telemetry.events import CallerLabels, DecisionEvent, Spent
from langchain_quota.telemetry.labels import limit_label
from langchain_quota.telemetry.workers import Key, Number, Snapshot, Subject, Use

MAX_TRACKED = 100_000
"""The most threads and other subjects that are remembered; the longest idle go first."""

INTERVAL = 1.0
"""How long a worker waits at least from one write of its file to the next, in seconds."""

OnError = Callable[[Exception], None]

SubjectLabel = Callable[[str, str], str | None]
"""Makes the label of a subject, by its quota's name; `None` for one that is not to be shown."""

_BOUNDED = ("agent", "global")
"""The `per` of quotas with at most one subject for each agent, which always has series."""

_Count = tuple[str, Use, Number | None, Level | None]
"""A limit, its use, the number with the highest used share, and the level of an enforced limit."""

_Rated = tuple[tuple[int, float, float], Subject, list[_Count]]
"""A subject behind its place among those that are exported, and its counts."""

_METRICS = {
    True: (names.THREAD_USED, names.THREAD_LIMIT, names.THREAD_TIMES, names.THREAD_BLOCKED),
    False: (names.SUBJECT_USED, names.SUBJECT_LIMIT, names.SUBJECT_TIMES, names.SUBJECT_BLOCKED),
}
"""By whether a subject is a thread: what is used, of how much, when, and the refusals."""


class UsageTable(Collector):
    """The sink that keeps what subjects have used of their limits, from the newest decisions."""

    # A call without a thread changes nothing of threads.

    def __init__(
        self,
        own: Snapshot | None,
        directory: Path | None,
        on_error: OnError,
        *,
        near: float = 1.0,
        subject_label: SubjectLabel | None = None,
    ) -> None:
        # A process that only answers scrapes has no settings, and judges nothing.
        self._own = own
        self._directory = directory
        self._on_error = on_error
        self._near = near
        self._subject_label = subject_label
        # Once known they are exported, at 0 too.
        self._series: dict[tuple[str, str, str], None] = {}
        self._lock = fork_safe_lock()
        # Held while the file is written; the other one is taken under it.
        self._writing = fork_safe_lock()
        self.begin()
        _tables.add(self)

    def begin(self) -> None:
        """Begin an empty table, also in a forked process: its parent tells what it knows itself."""
        # Those without a call for longest come first.
        self._subjects: OrderedDict[Key, Subject] = OrderedDict()
        self._is_due = False
        self._written = 0.0
        self._path: Path | None = None
        if self._directory is not None:
            self._path = self._directory / workers.FILES.replace("*", secrets.token_hex(8))

    def judged(self, told: DecisionEvent) -> None:
        """Add the decisions about calls of one agent and thread, in order."""
        now, who = time.time(), told.who
        statuses = [status for decision in told.decisions for status in decision.limits]
        with self._lock:
            # First: a subject that comes back gets its label anew.
            self._forget(now)
            if who.thread is not None:
                thread = self._called((who.agent, THREAD, who.thread), who.thread, now)
                for status in statuses:
                    self._decide(_use(thread, status.limit, status.unit), status, now)
        quotas = [
            each for status in statuses if status.quotas for each in self._quotas(who.agent, status)
        ]
        with self._lock:
            for key, label, status, quota in quotas:
                subject = self._called(key, label, now)
                use = _use(subject, status.limit, status.unit)
                use.decided, use.near = now, self._near_of(status)
                # Only enforced limits say how much a subject has used.
                told_of = status.enforced and not quota.smooth
                use.numbers = (_number(status, quota),) if told_of else ()
                if status.scope == quota.scope:
                    _refuse(use, status, now)
                if subject.label:
                    told.subjects[status.limit, quota.scope] = subject.label
        self._write_soon()

    def refund(self, who: CallerLabels, refund: Refund) -> None:
        """Subtract calls from what a thread has used of a limit; other amounts are settled."""
        with self._lock:
            thread = self._subjects.get((who.agent, THREAD, who.thread or ""))
            use = None if thread is None else thread.uses.get(refund.limit)
            if thread is None or use is None or use.unit != "calls":
                return
            thread.line = ""
            use.numbers = tuple(
                (max(0, used - refund.call.amount), cap, ends) for used, cap, ends in use.numbers
            )
        self._write_soon()

    def spend(self, who: CallerLabels, spent: Sequence[Spent]) -> None:
        """Add what a model call of a thread has spent, by limit."""
        if who.thread is None:
            return
        with self._lock:
            thread = self._called((who.agent, THREAD, who.thread), who.thread, time.time())
            for limit, unit, amount in spent:
                _use(thread, limit, unit).spent += amount
        self._write_soon()

    def reset(self, who: CallerLabels, limits: Sequence[LimitStatus]) -> None:
        """Set what a thread has used to 0; `limits` is their status after it."""
        if who.thread is None:
            return
        now = time.time()
        with self._lock:
            thread = self._called((who.agent, THREAD, who.thread), who.thread, now)
            for status in limits:
                if status.limit not in thread.uses:
                    self._decide(_use(thread, status.limit, status.unit), status, now)
            for use in thread.uses.values():
                use.decided = now
                use.numbers = tuple((0, cap, None) for _, cap, _ in use.numbers)
        self._write_soon()

    def write(self) -> None:
        """Write the file of this process, if others read it; what fails is reported."""
        if self._path is None or self._own is None:
            return
        with self._writing:
            # Before the next one may become due, which waits from here.
            self._written = time.monotonic()
            self._is_due = False
            try:
                with self._lock:
                    known = list(self._subjects.values())
                    for each in known:
                        each.line = each.line or workers.line_of(each)
                    lines = [each.line for each in known]
                workers.write(self._path, self._own, lines)
            except Exception as error:
                self._on_error(error)

    def end(self) -> None:
        """Write what this process has to tell the others for the last time."""
        if self._subjects:
            self.write()

    def describe(self) -> Iterator[Metric]:
        """The families without samples: for the registry's check for duplicates."""
        return iter(_Families().values())

    def collect(self) -> Iterator[Metric]:
        """Render what all processes know: by the settings of this one, else of another."""
        snapshots: list[Snapshot] = []
        if self._own is not None:
            with self._lock:
                # Of equals the ones with the latest calls come first.
                known = list(reversed(self._subjects.values()))
            snapshots.append(self._own._replace(subjects=known))
        if self._directory is not None:
            snapshots += workers.read_others(self._directory, self._path, self._on_error)
        if not snapshots:
            return
        found, now, bounds = _Families(), time.time(), snapshots[0]
        tracked, exported = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
        known = [each for each in workers.merged(snapshots) if now - each.last <= bounds.ttl]
        others = [each for each in known if each.key[1] != THREAD]
        for subjects, most in (
            ([each for each in known if each.key[1] == THREAD], bounds.max_threads),
            # What an agent or all share has no label, and is always shown.
            ([each for each in others if each.label == ""], len(others)),
            ([each for each in others if each.label], bounds.max_subjects),
            ([each for each in others if each.label is None], 0),
        ):
            rated = self._rated(subjects, now, tracked)
            # All are counted, if none is to be exported, too.
            shown = nlargest(max(1, most), rated, key=itemgetter(0))[:most]
            for _, subject, counts in shown:
                exported.update(_levels(subject, counts))
            found.add_subjects(shown)
        self._series |= dict.fromkeys((agent, limit, scope) for agent, limit, scope, _ in tracked)
        # A copy: another scrape may add to it meanwhile.
        for series in list(self._series):
            agent, limit, scope = series
            labels = {"agent": agent, "limit": limit_label(limit), "scope": scope}
            for state in Level:
                seen = exported[*series, state]
                hidden = tracked[*series, state] - seen
                found.add(names.SUBJECTS, {**labels, "state": state, "shown": "true"}, seen)
                found.add(names.SUBJECTS, {**labels, "state": state, "shown": "false"}, hidden)
        found.add(names.START_TIME, {}, min(each.started for each in snapshots))
        yield from found.values()

    def _rated(
        self, subjects: Iterable[Subject], now: float, tracked: Counter[tuple[str, ...]]
    ) -> Iterator[_Rated]:
        """Rate and count subjects: near ones by share come first, then exhausted ones."""
        # One after the other: a list of many would make the garbage collector stop all threads.
        for each in subjects:
            try:
                place, counts = _rate(each, now)
            except Exception as error:
                self._on_error(error)
                continue
            tracked.update(_levels(each, counts))
            yield place, each, counts

    def _forget(self, now: float) -> None:
        """Forget subjects that are idle or too many."""
        known, ttl = self._subjects, self._own.ttl if self._own else 0.0
        while known:
            oldest = next(iter(known.values()))
            if len(known) <= MAX_TRACKED and now - oldest.last <= ttl:
                return
            known.popitem(last=False)

    def _called(self, key: Key, label: str | None, now: float) -> Subject:
        """The subject of a key, with a call now, to be changed."""
        found = self._subjects.get(key)
        if found is None:
            found = self._subjects[key] = Subject(key, label, now, {})
        self._subjects.move_to_end(key)
        found.last, found.line = now, ""
        return found

    def _decide(self, use: Use, status: LimitStatus, now: float) -> None:
        """Set what a thread has used of a limit, after a decision."""
        # The call ran in an outage: no quota has an answer, and the state has no count. With a run
        # limit alone, a store has no count of the thread.
        limited = [each for each in status.counts if each.limit is not None]
        is_silent = status.shared and all(each.scope == RUN for each in limited)
        is_unknown = is_silent and (not limited or len(use.numbers) > 1)
        if status.reason != STORE and not is_unknown:
            use.decided = now
            own = (each for each in status.counts if THREAD in (each.scope, each.per))
            use.numbers = tuple(_number(status, each) for each in own if not each.smooth)
        _refuse(use, status, now)
        use.near = self._near_of(status)

    def _near_of(self, status: LimitStatus) -> float | None:
        """The share from which a limit is near; nobody is near one on trial, which lets all run."""
        if not status.enforced:
            return None
        return self._near if status.near is None else status.near

    def _quotas(
        self, agent: str, status: LimitStatus
    ) -> Iterator[tuple[Key, str | None, LimitStatus, CountStatus]]:
        """The quotas of others than threads and root runs, with their keys and labels."""
        for quota in status.quotas:
            # Root runs come without end, and nobody looks for one by its name.
            if quota.per in (THREAD, ROOT_RUN):
                continue
            key = (agent, quota.scope, _digest(quota.subject))
            label = None
            if quota.per in _BOUNDED:
                label = ""
            elif key not in self._subjects and self._subject_label is not None:
                # Outside the lock: it is the user's function.
                label = self._subject_label(quota.scope, quota.subject)
            yield key, label, status, quota

    def _write_soon(self) -> None:
        """Write a second after the last time, in a thread that ends with it: no loop waits."""
        if self._path is None:
            return
        with self._lock:
            is_due, self._is_due = self._is_due, True
        if is_due:
            return
        try:
            timer = Timer(max(0, self._written + INTERVAL - time.monotonic()), self.write)
            timer.daemon = True
            timer.start()
        except BaseException:
            # No thread can be started: the next decision tries again.
            self._is_due = False
            raise


class _Families(dict[str, Metric]):
    """The families of the table by name, and their samples."""

    def __init__(self) -> None:
        made = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        super().__init__(
            (spec.name, made[spec.kind](spec.name, spec.help, labels=spec.labels))
            for spec in names.METRICS
            if spec.is_of_table
        )

    def add(self, spec: names.MetricSpec, labels: dict[str, str], value: float) -> None:
        """Add a sample."""
        # The metrics of a thread share their labels: `add_metric` would make them anew for each.
        self[spec.name].samples.append(Sample(spec.name, labels, value))

    def add_subjects(self, shown: Iterable[_Rated]) -> None:
        """Add what is exported of subjects, of those with the same label as of the first one."""
        refusals = Counter[tuple[str, ...]]()
        for _, subject, counts in shown:
            for limit, use, *_ in counts:
                refusals[*subject.key[:2], limit, subject.label or ""] += use.blocked
        for _, subject, counts in shown:
            agent, scope, _ = subject.key
            label = subject.label or ""
            for limit, use, number, _ in counts:
                # The user's function may give two subjects the same label.
                blocked = refusals.pop((agent, scope, limit, label), None)
                if blocked is None:
                    continue
                labels = {"agent": agent, "limit": limit_label(limit)}
                if scope == THREAD:
                    labels["thread_id"] = label
                    self._add_thread(use, labels)
                else:
                    labels |= {"scope": scope, "subject": label}
                used_of, limit_of, times, blocked_of = _METRICS[scope == THREAD]
                if number is not None:
                    used, cap, ends = number
                    self.add(used_of[use.unit], labels, in_base_unit(used, use.unit))
                    self.add(limit_of[use.unit], labels, in_base_unit(cap, use.unit))
                    self._add_time(times, labels, "reset", ends)
                if number is not None or scope == THREAD:
                    self._add_time(times, labels, "decision", use.decided)
                if blocked:
                    self.add(blocked_of, labels, blocked)

    def _add_thread(self, use: Use, labels: dict[str, str]) -> None:
        """Add what only threads have."""
        self._add_time(names.THREAD_TIMES, labels, "refusal", use.refused)
        # From 0 on: `increase()` does not see the first value of a series.
        if use.unit != "calls":
            self.add(names.THREAD_SPENT[use.unit], labels, in_base_unit(use.spent, use.unit))

    def _add_time(
        self, spec: names.MetricSpec, labels: dict[str, str], event: str, when: float | None
    ) -> None:
        # To the millisecond: a tenth of what a scrape transfers is times.
        if when:
            self.add(spec, {**labels, "event": event}, round(when, 3))


def _use(subject: Subject, limit: str, unit: Unit) -> Use:
    """What a subject has used of a limit."""
    found = subject.uses.get(limit)
    # Two limits with different units may have the same name.
    if found is None or found.unit != unit:
        found = subject.uses[limit] = Use(unit=unit)
    return found


def _refuse(use: Use, status: LimitStatus, now: float) -> None:
    """Count a refusal, if a limit refuses the call because it is used up."""
    if status.reason is not None and status.enforced and status.reason != STORE:
        use.blocked += 1
        use.refused = now


def _number(status: LimitStatus, quota: CountStatus) -> Number:
    """What is used of a quota."""
    ends = None if quota.resets_at is None else quota.resets_at.timestamp()
    return quota.before if status.deferred else quota.used, quota.limit or 0, ends


def _digest(subject: str) -> str:
    """What is remembered of a subject: a hash, so that users' names are not kept."""
    return hashlib.blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _highest(numbers: Sequence[Number], now: float, *, is_thread: bool) -> Number | None:
    """The number with the highest used share; of a window that has ended, nothing is used."""
    if len(numbers) == 1 and numbers[0][2] is None:
        return numbers[0] if numbers[0][1] else None
    limited = [each for each in numbers if each[1]]
    running = [each for each in limited if each[2] is None or each[2] > now]
    if is_thread:
        running += [(0, cap, None) for _, cap, ends in limited if ends is not None and ends <= now]
    return max(running, key=lambda each: each[0] / each[1], default=None)


def _rate(subject: Subject, now: float) -> tuple[tuple[int, float, float], list[_Count]]:
    """A subject's place, and its counts: near ones by share, then exhausted ones, then others."""
    is_thread = subject.key[1] == THREAD
    counts: list[_Count] = []
    highest = refused = 0.0
    # Copied at once: a decision may add a limit meanwhile.
    for limit, use in list(subject.uses.items()):
        number = _highest(use.numbers, now, is_thread=is_thread)
        reached = None
        if number is not None and use.near is not None:
            reached = level(number[0], number[1], use.near)
            # It fails here if a limit is too large for a metric, not where samples are rendered.
            highest = max(highest, number[0] / float(number[1]))
        refused = max(refused, use.refused or 0.0)
        counts.append((limit, use, number, reached))
    found = {each[3] for each in counts}
    if Level.EXHAUSTED in found:
        return (1, refused, subject.last), counts
    if Level.NEAR in found:
        return (2, highest, subject.last), counts
    return (0, subject.last, subject.last), counts


def _levels(subject: Subject, counts: list[_Count]) -> list[tuple[str, ...]]:
    """Of each limit: the agent's label, the limit, the scope, and the level."""
    agent, scope, _ = subject.key
    return [(agent, limit, scope, each) for limit, _, _, each in counts if each is not None]


_tables: WeakSet[UsageTable] = WeakSet()


def _after_fork() -> None:
    for table in list(_tables):
        table.begin()


def _at_exit() -> None:
    for table in list(_tables):
        table.end()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
