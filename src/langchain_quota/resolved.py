"""Limits at one moment: their numbers, and what each call asks of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, NamedTuple, get_args

from langchain_quota.admission import Counter, Hits, Threshold
from langchain_quota.arguments import check_count
from langchain_quota.decision import (
    ROOT_RUN,
    RUN,
    SCOPES,
    STORE,
    THREAD,
    Call,
    Kind,
    Scope,
)
from langchain_quota.limits import MODEL, Limit, named_tools

Outage = Literal["deny", "allow"]
"""What becomes of calls that need a store which cannot be asked."""


@dataclass(frozen=True, slots=True)
class ResolvedQuota:
    """A quota with its number and its subject at one moment.

    Attributes:
        scope: The quota's name.
        limit: Its number, in calls.
        subject: Whose calls are counted; empty for all.
        key: Where the store keeps the count.
        resets_at: When its window ends, in UTC; `None` if it lasts until it is reset.
        per: What it is per; of a function, the quota's name.
        computed: Whether the number was computed.
    """

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
    """A limit with its numbers at one moment.

    Attributes:
        limit: The limit.
        thread_limit, run_limit: Its numbers, in calls; `None` for none.
        thread_key: Where a store keeps the thread's count; `None` if only the state does.
        run_key: Where it keeps the run's, likewise.
        quotas: The quotas.
        computed: The scopes whose number was computed.
        remembers: Whether the state outlives the run, so that it has the thread's count, too.
    """

    limit: Limit
    thread_limit: int | None
    run_limit: int | None
    thread_key: str | None = None
    run_key: str | None = None
    quotas: tuple[ResolvedQuota, ...] = ()
    computed: tuple[Scope, ...] = ()
    remembers: bool = False

    @classmethod
    def of(
        cls,
        limit: Limit,
        *,
        thread_key: str | None = None,
        run_key: str | None = None,
        quotas: tuple[ResolvedQuota, ...] = (),
        remembers: bool = False,
        **computed: int | None,
    ) -> "ResolvedLimit":
        """A limit with its numbers.

        Args:
            limit: The limit.
            thread_key: Where a store keeps the thread's count.
            run_key: Where it keeps the run's.
            quotas: Its quotas.
            remembers: Whether the state outlives the run.
            computed: The numbers of thresholds that are functions, by argument.

        Raises:
            TypeError: A computed number has the wrong type, or a needed one is missing.
            ValueError: A computed number is negative.
        """
        numbers: dict[str, int | None] = {}
        for argument in ("thread_limit", "run_limit"):
            value = computed.get(argument, getattr(limit, argument))
            if value is not None:
                check_count(f"{argument} of limit {limit.name!r}", value)
            numbers[argument] = value
        return cls(
            limit,
            numbers["thread_limit"],
            numbers["run_limit"],
            # What is not limited is not counted in the store.
            None if numbers["thread_limit"] is None else thread_key,
            None if numbers["run_limit"] is None else run_key,
            quotas,
            (
                *(each for each in SCOPES if callable(getattr(limit, f"{each}_limit"))),
                *(quota.scope for quota in quotas if quota.computed),
            ),
            remembers,
        )

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
    """Under which counter a store keeps a limit's counts.

    A tool may be named `"model"`. Its counter starts with a comma, so the two counts stay apart.
    """
    return f",{MODEL}" if limit.kind == "tool" and limit.counter == MODEL else limit.counter


def thread_counter(limit: Limit) -> str:
    """The name of the thread's count."""
    return f"{stored_as(limit)}/{THREAD}"


def run_counter(limit: Limit) -> str:
    """The name of the run's count."""
    return f"{stored_as(limit)}/{RUN}"


class Row(NamedTuple):
    """One counter that a limit looks at.

    Attributes:
        scope: What it is kept for.
        counter: Its name.
        most: The limit's number; `None` if it is only counted.
        key: Where a store keeps it; `None` if only the state does.
        mirrored: Whether the state has the count, too.
        quota: The quota, if it is one's.
    """

    scope: Scope
    counter: str
    most: int | None
    key: str | None
    mirrored: bool
    quota: ResolvedQuota | None = None


class Asked(NamedTuple):
    """What every call of one tool asks.

    Attributes:
        limits: The limits that match it, in their order, each with its counts: the thread's, the
            run's, and those of its quotas.
        hits: What one call would add to which counts.
        shared: Whether a store keeps one of the counts.
    """

    limits: tuple[tuple[ResolvedLimit, tuple[Row, ...]], ...]
    hits: Hits
    shared: bool


class ResolvedLimits:
    """Limits at one moment, and what calls ask of them: looked for once per tool.

    Args:
        limits: The limits.
        outage: Set while the store does not answer. `"deny"` refuses every call that needs it;
            `"allow"` judges by the caller's own counts.
    """

    def __init__(self, limits: Iterable[ResolvedLimit], outage: Outage | None = None) -> None:
        self.limits = tuple(limits)
        self.by_name = {each.limit.name: each.limit for each in self.limits}
        self.stops = {
            each.name: 1 if each.exit_behavior != "continue" else each.give_up_after or 0
            for each in self.by_name.values()
            if each.enforce and (each.exit_behavior != "continue" or each.give_up_after is not None)
        }
        """The limits whose refusals stop a batch, and after how many in a run."""
        self._outage = outage
        self._named = {tool for each in self.limits for tool in named_tools(each.limit)}
        self._are_ours = {type(each.limit) for each in self.limits} <= {*get_args(Limit)}
        self._asked: dict[tuple[Kind, str | None], Asked] = {}

    def without_store(self, outage: Outage) -> "ResolvedLimits":
        """The same limits while the store cannot be asked.

        Args:
            outage: What follows.
        """
        return ResolvedLimits(self.limits, outage)

    def keys(self) -> list[str]:
        """Where a store keeps their counts."""
        return sorted({key for each in self.limits for key in each.keys})

    def asked(self, call: Call) -> Asked:
        """What a call asks.

        Args:
            call: The call.
        """
        # Tools that no limit names are all alike, and there may be any number of them.
        key = call.kind, call.tool if call.tool in self._named else None
        found = self._asked.get(key)
        if found is None:
            found = self._ask([each for each in self.limits if each.limit.matches(call)])
            # A limit of the user's own may match by anything.
            if self._are_ours:
                self._asked[key] = found
        return found

    def rows(self, limit: ResolvedLimit) -> list[Row]:
        """The counters that a limit looks at: the thread's, the run's, and those of its quotas.

        Args:
            limit: The limit.
        """
        thread, run = thread_counter(limit.limit), run_counter(limit.limit)
        rows = [
            Row(THREAD, thread, limit.thread_limit, limit.thread_key, limit.remembers),
            # The state always keeps the run's count.
            Row(RUN, run, limit.run_limit, limit.run_key, True),
        ]
        if self._outage is None:
            rows += [
                # What a thread has used in all is one count, whichever limit asks.
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
        return rows

    def _ask(self, matching: Sequence[ResolvedLimit]) -> Asked:
        limits, thresholds = [], []
        for each in matching:
            limit, rows = each.limit, self.rows(each)
            if self._outage == "deny" and each.shared:
                # Any of its counters will do: every count is above -1.
                run = rows[1].counter
                thresholds.append(Threshold(limit.name, STORE, run, -1, limit.enforce))
            thresholds += [
                Threshold(limit.name, row.scope, row.counter, row.most, limit.enforce)
                for row in rows
                if row.most is not None
            ]
            limits.append((each, tuple(rows)))
        amounts = dict.fromkeys((row.counter for _, rows in limits for row in rows), 1)
        shared = self._outage is None and any(each.shared for each in matching)
        return Asked(tuple(limits), Hits(amounts, tuple(thresholds)), shared)


def counters_of(asked: Iterable[Asked], used: Mapping[str, int]) -> dict[str, Counter]:
    """The counters that calls would hit, by name.

    Args:
        asked: What the calls ask.
        used: The caller's counts, by name; a missing one counts as zero.
    """
    counters: dict[str, Counter] = {}
    for limits, _, _ in asked:
        for row in (row for _, rows in limits for row in rows):
            known = counters.get(row.counter)
            if known is None:
                ends = row.quota.resets_at if row.quota else None
                counters[row.counter] = Counter(
                    row.key,
                    used.get(row.counter, 0),
                    None if ends is None else ends.timestamp(),
                    row.mirrored,
                )
            elif known.key is None and row.key is not None:
                counters[row.counter] = replace(known, key=row.key)
    return counters


def hits_of(calls: Sequence[Call], asked: Sequence[Asked]) -> tuple[list[Hits], list[int]]:
    """What calls would add to which counts, and for each call the index of its hits.

    Calls that share an id are one call to the agent: they ask together.

    Args:
        calls: The calls.
        asked: For each call what it asks.
    """
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
