"""The words that the model and the user read when a call is refused.

The default texts of refused calls and of final messages are those of LangChain's limiters:
applications match on them.
"""

from collections.abc import Callable, Mapping, Sequence

from langchain_quota.decision import Breach, Decision
from langchain_quota.limits import Limit, ModelCallLimit

SKIPPED = (
    "This tool call was not run: the run was stopped because another tool call of the same "
    "message exceeded its limit."
)
"""The answer of a tool call whose batch was stopped."""

FINALIZED = "This tool call was not run: the model call that made it was the last of its budget."
"""The answer of a tool call that the last admitted model call makes."""

ABANDONED = "This tool call was not completed: the run that made it was stopped."
"""The answer given later to a tool call that an earlier run left without one."""


def refusal(decision: Decision, limits: Mapping[str, Limit]) -> str:
    """What the model reads as the answer of a refused tool call, from every limit that refuses it.

    Args:
        decision: The refusal.
        limits: The limits by name.
    """
    refusing = [limits[each.limit] for each in decision.refused_by if each.enforced]
    texts = [_refusal(limit, decision) for limit in refusing] or [_refusal(None, decision)]
    return " ".join(dict.fromkeys(texts))


def final(breaches: Sequence[Breach]) -> str:
    """What the user reads when the run ends at limits: every limit that was hit, with counts."""
    return " ".join(
        reached(breach)
        if breach.limit.message is None
        else _own(breach.limit.message, breach.decision)
        for breach in breaches
    )


def reached(breach: Breach) -> str:
    """Which thresholds of a limit are reached, with counts.

    For tools the counts are as if the refused calls had run, for the model those before the call.
    """
    terms = breach.terms
    if isinstance(breach.limit, ModelCallLimit):
        rows = [
            ("thread", breach.thread_count - 1, terms.thread_limit),
            ("run", breach.run_count - 1, terms.run_limit),
        ]
        parts = [
            f"{scope} limit ({count}/{limit})"
            for scope, count, limit in rows
            if limit is not None and count >= limit
        ]
        return f"Model call limits exceeded: {', '.join(parts)}"
    rows = [
        ("thread", breach.thread_count, terms.thread_limit),
        ("run", breach.run_count, terms.run_limit),
    ]
    parts = [
        f"{scope} limit exceeded ({count}/{limit} calls)"
        for scope, count, limit in rows
        if limit is not None and count > limit
    ]
    names = ", ".join(f"'{tool}'" for tool in breach.limit.tools)
    return f"{names + ' tool' if names else 'Tool'} call limit reached: {' and '.join(parts)}."


def _refusal(limit: Limit | None, decision: Decision) -> str:
    if limit is not None and limit.message is not None:
        return _own(limit.message, decision)
    if limit is None or not limit.tools:
        allowed = [f"'{tool}'" for tool in getattr(limit, "exclude", ())]
        but = f" other than to {' or '.join(allowed)}" if allowed else ""
        return f"Tool call limit exceeded. Do not make additional tool calls{but}."
    names = " or ".join(f"'{tool}'" for tool in limit.tools)
    return f"Tool call limit exceeded. Do not call {names} again."


def _own(message: str | Callable[[Decision], str], decision: Decision) -> str:
    return message(decision) if callable(message) else message
