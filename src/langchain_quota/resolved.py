"""Limits at one moment: the checks that calls have to pass, and what each call asks of counts."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple, get_args

from langchain_quota.admission import Hits, Threshold
from langchain_quota.decision import RUN, STORE, THREAD, Call, Kind, Reason, Scope, Unit
from langchain_quota.limit_options import UNITS, whole_amount
from langchain_quota.limits import Limit, named_tools
from langchain_quota.repeats import RepeatLimit

Outage = Literal["deny", "allow"]
"""What happens to calls that need a store which cannot be asked."""

LEASE = 900
"""How long a store holds an amount for a model call, in seconds. Then it is given back, for example
because the process has died. A call that takes longer is charged nevertheless; others may have used
its amount by then. Clients of providers give up after 600 seconds by default."""


class Check(NamedTuple):
    """A count that a limit looks at, and the most that it may be at this moment; `None` for any."""

    scope: Scope
    counter: str
    most: int | None
    key: str | None = None
    mirrored: bool = False
    hit: int = 1
    kept: int = 0
    lease: int | None = None
    reason: Reason = "exhausted"
    computed: bool = False
    # Of a quota only.
    per: str = ""
    subject: str = ""
    resets_at: datetime | None = None

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
    shared: bool = False
    keep: int = 0

    @classmethod
    def of(
        cls,
        limit: Limit,
        *,
        thread_key: str | None = None,
        run_key: str | None = None,
        quotas: Iterable[Check] = (),
        remembers: bool = False,
        **computed: object,
    ) -> "ResolvedLimit":
        """A limit with its numbers; those of functions are given."""
        thread, run = (
            _number(limit, name, computed.get(name, getattr(limit, name)))
            for name in ("thread_limit", "run_limit")
        )
        # Without a limit the store does not count. The state always keeps the run's count.
        checks = (
            Check(
                THREAD,
                thread_counter(limit),
                thread,
                None if thread is None else thread_key,
                remembers,
                computed=callable(limit.thread_limit),
            ),
            Check(
                RUN,
                run_counter(limit),
                run,
                None if run is None else run_key,
                mirrored=True,
                computed=callable(limit.run_limit),
            ),
            *quotas,
        )
        keep = 0
        if limit.unit != "calls":
            reserve = getattr(limit, "reserve", None)
            hit = 1 if reserve is None or callable(reserve) else _amount(limit, "reserve", reserve)
            checks = tuple(each._replace(hit=hit, lease=LEASE) for each in checks)
            keep = _amount(limit, "keep", getattr(limit, "keep", None) or 0)
        return cls(limit, checks, any(each.key is not None for each in checks), keep)

    @property
    def is_budget(self) -> bool:
        """Whether it limits what model calls use, and not their number."""
        return self.limit.unit != "calls"

    @property
    def counts_thread(self) -> bool:
        """Whether a store keeps what the thread has used in all."""
        counter = self.checks[0].counter
        return any(each.key is not None and each.counter == counter for each in self.checks)

    def with_checks(self, **changed: Any) -> "ResolvedLimit":
        """The limit with other values of all checks."""
        return self._replace(checks=tuple(each._replace(**changed) for each in self.checks))

    def raised(self, granted: Mapping[str, int]) -> "ResolvedLimit":
        """The limit after grants."""
        return self._replace(checks=tuple(each.raised(granted) for each in self.checks))


def _number(limit: Limit, name: str, value: object) -> int | None:
    what = f"{name} of limit {limit.name!r}"
    return None if value is None else whole_amount(limit.unit, what, value)


def _amount(limit: Limit, name: str, value: object) -> int:
    return whole_amount(limit.unit, name, value) if value else 0


def stored_as(limit: Limit) -> str:
    """The counter under which a store keeps a limit's counts."""
    # A tool may be named `"model"`. Its counter starts with a comma, so the two counts stay apart.
    counter = limit.counter
    return f",{counter}" if limit.kind == "tool" and counter in UNITS else counter


def thread_counter(limit: Limit) -> str:
    """The name of the thread's count."""
    return f"{stored_as(limit)}/{THREAD}"


def run_counter(limit: Limit) -> str:
    """The name of the run's count."""
    return f"{stored_as(limit)}/{RUN}"


class Asked(NamedTuple):
    """What every call of one tool asks."""

    limits: tuple[ResolvedLimit, ...]
    hits: Hits
    shared: bool

    def keeping(self) -> "Asked":
        """The same for a call without a hold, which leaves what is kept for the last answer."""
        return self._with(each.with_checks(hit=1, kept=each.keep) for each in self.limits)

    def reserving(self, bounds: Mapping[str, int]) -> "Asked":
        """The same for a call that can use that much, by the limit's name."""
        return self._with(
            each.with_checks(hit=max(each.checks[0].hit, bounds.get(each.limit.name, 0)))
            for each in self.limits
        )

    def raised(self, granted: Mapping[str, int]) -> "Asked":
        """The same after grants, by a store's key."""
        limits = tuple(each.raised(granted) for each in self.limits)
        more = {
            (new.limit.name, check.scope): (check.most or 0) - (before.most or 0)
            for old, new in zip(self.limits, limits, strict=True)
            for before, check in zip(old.checks, new.checks, strict=True)
        }
        thresholds = (
            each._replace(most=each.most + more.get((each.limit, each.scope), 0))
            for each in self.hits.thresholds
        )
        return Asked(limits, Hits(self.hits.amounts, tuple(thresholds)), self.shared)

    def _with(self, limits: Iterable[ResolvedLimit]) -> "Asked":
        limits = tuple(limits)
        denied = {each.limit for each in self.hits.thresholds if each.scope == STORE}
        return Asked(limits, _hits(limits, denied), self.shared)


class ResolvedLimits:
    """Limits at one moment, and what calls ask of them: looked for once per tool."""

    def __init__(self, limits: Iterable[ResolvedLimit], outage: Outage | None = None) -> None:
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
        self.repeats = tuple(
            each.limit for each in self.limits if isinstance(each.limit, RepeatLimit)
        )
        """Those that refuse repeats: their counts depend on the call."""
        self.asking = frozenset(
            name
            for name, each in self.by_name.items()
            if each.enforce and each.exit_behavior == "ask"
        )
        """The names of those that ask a person whether the run may go on."""
        self._outage = outage
        self._named = {tool for each in self.limits for tool in named_tools(each.limit)}
        self._are_ours = {type(each.limit) for each in self.limits} <= {*get_args(Limit)}
        self._asked: dict[tuple[Kind, str | None], Asked] = {}

    def without_store(self, outage: Outage) -> "ResolvedLimits":
        """The same limits while the store cannot be asked: without quotas."""
        return ResolvedLimits(
            (each._replace(checks=each.checks[:2]) for each in self.limits), outage
        )

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
        checks = (check for each in self.limits for check in each.checks)
        return sorted({check.key for check in checks if check.key is not None})

    def asked(self, call: Call) -> Asked:
        """What a call asks."""
        # Tools that no limit names are treated alike, and there may be any number of them.
        key = call.kind, call.tool if call.tool in self._named else None
        found = self._asked.get(key)
        if found is None:
            found = self._ask(tuple(each for each in self.limits if each.limit.matches(call)))
            # A user's own kind of limit may match by anything.
            if self._are_ours:
                self._asked[key] = found
        return found

    def _ask(self, matching: tuple[ResolvedLimit, ...]) -> Asked:
        shared = [each.limit.name for each in matching if each.shared]
        denied = shared if self._outage == "deny" else ()
        return Asked(matching, _hits(matching, denied), self._outage is None and bool(shared))


def _hits(limits: Sequence[ResolvedLimit], denied: Collection[str]) -> Hits:
    """What a call adds to the counts of limits."""
    # Limits that share a count hold the highest reserve of the enforced ones. Each limit is still
    # judged by its own reserve: its number is shifted by the difference.
    amounts: dict[str, int] = {}
    for each in limits:
        for check in each.checks:
            hit = check.hit if each.limit.enforce else 1
            amounts[check.counter] = max(hit, amounts.get(check.counter, 1))
    thresholds = []
    for each in limits:
        name, enforced = each.limit.name, each.limit.enforce
        if name in denied:
            # Any of its counts works: every count is above -1.
            thresholds.append(Threshold(name, STORE, each.checks[1].counter, -1, enforced))
        if isinstance(each.limit, RepeatLimit):
            # What it counts depends on the call's arguments.
            continue
        for check in each.checks:
            if check.most is not None:
                most = check.most - check.kept - check.hit + amounts[check.counter]
                thresholds.append(Threshold(name, check.scope, check.counter, most, enforced))
    return Hits(amounts, tuple(thresholds))


def hits_of(calls: Sequence[Call], asked: Sequence[Asked]) -> tuple[list[Hits], list[int]]:
    """What the calls would add to counts, and for each call the index of its hits."""
    # Calls that share an id are one call to the agent: they ask together.
    hits: list[Hits] = []
    index_of: list[int] = []
    by_id: dict[str, int] = {}
    for call, (_, one, _) in zip(calls, asked, strict=True):
        index = len(hits) if call.id is None else by_id.setdefault(call.id, len(hits))
        index_of.append(index)
        added = one
        if call.amount != 1:
            added = Hits(dict.fromkeys(one.amounts, call.amount), one.thresholds)
        if index == len(hits):
            hits.append(added)
            continue
        amounts = dict(hits[index].amounts)
        for count, amount in added.amounts.items():
            amounts[count] = amounts.get(count, 0) + amount
        thresholds = dict.fromkeys((*hits[index].thresholds, *added.thresholds))
        hits[index] = Hits(amounts, tuple(thresholds))
    return hits, index_of
