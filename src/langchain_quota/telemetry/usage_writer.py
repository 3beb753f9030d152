"""Writes decisions, refunds and resets to the database of usage."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

from langchain_quota.decision import (
    ROOT_RUN,
    STORE,
    THREAD,
    Decision,
    LimitStatus,
    QuotaStatus,
    Unit,
)
from langchain_quota.telemetry.database import Key, Parts, UsageDatabase, Use

_Timed = tuple[float, LimitStatus]
"""The time of a decision, in seconds since the Unix epoch, and the status of a limit."""


SubjectLabel = Callable[[str, str], str | None]
"""Makes the label of a subject, by its quota's name; `None` for one that is not to be shown."""

_APART = 600
"""After so many seconds without a refusal, the next one begins a new row of refusals."""

_BOUNDED = ("agent", "global")
"""The `per` of quotas with at most one subject for each agent, which always has series."""


class UsageWriter:
    """Writes what subjects have used of their limits.

    Args:
        near: The share from which a limit is near.
        ttl: How long, in seconds, a subject without decisions is remembered.
        subject_label: Makes the labels of subjects other than threads.
    """

    def __init__(self, *, near: float, ttl: float, subject_label: SubjectLabel) -> None:
        self._near = near
        self._ttl = ttl
        self._subject_label = subject_label

    def decisions(
        self,
        database: UsageDatabase,
        now: float,
        agent: str,
        thread: str | None,
        decided: Sequence[tuple[float, Sequence[Decision]]],
    ) -> None:
        """Write the decisions about calls of one thread, with times; the arguments are labels."""
        by_limit: dict[str, list[_Timed]] = {}
        has_quotas = False
        for at, decisions in decided:
            for decision in decisions:
                for status in decision.limits:
                    by_limit.setdefault(status.limit, []).append((at, status))
                    has_quotas = has_quotas or bool(status.quotas)
        if thread is not None:
            self._write_thread(database, now, (agent, THREAD, thread), by_limit)
        digests: dict[str, bytes] = {}
        for statuses in by_limit.values() if has_quotas else ():
            quotas = {
                (quota.scope, quota.subject): (at, status, quota)
                for at, status in statuses
                for quota in status.quotas
                # Root runs come without end, and nobody looks for one by its name.
                if quota.per not in (THREAD, ROOT_RUN)
            }
            for (scope, name), (at, status, quota) in quotas.items():
                # Made once per subject: it may have a megabyte, and several quotas may count by it.
                if name not in digests:
                    digests[name] = _digest(name)
                key = (agent, scope, digests[name])
                self._write_quota(database, at, key, status, quota)

    def refund(  # noqa: PLR0913, PLR0917 - what a refund is of
        self,
        database: UsageDatabase,
        now: float,
        agent: str,
        thread: str,
        limit: str,
        amount: int,
    ) -> None:
        """Subtract calls from what a thread has used of a limit; other amounts are settled."""
        subject = database.subject((agent, THREAD, thread), now, self._ttl)
        uses: dict[int, Parts] = dict(database.uses(subject)) if subject is not None else {}
        series = database.series(agent, limit, THREAD)
        if subject is None or series not in uses:
            return
        old = uses[series]
        # A later decision includes it.
        uses[series] = {
            part: use._replace(used=max(0, use.used - amount))
            if use.decided <= now and use.unit == "calls"
            else use
            for part, use in old.items()
        }
        database.put(subject, series, uses[series], old)
        database.rank(subject, uses, now)

    def spend(
        self,
        database: UsageDatabase,
        now: float,
        agent: str,
        thread: str,
        spent: Sequence[tuple[str, Unit, int]],
    ) -> None:
        """Add what model calls of a thread have spent, by limit."""
        key = (agent, THREAD, thread)
        subject = database.subject(key, now, self._ttl) or database.add(key, now)
        uses = database.uses(subject)
        total: dict[tuple[str, Unit], int] = {}
        for limit, unit, amount in spent:
            total[limit, unit] = total.get((limit, unit), 0) + amount
        for (limit, unit), amount in total.items():
            series = database.series(agent, limit, THREAD)
            old = uses.get(series, {})
            own = old.get("", Use(unit=unit))
            before = own.spent if own.unit == unit else 0
            uses[series] = {**old, "": own._replace(unit=unit, spent=before + amount)}
            database.put(subject, series, uses[series], old)

    def reset(
        self,
        database: UsageDatabase,
        now: float,
        agent: str,
        thread: str,
        limits: Sequence[LimitStatus],
    ) -> None:
        """Write that a thread has used nothing; decisions from before are ignored from now on."""
        key = (agent, THREAD, thread)
        subject = database.subject(key, now, self._ttl) or database.add(key, now)
        old = database.uses(subject)
        uses: dict[int, Parts] = {
            # A later decision includes it.
            series: {
                part: use._replace(
                    used=0, resets_at=None, decided=now, full_since=None, refused_since=None
                )
                if use.decided <= now
                else use
                for part, use in parts.items()
            }
            for series, parts in old.items()
        }
        for status in limits:
            series = database.series(agent, status.limit, THREAD)
            if series not in uses:
                uses[series] = self._decided({}, [(now, status)])
        for series, parts in uses.items():
            database.put(subject, series, parts, old.get(series, {}))
        database.rank(subject, uses, now)

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
        for limit, statuses in by_limit.items():
            series = database.series(key[0], limit, THREAD)
            old = uses.get(series, {})
            uses[series] = self._decided(old, statuses)
            database.put(subject, series, uses[series], old)
            refused = max((at for at, _ in _refusals(statuses)), default=refused)
        database.rank(subject, uses, now, refused=refused)

    def _decided(self, old: Parts, statuses: Sequence[_Timed]) -> Parts:
        """What a thread has used of a limit after some decisions."""
        known = old.get("", Use())
        told = next((each for each in reversed(statuses) if not _is_unknown(each[1], old)), None)
        parts = dict(old)
        if told is not None and known.decided <= told[0]:
            decided, newest = told
            numbers: dict[str, tuple[int, int | None, float | None]] = {
                "": (newest.thread_count, newest.thread_limit, None)
            }
            for quota in newest.quotas:
                if quota.per == THREAD and quota.limit:
                    numbers[quota.scope] = _numbers(newest, quota)
            parts = {
                part: self._use(decided, newest, *each, old.get(part))
                for part, each in numbers.items()
            }
        elif known.decided <= statuses[-1][0]:
            # Only the near share, and whether the limit is enforced, are known.
            near = self._near_of(statuses[-1][1])
            parts = {part: use._replace(near=near) for part, use in old.items()}
        refusals, refused, refused_since = _refusals(statuses), known.refused, known.refused_since
        for at, status in refusals:
            if status.reason != "store":
                if refused is None or refused_since is None or at - refused > _APART:
                    refused_since = at
                refused = max(at, refused or at)
        own = parts.get("", known)
        parts[""] = own._replace(
            blocked=known.blocked + len(refusals),
            refused=refused,
            refused_since=refused_since,
            # Two limits with different units may have had the same name.
            spent=known.spent if known.unit == own.unit else 0,
        )
        return parts

    def _write_quota(
        self, database: UsageDatabase, now: float, key: Key, status: LimitStatus, quota: QuotaStatus
    ) -> None:
        subject = database.subject(key, now, self._ttl)
        if subject is None:
            subject = database.add(key, now, self._shown(quota))
        series = database.series(key[0], status.limit, key[1])
        uses: dict[int, Parts] = dict(database.uses(subject))
        old = uses.pop(series, {})
        known = old.get("")
        if known is not None and known.decided > now:
            return
        new: dict[str, Use] = {}
        # As with threads, only enforced limits above 0 say how much is used.
        if status.enforced and quota.limit:
            used, cap, ends = _numbers(status, quota)
            if ends is None or ends > now:
                new[""] = self._use(now, status, used, cap, ends, known)
        database.put(subject, series, new, old)
        database.rank(subject, {**uses, series: new}, now)

    def _shown(self, quota: QuotaStatus) -> str | None:
        """The label of a quota's subject; `None` if it is not to be shown."""
        return "" if quota.per in _BOUNDED else self._subject_label(quota.scope, quota.subject)

    def _use(  # noqa: PLR0913, PLR0917 - the columns of a row
        self,
        now: float,
        status: LimitStatus,
        used: int,
        cap: int | None,
        resets_at: float | None,
        old: Use | None,
    ) -> Use:
        if resets_at is not None and resets_at <= now:
            # Nothing is known of the new window.
            used, resets_at = 0, None
        near = self._near_of(status)
        use = Use(used, cap or None, near, resets_at, decided=now, unit=status.unit)
        if not use.is_full:
            return use
        since = old.full_since if old is not None and old.is_full else now
        return use._replace(full_since=since)

    def _near_of(self, status: LimitStatus) -> float | None:
        if not status.enforced:
            return None
        return self._near if status.near is None else status.near


def _refusals(statuses: Sequence[_Timed]) -> list[_Timed]:
    """The statuses of calls that the limit refuses."""
    return [each for each in statuses if each[1].reason is not None and each[1].enforced]


def _is_unknown(status: LimitStatus, old: Parts) -> bool:
    """Whether the thread's count is not known, because the shared store could not be asked."""
    if status.refusal_scope == STORE:
        return True
    # The call ran in an outage: no quota has an answer, and the state has no count.
    is_silent = status.shared and not status.quotas and status.thread_limit is None
    # With a run limit alone, a store has no count of the thread.
    return is_silent and (status.run_limit is None or any(old))


def _numbers(status: LimitStatus, quota: QuotaStatus) -> tuple[int, int, float | None]:
    """What is used of a quota, of how much, and until when."""
    ends = None if quota.resets_at is None else quota.resets_at.timestamp()
    return quota.before if status.deferred else quota.used, quota.limit, ends


def _digest(subject: str) -> bytes:
    """What is remembered of a subject: a hash, so that users' names are not kept."""
    return hashlib.blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=16).digest()
