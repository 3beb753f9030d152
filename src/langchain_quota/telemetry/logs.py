"""The log lines about a limit."""

import logging

from langchain_quota.decision import Level, Standing
from langchain_quota.limits import STORE, Scope

logger = logging.getLogger("langchain_quota")


def log_refusal(standing: Standing, scope: Scope, agent: str, thread: str | None) -> None:
    """Log that a limit refuses a call."""
    event = "refused" if standing.enforced else "would refuse"
    resets = standing.resets_at
    when = None if resets is None else resets.isoformat()
    _log(logging.DEBUG, event, standing, scope, agent, thread, quota_resets_at=when)


def log_crossing(
    standing: Standing, scope: Scope, reached: Level, agent: str, thread: str | None
) -> None:
    """Log that a charge has crossed a threshold."""
    severity = logging.WARNING if reached is Level.EXHAUSTED else logging.INFO
    _log(severity, reached, standing, scope, agent, thread)


def _log(  # noqa: PLR0913, PLR0917 - what a line tells
    severity: int,
    event: str,
    standing: Standing,
    scope: Scope,
    agent: str,
    thread: str | None,
    **more: str | None,
) -> None:
    # Where the store could not be asked there is no count.
    used = None if scope == STORE else standing.used(scope)
    threshold = standing.threshold(scope)
    logger.log(
        severity,
        "limit %r %s: agent %r, thread %r, %s",
        standing.limit,
        event,
        agent,
        thread,
        "store unavailable" if scope == STORE else f"{scope} {used} of {threshold}",
        extra={
            "quota_event": str(event),
            "quota_limit": standing.limit,
            "quota_scope": scope,
            "quota_agent": agent,
            "quota_thread": thread,
            "quota_used": used,
            "quota_threshold": threshold,
            **more,
        },
    )
