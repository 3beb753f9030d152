"""What is repeated to find out what one of it costs: a step of an agent, a decision's telemetry."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, repeat
from secrets import token_hex

from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry, Counter, Histogram

from benchmarks import scenes
from benchmarks.checked import Used, check, request_of
from langchain_quota import MemoryStore, Telemetry
from langchain_quota.core.admission import admit
from langchain_quota.core.decide import Verdict, decide
from langchain_quota.core.plans import LimitSet, Rule, demands_of
from langchain_quota.limits.call import Call
from langchain_quota.limits.calls import ToolCallLimit
from langchain_quota.middleware.context import fixed
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.sync_async import run_sync
from langchain_quota.telemetry import recorder_of
from langchain_quota.telemetry.names import DECISION_BUCKETS

Repeat = Callable[[int], None]
"""Does something so many times."""


@dataclass(frozen=True)
class Step:
    """A step of an agent.

    Attributes:
        setup: Its set-up.
        has_memory: Whether it has a checkpointer, in memory.
        mode: What becomes of its spans.
        reports: Whether its model reports what it has used.
    """

    setup: str
    has_memory: bool
    mode: scenes.Mode = "not sampled"
    reports: bool = False


@dataclass(frozen=True)
class Emitting:
    """The telemetry of a decision: the number of limits, and what happens to its span."""

    limits: int
    mode: scenes.Mode


@dataclass(frozen=True)
class Checking:
    """Checking a call by so many limits."""

    limits: int


@dataclass(frozen=True)
class Counting:
    """Incrementing a child of a counter."""


@dataclass(frozen=True)
class Tracing:
    """Making a span with as many attributes as that of a decision."""


@dataclass(frozen=True)
class Bare:
    """What the telemetry of a decision by one limit asks of OpenTelemetry and Prometheus.

    It is a span, two counters and a histogram.

    Attributes:
        mode: What becomes of the span; a recorded one is the exemplar of both counters.
    """

    mode: scenes.Mode


@dataclass(frozen=True)
class Asking:
    """Checking a call by one limit, with a `MemoryStore` that is asked as the hooks ask it."""


Work = Step | Emitting | Checking | Counting | Tracing | Bare | Asking
KINDS: dict[str, type[Work]] = {
    each.__name__: each for each in (Step, Emitting, Checking, Counting, Tracing, Bare, Asking)
}


def prepare(work: Work) -> Repeat:
    """Make what is needed, and do it once."""
    repeated = _prepared(work)
    repeated(1)
    return repeated


def verdict(limits: int) -> Verdict:
    """A call that runs, by so many limits on one tool, of a thread."""
    call = Call("tool", "search", "call_1", agent="benchmark", thread_id="thread-1")
    return check(_limits(limits), {"search": Used(7, 3)}, [call]).verdicts[0]


def _prepared(work: Work) -> Repeat:
    match work:
        case Step():
            return _steps(work)
        case Emitting(limits, mode):
            return _emitting(limits, mode)
        case Checking(limits):
            return _checking(limits)
        case Counting():
            counter = Counter("calls", "Calls.", ["tool"], registry=CollectorRegistry())
            once: Callable[[], object] = counter.labels("search").inc
        case Tracing():
            once = _span("sampled")
        case Bare(mode):
            once = _bare(mode)
        case Asking():
            once = _asking()
    return _repeating(once)


def _steps(work: Step) -> Repeat:
    saver = InMemorySaver() if work.has_memory else None
    agent = scenes.agent(work.setup, saver, work.mode, reports=work.reports)
    threads = count()

    def steps(number: int) -> None:
        asyncio.run(scenes.run(agent, number, f"thread-{next(threads)}"))

    # The series of a tool are made when it is first called; that is no part of a step.
    steps(len(scenes.TOOLS))
    return steps


def _emitting(limits: int, mode: scenes.Mode) -> Repeat:
    recorder = recorder_of(scenes.telemetry(mode))
    verdicts = [verdict(limits)]
    tasks = count()
    # The series are made with the first decision; that is no part of a step.
    recorder.record(verdicts, started=time.time_ns())

    def emit(number: int) -> None:
        for _ in repeat(None, number):
            recorder.record(verdicts, started=time.time_ns(), task_id=f"task-{next(tasks)}")

    return emit


def _checking(limits: int) -> Repeat:
    calls = [verdict(1).call]
    used = {"search/thread": 7, "search/run": 3}

    def checked() -> None:
        # The plan is compiled anew, as it is where limits have new numbers.
        resolved = LimitSet(_limits(limits))
        plans = [resolved.plan_for(call) for call in calls]
        demands, index_of = demands_of(calls, plans)
        decide(calls, plans, index_of, admit(demands, used, resolved.stops))

    return _repeating(checked)


def _asking() -> Callable[[], object]:
    client = StoreClient(MemoryStore(), recorder_of(scenes.telemetry("not sampled")))
    request = request_of(most=scenes.UNREACHED)

    def asked() -> None:
        # Each request has a name of its own.
        sent = request._replace(name=token_hex(16)).request()
        result = run_sync(client.acquire("", sent))
        assert result is not None
        request.by_store(sent, result).decide()

    return asked


def attributes() -> dict[str, AttributeValue]:
    """The attributes of the span of a decision by one limit."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(registry=CollectorRegistry(), tracer_provider=provider)
    recorder_of(telemetry).record([verdict(1)], started=time.time_ns())
    (span,) = exporter.get_finished_spans()
    return dict(span.attributes or {})


def _span(mode: scenes.Mode) -> Callable[[], object]:
    tracer = scenes.provider(mode).get_tracer("benchmark")
    same = attributes()

    def span() -> None:
        made = tracer.start_span(
            "check_quota tool search",
            kind=SpanKind.INTERNAL,
            attributes=same,
            start_time=time.time_ns(),
        )
        made.end()

    return span


def _bare(mode: scenes.Mode) -> Callable[[], object]:
    span, registry = _span(mode), CollectorRegistry()
    calls = Counter("calls", "Calls.", ["tool"], registry=registry).labels("search")
    charges = Counter("charges", "Charges.", ["limit"], registry=registry).labels("limit")
    seconds = Histogram("seconds", "Seconds.", registry=registry, buckets=DECISION_BUCKETS)
    shown = {"trace_id": "1" * 32, "span_id": "1" * 16} if mode == "sampled" else None

    def bare() -> None:
        span()
        calls.inc(exemplar=shown)
        charges.inc(exemplar=shown)
        seconds.observe(0.0001)

    return bare


def _repeating(once: Callable[[], object]) -> Repeat:
    def repeated(number: int) -> None:
        for _ in repeat(None, number):
            once()

    return repeated


def _limits(limits: int) -> list[Rule]:
    return [
        fixed(
            ToolCallLimit(
                "search",
                thread_limit=scenes.UNREACHED,
                run_limit=scenes.UNREACHED,
                name=f"limit-{index}",
            )
        )
        for index in range(limits)
    ]
