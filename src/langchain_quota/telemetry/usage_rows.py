"""What a subject has used of its limits, as one process knows it, and as several do together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from langchain_quota.decision import STORE, THREAD, LimitStatus, QuotaStatus, Unit
from langchain_quota.stores import Occupancy

Key = tuple[str, str, str]
"""The agent's label, the scope, and the label of a thread or the hash of another subject."""

Number = tuple[int, int, float | None]
"""What is used, of how much (0 for no limit), and when its window ends."""

_APART = 600
"""After so many seconds without a refusal, the next one begins a new row of refusals."""


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


_NOTHING = Use()


@dataclass(slots=True)
class Subject:
    """A thread, or the subject of a quota."""

    key: Key
    label: str | None
    last: float
    uses: dict[str, Use]


@dataclass(slots=True)
class Snapshot:
    """What a process knows."""

    started: float
    max_exported: int
    max_subjects: int
    ttl: float
    store: Occupancy | None
    subjects: list[Subject]


def decided(old: Use | None, status: LimitStatus, now: float, near: float) -> Use:
    """What a thread has used of a limit after a decision."""
    old = _NOTHING if old is None else old
    told, unit, numbers, spent = old.decided, old.unit, old.numbers, old.spent
    if not _is_unknown(status, old):
        told = now
        if unit != status.unit:
            # Two limits with different units may have had the same name.
            unit, spent = status.unit, 0
        count = status.thread_before if status.deferred else status.thread_used
        numbers = ((count, status.thread_limit or 0, None),)
        if status.quotas:
            quotas = [each for each in status.quotas if each.per == THREAD and each.limit]
            numbers += tuple(number_of(status, each) for each in quotas)
    blocked, refused, since = old.blocked, old.refused, old.since
    if status.reason is not None and status.enforced:
        blocked += 1
        if status.reason != STORE:
            if refused is None or since is None or now - refused > _APART:
                since = now
            refused = now
    share = near_of(status, near)
    return Use(told, unit, share, numbers, blocked, refused, since, old.reset, spent)


def near_of(status: LimitStatus, near: float) -> float | None:
    """The share from which a limit is near; `None` if it is not enforced."""
    if not status.enforced:
        return None
    return near if status.near is None else status.near


def number_of(status: LimitStatus, quota: QuotaStatus) -> Number:
    """What is used of a quota."""
    ends = None if quota.resets_at is None else quota.resets_at.timestamp()
    return quota.before if status.deferred else quota.used, quota.limit, ends


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
    if since is not None and since - rows[0][0] <= _APART:
        since = min(since, rows[0][1])
    return newest._replace(
        blocked=one.blocked + other.blocked,
        refused=max(filter(None, (one.refused, other.refused)), default=None),
        since=since,
        reset=reset,
        spent=newest.spent + (older.spent if older.unit == newest.unit else 0),
    )


def _is_unknown(status: LimitStatus, old: Use) -> bool:
    """Whether the thread's count is not known, because the shared store could not be asked."""
    if status.reason == STORE:
        return True
    # The call ran in an outage: no quota has an answer, and the state has no count.
    is_silent = status.shared and not status.quotas and status.thread_limit is None
    # With a run limit alone, a store has no count of the thread.
    return is_silent and (status.run_limit is None or len(old.numbers) > 1)
