"""The second check of a model call with budgets: when its request is known, before it is made.

It reserves all that the call can use, and refuses the call or makes it the last of its run if there
is too little left.
"""

from asyncio import CancelledError
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from secrets import token_hex
from typing import Any, cast
from uuid import uuid4

from langchain_core.messages import AIMessage

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction
from langchain_quota.core.plans import LimitSet, Plan, Rule, run_counter
from langchain_quota.features.budgets.charging import (
    OWN,
    ChargeContext,
    Charging,
    TaskMemory,
    settlements,
)
from langchain_quota.features.budgets.prices import Pricing
from langchain_quota.features.budgets.usage import asked_of
from langchain_quota.limits import Limit
from langchain_quota.limits.call import STORE
from langchain_quota.middleware.calls import (
    OF_RUN,
    OF_THREAD,
    Batch,
    HookResult,
    Update,
    model_batch,
)
from langchain_quota.middleware.conclude import conclude_model, final_call
from langchain_quota.middleware.feature import Request
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import (
    LEDGER,
    THREAD_MODEL,
    Counts,
    Entries,
    Ledger,
    ledger,
    merge_ledgers,
)
from langchain_quota.runtime import compat
from langchain_quota.runtime.sync_async import Mode
from langchain_quota.runtime.units import computed

LEASE = 900
"""How long a store reserves an amount for a model call, in seconds.

After that the amount is released, for example because the process has died. A call that takes
longer is charged nevertheless, but others may have used its amount by then. Clients of providers
give up after 600 seconds by default.
"""


def first_check(batch: Batch, conclusion: HookResult) -> Entries:
    """Return the result of the check before a model call, when its request is not known yet.

    It has the counts before the call (`used`), the limits on calls in a dry run that would refuse
    it, with the scopes (`refused`), the counts of `frozen` subjects, by the name of the count what
    grants added to limits (`granted`), and by key what a store charged (`charged`).
    """
    budgets = {budget.limit.name for budget in batch.limits.budgets}
    refused = {
        limit: scope
        for verdict in conclusion.verdicts
        for limit, scope in verdict.refused.items()
        if limit not in budgets
    }
    keys = batch.sent.keyed(batch.demands[0].amounts) if batch.sent else {}
    return {
        "used": {**batch.counted},
        "refused": refused,
        "frozen": [*batch.frozen],
        "granted": {**batch.granted},
        "charged": {key: amount for key, amount in keys.items() if amount},
    }


class SecondCheck:
    """Reserves what model calls can use; without a `reserve`, it only checks repeated calls."""

    def __init__(
        self, kernel: Kernel, pricing: Pricing, charging: Charging, memory: TaskMemory
    ) -> None:
        self._kernel = kernel
        self._pricing = pricing
        self._charging = charging
        self._memory = memory
        reserving = [
            limit for limit in kernel.limits if getattr(limit, "reserve", None) is not None
        ]
        self.has_reserves = bool(reserving)
        """Whether a call asks for its reserve when its request is known."""
        self.waits = any(map(_is_waiting, reserving))
        """Whether calls wait for room here, and not in the first check."""

    async def reserve(
        self,
        mode: Mode,
        request: Request,
        step: ChargeContext,
        first: Mapping[str, Any] | None,
        written: Update,
    ) -> tuple[Request, ChargeContext] | None:
        """Reserve all that the call can use, or make it the run's last; `None` if it is refused."""
        # Return who is charged, too: a call may have waited until windows or limits changed.
        kernel, last = self._kernel, bool(ledger(step.state).get("final"))
        while True:
            shaped = await kernel.shape_request(mode, request)
            batch = self._reserving_batch(shaped, step, is_retry=first is None)
            batch, result = await kernel.check(mode, batch)
            step = step._replace(limits=batch.original_limits, places=batch.places)
            batch.counted, batch.frozen = result.used, result.frozen
            if last or all(result.admitted) or not _may_be_the_last(batch, result):
                break
            # Ask for a call without tools, the last one of its budget.
            _, breaches = batch.decide(result)
            last, state = True, cast("dict[str, Any]", copy(request.state))
            state[LEDGER] = merge_ledgers(ledger(state), final_call(breaches))
            request = compat.with_state(request, state)
        if not all(result.admitted):
            written.update(await self._refuse(mode, batch, result, first))
            return None
        (plan,) = batch.plans
        reserved = {
            rule.limit.counter: plan.demand.amounts[run_counter(rule.limit)]
            for rule in plan.rules
            if rule.is_budget
        }
        key = batch.sent.idempotency_key if batch.answered and batch.sent is not None else ""
        step = step._replace(reserved=reserved, request=key)
        try:
            if first:
                both = _result_of_both_checks(batch, first, result)
                written.update(await kernel.record(mode, *both) or {})
        except (Exception, CancelledError):
            # The call is not made.
            await self._charging.settle(mode, settlements(step, batch.used))
            raise
        if last and batch.ledger.get("final"):
            final = Ledger(final=batch.ledger["final"])
            if reason := batch.ledger.get("final_reason"):
                final["final_reason"] = reason
            written[LEDGER] = merge_ledgers(written.get(LEDGER, {}), final)
        return shaped, step

    def _reserving_batch(self, request: Request, step: ChargeContext, *, is_retry: bool) -> Batch:
        """Return the batch that reserves all that the call can use."""
        if request.model is not None:
            # A price that is missing is an error before anything is charged.
            model_usage = asked_of(request.model, request.model_settings)
            self._pricing.check(model_usage, agent=step.call.agent)
        reserving = []
        lease = LEASE if self.has_reserves else None
        for budget in step.limits.budgets:
            reserve = getattr(budget.limit, "reserve", None)
            bound = computed(reserve(request)) if callable(reserve) else reserve or 0
            amount = self._pricing.most(budget.limit, bound)
            reserving.append(budget.with_meters(amount=amount, lease=lease))
        places = step.places
        if self.waits and not is_retry:
            # Attempts of one call count as one call, and the first check has counted the run's.
            for rule in step.limits.rules:
                if not rule.is_budget and _is_waiting(rule.limit):
                    counted = rule.with_meters(maximum=None, amount=0).meters[:2]
                    quotas = rule.meters[2:]
                    reserving.append(rule._replace(meters=(*counted, *quotas)))
                    names = {meter.counter for meter in counted} - {one.counter for one in quotas}
                    places = {name: place for name, place in places.items() if name not in names}
        task = f"{self._kernel.name}.held"
        batch = model_batch(request.state, request.runtime, step.limits, places, task=task)
        # The name is new each time, because another attempt of the task may reserve something, too.
        batch.name = token_hex(16)
        batch.make = lambda limits, places: self._reserving_batch(
            request, step._replace(limits=limits, places=places), is_retry=is_retry
        )
        if request.model is not None:
            batch.model = request.model, request.model_settings
        batch.used |= self._charging.late.counts(batch.state)
        batch.limits = LimitSet(reserving)
        batch.stops = batch.limits.stops
        batch.set_plans([Plan.of(reserving)])
        return batch

    async def _refuse(
        self, mode: Mode, batch: Batch, result: AcquireResult, first: Mapping[str, Any] | None
    ) -> Update:
        """Return the update of a refused call; an error in it is raised after the model's step."""
        # Raised here, it would lose the update, and other middlewares would retry the call.
        conclusion = conclude_model(batch, result)
        update: Update = {**(conclusion.update or {})}
        update.pop("jump_to", None)
        error: Any = conclusion.error
        if error is not None:
            message = AIMessage(str(error), name=batch.context.own_name, id=str(uuid4()))
            numbers = [error.thread_count, error.run_count, error.thread_limit, error.run_limit]
            entries = {"error": [*numbers, str(error)]}
            update = {"messages": [message], LEDGER: Ledger(ended=message.id, own={OWN: entries})}
            self._memory(str(message.id))["decision"] = error.decision
        if first:
            # The first check has counted the call.
            counts = Counts(run_model=max(0, batch.used[OF_RUN] - 1))
            of_thread = max(0, batch.used[OF_THREAD] - 1)
            if any(not rule.is_budget for rule in batch.original_limits.rules):
                update[THREAD_MODEL] = of_thread
            else:
                counts["thread_model"] = of_thread
            update[LEDGER] = merge_ledgers(update[LEDGER], Ledger(counts=counts))
            if first["charged"]:
                refund = {key: -amount for key, amount in first["charged"].items()}
                corrections = (Correction(uuid4().hex, refund),)
                await self._charging.settle(mode, AcquireRequest("", "", corrections=corrections))
        batch.save(OWN, self._charging.late.of(batch.state))
        hook_result = conclusion._replace(update=update)
        return await self._kernel.record(mode, batch, hook_result) or update


def _is_waiting(limit: Limit) -> bool:
    """Return whether calls wait for room in the quotas of a limit."""
    return limit.enforce and getattr(limit, "wait", None) is not None


def without_waits(rule: Rule, batch: Batch) -> Rule:
    """Return a rule without the quotas for which calls wait."""
    return rule.stored(rule.meters[:2], batch.places) if _is_waiting(rule.limit) else rule


def _result_of_both_checks(
    batch: Batch, first: Mapping[str, Any], second: AcquireResult
) -> tuple[Batch, HookResult]:
    """Return the decision about an admitted call by all limits, and the batch of all checks."""
    # The counts in the state have the call by now.
    used = first["used"] | {
        name: second.used[name]
        for name in batch.demands[0].amounts
        if name not in (OF_THREAD, OF_RUN)
    }
    reserving = {rule.limit.name: rule for rule in batch.limits.budgets}
    both = LimitSet(
        reserving.get(rule.limit.name)
        # Without the store, no quota has checked it.
        or rule._replace(meters=tuple(meter for meter in rule.meters if meter.counter in used))
        for rule in batch.original_limits.raised(first["granted"]).rules
    )
    refused, frozen = first["refused"] | {**second.refused[0]}, (*first["frozen"], *second.frozen)
    whole = replace(batch, limits=both, plans=[Plan.of(both.rules)], used=used)
    whole.counted, whole.granted, whole.frozen = used, {**first["granted"], **batch.granted}, frozen
    verdicts, _ = whole.decide(AcquireResult(used, (refused,), (True,), frozen=frozen))
    by = batch.ledger.get("downgraded") or ""
    return whole, HookResult([replace(verdict, downgraded_by=by) for verdict in verdicts])


def _may_be_the_last(batch: Batch, result: AcquireResult) -> bool:
    """Return whether all limits that refuse a call would let it be the last one."""
    if STORE in result.refused[0].values():
        return False
    by_name = batch.limits.by_name
    refusing = [by_name[name] for name in result.refused[0] if by_name[name].enforce]
    return all(limit.exit_behavior == "finalize" for limit in refusing)
