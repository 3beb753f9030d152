"""Log checks of calls that take long: an agent's user waits as long for nothing."""

from langchain_quota.telemetry.events import DecisionEvent
from langchain_quota.telemetry.logs import agent_name, fields_of, logger

SLOW = 1.0
"""From how many seconds on a check is slow."""


def log_slow_check(event: DecisionEvent) -> None:
    """Log a check that was slow, with its agent and the outcomes; waits do not count."""
    seconds = event.duration / 10**9
    if seconds < SLOW:
        return
    agent = agent_name(event.verdicts[0].call.agent)
    outcomes = [verdict.outcome.value for verdict in event.verdicts]
    fields = fields_of(event="slow_check", agent=agent, seconds=seconds, decisions=outcomes)
    logger.warning("a check of agent %r took %.1f seconds", agent, seconds, extra=fields)
