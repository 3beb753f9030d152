"""An OTLP receiver of a test's own, for both protocols."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Literal

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

Protocol = Literal["grpc", "http/protobuf"]


@dataclass(frozen=True)
class ReceivedSpan:
    """A span that has arrived.

    Attributes:
        service: The name of the service that sent it.
        name: Its name.
        trace_id, span_id, parent_id: Its ids, in hex; no parent is empty.
        attributes: Its attributes.
        error: Whether its status is an error.
    """

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: Mapping[str, Any]
    error: bool


class Receiver:
    """What a receiver has received.

    Args:
        url: Its address.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[ReceivedSpan] = []

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of a request."""
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            self.spans += [
                ReceivedSpan(
                    service=service,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    attributes=_attributes(span.attributes),
                    error=span.status.code == span.status.STATUS_CODE_ERROR,
                )
                for scope in resource.scope_spans
                for span in scope.spans
            ]


@contextmanager
def running_receiver(protocol: Protocol) -> Iterator[Receiver]:
    """Run a receiver on a free port."""
    with _over_grpc() if protocol == "grpc" else _over_http() as receiver:
        yield receiver


@contextmanager
def _over_grpc() -> Iterator[Receiver]:
    server = grpc.server(ThreadPoolExecutor(1))
    receiver = Receiver(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")

    class Servicer(TraceServiceServicer):
        def Export(  # noqa: N802 - the protocol's name
            self, request: ExportTraceServiceRequest, context: object
        ) -> ExportTraceServiceResponse:
            receiver.take(request)
            return ExportTraceServiceResponse()

    add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]  # so there
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


@contextmanager
def _over_http() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found = self.path == "/v1/traces"
            if found:
                receiver.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if found else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as inherited
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
