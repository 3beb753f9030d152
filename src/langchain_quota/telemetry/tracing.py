"""The OpenTelemetry span of a judged call."""

from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from langchain_quota import __version__
from langchain_quota.decision import STORE, Answer, Decision, LimitStatus, Outcome
from langchain_quota.telemetry.labels import Who, described, label, limit_label
from langchain_quota.units import UNIT_LABELS, in_base_unit

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

_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(slots=True)
class Judged:
    """A decision, with what its signals share."""

    decision: Decision
    who: Who
    tool: str
    started: int
    """When judging began, in nanoseconds since the Unix epoch."""
    error: BaseException | None
    """What the decision raises into the agent."""
    after_refusal: bool
    trace: Mapping[str, str] | None
    """The span that begins the run's trace: known before, or that of this decision."""
    exemplar: Exemplar = None


@dataclass(eq=False)
class LazyAttributes(Mapping[str, AttributeValue]):
    """Attributes built when first read: a sampler sees all, an unrecorded span costs none."""

    told: Judged
    thread_key: str

    @cached_property
    def _built(self) -> Attributes:
        told, decision = self.told, self.told.decision
        call, leading, answer = decision.call, decision.leading, decision.answer
        attributes: Attributes = {
            DECISION: str(decision.outcome),
            KIND: call.kind,
            LIMITS: tuple(limit_label(status.limit) for status in decision.limits),
        }
        if call.agent:
            attributes[AGENT_NAME] = told.who.name
        if told.who.thread is not None:
            attributes[self.thread_key] = told.who.thread
        if call.kind == "tool":
            attributes[TOOL_NAME] = told.tool
            if call.id is not None:
                attributes[TOOL_CALL_ID] = label(call.id)
        if leading is not None:
            _add_limit(attributes, leading)
        if answer is not None:
            _add_answer(attributes, answer, leading)
        if decision.outcome is Outcome.BLOCKED and decision.resets_at is not None:
            attributes[RESETS_AT] = decision.resets_at.isoformat()
        if told.error is not None:
            attributes[ERROR_TYPE] = label(type(told.error).__qualname__)
        return attributes

    def __getitem__(self, key: str) -> AttributeValue:
        return self._built[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._built)

    def __len__(self) -> int:
        return len(self._built)

    def items(self) -> ItemsView[str, AttributeValue]:
        """All of them at once, as the SDK takes them."""
        return self._built.items()

    def copy(self) -> Attributes:
        """A plain copy, as samplers that add attributes take one."""
        return dict(self._built)


class Tracing:
    """The sink that makes spans."""

    def __init__(
        self, provider: trace.TracerProvider | None, spans: Spans, *, hashed_threads: bool
    ) -> None:
        self._tracer = trace.get_tracer("langchain_quota", __version__, provider)
        self._spans = spans
        self._thread_key = THREAD_LABEL if hashed_threads else CONVERSATION_ID

    def judged(self, told: Judged) -> None:
        """Make the span of a decision, if it gets one, and its exemplar."""
        call, outcome, span = told.decision.call, told.decision.outcome, None
        try:
            if self._spans == "all" or (
                self._spans == "refused" and outcome is not Outcome.ALLOWED
            ):
                description = None if told.error is None else described(told.error)
                parent, is_root = _parent(told.trace)
                span = self._tracer.start_span(
                    f"check_quota tool {told.tool}" if call.kind == "tool" else "check_quota model",
                    context=parent,
                    attributes=LazyAttributes(told, self._thread_key),
                    start_time=told.started,
                )
                if told.error is not None:
                    span.set_status(trace.StatusCode.ERROR, description)
                span.end()
                if is_root:
                    # The run's later spans become its children if no span is active.
                    begun: dict[str, str] = {}
                    _PROPAGATOR.inject(begun, trace.set_span_in_context(span))
                    told.trace = begun or told.trace
        finally:
            told.exemplar = exemplar(span)


def _add_limit(attributes: Attributes, status: LimitStatus) -> None:
    """Add the limit that leads a decision."""
    unit, scope = status.unit, status.refusal_scope
    attributes[LIMIT] = limit_label(status.limit)
    attributes[SCOPE] = scope or "none"
    attributes[EXIT_BEHAVIOR] = status.exit_behavior
    if unit != "calls":
        attributes[UNIT] = UNIT_LABELS[unit]
    if scope != STORE:
        # Without the store, what other runs have used is not known.
        attributes[THREAD_USED] = in_base_unit(status.thread_used, unit)
    if status.thread_limit is not None:
        attributes[THREAD_LIMIT] = in_base_unit(status.thread_limit, unit)
    attributes[RUN_USED] = in_base_unit(status.run_used, unit)
    if status.run_limit is not None:
        attributes[RUN_LIMIT] = in_base_unit(status.run_limit, unit)
    for quota in status.quotas:
        attributes[QUOTA_USED.format(scope=quota.scope)] = in_base_unit(quota.used, unit)
        attributes[QUOTA_LIMIT.format(scope=quota.scope)] = in_base_unit(quota.limit, unit)


def _add_answer(attributes: Attributes, answer: Answer, status: LimitStatus | None) -> None:
    """Add a person's answer, and what it grants to the limit that leads the decision."""
    attributes[ANSWER] = answer.type
    if answer.by:
        attributes[ANSWERED_BY] = label(answer.by)
    granted = None if status is None else answer.granted.get(status.limit)
    if status is not None and granted is not None:
        attributes[GRANTED] = in_base_unit(granted, status.unit)


def _parent(headers: Mapping[str, str] | None) -> tuple[Context | None, bool]:
    """The context of a span, below the active one or in the run's trace; whether it begins one."""
    context = get_current()
    if context and trace.get_current_span(context).get_span_context().is_valid:
        return None, False
    if not headers:
        return None, True
    below = _below(*headers.items())
    # What else is in the context, such as baggage, stays.
    rest = trace.set_span_in_context(trace.get_current_span(below)) if context else below
    return rest, False


@lru_cache(maxsize=1024)
def _below(*headers: tuple[str, str]) -> Context:
    """The context of the span that the headers name, with nothing else."""
    return _PROPAGATOR.extract(dict(headers), Context())


def exemplar(span: trace.Span | None) -> Exemplar:
    """The exemplar of a span, if it is sampled; without one, of the active span."""
    context = trace.INVALID_SPAN_CONTEXT if span is None else span.get_span_context()
    if not context.is_valid:
        # Without an SDK, older versions of OpenTelemetry make a span that belongs nowhere.
        context = trace.get_current_span().get_span_context()
    if not (context.trace_flags.sampled and context.is_valid):
        return None
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }
