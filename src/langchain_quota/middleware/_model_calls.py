"""The model call: from the state to what it asks, and from the answer to what is decided.

request = pending(state, …)
result = acquire(request)
conclusion = conclude(request, result)
"""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessage

from langchain_quota import messages
from langchain_quota.admission import AcquireResult, admit
from langchain_quota.decide import Breach
from langchain_quota.decision import RUN, THREAD, Call, Decision, Outcome
from langchain_quota.errors import ModelCallLimitExceededError
from langchain_quota.limits import MODEL
from langchain_quota.middleware._calls import Conclusion, Request, Update
from langchain_quota.middleware._context import call_context
from langchain_quota.middleware._history import newest_name
from langchain_quota.resolved import ResolvedLimits
from langchain_quota.state import LEDGER, THREAD_MODEL, Ledger, ledger, run_model, thread_model

_THREAD = f"{MODEL}/{THREAD}"
_RUN = f"{MODEL}/{RUN}"


def model_counts(state: Mapping[str, Any]) -> dict[str, int]:
    """The state's counts of model calls, by the name of the counter."""
    return {_THREAD: thread_model(state), _RUN: run_model(state)}


def pending(
    state: Mapping[str, Any], runtime: Any, limits: ResolvedLimits, *, task: str
) -> Request:
    """The model call that is about to be made, and what it asks.

    Args:
        state: The agent's state.
        runtime: The hook's runtime.
        limits: The limits for model calls.
        task: The name of this work, among all that the middleware does in a step.
    """
    used = model_counts(state)
    name = newest_name(state.get("messages") or ()) if used[_RUN] else None
    context = call_context(runtime, model_name=name)
    call = Call("model", agent=context.agent, thread_id=context.thread_id)
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
    )


def conclude(request: Request, result: AcquireResult, *, charging: bool = True) -> Conclusion:
    """What is decided, and what is written.

    Args:
        request: The call.
        result: The answer.
        charging: Whether an admitted call is charged now, and written to the state.
    """
    decisions, breaches = request.decided(result, charging=charging)
    error = _exceeded(breaches)
    if error is not None:
        return Conclusion(decisions, error=error)
    written = Ledger()
    if request.answered and request.known.get("pending_refunds"):
        written["pending_refunds"] = {}
    if decisions[0].outcome is Outcome.BLOCKED:
        written["ended"] = str(uuid4())
        name = request.context.own_name
        final = AIMessage(content=messages.final(breaches), name=name, id=written["ended"])
        update: Update = {"jump_to": "end", "messages": [final], LEDGER: written}
        return Conclusion(decisions, update)
    if not charging or not request.asked[0].limits:
        return Conclusion(decisions)
    charged = result.charged(request.hits)
    after = {name: used + charged[name] for name, used in result.used.items()}
    written["run_model"] = after[_RUN]
    written["final"] = _final(request, decisions[0], after)
    return Conclusion(decisions, {THREAD_MODEL: after[_THREAD], LEDGER: written})


def _final(request: Request, decision: Decision, after: Mapping[str, int]) -> str:
    """What the run ends with if this call, the last of its budget, says nothing; else empty."""
    finalizing = [each for each in decision.limits if each.exit_behavior == "finalize"]
    if not any(
        each.used(scope) == each.threshold(scope) for each in finalizing for scope in each.scopes
    ):
        return ""
    # What the user would read of one more call.
    _, breaches = request.decided(admit(request.hits, after, request.stops))
    return messages.final(breaches)


def _exceeded(breaches: Sequence[Breach]) -> ModelCallLimitExceededError | None:
    breach = next((each for each in breaches if each.exit_behavior == "error"), None)
    if breach is None:
        return None
    return ModelCallLimitExceededError(
        thread_count=breach.thread_count - 1,
        run_count=breach.run_count - 1,
        thread_limit=breach.limit.thread_limit,
        run_limit=breach.limit.run_limit,
        message=" ".join(map(messages.reached, breaches)),
        decision=breach.decision,
    )
