"""Telemetry as a whole: it tells everything, shares its metrics, and never breaks the agent."""

import asyncio
import copy
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
from opentelemetry.trace import NoOpTracerProvider, format_span_id
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota import (
    Answer,
    Call,
    Decision,
    ModelCallLimit,
    Outcome,
    Telemetry,
    ToolCallLimit,
    hmac_label,
)
from langchain_quota.decision import QuotaStatus, Refund
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.resolved import Outage, ResolvedLimit, ResolvedQuota
from langchain_quota.telemetry import charges, default_telemetry, recorder_of
from langchain_quota.telemetry import recorder as recorder_module
from langchain_quota.telemetry.logs import log_refusal
from langchain_quota.telemetry.recorder import Recorder
from langchain_quota.telemetry.reruns import RecentTasks
from langchain_quota.testing import captured_decisions
from tests.judged import Used, judge
from tests.signals import Signals

LIMIT = ToolCallLimit("search", thread_limit=10, run_limit=10)
LOGGER = "langchain_quota"


def decide(
    used: int = 0,
    calls: int = 1,
    *,
    limit: Limit = LIMIT,
    thread: object = "t1",
    agent: Any = "boss",
) -> Sequence[Decision]:
    """What the judge decides about calls on a thread, and a run, that have used so much."""
    tool = None if limit.kind == "model" else "search"
    batch = [
        Call(limit.kind, tool, f"call-{index}", agent=agent, thread_id=thread)
        for index in range(calls)
    ]
    return judge([limit], {limit.counter: Used(used, used)}, batch).decisions


def recording(**options: Any) -> Recorder:
    """What middlewares tell, if they are given a Telemetry with these options."""
    return recorder_of(Telemetry(**options))


def quiet(registry: CollectorRegistry | None = None, **options: Any) -> Recorder:
    """A recorder without spans on a registry of its own."""
    return recording(
        registry=registry or CollectorRegistry(), tracer_provider=NoOpTracerProvider(), **options
    )


def calls_total(registry: CollectorRegistry) -> float:
    return sum(
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "langchain_quota_calls_total"
    )


def tool_labels(registry: CollectorRegistry) -> set[str]:
    return {
        sample.labels["tool"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "langchain_quota_calls_total"
    }


def errors(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["component"], sample.labels["error_type"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "langchain_quota_errors_total"
    }


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text")


def test_a_failing_thread_label_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A `thread_label` that raises costs the thread its series, and the id is shown nowhere."""

    def broken(thread_id: object) -> str:
        raise KeyError(thread_id)

    registry = CollectorRegistry()
    recorder = quiet(registry, thread_label=broken)
    for used in range(3):
        recorder.record(decide(used, thread="ada@example.org"), started=0)
    assert errors(registry) == {("thread_label", "KeyError"): 3}
    assert len(logged_errors(caplog)) == 1
    assert calls_total(registry) == 3
    assert "ada@example.org" not in generate_latest(registry).decode()
    assert "ada@example.org" not in caplog.text


def of_users(subject: str, name: str = "user_id") -> tuple[Decision, ...]:
    """What is decided about a call whose quota is per user."""
    limit = ToolCallLimit("search", quotas=[Quota(5, per=name)])
    resolved = ResolvedLimit.of(limit, quotas=(ResolvedQuota(name, 5, subject, subject, per=name),))
    call = Call("tool", "search", "1", agent="boss")
    return judge([resolved], {"search": Used(quotas=(2,))}, [call]).decisions


def test_subjects_are_shown_where_their_quota_is_named() -> None:
    """A quota that `subject_label` names has series by the labels that it makes, no other has."""
    registry = CollectorRegistry()
    recorder = quiet(registry, subject_label={"user_id": hmac_label("0123456789abcdef")})
    recorder.record(of_users("ada@example.org"), started=0)
    recorder.record(of_users("acme", name="tenant"), started=0)
    labels = {"agent": "boss", "limit": "tool:search", "scope": "user_id"}
    name = "langchain_quota_subject_used"
    label = hmac_label("0123456789abcdef")("ada@example.org")
    assert registry.get_sample_value(name, {**labels, "subject": label}) == 3
    text = generate_latest(registry).decode()
    assert "acme" not in text
    assert "ada@example.org" not in text


@pytest.mark.parametrize("make", [lambda _: 17, lambda subject: {}[subject]], ids=["int", "raises"])
def test_a_failing_subject_label_changes_nothing(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs the subject its series, is counted, and shows the subject nowhere."""
    registry = CollectorRegistry()
    recorder = quiet(registry, subject_label={"user_id": make})
    recorder.record(of_users("ada@example.org"), started=0)
    text = generate_latest(registry).decode()
    assert {component for component, _ in errors(registry)} == {"subject_label"}
    assert calls_total(registry) == 1
    assert 'subject="' not in text
    assert "ada@example.org" not in text + caplog.text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (str, "not <class 'str'>"),
        ({"tenant": "hidden"}, "'tenant' is mapped to 'hidden'"),
        ({7: str}, "7 is mapped to <class 'str'>"),
    ],
)
def test_a_subject_label_of_a_wrong_type_is_refused(value: Any, shown: str) -> None:
    """A TypeError says what it must be, and what was given."""
    message = "subject_label must map names of quotas to functions, as in {'tenant': str}"
    with pytest.raises(TypeError) as caught:
        Telemetry(registry=CollectorRegistry(), subject_label=value)
    assert str(caught.value).startswith(message)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [lambda _: None, lambda _: 17, lambda thread_id: thread_id.encode()],
    ids=["None", "an int", "bytes"],
)
def test_a_thread_label_that_is_no_string(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is a failed label: no thread has series, not even one called None; the id is unseen."""
    registry = CollectorRegistry()
    recorder = quiet(registry, thread_label=make)
    for used in range(3):
        recorder.record(decide(used, thread="ada@example.org"), started=0)
    assert errors(registry) == {("thread_label", "TypeError"): 3}
    assert calls_total(registry) == 3
    text = generate_latest(registry).decode()
    assert "thread_id=" not in text
    (record,) = logged_errors(caplog)
    assert not record.exc_info
    assert "ada@example.org" not in text + caplog.text


class RaisingSampler(Sampler):
    """Fails whenever it is asked."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
        raise self._error

    def get_description(self) -> str:
        return "raising"


class RaisingAtStart(SpanProcessor):
    """Fails when a span starts, as a broken exporter's processor may."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        raise RuntimeError("no exporter")


class RaisingAtEnd(SpanProcessor):
    """Fails when a span has ended."""

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("no exporter")


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that takes anything and raises."""

    def broken(*_: object, **__: object) -> Any:
        raise error

    return broken


@dataclass(frozen=True)
class Part:
    """A function that makes a signal: whose it is, its name, and as what its failure counts."""

    owner: Callable[[Recorder], object]
    name: str
    component: str
    signals: frozenset[str] = frozenset()
    """What there is not without it."""


PARTS = [
    Part(lambda recorder: recorder._tools, "label", "metrics"),
    Part(lambda recorder: recorder._tracing, "place", "tracing"),
    Part(lambda recorder: recorder._tracing, "record", "tracing", frozenset({"span"})),
    Part(lambda _: recorder_module, "carried", "tracing"),
    Part(lambda _: charges, "exemplar", "tracing"),
    Part(lambda recorder: recorder._metrics, "record", "metrics", frozenset({"calls"})),
    Part(lambda recorder: recorder._metrics, "crossed", "metrics", frozenset({"threshold_events"})),
    Part(
        lambda recorder: recorder._usage,
        "record",
        "threads",
        frozenset({"thread", "user"}),
    ),
]
each_part = pytest.mark.parametrize(
    "part", PARTS, ids=lambda part: f"{part.component} {part.name} {sorted(part.signals)}"
)


def told(signals: Signals, caplog: pytest.LogCaptureFixture) -> set[str]:
    """The signals that there are of a call which used up the limits of a thread and of a user."""
    thread = {"agent": "boss", "limit": "tool:email", "thread_id": "t1"}
    threshold_events = [
        {"agent": "boss", "limit": "tool:email", "scope": scope} for scope in ("thread", "user_id")
    ]
    found = {
        "calls": calls_total(signals.registry) == 1,
        "threshold_events": [
            signals.value("langchain_quota_exhausted_total", **labels)
            for labels in threshold_events
        ]
        == [1, 1],
        "span": len(signals.spans()) == 1,
        "logs": [record.levelno for record in caplog.records].count(logging.WARNING) == 2,
        "thread": signals.value("langchain_quota_thread_used", **thread) == 1,
        "user": subjects(signals, "user_id")["exhausted"] == 1,
    }
    return {signal for signal, is_told in found.items() if is_told}


@each_part
def test_a_part_that_fails_does_not_stop_the_others(
    part: Part,
    signals: Signals,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one part raises is counted once, as its failure, and all other signals are there."""
    caplog.set_level(logging.WARNING, LOGGER)
    decisions = stored(DAILY, used=4, thread_limit=1)
    monkeypatch.setattr(part.owner(signals.recorder), part.name, raising(LookupError("x")))
    assert signals.recorder.record(decisions, started=0).is_new
    assert (
        told(signals, caplog)
        == {*("calls", "threshold_events", "span", "logs", "thread", "user")} - part.signals
    )
    assert set(errors(signals.registry)) == {(part.component, "LookupError")}


@each_part
@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_no_part_swallows_an_interrupt(
    part: Part, error: BaseException, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation or an interrupt that comes while a part is at work passes through."""
    decisions = stored(DAILY, used=4, thread_limit=1)
    monkeypatch.setattr(part.owner(signals.recorder), part.name, raising(error))
    with pytest.raises(type(error)):
        signals.recorder.record(decisions, started=0)
    assert errors(signals.registry) == {}


@pytest.mark.parametrize("at", ["sampler", "start of a span", "end of a span"])
def test_a_failing_sdk_changes_nothing(at: str) -> None:
    """A sampler, or a processor of a span, that raises costs no count and no thread."""
    provider, registry = TracerProvider(), CollectorRegistry()
    if at == "sampler":
        provider = TracerProvider(sampler=RaisingSampler(RuntimeError("no")))
    else:
        provider.add_span_processor(RaisingAtStart() if at == "start of a span" else RaisingAtEnd())
    recorder = recording(registry=registry, tracer_provider=provider)
    emitted = recorder.record(decide(calls=3), started=0)
    assert (emitted.is_new, emitted.trace) == (True, None)
    assert errors(registry) == {("tracing", "RuntimeError"): 3}
    assert calls_total(registry) == 3
    labels = {"agent": "boss", "limit": "tool:search", "thread_id": "t1"}
    assert registry.get_sample_value("langchain_quota_thread_used", labels) == 3


@pytest.mark.parametrize("counter", ["calls", "limit_decisions", "near"])
def test_a_counter_that_cannot_count_changes_nothing(
    counter: str, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry whose counters raise, for a full disk say, costs no span and no thread."""
    broken = SimpleNamespace(inc=raising(OSError("disk full")))
    metrics = signals.recorder._metrics
    monkeypatch.setattr(getattr(metrics, counter), "labels", lambda *_: broken)
    signals.recorder.record(decide(7), started=0)
    assert set(errors(signals.registry)) == {("metrics", "OSError")}
    assert len(signals.spans()) == 1
    labels = {"agent": "boss", "limit": "tool:search", "thread_id": "t1"}
    assert signals.value("langchain_quota_thread_used", **labels) == 8


def test_a_failed_span_leaves_the_callers_exemplar() -> None:
    """A call whose own span failed is linked to the active span, like a call without a span."""
    registry = CollectorRegistry()
    provider = TracerProvider(sampler=RaisingSampler(RuntimeError("no")))
    recorder = recording(registry=registry, tracer_provider=provider)
    with TracerProvider().get_tracer("app").start_as_current_span("request") as request:
        recorder.record(decide(), started=0)
    found = [
        sample.exemplar.labels["span_id"]
        for family in registry.collect()
        for sample in family.samples
        if sample.exemplar
    ]
    assert found == [format_span_id(request.get_span_context().span_id)] * 2


def test_failures_of_what_users_hang_in_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """An observer or a limit's function that raises is counted each time, logged once per kind."""
    registry = CollectorRegistry()
    recorder = quiet(registry)
    for _ in range(3):
        recorder.record_error("observer", KeyError("x"))
    recorder.record_error("dynamic_limit", KeyError("x"))
    assert errors(registry) == {("observer", "KeyError"): 3, ("dynamic_limit", "KeyError"): 1}
    records = logged_errors(caplog)
    assert [record.getMessage().split()[0] for record in records] == ["observer", "dynamic_limit"]


def test_a_failing_counter_of_errors_changes_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every metric fails, a full disk under multi-process metrics, the agent goes on."""

    def broken(*labels: str) -> None:
        raise OSError("disk full")

    recorder = quiet()
    metrics = recorder._metrics
    for each in (metrics.calls, metrics.limit_decisions, metrics.errors):
        monkeypatch.setattr(each, "labels", broken)
    (decision,) = decide()
    recorder.record([decision], started=0)
    recorder.record_charge(decision.call, decision.limits[0])
    recorder.record_refunds([Refund(decision.call, LIMIT.name)])
    recorder.record_error("observer", OSError("disk full"))
    assert logged_errors(caplog)


class RaisingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("bad handler")


@contextmanager
def raising_filter() -> Iterator[None]:
    def broken(record: logging.LogRecord) -> bool:
        raise RuntimeError("bad filter")

    logger = logging.getLogger(LOGGER)
    logger.addFilter(broken)
    try:
        yield
    finally:
        logger.removeFilter(broken)


@contextmanager
def raising_handler() -> Iterator[None]:
    logger, handler = logging.getLogger(LOGGER), RaisingHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("broken", [raising_filter, raising_handler])
def test_failing_logging_changes_nothing(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A filter or handler of the application that raises costs no counter, and is counted."""
    caplog.set_level(logging.DEBUG, LOGGER)
    limits = [
        ToolCallLimit("search", thread_limit=99, run_limit=10),
        ToolCallLimit(thread_limit=99, run_limit=10),
    ]
    used = {"search": Used(9, 9), "__all__": Used(9, 9)}
    batch = [Call("tool", "search", each, agent="boss", thread_id="t1") for each in "ab"]
    registry = CollectorRegistry()
    with broken():
        quiet(registry).record(judge(limits, used, batch).decisions, started=0)
    for limit in ("tool:search", "tool:*"):
        labels = {"agent": "boss", "limit": limit, "scope": "run"}
        assert registry.get_sample_value("langchain_quota_exhausted_total", labels) == 1
        thread = {"agent": "boss", "limit": limit, "thread_id": "t1"}
        assert registry.get_sample_value("langchain_quota_thread_used", thread) == 10
    assert calls_total(registry) == 2
    # Two threshold_events and two refusals were to be logged.
    assert errors(registry) == {("observer", "RuntimeError"): 4}


@pytest.mark.parametrize("name", ["E" * 10_000, "Two\nLines", "\u202eError"], ids=ascii)
def test_the_kind_of_a_failure_is_a_safe_label(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever an exception's class is called, its label is bounded and printable."""
    registry = CollectorRegistry()
    error = type(name, (Exception,), {})("x")
    quiet(registry).record_error("observer", error)
    ((_, found),) = errors(registry)
    assert len(found) <= 64
    assert found.isprintable()
    (record,) = logged_errors(caplog)
    assert found in record.getMessage()
    assert name not in record.getMessage()


@pytest.mark.parametrize("tool", [5, b"search", ["search"], {"name": "search"}], ids=str)
def test_a_tool_name_that_is_no_string(tool: Any) -> None:
    """What a broken parser makes of a call raises nothing: it is counted, as that of `_other`."""
    registry = CollectorRegistry()
    call = Call("tool", tool, "a", agent="boss", thread_id="t1")
    assert quiet(registry).record([Decision(call, Outcome.ALLOWED)], started=0)
    labels = {"agent": "boss", "kind": "tool", "tool": "_other", "decision": "allowed"}
    assert registry.get_sample_value("langchain_quota_calls_total", labels) == 1
    assert errors(registry) == {("metrics", "TypeError"): 1}


@pytest.mark.parametrize(
    "make",
    [Unprintable, lambda: "\ud800", lambda: ""],
    ids=["unprintable", "a lone surrogate", "empty"],
)
def test_a_thread_without_a_text(make: Callable[[], object], signals: Signals) -> None:
    """An id that cannot be printed, encoded or seen neither raises nor breaks the scrape."""
    (decision,) = decide(thread=make())
    signals.recorder.record([decision], started=0)
    signals.recorder.record_charge(decision.call, decision.limits[0])
    signals.recorder.record_refunds([Refund(decision.call, LIMIT.name)])
    assert generate_latest(signals.registry)
    assert len(signals.spans()) == 1


def test_an_unprintable_thread_id_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """An id whose text raises is a failed thread label, counted each time, logged once."""
    registry = CollectorRegistry()
    recorder = quiet(registry)
    for used in range(2):
        recorder.record(decide(used, thread=Unprintable()), started=0)
    assert errors(registry) == {("thread_label", "ValueError"): 2}
    assert len(logged_errors(caplog)) == 1
    assert calls_total(registry) == 2


def test_an_unprintable_agent_name_changes_nothing() -> None:
    """A caller's metadata can hold any object as the agent's name: it is no reason to fail."""
    registry = CollectorRegistry()
    recorder = quiet(registry)
    (decision,) = decide(agent=Unprintable())
    recorder.record([decision], started=0)
    recorder.record_charge(decision.call, decision.limits[0])
    recorder.record_refunds([Refund(decision.call, LIMIT.name)])
    recorder.record_fallback(decision.call.agent, "deny", 1)
    assert errors(registry) == {("metrics", "ValueError"): 4}


def test_each_kind_of_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Failures of two kinds are two log lines; a traceback that may show an id is in neither."""

    def broken(thread_id: object) -> str:
        raise (KeyError if thread_id == "t1" else TypeError)(thread_id)

    recorder = quiet(thread_label=broken)
    for thread in ("t1", "t2", "t1", "t2"):
        recorder.record(decide(thread=thread), started=0)
    records = logged_errors(caplog)
    assert [record.getMessage().partition(";")[0] for record in records] == [
        "thread_label of langchain-quota failed with KeyError",
        "thread_label of langchain-quota failed with TypeError",
    ]
    assert [record.exc_info for record in records] == [None, None]


def test_a_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Where no thread's id is at stake the log has all that there is to find the cause."""
    error = KeyError("x")
    quiet().record_error("observer", error)
    (record,) = logged_errors(caplog)
    assert record.exc_info
    assert record.exc_info[1] is error


Entrance = Callable[[Recorder, Decision], object]

LABELLING: dict[str, Entrance] = {
    "record": lambda recorder, decision: recorder.record([decision], started=0),
    "record_charge": lambda recorder, decision: recorder.record_charge(
        decision.call, decision.limits[0]
    ),
    "record_refunds": lambda recorder, decision: recorder.record_refunds(
        [Refund(decision.call, LIMIT.name)]
    ),
    "reset": lambda recorder, decision: recorder.record_reset("boss", "t1", decision.limits),
}
"""What the middlewares tell of a thread."""

TELLING: dict[str, tuple[str, str, Entrance]] = {
    "observe_store": (
        "metrics",
        "observe_store",
        lambda recorder, _: recorder.observe_store("acquire", "ok", 0.1),
    ),
    "record_fallback": (
        "metrics",
        "fallback",
        lambda recorder, _: recorder.record_fallback("a", "deny", 1),
    ),
    "record_refunds": ("metrics", "refunded", LABELLING["record_refunds"]),
    "record_refunds on a thread": ("usage", "refund", LABELLING["record_refunds"]),
    "record_charge": ("metrics", "charged", LABELLING["record_charge"]),
    "record_charge on a thread": ("usage", "record", LABELLING["record_charge"]),
    "reset": ("usage", "reset", LABELLING["reset"]),
    "learn_tools": ("tools", "label", lambda recorder, _: recorder.learn_tools("boss", ["search"])),
}
"""What else they tell, and what may raise then."""

INTERRUPTS = [asyncio.CancelledError(), KeyboardInterrupt(), SystemExit(1)]
each_interrupt = pytest.mark.parametrize("error", INTERRUPTS, ids=repr)


@pytest.mark.parametrize("entrance", LABELLING)
@each_interrupt
def test_a_label_that_is_interrupted(entrance: str, error: BaseException) -> None:
    """What is no `Exception` passes through a `thread_label`, uncounted: a cancellation above all.

    Any exception ends there.
    """
    (decision,) = decide()
    registry = CollectorRegistry()
    with pytest.raises(type(error)):
        LABELLING[entrance](quiet(registry, thread_label=raising(error)), decision)
    assert errors(registry) == {}
    registry = CollectorRegistry()
    LABELLING[entrance](quiet(registry, thread_label=raising(LookupError("x"))), decision)
    assert errors(registry) == {("thread_label", "LookupError"): 1}


@pytest.mark.parametrize("entrance", TELLING)
@each_interrupt
def test_whatever_is_told_may_be_interrupted(
    entrance: str, error: BaseException, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way in passes on what is no `Exception`, and nothing else."""
    (decision,) = decide()
    part, method, tell = TELLING[entrance]
    owner = getattr(signals.recorder, f"_{part}")
    monkeypatch.setattr(owner, method, raising(error))
    with pytest.raises(type(error)):
        tell(signals.recorder, decision)
    assert errors(signals.registry) == {}
    monkeypatch.setattr(owner, method, raising(LookupError("x")))
    tell(signals.recorder, decision)
    counted = "threads" if part == "usage" else "metrics"
    assert errors(signals.registry) == {(counted, "LookupError"): 1}


class RaisingExporter(SpanExporter):
    """Fails when a span is exported."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise self._error


@each_interrupt
def test_an_exporter_that_is_interrupted(error: BaseException) -> None:
    """A cancellation that comes while a span is exported reaches the agent's task."""
    provider, registry = TracerProvider(), CollectorRegistry()
    provider.add_span_processor(SimpleSpanProcessor(RaisingExporter(error)))
    recorder = recording(registry=registry, tracer_provider=provider)
    with pytest.raises(type(error)):
        recorder.record(decide(), started=0)
    assert errors(registry) == {}


@each_interrupt
def test_a_log_handler_that_is_interrupted(error: BaseException) -> None:
    """So does one that comes while a crossing is logged, or a failure."""
    handler = logging.Handler()
    handler.emit = raising(error)  # type: ignore[method-assign]  # simpler than a class
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    recorder = quiet()
    try:
        with pytest.raises(type(error)):
            recorder.record(decide(9), started=0)
        with pytest.raises(type(error)):
            recorder.record_error("observer", LookupError("x"))
    finally:
        logger.removeHandler(handler)


HOSTILE = [17, b"bytes", "", "x" * 10_000, 'quo"te\\', "two\nlines", "\ud800", "\x00", None, "~"]


def test_a_hostile_scrape_stays_whole(signals: Signals) -> None:
    """Whatever thread ids and tool names come, both formats render, with bounded labels."""
    for value in HOSTILE:
        name = str(value)
        call = Call("tool", name, name, agent=name, thread_id=value)
        limit = ToolCallLimit(thread_limit=5)
        signals.recorder.record(judge([limit], {}, [call]).decisions, started=0)
    text = generate_latest(signals.registry).decode()
    values = [
        value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for value in sample.labels.values()
    ]
    assert max(len(value) for value in values) <= 64
    assert all(value.isprintable() and value for value in values)
    rendered: bytes = generate_openmetrics(signals.registry)  # type: ignore[no-untyped-call]
    assert rendered.endswith(b"# EOF\n")
    assert errors(signals.registry) == {}


@pytest.mark.parametrize("tool", ["s" * 200, "\ud800", "two\nlines"], ids=["long", "bad", "lines"])
def test_the_name_of_a_limit_is_a_safe_label(tool: str, signals: Signals) -> None:
    """A limit named after its tool is a bounded, printable label, whatever the tool's name."""
    limit = ToolCallLimit(tool, thread_limit=5)
    signals.recorder.watch_limits([limit])
    call = Call("tool", tool, "a", agent="boss", thread_id="t1")
    decisions = judge([limit], {}, [call]).decisions
    signals.recorder.record(decisions, started=0)
    signals.recorder.record_refunds([Refund(call, limit.name)])
    values = [
        value
        for family in signals.registry.collect()
        for sample in family.samples
        for value in sample.labels.values()
    ]
    assert [value for value in values if len(value) > 64 or not value.isprintable()] == []
    assert generate_latest(signals.registry)
    (span,) = signals.spans()
    limit_label = (span.attributes or {})["langchain_quota.limit"]
    assert str(limit_label).encode()


def test_an_enormous_limit_is_no_failure(signals: Signals) -> None:
    """A limit meant as none, as large as a machine word, is counted like any other."""
    limit = ToolCallLimit("search", thread_limit=sys.maxsize)
    signals.recorder.record(decide(limit=limit), started=0)
    signals.recorder.record(decide(1, limit=limit), started=0)
    labels = {"agent": "boss", "limit": "tool:search", "scope": "none", "decision": "allowed"}
    assert signals.value("langchain_quota_limit_decisions_total", **labels) == 2
    assert errors(signals.registry) == {}


def test_invented_tools_are_bounded() -> None:
    """A model that invents names by the thousand makes no more series than the bound."""
    registry = CollectorRegistry()
    recorder = quiet(registry, max_tools=3)
    recorder.watch_limits([ToolCallLimit("search", run_limit=1), ModelCallLimit(run_limit=1)])
    for tool in [*(f"invented-{index}" for index in range(1000)), "search"]:
        call = Call("tool", tool, "a", agent="boss")
        recorder.record([Decision(call, Outcome.ALLOWED)], started=0)
    assert tool_labels(registry) == {"invented-0", "invented-1", "invented-2", "_other", "search"}
    assert calls_total(registry) == 1001


def test_names_of_agents_are_bounded() -> None:
    """A process that names its agents anew for each request makes no more series than the bound.

    All series of the registry are counted, so that no metric can be forgotten.
    """
    registry = CollectorRegistry()
    recorder = quiet(registry, max_agents=3, max_tools=2, max_exported_threads=0)
    recorder.watch_limits([ToolCallLimit("search", run_limit=1)])
    found = []
    for agents in (range(10), range(10, 1000)):
        for index in agents:
            agent = f"agent-{index}"
            recorder.learn_tools(agent, ["search", f"own-{index}"])
            recorder.record_run(agent, None)
            recorder.record(decide(agent=agent), started=0)
            record_calls(recorder, f"own-{index}", agent=agent)
        found.append(sum(len(each.samples) for each in registry.collect()))
    assert found[0] == found[1]
    assert {
        sample.labels["agent"]
        for each in registry.collect()
        for sample in each.samples
        if "agent" in sample.labels
    } == {"agent-0", "agent-1", "agent-2", "_other"}
    assert calls_total(registry) == 2000


def test_logs_and_spans_name_every_agent(caplog: pytest.LogCaptureFixture) -> None:
    """The bound on labels of agents bounds metrics; logs and spans name the agent itself."""
    caplog.set_level(logging.DEBUG, "langchain_quota")
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    recorder = recording(
        registry=CollectorRegistry(),
        tracer_provider=provider,
        max_agents=0,
        count_unjudged_calls=True,
    )
    (refused,) = decide(10, agent="boss")
    recorder.record([refused], started=0)
    recorder.record_turn(refused, "search", 1.0)
    recorder.record_question("boss", ["search"])
    recorder.record_answer("boss", ["search"], Answer("reject"), None)
    recorder.record_unknown_price("boss", "model-1")
    recorder.warn_misspelt("boss", {"serach": "search"})
    assert recorder.unjudged is not None
    recorder.unjudged.record("boss", "model", 1)
    assert refused.outcome is Outcome.BLOCKED
    assert len(caplog.messages) >= 6
    assert all("agent 'boss'" in each for each in caplog.messages)
    spans = exporter.get_finished_spans()
    assert [(each.attributes or {})["gen_ai.agent.name"] for each in spans] == ["boss"]


def record_calls(recorder: Recorder, *tools: str, agent: str | None = "boss") -> None:
    for tool in tools:
        decision = Decision(Call("tool", tool, "a", agent=agent), Outcome.ALLOWED)
        recorder.record([decision], started=0)


def test_tools_that_an_agent_has_come_first() -> None:
    """What a model invents does not take the labels of the tools that its agent really has."""
    registry = CollectorRegistry()
    recorder = quiet(registry, max_tools=3)
    recorder.learn_tools("boss", ["search", "two words", "calc"])
    record_calls(recorder, "invented-0", "invented-1", "two words", "calc", "search")
    assert tool_labels(registry) == {"invented-0", "_other", "calc", "search"}


def test_tools_of_an_agent_without_a_name() -> None:
    """They are known under the agent's label, as its calls are."""
    registry = CollectorRegistry()
    recorder = quiet(registry, max_tools=1)
    recorder.learn_tools(None, ["search"])
    record_calls(recorder, "invented", "search", agent=None)
    assert tool_labels(registry) == {"_other", "search"}


def test_tools_that_cannot_be_learnt_change_nothing() -> None:
    """Names or agents of no use are counted as a failure, and raise nothing."""
    registry = CollectorRegistry()
    recorder = quiet(registry)
    names: Any = [5]
    agent: Any = Unprintable()
    recorder.learn_tools("boss", names)
    recorder.learn_tools(agent, ["search"])
    assert errors(registry) == {("metrics", "TypeError"): 1, ("metrics", "ValueError"): 1}


def test_tools_that_a_limit_excludes_keep_their_names() -> None:
    """A tool that a limit names as excluded is told apart at any number of names."""
    registry = CollectorRegistry()
    recorder = quiet(registry, max_tools=1)
    recorder.watch_limits([ToolCallLimit(exclude=["write_todos", "think"], run_limit=1)])
    record_calls(recorder, "invented-0", "invented-1", "write_todos", "think")
    assert tool_labels(registry) == {"invented-0", "_other", "write_todos", "think"}


def test_a_thread_that_was_reset_has_used_nothing(signals: Signals) -> None:
    """The series of one agent's thread go on at 0; what was counted stays."""
    signals.recorder.record(decide(9), started=0)
    signals.recorder.record(decide(9, thread="t2"), started=0)
    signals.recorder.record_reset("boss", "t1", [])
    labels = {"agent": "boss", "limit": "tool:search", "thread_id": "t1"}
    assert signals.value("langchain_quota_thread_used", **labels) == 0
    assert signals.value("langchain_quota_thread_used", **labels | {"thread_id": "t2"}) == 10
    assert calls_total(signals.registry) == 2
    signals.recorder.record(decide(), started=0)
    assert signals.value("langchain_quota_thread_used", **labels) == 1


def test_a_hidden_thread_is_reset() -> None:
    """A thread is reset by its id, whatever it is labelled."""
    registry = CollectorRegistry()
    recorder = quiet(registry, thread_label=hmac_label("0123456789abcdef"))
    recorder.record(decide(), started=0)
    recorder.record_reset("boss", "t1", [])
    samples = [each for family in registry.collect() for each in family.samples]
    used = [each for each in samples if each.name == "langchain_quota_thread_used"]
    assert [each.value for each in used] == [0]


@pytest.mark.parametrize("thread_id", [None, "t9", Unprintable()], ids=["none", "unknown", "odd"])
def test_there_may_be_nothing_to_reset(thread_id: object, signals: Signals) -> None:
    """Resetting a thread that is not known leaves the others alone, and raises nothing."""
    signals.recorder.record(decide(), started=0)
    signals.recorder.record_reset("boss", thread_id, [])
    labels = {"agent": "boss", "limit": "tool:search", "thread_id": "t1"}
    assert signals.value("langchain_quota_thread_used", **labels) == 1


def test_a_copy_is_the_same() -> None:
    """What is copied with a middleware counts in the same place as the original."""
    recorder = quiet()
    assert copy.deepcopy([recorder])[0] is recorder


def test_a_thread_has_series(signals: Signals) -> None:
    """What a thread has used, of how much, is read under its id."""
    signals.recorder.record(decide(9, 2), started=0)
    labels = {"agent": "boss", "limit": "tool:search", "thread_id": "t1"}
    assert signals.value("langchain_quota_thread_used", **labels) == 10
    assert signals.value("langchain_quota_thread_limit", **labels) == 10
    assert signals.value("langchain_quota_thread_blocked_total", **labels) == 1


def test_a_call_without_a_thread_has_none(signals: Signals) -> None:
    """Without a thread's id there is a count and no thread series."""
    signals.recorder.record(decide(thread=None), started=0)
    assert calls_total(signals.registry) == 1
    assert "thread_id=" not in generate_latest(signals.registry).decode()


def test_a_thread_label_hides_ids() -> None:
    """With a keyed label the series can be found by whoever has the key, and the id is unseen."""
    registry, hide = CollectorRegistry(), hmac_label("0123456789abcdef")
    recorder = quiet(registry, thread_label=hide)
    recorder.record(decide(thread="ada@example.org"), started=0)
    labels = {"agent": "boss", "limit": "tool:search", "thread_id": hide("ada@example.org")}
    assert registry.get_sample_value("langchain_quota_thread_used", labels) == 1
    assert "ada@example.org" not in generate_latest(registry).decode()


def test_a_thread_label_is_given_the_raw_id_and_bounded() -> None:
    """The function sees the id as the caller gave it, and what it returns is a safe label."""
    seen: list[object] = []

    def long(thread_id: object) -> str:
        seen.append(thread_id)
        return "y" * 1000

    registry = CollectorRegistry()
    quiet(registry, thread_label=long).record(decide(thread=17), started=0)
    assert seen == [17]
    assert "y" * 65 not in generate_latest(registry).decode()


def test_a_refund_is_told(signals: Signals) -> None:
    """A charge taken back is counted and lowers what its thread has used."""
    decisions = decide(4)
    signals.recorder.record(decisions, started=0)
    signals.recorder.record_refunds([Refund(decisions[0].call, LIMIT.name)])
    labels = {"agent": "boss", "limit": "tool:search", "scope": "none", "decision": "refunded"}
    assert signals.value("langchain_quota_limit_decisions_total", **labels) == 1
    labels = {"agent": "boss", "limit": "tool:search", "thread_id": "t1"}
    assert signals.value("langchain_quota_thread_used", **labels) == 4
    assert len(signals.spans()) == 1


def test_a_charge_after_the_fact_is_told(
    signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """A call charged when it returned counts as charged, crosses thresholds, has no new span."""
    caplog.set_level(logging.INFO, LOGGER)
    limit = ModelCallLimit(thread_limit=10)
    call = Call("model", agent="boss", thread_id="t1")
    judged = judge([limit], {"model": Used(9, 9)}, [call], charging=False)
    signals.recorder.record(judged.decisions, started=0)
    labels = {"agent": "boss", "limit": "model", "thread_id": "t1"}
    assert signals.value("langchain_quota_thread_used", **labels) == 9
    assert caplog.records == []
    charged = judge([limit], {"model": Used(9, 9)}, [call], stops=False).decisions[0].limits[0]
    signals.recorder.record_charge(call, charged)
    assert signals.value("langchain_quota_thread_used", **labels) == 10
    assert calls_total(signals.registry) == 1
    labels = {"agent": "boss", "limit": "model", "scope": "none", "decision": "allowed"}
    assert signals.value("langchain_quota_limit_decisions_total", **labels) == 1
    labels = {"agent": "boss", "limit": "model", "scope": "thread"}
    assert signals.value("langchain_quota_exhausted_total", **labels) == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert len(signals.spans()) == 1


def test_a_rerun_tells_nothing_again(signals: Signals) -> None:
    """A task that runs again (a failed node, resumed) has recorded its decisions already."""
    (decision,) = decide()
    with captured_decisions() as captured:
        for _ in range(2):
            signals.recorder.record([decision], started=0, task_id="task")
            signals.recorder.record_charge(decision.call, decision.limits[0], task_id="task/model")
        signals.recorder.record([decision], started=0, task_id="other")
    assert calls_total(signals.registry) == 2
    assert len(signals.spans()) == len(captured) == 2
    labels = {"agent": "boss", "limit": "tool:search", "scope": "none", "decision": "allowed"}
    assert signals.value("langchain_quota_limit_decisions_total", **labels) == 3


def test_a_rerun_that_decides_otherwise_is_told(signals: Signals) -> None:
    """A task that runs again with a changed limit decides anew: both decisions are recorded."""
    allowed, blocked = decide(9, 2)
    told = [
        signals.recorder.record([decision], started=0, task_id="task")
        for decision in (allowed, allowed, blocked, blocked, allowed)
    ]
    assert [each.is_new for each in told] == [True, False, True, False, True]
    labels = {"agent": "boss", "kind": "tool", "tool": "search"}
    name = "langchain_quota_calls_total"
    assert signals.value(name, **labels, decision="allowed") == 2
    assert signals.value(name, **labels, decision="blocked") == 1
    assert len(signals.spans()) == 3


def test_the_memory_of_tasks_is_bounded() -> None:
    """The newest tasks are always remembered, and at most twice as many as must be."""
    tasks, least = RecentTasks(), RecentTasks.LEAST
    most = 0
    for number in range(3 * least):
        assert not tasks.seen(str(number))
        assert tasks.seen(str(max(0, number - least + 1)))
        most = max(most, len(tasks._newer) + len(tasks._older))
    assert least < most <= 2 * least
    assert not tasks.seen("0")


class Yielding(str):
    """A name at which the thread lets others run whenever it is looked up."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()


def test_a_task_in_many_threads_at_once_is_seen_once() -> None:
    """Where one paused run is resumed several times at once, one of them is new, the others not.

    The second question is the same tasks again with another outcome.
    """
    tasks, threads, names = RecentTasks(), 4, [Yielding(number) for number in range(500)]
    begin = Barrier(threads)

    def new(what: str) -> int:
        begin.wait()
        return sum([not tasks.seen(name, what) for name in names])

    with ThreadPoolExecutor(threads) as pool:
        for what in ("allowed", "blocked"):
            assert sum(pool.map(new, [what] * threads)) == len(names)


def test_tasks_without_an_id_are_all_told(signals: Signals) -> None:
    """Hooks that are called directly have no task, and each call tells."""
    for _ in range(2):
        signals.recorder.record(decide(), started=0, task_id=None)
    assert calls_total(signals.registry) == 2


def test_nothing_decided_is_nothing_told(signals: Signals) -> None:
    """An empty batch makes neither series nor spans."""
    signals.recorder.record([], started=0)
    signals.recorder.record_refunds([])
    assert calls_total(signals.registry) == 0
    assert signals.spans() == []


def test_two_telemetries_share_a_registry() -> None:
    """A second Telemetry with the same options counts into the same metrics."""
    registry = CollectorRegistry()
    first = quiet(registry, thread_label=hmac_label("0123456789abcdef"))
    second = quiet(registry, thread_label=hmac_label("0123456789abcdef"), spans="off")
    first.record(decide(), started=0)
    second.record(decide(1), started=0)
    assert calls_total(registry) == 2


def upper(thread_id: object) -> str:
    return str(thread_id).upper()


@pytest.mark.parametrize(
    ("option", "ours", "theirs"),
    [
        ("near", 0.9, 0.8),
        ("thread_label", upper, None),
        ("subject_label", {"tenant": upper}, {}),
        ("max_exported_threads", 5, 500),
        ("max_exported_subjects", 5, 100),
        ("thread_ttl", timedelta(minutes=5), timedelta(hours=1)),
        ("max_tools", 7, 100),
        ("max_agents", 7, 1000),
    ],
)
def test_conflicting_options_are_refused(option: str, ours: Any, theirs: Any) -> None:
    """Options that shape shared metrics must agree; the error names the option and both values."""
    registry = CollectorRegistry()
    quiet(registry)
    with pytest.raises(ValueError, match=option) as caught:
        quiet(registry, **{option: ours})
    assert f"{option}={ours!r}" in str(caught.value)
    assert f"{option}={theirs!r}" in str(caught.value)


def test_the_default_is_one_object() -> None:
    """Middlewares that are given no Telemetry share one for the process."""
    assert default_telemetry() is default_telemetry()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("near", "0.8"),
        ("near", True),
        ("near", None),
        ("registry", None),
        ("registry", CollectorRegistry),
        ("tracer_provider", "x"),
        ("tracer_provider", TracerProvider),
        ("thread_label", "hidden"),
        ("thread_ttl", 3600),
        ("max_exported_subjects", "100"),
        ("thread_ttl", None),
        ("max_exported_threads", 1.5),
        ("max_exported_threads", True),
        ("max_exported_threads", None),
        ("max_tools", "100"),
        ("max_tools", False),
        ("max_agents", "1000"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused(option: str, value: Any) -> None:
    """A TypeError names the option and the value."""
    options = {"registry": CollectorRegistry(), option: value}
    with pytest.raises(TypeError, match=f"^{option} must be") as caught:
        Telemetry(**options)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("near", 0),
        ("near", -0.1),
        ("near", 1.1),
        ("near", float("nan")),
        ("spans", "some"),
        ("spans", None),
        ("thread_ttl", timedelta(0)),
        ("thread_ttl", timedelta(seconds=-1)),
        ("max_exported_threads", -1),
        ("max_tools", -1),
        ("max_agents", -1),
    ],
)
def test_an_option_out_of_bounds_is_refused(option: str, value: Any) -> None:
    """A ValueError names the option and the value."""
    with pytest.raises(ValueError, match=option) as caught:
        quiet(**{option: value})
    assert repr(value) in str(caught.value)


def test_a_refused_option_leaves_the_registry_alone() -> None:
    """After an error the registry can be given to another Telemetry."""
    registry = CollectorRegistry()
    with pytest.raises(ValueError, match="near"):
        quiet(registry, near=2)
    assert list(registry.collect()) == []
    assert quiet(registry)


@pytest.mark.parametrize(
    "options",
    [{"near": 1}, {"near": 0.01}, {"max_exported_threads": 0, "max_tools": 0}],
    ids=str,
)
def test_the_ends_of_the_bounds_are_allowed(options: dict[str, Any]) -> None:
    """A share of 1, and bounds of 0, are options like others."""
    registry = CollectorRegistry()
    quiet(registry, **options).record(decide(), started=0)
    assert calls_total(registry) == 1


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str, str]]:
    """Level, event and scope of each log line."""
    return [
        (record.levelno, vars(record)["quota_event"], vars(record)["quota_scope"])
        for record in caplog.records
    ]


def test_near_is_the_option(caplog: pytest.LogCaptureFixture) -> None:
    """The share given is that from which a limit counts as near."""
    caplog.set_level(logging.INFO, LOGGER)
    quiet(near=0.5).record(decide(4), started=0)
    quiet(near=0.6).record(decide(4), started=0)
    assert events(caplog) == [(logging.INFO, "near", "thread"), (logging.INFO, "near", "run")]


def test_crossings_and_refusals_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Near is INFO, exhausted WARNING, a refusal DEBUG; other calls are not logged."""
    caplog.set_level(logging.DEBUG, LOGGER)
    recorder, limit = quiet(), ToolCallLimit("search", run_limit=10)
    for used in (6, 7, 8, 9, 10, 10):
        recorder.record(decide(used, limit=limit), started=0)
    assert events(caplog) == [
        (logging.INFO, "near", "run"),
        (logging.WARNING, "exhausted", "run"),
        (logging.DEBUG, "refused", "run"),
        (logging.DEBUG, "refused", "run"),
    ]


def test_a_limit_on_trial_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """What it would refuse is DEBUG and says so; it is never near or exhausted."""
    caplog.set_level(logging.DEBUG, LOGGER)
    limit = ToolCallLimit("search", run_limit=2, enforce=False)
    quiet().record(decide(calls=3, limit=limit), started=0)
    assert events(caplog) == [(logging.DEBUG, "would refuse", "run")]
    assert "would refuse" in caplog.records[0].getMessage()


def test_a_limits_own_near_goes_before_the_option(caplog: pytest.LogCaptureFixture) -> None:
    """Of two limits on one count each is near by its own share."""
    caplog.set_level(logging.INFO, LOGGER)
    for near in (0.5, 0.6, None):
        limit = ToolCallLimit("search", run_limit=10, near=near)
        quiet(near=0.9).record(decide(4, limit=limit), started=0)
    assert events(caplog) == [(logging.INFO, "near", "run")]


def test_a_log_line_names_the_run_limit(caplog: pytest.LogCaptureFixture) -> None:
    """Whose numbers they are is said by the argument's name."""
    caplog.set_level(logging.INFO, LOGGER)
    quiet().record(decide(7, limit=ToolCallLimit("search", run_limit=10)), started=0)
    assert caplog.messages == [
        "limit 'tool:search' near: agent 'boss', thread 't1', 8 of 10 (run_limit)"
    ]


def test_a_log_line_names_calls_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The limit of calls at once is no quota, though it is counted like one."""
    caplog.set_level(logging.DEBUG, LOGGER)
    ((status,),) = (each.limits for each in decide())
    at_once = QuotaStatus("at_once", "", 2, 3, 2, per="at_once")
    log_refusal(replace(status, quotas=(at_once,)), "at_once", "boss", "t1")
    assert caplog.messages[0].endswith("thread 't1', 3 of 2 (at_once)")


def test_a_log_line_can_be_read_and_queried(caplog: pytest.LogCaptureFixture) -> None:
    """The message tells limit, agent, thread, scope and counts; `extra` has each as a field."""
    caplog.set_level(logging.INFO, LOGGER)
    quiet().record(decide(7, limit=ToolCallLimit("search", thread_limit=10)), started=0)
    (record,) = caplog.records
    assert record.name == LOGGER
    assert record.getMessage() == (
        "limit 'tool:search' near: agent 'boss', thread 't1', 8 of 10 (thread_limit)"
    )
    fields = {key: value for key, value in vars(record).items() if key.startswith("quota_")}
    assert fields == {
        "quota_event": "near",
        "quota_limit": "tool:search",
        "quota_scope": "thread",
        "quota_agent": "boss",
        "quota_thread": "t1",
        "quota_used": 8,
        "quota_threshold": 10,
        "quota_unit": "calls",
    }


def test_no_id_can_forge_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """Line breaks in a thread's id, a tool's name or an agent's name stay within the line."""
    caplog.set_level(logging.DEBUG, LOGGER)
    forged = "x\nWARNING langchain_quota: all is well\u2028"
    limit = ToolCallLimit(forged, thread_limit=0)
    call = Call("tool", forged, "a", agent=forged, thread_id=forged)
    quiet().record(judge([limit], {}, [call]).decisions, started=0)
    (record,) = caplog.records
    assert len(record.getMessage().splitlines()) == 1


def test_a_hidden_thread_is_hidden_in_logs(caplog: pytest.LogCaptureFixture) -> None:
    """With a `thread_label` the log has the label, never the id."""
    caplog.set_level(logging.DEBUG, LOGGER)
    recorder = quiet(thread_label=hmac_label("0123456789abcdef"))
    recorder.record(decide(9, 2, thread="ada@example.org"), started=0)
    assert caplog.records
    for record in caplog.records:
        assert "ada@example.org" not in record.getMessage()
        assert "ada@example.org" not in vars(record).values()


DAILY = ResolvedQuota("user_id", 5, "ada@example.org", "user", datetime(2999, 1, 1, tzinfo=UTC))


def stored(
    *quotas: ResolvedQuota,
    used: int = 0,
    calls: int = 1,
    outage: Outage | None = None,
    **options: Any,
) -> Sequence[Decision]:
    """What is decided about calls whose quotas a store has counted up to so much."""
    own = [Quota(each.limit, per=each.scope) for each in quotas]
    limit = ToolCallLimit("email", quotas=own, **options)
    batch = [
        Call("tool", "email", str(index), agent="boss", thread_id="t1") for index in range(calls)
    ]
    thread = used if any(each.is_threads for each in quotas) else 0
    counted = {"email": Used(thread, quotas=(used,) * len(quotas))}
    resolved = ResolvedLimit.of(limit, quotas=quotas)
    return judge([resolved], counted, batch, outage=outage).decisions


def subjects(signals: Signals, scope: str) -> dict[str, float | None]:
    labels = {"agent": "boss", "limit": "tool:email", "scope": scope}
    name = "langchain_quota_subjects"
    return {
        state: signals.value(name, **labels, state=state) for state in ("ok", "near", "exhausted")
    }


def test_crossings_of_quotas_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A quota is near, exhausted and refuses like any threshold, under its scope."""
    caplog.set_level(logging.DEBUG, LOGGER)
    quiet().record(stored(DAILY, used=3, calls=3), started=0)
    assert events(caplog) == [
        (logging.INFO, "near", "user_id"),
        (logging.WARNING, "exhausted", "user_id"),
        (logging.DEBUG, "refused", "user_id"),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"limit 'tool:email' {event}: agent 'boss', thread 't1', {used} of 5 (quota 'user_id')"
        for event, used in (("near", 4), ("exhausted", 5), ("refused", 5))
    ]


def test_users_are_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whose quota it is stays out of the lines and their fields."""
    caplog.set_level(logging.DEBUG, LOGGER)
    quiet().record(stored(DAILY, used=3, calls=3), started=0)
    assert caplog.records
    assert not any("ada" in repr(vars(record)) for record in caplog.records)


def test_a_refusal_is_logged_with_its_windows_end(caplog: pytest.LogCaptureFixture) -> None:
    """A refused call's record says when the window ends; `None` where there is no window."""
    caplog.set_level(logging.DEBUG, LOGGER)
    without = ResolvedQuota("tenant", 5, "acme", "tenant")
    for quota in (DAILY, without):
        quiet().record(stored(quota, used=5), started=0)
    quiet().record(decide(10), started=0)
    found = [vars(record) for record in caplog.records]
    assert [(each["quota_scope"], each["quota_resets_at"]) for each in found] == [
        ("user_id", "2999-01-01T00:00:00+00:00"),
        ("tenant", None),
        ("thread", None),
    ]


def test_a_refusal_without_the_store_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """It tells no count, since none is known."""
    caplog.set_level(logging.DEBUG, LOGGER)
    quiet().record(stored(DAILY, outage="deny"), started=0)
    (record,) = caplog.records
    assert record.getMessage() == (
        "limit 'tool:email' refused: agent 'boss', thread 't1', store unavailable"
    )
    fields = ("quota_scope", "quota_used", "quota_threshold", "quota_resets_at")
    assert [vars(record)[each] for each in fields] == ["store", None, None, None]


def test_users_are_counted_by_state(signals: Signals) -> None:
    """Users by how much of their quota they have used, threads or none; an outage changes none."""
    assert subjects(signals, "user_id") == {"ok": None, "near": None, "exhausted": None}
    signals.recorder.record(stored(DAILY, used=3), started=0)
    assert subjects(signals, "user_id") == {"ok": 0, "near": 1, "exhausted": 0}
    signals.recorder.record(stored(DAILY, used=5), started=0)
    signals.recorder.record(stored(DAILY, outage="deny"), started=0)
    assert subjects(signals, "user_id") == {"ok": 0, "near": 0, "exhausted": 1}
    assert subjects(signals, "thread") == {"ok": None, "near": None, "exhausted": None}


def test_users_are_counted_without_a_thread(signals: Signals) -> None:
    """An agent without a thread, or with an id that cannot be shown, still has users."""
    (decision,) = stored(DAILY)
    for thread_id in (None, Unprintable()):
        call = Call("tool", "email", "a", agent="boss", thread_id=thread_id)
        signals.recorder.record([Decision(call, Outcome.ALLOWED, decision.limits)], started=0)
    assert subjects(signals, "user_id") == {"ok": 1, "near": 0, "exhausted": 0}


def test_users_are_counted_as_near_by_the_option() -> None:
    """The share given to `Telemetry` is that of users, too."""
    registry = CollectorRegistry()
    recorder = quiet(registry, near=0.4)
    recorder.record(stored(DAILY, used=1), started=0)
    labels = {"agent": "boss", "limit": "tool:email", "scope": "user_id", "state": "near"}
    assert registry.get_sample_value("langchain_quota_subjects", labels) == 1


def test_a_charge_after_the_fact_counts_a_user(signals: Signals) -> None:
    """A call that is charged when it returned moves its user then."""
    (decision,) = stored(DAILY, used=4)
    signals.recorder.record_charge(decision.call, decision.limits[0])
    assert subjects(signals, "user_id") == {"ok": 0, "near": 0, "exhausted": 1}


def test_a_refund_with_quotas(signals: Signals) -> None:
    """It counts as before, and the thread's quota has the call back."""
    quota = ResolvedQuota("thread", 5, "t1", "t1", per="thread")
    (decision,) = stored(quota, used=3)
    signals.recorder.record([decision], started=0)
    signals.recorder.record_refunds([Refund(decision.call, "tool:email")])
    labels = {"agent": "boss", "limit": "tool:email", "scope": "none", "decision": "refunded"}
    assert signals.value("langchain_quota_limit_decisions_total", **labels) == 1
    labels = {"agent": "boss", "limit": "tool:email", "thread_id": "t1"}
    assert signals.value("langchain_quota_thread_used", **labels) == 3


def test_who_knows_when_a_failure_is_over_says_when_to_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is counted; what must be logged is, also of a kind that was, and nothing else."""
    registry = CollectorRegistry()
    recorder = quiet(registry)
    for log in (False, True, False, None, True):
        recorder.record_error("store", ConnectionError("refused"), log=log)
    assert errors(registry) == {("store", "ConnectionError"): 5}
    assert len(logged_errors(caplog)) == 2
    assert all("ConnectionError" in record.getMessage() for record in logged_errors(caplog))


def test_a_recovery_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever saw the failure, at the default level, sees that it is over."""
    quiet().record_recovery("store")
    (record,) = caplog.records
    assert (record.name, record.levelno) == (LOGGER, logging.WARNING)
    assert record.getMessage() == "store of langchain-quota works again"


@pytest.mark.parametrize("broken", [raising_filter, raising_handler])
def test_failing_logging_of_an_outage_changes_nothing(broken: Any) -> None:
    """Where logging raises, an outage and its end are counted, and the agent goes on."""
    registry = CollectorRegistry()
    recorder = quiet(registry)
    with broken():
        recorder.record_error("store", ConnectionError("refused"), log=True)
        recorder.record_recovery("store")
    assert errors(registry) == {("store", "ConnectionError"): 1, ("observer", "RuntimeError"): 1}


def test_a_limit_beyond_all_floats_changes_nothing(signals: Signals) -> None:
    """What cannot be computed of a limit is counted as a failure, and not raised."""
    limit = ModelCallLimit(thread_limit=10**400)
    judged = judge([limit], {}, [Call("model", thread_id="t")])
    signals.recorder.record(judged.decisions, started=0)
    assert calls_total(signals.registry) == 1
    assert ("metrics", "OverflowError") in errors(signals.registry)
