"""Which trace the spans of a run belong to: the caller's, or each to one of its own."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import Form, Scene, both_forms
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


def scene_of(signals: Signals, held: str, script: Any = SEARCHING, **options: Any) -> Scene:
    kind, limits = HELD[held]
    return Scene(signals, script, [*options.pop("beside", ()), *limits], kind=kind, **options)


def request_of(signals: Signals) -> Any:
    """A span around what the caller does."""
    return signals.provider.get_tracer("app").start_as_current_span("request")


def assert_below(spans: Sequence[ReadableSpan], parent: SpanContext) -> None:
    assert spans
    for span in spans:
        assert span.parent is not None
        assert span.parent.span_id == parent.span_id
        assert span.context.trace_id == parent.trace_id


def is_waiting(scene: Scene) -> bool:
    return bool(scene.agent.get_state(scene.config).next)


async def resume(scene: Scene) -> None:
    """Approve what is to be reviewed."""
    tasks = scene.agent.get_state(scene.config).tasks
    (asked,) = [pending.value for task in tasks for pending in task.interrupts]
    await scene.resume({"decisions": [{"type": "approve"}] * len(asked["action_requests"])})


@each_held
@both_forms
async def test_whose_children_spans_are(held: str, form: Form, signals: Signals) -> None:
    """Of two runs at once, spans are children of the active span, or have no parent.

    None is made active.
    """
    before, seen = context.get_current(), set[int]()

    def script(messages: Sequence[BaseMessage]) -> Any:
        seen.add(trace.get_current_span().get_span_context().span_id)
        return SEARCHING(messages)

    async def play(thread: str) -> SpanContext:
        scene = scene_of(signals, held, script, form=form, thread_id=thread)
        with request_of(signals) if thread == "below" else nullcontext() as request:
            await scene.play()
        return request.get_span_context() if request else trace.INVALID_SPAN_CONTEXT

    around, _ = await asyncio.gather(play("below"), play("alone"))
    spans: dict[object, list[ReadableSpan]] = {"below": [], "alone": []}
    for span in signals.decision_spans():
        spans[attributes(span)["gen_ai.conversation.id"]].append(span)
    for each in spans.values():
        assert {attributes(span)["decision"] for span in each} == {"allowed", "blocked"}
    assert_below(spans["below"], around)
    # None has a parent, which would have ended before it begins.
    assert {each.parent for each in spans["alone"]} == {None}
    assert len({each.context.trace_id for each in spans["alone"]}) == len(spans["alone"])
    assert seen == {around.span_id, trace.INVALID_SPAN_CONTEXT.span_id}
    assert context.get_current() is before


@pytest.mark.filterwarnings("ignore:HumanInTheLoopMiddleware is listed")
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
