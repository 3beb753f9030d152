"""The OpenTelemetry span of a judged call."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from langchain_quota import __version__
from langchain_quota.decision import STORE, Answer, Decision, LimitStatus, Outcome, Scope
from langchain_quota.telemetry.labels import Who, described, label, limit_label
from langchain_quota.units import UNIT_LABELS, Level, in_base_unit

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
THREAD_USED = "langchain_quota.thread.used"
THREAD_LIMIT = "langchain_quota.thread.limit"
RUN_USED = "langchain_quota.run.used"
RUN_LIMIT = "langchain_quota.run.limit"
QUOTA_USED = "langchain_quota.{scope}.used"
QUOTA_LIMIT = "langchain_quota.{scope}.limit"
UNIT = "langchain_quota.unit"
RESETS_AT = "langchain_quota.resets_at"
THREAD_LABEL = "langchain_quota.thread.id"

Attributes = dict[str, AttributeValue]

Exemplar = dict[str, str] | None

Notice = tuple[LimitStatus, Scope, Level | None]
"""A limit, and the level that a call has reached there; `None` if the call is refused."""

_PROPAGATOR = TraceContextTextMapPropagator()

_PATIENCE = 1.0
"""For how many seconds it is not asked again whether there is an SDK."""


@dataclass(slots=True)
class Judged:
    """Decisions about calls of one agent and thread, with what their signals share."""

    decisions: Sequence[Decision]
    who: Who
    tools: Sequence[str] = ()
    """The labels of the calls' tools."""
    started: int = 0
    """When judging began, in nanoseconds since the Unix epoch."""
    took: int = 0
    """How long it took, in nanoseconds."""
    error: BaseException | None = None
    """What the decisions raise into the agent."""
    trace: Mapping[str, str] | None = None
    """The span that begins the run's trace: known before, or made here."""
    exemplars: Sequence[Exemplar] = ()
    """Those of the calls."""
    notices: list[Notice] = field(default_factory=list)
    """What is worth a line in the log."""

    def notice(self, near: float) -> None:
        """Find refusals, and the thresholds that charges have crossed."""
        for decision in self.decisions:
            for status in decision.limits:
                if status.reason is not None and status.refusal_scope is not None:
                    self.notices.append((status, status.refusal_scope, None))
                elif status.charged:
                    self.notices += [(status, *each) for each in status.threshold_events(near)]


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

    def judged(self, told: Judged) -> None:
        """Make the spans of decisions that get one, and their exemplars."""
        context = get_current()
        active = trace.get_current_span(context).get_span_context()
        below = exemplar(active) if active.is_valid else None
        told.exemplars = exemplars = [below] * len(told.decisions)
        tracer = self._tracer or self._found()
        if tracer is None:
            return
        parent = None
        for index, decision in enumerate(told.decisions):
            if self._spans == "refused" and decision.outcome is Outcome.ALLOWED:
                continue
            if parent is None and told.trace and not active.is_valid:
                parent = _below(*told.trace.items())
                if context:
                    # What else is in there, such as baggage, stays.
                    parent = trace.set_span_in_context(trace.get_current_span(parent), context)
            error = told.error if decision.outcome is Outcome.BLOCKED else None
            tool = told.tools[index]
            span = tracer.start_span(
                f"check_quota tool {tool}" if decision.call.kind == "tool" else "check_quota model",
                context=parent,
                attributes=self._attributes(told.who, decision, tool, error),
                start_time=told.started,
            )
            if error is not None:
                span.set_status(trace.StatusCode.ERROR, described(error))
            span.end()
            made = span.get_span_context()
            if not made.is_valid:
                continue
            exemplars[index] = exemplar(made)
            if parent is None and not active.is_valid:
                # The run's later spans become its children if no span is active.
                begun: dict[str, str] = {}
                _PROPAGATOR.inject(begun, trace.set_span_in_context(span))
                told.trace = begun

    def _found(self) -> trace.Tracer | None:
        """The tracer, if there is an SDK by now."""
        now = time.monotonic()
        if now >= self._asked_again:
            self._asked_again = now + _PATIENCE
            provider = self._provider or trace.get_tracer_provider()
            if not isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
                self._tracer = provider.get_tracer("langchain_quota", __version__)
        return self._tracer

    def _attributes(
        self, who: Who, decision: Decision, tool: str, error: BaseException | None
    ) -> Attributes:
        # All of them are there when the span begins, so that a sampler sees them.
        call, leading = decision.call, decision.leading
        attributes: Attributes = {
            DECISION: decision.outcome.value,
            KIND: call.kind,
            LIMITS: tuple([limit_label(status.limit) for status in decision.limits]),
        }
        if call.agent:
            attributes[AGENT_NAME] = who.name
        if who.thread is not None:
            attributes[self._thread_key] = who.thread
        if call.kind == "tool":
            attributes[TOOL_NAME] = tool
            if call.id is not None:
                attributes[TOOL_CALL_ID] = label(call.id)
        if leading is not None:
            _add_limit(attributes, leading)
        if decision.answer is not None:
            _add_answer(attributes, decision.answer, leading)
        if decision.outcome is Outcome.BLOCKED and decision.resets_at is not None:
            attributes[RESETS_AT] = decision.resets_at.isoformat()
        if error is not None:
            attributes[ERROR_TYPE] = label(type(error).__qualname__)
        return attributes


def _add_limit(attributes: Attributes, status: LimitStatus) -> None:
    """Add the limit that leads a decision."""
    unit, scope = status.unit, status.reason and status.refusal_scope
    attributes[LIMIT] = limit_label(status.limit)
    attributes[SCOPE] = scope or "none"
    attributes[EXIT_BEHAVIOR] = status.exit_behavior
    if unit != "calls":
        attributes[UNIT] = UNIT_LABELS[unit]
    amounts = {
        # Without the store, what other runs have used is not known.
        THREAD_USED: None if scope == STORE else status.thread_used,
        THREAD_LIMIT: status.thread_limit,
        RUN_USED: status.run_used,
        RUN_LIMIT: status.run_limit,
    }
    for quota in status.quotas:
        amounts[QUOTA_USED.format(scope=quota.scope)] = quota.used
        amounts[QUOTA_LIMIT.format(scope=quota.scope)] = quota.limit
    for name, amount in amounts.items():
        if amount is not None:
            attributes[name] = amount if unit == "calls" else in_base_unit(amount, unit)


def _add_answer(attributes: Attributes, answer: Answer, status: LimitStatus | None) -> None:
    """Add a person's answer, and what it grants to the limit that leads the decision."""
    attributes[ANSWER] = answer.type
    if answer.by:
        attributes[ANSWERED_BY] = label(answer.by)
    granted = None if status is None else answer.granted.get(status.limit)
    if status is not None and granted is not None:
        attributes[GRANTED] = in_base_unit(granted, status.unit)


@lru_cache(maxsize=1024)
def _below(*headers: tuple[str, str]) -> Context:
    """The context of the span that the headers name, with nothing else."""
    return _PROPAGATOR.extract(dict(headers), Context())


def exemplar(context: trace.SpanContext) -> Exemplar:
    """The exemplar of a span, if it is sampled."""
    if not (context.trace_flags.sampled and context.is_valid):
        return None
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }


def active_exemplar() -> Exemplar:
    """The exemplar of the active span, if it is sampled."""
    return exemplar(trace.get_current_span().get_span_context())
