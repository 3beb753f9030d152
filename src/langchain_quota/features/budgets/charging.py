"""Charges model runs to budgets, in their units, at the prices of the models."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.concurrency import Form
from langchain_quota.decide import status
from langchain_quota.decision import Call
from langchain_quota.errors import UnknownPriceError
from langchain_quota.features.budgets.late_use import LateUse, added
from langchain_quota.features.budgets.model_runs import ModelRun
from langchain_quota.features.budgets.prices import cost, highest_cost, priced
from langchain_quota.features.budgets.reports import charged_tokens
from langchain_quota.features.budgets.settlements import Hold, Used, mirror_root_run, settlements
from langchain_quota.limits import Limit
from langchain_quota.limits.budgets import CostLimit, Prices
from langchain_quota.limits.model_usage import ModelUsage
from langchain_quota.limits.options import BUDGETS, MICRODOLLARS, whole_amount
from langchain_quota.rule import ResolvedLimits
from langchain_quota.stores.client import StoreClient
from langchain_quota.telemetry.recorder import Recorder

MOST_KNOWN = 1_000
"""The most models that are known to have a price. Callers of a gateway may invent names."""


class Step(NamedTuple):
    """Who is charged: the state of a hook, the limits at that moment, and the call."""

    state: Mapping[str, Any]
    limits: ResolvedLimits
    call: Call


class Charging:
    """Charges model runs, and keeps what they have used until it is in the state."""

    def __init__(
        self,
        limits: Sequence[Limit],
        *,
        prices: Prices | None,
        allow_unknown: bool,
        store: StoreClient | None,
        recorder: Recorder,
    ) -> None:
        self.late = LateUse()
        self._store = store
        counters = {limit.counter for limit in limits}
        self._counters = [each for each in BUDGETS if each in counters]
        self._prices = prices
        self._allow_unknown = allow_unknown
        self._recorder = recorder
        # What a run is charged if its price is not known when it is done.
        reserves = [
            whole_amount(limit.unit, "reserve", limit.reserve)
            for limit in limits
            if isinstance(limit, CostLimit)
            and limit.reserve is not None
            and not callable(limit.reserve)
        ]
        self._least_cost = max(reserves, default=1)
        self._known: set[ModelUsage] = set()
        # By the name that was asked for: runs that had no price when they were paid.
        self._unpriced: dict[str, ModelUsage] = {}

    async def charge(
        self,
        form: Form | None,
        step: Step,
        runs: Sequence[ModelRun],
        hold: Hold | None = None,
        *,
        task: str | None = None,
    ) -> Mapping[str, Any]:
        """Charge model runs, those of the agent's own call in place of what is held for it.

        Without a form nobody waits for the store. It gives what is to be written to the state.
        """
        (state, limits, call), held = step, hold or Hold()
        used: list[Used] = [(run, self._amounts(run, held.amounts, call.agent)) for run in runs]
        spent = added(amounts for _, amounts in used)
        before = self.late.counts(state)
        # This process keeps it, whatever happens next.
        written = self.late.keep(state, spent, task)
        answer = await self.settle(form, settlements(limits, before, used, held))
        mirror_root_run(limits, answer)
        for run, amounts in used:
            self._recorder.record_spent(
                call.agent,
                call.thread_id,
                [
                    (each.limit.name, each.limit.unit, amounts[each.limit.counter])
                    for each in limits.budgets
                ],
                model=next(iter(run.usage.models), ""),
                estimated=run.usage.estimated,
            )
        if form is None and hold is None:
            # The next hook shows it.
            return written
        counts: Mapping[str, int] = {}
        if answer is not None:
            counts = answer.used
            self._recorder.record_granted(call.agent, limits.newly_raised(answer.newly_granted))
            limits = limits.raised(answer.granted)
        for each in limits.budgets:
            amount = spent.get(each.limit.counter, 0)
            known = dict(before)
            for check in each.checks:
                after = counts.get(check.key or "")
                if after is not None:
                    known[check.counter] = max(0, after - amount)
                known.setdefault(check.counter, 0)
            shown = status(each, known, 1, spent=amount)
            self._recorder.record_charge(call, shown, is_call=hold is not None)
        return written

    async def settle(self, form: Form | None, sent: AcquireRequest | None) -> AcquireResult | None:
        """Have the store make corrections; its answer by key, or `None` without one."""
        answer: AcquireResult | None = None
        if sent is not None and self._store is not None:
            if form is None:
                self._store.settle_soon(sent)
            else:
                answer = await self._store.settle(form, sent)
        return answer

    def check_price(self, asked: ModelUsage, agent: str | None) -> None:
        """Check that a model has a price, before a call of it is paid."""
        # If its price failed after an earlier call, that call must have a price first.
        if self._prices is None or self._allow_unknown:
            return
        failed = self._unpriced.get(asked.request_model)
        if failed is None and asked in self._known:
            return
        try:
            if failed is None:
                priced(asked, self._prices)
            else:
                _priced_again(failed, self._prices)
        except UnknownPriceError as error:
            self._recorder.record_unknown_price(agent, error.model)
            raise
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known.add(asked)
        self._unpriced.pop(asked.request_model, None)

    def most(self, limit: Limit, bound: object) -> int:
        """The bound of a call, in the unit of a limit."""
        if not isinstance(bound, ModelUsage):
            return whole_amount(limit.unit, f"reserve of limit {limit.name!r}", bound)
        if limit.counter != MICRODOLLARS:
            return charged_tokens(bound, limit.counter)
        try:
            return 0 if self._prices is None else highest_cost(bound, self._prices)
        except UnknownPriceError:
            if self._allow_unknown:
                return 0
            raise

    def _amounts(self, run: ModelRun, held: Mapping[str, int], agent: str | None) -> dict[str, int]:
        """What a run is charged, by counter."""
        # A run that was cut off is charged at least what was held for it: its use is only an
        # estimate from what had arrived.
        usage = run.usage
        # A run whose price fails is charged what was held for it.
        least_cost = max(held.get(MICRODOLLARS, 0), self._least_cost)
        least = held if usage.estimated and not run.succeeded else {}
        return {
            counter: max(
                least.get(counter, 0),
                self._cost(usage, agent, least_cost)
                if counter == MICRODOLLARS
                else charged_tokens(usage, counter),
            )
            for counter in self._counters
        }

    def _cost(self, usage: ModelUsage, agent: str | None, least: int) -> int:
        """What a run costs, in microdollars. The run is paid already: nothing is raised."""
        if self._prices is None:
            return 0
        try:
            return cost(usage, self._prices)
        except UnknownPriceError as error:
            self._recorder.record_unknown_price(agent, error.model)
        except Exception as error:  # noqa: BLE001 - the user's function
            self._recorder.record_error("prices", error)
        if self._allow_unknown:
            return 0
        self._unpriced[usage.request_model] = usage
        return least


def _priced_again(failed: ModelUsage, prices: Prices) -> None:
    """Check that a run has a price by now that had none when it was paid."""
    model = next(iter(failed.models), "")
    try:
        cost(failed, prices)
    except UnknownPriceError as error:
        reason = "an earlier call is paid, and what answered has no price: give it, prices="
        raise UnknownPriceError(model, failed.provider, reason=reason) from error
    except Exception as error:
        reason = (
            f"prices failed for an earlier call that was paid ({type(error).__name__}: {error})"
        )
        raise UnknownPriceError(model, failed.provider, reason=reason) from error
