"""Fixtures for all tests: telemetry of each test's own, so that tests cannot see each other."""

import gc
import os
from dataclasses import dataclass
from importlib.metadata import version

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry
from langchain_quota.middleware.inline import OLDEST_LANGCHAIN
from langchain_quota.telemetry import recorder_of
from langchain_quota.telemetry.recorder import Recorder

HAS_INLINE = tuple(map(int, version("langchain").split(".")[:2])) >= OLDEST_LANGCHAIN
needs_inline = pytest.mark.skipif(not HAS_INLINE, reason="needs langchain 1.4 or newer")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_auto_num_workers() -> int:
    """Two workers for each processor: many tests wait for servers."""
    return 2 * (os.cpu_count() or 1)


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and never what is imported: that took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


@dataclass(frozen=True)
class Signals:
    """A Telemetry, and what it made visible."""

    telemetry: Telemetry
    registry: CollectorRegistry
    provider: TracerProvider
    exporter: InMemorySpanExporter

    @property
    def recorder(self) -> Recorder:
        """What middlewares tell."""
        return recorder_of(self.telemetry)

    def value(self, name: str, **labels: str) -> float | None:
        """The value of one sample, if it exists."""
        return self.registry.get_sample_value(name, labels)

    def spans(self) -> list[ReadableSpan]:
        """The finished spans, in order."""
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def signals() -> Signals:
    """Telemetry on a fresh registry and tracer provider."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, tracer_provider=provider)
    return Signals(telemetry, registry, provider, exporter)
