"""The records of judged calls, and the thresholds that are compared in one place."""

import dataclasses
from datetime import UTC, datetime
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota import Call, Decision, Level, LimitStatus, Outcome, QuotaStatus
from langchain_quota.decision import SCOPES
from langchain_quota.levels import level, near_threshold

OPEN = LimitStatus(
    limit="open",
    exit_behavior="continue",
    thread_before=0,
    thread_used=0,
    thread_limit=None,
    run_before=0,
    run_used=0,
    run_limit=None,
)
"""A status without thresholds, for `replace`."""


def of_run(before: int, used: int, limit: int | None) -> LimitStatus:
    return dataclasses.replace(
        OPEN, run_before=before, run_used=used, run_limit=limit, charged=True
    )


@pytest.mark.parametrize(
    ("limit", "near", "threshold"),
    [(100, 0.55, 55), (10, 0.8, 8), (3, 0.8, 3), (1, 0.8, 1), (7, 1.0, 7), (0, 0.8, 0), (5, 1, 5)],
)
def test_near_threshold(limit: int, near: float, threshold: int) -> None:
    """The threshold is the share of the limit rounded up, without errors of binary fractions."""
    assert near_threshold(limit, near) == threshold


@given(limit=st.integers(0, 10**6), thousandths=st.integers(1, 1000))
def test_near_threshold_is_the_smallest_near_count(limit: int, thousandths: int) -> None:
    """It equals exact arithmetic: the smallest whole count whose share is at least `near`."""
    assert near_threshold(limit, thousandths / 1000) == ceil(Fraction(thousandths, 1000) * limit)


@given(limit=st.integers(1, 10**6), near=st.floats(0.001, 1))
def test_near_threshold_for_any_share(limit: int, near: float) -> None:
    """Up to rounding, the count reaches the share, and one less does not."""
    count = near_threshold(limit, near)
    assert count / limit >= near - 1e-8
    assert (count - 1) / limit < near
    assert 1 <= count <= limit


@pytest.mark.parametrize(
    ("used", "expected"),
    [(0, "ok"), (7, "ok"), (8, "near"), (9, "near"), (10, "exhausted"), (11, "exhausted")],
)
def test_level(used: int, expected: str) -> None:
    """A limit of 10 is near from 8 and exhausted from 10 on."""
    assert level(used, 10, 0.8) == Level(expected)


def test_a_limit_of_0_is_exhausted() -> None:
    """Nothing is left of nothing."""
    assert level(0, 0, 0.8) is Level.EXHAUSTED


def test_scopes_are_those_with_a_limit() -> None:
    """A scope without a limit is none; the thread stands before the run; 0 is a limit."""
    assert OPEN.scopes == ()
    assert of_run(0, 0, 0).scopes == ("run",)
    assert dataclasses.replace(OPEN, thread_limit=5).scopes == ("thread",)
    assert dataclasses.replace(of_run(0, 0, 3), thread_limit=5).scopes == ("thread", "run")


def test_counts_by_scope() -> None:
    """Threshold and counts of a scope are those of the thread or of the run, not swapped."""
    status = LimitStatus("x", "end", 1, 2, 3, 4, 5, 6)
    rows = {
        scope: (status.before(scope), status.used(scope), status.threshold(scope))
        for scope in SCOPES
    }
    assert rows == {"thread": (1, 2, 3), "run": (4, 5, 6)}


def test_share_is_the_largest() -> None:
    """The share is that of the scope nearest to its limit; 0 without limits, 1 for a limit of 0."""
    assert OPEN.share == 0.0
    assert of_run(0, 1, 4).share == 0.25
    assert dataclasses.replace(of_run(0, 1, 4), thread_used=9, thread_limit=10).share == 0.9
    assert of_run(0, 0, 0).share == 1.0


@pytest.mark.parametrize(
    ("before", "used", "expected"),
    [
        (6, 7, None),
        (7, 8, Level.NEAR),
        (8, 9, None),
        (9, 10, Level.EXHAUSTED),
        (7, 10, Level.EXHAUSTED),
        (7, 12, Level.EXHAUSTED),
        (10, 11, None),
        (8, 8, None),
        (10, 10, None),
    ],
)
def test_crossed(before: int, used: int, expected: Level | None) -> None:
    """A crossing is reported once, and near only when the count stays below the limit."""
    assert of_run(before, used, 10).crossed("run", 0.8) is expected


def test_a_threshold_is_crossed_where_a_share_is_not_exact() -> None:
    """55 of 100 is near at a share of 0.55, though the binary product is a little above."""
    assert of_run(54, 55, 100).crossed("run", 0.55) is Level.NEAR
    assert of_run(53, 54, 100).crossed("run", 0.55) is None


def test_nothing_is_crossed_where_there_is_no_limit() -> None:
    """A scope without a limit, and a limit of 0 (exhausted from the start), are never crossed."""
    assert of_run(0, 100, None).crossed("run", 0.8) is None
    assert of_run(0, 0, 0).crossed("run", 0.8) is None
    assert of_run(7, 8, 10).crossed("thread", 0.8) is None


@given(limit=st.integers(1, 50), near=st.floats(0.01, 1), steps=st.lists(st.integers(1, 7)))
def test_each_threshold_is_crossed_at_most_once(limit: int, near: float, steps: list[int]) -> None:
    """However a growing count moves, it is near at most once, then exhausted at most once."""
    count, threshold_events = 0, []
    for step in steps:
        reached = of_run(count, count + step, limit).crossed("run", near)
        threshold_events += [reached] if reached is not None else []
        count += step
    assert threshold_events in (
        [],
        [Level.NEAR],
        [Level.EXHAUSTED],
        [Level.NEAR, Level.EXHAUSTED],
    )
    assert (Level.EXHAUSTED in threshold_events) == (count >= limit)


def test_what_does_not_count_crosses_nothing() -> None:
    """A call not charged by this decision, or to a limit that is not enforced, crosses nothing."""
    for before, used in ((7, 8), (9, 10)):
        status = of_run(before, used, 10)
        assert status.crossed("run", 0.8) is not None
        assert dataclasses.replace(status, charged=False).crossed("run", 0.8) is None
        assert dataclasses.replace(status, enforced=False).crossed("run", 0.8) is None


def test_a_limits_own_near_goes_first() -> None:
    """A limit with a near share of its own is near from there, not from the given one."""
    own = dataclasses.replace(of_run(4, 5, 10), near=0.5)
    assert own.crossed("run", 0.8) is Level.NEAR
    assert dataclasses.replace(of_run(7, 8, 10), near=0.5).crossed("run", 0.8) is None
    assert of_run(4, 5, 10).crossed("run", 0.8) is None


def test_a_deferred_call_is_not_kept_yet() -> None:
    """The thread's count that is kept is that before a call which is counted when it returned."""
    status = dataclasses.replace(OPEN, thread_before=3, thread_used=4)
    assert status.thread_count == 4
    assert dataclasses.replace(status, deferred=True).thread_count == 3


def test_those_that_are_enforced_refuse_first() -> None:
    """A limit on trial stands behind the enforced ones that refuse, in the order of the limits."""
    one = dataclasses.replace(of_run(1, 1, 1), limit="one", reason="exhausted", scope="run")
    trial = dataclasses.replace(one, limit="trial", enforced=False)
    two = dataclasses.replace(one, limit="two")
    decision = Decision(Call("model"), Outcome.BLOCKED, (trial, one, OPEN, two))
    assert decision.refused_by == (one, two, trial)
    assert decision.leading is one


def test_a_limit_on_trial_leads_where_only_it_refuses() -> None:
    """What would block is what is shown, even beside a fuller limit."""
    fuller = of_run(0, 99, 100)
    trial = dataclasses.replace(
        of_run(1, 2, 10), limit="trial", reason="exhausted", scope="run", enforced=False
    )
    assert Decision(Call("model"), Outcome.WOULD_BLOCK, (fuller, trial)).leading is trial


def test_leading_is_the_first_that_refuses() -> None:
    """A refusing limit leads even where another one has a higher share."""
    fuller = of_run(0, 9, 10)
    first = dataclasses.replace(of_run(0, 1, 10), limit="first", reason="exhausted", scope="run")
    second = dataclasses.replace(first, limit="second")
    decision = Decision(Call("model"), Outcome.BLOCKED, (fuller, first, second))
    assert decision.leading is first
    assert decision.refused_by == (first, second)


def test_leading_is_else_the_fullest() -> None:
    """Where no limit refuses, the one with the highest share leads; without limits none does."""
    low, high = of_run(0, 1, 10), of_run(0, 9, 10)
    decision = Decision(Call("model"), Outcome.ALLOWED, (low, high))
    assert decision.leading is high
    assert decision.refused_by == ()
    assert Decision(Call("model"), Outcome.ALLOWED).leading is None


def test_records_are_frozen() -> None:
    """Enforcement and telemetry read one record, which neither can change."""
    decision = Decision(Call("model"), Outcome.ALLOWED, (OPEN,))
    for record, field in ((decision, "outcome"), (decision.call, "amount"), (OPEN, "charged")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, None)


def test_outcomes_compare_as_text() -> None:
    """An outcome equals its label, so tests and logs can be written with plain strings."""
    assert [outcome.value for outcome in Outcome] == [
        "allowed",
        "blocked",
        "skipped",
        "would_block",
    ]
    assert str(Outcome.ALLOWED) == "allowed"


MINUTE = datetime(2026, 1, 1, 12, 1, tzinfo=UTC)
DAY = datetime(2026, 1, 2, tzinfo=UTC)


def use(
    scope: str, before: int, used: int, limit: int, resets_at: datetime | None = None
) -> QuotaStatus:
    return QuotaStatus(scope, "ann", before, used, limit, resets_at)


def of_quotas(*quotas: QuotaStatus, scope: str | None = None) -> LimitStatus:
    return dataclasses.replace(
        OPEN,
        limit="q",
        quotas=quotas,
        charged=scope is None,
        reason=None if scope is None else "exhausted",
        scope=scope,
    )


def test_the_scopes_of_quotas_come_last() -> None:
    """Thread and run stand before the quotas, which stand in the order of the limit."""
    status = dataclasses.replace(
        of_quotas(use("user_id", 1, 2, 5), use("global", 3, 4, 9)), thread_limit=7, run_limit=6
    )
    assert status.scopes == ("thread", "run", "user_id", "global")
    rows = {each: (status.before(each), status.used(each)) for each in status.scopes}
    assert rows == {"thread": (0, 0), "run": (0, 0), "user_id": (1, 2), "global": (3, 4)}
    assert [status.threshold(each) for each in status.scopes] == [7, 6, 5, 9]


def test_a_quota_per_thread_is_the_threads_threshold() -> None:
    """Where no thread limit stands beside it, what the thread has used is what the quota says."""
    status = dataclasses.replace(
        of_quotas(use("thread", 1, 2, 5)), thread_before=30, thread_used=31
    )
    assert (status.before("thread"), status.used("thread")) == (1, 2)
    assert status.threshold("thread") == 5
    assert status.scopes == ("thread",)


def test_a_scope_that_a_limit_does_not_have() -> None:
    """Nothing is used of what is not limited, and it has no threshold."""
    status = of_quotas(use("user_id", 1, 2, 5))
    for scope in ("tenant", "store", "none"):
        assert (status.before(scope), status.used(scope)) == (0, 0)
        assert status.threshold(scope) is None
        assert status.quota(scope) is None
    assert status.quota(None) is None


def test_a_quotas_share_leads() -> None:
    """A user's quota that is nearly used up is what is shown, before an emptier thread limit."""
    status = dataclasses.replace(of_quotas(use("user_id", 8, 9, 10)), thread_used=1, thread_limit=2)
    assert status.share == 0.9
    assert of_quotas(use("user_id", 0, 0, 0)).share == 1.0


def test_a_quota_is_crossed_like_a_limit() -> None:
    """A quota's count comes near, and is used up, at its own scope and at no other."""
    status = of_quotas(use("user_id", 7, 8, 10), use("global", 9, 10, 10))
    assert status.crossed("user_id", 0.8) is Level.NEAR
    assert status.crossed("global", 0.8) is Level.EXHAUSTED
    assert status.crossed("thread", 0.8) is None
    assert dataclasses.replace(status, charged=False).crossed("global", 0.8) is None


def test_when_an_exhausted_quota_resets() -> None:
    """A refusal tells the end of the window of the quota that refuses; an admission tells none."""
    day = use("daily", 5, 5, 5, DAY)
    assert of_quotas(day, use("global", 1, 1, 9, MINUTE), scope="daily").resets_at == DAY
    assert of_quotas(use("daily", 4, 5, 5, DAY)).resets_at is None
    assert of_quotas(use("user_id", 5, 5, 5), scope="user_id").resets_at is None


def test_what_is_no_quota_does_not_reset() -> None:
    """A thread's limit and a run's have no window, and nobody knows when a store is back."""
    day = use("daily", 5, 5, 5, DAY)
    for scope in SCOPES:
        assert of_quotas(day, scope=scope).resets_at is None
    unknown = dataclasses.replace(of_quotas(day), charged=False, reason="store")
    assert unknown.resets_at is None


def test_where_a_limit_refuses() -> None:
    """Metrics and spans name the exhausted scope, or the store that could not be asked."""
    admitted = of_run(0, 1, 3)
    exhausted = dataclasses.replace(admitted, reason="exhausted", scope="run")
    unknown = dataclasses.replace(admitted, reason="store")
    found = [(each.refused, each.refusal_scope) for each in (admitted, exhausted, unknown)]
    assert found == [(False, None), (True, "run"), (True, "store")]


def test_the_last_of_several_windows_counts() -> None:
    """With the minute's and the day's quota used up a call waits for the day's end."""
    minute, day = use("minute", 1, 1, 1, MINUTE), use("daily", 5, 5, 5, DAY)
    assert of_quotas(minute, day, scope="minute").resets_at == DAY
    assert of_quotas(minute, use("daily", 4, 4, 5, DAY), scope="minute").resets_at == MINUTE
    for_good = use("global", 9, 9, 9)
    assert of_quotas(minute, for_good, scope="minute").resets_at is None


def test_a_call_too_large_for_what_is_left() -> None:
    """A quota that is not quite used up, but refuses, is the one whose window must end."""
    assert of_quotas(use("daily", 4, 4, 5, DAY), scope="daily").resets_at == DAY


def test_a_refused_call_waits_for_all_limits() -> None:
    """It resets when the last of the windows ends, and never if one of its limits has none."""
    minute = of_quotas(use("minute", 1, 1, 1, MINUTE), scope="minute")
    day = of_quotas(use("daily", 5, 5, 5, DAY), scope="daily")
    run = dataclasses.replace(of_run(3, 3, 3), charged=False, reason="exhausted", scope="run")
    trial = dataclasses.replace(run, enforced=False)
    call = Call("tool", "search")

    def resets_at(*statuses: LimitStatus) -> datetime | None:
        return Decision(call, Outcome.BLOCKED, statuses).resets_at

    assert resets_at(minute, day) == resets_at(day, minute) == DAY
    assert resets_at(minute, OPEN) == MINUTE
    assert resets_at(minute, run) is None
    assert resets_at(minute, trial) == MINUTE
    assert resets_at() is None
