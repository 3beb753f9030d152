"""What each worker knows of threads and subjects: written, read, and merged.

There may be hundreds of thousands of entries. What is read stays text until it is merged, entry by
entry: as many objects would have the garbage collector stop the process for seconds.
"""

import heapq
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, TypeVar

from prometheus_client import Metric

from langchain_quota.decision import Level
from langchain_quota.limits import THREAD
from langchain_quota.stores import Occupancy
from langchain_quota.telemetry.stores import fullest
from langchain_quota.telemetry.subjects import Series, Subject, SubjectTable, SubjectUse
from langchain_quota.telemetry.threads import (
    LimitUse,
    QuotaCount,
    Snapshot,
    ThreadTable,
    ThreadUse,
    ends_of,
    rate,
    render,
)

_FORMAT = "langchain-quota tables 2"
_THREAD, _SUBJECT, _FORGOTTEN = "thread", "subject", "forgotten"
_LEVELS = {str(each): each for each in Level}
_encode = json.JSONEncoder(separators=(",", ":")).encode

Key = str
"""Of a thread or a subject, as JSON."""

OnError = Callable[[Exception], None]

T = TypeVar("T")


class CorruptTablesError(ValueError):
    """Something is no file of tables, or not a whole one, or one of another version."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What one worker knows; entries that were read are text.

    Attributes:
        max_exported: The most threads that a scrape exports.
        ttl: How long, in seconds, an entry without decisions is remembered.
        series: What has or had threads or subjects.
        threads: The threads.
        forgotten: When threads were forgotten on request, in seconds since the Unix epoch.
        subjects: The subjects.
        store: How full the fullest store is, of those that can be full.
    """

    max_exported: int
    ttl: float
    series: Sequence[Series]
    threads: dict[Key, ThreadUse | str]
    forgotten: dict[Key, float]
    subjects: dict[Key, SubjectUse | str]
    store: Occupancy | None = None

    @classmethod
    def of(cls, threads: ThreadTable, subjects: SubjectTable) -> "Tables":
        """What the tables hold now."""
        contents = threads.contents()
        uses, series = subjects.contents()
        return cls(
            threads.max_exported,
            threads.ttl,
            [*(Series(*limit, THREAD) for limit in contents.limits), *series],
            {_encode((use.agent, use.thread)): use for use in contents.threads},
            {_encode(key): at for key, at in contents.forgotten.items()},
            {_subject_key(subject): use for subject, use in uses.items()},
            contents.store,
        )


def write_tables(tables: Tables, write: Callable[[bytes], object], on_error: OnError) -> None:
    """Write tables line by line, so that other threads need not wait long.

    Args:
        tables: The tables.
        write: Takes in a line.
        on_error: Told of an entry that cannot be written; it is left out.
    """
    header = (tables.max_exported, tables.ttl, tables.series, tables.store)
    entries: Iterable[tuple[str, Key, Callable[[Any], object], object]] = chain(
        [(_FORMAT, "", tuple, header)],
        ((_THREAD, key, _thread_row, use) for key, use in tables.threads.items()),
        ((_SUBJECT, key, _subject_row, use) for key, use in tables.subjects.items()),
        ((_FORGOTTEN, key, float, at) for key, at in tables.forgotten.items()),
    )
    check = 0
    for kind, key, row, entry in entries:
        try:
            line = f"{kind}\t{key}\t{_encode(row(entry))}\n".encode()
        except Exception as error:  # noqa: BLE001 - whatever one entry raises, the others are told
            on_error(error)
            continue
        check = zlib.crc32(line, check)
        write(line)
    write(str(check).encode())


def read_tables(data: bytes) -> Tables:
    """What was written.

    Raises:
        CorruptTablesError: It is not exactly what was written, by this version.
    """
    body, newline, check = data.rpartition(b"\n")
    if check != str(zlib.crc32(newline, zlib.crc32(body))).encode():
        raise CorruptTablesError("the tables of a worker are not whole")
    first, *lines = body.decode().split("\n")
    used, *_, header = first.split("\t")
    if used != _FORMAT:
        raise CorruptTablesError("the tables of a worker have an unknown format")
    max_exported, ttl, series, store = json.loads(header)
    known = [Series(*each) for each in series]
    tables = Tables(max_exported, ttl, known, {}, {}, {}, Occupancy(*store) if store else None)
    for line in lines:
        kind, key, row = line.split("\t")
        if kind == _THREAD:
            tables.threads[key] = row
        elif kind == _SUBJECT:
            tables.subjects[key] = row
        else:
            tables.forgotten[key] = float(row)
    return tables


def merge(tables: Sequence[Tables], now: float, on_error: OnError) -> Iterator[Metric]:
    """Render what all workers know: of each limit of a thread what was decided last.

    Args:
        tables: Those of all workers; the settings of the first hold.
        now: The time in seconds since the Unix epoch.
        on_error: Told of an entry that cannot be merged or rendered; it is left out.
    """
    settings = tables[0]
    counts = {series: dict.fromkeys(Level, 0) for each in tables for series in each.series}
    tracked = dict.fromkeys(Level, 0)
    best = {level: _Best(settings.max_exported, level) for level in Level}
    for use in _live_threads(tables, now, on_error):
        tracked[use.level] += 1
        best[use.level].add(use)
        for limit, level in use.rated:
            counts[Series(use.agent, limit, THREAD)][level] += 1
    for subject, held in _live_subjects(tables, now, on_error):
        counts[subject.series][held.level] += 1
    ranked = [each.ranked() for each in (best[Level.NEAR], best[Level.EXHAUSTED], best[Level.OK])]
    chosen = list(chain(*ranked))[: settings.max_exported]
    for use in chosen:
        tracked[use.level] -= 1
    store = fullest(each.store for each in tables if each.store is not None)
    return render(Snapshot(chosen, {}, tracked, store), counts, on_error)


class _Best:
    """The threads of a level that come first, of any number; the others are let go at once."""

    def __init__(self, most: int, level: Level) -> None:
        self._most = most
        self._near = level is Level.NEAR
        self._earlier = count(0, -1)
        self._heap: list[tuple[float, float, int, ThreadUse]] = []

    def add(self, use: ThreadUse) -> None:
        rank = use.share if self._near else use.placed
        item = (rank, use.last_decision, next(self._earlier), use)
        if len(self._heap) < self._most:
            heapq.heappush(self._heap, item)
        elif self._heap:
            heapq.heappushpop(self._heap, item)

    def ranked(self) -> list[ThreadUse]:
        return [use for *_, use in sorted(self._heap, reverse=True)]


def _live_threads(tables: Sequence[Tables], now: float, on_error: OnError) -> Iterator[ThreadUse]:
    forgotten: dict[Key, float] = {}
    for each in tables:
        for key, at in each.forgotten.items():
            forgotten[key] = max(at, forgotten.get(key, at))
    for key, told in _together([each.threads for each in tables]):
        try:
            uses = [_thread(key, each) for each in told]
            if key in forgotten:
                uses = [use for each in uses for use in _since(forgotten[key], each)]
            if not uses or now - max(each.last_decision for each in uses) > tables[0].ttl:
                continue
            use = uses[0] if len(uses) == 1 else _merge_uses(uses)
            use = use.at(now)
        except Exception as error:  # noqa: BLE001 - whatever one entry raises, the scrape goes on
            on_error(error)
        else:
            yield use


def _live_subjects(
    tables: Sequence[Tables], now: float, on_error: OnError
) -> Iterator[tuple[Subject, SubjectUse]]:
    for key, told in _together([each.subjects for each in tables]):
        try:
            latest = max((_subject(each) for each in told), key=lambda use: use.last_decision)
            idle = now - latest.last_decision > tables[0].ttl
            if not idle and all(end > now for end in latest.ends):
                yield _subject_of(key), latest
        except Exception as error:  # noqa: BLE001 - whatever one entry raises, the scrape goes on
            on_error(error)


def _together(tables: Sequence[Mapping[Key, T]]) -> Iterator[tuple[Key, list[T]]]:
    """What tables have under the same key; each key once."""
    for index, table in enumerate(tables):
        earlier, later = tables[:index], tables[index + 1 :]
        for key, value in table.items():
            if not any(key in each for each in earlier):
                yield key, [value, *(each[key] for each in later if key in each)]


def _since(forgotten: float, use: ThreadUse) -> Iterator[ThreadUse]:
    """What is known of a thread from after it was forgotten, if anything is."""
    limits = {name: each for name, each in use.limits.items() if each.decided >= forgotten}
    if use.last_decision >= forgotten and (limits or not use.limits):
        key = (use.agent, use.thread)
        yield ThreadUse.of(key, limits, last_decision=use.last_decision, placed=use.placed)


def _merge_uses(uses: Sequence[ThreadUse]) -> ThreadUse:
    limits: dict[str, LimitUse] = {}
    for use in uses:
        for name, each in use.limits.items():
            known = limits.get(name)
            limits[name] = each if known is None else _merge_limit(known, each)
    last = max(use.last_decision for use in uses)
    level, share = rate(limits.values())
    placed = max((use.placed for use in uses if use.level is level), default=last)
    ends = ends_of(limits.values())
    return ThreadUse(uses[0].agent, uses[0].thread, limits, level, share, last, placed, ends)


def _merge_limit(one: LimitUse, other: LimitUse) -> LimitUse:
    latest, before = (other, one) if other.decided > one.decided else (one, other)
    if not before.blocked:
        return latest
    return replace(latest, blocked=latest.blocked + before.blocked)


def _thread_row(use: ThreadUse) -> Sequence[object]:
    limits = [
        (
            name,
            each.used,
            each.limit,
            each.blocked,
            each.near,
            each.enforced,
            [(quota.used, quota.limit, quota.resets_at) for quota in each.quotas],
            each.decided,
        )
        for name, each in use.limits.items()
    ]
    return (use.level, use.share, use.last_decision, use.placed, limits)


def _thread(key: Key, told: ThreadUse | str) -> ThreadUse:
    if isinstance(told, ThreadUse):
        return told
    agent, thread = json.loads(key)
    level, share, last_decision, placed, limits = json.loads(told)
    uses = {name: _limit(*columns) for name, *columns in limits}
    ends = ends_of(uses.values())
    return ThreadUse(agent, thread, uses, _LEVELS[level], share, last_decision, placed, ends)


def _limit(  # noqa: PLR0913, PLR0917 - the columns of the row
    used: int,
    limit: int | None,
    blocked: int,
    near: float,
    enforced: bool,  # noqa: FBT001 - the same
    quotas: Sequence[Sequence[Any]],
    decided: float,
) -> LimitUse:
    counts = tuple(QuotaCount(*quota) for quota in quotas)
    return LimitUse(used, limit, blocked, near, enforced, counts, decided)


def _subject_key(subject: Subject) -> Key:
    return _encode((*subject.series, subject.digest.hex()))


def _subject_of(key: Key) -> Subject:
    *series, digest = json.loads(key)
    return Subject(Series(*series), bytes.fromhex(digest))


def _subject_row(use: SubjectUse) -> Sequence[object]:
    return (use.level, use.ends, use.last_decision)


def _subject(told: SubjectUse | str) -> SubjectUse:
    if isinstance(told, SubjectUse):
        return told
    level, ends, last_decision = json.loads(told)
    return SubjectUse(_LEVELS[level], tuple(ends), last_decision)
