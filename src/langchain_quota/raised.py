"""Limits that are raised by grants."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from langchain_quota.admission import Hits
from langchain_quota.decision import Scope, Unit
from langchain_quota.resolved import Asked, ResolvedLimit, ResolvedLimits, Row


def raised(limits: ResolvedLimits, granted: Mapping[str, int]) -> ResolvedLimits:
    """Limits, raised by what is granted, by a store's key or the name of a counter it has not."""
    # A name has a slash in it, and no key has one.
    if not granted:
        return limits
    found = [_raised(each, limits.rows(each), granted) for each in limits.limits]
    if all(new is old for new, old in zip(found, limits.limits, strict=True)):
        return limits
    return ResolvedLimits(found)


def newly_raised(
    limits: ResolvedLimits, granted: Mapping[str, int]
) -> list[tuple[str, Scope, Unit, int]]:
    """The thresholds that new grants raise, and by how much; they are given by a store's key."""
    if not granted:
        return []
    return [
        (each.limit.name, row.scope, each.limit.unit, granted[row.key])
        for each in limits.limits
        for row in limits.rows(each)
        if row.most is not None and row.key is not None and granted.get(row.key)
    ]


def asked_again(
    asked: Sequence[Asked], before: ResolvedLimits, after: ResolvedLimits
) -> list[Asked]:
    """What calls have asked of limits, asked of the same limits after grants."""
    found: dict[int, ResolvedLimit] = {}
    more: dict[tuple[str, str], int] = {}
    for old, new in zip(before.limits, after.limits, strict=True):
        if new is old:
            # The counts of a limit may depend on the call.
            continue
        found[id(old)] = new
        for was, now in zip(before.rows(old), after.rows(new), strict=True):
            if was.most is not None and now.most is not None:
                more[new.limit.name, now.scope] = now.most - was.most
    return [
        Asked(
            tuple(
                (found[id(limit)], _raised_rows(rows, after.rows(found[id(limit)])))
                if id(limit) in found
                else (limit, rows)
                for limit, rows in limits
            ),
            Hits(
                hits.amounts,
                tuple(
                    each._replace(most=each.most + more.get((each.limit, each.scope), 0))
                    for each in hits.thresholds
                ),
            ),
            shared,
        )
        for limits, hits, shared in asked
    ]


def _raised_rows(rows: Sequence[Row], after: Sequence[Row]) -> tuple[Row, ...]:
    """The counts that a call has asked for, with new numbers and the same reserve."""
    return tuple(
        row._replace(most=now.most, quota=now.quota) for row, now in zip(rows, after, strict=True)
    )


def _raised(limit: ResolvedLimit, rows: Sequence[Row], granted: Mapping[str, int]) -> ResolvedLimit:
    more = [granted.get(row.counter if row.key is None else row.key, 0) for row in rows]
    if not any(more):
        return limit
    of_thread, of_run, *of_quotas = more
    granted_to = [row.scope for row, each in zip(rows, more, strict=True) if each]
    return replace(
        limit,
        thread_limit=None if limit.thread_limit is None else limit.thread_limit + of_thread,
        run_limit=None if limit.run_limit is None else limit.run_limit + of_run,
        quotas=tuple(
            replace(quota, limit=quota.limit + each)
            for quota, each in zip(limit.quotas, of_quotas, strict=True)
        ),
        # A grant to one subject does not change the limit itself.
        computed=tuple(dict.fromkeys((*limit.computed, *granted_to))),
    )
