"""What fails in telemetry, or in functions that users gave it, never fails an agent."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.sampling import Sampler
from prometheus_client import Counter, generate_latest

from langchain_quota import (
    ConcurrencyLimit,
    Decision,
    MemoryStore,
    ModelCallLimit,
    Quota,
    TokenLimit,
    ToolCallLimit,
)
from tests.scene import Form, Scene
from tests.stores import FickleStore
from tests.telemetry import Signals, telling

LOGGER = logging.getLogger("langchain_quota")
ADA = "ada@example.org"
ERRORS = "langchain_quota_errors_total"
LIMIT = ToolCallLimit("search", thread_limit=1, quotas=[Quota(1, per="user_id")])
BASES: dict[str, type] = {
    "should_sample": Sampler,
    "on_start": SpanProcessor,
    "on_end": SpanProcessor,
    "emit": logging.Handler,
}
SIGNALS = {"calls", "exhausted", "span", "log", "thread", "user"}


def breaking(part: str, error: BaseException, patch: pytest.MonkeyPatch) -> Signals:
    """Telemetry of which a part raises: what users gave it, or a counter."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    own = {part: fail, "get_description": lambda _: "broken"}
    broken: Any = type("Broken", (BASES.get(part, object),), own)()
    given: dict[str, dict[str, Any]] = {
        "thread_label": {"thread_label": fail},
        "subject_label": {"subject_label": {"user_id": fail}},
        "should_sample": {"sampler": broken},
    }
    signals = telling(**{"subject_label": {"user_id": str}, **given.get(part, {})})
    if part in ("on_start", "on_end"):
        signals.provider.add_span_processor(broken)
    elif part == "emit":
        patch.setattr(LOGGER, "handlers", [broken])
    elif part == "filter":
        patch.setattr(LOGGER, "filters", [fail])
    inc = Counter.inc

    def inc_others(counter: Counter, *given: Any, **named: Any) -> None:
        if f"({part}" in repr(counter):
            raise error
        inc(counter, *given, **named)

    patch.setattr(Counter, "inc", inc_others)
    return signals


def searching(signals: Signals, form: Form = "async") -> Scene:
    """An agent that uses up the limits of a thread and of a user with its first search."""
    return Scene(
        signals,
        lambda messages: ["search", "search"] if messages[-1].type == "human" else "done",
        [LIMIT],
        form=form,
        store=MemoryStore(),
        context={"user_id": ADA},
        thread_id=ADA,
    )


def told(signals: Signals, caplog: pytest.LogCaptureFixture) -> set[str]:
    """The signals that there are of the search that ran."""
    exhausted = signals.samples("langchain_quota_crossings_total", level="exhausted")
    levels = [each.levelno for each in caplog.records]
    found = {
        "calls": sum(signals.samples("langchain_quota_calls_total", tool="search").values()) == 2,
        "exhausted": set(exhausted.values()) == {1},
        "span": [each for each in signals.decision_spans() if each.name.endswith(" search")],
        "log": levels.count(logging.WARNING) == 2,
        "thread": signals.samples("langchain_quota_thread_used"),
        "user": signals.samples("langchain_quota_subject_used"),
    }
    return {name for name, is_told in found.items() if is_told}


PARTS = [
    ("thread_label", "thread_label", {"thread"}),
    ("subject_label", "subject_label", {"user"}),
    ("should_sample", "tracing", {"span"}),
    ("on_start", "tracing", {"span"}),
    ("on_end", "tracing", set()),
    ("emit", "observer", {"log"}),
    ("filter", "observer", {"log"}),
    ("langchain_quota_calls", "metrics", {"calls"}),
    ("langchain_quota_limit_decisions", "metrics", set()),
    ("langchain_quota_crossings", "metrics", {"exhausted"}),
    ("langchain_quota", None, {"calls", "exhausted"}),
]


@pytest.mark.parametrize(("part", "component", "missing"), PARTS, ids=[row[0] for row in PARTS])
async def test_a_part_that_fails_costs_its_own_signal(
    part: str,
    component: str | None,
    missing: set[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent is limited as ever; the failure is counted, logged once, and shows no id."""
    caplog.set_level(logging.WARNING, LOGGER.name)
    signals = breaking(part, LookupError(ADA), monkeypatch)
    scene = searching(signals)
    await scene.play()
    assert scene.ran == ["search"]
    assert sorted(scene.answers()) == [("search", "error"), ("search", "success")]
    assert told(signals, caplog) == SIGNALS - missing
    counted = signals.samples(ERRORS, error_type="LookupError")
    errors = {name for (name,), value in counted.items() if value}
    assert errors == ({component} if component else set())
    failures = [each for each in caplog.records if each.levelno == logging.ERROR]
    if component == "observer":
        return
    assert len(failures) == 1
    # Its traceback could show the id.
    assert bool(failures[0].exc_info) != part.endswith("_label")
    assert ADA not in failures[0].getMessage()


async def test_a_failure_between_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails outside of every part, here a label for all of them, is counted as well."""

    def fail(*_: object) -> str:
        raise LookupError

    signals = telling()
    scene = searching(signals)
    monkeypatch.setattr("langchain_quota.telemetry.labels.BoundedLabels.__getitem__", fail)
    await scene.play()
    assert scene.ran == ["search"]
    assert sorted(scene.answers()) == [("search", "error"), ("search", "success")]
    assert signals.errors("metrics", "LookupError")


@pytest.mark.parametrize("part", [row[0] for row in PARTS])
@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
async def test_no_part_swallows_an_interrupt(
    part: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation or an interrupt that comes while a part is at work ends the run."""
    # LangGraph makes an error of its own of a cancellation that a node raises.
    signals = breaking(part, error(), monkeypatch)
    scene = searching(signals, form="sync")
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - of which type is said below
        await scene.play()
    assert error in {type(caught.value), type(caught.value.__cause__)}
    assert scene.ran == []
    assert signals.samples(ERRORS) == {}


async def test_a_label_that_is_no_string() -> None:
    """It is a failed label: no thread has series, not even one called None."""
    for made in (None, 17, b"bytes"):
        signals = telling(thread_label=lambda _, made=made: made, subject_label={"user_id": str})
        await searching(signals).play()
        assert signals.samples(ERRORS) == {("thread_label", "TypeError"): 1}
        assert signals.samples("langchain_quota_thread_used") == {}


async def test_a_limit_beyond_all_floats(signals: Signals) -> None:
    """What cannot be computed of a limit is counted as a failure, and the agent goes on."""
    scene = await Scene(signals, ["done"], [ModelCallLimit(thread_limit=10**400)]).played()
    assert scene.calls("allowed") == 1
    assert generate_latest(signals.registry)
    assert ("metrics", "OverflowError") in signals.samples(ERRORS)


def message_that_fails(_: Decision) -> str:
    raise ZeroDivisionError("boom")


FAILS: Any = {"message": message_that_fails}


@pytest.mark.parametrize(
    ("limit", "outcomes"),
    [
        (ToolCallLimit("search", run_limit=1, **FAILS), {"blocked": 1, "skipped": 2}),
        (ModelCallLimit(run_limit=0, **FAILS), {"blocked": 1}),
        (TokenLimit(run_limit=5, reserve=lambda _: 10, **FAILS), {"blocked": 1}),
        (ConcurrencyLimit("calc", max_concurrency=1, **FAILS), {"blocked": 1}),
    ],
)
async def test_a_message_that_fails(
    limit: Any, outcomes: Mapping[str, int], signals: Signals
) -> None:
    """An error in a limit's message ends the run; the refusal that it is for is recorded."""
    kind = "tool" if "tool" in limit.kinds else "model"
    # What a dry run would let pass does not run, either.
    others = [
        ToolCallLimit("calc", run_limit=0, enforce=False),
        ModelCallLimit(thread_limit=9, name="all"),
    ]
    limits = [limit, others[kind == "model"]]
    script = [["search", "search", "calc"]] if kind == "tool" else ["done"]
    store = FickleStore(MemoryStore())
    if isinstance(limit, ConcurrencyLimit):
        # No slot is to be had, and the counts of the run are not asked for.
        limits, script, store.down = [limit], [["calc"]], True
    scene = Scene(signals, script, limits, store=store)
    with pytest.raises(ZeroDivisionError, match="boom") as raised:
        await scene.play()
    assert raised.value.__notes__[0] == f"raised by the message of limit {limit.name!r}"
    for outcome, number in outcomes.items():
        found = signals.samples("langchain_quota_calls_total", kind=kind, decision=outcome)
        assert sum(found.values()) == number
    assert [each.status.description for each in signals.decision_spans()].count("boom") == 1
    # No call has run.
    assert {each.used for each in store.usages()} <= {0}


async def test_a_message_that_is_no_text(signals: Signals) -> None:
    """It is an error that names the limit."""
    no_text: Any = lambda _: None  # noqa: E731 - a message is a function
    scene = Scene(signals, [["search"]], [ToolCallLimit("search", run_limit=0, message=no_text)])
    with pytest.raises(TypeError, match="message of limit 'tool:search' must return a string"):
        await scene.play()
