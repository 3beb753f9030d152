"""The words of refusals: LangChain's, unless the user gives their own."""

from collections.abc import Sequence

import pytest

from langchain_quota import Call, Decision, ModelCallLimit, ToolCallLimit, messages
from langchain_quota.engine import Used, Verdict, judge
from langchain_quota.limits import Limit, Terms

SEARCH = Call("tool", "search", "a")


def refusal(limits: Sequence[Limit], *calls: Call) -> str:
    """The answer of the first call where everything is used up."""
    full = {limit.counter: Used(100, 100) for limit in limits}
    decision = judge(limits, full, calls or [SEARCH]).decisions[0]
    return messages.refusal(decision, {limit.name: limit for limit in limits})


def model_verdict(limits: Sequence[Limit | Terms], used: Used) -> Verdict:
    return judge(limits, {"model": used}, [Call("model")], charging=False)


def own_words(decision: Decision) -> str:
    leading = decision.leading
    assert leading is not None
    return f"No more {decision.call.tool}: {leading.limit} is used up."


def test_the_refusal_of_a_named_tool() -> None:
    """The text is LangChain's: applications match on it."""
    text = refusal([ToolCallLimit("search", run_limit=1)])
    assert text == "Tool call limit exceeded. Do not call 'search' again."


def test_the_refusal_of_all_tools() -> None:
    """The text is LangChain's and names no tool, not even the one that was called."""
    text = refusal([ToolCallLimit(run_limit=1)])
    assert text == "Tool call limit exceeded. Do not make additional tool calls."


def test_the_refusal_of_several_tools() -> None:
    """A limit that several tools share names all of them."""
    text = refusal([ToolCallLimit(("search", "fetch"), run_limit=1)])
    assert text == "Tool call limit exceeded. Do not call 'fetch' or 'search' again."


def test_a_refusal_names_every_limit_that_refuses() -> None:
    """A call over two limits is told of both, in the order of the limits."""
    limits = [ToolCallLimit("search", run_limit=1), ToolCallLimit(run_limit=1, message="Enough.")]
    first = "Tool call limit exceeded. Do not call 'search' again."
    assert refusal(limits) == f"{first} Enough."
    assert refusal(limits[::-1]) == f"Enough. {first}"


def test_a_refusal_says_nothing_twice() -> None:
    """Two limits on one tool with one text say it once."""
    limits = [
        ToolCallLimit("search", run_limit=1, name="soft"),
        ToolCallLimit("search", run_limit=2, name="hard"),
    ]
    assert refusal(limits) == "Tool call limit exceeded. Do not call 'search' again."


def test_a_limit_that_admits_the_call_has_no_words() -> None:
    """Only the limits that refuse the call speak to it."""
    limits = [ToolCallLimit("search", run_limit=1), ToolCallLimit(run_limit=999, message="Enough.")]
    assert refusal(limits) == "Tool call limit exceeded. Do not call 'search' again."


def test_a_limit_on_trial_has_no_words() -> None:
    """A limit that is not enforced speaks neither to the model nor to the user."""
    limits = [
        ToolCallLimit(run_limit=0, message="Only a trial.", enforce=False),
        ToolCallLimit("search", run_limit=0, message="Enough.", exit_behavior="end"),
    ]
    assert refusal(limits) == "Enough."
    assert messages.final(judge(limits, {}, [SEARCH]).breaches) == "Enough."


def test_the_refusal_of_a_twin() -> None:
    """A call refused for the sake of another one with its id is told without a tool's name."""
    limits = [ToolCallLimit("search", run_limit=0), ToolCallLimit("calc", run_limit=999)]
    text = refusal(limits, Call("tool", "calc", "twin"), Call("tool", "search", "twin"))
    assert text == "Tool call limit exceeded. Do not make additional tool calls."


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [
        (
            ToolCallLimit("search", thread_limit=2, run_limit=2, exit_behavior="end"),
            Used(0, 0),
            (
                "'search' tool call limit reached: thread limit exceeded (3/2 calls) and run limit "
                "exceeded (3/2 calls)."
            ),
        ),
        (
            ToolCallLimit("search", thread_limit=4, run_limit=3, exit_behavior="end"),
            Used(2, 0),
            "'search' tool call limit reached: thread limit exceeded (5/4 calls).",
        ),
        (
            ToolCallLimit(thread_limit=9, run_limit=2, exit_behavior="end"),
            Used(2, 0),
            "Tool call limit reached: run limit exceeded (3/2 calls).",
        ),
        (
            ToolCallLimit(("search", "fetch"), run_limit=2, exit_behavior="end"),
            Used(0, 0),
            "'fetch', 'search' tool call limit reached: run limit exceeded (3/2 calls).",
        ),
    ],
)
def test_the_final_message_of_tools(limit: Limit, usage: Used, expected: str) -> None:
    """It is LangChain's: each exceeded threshold with the count as if the calls had run."""
    batch = [Call("tool", "search", str(index)) for index in range(3)]
    verdict = judge([limit], {limit.counter: usage}, batch)
    assert messages.final(verdict.breaches) == expected


def test_the_final_message_names_every_limit_that_was_hit() -> None:
    """Two breached limits are both told, in the order of the limits."""
    limits = [
        ToolCallLimit("search", run_limit=0, exit_behavior="end"),
        ToolCallLimit(run_limit=0, message="Enough.", exit_behavior="end"),
    ]
    verdict = judge(limits, {}, [SEARCH])
    assert messages.final(verdict.breaches) == (
        "'search' tool call limit reached: run limit exceeded (1/0 calls). Enough."
    )


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (Used(2, 1), "Model call limits exceeded: thread limit (2/2), run limit (1/1)"),
        (Used(2, 0), "Model call limits exceeded: thread limit (2/2)"),
        (Used(1, 1), "Model call limits exceeded: run limit (1/1)"),
    ],
)
def test_the_final_message_of_the_model(used: Used, expected: str) -> None:
    """It is LangChain's: each reached threshold with the count so far."""
    limit = ModelCallLimit(thread_limit=2, run_limit=1)
    assert messages.final(model_verdict([limit], used).breaches) == expected


def test_the_final_message_of_several_model_limits() -> None:
    """Two limits of the model that are reached are both told."""
    limits = [
        ModelCallLimit(run_limit=1, name="run"),
        ModelCallLimit(thread_limit=1, name="thread", message="Enough."),
    ]
    assert messages.final(model_verdict(limits, Used(1, 1)).breaches) == (
        "Model call limits exceeded: run limit (1/1) Enough."
    )


def test_computed_numbers_are_told() -> None:
    """The message has the number of this moment, not the function that gave it."""
    tools = Terms.of(ToolCallLimit(run_limit=lambda *_: 9, exit_behavior="end"), run_limit=0)
    model = Terms.of(ModelCallLimit(thread_limit=lambda *_: 9), thread_limit=3)
    assert messages.final(judge([tools], {}, [SEARCH]).breaches) == (
        "Tool call limit reached: run limit exceeded (1/0 calls)."
    )
    assert messages.final(model_verdict([model], Used(3, 3)).breaches) == (
        "Model call limits exceeded: thread limit (3/3)"
    )


def test_what_is_reached_ignores_own_words() -> None:
    """The text of an exception is made from the counts, whatever the limit says to the model."""
    limit = ToolCallLimit("search", run_limit=0, message="Enough.", exit_behavior="error")
    (breach,) = judge([limit], {}, [SEARCH]).breaches
    assert messages.reached(breach) == (
        "'search' tool call limit reached: run limit exceeded (1/0 calls)."
    )


def test_an_own_text_is_used_everywhere() -> None:
    """A limit's own text replaces both the answer of the call and the final message."""
    tool = ToolCallLimit(run_limit=0, message="Enough.", exit_behavior="end")
    model = ModelCallLimit(run_limit=0, message="Enough.")
    assert refusal([tool]) == "Enough."
    assert messages.final(judge([tool], {}, [SEARCH]).breaches) == "Enough."
    assert messages.final(model_verdict([model], Used()).breaches) == "Enough."


def test_an_empty_own_text_is_kept() -> None:
    """An empty text is what the user asked for, not a missing one."""
    assert refusal([ToolCallLimit(run_limit=0, message="")]) == ""


def test_an_own_function_is_given_the_decision() -> None:
    """A function makes the text from the decision: the call, and the limit that refused it."""
    tool = ToolCallLimit("search", run_limit=0, message=own_words, exit_behavior="end")
    model = ModelCallLimit(run_limit=0, message=own_words)
    expected = "No more search: tool:search is used up."
    assert refusal([tool]) == expected
    assert messages.final(judge([tool], {}, [SEARCH]).breaches) == expected
    assert messages.final(model_verdict([model], Used()).breaches) == (
        "No more None: model is used up."
    )


def test_calls_that_did_not_run_are_told_so() -> None:
    """The answers of calls that did not run say so, each with its own reason."""
    assert "not run" in messages.SKIPPED
    assert "not run" in messages.FINALIZED
    assert "not completed" in messages.ABANDONED
    assert len({messages.SKIPPED, messages.FINALIZED, messages.ABANDONED}) == 3
