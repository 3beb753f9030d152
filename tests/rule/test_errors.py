"""The exceptions: whoever catches LangChain's catches ours, in any process."""

import copy
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from langchain.agents.middleware.model_call_limit import (
    ModelCallLimitExceededError as LangChainsModelError,
)
from langchain.agents.middleware.tool_call_limit import (
    ToolCallLimitExceededError as LangChainsToolError,
)

from langchain_quota import (
    Decision,
    ModelCallLimitExceededError,
    QuotaWarning,
    ToolCallLimitExceededError,
)
from langchain_quota.core.decision import CountStatus, LimitStatus, Outcome
from langchain_quota.errors import QuotaStoreError, UnknownPriceError
from langchain_quota.limits.call import Call

COUNTS = (
    CountStatus("thread", 4, 4, None),
    CountStatus("run", 4, 4, 3),
    CountStatus("user_id", 5, 5, 5, "ada", datetime(2026, 1, 2, tzinfo=UTC), per="user_id"),
)
STANDING = LimitStatus("search", "error", COUNTS, reason="exhausted", scope="user_id")
DECISION = Decision(
    Call("tool", "search", id="call_1", agent="boss", thread_id=7), Outcome.BLOCKED, (STANDING,)
)


class OwnError(ToolCallLimitExceededError):
    """An application's, with arguments of its own."""

    def __init__(self, tenant: str) -> None:
        super().__init__(4, 4, None, 3, "search", message=f"{tenant} has no search left.")
        self.tenant = tenant


def test_they_are_langchains() -> None:
    """Ours are LangChain's classes and more, with the same text, told apart from each other."""
    numbers = (4, 5, 4, 3)
    tool, model = (
        ToolCallLimitExceededError(*numbers, "search"),
        ModelCallLimitExceededError(*numbers),
    )
    assert isinstance(tool, LangChainsToolError)
    assert isinstance(model, LangChainsModelError)
    assert str(tool) == str(LangChainsToolError(*numbers, "search"))
    assert str(model) == str(LangChainsModelError(*numbers))
    assert not isinstance(tool, LangChainsModelError)
    assert not isinstance(model, LangChainsToolError)
    assert (tool.decision, tool.run_limit) == (None, 3)
    assert str(ModelCallLimitExceededError(*numbers, message="Used up.")) == "Used up."
    assert QuotaStoreError("late", timed_out=True).timed_out
    assert not QuotaStoreError("gone").timed_out


def pickled(protocol: int) -> Callable[[Any], Any]:
    return lambda value: pickle.loads(pickle.dumps(value, protocol))  # noqa: S301 - its own


@pytest.mark.parametrize(
    "error",
    [
        ToolCallLimitExceededError(4, 5, None, 3, "search", message="Used up.", decision=DECISION),
        ModelCallLimitExceededError(4, 5, 4, 3, decision=DECISION),
        OwnError("acme"),
        QuotaStoreError("no answer within 1.0 s", timed_out=True),
        QuotaWarning("forgetful"),
        UnknownPriceError("mine", "azure"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_copy_is_the_same(error: Exception) -> None:
    """An exception that is pickled or copied keeps its class, its text and all its attributes."""
    error.add_note("seen in production")
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    ways: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, *map(pickled, protocols)]
    for copied in ways:
        found = copied(error)
        assert found is not error
        assert (type(found), found.args, str(found)) == (type(error), error.args, str(error))
        assert vars(found) == vars(error)
