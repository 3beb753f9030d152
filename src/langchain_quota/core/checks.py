"""Limits at one moment: the checks that calls must pass, and what each call adds to counts."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

from langchain_quota.core.admission import Demand, Rollover, Threshold
from langchain_quota.core.decision import Reason
from langchain_quota.limits import Limit
from langchain_quota.limits.call import RUN, STORE, THREAD, Call, Kind, Scope
from langchain_quota.limits.options import UNITS, LimitOptions, whole_amount
from langchain_quota.runtime.units import Unit

OnStoreError = Literal["block", "allow"]
"""What happens to calls that need a store while it is unavailable."""


class Check(NamedTuple):
    """A count that a limit looks at, and its maximum at this moment; `None` for no maximum."""

    scope: Scope
    counter: str
    maximum: int | None
    key: str | None = None
    mirrored: bool = False
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
    subject: str = ""
    resets_at: datetime | None = None
    rollover: Rollover | None = None
    # The emission interval of a smooth quota, in microseconds, and its window, in seconds.
    spacing: float = 0
    window: int = 0

    @property
    def previous_keys(self) -> tuple[str, ...]:
        """Key of the count from which some may roll over, if any."""
        return () if self.rollover is None else (self.rollover.previous,)

    @property
    def needs(self) -> int:
        """Amount that must be left."""
        return max(1, self.amount)

    def raised(self, granted: Mapping[str, int]) -> "Check":
        """Return the check raised by grants; they are given by a store's key or a count's name."""
        amount = granted.get(self.counter if self.key is None else self.key, 0)
        if not amount or self.maximum is None:
            return self
        return self._replace(maximum=self.maximum + amount, granted=self.granted + amount)


class ResolvedLimit(NamedTuple):
    """A limit with its checks at one moment: the thread's, the run's, and those of its quotas."""

    limit: Limit
    checks: tuple[Check, ...]
    keep: int = 0
    # Whether a store keeps one of its counts, even while the store is unavailable.
    shared: bool = False
    # Whether it refuses every call because the store is unavailable.
    blocks_all: bool = False

    @classmethod
    def of(cls, limit: Limit, *, thread: object, run: object) -> "ResolvedLimit":
        """Return a limit with the numbers of its thread and its run, which the state counts."""
        checks = tuple(
            Check(
                scope,
                f"{store_counter(limit)}/{scope}",
                value
                if value is None
                else whole_amount(limit.unit, f"{scope}_limit of limit {limit.name!r}", value),
                mirrored=scope == RUN,
                # What a model call uses of a budget is only known after it finishes.
                amount=int(limit.unit == "calls"),
                computed=callable(argument),
            )
            for scope, value, argument in (
                (THREAD, thread, limit.thread_limit),
                (RUN, run, limit.run_limit),
            )
        )
        keep = getattr(limit, "keep", None)
        amount = whole_amount(limit.unit, "keep", keep) if keep else 0
        return cls(limit, checks, keep=amount)

    def stored(
        self,
        thread_key: str | None,
        run_key: str | None,
        quotas: Iterable[Check],
        *,
        remembers: bool,
    ) -> "ResolvedLimit":
        """Return the limit with counts in a store; with `remembers` the state keeps them, too."""
        thread, run = self.checks
        # Without a limit the store does not count. The state always keeps the run's count.
        thread_key = None if thread.maximum is None else thread_key
        checks = (
            thread._replace(key=thread_key, mirrored=remembers),
            run if run.maximum is None else run._replace(key=run_key),
            *(quota._replace(amount=run.amount) for quota in quotas),
        )
        return self._replace(checks=checks, shared=any(check.key is not None for check in checks))

    @property
    def is_budget(self) -> bool:
        """Whether it limits what model calls use, and not their number."""
        return self.limit.unit != "calls"

    @property
    def counts_thread(self) -> bool:
        """Whether a store keeps what the thread has used in all."""
        return any(check.key and check.counter == self.checks[0].counter for check in self.checks)

    def with_checks(self, **changed: Any) -> "ResolvedLimit":
        """Return the limit with these values in all its checks."""
        return self._replace(checks=tuple(check._replace(**changed) for check in self.checks))

    def raised(self, granted: Mapping[str, int]) -> "ResolvedLimit":
        """Return the limit after grants."""
        return self._replace(checks=tuple(check.raised(granted) for check in self.checks))

    def without_store(self, outage: OnStoreError) -> "ResolvedLimit":
        """Return the limit while the store is unavailable: without its quotas."""
        blocks_all = outage == "block" and self.shared
        return self._replace(checks=self.checks[:2], blocks_all=blocks_all)


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


class CallChecks(NamedTuple):
    """The checks of one call: the limits that match it, and what it adds to their counts."""

    limits: tuple[ResolvedLimit, ...]
    demand: Demand

    @classmethod
    def of(cls, limits: Iterable[ResolvedLimit]) -> "CallChecks":
        """Return the checks of a call that these limits match."""
        # Limits that share a count reserve the highest amount of the enforced ones. Each limit is
        # still checked with its own reserve, because its maximum is shifted by the difference.
        limits = tuple(limits)
        amounts: dict[str, int] = {}
        for resolved in limits:
            for check in resolved.checks:
                # A budget in a dry run reserves nothing for a model call.
                reserves = resolved.limit.enforce or not resolved.is_budget or check.lease is None
                amounts[check.counter] = max(check.amount * reserves, amounts.get(check.counter, 0))
        thresholds = []
        for resolved in limits:
            name, enforced = resolved.limit.name, resolved.limit.enforce
            if resolved.blocks_all:
                # The counter does not matter: every count exceeds -1.
                counter = resolved.checks[1].counter
                thresholds.append(Threshold(name, STORE, counter, -1, enforced))
            for check in resolved.checks:
                if check.maximum is not None:
                    maximum = check.maximum - check.keep - check.needs + amounts[check.counter]
                    threshold = Threshold(name, check.scope, check.counter, maximum, enforced)
                    thresholds.append(threshold)
        return cls(limits, Demand(amounts, tuple(thresholds)))

    @property
    def shared(self) -> bool:
        """Whether a store keeps one of the counts."""
        return any(resolved.shared for resolved in self.limits)

    @property
    def checks(self) -> list[Check]:
        """Checks of all limits."""
        return [check for resolved in self.limits for check in resolved.checks]


class ResolvedLimits:
    """Limits at one moment, and the checks of calls, which are built once for each tool."""

    def __init__(self, limits: Iterable[ResolvedLimit]) -> None:
        self.limits = tuple(limits)
        self.by_name = {resolved.limit.name: resolved.limit for resolved in self.limits}
        self.stops = {
            name: 1 if limit.exit_behavior != "continue" else limit.give_up_after or 0
            for name, limit in self.by_name.items()
            if limit.enforce
            and (limit.exit_behavior != "continue" or limit.give_up_after is not None)
        }
        """The limits whose refusals stop a batch, and after how many in a run."""
        self.budgets = tuple(resolved for resolved in self.limits if resolved.is_budget)
        """The limits on what model calls use."""
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
        self._checks: dict[tuple[Kind, str | None], CallChecks] = {}

    def without_store(self, outage: OnStoreError) -> "ResolvedLimits":
        """Return the same limits while the store is unavailable."""
        return ResolvedLimits(resolved.without_store(outage) for resolved in self.limits)

    def raised(self, granted: Mapping[str, int]) -> "ResolvedLimits":
        """Return the same limits after grants, given by a store's key or the name of a count."""
        # A name contains a slash. A key does not, so the two never collide.
        if not granted:
            return self
        limits = tuple(resolved.raised(granted) for resolved in self.limits)
        return self if limits == self.limits else ResolvedLimits(limits)

    def newly_raised(self, granted: Mapping[str, int]) -> list[tuple[str, Scope, Unit, int]]:
        """Return the checks that new grants raise, and by how much; they are given by key."""
        return [
            (resolved.limit.name, check.scope, resolved.limit.unit, granted[check.key])
            for resolved in (self.limits if granted else ())
            for check in resolved.checks
            if check.maximum is not None and check.key is not None and granted.get(check.key)
        ]

    def keys(self) -> list[str]:
        """Return the keys that a store reads for them, sorted."""
        checks = [check for resolved in self.limits for check in resolved.checks]
        previous = {key for check in checks for key in check.previous_keys}
        return sorted(previous | {check.key for check in checks if check.key})

    def checks_for(self, call: Call) -> CallChecks:
        """Return the checks that apply to a call."""
        # All tools that no limit names share one entry, because there may be any number of them.
        key = call.kind, call.tool if call.tool in self._named_tools else None
        checks = self._checks.get(key)
        if checks is None:
            limits = (resolved for resolved in self.limits if resolved.limit.matches(call))
            checks = CallChecks.of(limits)
            # A kind of limit with a `matches` of its own may look at anything in the call.
            if self._match_by_name:
                self._checks[key] = checks
        return checks


def demands_of(
    calls: Sequence[Call], call_checks: Sequence[CallChecks]
) -> tuple[list[Demand], list[int]]:
    """Return what the calls would add to counts, and for each call the index of its demand."""
    # Calls that share an id are one call to the agent, so they are admitted together.
    demands: list[Demand] = []
    index_of: list[int] = []
    by_id: dict[str, int] = {}
    for call, (_, added) in zip(calls, call_checks, strict=True):
        index = len(demands) if call.id is None else by_id.setdefault(call.id, len(demands))
        index_of.append(index)
        if index == len(demands):
            demands.append(added)
            continue
        amounts = dict(demands[index].amounts)
        for count, amount in added.amounts.items():
            amounts[count] = amounts.get(count, 0) + amount
        thresholds = dict.fromkeys((*demands[index].thresholds, *added.thresholds))
        demands[index] = Demand(amounts, tuple(thresholds))
    return demands, index_of
