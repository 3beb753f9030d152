"""The OpenTelemetry span of a judged call."""

from collections.abc import Callable, ItemsView, Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from langchain_quota._version import __version__
from langchain_quota.decision import STORE, Answer, Decision, LimitStatus, Outcome
from langchain_quota.telemetry.labels import agent_name, described, label, limit_label
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

Carrier = dict[str, str]
"""A span as the W3C's trace context headers name it."""

_PROPAGATOR = TraceContextTextMapPropagator()


class LazyAttributes(Mapping[str, AttributeValue]):
    """Attributes built when first read: a sampler sees all, an unrecorded span costs none."""

    __slots__ = ("_arguments", "_build", "_built")

    def __init__(self, build: Callable[..., Attributes], *arguments: object) -> None:
        self._build = build
        self._arguments = arguments
        self._built: Attributes = {}

    def _now(self) -> Attributes:
        self._built = self._build(*self._arguments)
        return self._built

    def __getitem__(self, key: str) -> AttributeValue:
        return (self._built or self._now())[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._built or self._now())

    def __len__(self) -> int:
        return len(self._built or self._now())

    def items(self) -> ItemsView[str, AttributeValue]:
        """All of them at once, as the SDK takes them."""
        return (self._built or self._now()).items()

    def copy(self) -> Attributes:
        """A plain copy, as samplers that add attributes take one."""
        return dict(self._built or self._now())


class Place(NamedTuple):
    """Where spans of a run belong."""

    parent: Context | None
    is_root: bool


_ROOT = Place(None, is_root=True)
NOWHERE = Place(None, is_root=False)
"""The place below the active span, if there is one."""


class Tracing:
    """Spans for decisions."""

    def __init__(
        self, provider: trace.TracerProvider | None, spans: Spans, *, hashed_threads: bool
    ) -> None:
        self._tracer = trace.get_tracer("langchain_quota", __version__, provider)
        self._spans = spans
        self._thread_key = THREAD_LABEL if hashed_threads else CONVERSATION_ID

    def place(self, carrier: Mapping[str, str] | None) -> Place:
        """Where the spans of a run belong."""
        current = get_current()
        if not current:
            return _place_below(*carrier.items()) if carrier else _ROOT
        active = trace.get_current_span(current).get_span_context()
        if active.is_valid or not carrier:
            return NOWHERE if active.is_valid else _ROOT
        below = _place_below(*carrier.items())
        return Place(trace.set_span_in_context(trace.get_current_span(below.parent)), is_root=False)

    def record(  # noqa: PLR0913 - keyword-only, all needed
        self,
        decision: Decision,
        *,
        tool: str,
        thread: str | None,
        started: int,
        error: BaseException | None,
        place: Place,
    ) -> trace.Span | None:
        """Make the span; `None` if the decision gets none."""
        if self._spans == "off" or (
            self._spans == "refused" and decision.outcome is Outcome.ALLOWED
        ):
            return None
        kind = decision.call.kind
        if error is not None and decision.outcome is not Outcome.BLOCKED:
            error = None
        description = None if error is None else described(error)
        span = self._tracer.start_span(
            f"check_quota tool {tool}" if kind == "tool" else "check_quota model",
            context=place.parent,
            attributes=LazyAttributes(self._attributes, decision, tool, thread, error),
            start_time=started,
        )
        if error is not None:
            span.set_status(trace.StatusCode.ERROR, description)
        span.end()
        return span

    def _attributes(
        self,
        decision: Decision,
        tool: str,
        thread: str | None,
        raised: BaseException | None,
    ) -> Attributes:
        call, leading, answer = decision.call, decision.leading, decision.answer
        attributes: Attributes = {
            DECISION: str(decision.outcome),
            KIND: call.kind,
            LIMITS: tuple(limit_label(status.limit) for status in decision.limits),
        }
        if call.agent:
            attributes[AGENT_NAME] = agent_name(call.agent)
        if thread is not None:
            attributes[self._thread_key] = thread
        if call.kind == "tool":
            attributes[TOOL_NAME] = tool
            if call.id is not None:
                attributes[TOOL_CALL_ID] = label(call.id)
        if leading is not None:
            _add_limit(attributes, leading)
        if answer is not None:
            _add_answer(attributes, answer, leading)
        if decision.outcome is Outcome.BLOCKED and decision.resets_at is not None:
            attributes[RESETS_AT] = decision.resets_at.isoformat()
        if raised is not None:
            attributes[ERROR_TYPE] = label(type(raised).__qualname__)
        return attributes


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


def carried(span: trace.Span) -> Carrier:
    """The headers that name a span."""
    carrier: Carrier = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier


@lru_cache(maxsize=1024)
def _place_below(*headers: tuple[str, str]) -> Place:
    """Below the span that the headers name, with nothing else in the context."""
    return Place(_PROPAGATOR.extract(dict(headers), Context()), is_root=False)


def exemplar(span: trace.Span | None) -> dict[str, str] | None:
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
