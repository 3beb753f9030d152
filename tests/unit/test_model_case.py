"""The model call that is about to be made: what is asked, decided and written."""

from datetime import UTC, datetime
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from langchain_quota import ModelCallLimit, ModelCallLimitExceededError, Quota
from langchain_quota.engine import Limits, Outage
from langchain_quota.limits import QuotaTerms, Terms
from langchain_quota.middleware.model_case import ModelCase
from langchain_quota.middleware.rulings import Ruling
from langchain_quota.reservation import Grant, admit
from langchain_quota.state import LEDGER, THREAD_MODEL, Ledger

ANN, THREAD = "model:user_id:ann", "model:thread:7"
DAY = datetime(2026, 1, 2, tzinfo=UTC)


def terms_of(**arguments: Any) -> Terms:
    """Model calls of Ann, 5 of them in a day, and 9 of the thread."""
    limit = ModelCallLimit(thread_limit=9, quotas=[Quota(5, per="user_id")], **arguments)
    return Terms.of(limit, thread_key=THREAD, quotas=(QuotaTerms("user_id", 5, "ann", ANN, DAY),))


def state_of(thread: int = 0, known: Ledger | None = None) -> dict[str, Any]:
    state = {"messages": [HumanMessage("go", id="h")], THREAD_MODEL: thread}
    return state if known is None else {**state, LEDGER: known}


OWING = Ledger(owed={"refund": {ANN: 2}})


def case_of(state: dict[str, Any], *terms: Terms) -> ModelCase:
    return ModelCase(state, None, Limits(terms or [terms_of()]), judge="QuotaMiddleware")


def granted(case: ModelCase, **kept: int) -> Grant:
    """A store's answer where Ann or the thread have used so much."""
    names = {ANN: "ann", THREAD: "thread"}
    used = [
        kept.get(names.get(slot.key or "", ""), slot.used) for slot in case.plan.reservation.slots
    ]
    return admit(case.plan.reservation, used)


def alone(case: ModelCase, outage: Outage) -> Ruling:
    other = case.without_store(outage)
    return other.rule(other.plan.own_grant())


def written(ruling: Ruling) -> dict[str, Any]:
    assert ruling.error is None
    assert ruling.update is not None
    return ruling.update


def test_a_call_is_charged_when_it_is_admitted() -> None:
    """The thread's count is the store's and the run's its own, each with this call."""
    case = case_of(state_of(2, Ledger(run_model=1)))
    ruling = case.rule(granted(case, thread=4))
    assert [decision.outcome for decision in ruling.decisions] == ["allowed"]
    assert written(ruling) == {THREAD_MODEL: 5, LEDGER: Ledger(run_model=2, final="")}


def test_without_a_store_the_states_count_holds() -> None:
    """Limits that no store counts are judged and charged by the state alone."""
    case = case_of(state_of(2), Terms.of(ModelCallLimit(thread_limit=3)))
    assert not case.plan.reservation.shared
    update = written(case.rule(case.plan.own_grant()))
    assert (update[THREAD_MODEL], update[LEDGER]["run_model"]) == (3, 1)
    over = case_of(state_of(3), Terms.of(ModelCallLimit(thread_limit=3)))
    assert written(over.rule(over.plan.own_grant()))["jump_to"] == "end"


def test_a_quota_ends_the_run() -> None:
    """Where the user's quota is used up the model is not called, and nothing is counted."""
    case = case_of(state_of())
    update = written(case.rule(granted(case, ann=5)))
    (message,) = update.pop("messages")
    assert update == {"jump_to": "end"}
    assert isinstance(message, AIMessage)
    assert message.content == (
        "Model call limits exceeded: user_id limit (5/5; resets at 2026-01-02T00:00:00Z)"
    )


def test_a_quota_raises() -> None:
    """The exception has the thread's and the run's counts before the call, and the decision."""
    case = case_of(state_of(2), terms_of(exit_behavior="error"))
    ruling = case.rule(granted(case, ann=5, thread=4))
    assert ruling.update is None
    error = ruling.error
    assert isinstance(error, ModelCallLimitExceededError)
    assert (error.thread_count, error.run_count, error.thread_limit) == (4, 0, 9)
    assert error.decision is ruling.decisions[0]
    assert error.decision.resets_at == DAY


@pytest.mark.parametrize(
    ("kept", "final"),
    [
        ({"ann": 3}, ""),
        (
            {"ann": 4},
            "Model call limits exceeded: user_id limit (5/5; resets at 2026-01-02T00:00:00Z)",
        ),
        ({"thread": 7}, ""),
        ({"thread": 8}, "Model call limits exceeded: thread limit (9/9)"),
    ],
)
def test_the_last_call_of_a_quota_is_told_so(kept: dict[str, int], final: str) -> None:
    """The call that uses the user's quota, or the thread's limit, up is the final one.

    What the run ends with, if that call does not end it, is what the next one would be told.
    """
    case = case_of(state_of(), terms_of(exit_behavior="finalize"))
    assert written(case.rule(granted(case, **kept)))[LEDGER]["final"] == final


def test_the_last_call_in_an_outage() -> None:
    """Without the store, the last call is that of the state's counts, and names what they reach."""
    case = case_of(state_of(8), terms_of(exit_behavior="finalize"))
    assert written(alone(case, "allow"))[LEDGER]["final"] == (
        "Model call limits exceeded: thread limit (9/9)"
    )


def test_what_is_owed_is_paid_with_the_next_call() -> None:
    """Refunds of tool calls travel with the reservation, and are then forgotten."""
    case = case_of(state_of(known=Ledger(owed={"refund": {"search:user_id:ann": 2}})))
    (settlement,) = case.plan.reservation.settlements
    assert (settlement.id, settlement.amounts) == ("refund", {"search:user_id:ann": -2})
    assert written(case.rule(granted(case)))[LEDGER]["owed"] == {}


def test_a_refused_call_pays_what_is_owed() -> None:
    """The store has taken it back whatever it said to the call."""
    case = case_of(state_of(known=OWING))
    assert written(case.rule(granted(case, ann=5)))[LEDGER] == {"owed": {}}


def test_an_error_leaves_what_is_owed() -> None:
    """Where nothing can be written the refund is sent again, under the same name."""
    state = state_of(known=OWING)
    case = case_of(state, terms_of(exit_behavior="error"))
    assert case.rule(granted(case, ann=5)).update is None
    assert case_of(state).plan.reservation.settlements == case.plan.reservation.settlements


def test_without_a_store_what_is_owed_waits() -> None:
    """Limits that no store counts leave it as it is."""
    state = state_of(known=OWING)
    case = case_of(state, Terms.of(ModelCallLimit(thread_limit=3)))
    assert "owed" not in written(case.rule(case.plan.own_grant()))[LEDGER]


def test_an_outage_refuses() -> None:
    """A denied call ends the run with the reason, charges nothing and forgets no refund."""
    case = case_of(state_of(2, known=OWING))
    ruling = alone(case, "deny")
    (standing,) = ruling.decisions[0].standings
    assert (ruling.decisions[0].outcome, standing.scope) == ("blocked", "store")
    update = written(ruling)
    (message,) = update.pop("messages")
    assert message.content == "Model call limit could not be checked: try again later."
    assert update == {"jump_to": "end"}


def test_an_outage_allows_what_the_state_allows() -> None:
    """Without the quota, thread and run hold by the state's counts, which go on."""
    update = written(alone(case_of(state_of(8, OWING)), "allow"))
    assert update == {THREAD_MODEL: 9, LEDGER: Ledger(run_model=1, final="")}
    assert written(alone(case_of(state_of(9)), "allow"))["jump_to"] == "end"


def test_an_outage_is_of_one_judging() -> None:
    """The case itself still asks the store, and still pays what is owed."""
    case = case_of(state_of(known=OWING))
    alone(case, "deny")
    assert case.plan.reservation.shared
    assert written(case.rule(granted(case)))[LEDGER]["owed"] == {}


def test_a_call_that_is_charged_later_writes_nothing() -> None:
    """Judged without charging, an admitted call is shown and leaves the counts where they are."""
    case = case_of(state_of(2), Terms.of(ModelCallLimit(thread_limit=3)))
    ruling = case.rule(case.plan.own_grant(), charging=False)
    assert ruling.update is None
    (standing,) = ruling.decisions[0].standings
    assert (standing.charged, standing.deferred, standing.thread_count) == (False, True, 2)


def test_without_limits_nothing_is_written() -> None:
    """A model that nobody limits is told of, and not counted."""
    case = ModelCase(state_of(2), None, Limits([]), judge="QuotaMiddleware")
    ruling = case.rule(case.plan.own_grant())
    assert [decision.outcome for decision in ruling.decisions] == ["allowed"]
    assert ruling.update is None


def test_each_call_is_a_reservation_of_its_own() -> None:
    """Outside of a graph no call is taken for another that ran again."""
    first, second = (case_of(state_of()).plan.reservation for _ in range(2))
    assert first.id != second.id
    assert first.attempt != second.attempt
