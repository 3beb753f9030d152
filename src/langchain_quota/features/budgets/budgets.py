"""Budgets of tokens and money: looked at before a model call, held around it, charged after it.

A call is let through before its request is known, if anything is left. With a `reserve`, the call
asks for all that it can use when its request is known. A callback handler sees the model runs of a
call: retries, fallbacks and second calls, too. Their use is added to the counts of the state and of
the store, where it replaces what was held.
"""

from asyncio import CancelledError
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple
from uuid import uuid4

from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain_core.messages import AIMessage

from langchain_quota import messages
from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, admit
from langchain_quota.arguments import check_choice, check_switch
from langchain_quota.concurrency import Form
from langchain_quota.decision import STORE
from langchain_quota.errors import ModelCallLimitExceededError
from langchain_quota.features.budgets.charging import Charging
from langchain_quota.features.budgets.estimates import asked_of
from langchain_quota.features.budgets.late_use import Late, LateUse, added, spending
from langchain_quota.features.budgets.model_runs import (
    ModelRun,
    ModelRunCollector,
    collect_model_runs,
)
from langchain_quota.features.budgets.other_runs import OtherRuns, forget_refused, root_models
from langchain_quota.features.budgets.prices import check_prices, resolve_prices
from langchain_quota.features.budgets.settlements import mirror_root_run, settlements
from langchain_quota.features.budgets.spending import record_run, record_standing
from langchain_quota.middleware.calls import (
    OF_RUN,
    OF_THREAD,
    Batch,
    Conclusion,
    Update,
    budget_counts,
    model_batch,
    model_call,
    model_context,
    with_ledger,
)
from langchain_quota.middleware.conclude import conclude_model
from langchain_quota.middleware.feature import Feature, Handler
from langchain_quota.model_usage import ModelUsage
from langchain_quota.rule import Asked, ResolvedLimits
from langchain_quota.state import (
    LEDGER,
    NOTHING_SPENT,
    THREAD_MODEL,
    Admitted,
    Ledger,
    ledger,
    merge_ledgers,
)

LEASE = 900
"""How long a store holds an amount for a model call, in seconds. Then it is given back, for example
because the process has died. A call that takes longer is charged nevertheless; others may have used
its amount by then. Clients of providers give up after 600 seconds by default."""

MOST_KNOWN = 10_000
"""For how many tasks this process knows that their model call was made."""


class Used(NamedTuple):
    """What one model run has used."""

    run: ModelRun
    amounts: Mapping[str, int]


class Hold(NamedTuple):
    """What is held for a call."""

    # By the model's counter.
    amounts: Mapping[str, int]
    # The request that holds it, and the store's keys, each with the model's counter.
    request: str = ""
    keys: Mapping[str, str] = {}


class Budgets(Feature):
    """Charges the model calls of an agent to its budgets."""

    @classmethod
    def of(cls, limiter: Any) -> "Budgets | None":
        """The budgets among the limits; `None` if there are none."""
        options = limiter._options  # noqa: SLF001 - the kernel gives them
        units = {limit.unit for limit in limiter.limits}
        prices, all_models = options["prices"], options["charge_all_models"]
        check_choice("unknown_price", options["unknown_price"], ("error", "allow"))
        check_switch("charge_all_models", all_models)
        allows = options["unknown_price"] == "allow"
        if "microdollars" not in units and (prices is not None or allows):
            check_prices(prices)
            in_vain = "unknown_price='allow'" if prices is None else "prices="
            raise ValueError(
                f"{in_vain} needs a limit of costs: add a CostLimit to the limits, or leave it out"
            )
        if units == {"calls"} and all_models:
            raise ValueError(
                "charge_all_models=True needs a budget to charge: add a TokenLimit or a CostLimit "
                "to the limits"
            )
        return None if units == {"calls"} else cls(limiter, resolve_prices, prices, allows=allows)

    def __init__(
        self, limiter: Any, resolve: Callable[[Any], Any], prices: Any, *, allows: bool
    ) -> None:
        limits = limiter.limits
        self._limiter = limiter
        self._store, self._recorder = limiter._store, limiter._recorder  # noqa: SLF001 - the same
        self._made_at = limiter._made_at  # noqa: SLF001 - the same
        in_money = any(limit.unit == "microdollars" for limit in limits)
        self._charging = Charging(
            limits,
            prices=resolve(prices) if in_money else None,
            allow_unknown=allows,
            recorder=self._recorder,
        )
        # Whether a call asks for its reserve when its request is known.
        self._reserves = any(getattr(limit, "reserve", None) is not None for limit in limits)
        self._late = LateUse()
        # The tasks whose model call was made: made again, a call is judged again.
        self._made: OrderedDict[str, None] = OrderedDict()
        # By the id of the final message: what is raised behind the model's step.
        self._errors: OrderedDict[str, Exception] = OrderedDict()
        self._others: OtherRuns | None = None
        if limiter._options["charge_all_models"]:  # noqa: SLF001 - the same
            self._others = OtherRuns(
                amounts=lambda run, agent: self._charging.amounts(run, {}, lambda: agent),
                late=self._late,
                store=self._store,
                recorder=self._recorder,
            )

    def begin(self, state: Any, written: Ledger) -> None:
        """A new run has used nothing; its thread has what calls of the last run have used."""
        self._late.forget_written(state)
        late = self._late.of(state)
        written.update({**(spending(state, late) if late else {}), **NOTHING_SPENT})

    async def known(self, form: Form, state: Any, runtime: Any, limits: ResolvedLimits) -> None:
        """Charge what tools, sub-agents and other middlewares have used."""
        if self._others is not None:
            await self._others.settle(form, state, runtime, limits)

    def checks(self, batch: Batch) -> None:
        """Know what is used of the budgets."""
        if batch.pending is None:
            self._late.forget_written(batch.state)
            late = self._late.of(batch.state)
            batch.used |= budget_counts(batch.state, late.amounts if late else {})
            if late is not None:
                batch.written.update(spending(batch.state, late))

    def concluded(self, batch: Batch, conclusion: Conclusion) -> Conclusion:
        """A call with a reserve is told when its request is known."""
        if (
            not self._reserves
            or batch.pending is not None
            or conclusion.update is None
            or "jump_to" in conclusion.update
        ):
            return conclusion
        keys = batch.sent.keyed(batch.hits[0].amounts) if batch.sent else {}
        batch.written["admitted"] = Admitted(
            used=dict(batch.counted), keys={key: amount for key, amount in keys.items() if amount}
        )
        return conclusion._replace(decisions=())

    def after_model(self, state: Any, *, saved: bool) -> None:
        """Learn what is written; raise what a refused call could not raise in the model's step."""
        if saved and self._others is not None:
            self._others.learn_state(state)
        if saved:
            self._late.forget_written(state)
        known = ledger(state)
        error = known.get("error")
        if error is not None:
            *numbers, text = error
            raise self._errors.get(known.get("ended") or "") or ModelCallLimitExceededError(
                *numbers, message=text
            )

    async def around_model(
        self, form: Form, request: ModelRequest[Any], call: Handler, written: Update
    ) -> ModelResponse[Any] | None:
        """Hold what the call can use, make it, and charge what it has used."""
        limits = await self._limiter._limits_now(  # noqa: SLF001 - the kernel's
            form, "model", _state(request), request.runtime
        )
        task = model_context(_state(request), request.runtime).task(self._limiter.name)
        made_before = task is not None and task in self._made
        hold = Hold({})
        if self._reserves or made_before:
            request, hold, refused = await self._hold(form, request, limits, made_before, written)
            if refused is not None:
                written.update(refused)
                return None
        else:
            request = await self._limiter._shape(form, request)  # noqa: SLF001 - the same
        if task is not None:
            self._made[task] = None
            if len(self._made) > MOST_KNOWN:
                self._made.popitem(last=False)
        return await self._call(form, request, call, limits, hold, written)

    async def _hold(
        self,
        form: Form,
        request: ModelRequest[Any],
        limits: ResolvedLimits,
        made_before: bool,  # noqa: FBT001 - private
        written: Update,
    ) -> tuple[ModelRequest[Any], Hold, Update | None]:
        """Hold all that the call can use, or ask for a last call; what is written if refused."""
        limiter, last = self._limiter, bool(ledger(_state(request)).get("final"))
        while True:
            shaped = await limiter._shape(form, request)  # noqa: SLF001 - the kernel's
            batch = self._holding(shaped, limits)
            result = await limiter._acquire(form, batch)  # noqa: SLF001 - the kernel's
            if last or all(result.admitted) or not _may_be_the_last(batch, result):
                break
            # Ask for a call without tools, the last one of its budget.
            _, breaches = batch.decided(result)
            final = messages.final(breaches, is_last=True)
            last, request = True, with_ledger(request, Ledger(final=final))
        known = batch.known
        if not all(result.admitted):
            conclusion = conclude_model(batch, result)
            return shaped, Hold({}), await self._refuse(form, batch, conclusion, made_before)
        amounts: dict[str, int] = {}
        for each in batch.asked[0].limits:
            held = max(batch.hits[0].amounts[check.counter] for check in each.checks)
            amounts[each.limit.counter] = max(amounts.get(each.limit.counter, 0), held)
        hold = Hold(amounts)
        if batch.answered and batch.sent is not None:
            keys = {
                check.key: each.limit.counter
                for each in batch.asked[0].limits
                for check in each.checks
                if check.key is not None
            }
            hold = Hold(amounts, batch.sent.idempotency_key, keys)
        try:
            if self._reserves and not made_before and known.get("admitted"):
                told = self._told(batch, limits, result)
                update = await limiter._tell(form, batch, told)  # noqa: SLF001 - the same
                written.update(update or {})
        except (Exception, CancelledError):
            await self._charge(form, _given_back(hold))
            raise
        if last and known.get("final"):
            own = merge_ledgers(written.get(LEDGER, {}), Ledger(final=known["final"]))
            written[LEDGER] = own
        return shaped, hold, None

    def _holding(self, request: ModelRequest[Any], limits: ResolvedLimits) -> Batch:
        """What the call asks of the budgets, for all that it can use."""
        if request.model is not None:
            # The reserve is priced before anything is called.
            self._admits(request)(asked_of(request.model, request.model_settings))
        holding = []
        for each in limits.budgets:
            reserve = getattr(each.limit, "reserve", None)
            amount = self._charging.most(
                each.limit, reserve(request) if callable(reserve) else reserve or 0
            )
            lease = LEASE if self._reserves else None
            holding.append(each.with_checks(hit=amount, lease=lease))
        task = f"{self._limiter.name}.held"
        batch = model_batch(_state(request), request.runtime, limits, task=task)
        # Named anew: another attempt of the same task may hold something, too.
        batch.name, batch.refunds = token_hex(16), {}
        late = self._late.of(batch.state)
        batch.used |= budget_counts(batch.state, late.amounts if late else {})
        batch.limits = ResolvedLimits(holding)
        batch.stops = batch.limits.stops
        batch.ask([Asked.of(holding)])
        return batch

    def _told(self, batch: Batch, limits: ResolvedLimits, result: AcquireResult) -> Conclusion:
        """What is decided about the call by all limits, those that judged it before included."""
        admitted = batch.known.get("admitted")
        # The state has counted the call by now.
        held = {check.counter: result.used[check.counter] for check in batch.asked[0].checks}
        used = {**(admitted["used"] if admitted else {}), **held}
        others = [each for each in limits.limits if not each.is_budget]
        # Without the store, no quota has judged it.
        known = [
            each._replace(checks=tuple(one for one in each.checks if one.counter in used))
            for each in others
        ]
        by_name = {each.limit.name: each for each in (*known, *batch.limits.limits)}
        both = ResolvedLimits(by_name[each.limit.name] for each in limits.limits)
        every = replace(batch, limits=both, asked=[Asked.of(both.limits)], used=used)
        decisions, _ = every.decided(admit(every.hits, used, {}))
        return Conclusion(decisions)

    async def _refuse(
        self,
        form: Form,
        batch: Batch,
        conclusion: Conclusion,
        made_before: bool,  # noqa: FBT001 - private
    ) -> Update:
        """Write, and do not raise: an exception would lose the update, and others would retry."""
        update: Update = {**(conclusion.update or {})}
        error: Any = conclusion.error
        if error is not None:
            name = batch.context.own_name
            message = AIMessage(content=str(error), name=name, id=str(uuid4()))
            update = {"messages": [message]}
            numbers = [
                error.thread_count,
                error.run_count,
                error.thread_limit,
                error.run_limit,
            ]
            written = Ledger(ended=message.id, error=[*numbers, str(error)])
            update[LEDGER] = written
            self._errors[str(message.id)] = error
            if len(self._errors) > MOST_KNOWN:
                self._errors.popitem(last=False)
        update.pop("jump_to", None)
        admitted = batch.known.get("admitted")
        if not made_before:
            # It was let through and counted before.
            known: Ledger = update[LEDGER]
            known["run_model"] = max(0, batch.used[OF_RUN] - 1)
            of_thread = max(0, batch.used[OF_THREAD] - 1)
            if any(not each.is_budget for each in batch.given.limits):
                update[THREAD_MODEL] = of_thread
            else:
                known["thread_model"] = of_thread
            if admitted and admitted["keys"]:
                back = {key: -amount for key, amount in admitted["keys"].items()}
                made = Compensation(uuid4().hex, back)
                await self._charge(form, AcquireRequest("", "", compensations=(made,)))
        late = self._late.of(batch.state)
        if late is not None:
            update[LEDGER] = merge_ledgers(update[LEDGER], spending(batch.state, late))
        told = await self._limiter._tell(  # noqa: SLF001 - the kernel's
            form, batch, conclusion._replace(update=update)
        )
        return told or update

    async def _call(  # noqa: PLR0913, PLR0917 - all of one call
        self,
        form: Form,
        request: ModelRequest[Any],
        call: Handler,
        limits: ResolvedLimits,
        hold: Hold,
        written: Update,
    ) -> ModelResponse[Any]:
        """Call the model, and charge what it has used in place of what is held."""
        with collect_model_runs(self._admits(request)) as runs, self._left_out(runs):
            try:
                response = await call(request)
            except BaseException as error:
                used, before, late, sent = self._paid(request, limits, hold, runs)
                if form and not isinstance(error, Exception | CancelledError):
                    # The event loop is closing: nothing can be awaited.
                    if self._store is not None and sent is not None:
                        self._store.settle_soon(sent)
                    answer = None
                else:
                    answer = await self._charge(form, sent)
                self._show(request, limits, used, before, answer)
                raise
        used, before, late, sent = self._paid(request, limits, hold, runs)
        answer = await self._charge(form, sent)
        self._show(request, limits, used, before, answer)
        for run, _ in used:
            if run.usage.estimated and run.status == "success":
                model = next(iter(run.usage.models), "")
                self._recorder.warn_of_estimate(model, self._made_at)
        own = Ledger(**spending(_state(request), late), admitted=None)
        written[LEDGER] = merge_ledgers(written.get(LEDGER, {}), own)
        return response

    def _paid(
        self,
        request: ModelRequest[Any],
        limits: ResolvedLimits,
        hold: Hold,
        runs: ModelRunCollector,
    ) -> tuple[Sequence[Used], Mapping[str, int], Late, AcquireRequest | None]:
        """What a finished call has used: this process keeps it, whatever happens next."""
        forget_refused(runs)
        state = _state(request)
        agent = partial(_agent_of, request)
        used = [Used(run, self._charging.amounts(run, hold.amounts, agent)) for run in runs.runs()]
        late = self._late.of(state)
        before = budget_counts(state, late.amounts if late else {})
        late = self._late.keep(state, added(each.amounts for each in used))
        sent = settlements(
            limits,
            before,
            [(each.run.id, each.amounts) for each in used],
            held=hold.request,
            held_keys=hold.keys,
            seen_by_others=root_models()[0] is not None or any(each.run.shared for each in used),
        )
        return used, before, late, sent

    def _show(
        self,
        request: ModelRequest[Any],
        limits: ResolvedLimits,
        used: Sequence[Used],
        before: Mapping[str, int],
        answer: AcquireResult | None,
    ) -> None:
        """Make visible what a call was charged, and what the store has granted."""
        mirror_root_run(limits, answer)
        call = model_call(_state(request), request.runtime)
        for run, amounts in used:
            record_run(self._recorder, call, limits, run, amounts)
        spent = added(each.amounts for each in used)
        record_standing(self._recorder, call, limits, before=before, spent=spent, answer=answer)

    async def _charge(self, form: Form, sent: AcquireRequest | None) -> AcquireResult | None:
        """Have the store make corrections; its answer by key, or `None` without one."""
        if sent is None or self._store is None:
            return None
        answer: AcquireResult | None = await self._store.settle(form, sent)
        return answer

    def _admits(self, request: ModelRequest[Any]) -> Callable[[ModelUsage], None]:
        """A check that a model has a price, also if a middleware has chosen another model."""
        return partial(self._charging.check_price, agent=partial(_agent_of, request))

    def _left_out(self, runs: ModelRunCollector) -> AbstractContextManager[None]:
        """While the block runs, leave its model runs to the call that makes them."""
        return nullcontext() if self._others is None else self._others.leave_out(runs)


def _may_be_the_last(batch: Batch, result: AcquireResult) -> bool:
    """Whether all limits that refuse a call would let it be the last one."""
    if STORE in result.refused[0].values():
        return False
    by_name = batch.limits.by_name
    refusing = [by_name[name] for name in result.refused[0] if by_name[name].enforce]
    return all(limit.exit_behavior == "finalize" for limit in refusing)


def _given_back(hold: Hold) -> AcquireRequest | None:
    """A request that gives back what is held for a call that is not made; `None` for nothing."""
    if not hold.keys:
        return None
    made = Compensation(uuid4().hex, dict.fromkeys(hold.keys, 0), settles=hold.request)
    return AcquireRequest("", "", compensations=(made,))


def _agent_of(request: ModelRequest[Any]) -> str | None:
    """The name of the agent that makes a call."""
    return model_call(_state(request), request.runtime).agent


def _state(request: ModelRequest[Any]) -> Mapping[str, Any]:
    return request.state
