"""What a hook judges, and what follows from it: the same for tool calls and model calls."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any, NamedTuple

from langchain_quota import messages
from langchain_quota.admission import (
    AcquireRequest,
    AcquireResult,
    Compensation,
    Counter,
    Hits,
    admit,
)
from langchain_quota.decide import Breach, breaches, decide
from langchain_quota.decision import ROOT_RUN, Answer, Call, Decision, Exit, Refund
from langchain_quota.features.root_run.run import root_run
from langchain_quota.middleware._context import CallContext
from langchain_quota.resolved import Asked, Check, Outage, ResolvedLimits, hits_of
from langchain_quota.state import Amounts, Ledger

Update = dict[str, Any]
"""What a hook writes to the state."""


class Conclusion(NamedTuple):
    """What a hook decided, and what follows from it."""

    decisions: Sequence[Decision]
    update: Update | None = None
    refunds: Sequence[Refund] = ()
    error: Exception | None = None


class Late(NamedTuple):
    """What calls have used of budgets that is not in the state yet."""

    amounts: Mapping[str, int]
    newest: str


@dataclass(slots=True, kw_only=True)
class Request:
    """Calls that wait to be judged, and what they ask of counters."""

    state: Mapping[str, Any]
    known: Ledger
    context: CallContext
    task: str
    limits: ResolvedLimits
    calls: Sequence[Call]
    asked: Sequence[Asked]
    used: Mapping[str, int]
    stops: Mapping[str, int] = field(default_factory=dict)
    started: int = field(default_factory=time.time_ns)
    hits: Sequence[Hits] = field(init=False)
    index_of: Sequence[int] = field(init=False)
    sent: AcquireRequest | None = None
    answered: bool = False
    holds: str = ""
    late: "Late | None" = None
    anew: bool = False
    answer: Answer | None = None
    granted: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hits, self.index_of = hits_of(self.calls, self.asked)

    @property
    def shared(self) -> bool:
        """Whether a store keeps one of the counts."""
        return any(asked.shared for asked in self.asked)

    @property
    def message(self) -> str | None:
        """The id of the message whose calls they are; `None` for a model call."""
        return None

    @property
    def _unless_granted(self) -> Exit:
        """What a refusal does after a person was asked about it, or could not be asked."""
        rejected = self.answer is not None and self.answer.type == "reject"
        return "end" if rejected or self.message is None else "continue"

    def granting(self) -> Ledger:
        """What is written to the state about a person's grants."""
        return Ledger(granted=dict(self.granted)) if self.granted else Ledger()

    def final_text(self, breaches: Sequence[Breach]) -> str:
        """The final text at limits: the message of the person who ended the run, if any."""
        said = self.answer.message if self.answer and self.answer.type == "reject" else ""
        return said if said.strip() else messages.final(breaches)

    @property
    def follows_refusal(self) -> bool:
        """Whether the model has read that a call of this run was refused."""
        refused = self.known.get("refused")
        return refused is not None and refused != self.message

    @property
    def task_id(self) -> str | None:
        """Names this work: the same when LangGraph runs the task again."""
        return self.context.task(self.task)

    def refunds_due(self) -> dict[str, Amounts]:
        """What a store charged and is to take back with this request, by the refund's name."""
        return self.known.get("pending_refunds") or {}

    def asks(self) -> Sequence[Asked]:
        """For each call what it asks of the limits."""
        return [self.limits.asked(call) for call in self.calls]

    def by_state(self) -> AcquireResult:
        """The answer by the state's counts."""
        return admit(self.hits, self.used, self.stops)

    def to_store(self) -> AcquireRequest:
        """What a store is asked."""
        name = token_hex(16) if self.anew else self.context.step(self.task)
        run = root_run()
        counters = counters_of(self.asked, {**self.used, **run.used} if run else self.used)
        self.sent = AcquireRequest(
            # An answer that is remembered is matched by position.
            idempotency_key=f"{name}/{len(counters)}/{len(self.hits)}",
            attempt_id=token_hex(16),
            counters=counters,
            hits=tuple(self.hits),
            stops=self.stops,
            compensations=tuple(
                Compensation(refund, {key: -amount for key, amount in amounts.items()})
                for refund, amounts in self.refunds_due().items()
            ),
        )
        if self.limits.budgets and any(each.lease for each in counters.values()):
            self.holds = self.sent.idempotency_key
            held = self.known.get("held")
            if held is not None and held["keys"]:
                # It was held for a call that was not made.
                unused = _given_back(held["request"], held["keys"])
                compensations = (*self.sent.compensations, unused)
                self.sent = replace(self.sent, compensations=compensations)
        return self.sent

    def to_store_again(self, sent: AcquireRequest) -> AcquireRequest | None:
        """The request to a store that has answered before: what it held then may have expired."""
        if not self.holds:
            return None
        counters = {name: each for name, each in sent.counters.items() if each.lease is not None}
        keys = [each.key for each in counters.values() if each.key is not None]
        self.holds = f"{sent.idempotency_key}/{token_hex(16)}"
        return AcquireRequest(
            self.holds,
            token_hex(16),
            counters,
            tuple(_only(hits, counters) for hits in sent.hits),
            sent.stops,
            (_given_back(sent.idempotency_key, keys),),
        )

    def mirror_root_run(self, result: AcquireResult) -> None:
        """Keep what the store has counted of the root run, if a quota is per root run."""
        # What the store only holds is not counted yet: it is learned when it is settled.
        run = root_run()
        if run is None or run.subject is None:
            return
        charged = result.charged(self.hits)
        run.learn_used(
            {
                each.counter: result.used[each.counter] + charged[each.counter]
                for each in checks_of(self.asked)
                if each.per == ROOT_RUN and each.lease is None
            }
        )

    def without_store(self, outage: Outage) -> AcquireResult:
        """The answer while the store cannot be asked: what the state alone knows."""
        self.limits = self.limits.without_store(outage)
        self.asked = self.asks()
        self.hits, self.index_of = hits_of(self.calls, self.asked)
        return self.by_state()

    def raise_limits(self, granted: Mapping[str, int]) -> None:
        """Raise the limits by what a store has granted."""
        limits = self.limits.raised(granted)
        if limits is not self.limits:
            self.asked = [each.raised(granted) for each in self.asked]
            self.limits = limits
            self.hits, self.index_of = hits_of(self.calls, self.asked)

    def decided(
        self, result: AcquireResult, *, charging: bool = True
    ) -> tuple[list[Decision], list[Breach]]:
        """The decision about each call, and the limits whose refusals hold."""
        exits: dict[str, Exit] = {
            name: "end"
            for name, after in self.stops.items()
            if self.limits.by_name[name].exit_behavior == "continue"
            and sum(name in each for each in result.refused) >= after
        }
        exits |= dict.fromkeys(self.limits.asking, self._unless_granted)
        decisions = decide(
            self.calls, self.asked, self.index_of, result, charging=charging, exits=exits
        )
        if self.answer is not None:
            decisions = [replace(each, answer=self.answer) for each in decisions]
        if not any(result.refused):
            return decisions, []
        return decisions, breaches(self.limits, self.asked, self.index_of, decisions, result)


def counters_of(asked: Iterable[Asked], used: Mapping[str, int]) -> dict[str, Counter]:
    """The counters that calls would hit, by name."""
    counters: dict[str, Counter] = {}
    for each in checks_of(asked):
        known = counters.get(each.counter)
        if known is None:
            counters[each.counter] = Counter(
                each.key,
                used.get(each.counter, 0),
                None if each.resets_at is None else each.resets_at.timestamp(),
                each.mirrored,
                each.lease,
            )
        elif known.key is None and each.key is not None:
            counters[each.counter] = replace(known, key=each.key)
    return counters


def checks_of(asked: Iterable[Asked]) -> Iterator[Check]:
    """What calls are checked by."""
    return (check for each in asked for limit in each.limits for check in limit.checks)


def _given_back(request: str, keys: Iterable[str]) -> Compensation:
    """A correction that gives back what a request holds under keys."""
    return Compensation(f"{request}/unused", dict.fromkeys(keys, 0), settles=request)


def _only(hits: Hits, counters: Collection[str]) -> Hits:
    """The hits of some counters only."""
    return Hits(
        {name: amount for name, amount in hits.amounts.items() if name in counters},
        tuple(each for each in hits.thresholds if each.counter in counters),
    )
