"""An OTLP receiver of a test's own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.listener import listening


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
    spans: list[ReceivedSpan]


@contextmanager
def running_receiver(protocol: Literal["http/protobuf"]) -> Iterator[Receiver]:
    """Run a receiver on a free port."""
    assert protocol == "http/protobuf"
    spans: list[ReceivedSpan] = []

    def hear(path: str, body: bytes) -> int:
        if path != "/v1/traces":
            return 404
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            spans.extend(
                ReceivedSpan(
                    span.name,
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    {pair.key: _value(pair.value) for pair in span.attributes},
                )
                for scope in resource.scope_spans
                for span in scope.spans
            )
        return 200

    with listening(hear) as url:
        yield Receiver(url, spans)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
