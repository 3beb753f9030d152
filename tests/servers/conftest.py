"""Fixtures for tests against real servers, each started for the tests of one module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest

from tests.servers.prometheus import Prometheus, running_prometheus

StartPrometheus = Callable[[Mapping[str, str]], Prometheus]


@pytest.fixture(scope="module")
def start_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartPrometheus]:
    """Starts a Prometheus that scrapes targets (`host:port` by job)."""
    with ExitStack() as running:

        def start(targets: Mapping[str, str]) -> Prometheus:
            directory = tmp_path_factory.mktemp("prometheus")
            return running.enter_context(running_prometheus(directory, targets))

        yield start
