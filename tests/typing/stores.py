"""Stores, and one of the user's own; checked by mypy and pyright, never run."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import assert_type

import psycopg_pool
import redis
import redis.asyncio

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    PostgresStore,
    Quota,
    QuotaMiddleware,
    RedisStore,
)
from langchain_quota.core.admission import AcquireRequest, AcquireResult, admit
from langchain_quota.errors import EventLoopBlockedError, QuotaStoreError
from langchain_quota.stores import QuotaStore, QuotaUsage

limits = [ModelCallLimit(quotas=[Quota(5, per="user_id", window=timedelta(days=1))])]


class Forgetful:
    """A store by its form: it inherits nothing."""

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        used = {name: counter.used for name, counter in request.counters.items()}
        return admit(request.demands, used, request.stops)

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        return tuple(None for _ in keys)

    def reset(self, keys: Sequence[str]) -> None: ...

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        return self.acquire(request)

    async def apeek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        return self.peek(keys)

    async def areset(self, keys: Sequence[str]) -> None:
        self.reset(keys)


class SyncOnly:
    """No store: half of it is missing."""

    acquire, peek, reset = Forgetful.acquire, Forgetful.peek, Forgetful.reset


memory = MemoryStore(max_keys=1_000, idle_ttl=timedelta(days=30), clock=time.time)
shared = RedisStore("redis://127.0.0.1/0", prefix="mine", timeout=0.5, idle_ttl=timedelta(days=30))
stores: list[QuotaStore] = [
    memory,
    shared,
    Forgetful(),
    RedisStore(),
    RedisStore(redis.Redis()),
    RedisStore(redis.asyncio.RedisCluster(host="127.0.0.1")),
    RedisStore(prefix=lambda _, runtime: str(runtime.context["tenant"])),
    PostgresStore("postgresql://127.0.0.1/agents", prefix="mine", timeout=0.5),
    PostgresStore(psycopg_pool.AsyncConnectionPool()),
]
for store in stores:
    QuotaMiddleware(limits, store=store)

assert_type(memory.usages("search:*"), list[QuotaUsage])
assert_type(shared.usages(), list[QuotaUsage])
for use in shared.usages():
    assert_type((use.key, use.used, use.granted), tuple[str, int, int])
    assert_type((use.limit, use.expires_at), tuple[int | None, float | None])
for granting in (memory, shared):
    grant = granting.grant("search:thread:7", 5, until=datetime.now(UTC), reason="more", by="bo")
    assert_type(grant.until, datetime | None)
    assert_type(granting.grant("model.nanodollars:tenant:acme", "2.50", id="4711").amount, int)
    if revoked := granting.revoke("search:thread:7", grant.id):
        assert_type(revoked.amount, int)
    assert_type([each.id for each in granting.grants("search:*")], list[str])


async def asynchronously(store: QuotaStore) -> None:
    [use] = await store.apeek(["search:thread:7"])
    assert_type(use, QuotaUsage | None)
    await store.areset(["search:thread:7"])
    granted = await memory.agrant("search:user_id:ada", 5, window=timedelta(days=1))
    assert_type(granted.amount, int)
    await shared.aclose()


blocked: QuotaStoreError = EventLoopBlockedError("no answer", timed_out=True)
assert_type(blocked.timed_out, bool)
shared.close()

# Not these.
QuotaMiddleware(limits, store=SyncOnly())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware(limits, store="redis://127.0.0.1/0")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
MemoryStore(idle_ttl=3600)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
RedisStore("redis://127.0.0.1/0", timeout="1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
PostgresStore()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
RedisStore(6379)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
