"""Fixtures for tests against real servers, each started for the tests of one module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest

from tests.servers.postgres import PostgresServer, running_postgres
from tests.servers.prometheus import Prometheus, running_prometheus
from tests.servers.redis import RedisServer, running_redis

StartPrometheus = Callable[[Mapping[str, str]], Prometheus]


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


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server; the tests of a module share it, each with a database of its own."""
    with running_postgres() as server:
        yield server
