"""Turns an answer into decisions about calls, and finds the limits whose refusals hold."""

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

from langchain_quota.admission import AcquireResult
from langchain_quota.decision import (
    STORE,
    Call,
    Decision,
    Exit,
    LimitStatus,
    Outcome,
    QuotaStatus,
    Reason,
    Scope,
)
from langchain_quota.resolved import Asked, Check, ResolvedLimit, ResolvedLimits


def status(  # noqa: PLR0913 - keyword-only, with defaults
    limit: ResolvedLimit,
    counts: Mapping[str, int],
    amount: int,
    *,
    refused_at: Scope | None = None,
    charging: bool = True,
    refusal_does: Exit | None = None,
    spent: int | None = None,
) -> LimitStatus:
    """The status of a limit at one call."""
    of_thread, of_run, *of_quotas = limit.checks
    thread, run = counts[of_thread.counter], counts[of_run.counter]
    runs = amount > 0
    if limit.is_budget:
        # What a call uses is known when it has returned.
        amount, charging = spent or 0, spent is not None
    reason: Reason | None = None
    exit_behavior: Exit = limit.limit.exit_behavior
    if refusal_does and (refused_at is not None or exit_behavior != "ask"):
        exit_behavior = refusal_does
    if refused_at is not None:
        reason = "store" if refused_at == STORE else of_run.reason
    return LimitStatus(
        limit=limit.limit.name,
        exit_behavior=exit_behavior,
        thread_before=thread,
        thread_used=thread + amount,
        thread_limit=of_thread.most,
        run_before=run,
        run_used=run + amount,
        run_limit=of_run.most,
        reason=reason,
        scope=None if reason == "store" else refused_at,
        charged=charging and runs and reason is None,
        deferred=runs and not charging,
        enforced=limit.limit.enforce,
        near=limit.limit.near,
        alert=limit.limit.alert,
        computed=tuple(each.scope for each in limit.checks if each.computed),
        quotas=tuple(
            QuotaStatus(
                each.scope,
                each.subject,
                counts[each.counter],
                counts[each.counter] + amount,
                each.most or 0,
                each.resets_at,
                each.per,
            )
            for each in of_quotas
        )
        if of_quotas
        else (),
        shared=limit.shared,
        unit=limit.limit.unit,
        needs=of_run.hit if limit.is_budget and reason == "exhausted" else 0,
    )


def decide(  # noqa: PLR0913 - keyword-only, with defaults
    calls: Sequence[Call],
    asked: Sequence[Asked],
    index_of: Sequence[int],
    result: AcquireResult,
    *,
    charging: bool = True,
    exits: Mapping[str, Exit] = MappingProxyType({}),
) -> list[Decision]:
    """The decision about each call."""
    # A call runs only if every limit that matches it admits it; a refused call is charged to none.
    # If refusals stop the batch, what was not refused is skipped. A limit that is not enforced
    # refuses nothing: the call runs, and is counted.
    counts = dict(result.used)
    decisions = []
    for call, (limits, hits, _), index in zip(calls, asked, index_of, strict=True):
        refused, admitted = result.refused[index], result.admitted[index]
        amount = call.amount if admitted and not result.stopped else 0
        statuses = tuple(
            status(
                limit,
                counts,
                amount,
                refused_at=refused.get(limit.limit.name),
                charging=charging,
                refusal_does=exits.get(limit.limit.name),
            )
            for limit in limits
        )
        for count in hits.amounts if amount else ():
            counts[count] += amount
        if not admitted:
            outcome = Outcome.BLOCKED
        elif result.stopped:
            outcome = Outcome.SKIPPED
        # Calls can share an id. The refusal may belong to the other call.
        elif refused and any(each.refused for each in statuses):
            outcome = Outcome.WOULD_BLOCK
        else:
            outcome = Outcome.ALLOWED
        decisions.append(Decision(call, outcome, statuses))
    return decisions


class Exceeded(NamedTuple):
    """A threshold that refuses calls of a batch."""

    scope: Scope
    used: int
    most: int
    resets_at: datetime | None
    needs: int = 0


@dataclass(frozen=True, slots=True)
class Breach:
    """An enforced limit that refuses calls of this batch."""

    limit: ResolvedLimit
    exit_behavior: Exit
    decision: Decision
    refusals: int
    unchecked: bool
    thread_count: int
    run_count: int
    exceeded: tuple[Exceeded, ...]


def breaches(
    limits: ResolvedLimits,
    asked: Sequence[Asked],
    index_of: Sequence[int],
    decisions: Sequence[Decision],
    result: AcquireResult,
) -> list[Breach]:
    """The limits whose refusals hold, in their order."""
    found = []
    for each in limits.limits:
        refused: dict[int, tuple[Decision, LimitStatus]] = {}
        checks: Sequence[Check] = ()
        amounts: Counts[str] = Counts()
        for decision, (matching, _, _), index in zip(decisions, asked, index_of, strict=True):
            for how, matched in zip(decision.limits, matching, strict=True):
                if matched.limit is each.limit:
                    if not each.is_budget:
                        amounts.update(
                            {one.counter: decision.call.amount for one in matched.checks}
                        )
                    if how.refused and how.enforced:
                        # Which counts a limit has may depend on the call.
                        checks = checks or matched.checks
                        refused.setdefault(index, (decision, how))
        if not refused:
            continue
        decision, first = next(iter(refused.values()))
        needs = checks[0].hit if each.is_budget else 0
        counts = [(one, result.used[one.counter] + amounts[one.counter]) for one in checks]
        found.append(
            Breach(
                each,
                first.exit_behavior,
                decision,
                len(refused),
                first.reason == "store",
                counts[0][1],
                counts[1][1],
                tuple(
                    Exceeded(one.scope, count, one.most, one.resets_at, needs)
                    for one, count in counts
                    if one.most is not None and count + needs > one.most - one.kept
                ),
            )
        )
    return found
