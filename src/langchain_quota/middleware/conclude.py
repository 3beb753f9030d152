"""Turn results of checks into answers to blocked calls, state updates, refunds and exceptions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import uuid4

from langchain_core.messages import AIMessage, AnyMessage, ToolMessage

from langchain_quota.core import messages
from langchain_quota.core.admission import AcquireRequest
from langchain_quota.core.decide import Breach, Verdict
from langchain_quota.core.decision import Decision, LimitStatus, Outcome, Refund
from langchain_quota.core.plans import Plan
from langchain_quota.core.stops import STOP, StopReason, reason_of
from langchain_quota.errors import ModelCallLimitExceededError, ToolCallLimitExceededError
from langchain_quota.limits.call import Exit
from langchain_quota.middleware.calls import OF_RUN, OF_THREAD, Change, Step, Update
from langchain_quota.middleware.context import call_context
from langchain_quota.middleware.history import PendingCalls, answer_of_blocked
from langchain_quota.middleware.state import (
    LEDGER,
    THREAD_MODEL,
    THREAD_TOOLS,
    Charge,
    Ledger,
    State,
    ToolBatch,
    ToolCounts,
    ledger,
    new_charge,
    run_model,
    thread_model,
)
from langchain_quota.middleware.thread_usage import with_work
from langchain_quota.runtime import compat

_NOT_RUN = (Outcome.BLOCKED, Outcome.SKIPPED)
_EXITS: tuple[Exit, ...] = ("continue", "end", "error")
"""Exit behaviors, the strongest last."""
_MOST_ENDS = 10
"""How often a run that a limit has ended ends again before it raises."""
_ENDED = "a limit has ended this run"


def conclude_model(step: Step, *, charging: bool = True) -> Change:
    """Return what follows from the check of a model call."""
    verdicts, breaches = step.decide(charging=charging)
    error = _model_error(breaches) if breaches else None
    if error is not None:
        return Change(verdicts, error=error)
    written = Ledger()
    if verdicts[0].outcome is Outcome.BLOCKED:
        message = _final_message(step, breaches, step.context.own_name)
        written["ended"] = message.id
        return Change(verdicts, {"jump_to": "end", "messages": [message], LEDGER: written})
    (plan,) = step.plans
    if not charging or not plan.rules:
        return Change(verdicts)
    added = plan.demand.amounts
    after = {name: used + added.get(name, 0) for name, used in step.result.used.items()}
    update: Update = {}
    if OF_RUN in added:
        update[THREAD_MODEL], written["counts"] = after[OF_THREAD], {"run_model": after[OF_RUN]}
    else:
        # Budgets alone: another middleware may count calls where LangChain does.
        of_thread, of_run = thread_model(step.state) + 1, step.used[OF_RUN] + 1
        written["counts"] = {"thread_model": of_thread, "run_model": of_run}
    update[LEDGER] = {**written, **_final(step, after)}
    return Change(verdicts, update)


def _final(step: Step, after: Mapping[str, int]) -> Ledger:
    """Return the run's final text if this is the last call of its budget; else an empty one."""
    finalizing = step.limits.finalizing
    if not finalizing:
        return Ledger(final="")
    (plan,) = step.plans
    # Ask for one more call: if it is refused, this one is the last. What this call will use of
    # budgets is not known.
    final_plan = Plan.of(rule.with_meters(keep=rule.keep) for rule in plan.rules)
    next_call = step.with_plans([final_plan], used=after).by_state()
    if finalizing.isdisjoint(next_call.result.refused[0]):
        return Ledger(final="")
    _, breaches = next_call.decide()
    return final_call(breaches)


def final_call(breaches: Sequence[Breach]) -> Ledger:
    """Return what the ledger says about the last call before these limits: final text and why."""
    if not breaches:
        return Ledger(final="")
    decision, limit = breaches[0].decision, breaches[0].rule.limit.name
    status = next(status for status in decision.limits if status.limit == limit)
    reason = reason_of(decision.outcome.value, status)
    return Ledger(final=messages.final(breaches, is_last=True), final_reason=reason)


def add_reasons(
    step: Step, change: Change, label: Callable[[str, str], str | None]
) -> StopReason | None:
    """Write into messages why their calls do not run; return why the run ends, if it does."""
    update, verdicts = change.update, change.verdicts
    if not update or "messages" not in update:
        return None

    def reason(decision: Decision, status: LimitStatus) -> StopReason:
        count = status.count_of(status.scope)
        subject = count and label(count.scope, count.subject)
        return reason_of(decision.outcome.value, status, subject=subject)

    refusals = [
        (verdict.decision, status)
        for verdict in verdicts
        if verdict.outcome is Outcome.BLOCKED
        for status in verdict.refused_by
        if status.enforced
    ]
    ending = step.ledger.get("final_reason") if step.ledger.get("final") else None
    if refusals:
        ends = (refusal for refusal in refusals if refusal[1].exit_behavior != "continue")
        ending = reason(*next(ends, refusals[0]))
    if ending is None:
        return None
    skipped = StopReason(**{**ending, "decision": Outcome.SKIPPED.value})
    reasons = {
        str(decision.call.id): reason(decision, status) for decision, status in reversed(refusals)
    }
    ended = update.get(LEDGER, {}).get("ended")
    for message in update["messages"]:
        if isinstance(message, ToolMessage):
            message.artifact = {STOP: reasons.get(message.tool_call_id, skipped)}
        elif message.id == ended:
            message.response_metadata[STOP] = ending
    return ending if ended else None


def end_again(state: State, runtime: object) -> Update | None:
    """Return the update that ends a run again, or `None` for a run that no limit has ended.

    Raises:
        ModelCallLimitExceededError: Something has led the run back too often.
    """
    times = ledger(state).get("ended_again", 0) + 1
    if not ledger(state).get("ended"):
        return None
    if times <= _MOST_ENDS:
        return {"jump_to": "end", LEDGER: Ledger(ended_again=times)}
    counts = thread_model(state), run_model(state)
    error = with_work(ModelCallLimitExceededError(*counts, None, None, message=_ENDED), state)
    enclosing = compat.enclosing_tasks(call_context(runtime).checkpoint_ns)
    if enclosing:
        in_tool = compat.runs_tools(enclosing[-1])
        error = compat.for_parent(error, ending_message(state), in_tool=in_tool)
    raise error


def ending_message(state: State) -> AIMessage:
    """Return the message with which a limit has ended a run, or one with its id."""
    ended = ledger(state).get("ended")
    found = (message for message in state["messages"] if message.id == ended)
    message: AIMessage = next(found, AIMessage(_ENDED, id=ended))
    return message


def _model_error(breaches: Sequence[Breach]) -> ModelCallLimitExceededError | None:
    """Return the exception to raise at limits on model calls, or `None`."""
    breach = next((breach for breach in breaches if breach.exit_behavior == "error"), None)
    if breach is None:
        return None
    calls = 0 if breach.rule.is_budget else 1
    return ModelCallLimitExceededError(
        thread_count=breach.thread_count - calls,
        run_count=breach.run_count - calls,
        thread_limit=breach.rule.meters[0].maximum,
        run_limit=breach.rule.meters[1].maximum,
        message=" ".join(map(messages.reached, breaches)),
        decision=breach.decision,
    )


def _final_message(step: Step, breaches: Sequence[Breach], name: str | None) -> AIMessage:
    """Return the message that ends a run at limits, or that of the person who ended it."""
    reason = step.answer.message if step.answer and step.answer.type == "reject" else ""
    text = reason if reason.strip() else messages.final(breaches)
    return AIMessage(content=text, name=name, id=str(uuid4()))


def conclude_tools(step: Step) -> Change:
    """Return what follows from the check of a message's tool calls."""
    pending, counts = step.pending, step.counts
    assert pending is not None  # noqa: S101 - for the type checker
    assert counts is not None  # noqa: S101 - the same
    if step.ledger.get("final"):
        return _finalized(step, pending)
    if not (step.limits.rules or step.ledger.get("batch")):
        # Without limits nothing is counted. Calls without an id still get one.
        allowed = [Verdict(call, Outcome.ALLOWED) for call in step.calls]
        answers = _answers((), step, pending, "")
        return Change(allowed, {"messages": answers} if answers else None)
    verdicts, breaches = step.decide()
    ends: Exit = "continue"
    if step.result.stopped:
        ends = max((breach.exit_behavior for breach in breaches), key=_EXITS.index)
        checked = iter(verdicts)
        verdicts = [
            next(checked) if call in step.calls else Verdict(call, Outcome.SKIPPED)
            for call in step.every_call
        ]
        if ends == "error":
            return Change(verdicts, error=_tool_error(breaches))
    refunds = _charge(step, counts, verdicts)
    if step.sent is not None:
        _mirror(step, counts, step.sent)
    update = _update(step, counts, breaches)
    answers = _answers(verdicts, step, pending, messages.SKIPPED)
    if ends == "end":
        message = _final_message(step, breaches, pending.message.name)
        answers.append(message)
        update["jump_to"] = "end"
        update[LEDGER]["ended"] = message.id
    if answers:
        update["messages"] = answers
    return Change(verdicts, update, refunds)


def not_concluded(step: Step, error: Exception) -> Change:
    """Return what is recorded if a text of the user's own fails: refusals, and nothing runs."""
    decided, _ = step.decide()
    verdicts = [
        one if one.outcome is Outcome.BLOCKED else Verdict(one.call, Outcome.SKIPPED)
        for one in decided
    ]
    return Change(verdicts, error=error)


def _finalized(step: Step, pending: PendingCalls) -> Change:
    """Skip all tools after the last model call of the budget, and end the run with its text."""
    verdicts = [Verdict(call, Outcome.SKIPPED) for call in step.every_call]
    answers = _answers(verdicts, step, pending, messages.FINALIZED)
    update: Update = {"messages": answers, "jump_to": "end"}
    # With the structured response the run has its answer.
    if not pending.structured:
        message = pending.message
        text = str(message.text)
        content = text if text.strip() else step.ledger.get("final") or ""
        answers.append(AIMessage(content=content, name=message.name, id=str(uuid4())))
        update[LEDGER] = Ledger(ended=answers[-1].id)
    return Change(verdicts, update)


def _tool_error(breaches: Sequence[Breach]) -> ToolCallLimitExceededError:
    """Return the exception to raise at limits on tool calls."""
    breach = next(breach for breach in breaches if breach.exit_behavior == "error")
    return ToolCallLimitExceededError(
        thread_count=breach.thread_count,
        run_count=breach.run_count,
        thread_limit=breach.rule.meters[0].maximum,
        run_limit=breach.rule.meters[1].maximum,
        tool_name=", ".join(breach.rule.limit.tools) or None,
        message=" ".join(map(messages.reached, breaches)),
        decision=breach.decision,
    )


def _charge(step: Step, counts: ToolCounts, verdicts: Sequence[Verdict]) -> list[Refund]:
    """Charge allowed calls, and refund what other middlewares charged for blocked ones."""
    refunds: list[Refund] = []
    # Calls that share an id are charged together.
    ran: dict[str, Charge] = {}
    for verdict in verdicts:
        call, call_id = verdict.call, str(verdict.call.id)
        if verdict.outcome in _NOT_RUN:
            refunds += counts.refund(call)
            continue
        # A call that runs is counted even if a limit that is not enforced refuses it. But it is not
        # charged to that limit, and so never refunded by its name.
        charge = ran[call_id] = ran.get(call_id) or new_charge()
        added = dict.fromkeys(verdict.plan.counters, call.amount)
        for number, rule in enumerate(verdict.plan.rules):
            limit = rule.limit
            if not limit.counted:
                continue
            if verdict.charged[number]:
                names = charge["limits"].setdefault(step.middleware, {})
                names[limit.name] = names.get(limit.name, 0) + call.amount
            cost = verdict.amounts[number] if limit.unit == "nanodollars" else 0
            if cost:
                # Limits that share a counter add the most to it.
                added[limit.counter] = max(cost, added[limit.counter])
                costs = charge.setdefault("costs", {})
                costs[limit.name] = costs.get(limit.name, 0) + cost
        for counter, amount in added.items():
            charge["counters"][counter] = charge["counters"].get(counter, 0) + amount
    for call_id, charge in ran.items():
        if charge["counters"]:
            counts.charge(call_id, charge)
    return refunds


def _mirror(step: Step, counts: ToolCounts, sent: AcquireRequest) -> None:
    """Copy the store's counts to the state, with its charges for each call."""
    result = step.result
    if step.answered:
        charged = result.charged(step.demands)
        for rule in (rule for plan in step.plans for rule in plan.rules):
            if rule.is_budget:
                # The store's count has what models have used, too.
                continue
            thread, run, *_ = rule.meters
            for meter, of_state in ((thread, counts.thread), (run, counts.run)):
                if meter.counter in step.places:
                    used = result.used[meter.counter] + charged[meter.counter]
                    of_state[rule.limit.counter] = used
    for call, index in zip(step.calls, step.index_of, strict=True):
        if result.admitted[index] and not result.stopped:
            amounts = sent.keyed(sent.demands[index].amounts)
            if amounts:
                counts.of_call(str(call.id))["keys"] |= amounts


def _update(step: Step, counts: ToolCounts, breaches: Sequence[Breach]) -> Update:
    """Return the update of the counts and of the ledger's entry for the message."""
    old, message = step.ledger, step.message or ""
    for plan in step.plans:
        for counter in plan.counters:
            counts.thread.setdefault(counter, 0)
    before = old.get("batch")
    waiting: Iterable[str] = old.get("begun_by", ())
    if before is not None and before["message"] == message:
        waiting = before.get("waiting", ())
    checked = ToolBatch(
        message=message,
        calls=counts.calls,
        waiting=[name for name in waiting if name != step.middleware],
    )
    written = Ledger(counts={"run_tools": counts.run}, batch=checked)
    for breach in breaches:
        limit = breach.rule.limit
        if limit.give_up_after is not None:
            refusals = written.get("refusals") or old.get("refusals") or {}
            by_limit = refusals.get(step.middleware, {})
            by_limit = {**by_limit, limit.name: by_limit.get(limit.name, 0) + breach.refusals}
            written["refusals"] = {**refusals, step.middleware: by_limit}
    return {THREAD_TOOLS: counts.thread, LEDGER: written}


def _answers(
    verdicts: Sequence[Verdict], step: Step, pending: PendingCalls, skipped: str
) -> list[AnyMessage]:
    """Return one answer for each call that does not run, blocked ones first."""
    answers: dict[str, AnyMessage] = {}
    stopped = [verdict for verdict in verdicts if verdict.outcome in _NOT_RUN]
    for verdict in sorted(stopped, key=lambda each: each.outcome is Outcome.SKIPPED):
        call_id = str(verdict.call.id)
        if call_id not in answers:
            text = skipped
            if verdict.outcome is Outcome.BLOCKED:
                text = messages.refusal(verdict.decision, step.limits.by_name)
            answers[call_id] = answer_of_blocked(call_id, verdict.call.tool, text)
    # If the calls had no ids, the message comes first, with ids for them.
    return [*([pending.message] if pending.replaces else []), *answers.values()]
