"""Which trace the spans of a run belong to: the caller's, or each to one of its own."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from langchain_core.messages import BaseMessage
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import Form, Kind, Scene, both_forms
from tests.telemetry import Signals, attributes, needs_inline

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
    """Of two runs at once, spans are children of the active span, or have no parent.

    None is made active.
    """
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
