"""The judge: pure arithmetic over limits, usage and calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from langchain_quota.decision import Breach, Call, Decision, Outcome, Standing
from langchain_quota.limits import SCOPES, Exit, Limit, Scope, Terms

_STRENGTH: dict[Exit, int] = {"continue": 0, "finalize": 1, "end": 1, "error": 2}


@dataclass(frozen=True, slots=True)
class Used:
    """The counts of one counter, in calls."""

    thread: int = 0
    run: int = 0

    def plus(self, amount: int) -> "Used":
        """The counts with an amount charged (or, if negative, taken back)."""
        return Used(self.thread + amount, self.run + amount)


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


def judge(
    limits: Sequence[Limit | Terms],
    usage: Mapping[str, Used],
    calls: Sequence[Call],
    *,
    may_stop: bool = True,
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
        charging: Whether admitted calls are charged now; a limiter that counts a call only when
            it has returned charges it then.
    """
    terms = [each if isinstance(each, Terms) else Terms.of(each) for each in limits]
    torn: dict[str, dict[str, Scope]] = {}
    while True:
        decisions, after = _pass(terms, usage, calls, torn, charging=charging)
        found = _torn_ids(decisions)
        if found.keys() <= torn.keys():
            break
        torn |= found

    breaches = _breaches(terms, usage, decisions)
    exit_behavior = max(
        (breach.terms.exit_behavior for breach in breaches),
        key=_STRENGTH.__getitem__,
        default=None,
    )
    if exit_behavior is not None and not may_stop:
        exit_behavior = "continue"
    if stops(exit_behavior):
        decisions = tuple(_uncharged(decision, usage, terms) for decision in decisions)
        breaches = _breaches(terms, usage, decisions)
        after = {each.limit.counter: usage.get(each.limit.counter, Used()) for each in terms}
    return Verdict(decisions, after, breaches, exit_behavior)


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
        return "thread"
    if terms.run_limit is not None and used.run + amount > terms.run_limit:
        return "run"
    return None


def _pass(
    terms: Sequence[Terms],
    usage: Mapping[str, Used],
    calls: Sequence[Call],
    torn: Mapping[str, Mapping[str, Scope]],
    *,
    charging: bool,
) -> tuple[tuple[Decision, ...], dict[str, Used]]:
    after = {each.limit.counter: usage.get(each.limit.counter, Used()) for each in terms}
    decisions = []
    for call in calls:
        matching = [each for each in terms if each.limit.matches(call)]
        known = torn.get(call.id, {}) if call.id is not None else {}
        scopes = [
            exhausted_scope(each, after[each.limit.counter], call.amount)
            or known.get(each.limit.name)
            for each in matching
        ]
        enforced = any(
            scope is not None and each.limit.enforce
            for each, scope in zip(matching, scopes, strict=True)
        )
        admitted = call.id not in torn and not enforced
        before = {each.limit.counter: after[each.limit.counter] for each in matching}
        if admitted:
            for counter, used in before.items():
                after[counter] = used.plus(call.amount)
        standings = tuple(
            _standing(
                each,
                before[each.limit.counter],
                after[each.limit.counter],
                scope,
                charged=admitted and charging and scope is None,
                deferred=admitted and not charging,
            )
            for each, scope in zip(matching, scopes, strict=True)
        )
        decisions.append(Decision(call, _outcome(standings, admitted=admitted), standings))
    return tuple(decisions), after


def _outcome(standings: Sequence[Standing], *, admitted: bool) -> Outcome:
    if not admitted:
        return Outcome.BLOCKED
    if any(standing.refused for standing in standings):
        return Outcome.WOULD_BLOCK
    return Outcome.ALLOWED


def _torn_ids(decisions: Sequence[Decision]) -> dict[str, dict[str, Scope]]:
    """The ids that are both refused and admitted, with the scope of each limit that refuses."""
    refused: dict[str, dict[str, Scope]] = {}
    admitted = set()
    for decision in decisions:
        if decision.outcome is not Outcome.BLOCKED:
            admitted.add(decision.call.id)
        elif decision.call.id is not None:
            refused.setdefault(decision.call.id, {}).update(
                (each.limit, each.scope)
                for each in decision.refused_by
                if each.scope is not None and each.enforced
            )
    return {call_id: scopes for call_id, scopes in refused.items() if call_id in admitted}


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
        computed=tuple(each for each in SCOPES if callable(getattr(limit, f"{each}_limit"))),
    )


def _breaches(
    terms: Sequence[Terms], usage: Mapping[str, Used], decisions: Sequence[Decision]
) -> tuple[Breach, ...]:
    breaches = []
    for each in terms:
        limit = each.limit
        refused = [
            decision
            for decision in decisions
            if any(s.refused and s.limit == limit.name for s in decision.standings)
        ]
        if refused and limit.enforce:
            asked = sum(
                decision.call.amount for decision in decisions if limit.matches(decision.call)
            )
            hypothetical = usage.get(limit.counter, Used()).plus(asked)
            breaches.append(
                Breach(each, refused[0], len(refused), hypothetical.thread, hypothetical.run)
            )
    return tuple(breaches)


def _uncharged(decision: Decision, usage: Mapping[str, Used], terms: Sequence[Terms]) -> Decision:
    scopes = {standing.limit: standing.scope for standing in decision.standings}
    standings = []
    for each in terms:
        if each.limit.matches(decision.call):
            used = usage.get(each.limit.counter, Used())
            standings.append(_standing(each, used, used, scopes[each.limit.name], charged=False))
    outcome = Outcome.BLOCKED if decision.outcome is Outcome.BLOCKED else Outcome.SKIPPED
    return Decision(decision.call, outcome, tuple(standings))
