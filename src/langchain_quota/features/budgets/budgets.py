"""Budgets of tokens and money: what model calls have used is charged when they are done.

A callback handler sees the model runs of a call: retries, fallbacks and second calls, too. Their
use is added to the counts of the state and of the store, where it replaces what was held. The graph
keeps no update of a call that fails: its use waits in this process for the next hook of the run, or
for the next run of the thread. It also waits if another middleware drops the update, and if none
can be written, as in a loop written by hand.
"""

from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Self

from langchain.agents.middleware.types import (
    ModelRequest,
    ModelResponse,
)

from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.features.budgets.charging import Charging, agent_of
from langchain_quota.features.budgets.estimates import asked_of
from langchain_quota.features.budgets.late_use import LateUse, added
from langchain_quota.features.budgets.let_through import LetThrough
from langchain_quota.features.budgets.model_runs import (
    ModelRun,
    ModelRunCollector,
    collect_model_runs,
)
from langchain_quota.features.budgets.other_runs import OtherRuns, forget_refused, root_models
from langchain_quota.features.budgets.prices import Prices
from langchain_quota.features.budgets.settlements import mirror_root_run, settlements
from langchain_quota.features.budgets.spending import record_run, record_standing
from langchain_quota.limits import Limit
from langchain_quota.middleware._calls import Late, Request, Update
from langchain_quota.middleware._form import Form, ask
from langchain_quota.middleware._model_calls import (
    bounded,
    budget_counts,
    made,
    pending,
    spending,
)
from langchain_quota.middleware._store import StoreClient
from langchain_quota.model_usage import ModelUsage
from langchain_quota.resolved import ResolvedLimits
from langchain_quota.state import LEDGER, NOTHING_SPENT, Ledger
from langchain_quota.telemetry.recorder import Recorder
from langchain_quota.user_line import UserLine

_NOTHING = nullcontext()


class _Used(NamedTuple):
    """What one model run has used."""

    run: ModelRun
    amounts: Mapping[str, int]


class Paid(NamedTuple):
    """A call that is over, and what it has used."""

    request: ModelRequest[Any]
    limits: ResolvedLimits
    used: Sequence[_Used]
    before: Mapping[str, int]
    late: Late


class Budgets:
    """Charges the model calls of an agent to its budgets."""

    def __init__(  # noqa: PLR0913 - keyword-only settings
        self,
        limits: Sequence[Limit],
        *,
        prices: Prices | None,
        allow_unknown: bool,
        store: StoreClient | None,
        recorder: Recorder,
        all_models: bool = False,
    ) -> None:
        self.charging = Charging(
            limits, prices=prices, allow_unknown=allow_unknown, recorder=recorder
        )
        """Computes what model runs are charged."""
        self.let_through = LetThrough()
        """The calls that may be made."""
        self._store = store
        self._made_at = UserLine.of_caller()
        self.recorder = recorder
        self.bounds_calls = any(getattr(limit, "reserve", None) is not None for limit in limits)
        """Whether a call asks for its reserve when its request is known."""
        self._late = LateUse()
        self.others: OtherRuns | None = None
        """Charges all model runs but those of the agent's own calls; `None` to charge none."""
        if all_models:
            self.others = OtherRuns(
                amounts=lambda run, agent: self.charging.amounts(run, {}, lambda: agent),
                late=self._late,
                store=store,
                recorder=recorder,
            )

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: a copy of the middleware charges the same counts."""
        return self

    async def call(
        self,
        form: Form,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
        limits: ResolvedLimits,
        held: Mapping[str, int],
    ) -> tuple[ModelResponse[Any], Update]:
        """Call the model; its answer, and what is to be written to the state."""
        admit = self._admits(request)
        with collect_model_runs(admit) as collector, self._left_out(collector):
            try:
                response = await handler(request)
            except BaseException as error:
                paid = self._paid(request, limits, held, collector)
                if form and not isinstance(error, Exception | CancelledError):
                    # The event loop is closing: nothing can be awaited.
                    answer = None
                    self._settle_soon(paid)
                else:
                    answer = await self._settle(form, paid)
                self._show(paid, answer)
                raise
        paid = self._paid(request, limits, held, collector)
        self._show(paid, await self._settle(form, paid))
        self._warn_of_estimates(paid)
        return response, _written(paid)

    def before_request(self, limits: ResolvedLimits) -> ResolvedLimits:
        """The limits that judge a call before its request is known: they hold no reserve yet."""
        # A run may stop before it makes the call: then only the least amount was held in vain.
        if not self.bounds_calls:
            return limits
        return ResolvedLimits(each.with_checks(hit=1) for each in limits.limits)

    def bounded(self, request: ModelRequest[Any], limits: ResolvedLimits, *, task: str) -> Request:
        """The request of the next model call to budgets, for all that it can use."""
        if request.model is not None:
            # The bound is priced before anything is called.
            self._admits(request)(asked_of(request.model, request.model_settings))
        bounds: dict[str, int] = {}
        for each in limits.budgets:
            reserve = getattr(each.limit, "reserve", None)
            if callable(reserve):
                bounds[each.limit.name] = self.charging.most(each.limit, reserve(request))
        state = _state(request)
        late, limits = self._late.of(state), ResolvedLimits(limits.budgets)
        asked = pending(state, request.runtime, limits, task=task, late=late)
        return bounded(asked, bounds)

    def late(self, state: Mapping[str, Any]) -> Late | None:
        """What calls have used that their run's state, as a hook gets it, does not have yet."""
        self._late.forget_written(state)
        return self._late.of(state)

    def learn_written(self, state: Mapping[str, Any]) -> None:
        """Learn from the state after a call what is written, and so no longer late."""
        if self.others is not None:
            self.others.learn_state(state)
        self._late.forget_written(state)

    def begun(self, state: Mapping[str, Any]) -> Ledger:
        """What is written when a run begins, with what calls of the last run have used."""
        late = self.late(state)
        known = Ledger() if late is None else spending(state, late)
        return Ledger(**{**known, **NOTHING_SPENT})

    def _admits(self, request: ModelRequest[Any]) -> Callable[[ModelUsage], None]:
        """A check that a model has a price, also if a middleware has chosen another model."""
        return partial(self.charging.check_price, agent=partial(agent_of, request))

    def _left_out(self, collector: ModelRunCollector) -> AbstractContextManager[None]:
        """While the block runs, leave its model runs to the call that makes them."""
        return _NOTHING if self.others is None else self.others.leave_out(collector)

    def _paid(
        self,
        request: ModelRequest[Any],
        limits: ResolvedLimits,
        held: Mapping[str, int],
        collector: ModelRunCollector,
    ) -> Paid:
        """What a finished call has used. This process keeps it, whatever happens next."""
        forget_refused(collector)
        state = _state(request)
        agent = partial(agent_of, request)
        used = [_Used(run, self.charging.amounts(run, held, agent)) for run in collector.runs()]
        before = budget_counts(state, self._late.of(state))
        late = self._late.keep(state, added(each.amounts for each in used))
        return Paid(request, limits, used, before, late)

    async def charge(self, form: Form, sent: AcquireRequest | None) -> AcquireResult | None:
        """Have the store make corrections; its answer by key, or `None` without one."""
        if sent is None or self._store is None:
            return None
        answer: AcquireResult | None = await ask(form, self._store, "settle", sent)
        return answer

    async def _settle(self, form: Form, paid: Paid) -> AcquireResult | None:
        """Have the store charge what was used; its answer by key, or `None` without one."""
        answer = await self.charge(form, _settlements(paid))
        mirror_root_run(paid.limits, answer)
        return answer

    def _settle_soon(self, paid: Paid) -> None:
        """Have the store charge what was used, without waiting for it."""
        sent = _settlements(paid)
        if self._store is not None and sent is not None:
            self._store.settle_soon(sent)

    def _warn_of_estimates(self, paid: Paid) -> None:
        """Warn of models that report nothing."""
        for run, _ in paid.used:
            if run.usage.estimated and run.status == "success":
                model = next(iter(run.usage.models), "")
                self.recorder.warn_of_estimate(model, self._made_at)

    def _show(self, paid: Paid, answer: AcquireResult | None) -> None:
        """Make visible what a call was charged, and what the store has granted."""
        request, limits, used, before, _ = paid
        call = made(_state(request), request.runtime)
        for run, amounts in used:
            record_run(self.recorder, call, limits, run, amounts)
        spent = added(each.amounts for each in used)
        record_standing(self.recorder, call, limits, before=before, spent=spent, answer=answer)


def _state(request: ModelRequest[Any]) -> Mapping[str, Any]:
    return request.state


def _settlements(paid: Paid) -> AcquireRequest | None:
    runs = [(each.run.id, each.amounts) for each in paid.used]
    seen_by_others = root_models()[0] is not None or any(each.run.shared for each in paid.used)
    state = _state(paid.request)
    return settlements(state, paid.limits, paid.before, runs, seen_by_others=seen_by_others)


def _written(paid: Paid) -> Update:
    """What is written to the state when a call is over."""
    state = _state(paid.request)
    return {LEDGER: Ledger(**spending(state, paid.late), held=None)}
