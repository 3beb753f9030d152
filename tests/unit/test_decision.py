"""The records of judged calls, and the thresholds that are compared in one place."""

import dataclasses
from datetime import datetime

from langchain_quota import Level, LimitStatus, QuotaStatus
from langchain_quota.decision import SCOPES

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


def test_counts_by_scope() -> None:
    """Threshold and counts of a scope are those of the thread or of the run, not swapped."""
    status = LimitStatus("x", "end", 1, 2, 3, 4, 5, 6)
    rows = {
        scope: (status.before(scope), status.used(scope), status.threshold(scope))
        for scope in SCOPES
    }
    assert rows == {"thread": (1, 2, 3), "run": (4, 5, 6)}


def test_a_threshold_is_crossed_where_a_share_is_not_exact() -> None:
    """55 of 100 is near at a share of 0.55, though the binary product is a little above."""
    assert of_run(54, 55, 100).crossed("run", 0.55) is Level.NEAR
    assert of_run(53, 54, 100).crossed("run", 0.55) is None


def test_nothing_is_crossed_where_there_is_no_limit() -> None:
    """A scope without a limit, and a limit of 0 (exhausted from the start), are never crossed."""
    assert of_run(0, 100, None).crossed("run", 0.8) is None
    assert of_run(0, 0, 0).crossed("run", 0.8) is None
    assert of_run(7, 8, 10).crossed("thread", 0.8) is None


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
