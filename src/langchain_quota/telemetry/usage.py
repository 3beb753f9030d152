"""A bounded table of what threads, users and other subjects have used of their limits.

A decision changes one entry of a dict; a scrape sorts. If several processes answer on one port,
each writes its table to a file of their directory, and a scrape reads all files.
"""

import os
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from math import inf
from pathlib import Path
from threading import Timer
from weakref import WeakSet

from langchain_quota.core.decide import Verdict
from langchain_quota.core.decision import Outcome, Refund
from langchain_quota.core.plans import Meter, Plan, Rule
from langchain_quota.limits import Limit
from langchain_quota.limits.call import FROZEN, ROOT_RUN, RUN, STORE, THREAD, Call
from langchain_quota.runtime.process_end import call_at_end
from langchain_quota.runtime.sync_async import fork_safe_lock
from langchain_quota.runtime.units import Unit
from langchain_quota.telemetry import workers
from langchain_quota.telemetry.events import CallerLabels, DecisionEvent, LimitSpend
from langchain_quota.telemetry.logs import logger
from langchain_quota.telemetry.reading import Reading, UsageReader, digest
from langchain_quota.telemetry.refusals import ended, note_outcome, refusals_of
from langchain_quota.telemetry.workers import Key, Number, Subject, Use

MAX_TRACKED = 100_000
"""Maximum of threads and other subjects in the table; the longest idle ones go first."""

INTERVAL = 1.0
"""Minimum time from one write of a worker's file to the next, in seconds."""

_Shown = tuple[str, Unit, float | None, Sequence[Meter], float]
"""The name and the unit of a limit, the share from which a thread is near, and the thread's meters.

At last, how many known numbers make those of a verdict too few to replace them.
"""


class UsageTable(UsageReader):
    """The sink that keeps what subjects have used of their limits, from the newest decisions."""

    def __init__(
        self,
        settings: workers.Snapshot,
        directory: Path | None,
        on_error: workers.OnError,
        *,
        near: float,
        subject_label: Callable[[str, str], str | None],
    ) -> None:
        super().__init__(directory, on_error)
        self._settings = settings
        self._near = near
        self._subject_label = subject_label
        self.counts_in_memory = False
        """Whether a `MemoryStore` counts quotas; until other workers are known."""
        # Held while the file is written. Never acquire it while `_lock` is held.
        self._writing = fork_safe_lock()
        self.begin()
        _tables.add(self)

    def begin(self) -> None:
        """Begin an empty table, as in a forked process, whose parent exports its own subjects."""
        # The longest idle subjects come first.
        self._subjects: OrderedDict[Key, Subject] = OrderedDict()
        self._totals = {name: Counter[int]() for name in workers.PERIODS}
        # How many calls wait now, by the labels of agent and thread, and by limit.
        self._waiting = Counter[tuple[str, str, str]]()
        self._refusals, self._exports = deque[workers.Refusal](maxlen=500), list[workers.Export]()
        # Who is frozen, by store and prefix, and when a store answered last.
        self._frozen = dict[str, Sequence[workers.Freeze]]()
        self._answered = 0.0
        self._is_due = False
        self._written = 0.0
        if self._directory is not None:
            self._own_path = self._directory / workers.FILES.replace("*", secrets.token_hex(8))

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
                    self._record(thread, verdict, now, is_charge=is_charge)
                if not is_charge:
                    # Whether a call that needs a slot runs is decided later.
                    if verdict.outcome is not Outcome.SKIPPED and not verdict.needs_slot:
                        is_blocked = verdict.outcome is Outcome.BLOCKED
                        self._add("blocked" if is_blocked else "allowed", 1, now)
                    # What the call of a charge costs is known to `spend`.
                    if verdict.cost:
                        self._add_cost(verdict.cost, thread, now)
        if has_quotas:
            self._record_quotas(event, thread, now, is_charge=is_charge)
        if self._own_path is not None:
            self._write_soon()

    def record_fallback(self, calls: int) -> None:
        """Add calls that were checked while the store was unavailable."""
        with self._lock:
            self._add("without_store", calls, time.time())

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
                use.numbers = _numbers(verdict, index, [meter]) if has_number else ()
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
            self._refusals += refusals_of(event)
        self._write_soon()

    def refund(self, caller: CallerLabels, refunds: Sequence[Refund]) -> None:
        """Subtract calls that did not run, and what they cost; other units are settled."""
        costs: dict[object, int] = {}
        with self._lock:
            thread = self._subjects.get((caller.agent, THREAD, caller.thread or ""))
            if thread is not None:
                thread.line, thread.rated_until = "", 0.0
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
        now, key = time.time(), (caller.agent, caller.thread or "", limit)
        with self._lock:
            self._waiting[key] += change
            if self._waiting[key] <= 0:
                del self._waiting[key]
            if caller.thread is not None:
                # A thread may wait before anything has been decided about it.
                thread = self._touch((caller.agent, THREAD, caller.thread), caller.thread, now)
                thread.uses.setdefault(limit, Use())
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
                    self._record(thread, unused, now, is_charge=True)
            for use in thread.uses.values():
                use.decided, use.refusal = now, ended(use.refusal, now)
                use.numbers = tuple((0, limit, None, scope) for _, limit, _, scope in use.numbers)
        self._write_soon()

    def write(self) -> None:
        """Write the file of this process, if others read it, and report a failure."""
        if self._own_path is None:
            return
        with self._writing:
            # Set the time before `_is_due`, because the next write waits from this time on.
            self._written = time.monotonic()
            self._is_due = False
            try:
                self._warn_of_workers()
                [snapshot] = self._own_snapshots()
                workers.write(self._own_path, snapshot, self._lock)
            except Exception as error:
                self._on_error(error)

    def _warn_of_workers(self) -> None:
        """Warn once if quotas are counted in memory, and another process has a file, and lives."""
        if not self.counts_in_memory or self._directory is None:
            return
        others = workers.read_others(self._directory, self._own_path, self._on_error)
        if any(other.pid != os.getpid() and workers.is_alive(other.pid) for other in others):
            self.counts_in_memory = False
            logger.warning(
                "several workers count quotas in a MemoryStore, and each allows the whole: write "
                "store=RedisStore() or PostgresStore(…)"
            )

    def end(self) -> None:
        """Write the file for the last time, if it has subjects."""
        if self._subjects or self._totals["nanodollars"]:
            self.write()

    def read(self, *, is_scrape: bool = False) -> Reading:
        """Return what all processes know now, and keep what a scrape exports."""
        reading = super().read(is_scrape=is_scrape)
        if is_scrape:
            self._exports = [(*key, *times) for key, times in reading.exports.items()]
            # Others go on with it, whoever answers the next scrape.
            self._write_soon()
        return reading

    def _own_snapshots(self) -> list[workers.Snapshot]:
        with self._lock:
            snapshot = self._settings._replace(
                pid=os.getpid(),
                waiting=[(*key, count) for key, count in self._waiting.items()],
                totals={name: [*total.items()] for name, total in self._totals.items()},
                frozen=(self._answered, [*chain(*self._frozen.values())]),
                refusals=[*self._refusals],
                exports=self._exports,
                # In any order: an OrderedDict in its order takes 30 times as long, under the lock.
                subjects=list(dict.values(self._subjects))[::-1],
            )
        return [snapshot]

    def _add_cost(self, amount: int, thread: Subject | None, now: float) -> None:
        """Add nanodollars to the cost of this hour, and to that of a thread."""
        if amount:
            self._add("nanodollars", amount, now)
            if thread is not None:
                thread.cost += amount

    def _add(self, name: str, amount: int, now: float) -> None:
        """Add an amount to the total of a minute or an hour."""
        total, (seconds, kept) = self._totals[name], workers.PERIODS[name]
        period = int(now // seconds)
        if period not in total:
            for past in [past for past in total if past <= period - kept]:
                del total[past]
        total[period] += amount

    def _forget(self, now: float) -> None:
        """Forget subjects that are idle or too many."""
        subjects = self._subjects
        while subjects:
            oldest = next(iter(subjects.values()))
            if len(subjects) <= MAX_TRACKED and now - oldest.last <= self._settings.ttl:
                return
            subjects.popitem(last=False)

    def _touch(self, key: Key, label: str | None, now: float) -> Subject:
        """Return the subject of a key, created if needed, and note that it has a call now."""
        subject = self._subjects.get(key)
        if subject is None:
            subject = self._subjects[key] = Subject(key, label, now, {})
        self._subjects.move_to_end(key)
        subject.last, subject.line, subject.rated_until = now, "", 0.0
        return subject

    def _record(self, thread: Subject, verdict: Verdict, now: float, *, is_charge: bool) -> None:
        """Set what a thread has used of limits, after a verdict."""
        plan, refused = verdict.plan, verdict.refused
        shown = plan.prepared.get("thread") or self._shown(plan)
        for index, (name, unit, near, meters, unknown_from) in enumerate(shown):
            use = thread.use_of(name, unit)
            use.near = near
            if refused.get(name) != STORE and len(use.numbers) < unknown_from:
                use.decided = now
                use.numbers = _numbers(verdict, index, meters)
            if refused or use.refusal is not None:
                note_outcome(use, verdict, index, now, is_charge=is_charge)

    def _shown(self, plan: Plan) -> list[_Shown]:
        """Return what is shown of each limit of a plan for a thread."""
        plan.prepared["thread"] = shown = list[_Shown]()
        for limit, meters, *_, shared, _ in plan.rules:
            scopes = {meter.scope for meter in meters if meter.is_limited}
            unknown_from: float = inf
            if shared and scopes <= {RUN}:
                # When the call ran in an outage, no quota has an answer, and the state has no
                # count. With a run limit alone, a store has no count of the thread.
                unknown_from = 2 if scopes else 0
            of_thread = [m for m in meters if THREAD in (m.scope, m.per) and not m.spacing]
            near = self._near_share(limit)
            shown.append((limit.name, limit.unit, near, of_thread, unknown_from))
        return shown

    def _near_share(self, limit: Limit) -> float | None:
        """Return the share from which a limit is near, or `None` in dry run: no call is stopped."""
        return (limit.near_share or self._near) if limit.enforce else None

    def _key_of(self, agent: str, verdict: Verdict, quota: Meter) -> tuple[Key, str | None]:
        """Return the key of a quota's subject, and its label if the subject is new."""
        subject = verdict.place_of(quota).subject
        key = (agent, quota.scope, digest(subject))
        if quota.per in ("agent", "global"):
            # They have one subject for each agent, which always has series.
            return key, ""
        if key in self._subjects:
            return key, None
        # Call the user's function outside the lock, because it may be slow.
        return key, self._subject_label(quota.scope, subject)

    def _write_soon(self) -> None:
        """Write a second after the last write, in a new thread, so that no event loop waits."""
        if self._own_path is None:
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


def _numbers(verdict: Verdict, index: int, meters: Sequence[Meter]) -> list[Number]:
    """Return what is used of a limit by its meters."""
    is_deferred = verdict.plan.rules[index].limit.name in verdict.deferred
    added = 0 if is_deferred else verdict.amounts[index]
    numbers = list[Number]()
    for meter in meters:
        resets_at = verdict.place_of(meter).resets_at if meter.per else None
        ends = None if resets_at is None else resets_at.timestamp()
        used = verdict.before[meter.counter] + added
        numbers.append((used, meter.maximum or 0, ends, meter.scope))
    return numbers


_tables: WeakSet[UsageTable] = WeakSet()


def _after_fork() -> None:
    for table in list(_tables):
        table.begin()


def _at_end() -> None:
    for table in list(_tables):
        table.end()


call_at_end(_at_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
