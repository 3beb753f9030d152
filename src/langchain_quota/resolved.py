"""Limits at one moment: their numbers, and what each call asks of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple, get_args

from langchain_quota.admission import Hits, Threshold
from langchain_quota.budgets import CostLimit, TokenLimit
from langchain_quota.decision import (
    ROOT_RUN,
    RUN,
    SCOPES,
    STORE,
    THREAD,
    Call,
    Kind,
    Reason,
    Scope,
)
from langchain_quota.limit_options import UNITS, whole_amount
from langchain_quota.limits import Limit, named_tools
from langchain_quota.repeats import RepeatLimit

Outage = Literal["deny", "allow"]
"""What happens to calls that need a store which cannot be asked."""

LEASE = 900
"""How long a store holds an amount for a model call, in seconds. Then it is given back, for example
because the process has died. A call that takes longer is charged nevertheless; others may have used
its amount by then. Clients of providers give up after 600 seconds by default."""


@dataclass(frozen=True, slots=True)
class ResolvedQuota:
    """A quota with its number and its subject at one moment."""

    scope: Scope
    limit: int
    subject: str
    key: str
    resets_at: datetime | None = None
    per: str = ""
    computed: bool = False

    @property
    def is_threads(self) -> bool:
        """Whether it limits what a thread has used in all."""
        return self.per == THREAD and self.resets_at is None


@dataclass(frozen=True, slots=True)
class ResolvedLimit:
    """A limit with its numbers at one moment."""

    limit: Limit
    thread_limit: int | None
    run_limit: int | None
    thread_key: str | None = None
    run_key: str | None = None
    quotas: tuple[ResolvedQuota, ...] = ()
    computed: tuple[Scope, ...] = ()
    remembers: bool = False
    hold: int = 1
    keep: int = 0

    @classmethod
    def of(
        cls,
        limit: Limit,
        *,
        thread_key: str | None = None,
        run_key: str | None = None,
        quotas: tuple[ResolvedQuota, ...] = (),
        remembers: bool = False,
        **computed: object,
    ) -> "ResolvedLimit":
        """A limit with its numbers."""
        numbers: dict[str, int | None] = {}
        for argument in ("thread_limit", "run_limit"):
            value = computed.get(argument, getattr(limit, argument))
            if value is not None:
                what = f"{argument} of limit {limit.name!r}"
                value = whole_amount(limit.unit, what, value)
            numbers[argument] = value
        options = {}
        if isinstance(limit, TokenLimit | CostLimit):
            if limit.reserve is not None and not callable(limit.reserve):
                options["hold"] = whole_amount(limit.unit, "reserve", limit.reserve)
            if limit.keep is not None:
                options["keep"] = whole_amount(limit.unit, "keep", limit.keep)
        return cls(
            limit,
            numbers["thread_limit"],
            numbers["run_limit"],
            # Without a limit the store does not count.
            None if numbers["thread_limit"] is None else thread_key,
            None if numbers["run_limit"] is None else run_key,
            quotas,
            (
                *(each for each in SCOPES if callable(getattr(limit, f"{each}_limit"))),
                *(quota.scope for quota in quotas if quota.computed),
            ),
            remembers,
            **options,
        )

    @property
    def is_budget(self) -> bool:
        """Whether it limits what model calls use, and not their number."""
        return self.limit.unit != "calls"

    @property
    def shared(self) -> bool:
        """Whether a store keeps one of its counts."""
        return bool(self.quotas) or self.thread_key is not None or self.run_key is not None

    @property
    def keys(self) -> set[str]:
        """Where a store keeps its counts."""
        own = {key for key in (self.thread_key, self.run_key) if key is not None}
        return own | {quota.key for quota in self.quotas}

    @property
    def counts_thread(self) -> bool:
        """Whether a store keeps what the thread has used in all."""
        return self.thread_key is not None or any(quota.is_threads for quota in self.quotas)


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


class Row(NamedTuple):
    """One counter that a limit looks at."""

    scope: Scope
    counter: str
    most: int | None
    key: str | None
    mirrored: bool
    quota: ResolvedQuota | None = None
    hold: int = 1
    lease: int | None = None
    kept: int = 0
    reason: Reason = "exhausted"


class Asked(NamedTuple):
    """What every call of one tool asks."""

    limits: tuple[tuple[ResolvedLimit, tuple[Row, ...]], ...]
    hits: Hits
    shared: bool

    def keeping(self) -> "Asked":
        """The same for a call without a hold, which leaves what is kept for the last answer."""
        return self._with(
            (each, tuple(row._replace(hold=1, kept=each.keep) for row in rows))
            for each, rows in self.limits
        )

    def reserving(self, bounds: Mapping[str, int]) -> "Asked":
        """The same for a call that can use that much, by the limit's name."""
        return self._with(
            (
                each,
                tuple(
                    row._replace(hold=max(row.hold, bounds.get(each.limit.name, 0))) for row in rows
                ),
            )
            for each, rows in self.limits
        )

    def _with(self, limits: Iterable[tuple[ResolvedLimit, tuple[Row, ...]]]) -> "Asked":
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
        self.has_budgets = any(each.is_budget for each in self.limits)
        """Whether one of them limits what model calls use."""
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
        self._rows: dict[str, Sequence[Row]] = {}

    def without_store(self, outage: Outage) -> "ResolvedLimits":
        """The same limits while the store cannot be asked."""
        return ResolvedLimits(self.limits, outage)

    def keys(self) -> list[str]:
        """Where a store keeps their counts."""
        return sorted({key for each in self.limits for key in each.keys})

    def asked(self, call: Call) -> Asked:
        """What a call asks."""
        # Tools that no limit names are treated alike, and there may be any number of them.
        key = call.kind, call.tool if call.tool in self._named else None
        found = self._asked.get(key)
        if found is None:
            found = self._ask([each for each in self.limits if each.limit.matches(call)])
            # A user's own kind of limit may match by anything.
            if self._are_ours:
                self._asked[key] = found
        return found

    def rows(self, limit: ResolvedLimit) -> Sequence[Row]:
        """The counters that a limit looks at: the thread's, the run's, and those of its quotas."""
        rows = self._rows.get(limit.limit.name)
        if rows is None:
            rows = self._rows[limit.limit.name] = self._made_rows(limit)
        return rows

    def _made_rows(self, limit: ResolvedLimit) -> list[Row]:
        thread, run = thread_counter(limit.limit), run_counter(limit.limit)
        rows = [
            Row(THREAD, thread, limit.thread_limit, limit.thread_key, limit.remembers),
            # The state always keeps the run's count.
            Row(RUN, run, limit.run_limit, limit.run_key, True),
        ]
        if self._outage is None:
            rows += [
                # A thread's use in all is one count, for every limit.
                Row(
                    each.scope,
                    thread if each.is_threads else each.key,
                    each.limit,
                    each.key,
                    # The handler of the root run has its count, too.
                    mirrored=each.per == ROOT_RUN,
                    quota=each,
                )
                for each in limit.quotas
            ]
        if limit.is_budget:
            rows = [row._replace(hold=limit.hold, lease=LEASE) for row in rows]
        return rows

    def _ask(self, matching: Sequence[ResolvedLimit]) -> Asked:
        limits = tuple((each, tuple(self.rows(each))) for each in matching)
        denies = self._outage == "deny"
        denied = {each.limit.name for each in matching if denies and each.shared}
        shared = self._outage is None and any(each.shared for each in matching)
        return Asked(limits, _hits(limits, denied), shared)


def _hits(limits: Iterable[tuple[ResolvedLimit, tuple[Row, ...]]], denied: Collection[str]) -> Hits:
    """What a call adds to the counts of limits."""
    # Limits that share a count hold the highest reserve of the enforced ones. Each limit is still
    # judged by its own reserve: its number is shifted by the difference.
    amounts: dict[str, int] = {}
    for each, rows in limits:
        for row in rows:
            hold = row.hold if each.limit.enforce else 1
            amounts[row.counter] = max(hold, amounts.get(row.counter, 1))
    thresholds = []
    for each, rows in limits:
        name, enforced = each.limit.name, each.limit.enforce
        if name in denied:
            # Any of its counters works: every count is above -1.
            thresholds.append(Threshold(name, STORE, rows[1].counter, -1, enforced))
        if isinstance(each.limit, RepeatLimit):
            # What it counts depends on the call's arguments.
            continue
        for row in rows:
            if row.most is not None:
                most = row.most - row.kept - row.hold + amounts[row.counter]
                thresholds.append(Threshold(name, row.scope, row.counter, most, enforced))
    return Hits(amounts, tuple(thresholds))
