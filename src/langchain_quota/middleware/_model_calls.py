"""The model call: from the state to a request, and from the answer to a conclusion.

request = pending(state, …)
result = acquire(request)
conclusion = conclude(request, result)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from langchain.agents.middleware.types import ModelRequest
from langchain_core.messages import AIMessage

from langchain_quota import messages
from langchain_quota.admission import AcquireResult, admit
from langchain_quota.decide import Breach
from langchain_quota.decision import RUN, THREAD, Call, Decision, Outcome
from langchain_quota.errors import ModelCallLimitExceededError
from langchain_quota.features.budgets.let_through import Admitted
from langchain_quota.limit_options import BUDGETS, MODEL
from langchain_quota.middleware._calls import Conclusion, Late, Request, Update
from langchain_quota.middleware._context import CallContext, call_context
from langchain_quota.middleware._history import newest_name
from langchain_quota.resolved import Asked, ResolvedLimits
from langchain_quota.state import (
    LEDGER,
    THREAD_MODEL,
    Held,
    Ledger,
    ledger,
    merge_ledgers,
    run_model,
    spent,
    thread_model,
)

_THREAD = f"{MODEL}/{THREAD}"
_RUN = f"{MODEL}/{RUN}"
_NAMES = [(each, f"{each}/{THREAD}", f"{each}/{RUN}") for each in BUDGETS]
"""What model calls use, and the names of its counters."""


def model_counts(state: Mapping[str, Any]) -> dict[str, int]:
    """The state's counts of model calls, by the name of the counter."""
    return {_THREAD: thread_model(state), _RUN: run_model(state)}


def budget_counts(state: Mapping[str, Any], late: Late | None) -> dict[str, int]:
    """The state's counts of what model calls have used of budgets, by the name of the counter."""
    of_thread, of_run = spent(state)
    counts = {}
    for counter, thread, run in _NAMES:
        beside = late.amounts.get(counter, 0) if late else 0
        counts[thread] = of_thread.get(counter, 0) + beside
        counts[run] = of_run.get(counter, 0) + beside
    return counts


def spending(state: Mapping[str, Any], late: Late) -> Ledger:
    """What is written to the state about what model calls have used of budgets."""
    of_thread, of_run = spent(state)
    for counter, amount in late.amounts.items():
        of_thread[counter] = of_thread.get(counter, 0) + amount
        of_run[counter] = of_run.get(counter, 0) + amount
    return Ledger(thread_spent=of_thread, run_spent=of_run, spent_by=late.newest)


def pending(
    state: Mapping[str, Any],
    runtime: Any,
    limits: ResolvedLimits,
    *,
    task: str,
    late: Late | None = None,
) -> Request:
    """The model call that is about to be made, and what it asks."""
    used = model_counts(state)
    context = _context(state, runtime, used)
    call = Call("model", agent=context.agent, thread_id=context.thread_id)
    if limits.budgets:
        used |= budget_counts(state, late)
    return Request(
        state=state,
        known=ledger(state),
        context=context,
        task=task,
        limits=limits,
        calls=[call],
        asked=[limits.asked(call)],
        used=used,
        stops=limits.stops,
        late=late,
    )


def unlimited(
    request: ModelRequest[Any], limits: ResolvedLimits, *, task: str
) -> tuple[Request, Conclusion]:
    """The model call that is being made, and that it runs: no limit judges model calls."""
    call = pending(request.state, request.runtime, limits, task=task)
    return call, Conclusion([Decision(call.calls[0], Outcome.ALLOWED)])


def bounded(request: Request, bounds: Mapping[str, int]) -> Request:
    """The same call, which asks budgets for all that it can use."""
    (asked,) = request.asked
    # What the call already holds may be in use, so this is held in addition.
    return replace(request, asked=[asked.reserving(bounds)], anew=True)


def made(state: Mapping[str, Any], runtime: Any) -> Call:
    """The model call that is being made."""
    context = _context(state, runtime, model_counts(state))
    return Call("model", agent=context.agent, thread_id=context.thread_id)


def _context(state: Mapping[str, Any], runtime: Any, used: Mapping[str, int]) -> CallContext:
    name = newest_name(state.get("messages") or ()) if used[_RUN] else None
    return call_context(runtime, model_name=name)


def conclude(request: Request, result: AcquireResult, *, charging: bool = True) -> Conclusion:
    """What is decided, and what is written."""
    decisions, breaches = request.decided(result, charging=charging)
    error = _exceeded(breaches)
    if error is not None:
        return Conclusion(decisions, error=error)
    written = spending(request.state, request.late) if request.late else Ledger()
    written |= request.granting()
    if request.answered and request.known.get("pending_refunds"):
        written["pending_refunds"] = {}
    if decisions[0].outcome is Outcome.BLOCKED:
        written["ended"] = str(uuid4())
        name = request.context.own_name
        final = AIMessage(content=request.final_text(breaches), name=name, id=written["ended"])
        return Conclusion(decisions, {"jump_to": "end", "messages": [final], LEDGER: written})
    if not charging or not request.asked[0].limits:
        return Conclusion(decisions)
    charged = result.charged(request.hits)
    after = {name: used + charged[name] for name, used in result.used.items()}
    update: Update = {LEDGER: written}
    if _RUN in request.hits[0].amounts:
        update[THREAD_MODEL] = after[_THREAD]
        written["run_model"] = after[_RUN]
    else:
        # Budgets alone: another middleware may count calls where LangChain does.
        written["thread_model"] = thread_model(request.state) + 1
        written["run_model"] = request.used[_RUN] + 1
    written["final"] = _final(request, result.used, after)
    if request.limits.budgets:
        written["held"] = held_for(request)
    return Conclusion(decisions, update)


def _final(request: Request, before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """The run's final text if this is its budget's last call and answers nothing; else empty."""
    (asked,) = request.asked
    finalizing = {
        each.limit.name for each in asked.limits if each.limit.exit_behavior == "finalize"
    }
    if not finalizing:
        return ""
    # Ask for one more call: if it is refused, this one is the last. What this call will use of
    # budgets is not known.
    next_call = replace(request, asked=[asked.keeping()])
    budgets = {check.counter for each in asked.limits if each.is_budget for check in each.checks}
    counts = {name: before[name] if name in budgets else after[name] for name in after}
    result = admit(next_call.hits, counts, next_call.stops)
    if finalizing.isdisjoint(result.refused[0]):
        return ""
    _, breaches = next_call.decided(result)
    return messages.final(breaches, is_last=True)


def uncounted(request: Request, conclusion: Conclusion, *, by_budgets: bool) -> Conclusion:
    """What is written if a call is refused that was let through and counted before."""
    of_thread = max(0, request.used[_THREAD] - 1)
    update = dict(conclusion.update or {})
    known: Ledger = update[LEDGER]
    written = merge_ledgers(known, Ledger(run_model=max(0, request.used[_RUN] - 1)))
    if by_budgets:
        written["thread_model"] = of_thread
    else:
        update[THREAD_MODEL] = of_thread
    return conclusion._replace(update={**update, LEDGER: written})


def admitted(request: Request, conclusion: Conclusion, *, decided: bool) -> Admitted:
    """What is kept of a call that is let through until it is made."""
    if decided:
        return Admitted()
    return Admitted(
        conclusion.decisions,
        request.started,
        request.task_id,
        request.known.get("trace"),
        request.follows_refusal,
        {
            check.key: 1
            for each in request.asked[0].limits
            for check in each.checks
            if not each.is_budget and check.key is not None
        },
    )


def held_for(request: Request) -> Held:
    """What a store holds of budgets for the call, for its settlement; without a store, its name."""
    keys = {
        check.key: each.limit.counter
        for each in request.asked[0].limits
        for check in each.checks
        if each.is_budget and check.key is not None
    }
    if not keys or not request.answered:
        return Held(request=uuid4().hex, keys={})
    return Held(request=request.holds, keys=keys)


def held_amounts(asked: Asked) -> dict[str, int]:
    """What a call holds of budgets, by the model's counter."""
    found: dict[str, int] = {}
    for each in asked.limits:
        if each.is_budget:
            amounts = [asked.hits.amounts[check.counter] for check in each.checks]
            counter = each.limit.counter
            found[counter] = max(found.get(counter, 0), *amounts)
    return found


def _exceeded(breaches: Sequence[Breach]) -> ModelCallLimitExceededError | None:
    breach = next((each for each in breaches if each.exit_behavior == "error"), None)
    if breach is None:
        return None
    calls = 0 if breach.limit.is_budget else 1
    return ModelCallLimitExceededError(
        thread_count=breach.thread_count - calls,
        run_count=breach.run_count - calls,
        thread_limit=breach.limit.checks[0].most,
        run_limit=breach.limit.checks[1].most,
        message=" ".join(map(messages.reached, breaches)),
        decision=breach.decision,
    )
