"""The calls that a run has left unfinished, and the charges that the next run takes back."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from langchain_quota.decision import Call, Refund
from langchain_quota.middleware._context import CallContext
from langchain_quota.middleware._history import unfinished_calls
from langchain_quota.middleware._tool_counts import ToolCounts
from langchain_quota.state import Abandoned, ledger, thread_tools


def abandoned_calls(state: Mapping[str, Any]) -> Abandoned | None:
    """The unfinished calls of the previous run's last batch, as its limiters knew them."""
    known = ledger(state)
    batch = known.get("batch")
    found = unfinished_calls(state, batch["message"]) if batch else None
    if batch is None or found is None:
        return None
    message, calls = found
    original = {call["id"]: call["name"] for call in message.tool_calls}
    return Abandoned(
        calls=[[call["name"], str(call["id"]), original[call["id"]]] for call in calls],
        charges=batch["charges"],
        acquired=batch.get("acquired", {}),
        held_by=[each for each in known.get("begun_by", ()) if each not in batch["passed"]],
    )


def take_back(
    state: Mapping[str, Any], abandoned: Abandoned, context: CallContext
) -> tuple[ToolCounts, list[Refund]]:
    """The counts without the charges for abandoned calls, and what was taken back."""
    counts = ToolCounts(
        thread_tools(state),
        {},
        deepcopy(abandoned["charges"]),
        dict(abandoned.get("acquired") or {}),
        dict(ledger(state).get("pending_refunds") or {}),
    )
    refunds = [
        Refund(Call("tool", name, call_id, amount, context.agent, context.thread_id), limit)
        for name, call_id, _ in abandoned["calls"]
        for limit, amount in counts.take_back(call_id)
        if limit
    ]
    return counts, refunds
