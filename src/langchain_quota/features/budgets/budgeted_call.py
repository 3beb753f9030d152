"""One model call under budgets, once its request is known: what is held for it, and if it is made.

A call was let through before its request was known, and asks for its reserve now. A call without a
reserve uses what is held for it. It has to ask anew if it is made again: by a middleware listed
before, or by LangGraph when it runs a node again.
"""

from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from langchain.agents.middleware.types import ModelRequest, ModelResponse

from langchain_quota import messages
from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation
from langchain_quota.decision import STORE, Call, Decision, Outcome
from langchain_quota.features.budgets.budgets import Budgets
from langchain_quota.features.budgets.let_through import Admitted
from langchain_quota.features.budgets.settlements import given_back
from langchain_quota.features.telling.model_request import last_call, with_state
from langchain_quota.middleware._calls import Conclusion, Request, Update
from langchain_quota.middleware._form import Form, ask
from langchain_quota.middleware._model_calls import conclude, held_amounts, held_for, uncounted
from langchain_quota.middleware._observers import Observers
from langchain_quota.resolved import ResolvedLimits
from langchain_quota.state import LEDGER, Ledger, ledger, merge_ledgers

_Acquire = Callable[[Request], Awaitable[AcquireResult]]


class BudgetedCall:
    """A model call that is about to be made."""

    def __init__(
        self, budgets: Budgets, request: ModelRequest[Any], limits: ResolvedLimits, *, task: str
    ) -> None:
        self._budgets = budgets
        self._limits = limits
        self._task = f"{task}.bound"
        held = ledger(_state(request)).get("held")
        name = "" if held is None else held["request"]
        # `None` for a call that is made again, or that another process has let through.
        self._admitted, made_before = budgets.let_through.take(name)
        # What was held for a call that was made is settled.
        self._request = _with(request, Ledger(held=None)) if made_before else request
        # By the model's counter.
        self._held: Mapping[str, int] = held_amounts(limits.asked(Call("model")))
        self._asks = budgets.bounds_calls or self._admitted is None
        # The newest answer to its questions.
        self._result = AcquireResult({})
        self._refused: tuple[Request, Conclusion] | None = None
        # The decision of the budgets alone, if the call may be made.
        self._decided: Decision | None = None
        # What is written beside the call's use.
        self._written = Ledger()

    async def make(
        self,
        form: Form,
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
        acquire: Callable[[Form, Request], Awaitable[AcquireResult]],
        take_effect: Callable[[Form, Request, Conclusion], Awaitable[Update | None]],
        observers: Observers,
    ) -> tuple[ModelResponse[Any] | None, Update]:
        """Make the call, unless its budgets refuse it: the answer, and what is to be written."""
        try:
            if self._asks:
                await self._ask_for_all(partial(acquire, form))
            admitted = self._recorded()
            if admitted is not None:
                await ask(form, observers, "notify", admitted.decisions, admitted.task_id)
        except (Exception, CancelledError):
            await self._budgets.charge(form, self._unused())
            raise
        if self._refused is not None:
            await self._budgets.charge(form, self._refund())
            return None, await take_effect(form, *self._refused) or {}
        made = self._budgets.call(form, self._request, handler, self._limits, self._held)
        response, update = await made
        return response, self._joined(update)

    async def _ask_for_all(self, acquire: _Acquire) -> None:
        """Ask for all that the call can use, then for a last call, if it can be the last one."""
        asked = await self._ask(self._request, acquire)
        if _is_too_much(self._result) and _ends_with_an_answer(asked, self._result):
            asked = await self._ask_for_the_last(asked, acquire)
        if not all(self._result.admitted):
            conclusion = conclude(asked, self._result)
            if self._admitted is not None and conclusion.error is None:
                by_budgets = all(each.is_budget for each in self._limits.limits)
                conclusion = uncounted(asked, conclusion, by_budgets=by_budgets)
            self._refused = asked, conclusion
            return
        ((self._decided,), _) = asked.decided(self._result)
        self._held = held_amounts(asked.asked[0])
        if asked.answered:
            self._request = _with(self._request, Ledger(held=held_for(asked)))

    def _refund(self) -> AcquireRequest | None:
        """The request that uncounts a refused call in a store; `None` if the store has no count."""
        charged = {} if self._admitted is None else self._admitted.charged
        if not charged:
            return None
        refund = Compensation(uuid4().hex, {key: -amount for key, amount in charged.items()})
        return AcquireRequest("", "", compensations=(refund,))

    def _unused(self) -> AcquireRequest | None:
        """The request that gives back what a store holds for a call that cannot be made."""
        held = ledger(_state(self._request)).get("held")
        return None if held is None else given_back([held])

    def _recorded(self) -> Admitted | None:
        """Record that the call is let through; `None` if it is already, or if it is refused."""
        admitted = self._admitted
        if admitted is None or not admitted.decisions or self._refused is not None:
            return None
        decisions = [_with_budgets(each, self._decided) for each in admitted.decisions]
        recorded = self._budgets.recorder.record(
            decisions,
            started=admitted.started,
            task_id=admitted.task_id,
            trace=admitted.trace,
            after_refusal=admitted.after_refusal,
        )
        if recorded.trace is not None and recorded.trace != admitted.trace:
            self._written["trace"] = dict(recorded.trace)
        return admitted._replace(decisions=decisions)

    def _joined(self, update: Update) -> Update:
        """The update with the call's use, joined with the rest that is written."""
        if not self._written:
            return update
        return {**update, LEDGER: merge_ledgers(update.get(LEDGER, Ledger()), self._written)}

    async def _ask(self, request: ModelRequest[Any], acquire: _Acquire) -> Request:
        """Ask for a call."""
        asked = self._budgets.bounded(request, self._limits, task=self._task)
        self._result = await acquire(asked)
        self._request = request
        return asked

    async def _ask_for_the_last(self, asked: Request, acquire: _Acquire) -> Request:
        """Ask for a call without tools, the last one of its budget."""
        _, breaches = asked.decided(self._result)
        final = Ledger(final=messages.final(breaches, is_last=True))
        last = await self._ask(last_call(_with(self._request, final)), acquire)
        if all(self._result.admitted):
            self._written["final"] = final["final"]
        return last


def _is_too_much(result: AcquireResult) -> bool:
    """Whether a refused call might be admitted if it asked for less."""
    return not all(result.admitted) and STORE not in result.refused[0].values()


def _ends_with_an_answer(asked: Request, result: AcquireResult) -> bool:
    """Whether all limits that refuse a call would let it be the last one."""
    if ledger(asked.state).get("final"):
        return False
    by_name = asked.limits.by_name
    refusing = [by_name[name] for name in result.refused[0] if by_name[name].enforce]
    return all(limit.exit_behavior == "finalize" for limit in refusing)


def _with_budgets(decision: Decision, later: Decision | None) -> Decision:
    """A decision with the later status of budgets: one on trial may refuse the reserve."""
    if later is None:
        return decision
    standing = {each.limit: each for each in later.limits}
    limits = tuple(standing.get(each.limit, each) for each in decision.limits)
    outcome = later.outcome if decision.outcome is Outcome.ALLOWED else decision.outcome
    return replace(decision, limits=limits, outcome=outcome)


def _with(request: ModelRequest[Any], known: Ledger) -> ModelRequest[Any]:
    """The request, with something else in its ledger."""
    state: Any = copy(request.state)
    state[LEDGER] = merge_ledgers(ledger(state), known)
    return with_state(request, state)


def _state(request: ModelRequest[Any]) -> Mapping[str, Any]:
    return request.state
