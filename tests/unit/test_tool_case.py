"""From a hook's state to what is written: giving up, the last call, and several limits at once."""

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from langchain_quota import Quota, ToolCallLimit, ToolCallLimitExceededError, messages
from langchain_quota.engine import Limits, Outage
from langchain_quota.limits import Limit, QuotaTerms, Terms
from langchain_quota.middleware.rulings import Ruling
from langchain_quota.middleware.tool_case import ToolCase, tool_case
from langchain_quota.reservation import Grant, admit
from langchain_quota.state import LEDGER, RUN_TOOLS, THREAD_TOOLS, Batch, Ledger, ToolCounts


def state_of(*tools: str, **values: Any) -> dict[str, Any]:
    """The state in which the model has just called these tools."""
    tool_calls = [
        {"name": tool, "args": {}, "id": f"call-{index}", "type": "tool_call"}
        for index, tool in enumerate(tools)
    ]
    return {
        "messages": [HumanMessage("go", id="h"), AIMessage("", tool_calls=tool_calls, id="m")],
        **values,
    }


def rule(state: dict[str, Any], *limits: Limit) -> Ruling:
    terms = [Terms.of(limit) for limit in limits]
    case = tool_case(state, None, Limits(terms), judge="QuotaMiddleware", every_call=True)
    assert case is not None
    return case.rule()


def written(ruling: Ruling) -> dict[str, Any]:
    assert ruling.error is None
    assert ruling.update is not None
    return ruling.update


def outcomes(ruling: Ruling) -> list[str]:
    return [decision.outcome.value for decision in ruling.decisions]


def answers(update: dict[str, Any]) -> dict[str, str]:
    """The answers by tool call id."""
    found: Sequence[Any] = update.get("messages", ())
    return {each.tool_call_id: str(each.content) for each in found if isinstance(each, ToolMessage)}


FORBIDDEN = ToolCallLimit("search", run_limit=0, give_up_after=3)


def test_refusals_are_counted_over_a_run() -> None:
    """Below the number of refusals the run goes on, and what was refused is remembered."""
    first = written(rule(state_of("search"), FORBIDDEN))
    assert first[LEDGER]["refusals"] == {"QuotaMiddleware": {"tool:search": 1}}
    assert "jump_to" not in first
    second = written(rule(state_of("search", **{LEDGER: first[LEDGER]}), FORBIDDEN))
    assert second[LEDGER]["refusals"] == {"QuotaMiddleware": {"tool:search": 2}}
    assert "jump_to" not in second


def test_the_run_ends_at_the_last_refusal_allowed() -> None:
    """The batch that reaches the number is stopped: refused, skipped, and charged to nobody."""
    state = state_of(
        "calc", "search", **{LEDGER: Ledger(refusals={"QuotaMiddleware": {"tool:search": 2}})}
    )
    ruling = rule(state, FORBIDDEN, ToolCallLimit("calc", run_limit=9))
    assert outcomes(ruling) == ["skipped", "blocked"]
    update = written(ruling)
    assert update["jump_to"] == "end"
    assert not any(update[THREAD_TOOLS].values())
    assert answers(update) == {
        "call-0": messages.SKIPPED,
        "call-1": "Tool call limit exceeded. Do not call 'search' again.",
    }
    assert update["messages"][-1].content == (
        "'search' tool call limit reached: run limit exceeded (1/0 calls)."
    )
    (standing,) = ruling.decisions[1].standings
    assert standing.exit_behavior == "end"


def test_one_batch_can_be_enough() -> None:
    """Refusals are counted by call: three in one message are three."""
    assert written(rule(state_of(*["search"] * 3), FORBIDDEN))["jump_to"] == "end"
    assert "jump_to" not in written(rule(state_of(*["search"] * 2), FORBIDDEN))


def test_each_limit_gives_up_on_its_own() -> None:
    """The refusals of one limit are not those of another."""
    other = ToolCallLimit("calc", run_limit=0, give_up_after=3)
    state = state_of(
        "calc", "search", **{LEDGER: Ledger(refusals={"QuotaMiddleware": {"tool:search": 1}})}
    )
    update = written(rule(state, FORBIDDEN, other))
    assert update[LEDGER]["refusals"] == {"QuotaMiddleware": {"tool:search": 2, "tool:calc": 1}}
    assert "jump_to" not in update


def test_a_limit_that_does_not_give_up_is_not_counted() -> None:
    """Without `give_up_after` a limit refuses for ever, and nothing is kept of it."""
    limit = ToolCallLimit("search", run_limit=0)
    update = written(rule(state_of(*["search"] * 50), limit))
    assert update[LEDGER]["refusals"] == {}
    assert "jump_to" not in update


def test_what_is_allowed_is_no_refusal() -> None:
    """Calls within the limit do not bring its patience to an end."""
    limit = ToolCallLimit("search", run_limit=9, give_up_after=1)
    update = written(rule(state_of("search", "search"), limit))
    assert update[LEDGER]["refusals"] == {}
    assert "jump_to" not in update


def test_giving_up_does_not_stop_a_delivered_response() -> None:
    """Where the batch has delivered the structured response, the refusal only refuses."""
    state = state_of(
        "search", "Weather", **{LEDGER: Ledger(refusals={"QuotaMiddleware": {"tool:search": 2}})}
    )
    state["messages"].append(ToolMessage("ok", tool_call_id="call-1"))
    state["structured_response"] = {"degrees": 12}
    update = written(rule(state, FORBIDDEN))
    assert "jump_to" not in update
    assert list(answers(update)) == ["call-0"]


def test_the_last_calls_tools_do_not_run() -> None:
    """What the last admitted model call asks for is answered, not run, not charged; it ends."""
    state = state_of("search", "calc", **{LEDGER: Ledger(final="That was all.")})
    ruling = rule(state, ToolCallLimit(run_limit=9))
    assert outcomes(ruling) == ["skipped", "skipped"]
    update = written(ruling)
    assert update["jump_to"] == "end"
    assert answers(update) == {"call-0": messages.FINALIZED, "call-1": messages.FINALIZED}
    assert THREAD_TOOLS not in update


@pytest.mark.parametrize("reverse", [False, True])
def test_an_error_names_every_limit_that_was_hit(reverse: bool) -> None:  # noqa: FBT001 - both orders
    """The exception has the numbers of the limit that raises, and the text of all."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=0),
        ToolCallLimit(thread_limit=0, exit_behavior="error"),
    ]
    error = rule(state_of("search"), *(limits[::-1] if reverse else limits)).error
    assert isinstance(error, ToolCallLimitExceededError)
    assert (error.thread_limit, error.run_limit, error.tool_name) == (0, None, None)
    texts = [
        "'search' tool call limit reached: run limit exceeded (1/0 calls).",
        "Tool call limit reached: thread limit exceeded (1/0 calls).",
    ]
    assert str(error) == " ".join(texts[::-1] if reverse else texts)


def test_what_would_block_runs() -> None:
    """A call that a limit on trial refuses gets no answer of ours, is counted and not refunded."""
    trial = ToolCallLimit("search", run_limit=0, enforce=False)
    ruling = rule(state_of("search"), trial)
    assert outcomes(ruling) == ["would_block"]
    update = written(ruling)
    assert "messages" not in update
    assert update[THREAD_TOOLS] == {"search": 1}
    assert update[LEDGER]["run_tools"] == {"search": 1}
    again = rule({**state_of("search"), **update}, trial)
    assert written(again)[THREAD_TOOLS] == {"search": 1}
    assert again.refunds == ()


def test_two_limits_on_trial_count_a_call_once() -> None:
    """Limits on trial over one count that both refuse a call count it once."""
    first = ToolCallLimit("search", run_limit=0, enforce=False, name="first")
    second = ToolCallLimit("search", thread_limit=0, enforce=False, name="second")
    update = written(rule(state_of("search"), first, second))
    assert update[THREAD_TOOLS] == update[LEDGER]["run_tools"] == {"search": 1}


JUDGE = "QuotaMiddleware"
ANN, ALL, THREAD = "search:user_id:ann", "__all__:global:", "search:thread:7"


def shared_terms(**arguments: Any) -> Terms:
    """Searches of Ann, 5 of them, and 9 of the thread."""
    limit = ToolCallLimit("search", thread_limit=9, quotas=[Quota(5, per="user_id")], **arguments)
    return Terms.of(limit, thread_key=THREAD, quotas=(QuotaTerms("user_id", 5, "ann", ANN),))


EVERYBODY = Terms.of(
    ToolCallLimit(quotas=[Quota(99, per="global")]),
    quotas=(QuotaTerms("global", 99, "", ALL),),
)


def shared_case(state: dict[str, Any], *terms: Terms) -> ToolCase:
    case = tool_case(state, None, Limits(terms or [shared_terms()]), judge=JUDGE, every_call=True)
    assert case is not None
    return case


def granted(case: ToolCase, **kept: int) -> Grant:
    """A store's answer where Ann, the thread or all have used so much."""
    names = {ANN: "ann", THREAD: "thread", ALL: "everybody"}
    used = [
        kept.get(names.get(slot.key or "", ""), slot.used) for slot in case.plan.reservation.slots
    ]
    return admit(case.plan.reservation, used)


def taken_back(case: ToolCase) -> list[dict[str, int]]:
    """What a store is asked to take back first."""
    return [dict(each.amounts) for each in case.plan.reservation.settlements]


def reserved(update: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    batch: Batch = update[LEDGER]["batch"]
    return batch.get("reserved", {})


def after(state: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    """The state once an update is written, without its messages."""
    known = {**state.get(LEDGER, {}), **update[LEDGER]}
    return {**state, THREAD_TOOLS: update[THREAD_TOOLS], LEDGER: known}


def test_the_state_mirrors_what_the_store_counts() -> None:
    """A thread's count is the store's, with what other runs have charged; the run's is its own."""
    state = state_of("search", **{THREAD_TOOLS: {"search": 1}})
    case = shared_case(state)
    update = written(case.rule(granted(case, thread=6)))
    assert update[THREAD_TOOLS] == {"search": 7}
    assert update[LEDGER]["run_tools"] == {"search": 1}


def test_what_the_store_charged_is_written_down() -> None:
    """Each call that is let through is kept with what it may have to be given back."""
    case = shared_case(state_of("search", "calc", "search"), shared_terms(), EVERYBODY)
    update = written(case.rule(granted(case, ann=4)))
    assert reserved(update) == {
        "call-0": {JUDGE: {ANN: 1, THREAD: 1, ALL: 1}},
        "call-1": {JUDGE: {ALL: 1}},
    }
    assert list(answers(update)) == ["call-2"]


@pytest.mark.parametrize("behavior", ["end", "error"])
def test_a_stopped_batch_reserves_nothing(behavior: Any) -> None:
    """What is stopped is charged nowhere: there is nothing to give back."""
    case = shared_case(state_of("search", "search"), shared_terms(exit_behavior=behavior))
    ruling = case.rule(granted(case, ann=4))
    assert outcomes(ruling) == ["skipped", "blocked"]
    if behavior == "error":
        assert isinstance(ruling.error, ToolCallLimitExceededError)
        assert ruling.error.decision is ruling.decisions[1]
        assert ruling.update is None
    else:
        update = written(ruling)
        assert reserved(update) == {}
        assert update[THREAD_TOOLS] == {"search": 0}


def test_an_error_tells_of_the_quota() -> None:
    """The exception names what is used up; its own counts are those of thread and run."""
    case = shared_case(state_of("search"), shared_terms(exit_behavior="error"))
    error = case.rule(granted(case, ann=5, thread=2)).error
    assert isinstance(error, ToolCallLimitExceededError)
    assert str(error) == "'search' tool call limit reached: user_id limit exceeded (6/5 calls)."
    assert (error.thread_count, error.thread_limit, error.tool_name) == (3, 9, "search")


def test_a_batch_that_is_judged_again_is_renewed() -> None:
    """What it was charged before is taken back with the new reservation, and charged once."""
    state = state_of("search")
    first = shared_case(state)
    assert taken_back(first) == []
    update = written(first.rule(granted(first, ann=2, thread=2)))
    again = shared_case(after(state, update))
    assert taken_back(again) == [{ANN: -1, THREAD: -1}]
    second = written(again.rule(granted(again, ann=2, thread=2)))
    assert reserved(second) == reserved(update)
    assert second[THREAD_TOOLS] == update[THREAD_TOOLS] == {"search": 3}


def test_a_batch_that_is_judged_again_and_refused() -> None:
    """The store took its charge back with the reservation: nothing is owed in addition."""
    state = state_of("search")
    first = shared_case(state)
    update = written(first.rule(granted(first)))
    again = shared_case(after(state, update))
    second = written(again.rule(granted(again, ann=5)))
    assert reserved(second) == {}
    assert not second[LEDGER].get("owed")
    assert list(answers(second)) == ["call-0"]


def test_what_another_middleware_reserved_stays() -> None:
    """A second middleware's judging leaves the first one's charges under other keys alone."""
    state = state_of("search")
    first = shared_case(state)
    known = after(state, written(first.rule(granted(first))))
    other = tool_case(known, None, Limits([EVERYBODY]), judge="Other", every_call=True)
    assert other is not None
    assert taken_back(other) == []
    update = written(other.rule(granted(other)))
    assert reserved(update) == {"call-0": {JUDGE: {ANN: 1, THREAD: 1}, "Other": {ALL: 1}}}


def test_what_another_middleware_refuses_is_owed() -> None:
    """A call that a limiter without a store refuses later is to be taken back by the store."""
    state = state_of("search")
    first = shared_case(state)
    known = after(state, written(first.rule(granted(first))))
    update = written(rule(known, ToolCallLimit(run_limit=0, name="strict")))
    assert reserved(update) == {}
    assert list(update[LEDGER]["owed"].values()) == [{ANN: 1, THREAD: 1}]
    assert update[THREAD_TOOLS]["search"] == 0


def test_what_is_owed_is_paid_with_the_next_batch() -> None:
    """Refunds travel with the next reservation under their own names, and are then forgotten."""
    state = state_of("search", **{LEDGER: Ledger(owed={"refund": {ANN: 2}})})
    case = shared_case(state)
    assert taken_back(case) == [{ANN: -2}]
    assert [each.id for each in case.plan.reservation.settlements] == ["refund"]
    assert written(case.rule(granted(case)))[LEDGER]["owed"] == {}


def test_what_is_owed_waits_for_a_batch_that_asks_the_store() -> None:
    """Limits that no store counts leave it as it is."""
    state = state_of("search", **{LEDGER: Ledger(owed={"refund": {ANN: 2}})})
    update = written(rule(state, ToolCallLimit("search", run_limit=9)))
    assert "owed" not in update[LEDGER]


def alone(case: ToolCase, outage: Outage) -> Ruling:
    """What is decided where the store cannot be asked."""
    other = case.without_store(outage)
    return other.rule(other.plan.own_grant())


def test_an_outage_refuses_and_writes_no_charge() -> None:
    """A denied call is answered as unchecked; thread and run are as before."""
    state = state_of("search", "calc", **{THREAD_TOOLS: {"search": 4}})
    update = written(alone(shared_case(state), "deny"))
    assert list(answers(update)) == ["call-0"]
    assert "could not be checked" in answers(update)["call-0"]
    assert (update[THREAD_TOOLS], reserved(update)) == ({"search": 4}, {})


def test_an_outage_that_allows_counts_in_the_state() -> None:
    """What runs is counted in thread and run, and kept as what the store will be told of."""
    state = state_of("search", "search", **{THREAD_TOOLS: {"search": 8}})
    update = written(alone(shared_case(state), "allow"))
    assert list(answers(update)) == ["call-1"]
    assert "exceeded" in answers(update)["call-1"]
    assert update[THREAD_TOOLS] == {"search": 9}
    assert update[LEDGER]["run_tools"] == {"search": 1}
    assert reserved(update) == {"call-0": {JUDGE: {ANN: 1, THREAD: 1}}}


def test_an_outage_that_denies_lets_a_trial_run() -> None:
    """What a limit on trial lets through is kept as what the store will be told of, too."""
    case = shared_case(state_of("search"), shared_terms(enforce=False))
    ruling = alone(case, "deny")
    assert outcomes(ruling) == ["would_block"]
    assert reserved(written(ruling)) == {"call-0": {JUDGE: {ANN: 1, THREAD: 1}}}


@pytest.mark.parametrize("outage", ["deny", "allow"])
def test_in_an_outage_what_is_owed_waits(outage: Outage) -> None:
    """What could not be taken back now is still to be taken back."""
    state = state_of("search", **{LEDGER: Ledger(owed={"refund": {ANN: 2}})})
    case = shared_case(state)
    assert "owed" not in written(alone(case, outage))[LEDGER]
    # The case itself still asks the store.
    assert case.plan.reservation.shared
    assert written(case.rule(granted(case)))[LEDGER]["owed"] == {}


@pytest.mark.parametrize("outage", ["deny", "allow"])
def test_an_outage_of_a_batch_that_was_charged_before(outage: Outage) -> None:
    """Judged again without the store, a call's earlier charge is to be taken back by it."""
    state = state_of("search")
    first = shared_case(state)
    charged = written(first.rule(granted(first)))
    update = written(alone(shared_case(after(state, charged)), outage))
    assert list(update[LEDGER]["owed"].values()) == [{ANN: 1, THREAD: 1}]
    assert reserved(update) == ({} if outage == "deny" else reserved(charged))


def test_twins_are_reserved_by_their_id() -> None:
    """Two calls of one id are kept as one charge of their sum, and given back as one."""
    state = state_of("search", "search")
    for call in state["messages"][1].tool_calls:
        call["id"] = "twin"
    case = shared_case(state)
    update = written(case.rule(granted(case)))
    assert reserved(update) == {"twin": {JUDGE: {ANN: 2, THREAD: 2}}}
    assert update[RUN_TOOLS] == {"search": 2}
    counts = ToolCounts.of(after(state, update), "m")
    counts.take_back("twin")
    assert list(counts.owed.values()) == [{ANN: 2, THREAD: 2}]
    assert counts.thread == {"search": 0}


def test_the_last_calls_tools_ask_no_store() -> None:
    """Calls that do not run whatever the counts are charge nothing anywhere."""
    case = shared_case(state_of("search", **{LEDGER: Ledger(final="That was all.")}))
    assert not case.plan.reservation.shared
    assert outcomes(case.rule(case.plan.own_grant())) == ["skipped"]
