"""The tool calls that wait for an answer: from the state to what is decided and written."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage

from langchain_quota import messages
from langchain_quota.decision import Call, Decision, Outcome, Refund
from langchain_quota.engine import Limits, Outage, Plan, Used, Verdict, judge, plan, stops
from langchain_quota.errors import ToolCallLimitExceededError
from langchain_quota.limits import Terms
from langchain_quota.middleware.case import Case
from langchain_quota.middleware.history import PendingCalls, answer, pending_calls
from langchain_quota.middleware.origin import origin
from langchain_quota.middleware.rulings import Ruling, Update
from langchain_quota.reservation import Grant, Settlement
from langchain_quota.state import (
    LEDGER,
    RUN_TOOLS,
    THREAD_TOOLS,
    Amounts,
    Batch,
    Ledger,
    ToolCounts,
    batch_of,
    ledger,
)

_NOT_RUN = (Outcome.BLOCKED, Outcome.SKIPPED)


def tool_case(  # noqa: PLR0913 - what a hook knows
    state: Mapping[str, Any],
    runtime: Any,
    limits: Limits,
    *,
    judge: str,
    every_call: bool,
    middleware: str | None = None,
) -> "ToolCase | None":
    """The tool calls that wait for an answer; `None` if there is nothing to judge.

    Args:
        state: The agent's state.
        runtime: The hook's runtime.
        limits: The limits for tool calls.
        judge: The name of the middleware, or of one of its tasks in a step.
        every_call: Whether calls that match no limit are decided (as allowed), too.
        middleware: The name of the middleware, where `judge` is that of a task.
    """
    pending = pending_calls(state)
    if pending is None or not pending.calls:
        return None
    final = ledger(state).get("final") or ""
    if not (every_call or final) and not any(
        limits.of(Call("tool", call["name"])) for call in pending.calls
    ):
        return None
    return ToolCase(
        state,
        runtime,
        limits,
        pending,
        judge=judge,
        middleware=judge if middleware is None else middleware,
        every_call=every_call,
        final=final,
    )


class ToolCase(Case):
    """The tool calls of one AIMessage that wait for an answer.

    Args:
        state: The agent's state.
        runtime: The hook's runtime.
        limits: The limits for tool calls.
        pending: The calls.
        judge: The name of the middleware, or of one of its tasks in a step.
        middleware: The name of the middleware.
        every_call: Whether calls that match no limit are decided (as allowed), too.
        final: What the run ends with, if they were made by the last model call of its budget;
            the text of their message goes before.
    """

    def __init__(  # noqa: PLR0913 - what a hook knows
        self,
        state: Mapping[str, Any],
        runtime: Any,
        limits: Limits,
        pending: PendingCalls,
        *,
        judge: str,
        middleware: str,
        every_call: bool,
        final: str,
    ) -> None:
        self._middleware = middleware
        self._message = pending.message
        self._message_id = pending.message.id
        # Under its id, so that it takes the place of the one whose calls had none.
        self._replacement = [pending.message] if pending.replaces else []
        # Where the structured response is there, the run ends anyway.
        self._may_stop = not pending.structured
        self._refusals = (ledger(state).get("refusals") or {}).get(middleware, {})
        self._every_call = every_call
        caller = origin(runtime, model_name=pending.message.name)
        self._calls = [
            Call("tool", call["name"], call["id"], agent=caller.agent, thread_id=caller.thread_id)
            for call in pending.calls
        ]
        self._matched = [call for call in self._calls if limits.of(call)]
        self._final = final
        judged = self._calls if every_call else self._matched
        super().__init__(state, Limits(()) if self._final else limits, caller, judged, judge=judge)

    def rule(self, grant: Grant | None = None, *, pending_error: bool = False) -> Ruling:
        """What is decided.

        Args:
            grant: What was answered to the plan's reservation; `None` to judge by the state's
                counts.
            pending_error: Whether ending the run with other tools' calls pending is an error.
        """
        if self._final:
            return self._finalized()
        counts = self._counts()
        verdict = self._verdict(counts, grant)
        decisions = self._all_decisions(verdict)
        others = [call for call in self._calls if pending_error and not self._limits.of(call)]
        error = _tool_error(verdict, others)
        if error is not None:
            return self._ruling(decisions, error=error)
        renewed = self._renewed(counts)
        if self.shared:
            counts.owed.clear()
        else:
            counts.owe(renewed.values())
        refunds = _settle(counts, self._middleware, self._limits.counters, decisions)
        if grant is not None:
            self._mirror(counts, verdict, grant)
        update = _counts_update(self._state, self._limits, self._matched, counts)
        update[LEDGER] = self._ledger(counts, verdict)
        answers = [
            *self._replacement,
            *_answers(decisions, self._limits.terms, messages.SKIPPED),
        ]
        if stops(verdict.exit):
            answers.append(AIMessage(content=messages.final(verdict.breaches)))
            update["jump_to"] = "end"
        if answers:
            update["messages"] = answers
        return self._ruling(decisions, update=update, refunds=refunds)

    def _verdict(self, counts: ToolCounts, grant: Grant | None) -> Verdict:
        if grant is not None:
            return self.plan.verdict(grant)
        return judge(
            self._limits,
            self._used(counts, (each for call in self._matched for each in self._limits.of(call))),
            self.judged,
            may_stop=self._may_stop,
            refusals=self._refusals,
        )

    def _planned(self, outage: Outage | None) -> Plan:
        counts = self._counts()
        return plan(
            self._limits.terms,
            self._used(counts, self._limits.terms),
            self.judged,
            may_stop=self._may_stop,
            refusals=self._refusals,
            name=self._name,
            settlements=self._settlements(counts),
            outage=outage,
        )

    def _counts(self) -> ToolCounts:
        return ToolCounts.of(self._state, self._message_id)

    def _used(self, counts: ToolCounts, terms: Iterable[Terms]) -> dict[str, Used]:
        ids = [str(call.id) for call in self._matched]
        counters = {each.limit.counter for each in terms}
        return {counter: counts.used(counter, ids) for counter in counters}

    def _finalized(self) -> Ruling:
        decisions = tuple(Decision(call, Outcome.SKIPPED) for call in self._calls)
        answers = [
            *self._replacement,
            *_answers(decisions, self._limits.terms, messages.FINALIZED),
        ]
        # Where the structured response is there, the run has its answer.
        if self._may_stop:
            text = str(self._message.text)
            final = text if text.strip() else self._final
            answers.append(AIMessage(content=final, name=self._message.name))
        return self._ruling(decisions, update={"messages": answers, "jump_to": "end"})

    def _all_decisions(self, verdict: Verdict) -> tuple[Decision, ...]:
        """The decisions; of a stopped batch also those about calls that no limit matches."""
        if self._every_call or not stops(verdict.exit):
            return verdict.decisions
        rest = iter(verdict.decisions)
        return tuple(
            next(rest) if self._limits.of(call) else Decision(call, Outcome.SKIPPED)
            for call in self._calls
        )

    def _renewed(self, counts: ToolCounts) -> dict[str, Amounts]:
        """What a store charged for these calls before, by tool call id."""
        if not counts.reserved:
            return {}
        keys = {key for each in self._limits.terms for key in each.keys}
        found = {}
        for call in self._matched:
            amounts = counts.renew(str(call.id), self._judge, keys)
            if amounts:
                found[str(call.id)] = amounts
        return found

    def _settlements(self, counts: ToolCounts) -> tuple[Settlement, ...]:
        """What a store is to take back: what is owed, and what these calls were charged before."""
        renewed = {
            f"{self._name}/{each}": charged for each, charged in self._renewed(counts).items()
        }
        return tuple(
            Settlement(refund, {key: -amount for key, amount in amounts.items()})
            for refund, amounts in {**counts.owed, **renewed}.items()
        )

    def _mirror(self, counts: ToolCounts, verdict: Verdict, grant: Grant) -> None:
        """Write down what the store counts, and what it charges, now or later, for which call."""
        for each in self._limits.terms:
            used = verdict.usage[each.limit.counter]
            if self.shared and each.counts_thread:
                counts.thread[each.limit.counter] = used.thread
            if self.shared and each.run_key is not None:
                counts.run[each.limit.counter] = used.run
        for call, index in zip(self.judged, self.plan.charge_of, strict=True):
            if grant.admitted[index] and not grant.stopped:
                amounts = self._asked.keyed(index)
                if amounts:
                    counts.reserved.setdefault(str(call.id), {})[self._judge] = amounts

    def _ledger(self, counts: ToolCounts, verdict: Verdict) -> Ledger:
        known = ledger(self._state)
        batch = batch_of(self._state, self._message_id)
        passed = {*(batch["passed"] if batch else ()), self._middleware}
        judged = Batch(
            message=self._message_id or "", charges=counts.charges, passed=sorted(passed)
        )
        if counts.reserved:
            judged["reserved"] = counts.reserved
        written = Ledger(
            run_tools=counts.run,
            batch=judged,
            refusals=_refusals(known.get("refusals") or {}, self._middleware, verdict),
        )
        if counts.owed != (known.get("owed") or {}):
            written["owed"] = counts.owed
        return written


def _refusals(
    known: Mapping[str, Mapping[str, int]], middleware: str, verdict: Verdict
) -> dict[str, dict[str, int]]:
    """How often each limit that gives up after some has refused in this run."""
    refusals = {each: dict(by_limit) for each, by_limit in known.items()}
    for breach in verdict.breaches:
        if breach.limit.give_up_after is not None:
            own = refusals.setdefault(middleware, {})
            own[breach.limit.name] = own.get(breach.limit.name, 0) + breach.refusals
    return refusals


def _counts_update(
    state: Mapping[str, Any], limits: Limits, calls: Sequence[Call], counts: ToolCounts
) -> Update:
    """The thread's counts, and the run's as LangChain writes them: with the calls refused."""
    attempted = dict(state.get(RUN_TOOLS) or {})
    for call in calls:
        for counter in {each.limit.counter for each in limits.of(call)}:
            counts.thread.setdefault(counter, 0)
            attempted[counter] = attempted.get(counter, 0) + 1
    return {THREAD_TOOLS: counts.thread, RUN_TOOLS: attempted}


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
            decision=breach.decision,
        )
    if verdict.exit == "end" and others:
        names = ", ".join(sorted({str(call.tool) for call in others}))
        return NotImplementedError(
            f"Cannot end the run with other tool calls pending: {names}. Use "
            "on_pending='skip', or exit_behavior 'continue' or 'error'"
        )
    return None


def _settle(
    counts: ToolCounts,
    middleware: str,
    counters: Mapping[str, str],
    decisions: Sequence[Decision],
) -> tuple[Refund, ...]:
    """Charge what is let through; take back what other limiters charged for what is not."""
    refunds: list[Refund] = []
    amounts: dict[tuple[str, str, str], int] = {}
    for decision in decisions:
        call = decision.call
        call_id = str(call.id)
        if decision.outcome in _NOT_RUN:
            refunds += [
                Refund(replace(call, amount=amount), limit)
                for limit, amount in counts.take_back(call_id)
            ]
            continue
        # What runs is counted even where a limit that is not enforced refuses it; but it is not
        # charged to that limit, and so never refunded by its name.
        counted = {
            (counters[standing.limit], standing.limit if standing.charged else "")
            for standing in decision.standings
        }
        for counter, name in counted:
            key = call_id, counter, name
            amounts[key] = amounts.get(key, 0) + call.amount
    for (call_id, counter, name), amount in amounts.items():
        counts.charge(call_id, counter, (middleware, name), amount)
    return tuple(refund for refund in refunds if refund.limit)


def _answers(
    decisions: Sequence[Decision], terms: Sequence[Terms], skipped: str
) -> list[AnyMessage]:
    """One answer for each call that does not run; the refused ones first."""
    if all(decision.outcome not in _NOT_RUN for decision in decisions):
        return []
    limits = {each.limit.name: each.limit for each in terms}
    found: dict[str, AnyMessage] = {}
    for outcome in _NOT_RUN:
        for decision in decisions:
            call_id = str(decision.call.id)
            if decision.outcome is outcome and call_id not in found:
                text = messages.refusal(decision, limits) if outcome is Outcome.BLOCKED else skipped
                found[call_id] = answer(call_id, decision.call.tool, text)
    return list(found.values())
