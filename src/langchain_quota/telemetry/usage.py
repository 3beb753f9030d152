"""What threads, users and other subjects have used of their limits: a bounded table for scrapes.

A decision changes one entry of a dict; sorting is left to the scrape. If several processes answer
on one port, each writes its table to a file of their directory, and a scrape reads all the files.
"""

import atexit
import hashlib
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any
from weakref import WeakSet

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from langchain_quota.concurrency import fork_safe_lock
from langchain_quota.decision import (
    ROOT_RUN,
    STORE,
    THREAD,
    LimitStatus,
    QuotaStatus,
    Refund,
)
from langchain_quota.stores import Occupancy
from langchain_quota.telemetry import workers
from langchain_quota.telemetry.events import Judged, Spent, Who
from langchain_quota.telemetry.usage_reader import OnError, UsageReader, families, fullest
from langchain_quota.telemetry.workers import Key, Number, Snapshot, Subject, Use

MAX_TRACKED = 100_000
"""The most threads, and the most other subjects, that are remembered; the longest idle go first."""

INTERVAL = 1.0
"""How long a worker waits at least from one write of its file to the next, in seconds."""

SubjectLabel = Callable[[str, str], str | None]
"""Makes the label of a subject, by its quota's name; `None` for one that is not to be shown."""

_BOUNDED = ("agent", "global")
"""The `per` of quotas with at most one subject for each agent, which always has series."""

_Subjects = OrderedDict[Key, Subject]
"""The subjects, those without a call for longest first."""


class UsageTable(Collector):
    """The sink that keeps what subjects have used of their limits, from the newest decisions."""

    # A call without a thread changes nothing of threads.

    def __init__(
        self,
        near: float,
        own: Snapshot,
        subject_label: SubjectLabel,
        on_error: OnError,
        directory: Path | None,
    ) -> None:
        self._near = near
        self._own = own
        self._subject_label = subject_label
        self._on_error = on_error
        self._directory = directory
        # A store that is no longer used leaves by itself.
        self._stores = WeakSet[Any]()
        self._lock = fork_safe_lock()
        # Held while the file is written; the other one is taken under it.
        self._writing = fork_safe_lock()
        self.begin()
        _tables.add(self)

    def begin(self) -> None:
        """Begin an empty table, also in a forked process: its parent tells what it knows itself."""
        self._threads: _Subjects = OrderedDict()
        self._others: _Subjects = OrderedDict()
        self._is_due = False
        self._written = 0.0
        self._path: Path | None = None
        if self._directory is not None:
            self._path = self._directory / workers.FILES.replace("*", secrets.token_hex(8))
        self._reader = UsageReader(self._directory, self._path, self._on_error)

    def watch(self, store: object) -> bool:
        """Show how full a store is, if it says that; whether it does."""
        if not hasattr(store, "occupancy"):
            return False
        with self._lock:
            self._stores.add(store)
        return True

    def judged(self, told: Judged) -> None:
        """Add the decisions about calls of one agent and thread, in order."""
        now, who = time.time(), told.who
        quotas = [
            each
            for decision in told.decisions
            for status in decision.limits
            if status.quotas
            for each in self._quotas(who.agent, status)
        ]
        with self._lock:
            if who.thread is not None:
                uses = self._subject(self._threads, (who.agent, THREAD, who.thread), now).uses
                for decision in told.decisions:
                    for status in decision.limits:
                        use = uses.get(status.limit)
                        if use is None:
                            use = uses[status.limit] = Use()
                        _decide(use, status, now, self._near)
            for key, label, status, quota in quotas:
                subject = self._subject(self._others, key, now, label)
                use = subject.uses.get(status.limit)
                if use is None:
                    use = subject.uses[status.limit] = Use()
                _decide_quota(use, status, quota, now, self._near)
                if subject.label and status.refused and status.scope == quota.scope:
                    told.subjects[status.limit, quota.scope] = subject.label
        if self._path is not None:
            self._write_soon()

    def refund(self, who: Who, refund: Refund) -> None:
        """Subtract calls from what a thread has used of a limit; other amounts are settled."""
        known = self._threads.get((who.agent, THREAD, who.thread or ""))
        if known is None or refund.limit not in known.uses:
            return
        with self._changing(who, time.time()) as uses:
            use = uses.get(refund.limit)
            if use is not None and use.unit == "calls":
                use.numbers = tuple(
                    (max(0, used - refund.call.amount), cap, ends)
                    for used, cap, ends in use.numbers
                )

    def spend(self, who: Who, spent: Sequence[Spent]) -> None:
        """Add what a model call of a thread has spent, by limit."""
        with self._changing(who, time.time()) as uses:
            for limit, unit, amount in spent:
                use = uses.setdefault(limit, Use())
                if use.unit != unit:
                    use.unit, use.numbers, use.spent = unit, (), 0
                use.spent += amount

    def reset(self, who: Who, limits: Sequence[LimitStatus]) -> None:
        """Set what a thread has used to 0; `limits` is their status after it."""
        now = time.time()
        with self._changing(who, now) as uses:
            for status in limits:
                if status.limit not in uses:
                    _decide(uses.setdefault(status.limit, Use()), status, now, self._near)
            for use in uses.values():
                use.decided = now
                use.numbers = tuple((0, cap, None) for _, cap, _ in use.numbers)

    @contextmanager
    def _changing(self, who: Who, now: float) -> Iterator[dict[str, Use]]:
        """What a thread has used, to be changed; without a thread, what nobody sees."""
        if who.thread is None:
            yield {}
            return
        with self._lock:
            yield self._subject(self._threads, (who.agent, THREAD, who.thread), now).uses
        self._write_soon()

    def write(self, *, is_end: bool = False) -> None:
        """Write the file of this process, if others read it; what fails is reported."""
        if self._path is None:
            return
        with self._writing:
            # Before the next one may become due, which waits from here.
            self._written = time.monotonic()
            self._is_due = False
            with self._lock:
                known = [*self._threads.values(), *self._others.values()]
                changed = [each for each in known if each.changed]
                for each in changed:
                    each.changed = False
            try:
                for each in changed:
                    each.line = workers.line_of(each)
                store = None if is_end else self._fullest_store()
                workers.write(self._path, self._own._replace(store=store, subjects=known))
            except Exception as error:
                self._on_error(error)

    def end(self) -> None:
        """Write what this process has to tell the others for the last time."""
        if self._threads or self._others:
            self.write(is_end=True)

    def describe(self) -> Iterator[Metric]:
        """The families without samples: for the registry's check for duplicates."""
        return iter(families().values())

    def collect(self) -> Iterator[Metric]:
        """Render what is known: the near threads first, then the exhausted, then the recent."""
        now = time.time()
        with self._lock:
            # Of equals the ones with the latest calls come first.
            known = [*reversed(self._threads.values()), *reversed(self._others.values())]
        own = self._own._replace(store=self._fullest_store(), subjects=known)
        snapshots = [own, *self._reader.others()]
        subjects = workers.merged(snapshots)
        if len(snapshots) > 1:
            self._keep(subjects)
        return self._reader.rendered(snapshots, subjects, now)

    def _subject(self, known: _Subjects, key: Key, now: float, label: str | None = None) -> Subject:
        """The subject of a key, with a call now; forgets those that are idle or too many."""
        found = known.get(key)
        if found is None or now - found.last > self._own.ttl:
            # Its label was made when it was new.
            label = label if found is None else found.label
            found = known[key] = Subject(key, label, now, {})
            oldest = next(iter(known.values()))
            while len(known) > MAX_TRACKED or now - oldest.last > self._own.ttl:
                known.popitem(last=False)
                oldest = next(iter(known.values()))
        known.move_to_end(key)
        found.last = now
        found.changed = True
        return found

    def _keep(self, subjects: Iterable[Subject]) -> None:
        """Remember what is still called in other processes: its refusals here still count."""
        for each in subjects:
            known = self._threads if each.key[1] == THREAD else self._others
            own = known.get(each.key)
            if own is not None and own.last < each.last:
                with self._lock:
                    own.last = each.last

    def _quotas(
        self, agent: str, status: LimitStatus
    ) -> Iterator[tuple[Key, str | None, LimitStatus, QuotaStatus]]:
        """The quotas of others than threads and root runs, with their keys and labels."""
        for quota in status.quotas:
            # Root runs come without end, and nobody looks for one by its name.
            if quota.per in (THREAD, ROOT_RUN):
                continue
            key = (agent, quota.scope, _digest(quota.subject))
            label = None
            if quota.per in _BOUNDED:
                label = ""
            elif key not in self._others:
                # Outside the lock: it is the user's function.
                label = self._subject_label(quota.scope, quota.subject)
            yield key, label, status, quota

    def _fullest_store(self) -> Occupancy | None:
        """How full the store with the least room left is; `None` without a store."""
        with self._lock:
            stores = list(self._stores)
        try:
            return fullest(Occupancy(*store.occupancy) for store in stores)
        except Exception as error:
            self._on_error(error)
            return None

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


def _decide(use: Use, status: LimitStatus, now: float, near: float) -> None:
    """Set what a thread has used of a limit, after a decision."""
    # The call ran in an outage: no quota has an answer, and the state has no count. With a run
    # limit alone, a store has no count of the thread.
    is_silent = status.shared and not status.quotas and status.thread_limit is None
    is_unknown = is_silent and (status.run_limit is None or len(use.numbers) > 1)
    if status.reason != STORE and not is_unknown:
        use.decided = now
        if use.unit != status.unit:
            # Two limits with different units may have had the same name.
            use.unit, use.spent = status.unit, 0
        count = status.thread_before if status.deferred else status.thread_used
        numbers: tuple[Number, ...] = ((count, status.thread_limit or 0, None),)
        if status.quotas:
            quotas = [each for each in status.quotas if each.per == THREAD and each.limit]
            numbers += tuple(_number(status, each) for each in quotas)
        use.numbers = numbers
    if _refuses(status):
        use.blocked += 1
        use.refused = now
    use.near = _near(status, near)


def _decide_quota(
    use: Use, status: LimitStatus, quota: QuotaStatus, now: float, near: float
) -> None:
    """Set what a subject has used of a quota, after a decision."""
    use.decided, use.unit, use.near = now, status.unit, _near(status, near)
    # As with threads, only enforced limits above 0 say how much is used.
    use.numbers = (_number(status, quota),) if status.enforced and quota.limit else ()
    if _refuses(status) and status.scope == quota.scope:
        use.blocked += 1


def _near(status: LimitStatus, near: float) -> float | None:
    """The share from which a limit is near; a limit on trial refuses nothing, so nobody is."""
    if not status.enforced:
        return None
    return near if status.near is None else status.near


def _refuses(status: LimitStatus) -> bool:
    """Whether a limit refuses the call because it is used up."""
    return status.reason is not None and status.enforced and status.reason != STORE


def _number(status: LimitStatus, quota: QuotaStatus) -> Number:
    """What is used of a quota."""
    ends = None if quota.resets_at is None else quota.resets_at.timestamp()
    return quota.before if status.deferred else quota.used, quota.limit, ends


def _digest(subject: str) -> str:
    """What is remembered of a subject: a hash, so that users' names are not kept."""
    return hashlib.blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


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
