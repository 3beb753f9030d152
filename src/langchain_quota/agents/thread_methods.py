"""Methods of middlewares for one thread: reset its counts, and grant it more."""

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from langchain.agents.middleware.types import ResponseT
from langchain_core.runnables import RunnableConfig
from langgraph.constants import END
from langgraph.pregel import Pregel
from langgraph.types import PregelTask

from langchain_quota.core.checks import Check, ResolvedLimit, store_counter
from langchain_quota.core.decide import status
from langchain_quota.core.decision import LimitStatus
from langchain_quota.errors import ModelCallLimitExceededError, ToolCallLimitExceededError
from langchain_quota.limits import Limit
from langchain_quota.limits.call import THREAD
from langchain_quota.limits.options import whole_amount
from langchain_quota.limits.windows import CalendarWindow
from langchain_quota.middleware.base import ContextT, LimitMiddleware
from langchain_quota.middleware.context import CompiledGraph
from langchain_quota.middleware.flow import clock_of
from langchain_quota.middleware.state import LEDGER, UNUSED
from langchain_quota.runtime import compat
from langchain_quota.runtime.sync_async import Mode, call_variant, run_sync
from langchain_quota.runtime.units import Dollars
from langchain_quota.stores.grants import Grant, SupportsGrants
from langchain_quota.stores.keys import CountKey, prefix_in

_LIMIT_ERRORS = (ModelCallLimitExceededError.__name__, ToolCallLimitExceededError.__name__)


class ThreadMethods(LimitMiddleware[Any, ContextT, ResponseT]):
    """A middleware whose threads can be reset and granted more."""

    def reset(self, agent: CompiledGraph, config: RunnableConfig) -> None:
        """Set a thread's counts to 0, in its state and in the store.

        Args:
            agent: The agent, as `create_agent` made it with this middleware.
            config: Names the thread: `{"configurable": {"thread_id": …}}`. If the store's
                prefix is a function, also `"quota_prefix"`: the prefix of the thread.

        Raises:
            TypeError: `agent` is not an agent of `create_agent`, but a remote one, for example.
            ValueError: The agent does not have this middleware, or the config names no prefix.
            RuntimeError: The thread has no state, or waits in mid-run other than at a limit.
            QuotaStoreError: The store was unavailable.
        """
        run_sync(self._reset("", agent, config))

    async def areset(self, agent: CompiledGraph, config: RunnableConfig) -> None:
        """Call `reset` without blocking the event loop."""
        await self._reset("a", agent, config)

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
            prefix = prefix_in(config, store.prefix)
            at = clock_of(store.store)()
            keys = {
                str(
                    CountKey.at(
                        store_counter(limit), THREAD, str(thread_id), window, at, prefix=prefix
                    )
                )
                for limit in self.limits
                for window in _windows(limit)
            }
            await store.reset(mode, sorted(keys))
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
        checks_calls = any(_is(task.name, node) for node in self.checking_nodes())
        return checks_calls and error.startswith(_LIMIT_ERRORS)

    def grant(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        config: RunnableConfig,
        amount: Dollars,
        *,
        limit: str | None = None,
        until: datetime | None = None,
        reason: str = "",
        by: str = "",
        id: str | None = None,  # noqa: A002 - as the field is called
    ) -> Grant:
        """Raise a thread's limit by an amount, in the store that counts the thread.

        Other limits of this thread on the same count are raised, too: at once, even during a run.

        Args:
            config: As in `reset`.
            amount: How much more, above 0, in the limit's unit: calls, tokens or dollars.
            limit: The name of the limit; may be left out if one limit alone has a `thread_limit`.
            until: When the grant ends, with a time zone; by default as in `MemoryStore.grant`.
            reason: Why it is given, for the list and the log.
            by: Who gives it.
            id: The name of the grant: the same name is not granted twice. By default a new name.

        Raises:
            TypeError: An argument has the wrong type, or the middleware has no store that gives
                grants.
            ValueError: An argument is out of bounds, or no such limit has a `thread_limit`.
            QuotaStoreError: The store was unavailable.
        """
        store, key = self._granting(limit, config)
        return store.grant(key, amount, window=None, until=until, reason=reason, by=by, id=id)

    async def agrant(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        config: RunnableConfig,
        amount: Dollars,
        *,
        limit: str | None = None,
        until: datetime | None = None,
        reason: str = "",
        by: str = "",
        id: str | None = None,  # noqa: A002 - as the field is called
    ) -> Grant:
        """Call `grant` without blocking the event loop."""
        store, key = self._granting(limit, config)
        return await store.agrant(
            key, amount, window=None, until=until, reason=reason, by=by, id=id
        )

    def _granting(self, name: str | None, config: RunnableConfig) -> tuple[SupportsGrants, str]:
        client = self.kernel.store
        store: object = client and client.store
        if client is None or not isinstance(store, SupportsGrants):
            raise TypeError(
                f"{type(self).__name__} needs a store that gives grants, not {store!r}: pass "
                "store=MemoryStore() or, for several processes, store=RedisStore()"
            )
        by_name = {limit.name: limit for limit in self.limits if limit.thread_limit is not None}
        thread = config.get("configurable", {}).get("thread_id")
        if thread is None:
            raise ValueError('config names no thread: {"configurable": {"thread_id": …}}')
        if name is None and len(by_name) == 1:
            (name,) = by_name
        if name is None or name not in by_name:
            names = ", ".join(map(repr, by_name)) or "there is none"
            raise ValueError(
                f"limit must name one with a thread_limit, not {name!r}: {names}. More of a quota "
                "is given by the store: store.grant(key, …)"
            )
        prefix = prefix_in(config, client.prefix)
        return store, str(
            CountKey(store_counter(by_name[name]), THREAD, str(thread), prefix=prefix)
        )


def _is(node: str, hook: str) -> bool:
    """Return whether a node is that of a hook; with several loops, its name has a prefix."""
    return node == hook or node.endswith(f".{hook}")


def _windows(limit: Limit) -> list[timedelta | CalendarWindow | None]:
    """Return the windows in which a store counts a thread for a limit; `None` for no window."""
    in_all = [] if limit.thread_limit is None else [None]
    return [*in_all, *(quota.period for quota in limit.quotas if quota.per == THREAD)]


def _unused(limit: Limit) -> LimitStatus:
    """Return the status of a thread's limit when it has used nothing."""
    thread = None if callable(limit.thread_limit) else limit.thread_limit
    unused = ResolvedLimit.of(limit, thread=thread, run=None)
    quotas = (
        Check(quota.name, "", whole_amount(limit.unit, "limit", quota.limit), per=THREAD)
        for quota in limit.quotas
        if quota.per == THREAD and not quota.smooth and not callable(quota.limit)
    )
    return status(unused._replace(checks=(*unused.checks, *quotas)), Counter(), 0)
