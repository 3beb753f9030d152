"""The words of refusals: LangChain's, unless the user gives their own."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from langchain_quota import (
    Call,
    CostLimit,
    Decision,
    ModelCallLimit,
    Quota,
    TokenLimit,
    ToolCallLimit,
    messages,
)
from langchain_quota.limits import Limit
from langchain_quota.resolved import Outage, ResolvedLimit, ResolvedQuota
from tests.judged import Judged, Used, judge

SEARCH = Call("tool", "search", "a")
MODEL = Call("model")
REFUSED = "Tool call limit exceeded. Do not call 'search' again."
NO_TOOLS = "Tool call limit exceeded. Do not make additional tool calls"


def refusal(limits: Sequence[Limit], *calls: Call) -> str:
    """The answer of the first call where everything is used up."""
    full = {limit.counter: Used(100, 100) for limit in limits}
    return refused(judge(limits, full, calls or [SEARCH]), *limits)


def refused(judged: Judged, *limits: Limit) -> str:
    """The answer of the first call."""
    return messages.refusal(judged.decisions[0], {limit.name: limit for limit in limits})


def final(limits: Sequence[Limit], used: Used | None = None, *, calls: int = 1) -> str:
    """The last message of a run in which so many calls are judged where so much is used."""
    usage = {limit.counter: used or Used() for limit in limits}
    batch = [Call("tool", "search", str(index)) for index in range(calls)]
    batch = [MODEL] if limits[0].kind == "model" else batch
    return messages.final(judge(limits, usage, batch).breaches)


def own_words(decision: Decision) -> str:
    leading = decision.leading
    assert leading is not None
    return f"No more {decision.call.tool}: {leading.limit} is used up."


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (ToolCallLimit("search", run_limit=1), REFUSED),
        (
            ToolCallLimit(("search", "fetch"), run_limit=1),
            "Tool call limit exceeded. Do not call 'fetch' or 'search' again.",
        ),
        (ToolCallLimit(run_limit=1), f"{NO_TOOLS}."),
        (
            ToolCallLimit(exclude=("calc", "ask"), run_limit=1),
            f"{NO_TOOLS} other than to 'ask' or 'calc'.",
        ),
    ],
)
def test_the_refusal_of_a_tool_call(limit: Limit, expected: str) -> None:
    """It names the tools that the limit names. Applications match on LangChain's texts."""
    assert refusal([limit]) == expected


def test_a_refusal_is_that_of_every_limit_that_refuses() -> None:
    """Each speaks once, in the order of the limits; one that admits the call does not."""
    limits = [
        ToolCallLimit("search", run_limit=1, name="soft"),
        ToolCallLimit("search", run_limit=2, name="hard"),
        ToolCallLimit(run_limit=1, message="Enough."),
        ToolCallLimit(run_limit=999, message="Nothing.", name="large"),
    ]
    assert refusal(limits) == f"{REFUSED} Enough."
    assert refusal(limits[::-1]) == f"Enough. {REFUSED}"


def test_a_limit_on_trial_has_no_words() -> None:
    """A limit that is not enforced speaks neither to the model nor to the user."""
    limits = [
        ToolCallLimit(run_limit=0, message="Only a trial.", enforce=False),
        ToolCallLimit("search", run_limit=0, message="Enough.", exit_behavior="end"),
    ]
    assert refusal(limits) == final(limits) == "Enough."


def test_the_refusal_of_a_call_that_shares_an_id() -> None:
    """A call refused for the sake of another one with its id reads no tool's name."""
    limits = [ToolCallLimit("search", run_limit=0), ToolCallLimit("calc", run_limit=999)]
    text = refusal(limits, Call("tool", "calc", "twin"), Call("tool", "search", "twin"))
    assert text == f"{NO_TOOLS}."


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
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
        (
            ModelCallLimit(thread_limit=2, run_limit=1),
            Used(2, 1),
            "Model call limits exceeded: thread limit (2/2), run limit (1/1)",
        ),
        (
            ModelCallLimit(thread_limit=2, run_limit=1),
            Used(2, 0),
            "Model call limits exceeded: thread limit (2/2)",
        ),
    ],
)
def test_the_final_message(limit: Limit, used: Used, expected: str) -> None:
    """It is LangChain's: each exceeded threshold, for tools as if the calls had run."""
    assert final([limit], used, calls=3) == expected


@pytest.mark.parametrize("own", ["", " \n", lambda decision: ""])
def test_the_final_message_is_that_of_every_limit_that_refuses(own: Any) -> None:
    """In their order. Instead of a blank text of the user's own, the default: it is never empty."""
    limits = [
        ToolCallLimit("search", run_limit=0, exit_behavior="end", message=own),
        ToolCallLimit(run_limit=0, exit_behavior="end", message="Enough."),
    ]
    assert final(limits) == (
        "'search' tool call limit reached: run limit exceeded (1/0 calls). Enough."
    )


def test_the_text_of_an_exception_ignores_own_words() -> None:
    """It is made from the counts, whatever the limit says to the model."""
    limit = ToolCallLimit("search", run_limit=0, message="Enough.", exit_behavior="error")
    (breach,) = judge([limit], {}, [SEARCH]).breaches
    assert messages.reached(breach) == (
        "'search' tool call limit reached: run limit exceeded (1/0 calls)."
    )


@pytest.mark.parametrize(
    ("own", "of_tool", "of_model"),
    [
        ("Enough.", "Enough.", "Enough."),
        (own_words, "No more search: tool:search is used up.", "No more None: model is used up."),
    ],
)
def test_own_words_are_used_everywhere(own: Any, of_tool: str, of_model: str) -> None:
    """A text, or a function of the decision, replaces a call's answer and the final message."""
    tool = ToolCallLimit("search", run_limit=0, message=own, exit_behavior="end")
    assert refusal([tool]) == final([tool]) == of_tool
    assert final([ModelCallLimit(run_limit=0, message=own)]) == of_model


def test_an_empty_own_answer_is_kept() -> None:
    """An empty text is what the user asked for, not a missing one."""
    assert refusal([ToolCallLimit(run_limit=0, message="")]) == ""


def test_calls_that_did_not_run_have_answers_that_say_so() -> None:
    """Each has its own reason; a skipped one the words by which applications know LangChain's."""
    assert "not run" in messages.SKIPPED
    assert "exceeded the limit" in messages.SKIPPED
    assert "not run" in messages.FINALIZED
    assert "not completed" in messages.ABANDONED
    assert len({messages.SKIPPED, messages.FINALIZED, messages.ABANDONED}) == 3


DAY = datetime(2026, 1, 2, tzinfo=UTC)
RESETS = "It resets at 2026-01-02T00:00:00Z."
SEARCH_QUOTA = ToolCallLimit("search", quotas=[Quota(5, per="user_id")])
OWN_QUOTA = ToolCallLimit("search", quotas=[Quota(5)], message="Enough.", name="own")
ALL_QUOTA = ToolCallLimit(quotas=[Quota(5)])
OF_THE_RUN = ResolvedLimit.of(ToolCallLimit("search", run_limit=0, name="run"))


def user(most: int = 5, resets_at: datetime | None = None) -> ResolvedQuota:
    return ResolvedQuota("user_id", most, "ann", "user", resets_at)


def everybody(most: int = 5, resets_at: datetime | None = None) -> ResolvedQuota:
    return ResolvedQuota("global", most, "", "all", resets_at)


def by_quotas(
    limit: Limit, *quotas: ResolvedQuota, call: Call = SEARCH, outage: Outage | None = None
) -> Judged:
    """What is decided where five calls of each quota are used."""
    resolved = ResolvedLimit.of(limit, quotas=quotas)
    used = {limit.counter: Used(quotas=(5,) * len(quotas))}
    return judge([resolved], used, [call], outage=outage)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([ResolvedLimit.of(SEARCH_QUOTA, quotas=(user(0, DAY),))], f"{REFUSED} {RESETS}"),
        ([ResolvedLimit.of(SEARCH_QUOTA, quotas=(user(0),))], REFUSED),
        ([ResolvedLimit.of(OWN_QUOTA, quotas=(user(0, DAY),))], "Enough."),
        (
            [
                ResolvedLimit.of(SEARCH_QUOTA, quotas=(user(0, DAY - timedelta(hours=1)),)),
                ResolvedLimit.of(OWN_QUOTA, quotas=(everybody(0, DAY),)),
            ],
            f"{REFUSED} Enough. {RESETS}",
        ),
        ([ResolvedLimit.of(SEARCH_QUOTA, quotas=(user(0, DAY),)), OF_THE_RUN], REFUSED),
    ],
    ids=["a window", "none", "own words", "two windows", "the run, too"],
)
def test_a_refusal_says_when_its_quotas_reset(limits: list[ResolvedLimit], expected: str) -> None:
    """The model reads when it may try again, in UTC, if it may, and no user's id.

    Of two windows the later one counts. Words of the user's own alone are left as they are.
    """
    text = refused(judge(limits, {}, [SEARCH]), *(each.limit for each in limits))
    assert text == expected


def test_the_final_message_names_exhausted_quotas() -> None:
    """Each with counts and the end of its window; the model's counts are those before the call."""
    quotas = user(5, DAY), everybody(5), ResolvedQuota("tenant", 9, "a", "tenant")
    tools = ToolCallLimit("search", quotas=[Quota(5)], exit_behavior="end")
    assert messages.final(by_quotas(tools, *quotas).breaches) == (
        "'search' tool call limit reached: user_id limit exceeded "
        "(6/5 calls; resets at 2026-01-02T00:00:00Z) and global limit exceeded (6/5 calls)."
    )
    model = ModelCallLimit(quotas=[Quota(5)])
    assert messages.final(by_quotas(model, *quotas, call=MODEL).breaches) == (
        "Model call limits exceeded: user_id limit (5/5; resets at 2026-01-02T00:00:00Z), "
        "global limit (5/5)"
    )


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (
            ToolCallLimit(("search", "calc"), quotas=[Quota(5)]),
            (
                "Tool call limit could not be checked, so the call of 'calc' or 'search' was not "
                "run. Try again later."
            ),
        ),
        (
            ALL_QUOTA,
            "Tool call limit could not be checked, so the call was not run. Try again later.",
        ),
        (OWN_QUOTA, "Enough."),
    ],
)
def test_a_refusal_for_want_of_the_store(limit: ToolCallLimit, expected: str) -> None:
    """Neither the model nor the user reads that a quota is used up if it could not be checked."""
    judged = by_quotas(limit, user(resets_at=DAY), outage="deny")
    assert refused(judged, limit) == messages.final(judged.breaches) == expected


def test_a_model_call_that_could_not_be_checked() -> None:
    """The user reads that, and not that the limit is used up."""
    judged = by_quotas(ModelCallLimit(quotas=[Quota(5)]), user(), call=MODEL, outage="deny")
    assert messages.final(judged.breaches) == (
        "Model call limit could not be checked: try again later."
    )


def of_need(decision: Decision) -> str:
    (status,) = decision.limits
    return f"{status.run_limit} {status.unit}, {status.run_used} used, {status.needs} needed"


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (TokenLimit(run_limit=10), 10, "Token limits exceeded: run limit (10/10 tokens)"),
        (
            TokenLimit(run_limit=10, reserve=4),
            7,
            "Token limits exceeded: run limit (7/10 tokens, the call may need 4)",
        ),
        (
            TokenLimit(run_limit=10, reserve=4),
            11,
            "Token limits exceeded: run limit (11/10 tokens)",
        ),
        (
            TokenLimit(run_limit=9, thread_limit=11, reserve=4),
            10,
            (
                "Token limits exceeded: thread limit (10/11 tokens, the call may need 4), "
                "run limit (10/9 tokens)"
            ),
        ),
        (
            CostLimit(run_limit="0.50", reserve="0.36"),
            200_000,
            "Cost limits exceeded: run limit ($0.20/$0.50, the call may need $0.36)",
        ),
        (
            TokenLimit(run_limit=10, reserve=4, message=of_need),
            7,
            "10 tokens, 7 used, 4 needed",
        ),
    ],
)
def test_a_budget_with_something_left_says_what_the_call_may_need(
    limit: Limit, used: int, expected: str
) -> None:
    """What is left is too little for the call: the user reads how much it may need."""
    assert final([limit], Used(used, used)) == expected


def test_a_quota_with_something_left_says_what_the_call_may_need() -> None:
    """Also of a quota, before the time when it resets."""
    limit = TokenLimit(quotas=[Quota(8, per="user_id")], reserve=4)
    judged = by_quotas(limit, user(8, DAY), call=MODEL)
    assert messages.final(judged.breaches) == (
        "Token limits exceeded: user_id limit (5/8 tokens, the call may need 4; "
        "resets at 2026-01-02T00:00:00Z)"
    )
