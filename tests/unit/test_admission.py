"""The one rule by which calls are admitted, and what is asked and answered by it."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota.admission import AcquireRequest, AcquireResult, Counter, Hits, Threshold, admit
from langchain_quota.decision import Scope


def at_most(
    most: int,
    counter: str = "calls",
    *,
    limit: str = "limit",
    scope: Scope = "run",
    enforced: bool = True,
) -> Threshold:
    return Threshold(limit, scope, counter, most, enforced)


def hits(*thresholds: Threshold, **amounts: int) -> Hits:
    return Hits(amounts, thresholds)


def admitted(asked: Sequence[Hits], used: Mapping[str, int]) -> tuple[bool, ...]:
    return admit(asked, used, {}).admitted


@pytest.mark.parametrize(("used", "fitting"), [(0, 2), (1, 1), (2, 0), (9, 0)])
def test_calls_are_admitted_up_to_the_limit(used: int, fitting: int) -> None:
    """A limit of 2 admits a second call and refuses a third, whoever made those before."""
    result = admit([hits(at_most(2), calls=1)] * 3, {"calls": used}, {})
    refused: list[Mapping[str, Scope]] = [{}] * fitting + [{"limit": "run"}] * (3 - fitting)
    assert result == AcquireResult(
        {"calls": used}, tuple(refused), tuple(not each for each in refused)
    )


def test_a_refused_call_is_charged_nowhere() -> None:
    """What one count refuses leaves the other counts to the calls after it."""
    asked = [
        hits(at_most(0, "a"), at_most(1, "b"), a=1, b=1),
        hits(at_most(1, "b"), b=1),
    ]
    result = admit(asked, {"a": 0, "b": 0}, {})
    assert result.admitted == (False, True)
    assert result.charged(asked) == {"a": 0, "b": 1}


def test_a_dear_call_leaves_room_for_a_cheaper_one() -> None:
    """A call costs its whole amount or nothing: one that does not fit keeps no other out."""
    asked = [hits(at_most(3), calls=amount) for amount in (2, 2, 1)]
    result = admit(asked, {"calls": 0}, {})
    assert result.admitted == (True, False, True)
    assert result.charged(asked) == {"calls": 3}


def test_every_threshold_over_a_count_must_admit() -> None:
    """Of several numbers for one count the smallest holds."""
    asked = hits(at_most(5), at_most(1, limit="low"), at_most(3), calls=1)
    result = admit([asked, asked], {"calls": 0}, {})
    assert result.refused == ({}, {"low": "run"})


def test_a_negative_threshold_refuses_every_call() -> None:
    """It refuses even where nothing is used; a count beyond it is no matter to other calls."""
    assert admitted([hits(at_most(-1), calls=1), hits(calls=1)], {"calls": 0}) == (False, True)


def test_a_call_that_nothing_limits_is_admitted() -> None:
    """Without thresholds, or without counts, nothing refuses."""
    assert admitted([hits(calls=1), hits()], {"calls": 10**6}) == (True, True)


def test_a_threshold_on_trial_only_says_that_it_would_refuse() -> None:
    """The call is admitted and charged, and the limit is named with its scope."""
    asked = [hits(at_most(0, enforced=False), calls=1)] * 2
    result = admit(asked, {"calls": 7}, {})
    assert (result.refused, result.admitted) == (({"limit": "run"},) * 2, (True, True))
    assert result.charged(asked) == {"calls": 2}


def test_a_threshold_on_trial_does_not_save_a_call() -> None:
    """Where an enforced limit refuses, too, both are named, and the call does not run."""
    trial = at_most(0, limit="trial", enforced=False)
    for thresholds in ((trial, at_most(0)), (at_most(0), trial)):
        result = admit([hits(*thresholds, calls=1)], {"calls": 0}, {})
        assert result.admitted == (False,)
        assert result.refused == ({"limit": "run", "trial": "run"},)


def test_a_refusal_is_attributed_to_the_first_threshold_that_is_exceeded() -> None:
    """Of a limit's exhausted scopes the first one is named, in the order of its thresholds."""
    asked = hits(
        at_most(9, "a", scope="thread"),
        at_most(2, "b", scope="run"),
        at_most(2, "c", scope="user_id"),
        a=1,
        b=1,
        c=1,
    )
    for used, scope in (
        ({"a": 9, "b": 2, "c": 2}, "thread"),
        ({"a": 8, "b": 2, "c": 2}, "run"),
        ({"a": 8, "b": 1, "c": 2}, "user_id"),
    ):
        assert admit([asked], used, {}).refused == ({"limit": scope},)


@pytest.mark.parametrize(("after", "stopped"), [(1, True), (2, True), (3, False)])
def test_refusals_stop_a_batch(after: int, stopped: bool) -> None:  # noqa: FBT001 - a row of the table
    """Two refusals stop it where one or two are enough; then nothing of the batch is charged."""
    asked = [hits(at_most(1), calls=1)] * 3
    result = admit(asked, {"calls": 0}, {"limit": after})
    assert (result.admitted, result.stopped) == ((True, False, False), stopped)
    assert result.charged(asked) == {"calls": 0 if stopped else 1}


def test_refusals_are_counted_by_limit_and_call() -> None:
    """A call that a limit refuses twice over is one refusal, and other limits' do not count."""
    twice = hits(at_most(0, "a"), at_most(0, "b", scope="thread"), a=1, b=1)
    other = hits(at_most(0, "c", limit="other"), c=1)
    used = dict.fromkeys("abc", 0)
    assert not admit([twice, other], used, {"limit": 2, "unasked": 1}).stopped
    assert admit([twice, other, twice], used, {"limit": 2}).stopped


def test_the_amounts_that_a_store_keeps() -> None:
    """Amounts are given by key: two counts under one key add up; the caller's own are left out."""
    counters = {"a": Counter("key"), "b": Counter("key"), "c": Counter("other"), "d": Counter()}
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
    most=st.integers(-1, 9),
    enforced=st.sampled_from([True, True, False]),
)
AMOUNTS = st.dictionaries(st.sampled_from(COUNTERS), st.integers(0, 3), max_size=3)


def some_hits(amounts: dict[str, int], thresholds: list[Threshold]) -> Hits:
    """What a call would add to a few counts; what a threshold is over, it adds to."""
    return Hits(
        dict.fromkeys((each.counter for each in thresholds), 1) | amounts, tuple(thresholds)
    )


HITS = st.builds(some_hits, AMOUNTS, st.lists(THRESHOLDS, max_size=3))


@given(
    asked=st.lists(HITS, max_size=5),
    used=st.fixed_dictionaries(dict.fromkeys(COUNTERS, st.integers(0, 5))),
    stops=st.dictionaries(st.sampled_from(LIMITS), st.integers(1, 3), max_size=2),
)
def test_a_call_is_judged_by_what_was_admitted_before_it(
    asked: list[Hits], used: dict[str, int], stops: dict[str, int]
) -> None:
    """It is refused exactly where it and all admitted before it add up to more than allowed."""
    before = dict(used)
    result = admit(asked, used, stops)
    assert result.used == before
    for index, (each, refused) in enumerate(zip(asked, result.refused, strict=True)):
        counted = [asked[i].amounts for i in range(index) if result.admitted[i]] + [each.amounts]
        exceeded = [
            threshold
            for threshold in each.thresholds
            if before[threshold.counter] + sum(n.get(threshold.counter, 0) for n in counted)
            > threshold.most
        ]
        assert refused == {threshold.limit: threshold.scope for threshold in reversed(exceeded)}
        assert result.admitted[index] == (not any(threshold.enforced for threshold in exceeded))
    assert result.stopped == any(
        sum(limit in refused for refused in result.refused) >= after
        for limit, after in stops.items()
    )
    running = [] if result.stopped else [asked[i] for i, runs in enumerate(result.admitted) if runs]
    assert result.charged(asked) == {
        counter: sum(each.amounts.get(counter, 0) for each in running) for counter in COUNTERS
    }
