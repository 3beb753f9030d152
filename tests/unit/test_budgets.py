"""Limits in tokens and in dollars are validated once, when they are made."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from langchain_quota import CostLimit, ModelCallLimit, Quota, TokenLimit, ToolCallLimit
from langchain_quota.limits import Limit, check_together
from langchain_quota.resolved import ResolvedLimit, stored_as

BOTH = pytest.mark.parametrize("make", [TokenLimit, CostLimit])


USERS = Quota(3, per="user_id")


def number(state: object, runtime: object) -> int:
    return 1


def numbers(limit: Limit) -> tuple[int | None, int | None]:
    resolved = ResolvedLimit.of(limit)
    return resolved.thread_limit, resolved.run_limit


def test_tokens_are_counted_whole_and_money_in_millionths() -> None:
    """Tokens are whole numbers; dollars, however they are written, become microdollars."""
    assert numbers(TokenLimit(run_limit=100, thread_limit=0)) == (0, 100)
    assert numbers(CostLimit(run_limit="0.50", thread_limit=5)) == (5_000_000, 500_000)
    assert numbers(CostLimit(run_limit=Decimal("0.000001"))) == (None, 1)


@pytest.mark.parametrize("argument", ["thread_limit", "run_limit", "reserve", "keep"])
def test_a_float_is_no_amount_of_money(argument: str) -> None:
    """A float is a TypeError that names the argument and says how to write it."""
    make: Callable[..., Limit] = CostLimit
    with pytest.raises(TypeError, match=rf'{argument} must not be a float.*"0.5"'):
        make(**{"run_limit": 5, "exit_behavior": "finalize", "keep": 1, argument: 0.5})


@pytest.mark.parametrize("argument", ["thread_limit", "run_limit", "reserve", "keep"])
def test_tokens_are_whole_numbers(argument: str) -> None:
    """What is no whole number of tokens is a TypeError that names the argument."""
    make: Callable[..., Limit] = TokenLimit
    with pytest.raises(TypeError, match=f"{argument} must be a whole number"):
        make(**{"run_limit": 5, "exit_behavior": "finalize", "keep": 1, argument: "5"})


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


def test_only_input_output_and_total_tokens_are_counted() -> None:
    """The tokens that are counted have names, and each its own count."""
    with pytest.raises(ValueError, match="Invalid tokens: 'cached'"):
        TokenLimit(run_limit=1, tokens="cached")  # type: ignore[arg-type]
    limits = [TokenLimit(run_limit=1, tokens=each) for each in ("total", "input", "output")]
    assert [each.name for each in limits] == ["tokens", "input_tokens", "output_tokens"]
    assert len({stored_as(each) for each in limits}) == 3


def test_a_tool_that_is_named_like_a_budget_has_a_count_of_its_own() -> None:
    """Whatever a tool is called, its calls are not counted as tokens or money."""
    for limit in (TokenLimit(run_limit=1), CostLimit(run_limit=1)):
        assert stored_as(ToolCallLimit(limit.counter, run_limit=1)) != stored_as(limit)


def test_a_budget_that_can_never_be_reached_is_refused() -> None:
    """Of two budgets of one kind the larger one is in vain, however the numbers are written."""
    with pytest.raises(ValueError, match="limit 'large' can never be reached"):
        check_together([CostLimit(run_limit=2, name="large"), CostLimit(run_limit="1.5")])
    check_together([TokenLimit(run_limit=2, name="large"), TokenLimit(run_limit=1, tokens="input")])
    last = TokenLimit(run_limit=2, name="large", exit_behavior="finalize", keep=1)
    check_together([last, TokenLimit(run_limit=1)])


@BOTH
def test_a_reserve_that_fits_once_is_taken(make: Callable[..., Limit]) -> None:
    """A reserve of a whole limit admits one call; 0 forbids all; a trial or a function may be."""
    assert make(run_limit=5, reserve=5)
    assert make(run_limit=5, thread_limit=0, reserve=5)
    assert make(run_limit=5, thread_limit=0, keep=4, exit_behavior="finalize")
    assert make(run_limit=5, reserve=6, enforce=False)
    assert make(run_limit=number, reserve=6)
    assert make(run_limit=5, reserve=lambda _: 6)


@BOTH
def test_a_reserve_says_nothing_of_other_limits(make: Callable[..., Limit]) -> None:
    """A limit may be lower than what another one on the same count reserves for itself."""
    small = make(name="a", run_limit=9, keep=3, exit_behavior="finalize")
    for options in ({"thread_limit": 99, "reserve": 10}, {"thread_limit": 9, "reserve": 4}):
        check_together([small, make(name="b", **options)])
