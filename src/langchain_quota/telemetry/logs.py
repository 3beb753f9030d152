"""The log lines about a limit."""

import logging
from collections.abc import Sequence

from langchain_quota.decision import AT_ONCE, STORE, Answer, LimitStatus, Scope
from langchain_quota.levels import Level
from langchain_quota.units import UNIT_LABELS, in_base_unit, shown

logger = logging.getLogger("langchain_quota")


def log_refusal(status: LimitStatus, scope: Scope, agent: str, thread: str | None) -> None:
    """Log that a limit refuses a call."""
    event = "refused" if status.enforced else "would refuse"
    resets = status.resets_at
    when = None if resets is None else resets.isoformat()
    _log(logging.DEBUG, event, status, scope, agent, thread, quota_resets_at=when)


def log_crossing(
    status: LimitStatus, scope: Scope, reached: Level, agent: str, thread: str | None
) -> None:
    """Log that a charge has crossed a threshold."""
    severity = logging.WARNING if reached is Level.EXHAUSTED else logging.INFO
    _log(severity, reached, status, scope, agent, thread)


def log_question(agent: str, limits: Sequence[str]) -> None:
    """Log that a person is asked at limits."""
    logger.info(
        "agent %r asks a person whether it may go on at %s",
        agent,
        ", ".join(map(repr, limits)),
        extra={"quota_event": "asked", "quota_agent": agent, "quota_limits": [*limits]},
    )


def log_answer(agent: str, limits: Sequence[str], answer: Answer) -> None:
    """Log what a person has answered at limits."""
    logger.info(
        "agent %r was answered %r at %s, by %r",
        agent,
        answer.type,
        ", ".join(map(repr, limits)),
        answer.by,
        extra={
            "quota_event": "answered",
            "quota_agent": agent,
            "quota_limits": [*limits],
            "quota_answer": answer.type,
            "quota_by": answer.by,
        },
    )


def _log(  # noqa: PLR0913, PLR0917 - what a line says
    severity: int,
    event: str,
    status: LimitStatus,
    scope: Scope,
    agent: str,
    thread: str | None,
    **more: str | None,
) -> None:
    # If the store could not be asked, there is no count.
    used = None if scope == STORE else status.used(scope)
    threshold, unit = status.threshold(scope), status.unit
    # In the user's words: an argument of the limit, or a quota.
    what = scope if scope == AT_ONCE else f"quota {scope!r}"
    if status.quota(scope) is None:
        what = f"{scope}_limit"
    amounts = f"{shown(used, unit)} of {shown(threshold, unit)} ({what})"
    if status.needs and used is not None and threshold is not None and used < threshold:
        amounts += f", the call may need {shown(status.needs, unit)}"
    logger.log(
        severity,
        "limit %r %s: agent %r, thread %r, %s",
        status.limit,
        event,
        agent,
        thread,
        "store unavailable" if scope == STORE else amounts,
        extra={
            "quota_event": str(event),
            "quota_limit": status.limit,
            "quota_scope": scope,
            "quota_agent": agent,
            "quota_thread": thread,
            "quota_used": None if used is None else in_base_unit(used, unit),
            "quota_threshold": None if threshold is None else in_base_unit(threshold, unit),
            "quota_unit": UNIT_LABELS[unit],
            **more,
        },
    )
