"""The OpenTelemetry spans of checked calls."""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import Literal

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from langchain_quota import __version__
from langchain_quota.core.decide import Verdict
from langchain_quota.core.decision import Answer, Outcome
from langchain_quota.core.plans import Plan, Rule
from langchain_quota.limits.call import STORE, THREAD, Call, Scope
from langchain_quota.runtime.units import UNIT_LABELS, in_base_unit
from langchain_quota.telemetry.events import DecisionEvent, Exemplar
from langchain_quota.telemetry.labels import NONE, describe, label, limit_label

Spans = Literal["all", "refused", "off"]
Attributes = dict[str, AttributeValue]

# The docstrings of these names are the table of attributes in the reference.
DECISION = "langchain_quota.decision"
"""What was decided.

One of `allowed`, `blocked`, `skipped`, `would_block`, `waiting`, `cancelled`.
"""
KIND = "langchain_quota.kind"
"""What is called. One of `tool`, `model`."""
LIMITS = "langchain_quota.limits"
"""The names of all limits that match the call."""
LIMIT = "langchain_quota.limit"
"""The limit that refused the call, or else the limit with the highest used share."""
SUBJECT = "langchain_quota.subject"
"""The user, tenant or other subject that a quota refused, if `subject_label` names that quota."""
SCOPE = "langchain_quota.scope"
"""What refused the call, as in the metrics; `none` if that limit allowed it.

One of `thread`, `run`, `call`, `agent`, `global`, `root_run`, `concurrency`, `frozen`, `store`,
`none`.
"""
EXIT_BEHAVIOR = "langchain_quota.exit_behavior"
"""What a refusal by that limit does; `continue` or `end` after a person was asked.

One of `continue`, `end`, `error`, `finalize`, `ask`.
"""
ANSWER = "langchain_quota.answer"
"""The answer of a person who was asked before the decision. One of `approve`, `reject`."""
ANSWERED_BY = "langchain_quota.answered_by"
"""Who answered, if it is known."""
GRANTED = "langchain_quota.granted"
"""How much this person granted of that limit, if anything."""
UNIT = "langchain_quota.unit"
"""The unit of the numbers below, if it is not calls. One of `tokens`, `dollars`, `seconds`."""
USED = "langchain_quota.{scope}.used"
"""What is used of the `run`, the `thread` or the quota of this name.

It includes the call, except for tokens and dollars. Of a thread it is absent in an outage.
"""
LIMIT_OF = "langchain_quota.{scope}.limit"
"""The limit of the run, the thread or the quota."""
DOWNGRADED_BY = "langchain_quota.downgraded_by"
"""The limit that sends a model call to its `downgrade_to`."""
RESETS_AT = "langchain_quota.resets_at"
"""When the window of the quota that blocked the call ends, such as `2026-03-01T00:00:00+00:00`.

It is absent if waiting for it does not help.
"""
# The gen_ai.* names of OpenTelemetry's semantic conventions for generative AI, in development.
CONVERSATION_ID = "gen_ai.conversation.id"
"""The thread."""
THREAD_LABEL = "langchain_quota.thread.id"
"""The thread's label, in place of `gen_ai.conversation.id`, if you set `thread_label`."""
AGENT_NAME = "gen_ai.agent.name"
"""The agent's name, if it has one."""
REQUEST_MODEL = "gen_ai.request.model"
"""The model that a call goes to, in checks that know the request.

These are those of `InlineQuotaMiddleware`, of `GraphQuota` and of a `reserve`, and downgrades.
"""
TOOL_NAME = "gen_ai.tool.name"
"""The tool's own name, shortened if it is too long. The span's name uses the metrics' label."""
TOOL_CALL_ID = "gen_ai.tool.call.id"
"""The id of a tool call."""
# By these, OpenInference's and Langfuse's conventions tell checks from other spans.
SPAN_KIND = "openinference.span.kind"
"""The kind of span in OpenInference's convention. One of `GUARDRAIL`."""
OBSERVATION_TYPE = "langfuse.observation.type"
"""The type of observation in Langfuse. One of `guardrail`."""
GUARDRAIL: Attributes = {SPAN_KIND: "GUARDRAIL", OBSERVATION_TYPE: "guardrail"}
# Without these, a blocked call, whose span is no error, looks there like an allowed one.
LEVEL = "langfuse.observation.level"
"""Of a blocked call, unless the span's status is ERROR. One of `WARNING`."""
OUTPUT = "output.value"
"""The limit and the scope that blocked the call."""
# OpenTelemetry's semantic conventions, stable.
ERROR_TYPE = "error.type"
"""The exception's class, if the caller gets a refusal as an exception; the status is ERROR."""

WAITING = "waiting"
"""What the span of a first check says of a call that still needs a slot."""
WAITED = "langchain_quota.waited"
"""The name of a span's event, where the others are names of attributes."""

_SDK_CHECK_INTERVAL = 1.0
"""Seconds between two checks whether there is an SDK by now."""

_SCHEMA = "https://opentelemetry.io/schemas/1.41.1"
"""The newest version of the semantic conventions that defines all of these names.

Version 1.42 has moved the names of `gen_ai` to conventions that have no schema yet.
"""


class Tracing:
    """The sink of spans."""

    def __init__(
        self, provider: trace.TracerProvider | None, spans: Spans, *, hashed_threads: bool
    ) -> None:
        self._provider = provider
        self._tracer: trace.Tracer | None = None
        self._next_sdk_check = math.inf if spans == "off" else 0.0
        self._spans = spans
        self._thread_key = THREAD_LABEL if hashed_threads else CONVERSATION_ID

    def make_spans(self, event: DecisionEvent) -> None:
        """Make the spans of verdicts that get one, and set the exemplars of all."""
        tracer = self._tracer or self._find_tracer()
        # A call's own span is its exemplar, so calls without one need another.
        if tracer is None or self._spans == "refused":
            self.set_active_exemplar(event)
        if tracer is None:
            return
        for index, verdict in enumerate(event.verdicts):
            if self._spans == "refused" and verdict.outcome is Outcome.ALLOWED:
                continue
            error = event.error if verdict.outcome is Outcome.BLOCKED else None
            is_tool = verdict.call.kind == "tool"
            # Use the bounded label of the metrics in the name, because backends group spans by it.
            span = tracer.start_span(
                f"check_quota tool {event.tools[index]}" if is_tool else "check_quota model",
                attributes=self._attributes(event, verdict, error),
                start_time=event.started,
            )
            if verdict.waited:
                span.add_event(WAITED, {"seconds": verdict.waited})
            if error is not None:
                span.set_status(trace.StatusCode.ERROR, describe(error))
            span.end()
            if not span.get_span_context().is_valid:
                # Instrumentation is suppressed, so the call has no span.
                span = trace.get_current_span()
            event.exemplars[index] = exemplar(span.get_span_context())

    def set_active_exemplar(self, event: DecisionEvent) -> None:
        """Set the active span as the exemplar of all calls."""
        active = exemplar(trace.get_current_span().get_span_context())
        event.exemplars = dict.fromkeys(range(len(event.verdicts)), active)

    def _find_tracer(self) -> trace.Tracer | None:
        """Return the tracer, or `None` as long as there is no SDK."""
        now = time.monotonic()
        if now >= self._next_sdk_check:
            self._next_sdk_check = now + _SDK_CHECK_INTERVAL
            provider = self._provider or trace.get_tracer_provider()
            if not isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
                self._tracer = provider.get_tracer("langchain_quota", __version__, _SCHEMA)
        return self._tracer

    def _attributes(
        self, event: DecisionEvent, verdict: Verdict, error: BaseException | None
    ) -> Attributes:
        # The span begins with all attributes, so that a sampler sees them.
        call, leading, caller = verdict.call, verdict.leading, event.caller
        prepared = verdict.plan.prepared
        base, of_rules = prepared.get("span") or prepared.setdefault("span", _span_of(verdict.plan))
        known, counts = (base, ()) if leading is None else of_rules[leading]
        attributes: Attributes = {**known, DECISION: verdict.outcome.value, KIND: call.kind}
        if call.agent:
            attributes[AGENT_NAME] = caller.name
        if caller.thread is not None:
            attributes[self._thread_key] = caller.thread
        if verdict.downgraded_by:
            attributes[DOWNGRADED_BY] = limit_label(verdict.downgraded_by)
        _add_called(attributes, event, call)
        if leading is not None:
            _add_limit(attributes, verdict, leading, counts, event.subjects)
        attributes |= {DECISION: WAITING} if verdict.needs_slot else event.attributes
        if verdict.answer is not None:
            rules = verdict.plan.rules[leading : leading + 1] if leading is not None else ()
            _add_answer(attributes, verdict.answer, rules)
        if verdict.outcome is Outcome.BLOCKED:
            if (resets_at := verdict.decision.resets_at) is not None:
                attributes[RESETS_AT] = resets_at.astimezone(UTC).isoformat()
            attributes[OUTPUT] = f"blocked by {attributes.get(LIMIT)} ({attributes.get(SCOPE)})"
            if error is None:
                attributes[LEVEL] = "WARNING"
            else:
                attributes[ERROR_TYPE] = label(type(error).__qualname__)
        return attributes


def _add_called(attributes: Attributes, event: DecisionEvent, call: Call) -> None:
    """Add the tool that is called, or the model if it is known."""
    if call.kind == "tool":
        attributes[TOOL_NAME] = limit_label(call.tool)
        if call.id is not None:
            attributes[TOOL_CALL_ID] = label(call.id)
    elif event.model is not None and (model := event.model()):
        attributes[REQUEST_MODEL] = label(model)


_RulePart = tuple[Attributes, Sequence[tuple[str, Scope, str]]]
"""Attributes of a rule, and its counts: the counter, the scope, and the name of what is used."""


def _span_of(plan: Plan) -> tuple[Attributes, list[_RulePart]]:
    """Return the attributes of spans of a plan's calls that no rule leads, and that each leads."""
    names = tuple([limit_label(rule.limit.name) for rule in plan.rules])
    base: Attributes = {**GUARDRAIL, LIMITS: names}
    of_rules: list[_RulePart] = []
    for limit, meters, *_ in plan.rules:
        of_rule = {**base, LIMIT: limit_label(limit.name), SCOPE: NONE}
        of_rule[EXIT_BEHAVIOR] = limit.exit_behavior
        if limit.unit != "calls":
            of_rule[UNIT] = UNIT_LABELS[limit.unit]
        for scope, maximum in ((meter.scope, meter.maximum) for meter in meters):
            if maximum is not None:
                of_rule[LIMIT_OF.format(scope=scope)] = in_base_unit(maximum, limit.unit)
        counts = [(meter.counter, meter.scope, USED.format(scope=meter.scope)) for meter in meters]
        of_rules.append((of_rule, counts))
    return base, of_rules


def _add_limit(
    attributes: Attributes,
    verdict: Verdict,
    index: int,
    counts: Sequence[tuple[str, Scope, str]],
    subjects: Mapping[tuple[str, Scope], str],
) -> None:
    """Add what is used of the limit that leads a verdict, and what it refuses to whom."""
    limit, amount, refused_at = verdict.plan.rules[index].limit, verdict.amounts[index], None
    if limit.name in verdict.refused:
        refused_at = verdict.decision.limits[index].refusal_scope
        attributes[SCOPE] = refused_at or NONE
        subject = subjects.get((limit.name, verdict.refused[limit.name]))
        if subject is not None:
            attributes[SUBJECT] = subject
    if verdict.exits:
        attributes[EXIT_BEHAVIOR] = verdict.exit_behavior(limit)
    before, unit = verdict.before, limit.unit
    for counter, scope, used in counts:
        # Without the store, the use of the thread's other runs is unknown.
        if refused_at != STORE or scope != THREAD:
            count = before[counter] + amount
            attributes[used] = count if unit == "calls" else in_base_unit(count, unit)


def _add_answer(attributes: Attributes, answer: Answer, leading: Sequence[Rule]) -> None:
    """Add a person's answer, and what it grants to the limit that leads the verdict, if any."""
    attributes[ANSWER] = answer.type
    if answer.by:
        attributes[ANSWERED_BY] = label(answer.by)
    for limit, *_ in leading:
        if (granted := answer.granted.get(limit.name)) is not None:
            attributes[GRANTED] = in_base_unit(granted, limit.unit)


def exemplar(context: trace.SpanContext) -> Exemplar:
    """Return the exemplar of a span, or `None` if the span is not sampled."""
    if not (context.trace_flags.sampled and context.is_valid):
        return None
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }
