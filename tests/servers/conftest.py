"""Fixtures for tests against real servers, shared by as many tests as can share them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest

from tests.servers.postgres import PostgresServer, running_postgres
from tests.servers.prometheus import Prometheus, running_prometheus
from tests.servers.redis import RedisServer, running_redis

WAITING = (
    "test_stack.py",
    "test_alerts.py",
)
"""Tests that wait for most of a minute, and leave the processor to others meanwhile."""

StartPrometheus = Callable[[Mapping[str, str]], Prometheus]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that wait longest, so that they are not waited for at the end."""
    items.sort(key=lambda item: item.path.name not in WAITING)


@pytest.fixture(scope="module")
def start_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartPrometheus]:
    """Starts a Prometheus that scrapes targets (`host:port` by job)."""
    with ExitStack() as running:

        def start(targets: Mapping[str, str]) -> Prometheus:
            directory = tmp_path_factory.mktemp("prometheus")
            return running.enter_context(running_prometheus(directory, targets))

        yield start


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server; the tests of a module share it, each with a prefix of its own."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server; all tests share it, each with a database of its own."""
    with running_postgres() as server:
        yield server
