"""A bounded table of what threads, users and other subjects have used of their limits.

A decision changes one entry of a dict; a scrape sorts. If several processes answer on one port,
each writes its table to a file of their directory, and a scrape reads all files.
"""

import atexit
import os
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from threading import Timer
from weakref import WeakSet

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from langchain_quota.core.decide import Verdict
from langchain_quota.core.decision import Refund
from langchain_quota.core.plans import Meter, Plan, Rule
from langchain_quota.limits import Limit
from langchain_quota.limits.call import FROZEN, ROOT_RUN, RUN, STORE, THREAD, Call
from langchain_quota.runtime.sync_async import fork_safe_lock
from langchain_quota.telemetry import workers
from langchain_quota.telemetry.events import CallerLabels, DecisionEvent, LimitSpend
from langchain_quota.telemetry.logs import logger
from langchain_quota.telemetry.reading import HOURS, Families, Reading, digest, in_slices
from langchain_quota.telemetry.recent_calls import RecentCalls, ended, note_outcome
from langchain_quota.telemetry.workers import Export, Key, Number, OnError, Snapshot, Subject, Use

MAX_TRACKED = 100_000
"""Maximum of threads and other subjects in the table; the longest idle ones go first."""

INTERVAL = 1.0
"""Minimum time from one write of a worker's file to the next, in seconds."""

SubjectLabel = Callable[[str, str], str | None]
"""A function from a quota's name and a subject to its label, or `None` if it must not be shown."""

_BOUNDED = ("agent", "global")
"""The `per` of quotas with one subject for each agent, which always has series."""


class UsageTable(Collector):
    """The sink that keeps what subjects have used of their limits, from the newest decisions."""

    def __init__(
        self,
        settings: Snapshot | None,
        directory: Path | None,
        on_error: OnError,
        *,
        near: float = 1.0,
        subject_label: SubjectLabel | None = None,
    ) -> None:
        # A process that only answers scrapes has no settings, because it checks no calls.
        self._settings = settings
        self._directory = directory
        self._on_error = on_error
        self._near = near
        self._subject_label = subject_label
        # Once a series exists, it is exported, even at 0.
        self._series: dict[tuple[str, str, str], None] = {}
        self.counts_in_memory = False
        """Whether a `MemoryStore` counts quotas; until other workers are known."""
        self._lock = fork_safe_lock()
        # Held while the file is written. Never acquire it while `_lock` is held.
        self._writing = fork_safe_lock()
        self.begin()
        _tables.add(self)

    def begin(self) -> None:
        """Begin an empty table, as in a forked process, whose parent exports its own subjects."""
        # The longest idle subjects come first.
        self._subjects: OrderedDict[Key, Subject] = OrderedDict()
        # Nanodollars by the hour since the Unix epoch, and the number of calls that wait.
        self._costs = Counter[int]()
        self._waiting, self._exports = 0, list[Export]()
        self._recent = RecentCalls()
        # Who is frozen, by store and prefix, and when a store answered last.
        self._frozen = dict[str, Sequence[workers.Freeze]]()
        self._answered = 0.0
        self._is_due = False
        self._written = 0.0
        self._path: Path | None = None
        if self._directory is not None:
            self._path = self._directory / workers.FILES.replace("*", secrets.token_hex(8))

    def record_decisions(self, event: DecisionEvent) -> None:
        """Add the verdicts about calls of one agent and thread, in order."""
        now, caller = time.time(), event.caller
        # A charge has no tools.
        thread, is_charge, has_quotas = None, not event.tools, False
        with self._lock:
            # Forget idle subjects first, so that one which comes back gets a new label.
            self._forget(now)
            if caller.thread is not None:
                thread = self._touch((caller.agent, THREAD, caller.thread), caller.thread, now)
            for verdict in event.verdicts:
                has_quotas = has_quotas or bool(verdict.plan.quotas)
                if thread is not None:
                    for index in range(len(verdict.plan.rules)):
                        self._record(thread, verdict, index, now, is_charge=is_charge)
                if not is_charge:
                    self._recent.count(verdict, now)
                    # What the call of a charge costs is known to `spend`.
                    self._add_cost(verdict.cost, thread, now)
        if has_quotas:
            self._record_quotas(event, thread, now, is_charge=is_charge)
        if self._path is not None:
            self._write_soon()

    def _record_quotas(
        self, event: DecisionEvent, thread: Subject | None, now: float, *, is_charge: bool
    ) -> None:
        """Set what the subjects of quotas have used, and add their labels to the event."""
        quotas = [
            (*self._key_of(event.caller.agent, verdict, meter), verdict, index, meter)
            for verdict in event.verdicts
            for index, meter in verdict.plan.quotas
            # Root runs come without end, and nobody searches for one by its id.
            if meter.per not in (THREAD, ROOT_RUN)
        ]
        for key, label, verdict, index, meter in quotas:
            limit = verdict.plan.rules[index].limit
            with self._lock:
                subject = self._touch(key, label, now)
                use = subject.use_of(limit.name, limit.unit)
                use.decided, use.near = now, self._near_share(limit)
                # Limits in dry run, and smooth quotas, export no amounts.
                has_number = limit.enforce and not meter.spacing
                use.numbers = (_number(verdict, index, meter),) if has_number else ()
                if verdict.refused.get(limit.name) in (None, STORE, meter.scope):
                    reason = note_outcome(use, verdict, index, now, is_charge=is_charge)
                    if subject.label and reason == FROZEN:
                        event.subjects[limit.name, FROZEN] = subject.label
                    refusal = thread.uses[limit.name].refusal if thread else None
                    if thread is not None and refusal is not None and use.refused == now:
                        thread.line, refusal["subject"] = "", subject.label or ""
                if subject.label:
                    event.subjects[limit.name, meter.scope] = subject.label

    def keep_refusals(self, event: DecisionEvent) -> None:
        """Keep what limits have refused, with the traces of the calls."""
        with self._lock:
            self._recent.keep_refusals(event)
        self._write_soon()

    def refund(self, caller: CallerLabels, refunds: Sequence[Refund]) -> None:
        """Subtract calls that did not run, and what they cost; other units are settled."""
        costs: dict[object, int] = {}
        with self._lock:
            thread = self._change_thread(caller)
            for refund in refunds:
                use = thread.uses.get(refund.limit) if thread else None
                if use is not None and use.unit == "calls":
                    use.numbers = tuple(
                        (max(0, used - refund.call.amount), limit, ends, scope)
                        for used, limit, ends, scope in use.numbers
                    )
                # Several limits may refund a call, which was paid once.
                call = refund.call.tool, refund.call.id
                costs[call] = max(costs.get(call, 0), refund.nanodollars)
            self._add_cost(-sum(costs.values()), thread, time.time())
        self._write_soon()

    def change_waiting(self, caller: CallerLabels, limit: str, change: int) -> None:
        """Change the number of calls that wait now for a limit."""
        with self._lock:
            self._waiting = max(0, self._waiting + change)
            if thread := self._change_thread(caller):
                use = thread.uses.get(limit) or thread.uses.setdefault(limit, Use())
                use.waiting = max(0, use.waiting + change)
        self._write_soon()

    def record_freezes(self, source: str, frozen: Sequence[workers.Freeze] | None) -> None:
        """Note that a store answered and, if it was read, who is frozen under one prefix."""
        self._answered = time.time()
        if frozen is not None:
            with self._lock:
                self._frozen[source] = frozen
            self._write_soon()

    def spend(self, caller: CallerLabels, spent: Sequence[LimitSpend]) -> None:
        """Add what a model call has spent, by limit; its cost counts once, under several limits."""
        now, thread = time.time(), None
        with self._lock:
            if caller.thread is not None:
                thread = self._touch((caller.agent, THREAD, caller.thread), caller.thread, now)
                for limit, unit, amount in spent:
                    thread.use_of(limit, unit).spent += amount
            costs = [amount for _, unit, amount in spent if unit == "nanodollars"]
            self._add_cost(max(costs, default=0), thread, now)
        self._write_soon()

    def reset(self, caller: CallerLabels, rules: Sequence[Rule]) -> None:
        """Set what a thread has used of limits to 0."""
        if caller.thread is None:
            return
        now = time.time()
        with self._lock:
            thread = self._touch((caller.agent, THREAD, caller.thread), caller.thread, now)
            for rule in rules:
                if rule.limit.name not in thread.uses:
                    unused = Verdict.of_charge(Call("model"), Plan.of([rule]), Counter(), 0, {})
                    self._record(thread, unused, 0, now, is_charge=True)
            for use in thread.uses.values():
                use.decided, use.refusal = now, ended(use.refusal, now)
                use.numbers = tuple((0, limit, None, scope) for _, limit, _, scope in use.numbers)
        self._write_soon()

    def write(self) -> None:
        """Write the file of this process, if others read it, and report a failure."""
        if self._path is None or self._settings is None:
            return
        with self._writing:
            # Set the time before `_is_due`, because the next write waits from this time on.
            self._written = time.monotonic()
            self._is_due = False
            try:
                self._warn_of_workers()
                snapshot = self._snapshot(self._settings)
                lines = [self._line_of(subject) for subject in in_slices(snapshot.subjects)]
                workers.write(self._path, snapshot, lines)
            except Exception as error:
                self._on_error(error)

    def _warn_of_workers(self) -> None:
        """Warn once if quotas are counted in memory, and another process has a file, and lives."""
        if not self.counts_in_memory or self._directory is None:
            return
        others = workers.read_others(self._directory, self._path, self._on_error)
        if any(other.pid != os.getpid() and workers.is_alive(other.pid) for other in others):
            self.counts_in_memory = False
            logger.warning(
                "several workers count quotas in a MemoryStore, and each allows the whole: write "
                "store=RedisStore() or PostgresStore(…)"
            )

    def end(self) -> None:
        """Write the file for the last time, if it has subjects."""
        if self._subjects or self._costs:
            self.write()

    def describe(self) -> Iterator[Metric]:
        """Return the families without samples, for the registry's check for duplicates."""
        return iter(Families().values())

    def collect(self) -> Iterator[Metric]:
        """Render the subjects of all processes, by the settings of this one, else of another."""
        reading = self.read(is_scrape=True)
        if not reading.processes:
            return
        self._exports = [(*key, *times) for key, times in reading.exports.items()]
        # Others go on with it, whoever answers the next scrape.
        self._write_soon()
        self._series |= dict.fromkeys(series[:3] for series in reading.tracked)
        families = Families()
        # Copy, because a concurrent scrape may add series.
        families.add_all(reading, list(self._series))
        yield from families.values()

    def read(self, *, is_scrape: bool = False) -> Reading:
        """Return what all processes know now, bounded for the export."""
        snapshots: list[Snapshot] = []
        if self._settings is not None:
            snapshots.append(self._snapshot(self._settings))
        if self._directory is not None:
            snapshots += workers.read_others(self._directory, self._path, self._on_error)
        return Reading(snapshots, self._on_error, is_scrape=is_scrape)

    def _snapshot(self, settings: Snapshot) -> Snapshot:
        """Return what this process knows now."""
        with self._lock:
            return settings._replace(
                pid=os.getpid(),
                waiting=self._waiting,
                costs=[*self._costs.items()],
                frozen=(self._answered, [*chain(*self._frozen.values())]),
                calls=[[minute, *counts] for minute, counts in self._recent.minutes.items()],
                refusals=[*self._recent.refusals],
                exports=self._exports,
                # In any order: an OrderedDict in its order takes 30 times as long, under the lock.
                subjects=list(dict.values(self._subjects))[::-1],
            )

    def _line_of(self, subject: Subject) -> str:
        """Return the line of a subject in the file."""
        line = subject.line
        if not line:
            # Lock for one subject at a time, because decisions wait for this lock.
            with self._lock:
                line = subject.line = workers.line_of(subject)
        return line

    def _add_cost(self, amount: int, thread: Subject | None, now: float) -> None:
        """Add nanodollars to the cost of this hour, and to that of a thread."""
        if not amount:
            return
        hour = int(now // 3600)
        self._costs[hour] += amount
        for past in [past for past in self._costs if past <= hour - HOURS]:
            del self._costs[past]
        if thread is not None:
            thread.cost += amount

    def _forget(self, now: float) -> None:
        """Forget subjects that are idle or too many."""
        subjects, ttl = self._subjects, self._settings.ttl if self._settings else 0.0
        while subjects:
            oldest = next(iter(subjects.values()))
            if len(subjects) <= MAX_TRACKED and now - oldest.last <= ttl:
                return
            subjects.popitem(last=False)

    def _touch(self, key: Key, label: str | None, now: float) -> Subject:
        """Return the subject of a key, created if needed, and note that it has a call now."""
        subject = self._subjects.get(key)
        if subject is None:
            subject = self._subjects[key] = Subject(key, label, now, {})
        self._subjects.move_to_end(key)
        subject.last, subject.line = now, ""
        return subject

    def _change_thread(self, caller: CallerLabels) -> Subject | None:
        """Return the thread of a caller, if it is in the table, and have its line written anew."""
        thread = self._subjects.get((caller.agent, THREAD, caller.thread or ""))
        if thread is not None:
            thread.line = ""
        return thread

    def _record(
        self, thread: Subject, verdict: Verdict, index: int, now: float, *, is_charge: bool
    ) -> None:
        """Set what a thread has used of a limit, after a verdict."""
        rule = verdict.plan.rules[index]
        limit, meters = rule.limit, rule.meters
        use = thread.use_of(limit.name, limit.unit)
        is_unknown = False
        if rule.shared:
            # When the call ran in an outage, no quota has an answer, and the state has no count.
            # With a run limit alone, a store has no count of the thread.
            scopes = {meter.scope for meter in meters if meter.maximum is not None}
            is_unknown = scopes <= {RUN} and (not scopes or len(use.numbers) > 1)
        if verdict.refused.get(limit.name) != STORE and not is_unknown:
            use.decided = now
            use.numbers = tuple(
                [
                    _number(verdict, index, meter)
                    for meter in meters
                    if THREAD in (meter.scope, meter.per) and not meter.spacing
                ]
            )
        note_outcome(use, verdict, index, now, is_charge=is_charge)
        use.near = self._near_share(limit)

    def _near_share(self, limit: Limit) -> float | None:
        """Return the share from which a limit is near, or `None` in dry run: no call is stopped."""
        if not limit.enforce:
            return None
        return limit.near_share or self._near

    def _key_of(self, agent: str, verdict: Verdict, quota: Meter) -> tuple[Key, str | None]:
        """Return the key of a quota's subject, and its label if the subject is new."""
        subject = verdict.place_of(quota).subject
        key = (agent, quota.scope, digest(subject))
        if quota.per in _BOUNDED:
            return key, ""
        if key in self._subjects or self._subject_label is None:
            return key, None
        # Call the user's function outside the lock, because it may be slow.
        return key, self._subject_label(quota.scope, subject)

    def _write_soon(self) -> None:
        """Write a second after the last write, in a new thread, so that no event loop waits."""
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
            # No thread can be started, so let the next decision try again.
            self._is_due = False
            raise


def _number(verdict: Verdict, index: int, meter: Meter) -> Number:
    """Return what is used of a limit in one scope."""
    resets_at = verdict.place_of(meter).resets_at if meter.per else None
    ends = None if resets_at is None else resets_at.timestamp()
    is_deferred = verdict.plan.rules[index].limit.name in verdict.deferred
    used = verdict.before[meter.counter] + (0 if is_deferred else verdict.amounts[index])
    return used, meter.maximum or 0, ends, meter.scope


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
