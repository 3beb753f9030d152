"""The limit on the time that an agent works."""

from dataclasses import dataclass
from typing import ClassVar

from langchain_quota.limits.budgets import Budget
from langchain_quota.limits.options import MILLISECONDS, counts_calls, validate_amount
from langchain_quota.runtime.arguments import explain_arguments
from langchain_quota.runtime.units import Time, Unit, parse_milliseconds


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
        if self.call_limit is None or counts_calls(self):
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
