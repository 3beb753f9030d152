"""What subjects have used, as one reader of all processes sees it: for /metrics and the page."""

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from langchain_quota.runtime.units import Level
from langchain_quota.telemetry.workers import Number, Snapshot, Subject, Use

BLOCKED_NOW = 300
"""For how many seconds after its last blocked call a subject counts as blocked now."""

HOURS = 24
"""The number of hours for which costs are kept."""

SLICE = 256
"""The number of subjects that are read or written without a pause."""

_PAUSE = 0.0001

T = TypeVar("T")

Series = tuple[str, str, str, Level]
"""The label of an agent, a limit, a scope and a level."""


class Count(NamedTuple):
    """The use of one limit by a row."""

    use: Use
    number: Number | None
    """The number with the highest used share."""
    level: Level | None
    """`None` for a limit in dry run, or without a number."""
    blocked: int


@dataclass(slots=True)
class Row:
    """The subjects of an agent with one label, exported with the numbers of the first one."""

    agent: str
    scope: str
    label: str
    """Empty for quotas per agent or global, which have one subject."""
    is_global: bool
    """True for a global quota, which all agents share."""
    last: float
    """When the last call was, in seconds since the Unix epoch."""
    counts: dict[str, Count] = field(default_factory=dict)
    cost: int = 0
    """What a thread has cost, in nanodollars."""


class Reading(NamedTuple):
    """The subjects of all processes at one moment."""

    now: float
    started: float
    """When the first process began."""
    processes: int
    rows: Sequence[Row]
    """The rows that are exported: the nearest to their limits first, threads before quotas."""
    states: defaultdict[tuple[bool, str], set[str]]
    """All subjects that are `blocked` now, `exhausted` or `near`: threads (`True`), and others."""
    tracked: Counter[Series]
    """The number of all subjects, by what they have used of a limit."""
    exported: Counter[Series]
    """The number of those that are in `rows`."""
    hidden: Counter[bool]
    """The number of subjects that are not in `rows`: threads (`True`), and others."""
    waiting: int
    """The number of calls that wait now."""
    costs: Counter[int]
    """Nanodollars by the hour since the Unix epoch, for the last 24 hours."""
    frozen: int = 0
    """The number of frozen subjects, by the store's newest answer."""


class Rows(dict[tuple[str, str, str], Row]):
    """Rows by agent, scope and label."""

    def add(
        self, subject: Subject, counts: Sequence[tuple[str, Use, Number | None, Level | None]]
    ) -> None:
        """Add a subject; of one with the label of an earlier one, only blocked calls and cost."""
        agent, scope, _ = subject.key
        label = subject.label or ""
        new = Row(agent, scope, label, subject.key[2] == _EVERYBODY, subject.last)
        row = self.setdefault((agent, scope, label), new)
        row.last = max(row.last, subject.last)
        row.cost += subject.cost
        for limit, use, number, level in counts:
            first = row.counts.get(limit)
            if first is None:
                row.counts[limit] = Count(use, number, level, use.blocked)
            else:
                row.counts[limit] = first._replace(blocked=first.blocked + use.blocked)


def in_slices(items: Iterable[T]) -> Iterator[T]:
    """Yield items, and pause after some of them, so that no event loop waits for this thread."""
    # Python takes the interpreter from a busy thread only after 5 ms, and each step of an event
    # loop may have to wait that long. A thread that sleeps gives it away at once.
    for index, item in enumerate(items, 1):
        if not index % SLICE:
            time.sleep(_PAUSE)
        yield item


def costs_of(snapshots: Sequence[Snapshot], now: float) -> Counter[int]:
    """Return what the last hours cost, in nanodollars, by the hour since the Unix epoch."""
    costs, first = Counter[int](), now // 3600 - HOURS
    for snapshot in snapshots:
        for hour, amount in snapshot.costs:
            if hour > first:
                costs[hour] += amount
    return costs


def current_numbers(numbers: Sequence[Number], now: float, *, is_thread: bool) -> Iterator[Number]:
    """Return the numbers of windows that have not ended; an ended window of a thread has used 0."""
    for used, limit, ends, scope in numbers:
        if limit and (ends is None or ends > now):
            yield used, limit, ends, scope
        elif limit and is_thread:
            yield 0, limit, None, scope


def digest(subject: str) -> str:
    """Return the hash of a subject, which is stored so that users' names are not."""
    return hashlib.blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


_EVERYBODY = digest("")
"""The hash of the only subject of a global quota."""
