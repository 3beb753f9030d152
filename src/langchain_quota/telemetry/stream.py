"""The events that a run writes to its own stream: crossings, refusals, waits, downgrades, its end.

LangGraph hands them to a client that reads the stream mode `custom`. Where nobody reads it, its
writer does nothing.
"""

from typing import Literal

from langgraph.config import get_stream_writer

from langchain_quota.core.stops import StopReason, reason_of
from langchain_quota.runtime.units import Level
from langchain_quota.telemetry.events import DecisionEvent

EventName = Literal["near", "exhausted", "refused", "waiting", "downgraded", "ended"]

_CROSSINGS: dict[Level, EventName] = {Level.NEAR: "near", Level.EXHAUSTED: "exhausted"}


class QuotaEvent(StopReason):
    """An event: the data of a `StopReason`, and the event's name.

    Attributes:
        langchain_quota_event: `"near"` or `"exhausted"` when a count crosses that level,
            `"refused"` by one limit, `"waiting"` when a call begins to wait, `"downgraded"` for
            each model call that goes to `downgrade_to`, and `"ended"` with the run's final message.

    Examples:
        >>> from langchain_quota.telemetry.stream import QuotaEvent
        >>> def is_for_users(event: QuotaEvent) -> bool:
        ...     return event["langchain_quota_event"] in ("waiting", "ended")
    """

    langchain_quota_event: EventName


def write(name: EventName, reason: StopReason) -> None:
    """Write an event to the stream of the running graph, if there is one."""
    try:
        writer = get_stream_writer()
    except (RuntimeError, KeyError):
        # Outside of a graph, as in a callback.
        return
    writer(QuotaEvent(langchain_quota_event=name, **reason))


def write_decisions(event: DecisionEvent) -> None:
    """Write the downgrades, refusals and crossings of verdicts, in their order."""
    for verdict in event.verdicts:
        for status in verdict.decision.limits if verdict.downgraded_by else ():
            if status.limit == verdict.downgraded_by:
                scope = max(status.counts, key=lambda count: count.share).scope
                subject = event.subjects.get((status.limit, scope))
                write("downgraded", reason_of(verdict.outcome.value, status, scope, subject))
    for verdict, status, scope, level in event.notices:
        subject = event.subjects.get((status.limit, scope))
        reason = reason_of(verdict.outcome.value, status, scope, subject)
        write("refused" if level is None else _CROSSINGS[level], reason)
