"""Which calls a limit counts, and the one rule by which calls are admitted.

Each store's copy of the rule is compared in tests/store.
"""

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, CountRef, Demand, Threshold, admit
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
