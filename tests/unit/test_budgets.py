"""Limits in tokens and in dollars are validated once, when they are made."""

from collections.abc import Callable
from typing import Any

import pytest

from langchain_quota import CostLimit, ModelCallLimit, Quota, TokenLimit, ToolCallLimit
from langchain_quota.limits import Limit

BOTH = pytest.mark.parametrize("make", [TokenLimit, CostLimit])


USERS = Quota(3, per="user_id")


def number(state: object, runtime: object) -> int:
    return 1


def test_a_quota_is_in_the_unit_of_its_limit() -> None:
    """A quota may have dollars in a limit of costs only."""
    in_dollars = Quota("1.50", per="global")
    assert CostLimit(quotas=[in_dollars]).quotas == (in_dollars,)
    makes: list[Callable[..., Limit]] = [TokenLimit, ModelCallLimit, ToolCallLimit]
    for make in makes:
        with pytest.raises(TypeError, match=r"limit of quota 'global' must be a whole number"):
            make(quotas=[in_dollars])
    with pytest.raises(TypeError, match=r"dollars as a string, not 1\.5"):
        Quota(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit must be dollars in digits"):
        Quota("a lot")


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "At least one limit must be specified"),
        ({"run_limit": -1}, "run_limit must be"),
        ({"run_limit": 5, "reserve": 0}, "reserve must be above 0"),
        ({"run_limit": 5, "keep": 0, "exit_behavior": "finalize"}, "keep must be above 0, not 0"),
        ({"run_limit": 5, "exit_behavior": "continue"}, "Invalid exit_behavior"),
        ({"run_limit": 5, "exit_behavior": "finalize"}, "needs keep"),
        ({"run_limit": 5, "keep": 1}, "keep=1 needs exit_behavior='finalize'"),
        ({"run_limit": 5, "grant": 2}, "grant=2 needs exit_behavior='ask'"),
        ({"run_limit": 5, "grant": 0, "exit_behavior": "ask"}, "grant must be above 0, not 0"),
        (
            {"run_limit": 5, "reserve": 2, "exit_behavior": "ask"},
            "exit_behavior='ask' cannot be used with reserve=2: .*; leave reserve out",
        ),
        (
            {"run_limit": 5, "keep": 1, "exit_behavior": "ask"},
            "keep=1 needs exit_behavior='finalize'",
        ),
        (
            {"run_limit": 5, "keep": 1, "reserve": 2, "exit_behavior": "finalize"},
            "keep=1 must be at least reserve=2",
        ),
        (
            {"run_limit": number, "keep": 1, "reserve": 2, "exit_behavior": "finalize"},
            "keep=1 must be at least reserve=2: .*; keep more, or reserve less",
        ),
        (
            {"run_limit": 9, "thread_limit": 5, "keep": 5, "exit_behavior": "finalize"},
            "keep=5 must be less than thread_limit=5: .*; keep less, or raise the limit",
        ),
        (
            {"run_limit": 9, "quotas": [USERS], "keep": 4, "exit_behavior": "finalize"},
            "keep=4 must be less than limit=3 of quota 'user_id'",
        ),
        (
            {"run_limit": 5, "thread_limit": 9, "reserve": 6},
            "reserve=6 must be at most run_limit=5: .*; reserve less, or raise the limit",
        ),
        ({"quotas": [USERS], "reserve": 4}, "reserve=4 must be at most limit=3 of quota 'user_id'"),
        (
            {"run_limit": 5, "keep": 1, "exit_behavior": "finalize", "enforce": False},
            "exit_behavior='finalize' needs enforce=True",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    make: Callable[..., Limit], options: dict[str, Any], message: str
) -> None:
    """A bad option fails when the limit is made, and the message says what is wrong."""
    with pytest.raises(ValueError, match=message):
        make(**options)
