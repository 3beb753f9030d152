"""The limit on tool calls that run at the same time."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from langchain_quota.limits.options import LimitOptions
from langchain_quota.runtime.arguments import explain_arguments, validate_count
from langchain_quota.runtime.units import Time, parse_milliseconds

if TYPE_CHECKING:
    from langchain_quota.core.decision import Decision


@explain_arguments('ConcurrencyLimit("browser", max_concurrency=2)')
@dataclass(frozen=True, slots=True)
class ConcurrencyLimit(LimitOptions):
    """The number of tool calls that may run at the same time; further calls wait.

    The calls of this process are counted, or with a `RedisStore` or `PostgresStore` those of all
    processes that share it. It needs a `QuotaMiddleware` or a `GraphQuota`.

    Args:
        tool_name: The tool that is limited, or several that share one count; `None` for all
            tools together.
        max_concurrency: Maximum of calls that run at the same time, a whole number from 1.
        wait: How long a call waits: seconds from 0, text such as `"30s"`, or a `timedelta`. A call
            that gets no slot in time is answered with an error message and charged to no limit,
            and the agent continues.
            The default of 30 is less than the minute after which many gateways give up.
        exclude: With all tools: those that are not limited.
        message: The text that the model reads as the answer of a blocked call; see `ToolCallLimit`.
        name: By default `concurrency:<tools>`, `concurrency:*` for all tools, or
            `concurrency:*-<excluded>`.
        enforce: Whether calls wait. `False` is a dry run: no call waits, and a call that would have
            to wait is `would_block`.
        alert: Whether a refusal is worth an alert; see `ToolCallLimit`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or does not go with another one.

    Examples:
        >>> from langchain_quota import ConcurrencyLimit
        >>> ConcurrencyLimit("browser", max_concurrency=2, wait=60).name
        'concurrency:browser'
    """

    kind: ClassVar[Literal["tool"]] = "tool"
    """The kind of calls that are limited."""
    run_limit: ClassVar[None] = None
    exit_behavior: ClassVar[Literal["continue"]] = "continue"
    _exits: ClassVar[object] = Literal["continue"]

    tool_name: str | Sequence[str] | None = None
    _: KW_ONLY
    max_concurrency: int
    wait: Time = 30
    exclude: Sequence[str] = ()
    message: str | Callable[["Decision"], str] | None = None
    name: str = ""
    enforce: bool = True
    alert: bool = True
    tools: tuple[str, ...] = field(init=False, repr=False)
    """The tools that the limit names; empty for all tools."""
    counter: str = field(init=False, repr=False)
    """The key under which calls are counted: limits with one counter share its count."""

    def __post_init__(self) -> None:
        validate_count("max_concurrency", self.max_concurrency, least=1, what="a whole number")
        parse_milliseconds("wait", self.wait)
        self._validate_tools("concurrency")
