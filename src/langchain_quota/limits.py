"""What may be spent: the limits that a user sets, frozen and validated."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from langchain_quota.decision import Call, Decision

ALL_TOOLS = "__all__"
"""The counter of all tools together, as LangChain's limiter writes it to the state."""

MODEL = "model"
"""The counter of model calls."""

MAX_NAME_LENGTH = 64
"""The longest limit name, in characters: a metric label carries it unchanged."""

Scope = Literal["thread", "run"]
ToolExitBehavior = Literal["continue", "error", "end"]
ModelExitBehavior = Literal["end", "error", "finalize"]
ExitBehavior = Literal["continue", "error", "end"]
"""The exit behaviours that LangChain's limiters know."""
Exit = Literal["continue", "error", "end", "finalize"]
Threshold = int | Callable[[Any, Any], int | Awaitable[int | None] | None] | None
"""A number of calls, none, or a function of the agent's state and runtime that gives either."""

SCOPES: tuple[Scope, ...] = ("thread", "run")
"""In the order in which a refusal is attributed: thread before run."""


@dataclass(frozen=True, slots=True)
class ToolCallLimit:
    """How many tool calls a thread and a run may make.

    Args:
        tool_name: The tool that is limited, or several that share one count; `None` for all
            tools together.
        exclude: With all tools: those that are not limited.
        thread_limit: Most calls over the life of a thread, a whole number from 0 (which forbids
            the tool); `None` for no limit. Or a function of the agent's state and runtime, sync
            or async, that gives either: the plan of the tenant in `runtime.context`, say.
        run_limit: Most calls in one run (one invocation), likewise. At most `thread_limit`.
        exit_behavior: What a call over the limit does. `"continue"` answers it with an error
            message and lets the agent go on, `"end"` ends the run, `"error"` raises
            `ToolCallLimitExceededError`.
        message: What the model reads as the answer of a refused call (and, with `"end"`, the
            user as the final message) instead of the default text: a text, or a function from
            the `Decision` to a text.
        name: The limit's name in metrics and spans, 1 to 64 printable characters. By default
            `tool:<tools>`, `tool:*` for all tools, or `tool:*-<excluded>`.
        near: The used share, above 0 and at most 1, from which this limit counts as near; by
            default that of the `Telemetry`.
        enforce: Whether the limit refuses calls. With `False` it is judged and counted in full,
            and what it would refuse runs, as `would_block`: try a limit before it bites.
        give_up_after: With `"continue"`: after so many refusals in one run, from 1, the run ends
            as with `"end"`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: No limit is given, `run_limit` exceeds `thread_limit`, or an argument is out
            of bounds. The message names the argument and the value.
    """

    kind: ClassVar[Literal["tool"]] = "tool"

    tool_name: str | Sequence[str] | None = None
    _: KW_ONLY
    exclude: Sequence[str] = ()
    thread_limit: Threshold = None
    run_limit: Threshold = None
    exit_behavior: ToolExitBehavior = "continue"
    message: "str | Callable[[Decision], str] | None" = None
    name: str = ""
    near: float | None = None
    enforce: bool = True
    give_up_after: int | None = None
    tools: tuple[str, ...] = field(init=False, repr=False)
    """The tools that the limit names; empty for all tools."""
    counter: str = field(init=False, repr=False)
    """The key under which calls are counted: limits with one counter share its count."""

    def __post_init__(self) -> None:
        tools = _checked_tools("tool_name", self.tool_name)
        excluded = () if self.exclude in ((), []) else _checked_tools("exclude", self.exclude)
        if tools and excluded:
            raise ValueError(f"exclude={self.exclude!r} goes with all tools, not with tool_name")
        _check_common(self)
        check_choice("exit_behavior", self.exit_behavior, ("continue", "error", "end"))
        thread, run = self.thread_limit, self.run_limit
        if isinstance(thread, int) and isinstance(run, int) and run > thread:
            raise ValueError(
                f"run_limit ({run}) cannot exceed thread_limit ({thread}): "
                "a run is part of a thread"
            )
        if self.give_up_after is not None:
            _check_count("give_up_after", self.give_up_after, least=1)
            if self.exit_behavior != "continue" or not self.enforce:
                raise ValueError(
                    f"give_up_after={self.give_up_after!r} goes with exit_behavior='continue' "
                    "and enforce=True"
                )
        without = f"-{','.join(excluded)}" if excluded else ""
        if not isinstance(self.tool_name, str | None):
            _set(self, "tool_name", tools)
        _set(self, "tools", tools)
        _set(self, "exclude", excluded)
        _set(self, "counter", ",".join(tools) or ALL_TOOLS + without)
        _set(self, "name", _checked_name(self.name, f"tool:{','.join(tools) or '*' + without}"))

    @property
    def is_dynamic(self) -> bool:
        """Whether one of the thresholds is a function."""
        return callable(self.thread_limit) or callable(self.run_limit)

    def matches(self, call: "Call") -> bool:
        """Whether the limit applies to the call."""
        if call.kind != "tool":
            return False
        return call.tool in self.tools if self.tools else call.tool not in self.exclude


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCallLimit:
    """How many model calls a thread and a run may make.

    Args:
        thread_limit: Most calls over the life of a thread, a whole number from 0; `None` for no
            limit. Or a function of the agent's state and runtime, sync or async, that gives
            either.
        run_limit: Most calls in one run (one invocation), likewise.
        exit_behavior: What reaching the limit does. `"end"` ends the run with a message,
            `"error"` raises `ModelCallLimitExceededError`; `"finalize"` tells the last call that
            it is the last, offers it no tools, and ends the run with its answer.
        message: The final message instead of the default text: a text, or a function from the
            `Decision` to a text.
        name: The limit's name in metrics and spans, 1 to 64 printable characters; by default
            `model`.
        near: The used share, above 0 and at most 1, from which this limit counts as near; by
            default that of the `Telemetry`.
        enforce: Whether the limit refuses calls; see `ToolCallLimit`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: No limit is given, or an argument is out of bounds. The message names the
            argument and the value.
    """

    kind: ClassVar[Literal["model"]] = "model"
    counter: ClassVar[str] = MODEL
    tools: ClassVar[tuple[str, ...]] = ()
    give_up_after: ClassVar[None] = None

    thread_limit: Threshold = None
    run_limit: Threshold = None
    exit_behavior: ModelExitBehavior = "end"
    message: "str | Callable[[Decision], str] | None" = None
    name: str = ""
    near: float | None = None
    enforce: bool = True

    def __post_init__(self) -> None:
        _check_common(self)
        check_choice("exit_behavior", self.exit_behavior, ("end", "error", "finalize"))
        if self.exit_behavior == "finalize" and not self.enforce:
            raise ValueError("exit_behavior='finalize' goes with enforce=True")
        _set(self, "name", _checked_name(self.name, MODEL))

    @property
    def is_dynamic(self) -> bool:
        """Whether one of the thresholds is a function."""
        return callable(self.thread_limit) or callable(self.run_limit)

    def matches(self, call: "Call") -> bool:
        """Whether the limit applies to the call."""
        return call.kind == "model"


Limit = ToolCallLimit | ModelCallLimit


@dataclass(frozen=True, slots=True)
class Terms:
    """A limit with its numbers at one moment: what the engine judges by.

    Attributes:
        limit: The limit.
        thread_limit, run_limit: Its numbers, in calls; `None` for none.
        exit_behavior: What a refusal does now.
    """

    limit: Limit
    thread_limit: int | None
    run_limit: int | None
    exit_behavior: Exit

    @classmethod
    def of(cls, limit: Limit, **computed: int | None) -> "Terms":
        """The terms of a limit.

        Args:
            limit: The limit.
            computed: The numbers of thresholds that are functions, by argument.

        Raises:
            TypeError: A computed number has the wrong type, or a needed one is missing.
            ValueError: A computed number is negative.
        """
        numbers: dict[str, int | None] = {}
        for argument in ("thread_limit", "run_limit"):
            value = computed.get(argument, getattr(limit, argument))
            if value is not None:
                _check_count(f"{argument} of limit {limit.name!r}", value)
            numbers[argument] = value
        return cls(limit, numbers["thread_limit"], numbers["run_limit"], limit.exit_behavior)

    def threshold(self, scope: Scope) -> int | None:
        """The number of a scope."""
        return self.thread_limit if scope == "thread" else self.run_limit

    def ending(self) -> "Terms":
        """The same numbers, with refusals that end the run."""
        return replace(self, exit_behavior="end")


def check_together(limits: Sequence[Limit]) -> None:
    """Check that limits can be judged together.

    Raises:
        TypeError: They are no limits.
        ValueError: There is none, two have one name, or one can never be reached.
    """
    if not isinstance(limits, Sequence):
        raise TypeError(f"limits must be a sequence of limits, not {limits!r}")
    if not limits:
        raise ValueError("limits must have at least one limit")
    for limit in limits:
        if not isinstance(limit, ToolCallLimit | ModelCallLimit):
            raise TypeError(f"limits must be ToolCallLimit or ModelCallLimit, not {limit!r}")
    for name, count in Counter(limit.name for limit in limits).items():
        if count > 1:
            raise ValueError(f"{count} limits are named {name!r}: give each a name of its own")
    for limit in limits:
        for other in limits:
            if limit is not other and _never_reached(limit, other):
                raise ValueError(
                    f"limit {limit.name!r} can never be reached: limit {other.name!r} counts the "
                    "same calls and refuses them earlier"
                )


def _never_reached(limit: Limit, other: Limit) -> bool:
    if (
        limit.counter != other.counter
        or limit.kind != other.kind
        or not (limit.enforce and other.enforce)
        or limit.is_dynamic
        or other.is_dynamic
    ):
        return False
    own, others = Terms.of(limit), Terms.of(other)
    # A run is part of a thread: what exhausts the other's thread limit ends this run, too.
    refused_earlier = {
        "thread": [others.thread_limit],
        "run": [others.run_limit, others.thread_limit],
    }
    return all(
        (number := own.threshold(scope)) is None
        or any(earlier is not None and earlier < number for earlier in refused_earlier[scope])
        for scope in SCOPES
    )


def _checked_tools(argument: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be a string, several strings or None, not {value!r}")
    if not names:
        raise ValueError(f"{argument} must name a tool, not {value!r}")
    for name in names:
        if not name or name.startswith(ALL_TOOLS) or "," in name:
            raise ValueError(f"{argument} must be the name of a tool, not {name!r}")
    return tuple(sorted(set(names)))


def _check_common(limit: "ToolCallLimit | ModelCallLimit") -> None:
    thresholds = {"thread_limit": limit.thread_limit, "run_limit": limit.run_limit}
    if all(value is None for value in thresholds.values()):
        raise ValueError("At least one limit must be specified: thread_limit or run_limit")
    for argument, value in thresholds.items():
        if value is not None and not callable(value):
            _check_count(argument, value)
    if (
        limit.message is not None
        and not isinstance(limit.message, str)
        and not callable(limit.message)
    ):
        raise TypeError(f"message must be a string, a function or None, not {limit.message!r}")
    if limit.near is not None:
        check_share("near", limit.near)
    if not isinstance(limit.enforce, bool):
        raise TypeError(f"enforce must be True or False, not {limit.enforce!r}")


def check_share(argument: str, value: object) -> None:
    """Check that a value is a share above 0 and at most 1.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{argument} must be a number, not {value!r}")
    if not 0 < value <= 1:
        raise ValueError(f"{argument} must be above 0 and at most 1, not {value!r}")


def _check_count(argument: str, value: object, *, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be a whole number or None, not {value!r}")
    if value < least:
        raise ValueError(f"{argument} must be {least} or more, not {value!r}")


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that a value is one of several.

    Raises:
        ValueError: It is not.
    """
    if value not in choices:
        raise ValueError(f"Invalid {argument}: {value!r}. Choose one of {', '.join(choices)}")


def _checked_name(value: Any, default: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"name must be a string, not {value!r}")
    if not value:
        return default
    if len(value) > MAX_NAME_LENGTH or not value.isprintable():
        raise ValueError(
            f"name must have 1 to {MAX_NAME_LENGTH} printable characters, not {value!r}"
        )
    return value


def _set(limit: "ToolCallLimit | ModelCallLimit", attribute: str, value: object) -> None:
    object.__setattr__(limit, attribute, value)
