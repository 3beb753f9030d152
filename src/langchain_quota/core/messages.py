"""The texts that the model and the user read at a limit.

The default texts of blocked calls and of final messages are those of LangChain's limiters:
applications match on them.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from langchain_quota.core.decide import Breach
from langchain_quota.core.decision import Decision, LimitStatus
from langchain_quota.core.plans import Meter
from langchain_quota.limits import Limit
from langchain_quota.limits.call import CONCURRENCY
from langchain_quota.limits.calls import RepeatLimit
from langchain_quota.runtime.units import PER_BASE_UNIT, Unit, as_dollars, format_amount

SKIPPED = (
    "Execution stopped before this tool call could run because another tool call in the same batch "
    "exceeded the limit."
)
"""The answer of a tool call whose batch was stopped."""

FINALIZED = (
    "This tool call was not run: the model call that made it was the last one in its budget."
)
"""The answer of a tool call that the last admitted model call makes."""

ABANDONED = "This tool call was not completed: the run that made it was stopped."
"""The answer that is added to a tool call which an earlier run left without one."""

NOT_RUN = "quota_not_run"
"""The mark on the answer of a call that was allowed and then did not run.

The mark is not sent to models.
"""

_EXCEEDED = "Tool call limit exceeded."
_OF_MODELS: Mapping[Unit, str] = {
    "calls": "Model call",
    "tokens": "Token",
    "nanodollars": "Cost",
    "milliseconds": "Time",
}
"""What limits on model calls are called, by what they count."""


def refusal(decision: Decision, limits: Mapping[str, Limit]) -> str:
    """Return the answer of a blocked tool call, for the model, from each limit that refuses."""
    refusing = [status for status in decision.refused_by if status.enforced]
    texts = [_refusal(limits[status.limit], decision, status) for status in refusing]
    # No limit refuses this call, but one refuses another call with its id.
    texts = texts or [f"{_EXCEEDED} Do not make additional tool calls."]
    resets_at = decision.resets_at
    if resets_at is not None and any(limits[status.limit].message is None for status in refusing):
        texts.append(f"It resets at {_when(resets_at)}.")
    return " ".join(dict.fromkeys(texts))


def final(breaches: Sequence[Breach], *, is_last: bool = False) -> str:
    """Return the final text of a run that ends at limits: every limit that was hit, with counts."""
    # It is never blank: providers refuse a message without text, and supervisors pass on another.
    texts = []
    for breach in breaches:
        custom = _custom(breach.rule.limit, breach.decision)
        texts.append(custom if custom.strip() else reached(breach, is_last=is_last))
    return " ".join(dict.fromkeys(texts))


def reached(breach: Breach, *, is_last: bool = False) -> str:
    """Return which thresholds of a limit are reached, with counts, and when quotas reset."""
    # Tool counts are as if the refused calls had run; model counts are those before the call.
    limit = breach.rule.limit
    if breach.reason in {"frozen", "store"}:
        return _undecided(limit, breach.reason)
    if isinstance(limit, RepeatLimit):
        repeats, _ = _why(limit, breach.decision)
        return f"{repeats}."
    if limit.kind == "model":
        parts = [
            f"{meter.scope} limit ({_of_models(meter, used, limit.unit, is_last=is_last)}"
            f"{_resets(resets_at)})"
            for meter, used, resets_at in breach.exceeded
        ]
        return f"{_OF_MODELS[limit.unit]} limits exceeded: {', '.join(parts)}"
    parts = [
        f"{meter.scope} limit exceeded ({used}/{meter.maximum} calls{_resets(resets_at)})"
        for meter, used, resets_at in breach.exceeded
    ]
    names = ", ".join(f"'{tool}'" for tool in limit.tools)
    return f"{names + ' tool' if names else 'Tool'} call limit reached: {' and '.join(parts)}."


def _refusal(limit: Limit, decision: Decision, status: LimitStatus) -> str:
    if limit.message is not None:
        return _custom(limit, decision)
    if status.reason in {"frozen", "store"}:
        return _undecided(limit, status.reason)
    if (count := status.count_of(CONCURRENCY)) is not None:
        calls = "1 call" if count.limit == 1 else f"{count.limit} calls"
        return (
            f"This call was not run: other calls were running, and at most {calls} of "
            f"{_either(limit.tools) or 'tools'} may run at the same time. Try again later, or go "
            "on without it."
        )
    if limit.unit == "nanodollars" or isinstance(limit, RepeatLimit):
        reason, remedy = _why(limit, decision)
        return f"This call was not run: {reason}. {remedy}"
    if limit.tools:
        return f"{_EXCEEDED} Do not call {_either(limit.tools)} again."
    allowed = _either(limit.exclude)
    but = f" other than to {allowed}" if allowed else ""
    return f"{_EXCEEDED} Do not make additional tool calls{but}."


def _either(tools: Sequence[str]) -> str:
    return " or ".join(f"'{tool}'" for tool in tools)


def _why(limit: Limit, decision: Decision) -> tuple[str, str]:
    """Return why a call costs too much or repeats itself, and what the model can do instead."""
    status = next(status for status in decision.limits if status.limit == limit.name)
    tool = f"'{decision.call.tool}'"
    if not isinstance(limit, RepeatLimit):
        cost = as_dollars(status.needs)
        return f"{tool} costs {cost}, more than what is left", "Go on without it."
    if status.reason == "failing":
        return f"{tool} has failed in the same way {limit.most_failures} times", (
            "Do not try it again before you have learnt something new: read what the error says, "
            "look at what it is about with another tool, or say what you cannot do."
        )
    same = "with the same arguments" if limit.key is None else "in the same way"
    called = f"called {limit.run_limit} times {same}, and nothing new came of it"
    if limit.run_limit == 1:
        # The first call may well have done its work.
        called = f"already called {same}"
    return f"{tool} was {called}", (
        "Do not repeat this call: use the answer that you have, change the arguments, do something "
        "else, or say what you cannot do."
    )


def _undecided(limit: Limit, reason: str | None) -> str:
    if reason == "frozen":
        return "The call was not run: an operator has stopped calls like it until further notice."
    if limit.kind == "model":
        return f"{_OF_MODELS[limit.unit]} limit could not be checked: try again later."
    return "Tool call limit could not be checked, so the call was not run. Try again later."


def _of_models(meter: Meter, used: int, unit: Unit, *, is_last: bool) -> str:
    """Return how much models have used, and why that is too much if something is left."""
    # For example `"950/1000 tokens"`, or `"$0.12/$0.50, the call may need $0.40"`.
    maximum = meter.maximum or 0
    if unit == "calls":
        return f"{used - 1}/{maximum}"
    if unit in PER_BASE_UNIT:
        text = f"{format_amount(used, unit)}/{format_amount(maximum, unit)}"
        needs = format_amount(meter.needs, unit)
    else:
        text, needs = f"{used}/{maximum} {unit}", str(meter.needs)
    if used >= maximum:
        return text
    if is_last:
        return f"{text}, the rest was kept for the last answer"
    return f"{text}, the call may need {needs}"


def _resets(moment: datetime | None) -> str:
    return "" if moment is None else f"; resets at {_when(moment)}"


def _when(moment: datetime) -> str:
    """Return a time in UTC, after the time in its own zone if that is another one."""
    utc = f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return f"{moment.isoformat()} ({utc})" if moment.utcoffset() else utc


def _custom(limit: Limit, decision: Decision) -> str:
    """Return a limit's own text; empty if it has none."""
    message = limit.message or ""
    try:
        text: object = message(decision) if callable(message) else message
    except Exception as error:
        error.add_note(f"raised by the message of limit {limit.name!r}")
        raise
    if not isinstance(text, str):
        kind = type(text).__name__
        raise TypeError(f"the message of limit {limit.name!r} must return a string, not a {kind}")
    return text
