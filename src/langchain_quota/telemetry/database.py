"""The SQLite database with what subjects have used: one row for each number that is limited."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from sqlite3 import Connection
from sqlite3 import connect as _connect
from typing import NamedTuple, Self

from langchain_quota.decision import THREAD, Unit
from langchain_quota.levels import Level, level
from langchain_quota.stores import Occupancy

_VERSION = 3
_BUSY_SECONDS = 10.0
"""How long a process waits until another one has written, in seconds."""

_TABLES = (files("langchain_quota.telemetry") / "usage_tables.sql").read_text("utf-8")

LEVELS = (Level.OK, Level.NEAR, Level.EXHAUSTED)

Key = tuple[str, str, str | bytes]
"""The agent's label, the scope, and the label of a thread or the hash of another subject."""


class Use(NamedTuple):
    """What is used of one number, as a row of `usage` has it."""

    used: int = 0
    cap: int | None = None
    near: float | None = None
    resets_at: float | None = None
    blocked: int = 0
    decided: float = 0.0
    full_since: float | None = None
    refused: float | None = None
    refused_since: float | None = None
    unit: Unit = "calls"
    spent: int = 0

    @property
    def level(self) -> int | None:
        """How much of it is used, by `LEVELS`; `None` if it does not say."""
        if self.cap is None or self.near is None:
            return None
        return LEVELS.index(level(self.used, self.cap, self.near))

    @property
    def is_full(self) -> bool:
        """Whether nothing is left."""
        return self.cap is not None and self.used >= self.cap


Parts = Mapping[str, Use]
"""What a subject has used of a limit: its own number under `""`, quotas per thread by name."""


class UsageDatabase:
    """A connection to the database."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.execute = connection.execute
        # A cache of the table `series`, from which no row is ever removed.
        self._series: dict[tuple[str, str, str], int] = {}
        self._shown: set[int] = set()

    @classmethod
    def open(cls, path: Path | None, *, started: float, **settings: float) -> Self:
        """Open the database, and make it if there is none."""
        if path is not None and not path.exists():
            _make_file(path)
        connection = _opened(path or ":memory:")
        try:
            if path is None:
                _make_tables(connection)
            _check_version(connection, path)
            rows = settings.items()
            connection.executemany("INSERT OR REPLACE INTO setting VALUES (?, ?)", rows)
            started_first = "INSERT OR IGNORE INTO setting VALUES ('started', ?)"
            connection.execute(started_first, (started,))
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @contextmanager
    def transaction(self, kind: str) -> Iterator[None]:
        """Write all changes of the block, or none of them."""
        self.execute(f"BEGIN {kind}")
        try:
            yield
        except BaseException:
            self._series.clear()
            self._shown.clear()
            # A full disk has ended it already.
            if self._connection.in_transaction:
                self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")

    def series(self, agent: str, limit: str, scope: str) -> int:
        """The number of the series that count the subjects of a limit."""
        key = (agent, limit, scope)
        found = self._series.get(key)
        if found is None:
            query = "SELECT id FROM series WHERE agent = ? AND lim = ? AND scope = ?"
            row = self.execute(query, key).fetchone()
            if row is None:
                made = "INSERT INTO series (agent, lim, scope) VALUES (?, ?, ?) RETURNING id"
                row = self.execute(made, key).fetchone()
            found = self._series[key] = int(row[0])
        return found

    def subject(self, key: Key, now: float, ttl: float) -> int | None:
        """The number of a subject, if it was not idle for too long; else `None`."""
        query = (
            "SELECT id, decided, next_end FROM subject WHERE agent = ? AND scope = ? AND name = ?"
        )
        row = self.execute(query, key).fetchone()
        if row is None:
            return None
        subject, decided, next_end = row
        if now - decided > ttl:
            self.execute("DELETE FROM subject WHERE id = ?", (subject,))
            return None
        if next_end is not None and next_end <= now:
            self.lapse(subject, now)
        return int(subject)

    def add(self, key: Key, now: float, label: str | None = None) -> int:
        """The number of a new subject; it has series of its own if it has a label."""
        made = self.execute(
            "INSERT INTO subject "
            "(agent, scope, name, decided, label, refused, level, share, since) "
            "VALUES (?, ?, ?, ?, ?, 0, 0, 0, 0) RETURNING id",
            (*key, now, label),
        )
        return int(made.fetchone()[0])

    def uses(self, subject: int) -> dict[int, dict[str, Use]]:
        """What a subject has used, by the number of the series and the part of the limit."""
        uses: dict[int, dict[str, Use]] = {}
        for series, part, *columns in self.execute(
            "SELECT series, part, used, cap, near, resets_at, blocked, decided, full_since, "
            "refused, refused_since, unit, spent FROM usage WHERE subject = ?",
            (subject,),
        ):
            uses.setdefault(series, {})[part] = Use(*columns)
        return uses

    def put(self, subject: int, series: int, parts: Parts, old: Parts) -> None:
        """Write what a subject has used of a limit, in place of what it had."""
        for part in old.keys() - parts.keys():
            self.execute(
                "DELETE FROM usage WHERE subject = ? AND series = ? AND part = ?",
                (subject, series, part),
            )
        levels = [rated for use in parts.values() if (rated := use.level) is not None]
        highest = max(levels, default=None)
        for part, use in parts.items():
            self.execute(
                "INSERT OR REPLACE INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (subject, series, part, *use, None if part else highest),
            )
        if highest is not None and series not in self._shown:
            self.execute("UPDATE series SET is_shown = 1 WHERE id = ?", (series,))
            self._shown.add(series)

    def rank(
        self,
        subject: int,
        uses: Mapping[int, Parts],
        now: float,
        *,
        is_call: bool = True,
        refused: float = 0,
    ) -> None:
        """Rank a subject: exhausted ones by their last refusal, others by their last call."""
        numbers = [use for parts in uses.values() for use in parts.values()]
        rated = [(each, use) for use in numbers if (each := use.level) is not None]
        values = {
            "subject": subject,
            "now": now,
            "call": is_call,
            "refused": refused,
            "exhausted": LEVELS.index(Level.EXHAUSTED),
            "level": max((each for each, _ in rated), default=0),
            "share": max((use.used / use.cap for _, use in rated if use.cap), default=0.0),
            "full": max((use.full_since or 0.0 for _, use in rated if use.is_full), default=0.0),
            "ends": min((use.resets_at for use in numbers if use.resets_at), default=None),
        }
        self.execute(
            "UPDATE subject SET decided = iif(:call, max(decided, :now), decided), "
            "refused = max(refused, :refused), "
            # A subject whose level falls without a call is ranked after those with a call.
            "since = CASE WHEN :level = :exhausted THEN max(:full, refused, :refused) "
            "WHEN :call THEN :now WHEN :level < level THEN 0 ELSE since END, "
            "level = :level, share = :share, next_end = :ends WHERE id = :subject",
            values,
        )

    def lapse(self, subject: int, now: float) -> None:
        """Note that windows of a subject have ended: nothing is used of the new ones."""
        ((scope,),) = self.execute("SELECT scope FROM subject WHERE id = ?", (subject,))
        uses: dict[int, Parts] = dict(self.uses(subject))
        for series, parts in list(uses.items()):
            passed = {
                part: use._replace(used=0, resets_at=None, full_since=None)
                for part, use in parts.items()
                if use.resets_at is not None and use.resets_at <= now
            }
            if passed:
                # Of a subject that is no thread, nothing is kept after its window.
                uses[series] = {**parts, **passed} if scope == THREAD else {}
                self.put(subject, series, uses[series], parts)
        self.rank(subject, uses, now, is_call=False)

    def settings(self) -> dict[str, float]:
        """Settings for processes that judge no calls, and when the first one began to count."""
        return dict(self.execute("SELECT name, value FROM setting"))

    def put_store(self, process: str, now: float, store: Occupancy | None) -> None:
        """Write how full the fullest store of a process is; `None` to remove the row."""
        if store is None:
            self.execute("DELETE FROM store WHERE process = ?", (process,))
        else:
            row = (process, now, *store)
            self.execute("INSERT OR REPLACE INTO store VALUES (?, ?, ?, ?, ?)", row)

    def forget_idle(self, now: float, ttl: float, most: int) -> None:
        """Forget subjects that were idle for too long or are too many, and windows that ended."""
        for is_thread in (True, False):
            self.execute(
                "DELETE FROM subject WHERE (scope = 'thread') = ? AND decided < ?",
                (is_thread, now - ttl),
            )
            self.execute(
                "DELETE FROM subject WHERE id IN (SELECT id FROM subject WHERE "
                "(scope = 'thread') = ? ORDER BY decided DESC, id DESC LIMIT -1 OFFSET ?)",
                (is_thread, most),
            )
        self.execute("DELETE FROM store WHERE at < ?", (now - ttl,))
        ended = self.execute("SELECT id FROM subject WHERE next_end <= ?", (now,)).fetchall()
        for (subject,) in ended:
            self.lapse(subject, now)


def settings_of(path: Path) -> dict[str, float]:
    """The settings that processes have written which judge calls."""
    with closing(_opened(path)) as connection:
        _check_version(connection, path)
        return UsageDatabase(connection).settings()


def _make_file(path: Path) -> None:
    """Make the file as a whole, so that no other process sees half of it."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        # Only the owner may read it: it has the ids of threads.
        os.close(os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        with closing(_opened(unfinished)) as connection:
            _make_tables(connection)
            connection.execute("PRAGMA journal_mode = WAL")
        with suppress(FileExistsError):  # another process was faster
            os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _make_tables(connection: Connection) -> None:
    connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT")


def _opened(where: Path | str) -> Connection:
    connection = _connect(
        where, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        # Only a crash of the machine loses what is written, and it also ends all processes.
        connection.execute("PRAGMA synchronous = OFF")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_version(connection: Connection, path: Path | None) -> None:
    ((version,),) = connection.execute("PRAGMA user_version")
    if version != _VERSION:
        raise ValueError(
            f"{path} has version {version}, not {_VERSION}: empty the directory before the service "
            "starts"
        )
