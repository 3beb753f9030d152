"""Limits at one moment: the checks that calls must pass, and what each call asks of counts."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

from langchain_quota.core.admission import Hits, Threshold
from langchain_quota.core.decision import CountStatus, Reason
from langchain_quota.limits import Limit
from langchain_quota.limits.call import RUN, STORE, THREAD, Call, Kind, Scope
from langchain_quota.limits.options import UNITS, LimitOptions, whole_amount
from langchain_quota.runtime.units import Unit

OnStoreError = Literal["block", "allow"]
"""What happens to calls that need a store which cannot be asked."""


class Check(NamedTuple):
    """A count that a limit looks at, and the most that it may be at this moment; `None` for any."""

    scope: Scope
    counter: str
    most: int | None
    key: str | None = None
    mirrored: bool = False
    # What a call adds to the count. With 0 it only looks whether anything is left.
    hit: int = 1
    kept: int = 0
    lease: int | None = None
    reason: Reason = "exhausted"
    computed: bool = False
    # Of a quota only.
    per: str = ""
    subject: str = ""
    resets_at: datetime | None = None
    # Of a smooth quota: microseconds between calls.
    spacing: int = 0

    @property
    def needs(self) -> int:
        """How much must be left."""
        return max(1, self.hit)

    def status(self, before: int, amount: int) -> CountStatus:
        """The count at a call that adds an amount."""
        used, of = before + amount, (self.subject, self.resets_at, self.per)
        return CountStatus(self.scope, before, used, self.most, *of, smooth=bool(self.spacing))

    def raised(self, granted: Mapping[str, int]) -> "Check":
        """The check, raised by what is granted, by a store's key or the name of a count."""
        more = granted.get(self.counter if self.key is None else self.key, 0)
        if not more or self.most is None:
            return self
        # A grant to one subject does not change the limit itself.
        return self._replace(most=self.most + more, computed=True)


class ResolvedLimit(NamedTuple):
    """A limit with its checks at one moment: the thread's, the run's, and those of its quotas."""

    limit: Limit
    checks: tuple[Check, ...]
    keep: int = 0
    # Whether a store keeps one of its counts, also while it cannot be asked.
    shared: bool = False
    # Whether it refuses every call because the store cannot be asked.
    denied: bool = False

    @classmethod
    def of(cls, limit: Limit, *, thread: object, run: object) -> "ResolvedLimit":
        """A limit with the numbers of its thread and its run, which the state counts."""
        checks = tuple(
            Check(
                scope,
                f"{store_counter(limit)}/{scope}",
                value
                if value is None
                else whole_amount(limit.unit, f"{scope}_limit of limit {limit.name!r}", value),
                mirrored=scope == RUN,
                # What a model call uses of a budget is known when it is done.
                hit=int(limit.unit == "calls"),
                computed=callable(said),
            )
            for scope, value, said in (
                (THREAD, thread, limit.thread_limit),
                (RUN, run, limit.run_limit),
            )
        )
        keep = getattr(limit, "keep", None)
        kept = whole_amount(limit.unit, "keep", keep) if keep else 0
        return cls(limit, checks, keep=kept)

    def stored(
        self,
        thread_key: str | None,
        run_key: str | None,
        quotas: Iterable[Check],
        *,
        remembers: bool,
    ) -> "ResolvedLimit":
        """The limit where a store keeps its counts; `remembers`: the state does so, too."""
        thread, run = self.checks
        # Without a limit the store does not count. The state always keeps the run's count.
        thread_key = None if thread.most is None else thread_key
        checks = (
            thread._replace(key=thread_key, mirrored=remembers),
            run if run.most is None else run._replace(key=run_key),
            *(each._replace(hit=run.hit) for each in quotas),
        )
        return self._replace(checks=checks, shared=any(each.key is not None for each in checks))

    @property
    def is_budget(self) -> bool:
        """Whether it limits what model calls use, and not their number."""
        return self.limit.unit != "calls"

    @property
    def counts_thread(self) -> bool:
        """Whether a store keeps what the thread has used in all."""
        return any(each.key and each.counter == self.checks[0].counter for each in self.checks)

    def with_checks(self, **changed: Any) -> "ResolvedLimit":
        """The limit with other values of all checks."""
        return self._replace(checks=tuple(each._replace(**changed) for each in self.checks))

    def raised(self, granted: Mapping[str, int]) -> "ResolvedLimit":
        """The limit after grants."""
        return self._replace(checks=tuple(each.raised(granted) for each in self.checks))

    def without_store(self, outage: OnStoreError) -> "ResolvedLimit":
        """The limit while the store cannot be asked: without quotas."""
        denied = outage == "block" and self.shared
        return self._replace(checks=self.checks[:2], denied=denied)


def store_counter(limit: Limit) -> str:
    """The counter under which a store keeps a limit's counts."""
    # A tool may be named `"model"`. Its counter starts with a comma, so the two counts stay apart.
    counter = limit.counter
    return f",{counter}" if limit.kind == "tool" and counter in UNITS else counter


def thread_counter(limit: Limit) -> str:
    """The name of the thread's count."""
    return f"{store_counter(limit)}/{THREAD}"


def run_counter(limit: Limit) -> str:
    """The name of the run's count."""
    return f"{store_counter(limit)}/{RUN}"


class CallChecks(NamedTuple):
    """What a call asks: the limits that match it, and what it adds to their counts."""

    limits: tuple[ResolvedLimit, ...]
    hits: Hits

    @classmethod
    def of(cls, limits: Iterable[ResolvedLimit]) -> "CallChecks":
        """What a call asks of limits."""
        # Limits that share a count hold the highest reserve of the enforced ones. Each limit is
        # still judged by its own reserve: its number is shifted by the difference.
        limits = tuple(limits)
        amounts: dict[str, int] = {}
        for each in limits:
            for check in each.checks:
                # A budget on trial holds nothing for a model call.
                holds = each.limit.enforce or not each.is_budget or check.lease is None
                amounts[check.counter] = max(check.hit * holds, amounts.get(check.counter, 0))
        thresholds = []
        for each in limits:
            name, enforced = each.limit.name, each.limit.enforce
            if each.denied:
                # Any of its counts works: every count is above -1.
                counter = each.checks[1].counter
                thresholds.append(Threshold(name, STORE, counter, -1, enforced))
            for check in each.checks:
                if check.most is not None:
                    most = check.most - check.kept - check.needs + amounts[check.counter]
                    thresholds.append(Threshold(name, check.scope, check.counter, most, enforced))
        return cls(limits, Hits(amounts, tuple(thresholds)))

    @property
    def shared(self) -> bool:
        """Whether a store keeps one of the counts."""
        return any(each.shared for each in self.limits)

    @property
    def checks(self) -> list[Check]:
        """The checks of all limits."""
        return [check for each in self.limits for check in each.checks]


class ResolvedLimits:
    """Limits at one moment, and what calls ask of them: looked for once per tool."""

    def __init__(self, limits: Iterable[ResolvedLimit]) -> None:
        self.limits = tuple(limits)
        self.by_name = {each.limit.name: each.limit for each in self.limits}
        self.stops = {
            each.name: 1 if each.exit_behavior != "continue" else each.give_up_after or 0
            for each in self.by_name.values()
            if each.enforce and (each.exit_behavior != "continue" or each.give_up_after is not None)
        }
        """The limits whose refusals stop a batch, and after how many in a run."""
        self.budgets = tuple(each for each in self.limits if each.is_budget)
        """Those that limit what model calls use."""
        asking = (each for each in self.by_name.values() if each.exit_behavior == "ask")
        self.asking = frozenset(each.name for each in asking if each.enforce)
        """The names of those that ask a person whether the run may go on."""
        self.finalizing = frozenset(
            name for name, each in self.by_name.items() if each.exit_behavior == "finalize"
        )
        """The names of those that have the model give its final answer."""
        self._named = {tool for each in self.limits for tool in each.limit.named_tools}
        self._match_by_name = all(
            type(each.limit).matches is LimitOptions.matches for each in self.limits
        )
        self._asked: dict[tuple[Kind, str | None], CallChecks] = {}

    def without_store(self, outage: OnStoreError) -> "ResolvedLimits":
        """The same limits while the store cannot be asked."""
        return ResolvedLimits(each.without_store(outage) for each in self.limits)

    def raised(self, granted: Mapping[str, int]) -> "ResolvedLimits":
        """The same limits after grants, by a store's key or the counter of a count it has not."""
        # A name has a slash in it, and no key has one.
        if not granted:
            return self
        limits = tuple(each.raised(granted) for each in self.limits)
        return self if limits == self.limits else ResolvedLimits(limits)

    def newly_raised(self, granted: Mapping[str, int]) -> list[tuple[str, Scope, Unit, int]]:
        """The checks that new grants raise, and by how much; they are given by a store's key."""
        return [
            (each.limit.name, check.scope, each.limit.unit, granted[check.key])
            for each in (self.limits if granted else ())
            for check in each.checks
            if check.most is not None and check.key is not None and granted.get(check.key)
        ]

    def keys(self) -> list[str]:
        """Where a store keeps their counts."""
        return sorted({check.key for each in self.limits for check in each.checks if check.key})

    def asked(self, call: Call) -> CallChecks:
        """What a call asks."""
        # Tools that no limit names are treated alike, and there may be any number of them.
        key = call.kind, call.tool if call.tool in self._named else None
        found = self._asked.get(key)
        if found is None:
            found = CallChecks.of(each for each in self.limits if each.limit.matches(call))
            # A kind of limit may match by anything.
            if self._match_by_name:
                self._asked[key] = found
        return found


def hits_of(calls: Sequence[Call], asked: Sequence[CallChecks]) -> tuple[list[Hits], list[int]]:
    """What the calls would add to counts, and for each call the index of its hits."""
    # Calls that share an id are one call to the agent: they ask together.
    hits: list[Hits] = []
    index_of: list[int] = []
    by_id: dict[str, int] = {}
    for call, (_, added) in zip(calls, asked, strict=True):
        index = len(hits) if call.id is None else by_id.setdefault(call.id, len(hits))
        index_of.append(index)
        if index == len(hits):
            hits.append(added)
            continue
        amounts = dict(hits[index].amounts)
        for count, amount in added.amounts.items():
            amounts[count] = amounts.get(count, 0) + amount
        thresholds = dict.fromkeys((*hits[index].thresholds, *added.thresholds))
        hits[index] = Hits(amounts, tuple(thresholds))
    return hits, index_of
