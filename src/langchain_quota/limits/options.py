"""The options that all kinds of limits share, and their validation."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, get_args

from langchain_quota.limits.call import THREAD, Call, Exit, Kind
from langchain_quota.limits.quotas import Quota
from langchain_quota.runtime.arguments import (
    ALL_TOOLS,
    NoHook,
    parse_tool_names,
    short_repr,
    validate_choice,
    validate_count,
    validate_function,
    validate_name,
    validate_share,
    validate_switch,
    validate_sync_function,
    validate_type,
)
from langchain_quota.runtime.units import (
    UNIT_LABELS,
    Time,
    Unit,
    parse_milliseconds,
    parse_nanodollars,
)

if TYPE_CHECKING:
    from langchain_quota.core.decision import Decision

MODEL = "model"
"""The counter of model calls."""
TOTAL_TOKENS = f"{MODEL}.total_tokens"
INPUT_TOKENS = f"{MODEL}.input_tokens"
OUTPUT_TOKENS = f"{MODEL}.output_tokens"
UNCACHED_TOKENS = f"{MODEL}.uncached_tokens"
NANODOLLARS = f"{MODEL}.nanodollars"
MILLISECONDS = f"{MODEL}.milliseconds"

UNITS = MappingProxyType[str, Unit](
    {
        MODEL: "calls",
        TOTAL_TOKENS: "tokens",
        INPUT_TOKENS: "tokens",
        OUTPUT_TOKENS: "tokens",
        UNCACHED_TOKENS: "tokens",
        NANODOLLARS: "nanodollars",
        MILLISECONDS: "milliseconds",
    }
)
"""The units of the counters of the model; the counters of tools count calls."""

BUDGETS = tuple(counter for counter, unit in UNITS.items() if unit != "calls")
"""The counters of budgets: tokens, money and time."""

Amount = TypeVar("Amount", covariant=True)  # noqa: PLC0105 - signatures show it to users
"""A number in the unit of a limit: whole calls or tokens, or US dollars."""
Most: TypeAlias = Amount | Callable[[Any, Any], Amount | Awaitable[Amount | None] | None] | None
"""An amount, none, or a function of the agent's state and runtime that gives either."""

_Fields: TypeAlias = Any
"""A kind of limit with its fields, which differ from kind to kind."""


class LimitOptions:
    """The base of all kinds of limits."""

    # A kind also has `kind`, `run_limit`, `exit_behavior`, `counter`, `message`, `name`, `enforce`
    # and `alert`, as a field or for the whole class, and `_exits`; `unit` and `counted` if they are
    # not those below. Limits with one counter share a count, so two kinds must not use the same
    # counter. A kind's `__post_init__` calls `_validate_options`. `Limit` lists all kinds.

    __slots__ = ()

    unit: ClassVar[Unit] = "calls"
    """What is counted."""
    counted: ClassVar[bool] = True
    """Whether the state and a store keep its counts; otherwise they follow from the history."""
    _exits: ClassVar[object]
    """The exit behaviours that the kind knows."""
    wrap_tool_call: ClassVar[object] = NoHook("{}(…)")
    """LangChain looks here if a limit is listed as a middleware: the error says what to write."""

    # The defaults of a kind that does not have the option.
    thread_limit: object = None
    quotas: Sequence[Quota] = ()
    tools: Sequence[str] = ()
    """The tools that the limit names; empty for all tools."""
    exclude: Sequence[str] = ()
    grant: object = None
    near: float | tuple[float, ...] | None = None
    give_up_after: int | None = None
    wait: Time | None = None
    reserve: object = None
    keep: object = None
    min_output_tokens: int | None = None
    tool_prices: Mapping[str, object] = MappingProxyType({})

    @property
    def seconds(self: _Fields) -> float:
        """Longest time that a call waits, in seconds."""
        return parse_milliseconds("wait", self.wait or 0) / 1000

    @property
    def near_share(self: _Fields) -> float | None:
        """Share from which the limit counts as near: of several the lowest."""
        near: float | None = min(self.near) if isinstance(self.near, tuple) else self.near
        return near

    @property
    def named_tools(self: _Fields) -> tuple[str, ...]:
        """Tools that the limit names, because it limits, excludes or prices them."""
        return tuple(self.tools or self.exclude or self.tool_prices)

    @property
    def kinds(self: _Fields) -> frozenset[Kind]:
        """Kinds of calls that it checks: its own kind, and tool calls that have a price."""
        return frozenset({self.kind, "tool"} if self.tool_prices else {self.kind})

    def matches(self: _Fields, call: Call) -> bool:
        """Return whether the limit applies to the call."""
        if call.kind != self.kind:
            return call.kind == "tool" and call.tool in self.tool_prices
        return call.tool in self.tools if self.tools else call.tool not in self.exclude

    def _validate_options(self: _Fields, default_name: str) -> None:
        """Validate each option, then their combinations, and set their final values."""
        amount = partial(validate_amount, self.unit)
        optional: dict[str, Callable[[str, object], object]] = {
            "thread_limit": partial(_validate_maximum, self.unit),
            "run_limit": partial(_validate_maximum, self.unit),
            "grant": amount,
            "reserve": partial(_validate_reserve, self.unit),
            "keep": amount,
            "min_output_tokens": partial(validate_count, least=1),
            "message": _validate_message,
            "near": _validate_near,
            "give_up_after": partial(validate_count, least=1),
            "wait": parse_milliseconds,
        }
        for argument, check in optional.items():
            value = getattr(self, argument)
            if value is not None:
                check(argument, value)
        validate_choice("exit_behavior", self.exit_behavior, get_args(self._exits))
        validate_name(self.name)
        validate_switch("enforce", self.enforce)
        validate_switch("alert", self.alert)
        _validate_quotas(self.unit, self.quotas)
        self._set(name=self.name or default_name)
        if self.grant is not None and self.exit_behavior != "ask":
            raise ValueError(f"grant={self.grant!r} needs exit_behavior='ask'")
        if self.exit_behavior == "finalize" and not self.enforce:
            raise ValueError("exit_behavior='finalize' needs enforce=True")
        continues = self.exit_behavior == "continue" and self.enforce
        if self.give_up_after is not None and not continues:
            raise ValueError(
                f"give_up_after={self.give_up_after!r} needs exit_behavior='continue' "
                "and enforce=True"
            )

    def _validate_tools(self: _Fields, prefix: str) -> None:
        """Validate the tools that are limited and the options, and set their final values."""
        tools = parse_tool_names("tool_name", self.tool_name)
        excluded = parse_tool_names("exclude", self.exclude, or_none=True)
        if tools and excluded:
            raise ValueError(f"exclude={self.exclude!r} needs all tools: leave tool_name out")
        without = f"-{','.join(excluded)}" if excluded else ""
        self._validate_options(f"{prefix}:{','.join(tools) or '*' + without}")
        if not isinstance(self.tool_name, str | None):
            self._set(tool_name=tools)
        counter = ",".join(tools) or ALL_TOOLS + without
        # A tool may have the name of the counter of money, which the state keeps among its tools.
        counter = f",{counter}" if counter == NANODOLLARS else counter
        self._set(tools=tools, exclude=excluded, counter=counter)

    def _set(self, **values: object) -> None:
        """Set fields of an immutable limit in its `__post_init__`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimit(LimitOptions, Generic[Amount]):
    """The base of limits with numbers for a thread, a run and quotas; see `ToolCallLimit`."""

    thread_limit: Most[Amount] = None
    run_limit: Most[Amount] = None
    exit_behavior: Exit
    grant: Amount | None = None
    message: str | Callable[["Decision"], str] | None = None
    name: str = ""
    near: float | tuple[float, ...] | None = None
    enforce: bool = True
    alert: bool = True
    quotas: Sequence[Quota] = ()
    wait: Time | None = None

    def _validate_numbers(self) -> None:
        """Check that there is a number, and that no two have the same scope."""
        self._set(quotas=tuple(self.quotas))
        wait = f"wait={self.wait!r}"
        if self.wait is not None and not any(quota.period for quota in self.quotas):
            raise ValueError(f'{wait} needs a quota with a window: Quota(…, window="1m")')
        if self.wait is not None and self.exit_behavior == "finalize":
            raise ValueError(
                f"{wait} cannot be used with exit_behavior='finalize': no call is the last one"
            )
        if self.exit_behavior == "ask" and any(quota.smooth for quota in self.quotas):
            raise ValueError("exit_behavior='ask' cannot be used with a smooth quota: use wait")
        if not has_number(self):
            raise ValueError(
                "At least one limit must be specified: thread_limit, run_limit or quotas. To only "
                "count, write enforce=False"
            )
        scopes = Counter(quota.name for quota in self.quotas)
        scopes[THREAD] += self.thread_limit is not None
        for scope, count in scopes.items():
            if count > 1:
                raise ValueError(
                    f"{count} thresholds of a limit have the scope {scope!r}: give quotas names of "
                    "their own"
                )


ModelExitBehavior = Literal["end", "error", "finalize", "ask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimit(CallLimit[Amount]):
    """The base of limits on model calls."""

    kind: ClassVar[Literal["model"]] = "model"
    """The kind of calls that are limited."""
    _exits: ClassVar[object] = ModelExitBehavior

    exit_behavior: ModelExitBehavior = "end"


def has_number(limit: Any) -> bool:
    """Return whether a limit has a number of calls, tokens, dollars or time, or is a meter."""
    if limit.quotas or limit.thread_limit is not None or limit.run_limit is not None:
        return True
    # A limit without a number that blocks nothing is a meter, unless it only limits single calls.
    is_meter = isinstance(limit, CallLimit) and not limit.enforce
    return is_meter and getattr(limit, "call_limit", None) is None


def whole_amount(unit: Unit, argument: str, value: Any) -> int:
    """Validate an amount, and return it as it is counted: dollars become nanodollars."""
    if unit == "nanodollars":
        return parse_nanodollars(argument, value)
    if unit == "milliseconds":
        return parse_milliseconds(argument, value)
    validate_count(argument, value, what="a whole number")
    return int(value)


def validate_amount(unit: Unit, argument: str, value: object) -> None:
    """Check that a value is an amount above 0."""
    if not whole_amount(unit, argument, value):
        raise ValueError(f"{argument} must be above 0, not {value!r}")


def _validate_maximum(unit: Unit, argument: str, value: object) -> None:
    if callable(value):
        validate_function(argument, value, "state", "runtime")
    else:
        whole_amount(unit, argument, value)


def _validate_reserve(unit: Unit, argument: str, value: object) -> None:
    if callable(value):
        validate_sync_function(argument, value, "request")
    else:
        validate_amount(unit, argument, value)


def _validate_near(argument: str, value: Any) -> None:
    for share in value if isinstance(value, tuple) and value else (value,):
        validate_share(argument, share)


def _validate_message(argument: str, value: object) -> None:
    if not callable(value):
        validate_type(argument, value, str, "a string, a function or None")
    validate_sync_function(argument, value, "decision")


def _validate_quotas(unit: Unit, quotas: object) -> None:
    if not isinstance(quotas, Sequence) or not all(isinstance(quota, Quota) for quota in quotas):
        raise TypeError(
            'quotas must be a sequence of Quota, such as [Quota(5, per="user_id")], not '
            f"{short_repr(quotas)}"
        )
    for quota in quotas:
        if quota.smooth and unit not in ("calls", "tokens"):
            raise ValueError(
                f"quota {quota.name!r} is smooth, and counts {UNIT_LABELS[unit]}: only calls and "
                "tokens can be spread evenly"
            )
        if not callable(quota.limit):
            whole_amount(unit, f"limit of quota {quota.name!r}", quota.limit)
        if quota.rollover is not None:
            validate_amount(unit, f"rollover of quota {quota.name!r}", quota.rollover)
