"""The judge: pure arithmetic over limits, usage and calls.

A plan says what a batch asks of which counts; whoever keeps them grants it in one atomic step (the
graph state's are granted by `admit`, a store's by the store); the verdict follows from both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args
from uuid import uuid4

from langchain_quota.decision import Breach, Call, Decision, Kind, Outcome, QuotaUse, Standing
from langchain_quota.limits import (
    RUN,
    STORE,
    THREAD,
    Exit,
    Limit,
    Scope,
    Terms,
    named_tools,
)
from langchain_quota.reservation import Cap, Grant, Reservation, Settlement, Slot, admit

Outage = Literal["deny", "allow"]
"""What becomes of calls that need a store which cannot be asked."""

_STRENGTH: dict[Exit, int] = {"continue": 0, "finalize": 1, "end": 1, "error": 2}


@dataclass(frozen=True, slots=True)
class Used:
    """The counts of one counter, in calls; `quotas` in the order of a limit's quotas."""

    thread: int = 0
    run: int = 0
    quotas: tuple[int, ...] = ()

    def plus(self, amount: int) -> "Used":
        """The counts with an amount charged (or, if negative, taken back)."""
        quotas = tuple(each + amount for each in self.quotas)
        return Used(self.thread + amount, self.run + amount, quotas)


_UNUSED = Used()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about a batch of calls.

    Attributes:
        decisions: One for each call, in the order of the calls.
        usage: The counts afterwards, by counter; only counters of limits that were given.
        breaches: The limits whose refusals hold, in the order of the limits.
        exit: What the refusals ask for, the strongest first: `"error"`, `"end"`, `"continue"`;
            `None` if nothing was refused.
    """

    decisions: tuple[Decision, ...]
    usage: Mapping[str, Used]
    breaches: tuple[Breach, ...] = ()
    exit: Exit | None = None


def judge(  # noqa: PLR0913 - keyword-only, with defaults
    limits: "Limits | Sequence[Limit | Terms]",
    usage: Mapping[str, Used],
    calls: Sequence[Call],
    *,
    may_stop: bool = True,
    refusals: Mapping[str, int] | None = None,
    charging: bool = True,
) -> Verdict:
    """Decide which calls of a batch run.

    A call runs only if every limit that matches it admits it; a refused call is charged to none.
    Calls are judged in order, each on what the ones before it left. Calls that share an id are
    one call to the agent: if one of them is refused, all are. If a refusal stops the batch
    (`"end"`, `"error"`), nothing of the batch is charged, and what was not refused is skipped.
    A limit that is not enforced refuses nothing: the call runs, and is counted.

    Args:
        limits: The limits, or their terms at this moment. Those with one counter are thresholds
            over one count.
        usage: The counts before the batch, by counter; a missing one counts as zero.
        calls: The batch.
        may_stop: Whether a refusal may stop the batch; if not, each acts as `"continue"`.
        refusals: How often limits that give up have refused in this run, by name.
        charging: Whether admitted calls are charged now; a limiter that counts a call only when
            it has returned charges it then.
    """
    if not isinstance(limits, Limits):
        limits = Limits(each if isinstance(each, Terms) else Terms.of(each) for each in limits)
    verdict = all_admitted(limits, usage, calls, charging=charging)
    if verdict is not None:
        return verdict
    asked = plan(limits.terms, usage, calls, may_stop=may_stop, refusals=refusals)
    return asked.verdict(asked.own_grant(), charging=charging)


class Limits:
    """Limits, and which of them match which call: looked for once per tool.

    Args:
        terms: The limits' terms.
    """

    def __init__(self, terms: Iterable[Terms]) -> None:
        self.terms = tuple(terms)
        self.shared = any(each.shared for each in self.terms)
        """Whether a store keeps one of their counts."""
        self.counters = {each.limit.name: each.limit.counter for each in self.terms}
        """What each counts under, by name."""
        self._named = {name for each in self.terms for name in named_tools(each.limit)}
        self._are_ours = {type(each.limit) for each in self.terms} <= {*get_args(Limit)}
        self._found: dict[tuple[Kind, str | None], tuple[Terms, ...]] = {}

    def of(self, call: Call) -> tuple[Terms, ...]:
        """The terms of the limits that match the call, in their order."""
        if not self._are_ours:
            # A limit of the user's own may match by anything.
            return tuple(each for each in self.terms if each.limit.matches(call))
        # Tools that no limit names are all alike, and there may be any number of them.
        key = call.kind, call.tool if call.tool in self._named else None
        found = self._found.get(key)
        if found is None:
            found = tuple(each for each in self.terms if each.limit.matches(call))
            self._found[key] = found
        return found


def all_admitted(
    limits: Limits, usage: Mapping[str, Used], calls: Sequence[Call], *, charging: bool = True
) -> Verdict | None:
    """The verdict on a batch that no limit refuses a call of, by the caller's own counts.

    What a plan comes to where there is enough left of everything, which is nearly always.

    Args:
        limits: The limits.
        usage: The counts before the batch, by counter; a missing one counts as zero.
        calls: The batch.
        charging: Whether the calls are charged now.

    Returns:
        The verdict; `None` if a limit refuses a call, or has quotas, which only a store counts.
    """
    counts: dict[str, Used] = {}
    decisions = []
    for call in calls:
        charged: dict[str, tuple[Used, Used]] = {}
        standings = []
        for each in limits.of(call):
            counter = each.limit.counter
            if counter not in charged:
                old = counts.get(counter) or usage.get(counter, _UNUSED)
                charged[counter] = old, Used(old.thread + call.amount, old.run + call.amount)
            before, after = charged[counter]
            if (
                each.quotas
                or (each.thread_limit is not None and after.thread > each.thread_limit)
                or (each.run_limit is not None and after.run > each.run_limit)
            ):
                return None
            standing = _standing(each, before, after, None, charged=charging, deferred=not charging)
            standings.append(standing)
        for counter, (_, after) in charged.items():
            counts[counter] = after
        decisions.append(Decision(call, Outcome.ALLOWED, tuple(standings)))
    untouched = {counter: usage.get(counter, _UNUSED) for counter in limits.counters.values()}
    return Verdict(tuple(decisions), {**untouched, **counts})


def plan(  # noqa: PLR0913 - keyword-only, with defaults
    terms: Sequence[Terms],
    usage: Mapping[str, Used],
    calls: Sequence[Call],
    *,
    may_stop: bool = True,
    refusals: Mapping[str, int] | None = None,
    name: str = "",
    settlements: tuple[Settlement, ...] = (),
    outage: Outage | None = None,
) -> "Plan":
    """What a batch of calls asks of which counts.

    Args:
        terms: The limits' terms at this moment.
        usage: The caller's counts before the batch, by counter; a missing one counts as zero.
        calls: The batch.
        may_stop: Whether a refusal may stop the batch.
        refusals: How often limits that give up have refused in this run, by name.
        name: Names the reservation.
        settlements: Corrections of the store's counts that are made first.
        outage: The store cannot be asked, and what follows: every call that needs it is refused,
            or judged by the caller's own counts.
    """
    asked, rest = [], {}
    for each in terms:
        if any(map(each.limit.matches, calls)):
            asked.append(each)
        else:
            rest[each.limit.counter] = usage.get(each.limit.counter, Used())
    terms = asked
    slots = _Slots(terms, usage, outage)
    charges: list[dict[int, int]] = []
    by_id: dict[str, int] = {}
    charge_of = []
    for call in calls:
        index = len(charges) if call.id is None else by_id.setdefault(call.id, len(charges))
        if index == len(charges):
            charges.append({})
        charge_of.append(index)
        for counter in {each.limit.counter for each in terms if each.limit.matches(call)}:
            for slot in set(slots.by_scope[counter].values()):
                charges[index][slot] = charges[index].get(slot, 0) + call.amount
    reservation = Reservation(
        # An answer to other charges would not fit.
        id=f"{name}/{len(slots)}/{len(charges)}" if name else "",
        attempt=uuid4().hex if name else "",
        slots=slots.made(),
        charges=tuple(charges),
        stops=_stops(terms, refusals or {}) if may_stop else {},
        settlements=settlements,
    )
    return Plan(tuple(terms), tuple(calls), reservation, tuple(charge_of), slots.by_scope, rest)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a batch of calls asks of which counts.

    Attributes:
        terms: The terms of the limits that match a call.
        calls: The batch.
        reservation: What is asked.
        charge_of: For each call the index of its charge; calls that share an id have one.
        slots: The index of each counter's slot, by counter, limit and scope.
        rest: The counts that the calls do not touch, by counter.
    """

    terms: tuple[Terms, ...]
    calls: tuple[Call, ...]
    reservation: Reservation
    charge_of: tuple[int, ...]
    slots: Mapping[str, Mapping[tuple[str, Scope], int]] = field(repr=False)
    rest: Mapping[str, Used] = field(repr=False)

    def keyed(self, charge: int) -> dict[str, int]:
        """What a charge adds to the counts that a store keeps, by key."""
        return {
            key: amount
            for slot, amount in self.reservation.charges[charge].items()
            if (key := self.reservation.slots[slot].key) is not None
        }

    def own_grant(self) -> Grant:
        """The answer by the caller's own counts."""
        return admit(self.reservation, [slot.used for slot in self.reservation.slots])

    def verdict(self, grant: Grant, *, charging: bool = True) -> Verdict:
        """What is decided about each call.

        Args:
            grant: The answer to the reservation.
            charging: Whether admitted calls are charged now.
        """
        refused = self._refusals(grant)
        terms = self._terms(refused)
        counts = list(grant.used)
        decisions = []
        for call, index in zip(self.calls, self.charge_of, strict=True):
            matching = [each for each in terms if each.limit.matches(call)]
            runs = grant.admitted[index] and not grant.stopped
            before = tuple(counts)
            if runs:
                for slot in {
                    slot for each in matching for slot in self.slots[each.limit.counter].values()
                }:
                    counts[slot] += call.amount
            standings = []
            for each in matching:
                scope = refused[index].get(each.limit.name) if refused[index] else None
                old = self._used(each, before)
                new = self._used(each, counts) if runs else old
                charged = runs and charging and scope is None
                deferred = runs and not charging
                standing = _standing(each, old, new, scope, charged=charged, deferred=deferred)
                standings.append(standing)
            outcome = _outcome(standings, admitted=grant.admitted[index], stopped=grant.stopped)
            decisions.append(Decision(call, outcome, tuple(standings)))

        breaches = self._breaches(terms, grant, decisions) if any(refused) else ()
        exit_behavior = max(
            (breach.terms.exit_behavior for breach in breaches),
            key=_STRENGTH.__getitem__,
            default=None,
        )
        if exit_behavior is not None and not grant.stopped:
            exit_behavior = "continue"
        after = {**self.rest, **{each.limit.counter: self._used(each, counts) for each in terms}}
        return Verdict(tuple(decisions), after, breaches, exit_behavior)

    def _terms(self, refused: Sequence[Mapping[str, Scope]]) -> list[Terms]:
        """The terms; those of limits that give up with this batch end the run."""
        if not any(refused):
            return list(self.terms)
        given_up = {
            name
            for name, after in self.reservation.stops.items()
            if sum(name in each for each in refused) >= after
        }
        return [
            each.ending() if each.limit.name in given_up and not stops(each.exit_behavior) else each
            for each in self.terms
        ]

    def _refusals(self, grant: Grant) -> list[dict[str, Scope]]:
        """For each charge the limits that refuse it, with the scope that is exhausted."""
        counts = list(grant.used)
        found: list[dict[str, Scope]] = []
        for charge, admitted in zip(self.reservation.charges, grant.admitted, strict=True):
            refusing: dict[str, Scope] = {}
            for each in self.terms if self._exceeds(charge, counts) else ():
                scope = self._exhausted(each, charge, counts)
                # A limit that has changed since does not refuse what was admitted before.
                if scope is not None and not (admitted and each.limit.enforce):
                    refusing[each.limit.name] = scope
            found.append(refusing)
            if admitted:
                for slot, amount in charge.items():
                    counts[slot] += amount
        return found

    def _exceeds(self, charge: Mapping[int, int], counts: Sequence[int]) -> bool:
        """Whether a charge would exceed any cap."""
        slots = self.reservation.slots
        for slot, amount in charge.items():
            count = counts[slot] + amount
            for cap in slots[slot].caps:
                if count > cap.limit:
                    return True
        return False

    def _exhausted(
        self, terms: Terms, charge: Mapping[int, int], counts: Sequence[int]
    ) -> Scope | None:
        """The first scope of a limit that a charge would exceed."""
        name = terms.limit.name
        slots = self.slots[terms.limit.counter]
        for (limit, scope), slot in slots.items():
            if limit == name and slot in charge:
                caps = [cap for cap in self.reservation.slots[slot].caps if cap.name == name]
                if any(counts[slot] + charge[slot] > cap.limit for cap in caps):
                    return scope
        return None

    def _used(self, terms: Terms, counts: Sequence[int]) -> Used:
        slots = self.slots[terms.limit.counter]
        thread, run = counts[slots["", THREAD]], counts[slots["", RUN]]
        # Without the store there are no counts of quotas.
        if not terms.quotas or not self.reservation.shared:
            return Used(thread, run)
        name = terms.limit.name
        return Used(thread, run, tuple(counts[slots[name, quota.scope]] for quota in terms.quotas))

    def _breaches(
        self, terms: Sequence[Terms], grant: Grant, decisions: Sequence[Decision]
    ) -> tuple[Breach, ...]:
        breaches = []
        for each in terms:
            limit = each.limit
            refused = [
                (decision, charge)
                for decision, charge in zip(decisions, self.charge_of, strict=True)
                if any(s.refused and s.limit == limit.name for s in decision.standings)
            ]
            if refused and limit.enforce:
                asked = sum(
                    decision.call.amount for decision in decisions if limit.matches(decision.call)
                )
                counts = self._used(each, grant.used).plus(asked)
                first, _ = refused[0]
                # Calls that share an id have one charge, and are refused as one.
                refusals = len({charge for _, charge in refused})
                breaches.append(
                    Breach(each, first, refusals, counts.thread, counts.run, counts.quotas)
                )
        return tuple(breaches)


@dataclass(slots=True)
class _Draft:
    """A slot that is being made."""

    key: str | None
    used: int
    expires_at: float | None
    caps: list[Cap] = field(default_factory=list)
    mirrored: bool = False


class _Slots:
    """The counts that limits look at, each once."""

    def __init__(
        self, terms: Sequence[Terms], usage: Mapping[str, Used], outage: Outage | None
    ) -> None:
        self._drafts: list[_Draft] = []
        self._by_name: dict[tuple[str, str], int] = {}
        self.by_scope: dict[str, dict[tuple[str, Scope], int]] = {}
        for each in terms:
            counter = each.limit.counter
            used = usage.get(counter, Used())
            scopes = self.by_scope.setdefault(counter, {})
            if outage == "deny" and each.shared:
                self._cap(each, STORE, f"{STORE}/{each.limit.name}", -1)
            thread_key, run_key = (
                (each.thread_key, each.run_key) if outage is None else (None, None)
            )
            self._cap(each, THREAD, THREAD, each.thread_limit, key=thread_key, used=used.thread)
            self._drafts[self._by_name[counter, THREAD]].mirrored = each.remembers
            self._cap(each, RUN, RUN, each.run_limit, key=run_key, used=used.run)
            # The state has it as long as the run goes on.
            self._drafts[self._by_name[counter, RUN]].mirrored = True
            scopes["", THREAD] = self._by_name[counter, THREAD]
            scopes["", RUN] = self._by_name[counter, RUN]
            for quota in each.quotas if outage is None else ():
                ends = None if quota.resets_at is None else quota.resets_at.timestamp()
                # What a thread has used in all is one count, whichever limit asks.
                name = THREAD if quota.is_threads else quota.key
                self._cap(each, quota.scope, name, quota.limit, key=quota.key, expires_at=ends)

    def __len__(self) -> int:
        return len(self._drafts)

    def made(self) -> tuple[Slot, ...]:
        """The slots."""
        return tuple(
            Slot(each.key, each.used, each.expires_at, tuple(each.caps), each.mirrored)
            for each in self._drafts
        )

    def _cap(  # noqa: PLR0913 - one value for each part of a slot
        self,
        terms: Terms,
        scope: Scope,
        name: str,
        limit: int | None,
        *,
        key: str | None = None,
        used: int = 0,
        expires_at: float | None = None,
    ) -> None:
        """Put a limit's cap on the slot of that name, which is made if it is the first."""
        counter = terms.limit.counter
        index = self._by_name.get((counter, name))
        if index is None:
            index = self._by_name[counter, name] = len(self._drafts)
            self._drafts.append(_Draft(key, used, expires_at))
        draft = self._drafts[index]
        if draft.key is None:
            draft.key = key
        if limit is not None:
            draft.caps.append(Cap(terms.limit.name, limit, terms.limit.enforce))
        self.by_scope[counter][terms.limit.name, scope] = index


def _stops(terms: Sequence[Terms], refusals: Mapping[str, int]) -> dict[str, int]:
    """The limits whose refusals stop a batch, and after how many."""
    found = {}
    for each in terms:
        limit = each.limit
        if not limit.enforce:
            continue
        if stops(each.exit_behavior):
            found[limit.name] = 1
        elif limit.give_up_after is not None:
            found[limit.name] = max(1, limit.give_up_after - refusals.get(limit.name, 0))
    return found


def stops(exit_behavior: Exit | None) -> bool:
    """Whether a refusal with this behaviour stops its batch."""
    return exit_behavior not in {None, "continue"}


def charge(limit: Limit | Terms, used: Used, amount: int) -> Standing:
    """How a limit stands at a call that is charged to it after the fact."""
    terms = limit if isinstance(limit, Terms) else Terms.of(limit)
    return _standing(terms, used, used.plus(amount), None, charged=True)


def exhausted_scope(terms: Terms, used: Used, amount: int) -> Scope | None:
    """The threshold that an amount would exceed, thread before run; `None` if it fits."""
    if terms.thread_limit is not None and used.thread + amount > terms.thread_limit:
        return THREAD
    if terms.run_limit is not None and used.run + amount > terms.run_limit:
        return RUN
    # Where the store's counts are not known there are none.
    for quota, count in zip(terms.quotas, used.quotas, strict=False):
        if count + amount > quota.limit:
            return quota.scope
    return None


def _outcome(standings: Sequence[Standing], *, admitted: bool, stopped: bool) -> Outcome:
    if not admitted:
        return Outcome.BLOCKED
    if stopped:
        return Outcome.SKIPPED
    if any(standing.refused for standing in standings):
        return Outcome.WOULD_BLOCK
    return Outcome.ALLOWED


def _standing(  # noqa: PLR0913 - one value for each part of the record
    terms: Terms,
    before: Used,
    after: Used,
    scope: Scope | None,
    *,
    charged: bool,
    deferred: bool = False,
) -> Standing:
    limit = terms.limit
    return Standing(
        limit=limit.name,
        exit_behavior=terms.exit_behavior,
        thread_before=before.thread,
        thread_used=after.thread,
        thread_limit=terms.thread_limit,
        run_before=before.run,
        run_used=after.run,
        run_limit=terms.run_limit,
        refused=scope is not None,
        scope=scope,
        charged=charged,
        deferred=deferred,
        enforced=limit.enforce,
        near=limit.near,
        computed=terms.computed,
        quotas=_quota_uses(terms, before, after) if terms.quotas else (),
        shared=terms.shared,
    )


def _quota_uses(terms: Terms, before: Used, after: Used) -> tuple[QuotaUse, ...]:
    return tuple(
        QuotaUse(
            quota.scope,
            quota.subject,
            count,
            used,
            quota.limit,
            quota.resets_at,
            quota.per_thread,
        )
        # Where the store could not be asked there are no counts.
        for quota, count, used in zip(terms.quotas, before.quotas, after.quotas, strict=False)
    )
