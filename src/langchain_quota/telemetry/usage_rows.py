"""What subjects have used, as rows: of one process, in the files of several, and joined."""

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from langchain_quota.stores import Occupancy
from langchain_quota.units import Unit

Key = tuple[str, str, str]
"""The agent's label, the scope, and the label of a thread or the hash of another subject."""

Number = tuple[int, int, float | None]
"""What is used, of how much (0 for no limit), and when its window ends."""

Spent = tuple[str, Unit, int]
"""The name of a limit, its unit, and how much a model run has spent of it, from 0."""

APART = 600
"""After so many seconds without a refusal, the next one begins a new row of refusals."""

PREFIX = "langchain_quota.usage-1."
"""How names of files begin; the number is that of their form. prometheus_client's are `*.db`."""

SUFFIX = ".json"


class Use(NamedTuple):
    """What a subject has used of a limit; times are in seconds since the Unix epoch."""

    decided: float = 0.0
    unit: Unit = "calls"
    near: float | None = None
    numbers: Sequence[Number] = ()
    blocked: int = 0
    refused: float | None = None
    since: float | None = None
    reset: float = 0.0
    spent: int = 0


@dataclass(slots=True)
class Subject:
    """A thread, or the subject of a quota."""

    key: Key
    label: str | None
    last: float
    uses: dict[str, Use]


Lines = dict[str, Subject]
"""The lines of a file, with what they say."""


class Bounds(NamedTuple):
    """How many threads and other subjects have series, and for how many seconds without a call."""

    max_exported: int
    max_subjects: int
    ttl: float


@dataclass(slots=True)
class Snapshot:
    """What a process knows."""

    started: float
    bounds: Bounds
    store: Occupancy | None
    subjects: list[Subject]


def line_of(subject: Subject) -> str:
    """A subject as a line of the file."""
    return json.dumps([subject.key, subject.label, subject.last, dict(subject.uses)])


def write(path: Path, snapshot: Snapshot, lines: Iterable[str]) -> None:
    """Write the whole file in place of the one before, so that nobody reads half of it."""
    head = json.dumps([snapshot.started, *snapshot.bounds, snapshot.store])
    unfinished = path.with_suffix(".new")
    try:
        # Only the owner may read it: it has the ids of threads.
        number = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(number, "w", encoding="ascii") as file:  # noqa: PTH123 - no path
            file.write("\n".join((head, *lines)))
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read(path: Path, known: Lines) -> tuple[Snapshot, Lines]:
    """What a process has written, and its lines; no subjects if they were forgotten since."""
    lines: Lines = {}
    with path.open(encoding="ascii") as file:
        started, *bounds, store = json.loads(next(file))
        snapshot = Snapshot(started, Bounds(*bounds), None, [])
        if time.time() - os.fstat(file.fileno()).st_mtime > snapshot.bounds.ttl:
            return snapshot, lines
        if store is not None:
            snapshot.store = Occupancy(*store)
        for line in file:
            subject = lines[line] = known.get(line) or _subject_of(line)
            snapshot.subjects.append(subject)
    return snapshot, lines


def _subject_of(line: str) -> Subject:
    key, label, last, uses = json.loads(line)
    return Subject(tuple(key), label, last, {limit: Use(*use) for limit, use in uses.items()})


def merged(snapshots: Sequence[Snapshot]) -> Iterable[Subject]:
    """The subjects that several processes know."""
    if len(snapshots) == 1:
        return snapshots[0].subjects
    found: dict[Key, list[Subject]] = {}
    for snapshot in snapshots:
        for each in snapshot.subjects:
            found.setdefault(each.key, []).append(each)
    return [each[0] if len(each) == 1 else _joined(each) for each in found.values()]


def _joined(several: Sequence[Subject]) -> Subject:
    uses = {}
    for limit in dict.fromkeys(limit for each in several for limit in each.uses):
        known = [each.uses[limit] for each in several if limit in each.uses]
        # A reset by any process ends the refusals of all.
        reset = max(each.reset for each in known)
        uses[limit] = reduce(_joined_use, [each._replace(reset=reset) for each in known])
    label = next((each.label for each in several if each.label), None)
    return Subject(several[0].key, label, max(each.last for each in several), uses)


def _joined_use(one: Use, other: Use) -> Use:
    """The newest numbers of two processes, and the refusals and amounts of both."""
    newest, older = (one, other) if one.decided >= other.decided else (other, one)
    reset = one.reset
    rows = sorted(
        (each.refused, max(each.since, reset))
        for each in (one, other)
        if each.refused is not None and each.since is not None and each.refused > reset
    )
    since = rows[-1][1] if rows else None
    if since is not None and since - rows[0][0] <= APART:
        since = min(since, rows[0][1])
    return newest._replace(
        blocked=one.blocked + other.blocked,
        refused=max(filter(None, (one.refused, other.refused)), default=None),
        since=since,
        reset=reset,
        spent=newest.spent + (older.spent if older.unit == newest.unit else 0),
    )
