"""The call that a limit checks, the scopes of counts, and the effects of a refusal."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

Kind = Literal["model", "tool"]

Scope = str
"""The scope of a count: `"thread"`, `"run"`, or the name of a quota."""

THREAD: Scope = "thread"
RUN: Scope = "run"

ROOT_RUN: Scope = "root_run"
"""A run that no other run encloses, with everything that it starts."""

STORE: Scope = "store"
"""In place of a scope, if a limit refuses because the store is unavailable."""

FROZEN: Scope = "frozen"
"""In place of a scope, if a limit refuses because its subject is frozen."""

CONCURRENCY: Scope = "concurrency"
"""The scope of calls that run at the same time. Their count includes the blocked call."""

FromContext: TypeAlias = Callable[[Any, Any], object]
"""A user's function of the agent's state and runtime, sync or async."""

Exit = Literal["continue", "error", "end", "finalize", "ask"]


class Call(NamedTuple):
    """A call that limits check.

    Attributes:
        kind: `"model"` or `"tool"`.
        tool: The tool's name as the model gave it; `None` for a model call.
        id: The tool call's id; `None` for a model call.
        amount: How many calls it counts as; a whole number from 1.
        agent: The name of the agent that makes the call, if it has one.
        thread_id: The thread's id as the caller gave it. `None` if there is no thread. Also `None`
            if the agent runs inside another agent, and its use cannot be told from the other's.

    Examples:
        >>> from langchain_quota import ToolCallLimit
        >>> from langchain_quota.limits.call import Call
        >>> call = Call("tool", "search", id="call_1", agent="researcher", thread_id="7")
        >>> ToolCallLimit("search", run_limit=3).matches(call)
        True
    """

    kind: Kind
    tool: str | None = None
    id: str | None = None
    amount: int = 1
    agent: str | None = None
    thread_id: object = None
