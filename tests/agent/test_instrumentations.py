"""Beside instrumentations that trace the agent themselves: our spans nest in theirs.

They patch LangChain for the whole process, so each plays in a process of its own.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.state import LEDGER
from langchain_quota.testing import ScriptedChatModel
from tests.forked import run_python

ROOT = Path(__file__).resolve().parents[2]
GENAI = "opentelemetry.instrumentation.genai.langchain"
THREAD: RunnableConfig = {"configurable": {"thread_id": "thread-1"}}

pytestmark = pytest.mark.skipif(
    tuple(map(int, version("opentelemetry-api").split(".")[:2])) < (1, 43),
    reason="the instrumentations need a newer OpenTelemetry",
)
SITUATIONS = [
    ("quota", "ainvoke", "active"),
    ("quota", "invoke", "none"),
    ("stacked", "ainvoke", "none"),
    ("stacked", "invoke", "active"),
]
"""Each pair of limiters, form and whether a span is active stands in one of them."""


@dataclass(frozen=True)
class Seen:
    """A span as it was exported."""

    name: str
    trace: int
    id: int
    parent: int | None


@dataclass(frozen=True)
class Played:
    """What a run has left.

    Attributes:
        spans: As they were exported.
        kept: The trace that was kept with the run.
        printed: What was written to standard output.
    """

    spans: Sequence[Seen]
    kept: Any
    printed: str

    @property
    def ours(self) -> list[Seen]:
        return [span for span in self.spans if span.name.startswith("check_quota")]

    def parents(self) -> list[tuple[str, str | None]]:
        """The names of our spans, each with its parent's."""
        names = {span.id: span.name for span in self.spans}
        return [(span.name, names.get(span.parent or 0)) for span in self.ours]


def middleware(limiters: str, telemetry: Telemetry) -> list[Any]:
    if limiters == "quota":
        limits: list[ModelCallLimit | ToolCallLimit] = [
            ModelCallLimit(run_limit=9),
            ToolCallLimit("search", run_limit=1),
        ]
        return [QuotaMiddleware(limits, telemetry=telemetry)]
    return [
        ModelCallLimitMiddleware(run_limit=9, telemetry=telemetry),
        ToolCallLimitMiddleware(tool_name="search", run_limit=1, telemetry=telemetry),
    ]


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


@tool
def ask(question: str = "") -> str:
    """Ask the user."""
    return str(interrupt("what?"))


def play(module: str, limiters: str, form: str, switched: str, active: str) -> None:
    """In a process apart: run an agent beside an instrumentation, and print what it left."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = import_module(module).LangChainInstrumentor()
    if switched != "off":
        instrumentor.instrument(tracer_provider=provider)
    telemetry = Telemetry(registry=CollectorRegistry(), tracer_provider=provider)
    agent: Any = create_agent(
        ScriptedChatModel(script=[["search", "search"], ["ask"], "done"]),
        [search, ask],
        middleware=middleware(limiters, telemetry),
        checkpointer=InMemorySaver(),
        name="researcher",
    )
    if switched == "on and off":
        instrumentor.uninstrument()
    request = provider.get_tracer("app").start_as_current_span("request")
    with request if active == "active" else nullcontext():
        turns: list[Any] = [{"messages": [HumanMessage("hi")]}, Command(resume="that")]
        for inputs in turns:
            if form == "ainvoke":
                asyncio.run(agent.ainvoke(inputs, THREAD))
            else:
                agent.invoke(inputs, THREAD)
    state = agent.get_state(THREAD)
    if state.next:
        raise RuntimeError(f"the run waits before {state.next}")
    if switched == "on":
        instrumentor.uninstrument()
    spans = [
        (
            span.name,
            span.context.trace_id,
            span.context.span_id,
            None if span.parent is None else span.parent.span_id,
        )
        for span in exporter.get_finished_spans()
    ]
    print("\n" + json.dumps([spans, state.values[LEDGER]["trace"]]))  # noqa: T201 - the result


def played(module: str, *runs: tuple[str, str, str, str]) -> list[Played]:
    """What each run left, one after the other in one process.

    Args:
        module: The instrumentation.
        runs: Limiters, form, whether it is switched on, whether a span is active.
    """
    program = f"from {__name__} import play\nfor run in {runs!r}: play({module!r}, *run)"
    done = run_python(program, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *printed, rest = re.split(r"^(\[\[.*\])\n", done.stdout, flags=re.MULTILINE)
    assert rest == ""
    results = [json.loads(each) for each in printed[1::2]]
    return [
        Played([Seen(*span) for span in spans], kept, before.strip())
        for (spans, kept), before in zip(results, printed[::2], strict=True)
    ]


def test_within_the_span_of_the_genai_instrumentation() -> None:
    """Each of ours is below the `invoke_agent` span that the OpenTelemetry project's makes."""
    runs = [(limiters, form, "on", active) for limiters, form, active in SITUATIONS]
    for (limiters, *_), run in zip(SITUATIONS, played(GENAI, *runs), strict=True):
        assert len(run.ours) == (6 if limiters == "quota" else 5)
        assert {parent for _, parent in run.parents()} == {"invoke_agent researcher"}
        agents = {span.id: span for span in run.spans if span.name == "invoke_agent researcher"}
        assert {span.parent for span in run.ours} == agents.keys()
        assert all(span.trace == agents[span.parent or 0].trace for span in run.ours)
        requests: set[int | None] = {span.id for span in run.spans if span.name == "request"}
        assert {span.parent for span in agents.values()} == (requests or {None})
        assert run.kept is None


def test_beside_one_that_is_not_switched_on() -> None:
    """One that is only imported, or switched off again, changes nothing and prints nothing."""
    runs = [("quota", "ainvoke", switched, "none") for switched in ("off", "on and off")]
    for run in played(GENAI, *runs):
        assert run.spans == run.ours
        first, *later = run.ours
        assert len(later) == 5
        assert first.parent is None
        assert {(span.trace, span.parent) for span in later} == {(first.trace, first.id)}
        assert run.kept["traceparent"].startswith(f"00-{first.trace:032x}-{first.id:016x}-")
        assert run.printed == ""
