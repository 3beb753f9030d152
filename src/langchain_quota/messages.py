"""The words that the model and the user read when a call is refused.

The default texts of refused calls and of final messages are those of LangChain's limiters:
applications match on them.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from langchain_quota.decide import Breach
from langchain_quota.decision import Decision
from langchain_quota.limits import Limit

SKIPPED = (
    "This tool call was not run: the run was stopped because another tool call of the same "
    "message exceeded the limit."
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
    refusing = [each for each in decision.refused_by if each.enforced]
    texts = [
        _refusal(limits[each.limit], decision, unchecked=each.reason == "store")
        for each in refusing
    ] or [_refusal(None, decision)]
    resets_at = decision.resets_at
    if resets_at is not None and any(limits[each.limit].message is None for each in refusing):
        texts.append(f"It resets at {_utc(resets_at)}.")
    return " ".join(dict.fromkeys(texts))


def final(breaches: Sequence[Breach]) -> str:
    """What the user reads when the run ends at limits: every limit that was hit, with counts.

    Never blank: providers refuse a message without text, and supervisors pass on another one.
    """
    return " ".join(
        _own_final(breach.limit.limit.message, breach.decision) or reached(breach)
        for breach in breaches
    )


def reached(breach: Breach) -> str:
    """Which thresholds of a limit are reached, with counts, and when quotas reset.

    For tools the counts are as if the refused calls had run, for the model those before the call.
    """
    limit = breach.limit.limit
    if breach.unchecked:
        return _unchecked(limit)
    exceeded = [
        (scope, count, most, "" if resets_at is None else f"; resets at {_utc(resets_at)}")
        for scope, count, most, resets_at in breach.exceeded
    ]
    if limit.kind == "model":
        parts = [f"{scope} limit ({n - 1}/{most}{resets})" for scope, n, most, resets in exceeded]
        return f"Model call limits exceeded: {', '.join(parts)}"
    parts = [
        f"{scope} limit exceeded ({n}/{most} calls{resets})" for scope, n, most, resets in exceeded
    ]
    names = ", ".join(f"'{tool}'" for tool in limit.tools)
    return f"{names + ' tool' if names else 'Tool'} call limit reached: {' and '.join(parts)}."


def _refusal(limit: Limit | None, decision: Decision, *, unchecked: bool = False) -> str:
    if limit is not None and limit.message is not None:
        return _own(limit.message, decision)
    if limit is not None and unchecked:
        return _unchecked(limit)
    if limit is None or not limit.tools:
        allowed = [f"'{tool}'" for tool in getattr(limit, "exclude", ())]
        but = f" other than to {' or '.join(allowed)}" if allowed else ""
        return f"Tool call limit exceeded. Do not make additional tool calls{but}."
    names = " or ".join(f"'{tool}'" for tool in limit.tools)
    return f"Tool call limit exceeded. Do not call {names} again."


def _unchecked(limit: Limit) -> str:
    if limit.kind == "model":
        return "Model call limit could not be checked: try again later."
    names = " or ".join(f"'{tool}'" for tool in limit.tools)
    return (
        f"Tool call limit could not be checked, so the call {f'of {names} ' if names else ''}was "
        "not run. Try again later."
    )


def _utc(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def _own_final(message: str | Callable[[Decision], str] | None, decision: Decision) -> str:
    text = "" if message is None else _own(message, decision)
    return text if text.strip() else ""


def _own(message: str | Callable[[Decision], str], decision: Decision) -> str:
    return message(decision) if callable(message) else message
