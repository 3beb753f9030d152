"""What the kinds of limits have in common: their units, their base, and the checks of options."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from langchain_quota.arguments import (
    check_choice,
    check_count,
    check_function,
    check_name,
    check_share,
    check_switch,
    check_sync_function,
    check_type,
    shown,
)
from langchain_quota.decision import THREAD, Call
from langchain_quota.limits.quotas import Quota
from langchain_quota.units import Dollars, Unit, checked_microdollars

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


Check = Callable[[str, Any], object]
"""Checks an option's value; it gets the option's name, too."""
Checks = Mapping[str, Check]
"""The checks of options, by name."""


class LimitOptions:
    """The base of all kinds of limits: frozen dataclasses, whose options are checked by a table."""

    # A kind has `kind`, `unit`, `counted`, `tools` and `give_up_after`, as a field or for the whole
    # class, and `thread_limit`, `run_limit`, `quotas` and `exit_behavior`. It ends its
    # `__post_init__` with a `counter`: limits with one counter share a count, so two kinds must not
    # take the same one. `Limit` lists all kinds.

    __slots__ = ()

    _checks: ClassVar[Checks]
    """What checks each option."""

    @property
    def named_tools(self: Any) -> tuple[str, ...]:
        """The tools that the limit names: those that it limits, and those that it excludes."""
        return tuple(self.tools or getattr(self, "exclude", ()))

    def matches(self: Any, call: Call) -> bool:
        """Whether the limit applies to the call.

        Args:
            call: The call.
        """
        if call.kind != self.kind:
            return False
        if self.tools:
            return call.tool in self.tools
        return call.tool not in getattr(self, "exclude", ())

    def _check_options(self: Any, default_name: str) -> None:
        """Check each option by itself, then those that go together, and make their final values."""
        for each in fields(self):
            value = getattr(self, each.name, None)
            # What is left out is not checked.
            if each.name in self._checks and (value is not None or each.default is not None):
                self._checks[each.name](each.name, value)
        self._set(name=self.name or default_name, quotas=tuple(self.quotas))
        _check_numbers(self)
        exit_behavior = self.exit_behavior
        grant = getattr(self, "grant", None)
        if grant is not None and exit_behavior != "ask":
            raise ValueError(f"grant={grant!r} needs exit_behavior='ask'")
        if exit_behavior == "finalize" and not self.enforce:
            raise ValueError("exit_behavior='finalize' needs enforce=True")
        if self.give_up_after is not None and (exit_behavior != "continue" or not self.enforce):
            raise ValueError(
                f"give_up_after={self.give_up_after!r} needs exit_behavior='continue' "
                "and enforce=True"
            )

    def _set(self, **values: object) -> None:
        """Set fields of a frozen limit, while it is made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


class ToolLimit(LimitOptions):
    """The base of limits on tool calls."""

    __slots__ = ()

    kind: ClassVar[Literal["tool"]] = "tool"
    """The kind of calls that are limited."""
    unit: ClassVar[Unit] = "calls"
    """What is counted."""
    counted: ClassVar[bool] = True
    """Whether the state and a store keep its counts; else they follow from the history."""


class ModelLimit(LimitOptions):
    """The base of limits on model calls."""

    __slots__ = ()

    kind: ClassVar[Literal["model"]] = "model"
    """The kind of calls that are limited."""
    tools: ClassVar[tuple[str, ...]] = ()
    """No tools."""
    counted: ClassVar[bool] = True
    """The state and a store keep its counts."""
    give_up_after: ClassVar[None] = None
    """Refusals of model calls are not counted: the first one ends the run."""


def checks(unit: Unit, exits: object, **others: Check) -> Checks:
    """The checks of a limit's options: of the common ones, and of its own."""
    common: dict[str, Check] = {
        "thread_limit": partial(_check_limit, unit),
        "run_limit": partial(_check_limit, unit),
        "exit_behavior": one_of(exits),
        "grant": partial(check_amount, unit),
        "message": _check_message,
        "name": check_name,
        "near": check_share,
        "enforce": check_switch,
        "alert": check_switch,
        "give_up_after": partial(check_count, least=1),
        "quotas": partial(_check_quotas, unit),
    }
    return MappingProxyType(common | others)


def one_of(literal: object) -> Check:
    """The check that a value is one of those of a `Literal`."""
    return partial(check_choice, choices=get_args(literal))


def whole_amount(unit: Unit, argument: str, value: Any) -> int:
    """An amount as it is counted, once it is checked: dollars become microdollars."""
    if unit == "microdollars":
        return checked_microdollars(argument, value)
    check_count(argument, value)
    return int(value)


def check_amount(unit: Unit, argument: str, value: object) -> None:
    """Check that a value is an amount above 0."""
    if not whole_amount(unit, argument, value):
        raise ValueError(f"{argument} must be above 0, not {value!r}")


def _check_limit(unit: Unit, argument: str, value: object) -> None:
    if callable(value):
        check_function(argument, value, "state", "runtime")
    else:
        whole_amount(unit, argument, value)


def _check_message(argument: str, value: object) -> None:
    if not callable(value):
        check_type(argument, value, str, "a string, a function or None")
    check_sync_function(argument, value, "decision")


def _check_quotas(unit: Unit, argument: str, value: object) -> None:
    if not isinstance(value, Sequence) or not all(isinstance(each, Quota) for each in value):
        raise TypeError(
            f"{argument} must be a sequence of Quota, such as [Quota(5)], not {shown(value)}"
        )
    for quota in value:
        if not callable(quota.limit):
            whole_amount(unit, f"limit of quota {quota.name!r}", quota.limit)


def _check_numbers(limit: Any) -> None:
    """Check that a limit has a number, and no two of one scope."""
    numbers = (limit.thread_limit, limit.run_limit, getattr(limit, "at_once", None))
    if all(each is None for each in numbers) and not limit.quotas:
        last = ", quotas or at_once" if hasattr(limit, "at_once") else " or quotas"
        raise ValueError(f"At least one limit must be specified: thread_limit, run_limit{last}")
    scopes = [quota.name for quota in limit.quotas]
    scopes += [] if limit.thread_limit is None else [THREAD]
    for scope, count in Counter(scopes).items():
        if count > 1:
            raise ValueError(
                f"{count} thresholds of a limit have the scope {scope!r}: give quotas names of "
                "their own"
            )


def counts_calls(limit: Any) -> bool:
    """Whether a limit counts calls, and has not only a number of calls at once."""
    numbers = (limit.thread_limit, limit.run_limit)
    return bool(limit.quotas) or any(each is not None for each in numbers)
