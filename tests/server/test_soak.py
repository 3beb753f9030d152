"""The example service under load: nothing in it grows with the requests that it serves.

`SOAK_REQUESTS` says how many requests that are; docker/README.md has the command for a long soak.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.server.postgres import PostgresServer
from tests.server.prometheus import DEADLINE
from tests.server.redis import RedisServer
from tests.server.service import Service, question, running_service

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "150"))
WARM_UP, CONCURRENCY = 100, 4
THREADS, TURNS = 12, 4
"""So many threads are asked at a time, in so many turns; then others come."""

NO_LIMIT = 1_000_000
LIMITS = {
    "RUN_MODEL_LIMIT": 4,
    "THREAD_MODEL_LIMIT": NO_LIMIT,
    "THREAD_SEARCH_LIMIT": 2,
    "USER_MODEL_LIMIT": NO_LIMIT,
    "THREAD_TOKEN_LIMIT": 999_999_999,
    "USER_COST_LIMIT": 999_999,
}
TEXTS = ("!", "oak", "7", "1 2 3 4")
"""The last one is a loop, which a limit ends. Of the searches a thread has two, the others fail."""

KINDS = ("ask", "stream", "hang up", "usage", "nonsense", "no token")
USUAL = {200, 401, 403, 404, 409, 422}
ALLOWED = {"descriptors": 16, "files": 0, "series": 20, "megabytes": 100}
"""How much more there may be of each, however many the requests: what a new connection takes."""


def held(service: Service, directory: Path) -> dict[str, float]:
    """What a service holds: of series those that no thread has."""
    series = service.series()
    return {
        "descriptors": series["process_open_fds", frozenset()],
        "files": len(list(directory.iterdir())),
        "series": sum("thread_id" not in dict(labels) for _, labels in series),
        "megabytes": series["process_resident_memory_bytes", frozenset()] / 1e6,
    }


async def load(service: Service, numbers: Iterator[int]) -> Counter[int]:
    """Make requests of all kinds, some at once: the answers by status."""
    statuses: Counter[int] = Counter()

    async def ask_some(client: httpx.AsyncClient) -> None:
        for number in numbers:
            batch, rest = divmod(number, THREADS * TURNS)
            turn, thread = divmod(rest, THREADS)
            kind = KINDS[(turn + thread) % len(KINDS)]
            body = question(TEXTS[(turn + batch) % len(TEXTS)])
            statuses[await ask(client, kind, f"/threads/thread-{batch}-{thread}", body)] += 1

    async with (
        httpx.AsyncClient(base_url=service.url, timeout=DEADLINE, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(CONCURRENCY):
            group.create_task(ask_some(client))
    return statuses


async def ask(client: httpx.AsyncClient, kind: str, path: str, body: dict[str, str]) -> int:
    if kind in {"usage", "no token"}:
        address = f"{path}/usage" if kind == "usage" else "/metrics"
        return (await client.get(address)).status_code
    if kind in {"ask", "nonsense"}:
        given = body if kind == "ask" else {}
        return (await client.post(f"{path}/messages", json=given)).status_code
    async with client.stream("POST", f"{path}/messages/stream", json=body) as response:
        async for _ in response.aiter_lines():
            if kind == "hang up":
                break
        return response.status_code


def test_nothing_grows_with_requests(
    postgres_server: PostgresServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Requests that were served leave no memory, connection, file or series, and no lasting key."""
    databases = {
        "DATABASE_URL": postgres_server.database(),
        "LANGCHAIN_QUOTA_REDIS_URL": redis_server.url,
    }
    with running_service(tmp_path, **LIMITS, **databases) as service:
        asyncio.run(load(service, iter(range(WARM_UP))))
        before = held(service, tmp_path)
        statuses = asyncio.run(load(service, iter(range(WARM_UP, WARM_UP + REQUESTS))))
        after = held(service, tmp_path)
    assert set(statuses) <= USUAL, statuses
    assert statuses[200] > REQUESTS / 3, statuses
    grown = {name: after[name] - before[name] for name in ALLOWED}
    assert all(grown[name] <= most for name, most in ALLOWED.items()), grown
    with redis_server.client() as redis:
        keys = list(redis.scan_iter())
        assert keys
        assert [key for key in keys if redis.ttl(key) < 0] == []
