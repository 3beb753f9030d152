"""A limiter whose threads can be reset."""

from collections.abc import Sequence
from typing import Any

from langchain.agents.middleware.types import ResponseT
from langchain_core.runnables import RunnableConfig
from langgraph.constants import END
from langgraph.pregel import Pregel
from langgraph.types import PregelTask

from langchain_quota.concurrency import Form, ask, now
from langchain_quota.decision import THREAD, LimitStatus, QuotaStatus
from langchain_quota.errors import ModelCallLimitExceededError, ToolCallLimitExceededError
from langchain_quota.limits import Limit
from langchain_quota.limits.options import whole_amount
from langchain_quota.middleware.context import prefix_in
from langchain_quota.middleware.flow import ContextT, Limiter, clock_of
from langchain_quota.rule import stored_as
from langchain_quota.state import LEDGER, UNUSED
from langchain_quota.stores.keys import CountKey

_LIMIT_ERRORS = (ModelCallLimitExceededError.__name__, ToolCallLimitExceededError.__name__)


class Resettable(Limiter[Any, ContextT, ResponseT]):
    """A limiter that resets a thread, in its state and in the store."""

    def reset(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        """Set a thread's counts to 0, in its state and in the store.

        Args:
            agent: The agent, as `create_agent` made it with this middleware.
            config: Names the thread: `{"configurable": {"thread_id": …}}`. If the store's
                prefix is a function, also `"quota_prefix"`: the prefix of the thread.

        Raises:
            TypeError: `agent` is not an agent of `create_agent`, but a remote one, for example.
            ValueError: The agent does not have this middleware, or the config names no prefix.
            RuntimeError: The thread has no state, or waits in mid-run other than at a limit.
            QuotaStoreError: The store could not be asked.
        """
        now(self._reset("", agent, config))

    async def areset(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        """`reset`, without blocking the event loop."""
        await self._reset("a", agent, config)

    async def _reset(self, form: Form, agent: Any, config: RunnableConfig) -> None:
        if not isinstance(agent, Pregel):
            raise TypeError(
                f"agent must be what create_agent made, not a {type(agent).__name__}: do this "
                "where the agent runs"
            )
        node = next((each for each in agent.nodes if _is(each, f"{self.name}.before_agent")), None)
        if node is None:
            raise ValueError(f"the agent does not have the middleware {self.name}")
        thread_id = config.get("configurable", {}).get("thread_id")
        snapshot = await ask(form, agent, "get_state", config)
        if not snapshot.values:
            raise RuntimeError(f"thread {thread_id!r} has no state: it has not run yet")
        if not all(map(self._has_stopped, snapshot.tasks)):
            raise RuntimeError(
                f"thread {thread_id!r} waits in mid-run before {', '.join(snapshot.next)}: let "
                "the run end, or begin a new one, and then do this"
            )
        if self._store is not None:
            prefix = prefix_in(config, self._store.prefix)
            keys = thread_keys(self.limits, config, clock_of(self._store.store)(), prefix)
            await self._store.reset(form, keys)
        own = {each.name: {**each.unused} for each in self.feature_kinds if each.unused}
        unused = {**UNUSED, LEDGER: {**UNUSED[LEDGER], "own": own}}
        await ask(form, agent, "update_state", config, unused, as_node=node)
        # The update has made nodes due that must not run.
        await ask(form, agent, "update_state", config, None, as_node=END)
        name = ((agent.config or {}).get("metadata") or {}).get("lc_agent_name")
        self._recorder.record_reset(name, thread_id, list(map(_unused, self.limits)))

    def _has_stopped(self, task: PregelTask) -> bool:
        """Whether a task failed because a limit ended the run with an exception."""
        # A checkpoint keeps an exception's `repr`, which begins with the name of its class.
        error = task.error if isinstance(task.error, str) else repr(task.error)
        judges = any(_is(task.name, each) for each in self._judging_nodes())
        return judges and error.startswith(_LIMIT_ERRORS)


def _is(node: str, hook: str) -> bool:
    """Whether a node is that of a hook; in a graph with several loops, its name has a prefix."""
    return node == hook or node.endswith(f".{hook}")


def _unused(limit: Limit) -> LimitStatus:
    """The status of a thread's limit when it has used nothing."""

    def number(argument: str, value: object) -> int | None:
        computed = value is None or callable(value)
        return None if computed else whole_amount(limit.unit, argument, value)

    return LimitStatus(
        limit=limit.name,
        exit_behavior=limit.exit_behavior,
        thread_before=0,
        thread_used=0,
        thread_limit=number("thread_limit", limit.thread_limit),
        run_before=0,
        run_used=0,
        run_limit=None,
        enforced=limit.enforce,
        near=limit.near,
        alert=limit.alert,
        quotas=tuple(
            QuotaStatus(quota.name, "", 0, 0, most, per=THREAD)
            for quota in limit.quotas
            if quota.per == THREAD and (most := number("limit", quota.limit)) is not None
        ),
        unit=limit.unit,
    )


def thread_keys(
    limits: Sequence[Limit], config: RunnableConfig, now: float, prefix: str = ""
) -> list[str]:
    """Where a store counts a thread's calls, at a time in seconds since the Unix epoch."""
    thread = str(config.get("configurable", {}).get("thread_id"))
    counts = {(stored_as(each), None) for each in limits if each.thread_limit is not None} | {
        (stored_as(each), quota.window)
        for each in limits
        for quota in each.quotas
        if quota.per == THREAD
    }
    return sorted(
        str(CountKey.at(counter, THREAD, thread, window, now, prefix=prefix))
        for counter, window in counts
    )
