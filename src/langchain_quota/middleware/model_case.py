"""The model call that is about to be made: from the state to what is decided and written."""

from collections.abc import Mapping
from operator import add
from typing import Any

from langchain_core.messages import AIMessage

from langchain_quota import messages
from langchain_quota.decision import Call, Decision
from langchain_quota.engine import Limits, Outage, Plan, Used, Verdict, judge, plan, stops
from langchain_quota.errors import ModelCallLimitExceededError
from langchain_quota.limits import MODEL
from langchain_quota.middleware.case import Case
from langchain_quota.middleware.history import newest_name
from langchain_quota.middleware.origin import origin
from langchain_quota.middleware.rulings import Ruling, Update
from langchain_quota.reservation import Grant, Settlement, admit
from langchain_quota.state import LEDGER, THREAD_MODEL, Ledger, ledger, run_model, thread_model


class ModelCase(Case):
    """The model call that is about to be made.

    Args:
        state: The agent's state.
        runtime: The hook's runtime.
        limits: The limits for model calls.
        judge: The name of the middleware.
    """

    def __init__(
        self, state: Mapping[str, Any], runtime: Any, limits: Limits, *, judge: str
    ) -> None:
        self._used = Used(thread_model(state), run_model(state))
        name = newest_name(state.get("messages") or ()) if self._used.run else None
        caller = origin(runtime, model_name=name)
        calls = [Call("model", agent=caller.agent, thread_id=caller.thread_id)]
        super().__init__(state, limits, caller, calls, judge=judge)
        self._owed = ledger(state).get("owed") or {}

    def rule(self, grant: Grant | None = None, *, charging: bool = True) -> Ruling:
        """What is decided.

        Args:
            grant: What was answered to the plan's reservation; `None` to judge by the state's
                counts.
            charging: Whether an admitted call is charged now, and written to the state.
        """
        verdict = (
            judge(self._limits, {MODEL: self._used}, self.judged, charging=charging)
            if grant is None
            else self.plan.verdict(grant, charging=charging)
        )
        decisions = verdict.decisions
        error = _model_error(verdict)
        if error is not None:
            return self._ruling(decisions, error=error)
        if stops(verdict.exit):
            text = messages.final(verdict.breaches)
            update: Update = {"jump_to": "end", "messages": [AIMessage(content=text)]}
            if self.shared and self._owed:
                update[LEDGER] = Ledger(owed={})
            return self._ruling(decisions, update=update)
        if not charging or not self._limits.terms:
            return self._ruling(decisions)
        used = verdict.usage[MODEL]
        final = self._next_refusal(grant) if _is_last(decisions[0]) else ""
        written = Ledger(run_model=used.run, final=final)
        if self.shared and self._owed:
            written["owed"] = {}
        return self._ruling(decisions, update={THREAD_MODEL: used.thread, LEDGER: written})

    def _next_refusal(self, grant: Grant | None) -> str:
        """What the user would read of one more call."""
        asked = self.plan.reservation
        given = self.plan.own_grant() if grant is None else grant
        used = map(add, given.used, given.charged(asked))
        return messages.final(self.plan.verdict(admit(asked, tuple(used))).breaches)

    def _planned(self, outage: Outage | None) -> Plan:
        settlements = (
            Settlement(refund, {key: -amount for key, amount in amounts.items()})
            for refund, amounts in self._owed.items()
        )
        return plan(
            self._limits.terms,
            {MODEL: self._used},
            self.judged,
            name=self._name,
            settlements=tuple(settlements),
            outage=outage,
        )


def _is_last(decision: Decision) -> bool:
    """Whether the call is the last before the run is finalized."""
    return any(
        standing.used(scope) == standing.threshold(scope)
        for standing in decision.standings
        if standing.exit_behavior == "finalize"
        for scope in standing.scopes
    )


def _model_error(verdict: Verdict) -> Exception | None:
    if verdict.exit != "error":
        return None
    breach = next(each for each in verdict.breaches if each.terms.exit_behavior == "error")
    return ModelCallLimitExceededError(
        thread_count=breach.thread_count - 1,
        run_count=breach.run_count - 1,
        thread_limit=breach.terms.thread_limit,
        run_limit=breach.terms.run_limit,
        message=" ".join(map(messages.reached, verdict.breaches)),
        decision=breach.decision,
    )
