"""The exceptions: whoever catches LangChain's catches ours."""

import warnings
from typing import Any

import pytest
from langchain.agents.middleware import model_call_limit, tool_call_limit

from langchain_quota import (
    Call,
    Decision,
    ModelCallLimitExceededError,
    Outcome,
    QuotaStoreError,
    QuotaWarning,
    ToolCallLimitExceededError,
)


def test_an_except_for_langchains_tool_error_catches_ours() -> None:
    """Ours is LangChain's class and more, with its attributes and its text."""
    arguments: dict[str, Any] = {
        "thread_count": 3,
        "run_count": 2,
        "thread_limit": 2,
        "run_limit": None,
    }
    theirs = tool_call_limit.ToolCallLimitExceededError(**arguments, tool_name="search")
    with pytest.raises(tool_call_limit.ToolCallLimitExceededError) as caught:
        raise ToolCallLimitExceededError(**arguments, tool_name="search")
    error = caught.value
    assert (error.thread_count, error.run_count) == (3, 2)
    assert (error.thread_limit, error.run_limit) == (2, None)
    assert error.tool_name == "search"
    assert str(error) == str(theirs)


def test_an_except_for_langchains_model_error_catches_ours() -> None:
    """Ours is LangChain's class and more, with its attributes and its text."""
    arguments: dict[str, Any] = {
        "thread_count": 2,
        "run_count": 1,
        "thread_limit": 2,
        "run_limit": 1,
    }
    theirs = model_call_limit.ModelCallLimitExceededError(**arguments)
    with pytest.raises(model_call_limit.ModelCallLimitExceededError) as caught:
        raise ModelCallLimitExceededError(**arguments)
    error = caught.value
    assert (error.thread_count, error.run_count) == (2, 1)
    assert (error.thread_limit, error.run_limit) == (2, 1)
    assert str(error) == str(theirs)


def test_the_errors_are_told_apart() -> None:
    """A handler for one kind of limit does not swallow the other."""
    assert not issubclass(ToolCallLimitExceededError, ModelCallLimitExceededError)
    assert not issubclass(ModelCallLimitExceededError, ToolCallLimitExceededError)


def test_the_warning_can_be_silenced_alone() -> None:
    """It is a class of its own: a filter for it leaves other warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", QuotaWarning)
        warnings.warn("forgetful", QuotaWarning, stacklevel=1)
        warnings.warn("other", UserWarning, stacklevel=1)
    assert [str(each.message) for each in caught] == ["other"]


def test_an_error_has_its_decision() -> None:
    """Who catches it can read which limit refused, and until when; without one it is `None`."""
    decision = Decision(Call("tool", "search"), Outcome.BLOCKED)
    for error in (ToolCallLimitExceededError, ModelCallLimitExceededError):
        assert error(1, 1, 1, None, decision=decision).decision is decision
        assert error(1, 1, 1, None).decision is None


def test_an_own_text_replaces_the_one_of_counts() -> None:
    """A text that names every limit that was hit stands instead of LangChain's."""
    for error in (ToolCallLimitExceededError, ModelCallLimitExceededError):
        assert str(error(1, 1, 1, None, message="Both are used up.")) == "Both are used up."


def test_a_store_that_fails_says_whether_it_was_slow() -> None:
    """A store's error is of a class of its own, no limit's, and tells a timeout from the rest."""
    assert not QuotaStoreError("refused").timed_out
    slow = QuotaStoreError("no answer within 1.0 s", timed_out=True)
    assert (str(slow), slow.timed_out) == ("no answer within 1.0 s", True)
    for limit_error in (ToolCallLimitExceededError, ModelCallLimitExceededError):
        assert not issubclass(QuotaStoreError, limit_error)
