"""A limiter whose store can give one thread more than its limits say."""

from datetime import datetime
from typing import Any

from langchain.agents.middleware.types import ResponseT
from langchain_core.runnables import RunnableConfig

from langchain_quota.decision import THREAD
from langchain_quota.middleware.context import prefix_in
from langchain_quota.middleware.flow import ContextT, Limiter
from langchain_quota.rule import stored_as
from langchain_quota.stores.grants import Grant, Granting
from langchain_quota.stores.keys import CountKey
from langchain_quota.units import Dollars


class Grantable(Limiter[Any, ContextT, ResponseT]):
    """A limiter that raises the limits of one thread."""

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
            config: Names the thread: `{"configurable": {"thread_id": …}}`. If the store's
                prefix is a function, also `"quota_prefix"`: the prefix of the thread.
            amount: How much more, above 0, in the limit's unit: dollars as a string.
            limit: The name of the limit; may be left out if one limit alone has a `thread_limit`.
            until: When the grant ends, with a time zone; by default as in `MemoryStore.grant`.
            reason: Why it is given, for the list and the log.
            by: Who gives it.
            id: The name of the grant: the same name is not granted twice. By default a new name.

        Raises:
            TypeError: An argument has the wrong type, or the middleware has no store that gives
                grants.
            ValueError: An argument is out of bounds, or no such limit has a `thread_limit`.
            QuotaStoreError: The store could not be asked.
        """
        store, key = self._granting(limit, config)
        return store.grant(key, amount, until=until, reason=reason, by=by, id=id)

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
        """`grant`, without blocking the event loop."""
        store, key = self._granting(limit, config)
        return await store.agrant(key, amount, until=until, reason=reason, by=by, id=id)

    def _granting(self, name: str | None, config: RunnableConfig) -> tuple[Granting, str]:
        store: object = None if self._store is None else self._store.store
        if self._store is None or not isinstance(store, Granting):
            raise TypeError(
                f"{type(self).__name__} needs a store that gives grants, not {store!r}: pass "
                "store=MemoryStore() or, for several processes, store=RedisStore()"
            )
        found = {each.name: each for each in self.limits if each.thread_limit is not None}
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
        prefix = prefix_in(config, self._store.prefix)
        return store, str(CountKey(stored_as(found[name]), THREAD, str(thread), prefix=prefix))
