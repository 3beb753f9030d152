"""What subjects have used, as rows: of one process, in the files of several workers, and joined."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from prometheus_client import values

from langchain_quota.runtime.units import Unit

Key = tuple[str, str, str]
"""The agent's label, the scope, and the label of a thread or the hash of another subject."""

Number = tuple[int, int, float | None]
"""What is used, of how much (0 for no limit), and when its window ends."""

FILES = "langchain_quota.usage-4.*.json"
"""Their names; the number is that of their form. prometheus_client's are `*.db`."""

_MIB = 2**20
_NEEDED = 4 * _MIB
"""The free space, in bytes, that a worker needs to begin.

prometheus_client has one file for each of our types of metrics (counter, histogram, gauges of two
modes). Each file begins with up to a MiB, and takes that from the disk step by step.
"""


@dataclass(slots=True)
class Use:
    """What a subject has used of a limit; times are in seconds since the Unix epoch."""

    # It is changed in place, by one thread at a time. A scrape reads each field by itself.

    decided: float = 0.0
    unit: Unit = "calls"
    near: float | None = None
    numbers: Sequence[Number] = ()
    blocked: int = 0
    refused: float | None = None
    spent: int = 0


@dataclass(slots=True)
class Subject:
    """A thread, or the subject of a quota."""

    key: Key
    label: str | None
    """A thread's is its key, what an agent or all share has an empty one; `None`: not shown."""
    last: float
    uses: dict[str, Use]
    line: str = ""
    """It in the file; empty if it has changed since that was written."""


class Snapshot(NamedTuple):
    """What a process knows, and its bounds on what is exported, the last in seconds."""

    started: float
    max_threads: int
    max_subjects: int
    ttl: float
    subjects: Sequence[Subject] = ()


def line_of(subject: Subject) -> str:
    """A subject as a line of the file."""
    uses = {
        limit: [getattr(use, name) for name in Use.__slots__] for limit, use in subject.uses.items()
    }
    return json.dumps([subject.key, subject.label, subject.last, uses])


# Most lines are those of the last scrape: to make all anew takes long, and as long the garbage
# collector would stop all threads.
@lru_cache(maxsize=20_000)
def _subject_of(line: str) -> Subject:
    key, label, last, uses = json.loads(line)
    return Subject(tuple(key), label, last, {limit: Use(*use) for limit, use in uses.items()})


def write(path: Path, snapshot: Snapshot, lines: Iterable[str]) -> None:
    """Write the whole file in place of the one before, so that nobody reads half of it."""
    unfinished = path.with_suffix(".new")
    try:
        # Only the owner may read it: it has the ids of threads. What others put there is removed:
        # it may be a link.
        unfinished.unlink(missing_ok=True)
        number = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(number, "w", encoding="ascii") as file:  # noqa: PTH123 - no path
            file.write("\n".join((json.dumps(snapshot[:-1]), *lines)))
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_others(
    directory: Path, own: Path | None, on_error: Callable[[Exception], None]
) -> Iterator[Snapshot]:
    """What the other processes have written; what cannot be read is reported, and left out."""
    for path in directory.glob(FILES):
        if path != own:
            try:
                yield _read(path)
            except Exception as error:
                on_error(error)


def _read(path: Path) -> Snapshot:
    """What a process has written; of one that has written nothing for long, when it began."""
    with path.open(encoding="ascii") as file:
        written = Snapshot(*json.loads(next(file)))
        if time.time() - os.fstat(file.fileno()).st_mtime > written.ttl:
            return written
        return written._replace(subjects=list(map(_subject_of, file)))


def merged(snapshots: Sequence[Snapshot]) -> Sequence[Subject]:
    """The subjects that several processes know."""
    if len(snapshots) == 1:
        return snapshots[0].subjects
    found: dict[Key, Subject] = {}
    for snapshot in snapshots:
        for each in snapshot.subjects:
            known = found.get(each.key)
            found[each.key] = each if known is None else _joined(known, each)
    return list(found.values())


def _joined(one: Subject, other: Subject) -> Subject:
    """The newest numbers of two processes, and the refusals and amounts of both."""
    uses = dict(one.uses)
    for limit, theirs in list(other.uses.items()):
        ours = uses.get(limit)
        if ours is None:
            uses[limit] = theirs
            continue
        newest, older = (ours, theirs) if ours.decided >= theirs.decided else (theirs, ours)
        uses[limit] = replace(
            newest,
            blocked=ours.blocked + theirs.blocked,
            refused=max(ours.refused or 0, theirs.refused or 0) or None,
            spent=newest.spent + (older.spent if older.unit == newest.unit else 0),
        )
    return Subject(one.key, one.label or other.label, max(one.last, other.last), uses)


def multiprocess_directory() -> Path | None:
    """The directory that workers share; `None` unless prometheus_client has multi-process mode."""
    # It chooses its mode when it is imported; the environment may have changed since.
    if not values.ValueClass._multiprocess:  # noqa: SLF001 - it has no public name for it
        return None
    names = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
    return next((Path(os.environ[name]) for name in names if name in os.environ), None)


def unusable(directory: Path, purpose: str) -> ValueError:
    """The error for a directory that cannot be read, or written to."""
    return ValueError(
        f"PROMETHEUS_MULTIPROC_DIR={str(directory)!r} is no directory that this process can "
        f"{purpose}: make it before the workers start, or unset the variable where there is one "
        "worker only"
    )


def checked_directory() -> Path | None:
    """The directory in which this process shares its counts; `None` without multi-process mode."""
    directory = multiprocess_directory()
    if directory is None:
        return None
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise unusable(directory, "write to")
    disk = shutil.disk_usage(directory)
    if disk.total and disk.free < _NEEDED:
        free = disk.free * 10 // _MIB / 10  # rounded down, or it could look like enough
        raise ValueError(
            f"PROMETHEUS_MULTIPROC_DIR={str(directory)!r} is on a disk with "
            f"{free:.1f} MiB free, and a worker begins with {_NEEDED / _MIB:.1f} MiB "
            "there. On a full disk prometheus_client ends the process (SIGBUS): make room, or name "
            "a directory on another disk"
        )
    return directory
