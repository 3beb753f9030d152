"""Limits on the number of calls: of tools, and of the model."""

import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

from langchain_quota.arguments import ALL_TOOLS, by_name, check_count, checked_tools
from langchain_quota.limits.options import MODEL, ModelLimit, Most, ToolLimit, counts_calls
from langchain_quota.limits.quotas import Quota

ToolExitBehavior = Literal["continue", "error", "end", "ask"]
ExitBehavior = Literal["continue", "error", "end"]
"""The exit behaviours that LangChain's limiters know."""

DEFAULT_WAIT = 30.0
"""How long a call waits for others to end, in seconds, by default: enough for a few usual tool
calls, and less than the minute after which many gateways give up on an answer."""


@by_name
@dataclass(frozen=True, slots=True)
class ToolCallLimit(ToolLimit):
    """How many tool calls a thread and a run may make.

    Args:
        tool_name: The tool that is limited, or several that share one count; `None` for all
            tools together.
        exclude: With all tools: those that are not limited.
        thread_limit: Most calls over the life of a thread, a whole number from 0 (0 refuses every
            call); `None` for no limit. Or a function of the agent's state and runtime, sync or
            async, that gives either: for example by the tenant's plan in `runtime.context`.
        run_limit: The same for one run (one invocation). At most `thread_limit`.
        exit_behavior: What a call over the limit does. `"continue"` answers it with an error
            message and lets the agent go on, `"end"` ends the run, `"error"` raises
            `ToolCallLimitExceededError`. `"ask"` interrupts the run and asks a person, who grants
            more or ends the run. It needs a `QuotaMiddleware`, and an agent with a checkpointer.
        grant: With `"ask"`: how many more calls an approval grants, from 1; by default as many as
            the limit that is reached. If the refused calls need more, it grants what they need.
        message: What the model reads as the answer of a refused call (and, with `"end"`, the
            user as the final message) instead of the default text: a text, or a function from
            the `Decision` to a text.
        name: The limit's name in metrics and spans, 1 to 64 printable characters. By default
            `tool:<tools>`, `tool:*` for all tools, or `tool:*-<excluded>`.
        near: The used share, above 0 and at most 1, from which this limit counts as near; by
            default that of the `Telemetry`.
        enforce: Whether the limit refuses calls. With `False` it judges and counts every call, and
            a call that it would refuse runs, as `would_block`: try a limit before you enforce it.
        alert: Whether a refusal is worth an alert. `False` for a limit that is meant to be hit.
            The exported alert rules leave out such a limit, and one that is not enforced.
        give_up_after: With `"continue"`: after so many refusals in one run, from 1, the run ends
            as with `"end"`.
        quotas: Further limits, per user, tenant or window, counted in a store that runs share. They
            need a `QuotaMiddleware` with a `store`. A call runs only if all of them admit it.
            With quotas, neither `thread_limit` nor `run_limit` is needed.
        at_once: Most calls that run at the same time, a whole number from 1: in this process, or
            with a `RedisStore` in all processes that share it. A further call waits. It needs a
            `QuotaMiddleware` or a `GraphQuota`. With it, no other limit is needed.
        wait: With `at_once`: how long a call waits, in seconds from 0; by default 30. After that
            it is answered with an error message and not counted, whatever `exit_behavior` is.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: No limit is given, `run_limit` exceeds `thread_limit`, two arguments do not
            go together, two thresholds have one scope, or an argument is out of bounds. The
            message names the argument and the value.

    Examples:
        >>> from langchain_quota import ToolCallLimit
        >>> ToolCallLimit("search", thread_limit=20, run_limit=3).name
        'tool:search'
        >>> ToolCallLimit(run_limit=50, exclude=("write_todos",)).name
        'tool:*-write_todos'
        >>> ToolCallLimit("browser", at_once=2).wait
        30.0
        >>> ToolCallLimit("search", run_limit=-1)
        Traceback (most recent call last):
            ...
        ValueError: run_limit must be 0 or more, not -1: leave it out for no limit
    """

    _exits: ClassVar[Any] = ToolExitBehavior

    tool_name: str | Sequence[str] | None = None
    _: KW_ONLY
    thread_limit: Most[int] = None
    run_limit: Most[int] = None
    exit_behavior: ToolExitBehavior = "continue"
    grant: int | None = None
    quotas: Sequence[Quota] = ()
    at_once: int | None = None
    wait: float | None = None
    tools: tuple[str, ...] = field(init=False, repr=False)
    """The tools that the limit names; empty for all tools."""
    counter: str = field(init=False, repr=False)
    """The key under which calls are counted: limits with one counter share its count."""

    def __post_init__(self) -> None:
        tools = checked_tools("tool_name", self.tool_name)
        excluded = checked_tools("exclude", self.exclude, or_none=True)
        if tools and excluded:
            raise ValueError(f"exclude={self.exclude!r} needs all tools: leave tool_name out")
        without = f"-{','.join(excluded)}" if excluded else ""
        self._check_options(f"tool:{','.join(tools) or '*' + without}")
        thread, run = self.thread_limit, self.run_limit
        if isinstance(thread, int) and isinstance(run, int) and run > thread:
            raise ValueError(
                f"run_limit ({run}) cannot exceed thread_limit ({thread}): "
                "a run is part of a thread"
            )
        self._check_at_once()
        if not isinstance(self.tool_name, str | None):
            self._set(tool_name=tools)
        self._set(tools=tools, exclude=excluded, counter=",".join(tools) or ALL_TOOLS + without)

    def _check_at_once(self) -> None:
        """Check the options of calls at once."""
        if self.at_once is None:
            if self.wait is not None:
                raise ValueError(f"wait={self.wait!r} needs at_once: give at_once, too")
            return
        check_count("at_once", self.at_once, least=1)
        wait: object = DEFAULT_WAIT if self.wait is None else self.wait
        if isinstance(wait, bool) or not isinstance(wait, int | float):
            raise TypeError(f"wait must be a number of seconds, not {wait!r}")
        if not 0 <= wait <= sys.float_info.max:
            raise ValueError(f"wait must be 0 or more seconds, and finite, not {wait!r}")
        if self.exit_behavior != "continue" and not counts_calls(self):
            raise ValueError(
                f"exit_behavior={self.exit_behavior!r} needs thread_limit, run_limit or quotas: "
                "a call over at_once is always answered, and the run goes on"
            )
        if self.give_up_after is not None and not counts_calls(self):
            raise ValueError(
                f"give_up_after={self.give_up_after!r} needs thread_limit, run_limit or quotas"
            )
        self._set(wait=float(wait))


@by_name
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCallLimit(ModelLimit[int]):
    """How many model calls a thread and a run may make.

    `ToolCallLimit` says what the other arguments mean: `thread_limit`, `run_limit`, `grant`,
    `message`, `near`, `enforce`, `alert` and `quotas`.

    Args:
        exit_behavior: What reaching the limit does. `"end"` ends the run with a message,
            `"error"` raises `ModelCallLimitExceededError`. `"finalize"` tells the model in the last
            call that this call is the last one, and that it may call no tool. The run ends with the
            model's answer. `"ask"` asks a person; see `ToolCallLimit`.
        name: The limit's name in metrics and spans, 1 to 64 printable characters; by default
            `model`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: No limit is given, two arguments do not go together, two thresholds have one
            scope, or an argument is out of bounds. The message names the argument and the value.

    Examples:
        >>> from langchain_quota import ModelCallLimit
        >>> ModelCallLimit(run_limit=10, thread_limit=100, exit_behavior="finalize").name
        'model'
    """

    counter: ClassVar[str] = MODEL
    """The key under which calls are counted."""

    def __post_init__(self) -> None:
        self._check_options(MODEL)
