"""What a test's own telemetry made visible."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from inspect import signature
from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, ToolCall
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry
from langchain_quota.telemetry import recorder_of

HAS_INLINE = tuple(map(int, version("langchain").split(".")[:2])) >= (1, 4)
needs_inline = pytest.mark.skipif(not HAS_INLINE, reason="needs langchain 1.4 or newer")
_ASKS_PER_CALL = "interrupt_mode" in signature(HumanInTheLoopMiddleware).parameters
per_call = pytest.mark.skipif(not _ASKS_PER_CALL, reason="this LangChain has no per-call review")


@dataclass(frozen=True)
class Signals:
    """A Telemetry, and what it made visible."""

    telemetry: Telemetry
    registry: CollectorRegistry
    provider: TracerProvider
    exporter: InMemorySpanExporter

    @property
    def recorder(self) -> Any:
        """What middlewares tell."""
        return recorder_of(self.telemetry)

    def value(self, name: str, **labels: str) -> float | None:
        """The value of one sample, if it exists."""
        return self.registry.get_sample_value(name, labels)

    def samples(self, name: str, **labels: str) -> dict[tuple[str, ...], float]:
        """The samples of a name that have these labels, by the values of their other labels."""
        return {
            tuple(each.labels[label] for label in each.labels if label not in labels): each.value
            for family in self.registry.collect()
            for each in family.samples
            if each.name == name and labels.items() <= each.labels.items()
        }

    def errors(self, component: str, error_type: str) -> float:
        """How often a component has failed so."""
        labels = {"component": component, "error_type": error_type}
        return self.value("langchain_quota_errors_total", **labels) or 0

    def spans(self) -> list[ReadableSpan]:
        """The finished spans, in order."""
        return list(self.exporter.get_finished_spans())

    def decision_spans(self) -> list[ReadableSpan]:
        """The spans of checked calls, in order."""
        return [span for span in self.spans() if span.name.startswith("check_quota")]


def telling(*, sampler: Sampler = ALWAYS_ON, **options: Any) -> Signals:
    """A Telemetry with these options, on a registry and a tracer provider of its own."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    given = {"registry": CollectorRegistry(), "tracer_provider": provider, **options}
    return Signals(Telemetry(**given), given["registry"], provider, exporter)


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    """What a span says, without the common beginning of our own names."""
    return {
        name.removeprefix("langchain_quota."): each
        for name, each in (span.attributes or {}).items()
    }


def paid(tokens: int, *tools: str) -> AIMessage:
    """An answer that has used so many tokens, and may call tools."""
    calls = [ToolCall(name=each, args={}, id=f"{each}-{index}") for index, each in enumerate(tools)]
    usage: Any = {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens}
    return AIMessage("" if tools else "done", tool_calls=calls, usage_metadata=usage)
