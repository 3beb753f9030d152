"""The log lines about a limit."""

import logging

from langchain_quota.decision import STORE, Level, LimitStatus, Scope

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


def _log(  # noqa: PLR0913, PLR0917 - what a line tells
    severity: int,
    event: str,
    status: LimitStatus,
    scope: Scope,
    agent: str,
    thread: str | None,
    **more: str | None,
) -> None:
    # Where the store could not be asked there is no count.
    used = None if scope == STORE else status.used(scope)
    threshold = status.threshold(scope)
    logger.log(
        severity,
        "limit %r %s: agent %r, thread %r, %s",
        status.limit,
        event,
        agent,
        thread,
        "store unavailable" if scope == STORE else f"{scope} {used} of {threshold}",
        extra={
            "quota_event": str(event),
            "quota_limit": status.limit,
            "quota_scope": scope,
            "quota_agent": agent,
            "quota_thread": thread,
            "quota_used": used,
            "quota_threshold": threshold,
            **more,
        },
    )
