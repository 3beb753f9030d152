"""From a hook's state to what is decided and written: the same for every limiting middleware."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage

from langchain_quota import messages
from langchain_quota.decision import Call, Decision, Outcome, Refund
from langchain_quota.engine import Used, Verdict, judge, stops
from langchain_quota.errors import ModelCallLimitExceededError, ToolCallLimitExceededError
from langchain_quota.limits import MODEL, Terms
from langchain_quota.middleware.history import answer, newest_name, pending_calls
from langchain_quota.middleware.origin import origin
from langchain_quota.state import (
    LEDGER,
    RUN_TOOLS,
    THREAD_TOOLS,
    Batch,
    Ledger,
    ToolCounts,
    batch_of,
    ledger,
    run_model,
    thread_model,
)

Update = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a hook decided, and what becomes of it.

    Attributes:
        decisions: The decisions, in the order of the calls.
        started: When judging began, in nanoseconds since the Unix epoch.
        task_id: The hook's task, if it runs in a graph.
        update: What is written to the state; `None` for nothing.
        refunds: Charges of other limiters that were taken back.
        error: Raised instead of writing the update.
    """

    decisions: tuple[Decision, ...]
    started: int
    task_id: str | None
    update: Update | None = None
    refunds: tuple[Refund, ...] = ()
    error: Exception | None = None

    def writing(self, update: Update) -> "Ruling":
        """The same ruling, with something to write to the state."""
        return replace(self, update=update)


def rule_on_tools(
    state: Mapping[str, Any],
    runtime: Any,
    terms: Sequence[Terms],
    *,
    every_call: bool,
    pending_error: bool = False,
) -> Ruling | None:
    """Judge the tool calls that wait for an answer; `None` if there is nothing to judge.

    Args:
        state: The agent's state.
        runtime: The hook's runtime.
        terms: The limits for tool calls.
        every_call: Whether calls that match no limit are decided (as allowed), too.
        pending_error: Whether ending the run with other tools' calls pending is an error.
    """
    started = time.time_ns()
    pending = pending_calls(state)
    if pending is None or not pending.calls:
        return None
    caller = origin(runtime, model_name=pending.message.name)
    calls = [
        Call("tool", call["name"], call["id"], agent=caller.agent, thread_id=caller.thread_id)
        for call in pending.calls
    ]
    if ledger(state).get("final"):
        decisions = tuple(Decision(call, Outcome.SKIPPED) for call in calls)
        update: Update = {
            "messages": _answers(decisions, terms, messages.FINALIZED),
            "jump_to": "end",
        }
        return Ruling(decisions, started, caller.task_id, update)

    matched = [any(each.limit.matches(call) for each in terms) for call in calls]
    if not any(matched) and not every_call:
        return None
    matching = [call for call, is_matched in zip(calls, matched, strict=True) if is_matched]
    counts = ToolCounts.of(state, pending.message.id)
    ids = [str(call.id) for call in matching]
    usage = {each.limit.counter: counts.used(each.limit.counter, ids) for each in terms}
    refusals = dict(ledger(state).get("refusals") or {})
    judged = calls if every_call else matching
    verdict = _judge(terms, usage, judged, refusals, may_stop=not pending.structured)

    stopped = stops(verdict.exit)
    decisions = verdict.decisions
    if stopped and not every_call:
        rest = iter(decisions)
        decisions = tuple(
            next(rest) if is_matched else Decision(call, Outcome.SKIPPED)
            for call, is_matched in zip(calls, matched, strict=True)
        )
    others = [call for call, is_matched in zip(calls, matched, strict=True) if not is_matched]
    error = _tool_error(verdict, others if pending_error else ())
    if error is not None:
        return Ruling(decisions, started, caller.task_id, error=error)

    refunds = _settle(counts, terms, decisions)
    batch = batch_of(state, pending.message.id)
    passed = [*(batch["passed"] if batch else ()), *(each.limit.name for each in terms)]
    update = _counts_update(state, terms, matching, counts)
    update[LEDGER] = Ledger(
        run_tools=counts.run,
        batch=Batch(message=pending.message.id or "", charges=counts.charges, passed=passed),
        refusals=refusals,
    )
    answers = _answers(decisions, terms, messages.SKIPPED)
    if stopped:
        answers.append(AIMessage(content=messages.final(verdict.breaches)))
        update["jump_to"] = "end"
    if answers:
        update["messages"] = answers
    return Ruling(decisions, started, caller.task_id, update, refunds)


def _counts_update(
    state: Mapping[str, Any], terms: Sequence[Terms], calls: Sequence[Call], counts: ToolCounts
) -> Update:
    """The thread's counts, and the run's as LangChain writes them: with the calls refused."""
    attempted = dict(state.get(RUN_TOOLS) or {})
    for counter, limit in {each.limit.counter: each.limit for each in terms}.items():
        asked = sum(map(limit.matches, calls))
        if asked:
            counts.thread.setdefault(counter, 0)
            attempted[counter] = attempted.get(counter, 0) + asked
    return {THREAD_TOOLS: counts.thread, RUN_TOOLS: attempted}


def rule_on_model(
    state: Mapping[str, Any], runtime: Any, terms: Sequence[Terms], *, charging: bool
) -> tuple[Ruling, Used]:
    """Judge the model call that is about to be made; the ruling, and the counts afterwards.

    The update is `None` for an admitted call: what is written for it is the caller's affair.

    Args:
        state: The agent's state.
        runtime: The hook's runtime.
        terms: The limits for model calls.
        charging: Whether an admitted call is charged now.
    """
    started = time.time_ns()
    used = Used(thread_model(state), run_model(state))
    name = newest_name(state.get("messages") or ()) if used.run else None
    caller = origin(runtime, model_name=name)
    call = Call("model", agent=caller.agent, thread_id=caller.thread_id)
    verdict = judge(terms, {MODEL: used}, [call], charging=charging)
    error = _model_error(verdict, used)
    update = None
    if stops(verdict.exit) and error is None:
        text = messages.final(verdict.breaches)
        update = {"jump_to": "end", "messages": [AIMessage(content=text)]}
    after = used if verdict.breaches else used.plus(call.amount)
    return Ruling(verdict.decisions, started, caller.task_id, update, error=error), after


def _judge(
    terms: Sequence[Terms],
    usage: Mapping[str, Used],
    calls: Sequence[Call],
    refusals: dict[str, int],
    *,
    may_stop: bool,
) -> Verdict:
    """Judge a batch, count the refusals of limits that give up, and end the run where one does."""
    verdict = judge(terms, usage, calls, may_stop=may_stop)
    given_up = set()
    for breach in verdict.breaches:
        name, after = breach.limit.name, breach.limit.give_up_after
        if after is not None:
            refusals[name] = refusals.get(name, 0) + breach.refusals
            if refusals[name] >= after:
                given_up.add(name)
    if not given_up:
        return verdict
    ending = [each.ending() if each.limit.name in given_up else each for each in terms]
    return judge(ending, usage, calls, may_stop=may_stop)


def _tool_error(verdict: Verdict, others: Sequence[Call]) -> Exception | None:
    if verdict.exit == "error":
        breach = next(each for each in verdict.breaches if each.terms.exit_behavior == "error")
        return ToolCallLimitExceededError(
            thread_count=breach.thread_count,
            run_count=breach.run_count,
            thread_limit=breach.terms.thread_limit,
            run_limit=breach.terms.run_limit,
            tool_name=", ".join(breach.limit.tools) or None,
            message=" ".join(map(messages.reached, verdict.breaches)),
        )
    if verdict.exit == "end" and others:
        names = ", ".join(sorted({str(call.tool) for call in others}))
        return NotImplementedError(
            f"Cannot end the run with other tool calls pending: {names}. Use "
            "on_pending='skip', or exit_behavior 'continue' or 'error'"
        )
    return None


def _model_error(verdict: Verdict, used: Used) -> Exception | None:
    if verdict.exit != "error":
        return None
    breach = next(each for each in verdict.breaches if each.terms.exit_behavior == "error")
    return ModelCallLimitExceededError(
        thread_count=used.thread,
        run_count=used.run,
        thread_limit=breach.terms.thread_limit,
        run_limit=breach.terms.run_limit,
        message=" ".join(map(messages.reached, verdict.breaches)),
    )


def _settle(
    counts: ToolCounts, terms: Sequence[Terms], decisions: Sequence[Decision]
) -> tuple[Refund, ...]:
    """Charge what is let through; take back what other limiters charged for what is not."""
    counters = {each.limit.name: each.limit.counter for each in terms}
    refunds: list[Refund] = []
    amounts: Counter[tuple[str, str, str]] = Counter()
    for decision in decisions:
        call = decision.call
        call_id = str(call.id)
        if decision.outcome in {Outcome.BLOCKED, Outcome.SKIPPED}:
            refunds += [
                Refund(replace(call, amount=amount), limit)
                for limit, amount in counts.take_back(call_id).items()
            ]
            continue
        # What runs is counted even where a limit that is not enforced refuses it; but it is not
        # charged to that limit, and so never refunded by its name.
        counted = {
            (counters[standing.limit], standing.limit if standing.charged else "")
            for standing in decision.standings
        }
        for counter, name in counted:
            amounts[call_id, counter, name] += call.amount
    for (call_id, counter, name), amount in amounts.items():
        counts.charge(call_id, counter, name, amount)
    return tuple(refund for refund in refunds if refund.limit)


def _answers(
    decisions: Sequence[Decision], terms: Sequence[Terms], skipped: str
) -> list[AnyMessage]:
    """One answer for each call that does not run; the refused ones first."""
    limits = {each.limit.name: each.limit for each in terms}
    found: dict[str, AnyMessage] = {}
    for outcome in (Outcome.BLOCKED, Outcome.SKIPPED):
        for decision in decisions:
            call_id = str(decision.call.id)
            if decision.outcome is outcome and call_id not in found:
                text = messages.refusal(decision, limits) if outcome is Outcome.BLOCKED else skipped
                found[call_id] = answer(call_id, decision.call.tool, text)
    return list(found.values())
