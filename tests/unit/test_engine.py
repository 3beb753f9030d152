"""The judge: examples first, then what must hold for every batch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from langchain_quota import Call, Decision, ModelCallLimit, Outcome, Quota, ToolCallLimit
from langchain_quota.engine import (
    Limits,
    Outage,
    Plan,
    Used,
    all_admitted,
    charge,
    exhausted_scope,
    judge,
    plan,
    stops,
)
from langchain_quota.limits import (
    Exit,
    Limit,
    ModelExitBehavior,
    QuotaTerms,
    Terms,
    ToolExitBehavior,
)
from langchain_quota.reservation import Grant, Settlement, admit

TOOLS = ("search", "calc", "fetch")
RUNS = {Outcome.ALLOWED, Outcome.WOULD_BLOCK}


def calls(*tools: str, amount: int = 1) -> list[Call]:
    return [Call("tool", tool, f"call-{index}", amount) for index, tool in enumerate(tools)]


def outcomes(decisions: Sequence[Decision]) -> list[str]:
    return [decision.outcome.value for decision in decisions]


def test_calls_within_the_limit_are_charged() -> None:
    """Calls that fit are allowed, and the usage grows by them in both scopes."""
    limit = ToolCallLimit("search", thread_limit=5, run_limit=2)
    verdict = judge([limit], {"search": Used(1, 0)}, calls("search", "search"))
    assert outcomes(verdict.decisions) == ["allowed", "allowed"]
    assert verdict.usage == {"search": Used(3, 2)}
    assert verdict.exit is None
    assert verdict.breaches == ()


def test_calls_are_judged_on_what_the_ones_before_left() -> None:
    """Of three parallel calls at a run limit of 1, the first runs."""
    verdict = judge([ToolCallLimit(run_limit=1)], {}, calls("search", "calc", "search"))
    assert outcomes(verdict.decisions) == ["allowed", "blocked", "blocked"]
    assert verdict.usage == {"__all__": Used(1, 1)}
    assert verdict.exit == "continue"


def test_a_standing_tells_before_and_after() -> None:
    """Each decision shows the counts that it found and left."""
    limit = ToolCallLimit("search", thread_limit=9, run_limit=2)
    first, _, third = judge([limit], {"search": Used(4, 0)}, calls(*["search"] * 3)).decisions
    (standing,) = first.standings
    assert (standing.thread_before, standing.thread_used, standing.thread_limit) == (4, 5, 9)
    assert (standing.run_before, standing.run_used, standing.run_limit) == (0, 1, 2)
    assert (standing.charged, standing.refused, standing.scope) == (True, False, None)
    (standing,) = third.standings
    assert (standing.run_before, standing.run_used) == (2, 2)
    assert (standing.charged, standing.refused, standing.scope) == (False, True, "run")


def test_the_thread_is_named_before_the_run() -> None:
    """Where both thresholds are exhausted, the refusal is attributed to the thread."""
    terms = Terms.of(ToolCallLimit(thread_limit=2, run_limit=2))
    assert exhausted_scope(terms, Used(2, 2), 1) == "thread"
    assert exhausted_scope(terms, Used(1, 2), 1) == "run"
    assert exhausted_scope(terms, Used(1, 1), 1) is None


def test_a_call_refused_by_one_limit_is_charged_to_none() -> None:
    """With search=1 and all=2 a blocked search leaves room for another tool."""
    limits = [ToolCallLimit("search", run_limit=1), ToolCallLimit(run_limit=2)]
    verdict = judge(limits, {}, calls("search", "search", "calc"))
    assert outcomes(verdict.decisions) == ["allowed", "blocked", "allowed"]
    assert verdict.usage == {"search": Used(1, 1), "__all__": Used(2, 2)}
    blocked = verdict.decisions[1]
    assert [standing.limit for standing in blocked.refused_by] == ["tool:search"]
    assert [standing.charged for standing in blocked.standings] == [False, False]


def test_two_limits_on_one_tool_count_once() -> None:
    """Two thresholds over one counter charge a call once, and the lower one refuses."""
    limits = [
        ToolCallLimit("search", run_limit=4, name="hard"),
        ToolCallLimit("search", run_limit=2, name="soft"),
    ]
    verdict = judge(limits, {}, calls("search", "search", "search"))
    assert verdict.usage == {"search": Used(2, 2)}
    assert [standing.limit for standing in verdict.decisions[2].refused_by] == ["soft"]


def test_calls_that_no_limit_matches_are_allowed() -> None:
    """A call without a limit is allowed and has no standings."""
    verdict = judge([ModelCallLimit(run_limit=0)], {}, calls("search"))
    assert outcomes(verdict.decisions) == ["allowed"]
    assert verdict.decisions[0].standings == ()


def test_usage_has_only_the_counters_of_the_limits() -> None:
    """Counts of things that are not limited are neither returned nor invented."""
    verdict = judge([ToolCallLimit("search", run_limit=1)], {"calc": Used(5, 5)}, calls("calc"))
    assert verdict.usage == {"search": Used(0, 0)}


def test_no_calls() -> None:
    """An empty batch is judged to nothing and changes nothing."""
    verdict = judge([ToolCallLimit(run_limit=1)], {"__all__": Used(3, 1)}, [])
    assert verdict.decisions == ()
    assert verdict.usage == {"__all__": Used(3, 1)}
    assert verdict.exit is None


def test_amounts_are_charged_whole_or_not_at_all() -> None:
    """A call that costs more than is left is refused; a cheaper one behind it still fits."""
    batch = [
        Call("tool", "search", "a", 3),
        Call("tool", "search", "b", 3),
        Call("tool", "search", "c", 2),
    ]
    verdict = judge([ToolCallLimit(run_limit=5)], {}, batch)
    assert outcomes(verdict.decisions) == ["allowed", "blocked", "allowed"]
    assert verdict.usage == {"__all__": Used(5, 5)}
    assert verdict.breaches[0].run_count == 8


@pytest.mark.parametrize(
    ("behaviors", "expected"),
    [
        (["continue", "continue"], "continue"),
        (["continue", "end"], "end"),
        (["end", "error"], "error"),
        (["error", "continue"], "error"),
    ],
)
def test_the_strongest_exit_wins(behaviors: list[ToolExitBehavior], expected: Exit) -> None:
    """Where several limits refuse, error goes before end, and end before continue."""
    for order in (behaviors, behaviors[::-1]):
        limits = [
            ToolCallLimit("search", run_limit=0, exit_behavior=behavior, name=behavior + str(index))
            for index, behavior in enumerate(order)
        ]
        assert judge(limits, {}, calls("search")).exit == expected


@pytest.mark.parametrize(("other", "expected"), [("continue", "finalize"), ("error", "error")])
def test_to_finalize_is_as_strong_as_to_end(other: ToolExitBehavior, expected: Exit) -> None:
    """A model limit that finalizes goes before continue and behind error, in either order."""
    limits: list[Limit] = [
        ToolCallLimit(run_limit=0, exit_behavior=other),
        ModelCallLimit(run_limit=0, exit_behavior="finalize"),
    ]
    for order in (limits, limits[::-1]):
        assert judge(order, {}, [*calls("search"), Call("model")]).exit == expected


def test_a_limit_that_does_not_refuse_has_no_say() -> None:
    """An unbreached `error` limit does not turn another limit's `continue` into an exception."""
    limits = [
        ToolCallLimit("search", run_limit=0),
        ToolCallLimit(run_limit=9, exit_behavior="error"),
    ]
    verdict = judge(limits, {}, calls("search", "calc"))
    assert verdict.exit == "continue"
    assert [breach.limit.name for breach in verdict.breaches] == ["tool:search"]


@pytest.mark.parametrize("behavior", ["end", "error"])
def test_a_stopped_batch_is_charged_to_none(behavior: ToolExitBehavior) -> None:
    """What was admitted before the breach is skipped, and the usage is as before the batch."""
    limits = [
        ToolCallLimit("search", thread_limit=2, exit_behavior=behavior),
        ToolCallLimit(run_limit=9),
    ]
    usage = {"search": Used(1, 0), "__all__": Used(4, 0)}
    verdict = judge(limits, usage, calls("search", "search", "calc"))
    assert outcomes(verdict.decisions) == ["skipped", "blocked", "skipped"]
    assert verdict.usage == usage
    standings = [standing for each in verdict.decisions for standing in each.standings]
    assert not any(standing.charged for standing in standings)
    assert all(standing.thread_used == standing.thread_before for standing in standings)
    assert all(standing.run_used == standing.run_before for standing in standings)
    assert [standing.limit for standing in verdict.decisions[1].refused_by] == ["tool:search"]


@pytest.mark.parametrize("behavior", ["end", "error"])
def test_a_batch_that_may_not_be_stopped_goes_on(behavior: ToolExitBehavior) -> None:
    """With `may_stop=False` every refusal acts as `continue`, and the rest is charged."""
    limit = ToolCallLimit(run_limit=1, exit_behavior=behavior)
    verdict = judge([limit], {}, calls("search", "calc"), may_stop=False)
    assert outcomes(verdict.decisions) == ["allowed", "blocked"]
    assert verdict.usage == {"__all__": Used(1, 1)}
    assert verdict.exit == "continue"
    assert len(verdict.breaches) == 1


@pytest.mark.parametrize("behavior", ["continue", "end", "error"])
def test_breaches_count_as_if_the_refused_calls_had_run(behavior: ToolExitBehavior) -> None:
    """Three calls on a count of 1 are told as 4, whatever the refusal does."""
    limit = ToolCallLimit(thread_limit=3, run_limit=2, exit_behavior=behavior)
    verdict = judge([limit], {"__all__": Used(1, 0)}, calls("a", "b", "c"))
    (breach,) = verdict.breaches
    assert (breach.thread_count, breach.run_count) == (4, 3)
    assert breach.limit is limit
    assert breach.decision.call.id == "call-2"


def test_breaches_stand_in_the_order_of_the_limits() -> None:
    """The final message names the limits in the user's order, not in that of the calls."""
    limits = [ToolCallLimit("calc", run_limit=0), ToolCallLimit("search", run_limit=0)]
    verdict = judge(limits, {}, calls("search", "calc"))
    assert [breach.limit.name for breach in verdict.breaches] == ["tool:calc", "tool:search"]


def test_a_refused_id_is_refused_everywhere() -> None:
    """Calls that share an id are one call: if one is refused all are, and none is charged."""
    batch = [
        Call("tool", "calc", "twin"),
        Call("tool", "search", "twin"),
        Call("tool", "calc", "single"),
    ]
    limits = [ToolCallLimit("search", run_limit=0), ToolCallLimit("calc", run_limit=1)]
    verdict = judge(limits, {}, batch)
    assert outcomes(verdict.decisions) == ["blocked", "blocked", "allowed"]
    assert verdict.usage == {"search": Used(0, 0), "calc": Used(1, 1)}


def test_calls_without_an_id_are_not_one_call() -> None:
    """A missing id is no id: two calls without one are judged one by one."""
    batch = [Call("tool", "search"), Call("tool", "search")]
    verdict = judge([ToolCallLimit(run_limit=1)], {}, batch)
    assert outcomes(verdict.decisions) == ["allowed", "blocked"]


@pytest.mark.parametrize("behavior", ["continue", "end", "error"])
def test_a_refused_id_names_the_limit_that_refused_it(behavior: ToolExitBehavior) -> None:
    """Two calls of one id over a limit of 1 are a breach of that limit like any other."""
    limit = ToolCallLimit(run_limit=1, exit_behavior=behavior)
    verdict = judge([limit], {}, [Call("tool", "search", "a"), Call("tool", "search", "a")])
    assert outcomes(verdict.decisions) == ["blocked", "blocked"]
    assert any(decision.refused_by for decision in verdict.decisions)
    assert [breach.limit for breach in verdict.breaches] == [limit]
    assert verdict.exit == behavior


def test_a_call_can_be_charged_later() -> None:
    """Judged without charging, a call that fits is allowed, shown, and charged to no limit."""
    limit = ModelCallLimit(thread_limit=5, run_limit=1)
    used = {"model": Used(3, 0)}
    (decision,) = judge([limit], used, [Call("model")], charging=False).decisions
    assert decision.outcome is Outcome.ALLOWED
    assert [standing.charged for standing in decision.standings] == [False]
    full = judge([limit], {"model": Used(3, 1)}, [Call("model")], charging=False)
    assert outcomes(full.decisions) == ["blocked"]


def test_a_charge_after_the_fact() -> None:
    """What judging would have charged is charged later, past the limit if it must be."""
    limit = ModelCallLimit(thread_limit=5, run_limit=1)
    (decision,) = judge([limit], {"model": Used(3, 0)}, [Call("model")]).decisions
    assert charge(limit, Used(3, 0), 1) == decision.standings[0]
    over = charge(limit, Used(5, 1), 1)
    assert (over.thread_used, over.run_used, over.charged, over.refused) == (6, 2, True, False)


def test_a_deferred_call_is_kept_as_it_was() -> None:
    """What is let through and counted later leaves the kept count where it is."""
    limit = ModelCallLimit(thread_limit=5)
    (decision,) = judge([limit], {"model": Used(3, 0)}, [Call("model")], charging=False).decisions
    (standing,) = decision.standings
    assert (standing.deferred, standing.thread_count, standing.thread_used) == (True, 3, 4)


def test_a_limit_on_trial_lets_calls_run() -> None:
    """What it would refuse runs, is counted, is not charged to it, and crosses nothing."""
    limit = ToolCallLimit("search", run_limit=1, exit_behavior="error", enforce=False)
    verdict = judge([limit], {}, calls("search", "search", "search"))
    assert outcomes(verdict.decisions) == ["allowed", "would_block", "would_block"]
    assert verdict.usage == {"search": Used(3, 3)}
    assert (verdict.exit, verdict.breaches) == (None, ())
    standings = [decision.standings[0] for decision in verdict.decisions]
    assert [each.charged for each in standings] == [True, False, False]
    assert [each.scope for each in standings] == [None, "run", "run"]
    assert [(each.run_before, each.run_used) for each in standings] == [(0, 1), (1, 2), (2, 3)]
    assert [each.crossed("run", 0.8) for each in standings] == [None] * 3
    assert not any(each.enforced for each in standings)


def test_a_limit_on_trial_beside_an_enforced_one() -> None:
    """Both are judged on one count: the trial would block from 2 on, the enforced blocks at 3."""
    limits = [
        ToolCallLimit("search", run_limit=2, name="hard"),
        ToolCallLimit("search", run_limit=1, name="trial", enforce=False),
    ]
    verdict = judge(limits, {}, calls("search", "search", "search"))
    assert outcomes(verdict.decisions) == ["allowed", "would_block", "blocked"]
    assert verdict.usage == {"search": Used(2, 2)}
    charged = [[each.charged for each in decision.standings] for decision in verdict.decisions]
    assert charged == [[True, True], [True, False], [False, False]]
    refused = [[each.limit for each in decision.refused_by] for decision in verdict.decisions]
    assert refused == [[], ["trial"], ["hard", "trial"]]
    assert [breach.limit.name for breach in verdict.breaches] == ["hard"]


def test_what_would_block_is_skipped_with_its_batch() -> None:
    """A batch that an enforced limit stops does not run what a limit on trial let through."""
    limits = [
        ToolCallLimit("search", run_limit=0, enforce=False),
        ToolCallLimit("calc", run_limit=0, exit_behavior="end"),
    ]
    verdict = judge(limits, {}, calls("search", "calc"))
    assert outcomes(verdict.decisions) == ["skipped", "blocked"]
    assert verdict.usage == {"search": Used(), "calc": Used()}


def test_a_standing_carries_what_its_limit_says() -> None:
    """A limit's own near share, whether it is enforced, and what was computed reach telemetry."""
    limit = ToolCallLimit(thread_limit=lambda *_: 5, run_limit=2, near=0.5, enforce=False)
    terms = Terms.of(limit, thread_limit=5)
    (standing,) = judge([terms], {}, calls("search")).decisions[0].standings
    assert (standing.near, standing.enforced, standing.computed) == (0.5, False, ("thread",))
    assert (standing.thread_limit, standing.run_limit) == (5, 2)
    (standing,) = judge([ToolCallLimit(run_limit=1)], {}, calls("search")).decisions[0].standings
    assert (standing.near, standing.enforced, standing.computed) == (None, True, ())


@pytest.mark.parametrize("computed", [0, 2, None])
def test_a_computed_limit_is_judged_by_its_number(computed: int | None) -> None:
    """A limit that is a function holds at the number of this moment; without one all runs."""
    terms = Terms.of(ToolCallLimit(run_limit=lambda *_: 99), run_limit=computed)
    verdict = judge([terms], {}, calls("search", "search", "search"))
    allowed = 3 if computed is None else computed
    assert outcomes(verdict.decisions) == ["allowed"] * allowed + ["blocked"] * (3 - allowed)


def test_a_limit_of_several_tools_counts_them_together() -> None:
    """Two tools under one limit share its count; a third one is not concerned."""
    verdict = judge(
        [ToolCallLimit(("search", "fetch"), run_limit=2)],
        {},
        calls("search", "calc", "fetch", "search"),
    )
    assert outcomes(verdict.decisions) == ["allowed", "allowed", "allowed", "blocked"]
    assert verdict.usage == {"fetch,search": Used(2, 2)}


def test_an_excluded_tool_is_not_counted() -> None:
    """All tools but one: that one runs past the limit, and is not counted."""
    verdict = judge(
        [ToolCallLimit(run_limit=1, exclude=("calc",))],
        {},
        calls("calc", "search", "calc", "fetch"),
    )
    assert outcomes(verdict.decisions) == ["allowed", "allowed", "allowed", "blocked"]
    assert list(verdict.usage.values()) == [Used(1, 1)]


@pytest.mark.parametrize(
    ("exit_behavior", "expected"),
    [(None, False), ("continue", False), ("finalize", True), ("end", True), ("error", True)],
)
def test_which_exits_stop_the_batch(exit_behavior: Exit | None, expected: bool) -> None:  # noqa: FBT001 - a row of the table
    """Only no refusal, and one that continues, let the rest of the batch run."""
    assert stops(exit_behavior) is expected


def test_ending_terms_end() -> None:
    """A limit whose terms were made to end the run stops its batch with the same numbers."""
    limit = ToolCallLimit(run_limit=1)
    verdict = judge([Terms.of(limit).ending()], {}, calls("search", "search"))
    assert outcomes(verdict.decisions) == ["skipped", "blocked"]
    assert verdict.exit == "end"
    assert verdict.decisions[1].standings[0].exit_behavior == "end"


def test_each_breach_tells_how_often_it_refused() -> None:
    """Refusals are counted by limit, for those that give up after some."""
    limits = [ToolCallLimit("search", run_limit=1), ToolCallLimit(run_limit=2)]
    verdict = judge(limits, {}, calls("search", "search", "calc", "search", "calc"))
    assert {breach.limit.name: breach.refusals for breach in verdict.breaches} == {
        "tool:search": 2,
        "tool:*": 2,
    }


def test_an_id_is_refused_once() -> None:
    """Calls that share an id are one refusal; calls without one are one each."""
    limit = ToolCallLimit("search", run_limit=0)
    batch = [Call("tool", "search", call_id) for call_id in ("twin", "twin", "other", None, None)]
    (breach,) = judge([limit], {}, batch).breaches
    assert breach.refusals == 4
    assert breach.decision.call == batch[0]


TWINS = [
    Call("tool", "calc", "b"),
    Call("tool", "search", "a"),
    Call("tool", "search", "b"),
    Call("tool", "calc", "a"),
]
"""Two ids, each for one call of either tool."""


def test_twins_of_other_tools_are_one_call() -> None:
    """Under one call of each tool the first id runs for both, and the other for neither."""
    limits = [ToolCallLimit("search", run_limit=1), ToolCallLimit("calc", run_limit=1)]
    verdict = judge(limits, {}, TWINS)
    assert outcomes(verdict.decisions) == ["allowed", "blocked", "allowed", "blocked"]
    assert verdict.usage == {"search": Used(1, 1), "calc": Used(1, 1)}
    refused = [[each.limit for each in decision.refused_by] for decision in verdict.decisions]
    assert refused == [[], ["tool:search"], [], ["tool:calc"]]
    assert [breach.limit.name for breach in verdict.breaches] == ["tool:search", "tool:calc"]


def test_a_twin_is_blocked_whatever_is_on_trial() -> None:
    """A limit on trial refuses no twin: only the one that an enforced limit refuses tears it."""
    limits = [
        ToolCallLimit("calc", run_limit=0, enforce=False),
        ToolCallLimit("search", run_limit=0),
    ]
    batch = [
        Call("tool", "calc", "x"),
        Call("tool", "calc", "twin"),
        Call("tool", "search", "twin"),
    ]
    verdict = judge(limits, {}, batch)
    assert outcomes(verdict.decisions) == ["would_block", "blocked", "blocked"]
    assert verdict.usage == {"calc": Used(1, 1), "search": Used()}


def test_used_is_charged_and_taken_back() -> None:
    """A charge and a refund of the same amount leave the counts as they were."""
    assert Used(3, 1).plus(2) == Used(5, 3)
    assert Used(3, 1).plus(2).plus(-2) == Used(3, 1)


THRESHOLD = st.none() | st.integers(0, 6)


@st.composite
def limit_lists(draw: st.DrawFn) -> list[Limit]:
    """One to four limits with names of their own, often on the same tools, some not enforced."""
    limits: list[Limit] = []
    for index in range(draw(st.integers(1, 4))):
        thread, run = draw(THRESHOLD), draw(THRESHOLD)
        assume(thread is not None or run is not None)
        name, enforce = f"limit-{index}", draw(st.integers(0, 3)) > 0
        if draw(st.integers(0, 4)) == 0:
            endings = ["end", "error", *(["finalize"] if enforce else [])]
            ending: ModelExitBehavior = draw(st.sampled_from(endings))
            limits.append(
                ModelCallLimit(
                    thread_limit=thread,
                    run_limit=run,
                    exit_behavior=ending,
                    name=name,
                    enforce=enforce,
                )
            )
            continue
        if thread is not None and run is not None:
            run = min(run, thread)
        behavior: ToolExitBehavior = draw(st.sampled_from(["continue", "end", "error"]))
        tools = draw(st.none() | st.sampled_from(TOOLS) | st.just(("search", "calc")))
        excluded = draw(st.sampled_from([(), (), ("calc",)])) if tools is None else ()
        limits.append(
            ToolCallLimit(
                tools,
                exclude=excluded,
                thread_limit=thread,
                run_limit=run,
                exit_behavior=behavior,
                name=name,
                enforce=enforce,
            )
        )
    return limits


USAGES = st.dictionaries(
    st.sampled_from([*TOOLS, "calc,search", "__all__", "__all__-calc", "model"]),
    st.builds(Used, st.integers(0, 8), st.integers(0, 8)),
)


@st.composite
def batches(draw: st.DrawFn, *, unique: bool = False) -> list[Call]:
    """Up to eight calls of tools and model, of amounts from 1, some of them sharing an id."""
    batch = []
    for index in range(draw(st.integers(0, 8))):
        amount = draw(st.integers(1, 3))
        tool = draw(st.sampled_from([*TOOLS, None]))
        if tool is None:
            batch.append(Call("model", amount=amount))
            continue
        id_ = index if unique else draw(st.integers(0, index))
        batch.append(Call("tool", tool, f"call-{id_}", amount))
    return batch


ANY = given(limits=limit_lists(), usage=USAGES, batch=batches())


@ANY
def test_one_decision_for_each_call(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call]
) -> None:
    """Every call has exactly one decision, in order, with a standing for each limit matching it."""
    verdict = judge(limits, usage, batch)
    assert [decision.call for decision in verdict.decisions] == batch
    for decision in verdict.decisions:
        matching = [limit.name for limit in limits if limit.matches(decision.call)]
        assert [standing.limit for standing in decision.standings] == matching


@ANY
def test_no_limit_is_exceeded(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call]
) -> None:
    """Whatever is admitted, no count passes an enforced threshold that it had not passed before."""
    verdict = judge(limits, usage, batch)
    for terms in (Terms.of(limit) for limit in limits if limit.enforce):
        counter = terms.limit.counter
        before, after = usage.get(counter, Used()), verdict.usage[counter]
        if terms.thread_limit is not None:
            assert after.thread <= max(terms.thread_limit, before.thread)
        if terms.run_limit is not None:
            assert after.run <= max(terms.run_limit, before.run)


@ANY
def test_usage_grows_by_what_runs(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call]
) -> None:
    """The counts afterwards are those before plus the amounts of the calls that run, once each."""
    verdict = judge(limits, usage, batch)
    for limit in limits:
        ran = sum(
            decision.call.amount
            for decision in verdict.decisions
            if decision.outcome in RUNS and limit.matches(decision.call)
        )
        assert verdict.usage[limit.counter] == usage.get(limit.counter, Used()).plus(ran)


@ANY
def test_charged_means_run_and_not_refused(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call]
) -> None:
    """A call that runs is charged to every limit that does not refuse it; any other to none."""
    for decision in judge(limits, usage, batch).decisions:
        runs = decision.outcome in RUNS
        for standing in decision.standings:
            assert standing.charged == (runs and not standing.refused)
            assert standing.refused == (standing.scope is not None)
            assert not standing.deferred
            grown = decision.call.amount if runs else 0
            assert standing.thread_used == standing.thread_before + grown
            assert standing.run_used == standing.run_before + grown
        if decision.outcome is not Outcome.BLOCKED:
            assert not any(standing.enforced for standing in decision.refused_by)
        if runs:
            would_block = decision.outcome is Outcome.WOULD_BLOCK
            assert would_block == (decision.refused_by != ())


@ANY
def test_nothing_is_charged_where_it_is_deferred(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call]
) -> None:
    """Without charging, the same is decided, and what is let through is deferred, not charged."""
    verdict = judge(limits, usage, batch)
    later = judge(limits, usage, batch, charging=False)
    assert outcomes(later.decisions) == outcomes(verdict.decisions)
    assert later.exit == verdict.exit
    for decision in later.decisions:
        for standing in decision.standings:
            assert not standing.charged
            assert standing.deferred == (decision.outcome in RUNS)


@ANY
def test_a_limit_on_trial_changes_nothing(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call]
) -> None:
    """With or without limits that are not enforced the same calls run, and it ends the same."""
    verdict = judge(limits, usage, batch)
    without = judge([limit for limit in limits if limit.enforce], usage, batch)
    ran = [decision.outcome in RUNS for decision in verdict.decisions]
    assert ran == [decision.outcome in RUNS for decision in without.decisions]
    assert {counter: verdict.usage[counter] for counter in without.usage} == without.usage
    assert verdict.exit == without.exit
    names = [breach.limit.name for breach in verdict.breaches]
    assert names == [breach.limit.name for breach in without.breaches]


@ANY
def test_limits_are_judged_by_their_terms(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call]
) -> None:
    """A limit with fixed numbers and its terms are judged alike."""
    assert judge(limits, usage, batch) == judge([Terms.of(each) for each in limits], usage, batch)


@ANY
def test_an_id_has_one_outcome(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call]
) -> None:
    """Calls that share an id run together or not at all; one of them may be told it would not."""
    verdict = judge(limits, usage, batch)
    by_id: dict[str, set[Outcome]] = {}
    for decision in verdict.decisions:
        if decision.call.id is not None:
            by_id.setdefault(decision.call.id, set()).add(decision.outcome)
    assert all(len(found) == 1 or found == RUNS for found in by_id.values())


@ANY
def test_what_is_blocked_is_refused_by_a_limit(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call]
) -> None:
    """A blocked id has a limit that refused it, so the breach is counted and acted upon."""
    verdict = judge(limits, usage, batch)
    for decision in verdict.decisions:
        if decision.outcome is Outcome.BLOCKED:
            twins = [
                each
                for each in verdict.decisions
                if each is decision
                or (each.call.id is not None and each.call.id == decision.call.id)
            ]
            assert any(standing.enforced for twin in twins for standing in twin.refused_by)
    blocked = any(decision.outcome is Outcome.BLOCKED for decision in verdict.decisions)
    assert blocked == bool(verdict.breaches) == (verdict.exit is not None)


@ANY
def test_a_stopped_batch_allows_nothing(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call]
) -> None:
    """Calls are skipped where a refusal stops the batch, and then nothing of it runs."""
    verdict = judge(limits, usage, batch)
    found = Counter(decision.outcome for decision in verdict.decisions)
    if verdict.exit in {"finalize", "end", "error"}:
        assert found[Outcome.ALLOWED] == found[Outcome.WOULD_BLOCK] == 0
        assert found[Outcome.BLOCKED] > 0
    else:
        assert found[Outcome.SKIPPED] == 0


@given(limits=limit_lists(), usage=USAGES, batch=batches(), data=st.data())
def test_the_order_of_limits_changes_nothing(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call], data: st.DataObject
) -> None:
    """Which calls run, what is counted and how it ends do not depend on the order of limits."""
    verdict = judge(limits, usage, batch)
    shuffled = judge(data.draw(st.permutations(limits)), usage, batch)
    assert outcomes(shuffled.decisions) == outcomes(verdict.decisions)
    assert shuffled.usage == verdict.usage
    # To finalize is as strong as to end: both end the run here, and the first one is told.
    both = {verdict.exit, shuffled.exit}
    assert len(both) == 1 or both == {"end", "finalize"}


@given(tool=st.none() | st.sampled_from(TOOLS), usage=USAGES, batch=batches())
def test_a_limit_of_0_forbids(tool: str | None, usage: dict[str, Used], batch: list[Call]) -> None:
    """Under a limit of 0 no call that it matches is allowed, whatever was used."""
    limit = ToolCallLimit(tool, run_limit=0)
    for decision in judge([limit], usage, batch).decisions:
        if limit.matches(decision.call):
            assert decision.outcome is Outcome.BLOCKED


@given(limits=limit_lists(), usage=USAGES, batch=batches(unique=True), length=st.integers(0, 8))
def test_later_calls_do_not_change_earlier_ones(
    limits: list[Limit], usage: dict[str, Used], batch: list[Call], length: int
) -> None:
    """With ids of their own and no stop, calls are judged first come, first served."""
    whole = judge(limits, usage, batch, may_stop=False)
    prefix = judge(limits, usage, batch[:length], may_stop=False)
    assert whole.decisions[:length] == prefix.decisions


@ANY
def test_judging_reads_only(limits: list[Limit], usage: dict[str, Used], batch: list[Call]) -> None:
    """Judging changes none of its arguments and gives the same verdict again."""
    usage_before, batch_before = dict(usage), [replace(call) for call in batch]
    first = judge(limits, usage, batch)
    assert (usage, batch) == (usage_before, batch_before)
    assert judge(limits, usage, batch) == first


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
QUOTA = Quota(9, per="user_id")


def ann(limit: int, resets_at: datetime | None = None) -> QuotaTerms:
    return QuotaTerms("user_id", limit, "ann", "user", resets_at)


def everybody(limit: int) -> QuotaTerms:
    return QuotaTerms("global", limit, "", "all")


def shared(limit: Limit, *quotas: QuotaTerms, thread_key: str | None = None) -> Terms:
    return Terms.of(limit, thread_key=thread_key, quotas=quotas)


def grant_of(asked: Plan, kept: dict[str, int]) -> Grant:
    """The answer of a store that keeps these counts; one that it does not begins at the slot's."""
    used = [kept.get(slot.key or "", slot.used) for slot in asked.reservation.slots]
    return admit(asked.reservation, used)


def keys(asked: Plan) -> list[str]:
    return [slot.key for slot in asked.reservation.slots if slot.key is not None]


def test_a_quota_refuses_like_a_limit() -> None:
    """A call that fits the thread and the run, but not the user's quota, does not run."""
    limit = ToolCallLimit(thread_limit=9, quotas=[QUOTA])
    asked = plan([shared(limit, ann(2, NOON))], {}, calls("search", "calc"))
    verdict = asked.verdict(grant_of(asked, {"user": 1}))
    assert outcomes(verdict.decisions) == ["allowed", "blocked"]
    first, second = (decision.standings[0] for decision in verdict.decisions)
    assert (first.charged, first.scope) == (True, None)
    assert (second.charged, second.scope, second.resets_at) == (False, "user_id", NOON)
    assert verdict.usage == {"__all__": Used(1, 1, (2,))}
    assert (verdict.exit, verdict.breaches[0].quota_counts) == ("continue", (3,))


def test_a_standing_tells_of_its_quotas() -> None:
    """Each quota stands with its count before and after the call, and whose it is."""
    asked = plan([shared(ToolCallLimit(quotas=[QUOTA]), ann(5, NOON))], {}, calls("a", "b"))
    verdict = asked.verdict(grant_of(asked, {"user": 3}))
    uses = [decision.standings[0].quotas[0] for decision in verdict.decisions]
    assert [(use.before, use.used, use.limit) for use in uses] == [(3, 4, 5), (4, 5, 5)]
    assert {(use.scope, use.subject, use.resets_at, use.per_thread) for use in uses} == {
        ("user_id", "ann", NOON, False)
    }
    assert verdict.decisions[0].standings[0].shared


def test_thread_and_run_are_named_before_a_quota() -> None:
    """Where all are exhausted, the refusal is attributed to the thread, then the run."""
    for limit, expected in (
        (ToolCallLimit(thread_limit=0, run_limit=0, quotas=[QUOTA]), "thread"),
        (ToolCallLimit(run_limit=0, quotas=[QUOTA]), "run"),
        (ToolCallLimit(quotas=[QUOTA]), "user_id"),
    ):
        terms = shared(limit, ann(0), everybody(0))
        (decision,) = judge([terms], {}, calls("search")).decisions
        assert decision.standings[0].scope == expected
        assert exhausted_scope(terms, Used(0, 0, (0, 0)), 1) == expected


def test_a_call_that_a_quota_refuses_is_charged_to_none() -> None:
    """What Ann may not call costs neither her thread nor everybody else."""
    limits = [
        shared(ToolCallLimit("search", quotas=[QUOTA]), ann(0)),
        shared(ToolCallLimit(thread_limit=9, quotas=[QUOTA]), everybody(9), thread_key="thread"),
    ]
    asked = plan(limits, {}, calls("search", "calc"))
    grant = grant_of(asked, {"all": 4, "thread": 2})
    assert outcomes(asked.verdict(grant).decisions) == ["blocked", "allowed"]
    charged = dict(zip(asked.reservation.slots, grant.charged(asked.reservation), strict=True))
    assert {slot.key: n for slot, n in charged.items() if slot.key} == {
        "user": 0,
        "all": 1,
        "thread": 1,
    }


def test_two_limits_share_a_quotas_count() -> None:
    """Two thresholds over one key are one slot: a call is charged to it once."""
    limits = [
        shared(ToolCallLimit("search", quotas=[QUOTA], name="soft", enforce=False), ann(1)),
        shared(ToolCallLimit("search", quotas=[QUOTA], name="hard"), ann(2)),
    ]
    asked = plan(limits, {}, calls(*["search"] * 3))
    assert keys(asked) == ["user"]
    grant = grant_of(asked, {})
    verdict = asked.verdict(grant)
    assert outcomes(verdict.decisions) == ["allowed", "would_block", "blocked"]
    assert sum(grant.charged(asked.reservation)) == 2 * len(asked.reservation.slots)


def test_a_thread_has_one_count() -> None:
    """Two thread limits and a quota per thread without a window are thresholds over one slot."""
    per_thread = QuotaTerms("thread", 3, "7", "search:thread:7", per_thread=True)
    limits = [
        Terms.of(ToolCallLimit("search", thread_limit=9, name="high"), thread_key=per_thread.key),
        shared(ToolCallLimit("search", quotas=[Quota(3)], name="quota"), per_thread),
        Terms.of(ToolCallLimit("search", thread_limit=5, name="low"), thread_key=per_thread.key),
    ]
    for order in (limits, limits[::-1]):
        asked = plan(order, {"search": Used(1, 0)}, calls(*["search"] * 2))
        (slot,) = [each for each in asked.reservation.slots if each.key is not None]
        assert (slot.key, slot.used) == (per_thread.key, 1)
        assert {cap.name: cap.limit for cap in slot.caps} == {"high": 9, "quota": 3, "low": 5}
        verdict = asked.verdict(grant_of(asked, {per_thread.key: 2}))
        assert outcomes(verdict.decisions) == ["allowed", "blocked"]
        (refusing,) = verdict.decisions[1].refused_by
        assert (refusing.limit, refusing.scope) == ("quota", "thread")
        assert verdict.usage == {"search": Used(3, 1, verdict.usage["search"].quotas)}


def test_a_run_has_one_count() -> None:
    """Run limits are thresholds over one slot, which begins at the caller's count."""
    limits = [
        Terms.of(ToolCallLimit("search", run_limit=9, name="high"), run_key="run"),
        Terms.of(ToolCallLimit("search", thread_limit=9, name="thread"), run_key="run"),
        Terms.of(ToolCallLimit("search", run_limit=5, name="low"), run_key="run"),
    ]
    assert [each.shared for each in limits] == [True, False, True]
    for order in (limits, limits[1:] + limits[:1]):
        asked = plan(order, {"search": Used(7, 1)}, calls(*["search"] * 2))
        (slot,) = [each for each in asked.reservation.slots if each.key is not None]
        assert (slot.key, slot.used) == ("run", 1)
        assert {cap.name: cap.limit for cap in slot.caps} == {"high": 9, "low": 5}
        verdict = asked.verdict(grant_of(asked, {"run": 4}))
        assert outcomes(verdict.decisions) == ["allowed", "blocked"]
        (refusing,) = verdict.decisions[1].refused_by
        assert (refusing.limit, refusing.scope, refusing.run_before) == ("low", "run", 5)
        assert verdict.usage == {"search": Used(8, 5)}


@pytest.mark.parametrize(
    ("outage", "expected"),
    [("deny", [("blocked", "store")] * 2), ("allow", [("allowed", None), ("blocked", "run")])],
)
def test_a_run_in_an_outage(outage: Outage, expected: list[tuple[str, str | None]]) -> None:
    """A run that the store counts needs it; without it the caller's own count is all there is."""
    terms = Terms.of(ToolCallLimit("search", run_limit=1), run_key="run")
    asked = in_outage([terms], calls("search", "search"), outage)
    assert not asked.reservation.shared
    decisions = asked.verdict(asked.own_grant()).decisions
    assert [(str(each.outcome), each.standings[0].scope) for each in decisions] == expected


def test_a_threads_window_has_a_count_of_its_own() -> None:
    """A quota per thread and hour counts beside the thread's count, and begins at 0."""
    hourly = QuotaTerms("hourly", 1, "7", "hour", NOON, per_thread=True)
    limit = ToolCallLimit(thread_limit=9, quotas=[Quota(1, name="hourly")])
    asked = plan([shared(limit, hourly, thread_key="thread")], {"__all__": Used(4, 0)}, calls("a"))
    kept = {slot.key: slot for slot in asked.reservation.slots if slot.key}
    assert (kept["thread"].used, kept["thread"].expires_at) == (4, None)
    assert (kept["hour"].used, kept["hour"].expires_at) == (0, NOON.timestamp())


def test_the_stores_count_goes_before_the_states() -> None:
    """What other runs have charged is what a thread limit is judged by."""
    terms = shared(ToolCallLimit(thread_limit=3), thread_key="thread")
    asked = plan([terms], {"__all__": Used(0, 0)}, calls("search"))
    verdict = asked.verdict(grant_of(asked, {"thread": 3}))
    assert outcomes(verdict.decisions) == ["blocked"]
    assert verdict.decisions[0].standings[0].thread_before == 3
    assert verdict.usage == {"__all__": Used(3, 0)}


def test_limits_of_other_calls_ask_for_other_counts() -> None:
    """A batch charges the keys of the limits that match it, call by call."""
    limits = [
        shared(ToolCallLimit("search", quotas=[QUOTA]), ann(9)),
        shared(ToolCallLimit("calc", quotas=[QUOTA]), everybody(9)),
    ]
    asked = plan(limits, {}, calls("search", "calc", "fetch", amount=2))
    assert [asked.keyed(index) for index in range(3)] == [{"user": 2}, {"all": 2}, {}]


def test_calls_of_one_id_are_one_charge() -> None:
    """Twins are admitted or refused by their sum, also where a store is asked."""
    batch = [Call("tool", "search", "twin"), Call("tool", "calc", "twin")]
    asked = plan([shared(ToolCallLimit(quotas=[QUOTA]), ann(5))], {}, batch)
    assert asked.charge_of == (0, 0)
    assert asked.keyed(0) == {"user": 2}
    for used, expected in ((3, "allowed"), (4, "blocked")):
        verdict = asked.verdict(grant_of(asked, {"user": used}))
        assert outcomes(verdict.decisions) == [expected] * 2


def test_a_plan_asks_for_what_is_owed_first() -> None:
    """Corrections travel with the reservation, which is named after its step and its form."""
    settlements = (Settlement("refund", {"user": -1}),)
    terms = [shared(ToolCallLimit(quotas=[QUOTA]), ann(5))]
    first, again = (
        plan(terms, {}, calls("search"), name="step", settlements=settlements).reservation
        for _ in range(2)
    )
    assert first.settlements == settlements
    assert first.id == again.id
    assert first.attempt != again.attempt
    larger = plan(terms, {}, calls("search", "calc"), name="step").reservation
    beside = Terms.of(ToolCallLimit("calc", run_limit=1))
    more = plan([*terms, beside], {}, calls("calc"), name="step")
    assert len({first.id, larger.id, more.reservation.id}) == 3
    assert (plan(terms, {}, []).reservation.id, plan(terms, {}, []).reservation.attempt) == ("", "")


@pytest.mark.parametrize(
    ("refusals", "expected"), [({}, 3), ({"tool:*": 2}, 1), ({"tool:*": 9}, 1), ({"x": 2}, 3)]
)
def test_patience_that_is_left(refusals: dict[str, int], expected: int) -> None:
    """A limit that gives up stops the batch after the refusals that it has left in this run."""
    terms = [Terms.of(ToolCallLimit(run_limit=0, give_up_after=3))]
    asked = plan(terms, {}, calls("search"), refusals=refusals)
    assert asked.reservation.stops == {"tool:*": expected}


def test_what_stops_a_batch() -> None:
    """Limits that end or raise stop it at once; those that continue or are on trial never."""
    limits = [
        ToolCallLimit(run_limit=0, name="continue"),
        ToolCallLimit(run_limit=0, name="end", exit_behavior="end"),
        ToolCallLimit(run_limit=0, name="error", exit_behavior="error"),
        ToolCallLimit(run_limit=0, name="trial", exit_behavior="error", enforce=False),
    ]
    terms = [Terms.of(limit) for limit in limits]
    assert plan(terms, {}, calls("x")).reservation.stops == {"end": 1, "error": 1}
    assert plan(terms, {}, calls("x"), may_stop=False).reservation.stops == {}


def in_outage(terms: Sequence[Terms], batch: Sequence[Call], outage: Outage) -> Plan:
    return plan(terms, {"__all__": Used(2, 0), "search": Used(2, 0)}, batch, outage=outage)


def test_an_outage_denies_what_needs_the_store() -> None:
    """Calls of a shared limit are refused with the scope `store`; others are judged as ever."""
    terms = [
        shared(ToolCallLimit("search", thread_limit=9, quotas=[QUOTA]), ann(9), thread_key="t"),
        Terms.of(ToolCallLimit("calc", run_limit=1)),
    ]
    asked = in_outage(terms, calls("search", "calc", "calc"), "deny")
    assert not asked.reservation.shared
    verdict = asked.verdict(asked.own_grant())
    assert outcomes(verdict.decisions) == ["blocked", "allowed", "blocked"]
    scopes = [decision.standings[0].scope for decision in verdict.decisions]
    assert scopes == ["store", None, "run"]
    standing = verdict.decisions[0].standings[0]
    assert (standing.quotas, standing.thread_used, standing.shared) == ((), 2, True)
    assert [breach.unchecked for breach in verdict.breaches] == [True, False]
    assert (verdict.usage["search"], verdict.exit) == (Used(2, 0), "continue")


@pytest.mark.parametrize("behavior", ["end", "error"])
def test_an_outage_ends_what_a_limit_would_end(behavior: ToolExitBehavior) -> None:
    """A denied call does what any other refusal by its limit does."""
    terms = shared(ToolCallLimit(quotas=[QUOTA], exit_behavior=behavior), ann(9))
    asked = in_outage([terms], calls("search", "calc"), "deny")
    verdict = asked.verdict(asked.own_grant())
    assert outcomes(verdict.decisions) == ["blocked", "blocked"]
    assert verdict.exit == behavior


def test_an_outage_does_not_make_a_trial_bite() -> None:
    """What a limit on trial could not check would have been refused, and runs."""
    terms = shared(ToolCallLimit(quotas=[QUOTA], enforce=False), ann(9))
    asked = in_outage([terms], calls("search"), "deny")
    (decision,) = asked.verdict(asked.own_grant()).decisions
    assert decision.outcome is Outcome.WOULD_BLOCK
    assert decision.standings[0].scope == "store"


@pytest.mark.parametrize("outage", ["deny", "allow"])
def test_in_an_outage_no_quota_has_a_count(outage: Outage) -> None:
    """What the thread has used is not taken for what a quota, per thread or not, has."""
    hourly = QuotaTerms("thread", 9, "7", "hour", NOON, per_thread=True)
    for quotas in ((ann(9), hourly), (hourly, ann(9))):
        terms = shared(ToolCallLimit(quotas=[QUOTA]), *quotas)
        asked = in_outage([terms], calls("search"), outage)
        (decision,) = asked.verdict(asked.own_grant()).decisions
        assert decision.standings[0].quotas == ()


def test_an_outage_allows_what_the_state_allows() -> None:
    """Without quotas, thread and run limits still hold, by the state's own counts."""
    limit = ToolCallLimit("search", thread_limit=3, quotas=[QUOTA])
    asked = in_outage([shared(limit, ann(0), thread_key="t")], calls("search", "search"), "allow")
    assert not asked.reservation.shared
    verdict = asked.verdict(asked.own_grant())
    assert outcomes(verdict.decisions) == ["allowed", "blocked"]
    assert verdict.decisions[1].standings[0].scope == "thread"
    assert verdict.usage == {"search": Used(3, 1)}
    assert exhausted_scope(asked.terms[0], Used(2, 0), 1) is None


def test_a_hook_that_runs_again_is_told_the_same() -> None:
    """A grant that was made before says so, and leads to the same verdict."""
    asked = plan([shared(ToolCallLimit(quotas=[QUOTA]), ann(3))], {}, calls("a", "b"))
    grant = grant_of(asked, {"user": 2})
    assert asked.verdict(replace(grant, known=True)) == asked.verdict(grant)


@pytest.mark.parametrize("behavior", ["continue", "end", "error"])
def test_a_limit_that_changed_does_not_refuse_what_ran(behavior: ToolExitBehavior) -> None:
    """A call that was admitted and charged stays so, where the plan's number is lower by now."""
    limit = ToolCallLimit(exit_behavior=behavior, quotas=[QUOTA])
    before = plan([shared(limit, ann(5))], {}, calls("a"))
    grant = replace(grant_of(before, {"user": 4}), known=True)
    now = plan([shared(limit, ann(1))], {}, calls("a")).verdict(grant)
    assert outcomes(now.decisions) == ["allowed"]
    assert now.decisions[0].standings[0].charged
    assert (now.exit, now.breaches) == (None, ())


def test_what_was_refused_stays_refused() -> None:
    """A refusal beside charges that stand does not end the run, whoever would refuse it now."""
    strict = ToolCallLimit("search", run_limit=0, name="strict")
    ending = ToolCallLimit("search", exit_behavior="end", quotas=[QUOTA], name="ending")
    batch = calls("search", "calc")
    rest = shared(ToolCallLimit("calc", quotas=[QUOTA], name="rest"), everybody(9))
    before = plan([Terms.of(strict), shared(ending, ann(5)), rest], {}, batch)
    grant = replace(grant_of(before, {}), known=True)
    assert grant.admitted == (False, True)
    now = plan([Terms.of(strict), shared(ending, ann(0)), rest], {}, batch).verdict(grant)
    assert outcomes(now.decisions) == ["blocked", "allowed"]
    assert now.exit == "continue"


SUBJECTS = ("user_id", "global", "thread", "hourly")


@st.composite
def shared_terms(draw: st.DrawFn) -> list[Terms]:
    """Limits with quotas over few keys, so that several limits often share a count."""
    found = []
    for limit in draw(limit_lists()):
        quotas = []
        for scope in draw(st.lists(st.sampled_from(SUBJECTS), unique=True, max_size=3)):
            per_thread = scope in {"thread", "hourly"}
            if scope == "thread" and limit.thread_limit is not None:
                continue  # refused when the limit is made
            quotas.append(
                QuotaTerms(
                    scope,
                    draw(st.integers(0, 6)),
                    "ann",
                    f"{limit.counter}:{scope}",
                    NOON if scope == "hourly" else None,
                    per_thread,
                )
            )
        in_store = draw(st.booleans())
        thread_key = f"{limit.counter}:thread" if in_store else None
        found.append(Terms.of(limit, thread_key=thread_key, quotas=tuple(quotas)))
    return found


KEPT = st.dictionaries(
    st.builds(
        "{}:{}".format, st.sampled_from([*TOOLS, "__all__", "model"]), st.sampled_from(SUBJECTS)
    ),
    st.integers(0, 8),
)
SHARED = given(terms=shared_terms(), usage=USAGES, batch=batches(), kept=KEPT)


@SHARED
def test_no_quota_is_exceeded(
    terms: list[Terms], usage: dict[str, Used], batch: list[Call], kept: dict[str, int]
) -> None:
    """After what runs, no enforced quota's count is above its limit, unless it was before."""
    asked = plan(terms, usage, batch)
    grant = grant_of(asked, kept)
    charged = grant.charged(asked.reservation)
    for slot, before, amount in zip(asked.reservation.slots, grant.used, charged, strict=True):
        for cap in slot.caps:
            if cap.enforced and amount:
                assert before + amount <= cap.limit


@SHARED
def test_a_verdict_says_what_is_granted(
    terms: list[Terms], usage: dict[str, Used], batch: list[Call], kept: dict[str, int]
) -> None:
    """A call runs if and only if its charge is admitted and the batch is not stopped."""
    asked = plan(terms, usage, batch)
    grant = grant_of(asked, kept)
    verdict = asked.verdict(grant)
    for decision, index in zip(verdict.decisions, asked.charge_of, strict=True):
        assert (decision.outcome in RUNS) == (grant.admitted[index] and not grant.stopped)
        assert (decision.outcome is Outcome.BLOCKED) == (not grant.admitted[index])
    assert stops(verdict.exit) == grant.stopped


@SHARED
def test_a_verdict_charges_what_is_granted(
    terms: list[Terms], usage: dict[str, Used], batch: list[Call], kept: dict[str, int]
) -> None:
    """The counts that the verdict leaves are those of the grant plus what it charges, per slot."""
    asked = plan(terms, usage, batch)
    grant = grant_of(asked, kept)
    verdict = asked.verdict(grant)
    after = [
        used + amount
        for used, amount in zip(grant.used, grant.charged(asked.reservation), strict=True)
    ]
    assert {each.limit.counter for each in terms} == verdict.usage.keys()
    for counter in verdict.usage.keys() - asked.slots.keys():
        assert verdict.usage[counter] == usage.get(counter, Used())
    for each in asked.terms:
        slots = asked.slots[each.limit.counter]
        left = verdict.usage[each.limit.counter]
        assert (left.thread, left.run) == (after[slots["", "thread"]], after[slots["", "run"]])
        for decision in verdict.decisions[-1:]:
            for standing in decision.standings:
                if standing.limit == each.limit.name:
                    assert [use.used for use in standing.quotas] == [
                        after[slots[standing.limit, use.scope]] for use in standing.quotas
                    ]
    keyed: Counter[str] = Counter()
    for index in {*asked.charge_of}:
        if grant.admitted[index] and not grant.stopped:
            keyed.update(asked.keyed(index))
    assert +keyed == +Counter(
        {
            slot.key: amount
            for slot, amount in zip(
                asked.reservation.slots, grant.charged(asked.reservation), strict=True
            )
            if slot.key is not None
        }
    )


@given(terms=shared_terms(), usage=USAGES, batch=batches(), kept=KEPT, data=st.data())
def test_an_old_grant_holds(
    terms: list[Terms],
    usage: dict[str, Used],
    batch: list[Call],
    kept: dict[str, int],
    data: st.DataObject,
) -> None:
    """Whatever was admitted before runs now, whatever was not does not, and nothing is ended."""
    asked = plan(terms, usage, batch)
    admitted = tuple(data.draw(st.booleans()) for _ in asked.reservation.charges)
    grant = replace(grant_of(asked, kept), admitted=admitted, stopped=False, known=True)
    verdict = asked.verdict(grant)
    for decision, index in zip(verdict.decisions, asked.charge_of, strict=True):
        assert (decision.outcome in RUNS) == admitted[index]
        if decision.outcome in RUNS:
            assert not any(standing.enforced for standing in decision.refused_by)
    assert not stops(verdict.exit)


@given(
    terms=shared_terms(), usage=USAGES, batch=batches(), outage=st.sampled_from(["deny", "allow"])
)
def test_in_an_outage_no_store_is_asked(
    terms: list[Terms], usage: dict[str, Used], batch: list[Call], outage: Outage
) -> None:
    """Nothing is keyed; denied is what an enforced shared limit matches, and nothing of it runs."""
    asked = plan(terms, usage, batch, outage=outage)
    assert not asked.reservation.shared
    for decision in asked.verdict(asked.own_grant()).decisions:
        needing = [each for each in terms if each.shared and each.limit.matches(decision.call)]
        scopes = {standing.limit: standing.scope for standing in decision.standings}
        for each in needing:
            assert (scopes[each.limit.name] == "store") == (outage == "deny")
        if outage == "deny" and any(each.limit.enforce for each in needing):
            assert decision.outcome is Outcome.BLOCKED


@given(terms=shared_terms(), usage=USAGES, batch=batches())
def test_an_outage_that_allows_is_a_middleware_without_a_store(
    terms: list[Terms], usage: dict[str, Used], batch: list[Call]
) -> None:
    """The same calls run as where the limits never had a quota, by the state's counts."""
    alone = [replace(each, thread_key=None, quotas=()) for each in terms]
    asked, without = plan(terms, usage, batch, outage="allow"), plan(alone, usage, batch)
    verdict, expected = (each.verdict(each.own_grant()) for each in (asked, without))
    assert outcomes(verdict.decisions) == outcomes(expected.decisions)
    assert (verdict.usage, verdict.exit) == (expected.usage, expected.exit)


def limit_of(call: Call, *limits: Limit) -> list[str]:
    """The names of the limits that match a call, as `Limits` finds them."""
    return [each.limit.name for each in Limits(map(Terms.of, limits)).of(call)]


def test_matching_keeps_the_order_of_the_limits() -> None:
    """The limits that match a call come in the order in which they were given."""
    named = [
        ToolCallLimit(run_limit=9, name="last by name"),
        ToolCallLimit("search", run_limit=9, name="b"),
        ToolCallLimit(["calc", "search"], run_limit=9, name="a"),
    ]
    search = Call("tool", "search")
    assert limit_of(search, *named) == ["last by name", "b", "a"]
    assert limit_of(search, *named[::-1]) == ["a", "b", "last by name"]


def test_matching_of_excluded_tools() -> None:
    """A tool that a limit excludes is no tool like any other, whichever is asked for first."""
    matching = Limits(
        [
            Terms.of(ToolCallLimit(run_limit=9, exclude=("calc",), name="but calc")),
            Terms.of(ToolCallLimit(run_limit=9, name="all")),
        ]
    )
    for tools in (("fetch", "calc", "fetch"), ("calc", "fetch", "calc")):
        found = [[each.limit.name for each in matching.of(Call("tool", tool))] for tool in tools]
        expected = {"fetch": ["but calc", "all"], "calc": ["all"]}
        assert found == [expected[tool] for tool in tools]


def test_matching_of_model_calls() -> None:
    """A model call is matched by the limits of the model, and by none on a tool of that name."""
    limits = (
        ModelCallLimit(run_limit=9, name="model"),
        ToolCallLimit("model", run_limit=9, name="tool"),
        ToolCallLimit(run_limit=9, name="all"),
    )
    assert limit_of(Call("model"), *limits) == ["model"]
    assert limit_of(Call("tool", "model"), *limits) == ["tool", "all"]
    assert limit_of(Call("tool"), *limits) == ["all"]


def test_matching_remembers_no_invented_name() -> None:
    """A model may invent any number of names: those that no limit names are kept as one."""
    matching = Limits([Terms.of(ToolCallLimit("search", run_limit=9))])
    for number in range(100):
        assert matching.of(Call("tool", f"invented-{number}", f"call-{number}")) == ()
    assert matching.of(Call("tool", "search")) == matching.terms
    assert len(matching._found) == 2


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        (Terms.of(ToolCallLimit(run_limit=9)), False),
        (Terms.of(ToolCallLimit(thread_limit=9), thread_key="thread"), True),
        (Terms.of(ToolCallLimit(run_limit=9), thread_key="thread"), False),
        (Terms.of(ToolCallLimit(run_limit=9), quotas=(everybody(9),)), True),
    ],
    ids=["the state's", "a thread", "a thread that is not limited", "a quota"],
)
def test_matching_knows_of_the_store(terms: Terms, expected: bool) -> None:  # noqa: FBT001 - a row of the table
    """Limits are shared where a store keeps a count of one of them."""
    other = Terms.of(ToolCallLimit("search", run_limit=9))
    assert Limits([other, terms]).shared is expected


def test_without_limits_all_is_admitted() -> None:
    """Where nothing is limited every call is allowed, and nothing is counted."""
    matching = Limits([])
    assert (matching.terms, matching.shared, matching.of(Call("model"))) == ((), False, ())
    verdict = all_admitted(matching, {"search": Used(9, 9)}, calls("search"))
    assert verdict is not None
    assert outcomes(verdict.decisions) == ["allowed"]
    assert (verdict.usage, verdict.breaches, verdict.exit) == ({}, (), None)


@st.composite
def any_terms(draw: st.DrawFn) -> list[Terms]:
    """Limits of every kind: on one count, on trial, with patience, computed, ending, shared."""
    found = []
    alone = limit_lists().map(lambda limits: [Terms.of(each) for each in limits])
    for given_terms in draw(shared_terms() if draw(st.integers(0, 3)) == 0 else alone):
        terms, limit = given_terms, given_terms.limit
        change = draw(st.integers(0, 5))
        if change == 0 and limit.enforce and limit.exit_behavior == "continue":
            patient = replace(limit, give_up_after=draw(st.integers(1, 3)))
            terms = replace(terms, limit=patient)
        elif change == 1:
            computed = Terms.of(
                replace(limit, run_limit=lambda *_: None), run_limit=draw(THRESHOLD)
            )
            terms = replace(computed, thread_key=terms.thread_key, quotas=terms.quotas)
        elif change == 2:
            terms = terms.ending()
        found.append(terms)
    return found


@given(
    terms=any_terms(),
    usage=USAGES,
    batch=batches() | batches(unique=True),
    charging=st.booleans(),
    may_stop=st.booleans(),
    refusals=st.dictionaries(
        st.sampled_from([f"limit-{index}" for index in range(4)]), st.integers(0, 3)
    ),
)
def test_all_admitted_is_what_a_plan_comes_to(
    *,
    terms: list[Terms],
    usage: dict[str, Used],
    batch: list[Call],
    charging: bool,
    may_stop: bool,
    refusals: dict[str, int],
) -> None:
    """It has no verdict exactly where a limit refuses or has quotas, else that of the plan."""
    matching = Limits(terms)
    asked = plan(terms, usage, batch, may_stop=may_stop, refusals=refusals)
    expected = asked.verdict(asked.own_grant(), charging=charging)
    verdict = all_admitted(matching, usage, batch, charging=charging)
    touched = [each for each in terms if any(map(each.limit.matches, batch))]
    refused = any(decision.refused_by for decision in expected.decisions)
    assert (verdict is None) == (refused or any(each.quotas for each in touched))
    if verdict is None:
        return
    assert verdict == expected


@given(terms=any_terms(), usage=USAGES, batch=batches(), charging=st.booleans(), stop=st.booleans())
def test_the_judge_says_what_a_plan_comes_to(
    *, terms: list[Terms], usage: dict[str, Used], batch: list[Call], charging: bool, stop: bool
) -> None:
    """Whichever way the judge goes, its verdict is the plan's, with the counts not touched."""
    asked = plan(terms, usage, batch, may_stop=stop)
    expected = asked.verdict(asked.own_grant(), charging=charging)
    assert judge(terms, usage, batch, may_stop=stop, charging=charging) == expected


@given(terms=any_terms(), batch=batches())
def test_a_call_is_matched_by_what_it_was_matched_by(terms: list[Terms], batch: list[Call]) -> None:
    """What is remembered of a tool is what each limit says of the call, call after call."""
    matching = Limits(terms)
    for call in [*batch, Call("tool", "invented"), Call("tool", "calc"), Call("tool"), *batch]:
        assert matching.of(call) == tuple(each for each in terms if each.limit.matches(call))


def test_a_limit_of_ones_own_matches_by_what_it_likes() -> None:
    """A limit that overrides what it matches is asked about each call."""

    class Databases(ToolCallLimit):
        __slots__ = ()

        def matches(self, call: Call) -> bool:
            return str(call.tool).startswith("db_")

    limits = [Databases(run_limit=1, name="databases")]
    verdict = judge(limits, {}, calls("web", "db_x", "db_x"))
    assert [each.outcome for each in verdict.decisions] == ["allowed", "allowed", "blocked"]
