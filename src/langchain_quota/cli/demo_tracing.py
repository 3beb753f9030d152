"""The demo's OpenTelemetry SDK: spans are counted, and sent where the environment says."""

import os
from collections import Counter

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from langchain_quota.telemetry.tracing import DECISION

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class SpanCounter(SpanProcessor):
    """Counts the spans of judged calls by what was decided."""

    def __init__(self) -> None:
        self.decisions: Counter[str] = Counter()

    def on_end(self, span: ReadableSpan) -> None:
        """Count a span that ended."""
        decision = (span.attributes or {}).get(DECISION)
        # A call that waits has a second span.
        if decision is not None and span.name.startswith("check_quota "):
            self.decisions[str(decision)] += 1


def otlp_endpoint() -> str | None:
    """Where the environment wants spans to be sent, if anywhere."""
    return _first(_ENDPOINTS)


def tracer_provider(counter: SpanCounter) -> TracerProvider:
    """A provider of the demo's own: the process's global one stays as it is.

    Raises:
        ValueError: The environment names a protocol that there is no exporter for.
    """
    named = Resource.create({"service.name": "langchain-quota-demo"})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(counter)
    if otlp_endpoint() is not None:
        provider.add_span_processor(BatchSpanProcessor(_exporter()))
    return provider


def _exporter() -> SpanExporter:
    # Each protocol's exporter brings packages of its own: only the one asked for is imported.
    protocol = _first(_PROTOCOLS) or "grpc"
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import (  # noqa: PLC0415 - see above
            trace_exporter as grpc,
        )

        return grpc.OTLPSpanExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import (  # noqa: PLC0415 - see above
            trace_exporter as http,
        )

        return http.OTLPSpanExporter()
    raise ValueError(f"no OTLP exporter for the protocol {protocol!r}: grpc or http/protobuf")


def _first(variables: tuple[str, ...]) -> str | None:
    return next((value for each in variables if (value := os.environ.get(each))), None)
