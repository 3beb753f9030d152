"""The verdict about each call of a batch, and the limits whose refusals hold."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Self

from langchain_quota.core.admission import AcquireResult
from langchain_quota.core.decision import (
    Answer,
    CountStatus,
    Decision,
    LimitStatus,
    Outcome,
    Reason,
)
from langchain_quota.core.plans import NO_LIMITS, LimitSet, Meter, Place, Places, Plan, Rule
from langchain_quota.limits import Limit
from langchain_quota.limits.call import STORE, Call, Exit, Scope


@dataclass(slots=True, eq=False)
class Verdict:
    """What came out for one call: whether it runs, the counts before it, and who refuses it.

    Metrics, spans, logs and all other readers get it, and nobody changes it. It may be kept: it
    refers to no state, message or request. The public `decision` is made when somebody reads it;
    two verdicts are equal only if they are the same one.

    Attributes:
        call: The call.
        outcome: Whether it runs.
        plan: What the call must pass, and what it adds to counts.
        places: Where a store keeps the counts, by name.
        before: The counts before the call, by name.
        amounts: What the call adds to the counts of each limit.
        charged: Whether the call is charged to each limit by this verdict.
        deferred: The names of the limits that count the call when it has returned.
        refused: The limits that refuse the call, or another one with its id, and their scopes.
        exits: What the refusals of limits do, where it is not their `exit_behavior`.
        frozen: The names of the counts whose subject is frozen.
        cost: What a tool call costs in nanodollars, as limits in dollars know it; else 0.
        answer: What a person answered before, if one was asked.
        waited: How long the call has waited for room, in seconds.
        downgraded_by: The limit that has a model call go to another model; empty for none.
        needs_slot: Whether the call runs only if it gets a slot, about which another verdict says.
        before_slots: If this one is about the call's slots alone, the verdict before it.
    """

    call: Call
    outcome: Outcome
    plan: Plan = NO_LIMITS
    before: Mapping[str, int] = field(default_factory=dict)
    amounts: Sequence[int] = ()
    charged: Sequence[bool] = ()
    deferred: Collection[str] = ()
    refused: Mapping[str, Scope] = field(default_factory=dict)
    exits: Mapping[str, Exit] = field(default_factory=dict)
    frozen: Collection[str] = ()
    places: Places = field(default_factory=dict)
    cost: int = 0
    answer: Answer | None = None
    waited: float = 0.0
    downgraded_by: str = ""
    needs_slot: bool = False
    before_slots: "Verdict | None" = None
    _decision: Decision | None = field(default=None, init=False)

    @classmethod
    def of_charge(
        cls, call: Call, plan: Plan, before: Mapping[str, int], amount: int, places: Places
    ) -> Self:
        """Return the verdict about an allowed call that is charged to the plan's one limit now."""
        return cls(call, Outcome.ALLOWED, plan, before, (amount,), (True,), places=places)

    @property
    def decision(self) -> Decision:
        """Public record of the verdict."""
        if self._decision is None:
            statuses = tuple(map(self._status, self.plan.rules, self.amounts, self.charged))
            self._decision = Decision(
                self.call, self.outcome, statuses, self.answer, self.waited, self.downgraded_by
            )
        return self._decision

    @property
    def whole_decision(self) -> Decision:
        """Public record by all limits on the call: those of the verdict before come first."""
        if self.before_slots is None:
            return self.decision
        before, slots = self.before_slots.decision, self.decision
        return before._replace(
            outcome=slots.outcome,
            limits=(*before.limits, *slots.limits),
            waited=before.waited + slots.waited,
        )

    @property
    def leading(self) -> int | None:
        """Index of the limit to show: the first that refuses, else that of the highest share."""
        rules = self.plan.rules
        indexes = range(len(rules))
        if len(rules) == 1:
            return 0
        if self.refused:
            refusing = [index for index in indexes if rules[index].limit.name in self.refused]
            if refusing:
                return min(refusing, key=lambda index: not rules[index].limit.enforce)
        return max(indexes, key=self.share, default=None)

    def share(self, index: int) -> float:
        """Return the largest used share of a limit, from 0; a limit of 0 counts as fully used."""
        added = self.amounts[index]
        return max(
            [
                (self.before[meter.counter] + added) / meter.maximum if meter.maximum else 1.0
                for meter in self.plan.rules[index].meters
                if meter.maximum is not None
            ],
            default=0.0,
        )

    def exit_behavior(self, limit: Limit) -> Exit:
        """Return what a refusal by a limit does, or would do."""
        # A limit that asks, and does not refuse this call, is shown as one that asks. What `exits`
        # has for it follows from the refusal of another call.
        is_asking = limit.exit_behavior == "ask" and limit.name not in self.refused
        return limit.exit_behavior if is_asking else self.exits.get(limit.name, limit.exit_behavior)

    def place_of(self, quota: Meter) -> Place:
        """Return the subject of a quota and the end of its window; none for other meters."""
        return self.places.get(quota.counter, _NOWHERE) if quota.per else _NOWHERE

    @property
    def refused_by(self) -> Sequence[LimitStatus]:
        """Limits that refuse the call, enforced ones first."""
        return self.decision.refused_by if self.refused else ()

    def _status(self, rule: Rule, amount: int, charged: bool) -> LimitStatus:  # noqa: FBT001 - one of three columns
        limit, refused_at = rule.limit, self.refused.get(rule.limit.name)
        reason: Reason | None = None
        if refused_at is not None:
            reason = "store" if refused_at == STORE else rule.meters[-1].reason
            for meter in rule.meters:
                if meter.scope == refused_at and meter.counter in self.frozen:
                    reason = "frozen"
        needs = limit.unit != "calls" and reason == "exhausted"
        return LimitStatus(
            limit=limit.name,
            exit_behavior=self.exit_behavior(limit),
            counts=tuple([self._count(meter, amount) for meter in rule.meters]),
            reason=reason,
            scope=None if reason == "store" else refused_at,
            charged=charged,
            deferred=limit.name in self.deferred,
            enforced=limit.enforce,
            near=limit.near_share,
            alert=limit.alert,
            computed=tuple([meter.scope for meter in rule.meters if meter.computed]),
            shared=rule.shared,
            unit=limit.unit,
            needs=next((one.needs for one in rule.meters if needs and one.scope == refused_at), 0),
        )

    def _count(self, meter: Meter, amount: int) -> CountStatus:
        before, place = self.before[meter.counter], self.place_of(meter)
        return CountStatus(
            *(meter.scope, before, before + amount, meter.maximum, place.subject, place.resets_at),
            *(meter.per, meter.spacing > 0, meter.spacing, meter.granted, meter.window),
        )


_NOWHERE = Place("")


def decide(  # noqa: PLR0913 - keyword-only, with defaults
    calls: Sequence[Call],
    plans: Sequence[Plan],
    index_of: Sequence[int],
    result: AcquireResult,
    *,
    places: Places = MappingProxyType({}),
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
    for call, plan, index in zip(calls, plans, index_of, strict=True):
        refused, admitted = result.refused[index], result.admitted[index]
        runs = admitted and not result.stopped
        amounts, charged, deferred, cost = [], [], [], 0
        for rule in plan.rules:
            limit, amount, is_known = rule.limit, int(runs), charging
            if limit.unit != "calls":
                # What a model call uses is only known after it finishes.
                is_known = call.kind == "tool"
                amount = rule.meters[0].amount * runs if is_known else 0
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
        elif refused and any(rule.limit.name in refused for rule in plan.rules):
            outcome = Outcome.WOULD_BLOCK
        else:
            outcome = Outcome.ALLOWED
        of_plan = plan, counts, amounts, charged, deferred, refused, exits, result.frozen, places
        said = Verdict(call, outcome, *of_plan, cost=cost, answer=answer, waited=waited)
        verdicts.append(said)
        if runs and len(calls) > 1:
            counts = {**counts}
            for count, added in plan.demand.amounts.items():
                counts[count] += added
    return verdicts


@dataclass(frozen=True, slots=True)
class Breach:
    """An enforced limit that refuses calls of this batch."""

    rule: Rule
    exit_behavior: Exit
    decision: Decision
    refusals: int
    reason: Reason | None
    # The counts of the thread and the run as if the refused calls had run. The meters that fail,
    # with their counts and when these are reset.
    thread_count: int
    run_count: int
    exceeded: tuple[tuple[Meter, int, datetime | None], ...]


def find_breaches(
    limits: LimitSet,
    index_of: Sequence[int],
    verdicts: Sequence[Verdict],
    result: AcquireResult,
) -> list[Breach]:
    """Return the enforced limits that refuse calls, in their order."""
    breaches = []
    for rule in limits.rules:
        refusals: dict[int, tuple[Verdict, LimitStatus]] = {}
        meters: Sequence[Meter] = ()
        demand = Counter[str]()
        for verdict, index in zip(verdicts, index_of, strict=True):
            for number, matched in enumerate(verdict.plan.rules):
                if matched.limit is rule.limit:
                    if not rule.is_budget:
                        demand.update({meter.counter for meter in matched.meters})
                    if matched.limit.name in verdict.refused and matched.limit.enforce:
                        # Which counts a limit has may depend on the call.
                        meters = meters or matched.meters
                        refusal = verdict.decision.limits[number]
                        refusals.setdefault(index, (verdict, refusal))
        if not refusals:
            continue
        verdict, refusal = next(iter(refusals.values()))
        counts = [(meter, result.used[meter.counter] + demand[meter.counter]) for meter in meters]
        breaches.append(
            Breach(
                rule,
                refusal.exit_behavior,
                verdict.decision,
                len(refusals),
                refusal.reason,
                counts[0][1],
                counts[1][1],
                tuple(
                    (meter, count, verdict.place_of(meter).resets_at)
                    for meter, count in counts
                    if meter.maximum is not None
                    and count + meter.needs * rule.is_budget > meter.maximum - meter.keep
                ),
            )
        )
    return breaches
