"""The span of a checked call: when there is one, what it says, its trace, and what leads to it."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import pytest
from langchain_core.messages import BaseMessage
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, Sampler, SamplingResult
from opentelemetry.trace import (
    NoOpTracerProvider,
    SpanContext,
    SpanKind,
    StatusCode,
    format_span_id,
)

from langchain_quota import (
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Price,
    Quota,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
    __version__,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, Kind, Scene, both_forms
from tests.stores import DAY, RESETS, Clock, FickleStore, patch_pauses
from tests.telemetry import Signals, attributes, needs_inline, paid, telling

KINDS_OF_SPANS = {"openinference.span.kind": "GUARDRAIL", "langfuse.observation.type": "guardrail"}
OF_RUN = {"gen_ai.conversation.id": "thread-1", "gen_ai.agent.name": "researcher", **KINDS_OF_SPANS}
OF_TOOL = {**OF_RUN, "kind": "tool", "gen_ai.tool.name": "search"}


async def played(signals: Signals, script: Any, *limits: Limit, **options: Any) -> Scene:
    """A run of an agent with a name."""
    return await Scene(signals, script, limits, **{"name": "researcher", **options}).played()


def decisions(signals: Signals) -> list[str]:
    return [attributes(span)["decision"] for span in signals.decision_spans()]


def of_tools(signals: Signals) -> list[ReadableSpan]:
    """The spans of tool calls: a quota checks model calls, too, and then no limit matches."""
    return [each for each in signals.decision_spans() if attributes(each)["kind"] == "tool"]


def of_search(limit: str, decision: str, scope: str, call: str, **amounts: int) -> dict[str, Any]:
    known = {"limit": limit, "limits": (limit,), "exit_behavior": "continue"}
    told = {"decision": decision, "scope": scope, "gen_ai.tool.call.id": call}
    return OF_TOOL | known | told | {name.replace("_", "."): each for name, each in amounts.items()}


def blocked(limit: str, scope: str) -> dict[str, str]:
    """By what Langfuse and OpenInference show that a call is blocked."""
    output = f"blocked by {limit} ({scope})"
    return {"langfuse.observation.level": "WARNING", "output.value": output}


ONE = {"thread_used": 1, "thread_limit": 5, "run_used": 1, "run_limit": 1}
MODEL: dict[str, Any] = {**OF_RUN, "kind": "model", "limit": "model", "limits": ("model",)}
MODEL |= {"exit_behavior": "end", "thread.used": 1, "thread.limit": 1, "run.used": 1}
TRIED = {"thread_used": 1, "run_used": 1, "run_limit": 0}
SKIPPED = {**OF_TOOL, "decision": "skipped", "limits": (), "gen_ai.tool.call.id": "call_2"}
TOLD: list[tuple[Limit, list[str], list[Mapping[str, Any]]]] = [
    (
        ToolCallLimit("search", thread_limit=5, run_limit=1),
        ["search", "search"],
        [
            of_search("tool:search", "allowed", "none", "call_1", **ONE),
            of_search("tool:search", "blocked", "run", "call_2", **ONE)
            | blocked("tool:search", "run"),
        ],
    ),
    (
        ModelCallLimit(thread_limit=1),
        ["calc"],
        [
            {**MODEL, "decision": "allowed", "scope": "none"},
            {**MODEL, "decision": "blocked", "scope": "thread"} | blocked("model", "thread"),
        ],
    ),
    (ToolCallLimit("calc", run_limit=0, exit_behavior="end"), ["calc", "search"], [SKIPPED]),
    (
        ToolCallLimit("search", run_limit=0, enforce=False, name="t"),
        ["search"],
        [of_search("t", "would_block", "run", "call_1", **TRIED)],
    ),
]


@pytest.mark.parametrize(
    ("limit", "calls", "told"), TOLD, ids=["tools", "model", "skipped", "dry run"]
)
async def test_what_spans_tell(limit: Limit, calls: Any, told: Any, signals: Signals) -> None:
    """A span has exactly the documented attributes; a refusal that the agent survives is none."""
    await played(signals, [calls, "done"], limit)
    kind = told[0]["kind"]
    spans = [each for each in signals.decision_spans() if attributes(each)["kind"] == kind]
    spans = [each for each in spans if not each.name.endswith(" calc")]
    assert [attributes(each) for each in spans] == told
    assert {each.name for each in spans} == {f"check_quota {kind}{' search' * (kind == 'tool')}"}
    assert {each.status.status_code for each in spans} == {StatusCode.UNSET}
    assert {each.kind for each in spans} == {SpanKind.INTERNAL}
    scope = spans[0].instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.version) == ("langchain_quota", __version__)
    assert (scope.schema_url or "").startswith("https://opentelemetry.io/schemas/1.")


@pytest.mark.parametrize(
    ("make", "calls", "others"),
    [(partial(ToolCallLimit, "search"), 2, {"skipped"}), (ModelCallLimit, 1, {"allowed"})],
    ids=["tool", "model"],
)
async def test_an_exception_that_propagates_is_an_error(
    make: Any, calls: int, others: set[str], signals: Signals
) -> None:
    """The span of the blocked call, and only it, has the status and type of the exception."""
    limit = make(run_limit=1, exit_behavior="error")
    with pytest.raises((ToolCallLimitExceededError, ModelCallLimitExceededError)) as caught:
        await played(signals, [["search"] * calls], limit)
    spans = signals.decision_spans()
    failed = [each for each in spans if each.status.status_code is StatusCode.ERROR]
    [told] = map(attributes, failed)
    assert (told["decision"], told["exit_behavior"]) == ("blocked", "error")
    assert "langfuse.observation.level" not in told  # there, a span with this status is an error
    assert told["error.type"] == f"{limit.kind.title()}CallLimitExceededError"
    assert failed[0].status.description == str(caught.value)
    rest = [attributes(each) for each in spans if each not in failed]
    assert {each["decision"] for each in rest} == others
    assert not any("error.type" in each for each in rest)


@pytest.mark.parametrize(
    ("spans", "seen"),
    [
        ("all", {"allowed": 3, "blocked": 1, "skipped": 2}),
        ("refused", {"blocked": 1, "skipped": 2}),
        ("off", {}),
    ],
)
async def test_chosen_spans(spans: str, seen: dict[str, int]) -> None:
    """`spans` chooses which calls get a span; every call is counted anyway."""
    signals = telling(spans=spans)
    limits: list[Limit] = [
        ModelCallLimit(run_limit=9),
        ToolCallLimit("search", run_limit=2, exit_behavior="end"),
    ]
    await played(signals, [["search"], ["search", "search", "calc"]], *limits)
    assert Counter(decisions(signals)) == seen
    counted = Counter[str]()
    for (*_, decision), value in signals.samples("langchain_quota_calls_total").items():
        counted[decision] += int(value)
    assert +counted == {"allowed": 3, "blocked": 1, "skipped": 2}


@pytest.mark.parametrize(
    ("limit", "options", "told"),
    [
        (TokenLimit(thread_limit=900, run_limit=600), {}, ("tokens", 300, 900, 300, 600)),
        (
            CostLimit(thread_limit="0.9", run_limit="0.6"),
            {"prices": {"gpt": Price(input="1000", output="1000")}},
            ("dollars", 0.3, 0.9, 0.3, 0.6),
        ),
    ],
    ids=["tokens", "dollars"],
)
async def test_a_budget(limit: Limit, options: Any, told: Any, signals: Signals) -> None:
    """The span says in which unit its amounts are, and dollars are dollars."""
    model = ScriptedChatModel(script=[paid(300, "calc"), paid(300)], model="gpt")
    await played(signals, model, limit, **options)
    found = attributes(signals.decision_spans()[-1])
    names = ("unit", "thread.used", "thread.limit", "run.used", "run.limit")
    assert tuple(found[name] for name in names) == told


async def test_who_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Each quota has its use and number; a refusal has its window's end and the subject's label."""
    caplog.set_level("DEBUG", "langchain_quota")
    signals = telling(subject_label={"user_id": lambda user: user[:3]})
    quotas = [
        Quota(1, per="user_id", window=DAY),
        Quota(9, per="tenant"),
        Quota(5, per="thread", window=timedelta(hours=1)),
    ]
    limit = ToolCallLimit("search", quotas=quotas)
    context = {"user_id": "ada@example.org", "tenant": "acme"}
    options: Any = {"store": MemoryStore(clock=Clock()), "context": context}
    await played(signals, [["search", "search"], "done"], limit, **options)
    allowed, blocked = (attributes(each) for each in of_tools(signals))
    for each, (scope, most) in product(
        (allowed, blocked), (("user_id", 1), ("tenant", 9), ("thread", 5))
    ):
        assert (each[f"{scope}.used"], each[f"{scope}.limit"]) == (1, most)
    assert (allowed["scope"], blocked["scope"]) == ("none", "user_id")
    assert blocked["resets_at"] == RESETS.replace("Z", "+00:00")
    assert "resets_at" not in allowed
    assert [each.get("subject") for each in (allowed, blocked)] == [None, "ada"]
    assert [vars(each).get("quota_subject") for each in caplog.records][-1:] == ["ada"]
    written = "".join(each.to_json() for each in signals.decision_spans())
    assert not any(name in written for name in ("ada@", "acme"))


async def test_a_tool_that_the_model_invents(signals: Signals) -> None:
    """The attribute has the tool's own name, bounded; the span's name has the metrics' label."""
    await played(signals, [["an odd\ntool" * 99], "done"], ToolCallLimit(run_limit=9))
    (span,) = of_tools(signals)
    assert span.name == "check_quota tool _other"
    name = str(attributes(span)["gen_ai.tool.name"])
    assert name.startswith("an oddtool")
    assert len(name) <= 64


async def test_a_refusal_without_the_store(signals: Signals) -> None:
    """Its scope is `store`; what only the store knows is left out, the run's use is shown."""
    store = FickleStore(MemoryStore())
    store.down = True
    limit = ToolCallLimit("search", run_limit=3, quotas=[Quota(5, per="global")])
    await played(signals, [["search"], "done"], limit, store=store)
    told = attributes(of_tools(signals)[0])
    assert (told["decision"], told["scope"]) == ("blocked", "store")
    assert (told["run.used"], told["run.limit"]) == (0, 3)
    assert not {"thread.used", "global.used", "resets_at"} & told.keys()


class Keeping(Sampler):
    """Keeps refusals only."""

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        given = kwargs.get("attributes") or args[4]
        is_refusal = given["langchain_quota.decision"] == "blocked"
        made = Decision.RECORD_AND_SAMPLE if is_refusal else Decision.DROP
        return SamplingResult(made, {**given, "priority": 1})

    def get_description(self) -> str:
        return "Keeping"


async def test_a_sampler_sees_what_was_decided(signals: Signals) -> None:
    """It can keep the refusals alone, and add attributes: all are there when it decides."""
    sampled = telling(sampler=Keeping())
    for each in (sampled, signals):
        script = [["search", "search"], "done"]
        await played(each, script, ToolCallLimit("search", run_limit=1))
    (span,) = sampled.decision_spans()
    assert attributes(span) == {**attributes(of_tools(signals)[1]), "priority": 1}


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({}, "check_quota"),
        ({"spans": "off"}, "request"),
        ({"sampler": ALWAYS_OFF}, None),
        ({"tracer_provider": NoOpTracerProvider()}, "request"),
    ],
    ids=["own", "off", "not sampled", "no SDK"],
)
async def test_exemplars(options: Any, recorded: str | None) -> None:
    """Counters lead to the span of the call that they counted, or else to the caller's."""
    signals = telling(**options)
    with signals.provider.get_tracer("app").start_as_current_span("request"):
        await played(signals, [["search"], "done"], ToolCallLimit("search", run_limit=1))
    linked = {
        sample.exemplar.labels["span_id"]
        for family in signals.registry.collect()
        for sample in family.samples
        if sample.exemplar
    }
    named = {format_span_id(each.context.span_id): each.name for each in signals.spans()}
    assert {named[each].split()[0] for each in linked} == ({recorded} if recorded else set())
    assert signals.samples("langchain_quota_calls_total", tool="search", decision="allowed")


def models(signals: Signals) -> list[Any]:
    """The models of the spans of model calls."""
    spans = [attributes(each) for each in signals.decision_spans()]
    return [each.get("gen_ai.request.model") for each in spans if each["kind"] == "model"]


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        ("quota", {}, [None, None, "cheap"]),
        ("quota", {"reserve": 1}, ["dear", "dear", "cheap"]),
        pytest.param("inline", {}, ["dear", "dear", "cheap"], marks=needs_inline),
        ("graph", {}, ["dear", "dear", "cheap"]),
    ],
)
async def test_the_model(kind: Any, options: Any, names: Any, signals: Signals) -> None:
    """A check that knows the request has its model, and every downgrade has the other model."""
    cheap = ScriptedChatModel(model="cheap", script=[paid(1)])
    dear = ScriptedChatModel(model="dear", script=[paid(4, "search"), paid(6, "search")])
    limit = TokenLimit(run_limit=20, downgrade_to=cheap, downgrade_at=0.5, **options)
    await Scene(signals, dear, [limit], kind=kind).play()
    assert models(signals) == names


async def test_a_span_begins_before_the_wait(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call's span covers its wait for room in a quota, so no time of the run is unexplained."""
    clock, waits = Clock(), list[int]()

    async def passing(_: str, seconds: float) -> None:
        clock.now += seconds
        waits.append(time.time_ns())

    patch_pauses(monkeypatch, passing)
    quota = Quota(1, per="global", window="1m", smooth=True)
    limit = ModelCallLimit(quotas=[quota], wait=timedelta(hours=1))
    store = MemoryStore(clock=clock)
    scene = await Scene(signals, ["done", "done"], [limit], store=store).played()
    await scene.play()
    span = signals.decision_spans()[-1]
    assert {(span.start_time or 0) < each < (span.end_time or 0) for each in waits} == {True}


LIMITS: list[Limit] = [
    ModelCallLimit(run_limit=9),
    ToolCallLimit("search", run_limit=1),
    ToolCallLimit(run_limit=9),
]


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        *(("quota", LIMITS), pytest.param("inline", LIMITS, marks=needs_inline)),
        # Of the last one, the first that is checked is a batch.
        *(("drop-in", LIMITS), ("drop-in", LIMITS[1:2])),
    ],
    ids=["quota", "inline", "drop-ins", "tools only"],
)
@both_forms
async def test_whose_children_spans_are(
    kind: Kind, limits: list[Limit], form: Form, signals: Signals
) -> None:
    """Of two runs at once, spans are children of the active span, or have no parent."""
    before, seen = context.get_current(), set[int]()

    def script(messages: Sequence[BaseMessage]) -> Any:
        seen.add(trace.get_current_span().get_span_context().span_id)
        return (["search", "search"], ["search"], "done")[len(messages) // 3]

    async def play(thread: str) -> SpanContext:
        scene = Scene(signals, script, limits, kind=kind, form=form, thread_id=thread)
        tracer = signals.provider.get_tracer("app")
        below = tracer.start_as_current_span("request") if thread == "below" else nullcontext()
        with below as request:
            await scene.play()
        return request.get_span_context() if request else trace.INVALID_SPAN_CONTEXT

    around, _ = await asyncio.gather(play("below"), play("alone"))
    spans: dict[object, list[ReadableSpan]] = {"below": [], "alone": []}
    for span in signals.decision_spans():
        spans[attributes(span)["gen_ai.conversation.id"]].append(span)
    for each in spans.values():
        assert {attributes(span)["decision"] for span in each} == {"allowed", "blocked"}
    assert {each.parent and each.parent.span_id for each in spans["below"]} == {around.span_id}
    assert {each.context.trace_id for each in spans["below"]} == {around.trace_id}
    # None has a parent, which would have ended before it begins.
    assert {each.parent for each in spans["alone"]} == {None}
    assert len({each.context.trace_id for each in spans["alone"]}) == len(spans["alone"])
    assert seen == {around.span_id, trace.INVALID_SPAN_CONTEXT.span_id}
    assert context.get_current() is before
