"""An OTLP receiver of a test's own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Literal

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """A span that has arrived; its ids are in hex, and no parent is empty."""

    name: str
    span_id: str
    parent_id: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Receiver:
    """Where a receiver is, and what it has received."""

    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)


@contextmanager
def running_receiver(protocol: Literal["http/protobuf"]) -> Iterator[Receiver]:
    """Run a receiver on a free port."""
    assert protocol == "http/protobuf"

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found = self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                receiver.spans.extend(
                    ReceivedSpan(
                        span.name,
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        {pair.key: _value(pair.value) for pair in span.attributes},
                    )
                    for scope in resource.scope_spans
                    for span in scope.spans
                    if found
                )
            self.send_response(200 if found else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
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


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
