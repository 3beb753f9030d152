"""Decides about each call of a batch, and finds the limits whose refusals hold."""

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from langchain_quota.core.admission import AcquireResult
from langchain_quota.core.checks import CallChecks, Check, ResolvedLimit, ResolvedLimits
from langchain_quota.core.decision import Decision, LimitStatus, Outcome, Reason
from langchain_quota.limits.call import STORE, Call, Exit, Scope


def status(  # noqa: PLR0913 - keyword-only, with defaults
    resolved: ResolvedLimit,
    counts: Mapping[str, int],
    amount: int,
    *,
    refused_at: Scope | None = None,
    charging: bool = True,
    refusal_does: Exit | None = None,
    spent: int | None = None,
) -> LimitStatus:
    """The status of a limit at one call."""
    limit, of_run = resolved.limit, resolved.checks[1]
    is_budget, runs = limit.unit != "calls", amount > 0
    if is_budget:
        # What a call uses is known when it has returned.
        amount, charging = spent or 0, spent is not None
    reason: Reason | None = None
    exit_behavior: Exit = limit.exit_behavior
    if refusal_does and (refused_at is not None or exit_behavior != "ask"):
        exit_behavior = refusal_does
    if refused_at is not None:
        reason = "store" if refused_at == STORE else of_run.reason
    return LimitStatus(
        limit=limit.name,
        exit_behavior=exit_behavior,
        counts=tuple([each.status(counts[each.counter], amount) for each in resolved.checks]),
        reason=reason,
        scope=None if reason == "store" else refused_at,
        charged=charging and runs and reason is None,
        deferred=runs and not charging,
        enforced=limit.enforce,
        near=limit.near,
        alert=limit.alert,
        computed=tuple([each.scope for each in resolved.checks if each.computed]),
        shared=resolved.shared,
        unit=limit.unit,
        needs=of_run.needs if is_budget and reason == "exhausted" else 0,
    )


def decide(  # noqa: PLR0913 - keyword-only, with defaults
    calls: Sequence[Call],
    asked: Sequence[CallChecks],
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
    for call, (limits, hits), index in zip(calls, asked, index_of, strict=True):
        refused, admitted = result.refused[index], result.admitted[index]
        runs = admitted and not result.stopped
        statuses = [
            status(
                limit,
                counts,
                int(runs),
                refused_at=refused.get(limit.limit.name),
                charging=charging,
                refusal_does=exits.get(limit.limit.name),
                spent=limit.checks[1].hit * runs if call.kind == "tool" else None,
            )
            for limit in limits
        ]
        if runs:
            for count, amount in hits.amounts.items():
                counts[count] += amount
        if not admitted:
            outcome = Outcome.BLOCKED
        elif result.stopped:
            outcome = Outcome.SKIPPED
        # Calls can share an id. The refusal may belong to the other call.
        elif refused and any(each.reason for each in statuses):
            outcome = Outcome.WOULD_BLOCK
        else:
            outcome = Outcome.ALLOWED
        decisions.append(Decision(call, outcome, tuple(statuses)))
    return decisions


@dataclass(frozen=True, slots=True)
class Breach:
    """An enforced limit that refuses calls of this batch."""

    limit: ResolvedLimit
    exit_behavior: Exit
    decision: Decision
    refusals: int
    store_unavailable: bool
    # The thread's and the run's count as if the refused calls had run, and the checks that fail.
    thread_count: int
    run_count: int
    exceeded: tuple[tuple[Check, int], ...]


def breaches(
    limits: ResolvedLimits,
    asked: Sequence[CallChecks],
    index_of: Sequence[int],
    decisions: Sequence[Decision],
    result: AcquireResult,
) -> list[Breach]:
    """The limits whose refusals hold, in their order."""
    found = []
    for each in limits.limits:
        refused: dict[int, tuple[Decision, LimitStatus]] = {}
        checks: Sequence[Check] = ()
        more = Counts[str]()
        for decision, one, index in zip(decisions, asked, index_of, strict=True):
            for how, matched in zip(decision.limits, one.limits, strict=True):
                if matched.limit is each.limit:
                    if not each.is_budget:
                        more.update({check.counter for check in matched.checks})
                    if how.refused and how.enforced:
                        # Which counts a limit has may depend on the call.
                        checks = checks or matched.checks
                        refused.setdefault(index, (decision, how))
        if not refused:
            continue
        decision, first = next(iter(refused.values()))
        counts = [(one, result.used[one.counter] + more[one.counter]) for one in checks]
        needs = checks[0].needs if each.is_budget else 0
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
                    (one, count)
                    for one, count in counts
                    if one.most is not None and count + needs > one.most - one.kept
                ),
            )
        )
    return found
