"""What threads, users and other subjects have used of their limits: a bounded table for scrapes.

It is an SQLite database: in memory, or, where several processes answer on one port, a file that
they share. Who decides only appends to a queue; a thread writes, so that no event loop waits.
"""

import atexit
import hashlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Error, OperationalError
from threading import Event, Thread
from typing import Any, NamedTuple
from weakref import WeakSet, finalize, ref

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from langchain_quota.decision import Decision, QuotaUse, Standing
from langchain_quota.limits import STORE, THREAD
from langchain_quota.locks import fork_safe_lock
from langchain_quota.stores import Occupancy
from langchain_quota.telemetry.database import LEVELS, Key, Parts, UsageDatabase, Use, settings_of
from langchain_quota.telemetry.labels import label
from langchain_quota.telemetry.stores import fullest

MAX_TRACKED = 100_000
"""The most threads, and the most other subjects, that are remembered; the longest idle go first."""

INTERVAL = 1.0
"""How long, in seconds, the writing thread waits at least between two times that it writes."""

_REST = 9
"""How many times longer than it wrote it waits at least: it writes a tenth of the time."""

WRITER = "langchain-quota-usage"
"""The name of the thread that writes."""

_MAX_QUEUED = 100_000
"""The most changes that wait; where nothing can be written, the oldest are lost beyond it."""

USED = "langchain_quota_thread_used"
LIMIT = "langchain_quota_thread_limit"
BLOCKED = "langchain_quota_thread_blocked"
TIMESTAMP = "langchain_quota_thread_last_decision_timestamp_seconds"
SUBJECTS = "langchain_quota_subjects"
HIDDEN = "langchain_quota_threads_hidden"
STORE_KEYS = "langchain_quota_store_keys"
STORE_MAX_KEYS = "langchain_quota_store_max_keys"

_CHOSEN = (
    "SELECT id, agent, name, decided, level FROM subject WHERE (scope = 'thread') = 1 AND level = ?"
)

Families = dict[str, GaugeMetricFamily | CounterMetricFamily]


_Timed = tuple[float, Standing]
"""When it was decided, in seconds since the Unix epoch, and how a limit stood."""


class _Change(NamedTuple):
    """What waits to be written."""

    write: Callable[..., None]
    now: float
    arguments: tuple[Any, ...]


class _Link:
    """What a table shares with the thread that writes for it: with the table, both end."""

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
    """What subjects have used of their limits, as the newest decisions tell.

    Args:
        near: The share from which a limit is near.
        max_exported: The most threads that a scrape exports.
        ttl: How long, in seconds, a subject without decisions is remembered.
        on_error: Told of what cannot be written, read or rendered.
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
        on_error: Callable[[Exception], None],
        path: Path | None = None,
        fullest_store: Callable[[], Occupancy | None] = lambda: None,
        max_tracked: int = MAX_TRACKED,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._near = near
        self._max_exported = max_exported
        self._ttl = ttl
        self._on_error = on_error
        self._path = path
        self._fullest_store = fullest_store
        self._max_tracked = max_tracked
        self._clock = clock
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
        """In a process that was forked: what its parent knows, its parent tells."""
        self._end.detach()
        # SQLite forbids even to close it here.
        _inherited.append(self._link)
        self._begin()

    def record(self, agent: str, thread: str | None, decisions: Sequence[Decision]) -> None:
        """Take in the decisions about calls of one thread, in order; labels are given."""
        now = self._clock()
        timed = [(now, decision) for decision in decisions]
        self._change(UsageTable._write_decisions, now, agent, thread, timed)

    def refund(self, agent: str, thread: str, limit: str, amount: int) -> None:
        """Take a charge back from what a thread has used of a limit."""
        self._change(UsageTable._write_refund, self._clock(), agent, thread, limit, amount)

    def forget(self, agent: str, thread: str) -> None:
        """Forget a thread, whichever process knows it."""
        self._change(UsageTable._write_forgotten, self._clock(), agent, thread)

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
                self._read(database, found)
        except Exception as error:  # noqa: BLE001 - the scrape goes on
            self._on_error(error)
        return iter(found.values())

    def _change(self, write: Callable[..., None], now: float, *arguments: Any) -> None:
        self._queue.append(_Change(write, now, arguments))
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
                    self._path, max_exported=self._max_exported, ttl=self._ttl
                )
            try:
                yield link.database
            except Error:
                # The file may be mended, or another one: the next try opens it anew.
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
        except Exception as error:  # noqa: BLE001 - a full disk, a directory that is gone
            if isinstance(error, OperationalError):
                # It is still to be written.
                self._queue.extendleft(reversed(taken))
                self._link.news.set()
            self._on_error(error)

    def _told_by_stores(self) -> Occupancy | None:
        try:
            return self._fullest_store()
        except Exception as error:  # noqa: BLE001 - a store of the user's own
            self._on_error(error)
            return None

    def _write(self, database: UsageDatabase, change: _Change) -> None:
        try:
            change.write(self, database, change.now, *change.arguments)
        except OperationalError:
            raise
        except Exception as error:  # noqa: BLE001 - the others are written
            self._on_error(error)

    def _write_decisions(
        self,
        database: UsageDatabase,
        now: float,
        agent: str,
        thread: str | None,
        decisions: Sequence[tuple[float, Decision]],
    ) -> None:
        by_limit: dict[str, list[_Timed]] = {}
        for decided, decision in decisions:
            for standing in decision.standings:
                by_limit.setdefault(standing.limit, []).append((decided, standing))
        if thread is not None and not _is_forgotten(database, now, agent, thread):
            self._write_thread(database, now, (agent, THREAD, thread), by_limit)
        digests: dict[str, bytes] = {}
        for standings in by_limit.values():
            quotas = {
                (quota.scope, quota.subject): (decided, standing, quota)
                for decided, standing in standings
                for quota in standing.quotas
                if not quota.per_thread
            }
            for (scope, name), (decided, standing, quota) in quotas.items():
                # Once for each: a caller may send a megabyte, and several quotas count by it.
                if name not in digests:
                    digests[name] = _digest(name)
                key = (agent, scope, digests[name])
                self._write_quota(database, decided, key, standing, quota)

    def _write_thread(
        self,
        database: UsageDatabase,
        now: float,
        key: Key,
        by_limit: Mapping[str, Sequence[_Timed]],
    ) -> None:
        subject = database.subject(key, now, self._ttl) or database.add(key, now)
        uses: dict[int, Parts] = dict(database.uses(subject))
        refused = 0.0
        for limit, standings in by_limit.items():
            series = database.series(key[0], limit, THREAD)
            old = uses.get(series, {})
            uses[series] = self._decided(old, standings)
            database.put(subject, series, uses[series], old)
            refused = max((at for at, each in standings if _refuses(each)), default=refused)
        database.rank(subject, uses, now, refused=refused)

    def _decided(self, old: Parts, standings: Sequence[_Timed]) -> Parts:
        """What a thread has used of a limit after some decisions."""
        known = old.get("", Use())
        told = [each for each in standings if not _is_unknown(each[1], old)]
        parts = dict(old)
        if told and known.decided <= told[-1][0]:
            decided, newest = told[-1]
            numbers: dict[str, tuple[int, int | None, float | None]] = {
                "": (newest.thread_count, newest.thread_limit, None)
            }
            for quota in newest.quotas:
                if quota.per_thread and quota.limit:
                    numbers[quota.scope] = _numbers(newest, quota)
            parts = {
                part: self._use(decided, newest, *each, old.get(part))
                for part, each in numbers.items()
            }
        elif known.decided <= standings[-1][0]:
            # Only whether it is enforced, and from where on it is near, is known.
            near = self._near_of(standings[-1][1])
            parts = {part: use._replace(near=near) for part, use in old.items()}
        refusals = sum(_refuses(each) for _, each in standings)
        parts[""] = parts.get("", known)._replace(blocked=known.blocked + refusals)
        return parts

    def _write_quota(
        self, database: UsageDatabase, now: float, key: Key, standing: Standing, quota: QuotaUse
    ) -> None:
        subject = database.subject(key, now, self._ttl) or database.add(key, now)
        series = database.series(key[0], standing.limit, key[1])
        uses: dict[int, Parts] = dict(database.uses(subject))
        old = uses.pop(series, {})
        known = old.get("")
        if known is not None and known.decided > now:
            return
        new: dict[str, Use] = {}
        # As of threads, only limits above 0 that are enforced say how much is used.
        if standing.enforced and quota.limit:
            used, cap, ends = _numbers(standing, quota)
            if ends is None or ends > now:
                new[""] = self._use(now, standing, used, cap, ends, known)
        database.put(subject, series, new, old)
        database.rank(subject, {**uses, series: new}, now)

    def _use(  # noqa: PLR0913, PLR0917 - the columns of a row
        self,
        now: float,
        standing: Standing,
        used: int,
        cap: int | None,
        resets_at: float | None,
        old: Use | None,
    ) -> Use:
        if resets_at is not None and resets_at <= now:
            # Nothing is known of the new window.
            used, resets_at = 0, None
        use = Use(used, cap or None, self._near_of(standing), resets_at, 0, now)
        if not use.is_full:
            return use
        since = old.full_since if old is not None and old.is_full else now
        return use._replace(full_since=since)

    def _near_of(self, standing: Standing) -> float | None:
        if not standing.enforced:
            return None
        return self._near if standing.near is None else standing.near

    def _write_refund(  # noqa: PLR0913, PLR0917 - what a refund is of
        self,
        database: UsageDatabase,
        now: float,
        agent: str,
        thread: str,
        limit: str,
        amount: int,
    ) -> None:
        subject = database.subject((agent, THREAD, thread), now, self._ttl)
        uses: dict[int, Parts] = dict(database.uses(subject)) if subject is not None else {}
        series = database.series(agent, limit, THREAD)
        if subject is None or series not in uses:
            return
        old = uses[series]
        # What was decided later knows of it.
        uses[series] = {
            part: use._replace(used=max(0, use.used - amount)) if use.decided <= now else use
            for part, use in old.items()
        }
        database.put(subject, series, uses[series], old)
        database.rank(subject, uses, now)

    def _write_forgotten(
        self, database: UsageDatabase, now: float, agent: str, thread: str
    ) -> None:
        key = (agent, thread)
        query = "SELECT id FROM subject WHERE agent = ? AND scope = 'thread' AND name = ?"
        for subject in database.execute(query, key).fetchall():
            # Another process may know it from a later decision: that stays.
            database.execute(
                "DELETE FROM usage WHERE subject = ? AND decided <= ?", (*subject, now)
            )
            database.execute("DELETE FROM subject WHERE id = ? AND decided <= ?", (*subject, now))
        database.execute("INSERT OR REPLACE INTO forgotten VALUES (?, ?, ?)", (*key, now))

    def _read(self, database: UsageDatabase, found: Families) -> None:
        hidden = dict.fromkeys(LEVELS, 0)
        query = "SELECT level, count(*) FROM subject WHERE scope = 'thread' GROUP BY level"
        for rated, count in database.execute(query):
            hidden[LEVELS[rated]] += count
        query = "SELECT id, agent, lim, scope FROM series"
        series = {number: tuple(names) for number, *names in database.execute(query)}
        limits = {number: label(limit) for number, (_, limit, _) in series.items()}
        for subject, agent, thread, decided, rated in self._chosen(database):
            try:
                samples = list(_samples(database.uses(subject), limits, agent, thread))
            except Exception as error:  # noqa: BLE001 - the others are told
                self._on_error(error)
                continue
            hidden[LEVELS[rated]] -= 1
            found[TIMESTAMP].add_metric([agent, thread], decided)
            for name, labels, value in samples:
                found[name].add_metric(labels, value)
        for number, counts in _counts(database).items():
            agent, _, scope = series[number]
            for rated, each in enumerate(LEVELS):
                labels = [agent, limits[number], scope, each]
                found[SUBJECTS].add_metric(labels, counts.get(rated, 0))
        for each, count in hidden.items():
            found[HIDDEN].add_metric([each], count)
        query = "SELECT keys, droppable, max_keys FROM store"
        store = fullest(Occupancy(*row) for row in database.execute(query))
        if store is not None:
            found[STORE_KEYS].add_metric(["true"], store.droppable)
            found[STORE_KEYS].add_metric(["false"], store.keys - store.droppable)
            found[STORE_MAX_KEYS].add_metric([], store.max_keys)

    def _chosen(self, database: UsageDatabase) -> list[tuple[int, str, str, float, int]]:
        """The threads that are exported: near ones by share, then the others by their places."""
        chosen: list[tuple[int, str, str, float, int]] = []
        for rated, place in ((1, "share"), (2, "since"), (0, "since")):
            chosen += database.execute(
                f"{_CHOSEN} ORDER BY {place} DESC, decided DESC, id DESC LIMIT ?",
                (rated, self._max_exported - len(chosen)),
            ).fetchall()
        return chosen


def families() -> Families:
    """The families, by name, without samples."""
    thread = ["agent", "limit", "thread_id"]
    made: tuple[GaugeMetricFamily | CounterMetricFamily, ...] = (
        GaugeMetricFamily(USED, "Calls that a thread has used of a limit.", labels=thread),
        GaugeMetricFamily(LIMIT, "Calls that a thread may use of a limit.", labels=thread),
        CounterMetricFamily(BLOCKED, "Calls refused on a thread by a limit.", labels=thread),
        GaugeMetricFamily(
            TIMESTAMP,
            "When a call of a thread was last judged, in seconds since the Unix epoch.",
            labels=["agent", "thread_id"],
        ),
        GaugeMetricFamily(
            SUBJECTS,
            "Tracked threads, and subjects of quotas, by how much of a limit they have used.",
            labels=["agent", "limit", "scope", "state"],
        ),
        GaugeMetricFamily(HIDDEN, "Tracked threads without series.", labels=["state"]),
        GaugeMetricFamily(STORE_KEYS, "Counts that a store in memory keeps.", labels=["droppable"]),
        GaugeMetricFamily(STORE_MAX_KEYS, "The most counts that it keeps.", labels=[]),
    )
    return {family.name: family for family in made}


def told_by_others(path: Path, on_error: Callable[[Exception], None]) -> UsageTable | None:
    """The table of a file, for a process that decides nothing itself; `None` if there is none."""
    if not path.exists():
        return None
    settings = settings_of(path)
    return UsageTable(
        near=1,
        max_exported=int(settings["max_exported"]),
        ttl=settings["ttl"],
        on_error=on_error,
        path=path,
    )


def _run(table: "ref[UsageTable]", news: Event) -> None:
    """Write for a table until nobody has it any more."""
    while news.wait():
        # What comes from here on is news again.
        news.clear()
        began = time.monotonic()
        if not _flushed(table):
            return
        time.sleep(_rest(time.monotonic() - began))


def _rest(took: float) -> float:
    """How long to wait after writing, in seconds."""
    return max(INTERVAL, _REST * took)


def _flushed(table: "ref[UsageTable]") -> bool:
    """Write for a table, if it is there, and hold it no longer."""
    found = table()
    if found is not None:
        found.flush()
    return found is not None


def _joined(changes: Sequence[_Change]) -> Iterator[_Change]:
    """The changes, with the decisions on a thread in one; they are a moment apart."""
    waiting: dict[tuple[str, str | None], _Change] = {}
    for change in changes:
        if change.write is not UsageTable._write_decisions:  # noqa: SLF001 - this module's own
            yield from waiting.values()
            waiting.clear()
            yield change
            continue
        agent, thread, decisions = change.arguments
        # The latest come last: so it is seen who was called last.
        earlier = waiting.pop((agent, thread), None)
        if earlier is not None:
            decisions = [*earlier.arguments[2], *decisions]
        waiting[agent, thread] = change._replace(arguments=(agent, thread, decisions))
    yield from waiting.values()


def _samples(
    uses: Mapping[int, Parts], limits: Mapping[int, str], agent: str, thread: str
) -> Iterator[tuple[str, list[str], float]]:
    """What is exported of the limits of a thread."""
    for series, parts in uses.items():
        labels = [agent, limits[series], thread]
        limited = [(use.used, use.cap) for use in parts.values() if use.cap is not None]
        if limited:
            used, cap = max(limited, key=lambda each: each[0] / each[1])
            yield USED, labels, float(used)
            yield LIMIT, labels, float(cap)
        yield BLOCKED, labels, float(parts[""].blocked)


def _counts(database: UsageDatabase) -> dict[int, dict[int, int]]:
    """How many subjects have used how much, by the number of the series."""
    query = "SELECT id FROM series WHERE is_shown"
    counts: dict[int, dict[int, int]] = {series: {} for (series,) in database.execute(query)}
    query = "SELECT series, level, count(*) FROM usage WHERE level IS NOT NULL GROUP BY 1, 2"
    for series, rated, count in database.execute(query):
        counts[series][rated] = count
    return counts


def _is_forgotten(database: UsageDatabase, now: float, agent: str, thread: str) -> bool:
    """Whether a thread was forgotten since."""
    query = "SELECT 1 FROM forgotten WHERE agent = ? AND name = ? AND at > ?"
    return database.execute(query, (agent, thread, now)).fetchone() is not None


def _refuses(standing: Standing) -> bool:
    return standing.refused and standing.enforced


def _is_unknown(standing: Standing, old: Parts) -> bool:
    """Whether the thread's count is not known, because the shared store could not be asked."""
    if standing.scope == STORE:
        return True
    # Let through in an outage: no quota has an answer, and the state keeps no count of its own.
    is_silent = standing.shared and not standing.quotas and standing.thread_limit is None
    # Of a run alone a store counts nothing of the thread.
    return is_silent and (standing.run_limit is None or any(old))


def _numbers(standing: Standing, quota: QuotaUse) -> tuple[int, int, float | None]:
    """What is used of a quota, of how much, and until when."""
    ends = None if quota.resets_at is None else quota.resets_at.timestamp()
    return quota.before if standing.deferred else quota.used, quota.limit, ends


def _digest(subject: str) -> bytes:
    """What is remembered of a subject: users are told apart, and their names not kept."""
    return hashlib.blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=16).digest()


_tables: WeakSet[UsageTable] = WeakSet()
_inherited: list[_Link] = []
"""Those of a parent process, which must not be closed here."""


def _after_fork() -> None:
    for table in list(_tables):
        table.begin_anew()


def _at_exit() -> None:
    for table in list(_tables):
        table.close()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
