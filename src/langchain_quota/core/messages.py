"""The words that the model and the user read when a call is refused.

The default texts of refused calls and of final messages are those of LangChain's limiters:
applications match on them.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from langchain_quota.core.checks import Check
from langchain_quota.core.decide import Breach
from langchain_quota.core.decision import Decision, LimitStatus
from langchain_quota.limits import Limit
from langchain_quota.limits.call import CONCURRENCY
from langchain_quota.limits.repeats import RepeatLimit
from langchain_quota.runtime.units import PER_BASE_UNIT, Unit, as_dollars, as_time, shown

SKIPPED = (
    "This tool call was not run: the run was stopped because another tool call of the same "
    "message exceeded the limit."
)
"""The answer of a tool call whose batch was stopped."""

FINALIZED = "This tool call was not run: the model call that made it was the last of its budget."
"""The answer of a tool call that the last admitted model call makes."""

ABANDONED = "This tool call was not completed: the run that made it was stopped."
"""The answer that is added to a tool call which an earlier run left without one."""

NOT_RUN = "quota_not_run"
"""The mark on the answer of a call that was let through and then did not run.

The mark is not sent to models.
"""

_EXCEEDED = "Tool call limit exceeded."
_BUDGETS: Mapping[Unit, str] = {
    "tokens": "Token",
    "nanodollars": "Cost",
    "milliseconds": "Time",
}


def refusal(decision: Decision, limits: Mapping[str, Limit]) -> str:
    """What the model reads as the answer of a refused tool call, from each limit that refuses."""
    refusing = [each for each in decision.refused_by if each.enforced]
    texts = [_refusal(limits[each.limit], decision, each) for each in refusing]
    # No limit refuses this call, but one refuses another call with its id.
    texts = texts or [f"{_EXCEEDED} Do not make additional tool calls."]
    resets_at = decision.resets_at
    if resets_at is not None and any(limits[each.limit].message is None for each in refusing):
        texts.append(f"It resets at {_when(resets_at)}.")
    return " ".join(dict.fromkeys(texts))


def took_too_long(tool: str, most: int, *, runs_on: bool) -> str:
    """What the model reads as the answer of a call that took longer than so many milliseconds."""
    what = "and nobody waits for it any more. It may still run" if runs_on else "and was stopped"
    return (
        f"The call of '{tool}' took longer than {as_time(most)}, {what}. It may have done its "
        "work, or a part of it. Look at what it did, try a smaller step, or go on without it."
    )


def final(breaches: Sequence[Breach], *, is_last: bool = False) -> str:
    """What the user reads when the run ends at limits: every limit that was hit, with counts."""
    # Never blank: providers refuse a message without text, and supervisors pass on another one.
    texts = [
        _own_final(breach.limit.limit.message, breach.decision) or reached(breach, is_last=is_last)
        for breach in breaches
    ]
    return " ".join(dict.fromkeys(texts))


def question(
    breaches: Sequence[Breach], offered: Mapping[str, int], units: Mapping[str, Unit]
) -> str:
    """The question that a person reads: whether a run may go on."""
    more = ", ".join(_more(name, amount, units[name]) for name, amount in offered.items())
    what = " ".join(f"{reached(each).rstrip('.')}." for each in breaches)
    return f"{what} Approve to allow {more}. Reject to end the run."


def _more(name: str, amount: int, unit: Unit) -> str:
    if unit in PER_BASE_UNIT:
        return f"{shown(amount, unit)} more for {name!r}"
    noun = unit.removesuffix("s") if amount == 1 else unit
    return f"{amount:,} more {noun} for {name!r}"


def reached(breach: Breach, *, is_last: bool = False) -> str:
    """Which thresholds of a limit are reached, with counts, and when quotas reset."""
    # For tools the counts are as if the refused calls had run, for the model those before the call.
    limit = breach.limit.limit
    if breach.store_unavailable:
        return _unchecked(limit)
    if isinstance(limit, RepeatLimit):
        repeats, _ = _why(limit, breach.decision)
        return f"{repeats}."
    if breach.limit.is_budget:
        parts = [
            f"{each.scope} limit ({_of_budget(each, used, limit.unit, is_last=is_last)}"
            f"{_resets(each.resets_at)})"
            for each, used in breach.exceeded
        ]
        return f"{_BUDGETS[limit.unit]} limits exceeded: {', '.join(parts)}"
    exceeded = [
        (each.scope, used, each.most, _resets(each.resets_at)) for each, used in breach.exceeded
    ]
    if limit.kind == "model":
        parts = [f"{scope} limit ({n - 1}/{most}{resets})" for scope, n, most, resets in exceeded]
        return f"Model call limits exceeded: {', '.join(parts)}"
    parts = [
        f"{scope} limit exceeded ({n}/{most} calls{resets})" for scope, n, most, resets in exceeded
    ]
    names = ", ".join(f"'{tool}'" for tool in limit.tools)
    return f"{names + ' tool' if names else 'Tool'} call limit reached: {' and '.join(parts)}."


def _refusal(limit: Limit, decision: Decision, status: LimitStatus) -> str:
    if limit.message is not None:
        return _own(limit.message, decision)
    if status.reason == "store":
        return _unchecked(limit)
    if (count := status.count_of(CONCURRENCY)) is not None:
        most = count.limit
        return (
            f"This call was not run: other calls were running, and at most {most} "
            f"call{'' if most == 1 else 's'} of {_tools(limit) or 'tools'} may run at the same "
            "time. Try again later, or go on without it."
        )
    if limit.unit == "nanodollars" or isinstance(limit, RepeatLimit):
        reason, remedy = _why(limit, decision)
        return f"This call was not run: {reason}. {remedy}"
    if limit.tools:
        return f"{_EXCEEDED} Do not call {_tools(limit)} again."
    allowed = " or ".join(f"'{tool}'" for tool in limit.exclude)
    but = f" other than to {allowed}" if allowed else ""
    return f"{_EXCEEDED} Do not make additional tool calls{but}."


def _tools(limit: Limit) -> str:
    return " or ".join(f"'{tool}'" for tool in limit.tools)


def _why(limit: Limit, decision: Decision) -> tuple[str, str]:
    """What costs too much, or repeats itself, and what the model can do instead."""
    status = next(each for each in decision.limits if each.limit == limit.name)
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


def _unchecked(limit: Limit) -> str:
    if limit.unit != "calls":
        return f"{_BUDGETS[limit.unit]} limit could not be checked: try again later."
    if limit.kind == "model":
        return "Model call limit could not be checked: try again later."
    return "Tool call limit could not be checked, so the call was not run. Try again later."


def _of_budget(check: Check, used: int, unit: Unit, *, is_last: bool) -> str:
    """What is used of a budget, and why that is too much if something is left."""
    # Such as `"950/1000 tokens"`, or `"$0.12/$0.50, the call may need $0.40"`.
    most = check.most or 0
    if unit in PER_BASE_UNIT:
        text, needs = f"{shown(used, unit)}/{shown(most, unit)}", shown(check.needs, unit)
    else:
        text, needs = f"{used}/{most} {unit}", str(check.needs)
    if used >= most:
        return text
    if is_last:
        return f"{text}, the rest was kept for the last answer"
    return f"{text}, the call may need {needs}"


def _resets(moment: datetime | None) -> str:
    return "" if moment is None else f"; resets at {_when(moment)}"


def _when(moment: datetime) -> str:
    """A time in UTC, and before that in its zone, if it has another one."""
    utc = f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return f"{moment.isoformat()} ({utc})" if moment.utcoffset() else utc


def _own_final(message: str | Callable[[Decision], str] | None, decision: Decision) -> str:
    text = "" if message is None else _own(message, decision)
    return text if text.strip() else ""


def _own(message: str | Callable[[Decision], str], decision: Decision) -> str:
    return message(decision) if callable(message) else message
