"""A limiter whose threads can be reset."""

from collections.abc import Callable
from typing import Any

from langchain.agents.middleware.types import ResponseT
from langchain_core.runnables import RunnableConfig
from langgraph.constants import END
from langgraph.pregel import Pregel

from langchain_quota.middleware._base import ContextT, Limiter
from langchain_quota.middleware._reset import (
    after_reset,
    check_at_rest,
    own_node,
    prefix_in,
    thread_keys,
)
from langchain_quota.middleware._store import StoreClient
from langchain_quota.state import UNUSED


class Resettable(Limiter[Any, ContextT, ResponseT]):
    """A limiter that resets a thread, in its state and in the store."""

    _store: StoreClient | None
    _clock: Callable[[], float]

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
        node = own_node(agent, self.name)
        check_at_rest(agent.get_state(config), config, self._judging_nodes())
        if self._store is not None:
            prefix = prefix_in(config, self._store.prefix)
            self._store.reset(thread_keys(self._limits, config, self._clock(), prefix))
        agent.update_state(config, dict(UNUSED), as_node=node)
        # The update has made nodes due that must not run.
        agent.update_state(config, None, as_node=END)
        self._record_reset(agent, config)

    async def areset(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
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
        node = own_node(agent, self.name)
        check_at_rest(await agent.aget_state(config), config, self._judging_nodes())
        if self._store is not None:
            prefix = prefix_in(config, self._store.prefix)
            await self._store.areset(thread_keys(self._limits, config, self._clock(), prefix))
        await agent.aupdate_state(config, dict(UNUSED), as_node=node)
        # The update has made nodes due that must not run.
        await agent.aupdate_state(config, None, as_node=END)
        self._record_reset(agent, config)

    def _judging_nodes(self) -> tuple[str, ...]:
        """The nodes of the graph in which this middleware judges."""
        return f"{self.name}.before_model", f"{self.name}.after_model"

    def _record_reset(self, agent: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> None:
        name = ((agent.config or {}).get("metadata") or {}).get("lc_agent_name")
        thread_id = config.get("configurable", {}).get("thread_id")
        self._recorder.record_reset(name, thread_id, after_reset(self._limits))
