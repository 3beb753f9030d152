"""The second check of a model call with budgets: when its request is known, before it is made.

It reserves all that the call can use, and refuses the call or makes it the last of its run if there
is too little left.
"""

import time
from asyncio import CancelledError
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from secrets import token_hex
from typing import Any, cast
from uuid import uuid4

from langchain_core.messages import AIMessage

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction
from langchain_quota.core.plans import LimitSet, Meter, Plan, Rule, run_counter
from langchain_quota.features.budgets.charging import (
    OWN,
    ChargeContext,
    Charging,
    TaskMemory,
    settlements,
)
from langchain_quota.features.budgets.model_run import ModelRun
from langchain_quota.features.budgets.prices import Pricing
from langchain_quota.features.budgets.usage import asked_of, estimated_size, shortened
from langchain_quota.limits import Limit
from langchain_quota.limits.budgets import TokenLimit
from langchain_quota.limits.call import CALL, STORE, ModelUsage
from langchain_quota.middleware.calls import OF_RUN, OF_THREAD, Change, Step, Update, model_step
from langchain_quota.middleware.conclude import conclude_model, final_call, not_concluded
from langchain_quota.middleware.context import call_context
from langchain_quota.middleware.feature import Request
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import (
    LEDGER,
    THREAD_MODEL,
    Counts,
    Entries,
    Ledger,
    State,
    feature_ledger,
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

_DENSEST = 2
"""How many times the estimated tokens a text may have."""


def first_check(step: Step, change: Change) -> Entries:
    """Return the result of the check before a model call, when its request is not known yet.

    It has the counts before the call (`used`), the limits on calls in a dry run that would refuse
    it, with the scopes (`refused`), the counts of `frozen` subjects, by the name of the count what
    grants added to limits (`granted`), and by key what a store charged (`charged`).
    """
    budgets = {budget.limit.name for budget in step.limits.budgets}
    refused = {
        limit: scope
        for verdict in change.verdicts
        for limit, scope in verdict.refused.items()
        if limit not in budgets
    }
    # Of a store that did not answer, a correction charges this, too.
    keys = step.sent.keyed(step.sent.demands[0].amounts) if step.sent else {}
    return {
        "used": {**step.result.used},
        "refused": refused,
        "frozen": [*step.result.frozen],
        "granted": {**step.result.granted},
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
        self._call_limits = [
            limit
            for limit in kernel.limits
            if isinstance(limit, TokenLimit) and limit.call_limit is not None
        ]
        self.has_reserves = bool(reserving or self._call_limits)
        """Whether a call asks for its reserve, or for its size, when its request is known."""
        self.waits = any(map(_is_waiting, reserving))
        """Whether calls wait for room here, and not in the first check."""

    async def reserve(
        self,
        mode: Mode,
        request: Request,
        charge: ChargeContext,
        first: Mapping[str, Any] | None,
        written: Update,
    ) -> tuple[Request, ChargeContext] | None:
        """Reserve all that the call can use, or make it the run's last; `None` if it is refused."""
        # Return who is charged, too: a call may have waited until windows or limits changed.
        kernel, last = self._kernel, bool(ledger(charge.state).get("final"))
        is_shortened, started, waited = False, time.time_ns(), 0.0
        while True:
            shaped = await kernel.shape_request(mode, request)
            step = self._reserving_step(shaped, charge, is_retry=first is None)
            step = await kernel.admit(mode, step._replace(started=started, waited=waited))
            # A call that asks for less is the same call, which has waited before.
            waited = step.waited
            charge = charge._replace(limits=step.original_limits, places=step.places)
            if not (all(step.result.admitted) or is_shortened):
                is_shortened, shorter = True, self._shortened(shaped, step)
                if shorter is not None:
                    request = request.override(model_settings=shorter.model_settings)
                    continue
            if last or all(step.result.admitted) or not _may_be_the_last(step):
                break
            # Ask for a call without tools, the last one of its budget.
            _, breaches = step.decide()
            last, state = True, cast("dict[str, Any]", copy(request.state))
            state[LEDGER] = merge_ledgers(ledger(state), final_call(breaches))
            request = compat.with_state(request, state)
        if not all(step.result.admitted):
            written.update(await self._refuse(mode, step, first))
            return None
        (plan,) = step.plans
        reserved = {
            rule.limit.counter: plan.demand.amounts[run_counter(rule.limit)]
            for rule in plan.rules
            if rule.is_budget
        }
        key = step.sent.idempotency_key if step.answered and step.sent is not None else ""
        charge = charge._replace(reserved=reserved, request=key)
        try:
            if first:
                both = _result_of_both_checks(step, first)
                written.update(await kernel.record(mode, *both) or {})
        except (Exception, CancelledError):
            # The call is not made.
            await self._charging.settle(mode, settlements(charge, step.used))
            raise
        if last and step.ledger.get("final"):
            final = Ledger(final=step.ledger["final"])
            if reason := step.ledger.get("final_reason"):
                final["final_reason"] = reason
            written[LEDGER] = merge_ledgers(written.get(LEDGER, {}), final)
        return shaped, charge

    def _reserving_step(self, request: Request, charge: ChargeContext, *, is_retry: bool) -> Step:
        """Return the step that reserves all that the call can use."""
        if request.model is not None:
            # A price that is missing is an error before anything is charged.
            model_usage = asked_of(request.model, request.model_settings)
            self._pricing.check(model_usage, agent=charge.call.agent)
        reserving = []
        lease = LEASE if self.has_reserves else None
        for budget in charge.limits.budgets:
            reserve = getattr(budget.limit, "reserve", None)
            bound = computed(reserve(request)) if callable(reserve) else reserve or 0
            amount = self._pricing.most(budget.limit, bound)
            reserving.append(budget.with_meters(amount=amount, lease=lease))
        sizes = {f"{CALL} {limit.counter}": 0 for limit in self._call_limits}
        size = self._size(request, charge.state) if sizes else 0
        for limit in self._call_limits:
            rule = next((one for one in reserving if one.limit is limit), None)
            reserving = [one for one in reserving if one is not rule]
            rule = rule or Rule.of(limit, thread=None, run=None)
            meter = Meter(CALL, f"{CALL} {limit.counter}", limit.call_limit, amount=size)
            reserving.append(rule._replace(meters=(*rule.meters, meter)))
        places = charge.places
        if self.waits and not is_retry:
            # Attempts of one call count as one call, and the first check has counted the run's.
            for rule in charge.limits.rules:
                if not rule.is_budget and _is_waiting(rule.limit):
                    counted = rule.with_meters(maximum=None, amount=0).meters[:2]
                    quotas = rule.meters[2:]
                    reserving.append(rule._replace(meters=(*counted, *quotas)))
                    names = {meter.counter for meter in counted} - {one.counter for one in quotas}
                    places = {name: place for name, place in places.items() if name not in names}
        task = f"{self._kernel.name}.held"
        asked = request.state, request.runtime, call_context(request.runtime)
        model = None if request.model is None else (request.model, request.model_settings)
        step = model_step(*asked, charge.limits, places, task=task, model=model)
        limits = LimitSet(reserving)
        used = {**self._charging.late.counts(step.state), **sizes}
        return step.using(used).with_plans(
            [Plan.of(reserving)],
            limits=limits,
            stops=limits.stops,
            # The name is new each time: another attempt of the task may reserve something, too.
            name=token_hex(16),
            remake=lambda limits, places: self._reserving_step(
                request, charge._replace(limits=limits, places=places), is_retry=is_retry
            ),
        )

    def _size(self, request: Request, state: State) -> int:
        """Estimate a request's tokens, scaled as the provider's report was to the last estimate."""
        reported, estimated = feature_ledger(state, OWN).get("size") or (1, 1)
        # Text is not that much denser: the rest is what the provider adds to every request.
        added = max(0, reported - _DENSEST * estimated)
        return int(added - (-estimated_size(request) * (reported - added) // estimated))

    def measured(self, request: Request, runs: Sequence[ModelRun]) -> Entries:
        """Return what the provider has reported of a request, beside the estimate."""
        reports = (
            run.usage.input_tokens
            for run in reversed(runs if self._call_limits else ())
            if run.succeeded and not (run.usage.estimated or run.usage.cached)
        )
        reported = next(reports, 0)
        return {"size": [reported, estimated_size(request)]} if reported else {}

    def _shortened(self, request: Request, step: Step) -> Request | None:
        """Return a request for the longest answer that fits; `None` if none does."""
        (refused,), used = step.result.refused, step.result.used
        rules: list[Any] = [
            rule
            for rule in step.plans[0].rules
            if rule.limit.enforce and rule.limit.name in refused
        ]
        floors = [int(rule.limit.min_output_tokens or 0) for rule in rules]
        if not all(floors) or step.result.frozen or {STORE, CALL} & {*refused.values()}:
            return None
        usage = computed(rules[0].limit.reserve(request))
        if not isinstance(usage, ModelUsage):
            return None

        def exceeds(tokens: int) -> bool:
            total = usage.input_tokens + tokens
            bound = replace(usage, output_tokens=tokens, total_tokens=total)
            return any(
                used[meter.counter] + self._pricing.most(rule.limit, bound) > meter.maximum
                for rule in rules
                for meter in rule.meters
                if meter.maximum is not None and meter.scope != CALL
            )

        longest, floor = usage.output_tokens, max(floors)
        fitting = bisect_left(range(longest), True, lo=min(floor, longest), key=exceeds) - 1
        return shortened(request, longest, fitting) if fitting >= floor else None

    async def _refuse(self, mode: Mode, step: Step, first: Mapping[str, Any] | None) -> Update:
        """Return the update of a refused call; an error in it is raised after the model's step."""
        if first and first["charged"]:
            refund = {key: -amount for key, amount in first["charged"].items()}
            corrections = (Correction(uuid4().hex, refund),)
            await self._charging.settle(mode, AcquireRequest("", "", corrections=corrections))
        # Raised here, it would lose the update, and other middlewares would retry the call.
        try:
            change = conclude_model(step)
        except Exception as failure:
            await self._kernel.record(mode, step, not_concluded(step, failure))
            raise
        update: Update = {**(change.update or {})}
        update.pop("jump_to", None)
        error: Any = change.error
        if error is not None:
            message = AIMessage(str(error), name=step.context.own_name, id=str(uuid4()))
            numbers = [error.thread_count, error.run_count, error.thread_limit, error.run_limit]
            entries = {"error": [*numbers, str(error)]}
            update = {"messages": [message], LEDGER: Ledger(ended=message.id, own={OWN: entries})}
            self._memory(str(message.id))["decision"] = error.decision
        if first:
            # The first check has counted the call.
            counts = Counts(run_model=max(0, step.used[OF_RUN] - 1))
            of_thread = max(0, step.used[OF_THREAD] - 1)
            if any(not rule.is_budget for rule in step.original_limits.rules):
                update[THREAD_MODEL] = of_thread
            else:
                counts["thread_model"] = of_thread
            update[LEDGER] = merge_ledgers(update[LEDGER], Ledger(counts=counts))
        change = change._replace(update=update).saving(OWN, self._charging.late.of(step.state))
        return await self._kernel.record(mode, step, change) or {}


def _is_waiting(limit: Limit) -> bool:
    """Return whether calls wait here for room in the quotas of a limit."""
    # Before a person can be asked, calls wait in the first check: the second one asks nobody.
    is_asking = limit.exit_behavior == "ask"
    return limit.enforce and not is_asking and getattr(limit, "wait", None) is not None


def without_waits(rule: Rule, step: Step) -> Rule:
    """Return a rule without the quotas for which calls wait."""
    return rule.stored(rule.meters[:2], step.places) if _is_waiting(rule.limit) else rule


def _result_of_both_checks(step: Step, first: Mapping[str, Any]) -> tuple[Step, Change]:
    """Return the decision about an admitted call by all limits, and the step of all checks."""
    # The counts in the state have the call by now.
    second = step.result
    used = first["used"] | {
        name: second.used[name]
        for name in step.demands[0].amounts
        if name not in (OF_THREAD, OF_RUN)
    }
    reserving = {rule.limit.name: rule for rule in step.limits.budgets}
    original = step.original_limits.raised(first["granted"]).rules
    rules = {
        # Without the store, no quota has checked it.
        rule.limit.name: rule._replace(meters=tuple(m for m in rule.meters if m.counter in used))
        for rule in original
    }
    both = LimitSet({**rules, **reserving}.values())
    refused, frozen = first["refused"] | {**second.refused[0]}, (*first["frozen"], *second.frozen)
    result = AcquireResult(used, (refused,), (True,), frozen=frozen)
    whole = step.with_plans([Plan.of(both.rules)], limits=both, result=result)
    verdicts, _ = whole.decide()
    by = step.ledger.get("downgraded") or ""
    return whole, Change([replace(verdict, downgraded_by=by) for verdict in verdicts])


def _may_be_the_last(step: Step) -> bool:
    """Return whether all limits that refuse a call would let it be the last one."""
    (refused,) = step.result.refused
    if STORE in refused.values():
        return False
    by_name = step.limits.by_name
    refusing = [by_name[name] for name in refused if by_name[name].enforce]
    return all(limit.exit_behavior == "finalize" for limit in refusing)
