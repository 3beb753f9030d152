"""The words of refusals: LangChain's, unless the user gives their own."""

from collections.abc import Sequence
from datetime import datetime

from langchain_quota import (
    Call,
    ToolCallLimit,
    messages,
)
from langchain_quota.limits import Limit
from langchain_quota.resolved import ResolvedQuota
from tests.judged import Judged, Used, judge

SEARCH = Call("tool", "search", "a")
NO_TOOLS = "Tool call limit exceeded. Do not make additional tool calls"


def refusal(limits: Sequence[Limit], *calls: Call) -> str:
    """The answer of the first call where everything is used up."""
    full = {limit.counter: Used(100, 100) for limit in limits}
    return refused(judge(limits, full, calls or [SEARCH]), *limits)


def refused(judged: Judged, *limits: Limit) -> str:
    """The answer of the first call."""
    return messages.refusal(judged.decisions[0], {limit.name: limit for limit in limits})


def test_the_refusal_of_a_call_that_shares_an_id() -> None:
    """A call refused for the sake of another one with its id reads no tool's name."""
    limits = [ToolCallLimit("search", run_limit=0), ToolCallLimit("calc", run_limit=999)]
    text = refusal(limits, Call("tool", "calc", "twin"), Call("tool", "search", "twin"))
    assert text == f"{NO_TOOLS}."


def user(most: int = 5, resets_at: datetime | None = None) -> ResolvedQuota:
    return ResolvedQuota("user_id", most, "ann", "user", resets_at)
