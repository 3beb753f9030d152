"""What limits have refused, as the page shows it."""

import time
from collections.abc import Iterator
from math import inf
from typing import Any

from langchain_quota.core.decide import Verdict
from langchain_quota.core.decision import LimitStatus, Reason
from langchain_quota.limits.call import FROZEN, ROOT_RUN, RUN, STORE, THREAD
from langchain_quota.runtime.units import UNIT_LABELS, in_base_unit
from langchain_quota.telemetry.events import DecisionEvent
from langchain_quota.telemetry.labels import limit_label
from langchain_quota.telemetry.workers import BLOCKED_NOW, Refusal, Use


def refusals_of(event: DecisionEvent) -> Iterator[Refusal]:
    """Return what limits have refused, with the rows that show it and the traces of the calls."""
    now, caller = time.time(), event.caller
    for index, verdict in enumerate(event.verdicts):
        for status in (status for status in verdict.refused_by if status.enforced):
            count = status.count_of(status.scope)
            label = event.subjects.get((status.limit, status.refusal_scope or ""), "")
            # The row of a quota per agent has the agent's name.
            row = label or (caller.agent if count is not None and count.per == "agent" else "")
            tool = event.tools[index] if verdict.call.kind == "tool" else None
            trace = (event.exemplars.get(index) or {}).get("trace_id")
            about = {"at": now, "tool": tool, "trace_id": trace, "limit": limit_label(status.limit)}
            rows = (THREAD, caller.thread), (status.scope or "", row)
            yield rows, {**about, **_shown(status, now), "subject": label}


def _shown(status: LimitStatus, now: float) -> dict[str, Any]:
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


def note_outcome(
    use: Use, verdict: Verdict, index: int, now: float, *, is_charge: bool
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
        use.refused, use.refusal = now, _shown(status, now)
    return status.reason


def ended(refusal: dict[str, Any] | None, now: float) -> dict[str, Any] | None:
    """Return the refusal of a limit that admits a call now; that of a rate does not end."""
    ends = refusal is not None and ("used" in refusal or refusal["scope"] == FROZEN)
    return {**refusal, "resets_at": now} if refusal and ends else refusal


def still_refuses(use: Use, now: float) -> bool:
    """Return whether the last refusal of a limit still holds, as far as is known."""
    refusal, refused = use.refusal or {}, use.refused or 0.0
    # A run is over soon after its limit has refused a call.
    lasts = 60 if refusal.get("scope") in (RUN, ROOT_RUN) else BLOCKED_NOW
    return now - refused < lasts and now < (refusal.get("resets_at") or inf)
