"""The files in which workers that share a port tell each other what subjects have used."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from langchain_quota.stores import Occupancy
from langchain_quota.telemetry.usage_rows import Snapshot, Subject, Use

PREFIX = "langchain_quota.usage-1."
"""How their names begin; the number is that of their form. prometheus_client's are `*.db`."""

SUFFIX = ".json"

Lines = dict[str, Subject]
"""The lines of a file, with what they say."""


def line_of(subject: Subject) -> str:
    """A subject as a line of the file."""
    return json.dumps([subject.key, subject.label, subject.last, dict(subject.uses)])


def write(path: Path, snapshot: Snapshot, lines: Iterable[str]) -> None:
    """Write the whole file in place of the one before, so that nobody reads half of it."""
    head = [snapshot.started, snapshot.max_exported, snapshot.max_subjects, snapshot.ttl]
    text = "\n".join((json.dumps([*head, snapshot.store]), *lines))
    unfinished = path.with_suffix(".new")
    try:
        # Only the owner may read it: it has the ids of threads.
        number = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(number, "w", encoding="ascii") as file:  # noqa: PTH123 - no path
            file.write(text)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read(path: Path, known: Lines) -> tuple[Snapshot, Lines]:
    """What a process has written, and its lines; no subjects if they were forgotten since."""
    lines: Lines = {}
    with path.open(encoding="ascii") as file:
        started, max_exported, max_subjects, ttl, store = json.loads(next(file))
        snapshot = Snapshot(started, max_exported, max_subjects, ttl, None, [])
        if time.time() - os.fstat(file.fileno()).st_mtime > ttl:
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
