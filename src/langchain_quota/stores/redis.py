"""Counts in Redis, shared by all processes and machines that use it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.runtime.sync_async import T, run_sync
from langchain_quota.stores import IDLE_TTL
from langchain_quota.stores.base import PAGE, Operation
from langchain_quota.stores.keys import COUNT, Prefix
from langchain_quota.stores.redis_rows import RedisRows, key_of, pattern_of, place_of, read_rows
from langchain_quota.stores.redis_script import SCRIPTS, read_result, write_acquire
from langchain_quota.stores.rows import Name
from langchain_quota.stores.server import PREFIX, ServerStore

if TYPE_CHECKING:
    from langchain_quota.stores.redis_clients import AsyncClient, SyncClient

with suppress(ModuleNotFoundError):
    # An extra, which is loaded now: when a store is made, an event loop may run.
    import langchain_quota.stores.redis_clients  # noqa: F401

_TRIES = 100
"""How often what is rare is tried while others write the same rows."""


class RedisStore(ServerStore):
    """A `QuotaStore` in Redis, for all processes and machines that use the same prefix.

    A request is one run of one script, in one round trip. What is rare reads in a first one and
    writes in a second one, and begins again if others write the same meanwhile: to undo an attempt,
    to reset, delay, grant and freeze, and to fix what rolls over. Async operations that begin in
    the same turn of the event loop may share a round trip, except in a cluster. All keys of a
    prefix have one hash tag: in Redis Cluster they are in one hash slot, on one node. Every key
    expires. Counts are exact up to 2^53 - 1. They are as durable as Redis itself: its
    `maxmemory-policy` must be `noeviction`, and counts survive a restart of Redis only if it
    persists them.

    A prefix may be a function: then each tenant, for example, has its own prefix, and a cluster
    spreads the tenants over its nodes. A run for which the function gives no prefix fails, and
    nothing is charged. Keys begin with the prefix: `acme/search:user_id:ada`. To list counts and
    grants, make a store with the prefix as a string: there, the same key is `search:user_id:ada`.

    Args:
        source: The URL of one server in redis-py's form: `redis://`, `rediss://` for TLS or
            `unix://`, with user and password percent-encoded. `None`: the URL in the environment
            variable `LANGCHAIN_QUOTA_REDIS_URL`. If the URL has no password, it is that in
            `LANGCHAIN_QUOTA_REDIS_PASSWORD`. Or your own client, of one server or of a cluster,
            which keeps its timeouts and retries: a client of `redis` serves the sync form, a client
            of `redis.asyncio` the async form, on its own event loop.
        prefix: What all keys begin with, `[A-Za-z0-9_.-]{1,64}`. Stores with different prefixes
            share nothing. Or a function of state and runtime, as of `Quota(per=…)`, but not async:
            `lambda state, runtime: runtime.context["tenant"]`.
        timeout: How long an operation may take: seconds above 0, at most a day. For an async
            operation it is the total, without time in which the event loop was blocked; for a sync
            operation it is each wait for the network. Nothing is tried twice.
        idle_ttl: How long a count without a window is kept when nobody charges it, from a second.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or there is no URL. No message has credentials.
        ModuleNotFoundError: The package redis is not installed; the message says what to install.

    Examples:
        Nothing is connected before the first operation:

        >>> from langchain_quota import RedisStore
        >>> RedisStore("rediss://worker:secret@redis.example/0", prefix="prod")
        RedisStore(rediss://redis.example/0, prefix='prod')
    """

    def __init__(
        self,
        source: "str | SyncClient | AsyncClient | None" = None,
        *,
        prefix: Prefix = PREFIX,
        timeout: float = 1.0,
        idle_ttl: timedelta = IDLE_TTL,
    ) -> None:
        from langchain_quota.stores.redis_clients import clients  # noqa: PLC0415 - an extra

        super().__init__(prefix, timeout, idle_ttl)
        self._server = self._clients = clients(source, timeout)

    async def _admit(self, prefix: str, request: AcquireRequest) -> AcquireResult:
        arguments = write_acquire(prefix, request, self._idle)
        if request.corrections and any(each.attempt_id for each in request.corrections):
            # They undo what attempts have charged. Each is made once: the script finds it made.
            corrections = AcquireRequest("", "", corrections=request.corrections)
            await self._change(prefix, lambda tables, _: tables.acquire(corrections))
        for _ in range(_TRIES):
            reply = await self._clients.run(SCRIPTS["acquire"], arguments)
            result = self._read_by(read_result, request, reply)
            if result is not None:
                return result
            await self._change(prefix, lambda tables, _: tables.roll_over(request))
        raise QuotaStoreError(f"{self!r}: what rolled over was lost {_TRIES} times")

    async def _change(
        self, prefix: str, operation: Operation[T], keys: Sequence[str] = (), *, reads: bool = False
    ) -> T:
        rows, read, order, given = RedisRows(self._idle), set[Name](), list[Name](), list[Any]()
        for _ in range(_TRIES):
            answer = operation(rows, keys)
            changes = []
            if not rows.names <= read:
                read |= rows.names
                counts_first = sorted(read, key=lambda name: (name[0] != COUNT, name))
                places = {place_of(prefix, name): name for name in counts_first}
                order = [*places.values()]
                counts = sum(kind == COUNT for kind, _ in order)
                given = [len(places), *places, counts, int(reads)]
            elif reads or not (changes := rows.changes(order)):
                return answer
            reply = await self._clients.run(SCRIPTS["rows"], [*given, json.dumps(changes)])
            if reply in (b"written", "written"):
                return answer
            rows = RedisRows(self._idle, *self._read_by(read_rows, reply, order))
        raise QuotaStoreError(f"{self!r}: others were faster {_TRIES} times")

    def _scan(self, prefix: str, kind: str, pattern: str) -> Iterator[str]:
        client = run_sync(self._in_time(self._clients.opened))
        names = client.scan_iter(pattern_of(prefix, kind, pattern), count=PAGE)

        async def some() -> list[bytes | str]:
            return self._read_by(list, islice(names, PAGE))

        while found := run_sync(self._in_time(some)):
            yield from (key for name in found if (key := key_of(prefix, kind, name)) is not None)
