"""Several worker processes behind one /metrics, spawned and forked; one of them is killed.

The workers are this file, run as a program: each connects to the test, which tells it what to do.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota import (
    Quota,
    QuotaMiddleware,
    RedisStore,
    Telemetry,
    ToolCallLimit,
    start_metrics_server,
)
from langchain_quota.telemetry.instruments import usage_of
from tests.forked import as_module, start_python
from tests.servers.agents import arun, build_agent
from tests.servers.prometheus import check_metrics, eventually, series_of
from tests.servers.redis import RedisServer

ROOT = Path(__file__).parents[2]
MODULE = "tests.servers.test_workers"
IMPORTED = ("pytest", "redis.asyncio", "httpx")
"""What each worker imports, too."""
VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
PATIENCE = 120.0
"""Seconds after which a worker that should have answered is taken to be lost."""

Found = dict[tuple[str, ...], float]


class Service:
    """What each worker serves: agents whose calls are counted in one store."""

    def __init__(self, redis_url: str, prefix: str) -> None:
        self._redis = (redis_url, prefix)
        self._telemetry = Telemetry(max_exported_threads=2)

    def search(self, thread: str, user: str, searches: int) -> None:
        """One run on a thread that asks so often for a search."""
        asyncio.run(self._search(thread, user, searches))

    def flush(self) -> None:
        """Write what is to be told to the other workers."""
        usage = usage_of(REGISTRY)
        if usage is not None:
            usage.write()

    async def _search(self, thread: str, user: str, searches: int) -> None:
        quota = Quota(11, per=lambda _state, _runtime: user, name="user")
        limits = [ToolCallLimit("search", thread_limit=10, name="searches", quotas=[quota])]
        url, prefix = self._redis
        store = RedisStore(url, prefix=prefix, timeout=30)
        quotas: Any = QuotaMiddleware(limits, store=store, telemetry=self._telemetry)
        script = [*([["search"]] * searches), "done"]
        try:
            await arun(build_agent(script, [quotas], name="boss", saver=InMemorySaver()), thread)
        finally:
            await store.aclose()

    def work(self, address: str, name: str) -> None:
        """Do as told until the test is gone."""
        with Client(address) as test, start_metrics_server(port=0) as server:
            test.send((name, os.getpid(), server.url))
            try:
                while True:
                    action, *arguments = test.recv()
                    test.send(getattr(self, action)(*arguments))
            except EOFError:
                return


def main(start: str, address: str, redis_url: str, prefix: str, *names: str) -> None:
    """Work; or fork workers, after calls were judged and told, and work as their parent."""
    service = Service(redis_url, prefix)
    if start == "spawn":
        service.work(address, *names)
        return
    service.search("parents", "carl", 10)
    service.flush()
    for name in names:
        if os.fork() == 0:
            service.work(address, name)
            # As servers end their workers: what was registered for the end is done.
            sys.exit()
    service.work(address, "parent")


@dataclass
class Worker:
    """A worker, as the test sees it."""

    pid: int
    url: str
    connection: Connection

    def do(self, action: str, *arguments: object) -> Any:
        self.connection.send((action, *arguments))
        assert self.connection.poll(PATIENCE), f"no answer to {action}"
        return self.connection.recv()

    def metrics(self, *names: str) -> str:
        response = httpx.get(self.url, params={"name[]": names}, timeout=PATIENCE, trust_env=False)
        assert response.status_code == 200
        return response.text

    def samples(self, name: str) -> Found:
        """The samples of one name that are not 0, by the values of their labels."""
        found = series_of(text_string_to_metric_families(self.metrics()))
        return {
            tuple(value for _, value in sorted(labels)): value
            for (each, labels), value in found.items()
            if each == name and value
        }


@dataclass
class Workers:
    """Starts workers that share a directory and a store."""

    directory: Path
    address: str
    redis: RedisServer
    listener: Listener
    stack: ExitStack
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, start: str, *names: str) -> dict[str, Worker]:
        """Workers by name; if forked, with their parent."""
        arguments = [self.address, self.redis.url, self.redis.prefix()]
        if start == "spawn":
            for name in names:
                self._run("spawn", *arguments, name)
        else:
            self._run("fork", *arguments, *names)
        expected = {*names} if start == "spawn" else {*names, "parent"}
        workers: dict[str, Worker] = {}
        while workers.keys() != expected:
            connection = self.stack.enter_context(self.listener.accept())
            name, pid, url = connection.recv()
            workers[name] = Worker(pid, url, connection)
        return workers

    def files(self, pattern: str = "langchain_quota.*") -> list[str]:
        return sorted(path.name for path in self.directory.glob(pattern))

    def _run(self, *arguments: str) -> None:
        path = os.pathsep.join([str(ROOT), *sys.path])
        environment = os.environ | {"PYTHONPATH": path} | self.environment
        program = start_python(
            as_module(MODULE), *arguments, stdout=2, stderr=2, env=environment, imported=IMPORTED
        )
        self.stack.enter_context(program)


@pytest.fixture
def workers(tmp_path: Path, redis_server: RedisServer) -> Iterator[Workers]:
    """Starts workers in multi-process mode; they end with the test."""
    directory = tmp_path / "metrics"
    directory.mkdir()
    # Not below tmp_path: the address of a socket must be short.
    with Listener(family="AF_UNIX") as listener, ExitStack() as stack:
        # A worker that never comes fails the test.
        listener._listener._socket.settimeout(PATIENCE)  # type: ignore[attr-defined]  # so there
        made = Workers(directory, str(listener.address), redis_server, listener, stack)
        made.environment[VARIABLE] = str(directory)
        yield made


def serve(workers: dict[str, Worker]) -> None:
    """The same threads and users, served by two workers in turn."""
    one, two = workers["one"], workers["two"]
    one.do("search", "shared", "ada", 3)
    two.do("search", "shared", "ada", 4)
    one.do("search", "shared", "ada", 5)  # two of them are refused
    one.do("search", "ones", "bob", 8)
    two.do("search", "shared", "ada", 1)  # refused
    two.do("search", "twos", "ada", 1)
    for worker in (one, two):
        worker.do("flush")


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_many_workers_answer_as_one(workers: Workers, start: str) -> None:
    """Any of them tells what was decided last of each thread, and the sum of what all counted."""
    running = workers.start(start, "one", "two")
    serve(running)
    # What a parent had counted before it forked is counted once.
    parents = 1 if start == "fork" else 0
    for worker in running.values():
        assert worker.samples("langchain_quota_thread_used") == {
            ("boss", "searches", "ones"): 8,
            ("boss", "searches", "shared"): 10,
        }
        assert worker.samples("langchain_quota_thread_blocked_total") == {
            ("boss", "searches", "shared"): 3
        }
        subjects = worker.samples("langchain_quota_subjects")
        assert subjects == {
            ("boss", "searches", "thread", "ok"): 1,
            ("boss", "searches", "thread", "near"): 1,
            ("boss", "searches", "thread", "exhausted"): 1 + parents,
            ("boss", "searches", "user", "ok"): 1,
            ("boss", "searches", "user", "exhausted"): 1,
        } | ({("boss", "searches", "user", "near"): 1} if parents else {})
        hidden = {("ok",): 1} | ({("exhausted",): 1} if parents else {})
        assert worker.samples("langchain_quota_threads_hidden") == hidden
        calls = worker.samples("langchain_quota_calls_total")
        assert calls["boss", "allowed", "tool", "search"] == 19 + 10 * parents
        assert calls["boss", "blocked", "tool", "search"] == 3
        assert worker.samples("langchain_quota_errors_total") == {}
        assert check_metrics(worker.metrics()) == (0, [])


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_a_killed_worker(workers: Workers, start: str) -> None:
    """What it had written stays, and scrapes go on."""
    running = workers.start(start, "one", "two")
    serve(running)
    two = running["two"]
    names = ("thread_used", "thread_blocked_total", "subjects", "calls_total")
    before = {name: two.samples(f"langchain_quota_{name}") for name in names}
    os.kill(running["one"].pid, signal.SIGKILL)
    assert {name: two.samples(f"langchain_quota_{name}") for name in names} == before
    two.do("search", "shared", "ada", 1)
    assert two.samples("langchain_quota_thread_blocked_total") == {
        ("boss", "searches", "shared"): 4
    }
    assert two.samples("langchain_quota_errors_total") == {}


def test_a_worker_that_ends(workers: Workers) -> None:
    """One that ends writes what waits; a new one in its place tells it, and has written nothing."""
    running = workers.start("spawn", "one", "two")
    running["one"].do("search", "last", "ada", 2)
    running["one"].connection.close()
    third = workers.start("spawn", "three")["three"]
    last = {("boss", "searches", "last"): 2}
    eventually(lambda: third.samples("langchain_quota_thread_used") == last)
    assert len(workers.files()) == 1


def test_a_file_that_a_worker_is_making(workers: Workers) -> None:
    """A scrape leaves it out: for a moment it is empty."""
    (worker,) = workers.start("spawn", "one").values()
    worker.do("search", "one", "one", 1)
    (workers.directory / "counter_4242.db").touch()
    assert "langchain_quota_calls_total" in worker.metrics()


def test_scrapes_while_all_work(workers: Workers) -> None:
    """Scrapes of both, at once and while both judge and write, are whole and without errors."""
    running = workers.start("spawn", "one", "two")

    def judge(name: str) -> None:
        for number in range(4):
            running[name].do("search", f"{name}-{number}", name, 2)
            running[name].do("flush")

    with ThreadPoolExecutor(4) as pool:
        judging = [pool.submit(judge, name) for name in running]
        while not all(each.done() for each in judging):
            for text in pool.map(Worker.metrics, running.values()):
                assert all(family.name for family in text_string_to_metric_families(text))
        for each in judging:
            each.result()
    for worker in running.values():
        assert worker.samples("langchain_quota_errors_total") == {}
        assert worker.samples("langchain_quota_subjects")["boss", "searches", "thread", "ok"] == 8


def test_a_decision_is_told_by_itself(workers: Workers) -> None:
    """Nobody asks a worker to write: it does so by itself, once there is something to tell."""
    running = workers.start("spawn", "one", "two")
    assert workers.files() == []
    running["one"].do("search", "t1", "ada", 2)
    used = "langchain_quota_thread_used"
    eventually(lambda: running["two"].samples(used) == {("boss", "searches", "t1"): 2})
    assert running["two"].metrics(used).splitlines()[2:] == [
        f'{used}{{agent="boss",limit="searches",thread_id="t1"}} 2.0'
    ]


def test_without_the_variable(workers: Workers) -> None:
    """A worker on its own writes no file, and tells what it has counted."""
    del workers.environment[VARIABLE]
    alone = workers.start("spawn", "alone")["alone"]
    alone.do("search", "t1", "ada", 2)
    alone.do("flush")
    assert workers.files("*") == []
    assert alone.samples("langchain_quota_thread_used") == {("boss", "searches", "t1"): 2}


if __name__ == "__main__":
    main(*sys.argv[1:])
