"""OpenTelemetry by its standard environment variables."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

from service.settings import SettingsError

SERVICE_NAME = "langchain-quota-agent"
FLUSH_SECONDS = 3
"""Together with the seconds for requests less than the 10 after which Docker kills."""

_UNTRACED = ("/healthz", "/readyz", "/metrics", "/quota/")


@asynccontextmanager
async def tracing() -> AsyncIterator[None]:
    """Send spans where the environment says; what is left is sent at the end."""
    exporter = _exporter()
    if exporter is None:
        yield
        return
    named = Resource.create({"service.name": SERVICE_NAME})
    # The sampler, and whether it is disabled, are read by the SDK itself.
    provider = TracerProvider(
        resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        # A collector that does not answer must not keep the process: hence a daemon thread.
        flush = threading.Thread(target=provider.shutdown, daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, FLUSH_SECONDS)


def exporting() -> str | None:
    """How spans are sent: `"grpc"`, `"http/protobuf"`, `"console"`; `None` for not at all.

    Raises:
        SettingsError: The environment asks for something else.
    """
    endpoint = _first("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    chosen = _first("OTEL_TRACES_EXPORTER") or ("otlp" if endpoint else "none")
    if (_first("OTEL_SDK_DISABLED") or "").lower() == "true" or chosen == "none":
        return None
    if chosen == "console":
        return chosen
    if chosen != "otlp":
        raise SettingsError(f"OTEL_TRACES_EXPORTER must be otlp, console or none, not {chosen!r}")
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = _first(*names) or "grpc"
    if protocol not in {"grpc", "http/protobuf"}:
        raise SettingsError(f"{names[1]} must be grpc or http/protobuf, not {protocol!r}")
    return protocol


def _exporter() -> SpanExporter | None:
    how = exporting()
    # Each protocol's exporter brings packages of its own: only the one asked for is imported.
    if how == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc  # noqa: PLC0415 - see above

        return grpc.OTLPSpanExporter()
    if how == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http  # noqa: PLC0415 - see above

        return http.OTLPSpanExporter()
    return None if how is None else ConsoleSpanExporter()


def _first(*variables: str) -> str | None:
    return next((value for each in variables if (value := os.environ.get(each, "").strip())), None)


REQUEST_SPANS = TelemetryConfig(
    # Only this module decides where spans are sent.
    auto_configure=False,
    operation_spans=False,
    metrics=False,
    logs=False,
    exclude=lambda scope: scope["path"].startswith(_UNTRACED),
)
"""FastAPI's own server span around each request, a child of the caller's, and nothing more."""
