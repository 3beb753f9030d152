"""The verdict about each call of a batch, and the limits whose refusals hold."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

from langchain_quota.core.admission import AcquireResult
from langchain_quota.core.checks import CallChecks, Check, ResolvedLimit, ResolvedLimits
from langchain_quota.core.decision import (
    Answer,
    CountStatus,
    Decision,
    LimitStatus,
    Outcome,
    Reason,
)
from langchain_quota.limits import Limit
from langchain_quota.limits.call import STORE, Call, Exit, Scope
from langchain_quota.runtime.units import near_threshold


@dataclass(slots=True, eq=False)
class Verdict:
    """What came out for one call: whether it runs, the counts before it, and who refuses it.

    Metrics, spans, logs and all other readers get it, and nobody changes it. It refers to no state,
    message or request. The public `decision` is made when somebody reads it.

    Attributes:
        limits: The limits that match the call.
        before: The counts before the call, by name.
        amounts: What the call adds to the counts of each limit.
        charged: Whether the call is charged to each limit by this verdict.
        deferred: The names of the limits that count the call when it has returned.
        refused: The limits that refuse the call, or another one with its id, and their scopes.
        exits: What the refusals of limits do, where it is not their `exit_behavior`.
        frozen: The names of the counts whose subject is frozen.
        cost: What a tool call costs in nanodollars, as limits in dollars know it; else 0.
        needs_slot: Whether the call runs only if it gets a slot, about which another verdict says.
    """

    call: Call
    outcome: Outcome
    limits: Sequence[ResolvedLimit] = ()
    before: Mapping[str, int] = field(default_factory=dict)
    amounts: Sequence[int] = ()
    charged: Sequence[bool] = ()
    deferred: Collection[str] = ()
    refused: Mapping[str, Scope] = field(default_factory=dict)
    exits: Mapping[str, Exit] = field(default_factory=dict)
    frozen: Collection[str] = ()
    cost: int = 0
    answer: Answer | None = None
    waited: float = 0.0
    downgraded_by: str = ""
    needs_slot: bool = False
    _decision: Decision | None = field(default=None, init=False)

    @classmethod
    def of_charge(
        cls, call: Call, limit: ResolvedLimit, before: Mapping[str, int], amount: int
    ) -> Self:
        """Return the verdict about an allowed call that is charged to a limit now."""
        return cls(call, Outcome.ALLOWED, (limit,), before, (amount,), (True,))

    def joined(self, slot: "Verdict") -> "Verdict":
        """Return the verdict about the call by all limits, after that about its slots."""
        return replace(
            self,
            outcome=slot.outcome,
            limits=(*self.limits, *slot.limits),
            before={**self.before, **slot.before},
            amounts=(*self.amounts, *slot.amounts),
            charged=(*self.charged, *slot.charged),
            refused={**self.refused, **slot.refused},
            waited=self.waited + slot.waited,
        )

    @property
    def decision(self) -> Decision:
        """Public record of the verdict."""
        if self._decision is None:
            statuses = tuple(map(self._status, self.limits, self.amounts, self.charged))
            self._decision = Decision(
                self.call, self.outcome, statuses, self.answer, self.waited, self.downgraded_by
            )
        return self._decision

    @property
    def leading(self) -> int | None:
        """Index of the limit to show: the first that refuses, else that of the highest share."""
        indexes = range(len(self.limits))
        if self.refused:
            refusing = [index for index in indexes if self.limits[index].limit.name in self.refused]
            if refusing:
                return min(refusing, key=lambda index: not self.limits[index].limit.enforce)
        return max(indexes, key=self.share, default=None)

    def share(self, index: int) -> float:
        """Return the largest used share of a limit, from 0; a limit of 0 counts as fully used."""
        added = self.amounts[index]
        return max(
            [
                (self.before[check.counter] + added) / check.maximum if check.maximum else 1.0
                for check in self.limits[index].checks
                if check.maximum is not None
            ],
            default=0.0,
        )

    def exit_behavior(self, limit: Limit) -> Exit:
        """Return what a refusal by a limit does, or would do."""
        is_asking = limit.exit_behavior == "ask" and limit.name not in self.refused
        return limit.exit_behavior if is_asking else self.exits.get(limit.name, limit.exit_behavior)

    def is_near(self, index: int, near: float) -> bool:
        """Return whether a count of a limit has reached its near share, or a default one."""
        (limit, checks, *_), added = self.limits[index], self.amounts[index]
        share = near if limit.near is None else limit.near
        return any(
            self.before[check.counter] + added >= near_threshold(check.maximum, share)
            for check in checks
            if check.maximum is not None
        )

    @property
    def refused_by(self) -> Sequence[LimitStatus]:
        """Limits that refuse the call, enforced ones first."""
        return self.decision.refused_by if self.refused else ()

    def _status(self, resolved: ResolvedLimit, amount: int, charged: bool) -> LimitStatus:  # noqa: FBT001 - one of three columns
        """Return the status of a limit."""
        limit, refused_at = resolved.limit, self.refused.get(resolved.limit.name)
        reason: Reason | None = None
        if refused_at is not None:
            reason = "store" if refused_at == STORE else resolved.checks[-1].reason
            for check in resolved.checks:
                if check.scope == refused_at and check.counter in self.frozen:
                    reason = "frozen"
        needs = limit.unit != "calls" and reason == "exhausted"
        return LimitStatus(
            limit=limit.name,
            exit_behavior=self.exit_behavior(limit),
            counts=tuple(
                [
                    CountStatus(
                        check.scope,
                        self.before[check.counter],
                        self.before[check.counter] + amount,
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
            charged=charged,
            deferred=limit.name in self.deferred,
            enforced=limit.enforce,
            near=limit.near,
            alert=limit.alert,
            computed=tuple([check.scope for check in resolved.checks if check.computed]),
            shared=resolved.shared,
            unit=limit.unit,
            needs=resolved.checks[0].needs if needs else 0,
        )


def decide(  # noqa: PLR0913 - keyword-only, with defaults
    calls: Sequence[Call],
    call_checks: Sequence[CallChecks],
    index_of: Sequence[int],
    result: AcquireResult,
    *,
    charging: bool = True,
    exits: Mapping[str, Exit] = MappingProxyType({}),
    answer: Answer | None = None,
    waited: float = 0.0,
) -> list[Verdict]:
    """Return the verdict about each call."""
    # A call runs only if every limit that matches it admits it; a blocked call is charged to none.
    # If refusals stop the batch, the calls that no limit refuses are skipped. A limit in a dry run
    # blocks nothing: the call runs, and is counted.
    counts = result.used
    verdicts = []
    for call, (limits, demand), index in zip(calls, call_checks, index_of, strict=True):
        refused, admitted = result.refused[index], result.admitted[index]
        runs = admitted and not result.stopped
        amounts, charged, deferred, cost = [], [], [], 0
        for resolved in limits:
            limit, amount, is_known = resolved.limit, int(runs), charging
            if limit.unit != "calls":
                # What a model call uses is only known after it finishes.
                is_known = call.kind == "tool"
                amount = resolved.checks[0].amount * runs if is_known else 0
                cost = max(cost, amount) if limit.unit == "nanodollars" else cost
            amounts.append(amount)
            charged.append(runs and is_known and limit.name not in refused)
            if runs and not is_known:
                deferred.append(limit.name)
        if not admitted:
            outcome = Outcome.BLOCKED
        elif result.stopped:
            outcome = Outcome.SKIPPED
        # Calls can share an id, and the refusal may belong to the other call.
        elif refused and any(resolved.limit.name in refused for resolved in limits):
            outcome = Outcome.WOULD_BLOCK
        else:
            outcome = Outcome.ALLOWED
        of_limits = limits, counts, amounts, charged, deferred, refused, exits, result.frozen
        said = Verdict(call, outcome, *of_limits, cost=cost, answer=answer, waited=waited)
        verdicts.append(said)
        if runs and len(calls) > 1:
            counts = {**counts}
            for count, added in demand.amounts.items():
                counts[count] += added
    return verdicts


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
    verdicts: Sequence[Verdict],
    result: AcquireResult,
) -> list[Breach]:
    """Return the enforced limits that refuse calls, in their order."""
    breaches = []
    for resolved in limits.limits:
        refusals: dict[int, tuple[Decision, LimitStatus]] = {}
        checks: Sequence[Check] = ()
        demand = Counter[str]()
        for verdict, of_call, index in zip(verdicts, call_checks, index_of, strict=True):
            for number, matched in enumerate(of_call.limits):
                if matched.limit is resolved.limit:
                    if not resolved.is_budget:
                        demand.update({check.counter for check in matched.checks})
                    if matched.limit.name in verdict.refused and matched.limit.enforce:
                        # Which counts a limit has may depend on the call.
                        checks = checks or matched.checks
                        refusal = verdict.decision.limits[number]
                        refusals.setdefault(index, (verdict.decision, refusal))
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
