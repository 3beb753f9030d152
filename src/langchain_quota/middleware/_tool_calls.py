"""Tool calls: from the state to a request, and from the answer to a conclusion.

request = pending(state, …)
result = acquire(request)
conclusion = conclude(request, result)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessage, AnyMessage

from langchain_quota import messages
from langchain_quota.admission import AcquireResult
from langchain_quota.decide import Breach
from langchain_quota.decision import Call, Decision, Exit, Outcome, Refund
from langchain_quota.errors import ToolCallLimitExceededError
from langchain_quota.features.repeats import Repeats
from langchain_quota.middleware._calls import Conclusion, Request, Update
from langchain_quota.middleware._context import call_context
from langchain_quota.middleware._history import PendingCalls, answer_of_refused, pending_calls
from langchain_quota.middleware._tool_counts import ToolCounts
from langchain_quota.repeats import RepeatLimit
from langchain_quota.resolved import Asked, ResolvedLimits
from langchain_quota.state import (
    LEDGER,
    RUN_TOOLS,
    THREAD_TOOLS,
    Amounts,
    Batch,
    Ledger,
    ledger,
)

_NOT_RUN = (Outcome.BLOCKED, Outcome.SKIPPED)
_EXITS: tuple[Exit, ...] = ("continue", "end", "error")
"""The strongest last."""


@dataclass(slots=True, kw_only=True)
class BatchRequest(Request):
    """The tool calls of one AIMessage that wait for an answer."""

    middleware: str
    pending: PendingCalls
    every_call: Sequence[Call]
    counts: ToolCounts
    renewed: Mapping[str, Amounts]
    final: str = ""
    repeats: Repeats | None = None

    @property
    def message(self) -> str:
        """The id of the message whose calls they are; empty if it has none."""
        return self.pending.message.id or ""

    def asks(self) -> Sequence[Asked]:
        """For each call what it asks of the limits."""
        return _asked(self.limits, self.calls, self.repeats)

    def refunds_due(self) -> dict[str, Amounts]:
        """What a store is to take back: what is due, and what it charged these calls before."""
        return {**self.counts.pending_refunds, **self.renewed}


def pending(  # noqa: PLR0913 - what a hook knows
    state: Mapping[str, Any],
    runtime: Any,
    limits: ResolvedLimits,
    *,
    middleware: str,
    every_call: bool,
    task: str = "",
) -> BatchRequest | None:
    """The tool calls that wait for an answer, and what they ask; `None` if there are none."""
    waiting = pending_calls(state)
    if waiting is None or not waiting.calls:
        return None
    known = ledger(state)
    final = known.get("final") or ""
    if not (every_call or final or _concerns(limits, waiting, known)):
        return None
    context = call_context(runtime, model_name=waiting.message.name)
    calls = [
        Call("tool", each["name"], each["id"], 1, context.agent, context.thread_id)
        for each in waiting.calls
    ]
    repeats = None
    if limits.repeats and not final:
        repeats = Repeats(limits.repeats, state, waiting, calls, middleware=middleware)
    asks = list(zip(calls, _asked(limits, calls, repeats), strict=True))
    judged = [(call, asked) for call, asked in asks if asked.limits or every_call]
    counts = ToolCounts.of(state, waiting.message.id)
    matched = {str(call.id) for call, asked in asks if asked.limits}
    used: dict[str, int] = {} if repeats is None else dict(repeats.used)
    for _, asked in judged:
        for each in asked.limits:
            thread, run, *_ = each.checks
            if thread.counter not in used:
                used[thread.counter], used[run.counter] = counts.used(each.limit.counter, matched)
    if final:
        judged = []
    # With the structured response the run ends anyway.
    stops: dict[str, int] = {}
    if not waiting.structured:
        refusals = (known.get("refusals") or {}).get(middleware, {})
        stops = {name: max(1, n - refusals.get(name, 0)) for name, n in limits.stops.items()}
    renewed: dict[str, Amounts] = {}
    if counts.acquired:
        # This takes them out of the counts.
        renewed = _renewed(counts, limits, middleware, matched, context.step(task or middleware))
    return BatchRequest(
        state=state,
        known=known,
        context=context,
        middleware=middleware,
        task=task or middleware,
        limits=limits,
        calls=[call for call, _ in judged],
        asked=[asked for _, asked in judged],
        used=used,
        stops=stops,
        pending=waiting,
        every_call=calls,
        counts=counts,
        renewed=renewed,
        final=final,
        repeats=repeats,
    )


def _asked(
    limits: ResolvedLimits, calls: Sequence[Call], repeats: Repeats | None
) -> Sequence[Asked]:
    """For each call what it asks."""
    asked = [limits.asked(call) for call in calls]
    return asked if repeats is None else repeats.ask(asked)


def _concerns(limits: ResolvedLimits, waiting: PendingCalls, known: Ledger) -> bool:
    """Whether limits match a call that waits."""
    # If a middleware has charged calls of the message, its answered calls matter, too: it is
    # recorded that these limits have judged the message.
    batch = known.get("batch")
    charged = batch is not None and batch["message"] == waiting.message.id
    calls = (*waiting.calls, *(waiting.message.tool_calls if charged else ()))
    return any(limits.asked(Call("tool", call["name"])).limits for call in calls)


def _renewed(
    counts: ToolCounts, limits: ResolvedLimits, middleware: str, matched: set[str], step: str
) -> dict[str, Amounts]:
    """What a store charged for these calls before, by the refund's name."""
    # The name is the same if the request is made again, so that no refund is made twice.
    keys = limits.keys()
    found = {call_id: counts.renew(call_id, middleware, keys) for call_id in sorted(matched)}
    return {f"{step}/{call_id}": amounts for call_id, amounts in found.items() if amounts}


def conclude(
    request: BatchRequest,
    result: AcquireResult,
    *,
    pending_error: bool = False,
    has_caps: bool = False,
) -> Conclusion:
    """What is decided about each call, and what is written."""
    if request.final:
        return _finalized(request)
    if not (request.limits.limits or has_caps or request.known.get("batch")):
        return _unlimited(request)
    decisions, breaches = request.decided(result)
    ends: Exit = "continue"
    if result.stopped:
        ends = max((each.exit_behavior for each in breaches), key=_EXITS.index)
        decisions = _with_others(request, decisions)
    error = _error(ends, breaches, decisions, pending_error=pending_error)
    if error is not None:
        return Conclusion(decisions, error=error)
    counts = request.counts
    if request.answered:
        counts.pending_refunds.clear()
    else:
        counts.pending_refunds |= request.renewed
    refunds = _charge(request, decisions)
    if request.sent is not None:
        _mirror(request, result)
    update = _update(request, decisions, breaches)
    answers = _answers(decisions, request, messages.SKIPPED)
    if ends == "end":
        text, name = request.final_text(breaches), request.pending.message.name
        answers.append(AIMessage(content=text, name=name, id=str(uuid4())))
        update["jump_to"] = "end"
        update[LEDGER]["ended"] = answers[-1].id
    if answers:
        update["messages"] = answers
    return Conclusion(decisions, update, refunds)


def _finalized(request: BatchRequest) -> Conclusion:
    """No tool runs after the last model call of the budget; the run ends with its text."""
    decisions = [Decision(call, Outcome.SKIPPED) for call in request.every_call]
    answers = _answers(decisions, request, messages.FINALIZED)
    update: Update = {"messages": answers, "jump_to": "end"}
    # With the structured response the run has its answer.
    if not request.pending.structured:
        message = request.pending.message
        text = str(message.text)
        content = text if text.strip() else request.final
        answers.append(AIMessage(content=content, name=message.name, id=str(uuid4())))
        update[LEDGER] = Ledger(ended=answers[-1].id)
    return Conclusion(decisions, update)


def _unlimited(request: BatchRequest) -> Conclusion:
    """Without limits nothing is counted. Calls without an id still get one."""
    decisions = [Decision(call, Outcome.ALLOWED) for call in request.calls]
    answers = _answers((), request, "")
    return Conclusion(decisions, {"messages": answers} if answers else None)


def _with_others(request: BatchRequest, decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions of a stopped batch; calls that no limit matches are added as skipped."""
    judged = iter(decisions)
    return [
        next(judged) if call in request.calls else Decision(call, Outcome.SKIPPED)
        for call in request.every_call
    ]


def _error(
    ends: Exit, breaches: Sequence[Breach], decisions: Sequence[Decision], *, pending_error: bool
) -> Exception | None:
    """The exception to raise, if any."""
    if ends == "error":
        breach = next(each for each in breaches if each.exit_behavior == "error")
        return ToolCallLimitExceededError(
            thread_count=breach.thread_count,
            run_count=breach.run_count,
            thread_limit=breach.limit.checks[0].most,
            run_limit=breach.limit.checks[1].most,
            tool_name=", ".join(breach.limit.limit.tools) or None,
            message=" ".join(map(messages.reached, breaches)),
            decision=breach.decision,
        )
    if ends == "end" and pending_error:
        others = {str(each.call.tool) for each in decisions if not each.limits}
        if others:
            return NotImplementedError(
                f"Cannot end the run with other tool calls pending: {', '.join(sorted(others))}. "
                "Use on_pending='skip', or exit_behavior 'continue' or 'error'"
            )
    return None


def _charge(request: BatchRequest, decisions: Sequence[Decision]) -> list[Refund]:
    """Charge calls that are let through; take back what others charged for those that are not."""
    refunds: list[Refund] = []
    amounts: dict[tuple[str, str, str], int] = {}
    for decision in decisions:
        call = decision.call
        call_id = str(call.id)
        if decision.outcome in _NOT_RUN:
            refunds += [
                Refund(replace(call, amount=amount), limit)
                for limit, amount in request.counts.take_back(call_id)
                if limit
            ]
            continue
        # A call that runs is counted even if a limit that is not enforced refuses it. But it is not
        # charged to that limit, and so never refunded by its name.
        limits = [(request.limits.by_name[each.limit], each) for each in decision.limits]
        for counter, name in {
            (limit.counter, each.limit if each.charged else "")
            for limit, each in limits
            if not isinstance(limit, RepeatLimit)
        }:
            key = call_id, counter, name
            amounts[key] = amounts.get(key, 0) + call.amount
    for (call_id, counter, name), amount in amounts.items():
        request.counts.charge(call_id, counter, (request.middleware, name), amount)
    return refunds


def _mirror(request: BatchRequest, result: AcquireResult) -> None:
    """Note what the store counts, and what it charges for which call, now or later."""
    sent, counts = request.sent, request.counts
    assert sent is not None  # noqa: S101 - for the type checker
    if request.answered:
        charged = result.charged(request.hits)
        for limit in (each for asked in request.asked for each in asked.limits):
            thread, run, *_ = limit.checks
            if limit.counts_thread:
                used = result.used[thread.counter] + charged[thread.counter]
                counts.thread[limit.limit.counter] = used
            if run.key is not None:
                used = result.used[run.counter] + charged[run.counter]
                counts.run[limit.limit.counter] = used
    for call, index in zip(request.calls, request.index_of, strict=True):
        if result.admitted[index] and not result.stopped:
            amounts = sent.keyed(sent.hits[index].amounts)
            if amounts:
                counts.acquired.setdefault(str(call.id), {})[request.middleware] = amounts


def _update(
    request: BatchRequest, decisions: Sequence[Decision], breaches: Sequence[Breach]
) -> Update:
    """The thread's counts; the run's as LangChain writes them, with the calls refused; ours."""
    counts, known = request.counts, request.known
    attempted = dict(request.state.get(RUN_TOOLS) or {})
    for asked in request.asked:
        matching = (each.limit for each in asked.limits)
        for counter in {each.counter for each in matching if not isinstance(each, RepeatLimit)}:
            counts.thread.setdefault(counter, 0)
            attempted[counter] = attempted.get(counter, 0) + 1
    judged = Batch(
        message=request.message,
        charges=counts.charges,
        passed=sorted({*counts.passed, request.middleware}),
    )
    refused = [str(each.call.id) for each in decisions if each.outcome in _NOT_RUN]
    if refused:
        judged["refused"] = refused
    if counts.acquired:
        judged["acquired"] = counts.acquired
    refusals = {each: dict(by_limit) for each, by_limit in (known.get("refusals") or {}).items()}
    for breach in breaches:
        limit = breach.limit.limit
        if limit.give_up_after is not None:
            own = refusals.setdefault(request.middleware, {})
            own[limit.name] = own.get(limit.name, 0) + breach.refusals
    written = Ledger(run_tools=counts.run, batch=judged, refusals=refusals, **request.granting())
    if request.repeats is not None:
        runs = [each.outcome not in _NOT_RUN for each in decisions]
        written["repeats"] = request.repeats.noted(runs)
    if breaches and known.get("refused") is None:
        written["refused"] = request.message
    if counts.pending_refunds != (known.get("pending_refunds") or {}):
        written["pending_refunds"] = counts.pending_refunds
    return {THREAD_TOOLS: counts.thread, RUN_TOOLS: attempted, LEDGER: written}


def _answers(
    decisions: Sequence[Decision], request: BatchRequest, skipped: str
) -> list[AnyMessage]:
    """One answer for each call that does not run; the refused ones first."""
    # Before them the message itself, under its id, if its calls had none.
    message = request.pending
    replacement: list[AnyMessage] = [message.message] if message.replaces else []
    found: dict[str, AnyMessage] = {}
    for outcome in _NOT_RUN:
        for decision in decisions:
            call_id = str(decision.call.id)
            if decision.outcome is outcome and call_id not in found:
                text = skipped
                if outcome is Outcome.BLOCKED:
                    text = messages.refusal(decision, request.limits.by_name)
                found[call_id] = answer_of_refused(call_id, decision.call.tool, text)
    return [*replacement, *found.values()]
