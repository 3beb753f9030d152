"""Beside Langfuse's callback handler: a run is one trace, with our spans in it.

Langfuse's client has the test's provider of spans, and nothing goes to the network.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_core.tools import tool
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from langchain_quota import (
    ModelCallLimit,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
)
from langchain_quota.testing import ScriptedChatModel, Turn

langfuse = pytest.importorskip("langfuse")
handlers = pytest.importorskip("langfuse.langchain")

KEY = "pk-lf-of-the-tests"


class Tracer:
    """Langfuse, and all spans that it and the limits have made."""

    def __init__(self) -> None:
        self.made = InMemorySpanExporter()
        self.sent = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.made))
        self.client = langfuse.Langfuse(
            public_key=KEY,
            secret_key="none",  # noqa: S106 - there is no server
            base_url="http://langfuse.invalid",
            tracer_provider=self.provider,
            span_exporter=self.sent,
        )

    def traces(self) -> list[list[ReadableSpan]]:
        """The spans by trace."""
        by_trace: dict[int, list[ReadableSpan]] = {}
        for span in self.made.get_finished_spans():
            by_trace.setdefault(span.context.trace_id, []).append(span)
        return list(by_trace.values())


def ours(spans: Any) -> list[ReadableSpan]:
    return [span for span in spans if span.name.startswith("check_quota")]


def parents(spans: list[ReadableSpan]) -> set[str]:
    """The names of the parents of our spans."""
    names = {span.context.span_id: span.name for span in spans}
    return {names[span.parent.span_id] if span.parent else "" for span in ours(spans)}


@pytest.fixture(scope="module")
def client() -> Iterator[Tracer]:
    tracer = Tracer()
    yield tracer
    tracer.client.shutdown()


@pytest.fixture
def tracer(client: Tracer) -> Tracer:
    client.made.clear()
    client.client.flush()
    client.sent.clear()
    return client


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


def agent_of(tracer: Tracer, kind: Any = QuotaMiddleware) -> Any:
    limits = [ModelCallLimit(run_limit=9), ToolCallLimit("search", run_limit=1)]
    telemetry = Telemetry(registry=CollectorRegistry(), tracer_provider=tracer.provider)

    def script(messages: Sequence[BaseMessage]) -> Turn:
        return (["search", "search"], ["search"], "done")[len(messages) // 3]

    return create_agent(
        ScriptedChatModel(script=script),
        [search],
        middleware=[kind(limits, telemetry=telemetry)],
        name="researcher",
    )


QUESTION: Any = {"messages": [("user", "hi")]}


async def run(agent: Any, form: str) -> None:
    settings = {"callbacks": [handlers.CallbackHandler(public_key=KEY)]}
    if form == "invoke":
        agent.invoke(QUESTION, settings)
    elif form == "stream":
        assert list(agent.stream(QUESTION, settings))
    elif form == "ainvoke":
        await agent.ainvoke(QUESTION, settings)
    else:
        assert [each async for each in agent.astream(QUESTION, settings)]


@pytest.mark.parametrize("form", ["ainvoke", "astream"])
async def test_an_observation_around_an_async_run(form: str, tracer: Tracer) -> None:
    """It makes the run one trace, and Langfuse sends our spans, which name the agent."""
    with tracer.client.start_as_current_observation(name="request"):
        await run(agent_of(tracer), form)

    (spans,) = tracer.traces()
    assert len(ours(spans)) == 6
    assert parents(spans) == {"request"}
    tracer.client.flush()
    assert len(ours(tracer.sent.get_finished_spans())) == 6
