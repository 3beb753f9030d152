"""The checks and names that `reset` needs."""

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel
from langgraph.types import PregelTask, StateSnapshot

from langchain_quota.decision import THREAD, LimitStatus, QuotaStatus
from langchain_quota.errors import ModelCallLimitExceededError, ToolCallLimitExceededError
from langchain_quota.limit_options import whole_amount
from langchain_quota.limits import Limit
from langchain_quota.resolved import stored_as
from langchain_quota.stores.keys import CountKey, check_prefix

_LIMIT_ERRORS = (ModelCallLimitExceededError.__name__, ToolCallLimitExceededError.__name__)


def own_node(agent: Pregel[Any, Any, Any, Any], middleware: str) -> str:
    """The node as which a middleware of an agent writes.

    Raises:
        TypeError: The agent is not one of `create_agent`: it may be a remote one.
        ValueError: It does not have the middleware.
    """
    if not isinstance(agent, Pregel):
        raise TypeError(
            f"agent must be what create_agent made, not a {type(agent).__name__}: do this "
            "where the agent runs"
        )
    beginning = f"{middleware}.before_agent"
    for node in agent.nodes:
        if _is(node, beginning):
            return node
    raise ValueError(f"the agent does not have the middleware {middleware}")


def check_at_rest(snapshot: StateSnapshot, config: RunnableConfig, nodes: Collection[str]) -> None:
    """Check that no run of a thread waits to go on.

    Args:
        snapshot: The thread's state.
        config: Names the thread.
        nodes: The nodes in which the middleware judges.

    Raises:
        RuntimeError: The thread has no state, or waits in mid-run.
    """
    thread_id = config.get("configurable", {}).get("thread_id")
    if not snapshot.values:
        raise RuntimeError(f"thread {thread_id!r} has no state: it has not run yet")
    if not all(stopped_at_a_limit(task, nodes) for task in snapshot.tasks):
        raise RuntimeError(
            f"thread {thread_id!r} waits in mid-run before {', '.join(snapshot.next)}: let "
            "the run end, or begin a new one, and then do this"
        )


def stopped_at_a_limit(task: PregelTask, nodes: Collection[str]) -> bool:
    """Whether a task failed because a limit ended the run with an exception.

    Args:
        task: The task.
        nodes: The nodes in which the middleware judges.
    """
    # A checkpoint keeps an exception's `repr`, which begins with the name of its class.
    error = task.error if isinstance(task.error, str) else repr(task.error)
    return any(_is(task.name, each) for each in nodes) and error.startswith(_LIMIT_ERRORS)


def _is(node: str, hook: str) -> bool:
    """Whether a node is that of a hook; in a graph with several loops, its name has a prefix."""
    return node == hook or node.endswith(f".{hook}")


def after_reset(limits: Sequence[Limit]) -> list[LimitStatus]:
    """The status of a thread's limits when it has used nothing.

    Args:
        limits: The limits.
    """
    return [
        LimitStatus(
            limit=limit.name,
            exit_behavior=limit.exit_behavior,
            thread_before=0,
            thread_used=0,
            thread_limit=_number(limit, "thread_limit", limit.thread_limit),
            run_before=0,
            run_used=0,
            run_limit=None,
            enforced=limit.enforce,
            near=limit.near,
            alert=limit.alert,
            quotas=tuple(
                QuotaStatus(quota.name, "", 0, 0, number, per=THREAD)
                for quota in limit.quotas
                if quota.per == THREAD
                and (number := _number(limit, "limit", quota.limit)) is not None
            ),
            unit=limit.unit,
        )
        for limit in limits
    ]


def _number(limit: Limit, argument: str, value: object) -> int | None:
    """A number as it is counted; `None` for none, and for a function."""
    return None if value is None or callable(value) else whole_amount(limit.unit, argument, value)


def prefix_in(config: RunnableConfig, prefix: object) -> str:
    """What a thread's keys begin with, where no run's context can say it."""
    if not callable(prefix):
        return ""
    named = config.get("configurable", {}).get("quota_prefix")
    return check_prefix('config["configurable"]["quota_prefix"]', named)


def thread_keys(
    limits: Sequence[Limit], config: RunnableConfig, now: float, prefix: str = ""
) -> list[str]:
    """Where a store counts a thread's calls.

    Args:
        limits: The limits.
        config: Names the thread.
        now: The time in seconds since the Unix epoch.
        prefix: What the store's keys begin with, if its prefix is a function.
    """
    thread = str(config.get("configurable", {}).get("thread_id"))
    counts: set[tuple[str, timedelta | None]] = {
        (stored_as(limit), None) for limit in limits if limit.thread_limit is not None
    }
    counts |= {
        (stored_as(limit), quota.window)
        for limit in limits
        for quota in limit.quotas
        if quota.per == THREAD
    }
    return sorted(
        str(CountKey.at(counter, THREAD, thread, window, now, prefix=prefix))
        for counter, window in counts
    )
