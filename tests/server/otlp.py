"""An OTLP receiver of a test's own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.web import Request, serving


@dataclass(frozen=True)
class ReceivedSpan:
    """A span that has arrived; its ids are in hex. No parent, and no text, is empty."""

    name: str
    span_id: str
    parent_id: str
    attributes: Mapping[str, str]


@dataclass(frozen=True)
class Receiver:
    """Where a receiver is, and what it has received."""

    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)


@contextmanager
def running_receiver() -> Iterator[Receiver]:
    """Run a receiver of `http/protobuf`."""

    def receive(request: Request) -> None:
        found = request.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(request.body).resource_spans:
            receiver.spans.extend(
                ReceivedSpan(
                    span.name,
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    {pair.key: pair.value.string_value for pair in span.attributes},
                )
                for scope in resource.scope_spans
                for span in scope.spans
                if found
            )
        request.reply(200 if found else 404)

    with serving(receive) as url:
        receiver = Receiver(url)
        yield receiver
