"""Budgets: limits on tokens, on US dollars and on time; and the prices of tokens."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from decimal import Decimal
from typing import Any, ClassVar, Literal, get_args

from langchain_quota.limits.call import ModelUsage, TokenKind
from langchain_quota.limits.options import (
    MILLISECONDS,
    MODEL,
    NANODOLLARS,
    Amount,
    ModelLimit,
    has_number,
    validate_amount,
    whole_amount,
)
from langchain_quota.runtime.arguments import (
    explain_arguments,
    parse_tool_names,
    short_repr,
    validate_choice,
    validate_count,
    validate_share,
    validate_sync_function,
    validate_type,
)
from langchain_quota.runtime.units import Dollars, Time, Unit, parse_dollars, parse_milliseconds

Prices = Callable[[ModelUsage], Decimal | float | None]
"""A function that gives the price of one model run in dollars, or `None` if it is unknown."""

UnknownPrice = Literal["error", "reported", "allow"]
"""What happens to a call of a model without a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(ModelLimit[Amount]):
    """The base of limits on what model calls use."""

    reserve: Amount | Callable[[Any], ModelUsage | Amount] | None = None
    min_output_tokens: int | None = None
    keep: Amount | None = None
    downgrade_to: Any = field(default=None, hash=False, repr=False)
    downgrade_at: float = 0.8

    def _check_budget(self) -> None:  # noqa: C901 - one check after the other
        """Check that the budget allows a call, and that its first call is not its last."""
        self._validate_numbers()
        validate_share("downgrade_at", self.downgrade_at)
        if self.downgrade_to is not None and not hasattr(self.downgrade_to, "bind_tools"):
            raise TypeError(
                "downgrade_to must be a chat model, such as init_chat_model(…), not "
                f"{short_repr(self.downgrade_to)}"
            )
        if self.downgrade_to is not None and not self.enforce:
            raise ValueError("downgrade_to needs enforce=True")
        if self.min_output_tokens is not None and not callable(self.reserve):
            raise ValueError(
                f"min_output_tokens={self.min_output_tokens!r} needs a function: reserve=max_usage"
            )
        if self.reserve is not None and self.exit_behavior == "ask":
            raise ValueError(
                f"reserve={self.reserve!r} cannot be used with exit_behavior='ask': leave it out"
            )
        if (self.exit_behavior == "finalize") != (self.keep is not None):
            needs = f"keep={self.keep!r} needs exit_behavior='finalize'"
            if self.keep is None:
                needs = "exit_behavior='finalize' needs keep="
            raise ValueError(f"{needs}: keep is what is left for the last answer")
        keep, reserve = self._counted(self.keep), self._counted(self.reserve)
        maxima: list[tuple[Any, str]] = [
            (self.thread_limit, f"thread_limit={self.thread_limit!r}"),
            (self.run_limit, f"run_limit={self.run_limit!r}"),
            *(
                (quota.limit, f"limit={quota.limit!r} of quota {quota.name!r}")
                if quota.burst is None
                else (quota.burst, f"burst={quota.burst!r} of quota {quota.name!r}")
                for quota in self.quotas
            ),
        ]
        for value, text in maxima:
            # A limit of 0 refuses all calls on purpose.
            maximum = self._counted(value)
            if maximum and keep >= maximum:
                raise ValueError(
                    f"keep={self.keep!r} must be less than {text}: the first call would be the "
                    "last one; keep less, or raise the limit"
                )
            if maximum and self.enforce and reserve > maximum:
                raise ValueError(
                    f"reserve={self.reserve!r} must be at most {text}: every call would be "
                    "refused; reserve less, or raise the limit"
                )
        if keep and keep < reserve:
            raise ValueError(
                f"keep={self.keep!r} must be at least reserve={self.reserve!r}: the last answer "
                "needs that, too; keep more, or reserve less"
            )

    def _counted(self, amount: object) -> int:
        """Return an amount as it is counted; 0 for `None` and for a function."""
        is_amount = amount is not None and not callable(amount)
        return whole_amount(self.unit, "limit", amount) if is_amount else 0


@explain_arguments("TokenLimit(run_limit=50_000)")
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimit(Budget[int]):
    """How many tokens the model calls of a thread and of a run may use.

    A model call is blocked when nothing is left. The tokens of a call are only known after it
    finishes. So the calls that run at the same time can together exceed the budget. A `reserve`
    that is never too low prevents this.

    `ToolCallLimit` says what the other arguments mean, here in tokens: `thread_limit`, `run_limit`,
    `grant`, `message`, `near`, `enforce`, `alert`, `quotas` and `wait`. With `reserve`, a call
    waits for room for its reserve when its request is known; without, until anything is left.

    Args:
        tokens: Which tokens are counted: those of the prompt (`"input"`, with cached ones), those
            of the answer (`"output"`, with reasoning), both (`"total"`), or both without those that
            the provider reads from its cache (`"uncached"`).
        call_limit: How many tokens one request may have, from 1; `None` for any number. It needs
            `tokens="input"`. A larger request is blocked before the provider gets it. Its size is
            estimated from its bytes, scaled by what the provider has reported of the last request.
        reserve: How many tokens of the budget a call reserves while it runs, from 1; `None` for
            none. When the call is done, the tokens that it used replace them. A call is blocked if
            its reserve is more than what is left. A number must not exceed any limit or quota,
            except those of 0. A function of the `ModelRequest`, such as `max_usage`, gives a
            number, or a `ModelUsage` with the maximum that the call can use. A call that is cut off
            is charged its reserve, or an estimate if that is higher. With `enforce=False` nothing
            is reserved. List the middleware after those that retry or fall back. Otherwise all
            attempts of a call share one reserve, and can exceed the budget.
        min_output_tokens: With `reserve=max_usage`: a call that does not fit is made with a lower
            `max_tokens`, if what is left allows at least so many; by default it is blocked. Its
            answer may be cut off. A call that thinks, or has a structured response, is not changed.
        exit_behavior: What happens when the limit is reached; see `ModelCallLimit`. `"ask"` needs
            `reserve=None`.
        keep: How many tokens are kept for the last answer, from 1. `"finalize"` needs it, and it
            needs `"finalize"`. When no more than these are left, the next call is the last one.
            It must be at least a `reserve` that is a number, and less than every limit and quota
            except those of 0. If `reserve` is a function, a call whose reserve is more than what
            is left becomes the last one, too. The last call has no tools. If its reserve does not
            fit either, the run ends as with `"end"`: keep twice as much as `reserve` gives.
        downgrade_to: Another chat model, or `None`. The agent's model calls go to it once the share
            `downgrade_at` of this limit's thread, run or quota amount is used. It needs
            `enforce=True`.
        downgrade_at: This share, above 0 and at most 1, as it is when the call is checked.
        name: By default `tokens`, `input_tokens`, `output_tokens` or `uncached_tokens`; see
            `ToolCallLimit`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or does not go with another one.

    Examples:
        >>> from langchain_quota import TokenLimit
        >>> TokenLimit(run_limit=100_000, thread_limit=2_000_000).name
        'tokens'
        >>> TokenLimit(run_limit=20_000, exit_behavior="finalize", keep=2_000, tokens="output").name
        'output_tokens'
    """

    unit: ClassVar[Unit] = "tokens"
    """What is counted."""

    tokens: TokenKind = "total"
    call_limit: int | None = None
    counter: str = field(init=False, repr=False)
    """The key under which tokens are counted: limits with one counter share its count."""

    def __post_init__(self) -> None:
        validate_choice("tokens", self.tokens, get_args(TokenKind))
        self._validate_options("tokens" if self.tokens == "total" else f"{self.tokens}_tokens")
        if self.call_limit is not None:
            validate_count("call_limit", self.call_limit, least=1)
            if self.tokens != "input" or self.exit_behavior == "ask":
                raise ValueError(
                    f"call_limit={self.call_limit!r} needs tokens='input', and cannot be used with "
                    "exit_behavior='ask'"
                )
        if self.call_limit is None or has_number(self):
            self._check_budget()
        elif self.keep is not None or self.exit_behavior == "finalize":
            raise ValueError("exit_behavior='finalize' needs a number beside call_limit=")
        self._set(counter=f"{MODEL}.{self.tokens}_tokens")


@explain_arguments('CostLimit(run_limit="0.50")')
@dataclass(frozen=True, slots=True, kw_only=True)
class CostLimit(Budget[Dollars]):
    """How much the model calls of a thread and of a run may cost, in US dollars.

    Amounts of money are numbers, strings or `Decimal`, up to nine million dollars, with at most
    nine decimal places. They are counted exactly as written, including floats; a float that a
    function computes is rounded to nine places, half to even. See `TokenLimit` for
    when a call is blocked, and `prices` of `QuotaMiddleware` for the prices of tokens.

    `TokenLimit` says what the other arguments mean, here in dollars, except `wait`, which it does
    not have. If `reserve` is a function that gives a `ModelUsage`, the highest price of this usage
    is reserved.

    Args:
        tool_prices: The price of a call by the tool's name: dollars, or a sync function of
            LangChain's `ToolCall` that gives dollars, at most nine million. A call is charged once
            when it is allowed, and refunded if it does not run. It is blocked if its price is more
            than what is left, or if nothing is left. Then the model gets an error message, and the
            run continues, whatever `exit_behavior` is.
        name: By default `cost`; see `ToolCallLimit`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or does not go with another one.

    Examples:
        >>> from langchain_quota import CostLimit
        >>> CostLimit(run_limit=0.50, thread_limit=5).run_limit
        0.5
    """

    unit: ClassVar[Unit] = "nanodollars"
    """What is counted."""
    counter: ClassVar[str] = NANODOLLARS
    """The key under which money is counted: limits with one counter share its count."""
    wait: ClassVar[None] = None  # type: ignore[misc]  # no provider limits dollars in a window
    """Calls never wait for money."""

    tool_prices: Mapping[str, Dollars | Callable[[Any], Dollars]] = field(
        default_factory=dict, hash=False
    )

    def __post_init__(self) -> None:
        validate_type("tool_prices", self.tool_prices, Mapping, "a table of prices by tool")
        parse_tool_names("tool_prices", tuple(self.tool_prices), or_none=True)
        for tool, price in self.tool_prices.items():
            argument = f"tool_prices[{tool!r}]"
            if callable(price):
                validate_sync_function(argument, price, "call")
            else:
                whole_amount(self.unit, argument, price)
        self._set(tool_prices=dict(self.tool_prices))
        self._validate_options("cost")
        self._check_budget()


@explain_arguments('TimeLimit(run_limit="5m")')
@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit(Budget[Time]):
    """How long an agent may work in a thread and in a run, and how long each tool call may take.

    Work is wall-clock time in model calls and in tool calls. Tool calls that run at the same time
    count once. Time in which neither runs does not count: while a person is asked, while a call
    waits for its turn, or before the run begins.

    A model call is blocked when no time is left. The tool calls of an allowed model call run. A
    running call is not ended, except by `call_limit`. So a run can exceed its time by one model
    call and the tool calls that it makes.

    A time is text such as `"30s"`, `"5m"` or `"1h"`, a `timedelta`, or a number of seconds. It is
    kept in whole milliseconds. `ToolCallLimit` says what the other arguments mean: `thread_limit`,
    `run_limit`, `grant`, `message`, `near`, `enforce`, `alert` and `quotas`.

    Args:
        call_limit: How long a tool call may take, above 0; `None` for any time. Then the model
            reads an error in place of the tool's answer. An async tool is cancelled. A sync tool
            cannot be ended: the run no longer waits for it, but it runs on. The call stays counted.
            The time holds for all tools, including those that run a sub-agent.
        exit_behavior: What happens when the limit is reached; see `ModelCallLimit`.
        keep: How much time is kept for the last answer; see `TokenLimit`.
        name: By default `time`; see `ToolCallLimit`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or does not go with another one.

    Examples:
        >>> from langchain_quota import TimeLimit
        >>> TimeLimit(run_limit="5m", thread_limit="1h", call_limit="30s").name
        'time'
    """

    unit: ClassVar[Unit] = "milliseconds"
    """What is counted."""
    counter: ClassVar[str] = MILLISECONDS
    """The key under which time is counted: limits with one counter share its count."""
    reserve: ClassVar[None] = None  # type: ignore[misc]  # nobody knows how long a call takes
    """Nothing is reserved for a call."""
    min_output_tokens: ClassVar[None] = None  # type: ignore[misc]  # time is no matter of length
    """No answer is shortened."""
    wait: ClassVar[None] = None  # type: ignore[misc]  # no provider limits time in a window
    """Calls never wait for time."""
    downgrade_to: ClassVar[None] = None  # type: ignore[misc]  # another model may be slower
    """All calls go to the agent's own model."""
    downgrade_at: ClassVar[float] = 1.0  # type: ignore[misc]

    call_limit: Time | None = None

    def __post_init__(self) -> None:
        self._validate_options("time")
        if self.call_limit is not None:
            validate_amount(self.unit, "call_limit", self.call_limit)
        if self.call_limit is None or has_number(self):
            self._check_budget()
        elif self.keep is not None or self.exit_behavior != "end":
            raise ValueError(
                f"exit_behavior={self.exit_behavior!r} and keep={self.keep!r} are of run_limit, "
                "thread_limit and quotas: add one of these, or leave both out"
            )

    @property
    def call_milliseconds(self) -> int | None:
        """Time that a tool call may take, in milliseconds; `None` for any time."""
        time = self.call_limit
        return None if time is None else parse_milliseconds("call_limit", time)


@explain_arguments("Price(input=2.50, output=10)")
@dataclass(frozen=True, kw_only=True)
class Price:
    """The prices of a model's tokens, in US dollars per million tokens.

    An amount is a number, a string or a `Decimal`, and counts exactly as written.

    Args:
        input: Tokens of the prompt.
        output: Tokens of the answer.
        cache_read: Tokens of the prompt that the provider reads from its cache; `None` for the
            price of `input`.
        cache_creation: Tokens of the prompt that it writes to its cache; `None` for the price of
            `input`, which is mostly too low: such runs count as `price="unknown"`.
        cache_creation_1h: Those of them that it keeps for an hour; `None` for the price of
            `cache_creation`, with the same warning.
        input_audio: Audio tokens of the prompt; `None` for the price of `input`.
        output_audio: Audio tokens of the answer; `None` for the price of `output`.
        reasoning: Reasoning tokens of the answer; `None` for the price of `output`.

    Raises:
        TypeError: An amount is no number.
        ValueError: An amount is negative or not finite, or cannot be read.

    Examples:
        >>> from langchain_quota import Price
        >>> Price(input=2.50, output=10, cache_read=1.25).cache_read
        1.25
    """

    input: Dollars
    output: Dollars
    cache_read: Dollars | None = None
    cache_creation: Dollars | None = None
    cache_creation_1h: Dollars | None = None
    input_audio: Dollars | None = None
    output_audio: Dollars | None = None
    reasoning: Dollars | None = None

    def __post_init__(self) -> None:
        for price in fields(self):
            value = getattr(self, price.name)
            # Only a price with a default may be left out.
            if value is not None or price.default is MISSING:
                parse_dollars(price.name, value)
