"""The use of limits by subjects: of one process, in the files of workers, and merged."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from langchain_quota.runtime.compat import is_multiprocess
from langchain_quota.runtime.sync_async import T
from langchain_quota.runtime.units import Level, Unit

Key = tuple[str, str, str]
"""The agent's label, the scope, and the label of a thread or the hash of another subject."""

Number = tuple[int, int, float | None, str]
"""What is used, the limit (0 for none), when the window ends, and the scope.

The time is in seconds since the Unix epoch."""

Series = tuple[str, str, str, Level]
"""The label of an agent, a limit, a scope and a level."""

Export = Sequence[Any]
"""The key of a subject in three parts, and when its series began and were exported last."""

Freeze = tuple[str, str, str, float, float | None]
"""What a frozen subject is, its name or label, by whom, since when, and until when."""

Refusal = tuple[Sequence[tuple[str, str | None]], dict[str, Any]]
"""The scopes and labels of the rows that show a refusal, and what they show."""

OnError = Callable[[Exception], None]

FILES = "langchain_quota.usage-8.*.json"
"""Pattern of the files' names, with the version of their format. prometheus_client's are `*.db`."""

BLOCKED_NOW = 300
"""For how many seconds after its last blocked call a subject counts as blocked now."""

CALLS = ("allowed", "blocked", "without_store")
"""The totals of calls; those `without_store` were checked while it was unavailable."""

PERIODS = {**dict.fromkeys(CALLS, (60, 60)), "nanodollars": (3600, 24)}
"""The totals of calls and costs: the length of their periods in seconds, and how many are kept."""

SLICE = 256
"""The number of subjects that are read or written without a pause."""

_PAUSE = 0.0001


@dataclass(slots=True)
class Use:
    """The use of a limit by a subject; times are in seconds since the Unix epoch."""

    # One thread at a time changes an object in place. A scrape reads each field separately.

    decided: float = 0.0
    unit: Unit = "calls"
    near: float | None = None
    numbers: Sequence[Number] = ()
    blocked: Mapping[str, int] = field(default_factory=dict)
    """The number of refusals, by scope."""
    refused: float | None = None
    spent: int = 0
    refusal: dict[str, Any] | None = None
    """What the limit refused last, and until when, as the page shows it."""


@dataclass(slots=True)
class Subject:
    """A thread, or the subject of a quota."""

    key: Key
    label: str | None
    """A thread's label; `""` for subjects per agent or global; `None` for one that is not shown."""
    last: float
    uses: dict[str, Use]
    cost: int = 0
    """What a thread has cost, in nanodollars, paid tools included."""
    line: str = ""
    """The subject's line in the file; empty if the subject has changed since it was written."""
    # What a reading has made of the uses. It holds from `rated` on, and until the subject changes.
    reached: Sequence[Series] = ()
    states: Sequence[str] = ()
    urgency: tuple[int, float, float] = 0, 0.0, 0.0
    rated: float = 0.0
    rated_until: float = 0.0

    def use_of(self, limit: str, unit: Unit) -> Use:
        """Return the subject's use of a limit, created if needed."""
        use = self.uses.get(limit)
        # Two limits with different units may have the same name.
        if use is None or use.unit != unit:
            use = self.uses[limit] = Use(unit=unit)
        return use


class Snapshot(NamedTuple):
    """The subjects of a process, and its bounds on what is exported; `ttl` is in seconds."""

    started: float
    max_threads: int
    max_subjects: int
    ttl: float
    pid: int = 0
    waiting: Sequence[tuple[str, str, str, int]] = ()
    """The labels of an agent and a thread, a limit, and the number of calls that wait now for it.

    The label is empty where there is no thread.
    """
    totals: Mapping[str, Sequence[tuple[int, int]]] = MappingProxyType({})
    """The amount of each of `PERIODS`, which is numbered from the Unix epoch."""
    frozen: tuple[float, Sequence[Freeze]] = 0.0, ()
    """When a store answered last, and who was frozen then in all of them."""
    refusals: Sequence[Refusal] = ()
    exports: Sequence[Export] = ()
    """The subjects that a scrape of this process has exported within an hour."""
    subjects: Sequence[Subject] = ()


def in_slices(items: Iterable[T]) -> Iterator[T]:
    """Yield items, and pause after some of them, so that no event loop waits for this thread."""
    # Python takes the interpreter from a busy thread only after 5 ms, and each step of an event
    # loop may have to wait that long. A thread that sleeps gives it away at once.
    for index, item in enumerate(items, 1):
        if not index % SLICE:
            time.sleep(_PAUSE)
        yield item


def _line_of(subject: Subject) -> str:
    uses = {
        limit: [getattr(use, name) for name in Use.__slots__] for limit, use in subject.uses.items()
    }
    return json.dumps([subject.key, subject.label, subject.last, uses, subject.cost])


# Most lines are the same as at the last scrape. To parse all of them again would take long, and the
# garbage collector would stop all threads for it.
@lru_cache(maxsize=20_000)
def _parse_subject(line: str) -> Subject:
    key, label, last, uses, cost = json.loads(line)
    return Subject(tuple(key), label, last, {limit: Use(*use) for limit, use in uses.items()}, cost)


def write(path: Path, snapshot: Snapshot, lock: AbstractContextManager[object]) -> None:
    """Replace the whole file at once, so that nobody reads half of it."""
    lines = [json.dumps(snapshot[:-1])]
    for subject in in_slices(snapshot.subjects):
        line = subject.line
        if not line:
            # Lock for one subject at a time, because decisions wait for this lock.
            with lock:
                line = subject.line = _line_of(subject)
        lines.append(line)
    unfinished = path.with_suffix(".new")
    try:
        # Only the owner may read the file, because it has the ids of threads. What others put there
        # is removed: it may be a link.
        unfinished.unlink(missing_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123 - a descriptor
            file.write("\n".join(lines))
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_others(directory: Path, own_path: Path | None, on_error: OnError) -> Iterator[Snapshot]:
    """Read the files of the other processes; report and skip those that cannot be read."""
    for path in directory.glob(FILES):
        if path != own_path:
            try:
                yield _read(path)
            except Exception as error:
                on_error(error)


def _read(path: Path) -> Snapshot:
    """Read the file of a process, without its subjects if the file is older than their `ttl`."""
    with path.open(encoding="ascii") as file:
        snapshot = Snapshot(*json.loads(next(file)))
        if snapshot.totals.keys() != PERIODS.keys():
            raise ValueError("it is no file of this version")
        if not is_alive(snapshot.pid):
            # No call of a process that was killed waits any more.
            snapshot = snapshot._replace(waiting=())
        if time.time() - os.fstat(file.fileno()).st_mtime > snapshot.ttl:
            return snapshot
        return snapshot._replace(subjects=list(map(_parse_subject, file)))


def is_alive(pid: int) -> bool:
    """Return False if a process has ended; where that cannot be known, True."""
    if os.name == "posix":
        with suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False
    return True


def merge(snapshots: Sequence[Snapshot]) -> Sequence[Subject]:
    """Return the subjects of all snapshots, each of them once."""
    if len(snapshots) == 1:
        return snapshots[0].subjects
    merged: dict[Key, Subject] = {}
    for snapshot in snapshots:
        for subject in snapshot.subjects:
            first = merged.get(subject.key)
            merged[subject.key] = subject if first is None else merge_two(first, subject)
    return list(merged.values())


def merge_two(first: Subject, second: Subject, *, by_time: bool = True) -> Subject:
    """Return a subject with the sums of two, and with the newest numbers, or those of the first."""
    uses = dict(first.uses)
    for limit, use in list(second.uses.items()):
        if limit not in uses:
            uses[limit] = use
            continue
        main, other = uses[limit], use
        if by_time and main.decided < use.decided:
            main, other = use, main
        refused = max(main, other, key=lambda use: use.refused or 0)
        blocked = Counter(main.blocked) + Counter(other.blocked) if other.blocked else main.blocked
        uses[limit] = replace(
            main,
            blocked=blocked,
            refused=refused.refused,
            spent=main.spent + (other.spent if other.unit == main.unit else 0),
            refusal=refused.refusal,
        )
    label, last = first.label or second.label, max(first.last, second.last)
    return Subject(first.key, label, last, uses, first.cost + second.cost)


def shared_directory(purpose: str = "read") -> Path | None:
    """Return the directory that workers share, if any; raise if this process cannot use it so."""
    # prometheus_client chooses its mode at import; the environment may have changed since.
    if not is_multiprocess():
        return None
    names = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
    directory = next((Path(os.environ[name]) for name in names if name in os.environ), None)
    mode = os.F_OK if purpose == "read" else os.W_OK | os.X_OK
    if directory is not None and not (directory.is_dir() and os.access(directory, mode)):
        raise ValueError(
            f"PROMETHEUS_MULTIPROC_DIR={str(directory)!r} is no directory that this process can "
            f"{purpose}: make it before the workers start, or unset the variable where there is "
            "one worker only"
        )
    return directory
