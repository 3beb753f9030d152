"""What the kinds of limits have in common: their units, and the checks of their options."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import MappingProxyType
from typing import Any, Literal

from langchain_quota.arguments import (
    check_count,
    check_function,
    check_share,
    check_switch,
    check_sync_function,
    shown,
)
from langchain_quota.decision import THREAD, Unit
from langchain_quota.money import Dollars, checked_microdollars
from langchain_quota.quotas import Quota

MODEL = "model"
"""The counter of model calls."""
TOTAL_TOKENS = f"{MODEL}.total_tokens"
INPUT_TOKENS = f"{MODEL}.input_tokens"
OUTPUT_TOKENS = f"{MODEL}.output_tokens"
MICRODOLLARS = f"{MODEL}.microdollars"

UNITS = MappingProxyType[str, Unit](
    {
        MODEL: "calls",
        TOTAL_TOKENS: "tokens",
        INPUT_TOKENS: "tokens",
        OUTPUT_TOKENS: "tokens",
        MICRODOLLARS: "microdollars",
    }
)
"""What the counters of the model count; those of tools count calls."""

BUDGETS = tuple(counter for counter, unit in UNITS.items() if unit != "calls")
"""The counters of what model calls use up."""

ModelExitBehavior = Literal["end", "error", "finalize", "ask"]
MaxCalls = int | Callable[[Any, Any], int | Awaitable[int | None] | None] | None
"""A number of calls, none, or a function of the agent's state and runtime that gives either."""
MaxTokens = MaxCalls
"""The same for tokens."""
MaxDollars = Dollars | Callable[[Any, Any], Dollars | Awaitable[Dollars | None] | None] | None
"""The same for US dollars."""


def whole_amount(unit: Unit, argument: str, value: object) -> int:
    """An amount as it is counted: dollars become microdollars.

    Args:
        unit: What is counted.
        argument: Its name, for messages.
        value: As the user has written it.

    Raises:
        TypeError: It has the wrong type.
        ValueError: It is out of bounds.
    """
    if unit == "microdollars":
        return checked_microdollars(argument, value)
    check_count(argument, value)
    assert isinstance(value, int)  # noqa: S101 - for the type checker
    return value


def check_options(limit: Any) -> None:
    """Check the options that all kinds of limits have.

    Args:
        limit: The limit; its quotas become a tuple.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: There is no limit, or an option is out of bounds.
    """
    thresholds = {"thread_limit": limit.thread_limit, "run_limit": limit.run_limit}
    _check_quotas(limit)
    is_capped = getattr(limit, "at_once", None) is not None
    if all(each is None for each in thresholds.values()) and not limit.quotas and not is_capped:
        last = ", quotas or at_once" if hasattr(limit, "at_once") else " or quotas"
        raise ValueError(f"At least one limit must be specified: thread_limit, run_limit{last}")
    for argument, value in thresholds.items():
        if callable(value):
            check_function(argument, value, "state", "runtime")
        elif value is not None:
            whole_amount(limit.unit, argument, value)
    if (
        limit.message is not None
        and not isinstance(limit.message, str)
        and not callable(limit.message)
    ):
        raise TypeError(f"message must be a string, a function or None, not {limit.message!r}")
    check_sync_function("message", limit.message, "decision")
    if limit.near is not None:
        check_share("near", limit.near)
    check_switch("enforce", limit.enforce)
    check_switch("alert", limit.alert)


def _check_quotas(limit: Any) -> None:
    if not isinstance(limit.quotas, Sequence) or not all(
        isinstance(quota, Quota) for quota in limit.quotas
    ):
        raise TypeError(
            f"quotas must be a sequence of Quota, such as [Quota(5)], not {shown(limit.quotas)}"
        )
    scopes = [quota.name for quota in limit.quotas]
    if limit.thread_limit is not None:
        scopes.append(THREAD)
    for scope, count in Counter(scopes).items():
        if count > 1:
            raise ValueError(
                f"{count} thresholds of a limit have the scope {scope!r}: give quotas names of "
                "their own"
            )
    for quota in limit.quotas:
        if not callable(quota.limit):
            whole_amount(limit.unit, f"limit of quota {quota.name!r}", quota.limit)
    set_field(limit, "quotas", tuple(limit.quotas))


def check_grant(limit: Any) -> None:
    """Check how much more an approval grants.

    Args:
        limit: The limit.

    Raises:
        TypeError: It is no amount.
        ValueError: It is 0 or out of bounds, or the limit asks nobody.
    """
    if limit.grant is None:
        return
    if limit.exit_behavior != "ask":
        raise ValueError(f"grant={limit.grant!r} needs exit_behavior='ask'")
    if not whole_amount(limit.unit, "grant", limit.grant):
        raise ValueError(f"grant must be above 0, not {limit.grant!r}")


def check_give_up(limit: Any) -> None:
    """Check after how many refusals a limit of tool calls gives up.

    Args:
        limit: The limit.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of bounds, or contradicts the limit's other options.
    """
    if limit.give_up_after is not None:
        check_count("give_up_after", limit.give_up_after, least=1)
        if limit.exit_behavior != "continue" or not limit.enforce:
            raise ValueError(
                f"give_up_after={limit.give_up_after!r} needs exit_behavior='continue' "
                "and enforce=True"
            )


def set_field(limit: Any, name: str, value: object) -> None:
    """Set a field of a frozen limit, while it is made."""
    object.__setattr__(limit, name, value)
