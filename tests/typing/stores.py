"""Stores, telemetry and /metrics; checked by mypy and pyright, never run."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import assert_type

import psycopg_pool
import redis
import redis.asyncio
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    PostgresStore,
    Quota,
    QuotaHeadersMiddleware,
    QuotaMiddleware,
    RedisStore,
    Telemetry,
    export_metrics,
    metrics_app,
    quota_app,
    start_metrics_server,
)
from langchain_quota.core.admission import AcquireRequest, AcquireResult, admit
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

assert_type(shared.usages(), list[QuotaUsage])
if revoked := memory.revoke("search:thread:7", "4711"):
    assert_type(revoked.amount, int)


# Not these.
QuotaMiddleware(limits, store=SyncOnly())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


Telemetry(registry=CollectorRegistry(), tracer_provider=TracerProvider(), near=0.9)

app = Starlette(routes=[Route("/metrics", metrics_app())])
app.add_route("/metrics", metrics_app())
app.router.routes.append(Mount("/inner", metrics_app(CollectorRegistry())))
app.mount("/quota", quota_app(dashboards_url="https://grafana.example.org"))

quota = QuotaMiddleware([ModelCallLimit(quotas=[Quota(9, per="user_id")])], store=MemoryStore())
app.add_middleware(QuotaHeadersMiddleware, quota=quota, subject=lambda scope: scope["state"])
QuotaHeadersMiddleware(app, quota=quota, subject=lambda _: {"user_id": 7}, replace_answers=False)

with start_metrics_server(0, "0.0.0.0", registry=CollectorRegistry()) as running:
    assert_type(running.url, str)
export_metrics(ConsoleMetricExporter(), timedelta(minutes=1), CollectorRegistry()).flush()


# Not these. A thread id can be of any type, so a label is made from any object.
Telemetry(thread_label=str.upper)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
app.add_middleware(QuotaHeadersMiddleware, quota=quota)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
