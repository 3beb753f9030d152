"""Which calls a limit counts, the one rule by which they are admitted, and what decisions say.

Each store's copy of the rule is compared in tests/store.
"""

from datetime import UTC, datetime
from fractions import Fraction
from itertools import permutations
from math import ceil
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from langchain_quota import Decision, ModelCallLimit, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, CountRef, Demand, Threshold, admit
from langchain_quota.core.decision import CountStatus, LimitStatus, Outcome
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from tests.examples import examples


def test_the_amounts_that_a_store_keeps() -> None:
    """Amounts are given by key: two counts under one key add up; the caller's own are left out."""
    counters = {"a": CountRef("key"), "b": CountRef("key"), "c": CountRef("other"), "d": CountRef()}
    request = AcquireRequest("request", "attempt", counters)
    assert request.keyed({"a": 1, "b": 2, "c": 4, "d": 8}) == {"key": 3, "other": 4}
    assert request.keyed({}) == {}


COUNTERS = ("a", "b", "c")
LIMITS = ("one", "two", "three")
THRESHOLDS = st.builds(
    Threshold,
    limit=st.sampled_from(LIMITS),
    scope=st.sampled_from(["thread", "run", "user_id"]),
    counter=st.sampled_from(COUNTERS),
    maximum=st.integers(-1, 9),
    enforced=st.sampled_from([True, True, False]),
)
AMOUNTS = st.dictionaries(st.sampled_from(COUNTERS), st.integers(0, 3), max_size=3)
CALLS = st.builds(
    # A call adds 1 to each count under a threshold, or what is said.
    lambda over, amounts: Demand({each.counter: 1 for each in over} | amounts, tuple(over)),
    st.lists(THRESHOLDS, max_size=3),
    AMOUNTS,
)


@examples(600)
@given(
    asked=st.lists(CALLS, max_size=5),
    used=st.fixed_dictionaries(dict.fromkeys(COUNTERS, st.integers(0, 5))),
    stops=st.dictionaries(st.sampled_from(LIMITS), st.integers(1, 3), max_size=2),
)
def test_a_call_is_checked_by_what_was_admitted_before_it(
    asked: list[Demand], used: dict[str, int], stops: dict[str, int]
) -> None:
    """It is refused exactly where it and all admitted before it add up to more than allowed."""
    result = admit(asked, used, stops)
    for index, (each, refused) in enumerate(zip(asked, result.refused, strict=True)):
        counted = [asked[i].amounts for i in range(index) if result.admitted[i]] + [each.amounts]
        exceeded = [
            over
            for over in each.thresholds
            if used[over.counter] + sum(n.get(over.counter, 0) for n in counted) > over.maximum
        ]
        assert refused == {over.limit: over.scope for over in reversed(exceeded)}
        assert result.admitted[index] == (not any(over.enforced for over in exceeded))
    assert result.stopped == any(
        sum(limit in refused for refused in result.refused) >= after
        for limit, after in stops.items()
    )
    running = [] if result.stopped else [asked[i] for i, runs in enumerate(result.admitted) if runs]
    assert result.charged(asked) == {
        counter: sum(each.amounts.get(counter, 0) for each in running) for counter in COUNTERS
    }


TOOLS = ("search", "calc", "fetch", "model")


@pytest.mark.parametrize(
    ("limit", "matching", "name"),
    [
        (ToolCallLimit("search", run_limit=1), ["search"], "tool:search"),
        (ToolCallLimit(["search", "calc"], run_limit=1), ["search", "calc"], "tool:calc,search"),
        (ToolCallLimit("model", run_limit=1), ["model"], "tool:model"),
        (ToolCallLimit(run_limit=1), [*TOOLS], "tool:*"),
        (ToolCallLimit(exclude=["fetch", "x"], run_limit=1), ["search", "calc", "model"], None),
        (ToolCallLimit(exclude=("fetch", "calc"), run_limit=1), None, "tool:*-calc,fetch"),
        (ModelCallLimit(run_limit=1), [None], "model"),
    ],
)
def test_a_limit_matches_what_it_names(limit: Limit, matching: Any, name: str | None) -> None:
    """A tool's limit matches that tool, one without a name all but the excluded; so it is named."""
    calls = [*(Call("tool", tool) for tool in TOOLS), Call("model")]
    assert matching in (None, [call.tool for call in calls if limit.matches(call)])
    assert name in (None, limit.name)


def test_limits_share_a_count_exactly_if_they_match_the_same_calls() -> None:
    """Whatever tools are called, and however often they are named."""
    names = ("search", "calc", "calc-search", "model", "-")
    some = [each for length in (1, 2) for each in permutations(names, length)]
    limits: list[Limit] = [
        *(ToolCallLimit(tools, run_limit=1) for tools in some),
        *(ToolCallLimit((*tools, tools[0]), run_limit=1) for tools in some),
        *(ToolCallLimit(exclude=tools, run_limit=1) for tools in [(), *some]),
        ModelCallLimit(run_limit=1),
    ]
    calls = [Call("model"), *(Call("tool", tool) for tool in (*names, "other"))]
    matched = {limit: tuple(map(limit.matches, calls)) for limit in limits}
    groups = len(set(matched.values()))
    assert len({(found, limit.kind, limit.counter) for limit, found in matched.items()}) == groups
    assert len({(limit.kind, limit.counter) for limit in limits}) == groups


THREAD, RUN = CountStatus("thread", 0, 0, None), CountStatus("run", 0, 0, None)
OPEN = LimitStatus("open", "continue", (THREAD, RUN))
"""A status without thresholds."""
MINUTE = datetime(2026, 1, 1, 12, 1, tzinfo=UTC)
DAY = datetime(2026, 1, 2, tzinfo=UTC)


def of_run(before: int, used: int, limit: int | None, **options: Any) -> LimitStatus:
    counts = THREAD, CountStatus("run", before, used, limit)
    return OPEN._replace(**{"counts": counts, "charged": True, **options})


def refusing(scope: str, *quotas: CountStatus, **options: Any) -> LimitStatus:
    """A status of a limit that refuses because of a scope."""
    counts = (*OPEN.counts, *quotas)
    given = {"reason": "exhausted", "scope": scope, "counts": counts, **options}
    return OPEN._replace(**given)


def use(
    scope: str, before: int, used: int, limit: int, resets_at: datetime | None = None
) -> CountStatus:
    return CountStatus(scope, before, used, limit, "ann", resets_at, per=scope)


@given(st.integers(1, 9 * 10**15), st.integers(1, 1000))
@example(9 * 10**15 - 1, 999)  # their product has no exact float
def test_near_is_the_smallest_count_of_that_share(limit: int, thousandths: int) -> None:
    """It equals exact arithmetic: a share is near from the count that reaches it.

    A level is reached once, by a call that is charged to a limit that is enforced.
    """
    count = ceil(Fraction(thousandths, 1000) * limit)
    near = thousandths / 1000
    reached = "exhausted" if count == limit else "near"
    assert of_run(count - 1, count, limit).threshold_events(near) == [("run", reached)]
    assert of_run(limit - 1, limit, limit).threshold_events(near) == [("run", "exhausted")]
    assert of_run(count - 1, count, limit, near=near).threshold_events(1) == [("run", reached)]
    for before in (count - 2, count, limit):
        if before != limit - 1:
            assert of_run(before, before + 1, limit).threshold_events(near) == []
    smooth = use("user_id", count - 1, count, limit)._replace(smooth=True)
    no_limit = smooth._replace(smooth=False, limit=None)
    for never in ({"charged": False}, {"enforced": False}, {"counts": (smooth, no_limit)}):
        assert of_run(count - 1, count, limit, **never).threshold_events(near) == []


def test_which_limit_leads() -> None:
    """The first that refuses and is enforced; else a dry run that refuses; else the fullest."""
    low, fuller = of_run(0, 1, 10), of_run(0, 9, 10)
    assert (OPEN.share, of_run(0, 0, 0).share, low.share) == (0, 1, 0.1)
    one, two = refusing("run", limit="one"), refusing("run", limit="two")
    trial = refusing("run", limit="trial", enforced=False)

    def of(*statuses: LimitStatus) -> Decision:
        return Decision(Call("model"), Outcome.BLOCKED, statuses)

    assert of(trial, one, fuller, two).refused_by == (one, two, trial)
    assert of(trial, one, fuller, two).leading is one
    assert of(fuller, trial).leading is trial
    assert of(low, fuller).leading is fuller
    assert of(low, fuller).refused_by == ()
    assert of().leading is None


USED_UP = use("daily", 5, 5, 5, DAY)
BY_MINUTE, FOR_GOOD = use("minute", 1, 1, 1, MINUTE), use("global", 9, 9, 9)


@pytest.mark.parametrize(
    ("status", "resets_at"),
    [
        (refusing("daily", USED_UP, use("global", 1, 1, 9, MINUTE)), DAY),
        (OPEN._replace(counts=(use("daily", 4, 5, 5, DAY),), charged=True), None),
        (refusing("global", FOR_GOOD), None),
        (refusing("thread", USED_UP), None),
        (OPEN._replace(reason="store", counts=(USED_UP,)), None),
        (refusing("minute", BY_MINUTE, USED_UP), DAY),
        (refusing("minute", BY_MINUTE, use("daily", 4, 4, 5, DAY)), MINUTE),
        (refusing("minute", BY_MINUTE, FOR_GOOD), None),
        # A call may be too large for what is left.
        (refusing("daily", use("daily", 4, 4, 5, DAY)), DAY),
    ],
)
def test_when_a_limit_resets(status: LimitStatus, resets_at: datetime | None) -> None:
    """When the last window of its exhausted quotas ends; never, if one of them has no end."""
    assert status.resets_at == resets_at


def test_when_a_refused_call_resets() -> None:
    """When the last of its limits does, and never if one of them, which is enforced, does not."""
    minute, day = refusing("minute", BY_MINUTE), refusing("daily", USED_UP)
    run, trial = refusing("run"), refusing("run", enforced=False)

    def resets_at(*statuses: LimitStatus) -> datetime | None:
        return Decision(Call("tool", "search"), Outcome.BLOCKED, statuses).resets_at

    assert resets_at(minute, day) == resets_at(day, minute) == DAY
    assert resets_at(minute, OPEN) == resets_at(minute, trial) == MINUTE
    assert resets_at(minute, run) is None
    assert resets_at() is None
