"""The example service under load: nothing in it grows with the requests that it serves.

`SOAK_REQUESTS` says how many requests that are; docs/service.md has the command for a long soak.
"""

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from tests.forked import as_module
from tests.servers.postgres import PostgresServer
from tests.servers.prometheus import DEADLINE, eventually
from tests.servers.redis import RedisServer
from tests.servers.service import Service, question, running_service

PAGE = Path(__file__).parents[2] / "docs" / "service.md"
REQUESTS = int(os.environ.get("SOAK_REQUESTS", "150"))
THREADS = 12
TURNS = 4
"""So many threads are asked at a time, in so many turns; then others come."""

WARM_UP = THREADS * TURNS * 4
AT_ONCE = 4
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

REMEMBERED = 100
"""The newest steps that the service remembers, not 10,000, to reach that before the first count.

Of threads it tracks a tenth of that.
"""

KINDS = ("ask", "stream", "hang up", "usage", "nonsense", "no token")
USUAL = {200, 401, 403, 404, 409, 422}

ALLOWED = {"blocks": 3_000, "descriptors": 16, "files": 0, "series": 20}
"""How much more there may be of each, however many the requests: what a new connection takes."""

REPORTING = f"""
import functools, gc, json, os, signal, sys
from unittest.mock import patch

signal.alarm(600 + {REQUESTS})
# `patch` fails where there is no such name any more.
patch("langchain_quota.middleware._observers.MAX_TASKS", {REMEMBERED}).start()
patch("langchain_quota.middleware._let_through.MAX_LET_THROUGH", {REMEMBERED}).start()
patch("langchain_quota.telemetry.reruns.RecentTasks.LEAST", {REMEMBERED}).start()
tracked = "langchain_quota.telemetry.usage.UsageTable.__init__.__kwdefaults__"
patch.dict(tracked, max_tracked={REMEMBERED // 10}).start()

def report(*_):
    for cache in gc.get_objects():
        # A cache with a bound fills up, which is no growth. One without a bound is left as it is.
        if isinstance(cache, functools._lru_cache_wrapper) and cache.cache_info().maxsize:
            cache.cache_clear()
    gc.collect()
    held = {{"blocks": sys.getallocatedblocks(), "descriptors": len(os.listdir("/proc/self/fd"))}}
    with open("held.part", "w") as file:
        json.dump(held, file)
    os.replace("held.part", "held.json")

signal.signal(signal.SIGUSR1, report)
{as_module("service")}
"""
"""The service, which counts what it holds when it gets a signal."""


@dataclass(frozen=True)
class Held:
    """What a service holds.

    Attributes:
        blocks: Blocks of memory of Python objects, after a collection.
        descriptors: Open files and connections.
        files: Files in its directory.
        series: Series of `/metrics` that no thread has: those of threads have a test of their own.
    """

    blocks: int
    descriptors: int
    files: int
    series: int


class Soaked:
    """A service under load.

    Args:
        service: The service.
        directory: Where it runs.
    """

    def __init__(self, service: Service, directory: Path) -> None:
        self._service = service
        self._directory = directory
        self._made = 0

    def load(self, requests: int) -> Counter[int]:
        """Make so many requests, of all kinds, on the same threads: the answers by status."""
        statuses: Counter[int] = Counter()
        numbers = iter(range(self._made, self._made + requests))
        self._made += requests
        asyncio.run(self._ask_all(numbers, statuses))
        return statuses

    def held(self) -> Held:
        """What the service holds now."""
        series = sum("thread_id" not in dict(labels) for _, labels in self._service.series())
        report = self._directory / "held.json"
        report.unlink(missing_ok=True)
        os.kill(self._service.pid, signal.SIGUSR1)
        eventually(report.exists)
        files = len(list(self._directory.iterdir()))
        return Held(**json.loads(report.read_text()), files=files, series=series)

    async def _ask_all(self, numbers: Iterator[int], statuses: Counter[int]) -> None:
        async with (
            httpx.AsyncClient(
                base_url=self._service.url, timeout=DEADLINE, trust_env=False
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(AT_ONCE):
                group.create_task(_ask_some(client, numbers, statuses))


async def _ask_some(
    client: httpx.AsyncClient, numbers: Iterator[int], statuses: Counter[int]
) -> None:
    for number in numbers:
        batch, rest = divmod(number, THREADS * TURNS)
        turn, thread = divmod(rest, THREADS)
        kind = KINDS[(turn + thread) % len(KINDS)]
        body = question(TEXTS[(turn + batch) % len(TEXTS)])
        statuses[await _ask(client, kind, f"/threads/thread-{batch}-{thread}", body)] += 1


async def _ask(client: httpx.AsyncClient, kind: str, path: str, body: dict[str, str]) -> int:
    if kind == "usage":
        return (await client.get(f"{path}/usage")).status_code
    if kind == "no token":
        return (await client.get("/metrics")).status_code
    if kind == "nonsense":
        return (await client.post(f"{path}/messages", json={})).status_code
    if kind == "ask":
        return (await client.post(f"{path}/messages", json=body)).status_code
    async with client.stream("POST", f"{path}/messages/stream", json=body) as response:
        async for _ in response.aiter_lines():
            if kind == "hang up":
                break
        return response.status_code


@pytest.fixture
def soaked(
    postgres_server: PostgresServer, redis_server: RedisServer, tmp_path: Path
) -> Iterator[Soaked]:
    """The service as in the stack, with PostgreSQL and Redis."""
    databases = {
        "DATABASE_URL": postgres_server.database(),
        "LANGCHAIN_QUOTA_REDIS_URL": redis_server.url,
    }
    with running_service(tmp_path, REPORTING, **LIMITS, **databases) as service:
        yield Soaked(service, tmp_path)


def test_nothing_grows_with_requests(soaked: Soaked, redis_server: RedisServer) -> None:
    """Requests that were served leave no memory, connection, file or series, and no lasting key."""
    soaked.load(WARM_UP)
    before = soaked.held()
    statuses = soaked.load(REQUESTS)
    after = soaked.held()
    assert set(statuses) <= USUAL, statuses
    assert statuses[200] > REQUESTS / 3, statuses
    grown = {name: getattr(after, name) - getattr(before, name) for name in ALLOWED}
    assert all(grown[name] <= most for name, most in ALLOWED.items()), (
        f"{REQUESTS} requests left {grown}; {ALLOWED} may come and go"
    )
    with redis_server.client() as redis:
        keys = list(redis.scan_iter())
        assert keys
        assert [key for key in keys if redis.ttl(key) < 0] == []


def test_old_threads_can_be_deleted(postgres_server: PostgresServer, tmp_path: Path) -> None:
    """The page's SQL deletes all of a thread that nobody asked for a week, and of no other."""
    (sql,) = re.findall(r"^```sql\n(.+?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    url = postgres_server.database()
    with (
        running_service(tmp_path, DATABASE_URL=url) as service,
        psycopg.connect(url, autocommit=True) as database,
    ):
        for thread in ("old", "new"):
            assert service.ask(thread, "oak 7").status_code == 200
        kept = service.usage("new")
        database.execute(
            "UPDATE checkpoints SET checkpoint = jsonb_set(checkpoint, '{ts}',"
            " to_jsonb(now() - interval '8 days')) WHERE thread_id = 'old'"
        )
        database.execute(sql)
        for table in ("checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            left = database.execute(
                SQL("SELECT DISTINCT thread_id FROM {}").format(Identifier(table))
            )
            assert left.fetchall() == [("new",)], table
        assert service.client.get("/threads/old/usage").status_code == 404
        assert service.usage("new") == kept
        assert service.ask("old", "oak").status_code == 200
