"""A limiter whose threads can be given more than their limits say."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from langchain.agents.middleware.types import ResponseT
from langchain_core.runnables import RunnableConfig
from langgraph.constants import END
from langgraph.pregel import Pregel

from langchain_quota.decision import THREAD
from langchain_quota.limits import Limit
from langchain_quota.middleware._base import ContextT
from langchain_quota.middleware._grants import granting
from langchain_quota.middleware._reset import check_at_rest, own_node, prefix_in
from langchain_quota.middleware._resettable import Resettable
from langchain_quota.money import Dollars
from langchain_quota.resolved import stored_as
from langchain_quota.state import LEDGER
from langchain_quota.stores.confirming import confirming
from langchain_quota.stores.grants import Grant, Granting, fields, log_grant, new_grant
from langchain_quota.stores.keys import CountKey


class Grantable(Resettable[ContextT, ResponseT]):
    """A limiter that raises the limits of one thread."""

    def grant(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        agent: Pregel[Any, Any, Any, Any],
        config: RunnableConfig,
        amount: Dollars,
        *,
        limit: str | None = None,
        until: datetime | None = None,
        reason: str = "",
        by: str = "",
        id: str | None = None,  # noqa: A002 - as the field is called
    ) -> Grant:
        """Raise a thread's limit by an amount, in the store that counts the thread or in its state.

        Other limits of this thread on the same count are raised, too. A store raises them at once,
        even during a run. A state can only be written between runs, by one caller at a time, as
        with `reset`.

        Args:
            agent: The agent, as `create_agent` made it with this middleware; not used with a store.
            config: Names the thread: `{"configurable": {"thread_id": …}}`. If the store's
                prefix is a function, also `"quota_prefix"`: the prefix of the thread.
            amount: How much more, above 0, in the limit's unit: dollars as a string.
            limit: The name of the limit; may be left out if one limit alone has a `thread_limit`.
            until: When the grant ends, with a time zone; by default as in `MemoryStore.grant` or,
                in a state, together with the thread.
            reason: Why it is given, for the list and the log.
            by: Who gives it.
            id: The name of the grant: the same name is not granted twice. By default a new name.

        Raises:
            TypeError: An argument has the wrong type, the agent is a remote one, or the store gives
                no grants.
            ValueError: An argument is out of bounds, no such limit has a `thread_limit`, or the
                agent does not have this middleware.
            RuntimeError: The thread has no state, or waits in mid-run other than at a limit.
            QuotaStoreError: The store could not be asked.
        """
        asked: dict[str, Any] = {"until": until, "reason": reason, "by": by}
        chosen, key = self._granted_limit(limit, config)
        if self._store is not None:
            return self._granting_store().grant(key, amount, id=id, **asked)
        node = own_node(agent, self.name)
        snapshot = agent.get_state(config)
        check_at_rest(snapshot, config, self._judging_nodes())
        new = new_grant(key, amount, chosen.unit, name=id, now=self._clock(), **asked)
        grant, written = granting(snapshot.values, chosen, self._unended(new))
        if written is not None:
            with confirming("grant", key, grant.id, fields(grant)):
                agent.update_state(config, {LEDGER: written}, as_node=node)
                # The update has made nodes due that must not run.
                agent.update_state(config, None, as_node=END)
            self._record_grant(agent, chosen, grant)
        return grant

    async def agrant(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        agent: Pregel[Any, Any, Any, Any],
        config: RunnableConfig,
        amount: Dollars,
        *,
        limit: str | None = None,
        until: datetime | None = None,
        reason: str = "",
        by: str = "",
        id: str | None = None,  # noqa: A002 - as the field is called
    ) -> Grant:
        """`grant`, without blocking the event loop.

        Args:
            agent: As in `grant`.
            config: As in `grant`.
            amount: As in `grant`.
            limit: As in `grant`.
            until: As in `grant`.
            reason: As in `grant`.
            by: As in `grant`.
            id: As in `grant`.

        Raises:
            TypeError: An argument has the wrong type, the agent is a remote one, or the store gives
                no grants.
            ValueError: An argument is out of bounds, no such limit has a `thread_limit`, or the
                agent does not have this middleware.
            RuntimeError: The thread has no state, or waits in mid-run other than at a limit.
            QuotaStoreError: The store could not be asked.
        """
        asked: dict[str, Any] = {"until": until, "reason": reason, "by": by}
        chosen, key = self._granted_limit(limit, config)
        if self._store is not None:
            return await self._granting_store().agrant(key, amount, id=id, **asked)
        node = own_node(agent, self.name)
        snapshot = await agent.aget_state(config)
        check_at_rest(snapshot, config, self._judging_nodes())
        new = new_grant(key, amount, chosen.unit, name=id, now=self._clock(), **asked)
        grant, written = granting(snapshot.values, chosen, self._unended(new))
        if written is not None:
            with confirming("grant", key, grant.id, fields(grant)):
                await agent.aupdate_state(config, {LEDGER: written}, as_node=node)
                # The update has made nodes due that must not run.
                await agent.aupdate_state(config, None, as_node=END)
            self._record_grant(agent, chosen, grant)
        return grant

    def _granted_limit(self, name: str | None, config: RunnableConfig) -> tuple[Limit, str]:
        """The limit that is raised, and where a store counts the thread for it.

        Raises:
            ValueError: There is no such limit, or no thread.
        """
        found = {each.name: each for each in self._limits if each.thread_limit is not None}
        thread = config.get("configurable", {}).get("thread_id")
        if thread is None:
            raise ValueError('config names no thread: {"configurable": {"thread_id": …}}')
        if name is None and len(found) == 1:
            (name,) = found
        if name is None or name not in found:
            names = ", ".join(map(repr, found)) or "there is none"
            raise ValueError(
                f"limit must name one with a thread_limit, not {name!r}: {names}. More of a quota "
                "is given by the store: store.grant(key, …)"
            )
        chosen = found[name]
        prefix = "" if self._store is None else prefix_in(config, self._store.prefix)
        return chosen, str(CountKey(stored_as(chosen), THREAD, str(thread), prefix=prefix))

    def _granting_store(self) -> Granting:
        """The store.

        Raises:
            TypeError: It gives no grants.
        """
        store: object = None if self._store is None else self._store.store
        if not isinstance(store, Granting):
            raise TypeError(
                f"the store gives no grants, as MemoryStore and RedisStore do: {store!r}"
            )
        return store

    def _unended(self, grant: Grant) -> Grant:
        """The grant, if it has not ended.

        Raises:
            ValueError: It has ended.
        """
        if grant.ends is not None and grant.ends <= self._clock():
            raise ValueError(f"until must be in the future, not {grant.until!r}")
        return grant

    def _record_grant(self, agent: Pregel[Any, Any, Any, Any], limit: Limit, grant: Grant) -> None:
        log_grant("granted", grant)
        metadata: Mapping[str, Any] = (agent.config or {}).get("metadata") or {}
        granted = [
            (each.name, THREAD, each.unit, grant.amount)
            for each in self._limits
            if each.thread_limit is not None and stored_as(each) == stored_as(limit)
        ]
        self._recorder.record_granted(metadata.get("lc_agent_name"), granted)
