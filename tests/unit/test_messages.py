"""The words of refusals: LangChain's, unless the user gives their own."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from langchain_quota import Call, Decision, ModelCallLimit, Quota, ToolCallLimit, messages
from langchain_quota.engine import Outage, Used, Verdict, judge, plan
from langchain_quota.limits import Limit, QuotaTerms, Terms
from langchain_quota.reservation import admit

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


@pytest.mark.parametrize("own", ["", " \n", lambda decision: ""])
def test_a_blank_own_text_ends_no_run(own: Any) -> None:
    """The last message of a run always has a text: without an own one, the default."""
    searches = ToolCallLimit("search", run_limit=0, exit_behavior="end", message=own)
    calls = ToolCallLimit(run_limit=0, exit_behavior="end", message="Enough.")
    verdict = judge([searches, calls], {}, [SEARCH])
    assert messages.final(verdict.breaches) == (
        "'search' tool call limit reached: run limit exceeded (1/0 calls). Enough."
    )


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
    """The answers of calls that did not run say so, each with its own reason.

    That of a skipped call has the words by which applications know LangChain's.
    """
    assert "not run" in messages.SKIPPED
    assert "exceeded the limit" in messages.SKIPPED
    assert "not run" in messages.FINALIZED
    assert "not completed" in messages.ABANDONED
    assert len({messages.SKIPPED, messages.FINALIZED, messages.ABANDONED}) == 3


DAY = datetime(2026, 1, 2, tzinfo=UTC)
SEARCH_PER_DAY = ToolCallLimit("search", quotas=[Quota(5, per="user_id")])


def shared_verdict(
    limit: Limit,
    *quotas: QuotaTerms,
    calls: Sequence[Call] = (SEARCH,),
    outage: Outage | None = None,
    used: int = 5,
) -> Verdict:
    """What is decided where so much of every quota is used."""
    asked = plan([Terms.of(limit, quotas=quotas)], {}, calls, outage=outage)
    slots = asked.reservation.slots
    return asked.verdict(admit(asked.reservation, [used if slot.key else 0 for slot in slots]))


def user(limit: int = 5, resets_at: datetime | None = None) -> QuotaTerms:
    return QuotaTerms("user_id", limit, "ann", "user", resets_at)


def everybody(limit: int = 5, resets_at: datetime | None = None) -> QuotaTerms:
    return QuotaTerms("global", limit, "", "all", resets_at)


def refused(verdict: Verdict, *limits: Limit) -> str:
    return messages.refusal(verdict.decisions[0], {limit.name: limit for limit in limits})


REFUSED = "Tool call limit exceeded. Do not call 'search' again."
RESETS = "It resets at 2026-01-02T00:00:00Z."


def test_a_refusal_tells_when_its_quota_resets() -> None:
    """The model reads when it may try again, in UTC, and no user's id."""
    text = refused(shared_verdict(SEARCH_PER_DAY, user(resets_at=DAY)), SEARCH_PER_DAY)
    assert text == f"{REFUSED} {RESETS}"
    assert refused(shared_verdict(SEARCH_PER_DAY, user()), SEARCH_PER_DAY) == REFUSED


def test_an_own_text_stands_alone() -> None:
    """The text of the user's own is left as it is; whoever wants the time has the decision."""
    own = ToolCallLimit("search", quotas=[Quota(5)], message="Enough.", name="own")
    assert refused(shared_verdict(own, user(resets_at=DAY)), own) == "Enough."


def test_a_refusal_of_two_limits_resets_once() -> None:
    """Two limits tell the later of their windows, once; with an own text beside, it is told too."""
    own = ToolCallLimit("search", quotas=[Quota(5)], message="Enough.", name="own")
    for other, words in ((own, "Enough. "), (ToolCallLimit(quotas=[Quota(5)]), "")):
        terms = [
            Terms.of(SEARCH_PER_DAY, quotas=(user(0, DAY - timedelta(hours=1)),)),
            Terms.of(other, quotas=(everybody(0, DAY),)),
        ]
        asked = plan(terms, {}, [SEARCH])
        text = refused(asked.verdict(asked.own_grant()), SEARCH_PER_DAY, other)
        assert text.startswith(REFUSED)
        assert text.endswith(f"{words}{RESETS}")
        assert text.count("resets") == 1


def test_a_refusal_that_no_window_ends() -> None:
    """Where the run is over its limit, too, the end of a window would not help."""
    limit = ToolCallLimit("search", run_limit=0, name="run")
    terms = [Terms.of(SEARCH_PER_DAY, quotas=(user(0, DAY),)), Terms.of(limit)]
    asked = plan(terms, {}, [SEARCH])
    assert refused(asked.verdict(asked.own_grant()), SEARCH_PER_DAY, limit) == REFUSED


def test_the_final_message_tells_of_quotas() -> None:
    """Each exhausted quota is named, with counts and the end of its window; others are not."""
    limit = ToolCallLimit("search", quotas=[Quota(5)], exit_behavior="end")
    verdict = shared_verdict(limit, user(5, DAY), everybody(9), calls=[SEARCH])
    assert messages.final(verdict.breaches) == (
        "'search' tool call limit reached: user_id limit exceeded "
        "(6/5 calls; resets at 2026-01-02T00:00:00Z)."
    )
    verdict = shared_verdict(limit, user(5, DAY), everybody(5), calls=[SEARCH])
    assert messages.final(verdict.breaches) == (
        "'search' tool call limit reached: user_id limit exceeded "
        "(6/5 calls; resets at 2026-01-02T00:00:00Z) and global limit exceeded (6/5 calls)."
    )


def test_the_models_final_message_tells_of_quotas() -> None:
    """The model's counts are those before the call, of quotas too."""
    limit = ModelCallLimit(quotas=[Quota(5)])
    verdict = shared_verdict(limit, user(5, DAY), everybody(5), calls=[Call("model")])
    assert messages.final(verdict.breaches) == (
        "Model call limits exceeded: user_id limit (5/5; resets at 2026-01-02T00:00:00Z), "
        "global limit (5/5)"
    )


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (
            SEARCH_PER_DAY,
            (
                "Tool call limit could not be checked, so the call of 'search' was not run. Try "
                "again later."
            ),
        ),
        (
            ToolCallLimit(("search", "calc"), quotas=[Quota(5)]),
            (
                "Tool call limit could not be checked, so the call of 'calc' or 'search' was not "
                "run. Try again later."
            ),
        ),
        (
            ToolCallLimit(quotas=[Quota(5)]),
            "Tool call limit could not be checked, so the call was not run. Try again later.",
        ),
        (ToolCallLimit(quotas=[Quota(5)], message="Enough."), "Enough."),
    ],
)
def test_a_refusal_for_want_of_the_store(limit: ToolCallLimit, expected: str) -> None:
    """An outage is not told as a used-up quota, neither to the model nor to the user."""
    verdict = shared_verdict(limit, user(resets_at=DAY), outage="deny")
    assert refused(verdict, limit) == expected
    assert messages.final(verdict.breaches) == expected


def test_a_model_call_that_could_not_be_checked() -> None:
    """The user reads that the limit could not be checked, not that it is used up."""
    verdict = shared_verdict(
        ModelCallLimit(quotas=[Quota(5)]), user(), calls=[Call("model")], outage="deny"
    )
    assert messages.final(verdict.breaches) == (
        "Model call limit could not be checked: try again later."
    )
