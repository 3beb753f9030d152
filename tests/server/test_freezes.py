"""Freezes in servers: no process lets a frozen subject's call run, whatever is killed."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import BaseMessage
from langchain_core.tools import StructuredTool

from langchain_quota import PostgresStore, Quota, RedisStore, ToolCallLimit
from langchain_quota.cli import main
from langchain_quota.testing import Turn
from tests.scene import Scene, asking
from tests.server.postgres import PostgresServer
from tests.server.prometheus import eventually
from tests.server.redis import RedisServer, running_redis
from tests.telemetry import Signals, telling

PROCESSES, RUNS = 4, 25
"""How many processes there are, and how many runs each has at the same time."""
CALLS = 100
"""How many calls of a tenant are waited for."""
PATIENCE = 60
LIMIT = ToolCallLimit("search", quotas=[Quota(10**9, per="tenant")])
CONTEXT = multiprocessing.get_context("forkserver")


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that knows what it knew when it is started again."""
    with running_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


def worker(url: str, prefix: str, diary: str) -> None:
    """A process whose agents write down which calls ran, and when the model had made them."""
    written = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    kind = RedisStore if url.startswith("redis") else PostgresStore
    store = kind(url, prefix=prefix, timeout=PATIENCE)

    def script(messages: Sequence[BaseMessage]) -> Turn:
        return (
            [("search", {"made": time.monotonic_ns()})] if messages[-1].type == "human" else "done"
        )

    async def run(number: int) -> None:
        tenant = ("acme", "beta")[number % 2]

        async def search(made: int) -> str:
            os.write(written, f"{made} {tenant} {os.getpid()}\n".encode())
            return "ran"

        tool = StructuredTool.from_function(coroutine=search, name="search", description="search")
        given: Any = {"tools": [tool], "context": {"tenant": tenant}, "checkpointer": None}
        scene = Scene(telling(), script, [LIMIT], store=store, thread_id=None, **given)
        while True:
            await scene.play()
            await asyncio.sleep(0.05)

    async def work() -> None:
        await asyncio.gather(*map(run, range(RUNS)))

    asyncio.run(work())


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_nothing_runs_after_the_answer(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """4 processes with 25 runs each: no call of a frozen tenant runs that is made after the answer.

    A worker and the server are killed meanwhile. Others' calls run on; a thaw lets all run again.
    """
    get = request.getfixturevalue
    server: RedisServer | PostgresServer = get("durable" if kind == "redis" else "postgres_server")
    url = server.url if isinstance(server, RedisServer) else get("postgres_url")
    prefix, diary = server.prefix(), tmp_path / "calls"
    diary.touch()
    monkeypatch.setenv("LANGCHAIN_QUOTA_STORE", url)

    def ran(tenant: str, since: int = 0) -> list[str]:
        lines = (line.split() for line in diary.read_text().split("\n")[:-1])
        return [pid for made, whose, pid in lines if whose == tenant and int(made) > since]

    def command(*arguments: str) -> int:
        assert main(["quotas", *arguments, "--per", "tenant", "acme", "--prefix", prefix]) == 0
        return time.monotonic_ns()

    def runs_on(tenant: str, since: int) -> None:
        pids = {str(process.pid) for process in alive}
        eventually(lambda: len(found := ran(tenant, since)) > CALLS and pids <= {*found})

    with ExitStack() as stack:

        def start() -> Any:
            process = CONTEXT.Process(target=worker, args=(url, prefix, str(diary)), daemon=True)
            process.start()
            stack.callback(process.kill)
            return process

        alive = [start() for _ in range(PROCESSES)]
        for tenant in ("acme", "beta"):
            runs_on(tenant, 0)
        answered = command("freeze", "--reason", "abuse", "--by", "ada")
        runs_on("beta", answered)
        oldest = alive.pop(0)
        os.kill(oldest.pid, signal.SIGKILL)
        alive.append(start())
        runs_on("beta", time.monotonic_ns())
        server.stop()
        server.start()
        runs_on("beta", time.monotonic_ns())
        assert ran("acme", answered) == []
        opened = (RedisStore if kind == "redis" else PostgresStore)(url, prefix=prefix)
        with closing(opened):
            [freeze] = opened.grants()
        assert (freeze.key, freeze.by, freeze.reason) == (":tenant:acme", "ada", "abuse")
        runs_on("acme", command("thaw"))
        assert all(process.is_alive() for process in alive)


async def test_an_outage(
    durable: RedisServer, signals: Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """With on_store_error="allow" nothing is frozen in an outage, which the command has said."""
    store = RedisStore(durable.url, timeout=0.5)
    given: Any = {"store": store, "on_store_error": "allow", "context": {"tenant": "acme"}}
    scene = Scene(signals, asking("search"), [LIMIT], **given)
    freeze = ["quotas", "freeze", "--per", "tenant", "acme", "--reason", "x"]
    assert main([*freeze, "--store", durable.url]) == 0
    said = 'with on_store_error="allow", calls while the store is unavailable\n'
    assert capsys.readouterr().out.endswith(said)
    await scene.play()
    assert scene.ran == []
    durable.stop()
    await scene.play()
    assert (scene.ran, scene.fallbacks("allow")) == (["search"], 1)
    assert main([*freeze, "--store", durable.url]) == 2
    durable.start()
    await scene.play()
    assert scene.ran == ["search"]
    assert await scene.quota.athaw(tenant="acme")
    await store.aclose()
