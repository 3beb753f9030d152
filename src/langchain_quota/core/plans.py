"""Limits, compiled: what calls must pass and add to counts, and where a store keeps the counts."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

from langchain_quota.core.admission import MAX_COUNT, Demand, Rollover, Threshold
from langchain_quota.core.decision import Reason
from langchain_quota.limits import Limit
from langchain_quota.limits.call import RUN, STORE, THREAD, Call, Kind, Scope
from langchain_quota.limits.options import UNITS, LimitOptions, whole_amount
from langchain_quota.runtime.sync_async import newest_dicts
from langchain_quota.runtime.units import Unit

OnStoreError = Literal["block", "allow"]
"""What happens to calls that need a store while it is unavailable."""

_MOST_RAISED = 64
"""The number of grants to subjects for which the plans of a limit set are kept."""


class Meter(NamedTuple):
    """A count that a limit looks at, and its maximum, for every run; `None` for no maximum."""

    scope: Scope
    counter: str
    maximum: int | None
    # What a call adds to the count; 0 only checks whether anything is left.
    amount: int = 1
    # What is kept for the last answer: see `keep` of `TokenLimit`.
    keep: int = 0
    lease: int | None = None
    reason: Reason = "exhausted"
    computed: bool = False
    # What grants and rollover have added to the maximum.
    granted: int = 0
    # What follows belongs to quotas only.
    per: str = ""
    # The emission interval of a smooth quota, in microseconds, and its window, in seconds.
    spacing: float = 0
    window: int = 0

    @property
    def is_limited(self) -> bool:
        """Whether it has a maximum, or a function that may give one later."""
        return self.maximum is not None or self.computed

    @property
    def needs(self) -> int:
        """Amount that must be left."""
        return max(1, self.amount)

    def raised(self, granted: Mapping[str, int]) -> "Meter":
        """Return the meter raised by grants, which are given by the name of the count."""
        amount = granted.get(self.counter, 0)
        if not amount or self.maximum is None:
            return self
        return self._replace(maximum=self.maximum + amount, granted=self.granted + amount)


class Place(NamedTuple):
    """Where a store keeps a count now: what depends on the run, the subject and the time."""

    key: str
    mirrored: bool = False
    subject: str = ""
    resets_at: datetime | None = None
    rollover: Rollover | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that a store reads: the count's, and that of the window before if it rolls over."""
        return (self.key,) if self.rollover is None else (self.key, self.rollover.previous)


Places = Mapping[str, Place]
"""The places of the counts that a store keeps, by the name of the count."""


class Rule(NamedTuple):
    """A limit, compiled: the meters of its thread, its run, and its quotas."""

    limit: Limit
    meters: tuple[Meter, ...]
    keep: int = 0
    # Whether a store keeps one of its counts, even while the store is unavailable.
    shared: bool = False
    # Whether it refuses every call because the store is unavailable.
    blocks_all: bool = False

    @classmethod
    def of(cls, limit: Limit, *, thread: object, run: object) -> "Rule":
        """Return a limit with the numbers of its thread and its run, which the state counts."""
        meters = tuple(
            Meter(
                scope,
                counter,
                value
                if value is None
                else whole_amount(limit.unit, f"{scope}_limit of limit {limit.name!r}", value),
                # What a model call uses of a budget is only known after it finishes.
                amount=int(limit.unit == "calls"),
                computed=callable(argument),
            )
            for scope, counter, value, argument in (
                (THREAD, thread_counter(limit), thread, limit.thread_limit),
                (RUN, run_counter(limit), run, limit.run_limit),
            )
        )
        keep = whole_amount(limit.unit, "keep", limit.keep) if limit.keep else 0
        return cls(limit, meters, keep)

    def stored(self, meters: Sequence[Meter], places: Places) -> "Rule":
        """Return the rule with these meters, whose counts a store keeps if they have places."""
        shared = any(meter.counter in places for meter in meters if meter.is_limited)
        return self._replace(meters=tuple(meters), shared=shared)

    @property
    def is_budget(self) -> bool:
        """Whether it limits what model calls use, and not their number."""
        return self.limit.unit != "calls"

    def with_meters(self, **changed: Any) -> "Rule":
        """Return the rule with these values in all its meters."""
        return self._replace(meters=tuple(meter._replace(**changed) for meter in self.meters))

    def raised(self, granted: Mapping[str, int]) -> "Rule":
        """Return the rule after grants."""
        return self._replace(meters=tuple([meter.raised(granted) for meter in self.meters]))

    def without_store(self, outage: OnStoreError) -> "Rule":
        """Return the rule while the store is unavailable: without its quotas."""
        has_limit = any(meter.maximum is not None for meter in self.meters)
        blocks_all = outage == "block" and self.shared and has_limit
        meters = tuple(meter for meter in self.meters if not meter.per)
        return self._replace(meters=meters, blocks_all=blocks_all)


def read_keys(places: Places) -> list[str]:
    """Return the keys that a store reads for places, sorted."""
    return sorted({key for place in places.values() for key in place.keys})


def store_counter(limit: Limit) -> str:
    """Return the counter under which a store keeps a limit's counts."""
    # A tool may be named `"model"`. Its counter starts with a comma, so the two counts stay apart.
    counter = limit.counter
    return f",{counter}" if limit.kind == "tool" and counter in UNITS else counter


def thread_counter(limit: Limit) -> str:
    """Return the name of the thread's count."""
    return f"{store_counter(limit)}/{THREAD}"


def run_counter(limit: Limit) -> str:
    """Return the name of the run's count."""
    return f"{store_counter(limit)}/{RUN}"


def stops_after(limit: Limit) -> int | None:
    """Return how many refusals of a limit stop a run's calls; `None` if it never stops them."""
    if not limit.enforce:
        return None
    return limit.give_up_after if limit.exit_behavior == "continue" else 1


class Plan(NamedTuple):
    """All that a call must pass, and what it adds to counts: the same for all calls of a tool."""

    rules: tuple[Rule, ...]
    demand: Demand
    # The names under which the state counts a call.
    counters: frozenset[str]
    # Whether a store keeps one of the counts.
    shared: bool
    # The meters of quotas, each with the index of its rule.
    quotas: tuple[tuple[int, Meter], ...]
    # What a sink of telemetry has prepared for the plan, by the name of what it is.
    prepared: dict[str, Any]

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> "Plan":
        """Return the plan of a call that these limits match."""
        # Limits that share a count reserve the highest amount of the enforced ones. Each limit is
        # still checked with its own reserve, because its maximum is shifted by the difference.
        rules = tuple(rules)
        amounts: dict[str, int] = {}
        for rule in rules:
            for meter in rule.meters:
                # A budget in a dry run reserves nothing for a model call.
                reserves = rule.limit.enforce or not rule.is_budget or meter.lease is None
                amounts[meter.counter] = max(meter.amount * reserves, amounts.get(meter.counter, 0))
        thresholds = []
        for rule in rules:
            name, enforced = rule.limit.name, rule.limit.enforce
            if rule.blocks_all:
                # The counter does not matter: every count exceeds -1.
                thresholds.append(Threshold(name, STORE, rule.meters[1].counter, -1, enforced))
            for meter in rule.meters:
                if not meter.is_limited:
                    continue
                # While a function gives no limit, a freeze stops the call nevertheless.
                maximum = MAX_COUNT
                if meter.maximum is not None:
                    # Admitted is what leaves `keep`, if the call takes `needs`. The rule compares
                    # with what all limits on the count add together, which may be more.
                    maximum = meter.maximum - meter.keep - meter.needs + amounts[meter.counter]
                thresholds.append(Threshold(name, meter.scope, meter.counter, maximum, enforced))
        counters = frozenset(rule.limit.counter for rule in rules if rule.limit.counted)
        shared = any(rule.shared for rule in rules)
        quotas = ((n, meter) for n, rule in enumerate(rules) for meter in rule.meters if meter.per)
        return cls(rules, Demand(amounts, tuple(thresholds)), counters, shared, tuple(quotas), {})


NO_LIMITS = Plan.of(())


class LimitSet:
    """Limits with their numbers, and the plans of calls, which are compiled once for each tool."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self.by_name = {rule.limit.name: rule.limit for rule in self.rules}
        self.stops = {
            name: after
            for name, limit in self.by_name.items()
            if (after := stops_after(limit)) is not None
        }
        """The limits whose refusals stop a batch, and after how many in a run."""
        self.budgets = tuple(rule for rule in self.rules if rule.is_budget)
        self.asking = frozenset(
            name
            for name, limit in self.by_name.items()
            if limit.exit_behavior == "ask" and limit.enforce
        )
        """The names of the limits that ask a person whether the run may go on."""
        self.finalizing = frozenset(
            name for name, limit in self.by_name.items() if limit.exit_behavior == "finalize"
        )
        """The names of the limits that have the model give its final answer."""
        self._named_tools = {tool for limit in self.by_name.values() for tool in limit.named_tools}
        self._match_by_name = all(
            type(limit).matches is LimitOptions.matches for limit in self.by_name.values()
        )
        self._plans: dict[tuple[Kind, str | None], Plan] = {}
        self._raised = newest_dicts(_MOST_RAISED)

    def without_store(self, outage: OnStoreError) -> "LimitSet":
        """Return the same limits while the store is unavailable."""
        return LimitSet(rule.without_store(outage) for rule in self.rules)

    def raised(self, granted: Mapping[str, int]) -> "LimitSet":
        """Return the same limits after grants, which are given by the name of the count."""
        if not granted:
            return self
        kept = self._raised(frozenset(granted.items()))
        if "limits" not in kept:
            rules = tuple(rule.raised(granted) for rule in self.rules)
            kept["limits"] = self if rules == self.rules else LimitSet(rules)
        limits: LimitSet = kept["limits"]
        return limits

    def newly_raised(self, granted: Mapping[str, int]) -> list[tuple[str, Scope, Unit, int]]:
        """Return the meters that new grants raise, and by how much."""
        return [
            (rule.limit.name, meter.scope, rule.limit.unit, granted[meter.counter])
            for rule in (self.rules if granted else ())
            for meter in rule.meters
            if meter.maximum is not None and granted.get(meter.counter)
        ]

    def plan_for(self, call: Call) -> Plan:
        """Return the plan of a call."""
        # All tools that no limit names share one plan, because there may be any number of them.
        key = call.kind, call.tool if call.tool in self._named_tools else None
        plan = self._plans.get(key)
        if plan is None:
            plan = Plan.of(rule for rule in self.rules if rule.limit.matches(call))
            # A kind of limit with a `matches` of its own may look at anything in the call.
            if self._match_by_name:
                self._plans[key] = plan
        return plan


def demands_of(calls: Sequence[Call], plans: Sequence[Plan]) -> tuple[list[Demand], list[int]]:
    """Return what the calls would add to counts, and for each call the index of its demand."""
    if len(plans) == 1:
        return [plans[0].demand], [0]
    # Calls that share an id are one call to the agent, so they are admitted together.
    demands: list[Demand] = []
    index_of: list[int] = []
    by_id: dict[str, int] = {}
    for call, plan in zip(calls, plans, strict=True):
        index = len(demands) if call.id is None else by_id.setdefault(call.id, len(demands))
        index_of.append(index)
        added = plan.demand
        if index == len(demands):
            demands.append(added)
            continue
        amounts = dict(demands[index].amounts)
        for count, amount in added.amounts.items():
            amounts[count] = amounts.get(count, 0) + amount
        thresholds = dict.fromkeys((*demands[index].thresholds, *added.thresholds))
        demands[index] = Demand(amounts, tuple(thresholds))
    return demands, index_of
