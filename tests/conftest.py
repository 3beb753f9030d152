"""Fixtures for all tests: telemetry of each test's own, so that tests cannot see each other."""

import os

# No proxy and no setting of telemetry reaches a test. Some are read when a package is imported.
for name in [*os.environ]:
    if name.startswith(
        ("OTEL_", "PROMETHEUS_", "LANGSMITH_", "LANGCHAIN_", "LANGFUSE_")
    ) or name.lower() in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        del os.environ[name]

import gc
from collections.abc import AsyncIterator
from pathlib import Path
from shutil import which

import pytest
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry
from tests import examples  # noqa: F401 - it sets how property tests draw
from tests.signals import Signals

SERVERS = Path(__file__).parent / "servers"
STORES = {
    *("test_store_contract.py", "test_store_agreement.py", "test_shared_agents.py"),
    *("test_root_runs.py", "test_charges.py", "test_model_usage.py", "test_providers.py"),
}
"""Tests of stores and providers that need at most a Redis, which many machines have."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a server is left to `make test-all`, but for the store in Redis."""
    for item in items:
        if SERVERS in item.path.parents and item.path.name not in STORES:
            item.add_marker("rest")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not tested."""
    if which("redis-server") is None:
        terminalreporter.section("redis-server not found", red=True, bold=True)
        terminalreporter.line("No test of the store in Redis ran: apt-get install redis-server")


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and never what is imported: that took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


@pytest.fixture
def signals() -> Signals:
    """Telemetry on a fresh registry and tracer provider."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, tracer_provider=provider)
    return Signals(telemetry, registry, provider, exporter)


@pytest.fixture
async def sqlite_saver(tmp_path: Path) -> AsyncIterator[AsyncSqliteSaver]:
    """A checkpointer on a database of the test's own."""
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")) as saver:
        yield saver
