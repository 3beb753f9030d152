"""The decision about each call of a batch, and the limits whose refusals hold."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from langchain_quota.core.admission import AcquireResult
from langchain_quota.core.checks import CallChecks, Check, ResolvedLimit, ResolvedLimits
from langchain_quota.core.decision import CountStatus, Decision, LimitStatus, Outcome, Reason
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
    frozen: Collection[str] = (),
) -> LimitStatus:
    """Return the status of a limit at one call."""
    limit, run_check = resolved.limit, resolved.checks[1]
    is_budget, runs = limit.unit != "calls", amount > 0
    if is_budget:
        # What a call uses is only known after it finishes.
        amount, charging = spent or 0, spent is not None
    reason: Reason | None = None
    exit_behavior: Exit = limit.exit_behavior
    if refusal_does and (refused_at is not None or exit_behavior != "ask"):
        exit_behavior = refusal_does
    if refused_at is not None:
        reason = "store" if refused_at == STORE else run_check.reason
        if frozen and (refused_at in {c.scope for c in resolved.checks if c.counter in frozen}):
            reason = "frozen"
    return LimitStatus(
        limit=limit.name,
        exit_behavior=exit_behavior,
        counts=tuple(
            [
                CountStatus(
                    check.scope,
                    counts[check.counter],
                    counts[check.counter] + amount,
                    check.maximum,
                    check.subject,
                    check.resets_at,
                    check.per,
                    check.spacing > 0,
                    check.spacing,
                    check.granted,
                    check.window,
                )
                for check in resolved.checks
            ]
        ),
        reason=reason,
        scope=None if reason == "store" else refused_at,
        charged=charging and runs and reason is None,
        deferred=runs and not charging,
        enforced=limit.enforce,
        near=limit.near,
        alert=limit.alert,
        computed=tuple([check.scope for check in resolved.checks if check.computed]),
        shared=resolved.shared,
        unit=limit.unit,
        needs=run_check.needs if is_budget and reason == "exhausted" else 0,
    )


def decide(  # noqa: PLR0913 - keyword-only, with defaults
    calls: Sequence[Call],
    call_checks: Sequence[CallChecks],
    index_of: Sequence[int],
    result: AcquireResult,
    *,
    charging: bool = True,
    exits: Mapping[str, Exit] = MappingProxyType({}),
) -> list[Decision]:
    """Return the decision about each call."""
    # A call runs only if every limit that matches it admits it; a blocked call is charged to none.
    # If refusals stop the batch, the calls that no limit refuses are skipped. A limit in a dry run
    # blocks nothing: the call runs, and is counted.
    counts = dict(result.used)
    decisions = []
    for call, (limits, demand), index in zip(calls, call_checks, index_of, strict=True):
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
                spent=limit.checks[1].amount * runs if call.kind == "tool" else None,
                frozen=result.frozen,
            )
            for limit in limits
        ]
        if runs:
            for count, amount in demand.amounts.items():
                counts[count] += amount
        if not admitted:
            outcome = Outcome.BLOCKED
        elif result.stopped:
            outcome = Outcome.SKIPPED
        # Calls can share an id, and the refusal may belong to the other call.
        elif refused and any(limit_status.reason for limit_status in statuses):
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
    reason: Reason | None
    # The counts of the thread and the run as if the refused calls had run, and the failed checks.
    thread_count: int
    run_count: int
    exceeded: tuple[tuple[Check, int], ...]


def find_breaches(
    limits: ResolvedLimits,
    call_checks: Sequence[CallChecks],
    index_of: Sequence[int],
    decisions: Sequence[Decision],
    result: AcquireResult,
) -> list[Breach]:
    """Return the enforced limits that refuse calls, in their order."""
    breaches = []
    for resolved in limits.limits:
        refusals: dict[int, tuple[Decision, LimitStatus]] = {}
        checks: Sequence[Check] = ()
        demand = Counter[str]()
        for decision, of_call, index in zip(decisions, call_checks, index_of, strict=True):
            for limit_status, matched in zip(decision.limits, of_call.limits, strict=True):
                if matched.limit is resolved.limit:
                    if not resolved.is_budget:
                        demand.update({check.counter for check in matched.checks})
                    if limit_status.refused and limit_status.enforced:
                        # Which counts a limit has may depend on the call.
                        checks = checks or matched.checks
                        refusals.setdefault(index, (decision, limit_status))
        if not refusals:
            continue
        decision, refusal = next(iter(refusals.values()))
        counts = [(check, result.used[check.counter] + demand[check.counter]) for check in checks]
        needs = checks[0].needs if resolved.is_budget else 0
        breaches.append(
            Breach(
                resolved,
                refusal.exit_behavior,
                decision,
                len(refusals),
                refusal.reason,
                counts[0][1],
                counts[1][1],
                tuple(
                    (check, count)
                    for check, count in counts
                    if check.maximum is not None and count + needs > check.maximum - check.keep
                ),
            )
        )
    return breaches
