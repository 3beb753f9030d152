"""The span of a judged call: when there is one, what it says, and what it costs otherwise."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from opentelemetry import baggage
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_ON,
    Sampler,
    SamplingResult,
)
from opentelemetry.sdk.trace.sampling import (
    Decision as Sampling,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes
from prometheus_client import CollectorRegistry

from langchain_quota import (
    Call,
    Decision,
    Telemetry,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.resolved import Outage, ResolvedLimit, ResolvedQuota
from langchain_quota.telemetry import recorder_of
from langchain_quota.telemetry.recorder import Recorder
from langchain_quota.telemetry.reruns import RecentTasks
from langchain_quota.telemetry.tracing import LazyAttributes, Tracing
from tests.judged import Used, judge
from tests.signals import Signals

LIMIT = ToolCallLimit("search", thread_limit=20, run_limit=1)


class Exported:
    """A tracer provider that keeps what it exports."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def recorder(self, **options: Any) -> Recorder:
        registry = CollectorRegistry()
        return recorder_of(Telemetry(registry=registry, tracer_provider=self.provider, **options))

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()


def decide(*limits: Limit, used: Used | None = None, tools: Sequence[str]) -> Sequence[Decision]:
    batch = [
        Call("tool", tool, f"call-{index}", agent="boss", thread_id="t1")
        for index, tool in enumerate(tools)
    ]
    return judge(limits, {limit.counter: used or Used() for limit in limits}, batch).decisions


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


class KeepBlocked(Sampler):
    """Keeps refusals of one limit, by what it is told when the span is made."""

    def should_sample(  # noqa: PLR0917 - the SDK's signature
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        known = attributes or {}
        wanted = (
            known.get("langchain_quota.decision") == "blocked"
            and known.get("langchain_quota.limit") == "tool:search"
        )
        return SamplingResult(Sampling.RECORD_AND_SAMPLE if wanted else Sampling.DROP, attributes)

    def get_description(self) -> str:
        return "KeepBlocked"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """The decisions for which attributes were built."""
    built: list[Decision] = []
    build = Tracing._attributes

    def counting(self: Tracing, decision: Decision, *rest: Any) -> dict[str, Any]:
        built.append(decision)
        return build(self, decision, *rest)

    monkeypatch.setattr(Tracing, "_attributes", counting)
    return built


def test_lazy_attributes_are_a_mapping() -> None:
    """However a sampler or an SDK reads them, they are built once and read as a dict."""
    calls: list[int] = []

    def build() -> dict[str, Any]:
        calls.append(1)
        return {"a": 1, "b": 2}

    lazy = LazyAttributes(build)
    assert calls == []
    assert (dict(lazy), len(lazy), lazy["b"], lazy.get("c")) == ({"a": 1, "b": 2}, 2, 2, None)
    copied = lazy.copy()
    copied["c"] = 3
    assert "c" not in lazy
    assert calls == [1]


class Adding(KeepBlocked):
    """Keeps everything, with one attribute more, added in a way of its own."""

    def __init__(self, add: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self._add = add

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        given = kwargs.get("attributes") or args[4]
        return SamplingResult(Sampling.RECORD_AND_SAMPLE, self._add(given))


@pytest.mark.parametrize(
    "add",
    [
        lambda given: {**given, "priority": 1},
        lambda given: dict(given) | {"priority": 1},
        lambda given: given.copy() | {"priority": 1},
        lambda given: dict(given.items(), priority=1),
        lambda given: {"priority": 1, **{key: given[key] for key in given.keys()}},  # noqa: SIM118
        lambda given: dict(zip(given, given.values(), strict=True), priority=1),
    ],
    ids=["unpacked", "dict", "copy", "items", "keys", "values"],
)
def test_a_sampler_may_add_attributes(
    add: Callable[[Mapping[str, Any]], Mapping[str, Any]], builds: list[Decision]
) -> None:
    """However it reads those that it is given, the span has all of them and its own."""
    exported = Exported(Adding(add))
    exported.recorder().record(decide(LIMIT, tools=["search"]), started=5)
    found = attributes(exported.spans[0])
    assert found.pop("priority") == 1
    plain = Exported()
    plain.recorder().record(decide(LIMIT, tools=["search"]), started=5)
    assert found == attributes(plain.spans[0])
    assert len(builds) == 2


MIDNIGHT = datetime(2026, 3, 1, tzinfo=UTC)
DAILY = ResolvedQuota("user_id", 5, "ada@example.org", "user", MIDNIGHT)


def stored(
    *limits: tuple[ToolCallLimit, Sequence[ResolvedQuota]],
    used: int = 0,
    mirror: Used | None = None,
    outage: Outage | None = None,
) -> Sequence[Decision]:
    """What is decided about a call whose quotas a store has counted up to so much."""
    resolved = [
        ResolvedLimit.of(limit, thread_key="t1", quotas=tuple(quotas)) for limit, quotas in limits
    ]
    batch = [Call("tool", "search", "a", agent="boss", thread_id="t1")]
    own = mirror or Used()
    if outage is None:
        kept = any(
            limit.thread_limit is not None or any(each.is_threads for each in quotas)
            for limit, quotas in limits
        )
        most = max(len(quotas) for _, quotas in limits)
        own = Used(used if kept else own.thread, own.run, (used,) * most)
    return judge(resolved, {"search": own}, batch, outage=outage).decisions


def with_quotas(
    *quotas: ResolvedQuota, **options: Any
) -> tuple[ToolCallLimit, Sequence[ResolvedQuota]]:
    own = [Quota(each.limit, per=each.scope) for each in quotas]
    return ToolCallLimit("search", quotas=own, **options), quotas


def test_a_sampler_sees_quotas() -> None:
    """The attributes of quotas are there when the sampler decides, and are built once."""
    seen: list[dict[str, Any]] = []

    class Looking(KeepBlocked):
        def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
            seen.append(dict(kwargs.get("attributes") or args[4]))
            return super().should_sample(*args, **kwargs)

    exported = Exported(Looking())
    exported.recorder().record(stored(with_quotas(DAILY), used=5), started=5)
    assert seen[0]["langchain_quota.user_id.limit"] == 5
    assert seen[0]["langchain_quota.resets_at"] == "2026-03-01T00:00:00+00:00"
    assert len(exported.spans) == 1


class Baggage(SpanProcessor):
    """Notes the baggage with which each span starts."""

    def __init__(self) -> None:
        self.seen: list[dict[str, object]] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self.seen.append(dict(baggage.get_all(parent_context)))


def test_baggage_reaches_every_span(signals: Signals) -> None:
    """The caller's baggage is there for later spans of a run's own trace as for its first."""
    noting = Baggage()
    signals.provider.add_span_processor(noting)
    token = attach(baggage.set_baggage("tenant", "acme"))
    try:
        signals.recorder.record(decide(LIMIT, tools=["search", "search"]), started=5)
    finally:
        detach(token)
    assert noting.seen == [{"tenant": "acme"}] * 2


GIVEN = {"traceparent": f"00-{5:032x}-{7:016x}-01", "tracestate": "vendor=kept"}


def test_baggage_is_that_of_each_step(signals: Signals) -> None:
    """Steps in one given trace have each the baggage of their own caller, or none."""
    noting = Baggage()
    signals.provider.add_span_processor(noting)
    for tenant in ("acme", "bolt"):
        token = attach(baggage.set_baggage("tenant", tenant))
        try:
            signals.recorder.record(decide(LIMIT, tools=["search"]), started=5, trace=GIVEN)
        finally:
            detach(token)
    signals.recorder.record(decide(LIMIT, tools=["search"]), started=5, trace=GIVEN)
    assert noting.seen == [{"tenant": "acme"}, {"tenant": "bolt"}, {}]
    assert {span.context.trace_id for span in signals.spans()} == {5}


def test_the_memory_of_traces_is_bounded() -> None:
    """With a task the trace that it began is forgotten."""
    tasks, least = RecentTasks(), RecentTasks.LEAST
    for number in range(2 * least):
        tasks.seen(str(number))
        tasks.begin(str(number), {"traceparent": str(number)})
    assert tasks.begun("0") is None
    assert tasks.begun(str(least)) == {"traceparent": str(least)}
    tasks.begin(None, {"traceparent": "x"})
    assert tasks.begun(None) is None
