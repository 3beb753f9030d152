"""Calls of the last hour, and the last refusals, as the page shows them."""

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from langchain_quota.core.decide import Verdict
from langchain_quota.core.decision import LimitStatus, Outcome, Reason
from langchain_quota.limits.call import FROZEN, RUN, STORE
from langchain_quota.runtime.units import UNIT_LABELS, in_base_unit
from langchain_quota.telemetry.events import DecisionEvent
from langchain_quota.telemetry.labels import limit_label

if TYPE_CHECKING:
    from langchain_quota.telemetry.workers import Use

MINUTES = 60
"""The number of minutes for which calls are counted."""

Refusal = tuple[float, str | None, tuple[str, str], dict[str, Any]]
"""When it was, the label of the thread, the scope and label of the quota, and what is shown."""


class RecentCalls:
    """The calls of a process by the minute since the Unix epoch, and its last 500 refusals."""

    def __init__(self) -> None:
        self.refusals = deque[Refusal](maxlen=500)
        self.minutes: dict[int, list[int]] = {}
        """The minutes, each with its allowed calls and its blocked ones."""

    def count(self, verdict: Verdict, now: float) -> None:
        """Count the call of a verdict."""
        # Whether a call that needs a slot runs is decided later.
        if verdict.outcome is Outcome.SKIPPED or verdict.needs_slot:
            return
        minute = int(now // 60)
        if minute not in self.minutes:
            kept = {at: n for at, n in self.minutes.items() if at > minute - MINUTES}
            self.minutes = {**kept, minute: [0, 0]}
        self.minutes[minute][verdict.outcome is Outcome.BLOCKED] += 1

    def keep_refusals(self, event: DecisionEvent) -> None:
        """Keep what limits have refused, with the traces of the calls."""
        now = time.time()
        for index, verdict in enumerate(event.verdicts):
            refused = (status for status in verdict.refused_by if status.enforced)
            self.refusals += [_kept(event, index, status, now) for status in refused]


def refusal_of(status: LimitStatus, now: float) -> dict[str, Any]:
    """Return what a limit refuses as the page shows it; a rate and a freeze have no count."""
    count, unit = status.count_of(status.scope), status.unit
    scope = limit_label(status.refusal_scope or "")
    refusal = {"scope": scope, "subject": "", "unit": UNIT_LABELS[unit]}
    if count is None or count.smooth or scope == FROZEN:
        return refusal
    amounts = (count.before, count.limit or 0, status.needs)
    used, allowed, needs = (in_base_unit(amount, unit) for amount in amounts)
    # A run that a limit ends is over now; a person who is asked may let it go on.
    is_over = scope == RUN and status.exit_behavior not in ("continue", "ask")
    ends = now if is_over else count.resets_at and count.resets_at.timestamp()
    return {**refusal, "used": used, "allowed": allowed, "needs": needs, "resets_at": ends}


def ended(refusal: dict[str, Any] | None, now: float) -> dict[str, Any] | None:
    """Return the refusal of a limit that admits a call now; that of a rate does not end."""
    ends = refusal is not None and ("used" in refusal or refusal["scope"] == FROZEN)
    return {**refusal, "resets_at": now} if refusal and ends else refusal


def note_outcome(
    use: "Use", verdict: Verdict, index: int, now: float, *, is_charge: bool
) -> Reason | None:
    """Note and count a refusal, except in an outage; return why a limit refuses the call."""
    if verdict.plan.rules[index].limit.name not in verdict.refused:
        if use.refusal is not None and not is_charge:
            use.refusal = ended(use.refusal, now)
        return None
    status = verdict.decision.limits[index]
    if status.reason != STORE and status.enforced:
        scope = status.refusal_scope or ""
        # A new dict, because a concurrent scrape may read the old one.
        use.blocked = {**use.blocked, scope: use.blocked.get(scope, 0) + 1}
        use.refused, use.refusal = now, refusal_of(status, now)
    return status.reason


def _kept(event: DecisionEvent, index: int, status: LimitStatus, now: float) -> Refusal:
    """Return a refusal, and the rows that show it."""
    count = status.count_of(status.scope)
    label = event.subjects.get((status.limit, status.refusal_scope or ""), "")
    # The row of a quota per agent has the agent's name.
    row = label or (event.caller.agent if count is not None and count.per == "agent" else "")
    tool = event.tools[index] if event.verdicts[index].call.kind == "tool" else None
    trace = (event.exemplars.get(index) or {}).get("trace_id")
    about = {"at": now, "tool": tool, "trace_id": trace, "limit": limit_label(status.limit)}
    shown = {**about, **refusal_of(status, now), "subject": label}
    return now, event.caller.thread, (status.scope or "", row), shown
