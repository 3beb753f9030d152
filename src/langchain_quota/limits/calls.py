"""Limits on calls: on their number, on how many run at the same time, and on repetitions."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from langchain_quota.limits.options import MODEL, CallLimit, LimitOptions, ModelLimit
from langchain_quota.runtime.arguments import (
    explain_arguments,
    parse_tool_names,
    validate_count,
    validate_sync_function,
    validate_type,
)
from langchain_quota.runtime.units import Time, parse_milliseconds

if TYPE_CHECKING:
    from langchain_quota.core.decision import Decision

ToolExitBehavior = Literal["continue", "error", "end", "ask"]
ExitBehavior = Literal["continue", "error", "end"]
"""The exit behaviours that LangChain's limiters know."""

MOST_COMPARED = 100
"""The number of a run's newest calls that a `RepeatLimit` compares."""


@explain_arguments('ToolCallLimit("search", run_limit=5)')
@dataclass(frozen=True, slots=True)
class ToolCallLimit(CallLimit[int]):
    """How many tool calls a thread and a run may make.

    Args:
        tool_name: The tool that is limited, or several that share one count; `None` for all
            tools together.
        exclude: With all tools: the tools that are not limited.
        thread_limit: Maximum of calls over the life of a thread, a whole number from 0 (0 refuses
            every call); `None` for no limit. Or a function of the agent's state and runtime, sync
            or async, that gives either: for example by the tenant's plan in `runtime.context`.
        run_limit: The same for one run (one invocation). At most `thread_limit`.
        exit_behavior: What happens when a call would exceed the limit. `"continue"` answers the
            call with an error message, and the agent continues. `"end"` ends the run. `"error"`
            raises `ToolCallLimitExceededError`. `"ask"` interrupts the run and asks a person, who
            grants more or ends the run. It needs a `QuotaMiddleware`, and an agent with a
            checkpointer.
        grant: With `"ask"`: how many more calls an approval grants, from 1; by default as many as
            the limit that is reached. If the blocked calls need more, it grants what they need.
        message: The text that the model reads as the answer of a blocked call (and, with `"end"`,
            the user as the final message) instead of the default: a text, or a function from the
            `Decision` to a text.
        name: The limit's name in metrics and spans, 1 to 64 printable characters. By default
            `tool:<tools>`, `tool:*` for all tools, or `tool:*-<excluded>`.
        near: The used share, above 0 and at most 1, from which this limit counts as near; by
            default that of the `Telemetry`. Or several, `(0.5, 0.8, 0.95)`, of which each is told
            once to the log, the stream and `on_near`, after what was used, not reserved. It is told
            again after a reset, in a new window, or if a grant has made it a larger number.
        enforce: Whether the limit blocks calls. `False` is a dry run: the limit checks and counts
            every call, and a call that it would block runs, as `would_block`. Without a number it
            is a meter, which only counts.
        alert: Whether a refusal is worth an alert. Set `False` for a limit that is meant to be
            reached. The exported alert rules leave out such limits, and dry runs.
        give_up_after: With `"continue"`: after so many refusals in one run, from 1, the run ends
            as with `"end"`.
        quotas: Further limits, per user, tenant or window, counted in a store that runs share. They
            need a `QuotaMiddleware` with a `store`. A call runs only if all of them admit it.
            With quotas, neither `thread_limit` nor `run_limit` is needed.
        wait: How long a call waits for room in a quota with a window: seconds from 0, text such as
            `"30s"`, or a `timedelta`; `None` for no wait. A call waits only behind those
            of its process that came before and lack room in the same quota. The calls of a message
            are admitted together; under a smooth quota they start one after the other. A call that
            would have to wait longer is treated as `exit_behavior` says, as is every call with
            `enforce=False`. It cannot be used with `"finalize"`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or does not go with another one.

    Examples:
        >>> from langchain_quota import ToolCallLimit
        >>> ToolCallLimit("search", thread_limit=20, run_limit=3).name
        'tool:search'
        >>> ToolCallLimit(run_limit=50, exclude=("write_todos",)).name
        'tool:*-write_todos'
        >>> ToolCallLimit("search", run_limit=-1)
        Traceback (most recent call last):
            ...
        ValueError: run_limit must be 0 or more, not -1: leave it out for no limit
    """

    kind: ClassVar[Literal["tool"]] = "tool"
    """The kind of calls that are limited."""
    _exits: ClassVar[object] = ToolExitBehavior

    tool_name: str | Sequence[str] | None = None
    _: KW_ONLY
    exit_behavior: ToolExitBehavior = "continue"
    exclude: Sequence[str] = ()
    give_up_after: int | None = None
    tools: tuple[str, ...] = field(init=False, repr=False)
    """The tools that the limit names; empty for all tools."""
    counter: str = field(init=False, repr=False)
    """The key under which calls are counted: limits with one counter share its count."""

    def __post_init__(self) -> None:
        self._validate_tools("tool")
        self._validate_numbers()
        thread, run = self.thread_limit, self.run_limit
        if isinstance(thread, int) and isinstance(run, int) and run > thread:
            raise ValueError(
                f"run_limit ({run}) cannot exceed thread_limit ({thread}): "
                "a run is part of a thread"
            )


@explain_arguments("ModelCallLimit(run_limit=10)")
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCallLimit(ModelLimit[int]):
    """How many model calls a thread and a run may make.

    `ToolCallLimit` says what the other arguments mean: `thread_limit`, `run_limit`, `grant`,
    `message`, `near`, `enforce`, `alert`, `quotas` and `wait`.

    Args:
        exit_behavior: What happens when the limit is reached. `"end"` ends the run with a message,
            `"error"` raises `ModelCallLimitExceededError`. `"finalize"` tells the model in the last
            call that this call is the last one, and that it may call no tool. The run ends with the
            model's answer. `"ask"` asks a person; see `ToolCallLimit`.
        name: By default `model`; see `ToolCallLimit`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or does not go with another one.

    Examples:
        >>> from langchain_quota import ModelCallLimit
        >>> ModelCallLimit(run_limit=10, thread_limit=100, exit_behavior="finalize").name
        'model'
    """

    counter: ClassVar[str] = MODEL
    """The key under which calls are counted."""

    def __post_init__(self) -> None:
        self._validate_options(MODEL)
        self._validate_numbers()


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


@explain_arguments("RepeatLimit(3)")
@dataclass(frozen=True, slots=True)
class RepeatLimit(LimitOptions):
    """How often a run may make the same tool call without getting a new answer.

    `run_limit` equal calls are allowed, and the next one is blocked: its answer tells the model
    that it repeats itself. Calls are equal if they have the same tool and the same arguments.

    An answer is new if the call has not had it before in this run. A new answer sets the counts of
    all calls back to one. So polling is not blocked while the answer changes, and tests that run
    after every change are not blocked. But calls that alternate without new answers are blocked.

    If a tool has failed in the same way in `run_limit` answers of the model, further calls of it
    are blocked, whatever their arguments, until there is a new answer. With a `run_limit` of 1 it
    may fail twice.

    Args:
        run_limit: Maximum of equal calls, a whole number from 1 to 100. With 1 no call is allowed
            twice. The newest 100 calls of the run that are in the history are compared.
        key: The value to compare instead of tool, arguments and answer: a function from the tool
            call (`name`, `args`, `id`, and `answer`, a text, once there is one) to a string or
            another JSON value. Calls with equal values are equal. A call with `None` is ignored.
        tools: The tools whose calls are blocked, one or several; empty for all.
        exclude: With all tools: the tools to ignore. Their calls are never blocked, and their
            answers do not count as new.
        name: By default `repeats`; see `ToolCallLimit`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or does not go with another one.

    Examples:
        >>> from langchain.agents import create_agent
        >>> from langchain_quota import QuotaMiddleware, RepeatLimit
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> def search(query: str = "") -> str:
        ...     "Search the web."
        ...     return "nothing found"
        >>> model = ScriptedChatModel(script=[["search"], ["search"], ["search"], "Nothing."])
        >>> agent = create_agent(model, [search], middleware=[QuotaMiddleware([RepeatLimit(2)])])
        >>> result = agent.invoke({"messages": [("user", "Find it!")]})
        >>> print(result["messages"][-2].content)
        This call was not run: 'search' was called 2 times with the same arguments, and nothing ...

        Reading one file counts as one call, whatever part of it is read:

        >>> limit = RepeatLimit(5, key=lambda call: call["args"]["path"], tools="read_file")
    """

    kind: ClassVar[Literal["tool"]] = "tool"
    """The kind of calls that are limited."""
    counted: ClassVar[bool] = False
    """The counts depend on the call, and on the answers of earlier calls."""
    _exits: ClassVar[object] = ExitBehavior

    run_limit: int
    _: KW_ONLY
    exit_behavior: ExitBehavior = "continue"
    key: Callable[[Any], object] | None = None
    tools: Sequence[str] = ()
    exclude: Sequence[str] = ()
    message: str | Callable[["Decision"], str] | None = None
    name: str = ""
    near: float | None = None
    enforce: bool = True
    alert: bool = True
    give_up_after: int | None = None
    counter: str = field(init=False, repr=False)
    """The first part of the key under which calls are counted; the call's key follows."""

    def __post_init__(self) -> None:
        what = "a whole number, the most equal calls of a run"
        validate_count("run_limit", self.run_limit, least=1, what=what)
        if self.run_limit > MOST_COMPARED:
            raise ValueError(
                f"run_limit must be {MOST_COMPARED} or less, as no more calls are compared, not "
                f"{self.run_limit!r}"
            )
        if self.key is not None:
            validate_type("key", self.key, Callable, "a function of the tool call or None")
            validate_sync_function("key", self.key, "call")
        self._validate_options("repeats")
        tools = parse_tool_names("tools", self.tools, or_none=True)
        exclude = parse_tool_names("exclude", self.exclude, or_none=True)
        # No tool's counter begins with a comma.
        self._set(tools=tools, exclude=exclude, counter=f",repeats,{self.name}")
        if tools and exclude:
            raise ValueError(f"exclude={self.exclude!r} needs all tools: leave tools out")

    @property
    def most_failures(self) -> int:
        """Number of the model's answers in which a tool may fail in the same way."""
        # With 1, the model could not even correct its arguments after the first failure.
        return max(2, self.run_limit)
