"""Telemetry as a whole: it tells everything, shares its metrics, and never breaks the agent."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from opentelemetry.trace import NoOpTracerProvider
from prometheus_client import CollectorRegistry, generate_latest

from langchain_quota import (
    Call,
    Decision,
    ModelCallLimit,
    Outcome,
    Telemetry,
    ToolCallLimit,
    hmac_label,
)
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.resolved import Outage, ResolvedLimit, ResolvedQuota
from langchain_quota.telemetry import charges, recorder_of
from langchain_quota.telemetry import recorder as recorder_module
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


def test_a_limit_beyond_all_floats_changes_nothing(signals: Signals) -> None:
    """What cannot be computed of a limit is counted as a failure, and not raised."""
    limit = ModelCallLimit(thread_limit=10**400)
    judged = judge([limit], {}, [Call("model", thread_id="t")])
    signals.recorder.record(judged.decisions, started=0)
    assert calls_total(signals.registry) == 1
    assert ("metrics", "OverflowError") in errors(signals.registry)
