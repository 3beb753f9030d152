"""Why a limit stopped a call or a run, as data for the code around the agent."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

# That of `typing` has no JSON Schema before Python 3.12.
from typing_extensions import TypedDict

from langchain_quota.core.decision import Decision, LimitStatus, Outcome
from langchain_quota.limits.call import Scope
from langchain_quota.runtime.arguments import short_repr
from langchain_quota.runtime.units import UNIT_LABELS, Unit, in_base_unit

STOP = "langchain_quota_stop"
"""The key of the data, in the `response_metadata` of an AIMessage and the `artifact` of a
ToolMessage. Providers are sent neither of them."""


@dataclass
class RequestRuns:
    """What the runs of a web request have done."""

    refusals: list[Decision] = field(default_factory=list)
    """The refusals that have ended outermost runs."""
    checked: bool = False


request_runs: ContextVar[RequestRuns | None] = ContextVar("langchain_quota_request", default=None)
"""What the runs of this context are noted in, if anybody asks."""


class StopReason(TypedDict):
    """Why a limit stopped a call or a run; plain JSON, with the names of the log's fields.

    Attributes:
        decision: What was decided about the call: `"blocked"` or `"skipped"`. A tool call that took
            longer than its `call_limit` is `"cancelled"` or `"left_running"`. In an event, it may
            also be `"allowed"`, `"would_block"`, or `"waiting"` for a decision.
        limit: The limit's name.
        scope: The scope that is exhausted: `"thread"`, `"run"`, `"concurrency"`, `"call"`, or a
            quota's name; `"frozen"` if the subject is frozen, `"store"` if the store was
            unavailable.
        subject: The user, tenant or other subject of a quota, as `subject_label` returns it; `None`
            if `subject_label` does not name the quota.
        used: How much is used, without the blocked call, in `unit`; `None` if it is not known.
        threshold: How much may be used, in `unit`; `None` if it is not known.
        unit: `"calls"`, `"tokens"`, `"dollars"` or `"seconds"`.
        resets_at: When waiting helps, as text in ISO 8601, in UTC; `None` if it does not.

    Examples:
        >>> from langchain_quota.core.stops import StopReason
        >>> def shown(reason: StopReason) -> str:
        ...     return f"{reason['used']} of {reason['threshold']} {reason['unit']} are used."
    """

    decision: str
    limit: str
    scope: str
    subject: str | None
    used: float | None
    threshold: float | None
    unit: str
    resets_at: str | None


def make_reason(  # noqa: PLR0913 - keyword-only, with defaults
    decision: str,
    limit: str,
    scope: Scope,
    *,
    subject: str | None = None,
    used: int | None = None,
    threshold: int | None = None,
    unit: Unit = "calls",
    resets_at: datetime | None = None,
) -> StopReason:
    """Return the data for amounts that are counted in the unit."""
    return StopReason(
        decision=decision,
        limit=limit,
        scope=scope,
        subject=subject,
        used=None if used is None else in_base_unit(used, unit),
        threshold=None if threshold is None else in_base_unit(threshold, unit),
        unit=UNIT_LABELS[unit],
        resets_at=None if resets_at is None else resets_at.astimezone(UTC).isoformat(),
    )


def reason_of(
    decision: str, status: LimitStatus, scope: Scope | None = None, subject: str | None = None
) -> StopReason:
    """Return the data of a limit at a call, for the scope that it refuses or for another one."""
    scope = scope or status.refusal_scope or ""
    count = status.count_of(scope)
    if count is None:
        return make_reason(decision, status.limit, scope, subject=subject, unit=status.unit)
    return make_reason(
        decision,
        status.limit,
        scope,
        subject=subject,
        used=count.before if decision == Outcome.BLOCKED else count.used,
        threshold=count.limit,
        unit=status.unit,
        resets_at=status.resets_at if status.refused else count.resets_at,
    )


def stop_reason(result: object) -> StopReason | None:
    """Return why a limit ended a run, from the run's final message; `None` if no limit did.

    It is for reading only: whoever may write messages into a history can write this, too. No limit
    decides by it. The last answer of a model with `exit_behavior="finalize"` is the model's own,
    and has no reason.

    Args:
        result: What `invoke` returned, with its messages, or a list of messages. Or one message,
            such as the answer of a tool call: then it returns why a limit stopped that call.

    Raises:
        TypeError: `result` is something else, such as a chunk of a stream, or `None`.

    Examples:
        >>> from langchain.agents import create_agent
        >>> from langchain_quota import ModelCallLimit, QuotaMiddleware, stop_reason
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> quota = QuotaMiddleware([ModelCallLimit(run_limit=0)])
        >>> agent = create_agent(ScriptedChatModel(script=[]), middleware=[quota])
        >>> reason = stop_reason(agent.invoke({"messages": [("user", "Hi!")]}))
        >>> reason["limit"], reason["scope"], reason["threshold"]
        ('model', 'run', 0)
    """
    # Version 2 of `invoke` returns an object with the state as its value.
    final: Any = getattr(result, "value", result)
    places: Sequence[str] = ("response_metadata", "artifact")
    if isinstance(final, Mapping) and "messages" in final:
        final = final["messages"]
    if final in ({}, [], ()):
        return None
    if isinstance(final, list | tuple):
        final, places = final[-1], places[:1]
    if not ("content" in final if isinstance(final, Mapping) else hasattr(final, "content")):
        raise TypeError(
            "result must be what invoke returns, a list of messages or a message, not "
            f"{short_repr(result)}: of an update, give stop_reason the messages of a node"
        )
    for place in places:
        # A message of a remote graph is a dict.
        data = final.get(place) if isinstance(final, Mapping) else getattr(final, place, None)
        if isinstance(data, Mapping) and STOP in data:
            reason: StopReason = data[STOP]
            return reason
    return None
