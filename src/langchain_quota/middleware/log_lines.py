"""The lines of a decision log: what a replay needs to check the same calls under other limits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from langchain_quota.core.decision import Decision, Outcome
from langchain_quota.limits.call import THREAD
from langchain_quota.middleware.calls import Batch
from langchain_quota.middleware.root_run import root_run
from langchain_quota.middleware.state import State, ledger
from langchain_quota.stores.keys import parsed, prefix_of
from langchain_quota.telemetry.observers import LogLine

RAN = (Outcome.ALLOWED, Outcome.WOULD_BLOCK)


def check_line(
    batch: Batch, decisions: Sequence[Decision], *, stored: bool, ended: bool
) -> LogLine:
    """Return the line of calls that are checked together; counts are those before and after."""
    context, run, root, prefix = batch.context, ledger(batch.state).get("run"), root_run(), ""
    counts, granted = dict[str, list[int]](), dict[str, int]()
    subjects = {"global": "", "agent": context.agent or "", THREAD: str(run)}
    if context.run_thread_id is not None and (stored or context.remembers):
        # Each graph of a thread has a state of its own.
        subjects[THREAD] = "|".join(
            [str(context.run_thread_id), *("" if stored else context.graph)]
        )
    # After the last call of a budget, no call is checked.
    for (limits, demand), decision in zip(batch.call_checks, decisions, strict=False):
        # Of limits that share a count, those without a threshold for a thread have no key for it.
        checks = sorted(
            (c for limit in limits for c in limit.checks), key=lambda c: c.key is not None
        )
        for check in {check.counter: check for check in checks}.values():
            if stored and check.scope == THREAD and check.key is None:
                # Nothing needs this count, so it may be that of the run alone.
                continue
            name, used = count_name(check.counter), batch.counted.get(check.counter, 0)
            # What a call reserves is replaced by what it has used.
            added = 0 if check.lease else demand.amounts[check.counter]
            count = counts.setdefault(name, [used, used])
            count[1] += added * (decision.outcome in RAN)
            if check.rollover is None:
                # What rolls over follows from the limit, and is no grant.
                granted[name] = batch.granted.get(check.key or "", 0)
    # While the store is unavailable, the calls are checked without quotas.
    for check in (check for limit in batch.original_limits.limits for check in limit.checks):
        if check.per:
            subjects[check.per] = check.subject
        if check.key is not None:
            prefix = f"{prefix_of(check.key)}/".lstrip("/")
    budgets = batch.limits.budgets if batch.pending is None else ()
    line = {
        "run": run,
        "root": root and root.key,
        "nested": context.is_nested,
        "calls": [_call(decision) for decision in decisions],
        "counts": counts,
        "granted": {name: amount for name, amount in granted.items() if amount},
        "frozen": [count_name(counter) for counter in batch.frozen],
        "reserved": {budget.limit.name: budget.checks[1].amount for budget in budgets},
        "structured": batch.pending is not None and batch.pending.structured,
        "outage": batch.sent is not None and not batch.answered,
        "ended": ended,
    }
    written = {name: value for name, value in line.items() if value}
    return written, {per: prefix + of for per, of in subjects.items() if prefix or of}


def charge_line(state: State, charged: Mapping[str, int]) -> LogLine:
    """Return the line of what calls of a run have used, by counter."""
    return {"run": ledger(state).get("run"), "charged": charged}, {}


@lru_cache(maxsize=4096)
def count_name(counter: str) -> str:
    """Return the name of a count without prefix and subject, which its line has once."""
    key = parsed(counter)
    return counter if key is None else str(replace(key, prefix="", subject=""))


def _call(decision: Decision) -> Mapping[str, object]:
    call, cost = decision.call, max((status.cost for status in decision.limits), default=0)
    refused_by = {status.limit: status.refusal_scope for status in decision.refused_by}
    values = {"tool": call.tool, "id": call.id, "refused_by": refused_by, "nanodollars": cost}
    return {"decision": decision.outcome, **{name: v for name, v in values.items() if v}}
