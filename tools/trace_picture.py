"""The picture of a trace: the spans of a real run, in which a limit refuses a search, as SVG.

`make picture` writes docs/images/trace.svg. OpenTelemetry's instrumentation of LangChain makes the
spans of the agent, the model and the tools. The library makes the spans of the decisions.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.instrumentation.genai.langchain import LangChainInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from langchain_quota import ModelCallLimit, QuotaMiddleware, Telemetry, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.telemetry.tracing import DECISION, LIMIT, SCOPE
from langchain_quota.testing import ScriptedChatModel, Turn
from tools.picture import IMAGES

PICTURE = IMAGES / "trace.svg"
WIDTH, ROW, INDENT, BARS = 480, 42, 16, 300
"""In pixels; the bars begin at `BARS`."""
STYLE = """
  .page { fill: #fff } text { fill: #1f2933 } .b { font-weight: 600 } .quiet { fill: #52606d }
  .bar { fill: #9fb3c8 } .allowed { fill: #2e8b57 } .blocked { fill: #c0392b }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1e2129 } text { fill: #e4e7eb } .quiet { fill: #a3adb8 }
    .bar { fill: #627d98 } .allowed { fill: #57b37f } .blocked { fill: #f0877c }
  }
"""


def search(query: str) -> str:
    """Search the web."""
    time.sleep(0.3)
    return f"nothing found about {query}"


def answer(messages: Sequence[BaseMessage]) -> Turn:
    """The model's answers: three searches, then a text."""
    time.sleep(0.5)
    if len(messages) > 1:
        return "I found nothing."
    return [("search", {"query": each}) for each in ("cats", "dogs", "owls")]


def spans() -> Sequence[ReadableSpan]:
    """The spans of a run."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor: Any = LangChainInstrumentor
    instrumentor().instrument(tracer_provider=provider)
    limits: list[Limit] = [ModelCallLimit(run_limit=10), ToolCallLimit("search", thread_limit=2)]
    telemetry = Telemetry(registry=CollectorRegistry(), tracer_provider=provider)
    agent: Any = create_agent(
        ScriptedChatModel(script=answer, model="gpt-5"),
        [search],
        middleware=[QuotaMiddleware(limits, telemetry=telemetry)],
        checkpointer=InMemorySaver(),
        name="researcher",
    )
    question = {"messages": [("user", "Find it!")]}
    agent.invoke(question, {"configurable": {"thread_id": "customer-7"}})
    return exporter.get_finished_spans()


def rows(
    made: Sequence[ReadableSpan], parent: int | None = None, depth: int = 0
) -> Iterator[tuple[int, ReadableSpan]]:
    """The spans as a tree, each with its depth, in the order in which they began."""
    for span in sorted(made, key=lambda each: each.start_time or 0):
        if (span.parent.span_id if span.parent else None) == parent:
            yield depth, span
            yield from rows(made, span.context.span_id, depth + 1)


def drawn(tree: Sequence[tuple[int, ReadableSpan]]) -> str:
    """The tree, with a bar for each span's time."""
    begin = min(span.start_time or 0 for _, span in tree)
    pixel = max(span.end_time or 0 for _, span in tree) - begin
    height = ROW * len(tree) + 10
    begins = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    )
    lines = [
        f'{begins} font-family="system-ui, sans-serif" font-size="15">',
        f"<title>The trace of a run</title><style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
    ]
    room = (WIDTH - BARS - 10) / pixel
    for number, (depth, span) in enumerate(tree):
        starts, ends = ((at or 0) - begin for at in (span.start_time, span.end_time))
        known: Mapping[str, Any] = span.attributes or {}
        decision, x, y = known.get(DECISION), 10 + depth * INDENT, number * ROW + 22
        said = f"{(ends - starts) / 1e6:,.1f} ms"
        if decision is not None:
            refused = f" by {known[LIMIT]} ({known[SCOPE]})" if decision == "blocked" else ""
            said = f'<tspan class="b {decision}">{decision}</tspan>{escape(refused)}, {said}'
        left, width = BARS + room * starts, max(4, room * (ends - starts))
        place = f'x="{left:.1f}" y="{y - 12}" width="{width:.1f}" height="16" rx="2"'
        lines += [
            f'<text x="{x}" y="{y}">{escape(span.name)}</text>',
            f'<text class="quiet" x="{x}" y="{y + 17}">{said}</text>',
            f'<rect class="{decision or "bar"}" {place}/>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Write the picture."""
    logging.getLogger("langchain_quota").setLevel(logging.ERROR)
    PICTURE.write_text(drawn([*rows(spans())]), encoding="utf-8")


if __name__ == "__main__":
    main()
