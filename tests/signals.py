"""What a test's own telemetry made visible."""

from dataclasses import dataclass
from importlib.metadata import version

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry
from langchain_quota.middleware.inline import OLDEST_LANGCHAIN
from langchain_quota.telemetry import recorder_of
from langchain_quota.telemetry.recorder import Recorder

HAS_INLINE = tuple(map(int, version("langchain").split(".")[:2])) >= OLDEST_LANGCHAIN
needs_inline = pytest.mark.skipif(not HAS_INLINE, reason="needs langchain 1.4 or newer")


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
