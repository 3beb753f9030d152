"""What threads, users and other subjects have used of their limits: a bounded table for scrapes.

It is an SQLite database: in memory, or, if several processes answer on one port, in a file that
they share. A decision is only appended to a queue; a thread writes it, so that no event loop waits.
"""

import atexit
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Error, OperationalError
from threading import Event, Thread
from typing import Any
from weakref import WeakSet, finalize, ref

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from langchain_quota.decision import Decision, LimitStatus, Unit
from langchain_quota.locks import fork_safe_lock
from langchain_quota.stores import Occupancy
from langchain_quota.telemetry.database import UsageDatabase, settings_of
from langchain_quota.telemetry.usage_reader import OnError, families, read
from langchain_quota.telemetry.usage_writer import SubjectLabel, UsageWriter

MAX_TRACKED = 100_000
"""The most threads, and the most other subjects, that are remembered; the longest idle go first."""

INTERVAL = 1.0
"""How long the writing thread waits at least after each write, in seconds."""

_REST = 9
"""Its wait is at least so many times longer than the write: it writes a tenth of the time."""

WRITER = "langchain-quota-usage"
"""The name of the thread that writes."""

_MAX_QUEUED = 100_000
"""The most changes that wait; if nothing can be written, the oldest ones beyond it are lost."""


_JOINED = (UsageWriter.decisions, UsageWriter.spend)
"""Changes that are joined, for each thread, before they are written."""


_Change = tuple[Callable[..., None], float, tuple[Any, ...]]
"""What waits to be written: the method that writes it, its time, and the method's arguments."""


class _Link:
    """What a table shares with the thread that writes for it; both end with the table."""

    def __init__(self) -> None:
        self.news = Event()
        self.database: UsageDatabase | None = None

    def close(self) -> None:
        """Close the database, and wake the thread."""
        if self.database is not None:
            self.database.close()
            self.database = None
        self.news.set()


class UsageTable(Collector):
    """What subjects have used of their limits, from the newest decisions.

    Args:
        near: The share from which a limit is near.
        max_exported: The most threads that a scrape exports.
        subject_label: Makes the label of a quota's subject, by the quota's name and the subject;
            `None` for one that is not to be shown. The writing thread calls it.
        max_subjects: The most subjects with labels that a scrape exports.
        ttl: How long, in seconds, a subject without decisions is remembered.
        on_error: Called with each failure to write, read or render.
        path: The file that all processes share; `None` for a table of this process alone.
        fullest_store: How full the fullest store of this process is; `None` without one.
        max_tracked: The most threads, and the most other subjects, that are remembered.
        clock: The time in seconds since the Unix epoch.
    """

    def __init__(  # noqa: PLR0913 - keyword-only settings
        self,
        *,
        near: float,
        max_exported: int,
        ttl: float,
        on_error: OnError,
        subject_label: SubjectLabel = lambda _quota, _subject: None,
        max_subjects: int = 0,
        path: Path | None = None,
        fullest_store: Callable[[], Occupancy | None] = lambda: None,
        max_tracked: int = MAX_TRACKED,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rows = UsageWriter(near=near, ttl=ttl, subject_label=subject_label)
        self._settings = {"max_exported": max_exported, "max_subjects": max_subjects, "ttl": ttl}
        self._ttl = ttl
        self._on_error = on_error
        self._path = path
        self._fullest_store = fullest_store
        self._max_tracked = max_tracked
        self._clock = clock
        self._started = clock()
        self._begin()
        _tables.add(self)

    def _begin(self) -> None:
        self._queue: deque[_Change] = deque(maxlen=_MAX_QUEUED)
        self._link = _Link()
        # At the end of the process, `_at_exit` writes what waits first.
        self._end = finalize(self, self._link.close)
        self._end.atexit = False
        self._using = fork_safe_lock()
        self._starting = fork_safe_lock()
        self._writer: Thread | None = None
        self._process = secrets.token_hex(8)

    def begin_anew(self) -> None:
        """Begin an empty table in a forked process: its parent reports what the parent knows."""
        self._end.detach()
        # In a forked process SQLite does not even allow closing the connection.
        _inherited.append(self._link)
        self._begin()

    def record(self, agent: str, thread: str | None, decisions: Sequence[Decision]) -> None:
        """Add the decisions about calls of one thread, in order; `agent`, `thread` are labels."""
        now = self._clock()
        self._change((UsageWriter.decisions, now, (agent, thread, [(now, decisions)])))

    def refund(self, agent: str, thread: str, limit: str, amount: int) -> None:
        """Subtract a charge from what a thread has used of a limit."""
        self._change((UsageWriter.refund, self._clock(), (agent, thread, limit, amount)))

    def spend(self, agent: str, thread: str, spent: Sequence[tuple[str, Unit, int]]) -> None:
        """Add what a model call of a thread has spent, by limit."""
        self._change((UsageWriter.spend, self._clock(), (agent, thread, spent)))

    def reset(self, agent: str, thread: str, limits: Sequence[LimitStatus]) -> None:
        """Set what a thread has used to 0; `limits` is their status after it."""
        self._change((UsageWriter.reset, self._clock(), (agent, thread, limits)))

    def flush(self) -> None:
        """Write what waits, and forget what is idle; what fails is reported."""
        self._flush(has_readers=self._path is not None)

    def close(self) -> None:
        """Write what waits, if other processes read it, and close the database."""
        if self._path is not None and self._queue:
            self.flush()
        with self._using:
            if self._link.database is not None:
                self._link.database.put_store(self._process, 0, None)
                self._link.database.close()
                self._link.database = None

    def describe(self) -> Iterator[Metric]:
        """The families without samples: for the registry's check for duplicates."""
        return iter(families().values())

    def collect(self) -> Iterator[Metric]:
        """Render what is known: the near threads first, then the exhausted, then the recent."""
        self._flush(has_readers=True)
        found = families()
        try:
            with self._connected() as database, database.transaction("DEFERRED"):
                read(database, found, on_error=self._on_error)
        except Exception as error:
            self._on_error(error)
        return iter(found.values())

    def _change(self, change: _Change) -> None:
        self._queue.append(change)
        news = self._link.news
        if not news.is_set():
            news.set()
        if self._writer is None:
            with self._starting:
                if self._writer is None:
                    arguments = (ref(self), news)
                    self._writer = Thread(target=_run, args=arguments, name=WRITER, daemon=True)
                    self._writer.start()

    @contextmanager
    def _connected(self) -> Iterator[UsageDatabase]:
        with self._using:
            link = self._link
            if link.database is None:
                link.database = UsageDatabase.open(
                    self._path, started=self._started, **self._settings
                )
            try:
                yield link.database
            except Error:
                # The file may be repaired or replaced: the next try opens it anew.
                if self._path is not None:
                    link.database.close()
                    link.database = None
                raise

    def _flush(self, *, has_readers: bool) -> None:
        store = self._told_by_stores() if has_readers else None
        taken: list[_Change] = []
        try:
            with self._connected() as database, database.transaction("IMMEDIATE"):
                taken += [self._queue.popleft() for _ in range(len(self._queue))]
                for change in _joined(taken):
                    self._write(database, change)
                database.put_store(self._process, self._clock(), store)
                database.forget_idle(self._clock(), self._ttl, self._max_tracked)
        except Exception as error:
            if isinstance(error, OperationalError):
                # The changes are still to be written.
                self._queue.extendleft(reversed(taken))
                self._link.news.set()
            self._on_error(error)

    def _told_by_stores(self) -> Occupancy | None:
        try:
            return self._fullest_store()
        except Exception as error:
            self._on_error(error)
            return None

    def _write(self, database: UsageDatabase, change: _Change) -> None:
        try:
            write, now, arguments = change
            write(self._rows, database, now, *arguments)
        except OperationalError:
            raise
        except Exception as error:
            self._on_error(error)


def told_by_others(path: Path, on_error: OnError) -> UsageTable | None:
    """The table of a file, for a process that judges no calls; `None` if there is none."""
    if not path.exists():
        return None
    settings = settings_of(path)
    return UsageTable(
        near=1,
        max_exported=int(settings["max_exported"]),
        max_subjects=int(settings["max_subjects"]),
        ttl=settings["ttl"],
        on_error=on_error,
        path=path,
    )


def _run(table: "ref[UsageTable]", news: Event) -> None:
    """Write for a table until the table is no longer used."""
    while news.wait():
        # Changes after this wake the thread again.
        news.clear()
        began = time.monotonic()
        found = table()
        if found is None:
            return
        found.flush()
        del found  # so that an unused table can be collected during the wait
        time.sleep(_rest(time.monotonic() - began))


def _rest(took: float) -> float:
    """How long to wait after writing, in seconds."""
    return max(INTERVAL, _REST * took)


def _joined(changes: Sequence[_Change]) -> Iterator[_Change]:
    """The changes, with all decisions on a thread joined, and all that it has spent joined.

    They are a moment apart. What is spent is only added, so its order does not matter.
    """
    waiting: dict[tuple[Any, ...], tuple[float, list[Any]]] = {}
    for write, now, arguments in changes:
        if write not in _JOINED:
            yield from _waiting(waiting)
            waiting.clear()
            yield write, now, arguments
            continue
        agent, thread, items = arguments
        # The latest come last, so that the thread with the latest call is known.
        _, joined = waiting.pop((write, agent, thread), (now, []))
        joined += items
        waiting[write, agent, thread] = now, joined
    yield from _waiting(waiting)


def _waiting(joined: Mapping[tuple[Any, ...], tuple[float, list[Any]]]) -> Iterator[_Change]:
    for (write, agent, thread), (now, items) in joined.items():
        yield write, now, (agent, thread, items)


_tables: WeakSet[UsageTable] = WeakSet()
_inherited: list[_Link] = []
"""The connections of a parent process, which must not be closed here."""


def _after_fork() -> None:
    for table in list(_tables):
        table.begin_anew()


def _at_exit() -> None:
    for table in list(_tables):
        table.close()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
