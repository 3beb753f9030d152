"""The model call that is about to be made: what is asked, decided and written."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from langchain_quota import ModelCallLimit, ModelCallLimitExceededError, Quota
from langchain_quota.admission import admit
from langchain_quota.middleware._calls import Conclusion, Request
from langchain_quota.middleware._model_calls import conclude, pending
from langchain_quota.resolved import Outage, ResolvedLimit, ResolvedLimits, ResolvedQuota
from langchain_quota.state import LEDGER, THREAD_MODEL, Ledger

ANN, THREAD = "model:user_id:ann", "model:thread:7"
DAY = datetime(2026, 1, 2, tzinfo=UTC)
USED_UP = "Model call limits exceeded: user_id limit (5/5; resets at 2026-01-02T00:00:00Z)"
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


def in_outage(request: Request, outage: Outage) -> Conclusion:
    """What is concluded where the store was asked, and did not answer."""
    request.to_store()
    return conclude(request, request.without_store(outage))


def written(conclusion: Conclusion) -> dict[str, Any]:
    assert conclusion.error is None
    assert conclusion.update is not None
    return conclusion.update


def test_a_call_is_charged_when_it_is_admitted() -> None:
    """The thread's count is the store's and the run's its own, each with this call."""
    conclusion = by_store(request_of(state_of(2, Ledger(run_model=1))), thread=4)
    assert [decision.outcome for decision in conclusion.decisions] == ["allowed"]
    assert written(conclusion) == {THREAD_MODEL: 5, LEDGER: Ledger(run_model=2, final="")}


def test_without_a_store_the_states_count_holds() -> None:
    """Limits that no store counts are judged and charged by the state alone."""
    assert not request_of(state_of(2), OF_THE_STATE).shared
    update = written(by_state(state_of(2), OF_THE_STATE))
    assert (update[THREAD_MODEL], update[LEDGER]["run_model"]) == (3, 1)
    assert written(by_state(state_of(3), OF_THE_STATE))["jump_to"] == "end"


def test_a_quota_ends_the_run() -> None:
    """Where the user's quota is used up the model is not called, and nothing is counted."""
    update = written(by_store(request_of(state_of()), ann=5))
    (message,) = update.pop("messages")
    assert update == {"jump_to": "end", "langchain_quota": {"ended": message.id}}
    assert isinstance(message, AIMessage)
    assert message.content == USED_UP


def test_a_quota_raises() -> None:
    """The exception has the thread's and the run's counts before the call, and the decision."""
    request = request_of(state_of(2), shared_limit(exit_behavior="error"))
    conclusion = by_store(request, ann=5, thread=4)
    assert conclusion.update is None
    error = conclusion.error
    assert isinstance(error, ModelCallLimitExceededError)
    assert (error.thread_count, error.run_count, error.thread_limit) == (4, 0, 9)
    assert error.decision is conclusion.decisions[0]
    assert error.decision.resets_at == DAY


@pytest.mark.parametrize(
    ("kept", "final"),
    [
        ({"ann": 3, "thread": 7}, ""),
        ({"ann": 4}, USED_UP),
        ({"thread": 8}, "Model call limits exceeded: thread limit (9/9)"),
    ],
)
def test_the_last_call_is_known(kept: dict[str, int], final: str) -> None:
    """The call that uses up the user's quota, or the thread's limit, is the final one.

    If it does not end the run, the run ends with what the next call would read.
    """
    request = request_of(state_of(), shared_limit(exit_behavior="finalize"))
    assert written(by_store(request, **kept))[LEDGER]["final"] == final


def test_the_last_call_in_an_outage() -> None:
    """Without the store, the last call is that of the state's counts, and names what they reach."""
    request = request_of(state_of(8), shared_limit(exit_behavior="finalize"))
    final = written(in_outage(request, "allow"))[LEDGER]["final"]
    assert final == "Model call limits exceeded: thread limit (9/9)"


@pytest.mark.parametrize("ann", [0, 5], ids=["admitted", "refused"])
def test_pending_refunds_travel_with_the_next_call(ann: int) -> None:
    """The store takes them back whatever it says to the call, and then they are forgotten."""
    request = request_of(state_of(known=REFUND_DUE))
    (compensation,) = request.to_store().compensations
    assert (compensation.id, compensation.amounts) == ("refund", {ANN: -2})
    assert written(by_store(request, ann=ann))[LEDGER]["pending_refunds"] == {}


def test_an_error_leaves_pending_refunds() -> None:
    """Where nothing can be written they are sent again, under the same names."""
    state = state_of(known=REFUND_DUE)
    first = request_of(state, shared_limit(exit_behavior="error"))
    assert by_store(first, ann=5).update is None
    assert first.sent is not None
    assert request_of(state).to_store().compensations == first.sent.compensations


def test_without_a_store_pending_refunds_wait() -> None:
    """Limits that no store counts leave them as they are."""
    assert (
        "pending_refunds" not in written(by_state(state_of(known=REFUND_DUE), OF_THE_STATE))[LEDGER]
    )


def test_an_outage_that_denies_ends_the_run() -> None:
    """The call is refused with the reason, charges nothing, and leaves pending refunds."""
    conclusion = in_outage(request_of(state_of(2, known=REFUND_DUE)), "deny")
    (status,) = conclusion.decisions[0].limits
    assert (conclusion.decisions[0].outcome, status.reason) == ("blocked", "store")
    update = written(conclusion)
    (message,) = update.pop("messages")
    assert message.content == "Model call limit could not be checked: try again later."
    assert update == {"jump_to": "end", "langchain_quota": {"ended": message.id}}


def test_an_outage_that_allows_goes_by_the_state() -> None:
    """Without the quota, thread and run hold by the state's counts, which go on."""
    update = written(in_outage(request_of(state_of(8, REFUND_DUE)), "allow"))
    assert update == {THREAD_MODEL: 9, LEDGER: Ledger(run_model=1, final="")}
    assert written(in_outage(request_of(state_of(9)), "allow"))["jump_to"] == "end"


def test_a_call_that_is_charged_later_writes_nothing() -> None:
    """Judged without charging, an admitted call is decided and leaves the counts as they are."""
    conclusion = by_state(state_of(2), OF_THE_STATE, charging=False)
    assert conclusion.update is None
    (status,) = conclusion.decisions[0].limits
    assert (status.charged, status.deferred, status.thread_count) == (False, True, 2)


def test_without_limits_nothing_is_written() -> None:
    """A model that nobody limits has a decision about each call, and no count."""
    request = pending(state_of(2), None, ResolvedLimits([]), task="QuotaMiddleware")
    conclusion = conclude(request, request.by_state())
    assert [decision.outcome for decision in conclusion.decisions] == ["allowed"]
    assert conclusion.update is None


def test_a_step_that_runs_again_asks_the_same() -> None:
    """Its request has the same key, so that it is charged once, and is another attempt.

    One that asks for more has another key: the answer to the first would not fit.
    """
    info = SimpleNamespace(thread_id="7", checkpoint_ns="node:task", task_id="task")
    runtime = SimpleNamespace(execution_info=info)
    first, again = (request_of(state_of(), None, runtime).to_store() for _ in range(2))
    assert again.idempotency_key == first.idempotency_key
    assert again.attempt_id != first.attempt_id
    alone = ResolvedLimit.of(ModelCallLimit(thread_limit=9), thread_key=THREAD)
    other = request_of(state_of(), alone, runtime).to_store()
    assert other.idempotency_key != first.idempotency_key
