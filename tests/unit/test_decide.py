"""What is decided about each call: examples first, then what must hold for every batch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import starmap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota import (
    Call,
    Decision,
    LimitStatus,
    ModelCallLimit,
    Outcome,
    Quota,
    QuotaStatus,
    ToolCallLimit,
)
from langchain_quota.decide import Breach, Exceeded, status
from langchain_quota.limits import Limit, ToolExitBehavior
from langchain_quota.resolved import Outage, ResolvedLimit, ResolvedLimits, ResolvedQuota
from tests.judged import Judged, Used, judge

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
QUOTA = Quota(9, per="user_id")
EXITS = pytest.mark.parametrize("behavior", ["continue", "end", "error"])


def calls(*tools: str) -> list[Call]:
    return [Call("tool", tool, f"call-{index}") for index, tool in enumerate(tools)]


def user(most: int, resets_at: datetime | None = None) -> ResolvedQuota:
    return ResolvedQuota("user_id", most, "ann", "user", resets_at)


def resolve(limit: Limit, *quotas: ResolvedQuota, thread_key: str | None = None) -> ResolvedLimit:
    return ResolvedLimit.of(limit, thread_key=thread_key, quotas=quotas)


def outcomes(judged: Judged) -> list[str]:
    return [decision.outcome.value for decision in judged.decisions]


def refusing(judged: Judged) -> list[list[str]]:
    """For each call the names of the limits that refuse it."""
    return [[each.limit for each in decision.refused_by] for decision in judged.decisions]


def test_a_status_tells_of_before_and_after() -> None:
    """Each decision shows the counts that it found and left, call after call."""
    limit = ToolCallLimit("search", thread_limit=9, run_limit=2)
    judged = judge([limit], {"search": Used(4, 0)}, calls("search", "search", "search"))
    assert outcomes(judged) == ["allowed", "allowed", "blocked"]
    first, second, third = (decision.limits[0] for decision in judged.decisions)
    assert first == LimitStatus("tool:search", "continue", 4, 5, 9, 0, 1, 2, charged=True)
    assert second == replace(first, thread_before=5, thread_used=6, run_before=1, run_used=2)
    assert third == LimitStatus(
        "tool:search", "continue", 6, 6, 9, 2, 2, 2, reason="exhausted", scope="run"
    )
    assert judged.used(limit) == Used(6, 2)


def test_a_status_carries_what_its_limit_says() -> None:
    """The near share, whether it holds, what was computed and what is shared reach telemetry."""
    limit = ToolCallLimit(
        thread_limit=lambda *_: 5, run_limit=2, near=0.5, enforce=False, quotas=[QUOTA]
    )
    resolved = ResolvedLimit.of(limit, thread_limit=5, quotas=(user(9),))
    (found,) = judge([resolved], {}, calls("search")).decisions[0].limits
    assert (found.near, found.enforced, found.computed, found.shared) == (
        0.5,
        False,
        ("thread",),
        True,
    )
    (found,) = judge([ToolCallLimit(run_limit=1)], {}, calls("search")).decisions[0].limits
    assert (found.near, found.enforced, found.computed, found.shared) == (None, True, (), False)


def test_a_call_that_no_limit_matches_is_allowed() -> None:
    """It is decided like any other, by no limit; and no batch is no decisions."""
    judged = judge([ModelCallLimit(run_limit=0)], {}, calls("search"))
    assert judged.decisions == (Decision(calls("search")[0], Outcome.ALLOWED),)
    assert judge([ToolCallLimit(run_limit=0)], {}, []).decisions == ()


def test_a_call_refused_by_one_limit_is_charged_to_none() -> None:
    """With one search and two calls in all, a blocked search leaves room for another tool."""
    limits = [ToolCallLimit("search", run_limit=1), ToolCallLimit(run_limit=2)]
    judged = judge(limits, {}, calls("search", "search", "calc"))
    assert outcomes(judged) == ["allowed", "blocked", "allowed"]
    assert refusing(judged) == [[], ["tool:search"], []]
    assert [judged.used(limit) for limit in limits] == [Used(1, 1), Used(2, 2)]
    assert [each.charged for each in judged.decisions[1].limits] == [False, False]


@pytest.mark.parametrize("computed", [0, 2, None])
def test_a_computed_limit_holds_at_its_number(computed: int | None) -> None:
    """A limit that is a function refuses from the number of this moment on; without one, never."""
    resolved = ResolvedLimit.of(ToolCallLimit(run_limit=lambda *_: 99), run_limit=computed)
    allowed = 3 if computed is None else computed
    judged = judge([resolved], {}, calls("search", "search", "search"))
    assert outcomes(judged) == ["allowed"] * allowed + ["blocked"] * (3 - allowed)


@pytest.mark.parametrize("behavior", ["end", "error"])
def test_a_stopped_batch_is_charged_to_none(behavior: ToolExitBehavior) -> None:
    """What was admitted beside the refusal is skipped, and the counts are as before the batch."""
    limits = [
        ToolCallLimit("search", thread_limit=2, exit_behavior=behavior),
        ToolCallLimit(run_limit=9),
    ]
    used = {"search": Used(1, 0), "__all__": Used(4, 0)}
    judged = judge(limits, used, calls("search", "search", "calc"))
    assert outcomes(judged) == ["skipped", "blocked", "skipped"]
    assert refusing(judged) == [[], ["tool:search"], []]
    assert [judged.used(limit) for limit in limits] == [*used.values()]
    for found in (each for decision in judged.decisions for each in decision.limits):
        assert (found.charged, found.thread_used) == (False, found.thread_before)


@pytest.mark.parametrize("behavior", ["end", "error"])
def test_a_batch_that_may_not_be_stopped_goes_on(behavior: ToolExitBehavior) -> None:
    """Where refusals do not stop it, what is not refused runs and is charged."""
    limit = ToolCallLimit(run_limit=1, exit_behavior=behavior)
    judged = judge([limit], {}, calls("search", "calc"), stops=False)
    assert outcomes(judged) == ["allowed", "blocked"]
    assert judged.used(limit) == Used(1, 1)
    assert len(judged.breaches) == 1


def test_a_limit_that_gives_up_ends_the_run() -> None:
    """With its last refusal it stops the batch, and its exit behaviour is that of `end`."""
    limit = ToolCallLimit("search", run_limit=1, give_up_after=2)
    patient = judge([limit], {}, calls("search", "search"))
    assert outcomes(patient) == ["allowed", "blocked"]
    assert patient.breaches[0].exit_behavior == "continue"
    judged = judge([limit], {}, calls("search", "search", "search"))
    assert outcomes(judged) == ["skipped", "blocked", "blocked"]
    assert judged.breaches[0].exit_behavior == "end"
    assert {each.limits[0].exit_behavior for each in judged.decisions} == {"end"}


def test_a_limit_that_asks_nobody_ends_the_run_at_a_model_call() -> None:
    """Its refusal says what it does; a call that the limit admits shows that the limit asks."""
    limit = ModelCallLimit(run_limit=1, exit_behavior="ask")
    judged = judge([limit], {}, [Call("model"), Call("model")])
    found = [decision.limits[0].exit_behavior for decision in judged.decisions]
    assert found == ["ask", "end"]


def test_a_limit_on_trial_lets_calls_run() -> None:
    """What it would refuse runs, is counted, is not charged to it, and ends nothing."""
    limit = ToolCallLimit("search", run_limit=1, exit_behavior="error", enforce=False)
    judged = judge([limit], {}, calls("search", "search", "search"))
    assert outcomes(judged) == ["allowed", "would_block", "would_block"]
    assert judged.used(limit) == Used(3, 3)
    assert judged.breaches == []
    found = [
        (each.charged, each.scope, each.run_before, each.run_used)
        for each in (decision.limits[0] for decision in judged.decisions)
    ]
    assert found == [(True, None, 0, 1), (False, "run", 1, 2), (False, "run", 2, 3)]


def test_a_limit_on_trial_beside_an_enforced_one() -> None:
    """Both judge by one count: the trial would block from 2 on, the enforced blocks at 3."""
    limits = [
        ToolCallLimit("search", run_limit=1, name="trial", enforce=False),
        ToolCallLimit("search", run_limit=2, name="hard"),
    ]
    judged = judge(limits, {}, calls("search", "search", "search"))
    assert outcomes(judged) == ["allowed", "would_block", "blocked"]
    assert refusing(judged) == [[], ["trial"], ["hard", "trial"]]
    charged = [[each.charged for each in decision.limits] for decision in judged.decisions]
    assert charged == [[True, True], [False, True], [False, False]]
    assert [each.limit.limit.name for each in judged.breaches] == ["hard"]


def test_what_would_block_is_skipped_with_its_batch() -> None:
    """A batch that an enforced limit stops does not run what a limit on trial lets through."""
    limits = [
        ToolCallLimit("search", run_limit=0, enforce=False),
        ToolCallLimit("calc", run_limit=0, exit_behavior="end"),
    ]
    assert outcomes(judge(limits, {}, calls("search", "calc"))) == ["skipped", "blocked"]


@EXITS
def test_a_breach_counts_as_if_all_had_run(behavior: ToolExitBehavior) -> None:
    """Three calls on a count of 1 are reported as 4, whatever the refusal does."""
    limit = ToolCallLimit(thread_limit=3, run_limit=2, exit_behavior=behavior)
    judged = judge([limit], {"__all__": Used(1, 0)}, calls("a", "b", "c"))
    assert judged.breaches == [
        Breach(
            ResolvedLimit.of(limit),
            behavior,
            judged.decisions[2],
            refusals=1,
            unchecked=False,
            thread_count=4,
            run_count=3,
            exceeded=(Exceeded("thread", 4, 3, None), Exceeded("run", 3, 2, None)),
        )
    ]


def test_breaches_come_in_the_order_of_the_limits() -> None:
    """Limits that refuse come in the user's order; the others are left out."""
    limits = [
        ToolCallLimit("calc", run_limit=0),
        ToolCallLimit(run_limit=9, exit_behavior="error"),
        ToolCallLimit("search", run_limit=1),
    ]
    judged = judge(limits, {}, calls("search", "search", "calc", "search"))
    assert [(each.limit.limit.name, each.refusals) for each in judged.breaches] == [
        ("tool:calc", 1),
        ("tool:search", 2),
    ]
    assert [each.decision for each in judged.breaches] == [
        judged.decisions[2],
        judged.decisions[1],
    ]


def test_a_refused_id_is_refused_everywhere() -> None:
    """Calls that share an id run together or not at all; each names the limits that match it."""
    batch = [
        Call("tool", "calc", "b"),
        Call("tool", "search", "a"),
        Call("tool", "search", "b"),
        Call("tool", "calc", "a"),
    ]
    limits = [ToolCallLimit("search", run_limit=1), ToolCallLimit("calc", run_limit=1)]
    judged = judge(limits, {}, batch)
    assert outcomes(judged) == ["allowed", "blocked", "allowed", "blocked"]
    assert refusing(judged) == [[], ["tool:search"], [], ["tool:calc"]]
    assert [judged.used(limit) for limit in limits] == [Used(1, 1), Used(1, 1)]


def test_a_twin_is_blocked_whatever_is_on_trial() -> None:
    """A call that only a limit on trial refuses is blocked with the call that shares its id."""
    limits = [
        ToolCallLimit("calc", run_limit=0, enforce=False),
        ToolCallLimit("search", run_limit=0),
    ]
    batch = [
        Call("tool", "calc", "x"),
        Call("tool", "calc", "twin"),
        Call("tool", "search", "twin"),
    ]
    assert outcomes(judge(limits, {}, batch)) == ["would_block", "blocked", "blocked"]


def test_an_id_is_refused_once() -> None:
    """Calls that share an id are one refusal; calls without one are one each."""
    batch = [Call("tool", "search", call_id) for call_id in ("twin", "twin", "other", None, None)]
    (breach,) = judge([ToolCallLimit("search", run_limit=0)], {}, batch).breaches
    assert breach.refusals == 4
    assert breach.decision.call is batch[0]


def test_a_call_can_be_charged_later() -> None:
    """Judged without charging, a call that fits is shown, deferred, and charged to no limit."""
    limit = ModelCallLimit(thread_limit=5, run_limit=1)
    judged = judge([limit], {"model": Used(3, 0)}, [Call("model")], charging=False)
    (found,) = judged.decisions[0].limits
    assert outcomes(judged) == ["allowed"]
    assert (found.charged, found.deferred) == (False, True)
    assert (found.thread_before, found.thread_used, found.thread_count) == (3, 4, 3)
    full = judge([limit], {"model": Used(3, 1)}, [Call("model")], charging=False)
    assert (outcomes(full), full.decisions[0].limits[0].deferred) == (["blocked"], False)


def test_a_charge_after_the_fact() -> None:
    """What judging would have charged is charged later, past the limit if it must be."""
    limit = ModelCallLimit(thread_limit=5, run_limit=1)
    ((resolved, rows),) = ResolvedLimits([ResolvedLimit.of(limit)]).asked(Call("model")).limits
    (expected,) = judge([limit], {"model": Used(3, 0)}, [Call("model")]).decisions[0].limits
    assert status(resolved, rows, {"model/thread": 3, "model/run": 0}, 1) == expected
    over = status(resolved, rows, {"model/thread": 5, "model/run": 1}, 1)
    assert (over.thread_used, over.run_used, over.charged, over.refused) == (6, 2, True, False)


def test_a_quota_refuses_like_a_limit() -> None:
    """A call that fits the thread and the run, but not the user's quota, does not run."""
    limit = resolve(ToolCallLimit(thread_limit=9, quotas=[QUOTA]), user(2, NOON))
    judged = judge([limit], {}, calls("search", "calc"), kept={"user": 1})
    assert outcomes(judged) == ["allowed", "blocked"]
    first, second = (decision.limits[0] for decision in judged.decisions)
    assert (first.charged, first.scope) == (True, None)
    assert first.quotas == (QuotaStatus("user_id", "ann", 1, 2, 2, NOON),)
    assert (second.charged, second.scope, second.resets_at) == (False, "user_id", NOON)
    assert second.quotas == (QuotaStatus("user_id", "ann", 2, 2, 2, NOON),)
    assert judged.breaches[0].exceeded == (Exceeded("user_id", 3, 2, NOON),)


def test_a_quota_per_thread_is_the_threads_count() -> None:
    """Without a window it holds what the thread has used in all, beside thread limits."""
    quota = ResolvedQuota("thread", 3, "7", "search:thread:7", per="thread")
    limits = [
        resolve(ToolCallLimit("search", quotas=[Quota(3)], name="quota"), quota),
        resolve(ToolCallLimit("search", thread_limit=5, name="limit"), thread_key=quota.key),
    ]
    judged = judge(limits, {"search": Used(2, 1)}, calls("search", "search"))
    assert outcomes(judged) == ["allowed", "blocked"]
    (refused,) = judged.decisions[1].refused_by
    assert (refused.limit, refused.scope, refused.thread_before) == ("quota", "thread", 3)
    assert refused.quotas == (QuotaStatus("thread", "7", 3, 3, 3, per="thread"),)


def test_an_outage_denies_what_needs_the_store() -> None:
    """Without the store, calls of a shared limit are refused; others are judged as usual."""
    limits = [
        resolve(ToolCallLimit("search", thread_limit=9, quotas=[QUOTA]), user(9), thread_key="t"),
        resolve(ToolCallLimit("calc", run_limit=1)),
        resolve(ToolCallLimit("search", run_limit=0, name="own")),
    ]
    used = {"search": Used(2, 0)}
    judged = judge(limits, used, calls("search", "calc", "calc"), outage="deny")
    assert outcomes(judged) == ["blocked", "allowed", "blocked"]
    found = [decision.limits[0] for decision in judged.decisions]
    assert [(each.reason, each.scope) for each in found] == [
        ("store", None),
        (None, None),
        ("exhausted", "run"),
    ]
    assert (found[0].quotas, found[0].thread_used, found[0].shared) == ((), 2, True)
    assert [each.unchecked for each in judged.breaches] == [True, False, False]


@pytest.mark.parametrize("behavior", ["end", "error"])
def test_an_outage_ends_what_a_limit_would_end(behavior: ToolExitBehavior) -> None:
    """A denied call does what any other refusal by its limit does."""
    limits = [
        resolve(ToolCallLimit("search", quotas=[QUOTA], exit_behavior=behavior), user(9)),
        resolve(ToolCallLimit(run_limit=9)),
    ]
    judged = judge(limits, {}, calls("search", "calc"), outage="deny")
    assert outcomes(judged) == ["blocked", "skipped"]
    assert judged.breaches[0].exit_behavior == behavior


def test_an_outage_does_not_make_a_trial_bite() -> None:
    """What a limit on trial could not check would have been refused, and runs."""
    limit = resolve(ToolCallLimit(quotas=[QUOTA], enforce=False), user(9))
    judged = judge([limit], {}, calls("search"), outage="deny")
    assert outcomes(judged) == ["would_block"]
    assert judged.decisions[0].limits[0].reason == "store"


def test_an_outage_allows_what_the_state_allows() -> None:
    """Thread and run limits still hold, by the state's own counts; no quota has one."""
    limit = ToolCallLimit("search", thread_limit=3, quotas=[QUOTA])
    resolved = resolve(limit, user(0), thread_key="thread")
    judged = judge([resolved], {"search": Used(2)}, calls("search", "search"), outage="allow")
    assert outcomes(judged) == ["allowed", "blocked"]
    assert [decision.limits[0].quotas for decision in judged.decisions] == [(), ()]
    assert judged.decisions[1].limits[0].scope == "thread"


@EXITS
def test_what_was_answered_before_holds(behavior: ToolExitBehavior) -> None:
    """A hook that runs again decides as before, even where a number is another one by now."""
    limit = ToolCallLimit("search", exit_behavior=behavior, quotas=[QUOTA])
    batch = calls("search", "calc")
    before = judge([resolve(limit, user(5))], {}, batch, kept={"user": 4})
    result = replace(before.result, replayed=True)
    lower = judge([resolve(limit, user(1))], {}, batch)
    again, breaches = lower.request.decided(result)
    assert [each.outcome for each in again] == [Outcome.ALLOWED] * 2
    assert again[0].limits[0].charged
    assert breaches == []
    refused = judge([resolve(limit, user(4))], {}, batch, kept={"user": 4})
    result = replace(refused.result, replayed=True)
    higher = judge([resolve(limit, user(9))], {}, batch)
    again, breaches = higher.request.decided(result)
    assert [each.outcome for each in again] == [each.outcome for each in refused.decisions]
    assert [each.exit_behavior for each in breaches] == [behavior]


def named(limits: list[ResolvedLimit]) -> list[ResolvedLimit]:
    """Limits with names of their own."""
    return [
        replace(each, limit=replace(each.limit, name=f"limit-{index}"))
        for index, each in enumerate(limits)
    ]


def resolved(
    limit: Limit,
    thread: int | None,
    run: int | None,
    quotas: dict[str, int],
    keys: dict[str, Any],
) -> ResolvedLimit:
    """A limit at these numbers, of which it has one; those on the same calls share their counts."""
    if thread is not None and run is not None:
        run = min(thread, run)
    elif thread is None and not quotas:
        run = run or 0
    numbers: dict[str, Any] = {"thread_limit": thread, "run_limit": run}
    limit = replace(limit, **numbers, quotas=(QUOTA,) if quotas else ())
    return ResolvedLimit.of(
        limit,
        quotas=tuple(starmap(partial(quota_of, limit.counter), quotas.items())),
        **keys,
    )


def quota_of(counter: str, scope: str, most: int) -> ResolvedQuota:
    """A quota of the user, of the thread, or of the thread in an hour."""
    ends = NOON if scope == "hourly" else None
    per = "thread" if scope in {"hourly", "lifetime"} else scope
    kept = "user" if scope in {"user_id", "again"} else scope
    return ResolvedQuota(scope, most, "7", f"{counter}/{kept}", ends, per)


NUMBERS = st.sampled_from([0, 2, 3, 4, 6, 9, 12])
"""Most calls: as many as a batch has, more or less."""
COUNTERS = ("search", "calc,search", "__all__-fetch", "model")
KEPT = st.lists(st.integers(0, 3), min_size=5, max_size=5).map(
    lambda numbers: {
        f"{counter}/{kept}": numbers[(row + column) % 5]
        for row, counter in enumerate(COUNTERS)
        for column, kept in enumerate(("thread", "run", "user", "hourly"))
    }
)
WAYS: list[dict[str, Any]] = [
    {},
    {"give_up_after": 2},
    {"exit_behavior": "end"},
    {"exit_behavior": "error"},
    {"enforce": False},
    {"enforce": False, "exit_behavior": "end"},
]
UNNUMBERED: list[Limit] = [
    ToolCallLimit(tools, exclude=exclude, run_limit=0, **way)
    for tools, exclude in (
        ("search", ()),
        ("search", ()),
        (("calc", "search"), ()),
        (None, ("fetch",)),
    )
    for way in WAYS
]
UNNUMBERED += [
    ModelCallLimit(run_limit=0, exit_behavior="finalize"),
    ModelCallLimit(run_limit=0, enforce=False),
]
LIMITS = st.lists(
    st.builds(
        resolved,
        st.sampled_from(UNNUMBERED),
        st.none() | NUMBERS,
        st.none() | NUMBERS,
        # Two of one limit share a count.
        st.dictionaries(
            st.sampled_from(["user_id", "again", "hourly", "lifetime"]), NUMBERS, max_size=2
        ),
        st.sampled_from([{}, {}, {"thread_key": "thread"}, {"run_key": "run"}]),
    ),
    min_size=1,
    max_size=4,
).map(named)
CALLS = st.builds(
    lambda tool, call_id, amount: (
        Call("tool", tool, call_id, amount) if tool else Call("model", amount=amount)
    ),
    st.sampled_from(["search", "calc", "fetch", "search", "calc", None]),
    st.sampled_from(["a", "b", "c", None]),
    st.sampled_from([1, 1, 2, 3]),
)


@dataclass(frozen=True)
class Batch:
    """Calls and what they are judged by."""

    limits: list[ResolvedLimit]
    kept: dict[str, int]
    calls: list[Call]
    outage: Outage | None
    stops: bool
    charging: bool

    def judged(self) -> Judged:
        return judge(
            self.limits,
            {},
            self.calls,
            stops=self.stops,
            charging=self.charging,
            outage=self.outage,
            kept=self.kept,
        )

    def together(self, index: int) -> list[int]:
        """Those that share an id with a call, and the call itself."""
        call_id = self.calls[index].id
        if call_id is None:
            return [index]
        return [i for i, call in enumerate(self.calls) if call.id == call_id]

    def start(self, limit: ResolvedLimit, scope: str) -> int:
        """The count of a scope before the batch."""
        kept = {"user_id": "user", "again": "user", "lifetime": "thread"}.get(scope, scope)
        return self.kept[f"{limit.limit.counter}/{kept}"]

    def count(self, limit: ResolvedLimit, scope: str, ran: Iterable[int]) -> int:
        """The count of a scope when these calls have run."""
        calls = [self.calls[index] for index in ran]
        return self.start(limit, scope) + sum(
            call.amount for call in calls if limit.limit.matches(call)
        )

    def exceeded(self, limit: ResolvedLimit, ran: Iterable[int]) -> dict[str, int]:
        """The scopes whose numbers are exceeded when these calls have run, with the numbers."""
        numbers = {"thread": limit.thread_limit, "run": limit.run_limit}
        if self.outage is None:
            numbers |= {quota.scope: quota.limit for quota in limit.quotas}
        ran = list(ran)
        return {
            scope: number
            for scope, number in numbers.items()
            if number is not None and self.count(limit, scope, ran) > number
        }

    def refusal(self, limit: ResolvedLimit, index: int, admitted: set[int]) -> str | None:
        """The scope at which a limit refuses a call, after those that were admitted."""
        together = self.together(index)
        if not any(limit.limit.matches(self.calls[each]) for each in together):
            return None
        if self.outage == "deny" and limit.shared:
            return "store"
        earlier = {each for each in admitted if self.together(each)[0] < together[0]}
        return next(iter(self.exceeded(limit, [*earlier, *together])), None)

    def refusals(self, limit: ResolvedLimit, refused: list[dict[str, str | None]]) -> int:
        """How many calls a limit refuses; those that share an id are one."""
        name = limit.limit.name
        return len({self.together(i)[0] for i, by in enumerate(refused) if by[name] is not None})

    def stopped_by(self, limit: ResolvedLimit, refusals: int) -> bool:
        """Whether so many refusals by a limit stop the batch."""
        if not (self.stops and limit.limit.enforce):
            return False
        after = limit.limit.give_up_after
        if after is not None:
            return refusals >= after
        return limit.limit.exit_behavior != "continue" and refusals > 0


BATCHES = st.builds(
    Batch,
    LIMITS,
    KEPT,
    st.lists(CALLS, min_size=2, max_size=6),
    st.sampled_from([None, None, "deny", "allow"]),
    st.sampled_from([True, True, False]),
    st.booleans(),
)


@given(batch=BATCHES)
def test_a_call_is_decided_by_what_was_admitted_before_it(batch: Batch) -> None:
    """A limit refuses it exactly where the calls before it and it itself exceed a number.

    Calls that share an id are judged at once, where the first of them stands.
    """
    decisions = batch.judged().decisions
    assert [decision.call for decision in decisions] == batch.calls
    admitted = {
        index for index, each in enumerate(decisions) if each.outcome is not Outcome.BLOCKED
    }
    refused = [
        {each.limit.name: batch.refusal(each, index, admitted) for each in batch.limits}
        for index in range(len(batch.calls))
    ]
    stopped = any(batch.stopped_by(each, batch.refusals(each, refused)) for each in batch.limits)
    for decision, by in zip(decisions, refused, strict=True):
        matching = [each for each in batch.limits if each.limit.matches(decision.call)]
        assert [(each.limit, each.refusal_scope) for each in decision.limits] == [
            (each.limit.name, by[each.limit.name]) for each in matching
        ]
        if any(each.limit.enforce and by[each.limit.name] for each in batch.limits):
            expected = Outcome.BLOCKED
        elif stopped:
            expected = Outcome.SKIPPED
        elif any(by[each.limit.name] for each in matching):
            expected = Outcome.WOULD_BLOCK
        else:
            expected = Outcome.ALLOWED
        assert decision.outcome is expected


@given(batch=BATCHES)
def test_counts_grow_by_the_calls_that_run(batch: Batch) -> None:
    """A status shows the counts with what ran before, and with its own call, if that runs."""
    ran: list[int] = []
    judged = batch.judged()
    by_name = {each.limit.name: each for each in batch.limits}
    for index, decision in enumerate(judged.decisions):
        runs = decision.outcome in {Outcome.ALLOWED, Outcome.WOULD_BLOCK}
        after = [*ran, index] if runs else ran
        for found in decision.limits:
            limit = by_name[found.limit]
            counts = [
                ("thread", found.thread_before, found.thread_used),
                ("run", found.run_before, found.run_used),
                *((each.scope, each.before, each.used) for each in found.quotas),
            ]
            assert counts == [
                (scope, batch.count(limit, scope, ran), batch.count(limit, scope, after))
                for scope, *_ in counts
            ]
            assert len(found.quotas) == (0 if batch.outage else len(limit.quotas))
            assert found.charged == (runs and batch.charging and not found.refused)
            assert found.deferred == (runs and not batch.charging)
        ran = after
    for each in batch.limits:
        if any(each.limit.matches(call) for call in batch.calls):
            expected = Used(batch.count(each, "thread", ran), batch.count(each, "run", ran))
            assert judged.used(each.limit) == expected
            # Nothing is let through that an enforced limit does not admit.
            if ran and each.limit.enforce:
                over = batch.exceeded(each, ran)
                assert all(
                    batch.count(each, scope, []) == batch.count(each, scope, ran) for scope in over
                )


@given(batch=BATCHES)
def test_a_breach_tells_what_its_limit_refused(batch: Batch) -> None:
    """There is one for each enforced limit that refuses: its first refusal, and the counts."""
    judged = batch.judged()
    expected = []
    for each in batch.limits:
        name = each.limit.name
        refused = [
            {found.limit: found.refusal_scope for found in decision.limits}
            for decision in judged.decisions
        ]
        by = [index for index, scopes in enumerate(refused) if scopes.get(name)]
        if not by or not each.limit.enforce:
            continue
        refusals = len({batch.together(index)[0] for index in by})
        everything = range(len(batch.calls))
        gives_up = each.limit.give_up_after is not None and batch.stopped_by(each, refusals)
        ends = {quota.scope: quota.resets_at for quota in each.quotas}
        expected.append(
            Breach(
                each,
                "end" if gives_up else each.limit.exit_behavior,
                judged.decisions[by[0]],
                refusals,
                unchecked=refused[by[0]][name] == "store",
                thread_count=batch.count(each, "thread", everything),
                run_count=batch.count(each, "run", everything),
                exceeded=tuple(
                    Exceeded(scope, batch.count(each, scope, everything), number, ends.get(scope))
                    for scope, number in batch.exceeded(each, everything).items()
                ),
            )
        )
    assert judged.breaches == expected


@given(batch=BATCHES, numbers=st.lists(NUMBERS, min_size=4, max_size=4))
def test_an_old_answer_is_decided_as_it_was(batch: Batch, numbers: list[int]) -> None:
    """Whatever the numbers of its limits are by now, what ran runs, and what did not does not."""
    before = batch.judged()
    limits = [
        replace(
            each,
            run_limit=number,
            thread_limit=number,
            quotas=tuple(replace(quota, limit=number) for quota in each.quotas),
        )
        for each, number in zip(batch.limits, numbers, strict=False)
    ]
    now = replace(batch, limits=limits).judged()
    again, breaches = now.request.decided(
        replace(before.result, replayed=True), charging=batch.charging
    )
    assert [each.outcome for each in again] == [each.outcome for each in before.decisions]
    assert [[each.limit for each in decision.refused_by] for decision in again] == refusing(before)
    assert [each.exit_behavior for each in breaches] == [
        each.exit_behavior for each in before.breaches
    ]
