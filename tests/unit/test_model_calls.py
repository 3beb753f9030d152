"""The model call that is about to be made: what is asked, decided and written."""

from datetime import UTC, datetime
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from langchain_quota import ModelCallLimit, Quota
from langchain_quota.admission import admit
from langchain_quota.middleware._calls import Conclusion, Request
from langchain_quota.middleware._model_calls import conclude, pending
from langchain_quota.resolved import ResolvedLimit, ResolvedLimits, ResolvedQuota
from langchain_quota.state import LEDGER, THREAD_MODEL, Ledger

ANN, THREAD = "model:user_id:ann", "model:thread:7"
DAY = datetime(2026, 1, 2, tzinfo=UTC)
REFUND_DUE = Ledger(pending_refunds={"refund": {ANN: 2}})
OF_THE_STATE = ResolvedLimit.of(ModelCallLimit(thread_limit=3))


def shared_limit(**arguments: Any) -> ResolvedLimit:
    """Model calls of Ann, 5 of them in a day, and 9 of the thread."""
    limit = ModelCallLimit(thread_limit=9, quotas=[Quota(5, per="user_id")], **arguments)
    return ResolvedLimit.of(
        limit, thread_key=THREAD, quotas=(ResolvedQuota("user_id", 5, "ann", ANN, DAY),)
    )


def state_of(thread: int = 0, known: Ledger | None = None) -> dict[str, Any]:
    state = {"messages": [HumanMessage("go", id="h")], THREAD_MODEL: thread}
    return state if known is None else {**state, LEDGER: known}


def request_of(
    state: dict[str, Any], limit: ResolvedLimit | None = None, runtime: object = None
) -> Request:
    limits = ResolvedLimits([limit or shared_limit()])
    return pending(state, runtime, limits, task="QuotaMiddleware")


def by_state(state: dict[str, Any], limit: ResolvedLimit, *, charging: bool = True) -> Conclusion:
    """What is concluded where no store counts."""
    request = request_of(state, limit)
    return conclude(request, request.by_state(), charging=charging)


def by_store(request: Request, **kept: int) -> Conclusion:
    """What is concluded from a store's answer where Ann or the thread have used so much."""
    names = {ANN: "ann", THREAD: "thread"}
    sent = request.to_store()
    used = {
        name: kept.get(names.get(each.key or "", ""), each.used)
        for name, each in sent.counters.items()
    }
    request.answered = True
    return conclude(request, admit(sent.hits, used, sent.stops))


def written(conclusion: Conclusion) -> dict[str, Any]:
    assert conclusion.error is None
    assert conclusion.update is not None
    return conclusion.update


@pytest.mark.parametrize("ann", [0, 5], ids=["admitted", "refused"])
def test_pending_refunds_travel_with_the_next_call(ann: int) -> None:
    """The store takes them back whatever it says to the call, and then they are forgotten."""
    request = request_of(state_of(known=REFUND_DUE))
    (compensation,) = request.to_store().compensations
    assert (compensation.id, compensation.amounts) == ("refund", {ANN: -2})
    assert written(by_store(request, ann=ann))[LEDGER]["pending_refunds"] == {}


def test_a_call_that_is_charged_later_writes_nothing() -> None:
    """Judged without charging, an admitted call is decided and leaves the counts as they are."""
    conclusion = by_state(state_of(2), OF_THE_STATE, charging=False)
    assert conclusion.update is None
    (status,) = conclusion.decisions[0].limits
    assert (status.charged, status.deferred, status.thread_count) == (False, True, 2)
