"""From a hook's state to what is written, for the tool calls of one message."""

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from langchain_quota import Call, Quota, ToolCallLimit, ToolCallLimitExceededError, messages
from langchain_quota.admission import AcquireResult, admit
from langchain_quota.decision import Refund
from langchain_quota.limits import Limit
from langchain_quota.middleware._calls import Conclusion
from langchain_quota.middleware._tool_calls import BatchRequest, conclude, pending
from langchain_quota.middleware._tool_counts import ToolCounts
from langchain_quota.resolved import Outage, ResolvedLimit, ResolvedLimits, ResolvedQuota
from langchain_quota.state import LEDGER, RUN_TOOLS, THREAD_TOOLS, Batch, Ledger

QUOTA = "QuotaMiddleware"
ANN, ALL = "search:user_id:ann", "__all__:global:"
THREAD, RUN = "search:thread:7", "search:run:r1"


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


def request_of(
    state: dict[str, Any], *limits: Limit | ResolvedLimit, middleware: str = QUOTA
) -> BatchRequest:
    resolved = ResolvedLimits(
        each if isinstance(each, ResolvedLimit) else ResolvedLimit.of(each) for each in limits
    )
    request = pending(state, None, resolved, middleware=middleware, every_call=True)
    assert request is not None
    return request


def by_state(state: dict[str, Any], *limits: Limit) -> Conclusion:
    """What is concluded where no store counts."""
    request = request_of(state, *limits)
    return conclude(request, request.by_state())


def written(conclusion: Conclusion) -> dict[str, Any]:
    assert conclusion.error is None
    assert conclusion.update is not None
    return conclusion.update


def outcomes(conclusion: Conclusion) -> list[str]:
    return [decision.outcome.value for decision in conclusion.decisions]


def answers(update: dict[str, Any]) -> dict[str, str]:
    """The answers by tool call id."""
    found: Sequence[Any] = update.get("messages", ())
    return {each.tool_call_id: str(each.content) for each in found if isinstance(each, ToolMessage)}


def after(state: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    """The state once an update is written, without its messages."""
    known = {**state.get(LEDGER, {}), **update[LEDGER]}
    return {**state, THREAD_TOOLS: update[THREAD_TOOLS], LEDGER: known}


def test_without_limits_nothing_is_written() -> None:
    """Where no limit judges tool calls they are decided, and the state gets no key."""
    conclusion = by_state(state_of("search", "calc"))
    assert outcomes(conclusion) == ["allowed", "allowed"]
    assert conclusion.update is None


def test_without_limits_calls_get_an_id() -> None:
    """A message whose calls lack an id is replaced, and nothing else is written."""
    state = state_of("search", "calc")
    state["messages"][1].tool_calls[0]["id"] = None
    update = written(by_state(state))
    assert [*update] == ["messages"]
    (replacement,) = update["messages"]
    assert replacement.id == "m"
    assert [bool(each["id"]) for each in replacement.tool_calls] == [True, True]


def test_without_limits_what_others_charged_is_kept() -> None:
    """The state says that these calls passed here, too; the other limiter's charges stay."""
    state = state_of("search")
    other = request_of(state, ToolCallLimit("search", run_limit=9), middleware="Other")
    known = after(state, written(conclude(other, other.by_state())))
    update = written(by_state(known))
    assert update[LEDGER]["batch"] == {**known[LEDGER]["batch"], "passed": ["Other", QUOTA]}
    assert update[THREAD_TOOLS] == update[LEDGER]["run_tools"] == {"search": 1}


PATIENT = ToolCallLimit("search", run_limit=0, give_up_after=3)


def refused_before(**refusals: int) -> dict[str, Any]:
    """The ledger of a run in which limits on these tools have refused so many calls."""
    by_limit = {f"tool:{tool}": count for tool, count in refusals.items()}
    return {LEDGER: Ledger(refusals={QUOTA: by_limit})}


def test_refusals_are_counted_over_a_run() -> None:
    """Each limit that gives up counts its own refusals; others, and what is allowed, do not."""
    limits = [
        PATIENT,
        ToolCallLimit("calc", run_limit=0, give_up_after=3),
        ToolCallLimit("ask", run_limit=0),
        ToolCallLimit("read", run_limit=9, give_up_after=1),
    ]
    state = state_of("calc", "search", "ask", "read", **refused_before(search=1))
    update = written(by_state(state, *limits))
    assert update[LEDGER]["refusals"] == {QUOTA: {"tool:search": 2, "tool:calc": 1}}
    assert "jump_to" not in update


@pytest.mark.parametrize(
    ("before", "calls", "ends"), [(0, 2, False), (0, 3, True), (1, 1, False), (2, 1, True)]
)
def test_a_limit_gives_up_after_so_many_refusals(
    before: int,
    calls: int,
    ends: bool,  # noqa: FBT001 - a row of the table
) -> None:
    """The refused calls of a batch and of earlier ones are counted together."""
    update = written(
        by_state(state_of(*["search"] * calls, **refused_before(search=before)), PATIENT)
    )
    assert ("jump_to" in update) is ends


def test_the_batch_in_which_a_limit_gives_up_is_stopped() -> None:
    """Its calls are refused or skipped, nothing is charged, and the run ends with the reason."""
    state = state_of("calc", "search", **refused_before(search=2))
    conclusion = by_state(state, PATIENT, ToolCallLimit("calc", run_limit=9))
    assert outcomes(conclusion) == ["skipped", "blocked"]
    update = written(conclusion)
    assert update["jump_to"] == "end"
    assert not any(update[THREAD_TOOLS].values())
    assert answers(update) == {
        "call-0": messages.SKIPPED,
        "call-1": "Tool call limit exceeded. Do not call 'search' again.",
    }
    assert update["messages"][-1].content == (
        "'search' tool call limit reached: run limit exceeded (1/0 calls)."
    )
    (status,) = conclusion.decisions[1].limits
    assert status.exit_behavior == "end"


def test_giving_up_does_not_stop_a_delivered_response() -> None:
    """Where the batch has delivered the structured response, the refusal only refuses."""
    state = state_of("search", "Weather", **refused_before(search=2))
    state["messages"].append(ToolMessage("ok", tool_call_id="call-1"))
    state["structured_response"] = {"degrees": 12}
    update = written(by_state(state, PATIENT))
    assert "jump_to" not in update
    assert list(answers(update)) == ["call-0"]


@pytest.mark.parametrize("reverse", [False, True])
def test_an_error_names_every_limit_that_refuses(reverse: bool) -> None:  # noqa: FBT001 - both orders
    """The exception has the numbers of the limit that raises, and the text of all."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=0),
        ToolCallLimit(thread_limit=0, exit_behavior="error"),
    ]
    error = by_state(state_of("search"), *(limits[::-1] if reverse else limits)).error
    assert isinstance(error, ToolCallLimitExceededError)
    assert (error.thread_limit, error.run_limit, error.tool_name) == (0, None, None)
    texts = [
        "'search' tool call limit reached: run limit exceeded (1/0 calls).",
        "Tool call limit reached: thread limit exceeded (1/0 calls).",
    ]
    assert str(error) == " ".join(texts[::-1] if reverse else texts)


def test_what_would_be_blocked_runs() -> None:
    """A call that limits on trial refuse is not answered, counted once, and never refunded."""
    trials = [
        ToolCallLimit("search", run_limit=0, enforce=False, name="first"),
        ToolCallLimit("search", thread_limit=0, enforce=False, name="second"),
    ]
    conclusion = by_state(state_of("search"), *trials)
    assert outcomes(conclusion) == ["would_block"]
    update = written(conclusion)
    assert "messages" not in update
    assert update[THREAD_TOOLS] == update[LEDGER]["run_tools"] == {"search": 1}
    again = by_state(after(state_of("search"), update), *trials)
    assert written(again)[THREAD_TOOLS] == {"search": 1}
    assert again.refunds == []


def test_langchains_count_includes_refused_calls() -> None:
    """LangChain's run count has every call that was asked for, ours those that were let through."""
    state = state_of("search", "search", **{RUN_TOOLS: {"search": 5}, LEDGER: Ledger(run_tools={})})
    conclusion = by_state(state, ToolCallLimit("search", run_limit=1))
    assert outcomes(conclusion) == ["allowed", "blocked"]
    update = written(conclusion)
    assert update[RUN_TOOLS] == {"search": 7}
    assert update[LEDGER]["run_tools"] == update[THREAD_TOOLS] == {"search": 1}


@pytest.mark.parametrize(("edited", "outcome"), [(False, "allowed"), (True, "blocked")])
def test_charges_of_calls_that_are_judged_do_not_stand_in_their_way(
    edited: bool,  # noqa: FBT001 - a row of the table
    outcome: str,
) -> None:
    """What another middleware charged to these calls is left out of the counts before them.

    A call that a reviewer has since made one of another tool is not judged here: its charge counts.
    """
    state = state_of("search", "search")
    outer = request_of(state, ToolCallLimit("search", run_limit=9), middleware="Outer")
    known = after(state, written(conclude(outer, outer.by_state())))
    if edited:
        known["hitl_edited_tool_calls"] = {"call-0": {"name": "calc", "args": {}}}
    conclusion = by_state(known, ToolCallLimit("search", run_limit=2 - edited))
    assert outcomes(conclusion) == ["allowed", outcome]


def shared_limit(**arguments: Any) -> ResolvedLimit:
    """Searches of Ann, 5 of them, and 9 of the thread."""
    limit = ToolCallLimit("search", thread_limit=9, quotas=[Quota(5, per="user_id")], **arguments)
    return ResolvedLimit.of(
        limit, thread_key=THREAD, quotas=(ResolvedQuota("user_id", 5, "ann", ANN),)
    )


EVERYBODY = ResolvedLimit.of(
    ToolCallLimit(quotas=[Quota(99, per="global")]),
    quotas=(ResolvedQuota("global", 99, "", ALL),),
)


def shared_request(
    state: dict[str, Any], *limits: ResolvedLimit, middleware: str = QUOTA
) -> BatchRequest:
    return request_of(state, *(limits or [shared_limit()]), middleware=middleware)


def answered(request: BatchRequest, **kept: int) -> AcquireResult:
    """A store's answer where Ann, the thread or its run have used so much."""
    names = {ANN: "ann", THREAD: "thread", RUN: "run"}
    sent = request.to_store()
    used = {
        name: kept.get(names.get(each.key or "", ""), each.used)
        for name, each in sent.counters.items()
    }
    request.answered = True
    return admit(sent.hits, used, sent.stops)


def by_store(request: BatchRequest, **kept: int) -> Conclusion:
    """What is concluded from a store's answer."""
    return conclude(request, answered(request, **kept))


def in_outage(request: BatchRequest, outage: Outage) -> Conclusion:
    """What is concluded where the store was asked, and did not answer."""
    request.to_store()
    return conclude(request, request.without_store(outage))


def taken_back(request: BatchRequest) -> list[dict[str, int]]:
    """What a store is asked to take back first."""
    return [dict(each.amounts) for each in request.to_store().compensations]


def acquired(update: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """What is kept of a store's charges, by tool call id and middleware."""
    batch: Batch = update[LEDGER]["batch"]
    return batch.get("acquired", {})


REFUND_DUE = {LEDGER: Ledger(pending_refunds={"refund": {ANN: 2}})}


def test_tools_of_the_last_model_call_do_not_run() -> None:
    """They are answered and charged nowhere, no store is asked, and the run ends."""
    state = state_of("search", "calc", **{LEDGER: Ledger(final="That was all.")})
    request = shared_request(state)
    assert not request.shared
    conclusion = conclude(request, request.by_state())
    assert outcomes(conclusion) == ["skipped", "skipped"]
    update = written(conclusion)
    assert update["jump_to"] == "end"
    assert answers(update) == {"call-0": messages.FINALIZED, "call-1": messages.FINALIZED}
    assert update["messages"][-1].content == "That was all."
    assert THREAD_TOOLS not in update


@pytest.mark.parametrize(
    ("limit", "thread", "run"),
    [
        (shared_limit(), 7, 1),
        (
            ResolvedLimit.of(ToolCallLimit("search", run_limit=9), run_key=RUN),
            2,
            4,
        ),
        (
            ResolvedLimit.of(
                ToolCallLimit("search", quotas=[Quota(9)]),
                quotas=(ResolvedQuota("thread", 9, "7", THREAD, per="thread"),),
            ),
            7,
            1,
        ),
    ],
    ids=["thread", "run", "quota per thread"],
)
def test_the_state_mirrors_what_the_store_counts(
    limit: ResolvedLimit, thread: int, run: int
) -> None:
    """The thread's or run's count is the store's where it keeps one, with what others charged."""
    state = state_of("search", **{THREAD_TOOLS: {"search": 1}})
    update = written(by_store(shared_request(state, limit), thread=6, run=3))
    assert update[THREAD_TOOLS] == {"search": thread}
    assert update[LEDGER]["run_tools"] == {"search": run}


def test_what_the_store_charges_is_written_down() -> None:
    """Each call that is let through is kept with what the store may have to take back."""
    request = shared_request(state_of("search", "calc", "search"), shared_limit(), EVERYBODY)
    update = written(by_store(request, ann=4))
    assert acquired(update) == {
        "call-0": {QUOTA: {ANN: 1, THREAD: 1, ALL: 1}},
        "call-1": {QUOTA: {ALL: 1}},
    }
    assert list(answers(update)) == ["call-2"]


@pytest.mark.parametrize("behavior", ["end", "error"])
def test_a_stopped_batch_is_charged_nowhere(behavior: Any) -> None:
    """What is stopped leaves nothing to take back."""
    request = shared_request(state_of("search", "search"), shared_limit(exit_behavior=behavior))
    conclusion = by_store(request, ann=4)
    assert outcomes(conclusion) == ["skipped", "blocked"]
    if behavior == "error":
        assert isinstance(conclusion.error, ToolCallLimitExceededError)
        assert conclusion.error.decision is conclusion.decisions[1]
        assert conclusion.update is None
    else:
        update = written(conclusion)
        assert acquired(update) == {}
        assert update[THREAD_TOOLS] == {"search": 0}


def test_a_refund_keeps_its_name_where_the_store_does_not_answer() -> None:
    """The store may have made it: sent again under its name, it is made once."""
    state = state_of("search")
    judged = after(state, written(by_store(shared_request(state))))
    again = shared_request(judged)
    pending = written(in_outage(again, "allow"))[LEDGER]["pending_refunds"]
    assert again.sent is not None
    assert {*pending} == {each.id for each in again.sent.compensations} != set()


def test_an_error_names_the_quota() -> None:
    """The exception names what is used up; its own counts are those of thread and run."""
    request = shared_request(state_of("search"), shared_limit(exit_behavior="error"))
    error = by_store(request, ann=5, thread=2).error
    assert isinstance(error, ToolCallLimitExceededError)
    assert str(error) == "'search' tool call limit reached: user_id limit exceeded (6/5 calls)."
    assert (error.thread_count, error.thread_limit, error.tool_name) == (3, 9, "search")


def test_a_batch_that_is_judged_again_is_charged_once() -> None:
    """The store takes back what it charged before, in the step in which it judges anew."""
    state = state_of("search")
    first = shared_request(state)
    assert taken_back(first) == []
    update = written(by_store(first, ann=2, thread=2))
    known = after(state, update)
    assert taken_back(shared_request(known)) == [{ANN: -1, THREAD: -1}]
    admitted = written(by_store(shared_request(known), ann=2, thread=2))
    assert acquired(admitted) == acquired(update)
    assert admitted[THREAD_TOOLS] == update[THREAD_TOOLS] == {"search": 3}
    refused = written(by_store(shared_request(known), ann=5))
    assert acquired(refused) == {}
    assert not refused[LEDGER].get("pending_refunds")
    assert list(answers(refused)) == ["call-0"]


def test_what_another_middleware_had_charged_stays() -> None:
    """A second middleware that admits a call leaves the first one's charges under other keys."""
    state = state_of("search")
    known = after(state, written(by_store(shared_request(state))))
    other = shared_request(known, EVERYBODY, middleware="Other")
    assert taken_back(other) == []
    update = written(by_store(other))
    assert acquired(update) == {"call-0": {QUOTA: {ANN: 1, THREAD: 1}, "Other": {ALL: 1}}}


def test_what_another_middleware_had_charged_is_refunded() -> None:
    """A call that is refused now is taken back from every count, and the store is due to follow."""
    state = state_of("search")
    known = after(state, written(by_store(shared_request(state))))
    conclusion = by_state(known, ToolCallLimit(run_limit=0, name="strict"))
    assert conclusion.refunds == [Refund(Call("tool", "search", "call-0"), "tool:search")]
    update = written(conclusion)
    assert update[THREAD_TOOLS]["search"] == update[LEDGER]["run_tools"]["search"] == 0
    assert update[LEDGER]["batch"]["charges"] == acquired(update) == {}
    assert list(update[LEDGER]["pending_refunds"].values()) == [{ANN: 1, THREAD: 1}]


def test_pending_refunds_travel_with_the_next_batch() -> None:
    """The store takes them back under their own names, and then they are forgotten."""
    request = shared_request(state_of("search", **REFUND_DUE))
    (compensation,) = request.to_store().compensations
    assert (compensation.id, compensation.amounts) == ("refund", {ANN: -2})
    assert written(by_store(request))[LEDGER]["pending_refunds"] == {}


@pytest.mark.parametrize("outage", [None, "deny", "allow"])
def test_pending_refunds_wait_for_an_answer(outage: Outage | None) -> None:
    """They stay where no store is asked, and where it does not answer."""
    state = state_of("search", **REFUND_DUE)
    if outage is None:
        conclusion = by_state(state, ToolCallLimit("search", run_limit=9))
    else:
        conclusion = in_outage(shared_request(state), outage)
    assert "pending_refunds" not in written(conclusion)[LEDGER]


def test_an_outage_that_denies_charges_nothing() -> None:
    """A denied call is answered as not checked; the counts are as before."""
    state = state_of("search", "calc", **{THREAD_TOOLS: {"search": 4}})
    update = written(in_outage(shared_request(state), "deny"))
    assert list(answers(update)) == ["call-0"]
    assert "could not be checked" in answers(update)["call-0"]
    assert (update[THREAD_TOOLS], acquired(update)) == ({"search": 4}, {})


def test_an_outage_that_allows_counts_in_the_state() -> None:
    """What runs counts for thread and run, and is kept as what the store will charge later."""
    state = state_of("search", "search", **{THREAD_TOOLS: {"search": 8}})
    update = written(in_outage(shared_request(state), "allow"))
    assert list(answers(update)) == ["call-1"]
    assert "exceeded" in answers(update)["call-1"]
    assert update[THREAD_TOOLS] == {"search": 9}
    assert update[LEDGER]["run_tools"] == {"search": 1}
    assert acquired(update) == {"call-0": {QUOTA: {ANN: 1, THREAD: 1}}}


def test_an_outage_that_denies_lets_a_trial_run() -> None:
    """What a limit on trial lets through is kept as what the store will charge later, too."""
    conclusion = in_outage(shared_request(state_of("search"), shared_limit(enforce=False)), "deny")
    assert outcomes(conclusion) == ["would_block"]
    assert acquired(written(conclusion)) == {"call-0": {QUOTA: {ANN: 1, THREAD: 1}}}


@pytest.mark.parametrize("outage", ["deny", "allow"])
def test_a_batch_that_is_judged_again_in_an_outage(outage: Outage) -> None:
    """What the store charged for its calls before is to be taken back at the next occasion."""
    state = state_of("search")
    charged = written(by_store(shared_request(state)))
    update = written(in_outage(shared_request(after(state, charged)), outage))
    assert list(update[LEDGER]["pending_refunds"].values()) == [{ANN: 1, THREAD: 1}]
    assert acquired(update) == ({} if outage == "deny" else acquired(charged))


def test_calls_that_share_an_id_are_charged_as_one() -> None:
    """They are kept as one charge of their sum, and taken back as one."""
    state = state_of("search", "search")
    for call in state["messages"][1].tool_calls:
        call["id"] = "twin"
    update = written(by_store(shared_request(state)))
    assert acquired(update) == {"twin": {QUOTA: {ANN: 2, THREAD: 2}}}
    counts = ToolCounts.of(after(state, update), "m")
    assert counts.thread == {"search": 2}
    counts.take_back("twin")
    assert list(counts.pending_refunds.values()) == [{ANN: 2, THREAD: 2}]
    assert counts.thread == {"search": 0}
