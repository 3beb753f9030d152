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
from pathlib import Path
from threading import Timer
from weakref import WeakSet

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from langchain_quota.decision import ROOT_RUN, THREAD, Decision, LimitStatus, Unit
from langchain_quota.locks import fork_safe_lock
from langchain_quota.stores import Occupancy
from langchain_quota.telemetry import usage_files
from langchain_quota.telemetry.usage_reader import OnError, UsageReader, families
from langchain_quota.telemetry.usage_rows import (
    Key,
    Snapshot,
    Subject,
    Use,
    decided,
    merged,
    near_of,
    number_of,
)

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
    """What subjects have used of their limits, from the newest decisions."""

    def __init__(  # noqa: PLR0913 - keyword-only settings
        self,
        *,
        near: float,
        max_exported: int,
        ttl: float,
        on_error: OnError,
        subject_label: SubjectLabel = lambda _quota, _subject: None,
        max_subjects: int = 0,
        directory: Path | None = None,
        fullest_store: Callable[[], Occupancy | None] = lambda: None,
        max_tracked: int = MAX_TRACKED,
    ) -> None:
        self._near = near
        self._bounds = (max_exported, max_subjects, ttl)
        self._ttl = ttl
        self._on_error = on_error
        self._subject_label = subject_label
        self._directory = directory
        self._fullest_store = fullest_store
        self._max_tracked = max_tracked
        self._started = time.time()
        self._lock = fork_safe_lock()
        # Held while the file is written; the other one is taken under it.
        self._writing = fork_safe_lock()
        self.begin()
        _tables.add(self)

    def begin(self) -> None:
        """Begin an empty table, also in a forked process: its parent tells what it knows itself."""
        self._threads: _Subjects = OrderedDict()
        self._others: _Subjects = OrderedDict()
        # Only for the file: what is not written yet, and the lines of the last one.
        self._changed: dict[Key, Subject] = {}
        self._lines: dict[Key, str] = {}
        self._is_due = False
        self._written = 0.0
        self._path: Path | None = None
        if self._directory is not None:
            name = f"{usage_files.PREFIX}{secrets.token_hex(8)}{usage_files.SUFFIX}"
            self._path = self._directory / name
        self._reader = UsageReader(self._directory, self._path, self._on_error)

    def record(self, agent: str, thread: str | None, decisions: Sequence[Decision]) -> None:
        """Add the decisions about calls of one thread, in order; `agent`, `thread` are labels."""
        now = time.time()
        statuses = [status for decision in decisions for status in decision.limits]
        others = [each for each in statuses if each.quotas]
        quotas = list(self._quotas(agent, others, now)) if others else ()
        with self._lock:
            if thread is not None:
                uses = self._subject(self._threads, (agent, THREAD, thread), now).uses
                for status in statuses:
                    uses[status.limit] = decided(uses.get(status.limit), status, now, self._near)
            for key, label, limit, use in quotas:
                self._subject(self._others, key, now, label).uses[limit] = use
        self._write_soon()

    def refund(self, agent: str, thread: str, limit: str, amount: int) -> None:
        """Subtract calls from what a thread has used of a limit; other amounts are settled."""
        key, now = (agent, THREAD, thread), time.time()
        with self._lock:
            known = self._threads.get(key)
            if known is None or limit not in known.uses:
                return
            uses = self._subject(self._threads, key, now).uses
            use = uses.get(limit)
            if use is not None and use.unit == "calls":
                numbers = tuple(
                    (max(0, used - amount), cap, ends) for used, cap, ends in use.numbers
                )
                uses[limit] = use._replace(numbers=numbers)
        self._write_soon()

    def spend(self, agent: str, thread: str, spent: Sequence[tuple[str, Unit, int]]) -> None:
        """Add what a model call of a thread has spent, by limit."""
        with self._lock:
            uses = self._subject(self._threads, (agent, THREAD, thread), time.time()).uses
            for limit, unit, amount in spent:
                use = uses.get(limit)
                if use is None or use.unit != unit:
                    use = (use or Use())._replace(unit=unit, numbers=(), spent=0)
                uses[limit] = use._replace(spent=use.spent + amount)
        self._write_soon()

    def reset(self, agent: str, thread: str, limits: Sequence[LimitStatus]) -> None:
        """Set what a thread has used to 0; `limits` is their status after it."""
        now = time.time()
        with self._lock:
            uses = self._subject(self._threads, (agent, THREAD, thread), now).uses
            new = {each.limit: decided(None, each, now, self._near) for each in limits}
            for limit, use in (new | uses).items():
                numbers = tuple((0, cap, None) for _, cap, _ in use.numbers)
                uses[limit] = use._replace(decided=now, numbers=numbers, since=None, reset=now)
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
                changed, self._changed = self._changed, {}
            try:
                for key, each in changed.items():
                    self._lines[key] = usage_files.line_of(each)
                known = (self._threads, self._others)
                forgotten = [key for key in self._lines if key not in known[key[1] != THREAD]]
                for key in forgotten:
                    del self._lines[key]
                told = self._snapshot([], None if is_end else self._store())
                usage_files.write(self._path, told, self._lines.values())
            except Exception as error:
                self._on_error(error)

    def end(self) -> None:
        """Write what this process has to tell the others for the last time."""
        if self._changed or self._lines:
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
        snapshots = [self._snapshot(known, self._store()), *self._reader.others()]
        subjects = merged(snapshots)
        if len(snapshots) > 1:
            self._keep(subjects)
        return self._reader.rendered(snapshots, subjects, now)

    def _subject(self, known: _Subjects, key: Key, now: float, label: str | None = None) -> Subject:
        """The subject of a key, with a call now; forgets those that are idle or too many."""
        found = known.get(key)
        if found is None or now - found.last > self._ttl:
            # Its label was made when it was new.
            label = label if found is None else found.label
            found = known[key] = Subject(key, label, now, {})
            while len(known) > self._max_tracked or self._is_idle(known, now):
                known.popitem(last=False)
        known.move_to_end(key)
        found.last = now
        if self._path is not None:
            self._changed[key] = found
        return found

    def _is_idle(self, known: _Subjects, now: float) -> bool:
        return now - next(iter(known.values())).last > self._ttl

    def _keep(self, subjects: Iterable[Subject]) -> None:
        """Remember what is still called in other processes: its refusals here still count."""
        for each in subjects:
            known = self._threads if each.key[1] == THREAD else self._others
            own = known.get(each.key)
            if own is not None and own.last < each.last:
                with self._lock:
                    own.last = each.last

    def _quotas(
        self, agent: str, statuses: Sequence[LimitStatus], now: float
    ) -> Iterator[tuple[Key, str | None, str, Use]]:
        """What others than threads have used, with their keys, labels and limits."""
        # Made once per subject: it may have a megabyte, and several quotas may count by it.
        digests: dict[str, str] = {}
        for status in statuses:
            for quota in status.quotas:
                # Root runs come without end, and nobody looks for one by its name.
                if quota.per in (THREAD, ROOT_RUN):
                    continue
                if quota.subject not in digests:
                    digests[quota.subject] = _digest(quota.subject)
                key = (agent, quota.scope, digests[quota.subject])
                label = None
                if quota.per in _BOUNDED:
                    label = ""
                elif key not in self._others:
                    # Outside the lock: it is the user's function.
                    label = self._subject_label(quota.scope, quota.subject)
                # As with threads, only enforced limits above 0 say how much is used.
                says = status.enforced and quota.limit
                numbers = (number_of(status, quota),) if says else ()
                yield (
                    key,
                    label,
                    status.limit,
                    Use(now, status.unit, near_of(status, self._near), numbers),
                )

    def _store(self) -> Occupancy | None:
        try:
            return self._fullest_store()
        except Exception as error:
            self._on_error(error)
            return None

    def _snapshot(self, subjects: list[Subject], store: Occupancy | None) -> Snapshot:
        return Snapshot(self._started, *self._bounds, store, subjects)

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
