"""Which trace the spans of a run belong to: the caller's, or each to one of its own."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall
from langgraph.types import interrupt
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import Form, Scene, both_forms, recording
from tests.telemetry import Signals, attributes, needs_inline

SEARCHES = ToolCallLimit("search", run_limit=1)
HELD: dict[str, tuple[Any, list[Limit]]] = {
    "quota": ("quota", [ModelCallLimit(run_limit=9), SEARCHES, ToolCallLimit(run_limit=9)]),
    "inline": ("inline", [ModelCallLimit(run_limit=9), SEARCHES]),
    "drop-ins": ("drop-in", [ModelCallLimit(run_limit=9), SEARCHES, ToolCallLimit(run_limit=9)]),
    # The first that is checked is then a batch.
    "tools only": ("drop-in", [SEARCHES]),
}
each_held = pytest.mark.parametrize(
    "held", [pytest.param(each, marks=needs_inline if each == "inline" else ()) for each in HELD]
)


def again(*turns: Any) -> Any:
    """A script that depends only on the history, so that runs and processes can share it."""

    def script(messages: Sequence[BaseMessage]) -> Any:
        newest = max(i for i, each in enumerate(messages) if isinstance(each, HumanMessage))
        turn = turns[sum(isinstance(each, AIMessage) for each in messages[newest:])]
        if isinstance(turn, str):
            return turn
        # Ids of one's own, since a call that has an answer is no longer pending.
        ids = [f"call-{len(messages)}-{index}" for index in range(len(turn))]
        calls = [ToolCall(name=n, args={}, id=i) for n, i in zip(turn, ids, strict=True)]
        return AIMessage("", tool_calls=calls)

    return script


SEARCHING = again(["search", "search"], ["search"], "done")
ASKING = again(["search", "ask"], ["search"], "done")


def scene_of(signals: Signals, held: str, script: Any = SEARCHING, **options: Any) -> Scene:
    """An agent whose tool `ask` interrupts the run."""
    kind, limits = HELD[held]
    ran: list[str] = []
    ask = recording("ask", ran, lambda: interrupt("what?"))
    beside = options.pop("beside", ())
    return Scene(
        signals, script, [*beside, *limits], kind=kind, tools=["search", ask], ran=ran, **options
    )


def request_of(signals: Signals) -> Any:
    """A span around what the caller does."""
    return signals.provider.get_tracer("app").start_as_current_span("request")


def assert_below(spans: Sequence[ReadableSpan], parent: SpanContext) -> None:
    assert spans
    for span in spans:
        assert span.parent is not None
        assert span.parent.span_id == parent.span_id
        assert span.context.trace_id == parent.trace_id


def assert_roots(spans: Sequence[ReadableSpan]) -> None:
    """None has a parent, which would have ended before it begins."""
    assert spans
    assert {each.parent for each in spans} == {None}
    assert len({each.context.trace_id for each in spans}) == len(spans)


def is_waiting(scene: Scene) -> bool:
    return bool(scene.agent.get_state(scene.config).next)


async def resume(scene: Scene) -> None:
    """Approve what is to be reviewed, or answer the question that a tool asks."""
    tasks = scene.agent.get_state(scene.config).tasks
    (asked,) = [pending.value for task in tasks for pending in task.interrupts]
    reviewed = isinstance(asked, dict) and asked["action_requests"]
    approved = {"decisions": [{"type": "approve"}] * len(reviewed)} if reviewed else "that"
    await scene.resume(approved)


@each_held
@both_forms
@pytest.mark.parametrize("active", [True, False], ids=["request", "none"])
async def test_whose_children_spans_are(
    held: str,
    form: Form,
    active: bool,  # noqa: FBT001 - a parameter of the test
    signals: Signals,
) -> None:
    """The spans are children of the active span, or have no parent; none is made active."""
    before = context.get_current()
    seen: list[SpanContext] = []

    def script(messages: Sequence[BaseMessage]) -> Any:
        seen.append(trace.get_current_span().get_span_context())
        return SEARCHING(messages)

    scene = scene_of(signals, held, script, form=form)
    with request_of(signals) if active else nullcontext() as request:
        await scene.play()
    spans = signals.decision_spans()
    assert {attributes(each)["decision"] for each in spans} == {"allowed", "blocked"}
    around = request.get_span_context() if request else trace.INVALID_SPAN_CONTEXT
    if request:
        assert_below(spans, around)
    else:
        assert_roots(spans)
    assert {each.span_id for each in seen} == {around.span_id}
    assert context.get_current() is before


@each_held
async def test_a_resumed_run(held: str, signals: Signals) -> None:
    """A resume below a span is its child; one without has no parent."""
    review = HumanInTheLoopMiddleware(interrupt_on={"search": True})
    scene = scene_of(signals, held, beside=[review])
    await scene.play()
    signals.exporter.clear()
    with request_of(signals) as request:
        await resume(scene)
    assert_below(signals.decision_spans(), request.get_span_context())
    assert is_waiting(scene)
    signals.exporter.clear()
    await resume(scene)
    assert not is_waiting(scene)
    assert held == "tools only" or signals.decision_spans()
    assert {each.parent for each in signals.decision_spans()} <= {None}


@pytest.mark.parametrize("held", ["quota", "tools only"])
async def test_concurrent_runs_do_not_mix(held: str, signals: Signals) -> None:
    """20 runs at once, interrupted and resumed: each is below the span around it, if it has one."""
    agent = scene_of(signals, held, ASKING).agent
    around: dict[str, SpanContext] = {}

    async def run(number: int) -> None:
        scene = scene_of(signals, held, ASKING, thread_id=f"t{number}")
        scene.agent = agent
        with request_of(signals) if number % 2 else nullcontext() as request:
            if request:
                around[f"t{number}"] = request.get_span_context()
            await scene.play()
            await scene.resume("that")

    await asyncio.gather(*map(run, range(20)))
    by_thread = defaultdict(list)
    for span in signals.decision_spans():
        by_thread[attributes(span)["gen_ai.conversation.id"]].append(span)
    assert len(by_thread) == 20
    for thread, spans in by_thread.items():
        if thread in around:
            assert_below(spans, around[thread])
        else:
            assert_roots(spans)
