"""The lines of the log, as functions."""

import logging
from datetime import UTC

from langchain_quota.core.decision import LimitStatus
from langchain_quota.limits.call import CONCURRENCY, FROZEN, STORE, Scope
from langchain_quota.runtime.units import UNIT_LABELS, Level, format_amount, in_base_unit
from langchain_quota.telemetry.events import DecisionEvent
from langchain_quota.telemetry.labels import UNNAMED, limit_label

logger = logging.getLogger("langchain_quota")

NEARLY_FULL = 0.8
"""Share of a store's room that it cannot free, from which it is logged as nearly full."""

USAGE_REMEDY = (
    "ChatOpenAI with a base_url, or with an HTTP client of your own, reports it while it streams "
    "with stream_usage=True"
)


def log_notices(event: DecisionEvent) -> None:
    """Log refusals, and the thresholds that charges have crossed."""
    for _, status, scope, reached in event.notices:
        if reached is not None:
            severity = logging.WARNING if reached is Level.EXHAUSTED else logging.INFO
            _log(severity, reached, event, status, scope)
        else:
            result = "refused" if status.enforced else "would refuse"
            resets = status.resets_at
            resets_at = None if resets is None else resets.astimezone(UTC).isoformat()
            _log(logging.DEBUG, result, event, status, scope, resets_at=resets_at)


def no_price(agent: str | None, error: str) -> None:
    """Log that a model has no price; the error says what was looked up, and what to do."""
    logger.warning(
        "a model of agent %r has no price: %s. This is logged once, and counted each time",
        agent_name(agent),
        error,
    )


def unpaid_tool(agent: str | None, tool: str) -> None:
    """Log that the cost of a provider's own tool is not charged."""
    name = agent_name(agent)
    logger.warning("provider's own tool %r in agent %r has no price: not charged", tool, name)


def estimated(model: str) -> None:
    """Log that a model's tokens are estimated."""
    logger.warning(
        "model %r reports no usage, or too little: its tokens are estimated. %s",
        model,
        USAGE_REMEDY,
    )


def recovery(component: str) -> None:
    """Log that a component which failed works again."""
    # Warn, so that the line is seen where the line about the failure was seen.
    logger.warning("%s of langchain-quota works again", component)


def nearly_full(store: object) -> bool:
    """Log that a store is nearly full; return False if it says how full it is, and has room."""
    occupancy = getattr(store, "occupancy", None)
    if occupancy is None:
        return True
    keys, droppable, max_keys = occupancy
    is_full: bool = keys - droppable >= NEARLY_FULL * max_keys
    if is_full:
        logger.warning(
            "the store is nearly full: %d of at most %d counts cannot be dropped",
            keys - droppable,
            max_keys,
        )
    return is_full


def agent_name(agent: str | None) -> str:
    """Return the agent's name for logs, where the number of names has no bound."""
    return limit_label(agent) if agent else UNNAMED


def fields_of(**fields: object) -> dict[str, object]:
    """Return the fields of a log record, with the prefix of all our fields."""
    return {f"quota_{name}": value for name, value in fields.items()}


def _log(
    severity: int,
    result: str,
    event: DecisionEvent,
    status: LimitStatus,
    scope: Scope,
    **extra_fields: str | None,
) -> None:
    if not logger.isEnabledFor(severity):
        return
    # If the store was unavailable, or the subject is frozen, no count matters.
    count, unit = status.count_of(scope), status.unit
    used, threshold = (count.used, count.limit) if count else (None, None)
    subject = event.subjects.get((status.limit, scope))
    whose = f" of {subject!r}" if subject else ""
    # Name the argument of the limit, or the quota, as the user wrote it.
    source = f"quota {scope!r}{whose}" if count and count.per else f"{scope}_limit"
    source = scope if scope == CONCURRENCY else source
    amounts = f"{format_amount(used, unit)} of {format_amount(threshold, unit)} ({source})"
    if status.needs and used is not None and threshold is not None and used < threshold:
        amounts += f", the call may need {format_amount(status.needs, unit)}"
    fields = fields_of(
        event=str(result),
        limit=status.limit,
        scope=scope,
        agent=event.caller.name,
        thread=event.caller.thread,
        subject=subject,
        used=None if used is None else in_base_unit(used, unit),
        threshold=None if threshold is None else in_base_unit(threshold, unit),
        unit=UNIT_LABELS[unit],
        **extra_fields,
    )
    logger.log(
        severity,
        "limit %r %s: agent %r, thread %r, %s",
        status.limit,
        result,
        event.caller.name,
        event.caller.thread,
        {STORE: "store unavailable", FROZEN: f"calls{whose} are frozen"}.get(scope, amounts),
        extra=fields,
    )
