"""From a hook's state to what is written: giving up, the last call, and several limits at once."""

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from langchain_quota import ToolCallLimit, ToolCallLimitExceededError, messages
from langchain_quota.limits import Limit, Terms
from langchain_quota.middleware.rulings import Ruling, rule_on_tools
from langchain_quota.state import LEDGER, THREAD_TOOLS, Ledger


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
    ruling = rule_on_tools(state, None, [Terms.of(limit) for limit in limits], every_call=True)
    assert ruling is not None
    return ruling


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
    assert first[LEDGER]["refusals"] == {"tool:search": 1}
    assert "jump_to" not in first
    second = written(rule(state_of("search", **{LEDGER: first[LEDGER]}), FORBIDDEN))
    assert second[LEDGER]["refusals"] == {"tool:search": 2}
    assert "jump_to" not in second


def test_the_run_ends_at_the_last_refusal_allowed() -> None:
    """The batch that reaches the number is stopped: refused, skipped, and charged to nobody."""
    state = state_of("calc", "search", **{LEDGER: Ledger(refusals={"tool:search": 2})})
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
    state = state_of("calc", "search", **{LEDGER: Ledger(refusals={"tool:search": 1})})
    update = written(rule(state, FORBIDDEN, other))
    assert update[LEDGER]["refusals"] == {"tool:search": 2, "tool:calc": 1}
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
    state = state_of("search", "Weather", **{LEDGER: Ledger(refusals={"tool:search": 2})})
    state["messages"].append(ToolMessage("ok", tool_call_id="call-1"))
    state["structured_response"] = {"degrees": 12}
    update = written(rule(state, FORBIDDEN))
    assert "jump_to" not in update
    assert list(answers(update)) == ["call-0"]


def test_the_last_calls_tools_do_not_run() -> None:
    """What the last admitted model call asks for is answered, not run, not charged; it ends."""
    state = state_of("search", "calc", **{LEDGER: Ledger(final=True)})
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
