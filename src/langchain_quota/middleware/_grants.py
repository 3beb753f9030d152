"""Grants to a thread whose state counts it."""

from collections.abc import Mapping
from typing import Any

from langchain_quota.decision import RUN
from langchain_quota.limits import Limit
from langchain_quota.raised import raised
from langchain_quota.resolved import ResolvedLimits, thread_counter
from langchain_quota.state import Granted, Ledger, ledger
from langchain_quota.stores.grants import Grant, in_utc


def with_granted(limits: ResolvedLimits, state: Mapping[str, Any], now: float) -> ResolvedLimits:
    """Limits, raised by what the thread's state grants.

    Args:
        limits: The limits.
        state: The agent's state.
        now: The time, in seconds since the Unix epoch.
    """
    return raised(limits, granted_now(state, now)) if ledger(state).get("granted") else limits


def granted_now(state: Mapping[str, Any], now: float) -> dict[str, int]:
    """What the thread's state grants, by counter.

    Args:
        state: The agent's state.
        now: The time, in seconds since the Unix epoch.
    """
    return {
        counter: sum(each["amount"] for each in grants.values() if _lasts(each, now))
        for counter, grants in (ledger(state).get("granted") or {}).items()
    }


def of_threads(granted: Mapping[str, dict[str, Granted]]) -> dict[str, dict[str, Granted]]:
    """The grants that outlast the run, by counter."""
    return {name: each for name, each in granted.items() if not name.endswith(f"/{RUN}")}


def granting(state: Mapping[str, Any], limit: Limit, grant: Grant) -> tuple[Grant, Ledger | None]:
    """A grant to a thread, and what is to be written to its state for it.

    Args:
        state: The thread's state.
        limit: The limit.
        grant: What is asked for.

    Returns:
        The grant; if the state has one with this id already, that one, with nothing to write.
    """
    counter, known = thread_counter(limit), ledger(state).get("granted") or {}
    given = known.get(counter, {})
    before = given.get(grant.id)
    if before is not None:
        until = None if before["ends"] is None else in_utc(before["ends"])
        first = Grant(
            grant.key,
            before["amount"],
            grant.id,
            in_utc(before["at"]),
            until,
            before["reason"],
            before["by"],
        )
        return first, None
    return grant, Ledger(granted={**known, counter: {**given, grant.id: kept(grant)}})


def kept(grant: Grant) -> Granted:
    """A grant as a state keeps it."""
    return Granted(
        amount=grant.amount,
        ends=grant.ends,
        at=grant.given_at.timestamp(),
        reason=grant.reason,
        by=grant.by,
    )


def _lasts(granted: Granted, now: float) -> bool:
    return granted["ends"] is None or granted["ends"] > now
