"""The OpenTelemetry span of a judged call."""

import math
import time
from datetime import UTC
from typing import Literal

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from langchain_quota import __version__
from langchain_quota.core.decision import Answer, Decision, LimitStatus, Outcome
from langchain_quota.limits.call import STORE, THREAD
from langchain_quota.runtime.units import UNIT_LABELS, in_base_unit
from langchain_quota.telemetry.events import DecisionEvent, Exemplar
from langchain_quota.telemetry.labels import NONE, described, label, limit_label

Spans = Literal["all", "refused", "off"]

# The gen_ai.* names of OpenTelemetry's semantic conventions for generative AI, in development.
CONVERSATION_ID = "gen_ai.conversation.id"
AGENT_NAME = "gen_ai.agent.name"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
# OpenTelemetry's semantic conventions, stable.
ERROR_TYPE = "error.type"

DECISION = "langchain_quota.decision"
KIND = "langchain_quota.kind"
LIMIT = "langchain_quota.limit"
LIMITS = "langchain_quota.limits"
SCOPE = "langchain_quota.scope"
EXIT_BEHAVIOR = "langchain_quota.exit_behavior"
ANSWER = "langchain_quota.answer"
ANSWERED_BY = "langchain_quota.answered_by"
GRANTED = "langchain_quota.granted"
USED = "langchain_quota.{scope}.used"
LIMIT_OF = "langchain_quota.{scope}.limit"
UNIT = "langchain_quota.unit"
RESETS_AT = "langchain_quota.resets_at"
DOWNGRADED_BY = "langchain_quota.downgraded_by"
SUBJECT = "langchain_quota.subject"
THREAD_LABEL = "langchain_quota.thread.id"
WAITED = "langchain_quota.waited"
"""An event of a span."""

Attributes = dict[str, AttributeValue]

_PATIENCE = 1.0
"""For how many seconds it is not asked again whether there is an SDK."""

_SCHEMA = "https://opentelemetry.io/schemas/1.37.0"
"""The version of the semantic conventions that has all of the names above."""


class Tracing:
    """The sink that makes spans."""

    def __init__(
        self, provider: trace.TracerProvider | None, spans: Spans, *, hashed_threads: bool
    ) -> None:
        self._provider = provider
        self._tracer: trace.Tracer | None = None
        self._asked_again = math.inf if spans == "off" else 0.0
        self._spans = spans
        self._thread_key = THREAD_LABEL if hashed_threads else CONVERSATION_ID

    def judged(self, told: DecisionEvent) -> None:
        """Make the spans of decisions that get one, and their exemplars."""
        tracer = self._tracer or self._found()
        # A span is the exemplar of its call.
        if tracer is None or self._spans == "refused":
            self.exemplify(told)
        if tracer is None:
            return
        for index, decision in enumerate(told.decisions):
            if self._spans == "refused" and decision.outcome is Outcome.ALLOWED:
                continue
            error = told.error if decision.outcome is Outcome.BLOCKED else None
            is_tool = decision.call.kind == "tool"
            # The name has the bounded label of the metrics: backends group spans by it.
            span = tracer.start_span(
                f"check_quota tool {told.tools[index]}" if is_tool else "check_quota model",
                attributes=self._attributes(told, decision, error),
                start_time=told.started,
            )
            if decision.waited:
                span.add_event(WAITED, {"seconds": decision.waited})
            if error is not None:
                span.set_status(trace.StatusCode.ERROR, described(error))
            span.end()
            if not span.get_span_context().is_valid:
                # Instrumentation is suppressed.
                span = trace.get_current_span()
            told.exemplars[index] = exemplar(span.get_span_context())

    def exemplify(self, told: DecisionEvent) -> None:
        """Give calls without spans of their own the active span as their exemplar."""
        active = exemplar(trace.get_current_span().get_span_context())
        told.exemplars = [active] * len(told.decisions)

    def _found(self) -> trace.Tracer | None:
        """The tracer, if there is an SDK by now."""
        now = time.monotonic()
        if now >= self._asked_again:
            self._asked_again = now + _PATIENCE
            provider = self._provider or trace.get_tracer_provider()
            if not isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
                self._tracer = provider.get_tracer("langchain_quota", __version__, _SCHEMA)
        return self._tracer

    def _attributes(
        self, told: DecisionEvent, decision: Decision, error: BaseException | None
    ) -> Attributes:
        # All of them are there when the span begins, so that a sampler sees them.
        call, leading, who = decision.call, decision.leading, told.who
        attributes: Attributes = {
            DECISION: decision.outcome.value,
            KIND: call.kind,
            LIMITS: tuple([limit_label(status.limit) for status in decision.limits]),
        }
        if call.agent:
            attributes[AGENT_NAME] = who.name
        if who.thread is not None:
            attributes[self._thread_key] = who.thread
        by = decision.downgraded_by
        attributes |= {DOWNGRADED_BY: limit_label(by)} if by else {}
        if call.kind == "tool":
            attributes[TOOL_NAME] = label(call.tool)
            if call.id is not None:
                attributes[TOOL_CALL_ID] = label(call.id)
        if leading is not None:
            _add_limit(attributes, leading)
            subject = told.subjects.get((leading.limit, leading.scope or NONE))
            if subject is not None:
                attributes[SUBJECT] = subject
        if decision.answer is not None:
            _add_answer(attributes, decision.answer, leading)
        if decision.outcome is Outcome.BLOCKED and decision.resets_at is not None:
            attributes[RESETS_AT] = decision.resets_at.astimezone(UTC).isoformat()
        if error is not None:
            attributes[ERROR_TYPE] = label(type(error).__qualname__)
        return attributes


def _add_limit(attributes: Attributes, status: LimitStatus) -> None:
    """Add the limit that leads a decision."""
    unit, scope = status.unit, status.reason and status.refusal_scope
    attributes[LIMIT] = limit_label(status.limit)
    attributes[SCOPE] = scope or NONE
    attributes[EXIT_BEHAVIOR] = status.exit_behavior
    if unit != "calls":
        attributes[UNIT] = UNIT_LABELS[unit]
    for count in status.counts:
        # Without the store, what other runs of the thread have used is not known.
        used = None if scope == STORE and count.scope == THREAD else count.used
        for name, amount in ((USED, used), (LIMIT_OF, count.limit)):
            if amount is not None:
                shown = amount if unit == "calls" else in_base_unit(amount, unit)
                attributes[name.format(scope=count.scope)] = shown


def _add_answer(attributes: Attributes, answer: Answer, status: LimitStatus | None) -> None:
    """Add a person's answer, and what it grants to the limit that leads the decision."""
    attributes[ANSWER] = answer.type
    if answer.by:
        attributes[ANSWERED_BY] = label(answer.by)
    granted = None if status is None else answer.granted.get(status.limit)
    if status is not None and granted is not None:
        attributes[GRANTED] = in_base_unit(granted, status.unit)


def exemplar(context: trace.SpanContext) -> Exemplar:
    """The exemplar of a span, if it is sampled."""
    if not (context.trace_flags.sampled and context.is_valid):
        return None
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }
