"""Methods of middlewares: reset the counts of a thread, or of another subject."""

from datetime import timedelta
from inspect import isfunction
from typing import Any, overload

from langchain.agents.middleware.types import ResponseT
from langchain_core.runnables import RunnableConfig
from langgraph.constants import END
from langgraph.pregel import Pregel
from langgraph.types import PregelTask

from langchain_quota.agents.subject_methods import CountName, Id, SubjectMethods
from langchain_quota.core.plans import Meter, Rule, store_counter
from langchain_quota.errors import ModelCallLimitExceededError, ToolCallLimitExceededError
from langchain_quota.limits import Limit
from langchain_quota.limits.call import THREAD
from langchain_quota.limits.options import whole_amount
from langchain_quota.limits.quotas import CalendarWindow
from langchain_quota.middleware.base import ContextT, LimitMiddleware
from langchain_quota.middleware.context import CompiledGraph
from langchain_quota.middleware.state import LEDGER, UNUSED
from langchain_quota.runtime import compat
from langchain_quota.runtime.sync_async import Mode, call_variant, run_sync
from langchain_quota.stores.keys import CountKey, check_prefix

_LIMIT_ERRORS = (ModelCallLimitExceededError.__name__, ToolCallLimitExceededError.__name__)


class ThreadMethods(SubjectMethods, LimitMiddleware[Any, ContextT, ResponseT]):
    """A middleware whose threads can be reset, and what it counts for others by names."""

    has_state = True

    @overload
    def reset(self, agent: CompiledGraph, config: RunnableConfig, /) -> None: ...

    @overload
    def reset(
        self, name: str, /, *, quota: str | None = None, prefix: str | None = None, **subject: Id
    ) -> None: ...

    def reset(self, agent: Any, config: Any = None, /, **names: Any) -> None:
        """Set a thread's counts to 0, in its state and in the store; or one subject's count.

        Args:
            agent: The agent, as `create_agent` made it with this middleware. Or the name of a
                limit.
            config: Names the thread: `{"configurable": {"thread_id": …}}`. If the store's
                prefix is a function, also `"quota_prefix"`: the prefix of the thread.
            names: With the name of a limit, `quota`, `prefix` and the subject, as in `left`. What
                a thread has used in all is reset with the agent only.

        Raises:
            TypeError: `agent` is not an agent of `create_agent`, but a remote one, for example.
            ValueError: The agent does not have this middleware, the config names no prefix, or the
                names choose no count, or several.
            RuntimeError: The thread has no state, or waits in mid-run other than at a limit.
            QuotaStoreError: The store was unavailable.
        """
        run_sync(self._reset_any("", agent, config, names))

    @overload
    async def areset(self, agent: CompiledGraph, config: RunnableConfig, /) -> None: ...

    @overload
    async def areset(
        self, name: str, /, *, quota: str | None = None, prefix: str | None = None, **subject: Id
    ) -> None: ...

    async def areset(self, agent: Any, config: Any = None, /, **names: Any) -> None:
        """Call `reset` without blocking the event loop."""
        await self._reset_any("a", agent, config, names)

    async def _reset_any(self, mode: Mode, agent: Any, config: Any, names: Any) -> None:
        if isinstance(agent, str) and config is None:
            quota, prefix = names.pop("quota", None), names.pop("prefix", None)
            await self._reset_count(mode, CountName(agent, quota, prefix, names))
        elif config is None or names:
            raise TypeError("reset takes an agent and a config, or a limit's name and a subject")
        else:
            await self._reset(mode, agent, config)

    async def _reset(self, mode: Mode, agent: object, config: RunnableConfig) -> None:
        if not isinstance(agent, Pregel):
            raise TypeError(
                f"agent must be what create_agent made, not a {type(agent).__name__}: do this "
                "where the agent runs"
            )
        node = next((node for node in agent.nodes if _is(node, f"{self.name}.before_agent")), None)
        if node is None:
            raise ValueError(f"the agent does not have the middleware {self.name}")
        thread_id = config.get("configurable", {}).get("thread_id")
        snapshot = await call_variant(mode, agent.get_state, agent.aget_state, config)
        if not snapshot.values:
            raise RuntimeError(f"thread {thread_id!r} has no state: it has not run yet")
        if not all(map(self._has_stopped, snapshot.tasks)):
            raise RuntimeError(
                f"thread {thread_id!r} waits in mid-run before {', '.join(snapshot.next)}: let "
                "the run end, or begin a new one, and then do this"
            )
        store = self.kernel.store
        if store is not None:
            prefix, at = "", store.clock()
            if callable(store.prefix):
                # No run's context can say it here.
                named = config.get("configurable", {}).get("quota_prefix")
                prefix = check_prefix('config["configurable"]["quota_prefix"]', named)
            subject = THREAD, str(thread_id)
            keys = {
                CountKey.at(store_counter(limit), *subject, window, at, prefix=prefix)
                for limit in self.limits
                for window in _windows(limit)
            }
            await store.reset(mode, sorted(map(str, keys)))
        feature_data = {kind.name: {**kind.unused} for kind in self.feature_kinds if kind.unused}
        unused = {**UNUSED, LEDGER: {**UNUSED[LEDGER], "own": feature_data}}
        update = agent.update_state, agent.aupdate_state
        await call_variant(mode, *update, config, unused, as_node=node)
        # The update has made nodes due that must not run.
        await call_variant(mode, *update, config, None, as_node=END)
        name = compat.agent_name((agent.config or {}).get("metadata"))
        self.kernel.recorder.record_reset(name, thread_id, list(map(_unused, self.limits)))

    def _has_stopped(self, task: PregelTask) -> bool:
        """Return whether a task failed because a limit ended the run with an exception."""
        # A checkpoint keeps an exception's `repr`, which begins with the name of its class.
        error = task.error if isinstance(task.error, str) else repr(task.error)
        hooks = f"{self.name}.before_model", f"{self.name}.after_model"
        nodes = ("model",) if self.kernel.checks_inline else hooks
        checks_calls = any(_is(task.name, node) for node in nodes)
        return checks_calls and error.startswith(_LIMIT_ERRORS)


for _kind in (SubjectMethods, ThreadMethods):
    for _method in filter(isfunction, vars(_kind).values()):
        # Python's errors about arguments name the method, and not a class that is internal.
        _method.__qualname__ = _method.__name__


def _is(node: str, hook: str) -> bool:
    """Return whether a node is that of a hook; with several loops, its name has a prefix."""
    return node == hook or node.endswith(f".{hook}")


def _windows(limit: Limit) -> list[timedelta | CalendarWindow | None]:
    """Return the windows in which a store counts a thread for a limit; `None` for no window."""
    in_all = [] if limit.thread_limit is None else [None]
    return [*in_all, *(quota.period for quota in limit.quotas if quota.per == THREAD)]


def _unused(limit: Limit) -> Rule:
    """Return a limit with the counts of a thread that an application can show."""
    thread = None if callable(limit.thread_limit) else limit.thread_limit
    unused = Rule.of(limit, thread=thread, run=None)
    quotas = (
        Meter(quota.name, "", whole_amount(limit.unit, "limit", quota.limit), per=THREAD)
        for quota in limit.quotas
        if quota.per == THREAD and not quota.smooth and not callable(quota.limit)
    )
    return unused._replace(meters=(*unused.meters, *quotas))
