"""The limit on tool calls that repeat earlier ones."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from langchain_quota.limits.calls import ExitBehavior
from langchain_quota.limits.options import LimitOptions
from langchain_quota.runtime.arguments import (
    explain_arguments,
    parse_tool_names,
    validate_count,
    validate_sync_function,
    validate_type,
)

if TYPE_CHECKING:
    from langchain_quota.core.decision import Decision

MOST_KEPT = 100
"""The number of a run's newest calls that a limit remembers: about 5 kB of a checkpoint."""


@explain_arguments("RepeatLimit(3)")
@dataclass(frozen=True, slots=True)
class RepeatLimit(LimitOptions):
    """How often a run may make the same tool call without getting a new answer.

    `run_limit` equal calls are allowed, and the next one is blocked: its answer tells the model
    that it repeats itself. Calls are equal if they have the same tool and the same arguments.

    An answer is new if the call has not had it before in this run: of a text of more than 20,000
    characters the beginning, the end and the length are compared. A new answer sets the counts of
    all calls back to one. So polling is not blocked while the answer changes, and tests that run
    after every change are not blocked. But calls that alternate without new answers are blocked.

    If a tool has failed in the same way in `run_limit` answers of the model, further calls of it
    are blocked, whatever their arguments, until there is a new answer. With a `run_limit` of 1 it
    may fail twice.

    Args:
        run_limit: Maximum of equal calls, a whole number from 1 to 100. With 1 no call is allowed
            twice. The newest 100 calls of a run are remembered.
        key: The value to compare instead of tool and arguments: a function from the tool call
            (`name`, `args`, `id`) to a string or another JSON value. Calls with equal values are
            equal. A call with `None` is ignored.
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
        if self.run_limit > MOST_KEPT:
            raise ValueError(
                f"run_limit must be {MOST_KEPT} or less, as no more calls are remembered, not "
                f"{self.run_limit!r}"
            )
        if self.key is not None:
            validate_type("key", self.key, Callable, "a function of the tool call or None")
            validate_sync_function("key", self.key, "call")
        self._validate_options("repeats")
        tools = parse_tool_names("tools", self.tools, or_none=True)
        exclude = parse_tool_names("exclude", self.exclude, or_none=True)
        # No tool's counter begins with a comma.
        counter = f",repeats,{self.name}"
        self._set(tools=tools, exclude=exclude, counter=counter)
        if tools and exclude:
            raise ValueError(f"exclude={self.exclude!r} needs all tools: leave tools out")

    @property
    def most_failures(self) -> int:
        """Number of the model's answers in which a tool may fail in the same way."""
        # With 1, the model could not even correct its arguments after the first failure.
        return max(2, self.run_limit)
