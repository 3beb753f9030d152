"""Limits on the number of calls: of tools, and of the model."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Literal

from langchain_quota.limits.options import MODEL, CallLimit, ModelLimit
from langchain_quota.runtime.arguments import explain_arguments

ToolExitBehavior = Literal["continue", "error", "end", "ask"]
ExitBehavior = Literal["continue", "error", "end"]
"""The exit behaviours that LangChain's limiters know."""


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
            default that of the `Telemetry`.
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
