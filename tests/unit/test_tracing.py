"""The span of a judged call: when there is one, what it says, and what it costs otherwise."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Sampler,
    SamplingResult,
)
from opentelemetry.sdk.trace.sampling import (
    Decision as Sampling,
)
from opentelemetry.trace import Link, SpanKind, StatusCode, TraceState
from opentelemetry.util.types import Attributes
from prometheus_client import CollectorRegistry

from langchain_quota import (
    Call,
    Decision,
    LimitStatus,
    ModelCallLimit,
    Outcome,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitExceededError,
    __version__,
)
from langchain_quota.decision import QuotaStatus, Unit
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


def test_an_allowed_call(signals: Signals) -> None:
    """The span of an allowed call has the name, kind and attributes that are promised."""
    signals.recorder.record(decide(LIMIT, used=Used(4, 0), tools=["search"]), started=5)
    (span,) = signals.spans()
    assert span.name == "check_quota tool search"
    assert span.kind is SpanKind.INTERNAL
    assert span.status.status_code is StatusCode.UNSET
    assert attributes(span) == {
        "langchain_quota.decision": "allowed",
        "langchain_quota.kind": "tool",
        "langchain_quota.limit": "tool:search",
        "langchain_quota.limits": ("tool:search",),
        "langchain_quota.scope": "none",
        "langchain_quota.exit_behavior": "continue",
        "langchain_quota.thread.used": 5,
        "langchain_quota.thread.limit": 20,
        "langchain_quota.run.used": 1,
        "langchain_quota.run.limit": 1,
        "gen_ai.conversation.id": "t1",
        "gen_ai.agent.name": "boss",
        "gen_ai.tool.name": "search",
        "gen_ai.tool.call.id": "call-0",
    }


def test_a_blocked_call(signals: Signals) -> None:
    """A block that the agent survives names limit and scope, and leaves the status unset."""
    signals.recorder.record(decide(LIMIT, used=Used(4, 1), tools=["search"]), started=5)
    (span,) = signals.spans()
    assert span.status.status_code is StatusCode.UNSET
    found = attributes(span)
    assert found["langchain_quota.decision"] == "blocked"
    assert found["langchain_quota.limit"] == "tool:search"
    assert found["langchain_quota.scope"] == "run"
    assert found["langchain_quota.thread.used"] == 4
    assert found["langchain_quota.run.used"] == 1
    assert "error.type" not in found


def test_a_model_call(signals: Signals) -> None:
    """The span of a model call has no tool; what is not known is left out."""
    limit = ModelCallLimit(run_limit=5)
    signals.recorder.record(judge([limit], {}, [Call("model")]).decisions, started=5)
    (span,) = signals.spans()
    assert span.name == "check_quota model"
    assert attributes(span) == {
        "langchain_quota.decision": "allowed",
        "langchain_quota.kind": "model",
        "langchain_quota.limit": "model",
        "langchain_quota.limits": ("model",),
        "langchain_quota.scope": "none",
        "langchain_quota.exit_behavior": "end",
        "langchain_quota.thread.used": 1,
        "langchain_quota.run.used": 1,
        "langchain_quota.run.limit": 5,
    }


@pytest.mark.parametrize(
    ("unit", "shown", "used", "most"),
    [("tokens", "tokens", 900_000, 1_000_000), ("microdollars", "dollars", 0.9, 1.0)],
)
def test_a_budget(signals: Signals, unit: Unit, shown: str, used: float, most: float) -> None:
    """The span says in which unit its amounts are; dollars are dollars."""
    status = LimitStatus(
        limit="budget",
        exit_behavior="end",
        thread_before=0,
        thread_used=900_000,
        thread_limit=1_000_000,
        run_before=0,
        run_used=900_000,
        run_limit=None,
        quotas=(QuotaStatus("global", "", 0, 900_000, 1_000_000),),
        unit=unit,
    )
    decision = Decision(Call("model", agent="boss"), Outcome.ALLOWED, (status,))
    signals.recorder.record([decision], started=0)
    (span,) = signals.spans()
    found = attributes(span)
    assert {key: found[key] for key in found if key.split(".")[1] in {"unit", "thread", "run"}} == {
        "langchain_quota.unit": shown,
        "langchain_quota.thread.used": used,
        "langchain_quota.thread.limit": most,
        "langchain_quota.run.used": used,
    }
    assert found["langchain_quota.global.used"] == used
    assert found["langchain_quota.global.limit"] == most


def test_a_call_without_limits(signals: Signals) -> None:
    """A call that no limit matches has a span that names none."""
    decision = Decision(Call("tool", "calc", "a", agent="boss"), Outcome.ALLOWED)
    signals.recorder.record([decision], started=5)
    (span,) = signals.spans()
    assert attributes(span) == {
        "langchain_quota.decision": "allowed",
        "langchain_quota.kind": "tool",
        "langchain_quota.limits": (),
        "gen_ai.agent.name": "boss",
        "gen_ai.tool.name": "calc",
        "gen_ai.tool.call.id": "a",
    }


def test_one_span_for_each_decision(signals: Signals) -> None:
    """A batch of three calls is three spans, in order, named after what was decided."""
    limit = ToolCallLimit("search", run_limit=1, exit_behavior="end")
    decisions = decide(limit, tools=["search", "search", "calc"])
    signals.recorder.record(decisions, started=5)
    spans = signals.spans()
    assert [span.name for span in spans] == [
        "check_quota tool search",
        "check_quota tool search",
        "check_quota tool calc",
    ]
    assert [attributes(span)["langchain_quota.decision"] for span in spans] == [
        "skipped",
        "blocked",
        "skipped",
    ]


def test_the_refusing_limit_is_shown_among_many(signals: Signals) -> None:
    """All limits that match are listed; the one that refuses is told in detail."""
    limits = [ToolCallLimit(run_limit=1), ToolCallLimit("search", run_limit=0)]
    signals.recorder.record(decide(*limits, tools=["search"]), started=5)
    found = attributes(signals.spans()[0])
    assert found["langchain_quota.limits"] == ("tool:*", "tool:search")
    assert found["langchain_quota.limit"] == "tool:search"
    assert found["langchain_quota.run.limit"] == 0


def test_the_fullest_limit_is_shown_where_none_refuses(signals: Signals) -> None:
    """Of limits that admit the call, the one with the highest share is told in detail."""
    limits = [ToolCallLimit(run_limit=50), ToolCallLimit("search", run_limit=2)]
    signals.recorder.record(decide(*limits, tools=["search"]), started=5)
    assert attributes(signals.spans()[0])["langchain_quota.limit"] == "tool:search"


def test_an_exception_that_propagates_is_an_error(signals: Signals) -> None:
    """Only the blocked calls of a batch that raises have status ERROR and `error.type`."""
    limit = ToolCallLimit("search", run_limit=1, exit_behavior="error")
    error = ToolCallLimitExceededError(
        thread_count=2, run_count=2, thread_limit=None, run_limit=1, tool_name="search"
    )
    decisions = decide(limit, tools=["search", "search"])
    signals.recorder.record(decisions, started=5, error=error)
    skipped, blocked = signals.spans()
    assert blocked.status.status_code is StatusCode.ERROR
    assert blocked.status.description == str(error)
    assert attributes(blocked)["error.type"] == "ToolCallLimitExceededError"
    assert skipped.status.status_code is StatusCode.UNSET
    assert "error.type" not in attributes(skipped)


def test_the_span_begins_when_judging_began(signals: Signals) -> None:
    """The start time is that given, and the end is not before it."""
    started = time.time_ns()
    signals.recorder.record(decide(LIMIT, tools=["search"]), started=started)
    (span,) = signals.spans()
    assert span.start_time == started
    assert span.end_time is not None
    assert span.end_time >= started


def test_the_span_is_a_child_of_the_active_one(signals: Signals) -> None:
    """Where the caller has a span, ours stands below it, and does not become the active one."""
    tracer = signals.provider.get_tracer("app")
    with tracer.start_as_current_span("request") as request:
        signals.recorder.record(decide(LIMIT, tools=["search"]), started=5)
        assert trace.get_current_span() is request
    span = signals.spans()[0]
    assert span.parent is not None
    assert span.parent.span_id == request.get_span_context().span_id
    assert span.context is not None
    assert span.context.trace_id == request.get_span_context().trace_id


def test_the_instrumentation_is_named(signals: Signals) -> None:
    """Spans tell which library made them, in which version."""
    signals.recorder.record(decide(LIMIT, tools=["search"]), started=5)
    scope = signals.spans()[0].instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.version) == ("langchain_quota", __version__)


def test_invented_tool_names_are_not_span_names(signals: Signals) -> None:
    """A span's name and attributes carry the bounded name of the tool, and a bounded call id."""
    call = Call("tool", "drop\ntable", "i" * 500, agent="a" * 500, thread_id="t" * 500)
    limit = ToolCallLimit(run_limit=5)
    signals.recorder.record(judge([limit], {}, [call]).decisions, started=5)
    (span,) = signals.spans()
    assert span.name == "check_quota tool _other"
    texts = [value for value in attributes(span).values() if isinstance(value, str)]
    assert max(len(text) for text in texts) <= 64
    assert "drop\ntable" not in texts


@pytest.mark.parametrize(
    ("spans", "expected"),
    [("all", ["allowed", "blocked", "would_block"]), ("refused", ["blocked", "would_block"])],
)
def test_which_calls_have_a_span(spans: str, expected: list[str]) -> None:
    """With `refused` only calls that were not plainly allowed have spans."""
    exported = Exported()
    allowed, blocked = decide(LIMIT, tools=["search", "search"])
    trial = Decision(blocked.call, Outcome.WOULD_BLOCK, blocked.limits)
    exported.recorder(spans=spans).record([allowed, blocked, trial], started=5)
    found = [attributes(span)["langchain_quota.decision"] for span in exported.spans]
    assert found == expected


def test_spans_can_be_switched_off() -> None:
    """With `off` there is no span for any decision."""
    exported = Exported()
    exported.recorder(spans="off").record(decide(LIMIT, tools=["search", "search"]), started=5)
    assert exported.spans == ()


def test_a_thread_label_replaces_the_conversation() -> None:
    """A thread's id that is hidden is not sent as the conversation's id either."""
    exported = Exported()
    recorder = exported.recorder(thread_label=lambda thread_id: f"hidden {len(str(thread_id))}")
    recorder.record(decide(LIMIT, tools=["search"]), started=5)
    found = attributes(exported.spans[0])
    assert found["langchain_quota.thread.id"] == "hidden 2"
    assert "gen_ai.conversation.id" not in found
    assert "t1" not in found.values()


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


def test_a_sampler_sees_the_decision() -> None:
    """A sampler can keep the refusals of a limit, since attributes are set at creation."""
    exported = Exported(KeepBlocked())
    exported.recorder().record(decide(LIMIT, tools=["search", "search"]), started=5)
    (span,) = exported.spans
    assert attributes(span)["langchain_quota.decision"] == "blocked"
    assert attributes(span)["gen_ai.tool.call.id"] == "call-1"


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


def test_attributes_are_built_once_when_recording(builds: list[Decision]) -> None:
    """A recorded span builds its attributes once, however often they are read."""
    decisions = decide(LIMIT, tools=["search"])
    exported = Exported(KeepBlocked())
    exported.recorder().record(decisions, started=5)
    Exported().recorder().record(decisions, started=5)
    assert builds == [*decisions, *decisions]


@pytest.mark.parametrize(
    "provider",
    [TracerProvider(sampler=ALWAYS_OFF), trace.NoOpTracerProvider()],
    ids=["always off", "no SDK"],
)
def test_nothing_is_built_when_nothing_is_recorded(
    builds: list[Decision], provider: trace.TracerProvider
) -> None:
    """Without an SDK, or with a sampler that is off, a decision builds no attributes."""
    recorder = recorder_of(Telemetry(registry=CollectorRegistry(), tracer_provider=provider))
    recorder.record(decide(LIMIT, tools=["search", "search"]), started=5)
    assert builds == []


@pytest.mark.parametrize("spans", ["refused", "off"])
def test_nothing_is_built_for_unwanted_spans(builds: list[Decision], spans: str) -> None:
    """A call that gets no span builds no attributes."""
    Exported().recorder(spans=spans).record(decide(LIMIT, tools=["search"]), started=5)
    assert builds == []


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


def test_the_items_of_lazy_attributes_change_nothing() -> None:
    """What the SDK takes them from is no way to change what the next reader sees."""
    lazy = LazyAttributes(lambda: {"a": 1})
    items = lazy.items()
    assert list(items) == [("a", 1)]
    assert not hasattr(items, "clear")
    assert lazy.items() == items == {("a", 1)}


def exemplars(registry: CollectorRegistry) -> list[dict[str, str]]:
    return [
        dict(sample.exemplar.labels)
        for family in registry.collect()
        for sample in family.samples
        if sample.exemplar
    ]


def link_to(span: trace.Span | ReadableSpan) -> dict[str, str]:
    context = span.get_span_context()
    assert context is not None
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }


def test_the_exemplar_is_the_calls_own_span(signals: Signals) -> None:
    """Call and limit counters are linked to the span of the call that they counted."""
    with signals.provider.get_tracer("app").start_as_current_span("request"):
        signals.recorder.record(decide(LIMIT, tools=["search"]), started=5)
    own = link_to(signals.spans()[0])
    assert exemplars(signals.registry) == [own, own]


def test_a_span_that_is_not_sampled_is_no_exemplar() -> None:
    """A link to a trace that nobody kept would lead nowhere."""
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, tracer_provider=TracerProvider(sampler=ALWAYS_OFF))
    recorder = recorder_of(telemetry)
    recorder.record(decide(LIMIT, tools=["search"]), started=5)
    assert exemplars(registry) == []


def test_without_a_span_the_exemplar_is_the_callers() -> None:
    """With spans off the counters are linked to the caller's active span, if it is sampled."""
    registry, exported = CollectorRegistry(), Exported()
    recorder = recorder_of(
        Telemetry(registry=registry, tracer_provider=exported.provider, spans="off")
    )
    with exported.provider.get_tracer("app").start_as_current_span("request") as request:
        recorder.record(decide(LIMIT, tools=["search"]), started=5)
    assert exemplars(registry) == [link_to(request), link_to(request)]


def test_without_any_span_there_is_no_exemplar() -> None:
    """Without tracing the counters count."""
    registry = CollectorRegistry()
    recorder = recorder_of(Telemetry(registry=registry, tracer_provider=trace.NoOpTracerProvider()))
    recorder.record(decide(LIMIT, tools=["search"]), started=5)
    assert exemplars(registry) == []
    labels = {"agent": "boss", "kind": "tool", "tool": "search", "decision": "allowed"}
    assert registry.get_sample_value("langchain_quota_calls_total", labels) == 1


def test_the_description_of_an_error_is_bounded(signals: Signals) -> None:
    """An exception's text that a model made endless and unprintable is cut to what exports."""
    limit = ToolCallLimit("search", run_limit=0, exit_behavior="error")
    error = RuntimeError("\ud800\n\x00no " + "x" * 100_000)
    signals.recorder.record(decide(limit, tools=["search"]), started=5, error=error)
    (span,) = signals.spans()
    assert span.status.status_code is StatusCode.ERROR
    # In ASCII, so that a failure can be reported.
    assert ascii(span.status.description) == ascii("no " + "x" * 250)


@pytest.mark.parametrize("tool", [5, b"search", ["search"], {"name": "search"}], ids=str)
def test_a_tool_name_that_is_no_string(tool: Any, signals: Signals) -> None:
    """A call that names its tool by no string raises nothing, and its span says `_other`."""
    call = Call("tool", tool, "a", agent="boss", thread_id="t1")
    signals.recorder.record([Decision(call, Outcome.ALLOWED)], started=5)
    (span,) = signals.spans()
    assert span.name == "check_quota tool _other"
    assert attributes(span)["gen_ai.tool.name"] == "_other"


MIDNIGHT = datetime(2026, 3, 1, tzinfo=UTC)
DAILY = ResolvedQuota("user_id", 5, "ada@example.org", "user", MIDNIGHT)
ALL = ResolvedQuota("global", 100, "", "all")


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


def test_quotas_are_told_by_scope(signals: Signals) -> None:
    """Each quota of the leading limit has its use and number; no subject is an attribute."""
    signals.recorder.record(stored(with_quotas(DAILY, ALL, thread_limit=20), used=3), started=5)
    found = attributes(signals.spans()[0])
    assert {
        key: value for key, value in found.items() if key.endswith((".used", ".limit", ".scope"))
    } == {
        "langchain_quota.limit": "tool:search",
        "langchain_quota.scope": "none",
        "langchain_quota.thread.used": 4,
        "langchain_quota.thread.limit": 20,
        "langchain_quota.run.used": 1,
        "langchain_quota.user_id.used": 4,
        "langchain_quota.user_id.limit": 5,
        "langchain_quota.global.used": 4,
        "langchain_quota.global.limit": 100,
    }
    assert "langchain_quota.resets_at" not in found
    assert not any("ada" in str(value) for value in found.values())


def test_a_quota_per_thread_is_told_like_a_thread_limit(signals: Signals) -> None:
    """The thread's use is the store's, and its limit the quota's."""
    quota = ResolvedQuota("thread", 10, "t1", "t1", per="thread")
    signals.recorder.record(stored(with_quotas(quota), used=6, mirror=Used(1)), started=5)
    found = attributes(signals.spans()[0])
    assert found["langchain_quota.thread.used"] == 7
    assert found["langchain_quota.thread.limit"] == 10


def test_a_refusal_tells_when_the_window_ends(signals: Signals) -> None:
    """A refused call says by which quota, and from when on it could be admitted."""
    signals.recorder.record(stored(with_quotas(DAILY), used=5), started=5)
    found = attributes(signals.spans()[0])
    assert found["langchain_quota.scope"] == "user_id"
    assert found["langchain_quota.user_id.used"] == 5
    assert found["langchain_quota.resets_at"] == "2026-03-01T00:00:00+00:00"


@pytest.mark.parametrize(
    "limits",
    [
        [with_quotas(ResolvedQuota("global", 5, "", "all"))],
        [with_quotas(DAILY, name="daily"), with_quotas(ResolvedQuota("global", 5, "", "all"))],
        [with_quotas(DAILY, enforce=False)],
    ],
    ids=["no window", "one without a window", "on trial"],
)
def test_no_window_no_time(
    limits: list[tuple[ToolCallLimit, Sequence[ResolvedQuota]]], signals: Signals
) -> None:
    """Where no window's end lets the call through, or it runs, there is no time to wait for."""
    signals.recorder.record(stored(*limits, used=5), started=5)
    found = attributes(signals.spans()[0])
    assert found["langchain_quota.scope"] in {"global", "user_id"}
    assert "langchain_quota.resets_at" not in found


def test_a_refusal_without_the_store(signals: Signals) -> None:
    """Its scope is `store`; what only the store knows is left out, the run's use is shown."""
    limit = with_quotas(DAILY, thread_limit=20, run_limit=9)
    decisions = stored(limit, mirror=Used(3, 2), outage="deny")
    signals.recorder.record(decisions, started=5)
    found = attributes(signals.spans()[0])
    assert found["langchain_quota.decision"] == "blocked"
    assert found["langchain_quota.scope"] == "store"
    assert {key for key in found if key.endswith(".used")} == {"langchain_quota.run.used"}
    assert found["langchain_quota.run.used"] == 2
    assert found["langchain_quota.thread.limit"] == 20
    assert "langchain_quota.resets_at" not in found


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


def span_of(carrier: Mapping[str, str] | None) -> tuple[str, str]:
    """The ids of trace and span that a carrier names."""
    assert carrier is not None
    _, trace_id, span_id, _ = carrier["traceparent"].split("-")
    return trace_id, span_id


def ids(span: ReadableSpan) -> tuple[str, str]:
    link = link_to(span)
    return link["trace_id"], link["span_id"]


def test_a_batch_without_an_active_span_is_one_trace(signals: Signals) -> None:
    """The first span of the first batch is the parent of its others, and is returned."""
    emitted = signals.recorder.record(decide(LIMIT, tools=["search"] * 3), started=5)
    first, *later = signals.spans()
    assert first.parent is None
    assert [span.parent and span.parent.span_id for span in later] == [first.context.span_id] * 2
    assert span_of(emitted.trace) == ids(first)


def test_a_later_step_is_in_the_trace_that_it_is_given(signals: Signals) -> None:
    """A step's trace makes the later step's spans its children, and is passed on."""
    given = {"traceparent": f"00-{5:032x}-{7:016x}-01"}
    emitted = signals.recorder.record(
        decide(LIMIT, tools=["search", "search"]), started=5, trace=given
    )
    for span in signals.spans():
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.span_id, span.parent.is_remote) == (5, 7, True)
    assert len(signals.spans()) == 2
    assert emitted.trace == given


def test_an_active_span_goes_before_a_given_trace(signals: Signals) -> None:
    """Below an active span no trace begins, and a given one is passed on unchanged."""
    given = {"traceparent": f"00-{5:032x}-{7:016x}-01"}
    with signals.provider.get_tracer("app").start_as_current_span("request") as request:
        told = [
            signals.recorder.record(decide(LIMIT, tools=["search"]), started=5, trace=each).trace
            for each in (None, given)
        ]
    assert told == [None, given]
    own = request.get_span_context()
    parents = [span.parent for span in signals.spans() if span.name != "request"]
    assert [parent and parent.span_id for parent in parents] == [own.span_id] * 2


@pytest.mark.parametrize(
    ("provider", "spans"),
    [(trace.NoOpTracerProvider(), "all"), (None, "all"), (TracerProvider(), "off")],
    ids=["no SDK", "no global provider", "off"],
)
def test_without_spans_no_trace_begins(provider: trace.TracerProvider | None, spans: Any) -> None:
    """Where no span is made there is no trace to tell."""
    recorder = recorder_of(
        Telemetry(registry=CollectorRegistry(), tracer_provider=provider, spans=spans)
    )
    emitted = recorder.record(decide(LIMIT, tools=["search", "search"]), started=5)
    assert emitted.is_new
    assert emitted.trace is None


def test_a_trace_begins_with_the_first_span() -> None:
    """With `refused` the first refusal begins it, not an earlier call that was allowed."""
    exported = Exported()
    recorder = exported.recorder(spans="refused")
    assert recorder.record(decide(LIMIT, tools=["search"]), started=5).trace is None
    emitted = recorder.record(decide(LIMIT, tools=["search", "search", "search"]), started=5)
    first, second = exported.spans
    assert span_of(emitted.trace) == ids(first)
    assert second.parent is not None
    assert second.parent.span_id == first.context.span_id


def test_an_unsampled_trace_is_told() -> None:
    """Later steps are to know that the run is not sampled."""
    exported = Exported(ALWAYS_OFF)
    emitted = exported.recorder().record(decide(LIMIT, tools=["search"]), started=5)
    assert emitted.trace is not None
    flags = int(emitted.trace["traceparent"].rsplit("-", 1)[1], 16)
    assert not flags & trace.TraceFlags.SAMPLED


class Stating(KeepBlocked):
    """Keeps everything, and notes so in the trace's state."""

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        state = TraceState([("vendor", "kept")])
        return SamplingResult(Sampling.RECORD_AND_SAMPLE, trace_state=state)


def test_the_state_of_a_trace_is_told() -> None:
    """What a vendor's sampler notes in the trace reaches later steps."""
    emitted = Exported(Stating()).recorder().record(decide(LIMIT, tools=["search"]), started=5)
    assert emitted.trace is not None
    assert emitted.trace["tracestate"] == "vendor=kept"
    later = Exported()
    later.recorder().record(decide(LIMIT, tools=["search"]), started=5, trace=emitted.trace)
    (span,) = later.spans
    assert dict(span.context.trace_state) == {"vendor": "kept"}


@pytest.mark.parametrize(
    "damaged", [{"traceparent": "nonsense"}, {"traceparent": 5}, {"other": "x"}, "nonsense", [1]]
)
def test_a_damaged_trace_costs_no_span(damaged: Any, signals: Signals) -> None:
    """A state that others have changed gives spans without a trace, and raises nothing."""
    emitted = signals.recorder.record(decide(LIMIT, tools=["search"]), started=5, trace=damaged)
    assert emitted.is_new
    (span,) = signals.spans()
    assert span.parent is None


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


@pytest.mark.parametrize(
    ("given", "states"),
    [
        (GIVEN, [{"vendor": "kept"}]),
        (dict(reversed(GIVEN.items())), [{"vendor": "kept"}]),
        (GIVEN | {"tracestate": "vendor=other"}, [{"vendor": "other"}]),
        ({"traceparent": GIVEN["traceparent"]}, [{}]),
        (GIVEN | {"traceparent": f"00-{5:032x}-{7:016x}-00"}, []),
    ],
    ids=["the same", "in another order", "another state", "no state", "not sampled"],
)
def test_given_traces_are_told_apart(
    given: Mapping[str, str], states: Sequence[Mapping[str, str]], signals: Signals
) -> None:
    """Traces that differ only in the state, or in whether they are sampled, are not mixed up."""
    signals.recorder.record(decide(LIMIT, tools=["search"]), started=5, trace=GIVEN)
    emitted = signals.recorder.record(decide(LIMIT, tools=["search"]), started=5, trace=given)
    assert emitted.trace == given
    found = [dict(span.context.trace_state) for span in signals.spans()]
    assert found == [{"vendor": "kept"}, *states]


def remote(trace_id: int, span_id: int) -> trace.Span:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    return trace.NonRecordingSpan(
        trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
    )


@pytest.mark.parametrize(
    ("active", "given", "parent", "begins"),
    [
        (remote(3, 4), None, (3, 4), False),
        (remote(3, 4), GIVEN, (3, 4), False),
        (None, GIVEN, (5, 7), False),
        (None, None, None, True),
    ],
    ids=["the active one", "the active one, and a given one", "a given one", "none"],
)
def test_where_spans_belong(
    signals: Signals,
    *,
    active: trace.Span | None,
    given: Mapping[str, str] | None,
    parent: tuple[int, int] | None,
    begins: bool,
) -> None:
    """Below the active span, else the given; only without any one a trace begins."""
    with trace.use_span(active) if active is not None else nullcontext():
        emitted = signals.recorder.record(
            decide(LIMIT, tools=["search", "search"]), started=5, trace=given
        )
    first, second = signals.spans()
    found = first.parent and (first.parent.trace_id, first.parent.span_id)
    assert found == parent
    assert span_of(emitted.trace) == ids(first) if begins else emitted.trace == given
    siblings = second.parent and (second.parent.trace_id, second.parent.span_id)
    assert siblings == ((first.context.trace_id, first.context.span_id) if begins else parent)


def test_a_task_that_runs_again_keeps_the_trace_that_it_began(signals: Signals) -> None:
    """Its state does not have the trace: it is returned again, and other decisions join it."""
    allowed, blocked = decide(LIMIT, tools=["search", "search"])
    first = signals.recorder.record([allowed], started=5, task_id="task")
    again = signals.recorder.record([allowed], started=5, task_id="task")
    assert not again.is_new
    assert again.trace == first.trace is not None
    otherwise = signals.recorder.record([blocked], started=5, task_id="task")
    assert otherwise.trace == first.trace
    begun, joined = signals.spans()
    assert joined.parent is not None
    assert joined.parent.span_id == begun.context.span_id
    other = signals.recorder.record([allowed], started=5, task_id="another")
    assert other.trace != first.trace


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
